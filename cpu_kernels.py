"""Rows of logits on a CPU, compiled: what losses.py does in ten to forty passes of torch, in a few.

losses.py takes these where it finds this file and numba, for float32 rows that no process group shards; what
it does otherwise is the reference, and what a GPU runs.  Tests: tests/test_cpu_kernels.py.

Sorted distances need no sort.  With N_p(t) the number of entries of p that are larger than t,

    sum over r < k of |p_(r) - q_(r)| = integral of |min(N_p(t), k) - min(N_q(t), k)| dt,

so an entry counts with the sign of what is inside the bars at its own value.  Entries are counted in bins of
equal leading bits; in nearly all bins one side is ahead for the whole bin, and only the others are sorted.

Threads: as many as torch has.  OMP_WAIT_POLICY=passive, set before Python starts, keeps torch's own threads
from spinning on the cores that these need.

Shapes: N, M rows; R rows of chunks; C chunks; V, W vocabularies.  Needs numba, numpy and torch.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

f32 = np.float32
TINY, HUGE = f32(np.finfo(f32).tiny), f32(np.finfo(f32).max ** 0.9)  # HUGE leaves room for what multiplies it
LOWEST = f32(-87.336)  # nats, the logarithm of TINY
BLOCK = 512  # numbers that are worked on together, so that the compiler makes vectors of them
BIN_BITS = 16  # of the 31 of a positive float32: its exponent and 8 bits more, so bins are 0.4 % wide
UNSURE = f32(2)  # in the place of a sign

plain = {"contract", "nsz"}
sums = {"contract", "nsz", "reassoc"}  # not nnan: what is no number is reported, not hidden


def event_kl(
    x_NV: Tensor, row_C: Tensor, y_MW: Tensor, teacher_row_C: Tensor, event_V: Tensor, event_W: Tensor,
    num_events: int, temperature: float, shift: float,
) -> tuple[Tensor, Tensor]:
    """losses._event_kl: ((C,) KL over events where a chunk begins; (N, V) its derivative by x)."""
    for logits, rows, event in ((x_NV, row_C, event_V), (y_MW, teacher_row_C, event_W)):
        _check(rows, 0, len(logits), "rows")
        _check(event, -1, num_events, "events")
        if len(event) != logits.shape[1]:
            raise ValueError(f"events of {len(event)} tokens, logits of {logits.shape[1]}")
    value_C, d_NV = x_NV.new_empty(len(row_C)), _derivative(x_NV, row_C)
    _over_rows(_event_rows, lambda: _event_scratch(num_events), len(row_C), x_NV, row_C, y_MW, teacher_row_C,
               event_V, event_W, f32(1 / temperature), f32(shift), value_C, d_NV)
    return value_C, d_NV


def mixture_distance(
    student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], common: tuple[Tensor, Tensor] | None,
    rest: tuple[Tensor, Tensor] | None, k: int, temperature: float, reverse: bool = False, shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """losses._common_and_rest of chunks' probabilities, which are weighted sums of the softmax of their rows.

    Args:
        student, teacher: logits (N, X); weights (R,); rows (R,), chunk by chunk; of which chunk (R,).
        common, rest: (student ids, teacher ids); None: all are rest.
    Returns:
        ((C,) values, (N, V) their derivative by the student's logits, (R,) by its weights).
    """
    x, weight_R, row_R, of_R = student
    for side, (logits, _, rows, _) in enumerate((student, teacher)):
        _check(rows, 0, len(logits), "rows")
        for ids in (common, rest):
            _check(row_R[:0] if ids is None else ids[side], 0, logits.shape[1], "tokens")
    starts = [F.pad(torch.bincount(side[3]).cumsum(0), (1, 0)) for side in (student, teacher)]
    value_C, d_NV, d_R = x.new_empty(len(starts[0]) - 1), _derivative(x, row_R), torch.empty_like(weight_R)
    nothing = row_R[:0], row_R[:0]
    sides = *student[:3], starts[0], *teacher[:3], starts[1], *(common or nothing), *(rest or nothing)
    how = k, reverse, f32(shift), f32(1 / temperature)
    sizes, out = (x.shape[1], teacher[0].shape[1]), (value_C, d_NV, d_R)
    sizes += tuple(map(len, rest)) if rest else sizes
    _over_rows(_mixture_rows, lambda: _mixture_scratch(*sizes), len(value_C), *sides, *how, *out)
    return value_C, d_NV, d_R


def sorted_distance(p_NV: Tensor, q_NW: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """losses._sorted_distance: ((N,) sum |sorted p - sorted q| of the k largest, (N, V) derivative by p)."""
    value_N, sign_NV = p_NV.new_empty(len(p_NV)), torch.empty_like(p_NV)
    sizes = p_NV.shape[1], q_NW.shape[1]
    _over_rows(_distance_rows, lambda: _scratch(*sizes), len(p_NV), p_NV, q_NW, k, value_N, sign_NV)
    return value_N, sign_NV


def divergence(
    x_NV: Tensor, y_NV: Tensor, mixture: tuple[float, float, float] | None, temperature: float,
    teacher_temperature: float, floor: float,
) -> tuple[Tensor, Tensor]:
    """((N,) values, (N, V) their derivative by x) of divergences between p, q, the softmax of x and y.

    Args:
        mixture: (a, b, s): a KL(q || m) + b KL(p || m), m = s p + (1 - s) q; None: sum |p - q| / 2.
        floor: nats; no log-probability is lower.
    Raises:
        ValueError: x and y are not as large.
    """
    if x_NV.shape != y_NV.shape:
        raise ValueError(f"logits {tuple(x_NV.shape)} of the student, {tuple(y_NV.shape)} of the teacher")
    value_N, d_NV = x_NV.new_empty(len(x_NV)), torch.empty_like(x_NV)
    how = [f32(x) for x in (*(mixture or (0, 0, -1)), 1 / temperature, 1 / teacher_temperature, floor)]
    _over_rows(_divergence_rows, lambda: _divergence_scratch(x_NV.shape[1]), len(x_NV), x_NV, y_NV, *how,
               value_N, d_NV)
    return value_N, d_NV


def _check(ids: Tensor, low: int, end: int, name: str) -> None:
    """Compiled code reads memory without asking whether it is there.

    Raises:
        ValueError: ids beyond low, ..., end - 1.
    """
    if len(ids) and not (low <= int(ids.min()) and int(ids.max()) < end):
        raise ValueError(f"{name} from {int(ids.min())} to {int(ids.max())}, expected {low} to {end - 1}")


def _derivative(x_NV: Tensor, row_R: Tensor) -> Tensor:
    """(N, V): 0 in the rows that are not listed, the others to be written."""
    others = torch.ones(len(x_NV), dtype=torch.bool).index_fill_(0, row_R, False)
    return torch.empty_like(x_NV).index_fill_(0, others.nonzero().squeeze(1), 0.0)


def _over_rows(kernel: Callable[..., None], scratch: Callable[[], Any], count: int, *args: Any) -> None:
    """kernel(row, own scratch, *args) for all rows, tensors as arrays; a thread takes the next one left."""
    arrays = [x.detach().contiguous().numpy() if torch.is_tensor(x) else x for x in args]
    rows, lock = iter(range(count)), threading.Lock()

    def work() -> None:
        own = scratch()
        while True:
            with lock:
                row = next(rows, None)
            if row is None:
                return
            kernel(row, own, *arrays)

    threads = max(1, min(count, torch.get_num_threads()))
    others = [_pool(threads - 1, os.getpid()).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads)


# --- functions of a number ------------------------------------------------------------------------


@njit(error_model="numpy", fastmath=plain)
def exp(x):
    """To 1e-7, relative, by a polynomial (Cephes, expf), for x < 88; 0 below LOWEST; NaN of NaN."""
    z = LOWEST if LOWEST > x else x
    n = np.floor(z * f32(1.44269504) + f32(0.5))
    r = z - n * f32(0.693359375) + n * f32(2.12194440e-4)
    y = f32(1.9875691500e-4)
    y = y * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    y = y * r + f32(5.0000001201e-1)
    y = y * r * r + r + f32(1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(f32)
    return f32(0) if LOWEST > x else y * power


@njit(error_model="numpy", fastmath=plain)
def log(x, octaves):
    """log(x 2^octaves) to 1e-7, by a polynomial (Cephes, logf); for positive normal x, whole octaves."""
    bits = f32(x).view(np.int32)
    n = np.int32((bits - np.int32(0x3F3504F3)) >> np.int32(23))
    whole = f32(n) + octaves
    z = np.int32(bits - np.int32(n << np.int32(23))).view(f32) - f32(1)
    y = f32(7.0376836292e-2)
    y = y * z + f32(-1.1514610310e-1)
    y = y * z + f32(1.1676998740e-1)
    y = y * z + f32(-1.2420140846e-1)
    y = y * z + f32(1.4249322787e-1)
    y = y * z + f32(-1.6668057665e-1)
    y = y * z + f32(2.0000714765e-1)
    y = y * z + f32(-2.4999993993e-1)
    y = y * z + f32(3.3333331174e-1)
    y = y * z * z * z - f32(0.5) * z * z + whole * f32(-2.12194440e-4)
    return z + y + whole * f32(0.693359375)


@njit(cache=True)
def octaves_of(nats):
    """(whole octaves, nats that remain): to add to a logarithm of the opposite size without rounding."""
    octaves = np.floor(nats / np.log(2.0) + 0.5)
    return f32(octaves), f32(nats - octaves * np.log(2.0))


@njit(nogil=True, error_model="numpy", fastmath=sums, cache=True)
def largest(x):
    """Of x."""
    lanes = np.full(64, f32(-np.inf))
    whole = len(x) // len(lanes) * len(lanes)
    for b in range(0, whole, len(lanes)):
        part = x[b : b + len(lanes)]
        for j in range(len(lanes)):
            lanes[j] = part[j] if part[j] > lanes[j] else lanes[j]
    top = lanes[0]
    for j in range(len(lanes)):
        top = max(top, lanes[j])
    for i in range(whole, len(x)):
        top = max(top, x[i])
    return max(top, -np.finfo(f32).max)  # a row of -inf alone


@njit(nogil=True, error_model="numpy", fastmath=sums, cache=True)
def total(x):
    """Sum of x, as exact as float32 numbers allow."""
    found = 0.0
    for b in range(0, len(x), BLOCK):
        part, block = f32(0), x[b : b + BLOCK]
        for i in range(len(block)):
            part += block[i]
        found += part
    return found


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _exps(x, over_temperature, shift, out):
    """exp(x over_temperature + shift - the largest) into out; (the largest - shift, the sum)."""
    top = largest(x) * over_temperature - shift
    for i in range(len(x)):
        out[i] = exp(x[i] * over_temperature - top)
    return top, total(out)


# --- divergences of one vocabulary ----------------------------------------------------------------


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _divergence_scratch(V):
    return np.empty(V, f32), np.empty(V, f32), np.empty(BLOCK, f32), np.empty(BLOCK, f32)


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _logp(x, over_temperature, top, log_z, floor, out):
    for i in range(len(x)):
        found = x[i] * over_temperature - top - log_z
        out[i] = floor if floor > found else found


@njit(nogil=True, error_model="numpy", fastmath=sums, cache=True)
def _divergence_block(logp, logq, p, q, a, b, s, floor, d):
    """Of what `divergence` sums; its derivative by log p into d."""
    value = f32(0)
    if s == 1:  # KL(q || p); KL(p || p) is 0
        for i in range(len(d)):
            value += a * q[i] * (logq[i] - logp[i])
            d[i] = -a * q[i] if logp[i] > floor else f32(0)
    elif s == 0:
        for i in range(len(d)):
            value += b * p[i] * (logp[i] - logq[i])
            d[i] = b * p[i] * (logp[i] - logq[i] + f32(1))
    elif s < 0:
        for i in range(len(d)):
            gap = p[i] - q[i]
            value += f32(0.5) * abs(gap)
            d[i] = p[i] * (f32(0.5) if gap > 0 else f32(-0.5) if gap < 0 else f32(0))
    else:
        for i in range(len(d)):
            m = s * p[i] + (f32(1) - s) * q[i]
            m = TINY if TINY > m else m
            logm, share = log(m, f32(0)), s / m
            value += a * q[i] * (logq[i] - logm) + b * p[i] * (logp[i] - logm)
            d[i] = p[i] * (b * (logp[i] - logm + f32(1) - p[i] * share) - a * q[i] * share)
    return value


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _divergence_rows(n, scratch, x, y, a, b, s, over_temperature, over_teacher, floor, value, d):
    p, q, logp, logq = scratch
    x_n, y_n, own, found = x[n], y[n], d[n], 0.0
    (top, Z), (y_top, y_Z) = _exps(x_n, over_temperature, f32(0), p), _exps(y_n, over_teacher, f32(0), q)
    over_z, over_y, log_z, log_y = f32(1 / Z), f32(1 / y_Z), f32(np.log(Z)), f32(np.log(y_Z))
    for start in range(0, len(own), BLOCK):
        end = min(start + BLOCK, len(own))
        block_p, block_q, k = p[start:end], q[start:end], end - start
        for i in range(k):
            block_p[i] *= over_z
            block_q[i] *= over_y
        _logp(x_n[start:end], over_temperature, top, log_z, floor, logp[:k])
        _logp(y_n[start:end], over_teacher, y_top, log_y, floor, logq[:k])
        found += _divergence_block(logp[:k], logq[:k], block_p, block_q, a, b, s, floor, own[start:end])
    value[n] = found
    mean = f32(total(own))
    for i in range(len(own)):
        own[i] = over_temperature * (own[i] - p[i] * mean)


# --- KL over events -------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _mass(x, event, over_temperature, shift, out, mass):
    """exp(x + shift - the largest) into `out`, a row or a block; its sums over events; their sum.

    `event` is -1 for none, which is the last place of `mass`.
    """
    top = largest(x) * over_temperature - shift
    mass[:] = TINY
    for b in range(0, len(x), BLOCK):
        part, own = x[b : b + BLOCK], event[b : b + BLOCK]
        found = out[b : b + BLOCK] if len(out) == len(x) else out[: len(part)]
        for i in range(len(part)):
            found[i] = exp(part[i] * over_temperature - top)
        for i in range(len(part)):
            mass[own[i]] += found[i]
    mass[-1] = TINY
    return total(mass)


@njit(nogil=True, error_model="numpy", fastmath=sums, cache=True)
def _event_value(q, mass, log_ratio, over_z, over_y):
    """sum q (log(q / mass) + log_ratio) over events; the derivative by mass takes the place of mass."""
    value = 0.0
    octaves, more = octaves_of(log_ratio)
    for b in range(0, len(q), BLOCK):
        part, own, found = q[b : b + BLOCK], mass[b : b + BLOCK], f32(0)
        for e in range(len(part)):
            ratio = min(max(part[e] / own[e], TINY), HUGE)
            found += part[e] * (log(ratio, octaves) + more)
            own[e] = over_z - ratio * over_y
        value += found
    mass[-1] = f32(0)
    return value


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _event_scratch(num_events):
    return np.empty(num_events + 1, f32), np.empty(num_events + 1, f32), np.empty(BLOCK, f32)


@njit(nogil=True, error_model="numpy", fastmath=plain, cache=True)
def _event_rows(c, scratch, x, row, y, teacher_row, event_V, event_W, over_temperature, shift, value, d):
    mass, q, block = scratch
    own = d[row[c]]
    Z = _mass(x[row[c]], event_V, over_temperature, shift, own, mass)
    y_Z = _mass(y[teacher_row[c]], event_W, over_temperature, f32(0), block, q)
    log_ratio = np.log(Z) - np.log(y_Z)
    found = _event_value(q, mass, log_ratio, f32(over_temperature / Z), f32(over_temperature / y_Z))
    value[c] = found / y_Z
    for v in range(len(own)):
        own[v] *= mass[event_V[v]]


# --- sorted distance ------------------------------------------------------------------------------


@njit(error_model="numpy")
def _bin(x):
    return (f32(x).view(np.uint32) >> np.uint32(31 - BIN_BITS)) & np.uint32(2**BIN_BITS - 1)


@njit(nogil=True, error_model="numpy", cache=True)
def _scratch(size_p, size_q):
    """What `_distance` works on: a place per bin for counts, signs, cells; cells; entries held back."""
    n = 2**BIN_BITS
    return (np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, f32), np.zeros(n, f32),
            np.zeros(n, np.int32), np.empty((n, 4), np.int32), np.empty(size_p, np.int32),
            np.empty(size_q, f32))


@njit(nogil=True, error_model="numpy", cache=True)
def _distance(p, q, k, sign, scratch):
    """sum |sorted p - sorted q| over the k largest; its derivative by p into `sign`."""
    count_p, count_q, sign_p, sign_q, cell_of, cells, places, others = scratch
    if not np.isfinite(total(p) + total(q)):
        sign[:] = np.nan
        return np.nan
    for i in range(len(p)):
        count_p[_bin(p[i])] += np.int32(1)
    for i in range(len(q)):
        count_q[_bin(q[i])] += np.int32(1)
    top = np.int64(_bin(max(largest(p), largest(q))))
    last = _judge(count_p, count_q, top, k, sign_p, sign_q, cell_of, cells)
    held_p, held_q = 0, 0
    for i in range(len(p)):
        s = sign_p[_bin(p[i])]
        sign[i] = s
        if s == UNSURE:
            places[held_p] = i
            held_p += 1
    value = _dot(sign, p)
    block = np.empty(BLOCK, f32)
    for b in range(0, len(q), BLOCK):
        part = q[b : b + BLOCK]
        for i in range(len(part)):
            s = sign_q[_bin(part[i])]
            block[i] = s
            if s == UNSURE:
                others[held_q] = part[i]
                held_q += 1
        value -= _dot(block[: len(part)], part)
    if last:
        value += _sort_unsure(p, k, sign, places[:held_p], others[:held_q], cell_of, cells[: last + 1])
    return value


@njit(nogil=True, fastmath=sums, error_model="numpy", cache=True)
def _dot(a, b):
    """In float64: what is summed here may cancel."""
    found = 0.0
    for i in range(len(a)):
        found += np.float64(a[i]) * np.float64(b[i])
    return found


@njit(nogil=True, error_model="numpy", cache=True)
def _judge(count_p, count_q, top, k, sign_p, sign_q, cell_of, cells):
    """The sign of the entries of either side by bin, from bin `top` down; the counts are set back to 0.

    The entries of p in a bin have the ranks above_p, ..., end_p - 1.  An entry of rank r < k counts with the
    sign of p_(r) - q_(r).  Where both may be in the same bin, it is UNSURE, and the bin a cell (above_p,
    above_q, entries of p and of q in the cells before); one more cell ends them.  Returns how many there are
    without that.
    """
    above_p, above_q, held_p, held_q, last = 0, 0, 0, 0, 0
    for b in range(top, -1, -1):
        in_p, in_q = count_p[b], count_q[b]
        if in_p + in_q == 0:
            continue
        end_p, end_q = above_p + in_p, above_q + in_q
        s = f32(-1) if above_q >= end_p else f32(1) if above_p >= end_q else UNSURE
        s_p, s_q = s, s
        if max(end_p, end_q) > k:
            s_p = f32(0) if above_p >= k else s if end_p <= k else UNSURE
            s_q = f32(0) if above_q >= k else s if end_q <= k else UNSURE
        if b == 0:  # it holds 0 and what is as good as that
            s_p = s_q = f32(0)
        if s_p == UNSURE or s_q == UNSURE:
            s_p = s_q = UNSURE
            cells[last, 0], cells[last, 1], cells[last, 2], cells[last, 3] = above_p, above_q, held_p, held_q
            cell_of[b] = last
            held_p, held_q, last = held_p + in_p, held_q + in_q, last + 1
        sign_p[b], sign_q[b], count_p[b], count_q[b] = s_p, s_q, 0, 0
        above_p, above_q = end_p, end_q
    cells[last, 2], cells[last, 3] = held_p, held_q
    return last


@njit(nogil=True, error_model="numpy", cache=True)
def _sort_unsure(p, k, sign, places, held, cell_of, cells):
    """What entries in UNSURE bins add to the distance, beyond UNSURE times themselves; their signs.

    places: of those of p.  held: those of q.
    """
    last = len(cells) - 1
    keys, others = np.empty(len(places), np.int64), np.empty_like(held)
    at_p, at_q = cells[:, 2].copy(), cells[:, 3].copy()
    for i in places:
        j = cell_of[_bin(p[i])]
        keys[at_p[j]] = (np.int64(f32(p[i]).view(np.int32)) << 32) | i  # whole numbers grow with the float
        at_p[j] += 1
    for x in held:
        j = cell_of[_bin(x)]
        others[at_q[j]] = x
        at_q[j] += 1
    value = 0.0
    for j in range(last):
        own, other = keys[cells[j, 2] : cells[j + 1, 2]], others[cells[j, 3] : cells[j + 1, 3]]
        own.sort()
        other.sort()
        n, m = len(own), len(other)
        offset = cells[j, 0] - cells[j, 1]  # rank 0 of p in this cell is rank `offset` of q in it
        for r in range(n):
            i = own[n - 1 - r] & 0xFFFFFFFF
            s = _compare(p[i], other, m - 1 - r - offset) if cells[j, 0] + r < k else 0
            sign[i] = s
            value += (s - UNSURE) * np.float64(p[i])
        for r in range(m):
            place, s = n - 1 - r + offset, 0
            if cells[j, 1] + r < k:
                s = 1 if place >= n else -1
                if 0 <= place < n:
                    s = _compare(p[own[place] & 0xFFFFFFFF], other, m - 1 - r)
            value -= (s - UNSURE) * np.float64(other[m - 1 - r])
    return value


@njit(error_model="numpy")
def _compare(x, ascending, place):
    """Sign of x less the entry at `place`; what is behind the end is larger, before the start smaller."""
    if place >= len(ascending):
        return -1
    if place < 0:
        return 1
    return (x > ascending[place]) - (x < ascending[place])


@njit(nogil=True, error_model="numpy", cache=True)
def _distance_rows(c, scratch, p, q, k, value, sign):
    value[c] = _distance(p[c], q[c], k, sign[c], scratch)


# --- probabilities of chunks ----------------------------------------------------------------------


@njit(nogil=True, fastmath=plain, error_model="numpy", cache=True)
def _softmax(x, over_temperature, shift, out):
    """softmax(x over_temperature) exp(shift)."""
    factor = f32(np.exp(shift) / _exps(x, over_temperature, shift, out)[1])
    for i in range(len(x)):
        out[i] *= factor


@njit(nogil=True, fastmath=plain, error_model="numpy", cache=True)
def _add_scaled(x, factor, first, out):
    for i in range(len(x)):
        out[i] = x[i] * factor + (f32(0) if first else out[i])


@njit(nogil=True, fastmath=plain, error_model="numpy", cache=True)
def _scale_back(p, factor, slope, mean):
    """factor p (slope - mean), in the place of p."""
    for i in range(len(p)):
        p[i] = factor * p[i] * (slope[i] - mean)


@njit(nogil=True, fastmath=sums, error_model="numpy", cache=True)
def _mass_kl(p, q, reverse, shift, d):
    """sum q log(q / p) (reverse: p log(p / q)), p = `p` / exp(shift); its derivative by `p` into d."""
    value = f32(0)
    octaves, more = octaves_of(np.float64(shift))
    for i in range(len(p)):
        a, b = max(p[i], TINY), max(q[i], TINY)
        if reverse:  # with shift 0
            d[i] = log(a / b, f32(0)) + f32(1)
            value += a * (d[i] - f32(1))
        else:
            ratio = min(max(b / a, TINY), HUGE)
            value += b * (log(ratio, octaves) + more)
            d[i] = -ratio
    return value


@njit(nogil=True, error_model="numpy", cache=True)
def _common_and_rest(x, y, common_x, common_y, rest_x, rest_y, k, reverse, shift, out, scratch, bins):
    """KL on the common tokens and one bucket, distance of the sorted rest; the derivative by x into out."""
    own, other, sign = scratch
    a, b, found, kl = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, f32), 0.0
    for start in range(0, len(common_x), BLOCK):
        at_x, at_y = common_x[start : start + BLOCK], common_y[start : start + BLOCK]
        n = len(at_x)
        for i in range(n):
            a[i], b[i] = x[at_x[i]], y[at_y[i]]
        kl += _mass_kl(a[:n], b[:n], reverse, shift, found)
        for i in range(n):
            out[at_x[i]] = found[i]
    for i in range(len(rest_x)):
        own[i] = x[rest_x[i]]
    for i in range(len(rest_y)):
        other[i] = y[rest_y[i]]
    a[0], b[0] = total(own), total(other)
    kl += _mass_kl(a[:1], b[:1], reverse, shift, found)
    unshift = f32(np.exp(-shift))
    for i in range(len(rest_x)):
        own[i] *= unshift
    value = kl + _distance(own, other, k, sign, bins)
    for i in range(len(rest_x)):
        out[rest_x[i]] = sign[i] * unshift + found[0]
    return value


@njit(nogil=True, error_model="numpy", cache=True)
def _mixture_scratch(V, W, rest_V, rest_W):
    sides = np.empty(V, f32), np.empty(W, f32), np.empty(W, f32), np.empty(V, f32)
    rest = np.empty(rest_V, f32), np.empty(rest_W, f32), np.empty(rest_V, f32)
    return sides, rest, _scratch(rest_V, rest_W)


@njit(nogil=True, fastmath=plain, error_model="numpy", cache=True)
def _mixture_rows(c, scratch, x, weight, row, start, y, teacher_weight, teacher_row, teacher_start, common_x,
                  common_y, rest_x, rest_y, k, reverse, shift, over_temperature, value, d, d_weight):
    (p, q, one, slope), rest, bins = scratch
    for r in range(start[c], start[c + 1]):
        _softmax(x[row[r]], over_temperature, shift, d[row[r]])
        _add_scaled(d[row[r]], weight[r], r == start[c], p)
    for r in range(teacher_start[c], teacher_start[c + 1]):
        _softmax(y[teacher_row[r]], over_temperature, f32(0), one)
        _add_scaled(one, teacher_weight[r], r == teacher_start[c], q)
    if len(common_x) + len(rest_x) == 0:
        value[c] = _distance(p, q, k, slope, bins)
    else:
        value[c] = _common_and_rest(p, q, common_x, common_y, rest_x, rest_y, k, reverse, shift, slope, rest,
                                    bins)
    unshift = np.exp(-np.float64(shift))
    for r in range(start[c], start[c + 1]):
        d_weight[r] = _dot(slope, d[row[r]])
        _scale_back(d[row[r]], weight[r] * over_temperature, slope, f32(d_weight[r] * unshift))
