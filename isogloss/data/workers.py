"""Prepare batches in other processes, which end with the process that they work for.

A worker is forked, so it inherits tokenizers and rows.  It sends every batch as one buffer
(isogloss/job/columns.py) through a pipe, which the training process reads straight into the memory
from which a device copies it.  A pipe has no name that could stay behind, and a batch needs no file
descriptor, as every tensor would that torch shares between processes.

No wait for a worker is without an end: the training process notices one that has died, that reports
an error, or that says nothing for TRAINING_TIMEOUT.

Tests: tests/test_workers.py.
"""

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback

import torch

from isogloss.errors import DataError, EngineStopped
from isogloss.job.columns import Packed, pack
from isogloss.job.processes import end_with
from isogloss.job.rendezvous import TRAINING_TIMEOUT

PREFETCHED = 2  # batches that wait in a worker to be sent, as many as torch's loader has
PERIOD = 1.0  # seconds between looks at the workers and at the signals
PATIENCE = 20.0  # seconds for which a rank that is asked to end waits for its data; not tuned
PIPE_BYTES = 2**20  # what every user may have; with the usual 64 KiB a batch takes 30 reads

# (number of this process among the workers, how many there are)
_place = 0, 1


def worker_of():
    """Return (number of this data worker, workers); (0, 1) in the training process."""
    return _place


class Loader:
    """Iterate over ready-made batches, in this process or in workers.

    Worker k of n prepares every n-th batch from the k-th on, so the order is that of one process.

    Attributes:
        batches: iterable; its iterator asks `worker_of` which batches to prepare.
        num_workers: processes; 0: the training process prepares them.
        asked_to_end: () -> bool, whether a signal asks the job to end.
        pinned: batches come as one buffer of pinned memory, which a GPU copies beside its work.
    """

    def __init__(self, batches, num_workers, asked_to_end=lambda: False, pinned=False):
        self.batches = batches
        self.num_workers = num_workers
        self.asked_to_end = asked_to_end
        self.pinned = pinned

    def __iter__(self):
        if not self.num_workers:
            return self._in_this_process()
        return self._from_workers()

    def _in_this_process(self):
        try:
            for batch in self.batches:
                yield in_pinned_memory(batch) if self.pinned else batch
        except ValueError as error:
            raise DataError(str(error)) from error

    def _from_workers(self):
        workers = [Worker(self.batches, k, self.num_workers) for k in range(self.num_workers)]
        try:
            while workers:
                for worker in workers:
                    batch = worker.receive(self.asked_to_end, self.pinned)
                    if batch is None:  # the batches have an end, and the first worker meets it
                        return
                    yield batch
        finally:
            for worker in workers:
                worker.process.kill()


class Worker:
    """Hold a worker process and the pipe that its batches come from."""

    def __init__(self, batches, number, num_workers):
        context = multiprocessing.get_context("fork")
        self.connection, other_end = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work, args=(batches, (number, num_workers), os.getpid(), other_end),
            daemon=True)
        # Cycles that are not collected yet stay so in the fork: to free a process group would wait
        # for its threads, to free a tensor of a GPU call that, and a fork has neither.
        gc.freeze()
        try:
            self.process.start()
        finally:
            gc.unfreeze()
        other_end.close()
        with contextlib.suppress(OSError):  # a user who has many pipes gets small ones
            fcntl.fcntl(self.connection, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def receive(self, asked_to_end, pinned=False):
        """Return the next batch; None after the last one.

        Raises:
            DataError: the worker has died or was refused its data, or no batch came in time.
            RuntimeError: it failed in another way; with its traceback.
            EngineStopped: the job is asked to end, and no batch came for PATIENCE seconds.
        """
        try:
            self._wait(asked_to_end)
            kind, value = pickle.loads(self.connection.recv_bytes())
            if isinstance(value, Packed):
                buffer = torch.empty(value.nbytes, dtype=torch.uint8, pin_memory=pinned)
                self._read_into(memoryview(buffer.numpy()), asked_to_end)
                value = value.value(buffer)
        except (EOFError, OSError):
            self.process.join(PERIOD)
            raise DataError(
                f"a data worker (process {self.process.pid}) ended with code "
                f"{self.process.exitcode}; if the machine ran out of memory, use fewer "
                "--num_workers; the same command goes on from the last checkpoint") from None
        if kind == "refused":
            raise DataError(value)
        if kind == "failed":
            raise RuntimeError(f"a data worker failed:\n{value}")
        return value

    def _read_into(self, memory, asked_to_end):
        """Fill memory with the next bytes that the worker sends."""
        while memory:
            self._wait(asked_to_end)
            num_read = os.readv(self.connection.fileno(), [memory])
            if not num_read:
                raise EOFError
            memory = memory[num_read:]

    def _wait(self, asked_to_end):
        begin = time.monotonic()
        while not self.connection.poll(PERIOD):
            seconds = time.monotonic() - begin
            if asked_to_end() and seconds > PATIENCE:
                raise EngineStopped
            if seconds > TRAINING_TIMEOUT.total_seconds():
                raise DataError(
                    f"a data worker (process {self.process.pid}) has sent nothing for "
                    f"{seconds / 60:.0f} minutes; look at what it reads; the same command goes on "
                    "from the last checkpoint")


def in_pinned_memory(batch):
    """Return a batch whose tensors are views of one buffer in pinned memory."""
    packed, buffer = pack(batch, pinned=True)
    return packed.value(buffer)


# --- in the worker --------------------------------------------------------------------------------


def _work(batches, place, parent, connection):
    """Prepare and send the batches of one worker; run by its process."""
    global _place
    _place = place
    end_with(parent)
    _close_listening_sockets()
    # a job that has to end takes a checkpoint first, which needs its workers
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # workers run side by side
    messages = queue.Queue(PREFETCHED)
    sender = threading.Thread(target=_send, args=(messages, connection))
    sender.start()
    try:
        for batch in batches:
            packed, buffer = pack(batch)
            messages.put(("batch", packed, buffer.numpy()))
        messages.put(("batch", None, b""))
    except ValueError as error:
        messages.put(("refused", str(error), b""))
    except BaseException:
        messages.put(("failed", traceback.format_exc(), b""))
    messages.put(None)
    sender.join()
    os._exit(0)  # what was inherited is not this process's to clean up


def _send(messages, connection):
    """Send messages until None; end the process if that fails, and with it the reader's wait.

    A message has a kind, a value and a buffer: a "batch" its Packed, or None after the last one;
    "refused" a line about the data; "failed" a traceback.
    """
    try:
        while (message := messages.get()) is not None:
            kind, value, buffer = message
            connection.send_bytes(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))
            memory = memoryview(buffer)
            while memory:
                memory = memory[os.write(connection.fileno(), memory) :]
    except BaseException:
        os._exit(1)


def _close_listening_sockets():
    """Close inherited sockets that listen, such as the rendezvous of the job.

    A new job could not take their port as long as this process holds them.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.close(int(name))
        except OSError:  # the descriptor of this listing itself
            continue


def end_workers():
    """Kill the data workers, which ignore the signals by which a job ends."""
    for worker in multiprocessing.active_children():
        worker.kill()
