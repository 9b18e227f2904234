"""Rows of which a loss reads some tokens, and rows of low precision, on compiled kernels.

The reference is the torch path of losses.py in float64, which other tests compare with definitions.
"""

import pytest
import torch

from cases import close, gradient
from isogloss import cpu_kernels, losses
from test_cpu_kernels import LOSSES, Case, loss_of

F64 = torch.float64
DIVERGENCES = {
    "forward_kl": 0.0, "reverse_kl": 0.0, "generalized_jsd": 0.3, "skew_forward_kl": 0.2,
    "skew_reverse_kl": 0.2, "adaptive_kl": 0.5, "total_variation": 0.0,
}


def logits_pair(seed, V=1200, spread=3.0):
    torch.manual_seed(seed)
    x = spread * torch.randn(1, 5, V)
    y = spread * torch.randn(1, 5, V)
    # tokens that the student, the teacher or both exclude
    x[0, 0, 0] = -torch.inf
    y[0, 1, 1] = -torch.inf
    x[0, 2, 2] = -torch.inf
    y[0, 2, 2] = -torch.inf
    return x, y


def value_and_gradient(name, x, y, options):
    leaf = x.detach().clone().requires_grad_()
    value, _ = losses.position_divergence(
        name, leaf, y, None, coefficient=DIVERGENCES[name], **options)
    return value.detach().to(F64), gradient(value, leaf).to(F64)


def check_divergence(name, x, y, monkeypatch, **options):
    """Compare with float64; errors are at most twice those of the plain path in float32."""
    value, d = value_and_gradient(name, x, y, options)
    exact, exact_d = value_and_gradient(name, x.to(F64), y.to(F64), options)
    with monkeypatch.context() as patch:
        patch.setattr(losses, "HAS_KERNELS", False)
        plain, plain_d = value_and_gradient(name, x, y, options)
    limit = max(2 * abs(plain - exact), 1e-6 * abs(exact))
    assert abs(value - exact) <= limit, (name, value, exact)
    for n in range(5):  # a row may be wrong in the shade of another
        expected = exact_d[0, n]
        # a derivative is a difference of probabilities, which float32 rounds to 1e-7
        limit = max(2 * (plain_d[0, n] - expected).norm(), 4e-6 * expected.norm(), 2e-7)
        assert (d[0, n] - expected).norm() <= limit, (name, n)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("top_k", [1, 7, 1200])
def test_kept_tokens_and_a_tail_equal_float64(name, top_k, monkeypatch):
    for seed, (support, tail, tau) in enumerate((
            ("teacher", True, (1.0, None)), ("student", True, (0.5, 1.5)),
            ("teacher", False, (2.0, None)))):
        if top_k == 1 and not tail:
            continue  # one token renormalized has probability 1: there is nothing to compare
        x, y = logits_pair(seed)
        check_divergence(name, x, y, monkeypatch, temperature=tau[0], teacher_temperature=tau[1],
                         top_k=top_k, support=support, tail=tail)


@pytest.mark.parametrize("above", [20.0, 80.0, 300.0, 3000.0])
def test_a_tail_beside_almost_all_of_the_mass_keeps_its_precision(above, monkeypatch):
    """The kept tokens have all mass but e^-above: both log-probabilities and gradients remain."""
    x, y = logits_pair(7, V=600)
    kept = torch.arange(4).expand(1, 5, 4) + torch.arange(5)[None, :, None]
    for logits in (x, y):
        logits.scatter_add_(2, kept, torch.full((1, 5, 4), above))
        logits[logits == -torch.inf] = -9.0
    for name in ("forward_kl", "reverse_kl"):
        check_divergence(name, x, y, monkeypatch, support=kept)
    weight = torch.rand(1, 5, 5)

    def tail_alone(x):
        return (losses._buckets_of(x[0], kept[0], True, 1.0) * weight[0])[:, -1].sum()

    x64 = x.detach().to(F64).requires_grad_()
    x32 = x.detach().requires_grad_()
    value = tail_alone(x32)
    expected = tail_alone(x64)
    assert abs(value - expected) <= 1e-6 * abs(expected)
    assert close(gradient(value, x32).to(F64), gradient(expected, x64), 3e-4)


def test_what_is_excluded_costs_the_floor_and_has_no_gradient(monkeypatch):
    x, y = logits_pair(8, V=50)
    x[0, 3, 5:] = -torch.inf  # all but five tokens
    support = torch.tensor([5, 6, 7]).expand(1, 5, 3)
    check_divergence("forward_kl", x, y, monkeypatch, support=support)
    support = torch.arange(5).expand(1, 5, 5)
    check_divergence("reverse_kl", x, y, monkeypatch, support=support)


