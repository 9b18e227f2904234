"""Tell how far the student is from a teacher in each of its turns.

Tests: tests/test_episodes.py.
"""

import torch

from isogloss.job.counts import global_sums
from isogloss.teachers.protocol import BLOCK
from isogloss.teachers.text_scores import label_logp

MOST_TURNS = 8  # the last one stands for all that follow


def nats_by_turn(logits, teacher, student):
    """Return (MOST_TURNS, 3) sums over what the student wrote in chunks: -log q, -log p, bytes.

    Args:
        logits: LogitsSource of the teacher; teacher: TeacherBatch; student: StudentBatch, of whole
            sequences.
    """
    turn_BS = _turns(student.logp, teacher.sample_of_student[: student.ids.numel()])
    chunk_BS = teacher.student_chunk
    is_counted_BS = (chunk_BS >= 0) & (turn_BS >= 0)
    sums = torch.zeros(MOST_TURNS, 3, dtype=torch.float64, device=turn_BS.device)
    turns = turn_BS[is_counted_BS]
    sums[:, 1].index_add_(0, turns, -student.logp[is_counted_BS].double())
    sums[:, 2].index_add_(0, turns, student.num_bytes[is_counted_BS].clamp(min=0).double())
    # a chunk is in the same row, and of the same turn, on both sides
    width = int(max(chunk_BS.max(), teacher.teacher_chunk.max())) + 1
    turn_of_chunk = turn_BS.new_full((len(chunk_BS) * width,), -1)
    row_BS = torch.arange(len(chunk_BS), device=turn_BS.device)[:, None].expand_as(chunk_BS)
    turn_of_chunk[(row_BS * width + chunk_BS)[is_counted_BS]] = turns
    labels = teacher.labels.flatten()
    row_T = torch.arange(len(labels), device=labels.device) // teacher.ids.shape[1]
    for block in teacher.rollout_positions.split(BLOCK):
        nats = -label_logp(logits, labels, block).double()
        of_block = turn_of_chunk[row_T[block] * width + teacher.teacher_chunk.flatten()[block]]
        sums[:, 0].index_add_(0, of_block, nats)
    return sums


def compared_by_turn(sums, names):
    """Return the reverse KL per byte of each turn, by teacher; all ranks take part.

    Args:
        sums: {number of a teacher: (MOST_TURNS, 3) sums of this rank}; names: of all teachers.
    """
    metrics = {}
    for number, name in enumerate(names):
        local = sums.get(number, torch.zeros(MOST_TURNS, 3))
        total = global_sums(local.flatten()).view(MOST_TURNS, 3)
        suffix = f"/{name}" if len(names) > 1 else ""
        for turn, (teacher, student, num_bytes) in enumerate(total.tolist(), 1):
            if num_bytes:
                key = f"reverse_kl_per_byte_turn_{turn}{suffix}"
                metrics[key] = (teacher - student) / num_bytes
    return metrics


def _turns(logp_BS, sample_N):
    """Return (B, S) number of the turn that a position predicts a token of, -1 for none."""
    written = ~logp_BS.isnan()
    begins = written.clone()
    begins[:, 1:] &= ~written[:, :-1]
    number_N = begins.flatten().long().cumsum(0)
    first = torch.full((int(sample_N.max()) + 1,), len(number_N), device=number_N.device)
    before_N = number_N - begins.flatten().long()
    first = first.scatter_reduce(0, sample_N, before_N, "amin")
    turn = (number_N - first[sample_N] - 1).clamp(max=MOST_TURNS - 1)
    return torch.where(written, turn.view_as(written), -1)
