"""HumanEval+ and MBPP+ are the harness', their programs run in the sandbox; forged answers fail."""

import json
import math
import sys
from itertools import combinations

import pytest

from conftest import asset
from hub_copies import copy_humaneval, needs_lm_eval, write_copy
from isogloss.evaluation import code_tasks, sandbox
from isogloss.evaluation.harness import load_harness_task
from isogloss.evaluation.task_suite import load_suite
from isogloss.flags.task_options import TaskOptions
from test_sandbox import needs_sandbox
from test_tasks import loaded

# Tests as those of HumanEval+ are, which compare by numpy.
BY_NUMPY = """
import numpy as np

def check(candidate):
    assert np.allclose(candidate([0.5, 1.5]), [1.0, 3.0], rtol=1e-07, atol=1e-06)
    np.testing.assert_allclose(candidate([3.0]), [6.0 + 1e-7], atol=1e-06)
    assert not np.allclose(candidate([1.0]), [2.1], rtol=1e-07, atol=1e-06)
    assert not np.allclose(candidate([1.0]), [2.0, 2.0])
"""
DOUBLING = {"task_id": "HumanEval/900", "prompt": "def double(x):\n", "entry_point": "double",
            "canonical_solution": "    return [2 * a for a in x]\n", "test": BY_NUMPY}


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """(folder, {task: {prompt of a test: right program}}); HumanEval stands for HumanEval+."""
    folder = tmp_path_factory.mktemp("code")
    rows = copy_humaneval(folder, [DOUBLING])
    solutions = {"humaneval_plus": {row["prompt"]: row["canonical_solution"] for row in rows}}
    lines = (asset("eval") / "mbpp.jsonl").read_text().splitlines()[10:500:120]
    rows = [row | {"prompt": row["text"]} for row in map(json.loads, lines)]
    write_copy(folder, "evalplus/mbppplus", {"default": {"test": rows}})
    solutions["mbpp_plus"] = {row["text"]: row["code"] for row in rows}
    return folder, solutions


def solution_of(solutions, prompt):
    """Return the right program of the task that a prompt asks for, which is its last one."""
    places = {prompt.rfind(text): solution for text, solution in solutions.items()}
    return places[max(places)]


# --- judging --------------------------------------------------------------------------------------

ASKS = "\nassert f(1) == 2\nassert f(10) == 20\n"
RIGHT = "def f(x):\n    return x * 2\n"
WRONG = {
    "another value": "def f(x):\n    return x + 1\n",
    "no function": "g = 1",
    "an exception": "def f(x):\n    raise ValueError('no')\n",
    "an exit": "raise SystemExit(0)",
    "a hard exit": "import os\ndef f(x):\n    os._exit(0)\n",
    "an interrupt": "raise KeyboardInterrupt",
    "no Python": "]",
    "never ends": "def f(x):\n    while True:\n        pass\n",
    "prints without end": "while True:\n    print('a' * 1000)",
    "prints a verdict": "print('ok', True, '0' * 32)\nraise SystemExit(0)",
}


@needs_sandbox
@pytest.mark.parametrize("name", WRONG)
def test_wrong_and_forged_answers_fail(name, monkeypatch):
    monkeypatch.setattr(code_tasks, "SECONDS", 1)
    assert not code_tasks.passes(WRONG[name] + ASKS)


@needs_sandbox
def test_right_answers_pass():
    for program in (RIGHT, "print('hello')\n" + RIGHT,
                    "from __future__ import annotations\n" + RIGHT,
                    RIGHT + "if __name__ == '__main__':\n    raise ValueError\n"):
        assert code_tasks.passes(program + ASKS), program


def test_pass_at_k_is_the_fraction_of_draws_with_a_right_answer():
    for num_answers in (1, 2, 5, 7):
        for num_right in range(num_answers + 1):
            marks = [True] * num_right + [False] * (num_answers - num_right)
            for k in range(1, num_answers + 1):
                draws = [any(draw) for draw in combinations(marks, k)]
                expected = sum(draws) / len(draws)
                value = code_tasks.pass_at(k, num_answers, num_right)
                assert math.isclose(value, expected, abs_tol=1e-12)
    assert [code_tasks.ks_of(samples) for samples in (1, 5, 10, 20, 200)] == [
        [1], [1, 5], [1, 10], [1, 10, 20], [1, 10, 100, 200]]


# --- as a task ------------------------------------------------------------------------------------


@needs_lm_eval
@needs_sandbox
@pytest.mark.parametrize("task", ["humaneval_plus", "mbpp_plus"])
def test_a_model_is_judged_by_what_it_writes(task, items, monkeypatch):
    """A model that writes the right program for every other sample, and else a wrong one."""
    folder, solutions = items
    model, encoder = loaded(asset("models", "stories260K"))
    options = TaskOptions(data=str(folder), limit=4, samples=2, temperature=1.0)
    suite = load_suite([task], options, encoder)
    asked = []

    def write(model, encoder, prompts, keys, options, **_):
        assert options.temperature == 1 and len(set(keys)) == len(keys) == 8
        asked.extend(prompts)
        texts = []
        for number, prompt in enumerate(prompts):
            right = solution_of(solutions[task], prompt.prompt)
            texts.append("    pass\n" if number % 2 else right)
        return texts

    monkeypatch.setattr("isogloss.evaluation.harness.write_answers", write)
    metrics, records = suite.run(model)
    assert len(asked) == 8  # once, though the harness asks twice
    assert all(prompt.max_new_tokens == (1024 if task == "humaneval_plus" else 256)
               for prompt in asked)
    of_all = "pass@1" if task == "humaneval_plus" else "pass_at_1"
    assert metrics[f"eval/{task}_{of_all}"] == 0.5
    assert metrics[f"eval/{task}_{of_all}_stderr"] == 0
    if task == "humaneval_plus":
        assert metrics["eval/humaneval_plus_pass@2"] == 1
    assert [record["verdict"] for record in records] == ["right"] * 4
    assert all(record["answer"][1] == "    pass\n" for record in records)
    assert suite.run(model, stop=lambda: True) == ({}, [])
    # what the harness itself loads afterwards is its own again
    assert "lm_eval.tasks.humaneval.utils" not in sys.modules
    assert not hasattr(sys.modules.get("evaluate"), "compute")


@needs_lm_eval
def test_without_a_sandbox_code_tasks_are_refused(items, monkeypatch):
    monkeypatch.setattr(sandbox, "why_unavailable", lambda: "no sandbox: apt install bubblewrap")
    options = TaskOptions(data=str(items[0]), limit=1)
    with pytest.raises(ValueError, match=r"humaneval_plus runs what the model writes: no sandbox: "
                       r"apt install bubblewrap; .* with allow_unsafe_code"):
        load_harness_task("humaneval_plus", options)
    unsafe = TaskOptions(data=str(items[0]), limit=1, allow_unsafe_code=True)
    judge = load_harness_task("humaneval_plus", unsafe).judge
    assert judge.run(bool, [RIGHT + ASKS, WRONG["another value"] + ASKS]) == [True, False]
