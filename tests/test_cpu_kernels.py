"""cpu_kernels.py against the plain path of losses.py, which the other tests hold to the definitions."""

import multiprocessing
import os

import numpy as np
import pytest
import torch
from cases import Case, close, common_of, gradient

import cpu_kernels
import losses

LOSSES = "piece_kl", "gold", "gold_reverse", "uld"


def loss_of(name, case, tau):
    """(x, y) -> sum, weighted by position."""
    ids, common = (*case.next, *case.chunk), common_of(case)
    weight = torch.rand(case.next[0].shape, generator=torch.Generator().manual_seed(0))
    if name == "piece_kl":
        terms = losses.piece_terms(*ids, case.spelling)
        return lambda x, y: losses.piece_kl(x, y, *ids[:2], terms, case.spelling, tau, weight)[0]
    if name == "uld":
        return lambda x, y: losses.uld(x, y, *ids, tau, weight_BS=weight)[0]
    how = dict(uncommon_topk=3, reverse=name == "gold_reverse", weight_BS=weight)
    return lambda x, y: losses.gold(x, y, *case.chunk, *common, tau, **how)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_compiled_rows_equal_the_plain_path(name, monkeypatch):
    """Values and gradients, for chunks of any shape; rows without a chunk may hold NaN.

    Against float64 where float32 can tell all probabilities from 0, else against float32.
    """
    for seed in range(24):
        case = Case(seed, samples=3, sizes=[(9, 12), (12, 7), (5, 14)][seed % 3])
        spread = (1, 4, 30, 200)[seed % 4]
        x, y = [(spread * side.detach()).float() for side in (case.x, case.y)]
        x[case.chunk[0] < 0], y[case.chunk[1] < 0] = torch.nan, torch.nan
        loss, found = loss_of(name, case, (0.5, 1.0, 3.0)[seed % 3]), []
        reference = torch.float64 if spread < 30 else torch.float32
        for compiled, dtype in ((True, torch.float32), (False, reference)):
            monkeypatch.setattr(losses, "HAS_KERNELS", compiled)
            leaf = x.to(dtype).requires_grad_()
            value = loss(leaf, y.to(dtype))
            found.append((value.detach().double(), gradient(value, leaf).double()))
        (value, d), (expected, wanted) = found
        # beyond: what is just above the smallest float32 on one path and below it on the other
        precision = 5e-6 if spread < 30 else 5e-4
        assert abs(value - expected) <= 2e-6 * abs(expected).clamp(min=1), (seed, value, expected)
        assert (d - wanted).norm() <= precision * (1 + wanted.norm()), seed
        assert torch.equal(d[case.chunk[0] < 0], wanted[case.chunk[0] < 0]), seed


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_chunk_there_is_nothing(name):
    """Rows without a chunk, and a teacher without rows."""
    for rows in (None, 0):
        case = Case(0)
        case.chunk = [torch.full_like(side, -1) for side in case.chunk]
        case.chunk[1], case.next[1], case.y = [x[:, :rows] for x in (case.chunk[1], case.next[1], case.y)]
        x, y = case.x.detach().float().requires_grad_(), case.y.float()
        value = loss_of(name, case, 1.0)(x, y)
        assert value == 0 and (gradient(value, x) == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_one_logit_that_is_no_number_is_reported(name, side, wrong):
    case = Case(3, samples=3, sizes=(9, 12))
    logits = [case.x.detach().float(), case.y.float()]
    sample, position = (case.chunk[side] >= 0).nonzero()[0]  # where a chunk begins
    logits[side][sample, position, 3] = wrong
    x = logits[0].requires_grad_()
    value = loss_of(name, case, 1.0)(x, logits[1])
    assert value.isnan() and gradient(value, x).isnan().any()


DIVERGENCES = [(name, c) for name in ("generalized_jsd", "skew_forward_kl", "skew_reverse_kl")
               for c in (0.0, 0.3, 1.0)]
DIVERGENCES += [(name, 0.0) for name in ("forward_kl", "reverse_kl", "total_variation")]


@pytest.mark.parametrize("name,coefficient", DIVERGENCES)
def test_divergences_equal_the_plain_path(name, coefficient, monkeypatch):
    """Against float64 where float32 can tell all probabilities from 0, else against float32."""
    for seed in range(12):
        torch.manual_seed(seed)
        spread, taus = (1, 4, 30, 500)[seed % 4], [(0.5, None), (1.0, 1.5), (3.0, None)][seed % 3]
        V, weight = (9, 1000, 1536)[seed % 3], torch.rand(2, 5)
        x, y = [spread * torch.randn(2, 5, V) for _ in range(2)]
        x[0, 0, 0] = y[0, 1, 1] = x[0, 2, 2] = y[0, 2, 2] = -torch.inf
        mask, found = torch.rand(2, 5) < 0.7, []
        mask[0] = True
        x[~mask], y[~mask] = torch.nan, torch.nan
        reference = torch.float64 if spread < 30 else torch.float32
        for compiled, dtype in ((True, torch.float32), (False, reference)):
            monkeypatch.setattr(losses, "HAS_KERNELS", compiled)
            leaf = x.to(dtype).requires_grad_()
            value = losses.position_divergence(name, leaf, y.to(dtype), mask, *taus, weight_BS=weight,
                                               coefficient=coefficient)[0]
            found.append((value.detach().double(), gradient(value, leaf).double()))
        (value, d), (expected, wanted) = found
        assert abs(value - expected) <= 2e-6 * abs(expected).clamp(min=1), (seed, value, expected)
        assert (d - wanted).norm() <= 1e-5 * (1 + wanted.norm()), (seed, (d - wanted).norm(), wanted.norm())
        assert (d[~mask] == 0).all()
    monkeypatch.undo()
    for side in range(2):
        logits = [torch.randn(1, 3, 700) for _ in range(2)]
        logits[side][0, 1, 600] = torch.nan
        x = logits[0].requires_grad_()
        value = losses.position_divergence(name, x, logits[1], None, coefficient=coefficient)[0]
        assert value.isnan() or (name, coefficient) in (("skew_forward_kl", 1), ("skew_reverse_kl", 1))
    with pytest.raises(ValueError, match="logits .* of the student"):
        losses.position_divergence(name, x, logits[1][..., :-1], None, coefficient=coefficient)


def test_large_vocabularies_equal_the_plain_path(monkeypatch):
    """Blocks that do and do not end with the row; against float64."""
    torch.manual_seed(0)
    V, W, N, E = 20_011, 30_208, 5, 15_000
    x, y = torch.randn(1, N, V) * 2, torch.randn(1, N, W) * 2
    chunk = torch.tensor([[0, 0, 1, 2, -1]]), torch.tensor([[0, 1, 1, 2, 3]])
    next_ = torch.randint(V, (1, N)), torch.randint(W, (1, N))
    event_V, event_W = [torch.cat([torch.randperm(E), torch.randint(-1, E, (n - E,))]) for n in (V, W)]
    common = torch.randperm(V)[:15_000], torch.randperm(W)[:15_000]

    def events(x, y):
        rows = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3])
        spelling = losses.Spelling(event_V, event_W, E, *[None] * 8)
        how = rows[0], y[0], rows[1], spelling, 1.5
        return losses._WithDerivative.apply(x[0], rows[0], losses._event_kl, *how).sum()

    none = torch.zeros(2, 0, dtype=torch.long)

    for loss in (events, lambda x, y: losses.gold(x, y, *chunk, *none)[0],
                 lambda x, y: losses.gold(x, y, *chunk, *common, 1.5, 1000)[0],
                 lambda x, y: losses.gold(x, y, *chunk, *common, uncommon_topk=10**6, reverse=True)[0],
                 lambda x, y: losses.uld(x, y, *next_, *chunk)[0]):
        found = []
        for dtype in (torch.float32, torch.float64):  # float64 is not compiled
            leaf = x.to(dtype).requires_grad_()
            value = loss(leaf, y.to(dtype))
            found.append((value.detach().double(), gradient(value, leaf).double()))
        (value, d), (expected, wanted) = found
        assert abs(value - expected) <= 1e-6 * abs(expected)
        assert close(d, wanted, 1e-5)


