"""Load a teacher of which neighboring ranks hold a shard each, in three ways.

It is asked by all ranks that share it together; every one of these ends up with all hidden states,
and all logits.
"""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_tp
from deepspeed.utils import groups
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from isogloss.flags.model_names import read_model_name
from isogloss.job import ipc
from isogloss.job.layout import node_size
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models import pretrained
from isogloss.models.compiled_layers import compile_layers
from isogloss.teachers.engines.layers import use_plain_layers
from isogloss.teachers.engines.replicas import Replica
from isogloss.teachers.engines.whole import (
    ModelTeacher,
    WholeModel,
    config_of,
    dtype_of,
    frozen,
    load_weights,
)
from isogloss.tiles import head_of

# Positions that the ranks of a replica let it run at once.  Enough that matmuls are bound by
# arithmetic; hidden states of 8,192 numbers in bfloat16 are 256 MiB of them.  Not tuned.
JOINED_POSITIONS = 16_384


@dataclass
class SharedModel:
    """Run a model of which every rank of a replica has a shard.

    Attributes:
        whole: WholeModel; a call of it takes all ranks of the replica.
        replica: Replica.
    """

    whole: WholeModel
    replica: Replica
    same_ids: bool
    sequence_parallel_size: int

    def __call__(self, ids, hidden):
        def run(ids):
            return self.whole(ids, hidden)

        if self.same_ids:
            return run(ids)
        # logits of one member are as much as memory was planned for
        return self.replica.run_for_each_member(
            run, ids, self.sequence_parallel_size, JOINED_POSITIONS if hidden else 0)


def load_tensor_parallel(spec):
    """Shard a model over neighboring ranks by DeepSpeed's inference engine."""
    replica = Replica(spec.degree)
    config = pretrained.config_of_weights("teacher", spec.path, spec.trust_remote_code)
    with contextlib.ExitStack() as stack:
        # DeepSpeed prints every layer that it shards
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        model, weight, bias = _shard_while_loading(spec, config, replica, stack)
    for parameter in model.parameters():
        # some are still the files' own pages, and keep all of them mapped
        parameter.data = parameter.data.clone()
    model = frozen(model)
    use_plain_layers(model)
    if spec.compile == "true":
        compile_layers(model)
    if weight is None:  # tied: every rank keeps the whole input embedding
        weight = model.get_input_embeddings().weight
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    teacher = ModelTeacher(
        _shared(model, replica, spec), _head(weight, bias, spec), spec, "tensor_parallel",
        num_parameters, spec.degree)
    return teacher.offloaded(model)


def _shard_while_loading(spec, config, replica, stack):
    """Return (sharded model, head's weight or None, its bias or None); no rank loads it whole."""
    dtype = dtype_of(spec)
    folder = local_folder(spec.path)
    with deepspeed.OnDevice(dtype=dtype, device="meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=spec.trust_remote_code,
            **pretrained.attention_options(spec.attention))
    names = [file.name for file in _weight_files(folder)]
    checkpoint = {"type": "ds_model", "checkpoints": names, "version": 1.0}
    # all norms: DeepSpeed skips those that are not on its list (its issue 8447)
    stack.enter_context(mock.patch.object(auto_tp.Loading, "is_load_module", _is_loaded))
    # the head stays whole, because a tile of logits needs all of its columns
    head = model.get_output_embeddings()
    [name] = [name for name, module in model.named_modules() if module is head]
    weight, bias = _once_per_node(lambda: _read_layer(folder, name, dtype), spec.device)
    tensor_parallel = {"tp_size": spec.degree, "mpu": replica, "tp_group": replica.group}
    engine = deepspeed.init_inference(
        model, tensor_parallel=tensor_parallel, dtype=dtype, checkpoint=checkpoint,
        base_dir=str(folder))
    return engine.module, weight, bias


def load_transformers(spec):
    """Shard a model over all ranks as its own tensor-parallel plan says, experts included."""
    if spec.offload:
        raise ValueError(f"--teacher_offload: not for {spec.path}, which transformers shards; "
                         "leave it out, or use --teacher_engine zero3")
    replica = Replica(spec.degree)
    _weight_files(local_folder(spec.path))  # without them all ranks end here, not one of them below
    model = frozen(load_weights(spec, distributed_config=DistributedConfig(tp_size=spec.degree)))
    if spec.compile == "true":
        compile_layers(model)
    gathered = _gathered(model.get_output_embeddings())
    weight, bias = _once_per_node(lambda: gathered, spec.device)
    num_parameters = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        num_parameters += local.numel()
    return ModelTeacher(
        _shared(model, replica, spec), _head(weight, bias, spec), spec, "transformers",
        num_parameters, len(replica.ranks))


