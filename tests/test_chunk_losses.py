"""losses.py with two vocabularies: gold, h_kl, uld, alm against their definitions, at extremes."""

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oracle
import ranks
import references
from cases import Case, close, common_of, gradient, padded, shard_error, shards
from isogloss import event_kl as events, losses
from isogloss.spelling import translation_tables
from isogloss.translation import Tables, list_nodes, translated
from waiting import FixedOrder

F64 = torch.float64


ALM_MODES = (
    "binary_kl", "binary_kl_reverse", "binary_ce", "temperature_limit", "squared", "absolute"
)


def losses_of(case, tau=1.0):
    """Return {name: (x, y, **options) -> (sum, count)} of every chunk loss."""
    common = common_of(case)
    ids = (*case.next, *case.chunk)

    def event_kl(x, y, **options):
        terms = events.event_terms(*ids, case.spelling)
        return events.event_kl(x, y, *case.next, terms, case.spelling, temperature=tau, **options)

    def projection_kl(x, y, **options):
        projection = case.indices, case.likelihoods
        return losses.projection_kl(
            x, y, *case.chunk, *projection, temperature=tau, **options)

    def gold(x, y, **options):
        return losses.gold(
            x, y, *case.chunk, *common, temperature=tau, uncommon_topk=3, **options)

    def uld(x, y, **options):
        return losses.uld(x, y, *ids, temperature=tau, **options)

    by_name = {"gold": gold, "uld": uld, "event_kl": event_kl, "projection_kl": projection_kl}
    for mode in ALM_MODES:
        def alm(x, y, mode=mode, **options):
            return losses.alm(x, y, *ids, temperature=tau, mode=mode, **options)

        by_name[mode] = alm
    return by_name


@pytest.mark.parametrize("name", ["gold", "uld", "event_kl", "projection_kl", "binary_kl"])
def test_sums_have_a_fixed_order_where_index_add_has_none(name, monkeypatch):
    """On a GPU: the plain path repeats itself, forward and backward."""
    case = Case(20, samples=4, length=14)
    results = []
    for ordered in (("cpu",), ()):
        monkeypatch.setattr(losses, "ORDERED_DEVICES", ordered)
        leaf = case.x.double().requires_grad_()
        with contextlib.nullcontext() if ordered else FixedOrder():
            value, _ = losses_of(case)[name](leaf, case.y.double())
            value.backward()
        results.append((value.detach(), leaf.grad))
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def definition(name, case, tau=1.0):
    """Return the terms of a loss by the oracle; None: test_losses.py compares that loss."""
    ids = (*case.next, *case.chunk)
    if name == "gold":
        common = [ids_N.tolist() for ids_N in common_of(case)]
        return oracle.gold(case.x, case.y, *case.chunk, common, tau, 3)
    if name == "uld":
        return oracle.uld(case.x, case.y, *ids, tau)
    if name in ALM_MODES:
        return oracle.alm(case.x, case.y, *ids, tau, name)
    return None


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_equal_brute_force(tau):
    for seed in range(20):
        case = Case(seed, sizes=random.Random(seed).choice([(9, 12), (12, 7), (5, 14)]))
        case.x.requires_grad_(seed % 5 == 0)
        for name, loss in losses_of(case, tau).items():
            terms = definition(name, case, tau)
            if terms is None:
                continue
            value, count = loss(case.x, case.y)
            expected = sum(terms)
            assert count == len(terms), name
            assert abs(value - expected) <= 1e-10 * expected.abs().clamp(min=1e-2), (name, seed)
            if case.x.requires_grad:
                d = gradient(value, case.x)
                assert close(d, gradient(expected, case.x), 1e-8), (name, seed)


@pytest.mark.parametrize("reverse", [False, True])
def test_gold_reverse_and_reference_average(reverse):
    for seed in range(6):
        case = Case(seed)
        common = common_of(case)
        ids = [ids_N.tolist() for ids_N in common]
        ours = losses.gold(case.x, case.y, *case.chunk, *common, temperature=2.0,
                           uncommon_topk=4, reverse=reverse)[0]
        theirs = references.gold_of_mean_logp(
            case.x, case.y, *case.chunk, common, 2.0, 4, reverse)[0]
        for average, value in (("p", ours), ("logp", theirs)):
            expected = sum(oracle.gold(
                case.x, case.y, *case.chunk, ids, 2.0, 4, average, reverse))
            assert abs(value - expected) <= 1e-12 * abs(expected)
            assert close(gradient(value, case.x), gradient(expected, case.x), 1e-11)


