"""Maps between a student's and a teacher's vocabulary: build, refine, inspect.

Everything here is sparse and explained by bytes: a weight or a spelling exists because the bytes
of two tokens say so (apart from the similarity of embeddings, which `generate` adds).  Files are
written by atomic rename, hold the fingerprints of both tokenizers, and are read with
``torch.load(weights_only=True)``.

Shapes: V student vocabulary, W teacher vocabulary, P pieces, K kept entries.  A projection is a
pair (indices_VK, likelihoods_VK) of int64 and float64 arrays, -1 and 0 in unused slots, rows sorted
by weight.
"""

import fcntl
import hashlib
import io
import json
import os
import secrets
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from align import TokenTable, fingerprint
from projection_tools.model_names import read_model_name
from spelling import ROLES

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", "~/.cache/isogloss")).expanduser()

# A row's sum may be off by this much: bfloat16 rounds a row of four to a few thousandths.
SUM_TOLERANCE = 1e-2
INTEGERS = torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8
CHECKSUM = "checksum"  # key of a cached file


# --- projections as arrays ------------------------------------------------------------------------


def pack(rows, columns, weights, V, top_k):
    """Return a projection of the `top_k` heaviest entries of each row, sorted and normalized.

    Args:
        rows, columns, weights: (N,) entries; of equal weights the earlier one comes first.  An
            entry may occur twice, as '1' in '11' -> '1', '1': then it has two slots, so one slot
            means one token.
        V: rows.
        top_k: slots of a row.
    Returns:
        (indices, likelihoods): (V, top_k) int64, -1 in unused slots, and float64; rows sum to 1 or
        to 0.
    """
    rows = np.asarray(rows)
    columns = np.asarray(columns)
    weights = np.asarray(weights, np.float64)
    order = np.lexsort((-weights, rows))  # by row, then by falling weight; stable
    rows = rows[order]
    columns = columns[order]
    weights = weights[order]

    # An entry's slot is its distance from the first entry of its row.
    slots = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = (slots < top_k) & (weights > 0)
    indices = np.full((V, top_k), -1, np.int64)
    indices[rows[kept], slots[kept]] = columns[kept]
    likelihoods = np.zeros((V, top_k))
    likelihoods[rows[kept], slots[kept]] = weights[kept]
    sums = likelihoods.sum(1, keepdims=True)
    return indices, likelihoods / np.maximum(sums, 1e-300)  # an empty row stays 0


def entries(indices, likelihoods):
    """Return (rows, columns, weights) of a projection, in reading order."""
    rows, slots = np.nonzero(indices >= 0)
    return rows, indices[rows, slots], likelihoods[rows, slots]


def widen(projection, K):
    """Return the same projection in K slots or more."""
    indices, likelihoods = projection
    missing = max(0, K - indices.shape[1])
    padding = ((0, 0), (0, missing))  # none above, below or on the left
    return np.pad(indices, padding, constant_values=-1), np.pad(likelihoods, padding)


def fill_empty(projection, other):
    """Return a projection whose empty rows are those of another one."""
    K = max(projection[0].shape[1], other[0].shape[1])
    indices, likelihoods = widen(projection, K)
    other_indices, other_likelihoods = widen(other, K)
    empty = (indices[:, :1] < 0).repeat(K, 1)
    return np.where(empty, other_indices, indices), np.where(empty, other_likelihoods, likelihoods)


# --- the two tokenizers ---------------------------------------------------------------------------


