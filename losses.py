"""Divergences between a teacher and a student, of one vocabulary or of two, and the student's cross-entropy.

With one vocabulary the two next-token distributions are compared at every position (`forward_kl` and its
family).  With two, models are compared chunk by chunk: a chunk is a span of text that starts and ends on a
token boundary of both sides (align.py finds them).  `piece_kl` compares them on events that both vocabularies
can express; `projection_kl` maps the student's distribution into the teacher's vocabulary; `gold`, `h_kl` and
`uld` compare common tokens and sorted probabilities; `alm` the probabilities of the chunks' own bytes.

Every loss returns (sum, count) in at least float32, also under autocast: the caller divides by the count over
the *whole* batch, so that neither micro-batches nor ranks change the result.  All take

    weight_BS: (B, S) float, weight of the terms that begin at a student position; None: 1.
    reduction: "sum"; "sample": (B,) sums and counts; "none": (N,) terms and their weights, in reading order.

Shapes: B samples, S student tokens, T teacher tokens, C chunks, V student vocabulary, W teacher vocabulary,
K kept entries, P pieces of a spelling, N rows of terms.  Logits at position t predict token t + 1, and every
``*_next``, ``*_chunk`` and ``mask`` argument is *shifted already*: entry t speaks of the token that position
t predicts.  Logits must be cut to the tokenizer's own vocabulary (no padding rows of the lm_head).

Every loss takes `group`, a process group over which the last axis of the logits, and nothing else, is sharded
in rank order, evenly or not.  Every rank gets the same result, and the gradient of its own columns.

Needs torch only.  Copy this file into your own repository.  With cpu_kernels.py and numba beside it,
all but adaptive_kl, projection_kl and alm take a tenth to two thirds of the time on a CPU.  Tests:
tests/test_losses.py.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

SHIFT = 70.0  # nats; see _event_kl
EPSILON = 1e-10  # of projected mass, so that a teacher token that no student token says costs a finite amount
Two = tuple[Tensor, Tensor]
FLOOR = -1e4  # nats; log-probability that stands for zero: what a model excludes costs a finite amount
HAS_KERNELS = all(find_spec(name) for name in ("numba", "cpu_kernels"))  # compiled rows, beside this file


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reduce_terms(
    value_N: Tensor, row_N: Tensor, shape_BS: tuple[int, ...], weight_BS: Tensor | None, reduction: str
) -> Two:
    """Weighted terms as the caller wants them; see the module's `reduction`.

    Args:
        value_N: terms, nats.
        row_N: int64, row of the flattened (B * S) where each one begins.
        shape_BS: (B, S).
    Raises:
        ValueError: unknown reduction.
    """
    weight_N = torch.ones_like(value_N) if weight_BS is None else weight_BS.reshape(-1)[row_N].to(value_N)
    value_N = value_N * weight_N
    if reduction == "none":
        return value_N, weight_N
    if reduction == "sum":
        return value_N.sum(), weight_N.sum()
    if reduction != "sample":
        raise ValueError(f"reduction={reduction!r}: expected 'sum', 'sample' or 'none'")
    sample_N, zero = row_N // max(1, shape_BS[1]), value_N.new_zeros(shape_BS[0])
    return zero.index_add(0, sample_N, value_N), zero.index_add(0, sample_N, weight_N)


def next_token_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, weight_BS: Tensor | None = None, reduction: str = "sum",
    group: Any = None,
) -> Two:
    """Sum of -log p(next token).

    Args:
        logits_BSV: (B, S, V), any float type; may hold NaN where the label is -100.
        labels_BS: (B, S) int64, the token that each position predicts (shifted already); -100: none.
    Returns:
        (sum, count): nats over labeled positions, and how many there are.
    """
    keep = labels_BS != -100  # rows are selected, not masked: 0 * NaN would reach the gradient
    logp = vocab_log_softmax(at_least_float32(logits_BSV[keep]), group)
    value = -vocab_gather(logp, labels_BS[keep][:, None], group).squeeze(1)
    row = keep.reshape(-1).nonzero().squeeze(1)
    return reduce_terms(value, row, labels_BS.shape, weight_BS, reduction)


# --- a vocabulary sharded over ranks ---------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Sum over the ranks; all of them go on with the same number, so each keeps the gradient it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Copy(torch.autograd.Function):
    """A number that all ranks have, used with columns that each has alone: the gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def vocab_sum(x: Tensor, group: Any = None) -> Tensor:
    """Sum over the ranks of `group` of what each summed over its own columns."""
    return x if group is None else _Sum.apply(x, group)  # type: ignore[no-untyped-call]


def vocab_copy(x: Tensor, group: Any = None) -> Tensor:
    """To be applied to what all ranks of `group` have, before it meets columns of a rank's own."""
    return x if group is None else _Copy.apply(x, group)  # type: ignore[no-untyped-call]


def vocab_range(rows_NV: Tensor, group: Any = None) -> tuple[int, int]:
    """(first column of this rank's shard, columns in all); shards may differ in width."""
    if group is None:
        return 0, rows_NV.shape[1]
    widths = _widths(rows_NV, group)
    return sum(widths[: dist.get_rank(group)]), sum(widths)


def _widths(rows_NV: Tensor, group: Any) -> list[int]:
    """Columns of every rank."""
    own = torch.tensor(rows_NV.shape[1], device=rows_NV.device)
    widths = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(widths, own, group=group)
    return [int(width) for width in widths]


def vocab_logsumexp(logits_NV: Tensor, group: Any = None) -> Tensor:
    """(N,) logsumexp over all columns."""
    if group is None:
        return logits_NV.logsumexp(-1)
    top = logits_NV.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    return vocab_sum((logits_NV - top[:, None]).exp().sum(-1), group).log() + top


def vocab_log_softmax(logits_NV: Tensor, group: Any = None) -> Tensor:
    """(N, V) log-probabilities of this rank's columns."""
    if group is None:
        return logits_NV.log_softmax(-1)
    return logits_NV - vocab_copy(vocab_logsumexp(logits_NV, group), group)[:, None]


def vocab_softmax(logits_NV: Tensor, group: Any = None) -> Tensor:
    """(N, V) probabilities of this rank's columns."""
    return logits_NV.softmax(-1) if group is None else vocab_log_softmax(logits_NV, group).exp()


def vocab_gather(rows_NV: Tensor, ids_NK: Tensor, group: Any = None) -> Tensor:
    """(N, K) entries at ids of the whole vocabulary."""
    if group is None:
        return rows_NV.gather(1, ids_NK)
    low, _ = vocab_range(rows_NV, group)
    here = (ids_NK >= low) & (ids_NK < low + rows_NV.shape[1])
    found = rows_NV.gather(1, (ids_NK - low).clamp(0, rows_NV.shape[1] - 1))
    return vocab_sum(torch.where(here, found, 0.0), group)


def vocab_topk(rows_NV: Tensor, k: int, group: Any = None) -> Tensor:
    """(N, k) int64 ids, in the whole vocabulary, of the largest entries; no gradient."""
    rows_NV = rows_NV.detach()
    if group is None:
        return rows_NV.topk(min(k, rows_NV.shape[1]), -1).indices
    low, total = vocab_range(rows_NV, group)
    k = min(k, total)
    value, index = rows_NV.topk(min(k, rows_NV.shape[1]), -1)
    missing = (0, k - value.shape[1])
    value = F.pad(value, missing, value=-torch.inf).contiguous()
    index = F.pad(index + low, missing).contiguous()
    parts = [[torch.empty_like(x) for _ in range(dist.get_world_size(group))] for x in (value, index)]
    for part, x in zip(parts, (value, index)):
        dist.all_gather(part, x, group=group)
    best = torch.cat(parts[0], 1).topk(k, -1).indices
    return torch.cat(parts[1], 1).gather(1, best)


