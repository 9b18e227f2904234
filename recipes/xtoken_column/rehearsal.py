"""Make what a rehearsal of the column reads, in the places of what it reads on GPUs.

Models with random weights, the interpreter's documentation, and two questions of every task as the
hub has them.

Tests: tests/test_xtoken_column.py.
"""

import json
from pathlib import Path

import yaml

from isogloss.demo import llama, load_tokenizer, make_once, save
from recipes.tiny import prepare

STEPS = 6
EXAMPLES = 6  # to put in front of a question, of which GSM8K takes five


def made_in(folder):
    """Return the folder of what a rehearsal reads; it is made once."""
    return make_once(folder / "made", make)


def judging_flags(made):
    return [f"--data={made}/eval", "--max_new_tokens=8"]


def training_flags(made, recipe):
    """Return the flags that make a recipe's run small."""
    flags = [f"--student={made}/student", f"--data={made}/texts.jsonl",
             f"--ds_config={made}/ds.json", f"--steps={STEPS}", f"--eval_every={STEPS}",
             "--save_every=2", "--eval_rows=4", "--max_length=120", "--join_rows=200",
             "--num_workers=0", "--learning_rate=0.01"]  # so that six steps show
    teachers = yaml.safe_load(Path(f"recipes/{recipe}.yaml").read_text()).get("teachers")
    if not teachers:
        return [*flags, f"--teacher={made}/teacher"]
    models = "teacher", "sibling"
    entries = [entry | {"model": f"{made}/{model}"} for entry, model in zip(teachers, models)]
    return [*flags, f"--teachers={json.dumps(entries)}"]


def make(folder):
    prepare.main(folder)
    tokenizer = load_tokenizer(folder / "student")  # a teacher of two has it, too
    save(llama(tokenizer, prepare.SHAPE, seed=3), tokenizer, folder / "sibling")
    config = json.loads(Path("recipes/ds_96.json").read_text())
    config |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    (folder / "ds.json").write_text(json.dumps(config))
    write_questions(folder / "eval")


def write_questions(folder):
    """Write copies of the data sets of all tasks, with questions of our own."""
    from lm_eval import tasks

    manager = tasks.TaskManager(  # to look through all of its folders takes many seconds
        include_path=Path(tasks.__file__).parent / "mmlu/default", include_defaults=False)
    choices = ["one", "two", "three", "four"]
    sums = 1, 2
    subjects = {}
    for name in manager.all_subtasks:
        row = {"question": "What is 1 + 1?", "choices": choices, "answer": 1,
               "subject": name.removeprefix("mmlu_")}
        subjects[row["subject"]] = {"test": [row], "dev": [row] * EXAMPLES}
    write_copy(folder, "cais/mmlu", subjects)
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} and 1 are {n + 1}.\n#### {n + 1}"}
            for n in range(EXAMPLES)]
    write_copy(folder, "openai/gsm8k", {"main": {"test": rows[:2], "train": rows}})
    rows = [{"activity_label": "Adding", "ctx_a": f"Anna adds {n} and one.", "ctx_b": "it is",
             "endings": choices, "label": str(n)} for n in sums]
    write_copy(folder, "Rowan/hellaswag", {"default": {"train": rows, "validation": rows}})
    rows = [{"sentence": f"Anna and {n} others are _ in all.", "option1": "two",
             "option2": "three", "answer": str(n)} for n in sums]
    write_copy(folder, "allenai/winogrande", {"winogrande_xl": {"train": rows, "validation": rows}})
    rows = [{"question": f"What is {n} + 1?", "answerKey": "ABCD"[n],
             "choices": {"text": choices, "label": list("ABCD")}} for n in sums]
    splits = {"train": rows, "validation": rows, "test": rows}
    write_copy(folder, "allenai/ai2_arc", {"ARC-Challenge": splits, "ARC-Easy": splits})


def write_copy(folder, dataset, configs):
    """Write a data set "owner/name" as the hub has it; configs: {name: {split: rows}}."""
    described = []
    for config, splits in configs.items():
        files = []
        for split, rows in splits.items():
            path = folder / dataset / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            files.append({"split": split, "path": f"{config}/{split}.jsonl"})
        described.append({"config_name": config, "data_files": files})
    (folder / dataset / "README.md").write_text(
        f"---\nconfigs: {json.dumps(described)}\n---\n", encoding="utf-8")
