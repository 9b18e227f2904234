"""losses.py, one vocabulary: against loops over the definitions, at extremes, on sharded columns."""

import random

import oracle
import pytest
import ranks
import torch
import torch.distributed as dist

import losses

F64 = torch.float64
NAMES = {"forward_kl": {}, "reverse_kl": {}, "generalized_jsd": {"beta": 0.3},
         "skew_forward_kl": {"skew": 0.2}, "skew_reverse_kl": {"skew": 0.1},
         "adaptive_kl": {"alpha": 0.5}, "total_variation": {}}


class Case:
    """Random logits of B samples, S positions, V tokens, and which positions count."""

    def __init__(self, seed, B=2, S=4, V=9, dtype=F64, scale=2.0):
        torch.manual_seed(seed)
        self.x = (scale * torch.randn(B, S, V)).to(dtype).requires_grad_()
        self.y = (scale * torch.randn(B, S, V)).to(dtype)
        self.mask = torch.rand(B, S) < 0.7
        self.mask[0, 0] = True
        self.next = torch.randint(V, (B, S))
        self.weight = torch.rand(B, S)
        self.support = torch.stack([torch.randperm(V)[:3] for _ in range(B * S)]).view(B, S, 3)


def gradient(value, x):
    return torch.autograd.grad(value, x)[0]


def close(a, b, tolerance):
    return (a - b).norm() <= tolerance * max(float(b.norm()), 1e-30)


@pytest.mark.parametrize("name", NAMES)
def test_equals_brute_force(name):
    parameter = NAMES[name]
    for seed in range(36):
        rng, case = random.Random(seed), Case(seed)
        case.x.requires_grad_(seed % 3 == 0)
        how = {"temperature": rng.choice([0.5, 1.0, 2.0]), "teacher_temperature": rng.choice([None, 1.5])}
        kind = rng.choice(["full", "teacher", "student", "given"])
        if kind != "full":
            how |= {"top_k": 3, "tail": rng.random() < 0.7}
            how["support"] = case.support if kind == "given" else kind
        value, count = getattr(losses, name)(case.x, case.y, case.mask, **parameter, **how)
        tau, teacher_tau = how.pop("temperature"), how.pop("teacher_temperature")
        terms = oracle.positions(name, case.x, case.y, case.mask, tau, teacher_tau, **how,
                                 coefficient=next(iter(parameter.values()), 0.0))
        expected = sum(term for _, _, term in terms)
        assert count == len(terms) and abs(value - expected) <= 1e-12 * expected.abs().clamp(min=1e-3)
        if case.x.requires_grad:
            assert close(gradient(value, case.x), gradient(expected, case.x), 1e-11), (seed, kind)


def test_weights_and_reductions():
    case = Case(1)
    terms = oracle.positions("forward_kl", case.x, case.y, case.mask)
    whole, count = losses.forward_kl(case.x, case.y, case.mask, weight_BS=case.weight)
    weights = torch.stack([case.weight[b, t] for b, t, _ in terms]).double()
    values = torch.stack([term for _, _, term in terms]) * weights
    assert abs(whole - values.sum()) < 1e-12 and abs(count - weights.sum()) < 1e-6
    each, kept = losses.forward_kl(case.x, case.y, case.mask, weight_BS=case.weight, reduction="none")
    assert torch.allclose(each, values, atol=1e-12) and torch.allclose(kept, weights)
    sample, counts = losses.forward_kl(case.x, case.y, case.mask, reduction="sample")
    assert counts.tolist() == case.mask.sum(1).tolist()
    assert abs(sample[1] - sum(term for b, _, term in terms if b == 1)) < 1e-12
    with pytest.raises(ValueError, match="reduction='mean'"):
        losses.forward_kl(case.x, case.y, case.mask, reduction="mean")
    with pytest.raises(ValueError, match="support='both'"):
        losses.forward_kl(case.x, case.y, case.mask, top_k=2, support="both")


@pytest.mark.parametrize("name", NAMES)
def test_zero_at_agreement_never_negative_and_differentiable(name):
    loss, how = getattr(losses, name), NAMES[name]
    for seed in range(8):
        case = Case(seed)
        for more in ({}, {"top_k": 3}, {"top_k": 3, "tail": False}, {"top_k": 99}):
            assert abs(loss(case.y, case.y, case.mask, **how, **more)[0]) < 1e-12
            assert loss(case.x, case.y, case.mask, **how, **more)[0] >= 0
    case = Case(3, B=1, S=2, V=5)
    for tau in (1.0, 2.0):
        if name != "adaptive_kl":  # its share has no gradient, so differences do not see what autograd says
            assert torch.autograd.gradcheck(
                lambda x, t=tau: loss(x, case.y, case.mask, temperature=t, **how)[0], case.x)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits_give_no_nan(name):
    """-inf logits, probabilities of 0 and 1, NaN where nothing is compared, one side at a time."""
    loss, how = getattr(losses, name), NAMES[name]
    for dtype in (torch.float32, F64):
        for more in ({}, {"top_k": 3}):
            for side in (0, 1):
                case = Case(5, dtype=dtype)
                logits = [case.x.detach().clone(), case.y.clone()]
                logits[side][0, 0, :4] = -torch.inf
                logits[side][1, 1] = torch.tensor([500.0] + [-500.0] * 8)
                logits[side] = torch.where(case.mask[..., None], logits[side], torch.nan)
                x = logits[0].requires_grad_()
                value = loss(x, logits[1], case.mask, **how, **more)[0]
                assert value.isfinite() and gradient(value, x).isfinite().all()


