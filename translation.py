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
    has a teacher token that is longer than the student's, the tokens like it decide.
inside, within a teacher token, after student tokens u.  Scope: all; cells: each token with which
    the teacher tokens that begin with u go on, and one for the rest.
rest, of chunks of several tokens on both sides: did the text go on so?

Two things that the student knows and a teacher's row does not, or the other way round, are taken
into account.  After a chunk of one teacher token u the student knows the bytes, not that the
teacher's token ended there: with probability lambda it would have gone on, and the target of root
and choice is a mixture.  And if the student's token v0 ended at this boundary, teacher tokens that
its tokenizer would have joined to v0 did not come: they get mass 0 (never the realized one).

By the chain rule the forward KL over the nodes is, in expectation over the text, KL(belief ||
student).  It is exact where one tokenizer's tokens are unions of the other's
(tests/test_translation.py enumerates all texts of small processes); where tokens cross, what the
teacher would have said after other cuts of the same bytes is not known, and a bias stays.

Shapes: N rows of the student or of roots, M rows of the teacher, V, W vocabularies, C cells,
K choice or inside nodes, G groups (cells of one node), E entries (tokens in groups), P pieces.

Needs torch and losses.py.  License: Apache-2.0 (see LICENSE).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from losses import (
    FLOOR,
    SHIFT,
    SumAndCount,
    _bernoulli_kl,
    _chunk_logp,
    at_least_float32,
    find_chunks,
    position_divergence,
    reduce_terms,
)

# --- tables ---------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Tell how two vocabularies spell each other (projection_tools.spell builds it).

    cell_V, cell_W: (V,), (W,) int64, cell of each student token, and that which a teacher token
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
        join_start_V[v0 + 1].
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


# --- nodes, from ids ------------------------------------------------------------------------------


class Nodes(NamedTuple):
    """List all nodes of some chunks, known from ids alone, before any forward pass.

    root_S, root_T: (N,) rows that predict the first token of a chunk on either side.
    before_S: (N,) student token in front of the chunk, -1 for none.
    next_T: (N,) the teacher token that comes.
    ended_T: (N,) u, the teacher token that ended in front, if it is a chunk of its own that the
        student spells A[u], and its row is root_T - 1; else -1.
    choice_root: (K,) root of each choice node.
    choice_level: (K,) k.
    choice_low, choice_high: (K,) its scope, ``order_V[low:high]``.
    choice_token: (K,) realized student token, whose path leads to the node.
    choice_row: (K,) teacher row that q_k comes from; -1: a longer token came.
    inside_S, inside_T: (K,) student row, and the row that predicts the teacher token it is in.
    inside_low, inside_high: (K,) teacher tokens that begin so, ``order_W[low:high]``.
    inside_level: (K,) student tokens since the teacher token began.
    many_S, many_T: (M, 2) int64 (row, chunk): all rows of chunks with several tokens on both sides.
    count_many: how many such chunks.
    count_all: () int64, student positions (and n:m remainders) that the nodes cover.
    """

    root_S: Tensor
    root_T: Tensor
    before_S: Tensor
    next_T: Tensor
    ended_T: Tensor
    choice_root: Tensor
    choice_level: Tensor
    choice_low: Tensor
    choice_high: Tensor
    choice_token: Tensor
    choice_row: Tensor
    inside_S: Tensor
    inside_T: Tensor
    inside_low: Tensor
    inside_high: Tensor
    inside_level: Tensor
    many_S: Tensor
    many_T: Tensor
    count_many: int
    count_all: Tensor


