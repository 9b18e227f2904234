"""Attend causally on a CPU in two thirds of the time, block by block.

torch's kernel for CPUs reads all keys up to the 512th for every query, and masks those behind it.
Here a block of queries is given the keys up to its own end alone.  Sums and results are the same,
up to rounding.

Shapes: B rows, H heads, S queries and as many keys, D features of a head.

Tests: tests/test_cpu_attention.py.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Queries of a block.  At 512 tokens, 32 and 64 took 0.6 of the kernel's time, 128 took 0.67.
BLOCK = 64
PLAIN = {"position_bias", "softcap", "cache"}  # options that a block's attention does not have


@contextmanager
def causal_blocks():
    """Let models of transformers with "sdpa" attention attend in blocks where that is the same."""
    whole = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        has_more = any(options.get(name) is not None for name in PLAIN)
        is_plain = attention_mask is None and is_causal and not dropout and not has_more
        length = query.shape[2]
        if is_plain and query.device.type == "cpu" and BLOCK < length == key.shape[2]:
            return attend_in_blocks(query, key, value, scaling).transpose(1, 2).contiguous(), None
        return whole(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                     **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = whole


def attend_in_blocks(query_BHSD, key_BHSD, value_BHSD, scale=None):
    """Return (B, H, S, D) of causal attention.

    Args:
        query_BHSD: (B, H, S, D).
        key_BHSD, value_BHSD: the same, or with fewer heads, each for as many heads of the query.
        scale: of the products of queries and keys; None: 1 / sqrt(D).
    """
    blocks = []
    length = query_BHSD.shape[2]
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        sees = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)
        blocks.append(F.scaled_dot_product_attention(
            query_BHSD[:, :, begin:end], key_BHSD[:, :, :end], value_BHSD[:, :, :end], sees,
            scale=scale, enable_gqa=True))
    return torch.cat(blocks, 2)
