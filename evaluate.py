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
from sequence import complete

BLOCK = 256  # positions whose logits are computed at a time
SHARES = "linked_mass", "inside_mass"


@torch.no_grad()
def evaluate(batches, student, teacher=None, distillation=None, sequence=None):
    """Global means over held-out batches; every rank has to call it, with the same number of batches.

    Args:
        batches: of `data.Collate`, on the device.
        student: (batch, run) -> run(rows -> student logits), inside the model's forward.
        teacher: batch -> (rows -> teacher logits); None: there is none.
        distillation: `objective.Distillation`.
        sequence: `sequence.SequenceGroup`, where ranks hold parts of sequences.
    Returns:
        dict, equal on every rank: student_bits_per_byte; with a teacher also teacher_bits_per_byte, kd (nats
        per term of the loss), aligned_bytes (share of the text in chunks that the loss used) and, if the loss
        has them, the shares of teacher probability that it sees.
    """
    sums = torch.zeros(8 + 2 * len(SHARES), dtype=torch.float64)
    for batch in batches:
        device = batch["student_ids"].device
        rows = teacher(batch) if teacher else None
        sums += student(batch, partial(_sums, batch=batch, teacher_rows=rows, distillation=distillation,
                                       sequence=sequence))
    sums = sums.to(device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    nats_s, bytes_s, nats_t, bytes_t, kd, terms, aligned, total, *shares = sums.tolist()
    result = {"student_bits_per_byte": nats_s / max(bytes_s, 1) / math.log(2)}
    if teacher is not None:
        result |= {"teacher_bits_per_byte": nats_t / max(bytes_t, 1) / math.log(2), "kd": kd / max(terms, 1),
                   "aligned_bytes": aligned / max(total, 1)}
        if distillation.shares:
            result |= {name: a / max(n, 1) for name, a, n in zip(SHARES, shares[::2], shares[1::2])}
    return result


def _sums(student_rows, batch, teacher_rows, distillation, sequence):
    student_rows = complete(student_rows, batch.get("travels"), sequence)
    found = [*_nats_and_bytes(student_rows, batch, "student")]
    if teacher_rows is None:
        return torch.tensor(found + [0] * (6 + 2 * len(SHARES)), dtype=torch.float64)
    counts, kd, shares = batch["counts"], 0.0, torch.zeros(2 * len(SHARES), dtype=torch.float64)
    for tile in batch["tiles"]:
        x, y = student_rows(tile.student_rows), teacher_rows(tile.teacher_rows)
        for part in tile.parts:
            kd += float(distillation.loss(x[part.student], y[part.teacher], part))
            if distillation.shares:
                of_part = distillation.shares(y[part.teacher], part)
                shares += torch.stack([x.double().cpu() for name in SHARES for x in of_part[name]])
    found += [*_nats_and_bytes(teacher_rows, batch, "teacher"), kd, counts["kd"], counts["aligned_bytes"],
              counts["text_bytes"]]
    return torch.cat([torch.tensor(found, dtype=torch.float64), shares])


def _nats_and_bytes(rows, batch, side):
    bytes_, labels = batch[f"{side}_bytes"].flatten(), batch[f"{side}_labels"].flatten()
    nats = 0.0
    for part in ((bytes_ >= 0) & (labels != -100)).nonzero().squeeze(1).split(BLOCK):
        nats += float(F.cross_entropy(at_least_float32(rows(part)), labels[part], reduction="sum"))
    return nats, int(bytes_.clamp(min=0).sum())
