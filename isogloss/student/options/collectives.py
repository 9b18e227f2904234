"""Time the collectives of the first steps, by DeepSpeed's comms logger.

Tests: tests/test_launch.py.
"""

import deepspeed

TIMED_STEPS = 100  # DeepSpeed keeps the times of every call in memory, so not for ever


def show_collectives(step, start, steps):
    """Print what the collectives of the first steps took, and time no more, once they are over."""
    if step == min(start + TIMED_STEPS, steps):
        deepspeed.comm.log_summary()
        deepspeed.comm.comm.comms_logger.enabled = False


def time_collectives():
    """Restart DeepSpeed's comms logger, with the times of single calls.

    DeepSpeed never resets a collective's timer, so every call would be logged with the time of all
    earlier calls of the same name added to its own.
    """
    logger = deepspeed.comm.comm.comms_logger
    timers = deepspeed.comm.comm.timers
    logger.reset_data()
    original_append = logger.append

    def append_and_reset(raw_name, name, milliseconds, size):
        original_append(raw_name, name, milliseconds, size)
        timers(name).reset()

    for name in timers.get_timers():
        timers(name).reset()
    logger.append = append_and_reset
