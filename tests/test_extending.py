"""Code of docs/architecture.md runs as it stands; every metric of a run is on docs/evaluate.md."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import ranks
from conftest import ROOT
from isogloss.config import Config
from isogloss.objective.loss_table import LOSSES
from isogloss.teachers.kinds import TEACHER_KINDS
from isogloss.teachers.protocol import load_teacher
from jobs import losses_of, run_all, run_distill
from wrong_input import good_line

PAGE = ROOT / "docs" / "architecture.md"


def example(number, folder):
    """Return the path of a file that holds a code block of the page."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[number]
    path = folder / f"example_{number}.py"
    path.write_text(block)
    return path


@pytest.fixture
def argv(models, texts, tmp_path):
    return [*good_line(models, texts, tmp_path), "--steps=3", "--max_length=80", "--eval_rows=4"]


@pytest.mark.slow
def test_a_new_loss_is_a_function_and_an_entry(argv, tmp_path):
    """It is a choice of --loss, trains, and is evaluated; alone, no cross-entropy is computed."""
    run = [*argv, "--loss=certainty_gap", "--ce_weight=0"]
    plugin = f"--plugin={example(0, tmp_path)}"
    squared = [*run, plugin, '--loss_options={"power": 2}', f"--output_dir={tmp_path / 'squared'}"]
    run_all(2, [*run, plugin], squared)
    lines = losses_of(tmp_path / "run", -1)
    assert 0 < losses_of(tmp_path / "squared", -1)[0]["eval/kd"] < lines[0]["eval/kd"]
    assert 0 < lines[-1]["eval/kd"] < lines[0]["eval/kd"] < 1
    assert lines[1]["loss"] == lines[1]["kd"] and "ce" not in lines[1]
    unknown = ranks.run(1, run_distill, [run])
    assert unknown == [[2]]  # without the entry


def test_the_keywords_of_a_new_loss_are_its_options(tmp_path):
    """They are checked, of a teacher of several too, and part of what a run is."""
    flags = dict(student="s", data="d", plugin=str(example(0, tmp_path)))
    alone = flags | dict(teacher="t", loss="certainty_gap")
    try:
        assert Config(**alone, loss_options='{"power": 2}').options_of_loss == {"power": 2.0}
        assert Config(**alone, loss_options={"power": 2}) != Config(**alone)
        assert Config(**alone, loss_options={"power": 1}) == Config(**alone)
        for options, message in (
            ({"pow": 2}, "unknown option 'pow'; --loss certainty_gap has power"),
            ({"power": "2"}, "--loss_options power=2: expected float, got str"),
            ({"chunks": 2}, "unknown option 'chunks'"),
        ):
            entry = {"model": "t", "loss": "certainty_gap", "loss_options": options}
            for wrong in (alone | dict(loss_options=options),
                          flags | dict(teachers=json.dumps([entry]))):
                with pytest.raises(ValueError, match=message):
                    Config(**wrong)
    finally:
        LOSSES.pop("certainty_gap", None)


@pytest.fixture
def table(models, tmp_path):
    """Return the path of a bigram table for the teacher's tokenizer, of which there is no model."""
    no_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(models[1], tmp_path / "tokenizer", ignore=no_weights)
    torch.manual_seed(0)
    logp_WW = (3 * torch.randn(500, 500)).log_softmax(-1)
    save_file({"logp": logp_WW}, tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


def test_a_new_kind_of_teachers_says_what_its_table_says(table, tmp_path):
    """Row by row; the flags of a model are refused, and without the plugin it is no such kind."""
    flags = dict(student="s", data="d", teacher=f"bigram:{table}",
                 teacher_tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match="--teacher_tokenizer"):
        Config(**flags)
    plugin = str(example(1, tmp_path))
    try:
        cfg = Config(**flags, plugin=plugin)
        encoder = SimpleNamespace(table=range(500))
        source = load_teacher(cfg.teacher_kind.of(cfg, encoder, "cpu"))
        ids = torch.randint(500, (2, 9))
        logits = source.targets(SimpleNamespace(ids=ids))
        expected = load_file(table)["logp"]
        for row in range(2):
            for place in range(9):
                [got] = logits(torch.tensor([9 * row + place]))
                assert torch.equal(got, expected[ids[row, place]])
        kept = torch.tensor([3, 7])
        assert torch.equal(logits.columns(kept)(torch.arange(18)), expected[ids.flatten()][:, kept])
        with pytest.raises(ValueError, match="for a model that this job loads"):
            Config(**flags, plugin=plugin, teacher_tp=2)
    finally:
        TEACHER_KINDS.pop("bigram", None)


@pytest.mark.slow
def test_a_student_learns_from_a_new_kind_of_teachers(argv, table, tmp_path):
    """Also in a fresh process, whatever the loss; checks and tiles take part."""
    argv = [flag for flag in argv if not flag.startswith("--teacher")]
    argv += [f"--plugin={example(1, tmp_path)}", f"--teacher=bigram:{table}", "--ce_weight=0",
             f"--teacher_tokenizer={tmp_path / 'tokenizer'}"]
    done = subprocess.run([sys.executable, "distill.py", *argv], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    run_all(1, [*argv, "--loss=projection_kl", '--loss_options={"projection_topk": 100}',
                f"--output_dir={tmp_path / 'projected'}"])
    for name in ("run", "projected"):
        lines = losses_of(tmp_path / name, -1)
        assert lines[-1]["eval/kd"] < lines[0]["eval/kd"]
        assert lines[1]["teacher_output_bytes"] > 0


@pytest.mark.parametrize(("text", "expected"), [
    (None, "no such file"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("def f(:", "SyntaxError: "),
])
def test_a_wrong_plugin_is_one_line(tmp_path, text, expected):
    path = tmp_path / "wrong.py"
    if text:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--plugin {path}: {expected}") as error:
        Config(student="s", teacher="t", data="d", plugin=str(path))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_every_metric_is_explained(argv, models, tmp_path):
    page = (ROOT / "docs" / "evaluate.md").read_text()
    explained = set(re.findall(r"`([\w/]+)`", page))
    teachers = f'[{{"model": "{models[1]}", "name": "a"}}, {{"model": "{models[1]}", "name": "b"}}]'
    several = [flag for flag in argv if not flag.startswith(("--teacher", "--output_dir"))]
    several += [f"--teachers={teachers}", "--loss=gold", f"--output_dir={tmp_path / 'several'}"]
    run_all(1, argv, several)
    keys = set()
    for folder in ("run", "several"):
        for line in losses_of(tmp_path / folder, -1):
            for key in line:
                prefix = "eval/" if key.startswith("eval/") else ""
                keys.add(prefix + key.removeprefix("eval/").split("/")[0])
    assert keys <= explained, keys - explained
    assert {"eval/top1_agreement", "eval/projected_agreement", "chunks_n_m"} <= keys
