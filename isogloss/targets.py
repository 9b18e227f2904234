"""Ask the teachers about a step: for logits, the columns that a loss keeps, and confidence."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

from isogloss.align import all_bytes
from isogloss.config import Config
from isogloss.data.sample import TextEncoder
from isogloss.losses import row_sums, teacher_importance
from isogloss.objective.loss_table import LOSSES, DistillationLoss, build_loss
from isogloss.objective.objective import Part, weigh_samples
from isogloss.teachers.protocol import BLOCK, TeacherSource, TeacherSpec
from isogloss.tiles import TeacherBlocks


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


def without_gradient(student, batch, function):
    """Return `function(LogitsSource)` of a StudentBatch, by a StudentRunner; all ranks take part.

    It is None where another rank of the pipeline has it.
    """
    was_training = student.engine.module.training
    student.engine.eval()
    with torch.no_grad():
        [reduced] = student.reduce([batch], [SimpleNamespace(reduce=function)])
    student.engine.train(was_training)
    return reduced


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
            part.confidence = sample_scores(part.teacher_logits, part.batch)
        if part.batch.rollout_positions is not None:
            part.rollout_nats = rollout_nats(part.teacher_logits, part.batch)
    if parts and setup.keeps_columns:
        # The columns depend on all micro-batches and ranks, so that the loss does not depend on
        # how the step is cut.
        kept_K = kept_columns(setup, parts, group)
        loss_fn, write_gradient = setup.loss.for_columns(kept_K)
        for part in parts:
            part.teacher_logits = part.teacher_logits.columns(kept_K)
            part.loss_fn = loss_fn
            part.write_gradient = write_gradient
    return parts


def kept_columns(setup, parts, group=None):
    """Return the sorted teacher columns (K,) that a loss compares in this step, on every rank.

    Args:
        parts, group: see `teacher_parts`.

    They are those with the largest logit at any position in a chunk (`teacher_importance`).
    """
    device = parts[0].batch.ids.device
    importance = torch.full((len(setup.encoder.table),), -torch.inf, device=device)
    for part in parts:
        # no more logits exist at a time than in the loss itself
        blocks = TeacherBlocks(part.teacher_logits, part.tiles)
        for positions in blocks.fetches:
            # the rest of truncated rows, in a column behind the tokens, has no place to compete for
            rows = blocks.fetch(positions)[:, : len(importance)]
            block = teacher_importance(rows[None])
            importance = torch.maximum(importance, block)
    dist.all_reduce(importance, op=dist.ReduceOp.MAX, group=group)
    return importance.topk(setup.num_columns).indices.sort().values


@torch.no_grad()
def sample_scores(logits, batch):
    """Return (B,) how sure a teacher is of each sample: log-probability, in nats, for each byte.

    It is -inf for a sample that the teacher does not read, whose template refuses it, say.
    Tokens of different tokenizers are not the same unit, bytes are.

    Args:
        logits: LogitsSource of the teacher; of truncated logits ScoredLogits.
    """
    labels = batch.labels.flatten()
    num_bytes = batch.num_bytes.flatten().clamp(min=0)
    scores = []
    for number, positions in enumerate(batch.labeled.split(batch.num_labeled)):
        if not len(positions):
            scores.append(torch.full((), -torch.inf, device=labels.device))
            continue
        size = (num_bytes * (batch.sample == number)).sum().clamp(min=1)
        total = sum(label_logp(logits, labels, block).sum() for block in positions.split(BLOCK))
        scores.append((total / size).float())
    return torch.stack(scores)


def label_logp(logits, labels, positions):
    """Return (n,) log-probabilities of the labels at some positions; see `sample_scores`."""
    if hasattr(logits, "scores"):
        return logits.scores.at(positions).logp_T
    from isogloss.teachers.mixing import token_scores

    return token_scores(logits(positions), labels[positions])


@torch.no_grad()
def rollout_nats(logits, batch):
    """Return (samples,) -log q of the tokens of each rollout that are in chunks, else 0.

    Args:
        logits: LogitsSource of the teacher; of truncated logits ScoredLogits.
    """
    labels = batch.labels.flatten()
    nats = torch.zeros(batch.num_samples, dtype=torch.float64, device=labels.device)
    for block in batch.rollout_positions.split(BLOCK):
        logp = label_logp(logits, labels, block).double()
        nats -= row_sums(logp, batch.sample[block], batch.num_samples)
    return nats


def weigh_by_confidence(parts, select):
    """Let each sample of a micro-batch weigh as much as each teacher is sure of it.

    Args:
        parts: of every teacher.
        select: the one that is surest of a sample alone teaches it.
    """
    from isogloss.teachers.mixing import teacher_weights

    scores_MB = torch.stack([part.confidence for part in parts])
    for part, weight_B in zip(parts, teacher_weights(scores_MB, select)):
        part.batch = weigh_samples(part.batch, weight_B)
