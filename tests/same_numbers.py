"""Check that a change of the code changes no number: runs before and after it, compared exactly.

    git worktree add ../before HEAD~1
    (cd ../before && python tests/same_numbers.py record ../numbers/before)
    python tests/same_numbers.py record ../numbers/after
    python tests/same_numbers.py compare ../numbers/before ../numbers/after

The runs cover ZeRO 0-3, data and sequence parallelism, sharded and remote teachers, packing, routed
teachers, chats, a learned projection, top-k teacher outputs, most losses, ensembles and resume.
They are in float32, with one thread a rank and a fixed seed.  They take two to four minutes on two
cores.  Metrics that only the later runs have are allowed.
"""

import json
import os
import sys
from pathlib import Path

import conftest  # first: it sets the environment, also of the ranks
import jobs
import ranks
from isogloss import demo

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
          "{{ m.content }}<|im_end|>\n{% endfor %}")
PLAIN = ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
         "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}")
TEACHERS = [{"model": "teacher", "weight": 2.0, "routes": ["a"], "max_length": 90},
            {"model": "teacher", "name": "other", "loss": "gold", "temperature": 2.0}]
WEIGHED = [{"model": "teacher", "loss": "alm"}, {"model": "untied", "loss": "forward_kl"}]
ENSEMBLE = [{"model": "untied", "weight": 2.0, "loss": "reverse_kl"},
            {"model": "student", "name": "b"}]
EVAL = {"eval_rows": 6, "eval_every": 2}
PROJECTION = {"loss": "projection_kl", "loss_options": {"projection_topk": 100}}
TOP_K = {"teacher_output": "topk", "teacher_output_topk": 40}
SAVING = {"activation_checkpointing": True, "activation_offload": True, "mlp_tiles": 2}
LEARNED = {"projection_topk": 100, "learn_projection": True, "projection_learning_rate": 1e-2}

RUNS = {  # name: (ranks, ZeRO stage, micro-batch size, accumulation steps, flags)
    "zero0": (2, 0, 2, 2, EVAL),
    "zero1": (2, 1, 2, 2, PROJECTION),
    "zero2": (2, 2, 2, 2, EVAL | {"loss": "gold"}),
    "zero3": (2, 3, 2, 2, EVAL),
    "plain_logits": (1, 2, 4, 1, {"tiled": False, "loss": "uld"}),
    "sp2": (2, 2, 4, 1, EVAL | {"sequence_parallel": 2}),
    "sp2_zero3": (2, 3, 4, 1, SAVING | {"sequence_parallel": 2, "loss": "gold"}),
    "teacher_tp2": (2, 2, 2, 1, EVAL | {"teacher_tp": 2}),
    "teacher_zero3": (2, 2, 2, 1, {"teacher_engine": "zero3", "loss": "h_kl"}),
    "teacher_ranks1": (2, 2, 2, 2, EVAL | {"teacher_ranks": 1}),
    "packed": (2, 2, 4, 1, EVAL | {"pack": True}),
    "packed_sp2": (2, 2, 4, 1, PROJECTION | {"pack": True, "sequence_parallel": 2}),
    "routes": (2, 2, 4, 1, EVAL | {"teachers": TEACHERS, "route_key": "kind"}),
    "weighed": (1, 2, 4, 1, {"teachers": WEIGHED, "teacher_weights": "ce", "pack": True}),
    "ensemble": (1, 1, 4, 1, {"teachers": ENSEMBLE, "teacher_weights": "mean_p", "eval_rows": 6}),
    "chats": (2, 2, 2, 2, EVAL | {"text_key": "chat"}),
    "learned": (2, 3, 2, 1, PROJECTION | {"loss_options": LEARNED, "eval_rows": 6}),
    "topk": (2, 2, 2, 1, TOP_K | {"eval_rows": 6}),
    "topk_remote": (2, 2, 2, 1, TOP_K | {"teacher_ranks": 1}),
    "dynamic": (1, 2, 2, 2, {"dynamic_scale": True, "loss": "alm"}),
    "text": (2, 1, 2, 2, EVAL | {"kd_weight": 0}),
    "streamed": (1, 0, 2, 2, {"streaming": True}),
    "jsd": (1, 2, 4, 1, {"teacher": "untied", "loss": "generalized_jsd", "loss_topk": 20,
                         "loss_options": {"beta": 0.3}}),
}