class _Turn(torch.autograd.Function):
    """All-to-all: a block of rows for every rank against a block of columns from every rank, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], columns: list[int], group: Any) -> Tensor:
        ctx.how = rows, columns, group
        mine, here = rows[dist.get_rank(group)], x.shape[1]
        flat = x.new_empty(mine * sum(columns))
        dist.all_to_all_single(flat, x.reshape(-1), [mine * n for n in columns], [n * here for n in rows],
                               group=group)
        parts = torch.split(flat, [mine * n for n in columns])
        return torch.cat([part.view(mine, n) for part, n in zip(parts, columns)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, columns, group = ctx.how
        rank = dist.get_rank(group)
        flat = grads[0].new_empty(sum(rows) * columns[rank])
        sent = torch.cat([part.reshape(-1) for part in torch.split(grads[0], columns, 1)])
        dist.all_to_all_single(flat, sent, [n * columns[rank] for n in rows],
                               [rows[rank] * n for n in columns], group=group)
        return flat.view(-1, columns[rank]), None, None, None


def columns_to_rows(rows_NV: Tensor, group: Any = None) -> tuple[Tensor, slice]:
    """Whole rows instead of columns: an even share of the rows on each rank, so memory stays what it was.

    For what needs a row as a whole (sorting, sums over sets of tokens).  Returns (the share, with all
    columns; which of the N rows it is).
    """
    if group is None:
        return rows_NV, slice(0, len(rows_NV))
    widths = _widths(rows_NV, group)
    ends = [len(rows_NV) * i // len(widths) for i in range(len(widths) + 1)]
    rows = [b - a for a, b in zip(ends, ends[1:])]
    whole = _Turn.apply(rows_NV, rows, widths, group)  # type: ignore[no-untyped-call]
    rank = dist.get_rank(group)
    return whole, slice(ends[rank], ends[rank + 1])


def gather_row_values(value_N: Tensor, share: slice, count: int, group: Any = None) -> Tensor:
    """(count,) what every rank has found for its share of the rows (see `columns_to_rows`), on every rank."""
    if group is None:
        return value_N
    return vocab_sum(F.pad(value_N, (share.start, count - share.stop)), group)


# --- one vocabulary: divergences per position ------------------------------------------------------


def _kl(logq: Tensor, logp: Tensor) -> Tensor:
    """sum of q (log q - log p) over the last axis; where q is 0 nothing is added, whatever log p is."""
    q = logq.exp()
    return torch.where(q > 0, q * (logq - logp), 0.0).sum(-1)


def _mix(logp: Tensor, logq: Tensor, share_q: float) -> Tensor:
    """log(share_q q + (1 - share_q) p)."""
    parts = torch.stack([logp, logq])
    weights = torch.tensor([1 - share_q, share_q], dtype=parts.dtype, device=parts.device).log()
    return (parts + weights.view(2, *[1] * logp.dim())).logsumexp(0)


def _adaptive(logp: Tensor, logq: Tensor, alpha: float) -> Tensor:
    q, order = logq.exp().sort(-1)
    gap = (q - logp.detach().exp().gather(-1, order)).abs()
    tail = q.cumsum(-1) < alpha
    head = torch.where(tail, 0.0, gap).sum(-1) / gap.sum(-1).clamp(min=1e-30)
    return head * _kl(logq, logp) + (1 - head) * _kl(logp, logq)


def _buckets(
    logp: Tensor, logq: Tensor, ids_NK: Tensor, tail: bool, group: Any
) -> Two:
    """Log-probabilities of the kept tokens and, with `tail`, of all others together; else renormalized."""
    low, _ = vocab_range(logp, group)
    out = []
    for rows in (logp, logq):
        kept = vocab_gather(rows, ids_NK, group)
        if tail:  # from the others themselves: 1 - sum would lose a small tail, and its gradient
            here = (ids_NK >= low) & (ids_NK < low + rows.shape[1])
            place = torch.where(here, ids_NK - low, rows.shape[1])
            rest = F.pad(rows, (0, 1)).scatter(1, place, 10 * FLOOR)[:, :-1]
            kept = torch.cat([kept, vocab_logsumexp(rest, group)[:, None].clamp(min=FLOOR)], 1)
        else:
            kept = kept - kept.logsumexp(-1, keepdim=True)
        out.append(kept)
    return out[0], out[1]


def position_divergence(
    name: str, student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None,
    temperature: float = 1.0, teacher_temperature: float | None = None, top_k: int = 0,
    support: str | Tensor = "teacher", tail: bool = True, weight_BS: Tensor | None = None,
    reduction: str = "sum", group: Any = None, coefficient: float = 0.0,
) -> Two:
    """Sum over positions of tau^2 D(q, p), q = softmax(teacher / tau), p = softmax(student / tau).

    Args:
        name: forward_kl, reverse_kl, generalized_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl or
            total_variation; each is a function of its own below.
        student_logits_BSV, teacher_logits_BSV: any float type; the teacher gets no gradient; may hold NaN
            where the mask is False.
        mask_BS: bool, positions to compare; None: all, then nothing here waits for the device.
        temperature, teacher_temperature: tau of student and teacher, > 0; None: the same.
        top_k: compare that many tokens and the rest as one bucket; 0: all tokens.
        support: whose top_k: "teacher", "student", or (B, S, K) int64 ids without repetition.
        tail: False: no bucket for the rest, both are renormalized on the kept tokens.
    Returns:
        (sum, count): nats (total variation: 0 to tau^2 per position), and positions.
    Raises:
        ValueError: unknown name or support.
    """
    x, y = _chosen(student_logits_BSV, mask_BS), _chosen(teacher_logits_BSV.detach(), mask_BS)
    taus, shape = (temperature, teacher_temperature or temperature), student_logits_BSV.shape[:2]
    row = _chosen(torch.arange(shape.numel(), device=x.device).view(shape), mask_BS)
    every = not top_k and isinstance(support, str)
    if every and name != "adaptive_kl" and (kernels := _compiled(x, y, group)):
        how = kernels.divergence, y, _mixture(name, coefficient), *taus, FLOOR
        value = _WithDerivative.apply(x, None, *how)  # type: ignore[no-untyped-call]
        return reduce_terms(temperature**2 * value, row, shape, weight_BS, reduction)
    logp = vocab_log_softmax(_soften(x, taus[0]), group).clamp(min=FLOOR)
    with torch.no_grad():
        logq = vocab_log_softmax(_soften(y, taus[1]), group).clamp(min=FLOOR)
    if not every:
        if isinstance(support, Tensor):
            ids = _chosen(support, mask_BS)
        elif support in ("teacher", "student"):
            ids = vocab_topk(logq if support == "teacher" else logp, top_k, group)
        else:
            raise ValueError(f"support={support!r}: expected 'teacher', 'student' or a tensor of ids")
        logp, logq = _buckets(logp, logq, ids, tail, group)
        group = None  # every rank holds all buckets now
    if name == "adaptive_kl":  # it sorts whole rows
        (p_share, share), (q_share, _) = columns_to_rows(logp, group), columns_to_rows(logq, group)
        value = gather_row_values(_divergence(name, p_share, q_share, coefficient), share, len(logp), group)
    else:
        value = vocab_sum(_divergence(name, logp, logq, coefficient), group)
    return reduce_terms(temperature**2 * value, row, shape, weight_BS, reduction)


def _mixture(name: str, coefficient: float) -> tuple[float, float, float] | None:
    """(a, b, s) of a KL(q || m) + b KL(p || m), m = s p + (1 - s) q; None: sum |p - q| / 2.

    Raises:
        ValueError: unknown name.
    """
    c = coefficient
    jsd = (c, 1 - c, 1 - c) if 0 < c < 1 else (1 - c, c, 1 - c)
    known = {"forward_kl": (1, 0, 1), "reverse_kl": (0, 1, 0), "generalized_jsd": jsd,
             "skew_forward_kl": (1, 0, 1 - c), "skew_reverse_kl": (0, 1, c), "total_variation": None}
    if name not in known:
        raise ValueError(f"{name!r}: no such divergence")
    return known[name]


def _chosen(x_BSX: Tensor, mask_BS: Tensor | None) -> Tensor:
    return x_BSX.flatten(0, 1) if mask_BS is None else x_BSX[mask_BS]


def _divergence(name: str, logp: Tensor, logq: Tensor, coefficient: float) -> Tensor:
    if name == "adaptive_kl":
        return _adaptive(logp, logq, coefficient)
    mixture = _mixture(name, coefficient)
    if mixture is None:
        return (logp.exp() - logq.exp()).abs().sum(-1) / 2
    a, b, s = mixture
    logm = logp if s == 1 else logq if s == 0 and b else _mix(logp, logq, 1 - s)  # has a gradient, if of 0
    sides = [factor * _kl(side, logm) for factor, side in ((a, logq), (b, logp)) if factor]
    return torch.stack(sides).sum(0)


def forward_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, **how: Any
) -> Two:
    """KL(q || p): the student covers all that the teacher says (Hinton et al., arXiv:1503.02531).

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    return position_divergence("forward_kl", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def reverse_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, **how: Any
) -> Two:
    """KL(p || q): the student says only what the teacher says (MiniLLM, arXiv:2306.08543).

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    return position_divergence("reverse_kl", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def generalized_jsd(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, beta: float = 0.5,
    **how: Any,
) -> Two:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (GKD, arXiv:2306.13649).

    beta 0 *means* forward KL and beta 1 reverse KL, as in public code.  That is a jump: towards its ends the
    formula goes to 0 like beta (1 - beta) times those; divide by that where a continuous family is wanted.

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    how["coefficient"] = beta
    return position_divergence("generalized_jsd", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def skew_forward_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, skew: float = 0.1,
    **how: Any,
) -> Two:
    """KL(q || skew q + (1 - skew) p), 0 <= skew < 1 (DistiLLM, arXiv:2402.03898).

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    how["coefficient"] = skew
    return position_divergence("skew_forward_kl", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def skew_reverse_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, skew: float = 0.1,
    **how: Any,
) -> Two:
    """KL(p || skew p + (1 - skew) q), 0 <= skew < 1 (DistiLLM, arXiv:2402.03898).

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    how["coefficient"] = skew
    return position_divergence("skew_reverse_kl", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def adaptive_kl(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, alpha: float = 0.5,
    **how: Any,
) -> Two:
    """h KL(q || p) + (1 - h) KL(p || q), h the share of sum |q - p| on the teacher's likely tokens.

    The unlikely tokens are those whose probabilities, summed from the smallest on, stay below alpha.  h gets
    no gradient (AKL, arXiv:2404.02657).

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    how["coefficient"] = alpha
    return position_divergence("adaptive_kl", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def total_variation(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor | None, **how: Any
) -> Two:
    """sum |p - q| / 2, from 0 to 1 (f-DISTILL, arXiv:2307.15190).

    Args, Returns, Raises: of `position_divergence`, without its name.
    """
    return position_divergence("total_variation", student_logits_BSV, teacher_logits_BSV, mask_BS, **how)


def topk_tail_policy_loss(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, next_BS: Tensor, mask_BS: Tensor, top_k: int = 16,
    old_logp_BS: Tensor | None = None, max_ratio: float = 10.0, **how: Any,
) -> Two:
    """On-policy reverse KL on the student's top_k tokens and one bucket for the rest.

    sum over positions of ratio KL(p || q), ratio = min(p(next) / p_old(next), max_ratio) without gradient:
    the importance of a position that an older student sampled.

    Args:
        next_BS: int64, the token that was sampled there; anything where the mask is False.
        old_logp_BS: float, log-probability in nats that the sampling student gave it; None: it is this one.
    Others and Returns: of `position_divergence`; the count is that of the positions, not of the ratios.
    """
    reduction, weight_BS = how.pop("reduction", "sum"), how.pop("weight_BS", None)
    group = how.get("group")
    value, _ = position_divergence("reverse_kl", student_logits_BSV, teacher_logits_BSV, mask_BS, top_k=top_k,
                                   support="student", reduction="none", **how)
    if old_logp_BS is not None:
        rows = at_least_float32(student_logits_BSV.detach()[mask_BS])
        logp = vocab_gather(vocab_log_softmax(rows, group), next_BS[mask_BS][:, None], group).squeeze(1)
        value = value * (logp - old_logp_BS[mask_BS]).exp().clamp(max=max_ratio).to(value)
    row = mask_BS.reshape(-1).nonzero().squeeze(1)
    return reduce_terms(value, row, mask_BS.shape, weight_BS, reduction)


# --- chunks ---------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """The chunks of a batch that have tokens on both sides, known from ids alone, before any forward.

    first_S, first_T: (C,) int64 row, of the flattened (B * S) / (B * T), that predicts the first token.
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
        student_chunk_BS, teacher_chunk_BT: (B, S) and (B, T) int64, shifted chunk ids, -1 for none; the
            tokens of a chunk are neighbors.
    """
    B = student_chunk_BS.shape[0]
    most = 1 + max([int(x.max()) for x in (student_chunk_BS, teacher_chunk_BT) if x.numel()], default=-1)
    keys, firsts, counts = [], [], []
    for chunk in (student_chunk_BS, teacher_chunk_BT):
        sample = torch.arange(B, device=chunk.device)[:, None]
        key = torch.where(chunk >= 0, sample * most + chunk, B * most).reshape(-1)  # the last bin: no chunk
        position = torch.arange(key.numel(), device=key.device)
        first = torch.full((B * most + 1,), key.numel(), device=key.device)
        firsts.append(first.scatter_reduce(0, key, position, "amin")[:-1])
        counts.append(torch.bincount(key, minlength=B * most + 1)[:-1])
        keys.append(key)
    used = (counts[0] > 0) & (counts[1] > 0)
    number = torch.full((B * most + 1,), -1, device=used.device)
    number[:-1][used] = torch.arange(int(used.sum()), device=used.device)
    rows, of, whole = [], [], []
    for key in keys:
        of_chunk, row = number[key].sort(stable=True)
        row, of_chunk = row[of_chunk >= 0], of_chunk[of_chunk >= 0]
        rows.append(row)
        of.append(of_chunk)
        whole.append(len(row) == len(key) and bool((row[1:] > row[:-1]).all()))
    return Chunks(firsts[0][used], firsts[1][used], counts[0][used], counts[1][used], rows[0], rows[1],
                  of[0], of[1], whole[0], whole[1])


def chunk_mean(rows_NX: Tensor, of_N: Tensor, count_C: Tensor) -> Tensor:
    """(C, X) mean of the rows of each chunk; rows in the order of their chunks."""
    if len(rows_NX) == len(count_C):  # a row each
        return rows_NX
    total = rows_NX.new_zeros(len(count_C), rows_NX.shape[1]).index_add(0, of_N, rows_NX)
    return total / count_C[:, None]


# --- two vocabularies: projection -------------------------------------------------------------------


def teacher_importance(teacher_logits_BTW: Tensor, teacher_chunk_BT: Tensor | None = None) -> Tensor:
    """(W,) largest logit of every teacher token over the positions that have a chunk; -inf if there are none.

    Reduce it with max over micro-batches and ranks, then keep the top K columns: the kept set then depends
    neither on the cut of the batch nor on padding.

    Args:
        teacher_chunk_BT: shifted chunk ids, -1 for none; None: all positions have one.
    """
    rows = teacher_logits_BTW.flatten(0, 1)
    if teacher_chunk_BT is not None:
        rows = rows[teacher_chunk_BT.flatten() >= 0]
    if not len(rows):
        rows = rows.new_full((1, rows.shape[1]), -torch.inf)
    return at_least_float32(rows.amax(0))


def projection_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, indices_VK: Tensor, likelihoods_VK: Tensor, kept_K: Tensor | None = None,
    temperature: float = 1.0, teacher_average: str = "p", reverse: bool = False,
    weight_BS: Tensor | None = None, reduction: str = "sum", group: Any = None,
    entries: "Entries | None" = None, chunks: Chunks | None = None,
) -> Two:
    """P-KL: sum over chunks of tau^2 KL(target || r) in the teacher's vocabulary; reverse: KL(r || target).

    r = mean over the student positions of the chunk of softmax(x / tau) @ W, renormalized over the kept
    columns; target = mean over its teacher positions of softmax(y / tau) over the kept columns.  Averaging
    probabilities keeps the target normalized, so the loss is never negative and zero when the models agree.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient; may hold NaN
            where there is no chunk.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
        indices_VK, likelihoods_VK: the projection, -1 in unused slots; rows sum to 1 or 0.
        kept_K: (K,) int64 sorted teacher columns; None keeps all.
        teacher_average: "p", or "logp" for the un-normalized mean of log-probabilities that NeMo-RL uses
            (can be negative; kept for comparison with it).
        entries: `projection_entries` of this projection and these kept columns, if many calls share them; of
            the rank's own rows where there are a group and kept columns.
        chunks: `find_chunks` of the same ids, if known; then nothing here waits for the device.
    Returns:
        (sum, count): nats over chunks that have a position on both sides, and how many there are.
    """
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    x = _used(student_logits_BSV, chunks.row_S, chunks.whole_S, temperature)
    logp_NV = vocab_log_softmax(x, group)
    with torch.no_grad():
        y = _used(teacher_logits_BTW.detach(), chunks.row_T, chunks.whole_T, temperature)
        if kept_K is not None:
            logq = vocab_gather(y, kept_K.expand(len(y), -1), group).log_softmax(-1)
        else:
            logq = vocab_log_softmax(y, group)
        target = logq if teacher_average == "logp" else logq.exp()
        log_target = chunk_mean(target, chunks.of_T, chunks.count_T)
        if teacher_average != "logp":
            log_target = log_target.clamp(min=1e-30).log()
    share = slice(0, len(chunks.first_S))
    if kept_K is None and group is not None:  # every rank holds some columns of all chunks: turn that around
        p_CV, share = columns_to_rows(chunk_mean(logp_NV.exp(), chunks.of_S, chunks.count_S), group)
        log_target, _ = columns_to_rows(log_target, group)
        entries = entries or projection_entries(indices_VK, likelihoods_VK, log_target.shape[1])
        r_CK = _project(p_CV, entries)
    else:
        if entries is None:
            low, width, W = vocab_range(x, group)[0], x.shape[1], vocab_range(y, group)[1]
            own = indices_VK[low : low + width], likelihoods_VK[low : low + width]
            entries = projection_entries(*own, W, kept_K)
        r_NK = vocab_sum(_project(logp_NV, entries, logs=True), group)
        r_CK = chunk_mean(r_NK, chunks.of_S, chunks.count_S)
    log_r = (r_CK + EPSILON).log() - (r_CK + EPSILON).sum(-1, keepdim=True).log()
    kl_C = _kl(log_r, log_target) if reverse else _kl(log_target, log_r)
    if kept_K is None:
        kl_C = gather_row_values(kl_C, share, len(chunks.first_S), group)
    return reduce_terms(temperature**2 * kl_C, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


class Entries(NamedTuple):
    """The entries of a projection that lie in the kept columns: W[row, column] = weight.

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
    kept_K = torch.arange(W, device=indices_VK.device) if kept_K is None else kept_K
    number = torch.full((W + 1,), -1, device=indices_VK.device)  # the last one is that of slots without entry
    number[kept_K] = torch.arange(len(kept_K), device=indices_VK.device)
    column = number[indices_VK]
    row, slot = (column >= 0).nonzero(as_tuple=True)
    return Entries(row, column[row, slot], likelihoods_VK[row, slot], len(kept_K))


def _project(rows_NV: Tensor, entries: Entries, logs: bool = False) -> Tensor:
    """(N, K) p @ W, of p or, with `logs`, of log p; reads the columns that have an entry, and no others."""
    mass = rows_NV.index_select(1, entries.row_E)
    mass = (mass.exp() if logs else mass) * entries.weight_E.to(mass)
    return mass.new_zeros(len(mass), entries.width).index_add(1, entries.column_E, mass)


# --- two vocabularies: pieces ----------------------------------------------------------------------


class Spelling(NamedTuple):
    """How two vocabularies spell each other (projection_tools.spell builds it).

    event_V, event_W: (V,), (W,) int32 or int64, event of each token, -1 for tokens linked to nothing.
    num_events: number of events.
    pieces_W: (W, P) int64, A[w]: the student's tokens for the bytes of teacher token w, -1 behind the last.
    order_W, low_W, high_W: the teacher tokens whose A begins with the same k tokens as A[w] are
        ``order_W[low_W[w, k]:high_W[w, k]]``; (W,), (W, P), (W, P) int64.
    pieces_V, order_V, low_V, high_V: the mirror image, B[v]: the teacher's tokens for student token v.
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
    """Positions inside a chunk: the fine side is at `fine_row`, k >= 1 tokens into the coarse token.

    fine_row, coarse_row: (N,) int64, row of the fine side and row of the coarse side's first position.
    low, high: (N,) int64, range (see Spelling) of the coarse tokens that begin with the k fine tokens seen.
    level: (N,) int64, k.
    entries: sum of high - low.
    """

    fine_row: Tensor
    coarse_row: Tensor
    low: Tensor
    high: Tensor
    level: Tensor
    entries: int


class PieceTerms(NamedTuple):
    """All terms of `piece_kl` in a batch, known from ids alone, before any forward.

    start_S, start_T: (C,) rows that predict the first token of a chunk on either side.
    inside_teacher: chunks of one teacher token, positions after the first student token.
    inside_student: chunks of one student token, positions after the first teacher token.
    many_S, many_T: (M, 2) int64 (row, chunk): all rows of the chunks with several tokens on both sides.
    count_many: how many such chunks.
    count_all: () int64, student positions (and n:m remainders) that the terms cover; the loss is their sum.
    """

    start_S: Tensor
    start_T: Tensor
    inside_teacher: Ranges
    inside_student: Ranges
    many_S: Tensor
    many_T: Tensor
    count_many: int
    count_all: Tensor


def piece_terms(
    student_next_BS: Tensor, teacher_next_BT: Tensor, student_chunk_BS: Tensor, teacher_chunk_BT: Tensor,
    spelling: Spelling,
) -> PieceTerms:
    """List the terms of `piece_kl`; meant for the CPU, where the ids come from.

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts; anything where
            there is no chunk.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
    """
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    student_next, teacher_next = student_next_BS.reshape(-1), teacher_next_BT.reshape(-1)
    one_T, one_S = (chunks.count_T == 1) & (chunks.count_S > 1), (chunks.count_S == 1) & (chunks.count_T > 1)
    inside_teacher = _inside(student_next, teacher_next, chunks.first_S[one_T], chunks.first_T[one_T],
                             chunks.count_S[one_T], spelling.pieces_W, spelling.low_W, spelling.high_W)
    inside_student = _inside(teacher_next, student_next, chunks.first_T[one_S], chunks.first_S[one_S],
                             chunks.count_T[one_S], spelling.pieces_V, spelling.low_V, spelling.high_V)
    many = (chunks.count_S > 1) & (chunks.count_T > 1)
    number = torch.where(many, many.cumsum(0) - 1, -1)
    rows_S, rows_T = [torch.stack([row, number[of]], 1)[many[of]]
                      for row, of in ((chunks.row_S, chunks.of_S), (chunks.row_T, chunks.of_T))]
    count_many = int(many.sum())
    count_all = torch.tensor(len(chunks.first_S) + len(inside_teacher.low) + count_many, device=number.device)
    starts = chunks.first_S, chunks.first_T
    return PieceTerms(*starts, inside_teacher, inside_student, rows_S, rows_T, count_many, count_all)


def _inside(
    fine_next: Tensor, coarse_next: Tensor, fine_first: Tensor, coarse_first: Tensor, fine_count: Tensor,
    pieces: Tensor, low: Tensor, high: Tensor,
) -> Ranges:
    """Positions k >= 1 of chunks with one coarse token, as far as its spelling is the realized one."""
    P = pieces.shape[1]
    k = torch.arange(P, device=pieces.device)
    coarse = coarse_next[coarse_first] if len(coarse_first) else coarse_first
    realized = fine_next[(fine_first[:, None] + k).clamp(max=max(fine_next.numel() - 1, 0))]
    same = (realized == pieces[coarse]) & (k < fine_count[:, None])
    # the k-th token must match too: in context a tokenizer may spell a token otherwise than alone
    chunk, level = (same.cumprod(1)[:, 1:] > 0).nonzero(as_tuple=True)
    level = level + 1
    token, rows = coarse[chunk], (fine_first[chunk] + level, coarse_first[chunk])
    low, high = low[token, level], high[token, level]
    return Ranges(*rows, low, high, level, int((high - low).sum()))


def piece_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor, teacher_next_BT: Tensor,
    terms: PieceTerms, spelling: Spelling, temperature: float = 1.0, weight_BS: Tensor | None = None,
    reduction: str = "sum", group: Any = None,
) -> Two:
    """KL(teacher || student) on events that both vocabularies can express; needs no weights.

    With p = softmax(student / tau), q = softmax(teacher / tau), A[w] the student's spelling of teacher
    token w and B[v] the teacher's of student token v, the sum, times tau^2, of
      1. at the start of every chunk: KL over events, the connected components of w -- A[w][0], v -- B[v][0];
      2. inside one teacher token, after k student tokens: KL(T_k || p_k), where T_k(v) is the teacher's mass,
         normalized, on tokens w whose spelling begins with the k tokens seen and goes on with v;
      3. inside one student token, after k teacher tokens: KL(q_k || S_k), where S_k(w) is the student's mass,
         normalized, on tokens v whose spelling begins with the k tokens seen and goes on with w, and q_k is
         restricted to the w that occur;
      4. in chunks of several tokens on both sides: KL between its two (chain rule) probabilities.
    Every term is >= 0; equal tokenizers give the forward KL exactly.  T_k knows that the teacher's token goes
    on, and the start of the next chunk knows that it stopped: over the data the two average to the teacher's
    belief.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient; may hold NaN
            where there is no chunk.
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        terms: from `piece_terms` of the same batch.
    Returns:
        (sum, count): nats, and the student positions covered.  Inside a student token the terms weigh as the
        token does, and are not counted.
    """
    x = student_logits_BSV.flatten(0, 1)
    y = teacher_logits_BTW.detach().flatten(0, 1)
    rows, values = [terms.start_S], [_start_kl(x, y, terms, spelling, temperature, group)]
    # what the others need of x, in one piece: each selection has a gradient as large as x
    chosen = terms.inside_teacher.fine_row, terms.inside_student.coarse_row, terms.many_S[:, 0]
    sizes = [len(row) for row in chosen]
    x_teacher, x_student, x_many = torch.split(x.index_select(0, torch.cat(chosen)), sizes)
    if len(terms.inside_teacher.low):
        y_teacher = y.index_select(0, terms.inside_teacher.coarse_row)
        fine, coarse, ranges, share = _own_share(x_teacher, y_teacher, terms.inside_teacher, group)
        inside = _inside_teacher_kl(fine, coarse, ranges, spelling, temperature)
        values.append(gather_row_values(inside, share, len(terms.inside_teacher.low), group))
        rows.append(terms.inside_teacher.fine_row)
    if terms.count_many:
        next_M = student_next_BS.reshape(-1)[chosen[2]]
        here = torch.stack([torch.arange(len(x_many), device=x.device), terms.many_S[:, 1]], 1)
        logp_M = _chunk_logp(x_many, next_M, here, terms.count_many, temperature, group)
        logq_M = _chunk_logp(y, teacher_next_BT, terms.many_T, terms.count_many, temperature, group)
        values.append(_bernoulli_kl(logq_M, logp_M))
        rows.append(_second_rows(terms.many_S, terms.count_many))
    value, row = torch.cat(values), torch.cat(rows)
    if len(terms.inside_student.low):  # of the token that begins at coarse_row, so no position of its own
        y_student = y.index_select(0, terms.inside_student.fine_row)
        fine, coarse, ranges, share = _own_share(y_student, x_student, terms.inside_student, group)
        inside = _inside_student_kl(coarse, fine, ranges, spelling, temperature)
        inside = gather_row_values(inside, share, len(terms.inside_student.low), group)
        at = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        at[terms.start_S] = torch.arange(len(terms.start_S), device=x.device)
        value = value.index_add(0, at[terms.inside_student.coarse_row], inside)
    order = row.argsort()
    value = temperature**2 * value[order]
    return reduce_terms(value, row[order], student_next_BS.shape, weight_BS, reduction)


def _start_kl(
    x: Tensor, y: Tensor, terms: PieceTerms, spelling: Spelling, temperature: float, group: Any
) -> Tensor:
    """(C,) KL over events at the start of every chunk."""
    row_S, row_T, share = terms.start_S, terms.start_T, slice(0, len(terms.start_S))
    if group is not None:
        (x, share), (y, _) = columns_to_rows(x[row_S], group), columns_to_rows(y[row_T], group)
        row_S = row_T = torch.arange(len(x), device=x.device)
    how = row_S, at_least_float32(y), row_T, spelling, temperature
    value: Tensor = _WithDerivative.apply(  # type: ignore[no-untyped-call]
        at_least_float32(x), row_S, _event_kl, *how)
    return gather_row_values(value, share, len(terms.start_S), group)


def _own_share(
    fine_NX: Tensor, coarse_NX: Tensor, ranges: Ranges, group: Any
) -> tuple[Tensor, Tensor, Ranges, slice]:
    """Logits of both sides, a row per range, and the ranges; with a group a share of them, whole rows."""
    fine_NX, share = columns_to_rows(fine_NX, group)
    coarse_NX, _ = columns_to_rows(coarse_NX, group)
    own = torch.arange(len(fine_NX), device=fine_NX.device)
    low, high, level = [part[share] for part in ranges[2:5]]
    entries = ranges.entries if group is None else int((high - low).sum())
    return fine_NX, coarse_NX, Ranges(own, own, low, high, level, entries), share


def _second_rows(rows_N2: Tensor, count: int) -> Tensor:
    """(count,) the row after the first one of each group of rows; the first one has the term of the start."""
    first = rows_N2.new_full((count,), torch.iinfo(torch.int64).max)
    return first.scatter_reduce(0, rows_N2[:, 1], rows_N2[:, 0], "amin") + 1


def piece_coverage(
    teacher_logits_BTW: Tensor, terms: PieceTerms, spelling: Spelling, temperature: float = 1.0
) -> dict[str, tuple[Tensor, Tensor]]:
    """What the parts of `piece_kl` cover, each as (sum, count).

    event_coverage: teacher probability, at the starts of chunks, of tokens that belong to an event;
    prefix_coverage: teacher probability of the tokens that T_k is made of, at the positions inside its tokens;
    one_to_one, inside_teacher, inside_student, many: chunks of that shape, of all chunks (1:1; one teacher
    and several student tokens; one student and several teacher tokens; several on both sides).
    """
    with torch.no_grad():
        y = teacher_logits_BTW.detach().flatten(0, 1)
        q = _rows(y, terms.start_T, temperature).softmax(-1)
        ranges, mass = terms.inside_teacher, y.new_zeros((), dtype=q.dtype)
        if len(ranges.low):
            term, place = _flatten(ranges)
            w = spelling.order_W[place]
            on = spelling.pieces_W[w, ranges.level[term]] >= 0
            inside = _rows(y, ranges.coarse_row, temperature).softmax(-1)
            mass = torch.where(on, inside[term, w], 0.0).sum()
        chunks = torch.tensor(len(terms.start_S), device=y.device)
        found = {"event_coverage": (q[:, spelling.event_W >= 0].sum(), chunks),
                 "prefix_coverage": (mass, torch.tensor(len(ranges.low), device=y.device))}
        parts = {"inside_teacher": (ranges.level == 1).sum(),
                 "inside_student": (terms.inside_student.level == 1).sum(),
                 "many": torch.tensor(terms.count_many, device=y.device)}
        parts["one_to_one"] = chunks - sum(parts.values())
        return found | {name: (number, chunks) for name, number in parts.items()}


def _rows(logits: Tensor, index: Tensor, temperature: float) -> Tensor:
    """Some rows, by their numbers."""
    return _soften(logits.index_select(0, index), temperature)


def _used(logits_BNX: Tensor, row_N: Tensor, whole: bool, temperature: float) -> Tensor:
    """The rows that have a chunk; no copy where all have one."""
    logits = logits_BNX.flatten(0, 1)
    return _soften(logits, temperature) if whole else _rows(logits, row_N, temperature)


def _soften(logits: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def _entries(logits: Tensor, row: Tensor, column: Tensor, temperature: float) -> Tensor:
    return _soften(logits[row, column], temperature)


class _WithDerivative(torch.autograd.Function):
    """find(x, *how) = (C,) values of the rows row_C of x (N, V), None for all; (N, V) their derivative."""

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, row_C: Tensor | None, find: Callable[..., Two], *how: Any
    ) -> Tensor:
        value_C, d_NV = find(x_NV, *how)
        ctx.save_for_backward(d_NV, torch.arange(len(d_NV), device=d_NV.device) if row_C is None else row_C)
        ctx.others = 2 + len(how)
        return value_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_NV, row_C = ctx.saved_tensors
        return _scaled(d_NV, row_C, grads[0]), *[None] * ctx.others


class _MixtureDistance(torch.autograd.Function):
    """(C,) values of chunks' probabilities, which are weighted sums of the softmax of their rows; compiled.

    Gradient for the student's logits x (N, V) and its weights (R,) of the rows row_R of the chunks of_R.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, weight_R: Tensor, row_R: Tensor, of_R: Tensor, kernels: Any,
        teacher: tuple[Tensor, ...], *how: Any,
    ) -> Tensor:
        student = x_NV, weight_R, row_R, of_R
        value_C: Tensor
        value_C, d_NV, d_R = kernels.mixture_distance(student, teacher, *how)
        ctx.save_for_backward(d_NV, d_R, row_R, of_R)
        ctx.others = 2 + len(how)
        return value_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_NV, d_R, row_R, of_R = ctx.saved_tensors
        outer_R = grads[0][of_R]
        return _scaled(d_NV, row_R, outer_R), d_R * outer_R, None, None, *[None] * ctx.others


