"""task_passes.py: whatever shares a pass, a continuation has the numbers of one of its own."""

import random

import numpy as np
import pytest
import torch

from isogloss.evaluation import task_passes
from isogloss.evaluation.task_model import TaskRequest, score

WINDOW = 48
VOCAB = 40
SHAPES = {  # with what a cache may get wrong
    "llama": dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2,
                  num_attention_heads=4, max_position_embeddings=WINDOW),  # rotary embeddings
    "mistral": dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, sliding_window=7,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=4),
    "gpt2": dict(n_embd=16, n_layer=2, n_head=4, n_positions=WINDOW),  # learned positions
    "gpt_neo": dict(  # the table of its mask has the window's size
        hidden_size=16, num_layers=2, num_heads=4, max_position_embeddings=WINDOW, window_size=6,
        attention_types=[[["global", "local"], 1]]),
    "bloom": dict(hidden_size=16, n_layer=2, n_head=4),  # takes no positions
    "mamba": dict(hidden_size=16, num_hidden_layers=2, state_size=4),  # keeps a state, no keys
}
SHARES = {"llama", "mistral", "gpt2", "gpt_neo"}


def tiny(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, initializer_range=0.4, pad_token_id=0,
                                  bos_token_id=1, eos_token_id=2, **SHAPES[kind])
    return AutoModelForCausalLM.from_config(config).eval()


def requests_of():
    """Requests as tasks make them, and corners of the window; some contexts have one alone."""
    draws = random.Random(0)

    def ids(count):
        return [draws.randrange(VOCAB) for _ in range(count)]

    requests = []

    def ask(context, *continuations):
        for continuation in continuations:
            kept = np.array([*context, *continuation][-(WINDOW + 1) :], np.int32)
            requests.append(TaskRequest(kept, len(continuation)))

    for length in (1, 5, 9, 9, 14, 30):
        ask(ids(length), *[ids(1 + draws.randrange(6)) for _ in range(4)])
    for length in (3, 20, WINDOW + 5):
        ask(ids(length), [7], [8], [9], [5])  # letters
    ask(ids(17), [3, 7], [3, 8], [3, 9])  # a common first token
    ask(ids(17), [7], [3, 8], [4], [3, 9, 9])
    ask(ids(WINDOW - 2), [4, 5, 6], [7, 8])  # fill the window to the last token
    ask(ids(WINDOW // 2), ids(WINDOW // 2 + 1), ids(3))
    ask(ids(WINDOW // 2 - 1), ids(4), ids(5))
    ask(ids(WINDOW + 9), ids(4), ids(4), ids(2))  # exceed it
    ask(ids(2), ids(12), ids(13))  # more continuation than context
    ask(ids(11), ids(5))
    ask(ids(1), ids(WINDOW))
    return requests


def with_greedy_ones(model, requests):
    """Let every third continuation be what the model finds most likely, token by token."""
    changed = []
    for number, request in enumerate(requests):
        ids = request.ids.copy()
        if number % 3 == 0:
            for place in range(len(ids) - request.num_scored, len(ids)):
                seen = torch.tensor(ids[:place].astype(np.int64))[None]
                with torch.no_grad():
                    ids[place] = model(input_ids=seen, use_cache=False).logits[0, -1].argmax()
        changed.append(TaskRequest(ids, request.num_scored))
    return changed


def by_definition(model, request):
    """Return (logp, is greedy) of a continuation, from a pass of its text alone."""
    ids = torch.tensor(request.ids[:-1].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, -request.num_scored :].double()
    tokens = torch.tensor(request.ids[-request.num_scored :].astype(np.int64))
    logp = logits.log_softmax(-1).gather(1, tokens[:, None]).sum()
    return float(logp), bool((logits.argmax(-1) == tokens).all())


def check(model, requests, expected, batch_size):
    found = score(model, requests, batch_size)
    assert len(found) == len(requests)
    np.testing.assert_allclose([one.logp for one in found], [logp for logp, _ in expected],
                               rtol=1e-6, atol=1e-5)
    assert [one.is_greedy for one in found] == [is_greedy for _, is_greedy in expected]


def tokens_read(model, compute):
    """Return how many positions a model reads, padding included, while something is computed."""
    sizes = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, arguments: sizes.append(arguments[0].numel()))
    compute()
    hook.remove()
    return sum(sizes)


@pytest.mark.parametrize("kind", SHAPES)
def test_equals_a_pass_for_each_continuation(kind, monkeypatch):
    model = tiny(kind)
    requests = with_greedy_ones(model, requests_of())
    expected = [by_definition(model, request) for request in requests]
    assert len({is_greedy for _, is_greedy in expected}) == 2
    for batch_size in (1, 3, 64):
        check(model, requests, expected, batch_size)
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    check(model, [requests[number] for number in order], [expected[number] for number in order], 5)
    monkeypatch.setattr(task_passes, "CPU_TOKENS", 20)  # less than some texts have
    check(model, requests, expected, 7)
    assert score(model, []) == []


@pytest.mark.parametrize("kind", SHAPES)
def test_a_context_is_read_once(kind):
    """16 continuations of 4 tokens behind 30: one pass of 30 and one of 16 x 3, if a cache does."""
    context = list(range(30))
    requests = []
    for number in range(16):
        ids = np.array([*context, number, 5, 6, 7 + number % 2], np.int32)
        requests.append(TaskRequest(ids, 4))
    model = tiny(kind)
    read = tokens_read(model, lambda: score(model, requests))
    if kind in SHARES:
        assert read == 30 + 16 * 3
    else:
        assert read >= 16 * 33
    letters = [TaskRequest(np.array([*context, number], np.int32), 1) for number in range(4)]
    assert tokens_read(model, lambda: score(model, letters)) == 30


def test_processes_take_as_many_passes():
    """A process without work runs an idle pass for each pass of another."""
    model = tiny("llama")
    counts = []
    hook = model.register_forward_pre_hook(lambda *_: counts.append(1))
    score(model, requests_of(), 3)
    passes = len(counts)
    del counts[:]
    asked = []

    def agree(has_work):
        asked.append(has_work)
        return has_work or len(asked) <= passes

    score(model, requests_of()[:4], 3, agree)
    hook.remove()
    assert len(counts) == passes
    assert asked[0] and not asked[-2]
