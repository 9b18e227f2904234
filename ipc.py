"""One tensor seen by several processes of a node, not copied for each: CUDA IPC, shared memory on the CPU.

    handle = share(tensor)            # in one process; a few hundred bytes, pickle it and send it
    tensor = attach(handle)           # in others: the same memory

    outbox = TensorWriter(readers=2)        # a tensor a step; outbox.handle goes to both readers, once
    outbox.put(tensor)
    inbox = TensorReader(handle, reader=0)
    with inbox.take() as tensor: ...  # the same memory, until the block ends
    a, b = inbox.next(), inbox.next()  # or several, until inbox.give_back()

Shared memory has no name: it is a file descriptor that readers open through /proc, so it is gone with the
last process that maps it, however that one ends, and nothing is ever left in /dev/shm.  CUDA buffers are
allocated for the purpose, so neither torch's allocator nor its reference counts take part.  Linux; all
processes belong to one user.

Needs torch only.  Copy this file into your own repository.  Tests: tests/test_ipc.py.
"""

import ctypes
import mmap
import os
import pickle
import time
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor

DESCRIPTION = 1024  # bytes of a slot's description
EVENT = 64  # bytes of a CUDA event's handle
_kept: dict["Handle", Any] = {}  # what this process shares, until `release` or its own end


class Handle(NamedTuple):
    """Where a shared tensor lies; to be pickled.

    place: (process id, file descriptor), or (uuid of the device, CUDA handle).
    """

    device: str
    place: tuple[Any, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def share(tensor: Tensor) -> Handle:
    """Copy a tensor to where other processes of the node can see it, once.

    `attach(handle)` gives this process its own view, to be written in place if need be.
    """
    nbytes, kind = max(1, tensor.nbytes), tensor.device.type
    if kind == "cpu":
        fd = os.memfd_create("isogloss")
        os.ftruncate(fd, nbytes)
        place: tuple[Any, Any] = (os.getpid(), fd)
        kept: Any = _map(fd, nbytes)
    else:
        kept, cuda_handle = _Cuda.get().allocate(nbytes, tensor.device)
        place = (_uuid(tensor.device), cuda_handle)
    handle = Handle(kind, place, tuple(tensor.shape), tensor.dtype, nbytes)
    _kept[handle] = kept
    attach(handle).copy_(tensor)
    if kind != "cpu":
        torch.cuda.synchronize(tensor.device)
    return handle


def attach(handle: Handle) -> Tensor:
    """The shared tensor itself, on the device of its owner; copy it to another device before computing there.

    Raises:
        FileNotFoundError: the owner has released it, or is gone.
    """
    raw = _kept[handle] if handle in _kept else _open(handle)
    count = handle.nbytes // handle.dtype.itemsize
    flat = raw[: count * handle.dtype.itemsize].view(handle.dtype)
    return flat[: torch.Size(handle.shape).numel()].view(handle.shape)


def release(handle: Handle) -> None:
    """Let others attach no longer; those that have keep the memory (CUDA: they must be done with it)."""
    kept = _kept.pop(handle)
    if handle.device == "cpu":
        os.close(handle.place[1])
    else:
        _Cuda.get().free(kept)


def _map(fd: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)  # which keeps the map alive


def _open(handle: Handle) -> Tensor:
    if handle.device != "cpu":
        return _Cuda.get().open(handle)
    fd = os.open("/proc/{}/fd/{}".format(*handle.place), os.O_RDWR)
    try:
        return _map(fd, handle.nbytes)
    finally:
        os.close(fd)


# --- CUDA -----------------------------------------------------------------------------------------


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class _Cuda:
    """The five calls of the driver that this takes."""

    _only: "_Cuda | None" = None

    class _Bytes(ctypes.Structure):
        _fields_ = [("reserved", ctypes.c_char * 64)]

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, self._Bytes, ctypes.c_uint]
        self.driver.cuMemFree_v2.argtypes = [ctypes.c_uint64]
        self.driver.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.driver.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, ctypes.c_uint64]

    @classmethod
    def get(cls) -> "_Cuda":
        cls._only = cls._only or cls()
        return cls._only

    def allocate(self, nbytes: int, device: torch.device) -> tuple[Tensor, bytes]:
        pointer, handle = ctypes.c_uint64(), self._Bytes()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the device has a context now
            self._check("cuMemAlloc", self.driver.cuMemAlloc_v2(ctypes.byref(pointer), nbytes))
            self._check("cuIpcGetMemHandle", self.driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer))
        return self._tensor(pointer.value, nbytes, device), ctypes.string_at(ctypes.byref(handle), 64)

    def open(self, handle: Handle) -> Tensor:
        found = [i for i in range(torch.cuda.device_count()) if _uuid(i) == handle.place[0]]
        if not found:
            raise RuntimeError(f"device {handle.place[0]} of a shared tensor is not visible to this process")
        device = torch.device("cuda", found[0])
        pointer, raw = ctypes.c_uint64(), self._Bytes.from_buffer_copy(handle.place[1])
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            lazily = 1  # enable access between devices when it is needed
            self._check("cuIpcOpenMemHandle",
                        self.driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), raw, lazily))
        return self._tensor(pointer.value, handle.nbytes, device)

    def free(self, tensor: Tensor) -> None:
        self._check("cuMemFree", self.driver.cuMemFree_v2(tensor.data_ptr()))

    @staticmethod
    def _tensor(pointer: int, nbytes: int, device: torch.device) -> Tensor:
        class Memory:
            __cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False),
                                        "version": 3}

        return torch.as_tensor(Memory(), device=device)

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{call} failed with CUDA error {status}")


