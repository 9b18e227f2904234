"""Compute losses on rows of logits on a CPU, in a few compiled passes over memory.

torch makes ten to forty passes for the same results.  losses.py and translation.py call these
functions wherever they find this file and numba, for float32 rows that no process group shards.
Their torch code is the reference; it also serves all other cases, GPUs included.

Every kernel works on one row (or one chunk) and returns a value together with its derivative,
because autograd cannot look inside compiled code.

A sorted distance needs no sort.  With N_p(t) the number of entries of p that are larger than t,

    sum over r < k of |p_(r) - q_(r)| = integral of |min(N_p(t), k) - min(N_q(t), k)| dt,

so each entry is added or subtracted, by the sign of the difference inside the bars where t is its
value.  Entries are counted in bins of equal leading bits.  In nearly all bins one side is ahead
for the whole bin, and the counts alone give the sign.  Only the other bins are sorted.
The section "sorted distance" works through an example.

Threads: as many as torch has.  OMP_WAIT_POLICY=passive, set before Python starts, keeps torch's
own threads from spinning on the cores that these need.

Shapes: N student rows, M teacher rows, C chunks, R rows of chunks (a chunk has one or several),
V student vocabulary, W teacher vocabulary.  x and y are logits of the student and of the teacher;
p and q are their probabilities.

You may copy this file beside losses.py.  Needs numba, numpy and torch.
License: Apache-2.0 (see LICENSE).  Tests: tests/test_cpu_kernels.py.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

f32 = np.float32

# The smallest normal float32, 1.2e-38.  It stands for probability 0, whose logarithm is infinite.
TINY = f32(np.finfo(f32).tiny)
LOG_TINY = f32(np.log(np.float64(TINY)))
# 5e34, the largest ratio of two masses.  A ratio is multiplied by other factors afterwards, and
# the exponent 0.9 leaves them a factor of 7e3 before float32 overflows.  As in losses.py, untuned.
HUGE = f32(np.finfo(f32).max ** 0.9)
# Nats, the logarithm of TINY.  exp returns 0 below it, for the reduced exponent has no place left.
LOWEST = f32(-87.336)
# Entries per inner loop: 2 KiB of float32, so that several blocks fit in a 32 KiB L1 cache.
# A multiple of all vector lengths.  A sum stays in float32 inside a block, so its value is a part
# of the result.  Rows of 50,000 take the same time from 512 to 8,192, within the noise.
BLOCK = 512
# Share of the mass below which the tokens that have an event are scaled by themselves.  The ratios
# that underflow otherwise belong to shares of 3e-8 or less, so 3e-5 of what this share leaves.
SMALL_SHARE = 1e-3
MOST_MASS = 80.0  # nats, of a mass that others are added to: float32 ends at e^88
# Mass of the tokens that are not kept, beside a largest of 1, below which they are summed by
# themselves: float32 ends at 1e-38, and 1e8 of them may be there.
SMALL_REST = 1e-30
SMALL_TAIL = f32(-60)  # nats; exp(60) = 1e26 times a probability is still exact
FLOOR_WIDTH = f32(30)  # nats, above the logarithm of any number of tokens
# Independent maxima in `largest`: four vectors of AVX-512, eight of AVX2.  Not tuned: 50,000
# entries take 15 us with 16 lanes, 8 us with 64 and 4 us with 256, where a whole row takes 150 us.
LANES = 64
# Logits of both sides in the rows that a thread takes at a time, where rows are short: a call costs
# as much as 1,000 of them.  Not tuned.
ENTRIES_AT_ONCE = 2**16
NODES_AT_ONCE = 64  # of a translation, likewise
# Leading bits, of the 31 below the sign of a float32, that choose a bin: all 8 of the exponent and
# 8 of the mantissa, so a bin is at most 1/256 = 0.4 % wide.  A table of 2^16 takes 256 KiB; four
# of them fit in an L2 cache of 1 MiB.  Not tuned.
BIN_BITS = 16
# Stands where a sign (-1, 0 or 1) is not known yet.  Any other exact float32 would do.
UNSURE = f32(2)
# (a, b, s) of `divergence` for total variation: no mixture has a negative s.
TOTAL_VARIATION = (0.0, 0.0, -1.0)

# fastmath may fuse a product and a sum (one rounding less) and ignore the sign of zero.
# Sums may be reordered too, else they are not vectorized.  Never "nnan" or "ninf": a logit that is
# no number must reach the loss, where it is reported.
# error_model="numpy": x / 0 is inf, not an exception, whose test would stop vectorization.
# nogil: rows run in threads.
as_written = njit(nogil=True, error_model="numpy", cache=True)
elementwise = njit(nogil=True, error_model="numpy", cache=True, fastmath={"contract", "nsz"})
summing = njit(nogil=True, error_model="numpy", cache=True, fastmath={"contract", "nsz", "reassoc"})


def event_kl(
    x_NV: Tensor, row_C: Tensor,
    y_MW: Tensor, teacher_row_C: Tensor,
    event_V: Tensor, event_W: Tensor, num_events: int, shift: float,
) -> tuple[Tensor, Tensor]:
    """Compute KL(q || p) over events, one value per chunk: losses._kl_over_events.

    p(e) is the probability of event e after tokens without an event are left out; q likewise.

    Args:
        x_NV, y_MW: (N, V) and (M, W) float32 logits of the student and of the teacher.
        row_C, teacher_row_C: (C,) int64, the row in which a chunk begins.
        event_V, event_W: (V,) and (W,) integer, the event of each token, -1 for none.
        num_events: all events are smaller.
        shift: nats >= 0 and < 88.  The student's softmax is computed times exp(shift), so that
            float32 reaches smaller probabilities.
    Returns:
        ((C,) values in nats, (N, V) derivative by x; 0 in rows that no chunk begins in).
    Raises:
        ValueError: a row, an event or the length of an event table does not fit the logits.
    """
    _check_side(x_NV, row_C, event_V, num_events)
    _check_side(y_MW, teacher_row_C, event_W, num_events)
    value_C = x_NV.new_empty(len(row_C))
    d_NV = _new_derivative(x_NV, row_C)
    over_rows(
        _event_chunk, lambda: _event_scratch(num_events), len(row_C),
        x_NV, row_C, y_MW, teacher_row_C, event_V, event_W, f32(shift), value_C, d_NV,
    )
    return value_C, d_NV


class Belief(NamedTuple):
    """Tell what the teacher's belief at N roots of a translation is made of; see translation.py.

    Tensors or arrays.  Entries of root n have the numbers start[n], ..., start[n + 1] - 1.
    """

    logits: Any  # (M, W), float32
    row: Any  # (N,), of logits
    cell: Any  # (W,) int32, cell of each teacher token, -1 for none
    # What cannot come at a root: Tables.join_start_V, join_low_J, join_high_J, order_W.
    join_start: Any
    join_low: Any
    join_high: Any
    order: Any
    before: Any  # (N,), student token in front, -1 for none
    next: Any  # (N,), teacher token that comes, whatever cannot
    # (N,), (N,) float32, (N + 1,), (E,) int, (E,) float32: with this probability the token before
    # goes on, and with that it does not; with tokens in these cells, by these shares
    going_mass: Any
    going_ends: Any
    going_start: Any
    going_cell: Any
    going_share: Any
    # (N + 1,), (A,): teacher tokens whose probabilities are asked for
    asked_start: Any
    asked_token: Any


class Answers(NamedTuple):
    """Hold what the teacher's rows at the roots say beside the cells.

    asked_A: probabilities of the tokens asked for, 0 of those that cannot come.
    log_total_N: logsumexp of the logits over all tokens.
    """

    asked_A: Tensor
    log_total_N: Tensor


class CellMasses(NamedTuple):
    """Hold the student's masses of cells, exp(logits - top_N) summed.

    top_N is `shift` below the largest logit.
    """

    mass_NC: Tensor
    top_N: Tensor


def translated_kl(
    x_NV: Tensor, row_N: Tensor, cell_V: Tensor, belief: Belief, num_cells: int, shift: float
) -> tuple[Tensor, Tensor, Answers]:
    """Compute KL(q || p) over the cells of the roots of a translation.

    Args:
        x_NV: (N, V) float32 logits of the student.
        row_N: (N,) int64, its row at each root.
        cell_V: (V,) int32, cell of each student token, -1 for none.
        num_cells: all cells are smaller.
        shift: see `event_kl`.
    Returns:
        ((N,) values in nats, (N, V) derivative by x; 0 in rows without a root; the Answers).
    Raises:
        ValueError: a row, a token or a cell does not fit the logits.
    """
    _check_belief(x_NV, row_N, cell_V, belief, num_cells)
    num_roots = len(row_N)
    value_N = x_NV.new_empty(num_roots)
    d_NV = _new_derivative(x_NV, row_N)
    answers = _new_answers(belief)
    W = belief.logits.shape[1]
    size = rows_at_once(x_NV.shape[1] + W)
    over_rows(
        _translated_rows, lambda: _belief_scratch(belief.cell, num_cells), -(-num_roots // size),
        size, x_NV, row_N, cell_V, belief, f32(shift), value_N, d_NV, answers,
    )
    return value_N, d_NV, answers


def translated_cells(
    x_NV: Tensor, row_N: Tensor, cell_V: Tensor, belief: Belief, num_cells: int, shift: float
) -> tuple[Tensor, Tensor, CellMasses, Answers]:
    """Compute what both models give to the cells of the roots of a translation.

    Args, Raises: see `translated_kl`.
    Returns:
        ((N, C) logarithms of the student's masses, up to a constant of the row; (N, C) those of the
        teacher's; what `cells_derivative` needs; the Answers).
    """
    _check_belief(x_NV, row_N, cell_V, belief, num_cells)
    num_roots = len(row_N)
    logp_NC = x_NV.new_empty(num_roots, num_cells)
    logq_NC = torch.empty_like(logp_NC)
    masses = CellMasses(torch.empty_like(logp_NC), x_NV.new_empty(num_roots))
    answers = _new_answers(belief)
    W = belief.logits.shape[1]
    size = rows_at_once(x_NV.shape[1] + W)
    over_rows(
        _cell_rows, lambda: _belief_scratch(belief.cell, num_cells), -(-num_roots // size),
        size, x_NV, row_N, cell_V, belief, f32(shift), logp_NC, logq_NC, masses, answers,
    )
    return logp_NC, logq_NC, masses, answers


def cells_derivative(
    x_NV: Tensor, row_N: Tensor, cell_V: Tensor, masses: CellMasses, grad_NC: Tensor, shift: float
) -> Tensor:
    """Return the (N, V) derivative by x of the sum of grad_NC times `translated_cells`."""
    d_NV = _new_derivative(x_NV, row_N)
    num_roots, num_cells = grad_NC.shape
    size = rows_at_once(2 * x_NV.shape[1])
    over_rows(
        _cell_back_rows, lambda: (np.empty(num_cells + 1, f32),), -(-num_roots // size),
        size, x_NV, row_N, cell_V, masses, grad_NC, f32(shift), d_NV,
    )
    return d_NV


def going_on(
    y_MW: Tensor, row_K: Tensor, low_K: Tensor, high_K: Tensor, level_K: Tensor, order_W: Tensor,
    pieces_W: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ask how the teacher tokens ``order_W[low:high]`` go on: translation.going_on.

    Returns:
        ((K,) probability that they do; (K,) that they do not; (E,) int64 node, (E,) int64 next
        student token and (E,) share of it in that probability; no two entries of a node have the
        same token).
    Raises:
        ValueError: a row or a range is outside the logits.
    """
    _check(row_K, 0, len(y_MW), "rows")
    W = y_MW.shape[1]
    _check(low_K, 0, W + 1, "ranges")
    _check(high_K, 0, W + 1, "ranges")
    _check(order_W, 0, W, "tokens")
    _check(level_K, 0, pieces_W.shape[1] + 1, "levels")
    num_nodes = len(row_K)
    size_K = high_K - low_K
    start_K1 = F.pad(size_K.cumsum(0), (1, 0))
    largest = int(size_K.max()) if num_nodes else 0
    going_K = y_MW.new_empty(num_nodes)
    ends_K = torch.empty_like(going_K)
    count_K = torch.empty_like(row_K)
    next_E = torch.empty(int(start_K1[-1]), dtype=torch.int64)
    share_E = y_MW.new_empty(len(next_E))
    over_rows(
        _going_on_nodes, lambda: (np.empty(largest, f32),), -(-num_nodes // NODES_AT_ONCE),
        y_MW, row_K, low_K, high_K, level_K, order_W, pieces_W,
        start_K1, going_K, ends_K, count_K, next_E, share_E,
    )
    # every node has room for all of its tokens; keep what was filled
    node_G = torch.repeat_interleave(torch.arange(num_nodes), count_K)
    begin_K = count_K.cumsum(0) - count_K
    place_G = torch.arange(len(node_G)) + (start_K1[:-1] - begin_K)[node_G]
    return going_K, ends_K, node_G, next_E[place_G], share_E[place_G]


def logsumexp_without(
    x_NV: Tensor, row_L: Tensor, start_L1: Tensor, token_X: Tensor
) -> Tensor:
    """Return the (L,) logsumexp of rows of x without some of their tokens.

    Args:
        row_L: (L,) int64, of x.
        start_L1, token_X: row l leaves out token_X[start[l]:start[l + 1]].
    Raises:
        ValueError: a row or a token is outside the logits.
    """
    _check(row_L, 0, len(x_NV), "rows")
    _check(token_X, 0, x_NV.shape[1], "tokens")
    out_L = x_NV.new_empty(len(row_L))
    V = x_NV.shape[1]
    size = rows_at_once(V)
    over_rows(
        _logsumexp_rows, lambda: (np.empty(V, f32),), -(-len(row_L) // size),
        size, x_NV, row_L, start_L1, token_X, out_L,
    )
    return out_L


def add_softmax_without(
    x_NV: Tensor, row_L: Tensor, start_L1: Tensor, token_X: Tensor, logsumexp_L: Tensor,
    grad_L: Tensor, d_NV: Tensor,
) -> None:
    """Add grad_L times the derivative of `logsumexp_without` to d_NV; no row occurs twice."""
    V = x_NV.shape[1]
    size = rows_at_once(V)
    over_rows(
        _softmax_rows, lambda: (np.empty(V, f32),), -(-len(row_L) // size),
        size, x_NV, row_L, start_L1, token_X, logsumexp_L, grad_L, d_NV,
    )


def _new_answers(belief: Belief) -> Answers:
    return Answers(
        belief.logits.new_empty(len(belief.asked_token)), belief.logits.new_empty(len(belief.row))
    )


def rows_at_once(entries: int) -> int:
    """Return how many rows of so many entries a thread takes at a time."""
    return max(1, ENTRIES_AT_ONCE // max(1, entries))


def _check_belief(
    x_NV: Tensor, row_N: Tensor, cell_V: Tensor, belief: Belief, num_cells: int
) -> None:
    """Check all numbers that compiled code reads memory by.

    Raises:
        ValueError: they do not fit the logits.
    """
    V = x_NV.shape[1]
    W = belief.logits.shape[1]
    _check_side(x_NV, row_N, cell_V, num_cells, "cells")
    _check_side(belief.logits, belief.row, belief.cell, num_cells, "cells")
    _check(belief.before, -1, V, "tokens")
    _check(belief.next, 0, W, "tokens")
    _check(belief.asked_token, 0, W, "tokens")
    _check(belief.order, 0, W, "tokens")
    _check(belief.join_low, 0, W + 1, "ranges")
    _check(belief.join_high, 0, W + 1, "ranges")
    _check(belief.join_start, 0, len(belief.join_low) + 1, "ranges")
    _check(belief.going_cell, -1, num_cells, "cells")


class ChunkRows(NamedTuple):
    """Hold the rows of one model, chunk by chunk, as tensors or as arrays."""

    logits: Any  # (N, V), float32
    weight: Any  # (R,), float32
    row: Any  # (R,), of logits
    start: Any  # (C + 1,), chunk c has entries start[c], ..., start[c + 1] - 1 of weight and row


class TokenIds(NamedTuple):
    """List the tokens that both vocabularies have, pairwise, and the rest of either."""

    common_x: Any
    common_y: Any
    rest_x: Any
    rest_y: Any


def mixture_distance(
    student: tuple[Tensor, ...],
    teacher: tuple[Tensor, ...],
    common: tuple[Tensor, Tensor] | None,
    rest: tuple[Tensor, Tensor] | None,
    k: int,
    temperature: float,
    reverse: bool = False,
    shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses._common_and_rest of the probabilities of chunks.

    The probabilities of a chunk are a weighted sum of the softmax of its rows.

    Args:
        student, teacher: (logits (N, V) float32, weights (R,) float32, rows (R,) int64,
            chunk of each row (R,) int64, ascending).
        common: (student ids, teacher ids), both (K,): tokens compared by KL; None: no such token.
        rest: (student ids, teacher ids): tokens compared in sorted order; None: all, if common is
            None too.
        k: how many of the largest sorted probabilities to compare.
        temperature: > 0, of both sides.
        reverse: KL(p || q) instead of KL(q || p) on the common tokens; needs shift 0.
        shift: as in `event_kl`.
    Returns:
        ((C,) values in nats, (N, V) their derivative by the student's logits, (R,) their
        derivative by the student's weights).
    Raises:
        ValueError: a row or a token is outside the logits.
    """
    x_NV, weight_R, row_R, chunk_R = student
    y_MW, teacher_weight_R, teacher_row_R, teacher_chunk_R = teacher
    _check(row_R, 0, len(x_NV), "rows")
    _check(teacher_row_R, 0, len(y_MW), "rows")
    none = row_R[:0]
    tokens = TokenIds(*(common or (none, none)), *(rest or (none, none)))
    for ids in (tokens.common_x, tokens.rest_x):
        _check(ids, 0, x_NV.shape[1], "tokens")
    for ids in (tokens.common_y, tokens.rest_y):
        _check(ids, 0, y_MW.shape[1], "tokens")

    student_rows = ChunkRows(x_NV, weight_R, row_R, _chunk_starts(chunk_R))
    teacher_rows = ChunkRows(y_MW, teacher_weight_R, teacher_row_R, _chunk_starts(teacher_chunk_R))
    V = x_NV.shape[1]
    W = y_MW.shape[1]
    num_rest_x = len(rest[0]) if rest else V
    num_rest_y = len(rest[1]) if rest else W
    value_C = x_NV.new_empty(len(student_rows.start) - 1)
    d_NV = _new_derivative(x_NV, row_R)
    d_weight_R = torch.empty_like(weight_R)
    over_rows(
        _mixture_chunk, lambda: _mixture_scratch(V, W, num_rest_x, num_rest_y), len(value_C),
        student_rows, teacher_rows, tokens,
        k, reverse, f32(shift), f32(1 / temperature), value_C, d_NV, d_weight_R,
    )
    return value_C, d_NV, d_weight_R


def sorted_distance(p_NV: Tensor, q_NW: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute sum |sorted p - sorted q| over the k largest entries: losses._sorted_distance.

    Args:
        p_NV, q_NW: (N, V) and (N, W) float32, >= 0.  The shorter rows continue with zeros.
        k: how many entries to compare, >= 1; it may exceed V and W.
    Returns:
        ((N,) values, (N, V) derivative by p: -1, 0 or 1).  Both are NaN in a row of p or q that
        holds an entry that is not finite.
    """
    value_N = p_NV.new_empty(len(p_NV))
    sign_NV = torch.empty_like(p_NV)
    V = p_NV.shape[1]
    W = q_NW.shape[1]
    over_rows(
        _distance_row, lambda: _distance_scratch(V, W), len(p_NV),
        p_NV, q_NW, k, value_N, sign_NV,
    )
    return value_N, sign_NV


def divergence(
    x_NV: Tensor,
    y_NV: Tensor,
    mixture: tuple[float, float, float] | None,
    temperature: float,
    teacher_temperature: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Compute a divergence between p = softmax(x) and q = softmax(y), one value per row.

    Args:
        x_NV, y_NV: (N, V) float32 logits of the student and of the teacher.
        mixture: (a, b, s) of a KL(q || m) + b KL(p || m) with m = s p + (1 - s) q, 0 <= s <= 1;
            None: total variation, sum |p - q| / 2.
        temperature, teacher_temperature: > 0, divide x and y.
        floor: nats; lower log-probabilities are raised to it.
    Returns:
        ((N,) values in nats, for total variation in [0, 1]; (N, V) their derivative by x).
    Raises:
        ValueError: x and y differ in shape.
    """
    if x_NV.shape != y_NV.shape:
        raise ValueError(
            f"logits {tuple(x_NV.shape)} of the student and {tuple(y_NV.shape)} of the teacher; "
            "expected equal shapes: compare models of one vocabulary, position by position"
        )
    value_N = x_NV.new_empty(len(x_NV))
    d_NV = torch.empty_like(x_NV)
    a, b, s = mixture or TOTAL_VARIATION
    V = x_NV.shape[1]
    over_rows(
        _divergence_row, lambda: _divergence_scratch(V), len(x_NV),
        x_NV, y_NV, f32(a), f32(b), f32(s),
        f32(1 / temperature), f32(1 / teacher_temperature), f32(floor), value_N, d_NV,
    )
    return value_N, d_NV


class KeptLogp(NamedTuple):
    """Hold log-probabilities of some tokens of rows of logits, and of all other tokens together.

    kept_RK: (R, K); tail_R: (R,), nats; none below `floor`.
    top_R, log_sum_R: (R,), whose sum is the logsumexp of logits / temperature.
    """

    kept_RK: Tensor
    tail_R: Tensor
    top_R: Tensor
    log_sum_R: Tensor


def kept_logp(
    x_NV: Tensor, row_R: Tensor, ids_RK: Tensor, temperature: float, floor: float, with_tail: bool
) -> KeptLogp:
    """Compute log softmax(x / temperature) of some tokens of some rows.

    Args:
        x_NV: (N, V) float32 logits.
        row_R: (R,) int64, of x.
        ids_RK: (R, K) int64 tokens; no two of a row are equal.
        floor: nats; lower log-probabilities are raised to it.
        with_tail: False leaves the tail at `floor`.
    Raises:
        ValueError: a row or a token is outside the logits.
    """
    _check(row_R, 0, len(x_NV), "rows")
    _check(ids_RK.flatten(), 0, x_NV.shape[1], "tokens")
    num_rows = len(row_R)
    result = KeptLogp(
        kept_RK=x_NV.new_empty(ids_RK.shape),
        tail_R=x_NV.new_full((num_rows,), floor),
        top_R=x_NV.new_empty(num_rows),
        log_sum_R=x_NV.new_empty(num_rows),
    )
    V = x_NV.shape[1]
    size = rows_at_once(V)
    over_rows(
        _kept_rows, lambda: (np.empty(V, f32),), -(-num_rows // size),
        size, x_NV, row_R, ids_RK, f32(1 / temperature), f32(floor), with_tail, result,
    )
    return result


def kept_derivative(
    x_NV: Tensor, row_R: Tensor, ids_RK: Tensor, result: KeptLogp, grad_RK: Tensor,
    grad_tail_R: Tensor, temperature: float, floor: float,
) -> Tensor:
    """Return the (N, V) derivative by x of the sum of the gradients times `kept_logp`'s result.

    Args:
        row_R: no row occurs twice.
        grad_RK, grad_tail_R: those by kept_RK and tail_R.
    """
    d_NV = _new_derivative(x_NV, row_R)
    size = rows_at_once(2 * x_NV.shape[1])
    over_rows(
        _kept_back_rows, lambda: (), -(-len(row_R) // size),
        size, x_NV, row_R, ids_RK, result, grad_RK, grad_tail_R,
        f32(1 / temperature), f32(floor), d_NV,
    )
    return d_NV


class Projected(NamedTuple):
    """Hold softmax(logits / temperature) @ W of R rows, and what its derivative needs.

    out_RK: (R, K).
    top_R, log_sum_R: see KeptLogp.
    """

    out_RK: Tensor
    top_R: Tensor
    log_sum_R: Tensor


class ProjectionEntries(NamedTuple):
    """List the entries of a sparse matrix: W[token, column] = weight.

    Tensors or arrays, (E,) int32, (E,) int32 and (E,) float32.
    """

    token: Any
    column: Any
    weight: Any


def projected(
    x_NV: Tensor, row_R: Tensor, entries: ProjectionEntries, width: int, temperature: float
) -> Projected:
    """Compute softmax(x / temperature) @ W for some rows: losses._project.

    Args:
        x_NV: (N, V) float32 logits.
        row_R: (R,) int64, of x.
        width: columns of W.
    Raises:
        ValueError: a row, a token or a column is outside.
    """
    V = x_NV.shape[1]
    _check(row_R, 0, len(x_NV), "rows")
    _check(entries.token, 0, V, "tokens")
    _check(entries.column, 0, width, "columns")
    num_rows = len(row_R)
    result = Projected(
        out_RK=x_NV.new_empty(num_rows, width),
        top_R=x_NV.new_empty(num_rows),
        log_sum_R=x_NV.new_empty(num_rows),
    )
    over_rows(
        _projected_row, lambda: (np.empty(V, f32),), num_rows,
        x_NV, row_R, entries, f32(1 / temperature), result,
    )
    return result


def projected_derivative(
    x_NV: Tensor, row_R: Tensor, entries: ProjectionEntries, result: Projected, grad_RK: Tensor,
    temperature: float,
) -> Tensor:
    """Return the (N, V) derivative by x of the sum of grad_RK times out_RK; no row occurs twice."""
    d_NV = _new_derivative(x_NV, row_R)
    V = x_NV.shape[1]
    over_rows(
        _projected_back_row, lambda: (np.empty(V, f32),), len(row_R),
        x_NV, row_R, entries, result, grad_RK, f32(1 / temperature), d_NV,
    )
    return d_NV


def _check_side(
    logits: Tensor, row_C: Tensor, event: Tensor, num_events: int, name: str = "events"
) -> None:
    """Check the rows and the events of one side of `event_kl`, or cells, which are like events.

    Raises:
        ValueError: they do not fit the logits.
    """
    _check(row_C, 0, len(logits), "rows")
    _check(event, -1, num_events, name)
    if len(event) != logits.shape[1]:
        raise ValueError(
            f"{name} of {len(event)} tokens, logits of {logits.shape[1]}; "
            "expected one per column of the logits, -1 for none"
        )


def _check(ids: Tensor, low: int, end: int, name: str) -> None:
    """Check that ids are in low, ..., end - 1, because compiled code reads memory unchecked.

    Raises:
        ValueError: an id is outside.
    """
    if len(ids) == 0:
        return
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < low or highest >= end:
        raise ValueError(
            f"{name} from {lowest} to {highest}, expected {low} to {end - 1}; "
            "build them for the logits that they come with"
        )


def _chunk_starts(chunk_R: Tensor) -> Tensor:
    """Return (C + 1,): where the rows of each chunk begin, and where those of the last end."""
    return F.pad(torch.bincount(chunk_R).cumsum(0), (1, 0))


def _new_derivative(x_NV: Tensor, row_R: Tensor) -> Tensor:
    """Return (N, V) memory: 0 in the rows that are not listed, the others for a kernel to fill."""
    unlisted = torch.ones(len(x_NV), dtype=torch.bool)
    unlisted = unlisted.index_fill_(0, row_R, False)
    unlisted_rows = unlisted.nonzero().squeeze(1)
    return torch.empty_like(x_NV).index_fill_(0, unlisted_rows, 0.0)


def over_rows(
    kernel: Callable[..., None], new_scratch: Callable[[], Any], count: int, *args: Any
) -> None:
    """Call kernel(row, scratch fields, *args) for rows 0, ..., count - 1.

    Runs as many threads as torch has, each with scratch memory of its own.  A thread takes the
    next row that is left, because rows take unequal time.  A result depends on its row alone, so
    the number of threads changes no bit.
    """
    arrays = [_as_arrays(arg) for arg in args]
    remaining = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        scratch_fields = _as_arrays(new_scratch())
        while True:
            with lock:
                row = next(remaining, None)
            if row is None:
                return
            kernel(row, scratch_fields, *arrays)

    num_threads = max(1, min(count, torch.get_num_threads()))
    num_helpers = num_threads - 1  # the calling thread works too
    helpers = []
    for _ in range(num_helpers):
        helpers.append(_pool(num_helpers, os.getpid()).submit(work))
    work()
    for helper in helpers:
        helper.result()  # raises what its thread raised


def _as_arrays(arg: Any) -> Any:
    """Return a tensor as an array on the same memory, a record as a plain tuple of its fields.

    A kernel makes the record again, which costs nothing there.  Passing the record itself to
    compiled code costs 0.6 us more, a fifth of the time of a row of 1,000 tokens.
    """
    if torch.is_tensor(arg):
        return arg.detach().contiguous().numpy()
    if isinstance(arg, tuple):
        return tuple(map(_as_arrays, arg))
    return arg


@functools.cache
def _pool(num_helpers: int, process: int) -> ThreadPoolExecutor:
    """Return threads that stay for the next call.

    `process` is a key of the cache alone: a forked process inherits the pool, but none of its
    threads, and needs a new one.
    """
    return ThreadPoolExecutor(num_helpers)


# --- functions of one number ----------------------------------------------------------------------

# Both follow the Cephes library (S. L. Moshier, netlib.org/cephes, single/expf.c and logf.c): its
# reductions and its minimax polynomials, highest power first, with its decimals.  One call is
# about 20 operations without a branch, so the compiler makes vectors of a loop around it.  It
# cannot do that with a call into the C library.

LOG2_E = f32(1.44269504)
# ln 2 = LN2_HIGH + LN2_LOW.  LN2_HIGH = 355/512 has 9 bits, so that n LN2_HIGH is exact for the
# whole n of a float32 exponent, and the reduced argument loses no digits.
LN2_HIGH = f32(0.693359375)
LN2_LOW = f32(-2.12194440e-4)
MANTISSA_BITS = np.int32(23)  # of a float32, below the exponent
EXPONENT_BIAS = np.int32(127)
SQRT_HALF_BITS = np.int32(0x3F3504F3)  # sqrt(1/2), the bits of the float32 as an integer


@elementwise
def exp(x):
    """Return exp(x) for x < 88, with a relative error of 1e-7; 0 below LOWEST; NaN of NaN."""
    # measured on 2e7 numbers: at most 8.5e-8
    clipped = LOWEST if LOWEST > x else x  # in this order NaN stays NaN
    # exp(x) = 2^n exp(r) with |r| <= ln(2) / 2
    n = np.floor(clipped * LOG2_E + f32(0.5))
    r = clipped - n * LN2_HIGH - n * LN2_LOW
    # exp(r) = 1 + r + r^2 y
    y = f32(1.9875691500e-4)
    y = y * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    y = y * r + f32(5.0000001201e-1)
    y = y * r * r + r + f32(1)
    # 2^n is the float32 whose exponent bits hold n + 127 and whose mantissa bits are 0
    power = np.int32((np.int32(n) + EXPONENT_BIAS) << MANTISSA_BITS).view(f32)
    return f32(0) if LOWEST > x else y * power


@elementwise
def log(x, octaves):
    """Return log(x 2^octaves) for positive normal x and whole octaves.

    The relative error is 1e-7 (8.2e-8 measured on 2e7 numbers, octaves being 0).

    Octaves are added to the exponent of x before it is rounded to a logarithm.  See `octaves_of`.
    """
    # x = 2^n (1 + z) with 1 + z in [sqrt(1/2), sqrt(2)), which keeps |z| smallest
    bits = f32(x).view(np.int32)
    n = np.int32((bits - SQRT_HALF_BITS) >> MANTISSA_BITS)
    whole = f32(n) + octaves
    z = np.int32(bits - np.int32(n << MANTISSA_BITS)).view(f32) - f32(1)
    # log(1 + z) = z - z^2 / 2 + z^3 y
    y = f32(7.0376836292e-2)
    y = y * z + f32(-1.1514610310e-1)
    y = y * z + f32(1.1676998740e-1)
    y = y * z + f32(-1.2420140846e-1)
    y = y * z + f32(1.4249322787e-1)
    y = y * z + f32(-1.6668057665e-1)
    y = y * z + f32(2.0000714765e-1)
    y = y * z + f32(-2.4999993993e-1)
    y = y * z + f32(3.3333331174e-1)
    # small terms first, so that the sum is rounded at its full size only twice
    y = y * z * z * z - f32(0.5) * z * z + whole * LN2_LOW
    return z + y + whole * LN2_HIGH


@as_written
def octaves_of(nats):
    """Return (whole octaves, nats that remain), float32, whose sum is `nats`.

    log(x, octaves) + remainder = log(x) + nats without cancellation: where log(x) is near -70 and
    nats near 70, float32 would round both to 4e-6 and their small sum would keep that error.
    """
    octaves = np.floor(nats / np.log(2.0) + 0.5)
    remainder = nats - octaves * np.log(2.0)
    return f32(octaves), f32(remainder)


@summing
def largest(x):
    """Return the largest entry of x that is a number, at least -3.4e38."""
    # With NaN a maximum depends on the order, so without "nnan" one running maximum is not
    # vectorized.  Independent lanes are.  A comparison with NaN is false and keeps a lane as it is.
    lanes = np.full(LANES, f32(-np.inf))
    whole = len(x) // LANES * LANES
    for start in range(0, whole, LANES):
        block = x[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] = block[lane] if block[lane] > lanes[lane] else lanes[lane]
    top = lanes[0]
    for lane in range(LANES):
        top = max(top, lanes[lane])
    for i in range(whole, len(x)):
        top = max(top, x[i])
    # finite for a row of -inf alone, or else x - top would be NaN
    return max(top, -np.finfo(f32).max)


@summing
def total(x):
    """Return the sum of x: in float32 inside a block, in float64 over the blocks."""
    result = 0.0
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        block_sum = f32(0)
        for i in range(len(block)):
            block_sum += block[i]
        result += block_sum
    return result


@elementwise
def _exps(x, over_temperature, shift, out):
    """Write exp(x over_temperature - top) into `out`, with top = the largest - shift.

    Returns (top, the sum of `out`).  The largest entry of `out` is exp(shift).
    """
    top = largest(x) * over_temperature - shift
    for i in range(len(x)):
        out[i] = exp(x[i] * over_temperature - top)
    return top, total(out)


# --- divergences of one vocabulary ----------------------------------------------------------------


class DivergenceScratch(NamedTuple):
    """Hold the memory of one thread for `_divergence_row`."""

    p: np.ndarray  # (V,)
    q: np.ndarray  # (V,)
    logp: np.ndarray  # (BLOCK,)
    logq: np.ndarray  # (BLOCK,)


@elementwise
def _divergence_scratch(V):
    """Return a DivergenceScratch."""
    p = np.empty(V, f32)
    q = np.empty(V, f32)
    logp = np.empty(BLOCK, f32)
    logq = np.empty(BLOCK, f32)
    return DivergenceScratch(p, q, logp, logq)


@elementwise
def _logp(x, over_temperature, top, log_z, floor, out):
    """Write the log-probabilities of logits x into `out`, none below `floor`."""
    for i in range(len(x)):
        logp = x[i] * over_temperature - top - log_z
        out[i] = floor if floor > logp else logp  # in this order NaN stays NaN


@summing
def _divergence_block(logp, logq, p, q, a, b, s, floor, d):
    """Return what `divergence` sums, over one block; write p times its derivative by p into `d`.

    That is the derivative by log p without the normalization of p, which `_divergence_row` adds.
    The mixtures with s = 0 and s = 1 need no logarithm of m, which takes most of the time.
    """
    value = f32(0)
    if s == 1:  # m = p: a KL(q || p), for KL(p || p) is 0
        for i in range(len(d)):
            value += a * q[i] * (logq[i] - logp[i])
            d[i] = -a * q[i] if logp[i] > floor else f32(0)
    elif s == 0:  # m = q: b KL(p || q)
        for i in range(len(d)):
            value += b * p[i] * (logp[i] - logq[i])
            d[i] = b * p[i] * (logp[i] - logq[i] + f32(1))
    elif s < 0:  # total variation, sum |p - q| / 2
        for i in range(len(d)):
            gap = p[i] - q[i]
            value += f32(0.5) * abs(gap)
            slope = f32(0.5) if gap > 0 else f32(-0.5) if gap < 0 else f32(0)
            d[i] = p[i] * slope
    else:
        for i in range(len(d)):
            m = s * p[i] + (f32(1) - s) * q[i]
            m = TINY if TINY > m else m
            logm = log(m, f32(0))
            s_over_m = s / m  # the derivative of log m by p
            value += a * q[i] * (logq[i] - logm) + b * p[i] * (logp[i] - logm)
            d[i] = p[i] * (b * (logp[i] - logm + f32(1) - p[i] * s_over_m) - a * q[i] * s_over_m)
    return value


@elementwise
def _divergence_row(
    n, scratch_fields,
    x, y, a, b, s,
    over_temperature, over_teacher_temperature, floor, value, d,
):
    """Compute row n of `divergence`."""
    scratch = DivergenceScratch(*scratch_fields)
    p = scratch.p
    q = scratch.q
    x_n = x[n]
    y_n = y[n]
    d_n = d[n]
    top, Z = _exps(x_n, over_temperature, f32(0), p)
    teacher_top, teacher_Z = _exps(y_n, over_teacher_temperature, f32(0), q)
    over_z = f32(1 / Z)
    over_teacher_z = f32(1 / teacher_Z)
    log_z = f32(np.log(Z))
    log_teacher_z = f32(np.log(teacher_Z))
    value_n = 0.0
    for start in range(0, len(d_n), BLOCK):
        end = min(start + BLOCK, len(d_n))
        length = end - start
        block_p = p[start:end]
        block_q = q[start:end]
        for i in range(length):
            block_p[i] *= over_z
            block_q[i] *= over_teacher_z
        logp = scratch.logp[:length]
        logq = scratch.logq[:length]
        _logp(x_n[start:end], over_temperature, top, log_z, floor, logp)
        _logp(y_n[start:end], over_teacher_temperature, teacher_top, log_teacher_z, floor, logq)
        value_n += _divergence_block(logp, logq, block_p, block_q, a, b, s, floor, d_n[start:end])
    value[n] = value_n
    # log p = z - log sum exp z of z = x / temperature, so the derivative by z_i is
    # d_i - p_i sum d with d that by log p
    d_sum = f32(total(d_n))
    for i in range(len(d_n)):
        d_n[i] = over_temperature * (d_n[i] - p[i] * d_sum)


# --- kept tokens, projections ---------------------------------------------------------------------


@elementwise
def _kept_rows(
    b, scratch_fields, size, x, row, ids, over_temperature, floor, with_tail, result_fields
):
    """Compute `size` rows of `kept_logp`."""
    (p,) = scratch_fields
    kept, tail, tops, log_sums = result_fields
    for r in range(b * size, min((b + 1) * size, len(row))):
        x_r = x[row[r]]
        top, Z = _exps(x_r, over_temperature, f32(0), p)
        log_sum = f32(np.log(Z))
        tops[r] = top
        log_sums[r] = log_sum
        for k in range(ids.shape[1]):
            logp = x_r[ids[r, k]] * over_temperature - top - log_sum
            kept[r, k] = floor if floor > logp else logp  # in this order NaN stays NaN
            p[ids[r, k]] = f32(0)
        if not with_tail:
            continue
        # 1 - the kept ones would lose a small tail, and its gradient
        rest = total(p)
        if rest < SMALL_REST:
            tail[r] = _small_rest(x_r, ids[r], over_temperature, top, log_sum, floor, p)
        else:
            tail[r] = f32(np.log(rest) - np.log(Z))


@as_written
def _small_rest(x, ids, over_temperature, top, log_sum, floor, p):
    """Return the log-probability of the tokens that are not kept, beside almost all of the mass.

    Such rows are rare, so this need not be fast.  Overwrites p.
    """
    for v in range(len(x)):
        logp = x[v] * over_temperature - top - log_sum
        p[v] = floor if floor > logp else logp
    for k in range(len(ids)):
        p[ids[k]] = -np.inf
    rest_top = np.float64(largest(p))
    rest = 0.0
    for v in range(len(p)):
        rest += np.exp(np.float64(p[v]) - rest_top)
    logarithm = rest_top + np.log(rest)
    return f32(max(logarithm, np.float64(floor)))


@elementwise
def _small_rest_back(x, ids, over_temperature, log_z, g_tail, g_sum, d):
    """Write the derivative of such a row into `d`, but for the kept tokens."""
    for v in range(len(x)):
        d[v] = x[v] * over_temperature
    for k in range(len(ids)):
        d[ids[k]] = -np.inf
    # beside their own largest, for float32 rounds log-probabilities of -1000 to 6e-5
    rest_top = largest(d)
    rest = 0.0
    for v in range(len(d)):
        rest += exp(d[v] - rest_top)
    log_rest = f32(np.log(rest))
    for v in range(len(d)):
        of_tail = g_tail * exp(d[v] - rest_top - log_rest)
        d[v] = over_temperature * (of_tail - g_sum * exp(d[v] - log_z))


@elementwise
def _kept_back_rows(
    b, scratch_fields, size,
    x, row, ids, result_fields, grad, grad_tail, over_temperature, floor, d,
):
    """Compute `size` rows of `kept_derivative`.

    With g the gradient by log p, d_v = (g_v - p_v sum g) / temperature.  The tail passes its
    gradient on to each of the other tokens in proportion to its probability.
    """
    kept, tail, tops, log_sums = result_fields
    for r in range(b * size, min((b + 1) * size, len(row))):
        x_r = x[row[r]]
        d_r = d[row[r]]
        top = tops[r]
        log_sum = log_sums[r]
        # at the floor nothing has a gradient, and a tail of tokens at the floor is near it
        g_tail = f32(0) if floor + FLOOR_WIDTH > tail[r] else grad_tail[r]
        exact_sum = np.float64(g_tail)  # terms of either sign nearly cancel
        for k in range(ids.shape[1]):
            exact_sum += f32(0) if kept[r, k] == floor else grad[r, k]
        g_sum = f32(exact_sum)
        if tail[r] < SMALL_TAIL and g_tail != 0:
            _small_rest_back(x_r, ids[r], over_temperature, top + log_sum, g_tail, g_sum, d_r)
        else:
            factor = -g_sum
            if g_tail != 0:
                factor += g_tail * exp(-tail[r])
            factor *= over_temperature
            for v in range(len(d_r)):
                d_r[v] = factor * exp(x_r[v] * over_temperature - top - log_sum)
        for k in range(ids.shape[1]):
            v = ids[r, k]
            p = exp(x_r[v] * over_temperature - top - log_sum)
            g = f32(0) if kept[r, k] == floor else grad[r, k]
            d_r[v] = over_temperature * (g - p * g_sum)


@elementwise
def _projected_row(r, scratch_fields, x, row, entry_fields, over_temperature, result_fields):
    """Compute row r of `projected`."""
    (p,) = scratch_fields
    out, tops, log_sums = result_fields
    token, column, weight = entry_fields
    out_r = out[r]
    top, Z = _exps(x[row[r]], over_temperature, f32(0), p)
    tops[r] = top
    log_sums[r] = f32(np.log(Z))
    factor = f32(1 / Z)
    out_r[:] = f32(0)
    for e in range(len(token)):
        out_r[column[e]] += p[token[e]] * weight[e]
    for k in range(len(out_r)):
        out_r[k] *= factor


@elementwise
def _projected_back_row(
    r, scratch_fields, x, row, entry_fields, result_fields, grad, over_temperature, d
):
    """Compute row r of `projected_derivative`.

    With g_v = sum over k of W[v, k] grad_k, d_v = p_v (g_v - p . g) / temperature.
    """
    (g,) = scratch_fields
    _, tops, log_sums = result_fields
    token, column, weight = entry_fields
    x_r = x[row[r]]
    d_r = d[row[r]]
    grad_r = grad[r]
    g[:] = f32(0)
    for e in range(len(token)):
        g[token[e]] += grad_r[column[e]] * weight[e]
    top = tops[r]
    log_sum = log_sums[r]
    for v in range(len(d_r)):
        d_r[v] = exp(x_r[v] * over_temperature - top - log_sum)
    mean = f32(_dot(d_r, g))
    for v in range(len(d_r)):
        d_r[v] *= over_temperature * (g[v] - mean)


# --- KL over events -------------------------------------------------------------------------------


class EventScratch(NamedTuple):
    """Hold the memory of one thread for `_event_chunk`."""

    # (num_events + 1,): the last entry collects the tokens without an event
    student_mass: np.ndarray
    teacher_mass: np.ndarray
    block: np.ndarray  # (BLOCK,)


@elementwise
def _event_scratch(num_events):
    """Return an EventScratch."""
    student_mass = np.empty(num_events + 1, f32)
    teacher_mass = np.empty(num_events + 1, f32)
    block = np.empty(BLOCK, f32)
    return EventScratch(student_mass, teacher_mass, block)


@elementwise
def _event_mass(x, event, shift, out, mass):
    """Write exp(x - top) into `out`, its sums over events into `mass`.

    top is the largest - shift.  `out` has the length of x, or that of one block where the caller
    needs only the sums.  Returns (top, the sum of `mass`, TINY per event included, and the
    logsumexp of x over all tokens).
    """
    top = largest(x) - shift
    mass[:] = TINY  # no event has mass 0, so all ratios of masses are finite
    for start in range(0, len(x), BLOCK):
        block_x = x[start : start + BLOCK]
        block_event = event[start : start + BLOCK]
        block_out = out[start : start + BLOCK] if len(out) == len(x) else out[: len(block_x)]
        for i in range(len(block_x)):
            block_out[i] = exp(block_x[i] - top)
        # a loop by itself: additions to chosen places are not vectorized, but the exponentials are
        for i in range(len(block_x)):
            mass[block_event[i]] += block_out[i]  # event -1, none, is the last entry of mass
    without_event = np.float64(mass[-1])
    mass[-1] = TINY  # tokens without an event are left out of the softmax
    Z = total(mass)
    log_total = top + np.log(Z + without_event)
    if Z < SMALL_SHARE * np.exp(shift):
        top, Z = _small_event_mass(x, event, shift, out, mass)
    return top, Z, log_total


@elementwise
def _small_event_mass(x, event, shift, out, mass):
    """Do what `_event_mass` does, with the largest entry among the tokens that have an event.

    Returns (top, the sum of `mass`).
    For rows with almost all of their mass on the other tokens: beside these, the masses of events
    would fall below float32's smallest number.  Such rows are rare, so this need not be fast.
    """
    top = -np.finfo(f32).max
    for i in range(len(x)):
        if event[i] >= 0:
            top = max(top, x[i])
    top -= shift
    mass[:] = TINY
    for i in range(len(x)):
        probability = f32(0)
        if event[i] >= 0:
            probability = exp(x[i] - top)
            mass[event[i]] += probability
        if len(out) == len(x):
            out[i] = probability
    return f32(top), total(mass)


@summing
def _event_value(q, mass, log_ratio, over_z, over_teacher_z):
    """Return sum q (log(q / mass) + log_ratio) over events; q and mass are not normalized.

    With log_ratio = log(Z / teacher_Z) this is teacher_Z times the KL.  Overwrites `mass` with the
    factor of exp(x) in the derivative by x: dKL / dx = exp(x) (1 / Z - q / (mass teacher_Z)).
    """
    value = 0.0
    octaves, remainder = octaves_of(log_ratio)
    for start in range(0, len(q), BLOCK):
        block_q = q[start : start + BLOCK]
        block_mass = mass[start : start + BLOCK]
        block_value = f32(0)
        for e in range(len(block_q)):
            ratio = min(max(block_q[e] / block_mass[e], TINY), HUGE)
            block_value += block_q[e] * (log(ratio, octaves) + remainder)
            block_mass[e] = over_z - ratio * over_teacher_z
        value += block_value
    mass[-1] = f32(0)  # no derivative for tokens without an event
    return value


@elementwise
def _event_chunk(
    c, scratch_fields,
    x, row, y, teacher_row, event_V, event_W, shift, value, d,
):
    """Compute chunk c of `event_kl`."""
    scratch = EventScratch(*scratch_fields)
    mass = scratch.student_mass
    q = scratch.teacher_mass
    x_c = x[row[c]]
    y_c = y[teacher_row[c]]
    d_c = d[row[c]]  # holds exp(x) first, then the derivative
    _, Z, _ = _event_mass(x_c, event_V, shift, d_c, mass)
    _, teacher_Z, _ = _event_mass(y_c, event_W, f32(0), scratch.block, q)
    log_ratio = np.log(Z) - np.log(teacher_Z)
    over_z = f32(1 / Z)
    over_teacher_z = f32(1 / teacher_Z)
    value[c] = _event_value(q, mass, log_ratio, over_z, over_teacher_z) / teacher_Z
    for v in range(len(d_c)):
        d_c[v] *= mass[event_V[v]]


# --- cells of a translation ---------------------------------------------------------------------


class BeliefScratch(NamedTuple):
    """Hold the memory of one thread for the roots of a translation."""

    # (C + 1,): the last entry collects the tokens without a cell
    student_mass: np.ndarray
    teacher_mass: np.ndarray
    cell: np.ndarray  # (W,) int32, Belief.cell, where tokens that cannot come have no cell
    block: np.ndarray  # (BLOCK,)


def _belief_scratch(cell: Tensor, num_cells: int) -> BeliefScratch:
    """Return a BeliefScratch."""
    student_mass = np.empty(num_cells + 1, f32)
    teacher_mass = np.empty(num_cells + 1, f32)
    block = np.empty(BLOCK, f32)
    return BeliefScratch(student_mass, teacher_mass, cell.numpy().copy(), block)


@as_written
def _set_joined(n, belief, to, cell):
    """Write `to`, or the cell of the token where that is None, for the tokens that cannot come."""
    before = belief.before[n]
    if before < 0:
        return
    for j in range(belief.join_start[before], belief.join_start[before + 1]):
        for place in range(belief.join_low[j], belief.join_high[j]):
            w = belief.order[place]
            cell[w] = belief.cell[w] if to is None else to


@elementwise
def _believe(n, belief, scratch, asked, log_total):
    """Write the teacher's masses of the cells at root n into the scratch; return their sum."""
    q = scratch.teacher_mass
    cell = scratch.cell
    y = belief.logits[belief.row[n]]
    _set_joined(n, belief, np.int32(-1), cell)
    # it did come, whatever the tables say
    cell[belief.next[n]] = belief.cell[belief.next[n]]
    top, Z, log_total[n] = _event_mass(y, cell, f32(0), scratch.block, q)
    for a in range(belief.asked_start[n], belief.asked_start[n + 1]):
        w = belief.asked_token[a]
        asked[a] = exp(y[w] - f32(log_total[n])) if cell[w] >= 0 else f32(0)
    _set_joined(n, belief, None, cell)

    going = belief.going_mass[n]
    if going == 0:
        return Z
    # NaN comes here too, and is reported
    stays = belief.going_ends[n]
    for e in range(len(q)):
        q[e] = q[e] * stays + TINY
    # the whole of q, beside which what can come may be very small
    whole = np.exp(min(np.float64(log_total[n]) - top, MOST_MASS))
    total_mass = Z * stays
    for i in range(belief.going_start[n], belief.going_start[n + 1]):
        if belief.going_cell[i] >= 0:
            more = f32(going * belief.going_share[i] * whole)
            q[belief.going_cell[i]] += more
            total_mass += more
    return total_mass + len(q) * np.float64(TINY)


@elementwise
def _translated_rows(
    b, scratch_fields, size,
    x, row, cell_V, belief_fields, shift, value, d, answers,
):
    """Compute `size` rows of `translated_kl`."""
    scratch = BeliefScratch(*scratch_fields)
    belief = Belief(*belief_fields)
    asked, log_total = answers
    mass = scratch.student_mass
    q = scratch.teacher_mass
    for n in range(b * size, min((b + 1) * size, len(row))):
        teacher_Z = _believe(n, belief, scratch, asked, log_total)
        d_n = d[row[n]]  # holds exp(x) first, then the derivative
        _, Z, _ = _event_mass(x[row[n]], cell_V, shift, d_n, mass)
        log_ratio = np.log(Z) - np.log(teacher_Z)
        over_z = f32(1 / Z)
        over_teacher_z = f32(1 / teacher_Z)
        cut = _cut_value(q, mass)
        value[n] = (_event_value(q, mass, log_ratio, over_z, over_teacher_z) + cut) / teacher_Z
        for v in range(len(d_n)):
            d_n[v] *= mass[cell_V[v]]


@summing
def _cut_value(q, mass):
    """Return sum q log(q / mass) less what `_event_value` makes of it, where it cuts the ratio.

    That is where the student excludes a cell, or nearly so.
    """
    value = 0.0
    for start in range(0, len(q), BLOCK):
        block_q = q[start : start + BLOCK]
        block_mass = mass[start : start + BLOCK]
        num_cut = np.int32(0)
        for e in range(len(block_q)):
            num_cut += np.int32(block_q[e] > HUGE * block_mass[e])
        if num_cut:
            for e in range(len(block_q)):
                if block_q[e] > HUGE * block_mass[e]:
                    ratio = np.float64(block_q[e]) / np.float64(block_mass[e])
                    value += block_q[e] * np.log(ratio / np.float64(HUGE))
    return value


@elementwise
def _log_masses(mass, Z, lowest, out):
    """Write log(mass / Z) into `out`; `lowest` where it is less, or the mass is 0.

    TINY once or twice stands for 0, see `_event_mass` and `_believe`.
    """
    octaves, remainder = octaves_of(-np.log(Z))
    for c in range(len(out)):
        logarithm = log(mass[c], octaves) + remainder
        is_nothing = (mass[c] < f32(3) * TINY) | (lowest > logarithm)
        out[c] = lowest if is_nothing else logarithm


@elementwise
def _cell_rows(
    b, scratch_fields, size,
    x, row, cell_V, belief_fields, shift, logp, logq, masses, answers,
):
    """Compute `size` rows of `translated_cells`."""
    scratch = BeliefScratch(*scratch_fields)
    belief = Belief(*belief_fields)
    asked, log_total = answers
    mass_out, top_out = masses
    mass = scratch.student_mass
    for n in range(b * size, min((b + 1) * size, len(row))):
        teacher_Z = _believe(n, belief, scratch, asked, log_total)
        _log_masses(scratch.teacher_mass, teacher_Z, LOG_TINY, logq[n])
        x_n = x[row[n]]
        top_out[n], Z, _ = _event_mass(x_n, cell_V, shift, scratch.block, mass)
        mass_out[n] = mass[:-1]
        lowest = f32(np.log(np.float64(TINY)) - np.log(Z))
        _log_masses(mass, Z, lowest, logp[n])


@elementwise
def _cell_back_rows(
    b, scratch_fields, size,
    x, row, cell_V, masses, grad, shift, d,
):
    """Compute `size` rows of `cells_derivative`."""
    (factor,) = scratch_fields
    mass, top = masses
    for n in range(b * size, min((b + 1) * size, len(row))):
        for c in range(len(factor) - 1):
            slope = grad[n, c] / mass[n, c]
            factor[c] = min(max(slope, -HUGE), HUGE)
        factor[-1] = f32(0)  # no derivative for tokens without a cell
        x_n = x[row[n]]
        d_n = d[row[n]]
        for v in range(len(d_n)):
            z = x_n[v] - top[n]
            # a token without a cell may lie above those that have one
            d_n[v] = exp(shift + f32(1) if z > shift + f32(1) else z)
        for v in range(len(d_n)):
            d_n[v] *= factor[cell_V[v]]


@as_written
def _above_zero(x):
    """Return x, at least TINY; NaN of NaN."""
    tiny = np.float64(TINY)
    return tiny if tiny > x else x


@elementwise
def _going_on_nodes(
    b, scratch_fields,
    y, row, low, high, level, order, pieces,
    start, going, ends, count, next_token, share,
):
    """Compute the nodes of a block of `going_on`."""
    (mass,) = scratch_fields
    for k in range(b * NODES_AT_ONCE, min((b + 1) * NODES_AT_ONCE, len(row))):
        y_k = y[row[k]]
        num = high[k] - low[k]
        top = -np.finfo(f32).max
        for i in range(num):
            mass[i] = y_k[order[low[k] + i]]
            top = max(top, mass[i])
        for i in range(num):
            mass[i] = exp(mass[i] - top)
        # tokens that go on with the same piece are neighbors
        begin = start[k]
        used = 0
        going_mass = 0.0
        ended_mass = 0.0
        for i in range(num):
            piece = -1
            if level[k] < pieces.shape[1]:
                piece = pieces[order[low[k] + i], level[k]]
            if piece < 0:
                ended_mass += mass[i]
                continue
            if used == 0 or next_token[begin + used - 1] != piece:
                next_token[begin + used] = piece
                share[begin + used] = f32(0)
                used += 1
            share[begin + used - 1] += mass[i]
            going_mass += mass[i]
        count[k] = used
        all_mass = going_mass + ended_mass
        going[k] = f32(going_mass / _above_zero(all_mass))
        ends[k] = f32(1) if all_mass == 0 else f32(ended_mass / all_mass)
        for i in range(begin, begin + used):
            share[i] = f32(share[i] / _above_zero(going_mass))


@elementwise
def _logsumexp_rows(b, scratch_fields, size, x, row, start, token, out):
    """Compute `size` rows of `logsumexp_without`."""
    (kept,) = scratch_fields
    for n in range(b * size, min((b + 1) * size, len(row))):
        kept[:] = x[row[n]]
        for i in range(start[n], start[n + 1]):
            kept[token[i]] = -np.inf
        top, Z = _exps(kept, f32(1), f32(0), kept)
        out[n] = f32(top + np.log(Z))


@elementwise
def _softmax_rows(
    b, scratch_fields, size, x, row, start, token, logsumexp, grad, d
):
    """Compute `size` rows of `add_softmax_without`."""
    (kept,) = scratch_fields
    for n in range(b * size, min((b + 1) * size, len(row))):
        if grad[n] == 0:
            continue
        kept[:] = x[row[n]]
        for i in range(start[n], start[n + 1]):
            kept[token[i]] = -np.inf
        d_n = d[row[n]]
        factor = grad[n]
        for v in range(len(d_n)):
            d_n[v] += factor * exp(kept[v] - logsumexp[n])


# --- sorted distance ------------------------------------------------------------------------------

# Example.  p = (0.6, 0.3, 0.1), q = (0.45, 0.40, 0.15), k = 3, and, to be short, one bin per octave
# (BIN_BITS = 16 makes 256 of it).  The result is |0.6 - 0.45| + |0.3 - 0.40| + |0.1 - 0.15| = 0.30.
#
#   bin              in p   in q        ranks of p  ranks of q  sign of p_(r) - q_(r)
#   [1/2, 1)         0.6                0           none        +1: p_(0) is here, q_(0) below
#   [1/4, 1/2)       0.3    0.45 0.40   1           0, 1        UNSURE: both have their rank 1 here
#   [1/8, 1/4)              0.15        none        2           -1: q_(2) is here, p_(2) below
#   [1/16, 1/8)      0.1                2           none        -1: q_(2) was above
#
# `_judge` reads this off the counts.  The distance is the sum of sign * entry over p, less that
# over q.  `_distance` computes it for all entries at once, with UNSURE = 2 for an unknown sign:
#
#   0.6 + 2 * 0.3 - 0.1 - (2 * 0.45 + 2 * 0.40 - 0.15) = -0.45
#
# `_sort_unsure` then sorts the one unsure bin (a cell) and replaces each 2 by the true sign.
# One entry of p and none of q lie above the cell, so rank 0 of p in it is rank 1 of q in it
# (offset 1):
#
#   0.3 of p   meets 0.40                 -1    adds      (-1 - 2) * 0.3  = -0.90
#   0.45 of q  meets 0.6, in a bin above  +1    subtracts (+1 - 2) * 0.45 = -0.45
#   0.40 of q  meets 0.3                  -1    subtracts (-1 - 2) * 0.40 = -1.20
#
# and -0.45 - 0.90 + 0.45 + 1.20 = 0.30.  The derivative by p is the signs of p: (1, -1, -1).


class DistanceScratch(NamedTuple):
    """Hold the memory of one thread for `_distance`."""

    # (bins,): how many entries of either side a bin has; 0 before and after each call
    count_p: np.ndarray
    count_q: np.ndarray
    # (bins,): the sign of these entries, or UNSURE
    sign_p: np.ndarray
    sign_q: np.ndarray
    # (bins,): the cell of a bin that is UNSURE
    cell_of_bin: np.ndarray
    # (bins, 4): cells, their columns as below
    cells: np.ndarray
    # (V,): positions of the entries of p in UNSURE bins; (W,): the entries of q in these
    unsure_positions: np.ndarray
    unsure_q: np.ndarray


# Columns of `cells`: how many entries of p and of q lie in higher bins, and how many lie in the
# cells before, that is, where the entries of this cell begin in an array that holds all cells.
ABOVE_P = 0
ABOVE_Q = 1
BEGIN_P = 2
BEGIN_Q = 3


@as_written
def _distance_scratch(size_p, size_q):
    """Return a DistanceScratch for rows of these lengths."""
    num_bins = 2**BIN_BITS
    count_p = np.zeros(num_bins, np.int32)
    count_q = np.zeros(num_bins, np.int32)
    sign_p = np.zeros(num_bins, f32)
    sign_q = np.zeros(num_bins, f32)
    cell_of_bin = np.zeros(num_bins, np.int32)
    # enough for one more that ends them, because bin 0 never becomes a cell
    cells = np.empty((num_bins, 4), np.int32)
    unsure_positions = np.empty(size_p, np.int32)
    unsure_q = np.empty(size_q, f32)
    return DistanceScratch(
        count_p, count_q, sign_p, sign_q, cell_of_bin, cells, unsure_positions, unsure_q
    )


@as_written
def _bin(x):
    """Return the bin of x >= 0: its leading bits as an integer, which grows with x."""
    # the mask removes the sign bit, which -0 has
    return (f32(x).view(np.uint32) >> np.uint32(31 - BIN_BITS)) & np.uint32(2**BIN_BITS - 1)


@as_written
def _distance(p, q, k, sign, scratch):
    """Return sum |sorted p - sorted q| over the k largest.

    Writes the derivative by p into `sign`.
    """
    if not np.isfinite(total(p) + total(q)):
        sign[:] = np.nan
        return np.nan
    count_p = scratch.count_p
    count_q = scratch.count_q
    for i in range(len(p)):
        count_p[_bin(p[i])] += np.int32(1)
    for i in range(len(q)):
        count_q[_bin(q[i])] += np.int32(1)
    top_bin = np.int64(_bin(max(largest(p), largest(q))))
    num_cells = _judge(top_bin, k, scratch)

    # all entries times their sign or UNSURE; those of UNSURE bins are listed for `_sort_unsure`
    sign_p = scratch.sign_p
    sign_q = scratch.sign_q
    unsure_positions = scratch.unsure_positions
    unsure_q = scratch.unsure_q
    num_unsure_p = 0
    for i in range(len(p)):
        s = sign_p[_bin(p[i])]
        sign[i] = s
        if s == UNSURE:
            unsure_positions[num_unsure_p] = i
            num_unsure_p += 1
    value = _dot(sign, p)
    num_unsure_q = 0
    block_sign = np.empty(BLOCK, f32)
    for start in range(0, len(q), BLOCK):
        block = q[start : start + BLOCK]
        for i in range(len(block)):
            s = sign_q[_bin(block[i])]
            block_sign[i] = s
            if s == UNSURE:
                unsure_q[num_unsure_q] = block[i]
                num_unsure_q += 1
        value -= _dot(block_sign[: len(block)], block)

    if num_cells:
        positions = unsure_positions[:num_unsure_p]
        cells = scratch.cells[: num_cells + 1]
        cell_q = unsure_q[:num_unsure_q]
        value += _sort_unsure(p, k, sign, positions, cell_q, scratch.cell_of_bin, cells)
    return value


@summing
def _dot(a, b):
    """Return sum a b in float64, because terms of either sign may cancel."""
    result = 0.0
    for i in range(len(a)):
        result += np.float64(a[i]) * np.float64(b[i])
    return result


@as_written
def _judge(top_bin, k, scratch):
    """Find the sign of the entries of each bin, from bin `top_bin` down, and list the cells.

    The entries of p in a bin have the ranks above_p, ..., end_p - 1 in p; those of q likewise.
    An entry of rank r < k has the sign of p_(r) - q_(r), an entry of rank r >= k has 0.  If p_(r)
    and q_(r) may lie in one bin, or if a bin has ranks on both sides of k, it is UNSURE and
    becomes a cell.  One more cell ends the list.

    Reads the counts and sets them back to 0; writes signs, `cell_of_bin` and `cells`.  Returns the
    number of cells without the last one.
    """
    count_p = scratch.count_p
    count_q = scratch.count_q
    cells = scratch.cells
    above_p = 0
    above_q = 0
    begin_p = 0
    begin_q = 0
    num_cells = 0
    for b in range(top_bin, -1, -1):
        in_p = count_p[b]
        in_q = count_q[b]
        if in_p + in_q == 0:
            continue
        end_p = above_p + in_p
        end_q = above_q + in_q

        # above_q >= end_p: the ranks of p in this bin are in higher bins of q, and those of q here
        # in lower bins of p, so q is the larger one at all of them
        s = f32(-1) if above_q >= end_p else f32(1) if above_p >= end_q else UNSURE
        s_p = s
        s_q = s
        if max(end_p, end_q) > k:  # some ranks here are behind k
            s_p = f32(0) if above_p >= k else s if end_p <= k else UNSURE
            s_q = f32(0) if above_q >= k else s if end_q <= k else UNSURE
        if b == 0:  # subnormal numbers below 4.6e-41 add as little as 0 does
            s_p = f32(0)
            s_q = f32(0)
        if s_p == UNSURE or s_q == UNSURE:
            s_p = UNSURE
            s_q = UNSURE
            cells[num_cells, ABOVE_P] = above_p
            cells[num_cells, ABOVE_Q] = above_q
            cells[num_cells, BEGIN_P] = begin_p
            cells[num_cells, BEGIN_Q] = begin_q
            scratch.cell_of_bin[b] = num_cells
            begin_p += in_p
            begin_q += in_q
            num_cells += 1
        scratch.sign_p[b] = s_p
        scratch.sign_q[b] = s_q
        count_p[b] = 0
        count_q[b] = 0
        above_p = end_p
        above_q = end_q
    cells[num_cells, BEGIN_P] = begin_p
    cells[num_cells, BEGIN_Q] = begin_q
    return num_cells


@as_written
def _sort_unsure(p, k, sign, positions, unsure_q, cell_of_bin, cells):
    """Replace UNSURE by the true sign, in `sign` and in the value.

    Args:
        positions: of the entries of p in cells, in any order.
        unsure_q: the entries of q in cells, in any order.
        cells: of `_judge`, with the one that ends them.
    Returns:
        what to add to a value that counted all these entries with UNSURE for a sign.
    """
    keys = _keys_by_cell(p, positions, cell_of_bin, cells)
    values = _values_by_cell(unsure_q, cell_of_bin, cells)
    correction = 0.0
    for j in range(len(cells) - 1):
        cell_keys = keys[cells[j, BEGIN_P] : cells[j + 1, BEGIN_P]]
        cell_q = values[cells[j, BEGIN_Q] : cells[j + 1, BEGIN_Q]]
        cell_keys.sort()
        cell_q.sort()
        num_p = len(cell_keys)
        num_q = len(cell_q)
        above_p = cells[j, ABOVE_P]
        above_q = cells[j, ABOVE_Q]
        offset = above_p - above_q  # rank 0 of p in this cell is rank `offset` of q in it

        # both are sorted ascending: rank r in the cell is the entry at num - 1 - r
        for r in range(num_p):
            i = _position(cell_keys[num_p - 1 - r])
            s = _compare(p[i], cell_q, num_q - 1 - r - offset) if above_p + r < k else 0
            sign[i] = s
            correction += (s - UNSURE) * np.float64(p[i])
        for r in range(num_q):
            place = num_p - 1 - r + offset  # of the entry of p that has the same rank
            s = 0
            if above_q + r < k:
                s = 1 if place >= num_p else -1  # in a bin above, or in one below
                if 0 <= place < num_p:
                    s = _compare(p[_position(cell_keys[place])], cell_q, num_q - 1 - r)
            correction -= (s - UNSURE) * np.float64(cell_q[num_q - 1 - r])
    return correction


@as_written
def _keys_by_cell(p, positions, cell_of_bin, cells):
    """Return int64 keys, cell by cell, that sort like the entries of p and hold their positions.

    The bits of the float32 are the upper half (as integers they grow with a number >= 0), the
    position is the lower half.  Integers sort faster than pairs, and ties sort by position.
    """
    keys = np.empty(len(positions), np.int64)
    next_place = cells[:, BEGIN_P].copy()
    for i in positions:
        j = cell_of_bin[_bin(p[i])]
        keys[next_place[j]] = (np.int64(f32(p[i]).view(np.int32)) << 32) | i
        next_place[j] += 1
    return keys


@as_written
def _position(key):
    """Return the position that a key of `_keys_by_cell` holds."""
    return key & 0xFFFFFFFF


@as_written
def _values_by_cell(unsure_q, cell_of_bin, cells):
    """Return the entries of q, cell by cell."""
    values = np.empty_like(unsure_q)
    next_place = cells[:, BEGIN_Q].copy()
    for x in unsure_q:
        j = cell_of_bin[_bin(x)]
        values[next_place[j]] = x
        next_place[j] += 1
    return values


@as_written
def _compare(x, ascending, place):
    """Return the sign of x less the entry at `place`.

    What would be beyond the end lies in a higher bin and is larger, before the start smaller.
    """
    if place >= len(ascending):
        return -1
    if place < 0:
        return 1
    return (x > ascending[place]) - (x < ascending[place])


@as_written
def _distance_row(n, scratch_fields, p, q, k, value, sign):
    """Compute row n of `sorted_distance`."""
    scratch = DistanceScratch(*scratch_fields)
    value[n] = _distance(p[n], q[n], k, sign[n], scratch)


# --- probabilities of chunks ----------------------------------------------------------------------


class MixtureScratch(NamedTuple):
    """Hold the memory of one thread for `_mixture_chunk`."""

    p: np.ndarray  # (V,), probabilities of a chunk, times exp(shift)
    q: np.ndarray  # (W,), those of the teacher
    teacher_softmax: np.ndarray  # (W,), of one row
    slope: np.ndarray  # (V,), derivative by p
    rest_p: np.ndarray  # those of the rest
    rest_q: np.ndarray
    rest_sign: np.ndarray
    distance: DistanceScratch


@as_written
def _mixture_scratch(V, W, num_rest_x, num_rest_y):
    """Return a MixtureScratch for these vocabulary sizes and numbers of tokens in the rest."""
    p = np.empty(V, f32)
    q = np.empty(W, f32)
    teacher_softmax = np.empty(W, f32)
    slope = np.empty(V, f32)
    rest_p = np.empty(num_rest_x, f32)
    rest_q = np.empty(num_rest_y, f32)
    rest_sign = np.empty(num_rest_x, f32)
    distance = _distance_scratch(num_rest_x, num_rest_y)
    return MixtureScratch(p, q, teacher_softmax, slope, rest_p, rest_q, rest_sign, distance)


@elementwise
def _softmax(x, over_temperature, shift, out):
    """Write softmax(x over_temperature) exp(shift) into `out`."""
    _, exp_sum = _exps(x, over_temperature, shift, out)
    factor = f32(np.exp(shift) / exp_sum)
    for i in range(len(x)):
        out[i] *= factor


@elementwise
def _add_scaled(x, factor, first, out):
    """Add x times factor to `out`, which counts as 0 if this is the first row of a chunk."""
    for i in range(len(x)):
        out[i] = x[i] * factor + (f32(0) if first else out[i])


@elementwise
def _scale_back(p, factor, slope, mean):
    """Write factor p (slope - mean), the derivative of a softmax, in the place of p."""
    for i in range(len(p)):
        p[i] = factor * p[i] * (slope[i] - mean)


@summing
def _mass_kl(p, q, reverse, shift, d):
    """Return sum q log(q / P), P = p / exp(shift); write its derivative by p into `d`.

    reverse: sum P log(P / q), for shift 0 alone.
    """
    value = f32(0)
    octaves, remainder = octaves_of(np.float64(shift))
    for i in range(len(p)):
        p_i = max(p[i], TINY)
        q_i = max(q[i], TINY)
        if reverse:
            d[i] = log(p_i / q_i, f32(0)) + f32(1)
            value += p_i * (d[i] - f32(1))
        else:
            ratio = min(max(q_i / p_i, TINY), HUGE)
            value += q_i * (log(ratio, octaves) + remainder)
            d[i] = -ratio
    return value


@as_written
def _common_and_rest(p, q, tokens, k, reverse, shift, slope, scratch):
    """Return KL on the common tokens and one bucket, plus the distance of the sorted rest.

    p holds exp(shift) times probabilities.  Writes the derivative by p into `slope`.
    """
    block_p = np.empty(BLOCK, f32)
    block_q = np.empty(BLOCK, f32)
    block_d = np.empty(BLOCK, f32)
    kl = 0.0
    for start in range(0, len(tokens.common_x), BLOCK):
        ids_x = tokens.common_x[start : start + BLOCK]
        ids_y = tokens.common_y[start : start + BLOCK]
        length = len(ids_x)
        _gather(p, ids_x, block_p)
        _gather(q, ids_y, block_q)
        kl += _mass_kl(block_p[:length], block_q[:length], reverse, shift, block_d)
        for i in range(length):
            slope[ids_x[i]] = block_d[i]

    # KL sees the rest as one token more: the bucket
    rest_p = scratch.rest_p
    rest_q = scratch.rest_q
    _gather(p, tokens.rest_x, rest_p)
    _gather(q, tokens.rest_y, rest_q)
    block_p[0] = total(rest_p)
    block_q[0] = total(rest_q)
    kl += _mass_kl(block_p[:1], block_q[:1], reverse, shift, block_d)
    d_bucket = block_d[0]

    # the distance is not scale-free like a ratio, so it needs probabilities without exp(shift)
    unshift = f32(np.exp(-shift))
    for i in range(len(rest_p)):
        rest_p[i] *= unshift
    bins = DistanceScratch(*scratch.distance)
    value = kl + _distance(rest_p, rest_q, k, scratch.rest_sign, bins)
    for i in range(len(tokens.rest_x)):
        slope[tokens.rest_x[i]] = scratch.rest_sign[i] * unshift + d_bucket
    return value


@as_written
def _gather(source, ids, out):
    """Write the listed entries of `source` into the beginning of `out`."""
    for i in range(len(ids)):
        out[i] = source[ids[i]]


@elementwise
def _mixture_chunk(
    c, scratch_fields,
    student_fields, teacher_fields, token_fields,
    k, reverse, shift, over_temperature, value, d, d_weight,
):
    """Compute chunk c of `mixture_distance`."""
    scratch = MixtureScratch(*scratch_fields)
    student = ChunkRows(*student_fields)
    teacher = ChunkRows(*teacher_fields)
    tokens = TokenIds(*token_fields)
    p = scratch.p
    q = scratch.q
    slope = scratch.slope
    start = student.start[c]
    end = student.start[c + 1]
    for r in range(start, end):
        # each softmax stays in d, which is its derivative's place, for the way back
        row = student.row[r]
        _softmax(student.logits[row], over_temperature, shift, d[row])
        _add_scaled(d[row], student.weight[r], r == start, p)
    teacher_start = teacher.start[c]
    for r in range(teacher_start, teacher.start[c + 1]):
        softmax = scratch.teacher_softmax
        _softmax(teacher.logits[teacher.row[r]], over_temperature, f32(0), softmax)
        _add_scaled(softmax, teacher.weight[r], r == teacher_start, q)

    if len(tokens.common_x) + len(tokens.rest_x) == 0:
        value[c] = _distance(p, q, k, slope, DistanceScratch(*scratch.distance))
    else:
        value[c] = _common_and_rest(p, q, tokens, k, reverse, shift, slope, scratch)

    # p is the sum of weight * softmax: by the weight, slope . softmax; by the logits, weight times
    # the derivative of the softmax.  The mean of slope is that dot product without exp(shift).
    unshift = np.exp(-np.float64(shift))
    for r in range(start, end):
        row = student.row[r]
        d_weight[r] = _dot(slope, d[row])
        mean = f32(d_weight[r] * unshift)
        _scale_back(d[row], student.weight[r] * over_temperature, slope, mean)
