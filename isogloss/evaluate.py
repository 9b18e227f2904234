"""Held-out quality: bits per byte of student and teacher, and the divergence between them.

Bits per byte compares models with different tokenizers: the negative log2-likelihood of all text tokens,
divided by the UTF-8 bytes that they spell.  End-of-text tokens count on neither side of the fraction.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from losses import at_least_float32
from isogloss.sequence import complete
from tiles import TeacherBlocks

BLOCK = 256  # positions whose logits are computed at a time
SHARES = "event_coverage", "prefix_coverage"


@torch.no_grad()
def evaluate(batches, student, lessons=(), sequence=None):
    """Global means over held-out batches; every rank has to call it, with the same number of batches.

    Args:
        batches: lists of a batch (of `data.Collate`, on the device) for every teacher, or of one for none.
        student: (batch, run) -> run(rows -> student logits), inside the model's forward.
        lessons: (teacher, distillation) of every teacher: batch -> (rows -> teacher logits), and
            `objective.Distillation`.
        sequence: `sequence.SequenceGroup`, where ranks hold parts of sequences.
    Returns:
        (student_bits_per_byte, [dict of every teacher]), equal on every rank; the dicts hold
        teacher_bits_per_byte, kd (nats per term of the loss), aligned_bytes (share of the text in chunks that
        the loss used) and, if the loss has them, the shares of teacher probability that it sees.
    """
    sums = torch.zeros(2 + len(lessons) * (6 + 2 * len(SHARES)), dtype=torch.float64)
    for own in batches:
        device = own[0]["student_ids"].device
        how = [(batch, teacher(batch), distillation) for batch, (teacher, distillation) in zip(own, lessons)]
        sums += student(own[0], partial(_sums, batch=own[0], lessons=how, sequence=sequence))
    sums = sums.to(device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    nats, size, *rest = sums.tolist()
    found, each = [], 6 + 2 * len(SHARES)
    for first, (_, distillation) in zip(range(0, len(rest), each), lessons):
        nats_t, bytes_t, kd, terms, aligned, total, *shares = rest[first : first + each]
        found.append({"teacher_bits_per_byte": _bits(nats_t, bytes_t), "kd": kd / max(terms, 1),
                      "aligned_bytes": aligned / max(total, 1)})
        if distillation.shares:
            found[-1] |= {name: a / max(n, 1) for name, a, n in zip(SHARES, shares[::2], shares[1::2])}
    return _bits(nats, size), found


def _bits(nats, size):
    return nats / max(size, 1) / math.log(2)


def _sums(student_rows, batch, lessons, sequence):
    """Of one batch: of the student's text, then of every teacher."""
    whole = complete(student_rows, batch.get("travels"), sequence)
    found = [torch.tensor(_nats_and_bytes(whole, batch, "student"), dtype=torch.float64)]
    for own, teacher_rows, distillation in lessons:
        rows = whole if own is batch else complete(student_rows, own.get("travels"), sequence)
        found.append(_lesson_sums(rows, teacher_rows, own, distillation))
    return torch.cat(found)


def _lesson_sums(student_rows, teacher_rows, batch, distillation):
    counts, kd, shares = batch["counts"], 0.0, torch.zeros(2 * len(SHARES), dtype=torch.float64)
    teacher = TeacherBlocks(teacher_rows, batch["tiles"])
    for tile in batch["tiles"]:
        x = student_rows(tile.student_rows)
        for part in tile.parts:
            y = teacher(part)
            kd += float(distillation.loss(x[part.student], y, part))
            if distillation.shares:
                of_part = distillation.shares(y, part)
                shares += torch.stack([each.double().cpu() for name in SHARES for each in of_part[name]])
    found = [*_nats_and_bytes(teacher_rows, batch, "teacher"), kd, counts["kd"], counts["aligned_bytes"],
             counts["text_bytes"]]
    return torch.cat([torch.tensor(found, dtype=torch.float64), shares])


def _nats_and_bytes(rows, batch, side):
    bytes_, labels = batch[f"{side}_bytes"].flatten(), batch[f"{side}_labels"].flatten()
    nats = 0.0
    for part in ((bytes_ >= 0) & (labels != -100)).nonzero().squeeze(1).split(BLOCK):
        nats += float(F.cross_entropy(at_least_float32(rows(part)), labels[part], reduction="sum"))
    return nats, int(bytes_.clamp(min=0).sum())
