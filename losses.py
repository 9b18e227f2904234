"""Compute divergences between a teacher and a student, and the student's cross-entropy.

With one vocabulary the two next-token distributions are compared at every position (`forward_kl`
and its family).  With two, the models are compared chunk by chunk: a chunk is a span of text that
starts and ends on a token boundary of both sides (align.py finds them).  `projection_kl` maps the
student's distribution into the teacher's vocabulary; `gold` and `uld` compare common tokens and
sorted probabilities; `alm` compares the probabilities of the chunks' own bytes.  (translation.py
compares what both vocabularies can say of the student's next token, by any divergence of this
file; policy_losses.py has what a student's own text needs.)

Every loss returns (sum, count) in at least float32, also under autocast.  The caller divides by the
count over the *whole* batch, so that neither micro-batches nor ranks change the result.  All take

    weight_BS: (B, S) float, weight of the terms that begin at a student position; None: 1.
    reduction: "sum"; "sample": (B,) sums and counts; "none": (N,) terms and weights, in order.
    bound: Bound of the terms, before tau^2 and weights; None: none.

Shapes: B samples, S student tokens, T teacher tokens, C chunks, V student vocabulary, W teacher
vocabulary, K kept entries, P pieces of a spelling, N rows of terms, X either vocabulary.  Logits at
position t predict token t + 1, and every ``*_next``, ``*_chunk`` and ``mask`` argument is *shifted
already*: entry t describes the token that position t predicts.  Logits must be cut to the
tokenizer's vocabulary (no padding rows of the lm_head).

Needs torch and numpy.  Copy this file into your own repository.  The formulas are plain torch, on
every device; `torch.compile` makes them faster.
License: Apache-2.0 (see LICENSE).  Tests: tests/test_losses.py.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SumAndCount = tuple[Tensor, Tensor]
# is shown the (C, K) logarithms of a student's and its teacher's masses that a loss compares
Observer = Callable[[Tensor, Tensor], None]
Bound = Callable[[Tensor], Tensor]  # (N,) terms in nats -> as many, such as terms.clamp(max=1)

SHIFT = 70.0  # nats; exp(SHIFT) lifts small masses above float32's smallest, see log_masses
EPSILON = 1e-10  # added to projected probability, so that no token costs more than about 23 nats
FLOOR = -1e4  # nats; stands for log 0, so that what a model excludes costs a finite amount
MARGIN = 1e-6  # nats that a log-probability stays below 0, so that log(1 - p) is finite
LOG_ZERO = math.log(2.0**-126)  # nats, -87.3: float32's smallest normal mass, which stands for 0
TINY_MASS = 1e-30  # below any mass that matters and above float32's smallest normal number, 1e-38
LOG_NOTHING = math.log(2 * TINY_MASS)  # nats; up to here a mass is TINY_MASS, rounded
# devices whose index_add adds up in the order of the entries; others use atomics
ORDERED_DEVICES = ("cpu",)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32; leave float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def at_least(x: Tensor, low: float) -> Tensor:
    """Return x.clamp(min=low), whose gradient takes a GPU three kernels where this takes one."""
    return F.threshold(x, low, low)


def scaled(x: Tensor, factor: float, bound: "Bound | None" = None) -> Tensor:
    """Return factor * bound(x), and x itself where the factor is 1 and nothing bounds it."""
    x = bound(x) if bound else x
    return x if factor == 1 else factor * x


def check_side(side: str, logits_BNX: Tensor, **of_positions: Tensor | None) -> None:
    """Raise a ValueError for logits that are no (B, N, X) floats; see `check_positions`.

    Reads dtypes and shapes alone: nothing waits for a device.
    """
    if not logits_BNX.is_floating_point() or logits_BNX.ndim != 3:
        raise ValueError(f"{side} logits are {tuple(logits_BNX.shape)} {logits_BNX.dtype}; "
                         "expected floats (samples, positions, tokens), as a model returns them")
    check_positions(f"the {side} logits have", logits_BNX.shape[:-1], **of_positions)


def check_positions(
    what_has: str, shape_BN: tuple[int, ...], **of_positions: Tensor | None
) -> None:
    """Raise a ValueError for arguments of another shape, masks that are no bool, ids no integers.

    An integer mask would select rows by their numbers, in silence.

    Args:
        what_has: names what is of this shape, for the message.
        of_positions: arguments of a loss by their names, (B, N) each; None: not given.
    """
    for name, value in of_positions.items():
        if value is None:
            continue
        if value.shape != shape_BN:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, but {what_has} "
                             f"{tuple(shape_BN)} positions; cut and shift both alike")
        if "mask" in name:
            if value.dtype != torch.bool:
                raise ValueError(f"{name} is {value.dtype}; expected bool, True where a position "
                                 f"counts, as {name} != 0 makes it")
        elif "weight" not in name and "logp" not in name:
            if value.is_floating_point() or value.dtype == torch.bool:
                raise ValueError(f"{name} is {value.dtype}; expected int64")


def check_equal_shapes(student_BSX: Tensor, teacher_BSX: Tensor) -> None:
    """Raise a ValueError for the logits of two models that cannot be compared one by one."""
    if student_BSX.shape != teacher_BSX.shape:
        raise ValueError(f"student logits have the shape {tuple(student_BSX.shape)}, teacher "
                         f"logits {tuple(teacher_BSX.shape)}; expected the same positions and the "
                         "same vocabulary, without the padding of an lm_head")


def reduce_terms(
    value_N: Tensor, row_N: Tensor | None, shape_BS: tuple[int, ...], weight_BS: Tensor | None,
    reduction: str,
) -> SumAndCount:
    """Weight the terms of a loss and reduce them; see `reduction` in the module's docstring.

    Args:
        value_N: terms, nats.
        row_N: int64, row of the flattened (B * S) where each term begins; None: one in every row.
        shape_BS: (B, S).
        weight_BS: (B, S) weights of these rows; None: 1.
    Raises:
        ValueError: unknown reduction.
    """
    if weight_BS is None and reduction == "sum":
        return value_N.sum(), value_N.new_full((), len(value_N))
    if weight_BS is None:
        weight_N = torch.ones_like(value_N)
    else:
        check_positions("the terms are of", shape_BS, weight_BS=weight_BS)
        weight_N = weight_BS.reshape(-1).to(value_N)
        weight_N = weight_N if row_N is None else weight_N[row_N]
        value_N = value_N * weight_N
    if reduction == "none":
        return value_N, weight_N
    if reduction == "sum":
        return value_N.sum(), weight_N.sum()
    if reduction != "sample":
        raise ValueError(f"reduction={reduction!r}: expected 'sum', 'sample' or 'none'")
    if row_N is None:
        row_N = torch.arange(len(value_N), device=value_N.device)
    sample_N = row_N // max(1, shape_BS[1])
    zeros_B = value_N.new_zeros(shape_BS[0])
    return zeros_B.index_add(0, sample_N, value_N), zeros_B.index_add(0, sample_N, weight_N)


def next_token_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, weight_BS: Tensor | None = None, reduction: str = "sum",
    select: bool = True,
) -> SumAndCount:
    """Compute the sum of -log p(next token).

    Args:
        logits_BSV: (B, S, V), any float type; may hold NaN where the label is -100 (see `select`).
        labels_BS: (B, S) int64, the token that each position predicts (shifted already) or -100.
        select: True selects the rows that have a label, and waits for the device to count them.
            False promises that the rows without a label hold finite logits too.  A plain sum
            (reduction "sum", no weights) is then bit-identical to F.cross_entropy, and
            nothing here waits for the device.  Other calls select rows in any case.
    Returns:
        (sum, count): nats over labeled positions, and how many there are.
    """
    check_side("student", logits_BSV, labels_BS=labels_BS)
    if not select and reduction == "sum" and weight_BS is None:
        logits_NV = at_least_float32(logits_BSV.flatten(0, 1))
        total = F.cross_entropy(logits_NV, labels_BS.reshape(-1), ignore_index=-100,
                                reduction="sum")
        return total, (labels_BS != -100).sum(dtype=total.dtype)
    is_labeled = labels_BS != -100  # rows are selected, not masked: 0 * NaN reaches the gradient
    logp_NV = at_least_float32(logits_BSV[is_labeled]).log_softmax(-1)
    value_N = -logp_NV.gather(1, labels_BS[is_labeled][:, None]).squeeze(1)
    row_N = is_labeled.reshape(-1).nonzero().squeeze(1)
    return reduce_terms(value_N, row_N, labels_BS.shape, weight_BS, reduction)


# --- sums in a fixed order ------------------------------------------------------------------------


class Segments(NamedTuple):
    """Tell to which of `num` segments each entry belongs; entries come segment by segment.

    Sums have a fixed order of additions, on a GPU too, in both directions.

    of_E: (E,) int64, sorted.
    start_K: (num + 1,) int64, the first entry of each segment and, last, E.
    """

    of_E: Tensor
    start_K: Tensor

    @classmethod
    def of(cls, of_E: Tensor, num: int) -> "Segments":
        numbers = torch.arange(num + 1, device=of_E.device)
        return cls(of_E, torch.searchsorted(of_E, numbers))

    @property
    def num(self) -> int:
        return len(self.start_K) - 1

    def sum(self, x_E: Tensor) -> Tensor:
        """Return the (num, ...) sums of the entries of the first axis."""
        out: Tensor = _SegmentSum.apply(x_E, self)  # type: ignore[no-untyped-call]
        return out

    def logsumexp(self, x_E: Tensor) -> Tensor:
        """Return the (num,) logsumexp, -inf for segments without an entry or of -inf alone."""
        top_K = self.reduce(x_E.detach(), "max")
        finite_K = top_K.clamp(min=torch.finfo(top_K.dtype).min)
        return self.sum((x_E - finite_K[self.of_E]).exp()).log() + finite_K

    def reduce(self, x_E: Tensor, kind: str) -> Tensor:
        """Return the (num, ...) results of a reduction without a gradient: "sum" or "max"."""
        if not x_E.numel() or not self.num:
            shape = (self.num, *x_E.shape[1:])
            return x_E.new_full(shape, 0.0 if kind == "sum" else -torch.inf)
        # unsafe: the starts are not read back to be checked
        return torch.segment_reduce(x_E, kind, offsets=self.start_K, unsafe=True)


class _SegmentSum(torch.autograd.Function):
    """Sum up segments; the gradient of a sum is that of each entry."""

    @staticmethod
    def forward(ctx: Any, x_E: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments.reduce(x_E, "sum")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.segments.of_E), None


def row_sums(x_NX: Tensor, of_N: Tensor, num: int) -> Tensor:
    """Return the (num, ...) sums of the rows of each segment; of_N is sorted."""
    if x_NX.device.type in ORDERED_DEVICES:
        return x_NX.new_zeros(num, *x_NX.shape[1:]).index_add(0, of_N, x_NX)
    return Segments.of(of_N, num).sum(x_NX)


def take(x_NX: Tensor, axis: int, number_E: Tensor) -> Tensor:
    """Return rows (axis 0) or columns; those taken twice have a gradient in a fixed order."""
    if x_NX.device.type in ORDERED_DEVICES or not x_NX.requires_grad:
        return x_NX.index_select(axis, number_E)
    # its gradient sorts the numbers, where that of index_select has atomics
    return x_NX[:, number_E] if axis else x_NX[number_E]


class Columns(NamedTuple):
    """Group columns into sets, most of which have one: sums are a selection, and a little more.

    of_X: (X,) int64, the set of each column, 0 where it is in none; none_X: (X,) bool, is it?
    first_K: (K,) int64, the first column of each set, 0 for a set of nothing; empty_K: is it one?
    many_L: (L,) int64, the sets that have more.
    more_E: (E,) int64, their other columns, set by set.
    start_L: (L + 1,) int64, where those of each begin in more_E.
    """

    of_X: Tensor
    none_X: Tensor
    first_K: Tensor
    empty_K: Tensor
    many_L: Tensor
    more_E: Tensor
    start_L: Tensor

    @classmethod
    def of(cls, of_X: Tensor, num: int) -> "Columns":
        """Group columns by the number of their set; waits for a device that is not the CPU."""
        set_E, order_E = of_X.sort(stable=True)
        in_one = set_E < num
        set_E, order_E = set_E[in_one], order_E[in_one]
        is_first = torch.ones_like(set_E, dtype=torch.bool)
        is_first[1:] = set_E[1:] != set_E[:-1]
        first_K = torch.full((num,), -1, device=of_X.device)
        first_K[set_E[is_first]] = order_E[is_first]
        many_L, sizes = torch.unique_consecutive(set_E[~is_first], return_counts=True)
        start_L = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        none_X = of_X >= num
        return cls(of_X.masked_fill(none_X, 0), none_X, first_K.clamp(min=0), first_K < 0, many_L,
                   order_E[~is_first], start_L)

    def to(self, device: torch.device | str) -> "Columns":
        return Columns(*(field.to(device) for field in self))

    def sum(self, x_NX: Tensor) -> Tensor:
        """Return the (N, K) sums of the columns of each set."""
        num = len(self.first_K)
        if x_NX.device.type in ORDERED_DEVICES:  # one column more, for those that are in no set
            of_X = self.of_X.masked_fill(self.none_X, num)
            return x_NX.new_zeros(len(x_NX), num + 1).index_add(1, of_X, x_NX)[:, :-1]
        out: Tensor = _ColumnSum.apply(x_NX, self)  # type: ignore[no-untyped-call]
        return out


class _ColumnSum(torch.autograd.Function):
    """Sum up sets of columns in a fixed order; the gradient of a sum is that of each column."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, columns: Columns) -> Tensor:
        ctx.columns = columns
        many_L = columns.many_L
        out_NK = x_NX.index_select(1, columns.first_K).masked_fill(columns.empty_K, 0.0)
        if len(many_L):
            more_EN = x_NX.T.index_select(0, columns.more_E)
            sum_LN = torch.segment_reduce(more_EN, "sum", offsets=columns.start_L, unsafe=True)
            # a sum of two selections, which a compiler does not write in between; most add a 0
            number_K = many_L.new_full((len(columns.first_K),), len(many_L))
            number_K[many_L] = torch.arange(len(many_L), device=x_NX.device)
            out_NK = out_NK + F.pad(sum_LN.T, (0, 1)).index_select(1, number_K)
        return out_NK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_NX = grads[0].index_select(1, ctx.columns.of_X)
        return d_NX.masked_fill(ctx.columns.none_X, 0.0), None


