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
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isogloss import losses
from isogloss.losses import FLOOR, at_least_float32

DERIVED = ("forward_kl", "reverse_kl", "generalized_jsd", "skew_forward_kl", "skew_reverse_kl",
           "adaptive_kl", "total_variation")


class WrittenSums(NamedTuple):
    """Hold what a sub-tile adds to `counts.TermSums`, () each; agreed: None, nothing counts it."""

    ce: torch.Tensor
    kd: torch.Tensor
    correct: torch.Tensor
    agreed: torch.Tensor | None = None


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
    if name == "adaptive_kl":
        h = losses.adaptive_weight(logp, logq, c)[..., None]
        return (1 - h) * p * (logp - logq + 1) - h * q
    weight = c if name == "skew_reverse_kl" else 1 - c  # of p in the mixture
    mixture = q.lerp(p, weight)
    tiny = torch.finfo(p.dtype).tiny
    logm = mixture.clamp(min=tiny).log()
    if name == "generalized_jsd":
        return weight * p * (logp - logm)
    share = torch.where(mixture > tiny, weight * p / mixture, 0.0)
    return -q * share if name == "skew_forward_kl" else p * (logp - logm + 1 - share)


def divergence_and_gradient(name, x, y, coefficient):
    """Return ((...,) divergences of softmax(y) and softmax(x), their gradients by x (..., X)).

    What `losses.position_divergence` computes, and autograd of it.
    """
    raw, logq = x.log_softmax(-1), y.log_softmax(-1).clamp(min=FLOOR)
    logp = raw.clamp(min=FLOOR)
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
    x_nV, y_mV, factors, *, label_n, first_S, first_T, weight_n, name, coefficient, temperature,
    has_text
):
    """Write the gradient over x; return the WrittenSums.

    Args:
        x_nV, y_mV: logits of any float type.
        first_S, first_T: (N,) int64, rows that are compared.
        weight_n: of the comparison that each row is in.
        factors: (2 or more,) of cross-entropy and divergence in the gradient.
    """
    row_n = torch.full_like(label_n, -1).index_copy(0, first_S, first_T)
    weight_n = temperature**2 * weight_n.masked_fill(row_n < 0, 0.0)
    x = at_least_float32(x_nV)
    y = at_least_float32(y_mV.index_select(0, row_n.clamp(min=0)))
    value_n, gradient = divergence_and_gradient(name, x / temperature, y / temperature, coefficient)
    ce_n, correct_n, of_text, _ = text_and_gradient(x, label_n, has_text)
    of_kd = (factors[1] / temperature * weight_n)[:, None] * gradient
    x_nV.copy_(factors[0] * of_text + of_kd)
    return WrittenSums(*torch.stack([ce_n, weight_n * value_n, correct_n]).sum(1))


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

    @property
    def live_copies(self):
        return live_copies_of(self.name)

    def __call__(self, student_nV, teacher_mV, sub_tile, factors, has_text):
        """Write the gradient over the student's logits; return the WrittenSums."""
        chunks = sub_tile.terms
        return self.compiler(write_positions)(
            student_nV, teacher_mV, factors, label_n=sub_tile.student_labels,
            first_S=chunks.first_S, first_T=chunks.first_T,
            weight_n=weights_of(sub_tile, student_nV), name=self.name,
            coefficient=self.coefficient, temperature=self.temperature, has_text=has_text)


def live_copies_of(name):
    """Return `LossSpec.live_copies` of a divergence whose gradient is written out."""
    return 7.8 if name == "adaptive_kl" else 3.3  # it sorts, and numbers are int64


def weights_of(sub_tile, student_nV):
    """Return (n,) weights of the terms that begin in each row, at least float32."""
    if sub_tile.weight is not None:
        return at_least_float32(sub_tile.weight.detach())
    dtype = torch.promote_types(student_nV.dtype, torch.float32)
    return torch.ones(len(student_nV), dtype=dtype, device=student_nV.device)