def list_nodes(
    student_next: Tensor, teacher_next: Tensor, student_chunk: Tensor, teacher_chunk: Tensor,
    tables: Tables, student_read: Tensor, teacher_ended: Tensor, teacher_follows: Tensor,
) -> Nodes:
    """List the nodes of some rows; meant for the CPU, where the ids come from.

    Args:
        student_next, teacher_next: (N,), (M,) int64, token that each row predicts.
        student_chunk, teacher_chunk: (N,), (M,) int64, -1 for none.
        student_read: (N,) int64, token that each student row reads.
        teacher_ended: (M,) int64, see `tokens_that_ended`.
        teacher_follows: (M,) bool, the row is of the position after that of the row before, in the
            same text.
    """
    chunks = find_chunks(student_chunk[None], teacher_chunk[None])
    first_S = chunks.first_S
    first_T = chunks.first_T
    token = student_next[first_S] if len(first_S) else first_S
    num_pieces = tables.pieces_V.shape[1]
    level = torch.arange(1, num_pieces + 1)
    # teacher tokens that came, from the first one of the chunk on, as far as rows are neighbors
    last = max(len(teacher_next) - 1, 0)
    offset = torch.arange(num_pieces + 1)
    row = (first_T[:, None] + offset).clamp(max=last)
    exists = (first_T[:, None] + offset) <= last
    joined = exists & torch.where(offset == 0, True, teacher_follows[row])
    joined = joined.cumprod(1).bool()
    path = tables.pieces_V[token]
    came = torch.where(joined, teacher_next[row], -2)[:, :-1]
    along = ((came == path) & (path >= 0)).cumprod(1).bool()  # column k - 1: k tokens came
    in_path = path >= 0
    # scopes after k tokens; behind the last column of the tables nothing goes on
    low = _scope(tables.low_V, token, tables, 0)
    high = _scope(tables.high_V, token, tables, 1)
    several = in_path & (high - low > 1)
    has_row = torch.cat([joined[:, 1:]], 1)
    linked = tables.cell_V[token] < tables.num_cells
    same_cell = tables.cell_W[teacher_next[first_T]] == tables.cell_V[token] if len(token) else linked
    goes = several & along & has_row
    # a longer token came: it heads no cell, and the student's token begins it
    longer = several & (~along[:, :1]) & (same_cell & linked)[:, None]
    used = (goes | longer) & linked[:, None]
    root, column = used.nonzero(as_tuple=True)
    k = level[column]
    choice_row = torch.where(along[root, column], first_T[root] + k, -1)

    one_teacher_token = (chunks.count_T == 1) & (chunks.count_S > 1)
    inside = _inside(student_next, teacher_next, chunks, one_teacher_token, tables)
    is_many = (chunks.count_S > 1) & (chunks.count_T > 1)
    count_many = int(is_many.sum())
    number = torch.where(is_many, is_many.cumsum(0) - 1, -1)
    count_all = len(first_S) + len(inside[0]) + count_many
    return Nodes(
        root_S=first_S,
        root_T=first_T,
        before_S=student_read[first_S],
        next_T=teacher_next[first_T],
        ended_T=teacher_ended[first_T],
        choice_root=root,
        choice_level=k,
        choice_low=low[root, column],
        choice_high=high[root, column],
        choice_token=token[root],
        choice_row=choice_row,
        inside_S=inside[0],
        inside_T=inside[1],
        inside_low=inside[2],
        inside_high=inside[3],
        inside_level=inside[4],
        many_S=torch.stack([chunks.row_S, number[chunks.of_S]], 1)[is_many[chunks.of_S]],
        many_T=torch.stack([chunks.row_T, number[chunks.of_T]], 1)[is_many[chunks.of_T]],
        count_many=count_many,
        count_all=torch.tensor(count_all),
    )


def _scope(bounds: Tensor, token: Tensor, tables: Tables, shift: int) -> Tensor:
    """Return (N, P) bounds of the student tokens whose path begins with k = 1 .. P tokens of B."""
    rank = tables.rank_V[token][:, None] + shift
    return torch.cat([bounds[token][:, 1:], rank], 1)


def _inside(student_next, teacher_next, chunks, chosen, tables):
    """List positions k >= 1 of chunks with one teacher token, as far as the text spells it so."""
    first_S = chunks.first_S[chosen]
    first_T = chunks.first_T[chosen]
    num_pieces = tables.pieces_W.shape[1]
    k = torch.arange(num_pieces)
    token = teacher_next[first_T] if len(first_T) else first_T
    last = max(len(student_next) - 1, 0)
    realized = student_next[(first_S[:, None] + k).clamp(max=last)]
    matches = (realized == tables.pieces_W[token]) & (k < chunks.count_S[chosen][:, None])
    chunk, offset = (matches.cumprod(1)[:, 1:] > 0).nonzero(as_tuple=True)
    level = offset + 1
    token = token[chunk]
    return (first_S[chunk] + level, first_T[chunk], tables.low_W[token, level],
            tables.high_W[token, level], level)


