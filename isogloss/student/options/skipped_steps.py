"""Say why a step is not finite.

Tests: tests/test_finite.py.
"""

import math


def causes_of(engine, sums, teachers):
    """Return what was not finite in a step; "" where that is routine.

    With fp16's loss scale, an overflow of the gradient alone is, until the scale is at its minimum.

    Args:
        sums: the global `counts.TermSums` of every teacher.
        teachers: their names.
    """
    causes = []
    if not math.isfinite(sums[0][0]):
        causes.append("the cross-entropy")
    for name, of_teacher in zip(teachers, sums):
        if not math.isfinite(of_teacher[1]):
            causes.append(f"the distillation loss of teacher {name}")
    if not causes and not loss_scale_can_fall(engine):
        causes.append("the gradient (every loss is finite)")
    return " and ".join(causes)


def loss_scale_can_fall(engine):
    """Return whether fp16's loss scale is above its minimum, so that an overflow is routine.

    A dynamic loss scale begins far too high, and falls whenever a gradient overflows.
    """
    if engine.torch_autocast_z0_gradscaler:
        return engine.torch_autocast_z0_gradscaler.get_scale() > 1
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scale_config"):  # ZeRO stage 0
        scaler = optimizer.loss_scale_config
        return scaler.dynamic_loss_scale and scaler.cur_scale > scaler.min_loss_scale
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler is not None and scaler.dynamic and scaler.cur_scale > scaler.min_scale
