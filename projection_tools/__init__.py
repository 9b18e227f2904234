"""Maps between a student's and a teacher's vocabulary: build, refine, inspect.

Everything here is sparse and explained by bytes: a weight or a spelling exists because the bytes of two
tokens say so (apart from the similarity of embeddings, which `generate` adds).  Files are written by atomic
rename, hold the fingerprints of both tokenizers, and are read with ``torch.load(weights_only=True)``.

Shapes: V student vocabulary, W teacher vocabulary, P pieces, K kept entries.  A projection is a pair
(indices_VK, likelihoods_VK) of int64 and float64 arrays, -1 and 0 in unused slots, rows sorted by weight.
"""

import fcntl
import hashlib
import io
import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from align import TokenTable

ROLES = "eos", "end_of_turn", "bos", "pad", "unk"  # the first one counts where one token plays several
CACHE = Path(os.environ.get("ISOGLOSS_CACHE", Path.home() / ".cache" / "isogloss"))


def fingerprint(tokenizer):
    """Hex digest of all that decides how a fast tokenizer cuts text (vocabulary, merges, normalizer, ...)."""
    spec = tokenizer.backend_tokenizer.to_str()
    spec = spec[spec.index('"added_tokens"') :]  # before it: truncation and padding, which is no identity
    return hashlib.sha256(spec.encode()).hexdigest()[:32]


def all_bytes(table):
    """The bytes of every token of a TokenTable, as a list."""
    raw, starts = table.data.tobytes(), table.starts.tolist()
    return [raw[a:b] for a, b in zip(starts, starts[1:])]


# --- rows -----------------------------------------------------------------------------------------