def _scaled(d_NV: Tensor, row_R: Tensor, outer_R: Tensor) -> Tensor:
    """The listed rows times these factors; the others hold 0.  Often all factors are 1."""
    if outer_R.device.type == "cpu" and bool((outer_R == 1).all()):
        return d_NV
    return d_NV * outer_R.new_zeros(len(d_NV)).index_copy_(0, row_R, outer_R)[:, None]


def _compiled(student_logits: Tensor, teacher_logits: Tensor, group: Any = None) -> Any:
    """The module whose compiled rows serve these tensors, or None."""
    if HAS_KERNELS and group is None and all(
            x.device.type == "cpu" and x.dtype == torch.float32 for x in (student_logits, teacher_logits)):
        import cpu_kernels
        return cpu_kernels
    return None


def _event_kl(
    x_NV: Tensor, row_C: Tensor, y_MW: Tensor, teacher_row_C: Tensor, spelling: Spelling, temperature: float
) -> Two:
    """((C,) KL(q || p) over events where a chunk begins; its derivative by x).

    Tokens without an event are left out before the softmax.  By hand, because this is where the time goes:
    the plain form has three times as many passes over [C, V].  With m the mass of an event before it is
    divided by Z, dKL / dx_v = p_v - q_e exp(x_v) / m_e.
    """
    shift = SHIFT / max(temperature, 1)  # lets float32 reach down to log p = -157 of temperature 1
    if kernels := _compiled(x_NV, y_MW):
        found: Two = kernels.event_kl(x_NV, row_C, y_MW, teacher_row_C, *spelling[:3], temperature, shift)
        return found
    # one event more collects the tokens that have none
    event_V, event_W = [torch.where(event < 0, spelling.num_events, event) for event in spelling[:2]]
    p_CV, mass_CE, Z = _event_mass(x_NV, row_C, event_V, spelling.num_events, temperature, shift)
    _, q_CE, y_Z = _event_mass(y_MW, teacher_row_C, event_W, spelling.num_events, temperature, 0)
    # in the precision of the wider one; not 0, whose logarithm would be infinite, and with room above
    limits = torch.finfo(mass_CE.dtype).tiny, torch.finfo(mass_CE.dtype).max ** 0.9
    ratio_CE = torch.div(q_CE, mass_CE).clamp_(*limits)
    value_C = ratio_CE.log().add_(Z.log() - y_Z.log()).mul_(q_CE).sum(-1).div_(y_Z.squeeze(1))
    del mass_CE, q_CE
    factor_CE = (1 / Z - ratio_CE / y_Z).to(p_CV.dtype).div_(temperature)
    factor_CE[:, -1] = 0
    d_CV = factor_CE.index_select(1, event_V).mul_(p_CV)
    return value_C.to(d_CV.dtype), torch.zeros_like(x_NV).index_copy_(0, row_C, d_CV)


