"""Describe an exported student: what it was made of, how, and how good it is.

The card names models and data sets by their hub ids; of a path on this machine only the last part.
Tests: tests/test_export.py.
"""

import json
import os
import re
import shlex
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData, hf_hub_download

from isogloss.config import Config, configs_by_teacher
from isogloss.curves import DEFAULT, available, is_number, panels_of, picture, read_run
from isogloss.data.mixture import sources_of
from isogloss.flags.model_names import without_secrets
from isogloss.flags.parse import one_line

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")
PICTURE = "curves.png"
OF_BASE = "license", "license_name", "license_link", "language"  # keys that a student inherits
MOST_CARD = 2**16  # characters of a card that are read; PyYAML takes up to three seconds for them
MOST_WORDS = 200  # of a list, and characters of each
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
    "resume", "wandb_project", "local_rank", "loss", "projection", "eval_task_options",
    "writer", "plugin", "trust_remote_code", "config", "teacher_cache",
    "teacher_tokenizer"}


# {what a license's name begins with: what it asks of a model made with it, or taught by it}, of the
# texts of Meta and Google of 2023 to 2025
RULES = {
    "llama2": "its outputs may improve no other model than Llama 2 and what derives from it",
    "llama3": 'a model that was made with it or taught by it has a name that begins with "Llama", '
              'and says "Built with Llama"',
    "llama4": 'a model that was made with it or taught by it has a name that begins with "Llama", '
              'and says "Built with Llama"',
    "gemma": "a model that learns from its outputs is a derivative, which hands on its terms",
    "cc-by-nc": "it is not for commercial use",
}
CITATION = """\
@software{isogloss,
  title = {Isogloss: cross-tokenizer knowledge distillation on DeepSpeed},
  author = {{The Isogloss authors}},
  year = {2026}
}"""


def read_record(folder, step=None):
    """Return (record as a dict, Config) of a run: of its last start that is before a step, if any.

    The record is run.json, or of a start from a checkpoint run_NNNNNNN.json.

    Raises:
        ValueError: there is no such file, or it is another program's.
    """
    first = Path(folder) / "run.json"
    later = sorted(first.parent.glob("run_*.json"))
    if later and not os.path.exists(first):  # it began with the checkpoint of another one
        first = later[0]
    before = [path for path in later if step is None or path.name < f"run_{step:07d}.json"]
    path = [first, *before][-1]
    try:
        if not os.path.isfile(path):  # a device may have no end
            raise OSError("no file")
        record = json.loads(path.read_text(encoding="utf-8"))
        values = record["config"]
        if not (isinstance(record.get("versions", {}), dict)
                and isinstance(record.get("commit") or "", str)):
            raise ValueError("its versions or its commit are none")
        known = {field.name for field in fields(Config)}
        # an older version may have had other flags
        return record, Config(**{key: values[key] for key in values if key in known})
    except OSError:
        raise ValueError(f"{path}: cannot be read; name the --output_dir of a run") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: is no record of a run ({error})") from None


def write_card(target, folder, step):
    """Write README.md, and where the run was measured a picture of its curves."""
    record, cfg = read_record(folder, step)
    try:
        lines = [line for line in read_run(folder) if line["step"] <= step]
    except ValueError:  # a checkpoint that came without the metrics
        lines = []
    metrics = available(DEFAULT.split(","), {"run": lines}) if find_spec("matplotlib") else []
    if metrics:
        picture(panels_of({"run": lines}, metrics), Path(target) / PICTURE)
    (Path(target) / "README.md").write_text(card_text(record, cfg, lines, step, bool(metrics)))


def card_text(record, cfg, lines, step, has_picture):
    sections = [front_matter(cfg, lines), f"# {title(cfg)}", description(cfg), usage(cfg)]
    sections.append(table(["", ""], facts(record, cfg, step)))
    results = results_of(lines)
    if results:
        compared = [[text, f"{values[0]:.4g}", f"{values[-1]:.4g}"] for text, _, values in results]
        sections += ["## Held-out results", table(["", "before", f"step {step}"], compared)]
    if has_picture:
        sections.append(f"![Curves of the run]({PICTURE})")
    rules = license_rules(cfg)
    if rules:
        sections += ["## Licenses", "\n".join(f"- {rule}" for rule in rules)]
    sections += ["## Flags", "Flags that differ from their defaults:", flags_text(cfg)]
    sections += ["## Citation", f"```bibtex\n{CITATION}\n```"]
    return "\n\n".join(sections) + "\n"


