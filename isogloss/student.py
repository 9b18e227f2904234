"""Load the student, put the loss inside its forward pass, start the DeepSpeed engine."""

import math
from functools import partial, wraps

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    deepspeed_config,
    unset_hf_deepspeed_config,
)

from isogloss.activations import offload_activations, tile_mlps
from isogloss.ds_engine import start_deepspeed
from isogloss.pretrained import load_model, random_model
from tiles import HiddenLogits, StoredLogits, head_of


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
            batch: StudentBatch.
            terms: None, or what to make of the logits: `objective.LossTerms`, which gives
                (loss, sums), `evaluate.EvaluationTerms` or `checks.HeadTest`.
        Returns:
            Without terms the model's own (B, S, V or more) logits; else `terms.reduce(logits)`,
            where logits is a LogitsSource of any positions of the flattened (B * S).
        """
        arguments = {"input_ids": batch.ids, "use_cache": False}
        if batch.positions is not None:
            arguments["position_ids"] = batch.positions
        if terms is None:
            return self.model(**arguments).logits
        # of checkpointed layers only their inputs are kept, which have this shape
        hidden_size = self.model.config.get_text_config().hidden_size
        with offload_activations((*batch.ids.shape, hidden_size), self.activation_offload):
            if self.tiled:
                hidden = self.model.base_model(**arguments)[0]
                logits = HiddenLogits(hidden.flatten(0, 1), head_of(self.model, self.vocab))
            else:
                all_logits = self.model(**arguments).logits[..., : self.vocab]
                logits = StoredLogits(all_logits.flatten(0, 1))
        return terms.reduce(logits)

    def loss_parameters(self):
        """List the parameters that the loss itself trains beside the model's."""
        return [] if self.projection_scores is None else [self.projection_scores]


def load_student(cfg, ds_config, attention=None):
    """Load the student in float32 (DeepSpeed casts it); under ZeRO-3 each rank loads its shard.

    Args:
        attention: name of its attention implementation; None: the usual one.
    Raises:
        ValueError: see `pretrained.load_model`.
    """
    options = {"dtype": torch.float32}
    if attention:
        options["attn_implementation"] = attention
    if cfg.from_scratch:
        load = partial(_random_student, cfg)
    else:
        load = partial(load_model, "student", cfg.student, cfg.trust_remote_code)
    partitioned = ds_config.get("zero_optimization", {}).get("stage") == 3
    keep_alive = HfDeepSpeedConfig(ds_config) if partitioned else None
    try:
        model = load(**options)
    finally:
        if keep_alive:
            unset_hf_deepspeed_config()  # on every rank, or the teacher would be partitioned too
    model.config.use_cache = False
    model.train()  # from_pretrained leaves it in evaluation mode, without dropout
    if cfg.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if cfg.mlp_tiles > 1:
        tile_mlps(model, cfg.mlp_tiles)
    return model


def _random_student(cfg, **options):
    """Return a student with random weights, the same on every rank and at every ZeRO stage.

    Under ZeRO-3 transformers draws the numbers in another order, and none for a layer that a model
    leaves to torch's defaults.  So rank 0 makes the whole model there too, and all take their shard
    of it.
    """
    new_model = partial(random_model, "student", cfg.student, cfg.trust_remote_code, **options)
    ds_config = deepspeed_config()  # of the HfDeepSpeedConfig that is alive, or None
    with torch.random.fork_rng():  # dropout goes on with each rank's own numbers
        torch.manual_seed(cfg.seed)
        if ds_config is None:
            return new_model()
        model = new_model()
        unset_hf_deepspeed_config()
        torch.manual_seed(cfg.seed)
        whole = new_model() if dist.get_rank() == 0 else None
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if whole is not None:
                parameter.data.copy_(whole.get_parameter(name))
    return model