def _event_mass(
    logits: Tensor, row_C: Tensor, event_X: Tensor, num_events: int, temperature: float, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits + shift - the largest); its sums over events, tiny where there is nothing; their sum."""
    p_CX = logits.index_select(0, row_C)
    if temperature != 1:
        p_CX.div_(temperature)
    p_CX.sub_(p_CX.amax(-1, keepdim=True).clamp(min=torch.finfo(p_CX.dtype).min) - shift).exp_()
    tiny = torch.finfo(p_CX.dtype).tiny
    mass = p_CX.new_full((len(p_CX), num_events + 1), tiny).index_add_(1, event_X, p_CX)
    mass[:, -1] = tiny
    return p_CX, mass, mass.sum(-1, keepdim=True)


def _segment_logsumexp(x_N: Tensor, segment_N: Tensor, num: int) -> Tensor:
    """(num,) logsumexp of the entries of each segment."""
    top = x_N.new_full((num,), -torch.inf).scatter_reduce(0, segment_N, x_N.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    mass = x_N.new_zeros(num).index_add(0, segment_N, (x_N - top[segment_N]).exp())
    return mass.clamp(min=torch.finfo(mass.dtype).tiny).log() + top  # only an empty segment is below 1


def _flatten(ranges: Ranges) -> Two:
    """(term, place) of every entry of every range, one after the other."""
    sizes = ranges.high - ranges.low
    term = torch.arange(len(sizes), device=sizes.device)
    term = torch.repeat_interleave(term, sizes, output_size=ranges.entries)
    begin = sizes.cumsum(0) - sizes
    return term, ranges.low[term] + torch.arange(len(term), device=sizes.device) - begin[term]


class _Continuations(NamedTuple):
    """The coarse tokens in all ranges (E entries), grouped by the fine token that they go on with.

    There are as many groups as entries, so that no size is read back from the device.  Group of none: term N.

    term_E, token_E, group_E: (E,) range, coarse token, group.
    goes_on_E: (E,) bool, False for a token that ends here.
    term_G, next_G: (E,) range and fine token of each group.
    """

    term_E: Tensor
    token_E: Tensor
    group_E: Tensor
    goes_on_E: Tensor
    term_G: Tensor
    next_G: Tensor


def _continuations(ranges: Ranges, order: Tensor, pieces: Tensor) -> _Continuations:
    term, place = _flatten(ranges)
    token = order[place]
    following = pieces[token, ranges.level[term]]
    goes_on = following >= 0
    new = torch.ones_like(goes_on)  # a range is sorted, so equal (term, following) are neighbors
    new[1:] = (term[1:] != term[:-1]) | (following[1:] != following[:-1])
    group = new.cumsum(0) - 1
    group_term = torch.full_like(term, len(ranges.level)).scatter(
        0, group, torch.where(goes_on, term, len(ranges.level)))
    group_next = torch.zeros_like(token).scatter(0, group, following.clamp(min=0))
    return _Continuations(term, token, group, goes_on, group_term, group_next)


def _group_logp(coarse: Tensor, ranges: Ranges, to: _Continuations, temperature: float) -> Tensor:
    """(E,) log-probability of each group among those of its range, from the coarse side's logits."""
    logp = _entries(coarse, ranges.coarse_row[to.term_E], to.token_E, temperature)
    logp = _segment_logsumexp(torch.where(to.goes_on_E, logp, -torch.inf), to.group_E, ranges.entries)
    return logp - _segment_logsumexp(logp, to.term_G, len(ranges.level) + 1)[to.term_G]


