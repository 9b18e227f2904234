"""Fill up held-out rows for several ranks, which evaluate batches of one number and size.

Accelerate would repeat rows at the end of a data set until each rank has a whole batch.  The
trainers' own metrics drop these repeats, of a stream they do not know them.  Here `Filling` stands
in their places, which no batch holds.

Tests: tests/test_trainers.py.
"""

from torch.utils.data import Dataset, IterableDataset


class Filling:
    """Stand for a row that does not exist."""


class FilledRows(Dataset):
    """Hold rows, and `Filling` behind them up to a multiple."""

    def __init__(self, rows, multiple):
        self.rows = rows
        self.num_filled = -len(rows) % multiple

    def __len__(self):
        return len(self.rows) + self.num_filled

    def __getitem__(self, number):
        return self.rows[number] if number < len(self.rows) else Filling()


class FilledStream(IterableDataset):
    """Yield the rows of a stream, and `Filling` behind them up to a multiple."""

    def __init__(self, rows, multiple):
        self.rows = rows
        self.multiple = multiple

    def __iter__(self):
        num_missing = 0
        for row in self.rows:
            num_missing = (num_missing - 1) % self.multiple
            yield row
        for _ in range(num_missing):
            yield Filling()


def filled(rows, multiple):
    """Return held-out rows, in memory or a stream, with `Filling` up to a multiple."""
    kind = FilledStream if isinstance(rows, IterableDataset) else FilledRows
    return kind(rows, multiple)


def collate_filled(collate, rows):
    """Return what `collate` makes of the rows that exist.

    Where none does, it is the batch of a short text, marked by the key `is_filling`: other ranks
    may gather the student's weights in each forward pass.
    """
    existing = [row for row in rows if not isinstance(row, Filling)]
    batch = collate(existing or [{"text": "a"}])
    return batch if existing else batch | {"is_filling": True}
