"""List the kinds of teachers.  A new kind is one file and one entry here; see docs/extending.md."""

from isogloss.teachers.cached import CacheSpec
from isogloss.teachers.ensemble import EnsembleSpec
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.own import OwnSpec
from isogloss.teachers.protocol import TeacherSpec
from isogloss.teachers.remote import RanksSpec
from isogloss.teachers.served import ServedSpec

# The first is what all names mean that no later one takes.
TEACHER_KINDS: dict[str, type[TeacherSpec]] = {
    "model": ModelSpec,
    "own": OwnSpec,  # that follows the student
    "ranks": RanksSpec,  # that a model becomes with --teacher_ranks
    "cache": CacheSpec,
    "served": ServedSpec,
    "ensemble": EnsembleSpec,  # that several teachers become with --teacher_weights mean_p
}


def kind_of(cfg):
    """Return the kind of the teacher that the flags of a run with one teacher name."""
    return next(kind for kind in reversed(TEACHER_KINDS.values()) if kind.takes(cfg))