def test_common_tokens_are_used_once():
    indices = torch.tensor([[7, -1], [7, -1], [8, 9], [8, 5], [8, -1], [-1, -1], [3, 4]])
    likelihoods = torch.tensor(
        [[1, 0], [1, 0], [0.7, 0.3], [0.5, 0.5], [1, 0], [0, 0], [0.59, 0.41]]
    )
    exact = losses.common_tokens(indices, likelihoods)
    assert exact.student.tolist() == [0, 4]
    assert exact.teacher.tolist() == [7, 8]
    relaxed = losses.common_tokens(indices[:4], likelihoods[:4], relaxed=True)
    assert relaxed.student.tolist() == [0, 2]
    assert relaxed.teacher.tolist() == [7, 8]
    with pytest.raises(ValueError, match="no common token"):
        losses.common_tokens(indices[2:4], likelihoods[2:4])


def test_zero_at_agreement_and_never_negative():
    """One tokenizer on both sides, one model on both sides."""
    torch.manual_seed(0)
    V = 11
    next_ids = torch.randint(V, (2, 6))
    chunk = torch.arange(6).expand(2, 6) // 2
    y = torch.randn(2, 6, V, dtype=F64)
    common = torch.arange(8)
    ids = next_ids, next_ids, chunk, chunk
    assert abs(losses.gold(y, y, chunk, chunk, common, common)[0]) < 1e-12
    assert abs(losses.uld(y, y, *ids)[0]) < 1e-12
    for mode in ("binary_kl", "binary_kl_reverse", "temperature_limit", "squared", "absolute"):
        assert abs(losses.alm(y, y, *ids, mode=mode)[0]) < 1e-12
    for seed in range(10):
        case = Case(seed, dtype=torch.float32)
        for name, loss in losses_of(case).items():
            assert loss(case.x, case.y)[0] >= -1e-6, name
    with pytest.raises(ValueError, match="mode='x': expected binary_kl"):
        losses.alm(y, y, *ids, mode="x")


def test_large_temperature_is_the_limit():
    case = Case(4)
    ids = *case.next, *case.chunk
    limit = losses.alm(case.x, case.y, *ids, mode="temperature_limit")[0]
    for tau in (1e2, 1e3):  # the two differ by terms of 1 / tau
        near = tau * losses.alm(case.x, case.y, *ids, temperature=tau)[0]
        assert 0 < abs(near / limit - 1) < 20 / tau


def test_gradcheck():
    case = Case(1, samples=1, length=6)
    for name, loss in losses_of(case, 2.0).items():
        assert torch.autograd.gradcheck(
            lambda x, loss=loss: loss(x, case.y)[0], case.x, fast_mode=True
        ), name


def test_padding_and_extremes():
    """NaN where no chunk is, -inf and 500 where one is: one side at a time, no NaN comes out."""
    case = Case(3)
    for side in (0, 1):
        has_chunk = (case.chunk[side] >= 0)[..., None]
        for name, loss in losses_of(case).items():
            expected = loss(case.x, case.y)[0]
            logits = [case.x, case.y]
            logits[side] = torch.where(has_chunk, logits[side], torch.nan)
            value = loss(*logits)[0]
            assert value == expected, name
            assert torch.equal(gradient(value, case.x), gradient(expected, case.x)), name
            logits = [case.x.detach().clone(), case.y.clone()]
            width = logits[side].shape[-1]
            logits[side][0, 0] = torch.tensor([500.0] + [-500.0] * (width - 1))
            logits[side][0, 1, 2] = -torch.inf
            x = logits[0].requires_grad_()
            value = loss(x, logits[1])[0]
            assert value.isfinite(), (name, side)
            assert gradient(value, x).isfinite().all(), (name, side)