def tokens_that_ended(
    student_next_BS: Tensor, teacher_next_BT: Tensor, student_chunk_BS: Tensor,
    teacher_chunk_BT: Tensor, tables: Tables, student_text_BS: Tensor, teacher_text_BT: Tensor,
) -> Tensor:
    """Return (B, T) the teacher token in front of each chunk, where the student knows its bytes.

    Known are the tokens that are a chunk of their own, spelled A[u] by the student, directly in
    front of a chunk, in the same text.  -1 elsewhere.

    Args:
        student_text_BS, teacher_text_BT: number of the text that each position belongs to.
    """
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    ended = torch.full((teacher_next_BT.numel(),), -1)
    if len(chunks.first_S) < 2:
        return ended.view_as(teacher_next_BT)
    student_next = student_next_BS.reshape(-1)
    student_text = student_text_BS.reshape(-1)
    teacher_text = teacher_text_BT.reshape(-1)
    order = chunks.first_T.argsort()
    first_S = chunks.first_S[order]
    first_T = chunks.first_T[order]
    count_S = chunks.count_S[order]
    count_T = chunks.count_T[order]
    before = slice(0, -1)
    neighbors = first_T[before] + count_T[before] == first_T[1:]
    neighbors &= first_S[before] + count_S[before] == first_S[1:]
    neighbors &= student_text[first_S[before]] == student_text[first_S[1:]]
    neighbors &= teacher_text[first_T[before]] == teacher_text[first_T[1:]]
    neighbors &= count_T[before] == 1
    u = teacher_next_BT.reshape(-1)[first_T[before]]
    pieces = tables.pieces_W[u]
    k = torch.arange(pieces.shape[1])
    last = len(student_next) - 1
    realized = student_next[(first_S[before][:, None] + k).clamp(max=last)]
    realized = torch.where(k < count_S[before][:, None], realized, -1)
    neighbors &= (realized == pieces).all(1) & (count_S[before] <= len(k))
    ended[first_T[1:][neighbors]] = u[neighbors]
    return ended.view_as(teacher_next_BT)


# --- targets --------------------------------------------------------------------------------------


def expand(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of its range, place) of every place of every range low .. high - 1."""
    sizes = high - low
    number = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    begin = sizes.cumsum(0) - sizes
    place = torch.arange(len(number), device=sizes.device) - begin[number] + low[number]
    return number, place


class GoingOn(NamedTuple):
    """Hold the teacher's belief that its token, of which the student has read u, goes on.

    goes_N: (N,) lambda, the probability that it does.
    node_E, next_E: (E,) node, and student token that comes next.
    mass_E: (E,) probability of that token if it goes on.
    """

    goes_N: Tensor
    node_E: Tensor
    next_E: Tensor
    mass_E: Tensor


def going_on(y_NW: Tensor, low: Tensor, high: Tensor, level: Tensor, tables: Tables) -> GoingOn:
    """Ask the teacher's rows how the tokens ``order_W[low:high]`` go on after `level` pieces."""
    num = len(low)
    node_E, place_E = expand(low, high)
    token_E = tables.order_W[place_E]
    level_E = level[node_E]
    in_table = level_E < tables.pieces_W.shape[1]
    next_E = tables.pieces_W[token_E, level_E.clamp(max=tables.pieces_W.shape[1] - 1)]
    next_E = torch.where(in_table, next_E, -1)
    logits_E = y_NW[node_E, token_E]
    top_N = logits_E.new_full((num,), -torch.inf).scatter_reduce(0, node_E, logits_E, "amax")
    mass_E = (logits_E - top_N[node_E]).exp()
    goes_E = next_E >= 0
    all_N = mass_E.new_zeros(num).index_add(0, node_E, mass_E)
    going_N = mass_E.new_zeros(num).index_add(0, node_E[goes_E], mass_E[goes_E])
    tiny = torch.finfo(mass_E.dtype).tiny
    return GoingOn(
        goes_N=going_N / all_N.clamp(min=tiny),
        node_E=node_E[goes_E],
        next_E=next_E[goes_E],
        mass_E=(mass_E / going_N.clamp(min=tiny)[node_E])[goes_E],
    )


class Target(NamedTuple):
    """Hold the teacher's belief at the roots.

    q_NW: (N, W) probability of each teacher token, what cannot come left out.
    goes: GoingOn of the roots.
    cell_NC: (N, C) mass of each cell.
    """

    q_NW: Tensor
    goes: GoingOn
    cell_NC: Tensor


