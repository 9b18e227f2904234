"""Compare the losses by what a small student learns: held-out bits per byte, on real models.

    python benchmarks/quality.py ASSETS [--seeds 3] [--steps 300] [--only piece_kl,alm]
                                 [--weights 2,0.5]

A fresh student of the shape of stories260K learns from 900 stories, 8 a step; the first 100 stories
are held out.  The teacher of the losses for two tokenizers is tinytalk_neo_3M.  bitstories_1M has
the student's tokenizer and is the teacher of forward_kl, the reference.  All runs have one learning
rate.  The weight of each loss is the better one of 0.5 and 2 on seed 0, unless --weights gives the
weights of --only.

The script prints a table after every seed.  It does not repeat runs that are complete.  Figures of
record are in docs/LOG.md.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import demo
from projection_tools.flags import tool

RUNS = ROOT / "runs" / "quality"
LOSSES = ["piece_kl", "projection_kl", "gold", "h_kl", "uld", "alm", "forward_kl"]
CANDIDATE_WEIGHTS = (0.5, 2.0)  # one on either side of the default, 1

# The usual values for small models; not tuned.
DS_CONFIG = {
    "train_batch_size": 8,  # stories a step
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "optimizer": {
        "type": "AdamW",
        # torch's AdamW: DeepSpeed's would compile a kernel on first use
        "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
            "warmup_min_ratio": 0.01,  # with 0 the first two steps would learn nothing
            "cos_min_ratio": 0.1,
        },
    },
}


@dataclass(kw_only=True)
class Args:
    """Compare losses by the held-out bits per byte of their students.

    Args:
        assets: folder with models/{stories260K, tinytalk_neo_3M, bitstories_1M} and
            text/tinystories_1000.json.
        seeds: students per loss, with seeds 0, 1, ...
        steps: optimizer steps of each student.
        only: losses to compare, with commas; empty: all.
        weights: kd_weight of each loss of --only, with commas; empty: the better one on seed 0.
    """

    assets: str
    seeds: int = 3
    steps: int = 300
    only: str = ""
    weights: str = ""


def split_list(text):
    """Return the entries of a list with commas; an empty text has none."""
    return text.split(",") if text else []


def fresh_student(assets, seed):
    """Return a folder with random weights in the shape of stories260K, and its tokenizer."""
    folder = RUNS / f"student_{seed}"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        source = assets / "models" / "stories260K"
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    return folder


def final_bits(output, steps):
    """Return the held-out bits per byte after the last step of a run; None if it is incomplete."""
    metrics = output / "metrics.jsonl"
    if not metrics.exists():
        return None
    for line in demo.read_metrics(metrics):
        if line["step"] == steps and "eval/student_bits_per_byte" in line:
            return line["eval/student_bits_per_byte"]
    return None


def train(assets, loss, weight, seed, steps):
    """Train one student, unless that is done, and return its held-out bits per byte.

    Args:
        loss: one of LOSSES; empty: cross-entropy alone, without a teacher.
        weight: kd_weight; 0 without a teacher.
    Raises:
        SystemExit: the job failed.
    """
    output = RUNS / f"{loss or 'no_teacher'}_{weight}_{seed}_{steps}"
    if final_bits(output, steps) is None:
        flags = {
            "student": fresh_student(assets, seed),
            "data": assets / "text" / "tinystories_1000.json",
            "seed": seed,
            "steps": steps,
            "eval_rows": 100,  # the first stories of 1,000
            "max_length": 512,
            "output_dir": output,
            "kd_weight": weight,
            "save_every": 50,  # a run that was killed goes on from there
            "keep_checkpoints": 1,  # the newest is all that a resumed run needs
            "ds_config": RUNS / "ds.json",
        }
        if loss:
            # forward_kl compares position by position, so it needs the student's tokenizer
            teacher = "bitstories_1M" if loss == "forward_kl" else "tinytalk_neo_3M"
            flags |= {"loss": loss, "teacher": assets / "models" / teacher}
        # one rank: models of this size gain nothing from a second one
        if demo.launch(1, demo.command_line(flags)):
            raise SystemExit(f"quality.py: the run {output} failed; see the error above")
    return final_bits(output, steps)


def better_weight(assets, loss, steps):
    """Return the candidate weight with fewer held-out bits per byte on seed 0."""
    bits = {}
    for weight in CANDIDATE_WEIGHTS:
        bits[weight] = train(assets, loss, weight, 0, steps)
    return min(bits, key=bits.get)


def table(baseline, results, weights):
    """Return a Markdown table of all runs so far.

    Args:
        baseline: bits per byte without a teacher, one per seed.
        results: {loss: bits per byte, one per seed}.
        weights: {loss: kd_weight}.
    """
    seeds = [f"seed {seed}" for seed in range(len(baseline))]
    rows = [
        ["loss", "weight", *seeds, "mean", "better than no teacher"],
        ["no teacher", "", *three_digits(baseline), f"{statistics.mean(baseline):.3f}", ""],
    ]
    for loss, bits in results.items():
        num_better = 0
        for student_bits, baseline_bits in zip(bits, baseline):
            num_better += student_bits < baseline_bits  # fewer bits per byte are better
        mean = f"{statistics.mean(bits):.3f}"
        better = f"{num_better} of {len(baseline)}"
        rows.append([loss, f"{weights[loss]}", *three_digits(bits), mean, better])
    return demo.markdown_table(rows)


def three_digits(values):
    """Return the values as texts with three digits after the point."""
    return [f"{value:.3f}" for value in values]


def main(args):
    losses = split_list(args.only) or LOSSES
    weights = dict(zip(losses, map(float, split_list(args.weights))))
    assets = Path(args.assets).resolve()
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "ds.json").write_text(json.dumps(DS_CONFIG))

    baseline = []
    results = {loss: [] for loss in losses}
    # seeds outside, losses inside: after every seed the table compares all losses
    for seed in range(args.seeds):
        baseline.append(train(assets, "", 0, seed, args.steps))
        for loss in losses:
            if loss not in weights:
                weights[loss] = better_weight(assets, loss, args.steps)
            results[loss].append(train(assets, loss, weights[loss], seed, args.steps))
        # a run takes minutes, so the reader of a log should not wait for the last one
        print(table(baseline, results, weights), flush=True)


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
