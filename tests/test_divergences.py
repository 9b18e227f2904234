"""losses.py with one vocabulary: against the definitions, at extremes, on sharded columns."""

import math
import random
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

import oracle
import ranks
from cases import close, gradient, shard_error, shards
from isogloss import losses, policy_losses

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


# --- samples of an older student ------------------------------------------------------------------


def test_policy_loss_weighs_positions_by_what_precedes_them():
    case = LogitsCase(6)
    logp = case.x.detach().log_softmax(-1).gather(-1, case.next[..., None]).squeeze(-1)
    generator = torch.Generator().manual_seed(1)
    old_logp = logp - torch.randn(logp.shape, generator=generator).double()
    terms = oracle.positions(
        "reverse_kl", case.x, case.y, case.mask, top_k=3, support="student"
    )
    for old, kind in ((None, "clamp"), (old_logp, "clamp"), (old_logp, "mask")):
        value, count = policy_losses.topk_tail_policy_loss(
            case.x, case.y, case.next, case.mask, 3, old_logp_BS=old, max_ratio=2.0, ratio=kind
        )
        expected = 0.0
        for b, t, term in terms:
            importance = 1.0
            for s in range(t):
                if case.mask[b, s] and old is not None:
                    importance *= math.exp(logp[b, s] - old[b, s])
            if kind == "mask" and not 0.5 <= importance <= 2:
                importance = 0.0
            expected = expected + min(importance, 2.0) * term
        assert count == len(terms)
        assert abs(value - expected) < 1e-12 * expected
        d = gradient(value, case.x)
        assert close(d, torch.autograd.grad(expected, case.x, retain_graph=True)[0], 1e-11)


class StaleToy:
    """All texts of T tokens, which an older student wrote, and what the student now makes of them.

    Attributes:
        table_HV: (H, V) the student's logits after every history, shared by the texts.
        history_BS: (B, S) row of the table at each position of each text.
        next_BS: the texts' tokens.
        y: the teacher's logits.
        now_B, old_B: probability of each text under the student and the older one.
        logp_BS, old_logp_BS: log-probabilities of their tokens.
    """

    def __init__(self, seed=0, V=4, T=3):
        texts = list(product(range(V), repeat=T))
        row_of = {}
        for text in texts:
            for t in range(T):
                row_of.setdefault(text[:t], len(row_of))
        torch.manual_seed(seed)
        self.table_HV, self.old_HV, teacher_HV = torch.randn(3, len(row_of), V, dtype=F64)
        rows = [[row_of[text[:t]] for t in range(T)] for text in texts]
        self.history_BS = torch.tensor(rows)
        self.next_BS = torch.tensor(texts)
        self.mask_BS = torch.ones_like(self.next_BS, dtype=torch.bool)
        self.y = teacher_HV[self.history_BS]
        self.old_x = self.old_HV[self.history_BS]
        self.logp_BS = self.logp_of(self.table_HV)
        self.old_logp_BS = self.logp_of(self.old_HV)
        self.now_B = self.logp_BS.sum(1).exp()
        self.old_B = self.old_logp_BS.sum(1).exp()

    def logp_of(self, table_HV):
        logp = table_HV[self.history_BS].log_softmax(-1)
        return logp.gather(-1, self.next_BS[..., None]).squeeze(-1)

    def expectation(self, loss, weight_B):
        """Return (sum over texts of weight times loss, its gradient with respect to the table)."""
        table = self.table_HV.clone().requires_grad_()
        weight_BS = weight_B[:, None].expand(self.next_BS.shape)
        value, _ = loss(table[self.history_BS], weight_BS)
        return value.detach(), gradient(value, table)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_stale_samples_have_the_expectation_of_fresh_ones(top_k):
    """Exact, by summing over all texts: value and gradient of the divergence at every history."""
    toy = StaleToy()
    assert abs(toy.old_B.sum() - 1) < 1e-12 and abs(toy.now_B.sum() - 1) < 1e-12

    def policy_loss(**options):
        def loss(x, weight_BS):
            return policy_losses.topk_tail_policy_loss(
                x, toy.y, toy.next_BS, toy.mask_BS, top_k, max_ratio=math.inf,
                weight_BS=weight_BS, **options)
        return loss

    def ratio_of_the_token_at_hand(x, weight_BS):
        ratio_BS = (toy.logp_BS - toy.old_logp_BS).exp()
        return losses.reverse_kl(x, toy.y, toy.mask_BS, top_k=top_k, support="student",
                                 weight_BS=weight_BS * ratio_BS)

    fresh, fresh_d = toy.expectation(policy_loss(), toy.now_B)
    corrected = policy_loss(old_logp_BS=toy.old_logp_BS)
    for kind in ("clamp", "mask"):
        value, d = toy.expectation(
            policy_loss(old_logp_BS=toy.old_logp_BS, ratio=kind), toy.old_B)
        assert abs(value - fresh) < 1e-9
        assert (d - fresh_d).abs().max() < 1e-9
    uncorrected, _ = toy.expectation(policy_loss(), toy.old_B)
    at_hand, _ = toy.expectation(ratio_of_the_token_at_hand, toy.old_B)
    assert abs(at_hand - uncorrected) < 1e-9  # its expectation is 1: it corrects nothing
    assert abs(uncorrected - fresh) > 0.01
    # fresh samples need no correction, and get none
    toy.old_logp_BS.copy_(toy.logp_BS)
    assert toy.expectation(corrected, toy.now_B)[0] == fresh


