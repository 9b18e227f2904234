"""Load the student, put the loss inside its forward pass, start the DeepSpeed engine, run both."""

import inspect
import itertools
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    unset_hf_deepspeed_config,
)

from isogloss import doors
from isogloss.models.parts import describe_trained, num_weights, plain
from isogloss.models.pretrained import attention_options, load_model, student_adapter
from isogloss.student.ds_engine import start_deepspeed
from isogloss.student.finite import (
    gradient_norm,
    let_overflow_skip_steps,
    spoil_gradient_unless_finite,
)
from isogloss.tiles import HiddenLogits, StoredLogits, head_of


class StudentWithLoss(nn.Module):
    """End the forward pass of a causal language model in the loss.  The engine wraps this module.

    The loss is computed in here because this is where ZeRO-3 gathers the head: its parameters are
    registered as external ones of this module, so they stay until their gradient has arrived.

    Attributes:
        model: the Hugging Face model; exported files have its parameter names.
        vocab: tokens of the student's tokenizer; the lm_head may be padded beyond them.
        tiled: compute logits tile by tile from hidden states, not for a whole micro-batch.
        activation_offload: checkpointed activations wait in the host's memory.
        projection_scores: parameter of a learned projection, or None.
    """

    def __init__(self, model, vocab, tiled=True, activation_offload=False):
        super().__init__()
        self.model = model
        self.vocab = vocab
        self.tiled = tiled
        self.activation_offload = activation_offload
        self.register_parameter("projection_scores", None)
        for parameter in model.get_output_embeddings().parameters():
            if hasattr(parameter, "ds_id"):  # partitioned by ZeRO-3
                deepspeed.zero.register_external_parameter(self, parameter)

    def forward(self, batch, terms=None):
        """Run the model on a StudentBatch.

        Args:
            terms: None, or what to make of the logits: `objective.LossTerms`, which gives
                (loss, sums), `evaluate.EvaluationTerms` or `checks.HeadTest`.
        Returns:
            Without terms the model's own (B, S, V or more) logits; else `terms.reduce(logits)`,
            where logits is a LogitsSource of any positions of the flattened (B * S).
        """
        arguments = {"input_ids": batch.ids, "use_cache": False}
        if batch.positions is not None:
            arguments["position_ids"] = batch.positions
        if batch.documents is not None and takes_any_keyword(self.model.base_model.forward):
            arguments["documents"] = batch.documents  # for `ulysses.core_attention`
        if terms is None:
            return self.model(**arguments).logits
        balance = getattr(terms, "balance", None)
        with (kept_activations(self.model, batch.ids.shape, self.activation_offload),
              balance.listening() if balance else nullcontext() as heard):
            logits = logits_source(self.model, arguments, self.vocab, self.tiled)
        reduced = terms.reduce(logits)
        return terms.with_routers(reduced, heard, batch.is_text) if balance else reduced

    def collect_weights(self, is_wanted=lambda name: True):
        """Return {name: whole tensor} of weights and buffers on rank 0, {} elsewhere; collective.

        Args:
            is_wanted: function of a name; others are left out.
        """
        weights = {}
        model = self.model
        head_dtype = model.get_output_embeddings().weight.dtype
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if not is_wanted(name):
                continue
            with gathered(tensor):
                if dist.get_rank() == 0:
                    weights[name] = plain(tensor, head_dtype)
        return weights

    def whole_weights(self):
        """Yield (name, whole parameter) of what is trained; under ZeRO-3 all ranks take part."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                with gathered(parameter):
                    yield name, parameter

    def loss_parameters(self):
        """List the parameters that the loss itself trains beside the model's."""
        return [] if self.projection_scores is None else [self.projection_scores]


