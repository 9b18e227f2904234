"""Tables as files: read with ``torch.load(weights_only=True)``, built once a machine."""

import fcntl
import hashlib
import json
import os
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", "~/.cache/isogloss")).expanduser()
CHECKSUM = "checksum"  # key of a cached file
VERSION = 5  # of the tables of `cached_translation`; raise it when these change for a pair


def load_tables(path):
    """Read a file of tensors and plain values, as a dict.

    Raises:
        ValueError: missing or unreadable.
    """
    path = Path(path)
    if not os.path.isfile(path):  # pathlib raises for a folder that must not be read
        raise ValueError(f"{path}: no such file; make it with python -m projection_tools.build")
    try:
        if path.suffix == ".safetensors":
            return _load_safetensors(path)
        if zipfile.is_zipfile(path):  # torch packs nothing, and would unpack a bomb
            with zipfile.ZipFile(path) as file:
                size = sum(entry.file_size for entry in file.infolist())
            if size > os.path.getsize(path):
                raise ValueError("packed")
        with warnings.catch_warnings(action="ignore"):  # about pickles that torch did not write
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises half a dozen types for a damaged file
        reason = type(error).__name__
        raise ValueError(f"{path}: not a readable file of tables ({reason}); make it again") \
            from None


def _load_safetensors(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tables = json.loads(metadata.get("isogloss", "{}"))
        for key in file.keys():  # the file itself cannot be iterated
            tables[key] = file.get_tensor(key)
    return tables


def cached(name, build, directory=None):
    """Call ``build()`` once per machine: later calls, ranks and jobs read its result from a file.

    A file whose content is not what was written, value for value, is built anew.

    Args:
        name: file name, made of everything that the result depends on.
        build: () -> dict of tensors and plain values.
        directory: None: `CACHE`.
    Returns:
        dict, as it was read from the file.
    Raises:
        ValueError: the directory cannot be used.
    """
    directory = Path(directory or CACHE)
    path = directory / name
    with _locked(directory / f".{name}.lock"):
        try:
            return _load_checked(path)
        except ValueError:  # absent, or damaged: build it anew
            from isogloss.projection_tools.save import save_atomically

            tables = build()
            save_atomically(tables | {CHECKSUM: _checksum(tables, name)}, path)
    return _load_checked(path)


@contextmanager
def _locked(path):
    """Hold a lock file, which is made where it is absent; others wait."""
    try:
        # Of the user alone, because what it holds decides what a run learns.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not through a link, which could make this process touch another file of its user.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be opened ({error.strerror}); set ISOGLOSS_CACHE to a directory of "
            "your own") from None
    try:
        # Ranks that come second wait here.  The system releases the lock of a process that dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _load_checked(path):
    tables = load_tables(path)
    try:
        checksum = tables.pop(CHECKSUM)
        is_whole = checksum == _checksum(tables, path.name)
    except Exception:  # whatever a file may hold in place of a dict of tensors
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path}: not what was written there; remove it")
    return tables


def _checksum(tables, name):
    """Return a hex digest of tensors and plain values, and of the name that they are kept under."""
    digest = hashlib.sha256(name.encode())
    for key, value in sorted(tables.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{key} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().numpy().reshape(-1).view(np.uint8))
        else:
            digest.update(f"{key} {value!r}".encode())
    return digest.hexdigest()


def cached_translation(pair, directory=None):
    """Return the tables of `build_translation`, kept on disk under the digest of the pair."""
    def build():
        from isogloss.projection_tools.cells import build_translation

        return build_translation(pair)

    name = f"translation-{VERSION}-{pair.digest}.pt"
    return cached(name, build, directory)
