"""Measure what the examples teach: held-out bits per byte with a teacher and without.

    python benchmarks/copying.py ASSETS [--seeds 3] [--pairs finer,coarser]

Copies the modules that the examples need, and the examples, to an empty directory, and runs them
there as their docstrings say: 900 stories, `--epochs` of them, 8 a step, from a fresh student of
0.26 million weights, once with `--kd_weight` and once with 0.  100 stories are held out.  The pairs
are those of quality.py: finer, student tok512 (512 tokens) and teacher tinytalk_neo_3M (14,019);
coarser, the other way round.  Figures of record are in docs/LOG.md.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from align import TokenTable
from projection_tools.flags import tool

FILES = ("align.py", "losses.py", "translation.py", "spelling.py", "cross_tokenizer.py")
HELD_OUT = 100
PAIRS = {  # name: (student's tokenizer, teacher)
    "finer": ("stories260K", "tinytalk_neo_3M"),
    "coarser": ("tinytalk_neo_3M", "stories260K"),
}
SHAPE = "stories260K"  # of every student
MAX_LENGTH = 256


@dataclass(kw_only=True)
class Args:
    """Compare students of the examples by their held-out bits per byte.

    Args:
        assets: folder with models/ and text/tinystories_1000.json.
        pairs: of the module's docstring, with commas.
        examples: files of examples/, with commas.
        seeds: students per pair, with seeds 0, 1, ...
        kd_weight: of the distillation loss.
        learning_rate: of both students.
        epochs: times that the 900 stories are read.
    """

    assets: str
    pairs: str = "finer,coarser"
    examples: str = "plain.py,hf_trainer.py"
    seeds: int = 3
    kd_weight: float = 1.0
    learning_rate: float = 3e-3
    epochs: int = 1


def held_out_bits(folder, texts):
    """Return the bits per byte of a model on the beginnings of texts."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = TokenTable.from_tokenizer(tokenizer)
    nats = 0.0
    num_bytes = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prefix = [table.bos] if table.bos >= 0 else []
        ids = torch.tensor([[*prefix, *ids][:MAX_LENGTH]])
        with torch.no_grad():
            mean = model(input_ids=ids, labels=ids).loss.item()
        nats += mean * (ids.shape[1] - 1)
        num_bytes += len(table.decode(ids[0, 1:].tolist()))
    return nats / math.log(2) / num_bytes


def arguments_of(example, args, kd_weight):
    """Return what an example gets behind its four paths."""
    if example == "hf_trainer.py":
        return [str(kd_weight), str(args.learning_rate), str(args.epochs)]
    return [f"--kd_weight={kd_weight}", f"--learning_rate={args.learning_rate}",
            f"--epochs={args.epochs}"]


def prepare(folder, args):
    """Copy the modules and examples and write the stories; return those that are held out."""
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for example in args.examples.split(","):
        shutil.copy(ROOT / "examples" / example, folder)
    stories = json.loads((Path(args.assets) / "text" / "tinystories_1000.json").read_text())
    texts = [story if isinstance(story, str) else story["text"] for story in stories]
    lines = [json.dumps({"text": text}) + "\n" for text in texts[HELD_OUT:]]
    (folder / "texts.jsonl").write_text("".join(lines))
    return texts[:HELD_OUT]


def save_fresh_student(folder, models, name, seed):
    """Write a student with random weights and the tokenizer of a model."""
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    config = AutoConfig.from_pretrained(models / SHAPE)
    config.vocab_size = len(TokenTable.from_tokenizer(tokenizer))
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_example(folder, example, student, teacher, args, kd_weight):
    """Run an example as a command; return the folder of its student."""
    output = folder / "trained"
    shutil.rmtree(output, ignore_errors=True)
    paths = [str(student), str(teacher), "texts.jsonl", str(output)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, example, *paths, *arguments_of(example, args, kd_weight)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{example}: {done.stderr[-2000:]}")
    return output


def main(args):
    models = Path(args.assets).resolve() / "models"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = prepare(folder, args)
        print("| example | pair | seed | text only | with the teacher | gain |")
        print("| --- | --- | --- | --- | --- | --- |")
        for example in args.examples.split(","):
            for pair in args.pairs.split(","):
                gains = []
                for seed in range(args.seeds):
                    student = folder / "student"
                    save_fresh_student(student, models, PAIRS[pair][0], seed)
                    bits = []
                    for kd_weight in (0.0, args.kd_weight):
                        trained = run_example(folder, example, student, models / PAIRS[pair][1],
                                              args, kd_weight)
                        bits.append(held_out_bits(trained, held_out))
                    gains.append(bits[0] - bits[1])
                    print(f"| {example} | {pair} | {seed} | {bits[0]:.3f} | {bits[1]:.3f} | "
                          f"{gains[-1]:.3f} |", flush=True)
                print(f"| {example} | {pair} | mean | | | {statistics.mean(gains):.3f} |")


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
