"""Choose what a cache keeps of a teacher's row: K tokens beside the text's own.

A loss between two tokenizers asks of a row two kinds of questions: which of all tokens comes, and,
where the student writes the text's own token in several pieces, which of those tokens comes that
begin with the first bytes of it.  An unlikely text has such tokens among the least likely ones.  So
a token's relevance is its mass, and beside it the mean, over the beginnings of the text's own
token, of its share among the tokens that begin so.  Kept are the K most relevant tokens; or fewer,
and draws that stand for all others, such that the expectation of every token's mass is its mass:

- With j tokens kept as they are, the others lie end to end in the order of their bytes and are cut
  into K - j intervals of equal relevance.  One token is drawn from each, in proportion to mass, and
  stands for the mass of the interval.  So every row sums to 1, and the mass of all that begin with
  the same bytes is off by that of the intervals at its two ends, whatever the student's tokenizer.
- j is the smallest number for which no token is more relevant than an interval.
- One random number of a row says where in each interval the draw is.

Random sampling for cached teachers: arXiv:2503.16870, which draws with replacement and in
proportion to powers of the mass.

Shapes: N positions, W vocabulary, K entries, P beginnings of a token.
Tests: tests/test_kept_tokens.py.
"""

from typing import NamedTuple

import numpy as np
import torch

from isogloss.teachers.text_scores import ScoredLogits, scores_of_rows
from isogloss.tiles import TopKLogits

MOST_BEGINNINGS = 16  # bytes; few tokens are longer and have others that begin so; not tuned
LEAST_SHARE = 1e-12  # of all mass; what begins with rarer bytes is as relevant as what has this
LAST_POINT = 1 - 1e-12  # where the last draw may be, of all mass

# --- tokens by their bytes ------------------------------------------------------------------------


class ByteOrder(NamedTuple):
    """Hold tokens in the order of their bytes.

    ids_W: (W,) int64, the tokens in this order; place_W: (W,) int64, where each is.
    low_WP, high_WP: (W, P) int64; the tokens that begin with the same p + 1 bytes as w does are
        ``ids_W[low_WP[w, p]:high_WP[w, p]]``; none: w has not so many bytes.
    """

    ids_W: torch.Tensor
    place_W: torch.Tensor
    low_WP: torch.Tensor
    high_WP: torch.Tensor

    def to(self, device):
        return ByteOrder(*(value.to(device) for value in self))


def byte_order(table):
    spelled = [table.bytes_of(token) for token in range(len(table))]
    ids_W = np.array(sorted(range(len(table)), key=lambda token: (spelled[token], token)))
    place_W = np.argsort(ids_W)
    in_order = [spelled[token] for token in ids_W]
    common_W = np.array([0, *map(num_common, in_order, in_order[1:])])
    length_W = np.array([len(token) for token in spelled])
    low_WP = np.zeros((len(table), MOST_BEGINNINGS), np.int64)
    high_WP = np.zeros_like(low_WP)
    for p in range(MOST_BEGINNINGS):
        starts = np.flatnonzero(common_W <= p)
        group_W = np.searchsorted(starts, place_W, side="right")
        has_byte = length_W > p
        low_WP[has_byte, p] = starts[group_W - 1][has_byte]
        high_WP[has_byte, p] = np.append(starts, len(table))[group_W][has_byte]
    return ByteOrder(*map(torch.from_numpy, (ids_W, place_W, low_WP, high_WP)))


def num_common(token, other):
    """Return how many bytes two tokens begin with together, MOST_BEGINNINGS at most."""
    num = 0
    for byte, other_byte in zip(token[:MOST_BEGINNINGS], other):
        if byte != other_byte:
            break
        num += 1
    return num


# --- what is kept ---------------------------------------------------------------------------------


