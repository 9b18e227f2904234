"""Check what a launcher says to a rank.

Tests: tests/test_launch.py, tests/test_wrong_flags.py.
"""

import os

# What launchers say of a rank: the smallest and the largest value; None: any.
OF_LAUNCHERS = {"WORLD_SIZE": (1, None), "RANK": (0, None), "LOCAL_RANK": (0, None),
                "LOCAL_SIZE": (1, None), "LOCAL_WORLD_SIZE": (1, None), "MASTER_PORT": (1, 65535)}


def check_launcher():
    """Raise a ValueError where variables of the environment cannot be those of a rank."""
    for name, (low, high) in OF_LAUNCHERS.items():
        value = os.environ.get(name)
        if not value:  # without a launcher
            continue
        is_number = value.isascii() and value.isdecimal()
        if not is_number or int(value) < low or (high and int(value) > high):
            expected = f"{low} to {high}" if high else f"{low} or more"
            raise ValueError(f"the variable {name} is {value!r}; expected a number, {expected}; "
                             "unset it, or let deepspeed or torchrun set what a rank needs")
    rank = int(os.environ.get("RANK") or 0)
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if ranks > 1 and missing:
        raise ValueError(f"the variable WORLD_SIZE is {ranks}, and there is no "
                         f"{' and no '.join(missing)}; start all ranks of a job by one launcher")
    if rank >= ranks:
        raise ValueError(f"the variable RANK is {rank} where WORLD_SIZE is {ranks}; expected less; "
                         "start all ranks of a job by one launcher")
