"""Small token tables for the tests of align.py and align_dp.py."""

from itertools import pairwise

import numpy as np

from isogloss.align import TokenTable


def table_of(pieces, **roles):
    """Return a table whose ids are the given byte strings; roles are ids, as in bos=0."""
    starts = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
    special = np.zeros(len(pieces), bool)
    special[list(roles.values())] = True
    data = np.frombuffer(b"".join(pieces), np.uint8)
    names = [repr(piece) for piece in pieces]
    return TokenTable(data, starts, special, names, "plain", **roles)


def segmented(text, cuts):
    """Return (ids, table) of bytes cut at the given places, taken modulo their length."""
    if not text:
        return [], table_of([])
    inner = {cut % len(text) for cut in cuts} - {0}
    edges = [0, *sorted(inner), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    return list(range(len(pieces))), table_of(pieces)
