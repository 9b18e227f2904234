"""Cut a causal language model into the stages of a pipeline.

A stage is the model itself, in which the other stages' layers hold no weights and let the hidden
states pass.  So masks, windows, rotary tables and the names of all weights stay those of the model,
whatever its forward pass does with them.  Tests: tests/test_stages.py.
"""

import itertools
from dataclasses import dataclass

import torch
from deepspeed.runtime.utils import partition_balanced
from torch import nn

from isogloss.student.checks import probe_ids
from isogloss.student.ds_config import batch_sizes

# Tokens of which the whole model is asked before it is cut, and the stages after it.
# Multiply-adds that a loss takes for a logit, beside the head's; chosen, not measured.
LOSS_WORK = 32


@dataclass(frozen=True)
class LayerPlan:
    """Name the parts of a base model in the order in which hidden states pass them.

    Attributes:
        before: modules of the first stage alone, as the embedding.
        layers: the list of layers.
        after: modules of the last stage alone, as the final norm.
        returns_tuple: a layer returns its hidden states as the first item of a tuple.
    """

    before: tuple
    layers: str
    after: tuple
    returns_tuple: bool = False


# of models whose config has no base_model_pp_plan
WRITTEN_PLANS = {"gpt_neo": LayerPlan(("wte", "wpe"), "h", ("ln_f",), returns_tuple=True)}


def plan_of(path, config):
    """Return the LayerPlan of a model.

    Args:
        path: of the student, for errors.
        config: its text config.
    Raises:
        ValueError: it has none.
    """
    if config.model_type in WRITTEN_PLANS:
        return WRITTEN_PLANS[config.model_type]
    declared = list(getattr(config, "base_model_pp_plan", None) or ())
    if "layers" not in declared:
        raise ValueError(f"--pipeline_parallel: --student {path}: transformers' config of "
                         f"{config.model_type} models has no base_model_pp_plan, which names "
                         "embedding, layers and norm in their order; use ZeRO-3 or another student")
    number = declared.index("layers")
    return LayerPlan(tuple(declared[:number]), "layers", tuple(declared[number + 1 :]))


def check(cfg, layout):
    check_pipeline_layout(cfg, layout.config, layout.ds_config, layout.num_ranks, layout.roles)


def check_pipeline_layout(cfg, config, ds_config, num_ranks, roles=None):
    """Check what --pipeline_parallel asks of the ranks, the student and the ds_config.

    Args:
        cfg: Config; config: text config of the student; ds_config: dict as in the file.
        num_ranks: of the student.
        roles: `roles.Roles` where teachers have ranks of their own.
    Raises:
        ValueError: what does not fit, and what would.
    """
    num_stages = cfg.pipeline_parallel
    flag = f"--pipeline_parallel {num_stages}"
    if num_ranks % num_stages:
        raise ValueError(f"{flag}: does not divide the {num_ranks} ranks of the student; start "
                         "more ranks or choose another number")
    if roles and roles.student_ranks % num_stages:
        raise ValueError(f"{flag} with --teacher_ranks: a node has {roles.student_ranks} ranks of "
                         "the student, and teachers stay on the node of the last stage; choose a "
                         "number that divides them")
    plan_of(cfg.student, config)
    if config.num_hidden_layers < num_stages:
        raise ValueError(f"{flag}: --student {cfg.student} has {config.num_hidden_layers} layers, "
                         "and a stage needs one; use no more stages")
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if stage != 1:
        raise ValueError(f"{flag}: --ds_config {cfg.ds_config} has ZeRO stage {stage}, and "
                         "a pipeline needs stage 1; use ds_configs/pipeline.json")
    num_readers = num_ranks // num_stages
    num = batch_sizes(ds_config, num_readers, cfg.ds_config).grad_accum_steps
    if num < num_stages:
        bubble = (num_stages - 1) / (num + num_stages - 1)
        raise ValueError(f"{flag}: {num} gradient_accumulation_steps leave {bubble:.0%} of the "
                         f"stages' time idle, (P - 1) / (m + P - 1); use {num_stages} or more")


# --- where to cut ---------------------------------------------------------------------------------


def layer_work(model, plan, vocab):
    """Return the work of every layer, then that of the head and its loss.

    Work is multiply-adds for a position: a layer's weights take part in one each.  An embedding
    looks up a row, which is next to none.

    Args:
        vocab: tokens of the student's tokenizer.
    """
    layers = getattr(model.base_model, plan.layers)
    work = [num_weights(layer) for layer in layers]
    head = model.get_output_embeddings()
    work.append(num_weights(head) + LOSS_WORK * vocab)
    return work


def num_weights(module):
    return sum(parameter.numel() for parameter in module.parameters())


def cut_layers(work, num_stages):
    """Return the layers of every stage, as (first, stop), so that stages have about equal work.

    The last stage has the head beside its layers, which may be none.

    Args:
        work: see `layer_work`.
    """
    bounds = [int(bound) for bound in partition_balanced(work, num_stages)]
    num_layers = len(work) - 1
    spans = []
    for first, stop in itertools.pairwise(bounds):
        spans.append((first, min(stop, num_layers)))
    return spans


