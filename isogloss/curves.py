"""The curves of runs: read from metrics.jsonl, chosen by name, smoothed, drawn as a picture.

Tests: tests/test_curves.py.
"""

import json
import operator
import os
import warnings
from pathlib import Path
from typing import NamedTuple

from isogloss.flags.terminal import one_line

FIRST = "eval/student_bits_per_byte"  # what a run is judged by
DEFAULT = f"{FIRST},eval/kd,loss"
MOST_STEPS = 10**15
LARGEST = 1e300  # of numbers that can be drawn
LINES_OF_SMOOTHING = 50  # so many points are drawn of a metric of every step


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
    if os.path.isdir(path):  # pathlib raises for a folder that must not be read
        path = path / "metrics.jsonl"
    if not os.path.isfile(path):
        raise ValueError(f"{folder}: no metrics.jsonl there; name the --output_dir of a run")
    try:
        texts = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name the --output_dir of a "
                         "run") from None
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if not 0 <= operator.index(line["step"]) < MOST_STEPS:
                raise ValueError("a step that no run takes")
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(texts):
                break  # a running job writes it
            raise ValueError(f"{path}: line {number} is no line of metrics") from None
        lines.append(line)
    if not lines:
        raise ValueError(f"{path}: holds no line yet")
    return lines


def find_metrics(pattern, keys):
    """Return the keys that a name on the command line stands for, in order."""
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
    return isinstance(value, (int, float)) and -LARGEST < value < LARGEST  # NaN is neither


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
    """Return the curves of a panel as they are drawn: smoothed, but for those of evaluations."""
    if panel.metric.startswith("eval/"):
        return panel.curves
    return [smoothed(curve) for curve in panel.curves]


def picture(panels, path, colors=()):
    """Draw panels side by side, at most three in a row, a color per run: those of {run: color}."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    pyplot.rcParams["text.parse_math"] = False  # dollars in names of runs and metrics are meant
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5 * columns, 3.5 * lines),
                                   constrained_layout=True, squeeze=False)
    colors = dict(colors)
    for panel, axis in zip(panels, axes.flat):
        for curve in drawn_curves(panel):
            color = colors.setdefault(curve.run, f"C{len(colors)}")
            marker = "." if panel.metric.startswith("eval/") else None
            axis.plot(curve.steps, curve.values, color=color, label=one_line(curve.run),
                      marker=marker)
        axis.set(xlabel="step", title=one_line(panel.metric))
        axis.legend()
    for axis in axes.flat[len(panels):]:
        axis.set_visible(False)
    warnings.filterwarnings("ignore", message="Glyph .* missing")  # of names in other scripts
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def available(patterns, runs):
    """Return those of the default metrics of which the runs have a number."""
    keys = {}
    for lines in runs.values():
        for line in lines:
            keys |= dict.fromkeys(key for key, value in line.items() if is_number(value))
    return [pattern for pattern in patterns if find_metrics(pattern, keys)]
