"""Describe an exported student: what it was made of, how, and how good it is.

The card names models and data sets by their hub ids; of a path on this machine only the last part.
Tests: tests/test_export.py.
"""

import json
import os
import re
from dataclasses import fields
from pathlib import Path

from huggingface_hub import ModelCardData

from isogloss.config import Config, configs_by_teacher
from isogloss.curves import DEFAULT, available, panels_of, picture, read_run
from isogloss.data.mixture import sources_of
from isogloss.flags.model_names import without_secrets

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")
PICTURE = "curves.png"
# Rows of the table of results, as far as the run measured them.
MEASURED = {
    "eval/student_bits_per_byte": "bits per byte, student",
    "eval/teacher_bits_per_byte": "bits per byte, teacher",
    "eval/student_accuracy": "accuracy per token, student",
    "eval/kd": "distillation loss, nats per term",
    "eval/top1_agreement": "agreement with the teacher at the starts of chunks",
}
# Flags that say nothing of how the student was made, or that stand in the table anyway.
LEFT_OUT = {
    "student", "teacher", "teachers", "data", "eval_data", "output_dir", "export", "ds_config",
    "resume", "wandb_project", "local_rank", "loss", "projection", "eval_task_data",
    "rollout_command", "plugin", "trust_remote_code", "config", "teacher_cache",
    "teacher_tokenizer"}


def read_record(folder):
    """Return (run.json as a dict, Config) of a run.

    A run that began with the checkpoint of another one has run_NNNNNNN.json alone, of its start.

    Raises:
        ValueError: there is no such file, or it is another program's.
    """
    path = Path(folder) / "run.json"
    if not path.exists():
        path = max(Path(folder).glob("run_*.json"), default=path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        values = record["config"]
        known = {field.name for field in fields(Config)}
        # an older version may have had other flags
        return record, Config(**{key: values[key] for key in values if key in known})
    except OSError:
        raise ValueError(f"{path}: cannot be read; name the --output_dir of a run") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: is no record of a run ({error})") from None


def write_card(target, folder, step):
    """Write README.md, and where the run was measured a picture of its curves."""
    record, cfg = read_record(folder)
    try:
        lines = [line for line in read_run(folder) if line["step"] <= step]
    except ValueError:  # a checkpoint that came without the metrics
        lines = []
    metrics = available(DEFAULT.split(","), {"run": lines})
    if metrics:
        picture(panels_of({"run": lines}, metrics), Path(target) / PICTURE)
    (Path(target) / "README.md").write_text(card_text(record, cfg, lines, step, bool(metrics)))


def card_text(record, cfg, lines, step, has_picture):
    name = public_name(cfg.export or cfg.output_dir).rpartition("/")[2]
    sections = [front_matter(cfg), f"# {name}", description(cfg)]
    sections.append(table(["", ""], facts(record, cfg, step)))
    results = results_of(lines)
    if results:
        sections += ["## Held-out results", table(["", "before", f"step {step}"], results)]
    if has_picture:
        sections.append(f"![Curves of the run]({PICTURE})")
    sections += ["## Flags", "Flags that differ from their defaults:", flags_text(cfg)]
    return "\n\n".join(sections) + "\n"


def front_matter(cfg):
    """Return the metadata that the hub reads."""
    library = "peft" if cfg.lora_r and not cfg.merge else "transformers"
    models = [] if cfg.from_scratch else [cfg.student]
    card = ModelCardData(
        library_name=library, pipeline_tag="text-generation", base_model=hub_ids(models) or None,
        datasets=hub_ids([data.partition(":")[0] for data in data_names(cfg)]) or None,
        tags=["isogloss", "knowledge-distillation"])
    return f"---\n{card}\n---"


def data_names(cfg):
    return [source.cfg.data for source in sources_of(cfg)]


def hub_ids(names):
    return [name for name in names if HUB_ID.match(name) and not Path(name).exists()]


def public_name(name):
    """Return a hub id, an address without what is secret in it, and of a path its last part."""
    is_local = name.startswith(("file:", "local:"))
    if not is_local and ("://" in name or hub_ids([name.partition(":")[0]])):
        return without_secrets(name)
    return Path(name).name or name


def teacher_name(cfg):
    """Return the name of the teacher of a Config: of a served one its model, of a cache its own."""
    return public_name(cfg.teacher_tokenizer or cfg.teacher or cfg.teacher_cache)


def description(cfg):
    start = "random weights in the shape of" if cfg.from_scratch else ""
    base = " ".join([start, public_name(cfg.student)]).strip()
    if not cfg.kd_weight:
        return f"A student from {base}, trained on text without a teacher."
    names = ", ".join(teacher_name(entry) for entry in configs_by_teacher(cfg).values())
    return (f"A student from {base}, distilled from {names} by cross-tokenizer knowledge "
            "distillation (Isogloss).")


def facts(record, cfg, step):
    """Return the rows of the table that says what the student was made of."""
    entries = [["base model", public_name(cfg.student) + " (shape only)" * cfg.from_scratch]]
    if cfg.kd_weight:
        for teacher in configs_by_teacher(cfg).values():
            loss = f"loss `{teacher.loss}`, weight {teacher.kd_weight:g}"
            entries.append(["teacher", f"{teacher_name(teacher)}: {loss}"])
    entries.append(["cross-entropy", f"weight {cfg.ce_weight:g}"])
    entries.append(["data", ", ".join(map(public_name, data_names(cfg)))])
    entries.append(["steps", f"{step} of {cfg.steps}"])
    entries.append(["ranks", record.get("ranks", "")])
    versions = record.get("versions", {})
    entries.append(["made with", ", ".join(f"{key} {value}" for key, value in versions.items())])
    if record.get("commit"):
        changed = " with changes" if record.get("diff") else ""
        entries.append(["commit of Isogloss", f"`{record['commit'][:12]}`{changed}"])
    return entries


def results_of(lines):
    """Return (what, first value, last value) of all that evaluations measured, tasks included."""
    names = dict(MEASURED)
    for line in lines:
        for key in line:
            is_task = key.startswith("eval/") and key.endswith(("_acc", "_pass@1"))
            if is_task:
                names.setdefault(key, key.removeprefix("eval/"))
            for metric, text in MEASURED.items():
                if key.startswith(f"{metric}/"):  # of one of several teachers
                    names.setdefault(key, f"{text} ({key.removeprefix(metric + '/')})")
    entries = []
    for key, text in names.items():
        values = [line[key] for line in lines if line.get(key) is not None]
        if values:
            entries.append([text, f"{values[0]:.4g}", f"{values[-1]:.4g}"])
    return entries


def flags_text(cfg):
    """Return the flags that differ from their defaults, as they are written on a command line."""
    words = []
    left_out = {*LEFT_OUT, "steps"} if cfg.epochs else LEFT_OUT  # epochs say how many there are
    for field in fields(Config):
        value = getattr(cfg, field.name)
        if field.name not in left_out and value != field.default:
            if isinstance(value, str) and _is_path(value):
                value = public_name(value)
            words.append(f"--{field.name} {without_secrets(value)}")
    return "    " + " ".join(words) if words else "    none"


def _is_path(value):
    return value.startswith(("/", "~", "./", "../", "file:")) or os.path.lexists(value)


def table(head, entries):
    lines = [head, ["---"] * len(head), *entries]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
