"""benchmarks/gpu.py without a GPU: its one line, its outcomes, and what a CPU can do of it."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu, gpu_job
from benchmarks.gpu import Skipped
from conftest import ROOT


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
    for function, key in (("waits_between_steps", "loss"), ("timed_steps", "step_seconds")):
        [figures] = gpu_job.on_ranks(1, function, str(tmp_path))
        assert figures[key] > 0
    with pytest.raises(RuntimeError, match="no_such_function"):
        gpu_job.on_ranks(1, "no_such_function")
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
