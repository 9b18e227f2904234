"""Let torch.compile make the layers of a model: one graph for all equal layers and any length.

A layer's forward pass alone is compiled, so hooks and activation checkpointing stay around it.
Equal layers share code, so torch compiles the first of them.  A layer that is no single graph, or
a very large one, runs as it is, and a line says why.

Tests: tests/test_compiled_layers.py, tests/test_teacher.py.
"""

from functools import cache, partial

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from isogloss.job.watch import is_first_rank, print_line
from isogloss.models.compiled_formula import first_line
from isogloss.models.compiler import TOLERANCE

COMPILER = "inductor"
# Compiled once each: kinds of layers x whether there is one row x kinds of masks, of all models.
MOST_VARIANTS = 64
# Of a graph.  A layer of attention and an MLP has about 100; one that goes from position to
# position has thousands, and would be compiled for minutes.
MOST_OPERATIONS = 1000


class CompiledForward:
    """Stand in for the forward pass of a layer.

    Attributes:
        layer: it; plain: its own forward pass, which may checkpoint its activations.
        inner: the same without; compiled: what torch.compile makes of this.
        flag: for the line; learns: passes that build a graph of autograd are compiled; else those
            that do not.
        reasons: {kind of layers: why they run as they are}, of all layers of the model.
        heard: a list that gets (arguments, those by name) of every call, or None.
        is_known: it was compared with the layer itself; a layer that learns is compared by
            student/options/compiled.py, any other one in its first pass.
    """

    def __init__(self, layer, flag, reasons, *, learns, whole):
        self.layer = layer
        self.plain = layer.forward
        unwrapped = getattr(type(layer).forward, "__wrapped__", None)
        is_changed = "forward" in vars(layer) or unwrapped is None
        self.inner = self.plain if is_changed else unwrapped.__get__(layer)
        self.compiled = torch.compile(
            self.inner, backend=backend_of(COMPILER), dynamic=True, fullgraph=whole)
        self.flag = flag
        self.learns = learns
        self.reasons = reasons
        types = [str(getattr(layer, name, "")) for name in ("layer_type", "attention_type")]
        self.kind = " ".join(filter(None, [type(layer).__name__, *types]))
        self.heard = None
        self.is_known = learns

    def __call__(self, *args, **kwargs):
        if self.heard is not None:
            self.heard.append((args, kwargs))
        # a cache grows with every token, and would be compiled as often
        is_written = kwargs.get("past_key_values") is not None
        is_plain = self.kind in self.reasons or torch.is_grad_enabled() != self.learns
        if is_plain or is_written:
            return self.plain(*args, **kwargs)
        if self.layer.training and getattr(self.layer, "gradient_checkpointing", False):
            checkpoint = self.layer._gradient_checkpointing_func
            return checkpoint(partial(self.run, **kwargs), *args)
        return self.run(*args, **kwargs)

    def run(self, *args, **kwargs):
        if self.kind in self.reasons:
            return self.inner(*args, **kwargs)
        try:
            compiled = self.compiled(*args, **kwargs)
            return compiled if self.is_known else self.compared(compiled, args, kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self.give_up(first_line(error))
            return self.inner(*args, **kwargs)

    def compared(self, compiled, args, kwargs):
        """Return what the layer itself gives; from here on too, where the compiled one differs."""
        self.is_known = True
        plain = self.inner(*args, **kwargs)
        ours, right = [out[0] if isinstance(out, tuple) else out for out in (compiled, plain)]
        difference = float((ours - right).float().norm() / right.float().norm())
        tolerance = TOLERANCE.get(right.dtype, TOLERANCE[torch.float32])
        if not difference <= tolerance:
            self.give_up(f"compiled, it differs by {difference:.2g}, more than {tolerance:g}")
        return plain

    def give_up(self, reason):
        """Run all layers of this kind as they are from here on; rank 0 says why."""
        self.reasons[self.kind] = reason
        if is_first_rank():
            print_line(f"{self.flag}: {self.kind} is not compiled, and runs as it is ({reason})")


@cache
def backend_of(compiler):
    """Return a backend of torch.compile that refuses large graphs; layers share what it makes."""
    if isinstance(compiler, str):
        compiler = torch._dynamo.lookup_backend(compiler)

    def backend(graph, inputs):
        count = len(graph.graph.nodes)
        if count > MOST_OPERATIONS:
            raise ValueError(f"it has {count} operations, more than {MOST_OPERATIONS}")
        return compiler(graph, inputs)

    return backend


def decoder_layers(model, flag):
    """Return the layers of a causal language model that follow one another; ValueError: none.

    Args:
        flag: for the error.
    """
    number = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise ValueError(f"{flag}: {type(model).__name__} has no list of its {number} layers, which "
                     "are compiled one by one; leave it out")


def compile_layers(model, flag="--teacher_compile", learns=False, whole=True):
    """Compile each layer's forward pass; return the CompiledForwards.

    Args:
        flag: that asks for it, for lines and errors.
        learns: see CompiledForward.
        whole: a layer has to be a single graph; else torch may cut it into several.
    """
    # beyond as many torch would run a layer as it is
    limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    torch._dynamo.config.recompile_limit = limit
    reasons = {}
    forwards = []
    for layer in decoder_layers(model, flag):
        if any(True for _ in layer.parameters()):  # else a stage of a pipeline has its weights
            layer.forward = CompiledForward(layer, flag, reasons, learns=learns, whole=whole)
            forwards.append(layer.forward)
    return forwards
