"""Compute losses of losses.py that compare chunks on a GPU, in place of the logits.

A chunk's distribution is the mean of the softmax of its rows.  Three launches for each loss, the
first of which, `row_totals`, they share:

- `alm`, which reads the realized tokens alone: `tokens_gradient_`, and no third one.
- `gold`: `common_masses` compares the common tokens and adds up the others, whose sorted
  probabilities torch compares; `common_gradient_`.
- `projection_kl`: `projected` maps the student's mass into the teacher's columns and compares;
  `projected_gradient_`.

Cross-entropy joins in.  A program has a chunk, or a row, so there are no atomics and the order of
additions is fixed.  As of gpu_kernels.py, a GPU has not run them yet.

Shapes: N student rows, M teacher rows; V, W vocabularies; C chunks; K common tokens or kept
columns; A, B other tokens of the student and of the teacher; E entries of a projection.

Needs torch, triton and gpu_kernels.py.  Copy both beside losses.py, which takes them for CUDA
tensors by itself.  License: Apache-2.0 (see LICENSE).  Tests: tests/test_gpu_chunks.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from .gpu_kernels import (
        NUM_WARPS,
        SLICE,
        TINY,
        add_lanes,
        block_of,
        cross_entropy_slope,
        join_lanes,
        load_logits,
        row_sums,
    )
except ImportError:  # copied beside it, not into a package
    from gpu_kernels import (
        NUM_WARPS,
        SLICE,
        TINY,
        add_lanes,
        block_of,
        cross_entropy_slope,
        join_lanes,
        load_logits,
        row_sums,
    )

LARGEST_RATIO = tl.constexpr(4.6e34)  # leaves room for a factor, see `losses._clamp_ratio_`
TINY_MASS = tl.constexpr(1e-30)  # as in losses.py
EPSILON = tl.constexpr(1e-10)  # as in losses.py


class ChunkRows(NamedTuple):
    """List the rows of chunks, on both sides.

    row_S, row_T: int64, all rows that have a chunk, chunk by chunk.
    start_S, start_T: (C + 1,) int64, where each chunk begins in these lists, and their ends.
    chunk_N: (N,) int64, the chunk of every student row, -1 for none.
    """

    row_S: Tensor
    row_T: Tensor
    start_S: Tensor
    start_T: Tensor
    chunk_N: Tensor

    @property
    def num_chunks(self) -> int:
        return len(self.start_S) - 1

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.row_S, self.row_T, self.start_S, self.start_T


def chunk_rows(
    row_S: Tensor, of_S: Tensor, row_T: Tensor, of_T: Tensor, num_chunks: int, num_rows: int
) -> ChunkRows:
    """List the rows of chunks; arguments as in `losses.Chunks`, and N."""
    number_C = torch.arange(num_chunks + 1, device=row_S.device)
    chunk_N = torch.full((num_rows,), -1, device=row_S.device).index_copy_(0, row_S, of_S)
    return ChunkRows(
        row_S, row_T, torch.searchsorted(of_S, number_C), torch.searchsorted(of_T, number_C),
        chunk_N,
    )


# --- logsumexp of all rows ------------------------------------------------------------------------


@triton.jit
def _listed_sums(row_ptr, ids_ptr, K, scale, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return maximum and sum of exp(scale (x - maximum)) of the listed columns of a row."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        column = start + lanes
        inside = column < K
        if HAS_IDS:
            column = tl.load(ids_ptr + column, mask=inside, other=0)
        top, total = add_lanes(top, total, load_logits(row_ptr, column, inside), scale)
    return join_lanes(top, total, scale)


@triton.jit
def _projected_row_sums(row_ptr, mass_ptr, V, scale, BLOCK: tl.constexpr):
    """Return what `row_sums` returns, then the sum of mass[v] exp(scale (x[v] - maximum))."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    plain_top = top
    total = tl.zeros([BLOCK], tl.float32)
    plain_total = total
    kept_total = total
    for start in range(0, V, BLOCK):
        columns = start + lanes
        x = load_logits(row_ptr, columns, columns < V)
        mass = tl.load(mass_ptr + columns, mask=columns < V, other=0.0)
        # the same maximum for both sums
        _, kept_total = add_lanes(top, kept_total, x, scale, mass)
        top, total = add_lanes(top, total, x, scale)
        plain_top, plain_total = add_lanes(plain_top, plain_total, x, 1.0)
    _, kept_total = join_lanes(top, kept_total, scale)
    row_top, total = join_lanes(top, total, scale)
    _, plain_total = join_lanes(plain_top, plain_total, 1.0)
    return row_top, total, plain_total, kept_total


