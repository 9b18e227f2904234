"""Less memory for activations: MLPs tile by tile, checkpointed activations in host memory.

Both change a finished model from outside; the loss and the gradient stay the same.
Tests: tests/test_sequence.py.
"""

import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def tile_mlps(model, num_pieces):
    """Let every MLP take its positions in `num_pieces` pieces and recompute each in backward.

    No more than one piece of the MLP's wide inner activations exists at a time.  The number of
    pieces is fixed, not their length: under ZeRO-3 every piece gathers the weights, a collective
    that all ranks have to reach equally often, however long their texts are.

    Args:
        model: whose modules called mlp are changed in place.
    Raises:
        ValueError: the model has no modules called mlp; in its forward: an MLP returns a tuple.
    """
    mlps = [module for name, module in model.named_modules() if name.split(".")[-1] == "mlp"]
    model_name = type(model).__name__
    if not mlps:
        raise ValueError(f"--mlp_tiles {num_pieces}: {model_name} has no modules called mlp; use 1")
    for mlp in mlps:
        mlp.forward = _tiled_forward(mlp.forward, num_pieces, model_name)


def _tiled_forward(whole_forward, num_pieces, model_name):
    """Return a forward that runs `whole_forward` piece by piece, each piece checkpointed."""

    def forward(hidden):
        outputs = []
        # tensor_split also gives empty pieces where there are fewer positions than pieces.
        for piece in hidden.tensor_split(num_pieces, dim=-2):
            outputs.append(checkpoint(whole_forward, piece, use_reentrant=False))
        # Some mixtures of experts return their router logits, too.
        if not isinstance(outputs[0], torch.Tensor):
            raise ValueError(
                f"--mlp_tiles {num_pieces}: an MLP of {model_name} returns more than hidden "
                "states; use 1"
            )
        return torch.cat(outputs, -2)

    return forward


# --- offload --------------------------------------------------------------------------------------

# Layers' inputs that may be on the way to the host at a time.  Not tuned: with one, a layer waits
# for the copy of its own input; more keep more memory.
LEAVING = 2


class HostMemory:
    """Keep tensors of a device in the host's memory, whose buffers are used again and again.

    Copies in both directions follow one another on a stream of their own.  So a buffer may be
    written anew as soon as the copy out of it is queued.

    Attributes:
        device: torch.device.
        stream: of the copies; None on a CPU.
        free: (n,) uint8 buffers, pinned where there is a device.
    """

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free = []

    def take(self, nbytes):
        """Return a buffer of so many bytes or more."""
        self.free.sort(key=len)
        for number, buffer in enumerate(self.free):
            if len(buffer) >= nbytes:
                return self.free.pop(number)
        del self.free[:1]  # a larger one takes its place: no more than were in use at once remain
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    @contextmanager
    def copying(self):
        """Return a context of copies, which see what is queued so far; yields their end's event."""
        if self.stream is None:
            yield None
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            yield copied
            copied.record()

    def wait_for(self, copied):
        """Let what is queued from now on wait for a copy."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


class HostCopy:
    """Hold one tensor in the host's memory, and on the device again once it was asked for.

    Args:
        memory: HostMemory; tensor: on its device.
        before: HostCopy that is needed after this one, or None.
    """

    def __init__(self, memory, tensor, before):
        self.memory = memory
        self.buffer = memory.take(tensor.nbytes)
        self.host_tensor = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        with memory.copying() as self.stored:
            self.host_tensor.copy_(tensor.detach(), non_blocking=True)
        self.before = weakref.ref(before) if before else lambda: None
        self.tensor = None
        self.fetched = None

    def fetch(self):
        """Begin to copy it back, unless that was begun."""
        if self.tensor is None:
            # its memory is the computing stream's, which waits for the copy before it reads or
            # frees it
            self.tensor = torch.empty_like(self.host_tensor, device=self.memory.device)
            with self.memory.copying() as self.fetched:
                self.tensor.copy_(self.host_tensor, non_blocking=True)

    def take(self):
        """Return the tensor on the device, and begin with the one that is needed next."""
        self.fetch()
        tensor = self.tensor
        self.tensor = None  # whoever has asked for it keeps it as long as necessary
        self.memory.wait_for(self.fetched)
        before = self.before()
        if before is not None:
            before.fetch()
        return tensor

    def __del__(self):
        self.memory.free.append(self.buffer)


class Offloaded:
    """Let tensors of a shape wait in the host's memory from a forward pass to its backward.

    Args:
        shape: of the tensors that move.
        memory: function of a device that returns its HostMemory.
    """

    def __init__(self, shape, memory):
        self.shape = shape
        self.memory = memory
        self.last = lambda: None  # HostCopy, if it is still alive
        self.leaving = deque()  # (HostCopy, tensor), whose memory the copy may still read

    def pack(self, tensor):
        if tensor.shape != self.shape:
            return tensor
        copy = HostCopy(self.memory(tensor.device), tensor, self.last())
        self.last = weakref.ref(copy)
        self.leaving.append((copy, tensor))
        self._let_go(LEAVING)
        return copy

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        self._let_go(0)
        return packed.take()

    def _let_go(self, num_kept):
        """Give up the first tensors, so that their memory can be used for others.

        The device waits for their copies.  It does not run far ahead of them, and what is freed in
        the order of its own work is free at once.
        """
        while len(self.leaving) > num_kept:
            copy, _ = self.leaving.popleft()
            copy.memory.wait_for(copy.stored)


@cache
def host_memory(device):
    """Return the HostMemory of a device, the same one for all passes."""
    return HostMemory(device)


def offload_activations(shape, enabled=True):
    """Return a context in which tensors of this shape, saved for backward, wait in host memory.

    Around a model with activation checkpointing, and with the shape of its hidden states, these are
    the inputs of its layers; everything else of a layer is computed again.  On the way back each is
    fetched while the layer behind it computes.

    Args:
        shape: of the tensors that move.
        enabled: False: return a context that does nothing.
    """
    if not enabled:
        return nullcontext()
    offloaded = Offloaded(shape, host_memory)
    return saved_tensors_hooks(offloaded.pack, offloaded.unpack)