def start_engine(module, ds_config, path, projection_learning_rate=0.0):
    """Wrap a StudentWithLoss in a DeepSpeed engine.

    Args:
        path: of the ds_config, for errors.
        projection_learning_rate: of a learned projection; 0: the student's.
    """
    groups = optimizer_groups(module, projection_learning_rate)
    engine = start_deepspeed(path, model=module, model_parameters=groups, config=ds_config)
    let_overflow_skip_steps(engine)
    return engine


def optimizer_groups(module, projection_learning_rate=0.0):
    """Return the parameter groups of the optimizer; checkpoints rely on their order.

    Weight decay spares vectors (norms and biases), as is the custom, and a learned projection.
    """
    matrices = []
    vectors = []
    for parameter in module.model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves shape (0,)
            (matrices if len(shape) > 1 else vectors).append(parameter)
    projection = {"params": module.loss_parameters(), "weight_decay": 0.0}
    if projection_learning_rate:
        projection["lr"] = projection_learning_rate
    groups = [projection, {"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# --- steps that are not finite --------------------------------------------------------------------


def let_overflow_skip_steps(engine):
    """Let the engine skip every step whose gradient norm is not finite, in all stages alike.

    DeepSpeed's optimizers do that themselves: weights, optimizer state and schedule stay as they
    are, and `engine.skipped_steps` grows.  The one that does not is the plain optimizer of ZeRO
    stage 0 in float32.  It gets the attribute `overflow`, which the engine looks up after a step,
    and which `gradient_norm` sets before it.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "overflow"):
        scaler = getattr(optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # --max_bad_steps ends such a run, in one line
        return
    take_step = optimizer.step
    optimizer.overflow = False

    @wraps(take_step)  # schedules of torch look for a mark on it
    def step_unless_overflow(*args, **options):
        if not optimizer.overflow:
            take_step(*args, **options)

    optimizer.step = step_unless_overflow


def spoil_gradient_unless_finite(loss):
    """Return the () loss; if it is not finite, its gradient is NaN for all parameters.

    Then the gradient over all ranks tells each of them that the loss of one is not finite, without
    a further collective.  By itself such a loss may have a finite gradient.
    """
    factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
    return loss * factor.to(loss.dtype)


def gradient_norm(engine):
    """Return the norm of the averaged gradient where the engine reports none, else 0.

    That is ZeRO stage 0 in float32, at the end of an accumulation.  There the next `engine.step`
    is skipped if the norm is not finite.
    """
    if engine.zero_optimization() or not engine.is_gradient_accumulation_boundary():
        return 0.0
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if engine.optimizer is engine.basic_optimizer:  # else it looks at its gradients itself
        engine.optimizer.overflow = not math.isfinite(norm)
    return norm


def loss_scale_can_fall(engine):
    """Return whether fp16's loss scale is above its minimum, so that an overflow is routine.

    A dynamic loss scale begins far too high, and falls whenever a gradient overflows.
    """
    if engine.torch_autocast_z0_gradscaler:
        return engine.torch_autocast_z0_gradscaler.get_scale() > 1
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scale_config"):  # ZeRO stage 0
        scaler = optimizer.loss_scale_config
        return scaler.dynamic_loss_scale and scaler.cur_scale > scaler.min_loss_scale
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler is not None and scaler.dynamic and scaler.cur_scale > scaler.min_scale


def has_finite_state(engine):
    """Return whether weights and optimizer state on this rank are all finite.

    Under ZeRO these are the shards that a checkpoint of this rank holds.
    """
    tensors = []
    for parameter in engine.module.parameters():
        tensors.append(getattr(parameter, "ds_tensor", parameter))  # of ZeRO-3: the shard
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:  # under ZeRO the float32 master weights
        tensors += group["params"]
    for state in inner.state.values():
        tensors += state.values()
    for tensor in tensors:
        is_float = torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.numel()
        # the largest magnitude: NaN passes through it, and unlike a sum it cannot overflow
        if is_float and not torch.linalg.vector_norm(tensor.detach(), math.inf).isfinite():
            return False
    return True
