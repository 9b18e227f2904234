"""gpu_kernels.py under Triton's interpreter, on a CPU: against float64, and what it reads.

conftest.py asks for the interpreter.  Nothing here shows speed, or what a GPU computes.
"""

import itertools
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import oracle
from interpreted import (  # noqa: F401
    compiled,
    drawn,
    launches,
    on_cpu,
    rounding,
    same,
    traffic,
)
from isogloss import losses, translation
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder
from isogloss.objective import loss_table
from isogloss.objective.objective import PairLoss, pair_loss
from isogloss.projection_tools.tokenizers import Pair
from isogloss.tiles import KERNEL_SUB_TILES, Head, HiddenLogits, SubTile
from test_translation import ALL_PAIRS, COARSE, CROSSING, Toy, random_logits
from waiting import NoWaiting, without_modes

pytest.importorskip("triton", reason="triton is not installed")
gpu_kernels = pytest.importorskip("gpu_kernels")

DIVERGENCES = {
    "forward_kl": 0.0,
    "reverse_kl": 0.0,
    "generalized_jsd": 0.3,
    "skew_forward_kl": 0.1,
    "skew_reverse_kl": 0.1,
    "total_variation": 0.0,
}
FACTORS = 0.7, 1.3  # of cross-entropy and distillation loss
TEXTS = torch.tensor([6, 20, 99])  # of the toys: with chunks of all shapes where tokens cross


# --- one vocabulary -------------------------------------------------------------------------------


def in_place(name, x, y, labels, compared, tau, weight=None, factors=FACTORS):
    """Return (cross-entropy, divergence, gradient) of `losses.divergence_in_place`."""
    student_row, teacher_row = compared
    d = x.clone()
    ce, kd = losses.divergence_in_place(
        name, d, y, labels, student_row, teacher_row, factors, weight, tau, DIVERGENCES[name])
    return ce, kd, d


def by_definition(name, x, y, labels, compared, tau, weight, factors=FACTORS):
    """Return the same from the loops of oracle.py."""
    leaf = x.double().requires_grad_()
    ce, _ = oracle.cross_entropy(leaf[None], labels[None])
    kd = 0.0
    for student_row, teacher_row in zip(*(rows.tolist() for rows in compared)):
        p = list(oracle.softmax(leaf[student_row], tau))
        q = list(oracle.softmax(y[teacher_row], tau))
        term = oracle.divergence(name, p, q, DIVERGENCES[name])
        kd = kd + weight[student_row] * tau**2 * term
    total = factors[0] * ce + factors[1] * kd
    return ce.detach(), kd.detach(), torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_and_cross_entropy_equal_the_definition(name):
    """With odd sizes, rows that one of them leaves out, and rows in another order."""
    for seed, (V, tau) in enumerate([(37, 1.0), (5, 2.5), (64, 0.7)]):
        x = drawn((6, V), seed)
        y = drawn((5, V), seed + 10)
        labels = torch.tensor([3, -100, V - 1, 0, 1, -100])
        compared = torch.tensor([0, 1, 2, 4]), torch.tensor([4, 0, 1, 3])
        weight = torch.rand(6, generator=torch.Generator().manual_seed(seed))
        arguments = name, x, y, labels, compared, tau, weight
        for ours, exact in zip(in_place(*arguments), by_definition(*arguments)):
            same(ours, exact)


