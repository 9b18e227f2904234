"""The report: one valid page without network, and text in colors that say what models say.

A browser opens it where one is named (pip install PyQt6-WebEngine, 550 MB, elsewhere):

    ISOGLOSS_QT=/env/bin/python pytest tests/test_report.py -k browser
"""

import html
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from isogloss.config import Config
from isogloss.data.batch_types import Example
from isogloss.integrations import Distillation
from isogloss.report import page
from isogloss.report.__main__ import cli
from isogloss.report.page import colored
from isogloss.report.text import ReadPiece, pieces_of
from jobs import run_distill, short_run

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


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Write a small run, `a`, into the working directory."""
    monkeypatch.chdir(tmp_path)
    cfg = Config(student="s", teacher="t", data="d", output_dir="a", steps=3)
    lines = [{"step": step, "loss": 2.0 - step, "eval/student_bits_per_byte": 3.0 - step}
             for step in range(3)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "a" / "run.json").write_text(json.dumps({"config": asdict(cfg)}))
    sample = {"step": 0, "prompt": "Once <b>", "text": " upon\n\n    a time", "reference": ""}
    (tmp_path / "a" / "samples.jsonl").write_text(json.dumps(sample))


@pytest.fixture
def shown_twice(shown, tmp_path):
    """Write a second run, `b`, which has another rate of its loss and no `kd`, and a third one."""
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    for name, flags in (("b", {"seed": 7, "max_length": 99}), ("c", {"loss": "alm"})):
        shutil.copytree("a", name)
        changed = {"config": record["config"] | flags | {"output_dir": name}}
        (tmp_path / name / "run.json").write_text(json.dumps(changed))
    with open(tmp_path / "c" / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 3, "eval/kd": 6}\n')
    return tmp_path


def rows_of(text):
    """Return the rows of the tables of a page, as lists of texts."""
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [[html.unescape(re.sub("<.*?>", "", cell))
             for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row)] for row in rows]


def test_several_runs_stand_side_by_side(shown_twice, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "picture", lambda panels, path, colors: (
        path.write_text("<svg/>"), drawn.append((panels[0].metric, colors))))
    cli(["a", "b", "c", "--rows=0", "--output=r.html"])
    text = Path("r.html").read_text()
    Page(text)
    rows = rows_of(text)
    assert ["bits per byte, student", *["3.000\xa0→\xa01.000"] * 3] in rows
    assert ["distillation loss, nats per term", "–", "–", "6.000\xa0→\xa06.000"] in rows
    assert [["--max_length", "–", "99", "–"], ["--seed", "–", "7", "–"]] == sorted(
        row for row in rows if row[0].startswith("--"))
    losses = next(row for row in rows if row[0] == "teacher")
    assert [("piece_kl" in loss, "alm" in loss) for loss in losses[1:]] == [
        (True, False), (True, False), (False, True)]
    assert ["base model", "s"] in rows  # once: it is that of all
    assert text.count("Once &lt;b&gt;") == 3  # what each has written
    # a run has one color everywhere, also in a panel of which it is the only one
    colors = drawn[0][1]
    assert [metric for metric, _ in drawn] == ["eval/student_bits_per_byte", "eval/kd", "loss"]
    assert len(set(colors.values())) == 3 and all(other == colors for _, other in drawn)
    for name, color in colors.items():
        assert f'<th><b style="color:{color}">●</b> {name}</th>' in text
    capsys.readouterr()
    (shown_twice / "b" / "run.json").write_text("no JSON")
    (shown_twice / "c" / "metrics.jsonl").unlink()
    cli(["a", "b", "c", "--rows=0", "--output=r.html"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "no setting of b: " in lines[1] and "curves of c: " in lines[0]
    assert ["before training → last", "● a", "● b", "● c"] in rows_of(Path("r.html").read_text())


def test_no_run_takes_the_name_of_another_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert page.short_names(["r/a", "r/b"]) == ["a", "b"]
    assert page.short_names(["r/a", "r/a/a"]) == ["r/a", "r/a/a"]  # as a run within another
    with pytest.raises(ValueError, match="named twice"):
        page.short_names(["r/a", str(tmp_path / "r" / "a")])


def test_chunks_are_colored_by_whom_they_surprise():
    pieces = [ReadPiece("grey"), ReadPiece("both", (1.0, 1.0), ([("b", 0.5)], [("b", 0.5)])),
              ReadPiece("hard", (9.0, 1.0), ([("b", 0.5)], [("h", 0.5)])),
              ReadPiece("soft", (1.0, 9.0), ([("s", 0.5)], [("b", 0.5)]))]
    text = "".join(map(colored, pieces))
    assert ">grey<" in text and ">both<" in text
    assert "<strong>hard</strong>" in text and "<em>soft</em>" in text
    assert "title=\"student: 9.00 bits; expected &#x27;b&#x27; 50%&#10;teacher: 1.00" in text


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for words, message in [([], "expected one or more runs"),
                           ([str(tmp_path)], "no metrics.jsonl there"),
                           ([str(tmp_path)] * 2, "a run is named twice"),
                           ([str(tmp_path), "--png=x.words"], "expected a name that ends in .png"),
                           ([str(tmp_path), "--rows=-1"], "--rows -1: expected 0 or more")]:
        with pytest.raises(SystemExit) as end:
            cli(words)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
