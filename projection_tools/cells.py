"""Tables of a translation: cells, longer tokens, and the tokens that a tokenizer would join.

    python -m projection_tools.cells --student A --teacher B [--output translation.pt]

`translation.Tables` are the fields of the file that it names.  `--loss piece_kl` and the other
divergences build them in flight.

Shapes: V student vocabulary, W teacher vocabulary, P pieces, C cells, F longer tokens, J joins.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from projection_tools import (
    Pair,
    all_bytes,
    cached,
    check_output,
    save_atomically,
    tokenizer_metadata,
)
from projection_tools.flags import OLD_NAMES, check_types, tool
from projection_tools.spell import (
    encode_bytes,
    mid_text_backend,
    prefix_ranges,
    same_bytes,
    spellings,
)

VERSION = 1  # of the tables; raise it when they change for the same two tokenizers
WHITE_SPACE = b" \t\n\r\x0b\x0c"


def translation_tables(student_pieces_WP, teacher_pieces_VP, student_bytes, canonical_V,
                       spell_bytes):
    """Return the arrays of `translation.Tables`.

    Args:
        student_pieces_WP, teacher_pieces_VP: A and B, -1 behind the last piece.
        student_bytes: of every token, b"" for control tokens.
        canonical_V: (V,) bool, the student's tokenizer writes these bytes as this token.
        spell_bytes: list of byte strings -> list of the student's ids, [] where it has none.
    """
    W = len(student_pieces_WP)
    V = len(teacher_pieces_VP)
    head_V = teacher_pieces_VP[:, 0]
    heads = np.unique(head_V[head_V >= 0])
    num_cells = len(heads)
    cell_of_head = np.full(W + 1, num_cells)
    cell_of_head[heads] = np.arange(num_cells)
    cell_V = cell_of_head[head_V]  # head -1 reads the last entry
    first_W = student_pieces_WP[:, 0]
    cell_of_first = np.where(first_W >= 0, cell_V[first_W], num_cells)
    is_head = cell_of_head[:W] < num_cells
    cell_W = np.where(is_head, cell_of_head[:W], cell_of_first)

    arrays = {"cell_V": cell_V, "cell_W": cell_W}
    for axis, pieces in (("W", student_pieces_WP), ("V", teacher_pieces_VP)):
        order, low, high = prefix_ranges(pieces)
        arrays[f"pieces_{axis}"] = pieces
        arrays[f"order_{axis}"] = order
        arrays[f"low_{axis}"] = low
        arrays[f"high_{axis}"] = high
    rank_V = np.empty(V, np.int64)
    rank_V[arrays["order_V"]] = np.arange(V)
    arrays["rank_V"] = rank_V

    longer = np.flatnonzero(~is_head & (first_W >= 0) & (cell_W < num_cells))
    rank = rank_V[first_W[longer]]
    order = np.argsort(rank, kind="stable")
    arrays["longer_F"] = longer[order]
    arrays["longer_rank_F"] = rank[order]
    arrays |= _joins(student_bytes, canonical_V, spell_bytes, student_pieces_WP,
                     arrays["low_W"], arrays["high_W"])
    tables = {key: np.ascontiguousarray(array).astype(np.int64) for key, array in arrays.items()}
    return tables | {"num_cells": num_cells}


def _joins(student_bytes, canonical_V, spell_bytes, pieces_WP, low_WP, high_WP):
    """List for each student token v0 the teacher tokens that its tokenizer would join to it.

    Those are the tokens of which the student's spelling begins with that of y, where v0 + y is a
    student token that its tokenizer writes.  Tokens of white space alone are left out: how they are
    cut depends on what follows.
    """
    id_of_bytes = {raw: v for v, raw in enumerate(student_bytes) if raw}
    candidates = []  # (v0, y)
    for v in np.flatnonzero(canonical_V).tolist():
        raw = student_bytes[v]
        if not raw.strip(WHITE_SPACE):
            continue
        for cut in range(1, len(raw)):
            v0 = id_of_bytes.get(raw[:cut])
            if v0 is not None:
                candidates.append((v0, raw[cut:]))
    suffixes = sorted({y for _, y in candidates})
    spelling = dict(zip(suffixes, spell_bytes(suffixes)))
    range_of = _ranges_of_prefixes(pieces_WP, low_WP, high_WP)
    joins = set()
    for v0, y in candidates:
        bounds = range_of.get(tuple(spelling[y]))
        if bounds:
            joins.add((v0, *bounds))
    joins = np.array(sorted(joins), np.int64).reshape(-1, 3)
    start = np.searchsorted(joins[:, 0], np.arange(len(student_bytes) + 1))
    return {"join_start_V": start, "join_low_J": joins[:, 1], "join_high_J": joins[:, 2]}


def _ranges_of_prefixes(pieces_WP, low_WP, high_WP):
    """Return {pieces that spellings begin with: (low, high) in their sorted order}."""
    W, P = pieces_WP.shape
    sizes = (pieces_WP >= 0).sum(1)
    rank = np.empty(W, np.int64)
    rank[np.lexsort(pieces_WP.T[::-1])] = np.arange(W)
    ranges = {}
    rows = pieces_WP.tolist()
    for w in range(W):
        for k in range(1, sizes[w] + 1):
            key = tuple(rows[w][:k])
            if key in ranges:
                continue
            if k < P:
                ranges[key] = (int(low_WP[w, k]), int(high_WP[w, k]))
            else:
                ranges[key] = (int(rank[w]), int(rank[w]) + 1)
    return ranges


def build_translation(pair, max_pieces=16):
    """Return all tables of `translation.Tables`, with the tokenizers' fingerprints.

    Args:
        pair: Pair.
        max_pieces: longest spelling kept, in pieces; of longer ones the beginning.
    """
    student_pieces_WP, teacher_pieces_VP = spellings(pair, max_pieces)
    student = pair.tables[0]
    student_bytes = all_bytes(student)
    for v in np.flatnonzero(student.special).tolist():
        student_bytes[v] = b""
    backend = mid_text_backend(pair.tokenizers[0])

    def spell_bytes(pieces):
        ids = encode_bytes(pieces, backend, student)
        sizes = np.array(list(map(len, ids)), np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.int64)
        same = same_bytes(flat, sizes, student, pieces)
        return [spelled if good else [] for spelled, good in zip(ids, same)]

    canonical_V = np.zeros(len(student), bool)
    for v, spelled in enumerate(spell_bytes(student_bytes)):
        canonical_V[v] = spelled == [v]
    arrays = translation_tables(
        student_pieces_WP, teacher_pieces_VP, student_bytes, canonical_V, spell_bytes)
    tables = {}
    for key, value in arrays.items():
        tables[key] = value
        if isinstance(value, np.ndarray):
            tables[key] = torch.from_numpy(value.astype(np.int32))
    return tables | tokenizer_metadata(pair)


def cached_translation(pair, directory=None):
    """Return the tables of `build_translation`, kept on disk under the digest of the pair."""
    name = f"translation-{VERSION}-{pair.digest}.pt"
    return cached(name, lambda: build_translation(pair), directory)


def statistics(tables):
    """Return {what: number} of the tables of `build_translation`."""
    num_cells = tables["num_cells"]
    of_cell = torch.bincount(tables["cell_V"].long(), minlength=num_cells + 1)[:num_cells]
    return {
        "student tokens with a cell": int(of_cell.sum()),
        "teacher tokens with a cell": int((tables["cell_W"] < num_cells).sum()),
        "cells": num_cells,
        "cells of one student token": int((of_cell == 1).sum()),
        "teacher tokens longer than the student's": len(tables["longer_F"]),
        "joins": len(tables["join_low_J"]),
    }


# --- command line ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Args:
    """Build the tables by which a teacher's belief is translated into a student's vocabulary.

    Args:
        student: hub id or directory with the student's tokenizer.
        teacher: hub id or directory with the teacher's tokenizer.
        output: file to write, .pt or .safetensors; empty: none, only print statistics.
        max_pieces: pieces kept of a spelling, 1 or more.
        trust_remote_code: run the Python code that comes with a model, which can do anything.
    """

    student: str
    teacher: str
    output: str = ""
    max_pieces: int = 16
    trust_remote_code: bool = False

    def __post_init__(self):
        check_types(self)
        if self.max_pieces < 1:
            raise ValueError(f"--max_pieces {self.max_pieces}: expected 1 or more")


def main(args):
    check_output(args.output)
    pair = Pair.load(args.student, args.teacher, args.trust_remote_code)
    tables = build_translation(pair, args.max_pieces)
    if args.output:
        save_atomically(tables, args.output)
        print(f"{args.output}:")
    for name, value in statistics(tables).items():
        print(f"  {name}: {value}")


def cli(argv=None):
    tool(Args, main, aliases=OLD_NAMES, argv=argv)


if __name__ == "__main__":
    cli()
