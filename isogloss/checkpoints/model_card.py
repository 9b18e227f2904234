"""Describe an exported student: what it was made of, how, and how good it is.

The card names models and data sets by their hub ids; of a path on this machine only the last part.
Tests: tests/test_export.py.
"""

import json
import os
import re
import shlex
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from isogloss.config import Config, configs_by_teacher
from isogloss.curves import DEFAULT, available, is_number, panels_of, picture, read_run
from isogloss.data.mixture import sources_of
from isogloss.doors import door
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
    "eval/rollout/reverse_kl_per_byte": "text of its own: reverse KL, nats a byte",
    "eval/rollout/repeated_4grams": "text of its own: repeated 4-grams of tokens",
    "eval/rollout/truncated": "text of its own: cut before its end",
}
# Flags that say nothing of how the student was made, or that stand in the table anyway.
LEFT_OUT = {
    "student", "teacher", "teachers", "data", "eval_data", "output_dir", "export", "ds_config",
    "resume", "wandb_project", "local_rank", "loss", "projection", "eval_task_options",
    "writer", "plugin", "trust_remote_code", "config", "teacher_cache",
    "teacher_tokenizer"}
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
    text = card_text(record, cfg, lines, step, bool(metrics))
    # half of a surrogate pair, as names of files may hold it, is no text
    (Path(target) / "README.md").write_bytes(text.encode(errors="replace"))


def card_text(record, cfg, lines, step, has_picture):
    is_chat = any(source["chats"] for source in record.get("sources", ()))
    sections = [front_matter(cfg, lines, is_chat), f"# {title(cfg)}", description(cfg)]
    sections += [usage(cfg, is_chat), table(["", ""], facts(record, cfg, step, lines))]
    results = results_of(lines)
    if results:
        sections += ["## Held-out results", table_of_results(results, lines)]
        first = next((line for line in lines
                      if line["step"] == 0 and is_number(line.get(results[0][1]))), {})
        teacher = ", ".join(map(teacher_name, teachers_of(cfg)))
        sections += [f"Before training {line}." for line in worse_teachers(first, teacher)]
    if has_picture:
        sections.append(f"![Curves of the run]({PICTURE})")
    rules = license_rules(cfg)
    if rules:
        sections += ["## Licenses", "\n".join(f"- {rule}" for rule in rules)]
    sections += ["## Flags", "Flags that differ from their defaults:", flags_text(cfg, is_chat)]
    sections += ["## Citation", f"```bibtex\n{CITATION}\n```"]
    return "\n\n".join(sections) + "\n"


def front_matter(cfg, lines=(), is_chat=False):
    """Return the metadata that the hub reads."""
    is_adapter = bool(cfg.lora_r and not cfg.merge)
    models = [] if cfg.from_scratch else hub_ids([cfg.student])
    sources = hub_ids([data.partition(":")[0] for data in data_names(cfg)])
    results = []
    for _, key, values in results_of(lines):
        name = key.removeprefix("eval/")
        if key in MEASURED:
            name = public_name(cfg.eval_data) or ", ".join(map(public_name, data_names(cfg)))
        results.append(EvalResult(
            task_type="text-generation", dataset_name=name, dataset_type=(sources or [name])[0],
            metric_type=key.rpartition("/")[2], metric_value=round(values[-1], 6)))
    has_base = not cfg.from_scratch and with_cards([cfg.student])
    more = door("base_card").card_of(cfg.student) if has_base else {}
    if models:
        more["base_model_relation"] = "adapter" if is_adapter else "finetune"
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers", pipeline_tag="text-generation",
        base_model=models or None, datasets=sources or None, eval_results=results or None,
        model_name=title(cfg) if results else None,
        tags=["isogloss", "knowledge-distillation", *["conversational"] * is_chat], **more)
    return f"---\n{card}\n---"


def license_rules(cfg):
    """List what the licenses of the base model and of the teachers ask of the student."""
    models = [] if cfg.from_scratch else [cfg.student]
    models += [entry.teacher for entry in teachers_of(cfg)]
    names = with_cards(models)
    return door("base_card").rules_of(names) if names else []


def with_cards(models):
    """List those of some models that may have a card of their own."""
    return [name for name in dict.fromkeys(filter(None, models))
            if hub_ids([name]) or os.path.isfile(f"{name}/README.md")]


def teachers_of(cfg):
    """List the Config of each teacher; []: the text alone teaches."""
    return list(configs_by_teacher(cfg).values()) if cfg.kd_weight else []


def title(cfg):
    """Return what the student is: its own name, and whom it learned from."""
    base = public_name(cfg.student).rpartition("/")[2]
    names = [teacher_name(entry).rpartition("/")[2] for entry in teachers_of(cfg)]
    if not names:
        return f"{base}, trained on text"
    return f"{base}, distilled from {', '.join(names)}"


def usage(cfg, is_chat=False):
    """Return lines that run in the directory of the export; on the hub its id stands for "."."""
    install = "pip install transformers" + (" peft" if cfg.lora_r and not cfg.merge else "")
    prompt, answer = '"The boat"', '["generated_text"]'
    if is_chat:
        prompt = '[{"role": "user", "content": "What is a boat?"}]'
        answer += '[-1]["content"]'
    kwargs = json.loads(cfg.template_kwargs or "{}") if is_chat else {}
    options = f", tokenizer_encode_kwargs={kwargs!r}" if kwargs else ""
    return (f"```python\n# {install}\nfrom transformers import pipeline\n\n"
            f'write = pipeline("text-generation", ".")\nprompt = {prompt}\n'
            f"print(write(prompt, max_new_tokens=30{options})[0]{answer})\n```")


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
    names = ", ".join(map(teacher_name, teachers_of(cfg)))
    if not names:
        return f"A student from {base}, trained on text without a teacher."
    return (f"A student from {base}, distilled from {names} by cross-tokenizer knowledge "
            "distillation (Isogloss).")


