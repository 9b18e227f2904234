"""Files copied into another repository: flat, into a package, beside modules of the same names."""

import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

# {what is copied together: what is computed there}
SETS = {
    ("align", "losses", "nodes", "translation", "spelling", "cross_tokenizer"): "piece_kl",
    ("align", "losses", "cross_tokenizer"): "alm",
}
CODE = """
import sys
sys.path[:0] = {path!r}
import torch
from transformers import AutoTokenizer
from {package}cross_tokenizer import CrossTokenizerKD
tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in {models!r}]
kd = CrossTokenizerKD(*tokenizers, loss={loss!r})
batch = kd.collate(["In 2010 the boat", "two  spaces"])
torch.manual_seed(0)
logits = [torch.randn(*side["input_ids"].shape, len(tokenizer))
          for side, tokenizer in zip((batch.student, batch.teacher), tokenizers)]
print(float(kd(*logits, batch)))
"""


def computed(folder, models, loss, package="", path=("",)):
    """Return what a process in a folder prints, and its errors."""
    code = CODE.format(path=list(path), package=package, models=[str(model) for model in models],
                       loss=loss)
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True,
                          text=True)
    return done.stdout.strip(), done.stderr


def copy(names, folder):
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(ROOT / f"{name}.py", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("names", SETS, ids=lambda names: f"{len(names)}-files")
def test_copies_give_the_same_numbers_flat_in_a_package_and_beside_others(names, models, tmp_path):
    loss = SETS[names]
    expected, error = computed(ROOT, models, loss, package="isogloss.")
    assert float(expected) > 0, error
    flat = copy(names, tmp_path / "flat")
    copy(names, tmp_path / "lab")
    (tmp_path / "lab" / "__init__.py").touch()
    for other in ("losses", "align"):  # of the repository itself
        (tmp_path / f"{other}.py").write_text("value = 1\n")
    found = [computed(flat, models, loss), computed(tmp_path, models, loss, package="lab.")]
    found.append(computed(tmp_path, models, loss, path=("flat", "")))  # theirs comes second
    for number, error in found:
        assert number, error
        assert float(number) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["", "lab."])
def test_another_module_of_the_name_is_not_taken_for_ours(package, models, tmp_path):
    folder = copy(["align", "cross_tokenizer"], tmp_path / "lab" if package else tmp_path)
    (folder / "losses.py").write_text("def kl(p, q):\n    return p\n")
    if package:
        (folder / "__init__.py").touch()
    printed, error = computed(tmp_path, models, "alm", package)
    assert not printed
    assert error.splitlines()[-1].endswith(
        f"losses.py is another module: copy Isogloss's beside {folder / 'cross_tokenizer.py'}")
