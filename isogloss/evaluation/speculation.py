"""Measure how good a draft of the teacher the student is, whatever the two tokenizers.

In speculative decoding a small model drafts tokens, and its target takes each of them with
probability min(1, p / q), so that what is written is distributed as the target's own text
(arXiv:2211.17192).  With another vocabulary a draft proposes the tokens that both models have (TLI
of arXiv:2502.05202, which transformers implements): q is its distribution over these, p the
target's over its whole vocabulary.  The expected share of drafted tokens that are accepted is then

    sum over common tokens x of min(p(x), q(x)) = 1 - total variation of p and q.

Here the student is the draft and the teacher is the target.  Both have read the same text at the
starts of chunks alone, so that these positions count.

Shapes: n positions; V, W vocabularies of student and teacher.  Tests: tests/test_speculation.py.
"""

from dataclasses import dataclass

import numpy as np
import torch

from isogloss.align import all_bytes
from isogloss.losses import at_least_float32, find_chunks
from isogloss.spelling import unwritten_twins

DRAFTED = 5  # tokens of a block, as often in examples of vLLM


@dataclass
class Speculation:
    """Hold the tokens that two vocabularies have in common, as pairs of ids.

    Attributes:
        student_ids, teacher_ids: (C,) int64.
    """

    student_ids: torch.Tensor
    teacher_ids: torch.Tensor

    names = ("draft_acceptance",)

    @classmethod
    def of(cls, student_table, teacher_table, device, unwritten=((), ())):
        """Pair equal bytes, and control tokens of equal names, of two TokenTables.

        Of equal ones in one vocabulary that are written the last counts.

        Args:
            unwritten: `spelling.unwritten_twins` of both, which are left out.
        Raises:
            ValueError: the vocabularies have nothing in common.
        """
        ids_of_student, ids_of_teacher = map(
            _ids_by_spelling, (student_table, teacher_table), unwritten)
        common = sorted(ids_of_student.keys() & ids_of_teacher.keys())
        if not common:
            raise ValueError("--eval_draft: the two tokenizers have no token in common, so that "
                             "the student can draft nothing; leave it out")

        def of_common(ids):
            return torch.tensor([ids[spelled] for spelled in common], device=device)

        return cls(of_common(ids_of_student), of_common(ids_of_teacher))

    def accepted(self, student_logits, teacher_logits):
        """Return (n,) the expected share of accepted tokens: sum of min(p, q) of common tokens.

        Args:
            student_logits, teacher_logits: (n, V), (n, W).
        """
        common = at_least_float32(student_logits.index_select(1, self.student_ids))
        q = common.softmax(-1)
        p = at_least_float32(teacher_logits).softmax(-1).index_select(1, self.teacher_ids)
        return torch.minimum(p, q).sum(-1)

    def sums(self, student_logits, teacher_logits, sub_tile):
        """Return {metric: (sum, count)} of the chunk starts of a sub-tile."""
        chunks = find_chunks(sub_tile.student_chunk[None], sub_tile.teacher_chunk[None])
        accepted = self.accepted(student_logits[chunks.first_S], teacher_logits[chunks.first_T])
        return {"draft_acceptance": (accepted.double().sum(), len(accepted))}

    def lengths(self, metrics):
        """Return what follows from the means of `sums`, None where nothing was counted.

        draft_length: expected tokens of a pass of the target over a block of drafted tokens: those
        before the first one that is not accepted, and one of the target's own, where each is
        accepted with the same probability (equation 1 of arXiv:2211.17192).
        """
        rate = metrics["draft_acceptance"]
        length = None if rate is None else sum(rate**count for count in range(DRAFTED + 1))
        return {"draft_length": length}


def _ids_by_spelling(table, unwritten_V):
    """Return {(is it a control token, bytes): id}."""
    ids = {}
    hidden = set(np.flatnonzero(unwritten_V).tolist())
    for token, spelled in enumerate(all_bytes(table)):
        if spelled and token not in hidden:
            ids[bool(table.special[token]), spelled] = token
    return ids


def plan_speculation(teachers, student, device):
    """Let evaluations measure how good a draft of each teacher the student is."""
    for setup in teachers:
        if setup.spec.is_truncated:
            raise ValueError(f"--eval_draft with the teacher {setup.name}: of which some tokens "
                             "are kept, and it is about all of its tokens; keep hidden states, or "
                             "leave it out")
        encoders = student, setup.encoder
        unwritten = [unwritten_twins(one.table, one.tokenizer) for one in encoders]
        tables = [one.table for one in encoders]
        setup.speculation = Speculation.of(*tables, device, unwritten)
