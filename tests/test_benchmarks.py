"""Scripts of benchmarks/: each starts, those that take seconds at their smallest size run.

Of gpu.py without a GPU: its one line, its outcomes, and what a CPU can do of it.
"""

import json
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_job
from benchmarks.gpu import Skipped
from conftest import ROOT
from isogloss.models.compiler import missing_compiler

# gpu_job.py holds checks of gpu.py and rivals.py losses of square.py; they are no scripts
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
SCRIPTS.remove("gpu_job.py")
SCRIPTS.remove("rivals.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_is_for(script, monkeypatch, capsys):
    path = str(ROOT / "benchmarks" / script)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code in (None, 0)
    printed = capsys.readouterr()
    assert script.removesuffix(".py") in printed.out + printed.err


def test_a_loss_is_measured(capsys):
    from benchmarks.loss import main

    for name, path in product(gpu.TABLE_LOSSES, ("tiled", "plain")):
        main(name, tokens=8, V=200, W=300, H=8, teacher_H=8, path=path, times=1, here=True)
        assert json.loads(capsys.readouterr().out)["loss"] == name


@pytest.fixture
def square(tmp_path, monkeypatch):
    """Return the module with little of everything, whose results are in a folder of their own."""
    from benchmarks import square
    from isogloss.objective.loss_table import LOSSES

    losses = dict(LOSSES)
    square.corpus.cache_clear()
    whole = square.corpus()
    rows = {"choose": 6, "report": 6, "train": 400, "documentation": 40}
    small = {part: whole[part][:num] for part, num in rows.items()}
    for name, of in square.SCALES.items():
        monkeypatch.setitem(square.SCALES, name, of._replace(
            runs=tmp_path / name, sizes=dict(bytes=400, digits=300), teacher=(16, 16, 1, 1),
            student=(16, 16, 1, 1), teacher_steps=3, kept_every=1,
            regimes={"little": square.Regime(16, 2, checks=2),
                     "new": square.Regime(16, 2, is_fresh=False),
                     "above": square.Regime(16, 2)}))
    for name, value in {
        "corpus": lambda: small, "MATCHED": 9.0, "FIRST_STEPS": 2, "SEEDS_TO_CHOOSE": (100,),
        "WEIGHTS": (1.0,), "LIGHTEST": 1.0, "HEAVIEST": 1.0,
        "KINDS": {kind: square.KINDS[kind] for kind in ("bytes", "digits")},
    }.items():
        monkeypatch.setattr(square, name, value)
    square.use("small", "little")
    for cached in (square.encoder, square.teacher, square.hidden, square.held_out):
        cached.cache_clear()
    yield square
    square.use("small", "little")
    LOSSES.clear()  # of the rivals, which other tests would take for the job's own
    LOSSES.update(losses)
    for cached in (square.encoder, square.teacher, square.hidden, square.held_out):
        cached.cache_clear()


def test_a_square_is_compared_and_goes_on(square, tmp_path, capsys, models):
    def run(**flags):
        square.main(square.Args(**{"losses": "piece_kl,bpm", "seeds": 1, "weight": 1.0,
                                   "processes": 1} | flags))
        return capsys.readouterr().out

    table = run()
    assert "student digits, teacher bytes" in table and "share of an equal" in table
    assert table.count("| bpm ") == 2 + 1 and table.count("| forward_kl ") == 2
    results = tmp_path / "small" / "results"
    trained = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    lines = run().splitlines()
    assert table.splitlines()[-len(lines):] == lines  # but for what is said of new teachers
    assert trained == {path: path.stat().st_mtime_ns for path in results.iterdir()}
    assert "| csd " in run(losses="piece_kl,csd", regime="new", pairs="digits-bytes",
                                 equal_seconds=True, weight=0.0, seeds=2)
    assert "teacher teacher" in run(regime="above", teacher=str(models[1]), losses="simct",
                                    pairs=f"digits-{models[1]}")
    with pytest.raises(ValueError, match="go together"):
        run(teacher="x")


def test_a_table_has_the_weights_and_seconds_of_the_next_one(square, tmp_path, capsys):
    """Half as long as the first loss takes twice as many steps; nothing is chosen or timed."""
    rows = [{"loss": loss, "student": "digits", "teacher": "bytes", "weight": weight,
             "seconds": seconds} for loss, weight, seconds in (("piece_kl", 0.5, 8), ("alm", 2, 4))]
    (tmp_path / "table.json").write_text(json.dumps({"table": rows}))
    square.main(square.Args(losses="piece_kl,alm", seeds=2, pairs="digits-bytes", processes=1,
                            equal_seconds=True, table=str(tmp_path / "table.json")))
    out = capsys.readouterr().out.splitlines()
    table = json.loads(Path(out[-1]).read_text())
    assert [(row["loss"], row["weight"], row["steps"]) for row in table["table"]] == [
        ("piece_kl", 0.5, 2), ("alm", 2, 4)]
    assert table["seeds"] == 2 and [len(row["bits"]) for row in table["table"]] == [2, 2]
    assert len(list((tmp_path / "small" / "results").iterdir())) == 2 * (1 + 1 + 1)  # with the text


def test_what_a_gpu_trains_goes_on_where_its_minutes_ended(square, tmp_path, capsys, monkeypatch):
    """The large scale reads its teacher in each step; without time no run is made."""
    flags = dict(scale="large", losses="piece_kl,csd", regime="new", seeds=1, weight=1.0,
                 pairs="digits-bytes", processes=1)
    square.main(square.Args(minutes=1e-9, **flags))
    captured = capsys.readouterr()
    assert "3 runs" in captured.err and "student" not in captured.out
    assert sorted(path.name for path in (tmp_path / "large").glob("teacher-*")) == [
        "teacher-bytes-3.pt", "teacher-digits-3.pt"]
    square.main(square.Args(**flags))
    assert "student digits, teacher bytes" in capsys.readouterr().out
    assert not list((tmp_path / "large").glob("hidden-*"))


def test_what_teachers_and_students_are_good_for_cancels_in_a_share(square):
    of_teacher, of_student, different = {"bytes": 0.3, "digits": -0.1}, {"bytes": 0, "digits": 1}, \
        -0.2
    found = {}
    for a in of_student:
        for b in of_teacher:
            bits = 2.0 + of_student[a] + of_teacher[b] + different * (a != b)
            found["x", (a, b)] = square.Gains([bits, 2 * bits], 1.0, 1.0, 1)
    diagonal = 2.0 + 0.5 + 0.1
    assert square.shares(found, "x") == pytest.approx([1 + different / diagonal] * 2)


def test_a_weight_at_an_edge_asks_for_more(square, monkeypatch):
    """The best of 1 and 4 is the larger, then the larger again, until one is between two others."""
    monkeypatch.setattr(square, "WEIGHTS", (1.0, 4.0))
    monkeypatch.setattr(square, "HEAVIEST", 64.0)
    study = square.Study(square.Args())
    tried = []
    while (best := study.weight_of(("digits", "bytes"), "alm")) is None:
        assert study.missing
        for run in study.missing:
            tried.append(run.weight)
            bits = (run.weight - 9.0) ** 2
            square.write(run.path, lambda part: part.write_text(json.dumps({"choose": bits})))
        study.missing = []
    assert best == 8.0 and tried == [1.0, 4.0, 8.0, 16.0]


# --- gpu.py ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--checks", "compiled,loss_table"]])
def test_without_a_gpu_it_ends_in_one_line(argv, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *argv])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert str(end.value).startswith("no GPU: torch ")
    assert "\n" not in str(end.value)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_an_unknown_check_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--checks", "ipc,compiled"])
    with pytest.raises(SystemExit, match="--checks ipc: expected some of ipc_same_device, "):
        gpu.main()


