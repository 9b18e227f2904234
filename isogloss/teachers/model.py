"""Load and run teachers that are models on this job's ranks, in four ways.

They compute in a precision of their own and never build a graph.  Sharded models are asked by all
ranks that share them together; every one of these ends up with all hidden states, and all logits.
"""

import contextlib
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_tp
from deepspeed.utils import groups
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from isogloss.flags.model_names import read_model_name
from isogloss.job import ipc
from isogloss.job.layout import Replica, node_size, teacher_groups
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models import pretrained
from isogloss.teachers.layers import check_compile, compile_layers, use_plain_layers
from isogloss.teachers.protocol import BLOCK, TeacherSource, TeacherSpec
from isogloss.teachers.text_scores import ScoredLogits, scores_of_rows
from isogloss.tiles import Head, HiddenLogits, StoredLogits, TopKLogits, head_of

# Positions that the ranks of a replica let it run at once.  Enough that matmuls are bound by
# arithmetic; hidden states of 8,192 numbers in bfloat16 are 256 MiB of them.  Not tuned.
JOINED_POSITIONS = 16_384
# model types that DeepSpeed's inference engine shards as it loads them (0.19.8)
SHARDED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3"}


def reads_more_than_text(config):
    """Tell whether the language model of a config reads images or sounds, too, as Gemma 3 does.

    Of other models with such a config, as Llama 4, transformers loads the text part alone.
    """
    text_config = config.get_text_config()
    if text_config is config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is not type(text_config)


def resolve_engine(engine, degree, config, num_ranks, is_adapter=False):
    """Return the engine that "auto" means; check the others.

    Args:
        engine: key of ENGINES or "auto".
        degree: ranks that share the model.
        config: of the whole model.
        num_ranks: all ranks that hold teachers.
        is_adapter: it is an adapter on another model.
    Raises:
        ValueError: an engine that cannot shard this model over `degree` ranks.
    """
    if pretrained.quantization_of(config):
        return _engine_of_quantized(engine, degree, pretrained.quantization_of(config))
    if is_adapter and engine in ("auto", "tensor_parallel", "transformers"):
        if engine == "auto":
            return "replicated" if degree == 1 else "zero3"
        raise ValueError(f"--teacher_engine {engine}: reads shards of files, and an adapter is "
                         "none; use auto, or merge the adapter into its base model first")
    text_config = config.get_text_config()
    # DeepSpeed would take the text part for a model by itself, and leave it without weights
    model_type = config.model_type if reads_more_than_text(config) else text_config.model_type
    heads = getattr(text_config, "num_key_value_heads", None)
    heads = heads or getattr(text_config, "num_attention_heads", 0)
    # transformers' plans cut whole key-value heads
    has_plan = bool(getattr(text_config, "base_model_tp_plan", None)) and heads % degree == 0
    if engine == "auto":  # the first that can; a whole copy needs no communication
        if degree == 1:
            return "replicated"
        if model_type in SHARDED:
            return "tensor_parallel"
        return "transformers" if has_plan and degree == num_ranks else "zero3"
    if engine == "transformers" and not has_plan:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine transformers: it has no plan to shard "
            f"{model_type} models of {heads} key-value heads so; use auto")
    if engine == "transformers" and not degree == num_ranks > 1:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine transformers: it takes all of the "
            f"{num_ranks} ranks that hold teachers, and more than one; use auto")
    if engine == "tensor_parallel" and model_type not in SHARDED:
        raise ValueError(f"--teacher_engine tensor_parallel: does not shard {model_type} models, "
                         f"only {', '.join(sorted(SHARDED))}; use auto or zero3")
    if engine == "replicated" and degree > 1:
        raise ValueError(f"--teacher_tp {degree} with --teacher_engine replicated: a whole copy "
                         "per rank is degree 1; use auto")
    return engine


