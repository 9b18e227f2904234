"""Write out the gradients of losses that compare whole chunks, see fused.py and losses.py.

Each writes what it has of a chunk over the rows of its tokens, with the cross-entropy.

Shapes: n, m student and teacher rows of a sub-tile; C chunks, L of them with several rows; V, W
vocabularies; K columns of the teacher that are compared; U, Z tokens of the student and the teacher
that are not common; E entries of a projection.

Tests: tests/test_fused.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from isogloss import losses
from isogloss.losses import EPSILON, FLOOR, TINY_MASS, at_least_float32
from isogloss.objective.fused import WrittenSums, text_and_gradient, weights_of


def of_chunks(value_C, row_S, of_S, like_n):
    """Return (n,) the value of each row's chunk, 0 of rows without one."""
    return torch.zeros_like(like_n).index_copy(0, row_S, value_C.to(like_n.dtype)[of_S])


# --- probabilities of the text --------------------------------------------------------------------


def token_logp(x_nV, label_n, temperature=1.0):
    """Return (n,) log-probabilities of the labels, at least float32; of -100 those of any token."""
    x = at_least_float32(x_nV) / temperature
    logit_n = x.gather(1, label_n.clamp(min=0)[:, None])[:, 0]
    return logit_n - x.logsumexp(-1)


def write_tokens(x_nV, factors, *, label_n, slope_n, has_text):
    """Write the gradient of the cross-entropy, and of what is a function of `token_logp`, over x.

    Args:
        factors: (2 or more,) of cross-entropy and that function in the gradient.
        slope_n: its derivative by the log-probability of each label.
    Returns:
        (sum of the cross-entropy (), how many labels are the likeliest ()).
    """
    x = at_least_float32(x_nV)
    ce_n, correct_n, of_text, _ = text_and_gradient(x, label_n, has_text=True)
    share_n = factors[0] * has_text - factors[1] * slope_n
    x_nV.copy_(share_n[:, None] * of_text)
    return has_text * ce_n.sum(), has_text * correct_n.sum()


