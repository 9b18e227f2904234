"""Lay all tensors of a value out in one buffer, and rebuild the value as views of it.

A batch of 8,192 tokens has thousands of small tensors: ids, labels, and for every sub-tile the
nodes of its loss.  As one buffer it takes one read to receive and one copy to move to a device.

`flatten` walks over dataclasses, named tuples, lists and tuples.  What it meets there goes to

- the buffer, if it is a tensor, beside all others of its dtype;
- the numbers, if it is an integer or a slice; so do the sizes of tensors;
- the objects, which are pickled, if it is anything else.

A layout tells how these make up the value again.  Sub-tiles are alike, so few layouts serve all.
A list of named tuples comes back as a `FlatSequence`, which makes an item when it is read: the
thousands of views of a plan exist for one sub-tile at a time, so that receiving a batch costs
little, and the garbage collector has nothing to look at.

Tests: tests/test_flat.py.  Measured by `git show fa267fb:benchmarks/batches.py`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch

INT64 = range(-(2**63), 2**63)
# Bytes between which every tensor begins.  Kernels read so many at once, and Triton compiles them
# anew for every tensor among their arguments that may be aligned to less.
ALIGNMENT = 16

# --- layouts --------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """Take the next tensor of a dtype; unless it has one dimension, numbers are its sizes."""

    dtype: torch.dtype
    num_dims: int


class IntegerLayout(NamedTuple):
    """Take a number."""


class SliceLayout(NamedTuple):
    """Take two numbers, the start and the stop of a slice."""


class ConstantLayout(NamedTuple):
    """Take nothing: None, True or False is part of the layout."""

    value: bool | None


class ObjectLayout(NamedTuple):
    """Take a number, that of an object."""


class FieldsLayout(NamedTuple):
    """Make a dataclass, a named tuple, a list or a tuple of its items.

    type: the class.
    items: the layout of each of them.
    """

    type: type
    items: tuple


class SequenceLayout(NamedTuple):
    """Take two numbers, the first item and the length of a FlatSequence."""


class ItemLayout(NamedTuple):
    """Describe the whole value, or an item of a FlatSequence.

    value: one of the layouts above.
    num_tensors: ((dtype, number of the tensors that it takes), ...).
    num_numbers: that it takes, and before them, for every dtype, the first element of its tensors
        and of each the number of elements and of those that pad it.
    """

    value: Any
    num_tensors: tuple
    num_numbers: int


class Contents(NamedTuple):
    """Describe the buffer of a value; made to be pickled.

    layouts: the distinct ItemLayouts.
    numbers: of all items, one after the other.
    items: (layout, first number) of every item of every FlatSequence and, last, of the value.
    objects: whatever is neither tensor nor number.
    num_elements: {dtype: elements of the buffer, padding included}, in their order.
    """

    layouts: list
    numbers: array
    items: array
    objects: list
    num_elements: dict

    @property
    def nbytes(self):
        """Return the bytes of the buffer."""
        return sum(dtype.itemsize * num for dtype, num in self.num_elements.items())


class Flat(NamedTuple):
    """Hold a value as one buffer.

    contents: Contents.
    buffer: (n,) uint8.
    """

    contents: Contents
    buffer: torch.Tensor

    def value(self):
        """Return the value, its tensors as views of the buffer."""
        reader = _Reader(self.contents, self.buffer)
        return reader.item(reader.num_items - 1)


# --- a value to a buffer --------------------------------------------------------------------------


def flatten(value):
    """Return the Flat of a value, whose tensors are on the CPU and get no gradient."""
    writer = _Writer()
    writer.items.extend(writer.item(value))
    blocks = [torch.empty(0, dtype=torch.uint8)]
    for dtype in writer.num_elements:
        blocks.append(torch.cat(writer.tensors[dtype]).view(torch.uint8))
    buffer = torch.cat(blocks)
    contents = Contents(list(writer.layouts), writer.numbers, writer.items, writer.objects,
                        writer.num_elements)
    return Flat(contents, buffer)


class _Item:
    """Collect what one item takes: {dtype: (n,) tensors}, and numbers."""

    def __init__(self):
        self.tensors = {}
        self.numbers = []


class _Writer:
    """Collect the tensors of all items by dtype, and the other fields of Contents."""

    def __init__(self):
        self.tensors = {}
        self.num_elements = {}
        self.layouts = {}  # {ItemLayout: its number}
        self.numbers = array("q")
        self.items = array("q")
        self.objects = []

    def item(self, value):
        """Write a value as an item; return (number of its layout, its first number)."""
        item = _Item()
        layout = self.layout(value, item)  # items inside of it are written before it
        first_number = len(self.numbers)
        num_tensors = []
        for dtype, tensors in item.tensors.items():
            sizes = []
            padded = self.tensors.setdefault(dtype, [])
            multiple = ALIGNMENT // dtype.itemsize
            zeros = torch.zeros(multiple, dtype=dtype)
            for tensor in tensors:
                size = tensor.numel()
                padding = -size % multiple
                sizes += [size, padding]
                padded.append(tensor)
                if padding:
                    padded.append(zeros[:padding])
            start = self.num_elements.get(dtype, 0)
            self.numbers.append(start)
            self.numbers.extend(sizes)
            self.num_elements[dtype] = start + sum(sizes)
            num_tensors.append((dtype, len(tensors)))
        self.numbers.extend(item.numbers)
        layout = ItemLayout(layout, tuple(num_tensors), len(item.numbers))
        return self.layouts.setdefault(layout, len(self.layouts)), first_number

    def layout(self, value, item):
        """Let an item take what a value holds; return the layout of the value."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, item)
        if value is None or value is True or value is False:
            return ConstantLayout(value)
        if isinstance(value, int) and value in INT64:
            item.numbers.append(value)
            return IntegerLayout()
        if isinstance(value, slice) and is_simple(value):
            item.numbers += [value.start, value.stop]
            return SliceLayout()
        if is_named_tuple(value):
            return FieldsLayout(type(value), self.layouts_of(value, item))
        if holds_tensors(value):
            return self.container(value, item)
        item.numbers.append(len(self.objects))
        self.objects.append(value)
        return ObjectLayout()

    def tensor(self, tensor, item):
        num_dims = tensor.dim()
        if num_dims != 1:
            item.numbers += tensor.shape
            tensor = tensor.reshape(-1)
        item.tensors.setdefault(tensor.dtype, []).append(tensor)
        return TensorLayout(tensor.dtype, num_dims)

    def container(self, value, item):
        if is_dataclass(value):
            return FieldsLayout(type(value), self.layouts_of(field_values(value), item))
        if not all(map(is_named_tuple, value)):
            return FieldsLayout(type(value), self.layouts_of(value, item))
        entries = [self.item(entry) for entry in value]
        item.numbers += [len(self.items) // 2, len(entries)]
        for entry in entries:
            self.items.extend(entry)
        return SequenceLayout()

    def layouts_of(self, values, item):
        return tuple([self.layout(value, item) for value in values])


def is_named_tuple(value):
    return hasattr(value, "_fields")


def is_simple(value):
    """Tell whether a slice is start:stop."""
    return value.step is None and isinstance(value.start, int) and isinstance(value.stop, int)


def field_values(value):
    """List the values of a dataclass's fields."""
    return [getattr(value, entry.name) for entry in fields(value)]


def holds_tensors(value):
    """Tell whether there is a tensor in dataclasses, named tuples, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple, FlatSequence)):
        return any(map(holds_tensors, value))
    return is_dataclass(value) and any(map(holds_tensors, field_values(value)))


# --- a buffer to the value ------------------------------------------------------------------------


class _Reader:
    """Make items of a buffer.

    Attributes:
        contents: Contents.
        buffer: (n,) uint8.
        blocks: {dtype: (n,) its part of the buffer}.
        num_items: of all sequences, and the value.
    """

    def __init__(self, contents, buffer):
        self.contents = contents
        self.buffer = buffer
        self.blocks = {}
        start = 0
        for dtype, num in contents.num_elements.items():
            end = start + num * dtype.itemsize
            self.blocks[dtype] = buffer[start:end].view(dtype)
            start = end
        self.num_items = len(contents.items) // 2
        self.makers = [_maker(layout.value) for layout in contents.layouts]

    def item(self, number):
        """Return an item."""
        layout_number, position = self.contents.items[2 * number : 2 * number + 2]
        layout = self.contents.layouts[layout_number]
        numbers = self.contents.numbers
        tensors = {}
        for dtype, count in layout.num_tensors:
            start, *sizes = numbers[position : position + 1 + 2 * count]
            # one call for all views, padding included, takes less time than one for each
            block = self.blocks[dtype][start : start + sum(sizes)]
            tensors[dtype] = iter(block.split_with_sizes(sizes)[::2])
            position += 1 + 2 * count
        numbers = iter(numbers[position : position + layout.num_numbers])
        return self.makers[layout_number](_Source(self, tensors, numbers))


class _Source(NamedTuple):
    """Give the parts of one item in order.

    reader: _Reader.
    tensors: {dtype: iterator over its tensors}.
    numbers: iterator over its numbers.
    """

    reader: _Reader
    tensors: dict
    numbers: Any


def _maker(layout):
    """Return the function that makes what a layout describes of a _Source."""
    return MAKERS[type(layout)](layout)


def _make_tensor(layout):
    dtype, num_dims = layout
    if num_dims == 1:
        return lambda source: next(source.tensors[dtype])

    def make(source):
        shape = [next(source.numbers) for _ in range(num_dims)]
        return next(source.tensors[dtype]).view(shape)

    return make


def _make_fields(layout):
    makers = [_maker(item) for item in layout.items]
    if layout.type in (list, tuple):
        return lambda source: layout.type([make(source) for make in makers])
    return lambda source: layout.type(*[make(source) for make in makers])


def _make_sequence(_):
    def make(source):
        first = next(source.numbers)
        return FlatSequence(source.reader, range(first, first + next(source.numbers)))

    return make


MAKERS = {
    TensorLayout: _make_tensor,
    IntegerLayout: lambda _: lambda source: next(source.numbers),
    SliceLayout: lambda _: lambda source: slice(next(source.numbers), next(source.numbers)),
    ConstantLayout: lambda layout: lambda _: layout.value,
    ObjectLayout: lambda _: lambda source: source.reader.contents.objects[next(source.numbers)],
    FieldsLayout: _make_fields,
    SequenceLayout: _make_sequence,
}


class FlatSequence(Sequence):
    """Make named tuples of a buffer, each when it is read, and anew each time.

    Args:
        reader: _Reader.
        items: range of the numbers of its items.
    """

    def __init__(self, reader, items):
        self.reader = reader
        self.items = items

    def of(self, reader):
        """Return the same items of another reader."""
        return FlatSequence(reader, self.items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.reader.item(number) for number in self.items[index]]
        return self.reader.item(self.items[index])


# --- to a device ----------------------------------------------------------------------------------


def to_device(value, device):
    """Move the tensors in dataclasses, named tuples and lists; leave everything else as it is.

    Tensors that share memory still do so afterwards: one copy moves all views of a buffer.
    """
    return moved_to_device(value, device)[0]


def moved_to_device(value, device):
    """Return (what `to_device` does, the memory that its tensors are views of).

    The memory is a list of (n,) uint8 tensors, those that were copied.
    """
    mover = _Mover(torch.device(device))
    return mover.moved(value), list(mover.storages.values())


class _Mover:
    """Move tensors to a device.

    Attributes:
        device: torch.device.
        storages: {address of a storage on the CPU: it on the device, as (n,) uint8}.
        readers: {id: _Reader of the moved buffer}.
    """

    def __init__(self, device):
        self.device = device
        self.storages = {}
        self.readers = {}

    def moved(self, value):
        """Return a value, its tensors on the device."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, FlatSequence):
            return value.of(self.reader(value.reader))
        if is_named_tuple(value):
            return type(value)(*map(self.moved, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.moved, value))
        if is_dataclass(value):
            return type(value)(*map(self.moved, field_values(value)))
        return value

    def reader(self, reader):
        if id(reader) not in self.readers:
            self.readers[id(reader)] = _Reader(reader.contents, self.tensor(reader.buffer))
        return self.readers[id(reader)]

    def tensor(self, tensor):
        """Return a tensor, as a view of its storage, which moves once."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if tensor.device == self.device or not address:  # there, or nothing to copy
            return tensor.to(self.device)
        if address not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.storages[address] = whole.to(self.device, non_blocking=True)
        moved = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return moved.set_(self.storages[address].untyped_storage(), tensor.storage_offset(),
                          tensor.shape, tensor.stride())