@pytest.mark.parametrize("name", ["forward_kl", "generalized_jsd", "total_variation"])
def test_the_prefix_ratio_corrects_any_divergence(name):
    toy = StaleToy(1)
    ratio_BS = policy_losses.prefix_ratio(toy.logp_BS, toy.old_logp_BS, toy.mask_BS, math.inf)

    def loss(x, weight_BS):
        return getattr(losses, name)(x, toy.y, toy.mask_BS, weight_BS=weight_BS)

    def corrected(x, weight_BS):
        return loss(x, weight_BS * ratio_BS)

    fresh, fresh_d = toy.expectation(loss, toy.now_B)
    value, d = toy.expectation(corrected, toy.old_B)
    assert abs(value - fresh) < 1e-9
    assert (d - fresh_d).abs().max() < 1e-9
    assert abs(toy.expectation(loss, toy.old_B)[0] - fresh) > 1e-3


def test_the_prefix_ratio_leaves_out_prompt_padding_and_other_samples():
    torch.manual_seed(2)
    logp = -3 * torch.rand(2, 5)
    old_logp = -3 * torch.rand(2, 5)
    prompts = 2, 1
    alone = []
    for b, prompt in enumerate(prompts):  # a sample by itself, without prompt
        of_sample = logp[b : b + 1, prompt:], old_logp[b : b + 1, prompt:]
        ones = torch.ones_like(of_sample[0], dtype=torch.bool)
        alone.append(policy_losses.prefix_ratio(*of_sample, ones, 3.0)[0])
        expected = (of_sample[0] - of_sample[1]).double()[0].cumsum(0)[:-1].exp().clamp(max=3)
        assert torch.allclose(alone[b], torch.cat([torch.ones(1), expected.float()]))

    def with_nan(x, b):  # prompt, sample, two positions of padding
        return torch.cat([torch.full((prompts[b],), torch.nan), x[b, prompts[b] :],
                          torch.full((2,), torch.nan)])

    packed = [torch.cat([with_nan(x, 0), with_nan(x, 1)])[None] for x in (logp, old_logp)]
    mask = ~packed[0].isnan()
    sample = torch.tensor([[0] * 7 + [1] * 7])
    ratio = policy_losses.prefix_ratio(*packed, mask, 3.0, sample_BS=sample)
    assert ratio.dtype == torch.float32 and ratio.isfinite().all()
    assert torch.equal(ratio[mask], torch.cat(alone))
    assert (ratio[0, :3] == 1).all() and (ratio[0, 7:9] == 1).all()
    # another sample's tokens, excluded by a model altogether, change nothing either
    for x, excluded in ((packed[0], -torch.inf), (packed[1], -50.0)):
        x[0, 3] = excluded
    again = policy_losses.prefix_ratio(*packed, mask, 3.0, sample_BS=sample)
    assert torch.equal(again[0, 7:], ratio[0, 7:]) and again[0, 4] == 0


