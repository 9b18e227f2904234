"""The frozen teacher: load, shard, forward.

It lives in the student's job, in a precision of its own, and never builds a graph.  It is held in one of
four ways (`ENGINES`): a whole copy per rank; sharded over some neighboring ranks by DeepSpeed's
tensor-parallel inference engine; or, for architectures that this does not know, sharded over all ranks by the
tensor parallelism of transformers, or partitioned over them by ZeRO-3.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_tp
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

import ipc
from isogloss.layout import Replica, node_size
from teacher_mixing import average_teachers
from tiles import Head, HiddenLogits, StoredLogits, TopKLogits, head_of

ENGINES = "auto", "replicated", "tensor_parallel", "transformers", "zero3"
SIGNALS = "hidden", "logits", "topk"
# model types that DeepSpeed shards; the second ones only once every rank has held them whole
SHARDED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3"}
SHARDED_ONCE_WHOLE = {"gpt_neox"}
BLOCK = 256  # positions whose logits are computed at a time


class Teacher(NamedTuple):
    """A frozen teacher, ready to be asked; what holds it together is asked by all its ranks.

    hidden: ids (B, T), or (2, B, T), ids and positions of packed samples -> final hidden states (B, T, H).
    logits: ids (B, T) -> the model's own logits (B, T, W or more).
    head: what maps the one to the other, whole on every rank, cut to the tokenizer.
    engine: which of `ENGINES` holds it.
    parameters: numbers of it that this rank holds, its copy of the head not counted.
    degree: ranks that hold it together.
    awake: () -> context in which its weights are on the device; many calls in one cost one transfer.
    """

    hidden: Callable
    logits: Callable
    head: Head
    engine: str
    parameters: int
    degree: int = 1
    awake: Callable = contextlib.nullcontext

    @torch.no_grad()
    def rows(self, ids_BT, signal="hidden", top_k=256):
        """Logits of any positions of the flattened (B * T).

        Args:
            signal: what is kept until they are asked for: "hidden" states, "logits", or the "topk" likeliest
                tokens, the rest of the probability being spread evenly.
        Returns:
            HiddenLogits, StoredLogits or TopKLogits.
        """
        if signal == "logits":
            return StoredLogits(self.logits(ids_BT)[..., : self.head.vocab].flatten(0, 1))
        rows = HiddenLogits(self.hidden(ids_BT).flatten(0, 1), self.head)
        return rows if signal == "hidden" else _likeliest(rows, top_k)


def _likeliest(rows, top_k):
    """TopKLogits of all positions, a block at a time."""
    vocab, places = rows.head.vocab, torch.arange(len(rows.hidden_TH), device=rows.hidden_TH.device)
    found = []
    for block in places.split(BLOCK):
        logits = rows(block).float()
        total, top = logits.logsumexp(-1), logits.topk(min(top_k, vocab))
        found.append((top.indices.int(), top.values - total[:, None], total))
    ids, logp, total = map(torch.cat, zip(*found))
    return TopKLogits(ids, logp, vocab, total)


class EnsembleLogits(NamedTuple):
    """Logits of the mean of several teachers with one vocabulary; see `teacher_mixing.average_teachers`."""

    of_teachers: tuple
    shares_M: torch.Tensor
    space: str

    def __call__(self, rows):
        found = [of_one(rows)[None] for of_one in self.of_teachers]
        return average_teachers(found, self.shares_M, self.space)[0]

    def columns(self, ids):
        return lambda rows: self(rows).index_select(1, ids)


def payload_bytes(rows):
    """What a teacher's signal occupies until the loss reads it."""
    if isinstance(rows, EnsembleLogits):
        return sum(map(payload_bytes, rows.of_teachers))
    return sum(x.nbytes for x in getattr(rows, "shards", rows) if isinstance(x, torch.Tensor))


