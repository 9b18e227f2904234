"""Small token tables, tokenizers that people use, and what is made of two of them."""

from functools import lru_cache
from itertools import pairwise

import numpy as np

from conftest import asset
from isogloss.align import TokenTable
from isogloss.objective.loss_table import as_tables
from isogloss.projection_tools.cells import build_translation
from isogloss.projection_tools.tokenizers import Pair


@lru_cache
def real(name):
    """Return (tokenizer, its TokenTable) of the shared assets."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", name))
    return tokenizer, TokenTable.from_tokenizer(tokenizer)


def pair_of(encoders):
    """Return the Pair of two TextEncoders."""
    return Pair.of(*[encoder.tokenizer for encoder in encoders],
                   tables=[encoder.table for encoder in encoders])


def translation_of(encoders):
    """Return the `nodes.Tables` of two TextEncoders."""
    fields = build_translation(pair_of(encoders))
    return as_tables(fields)


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