def test_the_prefix_ratio_is_limited_and_has_no_gradient():
    step = math.log(1.5)
    logp = torch.tensor([[step] * 4, [-step] * 4], dtype=F64, requires_grad=True)
    old_logp = torch.zeros(2, 4, dtype=F64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    clamped = policy_losses.prefix_ratio(logp, old_logp, mask, 2.0)
    up = [1, 1.5, 2, 2]
    down = [1, 1 / 1.5, 1 / 1.5**2, 1 / 1.5**3]
    assert not clamped.requires_grad
    assert torch.allclose(clamped, torch.tensor([up, down], dtype=F64))
    masked = policy_losses.prefix_ratio(logp, old_logp, mask, 2.0, "mask")
    assert torch.allclose(masked, torch.tensor([[1, 1.5, 0, 0], [1, 1 / 1.5, 0, 0]], dtype=F64))
    # a product of e^5000 is clamped, not inf; NaN stays to be seen
    assert policy_losses.prefix_ratio(logp + 5000, old_logp, mask, 2.0).max() == 2
    logp = logp.detach().clone()
    logp[0, 1] = torch.nan
    for kind in ("clamp", "mask"):
        assert policy_losses.prefix_ratio(logp, old_logp, mask, 2.0, kind)[0, 2:].isnan().all()
    for options, message in (({"kind": "bucket"}, "'bucket': expected one of clamp, mask"),
                             ({"max_ratio": 0.5}, "max_ratio=0.5: expected 1 or more"),
                             ({"max_ratio": math.nan}, "max_ratio=nan: expected 1 or more")):
        with pytest.raises(ValueError, match=message):
            policy_losses.prefix_ratio(logp, old_logp, mask, **options)


def test_an_unknown_ratio_is_refused():
    case = LogitsCase(7)
    with pytest.raises(ValueError, match="'token': expected one of clamp, mask"):
        policy_losses.topk_tail_policy_loss(
            case.x, case.y, case.next, case.mask, ratio="token")


# --- the student's most likely tokens -------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("top_k", [1, 2, 5, 9])
def test_the_students_top_k_and_one_bucket(name, top_k):
    """Equal models have nothing to learn; others have, also with one token beside the rest."""
    loss = partial(getattr(losses, name), support="student", top_k=top_k, **PARAMETERS[name])
    case = LogitsCase(11, V=9)
    x = case.y.clone().requires_grad_()
    value, _ = loss(x, case.y, case.mask)
    assert abs(value) < 1e-12
    if name != "total_variation":  # whose gradient jumps there
        assert gradient(value, x).abs().max() < 1e-12
    value, _ = loss(case.x, case.y, case.mask)
    d = gradient(value, case.x)
    assert value > 0
    assert (d[case.mask].abs().amax(-1) > 1e-6).all()
    # the teacher's mass outside is not lost: a teacher that moves all of it there costs more
    far = case.y.clone()
    far.scatter_add_(-1, case.x.detach().topk(top_k, -1).indices,
                     torch.full_like(far, -8.0)[..., :top_k])
    if top_k < 9:
        assert loss(case.x, far, case.mask)[0] > value


@pytest.mark.parametrize("top_k", [1, 4, 20])
def test_the_buckets_hold_all_mass_of_both_models(top_k):
    case = LogitsCase(12, V=40)
    sides = [x.detach()[case.mask].log_softmax(-1) for x in (case.x, case.y)]
    ids_NK = sides[0].topk(top_k, -1).indices
    for logp_NV in sides:
        buckets = losses.top_k_buckets(logp_NV, ids_NK, tail=True)
        assert buckets.shape == (len(logp_NV), top_k + 1)
        assert (buckets.exp().sum(-1) - 1).abs().max() < 1e-12


# --- sharded columns ------------------------------------------------------------------------------


def sharded(world):
    """Return the relative errors of some losses, by name, on one of `world` ranks."""
    dist.init_process_group("gloo")
    case = LogitsCase(world, V=11)
    bounds = [shards(world, 11)[dist.get_rank()]] * 2
    errors = {}
    for name, options in (("forward_kl", {}), ("adaptive_kl", {}), ("reverse_kl", {"top_k": 4})):
        def loss(x, y, samples, name=name, options=PARAMETERS[name] | options):
            return getattr(losses, name)(x, y, case.mask[samples], **options)

        errors[name] = shard_error(loss, (case.x, case.y), bounds, dist.group.WORLD)
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
def test_sharded_columns_give_the_same_value_and_gradient():
    for errors in ranks.run(3, sharded, 3):
        assert len(errors) == 3
        assert max(errors.values()) < 1e-10, errors
