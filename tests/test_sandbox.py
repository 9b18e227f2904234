"""sandbox.py lets nothing out: hostile programs try, as this user and as one without rights."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import hostile_programs
from isogloss.evaluation import sandbox

ROOT = Path(__file__).parents[1]
NOBODY = 65534
GONE_WITHIN = 1.0  # seconds

needs_sandbox = pytest.mark.skipif(
    sandbox.why_unavailable() is not None, reason=str(sandbox.why_unavailable()))


def processes_with(text):
    """List the processes of this machine, but zombies, whose command line holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:  # it has ended
            continue
    return found


def assert_gone(text):
    """Wait until no process has a text in its command line; fail after a second."""
    deadline = time.monotonic() + GONE_WITHIN
    while processes_with(text):
        assert time.monotonic() < deadline, f"still there: {processes_with(text)}"


@pytest.fixture(scope="module")
def host():
    """A file, a listening socket and a process that nothing may reach: (secret, server, victim)."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "-p", "/tmp"], text=True).strip())
    folder.chmod(0o755)
    secret = folder / "secret"
    secret.write_text("the secret")
    secret.chmod(0o666)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(["sleep", "600"]) as victim,
    ):
        server.setblocking(False)
        yield secret, server, victim
        victim.kill()
    shutil.rmtree(folder)


def state_of_host():
    """Return {path: (mode, owner, attributes, times)} of all of the host that is in a box.

    Not when it was read, which others do, nor what Python keeps of its modules.
    """
    box = sandbox._box()
    state = {}
    for flag, path in pairwise(box):
        if flag not in ("--ro-bind", "--dev-bind"):
            continue
        for file in (Path(path), *Path(path).rglob("*")):
            if {"site-packages", "__pycache__"}.isdisjoint(file.parts):
                of = file.stat()
                attributes = {name: os.getxattr(file, name) for name in os.listxattr(file)}
                state[str(file)] = (of.st_mode, of.st_uid, of.st_gid, of.st_nlink, of.st_rdev,
                                    of.st_mtime_ns, of.st_ctime_ns, attributes)
    return state


def assert_nothing_escaped(results, host):
    secret, server, victim = host
    for name, (status, stdout) in results.items():
        assert "escaped" not in stdout and "secret" not in stdout, name
        assert status == hostile_programs.STATUS.get(name, status), name
    assert results.keys() == hostile_programs.PROGRAMS.keys()
    assert secret.read_text() == "the secret"
    assert [path.name for path in secret.parent.iterdir() if "secret" in path.name] == ["secret"]
    assert victim.poll() is None
    with pytest.raises(BlockingIOError):
        server.accept()
    assert_gone(str(hostile_programs.MIB * sandbox.MIB))


@needs_sandbox
def test_hostile_programs_do_not_get_out(host, monkeypatch):
    """As root, too: then the host's root owns what the box's user owns."""
    monkeypatch.setenv("SECRET", "the secret")
    secret, server, victim = host
    before = state_of_host()
    assert {"/dev/null", os.__file__} <= before.keys()
    results = hostile_programs.run_all(str(secret), server.getsockname()[1], victim.pid)
    assert_nothing_escaped(results, host)
    assert state_of_host() == before


@needs_sandbox
def test_hostile_programs_do_not_get_out_without_rights(host):
    """As `nobody`, with the system's interpreter, which that user can read."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    if os.getuid() != 0 or python is None:
        pytest.skip("needs root and an interpreter that everyone can read")
    secret, server, victim = host
    for name in ("isogloss/evaluation/sandbox.py", "tests/hostile_programs.py"):
        shutil.copy(ROOT / name, secret.parent)
        (secret.parent / Path(name).name).chmod(0o644)
    arguments = [str(secret), str(server.getsockname()[1]), str(victim.pid)]
    done = subprocess.run(
        [python, "hostile_programs.py", *arguments], cwd=secret.parent, user=NOBODY, group=NOBODY,
        extra_groups=[], env={"SECRET": "the secret", "PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=False)
    if "bubblewrap does not start" in done.stderr:
        pytest.skip(f"users without rights have no sandbox here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    assert_nothing_escaped(json.loads(done.stdout), host)


@needs_sandbox
def test_a_program_reads_and_prints_and_more_than_a_pipe_holds():
    program = "import math, hashlib, re, decimal\nprint(input()[::-1], math.pi)"
    assert sandbox.run(program, "ab ü\n") == ("ok", f"ü ba {3.141592653589793}\n")
    text = "line\n" * 300_000
    result = sandbox.run("import sys\nsys.stdout.write(sys.stdin.read())", text)
    assert result == ("ok", text)


@needs_sandbox
def test_every_ending_has_its_status():
    assert sandbox.run("print(1)\nraise SystemExit(3)") == ("error", "1\n")
    assert sandbox.run("this is no Python") == ("error", "")
    assert sandbox.run("import os\nos.kill(os.getpid(), 11)").status == "error"
    assert sandbox.run("x = bytearray(1 << 30)", mib=200).status == "error"
    asleep = sandbox.run("print(1, flush=True)\nimport time\ntime.sleep(60)", wall_seconds=0.5)
    assert asleep == ("timeout", "1\n")
    closed = sandbox.run("import os, time\nos.close(1)\ntime.sleep(60)", wall_seconds=0.5)
    assert closed.status == "timeout"
    assert sandbox.run("print('x' * 2000000)", output_mib=1) == ("output", "x" * sandbox.MIB)


@needs_sandbox
def test_hash_seeds_and_folders_are_the_same_in_each_run():
    program = "import os\nprint(hash('a'), os.getcwd(), os.listdir('.'))\nopen('x', 'w')"
    first = sandbox.run(program)
    assert first == sandbox.run(program)
    assert first.stdout.endswith("/tmp []\n")


@needs_sandbox
def test_a_program_ends_with_the_process_that_started_it():
    mib = 400 + os.getpid() % 1000  # by which its processes are found
    code = ("from isogloss.evaluation import sandbox; "
            f"sandbox.run('while True: pass', seconds=600, mib={mib})")
    mark = str(mib * sandbox.MIB)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        while not processes_with(mark):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert_gone(mark)


def test_without_bubblewrap_nothing_runs(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt install bubblewrap" in sandbox.why_unavailable()
    with pytest.raises(RuntimeError, match="apt install bubblewrap"):
        sandbox.run("print(1)")


def test_unsafe_runs_have_limits_alone():
    assert sandbox.run("print(input())", "a", unsafe=True) == ("ok", "a\n")
    assert sandbox.run("while True: pass", seconds=1, unsafe=True).status == "timeout"
    assert sandbox.run("x = bytearray(1 << 30)", mib=200, unsafe=True).status == "error"
    mark = "sandbox-test-child"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; " \
              f"time.sleep(60)', {mark!r}])"
    assert sandbox.run(program, unsafe=True, wall_seconds=1).status == "timeout"
    assert_gone(mark)


def test_the_file_works_as_a_copy(tmp_path):
    shutil.copy(ROOT / "isogloss" / "evaluation" / "sandbox.py", tmp_path)
    code = ("import sys; sys.path.insert(0, '.'); import sandbox; "
            "print(sandbox.run('print(1)', unsafe=True).stdout)")
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, check=True)
    assert done.stdout == "1\n\n"
