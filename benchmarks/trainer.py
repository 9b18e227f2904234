"""Compare losses as a newcomer runs them: chats with short answers in TRL's SFTTrainer.

    python benchmarks/trainer.py ASSETS [--seeds 0,1,2] [--arms ...]
    python benchmarks/trainer.py --table

ASSETS has models/stories260K, which becomes a student, models/tinytalk_neo_3M, its teacher, and
text/tinytalk_chat_val.txt.  Of its chats 96 are held out.  An arm is LOSS:WEIGHT:RATE; weight 0 is
the text alone.  All else is as SFTConfig has it, 100 steps of 8 chats; max_length is the student's
context.  A run is a line of docs/log/trainer.jsonl; what stands there is not repeated.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.square_table import interval, markdown
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool
from isogloss.integrations import distilled

RECORDS = ROOT / "docs" / "log" / "trainer.jsonl"
STUDENT, TEACHER = "stories260K", "tinytalk_neo_3M"
STEPS, HELD_OUT = 100, 96
SPEAKERS = {"User": "user", "Bot": "assistant"}
TEMPLATE = ("{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'Bot: ' }}{{ m.content }}"
            "{{ eos_token + '\n' if m.role == 'assistant' else '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}Bot: {% endif %}")
ARMS = ",".join(f"{arm}:{rate}" for rate in ("1e-3", "2e-5")  # the second is SFTConfig's
                for arm in ("piece_kl:0", "piece_kl:1", "uld:1"))
MEASURES = {"bits_per_byte": "bits per byte", "kd": "distillation loss"}


@dataclass(kw_only=True)
class Args:
    """Compare losses in TRL's SFTTrainer on chats, by held-out answers."""

    assets: str = flag("", "folder with models/ and text/.")
    arms: str = flag(ARMS, "LOSS:WEIGHT:RATE, with commas; weight 0: the text alone.")
    seeds: str = flag("0,1,2", "of the order of the chats, with commas.")
    table: bool = flag(False, "print the table of the runs that are kept, and end.")


def chats(path):
    """Return the rows of a file in which chats are divided by empty lines."""
    rows = []
    for block in path.read_text().split("\n\n"):
        turns = [line.partition(": ") for line in block.replace("<|endoftext|>", "").splitlines()]
        speakers = [speaker for speaker, _, _ in turns]
        if speakers and speakers == (list(SPEAKERS) * len(turns))[: len(turns)]:
            messages = [{"role": SPEAKERS[speaker], "content": words.strip()}
                        for speaker, _, words in turns]
            messages = messages[: len(turns) // 2 * 2]  # up to the last answer
            rows += [{"messages": messages}] if messages else []
    return rows


def run(args, loss, weight, rate, seed):
    """Train a student and return what it is worth on the held-out chats."""
    student, teacher = [
        AutoModelForCausalLM.from_pretrained(Path(args.assets) / "models" / name, dtype="float32")
        for name in (STUDENT, TEACHER)]
    tokenizers = [AutoTokenizer.from_pretrained(Path(args.assets) / "models" / name)
                  for name in (STUDENT, TEACHER)]
    for tokenizer in tokenizers:
        tokenizer.chat_template = TEMPLATE
    rows = chats(Path(args.assets) / "text" / "tinytalk_chat_val.txt")
    held_out, train = [Dataset.from_list(part) for part in (rows[:HELD_OUT], rows[HELD_OUT:])]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder, max_steps=STEPS, max_length=None, learning_rate=rate, seed=seed, data_seed=seed,
            use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            per_device_eval_batch_size=16)
        trainer = distilled(SFTTrainer, teacher, tokenizers[1], kd_weight=weight, loss=loss)(
            student, args=settings, train_dataset=train, eval_dataset=held_out,
            processing_class=tokenizers[0])
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
        after = trainer.evaluate()
    return {"loss": loss, "weight": weight, "rate": rate, "seed": seed, "steps": STEPS,
            "seconds": round(seconds, 1),
            "teacher_bits_per_byte": round(after["eval_teacher_bits_per_byte"], 4),
            **{measure: round(after[f"eval_{measure}"], 4) for measure in MEASURES}}


def kept():
    """Return {(loss, weight, rate, seed): record}."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    return {tuple(one[name] for name in ("loss", "weight", "rate", "seed")): one
            for one in map(json.loads, lines)}


def table(records):
    """Return rows: each arm, and by how much it is ahead of the text alone, seed by seed."""
    arms = defaultdict(dict)
    for (loss, weight, rate, seed), record in records.items():
        arms[rate, weight, loss if weight else "text"][seed] = record
    rows = [["`loss`", "weight", "rate", "bits per byte", "ahead of the text", "n"]]
    for (rate, weight, loss), of in sorted(arms.items(), reverse=True):
        texts = arms[rate, 0.0, "text"]
        ahead = [texts[seed]["bits_per_byte"] - one["bits_per_byte"] for seed, one in of.items()
                 if weight and seed in texts]
        mean = statistics.mean(one["bits_per_byte"] for one in of.values())
        rows.append([loss, f"{weight:g}", f"{rate:g}", f"{mean:.4f}",
                     interval(ahead) if len(ahead) > 1 else "", str(len(of))])
    return rows


def main(args):
    torch.set_num_threads(1)
    for seed in map(int, args.seeds.split(",")):
        for arm in [] if args.table else args.arms.split(","):
            loss, weight, rate = arm.split(":")
            key = loss, float(weight), float(rate), seed
            if key not in kept():
                with open(RECORDS, "a") as file:
                    file.write(json.dumps(run(args, *key)) + "\n")
    print(markdown(table(kept())))


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
