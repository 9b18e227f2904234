"""Average several teachers with one tokenizer.

Members may be of different kinds.  Shapes: M members, n positions asked for.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from isogloss.align import fingerprint
from isogloss.teachers.group import TeacherGroup
from isogloss.teachers.mixing import average_teachers, common_events
from isogloss.teachers.protocol import TeacherSpec, load_teacher
from isogloss.tiles import SelectedColumns


class EnsembleLogits(NamedTuple):
    """Give the logits of the mean of teachers with one vocabulary; see `average_teachers`.

    Attributes:
        members: LogitsSource of every teacher.
        weights_M: (M,) float, summing to 1.
        vocab: tokens of the teachers.
    """

    members: tuple
    weights_M: torch.Tensor
    vocab: int

    def __call__(self, positions):
        logits = [member(positions)[None] for member in self.members]
        logits = common_events(logits, self.vocab)
        return average_teachers(logits, self.weights_M)[0]

    def columns(self, ids):
        return SelectedColumns(self, ids)

    @property
    def nbytes(self):
        return sum(member.nbytes for member in self.members)


@dataclass
class EnsembleSpec(TeacherSpec):
    """Describe the mean of teachers.

    Attributes:
        members: TeacherSpec of each.
        weights: a number for each, in any unit.
    """

    members: list = ()
    weights: list = ()

    def load(self):
        return EnsembleTeacher([load_teacher(member) for member in self.members], self)

    def single(self):
        return self.members

    def with_models(self, replaced):
        return replace(self, members=[member.with_models(replaced) for member in self.members])

    @property
    def is_truncated(self):
        return any(member.is_truncated for member in self.members)

    @property
    def averages_top_k(self):
        return self.is_truncated

    @property
    def asked_late(self):
        return all(member.asked_late for member in self.members)

    @property
    def asks_ahead(self):
        return any(member.asks_ahead for member in self.members)

    @property
    def reads_keys(self):
        return any(member.reads_keys for member in self.members)


@dataclass
class EnsembleTeacher(TeacherGroup):
    """Average several teachers with one tokenizer, as an EnsembleSpec says."""

    spec: EnsembleSpec

    def targets(self, batch):
        return self._mean([member.targets(batch) for member in self.members], batch)

    def whole_targets(self, batch):
        return self._mean([member.whole_targets(batch) for member in self.members], batch)

    def _mean(self, logits, batch):
        total = sum(self.spec.weights)  # they are in any unit
        # filled where they are: to copy numbers to a GPU would wait for it
        weights = [torch.full((), weight / total, device=batch.ids.device)
                   for weight in self.spec.weights]
        return EnsembleLogits(tuple(logits), torch.stack(weights), self.spec.vocab)


def plan_ensemble(cfg, student, encoders, configs, device):
    """Return (Config, TextEncoder, EnsembleSpec) of the mean of teachers with one tokenizer.

    Args:
        encoders, configs: {name: TextEncoder, Config} of each teacher.
    """
    first, *others = configs  # the first teacher's loss and flags are those of the ensemble
    for name in others:
        prints = [fingerprint(encoders[teacher].tokenizer) for teacher in (first, name)]
        if prints[0] != prints[1]:
            raise ValueError(f"--teacher_weights {cfg.teacher_weights}: the tokenizers of {first} "
                             f"and {name} differ, so their predictions have no mean; use "
                             "fixed")
    # every member reads every text
    shortest = min(encoder.max_length for encoder in encoders.values())
    encoder = replace(encoders[first], max_length=shortest)
    ensemble_cfg = replace(configs[first], kd_weight=cfg.kd_weight)
    spec = EnsembleSpec(
        path="mean", vocab=len(encoder.table),
        members=[member.teacher_kind.of(member, encoders[name], device, student)
                 for name, member in configs.items()],
        weights=[member.kd_weight for member in configs.values()])
    return ensemble_cfg, encoder, spec
