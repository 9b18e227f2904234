"""rollout.py: draws by counters, whatever the batch, and the probabilities of what was drawn."""

import math
from types import SimpleNamespace

import pytest
import torch

from isogloss import rollout

VOCAB = 11
STOP = 3


@pytest.fixture(scope="module")
def model():
    """A tiny Llama; its rotary embeddings notice wrong positions."""
    return model_of("llama", initializer_range=0.5)


def prompts(count, longest=9, limit=20):
    """Prompts of 1 to `longest` tokens."""
    found = []
    for number in range(count):
        ids = [(7 * number + place) % VOCAB for place in range(1 + number % longest)]
        found.append(rollout.Prompt(ids, (5, number, 0), limit - number % 4))
    return found


def test_tensors_mix_as_integers_do():
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    mixed = rollout._mix_in_place(torch.tensor(numbers))
    assert mixed.tolist() == [rollout._signed(rollout._mixed(number)) for number in numbers]


def test_the_noise_is_gumbel():
    """Mean, variance, and the exact probability of large values, which choose rare tokens."""
    noise = rollout.gumbel_noise(torch.arange(400) * 7919, 5000).double()
    n = noise.numel()
    assert abs(noise.mean() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    for limit in (3.0, 8.0, 11.0):
        expected = -math.expm1(-math.exp(-limit)) * n
        assert abs(int((noise > limit).sum()) - expected) < 5 * math.sqrt(expected)


class Fixed(torch.nn.Module):
    """A model that says the same of every place."""

    device = torch.device("cpu")

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, past_key_values=None, use_cache=True, **_):
        rows, width = input_ids.shape
        return SimpleNamespace(logits=self.logits.expand(rows, width, -1), past_key_values=True)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 1.0), (1.5, 0.8)])
def test_tokens_are_drawn_by_their_probability(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    starts = [rollout.Prompt([0], (1, number), 50) for number in range(200)]
    found = rollout.write(Fixed(logits), starts, [], temperature=temperature, top_p=top_p)
    counts = torch.bincount(torch.cat([completion.ids for completion in found]), minlength=6)
    p = (logits / temperature).softmax(0)
    # sorted already: keep what begins below top_p
    p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)
    p = p / p.sum()
    n = 200 * 50
    assert (counts[p == 0] == 0).all()
    deviation = (counts - n * p).abs()
    assert (deviation <= 4.5 * (n * p * (1 - p)).sqrt()).all(), counts
    logp = logits.log_softmax(0)
    for completion in found[:3]:
        assert (completion.temperature, completion.top_p) == (temperature, top_p)
        torch.testing.assert_close(completion.logp, p.log()[completion.ids])
        # that of the model's own distribution
        entropy = -(logp.exp() * logp).sum()
        torch.testing.assert_close(completion.entropy, entropy.expand(50))


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_a_completion_does_not_depend_on_its_batch(model, batch_size):
    starts = prompts(13)
    alone = [rollout.write(model, [start], [STOP], VOCAB)[0] for start in starts]
    together = rollout.write(model, list(reversed(starts)), [STOP], VOCAB, batch_size=batch_size)
    for first, second in zip(alone, reversed(together), strict=True):
        assert torch.equal(first.ids, second.ids)
        assert first.ended == second.ended
        torch.testing.assert_close(first.logp, second.logp, rtol=0, atol=5e-5)


@pytest.mark.parametrize("places", [2, 3, 100])
def test_completions_do_not_depend_on_when_the_host_looks_who_goes_on(model, monkeypatch, places):
    starts = prompts(13)
    expected = rollout.write(model, starts, [STOP], VOCAB, batch_size=6)
    assert {completion.ended for completion in expected} == {True, False}
    looks = []
    count_active = rollout._Batch.count_active
    monkeypatch.setattr(rollout._Batch, "count_active",
                        lambda batch: looks.append(batch.place) or count_active(batch))
    monkeypatch.setitem(rollout.PLACES_BETWEEN_LOOKS, "cpu", places)
    found = rollout.write(model, starts, [STOP], VOCAB, batch_size=6)
    assert all(place % places == 0 for place in looks)
    for first, second in zip(found, expected, strict=True):
        assert torch.equal(first.ids, second.ids) and first.ended == second.ended
        torch.testing.assert_close(first.logp, second.logp, rtol=0, atol=5e-5)