@pytest.mark.parametrize("side", [0, 1])
def test_excluded_tokens_cost_a_finite_amount(side):
    """-inf at every token of every position, realized ones included, one at a time."""
    case = Case(1, dtype=torch.float32)
    for b, t, v in itertools.product(*map(range, (case.x, case.y)[side].shape)):
        if case.chunk[side][b, t] < 0:
            continue
        logits = [case.x.detach().clone(), case.y.clone()]
        logits[side][b, t, v] = -torch.inf
        logits[0].requires_grad_()
        for name, loss in losses_of(case).items():
            value = loss(*logits)[0]
            assert value.isfinite(), (name, b, t, v)
            assert gradient(value, logits[0]).isfinite().all(), (name, b, t, v)


@pytest.mark.parametrize("gap", [100.0, 170.0, float("inf")])
def test_an_excluded_event_of_several_tokens(gap):
    """Tokens 0 - 5 are one event, which the student excludes and the teacher does not."""
    event = torch.tensor([0] * 6 + [1, 2])
    ids = torch.arange(8)
    one = torch.zeros(1, 1, dtype=torch.long)
    ranges = ids[:, None], ids, torch.zeros(8, 1, dtype=torch.long), torch.full((8, 1), 8)
    spelling = events.Spelling(event, event, 3, *ranges, *ranges)
    x = torch.zeros(1, 1, 8)
    x[..., :6] = -gap
    terms = events.event_terms(one, one, one, one, spelling)
    x.requires_grad_()
    value = events.event_kl(x, torch.zeros(1, 1, 8), one, one, terms, spelling)[0]
    assert value > 70
    assert value.isfinite()
    assert gradient(value, x).isfinite().all()


@pytest.mark.parametrize("tau", [1.0, 10.0, 100.0])
def test_agreement_at_high_temperature(tau):
    """The shift against underflow shrinks with tau, as tau^2 would multiply its rounding."""
    torch.manual_seed(0)
    ids = torch.arange(5000)
    y = torch.randn(1, 16, 5000) * 3
    zeros = torch.zeros(5000, 1, dtype=torch.long)
    ranges = ids[:, None], ids, zeros, zeros + 5000
    spelling = events.Spelling(ids, ids, 5000, *ranges, *ranges)
    chunk = torch.arange(16)[None]
    terms = events.event_terms(chunk, chunk, chunk, chunk, spelling)
    event_kl = events.event_kl(y, y, chunk, chunk, terms, spelling, temperature=tau)[0]
    gold = losses.gold(y, y, chunk, chunk, ids[:4000], ids[:4000], temperature=tau)[0]
    # 16 positions; sums of probabilities are rounded, whatever the shift
    limit = 1e-4 + 16 * 1e-6 * tau**2
    assert abs(event_kl) < limit
    assert abs(gold) < limit


@pytest.mark.parametrize("gap", [10.0, 35.0, 60.0, 120.0])
def test_sure_models_in_float32(gap):
    """What a model gives almost no probability underflows in float32; the loss must not."""
    for side, seed in itertools.product((0, 1), range(3)):
        case = Case(seed, dtype=torch.float32)
        logits = [case.x.detach(), case.y]
        most_likely = torch.randint(9, logits[side].shape[:2])
        sure = torch.nn.functional.one_hot(most_likely, logits[side].shape[2])
        logits[side] = logits[side] + gap * sure
        for name, loss in losses_of(case).items():
            x64 = logits[0].double().requires_grad_()
            expected = loss(x64, logits[1].double())[0]
            x = logits[0].clone().requires_grad_()
            value = loss(x, logits[1])[0].double()
            assert expected.isfinite()
            assert abs(value - expected) <= 2e-5 * expected.abs(), (name, side, seed)
            d = gradient(expected, x64)
            error = (gradient(value, x).double() - d).norm()
            # a gradient that vanishes is rounded
            assert error <= 2e-5 * max(d.norm(), 0.1), (name, side, seed)