def _engine_of_quantized(engine, degree, method):
    """Return the engine of a quantized teacher, which every rank holds whole."""
    if engine not in ("auto", "replicated") or degree > 1:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine {engine}: its weights are quantized "
            f"({method}), and only a whole copy on every rank is; use --teacher_tp 1 and auto")
    return "replicated"


# --- the kind -------------------------------------------------------------------------------------


@dataclass
class ModelSpec(TeacherSpec):
    """Describe a model to load, and how it will be asked.

    Attributes:
        engine: key of ENGINES, or "auto".
        dtype: "auto" (as in the checkpoint), "float32", "bfloat16" or "float16".
        attention: an --attention.
        degree: ranks that share the model.
        offload: keep the weights in the host's memory but for the teacher's forward passes.
        compile: let torch.compile make its forward pass.
        output_topk: tokens of the output "topk"; all others together are one event.
        rest_temperature: by which the loss divides such logits.
        same_ids: the ranks that share the model ask with the same ids; else each with its own.
        sequence_parallel_size: neighboring ranks that ask with the same ids.
        trust_remote_code: run the Python code that comes with the model.
    """

    output: str = "hidden"
    engine: str = "replicated"
    dtype: str = "auto"
    attention: str = "auto"
    degree: int = 1
    offload: bool = False
    compile: bool = False
    output_topk: int = 256
    rest_temperature: float = 1.0
    same_ids: bool = False
    sequence_parallel_size: int = 1
    trust_remote_code: bool = False

    has_weights: ClassVar[bool] = True
    takes_tokenizer: ClassVar[bool] = False

    @classmethod
    def takes(cls, cfg):
        return True

    @classmethod
    def check(cls, cfg):
        if cfg.teacher_output == "topk":
            cfg.check_truncated("--teacher_output topk")
            if not cfg.teacher_output_topk:
                raise ValueError("--teacher_output_topk 0: is for the address of a server as "
                                 "--teacher; expected 1 or more")

    @classmethod
    def encoder(cls, cfg, load, student, roles):
        num_ranks = dist.get_world_size()
        ranks_per_node = node_size()
        if roles:  # this world has the student's ranks only
            num_ranks = num_ranks // roles.student_ranks * roles.teacher_ranks
            ranks_per_node = roles.teacher_ranks
        encoder, _ = load()
        config = pretrained.load_config("teacher", cfg.teacher, cfg.trust_remote_code)
        pretrained.check_language_model("teacher", cfg.teacher, config)
        checked_engine(cfg, config, num_ranks, ranks_per_node)
        pretrained.check_weights(
            "teacher", cfg.teacher, cfg.trust_remote_code, attention=cfg.attention)
        return encoder

    @classmethod
    def of(cls, cfg, encoder, device, student=None):
        output = cfg.teacher_output
        if output == "hidden" and not cfg.tiled:
            output = "logits"  # the model's own: a head may be more than `tiles.head_of` knows
        rest_temperature, _ = cfg.reading_of_rest(student or encoder, encoder)
        return cls(
            path=cfg.teacher, vocab=len(encoder.table), device=device, output=output,
            engine=cfg.teacher_engine, dtype=cfg.teacher_dtype, attention=cfg.attention,
            degree=cfg.teacher_tp, offload=cfg.teacher_offload, compile=cfg.teacher_compile,
            output_topk=cfg.teacher_output_topk, rest_temperature=rest_temperature,
            sequence_parallel_size=cfg.ranks_per_reader, trust_remote_code=cfg.trust_remote_code)

    def load(self):
        """Return its ModelTeacher; all ranks take part where they share it.

        Raises:
            ValueError: see `resolve_engine`, `check_compile`.
        """
        engine = self._resolved()
        if self.compile:
            check_compile(engine, _config(self))
        return ENGINES[engine](self)

    def _resolved(self):
        return resolve_engine(self.engine, self.degree, _config(self), dist.get_world_size(),
                              is_adapter(self.path))

    @property
    def is_shared(self):
        return self._resolved() != "replicated"

    @property
    def asked_late(self):
        return not (self.is_shared or self.offload)

    def to_plain(self):
        """Return {attribute: value} for JSON, from which another rank makes one for its device."""
        return {name: value for name, value in asdict(self).items() if name != "device"}


