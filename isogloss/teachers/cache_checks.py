"""Check that the files of a cache hold what a cache holds: it may come from a hub, by anyone.

What is checked is all that decides how much memory and time reading takes, and which memory it
reaches: types, shapes, places and ids.  The numbers themselves are the teacher's word.

Shapes: T texts and N positions of a shard, K kept tokens, V vocabulary.
Tests: tests/test_hostile_files.py.
"""

import re
from dataclasses import fields
from pathlib import Path

from safetensors import safe_open

MOST_CHARACTERS = 2**24  # of a manifest; of 200,000 shards it has fewer
FLOATS = "F64", "F32", "F16", "BF16"
TYPES = {int: (int,), float: (int, float)}  # what JSON may have for a field of a manifest
LOW_BITS = 16  # of an id are stored together, the others bit by bit


def read_bounded(path, most=MOST_CHARACTERS):
    """Return the text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than `most` characters, or is no UTF-8.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"has more than {most} characters")
    return text


def check_manifest(plain, kind):
    """Raise a ValueError where {field: value} are not those of the dataclass of manifests."""
    if plain.keys() != {field.name for field in fields(kind)}:
        raise ValueError("other fields")
    for field in fields(kind):
        value = plain[field.name]
        if type(value) not in TYPES.get(field.type, (field.type,)):
            raise ValueError(f"{field.name} {value!r:.40}")
        if field.type in TYPES and not 0 <= value < 2**63:
            raise ValueError(f"{field.name} {value!r:.40}")
    if not (plain["temperature"] and plain["texts_per_shard"]):
        raise ValueError("a zero")
    if max(plain["vocab"], plain["max_length"]) >= 2**31 or plain["top_k"] > plain["vocab"]:
        raise ValueError("sizes that do not fit")
    for name, size in plain["files"].items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"the file {name!r:.40}")
        if type(size) is not list or [type(number) for number in size] != [int, int]:
            raise ValueError(f"the size {size!r:.40}")


# --- tensors --------------------------------------------------------------------------------------


def check_file(folder, manifest, name):
    """Raise a ValueError where a file of a cache, if it has tensors, has others than a cache.

    Raises:
        SafetensorError: it is no safetensors file.
    """
    if not name.endswith(".safetensors"):
        return
    shapes = _shapes(Path(folder, name))
    layout = _layout(name, manifest, shapes)
    if "hidden" in layout:
        of_head = _shapes(Path(folder, "head.safetensors"))
        layout["hidden"] += of_head.get("weight", ("", 0))[-1:]
    for key, (types, *lengths) in layout.items():
        its_type, *its_lengths = shapes.get(key, ("absent",))
        fits = [length in (None, its) for length, its in zip(lengths, its_lengths)]
        if its_type not in types or len(lengths) != len(its_lengths) or not all(fits):
            raise ValueError(f"its {key} is {its_type} {its_lengths}, expected {types} {lengths}")


def _shapes(path):
    """Return {name: (type, *lengths)} of the tensors of a file."""
    shapes = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # the file itself cannot be iterated
            tensor = file.get_slice(name)
            shapes[name] = tensor.get_dtype(), *tensor.get_shape()
    return shapes


def _layout(name, manifest, shapes):
    """Return {name: (types, length of each axis, None: any)} of the tensors of a file.

    Args:
        shapes: see `_shapes`.
    """
    num_texts = manifest.num_texts
    if name == "index.safetensors":
        return {"keys": (["I64"], num_texts, 2), "shard": (["I32"], num_texts),
                "start": (["I64"], num_texts), "size": (["I32"], num_texts),
                "text": (["I32"], num_texts)}
    if name == "head.safetensors":
        layout = {"weight": (FLOATS, manifest.vocab, None), "numbers": (["F64"], 2)}
        return layout | ({"bias": (FLOATS, manifest.vocab)} if "bias" in shapes else {})
    number = re.fullmatch(r"shard-(\d+)\.safetensors", name)
    return _shard_layout(int(number[1]), manifest, shapes) if number else {}


def _shard_layout(number, manifest, shapes):
    V, K = manifest.vocab, manifest.top_k
    T = min(manifest.texts_per_shard, manifest.num_texts - number * manifest.texts_per_shard)
    _, num_tokens, *_ = *shapes.get("tokens", ()), 0, 0
    N = num_tokens - T  # of a text without positions a token stands there, too
    layout = {"keys": (["I64"], T, 2), "starts": (["I64"], T + 1), "tokens": (["I32"], num_tokens)}
    if not N:
        return layout
    if manifest.output == "hidden":
        return layout | {"hidden": (FLOATS, N)}
    if manifest.logp_bits == 8:
        return layout | {
            "label_logp": (["F32"], N), "numbers": (["F16"], N, 5), "order": (["I32"], V),
            "packed": (["U8"], None), "packed_starts": (["I64"], T + 1)}
    num_high = max((V - 1).bit_length() - LOW_BITS, 0)
    layout |= {"rest": (["F32"], N), "total": (["F32"], N), "scores": (["F32"], N, 4),
               "low": (["U16"], N, K), "high": (["U8"], N, num_high * -(-K // 8)),
               "logp": (["U16" if manifest.logp_bits == 16 else "F32"], N, K)}
    if manifest.temperature != 1:
        layout["plain_rest"] = (["F32"], N)
    if manifest.sampled:
        layout["drawn"] = (["I32"], N)
    return layout


def check_index(index, manifest):
    """Raise a ValueError where an index names places that no shard has."""
    limits = {"shard": manifest.num_shards, "start": 2**62, "size": manifest.max_length + 1,
              "text": manifest.texts_per_shard}
    for name, limit in limits.items():
        values = index[name]
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit:
            raise ValueError(f"its {name} goes from {int(values.min())} to {int(values.max())}")


def check_ids(ids, vocab):
    """Raise a ValueError for ids that are no tokens; -1 stands for none."""
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"token ids from {int(ids.min())} to {int(ids.max())} of {vocab}")
