"""Distill across tokenizers in a training loop of your own: texts in, a loss out.

    kd = CrossTokenizerKD(student_tokenizer, teacher_tokenizer)  # once
    batch = kd.collate(["a text", "another one"]).to(device)
    out = student(**batch.student, labels=batch.labels)
    with torch.no_grad():
        teacher_logits = teacher(**batch.teacher).logits
    loss = out.loss + kd(out.logits, teacher_logits, batch)

`collate` tokenizes every text twice, aligns the tokens by bytes and the tokenizers' own offsets,
and pads.  The loss shifts, cuts the padded rows of an lm_head, and is a finite number whatever the
batch holds.  All logits exist at once here; tiles.py bounds them.

Shapes: B texts, S student positions, T teacher positions, V, W the two vocabularies, C chunks.
Fields and names that end in `_next` or `_chunk` are shifted already: entry t describes the token
that position t predicts.

Needs torch, numpy, align.py (numba), losses.py and loss_bounds.py.  `piece_kl` and the other
divergences need nodes.py and translation.py too, and either spelling.py, to build their tables
here, or those tables in a file.
Copy these files into your own repository.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_cross_tokenizer.py.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

try:
    from . import align, loss_bounds, losses
except ImportError:  # copied beside them, not into a package
    import align
    import loss_bounds
    import losses
for module, name in ((align, "TokenTable"), (losses, "log_masses"), (loss_bounds, "NUMBERS")):
    if not hasattr(module, name):
        raise ImportError(f"{module.__file__} is another module: copy Isogloss's beside {__file__}")

BESIDE = f"{__package__}." if __package__ else ""


def _beside(name):
    return import_module(BESIDE + name)


IGNORED = -100  # label of positions that predict nothing, as in transformers
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8

# --- what a batch holds ---------------------------------------------------------------------------


@dataclass
class Batch:
    """Hold some texts as both models read them, and which of their tokens say the same bytes.

    Attributes:
        student, teacher: {"input_ids", "attention_mask"}, (B, S) and (B, T) int64, padded on the
            right.
        labels: (B, S) int64, the student's ids, -100 on padding; not shifted, as transformers takes
            them.
        student_next, teacher_next: (B, S - 1), (B, T - 1) int64, the token that is predicted.
        student_chunk, teacher_chunk: likewise, the number of its chunk, -1 for none.
        terms: what the loss compares, known from ids alone: `nodes.Nodes` or `losses.Chunks`.
        text_bytes, aligned_bytes: bytes of the texts, and those of them in chunks, before a cut.
    """

    student: dict
    teacher: dict
    labels: torch.Tensor
    student_next: torch.Tensor
    teacher_next: torch.Tensor
    student_chunk: torch.Tensor
    teacher_chunk: torch.Tensor
    terms: NamedTuple
    text_bytes: int
    aligned_bytes: int

    def to(self, device, non_blocking=False):
        """Return the batch on a device."""
        moved = {}
        for field in fields(self):
            moved[field.name] = _moved(getattr(self, field.name), device, non_blocking)
        return replace(self, **moved)

    def pin_memory(self):
        """Leave the batch where it is; a DataLoader with pin_memory asks for this."""
        return self


def _moved(value, device, non_blocking):
    """Return tensors on a device, also those inside of dicts and named tuples."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, dict):
        return {key: _moved(entry, device, non_blocking) for key, entry in value.items()}
    if isinstance(value, tuple):
        entries = [_moved(entry, device, non_blocking) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    return value


# --- losses ---------------------------------------------------------------------------------------


class Adapter(NamedTuple):
    """State what `CrossTokenizerKD` has to know of a loss.

    function: of losses.py.
    compute: (function, student logits, teacher logits, Batch, tables, parameters) -> (sum, count).
    needs: the tables that it works on: "translation", "projection" or nothing.
    prepare: (indices, likelihoods) of a projection -> the tables; None: these two.
    """

    function: Callable
    compute: Callable
    needs: str = ""
    prepare: Callable | None = None


def compute_translated(divergence, student_logits, teacher_logits, batch, tables, parameters):
    """Compare the teacher's belief in the student's vocabulary, by a divergence; translation.py."""
    translated = _beside("translation").translated

    tables, cells = tables
    return translated(student_logits, teacher_logits, batch.terms, tables, divergence=divergence,
                      cells=cells, **parameters)


def compute_per_position(divergence, student_logits, teacher_logits, batch, tables, parameters):
    """Compare two models with one tokenizer: every chunk is one position on either side."""
    chunks = batch.terms
    student_rows = student_logits.flatten(0, 1).index_select(0, chunks.first_S)
    teacher_rows = teacher_logits.flatten(0, 1).index_select(0, chunks.first_T)
    return divergence(student_rows[None], teacher_rows[None], None, **parameters)


def compute_per_chunk(function, student_logits, teacher_logits, batch, tables, parameters):
    """Compare the two models' probabilities of each chunk."""
    return function(student_logits, teacher_logits, batch.student_next, batch.teacher_next,
                    batch.student_chunk, batch.teacher_chunk, chunks=batch.terms, **parameters)


def compute_projected(function, student_logits, teacher_logits, batch, tables, parameters):
    """Compare as a projection says, which maps the student's vocabulary into the teacher's."""
    return function(student_logits, teacher_logits, batch.student_chunk, batch.teacher_chunk,
                    *tables, chunks=batch.terms, **parameters)


def divergence(function):
    """Return the entry of a divergence between two models with one vocabulary."""
    return Adapter(function, compute_translated, "translation")


LOSSES = {
    "piece_kl": divergence(losses.forward_kl),
    "forward_kl": divergence(losses.forward_kl),
    "reverse_kl": divergence(losses.reverse_kl),
    "generalized_jsd": divergence(losses.generalized_jsd),
    "skew_forward_kl": divergence(losses.skew_forward_kl),
    "skew_reverse_kl": divergence(losses.skew_reverse_kl),
    "adaptive_kl": divergence(losses.adaptive_kl),
    "total_variation": divergence(losses.total_variation),
    "alm": Adapter(losses.alm, compute_per_chunk),
    "uld": Adapter(losses.uld, compute_per_chunk),
    "projection_kl": Adapter(losses.projection_kl, compute_projected, "projection"),
    "gold": Adapter(losses.gold, compute_projected, "projection", losses.common_tokens),
    "h_kl": Adapter(losses.gold, compute_projected, "projection",
                     partial(losses.common_tokens, relaxed=True)),
}
MAKE_TABLES = {
    "translation": "python -m projection_tools.cells --student A --teacher B --output FILE.pt",
    "projection": "python -m projection_tools.build --student A --teacher B --output FILE.pt",
}


def check_parameters(name, parameters):
    """Raise a ValueError for a loss that does not exist, or parameters that it does not take."""
    if name not in LOSSES:
        raise ValueError(f"loss={name!r}: no such loss; choose one of {', '.join(LOSSES)}")
    # what is left of a signature is what this file passes itself
    known = set(inspect.signature(LOSSES[name].function).parameters)
    if "options" in known:
        known |= set(inspect.signature(losses.position_divergence).parameters)
    settings = known & {*loss_bounds.NUMBERS, *loss_bounds.CHOICES, "kept_K"} | {"max_divergence"}
    if LOSSES[name].needs == "translation":
        settings |= {"text_weight", "choice_weight"}  # 1: there is no cross-entropy beside it
    for parameter, value in parameters.items():
        if parameter not in settings:
            raise ValueError(f"{parameter}={value!r:.80}: {name} has no such parameter; it has "
                             f"{', '.join(sorted(settings))}")
        if parameter != "kept_K":
            loss_bounds.check_value(parameter, value)


def check_columns(kept_K, W):
    """Raise a ValueError for a `kept_K` that is none of a teacher with W tokens."""
    is_list = isinstance(kept_K, torch.Tensor) and kept_K.dtype == torch.int64 and kept_K.ndim == 1
    if not (is_list and len(kept_K) and (kept_K[1:] > kept_K[:-1]).all()
            and 0 <= kept_K[0] and kept_K[-1] < W):
        raise ValueError("kept_K: expected a tensor of int64, the sorted ids of some of the "
                         f"teacher's {W} tokens")


# --- tables ---------------------------------------------------------------------------------------


def read_tables(needs, source, tokenizers, token_tables):
    """Return the tables of a loss: `nodes.Tables`, (indices, likelihoods), or ().

    Args:
        needs: of its Adapter.
        source: path of a file of the projection tools (.pt), what it holds (a dict), or None: build
            them (translation only, in seconds; spelling.py).
        tokenizers, token_tables: the student's and the teacher's.
    Raises:
        ValueError: they are needed and cannot be built or read, belong to other tokenizers, or hold
            what no tool writes.
    """
    if not needs:
        return ()
    command = MAKE_TABLES[needs]
    if source is None:
        if needs == "projection" or not find_spec(BESIDE + "spelling"):
            beside = ", or put spelling.py beside cross_tokenizer.py" * (needs == "translation")
            raise ValueError(f"tables=None: this loss needs a {needs}; make it by {command} and "
                             f"pass tables=\"FILE.pt\"{beside}")
        build_translation_tables = _beside("spelling").build_translation_tables

        source = build_translation_tables(tokenizers, token_tables)
    elif not isinstance(source, dict):
        source = _read_file(source, command)
    for role, tokenizer in zip(("student", "teacher"), tokenizers):
        expected = source.get(f"{role}_fingerprint")
        if expected not in (None, align.fingerprint(tokenizer)):
            raise ValueError(f"tables: made for another {role} tokenizer; make them by {command}")
    keys = ("indices", "likelihoods")
    if needs == "translation":
        Tables = _beside("nodes").Tables

        keys = Tables._fields
    missing = [key for key in keys if key not in source]
    if missing:
        raise ValueError(f"tables: no {missing[0]} in them; expected what is made by {command}")
    arrays = {key: _as_index(source[key]) for key in keys}
    V, W = map(len, token_tables)
    if needs == "projection":
        return _checked_projection(*arrays.values(), V, W, command)
    _check_translation(arrays, V, W, command)
    return Tables(**arrays)


def _read_file(path, command):
    """Return what a file of tables holds, a dict."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles that torch did not write
            held = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise ValueError(f"tables={str(path)!r}: cannot be read ({error.strerror}); make it by "
                         f"{command}") from None
    except Exception as error:  # torch raises half a dozen types, of some with advice to trust it
        raise ValueError(f"tables={str(path)!r:.300}: no readable file of tables "
                         f"({type(error).__name__}); make it by {command}") from None
    if not isinstance(held, dict):
        raise ValueError(f"tables={str(path)!r}: holds a {type(held).__name__}; expected a file of "
                         f"tables, made by {command}")
    return held


def _checked_projection(indices, likelihoods, V, W, command):
    """Return (indices (V, K), likelihoods (V, K)) of a projection."""
    both = indices, likelihoods
    if not all(isinstance(x, torch.Tensor) and x.ndim == 2 and x.numel() for x in both) or (
            indices.shape != likelihoods.shape or indices.dtype != torch.int64
            or not likelihoods.is_floating_point()):
        raise ValueError("tables: expected indices of integers and likelihoods of floats, both "
                         f"(V, K); make them by {command}")
    if len(indices) < V:
        _refuse_sizes(command, f"{len(indices)} rows", V, W)
    indices, likelihoods = indices[:V], likelihoods[:V]
    _check_range("indices", indices, -1, W - 1, command)
    weights = likelihoods.double()
    sums = weights.sum(1)
    is_wrong = ~weights.isfinite() | (weights < 0) | ((indices < 0) & (weights > 0))
    is_unsorted = weights[:, 1:] > weights[:, :-1]
    is_off = ((sums - 1).abs() > 1e-2) & (sums > 0)  # bfloat16 rounds a row to thousandths
    if is_wrong.any() or is_unsorted.any() or is_off.any() or not sums.any():
        raise ValueError("tables: likelihoods of a projection are 0 or more, sorted in each row, 0 "
                         "in unused slots (-1), and add up to 1 or to 0; these do not; make them "
                         f"by {command}")
    return indices, likelihoods


# {field of `nodes.Tables`: (its axes, lowest and highest number)}; a letter stands for a size
FIELDS = {
    "cell_V": ("V", 0, "C"), "cell_W": ("W", 0, "C"), "closed_V": ("V", None, None),
    "pieces_W": ("WP", -1, "V-1"), "order_W": ("W", 0, "W-1"), "low_W": ("WP", 0, "W"),
    "high_W": ("WP", 0, "W"), "pieces_V": ("VQ", -1, "W-1"), "order_V": ("V", 0, "V-1"),
    "low_V": ("VQ", 0, "V"), "high_V": ("VQ", 0, "V"), "rank_V": ("V", 0, "V-1"),
    "longer_F": ("F", 0, "W-1"), "longer_rank_F": ("F", 0, "V-1"), "join_start_V": ("S", 0, "J"),
    "join_low_J": ("J", 0, "W"), "join_high_J": ("J", 0, "W"), "joined_V": ("V", 0, "W"),
}


def _check_translation(arrays, V, W, command):
    """Raise a ValueError for tables that no tool writes, whose numbers would lead anywhere."""
    for key, value in arrays.items():
        is_number = key == "num_cells" and type(value) is int and value >= 0
        if not is_number and not (isinstance(value, torch.Tensor) and value.dtype == torch.int64):
            raise ValueError(f"tables: {key} is no table of integers; make them by {command}")
    num_tokens = tuple(arrays[key].numel() for key in ("cell_V", "cell_W"))
    if num_tokens != (V, W):
        _refuse_sizes(command, "{} and {} tokens".format(*num_tokens), V, W)
    sizes = {"V": V, "W": W, "C": int(arrays["num_cells"]), "V-1": V - 1, "W-1": W - 1, "S": V + 1,
             "P": arrays["pieces_W"].shape[-1], "Q": arrays["pieces_V"].shape[-1],
             "F": arrays["longer_F"].numel(), "J": arrays["join_low_J"].numel()}
    for key, (axes, low, high) in FIELDS.items():
        shape = tuple(map(sizes.get, axes))
        if tuple(arrays[key].shape) != shape:
            raise ValueError(f"tables: {key} has the shape {tuple(arrays[key].shape)}; expected "
                             f"{shape}; make them by {command}")
        if low is not None:
            _check_range(key, arrays[key], low, sizes.get(high, high), command)
    starts = arrays["join_start_V"]
    ranges = [(starts[:-1], starts[1:])]
    ranges += [(arrays[f"low_{axis}"], arrays[f"high_{axis}"]) for axis in "WV"]
    ranges.append((arrays["join_low_J"], arrays["join_high_J"]))
    if any((low > high).any() for low, high in ranges):
        raise ValueError(f"tables: a range ends before it begins; make them by {command}")


def _check_range(key, numbers, low, high, command):
    if numbers.numel() and not low <= int(numbers.min()) <= int(numbers.max()) <= high:
        raise ValueError(f"tables: {key} holds {int(numbers.min())} to {int(numbers.max())}; "
                         f"expected {low} to {high}; make them by {command}")


def _refuse_sizes(command, arrived, V, W):
    raise ValueError(f"tables: of {arrived}, but the student's tokenizer has {V} ids and the "
                     f"teacher's {W}; make them by {command}")


def _as_index(value):
    """Return an array as a tensor, integers as int64, which indexes tensors."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and value.dtype in INTEGERS:
        return value.long()
    return value


# --- the loss -------------------------------------------------------------------------------------


class CrossTokenizerKD:
    """Collate texts for two models with their own tokenizers, and compare what the models say.

    Args:
        student_tokenizer, teacher_tokenizer: fast tokenizers of transformers.
        loss: a key of `LOSSES`.
        tables: what the loss works on, see `read_tables`; None: built here.
        max_length: tokens of a text on either side, at most; both are cut at the same byte.
        parameters: of the loss (temperature, beta, ...); max_divergence: nats that a term has at
            most, before tau^2, 0 for any.
    Raises:
        ValueError: see `check_parameters` and `read_tables`; a tokenizer without tokenizer.json, or
            none of transformers.
    """

    def __init__(self, student_tokenizer, teacher_tokenizer, loss="piece_kl", tables=None,
                 max_length=1024, **parameters):
        check_parameters(loss, parameters)
        loss_bounds.check_value("max_length", max_length)
        self.tokenizers = (student_tokenizer, teacher_tokenizer)
        self.token_tables = tuple(map(align.TokenTable.from_tokenizer, self.tokenizers))
        for tokenizer in self.tokenizers:
            if not hasattr(tokenizer, "backend_tokenizer"):
                raise ValueError(f"a {type(tokenizer).__module__}.{type(tokenizer).__name__}: "
                                 "expected a fast tokenizer of transformers, such as "
                                 "PreTrainedTokenizerFast(tokenizer_object=...)")
        self.spec = LOSSES[loss]
        if align.fingerprint(student_tokenizer) == align.fingerprint(teacher_tokenizer):
            if self.spec.needs == "translation":
                self.spec = Adapter(self.spec.function, compute_per_position)
                for of_cells in ("text_weight", "choice_weight"):  # every cell is one token
                    parameters.pop(of_cells, None)
        self.tables = read_tables(self.spec.needs, tables, self.tokenizers, self.token_tables)
        if parameters.get("kept_K") is not None:
            check_columns(parameters["kept_K"], len(self.token_tables[1]))
        if self.spec.prepare:
            if not find_spec(BESIDE + "spelling"):
                raise ValueError(f"loss={loss!r}: put spelling.py beside cross_tokenizer.py")
            indices, likelihoods = self.tables
            unwritten_twins = _beside("spelling").unwritten_twins
            unwritten_V = unwritten_twins(self.token_tables[0], self.tokenizers[0])
            written = indices.masked_fill(torch.from_numpy(unwritten_V)[:, None], -1)
            self.tables = self.spec.prepare(written, likelihoods)
        limit = parameters.pop("max_divergence", 0)
        if limit:
            parameters["bound"] = partial(torch.clamp, max=limit)
        self.max_length = max_length
        self.parameters = parameters
        self.has_warned = False
        self._tables_on = {}  # by device

    def collate(self, texts):
        """Return the Batch of a list or array of B strings; the `collate_fn` of a DataLoader.

        Raises:
            ValueError: not strings, none, or one that UTF-8 cannot hold.
        """
        arrived = "one string"
        if not isinstance(texts, str):
            texts = list(texts)
            arrived = sorted({type(text).__name__ for text in texts}) or "nothing"
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"collate: expected a list of strings, got {arrived}")
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"collate: {text[:40]!r} holds half of a surrogate pair, which is "
                                 "no text; repair or remove it") from None
        student, teacher = [
            _encode(texts, tokenizer, table)
            for tokenizer, table in zip(self.tokenizers, self.token_tables)]
        pairs = []
        text_bytes = 0
        aligned_bytes = 0
        for text, student_text, teacher_text in zip(texts, student, teacher):
            alignment = align.align(student_text.ids, teacher_text.ids, *self.token_tables, text,
                              student_text.offsets, teacher_text.offsets)
            # both sides at the same byte; chunks of every token, not shifted
            cuts, chunks = align.cut_chunks(alignment, [self.max_length] * 2)
            sides = student_text.ids, teacher_text.ids, *chunks
            pairs.append([side[:cut] for side, cut in zip(sides, [*cuts, *cuts])])
            text_bytes += alignment.text_bytes
            aligned_bytes += int(alignment.chunk_bytes[alignment.same_bytes].sum())
        return self._batch(pairs, text_bytes, aligned_bytes)

    def _batch(self, pairs, text_bytes, aligned_bytes):
        student_ids, teacher_ids, student_chunk, teacher_chunk = map(_padded, zip(*pairs))
        inputs = []
        for ids, table in zip((student_ids, teacher_ids), self.token_tables):
            filler = max(table.pad if table.pad >= 0 else table.eos, 0)
            inputs.append({"input_ids": torch.where(ids >= 0, ids, filler),
                           "attention_mask": (ids >= 0).long()})
        batch = Batch(
            *inputs, labels=torch.where(student_ids >= 0, student_ids, IGNORED),
            student_next=student_ids[:, 1:].clamp(min=0),
            teacher_next=teacher_ids[:, 1:].clamp(min=0),
            student_chunk=student_chunk[:, 1:], teacher_chunk=teacher_chunk[:, 1:],
            terms=losses.find_chunks(student_chunk[:, 1:], teacher_chunk[:, 1:]),
            text_bytes=text_bytes, aligned_bytes=aligned_bytes)
        if self.spec.needs == "translation":
            list_nodes = _beside("nodes").list_nodes

            batch.terms = list_nodes(
                inputs[0]["input_ids"][:, :-1], batch.student_next, teacher_ids[:, 1:],
                batch.student_chunk, batch.teacher_chunk, self.tables)
        return batch

    def __call__(self, student_logits, teacher_logits, batch):
        """Return the mean of the loss over its terms in the batch, () in nats, with a graph.

        It is 0, with a gradient of 0, where nothing is aligned.

        Args:
            student_logits: (B, S, V or more), as the model returns them for ``batch.student``.
            teacher_logits: (B, T, W or more), likewise; they get no gradient.
        """
        total, count = self.sum_and_count(student_logits, teacher_logits, batch)
        return total / count.clamp(min=1)

    def sum_and_count(self, student_logits, teacher_logits, batch):
        """Return (sum of the loss in nats, terms), to be divided by the terms of all ranks."""
        student_logits, teacher_logits = self._checked(student_logits, teacher_logits, batch)
        if not (batch.student_chunk >= 0).any():
            self._warn(batch)
            nothing = student_logits[..., :0].float().sum()  # 0, whatever the logits hold
            return nothing, nothing.detach()
        tables = self._tables_for(student_logits.device)
        return self.spec.compute(self.spec.function, student_logits, teacher_logits, batch, tables,
                                 self.parameters)

    def _checked(self, student_logits, teacher_logits, batch):
        """Return the logits of the positions that predict a token, without rows of padding."""
        logits = []
        for role, given, inputs, table in (
            ("student", student_logits, batch.student, self.token_tables[0]),
            ("teacher", teacher_logits, batch.teacher, self.token_tables[1]),
        ):
            shape = tuple(inputs["input_ids"].shape)
            if tuple(given.shape[:-1]) != shape or given.shape[-1] < len(table):
                raise ValueError(
                    f"the {role}'s logits have the shape {tuple(given.shape)}; expected "
                    f"{(*shape, len(table))} or more columns: all that the model returns for "
                    f"batch.{role}, with its own tokenizer")
            logits.append(given[:, :-1, : len(table)])
        return logits

    def _tables_for(self, device):
        """Return the tables on a device; they are moved there once."""
        if device not in self._tables_on:
            tables = _moved(self.tables, device, False)
            if self.spec.needs == "translation":
                tables = tables, _beside("translation").CellColumns.of(tables)
            self._tables_on[device] = tables
        return self._tables_on[device]

    def _warn(self, batch):
        if self.has_warned:
            return
        self.has_warned = True
        warnings.warn(
            f"CrossTokenizerKD: none of the {batch.text_bytes} bytes of a batch of "
            f"{len(batch.labels)} texts is in a chunk of both tokenizers, so its distillation loss "
            "is 0; look at it with python align.py --student A --teacher B --show TEXT",
            stacklevel=4)


