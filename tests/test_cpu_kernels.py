"""Compare cpu_kernels.py with the torch path of losses.py.

The other tests compare that path with the definitions.
"""

import multiprocessing
import os

import numpy as np
import pytest
import torch

from cases import Case, close, common_of, gradient
from isogloss import cpu_kernels, losses

LOSSES = "event_kl", "gold", "gold_reverse", "uld", "projection_kl", "projection_reverse", "alm"
# Largest logits by seed: from nearly uniform to probabilities that float32 cannot tell from 0.
SPREADS = (1, 4, 30, 200)
# From here on float64 sees probabilities that are 0 in float32, so the reference is float32 too.
WIDE_SPREAD = 30
# Of student and teacher: either side has the larger one.
VOCAB_SIZES = [(9, 12), (12, 7), (5, 14)]
# Of student and teacher; None: the same.
TEMPERATURES = [(0.5, None), (1.0, 1.5), (3.0, None)]


def loss_of(name, case, tau):
    """Return (x, y) -> sum of a loss, weighted by position."""
    student_chunk, teacher_chunk = case.chunk
    ids = (*case.next, *case.chunk)
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(case.next[0].shape, generator=generator)

    def event_kl(x, y):
        terms = losses.event_terms(*ids, case.spelling)
        value, _ = losses.event_kl(x, y, *case.next, terms, case.spelling, tau, weight)
        return value

    def uld(x, y):
        value, _ = losses.uld(x, y, *ids, tau, weight_BS=weight)
        return value

    def gold(x, y):
        common_V, common_W = common_of(case)
        value, _ = losses.gold(
            x, y,
            student_chunk, teacher_chunk,
            common_V, common_W,
            tau,
            uncommon_topk=3,  # not all that are left
            reverse=name == "gold_reverse",
            weight_BS=weight,
        )
        return value

    def alm(x, y):
        value, _ = losses.alm(x, y, *ids, tau, "squared", weight_BS=weight)
        return value

    def projection_kl(x, y):
        kept = torch.arange(1, y.shape[-1])  # not all columns
        weights = case.likelihoods.to(torch.promote_types(x.dtype, torch.float32))
        value, _ = losses.projection_kl(
            x, y, *case.chunk, case.indices, weights, kept, tau,
            reverse=name == "projection_reverse", weight_BS=weight,
        )
        return value

    return {
        "event_kl": event_kl, "uld": uld, "gold": gold, "gold_reverse": gold, "alm": alm,
        "projection_kl": projection_kl, "projection_reverse": projection_kl,
    }[name]


def value_and_gradient(loss, x, y):
    """Return the loss of leaf x and its gradient, both float64."""
    leaf = x.detach().requires_grad_()
    value = loss(leaf, y)
    d = gradient(value, leaf)
    return value.detach().double(), d.double()


def compiled(loss, x, y, monkeypatch):
    monkeypatch.setattr(losses, "HAS_KERNELS", True)
    return value_and_gradient(loss, x, y)


def plain(loss, x, y, monkeypatch):
    monkeypatch.setattr(losses, "HAS_KERNELS", False)
    return value_and_gradient(loss, x, y)


