"""benchmarks/rivals.py: each formula by hand, on the text "abc" that two toy tokenizers cut."""

import re
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from benchmarks import rivals
from conftest import ROOT
from isogloss.align import TokenTable, align
from isogloss.losses import find_chunks

# the text is "ab" "c" for the student, "a" "b" "c" for the teacher
SPACE = "\u2581"
TOKENS = ["a", "b", "ab", "ac", "c", SPACE, "</s>"], ["a", "b", "c", "bc", SPACE, "</s>"]
COMMON = [0, 1, 4, 5, 6], [0, 1, 2, 4, 5]
CUT = [2, 4], [0, 1, 2]
CHUNK = [0, 1], [0, 0, 1]
TWINS = ["<0x61>", "<0x62>", "<0x63>"]  # what a tokenizer falls back to, beside a, b and c


def tokenizer_of(tokens):
    """Return a tokenizer that writes a space before a text, as those with byte fallback do."""
    merges = [tuple(token) for token in tokens if len(token) == 2]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Prepend(SPACE)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def pair_of(*tokens):
    tokenizers = list(map(tokenizer_of, tokens))
    return SimpleNamespace(tokenizers=tokenizers,
                           tables=list(map(TokenTable.from_tokenizer, tokenizers)))


@pytest.fixture
def pair():
    return pair_of(*TOKENS)


def test_gold_refuses_what_is_no_byte_level_bpe_as_the_page_says(pair):
    """The page quotes it with its version; the tokenizers are of Llama 2's kind."""
    utils = pytest.importorskip("trl.experimental.utils")
    page = (ROOT / "docs" / "results.md").read_text()
    quoted = re.search(r'TRL ([\d.]+)\'s GOLD takes .*?"(.*?)"', page, re.S)
    assert version("trl").startswith(quoted[1])
    for tokenizer in pair.tokenizers:
        with pytest.raises(NotImplementedError, match=" ".join(quoted[2].split())):
            utils.encode_with_byte_offsets(tokenizer.backend_tokenizer, ["abc"])
    ids = [tokenizer("abc", add_special_tokens=False)["input_ids"] for tokenizer in pair.tokenizers]
    alignment = align(*ids, *pair.tables, "abc")
    assert alignment.chunk_bytes.sum() == alignment.text_bytes == 3


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(ids), len(tokens), generator=generator, requires_grad=True)
            for ids, tokens in zip(CUT, TOKENS)]


BPM = partial(rivals.Bpm, beta=0.5, masks_space=True)


@pytest.mark.parametrize("loss", [rivals.Simct, partial(rivals.Simct, reverse=True), rivals.Csd,
                                  rivals.Bpm, BPM])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("are_first", [True, False])
def test_tokens_that_no_text_has_take_no_mass(pair, logits, loss, side, are_first):
    """Byte tokens beside the letters change nothing where a model gives them nothing."""
    expected = values(loss(pair), logits)
    tokens, ids, models_logits = list(TOKENS), list(CUT), [one.detach() for one in logits]
    nothing = torch.full((len(ids[side]), len(TWINS)), -1e9)
    parts = [nothing, models_logits[side]] if are_first else [models_logits[side], nothing]
    tokens[side] = [*TWINS, *TOKENS[side]] if are_first else [*TOKENS[side], *TWINS]
    ids[side] = [token + len(TWINS) * are_first for token in ids[side]]
    models_logits[side] = torch.cat(parts, 1)
    chunks = find_chunks(*[torch.tensor([chunk]) for chunk in CHUNK])
    value = loss(pair_of(*tokens))(*models_logits, *map(torch.tensor, ids), chunks)
    torch.testing.assert_close(value, expected)


def values(loss, logits):
    """Return the (C,) values of a loss, and check that the student gets a gradient."""
    ids = [torch.tensor(one) for one in CUT]
    chunks = find_chunks(*[torch.tensor([chunk]) for chunk in CHUNK])
    found = loss(logits[0], logits[1].detach(), *ids, chunks)
    found.sum().backward()
    assert logits[0].grad.abs().sum() > 0 and logits[0].grad.isfinite().all()
    return found.detach()


def kl(q, p):
    return sum(b * (b / a).log() for a, b in zip(p, q) if b > 0)


def test_simct_compares_common_tokens_and_the_span(pair, logits):
    x, y = [one.detach() for one in logits]
    span = torch.cat([x[0, COMMON[0]], x[0, 2:3]]).softmax(0), \
        torch.cat([y[0, COMMON[1]], (y[0, 0:1] + y[1, 1:2]) / 2]).softmax(0)
    whole = x[1, COMMON[0]].softmax(0), y[2, COMMON[1]].softmax(0)
    for reverse in (False, True):
        found = values(rivals.Simct(pair, reverse), logits)
        for number, (p, q) in enumerate((span, whole)):
            expected = float(kl(p, q) if reverse else kl(q, p))
            assert found[number] == pytest.approx(expected, rel=1e-4)


def test_agreement_is_that_of_common_tokens_where_a_chunk_begins(pair, logits):
    x, y = [one.detach() for one in logits]
    chunks = find_chunks(*[torch.tensor([chunk]) for chunk in CHUNK])
    beliefs = [(x[first, COMMON[0]], y[second, COMMON[1]]) for first, second in ((0, 0), (1, 2))]
    expected = {
        "same_token": [float(a.argmax() == b.argmax()) for a, b in beliefs],
        "total_variation_common": [float((a.softmax(0) - b.softmax(0)).clamp(min=0).sum())
                                   for a, b in beliefs]}
    assert set(expected) == set(rivals.AGREEMENT)
    for measure, values_C in expected.items():
        found = rivals.Agreement(pair, measure)(x, y, *map(torch.tensor, CUT), chunks)
        assert found.tolist() == pytest.approx(values_C, rel=1e-4)
    for measure, best in zip(rivals.AGREEMENT, (1.0, 0.0)):
        same = torch.zeros_like(x), torch.zeros_like(y)
        for own, common in zip(same, COMMON):
            own[:, common[1]] = 9.0
        found = rivals.Agreement(pair, measure)(*same, *map(torch.tensor, CUT), chunks)
        assert found.tolist() == pytest.approx([best, best])


