"""What differs between two projections of the same pair.

    python -m projection_tools.compare F.pt G.pt --student-model A --teacher-model B [--num-examples 20]
"""

from dataclasses import dataclass

import numpy as np

from projection_tools.flags import check_types, tool
from projection_tools import Pair, load_arrays
from projection_tools.show import byte_explained, row_text


def row_distance(a, b):
    """(V,) total variation distance between the rows of two projections: 0 the same, 1 nothing in common.

    A row that only one of them has is at distance 1.
    """
    V, width = len(a[0]), 1 + max(int(a[0].max(initial=-1)), int(b[0].max(initial=-1)))
    keys, weights = [], []
    for (indices, likelihoods), sign in ((a, 1), (b, -1)):
        rows, slots = np.nonzero(indices >= 0)
        keys.append(rows * width + indices[rows, slots])
        weights.append(sign * likelihoods[rows, slots])
    keys, place = np.unique(np.concatenate(keys), return_inverse=True)
    difference = np.abs(np.bincount(place, np.concatenate(weights), len(keys)))
    distance = np.bincount(keys // max(width, 1), difference, V) / 2
    one = (a[0][:, 0] >= 0) != (b[0][:, 0] >= 0)
    return np.where(one, 1.0, distance)


def differences(a, b):
    """Facts about how two projections differ, as {name: number}."""
    distance = row_distance(a, b)
    has = [part[0][:, 0] >= 0 for part in (a, b)]
    both = has[0] & has[1]
    return {"rows": len(distance), "the same within 1e-6": int((distance <= 1e-6).sum()),
            "with another heaviest token": int((a[0][:, 0] != b[0][:, 0])[both].sum()),
            "in the first only": int((has[0] & ~has[1]).sum()),
            "in the second only": int((has[1] & ~has[0]).sum()),
            "mean distance (total variation)": float(distance.mean()),
            "entries of the first": int((a[0] >= 0).sum()), "entries of the second": int((b[0] >= 0).sum())}


@dataclass(kw_only=True)
class Args:
    """What differs between two projections of the same pair.

    Args:
        projection: the first file, .pt or .safetensors.
        other: the second file.
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        num_examples: rows to show, those that differ most.
    """

    projection: str
    other: str
    student_model: str
    teacher_model: str
    num_examples: int = 20

    def __post_init__(self):
        check_types(self)
        if self.num_examples < 0:
            raise ValueError(f"--num-examples {self.num_examples}: expected 0 or more")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    both = [load_arrays(path, pair) for path in (args.projection, args.other)]
    distance = row_distance(*both)
    good = [byte_explained(projection, pair) for projection in both]
    for v in np.argsort(-distance, kind="stable")[: args.num_examples].tolist():
        if distance[v] > 1e-6:
            lines = [row_text(v, projection, pair, g) for projection, g in zip(both, good)]
            print(f"{distance[v]:.3f}  {lines[0]}  |  {lines[1].split(' -> ', 1)[1]}")
    for name, value in differences(*both).items():
        print(f"  {name}: {value:.4f}" if isinstance(value, float) else f"  {name}: {value}")


if __name__ == "__main__":
    tool(Args, main, positional=("projection", "other"))