def test_same_whatever_the_reduction_and_weights_count():
    case = Case(7, samples=4)
    weight = torch.rand(case.chunk[0].shape, dtype=F64)
    first_sample = torch.zeros_like(weight)
    first_sample[0] = 1
    for name, loss in losses_of(case).items():
        total, count = loss(case.x, case.y)
        term_N, weight_N = loss(case.x, case.y, reduction="none")
        sample, counts = loss(case.x, case.y, reduction="sample")
        assert torch.allclose(term_N.sum(), total), name
        assert torch.allclose(sample.sum(), total), name
        assert weight_N.sum() == counts.sum() == count == len(term_N)
        assert len(sample) == 4
        first = loss(case.x, case.y, weight_BS=first_sample)[0]
        assert torch.allclose(first, sample[0]), name
        half, half_count = loss(case.x, case.y, weight_BS=torch.full_like(weight, 0.5))
        assert torch.allclose(half, total / 2), name
        assert torch.allclose(half_count, count / 2), name
        assert loss(case.x, case.y, weight_BS=weight)[0] < total


def test_low_precision_inputs_are_summed_in_float32():
    case = Case(4, dtype=torch.float32)
    x = case.x.detach().bfloat16().requires_grad_()
    y = case.y.bfloat16()
    for name, loss in losses_of(case).items():
        exact = loss(x.detach().double(), y.double())[0]
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(x, y)[0]
        assert value.dtype == torch.float32
        assert abs(value - exact) <= 1e-5 * abs(exact), name


def test_coverage_of_the_terms_of_event_kl():
    case = Case(5, samples=4)
    terms = events.event_terms(*case.next, *case.chunk, case.spelling)
    coverage = events.event_coverage(case.y, terms, case.spelling)
    one_to_one = 0
    many = 0
    chunks = oracle.chunks(*case.chunk)
    for _, student_positions, teacher_positions in chunks:
        shape = len(student_positions), len(teacher_positions)
        one_to_one += shape == (1, 1)
        many += min(shape) > 1
    assert coverage["one_to_one"][0] == one_to_one
    assert coverage["one_to_one"][1] == len(chunks)
    assert coverage["many"][0] == many
    event_mass, num_starts = coverage["event_coverage"]
    prefix_mass, num_inside = coverage["prefix_coverage"]
    assert event_mass <= num_starts
    assert 0 <= prefix_mass <= num_inside


# --- sharded columns ------------------------------------------------------------------------------


def sharded_losses(case):
    """Return {name: (x, y, samples) -> (sum, count)} of losses of every kind."""
    common = common_of(case)
    projection = case.indices, case.likelihoods
    tables = translation_of(case)

    def ids(samples):
        return [of_side[samples] for of_side in (*case.next, *case.chunk)]

    def translate(x, y, samples):
        next_BS, next_BT, *chunks = ids(samples)
        # without joins, what was read does not matter
        nodes = list_nodes(next_BS, next_BS, next_BT, *chunks, tables)
        return translated(x, y, next_BS, next_BT, nodes, tables)

    return {
        "alm": lambda x, y, samples: losses.alm(x, y, *ids(samples)),
        "gold": lambda x, y, samples: losses.gold(
            x, y, *ids(samples)[2:], *common, temperature=2.0, uncommon_topk=3),
        "hybrid": lambda x, y, samples: losses.uld(x, y, *ids(samples), common=common),
        "projection_kl": lambda x, y, samples: losses.projection_kl(
            x, y, *ids(samples)[2:], *projection),
        "piece_kl": translate,
    }


def translation_of(case):
    """Return `translation.Tables` of the case's spellings, of a student that joins nothing."""
    spellings = []
    for spelled in (case.A, case.B):
        spellings.append(padded(spelled, -1, max(map(len, spelled))).numpy())
    size = len(case.B)
    arrays = translation_tables(
        *spellings, [b""] * size, np.zeros(size, bool), lambda texts: [])
    return Tables(**{name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                     for name, value in arrays.items()})


def sharded(world):
    """Return the relative errors, by loss and case, on one of `world` ranks; some hold none."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    errors = {}
    for seed, samples, length in ((0, 3, 14), (1, 1, 3), (6, 2, 14)):
        case = Case(seed, samples, length)
        bounds = [shards(world, logits.shape[-1])[rank] for logits in (case.x, case.y)]
        for name, loss in sharded_losses(case).items():
            errors[name, seed] = shard_error(loss, (case.x, case.y), bounds, dist.group.WORLD)
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
def test_sharded_columns_give_the_same_value_and_gradient():
    for errors in ranks.run(2, sharded, 2):
        assert len(errors) == 3 * 5
        assert max(errors.values()) < 1e-9, errors