def test_equal_tokens_are_in_a_nucleus_together():
    """So a row keeps the same beside one that wants the whole vocabulary sorted."""
    scores = torch.zeros(2, 3000)
    scores[0, torch.randperm(3000)[:400]] = 9.0  # 0.9 of the mass, in equal parts
    beside = rollout._nucleus(scores, 0.5)
    assert beside[0].isfinite().sum() == 400 and beside[1].isfinite().all()
    assert torch.equal(rollout._nucleus(scores[:1], 0.5), beside[:1])


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-7])
def test_a_nucleus_is_that_of_the_whole_vocabulary_sorted(top_p):
    """By definition: what stands before a token, the most likely first, has less than top_p."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.0, 0.5, 3.0, 9.0])[:, None]  # of flat rows most tokens stay
    scores = scale * torch.randn(4, 3000, generator=generator).sort().values
    scores += 1e-4 * torch.randperm(3000, generator=generator)  # no two are equal
    stays = rollout._nucleus(scores, top_p).isfinite()
    few = rollout._nucleus(scores[2:], top_p).isfinite()
    for row, row_scores in enumerate(scores.double()):
        p = row_scores.softmax(0)
        order = sorted(range(3000), key=lambda v: -float(row_scores[v]))
        before = p[order].cumsum(0) - p[order]
        expected = torch.zeros(3000, dtype=torch.bool)
        expected[order] = before < top_p
        near = (before - top_p).abs() < 1e-6  # float32 may find either
        clear = torch.ones(3000, dtype=torch.bool)
        clear[order] = ~near
        assert torch.equal(stays[row] & clear, expected & clear), row
        assert row < 2 or torch.equal(few[row - 2], stays[row])
    assert stays.any(1).all()


def check_probabilities(model, starts, completions):
    for start, completion in zip(starts, completions, strict=True):
        ids = torch.cat([torch.tensor(start.ids), completion.ids])
        with torch.no_grad():
            logp = model(input_ids=ids[None]).logits[0, :, :VOCAB].log_softmax(-1)
        first = len(start.ids)
        expected = logp[first - 1 : -1].gather(1, completion.ids[:, None]).squeeze(1)
        torch.testing.assert_close(completion.logp, expected, rtol=0, atol=5e-5)


# Layers that are no attention keep a state of a text, not a key and a value of each token.
SHAPE = dict(
    vocab_size=VOCAB + 2, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    initializer_range=0.3, pad_token_id=0)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
# model_type: (needs equal lengths, more of its config)
KINDS = {
    "llama": (False, {}),
    "minimax": (True, dict(layer_types=["linear_attention", "full_attention"], head_dim=8,
                           num_local_experts=2, num_experts_per_tok=1, block_size=16)),
    "lfm2": (False, dict(layer_types=["conv", "full_attention"], head_dim=8)),
    "bamba": (False, dict(attn_layer_indices=[1], **MAMBA)),
    "falcon_h1": (False, dict(mamba_d_ssm=32, head_dim=8, **MAMBA | {"mamba_n_heads": 4})),
    "gemma3_text": (False, dict(head_dim=8, sliding_window=4)),
}


def model_of(kind, **more):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE | more)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_has_the_probabilities_of_a_forward_pass(kind):
    """Prompts of all lengths, of which some end before others; layers that are no attention too."""
    expected, more = KINDS[kind]
    model = model_of(kind, **more)
    equal_lengths = rollout.needs_equal_lengths(model, VOCAB)
    assert equal_lengths == expected
    starts = prompts(12, longest=4, limit=6)
    completions = rollout.write(model, starts, [STOP], VOCAB, equal_lengths=equal_lengths)
    assert len({len(completion.ids) for completion in completions}) > 2
    check_probabilities(model, starts, completions)


def test_a_model_that_cannot_write_says_so_in_one_line():
    with pytest.raises(ValueError, match=r"cannot write .* returns no key/value cache") as error:
        rollout.needs_equal_lengths(model_of("mamba", state_size=8), VOCAB)
    assert "\n" not in str(error.value)

    class Wrong(Fixed):
        """One whose cache is read wrongly, whatever stands beside a text."""

        dtype = torch.float32

        def forward(self, input_ids, use_cache=True, **_):
            return super().forward(input_ids) if use_cache else SimpleNamespace(
                logits=-self.logits.expand(*input_ids.shape, -1))

    with pytest.raises(ValueError, match="off by up to 4 nats"):
        rollout.needs_equal_lengths(Wrong(torch.tensor([2.0, -2.0])), 2)


def test_copies_and_seeds_differ():
    model = Fixed(torch.zeros(500))
    keys = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]
    found = rollout.write(model, [rollout.Prompt([0], key, 30) for key in keys], [])
    for number, completion in enumerate(found):
        for other in found[:number]:
            assert not torch.equal(completion.ids, other.ids)


def test_mode_and_random_state_stay(model):
    model.train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    rollout.write(model, prompts(3), [STOP], VOCAB)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    model.eval()
    rollout.write(model, prompts(3), [STOP], VOCAB)
    assert not model.training


def test_errors_leave_the_mode_as_it_was(model):
    def fail(*_):
        raise ZeroDivisionError

    class Picky(Fixed):
        """One whose own code refuses padding, and, `alone`, a text without a cache."""

        dtype = torch.float32
        alone = False

        def forward(self, input_ids, attention_mask=None, use_cache=True, **options):
            if attention_mask is not None or (self.alone and not use_cache):
                raise ZeroDivisionError
            return super().forward(input_ids, **options)

    picky = Picky(torch.tensor([2.0, -2.0]))
    for training in (True, False):
        model.train(training)
        for options in ({"on_written": fail}, {"agree": fail}):
            with pytest.raises(ZeroDivisionError):
                rollout.write(model, prompts(3), [STOP], VOCAB, **options)
            assert model.training == training and torch.is_grad_enabled()
        with pytest.raises(ZeroDivisionError):
            rollout.write(model, [rollout.Prompt([1], (0,), 3, fail)], [STOP], VOCAB)
        picky.train(training)
        assert rollout.needs_equal_lengths(picky, 2)
        assert model.training == picky.training == training
        picky.alone = True
        with pytest.raises(ZeroDivisionError):
            rollout.needs_equal_lengths(picky, 2)
        assert picky.training == training
        picky.alone = False
    model.eval()


def test_processes_take_as_many_passes(model):
    """Two processes in turn, with unequal work: each has a pass for each of the other's."""
    passes = []
    for own, other in ((prompts(9), 40), ([], 40)):
        count = 0

        def agree(has_work, other=other):
            nonlocal count
            count += 1
            return has_work or count <= other

        calls = []
        handle = model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        completions = rollout.write(model, own, [STOP], VOCAB, batch_size=4, agree=agree)
        handle.remove()
        passes.append(len(calls))
        assert len(completions) == len(own)
    assert passes[1] == 40 and passes[0] >= 40


