"""Compute what a student's own text needs: the ratio of who learns and who wrote, and rewards.

Shapes: B samples, S positions; N positions or texts, V vocabulary.
Needs torch and losses.py.  Copy both into your own repository.  Tests: tests/test_policy_losses.py.
License: Apache-2.0 (see LICENSE).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from . import losses
except ImportError:  # copied beside it, not into a package
    import losses


def prefix_ratio(
    logp_BS: Tensor, old_logp_BS: Tensor, mask_BS: Tensor, max_ratio: float = 10.0,
    sample_BS: Tensor | None = None,
) -> Tensor:
    """Return how much likelier the student has become to write what precedes each position.

        rho_t = product over sampled tokens s < t of the same sample of p(s) / p_old(s)

    Samples of an older student, weighted so, have the expectation of the student's own: for every
    f of the tokens in front of t, E_old[rho_t f] = E[f].  The token at t is left out.  A divergence
    at t sums over all tokens that may come there, so it depends on what precedes t alone.  The
    ratio of the token at t has expectation 1 whatever precedes it, and would only add noise.  Use
    it as `weight_BS` of any loss here (times other weights): it has no gradient.

    It is exact with max_ratio = inf.  Its variance grows with the length, so it is limited.  A term
    that reads sampled tokens from t on too (`alm` of a chunk) would need their ratios as well, so
    it keeps a bias.

    Args:
        logp_BS: (B, S) float, log-probability in nats of the token that position t predicts, under
            the student as it is now; -inf counts as -1e4.
        old_logp_BS: (B, S) float, likewise, under the student that sampled.  Both under the
            distribution that was sampled from (its temperature).
        mask_BS: (B, S) bool, True where the token that position t predicts was sampled.  Others
            (prompt, padding) contribute nothing; the log-probabilities may hold NaN there.
        max_ratio: limit of the product, 1 or more; what is larger becomes it; inf: none.
        sample_BS: (B, S) int64, number of the sample at each position, for rows that hold several
            one after the other; None: each row is one.
    Returns:
        (B, S) rho at every position, also where the mask is False; 1 up to the first sampled token
        of each sample; dtype of logp_BS, at least float32.
    Raises:
        ValueError: max_ratio below 1.
    """
    if not max_ratio >= 1:
        raise ValueError(f"max_ratio={max_ratio}: expected 1 or more")
    losses.check_positions("logp_BS has", logp_BS.shape, old_logp_BS=old_logp_BS, mask_BS=mask_BS,
                    sample_BS=sample_BS)
    logp_BS = losses.at_least_float32(logp_BS.detach())
    # sums of a whole row in float64: those of a packed row are differences of them
    now_BS = logp_BS.double().clamp(min=losses.FLOOR)
    old_BS = old_logp_BS.detach().double().clamp(min=losses.FLOOR)
    log_ratio_BS = torch.where(mask_BS, now_BS - old_BS, 0.0)
    before_BS = F.pad(log_ratio_BS.cumsum(1), (1, 0))[:, :-1]
    if sample_BS is not None:
        begins_BS = F.pad(sample_BS[:, 1:] != sample_BS[:, :-1], (1, 0))
        position_S = torch.arange(sample_BS.shape[1], device=sample_BS.device)
        first_BS = torch.where(begins_BS, position_S, 0).cummax(1).values
        before_BS = before_BS - before_BS.gather(1, first_BS)
    return before_BS.clamp(max=math.log(max_ratio)).exp().to(logp_BS)


def advantages(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """Return how much better each text is than the others that were written from its prompt.

        A_i = r_i - mean over the others j of its group of r_j  =  G / (G - 1) (r_i - mean_G r)

    What it is compared with does not depend on the text itself, so that the expectation of
    A grad log p is the gradient of the expected reward, without a bias (RLOO: Kool, van Hoof,
    Welling 2019; Ahmadian et al. 2024, arXiv:2402.14740).  It is GRPO's (arXiv:2402.03300) without
    the division by the deviation, which weighs easy and hard prompts more (Dr. GRPO,
    arXiv:2503.20783).

    Args:
        reward_N: (N,) float.
        group_N: (N,) int64, number of the prompt of each text, any integers.
    Returns:
        (N,) float; 0 where a text is alone.
    """
    _, group_N, size_G = group_N.unique(return_inverse=True, return_counts=True)
    total_G = reward_N.new_zeros(len(size_G)).index_add(0, group_N, reward_N)
    others_N = (size_G[group_N] - 1).clamp(min=1)
    mean_N = (total_G[group_N] - reward_N) / others_N
    return torch.where(size_G[group_N] > 1, reward_N - mean_N, 0.0)


def policy_pull(logits_NV: Tensor, labels_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return 0 with the gradient of  - sum over positions of weight * log p(label).

    With A / M as the weight of every token that M texts hold, its expectation is minus the gradient
    of the expected reward: REINFORCE (Williams 1992), without a division by a text's own length,
    which would weigh the tokens of short texts more (Dr. GRPO).

    Args:
        logits_NV: (N, V) float.
        labels_N: (N,) int64, below 0 for none.
        weight_N: (N,) float, without a gradient.
    Returns:
        () at least float32.
    """
    positions = (labels_N >= 0).nonzero().squeeze(1)
    logp_NV = losses.at_least_float32(logits_NV[positions]).log_softmax(-1)
    logp_N = logp_NV.gather(1, labels_N[positions, None]).squeeze(1)
    loss = -(weight_N[positions] * logp_N).sum()
    return loss - loss.detach()