def _inside_teacher_kl(
    x: Tensor, y: Tensor, ranges: Ranges, spelling: Spelling, temperature: float
) -> Tensor:
    N, to = len(ranges.level), _continuations(ranges, spelling.order_W, spelling.pieces_W)
    logp_NV = _rows(x, ranges.fine_row, temperature).log_softmax(-1)
    logp = logp_NV[to.term_G.clamp(max=N - 1), to.next_G].clamp(min=FLOOR)
    logq = _group_logp(y, ranges, to, temperature)
    return logp.new_zeros(N + 1).index_add(0, to.term_G, _kl(logq[:, None], logp[:, None]))[:N]


def _inside_student_kl(
    x: Tensor, y: Tensor, ranges: Ranges, spelling: Spelling, temperature: float
) -> Tensor:
    N, to = len(ranges.level), _continuations(ranges, spelling.order_V, spelling.pieces_V)
    logp = _group_logp(x, ranges, to, temperature)
    row = torch.cat([ranges.fine_row, ranges.fine_row[:1]])[to.term_G]
    logq = _entries(y, row, to.next_G, temperature)
    logq = logq - _segment_logsumexp(logq, to.term_G, N + 1)[to.term_G]
    return logp.new_zeros(N + 1).index_add(0, to.term_G, _kl(logq[:, None], logp[:, None]))[:N]


