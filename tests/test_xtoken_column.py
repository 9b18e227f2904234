"""recipes/xtoken_column: its table, its hours, and the whole of it with tiny models."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys

import pytest

from conftest import ROOT
from hub_copies import needs_lm_eval
from isogloss.command import PlanArgs
from isogloss.tasks import as_markdown
from jobs import losses_of
from launched import as_in_a_terminal, processes_of, wait_until
from recipes.xtoken_column import rehearsal, run
from recipes.xtoken_column.run import ARMS, Args
from recipes.xtoken_column.table import COLUMNS, PUBLISHED, SOURCES, read_table

# X-Token's column that the table leaves out, of the rows of PUBLISHED that have an average
MATH = 5.48, 6.90, 7.96, 9.02, 8.32, 8.16


def rows_of(table):
    """Return {(run, by): {column: cell}} of the table that is printed."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                      for line in table.splitlines() if line.startswith("|")]
    return {tuple(row[:2]): dict(zip(head[2:], row[2:], strict=True)) for row in rows}


def test_the_table_has_what_is_judged_beside_what_is_published(tmp_path, capsys):
    judged = {"mmlu": {"acc": [0.3912, 0.0041]}, "gsm8k": {"exact_match_strict-match": [0.06, None],
                                                            "exact_match_flexible-extract": [1, 0]}}
    (tmp_path / "p_kl").mkdir()
    (tmp_path / "p_kl" / "tasks.json").write_text(json.dumps(judged))
    run.main(Args(table=True, folder=str(tmp_path)))
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    ours = rows["P-KL from Qwen3-4B", "ours"]
    assert ours == dict.fromkeys([*COLUMNS, "average"], "") | {"MMLU": "39.12 ± 0.41",
                                                               "GSM8K": "6.00"}
    for name, arm in ARMS.items():
        assert name == "p_kl" or not any(rows[arm.row, "ours"].values())
    assert rows["P-KL from Qwen3-4B", "NeMo RL, one"]["MMLU"] == "39.23"
    two = rows[ARMS["two"].row, "X-Token"]
    assert (two["MMLU"], two["WinoGrande"], two["ARC-Easy"], two["average"]) == (
        "46.32", "63.30", "", "40.48")
    assert len(rows) == len(ARMS) + len(PUBLISHED)
    for source in SOURCES:
        assert f"- {source}: https://" in printed
    assert not list(tmp_path.glob("table.md"))


def test_published_averages_are_those_of_their_rows():
    """Of the four columns that are here and MATH: a digit that is wrong would show."""
    averaged = [values.replace("- ", "").split() for _, _, values in PUBLISHED if "-" in values]
    for math, values in zip(MATH, averaged, strict=True):
        *columns, average = map(float, values)
        assert statistics.mean([*columns, math]) == pytest.approx(average, abs=0.011)


def test_results_are_those_that_the_command_prints():
    metrics = {"eval/mmlu_acc": 0.25, "eval/mmlu_acc_stderr": 0.01, "eval/mmlu_seconds": 9.0,
               "eval/arc_easy_acc": 0.5, "eval/arc_easy_acc_norm": 0.75, "eval/arc_easy_seconds": 1}
    printed = "a warning\n" + as_markdown(["mmlu", "arc_easy"], metrics) + "\n"
    assert read_table(printed) == {"mmlu": {"acc": [0.25, 0.01]}, "arc_easy": {
        "acc": [0.5, None], "acc_norm": [0.75, None]}}


def test_hours_follow_from_weights(monkeypatch):
    """By hand: operations of students and teachers for 96 samples of 2,048, on 8 and 16 GPUs."""
    from isogloss.plan import shape_of

    monkeypatch.chdir(ROOT)
    names = run.STUDENT, "Qwen/Qwen3-4B", "microsoft/Phi-4-mini-instruct", "meta-llama/Llama-3.2-3B"
    P, Q, R, S = [shape_of("student", name).weights for name in names]
    rows = [line.split("|") for line in run.plan_table(Args(tflops=500.0, mfu=0.2)).splitlines()]
    expected = {"text": 8 * P, "p_kl": 8 * P + 2 * Q, "piece_kl": 8 * P + 2 * Q,
                "two": 8 * P + 2 * (R + S)}
    for cells, operations in zip(rows[2:], [*expected.values(), sum(expected.values())]):
        for gpus, hours in ((8, cells[4]), (16, cells[7])):
            seconds = 100 * operations * 96 * 2048 / (gpus * 0.2 * 500e12)
            assert float(hours) == pytest.approx(seconds / 3600, abs=5e-4)
    assert "20% of 500 TFLOP/s" in rows[-1][0]
    assert PlanArgs.mfu == Args.mfu
    with pytest.raises(ValueError, match="--arms text,p-kl: expected some of before, text, p_kl"):
        Args(arms="text,p-kl")


def started(folder, arms):
    """Start the rehearsal as a user does, in a session of its own."""
    command = [sys.executable, "-m", "recipes.xtoken_column.run", "--rehearse", f"--arms={arms}"]
    with open(folder / "printed.txt", "w") as file:
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT,
                                start_new_session=True, preexec_fn=as_in_a_terminal)


@needs_lm_eval
@pytest.mark.slow
def test_a_rehearsal_that_is_killed_goes_on_to_its_table(tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    folder = tmp_path / "runs" / "xtoken_column_rehearsal"
    text_of = (tmp_path / "printed.txt").read_text
    first = started(tmp_path, "p_kl")
    wait_until(lambda: list(folder.glob("p_kl/checkpoints/step_*")) or first.poll() is not None,
               text_of)
    for process in processes_of(first.pid):  # all at once, as where a machine goes down
        os.kill(process, signal.SIGKILL)
    first.wait()
    assert not (folder / "p_kl" / "student").exists(), "it was too fast to be killed"
    assert not list(folder.glob("*/tasks.json"))

    arms = "before,p_kl,two"  # each takes half a minute
    assert started(tmp_path, arms).wait() == 0, text_of()
    assert re.findall(r"^(\w+): is trained", text_of(), re.M) == ["p_kl", "two"]
    assert re.findall(r"^goes on from .*/(p_kl)/checkpoints/step_", text_of(), re.M) == ["p_kl"]
    for name in ("p_kl", "two"):
        steps = [line["step"] for line in losses_of(folder / name) if "loss" in line]
        assert steps == list(range(1, rehearsal.STEPS + 1)), name
    # each is judged itself: another model is of another opinion
    for path in ("items_mmlu.jsonl", "items_gsm8k.jsonl"):
        assert len({(folder / name / path).read_text() for name in arms.split(",")}) == 3
    rows = rows_of((folder / "table.md").read_text())
    for name, arm in ARMS.items():
        pattern = r"\d+\.\d\d( ± \d+\.\d\d)?" if name in arms.split(",") else ""
        cells = rows[arm.row, "ours"]
        assert all(re.fullmatch(pattern, cells[column]) for column in COLUMNS), name

    assert started(tmp_path, arms).wait() == 0, text_of()
    assert "is trained" not in text_of() and "is judged" not in text_of()
    assert rows_of(text_of()) == rows