@dataclass
class Pair:
    """A student's and a teacher's tokenizer, with what is known of them; the student's comes first.

    Attributes:
        names: hub ids or directories.
        tokenizers, tables: the fast tokenizers and their TokenTables.
        fingerprints: digests of the tokenizers.
        roles: which id is the eos, bos, ... of each, as text; a tokenizer.json does not say that.
    """

    names: tuple
    tokenizers: tuple
    tables: tuple
    fingerprints: tuple

    @property
    def roles(self):
        return tuple(_roles(table) for table in self.tables)

    @property
    def digest(self):
        """The digest of all that tables of the pair depend on, for the names of cached files."""
        roles = hashlib.sha256(repr(self.roles).encode()).hexdigest()[:8]
        return f"{self.fingerprints[0][:16]}-{self.fingerprints[1][:16]}-{roles}"

    @classmethod
    def of(cls, student_tokenizer, teacher_tokenizer, names=("", ""), tables=None):
        """Return the pair of two fast tokenizers; `tables`: their TokenTables, if at hand."""
        tokenizers = (student_tokenizer, teacher_tokenizer)
        if tables is None:
            tables = tuple(map(TokenTable.from_tokenizer, tokenizers))
        return cls(tuple(names), tokenizers, tables, tuple(map(fingerprint, tokenizers)))

    @classmethod
    def load(cls, student, teacher, trust_remote_code=False):
        """Load the tokenizers of two hub ids or directories.

        Args:
            trust_remote_code: run the Python code that comes with a tokenizer.
        Raises:
            ValueError: one of them cannot be loaded.
        """
        student_tokenizer, student_table = load_tokenizer("student", student, trust_remote_code)
        teacher_tokenizer, teacher_table = load_tokenizer("teacher", teacher, trust_remote_code)
        tables = (student_table, teacher_table)
        return cls.of(student_tokenizer, teacher_tokenizer, (student, teacher), tables)


def _roles(table):
    return ", ".join(f"{role} {getattr(table, role)}" for role in ROLES)


def load_tokenizer(flag, name, trust_remote_code=False):
    """Load a tokenizer and the table of its tokens.

    Control tokens beyond the rows of the model's lm_head, which no text holds, are left out of the
    table.

    Returns:
        (tokenizer, TokenTable).
    Raises:
        ValueError: it cannot be loaded, or is no fast tokenizer.
    """
    from transformers import AutoTokenizer, logging  # seconds to import

    # What it raises is reported in one line, which stands alone.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = read_model_name(flag, name)
    place, revision = model.of_tokenizer
    with reading(flag, name, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=trust_remote_code)
        tokenizer = as_in_its_file(flag, name, tokenizer, place, revision)
    try:
        table = TokenTable.from_tokenizer(tokenizer)
    except (ValueError, KeyError) as error:
        raise ValueError(f"--{flag} {name}: its tokenizer cannot be used ({reason_of(error)})") \
            from None
    num_rows = _rows_of_head(model.base, model.revision)
    if num_rows and num_rows < len(table):
        with suppress(ValueError):  # ids that may stand in a text are for the caller to refuse
            table = table.below(num_rows)
    return tokenizer, table


def _rows_of_head(place, revision):
    """Return the rows of a model's lm_head by its config.json; None: there is none that says so.

    Not by AutoConfig: a folder may hold a tokenizer alone, and a wrong config is for others to
    refuse.
    """
    from transformers.utils import cached_file

    try:
        path = cached_file(place, "config.json", revision=revision,
                           _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        num_rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return num_rows if type(num_rows) is int and num_rows > 0 else None


# Text that tokenizers cut differently: spaces, breaks, digits, words that no English has.
PROBE = "In 2010,  there\n\n was a naïve 12345 日本 🙂\tdef f(x):\n    return x_1 ** 2\r\n"


def as_in_its_file(flag, name, tokenizer, place, revision):
    """Return the tokenizer that tokenizer.json describes, if AutoTokenizer has made another one.

    For some types of models (`qwen2` in config.json) transformers 5 takes the tokenizer class of
    that type, whatever tokenizer_config.json names: the vocabulary is the file's, how text is cut
    is not.

    Args:
        tokenizer: what AutoTokenizer has made.
        place, revision: of its files.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    path = cached_file(place, "tokenizer.json", revision=revision,
                       _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)
    if path is None or not tokenizer.is_fast:
        return tokenizer
    ids = Tokenizer.from_file(path).encode(PROBE, add_special_tokens=False).ids
    if tokenizer(PROBE, add_special_tokens=False)["input_ids"] == ids:
        return tokenizer
    as_written = PreTrainedTokenizerFast.from_pretrained(place, revision=revision)
    if as_written(PROBE, add_special_tokens=False)["input_ids"] != ids:
        return tokenizer
    warnings.warn(
        f"--{flag} {name}: AutoTokenizer makes a {type(tokenizer).__name__} of it, which cuts text "
        "in another way than its tokenizer.json; the file is right here, and whoever uses the "
        "model should read it with PreTrainedTokenizerFast", stacklevel=2)
    return as_written


@contextmanager
def reading(flag, name, what):
    """Turn whatever a library raises about a model's files into a ValueError that names the flag.

    A damaged file makes the libraries raise errors of any type, so the block should hold nothing
    but their calls: an error of our own must not look like a damaged file.

    Args:
        flag: that names the model.
        name: hub id or directory.
        what: what is read, as in "its tokenizer".
    Raises:
        ValueError: the block failed.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"--{flag} {name}: needs Python code that comes with the model; read that code, "
                "and add --trust_remote_code to run it"
            ) from None
        raise ValueError(f"--{flag} {name}: {what} cannot be loaded ({reason_of(error)})") from None


