"""Build the projection W [V, W]: which teacher tokens say what a student token says.

    python -m projection_tools.build --student A --teacher B --output projection.pt [--top_k 4]

The whole chain in one process: pieces (multitoken.py), tokens of equal bytes pinned (exact.py), the
heaviest entries kept (cut.py); with --embedding_model, similar tokens where bytes say nothing
(generate.py).  Training builds it in flight when no file is given, and keeps it under the
fingerprints and flags.
"""

import hashlib
import json
from dataclasses import asdict

from isogloss.projection_tools.__main__ import Recipe, run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("build"))

import numpy as np

from isogloss.projection_tools.arrays import fill_empty, pack
from isogloss.projection_tools.cut import cut_rows
from isogloss.projection_tools.exact import exact_pairs, pin_exact
from isogloss.projection_tools.files import cached
from isogloss.projection_tools.generate import Embedder, similar_rows
from isogloss.projection_tools.multitoken import multitoken_rows
from isogloss.projection_tools.projection_files import as_tables, finish
from isogloss.spelling import spell

VERSION = 6  # of what is cached; raise it when the same flags give another projection


def build_projection(pair, recipe=None, trust_remote_code=False):
    """Build the sparse student-to-teacher projection.

    Args:
        recipe: Recipe; None: the defaults.
        trust_remote_code: run the Python code that comes with the embedding model.
    Returns:
        (indices, likelihoods): (V, K) int64, -1 in unused slots, and float64; rows sorted, summing
        to 1, or to 0 where a token has no counterpart.
    """
    recipe = recipe or Recipe()
    student, teacher = pair.tables
    if pair.fingerprints[0] == pair.fingerprints[1]:
        # One tokenizer: every token stands for itself, even one that no text is cut into.
        every = np.arange(len(student))
        return pack(every, every, np.ones(len(student)), len(student), recipe.top_k)

    # A threshold looks at all pieces, so none may be cut off before it.
    slots = max(recipe.top_k, recipe.max_pieces) if recipe.threshold else recipe.top_k
    # Two pieces at least, because exact_pairs has to see whether there is a second one.
    pieces = spell(student, pair.tokenizers[1], teacher, max(2, recipe.max_pieces))
    projection = multitoken_rows(pair, slots, recipe.max_pieces, recipe.reverse,
                                 recipe.special_threshold, pieces)
    # Equal bytes are certain, so such a row needs no second entry.
    projection = pin_exact(projection, *exact_pairs(student, teacher, pieces))
    # Bytes come first: an embedding counts only where they say nothing.
    if recipe.embedding_model:
        embed = Embedder(recipe.embedding_model, trust_remote_code=trust_remote_code)
        projection = fill_empty(projection, similar_rows(pair, embed, recipe.top_k))
    return cut_rows(projection, recipe.top_k, recipe.threshold)


def cached_projection(pair, recipe=None, directory=None):
    """Return the tables of `build_projection`, kept on disk under the digest of pair and recipe."""
    recipe = recipe or Recipe()
    # Sorted, so that the digest does not change when fields are moved.
    flags = json.dumps(asdict(recipe), sort_keys=True)
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    name = f"projection-{VERSION}-{pair.digest}-{digest}.pt"

    def build():
        projection = build_projection(pair, recipe)
        return as_tables(projection, pair, f"isogloss, in flight, {flags}")

    return cached(name, build, directory)


def empty_row_reasons(pair, indices):
    """Return {reason: number} of the student tokens whose row is empty."""
    student = pair.tables[0]
    empty = indices[:, 0] < 0  # rows are sorted, so the first slot is the last to be unused
    unused = np.diff(student.starts) == 0
    masks = {
        "control tokens without a counterpart": empty & student.special,
        "ids without a token": empty & ~student.special & unused,
        "bytes that the teacher cannot write": empty & ~student.special & ~unused,
    }
    return {reason: int(mask.sum()) for reason, mask in masks.items() if mask.any()}


def main(args):
    pair = args.load_pair()
    projection = build_projection(pair, args, args.trust_remote_code)
    reasons = empty_row_reasons(pair, projection[0])
    finish(projection, pair, args,
           *[f"empty: {number} {reason}" for reason, number in reasons.items()])
