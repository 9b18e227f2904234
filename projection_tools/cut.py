"""Sort the rows of a projection, keep the heaviest entries, normalize.

    python -m projection_tools.cut --student-model A --teacher-model B --projection F.pt --output G.pt \\
        --top-k 2 [--threshold 0.01]
"""

from dataclasses import dataclass

from projection_tools.flags import check_types, tool
from projection_tools import Pair, entries, finish, load_arrays, pack


def cut_rows(projection, top_k, threshold=0.0):
    """The `top_k` heaviest entries of every row that weigh `threshold` or more, normalized again.

    A row of one remaining slot counts as exact to the losses that look at common tokens; so does one that
    was cut to it.
    """
    rows, columns, weights = entries(*projection)
    keep = weights >= threshold
    return pack(rows[keep], columns[keep], weights[keep], len(projection[0]), top_k)


@dataclass(kw_only=True)
class Args:
    """Cut the rows of a projection.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        projection: file to read.
        output: file to write, .pt or .safetensors.
        top_k: entries kept in a row, 1 or more.
        threshold: entries that weigh less are dropped, 0 to 1.
    """

    student_model: str
    teacher_model: str
    projection: str
    output: str
    top_k: int = 4
    threshold: float = 0.0

    def __post_init__(self):
        check_types(self)
        if self.top_k < 1:
            raise ValueError(f"--top-k {self.top_k}: expected 1 or more")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"--threshold {self.threshold}: expected 0 to 1")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    finish(cut_rows(load_arrays(args.projection, pair), args.top_k, args.threshold), pair, args)


if __name__ == "__main__":
    tool(Args, main)
