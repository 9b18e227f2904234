"""The projection W [V, W]: which teacher tokens say what a student token says.

    python -m projection_tools.build --student-model A --teacher-model B --output projection.pt [--top-k 4]

From bytes alone: a teacher token with the same bytes -> one entry of weight 1; otherwise the teacher's
pieces of the student token with weights 0.9 * 0.1^i, normalised ('201' -> '2' .9009, '0' .0901, '1'
.0090); control tokens by role.  Training builds it in flight when no file is given.
"""

import sys
from dataclasses import dataclass

import fire
import numpy as np
import torch

from align import TokenTable
from projection_tools import cached, fingerprint, load_tables, save_atomically
from projection_tools.spell import link_special_tokens, spell


def build_projection(student_tokenizer, teacher_tokenizer, student=None, teacher=None, top_k=4):
    """Sparse student-to-teacher projection.

    Args:
        student_tokenizer, teacher_tokenizer: fast tokenizers.
        student, teacher: their TokenTables, if at hand.
        top_k: entries kept in a row (K).
    Returns:
        dict: indices (V, K) int64, -1 in unused slots; likelihoods (V, K) float32, rows sorted, summing to 1,
        or to 0 where a token has no image; the fingerprints and flags.
    """
    student = student or TokenTable.from_tokenizer(student_tokenizer)
    teacher = teacher or TokenTable.from_tokenizer(teacher_tokenizer)
    prints = fingerprint(student_tokenizer), fingerprint(teacher_tokenizer)
    indices = np.full((len(student), top_k), -1, np.int64)
    if prints[0] == prints[1]:
        indices[:, 0] = np.arange(len(student))
    else:
        pieces = spell(student, teacher_tokenizer, teacher, max_pieces=top_k)
        indices[:, : pieces.shape[1]] = pieces
        same = {teacher.bytes_of(w): w for w in reversed(range(len(teacher))) if not teacher.special[w]}
        multi = np.flatnonzero((indices >= 0).sum(1) > 1)  # the teacher may have them, yet never write them
        pins = [(v, same[student.bytes_of(v)]) for v in multi if student.bytes_of(v) in same]
        for v, w in pins + link_special_tokens(student, teacher):
            indices[v] = [w] + [-1] * (top_k - 1)
    weights = np.where(indices >= 0, 0.9 * 0.1 ** np.arange(top_k), 0.0)
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-30)
    return {
        "indices": torch.from_numpy(indices),
        "likelihoods": torch.from_numpy(weights.astype(np.float32)),
        "teacher_vocab": len(teacher),
        "student_fingerprint": prints[0],
        "teacher_fingerprint": prints[1],
        "tool": f"isogloss projection_tools.build --top-k {top_k}",
    }


def cached_projection(student_tokenizer, teacher_tokenizer, student, teacher, top_k=4, directory=None):
    """`build_projection`, kept on disk under the fingerprints of the two tokenizers and the flags."""
    prints = fingerprint(student_tokenizer)[:16], fingerprint(teacher_tokenizer)[:16]
    name = f"projection-2-{prints[0]}-{prints[1]}-k{top_k}.pt"
    pair = student_tokenizer, teacher_tokenizer, student, teacher
    return cached(name, lambda: build_projection(*pair, top_k), directory)


def load_projection(path, student_tokenizer, teacher_tokenizer, student, teacher):
    """Read a projection file and check that it belongs to these two tokenizers.

    Files of the public NeMo-RL tools carry no fingerprints: there only the sizes can be checked.

    Raises:
        ValueError: damaged, or made for other tokenizers.
    """
    tables = load_tables(path)
    if not isinstance(tables, dict) or not {"indices", "likelihoods"} <= tables.keys():
        raise ValueError(f"{path}: no projection (keys indices, likelihoods); use projection_tools.build")
    for role, tokenizer in (("student", student_tokenizer), ("teacher", teacher_tokenizer)):
        found, expected = tables.get(f"{role}_fingerprint"), fingerprint(tokenizer)
        if found not in (None, expected):
            raise ValueError(f"{path}: made for another {role} tokenizer (fingerprint {found}, this one has "
                             f"{expected}); build it again for this pair")
    indices, rows = tables["indices"], len(student)
    if indices.shape[0] < rows or int(indices[:rows].max()) >= len(teacher):
        raise ValueError(f"{path}: {indices.shape[0]} rows with teacher ids up to {int(indices.max())}, but "
                         f"the tokenizers have {rows} student and {len(teacher)} teacher ids; build it again")
    return tables | {"indices": indices[:rows].long(), "likelihoods": tables["likelihoods"][:rows].float()}


def describe(tables):
    """One line of facts about a projection."""
    used = (tables["indices"] >= 0).sum(1)
    return (f"{len(used)} rows: {int((used == 1).sum())} of one teacher token, {int((used > 1).sum())} of "
            f"several, {int((used == 0).sum())} empty")


@dataclass(kw_only=True)
class Args:
    """Build the projection between a student's and a teacher's vocabulary.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        output: file to write.
        top_k: entries kept in a row, 1 or more.
    """

    student_model: str
    teacher_model: str
    output: str
    top_k: int = 4


def main(args):
    from transformers import AutoTokenizer  # seconds to import, so only for the command line

    pair = [AutoTokenizer.from_pretrained(name) for name in (args.student_model, args.teacher_model)]
    tables = build_projection(*pair, top_k=args.top_k)
    save_atomically(tables, args.output)
    print(f"{args.output}: {describe(tables)}")


if __name__ == "__main__":
    args = fire.Fire(Args, serialize=lambda _: None)
    sys.exit(main(args) if isinstance(args, Args) else 2)
