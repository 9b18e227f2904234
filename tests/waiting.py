"""Find, on a CPU, what would make a GPU add up in an order of its own."""

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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