def choose_engine(engine, degree, config, ranks):
    """The engine that "auto" means; the others are checked.

    Args:
        config: of the model, for text.
        ranks: all that hold teachers.
    Raises:
        ValueError: an engine that cannot hold this model in `degree` parts.
    """
    known, model_type = SHARDED | SHARDED_ONCE_WHOLE, config.model_type
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    planned = bool(getattr(config, "base_model_tp_plan", None)) and heads % degree == 0
    if engine == "auto" and (degree == 1 or model_type in known):
        return "replicated" if degree == 1 else "tensor_parallel"
    if engine == "auto":
        return "transformers" if planned and degree == ranks else "zero3"
    if engine == "transformers" and not (planned and degree == ranks > 1):
        why = f"has no plan to shard {model_type} models of {heads} key-value heads so" if not planned else (
            f"takes all of the {ranks} ranks that hold teachers, and more than one")
        raise ValueError(f"--teacher_tp {degree} with --teacher_engine transformers: it {why}; use auto")
    if engine == "tensor_parallel" and model_type not in known:
        raise ValueError(f"--teacher_engine tensor_parallel: does not shard {model_type} models, only "
                         f"{', '.join(sorted(known))}; use auto or zero3")
    if engine == "replicated" and degree > 1:
        raise ValueError(f"--teacher_tp {degree} with --teacher_engine replicated: a whole copy per rank is "
                         "degree 1; use auto")
    return engine


class Offload:
    """A model's weights in the host's memory (pinned where there is a GPU), on the device while awake."""

    def __init__(self, model, device):
        self.device, self.users = device, 0
        pinned = torch.cuda.is_available()
        self.home = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters()]
        self.home = [(p, x.pin_memory() if pinned else x) for p, x in self.home]
        self._sleep()

    def _sleep(self):
        for p, at_home in self.home:
            p.data = at_home

    @contextlib.contextmanager
    def awake(self):
        if self.users == 0:
            for p, at_home in self.home:
                p.data = at_home.to(self.device, non_blocking=True, copy=True)
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            if self.users == 0:
                self._sleep()


def _offloaded(teacher, model, device):
    """The same Teacher, its weights being elsewhere between two uses; the head stays on the device."""
    kept = [x if x is None else x.detach() for x in teacher.head[:2]]
    head = teacher.head._replace(weight_VH=kept[0], bias_V=kept[1])
    offload = Offload(model, device)

    def while_awake(run):
        def call(ids):
            with offload.awake():
                return run(ids)
        return call

    calls = {"hidden": while_awake(teacher.hidden), "logits": while_awake(teacher.logits)}
    return teacher._replace(**calls, head=head, awake=offload.awake)


class Order(NamedTuple):
    """What to load and how it will be asked, see `load_teacher`; config and dtype are resolved."""

    path: str
    vocab: int
    config: object
    dtype: torch.dtype
    device: object
    degree: int
    offload: bool
    shared: bool
    alike: int


def load_teacher(path, vocab, dtype="auto", device="cpu", engine="replicated", degree=1, offload=False,
                 shared=False, alike=1):
    """A causal language model without gradients; all ranks take part unless it is "replicated".

    Args:
        path: hub id or directory.
        vocab: tokens of its tokenizer; an lm_head is often padded beyond them.
        dtype: "auto" (as in the checkpoint), "float32", "bfloat16" or "float16".
        engine, degree: one of `ENGINES` and the ranks that share the model, see `choose_engine`.
        offload: keep the weights in the host's memory but for the teacher's forward passes.
        shared: the ranks that hold it together will ask with the same ids; else each with its own.
        alike: neighboring ranks that ask with the same ids.
    Returns:
        Teacher.
    Raises:
        ValueError: see `choose_engine`.
    """
    config = AutoConfig.from_pretrained(path)
    engine = choose_engine(engine, degree, config.get_text_config(), dist.get_world_size())
    dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    load = {"replicated": _replicated, "tensor_parallel": _tensor_parallel, "transformers": _transformers,
            "zero3": _zero3}[engine]
    order = Order(path, vocab, config, dtype, device, degree, offload, shared or alike % degree == 0, alike)
    # the inference engine makes all ranks' random numbers equal
    with weights_of("teacher", path), torch.random.fork_rng():
        return load(order)