def front_matter(cfg, lines=()):
    """Return the metadata that the hub reads."""
    is_adapter = bool(cfg.lora_r and not cfg.merge)
    base = {} if cfg.from_scratch else card_of(cfg.student)
    models = [] if cfg.from_scratch else hub_ids([cfg.student])
    sources = hub_ids([data.partition(":")[0] for data in data_names(cfg)])
    results = []
    for _, key, values in results_of(lines):
        is_text = key in MEASURED
        name = key.removeprefix("eval/")
        if is_text:
            name = public_name(cfg.eval_data) or ", ".join(map(public_name, data_names(cfg)))
        results.append(EvalResult(
            task_type="text-generation", dataset_name=name, dataset_type=(sources or [name])[0],
            metric_type=key.rpartition("/")[2], metric_value=round(values[-1], 6)))
    more = dict.fromkeys(OF_BASE) | base
    if models:
        more["base_model_relation"] = "adapter" if is_adapter else "finetune"
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers", pipeline_tag="text-generation",
        base_model=models or None, datasets=sources or None, eval_results=results or None,
        model_name=title(cfg) if results else None,
        tags=["isogloss", "knowledge-distillation"], **more)
    return f"---\n{card}\n---"


@lru_cache
def card_of(name):
    """Return what a model's own card says of `OF_BASE`; {}: nothing, or no card can be had.

    It is read as anyone may have written it, and as far as MOST_CARD.
    """
    try:
        path = Path(name) / "README.md"
        if not path.is_file():
            if not hub_ids([name]):
                return {}
            path = hf_hub_download(name, "README.md", etag_timeout=5)
        with open(path, encoding="utf-8") as file:
            front = re.match(r"\s*---\n(.*?)\n---", file.read(MOST_CARD), re.DOTALL)
        card = yaml.load(front[1], WithoutAliases)
        return {key: words for key in OF_BASE if (words := words_of(card.get(key)))}
    except Exception:  # a card is a help, and what hinders it is of many kinds
        return {}


def words_of(value):
    """Return a text of a card, or a list of them, of which each is one short line; else None."""
    if isinstance(value, list):
        return [word for word in map(words_of, value[:MOST_WORDS]) if isinstance(word, str)]
    return one_line(value)[:MOST_WORDS] if isinstance(value, str) else None


class WithoutAliases(yaml.SafeLoader):
    """Refuse aliases: a few lines of them stand for more than any memory holds."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.composer.ComposerError(problem="an alias")
        return super().compose_node(parent, index)


def license_rules(cfg):
    """List what the licenses of the base model and of the teachers ask of the student."""
    models = [] if cfg.from_scratch else [cfg.student]
    if cfg.kd_weight:
        models += [entry.teacher for entry in configs_by_teacher(cfg).values()]
    rules = []
    for name in dict.fromkeys(filter(None, models)):
        card = card_of(name)
        license = str(card.get("license_name") or card.get("license") or "")
        for beginning, rule in RULES.items():
            if license.lower().replace("-", "").startswith(beginning.replace("-", "")):
                rules.append(f"{public_name(name)} ({license}): {rule}")
    return rules


def title(cfg):
    """Return what the student is: its own name, and whom it learned from."""
    base = public_name(cfg.student).rpartition("/")[2]
    if not cfg.kd_weight:
        return f"{base}, trained on text"
    names = [teacher_name(entry).rpartition("/")[2] for entry in configs_by_teacher(cfg).values()]
    return f"{base}, distilled from {', '.join(names)}"


def usage(cfg):
    """Return lines that run in the directory of the export; on the hub its id stands for "."."""
    install = "pip install transformers" + (" peft" if cfg.lora_r and not cfg.merge else "")
    return (f"```python\n# {install}\nfrom transformers import pipeline\n\n"
            'write = pipeline("text-generation", ".")\n'
            'print(write("The boat", max_new_tokens=30)[0]["generated_text"])\n```')


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
    """Return (what, metric, values) of all that evaluations measured, tasks included."""
    names = dict(MEASURED)
    for line in lines:
        for key in line:
            is_task = key.startswith("eval/") and key.endswith(("_acc", "_pass@1"))
            if is_task:
                names.setdefault(key, key.removeprefix("eval/"))
            for metric, text in MEASURED.items():
                # of one of several teachers, or of a source of a mixture
                own = metric.removeprefix("eval")
                if key.startswith(f"{metric}/"):
                    names.setdefault(key, f"{text} ({key.removeprefix(metric + '/')})")
                elif key.startswith("eval/") and key.endswith(own) and key != metric:
                    names.setdefault(key, f"{text} ({key[len('eval/') : -len(own)]})")
    entries = []
    for key, text in names.items():
        values = [line[key] for line in lines if is_number(line.get(key))]
        if values:
            entries.append((text, key, values))
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
            words += [f"--{field.name}", str(without_secrets(value))]
    return "    " + shlex.join(words) if words else "    none"


def _is_path(value):
    return value.startswith(("/", "~", "./", "../", "file:")) or os.path.lexists(value)


def table(head, entries):
    lines = [head, ["---"] * len(head), *entries]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