def test_a_block_is_read_in_several_parts(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "BLOCK", 8)
    x = drawn((3, 37), 0)
    y = drawn((3, 37), 1)
    rows = torch.arange(3)
    arguments = "generalized_jsd", x, y, torch.tensor([36, 8, 7]), (rows, rows), 1.5, torch.ones(3)
    for ours, exact in zip(in_place(*arguments), by_definition(*arguments)):
        same(ours, exact)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_of_two_tensors_takes_the_kernel_with_autograd(name, monkeypatch):
    monkeypatch.setattr(losses, "HAS_KERNELS", False)
    x = drawn((2, 3, 21), 0)
    y = drawn((2, 3, 21), 1)
    y[0, 0, 3] = -torch.inf  # what a model excludes costs as much as on the plain path
    x[1, 1, 4] = -torch.inf
    results = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(losses, "TRITON_DEVICES", devices)
        leaf = x.clone().requires_grad_()
        value, _ = losses.position_divergence(
            name, leaf, y, None, 2.0, 1.5, coefficient=DIVERGENCES[name])
        value.backward()
        results.append((value.detach(), leaf.grad))
    for ours, plain in zip(*results):
        same(ours, plain)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_number_in_and_none_out(name):
    """NaN and inf on one side, or a label that there is not, never end in a finite loss."""
    rows = torch.arange(3)
    for side in (0, 1):
        for wrong in (torch.nan, torch.inf):
            logits = [drawn((3, 9), 0), drawn((3, 9), 1)]
            logits[side][1, 4] = wrong
            labels = torch.tensor([1, 2, 3])
            ce, kd, d = in_place(name, *logits, labels, (rows, rows), 1.0)
            assert kd.isnan()
            assert ce.isnan() == (side == 0)
            assert d[1].isnan().all()
            assert d[[0, 2]].isfinite().all()
    logits = [drawn((3, 9), 0), drawn((3, 9), 1)]
    ce, _, _ = in_place(name, *logits, torch.tensor([1, 9, 2]), (rows, rows), 1.0)
    assert ce.isnan()
    excluded = torch.full((3, 9), -torch.inf)
    _, kd, _ = in_place(name, excluded, logits[1], None, (rows, rows), 1.0)
    assert kd.isnan()


def test_rows_that_nothing_reads_may_hold_anything():
    x = drawn((3, 9), 0)
    x[1] = torch.nan
    y = drawn((2, 9), 1)
    y[1] = torch.nan
    labels = torch.tensor([4, -100, 5])
    compared = torch.tensor([2]), torch.tensor([0])
    ce, kd, d = in_place("forward_kl", x, y, labels, compared, 1.0)
    assert ce.isfinite()
    assert kd.isfinite()
    assert (d[1] == 0).all()
    assert d.isfinite().all()


def test_half_precision_is_as_exact_as_the_plain_path(rounding):  # noqa: F811
    """The gradient is rounded once, where plain bfloat16 rounds too."""
    x = drawn((7, 50), 0).bfloat16()
    y = drawn((7, 50), 1).bfloat16()
    labels = torch.randint(50, (7,), generator=torch.Generator().manual_seed(2))
    rows = torch.arange(7)
    for name in ("forward_kl", "reverse_kl", "generalized_jsd"):
        arguments = labels, (rows, rows), 1.0, torch.ones(7)
        _, exact_kd, exact = by_definition(name, x, y, *arguments)
        _, kd, d = in_place(name, x, y, *arguments)
        leaf = x.clone().requires_grad_()
        plain_kd, _ = losses.position_divergence(
            name, leaf[None].float(), y[None].float(), None, coefficient=DIVERGENCES[name])
        ce, _ = losses.next_token_cross_entropy(leaf[None], labels[None])
        (FACTORS[0] * ce + FACTORS[1] * plain_kd).backward()
        assert d.dtype == torch.bfloat16
        assert (d - exact).norm() <= 2 * (leaf.grad - exact).norm()
        assert abs(kd - exact_kd) <= 2 * abs(plain_kd - exact_kd) + 1e-5 * exact_kd


# --- two vocabularies -----------------------------------------------------------------------------


