"""What a run leaves behind: a line of metrics per step, a progress bar, what is needed to run it again."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import uuid
from dataclasses import asdict
from pathlib import Path

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from isogloss.checkpoint import write_atomically


# dense bfloat16 operations a second, as the makers state them
PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def utilization(device_name, parameters, tokens, seconds, ranks):
    """{"mfu": share of the devices' peak that the student's forward and backward use}, if it is known.

    Six operations per parameter and token; attention, teachers and recomputation are not counted.
    """
    peak = next((value for name, value in PEAKS.items() if name in device_name), None)
    return {"mfu": 6 * parameters * tokens / (seconds * ranks * peak)} if peak else {}


TIMED_STEPS = 100  # DeepSpeed keeps every call, so not for ever


def time_collectives():
    """Let DeepSpeed's comms logger start here, with times of single calls.

    By itself it adds to the time of a call that of all calls of the same name before.
    """
    logger, timers = deepspeed.comm.comm.comms_logger, deepspeed.comm.comm.timers
    logger.reset_data()

    def append(raw_name, name, milliseconds, size, own=logger.append):
        own(raw_name, name, milliseconds, size)
        timers(name).reset()

    for name in timers.get_timers():
        timers(name).reset()
    logger.append = append


class Log:
    """metrics.jsonl, the progress bar and wandb; everything but rank 0 is silent."""

    def __init__(self, cfg, start, resolved):
        self.on = dist.get_rank() == 0
        if not self.on:
            return
        folder = Path(cfg.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        lines = self.path.read_text().splitlines() if start and self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= start]
        write_atomically(self.path, "".join(line + "\n" for line in kept))
        record = folder / (f"run_{start:07d}.json" if start else "run.json")  # one more for every resume
        write_atomically(record, run_record(cfg, start, resolved))
        self.bar = tqdm(total=cfg.steps, initial=start, desc=cfg.loss if cfg.kd_weight else "text only",
                        unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
        self.wandb = None
        if cfg.wandb_project:
            import wandb  # a second to import, and rarely wanted

            name = folder.name
            number = folder / "wandb_id"  # folders of one name are not one run
            if not (start and number.exists()):
                write_atomically(number, uuid.uuid4().hex[:16])
            self.wandb = wandb.init(project=cfg.wandb_project, name=name, dir=folder, config=asdict(cfg),
                                    id=number.read_text(), resume="allow")

    def write(self, step, metrics):
        if not self.on:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")
        if self.wandb:
            self.wandb.log(metrics, step=step)

    def advance(self, metrics):
        if self.on:
            shown = {"loss": metrics["loss"], "kd": metrics.get("kd"), "tok/s": metrics["tokens_per_second"]}
            self.bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None}, refresh=False)
            self.bar.update()

    def close(self):
        if self.on:
            self.bar.close()
            if self.wandb:
                self.wandb.finish()


def run_record(cfg, start, resolved):
    """JSON text of all that is needed to run this again."""
    def git(*words):
        here = Path(__file__).parent
        found = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else None

    record = {
        "argv": sys.argv, "config": asdict(cfg), "start_step": start, "ranks": dist.get_world_size(),
        "ds_config_text": Path(cfg.ds_config).read_text(), "ds_config": resolved, "seed": cfg.seed,
        "commit": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD"),
        "versions": {m.__name__: m.__version__ for m in (torch, deepspeed, transformers, datasets)},
        "python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "projection_sha256": cfg.projection and hashlib.sha256(Path(cfg.projection).read_bytes()).hexdigest(),
    }
    return json.dumps(record, indent=1)
