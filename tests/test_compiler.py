"""Formulas that torch.compile has: the same numbers; without a compiler a line, and plain torch."""

import pytest
import torch

from isogloss import losses, translation
from isogloss.models import compiler
from isogloss.models.compiler import loss_compiler, missing_compiler
from test_translation import COARSE, CROSSING, Toy, random_logits


@pytest.fixture(autouse=True)
def compilers_of_each_test():
    loss_compiler.cache_clear()
    yield
    loss_compiler.cache_clear()


def need_compiler():
    if missing := missing_compiler():
        pytest.skip(missing)


def value_and_gradient(function, x, *arguments, **options):
    leaf = x.clone().requires_grad_()
    value, _ = function(leaf, *arguments, **options)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward_kl", "generalized_jsd", "reverse_kl"])
def test_a_compiled_divergence_is_the_same_for_all_sizes(name):
    need_compiler()
    function = getattr(losses, name)
    in_graph = loss_compiler("compiled", "cpu")(function)
    for rows in (5, 2, 9):
        x, y = 3 * torch.randn(2, 1, rows, 13)
        weight = torch.rand(1, rows)
        for ours, expected in zip(
            value_and_gradient(in_graph, x, y, None, weight_BS=weight),
            value_and_gradient(function, x, y, None, weight_BS=weight),
        ):
            torch.testing.assert_close(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("divergence", "options"), [
    (losses.forward_kl, {}), (losses.generalized_jsd, {"temperature": 2.0, "beta": 0.3})])
def test_the_compiled_roots_of_a_translation_are_the_same(divergence, options):
    need_compiler()
    of_roots = loss_compiler("compiled", "cpu")(translation.root_values)
    for seed in range(3):
        toy = Toy(CROSSING, COARSE, seed + 1)
        x, y = random_logits(toy, seed, 3, excluded=0.2)
        for ours, expected in zip(
            value_and_gradient(toy.loss, x, y, divergence, of_roots=of_roots, **options),
            value_and_gradient(toy.loss, x, y, divergence, **options),
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_auto_compiles_on_a_gpu_alone():
    assert loss_compiler("auto", "cpu") is compiler.plain
    assert loss_compiler("plain", "cuda") is compiler.plain


def test_without_a_compiler_there_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "missing_compiler", lambda: "there is no triton")
    assert loss_compiler("auto", "cuda") is compiler.plain
    assert "there is no triton, so the loss runs as plain torch" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--loss_backend compiled: there is no triton; install"):
        loss_compiler("compiled", "cpu")
