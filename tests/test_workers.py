"""workers.py: batches as one process prepares them, and no process or wait without an end."""

import gc
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import datasets
import pytest
import torch

import ranks
from conftest import ROOT
from isogloss.data import stream as stream_module, workers
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.order import ExampleReader, MicroBatches, ShuffledExamples
from isogloss.data.stream import StreamedExamples
from isogloss.data.workers import Loader
from isogloss.errors import DataError, EngineStopped
from isogloss.job.columns import pack, take_apart
from jobs import ds_config, losses_of, write_corpus
from launched import wait_until
from tokens import translation_of
from wrong_input import outcomes


class Tensors:
    """Batches of many tensors, far beyond the 1 MiB that a pipe holds."""

    def __init__(self, end=10**9, width=4096):
        self.end = end
        self.width = width

    def __iter__(self):
        first, step = workers.worker_of()
        for number in range(first, self.end, step):
            yield [torch.full((4, self.width), number + i) for i in range(200)]


class Raises:
    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield torch.zeros(1)
        raise self.error


class Collects:
    def __iter__(self):
        gc.collect()
        yield torch.zeros(1)


class Cycle:
    """What only its own process may free, as a process group or a tensor of a GPU."""

    def __init__(self):
        self.itself = self
        self.process = os.getpid()

    def __del__(self):
        if os.getpid() != self.process:
            os._exit(9)


class Waits:
    def __iter__(self):
        while True:
            time.sleep(60)
        yield


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_batches_come_in_order_to_their_end(num_workers):
    read = list(Loader(Tensors(7), num_workers))
    assert [int(batch[0][0, 0]) for batch in read] == list(range(7))
    for number, batch in enumerate(read):
        for i, tensor in enumerate(batch):
            assert tensor.dtype == torch.int64 and bool((tensor == number + i).all())
            tensor += 1  # it can be written to


def as_received(batch):
    """Return (pickled, tensors) of a batch as a worker sends it, also of one that none has sent."""
    packed, buffer = pack(batch)
    return take_apart(packed.value(buffer))


@pytest.mark.parametrize("streaming", [False, True])
def test_batches_do_not_depend_on_the_number_of_workers(streaming, encoders, texts, monkeypatch):
    """Over several epochs, whose blocks end within a batch; resumed in the second one, too."""
    monkeypatch.setattr(stream_module, "BLOCK_ROWS", 9)
    dataset = datasets.Dataset.from_dict({"text": texts[:10]})
    collate = Collator(encoders[0], [PairOptions(encoders[1], translation_of(encoders))],
                       pack=True, tile_mib=0.3)

    def read(num_workers, start=0, place=None):
        stream = ShuffledExamples(dataset, ExampleReader("text"), 3)
        if streaming:
            stream = StreamedExamples(
                dataset.to_iterable_dataset(), ExampleReader("text"), 3, place=place)
        batches = MicroBatches(stream, collate, 4, 1, 0, 1, start)
        return list(itertools.islice(iter(Loader(batches, num_workers)), 7 - start))

    expected = read(0)
    assert sum(len(batch.teachers[0].tiles) for batch in expected) > 2 * len(expected)
    for num_workers, start in ((1, 0), (3, 0), (2, 4)):
        found = read(num_workers, start, expected[3].place if start else None)
        for one, other in zip(expected[start:], found, strict=True):
            (rest, tensors), (rest_of_other, others) = map(as_received, (one, other))
            assert rest == rest_of_other and len(tensors) == len(others)
            assert all(map(torch.equal, tensors, others))


def test_a_worker_frees_nothing_that_it_inherited():
    gc.collect()
    gc.disable()
    try:
        Cycle()
        assert len(list(Loader(Collects(), 1))) == 1
        assert gc.collect() and not gc.get_freeze_count()
    finally:
        gc.enable()


