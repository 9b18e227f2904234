"""Let the processes of a node see one tensor in the same memory: CUDA IPC, shared memory on CPU.

    handle = publish(tensor)          # in one process
    text = json.dumps(handle.to_plain())             # a few hundred bytes, to send
    tensor = attach(Handle.from_plain(json.loads(text)))  # in others: the same memory

    writer = TensorWriter(readers=2)  # one tensor per step; send writer.handle to both readers
    writer.put(tensor)
    reader = TensorReader(handle, reader=0)
    with reader.take() as tensor: ...          # the same memory, until the block ends
    a, b = reader.next(), reader.next()        # or several, until reader.release()

Shared memory has no name: it is a file descriptor that readers open through /proc.  It disappears
with the last process that maps it, however that process ends, so nothing is ever left in /dev/shm.
CUDA buffers are allocated for the purpose, so neither torch's allocator nor its reference counts
take part.  Linux only; all processes belong to one user.

What one process says to another is JSON.  Nothing is ever unpickled, so whoever can write to the
channel that carries a handle cannot run code here.

Needs torch only.  Copy this file into your own repository.  Tests: tests/test_ipc.py.
License: Apache-2.0 (see LICENSE).
"""

import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogloss.job.several.others import is_running

DESCRIPTION_BYTES = 1024  # room for a slot's description, which takes about 250
CUDA_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE of cuda.h
CUDA_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of cuda.h
_lock = threading.Lock()  # guards nothing, see `_fence`
_thread = ThreadPoolExecutor(1)  # waits for devices; starts when there is one
# What this process has published, by its location, until `release` or its own end.
_published: dict[tuple[Any, Any], Tensor] = {}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as "float32".

    Raises:
        ValueError: there is none of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r}: no dtype of torch")
    return dtype


class Handle(NamedTuple):
    """Say where a published tensor lies.

    device: "cpu" or "cuda".
    location: (process id, file descriptor), or (uuid of the device, CUDA handle).
    shape, dtype: of the tensor.
    nbytes: size of the memory, at least 1.
    """

    device: str
    location: tuple[Any, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def to_plain(self) -> dict[str, Any]:
        """Return what `from_plain` takes: a dict for JSON, to send to other processes."""
        process_or_uuid, place = self.location
        if isinstance(place, bytes):
            place = place.hex()
        return {"device": self.device, "location": [process_or_uuid, place],
                "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch."),
                "nbytes": self.nbytes}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Handle":
        """Return the Handle that `to_plain` described.

        Raises:
            ValueError, KeyError, TypeError: another process sent something else.
        """
        process_or_uuid, place = plain["location"]
        location: tuple[Any, Any]
        if plain["device"] == "cpu":
            location = (int(process_or_uuid), int(place))  # they become part of a path
        else:
            location = (str(process_or_uuid), bytes.fromhex(place))
        shape = tuple(int(length) for length in plain["shape"])
        return cls(str(plain["device"]), location, shape, dtype_of(plain["dtype"]),
                   int(plain["nbytes"]))


def publish(tensor: Tensor) -> Handle:
    """Copy a tensor, once, to memory that other processes of the node can attach.

    The copy lives until `release(handle)` or the end of this process.  `attach(handle)` gives this
    process a view of it too, for example to write to it in place.
    """
    nbytes = max(1, tensor.nbytes)  # neither mmap nor CUDA allocates 0 bytes
    device_type = tensor.device.type
    location: tuple[Any, Any]
    if device_type == "cpu":
        descriptor = os.memfd_create("isogloss")
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
        memory = _map(descriptor, nbytes)
        location = (os.getpid(), descriptor)
    else:
        memory, cuda_handle = _Cuda.get().allocate(nbytes, tensor.device)
        location = (_uuid(tensor.device), cuda_handle)
    handle = Handle(device_type, location, tuple(tensor.shape), tensor.dtype, nbytes)
    _published[location] = memory
    attach(handle).copy_(tensor)
    if device_type != "cpu":
        # Other processes do not wait for this one's streams.
        torch.cuda.synchronize(tensor.device)
    return handle


