"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft: add, load, merge, write them.

An adapter replaces a linear layer's W by W + (alpha / r) B A, with A (r, in) and B (out, r); W
stays as it is and B begins as 0.  peft puts such layers into the model itself, so that every other
module goes on seeing the model's own class and forward pass.  With --lora_embeddings the input
embedding and the head are trained whole beside these layers.  They stay the modules that they are,
and an adapter's file holds them as peft's `modules_to_save`, both of them where they are tied: peft
gives each of the two a weight of its own.  peft is imported only where an adapter is asked for.

Tests: tests/test_adapters.py.
"""

import copy
import importlib.util
import os
import warnings
from contextlib import contextmanager

import deepspeed
import torch

from isogloss.flags.model_names import read_model_name, split_revision
from isogloss.models.adapter_parts import (
    end_parameters,
    ends_of,
    layers_of,
    merged_weight,
    plain_name,
    product,
)
from isogloss.models.parts import NAME, adapter_of, is_adapter
from isogloss.models.tied import is_tied
from isogloss.projection_tools.tokenizers import reading

PREFIX = "base_model.model."  # of the names in an adapter's file
ENDS = ("embedding", "head")  # in place of names that only the model knows
# What an adapter may hold beside its pairs of matrices, none of which is merged or written here.
PLAIN = dict(bias="none", use_dora=False, trainable_token_indices=None,
             target_parameters=None, lora_bias=False, alora_invocation_tokens=None)


def need_peft(flag):
    """Raise a ValueError where peft is not installed.

    Args:
        flag: that asks for it, with its value.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"--{flag}: needs peft, which is not installed; pip install peft==0.21.2")


# --- what the flags ask for -----------------------------------------------------------------------


def student_adapter(cfg):
    """Return peft's config of the adapter that the student is trained by; None: all weights are.

    A student that is an adapter already goes on with it.

    Raises:
        ValueError: peft is not there; or the flags contradict that adapter.
    """
    if not cfg.lora_r:
        return None
    need_peft(f"lora_r {cfg.lora_r}")
    from peft import LoraConfig

    name = read_model_name("student", cfg.student)
    if name.adapter is None:
        base, revision = split_revision(cfg.student)
        is_local = os.path.isdir(os.path.expanduser(base))
        targets = [target.strip() for target in cfg.lora_targets.split(",") if target.strip()]
        return LoraConfig(
            r=cfg.lora_r, lora_alpha=cfg.lora_alpha or 2 * cfg.lora_r,
            target_modules=targets or "all-linear", task_type="CAUSAL_LM", revision=revision,
            modules_to_save=ENDS if cfg.lora_embeddings else None,
            base_model_name_or_path=os.path.abspath(os.path.expanduser(base)) if is_local else base)
    config = read_adapter_config("student", cfg.student, name.adapter)
    if cfg.lora_embeddings and not config.modules_to_save:
        config.modules_to_save = ENDS
    if config.r != cfg.lora_r or cfg.lora_alpha not in (0, config.lora_alpha) or cfg.lora_targets:
        raise ValueError(
            f"--lora_r {cfg.lora_r}: --student {cfg.student} is an adapter with r {config.r} and "
            f"alpha {config.lora_alpha:g}, which would be trained on; use --lora_r {config.r} "
            "alone, or leave it out to merge the adapter and train all weights")
    config.inference_mode = False
    return config


def read_adapter_config(flag, name, folder):
    """Return peft's config of an adapter.

    Raises:
        ValueError: it cannot be read, or is more than pairs of matrices.
    """
    need_peft(f"{flag} {name}")
    from peft import PeftConfig

    with reading(flag, name, "its adapter"), _without_warnings():
        config = PeftConfig.from_pretrained(folder)
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"--{flag} {name}: is an adapter of type {kind}; expected LORA; merge it "
                         "into its base model with peft first")
    for key, plain in PLAIN.items():
        value = getattr(config, key, plain)
        if value != plain and value:
            raise ValueError(f"--{flag} {name}: its adapter has {key} {value!r}, so it is more "
                             "than pairs of matrices; merge it into its base model with peft first")
    return config


