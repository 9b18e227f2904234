"""Gradients that are written out are those that autograd gives of the plain formulas."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from isogloss import losses
from isogloss.config import Config
from isogloss.models.compiler import loss_compiler, missing_compiler
from isogloss.nodes import list_nodes
from isogloss.objective import fused, loss_table, projected
from isogloss.objective.objective import Part
from isogloss.tile_plan import SubTile, Tile
from isogloss.tiles import Head, HiddenLogits, tiled_losses
from test_translation import (
    ALL_PAIRS,
    COARSE,
    CROSSING,
    FINE,
    NESTED,
    UNWRITTEN,
    Toy,
    random_logits,
)
from toys import Tokenizer

WEIGHTS = 0.3, 0.7
LOSS_OF = {"forward_kl": "piece_kl", "reverse_kl": "reverse_kl", "generalized_jsd":
           "generalized_jsd", "skew_forward_kl": "skew_forward_kl",
           "skew_reverse_kl": "skew_reverse_kl", "adaptive_kl": "adaptive_kl",
           "total_variation": "total_variation"}
# pairs whose texts have every kind of node; the last ones choose among cells of several tokens too
PAIRS = [*ALL_PAIRS[:2], *ALL_PAIRS[-2:], NESTED["letters"],
         (Tokenizer(*COARSE.rank, **UNWRITTEN), FINE)]


@pytest.fixture(autouse=True)
def written_without_a_compiler(monkeypatch):
    for module in (loss_table, projected):
        monkeypatch.setattr(module, "compiler_of", lambda *_: lambda function: function)


def build(monkeypatch, tables, loss, ce_weight, **flags):
    """Return the DistillationLoss of a run between the tokenizers of the tables."""
    monkeypatch.setattr(loss_table, "cached_translation", lambda pair: tables._asdict())
    cfg = Config(student="s", teacher="t", data="d", loss=loss, ce_weight=ce_weight, **flags)
    monkeypatch.setattr(projected, "unwritten_twins", lambda table, _: np.zeros(len(table), bool))
    pair = SimpleNamespace(fingerprints=("one", "one" if tables is None else "another"),
                           tokenizers=(None, None))
    if tables is not None:
        pair.tables = range(len(tables.cell_V)), range(len(tables.cell_W))
    return loss_table.LOSSES[loss].build(cfg, pair, "cpu")


def of_toy(pair, seed, dtype):
    """Return (sub-tile of all texts of a toy, logits (n, V) and (m, W), tables)."""
    toy = Toy(*pair, 1)
    *ids, tables = toy.ids
    names = "student_labels", "teacher_labels", "student_chunk", "teacher_chunk"
    sides = {name: side.flatten() for name, side in zip(names, ids[1:])}
    sides["student_labels"] = torch.where(sides["student_chunk"] < 0, -100,
                                          sides["student_labels"])
    x, y = [logits.flatten(0, 1).to(dtype) for logits in random_logits(toy, seed, 2)]
    everything = slice(0, len(x)), slice(0, len(y))
    sub_tile = SubTile(*everything, **sides, terms=list_nodes(*ids, tables),
                       teacher_positions=torch.arange(len(y)))
    return sub_tile, x, y, tables


def results(loss, sub_tile, x, y, ce_weight, written, **of_head):
    """Return (sums, gradient by the logits) of a part with this sub-tile, as the job takes it."""
    hidden = x.clone().requires_grad_()
    head = Head(torch.eye(x.shape[1], dtype=x.dtype), **of_head)
    tile = Tile(torch.arange(len(x)), (sub_tile,), len(y))
    logits = HiddenLogits(y, Head(torch.eye(y.shape[1], dtype=y.dtype)))
    part = Part(loss.loss_fn, loss.write_gradient if written else None, loss.is_observed, logits,
                batch=SimpleNamespace(tiles=[tile]), ce_weight=ce_weight, weight=WEIGHTS[1],
                student_hidden=hidden)
    value, [sums] = tiled_losses(head, [part])
    value.backward()
    return sums.double(), hidden.grad.double()


def check_both(loss, sub_tile, x, y, ce_weight, tolerance, **of_head):
    assert loss.write_gradient
    plain, written = [results(loss, sub_tile, x, y, ce_weight, kind, **of_head)
                      for kind in (False, True)]
    torch.testing.assert_close(written[0], plain[0], rtol=tolerance, atol=tolerance)
    scale = plain[1].abs().max()
    assert scale > 0
    assert (written[1] - plain[1]).abs().max() <= tolerance * scale


@pytest.mark.parametrize("name", fused.DERIVED)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_tokenizers(pair, temperature, name, monkeypatch):
    """With text and without, of weighted rows, and of what the student wrote."""
    sub_tile, x, y, tables = of_toy(pair, 3, torch.float64)
    cases = itertools.product((WEIGHTS[0], 0.0), (False, True), (False, True))
    if temperature != 1:
        cases = (WEIGHTS[0], False, True), (0.0, False, False)
    for ce_weight, on_policy, is_weighted in cases:
        weight = torch.rand(len(x), dtype=torch.float64) if is_weighted else None
        changed = sub_tile._replace(weight=weight, on_policy=on_policy)
        loss = build(monkeypatch, tables, LOSS_OF[name], ce_weight, temperature=temperature)
        check_both(loss, changed, x, y, ce_weight, 1e-6)


def test_tokens_without_a_cell_and_tokens_that_cannot_come(monkeypatch):
    sub_tile, x, y, tables = of_toy((CROSSING, COARSE), 3, torch.float64)
    for table, token in ((tables.cell_V, len(CROSSING.vocab) - 1),
                         (tables.cell_W, len(COARSE.vocab) - 1)):
        table[token] = tables.num_cells
    for lift in (0.0, 25.0):
        x[:, -1] += lift
        for ce_weight in (0.0, WEIGHTS[0]):
            loss = build(monkeypatch, tables, "piece_kl", ce_weight)
            check_both(loss, sub_tile, x, y, ce_weight, 1e-6)
    x[:, 1] = -1e6  # what a model excludes
    check_both(loss, sub_tile, x, y, WEIGHTS[0], 1e-6)


@pytest.mark.parametrize("choice_weight", [0.0, 2.0])
def test_choices_of_another_weight(choice_weight, monkeypatch):
    sub_tile, x, y, tables = of_toy(PAIRS[1], 3, torch.float64)
    assert len(sub_tile.terms.choices.level)
    loss = build(monkeypatch, tables, "piece_kl", WEIGHTS[0],
                 loss_options={"choice_weight": choice_weight})
    check_both(loss, sub_tile, x, y, WEIGHTS[0], 1e-6)


@pytest.mark.parametrize("of_head", [{"scale": 0.3}, {"softcap": 4.0},
                                     {"scale": 1.7, "softcap": 3.0}])
def test_heads_that_scale_and_cap_their_logits(of_head, monkeypatch):
    sub_tile, x, y, tables = of_toy(PAIRS[0], 3, torch.float64)
    loss = build(monkeypatch, tables, "piece_kl", WEIGHTS[0])
    check_both(loss, sub_tile, x, y, WEIGHTS[0], 1e-6, **of_head)


@pytest.mark.parametrize("name", fused.DERIVED)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_one_tokenizer(name, temperature, monkeypatch):
    """Some rows predict text alone, some chunks have no label."""
    generator = torch.Generator().manual_seed(1)
    n, m, V = 40, 33, 19
    x, y = [3 * torch.randn(size, V, generator=generator, dtype=torch.float64) for size in (n, m)]
    x[3, 5] = y[4, 2] = -1e6
    labels = torch.randint(V, (n,), generator=generator)
    labels[::7] = -100
    student_chunk = torch.full((n,), -1)
    student_chunk[2 : 2 + m] = torch.arange(m)
    chunks = losses.find_chunks(student_chunk[None], torch.arange(m)[None])
    sub_tile = SubTile(slice(0, n), slice(0, m), labels, labels[:m], student_chunk,
                       torch.arange(m), chunks, teacher_positions=torch.arange(m))
    for ce_weight, on_policy, is_weighted in itertools.product(
            (WEIGHTS[0], 0.0), (False, True), (False, True)):
        weight = torch.rand(n, dtype=torch.float64, generator=generator) if is_weighted else None
        changed = sub_tile._replace(weight=weight, on_policy=on_policy)
        loss = build(monkeypatch, None, LOSS_OF[name], ce_weight, temperature=temperature)
        check_both(loss, changed, x, y, ce_weight, 1e-6)


def random_projection(V, W):
    """Return indices and likelihoods (V, 3): tokens in common, tokens of several, and of none."""
    generator = torch.Generator().manual_seed(V)
    indices = torch.randint(W, (V, 3), generator=generator)
    likelihoods = torch.rand(V, 3, generator=generator, dtype=torch.float64)
    num_slots = torch.arange(V) % 4
    likelihoods[torch.arange(3) >= num_slots[:, None]] = 0.0
    indices[torch.arange(3) >= num_slots[:, None]] = -1
    likelihoods /= likelihoods.sum(1, keepdim=True).clamp(min=1e-9)
    return indices, likelihoods.sort(descending=True)[0]


# flags of a run, beside --temperature
OF_CHUNKS = {
    "alm": {}, "uld": {}, "gold": {}, "h_kl": {},
    "gold of few": {"uncommon_topk": 2}, "gold reversed": {"reverse": True},
    "projection_kl": {}, "projection_kl reversed": {"reverse": True},
}


@pytest.mark.parametrize("name", OF_CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_whole_chunks(name, temperature, monkeypatch):
    """Chunks of one token and of several on either side; rows without a chunk."""
    for pair in PAIRS:
        sub_tile, x, y, tables = of_toy(pair, 3, torch.float64)
        sub_tile = of_whole_chunks(sub_tile, pair)
        monkeypatch.setattr(projected, "_projection", lambda *_, sizes=(x.shape[1], y.shape[1]):
                            random_projection(*sizes))
        for ce_weight, on_policy, is_weighted in itertools.product(
                (WEIGHTS[0], 0.0), (False, True), (False, True)):
            weight = torch.rand(len(x), dtype=torch.float64) if is_weighted else None
            changed = sub_tile._replace(weight=weight, on_policy=on_policy)
            loss = build(monkeypatch, tables, name.split()[0], ce_weight, temperature=temperature,
                         loss_options=OF_CHUNKS[name])
            check_both(loss, changed, x, y, ce_weight, 1e-6)


def test_some_columns_of_a_projection(monkeypatch):
    """The teacher's rows have the kept columns alone."""
    sub_tile, x, y, tables = of_toy(PAIRS[0], 3, torch.float64)
    sub_tile = of_whole_chunks(sub_tile, PAIRS[0])
    monkeypatch.setattr(projected, "_projection", lambda *_:
                        random_projection(x.shape[1], y.shape[1]))
    loss = build(monkeypatch, tables, "projection_kl", WEIGHTS[0])
    kept_K = torch.arange(1, y.shape[1], 2)
    loss.loss_fn, loss.write_gradient = loss.for_columns(kept_K)
    check_both(loss, sub_tile, x, y[:, kept_K], WEIGHTS[0], 1e-6)


