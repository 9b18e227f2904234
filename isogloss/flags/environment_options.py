"""How an environment is asked, as --environment says it.

Tests: tests/test_environments.py.
"""

from dataclasses import dataclass

from isogloss.flags.parse import check_flags, flag


@dataclass(kw_only=True)
class EnvironmentOptions:
    """State what answers the student, and how."""

    function: str = flag("", "calculator, python, package.module:function or file.py:function.")
    max_turns: int = flag(8, "turns of the student in an episode, at most.", low=1, high=1000)
    reward_weight: float = flag(
        0.0, "of the reward beside the loss. 0: it is logged alone.", low=0, high=1e6)
    seconds: float = flag(30.0, "for an answer.", low=0.01, high=800)
    mib: int = flag(1024, "of memory for an episode.", low=16, high=2**20)

    def __post_init__(self):
        check_flags(self)
        if not self.function.strip():
            raise ValueError("function: is empty; expected calculator, python, "
                             "package.module:function or file.py:function")