def prepare(folder):
    """Write models with tokenizers of two kinds and a corpus into a folder."""
    texts = conftest.passages()
    tokenizers = {"student": demo.unigram(texts, 350), "teacher": demo.byte_level_bpe(texts, 500)}
    tokenizers["student"].chat_template = CHATML
    tokenizers["teacher"].chat_template = PLAIN
    markers = ["<|im_start|>", "<|im_end|>"]
    tokenizers["student"].add_special_tokens({"additional_special_tokens": markers})
    for seed, (name, tokenizer) in enumerate(tokenizers.items(), 1):
        conftest.write_model(tokenizer, seed, folder / name)
    conftest.write_untied(folder / "student", folder / "untied")
    tokenizers["student"].save_pretrained(folder / "untied")
    with open(folder / "corpus.jsonl", "w") as file:
        for number, text in enumerate(texts[:60]):
            chat = [{"role": "user", "content": text[:50]},
                    {"role": "assistant", "content": text[50:]}]
            row = {"text": text, "kind": "ab"[number % 2], "chat": chat}
            file.write(json.dumps(row) + "\n")


def command_line(folder, name):
    """Return the flags of one run."""
    _, stage, micro_batch_size, accumulation_steps, changes = RUNS[name]
    path = jobs.ds_config(folder / f"{name}.json", stage, micro_batch_size, accumulation_steps)
    flags = {"student": folder / "student", "data": folder / "corpus.jsonl", "ds_config": path,
             "max_length": 120, "steps": 4, "output_dir": folder / name, "save_every": 2}
    flags |= changes
    if "teachers" in flags:
        teachers = [entry | {"model": str(folder / entry["model"])} for entry in flags["teachers"]]
        flags["teachers"] = json.dumps(teachers)
    elif flags.get("kd_weight", 1):
        flags["teacher"] = folder / flags.get("teacher", "teacher")
    flags |= {key: json.dumps(value) for key, value in flags.items() if isinstance(value, dict)}
    return [f"--{key}={value}" for key, value in flags.items()]


def record(folder):
    """Make all runs; FOLDER/NAME/metrics.jsonl are what they logged."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True)
    os.environ["ISOGLOSS_CACHE"] = str(folder / "cache")
    prepare(folder)
    for size in sorted({run[0] for run in RUNS.values()}):
        for name in [name for name, run in RUNS.items() if run[0] == size]:
            argv = command_line(folder, name)
            again = [*argv, "--steps=6"]  # goes on from the checkpoint of step 4
            codes = ranks.run(size, jobs.run_distill, [argv])
            codes += ranks.run(size, jobs.run_distill, [again])
            lines = len((folder / name / "metrics.jsonl").read_text().splitlines())
            print(f"{name}: exit codes {codes}, {lines} lines", flush=True)


def compare(before, after):
    """Print every metric that differs; exit code 1 if there is one."""
    differences = 0
    values = 0
    for name in RUNS:
        old_lines = jobs.losses_of(Path(before) / name, -1)
        new_lines = jobs.losses_of(Path(after) / name, -1)
        if len(old_lines) != len(new_lines):
            print(f"{name}: {len(old_lines)} lines before, {len(new_lines)} after")
            differences += 1
        for old, new in zip(old_lines, new_lines):
            for key in old:
                values += 1
                value = new.get(key)
                if old[key] != value:
                    print(f"{name}, step {old['step']}: {key} was {old[key]!r}, is {value!r}")
                    differences += 1
    print(f"{values} values in {len(RUNS)} runs, {differences} differ")
    return differences > 0


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    raise SystemExit({"record": record, "compare": compare}[command](*arguments))
