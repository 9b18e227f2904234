"""gpu_chunks.py under Triton's interpreter, on a CPU: against float64, and what it reads."""


import re

import pytest
import torch

from cases import Case, common_of
from interpreted import (  # noqa: F401
    compiled,
    drawn,
    launches,
    on_cpu,
    rounding,
    same,
    traffic,
)
from isogloss import losses

pytest.importorskip("triton", reason="triton is not installed")
gpu_chunks = pytest.importorskip("gpu_chunks")
gpu_kernels = pytest.importorskip("gpu_kernels")

ALM_MODES = (
    "binary_kl", "binary_kl_reverse", "binary_ce", "temperature_limit", "squared", "absolute"
)
FACTORS = 0.7, 1.3  # of cross-entropy and distillation loss


class Rows:
    """A batch of one sample: chunks of all shapes, rows without one, rows without a label."""

    def __init__(self, seed, sizes=(37, 53)):
        case = Case(seed, samples=4, length=14, sizes=sizes)
        self.case = case
        self.x, self.y = [drawn((side[..., 0].numel(), size), seed + number)
                          for number, (side, size) in enumerate(zip((case.x, case.y), sizes))]
        # of all samples, in one row
        self.chunk = []
        for chunk_BX in case.chunk:
            numbers = torch.where(chunk_BX >= 0, chunk_BX + 100 * torch.arange(4)[:, None], -1)
            self.chunk.append(numbers.reshape(1, -1))
        self.chunk[0][0, :2] = -1
        self.chunks = losses.find_chunks(*self.chunk)
        self.next = [next_BX.flatten() for next_BX in case.next]
        self.labels = torch.where(self.chunk[0][0] >= 0, case.next[0].flatten(), -100)
        self.labels[0] = 5
        self.labels[4] = -100
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.rand(len(self.x), generator=generator)
        self.common = losses.TokenIds(*common_of(case))
        self.others = losses.TokenIds(*[losses.other_tokens(ids, size)
                                        for ids, size in zip(self.common, sizes)])
        assert len(self.common.student) and len(self.others.student)

    def shapes(self):
        return set(zip(self.chunks.count_S.tolist(), self.chunks.count_T.tolist()))


def gold(rows, x, y, in_place, tau=1.0, weight=None, labels=True, **options):
    labels = rows.labels if labels else None
    if in_place:
        return losses.gold_in_place(
            x, y, labels, rows.chunks, rows.common, rows.others, FACTORS, weight, tau, **options)
    value, _ = losses.gold(
        x[None], y[None], *rows.chunk, *rows.common, tau, weight_BS=None if weight is None else
        weight[None], **options)
    return value


def projection(rows, x, y, in_place, tau=1.0, weight=None, labels=True, kept=None, **options):
    labels = rows.labels if labels else None
    tables = rows.case.indices, rows.case.likelihoods.float()
    if in_place:
        entries = losses.projection_entries(*tables, y.shape[1], kept)
        for_kernels = gpu_chunks.projection_tables(*entries, x.shape[1], tables[0].shape[1])
        return losses.projection_in_place(
            x, y, labels, rows.chunks, for_kernels, kept, FACTORS, weight, tau, **options)
    value, _ = losses.projection_kl(
        x[None], y[None], *rows.chunk, *tables, kept, tau, weight_BS=None if weight is None else
        weight[None], **options)
    return value


def alm(rows, x, y, in_place, tau=1.0, weight=None, labels=True, **options):
    labels = rows.labels if labels else None
    if in_place:
        return losses.alm_in_place(
            x, y, labels, *rows.next, rows.chunks, FACTORS, weight, tau, **options)
    value, _ = losses.alm(
        x[None], y[None], rows.next[0][None], rows.next[1][None], *rows.chunk, tau,
        weight_BS=None if weight is None else weight[None], **options)
    return value


def events(rows, x, y, in_place, tau=1.0, weight=None, labels=True):
    labels = rows.labels if labels else None
    spelling = rows.case.spelling
    next_S, next_T = [ids[None] for ids in rows.next]
    terms = losses.event_terms(next_S, next_T, *rows.chunk, spelling)
    if in_place:
        cells = gpu_kernels.cell_tables(
            spelling.event_V, spelling.event_W, spelling.num_events, 4, 2)
        return losses.event_in_place(
            x, y, labels, *rows.next, terms, spelling, cells, FACTORS, weight)
    value, _ = losses.event_kl(
        x[None], y[None], next_S, next_T, terms, spelling, tau,
        weight_BS=None if weight is None else weight[None])
    return value


