"""Pin tokens of equal bytes: weight 1, alone in their row.

    python -m projection_tools.exact --student A --teacher B --projection F.pt --output G.pt
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from isogloss.flags.parse import MISSING, OLD_NAMES, flag, tool
from isogloss.projection_tools.arrays import widen
from isogloss.projection_tools.files import check_output, finish, load_arrays
from isogloss.projection_tools.tokenizers import PairArgs
from isogloss.spelling import all_bytes, spell


class Duplicates(NamedTuple):
    """Count how many tokens of each vocabulary have the bytes of another one that is pinned."""

    student: int
    teacher: int


def exact_pairs(student, teacher, pieces):
    """Pair the tokens of both vocabularies that stand for the same bytes.

    Where several teacher tokens have the same bytes, as '<0x41>' and 'A', the one counts that the
    teacher itself writes; if it writes none of them, the lowest id.

    Args:
        student, teacher: TokenTables.
        pieces: (V, P >= 2) how the teacher spells the student's tokens, -1 behind the last piece.
    Returns:
        (v, w, duplicates): (N,) ids, rising in v; and `Duplicates`.
    """
    lowest, times = _ids_by_bytes(teacher)
    student_bytes = all_bytes(student)
    v = np.flatnonzero(student.lengths > 0)
    w = np.full(len(v), -1)
    common = set()  # byte strings that both vocabularies have a token for
    for n, i in enumerate(v.tolist()):
        spelled = student_bytes[i]
        if spelled in lowest:
            w[n] = lowest[spelled]
            common.add(spelled)

    # Where the teacher writes the bytes as one token, that is the one, whatever its id.
    first = pieces[v, 0]
    one_piece = (first >= 0) & (pieces[v, 1:] < 0).all(1)
    w = np.where(one_piece, first, w)
    paired = w >= 0
    v = v[paired]
    w = w[paired]
    # A teacher token stands in a row for each student token of its bytes, but of the teacher tokens
    # with these bytes only one is ever pinned.
    teacher_duplicates = sum(times[spelled] - 1 for spelled in common)
    return v, w, Duplicates(len(v) - len(common), teacher_duplicates)


def _ids_by_bytes(table):
    """Return ({bytes: lowest id of a token that stands for them}, Counter of these tokens)."""
    token_bytes = all_bytes(table)
    lowest = {}
    times = Counter()
    # Length 0 is an id without a token, -1 a control token.  From the last id, so the lowest stays.
    for i in np.flatnonzero(table.lengths > 0)[::-1].tolist():
        lowest[token_bytes[i]] = i
        times[token_bytes[i]] += 1
    return lowest, times


def pin_exact(projection, v, w):
    """Return the projection with rows v that hold w alone."""
    indices, likelihoods = widen(projection, 1)  # a copy, so the caller's arrays stay
    indices[v] = -1
    indices[v, 0] = w
    likelihoods[v] = 0
    likelihoods[v, 0] = 1
    return indices, likelihoods


@dataclass(kw_only=True)
class Args(PairArgs):
    """Pin tokens of equal bytes: weight 1, alone in their row."""

    output: str = flag(MISSING, "file to write, .pt or .safetensors.")
    projection: str = flag("", "file that supplies all other rows; empty: they stay empty.")


def main(args):
    check_output(args.output)
    pair = args.load_pair()
    student, teacher = pair.tables
    if args.projection:
        projection = load_arrays(args.projection, pair)
    else:
        V = len(student)
        projection = (np.full((V, 1), -1), np.zeros((V, 1)))
    pieces = spell(student, pair.tokenizers[1], teacher, max_pieces=2)
    v, w, duplicates = exact_pairs(student, teacher, pieces)
    finish(pin_exact(projection, v, w), pair, args,
           f"{len(v)} pinned; {duplicates.student} student tokens have the bytes of another one "
           f"and share its teacher token; {duplicates.teacher} teacher tokens have the bytes of a "
           "pinned one and are left out")


def cli(argv=None):
    tool(Args, main, aliases=OLD_NAMES, argv=argv)


if __name__ == "__main__":
    cli()
