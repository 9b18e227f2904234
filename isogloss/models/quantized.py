"""Hold the frozen weights of a student with an adapter in 4 bits (QLoRA, arXiv:2305.14314).

Its linear layers but the head are rounded when they are loaded, by bitsandbytes.  What a merged
export holds are these rounded weights as numbers again, with the adapter added: the student that
was trained.

Tests: tests/test_adapters.py.
"""

from transformers import BitsAndBytesConfig

BYTES = 0.5 + 4 / 64  # of a weight: a float32 scale for 64 of them


def quantization_options(method, dtype):
    """Return the keyword arguments of `from_pretrained` for a --quantize; "" has none.

    Args:
        dtype: in which the layers compute.
    """
    if not method:
        return {}
    return {"quantization_config": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=method, bnb_4bit_compute_dtype=dtype)}


def keep_as_loaded(model):
    """Let no evaluation on a CPU pack the weights anew, which rounds their scales to bfloat16."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