def describe_stages(work, spans):
    """Return a line that says which layers each stage has, and which share of the work."""
    parts = []
    for number, (first, stop) in enumerate(spans):
        is_last = number == len(spans) - 1
        names = [f"layers {first} to {stop - 1}"] if stop > first else []
        names += ["head and loss"] * is_last
        share = sum(work[first:] if is_last else work[first:stop]) / sum(work)
        parts.append(f"{' and '.join(names)} ({share:.0%} of the work)")
    return f"pipeline of {len(spans)} stages: " + "; ".join(parts)


# --- cut ------------------------------------------------------------------------------------------


@dataclass
class Stage:
    """Hold what one rank computes of the student.

    Attributes:
        model: causal language model with the weights of this stage alone.
        spans: (first, stop) of the layers of every stage.
        entrance: where hidden states come in; None in the first stage.
        tied: the head is the embedding; both ends of the pipeline hold it.
        whole_logits: (1, n, V or more), what the whole model said of n ids, in the last stage.
    """

    model: nn.Module
    spans: list
    entrance: nn.Module | None
    tied: bool
    whole_logits: torch.Tensor | None = None

    def device(self):
        return next(self.model.parameters()).device


class PassThrough(nn.Module):
    """Stand in for a layer of another stage."""

    def __init__(self, layer, returns_tuple):
        super().__init__()
        self.returns_tuple = returns_tuple
        for name, value in vars(layer).items():  # models ask layers for their kind of attention
            if isinstance(value, (str, int, float)) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden, *_, **__):
        return (hidden,) if self.returns_tuple else hidden


class Entrance(PassThrough):
    """Stand in for the layer before a stage: give what the stage before has sent.

    Whatever the model makes of its embedding before the layers, as a scale or positions, has been
    made of it in the first stage.

    Attributes:
        received: (B, S, H) hidden states of this forward pass.
    """

    received = None

    def forward(self, hidden, *_, **__):
        return super().forward(self.received)


class NoWeights(nn.Module):
    """Stand in for an embedding or a head whose weights another stage has."""

    def forward(self, *_, **__):
        return 0.0


def cut_model(path, model, plan, spans, number):
    """Leave in a model what one stage computes, and free all other weights.

    Args:
        path: of the student, for errors.
        model: causal language model, changed in place.
        spans: (first, stop) of the layers of every stage.
        number: of the stage, from 0.
    Returns:
        Stage.
    Raises:
        ValueError: it has weights that the plan does not place.
    """
    check_places(path, model, plan)
    base = model.base_model
    embedding = model.get_input_embeddings()
    tied = embedding.weight is model.get_output_embeddings().weight
    is_last = number == len(spans) - 1
    entrance = cut_list(getattr(base, plan.layers), spans[number], plan.returns_tuple)
    for name in plan.before if number else ():
        # a tied head's weight goes by the name of the embedding
        is_head = tied and is_last and getattr(base, name) is embedding
        if num_weights(getattr(base, name)) and not is_head:
            setattr(base, name, NoWeights())
    if not is_last:
        for name in plan.after:
            setattr(base, name, nn.Identity())
        model.set_output_embeddings(NoWeights())
    return Stage(model, spans, entrance, tied)


@torch.no_grad()
def probe(model, vocab):
    """Return (1, n, V) logits of the first tokens, of which the stages are asked as well."""
    ids = probe_ids(vocab)[None].to(next(model.parameters()).device)
    is_training = model.training
    logits = model.eval()(input_ids=ids, use_cache=False).logits[..., :vocab]
    model.train(is_training)
    return logits


def cut_list(layers, span, returns_tuple):
    """Replace the layers outside of (first, stop); return the Entrance, None before layer 0."""
    first, stop = span
    entrance = None
    for number, layer in enumerate(layers):
        if number == first - 1:
            entrance = layers[number] = Entrance(layer, returns_tuple)
        elif not first <= number < stop:
            layers[number] = PassThrough(layer, returns_tuple)
    return entrance


def check_places(path, model, plan):
    """Raise a ValueError where a plan names what a model lacks, or not all that has weights."""
    base = model.base_model
    planned = (*plan.before, plan.layers, *plan.after)
    wrong = [name for name in planned if not hasattr(base, name)]
    for name, child in base.named_children():
        if name not in planned and num_weights(child):
            wrong.append(name)
    for name, child in model.named_children():
        known = child is base or child is model.get_output_embeddings()
        if not known and num_weights(child):
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"--pipeline_parallel: --student {path}: the plan of {model.config.model_type} models "
            f"has no place for {', '.join(wrong)}; use ZeRO-3 or another student")


def stage_arguments(stage, inputs):
    """Return the keyword arguments with which a stage's model runs.

    Args:
        stage: Stage.
        inputs: (B, S) ids in the first stage, else (B, S, H) hidden states; or a tuple of these and
            (B, S) positions.
    """
    arguments = {"use_cache": False}
    if isinstance(inputs, tuple):
        inputs, arguments["position_ids"] = inputs
    if stage.entrance is None:
        return arguments | {"input_ids": inputs}
    stage.entrance.received = inputs
    # the model reads shape and type of these, and its layers what the entrance gives
    return arguments | {"inputs_embeds": inputs.detach()}
