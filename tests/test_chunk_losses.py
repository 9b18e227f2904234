"""losses.py, two vocabularies: gold, h_kl, uld, alm against loops over their definitions; weights, shares."""

import itertools
import random

import oracle
import pytest
import ranks
import torch
import torch.distributed as dist
from test_divergences import close, gradient, shard_error, shards
from test_losses import Case

import losses

F64 = torch.float64


def common_of(case):
    """Tokens that are the same letters on both sides."""
    pairs = [(v, w[0]) for v, w in enumerate(case.B) if len(w) == 1 and case.A[w[0]] == [v]]
    return [torch.tensor(ids) for ids in zip(*pairs)]


def calls(case, tau=1.0):
    """{name: (x, y) -> (sum, count)} of every chunk loss, and its terms by the oracle."""
    common, ids = common_of(case), (*case.next, *case.chunk)
    projection = case.indices, case.likelihoods
    found = {"gold": (lambda x, y, **how: losses.gold(x, y, *case.chunk, *common, tau, 3, **how),
                      lambda: oracle.gold(case.x, case.y, *case.chunk, [c.tolist() for c in common], tau, 3)),
             "uld": (lambda x, y, **how: losses.uld(x, y, *ids, tau, **how),
                     lambda: oracle.uld(case.x, case.y, *ids, tau)),
             "piece_kl": (lambda x, y, **how: losses.piece_kl(
                 x, y, *case.next, losses.piece_terms(*ids, case.spelling), case.spelling, tau, **how), None),
             "projection_kl": (lambda x, y, **how: losses.projection_kl(
                 x, y, *case.chunk, *projection, None, tau, **how), None)}
    for mode in ("binary_kl", "binary_kl_reverse", "binary_ce", "temperature_limit", "squared", "absolute"):
        found[mode] = (lambda x, y, mode=mode, **how: losses.alm(x, y, *ids, tau, mode, **how),
                       lambda mode=mode: oracle.alm(case.x, case.y, *ids, tau, mode))
    return found


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_equal_brute_force(tau):
    for seed in range(20):
        case = Case(seed, sizes=random.Random(seed).choice([(9, 12), (12, 7), (5, 14)]))
        case.x.requires_grad_(seed % 5 == 0)
        for name, (loss, definition) in calls(case, tau).items():
            if definition is None:
                continue  # test_losses.py has those
            value, count = loss(case.x, case.y)
            terms = definition()
            expected = sum(terms)
            assert count == len(terms), name
            assert abs(value - expected) <= 1e-10 * expected.abs().clamp(min=1e-2), (name, seed)
            if case.x.requires_grad:
                assert close(gradient(value, case.x), gradient(expected, case.x), 1e-8), (name, seed)


def test_gold_reverse_and_reference_average():
    for seed in range(6):
        case = Case(seed)
        common = common_of(case)
        for average in ("p", "logp"):
            for reverse in (False, True):
                value = losses.gold(case.x, case.y, *case.chunk, *common, 2.0, 4, average, reverse)[0]
                ids = [c.tolist() for c in common]
                expected = sum(oracle.gold(case.x, case.y, *case.chunk, ids, 2.0, 4, average, reverse))
                assert abs(value - expected) <= 1e-12 * abs(expected)
                assert close(gradient(value, case.x), gradient(expected, case.x), 1e-11)


def test_common_tokens_are_used_once():
    indices = torch.tensor([[7, -1], [7, -1], [8, 9], [8, 5], [8, -1], [-1, -1], [3, 4]])
    likelihoods = torch.tensor([[1, 0], [1, 0], [0.7, 0.3], [0.5, 0.5], [1, 0], [0, 0], [0.59, 0.41]])
    assert [x.tolist() for x in losses.common_tokens(indices, likelihoods)] == [[0, 4], [7, 8]]
    relaxed = losses.common_tokens(indices[:4], likelihoods[:4], relaxed=True)
    assert [x.tolist() for x in relaxed] == [[0, 2], [7, 8]]
    with pytest.raises(ValueError, match="no common token"):
        losses.common_tokens(indices[2:4], likelihoods[2:4])
    case = Case(3)
    how = dict(temperature=2.0, uncommon_topk=3)
    common = losses.common_tokens(case.indices, case.likelihoods, relaxed=True)
    projection = case.indices, case.likelihoods
    assert torch.equal(losses.h_kl(case.x, case.y, *case.chunk, *projection, **how)[0],
                       losses.gold(case.x, case.y, *case.chunk, *common, **how)[0])


