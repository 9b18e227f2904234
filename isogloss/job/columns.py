"""Hold many small records as columns, and send a value whose tensors lie in one buffer.

A batch of 8,192 tokens has hundreds of sub-tiles, each with some 40 tensors: as `Columns` they are
one tensor a field, and the views of a sub-tile exist while a loss reads it.

`pack` pickles a value without its tensors, which it lays out in one buffer: one read receives it,
and `moved_to_device` moves it by one copy.

Tests: tests/test_columns.py.
"""

import io
import pickle
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

ALIGNMENT = 16  # bytes between which every tensor of a buffer begins, as kernels read so many

# --- columns --------------------------------------------------------------------------------------


class Columns(Sequence):
    """Hold named tuples of one type; each is made when it is read, and anew each time.

    Args:
        type: of the records.
        fields: for each of their fields the values of all records.
        numbers: range of those that are in this sequence.
    """

    def __init__(self, type, fields, numbers):
        self.type = type
        self.fields = fields
        self.numbers = numbers

    @classmethod
    def of(cls, records):
        """Return the records as Columns; as they are where there is none."""
        if not len(records):
            return records
        fields = [_column_of(values) for values in zip(*records)]
        return cls(type(records[0]), fields, range(len(records)))

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Columns(self.type, self.fields, self.numbers[index])
        number = self.numbers[index]
        return self.type(*[column[number] for column in self.fields])


def _column_of(values):
    """Return what holds the values of one field."""
    first = next((value for value in values if value is not None), None)
    if isinstance(first, torch.Tensor):
        shapes = {(value.dtype, value.shape[1:]) for value in values if value is not None}
        return Pieces(values) if first.dim() and len(shapes) == 1 else values
    if not isinstance(first, Sequence) or None in values:
        return values
    if _is_record(first):
        return Columns.of(values) if len(set(map(type, values))) == 1 else values
    return Lists(values) if all(map(_is_record, chain(*values))) else values


def _is_record(value):
    return hasattr(value, "_fields")


class Pieces(Sequence):
    """Hold tensors that differ in their first size alone as one; a size of -1 stands for None."""

    def __init__(self, tensors):
        present = [tensor for tensor in tensors if tensor is not None]
        self.values = torch.cat(present)
        # not len(tensor), which is slow
        self.sizes = array("q", [-1 if tensor is None else tensor.size(0) for tensor in tensors])
        self.starts = array("q", accumulate([max(0, size) for size in self.sizes], initial=0))

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, number):
        size = self.sizes[number]
        return None if size < 0 else self.values.narrow(0, self.starts[number], size)


class Lists(Sequence):
    """Hold sequences of named tuples as Columns of all of them."""

    def __init__(self, lists):
        self.records = Columns.of(list(chain(*lists)))
        self.ends = array("q", accumulate(map(len, lists)))

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, number):
        start = self.ends[number - 1] if number else 0
        return self.records[start : self.ends[number]]


# --- a value and its tensors ----------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Leave tensors out of what is pickled, and list them."""

    def __init__(self, file):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = []

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Put tensors where they were left out."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number):
        return self.tensors[number]


def take_apart(value):
    """Return (a value without its tensors, pickled; its tensors)."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(rest, tensors):
    """Return the value of what `take_apart` returns, with these tensors."""
    return _Unpickler(io.BytesIO(rest), tensors).load()


class Packed(NamedTuple):
    """Describe a value whose tensors lie in one buffer; made to be pickled.

    rest: the value without its tensors.
    places: (first byte, dtype, shape) of each tensor.
    nbytes: of the buffer.
    """

    rest: bytes
    places: list
    nbytes: int

    def value(self, buffer):
        """Return the value, its tensors as views of the (nbytes,) uint8 buffer."""
        tensors = []
        for first, dtype, shape in self.places:
            end = first + dtype.itemsize * shape.numel()
            tensors.append(buffer[first:end].view(dtype).view(shape))
        return put_together(self.rest, tensors)


def pack(value, pinned=False):
    """Return (Packed, buffer) of a value, whose tensors are on the CPU and get no gradient.

    Args:
        pinned: the buffer is of pinned memory, which a GPU copies beside its work.
    """
    rest, tensors = take_apart(value)
    places = []
    nbytes = 0
    for tensor in tensors:
        places.append((nbytes, tensor.dtype, tensor.shape))
        nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    for (first, *_), tensor in zip(places, tensors):
        view = buffer[first : first + tensor.nbytes].view(tensor.dtype)
        view.copy_(tensor.reshape(-1))
    return Packed(rest, places, nbytes), buffer


# --- to a device ----------------------------------------------------------------------------------


def to_device(value, device):
    """Return a value with its tensors moved, and a copy of everything else.

    Tensors that share memory still do so afterwards: one copy moves all views of a buffer.
    """
    return moved_to_device(value, device)[0]


def moved_to_device(value, device):
    """Return (what `to_device` does, the memory that its tensors are views of).

    The memory is a list of (n,) uint8 tensors, those that were copied.
    """
    device = torch.device(device)
    storages = {}  # {address of a storage on the CPU: it on the device}
    moved = []
    rest, tensors = take_apart(value)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if tensor.device == device or not address:  # there, or nothing to copy
            moved.append(tensor.to(device))
            continue
        if address not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[address] = whole.to(device, non_blocking=True)
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        moved.append(view.set_(storages[address].untyped_storage(), tensor.storage_offset(),
                               tensor.shape, tensor.stride()))
    return put_together(rest, moved), list(storages.values())
