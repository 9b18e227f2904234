"""Follow the Dockerfile where there is no Docker: its steps in a folder that holds a system.

    debootstrap --variant=minbase --include=ca-certificates trixie ROOT     # as root, 150 MB
    python tests/dockerfile.py ROOT                                         # some minutes, 8 GB

FROM is what lies in ROOT, so the image's CUDA is not tried.  Files of this machine that clients of
a network need (names, certificates, pip.conf) are lent to ROOT; a user that the image has is made.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
LENT = "etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt", "etc/pip.conf"

# with its own mounts, which end with it
ENTER = """mount --bind /proc "$0/proc" && mount --bind /dev "$0/dev" &&
exec chroot --userspec="$1" "$0" /bin/sh -c "$2"
"""


def steps(text):
    """Return [(instruction, rest of the line)] of a Dockerfile."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]


def lend(root):
    """Copy to a system what its clients of a network need."""
    for name in LENT:
        source, target = Path("/") / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, target)


def copy(root, sources, target):
    """Copy files of the repository, which of "." are those that git knows."""
    place = root / target.lstrip("/")
    if sources != ["."]:
        place.mkdir(parents=True, exist_ok=True)
        for name in sources:
            shutil.copy(REPO / name, place)
        return
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    for name in listed:
        if (REPO / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, place / name)


def main(root):
    lend(root)
    variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    user = "root"
    folder = "/"

    def run(command):
        print(f"--- {user}: {command}", flush=True)
        words = ["unshare", "--mount", "/bin/sh", "-c", ENTER, root, user,
                 f"cd {folder} && {command}"]
        subprocess.run(words, check=True, env=variables | {"HOME": f"/home/{user}"},
                       stdin=subprocess.DEVNULL)

    for instruction, rest in steps((REPO / "Dockerfile").read_text()):
        if instruction == "FROM":
            print(f"--- {root} in place of {rest}")
            run("id ubuntu >/dev/null 2>&1 || useradd --create-home ubuntu")
        elif instruction == "ENV":
            name, value = rest.split("=", 1)
            variables[name] = value.replace(f"${name}", variables.get(name, ""))
        elif instruction == "COPY":
            *sources, target = rest.split()
            copy(root, sources, target)
        elif instruction == "RUN":
            run(rest)
        elif instruction == "USER":
            user = rest
        elif instruction == "WORKDIR":
            folder = rest
        elif instruction == "CMD":
            run(shlex.join(json.loads(rest)))
        else:
            raise SystemExit(f"Dockerfile: {instruction} is none that this script follows")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