def log_masses(x_NX: Tensor, columns: Columns) -> Tensor:
    """Return (N, K) logarithms of the masses of sets of tokens, up to a constant of the row.

    Masses down to e^-157 of the largest are told apart; a set of nothing has one below these.
    x_NX: logits, at least float32.
    """
    # those in no set may be larger than all others
    x_NX = x_NX.masked_fill(columns.none_X, -torch.inf)
    # finite in a row of -inf alone, where -inf - -inf would be NaN
    top_N1 = x_NX.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x_NX.dtype).min)
    mass_NX = (x_NX - top_N1 + SHIFT).exp()  # lifted, to reach that far in float32
    mass_NK = columns.sum(mass_NX)
    return at_least(mass_NK, torch.finfo(mass_NK.dtype).tiny).log()


# --- one vocabulary: divergences per position ----------------------------------------------------
# `help(losses.position_divergence)` lists their arguments, options, results and errors.


def forward_kl(*logits_and_mask: Any, **options: Any) -> SumAndCount:
    """Compute KL(q || p): the student covers all that the teacher gives mass (arXiv:1503.02531)."""
    return position_divergence("forward_kl", *logits_and_mask, **options)


def reverse_kl(*logits_and_mask: Any, **options: Any) -> SumAndCount:
    """Compute KL(p || q): the student gives mass only where the teacher does (arXiv:2306.08543)."""
    return position_divergence("reverse_kl", *logits_and_mask, **options)