def root_target(y_MW: Tensor, nodes: Nodes, tables: Tables) -> Target:
    """Return the Target of all roots from the teacher's logits, already divided by tau."""
    q_NW = y_MW[nodes.root_T].softmax(-1)
    rows = torch.arange(len(q_NW), device=q_NW.device)
    came_N = q_NW[rows, nodes.next_T]
    known = nodes.before_S >= 0
    before = nodes.before_S.clamp(min=0)
    low = torch.where(known, tables.join_start_V[before], 0)
    high = torch.where(known, tables.join_start_V[before + 1], 0)
    row_J, join_J = expand(low, high)
    row_E, place_E = expand(tables.join_low_J[join_J], tables.join_high_J[join_J])
    q_NW[row_J[row_E], tables.order_W[place_E]] = 0
    q_NW[rows, nodes.next_T] = came_N  # whatever the tables say
    mass_NC = q_NW.new_zeros(len(q_NW), tables.num_cells + 1).index_add_(1, tables.cell_W, q_NW)
    mass_NC = mass_NC[:, :-1]
    total_N1 = mass_NC.sum(1, keepdim=True).clamp(min=torch.finfo(q_NW.dtype).tiny)
    mass_NC /= total_N1
    q_NW /= total_N1

    ended = nodes.ended_T >= 0
    u = nodes.ended_T.clamp(min=0)
    level = (tables.pieces_W[u] >= 0).sum(1)
    column = level.clamp(max=tables.low_W.shape[1] - 1)
    # a token with as many pieces as the tables have goes on nowhere
    ended &= level < tables.low_W.shape[1]
    low = torch.where(ended, tables.low_W[u, column], 0)
    high = torch.where(ended, tables.high_W[u, column], 0)
    goes = going_on(y_MW[(nodes.root_T - 1).clamp(min=0)], low, high, level, tables)
    cell_E = tables.cell_V[goes.next_E]
    linked_E = cell_E < tables.num_cells
    mass_NC *= (1 - goes.goes_N)[:, None]
    weight_E = (goes.goes_N[goes.node_E] * goes.mass_E)[linked_E]
    mass_NC.index_put_((goes.node_E[linked_E], cell_E[linked_E]), weight_E, accumulate=True)
    return Target(q_NW, goes, mass_NC)


class Groups(NamedTuple):
    """Hold the cells of small nodes, as rows that are padded.

    logits_KG: (K, G) logarithm of the student's mass in each cell, up to a constant of the row.
    target_KG: (K, G) the teacher's mass, summing to 1.
    """

    logits_KG: Tensor
    target_KG: Tensor


