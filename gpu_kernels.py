"""Compute losses of losses.py and translation.py on a GPU, with gradients in place of the logits.

A loss in plain torch makes about eight copies of the logits.  These kernels read the logits where
the matmul wrote them and write the gradient over them, in their own precision:

- `divergence_` (one vocabulary): one launch.  A program has a row: maximum and sum of both models,
  then value and mean slope, then the gradient.
- `cell_totals`, `compare_cells`, `cells_gradient_` (the roots of a translation, by the forward KL):
  three launches.  Between them there is one float32 number for each cell of each root.

Cross-entropy joins in: it reads what is read anyway.  Sums over cells follow a list that is sorted
once (`cell_tables`): a lane adds up the tokens of its cell, one after the other, so there are no
atomics and the order of additions is fixed.

No GPU was at hand when this was written.  Triton's interpreter ran the kernels on a CPU (the
tests), and Triton compiled them for sm_90; speed and repeatability on a GPU are not measured.

Shapes: N student rows, M teacher rows; V, W, X vocabularies; R roots; C cells.

Needs torch and triton.  Copy it beside losses.py, which takes it for CUDA tensors by itself.
License: Apache-2.0 (see LICENSE).  Tests: tests/test_gpu_kernels.py.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = torch.bfloat16, torch.float16, torch.float32  # of logits; all sums are float32
BLOCK = 4096  # columns that a program reads at a time.  Not tuned.
SLICE = 512  # cells that a program sums up at a time.  Not tuned.
LONG = 64  # a cell of more tokens is summed up by all lanes together.  Not tuned.
NUM_WARPS = 8
TINY = tl.constexpr(2.0**-126)  # smallest normal float32; a smaller mass counts as this

# kinds of divergence: what the middle distribution m is, see `losses.Mixture`
OF_STUDENT = tl.constexpr(0)
OF_TEACHER = tl.constexpr(1)
OF_BOTH = tl.constexpr(2)
VARIATION = tl.constexpr(3)


# --- statistics of a row --------------------------------------------------------------------------


@triton.jit
def load_logits(row_ptr, columns, mask):
    """Load logits as float32, -inf where the mask is False."""
    return tl.load(row_ptr + columns, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def add_lanes(top, total, x, scale, weight=1.0):
    """Return the running maximum, and sum of weight exp(scale (x - maximum)), of each lane.

    NaN and inf make the sum NaN, which then stays.
    """
    new_top = tl.maximum(top, x)
    # -inf - -inf would be NaN: nothing has come yet
    reference = tl.where(new_top == -float("inf"), 0.0, new_top)
    total = total * tl.exp((top - reference) * scale) + weight * tl.exp((x - reference) * scale)
    return new_top, total


@triton.jit
def join_lanes(top, total, scale):
    """Return maximum and sum of a row."""
    row_top = tl.max(top, 0)
    reference = tl.where(row_top == -float("inf"), 0.0, row_top)
    return row_top, tl.sum(total * tl.exp((top - reference) * scale), 0)


@triton.jit
def row_sums(row_ptr, V, scale, BLOCK: tl.constexpr):
    """Return maximum, sum of exp(scale (x - maximum)) and sum of exp(x - maximum) of a row."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    plain_top = top
    total = tl.zeros([BLOCK], tl.float32)
    plain_total = total
    for start in range(0, V, BLOCK):
        x = load_logits(row_ptr, start + lanes, start + lanes < V)
        top, total = add_lanes(top, total, x, scale)
        plain_top, plain_total = add_lanes(plain_top, plain_total, x, 1.0)
    row_top, total = join_lanes(top, total, scale)
    _, plain_total = join_lanes(plain_top, plain_total, 1.0)
    return row_top, total, plain_total


