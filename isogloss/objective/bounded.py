"""Limit the terms of a distillation loss: max_divergence of --loss_options, see docs/losses.md.

Tests: tests/test_bounded.py.
"""

from dataclasses import replace

import torch


class LimitedLoss:
    """Compute a loss whose terms are clipped, value and gradient, and count these.

    Args:
        loss_fn: see `loss_table.DistillationLoss`; it takes a `losses.Bound`.
        nats: that a term has at most, before tau^2 and weights.
    Attributes:
        clipped: () float32, how many terms of the last call had more.
    """

    clipped = 0.0

    def __init__(self, loss_fn, nats):
        self.loss_fn = loss_fn
        self.nats = nats

    def __call__(self, student, teacher, sub_tile, *observers):
        self.clipped = torch.zeros((), device=student.device)
        return self.loss_fn(student, teacher, sub_tile, *observers, bound=self.limit)

    def limit(self, term_N):
        self.clipped = self.clipped + (term_N > self.nats).sum(dtype=torch.float32)
        return term_N.clamp(max=self.nats)


def limited(loss, nats):
    """Return a DistillationLoss whose terms have at most so many nats; autograd derives it."""
    def for_columns(kept_K):
        loss_fn, _ = loss.for_columns(kept_K)
        return LimitedLoss(loss_fn, nats), None

    return replace(loss, loss_fn=LimitedLoss(loss.loss_fn, nats), write_gradient=None,
                   for_columns=loss.for_columns and for_columns)
