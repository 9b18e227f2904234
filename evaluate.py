"""Held-out quality: bits per byte of student and teacher, and the divergence between them.

Bits per byte compares models with different tokenizers: the negative log2-likelihood of all text tokens,
divided by the UTF-8 bytes that they spell.  End-of-text tokens count on neither side of the fraction.
"""

import math

import torch
import torch.distributed as dist

from losses import next_token_cross_entropy


@torch.no_grad()
def evaluate(batches, student_logits, teacher_logits=None, kd_loss=None):
    """Global means over held-out batches; every rank has to call it, with the same number of batches.

    Args:
        batches: of `data.Collate`, on the device.
        student_logits, teacher_logits: batch -> (B, S, V) / (B, T, W); the teacher may be None.
        kd_loss: (student_logits, teacher_logits, batch) -> (sum, count).
    Returns:
        dict, equal on every rank: student_bits_per_byte; with a teacher also teacher_bits_per_byte, kd (nats
        per term of the loss) and aligned_bytes (share of the text in chunks that the loss used).
    """
    sums = torch.zeros(8, dtype=torch.float64)
    for batch in batches:
        x = student_logits(batch)
        sums[:2] += _nats_and_bytes(x, batch, "student")
        if teacher_logits is not None:
            y = teacher_logits(batch)
            sums[2:4] += _nats_and_bytes(y, batch, "teacher")
            sums[4:6] += torch.stack([part.double().cpu() for part in kd_loss(x, y, batch)])
            sums[6:8] += torch.tensor([batch["counts"]["aligned_bytes"], batch["counts"]["text_bytes"]])
    sums = sums.to(x.device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    nats_s, bytes_s, nats_t, bytes_t, kd, terms, aligned, total = sums.tolist()
    result = {"student_bits_per_byte": nats_s / max(bytes_s, 1) / math.log(2)}
    if teacher_logits is not None:
        result |= {"teacher_bits_per_byte": nats_t / max(bytes_t, 1) / math.log(2), "kd": kd / max(terms, 1),
                   "aligned_bytes": aligned / max(total, 1)}
    return result


def _nats_and_bytes(logits, batch, side):
    bytes_ = batch[f"{side}_bytes"]
    labels = torch.where(bytes_ >= 0, batch[f"{side}_labels"], -100)
    nats, _ = next_token_cross_entropy(logits, labels)
    return torch.stack([nats.double(), bytes_.clamp(min=0).sum().double()]).cpu()
