"""Show how two projections of the same pair differ.

    python -m projection_tools.compare F.pt G.pt --student A --teacher B [--num_examples 20]
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("compare"))

import numpy as np

from isogloss.projection_tools.arrays import entries
from isogloss.projection_tools.projection_files import load_arrays
from isogloss.projection_tools.show import byte_explained, row_text

SAME = 1e-6  # rows at this distance or less are the same; float32 in a file rounds to 6e-8


def row_distance(a, b):
    """Return the total variation distance between the rows of two projections, (V,) float64.

    It is 0 for equal rows, 1 for rows with nothing in common and for a row that is empty in one of
    the projections alone.
    """
    V = len(a[0])
    a_rows, a_columns, a_weights = entries(*a)
    b_rows, b_columns, b_weights = entries(*b)
    # An entry's key is its position in a dense V x W matrix.  Adding up the weights of a key, those
    # of b with a minus, gives the entries of a - b without that matrix.
    columns = np.concatenate([a_columns, b_columns])
    rows = np.concatenate([a_rows, b_rows])
    weights = np.concatenate([a_weights, -1 * b_weights])
    W = max(1, int(columns.max(initial=-1)) + 1)
    keys, positions = np.unique(rows * W + columns, return_inverse=True)
    difference = np.bincount(positions, weights, len(keys))

    # Total variation is half of the L1 norm.  A row against an empty one would come out at 1/2.
    distance = np.bincount(keys // W, np.abs(difference), V) / 2
    only_one = _has_entries(a) != _has_entries(b)
    return np.where(only_one, 1.0, distance)


def _has_entries(projection):
    """Return (V,) bool: the row is not empty."""
    indices, _ = projection
    return indices[:, 0] >= 0


def differences(a, b):
    """Return facts about how two projections differ, as {name: number}."""
    distance = row_distance(a, b)
    a_indices, _ = a
    b_indices, _ = b
    in_a = _has_entries(a)
    in_b = _has_entries(b)
    other_heaviest = (a_indices[:, 0] != b_indices[:, 0]) & in_a & in_b
    return {
        "rows": len(distance),
        "the same within 1e-6": int((distance <= SAME).sum()),
        "with another heaviest token": int(other_heaviest.sum()),
        "in the first only": int((in_a & ~in_b).sum()),
        "in the second only": int((in_b & ~in_a).sum()),
        "mean distance (total variation)": float(distance.mean()),
        "entries of the first": int((a_indices >= 0).sum()),
        "entries of the second": int((b_indices >= 0).sum()),
    }


def main(args):
    pair = args.load_pair()
    first = load_arrays(args.projection, pair)
    second = load_arrays(args.other, pair)
    first_explained = byte_explained(first, pair)
    second_explained = byte_explained(second, pair)
    distance = row_distance(first, second)
    # Stable, so that of equal distances the lower id comes first.
    farthest = np.argsort(-distance, kind="stable")
    for v in farthest[: args.num_examples].tolist():
        if distance[v] > SAME:
            text = row_text(v, first, pair, first_explained)
            other_text = row_text(v, second, pair, second_explained)
            _, other_tokens = other_text.split(" -> ", 1)  # the student's token is there already
            print(f"{distance[v]:.3f}  {text}  |  {other_tokens}")
    for name, value in differences(first, second).items():
        number = f"{value:.4f}" if isinstance(value, float) else value
        print(f"  {name}: {number}")