def reason_of(error):
    """Return the first line of an error's text, with its type where the text alone says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    text = text.removesuffix(".")
    if isinstance(error, (OSError, ValueError, ImportError)):
        return text
    return f"{type(error).__name__}: {text}"


# --- files ----------------------------------------------------------------------------------------


def as_tables(projection, pair, tool):
    """Return the content of a projection file: arrays, their tokenizers, how they were made.

    The public NeMo-RL tools read such a file too: they look at the two arrays and the model ids.

    Args:
        projection: (indices, likelihoods).
        pair: Pair.
        tool: text that says which tool made it, with which flags.
    """
    indices, likelihoods = projection
    tables = {
        "indices": torch.from_numpy(np.ascontiguousarray(indices)),
        "likelihoods": torch.from_numpy(likelihoods.astype(np.float32)),
        "teacher_vocab": len(pair.tables[1]),
        "tool": tool,
    }
    return tables | tokenizer_metadata(pair)


def tokenizer_metadata(pair):
    """Return what a file says of the tokenizers that it belongs to, by the names of its keys."""
    values = {"fingerprint": pair.fingerprints, "roles": pair.roles, "model_id": pair.names}
    metadata = {}
    for key, (student_value, teacher_value) in values.items():
        metadata[f"student_{key}"] = student_value
        metadata[f"teacher_{key}"] = teacher_value
    return metadata


def check_output(path):
    """Check that a path can be the name of a file to write; a device or a pipe would be replaced.

    Raises:
        ValueError: something else than a file has that name.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}: is no file that could be written anew; name another one")


PICTURES = ".png", ".svg", ".pdf"


def check_picture(path):
    """Check that the value of --png can be the name of a picture to write; "": of none.

    Raises:
        ValueError: it ends otherwise; something else than a file has that name.
    """
    if path and Path(path).suffix not in PICTURES:
        raise ValueError(f"--png {path}: expected a name that ends in {', '.join(PICTURES)}")
    check_output(path)


def save_atomically(tables, path):
    """Write tensors and plain values, as .safetensors or by torch.save.

    The file appears under its name when it is complete, or not at all.

    Raises:
        ValueError: it cannot be written there.
    """
    path = Path(path)
    check_output(path)
    content = _safetensors(tables) if path.suffix == ".safetensors" else _pickle(tables)
    # By chance, because processes of two machines may have one number.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(scratch, "xb") as file:  # a new one: it follows no link that waits there
                file.write(content)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None


