"""Forked ranks are as processes of their own would be."""

import json
import multiprocessing
import random
import resource
import signal
import subprocess
import sys
import types
import warnings

import pytest

import ranks
from conftest import ROOT, SLOW

LIBRARIES = "torch", "numpy", "deepspeed", "transformers", "datasets", "peft", "tokenizers"


def kind_of(value):
    """Return what stands for a switch or a function, which a module may replace; None: neither."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return None


def attributes():
    """Return {name: kind} of the switches and functions of all imported libraries' modules."""
    kinds = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in LIBRARIES:
                continue
            for key, value in list(vars(module).items()):
                kinds[f"{name}.{key}"] = kind_of(value)
                if type(value) is type and value.__module__ == name:
                    for inner, attribute in list(vars(value).items()):
                        kinds[f"{name}.{key}.{inner}"] = kind_of(attribute)
    return {name: kind for name, kind in kinds.items() if kind}


def state_of_process():
    """Return {name: text} of what this process does by itself, and its random numbers."""
    import numpy as np
    import torch

    from isogloss import distill  # noqa: F401

    state = attributes() | {
        "numpy's errors": np.geterr(), "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(), "recursion": sys.getrecursionlimit(),
        "float32": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE), "hook": sys.excepthook.__name__,
        "warnings": sorted(map(str, warnings.filters))}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        state[f"signal {number}"] = getattr(handler, "__name__", handler)
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return {name: str(value) for name, value in state.items()}, numbers


def test_what_is_slow_is_there():
    lines = [line for line in SLOW.read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        file, _, function = line.partition(" ")[0].partition("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(), line
    assert lines == sorted(lines, key=lambda line: line.partition("::")[0])


@pytest.mark.slow
def test_a_forked_rank_is_as_a_fresh_process():
    """An import may switch checks off for its process: what forked ranks pass, a user's may not."""
    code = ("import json, test_workers_of_tests as test; "
            "print(json.dumps(test.state_of_process()[0]))")
    fresh = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    (first, numbers), (_, others) = ranks.run(2, state_of_process)
    assert len(fresh) > 10_000
    # "_registered" says that something was imported, and switches nothing
    differing = {name: (value, first[name]) for name, value in fresh.items()
                 if name in first and first[name] != value and not name.endswith("_registered")}
    assert not differing
    assert not set(numbers) & set(others)  # what no seed has set differs by rank
