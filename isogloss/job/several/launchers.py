"""Notice that a launcher of this rank is gone, so that no rank stays behind.

Tests: tests/test_launch.py.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from isogloss.flags.parse import is_first_rank, line_about
from isogloss.job.several.others import is_running
from isogloss.job.watch import PERIOD


def _words(process):
    """Return the command line of a process; [] if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _parent_and_session(process):
    """Return (id of a process's parent, its session); (0, 0) if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return 0, 0
    parent, _, session = text.rpartition(")")[2].split()[1:4]  # "id (name) state parent group ..."
    return int(parent), int(session)


def _is_runner(words):
    """Tell whether this is the command `deepspeed`, which starts one launcher per node."""
    names = [Path(word).name for word in words[:3]]
    commands = {"deepspeed", "deepspeed.pt", "ds", "isogloss", "isogloss-distill"}
    modules = {"deepspeed.launcher.runner", "isogloss.command"}
    return not (commands.isdisjoint(names) and modules.isdisjoint(words))


LAUNCHERS = {"deepspeed.launcher.launch", "isogloss.job.launcher"}  # of a node


def _is_launcher(words):
    modules = {*LAUNCHERS, "torch.distributed.run"}
    return not modules.isdisjoint(words) or "torchrun" in [Path(word).name for word in words[:3]]


def find_launchers():
    """Return the ids of the launchers above this process, and whether one is missing.

    `deepspeed` starts `deepspeed.launcher.launch`, and that the ranks.  Neither ends what it has
    started when it is killed, the former not even on SIGTERM.

    Returns:
        (list of process ids, True if a launcher of this rank has ended already).
    """
    launchers = []
    orphaned = "CROSS_RANK" in os.environ  # the launcher on the node sets it
    process, _ = _parent_and_session("self")
    while process > 0:
        words = _words(process)
        parent, session = _parent_and_session(process)
        if _is_runner(words) or _is_launcher(words):
            launchers.append(process)
        if not LAUNCHERS.isdisjoint(words):
            # For one node the runner is the parent, and says nothing of a node's number.
            by_runner = any(word.startswith("--log_level") for word in words)
            on_one_node = not any(word.startswith("--node_rank") for word in words)
            is_adopted = parent <= 1 or _parent_and_session(parent)[1] != session
            orphaned = by_runner and on_one_node and is_adopted and not _is_runner(_words(parent))
            if by_runner and on_one_node and not orphaned:
                launchers.append(parent)  # whatever its name: a notebook, a script
        process = parent
    return list(dict.fromkeys(launchers)), orphaned


@contextmanager
def end_with_launchers():
    """Send this rank SIGTERM as soon as a launcher of it is gone, while the block runs."""
    launchers, orphaned = find_launchers()
    end = threading.Event()

    def look():
        while not orphaned and all(is_running(process) for process in launchers):
            if end.wait(PERIOD):
                return
        if is_first_rank():
            print(line_about("the launcher is gone, so the job ends"), file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    if launchers or orphaned:
        threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        end.set()
