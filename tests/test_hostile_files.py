"""What others have made, as caches of a hub, cannot exhaust a job: one line, in bounded time."""

import json
import math
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from conftest import ROOT
from isogloss.checkpoints import base_card
from isogloss.data import chat, texts as long_texts, workers
from isogloss.inputs import load_text_encoder
from isogloss.job import trial
from isogloss.job.files import size_and_checksum
from isogloss.teachers import cache_checks, cache_files, cached, packed_rows, text_server
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.text_scores import truncate

VOCAB, TOP_K, HIDDEN = 70_000, 9, 4
LENGTHS = 5, 0, 3  # positions of the texts; the shards hold two and one
SHARD = "shard-00000.safetensors"
MANIFEST, INDEX, HEAD = cache_files.MANIFEST, cache_files.INDEX, cache_files.HEAD


# --- caches ---------------------------------------------------------------------------------------


def columns_of(kind, length, labels):
    """Return what a shard holds of the positions of a text."""
    if kind == "hidden":
        return {"hidden": torch.zeros(length, HIDDEN)}
    scored = truncate(torch.randn(length, VOCAB), TOP_K, labels)
    columns = cache_files.top_k_columns(scored, VOCAB, 8 if kind == "packed" else 16)
    if kind == "packed":
        columns["order"] = packed_rows.order_of_use(columns["ids"], columns["steps"], VOCAB)
        columns["packed"] = packed_rows.pack(
            columns.pop("ids"), columns.pop("steps"), columns["order"])
    return columns


def write_cache(folder, kind):
    """Write a cache of three texts."""
    torch.manual_seed(0)
    folder.mkdir()
    keys = torch.arange(2 * len(LENGTHS)).view(-1, 2)
    for number, texts in enumerate(((0, 1), (2,))):
        tensors = {"keys": keys[list(texts)]}
        lengths = [LENGTHS[text] for text in texts]
        tensors["starts"] = torch.tensor([0, *lengths]).cumsum(0)
        tensors["tokens"] = torch.arange(sum(lengths) + len(lengths), dtype=torch.int32)
        tensors |= columns_of(kind, lengths[0], tensors["tokens"][1 : lengths[0] + 1].long())
        if kind == "packed":
            sizes = [len(tensors["packed"]), 0][: len(texts)]
            tensors["packed_starts"] = torch.tensor([0, *sizes]).cumsum(0)
        save_file(tensors, folder / cache_files.shard_name(number))
    if kind == "hidden":
        save_file({"weight": torch.zeros(VOCAB, HIDDEN), "numbers": torch.ones(2).double()},
                  folder / HEAD)
    digest = cache_files.hashlib.sha256(keys.numpy().tobytes()).hexdigest()[:32]
    manifest = cache_files.Manifest(
        teacher="t", weights="", tokenizer="", template="", vocab=VOCAB, max_length=100,
        dtype="float32", output="hidden" if kind == "hidden" else "topk",
        top_k=0 if kind == "hidden" else TOP_K, logp_bits=8 if kind == "packed" else 16,
        temperature=1.0, data="d", data_digest=digest, holds_chats=False, num_texts=len(LENGTHS),
        texts_per_shard=2, bytes_per_position=9)
    cache_files.complete(folder, manifest)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    for kind in ("top_k", "packed", "hidden"):
        write_cache(folder / kind, kind)
    return folder


def read_cache(folder):
    """Read all of a cache as a run does; return the line with which that ends, "" without one."""
    try:
        manifest = cache_files.open_cache(folder)
        cache_files.check_contents(folder, manifest, sorted(manifest.files))
        reader = cache_files.CacheReader(folder)
        if manifest.output == "hidden":
            spec = ModelSpec(path="t", vocab=VOCAB, device=torch.device("cpu"))
            head = cached.load_head(folder, spec)
        for place in range(manifest.num_texts):
            labels = reader.tokens(place)[1:].long()
            if not len(labels):
                continue
            columns = reader.columns(place, len(labels))
            if manifest.output == "hidden":
                assert columns["hidden"].shape[1] == head.weight_VH.shape[1]
            else:
                with cache_files.reading_cache(folder):
                    cache_files.scored_logits(columns, labels, VOCAB)
    except ValueError as error:
        return str(error)
    return ""


