"""Mix several teachers: score, weight or average them, and scale their loss to the cross-entropy.

Teachers of one vocabulary can be averaged into one (`average_teachers`).  Teachers of different
vocabularies each give a loss; `token_scores` and `teacher_weights` weight these losses per sample.
`dynamic_scale` balances distillation and cross-entropy.

Shapes: M teachers, B samples, T tokens, N of them in a row, W teacher vocabulary.

Needs torch only.  Copy this file into your own repository.  Tests: tests/test_losses.py.
License: Apache-2.0 (see LICENSE).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = -1e4  # nats; stands for log 0, so that what a teacher excludes costs a finite amount


def token_scores(logits_NW: Tensor, next_N: Tensor) -> Tensor:
    """Return (N,) log-probabilities, in nats, of tokens, at least float32.

    Args:
        logits_NW: any float type.
        next_N: int64, the tokens that they predict.
    """
    logp_NW = _at_least_float32(logits_NW).log_softmax(-1).clamp(min=FLOOR)
    return logp_NW.gather(1, next_N[:, None]).squeeze(1)


def teacher_weights(scores_MB: Tensor, select: bool = False) -> Tensor:
    """Return (M, B) weights that sum to 1 over the teachers that read a sample; 0 for the others.

    They are the softmax of the scores.

    Args:
        scores_MB: the higher the surer; -inf: the teacher has not read the sample.
        select: weight 1 for the best teacher and 0 for the others.
    """
    unread_MB = scores_MB == -torch.inf
    if select:
        one_hot_BM = F.one_hot(scores_MB.argmax(0), len(scores_MB))
        weights_MB = one_hot_BM.T.to(scores_MB.dtype)
    else:  # a softmax over nothing but -inf is NaN
        weights_MB = scores_MB.clamp(min=torch.finfo(scores_MB.dtype).min).softmax(0)
    return weights_MB.masked_fill(unread_MB, 0.0)


def average_teachers(logits_M: list[Tensor], weights_M: Tensor) -> Tensor:
    """Return the log of the mean probability of teachers that have one vocabulary.

    Args:
        logits_M: M tensors (B, T, W), any float type.
        weights_M: (M,), summing to 1.
    Returns:
        (B, T, W), at least float32.
    """
    stacked = torch.stack([_at_least_float32(x).log_softmax(-1) for x in logits_M])
    # one weight for all positions and tokens of a teacher
    weights = weights_M.to(stacked).reshape(-1, *[1] * (stacked.dim() - 1))
    return (stacked + weights.log()).logsumexp(0)


def common_events(logits_M: list[Tensor], W: int) -> list[Tensor]:
    """Return logits of the tokens that all teachers keep, and of all others as one event.

    For teachers of which some truncate their rows (`tiles.TopKLogits`): the mean of masses is exact
    for outcomes that all of them know.

    Args:
        logits_M: M tensors (..., W), or (..., W + 1) with -inf for what is not kept and the rest in
            the last column.
    Returns:
        M tensors (..., W + 1) likewise; as they are where all are whole.
    """
    if all(x.shape[-1] == W for x in logits_M):
        return logits_M
    with_rest = [F.pad(x, (0, W + 1 - x.shape[-1]), value=-torch.inf) for x in logits_M]
    is_common = torch.ones_like(with_rest[0], dtype=torch.bool)
    is_common[..., W] = False
    for x in with_rest:
        # a row without a rest says of every token what it has, as one of draws does
        is_common[..., :W] &= (x[..., :W] > -torch.inf) | (x[..., W:] == -torch.inf)
    events = []
    for x in with_rest:
        rest = x.masked_fill(is_common, -torch.inf).logsumexp(-1, keepdim=True)
        kept = x.masked_fill(~is_common, -torch.inf)[..., :W]
        events.append(torch.cat([kept, rest], -1))
    return events


def dynamic_scale(ce: Tensor, kd: Tensor) -> Tensor:
    """Return stopgrad(CE / KD), which makes the distillation loss as large as the cross-entropy.

    Args:
        ce, kd: () means over the *whole* step on all ranks; else the gradient's direction depends
            on how the batch is cut.
    Returns:
        () float32; finite where kd is 0.
    """
    return (ce.detach() / kd.detach().clamp(min=1e-12)).to(torch.float32)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