def facts(record, cfg, step, lines):
    """Return the rows of the table that says what the student was made of."""
    entries = [["base model", public_name(cfg.student) + " (shape only)" * cfg.from_scratch]]
    for teacher in teachers_of(cfg):
        loss = f"loss `{teacher.loss}`, weight {teacher.kd_weight:g}"
        entries.append(["teacher", f"{teacher_name(teacher)}: {loss}"])
    if cfg.on_policy:
        from isogloss.flags.on_policy import intention

        entries.append(["on-policy", intention(cfg)])
    if cfg.ce_weight and cfg.on_policy < 1:
        entries.append(["cross-entropy", f"weight {cfg.ce_weight:g}"
                        + ", on the samples of the data" * bool(cfg.on_policy)])
    entries.append(["data", ", ".join(map(public_name, data_names(cfg)))])
    entries.append(["steps", f"{step} of {cfg.steps}"])
    if record.get("ds_config"):
        entries += training(record["ds_config"], record.get("sources", []), cfg, step, lines)
    entries.append(["ranks", record.get("ranks", "")])
    versions = record.get("versions", {})
    entries.append(["made with", ", ".join(f"{key} {value}" for key, value in versions.items())])
    if record.get("commit"):
        changed = " with changes" if record.get("diff") else ""
        entries.append(["commit of Isogloss", f"`{record['commit'][:12]}`{changed}"])
    return entries


def training(ds_config, sources, cfg, step, lines):
    """Return the rows that say how the student was trained, and on how much; see `run_record`."""
    samples = ds_config["train_batch_size"] // cfg.sequence_parallel
    entries = [["batch", f"{samples:,} samples"]]
    tokens = [line["tokens"] for line in lines if is_number(line.get("tokens"))]
    if tokens:
        entries[0][1] += f", {sum(tokens) / len(tokens):,.0f} learned tokens on average"
    words = [ds_config[key]["type"] for key in ("optimizer", "scheduler") if key in ds_config]
    rates = [line["lr"] for line in lines if is_number(line.get("lr"))]
    words += [f"learning rate up to {max(rates):g}"] if rates else []
    entries.append(["optimizer", ", ".join(words)])
    dtypes = [key for key in ("torch_autocast", "bf16", "fp16")
              if ds_config.get(key, {}).get("enabled") is True]
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    entries.append(["precision", f"{(dtypes or ['float32'])[0]}, ZeRO stage {stage}"])
    seen = [f"{sum(tokens):,} learned tokens"] if tokens else []
    whole = sum(source["weight"] or 0 for source in sources)
    for source in sources:
        if source["samples"]:
            epochs = step * samples * source["weight"] / whole / source["samples"]
            named = f" of {source['name']}" if source["name"] else ""
            seen.append(f"{epochs:.3g} epochs of {source['samples']:,} samples{named}")
    entries.append(["seen", ", ".join(seen)])
    held_out = sum(source["held_out"] for source in sources)
    return [*entries, ["held-out rows", f"{held_out:,}" if held_out else "none"]]


def results_of(lines):
    """Return (what, metric, values) of all that evaluations measured, tasks included."""
    keys = {}
    for line in lines:
        keys |= line
    names = dict(MEASURED)
    for key in filter(lambda key: key.startswith("eval/"), keys):
        if key.endswith(("_acc", "_pass@1")):
            names.setdefault(key, key.removeprefix("eval/"))
        for metric, text in MEASURED.items():
            # of one of several teachers, or of a source of a mixture
            end = metric.removeprefix("eval")
            if key.startswith(f"{metric}/"):
                names.setdefault(key, f"{text} ({key.removeprefix(metric + '/')})")
            elif key.endswith(end) and key != metric:
                names.setdefault(key, f"{text} ({key[len('eval/') : -len(end)]})")
    entries = []
    for key, text in names.items():
        values = [line[key] for line in lines if is_number(line.get(key))]
        if values:
            entries.append((text, key, values))
    return entries


def table_of_results(results, lines):
    """Return the first and the last value of each; one of another step than the head's says so."""
    steps = {}
    for _, key, _ in results:
        steps[key] = [line["step"] for line in lines if is_number(line.get(key))]
    heads = 0, max(of_key[-1] for of_key in steps.values())
    rows = []
    for text, key, values in results:
        cells = []
        for place, head in zip((0, -1), heads):
            step = steps[key][place]
            cells.append(f"{values[place]:#.4g}" + f" (step {step})" * (step != head))
        rows.append([text, *cells])
    return table(["", "before", f"step {heads[1]}"], rows)


def worse_teachers(metrics, teacher="teacher"):
    """List what to say of teachers that an evaluation's metrics find worse than the student."""
    student_bits = metrics.get("eval/student_bits_per_byte")
    lines = []
    for key, bits in metrics.items() if student_bits else ():
        if key.startswith("eval/teacher_bits_per_byte") and bits and bits > student_bits:
            name = key.partition("/")[2].partition("/")[2] or teacher
            lines.append(f"teacher {name} is worse on the held-out rows than the student "
                         f"({bits:#.4g} and {student_bits:#.4g} bits per byte)")
    return lines


def flags_text(cfg, is_chat=True):
    """Return the flags that differ from their defaults, as they are written on a command line."""
    words = []
    # epochs say how many steps there are; no text has a date
    left_out = {*LEFT_OUT, *["steps"] * bool(cfg.epochs), *["chat_date"] * (not is_chat)}
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
