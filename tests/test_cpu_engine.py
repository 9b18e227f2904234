"""Passes that a step on a CPU leaves out change nothing but the last bits of an optimizer."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isogloss.student
import ranks
from isogloss.cpu_engine import fuse_optimizer
from isogloss.launch import silence_libraries, start_distributed

BUCKET = 1 << 20


class Regression(nn.Module):
    """A matrix larger than a bucket, two of which each fills one, and a small one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(1100, 1000)
        self.first = nn.Linear(1000, 1000)
        self.second = nn.Linear(1000, 1000)
        self.last = nn.Linear(1000, 1, bias=False)

    def forward(self, x):
        for layer in (self.large, self.first, self.second):
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


class LargeOperations(TorchDispatchMode):
    """Collect the names of what reads or writes a million elements at once, views apart."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_large = any(tensor.numel() >= 10**6 and 0 not in tensor.stride() for tensor in tensors)
        name = func.overloadpacket.__name__
        # a tensor that is copied to where it is costs nothing
        in_place = name == "copy_" and args[0].data_ptr() == args[1].data_ptr()
        if is_large and not in_place and not func.is_view:
            self.names.add(name)
        return result


def trained(stage, clipping, accumulation, params, leave_out):
    """Train for three steps; without `leave_out` as DeepSpeed does it.

    Returns:
        (the weights, whether Adam is fused, LargeOperations of the last step).
    """
    patch = pytest.MonkeyPatch()
    if not leave_out:
        patch.setattr(isogloss.student, "fuse_optimizer", lambda config: config)
        patch.setattr(isogloss.student, "leave_out_passes", lambda engine: None)
    rank = torch.distributed.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True} | params},
    }
    module = Regression()
    patch.setattr(isogloss.student, "optimizer_groups",
                  lambda module, _: [{"params": list(module.parameters())}])
    engine = isogloss.student.start_engine(module, config, "ds.json")
    patch.undo()
    torch.manual_seed(rank)
    for _ in range(3 * accumulation):
        engine.backward(engine(torch.randn(4, 1100)))
        with LargeOperations() as operations:
            engine.step()
    fused = engine.optimizer.optimizer.param_groups[0]["fused"]
    weights = [weight.detach().clone() for weight in module.parameters()]
    return weights, fused, operations.names


def compare_all(cases):
    """Return {case: (largest difference, whether each side was fused, operations)} on this rank."""
    start_distributed()
    silence_libraries()
    results = {}
    for case in cases:
        stage, clipping, accumulation, is_fused = case
        params = {} if is_fused else {"foreach": False}
        ours, ours_fused, operations = trained(stage, clipping, accumulation, params, True)
        theirs, theirs_fused, _ = trained(stage, clipping, accumulation, params, False)
        gaps = [(a - b).abs().max() for a, b in zip(ours, theirs)]
        results[case] = float(torch.stack(gaps).max()), ours_fused, theirs_fused, operations
    return results


# stage, clipping (1e-3: of every step, 1e6: of none), accumulation steps, fused
CASES = [(1, 1e6, 1, False), (2, 1e-3, 1, False), (2, 1e6, 2, False), (2, 1e6, 1, True),
         (1, 1e-3, 1, True), (2, 0.0, 2, True)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_left_out_changes_no_weight(num_ranks):
    """No bit without the fused optimizer; with it, less than a hundredth of a step of 1e-3.

    Adam divides a gradient by its own size, so where that is tiny, its rounding counts.
    """
    for of_rank in ranks.run(num_ranks, compare_all, CASES):
        for case, (gap, ours_fused, theirs_fused, operations) in of_rank.items():
            is_fused = case[-1]
            assert bool(ours_fused) is is_fused and not theirs_fused, case
            assert gap <= (1e-5 if is_fused else 0), (case, gap)
            # one pass, clipping included; ranks also gather the weights of the others
            passes = operations - {"_allgather_base_", "allgather_", "allgather_into_tensor_"}
            assert passes == {"_fused_adamw_"} or not is_fused, (case, operations)
            if not is_fused:
                assert "cat" in operations, case  # it sees them


def test_the_choice_of_the_configuration_stays():
    def params_of(**params):
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3} | params}}
        return fuse_optimizer(config)["optimizer"]["params"], config["optimizer"]["params"]

    filled, given = params_of(torch_adam=True)
    assert filled["fused"] is True and "fused" not in given
    for params in ({}, {"torch_adam": True, "fused": False}, {"torch_adam": True, "foreach": True}):
        filled, given = params_of(**params)
        assert filled == given
