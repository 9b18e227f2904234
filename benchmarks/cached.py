"""Measure when a cache pays: the same student from a live teacher and from 256 kept tokens.

    python benchmarks/cached.py ASSETS [--rows 32,256] [--steps 16] [--seeds 3]

ASSETS has models/stories260K, the student, models/tinytalk_neo_3M, its teacher with another
tokenizer, and text/tinystories_1000.json.  A step reads 16 stories of at most 128 tokens, so that
of 256 rows each is read once in 16 steps, and of 32 eight times.  For each seed three students
learn: from the text alone, by piece_kl beside the text from the live teacher, and from a cache.

gain      bits per byte of 48 other stories below those of the student before, and of the text
          alone; intervals of 95 %
student   CPU seconds of all steps, with the data and, live, the teacher; the median of the seeds
first     those and what writing the cache takes; the next student from the same cache takes
          `student` alone

One core; runs are kept in runs/cached, and what is done is not repeated.  Figures of record are in
docs/log/2026-11.md, "caches that pay".
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from benchmarks.square_models import batches_of, bits_of
from benchmarks.square_table import interval, markdown
from isogloss import cache, distill
from isogloss.align import TokenTable
from isogloss.command import CacheArgs
from isogloss.data.sample import TextEncoder
from isogloss.flags.parse import flag, parse_flags
from isogloss.flags.tool import tool

RUNS = ROOT / "runs" / "cached"
BATCH, LENGTH, HELD_OUT = 16, 128, 48
STUDENT, TEACHER = "stories260K", "tinytalk_neo_3M"
ARMS = "text", "live", "cached"
DS_CONFIG = {
    "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 0}}


@dataclass(kw_only=True)
class Args:
    """Measure seconds and gains of students of a live teacher and of its cache."""

    assets: str = flag("", "folder with models/ and text/.")
    rows: str = flag("32,256", "stories to learn from, with commas.")
    steps: int = flag(16, "optimizer steps.", low=2)
    seeds: int = flag(3, "students of each kind.", low=2)
    kept: int = flag(256, "tokens of a position that the cache keeps.", low=1)
    learning_rate: float = flag(1e-4, "of AdamW.", low=1e-9)


def once(path, measure):
    """Return what a function measured, read from a file where it is there."""
    if not path.exists():
        value = json.dumps(measure())
        path.write_text(value)
    return json.loads(path.read_text())


def save_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_cache(args, data, folder):
    """Write a cache of a data set; return the CPU seconds."""
    begin = time.process_time()
    flags = [f"--teacher={Path(args.assets) / 'models' / TEACHER}", f"--data={data}",
             f"--output={folder}", f"--top_k={args.kept}", f"--teacher_max_length={LENGTH}"]
    cache.main(parse_flags(CacheArgs, flags))
    return time.process_time() - begin


def learn(args, arm, data, seed):
    """Train a student; return its CPU seconds, and bits per byte before and at the end."""
    output = RUNS / f"{data.stem}_{arm}_{args.steps}_{args.kept}_{args.learning_rate:g}_{seed}"
    models = Path(args.assets) / "models"
    teach = {"text": ["--kd_weight=0"], "live": [f"--teacher={models / TEACHER}"],
             "cached": [f"--teacher_cache={RUNS / f'{data.stem}_{args.kept}'}"]}[arm]
    texts = [json.loads(line)["text"] for line in (RUNS / "held_out.jsonl").open()]
    tokenizer = AutoTokenizer.from_pretrained(models / STUDENT)
    encoder = TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), LENGTH)
    bits = partial(bits_of, batches=batches_of(encoder, texts))
    marks, before, states = [], [], []
    take = distill.train_step

    def timed_step(state, micro_batches):
        states[:] = [state]
        if not marks:
            before.append(bits(state.engine.module.model.eval()))
            state.engine.module.model.train()
        marks.append(time.process_time())
        report = take(state, micro_batches)
        marks.append(time.process_time())
        return report

    distill.train_step = timed_step
    try:
        distill.cli([f"--student={models / STUDENT}", *teach, f"--data={data}", "--num_workers=0",
                     f"--steps={args.steps}", f"--max_length={LENGTH}", f"--output_dir={output}",
                     f"--teacher_max_length={LENGTH}", f"--ds_config={RUNS / 'ds.json'}",
                     f"--learning_rate={args.learning_rate}", f"--seed={seed}", "--resume=never"])
    finally:
        distill.train_step = take
    after = bits(states[0].engine.module.model.eval())
    return {"seconds": marks[-1] - marks[0], "before": before[0], "bits": after}


def compare(args, number):
    """Return the rows of a table for so many stories."""
    texts = json.loads((Path(args.assets) / "text" / "tinystories_1000.json").read_text())
    data = save_rows(RUNS / f"{number}.jsonl", texts[HELD_OUT : HELD_OUT + number])
    key = f"{args.steps}_{args.kept}_{args.learning_rate:g}"
    folder = RUNS / f"{number}_{args.kept}"
    writing = once(RUNS / f"{folder.name}.json", partial(write_cache, args, data, folder))
    rows = []
    for arm in ARMS:
        of_seeds = [once(RUNS / f"{number}_{arm}_{key}_{seed}.json",
                         partial(learn, args, arm, data, seed)) for seed in range(args.seeds)]
        if arm == "text":
            texts_alone = of_seeds
        gains = [text["bits"] - one["bits"] for text, one in zip(texts_alone, of_seeds)]
        seconds = statistics.median(one["seconds"] for one in of_seeds)
        first = seconds + writing if arm == "cached" else seconds
        times = args.steps * BATCH / number
        learned = [one["before"] - one["bits"] for one in of_seeds]
        rows.append([f"{number}, {times:g} times", arm, interval(learned),
                     "" if arm == "text" else interval(gains), f"{first:.1f}", f"{seconds:.1f}"])
    return rows


def main(args):
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    dist.destroy_process_group = lambda: None  # the next job goes on with it
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "ds.json").write_text(json.dumps(DS_CONFIG))
    texts = json.loads((Path(args.assets) / "text" / "tinystories_1000.json").read_text())
    save_rows(RUNS / "held_out.jsonl", texts[:HELD_OUT])
    head = ["stories, each read", "teacher", "gain over the start", "over the text",
            "CPU s, first student", "the next one"]
    rows = [row for number in args.rows.split(",") for row in compare(args, int(number))]
    print(markdown([head, *rows]))


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
