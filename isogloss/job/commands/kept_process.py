"""Run a command that leaves nothing behind: python kept_process.py PARENT FOLDER WORD ...

When the process PARENT ends, however that happens, when this process is asked to end, and when the
command ends, all that the command has started is killed, also what has made a session of its own:
orphans fall to this process.  Then FOLDER is removed.  When this process is killed, the command is.

Needs the standard library and Linux.  Tests: tests/test_writer_process.py.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # see prctl(2)
PR_SET_CHILD_SUBREAPER = 36
# Looked for, not handled: a parent that is killed sends one for each of its threads, and one that
# came while the first is handled would end this process with its work half done.
HEARD = {signal.SIGTERM, signal.SIGCHLD}


def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_with_this_process():
    """Run by the command's process before it becomes the command."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children():
    """List the children of this process."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "id (name) state parent ...", where a name may end within a character
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == os.getpid():
            numbers.append(int(path.parent.name))
    return numbers


def kill_all():
    """Kill all descendants: a child that is gone leaves its children to this process."""
    while alive := children():
        for child in alive:
            os.kill(child, signal.SIGKILL)  # nobody else takes the end of a child away
        for child in alive:
            os.waitpid(child, 0)


def main(parent, folder, *words):
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        if os.getppid() != int(parent):  # it has ended before the call
            return
        command = subprocess.Popen(words, preexec_fn=end_with_this_process)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):  # the pipes are the command's
            os.dup2(nothing, descriptor)
        while (code := command.poll()) is None:
            if signal.sigwait(HEARD) == signal.SIGTERM:
                code = -signal.SIGTERM
                break
    finally:
        kill_all()
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