def test_a_window_of_many_batches_needs_no_descriptors():
    """Shared by descriptor, 64 batches of 200 tensors would need 12,800."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    batches = iter(Loader(Tensors(width=256), 2))
    next(batches)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    try:
        read = list(itertools.islice(batches, 64))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [int(batch[0][0, 0]) for batch in read] == list(range(1, 65))
    for batch in read:  # each of them is one buffer
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch}) == 1


@pytest.mark.parametrize("error, num_workers, kind, said", [
    (ValueError("row 7 holds nothing"), 0, DataError, r"^row 7 holds nothing$"),
    (ValueError("row 7 holds nothing"), 1, DataError, r"^row 7 holds nothing$"),
    (KeyError("text"), 1, RuntimeError, r"(?s)Traceback.*KeyError: 'text'")])
def test_wrong_data_is_a_line_and_any_other_error_has_its_traceback(
        error, num_workers, kind, said):
    batches = iter(Loader(Raises(error), num_workers))
    next(batches)
    with pytest.raises(kind, match=said):
        next(batches)


def test_a_worker_that_dies_is_noticed():
    batches = iter(Loader(Tensors(), 1))
    next(batches)
    [worker] = workers.multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=f"process {worker.pid}.* ended with code -9; .*workers"):
        for _ in range(4):  # what it has sent before is read first
            next(batches)


def test_no_wait_is_without_an_end(monkeypatch):
    monkeypatch.setattr(workers, "PERIOD", 0.01)
    monkeypatch.setattr(workers, "PATIENCE", 0.05)
    with pytest.raises(EngineStopped):
        next(iter(Loader(Waits(), 1, asked_to_end=lambda: True)))
    monkeypatch.setattr(workers, "TRAINING_TIMEOUT", workers.TRAINING_TIMEOUT * 0)
    with pytest.raises(DataError, match="has sent nothing for 0 minutes"):
        next(iter(Loader(Waits(), 1)))


def test_a_worker_that_stops_in_the_middle_of_a_batch_is_noticed(monkeypatch):
    batches = iter(Loader(Tensors(), 1))
    next(batches)
    [worker] = workers.multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(workers, "PERIOD", 0.01)
    monkeypatch.setattr(workers, "TRAINING_TIMEOUT", workers.TRAINING_TIMEOUT * 0)
    with pytest.raises(DataError, match="has sent nothing for 0 minutes"):
        next(batches)


PARENT = """
import multiprocessing, signal, socket, sys
from isogloss.data.workers import Loader
from test_workers import Tensors

listener = socket.socket()  # as the store of the job
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", 0))
listener.listen()
batches = iter(Loader(Tensors(), 2))
next(batches)
workers = [worker.pid for worker in multiprocessing.active_children()]
print(listener.getsockname()[1], *workers, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_workers_end_with_the_process_that_they_work_for():
    """They are blocked in a full pipe when it is killed; its port is free at once."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True,
                              cwd=ROOT)
    port, *processes = map(int, parent.stdout.readline().split())
    assert len(processes) == 2
    parent.kill()
    parent.wait()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
        again.listen()
    for process in processes:
        wait_until(lambda process=process: not os.path.exists(f"/proc/{process}"))


@pytest.mark.slow
def test_a_stream_that_goes_wrong_ends_all_ranks_with_a_line(models, texts, tmp_path):
    """It is known row by row; the checkpoint of the steps before stays."""
    data = write_corpus(tmp_path, [*texts[:30], None], 31)
    config = ds_config(tmp_path / "ds.json", 2, 2, 1)
    argv = [f"--student={models[0]}", f"--data={data}", f"--ds_config={config}", "--kd_weight=0",
            "--streaming", "--max_length=60", "--steps=50", "--save_every=1", "--num_workers=1",
            f"--output_dir={tmp_path / 'run'}"]
    ended = ranks.run(2, outcomes, tmp_path, argv, [""])
    lines = "".join(of_rank[0].stderr for of_rank in ended)
    assert [of_rank[0].exit_code for of_rank in ended] == [2, 2], lines
    assert lines.count("distill.py: ") == 1 and "Traceback" not in lines, lines
    assert "row 30 of 'text' is null, expected text" in lines
    # the progress bar does not share its line
    assert any(line.startswith("distill.py: ") for line in lines.split("\n")), lines
    last = losses_of(tmp_path / "run")[-1]["step"]
    assert last > 0 and (tmp_path / "run" / "checkpoints" / f"step_{last:07d}").exists()