def choice_groups(
    x_KV: Tensor, y_MW: Tensor, target: Target, nodes: Nodes, tables: Tables
) -> Groups:
    """Return the cells of all choice nodes; x_KV are the student's rows, one for each node."""
    num = len(nodes.choice_root)
    W = len(tables.cell_W)
    last = tables.pieces_V.shape[1] - 1

    def child_of(token, k):
        return torch.where(k <= last, tables.pieces_V[token, k.clamp(max=last)], -1)

    node_E, place_E = expand(nodes.choice_low, nodes.choice_high)
    token_E = tables.order_V[place_E]
    key_E = node_E * (W + 1) + child_of(token_E, nodes.choice_level[node_E]) + 1
    key_G, group_E = torch.unique_consecutive(key_E, return_inverse=True)
    node_G = key_G // (W + 1)
    child_G = key_G % (W + 1) - 1
    first_K = torch.searchsorted(node_G, torch.arange(num, device=node_G.device))
    slot_G = torch.arange(len(node_G), device=node_G.device) - first_K[node_G]
    width = int(slot_G.max()) + 1 if len(slot_G) else 1

    logits_E = x_KV[node_E, token_E]
    logits_G = _logsumexp(logits_E, group_E, len(key_G))
    logits_KG = logits_G.new_full((num, width), FLOOR).index_put((node_G, slot_G), logits_G)

    # q_k, where the text went along the path
    along = nodes.choice_row >= 0
    row_K = nodes.choice_row.clamp(min=0)
    log_all_M = y_MW.logsumexp(-1)
    goes_G = child_G >= 0
    q_G = (y_MW[row_K[node_G], child_G.clamp(min=0)] - log_all_M[row_K[node_G]]).exp()
    q_G = torch.where(goes_G, q_G, 0)
    sum_K = q_G.new_zeros(num).index_add(0, node_G, q_G)
    q_G = torch.where(goes_G, q_G, (1 - sum_K).clamp(min=0)[node_G])
    # the longer tokens of the scope say what they begin with
    low = torch.searchsorted(tables.longer_rank_F, nodes.choice_low)
    high = torch.searchsorted(tables.longer_rank_F, nodes.choice_high)
    longer_node, longer_place = expand(low, high)
    longer_token = tables.longer_F[longer_place]
    begins_with = tables.pieces_W[longer_token, 0]
    longer_group = torch.searchsorted(
        key_G, longer_node * (W + 1) + child_of(begins_with, nodes.choice_level[longer_node]) + 1)
    longer_mass = target.q_NW[nodes.choice_root[longer_node], longer_token]
    longer_G = q_G.new_zeros(len(key_G)).index_add(0, longer_group, longer_mass)
    longer_K = q_G.new_zeros(num).index_add(0, longer_node, longer_mass)
    split_G = torch.where(along[node_G], q_G, longer_G)
    split_G = split_G / _total(split_G, node_G, num)[node_G]

    # mass of the path through q_0, q_1, ..., and of the other branch, where the token before goes on
    step = torch.arange(1, last + 1, device=node_G.device)
    root_row = nodes.root_T[nodes.choice_root]
    token_KP = tables.pieces_V[nodes.choice_token][:, 1:].clamp(min=0)
    row_KP = (root_row[:, None] + step).clamp(max=len(y_MW) - 1)
    log_step = y_MW[row_KP, token_KP] - log_all_M[row_KP]
    log_step = torch.where(step < nodes.choice_level[:, None], log_step, 0.0)
    log_step = torch.where(along[:, None], log_step, 0.0)
    head = tables.pieces_V[nodes.choice_token, 0]
    path_K = target.q_NW[nodes.choice_root, head] * log_step.sum(1).exp()
    goes = target.goes
    goes_K = goes.goes_N[nodes.choice_root]
    here_K = (1 - goes_K) * (torch.where(along | (nodes.choice_level == 1), path_K, 0) + longer_K)
    begin_N = torch.searchsorted(goes.node_E, torch.arange(len(goes.goes_N) + 1, device=node_G.device))
    other_node, other_place = expand(begin_N[nodes.choice_root], begin_N[nodes.choice_root + 1])
    other_next = goes.next_E[other_place]
    other_rank = tables.rank_V[other_next]
    in_scope = (other_rank >= nodes.choice_low[other_node]) & (
        other_rank < nodes.choice_high[other_node])
    other_node = other_node[in_scope]
    other_next = other_next[in_scope]
    other_mass = goes_K[other_node] * goes.mass_E[other_place[in_scope]]
    other_group = torch.searchsorted(
        key_G, other_node * (W + 1) + child_of(other_next, nodes.choice_level[other_node]) + 1)
    other_G = q_G.new_zeros(len(key_G)).index_add(0, other_group, other_mass)
    mass_G = here_K[node_G] * split_G + other_G
    # where neither branch has any mass that counts, the split alone
    total_G = _total(mass_G, node_G, num)[node_G]
    tiny = torch.finfo(mass_G.dtype).tiny
    mass_G = torch.where(total_G > tiny, mass_G / total_G, split_G)
    target_KG = mass_G.new_zeros(num, width).index_put((node_G, slot_G), mass_G)
    return Groups(logits_KG, target_KG)


def _total(x_G: Tensor, node_G: Tensor, num: int) -> Tensor:
    total = x_G.new_zeros(num).index_add(0, node_G, x_G)
    return total.clamp(min=torch.finfo(x_G.dtype).tiny)


def _logsumexp(x_E: Tensor, segment_E: Tensor, num: int) -> Tensor:
    """Return the (num,) logsumexp of the entries of each segment, none of which is empty."""
    top = x_E.new_full((num,), -torch.inf).scatter_reduce(0, segment_E, x_E.detach(), "amax")
    mass = x_E.new_zeros(num).index_add(0, segment_E, (x_E - top[segment_E]).exp())
    return mass.log() + top


