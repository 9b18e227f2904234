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

Needs torch, losses.py and nodes.py.  Copy them into your own repository.
License: Apache-2.0 (see LICENSE).  Tests: tests/test_translation.py.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING or not __package__:  # copied beside them, not into a package
    import losses
    from nodes import Cells, Choices, Continuations, Insides, Nodes, Ranges, Rests, Tables
else:
    from . import losses
    from .nodes import Cells, Choices, Continuations, Insides, Nodes, Ranges, Rests, Tables

FLOOR, LOG_ZERO = losses.FLOOR, losses.LOG_ZERO
LOG_NOTHING = LOG_ZERO + 1  # nats; a cell's mass below this is 0
# A root asks about all that may follow, a choice about the one continuation that the text has: its
# gradient is as true and much noisier.  Measured: docs/piece_kl.md, "What a node weighs".
CHOICE_WEIGHT = 0.3

# --- the teacher's masses -------------------------------------------------------------------------


class CellColumns(NamedTuple):
    """Hold the cells of both vocabularies as sets of columns."""

    columns_V: losses.Columns
    columns_W: losses.Columns

    @classmethod
    def of(cls, tables: Tables) -> "CellColumns":
        """Group the tokens of `tables` by their cells; waits for a device that is not the CPU."""
        return cls(losses.Columns.of(tables.cell_V, tables.num_cells),
                   losses.Columns.of(tables.cell_W, tables.num_cells))


class GoingOn(NamedTuple):
    """Hold the teacher's belief that its token, of which the student has read u, goes on.

    node_E: (E,) the node of each of the tokens that it may be; those of the roots come first.
    next_E: the student token with which each goes on, -1 for one that ends.
    ends_K: (K,) 1 - lambda, the probability that it does not.
    mass_E: (E,) lambda times the probability of each token if it goes on, 0 for one that ends.
    """

    node_E: Tensor
    next_E: Tensor
    ends_K: Tensor
    mass_E: Tensor


def going_on(y_MW: Tensor, begun: Continuations, tables: Tables) -> GoingOn:
    """Ask the teacher's rows how their tokens go on; where none is known, lambda is 0."""
    nodes, place_E = begun.tokens.list()
    node_E = nodes.of_E
    token_E = tables.order_W[place_E]
    next_E = tables.pieces_W[token_E, begun.level[node_E]]
    logits_E = losses.at_least_float32(y_MW[begun.row_K[node_E], token_E])
    # finite where all are excluded
    top_K = nodes.reduce(logits_E, "max").clamp(min=torch.finfo(logits_E.dtype).min)
    mass_E = (logits_E - top_K[node_E]).exp()
    # of those that end, and that go on; a sum reads where they begin alone
    ended_K, going_K = nodes._replace(start_K=begun.start_2K).sum(mass_E).view(-1, 2).unbind(1)
    ended_K = _above_zero(ended_K)
    all_K = ended_K + going_K
    mass_E = (mass_E / all_K[node_E]).masked_fill(next_E < 0, 0.0)
    return GoingOn(node_E, next_E, ended_K / all_K, mass_E)


def _above_zero(mass: Tensor) -> Tensor:
    return mass.clamp(min=torch.finfo(mass.dtype).tiny)


class RootTarget(NamedTuple):
    """Hold the teacher's belief at the roots.

    cell_NC: (N, C) mass of each cell.
    first_K: (K,) the probability of the first token of the path of each choice, 0 if it cannot
        come.
    longer_G: (G,) that of longer tokens that begin with a token of each cell of the choices.
    """

    cell_NC: Tensor
    first_K: Tensor
    longer_G: Tensor


def root_target(
    y_MW: Tensor, nodes: Nodes, goes: GoingOn, tables: Tables, columns_W: losses.Columns
) -> RootTarget:
    """Return the teacher's belief at all roots; `goes` is what `going_on` says.

    It is (1 - lambda) q + lambda T, of which what cannot come is left out, normalized in the end:
    that its token goes on is the likelier, the more of q cannot come.
    """
    q_NW = y_MW[nodes.roots.row_T].softmax(-1)
    mask_joined(q_NW, nodes, tables)
    cell_NC = ended_cells(q_NW, goes.ends_K[: len(q_NW)], columns_W)
    add_going(cell_NC, nodes, goes, tables)
    return RootTarget(normalized(cell_NC), *likely_longer(q_NW, nodes, tables))


