"""tasks.py gives what lm-evaluation-harness gives, item by item, whatever the ranks and batches.

tests/golden/README.md describes the harness's outputs.
"""

import csv
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import ranks
from conftest import GOLDEN, ROOT, asset
from isogloss.evaluation.task_items import WrittenItem, read_gsm8k, read_lambada, read_mmlu
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.tasks import (
    Sums,
    TaskOptions,
    comparable_number,
    last_number,
    load_tasks,
    marked_number,
    run_tasks,
)
from isogloss.flags.parse import tool, undescribed
from isogloss.tasks import Args, main

EXAMPLES = 40  # of GSM8K, from the end of the test split
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


# --- small models and files of our own ------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder as the hendrycks archive is: no header rows, letters; 13 rows of the others."""
    folder = tmp_path_factory.mktemp("files")
    for split, count in (("test", 7), ("dev", 5)):
        (folder / "mmlu" / split).mkdir(parents=True)
        for subject in ("botany", "chess_rules"):
            with open(folder / "mmlu" / split / f"{subject}_{split}.csv", "w", newline="") as file:
                writer = csv.writer(file)
                for number in range(count):
                    words = ["an index", f"{number}, or more", "the value of it", "a name"]
                    writer.writerow([f"What is {number} of {subject}?", *words, "ABCD"[number % 4]])
    rows = [{"text": f"The value of {'the name and ' * number}the index"} for number in range(13)]
    write_rows(folder / "lambada_openai.jsonl", rows)
    rows = [{"question": "How many? " * (1 + number % 5), "answer": f"Some.\n#### {number}"}
            for number in range(13)]
    write_rows(folder / "gsm8k_test.jsonl", rows)
    write_rows(folder / "gsm8k_train.jsonl", rows[:4])
    return folder


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ALL = "mmlu", "mmlu_continuation", "lambada", "gsm8k"


def test_equals_a_loop_over_single_continuations(models, files):
    """Each continuation in a forward pass of its own, token by token, in float64."""
    model, encoder = loaded(models[0])
    tokenizer = encoder.tokenizer
    options = TaskOptions(data=str(files), shots=2)
    tasks = load_tasks(["mmlu", "mmlu_continuation", "lambada"], options, encoder)
    metrics, records = run_tasks(tasks, model, encoder, options)
    records = iter(records)
    assert any(len(request.ids) == encoder.window + 1 for task in tasks
               for of_item in task.requests for request in of_item), "no text exceeds the window"
    for task in tasks:
        right = []
        for item in task.items:
            nats = []
            greedy = []
            for continuation in item.continuations:
                whole = tokenizer.encode(item.context + continuation)
                start = len(tokenizer.encode(item.context))
                seen = whole[-(encoder.window + 1) : -1]
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([seen])).logits[0].double()
                scored = whole[start:]
                logp = logits.log_softmax(-1)[-len(scored) :]
                nats.append(-sum(float(row[token]) for row, token in zip(logp, scored)))
                greedy.append(logp.argmax(-1).tolist() == scored)
            np.testing.assert_allclose(next(records)["nats"], nats, rtol=0, atol=1e-4)
            single = len(nats) == 1
            right.append(greedy[0] if single else nats.index(min(nats)) == item.answer)
        assert math.isclose(metrics[f"eval/{task.name}_acc"], sum(right) / len(right))


def test_bits_per_byte_are_those_of_the_last_words(models, files):
    task, metrics, records = evaluated(loaded(models[0]), "lambada", TaskOptions(data=str(files)))
    nats = sum(record["nats"][0] for record in records)
    num_bytes = sum(len(" index") for _ in task.items)
    expected = nats / math.log(2) / num_bytes
    assert math.isclose(metrics["eval/lambada_bits_per_byte"], expected, rel_tol=1e-9)


