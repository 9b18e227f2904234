"""Notice that a job has to end: a signal, a launcher that is gone, a rank that failed or died.

A rank that waits in a collective cannot look around, and on a GPU nothing tells it that another
rank is gone.  So a thread of every rank looks once a second: Did a rank report that it failed?  Do
the ranks of this node still run?  Does the launcher?

Signals end a job in two ways.  Before the first step there is nothing to save, and they end a rank
at once.  From then on `StopSignals` notes them, and all ranks save and end together.

Tests: tests/test_launch.py.
"""

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from tqdm import tqdm

from isogloss.flags.parse import is_first_rank, line_about
from isogloss.job import rendezvous
from isogloss.job.counts import global_sums
from isogloss.job.layout import place_in_job
from isogloss.job.processes import is_running

PERIOD = 1.0  # seconds between looks
# Seconds for a rank to end by itself, when its collectives fail or all ranks refuse an input.  Not
# tuned.
GRACE = 5.0
REFUSAL_GRACE = 30.0
LEAVING_GRACE = 30.0  # for ranks that are alive and still on their way out

# --- signals --------------------------------------------------------------------------------------

# The first one of these that any rank got decides the exit code, 128 + its number.  SIGTERM comes
# last, because DeepSpeed's launcher answers SIGINT with it.
STOP_SIGNALS = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
FAILED = -1  # stands for no signal, but for what a rank cannot do any more


class StopSignals:
    """Note the signals that ask the job to end; a second SIGINT ends this rank at once."""

    def __init__(self):
        self.received = set()  # a signal handler can do no more than add to it
        for number in STOP_SIGNALS:
            # nohup has SIGHUP ignored, and a shell without job control SIGINT of what it runs in
            # the background
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number, _):
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
    commands = {"deepspeed", "deepspeed.pt", "ds", "isogloss-distill"}
    return not commands.isdisjoint(names) or "deepspeed.launcher.runner" in words


def _is_launcher(words):
    modules = {"deepspeed.launcher.launch", "torch.distributed.run"}
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
        if "deepspeed.launcher.launch" in words:
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


class Peer(NamedTuple):
    """Identify a rank.

    number: among all ranks of the job, see `layout.place_in_job`.
    name: in messages.
    node: of its node, or of its container there.
    process: process id on that node.
    """

    number: int
    name: str
    node: str
    process: int


class Ending(NamedTuple):
    """State why this rank has to end.

    line: for the user.
    speaks: whether this rank prints it.
    code: exit code.
    at_once: print it now; else after the time in which this rank may end by itself.
    grace: that time, seconds.
    """

    line: str
    speaks: bool
    code: int = 1
    at_once: bool = False
    grace: float = GRACE


