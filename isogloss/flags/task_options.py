"""How tasks are run, as the flags of a command line say it; no torch is needed to read them.

Tests: tests/test_tasks.py.
"""

from dataclasses import dataclass

from isogloss.flags.parse import check_flags, flag
from isogloss.loss_bounds import NUMBERS

LOWEST_TEMPERATURE = NUMBERS["temperature"].low


@dataclass(kw_only=True)
class TaskOptions:
    """State how tasks are run."""

    data: str = flag("", "directory of the tasks' files. Empty: they come from the hub.")
    shots: int = flag(
        -1, "worked examples in front of each question, not of code. -1: as each task says, of "
        "gsm8k 5.", low=-1, high=1000)
    limit: int = flag(
        0, "items of each task (of mmlu: of each subject), the first ones. 0: all.",
        low=0, high=10**9)
    batch_size: int = flag(
        16, "items that a rank reads or writes side by side.", low=1, high=2**16)
    max_new_tokens: int = flag(
        0, "of a written answer; 0: as many as its task is made for, of GSM8K 256.",
        low=0, high=2**20)
    samples: int = flag(
        1, "programs for each item of humaneval_plus and mbpp_plus, for pass@k.",
        low=1, high=2**16)
    temperature: float = flag(
        0.0, "of these programs, 0 (the most likely token) to 1000.", low=0, high=1e3)
    seed: int = flag(0, "of the draws at a temperature above 0.", low=0, high=2**32 - 2**16)
    allow_unsafe_code: bool = flag(
        False, "run the programs that the model writes for humaneval_plus and mbpp_plus without "
        "a sandbox, where there is none; they can do all that you can.")
    trust_remote_code: bool = flag(
        False, "run the Python code that comes with a model, or that a YAML file in data names, "
        "which can do anything. false refuses what needs it.")

    def __post_init__(self):
        check_flags(self)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}; expected 0, or "
                             f"{LOWEST_TEMPERATURE} or more")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples is {self.samples} at temperature 0, where all samples are "
                             "equal; expected a temperature above 0")