@contextlib.contextmanager
def weights_of(role, path):
    """A ValueError where a directory has a config and no weights that can be read."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"--{role} {path}: its weights cannot be loaded "
                         f"({str(error).strip().splitlines()[0]})") from None


def whole_teacher(model, vocab):
    """The Teacher that a model on this rank makes."""
    return Teacher(
        lambda ids: model.base_model(**inputs_of(ids), use_cache=False)[0],
        lambda ids: model(**inputs_of(ids), use_cache=False).logits,
        head_of(model, vocab), "replicated", sum(p.numel() for p in model.parameters()))


def inputs_of(ids):
    """Arguments of a model for what a Teacher is asked with."""
    return {"input_ids": ids} if ids.dim() == 2 else {"input_ids": ids[0], "position_ids": ids[1]}


def _replicated(order):
    model = _frozen(AutoModelForCausalLM.from_pretrained(order.path, dtype=order.dtype)).to(order.device)
    teacher = whole_teacher(model, order.vocab)
    return _offloaded(teacher, model, order.device) if order.offload else teacher


def _tensor_parallel(order):
    """Every rank of a replica ends up with all hidden states, and with all logits."""
    replica, config, dtype, how = Replica(order.degree), order.config, order.dtype, {}
    with contextlib.ExitStack() as stack:
        for silent in (contextlib.redirect_stdout, contextlib.redirect_stderr):  # it prints what it shards
            stack.enter_context(silent(io.StringIO()))
        if config.get_text_config().model_type in SHARDED:
            folder = _local(order.path)
            with deepspeed.OnDevice(dtype=dtype, device="meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            listed = {"type": "ds_model", "checkpoints": [f.name for f in _shards(folder)], "version": 1.0}
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            file.write(json.dumps(listed))
            file.flush()
            stack.enter_context(_every_layer_loads())
            how = {"checkpoint": file.name, "base_dir": str(folder)}
            head = model.get_output_embeddings()
            [name] = [name for name, module in model.named_modules() if module is head]
            weight, bias = _once_per_node(lambda: _from_files(folder, name, dtype), order.device)
        else:
            model = AutoModelForCausalLM.from_pretrained(order.path, dtype=dtype)
            head = model.get_output_embeddings()
            weight, bias = _once_per_node(lambda: _copied(head), order.device)
        shape = {"tp_size": order.degree, "mpu": replica, "tp_group": replica.group}
        model = deepspeed.init_inference(model, tensor_parallel=shape, dtype=dtype, **how).module
    for p in model.parameters():  # some are still the files' own pages, and keep all of them mapped
        p.data = p.data.clone()
    model = _frozen(model)
    if weight is None:  # tied: every rank keeps the whole input embedding
        weight = model.get_input_embeddings().weight
    teacher = _of_replica(model, replica, order)._replace(
        head=_head(weight, bias, order), engine="tensor_parallel")
    return _offloaded(teacher, model, order.device) if order.offload else teacher


def _of_replica(model, replica, order):
    """A Teacher of which every rank of the replica has a part, and gets all that it says."""
    base, own = (lambda ids: model.base_model(**inputs_of(ids), use_cache=False)[0],
                 lambda ids: model(**inputs_of(ids), use_cache=False).logits)
    each = partial(replica.of_each, alike=order.alike)
    hidden, logits = [run if order.shared else partial(each, run) for run in (base, own)]
    return Teacher(hidden, logits, None, "", sum(p.numel() for p in model.parameters()), len(replica.ranks))


def _transformers(order):
    """Sharded over all ranks as the model's own plan says, experts included."""
    if order.offload:
        raise ValueError(f"--teacher_offload: not for {order.path}, which transformers shards; leave it out, "
                         "or use --teacher_engine zero3")
    replica, folder, dtype = Replica(order.degree), _local(order.path), order.dtype
    _shards(folder)  # without them all ranks end here, not one of them below
    model = _frozen(AutoModelForCausalLM.from_pretrained(
        order.path, dtype=dtype, distributed_config=DistributedConfig(tp_size=order.degree)))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}

    def whole():
        weight, bias = _from_files(folder, names[head], dtype)
        return (_from_files(folder, names[embedding], dtype)[0] if weight is None else weight), bias

    weight, bias = _once_per_node(whole, order.device)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    return _of_replica(model, replica, order)._replace(
        head=_head(weight, bias, order), engine="transformers", parameters=held)