def _chunk_logp(
    logits: Tensor, next_BX: Tensor, rows: Tensor, count: int, temperature: float, group: Any
) -> Tensor:
    """(count,) log-probability of the realized tokens of each chunk."""
    logp = vocab_log_softmax(_rows(logits, rows[:, 0], temperature), group)
    chosen = vocab_gather(logp, next_BX.reshape(-1)[rows[:, :1]], group).squeeze(1).clamp(min=FLOOR)
    return chosen.new_zeros(count).index_add(0, rows[:, 1], chosen)


def _bernoulli_kl(logq: Tensor, logp: Tensor) -> Tensor:
    """KL(Bern(e^logq) || Bern(e^logp)); probabilities below 1, so that log(1 - p) stays finite."""
    logq, logp = logq.clamp(max=-1e-6), logp.clamp(max=-1e-6)
    log_not_q, log_not_p = torch.log(-torch.expm1(logq)), torch.log(-torch.expm1(logp))
    return logq.exp() * (logq - logp) - torch.expm1(logq) * (log_not_q - log_not_p)


# --- two vocabularies: common tokens, sorted probabilities, the chunks' own bytes --------------------


def common_tokens(indices_VK: Tensor, likelihoods_VK: Tensor, relaxed: bool = False) -> Two:
    """(student ids, teacher ids) of the tokens that both vocabularies share, each used once.

    Args:
        indices_VK, likelihoods_VK: the projection, rows sorted by weight, -1 in unused slots.
        relaxed: False: rows of one slot with weight 1; of one teacher token the lowest student id.  True:
            rows whose top weight is 0.6 or more; of one teacher token the heaviest row, then the lowest id.
    Raises:
        ValueError: there are none, so the loss would silently compare nothing but sorted probabilities.
    """
    top, w = likelihoods_VK[:, 0].double(), indices_VK[:, 0]
    one = (indices_VK[:, 1:] < 0).all(1) & (top > 1 - 1e-6)
    v = ((w >= 0) & ((top >= 0.6) if relaxed else one)).nonzero().squeeze(1)
    if len(v) == 0:
        raise ValueError("the projection has no common token: no row of one slot with weight 1 (-1 marks "
                         "unused slots); build it with projection_tools.build")
    order = v[torch.sort(-top[v], stable=True).indices]  # heaviest first, lowest id first among equals
    order = order[torch.sort(w[order], stable=True).indices]
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = w[order][1:] != w[order][:-1]
    v = order[first].sort().values
    return v, w[v]


