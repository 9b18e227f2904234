"""Run the programs of lm-evaluation-harness' code tasks in the sandbox.

Its humaneval_plus and mbpp_plus load `code_eval` of the package evaluate, which would run what a
model wrote inside of this job.  A CodeJudge takes its place while such a task is loaded.  Prompts,
stops, test programs and k of pass@k are the harness'; an answer has 10 CPU seconds in place of 3
of a wall clock, so that verdicts do not depend on what else the machine does.

A program passes if it and its tests run to their end.  One that leaves early fails; the box guards
the job, and not the verdict against a program that searches its interpreter for it.

Tests: tests/test_code_tasks.py.
"""

import math
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

from isogloss.evaluation import sandbox
from isogloss.evaluation.task_model import GaveUp

# As harness.NAMES.
CODE_NAMES = {
    "humaneval_plus": ("humaneval_plus", "humaneval", "evalplus/humanevalplus"),
    "mbpp_plus": ("mbpp_plus", "mbpp", "evalplus/mbppplus"),
}
SECONDS = 10  # of CPU time
MEMORY_MIB = 4096
OUTPUT_MIB = 64
MOST_WORKERS = 8

# Reads a program from stdin.  The box has no numpy, of which the tests need one function.
RUNNER = """
import sys, types

def allclose(out, expected, rtol=1e-7, atol=0):
    if isinstance(expected, (list, tuple)):
        return len(out) == len(expected) and all(
            allclose(a, b, rtol, atol) for a, b in zip(out, expected))
    return out == expected or abs(out - expected) <= atol + rtol * abs(expected)

def assert_allclose(out, expected, rtol=1e-7, atol=0):
    assert allclose(out, expected, rtol, atol)

numpy = types.ModuleType("numpy")
numpy.allclose = allclose
numpy.testing = types.SimpleNamespace(assert_allclose=assert_allclose)
sys.modules["numpy"] = numpy
exec(compile(sys.stdin.read(), "answer.py", "exec"), {"__name__": "answer"})
"""


def passes(program, unsafe=False):
    """Tell whether a program runs to its end in the sandbox."""
    end = secrets.token_hex(16)
    result = sandbox.run(f"{RUNNER}\nprint({end!r})", program, SECONDS, MEMORY_MIB,
                         output_mib=OUTPUT_MIB, unsafe=unsafe)
    return result.status == "ok" and end in result.stdout


class CodeJudge:
    """Stand for `code_eval`: collect programs, and tell pass@k of those that were run.

    Attributes:
        unsafe: run programs without a sandbox.
        asked: texts of programs with their tests, in order.
        passed: {text: whether it passes}; what was not run does not.
    """

    def __init__(self, unsafe):
        self.unsafe = unsafe
        self.asked = []
        self.passed = {}

    def compute(self, references, predictions, k):
        """Return ({"pass@k": mean over items},), as `code_eval` does.

        Args:
            references: text of the tests of each item.
            predictions: texts of programs for each item.
            k: numbers of draws.
        """
        means = dict.fromkeys((f"pass@{draws}" for draws in k), 0.0)
        for tests, programs in zip(references, predictions, strict=True):
            texts = [f"{program}\n{tests}" for program in programs]
            self.asked += texts
            num_right = sum(self.passed.get(text, False) for text in texts)
            for draws in k:
                means[f"pass@{draws}"] += pass_at(draws, len(texts), num_right) / len(references)
        return (means,)

    def run(self, stop, programs):
        """Return whether each program passes; several run at a time.

        Args:
            stop: () -> give up, by a GaveUp.
        """

        def outcome(program):
            if stop():
                raise GaveUp
            return passes(program, self.unsafe)

        # torchrun's name, then DeepSpeed's
        ranks_of_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1
        workers = min(max((os.cpu_count() or 1) // int(ranks_of_node), 1), MOST_WORKERS)
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(outcome, programs))


@contextmanager
def judged_by(judge):
    """Let tasks that are loaded in this block find a CodeJudge in place of `code_eval`."""
    modules = {"evaluate": SimpleNamespace(load=lambda name: judge)}
    for _, folder, _ in CODE_NAMES.values():  # which would keep what they had loaded before
        modules[f"lm_eval.tasks.{folder}.utils"] = None
    before = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules["evaluate"] = modules["evaluate"]
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def prepare_task(name, task, options):
    """Let a code task of the harness have as many answers as the options say.

    Args:
        name: key of CODE_NAMES.
        task: of the harness.
        options: TaskOptions.
    """
    task.set_config(key="repeats", value=options.samples)
    if options.temperature:
        draws = {"do_sample": True, "temperature": options.temperature}
        task.set_config(key="generation_kwargs", value=draws, update=True)
    if name == "humaneval_plus":
        task._metric_fn_kwargs["pass_at_k"]["k"] = ks_of(options.samples)
    else:  # the harness would judge the first answer alone
        from lm_eval.filters import build_filter_ensemble

        steps = [["take_first_k", {"k": options.samples}]]
        task._filters = [build_filter_ensemble("none", steps)]


def check_sandbox(name, unsafe):
    """Raise a ValueError where programs cannot be run in a sandbox and may not without one."""
    reason = None if unsafe else sandbox.why_unavailable()
    if reason:
        raise ValueError(f"{name} runs what the model writes: {reason}; or allow it to do all that "
                         "you can, with allow_unsafe_code")


def pass_at(k, num_answers, num_right):
    """Return the chance that some of k answers drawn from those that were written is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k of Chen et al. 2021
    (arXiv 2107.03374).
    """
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def ks_of(samples):
    """Return the k of pass@k that are told of so many answers to an item: 1, 10, 100 and all."""
    return sorted({1, samples} | {k for k in (10, 100) if k <= samples})
