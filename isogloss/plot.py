"""Draw the curves of runs: held-out bits per byte first, in a terminal or as a picture.

    python -m isogloss.plot runs/a runs/b [--metrics student_bits_per_byte,kd] [--png curves.png]

A metric is a key of metrics.jsonl, or the end of one: `student_bits_per_byte` finds
`eval/student_bits_per_byte`, and `kd` finds `kd`, or with several teachers `kd/A` and `kd/B`, each
in a panel of its own.  docs/metrics.md lists them.  Of a run's name the part is shown that differs.

Tests: tests/test_plot.py.
"""

import os
import sys
from dataclasses import dataclass

from isogloss.curves import DEFAULT, available, drawn_curves, panels_of, picture, read_run
from isogloss.flags.parse import check_types, expanded, flag, parse_flags
from isogloss.projection_tools.files import check_output

MARKS = "●○■□▲△◆◇"  # of the runs, in a terminal
HEIGHT = 14  # lines of a panel in a terminal
WIDTH = 64  # columns of the curves
LABEL = 10  # characters of a number on the axis
PICTURES = ".png", ".svg", ".pdf"


def short_names(folders):
    """Return a name for each folder: the part of its path in which it differs from the others."""
    paths = [os.path.normpath(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError("a run is named twice")
    common = os.path.commonpath([os.path.abspath(path) for path in paths])
    names = []
    for path in paths:
        differing = os.path.relpath(os.path.abspath(path), common)
        names.append(os.path.basename(path) if differing == "." else differing)
    return names


def text_panel(panel):
    """Return the lines that draw a panel in a terminal, a mark for each run."""
    curves = drawn_curves(panel)
    low = min(min(curve.values) for curve in curves)
    high = max(max(curve.values) for curve in curves)
    last = max(curve.steps[-1] for curve in curves)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for number, curve in enumerate(curves):
        for step, value in zip(curve.steps, curve.values):
            column = round((WIDTH - 1) * step / max(last, 1))
            row = round((HEIGHT - 1) * (high - value) / ((high - low) or 1))
            grid[row][column] = MARKS[number % len(MARKS)]
    lines = [panel.metric]
    for row, cells in enumerate(grid):
        label = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}.get(row, "")
        lines.append(f"{label:>{LABEL}} │{''.join(cells)}".rstrip())
    lines.append(f"{'step':>{LABEL}} └{'─' * WIDTH}")
    lines.append(f"{'':>{LABEL}}  0{last:>{WIDTH - 1}}")
    for number, curve in enumerate(panel.curves):
        best = min(curve.values)
        lines.append(f"{'':>{LABEL}}  {MARKS[number % len(MARKS)]} {curve.run}: "
                     f"first {curve.values[0]:.4g}, last {curve.values[-1]:.4g}, "
                     f"least {best:.4g} at step {curve.steps[curve.values.index(best)]}")
    return lines


@dataclass(kw_only=True)
class Args:
    """Draw the curves of runs, named before the flags: python -m isogloss.plot runs/a runs/b."""

    metrics: str = flag(DEFAULT, "of docs/metrics.md, or the ends of their names, with commas.")
    png: str = flag("", "picture to write beside what is printed, .png, .svg or .pdf; empty: none.")

    def __post_init__(self):
        check_types(self)


def main(folders, args):
    if args.png and not args.png.endswith(PICTURES):
        raise ValueError(f"--png {args.png}: expected a name that ends in {', '.join(PICTURES)}")
    check_output(args.png)
    runs = {}
    for name, folder in zip(short_names(folders), folders):
        runs[name] = read_run(folder)
    patterns = [name for name in args.metrics.split(",") if name]
    if args.metrics == DEFAULT:
        patterns = available(patterns, runs)
    panels = panels_of(runs, patterns)
    for panel in panels:
        print(*text_panel(panel), "", sep="\n")
    if args.png:
        try:
            picture(panels, args.png)
        except OSError as error:
            raise ValueError(f"--png {args.png}: cannot be written ({error.strerror})") from None
        print(args.png)


def cli(argv=None):
    words = list(sys.argv[1:] if argv is None else argv)
    folders = []
    while words and not words[0].startswith("-"):
        folders.append(words.pop(0))
    try:
        folders = [expanded("run", folder) for folder in folders]
        args = parse_flags(Args, words)
        if not folders:
            raise ValueError("expected one or more runs, as in python -m isogloss.plot runs/a")
        main(folders, args)
    except ValueError as error:
        print(f"isogloss.plot: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    cli()