def pack(rows, columns, weights, V, top_k):
    """Projection from its entries: sorted, the `top_k` heaviest of each row, normalized.

    Args:
        rows, columns, weights: (N,) entries; of equal weights the earlier one comes first.  An entry may
            occur twice, as '1' in '11' -> '1', '1': then it has two slots, so one slot means one token.
        V: rows.
    Returns:
        (indices, likelihoods): (V, top_k) int64, -1 in unused slots, and float64; rows sum to 1 or to 0.
    """
    rows, columns, weights = np.asarray(rows), np.asarray(columns), np.asarray(weights, np.float64)
    order = np.lexsort((-weights, rows))
    rows, columns, weights = rows[order], columns[order], weights[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = (rank < top_k) & (weights > 0)
    indices, likelihoods = np.full((V, top_k), -1, np.int64), np.zeros((V, top_k))
    indices[rows[kept], rank[kept]] = columns[kept]
    likelihoods[rows[kept], rank[kept]] = weights[kept]
    return indices, likelihoods / np.maximum(likelihoods.sum(1, keepdims=True), 1e-300)


def entries(indices, likelihoods):
    """(rows, columns, weights) of a projection, in reading order."""
    rows, slots = np.nonzero(indices >= 0)
    return rows, indices[rows, slots], likelihoods[rows, slots]


def widen(projection, K):
    """The same projection in K slots or more."""
    indices, likelihoods = projection
    more = ((0, 0), (0, max(0, K - indices.shape[1])))
    return np.pad(indices, more, constant_values=-1), np.pad(likelihoods, more)


def fill_empty(projection, other):
    """The rows of a projection, those of another one where it has none."""
    K = max(projection[0].shape[1], other[0].shape[1])
    (indices, likelihoods), other = widen(projection, K), widen(other, K)
    empty = (indices[:, :1] < 0).repeat(K, 1)
    return np.where(empty, other[0], indices), np.where(empty, other[1], likelihoods)


# --- files ----------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A student's and a teacher's tokenizer, with what is known of them.

    Attributes:
        names: hub ids or directories.
        tokenizers, tables: the fast tokenizers and their TokenTables.
        prints: their fingerprints.
        roles: which id is the eos, bos, ... of each, as text; a tokenizer.json does not say that.
    """

    names: tuple
    tokenizers: tuple
    tables: tuple
    prints: tuple

    @property
    def roles(self):
        return tuple(", ".join(f"{role} {getattr(table, role)}" for role in ROLES) for table in self.tables)

    @property
    def digest(self):
        """For the names of what is cached: everything that tables of the pair depend on."""
        roles = hashlib.sha256(repr(self.roles).encode()).hexdigest()[:8]
        return f"{self.prints[0][:16]}-{self.prints[1][:16]}-{roles}"

    @classmethod
    def of(cls, student_tokenizer, teacher_tokenizer, names=("", ""), tables=None):
        both = student_tokenizer, teacher_tokenizer
        tables = tables or tuple(map(TokenTable.from_tokenizer, both))
        return cls(tuple(names), both, tables, tuple(map(fingerprint, both)))

    @classmethod
    def load(cls, student_model, teacher_model):
        """The tokenizers of two hub ids or directories.

        Raises:
            ValueError: one of them cannot be loaded.
        """
        from transformers import AutoTokenizer  # seconds to import, so only for the command line

        found = []
        for role, name in (("student", student_model), ("teacher", teacher_model)):
            try:
                found.append(AutoTokenizer.from_pretrained(name))
            except (OSError, ValueError, KeyError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(f"--{role}-model {name}: no tokenizer there ({reason})") from None
        return cls.of(*found, (student_model, teacher_model))


def as_tables(projection, pair, tool):
    """What a projection file holds: the arrays, whose they are, and how they were made.

    The public NeMo-RL tools read such a file too: they look at the two arrays and the model ids.
    """
    indices, likelihoods = projection
    return {"indices": torch.from_numpy(np.ascontiguousarray(indices)),
            "likelihoods": torch.from_numpy(likelihoods.astype(np.float32)),
            "teacher_vocab": len(pair.tables[1]), "tool": tool} | tokenizer_metadata(pair)


def tokenizer_metadata(pair):
    """What a file of tables says of the tokenizers that it belongs to."""
    return {f"{role}_{key}": value
            for key, values in (("fingerprint", pair.prints), ("roles", pair.roles), ("model_id", pair.names))
            for role, value in zip(("student", "teacher"), values)}


def save_atomically(tables, path):
    """Write tensors and plain values, as .safetensors or by torch.save; never half a file under the name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        tensors = {key: value for key, value in tables.items() if isinstance(value, torch.Tensor)}
        plain = {key: value for key, value in tables.items() if key not in tensors}
        save_file(tensors, scratch, metadata={"isogloss": json.dumps(plain)})  # several have no order
    else:
        buffer = io.BytesIO()  # a file's name would get into its bytes
        torch.save(tables, buffer)
        scratch.write_bytes(buffer.getvalue())
    os.replace(scratch, path)


def load_tables(path):
    """A file of tensors and plain values.

    Raises:
        ValueError: missing or unreadable.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; make it with python -m projection_tools.build")
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                tables = json.loads((file.metadata() or {}).get("isogloss", "{}"))
                return tables | {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises half a dozen types for a damaged file
        reason = type(error).__name__
        raise ValueError(f"{path}: not a readable file of tables ({reason}); make it again") from None


def load_projection(path, pair):
    """Read a projection file and check that it belongs to these two tokenizers.

    Files of the public NeMo-RL tools carry no fingerprints: there only the sizes can be checked.  Slots and
    sums that contradict each other are mended, with a warning, and so is their "scale trick", a weight of 0.2
    in the last slot of every row that is not exact, on a token that means nothing.

    Returns:
        dict: indices (V, K) int64, -1 in unused slots; likelihoods (V, K) float32, and what else it holds.
    Raises:
        ValueError: damaged, or made for other tokenizers.
    """
    tables = load_tables(path)
    if not isinstance(tables, dict) or not {"indices", "likelihoods"} <= tables.keys():
        raise ValueError(f"{path}: no projection (keys indices, likelihoods); use projection_tools.build")
    indices, likelihoods = tables["indices"], tables["likelihoods"]
    if indices.shape != likelihoods.shape or indices.ndim != 2 or indices.is_floating_point():
        raise ValueError(f"{path}: indices {list(indices.shape)} {indices.dtype} and likelihoods "
                         f"{list(likelihoods.shape)}; expected two (V, K), the former int64; make it again")
    for key, expected in tokenizer_metadata(pair).items():
        role, _, key = key.partition("_")
        found = tables.get(f"{role}_{key}")
        if key != "model_id" and found not in (None, expected):
            raise ValueError(f"{path}: made for another {role} tokenizer ({key} {found}, this one has "
                             f"{expected}); build it again for this pair")
    V, W = map(len, pair.tables)
    if len(indices) < V or (V and int(indices[:V].max()) >= W):
        raise ValueError(f"{path}: {len(indices)} rows with teacher ids up to {int(indices.max())}, but "
                         f"the tokenizers have {V} student and {W} teacher ids; build it again")
    indices, likelihoods = indices[:V].long(), likelihoods[:V].float()
    if tables.get("enable_scale_trick") and indices.shape[1] > 1:
        warnings.warn(f"{path}: made with the scale trick; its last column is left out", stacklevel=2)
        likelihoods = torch.cat([likelihoods[:, :-1], torch.zeros_like(likelihoods[:, :1])], 1)
        likelihoods = likelihoods / likelihoods.sum(1, keepdim=True).clamp(min=1e-30)
    indices, likelihoods = _consistent(path, indices, likelihoods)
    return tables | {"indices": indices, "likelihoods": likelihoods}


def _consistent(path, indices, likelihoods):
    """Unused slots are -1 and weigh 0, rows sum to 1 or 0; what is not so is mended and told."""
    wrong = []
    bad = ~likelihoods.isfinite() | (likelihoods < 0)
    stray = (indices < 0) & (likelihoods != 0)
    for slots, what in ((bad, "weights are negative or not finite"), (stray, "unused slots have a weight")):
        if slots.any():
            wrong.append(f"{int(slots.sum())} {what}")
            likelihoods = torch.where(slots, 0.0, likelihoods)
    idle = (indices >= 0) & (likelihoods == 0)  # a file without sentinels fills its slots with any id
    indices = torch.where(idle | (indices < 0), -1, indices)
    if (likelihoods[:, 1:] > likelihoods[:, :-1]).any():  # an order is no promise of other tools
        order = likelihoods.argsort(dim=1, descending=True, stable=True)
        indices, likelihoods = indices.gather(1, order), likelihoods.gather(1, order)
    sums = likelihoods.sum(1)
    off = (sums > 0) & ((sums - 1).abs() > 1e-2)  # bfloat16 rounds a row of four to a few thousandths
    if off.any():
        wrong.append(f"{int(off.sum())} rows do not sum to 1")
    if wrong:
        warnings.warn(f"{path}: {', '.join(wrong)}; mended", stacklevel=3)
    return indices, torch.where(sums[:, None] > 0, likelihoods / sums.clamp(min=1e-30)[:, None], 0.0)


def load_arrays(path, pair):
    """(indices, likelihoods) of a projection file, as arrays to work on."""
    tables = load_projection(path, pair)
    return tables["indices"].numpy(), tables["likelihoods"].double().numpy()


def describe(indices):
    """One line of facts about a projection."""
    used = (np.asarray(indices) >= 0).sum(1)
    return f"{len(used)} rows: {(used == 1).sum()} of one teacher token, {(used > 1).sum()} of several, " \
           f"{(used == 0).sum()} empty"


def finish(projection, pair, args, *notes):
    """Write what a tool made, and print one line of facts."""
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in vars(args).items()
             if value not in ("", False) and key not in ("student_model", "teacher_model", "output")]
    name = Path(sys.modules[type(args).__module__].__file__).stem
    tables = as_tables(projection, pair, " ".join([f"isogloss projection_tools.{name}", *flags]))
    save_atomically(tables, args.output)
    print(f"{args.output}: {describe(projection[0])}", *notes, sep="; ")


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
