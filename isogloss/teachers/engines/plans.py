"""Say how transformers shards a model over some ranks by its plan, and what is added to that.

A plan cuts attention by heads.  Of key-value heads that are fewer than ranks, each rank keeps those
that its query heads read; where heads do not divide, attention stays whole on every rank.  Experts
are dealt out whole where their number divides, else each of them is cut.

Worked around in transformers 5.23.0: a `device_mesh` is dropped for one of all ranks; key-value
heads are cut inside a head; experts fail whose shards are no multiple of 16 bytes, and tied heads
whose embedding has no rule (GPT-NeoX); Gemma 4 without experts keeps its MLP whole; norms per head
of Cohere stay whole.

Tests: tests/test_plans.py.
"""

import re
from typing import NamedTuple

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from isogloss.models.tied import empty_model

# Layers with keys in their output; a plan that cuts one of them cuts attention by heads.
KEYS = "k_proj", "qkv_proj", "query_key_value", "kv_b_proj"


class Plan(NamedTuple):
    """Say how a model is sharded.

    Attributes:
        rules: {name of layers: style} in place of transformers' own.
        deals_experts: a rank holds some of the experts, whole.
        keeps_heads: `keep_local_heads` has to follow.
        whole_fraction: of the weights that every rank holds.
    """

    rules: dict
    deals_experts: bool
    keeps_heads: bool
    whole_fraction: float

    def distributed_config(self, degree):
        return DistributedConfig(tp_size=degree, tp_plan=self.rules or None,
                                 ep_size=degree if self.deals_experts else None)


_known = {}  # {(class and text of a config, degree): its Plan}


def plan_of(config, degree, trust_remote_code=False):
    """Return the Plan of a config's model, or None where transformers has no plan for it."""
    brings_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ())
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (trust_remote_code and brings_code):
        return None
    key = type(config), config.to_json_string(use_diff=False), degree
    if key not in _known:  # a job asks several times
        model = empty_model(config)
        _known[key] = _planned(model, degree) if model.tp_plan else None
    return _known[key]


def _planned(model, degree):
    rules = {}
    vocab = model.get_input_embeddings().num_embeddings
    for name, module in model.named_modules():  # Gemma 4 has a second one, for its layers
        if isinstance(module, nn.Embedding) and module.num_embeddings == vocab:
            rules[name] = "embedding_rowwise"
    attention, keeps_heads = _attention_rules(model, degree)
    rules |= attention
    experts = [parameter for name, parameter in model.named_parameters()
               if model.ep_plan.get(_generic(name)) == "grouped_gemm"]
    deals_experts = bool(experts) and all(len(weight) % degree == 0 for weight in experts)
    if not deals_experts and not all(_can_be_cut(weight, degree) for weight in experts):
        rules |= dict.fromkeys(model.tp_plan.keys() & model.ep_plan.keys(), "replicate")
    styles = model.tp_plan | rules | (model.ep_plan if deals_experts else {})
    num_whole = 0
    for name, parameter in model.named_parameters():
        generic = _generic(name)
        style = styles.get(generic) or styles.get(generic.rpartition(".")[0])
        num_whole += 0 if style and _cuts(style) else parameter.numel()
    return Plan(rules, deals_experts, keeps_heads, num_whole / model.num_parameters())


def _attention_rules(model, degree):
    """Return ({name: style} that stand in for those of attention, see Plan.keeps_heads)."""
    plan = model.tp_plan
    attention = {name.rpartition(".")[0] for name, style in plan.items()
                 if style == "colwise" and name.rpartition(".")[2] in KEYS}
    num_heads = model.config.get_text_config().num_attention_heads
    counts = {num_heads}
    for name, module in model.named_modules():
        if _generic(name) in attention:
            counts.add(num_heads // getattr(module, "num_key_value_groups", 1))
    if all(count % degree == 0 for count in counts):
        return {}, False
    keeps_heads = num_heads % degree == 0 and all(
        count % degree == 0 or degree % count == 0 for count in counts)
    rules = {}
    for name in plan:
        block, _, layer = name.rpartition(".")
        if block in attention and (layer in ("k_proj", "v_proj") or not keeps_heads):
            rules[name] = "replicate"
    return rules, keeps_heads


def local_tensors(model):
    """List the parameters of a model as this rank holds them: the shard of one that is cut."""
    # `to_local` would return a view of it, whose data can be replaced without effect
    return [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]


def _can_be_cut(weight, degree):
    """Tell whether torch's product of groups takes the shards: it wants lines of 16 bytes."""
    return all(size % (8 * degree) == 0 for size in weight.shape[1:])


def _generic(name):
    """Return the name by which a plan knows all layers that are alike.

    >>> _generic("model.layers.3.mlp.up_proj")
    'model.layers.*.mlp.up_proj'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cuts(style):
    """Tell whether a style of a plan cuts weights; others know what to do with activations."""
    shard = getattr(type(ALL_PARALLEL_STYLES[style]), "shard_param", None)
    return shard is not TensorParallelLayer.shard_param


def keep_local_heads(model, rank, degree):
    """Leave of key-value heads those that the query heads of a rank read.

    Args:
        model: whose keys and values are whole, and whose queries are cut.
        rank: of this process, of `degree` ranks.
    """
    num_queries = model.config.get_text_config().num_attention_heads // degree
    for name, module in model.named_modules():
        group = getattr(module, "num_key_value_groups", 0)  # none in MiniMax's linear attention
        if not group or model.tp_plan.get(f"{_generic(name)}.q_proj") != "colwise":
            continue
        first = rank * num_queries // group
        last = ((rank + 1) * num_queries - 1) // group
        num_heads = num_queries * degree // group
        for layer in (getattr(module, "k_proj", None), getattr(module, "v_proj", None)):
            for parameter in layer.parameters() if layer else ():
                size = len(parameter) // num_heads
                parameter.data = parameter[first * size : (last + 1) * size].clone()
        module.num_key_value_groups = num_queries // (last + 1 - first)