def attach(handle: Handle) -> Tensor:
    """Map the published tensor itself, without a copy.

    Returns:
        The tensor, on the device of its publisher; copy it to another device before use there.
    Raises:
        FileNotFoundError: the publisher has released it or has ended.
        RuntimeError: the publisher's GPU is not visible to this process, or CUDA fails.
    """
    # CUDA cannot open a handle in the process that made it.
    raw = _published[handle.location] if handle.location in _published else _open(handle)
    return _viewed(raw, handle)


def _viewed(raw: Tensor, handle: Handle) -> Tensor:
    """Return memory as the tensor that a handle describes."""
    itemsize = handle.dtype.itemsize
    # An empty tensor has one byte of memory, which may be less than one item.
    whole_items = handle.nbytes // itemsize
    flat = raw[: whole_items * itemsize].view(handle.dtype)
    return flat[: torch.Size(handle.shape).numel()].view(handle.shape)


def release(handle: Handle) -> None:
    """Withdraw a published tensor, so that no other process can attach it any longer.

    On the CPU, processes that have attached it keep the memory; on CUDA they must be done with it.
    """
    memory = _published.pop(handle.location)
    if handle.device == "cpu":
        _, descriptor = handle.location
        os.close(descriptor)  # the memory lives on in whoever maps it
    else:
        _Cuda.get().free(memory)


def _map(descriptor: int, nbytes: int) -> Tensor:
    # The tensor keeps the map alive, and the map the memory.
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _open(handle: Handle) -> Tensor:
    """Map the memory of another process as bytes."""
    if handle.device != "cpu":
        return _Cuda.get().open(handle)
    process, publisher_descriptor = handle.location
    descriptor = os.open(f"/proc/{process}/fd/{publisher_descriptor}", os.O_RDWR)
    try:
        return _map(descriptor, handle.nbytes)
    finally:
        os.close(descriptor)


# --- CUDA -----------------------------------------------------------------------------------------


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class _Cuda:
    """Call the five functions of the CUDA driver that inter-process memory needs."""

    _instance: "_Cuda | None" = None

    class _IpcHandle(ctypes.Structure):  # CUipcMemHandle of cuda.h
        _fields_ = [("reserved", ctypes.c_char * CUDA_HANDLE_BYTES)]

    def __init__(self) -> None:
        # Argument types have to be named: ctypes would pass 64-bit pointers as 32-bit integers.
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.cuIpcOpenMemHandle_v2.argtypes = [
            ctypes.c_void_p, self._IpcHandle, ctypes.c_uint]
        self.driver.cuMemFree_v2.argtypes = [ctypes.c_uint64]
        self.driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self.driver.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.driver.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, ctypes.c_uint64]

    @classmethod
    def get(cls) -> "_Cuda":
        """Return the only instance; the driver is loaded at the first call."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def allocate(self, nbytes: int, device: torch.device) -> tuple[Tensor, bytes]:
        """Allocate memory outside of torch's allocator; return it and its handle."""
        pointer = ctypes.c_uint64()
        handle = self._IpcHandle()
        with torch.cuda.device(device):
            self._ensure_context()
            status = self.driver.cuMemAlloc_v2(ctypes.byref(pointer), nbytes)
            if status == CUDA_OUT_OF_MEMORY:  # torch's allocator may hold memory that it has free
                torch.cuda.empty_cache()
                status = self.driver.cuMemAlloc_v2(ctypes.byref(pointer), nbytes)
            self._check("cuMemAlloc", status)
            status = self.driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer)
            self._check("cuIpcGetMemHandle", status)
        handle_bytes = ctypes.string_at(ctypes.byref(handle), CUDA_HANDLE_BYTES)
        return self._tensor(pointer.value, nbytes, device), handle_bytes

    def open(self, handle: Handle) -> Tensor:
        """Map the memory of another process as bytes."""
        uuid, handle_bytes = handle.location
        device = self._device_of(uuid)
        pointer = ctypes.c_uint64()
        cuda_handle = self._IpcHandle.from_buffer_copy(handle_bytes)
        lazily = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: when it is first needed
        with torch.cuda.device(device):
            self._ensure_context()
            status = self.driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), cuda_handle, lazily)
            self._check("cuIpcOpenMemHandle", status)
        return self._tensor(pointer.value, handle.nbytes, device)

    def close(self, tensor: Tensor) -> None:
        """Unmap what `open` mapped, which its owner may free only then."""
        with torch.cuda.device(tensor.device):
            status = self.driver.cuIpcCloseMemHandle(tensor.data_ptr())
            self._check("cuIpcCloseMemHandle", status)

    def free(self, tensor: Tensor) -> None:
        self._check("cuMemFree", self.driver.cuMemFree_v2(tensor.data_ptr()))

    @staticmethod
    def _device_of(uuid: str) -> torch.device:
        for index in range(torch.cuda.device_count()):
            if _uuid(index) == uuid:
                return torch.device("cuda", index)
        raise RuntimeError(f"a published tensor lies on GPU {uuid}, which this process does not "
                           "see; check CUDA_VISIBLE_DEVICES")

    @staticmethod
    def _ensure_context() -> None:
        """Let torch create the current device's context, which the driver's calls need."""
        torch.cuda.current_stream().synchronize()

    @staticmethod
    def _tensor(pointer: int, nbytes: int, device: torch.device) -> Tensor:
        """View memory as a tensor of bytes, which does not own it."""

        class Memory:
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (pointer, False),  # False: may be written to
                "version": 3,
            }

        return torch.as_tensor(Memory(), device=device)

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{call} failed with CUDA error {status} (CUresult of cuda.h)")


