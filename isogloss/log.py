"""Write what a run leaves behind: metrics, a progress bar, the record to run it again."""

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from transformers.utils.hub import cached_file, extract_commit_hash

from isogloss.config import configs_by_teacher
from isogloss.flags.model_names import read_model_name, without_secrets
from isogloss.flags.parse import line_about
from isogloss.flags.terminal import harmless, one_line, unguarded
from isogloss.job.files import write_atomically
from isogloss.job.watch import print_line
from isogloss.projection_tools.tokenizers import reason_of

NOTHING_TAUGHT = "no step so far has a term of the distillation loss"
WHERE_TO_LOOK = ("see aligned_bytes, skipped_chats and cut_before_labels, and what the rows and "
                 "--teacher_max_length leave for a teacher to read")


class Taught:
    """Count the terms by which each teacher has taught; say once that none has taught anything.

    Attributes:
        terms: {teacher: so many of the whole run}, the same on every rank; empty: not known.
    """

    def __init__(self):
        self.terms = {}
        self.has_warned = False

    def note(self, counts):
        """Note the global Counts of a step."""
        for name, pair in zip(self.terms, counts.pairs):
            self.terms[name] += pair.weighing_terms
        if self.terms and not any(self.terms.values()) and not self.has_warned:
            self.has_warned = True
            if dist.get_rank() == 0:
                print_line(f"{NOTHING_TAUGHT}; {WHERE_TO_LOOK}")


class Waiting:
    """Say once that steps of a run learn nothing, or wait for data; the first starts workers."""

    STEPS = 20
    LEAST = 0.2  # of their time
    MOST_CUT = 0.5  # of the samples of a step

    def __init__(self):
        self.num_steps = 0
        self.seconds = 0.0
        self.data_seconds = 0.0
        self.has_warned = False

    def note(self, metrics, seconds):
        """Note how long a step has taken, and by its metrics what it learned, how it waited."""
        data_seconds = metrics["data_seconds"]
        cut = metrics["cut_before_labels"] or 0  # None: of no sample
        line = ""
        if not metrics["tokens"]:
            line = "a step has no token to learn; see without_labels and cut_before_labels"
        elif cut >= self.MOST_CUT:
            line = (f"a step loses {cut:.0%} of its samples, which --max_length cuts before what "
                    "is to be learned of them (cut_before_labels)")
        if line and not self.has_warned:
            self.has_warned = True
            print_line(line)
        self.num_steps += 1
        if not 1 < self.num_steps <= 1 + self.STEPS:
            return
        self.seconds += seconds
        self.data_seconds += data_seconds
        fraction = self.data_seconds / self.seconds
        if self.num_steps == 1 + self.STEPS and fraction > self.LEAST:
            print_line(f"steps wait for data {fraction:.0%} of their time; more --num_workers "
                       "prepare more at a time")


# Lines of JSON in the output directory, each with its step.
LOGS = "metrics.jsonl", "rollouts.jsonl", "eval_tasks.jsonl", "samples.jsonl"


def noting_failure(write):
    """Let a method of Log note that the disk refuses what it writes; from then on it does nothing.

    The ranks then agree on the end of the job, which one that raises alone would keep from saving.
    """
    @functools.wraps(write)
    def write_and_note(self, *arguments):
        if self.failure:
            return
        try:
            write(self, *arguments)
        except OSError as error:
            self.failure = f"nothing can be logged to {self.folder} ({reason_of(error)})"

    return write_and_note


