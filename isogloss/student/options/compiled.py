"""Compile the student's layers (--compile), and see before the first step that they stay the same.

Tests: tests/test_compiled_layers.py.
"""

import deepspeed
import torch
import torch.distributed as dist

from isogloss.job.watch import print_line
from isogloss.models.compiled_formula import first_line
from isogloss.models.compiled_layers import compile_layers, decoder_layers
from isogloss.models.compiler import TOLERANCE, missing_compiler
from isogloss.models.pretrained import quantization_of
from isogloss.student.checks import evaluation_mode, student_batch

PROBED = 24  # positions of each of two rows; of no size that a model has


def check(cfg, layout):
    """Raise a ValueError where --compile true cannot work; auto says so, and compiles nothing."""
    method = cfg.quantize or quantization_of(layout.config)
    if method:
        give_up(cfg, f"--compile {cfg.compile}: the student's weights are quantized ({method}), "
                     "and their library has kernels of its own; leave it out")
    elif missing := missing_compiler():
        give_up(cfg, f"--compile {cfg.compile}: {missing}, which torch.compile needs; install it, "
                     "or leave the flag out")


def give_up(cfg, line):
    """Raise a ValueError where --compile true was asked for; else say so, and compile nothing."""
    if cfg.compile == "true":
        raise ValueError(line)
    if dist.get_rank() == 0:
        print_line(f"{line.rpartition(';')[0]}: its layers run as they are")
    cfg.settle("compile", "false")


def change(model, cfg):
    """Let ZeRO-3 gather the weights of a layer at once, before its forward pass, not inside."""
    try:
        kinds = {type(layer) for layer in decoder_layers(model, f"--compile {cfg.compile}")}
    except ValueError as error:
        give_up(cfg, str(error))
        return
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        deepspeed.utils.set_z3_leaf_modules(model, list(kinds))


def prepare(state, inputs, stack):
    """Compile the layers of the student, and compare each of them with itself; on all ranks.

    One that gives other numbers runs as it is, and a line says so.
    """
    if dist.get_rank() == 0:
        print_line("the student's layers are compiled, which takes up to a minute, once")
    # attention over shards of sequences talks to other ranks, in the middle of a layer
    forwards = compile_layers(state.engine.module.model, f"--compile {state.cfg.compile}",
                              learns=True, whole=state.cfg.sequence_parallel == 1)
    hear_calls(state, forwards)
    for forward in forwards:
        calls, forward.heard = forward.heard, None
        try:
            args, kwargs = calls[0]
            tolerance = TOLERANCE[args[0].dtype]
            with gathered(forward.layer):
                difference = difference_of(forward, args, kwargs)
        except Exception as error:  # whatever a compiler, or what it made, raises
            forward.give_up(first_line(error))
            continue
        if not difference <= tolerance:
            forward.give_up(f"compiled, its output or gradient differs by {difference:.2g}, more "
                            f"than {tolerance:g}")


def hear_calls(state, forwards):
    """Let each CompiledForward hear the arguments with which the model calls it."""
    shards = state.sequence_group
    columns = torch.arange(PROBED, device=state.device) + PROBED * (shards.rank if shards else 0)
    ids = torch.stack([columns, columns.flip(0)]) % state.vocab
    for forward in forwards:
        forward.heard = []
    with evaluation_mode(state):
        state.student.logits(student_batch(ids, columns.expand(2, -1) if shards else None))


def gathered(layer):
    """Return a context in which a layer's weights are whole; under ZeRO-3 all ranks take part."""
    weights = [weight for weight in layer.parameters() if hasattr(weight, "ds_id")]
    return deepspeed.zero.GatheredParameters(weights)


def difference_of(forward, args, kwargs):
    """Return by how much a compiled layer differs, relative; the larger one of output and gradient.

    Dropout, of which both draw their own, is switched off where there is any.
    """
    layer = forward.layer
    plain = results_of(forward, forward.plain, args, kwargs)
    again = results_of(forward, forward.plain, args, kwargs)
    drops = not torch.equal(plain[0], again[0])
    if drops:
        layer.eval()
        plain = results_of(forward, forward.plain, args, kwargs)
    compiled = results_of(forward, forward, args, kwargs)
    if drops:
        layer.train()
    return max(relative(compiled[:1], plain[:1]), relative(compiled[1:], plain[1:]))


def results_of(forward, function, args, kwargs):
    """Return [output, gradients by input and weights] of a layer, of a sum with random weights."""
    hidden, *others = args
    hidden = hidden.detach().requires_grad_()
    learned = [hidden, *(weight for weight in forward.layer.parameters() if weight.requires_grad)]
    out = function(hidden, *others, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(out, learned, hidden.detach(), allow_unused=True)
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def relative(ours, others):
    """Return the norm of the difference of some tensors over that of the others."""
    squares = [sum(float((x.float() - y.float()).square().sum()) for x, y in zip(ours, others)),
               sum(float(y.float().square().sum()) for y in others)]
    return (squares[0] / max(squares[1], 1e-30)) ** 0.5
