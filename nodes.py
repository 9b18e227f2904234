"""List the nodes of a translation: what to ask two models about a text, known from its ids alone.

The student's next token, seen through the teacher's tokens, is a path and then "stop".  So the
teacher's belief about it is a tree of nodes, each a fair question to both models: a scope of
student tokens, cut into cells.  translation.py says what the nodes mean, asks the models, and
compares their answers; here is listed where in the logits it looks.

Shapes: B samples; S, T positions; N roots, of which rows are positions of the flattened batch; V, W
vocabularies; C cells of the roots; K nodes of another kind; G cells of these, one after the other;
E entries (tokens in cells); P pieces; F, J see `Tables`.

Needs torch and losses.py.  Copy both into your own repository.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_translation.py.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from .losses import Chunks, Segments, check_positions, find_chunks
except ImportError:  # copied beside it, not into a package
    from losses import Chunks, Segments, check_positions, find_chunks

# --- tables ---------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Tell how two vocabularies spell each other (projection_tools.cells builds it).

    cell_V, cell_W: (V,), (W,) int64, cell of each student token, and the one that a teacher token
        gives its mass to; C for tokens without one.
    num_cells: C.
    closed_V: (V,) int64, of which bit k - 1 says that behind k tokens of B[v] no teacher token goes
        on beyond the end of a student token; -1: behind none.
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
    closed_V: Tensor
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


class Ranges(NamedTuple):
    """Name places for each of K nodes, low .. high - 1; each is an entry, node by node.

    start_K: (K + 1,) int64, the first entry of each node and, last, E.
    skip_K: (K,) the number of an entry less its place.
    num: E.
    """

    start_K: Tensor
    skip_K: Tensor
    num: int

    @classmethod
    def of(cls, low: Tensor, high: Tensor, num: int | None = None) -> "Ranges":
        """Make ranges; num: E, where it is known; else the device is asked, and waited for."""
        start_K = F.pad((high - low).cumsum(0), (1, 0))
        return cls(start_K, start_K[:-1] - low, int(start_K[-1]) if num is None else num)

    def list(self) -> tuple[Segments, Tensor]:
        """Return (the entries of each node, the place of each entry)."""
        node_E = torch.repeat_interleave(self.start_K.diff(), output_size=self.num)
        place_E = torch.arange(self.num, device=node_E.device) - self.skip_K[node_E]
        return Segments(node_E, self.start_K), place_E


def distinct(key_E: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys (G,), and the number (E,) of each entry's.

    Args:
        key_E: int64; equal ones are neighbors.
        counts_E: bool; other entries may have any number, in order still.
    """
    is_new_E = counts_E.clone()
    is_new_E[1:] &= (key_E[1:] != key_E[:-1]) | ~counts_E[:-1]
    return key_E[is_new_E], (is_new_E.cumsum(0) - 1).clamp(min=0)


# --- nodes ----------------------------------------------------------------------------------------


class Roots(NamedTuple):
    """List the root nodes: one for every chunk.

    row_S, row_T: (N,) int64, rows that predict the first token of the chunk on either side.
    next_S, next_T: (N,) the student's and the teacher's token that come.
    ended_T: (N,) u, see `tokens_that_ended`; its row is row_T - 1.
    joins: those behind the student token in front of the chunk, see `Tables`.
    num_joined: tokens in all of these.
    """

    row_S: Tensor
    row_T: Tensor
    next_S: Tensor
    next_T: Tensor
    ended_T: Tensor
    joins: Ranges
    num_joined: int


