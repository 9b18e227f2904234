"""Measure what a student that cannot write yet learns from what it writes.

    python benchmarks/on_policy.py ASSETS JUDGE [--teachers bitstories_1M,tinytalk_neo_3M]
                                   [--losses reverse_kl,no_teacher] [--shares 0,0.5,1] [--seeds 3]

ASSETS has models/ and text/tinystories_1000.json; JUDGE is the directory of a model that takes no
part.  The student has the shape and the tokenizer of stories260K and random weights, and reads
stories for 500 steps.  From there each arm goes on for 300 steps of 16 samples, by distill.py on
one rank, with cross-entropy on the samples that are data.  Then the student writes behind the first
16 tokens of 200 held-out stories, with the same noise in every arm:

judge   bits per byte that the judge finds in what it wrote; low also where it repeats itself
4-grams share of the texts' sequences of four words that are distinct
held    bits per byte of the held-out stories, as far as training reads them
behind  bits per byte of 30 of their words behind ten words of the student's own

Runs are kept in runs/on_policy; complete ones are not repeated.  `no_teacher` is of rivals.py.
Figures of record are in docs/LOG.md.
"""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from isogloss.flags.parse import flag
from isogloss.flags.tool import tool
from isogloss.rollout import Prompt, write

RUNS = ROOT / "runs" / "on_policy"
STUDENT = "stories260K"
FIRST_STEPS, FIRST_RATE = 500, 3e-3
HELD_OUT = 200
PROMPT, WRITTEN = 16, 128  # tokens
WORDS, HUMAN_WORDS = 10, 30
READ = 300  # bytes, about 140 tokens
DS_CONFIG = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR",
                  "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 0}}
RUN = "from benchmarks import rivals; rivals.add(); from isogloss import distill; distill.cli()"


@dataclass(kw_only=True)
class Args:
    """Compare teachers, losses and shares of what the student writes."""

    assets: str = flag("", "folder with models/ and text/.")
    judge: str = flag("", "directory of a model that judges.")
    teachers: str = flag("bitstories_1M,tinytalk_neo_3M", "folders of models/, with commas.")
    losses: str = flag("reverse_kl", "names of --loss or of rivals.py, with commas.")
    shares: str = flag("0,0.5,1", "values of --on_policy, with commas.")
    seeds: int = flag(3, "runs of each arm.", low=1)
    steps: int = flag(300, "optimizer steps.", low=1)
    learning_rate: float = flag(1e-3, "of AdamW, falling to 0.", low=1e-9)
    kd_weight: float = flag(1.0, "of the loss.", low=0)


def stories(args):
    """Return (stories to learn from, held-out ones)."""
    texts = json.loads((Path(args.assets) / "text" / "tinystories_1000.json").read_text())
    return texts[HELD_OUT:], texts[:HELD_OUT]


def distill(args, output, student, *flags):
    """Run distill.py, unless it has ended before; return the directory of its export."""
    if not (output / "student" / "config.json").exists():
        RUNS.mkdir(parents=True, exist_ok=True)
        data, config = RUNS / "train.jsonl", RUNS / "ds.json"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in stories(args)[0]))
        config.write_text(json.dumps(DS_CONFIG))
        flags = [f"--student={student}", f"--data={data}", f"--ds_config={config}",
                 f"--max_length={PROMPT + WRITTEN + 1}",
                 f"--output_dir={output}", f"--export={output / 'student'}", "--num_workers=0",
                 *flags]
        environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        subprocess.run([sys.executable, "-c", RUN, *flags], cwd=ROOT, env=environment, check=True,
                       stderr=subprocess.DEVNULL)
    return output / "student"


def beginner(args):
    """Return the directory of the student that every arm begins with."""
    fresh = RUNS / "fresh"
    if not fresh.exists():
        model = Path(args.assets) / "models" / STUDENT
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(fresh)
        AutoTokenizer.from_pretrained(model).save_pretrained(fresh)
    return distill(args, RUNS / "beginner", fresh, "--kd_weight=0", f"--steps={FIRST_STEPS}",
                   f"--learning_rate={FIRST_RATE}")


