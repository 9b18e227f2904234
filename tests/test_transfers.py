"""Numbers that the host reads late, and batches that come in beside the device's work."""

import json
import os
import signal

import pytest
import torch

import ranks
from isogloss import distill, once_in_a_while
from isogloss.errors import DataError
from isogloss.job.transfers import Readback
from jobs import ds_config, losses_of, run_distill, write_corpus


def test_what_is_read_back_is_what_was_there_when_it_was_asked_for():
    sums = torch.tensor([[1.0, 2.0], [3.0, 1 / 3]], dtype=torch.float64)
    late = Readback(sums)
    norm = torch.tensor(2.5)
    late_norm = Readback(norm)
    sums.zero_()
    norm += 1
    assert late.read() == late.read() == [[1.0, 2.0], [3.0, 1 / 3]]
    assert late_norm.read() == 2.5


def lines_on_disk(output):
    """Return what is in metrics.jsonl: steps, those of evaluations negative."""
    path = output / "metrics.jsonl"
    steps = []
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        steps.append(line["step"] if "loss" in line else -line["step"])
    return steps


def run_and_look(argv, output, trouble=None):
    """Run a command line; return (exit code, [(what begins, lines on disk by then)]).

    Args:
        trouble: (step, function that is called when it begins).
    """
    seen = []
    patch = pytest.MonkeyPatch()

    def look_before(module, name):
        function = getattr(module, name)

        def look(*args, **options):
            seen.append((name, lines_on_disk(output)))
            if trouble and name == "next_micro_batches" and args[2] == trouble[0]:
                trouble[1]()
            return function(*args, **options)

        patch.setattr(module, name, look)

    look_before(distill, "next_micro_batches")
    for name in ("save_checkpoint", "run_evaluation"):
        look_before(once_in_a_while, name)
    try:
        [code] = run_distill([[*argv, f"--output_dir={output}"]])
    except RuntimeError as error:
        code = str(error)
    patch.undo()
    return code, seen


def refuse_data():
    raise DataError("row 7 is empty")


def break_device():
    raise RuntimeError("device-side assert")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def run_jobs(argv, folder):
    return {
        "whole": run_and_look(argv, folder / "whole"),
        "refused": run_and_look(argv, folder / "refused", (5, refuse_data)),
        "broken": run_and_look(argv, folder / "broken", (4, break_device)),
    }


@pytest.mark.slow
def test_metrics_are_read_a_step_late_and_before_whatever_needs_them(models, texts, tmp_path):
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", "--steps=6", "--eval_rows=2",
            f"--data={write_corpus(tmp_path, texts, 20)}", "--max_length=40", "--num_workers=0",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 1, 2, 1)}", "--eval_every=2",
            "--save_every=3"]
    killed = ranks.start(1, run_and_look, argv, tmp_path / "killed", (6, kill))
    [jobs] = ranks.run(1, run_jobs, argv, tmp_path)
    code, seen = jobs["whole"]
    assert code == 0
    assert seen == [
        ("run_evaluation", []),
        ("next_micro_batches", [0]),
        ("next_micro_batches", [0]),  # step 2 begins, step 1 is not read yet
        ("run_evaluation", [0, 1, 2]),
        ("next_micro_batches", [0, 1, 2, -2]),
        ("save_checkpoint", [0, 1, 2, -2, 3]),
        ("next_micro_batches", [0, 1, 2, -2, 3]),
        ("run_evaluation", [0, 1, 2, -2, 3, 4]),
        ("next_micro_batches", [0, 1, 2, -2, 3, 4, -4]),
        ("next_micro_batches", [0, 1, 2, -2, 3, 4, -4]),
        ("run_evaluation", [0, 1, 2, -2, 3, 4, -4, 5, 6]),
        ("save_checkpoint", [0, 1, 2, -2, 3, 4, -4, 5, 6, -6]),
    ]
    # an error that ends the job lets the step before be written, and stays the error
    assert jobs["refused"][0] == 2 and lines_on_disk(tmp_path / "refused")[-1] == -4
    assert jobs["broken"][0] == "device-side assert"
    assert lines_on_disk(tmp_path / "broken") == [0, 1, 2, -2, 3]
    # a killed job lacks the line of its last step; resumed, it has each line once
    killed[0][0].join()
    assert lines_on_disk(tmp_path / "killed") == [0, 1, 2, -2, 3, 4, -4]
    whole = losses_of(tmp_path / "whole", -1)
    outputs = [tmp_path / name for name in ("killed", "refused", "broken")]
    resumed = [[*argv, f"--output_dir={output}"] for output in outputs]
    assert ranks.run(1, run_distill, resumed) == [[0, 0, 0]]
    for output in outputs:
        assert losses_of(output, -1) == whole, output
