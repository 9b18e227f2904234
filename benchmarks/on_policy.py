"""Measure what a student gains by learning from what it writes itself.

    python benchmarks/on_policy.py ASSETS [--teachers tinytalk_neo_3M,bitstories_1M]
                                   [--losses reverse_kl] [--shares 0,1] [--seeds 3] [--steps 300]
                                   [--batch 16]

The student is stories260K, which writes well already; 100 stories are held out.  Each run is a job
of distill.py on one rank: `batch` samples a step, at most 128 written tokens behind 16 of a story;
off policy the same loss on whole stories, cut to as many tokens.  The table has

reverse_kl  (sum log p(y) - sum log q(y)) / bytes of what the student writes from held-out prompts,
            with the same noise in all runs; nats
bpb         bits per byte of the held-out stories

Runs are kept in runs/on_policy; complete ones are not repeated.  Figures of record are in
docs/LOG.md.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from projection_tools.flags import tool

RUNS = ROOT / "runs" / "on_policy"
STUDENT = "stories260K"


@dataclass(kw_only=True)
class Args:
    """Compare shares of rollouts, losses and teachers.

    Args:
        assets: folder with models/ and text/tinystories_1000.json.
        teachers: folders of models/, with commas.
        losses: with commas.
        shares: values of --on_policy, with commas.
        seeds: of each, 0, 1, ...
        steps: optimizer steps.
        ce_weight: of the cross-entropy on the data.
        learning_rate: of AdamW, falling to 0.
        batch: samples of a step, 16 at a time.
        more: further flags of distill.py, with spaces.
    """

    assets: str
    teachers: str = "tinytalk_neo_3M,bitstories_1M"
    losses: str = "reverse_kl"
    shares: str = "0,1"
    seeds: int = 3
    steps: int = 300
    ce_weight: float = 0.0
    learning_rate: float = 1e-3
    batch: int = 16
    more: str = ""


def run(args, teacher, loss, share, seed):
    """Return the held-out metrics of a run, from its log if it is complete."""
    more = args.more.replace("--", "").replace(" ", "_")
    name = f"{teacher}_{loss}_{share}_{seed}_{args.steps}_{args.ce_weight}_{args.learning_rate}"
    batch = "" if args.batch == 16 else f"_batch{args.batch}"
    output = RUNS / f"{name}{batch}{more}"
    log = output / "metrics.jsonl"
    lines = []
    if log.exists():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    if not lines or lines[-1]["step"] < args.steps or "eval/kd" not in lines[-1]:
        execute(args, teacher, loss, share, seed, output)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return lines[-1]


def execute(args, teacher, loss, share, seed, output):
    """Run distill.py."""
    RUNS.mkdir(parents=True, exist_ok=True)
    config = RUNS / f"ds_{args.batch}.json"
    config.write_text(json.dumps({
        "train_batch_size": args.batch, "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR",
                      "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
        "zero_optimization": {"stage": 0}}))
    models = Path(args.assets) / "models"
    # without rollouts the held-out ones are still wanted: a share that no sample is below
    flags = [
        f"--student={models / STUDENT}", f"--teacher={models / teacher}", f"--loss={loss}",
        f"--data={Path(args.assets) / 'text' / 'tinystories_1000.json'}", f"--seed={seed}",
        f"--on_policy={share or 1e-12}", f"--steps={args.steps}", "--eval_rows=100",
        f"--ce_weight={args.ce_weight}", f"--learning_rate={args.learning_rate}",
        f"--ds_config={config}", "--max_length=145", "--rollout_tokens=128", "--prompt_tokens=16",
        "--rollout_eval=100", f"--output_dir={output}", "--eval_every=100", *args.more.split()]
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    begin = time.monotonic()
    subprocess.run([sys.executable, "distill.py", *flags], cwd=ROOT, env=environment, check=True,
                   stderr=subprocess.DEVNULL)
    print(f"{output.name}: {time.monotonic() - begin:.0f} s", flush=True)


def main(args):
    print("| teacher | loss | share of rollouts | reverse_kl | bpb | tokens | truncated |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for teacher in args.teachers.split(","):
        for loss in args.losses.split(","):
            for share in args.shares.split(","):
                ends = [run(args, teacher, loss, float(share), seed) for seed in range(args.seeds)]
                print(row(teacher, loss, share, ends), flush=True)


def row(teacher, loss, share, ends):
    """Return a line of the table: mean and standard deviation over seeds."""
    cells = [teacher, loss, share]
    for key in ("rollout/reverse_kl_per_byte", "student_bits_per_byte"):
        values = [end[f"eval/{key}"] for end in ends]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells.append(f"{statistics.mean(values):.4f} ± {spread:.4f}")
    for key in ("length", "truncated"):
        cells.append(f"{statistics.mean(end[f'eval/rollout/{key}'] for end in ends):.2f}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