class Translation:
    """Hold a few texts of a toy, with the cells of its tokenizers."""

    def __init__(self, pair, texts=TEXTS, order=1, slice_cells=4, long=2):
        toy = Toy(*pair, order)
        cut = [value[texts] if torch.is_tensor(value) else value for value in toy.ids]
        self.ids = cut
        self.shapes = toy.x[texts].shape, toy.y[texts].shape
        self.tables = toy.tables
        self.nodes = translation.list_nodes(*cut)
        self.cells = gpu_kernels.cell_tables(
            self.tables.cell_V, self.tables.cell_W, self.tables.num_cells, slice_cells, long)
        self.labels = cut[1].masked_fill(cut[3] < 0, -100)
        self.labels[0, 0] = -100

    def logits(self, seed, excluded=0.0):
        stand_in = type("Shapes", (), dict(
            x=torch.empty(self.shapes[0]), y=torch.empty(self.shapes[1]), ids=self.ids))
        return random_logits(stand_in, seed, 3, excluded)

    def in_place(self, x, y, weight=None, factors=FACTORS):
        """Return (cross-entropy, divergence, gradient); y has to be as it was."""
        d = x.flatten(0, 1).clone()
        y_rows = y.flatten(0, 1).clone()
        labels = self.labels.flatten() if factors[0] else None
        next_S, next_T = (ids.flatten() for ids in self.ids[1:3])
        ce, kd = translation.translated_in_place(
            d, y_rows, labels, next_S, next_T, self.nodes, self.tables, self.cells, factors,
            None if weight is None else weight.flatten())
        torch.testing.assert_close(y_rows, y.flatten(0, 1), rtol=0, atol=0, equal_nan=True)
        return ce, kd, d.view_as(x)

    def plain(self, x, y, weight=None, factors=FACTORS):
        """Return the same from the plain path, in the precision of x."""
        leaf = x.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "TRITON_DEVICES", ())
            patch.setattr(losses, "HAS_KERNELS", False)
            kd, _ = translation.translated(
                leaf, y, *self.ids[1:3], self.nodes, self.tables, weight_BS=weight)
            ce, _ = losses.next_token_cross_entropy(leaf, self.labels)
            (factors[0] * ce + factors[1] * kd).backward()
        return ce.detach(), kd.detach(), leaf.grad


@pytest.mark.parametrize("pair", ALL_PAIRS)
def test_translations_equal_the_plain_path(pair):
    """Values and gradient, with weights, and cells of one, few and many tokens."""
    case = Translation(pair)
    weight = torch.rand(case.ids[1].shape, generator=torch.Generator().manual_seed(1))
    for seed, weights in enumerate([None, weight]):
        if seed and pair != (COARSE, CROSSING):  # which has nodes of all kinds
            continue
        x, y = case.logits(seed)
        exact = case.plain(x.double(), y.double(), weights)
        for ours, expected in zip(case.in_place(x, y, weights), exact):
            same(ours, expected)


def test_all_kinds_of_nodes_were_compared():
    case = Translation((COARSE, CROSSING))
    nodes = case.nodes
    assert len(nodes.roots.row_S) and len(nodes.choices.root) and len(nodes.insides.row_S)
    assert nodes.count_many
    _, y = case.logits(0)
    goes = translation.before_goes_on(y.flatten(0, 1), nodes, case.tables)
    assert (goes.mass_K > 0).any()
    # what joins leave out is asked for later, and names one token that came after all
    root_E, token_E = translation._joined(nodes, case.tables)
    came_E = token_E == nodes.roots.next_T[root_E]
    asked = torch.isin(nodes.roots.row_T[root_E], nodes.choices.row_T)
    assert (came_E & asked).any()
    assert len(torch.unique(torch.stack([root_E, token_E]), dim=1)[0]) == len(root_E)


def test_tokens_that_a_model_excludes_cost_as_much_as_on_the_plain_path():
    case = Translation((COARSE, CROSSING))
    x, y = case.logits(0, excluded=0.3)
    plain = case.plain(x, y)  # float64 could tell more masses from 0
    for ours, expected in zip(case.in_place(x, y), plain):
        same(ours, expected, 1e-5)


def test_tokens_without_a_cell_are_left_out():
    case = Translation((CROSSING, COARSE))
    for table in (case.tables.cell_V, case.tables.cell_W):
        table[-1] = case.tables.num_cells
    case.cells = gpu_kernels.cell_tables(
        case.tables.cell_V, case.tables.cell_W, case.tables.num_cells, 4, 2)
    for lift in ((0, 0), (25, 25)):
        x, y = case.logits(1)
        x[..., -1] += lift[0]
        y[..., -1] += lift[1]
        exact = case.plain(x.double(), y.double())
        for ours, expected in zip(case.in_place(x, y), exact):
            same(ours, expected, 1e-5)


def test_a_translation_of_no_number_is_none():
    case = Translation((COARSE, CROSSING), TEXTS[:1])
    roots = case.nodes.roots
    joined_root, joined_token = [ids[0] for ids in translation._joined(case.nodes, case.tables)]
    places = [(0, torch.nan, 1, 2), (0, torch.inf, 1, 2), (1, torch.nan, 1, 2),
              (1, torch.inf, 1, 2), (1, torch.nan, joined_root, joined_token)]
    for side, wrong, root, token in places:
        logits = case.logits(0)
        logits[side].flatten(0, 1)[(roots.row_S, roots.row_T)[side][root], token] = wrong
        ce, kd, d = case.in_place(*logits)
        assert kd.isnan()
        assert ce.isnan() == (side == 0)
        assert d.flatten(0, 1)[roots.row_S[root]].isnan().any()