def test_headers_and_numbers_mean_the_same_questions(files, tmp_path):
    """Files with a header row and numbers as answers hold the same items; so do copies."""
    for path in (files / "mmlu").glob("*/*.csv"):
        copy = tmp_path / path.relative_to(files / "mmlu")  # the folder of MMLU itself
        copy.parent.mkdir(exist_ok=True)
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
        with open(copy, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["question", "choice0", "choice1", "choice2", "choice3", "answer"])
            for row in rows:
                writer.writerow([*row[:5], "ABCD".index(row[5])])
    assert read_mmlu(tmp_path, 5) == read_mmlu(files, 5)
    items = read_mmlu(files, 5)
    assert [item.answer for item in items[:7]] == [0, 1, 2, 3, 0, 1, 2]
    assert items[7].group == "chess_rules" and "about chess rules." in items[7].context
    passages = [{"context": item.context, "continuation": item.continuations[0][1:]}
                for item in read_lambada(files)]
    write_rows(tmp_path / "lambada.jsonl", passages)
    assert read_lambada(tmp_path) == read_lambada(files)


def test_a_limit_leaves_the_first_items_as_they_are(files):
    assert read_gsm8k(files, 2, limit=3) == read_gsm8k(files, 2)[:3]
    assert read_lambada(files, limit=3) == read_lambada(files)[:3]
    whole = read_mmlu(files, 5)
    assert read_mmlu(files, 5, limit=3) == whole[:3] + whole[7:10]


def test_standard_errors_are_pooled_over_groups():
    """One group: the sample's standard deviation / sqrt(n); several: pooled within groups."""
    values = {"a": [1, 0, 0, 1, 1], "b": [0, 0, 1]}
    one = Sums([""], ["acc"])
    two = Sums(["a", "b"], ["acc"])
    squares = 0.0
    for group, numbers in values.items():
        for number in numbers:
            one.add("", {"acc": number})
            two.add(group, {"acc": number})
        squares += np.var(numbers) * len(numbers)
    everything = [*values["a"], *values["b"]]
    assert math.isclose(one.stderr("acc"), np.std(everything, ddof=1) / math.sqrt(8))
    assert math.isclose(two.stderr("acc"), math.sqrt(squares / (8 - 2) / 8))
    assert math.isclose(two.mean("acc"), 0.5)
    alone = Sums([""], ["acc"])
    alone.add("", {"acc": 1.0})
    assert alone.stderr("acc") is None


def test_modes_gradients_and_random_states_stay(models, files):
    """Training goes on as if nothing had been evaluated, and dropout does not reach a task."""
    model, encoder = loaded(models[0])
    options = TaskOptions(data=str(files), limit=4, max_new_tokens=5)
    tasks = load_tasks(list(ALL), options, encoder)
    expected, _ = run_tasks(tasks, model, encoder, options)
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
    metrics, _ = run_tasks(tasks, model, encoder, options)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert [module.training for module in model.modules()] == modes
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    check_same(metrics, expected, 0)


def check_same(metrics, expected, tolerance=1e-5):
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("_bits_per_byte"):
            assert math.isclose(metrics[name], value, abs_tol=tolerance), name
        elif not name.endswith("_seconds"):
            assert metrics[name] == value, name


# --- ranks ----------------------------------------------------------------------------------------


