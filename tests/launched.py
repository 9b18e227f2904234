"""Jobs under DeepSpeed's real launcher, each in a session of its own, and what is left of them."""

import subprocess
import sys
import time
from pathlib import Path

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
        assert time.monotonic() - begin < PATIENCE, f"waited in vain {what()}"
        time.sleep(0.05)


class Job:
    """A job of two ranks under DeepSpeed's launcher, in a session of its own."""

    def __init__(self, flags, port, stderr=subprocess.PIPE):
        program = Path(sys.executable).with_name("deepspeed")
        command = [program, "--num_gpus=2", f"--master_port={port}", "distill.py", *flags]
        self.runner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                                       stderr=stderr, text=True, start_new_session=True)

    def launcher(self):
        """Return the process id of the launcher on the node."""
        for process, words in processes_of(self.runner.pid).items():
            if "-m deepspeed.launcher.launch " in words:
                return process
        raise AssertionError("no launcher")

    def ranks(self):
        return [process for process, words in processes_of(self.runner.pid).items()
                if "--local_rank=" in words and "deepspeed.launcher" not in words]

    def what_waits(self):
        """Return {process id: (command line, where it sleeps)}, to find out why a job hangs."""
        found = {}
        for process, words in processes_of(self.runner.pid).items():
            channels = {}
            for task in Path(f"/proc/{process}/task").glob("*"):
                try:
                    channels[task.name] = (task / "wchan").read_text()
                except OSError:
                    continue
            found[process] = words[-60:], channels
        return found

    def wait(self):
        """Wait until all processes are gone; return the runner's exit code and stderr."""
        wait_until(lambda: not processes_of(self.runner.pid).keys() - {self.runner.pid},
                   lambda: f"for the end of {self.what_waits()}")
        message = self.runner.communicate(timeout=PATIENCE)[1]
        return self.runner.returncode, message
