"""Make the layers of a teacher plain, compiled, or small: torch's own, one graph each, in 8 bits.

Tests: tests/test_teacher.py, tests/test_float8.py.
"""

import os

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from torch import nn

from isogloss.job.watch import print_line
from isogloss.losses import forward_kl
from isogloss.models import float8, pretrained
from isogloss.models.compiler import missing_compiler
from isogloss.teachers.protocol import BLOCK

COMPILER = "inductor"
# Compiled once each: kinds of layers x whether there is one row x kinds of masks, of all teachers.
MOST_VARIANTS = 64
# Nats a token by which a teacher's predictions in 8 bits may differ from those in 16.  SmolLM2-135M
# differs by 0.024 on stories, 0.034 on an encyclopedia and 0.065 on Japanese, which it hardly
# reads; with the scales of one of its 210 linear layers halved by 0.34 to 0.64.
MOST_NATS = 0.1


def check_engine(engine, config, compile, dtype):
    """Raise a ValueError where --teacher_compile or --teacher_dtype fp8 cannot work.

    Args:
        engine: as `resolve_engine` returns it; config: of the whole model.
        compile, dtype: see ModelSpec.
    """
    method = pretrained.quantization_of(config)
    if dtype == "fp8":
        if engine not in ("replicated", "tensor_parallel"):
            raise ValueError(
                f"--teacher_dtype fp8: not with --teacher_engine {engine}, which cuts weights in "
                "their precision; use bfloat16, or a model that tensor_parallel shards")
        if method:
            raise ValueError("--teacher_dtype fp8: the teacher's weights are quantized already "
                             f"({method}); use auto")
    if not compile:
        return
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


def decoder_layers(model):
    """Return the layers of a causal language model that follow one another; ValueError: none."""
    number = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise ValueError(f"--teacher: {type(model).__name__} has no list of its {number} layers, which "
                     "--teacher_compile and --teacher_dtype fp8 take one by one; leave them out")


def compile_layers(model):
    """Let torch.compile make each layer's forward pass; equal layers share it, for any length."""
    # beyond as many torch would run a layer as it is
    limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    torch._dynamo.config.recompile_limit = limit
    for layer in decoder_layers(model):
        layer.compile(backend=COMPILER, dynamic=True)


@torch.no_grad()
def to_float8(model, spec):
    """Bring a model to its device with its linear layers in 8 bits, see `float8`.

    Never are more than one layer's exact weights there: each layer reads the probe, is rounded, and
    leaves the device to the next one.  All ranks that share the model take part.

    Raises:
        ValueError: nothing can be rounded, or the model predicts the probe otherwise than before.
    """
    routers, _ = pretrained.routers_of(model)

    def bring(layer, inputs):
        layer.to(spec.device)

    def shrink(layer, inputs, output):
        float8.use_float8(layer, routers)

    layers = decoder_layers(model)
    waiting = list(layers)
    del layers[:]
    model.to(spec.device)
    layers.extend(waiting)
    hooks = []
    for layer in layers:
        hooks += [layer.register_forward_pre_hook(bring), layer.register_forward_hook(shrink)]
    probe = torch.tensor([spec.probe], device=spec.device)
    exact = model(input_ids=probe, use_cache=False).logits[0, :, : spec.vocab]
    for hook in hooks:
        hook.remove()
    rounded = model(input_ids=probe, use_cache=False).logits[0, :, : spec.vocab]
    num_rounded = sum(weight.dtype == float8.FLOAT8 for weight in model.parameters())
    if not num_rounded:
        raise ValueError(f"--teacher_dtype fp8: {type(model).__name__} of --teacher {spec.path} "
                         "has no linear layers that can be rounded; use bfloat16")
    nats = 0.0
    for rows, rounded_rows in zip(exact.split(BLOCK), rounded.split(BLOCK)):
        total, _ = forward_kl(rounded_rows[None], rows[None], None)
        nats += float(total) / len(exact)
    text = (f"--teacher {spec.path}: in fp8 its predictions differ from those in bfloat16 by "
            f"{nats:.2g} nats a token ({num_rounded} layers, {len(exact)} tokens)")
    if not nats <= MOST_NATS:  # NaN too
        raise ValueError(f"{text}, and up to {MOST_NATS} may be; use --teacher_dtype bfloat16")
    if int(os.environ.get("RANK", 0)) == 0:
        print_line(text)


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
