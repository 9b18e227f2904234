"""Write out the gradient of a divergence between two tokenizers, see fused.py and translation.py.

A sub-tile is four compiled functions: what the teacher says, the small nodes (all that are no
roots), the roots, and what writes the gradient of every row, with the text.  What the small nodes
read of the student is few numbers, and the logsumexp of some rows; the gradient of the latter is
written with the roots, that of the former added afterwards.

Shapes: n, m student and teacher rows of a sub-tile; L rows of which the small nodes ask for a
logsumexp; X, Y tokens in insides, and in all other nodes; other letters as in nodes.py.

Tests: tests/test_fused.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isogloss import losses, translation
from isogloss.losses import FLOOR, LOG_ZERO, MARGIN, SHIFT, at_least_float32
from isogloss.nodes import Tables
from isogloss.objective.fused import (
    WrittenSums,
    divergence_and_gradient,
    live_copies_of,
    text_and_gradient,
    weights_of,
)
from isogloss.translation import CellColumns, GoingOn, RootTarget

EXCLUDED = 10 * FLOOR  # a logit below any that counts, see `translation.Answers`


class Divergence(NamedTuple):
    """Name a divergence of cells and its parameters, see `losses.position_divergence`.

    choice_weight: see `translation.translated`.
    """

    name: str
    coefficient: float
    temperature: float
    choice_weight: float = translation.CHOICE_WEIGHT

    def value_and_gradient(self, logits_KG, logq_KG):
        """Return ((K,) divergences, their gradients (K, G)), without the square of temperature.

        What `translation.softened_cells` and a divergence compute, and autograd of it.
        """
        tau, low = self.temperature, LOG_ZERO - SHIFT
        soft_KG = losses.softened(logits_KG, low, tau)
        value_K, d_KG = divergence_and_gradient(
            self.name, soft_KG, losses.softened(logq_KG, LOG_ZERO, tau), self.coefficient)
        if tau == 1:
            return value_K, d_KG
        logp_KG = logits_KG.log_softmax(-1)
        is_zero_KG = logp_KG <= low + 1
        p_KG = (logp_KG / tau).masked_fill(is_zero_KG, -torch.inf).softmax(-1)
        d_KG = d_KG.masked_fill(is_zero_KG | (soft_KG <= low), 0.0)
        return value_K, (d_KG - p_KG * d_KG.sum(-1, keepdim=True)) / tau

    def rest_and_slope(self, logp_M, logq_M):
        """Return ((M,) `losses.bernoulli_kl`, its derivative by logp_M), likewise."""
        tau = self.temperature
        soft_p_M, soft_q_M = [losses.soften_bernoulli(x, tau) for x in (logp_M, logq_M)]
        value_M = losses.bernoulli_kl(soft_q_M, soft_p_M)
        not_p_M, not_q_M = [-torch.expm1(x.clamp(max=-MARGIN)) for x in (soft_p_M, soft_q_M)]
        slope_M = not_q_M * soft_p_M.exp() / not_p_M - soft_q_M.clamp(max=-MARGIN).exp()
        slope_M = slope_M.masked_fill(soft_p_M > -MARGIN, 0.0)
        if tau == 1:
            return value_M, slope_M
        hard_M = -torch.expm1(logp_M.clamp(max=-MARGIN))
        slope_M = slope_M * -torch.expm1(soft_p_M) / (tau * hard_M)
        return value_M, slope_M.masked_fill(logp_M > -MARGIN, 0.0)


# --- the teacher ----------------------------------------------------------------------------------


class Teacher(NamedTuple):
    """Hold what the teacher says of a sub-tile.

    Attributes:
        total_m: logsumexp of its rows.
        target: `translation.RootTarget`, whose cells are not normalized and lack what goes on.
        goes: `translation.GoingOn`.
        going: ((root, cell), mass) of what goes on, see `translation.going_places`.
    """

    total_m: torch.Tensor
    target: RootTarget
    goes: GoingOn
    going: tuple


def teacher_side(y_mW, nodes, tables, columns_W):
    """Return the Teacher; see `translation.root_target`."""
    roots = nodes.roots
    goes = translation.going_on(y_mW, nodes.continuations, tables)
    y = at_least_float32(y_mW)
    total_m = y.logsumexp(-1)
    q_NW = (y.index_select(0, roots.row_T) - total_m.index_select(0, roots.row_T)[:, None]).exp()
    # a mask, which takes a quarter of the bytes that a copy of the probabilities would
    place_E = translation.joined_places(nodes, tables)
    came_N = torch.arange(len(q_NW), device=q_NW.device) * q_NW.shape[1] + roots.next_T
    cannot_come_E = place_E != came_N[place_E // q_NW.shape[1]]
    joined = torch.zeros(q_NW.numel(), dtype=torch.bool, device=q_NW.device)
    joined = joined.index_put((place_E,), cannot_come_E).view(q_NW.shape)
    q_NW = q_NW.masked_fill(joined, 0.0)
    cell_NC = translation.ended_cells(q_NW, goes.ends_K[: len(q_NW)], columns_W)
    target = RootTarget(cell_NC, *translation.likely_longer(q_NW, nodes, tables))
    return Teacher(total_m, target, goes, translation.going_places(nodes, goes, tables))


# --- the small nodes ------------------------------------------------------------------------------


class SmallNodes(NamedTuple):
    """Hold the sum of the small nodes, and its gradient.

    Attributes:
        kd: () their weighted sum.
        rest_n, slope_n: the logsumexp that is read of a row, and the sum's derivative by it; 0:
            none is read.
        inside_X: (X,) the student's logits of the tokens in insides; slope_X: derivatives by them.
        slope_Y: (Y,) by the logits of all other tokens; row_Y, token_Y: these.
    """

    kd: torch.Tensor
    rest_n: torch.Tensor
    slope_n: torch.Tensor
    inside_X: torch.Tensor
    slope_X: torch.Tensor
    row_Y: torch.Tensor
    token_Y: torch.Tensor
    slope_Y: torch.Tensor


def small_nodes(x_nV, y_mW, teacher, weight_n, nodes, columns, *, divergence, is_alone):
    """Compare all nodes but the roots, as `translation.compare_others` does.

    Args:
        columns: `losses.Columns` of the student's cells.
        is_alone: no cross-entropy is beside it, see `translation.text_in_rests`.
    """
    choices, insides, rests, reads = nodes.choices, nodes.insides, nodes.rests, nodes.reads
    num_roots = len(nodes.roots.row_S)
    sizes = [len(choices.token_E), len(insides.token_G), len(rests.row_S)]
    row_E = reads.row_R[reads.number_E]
    x_E = at_least_float32(x_nV[row_E, reads.token_E])
    is_excluded_E = x_E <= EXCLUDED
    x_scope, x_inside, x_many = torch.split(x_E.clamp(min=EXCLUDED), sizes)
    rest_L = rests_of_rows(x_nV, nodes)
    weight_A = weight_n.index_select(0, nodes.row_A)
    weight_N, weight_K, weight_M = torch.split(
        weight_A, [num_roots, len(insides.row_S), len(weight_A) - num_roots - len(insides.row_S)])
    kd = weight_n.new_zeros(())
    slope_scope, slope_inside, slope_many = map(torch.zeros_like, (x_scope, x_inside, x_many))
    slope_L = torch.zeros_like(rest_L)
    scale = divergence.temperature**2
    if len(choices.level):
        value, slope_scope = of_choices(
            x_scope, y_mW, teacher, choices,
            scale * divergence.choice_weight * weight_N[choices.roots.of_E], divergence)
        kd = kd + value
    if len(insides.row_S):
        value, slope, slope_inside = of_insides(
            x_inside, rest_L[: len(insides.row_S)], teacher.goes, nodes, scale * weight_K,
            divergence)
        kd, slope_L = kd + value, torch.cat([slope, slope_L[len(slope) :]])
    if len(rests.row_S):
        rest_many = rest_L[len(insides.row_S) :]
        if is_alone:
            value, slope_many = of_text(x_many - rest_many, rests, weight_M)
        else:
            logq_M = at_least_float32(y_mW[rests.row_T, rests.next_T])
            logq_M = logq_M - teacher.total_m[rests.row_T]
            value, slope_many = of_rests(
                x_many - rest_many, logq_M, rests, scale * weight_M, divergence)
        kd, slope_L = kd + value, torch.cat([slope_L[: len(insides.row_S)], -slope_many])
    row_L = reads.row_R[num_roots:]
    rest_n, slope_n = [torch.zeros_like(weight_n).index_copy(0, row_L, value.to(weight_n.dtype))
                       for value in (rest_L, slope_L)]
    slope_E = torch.cat([slope_scope, slope_inside, slope_many]).masked_fill(is_excluded_E, 0.0)
    scope, inside, many = zip(*[torch.split(value_E, sizes)
                                for value_E in (row_E, reads.token_E, slope_E)])
    others = [scope, many]
    if is_alone:
        linked_N = linked_weight(weight_N, nodes.roots, columns)
        others.append((nodes.roots.row_S, nodes.roots.next_S, -linked_N))
    return SmallNodes(kd, rest_n, slope_n, x_inside, inside[2], *map(torch.cat, zip(*others)))


def rests_of_rows(x_nV, nodes):
    """Return (L,) logsumexp of the rows that the small nodes read, without what it leaves out."""
    reads = nodes.reads
    floor = max(EXCLUDED, torch.finfo(x_nV.dtype).min)  # float16 ends before
    rows = x_nV.index_select(0, reads.row_R[len(nodes.roots.row_S) :]).clamp(min=floor)
    rows = rows.index_put((reads.number_X, reads.token_X), rows.new_full((), floor))
    return at_least_float32(rows).logsumexp(-1)


def of_choices(x_E, y_mW, teacher, choices, weight_K, divergence):
    """Return (() weighted sum of the choices, (E,) its gradient by the logits of their scopes)."""
    question = translation.choice_question(
        x_E, y_mW, log_total_M=teacher.total_m, target=teacher.target, goes=teacher.goes,
        choices=choices)
    value_K, d_KG = divergence.value_and_gradient(*question)
    cells = choices.cells
    place_E = [number_G[choices.tokens.of_E] for number_G in (cells.nodes.of_E, cells.slot_G)]
    d_KG = weight_K[:, None] * d_KG
    # a cell's logit is the logsumexp of its tokens
    return (weight_K * value_K).sum(), d_KG[*place_E] * (x_E - question.logits_KG[*place_E]).exp()


def of_insides(x_G, rest_K, goes, nodes, weight_K, divergence):
    """Return the same of the insides, (K,) its gradient by the rest, (G,) by the tokens."""
    insides = nodes.insides
    question = translation.inside_question(x_G, rest_K, goes, nodes.continuations, insides)
    value_K, d_KG = divergence.value_and_gradient(*question)
    d_KG = weight_K[:, None] * d_KG
    cells = insides.cells
    slope_K = d_KG[:, 0].masked_fill(rest_K <= FLOOR, 0.0)
    return (weight_K * value_K).sum(), slope_K, d_KG[cells.nodes.of_E, cells.slot_G + 1]


def of_rests(logp_S, logq_T, rests, weight_M, divergence):
    """Return the same of the rests, (S,) its gradient by the log-probabilities of the tokens."""
    logp_M = rests.chunks_S.sum(logp_S.clamp(min=FLOOR))
    logq_M = rests.chunks_T.sum(logq_T.clamp(min=FLOOR))
    value_M, slope_M = divergence.rest_and_slope(logp_M, logq_M)
    slope_S = (weight_M * slope_M)[rests.chunks_S.of_E].masked_fill(logp_S <= FLOOR, 0.0)
    return (weight_M * value_M).sum(), slope_S


def of_text(logp_S, rests, weight_M):
    """Return the same of `translation.text_in_rests`."""
    slope_S = -weight_M[rests.chunks_S.of_E]
    slope_S = slope_S.index_fill(0, rests.chunks_S.start_K[:-1], 0.0)
    return (slope_S * logp_S).sum(), slope_S


# --- the roots and the text -----------------------------------------------------------------------


class RootSlopes(NamedTuple):
    """Hold the sum of the roots, and what its gradient is made of.

    Attributes:
        kd: () their weighted sum.
        slope_NC: (N, C) its derivative by the student's mass in each cell.
        top_n1: the largest logit of a token with a cell, in each row.
    """

    kd: torch.Tensor
    slope_NC: torch.Tensor
    top_n1: torch.Tensor


def lifted_masses(x, top_n1, columns):
    """Return the masses of the tokens with a cell, see `losses.log_masses`; 0 of the others."""
    return (x.masked_fill(columns.none_X, -torch.inf) - top_n1 + SHIFT).exp()


def of_roots(x_nV, cell_NC, columns, *, roots, weight_n, divergence, is_alone):
    """Compare the roots, see `translation.root_values`; return RootSlopes.

    Args:
        x_nV: the student's logits.
        cell_NC: the teacher's mass in each cell, not normalized, see `translation.root_target`.
        columns: `losses.Columns` of the student's cells.
        roots: `nodes.Roots`.
        is_alone: the cross-entropy of the next token within its cell belongs to the loss; what it
            has of that token's logit is in the small nodes.
    """
    x = at_least_float32(x_nV)
    lowest = torch.finfo(x.dtype)
    row_N = roots.row_S
    weight_N = weight_n.index_select(0, row_N)
    top_n1 = x.masked_fill(columns.none_X, -torch.inf).amax(-1, keepdim=True).clamp(min=lowest.min)
    mass_NC = columns.sum(lifted_masses(x, top_n1, columns).index_select(0, row_N))
    logits_NC = mass_NC.clamp(min=lowest.tiny).log()
    value_N, of_cells = divergence.value_and_gradient(
        logits_NC, translation.log_target(translation.normalized(cell_NC)))
    scaled_N = divergence.temperature**2 * weight_N
    of_cells = scaled_N[:, None] * of_cells
    value_N = scaled_N * value_N
    if is_alone:
        next_N = roots.next_S
        cell_N = columns.of_X.index_select(0, next_N)
        text_N = linked_weight(weight_N, roots, columns)
        numbers = torch.arange(cell_NC.shape[1], device=x.device)
        of_cells = of_cells + text_N[:, None] * (numbers == cell_N[:, None]).to(x.dtype)
        in_cell_N = logits_NC.gather(1, cell_N[:, None])[:, 0] - SHIFT
        logit_N = (x - top_n1).index_select(0, row_N).gather(1, next_N[:, None])[:, 0]
        value_N = value_N + text_N * (in_cell_N - logit_N)
    slope_NC = torch.where(mass_NC > lowest.tiny, of_cells / mass_NC, 0.0)
    return RootSlopes(value_N.sum(), slope_NC, top_n1)


def write_rows(x_nV, factors, columns, *, slopes, small, roots, label_n, has_text):
    """Write the gradient of the roots, the text and the rests of rows over x.

    Args:
        x_nV: the student's logits.
        factors: (2 or more,) of cross-entropy and translation in the gradient.
        columns: `losses.Columns` of the student's cells.
        slopes, small: RootSlopes, SmallNodes.
        roots: `nodes.Roots`.
    Returns:
        (WrittenSums, logsumexp of every row (n,)).
    """
    x = at_least_float32(x_nV)
    numbers = torch.arange(len(roots.row_S), device=x.device)
    root_n = torch.full_like(label_n, -1).index_copy(0, roots.row_S, numbers)
    per_mass = slopes.slope_NC.index_select(0, root_n.clamp(min=0)).index_select(1, columns.of_X)
    has_cell = (root_n >= 0)[:, None] & ~columns.none_X
    of_roots = torch.where(has_cell, lifted_masses(x, slopes.top_n1, columns) * per_mass, 0.0)
    slope_n1 = small.slope_n[:, None]
    of_rests = torch.where(slope_n1 != 0, slope_n1 * (x - small.rest_n[:, None]).exp(), 0.0)
    ce_n, correct_n, of_text, total_n = text_and_gradient(x, label_n, has_text)
    x_nV.copy_(factors[0] * of_text + factors[1] * (of_roots + of_rests))
    return WrittenSums(ce_n.sum(), slopes.kd + small.kd, correct_n.sum()), total_n


def linked_weight(weight_N, roots, columns):
    """Return the weights (N,) of the roots whose next token has a cell, 0 of the others."""
    return weight_N.masked_fill(columns.none_X.index_select(0, roots.next_S), 0.0)


def of_inside_tokens(factors, *, small, row_X, total_n, label_n, insides, has_text):
    """Return the gradient (X,) by the tokens in insides, which the rest of their rows leaves out.

    Args:
        row_X: their rows.
        total_n: logsumexp of every row.
    """
    d_X = factors[1] * small.slope_X
    if has_text:
        label_X = label_n[row_X]
        p_X = (small.inside_X - total_n[row_X]).exp()
        of_text = (p_X - (label_X == insides.token_G).to(p_X.dtype)).masked_fill(label_X < 0, 0.0)
        d_X = d_X + factors[0] * of_text
    return d_X


@dataclass
class TranslationGradient:
    """Write the gradient of a divergence between any two tokenizers, see translation.py.

    Attributes:
        divergence: Divergence.
        tables: `nodes.Tables`; cells: CellColumns of them.
        has_text: see `translation.translated_sub_tile`.
        compiler: see `compiler.loss_compiler`.
    """

    divergence: Divergence
    tables: Tables
    cells: CellColumns
    has_text: bool
    compiler: Callable

    @property
    def live_copies(self):
        return live_copies_of(self.divergence.name)

    def __call__(self, student_nV, teacher_mW, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        nodes = sub_tile.terms
        columns_V, columns_W = self.cells
        label_n = sub_tile.student_labels
        is_alone = not (self.has_text or sub_tile.on_policy)
        weight_n = weights_of(sub_tile, student_nV)
        teacher = self.compiler(teacher_side)(teacher_mW, nodes, self.tables, columns_W)
        cell_NC = teacher.target.cell_NC
        # index_put has an order of additions on a GPU too; a compiler makes atomics of it
        cell_NC.index_put_(*teacher.going, accumulate=True)
        small = self.compiler(small_nodes)(
            student_nV, teacher_mW, teacher, weight_n, nodes, columns_V,
            divergence=self.divergence, is_alone=is_alone)
        slopes = self.compiler(of_roots)(
            student_nV, cell_NC, columns_V, roots=nodes.roots, weight_n=weight_n,
            divergence=self.divergence, is_alone=is_alone)
        sums, total_n = self.compiler(write_rows)(
            student_nV, factors, columns_V, slopes=slopes, small=small, roots=nodes.roots,
            label_n=label_n, has_text=has_text)
        insides = nodes.insides
        if len(insides.token_G):
            row_X = insides.row_S[insides.cells.nodes.of_E]
            d_X = self.compiler(of_inside_tokens)(
                factors, small=small, row_X=row_X, total_n=total_n, label_n=label_n,
                insides=insides, has_text=has_text)
            student_nV.index_put_((row_X, insides.token_G), d_X.to(student_nV.dtype))
        student_nV.index_put_(
            (small.row_Y, small.token_Y), (factors[1] * small.slope_Y).to(student_nV.dtype),
            accumulate=True)
        return sums