def test_nothing_to_write_and_written_batches_are_reported(model):
    assert rollout.write(model, [], [STOP]) == []
    completion, = rollout.write(model, [rollout.Prompt([1], (0,), 0)], [STOP], VOCAB)
    assert len(completion.ids) == 0 and not completion.ended
    reported = []
    rollout.write(model, prompts(13), [STOP], VOCAB, batch_size=5, on_written=reported.append)
    assert sorted(reported) == [3, 5, 5]


def test_wrong_prompts_and_models():
    with pytest.raises(ValueError, match="no token"):
        rollout.write(Fixed(torch.zeros(4)), [rollout.Prompt([], (0,), 5)], [])
    for length, options in ((5, {"top_p": 0}), (5, {"top_p": 1.1}), (5, {"top_p": torch.nan}),
                            (5, {"temperature": -1}), (5, {"temperature": torch.nan}), (-1, {})):
        with pytest.raises(ValueError, match=r"max_new_tokens=.*; expected 0 or more, above"):
            rollout.write(Fixed(torch.zeros(4)), [rollout.Prompt([1], (0,), length)], [], **options)
    forgetful = Fixed(torch.zeros(4))
    forgetful.forward = lambda input_ids, **_: SimpleNamespace(logits=torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="no key/value cache"):
        rollout.write(forgetful, [rollout.Prompt([0], (0,), 5)], [])


def test_at_temperature_0_every_token_is_the_most_likely_one(model):
    """Step by step, by a forward pass over the whole text, without a cache."""
    starts = prompts(11)
    stops = {STOP, 0, 7}
    found = rollout.write(model, starts, list(stops), VOCAB, temperature=0, batch_size=4)
    assert {completion.ended for completion in found} == {True, False}
    for start, completion in zip(starts, found, strict=True):
        ids = list(start.ids)
        expected = []
        while len(expected) < start.max_new_tokens and stops.isdisjoint(expected):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids + expected])).logits[0, -1, :VOCAB]
            expected.append(int(logits.argmax()))
        assert completion.ids.tolist() == expected
        assert completion.ended == (expected[-1] in stops)


def test_a_completion_ends_where_its_prompt_says_so(model):
    """It is asked after every token, up to the first yes; others go on as if nothing was asked."""
    starts = prompts(12)
    whole = rollout.write(model, starts, [STOP], VOCAB)
    asked = {}

    def is_complete_of(number):
        def is_complete(ids):
            asked.setdefault(number, []).append(list(ids))
            return len(ids) > 1 and sum(ids) % 4 == number % 4

        return is_complete

    for number in range(0, 12, 2):
        starts[number].is_complete = is_complete_of(number)
    num_early = 0
    found = rollout.write(model, starts, [STOP], VOCAB, batch_size=5)
    for number, (completion, of_whole) in enumerate(zip(found, whole, strict=True)):
        ids = of_whole.ids.tolist()
        ended = of_whole.ended
        if number % 2 == 0:
            prefixes = [ids[:length] for length in range(1, len(ids) + 1)]
            fits = [len(prefix) > 1 and sum(prefix) % 4 == number % 4 for prefix in prefixes]
            if True in fits:
                prefixes = prefixes[: fits.index(True) + 1]
                num_early += len(prefixes) < len(ids)
                ended = True
            ids = prefixes[-1]
            assert asked[number] == prefixes
        assert completion.ids.tolist() == ids
        assert completion.ended == ended
        torch.testing.assert_close(completion.logp, of_whole.logp[: len(ids)], rtol=0, atol=5e-5)
    assert num_early >= 3