def node_name():
    """Identify what process ids refer to: the running machine and the container on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


class Watch:
    """Look after this rank's peers and launchers in a thread, until `stop`."""

    def __init__(self, roles=None):
        """Start; all ranks of the job take part.

        Args:
            roles: `layout.Roles` where teachers have ranks of their own.
        """
        self.number, self.count = place_in_job(roles)
        prefix = "teacher " if roles and roles.role == "teacher" else ""
        name = f"{prefix}rank {os.environ['RANK']}"
        self.this = Peer(self.number, name, node_name(), os.getpid())
        self.training = False
        self.store = rendezvous.run_store(rendezvous.job_store())
        peers = rendezvous.gather_values(
            self.store, "processes", self.this, self.number, self.count)
        self.peers = []
        for peer in [Peer(*fields) for fields in peers]:
            if peer.node == self.this.node and peer != self.this:
                self.peers.append(peer)
        # a client of its own: one that waits for a value answers no other thread
        self.thread_store = self.store.clone()
        self.heard = None  # Ending by the failure that another rank has reported
        self.said = threading.Lock()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def stop(self):
        """End the thread: this rank ends as the others expect."""
        self.end.set()
        self.thread.join()
        with contextlib.suppress(dist.DistError):
            rendezvous.write_value(self.store, f"{self.number} ended", True)

    def wait_for_others(self):
        """Wait until the others have ended, or died: this rank may serve the store that they read.
        """
        begin = time.monotonic()
        others = [f"{number} ended" for number in range(self.count) if number != self.number]
        with contextlib.suppress(dist.DistError):
            while self.number == 0 and time.monotonic() - begin < LEAVING_GRACE:
                if not others or self.store.check(others) or self._dead_peers():
                    return
                time.sleep(PERIOD / 10)

    def _look(self):
        while not self.end.wait(PERIOD):
            ending = self.find_ending()
            if ending is None:
                continue
            if ending.at_once:
                self.say(ending)
            if not self.end.wait(ending.grace):
                self.say(ending)
                os._exit(ending.code)
            return

    # why to end

    def find_ending(self):
        """Return an Ending if another rank has failed or died; else None."""
        if self.heard:  # the rank that reported it may be gone by now, and the store with it
            return self.heard
        try:
            failure = rendezvous.value_there(self.thread_store, "failure")
            if failure:
                return self._ending_by(failure)
            dead = self._dead_peers()
        except dist.DistError:  # the process that serves the store is gone
            dead = [peer for peer in self.peers if not is_running(peer.process)]
            if not dead:
                return Ending("", speaks=False)
        return self._ending_by_death(dead) if dead else None

    def _ending_by_death(self, dead):
        names = ", ".join(f"{peer.name} (process {peer.process})" for peer in dead)
        line = f"{names} ended before the first step, so the job ends"
        if self.training:
            line = (f"{names} ended in mid-step, so the job ends; the same command goes on from "
                    "its last checkpoint")
        survivors = [peer.number for peer in self.peers if peer not in dead]
        # the first survivor speaks for the node
        first = all(self.number < number for number in survivors)
        # In training a rank that is about to end in peace may see another one gone before it.
        return Ending(line, speaks=first, at_once=not self.training)

    def _ending_by(self, failure):
        speaks = self.number == 0 and not failure["said"]
        if failure["code"] == 2 and not failure["said"]:  # all ranks may be about to agree on it
            self.heard = Ending(failure["line"], speaks, code=2, grace=REFUSAL_GRACE)
        else:
            self.heard = Ending(failure["line"], speaks, code=failure["code"], at_once=True)
        self.thread_store.set(f"heard by {self.number}", "")
        return self.heard

    def _dead_peers(self):
        dead = []
        for peer in self.peers:
            if is_running(peer.process):
                continue
            if not rendezvous.value_there(self.thread_store, f"{peer.number} ended"):
                dead.append(peer)
        return dead

    # what to say

    def say_who_died(self):
        """Print who died, if a rank has; for one that a launcher's signal ends because of it.

        The signal may come before the thread has looked.
        """
        try:
            dead = self._dead_peers()
        except dist.DistError:  # a rank that ended in peace served the store
            return
        if dead:
            self.say(self._ending_by_death(dead))

    def say(self, ending):
        """Print the line of an Ending, once, and tell the ranks of other nodes."""
        if not self.said.acquire(blocking=False) or not ending.speaks:
            return
        print_line(ending.line)
        with contextlib.suppress(dist.DistError):
            self.post_failure(ending.line, ending.code, said=True)

    def post_failure(self, line, code, said=False):
        """Tell all ranks why the job ends; the first reason is the one they hear of.

        Args:
            line: for the user.
            code: exit code, not 0.
            said: the line has been printed; else the first rank of the job prints it.
        """
        assert code, line
        if not rendezvous.value_there(self.thread_store, "failure"):
            failure = {"line": line, "code": code, "said": said}
            rendezvous.write_value(self.thread_store, "failure", failure)

    def explain(self, error):
        """End with the reason if another rank is why this one fails; else tell the others.

        Raises:
            SystemExit: another rank has failed or died.
        """
        patience = 0.0
        # what gloo, the store, and shared memory raise when their peer is gone
        if isinstance(error, (RuntimeError, FileNotFoundError)):
            patience = 2 * PERIOD
        ending = self._find_ending_within(patience)
        if ending:
            self.say(ending)
            raise SystemExit(ending.code) from None
        reason = f"{type(error).__name__}: {error}"[:500]
        line = f"{self.this.name} failed ({reason}), so the job ends; its output has the traceback"
        self.announce(line, 1, said=self.number == 0)

    def announce(self, line, code, said):
        """Tell all ranks why this one ends the job, and wait until they have heard of it.

        Args: see `post_failure`.
        Returns:
            whether this rank is the first that announces anything; one is to print its line.
        """
        self.end.set()  # the others end because of this rank, not the other way round
        is_first = True
        with contextlib.suppress(dist.DistError):
            is_first = self.thread_store.add("announced", 1) == 1
            self.post_failure(line, code, said)
            self._wait_until_heard()
        return is_first

    def _find_ending_within(self, seconds):
        """Return an Ending; a process that dies takes a moment until it is seen to be dead."""
        begin = time.monotonic()
        ending = self.find_ending()
        while ending is None and time.monotonic() - begin < seconds:
            time.sleep(PERIOD / 10)
            ending = self.find_ending()
        return ending

    def _wait_until_heard(self):
        """Wait until all other ranks have heard of a failure: this one may serve the store."""
        begin = time.monotonic()
        others = [f"heard by {number}" for number in range(self.count) if number != self.number]
        while time.monotonic() - begin < GRACE:
            if not others or self.thread_store.check(others):
                return
            time.sleep(PERIOD / 10)


_current = None  # the Watch of the run of main that is under way


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
        roles: `layout.Roles` where teachers have ranks of their own.
    Yields:
        Watch.
    """
    global _current
    try:
        watch = _current = Watch(roles)
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
