"""Compute divergences between a teacher and a student, and the student's cross-entropy.

With one vocabulary the two next-token distributions are compared at every position (`forward_kl`
and its family).  With two, the models are compared chunk by chunk: a chunk is a span of text that
starts and ends on a token boundary of both sides (align.py finds them).  `event_kl` compares them
on events that both vocabularies can express; `projection_kl` maps the student's distribution into
the teacher's vocabulary; `gold`, `h_kl` and `uld` compare common tokens and sorted probabilities;
`alm` compares the probabilities of the chunks' own bytes.

Every loss returns (sum, count) in at least float32, also under autocast.  The caller divides by the
count over the *whole* batch, so that neither micro-batches nor ranks change the result.  All take

    weight_BS: (B, S) float, weight of the terms that begin at a student position; None: 1.
    reduction: "sum"; "sample": (B,) sums and counts; "none": (N,) terms and weights, in order.

Shapes: B samples, S student tokens, T teacher tokens, C chunks, V student vocabulary, W teacher
vocabulary, K kept entries, P pieces of a spelling, N rows of terms, X either vocabulary.  Logits at
position t predict token t + 1, and every ``*_next``, ``*_chunk`` and ``mask`` argument is *shifted
already*: entry t describes the token that position t predicts.  Logits must be cut to the
tokenizer's vocabulary (no padding rows of the lm_head).

Needs torch only.  Copy this file into your own repository.  With cpu_kernels.py and numba beside
it, all but adaptive_kl take a tenth to two thirds of the time on a CPU.
gpu_kernels.py, with triton, has the divergences per position for a GPU (never measured on one).
Tests: tests/test_losses.py, tests/test_divergences.py and tests/test_chunk_losses.py.
License: Apache-2.0 (see LICENSE).
"""

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SumAndCount = tuple[Tensor, Tensor]
ValueAndDerivative = tuple[Tensor, Tensor]

SHIFT = 70.0  # nats; exp(SHIFT) lifts small masses above float32's smallest, see _kl_over_events
EPSILON = 1e-10  # added to projected probability, so that no token costs more than about 23 nats
FLOOR = -1e4  # nats; stands for log 0, so that what a model excludes costs a finite amount
MARGIN = 1e-6  # nats that a log-probability stays below 0, so that log(1 - p) is finite
LOG_ZERO = math.log(2.0**-126)  # nats, -87.3: float32's smallest normal mass, which stands for 0
TINY_MASS = 1e-30  # below any mass that matters and above float32's smallest normal number, 1e-38
# files of kernels are optional and lie beside this one, whatever package it was copied into
BESIDE = f"{__package__}." if __package__ else ""
# the compiled ones are used if they and numba can be imported
HAS_KERNELS = all(find_spec(name) for name in ("numba", BESIDE + "cpu_kernels"))
# likewise for a GPU; the devices whose tensors it gets (tests let Triton interpret it on a CPU)
HAS_TRITON_KERNELS = all(find_spec(name) for name in ("triton", BESIDE + "gpu_kernels"))
HAS_TRITON_CHUNKS = HAS_TRITON_KERNELS and find_spec(BESIDE + "gpu_chunks") is not None
TRITON_DEVICES = ("cuda",)
# devices whose index_add adds up in the order of the entries; others use atomics
ORDERED_DEVICES = ("cpu",)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32; leave float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_side(side: str, logits_BNX: Tensor, **of_positions: Tensor | None) -> None:
    """Raise a ValueError for logits that are no floats, or what does not describe their positions.

    Reads dtypes and shapes alone: nothing waits for a device.

    Args:
        of_positions: see `check_positions`.
    """
    if not logits_BNX.is_floating_point():
        raise ValueError(f"{side} logits are {_kind(logits_BNX)}; expected floats, as a model "
                         "returns them")
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
                raise ValueError(f"{name} is {_kind(value)}; expected bool, True where a position "
                                 f"counts, as {name} != 0 makes it")
        elif "weight" not in name and "logp" not in name:
            if value.is_floating_point() or value.dtype == torch.bool:
                raise ValueError(f"{name} is {_kind(value)}; expected int64")


def check_equal_shapes(student_BSX: Tensor, teacher_BSX: Tensor) -> None:
    """Raise a ValueError for the logits of two models that cannot be compared one by one."""
    if student_BSX.shape != teacher_BSX.shape:
        raise ValueError(f"student logits have the shape {tuple(student_BSX.shape)}, teacher "
                         f"logits {tuple(teacher_BSX.shape)}; expected the same positions and the "
                         "same vocabulary, without the padding of an lm_head")


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def reduce_terms(
    value_N: Tensor, row_N: Tensor, shape_BS: tuple[int, ...], weight_BS: Tensor | None,
    reduction: str,
) -> SumAndCount:
    """Weight the terms of a loss and reduce them; see `reduction` in the module's docstring.

    Args:
        value_N: terms, nats.
        row_N: int64, row of the flattened (B * S) where each term begins.
        shape_BS: (B, S).
        weight_BS: (B, S) weights of these rows; None: 1.
    Raises:
        ValueError: unknown reduction.
    """
    if weight_BS is None:
        weight_N = torch.ones_like(value_N)
    else:
        check_positions("the terms are of", shape_BS, weight_BS=weight_BS)
        weight_N = weight_BS.reshape(-1)[row_N].to(value_N)
    value_N = value_N * weight_N
    if reduction == "none":
        return value_N, weight_N
    if reduction == "sum":
        return value_N.sum(), weight_N.sum()
    if reduction != "sample":
        raise ValueError(f"reduction={reduction!r}: expected 'sum', 'sample' or 'none'")
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
        total = F.cross_entropy(
            logits_NV, labels_BS.reshape(-1), ignore_index=-100, reduction="sum"
        )
        return total, (labels_BS != -100).sum().to(total.dtype)
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
        finite_K = top_K.masked_fill(top_K == -torch.inf, 0.0)
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


def take_rows(x_NX: Tensor, row_R: Tensor) -> Tensor:
    """Return rows by their numbers; rows that are taken twice have a gradient in a fixed order."""
    if x_NX.device.type in ORDERED_DEVICES or not x_NX.requires_grad:
        return x_NX.index_select(0, row_R)
    return x_NX[row_R]  # its gradient sorts the numbers, where that of index_select has atomics


def take_columns(x_NX: Tensor, column_E: Tensor) -> Tensor:
    """Return columns by their numbers, likewise."""
    if x_NX.device.type in ORDERED_DEVICES or not x_NX.requires_grad:
        return x_NX.index_select(1, column_E)
    return x_NX[:, column_E]


def column_sums(x_NX: Tensor, of_X: Tensor, num: int) -> Tensor:
    """Return the (N, num) sums of the columns of each set.

    Args:
        of_X: (X,) int64, the set of each column, in any order.
    """
    if x_NX.device.type in ORDERED_DEVICES:
        return x_NX.new_zeros(len(x_NX), num).index_add(1, of_X, x_NX)
    of_X, order_X = of_X.sort(stable=True)
    sorted_NX = _Permuted.apply(x_NX, order_X)  # type: ignore[no-untyped-call]
    return Segments.of(of_X, num).sum(sorted_NX.T).T.contiguous()