@pytest.mark.parametrize("name", LOSSES)
def test_compiled_rows_equal_the_plain_path(name, monkeypatch):
    """Values and gradients are equal for chunks of any shape; rows without a chunk may hold NaN.

    The reference is float64 where float32 can tell all probabilities from 0, else float32.
    """
    for seed in range(24):
        sizes = VOCAB_SIZES[seed % 3]
        spread = SPREADS[seed % 4]
        tau = (0.5, 1.0, 3.0)[seed % 3]
        case = Case(seed, samples=3, sizes=sizes)
        x = (spread * case.x.detach()).float()
        y = (spread * case.y.detach()).float()
        no_chunk = case.chunk[0] < 0
        x[no_chunk] = torch.nan
        y[case.chunk[1] < 0] = torch.nan
        loss = loss_of(name, case, tau)
        reference = torch.float64 if spread < WIDE_SPREAD else torch.float32
        value, d = compiled(loss, x, y, monkeypatch)
        expected, expected_d = plain(loss, x.to(reference), y.to(reference), monkeypatch)

        # where it is wide, a probability may be above the smallest float32 on one path alone
        precision = 5e-6 if spread < WIDE_SPREAD else 5e-4
        limit = 2e-6 * abs(expected).clamp(min=1)
        assert abs(value - expected) <= limit, (seed, value, expected)
        error = (d - expected_d).norm()
        d_norm = expected_d.norm()
        assert error <= precision * (1 + d_norm), (seed, error, d_norm)
        assert torch.equal(d[no_chunk], expected_d[no_chunk]), seed


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_chunk_there_is_nothing(name):
    """The loss is 0 for rows without a chunk, and for a teacher without rows."""
    for num_teacher_rows in (None, 0):
        case = Case(0)
        student_chunk, teacher_chunk = case.chunk
        no_chunk = torch.full_like(teacher_chunk, -1)
        kept = slice(num_teacher_rows)
        case.chunk[0] = torch.full_like(student_chunk, -1)
        case.chunk[1] = no_chunk[:, kept]
        case.next[1] = case.next[1][:, kept]
        x = case.x.detach().float().requires_grad_()
        y = case.y[:, kept].float()
        value = loss_of(name, case, 1.0)(x, y)
        assert value == 0
        assert (gradient(value, x) == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_one_logit_that_is_no_number_is_reported(name, side, wrong):
    case = Case(3, samples=3, sizes=(9, 12))
    x = case.x.detach().float()
    y = case.y.float()
    logits = [x, y]
    in_chunk = case.chunk[side] >= 0
    sample, position = in_chunk.nonzero()[0]  # where a chunk begins
    logits[side][sample, position, 3] = wrong
    x.requires_grad_()
    value = loss_of(name, case, 1.0)(x, y)
    assert value.isnan()
    assert gradient(value, x).isnan().any()


DIVERGENCES = [
    ("forward_kl", 0.0),
    ("reverse_kl", 0.0),
    ("total_variation", 0.0),
]
# the ends 0 and 1 of the coefficient are kernels of their own, without a mixture
for mixture_name in ("generalized_jsd", "skew_forward_kl", "skew_reverse_kl"):
    for mixture_coefficient in (0.0, 0.3, 1.0):
        DIVERGENCES.append((mixture_name, mixture_coefficient))


@pytest.mark.parametrize("name,coefficient", DIVERGENCES)
def test_divergences_equal_the_plain_path(name, coefficient, monkeypatch):
    """The reference is float64 where float32 can tell all probabilities from 0, else float32."""
    for seed in range(12):
        torch.manual_seed(seed)
        spread = (1, 4, 30, 500)[seed % 4]
        taus = TEMPERATURES[seed % 3]
        # less than a block, a block and a remainder, whole blocks
        V = (9, 1000, 1536)[seed % 3]
        shape = (2, 5, V)
        weight = torch.rand(2, 5)
        x = spread * torch.randn(shape)
        y = spread * torch.randn(shape)
        # tokens that the student, the teacher or both exclude
        x[0, 0, 0] = -torch.inf
        y[0, 1, 1] = -torch.inf
        x[0, 2, 2] = -torch.inf
        y[0, 2, 2] = -torch.inf
        mask = torch.rand(2, 5) < 0.7
        mask[0] = True
        x[~mask] = torch.nan
        y[~mask] = torch.nan

        def loss(x, y, mask=mask, taus=taus, weight=weight):
            value, _ = losses.position_divergence(
                name, x, y, mask, *taus, weight_BS=weight, coefficient=coefficient
            )
            return value

        reference = torch.float64 if spread < WIDE_SPREAD else torch.float32
        value, d = compiled(loss, x, y, monkeypatch)
        expected, expected_d = plain(loss, x.to(reference), y.to(reference), monkeypatch)
        limit = 2e-6 * abs(expected).clamp(min=1)
        assert abs(value - expected) <= limit, (seed, value, expected)
        error = (d - expected_d).norm()
        d_norm = expected_d.norm()
        assert error <= 1e-5 * (1 + d_norm), (seed, error, d_norm)
        assert (d[~mask] == 0).all()


@pytest.mark.parametrize("name,coefficient", DIVERGENCES)
def test_divergences_report_nan_and_unequal_vocabularies(name, coefficient):
    # these two compare a model with itself, whatever the other one's logits are
    compares_nothing = (name, coefficient) in (("skew_forward_kl", 1), ("skew_reverse_kl", 1))
    torch.manual_seed(0)
    for side in range(2):
        x = torch.randn(1, 3, 700)
        y = torch.randn(1, 3, 700)
        logits = (x, y)[side]
        logits[0, 1, 600] = torch.nan  # behind the first block
        x.requires_grad_()
        value, _ = losses.position_divergence(name, x, y, None, coefficient=coefficient)
        assert value.isnan() or compares_nothing
    shorter = y[..., :-1]
    with pytest.raises(ValueError, match="expected the same positions and the same vocabulary"):
        losses.position_divergence(name, x, shorter, None, coefficient=coefficient)


def random_events(num_events, vocab_size):
    """Return the event of each token: every event once, then any event or none (-1)."""
    others = torch.randint(-1, num_events, (vocab_size - num_events,))
    return torch.cat([torch.randperm(num_events), others])


def test_large_vocabularies_equal_the_plain_path():
    """Blocks end with the row on one side and not on the other; the reference is float64."""
    torch.manual_seed(0)
    V = 20_011
    W = 30_208  # 59 blocks of 512
    N = 5
    num_events = 15_000
    x = torch.randn(1, N, V) * 2
    y = torch.randn(1, N, W) * 2
    # chunk 0 has two student rows, chunk 1 two teacher rows; chunk 3 has no student row
    student_chunk = torch.tensor([[0, 0, 1, 2, -1]])
    teacher_chunk = torch.tensor([[0, 1, 1, 2, 3]])
    chunk = (student_chunk, teacher_chunk)
    next_V = torch.randint(V, (1, N))
    next_W = torch.randint(W, (1, N))
    next_ids = (next_V, next_W)
    event_V = random_events(num_events, V)
    event_W = random_events(num_events, W)
    num_common = 15_000
    common_V = torch.randperm(V)[:num_common]
    common_W = torch.randperm(W)[:num_common]
    common = (common_V, common_W)
    # gold without common tokens compares the sorted rest alone
    no_common = torch.zeros(2, 0, dtype=torch.long)

    def events(x, y):
        row_C = torch.tensor([0, 2, 3])
        teacher_row_C = torch.tensor([0, 1, 3])
        unused = [None] * 8
        spelling = losses.Spelling(event_V, event_W, num_events, *unused)
        value_C = losses._WithDerivative.apply(
            x[0], row_C, losses._kl_over_events, row_C, y[0], teacher_row_C, spelling, 1.5
        )
        return value_C.sum()

    def gold_without_common(x, y):
        value, _ = losses.gold(x, y, *chunk, *no_common)
        return value

    def gold(x, y):
        value, _ = losses.gold(x, y, *chunk, *common, 1.5, 1000)
        return value

    def gold_reverse(x, y):
        value, _ = losses.gold(x, y, *chunk, *common, uncommon_topk=10**6, reverse=True)
        return value

    def uld(x, y):
        value, _ = losses.uld(x, y, *next_ids, *chunk)
        return value

    for loss in (events, gold_without_common, gold, gold_reverse, uld):
        value, d = value_and_gradient(loss, x, y)
        # float64 is not compiled
        expected, expected_d = value_and_gradient(loss, x.double(), y.double())
        limit = 1e-6 * abs(expected)
        assert abs(value - expected) <= limit, loss
        assert close(d, expected_d, 1e-5), loss


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("unlinked", [(0, 0), (8, 0), (20, 0), (30, 0), (0, 8), (30, 30), (60, 5)])
def test_events_beside_almost_all_of_the_mass(compiled, unlinked, monkeypatch):
    """Events' masses keep their precision where tokens without an event hold 1 - 10^-k of a row.

    The oracle is KL(q || p) of the events' masses, each divided by their sum, in float64.
    """
    if not compiled:
        monkeypatch.setattr(losses, "HAS_KERNELS", False)
    torch.manual_seed(3)
    x = 3 * torch.randn(5, 1000)
    y = 3 * torch.randn(5, 800)
    event_V = torch.arange(1000) % 301 - 1  # -1: 4 tokens without an event
    event_W = torch.arange(800) % 301 - 1
    for logits, event, nines in ((x, event_V, unlinked[0]), (y, event_W, unlinked[1])):
        logits[:, event < 0] += 2.302585 * nines + (12 if nines else 0)
    spelling = losses.Spelling(event_V.int(), event_W.int(), 300, *[None] * 8)
    rows = torch.arange(5)
    x32 = x.clone().requires_grad_()
    value_C = losses._WithDerivative.apply(
        x32, rows, losses._kl_over_events, rows, y, rows, spelling, 1.0)
    x64 = x.double().requires_grad_()
    log_event = []
    for logits, event in ((x64, event_V), (y.double(), event_W)):
        linked = logits[:, event >= 0].log_softmax(-1)
        mass = torch.zeros(5, 300).double().index_add(1, event[event >= 0], linked.exp())
        log_event.append(mass.log())
    logp, logq = log_event
    expected_C = (logq.exp() * (logq - logp)).sum(-1)
    assert torch.allclose(value_C.double(), expected_C, rtol=1e-5)
    d = gradient(value_C.sum(), x32)
    expected_d = gradient(expected_C.sum(), x64)
    for row in range(5):  # one row may be wrong in the shade of another
        assert close(d[row], expected_d[row], 1e-5)


NO_TIES = 7  # from here on, rows of `awkward_rows` are random


def awkward_rows():
    """Return probabilities of every kind: ties, zeros, subnormal, equal sides, all in one bin."""
    torch.manual_seed(1)
    # the power spreads them over many bins
    p = torch.rand(12, 500) ** 20
    q = torch.rand(12, 700) ** 20
    # one value
    p[0] = 1 / 500
    q[0, :500] = 1 / 500
    # many zeros
    p[1, ::2] = 0
    q[1, :600] = 0
    # the same numbers on both sides
    permuted = p[2][torch.randperm(500)]
    q[2, 200:] = permuted
    q[2, :500] = permuted
    # subnormal
    p[3] = 1e-42
    q[3] = 2e-42
    # ties
    p[4] = (p[4] * 50).round() / 50
    q[4] = (q[4] * 50).round() / 50
    # all in one bin
    p[5] = 0.25 + p[5] * 1e-7
    q[5] = 0.25 + q[5] * 1e-7
    p[6] = 0
    return p, q


@pytest.mark.parametrize("k", [1, 7, 499, 500, 600, 700])
def test_sorted_distance_needs_no_sort(k, monkeypatch):
    p, q = awkward_rows()
    for a, b in ((p, q), (q, p)):
        value, d = cpu_kernels.sorted_distance(a, b, k)
        monkeypatch.setattr(losses, "HAS_KERNELS", False)
        a = a.double()
        b = b.double()
        expected, expected_d = losses._sorted_distance(a, b, k)
        monkeypatch.undo()
        assert torch.allclose(value.double(), expected, rtol=1e-6, atol=1e-37)
        # which of equal entries has which sign is open
        d = d.double()
        derivative_sum = (d * a).sum(1)
        expected_sum = (expected_d * a).sum(1)
        assert torch.allclose(derivative_sum, expected_sum, rtol=1e-6, atol=1e-37)
        # subnormal entries may count as 0
        normal = a > 1e-37
        normal[:NO_TIES] = False
        assert torch.equal(d[normal], expected_d[normal])


def test_the_worked_example():
    """The example of the section "sorted distance" has the result and the signs that it states."""
    p = torch.tensor([[0.6, 0.3, 0.1]])
    q = torch.tensor([[0.45, 0.40, 0.15]])
    value, d = cpu_kernels.sorted_distance(p, q, 3)
    assert abs(value.item() - 0.30) < 1e-6
    assert d.tolist() == [[1, -1, -1]]


def test_what_is_no_number_is_reported_and_stays_in_its_row():
    p = torch.rand(3, 50)
    q = torch.rand(3, 60)
    expected, _ = cpu_kernels.sorted_distance(p, q, 60)
    p[1, 3] = -torch.nan
    value, d = cpu_kernels.sorted_distance(p, q, 60)
    assert value.isnan().tolist() == [False, True, False]
    assert d[1].isnan().all()
    other_rows = [0, 2]
    assert torch.equal(value[other_rows], expected[other_rows])


def test_the_number_of_threads_does_not_change_a_bit():
    p, q = awkward_rows()
    threads = torch.get_num_threads()
    results = []
    try:
        # 40 are more threads than there are rows
        for count in (1, 2, 3, 40):
            torch.set_num_threads(count)
            results.append(cpu_kernels.sorted_distance(p, q, 600))
    finally:
        torch.set_num_threads(threads)
    value, d = results[0]
    for other_value, other_d in results[1:]:
        assert torch.equal(value, other_value)
        assert torch.equal(d, other_d)


def distances():
    p, q = awkward_rows()
    value, _ = cpu_kernels.sorted_distance(p, q, 600)
    return value.tolist()


def in_a_child(queue):
    torch.set_num_threads(3)
    queue.put(distances())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    """The workers of a data loader are forked processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # start the pool here, so that the child inherits it without threads
    try:
        expected = distances()
    finally:
        torch.set_num_threads(threads)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    assert queue.get(timeout=120) == expected
    child.join()


def test_exp_and_log():
    """The polynomials keep their error over the whole range, run by Python number by number."""
    x = torch.linspace(-100, 87, 100_001)[::1000]
    exp = cpu_kernels.exp.py_func
    result = torch.tensor([exp(v) for v in x.numpy()])
    expected = x.exp() * (x > -87.3)  # 0 where float32 is subnormal
    assert torch.allclose(result, expected, rtol=3e-7, atol=1e-37)

    near_one = torch.rand(100) * 3
    whole_range = torch.logspace(-37, 38, 100)
    x = torch.cat([near_one, whole_range])
    log = cpu_kernels.log.py_func
    no_octaves = np.float32(0)
    result = torch.tensor([log(v, no_octaves) for v in x.numpy()])
    assert torch.allclose(result, x.log(), rtol=3e-7, atol=1e-7)


def test_what_would_read_beyond_memory_is_refused():
    x = torch.randn(2, 6)
    row = torch.tensor([0, 1])
    event = torch.tensor([0, 1, 2, -1, 0, 1])

    def event_kl(row_C=row, event_V=event, num_events=3):
        cpu_kernels.event_kl(x, row_C, x, row, event_V, event, num_events, 0.0)

    event_kl()
    with pytest.raises(ValueError, match="rows from 1 to 2, expected 0 to 1"):
        event_kl(row_C=row + 1)
    with pytest.raises(ValueError, match="events of 5 tokens, logits of 6"):
        event_kl(event_V=event[:5])
    with pytest.raises(ValueError, match="events from -1 to 2, expected -1 to 1"):
        event_kl(num_events=2)

    side = (x, torch.ones(2), row, row)
    for token in (6, -1):
        common = (torch.tensor([token]), row)
        with pytest.raises(ValueError, match=r"tokens from .* expected 0 to 5"):
            cpu_kernels.mixture_distance(side, side, common, (row, row), 3, 1.0)


def test_a_belief_that_would_read_beyond_memory_is_refused():
    """Three roots of a translation, two cells; every number that a kernel reads memory by."""
    logits = torch.randn(3, 4)
    row = torch.arange(3)
    none = torch.zeros(4, dtype=torch.long)
    cell = torch.tensor([0, 1, -1, 1]).int()
    belief = cpu_kernels.Belief(
        logits=logits,
        row=row,
        cell=cell,
        join_start=torch.tensor([0, 1, 1, 1, 1]),
        join_low=torch.tensor([1]),
        join_high=torch.tensor([3]),
        order=torch.arange(4),
        before=torch.tensor([-1, 0, 3]),
        next=torch.tensor([0, 1, 2]),
        going_mass=torch.zeros(3),
        going_ends=torch.ones(3),
        going_start=none,
        going_cell=none[:0],
        going_share=torch.zeros(0),
        asked_start=none,
        asked_token=none[:0],
    )

    def translated_kl(cell_V=cell, row_N=row, **fields):
        arguments = row_N, cell_V, belief._replace(**fields), 2, 0.0
        return cpu_kernels.translated_kl(logits, *arguments)

    value, _, _ = translated_kl()
    assert value.isfinite().all()
    wrong = {
        "row": row + 1,
        "cell": cell + 1,
        "join_start": torch.tensor([0, 1, 2, 1, 1]),
        "join_low": torch.tensor([-1]),
        "join_high": torch.tensor([5]),
        "order": torch.arange(4) + 1,
        "before": torch.tensor([-1, 0, 4]),
        "next": torch.tensor([0, 1, 4]),
        "going_cell": torch.tensor([2]),
        "asked_token": torch.tensor([-1]),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"from .* to .*, expected"):
            translated_kl(**{name: tensor})
    with pytest.raises(ValueError, match="cells of 3 tokens, logits of 4"):
        translated_kl(cell_V=cell[:3])
    with pytest.raises(ValueError, match="rows from -1"):
        translated_kl(row_N=row - 1)
