"""Count what a layer launches and moves on a GPU that is not there, plain and compiled.

    python -m benchmarks.dry_layer                     # Llama-3.2-1B
    python -m benchmarks.dry_layer --models Qwen/Qwen3-0.6B,HuggingFaceTB/SmolLM2-135M

It needs what benchmarks/dry_gpu.py needs.  A line says, of a layer's forward pass and of both
passes, how many kernels are launched beside matmuls and attention, and how many MB these read and
write a token.  A plain operator reads each argument once and writes what it returns; of what is
compiled the compiler counts.  The command ends with status 1 where a compiled layer is above
BOUNDS.
"""

import functools
import re
import sys
from pathlib import Path

import fire
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import dry_gpu
from benchmarks.loss import as_list
from isogloss.models.compiled_layers import compile_layers, decoder_layers
from isogloss.plan import ARCHITECTURES

SAMPLES, LENGTH = 2, 2048
BOUNDS = {"meta-llama/Llama-3.2-1B": (50, 0.3)}  # most launches of a layer, most MB a token
LEFT_OUT = {"mm", "addmm", "bmm"}  # and attention


class LayerTraffic(dry_gpu.Traffic):
    """Count all but matmuls and attention."""

    def __torch_dispatch__(self, called, kinds, args=(), kwargs=None):
        name = called.overloadpacket.__name__
        if name in LEFT_OUT or "scaled_dot_product" in name:
            return called(*args, **kwargs or {})
        return super().__torch_dispatch__(called, kinds, args, kwargs)


def model_of(name):
    """Return a model of a published shape with a single layer and few tokens, in bfloat16."""
    fields = yaml.safe_load(ARCHITECTURES.read_text())[name]
    fields = {key: value for key, value in fields.items() if key not in ("source", "published")}
    config = AutoConfig.for_model(**fields | {"num_hidden_layers": 1, "vocab_size": 64})
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def arguments_of(model, length):
    """Return (arguments, those by name) with which a model calls its layer."""
    config = model.config
    hidden = torch.empty(SAMPLES, length, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    angles = [torch.empty(1, length, model.model.layers[0].self_attn.head_dim, device="cuda",
                          dtype=torch.bfloat16) for _ in range(2)]
    positions = torch.empty(1, length, device="cuda", dtype=torch.long)
    named = {"attention_mask": None, "position_ids": positions, "past_key_values": None,
             "use_cache": False, "position_embeddings": tuple(angles)}
    return (hidden.requires_grad_(),), named


def plain_counts(name):
    """Return (launches, bytes) of the forward pass of a layer, and of both passes."""
    mode = dry_gpu.FakeTensorMode(allow_non_fake_inputs=True)
    traffic = LayerTraffic()
    with mode:
        model = model_of(name)
        args, named = arguments_of(model, LENGTH)
        [layer] = decoder_layers(model, "")
        with traffic:
            out = layer(*args, **named)
            forward = traffic.launches, traffic.nbytes
            out.backward(torch.empty_like(args[0]))
    return forward, (traffic.launches, traffic.nbytes)


def compiled_counts(name):
    """Return the same of what the compiler makes of a layer."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode  # seconds of imports

    def count(graph, code):
        nbytes = 0
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode):
                nbytes += node.get_read_write_buffers_sizes()
        return len(re.findall(r"\.run\(", code)), nbytes

    model = model_of(name)
    args, named = arguments_of(model, LENGTH)
    [forward] = compile_layers(model, learns=True)
    with dry_gpu.each_graph(count) as counted:
        dry_gpu.compile_both_passes(functools.partial(forward.inner, **named), args)
    launches, sizes = zip(*counted)
    return counted[0], (sum(launches), sum(sizes))


def line_of(name):
    """Return the counts of a model's layer."""
    line = {"layer of": name, "tokens": SAMPLES * LENGTH, "wrong": {}}
    for kind, counts in (("plain", plain_counts), ("compiled", compiled_counts)):
        for passes, (launches, nbytes) in zip(("forward", "both"), counts(name)):
            line[f"{kind}, {passes}"] = {
                "launches": launches, "MB": dry_gpu.megabytes(nbytes, SAMPLES * LENGTH)}
    most_launches, most_megabytes = BOUNDS.get(name, (float("inf"),) * 2)
    found = line["compiled, both"]
    if found["launches"] > most_launches or found["MB"] > most_megabytes:
        line["wrong"] = {"bounds": f"{most_launches} launches and {most_megabytes} MB a token"}
    return line


def main(models="meta-llama/Llama-3.2-1B"):
    """Count layers of these models of isogloss/architectures.yaml, with commas."""
    dry_gpu.print_all(map(line_of, as_list(models)))


if __name__ == "__main__":
    fire.Fire(main)