class _Permuted(torch.autograd.Function):
    """Select columns, each once; the gradient of a plain selection would be added up by atomics."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, order_X: Tensor) -> Tensor:
        ctx.order_X = order_X
        return x_NX.index_select(1, order_X)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.empty_like(grads[0]).index_copy_(1, ctx.order_X, grads[0]), None


# --- one vocabulary: divergences per position ----------------------------------------------------


def forward_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, *,
    temperature: float = 1.0, teacher_temperature: float | None = None, top_k: int = 0,
    support: str | Tensor = "teacher", tail: bool = True, weight_BS: Tensor | None = None,
    reduction: str = "sum",
) -> SumAndCount:
    """Compute KL(q || p): the student covers all that the teacher gives mass (arXiv:1503.02531).

    Args, Returns, Raises: see `position_divergence`.
    """
    return position_divergence(
        "forward_kl", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction,
    )


def reverse_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, *,
    temperature: float = 1.0, teacher_temperature: float | None = None, top_k: int = 0,
    support: str | Tensor = "teacher", tail: bool = True, weight_BS: Tensor | None = None,
    reduction: str = "sum",
) -> SumAndCount:
    """Compute KL(p || q): the student gives mass only where the teacher does (arXiv:2306.08543).

    Args, Returns, Raises: see `position_divergence`.
    """
    return position_divergence(
        "reverse_kl", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction,
    )


def generalized_jsd(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None,
    beta: float = 0.5, *, temperature: float = 1.0, teacher_temperature: float | None = None,
    top_k: int = 0, support: str | Tensor = "teacher", tail: bool = True,
    weight_BS: Tensor | None = None, reduction: str = "sum",
) -> SumAndCount:
    """Compute beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    From GKD (arXiv:2306.13649).  beta 0 *means* forward KL and beta 1 reverse KL, as in public
    code.  That is a jump: towards its ends the formula goes to 0 like beta (1 - beta) times those.
    Divide by that where a continuous family is wanted.

    Args, Returns, Raises: see `position_divergence`; 0 <= beta <= 1.
    """
    return position_divergence(
        "generalized_jsd", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction, beta,
    )


def skew_forward_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None,
    skew: float = 0.1, *, temperature: float = 1.0, teacher_temperature: float | None = None,
    top_k: int = 0, support: str | Tensor = "teacher", tail: bool = True,
    weight_BS: Tensor | None = None, reduction: str = "sum",
) -> SumAndCount:
    """Compute KL(q || skew q + (1 - skew) p), 0 <= skew < 1 (DistiLLM, arXiv:2402.03898).

    Args, Returns, Raises: see `position_divergence`.
    """
    return position_divergence(
        "skew_forward_kl", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction, skew,
    )


def skew_reverse_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None,
    skew: float = 0.1, *, temperature: float = 1.0, teacher_temperature: float | None = None,
    top_k: int = 0, support: str | Tensor = "teacher", tail: bool = True,
    weight_BS: Tensor | None = None, reduction: str = "sum",
) -> SumAndCount:
    """Compute KL(p || skew p + (1 - skew) q), 0 <= skew < 1 (DistiLLM, arXiv:2402.03898).

    Args, Returns, Raises: see `position_divergence`.
    """
    return position_divergence(
        "skew_reverse_kl", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction, skew,
    )


def adaptive_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None,
    alpha: float = 0.5, *, temperature: float = 1.0, teacher_temperature: float | None = None,
    top_k: int = 0, support: str | Tensor = "teacher", tail: bool = True,
    weight_BS: Tensor | None = None, reduction: str = "sum",
) -> SumAndCount:
    """Compute h KL(q || p) + (1 - h) KL(p || q) (AKL, arXiv:2404.02657).

    h is the fraction of sum |q - p| that lies on the teacher's likely tokens; it gets no gradient.
    Unlikely tokens are those whose probabilities, summed from the smallest on, stay below alpha.

    Args, Returns, Raises: see `position_divergence`.
    """
    return position_divergence(
        "adaptive_kl", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction, alpha,
    )


def total_variation(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, *,
    temperature: float = 1.0, teacher_temperature: float | None = None, top_k: int = 0,
    support: str | Tensor = "teacher", tail: bool = True, weight_BS: Tensor | None = None,
    reduction: str = "sum",
) -> SumAndCount:
    """Compute sum |p - q| / 2, from 0 to 1 (f-DISTILL, arXiv:2307.15190).

    Args, Returns, Raises: see `position_divergence`.
    """
    return position_divergence(
        "total_variation", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, support, tail, weight_BS, reduction,
    )


def topk_tail_policy_loss(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, next_BS: Tensor, mask_BS: Tensor,
    top_k: int = 16, old_logp_BS: Tensor | None = None, max_ratio: float = 10.0, *,
    ratio: str = "clamp", sample_BS: Tensor | None = None, old_logits_BSV: Tensor | None = None,
    temperature: float = 1.0, teacher_temperature: float | None = None, tail: bool = True,
    weight_BS: Tensor | None = None, reduction: str = "sum",
) -> SumAndCount:
    """Compute the on-policy reverse KL on the student's top_k tokens and one bucket for the rest.

    The sum over positions t of rho_t KL(p || q), rho_t = `prefix_ratio`: how much likelier the
    student has become, since it sampled, to write the tokens in front of t.  KL(p || q) needs no
    ratio of the token at t, because it is a sum over all tokens that may come there.

    ratio "bucket" is the estimator of slime instead (its PR 2033): the sum over positions and
    buckets of p_old min(p / p_old, max_ratio) A with the advantage A = log p_old - log q, which is
    that of the student that sampled and has no gradient; the buckets are that student's top_k.  It
    is the KL, in value and gradient, as long as p_old is p; of older samples it corrects nothing
    in front of t.

    Args:
        next_BS: int64, the token that was sampled there; anything where the mask is False.
        mask_BS: bool, positions that predict a sampled token.
        top_k: number of tokens, the student's most likely ones.
        old_logp_BS: float, log-probability of that token in nats under the student that sampled it,
            both students as they are (temperature 1); None: ratio 1.  Not for "bucket".
        max_ratio, sample_BS: see `prefix_ratio`; 10 is not tuned.
        ratio: "clamp" or "mask", the kind of `prefix_ratio`, or "bucket".
        old_logits_BSV: for "bucket" only: logits of the student that sampled; None: p_old is p.
    Others and Returns: see `position_divergence`; the count is that of positions, not of ratios.
    Raises:
        ValueError: unknown ratio, max_ratio below 1, or old values that another ratio reads.
    """
    _check_ratio(ratio, ("clamp", "mask", "bucket"), max_ratio)
    check_side("student", student_logits_BSV, next_BS=next_BS, mask_BS=mask_BS)
    check_side("teacher", teacher_logits_BSV)
    for logits_BSV in (teacher_logits_BSV, old_logits_BSV):
        if logits_BSV is not None:
            check_equal_shapes(student_logits_BSV, logits_BSV)
    row_N = mask_BS.reshape(-1).nonzero().squeeze(1)
    if ratio == "bucket":
        if old_logp_BS is not None:
            raise ValueError("ratio='bucket' compares all buckets: expected old_logits_BSV, got "
                             "old_logp_BS, which describes the sampled tokens alone")
        value_N = _bucket_ratio_loss(
            student_logits_BSV[mask_BS], teacher_logits_BSV[mask_BS],
            None if old_logits_BSV is None else old_logits_BSV[mask_BS],
            temperature, teacher_temperature or temperature, top_k, tail, max_ratio,
        )
        return reduce_terms(value_N, row_N, mask_BS.shape, weight_BS, reduction)
    if old_logits_BSV is not None:
        raise ValueError(f"ratio={ratio!r} needs old_logp_BS; only 'bucket' reads old_logits_BSV")
    value_N, _ = position_divergence(
        "reverse_kl", student_logits_BSV, teacher_logits_BSV, mask_BS,
        temperature, teacher_temperature, top_k, "student", tail, None, "none",
    )
    if old_logp_BS is not None:
        logits_NV = at_least_float32(student_logits_BSV.detach()[mask_BS])
        logp_NV = logits_NV.log_softmax(-1)
        logp_N = logp_NV.gather(1, next_BS[mask_BS][:, None]).squeeze(1)
        logp_BS = logp_N.new_zeros(mask_BS.shape)
        logp_BS[mask_BS] = logp_N
        ratio_BS = prefix_ratio(logp_BS, old_logp_BS, mask_BS, max_ratio, ratio, sample_BS)
        value_N = value_N * ratio_BS[mask_BS].to(value_N)
    return reduce_terms(value_N, row_N, mask_BS.shape, weight_BS, reduction)


def prefix_ratio(
    logp_BS: Tensor, old_logp_BS: Tensor, mask_BS: Tensor, max_ratio: float = 10.0,
    kind: str = "clamp", sample_BS: Tensor | None = None,
) -> Tensor:
    """Return how much likelier the student has become to write what precedes each position.

        rho_t = product over sampled tokens s < t of the same sample of p(s) / p_old(s)

    Samples of an older student, weighted so, have the expectation of the student's own: for every
    f of the tokens in front of t, E_old[rho_t f] = E[f].  The token at t is left out.  A divergence
    at t sums over all tokens that may come there, so it depends on what precedes t alone.  The
    ratio of the token at t has expectation 1 whatever precedes it, and would only add noise.  Use
    it as `weight_BS` of any loss here (times other weights): it has no gradient.

    It is exact with max_ratio = inf.  Its variance grows with the length, so it is limited.  A term
    that reads sampled tokens from t on too (`alm` of a chunk) would need their ratios as well, so
    it keeps a bias.

    Args:
        logp_BS: (B, S) float, log-probability in nats of the token that position t predicts, under
            the student as it is now; -inf counts as -1e4.
        old_logp_BS: (B, S) float, likewise, under the student that sampled.  Both under the
            distribution that was sampled from (its temperature).
        mask_BS: (B, S) bool, True where the token that position t predicts was sampled.  Others
            (prompt, padding) contribute nothing; the log-probabilities may hold NaN there.
        max_ratio: limit of the product, 1 or more; inf: none.
        kind: "clamp": what is larger becomes max_ratio, which lets everything teach; "mask": what
            is outside of [1 / max_ratio, max_ratio] becomes 0.
        sample_BS: (B, S) int64, number of the sample at each position, for rows that hold several
            one after the other; None: each row is one.
    Returns:
        (B, S) rho at every position, also where the mask is False; 1 up to the first sampled token
        of each sample; dtype of logp_BS, at least float32.
    Raises:
        ValueError: unknown kind; max_ratio below 1.
    """
    _check_ratio(kind, ("clamp", "mask"), max_ratio)
    check_positions("logp_BS has", logp_BS.shape, old_logp_BS=old_logp_BS, mask_BS=mask_BS,
                    sample_BS=sample_BS)
    logp_BS = at_least_float32(logp_BS.detach())
    # sums of a whole row in float64: those of a packed row are differences of them
    now_BS = logp_BS.double().clamp(min=FLOOR)
    old_BS = old_logp_BS.detach().double().clamp(min=FLOOR)
    log_ratio_BS = torch.where(mask_BS, now_BS - old_BS, 0.0)
    before_BS = F.pad(log_ratio_BS.cumsum(1)[:, :-1], (1, 0))
    if sample_BS is not None:
        begins_BS = F.pad(sample_BS[:, 1:] != sample_BS[:, :-1], (1, 0))
        position_S = torch.arange(sample_BS.shape[1], device=sample_BS.device)
        first_BS = torch.where(begins_BS, position_S, 0).cummax(1).values
        before_BS = before_BS - before_BS.gather(1, first_BS)
    limit = math.log(max_ratio)
    ratio_BS = before_BS.clamp(max=limit).exp()
    if kind == "mask":
        # not <= limit, which would take NaN for a ratio outside
        ratio_BS = torch.where(before_BS.abs() > limit, 0.0, ratio_BS)
    return ratio_BS.to(logp_BS)


def _bucket_ratio_loss(
    student_NV: Tensor, teacher_NV: Tensor, old_NV: Tensor | None, temperature: float,
    teacher_temperature: float, top_k: int, tail: bool, max_ratio: float,
) -> Tensor:
    """Return the (N,) values of `topk_tail_policy_loss` with ratio "bucket"; old None: student."""
    logp = _soften(student_NV, temperature).log_softmax(-1).clamp(min=FLOOR)
    with torch.no_grad():
        logq = _soften(teacher_NV, teacher_temperature).log_softmax(-1).clamp(min=FLOOR)
        log_old = logp.detach()
        if old_NV is not None:
            log_old = _soften(old_NV, temperature).log_softmax(-1).clamp(min=FLOOR)
        ids_NK = _largest_ids(log_old, top_k)
        logq = _top_k_buckets(logq, ids_NK, tail)
        log_old = _top_k_buckets(log_old, ids_NK, tail)
    logp = _top_k_buckets(logp, ids_NK, tail)
    # p_old min(p / p_old, max_ratio), without a quotient that may overflow
    limit = log_old + math.log(max_ratio)
    mass = torch.where(logp > limit, limit, logp).exp()
    return temperature**2 * (mass * (log_old - logq)).sum(-1)


def _check_ratio(kind: str, kinds: tuple[str, ...], max_ratio: float) -> None:
    if kind not in kinds:
        raise ValueError(f"ratio {kind!r}: expected one of {', '.join(kinds)}")
    if not max_ratio >= 1:
        raise ValueError(f"max_ratio={max_ratio}: expected 1 or more")


def position_divergence(
    name: str, student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None,
    temperature: float = 1.0, teacher_temperature: float | None = None, top_k: int = 0,
    support: str | Tensor = "teacher", tail: bool = True, weight_BS: Tensor | None = None,
    reduction: str = "sum", coefficient: float = 0.0,
) -> SumAndCount:
    """Sum tau^2 D(q, p) over positions, q = softmax(teacher / tau), p = softmax(student / tau).

    Args:
        name: forward_kl, reverse_kl, generalized_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl
            or total_variation; each has a function above.
        student_logits_BSV, teacher_logits_BSV: any float type; the teacher gets no gradient; may
            hold NaN where the mask is False.
        mask_BS: bool, positions to compare; None: all, then nothing here waits for the device.
        temperature, teacher_temperature: tau of student and teacher, > 0; None: the same.
        top_k: compare that many tokens and the rest as one bucket; 0: all tokens.
        support: whose top_k: "teacher", "student", or (B, S, K) int64 ids without repetition.
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
    student_NV = _select_positions(student_logits_BSV, mask_BS)
    teacher_NV = _select_positions(teacher_logits_BSV.detach(), mask_BS)
    teacher_temperature = teacher_temperature or temperature
    shape_BS = student_logits_BSV.shape[:2]
    all_rows_BS = torch.arange(shape_BS.numel(), device=student_NV.device).view(shape_BS)
    row_N = _select_positions(all_rows_BS, mask_BS)
    whole_vocabulary = not top_k and isinstance(support, str)
    kernels = None
    if whole_vocabulary and name != "adaptive_kl":
        kernels = compiled_kernels(student_NV, teacher_NV)
        if kernels:
            student_NV = at_least_float32(student_NV)
            teacher_NV = at_least_float32(teacher_NV)
        else:
            kernels = triton_kernels(student_NV, teacher_NV)
    if kernels:
        value_N: Tensor = _WithDerivative.apply(  # type: ignore[no-untyped-call]
            student_NV, None, kernels.divergence, teacher_NV, _mixture(name, coefficient),
            temperature, teacher_temperature, FLOOR,
        )
        return reduce_terms(temperature**2 * value_N, row_N, shape_BS, weight_BS, reduction)
    if whole_vocabulary:
        logp = _clamped_logp(student_NV, temperature)
        with torch.no_grad():
            logq = _clamped_logp(teacher_NV, teacher_temperature)
    else:
        if isinstance(support, Tensor):
            ids_NK = _select_positions(support, mask_BS)
        else:
            ids_NK = _support_ids(student_NV, teacher_NV, support, top_k)
        logp = _buckets_of(student_NV, ids_NK, tail, temperature)
        with torch.no_grad():
            logq = _buckets_of(teacher_NV, ids_NK, tail, teacher_temperature)
    if name == "adaptive_kl":
        value_N = _adaptive_divergence(logp, logq, coefficient)
    else:
        value_N = _divergence(_mixture(name, coefficient), logp, logq)
    return reduce_terms(temperature**2 * value_N, row_N, shape_BS, weight_BS, reduction)


def cross_entropy_in_place(
    logits_NV: Tensor, labels_N: Tensor, factor: float
) -> SumAndCount | None:
    """Compute (cross-entropy, 0) and write the gradient over the logits.

    Args and Returns: see `divergence_in_place`.
    """
    none = torch.empty(0, dtype=torch.int64, device=logits_NV.device)
    return divergence_in_place(
        "forward_kl", logits_NV, None, labels_N, none, none, (factor, 0.0)
    )


def divergence_in_place(
    name: str, student_NV: Tensor, teacher_MV: Tensor | None, labels_N: Tensor | None,
    row_C: Tensor, teacher_row_C: Tensor, factors: tuple[float, float],
    weight_N: Tensor | None = None, temperature: float = 1.0, coefficient: float = 0.0,
) -> SumAndCount | None:
    """Compute cross-entropy and a divergence, and write the gradient over the student's logits.

    The gradient is that of factors[0] * cross-entropy + factors[1] * divergence.  For tensors that
    gpu_kernels.py serves; autograd takes no part.

    Args:
        name, coefficient: see `position_divergence`; not adaptive_kl.
        student_NV, teacher_MV: bfloat16, float16 or float32; teacher None: the cross-entropy alone.
        labels_N: int64, the next tokens, -100 for none; None: no cross-entropy.
        row_C, teacher_row_C: (C,) int64, the rows to compare; each of the student's once.
        weight_N: weight of the divergence at every student row; None: 1.
    Returns:
        (cross-entropy, divergence), float32 sums in nats without the factors.  None: no kernel
        serves these tensors, which stay as they are.
    """
    check_side("student", student_NV, labels_N=labels_N, weight_N=weight_N)
    if teacher_MV is not None:
        check_side("teacher", teacher_MV)
    teacher = [] if teacher_MV is None else [teacher_MV]
    kernels = triton_kernels(student_NV, *teacher)
    if kernels is None:
        return None
    scale_N = student_NV.new_zeros(len(student_NV), dtype=torch.float32)
    scale_N[row_C] = temperature**2
    if weight_N is not None:
        scale_N *= weight_N
    teacher_row_N = torch.full_like(scale_N, -1, dtype=torch.int64)
    teacher_row_N[row_C] = teacher_row_C
    value_N, cross_entropy_N = kernels.divergence_(
        student_NV, teacher_MV, _mixture(name, coefficient), temperature, temperature, FLOOR,
        teacher_row_N, factors[1] * scale_N, labels_N, factors[0],
    )
    return cross_entropy_N.sum(), (value_N * scale_N).sum()


