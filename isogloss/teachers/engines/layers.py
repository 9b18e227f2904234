"""Make the layers of a teacher torch's own, of which torch.compile makes one graph each.

Tests: tests/test_teacher.py.
"""

import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from torch import nn

from isogloss.models import pretrained
from isogloss.models.compiler import missing_compiler


def check_compile(engine, config):
    """Raise a ValueError where --teacher_compile cannot work.

    Args:
        engine: as `resolve_engine` returns it; config: of the whole model.
    """
    method = pretrained.quantization_of(config)
    if engine == "zero3":
        raise ValueError(
            "--teacher_compile: not with --teacher_engine zero3, which gathers weights between "
            "the parts of a layer, so that nothing is left to compile; leave it out")
    if method:
        raise ValueError(f"--teacher_compile: the teacher's weights are quantized ({method}), and "
                         "their library has kernels of its own; leave it out")
    missing = missing_compiler()
    if missing:
        raise ValueError(f"--teacher_compile: {missing}, which torch.compile needs; install it, or "
                         "leave the flag out")


def can_compile(engine, config):
    """Tell whether `check_compile` lets a teacher's layers be compiled."""
    try:
        check_compile(engine, config)
    except ValueError:
        return False
    return True


class SummedLinear(nn.Module):
    """Apply a linear layer whose input features are cut over the ranks of a group.

    Each rank gets the whole output; `linear` reads its features and has no bias.
    """

    def __init__(self, linear, bias, group):
        super().__init__()
        self.linear = linear
        self.bias = bias
        self.group = group

    def forward(self, x):
        output = self.linear(x)
        dist.all_reduce(output, group=self.group)
        return output if self.bias is None else output + self.bias


def use_plain_layers(model):
    """Put torch's layers in place of DeepSpeed's, of which torch.compile makes several graphs."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is LinearAllreduce:  # not the head
                setattr(module, name, SummedLinear(
                    _linear(layer.weight, None), layer.bias, layer.mp_group))
            elif isinstance(layer, LinearLayer) and not layer.gather_output:
                setattr(module, name, _linear(layer.weight, layer.bias))


def _linear(weight, bias):
    layer = nn.Linear(1, 1, bias=False, device="meta")  # torch warns of sizes of 0, as shards have
    layer.out_features, layer.in_features = weight.shape
    layer.weight = weight
    layer.bias = bias
    return layer