def refresh(folder, **changes):
    """Give the manifest the sizes and checksums of the files as they are, and other changes."""
    plain = json.loads((folder / MANIFEST).read_text())
    for name in plain["files"]:
        plain["files"][name] = size_and_checksum(folder / name)
    (folder / MANIFEST).write_text(json.dumps(plain | changes))


def says(**changes):
    """Return a change of a cache: what its manifest says."""
    return lambda folder: refresh(folder, **changes)


def is_text(text):
    return lambda folder: (folder / MANIFEST).write_text(text)


def with_file(name, size=(1, 1)):
    """Return a change of a cache: its manifest names one more file."""
    def change(folder):
        files = json.loads((folder / MANIFEST).read_text())["files"]
        refresh(folder, files=files | {name: list(size)})

    return change


def tensors(name, **changes):
    """Return a change of a cache: functions of tensors of a file; one that gives None drops it."""
    def change(folder):
        content = load_file(folder / name)
        for key, function in changes.items():
            content[key] = function(content[key])
        content = {key: value.contiguous() for key, value in content.items() if value is not None}
        (folder / name).write_bytes(save(content))
        refresh(folder)

    return change


def header(text, size=None):
    """Return a change of a cache: the header of a shard, and how long it says that it is."""
    def change(folder):
        text_bytes = text.encode()
        length = struct.pack("<Q", len(text_bytes) if size is None else size)
        (folder / SHARD).write_bytes(length + text_bytes + bytes(1000))
        refresh(folder)

    return change


def set_to(value, place=0):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[place] = value
        return tensor

    return change


def squeezed(*columns):
    """Return a change of what is packed: numbers, each column as zlib streams of their planes."""
    def change(_):
        packed = b""
        for numbers in columns:
            planes = np.asarray(numbers, "<u4").view(np.uint8).reshape(-1, 4).T
            packed += zlib.compress(planes.tobytes())
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    return change


def packed(*columns):
    """Return a change of a cache: what is packed of the first text."""
    def change(folder):
        content = squeezed(*columns)(None)
        tensors(SHARD, packed=lambda _: content,
                packed_starts=lambda starts: torch.tensor([0, len(content), len(content)]))(folder)

    return change