@triton.jit
def _row_totals_kernel(
    x_ptr, x_stride, N, V, y_ptr, y_stride, K, kept_ptr, mass_ptr,
    log_total_ptr, plain_log_total_ptr, kept_mass_ptr, teacher_log_total_ptr, scale,
    HAS_KEPT: tl.constexpr, HAS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one row of `row_totals`: those of the student, then those of the teacher."""
    n = tl.program_id(0)
    if n < N:
        row = x_ptr + n.to(tl.int64) * x_stride
        if HAS_MASS:
            top, total, plain_total, kept = _projected_row_sums(row, mass_ptr, V, scale, BLOCK)
            tl.store(kept_mass_ptr + n, kept / total)
        else:
            top, total, plain_total = row_sums(row, V, scale, BLOCK)
        tl.store(log_total_ptr + n, top * scale + tl.log(total))
        tl.store(plain_log_total_ptr + n, top + tl.log(plain_total))
    else:
        m = n - N
        row = y_ptr + m.to(tl.int64) * y_stride
        top, total = _listed_sums(row, kept_ptr, K, scale, HAS_KEPT, BLOCK)
        tl.store(teacher_log_total_ptr + m, top * scale + tl.log(total))


class RowTotals(NamedTuple):
    """Hold logsumexp(x / tau), logsumexp(x) (N,), and logsumexp(y / tau) (M,).

    kept_mass_N: mass that a projection maps to a kept column; 0 without a projection.
    """

    log_total_N: Tensor
    plain_log_total_N: Tensor
    kept_mass_N: Tensor
    teacher_log_total_M: Tensor


def row_totals(
    x_NV: Tensor, y_MW: Tensor, temperature: float, kept_K: Tensor | None = None,
    mass_V: Tensor | None = None,
) -> RowTotals:
    """Compute the logsumexp of all rows of both models, of the teacher over the kept columns.

    Args:
        x_NV, y_MW: logits, of a dtype in `gpu_kernels.DTYPES`; the last axis is contiguous.
        temperature: tau, > 0.
        kept_K: int64 columns of y; None: all.
        mass_V: see `ProjectionTables`; None: there is no projection.
    """
    N, V = x_NV.shape
    M, W = y_MW.shape
    of_student_3N = x_NV.new_zeros(3, N, dtype=torch.float32)
    totals = RowTotals(*of_student_3N, of_student_3N.new_zeros(M))
    if N + M:
        K = W if kept_K is None else len(kept_K)
        with torch.cuda.device_of(x_NV):  # Triton launches on the current device
            _row_totals_kernel[(N + M,)](
                x_NV, x_NV.stride(0), N, V, y_MW, y_MW.stride(0), K,
                y_MW if kept_K is None else kept_K, of_student_3N if mass_V is None else mass_V,
                *totals, 1 / temperature, HAS_KEPT=kept_K is not None, HAS_MASS=mass_V is not None,
                BLOCK=block_of(max(V, K)), num_warps=NUM_WARPS,
            )
    return totals


@triton.jit
def _bounds(start_ptr, c):
    """Return where the rows of a chunk begin and end in the list of rows."""
    return tl.load(start_ptr + c), tl.load(start_ptr + c + 1)


@triton.jit
def _chunk_mass(
    logits_ptr, stride, row_ptr, first, end, log_total_ptr, columns, inside, scale, shift,
    BLOCK: tl.constexpr,
):
    """Return the mean of exp(shift) softmax(logits / tau) over the rows of a chunk."""
    mass = tl.zeros([BLOCK], tl.float32)
    for i in range(first, end):
        row = tl.load(row_ptr + i)
        x = load_logits(logits_ptr + row * stride, columns, inside)
        mass += tl.exp(x * scale - tl.load(log_total_ptr + row) + shift)
    return mass / (end - first)


# --- alm ------------------------------------------------------------------------------------------


@triton.jit
def _tokens_gradient_kernel(
    x_ptr, x_stride, V, token_N_ptr, factor_ptr, log_total_ptr, label_ptr, ce_factor,
    HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one block of one row of `tokens_gradient_`."""
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x_row = x_ptr + n * x_stride
    x = load_logits(x_row, columns, inside)
    log_total = tl.load(log_total_ptr + n)
    token = tl.load(token_N_ptr + n)
    # log p falls as cross-entropy rises
    d = cross_entropy_slope(x, columns, token, log_total, -tl.load(factor_ptr + n))
    if HAS_LABELS:
        d += cross_entropy_slope(x, columns, tl.load(label_ptr + n), log_total, ce_factor)
    tl.store(x_row + columns, d.to(x_ptr.dtype.element_ty), mask=inside)


def tokens_gradient_(
    x_NV: Tensor, token_N: Tensor, factor_N: Tensor, log_total_N: Tensor, labels_N: Tensor | None,
    ce_factor: float,
) -> None:
    """Write over x the gradient of

        sum over n of factor_N[n] log softmax(x[n])[token_N[n]] + ce_factor CE[n]

    Args:
        x_NV: logits, of a dtype in `gpu_kernels.DTYPES`; the last axis is contiguous.
        token_N: (N,) int64, negative for none.
        factor_N: (N,) float32; log_total_N: (N,) float32 logsumexp(x).
        labels_N: (N,) int64, the next tokens, negative for none; None: no cross-entropy.
    """
    N, V = x_NV.shape
    if not N:
        return
    block = block_of(V)
    with torch.cuda.device_of(x_NV):
        _tokens_gradient_kernel[(N, triton.cdiv(V, block))](
            x_NV, x_NV.stride(0), V, token_N, factor_N, log_total_N,
            token_N if labels_N is None else labels_N, ce_factor,
            HAS_LABELS=labels_N is not None, BLOCK=block, num_warps=NUM_WARPS,
        )


# --- gold -----------------------------------------------------------------------------------------


@triton.jit
def _mass_kl(p, q, shift, REVERSE: tl.constexpr):
    """Return q log(q / p), and its derivative by p exp(shift), which p is; see losses._mass_kl."""
    # NaN is not below, and stays
    p = tl.where(p < TINY, TINY, p)
    q = tl.where(q < TINY, TINY, q)
    if REVERSE:
        log_ratio = tl.log(p / q)
        value = p * log_ratio
        slope = log_ratio + 1
    else:
        ratio = q / p
        ratio = tl.where(ratio < TINY, TINY, ratio)
        ratio = tl.where(ratio > LARGEST_RATIO, LARGEST_RATIO, ratio)
        value = q * (tl.log(ratio) + shift)
        slope = -ratio
    return value, slope


@triton.jit
def _compare_common(
    x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, first_S, end_S, first_T, end_T,
    log_total_ptr, teacher_log_total_ptr, common_V_ptr, common_W_ptr, places, inside, scale, shift,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the student's ids of some common tokens, their masses, and `_mass_kl` of these."""
    v = tl.load(common_V_ptr + places, mask=inside, other=0)
    w = tl.load(common_W_ptr + places, mask=inside, other=0)
    p = _chunk_mass(
        x_ptr, x_stride, row_S_ptr, first_S, end_S, log_total_ptr, v, inside, scale, shift, BLOCK
    )
    q = _chunk_mass(
        y_ptr, y_stride, row_T_ptr, first_T, end_T, teacher_log_total_ptr, w, inside, scale, 0.0,
        BLOCK,
    )
    value, slope = _mass_kl(p, q, shift, REVERSE)
    return v, p, value, slope


@triton.jit
def _other_masses(
    logits_ptr, stride, row_ptr, first, end, log_total_ptr, ids_ptr, num, out_ptr, scale, shift,
    unshift, BLOCK: tl.constexpr,
):
    """Write the mass of the other tokens, without the shift; return their sum, with it."""
    lanes = tl.arange(0, BLOCK)
    bucket = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num, BLOCK):
        place = start + lanes
        inside = place < num
        ids = tl.load(ids_ptr + place, mask=inside, other=0)
        mass = _chunk_mass(
            logits_ptr, stride, row_ptr, first, end, log_total_ptr, ids, inside, scale, shift, BLOCK
        )
        bucket += mass
        tl.store(out_ptr + place, mass * unshift, mask=inside)
    return tl.sum(bucket, 0)


@triton.jit
def _common_masses_kernel(
    x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, start_S_ptr, start_T_ptr,
    log_total_ptr, teacher_log_total_ptr, common_V_ptr, common_W_ptr, K, other_V_ptr, A,
    other_W_ptr, B, p_ptr, q_ptr, value_ptr, bucket_slope_ptr, mean_ptr, scale, shift, unshift,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one chunk of `common_masses`."""
    c = tl.program_id(0).to(tl.int64)
    first_S, end_S = _bounds(start_S_ptr, c)
    first_T, end_T = _bounds(start_T_ptr, c)
    lanes = tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    whole_mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        inside = start + lanes < K
        _v, p, value_here, slope = _compare_common(
            x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, first_S, end_S, first_T, end_T,
            log_total_ptr, teacher_log_total_ptr, common_V_ptr, common_W_ptr, start + lanes,
            inside, scale, shift, REVERSE, BLOCK,
        )
        value += tl.where(inside, value_here, 0.0)
        whole_mean += tl.where(inside, p * slope, 0.0)
    p_bucket = _other_masses(
        x_ptr, x_stride, row_S_ptr, first_S, end_S, log_total_ptr, other_V_ptr, A, p_ptr + c * A,
        scale, shift, unshift, BLOCK,
    )
    q_bucket = _other_masses(
        y_ptr, y_stride, row_T_ptr, first_T, end_T, teacher_log_total_ptr, other_W_ptr, B,
        q_ptr + c * B, scale, 0.0, 1.0, BLOCK,
    )
    bucket_value, bucket_slope = _mass_kl(p_bucket, q_bucket, shift, REVERSE)
    tl.store(value_ptr + c, tl.sum(value, 0) + bucket_value)
    tl.store(bucket_slope_ptr + c, bucket_slope)

    # the mean slope of the common tokens in each row, which the gradient of a softmax takes off
    last_of_several = end_S
    if end_S - first_S == 1:  # the row is the chunk
        last_of_several = first_S
        tl.store(mean_ptr + tl.load(row_S_ptr + first_S), tl.sum(whole_mean, 0))
    for i in range(first_S, last_of_several):
        row = tl.load(row_S_ptr + i)
        log_total = tl.load(log_total_ptr + row)
        mean = tl.zeros([BLOCK], tl.float32)
        for start in range(0, K, BLOCK):
            inside = start + lanes < K
            v, _p, _value, slope = _compare_common(
                x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, first_S, end_S, first_T,
                end_T, log_total_ptr, teacher_log_total_ptr, common_V_ptr, common_W_ptr,
                start + lanes, inside, scale, shift, REVERSE, BLOCK,
            )
            x = load_logits(x_ptr + row * x_stride, v, inside)
            mass = tl.exp(x * scale - log_total + shift)
            mean += tl.where(inside, mass * slope, 0.0)
        tl.store(mean_ptr + row, tl.sum(mean, 0))


class CommonMasses(NamedTuple):
    """Hold what `common_masses` finds of each chunk.

    value_C: KL over the common tokens and one bucket for the others, in nats.
    p_CA, q_CB: masses of the others.
    bucket_slope_C: derivative of the KL by the bucket's mass times exp(shift).
    mean_N: sum over common tokens of mass times derivative in each row, 0 in rows without a chunk.
    """

    value_C: Tensor
    p_CA: Tensor
    q_CB: Tensor
    bucket_slope_C: Tensor
    mean_N: Tensor


class CommonTokens(NamedTuple):
    """List the tokens that two vocabularies have in common, and the others of both, int64."""

    common_V: Tensor
    common_W: Tensor
    other_V: Tensor
    other_W: Tensor


def common_masses(
    x_NV: Tensor, y_MW: Tensor, rows: ChunkRows, totals: RowTotals, tokens: CommonTokens,
    temperature: float, shift: float, unshift: float, reverse: bool,
) -> CommonMasses:
    """Compare the common tokens of all chunks, and list the masses of the others.

    Args:
        totals: `row_totals` of these logits.
        shift: nats that lift small masses above float32's smallest; unshift: exp(-shift).
        reverse: KL(p || q) instead of KL(q || p).
    """
    num_chunks = rows.num_chunks
    A = len(tokens.other_V)
    B = len(tokens.other_W)
    value_C = x_NV.new_zeros(num_chunks, dtype=torch.float32)
    result = CommonMasses(
        value_C, value_C.new_empty(num_chunks, A), value_C.new_empty(num_chunks, B),
        torch.zeros_like(value_C), value_C.new_zeros(len(x_NV)),
    )
    if num_chunks:
        with torch.cuda.device_of(x_NV):
            _common_masses_kernel[(num_chunks,)](
                x_NV, x_NV.stride(0), y_MW, y_MW.stride(0), *rows.pointers, totals.log_total_N,
                totals.teacher_log_total_M, tokens.common_V, tokens.common_W,
                len(tokens.common_V), tokens.other_V, A, tokens.other_W, B, result.p_CA,
                result.q_CB, value_C, result.bucket_slope_C, result.mean_N, 1 / temperature, shift,
                unshift, REVERSE=reverse, BLOCK=block_of(x_NV.shape[1]), num_warps=NUM_WARPS,
            )
    return result


@triton.jit
def _write_slopes(
    x_ptr, x_stride, row_ptr, first, end, log_total_ptr, mean_ptr, label_ptr, plain_ptr,
    columns, inside, slope, factor, scale, shift, ce_factor,
    HAS_LABELS: tl.constexpr,
):
    """Write the gradient of some columns over all rows of a chunk."""
    for i in range(first, end):
        row = tl.load(row_ptr + i)
        x_row = x_ptr + row * x_stride
        x = load_logits(x_row, columns, inside)
        log_p = x * scale - tl.load(log_total_ptr + row)
        d = tl.exp(log_p + shift) * slope - tl.exp(log_p) * tl.load(mean_ptr + row)
        d = d * factor
        if HAS_LABELS:
            label = tl.load(label_ptr + row)
            d += cross_entropy_slope(x, columns, label, tl.load(plain_ptr + row), ce_factor)
        tl.store(x_row + columns, d.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_cross_entropy(
    x_row, V, label, log_total, ce_factor, HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradient of a row without a chunk."""
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        d = tl.zeros([BLOCK], tl.float32)
        if HAS_LABELS:
            x = load_logits(x_row, columns, columns < V)
            d = cross_entropy_slope(x, columns, label, log_total, ce_factor)
        tl.store(x_row + columns, d.to(x_row.dtype.element_ty), mask=columns < V)


@triton.jit
def _common_gradient_kernel(
    x_ptr, x_stride, V, y_ptr, y_stride, row_S_ptr, row_T_ptr, start_S_ptr, start_T_ptr,
    num_chunks, chunk_ptr, log_total_ptr, plain_ptr, teacher_log_total_ptr,
    common_V_ptr, common_W_ptr, K, other_V_ptr, A, d_other_ptr, mean_ptr, factor_ptr, label_ptr,
    scale, shift, ce_factor,
    REVERSE: tl.constexpr, HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one chunk of `common_gradient_`, or one row that has no chunk."""
    c = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if c < num_chunks:
        first_S, end_S = _bounds(start_S_ptr, c)
        first_T, end_T = _bounds(start_T_ptr, c)
        d_other_row = d_other_ptr + c * A
        factor = tl.load(factor_ptr + c) * scale / (end_S - first_S)
        # what the other tokens add to the mean slope of each row
        for i in range(first_S, end_S):
            row = tl.load(row_S_ptr + i)
            log_total = tl.load(log_total_ptr + row)
            mean = tl.zeros([BLOCK], tl.float32)
            for start in range(0, A, BLOCK):
                inside = start + lanes < A
                v = tl.load(other_V_ptr + start + lanes, mask=inside, other=0)
                slope = tl.load(d_other_row + start + lanes, mask=inside, other=0.0)
                x = load_logits(x_ptr + row * x_stride, v, inside)
                mass = tl.exp(x * scale - log_total + shift)
                mean += tl.where(inside, mass * slope, 0.0)
            before = tl.load(mean_ptr + row)
            tl.debug_barrier()  # all threads have read it
            tl.store(mean_ptr + row, before + tl.sum(mean, 0))
        tl.debug_barrier()  # and now all see what was written
        for start in range(0, K, BLOCK):
            inside = start + lanes < K
            v, _p, _value, slope = _compare_common(
                x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, first_S, end_S, first_T,
                end_T, log_total_ptr, teacher_log_total_ptr, common_V_ptr, common_W_ptr,
                start + lanes, inside, scale, shift, REVERSE, BLOCK,
            )
            _write_slopes(
                x_ptr, x_stride, row_S_ptr, first_S, end_S, log_total_ptr, mean_ptr, label_ptr,
                plain_ptr, v, inside, slope, factor, scale, shift, ce_factor, HAS_LABELS,
            )
        for start in range(0, A, BLOCK):
            inside = start + lanes < A
            v = tl.load(other_V_ptr + start + lanes, mask=inside, other=0)
            slope = tl.load(d_other_row + start + lanes, mask=inside, other=0.0)
            _write_slopes(
                x_ptr, x_stride, row_S_ptr, first_S, end_S, log_total_ptr, mean_ptr, label_ptr,
                plain_ptr, v, inside, slope, factor, scale, shift, ce_factor, HAS_LABELS,
            )
    else:
        n = c - num_chunks
        if tl.load(chunk_ptr + n) < 0:
            label = tl.load(label_ptr + n)
            log_total = tl.load(plain_ptr + n)
            _write_cross_entropy(
                x_ptr + n * x_stride, V, label, log_total, ce_factor, HAS_LABELS, BLOCK
            )


def common_gradient_(
    x_NV: Tensor, y_MW: Tensor, rows: ChunkRows, totals: RowTotals, tokens: CommonTokens,
    masses: CommonMasses, d_other_CA: Tensor, factor_C: Tensor, labels_N: Tensor | None,
    temperature: float, shift: float, reverse: bool, ce_factor: float,
) -> None:
    """Write over x the gradient of

        sum over c of factor_C[c] loss[c] + ce_factor * sum over n of CE[n]

    Args:
        masses: of `common_masses`; its mean_N is overwritten.
        d_other_CA: (C, A) derivatives by the other tokens' masses times exp(shift).
        labels_N: (N,) int64, the next tokens, negative for none; None: no cross-entropy.
        Others: as `common_masses` got them.
    """
    N, V = x_NV.shape
    if not N:
        return
    labels = rows.chunk_N if labels_N is None else labels_N
    with torch.cuda.device_of(x_NV):
        _common_gradient_kernel[(rows.num_chunks + N,)](
            x_NV, x_NV.stride(0), V, y_MW, y_MW.stride(0), *rows.pointers, rows.num_chunks,
            rows.chunk_N, totals.log_total_N, totals.plain_log_total_N,
            totals.teacher_log_total_M, tokens.common_V, tokens.common_W, len(tokens.common_V),
            tokens.other_V, len(tokens.other_V), d_other_CA, masses.mean_N, factor_C, labels,
            1 / temperature, shift, ce_factor,
            REVERSE=reverse, HAS_LABELS=labels_N is not None, BLOCK=block_of(V),
            num_warps=NUM_WARPS,
        )


# --- projection_kl --------------------------------------------------------------------------------


class ProjectionTables(NamedTuple):
    """List the entries of a projection by columns and by rows.

    token_E, weight_E: int32, float32, sorted by column; start_K: (K + 1,) int32.
    width_S: int32, most entries of a column in each slice of SLICE columns.
    column_F, row_weight_F: the same entries, sorted by student token; start_V: (V + 1,) int32.
    mass_V: (V,) float32, the sum of each token's weights.
    most_per_token: no token has more entries.
    """

    token_E: Tensor
    weight_E: Tensor
    start_K: Tensor
    width_S: Tensor
    column_F: Tensor
    row_weight_F: Tensor
    start_V: Tensor
    mass_V: Tensor
    most_per_token: int

    @property
    def width(self) -> int:
        return len(self.start_K) - 1


def projection_tables(
    row_E: Tensor, column_E: Tensor, weight_E: Tensor, width: int, V: int, most_per_token: int
) -> ProjectionTables:
    """List the entries of `losses.Entries`, which are sorted by row; nothing waits for a device."""
    sorted_column_E, order_E = column_E.sort(stable=True)
    start_K = torch.searchsorted(sorted_column_E, torch.arange(width + 1, device=row_E.device))
    start_V = torch.searchsorted(row_E, torch.arange(V + 1, device=row_E.device))
    num_slices = -(-width // SLICE)
    counts = start_K.new_zeros(num_slices * SLICE)
    counts[:width] = start_K[1:] - start_K[:-1]
    width_S = counts.view(num_slices, SLICE).amax(1)
    return ProjectionTables(
        row_E[order_E].int(), weight_E[order_E].float(), start_K.int(), width_S.int(),
        column_E.int(), weight_E.float(), start_V.int(), _segment_sums(weight_E.float(), start_V),
        most_per_token,
    )


def _segment_sums(x_E: Tensor, start_K: Tensor) -> Tensor:
    """Return the (K,) sums of x between neighboring starts, in a fixed order."""
    # unsafe: the starts are not read back to be checked
    return torch.segment_reduce(x_E, "sum", offsets=start_K, unsafe=True)


@triton.jit
def _column_masses(
    x_ptr, x_stride, row_ptr, first, end, log_total_ptr, token_ptr, weight_ptr, begin, stop, width,
    scale, SLICE: tl.constexpr,
):
    """Return the mean over a chunk's rows of softmax(x / tau) @ W in some columns.

    begin, stop: where the entries of each column are.
    """
    mass = tl.zeros([SLICE], tl.float32)
    for j in range(0, width):
        there = begin + j < stop
        token = tl.load(token_ptr + begin + j, mask=there, other=0)
        weight = tl.load(weight_ptr + begin + j, mask=there, other=0.0)
        p = _chunk_mass(
            x_ptr, x_stride, row_ptr, first, end, log_total_ptr, token, there, scale, 0.0, SLICE
        )
        mass += tl.where(there, weight * p, 0.0)
    return mass


@triton.jit
def _column_kl(r, q, total, REVERSE: tl.constexpr):
    """Return a column's term of the KL, and its derivative by the student's normalized mass."""
    p = r / (total + EPSILON) + EPSILON
    q = tl.where(q < TINY_MASS, TINY_MASS, q)
    log_ratio = tl.log(q) - tl.log(p)
    if REVERSE:
        value = -p * log_ratio
        slope = 1 - log_ratio
    else:
        value = q * log_ratio
        slope = -q / p
    return value, slope


@triton.jit
def _kept_mass(kept_mass_ptr, row_ptr, first, end):
    """Return the mass that the projection maps to kept columns, the mean of a chunk's rows."""
    total = 0.0
    for i in range(first, end):
        total += tl.load(kept_mass_ptr + tl.load(row_ptr + i))
    return total / (end - first)


@triton.jit
def _projected_kernel(
    x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, start_S_ptr, start_T_ptr,
    log_total_ptr, kept_mass_ptr, teacher_log_total_ptr, token_ptr, weight_ptr, start_ptr,
    width_ptr, K, kept_ptr, slope_ptr, value_ptr, mean_ptr, scale,
    HAS_KEPT: tl.constexpr, REVERSE: tl.constexpr, SLICE: tl.constexpr,
):
    """Compute one chunk of `projected`."""
    c = tl.program_id(0).to(tl.int64)
    first_S, end_S = _bounds(start_S_ptr, c)
    first_T, end_T = _bounds(start_T_ptr, c)
    total = _kept_mass(kept_mass_ptr, row_S_ptr, first_S, end_S)
    slope_row = slope_ptr + c * K
    value = tl.zeros([SLICE], tl.float32)
    mean = tl.zeros([SLICE], tl.float32)
    for start in range(0, K, SLICE):
        columns = start + tl.arange(0, SLICE)
        inside = columns < K
        begin = tl.load(start_ptr + columns, mask=inside, other=0)
        stop = tl.load(start_ptr + columns + 1, mask=inside, other=0)
        width = tl.load(width_ptr + start // SLICE)
        r = _column_masses(
            x_ptr, x_stride, row_S_ptr, first_S, end_S, log_total_ptr, token_ptr, weight_ptr,
            begin, stop, width, scale, SLICE,
        )
        ids = columns
        if HAS_KEPT:
            ids = tl.load(kept_ptr + columns, mask=inside, other=0)
        q = _chunk_mass(
            y_ptr, y_stride, row_T_ptr, first_T, end_T, teacher_log_total_ptr, ids, inside, scale,
            0.0, SLICE,
        )
        value_here, slope = _column_kl(r, q, total, REVERSE)
        value += tl.where(inside, value_here, 0.0)
        mean += tl.where(inside, slope * r, 0.0)
        # nothing reads the slope of a column to which no token maps
        tl.store(slope_row + columns, slope, mask=inside & (begin < stop))
    tl.store(value_ptr + c, tl.sum(value, 0))
    tl.store(mean_ptr + c, tl.sum(mean, 0) / (total + EPSILON))


class Projected(NamedTuple):
    """Hold what `projected` finds of each chunk.

    value_C: KL in nats.
    slope_CK: its derivative by the student's normalized mass in each column, anything in columns
        without an entry.
    mean_C: the mean of the slopes, which normalizing takes off.
    """

    value_C: Tensor
    slope_CK: Tensor
    mean_C: Tensor


def projected(
    x_NV: Tensor, y_MW: Tensor, rows: ChunkRows, totals: RowTotals, tables: ProjectionTables,
    temperature: float, reverse: bool, kept_K: Tensor | None = None,
) -> Projected:
    """Compare the student's mass in the teacher's columns with the teacher's.

    Args:
        totals: `row_totals` of these logits, kept columns and `tables.mass_V`.
        kept_K: int64 columns of y that the tables are of; None: all.
        reverse: KL(student || teacher).
    """
    num_chunks = rows.num_chunks
    K = tables.width
    value_C = x_NV.new_zeros(num_chunks, dtype=torch.float32)
    result = Projected(value_C, value_C.new_empty(num_chunks, K), torch.zeros_like(value_C))
    if num_chunks:
        with torch.cuda.device_of(x_NV):
            _projected_kernel[(num_chunks,)](
                x_NV, x_NV.stride(0), y_MW, y_MW.stride(0), *rows.pointers, totals.log_total_N,
                totals.kept_mass_N, totals.teacher_log_total_M, tables.token_E, tables.weight_E,
                tables.start_K, tables.width_S, K, rows.row_T if kept_K is None else kept_K,
                result.slope_CK, value_C, result.mean_C, 1 / temperature,
                HAS_KEPT=kept_K is not None, REVERSE=reverse, SLICE=SLICE, num_warps=NUM_WARPS,
            )
    return result


@triton.jit
def _token_slopes(
    slope_row, column_ptr, weight_ptr, start_ptr, mean, tokens, inside, most, BLOCK: tl.constexpr
):
    """Return the derivative by the mass of each token: its row of W times (slope - mean)."""
    begin = tl.load(start_ptr + tokens, mask=inside, other=0)
    stop = tl.load(start_ptr + tokens + 1, mask=inside, other=0)
    slope = tl.zeros([BLOCK], tl.float32)
    for j in range(0, most):
        there = begin + j < stop
        column = tl.load(column_ptr + begin + j, mask=there, other=0)
        weight = tl.load(weight_ptr + begin + j, mask=there, other=0.0)
        here = tl.load(slope_row + column, mask=there, other=0.0)
        slope += tl.where(there, weight * (here - mean), 0.0)
    return slope


@triton.jit
def _projected_gradient_kernel(
    x_ptr, x_stride, V, row_S_ptr, start_S_ptr, chunk_ptr, log_total_ptr, plain_ptr, kept_mass_ptr,
    column_ptr, weight_ptr, start_V_ptr, most, slope_ptr, mean_ptr, K, factor_ptr, label_ptr,
    scale, ce_factor, HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one row of `projected_gradient_`."""
    n = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + n * x_stride
    label = tl.load(label_ptr + n)
    plain_log_total = tl.load(plain_ptr + n)
    c = tl.load(chunk_ptr + n)
    if c < 0:
        _write_cross_entropy(x_row, V, label, plain_log_total, ce_factor, HAS_LABELS, BLOCK)
    else:
        first, end = _bounds(start_S_ptr, c)
        kept = _kept_mass(kept_mass_ptr, row_S_ptr, first, end)
        factor = tl.load(factor_ptr + c) * scale / ((end - first) * (kept + EPSILON))
        slope_row = slope_ptr + c * K
        mean_slope = tl.load(mean_ptr + c)
        log_total = tl.load(log_total_ptr + n)
        # the mean over the row, which the gradient of a softmax takes off; where the row is the
        # chunk, that of the slopes has left no more than this
        row_mean = mean_slope * EPSILON
        if end - first > 1:
            mean = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < V
                slope = _token_slopes(
                    slope_row, column_ptr, weight_ptr, start_V_ptr, mean_slope, columns, inside,
                    most, BLOCK,
                )
                x = load_logits(x_row, columns, inside)
                mean += tl.exp(x * scale - log_total) * slope
            row_mean = tl.sum(mean, 0)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < V
            slope = _token_slopes(
                slope_row, column_ptr, weight_ptr, start_V_ptr, mean_slope, columns, inside, most,
                BLOCK,
            )
            x = load_logits(x_row, columns, inside)
            d = factor * tl.exp(x * scale - log_total) * (slope - row_mean)
            if HAS_LABELS:
                d += cross_entropy_slope(x, columns, label, plain_log_total, ce_factor)
            tl.store(x_row + columns, d.to(x_ptr.dtype.element_ty), mask=inside)


def projected_gradient_(
    x_NV: Tensor, rows: ChunkRows, totals: RowTotals, tables: ProjectionTables, result: Projected,
    factor_C: Tensor, labels_N: Tensor | None, temperature: float, ce_factor: float,
) -> None:
    """Write over x the gradient of

        sum over c of factor_C[c] KL[c] + ce_factor * sum over n of CE[n]

    Args:
        result: of `projected`.
        labels_N: (N,) int64, the next tokens, negative for none; None: no cross-entropy.
        Others: as `projected` got them.
    """
    N, V = x_NV.shape
    if not N:
        return
    labels = rows.chunk_N if labels_N is None else labels_N
    with torch.cuda.device_of(x_NV):
        _projected_gradient_kernel[(N,)](
            x_NV, x_NV.stride(0), V, rows.row_S, rows.start_S, rows.chunk_N, totals.log_total_N,
            totals.plain_log_total_N, totals.kept_mass_N, tables.column_F, tables.row_weight_F,
            tables.start_V, tables.most_per_token, result.slope_CK, result.mean_C, tables.width,
            factor_C, labels, 1 / temperature, ce_factor,
            HAS_LABELS=labels_N is not None, BLOCK=block_of(V), num_warps=NUM_WARPS,
        )