def generalized_jsd(*logits_and_mask: Any, beta: float = 0.5, **options: Any) -> SumAndCount:
    """Compute beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    From GKD (arXiv:2306.13649).  beta 0 *means* forward KL and beta 1 reverse KL, as in public
    code.  That is a jump: towards its ends the formula goes to 0 like beta (1 - beta) times those.
    Divide by that where a continuous family is wanted.  0 <= beta <= 1.
    """
    return position_divergence("generalized_jsd", *logits_and_mask, coefficient=beta, **options)


def skew_forward_kl(*logits_and_mask: Any, skew: float = 0.1, **options: Any) -> SumAndCount:
    """Compute KL(q || skew q + (1 - skew) p), 0 <= skew < 1 (DistiLLM, arXiv:2402.03898)."""
    return position_divergence("skew_forward_kl", *logits_and_mask, coefficient=skew, **options)


def skew_reverse_kl(*logits_and_mask: Any, skew: float = 0.1, **options: Any) -> SumAndCount:
    """Compute KL(p || skew p + (1 - skew) q), 0 <= skew < 1 (DistiLLM, arXiv:2402.03898)."""
    return position_divergence("skew_reverse_kl", *logits_and_mask, coefficient=skew, **options)


def adaptive_kl(*logits_and_mask: Any, alpha: float = 0.5, **options: Any) -> SumAndCount:
    """Compute h KL(q || p) + (1 - h) KL(p || q) (AKL, arXiv:2404.02657).

    h is the fraction of sum |q - p| that lies on the teacher's likely tokens; it gets no gradient.
    Unlikely tokens are those whose probabilities, summed from the smallest on, stay below alpha.
    """
    return position_divergence("adaptive_kl", *logits_and_mask, coefficient=alpha, **options)


def total_variation(*logits_and_mask: Any, **options: Any) -> SumAndCount:
    """Compute sum |p - q| / 2, from 0 to 1 (f-DISTILL, arXiv:2307.15190)."""
    return position_divergence("total_variation", *logits_and_mask, **options)


def position_divergence(
    name: str, student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, *,
    temperature: float = 1.0, teacher_temperature: float | None = None, top_k: int = 0,
    support: str = "teacher", tail: bool = True, weight_BS: Tensor | None = None,
    reduction: str = "sum", coefficient: float = 0.0, bound: Bound | None = None,
) -> SumAndCount:
    """Sum tau^2 D(q, p) over positions, q = softmax(teacher / tau), p = softmax(student / tau).

    Args:
        name: forward_kl, reverse_kl, generalized_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl
            or total_variation; each has a function above.
        student_logits_BSV, teacher_logits_BSV: any float type; the teacher gets no gradient; may
            hold NaN where the mask is False.
        mask_BS: bool, positions to compare; None: all, then nothing here waits for the device.
        temperature, teacher_temperature: tau of student and teacher, > 0; None: the same.
        top_k: compare that many tokens and the rest as one bucket; 0: all tokens.  Tokens to which
            the supporting model gives nothing are in no top_k.
        support: whose top_k: "teacher" or "student".
        tail: False: no bucket for the rest, both are renormalized on the kept tokens.
        coefficient: beta, skew or alpha of the divergences that have one.
    Returns:
        (sum, count): nats (total variation: 0 to tau^2 per position), and positions.
    Raises:
        ValueError: unknown name or support; see `check_side`.
    """
    check_side("student", student_logits_BSV, mask_BS=mask_BS)
    check_side("teacher", teacher_logits_BSV)
    check_equal_shapes(student_logits_BSV, teacher_logits_BSV)
    student_NV, teacher_NV = [
        x_BSV.flatten(0, 1) if mask_BS is None else x_BSV[mask_BS]
        for x_BSV in (student_logits_BSV, teacher_logits_BSV.detach())]
    tau_of_teacher = temperature if teacher_temperature is None else teacher_temperature
    shape_BS = student_logits_BSV.shape[:2]
    row_N = None if mask_BS is None else mask_BS.reshape(-1).nonzero().squeeze(1)
    logp = _clamped_logp(student_NV, temperature)
    with torch.no_grad():
        logq = _clamped_logp(teacher_NV, tau_of_teacher)
    if top_k:
        if support not in ("teacher", "student"):
            raise ValueError(f"support={support!r}: expected 'teacher' or 'student'")
        x_NV = teacher_NV if support == "teacher" else student_NV  # likelier: of larger logits
        ids_NK = x_NV.detach().topk(min(top_k, x_NV.shape[1]), -1).indices
        # one of many tokens without mass is any of them
        judge, log_zero = (logq, LOG_ZERO) if support == "teacher" else (logp, LOG_ZERO - SHIFT)
        empty_NK = judge.gather(1, ids_NK) <= log_zero + 1
        logp = top_k_buckets(logp, ids_NK, empty_NK, tail)
        logq = top_k_buckets(logq, ids_NK, empty_NK, tail)
    value_N = scaled(divergence_of(name, logp, logq, coefficient), temperature**2, bound)
    return reduce_terms(value_N, row_N, shape_BS, weight_BS, reduction)


