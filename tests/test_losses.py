"""losses.py (cross-entropy, event_kl, projection_kl) and teacher_mixing.py: definitions."""

import random
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import oracle
from cases import Case, check_wrong_input, close, gradient, spelling_of
from conftest import ROOT
from isogloss import losses, policy_losses
from isogloss.event_kl import event_coverage, event_kl, event_terms
from isogloss.losses import (
    next_token_cross_entropy,
    projection_kl,
    teacher_importance,
)
from isogloss.teachers import mixing as teacher_mixing

F64 = torch.float64


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_event_kl_equals_brute_force(tau):
    kinds = set()
    for seed in range(40):
        sizes = random.Random(seed).choice([(9, 12), (12, 7), (5, 14), (14, 4)])
        case = Case(seed, sizes=sizes)
        case.x.requires_grad_(seed % 4 == 0)
        terms = event_terms(*case.next, *case.chunk, case.spelling)
        if len(terms.inside_teacher.low):
            kinds.add("inside_teacher")
        if len(terms.inside_student.low):
            kinds.add("inside_student")
        if terms.count_many:
            kinds.add("many")
        value, count = case.piece(tau)
        expected, expected_count = oracle.event_kl(
            case.x, case.y, *case.next, *case.chunk, case.A, case.B, tau
        )
        assert count == expected_count
        assert abs(value - expected) <= 1e-12 * expected
        if case.x.requires_grad:
            assert close(gradient(value, case.x), gradient(expected, case.x), 1e-11)
    # the cases do exercise every kind of term
    assert kinds == {"inside_teacher", "inside_student", "many"}


def test_wrong_input_is_one_line():
    """An int64 mask would count 50 positions of 10, other widths would shift rows in silence."""
    case = Case(3)
    x, y = case.x, case.y
    next_S, next_T = case.next
    logits = dict(student_logits_BSV=x, teacher_logits_BTW=y)
    chunk = dict(student_chunk_BS=case.chunk[0], teacher_chunk_BT=case.chunk[1])
    following = dict(student_next_BS=next_S, teacher_next_BT=next_T)
    weight = {"weight_BS": torch.ones(next_S.shape)}
    mask = next_S >= 0
    both = dict(student_logits_BSV=x, teacher_logits_BSV=x.detach() / 2, mask_BS=mask) | weight
    for name in ("forward_kl", "reverse_kl", "generalized_jsd", "skew_forward_kl",
                 "skew_reverse_kl", "adaptive_kl", "total_variation"):
        check_wrong_input(getattr(losses, name), both, [])
    logp = torch.zeros(next_S.shape)
    check_wrong_input(policy_losses.topk_tail_policy_loss, both | dict(
        next_BS=next_S.clamp(min=0), top_k=2, old_logp_BS=logp,
        sample_BS=torch.zeros_like(next_S)), [])
    check_wrong_input(policy_losses.prefix_ratio, dict(
        logp_BS=logp, old_logp_BS=logp, mask_BS=mask, sample_BS=torch.zeros_like(next_S)), [])
    labels = torch.where(mask, next_S, -100)
    check_wrong_input(next_token_cross_entropy, dict(logits_BSV=x, labels_BS=labels) | weight, [])
    check_wrong_input(losses.alm, logits | following | chunk | weight, [])
    check_wrong_input(losses.uld, logits | following | chunk | weight, [])
    tables = dict(indices_VK=case.indices, likelihoods_VK=case.likelihoods)
    check_wrong_input(projection_kl, logits | chunk | tables | weight, list(tables))
    common = dict(zip(("common_V", "common_W"), losses.common_tokens(*tables.values())))
    check_wrong_input(losses.gold, logits | chunk | common | weight, list(common))
    terms = event_terms(*case.next, *case.chunk, case.spelling)
    check_wrong_input(event_terms, following | chunk | {"spelling": case.spelling}, [])
    events = {"terms": terms, "spelling": case.spelling}
    check_wrong_input(event_kl, logits | following | weight | events, [])
    teacher = {"teacher_logits_BTW": y}
    check_wrong_input(event_coverage, teacher | events, [])
    check_wrong_input(teacher_importance, teacher | {"teacher_chunk_BT": case.chunk[1]}, [])
    with pytest.raises(ValueError, match="the same vocabulary"):
        losses.forward_kl(x, x[..., :-1], None)
    with pytest.raises(ValueError, match="teacher_chunk has the shape"):
        losses.find_chunks(case.chunk[0], case.chunk[1][:-1])


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_projection_kl_equals_brute_force(tau):
    for seed in range(25):
        case = Case(seed)
        case.x.requires_grad_(seed % 5 < 2)
        kept = None
        if seed % 2 == 0:
            kept = torch.tensor(sorted(random.Random(seed).sample(range(12), 6)))
        value, count = case.projection(tau, kept=kept)
        expected, expected_count = oracle.projection_kl(
            case.x, case.y, *case.chunk, case.indices, case.likelihoods, kept, tau
        )
        assert count == expected_count
        assert abs(value - expected) <= 1e-12 * expected
        if case.x.requires_grad:
            assert close(gradient(value, case.x), gradient(expected, case.x), 1e-10)


