"""The report: one valid page without network, and text in colors that say what models say.

A browser opens it where one is named (pip install PyQt6-WebEngine, 550 MB, elsewhere):

    ISOGLOSS_QT=/env/bin/python pytest tests/test_report.py -k browser
"""

import html
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from isogloss.config import Config
from isogloss.data.batch_types import Example
from isogloss.integrations import Distillation
from isogloss.report import __main__ as report, media
from isogloss.report.__main__ import cli, colored
from isogloss.report.text import Piece, pieces_of
from jobs import ds_config, run_distill, short_run
from test_pretrained import answer_yes, custom

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """See that every tag is closed, and keep texts, titles and addresses."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.texts = []
        self.titles = []
        self.sources = []
        self.feed(text)
        assert self.open == ["html", "body"] or not self.open, self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "title" in attrs:
            self.titles.append(attrs["title"])
        self.sources += [attrs[key] for key in ("src", "href") if key in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(models, texts, tmp_path_factory):
    """Directory of a run that has measured, written samples and exported its student."""
    folder = tmp_path_factory.mktemp("runs") / "a <b>"  # which a page has to escape
    folder.mkdir()
    line = short_run(models, texts, folder, "--steps=3", "--eval_rows=3", "--eval_every=2",
                     "--eval_samples=1", "--teacher_dtype=float32", f"--output_dir={folder}",
                     f"--export={folder / 'student'}", "--num_workers=0")
    assert ranks.run(1, run_distill, [line]) == [[0]]
    return folder


@pytest.mark.slow
def test_the_page_is_whole_and_asks_no_network(run, texts, tmp_path, capsys):
    output = tmp_path / "report.html"
    cli([str(run), f"--output={output}", "--rows=2", "--device=cpu"])
    assert capsys.readouterr().out.strip().endswith(str(output))
    page = Page(output.read_text())
    assert page.sources and all(source.startswith("data:") for source in page.sources)
    said = " ".join(page.texts)
    for words in ("student, distilled from teacher", "bits per byte, student", "What the student",
                  "--max_length 60", "Held-out text", "step 0", "step 3"):
        assert words in said, words
    assert page.titles and all("student: " in title and "teacher: " in title
                               for title in page.titles)
    assert "".join(page.texts).count(texts[0][:20]) >= 1
    cli([str(run), f"--output={output}", "--rows=0"])
    assert "Held-out text" not in "".join(Page(output.read_text()).texts)


# Load a page as wide as is said; print what it asks for, what it complains of, and its sizes.
BROWSER = """
import json, sys
from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

asked, complaints = [], []
class Requests(QWebEngineUrlRequestInterceptor):
    def interceptRequest(self, info):
        asked.append(info.requestUrl().scheme())
class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):
        complaints.append(message)
app = QApplication(sys.argv[:1])
view, requests = QWebEngineView(), Requests()
page = Page(view)
page.setUrlRequestInterceptor(requests)
view.setPage(page)
view.resize(int(sys.argv[2]), 800)
view.show()
def show(found):
    print(json.dumps([sorted(set(asked)), complaints, *found]))
    app.quit()
def measure(is_loaded):
    page.runJavaScript('''[innerWidth, document.documentElement.scrollWidth,
        [...document.images].map(image => image.naturalWidth),
        new Set([...document.querySelectorAll("[title]")].map(
            piece => getComputedStyle(piece).backgroundColor)).size]''', show)
