"""Define where the logits of frozen teachers come from.

A `TeacherSource` answers for the micro-batches of a step.  Most sources are models on this job's
ranks (`ModelTeacher`), loaded in one of four ways: a whole copy per rank, sharded over neighboring
ranks by DeepSpeed's tensor-parallel inference engine or by transformers, or partitioned by ZeRO-3
(model_teachers.py).  Others are models on ranks of their own (remote_teachers.py), on servers
(served_teachers.py), caches of what a model has said (cached_teachers.py), and ensembles.
A new source is one class and one entry in `TEACHER_SOURCES`; see docs/extending.md.

Shapes: B rows, T teacher positions, W teacher vocabulary, n positions asked for.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from isogloss.flags.model_names import read_model_name
from isogloss.models.pretrained import load_config
from isogloss.teachers.cached import CachedTeacher
from isogloss.teachers.mixing import average_teachers, common_events
from isogloss.teachers.model import (
    ModelTeacher,
    check_compilation,
    load_replicated,
    load_tensor_parallel,
    load_transformers,
    load_zero3,
    resolve_engine,
)
from isogloss.teachers.remote import RemoteTeacher
from isogloss.teachers.served import ServedTeacher
from isogloss.teachers.specs import TeacherSpec, weights_of
from isogloss.teachers.text_scores import ScoredLogits
from isogloss.tiles import LogitsSource, SelectedColumns


class TeacherSource(Protocol):
    """Give a teacher's logits.

    All ranks that train make the same calls in the same order.  A subclass needs `targets`; the
    other methods do nothing unless it says otherwise.
    """

    def request(self, batch) -> None:
        """Start what `targets` of this TeacherBatch will return; may come a whole step before."""

    def targets(self, batch) -> LogitsSource:
        """Return logits of any positions of a TeacherBatch, valid until `release`."""

    def whole_targets(self, batch) -> LogitsSource:
        """Return what `targets` does with whole distributions, where it truncates them."""
        return self.targets(batch)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Return a context in which many `targets` cost one transfer of offloaded weights."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Allow the memory of all targets returned so far to be written over."""

    def close(self) -> None:
        """End the source, after the last step."""


class EnsembleLogits(NamedTuple):
    """Give the logits of the mean of teachers with one vocabulary; see `average_teachers`.

    Attributes:
        members: LogitsSource of every teacher.
        weights_M: (M,) float, summing to 1.
        space: "p": mean of the probabilities; "logits": of the logits.
        vocab: tokens of the teachers.
        is_truncated: some members keep some tokens alone; then rows have a column more.
    """

    members: tuple
    weights_M: torch.Tensor
    space: str
    vocab: int
    is_truncated: bool = False

    def __call__(self, positions):
        logits = [member(positions)[None] for member in self.members]
        logits = common_events(logits, self.vocab)
        return average_teachers(logits, self.weights_M, self.space)[0]

    def columns(self, ids):
        if self.is_truncated:
            ids = torch.cat([ids, ids.new_tensor([self.vocab])])
        return SelectedColumns(self, ids)

    @property
    def nbytes(self):
        return sum(member.nbytes for member in self.members)


@dataclass
class EnsembleTeacher:
    """Average several teachers with one tokenizer.

    Attributes:
        members: TeacherSource of each.
        weights: a number for each, in any unit.
        space, vocab, is_truncated: see EnsembleLogits.
    """

    members: list
    weights: list
    space: str
    vocab: int
    is_truncated: bool = False

    def request(self, batch):
        for member in self.members:
            member.request(batch)

    def targets(self, batch):
        logits = [member.targets(batch) for member in self.members]
        return self._mean(logits, batch, self.is_truncated)

    def whole_targets(self, batch):
        logits = [member.whole_targets(batch) for member in self.members]
        # what a cache has truncated stays so
        is_truncated = any(isinstance(source, ScoredLogits) for source in logits)
        return self._mean(logits, batch, is_truncated)

    def _mean(self, logits, batch, is_truncated):
        weights = torch.tensor(self.weights, device=batch.ids.device)  # in any unit
        return EnsembleLogits(tuple(logits), weights / weights.sum(), self.space, self.vocab,
                              is_truncated)

    @contextlib.contextmanager
    def on_device(self):
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.on_device())
            yield

    def release(self):
        for member in self.members:
            member.release()

    def close(self):
        for member in self.members:
            member.close()


