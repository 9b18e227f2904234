"""Losses of a teacher of which a row keeps some tokens and one event for all others."""

import pytest
import torch

import oracle
from cases import gradient
from every_loss import COEFFICIENTS
from isogloss import losses
from isogloss.nodes import with_rest
from isogloss.teachers.mixing import average_teachers, common_events
from isogloss.teachers.text_scores import truncate
from isogloss.translation import merge_rest
from test_translation import ALL_PAIRS, DIVERGENCES, Toy, check_equal, value_and_gradient

TAU = 1.7
HALVES = torch.full((2,), 0.5)


def random_rows(W, seed, count=12):
    """Return (student logits, teacher logits, labels) of one sample with one vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(1, count, W, generator=generator)
    y = 2 * torch.randn(1, count, W, generator=generator)
    labels = torch.randint(W, (1, count), generator=generator)
    labels[0, -1] = -100
    return x, y, labels


def truncated(y, labels, top_k, tau=1.0):
    """Return (..., W + 1) rows that keep top_k tokens and the label."""
    rows = truncate(y.flatten(0, -2).float(), top_k, labels.flatten(), tau).logits
    return rows(torch.arange(len(rows.ids_TK))).view(*y.shape[:-1], -1).to(y)


def kept_tokens(y, label, top_k):
    """List the tokens that a row keeps: by definition, not by the code."""
    order = sorted(range(len(y)), key=lambda w: -float(y[w]))
    kept = order[:top_k]
    if label >= 0 and label not in kept:
        kept.append(int(label))
    return kept


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("top_k", [4, 11])
def test_a_divergence_compares_what_is_kept_and_all_the_rest(name, top_k):
    x, y, labels = random_rows(11, 3)
    x.requires_grad_()
    coefficient = next(iter(COEFFICIENTS[name].values()), 0.0)
    expected = oracle.ZERO
    for t in range(x.shape[1]):
        kept = kept_tokens(y[0, t], labels[0, t], top_k)
        p, q = [oracle.buckets(oracle.softmax(side[0, t], TAU), kept, True) for side in (x, y)]
        expected = expected + TAU**2 * oracle.divergence(name, p, q, coefficient)
    rows = truncated(y, labels, top_k, TAU)
    ours, count = losses.position_divergence(
        name, losses.merge_unkept(x, rows, TAU), rows, None, temperature=TAU,
        coefficient=coefficient)
    assert count == x.shape[1]
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(ours, x), gradient(expected, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(len(ALL_PAIRS)))
def test_translations_with_all_tokens_kept_equal_the_whole_rows(number):
    """With fewer, they are finite and no less than zero."""
    toy = Toy(*ALL_PAIRS[number], number % 3)
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(toy.x.shape, generator=generator)
    y = torch.randn(toy.y.shape, generator=generator)
    rows = [truncated(y, toy.ids[2], top_k, TAU) for top_k in (y.shape[-1], 2)]
    whole_tables = toy.tables
    for divergence in DIVERGENCES.values():
        toy.tables = whole_tables
        expected = value_and_gradient(toy, x, y, divergence, temperature=TAU)
        toy.tables = with_rest(whole_tables)
        ours, (value, d) = [
            value_and_gradient(toy, x, kept, divergence, temperature=TAU, has_rest=True)
            for kept in rows]
        check_equal(ours, expected, 2e-6, (number, divergence))
        assert value > -1e-5 and d.isfinite().all()


def test_the_rest_is_one_event_with_the_cells_of_which_nothing_is_kept():
    """Three cells and the rest, on a student of five tokens in cells 0, 0, 1, 2, 2."""
    p = torch.tensor([[0.3, 0.1, 0.25, 0.35, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.0, 0.3, 0.0, 0.2]], dtype=torch.float64)
    tiny = torch.finfo(torch.float32).tiny
    logp, logq = merge_rest(p.clamp(min=tiny).log(), q.clamp(min=tiny).log())
    expected_p = torch.tensor([[0.3, 0.0, 0.25, 0.0, 0.1 + 0.35]], dtype=torch.float64)
    torch.testing.assert_close(logp.exp(), expected_p)
    torch.testing.assert_close(logq.exp(), q)
    # without a rest, a cell without mass is one that does not come
    q = torch.tensor([[0.6, 0.0, 0.4, 0.0, 0.0]], dtype=torch.float64)
    logp, logq = merge_rest(p.clamp(min=tiny).log(), q.clamp(min=tiny).log())
    torch.testing.assert_close(logp.exp(), p)
    torch.testing.assert_close(logq.exp(), q)


def test_the_rest_is_no_event_where_every_cell_has_a_kept_token():
    """Its value would be a constant; the others are compared among themselves."""
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    q = torch.tensor([[0.4, 0.25, 0.2, 0.15]], dtype=torch.float64)  # the last one is the rest
    logits = torch.cat([x[:, :3], torch.full((1, 1), -157.0)], 1)  # no student token is in it
    logp, logq = merge_rest(logits, q.log())
    torch.testing.assert_close(logq.exp()[0, :3], q[0, :3] / 0.85)
    for divergence in DIVERGENCES.values():
        value, _ = divergence(logp[None], logq[None], None)
        d, = torch.autograd.grad(value, x, retain_graph=True)
        assert abs(d.sum()) < 1e-12
    kl = losses.forward_kl(x[None, :, :3], (q[None, :, :3] / 0.85).log(), None)[0]
    torch.testing.assert_close(losses.forward_kl(logp[None], logq[None], None)[0], kl)


def projected_events(p, q, kept_K, known):
    """Coarse-grain what both models say of a chunk into the events that `projection_kl` compares.

    Args:
        p, q: 8 masses of teacher tokens for each position; known: the tokens that each row keeps.
    Returns:
        masses of the student, of the teacher: of each event.
    """
    if all(len(tokens) == 8 for tokens in known):  # all is known: given that a column is kept
        p, q = [[oracle.normalized([row[w] for w in kept_K]) for row in side] for side in (p, q)]
        return mean_of(p), mean_of(q)
    outcomes = [w for w in kept_K if any(w in tokens for tokens in known)]
    # what a row does not keep is in its rest, as far as it knows
    q = [[row[w] if w in tokens else oracle.ZERO for w in outcomes]
         for row, tokens in zip(q, known)]
    p = [[row[w] for w in outcomes] for row in p]
    return tuple(mean_of([[*row, 1 - sum(row, oracle.ZERO)] for row in side]) for side in (p, q))


def mean_of(rows):
    return [sum(column) / len(rows) for column in zip(*rows)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("top_k", [2, 5, 8])
@pytest.mark.parametrize("kept_K", [range(8), [0, 1, 3, 4, 5, 7], [2, 6], [5]])
def test_projections_compare_the_rest_with_what_is_not_kept(reverse, top_k, kept_K):
    """Three chunks, of which one has two teacher tokens; with 8 kept tokens there is no rest."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 5, 6, generator=generator)
    y = 2 * torch.randn(1, 4, 8, generator=generator)
    chunks = torch.tensor([[0, 0, 1, 2, -1]]), torch.tensor([[0, 1, 1, 2]])
    indices = torch.tensor([[0, 1], [2, -1], [3, 4], [5, -1], [6, 0], [7, 2]])
    likelihoods = torch.tensor([[0.9, 0.1], [1, 0], [0.7, 0.3], [1, 0], [0.5, 0.5], [0.8, 0.2]])
    labels = torch.randint(8, (1, 4), generator=generator)
    rows = truncated(y, labels, top_k, TAU)
    x.requires_grad_()
    expected = 0 * x.double().sum()  # where no column is an event of its own nothing else is left
    for b, student_positions, teacher_positions in oracle.chunks(*chunks):
        p = [oracle.project(oracle.softmax(x[b, t], TAU), indices, likelihoods, 8)
             for t in student_positions]
        q = [oracle.softmax(y[b, t], TAU) for t in teacher_positions]
        known = [kept_tokens(y[b, t], labels[b, t], top_k) for t in teacher_positions]
        p, q = projected_events(p, q, list(kept_K), known)
        expected = expected + TAU**2 * (oracle.kl(p, q) if reverse else oracle.kl(q, p))
    kept_K = torch.tensor(list(kept_K))
    options = dict(kept_K=kept_K, temperature=TAU, reverse=reverse, has_rest=True)
    ours, count = losses.projection_kl(x, rows, *chunks, indices, likelihoods, **options)
    assert count == 3
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient(ours, x), gradient(expected, x), rtol=1e-4, atol=1e-5)
    # the same with entries that are listed before, as in the job
    entries = losses.projection_entries(indices, likelihoods, 8, kept_K, has_rest=True)
    listed, _ = losses.projection_kl(
        x, rows, *chunks, indices, likelihoods, entries=entries, **options)
    assert listed == ours


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kept_K", [None, torch.arange(3), torch.tensor([0, 5, 7])])
def test_projections_of_models_that_agree_have_nothing_to_learn(reverse, kept_K):
    _, y, labels = random_rows(9, 4)
    rows = truncated(y, labels, 3, TAU)
    chunk = torch.arange(y.shape[1])[None]
    x = y.clone().requires_grad_()
    value, _ = losses.projection_kl(
        x, rows, chunk, chunk, torch.arange(9)[:, None], torch.ones(9, 1), kept_K=kept_K,
        temperature=TAU, reverse=reverse, has_rest=True)
    assert abs(value) < 1e-5
    assert gradient(value, x).abs().max() < 1e-6