def checked_engine(cfg, config, num_ranks, ranks_per_node):
    """Return the engine of the teacher of a run with it alone, whose layout is possible.

    Args:
        config: of the whole model.
        num_ranks, ranks_per_node: that hold teachers.
    Raises:
        ValueError: see `teacher_groups`, `resolve_engine`, `check_compile`.
    """
    teacher_groups(num_ranks, ranks_per_node, cfg.teacher_tp)
    engine = resolve_engine(cfg.teacher_engine, cfg.teacher_tp, config, num_ranks,
                            is_adapter(cfg.teacher))
    if cfg.teacher_compile:
        check_compile(engine, config)
    return engine


def is_adapter(path):
    return read_model_name("teacher", path).adapter is not None


# --- the source -----------------------------------------------------------------------------------


class Offload:
    """Keep a model's weights in the host's memory, on the device only while they are used."""

    def __init__(self, model, device):
        self.device = device
        self.users = 0
        pinned = torch.cuda.is_available()  # only from pinned memory a copy overlaps with computing
        self.host_copies = []
        for parameter in model.parameters():
            copy = parameter.detach().to("cpu", copy=True)
            self.host_copies.append((parameter, copy.pin_memory() if pinned else copy))
        self._leave_device()

    def _leave_device(self):
        for parameter, host_copy in self.host_copies:
            parameter.data = host_copy

    @contextlib.contextmanager
    def on_device(self):
        """Bring the weights to the device; nested uses cost one transfer."""
        if self.users == 0:
            for parameter, host_copy in self.host_copies:
                parameter.data = host_copy.to(self.device, non_blocking=True, copy=True)
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            if self.users == 0:
                self._leave_device()


class TeacherOfIds(TeacherSource):
    """Give logits of the token ids of a batch; a subclass has a `spec` and reads them."""

    def read(self, ids, output="hidden", output_topk=256, labels=None):
        """Return a LogitsSource of any positions of the flattened (B * T).

        Args:
            ids: see `model_input`.
            output, output_topk: see ModelSpec.
            labels: (B, T) int64, kept by the output "topk", which is ScoredLogits.
        """
        raise NotImplementedError

    def targets(self, batch):
        """Return the logits of a TeacherBatch as the spec's output; valid until `release`."""
        return self.read(model_input(batch), self.spec.output, self.spec.output_topk,
                         self.kept_labels(batch))

    def whole_targets(self, batch):
        """Return the logits of a TeacherBatch as if no output were truncated; likewise."""
        output = "hidden" if self.spec.output == "topk" else self.spec.output
        return self.read(model_input(batch), output, self.spec.output_topk)

    def kept_labels(self, batch):
        return batch.labels if self.spec.output == "topk" else None

    def models(self):
        return [self]