@dataclass
class SilentTeacher:
    """Take part in a teacher's forward passes on a rank that computes no loss, and keep nothing.

    Attributes:
        members: TeacherSource of each model that this rank shares with others; often none.
    """

    members: list

    def request(self, batch):
        """Do nothing: a rank that computes the loss asks."""

    def targets(self, batch):
        for member in self.members:
            member.targets(batch)

    def whole_targets(self, batch):
        for member in self.members:
            member.whole_targets(batch)

    @contextlib.contextmanager
    def on_device(self):
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.on_device())
            yield

    def release(self):
        for member in self.members:
            member.release()

    def close(self):
        for member in self.members:
            member.close()


def load_silent(spec: TeacherSpec):
    """Load what other ranks need of a teacher on this one, which computes no loss."""
    members = []
    for member in spec.single():
        if member.engine in MODEL_ENGINES and engine_of(member) != "replicated":
            members.append(load_teacher(member))
    return SilentTeacher(members)


def load_ensemble(spec: TeacherSpec):
    """Load every member; they may be of different kinds."""
    members = [load_teacher(member) for member in spec.members]
    return EnsembleTeacher(members, spec.weights, spec.space, spec.vocab, spec.is_truncated)


# A source by the name of its engine: TeacherSpec -> TeacherSource.
TEACHER_SOURCES: dict[str, Callable[[TeacherSpec], TeacherSource]] = {
    "replicated": load_replicated,
    "tensor_parallel": load_tensor_parallel,
    "transformers": load_transformers,
    "zero3": load_zero3,
    "remote": RemoteTeacher,
    "ensemble": load_ensemble,
    "cache": CachedTeacher,
    "served": ServedTeacher,
}
# Those that the job makes of other flags, not of --teacher_engine.
DERIVED_SOURCES = "remote", "ensemble", "cache", "served"
# Those that load a model of transformers.
MODEL_ENGINES = "auto", "replicated", "tensor_parallel", "transformers", "zero3"


def engine_names():
    """List the values of --teacher_engine."""
    return ["auto", *(name for name in TEACHER_SOURCES if name not in DERIVED_SOURCES)]


def engine_of(spec: TeacherSpec):
    """Return the key of TEACHER_SOURCES that a spec's engine means.

    Raises:
        ValueError: see `resolve_engine`.
    """
    if spec.engine not in MODEL_ENGINES:
        return spec.engine
    config = load_config("teacher", spec.path, spec.trust_remote_code)
    is_adapter = read_model_name("teacher", spec.path).adapter is not None
    return resolve_engine(spec.engine, spec.degree, config, dist.get_world_size(), is_adapter)


def load_teacher(spec: TeacherSpec) -> TeacherSource:
    """Make a teacher; all ranks take part unless it is "replicated".

    Raises:
        ValueError: see `resolve_engine`, `check_compilation`; or its weights cannot be loaded.
    """
    engine = engine_of(spec)
    if spec.compile:
        check_compilation(engine, load_config("teacher", spec.path, spec.trust_remote_code))
    # the inference engine makes all ranks' random numbers equal
    with weights_of("teacher", spec.path), torch.random.fork_rng():
        return TEACHER_SOURCES[engine](spec)


def model_teachers(source) -> list:
    """List the sources behind this one whose own logits can be asked for, to check them."""
    if isinstance(source, (EnsembleTeacher, SilentTeacher)):
        models = []
        for member in source.members:
            models += model_teachers(member)
        return models
    # a source such as a cache has no model to ask
    return [source] if isinstance(source, (ModelTeacher, RemoteTeacher)) else []
