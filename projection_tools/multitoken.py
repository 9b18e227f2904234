"""Make rows from spellings: which teacher tokens spell a student token.

    python -m projection_tools.multitoken --student A --teacher B --output F.pt [--reverse]

The i-th teacher piece of a student token weighs 0.9 * 0.1^i, normalized: '201' -> '2' .9009,
'0' .0901, '1' .0090.  With --reverse, teacher tokens that the student spells in several pieces
stand in the rows of those pieces too, with the same weights before they are normalized.  Control
tokens are paired by role, by equal name, by similar name.
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("multitoken"))

import numpy as np

from isogloss.projection_tools.arrays import entries, fill_empty, pack
from isogloss.projection_tools.projection_files import finish, load_arrays
from isogloss.spelling import link_special_tokens, spell

# Weight of the first piece, and of each further piece relative to the one before it.  Not tuned.
FIRST = 0.9
NEXT = 0.1


def multitoken_rows(pair, top_k=4, max_pieces=8, reverse=False, special_threshold=0.8, pieces=None):
    """Return a projection from the pieces by which each side spells the other's tokens.

    Args:
        top_k: entries kept in a row.
        max_pieces: pieces of a spelling that count.
        reverse: add teacher tokens that are made of several student tokens, behind the pieces; of
            those with equal weight the ones of fewer pieces come first, then the lower ids.
        special_threshold: pair control tokens whose names are at least this similar, 0 to 1.
        pieces: (V, P) spelling of the student's tokens by the teacher, if at hand.
    Returns:
        (indices, likelihoods) with `top_k` slots.
    """
    student, teacher = pair.tables
    student_tokenizer, teacher_tokenizer = pair.tokenizers
    if pieces is None:
        pieces = spell(student, teacher_tokenizer, teacher, max_pieces)
    rows, ranks = np.nonzero(pieces[:, :max_pieces] >= 0)
    columns = pieces[rows, ranks].astype(np.int64)
    if reverse:
        back = spell(teacher, student_tokenizer, student, max_pieces=64)  # of these all count
        made_rows, made_columns, made_ranks = _reverse_entries(back, max_pieces, rows, columns)
        rows = np.concatenate([rows, made_rows])
        columns = np.concatenate([columns, made_columns])
        ranks = np.concatenate([ranks, made_ranks])

    # A control token's row holds its counterpart alone, whatever its name is spelled like.
    linked = link_special_tokens(student, teacher, special_threshold)
    linked_v, linked_w = np.array(linked, np.int64).reshape(-1, 2).T
    keep = ~np.isin(rows, linked_v)
    rows = np.append(rows[keep], linked_v)
    columns = np.append(columns[keep], linked_w)
    ranks = np.append(ranks[keep], np.zeros_like(linked_v))
    weights = FIRST * NEXT**ranks
    return pack(rows, columns, weights, len(student), top_k)


def _reverse_entries(back, max_pieces, rows, columns):
    """Return entries for the teacher tokens that are made of several student tokens.

    Args:
        back: (W, P) spelling of the teacher's tokens by the student.
        max_pieces: pieces of a spelling that count.
        rows, columns: the entries that exist already.
    Returns:
        (rows, columns, ranks): int64; rank i of an entry: the row is the i-th piece of the column.
    """
    W = len(back)
    size = (back >= 0).sum(1)
    several = size > 1
    w, rank = np.nonzero((back[:, :max_pieces] >= 0) & several[:, None])
    order = np.lexsort((w, size[w]))  # fewer pieces first, then lower ids
    w = w[order]
    rank = rank[order]
    v = back[w, rank].astype(np.int64)  # v * W + w is beyond int32 for two large vocabularies

    is_new = ~np.isin(v * W + w, rows * W + columns)
    v = v[is_new]
    w = w[is_new]
    rank = rank[is_new]
    # Where a piece occurs twice in a token, its first position counts.
    _, first = np.unique(v * W + w, return_index=True)
    first.sort()
    return v[first], w[first], rank[first]


def main(args):
    pair = args.load_pair()
    projection = multitoken_rows(
        pair, args.top_k, args.max_pieces, args.reverse, args.special_threshold)
    if args.projection:
        filled = fill_empty(projection, load_arrays(args.projection, pair))
        # The file may have more slots than --top_k.
        projection = pack(*entries(*filled), len(pair.tables[0]), args.top_k)
    finish(projection, pair, args)
