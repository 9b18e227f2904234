"""Run a Python program that nobody has read: no network, no files, no processes, no way out.

    result = run("print(input()[::-1])", stdin="abc", seconds=5, mib=512)
    result.status, result.stdout            # "ok", "cba\\n"

What a language model writes may delete files, open sockets, or go on after its test has ended, by
accident as well as by intent.  `run` starts it in bubblewrap (https://github.com/containers/
bubblewrap, Debian and Ubuntu: `apt install bubblewrap`), as root or as any user, where it finds

- the interpreter, its standard library and the shared libraries of both, read-only;
- a /tmp of its own, empty, of at most 16 MiB and some thousands of files; no other file can be
  written;
- no environment, no /proc, no device but the host's /dev/null;
- namespaces of its own: no network, no processes of others, no shared memory of others;
- a filter of system calls: no new process or thread, no socket, no tracing, no memory outside of
  what is counted, and no other mode, owner, time, attribute, lock or lease of any file: where root
  calls `run`, the box's user owns what is root's, /dev/null too;
- limits on memory, CPU time, wall time, and on what it prints.

When `run` returns, and also when the calling process is killed, nothing of it is left.

What this does not protect against: faults of the kernel, and programs that watch how long things
take.  It is a box for what a model writes, not for an adversary with an exploit.  A program can
print what it likes, so whoever judges it must compare what it printed outside of the box, with
values that were never inside.

Needs Linux on x86-64 or arm64, and bubblewrap.  Copy this file into your own repository.  License:
Apache-2.0 (see LICENSE).  Tests: tests/test_sandbox.py.
"""

import fcntl
import functools
import math
import os
import platform
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

MIB = 1 << 20
TMP_MIB = 16
TMP_FILES = 4096  # a file system in memory counts their names for nothing
LOOK_EVERY = 0.05  # seconds, at the number of files
NOBODY = "65534"
INSTALL = "apt install bubblewrap"


class Result(NamedTuple):
    """Hold what became of a program.

    Attributes:
        status: "ok": it ended with exit code 0; "error": with another one, or by a signal;
            "timeout": its time was up; "output": it printed too much, or made too many files.
        stdout: what it printed; what is not UTF-8 is replaced.
    """

    status: Literal["ok", "error", "timeout", "output"]
    stdout: str