def gold(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, common_V: Tensor, common_W: Tensor, temperature: float = 1.0,
    uncommon_topk: int = 8192, average: str = "p", reverse: bool = False, weight_BS: Tensor | None = None,
    reduction: str = "sum", group: Any = None, chunks: Chunks | None = None, rest: Two | None = None,
) -> Two:
    """KL on the tokens that both vocabularies share, plus the distance of the sorted rest.

    Per chunk, with p and q the means of its positions' distributions: tau^2 (KL(q || p) over the common
    tokens and one bucket for all others + sum |sorted p - sorted q| over the others).  With
    `common_tokens(..., relaxed=True)` this is `h_kl`.

    Args:
        common_V, common_W: (N,) int64, from `common_tokens`.
        uncommon_topk: how many of the others are compared, the largest; at most as many as either side has.
        average: "p", or "logp" for the reference (NeMo-RL's gold): means of log-probabilities, not
            renormalized, no bucket; can be negative.
        reverse: KL(p || q).
        rest: `other_tokens` of common_V and of common_W; None: found anew.
    Others and Returns: of `projection_kl`.
    """
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    # KL(q || p) needs what p gives almost nothing
    shift = 0.0 if reverse or average == "logp" else SHIFT / max(temperature, 1)
    if rest is None:
        widths = [vocab_range(logits[0], group)[1] for logits in (student_logits_BSV, teacher_logits_BTW)]
        rest = other_tokens(common_V, widths[0]), other_tokens(common_W, widths[1])
    if average == "p" and (kernels := _compiled(student_logits_BSV, teacher_logits_BTW, group)):
        teacher = (1 / chunks.count_T).float()[chunks.of_T], chunks.row_T, chunks.of_T
        student = (1 / chunks.count_S).float()[chunks.of_S], chunks.row_S, chunks.of_S
        x, y = student_logits_BSV.flatten(0, 1), teacher_logits_BTW.detach().flatten(0, 1)
        k = min(uncommon_topk, *map(len, rest))
        value: Tensor = _MixtureDistance.apply(  # type: ignore[no-untyped-call]
            x, *student, kernels, (y, *teacher), (common_V, common_W), rest, k, temperature, reverse, shift)
        value = temperature**2 * value
        return reduce_terms(value, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)
    x = _used(student_logits_BSV, chunks.row_S, chunks.whole_S, temperature)
    y = _used(teacher_logits_BTW.detach(), chunks.row_T, chunks.whole_T, temperature)
    means, share = [], slice(0)
    for rows, of, count, common in ((x, chunks.of_S, chunks.count_S, common_V),
                                    (y, chunks.of_T, chunks.count_T, common_W)):
        if average == "logp":
            rows = vocab_log_softmax(rows, group).clamp(min=FLOOR)
        elif shift and rows is x:
            rows = (vocab_log_softmax(rows, group) + shift).exp()
        else:
            rows = vocab_softmax(rows, group)
        mean, share = columns_to_rows(chunk_mean(rows, of, count), group)
        means.append(mean)
    k = min(uncommon_topk, *map(len, rest))
    if average == "logp":
        logp, logq = means[0].index_select(1, common_V), means[1].index_select(1, common_W)
        value = _kl(logp, logq) if reverse else _kl(logq, logp)
        p_rest, q_rest = [mean.index_select(1, ids).exp() for mean, ids in zip(means, rest)]
        value = value + (p_rest.topk(k, -1).values - q_rest.topk(k, -1).values).abs().sum(-1)
    else:
        how = (common_V, common_W), rest, k, reverse, shift
        value = _WithDerivative.apply(  # type: ignore[no-untyped-call]
            means[0], None, _common_and_rest, means[1], *how)
    value = gather_row_values(temperature**2 * value, share, len(chunks.first_S), group)
    return reduce_terms(value, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


def other_tokens(ids_N: Tensor, size: int) -> Tensor:
    """(size - N,) ids of the tokens that are not listed; `ids_N` holds none twice."""
    other = torch.ones(size, dtype=torch.bool, device=ids_N.device).index_fill(0, ids_N, False)
    return torch.nonzero_static(other, size=size - len(ids_N)).squeeze(1)


def _common_and_rest(
    p_CV: Tensor, q_CW: Tensor, common: Two, rest: Two, k: int, reverse: bool, shift: float
) -> Two:
    """(C,) what `gold` compares of probabilities p times exp(shift), and q; the derivative by the first.

    By hand, for the sake of time: the plain form has three times as many passes over [C, V].
    """
    how, unshift = (reverse, shift), math.exp(-shift)
    kl, d_common = _mass_kl(p_CV.index_select(1, common[0]), q_CW.index_select(1, common[1]), *how)
    p, q = p_CV.index_select(1, rest[0]), q_CW.index_select(1, rest[1])
    bucket, d_bucket = _mass_kl(p.sum(1, keepdim=True), q.sum(1, keepdim=True), *how)
    distance, d_rest = _sorted_distance(p.mul_(unshift) if shift else p, q, k)
    d_CV = torch.empty_like(p_CV).index_copy_(1, common[0], d_common)
    return kl + bucket + distance, d_CV.index_copy_(1, rest[0], d_rest.mul_(unshift).add_(d_bucket))


def _mass_kl(p_NK: Tensor, q_NK: Tensor, reverse: bool, shift: float) -> Two:
    """(sum q log(q / p), its derivative by p exp(shift)), p_NK being that; overwrites both.

    reverse: sum p log(p / q), for shift 0.
    """
    tiny = torch.finfo(p_NK.dtype).tiny
    p, q = p_NK.clamp_(min=tiny), q_NK.clamp_(min=tiny)
    if reverse:
        log = p.div(q).log_()
        return (p * log).sum(-1), log.add_(1)
    ratio = torch.div(q, p).clamp_(tiny, torch.finfo(p.dtype).max ** 0.9)  # room for what multiplies it
    return q.mul_(ratio.log().add_(shift)).sum(-1), ratio.neg_()


def _sorted_distance(p_NV: Tensor, q_NW: Tensor, k: int) -> Two:
    """((N,) sum |sorted p - sorted q| over the k largest, its derivative by p), for p, q >= 0.

    Beyond the end of a row there are zeros.
    """
    if kernels := _compiled(p_NV, q_NW):
        found: Two = kernels.sorted_distance(p_NV, q_NW, k)
        return found
    (p_NK, place), (q_NK, _) = _largest(p_NV, k), _largest(q_NW, k)
    only_p, only_q = [max(0, a.shape[1] - b.shape[1]) for a, b in ((p_NK, q_NK), (q_NK, p_NK))]
    p_NK, q_NK = F.pad(p_NK, (0, only_q)), F.pad(q_NK, (0, only_p))
    gap = p_NK - q_NK
    sign = gap.sign()[:, : place.shape[1]]
    return gap.abs().sum(-1), torch.zeros_like(p_NV).scatter_(1, place, sign)


def _largest(x_NV: Tensor, k: int) -> Two:
    """(values, places) of the k largest entries of each row, the largest first."""
    return x_NV.topk(k) if k < x_NV.shape[1] else x_NV.sort(-1, descending=True)


def h_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, indices_VK: Tensor, likelihoods_VK: Tensor, **how: Any,
) -> Two:
    """`gold` with the relaxed set of common tokens, found anew at every call (see `common_tokens`)."""
    common = common_tokens(indices_VK, likelihoods_VK, relaxed=True)
    return gold(student_logits_BSV, teacher_logits_BTW, student_chunk_BS, teacher_chunk_BT, *common, **how)


