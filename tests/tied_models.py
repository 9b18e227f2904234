"""Models of many families, by what their files and their configs say of head and embedding.

And what plain transformers answers by them.
"""

import functools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import test_families

SHAPE = test_families.SHAPE
GPT = dict(n_embd=32, n_head=4, n_layer=2)
DENSE = {
    "llama": {}, "qwen2": {}, "qwen3": dict(head_dim=8), "mistral": {}, "gpt_neox": {},
    "gpt2": GPT, "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global"], 2]]),
    "gemma2": dict(head_dim=8), "gemma3_text": dict(head_dim=8),
    "opt": dict(word_embed_proj_dim=32, ffn_dim=64), "phi": {}, "cohere": {}, "granite": {},
}
FAMILIES = DENSE | test_families.FAMILIES
KINDS = "tied", "untied", "wrongly_tied", "resized"  # the last one wrongly tied, too
IDS = torch.arange(3, 43).view(2, 20)  # of texts that every model here reads


def new_model(family, vocab, **more):
    config = AutoConfig.for_model(family, vocab_size=vocab, **SHAPE | FAMILIES[family] | more)
    return AutoModelForCausalLM.from_config(config)


def write_student(folder, family, kind, tokenizer):
    """Write a model of a kind in several files, and its tokenizer."""
    torch.manual_seed(5)
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
            for name in ("bos", "eos", "pad")}
    model = new_model(family, len(tokenizer) + 10, tie_word_embeddings=kind == "tied", **ends)
    if kind == "resized":
        model.resize_token_embeddings(len(tokenizer) + 23)
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    if kind in ("wrongly_tied", "resized"):
        say_tied(folder)
    return folder


def say_tied(folder, level=None):
    config = json.loads((folder / "config.json").read_text())
    (config[level] if level else config)["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))


def plain_logits(folder, ids, adapter=None):
    """Return what transformers, and peft, read of some files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def assert_close(logits, expected, name):
    error = (logits - expected).norm() / expected.norm()
    assert error < 1e-5, (name, float(error))


@pytest.fixture(scope="module")
def students(tokenizers, tmp_path_factory):
    """Return a function of a family and a kind: the directory of that student."""
    folder = tmp_path_factory.mktemp("students")

    @functools.cache
    def written(family, kind):
        return write_student(folder / family / kind, family, kind, tokenizers[0])

    return written
