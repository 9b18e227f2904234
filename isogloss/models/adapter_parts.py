"""Tell the layers and weights of an adapter, and the two ends of a model.

Tests: tests/test_adapters.py, tests/test_freezing.py.
"""

from isogloss.models.parts import NAME


def plain_name(name):
    """Return the name that a frozen weight has in the model without its adapter."""
    return name.replace(".base_layer.", ".")


def layers_of(model):
    """Return {name: layer with an adapter} of a model."""
    return {name: module for name, module in model.named_modules()
            if hasattr(module, "base_layer") and hasattr(module, "lora_A")}


def product(layer, down_RI, up_OR):
    """Return the float32 (out, in) matrix that an adapter adds to a weight, in its layout."""
    delta = layer.scaling[NAME] * (up_OR.float() @ down_RI.float())
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def merged_weight(layer, weight, down_RI, up_OR):
    """Return a weight of a layer with an adapter, whose product is added."""
    return (weight.float() + product(layer, down_RI, up_OR)).to(weight.dtype)


def ends_of(model):
    """Return {name: module} of a model's input embedding and head."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if module in ends}


def end_parameters(model):
    """List (name, parameter) of a model's embedding and head; a tied one has two names."""
    pairs = []
    for module_name, module in ends_of(model).items():
        for name, parameter in module.named_parameters():
            pairs.append((f"{module_name}.{name}", parameter))
    return pairs
