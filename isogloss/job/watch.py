"""Notice that a job has to end: a signal, a rank that failed or died.

Where there are several ranks, each looks after the others, see peers.py; and after its launcher,
see launchers.py.

Signals end a job in two ways.  Before the first step there is nothing to save, and they end a rank
at once.  From then on `StopSignals` notes them, and all ranks save and end together.

Tests: tests/test_launch.py.
"""

import os
import signal
import sys
from contextlib import contextmanager, nullcontext

from tqdm import tqdm

from isogloss.doors import door
from isogloss.flags.parse import is_first_rank, line_about
from isogloss.job.counts import global_sums
from isogloss.job.layout import place_in_job

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
        self.is_agreeing = self.has_said = False
        for number in STOP_SIGNALS:
            # nohup has SIGHUP ignored, and a shell without job control SIGINT of what it runs in
            # the background
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number, _):
        if not self.is_agreeing:
            self._say(self.step)
        self.received.add(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def agree(self, failure=""):
        """Return a signal that any rank has received, the same on every rank; 0: none has.

        Args:
            failure: of this rank, for which all end as for a signal, with FAILED in its place.
        """
        self.is_agreeing = True  # what comes now may be too late, unless another rank had it
        received = [number in self.received for number in STOP_SIGNALS]
        counts = global_sums([*received, bool(failure)])
        stop = next((int(number) for number, count in zip((*STOP_SIGNALS, FAILED), counts)
                     if count), 0)
        self.is_agreeing = False
        if self.received:
            self._say(self.step if stop else self.step + 1)
        return stop

    def _say(self, step):
        is_first, self.has_said = not self.has_said, True
        if is_first and is_first_rank():
            os.write(2, f"\nending after step {step}\n".encode())


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


def end_with_launchers():
    """Return a context in which this rank gets SIGTERM once a launcher of it is gone."""
    return door("launchers").end_with_launchers() if "RANK" in os.environ else nullcontext()


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
