"""Less memory for activations: MLPs tile by tile, checkpointed activations in host memory.

Both change a finished model from outside; the loss and the gradient stay the same.
Tests: tests/test_sequence.py.
"""

from collections import deque
from functools import cache

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def change(model, cfg):
    """Let the MLPs of a student take its positions in tiles."""
    if cfg.mlp_tiles > 1:
        tile_mlps(model, cfg.mlp_tiles)


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
            raise ValueError(f"--mlp_tiles {num_pieces}: an MLP of {model_name} returns more than "
                             "hidden states; use 1")
        return torch.cat(outputs, -2)

    return forward


# --- offload --------------------------------------------------------------------------------------

# Layers' inputs that may be on the way to the host at a time.  Not tuned: with one, a layer waits
# for the copy of its own input; more keep more memory.
LEAVING = 2


class HostCopies:
    """Let tensors of a shape wait in the host's memory from a forward pass to its backward.

    On a GPU copies to the host follow one another on a stream of their own, beside the layers that
    compute meanwhile.  torch gives pinned memory to others once a copy out of it has ended.

    Args:
        shape: of the tensors that move.
        stream: of the copies to the host; None on a CPU.
    """

    def __init__(self, shape, stream):
        self.shape = shape
        self.stream = stream
        self.leaving = deque()  # (tensor, end of its copy, which may still read it)

    def pack(self, tensor):
        if tensor.shape != self.shape:
            return tensor, None
        if self.stream is None:
            return tensor.detach().clone(), tensor.device
        host_tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host_tensor.copy_(tensor.detach(), non_blocking=True)
            self.leaving.append((tensor, self.stream.record_event()))
        # what is freed in the order of the device's own work can be used at once
        if len(self.leaving) > LEAVING:
            torch.cuda.current_stream().wait_event(self.leaving.popleft()[1])
        return host_tensor, tensor.device

    def unpack(self, packed):
        tensor, device = packed
        if device is None:
            return tensor
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.leaving.clear()
        return tensor.to(device, non_blocking=True)


@cache
def copy_stream():
    """Return the stream of all copies to the host, None without a GPU."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def offload_activations(shape):
    """Return a context in which tensors of this shape, saved for backward, wait in host memory.

    Around a model with activation checkpointing, and with the shape of its hidden states, these are
    the inputs of its layers; everything else of a layer is computed again.

    Args:
        shape: of the tensors that move.
    """
    copies = HostCopies(shape, copy_stream())
    return saved_tensors_hooks(copies.pack, copies.unpack)