def in_place(loss, rows, x, y, **options):
    """Return (cross-entropy, loss, gradient); y stays as it was."""
    d = x.clone()
    before = y.clone()
    ce, kd = loss(rows, d, y, True, **options)
    torch.testing.assert_close(y, before, rtol=0, atol=0, equal_nan=True)
    return ce, kd, d


def plain(loss, rows, x, y, labels=True, **options):
    """Return the same from the plain path, in the precision of x."""
    leaf = x.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "TRITON_DEVICES", ())
        patch.setattr(losses, "HAS_KERNELS", False)
        kd = loss(rows, leaf, y, False, **options)
        ce, _ = losses.next_token_cross_entropy(leaf[None], rows.labels[None])
        if not labels:
            ce = ce * 0
        (FACTORS[0] * ce + FACTORS[1] * kd).backward()
    return ce.detach(), kd.detach(), leaf.grad


LOSSES = {"gold": gold, "projection": projection, "alm": alm, "events": events}
KEPT = torch.tensor([0, 2, 3, 7, 11, 30, 31, 50])
ALM_CASES = [("alm", {"mode": mode}) for mode in ALM_MODES]
CASES = [("gold", {}), ("gold", {"reverse": True}), ("gold", {"uncommon_topk": 3}),
         ("projection", {}), ("projection", {"reverse": True}), ("projection", {"kept": KEPT}),
         *ALM_CASES, ("events", {})]


def test_events_of_all_kinds_are_compared():
    rows = Rows(36)
    next_S, next_T = [ids[None] for ids in rows.next]
    terms = losses.event_terms(next_S, next_T, *rows.chunk, rows.case.spelling)
    assert len(terms.inside_teacher.level) and len(terms.inside_student.level) and terms.count_many
    in_student = losses._continuations(
        terms.inside_student, rows.case.spelling.order_V, rows.case.spelling.pieces_V)
    assert not in_student.goes_on_G.all()
    x = rows.x.index_select(0, terms.inside_student.coarse_row)
    y = rows.y.index_select(0, terms.inside_student.fine_row)
    inside_N = losses._inside_student_kl(
        x, y, terms.inside_student, rows.case.spelling, 1.0)
    assert (inside_N > 0).all()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_chunks_equal_the_plain_path_in_float64(name, options, monkeypatch):
    """With odd sizes, weights and temperatures; read in one part and in several."""
    rows = Rows(36)
    shapes = rows.shapes()
    assert {(1, 1), (1, 2), (2, 1), (2, 2)} <= shapes
    for event_X in rows.case.spelling.event_V, rows.case.spelling.event_W:
        event_X[-1] = -1  # of tokens that are not alone in their event
    arguments = LOSSES[name], rows, rows.x, rows.y
    softer = 1.0 if name == "events" else 2.0  # its kernels know no other temperature
    for block, tau, weight, labels in ((4096, 1.0, None, True), (16, softer, rows.weight, False)):
        monkeypatch.setattr(gpu_kernels, "BLOCK", block)
        monkeypatch.setattr(gpu_chunks, "SLICE", min(block, 512))
        more = options | dict(tau=tau, weight=weight, labels=labels)
        ours = in_place(*arguments, **more)
        exact = plain(arguments[0], rows, rows.x.double(), rows.y.double(), **more)
        for one, other in zip(ours, exact):
            same(one, other)


