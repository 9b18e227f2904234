"""Which loss teaches best?  Held-out bits per byte of one small student under every loss, on real models.

    python benchmarks/quality.py ASSETS [--seeds 3] [--steps 300] [--only piece_kl,alm] [--weights 2,0.5]

ASSETS holds models/{stories260K, tinytalk_neo_3M, bitstories_1M} and text/tinystories_1000.json.  A fresh
student of the shape of stories260K learns from 900 stories (the first 100 are held out), 8 a step.  The
teacher of the losses for two tokenizers is tinytalk_neo_3M; bitstories_1M has the student's own tokenizer and
is the reference for forward_kl.  One learning rate for all; the weight of each loss is the better one of 0.5
and 2 on seed 0, unless --weights gives those of --only.  A table is printed after every seed; runs that are
complete are not made again.  Figures of record are in docs/LOG.md.
"""

import json
import statistics
import sys
from pathlib import Path

import fire

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import demo

RUNS = ROOT / "runs" / "quality"
LOSSES = "piece_kl", "projection_kl", "gold", "h_kl", "uld", "alm", "forward_kl"
DS_CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto",
             "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
             "zero_optimization": {"stage": 0},
             "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1,
                                                       "torch_adam": True}},
             "scheduler": {"type": "WarmupCosineLR", "params": {
                 "warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear",
                 "warmup_min_ratio": 0.01, "cos_min_ratio": 0.1}}}


def fresh_student(assets, seed):
    """A directory with random weights in the shape of stories260K, and its tokenizer."""
    folder = RUNS / f"student_{seed}"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        source = assets / "models" / "stories260K"
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def held_out(output, steps):
    """Bits per byte after the last step of a run; None if it is not complete."""
    if (output / "metrics.jsonl").exists():
        for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
            if line["step"] == steps and "eval/student_bits_per_byte" in line:
                return line["eval/student_bits_per_byte"]
    return None


def train(assets, loss, weight, seed, steps):
    """Held-out bits per byte of one run; loss None: text alone."""
    output = RUNS / f"{loss}_{weight}_{seed}_{steps}"
    if held_out(output, steps) is None:
        flags = {"student": fresh_student(assets, seed), "data": assets / "text" / "tinystories_1000.json",
                 "seed": seed, "steps": steps, "eval_rows": 100, "max_length": 512, "output_dir": output,
                 "kd_weight": weight, "save_every": 50, "keep_checkpoints": 1, "ds_config": RUNS / "ds.json"}
        if loss:
            name = "bitstories_1M" if loss == "forward_kl" else "tinytalk_neo_3M"
            flags |= {"loss": loss, "teacher": assets / "models" / name}
        if demo.launch(1, [f"--{key}={value}" for key, value in flags.items()]):
            raise SystemExit(f"{output}: the run failed")
    return held_out(output, steps)


def table(text, found, weights):
    """Print bits per byte of every run so far: text: [seeds]; found: {loss: [seeds]}."""
    rows = [("loss", "weight", *[f"seed {seed}" for seed in range(len(text))], "mean", "better than text")]
    rows.append(("text only", "", *[f"{bits:.3f}" for bits in text], f"{statistics.mean(text):.3f}", ""))
    for loss, bits in found.items():
        better = f"{sum(a < b for a, b in zip(bits, text))} of {len(text)}"
        numbers = [f"{b:.3f}" for b in bits]
        rows.append((loss, f"{weights[loss]}", *numbers, f"{statistics.mean(bits):.3f}", better))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("| " + " | ".join(map(str.ljust, row, widths)) + " |", flush=True)


def main(assets, seeds=3, steps=300, only="", weights=""):
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "ds.json").write_text(json.dumps(DS_CONFIG))
    assets = Path(assets).resolve()
    only, weights = [list(x) if isinstance(x, (tuple, list)) else [w for w in str(x).split(",") if w]
                     for x in (only, weights)]  # fire makes a tuple of several
    chosen = only or list(LOSSES)
    text, found, weight = [], {loss: [] for loss in chosen}, dict(zip(chosen, map(float, weights)))
    for seed in range(seeds):
        text.append(train(assets, None, 0, seed, steps))
        for loss in chosen:
            if loss not in weight:
                weight[loss] = min((0.5, 2.0), key=lambda w, loss=loss: train(assets, loss, w, 0, steps))
            found[loss].append(train(assets, loss, weight[loss], seed, steps))
        table(text, found, weight)


if __name__ == "__main__":
    fire.Fire(main)