def merge_unkept(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return (B, S, V + 1) student logits of what a truncated teacher keeps, and of all the rest.

    For teachers of which a row keeps some tokens, in column V the rest as one event, and -inf
    elsewhere (`tiles.TopKLogits`).  Both then have the same outcomes, so that every divergence
    above compares them, and is 0 where the student agrees with the whole teacher.

    Args:
        student_logits_BSV: (B, S, V); teacher_logits_BSV: (B, S, V + 1).
        temperature: by which the divergence will divide.
    """
    x_BSV = at_least_float32(student_logits_BSV)
    is_kept = teacher_logits_BSV[..., :-1] > -torch.inf
    # summed from the tokens themselves: 1 - sum would lose a small rest, and its gradient
    others = x_BSV.masked_fill(is_kept, 10 * FLOOR * temperature) / temperature
    rest = others.logsumexp(-1, keepdim=True) * temperature
    return torch.cat([x_BSV.masked_fill(~is_kept, 10 * FLOOR * temperature), rest], -1)


def _select_positions(x_BSX: Tensor, mask_BS: Tensor | None) -> Tensor:
    return x_BSX.flatten(0, 1) if mask_BS is None else x_BSX[mask_BS]


def _soften(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature, in at least float32."""
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def _clamped_logp(logits_NV: Tensor, temperature: float) -> Tensor:
    """Return the (N, V) log-probabilities, none below FLOOR."""
    return _soften(logits_NV, temperature).log_softmax(-1).clamp(min=FLOOR)


def _support_ids(
    student_NV: Tensor, teacher_NV: Tensor, support: str, top_k: int
) -> Tensor:
    """Return the (N, K) int64 ids of the student's or the teacher's top_k tokens."""
    if support not in ("teacher", "student"):
        raise ValueError(
            f"support={support!r}: expected 'teacher', 'student' or a tensor of token ids"
        )
    # likelier tokens have larger logits
    return _largest_ids(teacher_NV if support == "teacher" else student_NV, top_k)


def _largest_ids(x_NV: Tensor, k: int) -> Tensor:
    """Return the (N, k) int64 ids of the largest entries, k at most V; no gradient."""
    return x_NV.detach().topk(min(k, x_NV.shape[1]), -1).indices


def _buckets_of(
    logits_NV: Tensor, ids_NK: Tensor, tail: bool, temperature: float
) -> Tensor:
    """Return `_top_k_buckets` of the log-probabilities of these logits."""
    kernels = compiled_kernels(logits_NV, logits_NV)
    if not kernels:
        logp_NV = _clamped_logp(logits_NV, temperature)
        return _top_k_buckets(logp_NV, ids_NK, tail)
    row_N = torch.arange(len(logits_NV))
    kept_NK, tail_N = _KeptLogp.apply(  # type: ignore[no-untyped-call]
        at_least_float32(logits_NV), row_N, ids_NK, kernels, temperature, tail
    )
    return torch.cat([kept_NK, tail_N[:, None]], 1) if tail else _renormalize(kept_NK)


def _renormalize(logp_NK: Tensor) -> Tensor:
    return logp_NK - logp_NK.logsumexp(-1, keepdim=True)


def _top_k_buckets(
    logp_NV: Tensor, ids_NK: Tensor, tail: bool
) -> Tensor:
    """Return log-probabilities of the kept tokens and, with `tail`, of all others together.

    Without `tail`, renormalize the kept tokens.
    """
    kept_NK = logp_NV.gather(1, ids_NK)
    if not tail:
        return _renormalize(kept_NK)
    # the tail comes from the other tokens: 1 - sum would lose a small tail, and its gradient
    others = logp_NV.scatter(1, ids_NK, 10 * FLOOR)  # exp(10 * FLOOR) is 0
    tail_N = others.logsumexp(-1)
    return torch.cat([kept_NK, tail_N[:, None].clamp(min=FLOOR)], 1)


class Mixture(NamedTuple):
    """Describe a divergence a KL(q || m) + b KL(p || m), m = s p + (1 - s) q.

    forward_weight, reverse_weight: a, b, each 0 to 1.
    student_weight: s, 0 to 1.
    """

    forward_weight: float
    reverse_weight: float
    student_weight: float


def _mixture(name: str, coefficient: float) -> Mixture | None:
    """Return the weights of a divergence by its name; None: total variation, which is no mixture.

    Raises:
        ValueError: unknown name.
    """
    c = coefficient
    jsd = Mixture(c, 1 - c, 1 - c)
    if not 0 < c < 1:  # the ends mean the two divergences, see generalized_jsd
        jsd = Mixture(1 - c, c, 1 - c)
    by_name = {
        "forward_kl": Mixture(1, 0, 1),
        "reverse_kl": Mixture(0, 1, 0),
        "generalized_jsd": jsd,
        "skew_forward_kl": Mixture(1, 0, 1 - c),
        "skew_reverse_kl": Mixture(0, 1, c),
        "total_variation": None,
    }
    if name not in by_name:
        names = ", ".join([*by_name, "adaptive_kl"])
        raise ValueError(f"{name!r}: no such divergence; expected one of {names}")
    return by_name[name]


def _divergence(mixture: Mixture | None, logp: Tensor, logq: Tensor) -> Tensor:
    """Return the (N,) divergences of the rows."""
    if mixture is None:
        return (logp.exp() - logq.exp()).abs().sum(-1) / 2
    forward_weight, reverse_weight, student_weight = mixture
    if student_weight == 1:
        logm = logp
    elif student_weight == 0 and reverse_weight:
        logm = logq
    else:  # also KL(q || q): it is 0, but has to have a gradient, of 0
        logm = _log_mixture(logp, logq, 1 - student_weight)
    terms = []
    if forward_weight:
        terms.append(forward_weight * _kl(logq, logm))
    if reverse_weight:
        terms.append(reverse_weight * _kl(logp, logm))
    return torch.stack(terms).sum(0)


def _kl(logq: Tensor, logp: Tensor) -> Tensor:
    """Sum q (log q - log p) over the last axis; q = 0 adds nothing, whatever log p is."""
    q = logq.exp()
    # not q > 0, which would take NaN for 0
    return torch.where(q != 0, q * (logq - logp), 0.0).sum(-1)


def _log_mixture(logp: Tensor, logq: Tensor, weight_q: float) -> Tensor:
    """Return log(weight_q q + (1 - weight_q) p)."""
    stacked = torch.stack([logp, logq])
    weights = torch.tensor([1 - weight_q, weight_q], dtype=stacked.dtype, device=logp.device).log()
    broadcast_shape = [2] + [1] * logp.dim()
    return (stacked + weights.view(broadcast_shape)).logsumexp(0)


def _adaptive_divergence(logp: Tensor, logq: Tensor, alpha: float) -> Tensor:
    """Return the (N,) values of `adaptive_kl`."""
    q, order = logq.exp().sort(-1)
    gap = (q - logp.detach().exp().gather(-1, order)).abs()
    is_unlikely = q.cumsum(-1) < alpha
    likely_gap = torch.where(is_unlikely, 0.0, gap).sum(-1)
    h = likely_gap / gap.sum(-1).clamp(min=TINY_MASS)
    return h * _kl(logq, logp) + (1 - h) * _kl(logp, logq)


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
    for name, chunk in (("student", student_chunk_BS), ("teacher", teacher_chunk_BT)):
        shape = (num_samples, *chunk.shape[1:])
        check_positions("the student's chunks are of", shape, **{f"{name}_chunk": chunk})
    ids_per_sample = 0
    for chunk in (student_chunk_BS, teacher_chunk_BT):
        if chunk.numel():
            ids_per_sample = max(ids_per_sample, 1 + int(chunk.max()))
    num_keys = student_chunk_BS.shape[0] * ids_per_sample
    key_S, first_S, count_S = _measure_keys(student_chunk_BS, ids_per_sample)
    key_T, first_T, count_T = _measure_keys(teacher_chunk_BT, ids_per_sample)
    on_both_sides = (count_S > 0) & (count_T > 0)
    # number the keys that both sides have; all others, and the last one, get -1
    number = torch.full((num_keys + 1,), -1, device=on_both_sides.device)
    number[:-1][on_both_sides] = torch.arange(int(on_both_sides.sum()), device=number.device)
    row_S, of_S, whole_S = _list_rows(number[key_S])
    row_T, of_T, whole_T = _list_rows(number[key_T])
    return Chunks(
        first_S=first_S[on_both_sides],
        first_T=first_T[on_both_sides],
        count_S=count_S[on_both_sides],
        count_T=count_T[on_both_sides],
        row_S=row_S,
        row_T=row_T,
        of_S=of_S,
        of_T=of_T,
        whole_S=whole_S,
        whole_T=whole_T,
    )


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


def _select_rows(logits_NX: Tensor, row_N: Tensor, temperature: float) -> Tensor:
    """Return some rows, by their numbers, divided by the temperature."""
    return _soften(take_rows(logits_NX, row_N), temperature)


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
    if kernels := compiled_kernels(logits_NX, logits_NX):
        logp_N1, _ = _KeptLogp.apply(  # type: ignore[no-untyped-call]
            at_least_float32(logits_NX), row_N, next_N1, kernels, temperature, False
        )
    else:
        logp_NX = _select_rows(logits_NX, row_N, temperature).log_softmax(-1)
        logp_N1 = logp_NX.gather(1, next_N1).clamp(min=FLOOR)
    logp_N: Tensor = logp_N1.squeeze(1)
    return row_sums(logp_N, of_N, num_chunks)


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
        log_zero: log-probability that stands for a mass of 0, which stays 0.
    """
    if temperature == 1:
        return log_KG
    logp_KG = log_KG.log_softmax(-1)
    is_zero_KG = logp_KG <= log_zero + 1  # rounding, and what is added to a mass to be above 0
    logp_KG = (logp_KG / temperature).masked_fill(is_zero_KG, -torch.inf)
    return logp_KG.log_softmax(-1).clamp(min=log_zero)


def soften_bernoulli(logp: Tensor, temperature: float) -> Tensor:
    """Return log p' where p' : 1 - p' is p^(1 / temperature) : (1 - p)^(1 / temperature)."""
    if temperature == 1:
        return logp
    logp = logp.clamp(max=-MARGIN)
    return F.logsigmoid((logp - torch.log(-torch.expm1(logp))) / temperature)


def check_width(
    side: str, logits_BNX: Tensor, num_tokens: int, table: str
) -> None:
    """Raise a ValueError for logits of more or fewer tokens than a table is of.

    More are the padding of an lm_head, which would take its share of the softmax in silence.
    """
    width = logits_BNX.shape[-1]
    if width != num_tokens:
        advice = "they are of another tokenizer"
        if width > num_tokens:
            advice = f"cut the padding of the lm_head off: logits[..., :{num_tokens}]"
        raise ValueError(
            f"{side} logits have {width} columns, but {table} is of {num_tokens} tokens; {advice}"
        )


# --- derivatives by hand, and compiled kernels ---------------------------------------------------


class _WithDerivative(torch.autograd.Function):
    """Apply compute(x_NV, *arguments) = ((C,) values, (N, V) their derivative by x).

    Row c of the values belongs to row row_C[c] of x; row_C None: each row has a value.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, row_C: Tensor | None, compute: Callable[..., ValueAndDerivative],
        *arguments: Any,
    ) -> Tensor:
        value_C, d_NV = compute(x_NV, *arguments)
        if row_C is None:
            row_C = torch.arange(len(d_NV), device=d_NV.device)
        ctx.save_for_backward(d_NV, row_C)
        ctx.num_others = 2 + len(arguments)  # inputs without a gradient
        return value_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_NV, row_C = ctx.saved_tensors
        return _scale_rows(d_NV, row_C, grads[0]), *[None] * ctx.num_others


class _MixtureDistance(torch.autograd.Function):
    """Compute (C,) distances between chunk distributions with the compiled kernels.

    A chunk's distribution is a weighted sum of the softmax of its rows.  The gradient is by the
    student's logits x (N, V) and its weights (R,) of the rows row_R of the chunks of_R.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, weight_R: Tensor, row_R: Tensor, of_R: Tensor, kernels: Any,
        teacher: "WeightedRows", *arguments: Any,
    ) -> Tensor:
        student = WeightedRows(x_NV, weight_R, row_R, of_R)
        value_C: Tensor
        value_C, d_NV, d_R = kernels.mixture_distance(student, teacher, *arguments)
        ctx.save_for_backward(d_NV, d_R, row_R, of_R)
        ctx.num_others = 4 + len(arguments)  # inputs without a gradient
        return value_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_NV, d_R, row_R, of_R = ctx.saved_tensors
        outer_R = grads[0][of_R]
        return _scale_rows(d_NV, row_R, outer_R), d_R * outer_R, *[None] * ctx.num_others


class _KeptLogp(torch.autograd.Function):
    """Compute log-probabilities of tokens ids_RK in rows row_R of x, and of all others together.

    Gives ((R, K), (R,)), none below FLOOR; without `tail` the second is of no use.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, row_R: Tensor, ids_RK: Tensor, kernels: Any, temperature: float,
        tail: bool,
    ) -> tuple[Tensor, Tensor]:
        result = kernels.kept_logp(x_NV, row_R, ids_RK, temperature, FLOOR, tail)
        ctx.save_for_backward(x_NV, row_R, ids_RK, *result)
        ctx.kernels = kernels
        ctx.temperature = temperature
        return result.kept_RK, result.tail_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NV, row_R, ids_RK, *fields = ctx.saved_tensors
        result = ctx.kernels.KeptLogp(*fields)
        d_NV = ctx.kernels.kept_derivative(
            x_NV, row_R, ids_RK, result, *grads, ctx.temperature, FLOOR
        )
        return d_NV, None, None, None, None, None


class _Projected(torch.autograd.Function):
    """Compute softmax(x / temperature) @ W, (R, K), for rows row_R of x; W gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, row_R: Tensor, kernels: Any, entries: "Entries", temperature: float
    ) -> Tensor:
        of_kernels = kernels.ProjectionEntries(
            entries.row_E.int(), entries.column_E.int(), entries.weight_E.float()
        )
        result = kernels.projected(x_NV, row_R, of_kernels, entries.width, temperature)
        ctx.save_for_backward(x_NV, row_R, *of_kernels, *result)
        ctx.kernels = kernels
        ctx.temperature = temperature
        out_RK: Tensor = result.out_RK
        return out_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NV, row_R, token_E, column_E, weight_E, *fields = ctx.saved_tensors
        entries = ctx.kernels.ProjectionEntries(token_E, column_E, weight_E)
        d_NV = ctx.kernels.projected_derivative(
            x_NV, row_R, entries, ctx.kernels.Projected(*fields), grads[0], ctx.temperature
        )
        return d_NV, None, None, None, None


class WeightedRows(NamedTuple):
    """Rows whose softmaxes, times weights, add up to the distributions of chunks.

    logits_NX: float32.
    weight_R, row_R, of_R: (R,) weight, row of the logits, number of the chunk; chunk by chunk.
    """

    logits_NX: Tensor
    weight_R: Tensor
    row_R: Tensor
    of_R: Tensor