def test_a_translation_in_half_precision_is_as_exact_as_the_plain_path(rounding):  # noqa: F811
    case = Translation((COARSE, CROSSING))
    x, y = [logits.bfloat16() for logits in case.logits(0)]
    _, exact_kd, exact = case.plain(x.double(), y.double())
    _, plain_kd, plain = case.plain(x, y)
    _, kd, d = case.in_place(x, y)
    assert d.dtype == torch.bfloat16
    assert (d - exact).norm() <= 2 * (plain - exact).norm()
    assert abs(kd - exact_kd) <= 2 * abs(plain_kd - exact_kd) + 1e-5 * exact_kd


def test_a_list_has_every_token_once():
    """Whatever the sizes of the cells: none, one lane's, more than a slice has, all lanes'."""
    generator = torch.Generator().manual_seed(0)
    for num_cells, num_tokens in ((1, 9), (13, 40), (5, 0), (40, 30)):
        cell_V, cell_W = torch.randint(num_cells + 1, (2, num_tokens), generator=generator)
        tables = gpu_kernels.cell_tables(cell_V, cell_W, num_cells, 4, 3)
        assert sorted(tables.slot_C.tolist()) == list(range(num_cells + 1))
        for cell_X, cells in ((cell_V, tables.student), (cell_W, tables.teacher)):
            members = {}
            for s, (base, width) in enumerate(zip(cells.base_S.tolist(), cells.width_S.tolist())):
                for lane in range(4):
                    ids = cells.ids_E[base + lane : base + 4 * width : 4].tolist()
                    if 4 * s + lane < tables.num_short:
                        members[4 * s + lane] = [token for token in ids if token >= 0]
                    else:
                        assert set(ids) <= {-1}
            bounds = cells.long_start_K.tolist()
            for k, (start, end) in enumerate(itertools.pairwise(bounds)):
                members[tables.num_short + k] = cells.long_ids_E[start:end].tolist()
            expected = {}
            for cell in range(num_cells):
                slot = int(tables.slot_C[cell])
                expected[slot] = (cell_X == cell).nonzero().flatten().tolist()
            assert {slot: sorted(ids) for slot, ids in members.items()} == expected


# --- in tiles -------------------------------------------------------------------------------------


def built(name, pair):
    """Return the distillation loss of a run, for tokenizers that are equal or not."""
    # what compares cells or events has kernels for temperature 1
    temperature = 1.0 if name in ("piece_kl", "event_kl") else 1.5
    if name in ("gold", "projection_kl", "alm", "event_kl"):
        cfg = SimpleNamespace(projection="", temperature=temperature, uncommon_topk=50,
                              reverse_kl=False, learn_projection=False, projection_columns="all",
                              alm_mode="binary_kl")
        return loss_table.LOSSES[name].build(cfg, pair, "cpu")
    divergence, flags = {
        "piece_kl": (losses.forward_kl, {}),
        "jsd": (losses.generalized_jsd, {"beta": 0.3}),
    }[name]
    parameters = dict(temperature=temperature, top_k=0, support="teacher", **flags)
    if name == "piece_kl":
        return loss_table.build_translated(pair, "cpu", divergence, parameters)
    return loss_table.build_per_position(divergence, parameters)


@pytest.mark.parametrize(
    "name", ["piece_kl", "jsd", "text", "gold", "projection_kl", "alm", "event_kl"])
