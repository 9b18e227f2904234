"""Which tokens a cache keeps, and that draws stand for the others without bias."""

import pytest
import torch

from conftest import asset
from isogloss.align import TokenTable
from isogloss.data.options.text_keys import text_key
from isogloss.teachers import kept_tokens
from isogloss.teachers.text_scores import ScoredLogits
from isogloss.tiles import TopKLogits
from tokens import table_of

SPELLED = [b"", b"a", b"ab", b"abc", b"abd", b"b", b"ba", b"a", b"\xff", b"\xff\xff", b"abcab",
           b"<s>", b"c", b"ca", b"cab", b"cabbage", b"x" * 40, b"x" * 39, b"x" * 15]


def keep(logits_NW, num_entries, labels_N, order, *more):
    """Call keep_tokens with logits in the order of ids."""
    return kept_tokens.keep_tokens(logits_NW[:, order.ids_W], num_entries, labels_N, order, *more)


@pytest.fixture(scope="module")
def real_table():
    from transformers import AutoTokenizer

    folder = asset("models", "tinytalk_neo_3M")
    return TokenTable.from_tokenizer(AutoTokenizer.from_pretrained(folder))


def logits_of(num, vocab, spread=3.0):
    generator = torch.Generator().manual_seed(vocab)
    return spread * torch.randn(num, vocab, generator=generator)


def beginnings(token):
    return [token[: end + 1] for end in range(min(len(token), 16))]