def awkward_rows():
    """Probabilities of every kind: ties, zeros, subnormal, equal on both sides, all in one bin."""
    torch.manual_seed(1)
    p, q = torch.rand(12, 500) ** 20, torch.rand(12, 700) ** 20
    p[0], q[0, :500] = 1 / 500, 1 / 500
    p[1, ::2], q[1, :600] = 0, 0
    q[2, 200:] = q[2, :500] = p[2][torch.randperm(500)]
    p[3], q[3] = 1e-42, 2e-42
    p[4] = (p[4] * 50).round() / 50
    q[4] = (q[4] * 50).round() / 50
    p[5], q[5] = 0.25 + p[5] * 1e-7, 0.25 + q[5] * 1e-7
    p[6] = 0
    return p, q


@pytest.mark.parametrize("k", [1, 7, 499, 500, 600, 700])
def test_sorted_distance_needs_no_sort(k, monkeypatch):
    for a, b in (awkward_rows(), awkward_rows()[::-1]):
        value, d = cpu_kernels.sorted_distance(a, b, k)
        monkeypatch.setattr(losses, "HAS_KERNELS", False)
        expected, wanted = losses._sorted_distance(a.double(), b.double(), k)
        monkeypatch.undo()
        assert torch.allclose(value.double(), expected, rtol=1e-6, atol=1e-37)
        # which of equal entries has which sign is open
        assert torch.allclose((d.double() * a).sum(1), (wanted * a).sum(1), rtol=1e-6, atol=1e-37)
        clear = a[7:] > 1e-37  # rows without ties
        assert torch.equal(d[7:].double()[clear], wanted[7:][clear])