@triton.jit
def _cell_row_sums(row_ptr, slot_ptr, num_cells, V, scale, root, BLOCK: tl.constexpr):
    """Return what `row_sums` returns, then maximum and sum of the tokens that have a cell.

    The last two are -inf and 0 where root is -1, which spares reading the slots.
    """
    num_slots = tl.where(root >= 0, V, 0)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    plain_top = top
    linked_top = top
    total = tl.zeros([BLOCK], tl.float32)
    plain_total = total
    linked_total = total
    for start in range(0, V, BLOCK):
        columns = start + lanes
        x = load_logits(row_ptr, columns, columns < V)
        top, total = add_lanes(top, total, x, scale)
        plain_top, plain_total = add_lanes(plain_top, plain_total, x, 1.0)
        slot = tl.load(slot_ptr + columns, mask=columns < num_slots, other=num_cells)
        linked = tl.where(slot < num_cells, x, -float("inf"))
        linked_top, linked_total = add_lanes(linked_top, linked_total, linked, scale)
    row_top, total = join_lanes(top, total, scale)
    _, plain_total = join_lanes(plain_top, plain_total, 1.0)
    row_linked_top, linked_total = join_lanes(linked_top, linked_total, scale)
    return row_top, total, plain_total, row_linked_top, linked_total


@triton.jit
def cross_entropy_slope(x, columns, label, log_total, factor):
    """Return the derivative of factor times the cross-entropy, by logits x; 0 without a label."""
    slope = factor * (tl.exp(x - log_total) - tl.where(columns == label, 1.0, 0.0))
    return tl.where(label >= 0, slope, 0.0)


# --- one vocabulary -------------------------------------------------------------------------------


@triton.jit
def _raise(logp, floor):
    """Return max(logp, floor); tl.maximum would take the floor for NaN."""
    return tl.where(logp < floor, floor, logp)


@triton.jit
def _compare(logp, logq, forward_weight, reverse_weight, log_s, log_not_s, KIND: tl.constexpr):
    """Return what each token adds to the divergence, and the derivative by logp."""
    p = tl.exp(logp)
    q = tl.exp(logq)
    if KIND == VARIATION:
        gap = p - q
        value = tl.abs(gap) / 2
        slope = tl.where(gap == 0, 0.0, tl.where(gap < 0, -p, p) / 2)
        slope = tl.where(gap == gap, slope, gap)  # NaN of the teacher
    else:
        # u = s p / m, the student's fraction of the middle
        if KIND == OF_STUDENT:
            logm = logp
            u = tl.full(p.shape, 1.0, tl.float32)
        elif KIND == OF_TEACHER:
            logm = logq
            u = tl.zeros(p.shape, tl.float32)
        else:
            of_p = logp + log_s
            of_q = logq + log_not_s
            top = tl.maximum(of_p, of_q)
            logm = top + tl.log(tl.exp(of_p - top) + tl.exp(of_q - top))
            u = tl.exp(of_p - logm)
        forward = forward_weight * q
        reverse = reverse_weight * p
        value = forward * (logq - logm) + reverse * (logp - logm)
        slope = reverse * (logp - logm + 1 - u) - forward * u
    return value, slope


