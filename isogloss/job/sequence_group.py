"""Ranks that hold the shards of the same sequences, and the one exchange between them.

A chunk is owned by the rank that holds its first position.  Its positions on later ranks form the
halo: `gather_halo` brings their values to the owner.  The halo grows with the number of chunks
that a shard boundary cuts, not with the length of the sequence.

Tests: tests/test_sequence.py.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from isogloss.job.rendezvous import LOADING_TIMEOUT


class SequenceGroup(NamedTuple):
    """Name the ranks that hold the shards of the same sequences, in order.

    group: process group of torch.distributed.
    rank: index of this rank in the group, which is also the index of its shard.
    size: ranks in the group, and so shards of a sequence.
    """

    group: object
    rank: int
    size: int


def join_sequence_group(size):
    """Join the group of `size` neighboring ranks that this rank is in; all ranks take part.

    Returns:
        SequenceGroup.
    """
    # new_group is collective: every rank has to create every group, in the same order.
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=LOADING_TIMEOUT)
        if dist.get_rank() in ranks:
            sequence_group = SequenceGroup(group, ranks.index(dist.get_rank()), size)
    return sequence_group


def gather_halo(logits, halo_index_M, sequence_group):
    """Append the halo of the group to the positions that this rank holds.

    Differentiable: gradients of halo positions flow back to the ranks that hold them.  One
    collective forward and one backward, in which all ranks of the group take part.

    Args:
        logits: `tiles.HiddenLogits` or `tiles.StoredLogits` of the rank's own shard, N positions.
        halo_index_M: (M,) of its SequenceShard; None or empty: there is no halo.
        sequence_group: SequenceGroup.
    Returns:
        The same kind of logits, of N + M positions, as `SequenceShard.local_position` counts them.
    """
    if halo_index_M is None or not len(halo_index_M):
        return logits
    return logits.with_values(halo_values(logits.values, halo_index_M, sequence_group))


def halo_values(values_NX, halo_index_M, sequence_group):
    """Return (N + M, X) values of positions, as `gather_halo` does for logits."""
    if halo_index_M is None or not len(halo_index_M):
        return values_NX
    halo_MX = _HaloExchange.apply(values_NX, halo_index_M, sequence_group.group)
    return torch.cat([values_NX, halo_MX])


class _HaloExchange(torch.autograd.Function):
    """Give every rank of a group all halo values; backward sums their gradients at the holders."""

    @staticmethod
    def forward(ctx, values_NX, halo_index_M, group):
        held = (halo_index_M >= 0).nonzero().squeeze(1)
        held_index = halo_index_M[held]
        ctx.save_for_backward(held, held_index)
        ctx.group = group
        ctx.shape = values_NX.shape
        # Each position has one holder and is 0 on all others, so the sum over ranks is exact.
        halo_MX = values_NX.new_zeros(len(halo_index_M), values_NX.shape[1])
        halo_MX[held] = values_NX[held_index]
        dist.all_reduce(halo_MX, group=group)
        return halo_MX

    @staticmethod
    def backward(ctx, grad_MX):
        held, held_index = ctx.saved_tensors
        grad_MX = grad_MX.contiguous()
        dist.all_reduce(grad_MX, group=ctx.group)
        grad_values_NX = grad_MX.new_zeros(ctx.shape)
        grad_values_NX[held_index] = grad_MX[held]
        return grad_values_NX, None, None