# --- a tensor a step -------------------------------------------------------------------------------


class PeerDied(RuntimeError):
    """The process at the other end has ended, or says nothing."""


class _Board:
    """The shared numbers of an outbox, words of 8 bytes: tensors written, the writer's process id; for every
    reader: tensors given back, its process id.  Behind them a pickled description for every slot.
    """

    def __init__(self, handle: Handle, readers: int, slots: int):
        raw, end = attach(handle), 16 * (1 + readers)
        self.words = raw[:end].view(torch.int64)
        self.slots = [raw[end + i * DESCRIPTION : end + (i + 1) * DESCRIPTION] for i in range(slots)]

    def __getitem__(self, word: int) -> int:
        return int(self.words[word])

    def __setitem__(self, word: int, value: int) -> None:
        self.words[word] = value

    @staticmethod
    def size(readers: int, slots: int) -> int:
        return 16 * (1 + readers) + DESCRIPTION * slots

    def wait(self, word: int, least: int, who: str, timeout: float) -> None:
        """Until words[word] >= least; its neighbor is the id of the process that counts there."""
        pause, begin, looked = 2e-5, time.monotonic(), 0.0
        while self[word] < least:
            now = time.monotonic()
            if now - looked > 0.2:
                looked, process = now, self[word + 1]
                if process and not is_running(process) and self[word] < least:
                    raise PeerDied(f"{who} (process {process}) has ended")
            if now - begin > timeout:
                raise PeerDied(f"{who} (process {self[word + 1]}) said nothing for {timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


def is_running(process: int) -> bool:
    """Is there such a process, other than one that has ended and is not buried yet?"""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _finish(device: torch.device) -> None:
    """What was asked of the device so far is done, so that a count may say so."""
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


class TensorWriter:
    """Publishes tensors, one after the other, to a fixed number of readers.

    A buffer is written again only when every reader has given it back, and replaced by one of at least twice
    its size when a tensor needs more.

    Args:
        readers: how many Inboxes there will be.
        slots: tensors that may be under way; 2 lets the writer run ahead by one.
        timeout: seconds to wait for readers.
    Attributes:
        handle: to be pickled and sent to every reader, once.
    """

    def __init__(self, readers: int, slots: int = 2, timeout: float = 600.0):
        board = share(torch.zeros(_Board.size(readers, slots), dtype=torch.uint8))
        self.handle = board, readers, slots
        self.timeout, self._board = timeout, _Board(*self.handle)
        self._slots: list[Handle | None] = [None] * slots
        self._shared = [board]  # a buffer that was replaced may still be mapped: all live until `close`
        self._board[1] = os.getpid()

    def put(self, tensor: Tensor) -> None:
        """Publish a copy of a tensor of any shape, type and device.

        Raises:
            PeerDied: a reader.
        """
        (_, readers, slots), number = self.handle, self._board[0]
        for reader in range(readers):
            self._board.wait(2 + 2 * reader, number + 1 - slots, f"reader {reader}", self.timeout)
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)
        buffer = self._slots[number % slots]
        if buffer is None or buffer.nbytes < raw.nbytes or buffer.device != raw.device.type:
            size = raw.nbytes if buffer is None else max(raw.nbytes, 2 * buffer.nbytes)
            buffer = self._slots[number % slots] = share(raw.new_empty(max(1, size)))
            self._shared.append(buffer)
        attach(buffer)[: raw.nbytes].copy_(raw)
        _finish(tensor.device)
        text = bytearray(pickle.dumps((buffer, tensor.shape, tensor.dtype)))
        self._board.slots[number % slots][: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        self._board[0] = number + 1

    def drain(self) -> None:
        """Wait until the readers have given everything back.

        Raises:
            PeerDied: a reader.
        """
        for reader in range(self.handle[1]):
            self._board.wait(2 + 2 * reader, self._board[0], f"reader {reader}", self.timeout)

    def close(self) -> None:
        """Release all buffers; on CUDA readers must be done with theirs."""
        for handle in self._shared:
            release(handle)
        self._shared = []


class TensorReader:
    """Reads what an TensorWriter publishes, in order, every tensor.

    Args:
        handle: of the TensorWriter.
        reader: which of its readers this is, 0 to readers - 1.
        timeout: seconds to wait for a tensor.
    """

    def __init__(self, handle: tuple[Handle, int, int], reader: int, timeout: float = 600.0):
        self._board, self._slots = _Board(*handle), handle[2]
        self._at, self.timeout, self._taken = 2 + 2 * reader, timeout, 0
        self._known: dict[Handle, Tensor] = {}
        self._board[self._at + 1] = os.getpid()

    def next(self) -> Tensor:
        """The next tensor, in the shared memory itself, until it is given back.

        Of an outbox of n slots at most n tensors can be held, then this waits for ever.

        Raises:
            PeerDied: the writer.
        """
        self._board.wait(0, self._taken + 1, "the writer", self.timeout)
        buffer, shape, dtype = pickle.loads(bytes(self._board.slots[self._taken % self._slots].tolist()))
        if buffer not in self._known:
            self._known[buffer] = attach(buffer)
        self._taken += 1
        return self._known[buffer][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def give_back(self) -> None:
        """All tensors taken so far may be written again, once the device has done what it was asked to."""
        for device in {raw.device for raw in self._known.values()}:
            _finish(device)
        self._board[self._at] = self._taken

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        """The next tensor; it is given back at the end of the block."""
        try:
            yield self.next()
        finally:
            self.give_back()