def merge_unkept(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return (B, S, V + 1) student logits of what a truncated teacher keeps, and of all the rest.

    For teachers of which a row keeps some tokens, in column V the rest as one event, and -inf
    elsewhere (`tiles.TopKLogits`).  Both then have the same outcomes, so that every divergence
    above compares them, and is 0 where the student agrees with the whole teacher.

    Args:
        student_logits_BSV: (B, S, V); teacher_logits_BSV: (B, S, V + 1).
        temperature: by which the divergence will divide; that of the teacher's rest, too.
    """
    x_BSV = at_least_float32(student_logits_BSV)
    is_kept = teacher_logits_BSV[..., :-1] > -torch.inf
    # summed from the tokens themselves: 1 - sum would lose a small rest, and its gradient
    others = x_BSV.masked_fill(is_kept, 10 * FLOOR * temperature) / temperature
    rest = others.logsumexp(-1, keepdim=True) * temperature
    return torch.cat([x_BSV.masked_fill(~is_kept, 10 * FLOOR * temperature), rest], -1)


def _soften(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature, in at least float32."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected a number above 0")
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def _clamped_logp(logits_NV: Tensor, temperature: float) -> Tensor:
    return at_least(_soften(logits_NV, temperature).log_softmax(-1), FLOOR)


def top_k_buckets(logp_NV: Tensor, ids_NK: Tensor, empty_NK: Tensor, tail: bool) -> Tensor:
    """Return log-probabilities of the kept tokens and, with `tail`, of all others together.

    Without `tail`, renormalize the kept tokens.  Those of `empty_NK` are among the others.
    """
    every_NK = logp_NV.gather(1, ids_NK)
    kept_NK = every_NK.masked_fill(empty_NK, 10 * FLOOR)  # exp(10 * FLOOR) is 0
    if not tail:
        return kept_NK - kept_NK.logsumexp(-1, keepdim=True)
    # the tail comes from the other tokens: 1 - sum would lose a small tail, and its gradient
    others = logp_NV.scatter(1, ids_NK, every_NK.masked_fill(~empty_NK, 10 * FLOOR))
    tail_N = others.logsumexp(-1)
    return torch.cat([kept_NK, at_least(tail_N[:, None], FLOOR)], 1)


def divergence_of(name: str, logp: Tensor, logq: Tensor, coefficient: float = 0.0) -> Tensor:
    """Return the (...) divergences over the last axis of log-probabilities, in nats.

    Args:
        name, coefficient: see `position_divergence`.
        logp, logq: of the student and the teacher, (..., X), finite.
    Raises:
        ValueError: unknown name, or a coefficient beyond 0 to 1 (a skew has to be below 1).
    """
    c = coefficient
    if not 0 <= c <= 1 or (c == 1 and name.startswith("skew")):
        raise ValueError(f"{name}: its coefficient is {c}; expected 0 to 1, of a skew below 1")
    dtype = torch.promote_types(logp.dtype, logq.dtype)
    logp, logq = logp.to(dtype), logq.to(dtype)
    if name == "generalized_jsd" and c in (0, 1):  # its ends mean the two divergences
        name = "reverse_kl" if c else "forward_kl"
    elif name in ("skew_forward_kl", "skew_reverse_kl") and not c:
        name = name.removeprefix("skew_")
    if name == "forward_kl":
        return _kl(logq, logp)
    if name == "reverse_kl":
        return _kl(logp, logq)
    if name == "generalized_jsd":
        return _jensen_shannon(logp, logq, 1 - c)
    if name == "skew_forward_kl":
        return _kl(logq, _log_mixture(logp.exp(), logq.exp(), 1 - c))
    if name == "skew_reverse_kl":
        return _kl(logp, _log_mixture(logp.exp(), logq.exp(), c))
    if name == "adaptive_kl":
        h = adaptive_weight(logp, logq, c)
        return h * _kl(logq, logp) + (1 - h) * _kl(logp, logq)
    if name == "total_variation":
        return (logp.exp() - logq.exp()).abs().sum(-1) / 2
    raise ValueError(f"{name!r}: no such divergence; expected forward_kl, reverse_kl, "
                     "generalized_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl or "
                     "total_variation")


def _jensen_shannon(logp: Tensor, logq: Tensor, weight: float) -> Tensor:
    """Return weight KL(p || m) + (1 - weight) KL(q || m), m = weight p + (1 - weight) q.

    Its logarithms get no gradient: what theirs adds to the one term it takes from the other.
    """
    p, q = logp.exp(), logq.exp()
    with torch.no_grad():
        logm = _log_mixture(p, q, weight)
        of_q = q * (logq - logm)
        log_ratio = logp - logm
    return of_q.lerp(p * log_ratio, weight).sum(-1)


def _log_mixture(p: Tensor, q: Tensor, weight_p: float) -> Tensor:
    """Return log(weight_p p + (1 - weight_p) q), finite; a lower mass counts in no sum."""
    return at_least(q.lerp(p, weight_p), torch.finfo(p.dtype).tiny).log()


def _kl(logq: Tensor, logp: Tensor) -> Tensor:
    """Sum q (log q - log p) over the last axis; all logarithms are finite."""
    return (logq.exp() * (logq - logp)).sum(-1)


def adaptive_weight(logp: Tensor, logq: Tensor, alpha: float) -> Tensor:
    """Return the (N,) weights of KL(q || p) in `adaptive_kl`, without a gradient."""
    q, order = logq.exp().sort(-1)
    gap = (q - logp.detach().exp().gather(-1, order)).abs()
    is_unlikely = q.cumsum(-1) < alpha
    is_unlikely[..., -1] = False  # all add up to 1, which is not below alpha; rounded it may be
    likely_gap = torch.where(is_unlikely, 0.0, gap).sum(-1)
    return likely_gap / gap.sum(-1).clamp(min=TINY_MASS)


# --- chunks --------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """List the chunks of a batch with tokens on both sides, known from ids, before any forward.

    first_S, first_T: (C,) int64 row, of the flattened (B * S) or (B * T), that predicts the first
        token.
    count_S, count_T: (C,) int64, tokens of the chunk on either side.
    row_S, row_T: (N,), (M,) int64, all rows that have a chunk, chunk by chunk.
    of_S, of_T: (N,), (M,) int64, the number of their chunk.
    whole_S, whole_T: do these rows, in this order, make up the whole side?
    """

    first_S: Tensor
    first_T: Tensor
    count_S: Tensor
    count_T: Tensor
    row_S: Tensor
    row_T: Tensor
    of_S: Tensor
    of_T: Tensor
    whole_S: bool
    whole_T: bool


def find_chunks(student_chunk_BS: Tensor, teacher_chunk_BT: Tensor) -> Chunks:
    """Number the chunks of a batch and measure them; meant for the CPU, where the ids come from.

    Args:
        student_chunk_BS, teacher_chunk_BT: (B, S) and (B, T) int64, shifted chunk ids, -1 for none;
            the tokens of a chunk are neighbors.
    """
    num_samples = len(student_chunk_BS)
    ids_per_sample = 0
    for name, chunk in (("student", student_chunk_BS), ("teacher", teacher_chunk_BT)):
        shape = (num_samples, *chunk.shape[1:])
        check_positions("the student's chunks are of", shape, **{f"{name}_chunk": chunk})
        if chunk.numel():
            ids_per_sample = max(ids_per_sample, 1 + int(chunk.max()))
    num_keys = num_samples * ids_per_sample
    key_S, first_S, count_S = _measure_keys(student_chunk_BS, ids_per_sample)
    key_T, first_T, count_T = _measure_keys(teacher_chunk_BT, ids_per_sample)
    on_both_sides = (count_S > 0) & (count_T > 0)
    # number the keys that both sides have; all others, and the last one, get -1
    number = torch.full((num_keys + 1,), -1, device=on_both_sides.device)
    number[:-1][on_both_sides] = torch.arange(int(on_both_sides.sum()), device=number.device)
    row_S, of_S, whole_S = _list_rows(number[key_S])
    row_T, of_T, whole_T = _list_rows(number[key_T])
    first_S, first_T, count_S, count_T = (
        tensor[on_both_sides] for tensor in (first_S, first_T, count_S, count_T))
    return Chunks(first_S=first_S, first_T=first_T, count_S=count_S, count_T=count_T, row_S=row_S,
                  row_T=row_T, of_S=of_S, of_T=of_T, whole_S=whole_S, whole_T=whole_T)


def _measure_keys(chunk_BX: Tensor, ids_per_sample: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (key of every row, first row of every key, rows of every key).

    A key stands for a sample and a chunk id.  The last key, of rows without a chunk, is left out.
    """
    num_samples = chunk_BX.shape[0]
    num_keys = num_samples * ids_per_sample
    sample_B1 = torch.arange(num_samples, device=chunk_BX.device)[:, None]
    key_BX = torch.where(chunk_BX >= 0, sample_B1 * ids_per_sample + chunk_BX, num_keys)
    key_N = key_BX.reshape(-1)
    row_N = torch.arange(key_N.numel(), device=key_N.device)
    first = torch.full((num_keys + 1,), key_N.numel(), device=key_N.device)
    first = first.scatter_reduce(0, key_N, row_N, "amin")
    count = torch.bincount(key_N, minlength=num_keys + 1)
    return key_N, first[:-1], count[:-1]


def _list_rows(number_N: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return (rows that have a chunk, chunk by chunk; their chunks; are these all rows in order?).

    Args:
        number_N: number of the chunk of every row, -1 for none.
    """
    of_N, row_N = number_N.sort(stable=True)
    row_N = row_N[of_N >= 0]
    of_N = of_N[of_N >= 0]
    in_order = bool((row_N[1:] > row_N[:-1]).all())
    return row_N, of_N, in_order and len(row_N) == len(number_N)


def chunk_mean(x_NX: Tensor, of_N: Tensor, count_C: Tensor) -> Tensor:
    """Return the (C, X) mean of the rows of each chunk; rows come in the order of their chunks."""
    if len(x_NX) == len(count_C):  # every chunk is one row
        return x_NX
    return row_sums(x_NX, of_N, len(count_C)) / count_C[:, None]


def _averages_logs(chunk_average: str) -> bool:
    if chunk_average not in ("p", "logp"):
        raise ValueError(f"chunk_average={chunk_average!r}: expected 'p' or 'logp'")
    return chunk_average == "logp"


def _select_rows(logits_NX: Tensor, row_N: Tensor, temperature: float) -> Tensor:
    return _soften(take(logits_NX, 0, row_N), temperature)


def _chunk_rows(logits_BNX: Tensor, row_N: Tensor, whole: bool, temperature: float) -> Tensor:
    """Return the rows that have a chunk; makes no copy where all have one."""
    logits_NX = logits_BNX.flatten(0, 1)
    if whole:
        return _soften(logits_NX, temperature)
    return _select_rows(logits_NX, row_N, temperature)


def chunk_logp(
    logits_NX: Tensor, next_BX: Tensor, row_N: Tensor, of_N: Tensor, num_chunks: int,
    temperature: float,
) -> Tensor:
    """Return the (num_chunks,) log-probability of the tokens of each chunk, by the chain rule.

    Args:
        next_BX: the token that each position predicts.
        row_N, of_N: rows of logits and next tokens, and the number of their chunk.
    """
    next_N1 = next_BX.reshape(-1)[row_N[:, None]]
    logp_NX = _select_rows(logits_NX, row_N, temperature).log_softmax(-1)
    return sum_of_tokens(logp_NX.gather(1, next_N1).squeeze(1), of_N, num_chunks)


def sum_of_tokens(logp_N: Tensor, of_N: Tensor, num_chunks: int) -> Tensor:
    """Return the (num_chunks,) log-probability of chunks from that of their tokens."""
    return row_sums(at_least(logp_N, FLOOR), of_N, num_chunks)


def bernoulli_kl(logq: Tensor, logp: Tensor) -> Tensor:
    """Return KL(Bern(e^logq) || Bern(e^logp)); keeps log(1 - p) finite."""
    logq = logq.clamp(max=-MARGIN)
    logp = logp.clamp(max=-MARGIN)
    log_not_q = torch.log(-torch.expm1(logq))
    log_not_p = torch.log(-torch.expm1(logp))
    return logq.exp() * (logq - logp) - torch.expm1(logq) * (log_not_q - log_not_p)


def softened(log_KG: Tensor, log_zero: float, temperature: float) -> Tensor:
    """Return log-probabilities of masses to the power 1 / temperature, normalized in every row.

    Args:
        log_KG: logarithms of masses, up to a constant of the row.
        log_zero: log-probability that stands for a mass of 0, which stays 0; padding has a lower
            one, and keeps it.
    """
    if temperature == 1:
        return log_KG
    logp_KG = log_KG.log_softmax(-1)
    is_zero_KG = logp_KG <= log_zero + 1  # rounding, and what is added to a mass to be above 0
    soft_KG = (logp_KG / temperature).masked_fill(is_zero_KG, -torch.inf).log_softmax(-1)
    return at_least(soft_KG, log_zero).where(~is_zero_KG, logp_KG.detach().clamp(max=log_zero))


def soften_bernoulli(logp: Tensor, temperature: float) -> Tensor:
    """Return log p' where p' : 1 - p' is p^(1 / temperature) : (1 - p)^(1 / temperature)."""
    if temperature == 1:
        return logp
    logp = logp.clamp(max=-MARGIN)
    return F.logsigmoid((logp - torch.log(-torch.expm1(logp))) / temperature)


def check_width(side: str, logits_BNX: Tensor, num_tokens: int, table: str) -> None:
    """Raise a ValueError for logits of more or fewer tokens than a table is of.

    More are the padding of an lm_head, which would take its share of the softmax in silence.
    """
    width = logits_BNX.shape[-1]
    if width != num_tokens:
        advice = "they are of another tokenizer"
        if width > num_tokens:
            advice = f"cut the padding of the lm_head off: logits[..., :{num_tokens}]"
        raise ValueError(f"{side} logits have {width} columns, but {table} is of {num_tokens} "
                         f"tokens; {advice}")


# --- two vocabularies: projection ----------------------------------------------------------------


def teacher_importance(
    teacher_logits_BTW: Tensor, teacher_chunk_BT: Tensor | None = None
) -> Tensor:
    """Return the (W,) largest logit of every teacher token over the positions that have a chunk.

    Reduce it with max over micro-batches and ranks, then keep the top K columns: the kept set then
    depends neither on the cut of the batch nor on padding.

    Args:
        teacher_chunk_BT: shifted chunk ids, -1 for none; None: all positions have one.
    Returns:
        At least float32; -inf if no position has a chunk.
    """
    check_side("teacher", teacher_logits_BTW, teacher_chunk_BT=teacher_chunk_BT)
    logits_NW = teacher_logits_BTW.flatten(0, 1)
    if teacher_chunk_BT is not None:
        logits_NW = logits_NW[teacher_chunk_BT.flatten() >= 0]
    if not len(logits_NW):
        logits_NW = logits_NW.new_full((1, logits_NW.shape[1]), -torch.inf)
    return at_least_float32(logits_NW.amax(0))


def projection_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, indices_VK: Tensor, likelihoods_VK: Tensor,
    *, kept_K: Tensor | None = None, temperature: float = 1.0, chunk_average: str = "p",
    reverse: bool = False, weight_BS: Tensor | None = None, reduction: str = "sum",
    entries: "Entries | None" = None, chunks: Chunks | None = None, has_rest: bool = False,
    observe: Observer | None = None, bound: Bound | None = None,
) -> SumAndCount:
    """Compute P-KL: the sum over chunks of tau^2 KL(target || r) in the teacher's vocabulary.

    r = mean over the chunk's student positions of softmax(x / tau) @ W, target = mean over its
    teacher positions of softmax(y / tau), each position renormalized over the kept columns: never
    negative, and zero when the models agree.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient; may
            hold NaN where there is no chunk.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
        indices_VK, likelihoods_VK: the projection, -1 in unused slots; rows sum to 1 or 0.
        kept_K: (K,) int64 sorted teacher columns; None keeps all.
        chunk_average: "p", or "logp", as NeMo RL's: the target is the mean of log-probabilities
            over the kept columns, not renormalized, and r is renormalized last (can be < 0).
        reverse: KL(r || target).
        entries: `projection_entries` of these arguments, if many calls share them.
        chunks: `find_chunks` of the same ids, if known; then nothing here waits for the device.
        has_rest: the last teacher column is all tokens whose logits are -inf (`tiles.TopKLogits`
            of this temperature).  Where a chunk has such a rest, it is one event with all columns
            of which the rows keep nothing or outside of kept_K (and nothing is renormalized).
            Not with "logp".
        observe: is shown what is compared, see `Observer`.
    Returns:
        (sum, count): nats over chunks that have a position on both sides, and how many there are.
    Raises:
        ValueError: logits of more or fewer tokens than the tables.  (Of the teacher's a projection
            knows the mapped ones alone: cut the padding of its head.)
    """
    check_side("student", student_logits_BSV, student_chunk_BS=student_chunk_BS)
    check_side("teacher", teacher_logits_BTW, teacher_chunk_BT=teacher_chunk_BT)
    check_width("student", student_logits_BSV, len(indices_VK), "indices_VK")
    if entries and kept_K is None:
        check_width("teacher", teacher_logits_BTW, entries.width, "entries")
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    with torch.no_grad():
        y_MW = _chunk_rows(teacher_logits_BTW.detach(), chunks.row_T, chunks.whole_T, temperature)
        log_target_CK = _projection_target(y_MW, chunks, kept_K, chunk_average, has_rest)
    entries = entries or projection_entries(
        indices_VK, likelihoods_VK, y_MW.shape[1] - has_rest, kept_K, has_rest)
    x_NV = _chunk_rows(student_logits_BSV, chunks.row_S, chunks.whole_S, temperature)
    r_NK = _project(x_NV.log_softmax(-1), entries)
    if has_rest:  # what is outside counts beside a rest alone
        r_NK[:, -1:] *= (log_target_CK[:, -1:] > LOG_NOTHING)[chunks.of_S]
    # EPSILON last: added before, it would be all that is left of r once the student has moved its
    # mass out of the kept columns, and leaving them would be an optimum
    averages_logs = _averages_logs(chunk_average)
    r_NK = r_NK if averages_logs else r_NK / (r_NK.sum(-1, keepdim=True) + EPSILON)
    r_CK = chunk_mean(r_NK, chunks.of_S, chunks.count_S)
    r_CK = r_CK / (r_CK.sum(-1, keepdim=True) + EPSILON) if averages_logs else r_CK
    if has_rest:
        has_others = y_MW.shape[1] > entries.width
        log_r_CK, log_target_CK = _merge_empty_columns(r_CK, log_target_CK, has_others)
    else:
        log_r_CK = (r_CK + EPSILON).log()
    if observe:
        observe(log_r_CK, log_target_CK)
    kl_C = _kl(log_r_CK, log_target_CK) if reverse else _kl(log_target_CK, log_r_CK)
    value_C = scaled(kl_C, temperature**2, bound)
    return reduce_terms(value_C, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


def _projection_target(
    y_MW: Tensor, chunks: Chunks, kept_K: Tensor | None, chunk_average: str, has_rest: bool
) -> Tensor:
    """Return the (C, K) log of the teacher's mean over the kept columns, K + 1 with a rest."""
    kept_MK = y_MW if kept_K is None else y_MW.gather(1, kept_K.expand(len(y_MW), -1))
    if has_rest and kept_K is not None:
        has_rest_M1 = (y_MW[:, -1:] > -torch.inf).to(y_MW.dtype)
        has_rest_C1 = chunk_mean(has_rest_M1, chunks.of_T, chunks.count_T) > 0
        others_M1 = y_MW.index_fill(1, kept_K, -torch.inf).logsumexp(1, keepdim=True)
        # in a chunk of which all is known the columns alone are compared
        others_M1 = others_M1.masked_fill(~has_rest_C1[chunks.of_T], -torch.inf)
        kept_MK = torch.cat([kept_MK, others_M1], 1)
    logq_MK = kept_MK.log_softmax(-1)
    if _averages_logs(chunk_average):
        return chunk_mean(at_least(logq_MK, FLOOR), chunks.of_T, chunks.count_T)
    q_CK = chunk_mean(logq_MK.exp(), chunks.of_T, chunks.count_T)
    return q_CK.clamp(min=TINY_MASS).log()


def _merge_empty_columns(
    r_CK: Tensor, log_target_CK: Tensor, has_others: bool
) -> tuple[Tensor, Tensor]:
    """Compare the rest with all columns of which nothing is kept, and those outside of kept_K.

    Args:
        r_CK: (C, K + 1) the student's mass; log_target_CK: (C, K + 1); their last columns are what
            is outside, and the rest with it.
        has_others: there are columns outside.
    Returns:
        (C, K + 1) logarithms of both models' masses, FLOOR in the columns that are merged.
    """
    is_empty_CK = log_target_CK <= LOG_NOTHING
    # with all tokens kept there is no event: an empty column then is one that does not come
    merged_CK = is_empty_CK & ~is_empty_CK[:, -1:]
    merged_CK[:, -1:] = ~is_empty_CK[:, -1:] & has_others
    rest_C1 = r_CK.masked_fill(~merged_CK, 0).sum(-1, keepdim=True)
    log_r_CK = (torch.cat([r_CK[:, :-1], rest_C1], 1) + EPSILON).log()
    # nor is there one of no column: the student could give it nothing
    merged_CK[:, -1:] = ~merged_CK.any(-1, keepdim=True)
    return (log_r_CK.masked_fill(merged_CK, FLOOR),
            log_target_CK.masked_fill(merged_CK, FLOOR).log_softmax(-1))


def reachable_tokens(indices_VK: Tensor, likelihoods_VK: Tensor, W: int) -> Tensor:
    """Return (W,) bool: the teacher tokens to which some student token maps with a weight above 0.

    The teacher's mass on other tokens is mass that no student can match: `projection_kl` charges
    EPSILON's 23 nats for it, whatever the student does.
    Args:
        indices_VK, likelihoods_VK: the projection, -1 in unused slots; W: teacher tokens.
    """
    reachable_W = torch.zeros(W, dtype=torch.bool, device=indices_VK.device)
    reachable_W[indices_VK[(indices_VK >= 0) & (likelihoods_VK > 0)]] = True
    return reachable_W


class Entries(NamedTuple):
    """List the entries of a projection in the kept columns: W[row, column] = weight.

    row_E, column_E: (E,) int64, student token and number of the kept column, sorted by the latter.
    weight_E: (E,) float.
    width: kept columns, and one for all others where a rest is compared.
    """

    row_E: Tensor
    column_E: Tensor
    weight_E: Tensor
    width: int


def projection_entries(
    indices_VK: Tensor, likelihoods_VK: Tensor, W: int, kept_K: Tensor | None = None,
    has_rest: bool = False,
) -> Entries:
    """List the entries of a projection; see `projection_kl`.  W: teacher tokens.

    With `has_rest` a last column has all tokens that are not kept.
    """
    if kept_K is None:
        kept_K = torch.arange(W, device=indices_VK.device)
    number_W = torch.full((W + 1,), len(kept_K) if has_rest else -1, device=indices_VK.device)
    number_W[-1] = -1
    number_W[kept_K] = torch.arange(len(kept_K), device=indices_VK.device)
    column_VK = number_W[indices_VK]  # the index -1 of an unused slot reads the last number, -1
    row_E, slot_E = (column_VK >= 0).nonzero(as_tuple=True)
    column_E, order_E = column_VK[row_E, slot_E].sort(stable=True)
    row_E, slot_E = row_E[order_E], slot_E[order_E]
    return Entries(row_E, column_E, likelihoods_VK[row_E, slot_E], len(kept_K) + has_rest)


def _project(logp_NV: Tensor, entries: Entries) -> Tensor:
    """Return (N, K) p @ W; reads only columns that have an entry."""
    mass_NE = take(logp_NV, 1, entries.row_E).exp() * entries.weight_E.to(logp_NV)
    if logp_NV.device.type in ORDERED_DEVICES:
        zeros_NK = mass_NE.new_zeros(len(mass_NE), entries.width)
        return zeros_NK.index_add(1, entries.column_E, mass_NE)
    return Segments.of(entries.column_E, entries.width).sum(mass_NE.T).T.contiguous()


# --- two vocabularies: common tokens --------------------------------------------------------------


class TokenIds(NamedTuple):
    """Tokens of both vocabularies.

    student, teacher: (N,), (M,) int64 ids.
    """

    student: Tensor
    teacher: Tensor


def common_tokens(indices_VK: Tensor, likelihoods_VK: Tensor, relaxed: bool = False) -> TokenIds:
    """Return the ids of the tokens that both vocabularies have in common, each used once.

    Args:
        indices_VK, likelihoods_VK: the projection, rows sorted by weight, -1 in unused slots.
        relaxed: False: rows of one slot with weight 1; of one teacher token the lowest student id.
            True: rows whose top weight is 0.6 or more; of one teacher token the heaviest row, then
            the lowest id.
    Raises:
        ValueError: there are none; the loss would silently compare sorted probabilities alone.
    """
    top_weight_V = likelihoods_VK[:, 0].double()
    teacher_id_V = indices_VK[:, 0]
    if relaxed:
        is_common = top_weight_V >= 0.6  # NeMo-RL's threshold for H-KL
    else:
        is_common = (indices_VK[:, 1:] < 0).all(1) & (top_weight_V > 1 - 1e-6)
    candidates = ((teacher_id_V >= 0) & is_common).nonzero().squeeze(1)
    if len(candidates) == 0:
        raise ValueError("the projection has no common token: no row of one slot with weight 1 (-1 "
                         "marks unused slots); build it with projection_tools.build")
    # sort by teacher id, then the heaviest first, then the lowest student id
    order = candidates[torch.sort(-top_weight_V[candidates], stable=True).indices]
    order = order[torch.sort(teacher_id_V[order], stable=True).indices]
    sorted_teacher_ids = teacher_id_V[order]
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = sorted_teacher_ids[1:] != sorted_teacher_ids[:-1]
    student_ids = order[is_first].sort().values
    return TokenIds(student_ids, teacher_id_V[student_ids])


def other_tokens(ids_N: Tensor, size: int) -> Tensor:
    """Return the (size - N,) ids of the tokens that are not listed; `ids_N` holds none twice."""
    is_other = torch.ones(size, dtype=torch.bool, device=ids_N.device).index_fill(0, ids_N, False)
    # the size is known, so nothing waits for the device
    return torch.nonzero_static(is_other, size=size - len(ids_N)).squeeze(1)


def gold(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, common_V: Tensor, common_W: Tensor, *, temperature: float = 1.0,
    uncommon_topk: int = 8192, reverse: bool = False, reduction: str = "sum",
    weight_BS: Tensor | None = None, chunks: Chunks | None = None, observe: Observer | None = None,
    chunk_average: str = "p", rest: tuple[Tensor, Tensor] | None = None, bound: Bound | None = None,
) -> SumAndCount:
    """Compute the KL on common tokens plus the distance of the sorted probabilities of the rest.

    Per chunk, with p and q the means of its positions' distributions: tau^2 (KL(q || p) over the
    common tokens and one bucket for all others + sum |sorted p - sorted q| over the others).  With
    `common_tokens(..., relaxed=True)` this is H-KL.

    Args:
        common_V, common_W: (N,) int64, from `common_tokens`.
        uncommon_topk: how many of the others are compared, the largest; at most as many as either
            side has.
        chunk_average: "p", or "logp", as NeMo RL's: log p and log q are the means of log-
            probabilities, not renormalized, and there is no bucket (can be < 0).
        reverse: KL(p || q).
        rest: `other_tokens` of common_V and of common_W; None: computed in every call.
    Others and Returns: see `projection_kl`.
    """
    check_side("student", student_logits_BSV, student_chunk_BS=student_chunk_BS)
    check_side("teacher", teacher_logits_BTW, teacher_chunk_BT=teacher_chunk_BT)
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    common, others = _common_and_others(student_logits_BSV, teacher_logits_BTW,
                                        (common_V, common_W), rest)
    x_NV = _chunk_rows(student_logits_BSV, chunks.row_S, chunks.whole_S, temperature)
    has_logs = _averages_logs(chunk_average)
    log_mean = chunk_mean if has_logs else _log_chunk_mean
    logp_CV = log_mean(at_least(x_NV.log_softmax(-1), FLOOR), chunks.of_S, chunks.count_S)
    with torch.no_grad():
        y_MW = _chunk_rows(teacher_logits_BTW, chunks.row_T, chunks.whole_T, temperature)
        logq_CW = log_mean(at_least(y_MW.log_softmax(-1), FLOOR), chunks.of_T, chunks.count_T)
    # logarithms: KL(q || p) needs the tokens to which p gives almost nothing
    logp_others = logp_CV.index_select(1, others.student)
    logq_others = logq_CW.index_select(1, others.teacher)
    logp, logq = logp_CV.index_select(1, common.student), logq_CW.index_select(1, common.teacher)
    if observe:
        observe(logp, logq)
    if not has_logs:
        logp, logq = _with_bucket(logp, logp_others), _with_bucket(logq, logq_others)
    kl_C = _kl(logp, logq) if reverse else _kl(logq, logp)
    num_compared = min(uncommon_topk, len(others.student), len(others.teacher))
    distance_C = sorted_distance(logp_others.exp(), logq_others.exp(), num_compared)
    value_C = scaled(kl_C + distance_C, temperature**2, bound)
    return reduce_terms(value_C, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


def _common_and_others(
    x_BSV: Tensor, y_BTW: Tensor, common: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor] | None
) -> tuple[TokenIds, TokenIds]:
    """Return the tokens that are common and those that are not, which have to be all."""
    if rest is None:
        rest = other_tokens(common[0], x_BSV.shape[-1]), other_tokens(common[1], y_BTW.shape[-1])
    check_width("student", x_BSV, len(common[0]) + len(rest[0]), "rest")
    check_width("teacher", y_BTW, len(common[1]) + len(rest[1]), "rest")
    return TokenIds(*common), TokenIds(*rest)


def _log_chunk_mean(logp_NX: Tensor, of_N: Tensor, count_C: Tensor) -> Tensor:
    """Return the (C, X) logarithm of `chunk_mean` of the probabilities, each at least FLOOR."""
    if len(logp_NX) == len(count_C):  # every chunk is one row
        return logp_NX
    top_CX = Segments.of(of_N, len(count_C)).reduce(logp_NX.detach(), "max")
    mean_CX = chunk_mean((logp_NX - top_CX[of_N]).exp(), of_N, count_C)
    return mean_CX.log() + top_CX


def _with_bucket(logp_CN: Tensor, others_CM: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together; FLOOR: there are none."""
    bucket_C1 = at_least(others_CM.logsumexp(1, keepdim=True), FLOOR)
    return torch.cat([logp_CN, bucket_C1], 1)


def sorted_distance(p_NV: Tensor, q_NW: Tensor, k: int | None = None) -> Tensor:
    """Return the (N,) sums of |sorted p - sorted q| over the k largest; None: over all.

    Beyond the end of a row there are zeros.
    """
    width = max(p_NV.shape[1], q_NW.shape[1]) if k is None else k
    largest = [F.pad(x_NK, (0, width - x_NK.shape[1]))
               for x_NK in (_falling(p_NV, width), _falling(q_NW, width))]
    return (largest[0] - largest[1]).abs().sum(-1)


def _falling(x_NX: Tensor, width: int) -> Tensor:
    """Return the `width` largest of each row, or all, in falling order."""
    if width < x_NX.shape[1]:
        return x_NX.topk(width).values
    if x_NX.device.type != "cpu" or x_NX.dtype not in (torch.float32, torch.float64):
        return x_NX.sort(-1, descending=True).values
    # numpy sorts floats three times as fast as torch with their numbers, and ten times without
    values = x_NX.detach().numpy()
    if not (x_NX.requires_grad and torch.is_grad_enabled()):
        return torch.from_numpy(np.sort(values, -1)).flip(-1)
    return x_NX.gather(-1, torch.from_numpy(np.argsort(values, -1)).flip(-1))


def uld(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor,
    teacher_next_BT: Tensor, student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, *,
    temperature: float = 1.0, common: tuple[Tensor, Tensor] | None = None, reduction: str = "sum",
    matched_weight: float | None = None, chunks: Chunks | None = None, bound: Bound | None = None,
    weight_BS: Tensor | None = None, rest: tuple[Tensor, Tensor] | None = None,
) -> SumAndCount:
    """Sum over chunks sum |sorted p - sorted q| (ULD, arXiv:2402.12030); needs no projection.

    A chunk's distribution is that of its last token, times the probability of the chunk's tokens
    before it.  With `common` (the hybrid of TRL's GOLD trainer): matched_weight JSD on the common
    tokens + (1 - matched_weight) times the sorted distance of the others.  For the positional form
    give every i-th token of either side the chunk id i.

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        common: (student ids, teacher ids) of `common_tokens`; None: none.
        matched_weight: 0 to 1; None: the fraction of the teacher's vocabulary that is common.
        rest: `other_tokens` of both sides of `common`; None: computed in every call.
    Others and Returns: see `projection_kl`; no factor tau^2, since the value is linear in p.
    """
    of_student = {"student_next_BS": student_next_BS, "student_chunk_BS": student_chunk_BS}
    of_teacher = {"teacher_next_BT": teacher_next_BT, "teacher_chunk_BT": teacher_chunk_BT}
    check_side("student", student_logits_BSV, **of_student)
    check_side("teacher", teacher_logits_BTW, **of_teacher)
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = teacher_logits_BTW.detach().flatten(0, 1)
    last_S = chunks.first_S + chunks.count_S - 1
    last_T = chunks.first_T + chunks.count_T - 1
    p_before_C = _probability_before(
        x_NV, student_next_BS, last_S, chunks.row_S, chunks.of_S, temperature)
    q_before_C = _probability_before(
        y_MW, teacher_next_BT, last_T, chunks.row_T, chunks.of_T, temperature)
    p_CV = _end_distribution(x_NV, last_S, p_before_C, temperature)
    q_CW = _end_distribution(y_MW, last_T, q_before_C, temperature)
    if common is None:
        value_C = sorted_distance(p_CV, q_CW)
    else:
        tokens = _common_and_others(x_NV, y_MW, common, rest)
        value_C = _hybrid_uld(p_CV, q_CW, *tokens, matched_weight)
    value_C = scaled(value_C, 1, bound)
    return reduce_terms(value_C, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


def _probability_before(
    logits_NX: Tensor, next_BX: Tensor, last_C: Tensor, row_N: Tensor, of_N: Tensor,
    temperature: float,
) -> Tensor | None:
    """Return the (C,) probability of each chunk's tokens before its last; None: there are none.

    Args:
        last_C: rows that predict the last token of each chunk.
        row_N, of_N: all rows of the chunks, and the number of their chunk.
    """
    num_before = len(row_N) - len(last_C)
    if num_before == 0:
        return None
    # the size is known, so nothing waits for the device
    before = torch.nonzero_static(row_N != last_C[of_N], size=num_before).squeeze(1)
    logp_C = chunk_logp(logits_NX, next_BX, row_N[before], of_N[before], len(last_C), temperature)
    return logp_C.exp()


def _end_distribution(
    logits_NX: Tensor, last_C: Tensor, before_C: Tensor | None, temperature: float,
) -> Tensor:
    """Return the (C, X) distributions of the chunks as `uld` defines them."""
    p_CX = _select_rows(logits_NX, last_C, temperature).softmax(-1)
    if before_C is not None:
        p_CX = p_CX * before_C[:, None]
    return p_CX


def _hybrid_uld(
    p_CV: Tensor, q_CW: Tensor, common: TokenIds, others: TokenIds, matched_weight: float | None
) -> Tensor:
    """Return the (C,) values of TRL's hybrid: JSD on common tokens, sorted distance of the rest."""
    if matched_weight is None:
        matched_weight = len(common.teacher) / q_CW.shape[1]
    if not 0 <= matched_weight <= 1:
        raise ValueError(f"matched_weight={matched_weight}: expected 0 to 1, or None")
    logp, logq = [p.clamp(min=torch.finfo(p.dtype).tiny).log()
                  for p in (p_CV[:, common.student], q_CW[:, common.teacher])]
    matched_C = divergence_of("generalized_jsd", logp, logq, 0.5)
    sorted_C = sorted_distance(
        p_CV.index_select(1, others.student), q_CW.index_select(1, others.teacher))
    return matched_weight * matched_C + (1 - matched_weight) * sorted_C


def alm(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor,
    teacher_next_BT: Tensor, student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, *,
    temperature: float = 1.0, weight_BS: Tensor | None = None, reduction: str = "sum",
    chunks: Chunks | None = None, bound: Bound | None = None,
) -> SumAndCount:
    """Sum KL(Bern(q) || Bern(p)) over chunks, the models' probabilities of the chunk's own bytes.

    p and q are products over the chunk's tokens; temperature tau raises them to 1 / tau; a factor
    of e^-1e-6 keeps 1 - p above 0 (ALM, arXiv:2503.20083).

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        temperature: tau, > 0.
    Others and Returns: see `projection_kl`; no factor tau^2, as in the paper.
    """
    of_student = {"student_next_BS": student_next_BS, "student_chunk_BS": student_chunk_BS}
    of_teacher = {"teacher_next_BT": teacher_next_BT, "teacher_chunk_BT": teacher_chunk_BT}
    check_side("student", student_logits_BSV, **of_student)
    check_side("teacher", teacher_logits_BTW, **of_teacher)
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    num_chunks = len(chunks.first_S)
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = teacher_logits_BTW.detach().flatten(0, 1)
    # the temperature applies to the chunk, not to its tokens' distributions, whence the 1.0
    logp_C = chunk_logp(x_NV, student_next_BS, chunks.row_S, chunks.of_S, num_chunks, 1.0)
    logq_C = chunk_logp(y_MW, teacher_next_BT, chunks.row_T, chunks.of_T, num_chunks, 1.0)
    value_C = scaled(alm_of_chunks(logp_C, logq_C, temperature), 1, bound)
    return reduce_terms(value_C, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


def alm_of_chunks(logp_C: Tensor, logq_C: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the (C,) terms of `alm`, from both models' log-probabilities of each chunk."""
    logp_C, logq_C = _soften(logp_C, temperature), _soften(logq_C, temperature)
    return bernoulli_kl(logq_C - MARGIN, logp_C - MARGIN)