class KeptRows(NamedTuple):
    """Hold rows of which K tokens are kept.

    scored: ScoredLogits; the K tokens, then the label.  Of tokens that were drawn, the last ones
        before the label, the log-probability is an estimate at the temperature of the draws (see
        `estimated`).  The rest is the mass of all that is not kept as it is.
    plain_rest_N: (N,) log-probability of the rest at temperature 1.
    num_drawn_N: (N,) int32.
    factor_NK: (N, K) relevance of each of the K tokens over its mass; 1 or more.
    """

    scored: ScoredLogits
    plain_rest_N: torch.Tensor
    num_drawn_N: torch.Tensor
    factor_NK: torch.Tensor


def keep_tokens(logits_NW, num_entries, labels_N, order, temperature=1.0, uniform_N=None):
    """Return the KeptRows of some rows.

    Args:
        logits_NW: float32, in byte order: column i is token ``order.ids_W[i]``.
        num_entries: K, or more than all tokens.
        labels_N: (N,) int64, the text's own tokens.
        order: ByteOrder.
        temperature: by which the loss will divide: masses are exp(logits / temperature).
        uniform_N: (N,) float64 in [0, 1), one random number of each row; None: draw nothing.
    """
    if logits_NW.shape[1] != len(order.ids_W):
        raise ValueError(f"{logits_NW.shape[1]} logits of {len(order.ids_W)} tokens")
    best_N, likeliest_N = logits_NW.max(-1)
    label_place_N = order.place_W[labels_N]
    whole = scores_of_rows(logits_NW, best_N, label_place_N, likeliest_N == label_place_N)
    mass_NW = whole.mass_NW
    if temperature != 1:
        mass_NW = ((logits_NW - best_N[:, None]) / temperature).exp_()
    # draws write over it
    of_draws_NW = mass_NW if uniform_N is None else mass_NW.clone()
    choice = choose(of_draws_NW, num_entries, labels_N, order, uniform_N)
    label_N1 = label_place_N[:, None]
    no_rest_NK = torch.where(choice.is_drawn_NK, label_N1, choice.place_NK)
    no_rest_NK = torch.cat([no_rest_NK, label_N1], 1)
    plain_rest_N = whole.rest(logits_NW, no_rest_NK, 1.0)
    rest_N = plain_rest_N
    if temperature != 1:
        rest_N = whole.rest(logits_NW, no_rest_NK, temperature)
    logp_NK = logits_NW.gather(1, choice.place_NK) - whole.total_N[:, None]
    logp_NK = torch.where(choice.is_drawn_NK, choice.share_NK.log(), logp_NK)
    label_logp_N1 = logits_NW.gather(1, label_N1) - whole.total_N[:, None]
    ids_NK = torch.cat([order.ids_W[choice.place_NK], labels_N[:, None]], 1).int()
    rows = TopKLogits(ids_NK, torch.cat([logp_NK, label_logp_N1], 1), logits_NW.shape[1], rest_N,
                      whole.total_N)
    num_drawn_N = choice.is_drawn_NK.sum(-1).int()
    return KeptRows(ScoredLogits(rows, whole.scores), plain_rest_N, num_drawn_N, choice.factor_NK)


class Choice(NamedTuple):
    """Name the tokens of K entries by their places in byte order.

    place_NK: (N, K) int64; is_drawn_NK: (N, K) bool, the last ones of a row.
    share_NK: (N, K) float32, what a drawn one stands for, of all mass.
    factor_NK: see KeptRows; of those that are not drawn.
    """

    place_NK: torch.Tensor
    is_drawn_NK: torch.Tensor
    share_NK: torch.Tensor
    factor_NK: torch.Tensor


