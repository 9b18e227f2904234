"""Less memory for activations: MLPs tile by tile, checkpointed activations in host memory.

Both change a finished model from outside; the loss and the gradient stay the same.
Tests: tests/test_sequence.py.
"""

from contextlib import nullcontext

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


def offload_activations(shape, enabled=True):
    """Return a context in which tensors of this shape, saved for backward, wait in host memory.

    Around a model with activation checkpointing, and with the shape of its hidden states, these are
    the inputs of its layers; everything else of a layer is computed again.

    Args:
        shape: of the tensors that move.
        enabled: False: return a context that does nothing.
    """
    if not enabled:
        return nullcontext()

    def pack(tensor):
        if tensor.shape != shape:
            return None, tensor
        # Pinned memory lets the copy run beside the computation; on CPU ranks there is none to pin.
        is_on_accelerator = tensor.device.type != "cpu"
        host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_accelerator)
        host_copy.copy_(tensor, non_blocking=True)
        return tensor.device, host_copy

    def unpack(packed):
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)
