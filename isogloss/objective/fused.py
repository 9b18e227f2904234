"""Write out the gradient of a loss over a sub-tile, with that of the cross-entropy, for a GPU.

losses.py and translation.py hold the formulas, and autograd reads and writes every row of logits
again for each of their terms.  Here the derivatives are written down, so that torch.compile makes a
few kernels of a whole sub-tile, which read its rows in the model's own precision and write the
gradient over them.  The values are those formulas; tests compare the gradients with autograd's.

Shapes: n, m student and teacher rows of a sub-tile; V, W vocabularies; N roots, C their cells;
other letters as in nodes.py.

Tests: tests/test_fused.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from isogloss import losses, translation
from isogloss.losses import FLOOR, SHIFT, at_least, at_least_float32
from isogloss.nodes import Nodes, Tables
from isogloss.translation import Answers, CellColumns, RootTarget

DERIVED = ("forward_kl", "reverse_kl", "generalized_jsd", "skew_forward_kl", "skew_reverse_kl",
           "total_variation")


class WrittenSums(NamedTuple):
    """Hold what a sub-tile adds to `counts.TermSums`, (n,) or () each, where the gradient is."""

    ce: torch.Tensor
    kd: torch.Tensor
    correct: torch.Tensor


# --- derivatives ----------------------------------------------------------------------------------


def slope_of(name, logp, logq, coefficient):
    """Return the derivatives (..., X) of `losses.divergence_of` by each log p."""
    c = coefficient
    if name == "generalized_jsd" and c in (0, 1):
        name = "reverse_kl" if c else "forward_kl"
    elif name in ("skew_forward_kl", "skew_reverse_kl") and not c:
        name = name.removeprefix("skew_")
    p, q = logp.exp(), logq.exp()
    if name == "forward_kl":
        return -q
    if name == "reverse_kl":
        return p * (logp - logq + 1)
    if name == "total_variation":
        return (p - q).sign() * p / 2
    weight = c if name == "skew_reverse_kl" else 1 - c  # of p in the mixture
    mixture = q.lerp(p, weight)
    tiny = torch.finfo(p.dtype).tiny
    logm = at_least(mixture, tiny).log()
    if name == "generalized_jsd":
        return weight * p * (logp - logm)
    share = torch.where(mixture > tiny, weight * p / mixture, 0.0)
    return -q * share if name == "skew_forward_kl" else p * (logp - logm + 1 - share)


def divergence_and_gradient(name, x, y, coefficient):
    """Return ((...,) divergences of softmax(y) and softmax(x), their gradients by x (..., X)).

    What `losses.position_divergence` computes, and autograd of it.
    """
    raw, logq = x.log_softmax(-1), at_least(y.log_softmax(-1), FLOOR)
    logp = at_least(raw, FLOOR)
    value = losses.divergence_of(name, logp, logq, coefficient)
    slope = slope_of(name, logp, logq, coefficient).masked_fill(raw <= FLOOR, 0.0)
    return value, slope - raw.exp() * slope.sum(-1, keepdim=True)


def text_and_gradient(x, label_n, has_text):
    """Return (cross-entropy (n,), is the label the likeliest (n,), gradient by x (n, V)).

    Args:
        label_n: int64, -100 for none.
        has_text: False: all of it is 0.
    """
    if not has_text:
        nothing = x.new_zeros(len(x))
        return nothing, nothing, torch.zeros_like(x)
    is_labeled = label_n >= 0
    label = label_n.clamp(min=0)[:, None]
    logp = x.log_softmax(-1)
    ce_n = -logp.gather(1, label)[:, 0]
    is_label = torch.arange(x.shape[1], device=x.device) == label
    gradient = torch.where(is_labeled[:, None], logp.exp() - is_label.to(x.dtype), 0.0)
    correct = (x.argmax(-1) == label_n).to(x.dtype)
    return torch.where(is_labeled, ce_n, 0.0), correct, gradient


# --- one vocabulary -------------------------------------------------------------------------------


def write_positions(
    x_nV, y_mV, factors, *, label_n, row_n, weight_n, name, coefficient, temperature, has_text
):
    """Write the gradient over x; return the WrittenSums of every row.

    Args:
        x_nV, y_mV: logits of any float type.
        row_n: int64, the teacher's row with which each of the student's is compared.
        weight_n: of these comparisons; 0: there is none.
        factors: (2 or more,) of cross-entropy and divergence in the gradient.
    """
    x = at_least_float32(x_nV)
    y = at_least_float32(y_mV.index_select(0, row_n))
    value_n, gradient = divergence_and_gradient(name, x / temperature, y / temperature, coefficient)
    ce_n, correct_n, of_text = text_and_gradient(x, label_n, has_text)
    of_kd = (factors[1] * temperature * weight_n)[:, None] * gradient
    x_nV.copy_(factors[0] * of_text + of_kd)
    return WrittenSums(ce_n, temperature**2 * weight_n * value_n, correct_n)


@dataclass
class PositionGradient:
    """Write the gradient of a divergence between models with one tokenizer.

    Attributes:
        name, coefficient, temperature: see `losses.position_divergence`.
        compiler: see `compiler.loss_compiler`.
    """

    name: str
    coefficient: float
    temperature: float
    compiler: Callable

    def __call__(self, student_nV, teacher_mV, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        chunks = sub_tile.terms
        row_n = torch.zeros_like(sub_tile.student_labels)
        row_n.index_copy_(0, chunks.first_S, chunks.first_T)
        weight_n = weights_of(sub_tile, student_nV)
        weight_n = torch.zeros_like(weight_n).index_copy_(
            0, chunks.first_S, weight_n.index_select(0, chunks.first_S))
        write = self.compiler(write_positions)
        sums = write(
            student_nV, teacher_mV, factors, label_n=sub_tile.student_labels, row_n=row_n,
            weight_n=weight_n, name=self.name, coefficient=self.coefficient,
            temperature=self.temperature, has_text=has_text)
        return WrittenSums(*[value_n.sum() for value_n in sums])


def weights_of(sub_tile, student_nV):
    """Return (n,) weights of the terms that begin in each row, at least float32."""
    if sub_tile.weight is not None:
        return at_least_float32(sub_tile.weight.detach())
    dtype = torch.promote_types(student_nV.dtype, torch.float32)
    return torch.ones(len(student_nV), dtype=dtype, device=student_nV.device)


# --- two vocabularies -----------------------------------------------------------------------------


def teacher_masses(y_mW, row_N):
    """Return (logsumexp of all rows (m,), probabilities (N, W) in those of the roots)."""
    y = at_least_float32(y_mW)
    total_m = y.logsumexp(-1)
    return total_m, (y.index_select(0, row_N) - total_m.index_select(0, row_N)[:, None]).exp()


def write_roots(
    x_nV, cell_NC, factors, columns, *, label_n, row_N, root_n, weight_N, text_N, name,
    coefficient, has_text
):
    """Write the gradient of the roots, and of the text, over x; return their WrittenSums.

    Args:
        x_nV: the student's logits.
        cell_NC: the teacher's mass in each cell, not normalized, see `translation.root_target`.
        row_N: int64, the student's row of each root; root_n: the root of each row, -1: none.
        weight_N: of the roots.
        text_N: of the cross-entropy of the next token within its cell; None: there is none.
        factors: (2 or more,) of cross-entropy and translation in the gradient.
        columns: `losses.Columns` of the student's cells.
    """
    x = at_least_float32(x_nV)
    tiny = torch.finfo(x.dtype).tiny
    inside = x.masked_fill(columns.none_X, -torch.inf)
    top_n1 = inside.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    mass_nV = (inside - top_n1 + SHIFT).exp()
    mass_NC = columns.sum(mass_nV.index_select(0, row_N))
    logits_NC = at_least(mass_NC, tiny).log()
    value_N, of_cells = divergence_and_gradient(
        name, logits_NC, translation.log_target(translation.normalized(cell_NC)), coefficient)
    of_cells = weight_N[:, None] * of_cells
    value_N = weight_N * value_N
    if text_N is not None:
        next_N = label_n.index_select(0, row_N)
        cell_N = columns.of_X.index_select(0, next_N)
        numbers = torch.arange(cell_NC.shape[1], device=x.device)
        of_cells = of_cells + text_N[:, None] * (numbers == cell_N[:, None]).to(x.dtype)
        in_cell_N = logits_NC.gather(1, cell_N[:, None])[:, 0] - SHIFT
        logit_N = (x - top_n1).index_select(0, row_N).gather(1, next_N[:, None])[:, 0]
        value_N = value_N + text_N * (in_cell_N - logit_N)
    per_mass = torch.where(mass_NC > tiny, of_cells / mass_NC, 0.0)
    per_token = per_mass.index_select(0, root_n.clamp(min=0)).index_select(1, columns.of_X)
    is_inside = (root_n >= 0)[:, None] & ~columns.none_X
    of_roots = torch.where(is_inside, mass_nV * per_token, 0.0)
    ce_n, correct_n, of_text = text_and_gradient(x, label_n, has_text)
    x_nV.copy_(factors[0] * of_text + factors[1] * of_roots)
    return WrittenSums(ce_n, value_N, correct_n)


def of_rests(x_LV, rest_L, slope_L):
    """Return (L, V) the gradient of the logsumexp of each row, times its slope."""
    gradient = slope_L[:, None] * (at_least_float32(x_LV) - rest_L[:, None]).exp()
    return gradient.to(x_LV.dtype)


@dataclass
class TranslationGradient:
    """Write the gradient of a divergence between any two tokenizers, see translation.py.

    Attributes:
        name, coefficient: see `losses.position_divergence`.
        tables: `nodes.Tables`; cells: CellColumns of them.
        has_text: see `translation.translated_sub_tile`.
        compiler: see `compiler.loss_compiler`.
    """

    name: str
    coefficient: float
    tables: Tables
    cells: CellColumns
    has_text: bool
    compiler: Callable
    compare: Callable = field(init=False)

    def __post_init__(self):
        self.compare = partial(losses.position_divergence, self.name, reduction="none",
                               coefficient=self.coefficient)

    def __call__(self, student_nV, teacher_mW, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        nodes = sub_tile.terms
        roots = nodes.roots
        columns_V, columns_W = self.cells
        weight_n = weights_of(sub_tile, student_nV)
        is_alone = not (self.has_text or sub_tile.on_policy)
        # what the teacher says
        goes = translation.going_on(teacher_mW, nodes.continuations, self.tables)
        total_m, q_NW = self.compiler(teacher_masses)(teacher_mW, roots.row_T)
        translation.mask_joined(q_NW, nodes, self.tables)
        cell_NC = self.compiler(translation.ended_cells)(
            q_NW, goes.ends_K[: len(q_NW)], columns_W)
        translation.add_going(cell_NC, nodes, goes, self.tables)
        target = RootTarget(cell_NC, *translation.likely_longer(q_NW, nodes, self.tables))
        del q_NW
        # the small nodes, whose gradients are by the few numbers that they read
        small = SmallNodes.read(student_nV, nodes, total_m)
        with torch.enable_grad():
            parts = translation.compare_others(
                small.answers, teacher_mW, nodes, target, goes, compare=self.compare,
                temperature=1.0)
            if is_alone:
                parts = *parts[:2], translation.text_in_rests(small.answers, nodes.rests)
            small_kd = small.weighted_sum(parts, weight_n)
        # the roots and the text
        weight_N = weight_n.index_select(0, roots.row_S)
        text_N = None
        if is_alone:
            text_N = weight_N * (self.tables.cell_V[roots.next_S] < self.tables.num_cells)
        root_n = torch.full_like(sub_tile.student_labels, -1)
        root_n.index_copy_(0, roots.row_S, torch.arange(len(roots.row_S), device=root_n.device))
        ce_n, value_N, correct_n = self.compiler(write_roots)(
            student_nV, cell_NC, factors, columns_V, label_n=sub_tile.student_labels,
            row_N=roots.row_S, root_n=root_n, weight_N=weight_N, text_N=text_N, name=self.name,
            coefficient=self.coefficient, has_text=has_text)
        small.add_gradient(student_nV, small_kd, factors[1], self.compiler(of_rests))
        if is_alone:  # the other half of the cross-entropy within a cell
            student_nV.index_put_((roots.row_S, roots.next_S),
                                  (-factors[1] * text_N).to(student_nV), accumulate=True)
        return WrittenSums(ce_n.sum(), value_N.sum() + small_kd.detach(), correct_n.sum())


@dataclass
class SmallNodes:
    """Hold what the nodes that are no roots read of the student's logits.

    Attributes:
        nodes: `nodes.Nodes`.
        answers: `translation.Answers`, to whose numbers of the student a gradient is asked.
        x_LV: the rows of which a logsumexp is asked, without what it leaves out.
    """

    nodes: Nodes
    answers: Answers
    x_LV: torch.Tensor

    @classmethod
    def read(cls, x_nV, nodes, total_m):
        """Copy what is read of the logits (n, V), over which the gradient will be written."""
        reads = nodes.reads
        x_E = at_least_float32(x_nV[reads.row_R[reads.number_E], reads.token_E])
        floor = max(10 * FLOOR, torch.finfo(x_nV.dtype).min)  # float16 ends before
        rows = at_least(x_nV.index_select(0, reads.row_R[len(nodes.roots.row_S) :]), floor)
        rows.index_put_((reads.number_X, reads.token_X), rows.new_full((), floor))
        rest_L = at_least_float32(rows).logsumexp(-1)
        answers = Answers(
            at_least(x_E, 10 * FLOOR).requires_grad_(), rest_L.requires_grad_(), total_m)
        return cls(nodes, answers, rows)

    def weighted_sum(self, parts, weight_n):
        """Return the sum () of what `translation.compare_others` returns, weighted by rows (n,)."""
        choice_K, inside_K, rest_M = parts
        num_roots = len(self.nodes.roots.row_S)
        weight_A = weight_n.index_select(0, self.nodes.row_A)
        total = (weight_A[num_roots:] * torch.cat([inside_K, rest_M])).sum()
        if len(choice_K):
            of_roots = self.nodes.choices.roots.sum(choice_K)
            total = total + (weight_A[:num_roots] * of_roots).sum()
        return total

    def add_gradient(self, d_nV, total, factor, of_rests):
        """Add the gradient of factor * total to that of the logits; see `of_rests`."""
        if not total.requires_grad:
            return
        x_E, rest_L, _ = self.answers
        slope_E, slope_L = torch.autograd.grad(total, [x_E, rest_L], factor.to(total),
                                               allow_unused=True, materialize_grads=True)
        reads = self.nodes.reads
        if len(slope_L):
            rows_L = reads.row_R[len(self.nodes.roots.row_S) :]
            # index_put has an order of additions on a GPU too, index_add has none
            of_rows = of_rests(self.x_LV, rest_L.detach(), slope_L)
            d_nV.index_put_((rows_L,), of_rows, accumulate=True)
        if len(slope_E):
            slope_E = slope_E.masked_fill(x_E <= 10 * FLOOR, 0.0)  # what a model excludes
            place = reads.row_R[reads.number_E], reads.token_E
            d_nV.index_put_(place, slope_E.to(d_nV), accumulate=True)


# --- probabilities of the text --------------------------------------------------------------------


def token_logp(x_nV, label_n):
    """Return (n,) log-probabilities of the labels, at least float32; of -100 those of any token."""
    x = at_least_float32(x_nV)
    logit_n = x.gather(1, label_n.clamp(min=0)[:, None])[:, 0]
    return logit_n - x.logsumexp(-1)


def write_tokens(x_nV, factors, *, label_n, slope_n, has_text):
    """Write the gradient of the cross-entropy, and of what is a function of `token_logp`, over x.

    Args:
        factors: (2 or more,) of cross-entropy and that function in the gradient.
        slope_n: its derivative by the log-probability of each label.
    Returns:
        (cross-entropy (n,), is the label the likeliest (n,)).
    """
    x = at_least_float32(x_nV)
    ce_n, correct_n, of_text = text_and_gradient(x, label_n, has_text=True)
    share_n = factors[0] * has_text - factors[1] * slope_n
    x_nV.copy_(share_n[:, None] * of_text)
    return has_text * ce_n, has_text * correct_n


@dataclass
class AlmGradient:
    """Write the gradient of `losses.alm`, which depends on the probabilities of the text alone.

    Attributes:
        temperature: see there.
        compiler: see `compiler.loss_compiler`.
    """

    temperature: float
    compiler: Callable

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
        ce_n, correct_n = self.compiler(write_tokens)(
            student_nV, factors, label_n=sub_tile.student_labels, slope_n=slope_n,
            has_text=has_text)
        return WrittenSums(ce_n.sum(), kd.detach(), correct_n.sum())