def on_ranks(path, options, sizes):
    """Return {ranks: (metrics, records)} of this rank, with a model that needs all in each pass."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, encoder = loaded(path)
    rank = dist.get_rank()
    results = {}
    for size in sizes:
        group = dist.new_group(range(size))
        if rank >= size:
            continue

        def reduced(values, operation=dist.ReduceOp.SUM, group=group):
            total = torch.as_tensor(values, dtype=torch.float64).clone()
            dist.all_reduce(total, operation, group=group)
            return total

        def agree(has_work, reduced=reduced):
            return bool(reduced([has_work], dist.ReduceOp.MAX)[0])

        # as ZeRO-3 gathers weights: a rank that takes fewer passes would leave others waiting
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda *_, reduced=reduced: reduced([1.0]) and None)
        tasks = load_tasks(list(ALL), options, encoder, rank, size)
        results[size] = run_tasks(tasks, model, encoder, options, agree, reduced)
        hook.remove()
    return results


def test_results_do_not_depend_on_ranks_and_batches(models, files):
    """13 items on 2 and 4 ranks, answers of different lengths; every pass needs all ranks."""
    options = TaskOptions(data=str(files), shots=2, batch_size=3, max_new_tokens=30)
    model, encoder = loaded(models[0])
    tasks = load_tasks(list(ALL), options, encoder)
    expected, records = run_tasks(tasks, model, encoder, options)
    lengths = {len(record["answer"]) for record in records if record["task"] == "gsm8k"}
    assert len(lengths) > 2
    for batch_size in (1, 64):
        other = replace(options, batch_size=batch_size)
        check_same(run_tasks(tasks, model, encoder, other)[0], expected)
    of_ranks = ranks.run(4, on_ranks, models[0], options, (2, 4))
    for size in (2, 4):
        found = []
        for metrics, of_rank in [results[size] for results in of_ranks[:size]]:
            check_same(metrics, expected)
            found += of_rank
        assert len(found) == len(records)
        by_name = {(record["task"], record["id"]): record for record in found}
        for record in records:
            other = by_name[record["task"], record["id"]]
            nats = record.pop("nats", [])
            np.testing.assert_allclose(other.pop("nats", []), nats, rtol=0, atol=1e-4)
            assert other == record
            record["nats"] = nats


# --- the command line -----------------------------------------------------------------------------


def run_command(*words):
    """Run the command in this process; returns its exit code."""
    try:
        tool(Args, main, argv=list(words))
    except SystemExit as error:
        return error.code
    return 0


def test_the_command_prints_a_table_and_writes_records(models, files, tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    code = run_command(
        f"--model={models[0]}", "--tasks=lambada,mmlu", f"--data={files}", "--limit=3",
        f"--output={path}")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0] == "| task | metric | value | stderr | items | seconds |"
    names = [tuple(word.strip() for word in line.split("|")[1:3]) for line in lines[2:]]
    assert names == [("lambada", "acc"), ("lambada", "bits_per_byte"), ("mmlu", "acc"),
                     ("mmlu", "acc_norm")]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["id"] for record in records[:4]] == ["0", "1", "2", "botany/0"]
    assert set(records[3]) == {"task", "id", "prediction", "verdict", "nats"}


@pytest.mark.slow
def test_the_command_of_two_ranks_prints_the_same_table(models, files, tmp_path, capsys):
    """As torchrun starts it; 13 items, so that the ranks have unequal numbers of them."""
    words = [f"--model={models[0]}", "--tasks=lambada,mmlu_continuation,gsm8k", f"--data={files}",
             "--max_new_tokens=20"]
    assert run_command(*words, f"--output={tmp_path / 'one.jsonl'}") == 0
    expected = capsys.readouterr().out
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node", "2", "-m", "isogloss.tasks"]
    done = subprocess.run([*launcher, *words, f"--output={tmp_path / 'two.jsonl'}"], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert without_seconds(done.stdout) == without_seconds(expected)
    records = []
    for name in ("one", "two"):
        by_item = {}
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            by_item[record["task"], record["id"]] = record
        records.append(by_item)
    assert records[0].keys() == records[1].keys()
    for key, record in records[0].items():
        assert record["prediction"] == records[1][key]["prediction"], key
        assert record["verdict"] == records[1][key]["verdict"], key


def without_seconds(table):
    return [line.rsplit("|", 2)[0] for line in table.splitlines()]


def damage(folder):
    """Write a folder of files that cannot be read as tasks."""
    (folder / "mmlu" / "test").mkdir(parents=True)
    (folder / "mmlu" / "test" / "botany_test.csv").write_text("What?,1,2,3,4,E\n")
    (folder / "lambada_openai.jsonl").write_text('{"passage": "A text"}\n')
    (folder / "gsm8k_test.jsonl").write_text('{"question": "Why?"}\n')
    (folder / "columns").mkdir()
    (folder / "columns" / "test").mkdir()
    (folder / "columns" / "test" / "botany_test.csv").write_text("What?,1,2,3,A\n")
    (folder / "columns" / "lambada.jsonl").write_text("{\n")
    (folder / "columns" / "gsm8k_test.jsonl").write_text("")
    for name, row in ITEMS.items():
        (folder / name).mkdir()
        file = "lambada" if name.startswith("lambada") else "gsm8k_test"
        text = row if isinstance(row, str) else json.dumps(row)
        (folder / name / f"{file}.jsonl").write_text(text + "\n")
    (folder / "blank" / "test").mkdir(parents=True)
    (folder / "blank" / "test" / "botany_test.csv").write_text(" ,1,2,3,4,A\n")
    return folder


# Rows that no model can be right or wrong about.
ITEMS = {
    "lambada_null": {"text": None},
    "lambada_number": {"context": 3, "continuation": "word"},
    "lambada_word": {"text": "word"},
    "lambada_spaces": {"context": "a b", "continuation": "  "},
    "lambada_half": '{"text": "a \\ud800"}',
    "lambada_deep": "[" * 100_000,
    "gsm8k_null": {"question": "Why?", "answer": None},
    "gsm8k_number": {"question": 7, "answer": "#### 7"},
    "gsm8k_unmarked": {"question": "Why?", "answer": "It is 7."},
}


WRONG = {
    "unknown task": ("--tasks=mmul", "unknown task 'mmul'; did you mean mmlu?"),
    "no name": ("--tasks=lambada,", "unknown task ''; expected mmlu, "),
    "twice": ("--tasks=mmlu,mmlu", "task mmlu is named twice"),
    "no folder": ("--tasks=mmlu --data={files}/none", "none does not exist; expected a folder"),
    "no files": ("--tasks=lambada --data={files}/mmlu", "mmlu/lambada_openai.jsonl does not exist; "
                 "expected it (or lambada_test.jsonl, or lambada.jsonl there)"),
    "no csv": ("--tasks=mmlu --data={files}/mmlu/test",
               "holds no files SUBJECT_test.csv; expected those of MMLU"),
    "no hub": ("--tasks=gsm8k", "openai/gsm8k cannot be loaded from the hub ("),
    "negative shots": ("--tasks=mmlu --data={files} --shots=-1", "shots is -1; expected 0 or more"),
    "many shots": ("--tasks=mmlu --data={files} --shots=6",
                   "6 shots of botany were asked for; its dev split holds 5"),
    "many examples": ("--tasks=gsm8k --data={files} --shots=6",
                      "6 shots were asked for; the training split holds 4"),
    "no batch": ("--tasks=mmlu --data={files} --batch_size=0",
                 "batch_size is 0; expected 1 or more"),
    "answer": ("--tasks=mmlu --data={damaged}", "question 1: its answer is 'E'; expected A to D"),
    "fields": ("--tasks=lambada --data={damaged}",
               "row 1 has passage; expected text, or context and continuation"),
    "no answer": ("--tasks=gsm8k --data={damaged}",
                  "row 1: expected a text 'answer'; it has question"),
    "columns": ("--tasks=mmlu --data={damaged}/columns",
                "question 1: 5 columns; expected 6, the question, four choices and the answer"),
    "json": ("--tasks=lambada --data={damaged}/columns", "row 1 cannot be read (Expecting"),
    "empty": ("--tasks=gsm8k --data={damaged}/columns", "holds no row"),
    "blank": ("--tasks=mmlu --data={damaged}/blank", "question 1: its text or all of its choices"),
    "null": ("--tasks=lambada --data={damaged}/lambada_null", "row 1: expected a text 'text'; "
             "'text' is None"),
    "a number": ("--tasks=lambada --data={damaged}/lambada_number", "'context' is 3"),
    "one word": ("--tasks=lambada --data={damaged}/lambada_word", "row 1 has nothing before its"),
    "spaces": ("--tasks=lambada --data={damaged}/lambada_spaces", "row 1 has no last word"),
    "half": ("--tasks=lambada --data={damaged}/lambada_half", "expected a text 'text'; 'text' is"),
    "deep": ("--tasks=lambada --data={damaged}/lambada_deep", "row 1 cannot be read ("),
    "a null answer": ("--tasks=gsm8k --data={damaged}/gsm8k_null", "'answer' is None"),
    "a question of 7": ("--tasks=gsm8k --data={damaged}/gsm8k_number", "'question' is 7"),
    "unmarked": ("--tasks=gsm8k --data={damaged}/gsm8k_unmarked",
                 "row 1: its answer does not end in '#### ' and a number"),
    "hot": ("--tasks=gsm8k --temperature=1e300", "temperature is 1e+300; expected 1000 or less"),
    "almost cold": ("--tasks=gsm8k --temperature=1e-30", "temperature is 1e-30; expected 0, or"),
    "cold": ("--tasks=gsm8k --temperature=-1", "temperature is -1.0; expected 0 or more"),
    "huge batch": ("--tasks=mmlu --batch_size=1000000000", "batch_size is 1000000000; expected"),
    "huge answers": ("--tasks=gsm8k --max_new_tokens=1000000000", "max_new_tokens is 1000000000"),
    "huge samples": ("--tasks=gsm8k --samples=100000000 --temperature=1", "samples is 100000000"),
    "huge shots": ("--tasks=mmlu --shots=100000000", "shots is 100000000; expected 1000 or less"),
    "huge limit": ("--tasks=mmlu --limit=100000000000", "limit is 100000000000; expected"),
    "seed": ("--tasks=mmlu --seed=-1", "seed is -1; expected 0 or more"),
    "huge seed": ("--tasks=mmlu --seed=4294967296", "seed is 4294967296; expected"),
    "output folder": ("--tasks=mmlu --output={damaged}", "cannot be written (Is a directory"),
    "long output": ("--tasks=mmlu --output={damaged}/" + "x" * 300, "a name in it has 300 bytes"),
    "dtype": ("--tasks=mmlu --dtype=float8", "--dtype float8: expected one of auto, float32"),
    "output": ("--tasks=mmlu --output=none/file.jsonl", "the folder none does not exist"),
    "model": ("--tasks=mmlu --model=none/at-all", "--model none/at-all: its tokenizer cannot be"),
    "shot flag": ("--tasks=mmlu --shot=5", "unknown flag --shot; did you mean --shots?"),
}


def test_wrong_input_is_one_line(models, files, tmp_path, capsys):
    damaged = damage(tmp_path)
    for name, (change, message) in WRONG.items():
        words = change.replace("{files}", str(files)).replace("{damaged}", str(damaged)).split()
        code = run_command(f"--model={models[0]}", *words)
        printed = capsys.readouterr()
        assert code == 2, name
        assert printed.err.startswith("isogloss.tasks: "), (name, printed.err)
        assert printed.err.count("\n") == 1, (name, printed.err)
        assert message in printed.err, (name, printed.err)
        assert printed.out == "", name


def test_an_output_is_not_written_before_its_time(models, files, tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_text("a record\n")
    for path in (kept, tmp_path / "new.jsonl"):
        Args(model="m", tasks="mmlu", output=str(path))
    assert kept.read_text() == "a record\n" and not (tmp_path / "new.jsonl").exists()


def test_a_model_that_is_not_finite_is_not_judged(models, files, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(models[0])
    next(model.base_model.layers[0].parameters()).data.fill_(math.nan)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(models[0]).save_pretrained(tmp_path / "model")
    for task in ("mmlu", "gsm8k"):
        assert run_command(f"--model={tmp_path / 'model'}", f"--tasks={task}", f"--data={files}",
                           "--limit=1") == 2
        printed = capsys.readouterr()
        assert "holds values that are not finite" in printed.err and printed.out == ""
    # finite weights, and activations that are not
    pair = loaded(models[0])
    with torch.no_grad():
        pair[0].base_model.norm.weight.fill_(1e38)
        pair[0].get_output_embeddings().weight.mul_(1e10)
    with pytest.raises(ValueError, match="mmlu: the model's log-probabilities are not finite"):
        evaluated(pair, "mmlu", TaskOptions(data=str(files), limit=1))


def test_samples_differ_at_a_temperature_alone(models, files):
    with pytest.raises(ValueError, match="temperature above 0"):
        TaskOptions(samples=2)
    options = TaskOptions(data=str(files), samples=3, temperature=1.0, limit=4, max_new_tokens=8)
    _, _, records = evaluated(loaded(models[0]), "gsm8k", options)
    assert [record["sample"] for record in records] == [0, 1, 2] * 4
    assert len({record["answer"] for record in records}) > 6
    again = evaluated(loaded(models[0]), "gsm8k", replace(options, batch_size=1))[2]
    assert again == records


def test_flags_are_described():
    undescribed(Args)
