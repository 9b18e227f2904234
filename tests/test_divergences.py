"""losses.py with one vocabulary: against the definitions, at extremes, on sharded columns."""

import random

import pytest
import torch
import torch.distributed as dist

import losses
import oracle
import ranks
from cases import close, gradient, shard_error, shards

F64 = torch.float64
PARAMETERS = {  # by loss
    "forward_kl": {},
    "reverse_kl": {},
    "generalized_jsd": {"beta": 0.3},
    "skew_forward_kl": {"skew": 0.2},
    "skew_reverse_kl": {"skew": 0.1},
    "adaptive_kl": {"alpha": 0.5},
    "total_variation": {},
}


class LogitsCase:
    """Random logits of B samples, S positions, V tokens, and which positions count."""

    def __init__(self, seed, B=2, S=4, V=9, dtype=F64, scale=2.0):
        torch.manual_seed(seed)
        self.x = (scale * torch.randn(B, S, V)).to(dtype).requires_grad_()
        self.y = (scale * torch.randn(B, S, V)).to(dtype)
        self.mask = torch.rand(B, S) < 0.7
        self.mask[0, 0] = True
        self.next = torch.randint(V, (B, S))
        self.weight = torch.rand(B, S)
        support = [torch.randperm(V)[:3] for _ in range(B * S)]
        self.support = torch.stack(support).view(B, S, 3)


@pytest.mark.parametrize("name", PARAMETERS)
def test_equals_brute_force(name):
    parameters = PARAMETERS[name]
    coefficient = next(iter(parameters.values()), 0.0)
    for seed in range(36):
        rng = random.Random(seed)
        case = LogitsCase(seed)
        case.x.requires_grad_(seed % 3 == 0)
        tau = rng.choice([0.5, 1.0, 2.0])
        teacher_tau = rng.choice([None, 1.5])
        kind = rng.choice(["full", "teacher", "student", "given"])
        options = {}
        if kind != "full":
            options["top_k"] = 3
            options["tail"] = rng.random() < 0.7
            options["support"] = case.support if kind == "given" else kind
        value, count = getattr(losses, name)(
            case.x, case.y, case.mask, temperature=tau, teacher_temperature=teacher_tau,
            **parameters, **options,
        )
        terms = oracle.positions(
            name, case.x, case.y, case.mask, tau, teacher_tau, coefficient=coefficient, **options
        )
        expected = oracle.total(terms)
        assert count == len(terms)
        assert abs(value - expected) <= 1e-12 * expected.abs().clamp(min=1e-3)
        if case.x.requires_grad:
            d = gradient(value, case.x)
            assert close(d, gradient(expected, case.x), 1e-11), (seed, kind)


def test_weights_and_reductions():
    case = LogitsCase(1)
    terms = oracle.positions("forward_kl", case.x, case.y, case.mask)
    weighted = dict(weight_BS=case.weight)
    whole, count = losses.forward_kl(case.x, case.y, case.mask, **weighted)
    weights = torch.stack([case.weight[b, t] for b, t, _ in terms]).double()
    values = torch.stack([term for _, _, term in terms]) * weights
    assert abs(whole - values.sum()) < 1e-12
    assert abs(count - weights.sum()) < 1e-6
    term_N, weight_N = losses.forward_kl(
        case.x, case.y, case.mask, **weighted, reduction="none"
    )
    assert torch.allclose(term_N, values, atol=1e-12)
    assert torch.allclose(weight_N, weights)
    sample, counts = losses.forward_kl(case.x, case.y, case.mask, reduction="sample")
    assert counts.tolist() == case.mask.sum(1).tolist()
    assert abs(sample[1] - sum(term for b, _, term in terms if b == 1)) < 1e-12
    with pytest.raises(ValueError, match="reduction='mean'"):
        losses.forward_kl(case.x, case.y, case.mask, reduction="mean")
    with pytest.raises(ValueError, match="support='both'"):
        losses.forward_kl(case.x, case.y, case.mask, top_k=2, support="both")
    with pytest.raises(ValueError, match="'kl': no such divergence"):
        losses.position_divergence("kl", case.x, case.y, case.mask)


@pytest.mark.parametrize("name", PARAMETERS)
def test_zero_at_agreement_never_negative_and_differentiable(name):
    loss = getattr(losses, name)
    parameters = PARAMETERS[name]
    for seed in range(8):
        case = LogitsCase(seed)
        for options in ({}, {"top_k": 3}, {"top_k": 3, "tail": False}, {"top_k": 99}):
            agreement = loss(case.y, case.y, case.mask, **parameters, **options)[0]
            assert abs(agreement) < 1e-12
            assert loss(case.x, case.y, case.mask, **parameters, **options)[0] >= 0
    case = LogitsCase(3, B=1, S=2, V=5)
    for tau in (1.0, 2.0):
        if name != "adaptive_kl":  # its h has no gradient, so finite differences see more
            assert torch.autograd.gradcheck(
                lambda x, t=tau: loss(x, case.y, case.mask, temperature=t, **parameters)[0],
                case.x,
            )


@pytest.mark.parametrize("name", PARAMETERS)
def test_extreme_logits_give_no_nan(name):
    """-inf logits, probabilities of 0 and 1, NaN where nothing is compared, one side at a time."""
    loss = getattr(losses, name)
    for dtype in (torch.float32, F64):
        for options in ({}, {"top_k": 3}):
            for side in (0, 1):
                case = LogitsCase(5, dtype=dtype)
                logits = [case.x.detach().clone(), case.y.clone()]
                logits[side][0, 0, :4] = -torch.inf
                logits[side][1, 1] = torch.tensor([500.0] + [-500.0] * 8)
                logits[side] = torch.where(case.mask[..., None], logits[side], torch.nan)
                x = logits[0].requires_grad_()
                value = loss(x, logits[1], case.mask, **PARAMETERS[name], **options)[0]
                assert value.isfinite()
                assert gradient(value, x).isfinite().all()


