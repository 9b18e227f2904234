"""Put several texts into a row where they fit (--pack).

Tests: tests/test_batch.py.
"""

import numpy as np
import torch


def packed_rows(collator, samples):
    """Return the samples of every row of a Collator; student and teachers have the same rows."""
    limits = [collator.student.max_length]
    for pair in collator.pairs:
        limits.append(pair.encoder.max_length)
    sizes = []
    for sample in samples:
        size = [len(sample.student.ids)]
        for pair in sample.pairs:
            size.append(len(pair.teacher.ids))
        sizes.append(size)
    return pack_rows(sizes, limits)


def pack_rows(sizes, limits):
    """Put each sample into the first row that has room for it on every side.

    Args:
        sizes: positions of each sample for the student and for each teacher.
        limits: of a row, likewise.
    Returns:
        [[sample, ...] of every row].

    >>> pack_rows([(6, 5), (5, 9), (4, 4)], (10, 10))
    [[0, 2], [1]]
    """
    rows = []
    room = []  # of each row, on each side
    limits = np.array(limits)
    for number, size in enumerate(sizes):
        size = np.array(size)
        # First fit, in the order of the data; better packings were not tried.
        for row, left in zip(rows, room):
            if (size <= left).all():
                row.append(number)
                left -= size
                break
        else:  # whatever its size: samples are cut to the limits before
            rows.append([number])
            room.append(limits - size)
    return rows


def positions_of(rows):
    """Return the (rows, width) positions of `batch.Rows`, counted anew in every sample.

    Padding goes on counting where the last sample of its row ends: each break in the counting
    begins a document for the attention, which would only cost time.
    """
    width = rows.shape[1]
    out = np.zeros(rows.shape, np.int64)
    for _, line, start in rows.places():
        # to the end of the row; the next sample overwrites what is its
        out[line, start:] = np.arange(width - start)
    return torch.from_numpy(out)