def test_tokens_that_begin_alike_lie_side_by_side(real_table):
    for table in (table_of(SPELLED), real_table):
        spelled = [table.bytes_of(token) for token in range(len(table))]
        order = kept_tokens.byte_order(table)
        assert torch.equal(order.ids_W[order.place_W], torch.arange(len(table)))
        for token in range(0, len(table), max(1, len(table) // 50)):
            for p, begin in enumerate(beginnings(spelled[token])):
                ids = order.ids_W[order.low_WP[token, p] : order.high_WP[token, p]]
                alike = [other for other, text in enumerate(spelled) if text.startswith(begin)]
                assert sorted(ids.tolist()) == alike
            for p in range(len(beginnings(spelled[token])), 16):
                assert order.low_WP[token, p] == order.high_WP[token, p]


def test_relevance_is_the_mass_and_the_share_among_tokens_that_begin_as_the_label():
    order = kept_tokens.byte_order(table_of(SPELLED))
    p_NW = logits_of(len(SPELLED), len(SPELLED)).softmax(-1)
    labels_N = torch.arange(len(SPELLED))
    in_order_NW = p_NW[:, order.ids_W]
    factor_NW = kept_tokens.relevance_of_mass(in_order_NW, labels_N, order)[:, order.place_W]
    for label, begins in enumerate(map(beginnings, SPELLED)):
        for token, text in enumerate(SPELLED):
            shares = []
            for begin in begins:
                alike = [other.startswith(begin) for other in SPELLED]
                share = p_NW[label, token] / p_NW[label, torch.tensor(alike)].sum()
                shares.append(float(share) if text.startswith(begin) else 0.0)
            expected = float(p_NW[label, token]) + sum(shares) / max(len(shares), 1)
            relevance = float(p_NW[label, token] * factor_NW[label, token])
            assert relevance == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("num_entries", [3, 7, 12, 18, 600])
@pytest.mark.parametrize("label", [3, 16, 0])
def test_the_expected_row_is_the_row(temperature, num_entries, label):
    """Of 18 tokens beside the label all are kept, so that nothing is drawn."""
    order = kept_tokens.byte_order(table_of(SPELLED))
    logits = logits_of(1, len(SPELLED), 1.5)
    if num_entries < 18:
        logits[0, 8] = -torch.inf  # a token that never comes
    num = 20_000
    uniform_N = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    kept = keep(logits.expand(num, -1), num_entries, torch.full((num,), label), order,
                temperature, uniform_N)
    assert (kept.num_drawn_N > 0).all() == (num_entries < 18)
    rows = kept_tokens.estimated(kept.scored, kept.num_drawn_N, temperature)(torch.arange(num))
    assert (rows[:, -1] == -torch.inf).all()
    assert (rows > -torch.inf).sum(-1).max() <= num_entries + 1
    sums = (rows / temperature).logsumexp(-1)
    torch.testing.assert_close(sums, (logits / temperature).logsumexp(-1).expand(num))
    mean = (rows / temperature).softmax(-1).double().mean(0)[:-1]
    expected = (logits[0] / temperature).softmax(-1).double()
    torch.testing.assert_close(mean, expected, rtol=2e-3, atol=2e-5)


def test_a_label_that_is_kept_too_counts_once():
    """A cache lists it twice; the draw, of 0.3, stands for the rest, of 0.3."""
    mass = torch.tensor([[0.5, 0.2, 0.3, 0.5]])
    rows = TopKLogits(torch.tensor([[0, 2, 5, 0]]), mass.log(), 7, torch.tensor([0.3]).log())
    estimate = kept_tokens.estimated(ScoredLogits(rows, None), torch.tensor([1]))
    whole = estimate(torch.tensor([0])).exp()
    torch.testing.assert_close(whole, torch.tensor([[0.5, 0, 0.2, 0, 0, 0.3, 0, 0]]))


def test_draws_of_a_real_vocabulary_are_tokens_that_are_not_kept(real_table):
    order = kept_tokens.byte_order(real_table)
    logits = logits_of(40, len(real_table))
    logits[:20] *= 3  # rows with one or few likely tokens
    logits[0, 5] = 300  # float32 holds nothing beside this one
    labels = logits.topk(9).indices[:, 8]
    labels[10:] = 77
    uniform = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    uniform[:3] = torch.tensor([0.0, 1 - 2**-53, 0.0])
    kept = keep(logits, 64, labels, order, 1.0, uniform)
    for row, ids in enumerate(kept.scored.logits.ids_TK.tolist()):
        if row != 0:
            assert len(set(ids)) >= 60  # two intervals may draw the token between them
    rows = kept_tokens.estimated(kept.scored, kept.num_drawn_N)(torch.arange(40))
    p = logits.softmax(-1)
    torch.testing.assert_close(rows.logsumexp(-1), logits.logsumexp(-1))
    # all that begin with the same bytes: off by the intervals at both ends, at most
    q = rows.softmax(-1)[:, :-1]
    largest = (q - p).clamp(min=0).amax(-1)
    for begin in (b" ", b" t", b" the", b"e", b"S"):
        alike = [real_table.bytes_of(token).startswith(begin) for token in range(len(real_table))]
        error = (q - p)[:, torch.tensor(alike)].sum(-1).abs()
        assert (error <= 2 * largest + 1e-6).all()


def awkward_rows(width):
    """Return rows with one likely token, with many equal ones, and with tokens that never come."""
    rows = logits_of(12, width)
    rows[1] = rows[1].bfloat16().float()
    rows[2, 3] = 300  # float32 holds nothing beside this one
    rows[3, 5:] = -torch.inf
    rows[4] = 0
    rows[5, ::2] = -200
    rows[6] *= 30
    rows[7] = rows[7].sort().values
    rows[8, width // 2] = -1e30
    return rows


def check_rest(kept, logits_NW, labels_N, temperature):
    """Compare the mass of what is neither kept as it is nor the label with a sum in float64."""
    rows = kept.scored.logits
    for row, logits in enumerate(logits_NW.double()):
        num_kept = rows.ids_TK.shape[1] - 1 - int(kept.num_drawn_N[row])
        others = logits.clone()
        others[rows.ids_TK[row, :num_kept].long()] = -torch.inf
        others[labels_N[row]] = -torch.inf
        for rest_N, tau in ((rows.rest_T, temperature), (kept.plain_rest_N, 1.0)):
            expected = float((others / tau).logsumexp(-1) * tau - logits.logsumexp(-1))
            if expected > -80:  # masses below 1e-38 of the largest one are 0
                assert float(rest_N[row]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("num_entries", [1, 16, 256, 14_018, 20_000])
@pytest.mark.parametrize("draws", [False, True])
def test_what_is_known_of_awkward_rows(real_table, temperature, num_entries, draws):
    order = kept_tokens.byte_order(real_table)
    logits = awkward_rows(len(real_table))
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(len(real_table), (len(logits),), generator=generator)
    labels[9] = logits[9].argmax()
    uniform = torch.rand(len(logits), dtype=torch.float64, generator=generator) if draws else None
    kept = keep(logits, num_entries, labels, order, temperature, uniform)
    rows, scores = kept.scored.logits, kept.scored.scores
    logp = logits.double().log_softmax(-1)
    torch.testing.assert_close(rows.total_T, logits.double().logsumexp(-1).float())
    torch.testing.assert_close(scores.max_logp_T, logp.amax(-1).float(), atol=1e-6, rtol=1e-6)
    entropy = -torch.xlogy(logp.exp(), logp.exp()).sum(-1)
    torch.testing.assert_close(scores.entropy_T, entropy.float(), atol=2e-4, rtol=2e-6)
    is_first = order.ids_W[logits[:, order.ids_W].argmax(-1)] == labels
    assert torch.equal(scores.correct_T.bool(), is_first)
    check_rest(kept, logits, labels, temperature)
    source = kept_tokens.without_draws(kept.scored, kept.num_drawn_N)
    as_they_are = source(torch.arange(len(logits)))[:, :-1]
    is_kept = as_they_are > -torch.inf
    assert (is_kept.sum(1) <= rows.ids_TK.shape[1] - kept.num_drawn_N).all()
    label_N1 = labels[:, None]
    assert torch.equal(is_kept.gather(1, label_N1), logits.gather(1, label_N1) > -torch.inf)
    torch.testing.assert_close(as_they_are[is_kept], logits[is_kept], rtol=1e-5, atol=1e-4)


def test_a_row_that_is_no_distribution_says_nothing():
    order = kept_tokens.byte_order(table_of(SPELLED))
    logits = logits_of(4, len(SPELLED))
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    for uniform in (None, torch.full((4,), 0.3, dtype=torch.float64)):
        kept = keep(logits, 5, torch.arange(4), order, 1.0, uniform).scored
        assert kept.logits.logp_TK[:3].isnan().all()
        assert kept.scores.entropy_T[:3].isnan().all()
        assert kept.logits.logp_TK[3].isfinite().all()


def test_rows_of_another_vocabulary_are_refused():
    order = kept_tokens.byte_order(table_of(SPELLED))
    with pytest.raises(ValueError, match="20 logits of 19 tokens"):
        kept_tokens.keep_tokens(logits_of(2, 20), 5, torch.tensor([0, 1]), order)


def test_random_numbers_depend_on_the_seed_and_the_text_alone():
    numbers = kept_tokens.uniform_numbers(0, text_key("a"), 2000)
    assert torch.equal(numbers[:7], kept_tokens.uniform_numbers(0, text_key("a"), 7))
    assert not torch.equal(numbers, kept_tokens.uniform_numbers(1, text_key("a"), 2000))
    assert not torch.equal(numbers, kept_tokens.uniform_numbers(0, text_key("b"), 2000))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.03
    # of record: caches that go on in another version stay the same
    assert numbers[:2].tolist() == [0.2302312529265429, 0.5098834967949619]
