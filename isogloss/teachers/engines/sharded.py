"""Load a teacher of which ranks hold a shard each, in two ways.

It is asked by all ranks that share it together; every one of these ends up with all hidden states,
and all logits.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import mixin
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from isogloss.flags.model_names import read_model_name
from isogloss.job import ipc
from isogloss.job.layout import node_size
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models.compiled_layers import compile_layers
from isogloss.teachers.engines.plans import keep_local_heads, local_tensors, plan_of
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
    """Shard a model over neighboring ranks as its plan in transformers says, experts included."""
    replica = Replica(spec.degree)
    check_files(local_folder(spec.path))  # without them all ranks end here, not one of them below
    plan = plan_of(config_of(spec), spec.degree, spec.trust_remote_code)
    mesh = DeviceMesh.from_group(replica.group, torch.device(spec.device).type)
    # transformers would make a mesh of all ranks, whatever `device_mesh` it is given
    meshes = SimpleNamespace(get_mesh=lambda names: mesh)
    with mock.patch.object(mixin, "initialize_distributed_mesh",
                           lambda config: (torch.device(spec.device), meshes)):
        model = load_weights(spec, distributed_config=plan.distributed_config(spec.degree))
    model = frozen(model)
    if plan.keeps_heads:
        keep_local_heads(model, mesh.get_local_rank(), spec.degree)
    if spec.compile == "true":
        compile_layers(model)
    gathered = _gathered(model.get_output_embeddings())
    weight, bias = once_per_node(lambda: gathered, spec.device)
    tensors = local_tensors(model)
    num_parameters = sum(tensor.numel() for tensor in tensors)
    teacher = ModelTeacher(
        _shared(model, replica, spec), head_with(weight, bias, spec), spec, "tensor_parallel",
        num_parameters, spec.degree)
    return teacher.offloaded(tensors)


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
            weight, bias = once_per_node(lambda: _copy_of(head), spec.device)
        engine = deepspeed.initialize(model=WholeModel(model), config=ds_config)[0]
    engine.eval()
    num_parameters = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    return ModelTeacher(engine, head_with(weight, bias, spec), spec, "zero3", num_parameters)


def load_engine(spec):
    """Let an engine beside the job hold a model; see vllm.py."""
    from isogloss.teachers.engines import vllm

    return vllm.load_engine(spec)


# Ways to load a model: ModelSpec -> ModelTeacher.
LOADERS = {
    "tensor_parallel": load_tensor_parallel,
    "zero3": load_zero3,
    "vllm": load_engine,
}


def _shared(model, replica, spec):
    # ranks of one sequence group ask with the same ids; whole groups make up the replica then
    same_ids = spec.same_ids or spec.sequence_parallel_size % spec.degree == 0
    return SharedModel(WholeModel(model), replica, same_ids, spec.sequence_parallel_size)


def head_with(weight, bias, spec):
    """Return what `head_of` makes of a model with this head."""
    layer = nn.Module()
    layer.weight = weight.detach()
    layer.bias = bias
    model = nn.Module()
    model.config = config_of(spec).get_text_config()
    model.get_output_embeddings = lambda: layer
    return head_of(model, spec.vocab)


# --- files ----------------------------------------------------------------------------------------


def check_files(folder):
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"--teacher {folder}: no .safetensors files, which sharded loading reads; "
                         "save the model with save_pretrained, or use --teacher_engine zero3")


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


def once_per_node(load, device):
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


def local_folder(path):
    """Return the directory of a checkpoint's safetensors files."""
    name = read_model_name("teacher", path)
    folder = name.base
    if not Path(folder).is_dir():
        folder = snapshot_download(folder, revision=name.revision, allow_patterns=["*.safetensors"])
    return Path(folder).resolve()
