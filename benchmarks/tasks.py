"""Compare isogloss/tasks.py with lm-evaluation-harness: the same items, CPU seconds, and figures.

    python benchmarks/tasks.py ASSETS [--repeats 3] [--limit 50]
    python benchmarks/tasks.py ASSETS --golden tests/golden/tasks.json

Every evaluation runs in a process of its own, on one thread; what counts is user and system seconds
between the loaded model and the finished metrics, the least of the repeats.  Where the harness is
not installed (pip install lm_eval==0.4.13, no dependency of this project), only the project's own
seconds are shown.  With --golden it writes what the harness says of a few items instead: hashes of
its prompts, log-likelihoods, greedy flags and the texts that models wrote, but no text of the data.

The harness reads its own task files, with their data set replaced by local files.
Figures of record are in docs/LOG.md.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from isogloss.task_items import gsm8k_rows, mmlu_split, read_lambada
from projection_tools.flags import tool

MODELS = "tinytalk_neo_3M", "stories260K"
NEW_TOKENS = 64  # of GSM8K; the harness's 256 do not fit into a window of 256
EXAMPLES = 40  # of GSM8K, taken from the end of the test split, because only that is at hand
GOLDEN_CASES = [  # task, shots, items (of MMLU of each subject)
    ("mmlu", 0, 4), ("mmlu", 5, 4), ("mmlu_continuation", 0, 2), ("mmlu_continuation", 3, 2),
    ("lambada", 0, 30), ("gsm8k", 0, 6), ("gsm8k", 2, 6),
]
# Answers to GSM8K as models write them, and the number that is right.
NUMBER_TEXTS = [
    ("It is 3 + 4 = 7.\n#### 7", "#### 7"), ("So she has $1,234.", "x\n#### 1234"),
    ("#### $5", "#### 5"), ("The answer is -12", "#### -12"), ("#### -12.", "#### -12"),
    ("#### 1,000\n#### 2", "#### 1000"), ("No number at all", "#### 3"), ("", "#### 3"),
    ("5 apples, 6 pears", "#### 6"), ("He pays 3.50 dollars.", "#### 3.50"), ("$", "#### 3"),
    ("It costs $.", "#### 3"), ("1/2 of 10 is 5...", "#### 5"), ("#### 7 apples of 9", "#### 7"),
    ("2 .. ,", "#### 2"), ("#### .", "#### 4"), ("#### 18\n\nQuestion", "a\n#### 18"),
]
SPEED_CASES = [("mmlu", 0), ("mmlu", 5), ("mmlu_continuation", 0), ("lambada", 0)]


@dataclass(kw_only=True)
class Args:
    """Compare evaluation tasks with lm-evaluation-harness.

    Args:
        assets: folder with models/ and eval/.
        repeats: of every measurement.
        limit: items of each subject of MMLU; of LAMBADA six times as many.
        batch_size: rows of a forward pass, on both sides.
        golden: file for what the harness says of a few items.
        one: an evaluation of this process alone, as JSON; used by the script itself.
    """

    assets: str
    repeats: int = 3
    limit: int = 50
    batch_size: int = 16
    golden: str = ""
    one: str = ""


@dataclass
class Case:
    """State one evaluation: by whom, of which model, on what."""

    side: str  # "ours" or "harness"
    model: str
    task: str
    shots: int
    limit: int
    batch_size: int


# --- the harness ----------------------------------------------------------------------------------


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def harness_tasks(data, folder, task):
    """Write the harness's own task files with local data; returns the names of its tasks."""
    import lm_eval.tasks
    import yaml

    own = Path(lm_eval.tasks.__file__).parent
    configs = {}
    if task.startswith("mmlu"):
        form = "continuation" if task.endswith("continuation") else "default"
        template = next((own / "mmlu" / form).glob("*_template_yaml"))
        test = mmlu_split(task, data, "test")
        dev = mmlu_split(task, data, "dev")
        for subject in test:
            config = yaml.safe_load(template.read_text())
            subject_file = own / "mmlu" / form / f"mmlu_{subject}.yaml"
            config["description"] = yaml.safe_load(subject_file.read_text())["description"]
            files = {}
            for split, questions in (("test", test), ("dev", dev)):
                rows = []
                for question in questions[subject]:
                    rows.append({"question": question.text, "choices": question.choices,
                                 "answer": question.answer})
                files[split] = write_rows(folder / f"{subject}_{split}.jsonl", rows)
            configs[f"local_{task}_{subject}"] = (config, files)
    elif task == "lambada":
        config = yaml.safe_load((own / "lambada" / "lambada_openai.yaml").read_text())
        rows = [{"text": item.context + item.continuations[0]} for item in read_lambada(data)]
        files = {"test": write_rows(folder / "lambada.jsonl", rows)}
        configs["local_lambada"] = (config, files)
    else:
        config = yaml.safe_load((own / "gsm8k" / "gsm8k.yaml").read_text())
        config["generation_kwargs"]["max_gen_toks"] = NEW_TOKENS
        rows = gsm8k_rows(data, "test")
        files = {"test": write_rows(folder / "test.jsonl", rows),
                 "train": write_rows(folder / "train.jsonl", rows[-EXAMPLES:])}
        configs["local_gsm8k"] = (config, files)
    for name, (config, files) in configs.items():
        config.pop("dataset_name", None)
        config.pop("tag", None)
        config |= {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return sorted(configs)


def run_harness(assets, case, timed):
    """Return ({metric: value}, samples) of the harness.

    Args:
        timed: function that is called with the evaluation, and calls it.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(assets) / "models" / case.model
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(path), device="cpu",
              batch_size=case.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        names = harness_tasks(Path(assets) / "eval", Path(folder), case.task)
        manager = TaskManager(include_path=folder, include_defaults=False)
        results = timed(lambda: simple_evaluate(
            lm, tasks=names, num_fewshot=case.shots, limit=case.limit or None,
            task_manager=manager, bootstrap_iters=0, log_samples=True))
    samples = []
    for name in names:
        samples += sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    metrics = {}
    total = sum(len(results["samples"][name]) for name in names)
    for name in names:
        for metric, value in results["results"][name].items():
            if isinstance(value, float):
                share = len(results["samples"][name]) / total
                metrics[metric] = metrics.get(metric, 0.0) + value * share
    return metrics, samples


# --- ours -----------------------------------------------------------------------------------------


def run_ours(assets, case, timed):
    """Return {metric: value} of isogloss/tasks.py; encoding the items is part of what is timed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from isogloss.task_model import TaskEncoder
    from isogloss.tasks import TaskOptions, load_tasks, run_tasks

    path = Path(assets) / "models" / case.model
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    options = TaskOptions(data=str(Path(assets) / "eval"), shots=case.shots, limit=case.limit,
                          batch_size=case.batch_size, max_new_tokens=NEW_TOKENS)

    def evaluate():
        encoder = TaskEncoder(tokenizer, model.config)
        return run_tasks(load_tasks([case.task], options, encoder), model, encoder, options)

    metrics, _ = timed(evaluate)
    return metrics


# --- seconds --------------------------------------------------------------------------------------


def cpu_seconds():
    times = os.times()
    return times.user + times.system


def run_one(args):
    """Run the Case of this process, and print its seconds and metrics as JSON."""
    import torch

    torch.set_num_threads(1)
    case = Case(**json.loads(args.one))
    seconds = []

    def timed(evaluate):
        begin = cpu_seconds()
        result = evaluate()
        seconds.append(cpu_seconds() - begin)
        return result

    if case.side == "ours":
        metrics = run_ours(args.assets, case, timed)
    else:
        metrics, _ = run_harness(args.assets, case, timed)
    print(json.dumps({"seconds": seconds[0], "metrics": metrics}))


def measured(args, case):
    """Return the least CPU seconds of an evaluation and its metrics, in processes of its own."""
    best = None
    for _ in range(args.repeats):
        command = [sys.executable, __file__, args.assets, f"--one={json.dumps(asdict(case))}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        if best is None or result["seconds"] < best["seconds"]:
            best = result
    return best


def compare(args):
    """Print the table of seconds and accuracies."""
    has_harness = importlib.util.find_spec("lm_eval") is not None
    if not has_harness:
        print("lm_eval is not installed: only the project's own seconds are shown")
    print("| model | task | shots | ours, s | harness, s | ratio | acc ours | acc harness |")
    print("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        for task, shots in SPEED_CASES:
            limit = 6 * args.limit if task == "lambada" else args.limit
            case = Case("ours", model, task, shots, limit, args.batch_size)
            ours = measured(args, case)
            words = [model, task, shots, f"{ours['seconds']:.2f}"]
            acc = f"{ours['metrics'][f'eval/{task}_acc']:.4f}"
            if has_harness:
                case.side = "harness"
                theirs = measured(args, case)
                ratio = ours["seconds"] / theirs["seconds"]
                words += [f"{theirs['seconds']:.2f}", f"{ratio:.2f}", acc,
                          f"{theirs['metrics']['acc,none']:.4f}"]
            else:
                words += ["", "", acc, ""]
            print(f"| {' | '.join(map(str, words))} |", flush=True)


# --- golden numbers -------------------------------------------------------------------------------


def golden_item(sample):
    """Return what a sample of the harness says, without text of the data."""
    prompts = []
    for arguments in sample["arguments"]:
        prompts += [text for text in arguments if isinstance(text, str)]
    item = {"doc": sample["doc_id"],
            "sha256": hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]}
    answers = [answer[0] for answer in sample["resps"]]
    if isinstance(answers[0], str):
        item["text"] = answers[0]
        item["filtered"] = sample["filtered_resps"][0]
        return item
    item["logp"] = [float(answer[0]) for answer in answers]
    item["is_greedy"] = [str(answer[1]) == "True" for answer in answers]
    return item


def golden_numbers():
    """Return what the harness finds in NUMBER_TEXTS, and whether it is right."""
    import lm_eval.tasks
    import yaml
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    path = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    config = yaml.safe_load(path.read_text())
    options = dict(config["metric_list"][0])
    for name in ("metric", "aggregation", "higher_is_better"):
        del options[name]
    found = []
    for text, reference in NUMBER_TEXTS:
        entry = {"text": text, "reference": reference}
        for described in config["filter_list"]:
            arguments = dict(described["filter"][0])
            del arguments["function"]
            [[number]] = RegexFilter(**arguments).apply([[text]], [{}])
            match = exact_match_hf_evaluate([number], [reference], **options)["exact_match"]
            entry[described["name"]] = [number, bool(match)]
        found.append(entry)
    return found


def write_golden(args):
    """Write what the harness says of the items of GOLDEN_CASES."""
    entries = [{"task": "numbers", "items": golden_numbers()}]
    for model in MODELS:
        for task, shots, limit in GOLDEN_CASES:
            case = Case("harness", model, task, shots, limit, 1)
            metrics, samples = run_harness(args.assets, case, lambda evaluate: evaluate())
            # two filters list every sample of GSM8K twice
            kept = [sample for sample in samples if sample.get("filter") != "flexible-extract"]
            entry = asdict(case) | {"metrics": metrics, "items": list(map(golden_item, kept))}
            entries.append(entry)
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    Path(args.golden).write_text(f"[\n{lines}\n]\n")


def main(args):
    if args.one:
        run_one(args)
    elif args.golden:
        write_golden(args)
    else:
        compare(args)


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
