"""Hold what a teacher says of many texts in files, which are written once and mapped into memory.

A cache is a folder:

    manifest.json           what was asked of which teacher about which data, and checksums
    shard-00000.safetensors what it says of some texts, whole ones, in the order of the data
    index.safetensors       the texts of all shards, sorted by their keys
    head.safetensors        of hidden states, what makes logits of them
    teacher/                the teacher's tokenizer and config, which a run needs beside the cache
    README.md               a card, which its owner may edit

Reading runs no code: a file is JSON or safetensors.  Every file appears whole, by a rename; a cache
whose manifest names no index is one that is still being written, or repaired.  `cache.py` writes
it, `cached.py` reads it.  Tests: tests/test_cache_files.py, tests/test_cache_repairs.py.

Shapes: N positions of a shard, K kept tokens, L log2 of the vocabulary.
"""

import hashlib
import json
import os
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from isogloss.errors import DataError
from isogloss.job.files import scratch_of, size_and_checksum, sync, write_atomically
from isogloss.projection_tools.tokenizers import reason_of
from isogloss.teachers import packed_rows
from isogloss.teachers.cache_checks import (
    LOW_BITS,
    check_file,
    check_ids,
    check_index,
    check_manifest,
    read_bounded,
)
from isogloss.teachers.text_scores import ScoredLogits, TextScores
from isogloss.tiles import TopKLogits

FLAG = "teacher_cache"
FORMAT = 2
PACKED = 3  # format of caches whose kept tokens are packed, see packed_rows.py
PACKED_BITS = 8  # by which --logp_bits asks for it
PACKED_BYTES = 1.1  # of each of the tokens that are asked for, about
MANIFEST = "manifest.json"
INDEX = "index.safetensors"
HEAD = "head.safetensors"
TEACHER = "teacher"
README = "README.md"
OF_TEXTS = "keys", "starts", "tokens", "order", "packed", "packed_starts"
SERVED = "served"  # dtype of a teacher of which a server answered
LOGP_STEPS = 1024  # a log-probability in 16 bits is a multiple of 1 / 1024 nat, from -64 to 0


# --- numbers in few bits --------------------------------------------------------------------------


def pack_ids(ids_NK, vocab):
    """Return token ids as {"low": (N, K) uint16, "high": (N, bits * ceil(K / 8)) uint8}."""
    num_high = max((vocab - 1).bit_length() - LOW_BITS, 0)
    ids = ids_NK.numpy().astype(np.uint32)
    planes = []
    for bit in range(num_high):
        planes.append(np.packbits((ids >> (LOW_BITS + bit) & 1).astype(np.uint8), axis=1))
    high = np.concatenate(planes, 1) if planes else np.zeros((len(ids), 0), np.uint8)
    low = torch.from_numpy((ids & 0xFFFF).astype(np.uint16))
    return {"low": low, "high": torch.from_numpy(high)}