def test_a_micro_batch_equals_the_plain_path(name, tokenizers, tables, texts, monkeypatch):
    """Over several tiles, some without a chunk, with a padded head of any kind, and a rollout.

    On a GPU nothing on this way waits for the device, and all sums have a fixed order.
    """
    monkeypatch.setattr(losses, "HAS_KERNELS", False)
    executor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
    monkeypatch.setattr(executor, "__call__", without_modes(executor.__call__))
    monkeypatch.setattr(losses, "_scale_rows", scale_rows)
    same_tokenizer = name in ("jsd", "text")
    if same_tokenizer:
        tokenizers = tokenizers[0], tokenizers[0]
        tables = tables[0], tables[0]
    pair = Pair.of(*tokenizers, tables=tables)
    student, teacher = [TextEncoder(*side, 40) for side in zip(tokenizers, tables)]
    loss = None if name == "text" else built(name, pair)
    teachers = []
    if loss:
        teachers.append(PairOptions(teacher, loss.spelling, same_tokenizer=same_tokenizer))
    collator = Collator(student, teachers, tile_mib=0.03, sub_tiles=KERNEL_SUB_TILES)
    batch = collator([text[:12] for text in texts[:2]])
    plan = batch.teachers[0].tiles if loss else batch.student.tiles
    plan = [without_chunks(plan[0], loss), *plan[1:]]
    assert len(plan) > 1
    sizes = [len(table) for table in tables]
    hidden = [drawn((1000, 8), 5, 1.0), drawn((1000, 8), 6, 1.0)]
    # rows beyond the tokenizer are larger than all that count
    weights = [drawn((size + 3, 8), 7) for size in sizes]
    for size, weight in zip(sizes, weights):
        weight[size:] *= 100
    heads = [Head(weight, vocab=size) for size, weight in zip(sizes, weights)]
    kinds = [{}, {"scale": 0.5, "softcap": 4.0, "bias_V": drawn((sizes[0] + 3,), 8)}]
    for kind in kinds if same_tokenizer else kinds[:1]:
        results = []
        for devices in (("cpu",), ()):
            monkeypatch.setattr(losses, "TRITON_DEVICES", devices)
            monkeypatch.setattr(losses, "ORDERED_DEVICES", () if devices else ("cpu",))
            loss_fn = None if loss is None else built(name, pair).loss_fn
            head = heads[0]._replace(**kind)
            leaves = [hidden[0].clone().requires_grad_(),
                      head.weight_VH.clone().requires_grad_()]
            source = HiddenLogits(leaves[0], head._replace(weight_VH=leaves[1]))
            teacher_logits = HiddenLogits(hidden[1], heads[1]) if loss else None
            with NoWaiting() if devices else nullcontext():
                value, sums = pair_loss(source, teacher_logits, loss_fn, plan, FACTORS, ())
                found = torch.autograd.grad(value, leaves)
            results.append([value.detach(), sums, *found])
        for ours, plain in zip(*results):
            same(ours, plain, 5e-6)
        assert (results[0][3][sizes[0]:] == 0).all()


def scale_rows(d_NV, row_R, factor_R):
    """Do what `losses._scale_rows` does on a GPU; on a CPU it looks at the factors."""
    return d_NV * factor_R.new_zeros(len(d_NV)).index_copy_(0, row_R, factor_R)[:, None]


def without_chunks(tile, loss):
    """Return a tile that a rollout wrote, and whose first sub-tile has no term of the loss."""
    sub_tiles = list(tile.sub_tiles)
    first = sub_tiles[0]
    if loss:
        none = [torch.full_like(ids, -1) for ids in (first.student_chunk, first.teacher_chunk)]
        chunks = losses.find_chunks(none[0][None], none[1][None])
        terms = chunks
        if isinstance(loss.spelling, losses.Spelling):
            terms = losses.event_terms(
                first.student_labels[None], first.teacher_labels[None], none[0][None],
                none[1][None], loss.spelling)
        elif loss.spelling is not None:
            follows = torch.ones_like(first.teacher_labels, dtype=torch.bool)
            terms = translation.nodes_of_chunks(
                chunks, first.student_labels, first.student_labels, first.teacher_labels,
                loss.spelling, torch.full_like(first.teacher_labels, -1), follows)
        sub_tiles[0] = first._replace(
            student_chunk=none[0], teacher_chunk=none[1], terms=terms)
        sub_tiles.append(sub_tiles.pop()._replace(on_policy=True))
    return tile._replace(sub_tiles=tuple(sub_tiles))