def ended_cells(q_NW: Tensor, ends_N: Tensor, columns_W: losses.Columns) -> Tensor:
    """Return (N, C) masses of the cells where the token before has ended."""
    return columns_W.sum(q_NW) * ends_N[:, None]


def add_going(cell_NC: Tensor, nodes: Nodes, goes: GoingOn, tables: Tables) -> None:
    """Add to the cells, in place, what the token before says where it goes on."""
    place, mass_E = going_places(nodes, goes, tables)
    cell_NC.index_put_(place, mass_E, accumulate=True)


def going_places(
    nodes: Nodes, goes: GoingOn, tables: Tables
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ((root, cell) of the tokens that the token before each root may be, their masses)."""
    num = nodes.continuations.num_before
    cell_E = tables.cell_V[goes.next_E[:num]]  # of one that ends that of any, with mass 0
    has_cell_E = cell_E < tables.num_cells
    return (goes.node_E[:num], cell_E * has_cell_E), goes.mass_E[:num] * has_cell_E


def normalized(cell_NC: Tensor) -> Tensor:
    return cell_NC / _above_zero(cell_NC.sum(1, keepdim=True))


def likely_longer(q_NW: Tensor, nodes: Nodes, tables: Tables) -> tuple[Tensor, Tensor]:
    """Return `RootTarget.first_K` and `longer_G`."""
    choices = nodes.choices
    longer, place_E = choices.longer.list()
    root_E = choices.roots.of_E[choices.cells.nodes.of_E[longer.of_E]]
    return (q_NW[choices.roots.of_E, choices.first_K],
            longer.sum(q_NW[root_E, tables.longer_F[place_E]]))


def mask_joined(q_NW: Tensor, nodes: Nodes, tables: Tables) -> None:
    """Set to 0, in place, what the student's tokenizer would have joined to the token before."""
    next_N1 = nodes.roots.next_T[:, None]
    came_N1 = q_NW.gather(1, next_N1)
    q_NW.view(-1).index_fill_(0, joined_places(nodes, tables), 0.0)
    q_NW.scatter_(1, next_N1, came_N1)  # it did come, whatever the tables say


def joined_places(nodes: Nodes, tables: Tables) -> Tensor:
    """Return (E,) int64, where the tokens that cannot come stand in the flat (N * W) rows."""
    joins, join_J = nodes.roots.joins.list()
    tokens, place_E = Ranges.of(
        tables.join_low_J[join_J], tables.join_high_J[join_J], nodes.roots.num_joined).list()
    return joins.of_E[tokens.of_E] * len(tables.cell_W) + tables.order_W[place_E]


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


# --- small nodes ----------------------------------------------------------------------------------


def _of_total(mass_G: Tensor, cells: Cells) -> Tensor:
    return _above_zero(cells.nodes.sum(mass_G))[cells.nodes.of_E]


# (logits_BKG, log q_BKG of cells, None) -> ((K,) divergences, their number)
Compare = Callable[[Tensor, Tensor, None], losses.SumAndCount]


def softened_cells(
    logits_KG: Tensor, logq_KG: Tensor, temperature: float
) -> tuple[Tensor, Tensor, None]:
    """Return what a divergence takes of nodes whose cells have these masses; see `translated`."""
    logp_KG = losses.softened(logits_KG, LOG_ZERO - losses.SHIFT, temperature)
    logq_KG = losses.softened(logq_KG, LOG_ZERO, temperature)
    return logp_KG[None], logq_KG[None], None


class Question(NamedTuple):
    """Hold some nodes as both models answer them; rows are padded.

    logits_KG: (K, G) logarithm of the student's mass in each cell, up to a constant of the row.
    logq_KG: (K, G) of the teacher's mass, a sum of 1 in every row; FLOOR in padding, which is less
        than a mass of 0.
    """

    logits_KG: Tensor
    logq_KG: Tensor


def log_target(mass: Tensor) -> Tensor:
    """Return the logarithms of the teacher's masses; one of 0 costs the same in any precision."""
    return mass.clamp(min=math.exp(LOG_ZERO)).log()


def root_question(x_NV: Tensor, cell_NC: Tensor, columns_V: losses.Columns) -> Question:
    return Question(losses.log_masses(x_NV, columns_V), log_target(cell_NC))


def root_values(
    x_NV: Tensor, cell_NC: Tensor, columns_V: losses.Columns, compare: Compare,
    temperature: float = 1.0, has_rest: bool = False,
) -> Tensor:
    """Return the (N,) divergences of root nodes: most of the time, and plain enough to compile.

    Args:
        x_NV: the student's logits in these rows, at least float32.
        cell_NC: the teacher's mass in each cell, see `RootTarget`.
        columns_V: the cells of the student's tokens.
        compare: a divergence with its parameters and no reduction.
        temperature, has_rest: see `translated`.
    """
    logits_NC, logq_NC = root_question(x_NV, cell_NC, columns_V)
    if has_rest:
        logits_NC, logq_NC = merge_rest(logits_NC, logq_NC)
    value_N, _ = compare(*softened_cells(logits_NC, logq_NC, temperature))
    return value_N


def choice_question(
    x_E: Tensor, y_MW: Tensor, *, log_total_M: Tensor, target: RootTarget, goes: GoingOn,
    choices: Choices,
) -> Question:
    """Return the choice nodes.

    Args:
        x_E: the student's logits of the tokens in the scopes.
        log_total_M: logsumexp of the teacher's logits, in the rows that count.
        target, goes: see `root_target`.
    """
    cells = choices.cells
    node_G = cells.nodes.of_E
    logits_G = choices.tokens.logsumexp(x_E)

    # how the token before would have gone on
    other_G = choices.going.sum(goes.mass_E[choices.going_place_E])

    def logq(row: Tensor, token: Tensor) -> Tensor:
        return losses.at_least_float32(y_MW[row, token]) - log_total_M[row]

    row_G = choices.row_T[node_G]
    split_G = _split_by_row(logq, row_G, choices)
    split_G = torch.where(row_G >= 0, split_G, target.longer_G)
    split_G = split_G / _of_total(split_G, cells)
    # the teacher's mass on the path's first k tokens, 0 where rows do not tell
    logq_E = logq(choices.step_row_E, choices.step_token_E)
    path_K = target.first_K * choices.steps.sum(logq_E).exp() * choices.is_told
    ended_K = goes.ends_K[choices.roots.of_E] * (path_K + cells.nodes.sum(target.longer_G))
    # where neither has any mass that counts, the split alone
    mass_G = ended_K.clamp(min=losses.TINY_MASS)[node_G] * split_G + other_G
    mass_G = mass_G / _of_total(mass_G, cells)
    return Question(cells.rows(logits_G, FLOOR), cells.rows(log_target(mass_G), FLOOR))


def _split_by_row(
    logq: Callable[[Tensor, Tensor], Tensor], row_G: Tensor, choices: Choices
) -> Tensor:
    """Return (G,) what q_k gives to the teacher token of each cell, and the rest to "stop".

    Args:
        logq: (rows, tokens) -> what the teacher's rows give to tokens; -1 is any.
        row_G: the row of each cell's q_k; -1: it has none, and the result is any number.
    """
    nodes = choices.cells.nodes
    is_stop_G = choices.next_G < 0
    q_G = logq(row_G, choices.next_G).exp().masked_fill(is_stop_G, 0.0)
    # below this the sum's rounding would decide, and the reverse KL takes the rest's logarithm
    least = 16 * torch.finfo(q_G.dtype).eps
    rest_K = (1 - nodes.sum(q_G)).clamp(min=least)
    return torch.where(is_stop_G, rest_K[nodes.of_E], q_G)


def inside_question(
    x_G: Tensor, rest_K: Tensor, goes: GoingOn, begun: Continuations, insides: Insides
) -> Question:
    """Return the inside nodes, the rest first.

    Args:
        x_G: the student's logits of the cells' tokens.
        rest_K: logsumexp of all others in the row.
    """
    mass_G = insides.of_cells.sum(goes.mass_E[begun.num_before :])
    rests = losses.at_least(rest_K, FLOOR), log_target(goes.ends_K[begun.num_roots :])
    cells = insides.cells.rows(x_G, FLOOR), insides.cells.rows(log_target(mass_G), FLOOR)
    return Question(*[torch.cat([rest[:, None], of], 1) for rest, of in zip(rests, cells)])


# --- what the nodes read --------------------------------------------------------------------------


class Answers(NamedTuple):
    """Hold what both models answer.

    x_E, rest_L: the student's logits, and logsumexp, that `Reads` lists.
    log_total_M: logsumexp of the teacher's logits, in the rows that count.
    """

    x_E: Tensor
    rest_L: Tensor
    log_total_M: Tensor


def _read(x_NV: Tensor, y_MW: Tensor, nodes: Nodes) -> tuple[Tensor, Answers]:
    """Return (the student's logits in the rows of the roots, the answers to all else)."""
    reads = nodes.reads
    # rows are selected once: each selection has a gradient as large as x
    x_RV = losses.at_least_float32(losses.take(x_NV, 0, reads.row_R))
    num_roots = len(nodes.roots.row_S)
    x_root, x_LV = torch.split(x_RV, [num_roots, len(x_RV) - num_roots])
    # finite where a model excludes tokens: the gradient of a logsumexp of -inf alone is NaN
    nothing = x_LV.new_full((len(reads.token_X),), 10 * FLOOR)
    x_LV = losses.at_least(x_LV, 10 * FLOOR)
    answers = Answers(
        # below any that counts, and finite where a model excludes tokens
        x_E=losses.at_least(x_RV[reads.number_E, reads.token_E], 10 * FLOOR),
        # from the other tokens: 1 - sum would lose a small rest, and its gradient
        rest_L=x_LV.index_put((reads.number_X, reads.token_X), nothing).logsumexp(-1),
        log_total_M=y_MW.logsumexp(-1),
    )
    return x_root, answers


# --- the loss -------------------------------------------------------------------------------------


def translated(
    student_logits_BSV: Tensor, teacher_logits_BTW: Tensor, nodes: Nodes, tables: Tables, *,
    divergence: Callable[..., losses.SumAndCount] = losses.forward_kl, temperature: float = 1.0,
    weight_BS: Tensor | None = None, reduction: str = "sum",
    choice_weight: float = CHOICE_WEIGHT, text_weight: float = 0.0, has_rest: bool = False,
    of_roots: Callable[..., Tensor] = root_values,
    cells: CellColumns | None = None, bound: losses.Bound | None = None, **parameters: Any,
) -> losses.SumAndCount:
    """Compare the teacher's belief, translated, with the student, node by node.

    The sum, times tau^2, of D(teacher, student) over all nodes.  Both models' masses of the cells
    are those at temperature 1, to the power 1 / tau and normalized in the scope: softened before,
    a cell's mass would grow with the number of its tokens.  A choice weighs `choice_weight` times
    as much as its root, and is not counted.  The rest of an n:m chunk is a forward KL whatever D
    is.  D = `forward_kl` makes the sum, in expectation over the text, KL(belief || student), where
    choices weigh 1.

    Args:
        student_logits_BSV, teacher_logits_BTW: any float type; the teacher gets no gradient.
        nodes: from `list_nodes` of the same batch.
        divergence: one of losses.py that compares two models with one vocabulary: `forward_kl`,
            `reverse_kl`, `generalized_jsd`, `total_variation`, ...
        choice_weight: of a choice beside its root, see `CHOICE_WEIGHT`.
        text_weight: of the cross-entropy of what the roots leave open, for training without another
            one: of tokens in their cells, and in place of the rest of n:m chunks.
        has_rest: the teacher's logits have W + 1 columns, some -inf and the last the rest, as those
            of `tiles.TopKLogits`, and the tables are those of `with_rest`; see `merge_rest`.  In
            other nodes than roots tokens that are not kept count as tokens that do not come.
        of_roots: `root_values`, or what computes the same, as torch.compile makes it of that.
        cells: `CellColumns.of` the tables, where many batches share it.
        bound: of a root and its choices together, of an inside and of a rest; not of the text.
        parameters: of the divergence (beta, skew, alpha, ...); top_k and support choose among the
            cells of a node by their masses.
    Returns:
        (sum, count): nats, and the student positions that the nodes cover.
    Raises:
        ValueError: logits of more or fewer tokens than the tables.
    """
    losses.check_side("student", student_logits_BSV)
    losses.check_side("teacher", teacher_logits_BTW)
    losses.check_width("student", student_logits_BSV, len(tables.cell_V), "cell_V")
    losses.check_width("teacher", teacher_logits_BTW, len(tables.cell_W), "cell_W")
    x_NV = student_logits_BSV.flatten(0, 1)
    y_MW = losses.at_least_float32(teacher_logits_BTW.detach().flatten(0, 1))
    if x_NV.device.type == "cpu":  # else the rows that are needed, later
        x_NV = losses.at_least_float32(x_NV)

    compare = partial(divergence, reduction="none", **parameters)
    goes = going_on(y_MW, nodes.continuations, tables)
    cells = cells or CellColumns.of(tables)
    target = root_target(y_MW, nodes, goes, tables, cells.columns_W)
    x_root, answers = _read(x_NV, y_MW, nodes)
    value_N = of_roots(x_root, target.cell_NC, cells.columns_V, compare, temperature, has_rest)
    choice_K, inside_K, rest_M = compare_others(
        answers, y_MW, nodes, target, goes, compare=compare, temperature=temperature)
    if len(nodes.choices.level):
        value_N = value_N + choice_weight * nodes.choices.roots.sum(choice_K)
    if bound:
        value_N, inside_K = bound(value_N), bound(inside_K)
        rest_M = rest_M if text_weight else bound(rest_M)
    if text_weight:
        share = text_weight / temperature**2  # the text is not softened
        value_N = value_N + share * _text_in_cells(x_root, nodes.roots.next_S, tables)
        rest_M = share * text_in_rests(answers, nodes.rests)
    value_A = losses.scaled(torch.cat([value_N, inside_K, rest_M]), temperature**2)
    row_A = nodes.row_A
    if reduction == "none":
        value_A, row_A = value_A[nodes.order_A], row_A[nodes.order_A]
    shape = student_logits_BSV.shape[:2]
    return losses.reduce_terms(value_A, row_A, shape, weight_BS, reduction)


def translated_sub_tile(
    student_NV: Tensor, teacher_MW: Tensor, sub_tile: Any, *, tables: Tables,
    has_text: bool = True, **options: Any,
) -> Tensor:
    """Return the sum of `translated` over a sub-tile of tile_plan.py, whose terms are its nodes.

    Args:
        has_text: there is a cross-entropy beside it, which teaches what the teacher's rows do not
            tell; else the loss has that part of one, but for what the student wrote.
        Others: see `translated`.
    """
    weight = sub_tile.weight
    value, _ = translated(
        student_NV[None], teacher_MW[None], sub_tile.terms, tables,
        weight_BS=weight if weight is None else weight[None],
        text_weight=float(not (has_text or sub_tile.on_policy)), **options)
    return value


def _text_in_cells(x_NV: Tensor, next_N: Tensor, tables: Tables) -> Tensor:
    """Return (N,) -log p(token | its cell), 0 for tokens without a cell."""
    cell_N = tables.cell_V[next_N]
    in_cell_NV = x_NV.masked_fill(tables.cell_V != cell_N[:, None], 10 * FLOOR)
    logit_N = losses.at_least(x_NV.gather(1, next_N[:, None])[:, 0], 10 * FLOOR)
    value_N = in_cell_NV.logsumexp(-1) - logit_N
    return value_N.masked_fill(cell_N == tables.num_cells, 0.0)


def text_in_rests(answers: Answers, rests: Rests) -> Tensor:
    """Return (M,) -log p(tokens behind the first) of the chunks with several on both sides."""
    num = len(rests.row_S)  # the last ones that are read
    x_S, total_S = [values[len(values) - num :] for values in (answers.x_E, answers.rest_L)]
    value_S = total_S - x_S
    return rests.chunks_S.sum(value_S.index_fill(0, rests.chunks_S.start_K[:-1], 0.0))


def compare_others(
    answers: Answers, y_MW: Tensor, nodes: Nodes, target: RootTarget, goes: GoingOn, *,
    compare: Compare, temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergences of choices, insides and rests."""
    choices, insides, rests = nodes.choices, nodes.insides, nodes.rests
    num_many = len(rests.row_S)
    sizes = [len(choices.token_E), len(insides.token_G), num_many]
    x_scope, x_inside, x_many = torch.split(answers.x_E, sizes)
    rest_inside, rest_many = torch.split(answers.rest_L, [len(insides.row_S), num_many])
    choice_K = inside_K = rest_M = answers.x_E.new_zeros(0)
    if len(choices.level):
        question = choice_question(
            x_scope, y_MW, log_total_M=answers.log_total_M, target=target, goes=goes,
            choices=choices,
        )
        choice_K, _ = compare(*softened_cells(*question, temperature))
    if len(insides.row_S):
        question = inside_question(x_inside, rest_inside, goes, nodes.continuations, insides)
        inside_K, _ = compare(*softened_cells(*question, temperature))
    if num_many:
        logits_M = losses.at_least_float32(y_MW[rests.row_T, rests.next_T])
        logq_M = logits_M - answers.log_total_M[rests.row_T]
        rest_M = _rests(x_many - rest_many, logq_M, rests, temperature)
    return choice_K, inside_K, rest_M


def cell_coverage(
    teacher_logits_BTW: Tensor, nodes: Nodes, tables: Tables
) -> dict[str, losses.SumAndCount]:
    """Measure the teacher's belief at the roots, each as (sum of probabilities, roots).

    cell_coverage: of tokens that give their mass to a cell.
    joined_mass: of those, what the student's tokenizer would have joined to the token before, so
    that it is left out.
    """
    losses.check_side("teacher", teacher_logits_BTW)
    losses.check_width("teacher", teacher_logits_BTW, len(tables.cell_W), "cell_W")
    with torch.no_grad():
        y_MW = teacher_logits_BTW.detach().flatten(0, 1)
        roots = nodes.roots
        q_NW = losses.at_least_float32(y_MW.index_select(0, roots.row_T)).softmax(-1)
        has_cell_W = tables.cell_W < tables.num_cells
        covered_NW = q_NW[:, has_cell_W]
        mask_joined(q_NW, nodes, tables)
        num_roots = torch.tensor(len(roots.row_T), device=y_MW.device)
        return {
            # a sum of probabilities is rounded
            "cell_coverage": (covered_NW.sum(1).clamp(max=1.0).sum(), num_roots),
            # not a difference of sums, whose rounding is as large as a small mass
            "joined_mass": ((covered_NW - q_NW[:, has_cell_W]).sum(), num_roots),
        }


def _rests(logp_S: Tensor, logq_T: Tensor, rests: Rests, temperature: float) -> Tensor:
    """Return the KL between two Bernoulli variables, "the text goes on so", of each n:m chunk.

    Args:
        logp_S, logq_T: log-probabilities of the next tokens in the rows of `Rests`.
    """
    logp = rests.chunks_S.sum(losses.at_least(logp_S, FLOOR))
    logq = rests.chunks_T.sum(logq_T.clamp(min=FLOOR))
    logp = losses.soften_bernoulli(logp, temperature)
    return losses.bernoulli_kl(losses.soften_bernoulli(logq, temperature), logp)
