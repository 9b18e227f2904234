"""Compute what a student's own text needs: the ratio of the student that learns and that wrote.

Shapes: B samples, S positions.
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
    before_BS = F.pad(log_ratio_BS.cumsum(1)[:, :-1], (1, 0))
    if sample_BS is not None:
        begins_BS = F.pad(sample_BS[:, 1:] != sample_BS[:, :-1], (1, 0))
        position_S = torch.arange(sample_BS.shape[1], device=sample_BS.device)
        first_BS = torch.where(begins_BS, position_S, 0).cummax(1).values
        before_BS = before_BS - before_BS.gather(1, first_BS)
    return before_BS.clamp(max=math.log(max_ratio)).exp().to(logp_BS)