def _scale_rows(d_NV: Tensor, row_R: Tensor, factor_R: Tensor) -> Tensor:
    """Multiply the listed rows by these factors; the other rows of d_NV hold 0."""
    if factor_R.device.type == "cpu" and bool((factor_R == 1).all()):  # common, and spares a pass
        return d_NV
    factor_N = factor_R.new_zeros(len(d_NV)).index_copy_(0, row_R, factor_R)
    return d_NV * factor_N[:, None]


def compiled_kernels(
    student_logits: Tensor, teacher_logits: Tensor
) -> Any:
    """Import the module of compiled kernels if it serves these tensors; else return None.

    It works on float32, so its callers convert bfloat16 and float16, which are served too.
    """
    if not HAS_KERNELS:
        return None
    for logits in (student_logits, teacher_logits):
        if logits.device.type != "cpu" or logits.dtype == torch.float64:
            return None
    return import_module(BESIDE + "cpu_kernels")


def triton_kernels(*logits_NX: Tensor) -> Any:
    """Import the module of Triton kernels if it serves these tensors; else return None."""
    if not HAS_TRITON_KERNELS:
        return None
    if any(logits.device.type not in TRITON_DEVICES for logits in logits_NX):
        return None
    gpu_kernels = import_module(BESIDE + "gpu_kernels")
    for logits in logits_NX:
        if logits.dtype not in gpu_kernels.DTYPES or logits.stride(-1) != 1:
            return None
    return gpu_kernels


def numbers_of_rows(row_R: Tensor, num_rows: int) -> Tensor:
    """Return (num_rows,) int32, as kernels read it: the place of each row in the list, or -1."""
    number_N = torch.full((num_rows,), -1, dtype=torch.int32, device=row_R.device)
    number_R = torch.arange(len(row_R), dtype=torch.int32, device=row_R.device)
    return number_N.index_copy_(0, row_R, number_R)


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
    kept_K: Tensor | None = None, temperature: float = 1.0, teacher_average: str = "p",
    reverse: bool = False, weight_BS: Tensor | None = None, reduction: str = "sum",
    entries: "Entries | None" = None,
    chunks: Chunks | None = None, has_rest: bool = False,
) -> SumAndCount:
    """Compute P-KL: the sum over chunks of tau^2 KL(target || r) in the teacher's vocabulary.

    r = mean over the student positions of the chunk of softmax(x / tau) @ W, renormalized over the
    kept columns; target = mean over its teacher positions of softmax(y / tau) over the kept
    columns.  Averaging probabilities keeps the target normalized, so the loss is never negative and
    zero when the models agree.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient; may
            hold NaN where there is no chunk.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
        indices_VK, likelihoods_VK: the projection, -1 in unused slots; rows sum to 1 or 0.
        kept_K: (K,) int64 sorted teacher columns; None keeps all.
        teacher_average: "p", or "logp" for the un-normalized mean of log-probabilities that NeMo-RL
            uses (can be negative; kept for comparison with it).
        reverse: KL(r || target).
        entries: `projection_entries` of this projection and these kept columns, if many calls share
            them.
        chunks: `find_chunks` of the same ids, if known; then nothing here waits for the device.
        has_rest: the last column of the teacher's logits is no token, but all those whose logits
            are -inf, as one event (`tiles.TopKLogits`).  It is compared with all columns of which
            the chunk's rows keep nothing.  Not with teacher_average "logp".
    Returns:
        (sum, count): nats over chunks that have a position on both sides, and how many there are.
    Raises:
        ValueError: logits of more or fewer tokens than the tables, such as those of a padded head.
            (Of the teacher's tokens a projection knows the mapped ones alone: cut its logits.)
    """
    check_side("student", student_logits_BSV, student_chunk_BS=student_chunk_BS)
    check_side("teacher", teacher_logits_BTW, teacher_chunk_BT=teacher_chunk_BT)
    check_width("student", student_logits_BSV, len(indices_VK), "indices_VK")
    if entries is not None and kept_K is None:
        check_width("teacher", teacher_logits_BTW, entries.width + has_rest, "entries")
    if chunks is None:
        chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    with torch.no_grad():
        y_MW = _chunk_rows(teacher_logits_BTW.detach(), chunks.row_T, chunks.whole_T, temperature)
        if kept_K is not None and has_rest:
            columns_K = torch.cat([kept_K, kept_K.new_tensor([y_MW.shape[1] - 1])])
            log_target_CK = _projection_target(y_MW, chunks, columns_K, teacher_average)
        else:
            log_target_CK = _projection_target(y_MW, chunks, kept_K, teacher_average)
    if entries is None:
        entries = _entries_of_call(
            indices_VK, likelihoods_VK, student_logits_BSV, y_MW, kept_K, has_rest
        )
    kernels = compiled_kernels(student_logits_BSV, teacher_logits_BTW)
    if entries.weight_E.requires_grad:  # learned; the kernels know no derivative by them
        kernels = None
    r_CK = _projected_mass(
        student_logits_BSV, chunks, entries, kept_K, temperature, kernels
    )
    # EPSILON last: added before, it would be all that is left of r once the student has moved its
    # mass out of the kept columns, and leaving them would be an optimum
    r_CK = r_CK / (r_CK.sum(-1, keepdim=True) + EPSILON)
    if has_rest:
        log_r_CK, log_target_CK = _merge_empty_columns(r_CK, log_target_CK)
    else:
        log_r_CK = (r_CK + EPSILON).log()
    kl_C = _kl(log_r_CK, log_target_CK) if reverse else _kl(log_target_CK, log_r_CK)
    value_C = temperature**2 * kl_C
    shape_BS = student_chunk_BS.shape
    return reduce_terms(value_C, chunks.first_S, shape_BS, weight_BS, reduction)


def _entries_of_call(
    indices_VK: Tensor, likelihoods_VK: Tensor, student_logits_BSV: Tensor, y_MW: Tensor,
    kept_K: Tensor | None, has_rest: bool,
) -> "Entries":
    """Return the entries that one call of `projection_kl` needs on this rank."""
    return projection_entries(indices_VK, likelihoods_VK, y_MW.shape[1] - has_rest, kept_K)


def _projected_mass(
    student_logits_BSV: Tensor, chunks: Chunks, entries: "Entries", kept_K: Tensor | None,
    temperature: float, kernels: Any,
) -> Tensor:
    """Return the (C, K) mean mass of the student in the kept columns."""
    if kernels:
        r_NK: Tensor = _Projected.apply(  # type: ignore[no-untyped-call]
            at_least_float32(student_logits_BSV.flatten(0, 1)), chunks.row_S, kernels, entries,
            temperature,
        )
        return chunk_mean(r_NK, chunks.of_S, chunks.count_S)
    x_NV = _chunk_rows(student_logits_BSV, chunks.row_S, chunks.whole_S, temperature)
    r_NK = _project(x_NV.log_softmax(-1), entries, is_logp=True)
    return chunk_mean(r_NK, chunks.of_S, chunks.count_S)


def projection_in_place(
    student_NV: Tensor, teacher_MW: Tensor, labels_N: Tensor | None, chunks: Chunks, tables: Any,
    kept_K: Tensor | None, factors: tuple[float, float], weight_N: Tensor | None = None,
    temperature: float = 1.0, reverse: bool = False,
) -> SumAndCount | None:
    """Compute cross-entropy and `projection_kl`, and write the gradient over the student's logits.

    It takes three launches of gpu_chunks.py.

    Args:
        tables: `gpu_chunks.projection_tables` of the projection's entries in the kept columns.
        weight_N: weight of the terms that begin at each student row; None: 1.
        Others, Returns: see `divergence_in_place` and `projection_kl`.
    """
    check_side("student", student_NV, labels_N=labels_N, weight_N=weight_N)
    check_side("teacher", teacher_MW)
    kernels = chunk_kernels(student_NV, teacher_MW)
    if kernels is None:
        return None
    check_width("student", student_NV, len(tables.start_V) - 1, "the projection")
    if kept_K is None:
        check_width("teacher", teacher_MW, tables.width, "the projection")
    rows = _rows_of(kernels, chunks, student_NV)
    totals = kernels.row_totals(student_NV, teacher_MW, temperature, kept_K, tables.mass_V)
    cross_entropy = _cross_entropy_of(student_NV, totals.plain_log_total_N, labels_N)
    result = kernels.projected(
        student_NV, teacher_MW, rows, totals, tables, temperature, reverse, kept_K
    )
    factor_C = _chunk_factors(weight_N, chunks, temperature)
    kernels.projected_gradient_(
        student_NV, rows, totals, tables, result, factors[1] * factor_C, labels_N, temperature,
        factors[0],
    )
    return cross_entropy, (result.value_C * factor_C).sum()


def _projection_target(
    y_MW: Tensor, chunks: Chunks, kept_K: Tensor | None, teacher_average: str,
) -> Tensor:
    """Return the (C, K) log of the teacher's mean distribution over the kept columns."""
    if kept_K is None:
        logq_MK = y_MW.log_softmax(-1)
    else:
        logq_MK = y_MW.gather(1, kept_K.expand(len(y_MW), -1)).log_softmax(-1)
    if teacher_average == "logp":
        return chunk_mean(logq_MK, chunks.of_T, chunks.count_T)
    q_CK = chunk_mean(logq_MK.exp(), chunks.of_T, chunks.count_T)
    return q_CK.clamp(min=TINY_MASS).log()