def choose(mass_NW, num_entries, labels_N, order, uniform_N):
    """Return the Choice of rows, of which the masses are in byte order and may be written over."""
    relevance_NW = relevance_of_mass(mass_NW, labels_N, order).mul_(mass_NW)
    label_N1 = order.place_W[labels_N][:, None]
    relevance_NW.scatter_(1, label_N1, 0)
    top_NK, place_NK = relevance_NW.topk(min(num_entries, relevance_NW.shape[1]))
    factor_NK = (top_NK / mass_NW.gather(1, place_NK)).nan_to_num_(1.0).clamp_(min=1)
    if uniform_N is None:
        nothing_NK = torch.zeros_like(top_NK)
        return Choice(place_NK, nothing_NK.bool(), nothing_NK, factor_NK)
    is_drawn_NK = is_to_be_drawn(top_NK, relevance_NW)
    total_N1 = mass_NW.sum(-1, keepdim=True, dtype=torch.float64)
    for of_tokens_NW in (mass_NW, relevance_NW):
        of_tokens_NW.scatter_(1, torch.where(is_drawn_NK, label_N1, place_NK), 0)
        of_tokens_NW.scatter_(1, label_N1, 0)
    drawn_NK, of_draw_NK = draw(mass_NW, relevance_NW, is_drawn_NK, uniform_N)
    place_NK = torch.where(is_drawn_NK, drawn_NK, place_NK)
    return Choice(place_NK, is_drawn_NK, (of_draw_NK / total_N1).float(), factor_NK)


def relevance_of_mass(mass_NW, labels_N, order):
    """Return (N, W) float32 by which the masses of tokens, in byte order, are relevant."""
    low_NP = order.low_WP[labels_N]
    high_NP = order.high_WP[labels_N]
    num_rows, num_tokens = mass_NW.shape
    ends_NW = mass_NW.new_zeros(num_rows, num_tokens + 1, dtype=torch.float64)
    ends_NW[:, 1:] = mass_NW
    ends_NW.cumsum_(-1)
    total_N1 = ends_NW[:, -1:].clone()
    of_beginning_NP = ends_NW.gather(1, high_NP) - ends_NW.gather(1, low_NP)
    label_N1 = mass_NW.gather(1, order.place_W[labels_N][:, None])
    # rounding may leave nothing of a difference
    of_beginning_NP = torch.maximum(of_beginning_NP, label_N1)
    of_beginning_NP = torch.maximum(of_beginning_NP, LEAST_SHARE * total_N1)
    is_there_NP = high_NP > low_NP
    num_N1 = is_there_NP.sum(-1, keepdim=True).clamp(min=1)
    factor_NP = total_N1 / of_beginning_NP / num_N1 * is_there_NP
    steps_NW = ends_NW.zero_().scatter_add_(1, low_NP, factor_NP)
    steps_NW.scatter_add_(1, high_NP, -factor_NP)
    return steps_NW.cumsum_(-1)[:, :-1].float().clamp_(min=0).add_(1)


def is_to_be_drawn(top_NK, relevance_NW):
    """Return (N, K) bool: which entries are for draws, the last ones of each row.

    Args:
        top_NK: the largest relevances, in falling order.
    """
    top_NK = top_NK.double()
    K = top_NK.shape[1]
    total_N1 = relevance_NW.sum(-1, keepdim=True, dtype=torch.float64)
    before_NK = top_NK.cumsum(-1) - top_NK
    draws_K = torch.arange(K, 0, -1, device=top_NK.device)
    # in falling order, so that the first ones are above
    is_above_NK = top_NK * draws_K >= LAST_POINT * (total_N1 - before_NK)
    return ~(is_above_NK | (top_NK == 0))