def test_alm_reads_the_labels_alone_so_that_it_is_exact():
    x, y, labels = random_rows(11, 8)
    labels[0, -1] = 3
    chunk = torch.arange(x.shape[1])[None] // 2
    ours, expected = [losses.alm(x, rows, labels, labels, chunk, chunk, temperature=TAU)[0]
                      for rows in (truncated(y, labels, 1), y)]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_mean_of_teachers_is_over_what_all_of_them_keep():
    _, y, labels = random_rows(11, 9)
    _, z, _ = random_rows(11, 10)
    rows = [truncated(y, labels, 4), truncated(z, labels, 6)]
    mean = average_teachers(common_events(rows, 11), HALVES).softmax(-1)
    for t in range(y.shape[1]):
        sides = [oracle.softmax(side[0, t].double()) for side in (y, z)]
        kept = sorted(set(kept_tokens(y[0, t], labels[0, t], 4))
                      & set(kept_tokens(z[0, t], labels[0, t], 6)))
        events = [oracle.buckets(side, kept, True) for side in sides]
        expected = [(a + b) / 2 for a, b in zip(*events)]
        ours = [*mean[0, t, kept], mean[0, t, 11]]
        torch.testing.assert_close(torch.stack(ours).double(), torch.stack(expected),
                                   rtol=1e-5, atol=1e-6)
    # one that is whole takes part, too
    whole = average_teachers(common_events([rows[0], z], 11), HALVES).softmax(-1)
    assert ((whole > 0).sum(-1) <= 6).all()
    assert common_events([y, z], 11)[0] is y