@pytest.mark.parametrize("side", [0, 1])
def test_a_logit_that_is_no_number_is_reported(side):
    logits = logits_pair(9)
    logits[side][0, 3, 900] = torch.nan
    x, y = logits
    x.requires_grad_()
    value_N, _ = losses.forward_kl(x, y, None, top_k=4, reduction="none")
    assert value_N.isnan().tolist() == [False, False, False, True, False]
    d = gradient(value_N.sum(), x)
    assert d[0, 3].isnan().all() and d[0, :3].isfinite().all()


def test_tokens_and_rows_beyond_the_logits_are_refused():
    x = torch.randn(2, 6)
    row = torch.arange(2)
    with pytest.raises(ValueError, match="tokens from 6 to 6, expected 0 to 5"):
        cpu_kernels.kept_logp(x, row, torch.full((2, 1), 6), 1.0, -1e4, True)
    with pytest.raises(ValueError, match="rows from 1 to 2, expected 0 to 1"):
        cpu_kernels.kept_logp(x, row + 1, torch.zeros(2, 1, dtype=torch.long), 1.0, -1e4, True)
    entries = cpu_kernels.ProjectionEntries(row.int(), row.int(), torch.ones(2))
    for field, message in (("token", "tokens"), ("column", "columns")):
        wrong = entries._replace(**{field: torch.tensor([0, 7]).int()})
        with pytest.raises(ValueError, match=f"{message} from 0 to 7"):
            cpu_kernels.projected(x, row, wrong, 4, 1.0)


def test_a_projection_equals_float64_in_large():
    """Rows of several blocks; tokens with no entry, one and several; the derivative as well."""
    torch.manual_seed(0)
    V, W = 3001, 900
    x = 3 * torch.randn(4, V)
    indices = torch.randint(W, (V, 3))
    indices[::2, 1:] = -1
    indices[::5] = -1
    weights = torch.rand(V, 3)
    kept = torch.randperm(W)[:500].sort().values
    entries = losses.projection_entries(indices, weights, W, kept)
    row = torch.tensor([2, 0, 3])
    outer = torch.randn(3, 500)
    x32 = x.clone().requires_grad_()
    out = losses._Projected.apply(x32, row, cpu_kernels, entries, 1.5)
    x64 = x.to(F64).requires_grad_()
    dense = torch.zeros(V, W, dtype=F64)
    for v in range(V):
        for w, weight in zip(indices[v].tolist(), weights[v].tolist()):
            if w >= 0:
                dense[v, w] += weight
    expected = (x64[row] / 1.5).softmax(-1) @ dense[:, kept]
    assert close(out.detach().to(F64), expected.detach(), 1e-6)
    d = gradient((out * outer).sum(), x32)
    assert close(d.to(F64), gradient((expected * outer).sum(), x64), 1e-5)
    assert (d[1] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("low", [(True, True), (False, True)])
def test_bfloat16_takes_the_compiled_rows(name, low, monkeypatch):
    """Bit for bit what the same numbers give in float32; of the teacher alone, or of both sides."""
    case = Case(3, samples=3)
    rows_of = []
    over_rows = cpu_kernels.over_rows
    monkeypatch.setattr(cpu_kernels, "over_rows",
                        lambda kernel, *args: rows_of.append(kernel) or over_rows(kernel, *args))
    sides = [case.x.detach().bfloat16(), case.y.bfloat16()]
    loss = loss_of(name, case, 1.5)
    results = []
    kernels = []
    for dtypes in ([torch.bfloat16 if is_low else torch.float32 for is_low in low],
                   [torch.float32] * 2):
        x, y = [logits.to(dtype) for logits, dtype in zip(sides, dtypes)]
        x.requires_grad_()
        value = loss(x, y)
        d = gradient(value, x)
        assert value.dtype == torch.float32 and d.dtype == x.dtype
        results.append((value, d.bfloat16()))
        kernels.append(len(rows_of))
        rows_of.clear()
    assert kernels[0] == kernels[1] > 0
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "total_variation"])
@pytest.mark.parametrize("top_k", [0, 7])
def test_divergences_of_bfloat16_take_the_compiled_rows(name, top_k):
    x, y = logits_pair(4)
    low_x, low_y = x.bfloat16(), y.bfloat16()
    values = []
    for other_y in (low_y, low_y.float()):
        leaf = low_x.clone().requires_grad_()
        value, _ = getattr(losses, name)(leaf, other_y, None, top_k=top_k)
        values.append((value, gradient(value, leaf)))
    leaf = low_x.float().requires_grad_()
    value, _ = getattr(losses, name)(leaf, low_y, None, top_k=top_k)
    values.append((value, gradient(value, leaf).bfloat16()))
    for other, d in values[1:]:
        assert torch.equal(other, values[0][0]) and torch.equal(d, values[0][1])
