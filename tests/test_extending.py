"""docs/extending.md: its code runs as it stands; every metric of a run is on docs/metrics.md."""

import re

import pytest
import torch

import ranks
from conftest import ROOT
from jobs import ds_config, losses_of, run_distill, write_corpus

PAGE = ROOT / "docs" / "extending.md"


def run_with_example(number, argv):
    """Run a code block of the page, then a command line."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[number]
    exec(compile(block, f"{PAGE} block {number}", "exec"), {"__name__": "example"})
    return run_distill([argv])


@pytest.fixture
def argv(models, texts, tmp_path):
    config = ds_config(tmp_path / "ds.json", 2, 2, 1)
    return [f"--student={models[0]}", f"--teacher={models[1]}", f"--ds_config={config}",
            f"--data={write_corpus(tmp_path, texts, 20)}", "--steps=3", "--max_length=80",
            "--eval_rows=4", f"--output_dir={tmp_path / 'run'}"]


@pytest.mark.slow
def test_a_new_loss_is_a_function_and_an_entry(argv, tmp_path):
    """It is a choice of --loss, trains, and is evaluated."""
    codes = ranks.run(2, run_with_example, 0, [*argv, "--loss=certainty_gap", "--ce_weight=0"])
    assert codes == [[0], [0]]
    lines = losses_of(tmp_path / "run", -1)
    assert 0 < lines[-1]["eval/kd"] < lines[0]["eval/kd"] < 1
    unknown = ranks.run(1, run_distill, [[*argv, "--loss=certainty_gap"]])
    assert unknown == [[2]]  # without the entry


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["piece_kl", "projection_kl"])
def test_a_new_teacher_source_is_a_class_and_an_entry(argv, models, tmp_path, loss):
    """The student learns how often tokens occur, whatever the loss; checks and tiles take part."""
    folder = tmp_path / "unigram"
    folder.mkdir()
    for file in models[1].iterdir():
        if "safetensors" not in file.name:  # there is no model
            (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    torch.save((3 * torch.randn(500)).log_softmax(0), folder / "unigram.pt")
    argv = [flag for flag in argv if not flag.startswith("--teacher")]
    argv += [f"--teacher={folder}", "--teacher_engine=unigram", f"--loss={loss}", "--ce_weight=0",
             "--projection_topk=100"]
    assert ranks.run(2, run_with_example, 1, argv) == [[0], [0]]
    lines = losses_of(tmp_path / "run", -1)
    assert lines[-1]["eval/kd"] < lines[0]["eval/kd"]
    assert lines[1]["teacher_output_bytes"] > 0


@pytest.mark.slow
def test_every_metric_is_explained(argv, models, tmp_path):
    page = (ROOT / "docs" / "metrics.md").read_text()
    explained = set(re.findall(r"`([\w/]+)`", page))
    teachers = f'[{{"model": "{models[1]}", "name": "a"}}, {{"model": "{models[1]}", "name": "b"}}]'
    several = [flag for flag in argv if not flag.startswith(("--teacher", "--output_dir"))]
    several += [f"--teachers={teachers}", "--loss=gold", f"--output_dir={tmp_path / 'several'}"]
    assert ranks.run(1, run_distill, [argv, several]) == [[0, 0]]
    keys = set()
    for folder in ("run", "several"):
        for line in losses_of(tmp_path / folder, -1):
            for key in line:
                prefix = "eval/" if key.startswith("eval/") else ""
                keys.add(prefix + key.removeprefix("eval/").split("/")[0])
    assert keys <= explained, keys - explained
    assert {"eval/top1_agreement", "eval/projected_agreement", "chunks_n_m"} <= keys
