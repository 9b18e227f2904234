"""Maps between a student's and a teacher's vocabulary: build, refine, inspect.

Everything here is sparse and explained by bytes: a weight or a spelling exists because the bytes of two
tokens say so.  Files are written by atomic rename, hold the fingerprints of both tokenizers, and are read
with ``torch.load(weights_only=True)``.  Shapes: V student vocabulary, W teacher vocabulary, P pieces, K
kept entries.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path

import torch

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", Path.home() / ".cache" / "isogloss"))


def fingerprint(tokenizer):
    """Hex digest of all that decides how a fast tokenizer cuts text (vocabulary, merges, normaliser, ...)."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec.pop("truncation", None), spec.pop("padding", None)  # runtime state, not identity
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:32]


def save_atomically(tables, path):
    """torch.save that never leaves half a file under the final name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(tables, scratch)
    os.replace(scratch, path)


def load_tables(path):
    """A file of tensors and plain metadata.

    Raises:
        ValueError: missing or unreadable.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; make it with python -m projection_tools.build")
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises half a dozen types for a damaged file
        reason = type(error).__name__
        raise ValueError(f"{path}: not a readable file of tables ({reason}); make it again") from None


def cached(name, build, directory=None):
    """``build()`` once per machine: later calls, other ranks and other jobs read the file instead.

    Args:
        name: file name, made of everything that the result depends on.
        build: () -> dict of tensors and plain values.
    """
    directory = Path(directory or CACHE)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    with open(directory / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that come second wait here; released on close, or by death
        try:
            return load_tables(path)
        except ValueError:  # absent, or damaged: build anew
            save_atomically(build(), path)
    return load_tables(path)
