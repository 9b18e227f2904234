"""How tasks are run, as the flags of a command line say it; no torch is needed to read them.

Tests: tests/test_tasks.py.
"""

from dataclasses import dataclass

from isogloss.config import LOWEST_TEMPERATURE, Config
from isogloss.flags.parse import check_flags, flag
from isogloss.flags.tool import shared


@dataclass(kw_only=True)
class TaskOptions:
    """State how tasks are run."""

    data: str = shared(Config, "eval_task_data")
    shots: int = shared(Config, "eval_task_shots")
    limit: int = shared(Config, "eval_task_limit")
    batch_size: int = shared(Config, "eval_task_batch")
    max_new_tokens: int = flag(
        0, "of a written answer; 0: as many as its task is made for, of GSM8K 256.",
        low=0, high=2**20)
    samples: int = shared(Config, "eval_task_samples")
    temperature: float = shared(Config, "eval_task_temperature")
    seed: int = flag(0, "of the draws at a temperature above 0.", low=0, high=2**32 - 2**16)
    allow_unsafe_code: bool = shared(Config, "allow_unsafe_code")
    trust_remote_code: bool = shared(Config, "trust_remote_code")

    def __post_init__(self):
        check_flags(self)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}; expected 0, or "
                             f"{LOWEST_TEMPERATURE} or more")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples is {self.samples} at temperature 0, where all samples are "
                             "equal; expected a temperature above 0")
