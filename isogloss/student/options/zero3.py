"""What ZeRO-3 needs beside the other stages: shards without what lay in memory before.

Tests: tests/test_finite.py, tests/test_distributed.py.
"""

import torch
import torch.distributed as dist


@torch.no_grad()
def clear_padding(engine):
    """Set to 0 what ZeRO-3 adds to weights so that all shards have one size.

    DeepSpeed leaves there what the memory held.  NaN would be a state that is not finite, and an
    optimizer that takes a norm of its weights would count it.
    """
    for parameter in engine.module.parameters():
        num_weights, _ = shard_sizes(parameter)
        parameter.ds_tensor[num_weights:] = 0
    optimizer = engine.optimizer
    masters = optimizer.fp32_partitioned_groups_flat  # copies, made when the engine started
    for group, master in zip(optimizer.fp16_groups, masters, strict=True):
        start = 0
        for parameter in group:
            num_weights, size = shard_sizes(parameter)
            master[start + num_weights : start + size] = 0
            start += size


def shard_sizes(parameter):
    """Return (weights in this rank's shard of a partitioned parameter, those and its padding)."""
    size = parameter.partition_numel()
    first = size * dist.get_rank(parameter.ds_process_group)
    return min(max(parameter.ds_numel - first, 0), size), size