def test_csd_compares_chains_of_the_same_beginning(pair, logits):
    p, q = [one.detach().softmax(-1) for one in logits]

    def with_rest(events):
        return torch.cat([events, 1 - events.sum(0, keepdim=True)])

    # "ab" and "ac" are written "a", "b" and "a", "c" by the teacher
    chain = kl(with_rest(q[0, 0] * q[1, [1, 2]]), with_rest(p[0, [2, 3]]))
    whole = kl(with_rest(q[2, COMMON[1]]), with_rest(p[1, COMMON[0]]))
    found = values(rivals.Csd(pair), logits)
    assert sorted(found.tolist()) == pytest.approx(sorted([float(whole), float(chain)]), rel=1e-4)


def test_bpm_gives_longer_tokens_the_chain(pair, logits):
    p, q = [one.detach().softmax(-1) for one in logits]
    # "ab" takes from "a" what "b" follows with, which came; "bc" begins with "b"
    ab = q[0, 0] * q[1, 1]
    first = torch.stack([q[0, 0] - ab, q[0, 1] + q[0, 3], ab, torch.tensor(0.0),
                         *q[0, [2, 4, 5]]])
    second = torch.stack([q[2, 0], q[2, 1] + q[2, 3], torch.tensor(0.0), torch.tensor(0.0),
                          *q[2, [2, 4, 5]]])
    found = values(rivals.Bpm(pair), logits)
    for number, target in enumerate((first, second)):
        # tokens without a target are one event, which the teacher's rest, here 0, belongs to
        assert found[number] == pytest.approx(float(kl(target, p[number])), rel=1e-4)


def test_bpm_inside_a_token_knows_what_was_read(pair, logits):
    """The other way round: the student writes "a", "b", "c", and the teacher "ab", "c"."""
    other = SimpleNamespace(tables=pair.tables[::-1], tokenizers=pair.tokenizers[::-1])
    x, y = logits[1], logits[0].detach()
    ids = [torch.tensor(one) for one in CUT[::-1]]
    chunks = find_chunks(*[torch.tensor([chunk]) for chunk in CHUNK[::-1]])
    found = rivals.Bpm(other)(x, y, *ids, chunks).detach()
    p, q = x.detach().softmax(-1), y.softmax(-1)
    # behind "a" only "ab" and "ac" can have come, or nothing of this token
    inside = q[0, [2, 3, 0]] / q[0, [0, 2, 3]].sum()
    events = torch.stack([p[1, 1], p[1, 2], 1 - p[1, [1, 2]].sum()])
    assert found[1] == pytest.approx(float(kl(inside, events)), rel=1e-4)


@pytest.mark.parametrize("loss", [rivals.Bpm, BPM])
def test_bpm_sees_two_tokens_with_equal_bytes_as_one(pair, logits, loss):
    """The teacher has "a" and <0x61>; what it gives to both is what the bytes have."""
    x, y = [one.detach() for one in logits]
    both = torch.tensor([[0.7], [-0.4], [1.3]])
    twin = torch.cat([y, both], 1)
    merged = y.clone()
    merged[:, 0] = torch.logaddexp(y[:, 0], both[:, 0])
    chunks = find_chunks(*[torch.tensor([chunk]) for chunk in CHUNK])
    ids = [torch.tensor(one) for one in CUT]
    tokens = TOKENS[0], [*TOKENS[1], TWINS[0]]
    found = loss(pair_of(*tokens))(x, twin, *ids, chunks)
    torch.testing.assert_close(found, loss(pair)(x, merged, *ids, chunks))


def test_bpm_as_published_is_a_jensen_shannon_divergence_without_white_space(pair, logits):
    p, q = [one.detach().softmax(-1) for one in logits]
    second = torch.stack([q[2, 0], q[2, 1] + q[2, 3], torch.tensor(0.0), torch.tensor(0.0),
                          *q[2, [2, 4, 5]]])
    has = second > 0
    ours = torch.cat([p[1][has], p[1][~has].sum()[None]])
    theirs = torch.cat([second[has], torch.zeros(1)])
    mean = (ours + theirs) / 2
    expected = float(kl(theirs, mean) + kl(ours, mean)) / 2
    assert values(BPM(pair), logits)[1] == pytest.approx(expected, rel=1e-4)
    chunks = find_chunks(torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))
    x, y = logits[0].detach(), logits[1].detach()[:2]
    found = BPM(pair)(x, y, torch.tensor([5, 4]), torch.tensor([4, 2]), chunks)
    assert len(found) == 1  # of " " and "c" the second alone


def test_no_teacher_pushes_down_what_is_unlikely(pair, logits):
    x = logits[0].detach()
    likely = x.clone()
    likely[torch.arange(2), torch.tensor(CUT[0])] += 20
    logp = x.log_softmax(-1)[torch.arange(2), torch.tensor(CUT[0])]
    expected = [one if one < np.log(0.1) else 0.0 for one in logp.tolist()]
    assert any(expected)
    assert values(rivals.NoTeacher(pair), logits) == pytest.approx(torch.tensor(expected))
    chunks = find_chunks(*[torch.tensor([chunk]) for chunk in CHUNK])
    ids = [torch.tensor(one) for one in CUT]
    assert not rivals.NoTeacher(pair)(likely, logits[1], *ids, chunks).any()
