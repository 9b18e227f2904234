"""columns.py: records are the same as columns, and a value when its tensors lie in one buffer."""

import math
import pickle
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cases import Calls
from isogloss.data.batch import Collator, PairOptions
from isogloss.job.columns import Columns, moved_to_device, pack
from tokens import translation_of


class Range(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor | None = None


class Plan(NamedTuple):
    where: slice
    name: object
    ranges: tuple
    count: int
    table: torch.Tensor


@dataclass
class Anything:
    first: object
    second: object = None


def assert_same(first, second):
    """Compare two values by type, dtype, shape and every bit; Columns count as a tuple."""
    first, second = [tuple(x) if isinstance(x, Columns) else x for x in (first, second)]
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and first.shape == second.shape
        assert first.reshape(-1).view(torch.uint8).tolist() == (
            second.reshape(-1).view(torch.uint8).tolist())
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


TENSORS = [
    torch.tensor(5), torch.arange(3), torch.zeros(2, 0, 3), torch.arange(12).view(3, 4).T,
    torch.arange(3).expand(2, 3), torch.tensor([True, False, True]),
    torch.tensor([math.nan, -0.0, math.inf]), torch.rand(3, dtype=torch.float64),
    torch.rand(5).bfloat16(), torch.tensor([1, 255], dtype=torch.uint8),
    torch.arange(7, dtype=torch.int32), torch.rand(2, 3, 4)[:, 1], torch.zeros(0),
]
PLANS = (
    Plan(slice(3, 7), "a", (Range(torch.arange(3)), Range(torch.arange(2), torch.zeros(1))), 4,
         torch.rand(3, 2)),
    Plan(slice(None, 7), None, (), -(2**63), torch.rand(0, 2)),
    Plan(slice(0, 7, 2), {"b": [1]}, (Range(torch.arange(0)),), 2**70, torch.rand(1, 2)),
)
RECORDS = {
    "plans": PLANS,
    "plans inside of plans": tuple(Plan(slice(0, 1), None, PLANS[:n], n, torch.rand(n, 1))
                                   for n in (2, 0, 3)),
    "records in records": tuple(Range(Range(torch.arange(n)), None) for n in range(3)),
    "no tensor": (Range(None), Range(None)),
    # what does not fit together stays as it is
    "several dtypes": (Range(torch.rand(2)), Range(torch.arange(2))),
    "several widths": (Range(torch.rand(2, 3)), Range(torch.rand(2, 4))),
    "numbers": (Range(torch.tensor(1)), Range(torch.tensor(2))),
    "several types": (Range(PLANS[0]), Range(Range(None)), Range(None)),
    "some lists": (Range([1, 2]), Range([Range(None)]), Range(())),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_the_same_as_columns(name):
    records = RECORDS[name]
    columns = Columns.of(records)
    assert_same(records, columns)
    assert_same(records[1:], columns[1:])
    assert_same(records[-1], columns[-1])
    with pytest.raises(IndexError):
        columns[len(records)]
    packed, buffer = pack(columns)
    assert_same(records, packed.value(buffer))


VALUES = {
    "tensors of all kinds": TENSORS,
    "nothing": None,
    "no tensor": [1, "a", {"b": (2.5, None)}, Range(None), ...],
    "dataclasses": Anything([Anything(torch.arange(4), np.arange(3)), Anything(math.pi, [])],
                            (PLANS, [[torch.rand(3)], "c"])),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name):
    packed, buffer = pack(VALUES[name])
    received = pickle.loads(pickle.dumps(packed))
    assert received.nbytes == len(buffer)
    assert all(first % 16 == 0 for first, *_ in received.places)  # as kernels have it from torch
    assert_same(VALUES[name], received.value(buffer.clone()))


@pytest.mark.parametrize("kind", ["chunks", "nodes", "text", "shards"])
@pytest.mark.parametrize("pack_rows", [False, True])
def test_a_batch_is_few_tensors(kind, pack_rows, encoders, texts):
    spelling = translation_of(encoders) if kind == "nodes" else None
    pairs = [PairOptions(encoders[1], spelling)]
    options = {"sequence_size": 2, "sequence_rank": 1} if kind == "shards" else {}
    collator = Collator(encoders[0], [] if kind == "text" else pairs, pack=pack_rows,
                        tile_mib=0.2, **options)
    batch = collator(texts[:5], range(5))
    tiles = batch.student.tiles if kind == "text" else batch.teachers[0].tiles
    assert len(tiles) > 1
    packed, buffer = pack(batch)
    assert len(packed.places) < 100
    assert_same(batch, packed.value(buffer))


def test_tensors_move_with_the_memory_that_they_share_by_one_copy():
    """Those of another process lie in one buffer; of a batch of this one they are slices of the
    tensors of a whole tile.
    """
    whole = torch.arange(24).view(4, 6)
    views = [whole[:2], whole.T[1:3], whole.flatten()[5:5], whole[3]]
    packed, buffer = pack(Anything(TENSORS, Columns.of(PLANS)))
    with Calls(lambda function: function is torch.ops.aten._to_copy.default) as copies:
        moved, storages = moved_to_device([views, torch.zeros(3), packed.value(buffer)], "meta")
    assert copies.count == len(storages) == 3
    for before, tensor in zip(TENSORS, moved[2].first):
        assert tensor.device.type == "meta"
        assert tensor.shape == before.shape and tensor.dtype == before.dtype
    assert moved[2].second[0].ranges[1].low.device.type == "meta"
    for view, of_device in zip(views, moved[0]):
        assert of_device.shape == view.shape and of_device.stride() == view.stride()
        assert of_device.storage_offset() == view.storage_offset()
