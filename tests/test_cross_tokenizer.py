"""Texts in, a loss out: what stands in cross_tokenizer.py, its examples and its notebook."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, asset
from isogloss import align
from isogloss.cross_tokenizer import LOSSES, CrossTokenizerKD, check_columns
from isogloss.loss_bounds import CHOICES, NUMBERS, check_value
from isogloss.projection_tools import build, cells
from isogloss.projection_tools.build import as_tables
from isogloss.projection_tools.save import save_atomically
from isogloss.projection_tools.tokenizers import Pair
from tokens import real

STUDENT, TEACHER = "stories260K", "tinytalk_neo_3M"


@pytest.fixture(scope="module")
def stories():
    rows = json.loads(asset("text", "tinystories_1000.json").read_text())
    return [row if isinstance(row, str) else row["text"] for row in rows]


@pytest.fixture(scope="module")
def pair():
    """Tokenizers, models and directories of the student and the teacher."""
    folders = [asset("models", name) for name in (STUDENT, TEACHER)]
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
    return SimpleNamespace(folders=folders, tokenizers=tokenizers, models=models)


@pytest.fixture(scope="module")
def tables(pair):
    """The tables of both kinds, as the tools write them."""
    both = Pair.of(*pair.tokenizers)
    projection = as_tables(build.build_projection(both), both, "test")
    return {"translation": cells.build_translation(both), "projection": projection, "": None}


@pytest.fixture(scope="module")
def kd(pair):
    return CrossTokenizerKD(*pair.tokenizers, max_length=128)


def random_logits(batch, kd, seed=0, dtype=torch.float64):
    """Return logits of both sides that depend on text and position alone, not on the padding."""
    logits = []
    for number, side in enumerate((batch.student, batch.teacher)):
        B, N = side["input_ids"].shape
        width = len(kd.token_tables[number])
        whole = torch.zeros(B, N, width, dtype=dtype)
        for b in range(B):
            key = int(side["input_ids"][b, :2].sum())
            generator = torch.Generator().manual_seed(seed + 1000 * key + number)
            row = torch.randn(256, width, generator=generator, dtype=dtype)
            whole[b] = row[:N]
        logits.append(whole)
    return logits


def one_by_one(kd, texts):
    """Return (sum, count) over texts, each in a batch of its own."""
    parts = []
    for text in texts:
        batch = kd.collate([text])
        parts.append(kd.sum_and_count(*random_logits(batch, kd), batch))
    return [sum(part) for part in zip(*parts)]


# --- what is aligned ------------------------------------------------------------------------------


def test_no_story_is_left_without_a_chunk(kd, stories):
    """Ids alone drop a whole text for one double space, which this student's tokenizer joins."""
    batch = kd.collate([*stories, "Ünï – 漢字 😀  two  spaces\n\n2010"])
    has_chunk = (batch.student_chunk >= 0).any(1)
    assert has_chunk.all() and len(has_chunk) == 1001
    assert any("  " in story for story in stories)
    assert batch.aligned_bytes > 0.98 * batch.text_bytes
    assert batch.labels.shape == batch.student["input_ids"].shape == (1001, 128)
    is_text = batch.student["attention_mask"].bool()
    assert (batch.labels[is_text] == batch.student["input_ids"][is_text]).all()
    assert (batch.labels[~is_text] == -100).all() and not is_text.all()


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["piece_kl", "alm"])
def test_reads_and_counts_as_a_run_does(pair, stories, loss):
    """The job takes other code from text to ids, chunks and terms.

    The teacher of the second has no bos: no position predicts its first token.
    """
    from isogloss.config import Config
    from isogloss.data.batch import Collator, PairOptions, as_example
    from isogloss.data.sample import TextEncoder
    from isogloss.objective.loss_table import build_loss

    texts = [*[story[:300] for story in stories[:3]], "Ünï – 漢字 😀  two  spaces\n\n2010"]
    tokenizers = pair.tokenizers
    if loss == "alm":
        tokenizers = [real(name)[0] for name in ("gpt2", "qwen2")]
    kd = CrossTokenizerKD(*tokenizers, loss, max_length=1000)
    encoders = [TextEncoder(tokenizer, table, 1000)
                for tokenizer, table in zip(kd.tokenizers, kd.token_tables)]
    cfg = Config(student=STUDENT, teacher=TEACHER, data="-", loss=loss)
    spelling = build_loss(cfg, *encoders, "cpu").spelling
    batch = Collator(encoders[0], [PairOptions(encoders[1], spelling)])(
        [as_example(text) for text in texts])
    ours = kd.collate(texts)
    assert torch.equal(ours.student_next, batch.student.labels.clamp(min=0))
    teacher = batch.teachers[0]
    assert torch.equal(ours.student_chunk, teacher.student_chunk)
    assert torch.equal(ours.teacher_chunk, teacher.teacher_chunk)
    if loss == "alm":
        count = len(ours.terms.first_S)
    else:
        _, count = kd.sum_and_count(*random_logits(ours, kd), ours)
    assert count == batch.counts.pairs[0].kd_terms


