"""Divergences between a teacher and a student whose vocabularies differ, and the student's own cross-entropy.

Two models with different tokenizers are compared chunk by chunk: a chunk is a span of text that starts and
ends on a token boundary of both sides (align.py finds them).  `piece_kl` compares the two next-token
distributions on events that both vocabularies can express; `projection_kl` maps the student's distribution
into the teacher's vocabulary.  Every loss returns (sum, count) in at least float32, also under autocast:
the caller divides by the count over the *whole* batch, so that neither micro-batches nor ranks change the
result.

Shapes: B samples, S student tokens, T teacher tokens, C chunks, V student vocabulary, W teacher vocabulary,
K kept entries, P pieces of a spelling, N rows of terms.  Logits at position t predict token t + 1, and every
``*_next`` and ``*_chunk`` argument is *shifted already*: entry t speaks of the token that position t
predicts. Logits must be cut to the tokenizer's own vocabulary (no padding rows of the lm_head).

Needs torch only.  Copy this file into your own repository.  Tests: tests/test_losses.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT = 80.0  # nats; see _event_logp
EPSILON = 1e-10  # of projected mass, so that a teacher token that no student token says costs a finite amount


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def next_token_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log p(next token).

    Args:
        logits_BSV: (B, S, V), any float type; may hold NaN where the label is -100.
        labels_BS: (B, S) int64, the token that each position predicts (shifted already); -100: none.
    Returns:
        (sum, count): nats over labelled positions, and how many there are.
    """
    keep = labels_BS != -100  # rows are selected, not masked: 0 * NaN would reach the gradient
    rows = at_least_float32(logits_BSV[keep])
    return F.cross_entropy(rows, labels_BS[keep], reduction="sum"), keep.sum()


# --- chunks ---------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """Where the chunks of a batch begin, and how long they are; only chunks with tokens on both sides.

    first_S, first_T: (C,) int64 row, of the flattened (B * S) / (B * T), that predicts the first token.
    count_S, count_T: (C,) int64, tokens of the chunk on either side.
    id_S, id_T: (B * S,) / (B * T,) int64, number of the chunk, -1 where there is none.
    """

    first_S: Tensor
    first_T: Tensor
    count_S: Tensor
    count_T: Tensor
    id_S: Tensor
    id_T: Tensor


def find_chunks(student_chunk_BS: Tensor, teacher_chunk_BT: Tensor) -> Chunks:
    """Number the chunks of a batch and measure them.

    Args:
        student_chunk_BS, teacher_chunk_BT: (B, S) and (B, T) int64, shifted chunk ids, -1 for none; the
            tokens of a chunk are neighbours.
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
    return Chunks(firsts[0][used], firsts[1][used], counts[0][used], counts[1][used],
                  number[keys[0]], number[keys[1]])


def chunk_mean(rows_NX: Tensor, id_N: Tensor, count_C: Tensor) -> Tensor:
    """Mean of the rows of each chunk, (C, X); rows with id -1 must be left out by the caller."""
    total = rows_NX.new_zeros(len(count_C), rows_NX.shape[1]).index_add(0, id_N, rows_NX)
    return total / count_C[:, None]


# --- projection -----------------------------------------------------------------------------------


def teacher_importance(teacher_logits_BTW: Tensor, teacher_chunk_BT: Tensor) -> Tensor:
    """(W,) largest logit of every teacher token over the positions that have a chunk; -inf if there are none.

    Reduce it with max over micro-batches and ranks, then keep the top K columns: the kept set then depends
    neither on the cut of the batch nor on padding.
    """
    rows = at_least_float32(teacher_logits_BTW[teacher_chunk_BT >= 0])
    floor = rows.new_full((1, rows.shape[1]), -torch.inf)
    return torch.cat([floor, rows]).amax(0)


