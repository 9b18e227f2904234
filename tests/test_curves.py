"""Curves of runs: which lines they come from, and what is drawn."""

import json
import re
import sys

import pytest

from isogloss import curves
from isogloss.report.__main__ import cli


def write_run(folder, lines, tail=""):
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def lines_of(bits, kd):
    """Return the lines of a run of ten steps with two teachers, the second without rows at first.
    """
    lines = [{"step": 0, curves.FIRST: bits, "eval/kd/A": kd}]
    for step in range(1, 11):
        line = {"step": step, "loss": 10.0 - step, "kd/A": kd / step}
        if step > 5:
            line["kd/B"] = kd
        lines.append(line)
    lines[3]["loss"] = None  # a skipped step
    lines.append({"step": 10, curves.FIRST: bits / 2, "eval/kd/A": kd / 4})
    return lines


@pytest.fixture
def runs(tmp_path):
    half_a_line = '{"step": 11, "l'  # a running job writes it
    return [write_run(tmp_path / "runs" / "first" / "seed0", lines_of(3.0, 1.0)),
            write_run(tmp_path / "runs" / "second" / "seed0", lines_of(2.0, 4.0), half_a_line)]


def drawn(words, folder, capsys):
    """Return (titles of the panels of a report, what was printed)."""
    cli([*map(str, words), "--rows=0", f"--output={folder / 'report.html'}"])
    page = (folder / "report.html").read_text()
    return re.findall('<img alt="(.*?)"', page), capsys.readouterr().out


def test_held_out_bits_come_first_and_each_teacher_has_a_panel(runs, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    words = [*runs, f"--png={picture}", "--metrics=student_bits_per_byte,kd,loss"]
    titles, printed = drawn(words, tmp_path, capsys)
    assert titles == [curves.FIRST, "kd/A", "kd/B", "loss"] and str(picture) in printed
    # every panel has ink of both curves
    from matplotlib import pyplot

    pixels = pyplot.imread(picture)[..., :3]
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):
        is_color = (abs(pixels * 255 - color) < 2).all(-1)
        width = is_color.shape[1] // 3
        assert all(is_color[:, number * width : (number + 1) * width].any() for number in range(3))
    # without --metrics what the run has is drawn
    assert drawn(runs[:1], tmp_path, capsys)[0] == [curves.FIRST, "eval/kd/A", "loss"]


def test_a_run_keeps_its_color_where_it_is_alone(tmp_path):
    from matplotlib import pyplot

    panel = curves.Panel("kd", [curves.Curve("b", [0, 1], [0.0, 1.0])])
    curves.picture([panel], tmp_path / "b.png", {"a": "#1f77b4", "b": "#ff7f0e"})
    pixels = pyplot.imread(tmp_path / "b.png")[..., :3] * 255
    assert (abs(pixels - (0xFF, 0x7F, 0x0E)) < 2).all(-1).any()
    assert not (abs(pixels - (0x1F, 0x77, 0xB4)) < 2).all(-1).any()


def test_without_matplotlib_a_report_has_no_curves_and_says_so(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cli([str(runs[0]), "--rows=0", f"--output={tmp_path / 'report.html'}"])
    line = capsys.readouterr().err
    assert "no curves: matplotlib" in line and "pip install matplotlib" in line
    assert "Held-out results" in (tmp_path / "report.html").read_text()


def test_metrics_of_steps_are_means_of_neighbors():
    curve = curves.Curve("a", list(range(1, 201)), [float(step) for step in range(1, 201)])
    drawn = curves.smoothed(curve)
    assert drawn.values == [step - 1.5 for step in drawn.steps] and drawn.steps[-1] == 200
    assert len(drawn.steps) == curves.LINES_OF_SMOOTHING


def test_a_metric_without_a_number_has_no_panel(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [{"step": 1, "loss": 2.0, "kd": None, "eval/kd": None}])
    assert drawn([folder, "--metrics=kd,loss"], tmp_path, capsys)[0] == ["loss"]
    for metric, message in (("kd", "no run has a number of it"), ("accuracy", "no run has it")):
        cli([str(folder), f"--metrics={metric}", "--rows=0", f"--output={tmp_path / 'r.html'}"])
        assert f"no curves: --metrics {metric}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["nothing", '{"step": "2"}', '{"step": NaN}', "[2]", '"step"',
                                  '{"loss": 1}', "\x00\x00"])
def test_a_foreign_line_is_named(tmp_path, line):
    folder = write_run(tmp_path / "run", [{"step": 1}], f'{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match="line 2 is no line of metrics"):
        curves.read_run(folder)
