"""The command of tasks and wrong input; values are compared in test_harness.py.

Ranks and batches are those of test_task_suite.py.
"""

import json
import math
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import ROOT
from hub_copies import HAS_LM_EVAL, needs_lm_eval, write_copy
from isogloss import tasks
from isogloss.command import TaskArgs, tool
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.task_suite import load_suite
from isogloss.flags.task_options import TaskOptions
from wrong_input import error_line


def loaded(path):
    """Return (model, TaskEncoder) of a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), TaskEncoder(AutoTokenizer.from_pretrained(path), model.config)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of copies of data sets of 13 rows."""
    folder = tmp_path_factory.mktemp("files")
    rows = [{"text": f"The value of {'the name and ' * number}the index"} for number in range(13)]
    write_copy(folder, "EleutherAI/lambada_openai", {"default": {"test": rows}})
    rows = [{"question": "How many? " * (1 + number % 5), "answer": f"Some.\n#### {number}"}
            for number in range(13)]
    write_copy(folder, "openai/gsm8k", {"main": {"test": rows, "train": rows[:4]}})
    return folder


ALL = "lambada", "gsm8k"


@needs_lm_eval
def test_modes_gradients_and_random_states_stay(models, files):
    """Training goes on as if nothing had been evaluated, and dropout does not reach a task."""
    model, encoder = loaded(models[0])
    options = TaskOptions(data=str(files), limit=4, shots=2, max_new_tokens=5)
    suite = load_suite(list(ALL), options, encoder)
    expected, _ = suite.run(model)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.model.layers[0].eval()  # as a frozen layer may be
    modes = [module.training for module in model.modules()]
    loss = model(input_ids=torch.tensor([[3, 4, 5]])).logits.square().mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    metrics, _ = suite.run(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert [module.training for module in model.modules()] == modes
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    without_times = [{key: value for key, value in of_run.items() if not key.endswith("_seconds")}
                     for of_run in (metrics, expected)]
    assert without_times[0] == without_times[1]


# --- the command line -----------------------------------------------------------------------------


def verdicts_of(path):
    """Return {(task, item, rule): (prediction, verdict)} of a file of records."""
    verdicts = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert {"task", "id", "prediction", "verdict"} <= record.keys()
        assert "nats" in record or {"answer", "rule"} <= record.keys()
        key = record["task"], record["id"], record["rule"]
        verdicts[key] = record["prediction"], record["verdict"]
    return verdicts


@needs_lm_eval
@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_records(models, files, tmp_path, capsys):
    """On two ranks, as torchrun starts them, the same: 13 items, unequal numbers of them."""
    words = [f"--model={models[0]}", "--tasks=lambada,gsm8k", f"--data={files}",
             "--shots=2", "--max_new_tokens=20"]
    tool("tasks", [*words, f"--output={tmp_path / 'one.jsonl'}"])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[0].replace(" ", "") == "|task|metric|value|stderr|seconds|"
    expected_names, expected_numbers = cells_of(printed.out)
    assert expected_names == [("lambada", "perplexity"), ("lambada", "acc"),
                              ("gsm8k", "exact_match_strict-match"),
                              ("gsm8k", "exact_match_flexible-extract")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node", "2", "-m", "isogloss.tasks"]
    done = subprocess.run([*launcher, *words, f"--output={tmp_path / 'two.jsonl'}"], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    names, numbers = cells_of(done.stdout)
    assert names == expected_names
    assert numbers == pytest.approx(expected_numbers, rel=1e-4)  # batches differ in rounding
    verdicts = verdicts_of(tmp_path / "one.jsonl")
    assert verdicts == verdicts_of(tmp_path / "two.jsonl") and len(verdicts) == 13 + 2 * 13


def cells_of(table):
    """Return (names, numbers) in the lines of a table, without seconds."""
    names, numbers = [], []
    for line in table.splitlines()[2:]:
        task, metric, value, error, _ = [cell.strip() for cell in line.strip("|").split("|")]
        names.append((task, metric))
        numbers += [float(value), float(error)]
    return names, numbers


# Flags that are wrong with --tasks=mmlu, and what is said of them.
WRONG = {
    "--tasks=mmul": "unknown task 'mmul'; did you mean mmlu?",
    "--tasks=lm_eval:no_such,": "unknown task ''; expected mmlu, ",
    "--tasks=mmlu,mmlu": "task mmlu is named twice",
    "--data={files}/none": "none does not exist; expected a folder",
    "--shots=-2": "--shots -2: expected -1 or more",
    "--data={files} --batch_size=0": "--batch_size 0: expected 1 or more",
    "--tasks=gsm8k --temperature=1e300": "--temperature 1e+300: expected 1000.0 or less",
    "--tasks=gsm8k --temperature=1e-30": "temperature is 1e-30; expected 0, or",
    "--tasks=gsm8k --max_new_tokens=1000000000": "--max_new_tokens 1000000000: expected",
    "--tasks=gsm8k --samples=100000000 --temperature=1": "--samples 100000000: expected",
    "--tasks=gsm8k --samples=2": "temperature above 0",
    "--limit=100000000000": "--limit 100000000000: expected",
    "--seed=4294967296": "--seed 4294967296: expected",
    "--output={damaged}": "cannot be written (Is a directory",
    "--output=none/file.jsonl": "cannot be written (No such file",
    "--dtype=float8": "--dtype float8: expected one of auto, float32",
    "--model=none/at-all": "--model none/at-all: its tokenizer cannot be",
    "--model={explodes}": "/explodes takes more than 1 GiB of memory; repair chat_template in",
    "--shot=5": "unknown flag --shot; did you mean --shots?",
}
# These need lm_eval.
WRONG_DATA = {
    "--tasks=lambada --data={files}/openai": "EleutherAI/lambada_openai does not exist; expected a "
                                             "copy of the hub's data set, as `hf download",
    "--tasks=gsm8k": "gsm8k: its data cannot be loaded: ",
    "--tasks=lambada --data={damaged}": "lambada: its data cannot be loaded: ",
    "--tasks=gsm8k --data={damaged}": "gsm8k: ",
}


def refusal(capsys, argv):
    return error_line(capsys, tasks, argv, "isogloss.tasks", printed="")


def test_wrong_input_is_one_line(models, files, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    write_copy(damaged, "openai/gsm8k", {"main": {"test": [{"question": "Why?"}]}})
    (damaged / "EleutherAI" / "lambada_openai").mkdir(parents=True)
    explodes = shutil.copytree(models[0], tmp_path / "explodes")
    (explodes / "chat_template.jinja").write_text("{{ 'a' * 10 ** 11 }}")
    for change, message in (WRONG | (WRONG_DATA if HAS_LM_EVAL else {})).items():
        words = change.replace("{files}", str(files)).replace("{damaged}", str(damaged))
        words = words.replace("{explodes}", str(explodes)).split()
        argv = [f"--model={models[0]}", "--tasks=mmlu", *words]
        assert message in refusal(capsys, argv), change


def test_an_output_is_not_written_before_its_time(tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_text("a record\n")
    for path in (kept, tmp_path / "new.jsonl"):
        TaskArgs(model="m", tasks="mmlu", output=str(path))
    assert kept.read_text() == "a record\n" and not (tmp_path / "new.jsonl").exists()


@needs_lm_eval
def test_a_model_that_is_not_finite_is_not_judged(models, files, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(models[0])
    next(model.base_model.layers[0].parameters()).data.fill_(math.nan)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(models[0]).save_pretrained(tmp_path / "model")
    for task in ALL:
        argv = [f"--model={tmp_path / 'model'}", f"--tasks={task}", f"--data={files}", "--limit=1",
                "--shots=0"]
        error = refusal(capsys, argv)
        assert "holds values that are not finite" in error
    # finite weights, and activations that are not
    model, encoder = loaded(models[0])
    with torch.no_grad():
        model.base_model.norm.weight.fill_(1e38)
        model.get_output_embeddings().weight.mul_(1e10)
    suite = load_suite(["lambada"], TaskOptions(data=str(files), limit=1), encoder)
    with pytest.raises(ValueError, match="lambada: the model's log-probabilities are not finite"):
        suite.run(model)
