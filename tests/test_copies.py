"""Files copied into another repository: flat, into a package, beside modules of the same names."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from transformers import AutoTokenizer

import ranks
from conftest import ROOT

# {what is copied together: what is computed there}
SETS = {
    ("align", "loss_bounds", "losses", "nodes", "translation", "spelling", "cross_tokenizer"):
        "piece_kl",
    ("align", "loss_bounds", "losses", "cross_tokenizer"): "alm",
}


def computed(folder, models, loss, package="", path=("",)):
    """Return a loss, or why it cannot be imported, in a process that has nothing of ours yet."""
    ours = {file.stem for file in ROOT.glob("*.py")} | {"isogloss", "projection_tools"}
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
            del sys.modules[name]
    os.chdir(folder)
    of_tests = str(ROOT), str(ROOT / "tests")
    sys.path = [*path, *[entry for entry in sys.path if entry not in of_tests]]
    try:
        return loss_of(models, loss, package)
    except ImportError as error:
        return str(error)


def loss_of(models, loss, package):
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in models]
    kd = import_module(f"{package}cross_tokenizer").CrossTokenizerKD(*tokenizers, loss=loss)
    batch = kd.collate(["In 2010 the boat", "two  spaces"])
    torch.manual_seed(0)
    logits = [torch.randn(*side["input_ids"].shape, len(tokenizer))
              for side, tokenizer in zip((batch.student, batch.teacher), tokenizers)]
    return float(kd(*logits, batch))


def copy(names, folder):
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(ROOT / f"{name}.py", folder)
    return folder


def test_align_shows_with_align_view_beside_it_and_names_it_without(models, tmp_path):
    command = [sys.executable, "align.py", "--student", models[0], "--teacher", models[1],
               "--show", "In 2010"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = []
    for name in ("align", "align_view"):
        copy([name], tmp_path)
        ended.append(subprocess.run(command, cwd=tmp_path, env=environment, text=True,
                                    capture_output=True))
    alone, both = ended
    assert alone.returncode == 1
    assert re.fullmatch(r"align\.py: align_view\.py, .* is missing; copy it too\n", alone.stderr)
    assert both.returncode == 0 and "bytes 100.0%" in both.stdout


@pytest.mark.slow
@pytest.mark.parametrize("names", SETS, ids=lambda names: f"{len(names)}-files")
def test_copies_give_the_same_numbers_flat_in_a_package_and_beside_others(names, models, tmp_path):
    loss = SETS[names]
    expected = loss_of(models, loss, "isogloss.")
    assert expected > 0
    flat = copy(names, tmp_path / "flat")
    copy(names, tmp_path / "lab")
    (tmp_path / "lab" / "__init__.py").touch()
    for other in ("losses", "align"):  # of the repository itself
        (tmp_path / f"{other}.py").write_text("value = 1\n")
    # theirs comes second in the last one
    for arguments in ((flat, models, loss), (tmp_path, models, loss, "lab."),
                      (tmp_path, models, loss, "", ("flat", ""))):
        assert ranks.run(1, computed, *arguments) == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["", "lab."])
def test_another_module_of_the_name_is_not_taken_for_ours(package, models, tmp_path):
    folder = tmp_path / "lab" if package else tmp_path
    copy(["align", "loss_bounds", "cross_tokenizer"], folder)
    (folder / "losses.py").write_text("def kl(p, q):\n    return p\n")
    if package:
        (folder / "__init__.py").touch()
    [error] = ranks.run(1, computed, tmp_path, models, "alm", package)
    assert error.endswith(
        f"losses.py is another module: copy Isogloss's beside {folder / 'cross_tokenizer.py'}")
