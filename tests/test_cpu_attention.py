"""cpu_attention.py: blocks of queries give what the definition of causal attention gives."""

import pytest
import torch

import isogloss.cpu_attention as cpu_attention
from isogloss.cpu_attention import BLOCK, attend_in_blocks, causal_blocks


def by_definition(query, key, value, scale):
    """Each query of each head alone, over the keys up to its own position."""
    rows, heads, length, _ = query.shape
    shared = heads // key.shape[1]  # heads of the query that one of the keys serves
    out = torch.empty_like(query)
    for row in range(rows):
        for head in range(heads):
            for place in range(length):
                keys = key[row, head // shared, : place + 1]
                values = value[row, head // shared, : place + 1]
                weights = (keys @ query[row, head, place] * scale).softmax(0)
                out[row, head, place] = weights @ values
    return out


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("key_heads, scale", [(4, None), (2, 0.7)])
def test_equals_the_definition(length, key_heads, scale):
    torch.manual_seed(length)
    query = torch.randn(2, 4, length, 8, dtype=torch.float64)
    key = torch.randn(2, key_heads, length, 8, dtype=torch.float64)
    value = torch.randn(2, key_heads, length, 8, dtype=torch.float64)
    expected = by_definition(query, key, value, scale or 8**-0.5)
    torch.testing.assert_close(attend_in_blocks(query, key, value, scale), expected)
    in_single = attend_in_blocks(query.float(), key.float(), value.float(), scale)
    torch.testing.assert_close(in_single.double(), expected, rtol=0, atol=5e-6)


def model_of(kind, **options):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("kind, options, is_in_blocks", [
    ("llama", {}, True),
    ("mistral", {"sliding_window": 20}, False),  # has a mask of its own
])
def test_models_say_the_same(kind, options, is_in_blocks, monkeypatch):
    model = model_of(kind, **options)
    calls = []

    def counted(*args):
        calls.append(1)
        return attend_in_blocks(*args)

    monkeypatch.setattr(cpu_attention, "attend_in_blocks", counted)
    ids = torch.randint(0, 30, (3, 2 * BLOCK + 7))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert not calls
        with causal_blocks():
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-4)
            assert len(calls) == (2 if is_in_blocks else 0)
            cache = model(input_ids=ids[:, :100], use_cache=True).past_key_values
            rest = model(input_ids=ids[:, 100:], past_key_values=cache).logits
            torch.testing.assert_close(rest, expected[:, 100:], rtol=0, atol=1e-4)
        del calls[:]
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert not calls