def load_zero3(spec):
    """Partition a model of any architecture over all ranks, whatever the degree."""
    dtype = dtype_of(spec)
    zero = {"stage": 3}
    if spec.offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if dtype != torch.float32:
        ds_config["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    # All ranks are data-parallel ones, though the student may be a pipeline: DeepSpeed keeps the
    # layout of an engine for all later ones.
    with mock.patch.object(groups, "mpu", None):
        keep_alive = HfDeepSpeedConfig(ds_config)  # from_pretrained partitions while this exists
        try:
            model = frozen(load_weights(spec))
        finally:
            del keep_alive
            unset_hf_deepspeed_config()
        head = model.get_output_embeddings()
        with deepspeed.zero.GatheredParameters(list(head.parameters())):
            weight, bias = _once_per_node(lambda: _copy_of(head), spec.device)
        engine = deepspeed.initialize(model=WholeModel(model), config=ds_config)[0]
    engine.eval()
    num_parameters = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    return ModelTeacher(engine, _head(weight, bias, spec), spec, "zero3", num_parameters)


# Ways to load a model: ModelSpec -> ModelTeacher.
LOADERS = {
    "tensor_parallel": load_tensor_parallel,
    "transformers": load_transformers,
    "zero3": load_zero3,
}


def _shared(model, replica, spec):
    # ranks of one sequence group ask with the same ids; whole groups make up the replica then
    same_ids = spec.same_ids or spec.sequence_parallel_size % spec.degree == 0
    return SharedModel(WholeModel(model), replica, same_ids, spec.sequence_parallel_size)


def _head(weight, bias, spec):
    """Return what `head_of` makes of a model with this head."""
    layer = nn.Module()
    layer.weight = weight.detach()
    layer.bias = bias
    model = nn.Module()
    model.config = config_of(spec).get_text_config()
    model.get_output_embeddings = lambda: layer
    return head_of(model, spec.vocab)


# --- files ----------------------------------------------------------------------------------------


def _weight_files(folder):
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--teacher {folder}: no .safetensors files, which sharded loading reads; "
                         "save the model with save_pretrained, or use --teacher_engine zero3")
    return files


def _read_layer(folder, name, dtype):
    """Return (weight, bias) of a layer; None for what the files lack, such as a tied head."""
    tensors = {}
    for path in _weight_files(folder):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                if key in (f"{name}.weight", f"{name}.bias"):
                    tensors[key] = file.get_tensor(key).to(dtype)
    return tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")


def head_of_files(spec):
    """Return the Head of a model whose layers an engine holds; every rank of the job takes part.

    Raises:
        ValueError: no file has it.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            pretrained.config_of_weights("teacher", spec.path, spec.trust_remote_code),
            trust_remote_code=spec.trust_remote_code)
    names = {id(module): name for name, module in model.named_modules()}
    folder, dtype = local_folder(spec.path), dtype_of(spec)

    def load():
        weight, bias = None, None
        for layer in (model.get_output_embeddings(), model.get_input_embeddings()):
            if weight is None:  # the first is not in the files where both are one
                weight, bias = _read_layer(folder, names[id(layer)], dtype)
        if weight is None:
            raise ValueError(f"--teacher {spec.path}: no file has its output embeddings "
                             f"({names[id(model.get_output_embeddings())]}); leave "
                             "--teacher_engine to auto")
        return weight, bias

    return _head(*_once_per_node(load, spec.device), spec)


def _copy_of(layer):
    """Return (weight, bias or None), detached copies."""
    bias = None if layer.bias is None else layer.bias.detach().clone()
    return layer.weight.detach().clone(), bias


def _gathered(layer):
    """Return (weight, bias or None) of a layer that transformers has sharded; all ranks call it."""
    tensors = []
    for tensor in (layer.weight, layer.bias):
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        tensors.append(None if tensor is None else tensor.detach())
    return tensors


def _once_per_node(load, device):
    """Return the tensors or Nones of load() on every rank; on the CPU a node holds them once."""
    if torch.device(device).type != "cpu":  # a kernel cannot read another device's memory
        return [None if tensor is None else tensor.to(device) for tensor in load()]
    node = Replica(node_size())
    handles = []
    if dist.get_rank() == node.ranks[0]:
        for tensor in load():
            handles.append(None if tensor is None else ipc.publish(tensor).to_plain())
    handles = values_of_ranks(handles, node.group)[0]
    tensors = []
    for handle in handles:
        tensors.append(None if handle is None else ipc.attach(ipc.Handle.from_plain(handle)))
    return tensors


def _is_loaded(module):
    layers = nn.Linear, nn.Embedding, nn.LayerNorm
    return isinstance(module, layers) or type(module).__name__.endswith("RMSNorm")


def local_folder(path):
    """Return the directory of a checkpoint's safetensors files."""
    name = read_model_name("teacher", path)
    folder = name.base
    if not Path(folder).is_dir():
        folder = snapshot_download(folder, revision=name.revision, allow_patterns=["*.safetensors"])
    return Path(folder).resolve()