def inside_groups(x_KV: Tensor, y_KW: Tensor, nodes: Nodes, tables: Tables) -> Groups:
    """Return the cells of all inside nodes: the tokens that go on, then the rest in slot 0."""
    num = len(nodes.inside_S)
    goes = going_on(y_KW, nodes.inside_low, nodes.inside_high, nodes.inside_level, tables)
    V = x_KV.shape[1]
    key_E = goes.node_E * V + goes.next_E
    key_G, group_E = key_E.unique(return_inverse=True)
    node_G = key_G // V
    token_G = key_G % V
    mass_G = goes.mass_E.new_zeros(len(key_G)).index_add(0, group_E, goes.mass_E)
    first_K = torch.searchsorted(node_G, torch.arange(num, device=node_G.device))
    slot_G = torch.arange(len(node_G), device=node_G.device) - first_K[node_G] + 1
    width = int(slot_G.max()) + 1 if len(slot_G) else 1
    logits_G = x_KV[node_G, token_G]
    others_KV = x_KV.index_put((node_G, token_G), x_KV.new_full((len(node_G),), -torch.inf))
    rest_K = others_KV.logsumexp(-1)
    slot = torch.zeros_like(node_G)
    logits_KG = x_KV.new_full((num, width), FLOOR).index_put((node_G, slot_G), logits_G)
    rows = torch.arange(num, device=node_G.device)
    logits_KG = logits_KG.index_put((rows, slot.new_zeros(num)), rest_K.clamp(min=FLOOR))
    target_KG = mass_G.new_zeros(num, width).index_put(
        (node_G, slot_G), mass_G * goes.goes_N[node_G])
    target_KG[:, 0] = 1 - goes.goes_N
    return Groups(logits_KG, target_KG)


# --- the loss -------------------------------------------------------------------------------------


def translated(
    student_logits_NV: Tensor, teacher_logits_MW: Tensor, nodes: Nodes, tables: Tables,
    student_next: Tensor, teacher_next: Tensor, divergence: str = "forward_kl",
    coefficient: float = 0.0, temperature: float = 1.0, weight_N: Tensor | None = None,
    reduction: str = "sum",
) -> SumAndCount:
    """Compute a divergence between the teacher's translated belief and the student, node by node.

    Returns:
        (sum, count): nats, and the student positions covered.
    """
    x_NV = at_least_float32(student_logits_NV) / temperature
    y_MW = at_least_float32(teacher_logits_MW.detach()) / temperature

    def compare(logits_KG, target_KG):
        """Return the (K,) divergences of some nodes."""
        if not len(logits_KG):
            return logits_KG.sum(1)
        tiny = torch.finfo(target_KG.dtype).tiny
        value, _ = position_divergence(
            divergence, logits_KG[None], target_KG.clamp(min=tiny).log()[None], None,
            reduction="none", coefficient=coefficient)
        return value

    target = root_target(y_MW, nodes, tables)
    value_N = compare(_cell_logits(x_NV[nodes.root_S], tables), target.cell_NC)
    if len(nodes.choice_root):
        groups = choice_groups(
            x_NV[nodes.root_S[nodes.choice_root]], y_MW, target, nodes, tables)
        value_N = value_N.index_add(0, nodes.choice_root, compare(*groups))
    values = [value_N]
    rows = [nodes.root_S]
    if len(nodes.inside_S):
        groups = inside_groups(x_NV[nodes.inside_S], y_MW[nodes.inside_T], nodes, tables)
        values.append(compare(*groups))
        rows.append(nodes.inside_S)
    if nodes.count_many:
        row_S, chunk_S = nodes.many_S.unbind(1)
        row_T, chunk_T = nodes.many_T.unbind(1)
        logp = _chunk_logp(x_NV, student_next, row_S, chunk_S, nodes.count_many, 1.0, None)
        logq = _chunk_logp(y_MW, teacher_next, row_T, chunk_T, nodes.count_many, 1.0, None)
        values.append(_bernoulli_kl(logq, logp))
        first = row_S.new_full((nodes.count_many,), torch.iinfo(torch.int64).max)
        rows.append(first.scatter_reduce(0, chunk_S, row_S, "amin") + 1)
    row_N = torch.cat(rows)
    order = row_N.argsort()
    value = temperature**2 * torch.cat(values)[order]
    weight = None if weight_N is None else weight_N[None]
    return reduce_terms(value, row_N[order], (1, len(x_NV)), weight, reduction)


def _cell_logits(x_NV: Tensor, tables: Tables) -> Tensor:
    """Return (N, C) logarithms of the mass of each cell, up to a constant of the row."""
    linked = tables.cell_V < tables.num_cells
    top = x_NV.detach().masked_fill(~linked, -torch.inf).amax(-1, keepdim=True)
    mass_NV = (x_NV - top + SHIFT).clamp(max=SHIFT).exp()
    mass = x_NV.new_zeros(len(x_NV), tables.num_cells + 1).index_add(1, tables.cell_V, mass_NV)
    return mass[:, :-1].clamp(min=torch.finfo(mass.dtype).tiny).log()
