"""Move numbers between the host and a device beside the device's work.

A device works through a queue.  A host that waits for a number at the end of a step lets the queue
run empty, and the next step begins late.  So the host reads what a step has computed only once the
next one is in the queue (`Readback`), measures times where the device passes (`Moment`), and lets
batches come in while the device works (`Uploads`).

On a CPU the same calls copy, look at the clock, and move nothing: whatever was asked for is
computed when a call returns.

Tests: tests/test_transfers.py; on a GPU `overlap` of benchmarks/gpu.py.
"""

import time

import torch

from isogloss.job.columns import moved_to_device


class Readback:
    """Hold numbers that a device has still to compute, until the host reads them.

    Their copy is queued at once.  So it is not changed by what is done to the tensor afterwards,
    and reading waits for the copy alone, not for what is queued behind it.
    """

    def __init__(self, numbers):
        numbers = numbers.detach()
        self.copied = None
        if numbers.device.type != "cuda":
            self.host_copy = numbers.to("cpu", copy=True)
            return
        self.host_copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self.host_copy.copy_(numbers, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def read(self):
        """Return the numbers as (nested) lists, of a () tensor as one number."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host_copy.tolist()


class Moment:
    """Mark the moment at which a device comes to what is queued now."""

    def __init__(self, device):
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.time = time.perf_counter()
            self.processor_time = time.process_time()

    def seconds_until(self, later):
        """Return the seconds between two moments of a device, once it has passed both."""
        if self.event is None:
            return later.time - self.time
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


class Uploads:
    """Copy batches to a device on a stream of their own, beside what the device computes.

    A copy from pinned memory that is queued behind a step would wait for the step's end.
    """

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, batches):
        """Return batches on the device; what is queued from now on finds them there."""
        if self.stream is None:
            return [moved_to_device(batch, self.device)[0] for batch in batches]
        moved = []
        with torch.cuda.stream(self.stream):
            uploads = [moved_to_device(batch, self.device) for batch in batches]
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self.stream)
        for batch, storages in uploads:
            for tensor in storages:
                # this memory belongs to the other stream, which may not take it back before this
                # one has used it
                tensor.record_stream(computing)
            moved.append(batch)
        return moved
