"""What the README shows works, and what it links to exists."""

import re

import torch

from conftest import ROOT
from projection_tools import Pair
from projection_tools.build import build_projection

README = (ROOT / "README.md").read_text()


def test_the_lines_to_copy_work(tokenizers, texts):
    snippet, = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "from align" in block]
    student, teacher = tokenizers
    ids = {"student_ids": student(texts[0])["input_ids"], "teacher_ids": teacher(texts[0])["input_ids"]}
    generator = torch.Generator().manual_seed(0)
    logits = {f"{role}_logits": torch.randn(1, len(ids[f"{role}_ids"]), len(tokenizer), generator=generator)
              for role, tokenizer in (("student", student), ("teacher", teacher))}
    indices, likelihoods = map(torch.from_numpy, build_projection(Pair.of(student, teacher)))
    scope = dict(torch=torch, student_tokenizer=student, teacher_tokenizer=teacher, **ids, **logits,
                 indices=indices, likelihoods=likelihoods, device="cpu")
    exec(snippet, scope)
    assert 0 < scope["loss"] < 20 and scope["count"] > 20


def test_links_and_file_map_are_true():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    file_map = README.split("## Files")[1].split("##")[0]
    named = re.findall(r"^    (\S+) ", file_map, re.M)
    assert all((ROOT / name).exists() for name in named)
    modules = {path.name for path in ROOT.glob("*.py")}
    assert modules <= set(named)
