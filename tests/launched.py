"""Jobs whose ranks may die: under DeepSpeed's real launcher, in a session, or forked."""

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import ranks
from isogloss.job.several.launchers import LAUNCHERS

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240  # seconds, on a busy machine, for what takes a few


def processes_of(session):
    """Return {process id: command line} of the processes of a session that have not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of_process = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
        if int(of_process) == session and state not in "ZX":
            found[int(folder.name)] = words
    return found


def wait_until(condition, what=lambda: ""):
    """Wait for a condition, not for a time; fail, and say what there is, when it never comes."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > PATIENCE:
            raise AssertionError(f"waited in vain {what()}")
        time.sleep(0.05)


def as_in_a_terminal():
    """Let signals end a process: tests that run under nohup have SIGHUP ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def our_command(folder):
    """Return isogloss-distill, as an installation writes it."""
    path = folder / "isogloss-distill"
    path.write_text(f"#!{sys.executable}\nfrom isogloss.command import main\nmain()\n")
    path.chmod(0o700)
    return [path]


class Job:
    """A job of two ranks under DeepSpeed's launcher, in a session of its own.

    Args:
        program: words of the command; empty: `deepspeed` with distill.py.
    """

    def __init__(self, flags, port, program=()):
        more = []
        if not program:
            program = [Path(sys.executable).with_name("deepspeed")]
            more = ["distill.py"]
        command = [*program, "--num_gpus=2", f"--master_port={port}", *more, *flags]
        self.runner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, text=True,
                                       stderr=subprocess.PIPE, start_new_session=True,
                                       preexec_fn=as_in_a_terminal)

    def launchers(self):
        """Return the process ids of launchers on the node: one, once it has started."""
        return [process for process, words in processes_of(self.runner.pid).items()
                if any(f"-m {module} " in words for module in LAUNCHERS)]

    def ranks(self):
        return [process for process, words in processes_of(self.runner.pid).items()
                if "--local_rank=" in words and ".launcher" not in words]

    def what_waits(self):
        """Return the processes that are left and the stacks of the ranks, to see why a job hangs.

        The ranks print their stacks, see sitecustomize.py.
        """
        left = processes_of(self.runner.pid)
        for process in self.ranks():
            os.kill(process, signal.SIGUSR1)
            time.sleep(1)  # one after the other, as they share a pipe
        os.killpg(self.runner.pid, signal.SIGKILL)
        return left, self.runner.stderr.read()

    def wait(self):
        """Wait until all processes are gone; return the runner's exit code and stderr."""
        wait_until(lambda: not processes_of(self.runner.pid).keys() - {self.runner.pid},
                   lambda: "for the end of {}\n{}".format(*self.what_waits()))
        message = self.runner.communicate(timeout=PATIENCE)[1]
        return self.runner.returncode, message


# --- forked ranks ---------------------------------------------------------------------------------


class Ended(NamedTuple):
    code: int
    stderr: str


def rank_with_trouble(argv, folder, trouble):
    """Run a command line as a process of its own would; trouble(rank) comes first."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    from isogloss import distill

    trouble(rank)
    code = 0
    try:
        distill.cli([*argv, f"--local_rank={rank}"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def no_trouble(rank):
    """Make no trouble."""


def die_after(module, name, is_time):
    """Let a function end this process by SIGKILL after the first call for which is_time is true."""
    function = getattr(module, name)

    def call(*args, **options):
        result = function(*args, **options)
        if is_time(*args, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, call)


def run_with_trouble(num_ranks, argv, folder, trouble=no_trouble):
    """Return Ended of every rank; a rank that does not end fails the test."""
    folder.mkdir(exist_ok=True)
    group = ranks.start(num_ranks, rank_with_trouble, argv, folder, trouble)
    for process, _ in group:
        process.join(PATIENCE)
    codes = [process.exitcode for process, _ in group]
    ranks.kill(group)
    return [Ended(code, (folder / f"stderr{rank}").read_text())
            for rank, code in enumerate(codes)]
