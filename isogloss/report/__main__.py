"""Write what runs did as one HTML file, which needs no network.

    python -m isogloss.report runs/a [runs/b ...] [--output report.html] [--png curves.png]

Curves and tables come from metrics.jsonl, samples from samples.jsonl, the setting from run.json.
A metric is a key of metrics.jsonl, or the end of one: `student_bits_per_byte` finds
`eval/student_bits_per_byte`, and `kd` finds `kd`, or with several teachers `kd/A` and `kd/B`, each
in a panel of its own.  Of a run's name the part is shown that differs.

Of the first run the student (--student, else its export) and its teacher read held-out rows again:
each chunk of the text is colored by whom it surprises more, and says on hover what both expected.
What cannot be read or loaded is left out of the page; a line and a note in its place say why.

Tests: tests/test_report.py, tests/test_curves.py.
"""

import re
import sys
from dataclasses import dataclass

from isogloss.curves import DEFAULT
from isogloss.flags.parse import check_flags, expanded, flag, parse_flags, refusing

PICTURES = ".png", ".svg", ".pdf"


@dataclass(kw_only=True)
class Args:
    """Write a page about runs, named before the flags: python -m isogloss.report runs/a runs/b."""

    output: str = flag("report.html", "file to write.")
    metrics: str = flag(
        DEFAULT, "whose curves are drawn, of docs/evaluate.md, or the ends of names, with commas.")
    png: str = flag(
        "", "picture of the curves to write, too, .png, .svg or .pdf; empty: none.")
    student: str = flag("", "directory of the student that reads held-out rows. Empty: what the "
                        "first run has exported.")
    rows: int = flag(3, "held-out rows to color. 0: none, and no model is loaded.", low=0, high=999)
    device: str = flag("auto", "of the models: cpu, cuda, or auto.")
    trust_remote_code: bool = flag(False, "run Python code that comes with the models.")

    def __post_init__(self):
        check_flags(self)
        if self.png and not self.png.endswith(PICTURES):
            raise ValueError(f"--png {self.png}: expected a name that ends in "
                             f"{', '.join(PICTURES)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ValueError(f"--device {self.device}: expected cpu, cuda or auto")
        if self.device.startswith("cuda"):
            import torch

            number, count = int(self.device.partition(":")[2] or 0), torch.cuda.device_count()
            if number >= count:
                raise ValueError(f"--device {self.device}: there are {count} GPUs; use cpu or auto")


def cli(argv=None):
    """Run `main` on the folders that are named before the flags; argv: None: of this process."""
    words = list(sys.argv[1:] if argv is None else argv)
    folders = []
    while words and not words[0].startswith("-"):
        folders.append(words.pop(0))
    with refusing("isogloss.report", loud=True):
        folders = [expanded("run", folder) for folder in folders]
        args = parse_flags(Args, words)
        if not folders:
            raise ValueError("expected one or more runs, as in python -m isogloss.report runs/a")
        from isogloss.report.page import main

        main(folders, args)


if __name__ == "__main__":
    cli()
