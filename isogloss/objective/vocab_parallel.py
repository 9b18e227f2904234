"""Compute softmaxes, top-k and gathers over a vocabulary whose columns are sharded over ranks.

losses.py imports this file where it is called with `group`, the process group over which the last
axis of the logits is sharded in rank order, evenly or not.  Every rank gets the same result, and
the gradient of the columns that it holds.

Shapes: N rows, V columns of this rank's shard, K ids.  Ids count the columns of the whole
vocabulary.

Needs torch only.  Copy this file beside losses.py.  Tests: tests/test_divergences.py and
tests/test_chunk_losses.py.
License: Apache-2.0 (see LICENSE).
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; all go on with the same number, so each keeps the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _CopyToRanks(torch.autograd.Function):
    """Pass on a number of all ranks that meets columns of one rank: its gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _ColumnsToRows(torch.autograd.Function):
    """Send every rank a block of rows, get a block of columns from every rank; and back."""

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, heights: list[int], widths: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.heights = heights
        ctx.widths = widths
        ctx.group = group
        local_height = heights[dist.get_rank(group)]
        local_width = x_NV.shape[1]
        # all_to_all_single exchanges flat blocks; it wants their sizes in entries
        received = x_NV.new_empty(local_height * sum(widths))
        received_sizes = [local_height * width for width in widths]
        sent_sizes = [height * local_width for height in heights]
        sent = x_NV.reshape(-1)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
        blocks = []
        for block, width in zip(torch.split(received, received_sizes), widths):
            blocks.append(block.view(local_height, width))  # no -1: a rank may get no row
        return torch.cat(blocks, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rank = dist.get_rank(ctx.group)
        local_height = ctx.heights[rank]
        local_width = ctx.widths[rank]
        received = grads[0].new_empty(sum(ctx.heights) * local_width)
        received_sizes = [height * local_width for height in ctx.heights]
        sent_sizes = [local_height * width for width in ctx.widths]
        # the mirror image: blocks of columns go back to the ranks that hold them
        sent = torch.cat([block.reshape(-1) for block in torch.split(grads[0], ctx.widths, 1)])
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=ctx.group)
        return received.view(-1, local_width), None, None, None


class _WholeColumns(torch.autograd.Function):
    """Collect the columns of all ranks; all compute the same from them, so each keeps its own."""

    @staticmethod
    def forward(ctx: Any, x_NV: Tensor, widths: list[int], group: ProcessGroup) -> Tensor:
        ctx.widths = widths
        ctx.rank = dist.get_rank(group)
        shards = [x_NV.new_empty(len(x_NV), width) for width in widths]
        # gloo gathers tensors of one shape only
        for rank, shard in enumerate(shards):
            if rank == ctx.rank:
                shard.copy_(x_NV)
            dist.broadcast(shard, group=group, group_src=rank)
        return torch.cat(shards, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.split(grads[0], ctx.widths, 1)[ctx.rank], None, None


def whole_columns(x_NV: Tensor, group: ProcessGroup) -> Tensor:
    """Return the columns of all ranks, for what cannot be cut into rows either."""
    whole: Tensor = _WholeColumns.apply(  # type: ignore[no-untyped-call]
        x_NV, shard_widths(x_NV, group), group
    )
    return whole


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Add up what the ranks of `group` computed from their columns."""
    total: Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def copy_to_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Mark what all ranks of `group` have, before it meets columns that one rank has alone."""
    copy: Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return copy


def _all_gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, x, group=group)
    return gathered


def shard_widths(x_NV: Tensor, group: ProcessGroup) -> list[int]:
    """List how many columns every rank has; waits for the device."""
    local_width = torch.tensor(x_NV.shape[1], device=x_NV.device)
    return [int(width) for width in _all_gather(local_width, group)]


def shard_range(x_NV: Tensor, group: ProcessGroup) -> tuple[int, int]:
    """Return (first column of this rank's shard, columns of all ranks)."""
    widths = shard_widths(x_NV, group)
    return sum(widths[: dist.get_rank(group)]), sum(widths)


def logsumexp(logits_NV: Tensor, group: ProcessGroup) -> Tensor:
    """Return the (N,) logsumexp over the columns of all ranks."""
    # shifting by the largest logit cancels, so that it needs no gradient
    largest_N = logits_NV.detach().amax(-1)
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    local_N = (logits_NV - largest_N[:, None]).exp().sum(-1)
    return sum_over_ranks(local_N, group).log() + largest_N


def log_softmax(logits_NV: Tensor, group: ProcessGroup) -> Tensor:
    """Return the (N, V) log-probabilities of this rank's columns."""
    normalizer_N = copy_to_ranks(logsumexp(logits_NV, group), group)
    return logits_NV - normalizer_N[:, None]


def gather(x_NV: Tensor, ids_NK: Tensor, group: ProcessGroup) -> Tensor:
    """Return the (N, K) entries at ids of the whole vocabulary."""
    first, _ = shard_range(x_NV, group)
    width = x_NV.shape[1]
    # ids of other shards read some column, whose entry is then replaced by 0
    is_local = (ids_NK >= first) & (ids_NK < first + width)
    entries_NK = x_NV.gather(1, (ids_NK - first).clamp(0, width - 1))
    return sum_over_ranks(torch.where(is_local, entries_NK, 0.0), group)


def topk(x_NV: Tensor, k: int, group: ProcessGroup) -> Tensor:
    """Return the (N, k) int64 ids, in the whole vocabulary, of the largest entries; no gradient."""
    first, num_columns = shard_range(x_NV, group)
    k = min(k, num_columns)
    local = x_NV.topk(min(k, x_NV.shape[1]), -1)
    # a narrow shard has less than k columns: pad, so that every rank sends blocks of one size
    missing = (0, k - local.values.shape[1])
    values = F.pad(local.values, missing, value=-torch.inf).contiguous()
    ids = F.pad(local.indices + first, missing).contiguous()
    all_values = torch.cat(_all_gather(values, group), 1)
    all_ids = torch.cat(_all_gather(ids, group), 1)
    best = all_values.topk(k, -1).indices  # places among all candidates, not yet ids
    return all_ids.gather(1, best)


def columns_to_rows(x_NV: Tensor, group: ProcessGroup) -> tuple[Tensor, slice]:
    """Turn some columns of all rows into all columns of some rows; see `losses.columns_to_rows`."""
    widths = shard_widths(x_NV, group)
    num_ranks = len(widths)
    # rank i gets the rows from bounds[i] to bounds[i + 1]; the numbers differ by at most 1
    bounds = [len(x_NV) * rank // num_ranks for rank in range(num_ranks + 1)]
    heights = [end - start for start, end in itertools.pairwise(bounds)]
    whole = _ColumnsToRows.apply(x_NV, heights, widths, group)  # type: ignore[no-untyped-call]
    rank = dist.get_rank(group)
    return whole, slice(bounds[rank], bounds[rank + 1])
