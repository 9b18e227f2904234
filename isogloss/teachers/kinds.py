"""List the kinds of teachers.  A new kind is one file and one entry; see docs/architecture.md."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from isogloss.flags.model_names import is_address
from isogloss.teachers.protocol import TeacherSpec


class Kind(NamedTuple):
    """Name a kind of ours, whose file is imported when the flags take it.

    Attributes:
        module: of isogloss.teachers; spec: its TeacherSpec there.
        takes: (Config of a run with one teacher) -> its flags name a teacher of this kind.
    """

    module: str
    spec: str
    takes: Callable = lambda cfg: False


# The first is what all names mean that no later one takes.  A plugin adds the class of its specs.
TEACHER_KINDS: dict[str, Kind | type[TeacherSpec]] = {
    "model": Kind("model", "ModelSpec", lambda cfg: True),
    # that follows the student; of --teachers the entries are asked one by one
    "own": Kind("own", "OwnSpec", lambda cfg: cfg.teacher_ema < 1 and not cfg.teachers),
    "ranks": Kind("remote", "RanksSpec"),  # that a model becomes with --teacher_ranks
    "cache": Kind("cached", "CacheSpec", lambda cfg: bool(cfg.teacher_cache)),
    "served": Kind("served", "ServedSpec", lambda cfg: is_address(cfg.teacher)),
    # that several teachers become with --teacher_weights mean_p
    "ensemble": Kind("ensemble", "EnsembleSpec"),
}


def kind_of(cfg):
    """Return the TeacherSpec of the teacher that the flags of a run with one teacher name."""
    kind = next(kind for kind in reversed(TEACHER_KINDS.values()) if kind.takes(cfg))
    if isinstance(kind, Kind):
        return getattr(importlib.import_module(f"isogloss.teachers.{kind.module}"), kind.spec)
    return kind