def test_equal_tokenizers_give_the_plain_divergence(pair, stories):
    kd = CrossTokenizerKD(pair.tokenizers[0], pair.tokenizers[0], max_length=64, text_weight=1.0)
    batch = kd.collate(stories[:3])
    student, teacher = random_logits(batch, kd)
    value = kd(student, teacher, batch)
    keep = batch.student["attention_mask"][:, 1:].bool()
    logp, logq = [x[:, :-1][keep].log_softmax(-1) for x in (student, teacher)]
    expected = F.kl_div(logp, logq, log_target=True, reduction="batchmean")
    torch.testing.assert_close(value, expected)
    assert kd(student, student, batch) == 0


def test_equal_tokenizers_compare_every_position_of_a_text_that_they_normalize():
    tokenizer = real("qwen2")[0]
    kd = CrossTokenizerKD(tokenizer, tokenizer)
    batch = kd.collate(["\u0958\u0959 \ufa10"])
    assert len(batch.terms.first_S) == int((batch.labels[:, 1:] >= 0).sum()) == 9


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_heads_and_batches_change_nothing(pair, stories, loss, tables):
    """NaN on padding, rows beyond the vocabulary, and texts one by one: the same sum."""
    kd = CrossTokenizerKD(*pair.tokenizers, loss, tables[LOSSES[loss].needs], max_length=48)
    texts = [stories[0], "Once upon a time.", stories[2][:90]]
    batch = kd.collate(texts)
    logits = random_logits(batch, kd)
    total, count = kd.sum_and_count(*logits, batch)
    assert total > 0 and count > 20
    padded = []
    for side, x in zip((batch.student, batch.teacher), logits):
        x = F.pad(x, (0, 7), value=9.0)  # an lm_head with more rows
        padded.append(x.masked_fill(side["attention_mask"][..., None] == 0, torch.nan))
    padded[0].requires_grad_()
    again, same_count = kd.sum_and_count(*padded, batch)
    torch.testing.assert_close(again, total)
    assert same_count == count
    again.backward()
    gradient = padded[0].grad
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    assert gradient[..., len(kd.token_tables[0]):].abs().sum() == 0
    torch.testing.assert_close(one_by_one(kd, texts)[0], total)


def test_a_cut_text_is_the_same_alone_and_beside_others(pair, stories):
    """No teacher's row behind the end of a text is asked, which is there beside longer ones."""
    kd = CrossTokenizerKD(*pair.tokenizers[::-1])
    texts = [stories[0], "Once upon a time.", *stories[3:6]]
    for kd.max_length in (12, 21, 27):
        batch = kd.collate(texts)
        together, count = kd.sum_and_count(*random_logits(batch, kd), batch)
        alone, count_alone = one_by_one(kd, texts)
        torch.testing.assert_close(alone, together)
        assert count_alone == count


def test_nothing_aligned_is_zero_with_a_graph_and_one_warning(pair):
    kd = CrossTokenizerKD(*pair.tokenizers)
    batch = kd.collate(["a", "b"])
    batch.student_chunk[:] = -1
    batch.teacher_chunk[:] = -1
    student, teacher = random_logits(batch, kd)
    student[:] = torch.inf  # what a model may say where nothing is learned
    student.requires_grad_()
    with pytest.warns(UserWarning, match="none of the 2 bytes of a batch of 2 texts"):
        loss = kd(student, teacher, batch)
    loss.backward()
    assert loss == 0 and student.grad.abs().sum() == 0
    with warnings.catch_warnings(action="error"):  # once, not in every step
        assert kd(student, teacher, batch) == 0
    batch = kd.collate(["", ""])
    assert torch.isfinite(kd(*random_logits(batch, kd), batch))


