"""The flags that all tools about two tokenizers have.

Tests: tests/test_projection_tools.py.
"""

from dataclasses import MISSING, dataclass

from isogloss.flags.parse import check_flags, flag
from isogloss.projection_tools.tokenizers import Pair


@dataclass(kw_only=True)
class PairArgs:
    """The flags of every tool that is about two tokenizers."""

    student: str = flag(MISSING, "hub id or directory with the student's tokenizer.")
    teacher: str = flag(MISSING, "hub id or directory with the teacher's tokenizer.")
    trust_remote_code: bool = flag(
        False, "run the Python code that comes with a model, which can do anything.")

    def __post_init__(self):
        check_flags(self)

    def load_pair(self):
        return Pair.load(self.student, self.teacher, self.trust_remote_code)
