"""The frozen teacher: load, forward.

It lives in the student's job, in a precision of its own, and never builds a graph.
"""

import torch
from transformers import AutoModelForCausalLM

from tiles import HiddenRows, LogitRows, head_of


def load_teacher(path, dtype, device):
    """A causal language model in evaluation mode, without gradients.

    Args:
        path: hub id or directory.
        dtype: "auto" (as in the checkpoint), "float32", "bfloat16" or "float16".
    """
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.requires_grad_(False).eval().to(device)


@torch.no_grad()
def teacher_rows(model, ids_BT, vocab, tiled=True):
    """Logits of any positions of the flattened (B * T), cut to the tokenizer (an lm_head is often padded).

    Args:
        tiled: keep the final hidden states and compute logits when they are asked for; else keep logits.
    """
    if tiled:
        hidden = model.base_model(input_ids=ids_BT, use_cache=False)[0]
        return HiddenRows(hidden.flatten(0, 1), head_of(model, vocab))
    return LogitRows(model(input_ids=ids_BT, use_cache=False).logits[..., :vocab].flatten(0, 1))


def hidden_head_is_right(rows, logits):
    """Are these the model's own logits?  Not for an architecture that does more than `head_of` knows."""
    logits = logits.flatten(0, 1)
    found = rows(torch.arange(len(logits), device=logits.device)).float()
    worst = 1e-4 if logits.dtype == torch.float32 else 0.05
    return (found - logits.float()).norm() <= worst * logits.float().norm()