def test_zero_at_agreement_and_never_negative():
    """One tokenizer on both sides, one model on both sides."""
    torch.manual_seed(0)
    V, next_ids, chunk = 11, torch.randint(11, (2, 6)), torch.arange(6).expand(2, 6) // 2
    y, common = torch.randn(2, 6, V, dtype=F64), torch.arange(8)
    ids = next_ids, next_ids, chunk, chunk
    assert abs(losses.gold(y, y, chunk, chunk, common, common)[0]) < 1e-12
    assert abs(losses.uld(y, y, *ids)[0]) < 1e-12
    for mode in ("binary_kl", "binary_kl_reverse", "temperature_limit", "squared", "absolute"):
        assert abs(losses.alm(y, y, *ids, mode=mode)[0]) < 1e-12
    for seed in range(10):
        case = Case(seed, dtype=torch.float32)
        for name, (loss, _) in calls(case).items():
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
    for name, (loss, _) in calls(case, 2.0).items():
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, case.y)[0], case.x, fast_mode=True), name


def test_padding_and_extremes():
    """NaN where no chunk is, -inf and 500 where one is: one side at a time, no NaN comes out."""
    for side in (0, 1):
        for name in calls(Case(3)):
            case = Case(3)
            expected = calls(case)[name][0](case.x, case.y)[0]
            logits = [case.x, case.y]
            logits[side] = torch.where((case.chunk[side] >= 0)[..., None], logits[side], torch.nan)
            value = calls(case)[name][0](*logits)[0]
            assert value == expected, name
            assert torch.equal(gradient(value, case.x), gradient(expected, case.x)), name
            logits = [case.x.detach().clone(), case.y.clone()]
            logits[side][0, 0] = torch.tensor([500.0] + [-500.0] * (logits[side].shape[-1] - 1))
            logits[side][0, 1, 2] = -torch.inf
            x = logits[0].requires_grad_()
            value = calls(case)[name][0](x, logits[1])[0]
            assert value.isfinite() and gradient(value, x).isfinite().all(), (name, side)


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
        for name, (loss, _) in calls(case).items():
            value = loss(*logits)[0]
            assert value.isfinite() and gradient(value, logits[0]).isfinite().all(), (name, b, t, v)


@pytest.mark.parametrize("gap", [100.0, 170.0, float("inf")])
def test_an_excluded_event_of_several_tokens(gap):
    """Tokens 0 - 5 are one event, which the student excludes and the teacher does not."""
    event, ids, one = torch.tensor([0] * 6 + [1, 2]), torch.arange(8), torch.zeros(1, 1, dtype=torch.long)
    ranges = ids[:, None], ids, torch.zeros(8, 1, dtype=torch.long), torch.full((8, 1), 8)
    spelling = losses.Spelling(event, event, 3, *ranges, *ranges)
    x = torch.zeros(1, 1, 8)
    x[..., :6] = -gap
    terms = losses.piece_terms(one, one, one, one, spelling)
    value = losses.piece_kl(x.requires_grad_(), torch.zeros(1, 1, 8), one, one, terms, spelling)[0]
    assert value > 70 and value.isfinite() and gradient(value, x).isfinite().all()


@pytest.mark.parametrize("tau", [1.0, 10.0, 100.0])
def test_agreement_at_high_temperature(tau):
    """The shift against underflow shrinks with the temperature, whose square would multiply its rounding."""
    torch.manual_seed(0)
    ids, y = torch.arange(5000), torch.randn(1, 16, 5000) * 3
    ranges = ids[:, None], ids, torch.zeros(5000, 1, dtype=torch.long), torch.full((5000, 1), 5000)
    spelling, chunk = losses.Spelling(ids, ids, 5000, *ranges, *ranges), torch.arange(16)[None]
    terms = losses.piece_terms(chunk, chunk, chunk, chunk, spelling)
    found = [losses.piece_kl(y, y, chunk, chunk, terms, spelling, tau)[0],
             losses.gold(y, y, chunk, chunk, ids[:4000], ids[:4000], tau)[0]]
    # 16 positions; sums of probabilities are rounded, whatever the shift
    assert max(abs(value) for value in found) < 1e-4 + 16 * 1e-6 * tau**2, found


@pytest.mark.parametrize("gap", [10.0, 35.0, 60.0, 120.0])
def test_sure_models_in_float32(gap):
    """What a model gives almost no probability underflows in float32; loss and gradient must not."""
    for side, name, seed in itertools.product((0, 1), calls(Case(1)), range(3)):
        case = Case(seed, dtype=torch.float32)
        logits = [case.x.detach(), case.y]
        likeliest = torch.randint(9, logits[side].shape[:2])
        sure = torch.nn.functional.one_hot(likeliest, logits[side].shape[2])
        logits[side] = logits[side] + gap * sure
        found = []
        for dtype in (F64, torch.float32):
            x, y = logits[0].to(dtype).requires_grad_(), logits[1].to(dtype)
            value = calls(case)[name][0](x, y)[0]
            found += [value.double(), gradient(value, x).double()]
        assert found[0].isfinite() and abs(found[2] - found[0]) <= 2e-5 * found[0].abs(), (name, side, seed)
        error, size = (found[3] - found[1]).norm(), found[1].norm()
        assert error <= 2e-5 * max(size, 0.1), (name, side, seed)  # one that vanishes is rounded


