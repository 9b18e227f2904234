"""Properties of every loss of every_loss.py, on each path that computes it; teacher_mixing.py."""

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import cases
import ranks
from every_loss import CHUNK_LOSSES, COEFFICIENTS, PROBLEMS, LogitsCase, LossTables
from isogloss import losses, nodes, policy_losses, translation
from isogloss.teachers import mixing as teacher_mixing
from waiting import FixedOrder

of_every_loss = pytest.mark.parametrize("name", PROBLEMS)
# their values or gradients jump where the models agree
KINKED = ("total_variation", "translated, total_variation", "uld", "hybrid_uld",
          "gold", "h_kl")


def value_and_gradient(problem, *logits, **options):
    """Return (value, gradient by the student's logits) of a Problem, or of it at other logits."""
    x, y = logits or (problem.x, problem.y)
    x = x.detach().clone().requires_grad_()
    value, _ = problem.loss(x, y, **options)
    return value.detach(), cases.gradient(value, x)


@of_every_loss
@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_equals_its_definition(name, tau):
    for seed in range(9):
        sizes = {"sizes": [(9, 12), (12, 7), (5, 14)][seed % 3]} if name in CHUNK_LOSSES else {}
        problem = PROBLEMS[name](seed, tau, **sizes)
        value, count = problem.loss()
        expected, expected_count = problem.definition()
        assert count == expected_count
        assert abs(value - expected) <= 1e-12 * expected.abs().clamp(min=1e-3)
        if seed < 4:
            gradients = [cases.gradient(each, problem.x) for each in (value, expected)]
            assert cases.close(*gradients, 1e-11), seed


@of_every_loss
@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_a_bound_clips_the_divergence_of_each_position(name, tau):
    """Before tau^2; what it clips has no gradient, like what torch.clamp does."""
    if name == "cross_entropy":
        pytest.skip("it is no divergence")
    for seed in (1, 2):
        problem = PROBLEMS[name](seed, tau)
        seen = []
        problem.loss(bound=lambda term_N, seen=seen: seen.append(term_N.detach()) or term_N)
        limit = float(torch.cat(seen).median()) - 1e-9
        value, count = problem.loss(bound=partial(torch.clamp, max=limit))
        expected, expected_count = problem.definition(limit)
        assert count == expected_count
        assert abs(value - expected) <= 1e-9 * expected.abs().clamp(min=1)
        assert value < problem.loss()[0] - 1e-6
        gradients = [cases.gradient(each, problem.x) for each in (value, expected)]
        assert gradients[0].abs().max() > 0
        assert cases.close(*gradients, 1e-9), seed


@of_every_loss
def test_equal_tokenizers_at_agreement_have_nothing_to_learn(name):
    if name == "cross_entropy":
        pytest.skip("it is an entropy there")
    problem = PROBLEMS[name](3, equal=True)
    y = problem.y
    teacher_tau = name.endswith("another temperature") or name.endswith("student's top_k")
    if teacher_tau:
        y = y * 1.5
    value, d = value_and_gradient(problem, problem.y, y)
    assert abs(value) < 1e-6 if name.startswith("projection") else abs(value) < 1e-12
    if not name.startswith(KINKED):
        assert d.abs().max() < 1e-7
    if not teacher_tau:
        for tau in (10.0, 100.0):  # whose square multiplies the rounding of float32
            value, _ = PROBLEMS[name](3, tau, equal=True).loss(y.float(), y.float())
            assert abs(value) < 1e-4 + 2e-5 * tau**2


