"""Make the page of isogloss.report, see __main__.py: one HTML file, which needs no network.

Tests: tests/test_report.py, tests/test_curves.py.
"""

import base64
import html
import json
import os
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from isogloss.checkpoints.model_card import facts, flags_text, read_record, results_of, title
from isogloss.command import check_output as check_writable
from isogloss.config import configs_by_teacher
from isogloss.curves import DEFAULT, available, panels_of, picture, read_run
from isogloss.flags.model_names import without_secrets
from isogloss.flags.parse import line_about
from isogloss.flags.terminal import one_line
from isogloss.flags.tool import check_output
from isogloss.inputs import load_data
from isogloss.job.files import write_atomically
from isogloss.job.launch import silence_libraries
from isogloss.models.pretrained import load_config, load_model
from isogloss.projection_tools.tokenizers import load_tokenizer, reason_of
from isogloss.report.text import pieces_of

# of the runs, in their order, as matplotlib has them
COLORS = ("#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 "
          "#17becf").split()
TO = "\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}"
FULL = 4.0  # bits of difference that have the full color
STRONG = 2.0  # those that are bold or slanted where a page has no colors
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --faint: #777; --line: #ddd; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --faint: #999; --line: #444; --page: #161616; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
.pictures { display: flex; flex-wrap: wrap; gap: .5rem; }
img { width: min(100%, 22rem); background: #fff; border-radius: 6px; }
.columns { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }
.columns > div { flex: 1 1 18rem; min-width: 0; }
.columns .text { max-height: 20rem; overflow-y: auto; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: .8rem; margin: 1rem 0; line-height: 1.9; }
.text a { border-radius: 3px; padding: .1em 0; } .apart { color: var(--faint); }
.text a[title]:hover { outline: 1px solid var(--ink); } em, strong { font: inherit; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
.note { color: var(--faint); }
"""


def main(folders, args):
    """Write the page."""
    silence_libraries()
    check_output(args.output)
    check_output(args.png)
    check_writable(Path(args.output))
    if args.student and not is_model(args.student):
        raise ValueError(f"--student {args.student}: no model there")
    runs = dict(zip(short_names(folders), map(Path, folders)))
    name, sections = sections_of(runs, args)
    page = ("<!doctype html><html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(name)}</title><style>{STYLE}</style></head><body>"
            f"<h1>{html.escape(name)}</h1>{''.join(sections)}</body></html>")
    try:  # half of a surrogate pair, which JSON can say, is no text
        write_atomically(Path(args.output), page.encode(errors="replace").decode())
    except OSError as error:
        raise ValueError(f"--output {args.output}: cannot be written ({error.strerror}); make "
                         "room, or name another file") from None
    print(args.output)


def sections_of(folders, args):
    """Return (title of the page, list of its sections) of {name: folder of a run}."""
    runs = {}
    records = {}
    sections = []
    for name, folder in folders.items():
        runs[name] = []
        try:
            runs[name] = read_run(folder)
        except ValueError as error:
            if not any(folder.glob("run*.json")):  # it is no run
                raise
            sections.append(absent(f"results and curves of {name}", error))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(runs)}
    sections += [part("table of results", table_of_runs, runs, colors),
                 part("curves", curves, runs, args, colors)]
    for number, (name, folder) in enumerate(folders.items()):
        try:
            records[name] = read_record(folder, runs[name][-1]["step"] if runs[name] else None)
        except ValueError as error:
            sections.append(absent(f"setting of {name}" + " and no text in colors" * (not number),
                                   error))
    first = next(iter(folders))
    if args.rows and first in records:
        sections.append(part(
            "text in colors", colored_text, folders[first], records[first][1], args))
    sections.append(part("samples", samples, folders, colors))
    if records:
        sections.append(part("setting", settings, records, runs, colors))
    titles = dict.fromkeys(title(cfg) for _, cfg in records.values())
    return "; ".join(titles) or ", ".join(folders), sections


def part(what, make, *arguments):
    """Return a part of the page; where it cannot be made, a note that says why, as a line does."""
    try:
        return make(*arguments)
    except Exception as error:  # damaged files and models that do not load raise any type
        return absent(what, error)


def absent(what, error):
    """Print why a part of the page is left out, and return a note of it."""
    line = one_line(without_secrets(f"no {what}: {reason_of(error)}"))
    print(line_about(line, "isogloss.report"), file=sys.stderr, flush=True)
    return f"<p class=note>{html.escape(line[0].upper() + line[1:])}</p>"


def table(rows, colors=()):
    """Return a table, whose first row is its head, and its first column names what a row has.

    Args:
        colors: {run: color}, of the runs in the head that get a dot; (): none.
    """
    head, *rows = rows
    lines = ["".join(f"<th>{dot(cell, colors)}{html.escape(cell)}</th>" for cell in head)]
    for row in rows:
        lines.append("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row))
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"


def dot(name, colors):
    """Return a dot in the color of a run, as its curves have it; nothing where it is alone."""
    return f'<b style="color:{colors[name]}">●</b> ' if name in colors and len(colors) > 1 else ""


def by_column(entries_of_runs):
    """Return the rows of a table that has a column for each run.

    Args:
        entries_of_runs: {run: {what a row has: its text}}.
    """
    labels = {}
    for entries in entries_of_runs.values():
        labels |= dict.fromkeys(entries)
    rows = [["", *entries_of_runs]]
    for label in labels:
        rows.append([label, *(entries.get(label, "–") for entries in entries_of_runs.values())])
    return rows


def table_of_runs(runs, colors):
    """Return what each run measured, first and last, the runs side by side."""
    measured = {}
    for name, lines in runs.items():
        measured[name] = {text: f"{values[0]:#.4g}{TO}{values[-1]:#.4g}"
                          for text, _, values in results_of(lines)}
    if not any(measured.values()):
        return "<p class=note>No evaluation yet.</p>"
    rows = by_column(measured)
    rows[0][0] = "before training → last"
    return f"<h2>Held-out results</h2>{table(rows, colors)}"


def curves(runs, args, colors):
    """Return a picture of each metric; --png gets one of all."""
    metrics = [name for name in args.metrics.split(",") if name]
    if args.metrics == DEFAULT:
        metrics = available(metrics, runs)
    panels = panels_of(runs, metrics) if metrics else []
    if panels and not find_spec("matplotlib"):
        raise ValueError("matplotlib draws them and is not installed; pip install matplotlib")
    if panels and args.png:
        picture(panels, args.png, colors)
        print(args.png)
    drawn = []
    for panel in panels:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "curve.svg"
            picture([panel], path, colors)
            code = base64.b64encode(path.read_bytes()).decode()
        drawn.append(f'<img alt="{html.escape(panel.metric)}" src="data:image/svg+xml;base64,'
                     f'{code}">')
    return f"<h2>Curves</h2><div class=pictures>{''.join(drawn)}</div>" if drawn else ""


def samples(folders, colors):
    """Return what the students wrote, in a column for each run."""
    columns = []
    for name, folder in folders.items():
        what = f"samples of {name}" if len(folders) > 1 else "samples"
        columns.append(part(what, samples_of, name, folder, colors))
    if not any(columns):
        return ""
    divisions = "".join(f"<div>{column}</div>" for column in columns if column)
    return f"<h2>What the student writes</h2><div class=columns>{divisions}</div>"


def samples_of(name, folder, colors):
    """Return what a student wrote at the last evaluation, and of a run alone at the first."""
    path = folder / "samples.jsonl"
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # a running job may write the last one
    if sample_of(text[text.rfind("\n") + 1 :]):
        lines.append(text[text.rfind("\n") + 1 :])
    records = list(filter(None, map(sample_of, lines)))
    parts = []
    if len(records) < len(lines):
        bad = len(lines) - len(records)
        parts.append(absent(f"more samples than {len(records)}", ValueError(
            f"{bad} of {len(lines)} lines of {path} are no samples of a run")))
    is_alone = len(colors) == 1
    for step in sorted({record["step"] for record in records[:is_alone] + records[-1:]}):
        head = f"step {step}" if is_alone else f"{name}, step {step}"
        parts.append(f"<h3>{dot(name, colors)}{html.escape(head)}</h3>")
        for record in records:
            if record["step"] == step:
                parts.append(f"<p class=text><em class=apart>{html.escape(record['prompt'])}"
                             f"</em>{html.escape(record['text'])}</p>")
    return "".join(parts)


def sample_of(line):
    """Return a line of samples.jsonl as a dict; None: it is none."""
    try:
        record = json.loads(line)
        kinds = type(record["step"]), type(record["prompt"]), type(record["text"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if kinds == (int, str, str) else None


def settings(records, runs, colors):
    """Return how the runs were made: in columns what differs between them, and what does not once.

    Args:
        records: {run: (record, Config)}; runs: {run: lines of metrics}.
    """
    entries_of_runs = {}
    for name, (record, cfg) in records.items():
        step = runs[name][-1]["step"] if runs[name] else 0
        entries = {}
        for label, value in facts(record, cfg, step, runs[name]):
            entries[label] = f"{entries[label]}; {value}" if label in entries else str(value)
        is_chat = any(source["chats"] for source in record.get("sources", ()))
        words = shlex.split(flags_text(cfg, is_chat))
        entries_of_runs[name] = entries | dict(zip(words[::2], words[1::2]))
    head, *rows = by_column(entries_of_runs)
    different = [row for row in rows if len(set(row[1:])) > 1]
    same = [row[:2] for row in rows if len(set(row[1:])) == 1]
    flags = shlex.join(word for row in same if row[0].startswith("--") for word in row)
    parts = ["<h2>Setting</h2>"]
    if different:
        parts.append(table([["what differs (–: default, or none)", *head[1:]], *different], colors))
        parts.append("<h3>The same in all runs</h3>")
    parts.append(table([["", ""], *(row for row in same if not row[0].startswith("--"))]))
    parts.append("<h3>Flags that differ from their defaults</h3>"
                 f"<pre>{html.escape(flags or 'none')}</pre>")
    return "".join(parts)


# --- held-out text --------------------------------------------------------------------------------


def colored_text(folder, cfg, args):
    """Return held-out rows, each chunk colored by whom it surprises more."""
    student = exported(folder, cfg, args.student)
    teachers = [its for its in configs_by_teacher(cfg).values() if its.teacher_kind.has_weights
                and not its.teacher_cache] if cfg.kd_weight else []
    if student is None or not teachers or not cfg.holds_out:
        return ("<p class=note>No text in colors: it takes held-out rows, a teacher that is a "
                "model, and an exported student (python -m isogloss.export).</p>")
    # imports peft and what it finds, which say things until they are silenced
    from isogloss.integrations import FLAGS, Distillation

    its = teachers[0]
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    flags = {name: getattr(its, name) for name in FLAGS - {"kd_weight", "ce_weight", "drop_images"}}
    flags["drop_images"] = cfg.source_options.drop_images
    (tokenizer, model), (teacher_tokenizer, teacher) = [
        load(role, path, args.trust_remote_code)
        for role, path in (("student", student), ("teacher", its.teacher))]
    distillation = Distillation(tokenizer, teacher, teacher_tokenizer, **flags)
    model.to(device).eval()
    data = load_data(cfg, distillation.student, {its.teacher: distillation.encoder})
    parts = ["<h2>Held-out text</h2><p>A chunk is text between two borders that both tokenizers "
             "share. <a style='background:rgba(217,119,6,.5)'>Orange</a>, or bold: it surprises "
             "the student more than the teacher; <a style='background:rgba(37,99,235,.4)'>blue"
             "</a>, or slanted: the teacher more. Gray is not compared. Point at a chunk to see "
             "what both expected.</p>"]
    for example in data.held_out(args.rows):
        pieces = pieces_of(distillation, model, example)
        parts.append(f"<p class=text>{''.join(map(colored, pieces))}</p>")
    return "".join(parts)


def load(role, path, trust_remote_code):
    """Return (tokenizer, model), loaded and checked as by the job.

    Raises:
        ValueError: see `load_tokenizer`, `load_model`.
    """
    load_config(role, path, trust_remote_code)
    tokenizer, _ = load_tokenizer(role, path, trust_remote_code)
    return tokenizer, load_model(role, path, trust_remote_code, dtype="auto")


def exported(folder, cfg, student):
    """Return the directory of a run's student, or None."""
    found = [student] if student else [cfg.export, *map(str, sorted(folder.glob("export_*")))]
    return next(filter(is_model, reversed(found)), None)


def is_model(path):
    return bool(path) and os.path.isfile(os.path.join(path, "config.json"))


def colored(piece):
    """Return a chunk in tags that TensorBoard knows, too, which drops styles."""
    text = html.escape(piece.text)
    if piece.bits is None:
        return f"<a class=apart>{text}</a>"
    difference = piece.bits[0] - piece.bits[1]
    strength = min(abs(difference) / FULL, 1)
    color, tag = ("217,119,6", "strong") if difference > 0 else ("37,99,235", "em")
    if abs(difference) >= STRONG:
        text = f"<{tag}>{text}</{tag}>"
    lines = []
    for role, bits, guesses in zip(("student", "teacher"), piece.bits, piece.guesses):
        likely = ", ".join(f"{guess!r} {probability:.0%}" for guess, probability in guesses)
        lines.append(f"{role}: {bits:.2f} bits; expected {likely}")
    hover = html.escape("\n".join(lines)).replace("\n", "&#10;")
    return (f'<a style="background:rgba({color},{0.6 * strength:.2f})" '
            f'title="{hover}">{text}</a>')


def short_names(folders):
    """Return a name for each folder: the part of its path in which it differs from the others."""
    paths = [os.path.normpath(folder) for folder in folders]
    if len(set(map(os.path.abspath, paths))) < len(paths):
        raise ValueError("a run is named twice")
    common = os.path.commonpath([os.path.abspath(path) for path in paths])
    names = []
    for path in paths:
        differing = os.path.relpath(os.path.abspath(path), common)
        names.append(os.path.basename(path) if differing == "." else differing)
    return names if len(set(names)) == len(names) else paths  # a/a lies in a