def projection_kl(
    student_logits_BSV: Tensor,
    teacher_logits_BTW: Tensor,
    student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor,
    indices_VK: Tensor,
    likelihoods_VK: Tensor,
    kept_K: Tensor | None = None,
    temperature: float = 1.0,
    teacher_average: str = "p",
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """P-KL: sum over chunks of tau^2 KL(target || r) in the teacher's vocabulary; reverse: KL(r || target).

    r = mean over the student positions of the chunk of softmax(x / tau) @ W, renormalised over the kept
    columns; target = mean over its teacher positions of softmax(y / tau) over the kept columns.  Averaging
    probabilities keeps the target normalised, so the loss is never negative and zero when the models agree.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient; may hold NaN
            where there is no chunk.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
        indices_VK, likelihoods_VK: the projection, -1 in unused slots; rows sum to 1 or 0.
        kept_K: (K,) int64 sorted teacher columns; None keeps all.
        teacher_average: "p", or "logp" for the un-normalised mean of log-probabilities that NeMo-RL uses
            (can be negative; kept for comparison with it).
    Returns:
        (sum, count): nats over chunks that have a position on both sides, and how many there are.
    """
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    W = teacher_logits_BTW.shape[-1]
    s_rows, t_rows = chunks.id_S >= 0, chunks.id_T >= 0
    p = _rows(student_logits_BSV.flatten(0, 1), s_rows, temperature).softmax(-1)
    p_CV = chunk_mean(p, chunks.id_S[s_rows], chunks.count_S)
    r_CK = _project(p_CV, indices_VK, likelihoods_VK.to(p_CV), W, kept_K)
    log_r = (r_CK + EPSILON).log() - (r_CK + EPSILON).sum(-1, keepdim=True).log()

    y = _rows(teacher_logits_BTW.detach().flatten(0, 1), t_rows, temperature)
    logq = (y if kept_K is None else y[:, kept_K]).log_softmax(-1)
    mean = chunk_mean(logq if teacher_average == "logp" else logq.exp(), chunks.id_T[t_rows], chunks.count_T)
    log_target = mean if teacher_average == "logp" else mean.clamp(min=1e-30).log()
    kl_C = _kl(log_r, log_target) if reverse else _kl(log_target, log_r)
    return temperature**2 * kl_C.sum(), torch.tensor(len(kl_C), device=kl_C.device)


def _project(
    p_CV: Tensor, indices_VK: Tensor, likelihoods_VK: Tensor, W: int, kept_K: Tensor | None
) -> Tensor:
    """p @ W restricted to the kept columns, one slot of the sparse rows at a time."""
    kept_K = torch.arange(W, device=p_CV.device) if kept_K is None else kept_K
    width = len(kept_K)
    column = torch.full((W + 1,), width, device=p_CV.device)  # one column more collects all that is dropped
    column[kept_K] = torch.arange(width, device=p_CV.device)
    r = p_CV.new_zeros(len(p_CV), width + 1)
    for slot in range(indices_VK.shape[1]):
        r.index_add_(1, column[indices_VK[:, slot]], p_CV * likelihoods_VK[:, slot])  # -1 is the last column
    return r[:, :width]


# --- pieces ---------------------------------------------------------------------------------------


class Spelling(NamedTuple):
    """How two vocabularies spell each other (projection_tools.spell builds it).

    event_V, event_W: (V,), (W,) int64, event of each token, -1 for tokens linked to nothing.
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
    """

    fine_row: Tensor
    coarse_row: Tensor
    low: Tensor
    high: Tensor
    level: Tensor


class PieceTerms(NamedTuple):
    """All terms of `piece_kl` in a batch, known from ids alone, before any forward.

    start_S, start_T: (C,) rows that predict the first token of a chunk on either side.
    inside_teacher: chunks of one teacher token, positions after the first student token.
    inside_student: chunks of one student token, positions after the first teacher token.
    many_S, many_T: (M, 2) int64 (row, chunk): all rows of the chunks with several tokens on both sides.
    count_many: how many such chunks.
    count: () int64, student positions (and n:m remainders) that the terms cover; the loss is a sum over them.
    """

    start_S: Tensor
    start_T: Tensor
    inside_teacher: Ranges
    inside_student: Ranges
    many_S: Tensor
    many_T: Tensor
    count_many: int
    count: Tensor


def piece_terms(
    student_next_BS: Tensor, teacher_next_BT: Tensor, student_chunk_BS: Tensor, teacher_chunk_BT: Tensor,
    spelling: Spelling,
) -> PieceTerms:
    """List the terms of `piece_kl`.

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
    number = F.pad(torch.where(many, many.cumsum(0) - 1, -1), (0, 1), value=-1)
    many_S, many_T = number[chunks.id_S], number[chunks.id_T]  # id -1 reads the last entry, -1
    rows = [torch.stack([(m >= 0).nonzero().squeeze(1), m[m >= 0]], 1) for m in (many_S, many_T)]
    count_many = int(many.sum())
    count = torch.tensor(len(chunks.first_S) + len(inside_teacher.low) + count_many, device=number.device)
    starts = chunks.first_S, chunks.first_T
    return PieceTerms(*starts, inside_teacher, inside_student, *rows, count_many, count)


def _inside(fine_next, coarse_next, fine_first, coarse_first, fine_count, pieces, low, high) -> Ranges:
    """Positions k >= 1 of chunks with one coarse token, as far as its spelling is the realised one."""
    P = pieces.shape[1]
    k = torch.arange(P, device=pieces.device)
    coarse = coarse_next[coarse_first] if len(coarse_first) else coarse_first
    realised = fine_next[(fine_first[:, None] + k).clamp(max=max(fine_next.numel() - 1, 0))]
    same = (realised == pieces[coarse]) & (k < fine_count[:, None])
    # the k-th token must match too: in context a tokenizer may spell a token otherwise than alone
    chunk, level = (same.cumprod(1)[:, 1:] > 0).nonzero(as_tuple=True)
    level = level + 1
    token, rows = coarse[chunk], (fine_first[chunk] + level, coarse_first[chunk])
    return Ranges(*rows, low[token, level], high[token, level], level)


def piece_kl(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor, teacher_next_BT: Tensor,
    terms: PieceTerms, spelling: Spelling, temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) on events that both vocabularies can express; needs no weights.

    With p = softmax(student / tau), q = softmax(teacher / tau), A[w] the student's spelling of teacher
    token w and B[v] the teacher's of student token v, the sum, times tau^2, of
      1. at the start of every chunk: KL over events, the connected components of w -- A[w][0], v -- B[v][0];
      2. inside one teacher token, after k student tokens: KL(T_k || p_k), where T_k(v) is the teacher's mass,
         normalised, on tokens w whose spelling begins with the k tokens seen and goes on with v;
      3. inside one student token, after k teacher tokens: KL(q_k || S_k), where S_k(w) is the student's mass,
         normalised, on tokens v whose spelling begins with the k tokens seen and goes on with w, and q_k is
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
        (sum, count): nats, and the student positions covered.
    """
    x = student_logits_BSV.flatten(0, 1)
    y = teacher_logits_BTW.detach().flatten(0, 1)
    starts = _rows(x, terms.start_S, temperature), _rows(y, terms.start_T, temperature)
    total = _event_kl(*starts, spelling).sum()
    if len(terms.inside_teacher.low):
        total = total + _inside_teacher_kl(x, y, terms.inside_teacher, spelling, temperature)
    if len(terms.inside_student.low):
        total = total + _inside_student_kl(x, y, terms.inside_student, spelling, temperature)
    if terms.count_many:
        logp_M = _chunk_logp(x, student_next_BS, terms.many_S, terms.count_many, temperature)
        logq_M = _chunk_logp(y, teacher_next_BT, terms.many_T, terms.count_many, temperature)
        total = total + _bernoulli_kl(logq_M, logp_M).sum()
    return temperature**2 * total, terms.count


def _rows(logits: Tensor, index: Tensor, temperature: float) -> Tensor:
    return _soften(logits[index], temperature)


def _soften(logits: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(logits)
    return logits if temperature == 1 else logits / temperature


def _entries(logits: Tensor, row: Tensor, column: Tensor, temperature: float) -> Tensor:
    return _soften(logits[row, column], temperature)


def _kl(logq: Tensor, logp: Tensor) -> Tensor:
    """sum of q (log q - log p) over the last axis; where q is 0 nothing is added, whatever log p is."""
    q = logq.exp()
    return torch.where(q > 0, q * (logq - logp), 0.0).sum(-1)


def _event_kl(x_CV: Tensor, y_CW: Tensor, spelling: Spelling) -> Tensor:
    """(C,) KL(q || p) over events; tokens without an event are left out before the softmax."""
    x_CV, event_V = _linked(x_CV, spelling.event_V)
    # log p <= 0, so the shift cannot overflow; with it float32 reaches down to log p = -170
    logp = _event_mass((x_CV.log_softmax(-1) + SHIFT).exp(), event_V, spelling.num_events).log() - SHIFT
    with torch.no_grad():
        y_CW, event_W = _linked(y_CW, spelling.event_W)
        logq = _event_mass(y_CW.softmax(-1), event_W, spelling.num_events).log()
    return _kl(logq, logp)


def _linked(x_NX: Tensor, event_X: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of tokens that belong to an event; all of them as a rule, then without a copy."""
    linked = (event_X >= 0).nonzero().squeeze(1)
    return (x_NX, event_X) if len(linked) == len(event_X) else (x_NX[:, linked], event_X[linked])


def _event_mass(p_NX: Tensor, event_X: Tensor, num_events: int) -> Tensor:
    mass = p_NX.new_zeros(len(p_NX), num_events).index_add_(1, event_X, p_NX)
    return mass.clamp(min=torch.finfo(mass.dtype).tiny)


def _segment_logsumexp(x_N: Tensor, segment_N: Tensor, num: int) -> Tensor:
    """(num,) logsumexp of the entries of each segment."""
    top = x_N.new_full((num,), -torch.inf).scatter_reduce(0, segment_N, x_N.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    mass = x_N.new_zeros(num).index_add(0, segment_N, (x_N - top[segment_N]).exp())
    return mass.clamp(min=torch.finfo(mass.dtype).tiny).log() + top  # only an empty segment is below 1


def _flatten(ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(term, place) of every entry of every range, one after the other."""
    sizes = ranges.high - ranges.low
    term = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    begin = sizes.cumsum(0) - sizes
    return term, ranges.low[term] + torch.arange(len(term), device=sizes.device) - begin[term]


def _inside_teacher_kl(
    x: Tensor, y: Tensor, ranges: Ranges, spelling: Spelling, temperature: float
) -> Tensor:
    logp_NV = _rows(x, ranges.fine_row, temperature).log_softmax(-1)
    with torch.no_grad():
        N, V = logp_NV.shape
        term, place = _flatten(ranges)
        w = spelling.order_W[place]
        v = spelling.pieces_W[w, ranges.level[term]]
        goes_on = v >= 0
        term, w, v = term[goes_on], w[goes_on], v[goes_on]
        logq = _entries(y, ranges.coarse_row[term], w, temperature)
        logq = logq - _segment_logsumexp(logq, term, N)[term]
        target = logq.new_zeros(N * V).index_add(0, term * V + v, logq.exp()).view(N, V)
    return _kl(target.log(), logp_NV).sum()


def _inside_student_kl(
    x: Tensor, y: Tensor, ranges: Ranges, spelling: Spelling, temperature: float
) -> Tensor:
    N = len(ranges.level)
    term, place = _flatten(ranges)
    v = spelling.order_V[place]
    w = spelling.pieces_V[v, ranges.level[term]]
    goes_on = w >= 0
    term, v, w = term[goes_on], v[goes_on], w[goes_on]
    new = torch.ones_like(term, dtype=torch.bool)  # a range is sorted, so equal (term, w) are neighbours
    new[1:] = (term[1:] != term[:-1]) | (w[1:] != w[:-1])
    group = new.cumsum(0) - 1
    group_term, group_w = term[new], w[new]
    logp = _segment_logsumexp(_entries(x, ranges.coarse_row[term], v, temperature), group, len(group_term))
    logp = logp - _segment_logsumexp(logp, group_term, N)[group_term]
    with torch.no_grad():
        logq = _entries(y, ranges.fine_row[group_term], group_w, temperature)
        logq = logq - _segment_logsumexp(logq, group_term, N)[group_term]
    return _kl(logq[:, None], logp[:, None]).sum()


def _chunk_logp(logits: Tensor, next_BX: Tensor, rows: Tensor, count: int, temperature: float) -> Tensor:
    """(count,) log-probability of the realised tokens of each chunk."""
    logp = _rows(logits, rows[:, 0], temperature).log_softmax(-1)
    chosen = logp.gather(1, next_BX.reshape(-1)[rows[:, :1]]).squeeze(1)
    return chosen.new_zeros(count).index_add(0, rows[:, 1], chosen)


def _bernoulli_kl(logq: Tensor, logp: Tensor) -> Tensor:
    """KL(Bern(e^logq) || Bern(e^logp)); probabilities below 1, so that log(1 - p) stays finite."""
    logq, logp = logq.clamp(max=-1e-6), logp.clamp(max=-1e-6)
    log_not_q, log_not_p = torch.log(-torch.expm1(logq)), torch.log(-torch.expm1(logp))
    return logq.exp() * (logq - logp) - torch.expm1(logq) * (log_not_q - log_not_p)