def test_cross_entropy_equals_brute_force():
    for seed in range(10):
        case = Case(seed)
        labels = torch.where(case.chunk[0] >= 0, case.next[0], -100)
        value, count = next_token_cross_entropy(case.x, labels)
        expected, expected_count = oracle.cross_entropy(case.x, labels)
        assert count == expected_count
        assert abs(value - expected) <= 1e-12 * expected
        assert close(gradient(value, case.x), gradient(expected, case.x), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("labeled", ["some", "none", "all"])
def test_cross_entropy_without_selection_is_that_of_torch_bit_for_bit(dtype, labeled):
    """What the training loop calls: value and gradient equal F.cross_entropy, in any float type."""
    torch.manual_seed(0)
    x = (3 * torch.randn(2, 50, 301)).to(dtype).requires_grad_()
    labels = torch.randint(301, (2, 50))
    if labeled == "some":
        labels[torch.rand(2, 50) < 0.3] = -100
    elif labeled == "none":
        labels[:] = -100
    logits = losses.at_least_float32(x).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    value, count = next_token_cross_entropy(x, labels, select=False)
    assert value.dtype == count.dtype == expected.dtype
    assert torch.equal(value, expected)
    assert count == (labels != -100).sum()
    assert torch.equal(gradient(value, x), gradient(expected, x))
    # up to rounding this is what the selection of rows gives; other reductions select rows anyway
    selected, selected_count = next_token_cross_entropy(x, labels)
    assert torch.allclose(value, selected)
    assert count == selected_count
    for reduction in ("sample", "none"):
        terms, weights = next_token_cross_entropy(x, labels, reduction=reduction, select=False)
        assert torch.allclose(terms.sum(), value)
        assert weights.sum() == count


def test_cross_entropy_without_selection_does_not_wait_for_the_device():
    """Tensors on the meta device have no values, so whatever would wait for one raises."""
    x = torch.empty(2, 5, 7, device="meta", requires_grad=True)
    labels = torch.empty(2, 5, device="meta", dtype=torch.long)
    value, count = next_token_cross_entropy(x, labels, select=False)
    value.backward()
    assert value.shape == count.shape == () and x.grad.shape == x.shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        next_token_cross_entropy(x, labels)


def test_gradcheck():
    for seed in range(4):
        case = Case(seed, samples=1, length=8)
        for tau in (1.0, 2.0):
            for loss in (case.piece, case.projection):
                assert torch.autograd.gradcheck(
                    lambda x, loss=loss, tau=tau: loss(tau, x)[0], case.x, fast_mode=True
                )


def test_equal_tokenizers_give_forward_kl_and_zero_at_agreement():
    torch.manual_seed(0)
    V = 11
    next_ids = torch.randint(V, (2, 6))
    chunk = torch.arange(6).expand(2, 6)
    same_spelling = [[i] for i in range(V)]
    spelling = spelling_of(same_spelling, same_spelling)
    terms = event_terms(next_ids, next_ids, chunk, chunk, spelling)
    x = torch.randn(2, 6, V, dtype=F64)
    y = torch.randn(2, 6, V, dtype=F64)
    value, count = event_kl(x, y, next_ids, next_ids, terms, spelling)
    forward = (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum()
    assert count == 12
    assert abs(value - forward) < 1e-12 * forward
    assert abs(event_kl(y, y, next_ids, next_ids, terms, spelling)[0]) < 1e-12
    indices = torch.arange(V)[:, None]  # the identity as a projection
    ones = torch.ones(V, 1, dtype=F64)
    assert abs(projection_kl(y, y, chunk, chunk, indices, ones)[0]) < 1e-7
    assert abs(projection_kl(x, y, chunk, chunk, indices, ones)[0] - forward) < 1e-7


def test_never_negative():
    for seed in range(30):
        case = Case(seed, dtype=torch.float32)
        assert case.piece()[0] >= -1e-5
        assert case.projection()[0] >= -1e-5


def test_padding_may_hold_anything():
    """One side at a time: NaN where no chunk is must reach neither the value nor the gradient."""
    for loss in ("piece", "projection"):
        for side in (0, 1):
            case = Case(3)
            expected = getattr(case, loss)()[0]
            logits = [case.x, case.y]
            has_chunk = (case.chunk[side] >= 0)[..., None]
            logits[side] = torch.where(has_chunk, logits[side], torch.nan)
            value = getattr(case, loss)(1.0, *logits)[0]
            assert value == expected
            assert torch.equal(gradient(value, case.x), gradient(expected, case.x))
    case = Case(3)
    labels = torch.where(case.chunk[0] >= 0, case.next[0], -100)
    x = torch.where((labels >= 0)[..., None], case.x, torch.nan)
    assert gradient(next_token_cross_entropy(x, labels)[0], case.x).isfinite().all()


def test_every_row_is_read_by_the_right_position():
    """Swap two predictor rows: only a loss that reads position t for chunk t can tell."""
    for loss in ("piece", "projection"):
        for side in (0, 1):
            case = Case(5)
            logits = [case.x.detach(), case.y]
            length = logits[side].shape[1]
            logits[side] = logits[side][:, [1, 0, *range(2, length)]]
            swapped = getattr(case, loss)(1.0, *logits)[0]
            assert abs(swapped - getattr(case, loss)()[0]) > 1e-3


def test_same_whatever_the_cut_of_the_batch():
    for loss in ("piece", "projection"):
        case = Case(7, samples=4)
        whole, whole_count = getattr(case, loss)()
        x = case.x
        y = case.y
        nexts = case.next
        chunks = case.chunk
        total = 0.0
        count = 0
        for i in range(4):
            case.next = [next_ids[i : i + 1] for next_ids in nexts]
            case.chunk = [chunk[i : i + 1] for chunk in chunks]
            value, sample_count = getattr(case, loss)(1.0, x[i : i + 1], y[i : i + 1])
            total = total + value
            count += sample_count
        assert count == whole_count
        assert abs(total - whole) < 1e-12 * whole
        assert close(gradient(total, x), gradient(whole, x), 1e-12)


def test_no_chunk_at_all_still_has_a_gradient():
    case = Case(2)
    case.chunk = [torch.full_like(c, -1) for c in case.chunk]
    for loss in (case.piece, case.projection):
        value, count = loss()
        assert count == 0
        assert value == 0
        assert torch.equal(gradient(value, case.x), torch.zeros_like(case.x))


def test_a_peaky_student_keeps_its_gradient():
    """A logit gap of 100: in float32 the mass of the other events underflows; its log must not."""
    case = Case(1, dtype=torch.float32)
    peak = torch.zeros_like(case.x)
    peak[..., 0] = 100.0
    x = (case.x.detach() / 10 + peak).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    value = case.piece(1.0, x)[0]
    expected = oracle.event_kl(x64, case.y, *case.next, *case.chunk, case.A, case.B)[0]
    assert abs(value - expected) < 1e-4 * expected
    assert close(gradient(value, x).double(), gradient(expected, x64), 1e-4)


def test_low_precision_inputs_are_summed_in_float32():
    for loss in ("piece", "projection"):
        case = Case(4, dtype=torch.float32)
        x = case.x.detach().bfloat16().requires_grad_()
        y = case.y.bfloat16()
        exact = getattr(case, loss)(1.0, x.detach().double(), y.double())[0]
        with torch.autocast("cpu", torch.bfloat16):
            value = getattr(case, loss)(1.0, x, y)[0]
        assert value.dtype == torch.float32
        assert abs(value - exact) < 1e-5 * exact
        assert gradient(value, x).dtype == torch.bfloat16


def test_importance_ignores_padding():
    case = Case(6)
    has_chunk = case.chunk[1] >= 0
    y = torch.where(has_chunk[..., None], case.y, torch.nan)
    assert torch.equal(teacher_importance(y, case.chunk[1]), case.y[has_chunk].amax(0))
    no_chunk = torch.full_like(case.chunk[1], -1)
    assert teacher_importance(y, no_chunk).max() == -torch.inf


# --- teacher_mixing.py ---------------------------------------------------------------------------


def test_average_of_teachers():
    x = Case(8, sizes=(9, 12)).y
    y = torch.randn(x.shape, dtype=F64)
    p = x.softmax(-1)
    q = y.softmax(-1)
    mean = teacher_mixing.average_teachers([x, y])
    assert torch.allclose(mean.exp(), (p + q) / 2)
    weights = torch.tensor([[0.2, 1.0], [0.8, 0.0]])  # of two teachers in two samples
    mean = teacher_mixing.average_teachers([x, y], weights).exp()
    assert torch.allclose(mean[0], 0.2 * p[0] + 0.8 * q[0], atol=1e-7)
    assert torch.allclose(mean[1], p[1])
    mean = teacher_mixing.average_teachers([x, y], space="logits")
    assert torch.equal(mean, (x + y) / 2)
    with pytest.raises(ValueError, match="'x': expected"):
        teacher_mixing.average_teachers([x, y], space="x")


@pytest.mark.parametrize("kind", ["ce", "entropy", "max_prob"])
def test_teacher_scores_are_means_over_positions(kind):
    case = Case(7)
    logits = case.y
    next_ids = case.next[1]
    mask = case.chunk[1] >= 0
    scores = teacher_mixing.teacher_scores(logits, next_ids, mask, kind)
    for b in range(len(logits)):
        terms = []
        for t in mask[b].nonzero().flatten().tolist():
            p = logits[b, t].softmax(-1)
            if kind == "ce":
                terms.append(p[next_ids[b, t]].log())
            elif kind == "entropy":
                terms.append((p * p.log()).sum())
            else:
                terms.append(p.max())
        assert abs(scores[b] - sum(terms) / len(terms)) < 1e-12
    nothing = torch.zeros_like(mask)
    unread = teacher_mixing.teacher_scores(logits, next_ids, nothing, kind)
    assert torch.equal(unread, torch.full_like(scores, -torch.inf))
    with pytest.raises(ValueError, match="'x': expected"):
        teacher_mixing.teacher_scores(logits, next_ids, mask, "x")


@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -2.0])
def test_a_teacher_that_does_not_read_a_sample_has_no_weight(select, alpha):
    """All scores of ce and entropy are negative, so that a 0 would be the best one."""
    nothing = -torch.inf
    scores = torch.tensor([[-3.0, nothing, nothing], [nothing, -2.0, nothing], [-1, -5, nothing]])
    weights = teacher_mixing.teacher_weights(scores, alpha, select)
    assert (weights[scores == nothing] == 0).all()
    torch.testing.assert_close(weights.sum(0), torch.tensor([1.0, 1.0, 0.0]))
    expected = (alpha * torch.tensor([-3.0, -1.0])).softmax(0)
    if select:
        expected = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(weights[[0, 2], 0], expected)


