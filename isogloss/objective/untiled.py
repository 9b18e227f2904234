"""The loss of a micro-batch whose logits exist, all at once.

Tests: tests/test_tiles.py.
"""

import torch

from isogloss.job.counts import TermSums
from isogloss.tiles import weighted


def untiled_loss(student_logits, part):
    """Do what `tiled_losses` does with StoredLogits: autograd keeps whatever a loss makes of them.

    Args:
        part: Part.
    Returns:
        (loss, sums): (), and the (6,) `TermSums`, without a gradient.
    """
    # one term of the graph, also for a rank without a tile
    sums = [student_logits.logits_TW[:0].float().sum().expand(len(TermSums._fields))]
    for tile in part.tiles:
        student = student_logits(tile.student_positions)
        for sub_tile in tile.sub_tiles:
            teacher = None
            if part.teacher_logits is not None:
                # Not TeacherBlocks, which would write over what backward still needs.
                if sub_tile.teacher_positions is not None:
                    block = part.teacher_logits(sub_tile.teacher_positions)
                teacher = block[sub_tile.teacher_slice]
            sums.append(part.tile_loss(student[sub_tile.student_slice], teacher, sub_tile))
    total = torch.stack(sums).sum(0)
    return weighted(total, part.weights), total.detach()