WRONG = "is damaged, or of another version"
NO_FILE = "is no file of a cache"
# {what is wrong: (kind of the cache, change of a copy, part of the line)}
CACHES = {
    "a long manifest": ("top_k", is_text(" " * (2**24 + 1)), f"{WRONG} (has more than"),
    "a deep manifest": ("top_k", is_text("[" * 10**6), WRONG),
    "a manifest that is a list": ("top_k", is_text("[[1, 2], [3, 4]]"), WRONG),
    "a manifest that is a number": ("top_k", is_text("7"), WRONG),
    "tokens as text": ("top_k", says(top_k="9"), f"{WRONG} (top_k '9'"),
    "a truth value": ("top_k", says(num_texts=True), f"{WRONG} (num_texts True"),
    "fewer texts than none": ("top_k", says(num_texts=-1), f"{WRONG} (num_texts -1"),
    "shards of nothing": ("top_k", says(texts_per_shard=0), WRONG),
    "no temperature": ("top_k", says(temperature=math.nan), f"{WRONG} (temperature nan"),
    "a large vocabulary": ("top_k", says(vocab=2**40), WRONG),
    "more tokens than there are": ("top_k", says(top_k=VOCAB + 1), WRONG),
    "many shards": ("top_k", says(num_texts=2**62, texts_per_shard=1), "is not complete"),
    "files that are a list": ("top_k", says(files=[]), f"{WRONG} (files []"),
    "no index": ("top_k", says(files={SHARD: [1, 1]}), "is not complete"),
    "a file elsewhere": ("top_k", with_file("../../../proc/kcore"), f"{WRONG} (the file"),
    "an absolute file": ("top_k", with_file("/proc/kcore"), f"{WRONG} (the file"),
    "a long name": ("top_k", with_file("x" * 5000), "is missing"),
    "a name that is none": ("top_k", with_file("a\0b"), "is missing"),
    "a size as text": ("top_k", with_file("x", ["1", 2]), f"{WRONG} (the size"),
    "a header of 2 ** 60 bytes": ("top_k", header("{}", 2**60), NO_FILE),
    "a header that is too long": ("top_k", header("{}", 2000), NO_FILE),
    "a deep header": ("top_k", header("[" * 10**6), NO_FILE),
    "a tensor beyond the file": ("top_k", header(
        '{"tokens": {"dtype": "I32", "shape": [10], "data_offsets": [0, 99999]}}'), NO_FILE),
    "a shape beyond the bytes": ("top_k", header(
        '{"tokens": {"dtype": "I32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}'),
        NO_FILE),
    "an index without sizes": ("top_k", tensors(INDEX, size=lambda _: None), "its size is absent"),
    "an index of floats": ("top_k", tensors(INDEX, start=torch.Tensor.double), "its start is F64"),
    "an index of one text": ("top_k", tensors(INDEX, shard=lambda x: x[:1]), "shard is I32 [1]"),
    "a long text": ("top_k", tensors(INDEX, size=set_to(2**31 - 1)), "its size goes from"),
    "a text beyond the shard": ("top_k", tensors(INDEX, size=set_to(100)), "tokens of a text"),
    "a place before the shard": ("top_k", tensors(INDEX, start=set_to(-5)), "its start goes from"),
    "a place behind the shard": ("top_k", tensors(INDEX, start=set_to(2**60)), NO_FILE),
    "a shard that is none": ("top_k", tensors(INDEX, shard=set_to(7)), "its shard goes from"),
    "a text before the first": ("top_k", tensors(INDEX, text=set_to(-1)), "its text goes from"),
    "tokens beyond the vocabulary": (
        "top_k", tensors(SHARD, high=lambda x: torch.full_like(x, 255)), "token ids from"),
    "fewer tokens": ("top_k", tensors(SHARD, low=lambda x: x[:, :3]), "its low is U16 [5, 3]"),
    "other types": ("top_k", tensors(SHARD, logp=torch.Tensor.double), "its logp is F64"),
    "no scores": ("top_k", tensors(SHARD, scores=lambda _: None), "its scores is absent"),
    "a rest for each token": (
        "top_k", tensors(SHARD, rest=lambda x: x[:, None]), "its rest is F32 [5, 1]"),
    "a token alone": ("top_k", tensors(SHARD, tokens=lambda x: x[0]), NO_FILE),
    "no tokens": ("top_k", tensors(SHARD, tokens=lambda _: None), NO_FILE),
    "a bomb of zeros": ("packed", packed(np.zeros(2**24), [1]), "more than 45 packed numbers"),
    "numbers without steps": ("packed", packed([1, 2, 3], [1]), "packed tokens of other positions"),
    "a place far behind": ("packed", packed([2**32 - 1], [1]), "packed tokens of other positions"),
    "too many of a position": ("packed", packed([0] * 10, [1] * 10), "more than 9 packed tokens"),
    "noise": ("packed", tensors(SHARD, packed=lambda x: x.flip(0)), NO_FILE),
    "a text before the first byte": (
        "packed", tensors(SHARD, packed_starts=lambda x: x - 10), NO_FILE),
    "a text behind the last byte": (
        "packed", tensors(SHARD, packed_starts=lambda x: x + 2**40), NO_FILE),
    "an order of no tokens": (
        "packed", tensors(SHARD, order=lambda x: x + VOCAB), "token ids from"),
    "a short order": ("packed", tensors(SHARD, order=lambda x: x[:1]), "its order is I32 [1]"),
    "no head": ("hidden", tensors(HEAD, weight=lambda _: None), "its weight is absent"),
    "a small vocabulary": (
        "hidden", lambda folder: (tensors(HEAD, weight=lambda x: x[:9])(folder),
                                  refresh(folder, vocab=9)), "a head of 9 tokens"),
    "another width": ("hidden", tensors(HEAD, weight=lambda x: x[:, :2]), "its hidden is F32"),
    "a head of others": ("hidden", tensors(HEAD, weight=lambda x: x[:9]), "its weight is F32 [9"),
    "three numbers": ("hidden", tensors(HEAD, numbers=lambda _: torch.ones(3).double()),
                      "its numbers is F64 [3]"),
}


@pytest.mark.parametrize("kind", ["top_k", "packed", "hidden"])
def test_a_good_cache_is_read(caches, kind):
    assert read_cache(caches / kind) == ""


@pytest.mark.parametrize("case", CACHES)
def test_a_forged_cache_ends_with_one_line_in_bounds(caches, tmp_path, case):
    """Its checksums are right: whoever forges a cache writes its manifest."""
    kind, change, expected = CACHES[case]
    copy = tmp_path / "cache"
    copy.mkdir()
    for path in (caches / kind).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    change(copy)
    [line] = trial.in_bounds([("reading", lambda: read_cache(copy))])
    assert expected in line and "\n" not in line, line
    assert line.startswith("--teacher_cache ")


