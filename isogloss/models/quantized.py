"""Hold the frozen weights of a student with an adapter in 4 bits (QLoRA, arXiv:2305.14314).

Its linear layers but the head are rounded when they are loaded, by bitsandbytes.  What a merged
export holds are these rounded weights as numbers again, with the adapter added: the student that
was trained.

Tests: tests/test_adapters.py.
"""

import torch
from transformers import BitsAndBytesConfig

from isogloss.projection_tools.tokenizers import reading

BYTES = 0.5 + 4 / 64  # of a weight: a float32 scale for 64 of them


def check(cfg, layout):
    """Raise a ValueError for a --quantize under ZeRO-3."""
    if layout.ds_config.get("zero_optimization", {}).get("stage") == 3:
        raise ValueError(f"--quantize {cfg.quantize}: {cfg.ds_config} has ZeRO-3, which cuts "
                         "weights, and these are packed; use stage 0, 1 or 2")


def quantization_options(method, ds_config):
    """Return the keyword arguments of `from_pretrained` for a --quantize."""
    return {"quantization_config": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=method,
        bnb_4bit_compute_dtype=compute_dtype(ds_config))}


def change(model, cfg):
    """Let no evaluation on a CPU pack the weights anew, which rounds their scales to bfloat16."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_quantized(role, path, quantization):
    """Raise a ValueError for quantized weights that cannot be trained, or not be read."""
    from transformers.quantizers import AutoHfQuantizer  # a second, which few models need

    with reading(role, path, "its quantized weights"):
        quantizer = AutoHfQuantizer.from_config(quantization)
        quantizer.validate_environment(device_map=None)
    if role == "student":
        method = quantizer.quantization_config.quant_method
        raise ValueError(f"--student {path}: its weights are quantized ({method}), which cannot "
                         "be trained; use the model in float32, bfloat16 or float16")


def compute_dtype(ds_config):
    """Return the dtype in which DeepSpeed runs the student."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(name, {}).get("enabled"):
            return dtype
    return torch.float32