# --- one text -------------------------------------------------------------------------------------


class EncodedText(NamedTuple):
    """Hold one text as one model reads it: (S,) int64 ids, and (S, 2) characters of the text."""

    ids: np.ndarray
    offsets: np.ndarray


def _encode(texts, tokenizer, table):
    """Return an EncodedText `[bos] text eos` for each text, as far as the tokenizer has these."""
    prefix = [table.bos] if align.adds_bos(tokenizer, table.bos) else []
    suffix = [table.eos] if table.eos >= 0 else []
    # not truncated: where to cut depends on the other tokenizer
    coded = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False,
                      return_offsets_mapping=True)
    nowhere = [(0, 0)]  # bos and eos stand for no characters
    encoded = []
    for ids, offsets in zip(coded["input_ids"], coded["offset_mapping"]):
        offsets = [*nowhere * len(prefix), *offsets, *nowhere * len(suffix)]
        ids = np.array([*prefix, *ids, *suffix], np.int64)
        encoded.append(EncodedText(ids, np.array(offsets, np.int64).reshape(-1, 2)))
    return encoded


def _padded(arrays):
    """Return (B, N) int64 of arrays of any lengths, -1 behind their ends."""
    # two wide at least, so that something is left when it is shifted
    width = max(2, max(map(len, arrays)))
    padded = np.full((len(arrays), width), -1, np.int64)
    for row, array in zip(padded, arrays):
        row[: len(array)] = array
    return torch.from_numpy(padded)