class Log:
    """metrics.jsonl, the progress bar and DeepSpeed's monitors, on rank 0 alone.

    Attributes:
        failure: why nothing can be written any more; "": it can.
        first_bits: the student's held-out bits per byte at step 0, None before.

    Args:
        cfg: the flags output_dir, steps, loss, kd_weight, ds_config, projection and seed; all of
            them are recorded.
        start_step: step from which the run starts, 0 or that of the checkpoint.
        ds_config: dict that DeepSpeed sees, recorded too.
        description: of what else a user may want to know; printed once.
        monitor: the engine's MonitorMaster, which writes to what ds_config enables (tensorboard,
            csv_monitor, comet, wandb); None: none.
        sources: of `inputs.RunData.record`.
    """

    def __init__(self, cfg, start_step, ds_config, description="", monitor=None, sources=()):
        self.is_active = dist.get_rank() == 0
        self.pending = None  # (step, function that returns its metrics)
        self.failure = ""
        self.first_bits = None
        self.sources = sources
        if not self.is_active:
            return
        if description:
            print(line_about(description), file=sys.stderr, flush=True)
        self.folder = folder = Path(cfg.output_dir)
        self.path = folder / "metrics.jsonl"
        self._start_files(cfg, start_step, ds_config, sources)
        self.bar = progress_bar(cfg.steps, start_step)
        self.monitor = monitor if monitor and monitor.enabled else None
        if self.monitor and self.monitor.wandb_monitor:
            from isogloss.job.wandb_steps import log_by_own_steps

            log_by_own_steps(self.monitor)

    @noting_failure
    def _start_files(self, cfg, start_step, ds_config, sources):
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        if start_step:
            from isogloss.checkpoints.resume import set_aside_later

            set_aside_later(cfg, start_step, LOGS)
        for path in (folder / name for name in LOGS):
            if path == self.path or path.exists():
                lines = kept_lines(path, start_step)
                write_atomically(path, "".join(lines))
                if path == self.path and lines:
                    self._note_first(**json.loads(lines[0]))
        # Every resume adds a record of its own, under its step; what came later is gone.
        record_name = f"run_{start_step:07d}.json" if start_step else "run.json"
        for path in folder.glob("run_*.json"):
            if path.name > record_name:
                path.unlink()
        write_atomically(folder / record_name, run_record(cfg, start_step, ds_config, sources))

    def _note_first(self, step, **metrics):
        if step == 0:
            self.first_bits = metrics.get("eval/student_bits_per_byte", self.first_bits)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """Write what is pending, at the end of a run or before the error that ends it."""
        # a device that has failed gives no numbers, and what it raises is not the cause
        with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
            self.flush()

    def write_later(self, step, read_metrics):
        """Write the metrics of a training step, and advance the bar, when something else follows.

        By then the device works on the next step, so the host does not wait for this one.

        Args:
            read_metrics: () -> dict; it may wait for the device.
        """
        self.flush()
        if self.is_active:
            self.pending = step, read_metrics

    def flush(self):
        """Write the metrics that are pending."""
        if self.pending is None:
            return
        step, read_metrics = self.pending
        self.pending = None
        metrics = read_metrics()
        self.write(step, metrics)
        self.advance(metrics)

    def say(self, step, text, lines=()):
        """Print a line above the progress bar, and further lines as they are."""
        if self.is_active:
            line = f"step {step}: {one_line(without_secrets(text))}"
            tqdm.write("\n".join([line, *map(harmless, lines)]), file=unguarded(sys.stderr))

    @noting_failure
    def write(self, step, metrics):
        """Append a line of metrics; what is not finite, which JSON has no number for, is null."""
        if not self.is_active:
            return
        self.flush()
        metrics = {name: finite_or_none(value) for name, value in metrics.items()}
        self._note_first(step, **metrics)
        # Opened for every line, so that the file is complete whenever the process dies.
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step} | metrics, allow_nan=False) + "\n")
        numbers = {}
        for name, value in metrics.items():
            if value is not None:  # dashboards have a section for each first part of a name
                numbers[name if name.startswith("eval/") else f"train/{name}"] = value
        if self.monitor:
            # by steps, where the engine's own Train/Samples/lr counts samples
            self.monitor.write_events([(name, value, step) for name, value in numbers.items()])

    @noting_failure
    def write_records(self, name, step, records):
        """Append to NAME.jsonl.

        Args:
            name: "rollouts", "eval_tasks" or "samples".
            records: dicts of `on_policy.record_of`, `EvalSamples.write` (of which the first is
                printed) or, of all ranks, of `TaskSuite.run`.
        """
        if not self.is_active or not records:
            return
        self.flush()
        with open(self.folder / f"{name}.jsonl", "a") as file:
            for record in records:
                file.write(json.dumps({"step": step} | record) + "\n")
        if name == "samples":
            self.say(step, f"{records[0]['prompt']} >> {records[0]['text']}")

    def advance(self, metrics):
        """Move the progress bar by one step."""
        if not self.is_active:
            return
        candidates = {
            "loss": metrics["loss"],
            "kd": metrics.get("kd"),  # absent with several teachers, and with none
            "tok/s": metrics["tokens_per_second"],
        }
        shown = {name: f"{value:.4g}" for name, value in candidates.items() if value is not None}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def end_bar(self):
        """Write what is pending and end the progress bar; other lines follow."""
        if self.is_active:
            self.flush()
            self.bar.close()

    close = end_bar


