"""Notice that another rank has failed or died, and end this one.

A rank that waits in a collective cannot look around, and on a GPU nothing tells it that another
rank is gone.  So a thread of every rank looks once a second: Did a rank report that it failed?  Do
the ranks of this node still run?

Tests: tests/test_launch.py.
"""

import contextlib
import os
import threading
import time
from typing import NamedTuple

import torch.distributed as dist

from isogloss.job.layout import place_in_job
from isogloss.job.rendezvous import job_store
from isogloss.job.several import values
from isogloss.job.several.others import is_running, node_name
from isogloss.job.watch import PERIOD, print_line

# Seconds for a rank to end by itself, when its collectives fail or all ranks refuse an input.  Not
# tuned.
GRACE = 5.0
REFUSAL_GRACE = 30.0
LEAVING_GRACE = 30.0  # for ranks that are alive and still on their way out


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


class Watch:
    """Look after this rank's peers and launchers in a thread, until `stop`."""

    def __init__(self, roles=None):
        """Start; all ranks of the job take part.

        Args:
            roles: `roles.Roles` where teachers have ranks of their own.
        """
        self.number, self.count = place_in_job(roles)
        prefix = "teacher " if roles and roles.role == "teacher" else ""
        name = f"{prefix}rank {os.environ['RANK']}"
        self.this = Peer(self.number, name, node_name(), os.getpid())
        self.training = False
        self.store = values.run_store(job_store())
        peers = values.gather_values(
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

    def gather(self, what, value, roles):
        """Return the values of all ranks of a block; see `launch.fail_together`."""
        return values.gather_values(self.store, what, value, *place_in_job(roles))

    def leave(self, what, roles):
        """Leave such a block for good, together."""
        values.part(self.store, what, *place_in_job(roles))

    def stop(self):
        """End the thread: this rank ends as the others expect."""
        self.end.set()
        self.thread.join()
        with contextlib.suppress(dist.DistError):
            values.write_value(self.store, f"{self.number} ended", True)

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
            failure = values.value_there(self.thread_store, "failure")
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
            line = (f"{names} ended in mid-step, so the job ends; with --resume auto, the default, "
                    "the same command goes on from its last checkpoint")
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
            if not values.value_there(self.thread_store, f"{peer.number} ended"):
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
        if not values.value_there(self.thread_store, "failure"):
            failure = {"line": line, "code": code, "said": said}
            values.write_value(self.thread_store, "failure", failure)

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
