"""Triton's interpreter on a CPU: what tests of kernels for a GPU share.

conftest.py asks for the interpreter.  Nothing here shows speed, or what a GPU computes.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from conftest import ROOT
from isogloss import losses

tl = pytest.importorskip("triton.language", reason="triton is not installed")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Give the kernels CPU tensors, which Triton interprets."""
    monkeypatch.setattr(losses, "TRITON_DEVICES", ("cpu",))


@pytest.fixture
def rounding(monkeypatch):
    """Round float32 to the nearest bfloat16, as a GPU does; the interpreter cuts digits off."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder

    def create_fp_trunc(self, source, kind):
        if kind.scalar != tl.bfloat16:
            return self.cast_impl(source, kind)
        rounded = torch.from_numpy(source.data.copy()).bfloat16()
        bits = rounded.view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(bits, kind.scalar)

    monkeypatch.setattr(builder, "create_fp_trunc", create_fp_trunc)


def drawn(shape, seed, spread=3.0):
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(ours, exact, precision=2e-6):
    """Compare with float64, relative to the largest there is."""
    ours = torch.as_tensor(ours).double()
    exact = torch.as_tensor(exact).double()
    error = (ours - exact).norm()
    assert error <= precision * (1 + exact.norm()), (ours, exact)


# --- what a GPU would launch, read and write ---------------------------------


@pytest.fixture
def traffic(monkeypatch):
    """Count what kernels load and store: {(kernel, "load" or "store", kind): numbers}."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    executor = interpreter.GridExecutor
    builder = interpreter.InterpreterBuilder
    counts = Counter()
    running = []

    def count(access, pointers, mask):
        kind = str(pointers.get_element_ty())
        counts[running[-1], access, kind] += int(mask.data.sum())

    def run(call):
        def counted(self, *arguments, **constants):
            running.append(self.fn.__name__.strip("_").removesuffix("_kernel"))
            counts[running[-1], "launch", ""] += 1
            return call(self, *arguments, **constants)
        return counted

    def load(call):
        def counted(self, pointers, mask, *others):
            count("load", pointers, mask)
            return call(self, pointers, mask, *others)
        return counted

    def store(call):
        def counted(self, pointers, value, mask, *others):
            count("store", pointers, mask)
            return call(self, pointers, value, mask, *others)
        return counted

    for kind, name, wrap in ((executor, "__call__", run), (builder, "create_masked_load", load),
                             (builder, "create_masked_store", store)):
        monkeypatch.setattr(kind, name, wrap(getattr(kind, name)))
    return counts


def launches(counts):
    return {kernel: n for (kernel, access, _), n in counts.items() if access == "launch"}


# --- compiled ahead of time ---------------------------------------------------

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import importlib
import sys

CONSTANTS = dict(HAS_TEACHER=True, HAS_LABELS=True, BLOCK=4096, SLICE=512, HAS_KEPT=True,
                 HAS_MASS=True, HAS_ADDED=True)
INTEGERS = "N", "V", "W", "K", "A", "B", "most"

def kind_of(name):
    if name in CONSTANTS or name in ("KIND", "REVERSE"):
        return "constexpr"
    if name in ("x_ptr", "y_ptr", "d_ptr"):
        return "*bf16"
    if name.startswith("is_"):
        return "*u8"
    if name.startswith(("label_", "teacher_row", "row_", "start_S", "start_T", "chunk_", "common_",
                        "other_", "kept_")):
        return "*i64"
    if name.startswith(("slot", "root_", "ids", "teacher_ids", "base", "width", "long_", "token_",
                        "column_", "start_")):
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    is_integer = name in INTEGERS or name.startswith("num_") or name.endswith("stride")
    return "i32" if is_integer else "fp32"

result = {}
module, kernels = json.loads(sys.argv[1])
module = importlib.import_module(module)
for name, kinds in kernels.items():
    kernel = getattr(module, f"_{name}_kernel")
    for kind in kinds:
        signature = {argument: kind_of(argument) for argument in kernel.arg_names}
        constants = {"KIND": kind, "REVERSE": bool(kind)} | CONSTANTS
        constants = {key: constants[key] for key in constants if key in signature}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        target = GPUTarget("cuda", 90, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": 8})
        result[f"{name} {kind}"] = compiled.asm["ptx"]
print(json.dumps(result))
"""


def compiled(tmp_path, module, kernels):
    """Compile kernels for sm_90; return {kernel and kind: PTX}.

    In a process of its own, because this one interprets; ptxas comes with triton.

    Args:
        kernels: {name: its values of KIND, or of REVERSE}.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "compile_kernels.py"  # Triton reads the source of what it compiles
    script.write_text(COMPILE)
    command = [sys.executable, script, json.dumps([module, kernels])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])
