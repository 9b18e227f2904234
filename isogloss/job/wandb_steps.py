"""Log to wandb by the steps of a run.

Tests: tests/test_monitors.py.
"""

import wandb


def log_by_own_steps(monitor):
    """Let wandb take what DeepSpeed's engine counts by samples beside what we count by steps.

    It has one count of steps, and drops what comes below the largest so far.

    Args:
        monitor: DeepSpeed's MonitorMaster.
    """
    for names, axis in (("Train/Samples/*", "samples"), ("train/*", "step"), ("eval/*", "step")):
        wandb.define_metric(names, step_metric=axis)

    def log(data, step=None, commit=None):
        axis = "samples" if next(iter(data)).startswith("Train/Samples/") else "step"
        wandb.log(data | {axis: step}, commit=commit)

    monitor.wandb_monitor.log = log
