"""Environments with faults, chosen by the row; for test_environments.py."""

import asyncio
import os
import subprocess
import sys
import time

QUESTION = {"role": "user", "content": "And then?"}
HELD = []


def fault(messages, row, seed):
    return FAULTS[row["fault"]]()


def forks():
    for _ in range(3):
        if not os.fork():
            os.setsid()
            time.sleep(1000)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 0.25


def hangs():
    while True:
        time.sleep(1)


async def waits():
    await asyncio.sleep(0.01)
    return QUESTION


async def never():
    await asyncio.sleep(1000)


def greedy():
    HELD.append(bytearray(2**33))


def floods():
    print("x" * 10**7, flush=True)
    sys.stderr.write("y" * 10**7)
    os.write(1, b"z" * 10**6)
    return 0.5


def writes_everywhere():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"nonsense\n")
        except OSError:
            continue
    return 0.5


def raises():
    raise KeyError("answer")


def recurses():
    return recurses()


FAULTS = {
    "hangs": hangs,
    "never": never,
    "raises": raises,
    "recurses": recurses,
    "greedy": greedy,
    "forks": forks,
    "exits": lambda: sys.exit(0),
    "leaves": lambda: os._exit(3),
    "kills itself": lambda: os.kill(os.getpid(), 9),
    "floods": floods,
    "writes everywhere": writes_everywhere,
    "text": lambda: "a",
    "bytes": lambda: b"a",
    "other key": lambda: {"done": True},
    "other role": lambda: {"role": "assistant", "content": "I am the student"},
    "unknown role": lambda: {"role": "narrator", "content": "a"},
    "no role": lambda: [{"content": "a"}],
    "content of bytes": lambda: {"role": "user", "content": b"a"},
    "content of a number": lambda: {"role": "user", "content": 3},
    "empty list": lambda: [],
    "goes on with nothing": lambda: {"ended": False, "reward": 1.0},
    "nothing of a reward": lambda: {"messages": [QUESTION], "reward": None, "ended": None},
    "huge": lambda: {"role": "user", "content": "a" * 2**21},
    "half a pair": lambda: {"role": "user", "content": "\ud800"},
    "not a number": lambda: float("nan"),
    "infinite": lambda: {"reward": float("inf")},
    "reward of text": lambda: {"reward": "good"},
    "an object": lambda: object(),
    "messages of text": lambda: {"messages": "abc"},
    "a function": lambda: fault,
    "endless": lambda: {"messages": HELD, "x": [[]]},
    "waits": waits,
    "good": lambda: QUESTION,
    "ends": lambda: None,
    "rewards": lambda: True,
}


class Counter:
    """Count its own turns, and draw: an episode is an object of its own."""

    def __init__(self, row, seed):
        self.turns = 0
        self.row = row

    def begin(self):
        return {"messages": [{"role": "system", "content": f"row {self.row['number']}"}],
                "tools": [{"name": "look"}]}

    def __call__(self, messages):
        import random

        self.turns += 1
        return {"role": "user", "content": f"{self.turns} {random.random()}"}


def needs_a_module():
    import no_such_module  # noqa: F401


NOT_CALLABLE = 3
