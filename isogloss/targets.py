"""Ask the teachers about a step: for logits, the columns that a loss keeps, and confidence."""

from dataclasses import dataclass

import torch

from isogloss.align import all_bytes
from isogloss.config import Config
from isogloss.data.sample import TextEncoder
from isogloss.doors import door
from isogloss.objective.loss_table import LOSSES, DistillationLoss, build_loss
from isogloss.objective.objective import Part
from isogloss.teachers.protocol import TeacherSource, TeacherSpec


@dataclass
class SpellingIds:
    """Number the bytes of tokens, so that tokens of both vocabularies with equal bytes are equal.

    Attributes:
        student_V, teacher_W: int64, -1 for control tokens and ids without bytes.
    """

    student_V: torch.Tensor
    teacher_W: torch.Tensor

    @classmethod
    def of(cls, student_table, teacher_table, device):
        """Number the bytes of the tokens of two TokenTables."""
        number_of = {}
        ids = []
        for table in (student_table, teacher_table):
            numbers = []
            for token, spelled in enumerate(all_bytes(table)):
                # equal names of control tokens are no equal text
                known = spelled and not table.special[token]
                numbers.append(number_of.setdefault(spelled, len(number_of)) if known else -1)
            ids.append(torch.tensor(numbers, device=device))
        return cls(*ids)


@dataclass
class TeacherSetup:
    """Hold a teacher, or an ensemble, and how the student learns from it.

    Attributes:
        name: of the teacher, for metrics.
        cfg: the flags as if it were the only teacher, with its own kd_weight.
        encoder: TextEncoder of the teacher.
        loss: DistillationLoss.
        spec: TeacherSpec.
        spelling_ids: SpellingIds of the student's and this tokenizer, for evaluations, or None.
        speculation: `evaluation.speculation.Speculation` of --eval_draft, or None.
        source: TeacherSource; None: not loaded yet.
        asked_late: it is asked about a micro-batch when the loss comes to it, not before a step.
        bytes_per_token: memory that its logits of a position occupied last.
    """

    name: str
    cfg: Config
    encoder: TextEncoder
    loss: DistillationLoss
    spec: TeacherSpec
    spelling_ids: SpellingIds | None = None
    speculation: object = None
    source: TeacherSource | None = None
    asked_late: bool = False
    bytes_per_token: float = 0.0

    @classmethod
    def of(cls, name, cfg, encoder, spec, *, student, device):
        """Return that of a teacher whose source is not loaded; student: TextEncoder."""
        loss = build_loss(cfg, student, encoder, device, spec.is_truncated)
        spelling_ids = None
        if cfg.holds_out:
            spelling_ids = SpellingIds.of(student.table, encoder.table, device)
        return cls(name, cfg, encoder, loss, spec, spelling_ids)

    @property
    def keeps_columns(self):
        """Tell whether the loss compares the most important teacher columns only."""
        return LOSSES[self.cfg.loss].columns and len(self.encoder.table) > self.num_columns

    @property
    def num_columns(self):
        """How many teacher columns such a loss compares."""
        return self.cfg.options_of_loss["projection_topk"]


def step_parts(setups, micro_batches, student):
    """Return an iterable over micro-batches: the Part of every teacher, without its weights.

    Those that are `asked_late` answer while it is walked over, so that what they said of the
    micro-batch before can be freed; without any it is a list.

    Args:
        setups: TeacherSetup of every teacher; micro_batches: Batches; student: of the job.
    """
    group = student.loss_group
    at_once = {}
    for number, setup in enumerate(setups):
        if not setup.asked_late:
            batches = [batch.teachers[number] for batch in micro_batches]
            at_once[number] = teacher_parts(setup, batches, group)

    def of_batch(index):
        parts = []
        for number, setup in enumerate(setups):
            if number in at_once:
                parts.append(at_once[number][index])
            else:
                parts += teacher_parts(setup, [micro_batches[index].teachers[number]], group)
        return parts

    parts = map(of_batch, range(len(micro_batches)))
    return parts if len(at_once) < len(setups) else list(parts)


def teacher_parts(setup, batches, group=None):
    """Ask a teacher about its TeacherBatches of a step; its replica's ranks take part together.

    Args:
        group: ranks that compute losses; None: all.
    Returns:
        a Part for each micro-batch, without weights; none where another rank computes the loss.
    """
    parts = []
    # one transfer of offloaded weights for all micro-batches
    with setup.source.on_device():
        for batch in batches:
            logits = setup.source.targets(batch)
            if logits is None:
                continue
            setup.bytes_per_token = logits.nbytes / batch.ids.numel()
            parts.append(Part(setup.loss.loss_fn, setup.loss.write_gradient,
                              setup.loss.is_observed, logits, batch))
    for part in parts:
        if setup.cfg.teacher_weights in ("ce", "select"):
            from isogloss.teachers.text_scores import sample_scores

            part.confidence = sample_scores(part.teacher_logits, part.batch)
        if part.batch.rollout_positions is not None:
            from isogloss.teachers.text_scores import rollout_nats

            part.rollout_nats = rollout_nats(part.teacher_logits, part.batch)
    if parts and setup.keeps_columns:
        # The columns depend on all micro-batches and ranks, so that the loss does not depend on
        # how the step is cut.
        kept_K = door("projection").kept_columns(setup, parts, group)
        loss_fn, write_gradient = setup.loss.for_columns(kept_K)
        for part in parts:
            if not setup.spec.is_truncated:
                part.teacher_logits = part.teacher_logits.columns(kept_K)
            part.loss_fn = loss_fn
            part.write_gradient = write_gradient
    return parts