def run(
    program: str,
    stdin: str = "",
    seconds: float = 10,
    mib: int = 1024,
    *,
    wall_seconds: float | None = None,
    output_mib: float = 8,
    unsafe: bool = False,
) -> Result:
    """Run a Python program in a sandbox, with this interpreter's standard library.

    Threads may call this side by side.

    Args:
        program: its text.
        stdin: what it reads.
        seconds: of CPU time, rounded up; they do not depend on what else the machine does.
        mib: of memory.
        wall_seconds: of time; None: 4 x `seconds` + 5.
        output_mib: of what it may print.
        unsafe: start it without a sandbox, with its limits alone: it can then do all that the
            calling process can.
    Raises:
        RuntimeError: there is no sandbox here; see `why_unavailable`.
    """
    if not unsafe and (reason := why_unavailable()):
        raise RuntimeError(reason)
    if wall_seconds is None:
        wall_seconds = 4 * seconds + 5
    with ExitStack() as stack:
        of_program = stack.enter_context(_memory_file(program.encode()))
        of_stdin = stack.enter_context(_memory_file(stdin.encode()))
        here, there = socket.socketpair()
        stack.enter_context(here)
        stack.enter_context(there)
        files = [of_program.fileno(), there.fileno()]
        settings = [str(there.fileno()), str(mib * MIB), str(math.ceil(seconds))]
        if unsafe:
            python = [sys.executable, "-s", "-S", "-B", "-c", BOOT]
            command = [*python, f"/dev/fd/{of_program.fileno()}", *settings]
        else:
            of_filter = stack.enter_context(_memory_file(_filter_of_system_calls()))
            files.append(of_filter.fileno())
            command = [*_box(), "--seccomp", str(of_filter.fileno()),
                       "--ro-bind-data", str(of_program.fileno()), "/program.py",
                       "--remount-ro", "/", "--",
                       _interpreter(), "-s", "-S", "-B", "-c", BOOT, "/program.py", *settings]
        process = subprocess.Popen(
            command, stdin=of_stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"}, pass_fds=files, start_new_session=True)
        there.close()
        try:
            deadline = time.monotonic() + wall_seconds
            return _watch(process, here, deadline, int(output_mib * MIB), is_boxed=not unsafe)
        finally:
            _end(process)


def why_unavailable() -> str | None:
    """Return in one line why there is no sandbox on this machine; None: there is one."""
    return _why_unavailable(shutil.which("bwrap"))


@functools.cache
def _why_unavailable(bwrap: str | None) -> str | None:
    if platform.machine() not in MACHINES or sys.platform != "linux":
        return (f"no sandbox for {sys.platform} on {platform.machine()}; expected Linux on "
                f"{' or '.join(MACHINES)}")
    if not bwrap:
        return f"no sandbox: bubblewrap is not installed; {INSTALL}"
    started = subprocess.run(
        [*_box(), "--", _interpreter(), "-s", "-S", "-c", "import _struct"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        check=False)
    if started.returncode:
        lines = started.stderr.strip().splitlines() or [f"exit code {started.returncode}"]
        return f"no sandbox: bubblewrap does not start here ({lines[-1]})"
    return None


# --- the box --------------------------------------------------------------------------------------

# Runs in the box before the program.  It sets limits that cannot be raised again, and asks whether
# to go on: only from here on the kernel ends the box with the process that opened it, so one that
# was killed before does not answer.
BOOT = """
import os, resource, sys
path = sys.argv[1]
caller, memory, seconds = map(int, sys.argv[2:])
os.write(caller, b"?")
if not os.read(caller, 1):
    sys.exit(1)
os.close(caller)
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with open(path, encoding="utf-8") as file:
    program = compile(file.read(), "program.py", "exec")
sys.argv = ["program.py"]
exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
"""


@functools.cache
def _box() -> tuple[str, ...]:
    bwrap = shutil.which("bwrap")
    assert bwrap
    box = [
        bwrap, "--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY,
        "--hostname", "box", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        "--clearenv", "--setenv", "PYTHONHASHSEED", "0",
    ]
    for path in _library_folders():
        box += ["--ro-bind", path, path]
        for packages in ("site-packages", "dist-packages"):
            if (Path(path) / packages).is_dir():
                box += ["--size", "4096", "--tmpfs", f"{path}/{packages}",
                        "--remount-ro", f"{path}/{packages}"]
    for path in [_interpreter(), *_shared_libraries()]:
        box += ["--ro-bind", path, path]
    box += ["--dev-bind", "/dev/null", "/dev/null"]
    box += ["--size", str(TMP_MIB * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return tuple(box)


@functools.cache
def _interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _library_folders() -> list[str]:
    of_python = sysconfig.get_path("stdlib")
    compiled = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    return [of_python] if compiled == of_python else [of_python, compiled]


def _shared_libraries() -> list[str]:
    modules = []
    for folder in _library_folders():
        for path in Path(folder, "lib-dynload").glob("*.so"):
            if not path.name.startswith("_tkinter"):  # there is no screen, and it takes 16 more
                modules.append(str(path))
    listing = subprocess.run(
        ["ldd", _interpreter(), *modules], capture_output=True, text=True, check=False).stdout
    paths = set()
    for line in listing.splitlines():
        # "libz.so.1 => /lib/libz.so.1 (0x...)", "/lib64/ld-linux-x86-64.so.2 (0x...)"
        words = line.split()
        if len(words) > 1 and words[-1].startswith("(0x") and words[-2].startswith("/"):
            paths.add(words[-2])
    return sorted(paths)


# --- the filter of system calls -------------------------------------------------------------------


class Machine(NamedTuple):
    """Hold what the kernel calls an architecture, and its numbers of system calls."""

    audit_arch: int
    fcntl: int
    denied: dict[str, int]


# New processes and threads (limits on memory and time are those of one process, and the limit on
# processes does not bind root); sockets; traces of others; namespaces and mounts; memory that no
# limit counts (memory files, System V and POSIX messages); what changes an inode, which may be the
# host's (a read-only mount does not help: standard error is the host's own /dev/null); and parts of
# the kernel that no test needs but exploits like.  Numbers: the kernel's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
MACHINES = {
    "x86_64": Machine(0xC000003E, 72, dict(
        clone=56, fork=57, vfork=58, clone3=435,
        socket=41, ptrace=101, process_vm_readv=310, process_vm_writev=311, pidfd_getfd=438,
        unshare=272, setns=308, mount=165, umount2=166, pivot_root=155, chroot=161,
        fsopen=430, open_tree=428, move_mount=429, mount_setattr=442,
        memfd_create=319, memfd_secret=447, shmget=29, semget=64, msgget=68, mq_open=240,
        chmod=90, fchmod=91, fchmodat=268, fchmodat2=452,
        chown=92, fchown=93, lchown=94, fchownat=260,
        utime=132, utimes=235, futimesat=261, utimensat=280,
        setxattr=188, lsetxattr=189, fsetxattr=190, setxattrat=463,
        removexattr=197, lremovexattr=198, fremovexattr=199, removexattrat=466,
        file_setattr=469, flock=73,
        add_key=248, request_key=249, keyctl=250, bpf=321, perf_event_open=298, userfaultfd=323,
        io_uring_setup=425, io_setup=206, open_by_handle_at=304, personality=135, syslog=103)),
    "aarch64": Machine(0xC00000B7, 25, dict(
        clone=220, clone3=435,
        socket=198, ptrace=117, process_vm_readv=270, process_vm_writev=271, pidfd_getfd=438,
        unshare=97, setns=268, mount=40, umount2=39, pivot_root=41, chroot=51,
        fsopen=430, open_tree=428, move_mount=429, mount_setattr=442,
        memfd_create=279, memfd_secret=447, shmget=194, semget=190, msgget=186, mq_open=180,
        fchmod=52, fchmodat=53, fchmodat2=452, fchown=55, fchownat=54, utimensat=88,
        setxattr=5, lsetxattr=6, fsetxattr=7, setxattrat=463,
        removexattr=14, lremovexattr=15, fremovexattr=16, removexattrat=466,
        file_setattr=469, flock=32,
        add_key=217, request_key=218, keyctl=219, bpf=280, perf_event_open=241, userfaultfd=282,
        io_uring_setup=425, io_setup=0, open_by_handle_at=265, personality=92, syslog=116)),
}

# F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE: commands of fcntl, on any machine
LOCKS = 6, 7, 37, 38, 1024

# Instructions of the kernel's classic packet filters: linux/bpf_common.h, linux/seccomp.h.
LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_GREATER_OR_EQUAL = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
NOT_PERMITTED = 0x00050000 | 1  # the call fails with EPERM
OFFSET_NUMBER = 0
OFFSET_ARCH = 4
OFFSET_SECOND = 24  # the lower half of the second argument, of a machine that is little-endian
# x86-64 knows every call under a second number as well, from here on
X32_NUMBERS = 0x40000000


def _filter_of_system_calls() -> bytes:
    """Return the filter of this machine, as the kernel and bubblewrap's --seccomp read it."""
    machine = MACHINES[platform.machine()]

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    parts = [
        instruction(LOAD_WORD, OFFSET_ARCH),
        instruction(JUMP_IF_EQUAL, machine.audit_arch, if_true=1),
        instruction(RETURN, KILL_PROCESS),
        instruction(LOAD_WORD, OFFSET_NUMBER),
        instruction(JUMP_IF_GREATER_OR_EQUAL, X32_NUMBERS, if_false=1),
        instruction(RETURN, NOT_PERMITTED),
    ]
    for number in machine.denied.values():
        parts.append(instruction(JUMP_IF_EQUAL, number, if_false=1))
        parts.append(instruction(RETURN, NOT_PERMITTED))
    parts.append(instruction(JUMP_IF_EQUAL, machine.fcntl, if_true=1))
    parts.append(instruction(RETURN, ALLOW))
    parts.append(instruction(LOAD_WORD, OFFSET_SECOND))
    for command in LOCKS:
        parts.append(instruction(JUMP_IF_EQUAL, command, if_false=1))
        parts.append(instruction(RETURN, NOT_PERMITTED))
    parts.append(instruction(RETURN, ALLOW))
    return b"".join(parts)


# --- watching it ----------------------------------------------------------------------------------

SIGNAL_BASE = 128  # bubblewrap ends with 128 + signal
SIGKILL = 9
SIGXCPU = 24  # the CPU time is used up
CHUNK = 1 << 16


def _memory_file(content: bytes) -> BinaryIO:
    """Return an open file that has no name, at its beginning; nobody can write to it any more."""
    file = os.fdopen(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return file


def _watch(
    process: subprocess.Popen[bytes], box: socket.socket, deadline: float, most_output: int, *,
    is_boxed: bool,
) -> Result:
    """Read what a program prints, until it ends or may not go on."""
    assert process.stdout
    output = bytearray()
    is_open = True
    tmp = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(box, selectors.EVENT_READ)
        while is_open:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return Result("timeout", _text(output))
            ready = selector.select(min(remaining, LOOK_EVERY))
            if _num_files(tmp) > TMP_FILES:
                return Result("output", _text(output))
            if not ready:
                continue
            if any(key.fileobj is box for key, _ in ready):
                selector.unregister(box)
                for child in _children(process.pid) if is_boxed else ():
                    tmp = f"/proc/{child}/root/tmp"  # from now on its root is the box
                with suppress(ConnectionError):
                    box.send(b"!")
                continue
            chunk = os.read(process.stdout.fileno(), CHUNK)
            output += chunk
            if len(output) > most_output:
                return Result("output", _text(output[:most_output]))
            is_open = bool(chunk)
    while True:
        try:
            code = process.wait(min(max(deadline - time.monotonic(), 0), LOOK_EVERY))
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                return Result("timeout", _text(output))
            if _num_files(tmp) > TMP_FILES:
                return Result("output", _text(output))
    # without a box the signal is the process' own, as a negative number
    used_up = code in (SIGNAL_BASE + SIGXCPU, -SIGXCPU, SIGNAL_BASE + SIGKILL, -SIGKILL)
    status: Literal["ok", "error", "timeout"] = "error"
    if code == 0:
        status = "ok"
    elif used_up:
        status = "timeout"
    return Result(status, _text(output))


def _num_files(folder: str) -> int:
    """Return how many files and folders a file system holds; 0: it is gone, or is not named."""
    try:
        counts = os.statvfs(folder)
    except OSError:
        return 0
    return counts.f_files - counts.f_ffree


def _text(output: bytes | bytearray) -> str:
    return bytes(output).decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is still running; the kernel ends all in a box with its first process."""
    if process.poll() is None:
        # of its children first: what bubblewrap leaves behind would stay as zombies where the
        # first process of a container collects none
        for child in _children(process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, SIGKILL)
    process.wait()
    assert process.stdout
    process.stdout.close()


def _children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]