def _pickle(tables):
    buffer = io.BytesIO()  # torch.save would write a file's name into its content
    torch.save(tables, buffer)
    return buffer.getvalue()


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
        with warnings.catch_warnings(action="ignore"):  # about pickles that torch did not write
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises half a dozen types for a damaged file
        reason = type(error).__name__
        raise ValueError(
            f"{path}: not a readable file of tables ({reason}); make it again"
        ) from None


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
    """Raise ValueError unless a file holds two arrays of the shape and type of a projection."""
    if not isinstance(tables, dict) or not {"indices", "likelihoods"} <= tables.keys():
        raise ValueError(
            f"{path}: not a projection, which has the keys indices and likelihoods; make one with "
            "python -m projection_tools.build"
        )
    for key in ("indices", "likelihoods"):
        array = tables[key]
        if not isinstance(array, torch.Tensor):
            raise ValueError(
                f"{path}: its {key} are a {type(array).__name__}; expected a tensor; make it again"
            )
        if array.layout != torch.strided or array.is_meta or array.is_quantized:
            raise ValueError(
                f"{path}: its {key} are a tensor without plain values ({array.layout}, on "
                f"{array.device}, {array.dtype}); expected a dense one; make it again"
            )
    indices = tables["indices"]
    likelihoods = tables["likelihoods"]
    same_shape = indices.shape == likelihoods.shape and indices.ndim == 2 and indices.numel() > 0
    if not same_shape or indices.dtype not in INTEGERS or likelihoods.is_complex():
        raise ValueError(
            f"{path}: indices {list(indices.shape)} {indices.dtype} and likelihoods "
            f"{list(likelihoods.shape)} {likelihoods.dtype}; expected two (V, K), the first of "
            "int64, the second of float32; make it again"
        )


def _check_values(path, indices, likelihoods):
    """Raise ValueError where the numbers of a projection mean nothing.

    Args:
        indices, likelihoods: (V, K) int64 and float32.
    """
    invalid = int((~likelihoods.isfinite() | (likelihoods < 0)).sum())
    if invalid:
        raise ValueError(
            f"{path}: {invalid} of {likelihoods.numel()} weights are negative or not finite; "
            "make it again"
        )
    if not likelihoods.sum(1).isfinite().all():
        raise ValueError(f"{path}: the weights of a row have no finite sum; make it again")
    if (indices < -1).any():
        raise ValueError(
            f"{path}: teacher ids down to {int(indices.min())}; expected -1, an unused slot, or "
            "more; make it again"
        )
    if len(indices) and not ((indices >= 0) & (likelihoods > 0)).any():
        raise ValueError(
            f"{path}: no row has a teacher token with a weight above 0; make it again"
        )


def _check_tokenizers(path, tables, pair):
    """Raise ValueError unless a projection belongs to the tokenizers of a pair."""
    for name, expected in tokenizer_metadata(pair).items():
        role, _, key = name.partition("_")
        actual = tables.get(name)
        # The model id is no reason to reject a file: one tokenizer goes by many names.
        if key != "model_id" and actual not in (None, expected):
            raise ValueError(
                f"{path}: made for another {role} tokenizer ({key} {actual}, this one has "
                f"{expected}); build it again for this pair"
            )
    indices = tables["indices"]
    V, W = map(len, pair.tables)
    if len(indices) < V or (V and int(indices[:V].max()) >= W):
        raise ValueError(
            f"{path}: {len(indices)} rows with teacher ids up to {int(indices.max())}, but the "
            f"tokenizers have {V} student and {W} teacher ids; build it again for this pair"
        )


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


def describe(indices):
    """Return one line of facts about a projection."""
    sizes = (np.asarray(indices) >= 0).sum(1)
    return (
        f"{len(sizes)} rows: {(sizes == 1).sum()} with one teacher token, {(sizes > 1).sum()} with "
        f"several, {(sizes == 0).sum()} empty"
    )


def finish(projection, pair, args, *notes):
    """Write what a tool made to ``args.output``, and print one line of facts.

    Args:
        projection: (indices, likelihoods).
        pair: Pair.
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
    print(f"{args.output}: {describe(projection[0])}", *notes, sep="; ")


# --- cache ----------------------------------------------------------------------------------------


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
            "your own"
        ) from None
    try:
        # Ranks that come second wait here.  The system releases the lock of a process that dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _load_checked(path):
    """Read a cached file.

    Raises:
        ValueError: absent, damaged, or not what `cached` wrote under this name.
    """
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
