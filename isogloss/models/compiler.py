"""What torch.compile needs, and which formulas of a loss it makes faster."""

import functools
import os

import torch

from isogloss.job.watch import print_line

# Relative difference between two computations of the same numbers: what one layer too many or too
# few changes is far above it.  Half precision rounds at 0.4 %.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


def missing_compiler():
    """Say what torch.compile lacks on this machine; "": nothing."""
    # seconds of imports, which few runs need
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if torch.cuda.is_available():
        return "" if has_triton() else "there is no triton"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler"
    return ""


@functools.cache
def loss_compiler(backend, device_type):
    """Return what compiles a formula of a loss; None: this machine lacks what it takes.

    A compiled one serves any number of rows; its first call takes seconds, of which most are spared
    once the result is on disk.

    Args:
        backend: a --loss_backend but plain; see `loss_table.compiler_of`.
    Raises:
        ValueError: "compiled", and there is no compiler.
    """
    missing = missing_compiler()
    if not missing:
        def compiled(function):
            if device_type == "cuda":
                _announce()
            from isogloss.models.compiled_formula import CompiledFormula

            return CompiledFormula(function)

        return functools.cache(compiled)
    if backend == "compiled":
        raise ValueError(f"--loss_backend compiled: {missing}; install it, or leave the flag out")
    print_line(f"--loss_backend auto: {missing}, so the loss runs as plain torch")
    return None


@functools.cache
def _announce():
    if int(os.environ.get("RANK", 0)) == 0:
        print_line("the first step compiles the loss, which takes up to a minute, once")
