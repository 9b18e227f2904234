"""Draw the curves of runs: held-out bits per byte first, in a terminal or as a picture.

    python -m isogloss.plot runs/a runs/b [--metrics student_bits_per_byte,kd] [--png curves.png]
    python -m isogloss.plot runs/a --timeline

A metric is a key of metrics.jsonl, or the end of one: `student_bits_per_byte` finds
`eval/student_bits_per_byte`, and `kd` finds `kd`, or with several teachers `kd/A` and `kd/B`, each
in a panel of its own (docs/evaluate.md).  Of a run's name the part is shown that differs.

Tests: tests/test_plot.py.
"""

import os
import sys
from dataclasses import dataclass

from isogloss.curves import DEFAULT, available, drawn_curves, panels_of, picture, read_run
from isogloss.flags.parse import check_output, check_types, expanded, flag, parse_flags, refusing
from isogloss.flags.terminal import one_line

MARKS = "●○■□▲△◆◇"  # of the runs, in a terminal
HEIGHT = 14  # lines of a panel in a terminal
WIDTH = 64  # columns of the curves
LABEL = 10  # characters of a number on the axis
STEPS = 10  # of a timeline
WAITS = (("data_seconds", "data", "░"), ("rollout/seconds", "text", "▒"))
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
    lines = [one_line(panel.metric)]
    for row, cells in enumerate(grid):
        label = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}.get(row, "")
        lines.append(f"{label:>{LABEL}} │{''.join(cells)}".rstrip())
    lines.append(f"{'step':>{LABEL}} └{'─' * WIDTH}")
    lines.append(f"{'':>{LABEL}}  0{last:>{WIDTH - 1}}")
    for number, curve in enumerate(panel.curves):
        best = min(curve.values)
        lines.append(f"{'':>{LABEL}}  {MARKS[number % len(MARKS)]} {one_line(curve.run)}: "
                     f"first {curve.values[0]:.4g}, last {curve.values[-1]:.4g}, "
                     f"least {best:.4g} at step {curve.steps[curve.values.index(best)]}")
    return lines


def timeline(lines):
    """Return the lines that draw the last steps of a run, and beside each what wrote meanwhile.

    A step waits for its data, then for the text of what writes, then it trains.
    """
    steps = [line for line in lines if line.get("seconds")][-STEPS:]
    if not steps:
        raise ValueError("--timeline: the run has taken no step yet")
    longest = max(max(line["seconds"], line.get("rollout/writer_seconds") or 0) for line in steps)

    def bar(seconds, mark):
        return mark * round(WIDTH * seconds / longest)

    drawn = ["░ waits for data   ▒ waits for text, reads it   █ teachers and student   "
             "▁ the next text is written"]
    for line, following in zip(steps, [*steps[1:], {}]):
        waits = [(line.get(key) or 0, name, mark) for key, name, mark in WAITS]
        rest = line["seconds"] - sum(seconds for seconds, *_ in waits)
        bars = "".join(bar(seconds, mark) for seconds, _, mark in waits) + bar(rest, "█")
        said = ", ".join(f"{name} {seconds:.3g}" for seconds, name, _ in waits)
        drawn.append(f"{line['step']:>{LABEL}} │{bars} {line['seconds']:.3g} s ({said})")
        written = following.get("rollout/writer_seconds")
        # an answer serves all steps of its batch; one step old, it was written during this step
        is_new = written != line.get("rollout/writer_seconds")
        if written and is_new and following["rollout/staleness"] == 1:
            drawn.append(f"{'':>{LABEL}} │{bar(written, '▁')} {written:.3g} s")
    return drawn


@dataclass(kw_only=True)
class Args:
    """Draw the curves of runs, named before the flags: python -m isogloss.plot runs/a runs/b."""

    metrics: str = flag(DEFAULT, "of docs/evaluate.md, or the ends of their names, with commas.")
    png: str = flag("", "picture to write beside what is printed, .png, .svg or .pdf; empty: none.")

    timeline: bool = flag(False, "draw who waits for whom in the last steps of one run.")

    def __post_init__(self):
        check_types(self)


def main(folders, args):
    if args.png and not args.png.endswith(PICTURES):
        raise ValueError(f"--png {args.png}: expected a name that ends in {', '.join(PICTURES)}")
    check_output(args.png)
    runs = {}
    for name, folder in zip(short_names(folders), folders):
        runs[name] = read_run(folder)
    if args.timeline:
        if len(runs) > 1:
            raise ValueError("--timeline: draws one run; name one")
        print(*timeline(*runs.values()), sep="\n")
        return
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


def run_on_folders(kind, main, program, argv=None):
    """Run ``main(folders, args)`` of a command whose first words are folders of runs.

    Args:
        kind: dataclass of its flags; program: its name, for errors; argv: None: of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    folders = []
    while words and not words[0].startswith("-"):
        folders.append(words.pop(0))
    with refusing(program, loud=True):
        folders = [expanded("run", folder) for folder in folders]
        args = parse_flags(kind, words)
        if not folders:
            raise ValueError(f"expected one or more runs, as in python -m {program} runs/a")
        main(folders, args)


def cli(argv=None):
    run_on_folders(Args, main, "isogloss.plot", argv)


if __name__ == "__main__":
    cli()