def test_same_whatever_the_reduction_and_weights_count():
    case = Case(7, samples=4)
    weight = torch.rand(case.chunk[0].shape, dtype=F64)
    for name, (loss, _) in calls(case).items():
        total, count = loss(case.x, case.y)
        each, ones = loss(case.x, case.y, reduction="none")
        sample, counts = loss(case.x, case.y, reduction="sample")
        assert torch.allclose(each.sum(), total) and torch.allclose(sample.sum(), total), name
        assert ones.sum() == counts.sum() == count == len(each) and len(sample) == 4
        rows = case.chunk[0].clone()
        rows[1:] = -1  # the first sample alone
        first = dict(weight_BS=(torch.arange(4) == 0)[:, None].expand(rows.shape).double())
        assert torch.allclose(loss(case.x, case.y, **first)[0], sample[0]), name
        half = loss(case.x, case.y, weight_BS=0.5 * torch.ones_like(weight))
        assert torch.allclose(half[0], total / 2) and torch.allclose(half[1], count / 2), name
        assert loss(case.x, case.y, weight_BS=weight)[0] < total


def test_low_precision_inputs_are_summed_in_float32():
    case = Case(4, dtype=torch.float32)
    x, y = case.x.detach().bfloat16().requires_grad_(), case.y.bfloat16()
    for name, (loss, _) in calls(case).items():
        exact = loss(x.detach().double(), y.double())[0]
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(x, y)[0]
        assert value.dtype == torch.float32 and abs(value - exact) <= 1e-5 * abs(exact), name


def test_shares_of_the_parts_of_piece_kl():
    case = Case(5, samples=4)
    terms = losses.piece_terms(*case.next, *case.chunk, case.spelling)
    found = losses.piece_coverage(case.y, terms, case.spelling)
    shapes = [(len(s), len(t)) for _, s, t in oracle.chunks(*case.chunk)]
    assert found["one_to_one"][0] == shapes.count((1, 1)) and found["many"][0] == sum(
        s > 1 and t > 1 for s, t in shapes)
    assert found["one_to_one"][1] == len(shapes)
    linked = found["event_coverage"]
    assert linked[0] <= linked[1] and 0 <= found["prefix_coverage"][0] <= found["prefix_coverage"][1]


def test_projected_agreement():
    case = Case(2)
    found, count = losses.projected_agreement(case.x, case.y, *case.chunk, case.indices)
    expected = [int(case.indices[case.x[b, s[0]].argmax(), 0]) == int(case.y[b, t[0]].argmax())
                for b, s, t in oracle.chunks(*case.chunk)]
    assert (found, count) == (sum(expected), len(expected))


# --- sharded columns ------------------------------------------------------------------------------


def sharded(world):
    """{(loss, case): relative error} on one of `world` ranks; few chunks, so empty shares."""
    dist.init_process_group("gloo")
    rank, errors = dist.get_rank(), {}
    for seed, samples, length in ((0, 3, 14), (1, 1, 3), (6, 2, 14)):
        case = Case(seed, samples, length)
        common, bounds = common_of(case), [shards(world, x.shape[-1])[rank] for x in (case.x, case.y)]
        projection, ids = (case.indices, case.likelihoods), (*case.next, *case.chunk)
        found = {name: loss for name, (loss, _) in calls(case, 2.0).items()}
        found["kept columns"] = lambda x, y, **how: losses.projection_kl(
            x, y, *case.chunk, *projection, torch.tensor([0, 3, 7]), **how)
        found["logp"] = lambda x, y, **how: losses.gold(x, y, *case.chunk, *common, average="logp", **how)
        found["hybrid"] = lambda x, y, **how: losses.uld(x, y, *ids, common=common, **how)
        found["h_kl"] = lambda x, y, **how: losses.h_kl(x, y, *case.chunk, *projection, **how)
        for name, loss in found.items():
            errors[name, seed] = shard_error(lambda x, y, group, loss=loss: loss(x, y, group=group)[0],
                                             (case.x, case.y), bounds, dist.group.WORLD)
    dist.destroy_process_group()
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_columns_give_the_same_value_and_gradient(world):
    for errors in ranks.run(world, sharded, world):
        assert len(errors) == 3 * 14 and max(errors.values()) < 1e-9, errors
