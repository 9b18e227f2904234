"""Let terms of a distillation loss weigh as much as the place where they begin says.

    early     2^(-t / half_life) behind t learned tokens of the sample: what a text begins with
              decides how it goes on (arXiv:2606.22600)
    column    what a column of the data says of the row
    sure      h / (h + H), where the teacher has an entropy of H nats; h = --token_entropy
    unsure    H / (h + H), so that both of one teacher, with reverse KL where it is sure and forward
              KL where it is not, are one loss (arXiv:2603.07079)

All follow from one sample alone, so they are the same in every layout.

Shapes: n student positions and m teacher positions of a sub-tile, W teacher tokens.
Tests: tests/test_token_weights.py.
"""

from dataclasses import replace

import torch

from isogloss.losses import at_least_float32
from isogloss.teachers.protocol import BLOCK

# {--token_weights: the flags that it reads}
FLAGS = {"early": ["token_half_life"], "column": ["weight_key"],
         "sure": ["token_entropy"], "unsure": ["token_entropy"]}


def weighed_by_entropy(loss, kind, half_entropy):
    """Return a DistillationLoss whose terms weigh as the teacher is sure where their chunk begins.

    Args:
        loss: DistillationLoss; kind: sure or unsure.
        half_entropy: nats at which a term weighs 1/2, more than 0.
    """
    def loss_fn(student_logits, teacher_logits, sub_tile, *observe):
        share_n = half_entropy / (half_entropy + chunk_entropy(teacher_logits, sub_tile))
        weight = share_n if kind == "sure" else 1 - share_n
        if sub_tile.weight is not None:
            weight = weight * sub_tile.weight
        sub_tile = sub_tile._replace(weight=weight)
        return loss.loss_fn(student_logits, teacher_logits, sub_tile, *observe)

    return replace(loss, loss_fn=loss_fn)


@torch.no_grad()
def chunk_entropy(teacher_logits, sub_tile):
    """Return (n,) float32 entropies, in nats, of the teacher's tokens where each chunk begins.

    It is 0 for a position in no chunk.
    """
    entropy_m = torch.cat([_entropy(block) for block in teacher_logits.split(BLOCK)])
    chunk_m = sub_tile.teacher_chunk
    chunk_n = sub_tile.student_chunk
    # the first row of each chunk; those in no chunk share a place behind all chunks
    num = max(len(chunk_n), len(chunk_m))
    rows = torch.arange(len(chunk_m), device=chunk_m.device)
    first = rows.new_full((num + 1,), len(chunk_m))
    first.scatter_reduce_(0, torch.where(chunk_m < 0, num, chunk_m), rows, "amin")
    known = torch.nn.functional.pad(entropy_m, (0, 1))  # a chunk without a row of the teacher: 0
    return torch.where(chunk_n < 0, 0, known[first[chunk_n.clamp(min=0)]])


def _entropy(logits_NW):
    p_NW = at_least_float32(logits_NW).softmax(-1)
    return torch.special.entr(p_NW).sum(-1).float()
