"""How much memory a loss takes on a GPU, counted on a CPU from torch's own allocations."""

import pytest
from torch.profiler import ProfilerActivity, profile

import losses
from interpreted import on_cpu  # noqa: F401
from tiles import MIB

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


@pytest.mark.parametrize("name", ["forward_kl", "gold", "projection_kl"])
def test_a_loss_stays_within_the_memory_of_its_tiles(name, monkeypatch):
    """Beside the head's own gradient, and that of the hidden states in float32."""
    monkeypatch.setattr(losses, "HAS_TRITON_KERNELS", losses.HAS_TRITON_KERNELS)
    monkeypatch.setattr(gpu, "KEPT_COLUMNS", 200)
    run = gpu.TableRun(name, SIZES, "kernels", "cpu")
    assert len(run.plan) > 1
    head_bytes = 4 * run.weight.numel()
    hidden_bytes = 4 * run.hidden.numel()
    # on a CPU a product in half precision, and then in float32, is added to the gradient
    product_bytes = 6 * run.weight.numel()
    most = peak_bytes(run.loss_value)
    assert most <= head_bytes + hidden_bytes + product_bytes + SIZES.memory_mib * MIB
