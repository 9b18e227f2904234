"""ipc.py: the same memory in several processes, in order, and nothing left behind.

The same tests run on the CPU (shared memory) and on a GPU (CUDA IPC).
"""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import ranks
from isogloss.job import ipc

DTYPES = torch.float32, torch.bfloat16, torch.int64, torch.uint8


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("CUDA IPC needs a GPU, and there is none")
    return request.param


def pattern(number, dtype, device="cpu"):
    """Make a tensor that is known by its number; sizes go up and down."""
    height = 3 + number % 3
    width = 50 * (1 + number * 7 % 5)
    values = torch.arange(height * width, device=device).view(height, width) * (number + 1)
    return (values % 120).to(dtype)  # below 128, exact in every dtype


def named_shared_memory(process="self"):
    """List the files of /dev/shm that a process maps; other processes have files there too."""
    maps = Path(f"/proc/{process}/maps").read_text()
    return set(re.findall(r"/dev/shm/\S+", maps))


def writer(pipes, device, steps, slots):
    """Publish tensors to the other ranks; return the publications before and after `close`."""
    before = named_shared_memory()
    fixed = [ipc.publish(pattern(9, dtype, device)) for dtype in DTYPES]
    scalar = ipc.publish(torch.tensor(5.0, device=device))
    empty = ipc.publish(torch.empty(0, 4, device=device))
    tensor_writer = ipc.TensorWriter(len(pipes), slots, timeout=60)
    for pipe in pipes:
        sent = [handle.to_plain() for handle in (*fixed, scalar, empty, tensor_writer.handle)]
        pipe.send(json.dumps(sent))
    for number in range(steps):
        tensor_writer.put(pattern(number, DTYPES[number % 4], device))
    for pipe in pipes:
        assert pipe.recv() == "done"
    assert ipc.attach(fixed[0])[0, 0] == -1  # what a reader wrote
    assert named_shared_memory() <= before  # nothing has a name, so nothing can stay behind
    published = len(ipc._published)
    tensor_writer.close()
    return published, len(ipc._published)


def reader(pipe, index, device, steps):
    *plain, plain_writer = json.loads(pipe.recv())
    *fixed, scalar, empty = [ipc.Handle.from_plain(handle) for handle in plain]
    handle = ipc.WriterHandle.from_plain(plain_writer)
    tensors = [ipc.attach(h) for h in fixed]
    for tensor, dtype in zip(tensors, DTYPES):
        assert tensor.dtype == dtype and torch.equal(tensor.cpu(), pattern(9, dtype))
    assert ipc.attach(scalar) == 5
    assert ipc.attach(empty).shape == (0, 4)
    tensor_reader = ipc.TensorReader(handle, index, timeout=60)
    for number in range(steps):
        with tensor_reader.take() as tensor:
            for _ in range(3):  # it does not change while it is held
                assert torch.equal(tensor.cpu(), pattern(number, DTYPES[number % 4])), number
    if index == 0:
        tensors[0][0, 0] = -1
        if device == "cuda":
            torch.cuda.synchronize()
    tensor_reader.close()
    pipe.send("done")


def role(pipes, device, steps, slots):
    rank = int(os.environ["RANK"])
    if rank == 0:
        return writer([ours for ours, _ in pipes], device, steps, slots)
    return reader(pipes[rank - 1][1], rank - 1, device, steps)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_readers_see_every_tensor_whole_and_in_order(device, slots):
    pipes = [ranks._context.Pipe() for _ in range(2)]
    (published, left), *_ = ranks.run(3, role, pipes, device, 60, slots)
    # Six tensors, the board, and few buffers per slot for 60 tensors: buffers are used again.
    assert published <= 6 + 1 + 4 * slots
    assert left == 6


def test_counters_wait_for_the_device_and_the_host_does_not(monkeypatch):
    """A device that is not done stands for a GPU: marks are functions that wait for it."""
    done = []  # for each mark in turn what lets it happen

    def mark(device):
        done.append(threading.Event())
        return done[-1].wait

    monkeypatch.setattr(ipc, "_mark", mark)
    writer = ipc.TensorWriter(readers=1, slots=2, timeout=0.2)
    reader = ipc.TensorReader(writer.handle, 0, timeout=0.2)
    writer.put(torch.ones(3))
    with pytest.raises(ipc.PeerDied):
        reader.next()
    writer.put(torch.ones(3) * 2)
    done[1].set()  # the second alone says nothing: readers take them in order
    with pytest.raises(ipc.PeerDied):
        reader.next()
    done[0].set()
    reader.timeout = writer.timeout = 30
    assert [reader.next()[0].item() for _ in range(2)] == [1, 2]
    reader.release()
    writer.timeout = 0.2
    with pytest.raises(ipc.PeerDied):  # the reader's device still reads both
        writer.put(torch.zeros(3))
    done[2].set()
    writer.timeout = 30
    writer.put(torch.zeros(3))
    done[3].set()
    writer.close()


def test_what_a_device_says_is_raised(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(ipc, "_mark", lambda device: broken)
    writer = ipc.TensorWriter(readers=1, slots=2)
    writer.put(torch.ones(3))
    with pytest.raises(RuntimeError, match="CUDA error"):
        writer.close()


def last_words(pipe, device, silent):
    tensor_writer = ipc.TensorWriter(1, 2, timeout=0.5 if silent else 60)
    tensor_writer.put(torch.ones(1 << 20, device=device))
    pipe.send(tensor_writer.handle)
    if silent:
        with pytest.raises(ipc.PeerDied, match=r"reader 0 \(process 0\) did not respond for"):
            for _ in range(3):
                tensor_writer.put(torch.ones(1))
    else:
        signal.pause()


def test_a_killed_writer_leaves_nothing_and_is_noticed(device):
    ours, theirs = ranks._context.Pipe()
    group = ranks.start(1, last_words, theirs, device, False)
    tensor_reader = ipc.TensorReader(ours.recv(), 0, timeout=60)
    process = group[0][0].pid
    files = named_shared_memory(process)
    with tensor_reader.take() as tensor:
        ranks.kill(group)
        if device == "cpu":
            assert tensor.sum() == 1 << 20  # what is mapped stays
    begin = time.monotonic()
    with pytest.raises(ipc.PeerDied, match=rf"the writer \(process {process}\) has ended"):
        tensor_reader.next()
    assert time.monotonic() - begin < 30  # long before the timeout
    assert not [name for name in files if os.path.exists(name)]


def test_a_silent_reader_is_noticed(device):
    ours, theirs = ranks._context.Pipe()
    group = ranks.start(1, last_words, theirs, device, True)
    ours.recv()
    ranks.results(group)


def test_the_memory_is_its_owners_and_is_gone_when_it_is_released():
    handle = ipc.publish(torch.ones(3))
    assert os.fstat(handle.location[1]).st_mode & 0o777 == 0o600  # for its owner alone
    view = ipc.attach(handle)
    ipc.release(handle)
    assert view.sum() == 3
    with pytest.raises(OSError):
        ipc.attach(handle)


@pytest.mark.parametrize("change", [
    {"location": ["../../tmp", 1]}, {"dtype": "load"}, {"shape": ["a"]}, {"nbytes": None},
])
def test_a_handle_that_holds_something_else_is_refused(change):
    handle = ipc.publish(torch.ones(3))
    with pytest.raises((ValueError, TypeError)):
        ipc.Handle.from_plain(handle.to_plain() | change)
    ipc.release(handle)
