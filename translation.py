"""Translate a teacher's belief into the student's vocabulary, then compare by any divergence.

The student's next token, seen through the teacher's tokens, is a path and then "stop".  So the
teacher's belief about it is a tree of nodes, each a fair question to both models: a scope of
student tokens, cut into cells.  The teacher gives every cell a mass, the student's own mass is
summed over the cell, and both are normalized in the scope.  All masses come from the teacher's rows
on the text as it is; nothing is guessed about branches that the text did not take.

Notation: A[w] is the student's spelling of teacher token w, B[v] the teacher's of student token v,
f(w) = A[w][0], q_k the teacher's distribution k of its tokens after a boundary that both
tokenizers share, u the token before it.  The nodes:

root, at every common boundary.  Scope: all student tokens, v in the cell of B[v][0].  A teacher
    token that heads a cell gives its mass to that cell, any other to the cell of f(w).
choice, inside the cell of the realized student token, after k = 1, 2, ... of its teacher tokens.
    Scope: the student tokens whose path begins with these k; cells: one for every teacher token
    that goes on with a path, and "stop", which gets what q_k gives to all others.  Where the text
    has a teacher token that is longer than the student's, tokens like it say what they begin with.
inside, within a teacher token, after student tokens u.  Scope: all; cells: each token with which
    the teacher tokens that begin with u go on, and one for the rest.
rest, of chunks of several tokens on both sides: did the text go on so?

Two things that the student knows and a teacher's row does not, or the other way round, are taken
into account.  After a chunk of one teacher token u the student knows the bytes, not that the
teacher's token ended there: with probability lambda it would have gone on, and the target of root
and choice is a mixture.  And if the student's token v0 ended at this boundary, teacher tokens that
its tokenizer would have joined to v0 did not come: they get mass 0 (never the realized one).

By the chain rule the forward KL over the nodes is, in expectation over the text, KL(belief ||
student).  It is exact where one tokenizer's tokens are unions of the other's and no cut depends on
what follows (tests/test_translation.py sums over all texts of small processes).  Where tokens
cross, what the teacher would have said after other cuts of the same bytes is not known, and a bias
stays.

Shapes: B samples; S, T positions; N student rows or roots, M teacher rows (rows are positions of
the flattened batch); V, W vocabularies; C cells of the roots; K nodes of another kind; G cells of
such a node, or of all of them one after the other; E entries (tokens in cells); P pieces; F, J see
`Tables`.

Needs torch and losses.py.  Copy both into your own repository.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_translation.py.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from .losses import (
        FLOOR,
        LOG_ZERO,
        SHIFT,
        Chunks,
        Segments,
        SumAndCount,
        at_least_float32,
        bernoulli_kl,
        check_positions,
        check_side,
        check_width,
        column_sums,
        find_chunks,
        forward_kl,
        log_masses,
        reduce_terms,
        soften_bernoulli,
        softened,
        take_rows,
    )
except ImportError:  # copied beside it, not into a package
    from losses import (
        FLOOR,
        LOG_ZERO,
        SHIFT,
        Chunks,
        Segments,
        SumAndCount,
        at_least_float32,
        bernoulli_kl,
        check_positions,
        check_side,
        check_width,
        column_sums,
        find_chunks,
        forward_kl,
        log_masses,
        reduce_terms,
        soften_bernoulli,
        softened,
        take_rows,
    )

LOG_NOTHING = LOG_ZERO + 1  # nats; a cell's mass below this is 0

# --- tables ---------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Tell how two vocabularies spell each other (projection_tools.cells builds it).

    cell_V, cell_W: (V,), (W,) int64, cell of each student token, and the one that a teacher token
        gives its mass to; C for tokens without one.
    num_cells: C.
    pieces_W: (W, P) int64, A, then -1.
    order_W, low_W, high_W: the teacher tokens whose A begins with the same k tokens as A[w] are
        ``order_W[low_W[w, k]:high_W[w, k]]``; (W,), (W, P), (W, P) int64.
    pieces_V, order_V, low_V, high_V: the mirror image, B.
    rank_V: (V,) int64, the place of each student token in order_V.
    longer_F: (F,) int64, the teacher tokens that head no cell, sorted by the rank of f(w).
    longer_rank_F: (F,) int64, these ranks.
    join_start_V: (V + 1,) int64; behind student token v0 the teacher tokens
        ``order_W[join_low_J[j]:join_high_J[j]]`` cannot come, for j from join_start_V[v0] to
        join_start_V[v0 + 1]; no token is in two of them.
    joined_V: (V,) int64, how many these are.
    """

    cell_V: Tensor
    cell_W: Tensor
    num_cells: int
    pieces_W: Tensor
    order_W: Tensor
    low_W: Tensor
    high_W: Tensor
    pieces_V: Tensor
    order_V: Tensor
    low_V: Tensor
    high_V: Tensor
    rank_V: Tensor
    longer_F: Tensor
    longer_rank_F: Tensor
    join_start_V: Tensor
    join_low_J: Tensor
    join_high_J: Tensor
    joined_V: Tensor


def with_rest(tables: Tables) -> Tables:
    """Return the tables for a teacher of which a row keeps some tokens and, in column W, the rest.

    The rest of a row is a token without pieces that heads a cell without student tokens; which
    cells of a root it stands for depends on the row, see `merge_rest`.
    """
    C = tables.num_cells
    no_piece = tables.pieces_W.new_full((1, tables.pieces_W.shape[1]), -1)
    no_range = tables.low_W.new_zeros((1, tables.low_W.shape[1]))
    # tokens without a cell keep the number behind the last cell
    cell_W = torch.where(tables.cell_W == C, C + 1, tables.cell_W)
    return tables._replace(
        cell_V=torch.where(tables.cell_V == C, C + 1, tables.cell_V),
        cell_W=torch.cat([cell_W, cell_W.new_tensor([C])]),
        num_cells=C + 1,
        pieces_W=torch.cat([tables.pieces_W, no_piece]),
        low_W=torch.cat([tables.low_W, no_range]),
        high_W=torch.cat([tables.high_W, no_range]),
    )


def next_piece(pieces_XP: Tensor, token_N: Tensor, level_N: Tensor) -> Tensor:
    """Return (N,) piece `level` of the spelling of each token, -1 behind its end."""
    width = pieces_XP.shape[1]
    piece = pieces_XP[token_N, level_N.clamp(max=width - 1)]
    return torch.where(level_N < width, piece, -1)


