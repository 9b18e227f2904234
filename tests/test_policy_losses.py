"""policy_losses.py: samples of an older student have the expectation of fresh ones."""

import math
from itertools import product

import pytest
import torch

from cases import F64, gradient
from isogloss import losses, policy_losses


def test_stale_samples_have_the_expectation_of_fresh_ones():
    """Exact, by a sum over all texts of three tokens: value, and gradient at every history."""
    texts = list(product(range(4), repeat=3))
    row_of = {}
    for text in texts:
        for t in range(3):
            row_of.setdefault(text[:t], len(row_of))
    torch.manual_seed(0)
    student_HV, old_HV, teacher_HV = torch.randn(3, len(row_of), 4, dtype=F64)
    history_BS = torch.tensor([[row_of[text[:t]] for t in range(3)] for text in texts])
    next_BS = torch.tensor(texts)

    def logp_of(table_HV):
        logp = table_HV[history_BS].log_softmax(-1)
        return logp.gather(-1, next_BS[..., None]).squeeze(-1)

    def expectation(weight_BS):
        table_HV = student_HV.clone().requires_grad_()
        value, _ = losses.reverse_kl(table_HV[history_BS], teacher_HV[history_BS], None, top_k=2,
                                     support="student", weight_BS=weight_BS)
        return value.detach(), gradient(value, table_HV)

    logp_BS, old_logp_BS = logp_of(student_HV), logp_of(old_HV)
    now_BS, old_BS = [logp.sum(1, keepdim=True).exp().expand(logp.shape)
                      for logp in (logp_BS, old_logp_BS)]
    fresh = expectation(now_BS)
    ratio_BS = policy_losses.prefix_ratio(
        logp_BS, old_logp_BS, torch.ones_like(next_BS).bool(), math.inf)
    torch.testing.assert_close(expectation(old_BS * ratio_BS), fresh, rtol=0, atol=1e-9)
    uncorrected, _ = expectation(old_BS)
    assert abs(uncorrected - fresh[0]) > 1e-3
    # the ratio of the token at hand has the expectation 1: it corrects nothing
    at_hand, _ = expectation(old_BS * (logp_BS - old_logp_BS).exp())
    assert abs(at_hand - uncorrected) < 1e-9


def test_the_prefix_ratio_leaves_out_prompt_padding_and_other_samples():
    torch.manual_seed(2)
    packed = -3 * torch.rand(2, 1, 14)  # now, and under the older student
    mask = torch.zeros(1, 14, dtype=torch.bool)
    samples = slice(2, 5), slice(8, 12)  # in rows of prompt, sample, two positions of padding
    for of_sample in samples:
        mask[:, of_sample] = True
    packed[:, ~mask] = torch.nan
    sample = torch.tensor([[0] * 7 + [1] * 7])
    ratio = policy_losses.prefix_ratio(*packed, mask, 3.0, sample_BS=sample)
    assert ratio.dtype == torch.float32 and ratio.isfinite().all()
    for of_sample in samples:
        now, old = packed[:, 0, of_sample].double()
        expected = (now - old).cumsum(0)[:-1].exp().clamp(max=3)
        assert torch.allclose(ratio[0, of_sample][1:], expected.float())
    assert (ratio[0, :3] == 1).all() and (ratio[0, 7:9] == 1).all()
    # another sample's tokens, excluded by a model altogether, change nothing either
    packed[:, 0, 3] = torch.tensor([-torch.inf, -50.0])
    again = policy_losses.prefix_ratio(*packed, mask, 3.0, sample_BS=sample)
    assert torch.equal(again[0, 7:], ratio[0, 7:]) and again[0, 4] == 0


def test_the_prefix_ratio_is_limited_and_has_no_gradient():
    step = math.log(1.5)
    logp = torch.tensor([[step] * 4, [-step] * 4], dtype=F64, requires_grad=True)
    old_logp = torch.zeros(2, 4, dtype=F64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    clamped = policy_losses.prefix_ratio(logp, old_logp, mask, 2.0)
    up = [1, 1.5, 2, 2]
    down = [1, 1 / 1.5, 1 / 1.5**2, 1 / 1.5**3]
    assert not clamped.requires_grad
    assert torch.allclose(clamped, torch.tensor([up, down], dtype=F64))
    # a product of e^5000 is clamped, not inf; NaN stays to be seen
    assert policy_losses.prefix_ratio(logp + 5000, old_logp, mask, 2.0).max() == 2
    nothing = torch.zeros(2, 0)
    assert policy_losses.prefix_ratio(nothing, nothing, nothing > 0, 2.0).shape == (2, 0)
    logp = logp.detach().clone()
    logp[0, 1] = torch.nan
    assert policy_losses.prefix_ratio(logp, old_logp, mask, 2.0)[0, 2:].isnan().all()
    for options, message in (({"max_ratio": 0.5}, "max_ratio=0.5: expected 1 or more"),
                             ({"max_ratio": math.nan}, "max_ratio=nan: expected 1 or more")):
        with pytest.raises(ValueError, match=message):
            policy_losses.prefix_ratio(logp, old_logp, mask, **options)
