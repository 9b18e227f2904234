"""policy_losses.py: samples of an older student have the expectation of fresh ones.

tests/test_losses.py compares the loss with its definition.
"""

import math
from itertools import product

import pytest
import torch

from cases import F64, gradient
from isogloss import losses, policy_losses


class StaleToy:
    """All texts of T tokens, which an older student wrote, and what the student now makes of them.

    Attributes:
        table_HV: (H, V) the student's logits after every history, shared by the texts.
        history_BS: (B, S) row of the table at each position of each text.
        next_BS: the texts' tokens.
        y: the teacher's logits.
        now_B, old_B: probability of each text under the student and the older one.
        logp_BS, old_logp_BS: log-probabilities of their tokens.
    """

    def __init__(self, seed=0, V=4, T=3):
        texts = list(product(range(V), repeat=T))
        row_of = {}
        for text in texts:
            for t in range(T):
                row_of.setdefault(text[:t], len(row_of))
        torch.manual_seed(seed)
        self.table_HV, self.old_HV, teacher_HV = torch.randn(3, len(row_of), V, dtype=F64)
        rows = [[row_of[text[:t]] for t in range(T)] for text in texts]
        self.history_BS = torch.tensor(rows)
        self.next_BS = torch.tensor(texts)
        self.mask_BS = torch.ones_like(self.next_BS, dtype=torch.bool)
        self.y = teacher_HV[self.history_BS]
        self.old_x = self.old_HV[self.history_BS]
        self.logp_BS = self.logp_of(self.table_HV)
        self.old_logp_BS = self.logp_of(self.old_HV)
        self.now_B = self.logp_BS.sum(1).exp()
        self.old_B = self.old_logp_BS.sum(1).exp()

    def logp_of(self, table_HV):
        logp = table_HV[self.history_BS].log_softmax(-1)
        return logp.gather(-1, self.next_BS[..., None]).squeeze(-1)

    def expectation(self, loss, weight_B):
        """Return (sum over texts of weight times loss, its gradient with respect to the table)."""
        table = self.table_HV.clone().requires_grad_()
        weight_BS = weight_B[:, None].expand(self.next_BS.shape)
        value, _ = loss(table[self.history_BS], weight_BS)
        return value.detach(), gradient(value, table)


@pytest.mark.parametrize(("name", "options"), [
    ("reverse_kl", {"top_k": 2, "support": "student"}), ("forward_kl", {}),
    ("generalized_jsd", {}), ("total_variation", {})])
def test_stale_samples_have_the_expectation_of_fresh_ones(name, options):
    """Exact, by summing over all texts: value and gradient of the divergence at every history."""
    toy = StaleToy()
    assert abs(toy.old_B.sum() - 1) < 1e-12 and abs(toy.now_B.sum() - 1) < 1e-12

    def loss(x, weight_BS):
        return getattr(losses, name)(x, toy.y, toy.mask_BS, weight_BS=weight_BS, **options)

    ratios = toy.logp_BS, toy.old_logp_BS, toy.mask_BS, math.inf
    fresh, fresh_d = toy.expectation(loss, toy.now_B)
    for kind in ("clamp", "mask"):
        ratio_BS = policy_losses.prefix_ratio(*ratios, kind)
        value, d = toy.expectation(lambda x, weight_BS: loss(x, weight_BS * ratio_BS), toy.old_B)
        assert abs(value - fresh) < 1e-9
        assert (d - fresh_d).abs().max() < 1e-9
    uncorrected, _ = toy.expectation(loss, toy.old_B)
    assert abs(uncorrected - fresh) > 1e-3
    # the ratio of the token at hand has the expectation 1: it corrects nothing
    ratio_BS = (toy.logp_BS - toy.old_logp_BS).exp()
    at_hand, _ = toy.expectation(lambda x, weight_BS: loss(x, weight_BS * ratio_BS), toy.old_B)
    assert abs(at_hand - uncorrected) < 1e-9


def test_the_prefix_ratio_leaves_out_prompt_padding_and_other_samples():
    torch.manual_seed(2)
    logp = -3 * torch.rand(2, 5)
    old_logp = -3 * torch.rand(2, 5)
    prompts = 2, 1
    alone = []
    for b, prompt in enumerate(prompts):  # a sample by itself, without prompt
        of_sample = logp[b : b + 1, prompt:], old_logp[b : b + 1, prompt:]
        ones = torch.ones_like(of_sample[0], dtype=torch.bool)
        alone.append(policy_losses.prefix_ratio(*of_sample, ones, 3.0)[0])
        expected = (of_sample[0] - of_sample[1]).double()[0].cumsum(0)[:-1].exp().clamp(max=3)
        assert torch.allclose(alone[b], torch.cat([torch.ones(1), expected.float()]))

    def with_nan(x, b):  # prompt, sample, two positions of padding
        return torch.cat([torch.full((prompts[b],), torch.nan), x[b, prompts[b] :],
                          torch.full((2,), torch.nan)])

    packed = [torch.cat([with_nan(x, 0), with_nan(x, 1)])[None] for x in (logp, old_logp)]
    mask = ~packed[0].isnan()
    sample = torch.tensor([[0] * 7 + [1] * 7])
    ratio = policy_losses.prefix_ratio(*packed, mask, 3.0, sample_BS=sample)
    assert ratio.dtype == torch.float32 and ratio.isfinite().all()
    assert torch.equal(ratio[mask], torch.cat(alone))
    assert (ratio[0, :3] == 1).all() and (ratio[0, 7:9] == 1).all()
    # another sample's tokens, excluded by a model altogether, change nothing either
    for x, excluded in ((packed[0], -torch.inf), (packed[1], -50.0)):
        x[0, 3] = excluded
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
    masked = policy_losses.prefix_ratio(logp, old_logp, mask, 2.0, "mask")
    assert torch.allclose(masked, torch.tensor([[1, 1.5, 0, 0], [1, 1 / 1.5, 0, 0]], dtype=F64))
    # a product of e^5000 is clamped, not inf; NaN stays to be seen
    assert policy_losses.prefix_ratio(logp + 5000, old_logp, mask, 2.0).max() == 2
    logp = logp.detach().clone()
    logp[0, 1] = torch.nan
    for kind in ("clamp", "mask"):
        assert policy_losses.prefix_ratio(logp, old_logp, mask, 2.0, kind)[0, 2:].isnan().all()
    for options, message in (({"kind": "bucket"}, "'bucket': expected one of clamp, mask"),
                             ({"max_ratio": 0.5}, "max_ratio=0.5: expected 1 or more"),
                             ({"max_ratio": math.nan}, "max_ratio=nan: expected 1 or more")):
        with pytest.raises(ValueError, match=message):
            policy_losses.prefix_ratio(logp, old_logp, mask, **options)