page.loadFinished.connect(measure)
page.load(QUrl.fromLocalFile(sys.argv[1]))
app.exec()
"""


@pytest.mark.slow
@pytest.mark.skipif("ISOGLOSS_QT" not in os.environ, reason="needs PyQt6-WebEngine: ISOGLOSS_QT")
@pytest.mark.parametrize("width", [1100, 390])
def test_a_browser_shows_the_page(width, run, tmp_path):
    """Without network, complaint or sideways scrolling; curves are drawn, pieces have colors."""
    output = tmp_path / "report.html"
    cli([str(run), f"--output={output}", "--rows=2", "--device=cpu"])
    environment = dict(os.environ, QT_QPA_PLATFORM="offscreen",
                       QTWEBENGINE_CHROMIUM_FLAGS="--no-sandbox --disable-gpu")
    done = subprocess.run([os.environ["ISOGLOSS_QT"], "-c", BROWSER, output, str(width)],
                          env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    asked, complaints, inner, needed, pictures, colors = json.loads(done.stdout)
    assert set(asked) <= {"file", "data"} and complaints == []
    assert needed <= inner == width
    assert pictures and min(pictures) > 0
    assert colors > 2


@pytest.mark.slow
def test_the_pieces_are_the_text_and_their_bits_those_of_the_models(models, texts):
    student = AutoModelForCausalLM.from_pretrained(models[0]).eval()
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in models]
    distillation = Distillation(tokenizers[0], str(models[1]), max_length=99)
    text = texts[3][:90]
    pieces = pieces_of(distillation, student, Example(text))
    assert text in "".join(piece.text for piece in pieces)
    compared = [piece for piece in pieces if piece.bits]
    assert len(compared) > 5 and all(len(piece.guesses) == 2 for piece in compared)
    for side, (tokenizer, folder) in enumerate(zip(tokenizers, models)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = torch.tensor([[*begin, *ids, tokenizer.eos_token_id]])
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1, : len(tokenizer)].log_softmax(-1)
        bits = -logp.gather(1, ids[0, 1:, None]).flatten() / math.log(2)
        # what is not compared, if anything, stands at the beginning
        total = sum(piece.bits[side] for piece in compared)
        tails = bits.flip(0).cumsum(0)
        assert (tails - total).abs().min() < 1e-3
        [(guess, probability), *_] = compared[-1].guesses[side]
        assert 0 < probability <= 1 and isinstance(guess, str)


# --- what is damaged ------------------------------------------------------------------------------

# {flags or a change of a run's files: (file that is changed, what is done to it, part of the line)}
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
    Page(text)
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
    monkeypatch.setattr(report, "picture", lambda panels, path: path.write_text("<svg/>"))
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
    monkeypatch.setattr(report, "picture", lambda panels, path: path.write_text("<svg/>"))
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
            assert len(reported(["a", "--rows=0"], capsys)[1]) <= 1, key
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


# --- in W&B and TensorBoard -----------------------------------------------------------------------

# github.com/tensorflow/tensorboard 2.21, tensorboard/plugin_util.py: what its Text tab lets through
BOARD_TAGS = set("ul ol li p pre code blockquote h1 h2 h3 h4 h5 h6 hr br strong em a img table "
                 "thead tbody td tr th".split())


class Board:
    """Stand for a SummaryWriter."""

    def add_text(self, tag, text, step):
        self.added = tag, text, step

    def flush(self):
        pass


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """A run of which a page is there, and what shows it."""
    monkeypatch.chdir(tmp_path)
    cfg = Config(student="s", teacher="t", data="d", output_dir="a", steps=3, wandb_project="p")
    lines = [{"step": step, "loss": 2.0 - step, "eval/student_bits_per_byte": 3.0 - step}
             for step in range(3)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "a" / "run.json").write_text(json.dumps({"config": asdict(cfg)}))
    sample = {"step": 0, "prompt": "Once <b>", "text": " upon\n\n    a time", "reference": ""}
    (tmp_path / "a" / "samples.jsonl").write_text(json.dumps(sample))
    sent = []
    log = SimpleNamespace(is_active=True, wandb=SimpleNamespace(log=sent.append))
    board = Board()
    monitor = SimpleNamespace(enabled=True, wandb_monitor=None,
                              tb_monitor=SimpleNamespace(summary_writer=board))
    return SimpleNamespace(cfg=cfg, log=log, monitor=monitor, sent=sent, board=board)


def test_wandb_gets_the_page_and_tensorboard_its_text_in_tags_that_it_shows(shown, monkeypatch):
    cli(["a", "--rows=0", "--output=a/report.html"])
    text = Path("a/report.html").read_text()
    pieces = [Piece("grey"), Piece("both", (1.0, 1.0), ([("b", 0.5)], [("b", 0.5)])),
              Piece("hard", (9.0, 1.0), ([("b", 0.5)], [("h", 0.5)])),
              Piece("soft", (1.0, 9.0), ([("s", 0.5)], [("b", 0.5)]))]
    page = text.replace("</body>", "".join(map(colored, pieces)) + "</body>")
    monkeypatch.setattr(media, "_page", lambda cfg: page)
    media.show_report(shown.cfg, shown.log, shown.monitor)
    [sent] = shown.sent
    assert sent["report"].html == page
    tag, text, step = shown.board.added
    assert (tag, step) == ("report", 3)
    assert set(re.findall(r"</?(\w+)", text)) <= BOARD_TAGS - {"img"}
    assert ">grey<" in text and ">both<" in text and "Once &lt;b&gt;" in text
    assert "<strong>hard</strong>" in text and "<em>soft</em>" in text
    assert "a time" in text and "bits per byte, student" in text and "Curves" not in text
    assert "title=\"student: 9.00 bits; expected &#x27;b&#x27; 50%&#10;teacher: 1.00" in text


def test_a_report_that_fails_is_a_line(shown, monkeypatch, capsys):
    monkeypatch.setattr(media.sys, "executable", "/bin/false")
    media.show_report(shown.cfg, shown.log, shown.monitor)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and not shown.sent
    assert "the report has no text in colors (" in lines[0] and "exit status 1" in lines[0]
    assert "the monitors show no report (ChildProcessError: " in lines[1]
    assert "python -m isogloss.report a writes it" in lines[1]
    # a teacher for which there is no memory
    fake = Path("python").absolute()
    fake.write_text("#!/bin/sh\nif [ $6 ]; then echo '<body>rest</body>' > a/report.html\n"
                    "echo 'isogloss.report: no samples: half' >&2\n"
                    "else echo no memory >&2; exit 1; fi\n")
    fake.chmod(0o755)
    monkeypatch.setattr(media.sys, "executable", str(fake))
    media.show_report(shown.cfg, shown.log, shown.monitor)
    error = capsys.readouterr().err
    assert "no text in colors (no memory)" in error and "report: no samples: half\n" in error
    assert shown.board.added[1] == "rest" and len(shown.sent) == 1
    # without a monitor, and with one that can show no text, nothing is written
    shown.cfg.wandb_project = ""
    shown.log.wandb = shown.monitor.tb_monitor = None
    media.show_report(shown.cfg, shown.log, shown.monitor)
    media.show_report(shown.cfg, shown.log, SimpleNamespace(enabled=False))
    assert capsys.readouterr().err == ""


def read_board(folder):
    """Return {tag: [(step, text)]} of TensorBoard's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    texts = {}
    for tag in events.Tags()["tensors"]:
        texts[tag] = [(event.step, event.tensor_proto.string_val[0].decode())
                      for event in events.Tensors(tag)]
    return texts