def arm(args, teacher, loss, share, seed):
    """Return the directory of a trained student; no teacher: of the text alone."""
    name = f"{teacher or 'text'}_{loss}_{share}_{args.kd_weight}_{args.learning_rate}_{args.steps}"
    flags = [f"--steps={args.steps}", f"--seed={seed}", f"--learning_rate={args.learning_rate}"]
    if teacher:
        flags += [f"--teacher={Path(args.assets) / 'models' / teacher}", f"--loss={loss}",
                  f"--kd_weight={args.kd_weight}"]
        if share:
            flags += [f"--on_policy={share}", f"--rollout_tokens={WRITTEN}",
                      f"--prompt_tokens={PROMPT}"]
    else:
        flags.append("--kd_weight=0")
    return distill(args, RUNS / f"{name}_{seed}", beginner(args), *flags)


# --- what a student writes ------------------------------------------------------------------------


@cache
def loaded(folder):
    """Return (model, tokenizer)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def nats(folder, before, behind):
    """Return -log p(behind | before) of two texts."""
    model, tokenizer = loaded(folder)
    start = tokenizer(before)["input_ids"]
    ids = tokenizer(before + behind)["input_ids"]
    shared = next((place for place, (one, other) in enumerate(zip(start, ids)) if one != other),
                  len(start))
    ids = torch.tensor([ids])
    logits = model(ids[:, :-1]).logits[0, max(shared, 1) - 1 :]
    return float(F.cross_entropy(logits, ids[0, max(shared, 1) :], reduction="sum"))


def bits_per_byte(folder, pairs):
    """Return the bits per byte of what stands behind, of [(before, behind)]."""
    total = sum(nats(folder, before, behind) for before, behind in pairs if behind)
    return total / math.log(2) / sum(len(behind.encode()) for _, behind in pairs)


def judged(args, folder):
    """Return {metric: value} of a student, from its file if it was judged before."""
    file = folder / "judged.json"
    if file.exists():
        return json.loads(file.read_text())
    model, tokenizer = loaded(folder)
    held_out = stories(args)[1]
    prompts = [Prompt(tokenizer(text)["input_ids"][:PROMPT], (0, number, 0), WRITTEN)
               for number, text in enumerate(held_out)]
    written = []
    completions = write(model, prompts, [tokenizer.eos_token_id], len(tokenizer))
    for prompt, done in zip(prompts, completions):
        before = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        whole = tokenizer.decode([*prompt.ids, *done.ids], skip_special_tokens=True)
        written.append((before, whole[len(before) :]))
    behind = []
    for (before, text), story in zip(written, held_out):
        own = before + " ".join(text.split(" ")[: WORDS + 1])
        human = story[len(before) :].split(" ")[1 : HUMAN_WORDS + 1]
        behind.append((own, " " + " ".join(human)))
    grams = []
    for _, text in written:
        words = text.split()
        grams += zip(words, words[1:], words[2:], words[3:])
    found = {"judge": bits_per_byte(args.judge, written), "4-grams": len(set(grams)) / len(grams),
             "held": bits_per_byte(folder, [("", story[:READ]) for story in held_out]),
             "behind": bits_per_byte(folder, behind)}
    file.write_text(json.dumps(found))
    (folder / "written.json").write_text(json.dumps(written, indent=1))
    loaded.cache_clear()
    return found


def main(args):
    """Print a line for each arm: means and standard deviations over the seeds."""
    print("| teacher | loss | share | judge | 4-grams | held | behind |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    row(args, "the student before", "", "", [beginner(args)])
    choices = (args.teachers.split(","), args.losses.split(","), args.shares.split(","))
    for teacher, loss, share in [("", "", ""), *itertools.product(*choices)]:
        folders = [arm(args, teacher, loss, float(share or 0), seed) for seed in range(args.seeds)]
        row(args, teacher or "none", loss, share, folders)


def row(args, teacher, loss, share, folders):
    values = [judged(args, folder) for folder in folders]
    cells = [teacher, loss, share]
    for key in values[0]:
        column = [value[key] for value in values]
        spread = f" ± {statistics.stdev(column):.3f}" if len(column) > 1 else ""
        cells.append(f"{statistics.mean(column):.3f}{spread}")
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    tool(Args, main, positional=("assets", "judge"))
