"""Programs that try to leave the sandbox; each prints "escaped" where it gets through.

As a script it runs all of them and prints {name: status}:

    python hostile_programs.py SECRET PORT PID
"""

import json
import sys

# what all of them begin with
PRELUDE = """
import ctypes, fcntl, mmap, os, resource, signal, socket, subprocess, sysconfig, threading, time
libc = ctypes.CDLL(None)
HOST = "/dev/null", "/dev/urandom", os.__file__, *range(64)  # what may be the host's

def attempt(action, *arguments):
    try:
        print("escaped", action(*arguments))
    except (OSError, ValueError):
        pass
"""
# {secret}: a file of the host; {port}: where the host listens; {pid}: of a process of the host
PROGRAMS = {
    "reads a file of the host": """
os.symlink({secret!r}, "/tmp/link")
for path in ({secret!r}, "/tmp/link", "../../../.." + {secret!r}):
    attempt(lambda: open(path).read())
""",
    "writes a file of the host": """
for path in ({secret!r}, {secret!r} + ".new", "/program.py", "/new", os.__file__):
    attempt(lambda: open(path, "w").write("taken"))
""",
    "lists the host": """
for folder in ("/home", "/etc", "/usr/bin", "/var", "/sys", "/proc", "/mnt", "/run"):
    names = os.listdir(folder) if os.path.exists(folder) else []
    if [name for name in names if not name.startswith("python")]:
        print("escaped", folder)
if os.listdir("/tmp"):
    print("escaped /tmp")
""",
    "opens a socket": """
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET6, ("::1", {port}, 0, 0)),
    (socket.AF_UNIX, "/run/docker.sock"),
):
    attempt(lambda: socket.socket(family).connect(address))
""",
    "reads the environment": """
if "SECRET" in os.environ or os.path.exists("/proc/self/environ"):
    print("escaped", os.environ)
get = libc.getenv
get.restype = ctypes.c_char_p
if get(b"SECRET") or get(b"PATH") or get(b"HOME"):
    print("escaped")
""",
    "is a fork bomb": """
while True:
    os.fork()
    print("escaped", flush=True)
""",
    "is a bomb of threads": """
while True:
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("escaped", flush=True)
""",
    "takes all memory": """
blocks = []
while True:
    blocks.append(bytearray(1 << 26))
    if len(blocks) > 32:
        print("escaped")
        break
""",
    "takes memory beside its limit": """
if libc.memfd_create(b"x", 0) >= 0 or libc.shmget(0, 1 << 30, 0o1600) >= 0:
    print("escaped")
written = 0
for folder in ("/tmp", "/dev", "/dev/shm", "/"):
    try:
        with open(folder + "/x", "wb", buffering=0) as file:
            while written < 1 << 28:
                written += file.write(bytes(1 << 20))
    except OSError:
        pass
if written > 1 << 25:
    print("escaped", written)
""",
    "fills its standard input": """
def fill(fd):
    written = 0
    while written < 1 << 28:
        written += os.pwrite(fd, bytes(1 << 20), written)

for fd in (0, *range(3, 64)):  # 1 is a pipe that is counted, 2 is /dev/null
    attempt(fill, fd)
    attempt(os.ftruncate, fd, 1 << 28)
    attempt(mmap.mmap, fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
""",
    "opens its standard input anew": """
for fd in range(64):
    for path in (f"/dev/fd/{fd}", f"/proc/self/fd/{fd}"):
        attempt(os.open, path, os.O_RDWR)
""",
    "makes files without an end": """
os.close(1)
for number in range(1 << 16):
    os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
""",
    "makes folders without an end": """
for number in range(1 << 16):
    os.mkdir(f"/tmp/{number}")
print("escaped")
""",
    "writes where packages would be": """
for name in ("site-packages", "dist-packages"):
    path = os.path.join(sysconfig.get_path("stdlib"), name)
    attempt(os.chmod, path, 0o777)
    attempt(open, path + "/x", "w")
""",
    # each changes nothing where it gets through, so that no host is harmed by a test that fails
    "changes modes, owners and times": """
for file in HOST:
    try:
        status = os.stat(file)
    except OSError:
        continue
    attempt(os.chmod, file, status.st_mode & 0o7777)
    attempt(os.chown, file, -1, -1)
    attempt(os.chown, file, status.st_uid, status.st_gid)
    attempt(lambda: os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns)))
    if isinstance(file, str):
        attempt(os.lchown, file, -1, -1)
        if libc.syscall(452, -100, file.encode(), status.st_mode & 0o7777, 0) == 0:
            print("escaped fchmodat2", file)
""",
    "changes attributes": """
mode = bytes.fromhex("02000000" "01000600ffffffff" "04000600ffffffff" "20000600ffffffff")
for file in HOST:
    for name, value in (("user.x", b"x"), ("trusted.x", b"x"), ("system.posix_acl_access", mode)):
        attempt(os.setxattr, file, name, value)
        attempt(os.removexattr, file, name)
for file in ("/dev/null", os.__file__):
    fd = os.open(file, os.O_RDONLY)
    for get, put in ((0x80086601, 0x40086602), (0x801c581f, 0x401c5820)):  # FS_IOC_GETFLAGS, ...
        try:
            flags = fcntl.ioctl(fd, get, bytes(64))
        except OSError:
            continue
        attempt(fcntl.ioctl, fd, put, flags)
""",
    "locks files": """
for file in HOST:
    for mode in (os.O_RDONLY, os.O_RDWR):
        try:
            fd = os.open(file, mode) if isinstance(file, str) else os.dup(file)
        except OSError:
            continue
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            attempt(fcntl.flock, fd, kind | fcntl.LOCK_NB)
            attempt(fcntl.lockf, fd, kind | fcntl.LOCK_NB)
        for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
            attempt(fcntl.fcntl, fd, fcntl.F_SETLEASE, kind)
""",
    "links, renames and makes devices": """
for file in HOST[:3]:
    attempt(os.link, file, "/tmp/link")
    attempt(os.rename, file, file)
attempt(os.mknod, "/tmp/null", 0o20666, os.makedev(1, 3))
attempt(os.mknod, "/tmp/disk", 0o60666, os.makedev(8, 0))
""",
    "changes what is the kernel's": """
for call in (lambda: libc.sethostname(b"box", 3), lambda: libc.swapoff(b"/none"),
             lambda: libc.umount2(b"/tmp", 2), lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, 0)):
    if call() == 0:
        print("escaped")
for file in ("sys/kernel/hostname", "self/oom_score_adj", "sysrq-trigger"):
    attempt(open, "/proc/" + file, "a")
attempt(open, "/sys/fs/cgroup/cgroup.procs", "a")
keyctl = 250 if os.uname().machine == "x86_64" else 219
for keyring in range(-8, 0):
    if libc.syscall(keyctl, 0, keyring, 1) > 0:
        print("escaped to a keyring")
if libc.klogctl(10, None, 0) >= 0:
    print("escaped to the kernel's log")
""",
    "holds what it inherited": """
for fd in range(3, 64):
    attempt(os.fstat, fd)
""",
    "never ends": """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    pass
""",
    "raises its limits": """
for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
    attempt(resource.setrlimit, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
""",
    "kills what started it": """
for pid in (os.getppid(), {pid}, -1, 1):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
while os.getppid() > 1:
    pass
""",
    "leaves a grandchild": """
attempt(lambda: subprocess.Popen(["/bin/sh", "-c", "sleep 600"], start_new_session=True))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            pass
print("escaped")
""",
    "traces a process": """
local = (ctypes.c_long * 2)()
for pid in ({pid}, 1):
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("escaped")
    if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(local), 1, 0) >= 0:
        print("escaped")
""",
    "reads /proc of others": """
os.mkdir("/tmp/proc")
libc.mount(b"proc", b"/tmp/proc", b"proc", 0, None)
for path in ("/proc/1/environ", "/proc/{pid}/cmdline", "/tmp/proc/1/environ"):
    if os.path.exists(path):
        print("escaped", path)
""",
    "opens a box of its own": """
if libc.unshare(0x10000000) == 0 or libc.chroot(b"/tmp") == 0 or os.getuid() == 0:
    print("escaped")
""",
    "prints without an end": """
while True:
    print("x" * 100000)
""",
}
# What becomes of those that do not simply fail.
STATUS = {"never ends": "timeout", "prints without an end": "output",
          "makes files without an end": "output", "makes folders without an end": "output",
          # to the end
          "changes modes, owners and times": "ok", "changes attributes": "ok", "locks files": "ok",
          "links, renames and makes devices": "ok", "changes what is the kernel's": "ok",
          "holds what it inherited": "ok"}
MIB = 331  # no other test uses as much; the processes' command lines hold it in bytes


def run_all(secret, port, pid):
    """Return {name: sandbox.Result} of all programs."""
    try:
        from isogloss.evaluation import sandbox
    except ImportError:  # copied beside this file
        import sandbox

    assert sandbox.run(PRELUDE + "attempt(int)").stdout == "escaped 0\n"
    results = {}
    for name, program in PROGRAMS.items():
        text = PRELUDE + program.replace("{secret!r}", repr(secret)).replace("{port}", str(port))
        results[name] = sandbox.run(text.replace("{pid}", str(pid)), seconds=1, mib=MIB)
    return results


if __name__ == "__main__":
    secret, port, pid = sys.argv[1:]
    print(json.dumps(run_all(secret, int(port), int(pid))))
