"""The report of a run whose files or models are damaged: a line each, and the rest of the page."""

import html
import json
import math
import random
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

import test_report
from isogloss.report import page as report
from isogloss.report.__main__ import cli
from test_pretrained import answer_yes, custom

run = test_report.run  # fixtures
shown = test_report.shown

GONE = "gone"
FOLDER = "a directory"
DEVICE = "a device without an end"
FULL_PAGE = "bits per byte, student", "data:image/svg+xml", "Once <b>", "Flags that differ"
# {file: what the page lacks of FULL_PAGE where it cannot be read}
LACKS = {"metrics.jsonl": FULL_PAGE[:2], "samples.jsonl": FULL_PAGE[2:3], "run.json": FULL_PAGE[3:]}
# {what replaces its bytes: files of which the page then lacks nothing, and says nothing}
DAMAGE = {
    GONE: ["samples.jsonl"], FOLDER: [], DEVICE: [], b"": ["samples.jsonl"], b"[]\n": [],
    b"null\n{}\n": [], b'{"step": -1}\n{"step": 1e999}\n': [], b"[" * 10**5 + b"\n{}\n": [],
    b"\x00\xff\n\n{}\n": [], b'{"step": %s}\n{}\n' % (b"9" * 5000): [],
    b'{"step": "0", "config": {"kd_weight": [1]}}\n{}\n': []}


def damage(path, what):
    path.unlink()
    if what == FOLDER:
        path.mkdir()
    elif what == DEVICE:
        path.symlink_to("/dev/zero")
    elif what != GONE:
        path.write_bytes(what)


def reported(words, capsys, code=0):
    """Return (page, lines on stderr) of a report; as its own lines, and with code 2 one of them."""
    ended = 0
    try:
        cli([*words, "--output=report.html"])
    except SystemExit as end:
        ended = end.code
    lines = capsys.readouterr().err.splitlines()
    assert ended == code and all(line.startswith("isogloss.report: ") for line in lines), lines
    assert code == 0 or len(lines) == 1
    page = Path("report.html")
    assert page.exists() == (code == 0)
    text = page.read_text() if code == 0 else ""
    page.unlink(missing_ok=True)
    test_report.Page(text)
    return text, lines


@pytest.mark.parametrize("file", LACKS)
@pytest.mark.parametrize("what", DAMAGE, ids=lambda what: str(what)[:20])
def test_a_damaged_file_is_a_line_and_the_rest_of_the_page_is_made(shown, capsys, file, what):
    damage(Path("a") / file, what)
    text, lines = reported(["a", "--rows=0"], capsys)
    for said in FULL_PAGE:
        is_there = html.escape(said) in text or said in text
        assert is_there == (said not in LACKS[file]), said
    if file in DAMAGE[what]:
        assert not lines
        return
    assert len(lines) == 1 and file in lines[0], lines
    assert html.escape(lines[0].partition(": no ")[2]) in text  # in its place


def test_what_is_cut_anywhere_is_at_most_a_line_a_file(shown, capsys, monkeypatch):
    """Of a file that a running job writes the last line may be half; flipped bits may say more."""
    monkeypatch.setattr(report, "picture", lambda panels, path, colors: path.write_text("<svg/>"))
    rng = random.Random(0)
    for file in LACKS:
        path = Path("a") / file
        whole = path.read_bytes()
        for place in range(0, len(whole), len(whole) // 20):
            path.write_bytes(whole[:place])
            _, lines = reported(["a", "--rows=0"], capsys)
            is_empty = place <= whole.find(b"\n")  # there is no whole line
            assert len(lines) <= 1 and (file == "run.json" or is_empty or not lines), lines
        for _ in range(40):
            flipped = bytearray(whole)
            flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            assert len(reported(["a", "--rows=0"], capsys)[1]) <= 1
        path.write_bytes(whole)


VALUES = None, True, -1.5, 10**400, 1e308, math.nan, "x", "\ud800", [], {}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:9])
def test_values_of_another_type_are_at_most_a_line(shown, capsys, monkeypatch, value):
    """Of a metric, of a sample, and of each flag and each entry of the record of a run."""
    monkeypatch.setattr(report, "picture", lambda panels, path, colors: path.write_text("<svg/>"))
    monkeypatch.setattr(sys, "argv", ["report"])
    sys.set_int_max_str_digits(0)  # of our writing alone
    text = json.dumps(value)
    sys.set_int_max_str_digits(4300)
    record = json.loads(Path("a/run.json").read_text())
    for file, keys in (("metrics.jsonl", ["step", "loss", "eval/student_bits_per_byte"]),
                       ("samples.jsonl", ["step", "prompt", "text"])):
        path = Path("a") / file
        whole = path.read_text()
        for key in keys:
            line = json.dumps(json.loads(whole.splitlines()[0]) | {key: "HERE"})
            path.write_text(f"{line}\n{whole}".replace('"HERE"', text))
            page, lines = reported(["a", "--rows=0"], capsys)
            assert len(lines) <= 1, key
            if file == "metrics.jsonl" and key != "step":  # a metric may have no number
                assert not lines and FULL_PAGE[0] in page
            if file == "metrics.jsonl" and key == "step" and value is not True:  # which is 1
                assert "line 1 is no line of metrics" in lines[0]
        path.write_text(whole)
    for name in [None, *record, *record["config"]]:
        changed = {"config": record["config"] | {name: "HERE"}} if name else {"config": "HERE"}
        if name in record:
            changed = {name: "HERE"}
        written = json.dumps(record | changed).replace('"HERE"', text)
        Path("a/run.json").write_text(written)
        assert len(reported(["a", "--rows=0"], capsys)[1]) <= 1, name


