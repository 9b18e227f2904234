"""Pin tokens of equal bytes: weight 1, alone in their row.

    python -m projection_tools.exact --student-model A --teacher-model B --projection F.pt --output G.pt
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from projection_tools.flags import check_types, tool
from projection_tools import Pair, all_bytes, finish, load_arrays, widen
from projection_tools.spell import spell


def exact_pairs(student, teacher, pieces):
    """Tokens of both vocabularies that stand for the same bytes.

    Where several teacher tokens have the same bytes, as '<0x41>' and 'A', the one counts that the teacher
    itself writes; if it writes none of them, the lowest id.

    Args:
        student, teacher: TokenTables.
        pieces: (V, P >= 2) how the teacher spells the student's tokens, -1 behind the last piece.
    Returns:
        (v, w, duplicates): (N,) ids, rising in v; and how many tokens, on student and on teacher side, have
        the bytes of another one that takes part.
    """
    lowest, times = {}, Counter()
    spelled = all_bytes(teacher)
    for w in np.flatnonzero(teacher.lengths > 0)[::-1].tolist():
        lowest[spelled[w]] = w
        times[spelled[w]] += 1
    v = np.flatnonzero(student.lengths > 0)
    spelled = all_bytes(student)
    spelled = [spelled[i] for i in v.tolist()]
    w = np.array([lowest.get(bytes_, -1) for bytes_ in spelled], np.int64)
    common = {bytes_ for bytes_ in spelled if bytes_ in lowest}
    one = (pieces[v, 0] >= 0) & (pieces[v, 1:] < 0).all(1)  # written as one token: the one of equal bytes
    w = np.where(one, pieces[v, 0], w)
    v, w = v[w >= 0], w[w >= 0]
    return v, w, (len(v) - len(common), sum(times[bytes_] - 1 for bytes_ in common))


def pin_exact(projection, v, w):
    """The projection with rows v that hold w alone."""
    indices, likelihoods = [part.copy() for part in widen(projection, 1)]
    indices[v], likelihoods[v] = -1, 0
    indices[v, 0], likelihoods[v, 0] = w, 1
    return indices, likelihoods


@dataclass(kw_only=True)
class Args:
    """Pin tokens of equal bytes.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        output: file to write, .pt or .safetensors.
        projection: file whose other rows are kept; empty: they stay empty.
    """

    student_model: str
    teacher_model: str
    output: str
    projection: str = ""

    def __post_init__(self):
        check_types(self)


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    V = len(pair.tables[0])
    start = load_arrays(args.projection, pair) if args.projection else (np.full((V, 1), -1), np.zeros((V, 1)))
    pieces = spell(pair.tables[0], pair.tokenizers[1], pair.tables[1], max_pieces=2)
    v, w, duplicates = exact_pairs(*pair.tables, pieces)
    finish(pin_exact(start, v, w), pair, args,
           f"{len(v)} pinned; {duplicates[0]} student tokens have the bytes of another one and share its "
           f"teacher token, {duplicates[1]} such teacher tokens are left out")


if __name__ == "__main__":
    tool(Args, main)
