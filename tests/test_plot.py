"""Curves of runs: which lines they come from, where they are drawn, what is wrong input."""

import json

import pytest

from isogloss import curves, plot


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


def test_held_out_bits_come_first_and_each_teacher_has_a_panel(runs, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    plot.cli([*map(str, runs), f"--png={picture}", "--metrics=student_bits_per_byte,kd,loss"])
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    assert titles == [curves.FIRST, "kd/A", "kd/B", "loss", str(picture)]
    assert "● first/seed0: first 3, last 1.5, least 1.5 at step 10" in printed
    assert "○ second/seed0: first 4, last 4, least 4 at step 6" in printed  # of kd/B
    # every panel has ink of both curves
    from matplotlib import pyplot

    pixels = pyplot.imread(picture)[..., :3]
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):
        is_color = (abs(pixels * 255 - color) < 2).all(-1)
        width = is_color.shape[1] // 3
        assert all(is_color[:, number * width : (number + 1) * width].any() for number in range(3))
    # without --metrics what the run has is drawn
    plot.cli([str(runs[0])])
    titles = [line for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert titles == [curves.FIRST, "eval/kd/A", "loss"]


def test_a_mark_stands_where_its_number_is():
    panel = curves.Panel("eval/x", [curves.Curve("a", [0, 50, 100], [3.0, 2.0, 1.0])])
    lines = plot.text_panel(panel)[1 : plot.HEIGHT + 1]
    cells = [line.partition("│")[2] for line in lines]
    assert cells[0].index("●") == 0 and lines[0].split()[0] == "3"
    assert cells[-1].index("●") == plot.WIDTH - 1 and lines[-1].split()[0] == "1"
    middle = [row for row, line in enumerate(cells) if "●" in line][1]
    assert abs(middle - (plot.HEIGHT - 1) / 2) <= 1
    assert sum(line.count("●") for line in cells) == 3
    flat = plot.text_panel(panel._replace(curves=[curves.Curve("a", [0], [2.0])]))
    assert sum(line.count("●") for line in flat[1:-1]) == 1


def test_metrics_of_steps_are_means_of_neighbors():
    curve = curves.Curve("a", list(range(1, 201)), [float(step) for step in range(1, 201)])
    drawn = curves.smoothed(curve)
    assert drawn.values == [step - 1.5 for step in drawn.steps] and drawn.steps[-1] == 200
    assert len(drawn.steps) == curves.LINES_OF_SMOOTHING


@pytest.mark.parametrize("words, message", [
    ([], "expected one or more runs"),
    (["nowhere"], "no metrics.jsonl there"),
    (["RUN", "--metrics=accuracy"], "no run has it; there are eval/student_bits_per_byte, "),
    (["RUN", "--png=no/such/folder/x.png"], "cannot be written"),
    (["RUN", "--png=x.words"], "--png x.words: expected a name that ends in .png, .svg, .pdf"),
    (["RUN", "RUN"], "a run is named twice"),
    (["RUN", "runs/second/seed0", "--timeline"], "--timeline: draws one run"),
    (["RUN", "--timeline"], "has taken no step yet"),  # of which it knows how long it took
    (["RUN", "--metric=kd"], "metrics"),
])
def test_wrong_input_is_one_line(runs, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        plot.cli([str(runs[0]) if word == "RUN" else word for word in words])
    printed = capsys.readouterr().err
    assert end.value.code == 2 and message in printed and printed.count("\n") == 1


def test_a_metric_without_a_number_has_no_panel(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [{"step": 1, "loss": 2.0, "kd": None, "eval/kd": None}])
    plot.cli([str(folder)])
    assert "kd" not in capsys.readouterr().out
    plot.cli([str(folder), "--metrics=kd,loss"])
    assert capsys.readouterr().out.startswith("loss\n")
    with pytest.raises(SystemExit):
        plot.cli([str(folder), "--metrics=kd"])
    assert "--metrics kd: no run has a number of it" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["nothing", '{"step": "2"}', '{"step": NaN}', "[2]", '"step"',
                                  '{"loss": 1}', "\x00\x00"])
def test_a_foreign_line_is_named(tmp_path, line):
    folder = write_run(tmp_path / "run", [{"step": 1}], f'{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match="line 2 is no line of metrics"):
        curves.read_run(folder)


def test_a_timeline_shows_who_waits_for_whom(tmp_path, capsys):
    """An answer serves all steps of a batch; it was written beside the step before, or in it."""
    lines = []
    for step, (age, writer) in enumerate([(0, 1.0), (1, 2.0), (2, 2.0), (1, 0.5)], 1):
        lines.append({"step": step, "seconds": 4.0, "data_seconds": 1.0, "rollout/seconds": 1.0,
                      "rollout/staleness": age, "rollout/writer_seconds": writer})
    run = write_run(tmp_path / "run", [{"step": 0, curves.FIRST: 1.0}, *lines])
    plot.cli([str(run), "--timeline"])
    _, *drawn = capsys.readouterr().out.splitlines()
    step = "│" + "░" * 16 + "▒" * 16 + "█" * 32 + " 4 s (data 1, text 1)"
    expected = [f"1 {step}", "│" + "▁" * 32 + " 2 s", f"2 {step}", f"3 {step}",
                "│" + "▁" * 8 + " 0.5 s", f"4 {step}"]
    assert [line.strip() for line in drawn] == expected
