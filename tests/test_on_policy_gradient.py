"""benchmarks/on_policy_gradient.py: what it compares is what it says, and the figures hold."""

import pytest
import torch

import losses
from benchmarks.on_policy_gradient import Args, measure, sampled_token
from cases import close, gradient
from conftest import ASSETS, asset


def test_the_sampled_token_has_the_exact_gradient_as_its_expectation():
    torch.manual_seed(0)
    x, y = 2 * torch.randn(2, 5, dtype=torch.float64)
    x.requires_grad_()
    expectation = torch.zeros(5, dtype=torch.float64)
    for token, probability in enumerate(x.detach().softmax(0)):
        value = sampled_token(x[None, None], y[None, None], torch.tensor([[token]]))
        expectation += probability * gradient(value, x)
    exact, _ = losses.reverse_kl(x[None, None], y[None, None], None)
    assert close(expectation, gradient(exact, x), 1e-12)


@pytest.mark.slow
def test_sixteen_tokens_of_the_student_give_nearly_the_exact_gradient():
    asset("models", "bitstories_1M")  # skips where there are none
    table = measure(Args(assets=str(ASSETS), batches=1))
    [sampled], [one], [four], [sixteen], [every] = table.values()
    assert sampled < 0.7 < one < four < sixteen
    assert sixteen > 0.98  # 0.985 to 0.995, whatever the batch
    assert abs(every - 1) < 1e-9