def unpack_ids(low_NK, high):
    """Return (N, K) int32 ids of what `pack_ids` made."""
    ids = low_NK.numpy().astype(np.int32)
    num_ids = ids.shape[1]
    width = -(-num_ids // 8)
    planes = high.numpy()
    for bit in range(planes.shape[1] // max(width, 1)):
        plane = planes[:, bit * width : (bit + 1) * width]
        bits = np.unpackbits(plane, axis=1)[:, :num_ids].astype(np.int32)
        ids |= bits << (LOW_BITS + bit)
    return torch.from_numpy(ids)


def pack_logp(logp_NK):
    """Return log-probabilities as (N, K) uint16 steps; an error is half a step or less."""
    steps = (logp_NK * -LOGP_STEPS).round().clamp(0, 0xFFFF)
    return torch.from_numpy(steps.numpy().astype(np.uint16))


def unpack_logp(steps_NK):
    """Return (N, K) float32 log-probabilities of what `pack_logp` made."""
    return torch.from_numpy(steps_NK.numpy().astype(np.float32)) / -LOGP_STEPS


# --- what a shard holds ---------------------------------------------------------------------------


def top_k_columns(scored, vocab, logp_bits, plain_rest_N=None, num_drawn_N=None, factor_NK=None):
    """Return the tensors of a ScoredLogits; of PACKED_BITS they are to be packed, text by text.

    The label, which the logits keep behind the other tokens, follows from the text.

    Args:
        factor_NK: see `kept_tokens.KeptRows`; None: they are the most likely ones.
        plain_rest_N: log-probability of the rest at temperature 1, where that of the logits is at
            another one.
        num_drawn_N: see `kept_tokens.KeptRows`.
    """
    logits = scored.logits
    logp = logits.logp_TK[:, :-1].float().cpu()
    ids = logits.ids_TK[:, :-1].cpu()
    columns = {"rest": logits.rest_T.float().cpu()}
    if logp_bits == PACKED_BITS:
        factor_NK = torch.ones_like(logp) if factor_NK is None else factor_NK.cpu()
        steps = packed_rows.steps_of(logp, factor_NK)
        is_left = (steps == 0) & (ids != logits.ids_TK[:, -1:].cpu())
        left = torch.where(is_left, logp, -torch.inf)
        rest = torch.cat([left, columns["rest"][:, None]], 1).logsumexp(-1)
        label, *others = scored.scores
        return {"ids": ids, "steps": steps, "label_logp": label.float().cpu(),
                "numbers": torch.stack([rest, logits.total_T.cpu(), *map(torch.Tensor.cpu, others)],
                                       1).half()}
    columns |= pack_ids(ids, vocab)
    columns["logp"] = pack_logp(logp) if logp_bits == 16 else logp.contiguous()
    columns["total"] = logits.total_T.float().cpu()
    columns["scores"] = scored.scores.packed().cpu().contiguous()
    if plain_rest_N is not None:
        columns["plain_rest"] = plain_rest_N.float().cpu()
    if num_drawn_N is not None:
        columns["drawn"] = num_drawn_N.int().cpu()
    return columns


def scored_logits(columns, labels_N, vocab, plain=False):
    """Return the ScoredLogits of what `top_k_columns` made.

    Args:
        labels_N: (N,) int64, the token that each position predicts.
        plain: the rest is wanted at temperature 1.
    Raises:
        ValueError: a token is beyond the vocabulary.
    """
    label_N1 = labels_N[:, None].int()
    if "label_logp" in columns:  # they were packed; the label fills what is free
        rest, total, *others = columns["numbers"].float().unbind(1)
        scores = TextScores(columns["label_logp"], *others)
        ids_NK = torch.where(columns["ids"] < 0, label_N1, columns["ids"])
    else:
        rest = columns["plain_rest"] if plain and "plain_rest" in columns else columns["rest"]
        total = columns["total"]
        scores = TextScores.unpacked(columns["scores"])
        ids_NK = unpack_ids(columns["low"], columns["high"])
    check_ids(ids_NK, vocab)
    logp_NK = columns["logp"]
    if logp_NK.dtype == torch.uint16:
        logp_NK = unpack_logp(logp_NK)
    # the label's own log-probability is exact, also where it is among the most likely tokens
    logp_NK = torch.where(ids_NK == label_N1, scores.logp_T[:, None], logp_NK)
    ids_NK = torch.cat([ids_NK, label_N1], 1)
    logp_NK = torch.cat([logp_NK, scores.logp_T[:, None]], 1)
    return ScoredLogits(TopKLogits(ids_NK, logp_NK, vocab, rest, total), scores)


def bytes_per_position(output, vocab, top_k=0, *, logp_bits=16, hidden_bytes=0, softened=False,
                       sampled=False):
    """Return the bytes that a shard holds of one position, its id included.

    Args:
        output: "hidden" or "topk"; hidden_bytes: of one hidden state.
        softened: the rest is stored at two temperatures; sampled: see Manifest.
    """
    if output == "hidden":
        return 4 + hidden_bytes
    kept = min(top_k, vocab)
    if logp_bits == PACKED_BITS:
        return 4 + round(PACKED_BYTES * kept) + 4 + 2 * 5
    num_high = max((vocab - 1).bit_length() - LOW_BITS, 0)
    of_ids = 2 * kept + num_high * -(-kept // 8)
    return 4 + of_ids + kept * logp_bits // 8 + 4 * (2 + softened + sampled) + 16


# --- the manifest ---------------------------------------------------------------------------------


@dataclass
class Manifest:
    """State what a cache holds.

    Attributes:
        teacher: what the writer was told, for messages.
        weights: digest of the teacher's config and weights.
        tokenizer: fingerprint of its tokenizer.
        template: digest of its chat template and what that is told.
        vocab: tokens.
        max_length: positions of a text, at most.
        dtype: in which the teacher computed; SERVED: not known, nor are whole entropies.
        output: "hidden" or "topk".
        top_k, logp_bits, temperature: of "topk"; of "hidden" 0, 0 and 1.
        sampled: some of the tokens were drawn; seed: of the draws, else 0.
        data: what the writer was told, for messages.
        data_digest: of the keys of all its texts, in order.
        holds_chats: the texts are chats.
        num_texts, texts_per_shard: rows of the data; those that a shard covers.
        date: that its chat template was told; "": of an earlier version, the day of writing.
        files: {name: [bytes, CRC-32]} of every file that a run reads; of a cache that is repaired,
            those of the shards that it keeps.
        format: version of this layout.
    """

    teacher: str
    weights: str
    tokenizer: str
    template: str
    vocab: int
    max_length: int
    dtype: str
    output: str
    top_k: int
    logp_bits: int
    temperature: float
    data: str
    data_digest: str
    holds_chats: bool
    num_texts: int
    texts_per_shard: int
    bytes_per_position: int
    sampled: bool = False
    seed: int = 0
    date: str = ""
    files: dict = field(default_factory=dict)
    format: int = FORMAT

    @property
    def num_shards(self):
        return -(-self.num_texts // self.texts_per_shard)

    @property
    def shard_names(self):
        return list(map(shard_name, range(self.num_shards)))

    def write(self, folder):
        write_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, flag, folder):
        """Return the Manifest of a folder.

        Raises:
            ValueError: there is none, or it is of another format.
        """
        path = Path(folder) / MANIFEST
        try:
            plain = dict(json.loads(read_bounded(path)))
            plain = {"date": ""} | plain  # which earlier versions did not write
            check_manifest(plain, cls)
            plain["files"].pop(README, None)  # which earlier versions listed
            if plain["format"] not in (FORMAT, PACKED):
                raise ValueError(f"format {plain['format']}")
        except OSError:
            raise ValueError(f"--{flag} {folder}: no {MANIFEST} there; expected a folder that "
                             "python -m isogloss.cache has written") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"--{flag} {folder}: its {MANIFEST} is damaged, or of another version "
                             f"({reason_of(error)}; expected format {FORMAT}); write the cache "
                             "anew") from None
        return cls(**plain)

    def difference(self, other):
        """Return "name: this value, that value" of the first field that differs, or None."""
        for entry in fields(self):
            values = getattr(self, entry.name), getattr(other, entry.name)
            # names of the same teacher and data may differ
            if entry.name not in ("files", "teacher", "data") and values[0] != values[1]:
                return f"{entry.name} {values[0]} there, {values[1]} here"
        return None


HUB = "hf://datasets/"


@lru_cache
def local_cache(path):
    """Return the folder of a cache; one of the hub, hf://datasets/owner/name, is downloaded once.

    Raises:
        ValueError: it cannot be.
    """
    if not path.startswith(HUB):
        return path
    name, _, revision = path.removeprefix(HUB).partition("@")
    try:
        return snapshot_download(name, repo_type="dataset", revision=revision or None)
    except Exception as error:  # the hub has a dozen types of them
        raise ValueError(f"--{FLAG} {path}: cannot be downloaded ({reason_of(error)})") from None


CARD = """\
---
tags:
- isogloss
- knowledge-distillation
---

# What {teacher} says of {data}

{what} of {num_texts:,} texts, written by Isogloss. Its license is what those of the teacher and of
the data allow.

    isogloss-distill --student S --teacher_cache hf://datasets/OWNER/NAME --data ...
"""
READING = """
Without Isogloss, the first text:

```python
import json
import numpy as np
from safetensors.numpy import load_file

shard = load_file("shard-00000.safetensors")
first, last = shard["starts"][:2]  # its positions
ids = shard["low"][first:last].astype(np.int64)  # of the tokens that are kept
size = -(-ids.shape[1] // 8)
for bit in range(shard["high"].shape[1] // size):
    plane = shard["high"][first:last, bit * size : (bit + 1) * size]
    ids |= np.unpackbits(plane, axis=1)[:, : ids.shape[1]].astype(np.int64) << (16 + bit)
logp = shard["logp"][first:last] / {steps}  # of all others together: shard["rest"]
```
"""
READING_PACKED = """
Without Isogloss, the first text:

```python
import zlib
import numpy as np
from safetensors.numpy import load_file

shard = load_file("shard-00000.safetensors")
left = shard["packed"][: shard["packed_starts"][1]].tobytes()
columns = []
for _ in range(2):
    stream = zlib.decompressobj()
    planes = np.frombuffer(stream.decompress(left), np.uint8).reshape(4, -1)
    columns.append(np.ascontiguousarray(planes.T).view("<u4")[:, 0].astype(np.int64))
    left = stream.unused_data
position, place = np.divmod(columns[0].cumsum(), len(shard["order"]))
ids = shard["order"][place]  # of the tokens that are kept; of others together: shard["numbers"]
steps = 2 * (columns[1] & 2**24 - 1)
p = 2.0 ** -(14 + (columns[1] >> 24)) / np.log((steps + 1) / (steps - 1))
```
"""


def card_of(manifest):
    """Return the README.md of a cache."""
    kept = manifest.output == "topk"
    what = f"{manifest.top_k} tokens of each position" if kept else "Final hidden states"
    card = CARD.format(teacher=name_of(manifest.teacher), data=name_of(manifest.data), what=what,
                       num_texts=manifest.num_texts)
    if not kept:
        return card
    if manifest.logp_bits == PACKED_BITS:
        return card + READING_PACKED
    return card + READING.format(steps=-LOGP_STEPS if manifest.logp_bits == 16 else 1)


def name_of(path):
    """Return what a card says of a model or of data: no path of this machine."""
    is_hub_id = path.count("/") == 1 and path[0] not in "./~"
    return path if is_hub_id or "://" in path else Path(path).name


def shard_name(number):
    return f"shard-{number:05d}.safetensors"


def write_tensors(path, tensors):
    """Write a safetensors file that is complete or absent.

    Raises:
        DataError: it cannot be written, as on a full disk.
    """
    scratch = scratch_of(path)
    try:
        scratch.write_bytes(save(tensors))  # save_file would let the owner alone read it
        sync(scratch)
        scratch.rename(path)
        sync(path.parent)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DataError(f"--output {path}: cannot be written ({reason_of(error)}); once this is "
                        "repaired the same command goes on") from None


@contextmanager
def naming_shard(folder, name):
    """Turn what is wrong with a shard, in a block that reads it, into a line that names it."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"--output {folder}: {name} cannot be read, or is no file of a cache "
                         f"({reason_of(error)}); delete it and run the same command again"
                         ) from None


def texts_of_shard(folder, name):
    """Return (keys, starts) of a shard.

    Raises:
        ValueError: see `naming_shard`.
    """
    with naming_shard(folder, name), safe_open(folder / name, "pt") as file:
        return file.get_tensor("keys"), file.get_tensor("starts")


def check_shards(folder, manifest, names):
    """Check shards of an earlier command; without a checksum, whether their texts can be read.

    Raises:
        ValueError: one is not what was written.
    """
    for name in names:
        if name in manifest.files:
            with naming_shard(folder, name):
                actual = size_and_checksum(folder / name)
            check_kept(folder, name, actual, manifest.files[name])
        texts_of_shard(folder, name)


def check_kept(folder, name, actual, expected):
    """Raise a ValueError where the [bytes, CRC-32] of a shard are not those of before."""
    if actual != expected:
        raise ValueError(f"--output {folder}: {name} is not what was written before; delete it and "
                         "run the same command again")


def complete(folder, manifest):
    """Write the index of all shards, and a manifest that names every file.

    Args:
        manifest: its files are the shards that a repair keeps, which have to be the same again.
    Raises:
        ValueError: a shard is not what it was, or the texts are not those of the manifest.
    """
    keys = []
    shards = []
    starts = []
    sizes = []
    for number, name in enumerate(manifest.shard_names):
        of_shard, start = texts_of_shard(folder, name)
        with naming_shard(folder, name):
            check_file(folder, manifest, name)
        keys.append(of_shard)
        shards.append(torch.full((len(of_shard),), number, dtype=torch.int32))
        starts.append(start[:-1])
        sizes.append(start.diff().int())
    keys = torch.cat(keys).numpy()
    if hashlib.sha256(keys.tobytes()).hexdigest()[:32] != manifest.data_digest:
        raise ValueError(f"--output {folder}: the data was another one while it was read; delete "
                         "this directory and write the cache of data that stays the same")
    # stable: of a text that occurs twice, the first one counts
    order = torch.from_numpy(np.lexsort((keys[:, 1], keys[:, 0])))
    text_number = torch.cat([torch.arange(len(shard)) for shard in shards])
    write_tensors(folder / INDEX, {
        "keys": torch.from_numpy(keys)[order], "shard": torch.cat(shards)[order],
        "start": torch.cat(starts)[order], "size": torch.cat(sizes)[order],
        "text": text_number[order].int()})
    kept = manifest.files
    manifest.files = {name: size_and_checksum(folder / name) for name in _files(folder, manifest)}
    for name, expected in kept.items():
        check_kept(folder, name, manifest.files[name], expected)
    manifest.write(folder)


def _files(folder, manifest):
    """List the files that a run reads; others, such as the card, are its owner's."""
    names = [INDEX, *manifest.shard_names]
    if manifest.output == "hidden":
        names.append(HEAD)
    for path in (folder / TEACHER).rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            names.append(path.relative_to(folder).as_posix())
    return sorted(names)


# --- reading --------------------------------------------------------------------------------------


class CacheReader:
    """Look up texts in a complete cache.

    Attributes:
        folder: Path.
        manifest: Manifest.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.manifest = open_cache(folder)
        path = self.folder / INDEX
        with reading_cache(path):
            index = load_file(path)
            check_index(index, self.manifest)
        self.keys = index["keys"].numpy()
        self.shard = index["shard"].numpy()
        self.start = index["start"].numpy()
        self.size = index["size"].numpy()
        self.text = index["text"].numpy()
        self.shards = {}
        self.orders = {}  # of packed tokens, of each shard

    def find(self, key):
        """Return the place of a text in the index, or None.

        Args:
            key: (2,) int64, see `text_key`.
        """
        place = int(np.searchsorted(self.keys[:, 0], key[0]))
        while place < len(self.keys) and self.keys[place, 0] == key[0]:
            if self.keys[place, 1] == key[1]:
                return place
            place += 1
        return None

    def tokens(self, place):
        """Return (positions + 1,) int32: what each position of a text reads, and the last label."""
        file, path = self._shard(place)
        first = int(self.start[place]) + int(self.text[place])
        size = int(self.size[place])
        with reading_cache(path):
            tokens = file.get_slice("tokens")[first : first + size + 1]
            if len(tokens) != size + 1:
                raise ValueError(f"{len(tokens)} tokens of a text, expected {size + 1}")
        return tokens

    def columns(self, place, num_positions):
        """Return the tensors of the first positions of a text, as the shard holds them."""
        file, path = self._shard(place)
        first = int(self.start[place])
        columns = {}
        with reading_cache(path):
            for name in file.keys():
                if name not in OF_TEXTS:
                    columns[name] = file.get_slice(name)[first : first + num_positions]
            if self.manifest.logp_bits == PACKED_BITS:
                columns |= self._unpacked(file, place, num_positions)
            sizes = {len(values) for values in columns.values()}
            if sizes != {num_positions}:
                raise ValueError(f"{sizes} positions of a text, expected {num_positions}")
        return columns

    def _unpacked(self, file, place, num_positions):
        number = int(self.shard[place])
        if number not in self.orders:
            self.orders[number] = file.get_tensor("order")
        text = int(self.text[place])
        first, last = file.get_slice("packed_starts")[text : text + 2].tolist()
        ids, logp = packed_rows.unpack(
            file.get_slice("packed")[first:last], self.orders[number], int(self.size[place]),
            self.manifest.top_k, num_positions)
        return {"ids": ids, "logp": logp}

    def _shard(self, place):
        number = int(self.shard[place])
        if number not in self.shards:
            # it maps the file; pages are read when they are needed
            path = self.folder / shard_name(number)
            with reading_cache(path):
                self.shards[number] = safe_open(path, "pt"), path
        return self.shards[number]


def open_cache(folder):
    """Return the Manifest of a complete cache whose files have the right sizes.

    Raises:
        ValueError: what is wrong with it.
    """
    manifest = Manifest.read(FLAG, folder)
    needed = [INDEX, HEAD][: 1 + (manifest.output == "hidden")]
    needed += map(shard_name, range(min(manifest.num_shards, len(manifest.files))))
    if manifest.num_shards >= len(manifest.files) or not manifest.files.keys() >= set(needed):
        raise ValueError(f"--{FLAG} {folder}: is not complete; the command that began it goes on "
                         "where it ended")
    for name, (size, _) in manifest.files.items():
        path = os.path.join(folder, name)  # pathlib raises for names that are too long
        actual = os.path.getsize(path) if os.path.isfile(path) else None
        if actual != size:
            what = "is missing;"
            if actual is not None:
                what = f"has {actual} bytes, expected {size}; delete it and"
            raise ValueError(f"--{FLAG} {folder}: {name} {what} run the command that wrote the "
                             "cache again")
    return manifest


def check_contents(folder, manifest, names):
    """Read files of a cache in full.

    Raises:
        ValueError: a file is not what was written.
    """
    for name in names:
        if size_and_checksum(Path(folder) / name) != manifest.files[name]:
            raise ValueError(f"--{FLAG} {folder}: {name} is damaged, its checksum is another one; "
                             "delete it and run the command that wrote the cache again")
        with reading_cache(Path(folder) / name):
            check_file(folder, manifest, name)


@contextmanager
def reading_cache(path):
    """Turn what is wrong with a file, in a block that reads it, into a DataError that names it."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, zlib.error) as error:
        raise DataError(f"--{FLAG} {path}: cannot be read, or is no file of a cache "
                        f"({reason_of(error)})") from None