def test_every_outcome_has_its_line(monkeypatch):
    def skipping():
        raise Skipped("needs 2 GPUs, and there are 0")

    def breaking():
        raise RuntimeError("CUDA error 700")

    for check, expected in (
        (lambda: (True, {"n": 1}), {"result": "pass", "n": 1}),
        (lambda: (False, {"n": 2}), {"result": "fail", "n": 2}),
        (skipping, {"result": "skip", "reason": "needs 2 GPUs, and there are 0"}),
        (breaking, {"result": "fail", "reason": "RuntimeError: CUDA error 700"}),
    ):
        line = json.loads(json.dumps(gpu.outcome(check)))
        assert expected.items() <= line.items()
    assert "breaking" in line["traceback"]


def test_shared_memory_is_checked_in_both_directions():
    right, figures = gpu.share_between("cpu", "cpu")
    assert right
    assert figures["bytes"][0] == 4
    assert figures["read"] == figures["written"] == 8 * [True]


@pytest.mark.slow
def test_compiled_divergences_are_compared_with_float64(monkeypatch):
    if missing := missing_compiler():
        pytest.skip(missing)
    monkeypatch.setattr(gpu, "DIVERGENCES", ["generalized_jsd"])
    arguments = dict(rows=2, V=11, device="cpu", dtypes=[torch.float32])
    passed, figures = gpu.compiled(**arguments)
    assert passed
    assert [line["two_runs_equal"] for line in figures.values()] == [True]
    # the comparison sees a wrong gradient
    monkeypatch.setattr(gpu, "loss_compiler", lambda *_: lambda function: lambda *arguments: (
        1.001 * function(*arguments)[0], 0))
    assert not gpu.compiled(**arguments)[0]


@pytest.mark.slow
def test_whole_jobs_are_checked_and_profiled(tmp_path):
    """Of what a GPU shows there is nothing on a CPU, but the jobs run, and their errors arrive."""
    gpu_job.prepare(tmp_path)
    for function, key in ((gpu_job.waits_between_steps, "loss"),
                          (gpu_job.timed_steps, "step_seconds")):
        [figures] = gpu_job.on_ranks(1, function, str(tmp_path))
        assert figures[key] > 0
    with pytest.raises(RuntimeError, match="no_such_folder"):
        gpu_job.on_ranks(1, gpu_job.step_gradients, "no_such_folder")
    flags = [f"--student={tmp_path / 'student'}", f"--teacher={tmp_path / 'teacher'}",
             f"--data={tmp_path / 'corpus.jsonl'}", "--learning_rate=1e-4", "--steps=3",
             "--max_length=64", "--num_workers=0", f"--output_dir={tmp_path / 'run'}"]
    command = [sys.executable, ROOT / "benchmarks" / "step.py", "--step=2", "--", *flags]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in printed.splitlines() if line.startswith("{")]
    figures = json.loads(line)
    assert figures["step"] == 2 and figures["tokens_per_second"] > 0
    assert "aten::mm" in printed and "waits" not in figures


def test_gaps_lie_between_kernels_that_overlap():
    busy, gaps = gpu_job.busy_and_gaps([(0, 2), (1, 3), (5, 9), (6, 7), (9, 10)])
    assert (busy, gaps) == (8, [2])
