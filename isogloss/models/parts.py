"""Tell what a weight of a model is: frozen or trained, an adapter's, packed, of which end.

What puts them there is in adapters.py and quantized.py, which a run without them does not import.
Tests: tests/test_adapters.py, tests/test_freezing.py.
"""

NAME = "default"  # peft's name of the one adapter that a model here has


def adapter_of(model):
    """Return peft's config of a model's adapter, None of a model without one."""
    return getattr(model, "peft_config", {}).get(NAME)


def is_adapter(name):
    return ".lora_A." in name or ".lora_B." in name


def num_weights(parameter):
    """Return how many weights a parameter has, of which two may share a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def plain(tensor, dtype):
    """Return a tensor on the CPU; of a quantized one its numbers, in `dtype`."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return tensor.detach().cpu().clone()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, state).to("cpu", dtype)


def unpacked_layer(model):
    """Return the name of a layer whose weight should be in 4 bits and is not, or None."""
    for name, module in model.named_modules():
        is_packed = getattr(getattr(module, "weight", None), "quant_state", None) is not None
        takes_packed = hasattr(module, "quant_state") and module.weight.device.type != "meta"
        if takes_packed and not is_packed:
            return name
    return None


def describe_trained(model):
    """Return a line that says how many of a model's weights are trained; "": all."""
    config = adapter_of(model)
    total = 0
    trained = 0
    for parameter in model.parameters():
        numel = getattr(parameter, "ds_numel", num_weights(parameter))
        total += numel
        trained += numel if parameter.requires_grad else 0
    name = f"adapter of r {config.r}, alpha {config.lora_alpha:g}: " if config else ""
    line = f"{name}trains {trained:,} of {total:,} weights ({trained / total:.2%})"
    return line if trained < total else ""
