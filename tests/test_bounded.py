"""max_divergence of --loss_options in jobs and trainers; test_losses.py has the definition."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import cases
import oracle
from every_loss import LossTables
from isogloss import losses
from isogloss.config import Config
from isogloss.cross_tokenizer import CrossTokenizerKD
from isogloss.integrations import Distillation
from isogloss.nodes import list_nodes
from isogloss.objective import loss_table, projected
from isogloss.objective.loss_dump import keeping_positions
from isogloss.objective.objective import LossTerms, Part
from isogloss.tile_plan import Tile
from isogloss.tiles import Head, HiddenLogits, StoredLogits
from isogloss.translation import translated
from test_fused import PAIRS, of_toy, of_whole_chunks, random_projection
from test_translation import NESTED

NO_TAU = "alm", "uld", "hybrid_uld"  # losses without a factor tau^2
CHUNKS = "projection_kl", "gold", "h_kl", *NO_TAU


def built(monkeypatch, toy, loss, is_one=False, **flags):
    """Return the DistillationLoss that a job builds for a toy, with a gradient of its own."""
    _, x, y, tables = toy
    other = "one" if is_one else "another"
    pair = SimpleNamespace(fingerprints=("one", other), tokenizers=(None, None),
                           tables=(range(x.shape[1]), range(y.shape[1])))
    monkeypatch.setattr(loss_table.Pair, "of", lambda *_: pair)
    monkeypatch.setattr(loss_table, "cached_translation", lambda _: tables._asdict())
    monkeypatch.setattr(projected, "_projection",
                        lambda *_: random_projection(x.shape[1], y.shape[1]))
    monkeypatch.setattr(projected, "unwritten_twins", lambda table, _: np.zeros(len(table), bool))
    for module in (loss_table, projected):
        monkeypatch.setattr(module, "compiler_of", lambda *_: lambda function: function)
    cfg = Config(student="s", teacher="t", data="d", loss=loss, **flags)
    encoder = SimpleNamespace(tokenizer=None, table=None)
    return loss_table.build_loss(cfg, encoder, encoder, "cpu")


def step(loss, sub_tile, x, y, is_tiled):
    """Return (distillation loss, clipped terms, gradient) of a job's micro-batch."""
    hidden = x.clone().requires_grad_()
    source = StoredLogits(hidden)
    if is_tiled:
        source = HiddenLogits(hidden, Head(torch.eye(x.shape[1], dtype=x.dtype)))
    tile = Tile(torch.arange(len(x)), (sub_tile,), len(y))
    teacher = HiddenLogits(y, Head(torch.eye(y.shape[1], dtype=y.dtype)))
    part = Part(loss.loss_fn, loss.write_gradient, loss.is_observed, teacher,
                batch=SimpleNamespace(tiles=[tile]), weight=1.0)
    value, [sums] = LossTerms([part]).reduce(source)
    value.backward()
    return sums[1].double(), int(sums[-1]), hidden.grad


def positions_of(loss, sub_tile, x, y):
    """Return the (n,) unweighted loss of the term that begins at each position."""
    seen = []
    keeping_positions(loss.loss_fn, seen)(x, y, sub_tile._replace(weight=None))
    return seen[0].double()


def clipped_by_hand(loss, sub_tile, x, y, most):
    """Return the same as `step` from the loss without a limit, whose terms are looked at.

    Args:
        most: of a term.
    """
    value_n = positions_of(loss, sub_tile, x, y)
    is_more = value_n > most
    weight = torch.ones_like(value_n) if sub_tile.weight is None else sub_tile.weight
    x = x.clone().requires_grad_()
    kept = loss.loss_fn(x, y, sub_tile._replace(weight=weight.masked_fill(is_more, 0.0)))
    [gradient] = torch.autograd.grad(kept, x)
    return kept.detach() + most * weight[is_more].sum(), int(is_more.sum()), gradient


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("loss", ["piece_kl", "reverse_kl", "generalized_jsd", "one tokenizer",
                                  *CHUNKS])
def test_terms_are_clipped_and_counted_before_their_weights(loss, temperature, monkeypatch):
    """In tiles and without, on-policy and off; what would write its gradient out leaves it."""
    is_one = loss == "one tokenizer"
    texts = NESTED["equal"] if is_one else PAIRS[3]
    toy = of_toy(texts, 3, torch.float64)
    sub_tile, x, y, _ = toy
    if loss in CHUNKS or is_one:
        sub_tile = of_whole_chunks(sub_tile, texts)
    loss = "forward_kl" if is_one else loss
    flags = {"loss": loss, "temperature": temperature}
    plain = built(monkeypatch, toy, is_one=is_one, **flags)
    factor = 1 if loss in NO_TAU else temperature**2
    value_n = positions_of(plain, sub_tile, x, y)
    limit = float(value_n[value_n != 0].quantile(0.6)) / factor
    flags["loss_options"] = {"max_divergence": limit}
    bounded = built(monkeypatch, toy, is_one=is_one, **flags)
    is_written = loss != "hybrid_uld"
    assert bool(plain.write_gradient) == is_written and not bounded.write_gradient
    weight = torch.rand(len(x), dtype=torch.float64)
    for is_tiled, on_policy, of_terms in itertools.product((True, False), (True, False),
                                                           (None, weight)):
        changed = sub_tile._replace(weight=of_terms, on_policy=on_policy)
        value, clipped, gradient = step(bounded, changed, x, y, is_tiled)
        expected = clipped_by_hand(plain, changed, x, y, limit * factor)
        assert value == pytest.approx(float(expected[0]), rel=1e-6)
        assert clipped == expected[1] > 0
        assert cases.close(gradient, expected[2], 1e-6)
    assert step(plain, sub_tile, x, y, True)[1] == 0


