"""Find, on a CPU, what would make a GPU wait or add up in an order of its own."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# sizes or numbers that the host reads back, and constants of the host that are copied
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2",
         "unique_dim", "bincount", "is_nonzero", "equal"}
# sums by atomics
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_", "_histogramdd", "put_"}
UNORDERED_REDUCTIONS = {"sum", "mean", "prod"}


class FixedOrder(TorchDispatchMode):
    """Fail at operations whose sums have no fixed order on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in UNORDERED:
            assert adds_once(name, args), f"{function} has no fixed order"
        if name.startswith("scatter_reduce"):
            assert args[4] not in UNORDERED_REDUCTIONS, f"{function} has no fixed order"
        return function(*args, **kwargs)


def adds_once(name, args):
    """Tell whether a sum adds no two numbers to one place, so that there is no order."""
    if not name.startswith(("index_add", "scatter_add")):
        return False
    _, dim, index = args[:3]
    with _disable_current_modes():
        index = index.movedim(dim, -1).sort().values if index.dim() > 1 else index.sort().values
        return bool((index[..., 1:] != index[..., :-1]).all())


class NoWaiting(FixedOrder):
    """Fail at operations that wait for the device, and at those too.

    `lift_fresh` is what torch.tensor([...]) does; a single number is no copy, but an argument.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        assert name not in WAITS, f"{function} waits for the device"
        if name == "lift_fresh":
            assert not args[0].dim(), "a list of the host is copied"
        if name == "repeat_interleave":
            assert kwargs.get("output_size") is not None, "repeat_interleave counts"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            for index in args[1]:
                is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                assert not is_mask, f"{function} counts the True of a mask"
        return super().__torch_dispatch__(function, types, args, kwargs)


def without_modes(call):
    """Return the function outside of all dispatch modes, as a kernel is to torch."""
    def kernel(*args, **kwargs):
        with _disable_current_modes():
            return call(*args, **kwargs)

    return kernel