def expand(low: Tensor, high: Tensor, num: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (number of its range, place) of every place of the ranges low .. high - 1.

    Args:
        num: of all places, where it is known; else the device is asked, and waited for.
    """
    sizes = high - low
    number = torch.repeat_interleave(
        torch.arange(len(sizes), device=sizes.device), sizes, output_size=num
    )
    begin = sizes.cumsum(0) - sizes
    place = torch.arange(len(number), device=sizes.device) - begin[number] + low[number]
    return number, place


# --- neighbors that are equal ---------------------------------------------------------------------


def distinct(key_E: Tensor, counts_E: Tensor, num: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the distinct keys (G,), and the number (E,) of each entry's.

    Args:
        key_E: int64; equal ones are neighbors.
        counts_E: bool; other entries may have any number, in order still.
        num: G, where it is known.
    """
    is_new_E = counts_E.clone()
    is_new_E[1:] &= (key_E[1:] != key_E[:-1]) | ~counts_E[:-1]
    count_E = is_new_E.cumsum(0)
    if num is None:
        num = int(count_E[-1]) if len(count_E) else 0
    number_G = torch.arange(1, num + 1, device=key_E.device)
    return key_E[torch.searchsorted(count_E, number_G)], (count_E - 1).clamp(min=0)


# --- nodes, from ids ------------------------------------------------------------------------------


class Roots(NamedTuple):
    """List the root nodes: one for every chunk.

    row_S, row_T: (N,) int64, rows that predict the first token of the chunk on either side.
    before_S: (N,) student token in front of the chunk, -1 for none.
    next_T: (N,) the teacher token that comes.
    ended_T: (N,) u, see `tokens_that_ended`; its row is row_T - 1.
    """

    row_S: Tensor
    row_T: Tensor
    before_S: Tensor
    next_T: Tensor
    ended_T: Tensor


class Choices(NamedTuple):
    """List the choice nodes.

    root: (K,) int64, number of the root.
    level: (K,) k.
    low, high: (K,) the scope, ``order_V[low:high]``.
    token: (K,) realized student token, whose path leads to the node.
    row_T: (K,) teacher row that q_k comes from; -1: a longer token came.
    """

    root: Tensor
    level: Tensor
    low: Tensor
    high: Tensor
    token: Tensor
    row_T: Tensor


class Insides(NamedTuple):
    """List the inside nodes.

    row_S, row_T: (K,) int64, the student's row, and the row that predicts the teacher token that
        it is in.
    low, high: (K,) teacher tokens that begin so, ``order_W[low:high]``.
    level: (K,) student tokens since the teacher token began.
    """

    row_S: Tensor
    row_T: Tensor
    low: Tensor
    high: Tensor
    level: Tensor


class Sizes(NamedTuple):
    """Count what a device will make of some nodes, so that nothing waits until it has counted.

    before_E: tokens that may have come in place of those in front of the roots.
    join_J, joined_E: joins that the roots look up, and the tokens in them.
    scope_E, scope_G, scope_width: tokens in the scopes of the choices, cells of these, and the most
        cells of one scope.
    longer_E: longer tokens that say with which token of a scope they begin.
    step_E: tokens of the paths, but for the first of each.
    going_E: `before_E` once for every choice of a root.
    inside_E, inside_G, inside_width: the same of insides, and the slots of a row, one for the rest.
    """

    before_E: int
    join_J: int
    joined_E: int
    scope_E: int
    scope_G: int
    scope_width: int
    longer_E: int
    step_E: int
    going_E: int
    inside_E: int
    inside_G: int
    inside_width: int


class Nodes(NamedTuple):
    """List all nodes of some chunks, known from ids alone, before any forward pass.

    many_S, many_T: (M, 2) int64 (row, chunk): all rows of the chunks with several tokens on both
        sides.
    count_many: how many such chunks.
    count_all: student positions (and n:m rests) that the nodes cover.
    sizes: Sizes.
    """

    roots: Roots
    choices: Choices
    insides: Insides
    many_S: Tensor
    many_T: Tensor
    count_many: int
    count_all: int
    sizes: Sizes


def list_nodes(
    student_ids_BS: Tensor, student_next_BS: Tensor, teacher_next_BT: Tensor,
    student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, tables: Tables,
) -> Nodes:
    """List the nodes of a batch with one text in every row; meant for the CPU.

    Args:
        student_ids_BS: int64, the token that each student position reads.
        student_next_BS, teacher_next_BT: int64, the token that each position predicts; anything
            where there is none, of the teacher something negative, as -100: no row of padding is
            asked what comes behind a text.
        student_chunk_BS, teacher_chunk_BT: int64, shifted chunk ids, -1 for none.
    """
    check_positions("student_chunk_BS has", student_chunk_BS.shape, student_ids_BS=student_ids_BS,
                    student_next_BS=student_next_BS)
    check_positions("teacher_chunk_BT has", teacher_chunk_BT.shape, teacher_next_BT=teacher_next_BT)
    texts = []
    for chunk_BX in (student_chunk_BS, teacher_chunk_BT):
        texts.append(torch.arange(len(chunk_BX))[:, None].expand_as(chunk_BX))
    ended_BT = tokens_that_ended(
        student_next_BS, teacher_next_BT, student_chunk_BS, teacher_chunk_BT, tables,
        student_text_BS=texts[0], teacher_text_BT=texts[1],
    )
    follows_BT = teacher_next_BT >= 0
    follows_BT[:, :1] = False
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    return nodes_of_chunks(
        chunks, student_ids_BS.reshape(-1), student_next_BS.reshape(-1).clamp(min=0),
        teacher_next_BT.reshape(-1).clamp(min=0), tables, teacher_ended=ended_BT.reshape(-1),
        teacher_follows=follows_BT.reshape(-1),
    )


def nodes_of_chunks(
    chunks: Chunks, student_ids: Tensor, student_next: Tensor, teacher_next: Tensor, tables: Tables,
    *, teacher_ended: Tensor, teacher_follows: Tensor,
) -> Nodes:
    """List the nodes of some chunks, of which the rows may be a part of a batch.

    Needed are all rows of the chunks, and the teacher rows before and after each of them.

    Args:
        student_ids, student_next: (N,) int64, token that each student row reads and predicts.
        teacher_next: (M,) int64.
        teacher_ended: (M,) int64, see `tokens_that_ended`.
        teacher_follows: (M,) bool, the row belongs to the position after that of the row before, in
            the same text, and predicts a token.
    """
    roots = Roots(
        row_S=chunks.first_S,
        row_T=chunks.first_T,
        before_S=student_ids[chunks.first_S],
        next_T=teacher_next[chunks.first_T],
        ended_T=teacher_ended[chunks.first_T],
    )
    insides = _list_insides(chunks, student_next, teacher_next, tables)
    is_many = (chunks.count_S > 1) & (chunks.count_T > 1)
    count_many = int(is_many.sum())
    number = torch.where(is_many, is_many.cumsum(0) - 1, -1)
    choices = _list_choices(roots, student_next, teacher_next, tables, teacher_follows)
    return Nodes(
        roots=roots,
        choices=choices,
        insides=insides,
        many_S=torch.stack([chunks.row_S, number[chunks.of_S]], 1)[is_many[chunks.of_S]],
        many_T=torch.stack([chunks.row_T, number[chunks.of_T]], 1)[is_many[chunks.of_T]],
        count_many=count_many,
        count_all=len(roots.row_S) + len(insides.row_S) + count_many,
        sizes=_measure(roots, choices, insides, tables),
    )


def _measure(roots: Roots, choices: Choices, insides: Insides, tables: Tables) -> Sizes:
    """Count what a device will make of the nodes."""
    before = _ranges_before(roots, tables)
    before_N = before.high - before.low
    join_low, join_high = _join_ranges(roots, tables)
    joined_N = tables.joined_V[roots.before_S.clamp(min=0)]
    longer = torch.searchsorted(
        tables.longer_rank_F, torch.stack([choices.low, choices.high])
    ).sum(1).tolist()
    scope = _count_cells(choices, tables.order_V, tables.pieces_V, least=-1)
    inside = _count_cells(insides, tables.order_W, tables.pieces_W, least=0)
    return Sizes(
        before_E=int(before_N.sum()),
        join_J=int((join_high - join_low).sum()),
        joined_E=int((joined_N * (roots.before_S >= 0)).sum()),
        scope_E=scope[0],
        scope_G=scope[1],
        scope_width=max(1, scope[2]),
        longer_E=longer[1] - longer[0],
        step_E=int(((choices.level - 1) * (choices.row_T >= 0)).sum()),
        going_E=int(before_N[choices.root].sum()),
        inside_E=inside[0],
        inside_G=inside[1],
        inside_width=inside[2] + 1,
    )


def _count_cells(
    nodes: Choices | Insides, order: Tensor, pieces: Tensor, least: int
) -> tuple[int, int, int]:
    """Return how many tokens and cells the nodes have, and the most cells of one.

    Args:
        least: smallest next piece that names a cell; -1 stands for a token that ends.
    """
    if not len(nodes.level):
        return 0, 0, 0
    node_E, place_E = expand(nodes.low, nodes.high)
    next_E = next_piece(pieces, order[place_E], nodes.level[node_E])
    is_new_E = next_E >= least
    # tokens are sorted by their spelling, so equal ones are neighbors
    is_new_E[1:] &= (node_E[1:] != node_E[:-1]) | (next_E[1:] != next_E[:-1])
    cells_K = torch.bincount(node_E[is_new_E], minlength=1)
    return len(node_E), int(cells_K.sum()), int(cells_K.max())


def _list_choices(
    roots: Roots, student_next: Tensor, teacher_next: Tensor, tables: Tables,
    teacher_follows: Tensor,
) -> Choices:
    token = student_next[roots.row_S]
    path_NP = tables.pieces_V[token]
    num_pieces = path_NP.shape[1]
    # the teacher's rows from the root on, as long as they follow one another
    offset = torch.arange(num_pieces + 1)
    row = roots.row_T[:, None] + offset
    exists = row < len(teacher_next)
    row = torch.where(exists, row, roots.row_T[:, None])
    exists &= (offset == 0) | teacher_follows[row]
    exists = exists.cumprod(1).bool()
    # column k - 1 stands for k tokens
    came_NP = torch.where(exists, teacher_next[row], -2)[:, :-1]
    along = ((came_NP == path_NP) & (path_NP >= 0)).cumprod(1).bool()
    rank = tables.rank_V[token][:, None]
    low = torch.cat([tables.low_V[token][:, 1:], rank], 1)
    high = torch.cat([tables.high_V[token][:, 1:], rank + 1], 1)
    linked = tables.cell_V[token] < tables.num_cells
    several = (path_NP >= 0) & (high - low > 1) & linked[:, None]
    # a longer token came: it heads no cell, and the student's token begins it
    same_cell = tables.cell_W[roots.next_T] == tables.cell_V[token]
    is_longer = several & (same_cell[:, None] & ~along[:, :1])
    is_along = several & along & exists[:, 1:]
    root, column = (is_along | is_longer).nonzero(as_tuple=True)
    level = column + 1
    return Choices(
        root=root,
        level=level,
        low=low[root, column],
        high=high[root, column],
        token=token[root],
        row_T=torch.where(along[root, column], roots.row_T[root] + level, -1),
    )


def _list_insides(
    chunks: Chunks, student_next: Tensor, teacher_next: Tensor, tables: Tables
) -> Insides:
    """List positions k >= 1 of chunks with one teacher token, as far as the text spells it so."""
    chosen = (chunks.count_T == 1) & (chunks.count_S > 1)
    first_S = chunks.first_S[chosen]
    first_T = chunks.first_T[chosen]
    token = teacher_next[first_T]
    k = torch.arange(tables.pieces_W.shape[1])
    last = max(len(student_next) - 1, 0)  # rows beyond the chunk are read, and then masked
    realized = student_next[(first_S[:, None] + k).clamp(max=last)]
    # the k-th token must match too: in context a tokenizer may spell a token otherwise than alone
    matches = (realized == tables.pieces_W[token]) & (k < chunks.count_S[chosen][:, None])
    chunk, offset = (matches.cumprod(1)[:, 1:] > 0).nonzero(as_tuple=True)
    level = offset + 1
    return Insides(
        row_S=first_S[chunk] + level,
        row_T=first_T[chunk],
        low=tables.low_W[token[chunk], level],
        high=tables.high_W[token[chunk], level],
        level=level,
    )


def tokens_that_ended(
    student_next_BS: Tensor, teacher_next_BT: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, tables: Tables, *, student_text_BS: Tensor, teacher_text_BT: Tensor,
) -> Tensor:
    """Return (B, T) the teacher token in front of each chunk, where the student knows its bytes.

    That is a token that is a chunk of its own, spelled A[u] by the student, directly in front of
    the chunk's first position, in the same text.  -1 elsewhere.

    Args:
        student_text_BS, teacher_text_BT: int64, number of the text that each position belongs to.
        Others: see `list_nodes`.
    """
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    ended = torch.full((teacher_next_BT.numel(),), -1)
    order = chunks.first_T.argsort()
    first_S = chunks.first_S[order]
    first_T = chunks.first_T[order]
    count_S = chunks.count_S[order][:-1]
    before_S = first_S[:-1]
    before_T = first_T[:-1]
    student_text = student_text_BS.reshape(-1)
    teacher_text = teacher_text_BT.reshape(-1)
    known = before_T + 1 == first_T[1:]
    known &= before_S + count_S == first_S[1:]
    known &= student_text[before_S] == student_text[first_S[1:]]
    known &= teacher_text[before_T] == teacher_text[first_T[1:]]

    u = teacher_next_BT.reshape(-1).clamp(min=0)[before_T]
    pieces = tables.pieces_W[u]
    k = torch.arange(pieces.shape[1])
    row = (before_S[:, None] + k).clamp(max=student_next_BS.numel() - 1)
    realized = torch.where(k < count_S[:, None], student_next_BS.reshape(-1)[row], -1)
    known &= (realized == pieces).all(1) & (count_S <= len(k))
    ended[first_T[1:][known]] = u[known]
    return ended.view_as(teacher_next_BT)


# --- the teacher's masses -------------------------------------------------------------------------


class GoingOn(NamedTuple):
    """Hold the teacher's belief that its token, of which the student has read u, goes on.

    mass_K: (K,) lambda, the probability that it does.
    ends_K: (K,) 1 - lambda, summed by itself, for where it is small.
    node_E: (E,) int64, sorted, node.
    next_E: (E,) int64, the student token that comes next; -1: the token ends, with mass 0.
    mass_E: (E,) the probability of that token if it goes on.
    """

    mass_K: Tensor
    ends_K: Tensor
    node_E: Tensor
    next_E: Tensor
    mass_E: Tensor


def going_on(
    y_MW: Tensor, row_K: Tensor, low: Tensor, high: Tensor, level: Tensor, tables: Tables, *,
    num: int,
) -> GoingOn:
    """Ask the teacher's rows how the tokens ``order_W[low:high]`` go on after `level` pieces.

    Args:
        num: of these tokens, over all nodes.
    """
    node_E, place_E = expand(low, high, num)
    nodes = Segments.of(node_E, len(low))
    token_E = tables.order_W[place_E]
    next_E = next_piece(tables.pieces_W, token_E, level[node_E])
    logits_E = at_least_float32(y_MW[row_K[node_E], token_E])
    # finite where all are excluded
    top_K = nodes.reduce(logits_E, "max").clamp(min=torch.finfo(logits_E.dtype).min)
    mass_E = (logits_E - top_K[node_E]).exp()
    goes_E = next_E >= 0
    going_E = torch.where(goes_E, mass_E, 0.0)
    all_K = nodes.sum(mass_E)
    going_K = nodes.sum(going_E)
    ended_K = nodes.sum(torch.where(goes_E, 0.0, mass_E))
    return GoingOn(
        mass_K=going_K / _above_zero(all_K),
        ends_K=torch.where(all_K == 0, 1.0, ended_K / _above_zero(all_K)),
        node_E=node_E,
        next_E=next_E,
        mass_E=going_E / _above_zero(going_K)[node_E],
    )


def _above_zero(mass: Tensor) -> Tensor:
    return mass.clamp(min=torch.finfo(mass.dtype).tiny)


class Asked(NamedTuple):
    """List teacher tokens whose probabilities at the roots the choices ask for, root by root."""

    root_A: Tensor
    token_A: Tensor


class RootTarget(NamedTuple):
    """Hold the teacher's belief at the roots.

    cell_NC: (N, C) mass of each cell.
    q_A: (A,) the teacher's probabilities of the tokens asked for, 0 of what cannot come.
    """

    cell_NC: Tensor
    q_A: Tensor


def root_target(
    y_MW: Tensor, nodes: Nodes, goes: GoingOn, asked: Asked, tables: Tables
) -> RootTarget:
    """Return the teacher's belief at all roots; goes is `before_goes_on` of these.

    It is (1 - lambda) q + lambda T, of which what cannot come is left out, normalized in the end:
    that its token goes on is the likelier, the more of q cannot come.
    """
    q_NW = y_MW[nodes.roots.row_T].softmax(-1)
    _mask_joined(q_NW, nodes, tables)
    q_A = q_NW[asked.root_A, asked.token_A]
    # one cell more, for tokens that have none
    mass_NC = column_sums(q_NW, tables.cell_W, tables.num_cells + 1)
    mass_NC *= goes.ends_K[:, None]
    place_E = goes.node_E * mass_NC.shape[1] + tables.cell_V[goes.next_E.clamp(min=0)]
    mass_E = goes.mass_K[goes.node_E] * goes.mass_E
    mass_NC.view(-1).index_put_((place_E,), mass_E, accumulate=True)
    cell_NC = mass_NC[:, :-1]
    return RootTarget(cell_NC / _above_zero(cell_NC.sum(1, keepdim=True)), q_A)


def _mask_joined(q_NW: Tensor, nodes: Nodes, tables: Tables) -> None:
    """Set to 0, in place, what the student's tokenizer would have joined to the token before."""
    roots = nodes.roots
    row_N = torch.arange(len(q_NW), device=q_NW.device)
    came_N = q_NW[row_N, roots.next_T]
    q_NW[_joined(nodes, tables)] = 0
    q_NW[row_N, roots.next_T] = came_N  # it did come, whatever the tables say


def _join_ranges(roots: Roots, tables: Tables) -> tuple[Tensor, Tensor]:
    """Return (low, high) of the joins behind the token in front of each root."""
    known = roots.before_S >= 0
    before = roots.before_S.clamp(min=0)
    low = tables.join_start_V[before]
    return low, torch.where(known, tables.join_start_V[before + 1], low)


def _joined(nodes: Nodes, tables: Tables) -> tuple[Tensor, Tensor]:
    """Return (root, teacher token) of all that a join would have kept from coming."""
    sizes = nodes.sizes
    row_J, join_J = expand(*_join_ranges(nodes.roots, tables), sizes.join_J)
    low_J = tables.join_low_J[join_J]
    join_E, place_E = expand(low_J, tables.join_high_J[join_J], sizes.joined_E)
    return row_J[join_E], tables.order_W[place_E]


def merge_rest(x_NC: Tensor, logq_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Make one event of what the teacher did not keep and the cells of which it kept nothing.

    Of the other cells the teacher's mass is that of the kept tokens, which lacks what the rest may
    hold of the cell; no guess is made of that.

    Args:
        x_NC, logq_NC: logarithms of both models' masses, up to a constant of the row; the last cell
            is the rest.
    Returns:
        (N, C) log-probabilities of both models, the event in the last cell, FLOOR in its other
        ones.
    """
    is_empty_NC = logq_NC <= LOG_NOTHING
    # with all tokens kept there is no event: an empty cell then is one that does not come
    merged = is_empty_NC & ~is_empty_NC[:, -1:]
    # nor is there one where it would hold no student token, as every cell has a kept one
    no_event_N = ~merged[:, :-1].any(1)
    merged[:, -1] = True
    both = []
    for log_NC in (x_NC.log_softmax(-1), logq_NC):
        rest_N = log_NC.masked_fill(~merged, 10 * FLOOR).logsumexp(-1).clamp(min=FLOOR)
        rest_N = rest_N.masked_fill(no_event_N, FLOOR)
        kept_NC = log_NC.masked_fill(merged, FLOOR)
        both.append(torch.cat([kept_NC[:, :-1], rest_N[:, None]], 1))
    return both[0], both[1].log_softmax(-1)


class RangesBefore(NamedTuple):
    """List what may have come in place of the token in front of each root.

    row_T: (N,) int64, the row that predicts that token.
    low, high: (N,) teacher tokens that begin as it does, ``order_W[low:high]``; none: not known.
    level: (N,) student tokens that it has.
    """

    row_T: Tensor
    low: Tensor
    high: Tensor
    level: Tensor


def _ranges_before(roots: Roots, tables: Tables) -> RangesBefore:
    num_pieces = tables.low_W.shape[1]
    u = roots.ended_T.clamp(min=0)
    level = (tables.pieces_W[u] >= 0).sum(1)
    # of spellings as long as the tables nothing is known that goes on
    known = (roots.ended_T >= 0) & (level < num_pieces)
    column = level.clamp(max=num_pieces - 1)
    low = tables.low_W[u, column]
    high = torch.where(known, tables.high_W[u, column], low)
    return RangesBefore(torch.where(known, roots.row_T - 1, 0), low, high, level)


def before_goes_on(y_MW: Tensor, nodes: Nodes, tables: Tables) -> GoingOn:
    """Return how the token in front of each root would have gone on, as the row before says.

    lambda is 0 where that token is not known.
    """
    before = _ranges_before(nodes.roots, tables)
    return going_on(y_MW, *before, tables, num=nodes.sizes.before_E)


# --- small nodes ----------------------------------------------------------------------------------


class Cells(NamedTuple):
    """Number the cells of small nodes one after the other, and give each a slot in its node's row.

    key_G: (G,) int64, sorted: node times a stride, plus what names the cell.
    node_G, slot_G: (G,) int64.
    num_nodes, width: shape of the rows.
    """

    key_G: Tensor
    node_G: Tensor
    slot_G: Tensor
    num_nodes: int
    width: int

    @classmethod
    def of(
        cls, key_G: Tensor, stride: int, num_nodes: int, first_slot: int = 0,
        width: int | None = None,
    ) -> "Cells":
        """Make the slots of a row begin with `first_slot`; a width of None is looked up."""
        node_G = key_G // stride
        first_K = torch.searchsorted(node_G, torch.arange(num_nodes, device=node_G.device))
        number_G = torch.arange(len(node_G), device=node_G.device)
        slot_G = number_G - first_K[node_G] + first_slot
        if width is None:
            width = int(slot_G.max()) + 1 if len(slot_G) else 1
        return cls(key_G, node_G, slot_G, num_nodes, width)

    def rows(self, value_G: Tensor, padding: float) -> Tensor:
        """Return (K, width) values, a row for each node."""
        out = value_G.new_full((self.num_nodes, self.width), padding)
        return out.index_put((self.node_G, self.slot_G), value_G)

    def sum_of(self, key_E: Tensor, mass_E: Tensor) -> Tensor:
        """Return the (G,) sums of masses over the cells that their keys name."""
        # what is in no cell has mass 0, and may count to any
        cell_E = torch.searchsorted(self.key_G, key_E).clamp(max=max(0, len(self.key_G) - 1))
        cell_E, order_E = cell_E.sort(stable=True)
        return Segments.of(cell_E, len(self.key_G)).sum(mass_E[order_E])

    def nodes(self) -> Segments:
        """Return the nodes as segments of the cells."""
        return Segments.of(self.node_G, self.num_nodes)

    def total(self, mass_G: Tensor) -> Tensor:
        """Return for each cell the sum over its node, above 0."""
        return _above_zero(self.nodes().sum(mass_G))[self.node_G]


# (logits_KG, log q_KG) -> (K,) divergences
Compare = Callable[[Tensor, Tensor], Tensor]


def compare_cells(
    divergence: Callable[..., SumAndCount], temperature: float, parameters: dict[str, Any],
    logits_KG: Tensor, logq_KG: Tensor,
) -> Tensor:
    """Return the (K,) divergences of nodes whose cells have these masses; see `translated`."""
    logp_KG = softened(logits_KG, LOG_ZERO - SHIFT, temperature)
    logq_KG = softened(logq_KG, LOG_ZERO, temperature)
    value_K, _ = divergence(logp_KG[None], logq_KG[None], None, reduction="none", **parameters)
    return value_K


class Question(NamedTuple):
    """Hold some nodes as both models answer them; rows are padded.

    logits_KG: (K, G) logarithm of the student's mass in each cell, up to a constant of the row.
    target_KG: (K, G) the teacher's mass, a sum of 1 in every row.
    """

    logits_KG: Tensor
    target_KG: Tensor

    def logq_KG(self) -> Tensor:
        """Return the logarithms; a mass of 0 costs the same in any precision."""
        return self.target_KG.clamp(min=math.exp(LOG_ZERO)).log()


def root_question(x_NV: Tensor, cell_NC: Tensor, cell_V: Tensor) -> Question:
    """Return the root nodes; arguments: see `root_values`."""
    return Question(log_masses(x_NV, cell_V, cell_NC.shape[1]), cell_NC)


def root_values(
    x_NV: Tensor, cell_NC: Tensor, cell_V: Tensor, compare: Compare, has_rest: bool = False
) -> Tensor:
    """Return the (N,) divergences of root nodes: most of the time, and plain enough to compile.

    Args:
        x_NV: the student's logits in these rows, at least float32.
        cell_NC: the teacher's mass in each cell, see `RootTarget`.
        cell_V: of `Tables`.
        has_rest: see `translated`.
    """
    question = root_question(x_NV, cell_NC, cell_V)
    logits_NC, logq_NC = question.logits_KG, question.logq_KG()
    if has_rest:
        logits_NC, logq_NC = merge_rest(logits_NC, logq_NC)
    return compare(logits_NC, logq_NC)


class Scopes(NamedTuple):
    """List what is in the scopes of the choice nodes, known from ids alone.

    node_E, token_E: student tokens in the scope of each node, node by node.
    cell_E: (E,) number of the cell of each.
    cells: Cells, their keys as `_choice_keys` makes them.
    longer_node_E, longer_token_E: teacher tokens that say with which token of the scope they begin.
    longer_cell_E: number of its cell.
    asked: the longer tokens, and the first token of the path of each node, sorted by root.
    place_A: where the sorted ones were.
    """

    node_E: Tensor
    token_E: Tensor
    cell_E: Tensor
    cells: Cells
    longer_node_E: Tensor
    longer_token_E: Tensor
    longer_cell_E: Tensor
    asked: Asked
    place_A: Tensor


def list_scopes(choices: Choices, tables: Tables, sizes: Sizes | None = None) -> Scopes:
    """List the tokens and the cells of choice nodes; without sizes, they are looked up."""
    node_E, place_E = expand(choices.low, choices.high, sizes and sizes.scope_E)
    token_E = tables.order_V[place_E]
    # the scope is sorted, so the tokens of a cell are neighbors
    key_E = _choice_keys(node_E, token_E, choices, tables)
    every_E = torch.ones_like(key_E, dtype=torch.bool)
    key_G, cell_E = distinct(key_E, every_E, sizes and sizes.scope_G)
    width = sizes and sizes.scope_width
    cells = Cells.of(key_G, len(tables.cell_W) + 1, len(choices.root), width=width)

    low = torch.searchsorted(tables.longer_rank_F, choices.low)
    high = torch.searchsorted(tables.longer_rank_F, choices.high)
    longer_node_E, place_E = expand(low, high, sizes and sizes.longer_E)
    longer_token_E = tables.longer_F[place_E]
    rank_E = tables.longer_rank_F[place_E]
    # the token that a longer one begins with is in the scope, whose tokens are listed by rank
    begin_K = torch.searchsorted(node_E, torch.arange(len(choices.low), device=node_E.device))
    longer_cell_E = cell_E[(begin_K - choices.low)[longer_node_E] + rank_E]

    root_A = torch.cat([choices.root[longer_node_E], choices.root])
    token_A = torch.cat([longer_token_E, tables.pieces_V[choices.token, 0]])
    root_A, place_A = root_A.sort(stable=True)
    return Scopes(
        node_E, token_E, cell_E, cells, longer_node_E, longer_token_E, longer_cell_E,
        Asked(root_A, token_A[place_A]), place_A,
    )


def _choice_keys(node_E: Tensor, token_E: Tensor, choices: Choices, tables: Tables) -> Tensor:
    """Name the cells of student tokens: by the teacher token that each goes on with, or stop."""
    next_E = next_piece(tables.pieces_V, token_E, choices.level[node_E])
    return node_E * (len(tables.cell_W) + 1) + next_E + 1


def choice_question(
    x_E: Tensor, y_MW: Tensor, *, log_total_M: Tensor, q_A: Tensor, goes: GoingOn, scopes: Scopes,
    nodes: Nodes, tables: Tables,
) -> Question:
    """Return the choice nodes.

    Args:
        x_E: the student's logits of the tokens in the scopes.
        log_total_M: logsumexp of the teacher's logits, in the rows that count.
        q_A: what the teacher's rows at the roots say to `scopes.asked`.
        goes: `before_goes_on` of the roots.
    """
    choices = nodes.choices
    cells = scopes.cells
    num = len(choices.root)
    # below any that counts, and finite where a model excludes tokens
    tokens = Segments.of(scopes.cell_E, len(cells.key_G))
    logits_G = tokens.logsumexp(x_E.clamp(min=10 * FLOOR))

    # what the longer tokens of the scope begin with, and how the token before would have gone on
    asked_A = torch.empty_like(q_A).index_copy(0, scopes.place_A, q_A)
    mass_E, first_K = torch.split(asked_A, [len(scopes.longer_node_E), num])
    longer_G = Segments.of(scopes.longer_cell_E, len(cells.key_G)).sum(mass_E)
    longer_K = Segments.of(scopes.longer_node_E, num).sum(mass_E)
    node_E, next_E, mass_E = _going_on_in_scope(goes, nodes, tables)
    other_G = cells.sum_of(_choice_keys(node_E, next_E, choices, tables), mass_E)

    def logq(row: Tensor, token: Tensor) -> Tensor:
        return at_least_float32(y_MW[row, token]) - log_total_M[row]

    along_G = (choices.row_T >= 0)[cells.node_G]
    said_G = _split_by_row(logq, choices, cells, len(tables.cell_W) + 1)
    split_G = torch.where(along_G, said_G, longer_G)
    split_G = split_G / cells.total(split_G)
    path_K = _mass_of_path(logq, first_K, nodes, tables)
    ended_K = goes.ends_K[choices.root] * (path_K + longer_K)
    mass_G = ended_K[cells.node_G] * split_G + other_G
    total_G = cells.total(mass_G)
    # where neither has any mass that counts, the split alone
    mass_G = torch.where(total_G > torch.finfo(mass_G.dtype).tiny, mass_G / total_G, split_G)
    return Question(cells.rows(logits_G, FLOOR), cells.rows(mass_G, 0.0))


def _split_by_row(
    logq: Callable[[Tensor, Tensor], Tensor], choices: Choices, cells: Cells, stride: int
) -> Tensor:
    """Return (G,) what q_k gives to the teacher token of each cell, and the rest to "stop"."""
    row_G = choices.row_T.clamp(min=0)[cells.node_G]
    token_G = cells.key_G % stride - 1
    goes_on = (token_G >= 0) & (choices.row_T >= 0)[cells.node_G]
    q_G = torch.where(goes_on, logq(row_G, token_G.clamp(min=0)).exp(), 0.0)
    # below this the sum's rounding would decide, and the reverse KL takes the rest's logarithm
    least = 16 * torch.finfo(q_G.dtype).eps
    rest_K = (1 - cells.nodes().sum(q_G)).clamp(min=least)
    return torch.where(token_G >= 0, q_G, rest_K[cells.node_G])


def _mass_of_path(
    logq: Callable[[Tensor, Tensor], Tensor], first_K: Tensor, nodes: Nodes, tables: Tables
) -> Tensor:
    """Return (K,) the teacher's mass on the path's first k tokens; 0 where rows do not tell.

    Args:
        logq: (rows, tokens) -> what the teacher's rows give to tokens.
        first_K: the mass of the path's first token.
    """
    choices = nodes.choices
    along = choices.row_T >= 0
    # the path's other tokens: few nodes have any
    steps_end = torch.where(along, choices.level, 1)
    node_E, step_E = expand(torch.ones_like(steps_end), steps_end, nodes.sizes.step_E)
    row_E = nodes.roots.row_T[choices.root[node_E]] + step_E
    logq_E = logq(row_E, tables.pieces_V[choices.token[node_E], step_E])
    mass_K = first_K * Segments.of(node_E, len(first_K)).sum(logq_E).exp()
    return torch.where(along | (choices.level == 1), mass_K, 0.0)


def _going_on_in_scope(
    goes: GoingOn, nodes: Nodes, tables: Tables
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (node, student token, mass) of how the token before each choice goes on.

    Tokens outside of the scope have mass 0.
    """
    choices = nodes.choices
    number_N = torch.arange(len(goes.mass_K) + 1, device=goes.node_E.device)
    begin_N = torch.searchsorted(goes.node_E, number_N)
    node_E, place_E = expand(
        begin_N[choices.root], begin_N[choices.root + 1], nodes.sizes.going_E
    )
    next_E = goes.next_E[place_E].clamp(min=0)
    rank_E = tables.rank_V[next_E]
    in_scope = (rank_E >= choices.low[node_E]) & (rank_E < choices.high[node_E])
    mass_E = goes.mass_K[choices.root[node_E]] * goes.mass_E[place_E]
    return node_E, next_E, torch.where(in_scope, mass_E, 0.0)


class Openings(NamedTuple):
    """Hold the teacher's side of the inside nodes.

    cells: Cells, one for each token that comes next, from slot 1 on.
    token_G: (G,) that student token.
    target_KG: (K, G) mass of each cell, the rest in slot 0.
    """

    cells: Cells
    token_G: Tensor
    target_KG: Tensor


def inside_target(y_MW: Tensor, nodes: Nodes, tables: Tables) -> Openings:
    """Return what the teacher says at the inside nodes."""
    insides = nodes.insides
    goes = going_on(
        y_MW, insides.row_T, insides.low, insides.high, insides.level, tables,
        num=nodes.sizes.inside_E,
    )
    cells, cell_E = _inside_cells(
        goes.node_E, goes.next_E, len(insides.row_S), tables, nodes.sizes
    )
    mass_G = Segments.of(cell_E, len(cells.key_G)).sum(goes.mass_E)
    target_KG = cells.rows(mass_G * goes.mass_K[cells.node_G], 0.0)
    target_KG[:, 0] = goes.ends_K
    return Openings(cells, cells.key_G % len(tables.cell_V), target_KG)


def _inside_cells(
    node_E: Tensor, next_E: Tensor, num_nodes: int, tables: Tables, sizes: Sizes | None = None
) -> tuple[Cells, Tensor]:
    """Return the cells of insides, and the number of the cell of each token that goes on.

    Args:
        node_E: (E,) int64, sorted; next_E: what comes next, -1 for a token that ends.
        sizes: None: they are looked up.
    """
    stride = len(tables.cell_V)
    # tokens are sorted by their spelling, so equal keys are neighbors
    key_E = node_E * stride + next_E
    key_G, cell_E = distinct(key_E, next_E >= 0, sizes and sizes.inside_G)
    width = sizes and sizes.inside_width
    return Cells.of(key_G, stride, num_nodes, first_slot=1, width=width), cell_E


def inside_question(x_G: Tensor, rest_K: Tensor, openings: Openings) -> Question:
    """Return the inside nodes.

    Args:
        x_G: the student's logits of the cells' tokens.
        rest_K: logsumexp of all others in the row.
    """
    logits_KG = openings.cells.rows(x_G.clamp(min=10 * FLOOR), FLOOR)
    rest_K = rest_K.clamp(min=FLOOR)
    return Question(torch.cat([rest_K[:, None], logits_KG[:, 1:]], 1), openings.target_KG)


# --- what the nodes read --------------------------------------------------------------------------


class Reads(NamedTuple):
    """List what the nodes read of the student's logits beside the cells of the roots.

    row_R: (R,) int64 rows: those of the roots, of the insides, and of chunks of several tokens.
    number_E, token_E: (E,) single logits, by the number of the row in row_R: of the scopes, of the
        cells of the insides, and of the next tokens in chunks of several.
    number_X, token_X: (X,) what a logsumexp leaves out, row by row.  All rows but those of the
        roots have one; they are numbered from 0.
    """

    row_R: Tensor
    number_E: Tensor
    token_E: Tensor
    number_X: Tensor
    token_X: Tensor


def list_reads(
    nodes: Nodes, scopes: Scopes, openings: Openings, student_next_BS: Tensor
) -> Reads:
    """List what the nodes read."""
    many_S = nodes.many_S[:, 0]
    row_R = torch.cat([nodes.roots.row_S, nodes.insides.row_S, many_S])
    of_roots = len(nodes.roots.row_S)
    of_insides = len(nodes.insides.row_S)
    number_many = torch.arange(of_roots + of_insides, len(row_R), device=row_R.device)
    inside_G = openings.cells.node_G
    numbers = nodes.choices.root[scopes.node_E], inside_G + of_roots, number_many
    tokens = scopes.token_E, openings.token_G, student_next_BS.reshape(-1)[many_S]
    return Reads(row_R, torch.cat(numbers), torch.cat(tokens), inside_G, openings.token_G)


class Answers(NamedTuple):
    """Hold what both models answer.

    x_E, rest_L: the student's logits, and logsumexp, that `Reads` lists.
    q_A: the teacher's answer to `Scopes.asked`.
    log_total_M: logsumexp of the teacher's logits, in the rows that count.
    """

    x_E: Tensor
    rest_L: Tensor
    q_A: Tensor
    log_total_M: Tensor


def _read(
    x_NV: Tensor, y_MW: Tensor, nodes: Nodes, target: RootTarget, reads: Reads
) -> tuple[Tensor, Answers]:
    """Return (the student's logits in the rows of the roots, the answers to all else)."""
    # rows are selected once: each selection has a gradient as large as x
    x_RV = at_least_float32(take_rows(x_NV, reads.row_R))
    num_roots = len(nodes.roots.row_S)
    x_root, x_LV = torch.split(x_RV, [num_roots, len(x_RV) - num_roots])
    # finite where a model excludes tokens: the gradient of a logsumexp of -inf alone is NaN
    nothing = x_LV.new_full((len(reads.token_X),), 10 * FLOOR)
    x_LV = x_LV.clamp(min=10 * FLOOR)
    answers = Answers(
        x_E=x_RV[reads.number_E, reads.token_E],
        # from the other tokens: 1 - sum would lose a small rest, and its gradient
        rest_L=x_LV.index_put((reads.number_X, reads.token_X), nothing).logsumexp(-1),
        q_A=target.q_A,
        log_total_M=y_MW.logsumexp(-1),
    )
    return x_root, answers


# --- the loss -------------------------------------------------------------------------------------


def translated(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, student_next_BS: Tensor,
    teacher_next_BT: Tensor, nodes: Nodes, tables: Tables, *,
    divergence: Callable[..., SumAndCount] = forward_kl, temperature: float = 1.0,
    weight_BS: Tensor | None = None, reduction: str = "sum",
    has_rest: bool = False, of_roots: Callable[..., Tensor] = root_values, **parameters: Any,
) -> SumAndCount:
    """Compare the teacher's belief, translated, with the student, node by node.

    The sum, times tau^2, of D(teacher, student) over all nodes.  Both models' masses of the cells
    are those at temperature 1, to the power 1 / tau and normalized in the scope: softened before,
    a cell's mass would grow with the number of its tokens.  A choice weighs as its root does, and
    is not counted.  The rest of an n:m chunk is a forward KL whatever D is.  D = `forward_kl` makes
    the sum, in expectation over the text, KL(belief || student).

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient.
        student_next_BS, teacher_next_BT: int64, the token that each position predicts.
        nodes: from `list_nodes` of the same batch.
        divergence: one of losses.py that compares two models with one vocabulary: `forward_kl`,
            `reverse_kl`, `generalized_jsd`, `total_variation`, ...
        has_rest: the teacher's logits have W + 1 columns, some -inf and the last the rest, as those
            of `tiles.TopKLogits`, and the tables are those of `with_rest`; see `merge_rest`.  In
            other nodes than roots tokens that are not kept count as tokens that do not come.
        of_roots: `root_values`, or what computes the same, as torch.compile makes it of that.
        parameters: of the divergence (beta, skew, alpha, ...); top_k and support choose among the
            cells of a node by their masses.
    Returns:
        (sum, count): nats, and the student positions that the nodes cover.
    Raises:
        ValueError: logits of more or fewer tokens than the tables.
    """
    check_side("student", student_logits_BSV, student_next_BS=student_next_BS)
    check_side("teacher", teacher_logits_BTW, teacher_next_BT=teacher_next_BT)
    _check_widths(student_logits_BSV, teacher_logits_BTW, tables)
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = at_least_float32(teacher_logits_BTW.detach().flatten(0, 1))
    if x_NV.device.type == "cpu":  # else the rows that are needed, later
        x_NV = at_least_float32(x_NV)

    compare = partial(compare_cells, divergence, temperature, parameters)
    roots, choices, insides = nodes.roots, nodes.choices, nodes.insides
    goes = before_goes_on(y_MW, nodes, tables)
    scopes = list_scopes(choices, tables, nodes.sizes)
    openings = inside_target(y_MW, nodes, tables)
    reads = list_reads(nodes, scopes, openings, student_next_BS)
    target = root_target(y_MW, nodes, goes, scopes.asked, tables)
    x_root, answers = _read(x_NV, y_MW, nodes, target, reads)
    value_N = of_roots(x_root, target.cell_NC, tables.cell_V, compare, has_rest)
    others = _compare_others(
        answers, y_MW, teacher_next_BT, Listed(nodes, goes, scopes, openings), tables, compare,
        temperature=temperature,
    )
    value_N = value_N + Segments.of(choices.root, len(value_N)).sum(others.choice_K)
    values = [value_N, others.inside_K, others.rest_M]
    rows = [roots.row_S, insides.row_S, _second_rows(nodes)]
    row_N = torch.cat(rows)
    order = row_N.argsort()  # reading order
    value_N = temperature**2 * torch.cat(values)[order]
    return reduce_terms(value_N, row_N[order], student_next_BS.shape, weight_BS, reduction)


def _check_widths(
    student_logits: Tensor, teacher_logits: Tensor, tables: Tables,
) -> None:
    check_width("student", student_logits, len(tables.cell_V), "cell_V")
    check_width("teacher", teacher_logits, len(tables.cell_W), "cell_W")


class Listed(NamedTuple):
    """Hold the nodes of a batch and what the teacher says beside the cells of the roots."""

    nodes: Nodes
    goes: GoingOn
    scopes: Scopes
    openings: Openings


class OtherValues(NamedTuple):
    """Hold the divergences of choices, insides and rests."""

    choice_K: Tensor
    inside_K: Tensor
    rest_M: Tensor


def _compare_others(
    answers: Answers, y_MW: Tensor, teacher_next_BT: Tensor, listed: Listed, tables: Tables,
    compare: Compare, *, temperature: float = 1.0,
) -> OtherValues:
    """Compare all nodes but the roots."""
    nodes, goes, scopes, openings = listed
    num_many = len(nodes.many_S)
    num_insides = len(nodes.insides.row_S)
    sizes = [len(scopes.token_E), len(openings.token_G), num_many]
    x_scope, x_inside, x_many = torch.split(answers.x_E, sizes)
    rest_inside, rest_many = torch.split(answers.rest_L, [num_insides, num_many])
    choice_K = inside_K = rest_M = answers.x_E.new_zeros(0)
    if len(nodes.choices.root):
        question = choice_question(
            x_scope, y_MW, log_total_M=answers.log_total_M, q_A=answers.q_A, goes=goes,
            scopes=scopes, nodes=nodes, tables=tables,
        )
        choice_K = compare(question.logits_KG, question.logq_KG())
    if num_insides:
        question = inside_question(x_inside, rest_inside, openings)
        inside_K = compare(question.logits_KG, question.logq_KG())
    if nodes.count_many:
        row_T = nodes.many_T[:, 0]
        next_T = teacher_next_BT.reshape(-1)[row_T]
        logits_M = at_least_float32(y_MW[row_T, next_T])
        rest_M = _rests(x_many - rest_many, logits_M - answers.log_total_M[row_T], nodes,
                        temperature)
    return OtherValues(choice_K, inside_K, rest_M)


def cell_coverage(
    teacher_logits_BTW: Tensor, nodes: Nodes, tables: Tables
) -> dict[str, SumAndCount]:
    """Measure the teacher's belief at the roots, each as (sum of probabilities, roots).

    cell_coverage: of tokens that give their mass to a cell.
    joined_mass: of those, what the student's tokenizer would have joined to the token before, so
    that it is left out.
    """
    check_side("teacher", teacher_logits_BTW)
    check_width("teacher", teacher_logits_BTW, len(tables.cell_W), "cell_W")
    with torch.no_grad():
        y_MW = teacher_logits_BTW.detach().flatten(0, 1)
        roots = nodes.roots
        q_NW = at_least_float32(y_MW.index_select(0, roots.row_T)).softmax(-1)
        has_cell_W = tables.cell_W < tables.num_cells
        covered = q_NW[:, has_cell_W].sum()
        _mask_joined(q_NW, nodes, tables)
        num_roots = torch.tensor(len(roots.row_T), device=y_MW.device)
        return {
            "cell_coverage": (covered, num_roots),
            "joined_mass": (covered - q_NW[:, has_cell_W].sum(), num_roots),
        }


def _rests(logp_S: Tensor, logq_T: Tensor, nodes: Nodes, temperature: float) -> Tensor:
    """Return the KL between two Bernoulli variables, "the text goes on so", of each n:m chunk.

    Args:
        logp_S, logq_T: log-probabilities of the next tokens in nodes.many_S and many_T.
    """
    chunks_S = Segments.of(nodes.many_S[:, 1].contiguous(), nodes.count_many)
    chunks_T = Segments.of(nodes.many_T[:, 1].contiguous(), nodes.count_many)
    logp = chunks_S.sum(logp_S.clamp(min=FLOOR))
    logq = chunks_T.sum(logq_T.clamp(min=FLOOR))
    return bernoulli_kl(soften_bernoulli(logq, temperature), soften_bernoulli(logp, temperature))


def _second_rows(nodes: Nodes) -> Tensor:
    """Return the second student row of each n:m chunk; the first has the root."""
    row_S, chunk_S = nodes.many_S.unbind(1)
    first = row_S.new_full((nodes.count_many,), torch.iinfo(torch.int64).max)
    return first.scatter_reduce(0, chunk_S, row_S, "amin") + 1
