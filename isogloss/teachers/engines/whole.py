"""Run a teacher that is a model on this rank, in a precision of its own and without a graph."""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from isogloss.doors import door
from isogloss.models import pretrained
from isogloss.teachers.protocol import TeacherSource, TeacherSpec
from isogloss.tiles import Head, HiddenLogits, StoredLogits, head_of

if TYPE_CHECKING:
    from isogloss.teachers.engines.offload import Offload


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
    offload: "Offload | None" = None

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
        from isogloss.teachers.text_scores import most_likely

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

    def offloaded(self, tensors):
        """Return the same teacher with its weights in the host's memory, if the spec says so."""
        if not self.spec.offload:
            return self
        from isogloss.teachers.engines.offload import offload

        return offload(self, tensors)


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


# --- load -----------------------------------------------------------------------------------------


def load_replicated(spec):
    """Load a whole copy on every rank."""
    if pretrained.quantization_of(config_of(spec)):
        if spec.offload:
            raise ValueError(f"--teacher_offload: {spec.path} is quantized, and its library keeps "
                             "its weights where it has put them; leave it out")
        # such a model is packed for its device while it is loaded
        model = frozen(load_weights(spec, device_map={"": spec.device}))
    else:
        model = frozen(load_weights(spec)).to(spec.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    head = head_of(model, spec.vocab)
    if spec.compile == "true":
        from isogloss.models.compiled_layers import compile_layers

        compile_layers(model)
    teacher = ModelTeacher(WholeModel(model), head, spec, "replicated", num_parameters)
    return teacher.offloaded(list(model.parameters()))


def load_weights(spec, **options):
    dtype = dtype_of(spec)
    if str(spec.device) == "cpu" and dtype != torch.float32:
        door("half_on_cpu").tell("teacher", spec.path, dtype, "--teacher_dtype float32")
    return pretrained.load_model(
        "teacher", spec.path, spec.trust_remote_code, dtype=dtype,
        **pretrained.attention_options(spec.attention), **options)


def config_of(spec):
    return pretrained.load_config("teacher", spec.path, spec.trust_remote_code)


def dtype_of(spec):
    if spec.dtype != "auto":
        return getattr(torch, spec.dtype)
    return config_of(spec).dtype or torch.float32


def frozen(model):
    return model.requires_grad_(False).eval()


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