@pytest.mark.parametrize("kept_K", [None, torch.tensor([0, 2, 5])])
def test_a_projection_of_long_chunks_has_nothing_to_learn_at_agreement(kept_K):
    """Several tokens on either side, whose mass in the kept columns differs."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(1, 7, 6, generator=generator, dtype=cases.F64)
    x.requires_grad_()
    chunk = torch.tensor([[0, 0, 0, 1, 2, 2, -1]])
    value, count = losses.projection_kl(
        x, x, chunk, chunk, torch.arange(6)[:, None], torch.ones(6, 1), kept_K=kept_K)
    assert count == 3 and abs(value) < 1e-6
    assert cases.gradient(value, x).abs().max() < 1e-6


@of_every_loss
@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_are_not_read_may_hold_anything_and_one_that_is_spoils_the_loss(name, side):
    problem = PROBLEMS[name](3)
    expected = value_and_gradient(problem)
    for wrong in (torch.nan, torch.inf):
        logits = [problem.x.detach(), problem.y]
        is_read = problem.reads[side]
        logits[side] = torch.where(is_read[..., None], logits[side], wrong)
        value, d = value_and_gradient(problem, *logits)
        assert value == expected[0]
        assert torch.equal(d, expected[1])
        if name == "cross_entropy" and side == 1:
            continue
        logits = [problem.x.detach().clone(), problem.y.clone()]
        b, t = problem.reads[side].nonzero()[0].tolist()
        logits[side][b, t, 0] = wrong
        value, d = value_and_gradient(problem, *logits)
        assert value.isnan() and (d.isnan().any() or name.startswith(KINKED))


def extremes(logits_BNX):
    """Yield logits with excluded tokens: each, everywhere and in every other row; all but one."""
    width = logits_BNX.shape[-1]
    for token in range(width):
        for rows in (slice(None), slice(0, None, 2), slice(1, None, 2)):
            changed = logits_BNX.clone()
            changed[:, rows, token] = -torch.inf
            yield changed
    for others in (-torch.inf, -500.0):
        changed = torch.full_like(logits_BNX, others)
        changed[..., 1] = 500.0
        yield changed


@of_every_loss
@pytest.mark.parametrize("side", [0, 1])
def test_what_a_model_excludes_costs_a_finite_amount(name, side):
    if name == "cross_entropy":
        pytest.skip("as torch has it, it is infinite")
    problem = PROBLEMS[name](1)
    logits = [problem.x.detach().float(), problem.y.float()]
    for changed in extremes(logits[side].clone()):
        logits[side] = changed
        value, d = value_and_gradient(problem, *logits)
        assert value.isfinite() and d.isfinite().all()


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("support", ["teacher", "student"])
@pytest.mark.parametrize("tail", [True, False])
def test_tokens_without_mass_are_in_no_top_k(name, support, tail):
    """Which of them would be is a matter of chance, of their order."""
    generator = torch.Generator().manual_seed(0)
    x, y = 2 * torch.randn(2, 1, 30, 12, generator=generator, dtype=torch.float64)
    judge = y if support == "teacher" else x
    judge[..., torch.randperm(12, generator=generator)[:9]] = -torch.inf
    options = dict(top_k=6, support=support, tail=tail, reduction="none", **COEFFICIENTS[name])
    divergence = getattr(losses, name)
    expected, _ = divergence(x, y, None, **options)
    of_kept, _ = divergence(x, y, None, **options | {"top_k": 3})
    torch.testing.assert_close(of_kept, expected)
    for _ in range(5):
        order = torch.randperm(12, generator=generator)
        value, _ = divergence(x[..., order], y[..., order], None, **options)
        torch.testing.assert_close(value, expected)


@of_every_loss
@pytest.mark.parametrize("gap", [0.0, 10.0, 35.0, 60.0, 120.0])
def test_float32_is_as_good_as_float64(name, gap):
    """What a model gives almost no probability underflows in float32; the loss must not."""
    if name.startswith("translated") and gap > 35:
        pytest.skip("what a row leaves for the end of a token is 1 - sum, which float32 rounds")
    # where a chunk is all but certain, float32 keeps few digits of 1 - p
    precision = 2e-4 if name.startswith("alm") else 2e-5
    for side, seed, tau in ((0, 0, 1.0), (1, 1, 1.0), (0, 2, 2.0), (1, 3, 0.5)):
        problem = PROBLEMS[name](seed, tau)
        logits = [problem.x.detach().float(), problem.y.float()]
        width = logits[side].shape[-1]
        most_likely = torch.randint(width, logits[side].shape[:2])
        logits[side] = logits[side] + gap * F.one_hot(most_likely, width)
        expected, expected_d = value_and_gradient(problem, *[x.double() for x in logits])
        value, d = value_and_gradient(problem, *logits)
        assert expected.isfinite() and value.dtype == torch.float32
        assert abs(value - expected) <= 3e-5 * expected.abs().clamp(min=1e-3), (side, seed)
        # a gradient that vanishes is rounded
        assert (d - expected_d).norm() <= precision * max(expected_d.norm(), 0.1), (side, seed)


@of_every_loss
def test_half_precision_is_summed_in_float32(name):
    problem = PROBLEMS[name](4)
    logits = problem.x.detach().bfloat16(), problem.y.bfloat16()
    exact, exact_d = value_and_gradient(problem, *[x.double() for x in logits])
    with torch.autocast("cpu", torch.bfloat16):
        value, d = value_and_gradient(problem, *logits)
    assert value.dtype == torch.float32 and d.dtype == torch.bfloat16
    assert abs(value - exact) <= 1e-5 * abs(exact)
    assert cases.close(d.double(), exact_d, 0.01)


@of_every_loss
def test_terms_add_up_whatever_the_reduction_the_weights_and_the_cut_of_the_batch(name):
    problem = PROBLEMS[name](7, samples=4)
    total, count = problem.loss()
    terms_N, weights_N = problem.loss(reduction="none")
    sums_B, counts_B = problem.loss(reduction="sample")
    torch.testing.assert_close(terms_N.sum(), total)
    assert weights_N.sum() == counts_B.sum() == count == len(terms_N)
    weight = torch.zeros(problem.x.shape[:2], dtype=cases.F64)
    for b in range(4):
        weight[b] = b + 0.5
        cut = slice(b, b + 1)
        one, one_count = problem.loss(problem.x[cut], problem.y[cut], cut)
        torch.testing.assert_close(sums_B[b], one)
        assert counts_B[b] == one_count
    weighted, weighted_count = problem.loss(weight_BS=weight)
    factors = torch.arange(4) + 0.5
    torch.testing.assert_close(weighted, (factors * sums_B).sum())
    torch.testing.assert_close(weighted_count, (factors * counts_B).sum())
    # a term weighs as the position where it begins, and terms come in the order of these
    some = torch.rand(weight.shape, dtype=cases.F64) * problem.reads[0]
    weighted_N, some_N = problem.loss(weight_BS=some, reduction="none")
    torch.testing.assert_close(weighted_N, some_N * terms_N)
    place_N = [int((some.flatten() == one).nonzero().squeeze()) for one in some_N]
    assert place_N == sorted(set(place_N))
    with pytest.raises(ValueError, match="reduction='mean'"):
        problem.loss(reduction="mean")


@pytest.mark.parametrize("name", CHUNK_LOSSES)
def test_without_a_chunk_there_is_nothing_and_it_has_a_gradient(name):
    case = cases.Case(2)
    tables = LossTables.of(case)
    none = [torch.full_like(chunk, -1) for chunk in case.ids[2:]]
    ids = case.ids._replace(chunk_S=none[0], chunk_T=none[1])
    spec = CHUNK_LOSSES[name]
    value, count = spec.compute(case.x, case.y, ids, spec.list_terms(ids, tables), tables)
    assert value == count == 0
    assert (cases.gradient(value, case.x) == 0).all()


# --- other paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHUNK_LOSSES)
def test_sums_have_a_fixed_order_where_index_add_has_none(name, monkeypatch):
    """On a GPU the path of plain torch repeats itself, forward and backward."""
    problem = PROBLEMS[name](20, samples=4)
    expected = value_and_gradient(problem)
    monkeypatch.setattr(losses, "ORDERED_DEVICES", ())
    with FixedOrder():
        ours = value_and_gradient(problem)
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CHUNK_LOSSES)
def test_nothing_waits_for_the_device(name):
    """The meta device has no numbers, so whatever reads one back (sizes, masks) fails there."""
    case = cases.Case(3, samples=4)  # has terms of all kinds
    tables = LossTables.of(case)
    spec = CHUNK_LOSSES[name]
    terms = spec.list_terms(case.ids, tables)
    x = cases.on_meta(case.x)
    with cases.NoWait():
        value, _ = spec.compute(x, *cases.on_meta([case.y, case.ids, terms, tables]))
        value.backward()
    assert x.grad.shape == x.shape


def test_nothing_of_one_vocabulary_waits_for_the_device():
    x, y = cases.on_meta([LogitsCase(0).x, LogitsCase(0).y])
    labels = torch.empty(x.shape[:2], device="meta", dtype=torch.long)
    with cases.NoWait():
        for name in ("generalized_jsd", "adaptive_kl"):
            for top_k in (0, 3):
                losses.position_divergence(name, x, y, None, top_k=top_k)[0].backward()
        losses.next_token_cross_entropy(x, labels, select=False)[0].backward()
    assert x.grad.shape == x.shape


def sharded(world):
    """Return the relative errors, by loss and case, on one of `world` ranks; some hold no text."""
    dist.init_process_group("gloo")
    errors = {}
    for seed, samples in ((0, 4), (1, 1)):
        for name in PROBLEMS:
            problem = PROBLEMS[name](seed, samples=samples)
            sides = problem.x, problem.y
            bounds = [cases.shards(world, side.shape[-1])[dist.get_rank()] for side in sides]
            errors[name, seed] = cases.shard_error(problem.loss, sides, bounds, dist.group.WORLD)
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
def test_sharded_columns_give_the_same_value_and_gradient():
    for errors in ranks.run(3, sharded, 3):
        assert len(errors) == 2 * len(PROBLEMS)
        assert max(errors.values()) < 1e-9, errors


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_input_is_one_line():
    """An int64 mask would count 50 positions of 10, other widths would shift rows in silence."""
    case = cases.Case(3)
    tables = LossTables.of(case)
    x, y = case.x, case.y
    next_S, next_T, chunk_S, chunk_T = case.ids
    mask = chunk_S >= 0
    no_positions = dict(
        indices_VK=tables.indices, likelihoods_VK=tables.likelihoods,
        common_V=tables.common[0], common_W=tables.common[1])
    tensors = no_positions | dict(
        student_logits_BSV=x, teacher_logits_BTW=y, logits_BSV=x, labels_BS=next_S,
        student_ids_BS=next_S, student_next_BS=next_S, teacher_next_BT=next_T,
        student_chunk_BS=chunk_S, teacher_chunk_BT=chunk_T, mask_BS=mask,
        weight_BS=torch.ones(next_S.shape), logp_BS=torch.zeros(next_S.shape),
        old_logp_BS=torch.zeros(next_S.shape), sample_BS=torch.zeros_like(next_S),
        nodes=nodes.list_nodes(next_S, *case.ids, tables.translation), tables=tables.translation)
    for function in (
        policy_losses.prefix_ratio, losses.next_token_cross_entropy, losses.alm, losses.uld,
        losses.projection_kl, losses.gold, losses.teacher_importance, nodes.list_nodes,
        translation.translated, translation.cell_coverage,
    ):
        names = inspect.signature(function).parameters.keys() & tensors.keys()
        cases.check_wrong_input(function, {name: tensors[name] for name in names}, no_positions)
    for name in COEFFICIENTS:
        cases.check_wrong_input(getattr(losses, name), dict(
            student_logits_BSV=x, teacher_logits_BSV=x.detach() / 2, mask_BS=mask,
            weight_BS=tensors["weight_BS"]), [])
    with pytest.raises(ValueError, match="the same vocabulary"):
        losses.forward_kl(x, x[..., :-1], None)
    with pytest.raises(ValueError, match="teacher_chunk has the shape"):
        losses.find_chunks(chunk_S, chunk_T[:-1])
    for weight in (-1.0, 2.0):  # -1 is what --loss_options takes for the rule
        with pytest.raises(ValueError, match=f"matched_weight={weight}: expected 0 to 1, or None"):
            losses.uld(x, y, *case.ids, common=tables.common, matched_weight=weight)
    with pytest.raises(ValueError, match="support='both'"):
        losses.forward_kl(x, x, mask, top_k=2, support="both")
    with pytest.raises(ValueError, match="'kl': no such divergence"):
        losses.position_divergence("kl", x, x, mask)
    for of_one in (x[0], x[None]):
        with pytest.raises(ValueError, match=r"student logits are \(.*expected floats \(samples, "):
            losses.forward_kl(of_one, of_one, None)
    chunks = chunk_S, chunk_S
    for compute in (
        lambda tau: losses.forward_kl(x, x, mask, temperature=tau),
        lambda tau: losses.forward_kl(x, x, mask, teacher_temperature=tau),
        lambda tau: losses.alm(x, x, next_S, next_S, *chunks, temperature=tau),
        lambda tau: losses.uld(x, x, next_S, next_S, *chunks, temperature=tau),
    ):
        for tau in (0, 0.0, -1.0, torch.nan, torch.inf):
            with pytest.raises(ValueError, match=r"temperature=.*: expected a number above 0"):
                compute(tau)
    for name, wrong in (("generalized_jsd", {"beta": 2}), ("generalized_jsd", {"beta": torch.nan}),
                        ("adaptive_kl", {"alpha": -0.1}), ("skew_forward_kl", {"skew": 1}),
                        ("skew_reverse_kl", {"skew": 1.5})):
        with pytest.raises(ValueError, match=f"{name}: its coefficient is .*; expected 0 to 1"):
            getattr(losses, name)(x, x, mask, **wrong)


# the sides whose tokens the tables of a loss know
KNOWN_SIDES = {"projection_kl": (0, 1), "projection_kl, kept": (0,),
               "gold": (0, 1), "hybrid_uld": (0, 1), "translated, forward_kl": (0, 1)}


@pytest.mark.parametrize("name", KNOWN_SIDES)
def test_the_padding_of_a_head_is_refused(name):
    case = cases.Case(4)
    tables = LossTables.of(case)
    spec = CHUNK_LOSSES[name]
    rest = {}
    if name in ("gold", "hybrid_uld"):
        rest["rest"] = [losses.other_tokens(ids, side.shape[-1])
                        for ids, side in zip(tables.common, (case.x, case.y))]
    terms = spec.list_terms(case.ids, tables)
    for side in KNOWN_SIDES[name]:
        logits = [case.x, case.y]
        size = logits[side].shape[-1]
        padded = F.pad(logits[side], (0, 3), value=5.0)
        who = ("student", "teacher")[side]
        message = rf"{who} logits have {size + 3} columns, .* {size} tokens; cut .*:{size}\]"
        for changed, expected in ((padded, message), (logits[side][..., :-1], "another tokenizer")):
            logits[side] = changed
            with pytest.raises(ValueError, match=expected):
                spec.compute(*logits, case.ids, terms, tables, **rest)


# --- one loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, cases.F64])
@pytest.mark.parametrize("labeled", [0.0, 0.7, 1.0])
def test_cross_entropy_without_selection_is_that_of_torch_bit_for_bit(dtype, labeled):
    """What the training loop calls: value and gradient equal F.cross_entropy, in any float type."""
    torch.manual_seed(0)
    x = (3 * torch.randn(2, 50, 301)).to(dtype).requires_grad_()
    labels = torch.randint(301, (2, 50))
    labels[torch.rand(2, 50) >= labeled] = -100
    logits = losses.at_least_float32(x).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    value, count = losses.next_token_cross_entropy(x, labels, select=False)
    assert value.dtype == count.dtype == expected.dtype
    assert torch.equal(value, expected)
    assert count == (labels != -100).sum()
    assert torch.equal(cases.gradient(value, x), cases.gradient(expected, x))
    # other reductions select rows anyway
    for reduction in ("sample", "none"):
        terms, weights = losses.next_token_cross_entropy(
            x, labels, reduction=reduction, select=False)
        assert torch.allclose(terms.sum(), value)
        assert weights.sum() == count


def test_the_likeliest_token_is_never_unlikely():
    """At alpha 1 it alone is likely, however the sum of all probabilities is rounded."""
    generator = torch.Generator().manual_seed(0)
    logp, logq = torch.randn(2, 500, 40, generator=generator).log_softmax(-1)
    gap = (logp.exp() - logq.exp()).abs()
    expected = gap.gather(1, logq.argmax(1, keepdim=True)).squeeze(1) / gap.sum(1)
    torch.testing.assert_close(losses.adaptive_weight(logp, logq, 1.0), expected)


@pytest.mark.parametrize("side", [0, 1])
def test_two_float_types_are_compared_in_the_wider_one(side):
    x, y = [logits.detach() for logits in (LogitsCase(2).x, LogitsCase(2).y)]
    ids = torch.arange(x.shape[1]).expand(x.shape[:2])
    common = torch.arange(3), torch.arange(3)
    for loss in (*[getattr(losses, name) for name in COEFFICIENTS],
                 lambda x, y, _: losses.uld(x, y, ids, ids, ids, ids, common=common)):
        for narrow in (torch.float32, torch.bfloat16):
            mixed = [x, y]
            mixed[side] = mixed[side].to(narrow)
            expected, _ = loss(*[logits.double() for logits in mixed], None)
            value, _ = loss(*mixed, None)
            assert value.dtype == cases.F64
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


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


def test_teacher_tokens_are_reachable_by_a_weight_and_important_where_a_chunk_is():
    indices = torch.tensor([[0, 2], [1, -1], [3, 1]])
    likelihoods = torch.tensor([[0.9, 0.1], [1.0, 0.0], [0.0, 1.0]])
    reachable = losses.reachable_tokens(indices, likelihoods, 6)
    assert reachable.tolist() == [True, True, True, False, False, False]
    case = cases.Case(6)
    chunk = case.ids.chunk_T
    y = torch.where((chunk >= 0)[..., None], case.y, torch.nan)
    assert torch.equal(losses.teacher_importance(y, chunk), case.y[chunk >= 0].amax(0))
    assert losses.teacher_importance(y, torch.full_like(chunk, -1)).max() == -torch.inf


# --- teacher_mixing.py ---------------------------------------------------------------------------


def test_average_of_teachers():
    x = LogitsCase(8).y
    y = torch.randn(x.shape, dtype=cases.F64)
    p, q = x.softmax(-1), y.softmax(-1)
    for weights in (torch.tensor([0.2, 0.8]), torch.tensor([1.0, 0.0])):
        mean = teacher_mixing.average_teachers([x, y], weights).exp()
        assert torch.allclose(mean, weights[0] * p + weights[1] * q, atol=1e-7)


def test_scores_of_tokens():
    case = LogitsCase(7)
    logits, next_ids = case.y[case.mask], case.next[case.mask]
    scores = teacher_mixing.token_scores(logits, next_ids)
    for score, row, token in zip(scores, logits, next_ids):
        assert abs(score - row.softmax(-1)[token].log()) < 1e-12


@pytest.mark.parametrize("select", [False, True])
def test_a_teacher_that_does_not_read_a_sample_has_no_weight(select):
    """All scores are negative, so that a 0 would be the best one."""
    nothing = -torch.inf
    scores = torch.tensor([[-3.0, nothing, nothing], [nothing, -2.0, nothing], [-1, -5, nothing]])
    weights = teacher_mixing.teacher_weights(scores, select)
    assert (weights[scores == nothing] == 0).all()
    torch.testing.assert_close(weights.sum(0), torch.tensor([1.0, 1.0, 0.0]))
    expected = torch.tensor([-3.0, -1.0]).softmax(0)
    if select:
        expected = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(weights[[0, 2], 0], expected)


def test_the_dynamic_scale():
    kd = torch.tensor(2.0, requires_grad=True)
    assert teacher_mixing.dynamic_scale(torch.tensor(3.0), kd) == 1.5