# --- cards ----------------------------------------------------------------------------------------

# every line stands for ten times as much as the one before
LAUGHS = "a0: &a0 [b]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9))
MERGED = "a0: &a0 {b: c}\n" + "".join(
    f"a{n + 1}: &a{n + 1} {{<<: [{', '.join([f'*a{n}'] * 10)}]}}\n" for n in range(9))
# {what is wrong: (front of the card, what is read of it)}
CARDS = {
    "lists of lists": (f"license: mit\n{LAUGHS}language: *a9", {}),
    "objects of objects": (f"license: mit\n{MERGED}", {}),
    "lists in lists": ("license: mit\na: " + "[" * 60_000, {}),
    "long": ("license: mit\na: " + "b" * 2**24, {}),
    "many keys": ("license: mit\n" + "".join(f"a{n}: b\n" for n in range(7_000)),
                  {"license": "mit"}),
    "code": ("license: !!python/object/apply:os.system [exit]", {}),
    "words to a terminal": ("license: 'llama3 \\e[2J'\nlicense_name: \"llama3 \\e[2J\"",
                            {"license": "llama3 \\e[2J", "license_name": "llama3 \ufffd[2J"}),
    "an object as a license": ("license: {a: b}\nlanguage: [en, {a: b}, 7]", {"language": ["en"]}),
    "a long license": ("license: " + "x" * 9_000, {"license": "x" * 200}),
    "many languages": (f"language: [{'en, ' * 9_000}]", {"language": ["en"] * 200}),
    "no object": ("- license", {}),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_of_others_is_read_in_bounds(tmp_path, case):
    front, expected = CARDS[case]
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    base_card.card_of.cache_clear()
    assert trial.in_bounds([("reading", lambda: base_card.card_of(str(tmp_path)))]) == [expected]


def test_a_card_that_has_no_end_is_read_to_its_bound(tmp_path):
    """A file with a hole, which takes no room."""
    with open(tmp_path / "README.md", "wb") as file:
        file.write(b"---\nlicense: mit\n---\n")
        file.truncate(2**36)
    [card] = trial.in_bounds([("reading", lambda: base_card.card_of(str(tmp_path)))])
    assert card == {"license": "mit"}


# --- JSON that is nested too deep -----------------------------------------------------------------


@pytest.mark.parametrize("file", ["adapter_config.json", "config.json", "generation_config.json",
                                  "tokenizer_config.json", "tokenizer.json"])
def test_deep_files_of_a_model_end_with_one_line(models, tmp_path, file):
    model = shutil.copytree(models[0], tmp_path / "model")
    if file == "adapter_config.json":
        (model / "config.json").unlink()
    (model / file).write_text("[" * 10**6)
    with pytest.raises(ValueError, match=f"--student {model}: .*cannot be (read|loaded)") as error:
        load_text_encoder("student", str(model), 100)
    assert "\n" not in str(error.value)


# --- the list -------------------------------------------------------------------------------------

# {what of others is checked, of docs/results.md: the numbers there}
LIST = {
    "a model's chat template, in every command":
        [trial.TRIAL_SECONDS, trial.TRIAL_BYTES >> 30, chat.CHATS_TO_TRY],
    "what it writes of later chats":
        [long_texts.MOST_CHARACTERS, workers.TRAINING_TIMEOUT.total_seconds() // 60],
    "a model's code": [],
    "a model's weights": [],
    "a cache of a hub": [cache_checks.MOST_CHARACTERS, packed_rows.MOST_NUMBERS],
    "a base model's card": [base_card.MOST_CARD],
    "a projection": [],
    "tables in `ISOGLOSS_CACHE`": [],
    "a checkpoint": [],
    "a server's answer": [text_server.MOST_BYTES, text_server.BYTES_PER_ENTRY],
    "a program that a student writes": [],
}


def test_what_is_checked_of_others_is_listed_with_its_bounds_and_tests():
    """Nothing leaves the list without a change here."""
    listed = {}
    for line in (ROOT / "docs" / "results.md").read_text().splitlines():
        found = re.fullmatch(r"\| (.*) \| (.*) \| \[(test_\w+.py)\]\(.*\) `(test_\w+)` \|", line)
        if found:
            what, bounds, file, test = found.groups()
            listed[what] = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", bounds)]
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), what
    assert listed == LIST
