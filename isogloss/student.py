"""Load the student, put the loss inside its forward pass, start the DeepSpeed engine."""

from functools import partial

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
from isogloss.finite import let_overflow_skip_steps
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


def follow_schedule(engine):
    """Let the next step have the learning rate of the engine's schedule, after a load.

    What a checkpoint restores is that of the schedule which wrote it.
    """
    schedule = engine.lr_scheduler
    steps = getattr(schedule, "last_batch_iteration", -1)  # those of torch restore their length too
    if steps >= 0:
        schedule.step(steps)