def draw(mass_NW, relevance_NW, is_drawn_NK, uniform_N):
    """Draw a token from each of some intervals of equal relevance, in proportion to mass.

    Args:
        mass_NW, relevance_NW: of the tokens that may be drawn, else 0.
        is_drawn_NK: the entries of each row that are for draws, its last ones.
    Returns:
        (N, K) int64 what is drawn, (N, K) float64 the mass that it stands for, in entries for
        draws; a token that two intervals share has both where both draw it.
    """
    num_N1 = is_drawn_NK.sum(-1, keepdim=True)
    K = is_drawn_NK.shape[1]
    first_N1 = K - num_N1
    cut_NK1 = (torch.arange(K + 1, device=num_N1.device) - first_N1) / num_N1.clamp(min=1)
    ends_NW = relevance_NW.double().cumsum_(-1)
    cut_NK1 = cut_NK1.clamp(0, 1) * ends_NW[:, -1:]
    # the tokens that are cut, and how much of each lies before
    token_NK1 = torch.searchsorted(ends_NW, cut_NK1).clamp(max=ends_NW.shape[1] - 1)
    size_NK1 = relevance_NW.gather(1, token_NK1).double()
    behind_NK1 = (ends_NW.gather(1, token_NK1) - cut_NK1) / size_NK1
    behind_NK1 = torch.where(size_NK1 > 0, behind_NK1, 0).clamp(0, 1)
    ends_NW = mass_NW.double().cumsum_(-1)
    bound_NK1 = ends_NW.gather(1, token_NK1) - behind_NK1 * mass_NW.gather(1, token_NK1)
    interval_NK = bound_NK1.diff().clamp(min=0)
    point_NK = bound_NK1[:, :-1] + uniform_N[:, None] * interval_NK
    # rounding could put the last one behind all tokens
    point_NK = torch.minimum(point_NK, LAST_POINT * ends_NW[:, -1:])
    drawn_NK = torch.searchsorted(ends_NW, point_NK, right=True).clamp(max=ends_NW.shape[1] - 1)
    of_token_NW = ends_NW.zero_().scatter_add_(1, drawn_NK, interval_NK)
    return drawn_NK, of_token_NW.gather(1, drawn_NK)


def uniform_numbers(seed, key, num):
    """Return (num,) float64 in [0, 1), which depend on the seed and a text's key alone.

    Args:
        key: (2,) int64, see `text_keys.text_key`.
    """
    words = [seed, *key.view(np.uint64).tolist()]
    stream = np.random.Philox(np.random.SeedSequence(words))
    return torch.from_numpy((stream.random_raw(num) >> 11) * 2.0**-53)


# --- what a loss reads ----------------------------------------------------------------------------


def drawn_entries(logp_NK, num_drawn_N):
    """Return (N, K + 1) bool: which entries of rows, the last of which is the label, were drawn."""
    num_entries = logp_NK.shape[1] - 1
    slot_K = torch.arange(num_entries + 1, device=num_drawn_N.device)
    return (slot_K >= num_entries - num_drawn_N[:, None]) & (slot_K < num_entries)


def without_draws(scored, num_drawn_N):
    """Return the ScoredLogits of the tokens that are kept as they are, all others as the rest."""
    is_drawn_NK = drawn_entries(scored.logits.logp_TK, num_drawn_N)
    logp_NK = scored.logits.logp_TK.masked_fill(is_drawn_NK, -torch.inf)
    return ScoredLogits(scored.logits._replace(logp_TK=logp_NK), scored.scores)


def estimated(scored, num_drawn_N, temperature=1.0):
    """Return the ScoredLogits in which draws stand for the rest.

    Softened by the temperature, the expectation of every token's probability is its probability.

    Args:
        scored, num_drawn_N: of KeptRows, or what a cache holds of it; the label's entry may repeat
            a token that is kept.
        temperature: of the draws.
    """
    logits = scored.logits
    is_drawn_NK = drawn_entries(logits.logp_TK, num_drawn_N)
    is_repeated_NK = logits.ids_TK == logits.ids_TK[:, -1:]
    is_repeated_NK[:, -1] = False
    kept_NK = logits.logp_TK.masked_fill(is_drawn_NK | is_repeated_NK, -torch.inf)
    kept_NK = torch.cat([kept_NK, logits.rest_T[:, None]], 1)
    total_N = (kept_NK / temperature).logsumexp(-1)
    drawn_NK = (logits.logp_TK + total_N[:, None]) * temperature
    logp_NK = torch.where(is_drawn_NK, drawn_NK, logits.logp_TK)
    rest_N = logits.rest_T.masked_fill(num_drawn_N > 0, -torch.inf)
    return ScoredLogits(logits._replace(logp_TK=logp_NK, rest_T=rest_N), scored.scores)