class PlainLines:
    """Let tqdm write whole lines where no cursor moves back: in a file, in a notebook."""

    def write(self, text):
        if text.strip():
            print(text.strip(), file=sys.stderr)

    def flush(self):
        sys.stderr.flush()


def progress_bar(steps, start_step):
    """Return a bar in a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        return tqdm(total=steps, initial=start_step, unit="step", mininterval=0.5,
                    file=unguarded(sys.stderr))
    line = "{n_fmt}/{total_fmt} steps [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    return tqdm(total=steps, initial=start_step, unit="step", mininterval=10, file=PlainLines(),
                bar_format=line)


def finite_or_none(value):
    """Return a number, or None in place of NaN, infinities, and a mean over nothing."""
    return value if value is not None and math.isfinite(value) else None


def kept_lines(path, start_step):
    """Return the lines of an earlier start of the run, as `lines_until` does."""
    if not start_step:
        return []
    from isogloss.checkpoints.resume import lines_until

    return lines_until(path, start_step)


def check_logs(output_dir, start_step):
    """Raise a ValueError where the files of an earlier run are none that a run goes on with."""
    for name in LOGS:
        path = Path(output_dir) / name
        if path.exists() and not path.is_file():
            raise ValueError(f"--output_dir {output_dir}: {name} is no file there; name another "
                             "directory")
        kept_lines(path, start_step)


def run_record(cfg, start_step, ds_config, sources=()):
    """Return the JSON text of all that is needed to run this again."""
    libraries = (torch, deepspeed, transformers, datasets)
    projection_sha256 = cfg.projection  # none: its empty value
    if cfg.projection:
        projection_sha256 = hashlib.sha256(Path(cfg.projection).read_bytes()).hexdigest()
    record = {
        "argv": sys.argv,
        "config": asdict(cfg),
        "config_text": Path(cfg.config).read_text("utf-8") if cfg.config else "",
        "models": model_versions(cfg),
        "start_step": start_step,
        "ranks": dist.get_world_size(),
        "ds_config_text": Path(cfg.ds_config).read_text("utf-8"),
        "ds_config": ds_config,
        "sources": sources,
        "seed": cfg.seed,
        "commit": _git("rev-parse", "HEAD"),
        "diff": _git("diff", "HEAD"),
        "versions": {library.__name__: library.__version__ for library in libraries},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "projection_sha256": projection_sha256,
    }
    return json.dumps(without_secrets(record), indent=1)


def model_versions(cfg):
    """Return which files the student and the teachers are, by the names that the flags give them.

    The commit is that of a hub id, to which its revision (or its newest version) led; None: a
    directory.
    """
    names = {cfg.student: "student"}
    if cfg.kd_weight:
        for teacher_cfg in configs_by_teacher(cfg).values():
            names.setdefault(teacher_cfg.teacher_path, "teacher")
    versions = {}
    for name, role in names.items():
        model = read_model_name(role, name)
        path = cached_file(model.base, "config.json", revision=model.revision)
        versions[name] = model._asdict() | {"commit": extract_commit_hash(path, None)}
    return versions


def _git(*arguments):
    command = ["git", "-C", Path(__file__).parent, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None
