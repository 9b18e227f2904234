"""Call what torch.compile makes of a formula of a loss, or the formula itself.

Tests: tests/test_fused.py, tests/test_compiler.py.
"""

import torch

from isogloss.job.watch import print_line


def first_line(error):
    """Return the first line of what an exception says; of a compiler's its cause."""
    lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


class CompiledFormula:
    """Call what torch.compile makes of a formula; with a line itself, where that fails.

    Attributes:
        formula: the function; compiled: None where it failed.
    """

    def __init__(self, formula):
        self.formula = formula
        self.compiled = torch.compile(formula, dynamic=True)

    def __call__(self, *args, **options):
        if self.compiled is None:
            return self.formula(*args, **options)
        try:
            return self.compiled(*args, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.compiled = None
            print_line(f"torch.compile makes nothing of {self.formula.__name__} of the loss, which "
                       f"runs as plain torch ({type(error).__name__}: {first_line(error)})")
            return self.formula(*args, **options)
