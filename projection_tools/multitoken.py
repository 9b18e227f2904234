"""Rows from spellings: which teacher tokens spell a student token.

    python -m projection_tools.multitoken --student-model A --teacher-model B --output F.pt [--reverse]

The i-th teacher piece of a student token weighs 0.9 * 0.1^i, normalized: '201' -> '2' .9009, '0' .0901,
'1' .0090.  With --reverse, teacher tokens that the student spells in several pieces stand in the rows of
those pieces too, with the same weights before they are normalized.  Control tokens: by role, by equal name,
by similar name.
"""

from dataclasses import dataclass

import numpy as np

from projection_tools.flags import check_types, tool
from projection_tools import Pair, entries, fill_empty, finish, load_arrays, pack
from projection_tools.spell import link_special_tokens, spell

FIRST, NEXT = 0.9, 0.1  # weight of the first piece, and of each piece in units of the one before


def multitoken_rows(pair, top_k=4, max_pieces=8, reverse=False, special_threshold=0.8, pieces=None):
    """Projection from the pieces by which each side spells the other's tokens.

    Args:
        pair: Pair.
        top_k: entries kept in a row.
        max_pieces: pieces of a spelling that count.
        reverse: add teacher tokens that are made of several student tokens, behind the pieces; of those
            with equal weight the ones of fewer pieces come first, then the lower ids.
        special_threshold: similarity of the names from which on two control tokens are paired, 0 to 1.
        pieces: (V, P) spelling of the student's tokens by the teacher, if at hand.
    Returns:
        (indices, likelihoods) with `top_k` slots.
    """
    (student, teacher), (student_tokenizer, teacher_tokenizer) = pair.tables, pair.tokenizers
    if pieces is None:
        pieces = spell(student, teacher_tokenizer, teacher, max_pieces)
    rows, slots = np.nonzero(pieces[:, :max_pieces] >= 0)
    columns = pieces[rows, slots].astype(np.int64)
    if reverse:
        back = spell(teacher, student_tokenizer, student, max_pieces=64)
        size = (back >= 0).sum(1)
        w, place = np.nonzero((back[:, :max_pieces] >= 0) & (size > 1)[:, None])
        order = np.lexsort((w, size[w]))
        w, place = w[order], place[order]
        known = np.isin(back[w, place] * len(teacher) + w, rows * len(teacher) + columns)
        w, place = w[~known], place[~known]
        _, first = np.unique(back[w, place] * len(teacher) + w, return_index=True)
        first.sort()  # where a piece occurs twice in a token, its first place counts
        rows = np.concatenate([rows, back[w, place][first]])
        columns = np.concatenate([columns, w[first]])
        slots = np.concatenate([slots, place[first]])
    linked = np.array(link_special_tokens(student, teacher, special_threshold), np.int64).reshape(-1, 2)
    keep = ~np.isin(rows, linked[:, 0])
    rows, columns = np.append(rows[keep], linked[:, 0]), np.append(columns[keep], linked[:, 1])
    return pack(rows, columns, FIRST * NEXT ** np.append(slots[keep], 0 * linked[:, 0]), len(student), top_k)


@dataclass(kw_only=True)
class Args:
    """Rows of a projection from spellings.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        output: file to write, .pt or .safetensors.
        projection: file whose rows fill those that stay empty here; empty: none.
        top_k: entries kept in a row, 1 or more.
        max_pieces: pieces of a spelling that count, 1 or more.
        reverse: add teacher tokens that are made of several student tokens.
        special_threshold: similarity of the names from which on two control tokens are paired, 0 to 1.
    """

    student_model: str
    teacher_model: str
    output: str
    projection: str = ""
    top_k: int = 4
    max_pieces: int = 8
    reverse: bool = False
    special_threshold: float = 0.8

    def __post_init__(self):
        check_types(self)
        if min(self.top_k, self.max_pieces) < 1:
            raise ValueError(f"--top-k {self.top_k}, --max-pieces {self.max_pieces}: expected 1 or more")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    found = multitoken_rows(pair, args.top_k, args.max_pieces, args.reverse, args.special_threshold)
    if args.projection:
        other = load_arrays(args.projection, pair)
        found = pack(*entries(*fill_empty(found, other)), len(found[0]), args.top_k)
    finish(found, pair, args)


if __name__ == "__main__":
    tool(Args, main)
