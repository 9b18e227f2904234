"""Copies of data sets as the hub has them, of the evaluation data or of rows of a test's own."""

import csv
import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from conftest import asset
from recipes.xtoken_column.rehearsal import write_copy

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="lm_eval is not installed")
# of MMLU; their rows stand for those of subjects that are not there
SUBJECTS = "abstract_algebra", "astronomy"


def copy_lambada(folder, limit):
    """Write the first items of LAMBADA."""
    with open(asset("eval") / "lambada_openai.jsonl", encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(limit)]
    rows = [{"text": row["context"] + " " + row["continuation"].strip()} for row in rows]
    write_copy(folder, "EleutherAI/lambada_openai", {"default": {"test": rows}})


def copy_gsm8k(folder, limit, examples=40):
    """Write the first items of GSM8K, and its last ones as examples."""
    with open(asset("eval") / "gsm8k_test.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    write_copy(folder, "openai/gsm8k",
               {"main": {"test": rows[:limit], "train": rows[-examples:]}})


def copy_humaneval(folder, rows):
    """Write rows, and some of HumanEval, as HumanEval+."""
    with gzip.open(asset("eval") / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = rows + [json.loads(line) for line in file][::40]
    write_copy(folder, "evalplus/humanevalplus", {"default": {"test": rows}})
    return rows


def copy_mmlu(folder, limit):
    """Write the first items of subjects of MMLU, and one of others' for each that is not there."""
    from lm_eval import tasks

    manager = tasks.TaskManager(  # to look through all of its folders takes many seconds
        include_path=Path(tasks.__file__).parent / "mmlu/continuation", include_defaults=False)
    subjects = [name.removeprefix("mmlu_").removesuffix("_continuation")
                for name in manager.all_subtasks]
    source = asset("eval") / "mmlu"
    configs = {}
    for number, subject in enumerate(sorted(subjects)):
        is_there = (source / "test" / f"{subject}_test.csv").is_file()
        configs[subject] = {}
        for split in ("test", "dev"):
            kept = subject if is_there else SUBJECTS[number % 2]
            with open(source / split / f"{kept}_{split}.csv", newline="") as file:
                rows = list(csv.reader(file))[1:]
            rows = rows[:limit if is_there else 1] if split == "test" else rows
            configs[subject][split] = [
                {"question": row[0], "subject": subject, "choices": row[1:5],
                 "answer": int(row[5])} for row in rows]
    write_copy(folder, "cais/mmlu", configs)
