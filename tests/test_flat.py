"""flat.py: a value is the same when its tensors have become views of one buffer."""

import gc
import math
import pickle
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder
from isogloss.job import flat
from isogloss.job.flat import Flat, FlatSequence, flatten, to_device
from isogloss.projection_tools.tokenizers import Pair
from isogloss.tiles import Head, HiddenLogits, TeacherBlocks
from test_batch import spelling  # noqa: F401  a fixture
from test_rollouts import translation_of


class Range(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor | None = None


class Plan(NamedTuple):
    where: slice
    name: object
    ranges: tuple
    count: int
    flag: bool | None


@dataclass
class Anything:
    first: object
    second: object = None


def assert_same(first, second):
    """Compare two values by type, dtype, shape and every bit; a FlatSequence counts as a list."""
    if isinstance(second, FlatSequence):
        assert isinstance(first, (list, tuple, FlatSequence)) and len(first) == len(second) > 0
        second = list(second)
        first = list(first)
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and first.shape == second.shape
        assert first.contiguous().view(-1).view(torch.uint8).tolist() == (
            second.contiguous().view(-1).view(torch.uint8).tolist())
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for pair in zip(first, second):
            assert_same(*pair)
    elif is_dataclass(first):
        for entry in fields(first):
            assert_same(getattr(first, entry.name), getattr(second, entry.name))
    elif isinstance(first, np.ndarray):
        assert np.array_equal(first, second)
    else:
        assert first == second


def sent(value):
    """Return what a process makes of the bytes of a Flat that another one sends."""
    contents = pickle.loads(pickle.dumps(value.contents))
    assert contents.nbytes == len(value.buffer)
    return Flat(contents, value.buffer.clone()).value()


TENSORS = [
    torch.tensor(5), torch.arange(3), torch.zeros(2, 0, 3), torch.arange(12).view(3, 4).T,
    torch.arange(3).expand(2, 3), torch.tensor([True, False, True]),
    torch.tensor([math.nan, -0.0, math.inf]), torch.rand(3, dtype=torch.float64),
    torch.rand(5).bfloat16(), torch.tensor([1, 255], dtype=torch.uint8),
    torch.arange(7, dtype=torch.int32), torch.rand(2, 3, 4)[:, 1],
]
PLANS = [
    Plan(slice(3, 7), "a",
         (Range(torch.arange(3)), Range(torch.arange(2), torch.zeros(0))), 4, True),
    Plan(slice(None, 7), None, (Range(torch.arange(5)),), -(2**63), None),
    Plan(slice(0, 7, 2), {"b": [1]}, [], 2**70, False),
    Plan(slice(1, 1), [TENSORS[1]], (), 1, 1),
]
VALUES = {
    "tensors of all kinds": TENSORS,
    "plans": PLANS,
    "nothing": None,
    "no tensor": [1, "a", {"b": (2.5, None)}, Range(None)],
    "plans inside of plans": [Plan(slice(0, 1), torch.rand(2), tuple(PLANS), 0, None)] * 3,
    "dataclasses": Anything([Anything(torch.arange(4), np.arange(3)), Anything(math.pi, [])],
                            (PLANS, [[torch.rand(3)], "c"])),
    "empty": [torch.zeros(0), Range(torch.zeros(0, dtype=torch.long))],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name):
    first = flatten(VALUES[name])
    value = sent(first)
    assert_same(VALUES[name], value)
    again = flatten(value)  # of views and of sequences that are read item by item
    assert_same(VALUES[name], again.value())
    assert torch.equal(again.buffer, first.buffer)


@pytest.mark.parametrize("kind", ["chunks", "events", "nodes", "text", "shards"])
@pytest.mark.parametrize("pack", [False, True])
def test_a_batch_comes_back(kind, pack, tokenizers, tables, texts, spelling):  # noqa: F811
    encoders = [TextEncoder(*pair, 400) for pair in zip(tokenizers, tables)]
    terms = {"events": spelling, "nodes": translation_of(Pair.of(*tokenizers, tables=tables))}
    pairs = [PairOptions(encoders[1], terms.get(kind))]
    options = {"sequence_size": 2, "sequence_rank": 1} if kind == "shards" else {}
    collator = Collator(encoders[0], [] if kind == "text" else pairs, pack=pack, tile_mib=0.2,
                        **options)
    batch = collator(texts[:5], range(5))
    tiles = batch.student.tiles if kind == "text" else batch.teachers[0].tiles
    assert len(tiles) > 1
    assert_same(batch, sent(flatten(batch)))


def test_a_tiled_loss_reads_each_sub_tile_once(tokenizers, tables, texts, monkeypatch):
    encoders = [TextEncoder(*pair, 400) for pair in zip(tokenizers, tables)]
    collator = Collator(encoders[0], [PairOptions(encoders[1])], tile_mib=0.2)
    teacher = flatten(collator(texts[:2])).value().teachers[0]
    sizes = [len(tile.sub_tiles) for tile in teacher.tiles]
    assert sum(sizes) > len(sizes) > 1
    numbers = []
    item = flat._Reader.item
    monkeypatch.setattr(
        flat._Reader, "item", lambda reader, number: numbers.append(number) or item(reader, number))
    hidden_TH = torch.zeros(teacher.ids.numel(), 2)
    teacher_logits = HiddenLogits(hidden_TH, Head(torch.zeros(3, 2)))
    blocks = TeacherBlocks(teacher_logits, teacher.tiles)
    assert len(numbers) == len(sizes)  # tiles, and nothing in them
    for tile in teacher.tiles:
        for sub_tile in tile.sub_tiles:
            blocks(sub_tile)
    assert len(numbers) == 2 * len(sizes) + sum(sizes)


def num_plans():
    return sum(type(thing) is Plan for thing in gc.get_objects())


def test_no_item_of_a_plan_exists_before_it_is_read():
    """Thousands of them would make every pass of the garbage collector slower."""
    plans = flatten([PLANS[0]] * 1000)
    before = num_plans()
    value = to_device(plans.value(), "cpu")
    assert len(value) == 1000 and num_plans() == before
    assert value[999].ranges[1].low.tolist() == [0, 1] and value[999] is not value[999]
    assert num_plans() == before
    assert [plan.count for plan in value[998:]] == [4, 4]
    with pytest.raises(IndexError):
        value[1000]


class Copies(TorchDispatchMode):
    """Count copies to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def test_one_copy_moves_a_buffer_with_all_views():
    value = flatten(Anything(TENSORS, (PLANS, PLANS[:2]))).value()
    with Copies() as copies:
        moved = to_device(value, "meta")
        sequence = moved.second[0]
        assert copies.count == 1
        tensors = [*moved.first, sequence[0].ranges[1].low, moved.second[1][1].ranges[0].low]
        assert copies.count == 1  # views of what has moved already
    for before, tensor in zip(TENSORS, tensors):
        assert tensor.device.type == "meta"
        assert tensor.shape == before.shape and tensor.dtype == before.dtype
    offsets = {tensor.storage_offset() * tensor.element_size() for tensor in tensors[1:]}
    assert len(offsets) > 5  # each at a place of its own in the buffer
    assert all(offset % 16 == 0 for offset in offsets)  # as kernels have it from torch otherwise


def test_tensors_that_share_memory_move_once():
    """In a batch of this process they are slices of the tensors of a whole tile."""
    whole = torch.arange(24).view(4, 6)
    views = [whole[:2], whole.T[1:3], whole.flatten()[5:5], whole[3]]
    with Copies() as copies:
        moved = to_device([views, torch.zeros(3)], "meta")
    assert copies.count == 2
    for view, of_device in zip(views, moved[0]):
        assert of_device.shape == view.shape and of_device.stride() == view.stride()
        assert of_device.storage_offset() == view.storage_offset()