def test_a_peaky_student_keeps_the_gradient_of_its_tail():
    """A gap of 100 nats: the rest bucket holds e^-100, whose logarithm float32 must not lose."""
    x = torch.zeros(1, 1, 8)
    x[..., 0] = 100.0
    torch.manual_seed(0)
    x = (x + 0.1 * torch.randn(1, 1, 8)).requires_grad_()
    y, mask = torch.randn(1, 1, 8), torch.ones(1, 1, dtype=torch.bool)
    for name in ("forward_kl", "reverse_kl"):
        for top_k in (0, 1, 2):
            value = getattr(losses, name)(x, y, mask, top_k=top_k, support="student")[0]
            x64 = x.detach().double().requires_grad_()
            terms = oracle.positions(name, x64, y, mask, top_k=top_k, support="student")
            expected = sum(term for *_, term in terms)
            assert abs(value - expected) < 1e-5 * expected
            assert close(gradient(value, x).double(), gradient(expected, x64), 1e-4), (name, top_k)


def test_float32_and_bfloat16_stay_close():
    for seed in range(10):
        case = Case(seed, V=40, dtype=torch.float32)
        for name, how in NAMES.items():
            exact = getattr(losses, name)(case.x.double(), case.y.double(), case.mask, **how)[0]
            value = getattr(losses, name)(case.x, case.y, case.mask, **how)[0]
            assert abs(value - exact) <= 2e-6 * exact, name
            with torch.autocast("cpu", torch.bfloat16):
                low = getattr(losses, name)(case.x.bfloat16(), case.y.bfloat16(), case.mask, **how)[0]
            rounded = [z.detach().bfloat16().double() for z in (case.x, case.y)]
            assert low.dtype == torch.float32
            assert abs(low - getattr(losses, name)(*rounded, case.mask, **how)[0]) <= 2e-6 * exact, name


def test_the_ends_of_jsd_are_the_two_divergences():
    case = Case(2)
    for beta, name in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        end = losses.generalized_jsd(case.x, case.y, case.mask, beta)[0]
        assert end == getattr(losses, name)(case.x, case.y, case.mask)[0]
        near = losses.generalized_jsd(case.x, case.y, case.mask, abs(beta - 1e-4))[0] / (1e-4 * (1 - 1e-4))
        assert abs(near - end) < 0.01 * end  # towards its ends it is beta (1 - beta) times those


def test_every_row_is_read_by_the_right_position():
    case = Case(4)
    case.mask[:] = True
    for name, how in NAMES.items():
        for side in (0, 1):
            logits = [case.x.detach(), case.y]
            logits[side] = logits[side][:, [1, 0, 2, 3]]
            moved = getattr(losses, name)(*logits, case.mask, **how)[0]
            assert abs(moved - getattr(losses, name)(case.x, case.y, case.mask, **how)[0]) > 1e-3, name


def test_policy_loss_weighs_positions_by_their_importance():
    case = Case(6)
    logp = case.x.detach().log_softmax(-1).gather(-1, case.next[..., None]).squeeze(-1)
    old = logp - torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)).double()
    for old_logp in (None, old):
        value, count = losses.topk_tail_policy_loss(case.x, case.y, case.next, case.mask, 3, old_logp, 2.0)
        terms = oracle.positions("reverse_kl", case.x, case.y, case.mask, top_k=3, support="student")
        ratio = (logp - old).exp().clamp(max=2.0) if old_logp is not None else torch.ones_like(logp)
        expected = sum(ratio[b, t] * term for b, t, term in terms)
        assert count == len(terms) and abs(value - expected) < 1e-12 * expected
        assert close(gradient(value, case.x), gradient(expected, case.x), 1e-11)


