"""Projections as files: they hold the fingerprints of both tokenizers, and are checked."""

import warnings
from dataclasses import fields

import numpy as np
import torch

from isogloss.flags.terminal import one_line
from isogloss.projection_tools.arrays import describe
from isogloss.projection_tools.files import load_tables
from isogloss.projection_tools.save import save_atomically, tokenizer_metadata

# A row's sum may be off by this much: bfloat16 rounds a row of four to a few thousandths.
SUM_TOLERANCE = 1e-2
INTEGERS = torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8


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
    likelihoods = tables["likelihoods"][:V].detach().float()  # of a loop, it may be a Parameter
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
    name = type(args).__name__.removesuffix("Args").lower()
    words = [f"isogloss projection_tools.{name}"]
    for key in [field.name for field in fields(args)]:
        value = getattr(args, key)
        # The models have keys of their own, and equal content should not differ by its file's name.
        if value not in ("", False) and key not in ("student", "teacher", "output"):
            words.append(f"--{key.replace('_', '-')} {value}")
    save_atomically(as_tables(projection, pair, " ".join(words)), args.output)
    print(f"{one_line(args.output)}: {describe(projection[0])}", *notes, sep="; ")
