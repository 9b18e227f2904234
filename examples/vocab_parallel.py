"""Compute a loss of logits whose columns (tokens of a vocabulary) are sharded over ranks.

Every rank gets whole rows of some samples in exchange for its columns of the others, so any loss
works as it is, no rank holds more than it held, and the gradient of its columns comes back.

    sum, count = on_whole_rows(
        lambda x, y, samples: losses.alm(x, y, *(ids[samples] for ids in of_batch)), x, y, group)

Shapes: B samples, S student and T teacher positions, V and W columns of all ranks, v and w of this
one, N rows.  Tests: tests/test_losses.py.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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


def _whole_rows(x_BXv: Tensor, bounds: list[int], group: ProcessGroup) -> Tensor:
    """Return all columns of this rank's samples, which are those between two of the bounds."""
    local_width = torch.tensor(x_BXv.shape[-1], device=x_BXv.device)
    gathered = [torch.empty_like(local_width) for _ in bounds[1:]]
    dist.all_gather(gathered, local_width, group=group)
    num_positions = x_BXv.shape[1]
    heights = [(end - start) * num_positions for start, end in itertools.pairwise(bounds)]
    whole: Tensor = _ColumnsToRows.apply(  # type: ignore[no-untyped-call]
        x_BXv.flatten(0, 1), heights, [int(width) for width in gathered], group
    )
    return whole.unflatten(0, (-1, num_positions))


def on_whole_rows(
    loss: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]],
    student_logits_BSv: Tensor, teacher_logits_BTw: Tensor, group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return the (sum, count) of a loss over all samples, on every rank.

    Args:
        loss: (logits of the student, of the teacher, which samples they are of) -> (sum, count);
            it is called with no sample on a rank for which there is none.
        student_logits_BSv, teacher_logits_BTw: this rank's columns, in the order of the ranks.
        group: the ranks that hold columns; the backward pass is collective, too.
    """
    num_samples = len(student_logits_BSv)
    num_ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    # rank i gets the samples from bounds[i] to bounds[i + 1]; the numbers differ by at most 1
    bounds = [num_samples * i // num_ranks for i in range(num_ranks + 1)]
    student_BSV = _whole_rows(student_logits_BSv, bounds, group)
    with torch.no_grad():
        teacher_BTW = _whole_rows(teacher_logits_BTw, bounds, group)
    value, count = loss(student_BSV, teacher_BTW, slice(bounds[rank], bounds[rank + 1]))
    count = torch.as_tensor(count, device=value.device)
    return _SumOverRanks.apply(value, group), _SumOverRanks.apply(count, group)  # type: ignore
