"""Projections and spelling tables as files: written by atomic rename, checked, cached.

Files hold the fingerprints of both tokenizers and are read with ``torch.load(weights_only=True)``.
"""

import fcntl
import hashlib
import io
import json
import os
import secrets
import sys
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from isogloss.flags.parse import check_output
from isogloss.flags.terminal import one_line
from isogloss.projection_tools.arrays import describe
from isogloss.projection_tools.tokenizers import tokenizer_metadata

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", "~/.cache/isogloss")).expanduser()
# A row's sum may be off by this much: bfloat16 rounds a row of four to a few thousandths.
SUM_TOLERANCE = 1e-2
INTEGERS = torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8
CHECKSUM = "checksum"  # key of a cached file


def as_tables(projection, pair, tool):
    """Return the content of a projection file: arrays, their tokenizers, how they were made.

    The public NeMo-RL tools read such a file too: they look at the two arrays and the model ids.
    """
    indices, likelihoods = projection
    tables = {
        "indices": torch.from_numpy(np.ascontiguousarray(indices)),
        "likelihoods": torch.from_numpy(likelihoods.astype(np.float32)),
        "teacher_vocab": len(pair.tables[1]),
        "tool": tool,
    }
    return tables | tokenizer_metadata(pair)


def save_atomically(tables, path):
    """Write tensors and plain values, as .safetensors or by torch.save.

    The file appears under its name when it is complete, or not at all.

    Raises:
        ValueError: it cannot be written there.
    """
    path = Path(path)
    check_output(path)
    buffer = io.BytesIO()  # torch.save would write a file's name into its content
    if path.suffix == ".safetensors":
        buffer.write(_safetensors(tables))
    else:
        torch.save(tables, buffer)
    # By chance, because processes of two machines may have one number.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(scratch, "xb") as file:  # a new one: it follows no link that waits there
                file.write(buffer.getvalue())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror}); name another file") \
            from None


def _safetensors(tables):
    from safetensors.torch import save

    tensors = {}
    plain = {}
    for key, value in tables.items():
        group = tensors if isinstance(value, torch.Tensor) else plain
        group[key] = value
    # One JSON text, because safetensors does not keep the order of several metadata keys.
    return save(tensors, metadata={"isogloss": json.dumps(plain)})


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


def load_projection(path, pair):
    """Read a projection file and check that it belongs to these two tokenizers.

    Files of the public NeMo-RL tools carry no fingerprints: there only the sizes can be checked.
    Slots and sums that contradict each other are repaired, with a warning, and so is their "scale
    trick", a weight of 0.2 in the last slot of every row that is not exact, on a token that means
    nothing.

    Returns:
        dict: indices (V, K) int64, -1 in unused slots; likelihoods (V, K) float32, and what else it
        holds.
    Raises:
        ValueError: damaged, made for other tokenizers, or of numbers that are no weights or no ids.
    """
    tables = load_tables(path)
    _check_arrays(path, tables)
    _check_tokenizers(path, tables, pair)
    V = len(pair.tables[0])
    indices = tables["indices"][:V].long()  # a file may cover the padding of an lm_head
    likelihoods = tables["likelihoods"][:V].float()
    _check_values(path, indices, likelihoods)
    if tables.get("enable_scale_trick") is True and indices.shape[1] > 1:
        message = f"{path}: made with the scale trick; its last column is left out"
        warnings.warn(message, stacklevel=2)
        nothing = torch.zeros_like(likelihoods[:, :1])
        likelihoods = torch.cat([likelihoods[:, :-1], nothing], 1)
        likelihoods = likelihoods / likelihoods.sum(1, keepdim=True).clamp(min=1e-30)
    indices, likelihoods = _repaired(path, indices, likelihoods)
    return tables | {"indices": indices, "likelihoods": likelihoods}


def _check_arrays(path, tables):
    if not isinstance(tables, dict) or not {"indices", "likelihoods"} <= tables.keys():
        raise ValueError(
            f"{path}: not a projection, which has the keys indices and likelihoods; make one with "
            "python -m projection_tools.build")
    for key in ("indices", "likelihoods"):
        array = tables[key]
        if not isinstance(array, torch.Tensor):
            raise ValueError(
                f"{path}: its {key} are a {type(array).__name__}; expected a tensor; make it again")
        if array.layout != torch.strided or array.is_meta or array.is_quantized:
            raise ValueError(
                f"{path}: its {key} are a tensor without plain values ({array.layout}, on "
                f"{array.device}, {array.dtype}); expected a dense one; make it again")
    indices = tables["indices"]
    likelihoods = tables["likelihoods"]
    same_shape = indices.shape == likelihoods.shape and indices.ndim == 2 and indices.numel() > 0
    if not same_shape or indices.dtype not in INTEGERS or likelihoods.is_complex():
        raise ValueError(
            f"{path}: indices {list(indices.shape)} {indices.dtype} and likelihoods "
            f"{list(likelihoods.shape)} {likelihoods.dtype}; expected two (V, K), the first of "
            "int64, the second of float32; make it again")


