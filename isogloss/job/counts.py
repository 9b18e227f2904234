"""Count what a batch, a step or a whole job's step holds, before any forward pass.

Every loss is a sum over its terms, divided by their number over all micro-batches and ranks; these
are the numbers.  They also tell how much of the text is aligned, and why the rest is not.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from isogloss.job.rendezvous import host_group


class Sums:
    """Base of the dataclasses whose fields add up over batches and ranks.

    A field is a number, Sums, or a list or dict of these: as many of them, under the same keys, in
    whatever is added and on every rank.
    """

    def numbers(self):
        """List all numbers, in the order that `with_numbers` reads."""
        return _numbers(self)

    def with_numbers(self, numbers):
        """Return the same fields with other numbers."""
        numbers = iter(numbers)
        filled = _filled(self, numbers)
        assert next(numbers, None) is None, "more numbers than fields"
        return filled

    def __add__(self, other):
        # strict: counts of other numbers of teachers do not add up
        numbers = zip(self.numbers(), other.numbers(), strict=True)
        return self.with_numbers([first + second for first, second in numbers])

    def all_reduce(self):
        """Return the sums over all ranks, equal on every rank; one collective."""
        return self.with_numbers(global_sums(self.numbers()).tolist())


def _numbers(value):
    if isinstance(value, Sums):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return [value]
    numbers = []
    for part in value:
        numbers += _numbers(part)
    return numbers


def _filled(value, numbers):
    """Return a value like this one with the next numbers of an iterator."""
    if isinstance(value, Sums):
        return type(value)(**_filled(vars(value), numbers))
    if isinstance(value, dict):
        return {name: _filled(part, numbers) for name, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, numbers) for part in value]
    return next(numbers)


@dataclass
class PairCounts(Sums):
    """Count what a batch holds for one student-teacher pair; fields are sums over samples.

    Attributes:
        kd_terms: terms of the distillation loss; weighing_terms: those that weigh more than 0.
        aligned_tokens: student tokens in the chunks that the loss compares.
        aligned_bytes: bytes in these chunks.
        read_tokens, read_bytes: of the student's side, in the samples that the teacher reads.
        skipped_chats: chats that a template does not render.
        source_bytes: bytes of the texts as far as they are read, before the cut; the fields below
            speak of these.
        normalized_bytes, unencodable_bytes, unmatched_bytes: see `align.Alignment.dropped`.
        chunks: all chunks; chunks_1_n: of one student token and several teacher tokens, and so on.
        tokens_in_chunks: student tokens in all chunks; rest_tokens: those behind the first one of
            chunks of several tokens on both sides.
        roots: of a translation; misplaced_roots: those at which the student's token lies outside of
            the cell that the teacher's token gives its mass to.
        rollout_terms: those of `kd_terms` in rollouts.
        rollout_bytes: those of `aligned_bytes` in rollouts.
        rollout_nats: -log p of the student when it wrote the tokens in these chunks.
    """

    # Floats, because sums over ranks come back as float64.
    kd_terms: float = 0
    weighing_terms: float = 0
    aligned_tokens: float = 0
    aligned_bytes: float = 0
    read_tokens: float = 0
    read_bytes: float = 0
    skipped_chats: float = 0
    source_bytes: float = 0
    normalized_bytes: float = 0
    unencodable_bytes: float = 0
    unmatched_bytes: float = 0
    chunks: float = 0
    chunks_1_1: float = 0
    chunks_1_n: float = 0
    chunks_n_1: float = 0
    chunks_n_m: float = 0
    tokens_in_chunks: float = 0
    rest_tokens: float = 0
    roots: float = 0
    misplaced_roots: float = 0
    rollout_terms: float = 0
    rollout_bytes: float = 0
    rollout_nats: float = 0

    def add_alignments(self, alignments):
        """Count texts as far as they are read, before the cut."""
        for alignment in alignments:
            self.source_bytes += alignment.text_bytes
            self.normalized_bytes += alignment.dropped["normalized"]
            self.unencodable_bytes += alignment.dropped["unencodable"]
            self.unmatched_bytes += alignment.dropped["unmatched"]
            several_student = alignment.student_tokens > 1
            several_teacher = alignment.teacher_tokens > 1
            self.chunks += len(several_student)
            self.chunks_1_1 += int((~several_student & ~several_teacher).sum())
            self.chunks_1_n += int((~several_student & several_teacher).sum())
            self.chunks_n_1 += int((several_student & ~several_teacher).sum())
            is_many = several_student & several_teacher
            self.chunks_n_m += int(is_many.sum())
            self.tokens_in_chunks += int(alignment.student_tokens.sum())
            self.rest_tokens += int((alignment.student_tokens[is_many] - 1).sum())

    def metrics(self):
        """Return the logged fractions, see docs/evaluate.md."""
        metrics = {"skipped_chats": int(self.skipped_chats),
                   "aligned_bytes": mean_of(self.aligned_bytes, self.read_bytes),
                   "aligned_tokens": mean_of(self.aligned_tokens, self.read_tokens)}
        for name in ("normalized_bytes", "unencodable_bytes", "unmatched_bytes"):
            metrics[name] = mean_of(getattr(self, name), self.source_bytes)
        for name in ("chunks_1_1", "chunks_1_n", "chunks_n_1", "chunks_n_m"):
            metrics[name] = mean_of(getattr(self, name), self.chunks)
        metrics["rest_tokens"] = mean_of(self.rest_tokens, self.tokens_in_chunks)
        if self.roots:
            metrics["misplaced_roots"] = self.misplaced_roots / self.roots
        return metrics


@dataclass
class Counts(Sums):
    """Count what a batch, a step or a whole job's step holds.

    Attributes:
        tokens: student tokens to predict.
        ce_tokens: those of the data, the terms of the cross-entropy; the others are in rollouts.
        text_bytes: UTF-8 bytes that the tokens spell.
        rows: samples.
        samples: those of which something would be learned, were nothing cut off.
        cut_samples: those of them that are cut before their first label.
        overlapping_turns: turns of chats that are left out because they overlap with others.
        pairs: PairCounts of every teacher.
    """

    tokens: float = 0
    ce_tokens: float = 0
    text_bytes: float = 0
    rows: float = 0
    samples: float = 0
    cut_samples: float = 0
    overlapping_turns: float = 0
    pairs: list = field(default_factory=list)


class TermSums(NamedTuple):
    """Name what a teacher's term adds up over a sub-tile, a micro-batch or a step.

    ce, kd: cross-entropy and distillation loss, nats; rollout_kd: the part of kd in rollouts.
    correct: tokens of the data that the student finds most likely.
    agreed: chunks in which both models find most likely the same of what the loss compares.
    clipped: terms that max_divergence of --loss_options bounds.
    """

    ce: torch.Tensor | float
    kd: torch.Tensor | float
    rollout_kd: torch.Tensor | float
    correct: torch.Tensor | float
    agreed: torch.Tensor | float
    clipped: torch.Tensor | float


def mean_of(total, count):
    """Return total / count; None where nothing is counted: 0 would say that it was measured."""
    return total / count if count else None


def global_sums(values):
    """Return (n,) float64 on the CPU: the sum over all ranks, equal on every rank.

    It waits for no work of a device: whatever was queued there goes on.

    Args:
        values: (n,) numbers in the host's memory.
    """
    # float64 holds counts exactly; the copy is there because all_reduce writes in place
    total = torch.as_tensor(values, dtype=torch.float64).to("cpu", copy=True)
    if dist.get_world_size() > 1:
        dist.all_reduce(total, group=host_group())
    return total


def device_sums(values):
    """Return (n,) float64 like `global_sums`, of a tensor on a device, where it stays."""
    total = values.detach().to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total