def test_teacher_weights_and_factors():
    torch.manual_seed(0)
    scores = torch.randn(3, 5, dtype=F64)
    assert torch.allclose(teacher_mixing.teacher_weights(scores, 2.0), (2 * scores).softmax(0))
    best = teacher_mixing.teacher_weights(scores, select=True)
    assert torch.equal(best.argmax(0), scores.argmax(0))
    assert torch.equal(best.sum(0), torch.ones(5).double())
    factors = teacher_mixing.vocabulary_factors([1000, 10, 100])
    assert torch.allclose(factors, torch.tensor([3.0, 1.0, 2.0]).double())
    kd = torch.tensor(2.0, requires_grad=True)
    assert teacher_mixing.dynamic_scale(torch.tensor(3.0), kd) == 1.5


@pytest.mark.parametrize("call", [
    "losses.next_token_cross_entropy(x, torch.tensor([[1, -100]]))[0]",
])
def test_a_file_works_alone(tmp_path, call):
    name = call.lstrip("-").split(".")[0]
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    code = (
        f"import sys; sys.path.insert(0, '.'); import torch, {name}; x = torch.zeros(1, 2, 3); "
        f"assert 'License: Apache-2.0' in {name}.__doc__; print({call})"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "1.0986" in result.stdout, result.stderr


def test_leaving_the_kept_columns_is_no_optimum():
    """A student without mass in the kept columns pays for all of the target, not nothing."""
    # student tokens 0 and 1 map to teacher tokens 0 and 1, token 2 to a column that is not kept
    indices = torch.tensor([[0], [1], [2]])
    likelihoods = torch.ones(3, 1)
    kept = torch.tensor([0, 1])
    chunk = torch.zeros(1, 1, dtype=torch.long)
    teacher = torch.tensor([[[2.0, 0.0, 0.0]]])
    values = []
    for away in (0.0, 5.0, 10.0, 40.0):
        student = torch.tensor([[[0.0, 2.0, away]]])
        value, _ = losses.projection_kl(
            student, teacher, chunk, chunk, indices, likelihoods, kept_K=kept)
        values.append(float(value))
    target = torch.tensor([2.0, 0.0]).softmax(0)
    student = torch.tensor([0.0, 2.0]).softmax(0)
    expected = float((target * (target / student).log()).sum())
    for value in values[:3]:  # the student's opinion inside the kept columns is all that counts
        assert abs(value - expected) < 1e-3 * expected
    assert values[3] > expected  # almost nothing is left: the price of EPSILON


def test_columns_that_no_student_token_reaches():
    """They are told by their weights; without them, no loss is left for a student that agrees."""
    indices = torch.tensor([[0, 2], [1, -1], [3, 1]])
    likelihoods = torch.tensor([[0.9, 0.1], [1.0, 0.0], [0.0, 1.0]])
    reachable = losses.reachable_tokens(indices, likelihoods, 6)
    assert reachable.tolist() == [True, True, True, False, False, False]
    chunk = torch.zeros(1, 1, dtype=torch.long)
    student = torch.tensor([[[1.0, 0.5, -1.0]]])
    p = student[0, 0].softmax(0)
    r = torch.stack([0.9 * p[0], p[1] + p[2], 0.1 * p[0]])
    teacher = torch.cat([r.log(), torch.tensor([2.0, 1.0, 0.0])])[None, None]
    arguments = student, teacher, chunk, chunk, indices, likelihoods
    among_reachable, _ = losses.projection_kl(*arguments, kept_K=reachable.nonzero().squeeze(1))
    among_all, _ = losses.projection_kl(*arguments)
    assert abs(float(among_reachable)) < 1e-6
    unreachable = teacher[0, 0].softmax(0)[3:].sum()
    assert float(among_all) > 15 * float(unreachable)


def losses_with_tables(case):
    """Return {name: (x, y) -> loss} of all losses that are called with tables of a vocabulary."""
    sizes = case.x.shape[-1], case.y.shape[-1]
    common = losses.common_tokens(case.indices, case.likelihoods, relaxed=True)
    rest = [losses.other_tokens(ids, size) for ids, size in zip(common, sizes)]
    entries = losses.projection_entries(case.indices, case.likelihoods, sizes[1])
    terms = event_terms(*case.next, *case.chunk, case.spelling)
    tables = case.indices, case.likelihoods
    return {
        "event_kl": lambda x, y: event_kl(x, y, *case.next, terms, case.spelling),
        "event_coverage": lambda x, y: event_coverage(y, terms, case.spelling),
        "projection_kl": lambda x, y: losses.projection_kl(x, y, *case.chunk, *tables),
        "with entries": lambda x, y: losses.projection_kl(
            x, y, *case.chunk, *tables, entries=entries),
        "gold": lambda x, y: losses.gold(x, y, *case.chunk, *common, rest=rest),
    }


# the teacher's tokens are not known from (indices, likelihoods) alone
KNOWN_SIDES = {"event_kl": "both", "event_coverage": "teacher", "projection_kl": "student",
               "with entries": "both", "gold": "both"}


@pytest.mark.parametrize("name", KNOWN_SIDES)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_the_padding_of_a_head_is_refused(name, side):
    case = Case(4)
    loss = losses_with_tables(case)[name]
    loss(case.x, case.y)
    logits = {"student": case.x, "teacher": case.y}
    size = logits[side].shape[-1]
    if KNOWN_SIDES[name] not in (side, "both"):
        return
    more = dict(logits)
    more[side] = torch.nn.functional.pad(logits[side], (0, 3), value=5.0)
    message = rf"{side} logits have {size + 3} columns, .* {size} tokens; cut .*:{size}\]"
    with pytest.raises(ValueError, match=message):
        loss(more["student"], more["teacher"])
    fewer = dict(logits)
    fewer[side] = logits[side][..., :-1]
    with pytest.raises(ValueError, match="another tokenizer"):
        loss(fewer["student"], fewer["teacher"])
