"""The report: one valid page without network, and text in colors that say what models say.

A browser opens it where one is named (pip install PyQt6-WebEngine, 550 MB, elsewhere):

    ISOGLOSS_QT=/env/bin/python pytest tests/test_report.py -k browser
"""

import json
import math
import os
import re
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from isogloss.config import Config
from isogloss.data.batch_types import Example
from isogloss.integrations import Distillation
from isogloss.report import media
from isogloss.report.__main__ import cli, colored
from isogloss.report.text import Piece, pieces_of
from jobs import ds_config, run_distill, short_run

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
