"""Steps whose loss or gradient is not finite: they change nothing, are counted, and have a cause.

A step is skipped where the norm of its gradient, over all ranks, is not finite.  That is how
DeepSpeed's optimizers skip steps, so weights, optimizer state and schedule of all ranks agree
without a further collective.  Two things are added: ZeRO stage 0 in float32 skips such steps too,
and a loss that is not finite always has a gradient that is not.

Tests: tests/test_finite.py.
"""

import math
from dataclasses import dataclass
from functools import wraps

import torch

from isogloss.doors import door

# --- skip -----------------------------------------------------------------------------------------


def let_overflow_skip_steps(engine):
    """Let the engine skip every step whose gradient norm is not finite, in all stages alike.

    DeepSpeed's optimizers do that themselves: weights, optimizer state and schedule stay as they
    are, and `engine.skipped_steps` grows.  The one that does not is the plain optimizer of ZeRO
    stage 0 in float32.  It gets the attribute `overflow`, which the engine looks up after a step,
    and which `gradient_norm` sets before it.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "overflow"):
        scaler = getattr(optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # --max_bad_steps ends such a run, in one line
        return
    take_step = optimizer.step
    optimizer.overflow = False

    @wraps(take_step)  # schedules of torch look for a mark on it
    def step_unless_overflow(*args, **options):
        if not optimizer.overflow:
            take_step(*args, **options)

    optimizer.step = step_unless_overflow


def spoil_gradient_unless_finite(loss):
    """Return the () loss; if it is not finite, its gradient is NaN for all parameters.

    Then the gradient over all ranks tells each of them that the loss of one is not finite, without
    a further collective.  By itself such a loss may have a finite gradient.
    """
    factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
    return loss * factor.to(loss.dtype)


def gradient_norm(engine):
    """Return the norm of the averaged gradient where the engine reports none, else 0.

    That is ZeRO stage 0 in float32, at the end of an accumulation.  There the next `engine.step`
    is skipped if the norm is not finite.
    """
    if engine.zero_optimization() or not engine.is_gradient_accumulation_boundary():
        return 0.0
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if engine.optimizer is engine.basic_optimizer:  # else it looks at its gradients itself
        engine.optimizer.overflow = not math.isfinite(norm)
    return norm


# --- count ----------------------------------------------------------------------------------------


@dataclass
class BadSteps:
    """Count the latest steps that were skipped, one after the other; the same on every rank.

    Attributes:
        count: of these steps; 0 if the latest one was good.
        causes: what was not finite in the latest step that was skipped; "" if that is routine.
    """

    count: int = 0
    causes: str = ""

    def note(self, engine, sums, teachers):
        """Take note of the step that was just taken or skipped.

        The losses are read if it was skipped; the host then waits for the device.

        Args:
            sums: `transfers.Readback` of the global `counts.TermSums` of every teacher.
            teachers: their names.
        """
        if engine.was_step_applied():  # so the gradient is finite, and with it every loss
            self.count = 0
            return
        self.causes = door("skipped").causes_of(engine, sums.read(), teachers)
        self.count = self.count + 1 if self.causes else 0


def has_finite_state(engine):
    """Return whether weights and optimizer state on this rank are all finite.

    Under ZeRO these are the shards that a checkpoint of this rank holds.
    """
    tensors = []
    for parameter in engine.module.parameters():
        tensors.append(getattr(parameter, "ds_tensor", parameter))  # of ZeRO-3: the shard
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:  # under ZeRO the float32 master weights
        tensors += group["params"]
    for state in inner.state.values():
        tensors += state.values()
    for tensor in tensors:
        is_float = torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.numel()
        # the largest magnitude: NaN passes through it, and unlike a sum it cannot overflow
        if is_float and not torch.linalg.vector_norm(tensor.detach(), math.inf).isfinite():
            return False
    return True
