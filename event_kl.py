"""Compare two models on events that both vocabularies can express; needs no projection.

The older form of translation.py: it leaves out what no event can tell apart, and is kept beside it
until one of the two is not behind in any comparison (docs/LOG.md).

Shapes: B samples, S and T positions, C chunks, V and W vocabularies, P pieces of a spelling, N rows
of terms, G groups, E entries.  What every loss takes and returns: see losses.py.

Needs torch and losses.py.  Copy both into your own repository.  Tests: tests/test_losses.py.
License: Apache-2.0 (see LICENSE).
"""

from typing import NamedTuple

import torch
from torch import Tensor

try:
    from . import losses
except ImportError:  # copied beside it, not into a package
    import losses

# nats; the log-probability of an event without any mass is at most this, see `losses.log_masses`
NO_EVENT = losses.LOG_ZERO - losses.SHIFT

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
    count_all: student positions (and n:m remainders) that the terms cover; their sum is
        the loss.
    """

    start_S: Tensor
    start_T: Tensor
    inside_teacher: Ranges
    inside_student: Ranges
    many_S: Tensor
    many_T: Tensor
    count_many: int
    count_all: int


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
    losses.check_positions(
        "student_chunk_BS has", student_chunk_BS.shape, student_next_BS=student_next_BS
    )
    losses.check_positions(
        "teacher_chunk_BT has", teacher_chunk_BT.shape, teacher_next_BT=teacher_next_BT
    )
    chunks = losses.find_chunks(student_chunk_BS, teacher_chunk_BT)
    student_next = student_next_BS.reshape(-1)
    teacher_next = teacher_next_BT.reshape(-1)
    one_teacher_token = (chunks.count_T == 1) & (chunks.count_S > 1)
    inside_teacher = _inside_ranges(
        student_next,
        teacher_next,
        fine_first=chunks.first_S[one_teacher_token],
        coarse_first=chunks.first_T[one_teacher_token],
        fine_count=chunks.count_S[one_teacher_token],
        pieces=spelling.pieces_W,
        low=spelling.low_W,
        high=spelling.high_W,
    )
    one_student_token = (chunks.count_S == 1) & (chunks.count_T > 1)
    inside_student = _inside_ranges(
        teacher_next,
        student_next,
        fine_first=chunks.first_T[one_student_token],
        coarse_first=chunks.first_S[one_student_token],
        fine_count=chunks.count_T[one_student_token],
        pieces=spelling.pieces_V,
        low=spelling.low_V,
        high=spelling.high_V,
    )
    is_many = (chunks.count_S > 1) & (chunks.count_T > 1)
    count_many = int(is_many.sum())
    number = torch.where(is_many, is_many.cumsum(0) - 1, -1)
    return EventTerms(
        start_S=chunks.first_S,
        start_T=chunks.first_T,
        inside_teacher=inside_teacher,
        inside_student=inside_student,
        many_S=torch.stack([chunks.row_S, number[chunks.of_S]], 1)[is_many[chunks.of_S]],
        many_T=torch.stack([chunks.row_T, number[chunks.of_T]], 1)[is_many[chunks.of_T]],
        count_many=count_many,
        count_all=len(chunks.first_S) + len(inside_teacher.low) + count_many,
    )


def _inside_ranges(
    fine_next: Tensor, coarse_next: Tensor, *, fine_first: Tensor, coarse_first: Tensor,
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
    teacher_next_BT: Tensor, terms: EventTerms, spelling: Spelling, *,
    temperature: float = 1.0, weight_BS: Tensor | None = None, reduction: str = "sum",
) -> losses.SumAndCount:
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
    losses.check_side("student", student_logits_BSV, student_next_BS=student_next_BS)
    losses.check_side("teacher", teacher_logits_BTW, teacher_next_BT=teacher_next_BT)
    losses.check_width("student", student_logits_BSV, len(spelling.event_V), "event_V")
    losses.check_width("teacher", teacher_logits_BTW, len(spelling.event_W), "event_W")
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = teacher_logits_BTW.detach().flatten(0, 1)
    if x_NV.device.type == "cpu":  # once; elsewhere the rows that each term needs, later
        x_NV = losses.at_least_float32(x_NV)
    values = [_start_kl(x_NV, y_MW, terms, spelling, temperature)]
    rows = [terms.start_S]
    # select what the other terms need of x at once: each selection has a gradient as large as x
    row_many = terms.many_S[:, 0]
    needed = (terms.inside_teacher.fine_row, terms.inside_student.coarse_row, row_many)
    sizes = [len(row_N) for row_N in needed]
    x_needed = losses.take_rows(x_NV, torch.cat(needed))
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
        value_N = value_N + losses.row_sums(inside_N, term_N, len(value_N))
    order = row_N.argsort()  # reading order
    value_N = temperature**2 * value_N[order]
    return losses.reduce_terms(value_N, row_N[order], student_next_BS.shape, weight_BS, reduction)


def _start_kl(
    x_NV: Tensor, y_MW: Tensor, terms: EventTerms, spelling: Spelling, temperature: float,
) -> Tensor:
    """Return the (C,) KL over events at the start of every chunk."""
    both = []
    for logits_NX, row_C, event_X in (
        (x_NV, terms.start_S, spelling.event_V), (y_MW, terms.start_T, spelling.event_W)
    ):
        event_X = torch.where(event_X < 0, spelling.num_events, event_X).long()
        x_CX = losses.at_least_float32(losses.take_rows(logits_NX, row_C))
        log_CE = losses.log_masses(x_CX, event_X, spelling.num_events)
        both.append(losses.softened(log_CE.log_softmax(-1), NO_EVENT, temperature))
    return losses.divergence_of("forward_kl", *both)


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
    logp_C = losses.chunk_logp(
        x_MV, student_next_M, every_row, terms.many_S[:, 1], terms.count_many, 1.0
    )
    logq_C = losses.chunk_logp(
        y_NW, teacher_next_BT, terms.many_T[:, 0], terms.many_T[:, 1], terms.count_many, 1.0
    )
    return losses.bernoulli_kl(
        losses.soften_bernoulli(logq_C, temperature), losses.soften_bernoulli(logp_C, temperature)
    )


def _second_rows(row_and_chunk_N2: Tensor, num_chunks: int) -> Tensor:
    """Return the (num_chunks,) second row of each chunk; the first has the term of the start."""
    row_N, chunk_N = row_and_chunk_N2.unbind(1)
    first_C = row_N.new_full((num_chunks,), torch.iinfo(torch.int64).max)
    return first_C.scatter_reduce(0, chunk_N, row_N, "amin") + 1


def event_coverage(
    teacher_logits_BTW: Tensor, terms: EventTerms, spelling: Spelling
) -> dict[str, losses.SumAndCount]:
    """Measure what the terms of `event_kl` cover, each as (sum, count).

    event_coverage: teacher probability, at the starts of chunks, of tokens that belong to an event;
    prefix_coverage: teacher probability, inside teacher tokens, of the tokens that T_k is made of;
    one_to_one, inside_teacher, inside_student, many: chunks of that shape, of all chunks (1:1; one
    teacher and several student tokens; one student and several teacher tokens; several on both
    sides).
    """
    losses.check_side("teacher", teacher_logits_BTW)
    losses.check_width("teacher", teacher_logits_BTW, len(spelling.event_W), "event_W")
    with torch.no_grad():
        y_NW = teacher_logits_BTW.detach().flatten(0, 1)
        ranges = terms.inside_teacher
        q_CW = losses.at_least_float32(y_NW[terms.start_T]).softmax(-1)
        event_mass = q_CW[:, spelling.event_W >= 0].sum()
        prefix_mass = y_NW.new_zeros((), dtype=q_CW.dtype)
        if len(ranges.low):
            term_E, offset_E = _expand_ranges(ranges)
            token_E = spelling.order_W[offset_E]
            goes_on = spelling.pieces_W[token_E, ranges.level[term_E]] >= 0
            q_NW = losses.at_least_float32(y_NW[ranges.coarse_row]).softmax(-1)
            prefix_mass = torch.where(goes_on, q_NW[term_E, token_E], 0.0).sum()
        num_chunks = y_NW.new_full((), len(terms.start_S), dtype=torch.int64)
        num_ranges = y_NW.new_full((), len(ranges.low), dtype=torch.int64)
        # every chunk of these shapes has one position of level 1
        num_inside_teacher = (ranges.level == 1).sum()
        num_inside_student = (terms.inside_student.level == 1).sum()
        num_many = y_NW.new_full((), terms.count_many, dtype=torch.int64)
        num_one_to_one = num_chunks - num_inside_teacher - num_inside_student - num_many
        return {
            "event_coverage": (event_mass, num_chunks),
            "prefix_coverage": (prefix_mass, num_ranges),
            "inside_teacher": (num_inside_teacher, num_chunks),
            "inside_student": (num_inside_student, num_chunks),
            "many": (num_many, num_chunks),
            "one_to_one": (num_one_to_one, num_chunks),
        }


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
    return _normalized(logits_G / temperature, to, num_ranges)


def _coarse_logits(coarse_NX: Tensor, ranges: Ranges, to: _Continuations) -> Tensor:
    return losses.at_least_float32(coarse_NX[ranges.coarse_row[to.term_E], to.token_E])


def _compare_groups(logp_G: Tensor, logq_G: Tensor, to: _Continuations, num: int) -> Tensor:
    """Return the (num,) KL(q || p) of all ranges."""
    kl_G = losses.divergence_of("forward_kl", logp_G[:, None], logq_G[:, None])
    return losses.row_sums(kl_G, to.term_G, num + 1)[:num]


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
    mass = losses.row_sums((x_N - largest[segment_N]).exp(), segment_N, num)
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
    logp_NV = (losses.at_least_float32(x_NV) / temperature).log_softmax(-1)
    # groups without an entry read the last row; their result lands in term N, which is cut off
    logp_G = logp_NV[to.term_G.clamp(max=num_local - 1), to.next_G].clamp(min=losses.FLOOR)
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
    y_G = losses.at_least_float32(y_NW[row_G, to.next_G])
    logq_G = _normalized(y_G / temperature, to, num_local)
    return _compare_groups(logp_G, logq_G, to, num_local)