def _zero3(order):
    """Partitioned over all ranks, whatever the degree; every rank runs its own samples, all at once."""
    zero = {"stage": 3} | ({"offload_param": {"device": "cpu", "pin_memory": True}} if order.offload else {})
    ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if order.dtype != torch.float32:
        ds_config["bf16" if order.dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    keep_alive = HfDeepSpeedConfig(ds_config)
    model = _frozen(AutoModelForCausalLM.from_pretrained(order.path, dtype=order.dtype))
    del keep_alive
    unset_hf_deepspeed_config()
    head = model.get_output_embeddings()
    with deepspeed.zero.GatheredParameters(list(head.parameters())):
        weight, bias = _once_per_node(lambda: _copied(head), order.device)
    own = model.forward

    def forward(ids, hidden):
        if hidden:
            return model.base_model(**inputs_of(ids), use_cache=False)[0]
        return own(**inputs_of(ids), use_cache=False).logits

    model.forward = forward
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    engine.eval()
    return Teacher(
        lambda ids: engine(ids, True), lambda ids: engine(ids, False),
        _head(weight, bias, order), "zero3", sum(p.ds_tensor.numel() for p in model.parameters()))


def _frozen(model):
    return model.requires_grad_(False).eval()


def _head(weight, bias, order):
    """What `head_of` makes of a model with this head."""
    layer = nn.Module()
    layer.weight, layer.bias = weight.detach(), bias
    model = nn.Module()
    model.config, model.get_output_embeddings = order.config.get_text_config(), lambda: layer
    return head_of(model, order.vocab)


def _local(path):
    """The directory of a checkpoint's safetensors files."""
    if not Path(path).is_dir():
        path = snapshot_download(path, allow_patterns=["*.safetensors"])
    return Path(path).resolve()


def _shards(folder):
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"--teacher {folder}: no .safetensors files, which sharded loading reads; save the "
                         "model with save_pretrained, or use --teacher_engine zero3")
    return found


def _from_files(folder, name, dtype):
    """(weight, bias) of a layer; None for what the files do not hold, such as a tied head."""
    found = {}
    for path in _shards(folder):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                if key in (f"{name}.weight", f"{name}.bias"):
                    found[key] = file.get_tensor(key).to(dtype)
    return found.get(f"{name}.weight"), found.get(f"{name}.bias")


def _copied(layer):
    return tuple(x if x is None else x.detach().clone() for x in (layer.weight, layer.bias))


def _once_per_node(load, device):
    """What load() gives, a tuple of tensors or None, on every rank; on the CPU a node holds it once."""
    if torch.device(device).type != "cpu":  # a kernel cannot read another device's memory
        return tuple(x if x is None else x.to(device) for x in load())
    node = Replica(node_size())
    sent = [None]
    if dist.get_rank() == node.ranks[0]:
        sent = [[x if x is None else ipc.share(x) for x in load()]]
    dist.broadcast_object_list(sent, node.ranks[0], group=node.group)
    return tuple(handle and ipc.attach(handle) for handle in sent[0])


@contextlib.contextmanager
def _every_layer_loads():
    """DeepSpeed loads only the norms on its own list, and leaves the others as they were (its issue 8447)."""
    before = auto_tp.Loading.is_load_module
    layers = nn.Linear, nn.Embedding, nn.LayerNorm

    def is_load_module(module):
        return isinstance(module, layers) or type(module).__name__.endswith("RMSNorm")

    auto_tp.Loading.is_load_module = is_load_module
    try:
        yield
    finally:
        auto_tp.Loading.is_load_module = before


def hidden_head_is_right(rows, logits):
    """Are these the model's own logits?  Not for an architecture that does more than `head_of` knows."""
    logits = logits.flatten(0, 1)
    found = rows(torch.arange(len(logits), device=logits.device)).float()
    worst = 1e-4 if logits.dtype == torch.float32 else 0.05
    return (found - logits.float()).norm() <= worst * logits.float().norm()