@dataclass
class ModelTeacher(TeacherOfIds):
    """Run a frozen model on this rank, whole or one shard of it.

    Attributes:
        runner: (ids, hidden) -> hidden states or logits: WholeModel, SharedModel or an engine.
        head: `tiles.Head` that maps hidden states to logits, whole on every rank.
        spec: ModelSpec.
        engine: which way of loading it is.
        num_parameters: that this rank holds, its copy of the head not counted.
        degree: ranks that share the model.
        offload: Offload, or None.
    """

    runner: object
    head: Head
    spec: TeacherSpec
    engine: str
    num_parameters: int
    degree: int = 1
    offload: Offload | None = None

    @property
    def takes_all_ranks(self):
        """Whether every forward pass takes all ranks, each with samples of its own."""
        return self.engine == "zero3"

    @torch.no_grad()
    def read(self, ids, output="hidden", output_topk=256, labels=None):
        if output == "logits":
            return StoredLogits(self.logits(ids)[..., : self.head.vocab].flatten(0, 1))
        logits = HiddenLogits(self.hidden(ids).flatten(0, 1), self.head)
        if output == "hidden":
            return logits
        if labels is None:
            labels = torch.full(logits.hidden_TH.shape[:1], -100, device=logits.hidden_TH.device)
        return most_likely(logits, output_topk, labels.flatten(), self.spec.rest_temperature)

    def hidden(self, ids):
        """Return (B, T, H) final hidden states."""
        with self.on_device():
            return self.runner(ids, True)

    def logits(self, ids):
        """Return (B, T, W or more), the model's own logits."""
        with self.on_device():
            return self.runner(ids, False)

    def on_device(self):
        return self.offload.on_device() if self.offload else contextlib.nullcontext()

    def weights(self):
        """Return {name: parameter} of a model that is whole on this rank's device, else {}."""
        if self.offload or not isinstance(self.runner, WholeModel):
            return {}
        return dict(self.runner.model.named_parameters())

    def restore(self, path, student):
        # what a student with an adapter keeps as it was is not held twice
        own = self.weights()
        for name, kept in student.named_parameters():
            weight = own.get(name.removeprefix("model.").replace(".base_layer.", "."))
            is_whole = not kept.requires_grad and not hasattr(kept, "ds_id")
            if weight is not None and is_whole and weight.dtype == kept.dtype:
                if torch.equal(weight, kept):
                    weight.data = kept.data

    def offloaded(self, model):
        """Return the same teacher with its weights in the host's memory, if the spec says so."""
        if not self.spec.offload:
            return self
        # the head stays on the device: losses read it outside of the teacher's forward pass
        bias = self.head.bias_V
        self.head = self.head._replace(
            weight_VH=self.head.weight_VH.detach(),
            bias_V=None if bias is None else bias.detach())
        self.offload = Offload(model, self.spec.device)
        return self


def most_likely(logits, top_k, labels_T, temperature=1.0):
    """Return the ScoredLogits of TopKLogits of all positions, a block at a time.

    Beside the most likely tokens they keep the label of each position.

    Args:
        logits: HiddenLogits.
        labels_T: (T,) int64, -100 for none.
        temperature: by which the loss will divide: the rest is summed at it.
    """
    positions = torch.arange(len(logits.hidden_TH), device=logits.hidden_TH.device)
    blocks = []
    for block in positions.split(BLOCK):
        blocks.append(truncate(logits(block).float(), top_k, labels_T[block], temperature))
    return ScoredLogits.joined(blocks)


def truncate(logits_NW, top_k, labels_N, temperature=1.0):
    """Return the ScoredLogits of some rows of float32 logits; see `most_likely`."""
    top_NK, top_ids_NK = logits_NW.topk(min(top_k, logits_NW.shape[1]))
    # a position without a label repeats its most likely token
    last_N = torch.where(labels_N >= 0, labels_N, top_ids_NK[:, 0])
    whole = scores_of_rows(logits_NW, top_NK[:, 0], last_N, top_ids_NK[:, 0] == labels_N)
    ids_NK = torch.cat([top_ids_NK, last_N[:, None]], 1)
    logp_NK = torch.cat([top_NK, logits_NW.gather(1, last_N[:, None])], 1)
    rest_N = whole.rest(logits_NW, ids_NK, temperature)
    total_N = whole.total_N
    rows = TopKLogits(ids_NK.int(), logp_NK - total_N[:, None], logits_NW.shape[1], rest_N, total_N)
    return ScoredLogits(rows, whole.scores)


def model_input(batch):
    """Return what a model reads of a TeacherBatch.

    Returns:
        (B, T) ids; packed rows: (2, B, T), ids and positions, as one tensor that ranks can send.
    """
    if batch.positions is None:
        return batch.ids
    return torch.stack([batch.ids, batch.positions])