def _merge_empty_columns(r_CK: Tensor, log_target_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the rest with all columns of which nothing is kept.

    Args:
        r_CK: (C, K) the student's mass; log_target_CK: (C, K + 1), the last column is the rest.
    Returns:
        (C, K + 1) logarithms of both models' masses, FLOOR in the columns that are merged.
    """
    is_empty_CK = log_target_CK <= math.log(2 * TINY_MASS)
    # with all tokens kept there is no event: an empty column then is one that does not come
    merged_CK = is_empty_CK[:, :-1] & ~is_empty_CK[:, -1:]
    rest_C1 = r_CK.masked_fill(~merged_CK, 0).sum(-1, keepdim=True)
    log_r_CK = torch.cat([(r_CK + EPSILON).log().masked_fill(merged_CK, FLOOR),
                          (rest_C1 + EPSILON).log()], 1)
    # nor is there one of no column: the student could give it nothing
    no_event_C1 = ~merged_CK.any(-1, keepdim=True)
    log_r_CK[:, -1:].masked_fill_(no_event_C1, FLOOR)
    merged_CK = torch.cat([merged_CK, no_event_C1], 1)
    return log_r_CK, log_target_CK.masked_fill(merged_CK, FLOOR).log_softmax(-1)


def reachable_tokens(indices_VK: Tensor, likelihoods_VK: Tensor, W: int) -> Tensor:
    """Return (W,) bool: the teacher tokens to which some student token maps with a weight above 0.

    The teacher's mass on other tokens is mass that no student can match: `projection_kl` charges
    EPSILON's 23 nats for it, whatever the student does.  Not to keep their columns makes the loss
    smaller, but asks the student to spell words by the teacher tokens that it can reach.

    Args:
        indices_VK, likelihoods_VK: the projection, -1 in unused slots.
        W: teacher tokens.
    """
    reachable_W = torch.zeros(W, dtype=torch.bool, device=indices_VK.device)
    reachable_W[indices_VK[(indices_VK >= 0) & (likelihoods_VK > 0)]] = True
    return reachable_W


class Entries(NamedTuple):
    """List the entries of a projection in the kept columns: W[row, column] = weight.

    row_E, column_E: (E,) int64, student token and number of the kept column.
    weight_E: (E,) float.
    width: kept columns.
    """

    row_E: Tensor
    column_E: Tensor
    weight_E: Tensor
    width: int


def projection_entries(
    indices_VK: Tensor, likelihoods_VK: Tensor, W: int, kept_K: Tensor | None = None
) -> Entries:
    """List the entries of a projection.

    Args:
        indices_VK, likelihoods_VK: the projection, -1 in unused slots.
        W: teacher tokens.
        kept_K: (K,) int64 sorted teacher columns; None keeps all.
    """
    if kept_K is None:
        kept_K = torch.arange(W, device=indices_VK.device)
    number_W = torch.full((W + 1,), -1, device=indices_VK.device)
    number_W[kept_K] = torch.arange(len(kept_K), device=indices_VK.device)
    column_VK = number_W[indices_VK]  # the index -1 of an unused slot reads the last number, -1
    row_E, slot_E = (column_VK >= 0).nonzero(as_tuple=True)
    return Entries(
        row_E=row_E,
        column_E=column_VK[row_E, slot_E],
        weight_E=likelihoods_VK[row_E, slot_E],
        width=len(kept_K),
    )


def _project(p_NV: Tensor, entries: Entries, is_logp: bool = False) -> Tensor:
    """Return (N, K) p @ W, of p or of log p; reads only columns that have an entry."""
    mass_NE = take_columns(p_NV, entries.row_E)
    if is_logp:
        mass_NE = mass_NE.exp()
    mass_NE = mass_NE * entries.weight_E.to(mass_NE)
    return column_sums(mass_NE, entries.column_E, entries.width)


# --- two vocabularies: pieces --------------------------------------------------------------------


class Spelling(NamedTuple):
    """Tell how two vocabularies spell each other (projection_tools.spell builds it).

    event_V, event_W: (V,), (W,) int32 or int64, event of each token, -1 for tokens without one.
    num_events: number of events.
    pieces_W: (W, P) int64, A[w]: the student's tokens for the bytes of teacher token w, then
        -1.
    order_W, low_W, high_W: the teacher tokens whose A begins with the same k tokens as A[w] are
        ``order_W[low_W[w, k]:high_W[w, k]]``; (W,), (W, P), (W, P) int64.
    pieces_V, order_V, low_V, high_V: the mirror image, B[v]: the teacher's tokens for student
        token v.
    """

    event_V: Tensor
    event_W: Tensor
    num_events: int
    pieces_W: Tensor
    order_W: Tensor
    low_W: Tensor
    high_W: Tensor
    pieces_V: Tensor
    order_V: Tensor
    low_V: Tensor
    high_V: Tensor


class Ranges(NamedTuple):
    """Positions inside chunks in which the coarse side has one token and the fine side several.

    The fine side is at `fine_row`, k >= 1 tokens into the coarse token.

    fine_row, coarse_row: (N,) int64, row of the fine side, row of the coarse side's first position.
    low, high: (N,) int64, range (see Spelling) of the coarse tokens that begin with the k
        fine tokens.
    level: (N,) int64, k.
    entries: sum of high - low.
    """

    fine_row: Tensor
    coarse_row: Tensor
    low: Tensor
    high: Tensor
    level: Tensor
    entries: int


class EventTerms(NamedTuple):
    """All terms of `event_kl` in a batch, known from ids alone, before any forward.

    start_S, start_T: (C,) rows that predict the first token of a chunk on either side.
    inside_teacher: chunks of one teacher token, positions after the first student token.
    inside_student: chunks of one student token, positions after the first teacher token.
    many_S, many_T: (M, 2) int64 (row, chunk): all rows of the chunks with several tokens on
        both sides.
    count_many: how many such chunks.
    count_all: () int64, student positions (and n:m remainders) that the terms cover; their sum is
        the loss.
    """

    start_S: Tensor
    start_T: Tensor
    inside_teacher: Ranges
    inside_student: Ranges
    many_S: Tensor
    many_T: Tensor
    count_many: int
    count_all: Tensor


def event_terms(
    student_next_BS: Tensor, teacher_next_BT: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, spelling: Spelling,
) -> EventTerms:
    """List the terms of `event_kl`; meant for the CPU, where the ids come from.

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts; anything
            where there is no chunk.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
    """
    check_positions("student_chunk_BS has", student_chunk_BS.shape, student_next_BS=student_next_BS)
    check_positions("teacher_chunk_BT has", teacher_chunk_BT.shape, teacher_next_BT=teacher_next_BT)
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    student_next = student_next_BS.reshape(-1)
    teacher_next = teacher_next_BT.reshape(-1)
    one_teacher_token = (chunks.count_T == 1) & (chunks.count_S > 1)
    inside_teacher = _inside_ranges(
        student_next,
        teacher_next,
        chunks.first_S[one_teacher_token],
        chunks.first_T[one_teacher_token],
        chunks.count_S[one_teacher_token],
        spelling.pieces_W,
        spelling.low_W,
        spelling.high_W,
    )
    one_student_token = (chunks.count_S == 1) & (chunks.count_T > 1)
    inside_student = _inside_ranges(
        teacher_next,
        student_next,
        chunks.first_T[one_student_token],
        chunks.first_S[one_student_token],
        chunks.count_T[one_student_token],
        spelling.pieces_V,
        spelling.low_V,
        spelling.high_V,
    )
    is_many = (chunks.count_S > 1) & (chunks.count_T > 1)
    count_many = int(is_many.sum())
    number = torch.where(is_many, is_many.cumsum(0) - 1, -1)
    count_all = len(chunks.first_S) + len(inside_teacher.low) + count_many
    return EventTerms(
        start_S=chunks.first_S,
        start_T=chunks.first_T,
        inside_teacher=inside_teacher,
        inside_student=inside_student,
        many_S=torch.stack([chunks.row_S, number[chunks.of_S]], 1)[is_many[chunks.of_S]],
        many_T=torch.stack([chunks.row_T, number[chunks.of_T]], 1)[is_many[chunks.of_T]],
        count_many=count_many,
        count_all=torch.tensor(count_all, device=number.device),
    )


def _inside_ranges(
    fine_next: Tensor, coarse_next: Tensor, fine_first: Tensor, coarse_first: Tensor,
    fine_count: Tensor, pieces: Tensor, low: Tensor, high: Tensor,
) -> Ranges:
    """List positions k >= 1 of chunks with one coarse token, as far as the text spells it so.

    Args:
        fine_next, coarse_next: tokens that all rows of either side predict.
        fine_first, coarse_first: rows that predict the first token of these chunks.
        fine_count: tokens of these chunks on the fine side.
        pieces, low, high: tables of the coarse tokens, see Spelling.
    """
    max_pieces = pieces.shape[1]
    k = torch.arange(max_pieces, device=pieces.device)
    coarse_token = coarse_next[coarse_first] if len(coarse_first) else coarse_first
    last_row = max(fine_next.numel() - 1, 0)  # rows beyond the chunk are read, and then masked
    realized = fine_next[(fine_first[:, None] + k).clamp(max=last_row)]
    matches = (realized == pieces[coarse_token]) & (k < fine_count[:, None])
    # the k-th token must match too: in context a tokenizer may spell a token otherwise than alone
    chunk, offset = (matches.cumprod(1)[:, 1:] > 0).nonzero(as_tuple=True)
    level = offset + 1
    token = coarse_token[chunk]
    range_low = low[token, level]
    range_high = high[token, level]
    return Ranges(
        fine_row=fine_first[chunk] + level,
        coarse_row=coarse_first[chunk],
        low=range_low,
        high=range_high,
        level=level,
        entries=int((range_high - range_low).sum()),
    )


def event_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor,
    teacher_next_BT: Tensor, terms: EventTerms, spelling: Spelling, temperature: float = 1.0,
    weight_BS: Tensor | None = None, reduction: str = "sum",
) -> SumAndCount:
    """Compute KL(teacher || student) on events that both vocabularies can express.

    Needs no projection.  With p the student's distribution, q the teacher's, A[w] the student's
    spelling of teacher token w and B[v] the teacher's of student token v, the sum, times tau^2, of
      1. at the start of every chunk: KL over events, the connected components of w -- A[w][0],
         v -- B[v][0];
      2. inside one teacher token, after k student tokens: KL(T_k || p_k), where T_k(v) is the
         teacher's mass, normalized, on tokens w whose spelling begins with the k tokens seen and
         goes on with v;
      3. inside one student token, after k teacher tokens: KL(q_k || S_k), where S_k(w) is the
         student's mass, normalized, on tokens v whose spelling begins with the k tokens seen and
         goes on with w, and q_k is restricted to the w that occur;
      4. in chunks of several tokens on both sides: KL between the chunk's two probabilities, each
         by the chain rule.
    What is compared is softened: the masses that either side of a KL is made of, at temperature 1,
    to the power 1 / tau, and normalized again.  (A softmax of logits / tau is that of tokens.)
    Every term is >= 0; equal tokenizers give the forward KL exactly.  T_k knows that the teacher's
    token goes on, and the start of the next chunk knows that it stopped: over the data the two
    average to the teacher's belief.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient; may
            hold NaN where there is no chunk.
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        terms: from `event_terms` of the same batch.
    Returns:
        (sum, count): nats, and the student positions covered.  The terms inside a student token
        weigh as the token does, and are not counted.
    Raises:
        ValueError: logits of more or fewer tokens than the spellings.
    """
    check_side("student", student_logits_BSV, student_next_BS=student_next_BS)
    check_side("teacher", teacher_logits_BTW, teacher_next_BT=teacher_next_BT)
    check_width("student", student_logits_BSV, len(spelling.event_V), "event_V")
    check_width("teacher", teacher_logits_BTW, len(spelling.event_W), "event_W")
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = teacher_logits_BTW.detach().flatten(0, 1)
    if x_NV.device.type == "cpu":  # once; elsewhere the rows that each term needs, later
        x_NV = at_least_float32(x_NV)
    values = [_start_kl(x_NV, y_MW, terms, spelling, temperature)]
    rows = [terms.start_S]
    # select what the other terms need of x at once: each selection has a gradient as large as x
    row_many = terms.many_S[:, 0]
    needed = (terms.inside_teacher.fine_row, terms.inside_student.coarse_row, row_many)
    sizes = [len(row_N) for row_N in needed]
    x_needed = take_rows(x_NV, torch.cat(needed))
    x_inside_teacher, x_inside_student, x_many = torch.split(x_needed, sizes)
    if len(terms.inside_teacher.low):
        y_inside_teacher = y_MW.index_select(0, terms.inside_teacher.coarse_row)
        inside_N = _inside_teacher_kl(
            x_inside_teacher, y_inside_teacher, terms.inside_teacher, spelling, temperature
        )
        values.append(inside_N)
        rows.append(terms.inside_teacher.fine_row)
    if terms.count_many:
        next_M = student_next_BS.reshape(-1)[row_many]
        values.append(_many_kl(x_many, y_MW, next_M, teacher_next_BT, terms, temperature))
        rows.append(_second_rows(terms.many_S, terms.count_many))
    value_N = torch.cat(values)
    row_N = torch.cat(rows)
    if len(terms.inside_student.low):
        y_inside_student = y_MW.index_select(0, terms.inside_student.fine_row)
        inside_N = _inside_student_kl(
            x_inside_student, y_inside_student, terms.inside_student, spelling, temperature
        )
        # they belong to the one student token, whose term is that of the chunk's start
        start_number = torch.zeros(x_NV.shape[0], dtype=torch.long, device=x_NV.device)
        start_number[terms.start_S] = torch.arange(len(terms.start_S), device=x_NV.device)
        term_N = start_number[terms.inside_student.coarse_row]
        value_N = value_N + row_sums(inside_N, term_N, len(value_N))
    order = row_N.argsort()  # reading order
    value_N = temperature**2 * value_N[order]
    return reduce_terms(value_N, row_N[order], student_next_BS.shape, weight_BS, reduction)


def event_in_place(
    student_NV: Tensor, teacher_MW: Tensor, labels_N: Tensor | None, next_S: Tensor,
    next_T: Tensor, terms: EventTerms, spelling: Spelling, cells: Any,
    factors: tuple[float, float], weight_N: Tensor | None = None,
) -> SumAndCount | None:
    """Compute cross-entropy and `event_kl`, and write the gradient over the student's logits.

    The temperature is 1.

    The starts of chunks take three launches of gpu_kernels.py; the other terms read single logits
    and the logsumexp of their rows, and autograd knows these alone.

    Args:
        next_S, next_T: int64, the token that each position predicts.
        cells: `gpu_kernels.cell_tables` of the events.
        weight_N: weight of the terms that begin at each student row; None: 1.
        Others, Returns, Raises: see `divergence_in_place` and `event_kl`.
    """
    check_side("student", student_NV, labels_N=labels_N, next_S=next_S, weight_N=weight_N)
    check_side("teacher", teacher_MW, next_T=next_T)
    check_width("student", student_NV, len(spelling.event_V), "event_V")
    check_width("teacher", teacher_MW, len(spelling.event_W), "event_W")
    kernels = triton_kernels(student_NV, teacher_MW)
    if kernels is None:
        return None
    root_N = numbers_of_rows(terms.start_S, len(student_NV))
    root_M = numbers_of_rows(terms.start_T, len(teacher_MW))
    totals, teacher_totals = kernels.cell_totals(
        student_NV, root_N, teacher_MW, root_M, cells, 1.0
    )
    cross_entropy = _cross_entropy_of(student_NV, totals.plain_log_total_N, labels_N)
    value_C, slope_CE = kernels.compare_cells(
        student_NV, teacher_MW, terms.start_S, terms.start_T, totals, teacher_totals, cells,
        1.0, SHIFT,
    )
    reads = _event_reads(terms, spelling, next_S)
    x_E = at_least_float32(student_NV[reads.row_E, reads.token_E]).requires_grad_()
    rest_L = totals.log_total_N[reads.row_L].requires_grad_()
    scale_N = torch.ones_like(totals.log_total_N)
    if weight_N is not None:
        scale_N *= weight_N
    with torch.enable_grad():
        values = _compare_other_events(
            reads, x_E, rest_L, teacher_MW, teacher_totals.log_total_N, next_T, terms
        )
        others = (torch.cat(values) * scale_N[_rows_of_other_events(terms)]).sum()
        # the empty sums keep the graph whole where there are starts alone
        others = others + x_E[:0].sum() + rest_L[:0].sum()
        d_E, d_L = torch.autograd.grad(factors[1] * others, [x_E, rest_L])
    scale_C = scale_N[terms.start_S]
    factor_N = torch.zeros_like(scale_N).index_copy_(0, terms.start_S, factors[1] * scale_C)
    rest_factor_N = torch.zeros_like(scale_N).index_copy_(0, reads.row_L, d_L)
    kernels.cells_gradient_(
        student_NV, root_N, totals, slope_CE, factor_N, rest_factor_N, labels_N, cells,
        1.0, SHIFT, factors[0],
    )
    place_E = reads.row_E, reads.token_E
    student_NV.index_put_(place_E, d_E.to(student_NV), accumulate=True)  # in a fixed order
    return cross_entropy, (value_C * scale_C).sum() + others.detach()


class _EventReads(NamedTuple):
    """List what the terms of `event_kl` but those of the starts read of the student's logits.

    row_E, token_E: single logits: of the groups inside of teacher tokens, of the tokens inside of
        student tokens, and of the next tokens in chunks of several.
    row_L: rows of which they need the logsumexp: inside of teacher tokens, and of those chunks.
    in_teacher, in_student: _Continuations.
    """

    row_E: Tensor
    token_E: Tensor
    row_L: Tensor
    in_teacher: "_Continuations"
    in_student: "_Continuations"


def _event_reads(terms: EventTerms, spelling: Spelling, next_S: Tensor) -> _EventReads:
    in_teacher = _continuations(terms.inside_teacher, spelling.order_W, spelling.pieces_W)
    in_student = _continuations(terms.inside_student, spelling.order_V, spelling.pieces_V)
    row_many = terms.many_S[:, 0]
    fine_row = terms.inside_teacher.fine_row
    coarse_row_E = terms.inside_student.coarse_row[in_student.term_E]
    return _EventReads(
        row_E=torch.cat([_rows_of_groups(fine_row, in_teacher), coarse_row_E, row_many]),
        token_E=torch.cat([in_teacher.next_G, in_student.token_E, next_S[row_many]]),
        row_L=torch.cat([fine_row, row_many]),
        in_teacher=in_teacher,
        in_student=in_student,
    )


def _compare_other_events(
    reads: _EventReads, x_E: Tensor, rest_L: Tensor, y_MW: Tensor, log_total_M: Tensor,
    next_T: Tensor, terms: EventTerms,
) -> list[Tensor]:
    """Return the terms inside of teacher tokens, inside of student tokens, and of several tokens.

    Args:
        x_E, rest_L: logits and logsumexp that `reads` lists.
        log_total_M: logsumexp of the teacher's logits.
    """
    in_teacher, in_student = reads.in_teacher, reads.in_student
    num_many = len(terms.many_S)
    sizes = [len(in_teacher.term_G), len(in_student.term_E), num_many]
    x_teacher, x_student, x_many = torch.split(x_E, sizes)
    num_inside = len(terms.inside_teacher.level)
    rest_inside, rest_many = torch.split(rest_L, [num_inside, num_many])

    logp_G = (x_teacher - _rows_of_groups(rest_inside, in_teacher)).clamp(min=FLOOR)
    ranges = terms.inside_teacher
    logq_G = _group_logp(_coarse_logits(y_MW, ranges, in_teacher), ranges, in_teacher)
    inside_teacher_N = _compare_groups(logp_G, logq_G, in_teacher, num_inside)

    ranges = terms.inside_student
    logp_G = _group_logp(x_student, ranges, in_student)
    logits_G = y_MW[_rows_of_groups(ranges.fine_row, in_student), in_student.next_G]
    logq_G = _normalized(at_least_float32(logits_G), in_student, len(ranges.level))
    inside_student_N = _compare_groups(logp_G, logq_G, in_student, len(ranges.level))

    row_T, chunk_T = terms.many_T.unbind(1)
    logp_C = row_sums((x_many - rest_many).clamp(min=FLOOR), terms.many_S[:, 1], terms.count_many)
    logq_T = at_least_float32(y_MW[row_T, next_T[row_T]]) - log_total_M[row_T]
    logq_C = row_sums(logq_T.clamp(min=FLOOR), chunk_T, terms.count_many)
    return [inside_teacher_N, inside_student_N, bernoulli_kl(logq_C, logp_C)]


def _rows_of_other_events(terms: EventTerms) -> Tensor:
    """Return the student rows where the terms of `_compare_other_events` begin."""
    return torch.cat([
        terms.inside_teacher.fine_row,
        terms.inside_student.coarse_row,
        _second_rows(terms.many_S, terms.count_many),
    ])


def _start_kl(
    x_NV: Tensor, y_MW: Tensor, terms: EventTerms, spelling: Spelling, temperature: float,
) -> Tensor:
    """Return the (C,) KL over events at the start of every chunk."""
    row_S = terms.start_S
    row_T = terms.start_T
    value_C: Tensor = _WithDerivative.apply(  # type: ignore[no-untyped-call]
        at_least_float32(x_NV), row_S, _kl_over_events,
        row_S, at_least_float32(y_MW), row_T, spelling, temperature,
    )
    return value_C


def _many_kl(
    x_MV: Tensor, y_NW: Tensor, student_next_M: Tensor, teacher_next_BT: Tensor, terms: EventTerms,
    temperature: float,
) -> Tensor:
    """Return the KL between two Bernoulli variables, "the text goes on so", of each n:m chunk.

    Args:
        x_MV, student_next_M: logits and next tokens of the rows of `terms.many_S` alone.
        y_NW, teacher_next_BT: those of all rows.
    """
    every_row = torch.arange(len(x_MV), device=x_MV.device)
    logp_C = chunk_logp(
        x_MV, student_next_M, every_row, terms.many_S[:, 1], terms.count_many, 1.0
    )
    logq_C = chunk_logp(
        y_NW, teacher_next_BT, terms.many_T[:, 0], terms.many_T[:, 1], terms.count_many, 1.0
    )
    return bernoulli_kl(
        soften_bernoulli(logq_C, temperature), soften_bernoulli(logp_C, temperature)
    )


def _second_rows(row_and_chunk_N2: Tensor, num_chunks: int) -> Tensor:
    """Return the (num_chunks,) second row of each chunk; the first has the term of the start."""
    row_N, chunk_N = row_and_chunk_N2.unbind(1)
    first_C = row_N.new_full((num_chunks,), torch.iinfo(torch.int64).max)
    return first_C.scatter_reduce(0, chunk_N, row_N, "amin") + 1


def event_coverage(
    teacher_logits_BTW: Tensor, terms: EventTerms, spelling: Spelling
) -> dict[str, SumAndCount]:
    """Measure what the terms of `event_kl` cover, each as (sum, count).

    event_coverage: teacher probability, at the starts of chunks, of tokens that belong to an event;
    prefix_coverage: teacher probability, inside teacher tokens, of the tokens that T_k is made of;
    one_to_one, inside_teacher, inside_student, many: chunks of that shape, of all chunks (1:1; one
    teacher and several student tokens; one student and several teacher tokens; several on both
    sides).
    """
    check_side("teacher", teacher_logits_BTW)
    check_width("teacher", teacher_logits_BTW, len(spelling.event_W), "event_W")
    with torch.no_grad():
        y_NW = teacher_logits_BTW.detach().flatten(0, 1)
        ranges = terms.inside_teacher
        q_CW = _select_rows(y_NW, terms.start_T, 1.0).softmax(-1)
        event_mass = q_CW[:, spelling.event_W >= 0].sum()
        prefix_mass = y_NW.new_zeros((), dtype=q_CW.dtype)
        if len(ranges.low):
            term_E, offset_E = _expand_ranges(ranges)
            token_E = spelling.order_W[offset_E]
            goes_on = spelling.pieces_W[token_E, ranges.level[term_E]] >= 0
            q_NW = _select_rows(y_NW, ranges.coarse_row, 1.0).softmax(-1)
            prefix_mass = torch.where(goes_on, q_NW[term_E, token_E], 0.0).sum()
        num_chunks = torch.tensor(len(terms.start_S), device=y_NW.device)
        num_ranges = torch.tensor(len(ranges.low), device=y_NW.device)
        # every chunk of these shapes has one position of level 1
        num_inside_teacher = (ranges.level == 1).sum()
        num_inside_student = (terms.inside_student.level == 1).sum()
        num_many = torch.tensor(terms.count_many, device=y_NW.device)
        num_one_to_one = num_chunks - num_inside_teacher - num_inside_student - num_many
        return {
            "event_coverage": (event_mass, num_chunks),
            "prefix_coverage": (prefix_mass, num_ranges),
            "inside_teacher": (num_inside_teacher, num_chunks),
            "inside_student": (num_inside_student, num_chunks),
            "many": (num_many, num_chunks),
            "one_to_one": (num_one_to_one, num_chunks),
        }


def _kl_over_events(
    x_NV: Tensor, row_C: Tensor, y_MW: Tensor, teacher_row_C: Tensor, spelling: Spelling,
    temperature: float,
) -> ValueAndDerivative:
    """Return ((C,) KL(q || p) over events where a chunk begins, its derivative by x).

    Tokens without an event are left out before the softmax.  The derivative is written by hand, for
    this is where the time goes: the plain form has three times as many passes over [C, V].  With m
    the mass of an event before it is divided by Z, dKL / dx_v = p_v - q_e exp(x_v) / m_e.
    """
    num_events = spelling.num_events
    kernels = compiled_kernels(x_NV, y_MW)
    if kernels and temperature == 1:
        result: ValueAndDerivative = kernels.event_kl(
            x_NV, row_C, y_MW, teacher_row_C, spelling.event_V, spelling.event_W, num_events, SHIFT
        )
        return result
    # one event more collects the tokens that have none
    event_V = torch.where(spelling.event_V < 0, num_events, spelling.event_V)
    event_W = torch.where(spelling.event_W < 0, num_events, spelling.event_W)
    p_CV, mass_CE, p_Z = _event_mass(x_NV, row_C, event_V, num_events, SHIFT)
    _, q_CE, q_Z = _event_mass(y_MW, teacher_row_C, event_W, num_events, 0)
    if temperature != 1:
        logp_CE = softened(mass_CE.log(), LOG_ZERO - SHIFT, temperature)
        logq_CE = softened(q_CE.log(), LOG_ZERO, temperature)
        factor_CE = (logp_CE.exp() - logq_CE.exp()) / (mass_CE * temperature)
        factor_CE.masked_fill_(logp_CE == LOG_ZERO - SHIFT, 0)
        d_CV = factor_CE.to(p_CV.dtype).index_select(1, event_V).mul_(p_CV)
        value_C = _kl(logq_CE, logp_CE).to(d_CV.dtype)
        return value_C, torch.zeros_like(x_NV).index_copy_(0, row_C, d_CV)
    # in the precision of the wider side
    ratio_CE = _clamp_ratio_(torch.div(q_CE, mass_CE), mass_CE.dtype)
    log_ratio_CE = ratio_CE.log().add_(p_Z.log() - q_Z.log())
    value_C = log_ratio_CE.mul_(q_CE).sum(-1).div_(q_Z.squeeze(1))
    del mass_CE, q_CE, log_ratio_CE  # [C, E] each: let the next lines have their memory
    factor_CE = (1 / p_Z - ratio_CE / q_Z).to(p_CV.dtype)
    factor_CE[:, -1] = 0
    d_CV = factor_CE.index_select(1, event_V).mul_(p_CV)
    return value_C.to(d_CV.dtype), torch.zeros_like(x_NV).index_copy_(0, row_C, d_CV)


def _event_mass(
    logits_NX: Tensor, row_C: Tensor, event_X: Tensor, num_events: int, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (exp(logits + shift - the largest), its sums over events, their sum).

    Tokens of event `num_events` have no event; they count as 0.  A sum over nothing is the smallest
    normal number.
    """
    p_CX = logits_NX.index_select(0, row_C)
    # before the largest is sought: where tokens without an event hold almost all of the mass, the
    # others would fall below float32's smallest number
    p_CX.masked_fill_(event_X == num_events, -torch.inf)
    smallest = torch.finfo(p_CX.dtype).min  # a row of -inf alone: -inf - -inf would be NaN
    p_CX.sub_(p_CX.amax(-1, keepdim=True).clamp(min=smallest) - shift).exp_()
    tiny = torch.finfo(p_CX.dtype).tiny
    mass_CE = column_sums(p_CX, event_X, num_events + 1).add_(tiny)
    mass_CE[:, -1] = tiny
    return p_CX, mass_CE, mass_CE.sum(-1, keepdim=True)


def _clamp_ratio_(ratio: Tensor, dtype: torch.dtype) -> Tensor:
    """Keep a ratio above 0, so its logarithm is finite, and leave room for a factor above it."""
    limits = torch.finfo(dtype)
    return ratio.clamp_(limits.tiny, limits.max**0.9)


class _Continuations(NamedTuple):
    """The coarse tokens in all ranges (E entries), grouped by the fine token that they go on with.

    There are as many groups as entries, so that no size is read back from the device.  Groups
    without an entry have term N.

    term_E, token_E, group_E: (E,) range, coarse token, group.
    goes_on_E: (E,) bool, False for a token that ends here.
    term_G, next_G: (E,) range, sorted, and fine token of each group.
    goes_on_G: (E,) bool, False for groups without an entry and of tokens that end.
    """

    term_E: Tensor
    token_E: Tensor
    group_E: Tensor
    goes_on_E: Tensor
    term_G: Tensor
    next_G: Tensor
    goes_on_G: Tensor


def _continuations(ranges: Ranges, order: Tensor, pieces: Tensor) -> _Continuations:
    num_ranges = len(ranges.level)
    term_E, offset_E = _expand_ranges(ranges)
    token_E = order[offset_E]
    next_E = pieces[token_E, ranges.level[term_E]]
    goes_on_E = next_E >= 0
    # a range is sorted, so equal (term, next) are neighbors
    is_new = torch.ones_like(goes_on_E)
    is_new[1:] = (term_E[1:] != term_E[:-1]) | (next_E[1:] != next_E[:-1])
    group_E = is_new.cumsum(0) - 1
    no_term = torch.full_like(term_E, num_ranges)
    return _Continuations(
        term_E=term_E,
        token_E=token_E,
        group_E=group_E,
        goes_on_E=goes_on_E,
        term_G=no_term.scatter(0, group_E, term_E),
        next_G=torch.zeros_like(token_E).scatter(0, group_E, next_E.clamp(min=0)),
        goes_on_G=torch.zeros_like(goes_on_E).scatter(0, group_E, goes_on_E),
    )


def _expand_ranges(ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return (term, offset into the sorted tokens) of every entry of every range, in order."""
    sizes = ranges.high - ranges.low
    term = torch.arange(len(sizes), device=sizes.device)
    term_E = torch.repeat_interleave(term, sizes, output_size=ranges.entries)
    begin = sizes.cumsum(0) - sizes
    entry_E = torch.arange(len(term_E), device=sizes.device)
    return term_E, ranges.low[term_E] + entry_E - begin[term_E]


def _group_logp(
    logits_E: Tensor, ranges: Ranges, to: _Continuations, temperature: float = 1.0
) -> Tensor:
    """Return the coarse side's (E,) log-probability of each group among those of its range.

    Args:
        logits_E: its logits at the coarse rows of to.term_E and to.token_E.
        temperature: softens the groups.
    """
    num_ranges = len(ranges.level)
    logits_E = torch.where(to.goes_on_E, logits_E, -torch.inf)
    logits_G = _segment_logsumexp(logits_E, to.group_E, ranges.entries)
    return _normalized(_soften(logits_G, temperature), to, num_ranges)


def _coarse_logits(coarse_NX: Tensor, ranges: Ranges, to: _Continuations) -> Tensor:
    """Return (E,) logits, as `_group_logp` reads them."""
    return at_least_float32(coarse_NX[ranges.coarse_row[to.term_E], to.token_E])


def _compare_groups(logp_G: Tensor, logq_G: Tensor, to: _Continuations, num: int) -> Tensor:
    """Return the (num,) KL(q || p) of all ranges."""
    kl_G = _kl(logq_G[:, None], logp_G[:, None])
    return row_sums(kl_G, to.term_G, num + 1)[:num]


def _rows_of_groups(row_N: Tensor, to: _Continuations) -> Tensor:
    """Return (E,) the row of each group's range; groups without an entry have row 0."""
    return torch.cat([row_N, row_N.new_zeros(1)])[to.term_G]


def _normalized(logits_G: Tensor, to: _Continuations, num_ranges: int) -> Tensor:
    """Return (E,) log-probabilities of the groups, -inf of those that do not go on."""
    logits_G = torch.where(to.goes_on_G, logits_G, -torch.inf)
    total_N = _segment_logsumexp(logits_G, to.term_G, num_ranges + 1)
    return logits_G - total_N[to.term_G]


def _segment_logsumexp(x_N: Tensor, segment_N: Tensor, num: int) -> Tensor:
    """Return the (num,) logsumexp of the entries of each segment; segment_N is sorted."""
    largest = x_N.new_full((num,), -torch.inf)
    largest = largest.scatter_reduce(0, segment_N, x_N.detach(), "amax")
    largest = torch.where(largest.isfinite(), largest, 0.0)
    mass = row_sums((x_N - largest[segment_N]).exp(), segment_N, num)
    # an entry that is the largest has mass 1, so only an empty segment is raised here
    return mass.clamp(min=torch.finfo(mass.dtype).tiny).log() + largest


def _own_rows(ranges: Ranges) -> Ranges:
    """Return the ranges for logits that hold one row per range, in order."""
    row = torch.arange(len(ranges.level), device=ranges.level.device)
    return Ranges(row, row, ranges.low, ranges.high, ranges.level, ranges.entries)


def _inside_teacher_kl(
    x_NV: Tensor, y_NW: Tensor, ranges: Ranges, spelling: Spelling, temperature: float,
) -> Tensor:
    """Return the (N,) KL(T_k || p_k) inside teacher tokens; both sides have a row per range."""
    ranges = _own_rows(ranges)
    num_local = len(ranges.level)
    to = _continuations(ranges, spelling.order_W, spelling.pieces_W)
    logp_NV = _select_rows(x_NV, ranges.fine_row, temperature).log_softmax(-1)
    # groups without an entry read the last row; their result lands in term N, which is cut off
    logp_G = logp_NV[to.term_G.clamp(max=num_local - 1), to.next_G].clamp(min=FLOOR)
    logq_G = _group_logp(_coarse_logits(y_NW, ranges, to), ranges, to, temperature)
    return _compare_groups(logp_G, logq_G, to, num_local)


def _inside_student_kl(
    x_NV: Tensor, y_NW: Tensor, ranges: Ranges, spelling: Spelling, temperature: float,
) -> Tensor:
    """Return the (N,) KL(q_k || S_k) inside student tokens; both sides have a row per range."""
    ranges = _own_rows(ranges)
    num_local = len(ranges.level)
    to = _continuations(ranges, spelling.order_V, spelling.pieces_V)
    logp_G = _group_logp(_coarse_logits(x_NV, ranges, to), ranges, to, temperature)
    row_G = _rows_of_groups(ranges.fine_row, to)
    logq_G = _normalized(_soften(y_NW[row_G, to.next_G], temperature), to, num_local)
    return _compare_groups(logp_G, logq_G, to, num_local)


# --- two vocabularies: common tokens, sorted probabilities, the chunks' own bytes ----------------


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
        raise ValueError(
            "the projection has no common token: no row of one slot with weight 1 (-1 marks unused "
            "slots); build it with projection_tools.build"
        )
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
    teacher_chunk_BT: Tensor, common_V: Tensor, common_W: Tensor, temperature: float = 1.0,
    uncommon_topk: int = 8192, average: str = "p", reverse: bool = False,
    weight_BS: Tensor | None = None, reduction: str = "sum",
    chunks: Chunks | None = None, rest: tuple[Tensor, Tensor] | None = None,
) -> SumAndCount:
    """Compute the KL on common tokens plus the distance of the sorted probabilities of the rest.

    Per chunk, with p and q the means of its positions' distributions: tau^2 (KL(q || p) over the
    common tokens and one bucket for all others + sum |sorted p - sorted q| over the others).  With
    `common_tokens(..., relaxed=True)` this is `h_kl`.

    Args:
        common_V, common_W: (N,) int64, from `common_tokens`.
        uncommon_topk: how many of the others are compared, the largest; at most as many as either
            side has.
        average: "p", or "logp" for the reference (NeMo-RL's gold): means of log-probabilities, not
            renormalized, no bucket; can be negative.
        reverse: KL(p || q).
        rest: `other_tokens` of common_V and of common_W; None: computed in every call.
    Others and Returns: see `projection_kl`.
    """
    check_side("student", student_logits_BSV, student_chunk_BS=student_chunk_BS)
    check_side("teacher", teacher_logits_BTW, teacher_chunk_BT=teacher_chunk_BT)
    if chunks is None:
        chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    common = TokenIds(common_V, common_W)
    if rest is not None:
        num_student_tokens = len(common_V) + len(rest[0])
        num_teacher_tokens = len(common_W) + len(rest[1])
        check_width("student", student_logits_BSV, num_student_tokens, "rest")
        check_width("teacher", teacher_logits_BTW, num_teacher_tokens, "rest")
    else:
        num_student_tokens = student_logits_BSV.shape[-1]
        num_teacher_tokens = teacher_logits_BTW.shape[-1]
        rest = (
            other_tokens(common_V, num_student_tokens),
            other_tokens(common_W, num_teacher_tokens),
        )
    others = TokenIds(*rest)
    num_compared = min(uncommon_topk, len(others.student), len(others.teacher))
    # KL(q || p) needs the tokens to which p gives almost nothing, so p is scaled up
    shift = 0.0 if reverse or average == "logp" else SHIFT / max(temperature, 1)
    kernels = None
    if average == "p":
        kernels = compiled_kernels(student_logits_BSV, teacher_logits_BTW)
    if kernels:
        student, teacher = _mean_rows(student_logits_BSV, teacher_logits_BTW.detach(), chunks)
        value_C: Tensor = _MixtureDistance.apply(  # type: ignore[no-untyped-call]
            *student, kernels, teacher,
            common, others, num_compared, temperature, reverse, shift,
        )
    else:
        x = _chunk_rows(student_logits_BSV, chunks.row_S, chunks.whole_S, temperature)
        y = _chunk_rows(teacher_logits_BTW.detach(), chunks.row_T, chunks.whole_T, temperature)
        p_NV = _scaled_softmax(x, average, shift)
        p_CV = chunk_mean(p_NV, chunks.of_S, chunks.count_S)
        q_NW = _scaled_softmax(y, average, 0.0)
        q_CW = chunk_mean(q_NW, chunks.of_T, chunks.count_T)
        if average == "logp":
            value_C = _gold_of_mean_logp(p_CV, q_CW, common, others, num_compared, reverse)
        else:
            value_C = _WithDerivative.apply(  # type: ignore[no-untyped-call]
                p_CV, None, _common_and_rest,
                q_CW, common, others, num_compared, reverse, shift,
            )
    value_C = temperature**2 * value_C
    shape_BS = student_chunk_BS.shape
    return reduce_terms(value_C, chunks.first_S, shape_BS, weight_BS, reduction)


def gold_in_place(
    student_NV: Tensor, teacher_MW: Tensor, labels_N: Tensor | None, chunks: Chunks,
    common: TokenIds, others: TokenIds, factors: tuple[float, float],
    weight_N: Tensor | None = None, temperature: float = 1.0, uncommon_topk: int = 8192,
    reverse: bool = False,
) -> SumAndCount | None:
    """Compute cross-entropy and `gold`, and write the gradient over the student's logits.

    The common tokens take three launches of gpu_chunks.py; torch sorts the others.

    Args:
        common, others: as `gold` gets them: common_V, common_W; rest.
        weight_N: weight of the terms that begin at each student row; None: 1.
        Others, Returns: see `divergence_in_place` and `gold`.
    """
    check_side("student", student_NV, labels_N=labels_N, weight_N=weight_N)
    check_side("teacher", teacher_MW)
    kernels = chunk_kernels(student_NV, teacher_MW)
    if kernels is None:
        return None
    check_width("student", student_NV, len(common.student) + len(others.student), "rest")
    check_width("teacher", teacher_MW, len(common.teacher) + len(others.teacher), "rest")
    shift = 0.0 if reverse else SHIFT / max(temperature, 1)
    unshift = math.exp(-shift)
    rows = _rows_of(kernels, chunks, student_NV)
    tokens = kernels.CommonTokens(*common, *others)
    totals = kernels.row_totals(student_NV, teacher_MW, temperature)
    cross_entropy = _cross_entropy_of(student_NV, totals.plain_log_total_N, labels_N)
    masses = kernels.common_masses(
        student_NV, teacher_MW, rows, totals, tokens, temperature, shift, unshift, reverse
    )
    num_compared = min(uncommon_topk, len(others.student), len(others.teacher))
    distance_C, d_other_CA = _sorted_distance(masses.p_CA, masses.q_CB, num_compared)
    d_other_CA.mul_(unshift).add_(masses.bucket_slope_C[:, None])
    factor_C = _chunk_factors(weight_N, chunks, temperature)
    kernels.common_gradient_(
        student_NV, teacher_MW, rows, totals, tokens, masses, d_other_CA, factors[1] * factor_C,
        labels_N, temperature, shift, reverse, factors[0],
    )
    return cross_entropy, ((masses.value_C + distance_C) * factor_C).sum()


def chunk_kernels(*logits_NX: Tensor) -> Any:
    """Import the module of Triton kernels for chunks if it serves these tensors; else None."""
    if not HAS_TRITON_CHUNKS or triton_kernels(*logits_NX) is None:
        return None
    return import_module(BESIDE + "gpu_chunks")


def _rows_of(kernels: Any, chunks: Chunks, student_NV: Tensor) -> Any:
    """Return the `gpu_chunks.ChunkRows` of the chunks."""
    return kernels.chunk_rows(
        chunks.row_S, chunks.of_S, chunks.row_T, chunks.of_T, len(chunks.first_S), len(student_NV)
    )


def _cross_entropy_of(
    logits_NV: Tensor, log_total_N: Tensor, labels_N: Tensor | None
) -> Tensor:
    """Return the sum over the rows that have a label; log_total_N: their logsumexp."""
    if labels_N is None:
        return log_total_N.new_zeros(())
    logit_N = logits_NV.gather(1, labels_N.clamp(min=0)[:, None]).squeeze(1)
    nats_N = log_total_N - at_least_float32(logit_N)
    return nats_N.masked_fill(labels_N < 0, 0.0).sum()


def _chunk_factors(weight_N: Tensor | None, chunks: Chunks, temperature: float) -> Tensor:
    """Return (C,) float32: tau^2 times the weight of each chunk's first row."""
    if weight_N is None:
        shape = chunks.first_S.shape
        return torch.full(shape, temperature**2, dtype=torch.float32, device=chunks.first_S.device)
    return weight_N[chunks.first_S].float() * temperature**2


def h_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, indices_VK: Tensor, likelihoods_VK: Tensor, temperature: float = 1.0,
    uncommon_topk: int = 8192, average: str = "p", reverse: bool = False,
    weight_BS: Tensor | None = None, reduction: str = "sum",
    chunks: Chunks | None = None,
) -> SumAndCount:
    """Compute `gold` with the relaxed set of common tokens, determined in every call.

    Where many calls share a projection, call `common_tokens` and `other_tokens` once, then `gold`.

    Args:
        indices_VK, likelihoods_VK: the projection, rows sorted by weight, -1 in unused slots.
    Others and Returns: see `gold`.
    """
    check_width("student", student_logits_BSV, len(indices_VK), "indices_VK")
    common = common_tokens(indices_VK, likelihoods_VK, relaxed=True)
    return gold(
        student_logits_BSV, teacher_logits_BTW, student_chunk_BS, teacher_chunk_BT,
        common.student, common.teacher, temperature, uncommon_topk, average, reverse,
        weight_BS, reduction, chunks,
    )


