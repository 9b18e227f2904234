"""Sort the rows of a projection, keep the heaviest entries, normalize.

    python -m projection_tools.cut --student A --teacher B --projection F.pt --output G.pt \\
        --top_k 2 [--threshold 0.01]
"""

from dataclasses import dataclass

from isogloss.flags.parse import MOST_SLOTS, OLD_NAMES, check_range, check_types, tool
from isogloss.projection_tools.arrays import entries, pack
from isogloss.projection_tools.files import check_output, finish, load_arrays
from isogloss.projection_tools.tokenizers import Pair


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


@dataclass(kw_only=True)
class Args:
    """Keep the heaviest entries of every row of a projection, and normalize them again.

    Args:
        student: hub id or directory with the student's tokenizer.
        teacher: hub id or directory with the teacher's tokenizer.
        projection: file to read.
        output: file to write, .pt or .safetensors.
        top_k: entries kept per row, 1 or more.
        threshold: drop entries that weigh less than this, 0 to 1.
        trust_remote_code: run the Python code that comes with a model, which can do anything.
    """

    student: str
    teacher: str
    projection: str
    output: str
    top_k: int = 4
    threshold: float = 0.0  # keeps every entry
    trust_remote_code: bool = False

    def __post_init__(self):
        check_types(self)
        check_range(self, dict(top_k=1, threshold=0), dict(top_k=MOST_SLOTS, threshold=1))


def main(args):
    check_output(args.output)
    # The tokenizers decide nothing here; the file is checked against them.
    pair = Pair.load(args.student, args.teacher, args.trust_remote_code)
    projection = load_arrays(args.projection, pair)
    finish(cut_rows(projection, args.top_k, args.threshold), pair, args)


def cli(argv=None):
    tool(Args, main, aliases=OLD_NAMES, argv=argv)


if __name__ == "__main__":
    cli()