def model_arguments(ids):
    """Return the keyword arguments of a Hugging Face model for a `model_input`."""
    if ids.dim() == 2:
        return {"input_ids": ids, "use_cache": False}
    return {"input_ids": ids[0], "position_ids": ids[1], "use_cache": False}


def layers_of(model):
    """Return the part of a causal language model that makes hidden states."""
    layers = model.base_model
    if layers is model:  # Llama 4 keeps them under another name than its class says
        layers = getattr(model, "model", model)
    return layers


# --- how a model runs -----------------------------------------------------------------------------


class WholeModel(nn.Module):
    """Run a causal language model up to its final hidden states, or to its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, hidden):
        if hidden:
            return layers_of(self.model)(**model_arguments(ids))[0]
        return self.model(**model_arguments(ids)).logits


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


# --- load -----------------------------------------------------------------------------------------


def load_replicated(spec):
    """Load a whole copy on every rank."""
    if pretrained.quantization_of(_config(spec)):
        if spec.offload:
            raise ValueError(f"--teacher_offload: {spec.path} is quantized, and its library keeps "
                             "its weights where it has put them; leave it out")
        # such a model is packed for its device while it is loaded
        model = _frozen(_load(spec, device_map={"": spec.device}))
    else:
        model = _frozen(_load(spec)).to(spec.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    head = head_of(model, spec.vocab)
    if spec.compile:
        compile_layers(model)
    teacher = ModelTeacher(WholeModel(model), head, spec, "replicated", num_parameters)
    return teacher.offloaded(model)


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
    model = _frozen(model)
    use_plain_layers(model)
    if spec.compile:
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
    dtype = _dtype(spec)
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
    model = _frozen(_load(spec, distributed_config=DistributedConfig(tp_size=spec.degree)))
    if spec.compile:
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
    dtype = _dtype(spec)
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
            model = _frozen(_load(spec))
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
ENGINES = {
    "replicated": load_replicated,
    "tensor_parallel": load_tensor_parallel,
    "transformers": load_transformers,
    "zero3": load_zero3,
}


def _load(spec, **options):
    return pretrained.load_model(
        "teacher", spec.path, spec.trust_remote_code, dtype=_dtype(spec),
        **pretrained.attention_options(spec.attention), **options)


def _config(spec):
    return pretrained.load_config("teacher", spec.path, spec.trust_remote_code)


def _dtype(spec):
    if spec.dtype != "auto":
        return getattr(torch, spec.dtype)
    return _config(spec).dtype or torch.float32


def _frozen(model):
    return model.requires_grad_(False).eval()


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
    model.config = _config(spec).get_text_config()
    model.get_output_embeddings = lambda: layer
    return head_of(model, spec.vocab)


# --- files ----------------------------------------------------------------------------------------


def local_folder(path):
    """Return the directory of a checkpoint's safetensors files."""
    name = read_model_name("teacher", path)
    folder = name.base
    if not Path(folder).is_dir():
        folder = snapshot_download(folder, revision=name.revision, allow_patterns=["*.safetensors"])
    return Path(folder).resolve()


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


def head_gives_own_logits(logits, model_logits):
    """Tell whether a head gives the model's own logits; not where a model does more than `head_of`.

    Args:
        logits: LogitsSource.
        model_logits: (B, T, W), of the same positions.
    """
    if isinstance(logits, HiddenLogits):
        width = logits.head.weight_VH.shape[1]
        if logits.hidden_TH.shape[1] != width:  # not what the head reads
            return False
    model_logits = model_logits.flatten(0, 1)
    positions = torch.arange(len(model_logits), device=model_logits.device)
    difference = logits(positions).float() - model_logits.float()
    # relative; half precision rounds at 0.4 %, and a wrong scale or soft-cap is off by much more
    tolerance = 1e-4 if model_logits.dtype == torch.float32 else 0.05
    return difference.norm() <= tolerance * model_logits.float().norm()