# --- in a model -----------------------------------------------------------------------------------


def change(model, cfg):
    """Add the adapter that the flags ask for, unless the student came with it."""
    if adapter_of(model) is None:
        add_adapter(f"lora_r {cfg.lora_r}", model, student_adapter(cfg), cfg.seed)


def add_adapter(flag, model, config, seed=0):
    """Put the layers of an adapter into a model, and freeze all else.

    Args:
        flag: that asks for it, for errors.
        config: of peft.
        seed: of A, the same on every rank and at every ZeRO stage.
    Raises:
        ValueError: a target is no layer of the model, or one whose weight another layer shares.
    """
    from peft import inject_adapter_in_model

    _check_targets(flag, model, config)
    saved, config.modules_to_save = config.modules_to_save, None  # peft would copy them
    with reading(*flag.split(" ", 1), "a model with its adapter"), _without_warnings(), \
            torch.random.fork_rng():
        torch.manual_seed(seed)
        # the meta device has shapes alone
        is_meta = next(model.parameters()).device.type == "meta"
        inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=is_meta)
    if saved:
        _train_ends(flag, model, config, saved)


def _train_ends(flag, model, config, saved):
    """Train the embedding and the head, too, and name them in peft's config.

    Args:
        saved: names of modules, as an adapter's file has them, or ENDS.
    Raises:
        ValueError: these are others, or the head is a target of the adapter.
    """
    ends = ends_of(model)
    names = [name.rpartition(".")[2] for name in ends]
    if saved != ENDS and {name.rpartition(".")[2] for name in saved} != set(names):
        raise ValueError(f"--{flag}: its adapter has modules_to_save {saved!r}, and {names!r} are "
                         "all that is read beside pairs of matrices; merge it into its base model "
                         "with peft first")
    adapted = ends.keys() & layers_of(model).keys()
    if adapted:
        raise ValueError(f"--{flag}: {adapted.pop()} would be trained twice, by an adapter and "
                         "whole; leave it out of --lora_targets, or leave out --lora_embeddings")
    config.modules_to_save = names
    for module in ends.values():
        module.requires_grad_(True)


def _check_targets(flag, model, config):
    """Raise a ValueError for targets that peft would leave out without a word."""
    targets = config.target_modules
    if isinstance(targets, str):  # a pattern, or all linear layers but the head
        return
    linear = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            linear[name] = module
    head = model.get_output_embeddings()
    for target in sorted(targets):
        hits = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not hits:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(f"--{flag}: {model.config.model_type} models have no linear layer "
                             f"{target}; theirs are {', '.join(known)}")
        if is_tied(model) and any(linear[name] is head for name in hits):
            raise ValueError(f"--{flag}: {target} shares its weight with the embedding, which an "
                             "adapter would leave behind; choose other layers")


