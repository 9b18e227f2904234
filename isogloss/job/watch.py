"""Notice that a job has to end: a signal, a launcher that is gone, a rank that failed or died.

Where there are several ranks, each looks after the others, see peers.py.

Signals end a job in two ways.  Before the first step there is nothing to save, and they end a rank
at once.  From then on `StopSignals` notes them, and all ranks save and end together.

Tests: tests/test_launch.py.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from isogloss.doors import door
from isogloss.flags.parse import is_first_rank, line_about
from isogloss.job.counts import global_sums
from isogloss.job.layout import place_in_job
from isogloss.job.processes import is_running

PERIOD = 1.0  # seconds between looks

# --- signals --------------------------------------------------------------------------------------

# The first one of these that any rank got decides the exit code, 128 + its number.  SIGTERM comes
# last, because DeepSpeed's launcher answers SIGINT with it.
STOP_SIGNALS = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
FAILED = -1  # stands for no signal, but for what a rank cannot do any more


class StopSignals:
    """Note the signals that ask the job to end; a second SIGINT ends this rank at once.

    Attributes:
        step: that is being taken, for the line of the first rank.
    """

    def __init__(self):
        self.step = 0
        self.received = set()  # a signal handler can do little more than add to it
        for number in STOP_SIGNALS:
            # nohup has SIGHUP ignored, and a shell without job control SIGINT of what it runs in
            # the background
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number, _):
        if is_first_rank() and not self.received:
            os.write(2, f"\nending after step {self.step}\n".encode())
        self.received.add(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def agree(self, failure=""):
        """Return a signal that any rank has received, the same on every rank; 0: none has.

        Args:
            failure: of this rank, for which all end as for a signal, with FAILED in its place.
        """
        received = [number in self.received for number in STOP_SIGNALS]
        counts = global_sums([*received, bool(failure)])
        for number, count in zip((*STOP_SIGNALS, FAILED), counts):
            if count:
                return int(number)
        return 0


@contextmanager
def signal_handlers_restored():
    """Restore at the end of the block what the stop signals did before; SIGINT ends at once."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if before[signal.SIGINT] is signal.default_int_handler:
        # Python's handler would wait for the end of a collective.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stop_signals():
    """Ignore them: a rank for teachers alone serves until the student's ranks have saved."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# --- launchers ------------------------------------------------------------------------------------


def _words(process):
    """Return the command line of a process; [] if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _parent(process):
    """Return the id of a process's parent; 0 if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])  # "id (name) state parent ..."


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
    process = _parent("self")
    while process > 0:
        words = _words(process)
        if _is_runner(words) or _is_launcher(words):
            launchers.append(process)
        if not LAUNCHERS.isdisjoint(words):
            # For one node the runner is the parent, and says nothing of a node's number.
            by_runner = any(word.startswith("--log_level") for word in words)
            on_one_node = not any(word.startswith("--node_rank") for word in words)
            runner_gone = not _is_runner(_words(_parent(process)))
            orphaned = by_runner and on_one_node and runner_gone
        process = _parent(process)
    return launchers, orphaned


@contextmanager
def end_with_launchers():
    """Send this rank SIGTERM as soon as a launcher of it is gone, while the block runs."""
    launchers, orphaned = find_launchers()
    end = threading.Event()

    def look():
        while not orphaned and all(is_running(process) for process in launchers):
            if end.wait(PERIOD):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    if launchers or orphaned:
        threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        end.set()


# --- ranks ----------------------------------------------------------------------------------------


class Alone:
    """Stand for the `peers.Watch` of a rank that has no other one beside it."""

    training = False

    def gather(self, what, value, roles):
        return [value]

    def announce(self, line, code, said):
        return True

    def do_nothing(self, *_, **__):
        """Nobody has to hear, and nobody can have ended."""

    post_failure = explain = say_who_died = leave = stop = wait_for_others = do_nothing


_current = None  # the Watch, or Alone, of the run of main that is under way


def current_watch():
    """Return the Watch of the `end_together` block around this call."""
    assert _current, "outside of an end_together block"
    return _current


def print_line(text):
    """Print one line on stderr, below a progress bar if there is one, without secrets."""
    # rank 0 draws the bar, on the terminal that others share
    is_below_bar = _current and _current.training
    if is_first_rank():
        is_below_bar = getattr(tqdm, "_instances", ())
    begin = "\n" if is_below_bar and sys.stderr.isatty() else ""
    print(f"{begin}{line_about(text)}", file=sys.stderr, flush=True)


@contextmanager
def end_together(roles=None):
    """End this rank when another one fails or dies, and the others when this one does.

    All ranks of the job take part.  They may leave the block by SystemExit, together.

    Args:
        roles: `roles.Roles` where teachers have ranks of their own.
    Yields:
        `peers.Watch`, or Alone.
    """
    global _current
    try:
        _, num_ranks = place_in_job(roles)
        watch = _current = Alone() if num_ranks == 1 else door("peers").Watch(roles)
    except ValueError as error:  # no rank of this job has written what it has read
        print_line(error)
        raise SystemExit(1) from None
    try:
        yield watch
    except Exception as error:
        watch.explain(error)
        raise
    finally:
        watch.training = False
        watch.stop()
    watch.wait_for_others()
