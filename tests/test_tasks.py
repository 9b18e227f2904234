"""tasks.py gives what lm-evaluation-harness gives, item by item, whatever the ranks and batches.

tests/golden/README.md describes the harness's outputs.
"""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch

from conftest import GOLDEN, asset
from isogloss.task_items import WrittenItem
from isogloss.task_model import TaskEncoder
from isogloss.tasks import (
    TaskOptions,
    comparable_number,
    last_number,
    load_tasks,
    marked_number,
    run_tasks,
)

EXAMPLES = 40  # of GSM8K, from the end of the test split; see benchmarks/tasks.py
NEW_TOKENS = 64
ENTRIES = json.loads((GOLDEN / "tasks.json").read_text())
CASES = [entry for entry in ENTRIES if "model" in entry]


def loaded(path):
    """Return (model, TaskEncoder) of a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), TaskEncoder(AutoTokenizer.from_pretrained(path), model.config)


@pytest.fixture(scope="module")
def evaluated_models():
    """{name: (model, encoder)} of the golden numbers."""
    names = {entry["model"] for entry in CASES}
    return {name: loaded(asset("models", name)) for name in names}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The evaluation data, with a training split of GSM8K."""
    folder = tmp_path_factory.mktemp("data") / "eval"
    source = asset("eval")
    folder.mkdir()
    (folder / "mmlu").symlink_to(source / "mmlu")
    for name in ("lambada_openai.jsonl", "gsm8k_test.jsonl"):
        shutil.copy(source / name, folder)
    rows = (source / "gsm8k_test.jsonl").read_text().splitlines()
    (folder / "gsm8k_train.jsonl").write_text("\n".join(rows[-EXAMPLES:]) + "\n")
    return folder


def evaluated(pair, name, options, rank=0, size=1, **more):
    """Return (task, metrics, records) of one task."""
    model, encoder = pair
    tasks = load_tasks([name], options, encoder, rank, size)
    return tasks[0], *run_tasks(tasks, model, encoder, options, **more)


# --- the harness ----------------------------------------------------------------------------------


def texts_of(item):
    """List the texts that the harness sends to a model for an item."""
    if isinstance(item, WrittenItem):
        return [item.prompt]
    texts = []
    for continuation in item.continuations:
        texts += [item.context, continuation]
    return texts


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: "{model}-{task}-{shots}".format(**entry))
def test_equals_the_harness(evaluated_models, data, entry):
    options = TaskOptions(data=str(data), shots=entry["shots"], limit=entry["limit"], batch_size=5,
                          max_new_tokens=NEW_TOKENS)
    task, metrics, records = evaluated(evaluated_models[entry["model"]], entry["task"], options)
    assert len(records) == len(entry["items"])
    for item, record, golden in zip(task.items, records, entry["items"]):
        digest = hashlib.sha256("\0".join(texts_of(item)).encode()).hexdigest()[:16]
        assert digest == golden["sha256"], "another prompt"
        if "text" in golden:
            assert record["answer"] == golden["text"]
            continue
        np.testing.assert_allclose(record["nats"], np.negative(golden["logp"]), rtol=0, atol=1e-4)
        if task.name == "lambada":
            assert (record["verdict"] == "right") == golden["is_greedy"][0]
        else:
            best = int(np.argmax(golden["logp"]))
            assert record["prediction"] == item.continuations[best].strip()
    for ours, theirs in (("acc", "acc,none"), ("acc_norm", "acc_norm,none"),
                         ("acc", "exact_match,flexible-extract"),
                         ("acc_strict", "exact_match,strict-match")):
        if theirs in entry["metrics"]:
            value = metrics[f"eval/{task.name}_{ours}"]
            assert math.isclose(value, entry["metrics"][theirs], abs_tol=1e-9), ours


def test_finds_the_numbers_that_the_harness_finds():
    [entry] = [entry for entry in ENTRIES if entry["task"] == "numbers"]
    for case in entry["items"]:
        reference = comparable_number(case["reference"])
        for find, name in ((last_number, "flexible-extract"), (marked_number, "strict-match")):
            number, is_right = case[name]
            assert find(case["text"]) == number, case
            assert (comparable_number(number) == reference) == is_right, case