# --- tables and errors ----------------------------------------------------------------------------


def test_a_file_of_the_tools_serves_as_well(pair, kd, stories, tables, tmp_path):
    path = tmp_path / "translation.pt"
    save_atomically(tables["translation"], path)
    from_file = CrossTokenizerKD(*pair.tokenizers, tables=path, max_length=128)
    batch = kd.collate(stories[:2])
    logits = random_logits(batch, kd)
    assert from_file(*logits, batch) == kd(*logits, batch)
    with pytest.raises(ValueError, match="made for another student tokenizer"):
        CrossTokenizerKD(*reversed(pair.tokenizers), tables=path)


def test_wrong_input_is_one_line(pair, kd):
    tokenizers = pair.tokenizers
    for arguments, settings, message in (
        (("peace_kl",), {}, "no such loss; choose one of piece_kl, "),
        (("alm",), {"beta": 1}, "alm has no such parameter; it has max_divergence"),
        (("uld",), {"matched_weight": 0.5}, "uld has no such parameter; it has max_divergence"),
        (("gold",), {}, "projection_tools.build"),
        (("piece_kl", {"cell_V": torch.zeros(3)}), {}, "no cell_W in them"),
        (("piece_kl",), {"max_length": 1}, "expected an integer, 2 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            CrossTokenizerKD(*tokenizers, *arguments, **settings)
    with pytest.raises(ValueError, match="a list of strings, got \\['int'\\]"):
        kd.collate([3])
    with pytest.raises(ValueError, match="a list of strings, got one string"):
        kd.collate("a story")
    assert torch.equal(kd.collate(np.array(["a", "b c"])).labels, kd.collate(["a", "b c"]).labels)
    backend = tokenizers[0].backend_tokenizer
    assert align.fingerprint(backend) == align.fingerprint(tokenizers[0])
    with pytest.raises(ValueError, match=r"tokenizers.Tokenizer: expected a fast tokenizer"):
        CrossTokenizerKD(backend, tokenizers[1], "alm")
    with pytest.raises(ValueError, match="holds half of a surrogate pair, which is no text"):
        kd.collate(["a", "b \ud83d"])
    batch = kd.collate(["a story"])
    student, teacher = random_logits(batch, kd)
    with pytest.raises(ValueError, match="the student's logits have the shape"):
        kd(student[:, :-1], teacher, batch)
    with pytest.raises(ValueError, match="the teacher's logits"):
        kd(student, student, batch)


# {parameter: (a loss that has it, the flag of a run or its option, values that are taken, values
# that are not)}
NAN = float("nan")
VALUES = {
    "temperature": ("piece_kl", "temperature", [1e-3, 1, 1e3], [0, -1, NAN, 1e-4, 1001.0, "2"]),
    "beta": ("generalized_jsd", "beta", [0, 0.5, 1], [2, -0.1, NAN, float("inf"), None]),
    "skew": ("skew_forward_kl", "skew", [0, 0.99], [-0.5, 1, 1.0, 1.5, NAN]),
    "alpha": ("adaptive_kl", "alpha", [0, 1], [9, -1, NAN]),
    "text_weight": ("piece_kl", "ce_weight", [0, 1e6], [-3, NAN, float("inf"), 1e7]),
    "choice_weight": ("piece_kl", "choice_weight", [0, 0.3, 1e6], [-1, NAN, 1e7, "2"]),
    "top_k": ("reverse_kl", "loss_topk", [0, 5, 2**20], [-1, 2.5, 2**21]),
    "uncommon_topk": ("gold", "uncommon_topk", [1, 2**20], [0, -1, 0.5]),
    "max_divergence": ("alm", "max_divergence", [0, 0.5, 1e6], [-1, NAN, 1e7, "2"]),
    "support": ("reverse_kl", "topk_of", ["teacher", "student"], ["both", None]),
    "chunk_average": ("gold", "chunk_average", ["p", "logp"], ["log", 1]),
    "reverse": ("gold", "reverse", [False, True], ["yes", 1.5]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_bounded_as_flags_are(pair, tables, name):
    """Nothing else is taken, in one line that names the parameter, before anything is built."""
    from isogloss.config import Config

    loss, flag, good, bad = VALUES[name]
    job = {"student": "s", "teacher": "t", "data": "d", "loss": loss}
    is_flag = flag in Config.__dataclass_fields__
    for value in good:
        CrossTokenizerKD(*pair.tokenizers, loss, tables[LOSSES[loss].needs], **{name: value})
        flags = {flag: value} if is_flag else {"loss_options": {flag: value}}
        assert Config(**job | flags | {"kd_weight": 0.5})
    for value in bad:
        flags = {flag: value} if is_flag else {"loss_options": {flag: value}}
        with pytest.raises(ValueError):
            Config(**job | flags)
    for value in [*bad, 1 if name == "reverse" else True]:
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}: ") as refused:
            CrossTokenizerKD(*pair.tokenizers, loss, **{name: value})
        assert "\n" not in str(refused.value) and "expected" in str(refused.value)


def test_all_parameters_of_the_losses_have_bounds():
    """Flags that a loss reads and calls take have one table."""
    with pytest.raises(ValueError, match=r"temperature=1000.*: expected a number"):
        check_value("temperature", 10**400)  # no float holds it
    assert {*NUMBERS, *CHOICES} == {*VALUES, "max_length", "topk_of"}
    kept = torch.tensor([3, 1])
    with pytest.raises(ValueError, match="kept_K: expected a tensor of int64, the sorted ids"):
        check_columns(kept, 5)
    for wrong in (kept.sort().values + 3, kept.double(), [1, 3], kept[:0]):
        with pytest.raises(ValueError, match="kept_K"):
            check_columns(wrong, 5)
    check_columns(kept.sort().values, 5)


class Hostile:
    """Run a program where it is read."""

    def __reduce__(self):
        return os.mkdir, ("read",)


# {what: (kind of tables, a function of good ones and a folder: what is given in their place, line)}
WRONG_TABLES = {
    "missing": ("translation", lambda good, folder: folder / "no.pt", "No such file or directory"),
    "folder": ("projection", lambda good, folder: folder, "Is a directory"),
    "garbage": ("translation", lambda good, folder: written(folder, b"\x80garbage"), "no readable"),
    "hostile": ("projection", lambda good, folder: saved(folder, {"indices": Hostile()}),
                "no readable file of tables \\(UnpicklingError\\)"),
    "a number": ("translation", lambda good, folder: 3, "no readable file"),
    "a list": ("projection", lambda good, folder: saved(folder, [1, 2]), "holds a list"),
    "NaN": ("projection", lambda good, folder: good | {
        "likelihoods": good["likelihoods"] * torch.nan}, "likelihoods of a projection are 0"),
    "negative": ("projection", lambda good, folder: good | {
        "likelihoods": -good["likelihoods"]}, "likelihoods of a projection are 0"),
    "no sum of 1": ("projection", lambda good, folder: good | {
        "likelihoods": good["likelihoods"] / 2}, "add up to 1"),
    "ids beyond": ("projection", lambda good, folder: good | {
        "indices": good["indices"] + 9999}, "indices holds .* expected -1 to"),
    "ids of floats": ("projection", lambda good, folder: good | {
        "indices": good["indices"].float()}, "expected indices of integers"),
    "one axis": ("projection", lambda good, folder: good | {
        "indices": good["indices"][:, 0]}, "expected indices of integers"),
    "few rows": ("projection", lambda good, folder: {
        key: value[:9] if torch.is_tensor(value) else value for key, value in good.items()},
        "of 9 rows, but the student's tokenizer has 512 ids"),
    "other tokenizers": ("projection", lambda good, folder: good | {
        "teacher_fingerprint": "another"}, "made for another teacher tokenizer"),
    "floats": ("translation", lambda good, folder: good | {
        "cell_W": good["cell_W"].float()}, "cell_W is no table of integers"),
    "text": ("translation", lambda good, folder: good | {"num_cells": "9"}, "num_cells is no"),
    "cells beyond": ("translation", lambda good, folder: good | {"num_cells": 3}, "cell_V holds"),
    "another shape": ("translation", lambda good, folder: good | {
        "rank_V": good["rank_V"][:-1]}, "rank_V has the shape"),
    "tokens of another": ("translation", lambda good, folder: good | {
        "cell_V": good["cell_V"][:-1]}, "of 511 and .* tokens, but"),
    "ranges": ("translation", lambda good, folder: good | {
        "high_W": good["low_W"], "low_W": good["high_W"]}, "ends before it begins"),
}


def written(folder, content):
    (folder / "tables.pt").write_bytes(content)
    return folder / "tables.pt"


def saved(folder, content):
    torch.save(content, folder / "tables.pt")
    return folder / "tables.pt"


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_wrong_tables_are_one_line(pair, tables, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, change, message = WRONG_TABLES[case]
    wrong = change(tables[kind], tmp_path)
    for loss in ("piece_kl",) if kind == "translation" else ("projection_kl", "gold", "h_kl"):
        with pytest.raises(ValueError, match=message) as refused:
            CrossTokenizerKD(*pair.tokenizers, loss, tables=wrong)
        line = str(refused.value)
        assert line.startswith("tables") and "\n" not in line and "projection_tools" in line
    assert not (tmp_path / "read").exists()


@pytest.mark.parametrize("loss", ["gold", "h_kl"])
def test_of_twins_the_written_one_is_common(pair, tables, loss):
    kd = CrossTokenizerKD(*pair.tokenizers, loss, tables=tables["projection"])
    common = dict(zip(*[ids.tolist() for ids in kd.tables]))
    period, byte = pair.tokenizers[0].convert_tokens_to_ids([".", "<0x2E>"])
    assert common[period] == pair.tokenizers[1].convert_tokens_to_ids(".") and byte not in common


# --- examples -------------------------------------------------------------------------------------

def test_the_example_runs_in_a_directory_of_copies(pair, stories, tmp_path):
    """Nothing but the copied files can be imported there; what they save is a trained model.

    A student that comes in bfloat16 is trained in float32, whose small steps bfloat16 would lose.
    """
    for name in ("align", "loss_bounds", "losses", "nodes", "translation", "spelling",
                 "cross_tokenizer"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    lines = [json.dumps({"text": text[:200]}) + "\n" for text in stories[:12]]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    teacher = pair.folders[1]
    student = tmp_path / "student"
    half = AutoModelForCausalLM.from_pretrained(pair.folders[0], dtype=torch.bfloat16)
    half.save_pretrained(student)
    pair.tokenizers[0].save_pretrained(student)
    text = (ROOT / "examples" / "plain.py").read_text()
    line, = re.findall(r"^from isogloss import CrossTokenizerKD.*$", text, re.M)
    copied = text.replace(line, "from cross_tokenizer import CrossTokenizerKD")
    (tmp_path / "plain.py").write_text(copied)
    words = f"plain.py {student} {teacher} texts.jsonl first --kd_weight 1".split()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith("text ")]
    assert len(printed) == 2
    text_loss, loss = [float(word) for word in printed[0].replace(",", "").split()[1::4]]
    assert 0.1 < loss - text_loss < 5
    before = half.float().state_dict()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "first").state_dict()
    assert AutoTokenizer.from_pretrained(tmp_path / "first").vocab_size == 512
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    moved = sum((trained[key] - before[key]).abs().sum() for key in before)
    assert torch.isfinite(moved) and moved > 1


def test_the_notebook_runs(pair, monkeypatch, capsys):
    """All its code, in order, with models that are here in the place of those that it names."""
    notebook = json.loads((ROOT / "examples" / "alignment.ipynb").read_text())
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    scope = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec("".join(cell["source"]), scope)
        if "parameters" in cell["metadata"].get("tags", []):
            assert {"STUDENT", "TEACHER", "TEXT", "STEPS"} <= scope.keys()
            scope |= {"STUDENT": pair.folders[0], "TEACHER": pair.folders[1], "STEPS": 6}
    printed = capsys.readouterr().out
    assert "·the" in printed and "behind it: " in printed
    for name in ("student_mass", "teacher_mass"):
        masses = scope[name].sum(1)
        torch.testing.assert_close(masses, torch.ones_like(masses))
    assert scope["num_choices"] + scope["num_insides"] > 0
    assert scope["values"][-1] < scope["values"][0]
