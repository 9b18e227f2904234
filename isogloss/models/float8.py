"""Hold the linear layers of a frozen model in 8 bits, and multiply in 8 bits.

    y = s_x s_W^T (x8 W8^T)      x = s_x x8, W = s_W W8, up to what float8_e4m3fn rounds (1 in 16)

A scale stands for each row: for an output of W, which is rounded once, and for a token of x, which
is rounded in every pass; the largest number of a row becomes the largest of the type, 448.  Sums
are float32, outputs bfloat16.  FP8 formats: arXiv:2209.05433.

Shapes: N tokens, I inputs, O outputs.  Tests: tests/test_float8.py.
"""

import torch
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 1e-30  # of a row's largest number, so that zeros have a scale
MULTIPLE = 16  # of inputs and outputs, which a GPU's kernels ask for


def check_float8(device):
    """Raise a ValueError where a device cannot multiply such numbers."""
    numbers = torch.ones(MULTIPLE, MULTIPLE, device=device)
    try:
        multiply(numbers, *rounded(numbers))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"--teacher_dtype fp8: {device} does not multiply such numbers "
                         f"({reason}); use bfloat16") from None


def rounded(x_NI):
    """Return (x8, s_x): (N, I) float8 and (N, 1) float32, whose product is about x_NI."""
    largest_N1 = x_NI.abs().amax(-1, keepdim=True).float()
    scale_N1 = largest_N1.clamp(min=SMALLEST) / LARGEST
    return (x_NI / scale_N1).to(FLOAT8), scale_N1


def multiply(x_NI, weight_OI, scale_O1):
    """Return (N, O) bfloat16, x W^T of a weight that is rounded, as x will be."""
    x_NI, scale_N1 = rounded(x_NI)
    rows = ScalingType.RowWise
    return scaled_mm(x_NI, weight_OI.t(), scale_N1, rows, scale_O1.t(), rows,
                     output_dtype=torch.bfloat16, use_fast_accum=True)


class Float8Linear(nn.Module):
    """Apply a linear layer whose weight is rounded to 8 bits.

    Attributes:
        weight: (O, I) float8; scale_O1: (O, 1) float32; bias: (O,) or None.
    """

    def __init__(self, linear):
        super().__init__()
        weight, scale_O1 = rounded(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale_O1", scale_O1)
        self.bias = linear.bias

    def forward(self, x):
        output = multiply(x.flatten(0, -2), self.weight, self.scale_O1)
        output = output.view(*x.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def use_float8(module, skipped=()):
    """Put a Float8Linear in the place of each linear layer in a module.

    Those whose sizes no kernel takes stay as they are; a small shard may have no numbers at all.

    Args:
        skipped: modules in which nothing is rounded, such as routers.
    """
    for name, layer in list(module.named_children()):
        if layer in skipped:
            continue
        use_float8(layer, skipped)
        if type(layer) is nn.Linear and layer.weight.numel():
            if not any(size % MULTIPLE for size in layer.weight.shape):
                setattr(module, name, Float8Linear(layer))