@pytest.mark.parametrize("name", LOSSES)
def test_no_number_in_and_none_out(name):
    rows = Rows(2)
    chunk = int((rows.chunks.count_S > 1).nonzero()[0])
    places = (rows.chunks.first_S[chunk] + 1, rows.chunks.first_T[chunk])
    of_chunk = rows.chunks.row_S[rows.chunks.of_S == chunk]
    others = torch.ones(len(rows.x), dtype=torch.bool)
    others[of_chunk] = False
    for side, row in enumerate(places):
        for wrong in (torch.nan, torch.inf):
            logits = [rows.x.clone(), rows.y.clone()]
            logits[side][row, 4] = wrong
            ce, kd, d = in_place(LOSSES[name], rows, *logits)
            assert kd.isnan()
            assert ce.isnan() == (side == 0)
            assert d[of_chunk].isnan().any()
            assert d[others].isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_rows_that_nothing_reads_may_hold_anything(name):
    rows = Rows(3)
    x = rows.x.clone()
    x[1] = torch.nan
    y = rows.y.clone()
    y[rows.chunk[1][0] < 0] = torch.nan
    rows.labels[1] = -100
    ce, kd, d = in_place(LOSSES[name], rows, x, y)
    assert ce.isfinite() and kd.isfinite() and d.isfinite().all()
    assert (d[1] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_chunk_the_text_is_left(name):
    rows = Rows(4)
    none = [torch.full_like(chunk, -1) for chunk in rows.chunk]
    rows.chunk = none
    rows.chunks = losses.find_chunks(*none)
    ce, kd, d = in_place(LOSSES[name], rows, rows.x, rows.y)
    exact_ce, _, exact = plain(lambda rows, x, *_, **__: x.sum() * 0, rows, rows.x.double(), None)
    assert kd == 0
    same(ce, exact_ce)
    same(d, exact)


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_as_exact_as_the_plain_path(name, rounding):  # noqa: F811
    rows = Rows(5)
    x, y = rows.x.bfloat16(), rows.y.bfloat16()
    loss = LOSSES[name]
    _, exact_kd, exact = plain(loss, rows, x.double(), y.double())
    _, plain_kd, plain_d = plain(loss, rows, x, y)
    _, kd, d = in_place(loss, rows, x, y)
    assert d.dtype == torch.bfloat16
    assert (d - exact).norm() <= 2 * (plain_d - exact).norm()
    assert abs(kd - exact_kd) <= 2 * abs(plain_kd - exact_kd) + 1e-5 * exact_kd


# --- what a GPU would launch, read and write ------------------------------------------------------

V = 128_256
W = 151_936
COMMON = 109_000  # tokens of llama3 and qwen2, about
KEPT_COLUMNS = 8192  # --projection_topk
ENTRIES = 154_235  # of the projection of llama3 to qwen2, in as many teacher columns
REACHED = 109_829
EVENTS = 109_566
LOGIT = 2  # bytes
MB = 10**6


def matmul_bytes(teacher_columns):
    """Return what the matmuls read and write of the logits of one position on either side."""
    return LOGIT * (V + teacher_columns + 2 * V)


def single_rows(rows):
    """Cut the rows into chunks of one row on either side."""
    count = min(len(rows.x), len(rows.y), 5)
    rows.x = rows.x[:count].half()
    rows.y = rows.y[:count].half()
    rows.labels = rows.labels[:count]
    rows.next = [ids[:count] for ids in rows.next]
    number = torch.arange(count)[None]
    rows.chunk = [number, number]
    rows.chunks = losses.find_chunks(number, number)
    return count


def test_gold_takes_three_launches(traffic):  # noqa: F811
    """A row that its program has just read counts once.  What sorts the others is not counted."""
    rows = Rows(6)
    count = single_rows(rows)
    num_V, num_W = rows.x.shape[1], rows.y.shape[1]
    A, B, K = len(rows.others.student), len(rows.others.teacher), len(rows.common.student)
    in_place(gold, rows, rows.x, rows.y)
    assert launches(traffic) == {"row_totals": 1, "common_masses": 1, "common_gradient": 1}
    scalars = 20 * count
    assert traffic["row_totals", "load", "fp16"] == count * (num_V + num_W)
    assert traffic["common_masses", "load", "fp16"] == count * (num_V + num_W)
    assert traffic["common_masses", "store", "fp32"] <= count * (A + B) + scalars
    assert traffic["common_gradient", "load", "fp16"] == count * (2 * num_V + K)
    assert traffic["common_gradient", "store", "fp16"] == count * num_V
    assert traffic["common_gradient", "load", "fp32"] <= count * 2 * A + 10 * scalars

    A, B = V - COMMON, W - COMMON
    passes = LOGIT * (2 * (V + W) + V + COMMON + V) + 4 * (A + B + A)
    again = LOGIT * V + 4 * A
    assert passes + again + matmul_bytes(W) <= 4 * MB


@pytest.mark.parametrize("kept", [KEPT, None])
def test_projection_takes_three_launches(kept, traffic):  # noqa: F811
    """Of the teacher the kept columns alone are computed.  Tables of tokens are not counted."""
    rows = Rows(6)
    count = single_rows(rows)
    if kept is not None:
        rows.y = rows.y[:, kept]
    tables = rows.case.indices, rows.case.likelihoods.float()
    entries = losses.projection_entries(*tables, 53, kept)
    for_kernels = gpu_chunks.projection_tables(*entries, 37, tables[0].shape[1])
    losses.projection_in_place(
        rows.x, rows.y, rows.labels, rows.chunks, for_kernels, None, FACTORS)
    assert launches(traffic) == {"row_totals": 1, "projected": 1, "projected_gradient": 1}
    num_V, K, E = 37, rows.y.shape[1], len(entries.row_E)
    reached = len(entries.column_E.unique())
    assert reached < K
    scalars = 20 * count
    assert traffic["row_totals", "load", "fp16"] == count * (num_V + K)
    assert traffic["projected", "load", "fp16"] == count * (E + K)
    assert traffic["projected", "store", "fp32"] <= count * reached + scalars
    tables_of_projected = 2 * count * E  # weights
    assert traffic["projected", "load", "fp32"] <= tables_of_projected + scalars
    assert traffic["projected_gradient", "load", "fp16"] == count * num_V
    assert traffic["projected_gradient", "store", "fp16"] == count * num_V
    assert traffic["projected_gradient", "load", "fp32"] <= 2 * count * E + scalars

    # no row is read twice by one program, so no cache is counted on
    # at most as if the kept columns had all entries but one of each other column
    entries_of_kept = ENTRIES - (REACHED - KEPT_COLUMNS)
    assert projection_bytes(KEPT_COLUMNS, entries_of_kept, KEPT_COLUMNS) <= 2 * MB
    assert projection_bytes(W, ENTRIES, REACHED) <= 4 * MB


def projection_bytes(K, E, reached):
    """Return the bytes of a position: K columns, E entries in them, of so many columns."""
    totals = LOGIT * (V + K)
    compared = LOGIT * (E + K) + 4 * reached
    gradient = 4 * E + LOGIT * (V + V)
    return totals + compared + gradient + matmul_bytes(K)


def test_alm_takes_two_launches(traffic):  # noqa: F811
    rows = Rows(6)
    count = single_rows(rows)
    in_place(alm, rows, rows.x, rows.y)
    assert launches(traffic) == {"row_totals": 1, "tokens_gradient": 1}
    num_V, num_W = rows.x.shape[1], rows.y.shape[1]
    assert traffic["row_totals", "load", "fp16"] == count * (num_V + num_W)
    assert traffic["tokens_gradient", "load", "fp16"] == count * num_V
    assert traffic["tokens_gradient", "store", "fp16"] == count * num_V
    assert LOGIT * (V + W + V + V) + matmul_bytes(W) <= 2.5 * MB


def test_events_take_three_launches(traffic):  # noqa: F811
    """As the roots of a translation, but for what is added there; see tests/test_gpu_kernels.py."""
    rows = Rows(6)
    count = single_rows(rows)
    in_place(events, rows, rows.x, rows.y)
    assert launches(traffic) == {"cell_totals": 1, "compare_cells": 1, "cells_gradient": 1}
    spelling = rows.case.spelling
    in_events_V = count * int((spelling.event_V >= 0).sum())
    in_events_W = count * int((spelling.event_W >= 0).sum())
    scalars = 20 * count
    assert traffic["compare_cells", "load", "fp16"] == in_events_V + in_events_W
    assert traffic["compare_cells", "load", "uint8"] == 0
    assert traffic["compare_cells", "load", "fp32"] <= scalars
    assert traffic["compare_cells", "store", "fp32"] <= count * spelling.num_events + scalars
    assert LOGIT * (2 * W + 4 * V) + 4 * (EVENTS + V) + matmul_bytes(W) <= 4 * MB


def test_triton_compiles_every_kernel_for_sm_90_without_atomics(tmp_path):
    kernels = {"row_totals": [0], "common_masses": [0, 1], "common_gradient": [0, 1],
               "projected": [0, 1], "projected_gradient": [0], "tokens_gradient": [0]}
    of_kernels = compiled(tmp_path, "gpu_chunks", kernels)
    assert len(of_kernels) == 9
    for name, ptx in of_kernels.items():
        assert ".target sm_90" in ptx, name
        assert not re.search(r"\b(atom|red)\.", ptx), name
