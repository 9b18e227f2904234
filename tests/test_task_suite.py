"""A job of distill.py judges its student by tasks, in every layout, and learns the same with it."""

import itertools
import json
import math
import os
import signal

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from conftest import asset
from hub_copies import copy_gsm8k, copy_lambada, needs_lm_eval
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.task_suite import TaskSuite, load_suite
from isogloss.flags.task_options import TaskOptions
from jobs import ds_config, losses_of, run_distill, write_corpus

# five items, so that ranks have unequal numbers of them, of unequal lengths
FLAGS = ["--eval_tasks=lambada,gsm8k", "--eval_task_every=2"]
NAMES = "lambada_acc", "lambada_perplexity", "gsm8k_exact_match_flexible-extract"


def option(**options):
    return f"--eval_task_options={json.dumps(options)}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with few items of each task."""
    folder = tmp_path_factory.mktemp("eval")
    copy_lambada(folder, 5)
    copy_gsm8k(folder, 5)
    return folder


@pytest.fixture(scope="module")
def job(models, texts, data, tmp_path_factory):
    """A folder, and flags of jobs of 8 samples a step that evaluate by tasks."""
    folder = tmp_path_factory.mktemp("task_jobs")
    return folder, [
        f"--student={models[0]}", f"--teacher={models[1]}", "--max_length=96", "--steps=2",
        f"--data={write_corpus(folder, texts, 30)}", "--num_workers=0",
        option(data=str(data), shots=0)]


def config_of(job, stage, micro_batch_size, steps):
    path = job[0] / f"zero{stage}-{micro_batch_size}-{steps}.json"
    ds_config(path, stage, micro_batch_size, steps)
    return f"--ds_config={path}"


def items_of(output):
    """Return {(step, task, id, rule): (prediction, verdict, nats)} of eval_tasks.jsonl."""
    items = {}
    for line in (output / "eval_tasks.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = record["step"], record["task"], record["id"], record["rule"]
        assert key not in items
        items[key] = record["prediction"], record["verdict"], record.get("nats", [])
    return items


@needs_lm_eval
@pytest.mark.slow
def test_values_and_items_are_the_same_in_every_layout(job, data):
    folder, argv = job
    runs = {
        "one": (1, config_of(job, 2, 8, 1)),
        "batches": (1, config_of(job, 2, 8, 1), option(data=str(data), shots=0, batch_size=3)),
        "copies": (2, config_of(job, 3, 4, 1)),
        "hooks": (2, config_of(job, 3, 4, 1), "--rollout_replica=false"),
        "shards": (2, config_of(job, 1, 8, 1), "--sequence_parallel=2"),
    }
    by_ranks = {}
    for name, (num_ranks, *flags) in runs.items():
        command = [*argv, *FLAGS, *flags, f"--output_dir={folder / name}"]
        by_ranks.setdefault(num_ranks, []).append(command)
    for num_ranks, commands in by_ranks.items():
        codes = ranks.run(num_ranks, run_distill, commands)
        assert codes == [[0] * len(commands)] * num_ranks
    expected = [line for line in losses_of(folder / "one", -1) if "eval/lambada_acc" in line]
    assert [line["step"] for line in expected] == [0, 2]
    items = items_of(folder / "one")
    assert len(items) == 2 * (5 + 2 * 5)
    for name in runs:
        lines = [line for line in losses_of(folder / name, -1) if "eval/lambada_acc" in line]
        for one, other in zip(expected, lines, strict=True):
            for key in NAMES:
                assert math.isclose(one[f"eval/{key}"], other[f"eval/{key}"], rel_tol=1e-3), name
        others = items_of(folder / name)
        assert others.keys() == items.keys(), name
        for key, (prediction, verdict, nats) in items.items():
            # training in another layout rounds otherwise, so written texts are compared at step 0
            if key[0] == 0:
                assert others[key][:2] == (prediction, verdict), (name, key)
            assert others[key][2] == pytest.approx(nats, rel=1e-4, abs=1e-4), (name, key)


@needs_lm_eval
@pytest.mark.slow
def test_what_is_learned_is_bit_identical_without_tasks_and_held_out_rollouts(job):
    """With draws of programs and rollouts: all random states are as without."""
    folder, argv = job
    argv = [*argv, "--on_policy=0.5", "--rollout_tokens=16", "--eval_rows=6", "--eval_every=1",
            config_of(job, 2, 4, 2)]
    with_tasks = [*argv, *FLAGS, "--rollout_eval=6", f"--output_dir={folder / 'with'}"]
    without = [flag for flag in argv if "eval_task" not in flag]
    without += ["--rollout_eval=0", f"--output_dir={folder / 'without'}"]
    assert ranks.run(1, run_distill, [with_tasks, without]) == [[0, 0]]
    curves = []
    for name in ("with", "without"):
        lines = [line for line in losses_of(folder / name, -1) if "loss" in line]
        curves.append([{key: line[key] for key in line if "logp_gap" not in key} for line in lines])
    assert len(curves[0]) == 2
    assert curves[0] == curves[1]
    evaluations = [line for line in losses_of(folder / "with", -1) if "eval/kd" in line]
    assert len(evaluations) == 3
    assert all("eval/rollout/reverse_kl_per_byte" in line for line in evaluations)


def stopped_by_tasks(stopped, straight):
    """Run a job that is asked to end at its second evaluation by tasks, again, and another one."""
    run = TaskSuite.run
    calls = itertools.count(1)

    def run_or_stop(self, *args, **options):
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, *args, **options)

    TaskSuite.run = run_or_stop
    return run_distill([stopped, stopped, straight])


@needs_lm_eval
@pytest.mark.slow
def test_tasks_that_a_signal_interrupts_are_done_by_the_run_that_resumes(job):
    folder, argv = job
    argv = [*argv, config_of(job, 2, 8, 1), "--eval_tasks=lambada", "--eval_task_every=2",
            "--steps=4"]
    codes = ranks.run(1, stopped_by_tasks, [*argv, f"--output_dir={folder / 'stopped'}"],
                      [*argv, f"--output_dir={folder / 'straight'}"])
    assert codes == [[128 + signal.SIGTERM, 0, 0]]
    lines = losses_of(folder / "straight", -1)
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4]
    assert losses_of(folder / "stopped", -1) == lines
    assert items_of(folder / "stopped") == items_of(folder / "straight")


@needs_lm_eval
def test_an_evaluation_gives_up_where_the_job_ends(data):
    path = asset("models/stories260K")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.train()
    suite = load_suite(["lambada", "gsm8k"], TaskOptions(data=str(data), shots=0, limit=4),
                       TaskEncoder(AutoTokenizer.from_pretrained(path), model.config))
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 3

    assert suite.run(model, stop=stop) == ({}, [])
    assert len(asked) == 4  # at the fourth pass
    assert model.training
    metrics, records = suite.run(model)
    assert metrics["eval/gsm8k_seconds"] > 0
    assert len(records) == 4 + 2 * 4
