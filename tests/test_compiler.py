"""Formulas that torch.compile has: the same numbers; without a compiler a line, and plain torch."""

from types import SimpleNamespace

import pytest
import torch

from cases import gradient
from every_loss import chunk_problem
from isogloss import translation
from isogloss.models import compiler
from isogloss.models.compiled_formula import CompiledFormula
from isogloss.models.compiler import loss_compiler, missing_compiler
from isogloss.objective import loss_table


@pytest.fixture(autouse=True)
def compilers_of_each_test():
    loss_compiler.cache_clear()
    yield
    loss_compiler.cache_clear()


@pytest.mark.slow
def test_the_compiled_roots_of_a_translation_are_the_same():
    if missing := missing_compiler():
        pytest.skip(missing)
    of_roots = loss_compiler("compiled", "cpu")(translation.root_values)
    for seed in range(3):
        problem = chunk_problem("translated, generalized_jsd", seed, 2.0)
        results = []
        for options in ({"of_roots": of_roots}, {}):
            value, _ = problem.loss(**options)
            results += value, gradient(value, problem.x)
        torch.testing.assert_close(results[:2], results[2:])


def test_auto_compiles_on_a_gpu_alone_and_without_a_compiler_there_is_a_line(monkeypatch, capsys):
    def made(backend, device):
        return loss_table.compiler_of(SimpleNamespace(loss_backend=backend), device)

    assert made("auto", "cpu") is made("plain", "cuda") is loss_table.plain
    monkeypatch.setattr(compiler, "missing_compiler", lambda: "there is no triton")
    assert made("auto", "cuda:0") is loss_table.plain
    assert "there is no triton, so the loss runs as plain torch" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--loss_backend compiled: there is no triton; install"):
        loss_compiler("compiled", "cpu")


def test_a_formula_that_no_compiler_takes_runs_as_plain_torch(capsys):
    def half(x):
        return x / 2

    def refuses(graph, inputs):
        raise RuntimeError("nothing can be made of it\nand more")

    formula = CompiledFormula(half)
    formula.compiled = torch.compile(half, backend=refuses)
    x = torch.ones(3)
    assert torch.equal(formula(x), x / 2) and torch.equal(formula(2 * x), x)
    [line] = capsys.readouterr().err.splitlines()
    assert "makes nothing of half of the loss, which runs as plain torch" in line
    assert line.endswith("nothing can be made of it)")