def uld(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor, teacher_next_BT: Tensor,
    student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, temperature: float = 1.0,
    common: tuple[Tensor, Tensor] | None = None, matched_weight: float | None = None,
    weight_BS: Tensor | None = None, reduction: str = "sum", group: Any = None, chunks: Chunks | None = None,
) -> Two:
    """Sum over chunks of sum |sorted p - sorted q| (ULD, arXiv:2402.12030); needs no projection.

    A chunk's distribution is that of its last token, times the probability of the chunk's tokens before it.
    With `common` (the hybrid of TRL's GOLD trainer): matched_weight JSD on the common tokens + (1 -
    matched_weight) times the sorted distance of the others.  For the positional form give every i-th token
    of either side the chunk id i.

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        common: (student ids, teacher ids) of `common_tokens`; None: none.
        matched_weight: 0 to 1; None: the share of the teacher's vocabulary that is common.
    Others and Returns: of `projection_kl`; the value is no tau^2 multiple, since it is linear in p.
    """
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    ends = []
    for logits, next_, row, of, first, count in (
            (student_logits_BSV, student_next_BS, chunks.row_S, chunks.of_S, chunks.first_S, chunks.count_S),
            (teacher_logits_BTW.detach(), teacher_next_BT, chunks.row_T, chunks.of_T, chunks.first_T,
             chunks.count_T)):
        logits, last, before = logits.flatten(0, 1), first + count - 1, None
        if len(row) > len(last):
            others = torch.nonzero_static(row != last[of], size=len(row) - len(last)).squeeze(1)
            rows = torch.stack([row[others], of[others]], 1)
            before = _chunk_logp(logits, next_, rows, len(last), temperature, group).exp()
        ends.append((logits, last, before))
    if common is None and (kernels := _compiled(student_logits_BSV, teacher_logits_BTW, group)):
        number = torch.arange(len(chunks.first_S))
        student, teacher = [(x, x.new_ones(len(last)) if before is None else before, last, number)
                            for x, last, before in ends]
        longest = max(student_logits_BSV.shape[2], teacher_logits_BTW.shape[2])
        value: Tensor = _MixtureDistance.apply(  # type: ignore[no-untyped-call]
            *student, kernels, teacher, None, None, longest, temperature)
        return reduce_terms(value, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)
    sides, share = [], slice(0)
    for logits, last, before in ends:
        at_last, share = columns_to_rows(vocab_softmax(_rows(logits, last, temperature), group), group)
        sides.append(at_last if before is None else at_last * vocab_copy(before, group)[share, None])
    p, q = sides
    if common is None:
        value = _all_sorted(p, q)
    else:
        part = len(common[1]) / q.shape[1] if matched_weight is None else matched_weight
        logs = [side[:, ids].clamp(min=torch.finfo(p.dtype).tiny).log() for side, ids in zip(sides, common)]
        rest = [side.index_select(1, other_tokens(ids, side.shape[1])) for side, ids in zip(sides, common)]
        mixed = _mix(logs[0], logs[1], 0.5)
        matched = 0.5 * _kl(logs[1], mixed) + 0.5 * _kl(logs[0], mixed)
        value = part * matched + (1 - part) * _all_sorted(*rest)
    value = gather_row_values(value, share, len(chunks.first_S), group)
    return reduce_terms(value, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


def _all_sorted(p_NV: Tensor, q_NW: Tensor) -> Tensor:
    """(N,) sum |sorted p - sorted q| over all entries."""
    how = q_NW, max(p_NV.shape[1], q_NW.shape[1])
    value: Tensor = _WithDerivative.apply(p_NV, None, _sorted_distance, *how)  # type: ignore[no-untyped-call]
    return value


def alm(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor, teacher_next_BT: Tensor,
    student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, temperature: float = 1.0, mode: str = "binary_kl",
    weight_BS: Tensor | None = None, reduction: str = "sum", group: Any = None, chunks: Chunks | None = None,
) -> Two:
    """Sum over chunks of f(q, p), the two models' probabilities of the chunk's own bytes (arXiv:2503.20083).

    p and q are products over the chunk's tokens; temperature tau raises them to 1 / tau; a factor of e^-1e-6
    keeps 1 - p above 0.  Modes:
      binary_kl: KL(Bern(q) || Bern(p));  binary_kl_reverse: KL(Bern(p) || Bern(q));
      binary_ce: the first plus the entropy of Bern(q), which is not 0 at agreement;
      temperature_limit: lim tau KL(Bern(q^(1/tau)) || Bern(p^(1/tau))) for tau -> inf
        = s - t - t log(s / t), with s = -log p, t = -log q;
      squared, absolute: (log p - log q)^2, |log p - log q|.

    Args:
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        temperature: tau, > 0; not used by the last three modes.
        mode: see above.
    Others and Returns: of `projection_kl`; no tau^2, as in the paper.
    Raises:
        ValueError: unknown mode.
    """
    chunks = chunks or find_chunks(student_chunk_BS, teacher_chunk_BT)
    logp, logq = [
        _chunk_logp(logits.flatten(0, 1), next_, torch.stack([row, of], 1), len(chunks.first_S), 1.0, group)
        for logits, next_, row, of in (
            (student_logits_BSV, student_next_BS, chunks.row_S, chunks.of_S),
            (teacher_logits_BTW.detach(), teacher_next_BT, chunks.row_T, chunks.of_T))]
    if mode in ("binary_kl", "binary_kl_reverse", "binary_ce"):
        logp, logq = logp / temperature - 1e-6, logq / temperature - 1e-6
    if mode == "binary_kl":
        value = _bernoulli_kl(logq, logp)
    elif mode == "binary_kl_reverse":
        value = _bernoulli_kl(logp, logq)
    elif mode == "binary_ce":
        value = -logq.exp() * logp + torch.expm1(logq) * torch.log(-torch.expm1(logp))
    elif mode == "temperature_limit":
        s, t = (-logp).clamp(min=1e-6), (-logq).clamp(min=1e-6)
        value = s - t - t * (s / t).log()
    elif mode in ("squared", "absolute"):
        value = (logp - logq).square() if mode == "squared" else (logp - logq).abs()
    else:
        raise ValueError(f"mode={mode!r}: expected binary_kl, binary_kl_reverse, binary_ce, "
                         "temperature_limit, squared or absolute")
    return reduce_terms(value, chunks.first_S, student_chunk_BS.shape, weight_BS, reduction)


# --- several teachers -------------------------------------------------------------------------------


def teacher_scores(logits_BTW: Tensor, next_BT: Tensor, mask_BT: Tensor, kind: str = "ce") -> Tensor:
    """(B,) how sure a teacher is of each sample, the higher the better, without gradient.

    Args:
        next_BT: int64, the token that each position predicts; used by "ce".
        mask_BT: bool, positions that count.
        kind: "ce": minus the mean cross-entropy in nats; "entropy": minus the mean entropy; "max_prob": mean
            of the largest probability.  All are per token: those of different tokenizers compare roughly.
    Raises:
        ValueError: unknown kind.
    """
    with torch.no_grad():
        logp = at_least_float32(logits_BTW[mask_BT]).log_softmax(-1).clamp(min=FLOOR)
        if kind == "ce":
            value = logp.gather(1, next_BT[mask_BT][:, None]).squeeze(1)
        elif kind == "entropy":
            value = (logp.exp() * logp).sum(-1)
        elif kind == "max_prob":
            value = logp.amax(-1).exp()
        else:
            raise ValueError(f"kind={kind!r}: expected 'ce', 'entropy' or 'max_prob'")
        row = mask_BT.reshape(-1).nonzero().squeeze(1)
        total, count = reduce_terms(value, row, mask_BT.shape, None, "sample")
        return total / count.clamp(min=1)


def teacher_weights(scores_MB: Tensor, alpha: float = 1.0, select: bool = False) -> Tensor:
    """(M, B) weights of M teachers, summing to 1: softmax(alpha * score) per sample, or 1 for the best."""
    if select:
        return F.one_hot(scores_MB.argmax(0), len(scores_MB)).T.to(scores_MB.dtype)
    return (alpha * scores_MB).softmax(0)


def vocabulary_factors(sizes_M: list[int]) -> Tensor:
    """(M,) log W_i / log min W: a divergence over more tokens is larger by about this; divide by it."""
    logs = torch.tensor(sizes_M, dtype=torch.float64).log()
    return logs / logs.min()


def average_teachers(logits_M: list[Tensor], weights_M: Tensor | None = None, space: str = "p") -> Tensor:
    """Logits of the average of teachers of one vocabulary.

    Args:
        logits_M: M tensors (B, T, W).
        weights_M: (M,) or (M, B), summing to 1 over the teachers; None: equal.
        space: "p": log of the mean probability; "logits": mean of the logits.
    Raises:
        ValueError: unknown space.
    """
    if space not in ("p", "logits"):
        raise ValueError(f"space={space!r}: expected 'p' or 'logits'")
    rows = [at_least_float32(x) for x in logits_M]
    stacked = torch.stack([x.log_softmax(-1) for x in rows] if space == "p" else rows)
    weights = stacked.new_full((len(rows),), 1 / len(rows)) if weights_M is None else weights_M.to(stacked)
    weights = weights.reshape(*weights.shape, *[1] * (stacked.dim() - weights.dim()))
    return (stacked + weights.log()).logsumexp(0) if space == "p" else (weights * stacked).sum(0)


def dynamic_scale(ce: Tensor, kd: Tensor) -> Tensor:
    """stopgrad(CE / KD), the factor that makes the distillation loss as large as the cross-entropy.

    Args:
        ce, kd: means over the *whole* step on all ranks (else the gradient's direction depends on the cut).
    """
    return (ce.detach() / kd.detach().clamp(min=1e-12)).to(torch.float32)


# --- metrics ---------------------------------------------------------------------------------------


def agreement(student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, mask_BS: Tensor) -> Two:
    """(positions where both models' likeliest token is the same, positions); one vocabulary."""
    same = student_logits_BSV[mask_BS].argmax(-1) == teacher_logits_BSV[mask_BS].argmax(-1)
    return same.sum(), mask_BS.sum()


def projected_agreement(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, indices_VK: Tensor,
) -> Two:
    """(chunks at whose start the teacher's likeliest token is the image of the student's, chunks)."""
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    v = student_logits_BSV.flatten(0, 1)[chunks.first_S].argmax(-1)
    w = teacher_logits_BTW.flatten(0, 1)[chunks.first_T].argmax(-1)
    return (indices_VK[v, 0] == w).sum(), torch.tensor(len(v), device=v.device)


def accuracy(logits_BSV: Tensor, labels_BS: Tensor) -> Two:
    """(positions whose likeliest token is the label, labeled positions)."""
    keep = labels_BS != -100
    return (logits_BSV[keep].argmax(-1) == labels_BS[keep]).sum(), keep.sum()


def entropy(logits_BSV: Tensor, mask_BS: Tensor) -> Two:
    """(sum of the entropies in nats, positions)."""
    logp = at_least_float32(logits_BSV.detach()[mask_BS]).log_softmax(-1).clamp(min=FLOOR)
    return -(logp.exp() * logp).sum(), mask_BS.sum()


def kept_mass(logits_BTW: Tensor, mask_BT: Tensor, kept_K: Tensor) -> Two:
    """(sum of the probability on the kept columns, positions)."""
    p = at_least_float32(logits_BTW.detach()[mask_BT]).softmax(-1)
    return p[:, kept_K].sum(), mask_BT.sum()