class _Begun(NamedTuple):
    """Name teacher tokens that may stand in one place: those that begin with what was read of it.

    row_K: (K,) int64, the teacher's row that predicts them.
    level: (K,) student tokens that were read of them.
    low, high: (K,) the tokens ``order_W[low:high]``; none: not known.
    num_ended: (K,) how many of these, the first ones, end there.
    """

    row_K: Tensor
    level: Tensor
    low: Tensor
    high: Tensor
    num_ended: Tensor

    @classmethod
    def of(
        cls, row_K: Tensor, level: Tensor, low: Tensor, high: Tensor, tables: Tables
    ) -> "_Begun":
        # a text has the same words again and again, and thousands of tokens begin like a space
        stride = len(tables.order_W) + 1
        range_U, number_K = torch.unique((level * stride + low) * stride + high,
                                         return_inverse=True)
        distinct_low = range_U // stride % stride
        nodes, next_E = _list_begun(distinct_low, range_U % stride, range_U // stride**2, tables)
        num_ended = F.pad((next_E < 0).cumsum(0), (1, 0))[nodes.start_K].diff()
        return cls(row_K, level, low, high, num_ended[number_K])


def _list_begun(
    low: Tensor, high: Tensor, level: Tensor, tables: Tables
) -> tuple[Segments, Tensor]:
    """Return (all tokens of each node of a _Begun, with which student token each goes on or -1)."""
    nodes, place_E = Ranges.of(low, high).list()
    return nodes, tables.pieces_W[tables.order_W[place_E], level[nodes.of_E]]


class Continuations(NamedTuple):
    """Name the teacher tokens that may stand in some places: those of roots, then of insides.

    row_K, level: see `_Begun`.
    tokens: in order_W.
    start_2K: (2 K + 1,) int64, where in these begin those that end, and those that go on, of each
        node in turn and, last, E.
    num_roots, num_before: how many of the nodes are roots, and of the tokens theirs.
    """

    row_K: Tensor
    level: Tensor
    tokens: Ranges
    start_2K: Tensor
    num_roots: int
    num_before: int

    @classmethod
    def of(cls, before: _Begun, inside: _Begun, bounds: dict[str, Tensor]) -> "Continuations":
        """Put them together part by part; bounds: of the parts in both, see `_bounds`."""
        parts = [torch.repeat_interleave(bounds[name].diff()) for name in "NM"]
        order = torch.cat(parts).argsort(stable=True)
        row_K, level, low, high, num_ended = (torch.cat(x)[order] for x in zip(before, inside))
        tokens = Ranges.of(low, high)
        start_2K = tokens.start_K.repeat_interleave(2)[:-1]
        start_2K[1::2] += num_ended
        num_before = int((before.high - before.low).sum())
        return cls(row_K, level, tokens, start_2K, len(before.row_K), num_before)


class Cells(NamedTuple):
    """Number the cells of small nodes one after the other, and give each a slot in its node's row.

    nodes: the G cells, node by node.
    slot_G: (G,) int64.
    width: of the rows.
    """

    nodes: Segments
    slot_G: Tensor
    width: int

    @classmethod
    def of(cls, node_G: Tensor, num_nodes: int) -> "Cells":
        nodes = Segments.of(node_G, num_nodes)
        slot_G = torch.arange(len(node_G)) - nodes.start_K[node_G]
        return cls(nodes, slot_G, int(slot_G.max()) + 1 if len(slot_G) else 1)

    def rows(self, value_G: Tensor, padding: float) -> Tensor:
        """Return (K, width) values, a row for each node."""
        out = value_G.new_full((self.nodes.num, self.width), padding)
        return out.index_put((self.nodes.of_E, self.slot_G), value_G)


class Choices(NamedTuple):
    """List the choice nodes.

    roots: the K nodes, root by root.
    level: (K,) k.
    is_told: (K,) bool, the teacher's rows tell the mass of the path's first k tokens.
    row_T: (K,) teacher row that q_k comes from; -1: a longer token came.
    tokens: the student tokens in the scopes, cell by cell.
    token_E: each of them.
    cells: Cells; next_G: the teacher token with which each goes on, -1 for "stop".
    first_K: (K,) the first token of each path.
    longer: for each cell the teacher tokens, in longer_F, that begin with a token of it.
    steps: the other tokens of the paths, node by node; step_row_E, step_token_E: the teacher's row,
        and the token.
    going: how the token before each root goes on within the scopes, cell by cell.
    going_place_E: the place among the tokens of `Nodes.continuations`.
    """

    roots: Segments
    level: Tensor
    is_told: Tensor
    row_T: Tensor
    tokens: Segments
    token_E: Tensor
    cells: Cells
    next_G: Tensor
    first_K: Tensor
    longer: Ranges
    steps: Segments
    step_row_E: Tensor
    step_token_E: Tensor
    going: Segments
    going_place_E: Tensor


class Insides(NamedTuple):
    """List the inside nodes.

    row_S: (K,) int64, the student's row.
    of_cells: the teacher tokens that begin so, cell by cell; those that end there are in any.
    cells: Cells, one for each token that comes next; the rest has none.
    token_G: (G,) that student token.
    """

    row_S: Tensor
    of_cells: Segments
    cells: Cells
    token_G: Tensor


class Rests(NamedTuple):
    """List all rows of the chunks with several tokens on both sides.

    row_S, row_T, next_T: (M,) int64 rows, and the tokens that come in the teacher's.
    chunks_S, chunks_T: these rows, chunk by chunk.
    """

    row_S: Tensor
    row_T: Tensor
    next_T: Tensor
    chunks_S: Segments
    chunks_T: Segments


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


class Nodes(NamedTuple):
    """List all nodes of some chunks, known from ids alone, before any forward pass.

    continuations: what may have come in place of the token in front of each root, and of the token
        around each inside; none: not known.
    row_A: (A,) int64, the student's row of each root, then of each inside and rest.
    order_A: their order by these rows.
    """

    roots: Roots
    continuations: Continuations
    choices: Choices
    insides: Insides
    rests: Rests
    reads: Reads
    row_A: Tensor
    order_A: Tensor


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
    [nodes] = nodes_of_chunks(
        chunks, student_ids_BS.reshape(-1), student_next_BS.reshape(-1).clamp(min=0),
        teacher_next_BT.reshape(-1).clamp(min=0), tables, teacher_ended=ended_BT.reshape(-1),
        teacher_follows=follows_BT.reshape(-1), first_S=torch.tensor([0, student_next_BS.numel()]),
        first_T=torch.tensor([0, teacher_next_BT.numel()]),
    )
    return nodes


def nodes_of_chunks(
    chunks: Chunks, student_ids: Tensor, student_next: Tensor, teacher_next: Tensor, tables: Tables,
    *, teacher_ended: Tensor, teacher_follows: Tensor, first_S: Tensor, first_T: Tensor,
) -> list[Nodes]:
    """List the nodes of parts of a batch, whose rows stand one part after the other.

    Many small parts take little longer than a large one.  Needed are all rows of the chunks, and
    the teacher rows before and after each of them.

    Args:
        student_ids, student_next: (N,) int64, token that each student row reads and predicts.
        teacher_next: (M,) int64.
        teacher_ended: (M,) int64, see `tokens_that_ended`.
        teacher_follows: (M,) bool, the row belongs to the position after that of the row before, in
            the same text and part, and predicts a token; of two renderings see `rows_that_go_on`.
        first_S, first_T: (parts + 1,) int64, the first row of each part and, last, N and M.
    """
    roots = _list_roots(chunks, student_ids, student_next, teacher_next, teacher_ended, tables)
    before = _list_before(roots, tables)
    ranges = _choice_ranges(roots, teacher_next, tables, teacher_follows)
    choices = _list_choices(roots, before, ranges, tables)
    insides, inside = _list_insides(chunks, student_next, teacher_next, tables)
    rests = _list_rests(chunks, teacher_next)
    bounds = _bounds((roots, before, choices, insides, inside, rests),
                     _num_joined(student_ids[roots.row_S], tables), first_S, first_T)
    lists = roots, Continuations.of(before, inside, bounds), choices, insides, rests
    columns = [_split(listed, places, bounds) for listed, places in zip(lists, _PLACES)]
    nodes = []
    next_of_part = _split(student_next, "S", bounds)
    for (roots, begun, choices, insides, rests), next_S in zip(zip(*columns), next_of_part):
        second_S = rests.row_S[rests.chunks_S.start_K[:-1]] + 1  # the first has the root
        row_A = torch.cat([roots.row_S, insides.row_S, second_S])
        reads = _list_reads(roots, choices, insides, rests, next_S)
        order_A = row_A.argsort(stable=True)
        nodes.append(Nodes(roots, begun, choices, insides, rests, reads, row_A, order_A))
    return nodes


def _list_roots(
    chunks: Chunks, student_ids: Tensor, student_next: Tensor, teacher_next: Tensor,
    teacher_ended: Tensor, tables: Tables,
) -> Roots:
    read = student_ids[chunks.first_S]
    before = read.clamp(min=0)  # -1 stands for no token
    low = tables.join_start_V[before]
    high = torch.where(read >= 0, tables.join_start_V[before + 1], low)
    return Roots(
        row_S=chunks.first_S,
        row_T=chunks.first_T,
        next_S=student_next[chunks.first_S],
        next_T=teacher_next[chunks.first_T],
        ended_T=teacher_ended[chunks.first_T],
        joins=Ranges.of(low, high),
        num_joined=int(_num_joined(read, tables).sum()),
    )


def _num_joined(read_N: Tensor, tables: Tables) -> Tensor:
    """Return (N,) teacher tokens that cannot come behind each student token; -1: no token."""
    return tables.joined_V[read_N.clamp(min=0)] * (read_N >= 0)


def _list_before(roots: Roots, tables: Tables) -> _Begun:
    num_pieces = tables.low_W.shape[1]
    u = roots.ended_T.clamp(min=0)
    level = (tables.pieces_W.index_select(0, u) >= 0).sum(1)
    # of spellings as long as the tables nothing is known that goes on
    known = (roots.ended_T >= 0) & (level < num_pieces)
    column = level.clamp(max=num_pieces - 1)
    low = tables.low_W[u, column]
    high = torch.where(known, tables.high_W[u, column], low)
    row_T = torch.where(known, roots.row_T - 1, 0)
    return _Begun.of(row_T, level, low, high, tables)


class _ChoiceRanges(NamedTuple):
    """List the choice nodes by their scopes.

    root: (K,) int64, sorted, number of the root; level, row_T: see `Choices`.
    low, high: (K,) the scope, ``order_V[low:high]``.
    token: (K,) realized student token, whose path leads to the node.
    """

    root: Tensor
    level: Tensor
    low: Tensor
    high: Tensor
    token: Tensor
    row_T: Tensor


def _choice_ranges(
    roots: Roots, teacher_next: Tensor, tables: Tables, teacher_follows: Tensor
) -> _ChoiceRanges:
    token = roots.next_S
    path_NP = tables.pieces_V.index_select(0, token)  # much faster than by [token]
    # most tokens have few pieces, and the tables room for many
    num_pieces = int((path_NP.amax(0) >= 0).sum()) if len(token) else 0
    path_NP = path_NP[:, :num_pieces]
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
    further = slice(1, num_pieces + 1)
    low, high = [bound_V[:, further].index_select(0, token)
                 for bound_V in (tables.low_V, tables.high_V)]
    low = torch.cat([low, rank], 1)[:, :num_pieces]
    high = torch.cat([high, rank + 1], 1)[:, :num_pieces]
    linked = tables.cell_V[token] < tables.num_cells
    # behind the last bit stands the sign's, which is set
    is_closed = (tables.closed_V[token][:, None] >> offset[:-1].clamp(max=62)) & 1 > 0
    several = (path_NP >= 0) & (high - low > 1) & linked[:, None] & is_closed
    # a longer token came: it heads no cell, and a token like the student's begins it
    heads_none = torch.zeros_like(tables.cell_W, dtype=torch.bool)
    heads_none[tables.longer_F] = True
    begins = tables.pieces_V[tables.pieces_W[roots.next_T, 0], 0] == tables.pieces_V[token, 0]
    begins &= heads_none[roots.next_T]
    is_longer = several & (begins[:, None] & ~along[:, :1])
    is_along = several & along & exists[:, 1:]
    root, column = (is_along | is_longer).nonzero(as_tuple=True)
    level = column + 1
    return _ChoiceRanges(
        root=root,
        level=level,
        low=low[root, column],
        high=high[root, column],
        token=token[root],
        row_T=torch.where(along[root, column], roots.row_T[root] + level, -1),
    )


def _list_choices(
    roots: Roots, before: _Begun, ranges: _ChoiceRanges, tables: Tables
) -> Choices:
    root, level, low, high, token, row_T = ranges
    num = len(root)
    stride = len(tables.cell_W) + 1

    def keys_of(node_E: Tensor, token_E: Tensor) -> Tensor:
        """Name the cells of student tokens: by the teacher token that comes next, or stop."""
        return node_E * stride + tables.pieces_V[token_E, level[node_E]] + 1

    scopes, place_E = Ranges.of(low, high).list()
    token_E = tables.order_V[place_E]
    # the scope is sorted, so the tokens of a cell are neighbors
    key_E = keys_of(scopes.of_E, token_E)
    key_G, cell_E = distinct(key_E, torch.ones_like(key_E, dtype=torch.bool))
    tokens = Segments.of(cell_E, len(key_G))
    ranks = [place_E[tokens.start_K[:-1]], place_E[tokens.start_K[1:] - 1] + 1]
    longer = torch.searchsorted(tables.longer_rank_F, torch.stack(ranks))
    # few nodes have a path of several tokens
    steps, step_E = Ranges.of(torch.ones_like(level), torch.where(row_T >= 0, level, 1)).list()

    begin_N, skip_N, _ = Ranges.of(before.low, before.high)
    going, going_place_E = Ranges.of(begin_N[root], begin_N[root + 1]).list()
    going_node_E = going.of_E
    root_E = root[going_node_E]
    went_E = tables.order_W[going_place_E - skip_N[root_E]]
    next_E = tables.pieces_W[went_E, before.level[root_E]]
    rank_E = tables.rank_V[next_E.clamp(min=0)]
    in_scope = (next_E >= 0) & (rank_E >= low[going_node_E]) & (rank_E < high[going_node_E])
    going_node_E, going_place_E = going_node_E[in_scope], going_place_E[in_scope]
    going_cell_E = torch.searchsorted(key_G, keys_of(going_node_E, next_E[in_scope]))
    going_cell_E, order = going_cell_E.sort(stable=True)
    return Choices(
        roots=Segments.of(root, len(roots.row_S)),
        level=level,
        is_told=(row_T >= 0) | (level == 1),
        row_T=row_T,
        tokens=tokens,
        token_E=token_E,
        cells=Cells.of(key_G // stride, num),
        next_G=key_G % stride - 1,
        first_K=tables.pieces_V[token, 0],
        longer=Ranges.of(*longer),
        steps=steps,
        step_row_E=roots.row_T[root[steps.of_E]] + step_E,
        step_token_E=tables.pieces_V[token[steps.of_E], step_E],
        going=Segments.of(going_cell_E, len(key_G)),
        going_place_E=going_place_E[order],
    )


def _list_insides(
    chunks: Chunks, student_next: Tensor, teacher_next: Tensor, tables: Tables
) -> tuple[Insides, _Begun]:
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
    low = tables.low_W[token[chunk], level]
    high = tables.high_W[token[chunk], level]
    nodes, next_E = _list_begun(low, high, level, tables)
    # tokens are sorted by their spelling, so those that go on alike are neighbors
    stride = len(tables.cell_V)
    key_G, cell_E = distinct(nodes.of_E * stride + next_E, next_E >= 0)
    insides = Insides(
        row_S=first_S[chunk] + level,
        of_cells=Segments.of(cell_E, len(key_G)),
        cells=Cells.of(key_G // stride, len(level)),
        token_G=key_G % stride,
    )
    return insides, _Begun.of(first_T[chunk], level, low, high, tables)


def _list_rests(chunks: Chunks, teacher_next: Tensor) -> Rests:
    is_many = (chunks.count_S > 1) & (chunks.count_T > 1)
    number = is_many.cumsum(0) - 1
    num = int(is_many.sum())
    in_S = is_many[chunks.of_S]
    in_T = is_many[chunks.of_T]
    row_T = chunks.row_T[in_T]
    return Rests(
        row_S=chunks.row_S[in_S],
        row_T=row_T,
        next_T=teacher_next[row_T],
        chunks_S=Segments.of(number[chunks.of_S[in_S]], num),
        chunks_T=Segments.of(number[chunks.of_T[in_T]], num),
    )


def _list_reads(
    roots: Roots, choices: Choices, insides: Insides, rests: Rests, student_next: Tensor
) -> Reads:
    row_R = torch.cat([roots.row_S, insides.row_S, rests.row_S])
    num_roots = len(roots.row_S)
    number_many = torch.arange(num_roots + len(insides.row_S), len(row_R))
    inside_G = insides.cells.nodes.of_E
    scope_root_E = choices.roots.of_E[choices.cells.nodes.of_E[choices.tokens.of_E]]
    return Reads(
        row_R=row_R,
        number_E=torch.cat([scope_root_E, inside_G + num_roots, number_many]),
        token_E=torch.cat([choices.token_E, insides.token_G, student_next[rests.row_S]]),
        number_X=inside_G,
        token_X=insides.token_G,
    )


# --- parts ----------------------------------------------------------------------------------------

# Of each field of the lists, in its order: the list that its entries stand in and, after ">", the
# one that they number.  Ranges have that of their nodes, starts ("+") that of the segments, a count
# what it counts.  S, T: rows.  N: roots; X: tokens in their joins; B: tokens before.  A: roots and
# insides; Z: these twice.  K: choices; E, G: tokens, cells; H: steps; Y: going.  M: insides; Q, D:
# their tokens, cells.  U, W: rows of rests; C: their chunks.
_PLACES = (
    ("N>S", "N>T", "N", "N", "N", "N", "X"),
    ("A>T", "A", "A", "+Z", "N", "B"),
    ("K>N", "K", "K", "K>T", "E>G", "E", ("G>K", "G"), "G", "K", "G", "H>K", "H>T", "H", "Y>G",
     "Y>B"),
    ("M>S", "Q>D", ("D>M", "D"), "D"),
    ("U>S", "W>T", "W", "U>C", "W>C"),
)


def _bounds(
    lists: tuple[Roots, _Begun, Choices, Insides, _Begun, Rests], joined_N: Tensor, first_S: Tensor,
    first_T: Tensor,
) -> dict[str, Tensor]:
    """Return by the names of the lists (parts + 1,) where each part begins in them, and the end."""

    def starts(sizes: Tensor) -> Tensor:
        return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    roots, before, choices, insides, inside, rests = lists
    N = torch.searchsorted(roots.row_S, first_S)
    M = torch.searchsorted(insides.row_S, first_S)
    U = torch.searchsorted(rests.row_S, first_S)
    K = choices.roots.start_K[N]
    G = choices.cells.nodes.start_K[K]
    return dict(
        S=first_S, T=first_T, N=N, K=K, G=G, M=M, U=U, A=N + M, Z=2 * (N + M),
        X=starts(joined_N)[N],
        B=starts(before.high - before.low)[N],
        E=choices.tokens.start_K[G],
        H=choices.steps.start_K[K],
        Y=choices.going.start_K[G],
        Q=starts(inside.high - inside.low)[M],
        D=insides.cells.nodes.start_K[M],
        W=torch.searchsorted(rests.row_T, first_T),
        C=torch.searchsorted(rests.chunks_S.start_K, U),
    )


def _split(value: Any, places: Any, bounds: dict[str, Tensor]) -> list[Any]:
    """Return what each part has of a list of nodes, or of a field, numbered within the part."""
    if isinstance(value, Cells):
        nodes, slots = [_split(*field, bounds) for field in zip(value[:2], places)]
        widths = [int(slot_G.max()) + 1 if len(slot_G) else 1 for slot_G in slots]
        return list(map(Cells, nodes, slots, widths))
    if isinstance(value, Ranges):
        entries = value.start_K[bounds[places]]
        num_nodes = bounds[places].diff()
        skip_K = value.skip_K - torch.repeat_interleave(entries[:-1], num_nodes)
        starts = _split_starts(value.start_K, bounds[places], entries)
        skips = torch.split(skip_K, num_nodes.tolist())
        return list(map(Ranges, starts, skips, entries.diff().tolist()))
    if not isinstance(places, str):
        fields = [_split(*field, bounds) for field in zip(value, places)]
        return [type(value)(*part) for part in zip(*fields)]
    if places[0] == "+":
        return _split_starts(value, bounds[places[1]], value[bounds[places[1]]])
    sizes: list[int] = bounds[places[0]].diff().tolist()
    if isinstance(value, int):
        return sizes
    if isinstance(value, Segments):
        starts = _split_starts(value.start_K, bounds[places[2]], bounds[places[0]])
        return list(map(Segments, _split(value.of_E, places, bounds), starts))
    if len(places) > 1:
        first_E = torch.repeat_interleave(bounds[places[2]][:-1], bounds[places[0]].diff())
        # a number before the part's is none: 0 or -1
        value = torch.where(value < first_E, value.clamp(max=0), value - first_E)
    return list(torch.split(value, sizes))


def _split_starts(start_K: Tensor, first_P: Tensor, entry_P: Tensor) -> list[Tensor]:
    """Return where the segments of each part begin and, last, how many entries it has.

    Args:
        first_P, entry_P: (parts + 1,) the first segment, and the first entry, of each part.
    """
    sizes = first_P.diff() + 1  # each has the beginning of the next one, too
    part = torch.repeat_interleave(sizes)
    number = torch.arange(len(part)) - part
    start = start_K[number] - entry_P[part]
    ends = sizes.cumsum(0)
    # entries of no segment are in the part's first or last one
    start[ends - 1] = entry_P.diff()
    start[ends - sizes] = 0
    return list(torch.split(start, sizes.tolist()))


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
    ended = torch.full((teacher_next_BT.numel(),), -1)
    neighbors = _neighbors(student_chunk_BS, teacher_chunk_BT, student_text_BS, teacher_text_BT)
    before_S, count_S, before_T, count_T, next_T = neighbors
    u = teacher_next_BT.reshape(-1).clamp(min=0)[before_T]
    # of most texts a chunk has few tokens, and the tables room for many
    longest = int((count_S * (count_T == 1)).max()) if len(count_S) else 0
    pieces = tables.pieces_W[:, : longest + 1].index_select(0, u)
    k = torch.arange(pieces.shape[1])
    row = (before_S[:, None] + k).clamp(max=student_next_BS.numel() - 1)
    realized = torch.where(k < count_S[:, None], student_next_BS.reshape(-1)[row], -1)
    known = (count_T == 1) & (realized == pieces).all(1) & (count_S <= len(k))
    ended[next_T[known]] = u[known]
    return ended.view_as(teacher_next_BT)


def rows_that_go_on(
    student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, *, student_text_BS: Tensor,
    teacher_text_BT: Tensor,
) -> Tensor:
    """Return (B, T) bool: the row goes on from the one before as the student's rendering does.

    That is within a chunk, and where a chunk follows directly on both sides.  Elsewhere two chat
    templates may go on in two ways, and what a teacher expects of its own is none of the student's.
    Of a plain text both read the same, so that every row goes on.

    Args: see `tokens_that_ended`.
    """
    text = teacher_text_BT.reshape(-1)
    chunk = teacher_chunk_BT.reshape(-1)
    goes_on = torch.zeros(len(chunk), dtype=torch.bool)
    goes_on[1:] = (chunk[1:] == chunk[:-1]) & (chunk[1:] >= 0) & (text[1:] == text[:-1])
    *_, next_T = _neighbors(student_chunk_BS, teacher_chunk_BT, student_text_BS, teacher_text_BT)
    goes_on[next_T] = True
    return goes_on.view_as(teacher_chunk_BT)


def _neighbors(
    student_chunk_BS: Tensor, teacher_chunk_BT: Tensor, student_text_BS: Tensor,
    teacher_text_BT: Tensor,
) -> tuple[Tensor, ...]:
    """List the pairs of chunks that follow one another directly, on both sides, in one text.

    Returns:
        (first student row of the one before, its student tokens; the same of the teacher; first
        teacher row of the one behind it), (N,) int64 each.
    """
    chunks = find_chunks(student_chunk_BS, teacher_chunk_BT)
    order = chunks.first_T.argsort()
    first_S, count_S = chunks.first_S[order], chunks.count_S[order]
    first_T, count_T = chunks.first_T[order], chunks.count_T[order]
    directly = first_T[:-1] + count_T[:-1] == first_T[1:]
    directly &= first_S[:-1] + count_S[:-1] == first_S[1:]
    for text, first in ((student_text_BS, first_S), (teacher_text_BT, first_T)):
        of_chunk = text.reshape(-1)[first]
        directly &= of_chunk[:-1] == of_chunk[1:]
    before = [x[:-1][directly] for x in (first_S, count_S, first_T, count_T)]
    return *before, first_T[1:][directly]
