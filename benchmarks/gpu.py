"""Checks of what only a GPU shows: shared memory, compiled formulas, waits of the host, times.

gpu_day.py runs each in a process of its own, so that one that fails, or hangs, hides no other.  A
check returns (whether it passed, {name: figure}).  What needs two devices, or a package that is not
there, is skipped.

The checks of this file need torch alone, `compiled` triton too; `no_synchronization` and the table
of losses what benchmarks/loss.py imports.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from isogloss import losses, tiles
from isogloss.job import ipc
from isogloss.models.compiler import loss_compiler, missing_compiler

MIB = 2**20
SIZES = 4, MIB, 3 * MIB, 3 * MIB + 4  # bytes that processes share; the last is no power of two
LEAST_SECONDS = 10  # in which the memory of a killed process has to be free again
START_METHOD = "spawn"  # of processes
TABLE_LOSSES = "forward_kl", "piece_kl", "gold", "projection_kl", "alm"
KEPT_COLUMNS = 8192  # of projection_kl, as its option projection_topk
TABLE_PATHS = ("tiled", 4096), ("compiled", 4096), ("compiled", 512)  # MiB of a loss
DEVICE = "cuda"
DIVERGENCES = ("forward_kl", "reverse_kl", "generalized_jsd", "skew_forward_kl",
               "skew_reverse_kl", "total_variation")


class Skipped(Exception):
    """Say why a check cannot run here."""


def need_devices(count):
    present = torch.cuda.device_count()
    if present < count:
        raise Skipped(f"needs {count} GPUs, and there are {present}")


def rounded(value):
    return round(value, 5)


# --- memory that processes share ------------------------------------------------------------------


def pattern(nbytes, seed, device):
    """Return (nbytes,) uint8 that differ by seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), generator=generator).to(torch.uint8).to(device)


def spawn(function, *arguments, daemon=True):
    """Start a process, which may have its own where it is no daemon; return (it, pipe to it)."""
    context = multiprocessing.get_context(START_METHOD)
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments), daemon=daemon)
    process.start()
    there.close()
    return process, here


def received(pipe, timeout=120):
    if not pipe.poll(timeout):
        raise TimeoutError(f"the other process said nothing for {timeout} s")
    return json.loads(pipe.recv_bytes())


def send(pipe, value):
    pipe.send_bytes(json.dumps(value).encode())


def read_and_answer(pipe, device):
    """Read what another process published, say whether it is right, and write to it."""
    if device != "cpu":
        torch.cuda.set_device(device)
    handles = [ipc.Handle.from_plain(plain) for plain in received(pipe)]
    right = []
    for seed, handle in enumerate(handles):
        memory = ipc.attach(handle)
        right.append(bool(torch.equal(memory.cpu(), pattern(handle.nbytes, seed, "cpu"))))
    for seed, handle in enumerate(handles):
        ipc.attach(handle).copy_(pattern(handle.nbytes, seed + 100, "cpu"))
    if device != "cpu":
        torch.cuda.synchronize()
    send(pipe, right)
    received(pipe)  # the writer is done


def share_between(writer_device, reader_device):
    """Publish tensors of odd sizes, let another process read and write them, and look again.

    Small tensors of one process may lie in one allocation of the driver, and then a handle that
    knows the allocation alone would name the first of them: so each size is there twice.
    """
    sizes = [*SIZES, *SIZES]
    handles = []
    for seed, nbytes in enumerate(sizes):
        handles.append(ipc.publish(pattern(nbytes, seed, writer_device)))
    process, pipe = spawn(read_and_answer, reader_device)
    send(pipe, [handle.to_plain() for handle in handles])
    read_right = received(pipe)
    written_right = []
    for seed, handle in enumerate(handles):
        expected = pattern(handle.nbytes, seed + 100, "cpu")
        written_right.append(bool(torch.equal(ipc.attach(handle).cpu(), expected)))
    send(pipe, "done")
    process.join(60)
    for handle in handles:
        ipc.release(handle)
    figures = {"bytes": sizes, "read": read_right, "written": written_right}
    return all(read_right) and all(written_right), figures


def ipc_same_device():
    return share_between(f"{DEVICE}:0", f"{DEVICE}:0")