def test_several_teachers():
    case = Case(7)
    others = [Case(8).y, case.y]
    mean = losses.average_teachers(others)
    assert torch.allclose(mean.exp(), (others[0].softmax(-1) + others[1].softmax(-1)) / 2)
    weights = torch.tensor([[0.2, 1.0], [0.8, 0.0]])  # of two teachers in two samples
    mean = losses.average_teachers(others, weights).exp()
    assert torch.allclose(mean[1], others[0][1].softmax(-1))
    assert torch.allclose(mean[0], 0.2 * others[0][0].softmax(-1) + 0.8 * others[1][0].softmax(-1), atol=1e-7)
    assert torch.equal(losses.average_teachers(others, space="logits"), (others[0] + others[1]) / 2)
    for kind, function in (("ce", lambda p, n: p[n].log()), ("max_prob", lambda p, n: p.max()),
                           ("entropy", lambda p, n: (p * p.log()).sum())):
        found = losses.teacher_scores(case.y, case.next, case.mask, kind)
        for b in range(2):
            terms = [function(case.y[b, t].softmax(-1), case.next[b, t]) for t in range(4) if case.mask[b, t]]
            assert abs(found[b] - sum(terms) / max(1, len(terms))) < 1e-12
    scores = torch.stack([losses.teacher_scores(y, case.next, case.mask) for y in others])
    assert torch.allclose(losses.teacher_weights(scores, 2.0), (2 * scores).softmax(0))
    best = losses.teacher_weights(scores, select=True)
    assert torch.equal(best.argmax(0), scores.argmax(0)) and torch.equal(best.sum(0), torch.ones(2).double())
    factors = losses.vocabulary_factors([1000, 10, 100])
    assert torch.allclose(factors, torch.tensor([3.0, 1.0, 2.0]).double())
    for wrong in (lambda: losses.average_teachers(others, space="x"),
                  lambda: losses.teacher_scores(case.y, case.next, case.mask, "x")):
        with pytest.raises(ValueError, match="'x': expected"):
            wrong()


def test_metrics():
    case = Case(9)
    labels = torch.where(case.mask, case.next, -100)
    same = (case.x.argmax(-1) == case.y.argmax(-1)) & case.mask
    assert losses.agreement(case.x, case.y, case.mask) == (same.sum(), case.mask.sum())
    assert losses.accuracy(case.x, labels)[0] == ((case.x.argmax(-1) == case.next) & case.mask).sum()
    p = case.x.detach().softmax(-1)
    assert abs(losses.entropy(case.x, case.mask)[0] + (p * p.log()).sum(-1)[case.mask].sum()) < 1e-12
    kept = torch.tensor([1, 4])
    mass = case.y.softmax(-1)[..., kept][case.mask].sum()
    assert abs(losses.kept_mass(case.y, case.mask, kept)[0] - mass) < 1e-12
    assert losses.dynamic_scale(torch.tensor(3.0), torch.tensor(2.0, requires_grad=True)) == 1.5


# --- sharded columns ------------------------------------------------------------------------------


def shards(world, V):
    """Column bounds, as uneven as it gets: the last rank has two columns."""
    cuts = [0, *sorted(random.Random(world).sample(range(1, V - 2), world - 2)), V - 2, V]
    return list(zip(cuts, cuts[1:]))


def shard_error(loss, sides, shards, group):
    """Largest relative error of value and gradient when a rank has but its columns of both sides' logits.

    loss: (student logits, teacher logits, group) -> sum; shards: this rank's (low, high) of both sides.
    """
    x, y = sides
    own, y_own = [side.detach()[..., low:high].clone() for side, (low, high) in zip(sides, shards)]
    whole, part = loss(x, y, None), loss(own.requires_grad_(), y_own, group)
    expected = gradient(whole, x)
    error = gradient(part, own) - expected[..., slice(*shards[0])]
    gap = abs(part - whole).detach() / abs(whole).detach().clamp(min=1e-9)
    return max(float(error.norm() / expected.norm().clamp(min=1e-9)), float(gap))


def sharded(world):
    """{(loss, how): relative error} on one of `world` ranks."""
    dist.init_process_group("gloo")
    case, errors = Case(world, V=11), {}
    bounds = [shards(world, 11)[dist.get_rank()]] * 2
    for name, how in NAMES.items():
        for more in ({}, {"top_k": 4}, {"support": "student", "top_k": 4}, {"tail": False, "top_k": 4},
                     {"temperature": 2.0}):
            def loss(x, y, group, name=name, how=how | more):
                return getattr(losses, name)(x, y, case.mask, group=group, **how)[0]

            errors[name, *more] = shard_error(loss, (case.x, case.y), bounds, dist.group.WORLD)
    labels = torch.where(case.mask, case.next, -100)
    errors["ce"] = shard_error(lambda x, y, group: losses.next_token_cross_entropy(x, labels, group=group)[0],
                               (case.x, case.y), bounds, dist.group.WORLD)
    dist.destroy_process_group()
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_columns_give_the_same_value_and_gradient(world):
    for errors in ranks.run(world, sharded, world):
        assert len(errors) == 36 and max(errors.values()) < 1e-10, errors
