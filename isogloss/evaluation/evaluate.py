"""Measure held-out quality: bits per byte, accuracy, entropy, and how far two models are apart.

Bits per byte compares models with different tokenizers: the negative log2-likelihood of the
learned text, divided by its UTF-8 bytes.  Control tokens, such as ends, count on neither side of
the fraction.  Accuracy and entropy are per token, so those of different tokenizers compare roughly.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from isogloss.data.batch_types import TeacherBatch
from isogloss.job.counts import Sums, global_sums, mean_of
from isogloss.losses import at_least_float32, find_chunks, next_token_cross_entropy
from isogloss.objective.loss_table import DistillationLoss
from isogloss.targets import SpellingIds
from isogloss.teachers.protocol import BLOCK
from isogloss.tiles import LogitsSource, TeacherBlocks

if TYPE_CHECKING:
    from isogloss.job.sequence_group import SequenceGroup


@dataclass
class ModelSums(Sums):
    """Sum up what one model says of the text of a batch.

    Attributes:
        nats: -log p of the text tokens.
        num_bytes: that they spell.
        correct: tokens that are the model's most likely ones.
        entropy: of its predictions, nats.
        tokens: how many there are.
    """

    nats: float = 0.0
    num_bytes: float = 0
    correct: float = 0
    entropy: float = 0.0
    tokens: float = 0

    def metrics(self, role):
        return {
            f"{role}_bits_per_byte": mean_of(self.nats / math.log(2), self.num_bytes),
            f"{role}_accuracy": mean_of(self.correct, self.tokens),
            f"{role}_entropy": mean_of(self.entropy, self.tokens),
        }


@dataclass
class MeanSums(Sums):
    """Sum up something, and count of how much; the mean is of both."""

    total: float = 0.0
    count: float = 0.0


@dataclass
class PairSums(Sums):
    """Sum up what a teacher and the student say of the same batch.

    Attributes:
        kd: sum of the distillation loss, nats; kd_terms: over so many terms.
        aligned_bytes, read_bytes: see `counts.PairCounts`.
        agree: chunk starts where the most likely tokens of both models spell the same bytes.
        projected: those where the projection maps the student's most likely token to the teacher's.
        starts: chunk starts.
        coverage: MeanSums of every metric of what the loss covers and a draft's, by name; see
            docs/evaluate.md.
    """

    kd: float = 0.0
    kd_terms: float = 0
    aligned_bytes: float = 0
    read_bytes: float = 0
    agree: float = 0
    projected: float = 0
    starts: float = 0
    coverage: dict[str, MeanSums] = field(default_factory=dict)

    def metrics(self, loss):
        """Return the metrics of a pair whose loss is a DistillationLoss."""
        metrics = {
            "kd": mean_of(self.kd, self.kd_terms),
            "aligned_bytes": mean_of(self.aligned_bytes, self.read_bytes),
            "top1_agreement": mean_of(self.agree, self.starts),
        }
        if loss.indices_VK is not None:
            metrics["projected_agreement"] = mean_of(self.projected, self.starts)
        for name, covered in self.coverage.items():
            metrics[name] = mean_of(covered.total, covered.count)
        return metrics

    @classmethod
    def of(cls, pair):
        """Return empty sums of an EvaluationPair or of its TeacherSetup."""
        names = pair.loss.coverage_names
        if pair.speculation:
            names += pair.speculation.names
        return cls(coverage={name: MeanSums() for name in names})

    def add_coverage(self, covered):
        """Add {metric: (sum, count)}, as far as the metrics are logged."""
        for name, (total, count) in covered.items():
            if name in self.coverage:
                self.coverage[name].total += float(total)
                self.coverage[name].count += float(count)


@dataclass
class EvaluationSums(Sums):
    """Sum up what the student, every teacher, and every pair of them say of a batch."""

    student: ModelSums = field(default_factory=ModelSums)
    teachers: list[ModelSums] = field(default_factory=list)
    pairs: list[PairSums] = field(default_factory=list)


@dataclass
class EvaluationPair:
    """Hold a teacher's side of a held-out batch.

    Attributes:
        batch: TeacherBatch.
        logits: LogitsSource of the teacher, as in training.
        text_logits: ScoredLogits, or a LogitsSource of whole distributions: what it says of the
            text.
        loss: DistillationLoss.
        spelling_ids: SpellingIds of the pair.
        speculation: `speculation.Speculation`, or None.
    """

    batch: TeacherBatch
    logits: LogitsSource
    text_logits: LogitsSource
    loss: DistillationLoss
    spelling_ids: SpellingIds
    speculation: object = None


@dataclass
class EvaluationTerms:
    """Tell `StudentWithLoss` what to make of its logits in an evaluation.

    Attributes:
        student: StudentBatch.
        counts: Counts of the batch.
        pairs: EvaluationPair of every teacher.
        sequence_group: ranks that hold the other shards of the sequences, or None.
    """

    student: object
    counts: object
    pairs: list[EvaluationPair] = field(default_factory=list)
    sequence_group: "SequenceGroup | None" = None

    @torch.no_grad()
    def reduce(self, student_logits):
        """Return (n,) float64: the numbers of EvaluationSums."""
        whole = EvaluationSums(model_sums(student_logits, self.student))
        for pair, counts in zip(self.pairs, self.counts.pairs):
            complete = student_logits
            if self.sequence_group:  # a chunk that a border cuts is of its first position's rank
                complete = self.sequence_group.with_halo(student_logits, pair.batch.halo_index)
            sums = pair_sums(complete, pair)
            sums.kd_terms = counts.kd_terms
            sums.aligned_bytes = counts.aligned_bytes
            sums.read_bytes = counts.read_bytes
            whole.teachers.append(model_sums(pair.text_logits, pair.batch))
            whole.pairs.append(sums)
        return torch.tensor(whole.numbers(), dtype=torch.float64)


def model_sums(logits, batch):
    """Return the ModelSums of a model.

    Args:
        logits: LogitsSource; of truncated logits ScoredLogits.
        batch: StudentBatch or TeacherBatch.
    """
    sums = ModelSums()
    num_bytes = batch.num_bytes.flatten()
    labels = batch.labels.flatten()
    # end-of-text tokens spell nothing; tokens that are not learned are not judged
    positions = ((num_bytes >= 0) & (labels != -100)).nonzero().squeeze(1)
    sums.tokens = len(positions)
    sums.num_bytes = int(num_bytes.clamp(min=0).sum())
    if hasattr(logits, "scores"):
        scores = logits.scores.at(positions)
        sums.nats = -float(scores.logp_T.double().sum())
        sums.correct = int(scores.correct_T.sum())
        sums.entropy = float(scores.entropy_T.double().sum())
        return sums
    for block in positions.split(BLOCK):
        # the logits of one block exist at a time, also of a model whose loss is not tiled
        rows = at_least_float32(logits(block))
        nats, _ = next_token_cross_entropy(rows[None], labels[block][None], select=False)
        sums.nats += float(nats)
        sums.correct += int((rows.argmax(-1) == labels[block]).sum())
        sums.entropy += float(torch.special.entr(rows.softmax(-1)).double().sum())
    return sums


def pair_sums(student_logits, pair):
    """Return the PairSums of what depends on logits."""
    sums = PairSums.of(pair)
    blocks = TeacherBlocks(pair.logits, pair.batch.tiles)
    for tile in pair.batch.tiles:
        tile_logits = student_logits(tile.student_positions)
        for sub_tile in tile.sub_tiles:
            teacher = blocks(sub_tile)
            student = tile_logits[sub_tile.student_slice]
            sums.kd += float(pair.loss.loss_fn(student, teacher, sub_tile))
            add_agreement(sums, student, teacher, sub_tile, pair)
            if pair.loss.coverage:
                sums.add_coverage(pair.loss.coverage(teacher, sub_tile))
            if pair.speculation:
                sums.add_coverage(pair.speculation.sums(student, teacher, sub_tile))
    return sums


def add_agreement(sums, student, teacher, sub_tile, pair):
    """Add the chunk starts of a sub-tile, and where the most likely tokens of both models agree."""
    # Only at the start of a chunk have both models read the same text.
    chunks = find_chunks(sub_tile.student_chunk[None], sub_tile.teacher_chunk[None])
    v = student[chunks.first_S].argmax(-1)
    num_tokens = len(pair.spelling_ids.teacher_W)  # truncated rows have one column more
    w = teacher[chunks.first_T, :num_tokens].argmax(-1)
    spelled = pair.spelling_ids.student_V[v]
    # -1 stands for "no bytes" on both sides, which is no agreement
    agree = (spelled >= 0) & (spelled == pair.spelling_ids.teacher_W[w])
    sums.starts += len(v)
    sums.agree += int(agree.sum())
    if pair.loss.indices_VK is not None:
        sums.projected += int((pair.loss.indices_VK[v, 0] == w).sum())


def evaluation_terms(batch, setups, sequence_group):
    """Return the EvaluationTerms of a Batch, for which all teachers are asked."""
    terms = EvaluationTerms(batch.student, batch.counts, sequence_group=sequence_group)
    for setup, teacher_batch in zip(setups, batch.teachers):
        logits = setup.source.targets(teacher_batch)
        text_logits = logits
        if setup.spec.averages_top_k:
            # what the members say of the text does not tell what their mean says of it
            text_logits = setup.source.whole_targets(teacher_batch)
        terms.pairs.append(EvaluationPair(
            teacher_batch, logits, text_logits, setup.loss, setup.spelling_ids,
            setup.speculation))
    return terms


@torch.no_grad()
def evaluate(batches, student, setups, sequence_group=None):
    """Sum up held-out batches over all ranks, which call it with equally many.

    Args:
        batches: Batches on the device.
        student: `engine.StudentRunner`.
        setups: `targets.TeacherSetup` of every teacher, with its source.
        sequence_group: SequenceGroup where ranks hold shards of sequences.
    Returns:
        EvaluationSums, equal on every rank.
    """
    empty = EvaluationSums(teachers=[ModelSums() for _ in setups],
                           pairs=[PairSums.of(setup) for setup in setups])
    totals = torch.tensor(empty.numbers(), dtype=torch.float64)
    batches = iter(batches)
    while group := list(itertools.islice(batches, student.batches_at_once)):
        terms = [evaluation_terms(batch, setups, sequence_group) for batch in group]
        # inside the model's forward pass, because that is where ZeRO-3 gathers the head
        for sums in student.reduce([batch.student for batch in group], terms):
            if sums is not None:  # another rank of the pipeline has them
                totals += sums
        for setup in setups:
            setup.source.release()
    return empty.with_numbers(global_sums(totals).tolist())  # one collective for everything


def metrics_of(sums, setups):
    """Return (metrics of the student, [metrics of each teacher]); see docs/evaluate.md.

    Args:
        sums: EvaluationSums; setups: as above.
    """
    metrics = []
    for teacher, pair, setup in zip(sums.teachers, sums.pairs, setups):
        of_pair = teacher.metrics("teacher") | pair.metrics(setup.loss)
        if setup.speculation:
            of_pair |= setup.speculation.lengths(of_pair)
        metrics.append(of_pair | dict.fromkeys(setup.spec.unknown_metrics))
    return sums.student.metrics("student"), metrics