def test_what_is_no_number_is_reported_and_stays_in_its_row():
    p, q = torch.rand(3, 50), torch.rand(3, 60)
    expected = cpu_kernels.sorted_distance(p, q, 60)[0]
    p[1, 3] = -torch.nan
    value, d = cpu_kernels.sorted_distance(p, q, 60)
    assert value.isnan().tolist() == [False, True, False] and d[1].isnan().all()
    assert torch.equal(value[[0, 2]], expected[[0, 2]])


def test_the_number_of_threads_does_not_change_a_bit():
    p, q = awkward_rows()
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 40):
            torch.set_num_threads(count)
            found.append(cpu_kernels.sorted_distance(p, q, 600))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def in_a_child(queue):
    p, q = awkward_rows()
    torch.set_num_threads(3)
    queue.put(cpu_kernels.sorted_distance(p, q, 600)[0].tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    """As the workers of a data loader are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = cpu_kernels.sorted_distance(*awkward_rows(), 600)[0].tolist()
    finally:
        torch.set_num_threads(threads)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    assert queue.get(timeout=120) == expected
    child.join()


def test_exp_and_log():
    x = torch.linspace(-100, 87, 100_001)
    found = torch.tensor([cpu_kernels.exp.py_func(v) for v in x[::1000].numpy()])
    assert torch.allclose(found, x[::1000].exp() * (x[::1000] > -87.3), rtol=3e-7, atol=1e-37)
    x = torch.cat([torch.rand(100) * 3, torch.logspace(-37, 38, 100)])
    found = torch.tensor([cpu_kernels.log.py_func(v, np.float32(0)) for v in x.numpy()])
    assert torch.allclose(found, x.log(), rtol=3e-7, atol=1e-7)


def test_what_would_read_beyond_memory_is_refused():
    x, rows, event = torch.randn(2, 6), torch.tensor([0, 1]), torch.tensor([0, 1, 2, -1, 0, 1])
    side = x, torch.ones(2), rows, rows
    cpu_kernels.event_kl(x, rows, x, rows, event, event, 3, 1.0, 0.0)
    for bad in ((x, rows + 1, x, rows, event, event, 3), (x, rows, x, rows, event[:5], event, 3),
                (x, rows, x, rows, event, event, 2)):
        with pytest.raises(ValueError, match="expected|tokens, logits"):
            cpu_kernels.event_kl(*bad, 1.0, 0.0)
    for common in (torch.tensor([6]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="tokens from .* expected 0 to 5"):
            cpu_kernels.mixture_distance(side, side, (common, rows), (rows, rows), 3, 1.0)
