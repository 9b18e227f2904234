"""Passes over all weights or gradients that a step on a CPU can do without.

A student with a large vocabulary and few tokens a step spends most of its time on memory: each pass
over weights, gradients or moments reads them all.  DeepSpeed makes about twenty, of which the
following go, none of which changes more of a result than its last bits:

- PyTorch's Adam, for which a loop of ten operations is the default on a CPU, in one pass (`fused`).
- With one rank, the division of gradients by the number of ranks.
- The multiplication of gradients by a clipping factor of 1.
- The copy of a gradient out of a communication bucket in which it never was (ZeRO 1 and 2).

Tests: tests/test_cpu_engine.py.
"""

import copy

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

FUSED = "adam", "adamw"


def fuse_optimizer(config):
    """Return a ds_config in which PyTorch's Adam takes one pass, unless it says otherwise.

    Args:
        config: dict that DeepSpeed would get; left as it is.
    """
    params = config["optimizer"].get("params", {})
    name = config["optimizer"]["type"].lower()
    says_otherwise = "fused" in params or "foreach" in params
    if not on_cpu() or name not in FUSED or not params.get("torch_adam") or says_otherwise:
        return config
    config = copy.deepcopy(config)
    config["optimizer"]["params"]["fused"] = True
    return config


def leave_out_passes(engine):
    """Let an engine of ZeRO 1 or 2 on a CPU leave out the passes of this file's docstring."""
    optimizer = engine.optimizer
    # at stage 1 in bfloat16 DeepSpeed may choose an optimizer that makes other passes
    if not on_cpu() or not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    if dist.get_world_size(group=optimizer.dp_process_group) == 1:
        optimizer.gradient_average = False
    scale_gradients = optimizer.unscale_and_clip_grads
    copy_gradient = optimizer.copy_grads_in_partition

    def scale_unless_by_one(gradients, norm):
        # as DeepSpeed computes the factor; a norm that is NaN goes on to it
        is_short = optimizer.clip_grad > 0 and norm + 1e-6 <= optimizer.clip_grad
        if not (is_short and optimizer.loss_scale == 1):
            scale_gradients(gradients, norm)

    def copy_unless_alone(param, *args, **options):
        # larger than a bucket, it was reduced where backward has left it
        is_alone = optimizer.contiguous_gradients and param.numel() > optimizer.reduce_bucket_size
        if not is_alone:
            copy_gradient(param, *args, **options)

    optimizer.unscale_and_clip_grads = scale_unless_by_one
    if not optimizer.cpu_offload:
        optimizer.copy_grads_in_partition = copy_unless_alone


def on_cpu():
    return get_accelerator().device_name() == "cpu"
