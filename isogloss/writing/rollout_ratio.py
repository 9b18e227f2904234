"""Weigh rollouts that older weights wrote, and compare what two sets of weights say of them.

Tests: tests/test_on_policy.py.
"""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from isogloss.data.options.term_weights import weigh_positions
from isogloss.job.counts import Sums, mean_of
from isogloss.losses import at_least_float32
from isogloss.policy_losses import prefix_ratio
from isogloss.rollout import drawn_logp
from isogloss.teachers.protocol import BLOCK


def label_logp(cfg, labels_BS, student_logits):
    """Return (B, S) float32, the log-probability of each label where it would be drawn, else 0."""
    labels = labels_BS.flatten()
    logp = torch.zeros(len(labels), device=labels.device)
    positions = (labels >= 0).nonzero().squeeze(1)
    for block in positions.split(BLOCK):
        logp_NV = drawn_logp(at_least_float32(student_logits(block)).log_softmax(-1),
                             cfg.rollout_temperature, cfg.rollout_top_p)
        logp[block] = logp_NV.gather(1, labels[block][:, None]).squeeze(1).float()
    return logp.view_as(labels_BS)


def without_gradient(student, batch, function):
    """Return `function(LogitsSource)` of a StudentBatch, by a StudentRunner; all ranks take part.

    It is None where another rank of the pipeline has it.
    """
    was_training = student.engine.module.training
    student.engine.eval()
    with torch.no_grad():
        [reduced] = student.reduce([batch], [SimpleNamespace(reduce=function)])
    student.engine.train(was_training)
    return reduced


def current_logp(cfg, student, batch):
    """Return the `label_logp` of a StudentBatch by today's weights; see `without_gradient`."""
    return without_gradient(student, batch, partial(label_logp, cfg, batch.labels))


@dataclass
class RatioSums(Sums):
    """Sum up the ratios of positions in rollouts.

    Attributes:
        total, squares: sums of the ratios as they are used, and of their squares; count: of
            positions.
        limited: positions whose ratio was clamped or masked.
    """

    total: float = 0.0
    squares: float = 0.0
    count: float = 0
    limited: float = 0


def weigh_by_ratio(cfg, student, batches, sequence_group, logps=None):
    """Weigh the terms of rollouts that older weights wrote; all ranks take part.

    A term at a place of a rollout weighs p / p_old of the tokens before it, because so much more
    often the student would be there today.

    Args:
        batches: Batches, whose TeacherBatches are replaced.
        logps: `current_logp` of each of them; None: it is asked for.
    Returns:
        metrics.
    """
    if logps is None:
        logps = [current_logp(cfg, student, batch.student) for batch in batches]
    sums = RatioSums()
    largest = 0.0
    for batch, logp_BS in zip(batches, logps, strict=True):
        if batch.student.logp is None or logp_BS is None:
            continue
        ratio_BS, largest_here = rollout_ratio(cfg, batch, logp_BS, sequence_group, sums)
        largest = max(largest, largest_here)
        teachers = []
        for teacher in batch.teachers:
            ratio_N1 = ratio_BS.reshape(-1, 1)
            if sequence_group:
                ratio_N1 = sequence_group.with_halo_values(ratio_N1, teacher.halo_index)
            teachers.append(weigh_positions(teacher, ratio_N1.squeeze(1)))
        batch.teachers = teachers
    sums = sums.all_reduce()
    largest = torch.tensor(largest, device=student.engine.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {"rollout/ratio": mean_of(sums.total, sums.count),
            "rollout/ratio_limited": mean_of(sums.limited, sums.count),
            "rollout/effective_share": mean_of(sums.total**2, sums.squares * sums.count),
            "rollout/ratio_max": float(largest) if sums.count else None}


def rollout_ratio(cfg, batch, logp_BS, sequence_group, sums):
    """Weigh this rank's positions, and add them to RatioSums.

    Returns:
        ((B, S) weights, 1 outside of rollouts; the largest ratio before it is clamped or masked).
    """
    student = batch.student
    is_written_BS = ~student.logp.isnan()
    positions_BS = student.positions
    if positions_BS is None:
        positions_BS = torch.arange(logp_BS.shape[1], device=logp_BS.device).expand_as(logp_BS)
    rows = [whole_rows(x_BS, sequence_group)
            for x_BS in (logp_BS, student.logp.nan_to_num(), is_written_BS, positions_BS)]
    logp, old_logp, mask, positions = rows
    sample = (positions == 0).cumsum(1)  # a packed row holds several
    ratio = prefix_ratio(logp, old_logp, mask, cfg.max_ratio, sample)
    unlimited = prefix_ratio(logp, old_logp, mask, math.inf, sample)
    is_limited_BS = own_columns(ratio != unlimited, sequence_group)
    ratio_BS = own_columns(ratio, sequence_group)
    used = ratio_BS[is_written_BS]
    sums.total += float(used.sum())
    sums.squares += float(used.square().sum())
    sums.count += len(used)
    sums.limited += int(is_limited_BS[is_written_BS].sum())
    # behind a text's end the product goes on, as far as its row has padding
    largest = float(unlimited.masked_fill(~mask, 0.0).max())
    return torch.where(is_written_BS, ratio_BS, 1.0), largest


def whole_rows(values_BS, sequence_group):
    """Return the rows of which the ranks of a sequence group hold a shard each."""
    if sequence_group is None:
        return values_BS
    parts = [torch.empty_like(values_BS) for _ in range(sequence_group.size)]
    dist.all_gather(parts, values_BS.contiguous(), group=sequence_group.group)
    return torch.cat(parts, 1)


def own_columns(values_BS, sequence_group):
    """Return this rank's shard of whole rows."""
    if sequence_group is None:
        return values_BS
    return values_BS.chunk(sequence_group.size, 1)[sequence_group.rank]
