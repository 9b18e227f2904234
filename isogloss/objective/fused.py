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
    """Return (cross-entropy, is the label the likeliest, gradient by x (n, V), logsumexp), (n,).

    Args:
        label_n: int64, -100 for none.
        has_text: False: all of it is 0.
    """
    if not has_text:
        nothing = x.new_zeros(len(x))
        return nothing, nothing, torch.zeros_like(x), nothing
    is_labeled = label_n >= 0
    label = label_n.clamp(min=0)[:, None]
    logp = x.log_softmax(-1)
    ce_n = -logp.gather(1, label)[:, 0]
    is_label = torch.arange(x.shape[1], device=x.device) == label
    gradient = torch.where(is_labeled[:, None], logp.exp() - is_label.to(x.dtype), 0.0)
    correct = (x.argmax(-1) == label_n).to(x.dtype)
    total_n = x.gather(1, label)[:, 0] + ce_n
    return torch.where(is_labeled, ce_n, 0.0), correct, gradient, total_n


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
    ce_n, correct_n, of_text, _ = text_and_gradient(x, label_n, has_text)
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
    ce_n, correct_n, of_text, _ = text_and_gradient(x, label_n, has_text=True)
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