# --- one tensor per step --------------------------------------------------------------------------

WORD_BYTES = 8  # the counters are int64
WRITTEN = 0  # word: number of tensors written; the word behind it holds the writer's process id
PROBE_SECONDS = 0.2  # time between looks at whether the other process still runs
FIRST_PAUSE = 2e-5  # seconds between looks at a counter, doubled up to the longest; not tuned
LONGEST_PAUSE = 1e-3


class PeerDied(RuntimeError):
    """Report that the process at the other end has ended or does not respond."""


class WriterHandle(NamedTuple):
    """Say where a TensorWriter publishes.

    board: the shared counters and descriptions.
    readers, slots: of the TensorWriter.
    """

    board: Handle
    readers: int
    slots: int

    def to_plain(self) -> dict[str, Any]:
        """Return what `from_plain` takes: a dict for JSON, to send to every reader."""
        return {"board": self.board.to_plain(), "readers": self.readers, "slots": self.slots}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "WriterHandle":
        """Return the WriterHandle that `to_plain` described; raises what Handle.from_plain does."""
        board = Handle.from_plain(plain["board"])
        return cls(board, int(plain["readers"]), int(plain["slots"]))


def _released_word(reader: int) -> int:
    """Return the word with the number of tensors that a reader released; its process id follows."""
    return 2 + 2 * reader