def _check_values(path, indices, likelihoods):
    """Raise ValueError where the numbers of a projection mean nothing."""
    invalid = int((~likelihoods.isfinite() | (likelihoods < 0)).sum())
    if invalid:
        raise ValueError(
            f"{path}: {invalid} of {likelihoods.numel()} weights are negative or not finite; "
            "make it again")
    if not likelihoods.sum(1).isfinite().all():
        raise ValueError(f"{path}: the weights of a row have no finite sum; make it again")
    if (indices < -1).any():
        raise ValueError(
            f"{path}: teacher ids down to {int(indices.min())}; expected -1, an unused slot, or "
            "more; make it again")
    if len(indices) and not ((indices >= 0) & (likelihoods > 0)).any():
        raise ValueError(f"{path}: no row has a teacher token with a weight above 0; make it again")


def _check_tokenizers(path, tables, pair):
    for name, expected in tokenizer_metadata(pair).items():
        role, _, key = name.partition("_")
        actual = tables.get(name)
        # The model id is no reason to reject a file: one tokenizer goes by many names.
        if key != "model_id" and actual not in (None, expected):
            raise ValueError(
                f"{path}: made for another {role} tokenizer ({key} {actual}, this one has "
                f"{expected}); build it again for this pair")
    indices = tables["indices"]
    V, W = map(len, pair.tables)
    if len(indices) < V or (V and int(indices[:V].max()) >= W):
        raise ValueError(
            f"{path}: {len(indices)} rows with teacher ids up to {int(indices.max())}, but the "
            f"tokenizers have {V} student and {W} teacher ids; build it again for this pair")


def _repaired(path, indices, likelihoods):
    """Return arrays with -1 and 0 in unused slots and rows that sum to 1 or 0.

    What had to be repaired is counted in a warning.
    """
    repairs = []
    stray = (indices < 0) & (likelihoods != 0)
    if stray.any():
        repairs.append(f"{int(stray.sum())} unused slots have a weight")
    likelihoods = torch.where(stray, 0.0, likelihoods)

    # A file without the -1 fills its unused slots with any id.
    unused = (indices < 0) | (likelihoods == 0)
    indices = torch.where(unused, -1, indices)
    if (likelihoods[:, 1:] > likelihoods[:, :-1]).any():  # other tools do not promise an order
        order = likelihoods.argsort(dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
        likelihoods = likelihoods.gather(1, order)

    sums = likelihoods.sum(1)
    off = (sums > 0) & ((sums - 1).abs() > SUM_TOLERANCE)
    if off.any():
        repairs.append(f"{int(off.sum())} rows do not sum to 1")
    if repairs:
        warnings.warn(f"{path}: {', '.join(repairs)}; repaired", stacklevel=3)
    normalized = likelihoods / sums.clamp(min=1e-30)[:, None]
    return indices, torch.where(sums[:, None] > 0, normalized, 0.0)


def load_arrays(path, pair):
    """Return (indices, likelihoods) of a projection file, as arrays to work on."""
    tables = load_projection(path, pair)
    return tables["indices"].numpy(), tables["likelihoods"].double().numpy()


def finish(projection, pair, args, *notes):
    """Write what a tool made to ``args.output``, and print one line of facts.

    Args:
        projection: (indices, likelihoods).
        args: the tool's Args; its flags are recorded in the file.
        notes: what else to print.
    """
    # By file, because the module is called __main__ when it runs as a program.
    name = Path(sys.modules[type(args).__module__].__file__).stem
    words = [f"isogloss projection_tools.{name}"]
    for key, value in vars(args).items():
        # The models have keys of their own, and equal content should not differ by its file's name.
        if value not in ("", False) and key not in ("student", "teacher", "output"):
            words.append(f"--{key.replace('_', '-')} {value}")
    save_atomically(as_tables(projection, pair, " ".join(words)), args.output)
    print(f"{one_line(args.output)}: {describe(projection[0])}", *notes, sep="; ")


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
