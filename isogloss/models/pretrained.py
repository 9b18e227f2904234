"""Load configs, tokenizers and weights that others have made; what is wrong with them is one line.

Whatever a library raises about such files becomes a ValueError that names the flag, the path and
the reason.  Code that comes with a model runs with --trust_remote_code alone.
"""

import contextlib

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from isogloss.flags.model_names import read_model_name
from isogloss.models.parts import adapter_of, unpacked_layer
from isogloss.models.tied import check_code, untie_as_files_do
from isogloss.projection_tools.tokenizers import reading

# Heads of models that read a text from both sides.
TWO_SIDED = "ForMaskedLM", "ForPreTraining"


def load_config(role, path, trust_remote_code=False):
    """Return the config of a model.

    Raises:
        ValueError: it cannot be read, or is none of a causal language model.
    """
    name = read_model_name(role, path)
    with reading(role, path, "its config"):
        config = AutoConfig.from_pretrained(
            name.base, revision=name.revision, trust_remote_code=trust_remote_code)
        text_config = config.get_text_config()
    _check_kind(role, path, config)
    _check_sizes(role, path, text_config)
    return config


def config_of_weights(role, path, trust_remote_code=False):
    """Return the config of a model as its weights are: tied only where these are.

    Raises:
        ValueError: see `load_config`; or the weights cannot be read.
    """
    config = load_config(role, path, trust_remote_code)
    if not quantization_of(config):  # such a model is loaded whole, and transformers sees it
        untie_as_files_do(role, path, config, trust_remote_code)
    return config


def config_of_weights_here(role, path, trust_remote_code=False):
    """Return the same for whoever does not go on to read the weights, which may be absent."""
    config = load_config(role, path, trust_remote_code)
    with contextlib.suppress(ValueError):
        untie_as_files_do(role, path, config, trust_remote_code, download=False)
    return config


def _check_kind(role, path, config):
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"--{role} {path}: is an encoder with a decoder ({config.model_type}); "
                         "expected a causal language model")
    architectures = config.architectures or []
    if not isinstance(architectures, list):
        raise ValueError(f"--{role} {path}: its config.json says architectures {architectures!r}; "
                         "expected a list of names")
    for name in architectures:
        if str(name).endswith(TWO_SIDED):
            raise ValueError(f"--{role} {path}: is a {name}, which reads a text from both sides; "
                             "expected a causal language model")


def _check_sizes(role, path, config):
    """Raise a ValueError for sizes that no language model has, which the libraries let pass."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(config, name, None)
        if type(value) is not int or value < 1:
            raise ValueError(f"--{role} {path}: its config.json says {name} {value!r}; expected a "
                             "whole number above 0, as every language model has")
    context = getattr(config, "max_position_embeddings", None)  # None: without a limit
    if type(context) is int and context < 1:
        raise ValueError(f"--{role} {path}: its config.json says max_position_embeddings "
                         f"{context}; expected a whole number above 0")
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    for layer in layers:  # Gemma 4's differ in their heads
        heads = getattr(layer, "num_attention_heads", None)
        kv_heads = getattr(layer, "num_key_value_heads", None)
        if type(heads) is int and type(kv_heads) is int and (kv_heads < 1 or heads % kv_heads):
            raise ValueError(f"--{role} {path}: its config.json says num_key_value_heads "
                             f"{kv_heads}; expected a divisor of num_attention_heads, {heads}")


def check_language_model(role, path, config):
    """Raise a ValueError for a config of which transformers makes no causal language model."""
    has_code = getattr(config, "auto_map", None)  # the model brings a class of its own
    if not has_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"--{role} {path}: transformers has no causal language model of type "
            f"{config.model_type}; expected one that AutoModelForCausalLM loads")


def attention_options(attention):
    """Return transformers' keyword arguments of an --attention; auto takes sdpa, else eager."""
    return {} if attention == "auto" else {"attn_implementation": attention}


def load_model(role, path, trust_remote_code=False, adapter=None, **options):
    """Return a causal language model with its weights.

    transformers by itself would fill what is missing with random numbers, and skip what is left
    over.

    Args:
        adapter: peft's config, to keep the adapter of a path that is one; None: it is merged,
            unless the base model is quantized.
        options: of `from_pretrained`.
    Raises:
        ValueError: a file cannot be read; names or shapes do not belong to the config.
    """
    name = read_model_name(role, path)
    config = config_of_weights(role, path, trust_remote_code)
    with reading(role, path, "its weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            name.base, revision=name.revision, trust_remote_code=trust_remote_code, config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True, **options)  # they are refused below, by name
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        from isogloss.models.wrong_files import check_names

        check_names(role, path, info, model)
    bare = unpacked_layer(model)
    if bare:
        raise ValueError(f"--{role} {path}: its config.json says that its weights are quantized, "
                         f"and {bare} is not; take quantization_config out of it")
    if name.adapter:
        from isogloss.models.adapters import load_adapter, merge_into

        load_adapter(role, path, model, name.adapter, adapter)
        if adapter is None and not quantization_of(model.config):  # packed bits take no sum
            merge_into(model)
    return model


def student_adapter(cfg):
    """Return peft's config of the adapter that the flags ask for; None: all weights are trained."""
    if not cfg.lora_r:
        return None
    from isogloss.models import adapters

    return adapters.student_adapter(cfg)


# --- check ----------------------------------------------------------------------------------------


def check_weights(role, path, trust_remote_code=False, adapter=None, *, attention="auto"):
    """Check that a model's files hold the weights of its config, without reading their values.

    Every rank does so before any of them loads: where they load together, as by ZeRO-3, one that
    fails would leave the others waiting.

    Args:
        adapter: peft's config of the adapter by which a student is trained, or None.
        attention: an --attention that the model has to have.
    Raises:
        ValueError: see `load_model`, `adapters.add_adapter`, `check_attention`.
    """
    config = load_config(role, path, trust_remote_code)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        from isogloss.models.quantized import check_quantized

        return check_quantized(role, path, quantization)
    try:
        # there a tensor is a shape
        model = load_model(role, path, trust_remote_code, adapter, device_map="meta")
    except ValueError as error:
        if "no file named" in str(error):
            from isogloss.models.wrong_files import without_weights

            raise ValueError(without_weights(role, path, error)) from None
        raise
    check_attention(role, path, model, attention)
    check_code(role, path, model)
    model.tie_weights()  # what files name twice: without values transformers leaves it apart
    if adapter and adapter_of(model) is None:
        from isogloss.models.adapters import add_adapter

        add_adapter(f"lora_r {adapter.r}", model, adapter)


def check_attention(role, path, model, attention):
    """Raise a ValueError for a model that does not have an --attention."""
    has = {"sdpa": model._supports_sdpa, "flash_attention_2": model._supports_flash_attn}
    if not has.get(attention, True):
        raise ValueError(f"--attention {attention}: {type(model).__name__} of --{role} {path} does "
                         "not have it; use auto")


def quantization_of(config):
    """Return the method by which a model's weights are quantized, as text; "": they are not."""
    quantization = getattr(config, "quantization_config", None)
    quantization = quantization or getattr(config.get_text_config(), "quantization_config", None)
    if not quantization:
        return ""
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method") or "bitsandbytes"
    return str(getattr(method, "value", method))
