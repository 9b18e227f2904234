"""Hold out rows of a data set of their own (--eval_data, --eval_split).

Tests: tests/test_data.py.
"""

from contextlib import contextmanager

from isogloss.data.checks import has_text
from isogloss.data.open_data import first_rows
from isogloss.errors import DataError


@contextmanager
def blaming_eval_data():
    """Turn what is wrong with data, in a block that opens held-out ones, into a line of theirs."""
    try:
        yield
    except DataError as error:
        line = str(error).replace("--data ", "--eval_data ")
        raise DataError(line.replace("--split ", "--eval_split ")) from None


def first_of_eval_data(cfg, rows, reader):
    """Return the held-out rows of a data set of their own: the first --eval_rows, or all."""
    if cfg.streaming:
        held_out = first_rows(rows, cfg.eval_rows, reader.text_key, reader.source)
        has_any = any(row[reader.text_key] for row in held_out)
    else:
        size = min(cfg.eval_rows or len(rows), len(rows))
        held_out = rows.select(range(size))
        has_any = has_text(rows, 0, size, reader.text_key)
    if not has_any:
        raise ValueError(f"--eval_data {reader.source}: all rows that would be held out are empty; "
                         "hold out more, or name other data")
    return held_out