@pytest.mark.slow
def test_a_run_ends_with_its_report_in_the_monitors(models, texts, tmp_path):
    """Two ranks, and once more after a resume; TensorBoard's part where it is installed."""
    board = find_spec("tensorboard") is not None
    line = short_run(models, texts, tmp_path, "--eval_rows=3", "--eval_samples=1",
                     "--teacher_dtype=float32", f"--output_dir={tmp_path / 'a'}", "--num_workers=0",
                     f"--export={tmp_path / 'student'}", "--wandb_project=isogloss-test")
    ds_config(tmp_path / "ds.json", 2, 2, 1, tensorboard={
        "enabled": board, "output_path": str(tmp_path), "job_name": "b"})
    for steps in (2, 3):
        assert ranks.run(2, run_distill, [[*line, f"--steps={steps}"]]) == [[0], [0]]
        page = (tmp_path / "a" / "report.html").read_text()
        assert "Held-out text" in page and f">{steps} of {steps}<" in page
    pages = []
    for run in sorted((tmp_path / "a" / "wandb").glob("offline-run-*")):
        pages += [path.read_text() for path in run.rglob("media/html/report*.html")]
    assert len(pages) == 2 and page in pages
    if board:
        from tensorboard.plugin_util import markdown_to_safe_html

        [(_, entries)] = read_board(tmp_path / "b").items()
        assert [step for step, _ in entries] == [2, 3]
        rendered = markdown_to_safe_html(entries[-1][1])
        said = " ".join(Page(rendered).texts)
        assert "<" not in said.replace("<s>", "").replace("</s>", "")  # no tag is left as text
        assert "Held-out text" in said and Page(rendered).titles


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for words, message in [([], "expected one or more runs"),
                           ([str(tmp_path)], "no metrics.jsonl there"),
                           ([str(tmp_path), "--rows=-1"], "--rows -1: expected 0 or more")]:
        with pytest.raises(SystemExit) as end:
            cli(words)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
