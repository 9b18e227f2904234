"""The frozen teacher: load, forward.

It lives in the student's job, in a precision of its own, and never builds a graph.
"""

import torch
from transformers import AutoModelForCausalLM


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
def teacher_logits(model, ids_BT, vocab):
    """(B, T, W) logits of the teacher, cut to its tokenizer's vocabulary (an lm_head is often padded)."""
    return model(input_ids=ids_BT, use_cache=False).logits[..., :vocab]