def load_adapter(flag, name, model, folder, config=None):
    """Put an adapter with its trained weights into a model.

    Args:
        folder: of the adapter.
        config: of peft; None: that of the adapter.
    Raises:
        ValueError: its weights cannot be read, or are not those of this model.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    config = config or read_adapter_config(flag, name, folder)
    add_adapter(f"{flag} {name}", model, config)
    is_meta = next(model.parameters()).device.type == "meta"
    with reading(flag, name, "the weights of its adapter"), _without_warnings():
        weights = load_peft_weights(folder, device="cpu")
    if config.modules_to_save:
        _load_ends(flag, name, model, weights)
    with reading(flag, name, "the weights of its adapter"), _without_warnings():
        result = set_peft_model_state_dict(
            model, weights, adapter_name=NAME, low_cpu_mem_usage=is_meta)
    missing = [key for key in result.missing_keys if is_adapter(key)]
    if missing or result.unexpected_keys:
        name_of_one = (missing or list(result.unexpected_keys))[0]
        problem = "lack" if missing else "have in excess"
        raise ValueError(f"--{flag} {name}: the weights of its adapter {problem} {name_of_one}, so "
                         "they belong to another model; use the files of one adapter")


@torch.no_grad()
def _load_ends(flag, name, model, weights):
    """Move the embedding and the head of an adapter from its weights into a model.

    Raises:
        ValueError: some of them are not there; or they differ where the model has one for both.
    """
    first = {}
    for key, parameter in end_parameters(model):
        weight = weights.pop(PREFIX + key, None)
        if weight is None or weight.shape != getattr(parameter, "ds_shape", parameter.shape):
            raise ValueError(f"--{flag} {name}: the weights of its adapter lack {key} as this "
                             "model has it; use the files of one adapter, and its base model")
        if not torch.equal(first.setdefault(id(parameter), weight), weight):
            raise ValueError(f"--{flag} {name}: the weights of its adapter have another head than "
                             "embedding, which the model ties; merge it into its base model with "
                             "peft first")
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
            if parameter.device.type != "meta" and parameter.numel():
                parameter.copy_(weight)


@torch.no_grad()
def merge_into(model):
    """Add an adapter's products to the weights of its model, and take it out again.

    Under ZeRO-3 all ranks take part.
    """
    for name, layer in layers_of(model).items():
        base = layer.get_base_layer()
        partitioned = [base.weight] if hasattr(base.weight, "ds_id") else []
        # all ranks have the same adapter; the sum of rank 0 is the one that is kept
        with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
            delta = product(layer, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
            if base.weight.device.type != "meta" and base.weight.numel():
                base.weight.data.copy_(base.weight.float() + delta.to(base.weight.device))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    del model.peft_config
    model.requires_grad_(True)


@contextmanager
def _without_warnings():
    """Silence libraries: what is wrong ends in one line of ours."""
    with warnings.catch_warnings(action="ignore"):
        yield


# --- what is written ------------------------------------------------------------------------------


def merged_weights(model, weights):
    """Return {name: tensor} of the model without its adapter, whose products are added.

    Args:
        model: with the adapter; its own tensors are not read.
        weights: {name: whole tensor} of it.
    """
    plain = {plain_name(name): tensor for name, tensor in weights.items() if not is_adapter(name)}
    for name, layer in layers_of(model).items():
        down = weights[f"{name}.lora_A.{NAME}.weight"]
        up = weights[f"{name}.lora_B.{NAME}.weight"]
        plain[f"{name}.weight"] = merged_weight(layer, plain[f"{name}.weight"], down, up)
    return plain


def names_in_file(model):
    """Return {name: that of its parameter} of all weights in the file of a model's adapter."""
    names = {name: name for name, _ in model.named_parameters() if is_adapter(name)}
    if adapter_of(model).modules_to_save:
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        names |= {name: first[id(parameter)] for name, parameter in end_parameters(model)}
    return names


def write_adapter(model, weights, folder):
    """Write a model's adapter to a new directory, in the files of peft.

    Args:
        model: its own tensors are not read; weights: {name: whole tensor} of `names_in_file`.
    """
    from safetensors.torch import save_file

    config = adapter_of(model)
    tensors = {}
    for name, parameter_name in names_in_file(model).items():
        # a copy: safetensors writes no weight under two names
        tensors[PREFIX + name.replace(f".{NAME}.", ".")] = weights[parameter_name].clone()
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
    config = copy.deepcopy(config)
    config.inference_mode = True  # as for an adapter that is loaded to be used
    config.save_pretrained(folder)


def add_adapter_of(model, other, dtype):
    """Put layers as those of a model's adapter, if it has one, into another model of a dtype."""
    adapter = copy.deepcopy(adapter_of(model))
    if adapter:
        add_adapter(f"lora_r {adapter.r}", other, adapter)
        other.to(dtype)  # peft keeps adapters in float32
