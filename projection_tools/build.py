"""The projection W [V, W]: which teacher tokens say what a student token says.

    python -m projection_tools.build --student-model A --teacher-model B --output projection.pt [--top-k 4]

The whole chain in one process: pieces (multitoken.py), tokens of equal bytes pinned (exact.py), the heaviest
entries kept (cut.py); with --embedding-model, similar tokens where bytes say nothing (generate.py).
Training builds it in flight when no file is given, and keeps it under the fingerprints and flags.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

import numpy as np

from projection_tools.flags import check_types, tool
from projection_tools import Pair, as_tables, cached, fill_empty, finish
from projection_tools.cut import cut_rows
from projection_tools.exact import exact_pairs, pin_exact
from projection_tools.generate import Embedder, similar_rows
from projection_tools.multitoken import multitoken_rows
from projection_tools.spell import spell

VERSION = 4  # of what is cached; raise it when the same flags give another projection


@dataclass(kw_only=True)
class Recipe:
    """How a projection is built; see `Args`."""

    top_k: int = 4
    threshold: float = 0.0
    max_pieces: int = 4
    reverse: bool = False
    special_threshold: float = 0.8
    embedding_model: str = ""


def build_projection(pair, recipe=None):
    """Sparse student-to-teacher projection.

    Args:
        pair: Pair.
        recipe: Recipe; None: the defaults.
    Returns:
        (indices, likelihoods): (V, K) int64, -1 in unused slots, and float64; rows sorted, summing to 1,
        or to 0 where a token has no image.
    """
    recipe = recipe or Recipe()
    V = len(pair.tables[0])
    if pair.prints[0] == pair.prints[1]:  # one tokenizer: every token is its own image, reachable or not
        K = recipe.top_k
        indices, likelihoods = np.full((V, K), -1, np.int64), np.zeros((V, K))
        indices[:, 0], likelihoods[:, 0] = np.arange(V), 1
        return indices, likelihoods
    wide = max(recipe.top_k, recipe.max_pieces) if recipe.threshold else recipe.top_k
    student, teacher = pair.tables
    pieces = spell(student, pair.tokenizers[1], teacher, max(2, recipe.max_pieces))
    found = multitoken_rows(pair, wide, recipe.max_pieces, recipe.reverse, recipe.special_threshold, pieces)
    found = pin_exact(found, *exact_pairs(student, teacher, pieces)[:2])
    if recipe.embedding_model:
        found = fill_empty(found, similar_rows(pair, Embedder(recipe.embedding_model), recipe.top_k))
    return cut_rows(found, recipe.top_k, recipe.threshold)


def cached_projection(pair, recipe=None, directory=None):
    """Tables of `build_projection`, kept on disk under the digest of the pair and the recipe."""
    recipe = recipe or Recipe()
    flags = json.dumps(asdict(recipe), sort_keys=True)
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    name = f"projection-{VERSION}-{pair.digest}-{digest}.pt"
    tool = f"isogloss, in flight, {flags}"
    return cached(name, lambda: as_tables(build_projection(pair, recipe), pair, tool), directory)


def empty_row_reasons(pair, indices):
    """{reason: number} of the rows without an image."""
    student = pair.tables[0]
    empty = indices[:, 0] < 0
    nothing = np.diff(student.starts) == 0
    found = {"control tokens without a counterpart": int((empty & student.special).sum()),
             "ids without a token": int((empty & ~student.special & nothing).sum()),
             "bytes that the teacher cannot write": int((empty & ~student.special & ~nothing).sum())}
    return {reason: number for reason, number in found.items() if number}


@dataclass(kw_only=True)
class Args(Recipe):
    """Build the projection between a student's and a teacher's vocabulary.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        output: file to write, .pt or .safetensors.
        top_k: entries kept in a row, 1 or more.
        threshold: entries that weigh less are dropped, 0 to 1.
        max_pieces: pieces of a spelling that count, 1 or more.
        reverse: add teacher tokens that are made of several student tokens.
        special_threshold: similarity of the names from which on two control tokens are paired, 0 to 1.
        embedding_model: hub id or directory of a model whose embeddings fill rows that bytes leave empty;
            empty: they stay empty.
    """

    student_model: str
    teacher_model: str
    output: str

    def __post_init__(self):
        check_types(self)
        if min(self.top_k, self.max_pieces) < 1 or not 0 <= self.threshold <= 1:
            raise ValueError(f"--top-k {self.top_k}, --max-pieces {self.max_pieces}, --threshold "
                             f"{self.threshold}: expected 1 or more, 1 or more, 0 to 1")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    found = build_projection(pair, recipe)
    reasons = [f"empty: {number} {reason}" for reason, number in empty_row_reasons(pair, found[0]).items()]
    finish(found, pair, args, *reasons)


if __name__ == "__main__":
    tool(Args, main)