def test_losses_without_a_kernel_stay_on_the_plain_path():
    x = drawn((4, 9), 0)
    labels = torch.tensor([1, 2, 3, 4])
    sub_tile = SubTile(slice(0, 4), slice(0, 4), labels, labels, labels, labels)

    def plain(student, teacher, sub_tile):
        raise AssertionError("called with autograd alone")

    assert PairLoss(plain, [1.0, 1.0]).overwrite(x.clone(), x, sub_tile, FACTORS) is None
    double = x.double()
    assert PairLoss(None, [1.0, 0.0]).overwrite(double, None, sub_tile, FACTORS) is None
    for divergence, flags in ((losses.adaptive_kl, {}), (losses.forward_kl, {"top_k": 3})):
        parameters = dict(temperature=1.0, top_k=0, support="teacher") | flags
        loss = loss_table.build_per_position(divergence, parameters)
        assert not hasattr(loss.loss_fn, "overwrite")


# --- what a GPU would launch, read and write ------------------------------------------------------

V = 128_256
W = 151_936
C = 109_566  # cells of llama3 x qwen2, all of which have tokens on both sides
LOGIT = 2  # bytes
MB = 10**6


def matmul_bytes():
    """Return what three matmuls read and write of the logits of one position on either side."""
    return LOGIT * (V + W + 2 * V)


def test_a_divergence_takes_one_launch_and_three_passes(traffic):  # noqa: F811
    """At most 4 MB of logits a position, counted as if no cache held anything."""
    rows, tokens = 3, 37
    x, y = [drawn((rows, tokens), seed).half() for seed in (0, 1)]
    labels = torch.tensor([1, 2, -100])
    every = torch.arange(rows)
    in_place("forward_kl", x, y, labels, (every, every), 1.0)
    assert launches(traffic) == {"divergence": 1}
    assert traffic["divergence", "load", "fp16"] == 3 * 2 * rows * tokens
    assert traffic["divergence", "store", "fp16"] == rows * tokens
    per_position = LOGIT * (3 * 2 * V + V) + LOGIT * (2 * V + 2 * V)
    assert per_position <= 4 * MB


def test_the_roots_of_a_translation_take_three_launches(traffic):  # noqa: F811
    """At most 4 MB a position, counted as if no cache held anything.

    Tables of tokens are the same for all rows, and not counted.
    """
    case = Translation((COARSE, CROSSING))
    x, y = [logits.half() for logits in case.logits(0)]
    case.in_place(x, y)
    assert launches(traffic) == {"cell_totals": 1, "compare_cells": 1, "cells_gradient": 1}

    roots = len(case.nodes.roots.row_S)
    tables = case.tables
    student = x[..., 0].numel() * x.shape[-1]
    teacher = y[..., 0].numel() * y.shape[-1]
    scalars = 8 * (x[..., 0].numel() + y[..., 0].numel())
    student_in_cells = roots * int((tables.cell_V < tables.num_cells).sum())
    teacher_in_cells = roots * int((tables.cell_W < tables.num_cells).sum())
    cells = roots * tables.num_cells
    goes = translation.before_goes_on(y.flatten(0, 1), case.nodes, tables)
    added = len(goes.node_E)
    assert traffic["cell_totals", "load", "fp16"] == student + teacher
    assert traffic["cell_totals", "store", "fp32"] <= scalars
    assert traffic["compare_cells", "load", "fp16"] == student_in_cells + teacher_in_cells
    assert traffic["compare_cells", "load", "uint8"] == cells
    assert 0 < traffic["compare_cells", "load", "fp32"] <= added + scalars
    assert traffic["compare_cells", "store", "fp32"] <= cells + scalars
    assert traffic["cells_gradient", "load", "fp16"] == student
    assert traffic["cells_gradient", "store", "fp16"] == student
    assert traffic["cells_gradient", "load", "fp32"] <= student_in_cells + scalars

    # of each cell a byte, written and read, says whether something was added to it
    per_position = LOGIT * (2 * W + 4 * V) + (2 + 4) * C + 4 * V + matmul_bytes()
    assert per_position <= 4 * MB


# --- compiled ahead of time -----------------------------------------------------------------------

def test_triton_compiles_every_kernel_for_sm_90_without_atomics(tmp_path):
    kernels = {"divergence": [0, 1, 2, 3], "cell_totals": [0], "compare_cells": [0],
               "cells_gradient": [0]}
    of_kernels = compiled(tmp_path, "gpu_kernels", kernels)
    assert len(of_kernels) == 7
    for name, ptx in of_kernels.items():
        assert ".target sm_90" in ptx, name
        assert not re.search(r"\b(atom|red)\.", ptx), name