def test_a_peaky_student_keeps_the_gradient_of_its_tail():
    """A gap of 100 nats: the rest bucket holds e^-100, whose logarithm float32 must not lose."""
    x = torch.zeros(1, 1, 8)
    x[..., 0] = 100.0
    torch.manual_seed(0)
    x = (x + 0.1 * torch.randn(1, 1, 8)).requires_grad_()
    y = torch.randn(1, 1, 8)
    mask = torch.ones(1, 1, dtype=torch.bool)
    for name in ("forward_kl", "reverse_kl"):
        for top_k in (0, 1, 2):
            value = getattr(losses, name)(x, y, mask, top_k=top_k, support="student")[0]
            x64 = x.detach().double().requires_grad_()
            terms = oracle.positions(name, x64, y, mask, top_k=top_k, support="student")
            expected = oracle.total(terms)
            assert abs(value - expected) < 1e-5 * expected
            d = gradient(value, x).double()
            assert close(d, gradient(expected, x64), 1e-4), (name, top_k)


def test_float32_and_bfloat16_stay_close():
    for seed in range(10):
        case = LogitsCase(seed, V=40, dtype=torch.float32)
        low_x = case.x.detach().bfloat16()
        low_y = case.y.bfloat16()
        for name, parameters in PARAMETERS.items():
            loss = getattr(losses, name)
            exact = loss(case.x.double(), case.y.double(), case.mask, **parameters)[0]
            value = loss(case.x, case.y, case.mask, **parameters)[0]
            assert abs(value - exact) <= 2e-6 * exact, name
            with torch.autocast("cpu", torch.bfloat16):
                low = loss(low_x, low_y, case.mask, **parameters)[0]
            exact = loss(low_x.double(), low_y.double(), case.mask, **parameters)[0]
            assert low.dtype == torch.float32
            assert abs(low - exact) <= 2e-6 * exact, name


def test_the_ends_of_jsd_are_the_two_divergences():
    case = LogitsCase(2)
    for beta, name in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        end = losses.generalized_jsd(case.x, case.y, case.mask, beta)[0]
        assert end == getattr(losses, name)(case.x, case.y, case.mask)[0]
        near = losses.generalized_jsd(case.x, case.y, case.mask, abs(beta - 1e-4))[0]
        near = near / (1e-4 * (1 - 1e-4))  # towards its ends it is beta (1 - beta) times those
        assert abs(near - end) < 0.01 * end


def test_every_row_is_read_by_the_right_position():
    case = LogitsCase(4)
    case.mask[:] = True
    for name, parameters in PARAMETERS.items():
        loss = getattr(losses, name)
        expected = loss(case.x, case.y, case.mask, **parameters)[0]
        for side in (0, 1):
            logits = [case.x.detach(), case.y]
            logits[side] = logits[side][:, [1, 0, 2, 3]]
            moved = loss(*logits, case.mask, **parameters)[0]
            assert abs(moved - expected) > 1e-3, name


def test_policy_loss_weighs_positions_by_their_importance():
    case = LogitsCase(6)
    logp = case.x.detach().log_softmax(-1).gather(-1, case.next[..., None]).squeeze(-1)
    generator = torch.Generator().manual_seed(1)
    old_logp = logp - torch.randn(logp.shape, generator=generator).double()
    terms = oracle.positions(
        "reverse_kl", case.x, case.y, case.mask, top_k=3, support="student"
    )
    importance = (logp - old_logp).exp().clamp(max=2.0)
    for old, ratio in ((None, torch.ones_like(logp)), (old_logp, importance)):
        value, count = losses.topk_tail_policy_loss(
            case.x, case.y, case.next, case.mask, 3, old, 2.0
        )
        expected = sum(ratio[b, t] * term for b, t, term in terms)
        assert count == len(terms)
        assert abs(value - expected) < 1e-12 * expected
        d = gradient(value, case.x)
        assert close(d, torch.autograd.grad(expected, case.x, retain_graph=True)[0], 1e-11)


# --- sharded columns ------------------------------------------------------------------------------


def sharded(world):
    """Return the relative errors of all losses, by name and options, on one of `world` ranks."""
    dist.init_process_group("gloo")
    case = LogitsCase(world, V=11)
    sides = (case.x, case.y)
    bounds = [shards(world, 11)[dist.get_rank()]] * 2
    errors = {}
    for name, parameters in PARAMETERS.items():
        for more in (
            {},
            {"top_k": 4},
            {"support": "student", "top_k": 4},
            {"tail": False, "top_k": 4},
            {"temperature": 2.0},
        ):
            def loss(x, y, group, name=name, options=parameters | more):
                return getattr(losses, name)(x, y, case.mask, group=group, **options)[0]

            errors[name, *more] = shard_error(loss, sides, bounds, dist.group.WORLD)
    labels = torch.where(case.mask, case.next, -100)

    def cross_entropy(x, y, group):
        return losses.next_token_cross_entropy(x, labels, group=group)[0]

    errors["ce"] = shard_error(cross_entropy, sides, bounds, dist.group.WORLD)
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_columns_give_the_same_value_and_gradient(world):
    for errors in ranks.run(world, sharded, world):
        assert len(errors) == 36
        assert max(errors.values()) < 1e-10, errors