def ipc_two_devices():
    need_devices(2)
    return share_between(f"{DEVICE}:0", f"{DEVICE}:1")


def write_and_end(pipe, device):
    """Publish one tensor, wait until it was read, and end without a word."""
    writer = ipc.TensorWriter(readers=1)
    send(pipe, writer.handle.to_plain())
    writer.put(pattern(MIB, 0, device))
    received(pipe)
    os.kill(os.getpid(), signal.SIGKILL)


def writer_ends_first():
    """Have a reader find out that its writer ended, and compute on."""
    device = f"{DEVICE}:0"
    process, pipe = spawn(write_and_end, device)
    reader = ipc.TensorReader(ipc.WriterHandle.from_plain(received(pipe)), 0, timeout=60)
    with reader.take() as tensor:
        right = bool(torch.equal(tensor.cpu(), pattern(MIB, 0, "cpu")))
    send(pipe, "read")
    process.join(60)
    begin = time.perf_counter()
    try:
        reader.next()
        noticed = False
    except ipc.PeerDied:
        noticed = True
    seconds = time.perf_counter() - begin
    computes = float(torch.ones(8, device=device).sum()) == 8
    figures = {"right": right, "noticed": noticed, "notice_seconds": rounded(seconds)}
    return right and noticed and computes, figures


def ipc_full_cache():
    """Publish what fits only once torch's allocator has given its cache back."""
    _, total = torch.cuda.mem_get_info()
    blocks = []
    while torch.cuda.mem_get_info()[0] > 0.05 * total:
        blocks.append(torch.empty(int(0.02 * total), dtype=torch.uint8, device=DEVICE))
    del blocks
    free_before = torch.cuda.mem_get_info()[0]
    nbytes = int(0.2 * total)
    handle = ipc.publish(torch.zeros(1, dtype=torch.uint8, device=DEVICE).expand(nbytes))
    ipc.release(handle)
    figures = {"free_fraction_before": rounded(free_before / total), "bytes": nbytes}
    return free_before < nbytes, figures


def hold_memory(pipe, nbytes):
    handle = ipc.publish(torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE))
    send(pipe, handle.to_plain())
    received(pipe, timeout=3600)  # until it is killed


def attach_and_wait(pipe):
    handle = ipc.Handle.from_plain(received(pipe))
    memory = ipc.attach(handle)
    send(pipe, int(memory[:8].sum()))
    received(pipe)  # then it ends