class _Board:
    """Share the counters and descriptions of a TensorWriter with its readers.

    Words of 8 bytes: tensors written, the writer's process id; then for every reader: tensors
    released, its process id.  Behind the words lies a description for every slot, as JSON.  No word
    has two processes that write to it, so there is no lock.
    """

    def __init__(self, handle: WriterHandle) -> None:
        raw = attach(handle.board)
        end = self.word_bytes(handle.readers)
        self.words = raw[:end].view(torch.int64)
        self.descriptions = raw[end:].view(handle.slots, DESCRIPTION_BYTES)

    def __getitem__(self, word: int) -> int:
        return int(self.words[word])

    def __setitem__(self, word: int, value: int) -> None:
        self.words[word] = value

    @staticmethod
    def word_bytes(readers: int) -> int:
        return 2 * WORD_BYTES * (1 + readers)

    @classmethod
    def create(cls, readers: int, slots: int) -> WriterHandle:
        nbytes = cls.word_bytes(readers) + DESCRIPTION_BYTES * slots
        return WriterHandle(publish(torch.zeros(nbytes, dtype=torch.uint8)), readers, slots)

    def describe(self, slot: int, tensor: Handle) -> None:
        text = bytearray(json.dumps(tensor.to_plain()).encode())
        # Spaces, which JSON ignores, cover what an older, longer description left behind.
        raw = torch.frombuffer(text.ljust(DESCRIPTION_BYTES), dtype=torch.uint8)
        self.descriptions[slot].copy_(raw)

    def description(self, slot: int) -> Handle:
        return Handle.from_plain(json.loads(bytes(self.descriptions[slot].tolist())))

    def wait(self, word: int, least: int, peer: str, timeout: float) -> None:
        """Wait until words[word] >= least; the next word is the id of the process that counts.

        Args:
            peer: name of that process in messages.
            timeout: seconds.
        Raises:
            PeerDied: the process has ended, or the time is over.
        """
        pause = FIRST_PAUSE
        begin = time.monotonic()
        last_probe = 0.0
        while self[word] < least:
            now = time.monotonic()
            if now - last_probe > PROBE_SECONDS:
                last_probe = now
                process = self[word + 1]  # 0: it has not started to count
                # It may have counted and ended since the first look, so look again.
                if process and not is_running(process) and self[word] < least:
                    raise PeerDied(f"{peer} (process {process}) has ended")
            if now - begin > timeout:
                process = self[word + 1]
                raise PeerDied(f"{peer} (process {process}) did not respond for {timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        _fence()  # what is read next is no older than the counter


def _fence() -> None:
    """Keep memory accesses before it before those after it; x86 does so for stores, ARM does not.

    Taking a lock keeps what follows behind it, releasing it what precedes before it, and on ARM,
    too, a release stays before the next taking.
    """
    for _ in range(2):
        with _lock:
            pass


def _mark(device: torch.device) -> Callable[[], None] | None:
    """Return what waits for the work of the current stream so far; None: it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits sleeps
    event.record(torch.cuda.current_stream(device))

    def wait() -> None:
        with torch.cuda.device(device):  # a thread would begin with device 0, and take memory there
            event.synchronize()

    return wait


class _Counter:
    """Write a word of a board once a device has done the work that its new value speaks of.

    A thread waits for the device, so that the caller goes on to queue work.

    value: what was counted last; the word may fall behind.
    """

    def __init__(self, board: _Board, word: int) -> None:
        self._board = board
        self._word = word
        self._last: Future[None] | None = None  # write, of those that wait
        self.value = board[word]
        board[word + 1] = os.getpid()

    def set(self, value: int, marks: list[Callable[[], None] | None]) -> None:
        """Let the word become `value` behind these marks, see `_mark`."""
        self.value = value
        waits = [mark for mark in marks if mark]
        if self._last and self._last.done():
            self.finish()
        if waits or self._last:  # in the order of the calls
            self._last = _thread.submit(self._write, value, waits)
        else:
            self._write(value, waits)

    def finish(self) -> None:
        """Wait until the word is written; raise what the device has said."""
        if self._last:
            self._last.result()
            self._last = None

    def _write(self, value: int, waits: list[Callable[[], None]]) -> None:
        for wait in waits:
            wait()
        _fence()  # whoever sees the word sees what was written before it
        self._board[self._word] = value


class TensorWriter:
    """Publish tensors, one after the other, to a fixed number of readers.

    A buffer is written again only after every reader has released it.  When a tensor needs more, a
    buffer of at least twice the size takes its place.

    Args:
        readers: number of TensorReaders there will be.
        slots: tensors that may be unread or unreleased; 2 lets the writer run ahead by one.
        timeout: seconds to wait for readers.
    Attributes:
        handle: WriterHandle; send it to every reader, once.
    """

    def __init__(self, readers: int, slots: int = 2, timeout: float = 600.0) -> None:
        self.handle = _Board.create(readers, slots)
        self.timeout = timeout
        self._board = _Board(self.handle)
        self._buffers: list[Handle | None] = [None] * slots
        # Readers may still map a buffer that was replaced, so all of them live until `close`.
        self._handles = [self.handle.board]
        self._written = _Counter(self._board, WRITTEN)

    def put(self, tensor: Tensor) -> None:
        """Publish a copy of a tensor of any shape, dtype and device, as soon as the device has it.

        Raises:
            PeerDied: a reader has ended or does not respond.
        """
        number = self._written.value
        slot = number % self.handle.slots
        self._wait_for_readers(number + 1 - self.handle.slots)
        buffer = self._buffer(slot, tensor)
        described = buffer._replace(shape=tuple(tensor.shape), dtype=tensor.dtype)
        attach(described).copy_(tensor.detach())
        self._board.describe(slot, described)
        # last: from then on readers look
        self._written.set(number + 1, [_mark(tensor.device)])

    def drain(self) -> None:
        """Wait until the readers have released everything.

        Raises:
            PeerDied: a reader has ended or does not respond.
        """
        self._wait_for_readers(self._written.value)

    def close(self) -> None:
        """Release all buffers; on CUDA, readers must have closed before."""
        self._written.finish()
        for handle in self._handles:
            release(handle)
        self._handles = []

    def _wait_for_readers(self, least: int) -> None:
        """Wait until every reader has released at least so many tensors."""
        for reader in range(self.handle.readers):
            self._board.wait(_released_word(reader), least, f"reader {reader}", self.timeout)

    def _buffer(self, slot: int, tensor: Tensor) -> Handle:
        """Return the slot's buffer, replaced if the bytes do not fit or lie on another device."""
        buffer = self._buffers[slot]
        if buffer is not None and buffer.device == tensor.device.type and (
                buffer.nbytes >= tensor.nbytes):
            return buffer
        nbytes = max(1, tensor.nbytes)
        if buffer is not None:  # doubling bounds the number of buffers over a run
            nbytes = max(nbytes, 2 * buffer.nbytes)
        buffer = publish(tensor.new_empty(nbytes, dtype=torch.uint8))
        self._buffers[slot] = buffer
        self._handles.append(buffer)
        return buffer


class TensorReader:
    """Read every tensor that a TensorWriter publishes, in order.

    Args:
        handle: `handle` of the TensorWriter.
        reader: number of this reader, 0 to readers - 1; no two processes may use the same.
        timeout: seconds to wait for a tensor.
    """

    def __init__(self, handle: WriterHandle, reader: int, timeout: float = 600.0) -> None:
        self.timeout = timeout
        self._board = _Board(handle)
        self._slots = handle.slots
        self._released = _Counter(self._board, _released_word(reader))
        self._taken = 0
        self._buffers: dict[tuple[Any, Any], Tensor] = {}  # each buffer is mapped once

    def next(self) -> Tensor:
        """Return the next tensor, in the shared memory itself; valid until `release`.

        A writer of n slots has at most n unreleased tensors; asking for one more waits in vain.

        Raises:
            PeerDied: the writer has ended or does not respond.
        """
        self._board.wait(WRITTEN, self._taken + 1, "the writer", self.timeout)
        tensor = self._board.description(self._taken % self._slots)
        place = tensor.location
        if place not in self._buffers:
            whole = tensor._replace(shape=(tensor.nbytes,), dtype=torch.uint8)
            self._buffers[place] = attach(whole)
        self._taken += 1
        return _viewed(self._buffers[place], tensor)

    def release(self) -> None:
        """Let the writer overwrite all tensors taken so far.

        It may do so when the current streams are done, since their kernels may still read them.
        """
        devices = {raw.device for raw in self._buffers.values()}
        self._released.set(self._taken, list(map(_mark, devices)))

    def close(self) -> None:
        """Release all tensors and unmap the buffers, so that their owner may free them."""
        self.release()
        self._released.finish()
        for place, raw in self._buffers.items():
            if raw.device.type != "cpu" and place not in _published:
                _Cuda.get().close(raw)
        self._buffers = {}

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        """Give the next tensor to a `with` block and release it at the block's end."""
        try:
            yield self.next()
        finally:
            self.release()
