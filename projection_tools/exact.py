"""Pin tokens of equal bytes: weight 1, alone in their row.

    python -m projection_tools.exact --student A --teacher B --projection F.pt --output G.pt
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("exact"))

import numpy as np

from isogloss.align import all_bytes
from isogloss.projection_tools.arrays import widen
from isogloss.projection_tools.projection_files import finish, load_arrays
from isogloss.spelling import spell


def exact_pairs(student, teacher, pieces):
    """Pair the tokens of both vocabularies that stand for the same bytes.

    Where several teacher tokens have the same bytes, as '<0x41>' and 'A', the one counts that the
    teacher itself writes; if it writes none of them, the lowest id.

    Args:
        student, teacher: TokenTables.
        pieces: (V, P >= 2) how the teacher spells the student's tokens, -1 behind the last piece.
    Returns:
        (v, w): (N,) ids, rising in v.
    """
    teacher_bytes = all_bytes(teacher)
    lowest = {}
    # Length 0 is an id without a token, -1 a control token.  From the last id, so the lowest stays.
    for i in np.flatnonzero(teacher.lengths > 0)[::-1].tolist():
        lowest[teacher_bytes[i]] = i
    student_bytes = all_bytes(student)
    v = np.flatnonzero(student.lengths > 0)
    w = np.array([lowest.get(student_bytes[i], -1) for i in v.tolist()], np.int64)
    # Where the teacher writes the bytes as one token, that is the one, whatever its id.
    first = pieces[v, 0]
    one_piece = (first >= 0) & (pieces[v, 1:] < 0).all(1)
    w = np.where(one_piece, first, w)
    paired = w >= 0
    return v[paired], w[paired]


def pin_exact(projection, v, w):
    """Return the projection with rows v that hold w alone."""
    indices, likelihoods = widen(projection, 1)  # a copy, so the caller's arrays stay
    indices[v] = -1
    indices[v, 0] = w
    likelihoods[v] = 0
    likelihoods[v, 0] = 1
    return indices, likelihoods


def main(args):
    pair = args.load_pair()
    student, teacher = pair.tables
    if args.projection:
        projection = load_arrays(args.projection, pair)
    else:
        V = len(student)
        projection = (np.full((V, 1), -1), np.zeros((V, 1)))
    pieces = spell(student, pair.tokenizers[1], teacher, max_pieces=2)
    v, w = exact_pairs(student, teacher, pieces)
    finish(pin_exact(projection, v, w), pair, args, f"{len(v)} pinned")