def _mean_rows(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, chunks: Chunks
) -> tuple[WeightedRows, WeightedRows]:
    """Return both sides' rows with the weights that make a chunk the mean of its positions."""
    student = WeightedRows(
        logits_NX=at_least_float32(student_logits_BSV.flatten(0, 1)),
        weight_R=(1 / chunks.count_S).float()[chunks.of_S],
        row_R=chunks.row_S,
        of_R=chunks.of_S,
    )
    teacher = WeightedRows(
        logits_NX=at_least_float32(teacher_logits_BTW.flatten(0, 1)),
        weight_R=(1 / chunks.count_T).float()[chunks.of_T],
        row_R=chunks.row_T,
        of_R=chunks.of_T,
    )
    return student, teacher


def _scaled_softmax(
    logits_NX: Tensor, average: str, shift: float
) -> Tensor:
    """Return the (N, X) rows that `gold` averages: log p, p exp(shift) or p."""
    if average == "logp":
        return logits_NX.log_softmax(-1).clamp(min=FLOOR)
    if shift:
        return (logits_NX.log_softmax(-1) + shift).exp()
    return logits_NX.softmax(-1)


def _gold_of_mean_logp(
    logp_CV: Tensor, logq_CW: Tensor, common: TokenIds, others: TokenIds, num_compared: int,
    reverse: bool,
) -> Tensor:
    """Return the (C,) values of `gold` with average "logp"."""
    logp = logp_CV.index_select(1, common.student)
    logq = logq_CW.index_select(1, common.teacher)
    kl_C = _kl(logp, logq) if reverse else _kl(logq, logp)
    p_others = logp_CV.index_select(1, others.student).exp()
    q_others = logq_CW.index_select(1, others.teacher).exp()
    p_sorted = p_others.topk(num_compared, -1).values
    q_sorted = q_others.topk(num_compared, -1).values
    return kl_C + (p_sorted - q_sorted).abs().sum(-1)