def killed_process_frees_memory():
    """Kill the owner of shared memory that another process maps, let that end, and wait."""
    nbytes = min(2048 * MIB, torch.cuda.mem_get_info()[0] // 8)
    owner, owner_pipe = spawn(hold_memory, nbytes)
    plain = received(owner_pipe)
    reader, reader_pipe = spawn(attach_and_wait)
    send(reader_pipe, plain)
    received(reader_pipe)
    held = torch.cuda.mem_get_info()[0]
    owner.kill()
    owner.join()
    send(reader_pipe, "end")
    reader.join(60)
    begin = time.perf_counter()
    seconds = None
    while time.perf_counter() - begin < LEAST_SECONDS:
        if torch.cuda.mem_get_info()[0] - held >= nbytes:
            seconds = time.perf_counter() - begin
            break
        time.sleep(0.01)
    figures = {"bytes": nbytes, "free_after_seconds": None if seconds is None else rounded(seconds)}
    return seconds is not None, figures


# --- losses ---------------------------------------------------------------------------------------


def relative_error(ours, exact):
    """Return the norm of the difference over the norm of what is exact."""
    error = (ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-12)
    return float(error)


def compiled(rows=256, V=128_256, device=DEVICE, dtypes=(torch.float32, torch.bfloat16)):
    """Compare compiled divergences with float64, and two runs with each other.

    Half precision may have twice the plain path's error.
    """
    if missing := missing_compiler():
        raise Skipped(missing)
    figures = {}
    passed = True
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        x, y = (3 * torch.randn(2, rows, V, generator=generator)).to(device, dtype)
        for name in DIVERGENCES:
            function = getattr(losses, name)
            in_graph = loss_compiler("compiled", device)(function)
            runs = [gradient_of(in_graph, x, y) for _ in range(2)]
            exact = gradient_of(function, x.double(), y.double())
            plain_error = relative_error(gradient_of(function, x, y), exact)
            error = relative_error(runs[0], exact)
            repeats = bool(torch.equal(*runs))
            figures[f"{name} {dtype}"] = {
                "error": error, "plain_error": plain_error, "two_runs_equal": repeats}
            passed &= repeats and error <= 2 * plain_error + 1e-5
    return passed, figures


def gradient_of(divergence, x, y):
    """Return the gradient of a divergence by the student's logits."""
    leaf = x.detach().requires_grad_()
    value, _ = divergence(leaf[None], y[None], None)
    return torch.autograd.grad(value, leaf)[0]


class TableRun:
    """Hold the inputs of one line of the loss table: a loss and the cross-entropy, as in a run.

    Args:
        name: see `benchmarks.loss`.
        sizes: `benchmarks.loss.Sizes`.
        path: tiled, or compiled.
    """

    def __init__(self, name, sizes, path):
        from benchmarks import loss as bench
        from isogloss.objective.objective import Part

        self.run = bench.prepare(name, sizes, torch.bfloat16)
        self.teacher = self.run.teacher_logits(self.run.tiles)
        loss = self.run.compiled_built if path == "compiled" else self.run.built
        self.part = Part(
            loss.loss_fn, loss.write_gradient, teacher_logits=self.teacher, ce_weight=1.0,
            batch=SimpleNamespace(tiles=self.run.tiles), weight=1.0, student_hidden=self.run.hidden)

    def step(self):
        """Compute loss and gradients; nothing here reads them back."""
        self.run.clear_gradients()
        loss, _ = tiles.tiled_losses(tiles.Head(self.run.weight), [self.part])
        loss.backward()


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib(reset=False):
    """Return the most GiB that torch has had on a GPU, or has now, from when on the peak counts."""
    if not torch.cuda.is_available():
        return 0.0
    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 2**30


def timed(run, times=3):
    """Return the median seconds of some runs after one that warms up; 0 runs: those of that one."""
    seconds = []
    for _ in range(1 + times):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[1:] or seconds)[times // 2]


def table_line(name, sizes):
    """Return {path and MiB: figures} of one loss.

    Args:
        sizes: `benchmarks.loss.Sizes`, whose MiB are those of each path.
    """
    lines = {}
    for path, memory_mib in TABLE_PATHS:
        run = TableRun(name, sizes._replace(memory_mib=memory_mib), path)
        first_seconds = timed(run.step, times=0)
        before = peak_gib(reset=True)
        seconds = timed(run.step)
        gib = peak_gib() - before
        head_gib = run.run.weight.numel() * 4 / 2**30  # its gradient, float32 until the end
        matmuls = timed(run.run.matmuls)
        lines[f"{path} {memory_mib}"] = {
            "first_seconds": rounded(first_seconds), "seconds": rounded(seconds),
            "of_matmuls": round(seconds / matmuls, 2),
            "GiB_above_head_gradient": round(gib - head_gib, 2),
            "sub_tiles": sum(len(tile.sub_tiles) for tile in run.run.tiles)}
        del run
    return lines


def watch_waits(mode):
    """Set what torch says of waits for a GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def waits_counted(waits):
    """Add to {file:line: count} where the host waits for a GPU meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch_waits("warn")
        yield
        watch_waits("default")
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            place = f"{Path(warning.filename).name}:{warning.lineno}"
            waits[place] = waits.get(place, 0) + 1


def no_synchronization(tokens=1024):
    """Report where a loss makes the host wait for the device, in the middle of a step."""
    from benchmarks.loss import Sizes

    figures = {}
    for name, path in itertools.product(TABLE_LOSSES, ("tiled", "compiled")):
        run = TableRun(name, Sizes(tokens, 32_000, 48_000, 512, 512, KEPT_COLUMNS, 512), path)
        run.step()
        synchronize()
        waits = {}
        with waits_counted(waits):
            run.step()
        figures[f"{name} {path}"] = waits
    return not any(figures.values()), {"waits": figures}