def test_kept_columns_are_clipped_too(monkeypatch):
    toy = of_toy(PAIRS[0], 3, torch.float64)
    sub_tile, x, y, _ = toy
    sub_tile = of_whole_chunks(sub_tile, PAIRS[0])
    kept_K = torch.arange(1, y.shape[1], 2)
    results = []
    for limit in (0.0, 0.05):
        loss = built(monkeypatch, toy, "projection_kl", loss_options={"max_divergence": limit})
        loss.loss_fn, loss.write_gradient = loss.for_columns(kept_K)
        results.append(loss)
    expected = clipped_by_hand(results[0], sub_tile, x, y[:, kept_K], 0.05)
    value, clipped, gradient = step(results[1], sub_tile, x, y[:, kept_K], True)
    assert value == pytest.approx(float(expected[0]), rel=1e-6) and clipped == expected[1] > 0
    assert cases.close(gradient, expected[2], 1e-6)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_the_text_is_not_clipped(tau):
    """What --ce_weight 0 lets piece_kl learn of the text itself has no limit."""
    for seed, limit in itertools.product(range(6), (0.05, 1.0)):
        case = cases.Case(seed)
        tables = LossTables.of(case)
        nodes = list_nodes(case.ids.next_S, *case.ids, tables.translation)
        value, _ = translated(
            case.x, case.y, nodes, tables.translation, temperature=tau, text_weight=0.7,
            bound=partial(torch.clamp, max=limit))
        terms = oracle.Translation(case.A, case.B, set(), {}).terms(
            case.x, case.y, case.ids.next_S, *case.ids, "forward_kl", tau, text_weight=0.7,
            limit=limit)
        expected = sum(term for *_, term in terms)
        assert abs(value - expected) < 1e-9 * abs(expected)
        gradients = [cases.gradient(each, case.x) for each in (value, expected)]
        assert cases.close(*gradients, 1e-9)


@pytest.fixture
def rows(texts):
    return [text[:60] for text in texts[:3]]


@pytest.mark.parametrize(("loss", "factor"), [("piece_kl", 4.0), ("uld", 1.0)])
def test_a_loop_of_ones_own_clips(loss, factor, pair, rows):
    kd = CrossTokenizerKD(*pair.tokenizers, loss, temperature=2.0)
    batch = kd.collate(rows)
    logits = [torch.randn(*side["input_ids"].shape, len(table)) for side, table in zip(
        (batch.student, batch.teacher), kd.token_tables)]
    kd.parameters["reduction"] = "none"
    term_N, _ = kd.sum_and_count(*logits, batch)
    limit = float(term_N.median()) / factor
    bounded = CrossTokenizerKD(*pair.tokenizers, loss, temperature=2.0, max_divergence=limit)
    value, count = bounded.sum_and_count(*logits, batch)
    expected = float(term_N.clamp(max=limit * factor).sum())
    assert float(value) == pytest.approx(expected, rel=1e-5) and count == len(term_N)
    assert expected < 0.99 * float(term_N.sum())


def test_a_trainer_clips(models, tokenizers, rows):
    teacher = AutoModelForCausalLM.from_pretrained(models[1])

    def loss_of(limit, seen=None):
        trained = Distillation(tokenizers[0], teacher, tokenizers[1], loss="piece_kl",
                               loss_options={"max_divergence": limit})
        batch = trained.collate([{"text": text} for text in rows])
        trained.to("cpu")
        if seen is not None:
            trained.setup.loss.loss_fn = keeping_positions(trained.setup.loss.loss_fn, seen)
        shape = *batch["batch"].student.ids.shape, len(tokenizers[0])
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return float(trained.loss(logits, batch)[1][1])

    seen = []
    plain = loss_of(0.0, seen)
    value_n = torch.cat(seen)
    limit = float(value_n[value_n > 0].median())
    assert loss_of(limit) == pytest.approx(float(value_n.clamp(max=limit).sum()), rel=1e-5)
    assert loss_of(limit) < 0.99 * plain


def test_draws_are_not_read_where_terms_are_clipped():
    """A clipped divergence is not linear in the teacher's probabilities."""
    flags = {"student": "s", "teacher": "t", "data": "d"}
    for loss in ("piece_kl", "projection_kl"):
        spec = loss_table.LOSSES[loss]
        assert spec.reads_draws(Config(**flags, loss=loss))
        assert not spec.reads_draws(
            Config(**flags, loss=loss, loss_options={"max_divergence": 1}))


def test_a_loss_that_takes_no_bound_has_no_such_option(monkeypatch):
    def mine(student_logits_BSV, teacher_logits_BTW, *ids, temperature=1.0, power=1.0):
        return losses.reduce_terms

    monkeypatch.setitem(loss_table.LOSSES, "mine", loss_table.per_chunk(mine))
    with pytest.raises(ValueError, match=r"option 'max_divergence'; --loss mine has power$"):
        Config(student="s", teacher="t", data="d", loss="mine",
               loss_options={"max_divergence": 1})
