"""Tables of a translation: cells, longer tokens, and the tokens that a tokenizer would join.

    python -m projection_tools.cells --student A --teacher B [--output translation.pt]

`nodes.Tables` are the fields of the file that it names.  `--loss piece_kl` and the other
divergences build them in flight.

Shapes: V student vocabulary, W teacher vocabulary, P pieces, C cells, F longer tokens, J joins.
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("cells"))

import numpy as np
import torch

from isogloss.flags.terminal import one_line
from isogloss.projection_tools.save import save_atomically, tokenizer_metadata


def build_translation(pair, max_pieces=16):
    """Return all tables of `nodes.Tables`, with the tokenizers' fingerprints.

    Args:
        max_pieces: longest spelling kept, in pieces; of longer ones the beginning.
    """
    from isogloss.spelling import build_translation_tables  # what is kept on disk takes none of it

    tables = {}
    fields = build_translation_tables(pair.tokenizers, pair.tables, max_pieces)
    for key, value in fields.items():
        tables[key] = value
        if isinstance(value, np.ndarray):
            tables[key] = torch.from_numpy(value.astype(np.int32))
    return tables | tokenizer_metadata(pair)


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


def main(args):
    pair = args.load_pair()
    tables = build_translation(pair, args.max_pieces)
    if args.output:
        save_atomically(tables, args.output)
        print(f"{one_line(args.output)}:")
    for name, value in statistics(tables).items():
        print(f"  {name}: {value}")