@triton.jit
def _divergence_kernel(
    x_ptr, y_ptr, d_ptr, x_stride, y_stride, d_stride, V,
    teacher_row_ptr, label_ptr, factor_ptr, value_ptr, cross_entropy_ptr,
    scale, teacher_scale, forward_weight, reverse_weight, log_s, log_not_s, floor, ce_factor,
    KIND: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one row of `divergence_`; d_ptr may be x_ptr."""
    n = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + n * x_stride
    d_row = d_ptr + n * d_stride
    lanes = tl.arange(0, BLOCK)
    top, total, plain_total = row_sums(x_row, V, scale, BLOCK)
    log_total = top * scale + tl.log(total)
    plain_log_total = top + tl.log(plain_total)
    label = -1
    if HAS_LABELS:
        label = tl.load(label_ptr + n)
    teacher_row = -1
    y_row = y_ptr
    log_total_y = 0.0
    factor = 0.0
    if HAS_TEACHER:
        teacher_row = tl.load(teacher_row_ptr + n)
        factor = tl.load(factor_ptr + n)
        # a row without a term reads some row of the teacher, and leaves it out below
        y_row = y_ptr + tl.maximum(teacher_row, 0).to(tl.int64) * y_stride
        top_y, total_y, _ = row_sums(y_row, V, teacher_scale, BLOCK)
        log_total_y = top_y * teacher_scale + tl.log(total_y)

    value = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    label_logit = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + lanes
        inside = columns < V
        x = load_logits(x_row, columns, inside)
        if HAS_LABELS:
            label_logit += tl.where(columns == label, x, 0.0)
        if HAS_TEACHER:
            raw = x * scale - log_total
            logq = load_logits(y_row, columns, inside) * teacher_scale - log_total_y
            value_here, slope = _compare(
                _raise(raw, floor), _raise(logq, floor),
                forward_weight, reverse_weight, log_s, log_not_s, KIND,
            )
            value += value_here
            mean += tl.where(raw < floor, 0.0, slope)
    if HAS_LABELS:
        ce = plain_log_total - tl.sum(label_logit, 0)
        ce = tl.where(label < V, ce, float("nan"))  # no such token
        tl.store(cross_entropy_ptr + n, tl.where(label >= 0, ce, 0.0))
    row_mean = tl.sum(mean, 0)
    if HAS_TEACHER:
        tl.store(value_ptr + n, tl.where(teacher_row >= 0, tl.sum(value, 0), 0.0))

    for start in range(0, V, BLOCK):
        columns = start + lanes
        inside = columns < V
        x = load_logits(x_row, columns, inside)
        d = tl.zeros([BLOCK], tl.float32)
        if HAS_TEACHER:
            raw = x * scale - log_total
            logq = load_logits(y_row, columns, inside) * teacher_scale - log_total_y
            _value, slope = _compare(
                _raise(raw, floor), _raise(logq, floor),
                forward_weight, reverse_weight, log_s, log_not_s, KIND,
            )
            slope = tl.where(raw < floor, 0.0, slope) - tl.exp(raw) * row_mean
            d = tl.where(teacher_row >= 0, factor * scale * slope, 0.0)
        if HAS_LABELS:
            d += cross_entropy_slope(x, columns, label, plain_log_total, ce_factor)
        tl.store(d_row + columns, d.to(d_ptr.dtype.element_ty), mask=inside)


def divergence(
    x_NV: Tensor, y_NV: Tensor, mixture: tuple[float, float, float] | None, temperature: float,
    teacher_temperature: float, floor: float,
) -> tuple[Tensor, Tensor]:
    """Do what `cpu_kernels.divergence` does; the derivative has the dtype of x."""
    d_NV = torch.empty_like(x_NV)
    value_N, _ = divergence_(
        x_NV, y_NV, mixture, temperature, teacher_temperature, floor, d_NV=d_NV
    )
    return value_N, d_NV


def divergence_(
    x_NV: Tensor, y_MV: Tensor | None, mixture: tuple[float, float, float] | None,
    temperature: float = 1.0, teacher_temperature: float = 1.0, floor: float = -1e4,
    teacher_row_N: Tensor | None = None, factor_N: Tensor | None = None,
    labels_N: Tensor | None = None, ce_factor: float = 1.0, d_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a divergence and the cross-entropy row by row, and the gradient of both.

        sum over n of factor_N[n] D(softmax(y / tau_t), softmax(x / tau)) + ce_factor CE[n]

    Args:
        x_NV: logits of the student, of a dtype in `DTYPES`; the last axis is contiguous.
        y_MV: logits of the teacher, likewise; None: the cross-entropy alone.
        mixture: see `cpu_kernels.divergence`.
        temperature, teacher_temperature: tau, tau_t, > 0.
        floor: nats; lower log-probabilities are raised to it.
        teacher_row_N: (N,) int, row of y for each row of x, -1: no divergence; None: the same row.
        factor_N: (N,) float32; None: 1.
        labels_N: (N,) int64, the next tokens, negative for none; None: no cross-entropy.
        d_NV: where the gradient is written; None: over x.
    Returns:
        ((N,) divergences, (N,) cross-entropies), float32, not multiplied by the factors.
    Raises:
        ValueError: vocabularies of two sizes.
    """
    N, V = x_NV.shape
    if y_MV is not None and y_MV.shape[1] != V:
        raise ValueError(
            f"logits of {V} tokens of the student and {y_MV.shape[1]} of the teacher; expected "
            "one vocabulary"
        )
    value_N = x_NV.new_zeros(N, dtype=torch.float32)
    cross_entropy_N = torch.zeros_like(value_N)
    if not N:
        return value_N, cross_entropy_N
    if d_NV is None:
        d_NV = x_NV
    # a kernel wants pointers, also those that it does not read
    y = x_NV if y_MV is None else y_MV
    if teacher_row_N is None:
        teacher_row_N = torch.arange(N, device=x_NV.device)
    if factor_N is None:
        factor_N = torch.ones_like(value_N)
    labels = teacher_row_N if labels_N is None else labels_N
    kind, (forward_weight, reverse_weight, log_s, log_not_s) = _kind(mixture)
    with torch.cuda.device_of(x_NV):  # Triton launches on the current device
        _divergence_kernel[(N,)](
            x_NV, y, d_NV, x_NV.stride(0), y.stride(0), d_NV.stride(0), V,
            teacher_row_N, labels, factor_N, value_N, cross_entropy_N,
            1 / temperature, 1 / teacher_temperature, forward_weight, reverse_weight, log_s,
            log_not_s, floor, ce_factor,
            KIND=kind, HAS_TEACHER=y_MV is not None, HAS_LABELS=labels_N is not None,
            BLOCK=block_of(V), num_warps=NUM_WARPS,
        )
    return value_N, cross_entropy_N


def _kind(
    mixture: tuple[float, float, float] | None,
) -> tuple[int, tuple[float, float, float, float]]:
    """Return the kind of a divergence and (a, b, log s, log(1 - s)), see `losses.Mixture`."""
    if mixture is None:
        return VARIATION.value, (0.0, 0.0, 0.0, 0.0)
    a, b, s = (float(weight) for weight in mixture)
    if s == 1:
        return OF_STUDENT.value, (a, b, 0.0, 0.0)
    if s == 0 and b:
        return OF_TEACHER.value, (a, b, 0.0, 0.0)
    log_s = math.log(s) if s else -math.inf
    return OF_BOTH.value, (a, b, log_s, math.log1p(-s))


def block_of(V: int) -> int:
    return min(BLOCK, triton.next_power_of_2(V))


# --- two vocabularies: sums over cells ------------------------------------------------------------


class CellList(NamedTuple):
    """List the tokens of one vocabulary by cells, for lanes that each sum up one cell.

    ids_E: int32, slice by slice, first tokens first: entry ``base[s] + j * SLICE + lane`` is token
        j of the cell of a lane, -1 behind its end.
    base_S, width_S: int32, where a slice begins; tokens of its largest cell.
    long_ids_E, long_start_K: int32, the tokens of long cells, cell by cell; where each begins, with
        one more entry for the end.
    """

    ids_E: Tensor
    base_S: Tensor
    width_S: Tensor
    long_ids_E: Tensor
    long_start_K: Tensor


class CellTables(NamedTuple):
    """List the cells of both vocabularies, in the order of their slots.

    First come cells of at most LONG tokens on either side, those with the most tokens first, cut
    into slices of `slice_cells`: lane and slice are a slot.  Long cells come last.

    slot_V, slot_W: int32, the slot of the cell of each token; num_cells for tokens without one.
    slot_C: (C + 1,) int64, the slot of each cell.
    student, teacher: CellList.
    num_short: cells that are not long.
    """

    slot_V: Tensor
    slot_W: Tensor
    slot_C: Tensor
    student: CellList
    teacher: CellList
    num_short: int
    slice_cells: int

    @property
    def num_cells(self) -> int:
        return len(self.slot_C) - 1

    @property
    def list_arguments(self) -> tuple[Tensor | int, ...]:
        """Return the arguments of a kernel that describe both lists."""
        num_long = self.num_cells - self.num_short
        num_slices = len(self.student.base_S)
        return *self.student, *self.teacher, num_slices, self.num_short, num_long


def cell_tables(
    cell_V: Tensor, cell_W: Tensor, num_cells: int, slice_cells: int = SLICE, long: int = LONG
) -> CellTables:
    """Sort the tokens of both vocabularies by cells; once for a pair of tokenizers.

    Args:
        cell_V, cell_W: int, cell of each token, num_cells (or -1) for none.
        slice_cells, long: what SLICE and LONG are by default.
    """
    device = cell_V.device
    cells = []
    counts = []
    for cell_X in (cell_V.cpu().long(), cell_W.cpu().long()):
        cells.append(torch.where(cell_X < 0, num_cells, cell_X))
        counts.append(torch.bincount(cells[-1], minlength=num_cells + 1)[:num_cells])
    count_V, count_W = counts
    is_long_C = (count_V > long) | (count_W > long)
    num_short = num_cells - int(is_long_C.sum())
    # cells of one slice are about as large as each other, on both sides
    size_C = torch.where(is_long_C, -1, (count_V + count_W) * (long + 1) + count_W)
    slot_C = torch.full((num_cells + 1,), num_cells)
    slot_C[size_C.argsort(descending=True, stable=True)] = torch.arange(num_cells)
    lists = []
    for cell_X in cells:
        cell_list = _cell_list(slot_C[cell_X], num_cells, num_short, slice_cells)
        lists.append(CellList(*(column.int().to(device) for column in cell_list)))
    slot_V, slot_W = (slot_C[cell_X].int().to(device) for cell_X in cells)
    return CellTables(slot_V, slot_W, slot_C.to(device), *lists, num_short, slice_cells)


def _cell_list(slot_X: Tensor, num_cells: int, num_short: int, slice_cells: int) -> CellList:
    token_E = slot_X.argsort(stable=True)
    token_E = token_E[slot_X[token_E] < num_cells]
    slot_E = slot_X[token_E]
    count_C = torch.bincount(slot_E, minlength=num_cells)
    begin_C = count_C.cumsum(0) - count_C

    num_slices = -(-num_short // slice_cells)
    count_L = count_C.new_zeros(num_slices * slice_cells)
    count_L[:num_short] = count_C[:num_short]
    width_S = count_L.view(num_slices, slice_cells).amax(1)
    base_S = (width_S.cumsum(0) - width_S) * slice_cells
    is_short_E = slot_E < num_short
    slot_S = slot_E[is_short_E]
    # number of a token in its cell
    number_S = (torch.arange(len(token_E)) - begin_C[slot_E])[is_short_E]
    place_S = base_S[slot_S // slice_cells] + number_S * slice_cells + slot_S % slice_cells
    ids_E = torch.full((int(width_S.sum()) * slice_cells,), -1)
    ids_E[place_S] = token_E[is_short_E]
    long_start_K = torch.cat([count_C.new_zeros(1), count_C[num_short:].cumsum(0)])
    return CellList(ids_E, base_S, width_S, token_E[~is_short_E], long_start_K)


@triton.jit
def _short_masses(row_ptr, ids_ptr, base, width, top, scale, shift, SLICE: tl.constexpr):
    """Return sum of exp(scale (x - top) + shift) over the tokens of each cell of a slice."""
    lanes = tl.arange(0, SLICE)
    mass = tl.zeros([SLICE], tl.float32)
    for j in range(0, width):
        token = tl.load(ids_ptr + base + j * SLICE + lanes)
        x = load_logits(row_ptr, token, token >= 0)
        mass += tl.exp((x - top) * scale + shift)
    return mass


@triton.jit
def _long_mass(row_ptr, ids_ptr, start, end, top, scale, shift, BLOCK: tl.constexpr):
    """Return the same of one cell of many tokens."""
    lanes = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        place = first + lanes
        token = tl.load(ids_ptr + place, mask=place < end, other=0)
        x = load_logits(row_ptr, token, place < end)
        mass += tl.exp((x - top) * scale + shift)
    return tl.sum(mass, 0)


@triton.jit
def _cell_totals_kernel(
    x_ptr, x_stride, N, V, slot_V_ptr, y_ptr, y_stride, W, slot_W_ptr, num_cells, root_ptr,
    log_total_ptr, plain_log_total_ptr, top_ptr, log_linked_ptr, scale, BLOCK: tl.constexpr,
):
    """Compute one row of `cell_totals`: those of the student, then those of the teacher."""
    n = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + n)
    if n < N:
        all_top, all_total, plain_total, top, total = _cell_row_sums(
            x_ptr + n * x_stride, slot_V_ptr, num_cells, V, scale, root, BLOCK
        )
    else:
        all_top, all_total, plain_total, top, total = _cell_row_sums(
            y_ptr + (n - N) * y_stride, slot_W_ptr, num_cells, W, scale, root, BLOCK
        )
    tl.store(log_total_ptr + n, all_top * scale + tl.log(all_total))
    tl.store(plain_log_total_ptr + n, all_top + tl.log(plain_total))
    if root >= 0:
        tl.store(top_ptr + n, top)
        tl.store(log_linked_ptr + n, tl.log(total))


class CellTotals(NamedTuple):
    """Hold sums over the rows of one model.

    log_total_N: (N,) logsumexp(x / tau).
    plain_log_total_N: (N,) logsumexp(x).
    top_N, log_linked_N: (N,) largest logit of a token with a cell, and logsumexp((x - top) / tau)
        of these; 0 in rows without a root.
    """

    log_total_N: Tensor
    plain_log_total_N: Tensor
    top_N: Tensor
    log_linked_N: Tensor


def cell_totals(
    x_NV: Tensor, root_N: Tensor, y_MW: Tensor, root_M: Tensor, tables: CellTables,
    temperature: float,
) -> tuple[CellTotals, CellTotals]:
    """Return the sums over the rows of the student and of the teacher.

    Args:
        x_NV, y_MW: logits, of a dtype in `DTYPES`; the last axis is contiguous.
        root_N, root_M: int32, number of the root of each row, -1 for none.
        temperature: tau, > 0.
    """
    N, V = x_NV.shape
    M, W = y_MW.shape
    sums_4L = x_NV.new_zeros(4, N + M, dtype=torch.float32)
    if N + M:
        with torch.cuda.device_of(x_NV):
            _cell_totals_kernel[(N + M,)](
                x_NV, x_NV.stride(0), N, V, tables.slot_V, y_MW, y_MW.stride(0), W, tables.slot_W,
                tables.num_cells, torch.cat([root_N, root_M]), *sums_4L, 1 / temperature,
                BLOCK=block_of(max(V, W)), num_warps=NUM_WARPS,
            )
    return CellTotals(*sums_4L[:, :N]), CellTotals(*sums_4L[:, N:])


@triton.jit
def _cell_kl(mass, q, log_linked, shift):
    """Return q (log q - log p) and q / mass, for p = mass / exp(log_linked + shift).

    The slope is 0 where the mass is too small for float32; there log p stays what it is.
    """
    too_small = mass < TINY
    kept = tl.where(too_small, TINY, mass)
    log_p = tl.log(kept) - shift - log_linked
    value = tl.where(q == 0, 0.0, q * (tl.log(tl.where(q == 0, 1.0, q)) - log_p))
    return value, tl.where(too_small, 0.0, q / kept)


@triton.jit
def _compare_cells_kernel(
    x_ptr, x_stride, y_ptr, y_stride, row_S_ptr, row_T_ptr, ends_ptr, slope_ptr, slope_stride,
    is_added_ptr, top_ptr, log_linked_ptr, teacher_top_ptr, teacher_log_linked_ptr, value_ptr,
    ids_ptr, base_ptr, width_ptr, long_ids_ptr, long_begin_ptr,
    teacher_ids_ptr, base_T_ptr, width_T_ptr, long_teacher_ids_ptr, long_begin_T_ptr,
    num_slices, num_short, num_long, scale, shift,
    HAS_ADDED: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one root of `compare_cells`."""
    r = tl.program_id(0).to(tl.int64)
    n = tl.load(row_S_ptr + r)
    m = tl.load(row_T_ptr + r)
    x_row = x_ptr + n * x_stride
    y_row = y_ptr + m * y_stride
    top = tl.load(top_ptr + n)
    log_linked = tl.load(log_linked_ptr + n)
    teacher_top = tl.load(teacher_top_ptr + m)
    factor = tl.load(ends_ptr + r) * tl.exp(-tl.load(teacher_log_linked_ptr + m))
    slope_row = slope_ptr + r * slope_stride
    is_added_row = is_added_ptr + r * slope_stride
    value = tl.zeros([SLICE], tl.float32)
    for s in range(0, num_slices):
        mass = _short_masses(
            x_row, ids_ptr, tl.load(base_ptr + s), tl.load(width_ptr + s), top, scale, shift, SLICE
        )
        q = factor * _short_masses(
            y_row, teacher_ids_ptr, tl.load(base_T_ptr + s), tl.load(width_T_ptr + s), teacher_top,
            scale, 0.0, SLICE,
        )
        slot = s * SLICE + tl.arange(0, SLICE)
        inside = slot < num_short
        if HAS_ADDED:
            is_added = tl.load(is_added_row + slot, mask=inside, other=0)
            q += tl.load(slope_row + slot, mask=is_added != 0, other=0.0)
        value_here, slope = _cell_kl(mass, q, log_linked, shift)
        value += value_here
        tl.store(slope_row + slot, slope, mask=inside)
    row_value = tl.sum(value, 0)
    for k in range(0, num_long):
        begin = tl.load(long_begin_ptr + k)
        end = tl.load(long_begin_ptr + k + 1)
        mass_k = _long_mass(x_row, long_ids_ptr, begin, end, top, scale, shift, BLOCK)
        begin = tl.load(long_begin_T_ptr + k)
        end = tl.load(long_begin_T_ptr + k + 1)
        q_k = factor * _long_mass(
            y_row, long_teacher_ids_ptr, begin, end, teacher_top, scale, 0.0, BLOCK
        )
        place = slope_row + num_short + k
        if HAS_ADDED:
            if tl.load(is_added_row + num_short + k) != 0:
                q_k += tl.load(place)
        value_here, slope_k = _cell_kl(mass_k, q_k, log_linked, shift)
        row_value += value_here
        tl.store(place, slope_k)
    tl.store(value_ptr + r, row_value)


class AddedMasses(NamedTuple):
    """Hold what the teacher gives to single cells of roots beside its own tokens.

    mass_RC: (R, C + 1) float32 by slot; read where is_added_RC, uint8, is not 0.
    """

    mass_RC: Tensor
    is_added_RC: Tensor

    @classmethod
    def of(cls, place_E: Tensor, mass_E: Tensor, num_roots: int, num_cells: int) -> "AddedMasses":
        """Add up masses by place, root * (C + 1) + slot, in a fixed order."""
        mass_RC = mass_E.new_empty(num_roots, num_cells + 1)  # most of it stays as it is
        is_added_RC = torch.zeros_like(mass_RC, dtype=torch.uint8)
        is_added_RC.view(-1).index_fill_(0, place_E, 1)
        mass_RC.view(-1).index_fill_(0, place_E, 0.0)
        mass_RC.view(-1).index_put_((place_E,), mass_E, accumulate=True)
        return cls(mass_RC, is_added_RC)


def compare_cells(
    x_NV: Tensor, y_MW: Tensor, row_S: Tensor, row_T: Tensor, student: CellTotals,
    teacher: CellTotals, tables: CellTables, temperature: float, shift: float,
    ends_R: Tensor | None = None, added: AddedMasses | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute KL(q || p) over the cells of each root, p and q sums of softmaxes over tokens.

    Tokens without a cell do not count.

    Args:
        x_NV, y_MW, temperature: as `cell_totals` got them; student, teacher: what it returned.
        row_S, row_T: (R,) int64 rows of the roots.
        shift: nats that lift small masses above float32's smallest, see `losses.SHIFT`.
        ends_R: (R,) float32 factor of the teacher's masses; None: 1.
        added: what is added to them; overwritten.
    Returns:
        ((R,) KL in nats, (R, C + 1) q / (p exp(shift)) by slot, the last one anything).
    """
    num_roots = len(row_S)
    value_R = student.top_N.new_zeros(num_roots)
    slope_RC = added.mass_RC if added else value_R.new_empty(num_roots, tables.num_cells + 1)
    if ends_R is None:
        ends_R = torch.ones_like(value_R)
    if num_roots:
        with torch.cuda.device_of(x_NV):
            _compare_cells_kernel[(num_roots,)](
                x_NV, x_NV.stride(0), y_MW, y_MW.stride(0), row_S, row_T, ends_R, slope_RC,
                slope_RC.stride(0), added.is_added_RC if added else slope_RC, student.top_N,
                student.log_linked_N, teacher.top_N, teacher.log_linked_N, value_R,
                *tables.list_arguments, 1 / temperature, shift, HAS_ADDED=added is not None,
                SLICE=tables.slice_cells, BLOCK=block_of(max(x_NV.shape[1], y_MW.shape[1])),
                num_warps=NUM_WARPS,
            )
    return value_R, slope_RC


@triton.jit
def _cells_gradient_kernel(
    x_ptr, x_stride, V, slot_ptr, num_cells, root_ptr, slope_ptr, slope_stride,
    factor_ptr, top_ptr, log_linked_ptr, rest_factor_ptr, log_total_ptr,
    label_ptr, plain_log_total_ptr, scale, shift, ce_factor,
    HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute one block of one row of `cells_gradient_`."""
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x_row = x_ptr + n * x_stride
    x = load_logits(x_row, columns, inside)
    d = tl.zeros([BLOCK], tl.float32)
    root = tl.load(root_ptr + n)
    if root >= 0:
        slot = tl.load(slot_ptr + columns, mask=inside, other=num_cells)
        slope_row = slope_ptr + root.to(tl.int64) * slope_stride
        slope = tl.load(slope_row + slot, mask=slot < num_cells, other=0.0)
        lifted = (x - tl.load(top_ptr + n)) * scale + shift
        log_linked = tl.load(log_linked_ptr + n) + shift
        d_root = tl.exp(lifted - log_linked) - tl.exp(lifted) * slope
        d = tl.where(slot < num_cells, tl.load(factor_ptr + n) * scale * d_root, 0.0)
    rest_factor = tl.load(rest_factor_ptr + n)
    if rest_factor != 0:  # also NaN
        d += rest_factor * scale * tl.exp(x * scale - tl.load(log_total_ptr + n))
    if HAS_LABELS:
        label = tl.load(label_ptr + n)
        plain_log_total = tl.load(plain_log_total_ptr + n)
        d += cross_entropy_slope(x, columns, label, plain_log_total, ce_factor)
    tl.store(x_row + columns, d.to(x_ptr.dtype.element_ty), mask=inside)


def cells_gradient_(
    x_NV: Tensor, root_N: Tensor, student: CellTotals, slope_RC: Tensor, factor_N: Tensor,
    rest_factor_N: Tensor, labels_N: Tensor | None, tables: CellTables, temperature: float,
    shift: float, ce_factor: float,
) -> None:
    """Write over x the gradient of

        sum over n of factor_N[n] KL[n] + rest_factor_N[n] logsumexp(x[n] / tau) + ce_factor CE[n]

    Args:
        x_NV, root_N, student, temperature, shift: as `compare_cells` got them.
        slope_RC: what it returned.
        factor_N, rest_factor_N: (N,) float32.
        labels_N: (N,) int64, the next tokens, negative for none; None: no cross-entropy.
    """
    N, V = x_NV.shape
    if not N:
        return
    block = block_of(V)
    with torch.cuda.device_of(x_NV):
        _cells_gradient_kernel[(N, triton.cdiv(V, block))](
            x_NV, x_NV.stride(0), V, tables.slot_V, tables.num_cells, root_N,
            slope_RC, slope_RC.stride(0), factor_N, student.top_N, student.log_linked_N,
            rest_factor_N, student.log_total_N, root_N if labels_N is None else labels_N,
            student.plain_log_total_N, 1 / temperature, shift, ce_factor,
            HAS_LABELS=labels_N is not None, BLOCK=block, num_warps=NUM_WARPS,
        )