@dataclass
class AlmGradient:
    """Write the gradient of `losses.alm`, which depends on the probabilities of the text alone.

    Attributes:
        temperature: see there.
        compiler: see `compiler.loss_compiler`.
    """

    temperature: float
    compiler: Callable
    live_copies = 3.3

    def __call__(self, student_nV, teacher_mW, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        chunks = sub_tile.terms
        logp_of = self.compiler(token_logp)
        logp_n = logp_of(student_nV, sub_tile.student_labels).requires_grad_()
        logq_m = logp_of(teacher_mW, sub_tile.teacher_labels)
        num_chunks = len(chunks.first_S)
        with torch.enable_grad():
            logp_C = losses.sum_of_tokens(logp_n[chunks.row_S], chunks.of_S, num_chunks)
            logq_C = losses.sum_of_tokens(logq_m[chunks.row_T], chunks.of_T, num_chunks)
            value_C = losses.alm_of_chunks(logp_C, logq_C, self.temperature)
            weight_n = weights_of(sub_tile, student_nV)
            kd = (weight_n.index_select(0, chunks.first_S) * value_C).sum()
            [slope_n] = torch.autograd.grad(kd, logp_n)
        ce, correct = self.compiler(write_tokens)(
            student_nV, factors, label_n=sub_tile.student_labels, slope_n=slope_n,
            has_text=has_text)
        return WrittenSums(ce, kd.detach(), correct)


# --- sorted probabilities -------------------------------------------------------------------------


def chunk_ends(x_nV, label_n, chunks, side, temperature):
    """Return the rows (C,) of the last token of each chunk, and what `uld` needs of them.

    Args:
        side: "S" or "T", whose rows these are.
    Returns:
        (row_C, their logsumexp (C,), probability (C,) of the tokens before, log-probabilities of
        all tokens (n,)).
    """
    first_C, count_C, row, of = [getattr(chunks, f"{name}_{side}")
                                 for name in ("first", "count", "row", "of")]
    x = at_least_float32(x_nV) / temperature
    total_n = x.logsumexp(-1)
    logp_n = x.gather(1, label_n.clamp(min=0)[:, None])[:, 0] - total_n
    row_C = first_C + count_C - 1
    before = logp_n[row].clamp(min=FLOOR).masked_fill(row == row_C[of], 0.0)
    before_C = losses.row_sums(before, of, len(row_C)).exp()
    return row_C, total_n[row_C], before_C, logp_n


def signs_of_ranks(sorted_CV, order_CV, sorted_CW, ends, weight_C, temperature):
    """Compare sorted probabilities, of logits in falling order.

    Args:
        order_CV: the token of each rank.
        ends: (logsumexp (C,), probability (C,) of the tokens before) of the student, and both of
            the teacher.
        weight_C: of the chunks.
    Returns:
        (weighted sum of the distances (), the derivative of each chunk's by the probability of each
        token (C, V) int8, their mean by the student's probabilities (C,)).
    """
    V, W = sorted_CV.shape[1], sorted_CW.shape[1]
    width = max(V, W)
    p_CX, q_CX = [
        F.pad((at_least_float32(sorted_CX) / temperature - total_C[:, None]).exp(),
              (0, width - sorted_CX.shape[1]))
        for sorted_CX, total_C in ((sorted_CV, ends[0]), (sorted_CW, ends[2]))]
    gap_CX = p_CX * ends[1][:, None] - q_CX * ends[3][:, None]
    sign_CX = gap_CX.sign()
    mean_C = (sign_CX * p_CX).sum(-1)
    by_token = torch.zeros_like(order_CV, dtype=torch.int8).scatter(
        1, order_CV, sign_CX[:, :V].to(torch.int8))
    return (weight_C * gap_CX.abs().sum(-1)).sum(), by_token, mean_C


def write_ends(
    x_nV, factors, *, sign_CV, mean_C, before_C, weight_C, row_C, logp_n, chunks, label_n,
    temperature, has_text
):
    """Write the gradient of sorted distances, and of the text, over x.

    Args:
        sign_CV, mean_C: see `signs_of_ranks`.
        row_C, before_C, logp_n: see `chunk_ends`, of the student.
    Returns:
        (sum of the cross-entropy (), how many labels are the likeliest ()).
    """
    x = at_least_float32(x_nV)
    slope_C = weight_C * before_C / temperature
    numbers = torch.arange(len(row_C), device=x.device)
    chunk_n = torch.full_like(label_n, -1).index_copy(0, row_C, numbers)
    is_end_n = chunk_n >= 0
    chunk_n = chunk_n.clamp(min=0)
    slope_n = torch.where(is_end_n, slope_C[chunk_n], 0.0)
    gap = sign_CV.index_select(0, chunk_n).to(x.dtype) - mean_C[chunk_n][:, None]
    # the tokens before: the distance is linear in their probability
    before_n = of_chunks(slope_C * mean_C, chunks.row_S, chunks.of_S, logp_n)
    before_n = before_n.masked_fill(is_end_n | (logp_n <= FLOOR), 0.0)
    is_label = torch.arange(x.shape[1], device=x.device) == label_n[:, None]
    p = (x / temperature).softmax(-1)
    of_ends = torch.where(is_end_n[:, None], slope_n[:, None] * gap * p, 0.0)
    of_tokens = before_n[:, None] * (is_label.to(x.dtype) - p)
    of_tokens = torch.where(before_n[:, None] != 0, of_tokens, 0.0)
    ce_n, correct_n, of_text, _ = text_and_gradient(x, label_n, has_text)
    x_nV.copy_(factors[0] * of_text + factors[1] * (of_ends + of_tokens))
    return ce_n.sum(), correct_n.sum()


@dataclass
class UldGradient:
    """Write the gradient of `losses.uld`: it sorts logits as they are, not probabilities.

    Attributes:
        temperature: see there.
        compiler: see `compiler.loss_compiler`.
    """

    temperature: float
    compiler: Callable
    live_copies = 6.0  # numbers of tokens are int64

    def __call__(self, student_nV, teacher_mW, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        chunks = sub_tile.terms
        label_n = sub_tile.student_labels
        find_ends = self.compiler(chunk_ends)
        row_S, total_S, before_S, logp_n = find_ends(
            student_nV, label_n, chunks, "S", self.temperature)
        row_T, total_T, before_T, _ = find_ends(
            teacher_mW, sub_tile.teacher_labels, chunks, "T", self.temperature)
        weight_C = weights_of(sub_tile, student_nV).index_select(0, chunks.first_S)
        sorted_CV, order_CV = student_nV.index_select(0, row_S).sort(-1, descending=True)
        sorted_CW = teacher_mW.index_select(0, row_T).sort(-1, descending=True).values
        kd, sign_CV, mean_C = self.compiler(signs_of_ranks)(
            sorted_CV, order_CV, sorted_CW, (total_S, before_S, total_T, before_T), weight_C,
            self.temperature)
        ce, correct = self.compiler(write_ends)(
            student_nV, factors, sign_CV=sign_CV, mean_C=mean_C, before_C=before_S,
            weight_C=weight_C, row_C=row_S, logp_n=logp_n, chunks=chunks, label_n=label_n,
            temperature=self.temperature, has_text=has_text)
        return WrittenSums(ce, kd, correct)


# --- means over chunks ----------------------------------------------------------------------------


class RowLogs(NamedTuple):
    """Hold what makes log-probabilities of the rows of one model, and of its chunks.

    Attributes:
        total_n: logsumexp of the rows.
        mean_LX: logarithm of the mean of the probabilities, of the chunks with several rows.
        number_C: the number of each chunk among these; -1: it has one row.
    """

    total_n: torch.Tensor
    mean_LX: torch.Tensor
    number_C: torch.Tensor


def row_logs(x_nX, chunks, side, num_more, temperature):
    """Return the RowLogs of logits; what is read of chunks with one row is not written again.

    Args:
        side: "S" or "T", whose logits these are; num_more: how many rows are not the first of a
            chunk.
    """
    first_C, count_C, row = [getattr(chunks, f"{name}_{side}")
                             for name in ("first", "count", "row")]
    x = at_least_float32(x_nX) / temperature
    total_n = x.logsumexp(-1)
    if not num_more:
        return RowLogs(total_n, x[:0], torch.full_like(first_C, -1))
    more_C = count_C - 1
    of_E = torch.repeat_interleave(more_C, output_size=num_more)
    place_E = torch.arange(num_more, device=row.device) + of_E + 1
    # the chunks with several rows, numbered: their first rows, and where the others begin
    is_many_C = more_C > 0
    number_C = is_many_C.cumsum(0) - 1
    num = min(num_more, len(first_C))
    slot_C = torch.where(is_many_C, number_C, num)
    begin_C = torch.where(is_many_C, more_C.cumsum(0) - more_C, num_more)
    start_L = torch.full_like(row[: num + 1], num_more).scatter(0, slot_C, begin_C)
    first_L, count_L = [torch.ones_like(row[: num + 1]).scatter(0, slot_C, value_C)[:-1]
                        for value_C in (first_C, count_C)]
    segments = losses.Segments(number_C[of_E], start_L)
    logp_EX, logp_LX = [logp_of_rows(x, total_n, rows) for rows in (row[place_E], first_L)]
    top_LX = torch.maximum(segments.reduce(logp_EX, "max"), logp_LX)
    more_LX = segments.reduce((logp_EX - top_LX[segments.of_E]).exp(), "sum")
    mean_LX = ((logp_LX - top_LX).exp() + more_LX).log() + top_LX
    mean_LX = mean_LX - count_L.to(mean_LX.dtype).log()[:, None]
    return RowLogs(total_n, mean_LX, number_C.masked_fill(~is_many_C, -1))


def logp_of_rows(x_nX, total_n, row_N):
    """Return the log-probabilities (N, X) of rows, each at least FLOOR."""
    logp_NX = x_nX.index_select(0, row_N) - total_n.index_select(0, row_N)[:, None]
    return logp_NX.clamp(min=FLOOR)


def log_means(x_nX, logs, first_C):
    """Return the (C, X) logarithm of the mean of the probabilities of each chunk's rows.

    Args:
        x_nX: logits by the temperature; logs: RowLogs of them.
        first_C: the first row of each chunk.
    """
    logp_CX = logp_of_rows(x_nX, logs.total_n, first_C)
    if not len(logs.mean_LX):
        return logp_CX
    mean_CX = logs.mean_LX.index_select(0, logs.number_C.clamp(min=0))
    return torch.where(logs.number_C[:, None] >= 0, mean_CX, logp_CX)


# --- common tokens and the others -----------------------------------------------------------------


class Vocabularies(NamedTuple):
    """Tell which tokens are common; int64.

    Attributes:
        common_V: (V,) the teacher's token that is the same, -1 for none.
        other_V: (V,) the number among others_U of a token without one, -1 of a common token.
        others_U, others_Z: all other tokens of the student and the teacher.
    """

    common_V: torch.Tensor
    other_V: torch.Tensor
    others_U: torch.Tensor
    others_Z: torch.Tensor

    @classmethod
    def of(cls, common, others):
        """Make them of `losses.TokenIds` of the common tokens and of (others_U, others_Z)."""
        V = len(common[0]) + len(others[0])
        none_V = torch.full((V,), -1, device=common[0].device)
        numbers = torch.arange(len(others[0]), device=none_V.device)
        return cls(none_V.index_copy(0, *common), none_V.index_copy(0, others[0], numbers), *others)


def logp_of_others(x_nX, logs, first_C, others, temperature):
    """Return the log-probabilities (C, others) of the tokens of a model that are not common."""
    x = at_least_float32(x_nX) / temperature
    return log_means(x, logs, first_C).index_select(1, others)


def common_slopes(
    x_nV, y_mW, *, logs, others, largest, chunks, vocabularies, weight_n, temperature, reverse
):
    """Compare the chunks as `losses.gold` does.

    Args:
        logs: RowLogs of the student and of the teacher.
        others: see `logp_of_others`, of both.
        largest: (log-probabilities (C, k) of the student's likeliest other tokens, their numbers
            among these, those of the teacher's), in falling order.
    Returns:
        (weighted sum (), its derivatives (C, V) by the logarithms of the student's means, of how
        many chunks both models find the same common token the likeliest ()).
    """
    x, y = [at_least_float32(logits) / temperature for logits in (x_nV, y_mW)]
    logp_CV = log_means(x, logs[0], chunks.first_S)
    logq_CW = log_means(y, logs[1], chunks.first_T)
    weight_C = temperature**2 * weight_n.index_select(0, chunks.first_S)
    gap_Ck = largest[0].exp() - largest[2].exp()
    sign_CU = torch.zeros_like(others[0]).scatter(1, largest[1], gap_Ck.sign())
    # the bucket of all others
    logp_C, logq_C = [log.logsumexp(-1) for log in others]
    bucket_C = logp_C.clamp(min=FLOOR)
    value_C, slope_C = kl_and_slope(bucket_C, logq_C.clamp(min=FLOOR), reverse)
    slope_C = slope_C.masked_fill(logp_C <= FLOOR, 0.0)
    # the common tokens, at the place of the student's
    is_common = (vocabularies.common_V >= 0)[None]
    logq_CV = logq_CW.index_select(1, vocabularies.common_V.clamp(min=0))
    value_CV, slope_CV = kl_and_slope(logp_CV, logq_CV, reverse)
    value_C = value_C + torch.where(is_common, value_CV, 0.0).sum(-1) + gap_Ck.abs().sum(-1)
    likely = [log.masked_fill(~is_common, -torch.inf).argmax(-1) for log in (logp_CV, logq_CV)]
    of_others = slope_C[:, None] * (logp_CV - bucket_C[:, None]).exp()
    number_V = vocabularies.other_V.clamp(min=0)
    of_others = of_others + logp_CV.exp() * sign_CU.index_select(1, number_V)
    slope_CV = weight_C[:, None] * torch.where(is_common, slope_CV, of_others)
    agreed = (likely[0] == likely[1]).sum(dtype=torch.float32)
    return (weight_C * value_C).sum(), slope_CV, agreed


def write_means(
    x_nV, factors, *, slope_CV, logs, chunks, label_n, temperature, has_text
):
    """Write the gradient of what depends on `log_means`, and of the text, over x.

    Args:
        slope_CV: the derivatives by these logarithms; logs: RowLogs of x.
    Returns:
        (sum of the cross-entropy (), how many labels are the likeliest ()).
    """
    x = at_least_float32(x_nV) / temperature
    numbers = torch.arange(len(slope_CV), device=x.device)
    chunk_n = torch.full_like(label_n, -1).index_copy(0, chunks.row_S, numbers[chunks.of_S])
    has_chunk_n1 = (chunk_n >= 0)[:, None]
    chunk_n = chunk_n.clamp(min=0)
    logp_nV = x - logs.total_n[:, None]
    d_nV = slope_CV.index_select(0, chunk_n).masked_fill(logp_nV <= FLOOR, 0.0)
    if len(logs.mean_LX):  # the part of the row in the mean; all of it where the chunk has one
        number_n1 = logs.number_C[chunk_n][:, None]
        mean_nV = logs.mean_LX.index_select(0, number_n1[:, 0].clamp(min=0))
        d_nV = torch.where(number_n1 >= 0, d_nV * (logp_nV - mean_nV).exp(), d_nV)
    d_nV = d_nV - logp_nV.exp() * d_nV.sum(-1, keepdim=True)
    scale_n = 1 / (temperature * chunks.count_S[chunk_n])
    d_nV = torch.where(has_chunk_n1, scale_n[:, None] * d_nV, 0.0)
    ce_n, correct_n, of_text, _ = text_and_gradient(at_least_float32(x_nV), label_n, has_text)
    x_nV.copy_(factors[0] * of_text + factors[1] * d_nV)
    return ce_n.sum(), correct_n.sum()


def kl_and_slope(logp, logq, reverse):
    """Return the terms of KL(q || p), or of KL(p || q), and their derivatives by log p."""
    if reverse:
        p = logp.exp()
        return p * (logp - logq), p * (logp - logq + 1)
    q = logq.exp()
    return q * (logq - logp), -q


@dataclass
class GoldGradient:
    """Write the gradient of `losses.gold` with means of probabilities.

    Attributes:
        vocabularies: Vocabularies.
        temperature, uncommon_topk, reverse: see there.
        compiler: see `compiler.loss_compiler`.
    """

    vocabularies: Vocabularies
    temperature: float
    uncommon_topk: int
    reverse: bool
    compiler: Callable
    live_copies = 6.4

    def __call__(self, student_nV, teacher_mW, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        chunks = sub_tile.terms
        sides = (student_nV, "S", self.vocabularies.others_U), (
            teacher_mW, "T", self.vocabularies.others_Z)
        logs, others = [], []
        for logits, side, ids in sides:
            first_C, row = [getattr(chunks, f"{name}_{side}") for name in ("first", "row")]
            logs.append(self.compiler(row_logs)(
                logits, chunks, side, len(row) - len(first_C), self.temperature))
            others.append(self.compiler(logp_of_others)(
                logits, logs[-1], first_C, ids, self.temperature))
        num_compared = min(self.uncommon_topk, *[log.shape[1] for log in others])
        largest = *others[0].topk(num_compared), others[1].topk(num_compared).values
        kd, slope_CV, agreed = self.compiler(common_slopes)(
            student_nV, teacher_mW, logs=logs, others=others, largest=largest, chunks=chunks,
            vocabularies=self.vocabularies, weight_n=weights_of(sub_tile, student_nV),
            temperature=self.temperature, reverse=self.reverse)
        ce, correct = self.compiler(write_means)(
            student_nV, factors, slope_CV=slope_CV, logs=logs[0], chunks=chunks,
            label_n=sub_tile.student_labels, temperature=self.temperature, has_text=has_text)
        return WrittenSums(ce, kd, correct, agreed)


# --- projections ----------------------------------------------------------------------------------


class Projection(NamedTuple):
    """Hold the entries of a projection in the kept columns, by teacher column and by token.

    Attributes:
        entries: `losses.Entries`.
        columns: `losses.Columns` of the entries of each kept column; tokens: of each student token.
    """

    entries: losses.Entries
    columns: losses.Columns
    tokens: losses.Columns

    @classmethod
    def of(cls, entries, num_tokens):
        """Sort entries; num_tokens: V.  Waits for a device that is not the CPU."""
        return cls(entries, losses.Columns.of(entries.column_E, entries.width),
                   losses.Columns.of(entries.row_E, num_tokens))


def write_projected(
    x_nV, y_mK, factors, *, projection, chunks, weight_n, label_n, temperature, reverse, has_text
):
    """Write the gradient of `losses.projection_kl`, and of the text, over x.

    Returns:
        WrittenSums.
    """
    entries, columns, tokens = projection
    x = at_least_float32(x_nV) / temperature
    total_n = x.logsumexp(-1)
    row_S, of_S, count_C = chunks.row_S, chunks.of_S, chunks.count_S
    x_NE = x.index_select(0, row_S).index_select(1, entries.row_E)
    weight_E = entries.weight_E.to(x.dtype)
    r_NK = columns.sum((x_NE - total_n.index_select(0, row_S)[:, None]).exp() * weight_E)
    all_N1 = r_NK.sum(-1, keepdim=True) + EPSILON
    r_NK = r_NK / all_N1
    r_CK = losses.chunk_mean(r_NK, of_S, count_C)
    q_MK = (at_least_float32(y_mK.index_select(0, chunks.row_T)) / temperature).softmax(-1)
    q_CK = losses.chunk_mean(q_MK, chunks.of_T, chunks.count_T)
    logq_CK = q_CK.clamp(min=TINY_MASS).log()
    logp_CK = (r_CK + EPSILON).log()
    value_CK, slope_CK = kl_and_slope(logp_CK, logq_CK, reverse)
    weight_C = temperature**2 * weight_n.index_select(0, chunks.first_S)
    d_CK = (weight_C / count_C)[:, None] * slope_CK / (r_CK + EPSILON)
    d_NK = d_CK.index_select(0, of_S)
    d_NK = (d_NK - (d_NK * r_NK).sum(-1, keepdim=True)) / all_N1
    d_NE = d_NK.index_select(1, entries.column_E) * weight_E
    mean_N = (d_NK * r_NK * all_N1).sum(-1)
    d_NV = (tokens.sum(d_NE) - mean_N[:, None]) / temperature
    numbers = torch.arange(len(row_S), device=x.device)
    number_n = torch.full_like(label_n, -1).index_copy(0, row_S, numbers)
    d_nV = d_NV.index_select(0, number_n.clamp(min=0)) * (x - total_n[:, None]).exp()
    d_nV = torch.where((number_n >= 0)[:, None], d_nV, 0.0)
    ce_n, correct_n, of_text, _ = text_and_gradient(at_least_float32(x_nV), label_n, has_text)
    kd = (weight_C * value_CK.sum(-1)).sum()
    agreed = (logp_CK.argmax(-1) == logq_CK.argmax(-1)).sum(dtype=torch.float32)
    x_nV.copy_(factors[0] * of_text + factors[1] * d_nV)
    return WrittenSums(ce_n.sum(), kd, correct_n.sum(), agreed)


@dataclass
class ProjectionGradient:
    """Write the gradient of `losses.projection_kl` with means of probabilities.

    Attributes:
        projection: Projection.
        temperature, reverse: see there.
        compiler: see `compiler.loss_compiler`.
    """

    projection: Projection
    temperature: float
    reverse: bool
    compiler: Callable
    live_copies = 4.2

    def __call__(self, student_nV, teacher_mK, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        return self.compiler(write_projected)(
            student_nV, teacher_mK, factors, projection=self.projection, chunks=sub_tile.terms,
            weight_n=weights_of(sub_tile, student_nV), label_n=sub_tile.student_labels,
            temperature=self.temperature, reverse=self.reverse, has_text=has_text)