def of_whole_chunks(sub_tile, pair):
    """Return a sub-tile of whole chunks; every ninth is left out."""
    chunk = sub_tile.student_chunk
    sub_tile = sub_tile._replace(student_chunk=torch.where(chunk % 9 == 8, -1, chunk))
    terms = chunks_of_rows(sub_tile.student_chunk, sub_tile.teacher_chunk, pair)
    return sub_tile._replace(terms=terms)


def chunks_of_rows(student_chunk, teacher_chunk, pair):
    """Return the Chunks of all texts of a toy, which are flat in a sub-tile."""
    num_texts = len(Toy(*pair, 1).x)
    return losses.find_chunks(student_chunk.view(num_texts, -1), teacher_chunk.view(num_texts, -1))


def compile_losses(monkeypatch):
    if missing := missing_compiler():
        pytest.skip(missing)
    loss_compiler.cache_clear()
    for module in (loss_table, projected):
        monkeypatch.setattr(module, "compiler_of", lambda *_: loss_compiler("compiled", "cpu"))


@pytest.mark.slow
def test_what_a_compiler_makes_of_chunks_is_the_same(monkeypatch):
    compile_losses(monkeypatch)
    for seed, name in itertools.product((3, 4), ("uld", "gold", "projection_kl", "alm")):
        sub_tile, x, y, tables = of_toy(PAIRS[3], seed, torch.float64)
        sub_tile = of_whole_chunks(sub_tile, PAIRS[3])
        monkeypatch.setattr(projected, "_projection", lambda *_, sizes=(x.shape[1], y.shape[1]):
                            random_projection(*sizes))
        loss = build(monkeypatch, tables, name, WEIGHTS[0])
        check_both(loss, sub_tile, x, y, WEIGHTS[0], 1e-6)


@pytest.mark.slow
def test_what_a_compiler_makes_of_it_is_the_same(monkeypatch):
    compile_losses(monkeypatch)
    for seed, ce_weight in ((3, WEIGHTS[0]), (4, WEIGHTS[0])):
        sub_tile, x, y, tables = of_toy(PAIRS[3], seed, torch.float64)
        loss = build(monkeypatch, tables, "piece_kl", ce_weight)
        check_both(loss, sub_tile, x, y, ce_weight, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", fused.DERIVED)
def test_lower_precision_is_as_near_to_float64_as_the_plain_formula(name, dtype, monkeypatch):
    for pair in PAIRS:
        sub_tile, x, y, tables = of_toy(pair, 5, dtype)
        loss = build(monkeypatch, tables, LOSS_OF[name], WEIGHTS[0])
        exact = results(loss, sub_tile, x.double(), y.double(), WEIGHTS[0], False)[1]
        errors = [(results(loss, sub_tile, x, y, WEIGHTS[0], written)[1] - exact).abs().max()
                  for written in (False, True)]
        assert errors[1] <= 2 * errors[0] + 1e-7