def test_a_name_may_hold_what_means_something_elsewhere(shown, capsys):
    for name in ("$\\frac$", "a$b$", "<b>&", "x\x1b[2J"):
        Path("a").rename(name)
        assert reported([name, "--rows=0"], capsys)[1] == []
        Path(name).rename("a")


@pytest.mark.parametrize("flags, message", [
    ("--device=tpu", "--device tpu: expected cpu, cuda or auto"),
    ("--device=cuda", "--device cuda: there are 0 GPUs"),
    ("--device=cuda:1", "--device cuda:1: there are 0 GPUs"),
    ("--student=none", "--student none: no model there"),
    ("--student=a", "--student a: no model there"),
])
def test_a_wrong_flag_is_a_line(shown, capsys, monkeypatch, flags, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, [line] = reported(["a", flags], capsys, 2)
    assert message in line


@pytest.mark.parametrize("output", ["none/report.html", "a", "/dev/full", "a/run.json/x"])
def test_a_page_that_cannot_be_written_is_a_line_before_anything_is_read(
        shown, capsys, monkeypatch, output):
    monkeypatch.setattr(report, "read_run", None)
    with pytest.raises(SystemExit) as end:
        cli(["a", "--rows=0", f"--output={output}"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and output in error, error


def test_a_full_disk_is_a_line_and_leaves_the_page_of_before(shown, capsys):
    page = Path("a/report.html")
    cli(["a", "--rows=0", f"--output={page}"])
    before = page.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, limits[1]))
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as end:
            cli(["a", "--rows=0", f"--output={page}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert f"--output {page}: cannot be written (File too large)" in error
    assert page.read_bytes() == before and not list(Path("a").glob(".*"))


def break_file(name, edit):
    """Return what replaces a file of a model."""
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes()))


MODELS = {
    "weights that are cut": break_file("model.safetensors", lambda data: data[:-99]),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "other weights": break_file("config.json", lambda data: data.replace(b": 64", b": 66")),
    "an empty tokenizer": break_file("tokenizer.json", lambda _: b""),
    "a config of no model": break_file("config.json", lambda _: b'{"model_type": "no"}'),
    "a model that is gone": shutil.rmtree,
}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_does_not_load_is_a_line(
        run, models, tmp_path, monkeypatch, capsys, role, case):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    shutil.copytree(models[1], "teacher")
    record = json.loads(Path("run/run.json").read_text())
    for flag, place in (("export", "run/student"), ("teacher", "teacher")):
        record["config"][flag] = str(tmp_path / place)
    Path("run/run.json").write_text(json.dumps(record))
    MODELS[case](tmp_path / {"student": "run/student", "teacher": "teacher"}[role])
    text, lines = reported(["run", "--device=cpu", "--rows=1"], capsys)
    assert all(said in text for said in ("bits per byte, student", "What the student", "Setting"))
    if (role, case) == ("student", "a model that is gone"):  # it may never have been exported
        assert not lines and "an exported student" in text
        return
    assert len(lines) == 1 and "no text in colors: " in lines[0] and f"--{role} " in lines[0]
    assert "<h2>Held-out text" not in text


@pytest.mark.slow
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_code_of_a_model_runs_with_its_flag_alone(
        run, models, tmp_path, monkeypatch, capsys, role):
    """Not even where someone types y."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", "")
    answer_yes(str(tmp_path / "modules"))
    marker = tmp_path / "marker"
    shutil.copytree(run, "run")
    record = json.loads(Path("run/run.json").read_text())
    model = {"student": run / "student", "teacher": models[1]}[role]
    flag = {"student": "export", "teacher": "teacher"}[role]
    record["config"][flag] = str(custom(model, tmp_path, marker))
    Path("run/run.json").write_text(json.dumps(record))
    words = ["run", "--device=cpu", "--rows=1"]
    if role == "student":
        words.append(f"--student={record['config'][flag]}")
    _, [line] = reported(words, capsys)
    assert f"--{role} " in line and "needs Python code that comes with the model" in line
    assert not marker.exists()
    text, lines = reported([*words, "--trust_remote_code"], capsys)
    assert marker.exists() and not lines and "<h2>Held-out text" in text


@pytest.mark.slow
def test_data_that_are_gone_and_memory_that_is_full_are_lines(
        run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    record = json.loads(Path("run/run.json").read_text())
    record["config"]["data"] = "gone.jsonl"
    Path("run/run.json").write_text(json.dumps(record))
    _, [line] = reported(["run", "--device=cpu"], capsys)
    assert "no text in colors: --data gone.jsonl: no such file" in line

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more")

    monkeypatch.setattr(report, "load_model", full)
    _, [line] = reported(["run", "--device=cpu"], capsys)
    assert "no text in colors: OutOfMemoryError: CUDA out of memory. Tried to" in line