def takes_any_keyword(function):
    """Tell whether a function takes arguments of any name."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def gathered(parameter):
    """Return a context in which a parameter is whole; under ZeRO-3 all ranks take part."""
    is_partitioned = hasattr(parameter, "ds_id")
    return deepspeed.zero.GatheredParameters([parameter] if is_partitioned else [])


def kept_activations(model, shape, offload):
    """Return the context in which checkpointed activations of a (B, S) batch may be offloaded."""
    if not offload:
        return nullcontext()
    from isogloss.models.activations import offload_activations

    # of checkpointed layers only their inputs are kept, which have this shape
    hidden_size = model.config.get_text_config().hidden_size
    return offload_activations((*shape, hidden_size))


def logits_source(model, arguments, vocab, tiled):
    """Run a model, and return a LogitsSource of any positions of the flattened (B * S).

    Args:
        arguments: of its forward pass, by name.
        vocab, tiled: see StudentWithLoss.
    """
    if tiled:
        hidden = model.base_model(**arguments)[0]
        return HiddenLogits(hidden.flatten(0, 1), head_of(model, vocab))
    return StoredLogits(model(**arguments).logits[..., :vocab].flatten(0, 1))


# --- run ------------------------------------------------------------------------------------------


class StudentRunner(Protocol):
    """Run the student on the micro-batches of a step or an evaluation; all ranks take part.

    Attributes:
        engine: DeepSpeed engine.
        computes_loss: this rank does; only such ranks ask teachers and count terms.
        averaged_ranks: ranks over which the engine averages gradients.
        num_weights: of the whole student; num_parameters: a frozen one counted as two thirds.
        batches_at_once: that `reduce` takes best.
        loss_group: process group of the ranks that compute losses; None: all ranks.
        description: of what a user may want to know before the first step.
    """

    engine: deepspeed.DeepSpeedEngine
    computes_loss: bool
    averaged_ranks: int
    num_weights: int
    num_parameters: int
    batches_at_once: int
    loss_group: object
    description: str

    def train(self, micro_batches, terms):
        """Take an optimizer step.

        Args:
            micro_batches: Batches on the device.
            terms: LossTerms of each, where this rank computes the loss.
        Returns:
            (sums, norm): (M, 6) over this rank's micro-batches, see `LossTerms.reduce`;
            the gradient's norm where the engine reports none.
        """

    def reduce(self, batches, terms):
        """Return `terms.reduce(logits)` of each StudentBatch, None where others compute it."""

    def logits(self, batch):
        """Return (B, S, V) logits of a StudentBatch; None: as above."""

    def own_logits(self, batch):
        """Return those of `checks.probe_ids` by the whole model itself; None: as above."""

    def share(self, numbers):
        """Return the numbers of a rank that computes the loss, as many as here, on every rank."""

    def metrics(self):
        """Return what is to be logged of how the last step ran."""


class EngineRunner:
    """Run a student that an engine holds whole, or in shards of every tensor; a StudentRunner.

    Attributes:
        balance: RouterBalance of its experts, or None.
        late: LateWeights, or None.
    """

    computes_loss = True
    batches_at_once = 1
    loss_group = None

    balance = None
    late = None

    def __init__(self, engine, vocab):
        self.engine = engine
        self.vocab = vocab
        self.averaged_ranks = dist.get_world_size()
        self.num_parameters = 0
        self.num_weights = 0
        for parameter in engine.module.parameters():
            numel = getattr(parameter, "ds_numel", num_weights(parameter))  # ZeRO-3
            self.num_weights += numel
            # a frozen weight takes part in two products, not three
            self.num_parameters += numel if parameter.requires_grad else numel * 2 / 3

    def train(self, micro_batches, terms):
        engine = self.engine
        total = 0
        with self.late.held() if self.late else nullcontext():
            if self.balance:
                self.balance.begin(engine, micro_batches)
            for batch, batch_terms in zip(micro_batches, terms, strict=True):
                batch_terms.balance = self.balance
                loss, sums = engine(batch.student, batch_terms)
                total = total + sums
                engine.backward(spoil_gradient_unless_finite(loss))
                norm = gradient_norm(engine)
                # changes weights after the last micro-batch, and none if the gradient is not finite
                engine.step()
        return total, norm

    @property
    def description(self):
        lines = describe_trained(self.engine.module.model), self.late and self.late.description
        return "; ".join(filter(None, lines))

    def reduce(self, batches, terms):
        return [self.engine(batch, of_batch) for batch, of_batch in zip(batches, terms)]

    def logits(self, batch):
        return self.engine(batch)[..., : self.vocab]

    own_logits = logits

    def share(self, numbers):
        return numbers

    def metrics(self):
        return self.balance.metrics() if self.balance else {}


# --- load and start -------------------------------------------------------------------------------


def load_student(cfg, ds_config, attention="auto"):
    """Load the student in float32 (DeepSpeed casts it); under ZeRO-3 each rank loads its shard.

    Args:
        attention: an --attention, or the name of one registered beside these.
    Raises:
        ValueError: see `pretrained.load_model`.
    """
    options = {"dtype": torch.float32} | attention_options(attention)
    if cfg.quantize:
        from isogloss.models import quantized

        options |= quantized.quantization_options(cfg.quantize, ds_config)
    if cfg.from_scratch:
        from isogloss.student.options.from_scratch import random_student

        load = partial(random_student, cfg)
    else:
        load = partial(load_model, "student", cfg.student, cfg.trust_remote_code,
                       student_adapter(cfg))
    partitioned = ds_config.get("zero_optimization", {}).get("stage") == 3
    keep_alive = HfDeepSpeedConfig(ds_config) if partitioned else None
    try:
        model = load(**options)
    finally:
        if keep_alive:
            unset_hf_deepspeed_config()  # on every rank, or the teacher would be partitioned too
    doors.change(model, cfg)
    model.config.use_cache = False
    model.train()  # from_pretrained leaves it in evaluation mode, without dropout
    if cfg.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def start_engine(module, ds_config, path, projection_learning_rate=0.0, freeze_until=0):
    """Wrap a StudentWithLoss in a DeepSpeed engine.

    Args:
        path: of the ds_config, for errors.
        projection_learning_rate: of a learned projection; 0: the student's.
        freeze_until: steps for which all weights but embedding and head are to wait.
    """
    groups = optimizer_groups(module, projection_learning_rate, freeze_until)
    engine = start_deepspeed(path, model=module, model_parameters=groups, config=ds_config)
    let_overflow_skip_steps(engine)
    if engine.zero_optimization_stage() == 3:
        from isogloss.student.options.zero3 import clear_padding

        clear_padding(engine)
    return engine


def attach_projection(module, teachers, device):
    """Make what a loss trains a parameter of a student's module, before its engine starts.

    Args:
        module: with `projection_scores`; teachers: TeacherSetup of all of them.
    """
    for setup in teachers:
        if setup.loss.learned_projection:
            setup.loss.learned_projection.attach(module, device)


def optimizer_groups(module, projection_learning_rate=0.0, freeze_until=0):
    """Return the parameter groups of the optimizer; checkpoints rely on their order.

    Weight decay spares vectors (norms and biases), as is the custom, and a learned projection.
    With freeze_until groups of weights that wait follow, see `freezing`.
    """
    others = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
    late = []
    if freeze_until:
        from isogloss.student.freezing import waiting_groups, waiting_weights

        late = waiting_weights(module.model)
        ids = set(map(id, late))
        others = [parameter for parameter in others if id(parameter) not in ids]
    projection = {"params": module.loss_parameters(), "weight_decay": 0.0}
    if projection_learning_rate:
        projection["lr"] = projection_learning_rate
    groups = [projection, *groups_by_decay(others)]
    if late:
        groups += waiting_groups(*groups_by_decay(late))
    return [group for group in groups if group["params"]]


def groups_by_decay(parameters):
    """Return the groups of matrices and of vectors, which weight decay spares."""
    matrices = []
    vectors = []
    for parameter in parameters:
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves shape (0,)
        (matrices if len(shape) > 1 else vectors).append(parameter)
    return {"params": matrices}, {"params": vectors, "weight_decay": 0.0}