def _common_and_rest(
    p_CV: Tensor, q_CW: Tensor, common: TokenIds, others: TokenIds, num_compared: int,
    reverse: bool, shift: float,
) -> ValueAndDerivative:
    """Return (C,) values of `gold` for p times exp(shift), and q; the derivative by the first.

    Written by hand for the sake of time: the plain form has three times as many passes over [C, V].
    """
    unshift = math.exp(-shift)
    p_common = p_CV.index_select(1, common.student)
    q_common = q_CW.index_select(1, common.teacher)
    kl_C, d_common = _mass_kl(p_common, q_common, reverse, shift)
    p_others = p_CV.index_select(1, others.student)
    q_others = q_CW.index_select(1, others.teacher)
    p_bucket = p_others.sum(1, keepdim=True)
    q_bucket = q_others.sum(1, keepdim=True)
    bucket_C, d_bucket = _mass_kl(p_bucket, q_bucket, reverse, shift)
    if shift:
        p_others.mul_(unshift)
    distance_C, d_others = _sorted_distance(p_others, q_others, num_compared)
    d_others.mul_(unshift).add_(d_bucket)
    d_CV = torch.empty_like(p_CV)
    d_CV.index_copy_(1, common.student, d_common).index_copy_(1, others.student, d_others)
    return kl_C + bucket_C + distance_C, d_CV


