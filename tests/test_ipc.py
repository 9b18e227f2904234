"""ipc.py: the same memory in several processes, in order, and nothing left behind.

The same tests run on the CPU (shared memory) and on a GPU (CUDA IPC).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
from conftest import ROOT

import ipc

DTYPES = torch.float32, torch.bfloat16, torch.int64, torch.uint8


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("CUDA IPC needs a GPU, and there is none")
    return request.param


def pattern(number, dtype, device="cpu"):
    """A tensor that is known by its number; sizes go up and down."""
    size = (3 + number % 3, 50 * (1 + number * 7 % 5))
    return (torch.arange(size[0] * size[1], device=device).view(size) * (number + 1) % 120).to(dtype)


def named_shared_memory(process="self"):
    """Files of /dev/shm that one process has mapped; other processes of the machine have files there too."""
    maps = Path(f"/proc/{process}/maps").read_text()
    return set(re.findall(r"/dev/shm/\S+", maps))


def writer(pipes, device, steps, slots):
    """A rank that shares tensors with the others."""
    before = named_shared_memory()
    fixed = [ipc.share(pattern(9, dtype, device)) for dtype in DTYPES]
    scalar = ipc.share(torch.tensor(5.0, device=device)), ipc.share(torch.empty(0, 4, device=device))
    outbox = ipc.TensorWriter(len(pipes), slots, timeout=60)
    for pipe in pipes:
        pipe.send((fixed, scalar, outbox.handle))
    for number in range(steps):
        outbox.put(pattern(number, DTYPES[number % 4], device))
    for pipe in pipes:
        assert pipe.recv() == "done"
    assert ipc.attach(fixed[0])[0, 0] == -1  # what a reader wrote
    assert named_shared_memory() <= before  # nothing has a name, so nothing can stay behind
    shared = len(ipc._kept)
    outbox.close()
    return shared, len(ipc._kept)


def reader(pipe, index, steps):
    fixed, scalar, handle = pipe.recv()
    tensors = [ipc.attach(h) for h in fixed]
    for tensor, dtype in zip(tensors, DTYPES):
        assert tensor.dtype == dtype and torch.equal(tensor.cpu(), pattern(9, dtype))
    assert ipc.attach(scalar[0]) == 5 and ipc.attach(scalar[1]).shape == (0, 4)
    inbox = ipc.TensorReader(handle, index, timeout=60)
    for number in range(steps):
        with inbox.take() as tensor:
            for _ in range(3):  # it does not change while it is held
                assert torch.equal(tensor.cpu(), pattern(number, DTYPES[number % 4])), number
    if index == 0:
        tensors[0][0, 0] = -1
        ipc._finish(tensors[0].device)
    pipe.send("done")


def role(pipes, device, steps, slots):
    rank = int(os.environ["RANK"])
    if rank == 0:
        return writer([ours for ours, _ in pipes], device, steps, slots)
    return reader(pipes[rank - 1][1], rank - 1, steps)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_readers_see_every_tensor_whole_and_in_order(device, slots):
    pipes = [ranks._context.Pipe() for _ in range(2)]
    (most, left), *_ = ranks.run(3, role, pipes, device, 60, slots)
    assert most <= 6 + 1 + 4 * slots and left == 6  # buffers are used again


def last_words(pipe, device, silent):
    outbox = ipc.TensorWriter(1, 2, timeout=0.5 if silent else 60)
    outbox.put(torch.ones(1 << 20, device=device))
    pipe.send(outbox.handle)
    if silent:
        with pytest.raises(ipc.PeerDied, match="said nothing for"):
            for _ in range(3):
                outbox.put(torch.ones(1))
    else:
        signal.pause()


def test_a_killed_writer_leaves_nothing_and_is_noticed(device):
    ours, theirs = ranks._context.Pipe()
    group = ranks.start(1, last_words, theirs, device, False)
    inbox = ipc.TensorReader(ours.recv(), 0, timeout=60)
    files = named_shared_memory(group[0][0].pid)
    with inbox.take() as tensor:
        ranks.kill(group)
        if device == "cpu":
            assert tensor.sum() == 1 << 20  # what is mapped stays
    begin = time.monotonic()
    with pytest.raises(ipc.PeerDied, match=f"the writer .process {group[0][0].pid}. has ended"):
        with inbox.take():
            pass
    assert time.monotonic() - begin < 30  # long before the timeout
    assert not [name for name in files if os.path.exists(name)]


def test_a_silent_reader_is_noticed(device):
    ours, theirs = ranks._context.Pipe()
    group = ranks.start(1, last_words, theirs, device, True)
    ours.recv()
    ranks.results(group)


def test_what_was_released_cannot_be_attached():
    handle = ipc.share(torch.ones(3))
    view = ipc.attach(handle)
    ipc.release(handle)
    assert view.sum() == 3
    with pytest.raises(OSError):
        ipc.attach(handle)


def test_the_file_works_alone(tmp_path):
    shutil.copy(ROOT / "ipc.py", tmp_path)
    code = "import torch, ipc; print(ipc.attach(ipc.share(torch.arange(3))).tolist())"
    here = {**os.environ, "PYTHONPATH": str(tmp_path)}
    how = dict(cwd=tmp_path, env=here, capture_output=True, text=True)
    found = subprocess.run([sys.executable, "-c", code], **how)
    assert found.stdout.strip() == "[0, 1, 2]", found.stderr
