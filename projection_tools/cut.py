"""Sort the rows of a projection, keep the heaviest entries, normalize.

    python -m projection_tools.cut --student A --teacher B --projection F.pt --output G.pt \\
        --top_k 2 [--threshold 0.01]
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("cut"))

from isogloss.projection_tools.arrays import entries, pack
from isogloss.projection_tools.projection_files import finish, load_arrays


def cut_rows(projection, top_k, threshold=0.0):
    """Keep the `top_k` heaviest entries of every row, `threshold` or more; normalize them again.

    A row of one remaining slot counts as exact to the losses that look at common tokens; so does
    one that was cut to it.

    Args:
        projection: (indices, likelihoods) with V rows.
        top_k: entries kept per row, 1 or more.
        threshold: smallest weight kept, 0 to 1.
    Returns:
        (indices, likelihoods): (V, top_k).
    """
    rows, columns, weights = entries(*projection)
    keep = weights >= threshold  # before normalizing: the weights as they stand in the file
    V = len(projection[0])
    return pack(rows[keep], columns[keep], weights[keep], V, top_k)


def main(args):
    # The tokenizers decide nothing here; the file is checked against them.
    pair = args.load_pair()
    projection = load_arrays(args.projection, pair)
    finish(cut_rows(projection, args.top_k, args.threshold), pair, args)
