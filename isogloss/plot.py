"""Draw the curves of runs: held-out bits per byte first, in a terminal or as a picture.

    python -m isogloss.plot runs/a runs/b [--metrics student_bits_per_byte,kd] [--png curves.png]

A metric is a key of metrics.jsonl, or the end of one: `student_bits_per_byte` finds
`eval/student_bits_per_byte`, and `kd` finds `kd`, or with several teachers `kd/A` and `kd/B`, each
in a panel of its own.  docs/metrics.md lists them.  Of a run's name the part is shown that differs.

Tests: tests/test_plot.py.
"""

import json
import math
import operator
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from projection_tools import check_picture
from projection_tools.flags import check_types, expanded, parse_flags

FIRST = "eval/student_bits_per_byte"  # what a run is judged by
DEFAULT = f"{FIRST},eval/kd,loss"
MARKS = "●○■□▲△◆◇"  # of the runs, in a terminal
HEIGHT = 14  # lines of a panel in a terminal
WIDTH = 64  # columns of the curves
LABEL = 10  # characters of a number on the axis
LINES_OF_SMOOTHING = 50  # so many points are drawn of a metric of every step

# --- curves ---------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """Hold one metric of one run: steps and values, both lists."""

    run: str
    steps: list
    values: list


class Panel(NamedTuple):
    """Hold one metric of all runs that have it."""

    metric: str
    curves: list


def read_run(folder):
    """Return the lines of a run's metrics.jsonl, as dicts.

    Args:
        folder: of the run, or the file itself.
    Raises:
        ValueError: there is none, or it holds something else.
    """
    path = Path(folder)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder}: no metrics.jsonl there; name the --output_dir of a run")
    texts = path.read_text(errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            operator.index(line["step"])
        except (ValueError, TypeError, KeyError):
            if number == len(texts):
                break  # a running job writes it
            raise ValueError(f"{path}: line {number} is no line of metrics") from None
        lines.append({with_new_name(key): value for key, value in line.items()})
    if not lines:
        raise ValueError(f"{path}: holds no line yet")
    return lines


def with_new_name(key):
    """Return a metric's name of today, for runs of earlier versions."""
    return key.replace("teacher_bytes_per_token", "teacher_output_bytes")


def find_metrics(pattern, keys):
    """Return the keys that a name on the command line stands for, in order.

    Args:
        pattern: a key, or a key without its beginning (eval/) or its end (the teacher).
        keys: of all runs.
    """
    if pattern in keys:
        return [pattern]
    of_teachers = [key for key in keys if key.startswith(f"{pattern}/")]
    if of_teachers:
        return of_teachers
    return [key for key in keys if f"/{pattern}/" in f"/{key}/"]


def panels_of(runs, patterns):
    """Return the Panels of some metrics.

    Args:
        runs: {name: lines of `read_run`}.
        patterns: list of names, see `find_metrics`.
    Raises:
        ValueError: no run has such a metric, or a number of any of them.
    """
    keys = {}
    for lines in runs.values():
        for line in lines:
            keys |= dict.fromkeys(line)
    del keys["step"]
    metrics = {}
    for pattern in patterns:
        matching = find_metrics(pattern, keys)
        if not matching:
            raise ValueError(f"--metrics {pattern}: no run has it; there are {', '.join(keys)}")
        metrics |= dict.fromkeys(matching)
    panels = []
    for metric in metrics:
        curves = []
        for name, lines in runs.items():
            points = [line for line in lines if is_number(line.get(metric))]
            if points:
                steps = [line["step"] for line in points]
                curves.append(Curve(name, steps, [line[metric] for line in points]))
        if curves:  # null everywhere: a mean over nothing
            panels.append(Panel(metric, curves))
    if not panels:
        raise ValueError(f"--metrics {','.join(patterns)}: no run has a number of it")
    return panels


def is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


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


def smoothed(curve):
    """Return a Curve of at most `LINES_OF_SMOOTHING` points, each a mean of neighbors."""
    size = -(-len(curve.steps) // LINES_OF_SMOOTHING)
    steps = []
    values = []
    for first in range(0, len(curve.steps), size):
        group = curve.values[first : first + size]
        steps.append(curve.steps[first + len(group) - 1])
        values.append(sum(group) / len(group))
    return Curve(curve.run, steps, values)


def drawn_curves(panel):
    """Return the curves of a panel as they are drawn: those of a step smoothed, of evaluations not.
    """
    if panel.metric.startswith("eval/"):
        return panel.curves
    return [smoothed(curve) for curve in panel.curves]


# --- in a terminal --------------------------------------------------------------------------------


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


# --- as a picture ---------------------------------------------------------------------------------


def picture(panels, path):
    """Draw panels side by side, at most three in a row, a color per run.

    Raises:
        OSError: it cannot be written there.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5 * columns, 3.5 * lines),
                                   constrained_layout=True, squeeze=False)
    colors = {}
    for panel, axis in zip(panels, axes.flat):
        for curve in drawn_curves(panel):
            color = colors.setdefault(curve.run, f"C{len(colors)}")
            marker = "." if panel.metric.startswith("eval/") else None
            axis.plot(curve.steps, curve.values, color=color, label=curve.run, marker=marker)
        axis.set(xlabel="step", title=panel.metric)
        axis.legend()
    for axis in axes.flat[len(panels):]:
        axis.set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


# --- the command line -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Args:
    """Draw the curves of runs, named before the flags: python -m isogloss.plot runs/a runs/b.

    Args:
        metrics: of docs/metrics.md, or the ends of their names, with commas.
        png: picture to write beside what is printed, .png, .svg or .pdf; empty: none.
    """

    metrics: str = DEFAULT
    png: str = ""

    def __post_init__(self):
        check_types(self)


def available(patterns, runs):
    """Return those of the default metrics of which the runs have a number."""
    keys = {}
    for lines in runs.values():
        for line in lines:
            keys |= dict.fromkeys(key for key, value in line.items() if is_number(value))
    return [pattern for pattern in patterns if find_metrics(pattern, keys)]


def main(folders, args):
    check_picture(args.png)
    runs = {}
    for name, folder in zip(short_names(folders), folders):
        runs[name] = read_run(folder)
    patterns = [with_new_name(name) for name in args.metrics.split(",") if name]
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
