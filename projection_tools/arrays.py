"""A projection as arrays: (indices_VK, likelihoods_VK) of int64 and float64.

-1 and 0 in unused slots, rows sorted by weight.  V student vocabulary, K kept entries.
"""

import numpy as np


def pack(rows, columns, weights, V, top_k):
    """Return a projection of the `top_k` heaviest entries of each row, sorted and normalized.

    Args:
        rows, columns, weights: (N,) entries; of equal weights the earlier one comes first.  An
            entry may occur twice, as '1' in '11' -> '1', '1': then it has two slots, so one slot
            means one token.
        V: rows.
        top_k: slots of a row.
    Returns:
        (indices, likelihoods): (V, top_k) int64, -1 in unused slots, and float64; rows sum to 1 or
        to 0.
    """
    rows = np.asarray(rows)
    columns = np.asarray(columns)
    weights = np.asarray(weights, np.float64)
    order = np.lexsort((-weights, rows))  # by row, then by falling weight; stable
    rows = rows[order]
    columns = columns[order]
    weights = weights[order]

    # An entry's slot is its distance from the first entry of its row.
    slots = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = (slots < top_k) & (weights > 0)
    indices = np.full((V, top_k), -1, np.int64)
    indices[rows[kept], slots[kept]] = columns[kept]
    likelihoods = np.zeros((V, top_k))
    likelihoods[rows[kept], slots[kept]] = weights[kept]
    sums = likelihoods.sum(1, keepdims=True)
    return indices, likelihoods / np.maximum(sums, 1e-300)  # an empty row stays 0


def entries(indices, likelihoods):
    """Return (rows, columns, weights) of a projection, in reading order."""
    rows, slots = np.nonzero(indices >= 0)
    return rows, indices[rows, slots], likelihoods[rows, slots]


def widen(projection, K):
    """Return the same projection in K slots or more."""
    indices, likelihoods = projection
    missing = max(0, K - indices.shape[1])
    padding = ((0, 0), (0, missing))  # none above, below or on the left
    return np.pad(indices, padding, constant_values=-1), np.pad(likelihoods, padding)


def fill_empty(projection, other):
    """Return a projection whose empty rows are those of another one."""
    K = max(projection[0].shape[1], other[0].shape[1])
    indices, likelihoods = widen(projection, K)
    other_indices, other_likelihoods = widen(other, K)
    empty = (indices[:, :1] < 0).repeat(K, 1)
    return np.where(empty, other_indices, indices), np.where(empty, other_likelihoods, likelihoods)


def describe(indices):
    """Return one line of facts about a projection."""
    sizes = (np.asarray(indices) >= 0).sum(1)
    return (
        f"{len(sizes)} rows: {(sizes == 1).sum()} with one teacher token, {(sizes > 1).sum()} with "
        f"several, {(sizes == 0).sum()} empty")