def _mass_kl(p_NK: Tensor, q_NK: Tensor, reverse: bool, shift: float) -> ValueAndDerivative:
    """Return (sum q log(q / p), its derivative by p exp(shift)), p_NK being that; overwrites both.

    reverse: sum p log(p / q), for shift 0.
    """
    tiny = torch.finfo(p_NK.dtype).tiny
    p = p_NK.clamp_(min=tiny)
    q = q_NK.clamp_(min=tiny)
    if reverse:
        log_ratio = p.div(q).log_()
        return (p * log_ratio).sum(-1), log_ratio.add_(1)
    ratio = _clamp_ratio_(torch.div(q, p), p.dtype)
    return q.mul_(ratio.log().add_(shift)).sum(-1), ratio.neg_()


def _sorted_distance(p_NV: Tensor, q_NW: Tensor, k: int) -> ValueAndDerivative:
    """Return ((N,) sum |sorted p - sorted q| over the k largest, its derivative by p).

    p, q >= 0.  Beyond the end of a row there are zeros.
    """
    if kernels := compiled_kernels(p_NV, q_NW):
        result: ValueAndDerivative = kernels.sorted_distance(p_NV, q_NW, k)
        return result
    p_NK, column_NK = _largest(p_NV, k)
    q_NK, _ = _largest(q_NW, k)
    width = max(p_NK.shape[1], q_NK.shape[1])
    p_padded = F.pad(p_NK, (0, width - p_NK.shape[1]))
    q_padded = F.pad(q_NK, (0, width - q_NK.shape[1]))
    gap = p_padded - q_padded
    sign = gap.sign()[:, : column_NK.shape[1]]
    return gap.abs().sum(-1), torch.zeros_like(p_NV).scatter_(1, column_NK, sign)


def _largest(x_NX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (values, columns) of the k largest entries of each row, the largest first."""
    if k < x_NX.shape[1]:
        return x_NX.topk(k)
    return x_NX.sort(-1, descending=True)


def uld(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor,
    teacher_next_BT: Tensor, student_chunk_BS: Tensor, teacher_chunk_BT: Tensor,
    temperature: float = 1.0, common: tuple[Tensor, Tensor] | None = None,
    matched_weight: float | None = None, weight_BS: Tensor | None = None, reduction: str = "sum",
    chunks: Chunks | None = None,
    rest: tuple[Tensor, Tensor] | None = None,
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
    if chunks is None:
        chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    num_chunks = len(chunks.first_S)
    shape_BS = student_chunk_BS.shape
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = teacher_logits_BTW.detach().flatten(0, 1)
    last_S = chunks.first_S + chunks.count_S - 1
    last_T = chunks.first_T + chunks.count_T - 1
    p_before_C = _probability_before(
        x_NV, student_next_BS, last_S, chunks.row_S, chunks.of_S, temperature
    )
    q_before_C = _probability_before(
        y_MW, teacher_next_BT, last_T, chunks.row_T, chunks.of_T, temperature
    )
    if common is not None and rest is not None:
        check_width("student", x_NV, len(common[0]) + len(rest[0]), "rest")
        check_width("teacher", y_MW, len(common[1]) + len(rest[1]), "rest")
    kernels = compiled_kernels(x_NV, y_MW) if common is None else None
    if kernels:
        number = torch.arange(num_chunks)
        x_NV = at_least_float32(x_NV)
        y_MW = at_least_float32(y_MW)
        student = WeightedRows(x_NV, _or_ones(p_before_C, x_NV, num_chunks), last_S, number)
        teacher = WeightedRows(y_MW, _or_ones(q_before_C, y_MW, num_chunks), last_T, number)
        longest = max(x_NV.shape[1], y_MW.shape[1])
        value_C: Tensor = _MixtureDistance.apply(  # type: ignore[no-untyped-call]
            *student, kernels, teacher, None, None, longest, temperature
        )
        return reduce_terms(value_C, chunks.first_S, shape_BS, weight_BS, reduction)
    p_CV = _end_distribution(x_NV, last_S, p_before_C, temperature)
    q_CW = _end_distribution(y_MW, last_T, q_before_C, temperature)
    if common is None:
        value_C = _all_sorted(p_CV, q_CW)
    else:
        if rest is None:
            rest = (other_tokens(common[0], p_CV.shape[1]), other_tokens(common[1], q_CW.shape[1]))
        value_C = _hybrid_uld(p_CV, q_CW, TokenIds(*common), TokenIds(*rest), matched_weight)
    return reduce_terms(value_C, chunks.first_S, shape_BS, weight_BS, reduction)


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
    logp_C = chunk_logp(
        logits_NX, next_BX, row_N[before], of_N[before], len(last_C), temperature
    )
    return logp_C.exp()


def _or_ones(weight_C: Tensor | None, like: Tensor, num_chunks: int) -> Tensor:
    return like.new_ones(num_chunks) if weight_C is None else weight_C


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
    tiny = torch.finfo(p_CV.dtype).tiny
    logp = p_CV[:, common.student].clamp(min=tiny).log()
    logq = q_CW[:, common.teacher].clamp(min=tiny).log()
    p_others = p_CV.index_select(1, others.student)
    q_others = q_CW.index_select(1, others.teacher)
    logm = _log_mixture(logp, logq, 0.5)
    matched_C = 0.5 * _kl(logq, logm) + 0.5 * _kl(logp, logm)
    return matched_weight * matched_C + (1 - matched_weight) * _all_sorted(p_others, q_others)


def _all_sorted(p_NV: Tensor, q_NW: Tensor) -> Tensor:
    """Return the (N,) sum |sorted p - sorted q| over all entries."""
    longest = max(p_NV.shape[1], q_NW.shape[1])
    value_N: Tensor = _WithDerivative.apply(  # type: ignore[no-untyped-call]
        p_NV, None, _sorted_distance, q_NW, longest
    )
    return value_N


def alm(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor,
    teacher_next_BT: Tensor, student_chunk_BS: Tensor, teacher_chunk_BT: Tensor,
    temperature: float = 1.0, mode: str = "binary_kl", weight_BS: Tensor | None = None,
    reduction: str = "sum", chunks: Chunks | None = None,
) -> SumAndCount:
    """Sum f(q, p) over chunks, the two models' probabilities of the chunk's own bytes.

    p and q are products over the chunk's tokens; temperature tau raises them to 1 / tau; a factor
    of e^-1e-6 keeps 1 - p above 0 (ALM, arXiv:2503.20083).  Modes:
      binary_kl: KL(Bern(q) || Bern(p));  binary_kl_reverse: KL(Bern(p) || Bern(q));
      binary_ce: the first plus the entropy of Bern(q), which is not 0 at agreement;
      temperature_limit: lim tau KL(Bern(q^(1/tau)) || Bern(p^(1/tau))) for tau -> inf
        = s - t - t log(s / t), with s = -log p, t = -log q;
      squared, absolute: (log p - log q)^2, |log p - log q|.

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        temperature: tau, > 0; not used by the last three modes.
        mode: see above.
    Others and Returns: see `projection_kl`; no factor tau^2, as in the paper.
    Raises:
        ValueError: unknown mode.
    """
    of_student = {"student_next_BS": student_next_BS, "student_chunk_BS": student_chunk_BS}
    of_teacher = {"teacher_next_BT": teacher_next_BT, "teacher_chunk_BT": teacher_chunk_BT}
    check_side("student", student_logits_BSV, **of_student)
    check_side("teacher", teacher_logits_BTW, **of_teacher)
    if chunks is None:
        chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    num_chunks = len(chunks.first_S)
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = teacher_logits_BTW.detach().flatten(0, 1)
    # the temperature applies to the chunk, not to its tokens' distributions, whence the 1.0
    logp_C = chunk_logp(
        x_NV, student_next_BS, chunks.row_S, chunks.of_S, num_chunks, 1.0
    )
    logq_C = chunk_logp(
        y_MW, teacher_next_BT, chunks.row_T, chunks.of_T, num_chunks, 1.0
    )
    value_C = _alm_value(mode, logp_C, logq_C, temperature)
    shape_BS = student_chunk_BS.shape
    return reduce_terms(value_C, chunks.first_S, shape_BS, weight_BS, reduction)


def alm_in_place(
    student_NV: Tensor, teacher_MW: Tensor, labels_N: Tensor | None, next_S: Tensor,
    next_T: Tensor, chunks: Chunks, factors: tuple[float, float],
    weight_N: Tensor | None = None, temperature: float = 1.0, mode: str = "binary_kl",
) -> SumAndCount | None:
    """Compute cross-entropy and `alm`, and write the gradient over the student's logits.

    It takes two launches of gpu_chunks.py, for the logsumexp of all rows and for the gradient.

    Args:
        next_S, next_T: int64, the token that each position predicts.
        weight_N: weight of the terms that begin at each student row; None: 1.
        Others, Returns: see `divergence_in_place` and `alm`.
    """
    check_side("student", student_NV, labels_N=labels_N, next_S=next_S, weight_N=weight_N)
    check_side("teacher", teacher_MW, next_T=next_T)
    kernels = chunk_kernels(student_NV, teacher_MW)
    if kernels is None:
        return None
    num_chunks = len(chunks.first_S)
    totals = kernels.row_totals(student_NV, teacher_MW, 1.0)
    cross_entropy = _cross_entropy_of(student_NV, totals.plain_log_total_N, labels_N)
    token_R = next_S[chunks.row_S]
    logit_R = at_least_float32(student_NV[chunks.row_S, token_R])
    logp_R = (logit_R - totals.log_total_N[chunks.row_S]).requires_grad_()
    logit_T = at_least_float32(teacher_MW[chunks.row_T, next_T[chunks.row_T]])
    logq_T = (logit_T - totals.teacher_log_total_M[chunks.row_T]).clamp(min=FLOOR)
    logq_C = row_sums(logq_T, chunks.of_T, num_chunks)
    with torch.enable_grad():
        logp_C = row_sums(logp_R.clamp(min=FLOOR), chunks.of_S, num_chunks)
        value_C = _alm_value(mode, logp_C, logq_C, temperature)
        kd = (value_C * _chunk_factors(weight_N, chunks, 1.0)).sum()
        [d_R] = torch.autograd.grad(factors[1] * kd, [logp_R])
    factor_N = torch.zeros_like(totals.log_total_N).index_copy_(0, chunks.row_S, d_R)
    token_N = torch.full_like(next_S, -1).index_copy_(0, chunks.row_S, token_R)
    kernels.tokens_gradient_(
        student_NV, token_N, factor_N, totals.plain_log_total_N, labels_N, factors[0]
    )
    return cross_entropy, kd.detach()


def _alm_value(mode: str, logp_C: Tensor, logq_C: Tensor, temperature: float) -> Tensor:
    """Return the (C,) values f(q, p) of `alm`."""
    if mode == "squared":
        return (logp_C - logq_C).square()
    if mode == "absolute":
        return (logp_C - logq_C).abs()
    if mode == "temperature_limit":
        s = (-logp_C).clamp(min=MARGIN)
        t = (-logq_C).clamp(min=MARGIN)
        return s - t - t * (s / t).log()
    logp = logp_C / temperature - MARGIN
    logq = logq_C / temperature - MARGIN
    if mode == "binary_kl":
        return bernoulli_kl(logq, logp)
    if mode == "binary_kl_reverse":
        return bernoulli_kl(logp, logq)
    if mode == "binary_ce":
        return -logq.exp() * logp + torch.expm1(logq) * torch.log(-torch.expm1(logp))
    raise ValueError(
        f"mode={mode!r}: expected binary_kl, binary_kl_reverse, binary_ce, "
        "temperature_limit, squared or absolute"
    )
