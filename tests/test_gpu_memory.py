"""How much memory a loss takes on a GPU, counted on a CPU from torch's own allocations."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from interpreted import on_cpu  # noqa: F401
from isogloss import losses, tiles

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("fire")

from benchmarks import gpu
from benchmarks.loss import Sizes

SIZES = Sizes(96, 3000, 3600, 32, 32, 0, 0.5)


def peak_bytes(run):
    """Return the most bytes that torch had allocated at a time while `run` ran, above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            events.append((event.start_ns(), event.nbytes()))
    now = 0
    most = 0
    for _, nbytes in sorted(events):
        now += nbytes
        most = max(most, now)
    return most


LOSSES = [("forward_kl", 0), ("gold", 0), ("projection_kl", 200), ("projection_kl", SIZES.W),
          ("piece_kl", 0)]


def run_of(name, kept, sizes, monkeypatch):
    """Return the TableRun of a loss; kept: columns of projection_kl."""
    monkeypatch.setattr(losses, "HAS_TRITON_KERNELS", losses.HAS_TRITON_KERNELS)
    monkeypatch.setattr(losses, "ORDERED_DEVICES", ())  # as on a GPU
    monkeypatch.setattr(gpu, "KEPT_COLUMNS", kept)
    return gpu.TableRun(name, sizes, "kernels", "cpu")


@pytest.mark.parametrize(("name", "kept"), LOSSES)
def test_a_loss_stays_within_the_memory_of_its_tiles(name, kept, monkeypatch):
    """Beside the head's own gradient, and that of the hidden states in float32."""
    # on a CPU a product in half precision, and then in float32, is added to the gradient, and a
    # matmul may copy a weight
    monkeypatch.setattr(tiles, "GRADIENT_BLOCK", 100)
    run = run_of(name, kept, SIZES, monkeypatch)
    assert len(run.plan) > 1
    head_bytes = 4 * run.weight.numel()
    hidden_bytes = 4 * run.hidden.numel()
    of_cpu = 6 * tiles.GRADIENT_BLOCK * SIZES.H + run.weight.nbytes
    most = peak_bytes(run.loss_value)
    assert most <= head_bytes + hidden_bytes + of_cpu + SIZES.memory_mib * tiles.MIB


@pytest.mark.parametrize(("name", "kept"), LOSSES)
def test_a_sub_tile_takes_its_fraction_of_the_memory(name, kept, monkeypatch):
    """The small nodes of piece_kl included, of which there are as many a position as in texts."""
    sizes = SIZES._replace(tokens=4 * SIZES.tokens, memory_mib=4 * SIZES.memory_mib)
    run = run_of(name, kept, sizes, monkeypatch)
    sub_tiles = [sub_tile for tile in run.plan for sub_tile in tile.sub_tiles]
    largest = max(sub_tiles, key=lambda sub_tile: len(sub_tile.student_labels))
    num_V = sizes.V
    num_W = run.teacher.head.tokens
    x = torch.randn(len(largest.student_labels), num_V).bfloat16()
    y = torch.randn(len(largest.teacher_labels), num_W).bfloat16()
    most = peak_bytes(lambda: run.loss.overwrite(x, y, largest, (1.0, 1.0)))
    fraction = tiles.KERNEL_SUB_TILES.memory_fraction
    assert most <= fraction * sizes.memory_mib * tiles.MIB
