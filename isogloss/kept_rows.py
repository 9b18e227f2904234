"""Choose what a cache keeps of a row, compiled for a CPU: kept_tokens.py says what, and why.

torch makes some thirty passes over a row for it, this makes eight, most of them vectorized:

- Masses lie in the order of the tokens' bytes, so those that begin alike lie side by side.
- An entry that is not below the K-th of the largest entries of all combs is a candidate.  Only
  candidates are sorted, by their bits, which as integers have the order of positive numbers.
- Where a draw lies is found by sums of GROUPs; only the entries of one GROUP are added up singly.

What comes of a row depends on that row alone, equally relevant tokens included.

Shapes: N rows, W vocabulary, K entries.  Tests: tests/test_kept_tokens.py.
"""

from typing import NamedTuple

import numpy as np
import torch

from cpu_kernels import (
    BLOCK,
    as_written,
    elementwise,
    exp,
    f32,
    largest,
    over_rows,
    rows_at_once,
    summing,
    total,
)
from teacher_mixing import FLOOR

GROUP = 16  # entries; not tuned
COMBS = 64  # in a tile: eight vectors of AVX2
TILE = GROUP * COMBS  # entries, so a comb has as many as a GROUP
BITS = 8  # of a key that one pass of a sort looks at
NUM_BINS = 1 << BITS
FIRST_SHIFT = 23  # of the exponent of a float32, which is the first byte of a key behind its sign


LEAST_SHARE = 1e-12  # of all mass; what begins with rarer bytes is as relevant as what has this
LAST_POINT = 1 - 1e-12  # where the last draw may be, of all mass


class RowResults(NamedTuple):
    """Hold what is chosen of rows and known of them, as tensors or as arrays.

    place_NK: (N, K) int64, tokens by their places in byte order, the drawn ones last.
    logp_NK: (N, K) float32, their log-probabilities at temperature 1; of a drawn one the logarithm
        of what it stands for, of all mass.
    num_drawn_N: (N,) int32.
    total_N, entropy_N, max_logp_N: (N,) float32, of the whole row at temperature 1, in nats:
        logsumexp of the logits, entropy, log-probability of the most likely token.
    correct_N: (N,) bool, the label is that token.
    rest_N, plain_rest_N: (N,) float32, the log-probability of what is neither kept as it is nor the
        label, at the temperature and at 1.
    """

    place_NK: torch.Tensor
    logp_NK: torch.Tensor
    num_drawn_N: torch.Tensor
    total_N: torch.Tensor
    entropy_N: torch.Tensor
    max_logp_N: torch.Tensor
    correct_N: torch.Tensor
    rest_N: torch.Tensor
    plain_rest_N: torch.Tensor


def choose_rows(logits_NW, num_entries, labels_N, order, temperature, uniform_N):
    """Return the RowResults of some rows; see `kept_tokens.keep_tokens`.

    Args:
        logits_NW: float32 on the CPU, in byte order.
    Raises:
        ValueError: a label is no token, or the logits are not of the tokens of `order`.
    """
    num_rows, num_tokens = logits_NW.shape
    if num_tokens != len(order.ids_W):
        raise ValueError(f"{num_tokens} logits of {len(order.ids_W)} tokens")
    if num_rows and not 0 <= int(labels_N.min()) <= int(labels_N.max()) < num_tokens:
        raise ValueError(f"labels from {int(labels_N.min())} to {int(labels_N.max())}, of "
                         f"{num_tokens} tokens")
    kept = min(num_entries, num_tokens)
    result = RowResults(
        torch.empty(num_rows, kept, dtype=torch.long), torch.empty(num_rows, kept),
        torch.zeros(num_rows, dtype=torch.int), *(torch.empty(num_rows) for _ in range(3)),
        torch.empty(num_rows, dtype=torch.bool), torch.empty(num_rows), torch.empty(num_rows))
    draws = uniform_N is not None
    if not draws:
        uniform_N = torch.zeros(num_rows, dtype=torch.float64)
    size = rows_at_once(num_tokens)
    over_rows(
        _choose_rows, lambda: _new_scratch(num_tokens), -(-num_rows // size),
        size, logits_NW, order.place_W[labels_N], order.low_WP[labels_N], order.high_WP[labels_N],
        f32(1 / temperature), draws, uniform_N, result)
    return result


class Scratch(NamedTuple):
    """Hold the memory of one thread.

    mass, relevance: (W,) float32, in whole GROUPs, and 0 behind the last token.
    best: int32, bits of the largest relevance of each GROUP.
    mass_ends, relevance_ends: float64, sums up to the end of each GROUP.
    keys, places: candidates, and room to sort them: uint32 bits, which fall as relevance rises, and
        int32.
    bins: (NUM_BINS + 1,) int32.
    """

    mass: np.ndarray
    relevance: np.ndarray
    best: np.ndarray
    mass_ends: np.ndarray
    relevance_ends: np.ndarray
    keys: np.ndarray
    places: np.ndarray
    other_keys: np.ndarray
    other_places: np.ndarray
    bins: np.ndarray


def _new_scratch(num_tokens):
    """Return the Scratch for rows of so many tokens."""
    padded = -(-num_tokens // TILE) * TILE
    num_groups = padded // GROUP
    return Scratch(
        np.zeros(padded, f32), np.zeros(padded, f32), np.empty(num_groups, np.int32),
        np.empty(num_groups), np.empty(num_groups), np.empty(padded, np.uint32),
        np.empty(padded, np.int32), np.empty(padded, np.uint32), np.empty(padded, np.int32),
        np.empty(NUM_BINS + 1, np.int32))


@elementwise
def _choose_rows(
    b, scratch_fields, size, x, label, low, high, over_temperature, draws, uniform, result_fields
):
    """Compute `size` rows of `choose_rows`."""
    scratch = Scratch(*scratch_fields)
    result = RowResults(*result_fields)
    K = result.place_NK.shape[1]
    W = x.shape[1]
    mass = scratch.mass[:W]
    for n in range(b * size, min((b + 1) * size, len(x))):
        x_n = x[n]
        place = result.place_NK[n]
        best = largest(x_n)
        Z, spread = _masses(x_n, best, mass)
        if not Z > 0:  # NaN, or no token can come
            _set_nan(result, n)
            continue
        log_Z = np.log(Z)
        result.total_N[n] = best + log_Z
        result.entropy_N[n] = log_Z - spread / Z
        result.max_logp_N[n] = -log_Z
        result.correct_N[n] = _is_first(x_n, label[n], best)
        all_mass = Z
        if over_temperature != 1:
            all_mass = _softened(x_n, best, over_temperature, mass)
        _set_relevance(mass, all_mass, label[n], low[n], high[n], scratch.relevance)
        num_kept = _most_relevant(scratch, W, place)
        if draws:
            num_kept = _num_above(scratch, place, num_kept)
            result.num_drawn_N[n] = K - num_kept
        for k in range(num_kept):
            result.logp_NK[n, k] = x_n[place[k]] - result.total_N[n]
            mass[place[k]] = f32(0)
            scratch.relevance[place[k]] = f32(0)
        mass[label[n]] = f32(0)
        log_rest = np.log(total(mass))
        if num_kept < K:
            _draw(scratch, uniform[n], all_mass, place[num_kept:], result.logp_NK[n, num_kept:])
        result.rest_N[n] = log_rest / over_temperature - log_Z
        result.plain_rest_N[n] = result.rest_N[n]
        if over_temperature != 1:
            _masses(x_n, best, mass)
            for k in range(num_kept):
                mass[place[k]] = f32(0)
            mass[label[n]] = f32(0)
            result.plain_rest_N[n] = np.log(total(mass)) - log_Z


@as_written
def _set_nan(result, n):
    """Say nothing of a row that is no distribution."""
    for k in range(result.place_NK.shape[1]):
        result.place_NK[n, k] = k
        result.logp_NK[n, k] = np.nan
    result.total_N[n] = np.nan
    result.entropy_N[n] = np.nan
    result.max_logp_N[n] = np.nan
    result.correct_N[n] = False
    result.rest_N[n] = np.nan
    result.plain_rest_N[n] = np.nan


# --- masses ---------------------------------------------------------------------------------------


@elementwise
def _masses(x, best, out):
    """Write exp(x - best) into `out`; return (their sum, the sum of each times x - best)."""
    Z = 0.0
    spread = 0.0
    for start in range(0, len(x), BLOCK):
        x_block = x[start : start + BLOCK]
        block = out[start : start + BLOCK]
        for i in range(len(block)):
            block[i] = exp(x_block[i] - best)
        block_Z, block_spread = _moments(x_block, best, block)
        Z += block_Z
        spread += block_spread
    return Z, spread


@summing
def _moments(x, best, mass):
    """Return (the sum of masses, the sum of each times x - best).

    A loop that also wrote would be compiled twice, for memory that overlaps and for other memory,
    and its sums would depend on where the row lies.
    """
    Z = f32(0)
    spread = f32(0)
    for i in range(len(mass)):
        distance = x[i] - best
        # of -inf the mass is 0, and the product must be
        finite = f32(FLOOR) if distance < f32(FLOOR) else distance
        Z += mass[i]
        spread += mass[i] * finite
    return Z, spread


@elementwise
def _softened(x, best, over_temperature, out):
    """Write exp((x - best) / temperature) into `out`; return their sum."""
    for i in range(len(x)):
        out[i] = exp((x[i] - best) * over_temperature)
    return total(out)


@as_written
def _is_first(x, label, best):
    """Tell whether the label's logit is the first of the largest ones."""
    if x[label] != best:
        return False
    for i in range(label):
        if x[i] == best:
            return False
    return True


@elementwise
def _set_relevance(mass, all_mass, label, low, high, out):
    """Write the relevance of all tokens.

    Args:
        all_mass: the sum of the masses.
        low, high: (P,) where the tokens lie that begin with 1, 2, ... bytes of the label's; each
            range lies in the one before.
    """
    for i in range(len(mass)):
        out[i] = mass[i]
    num = 0
    while num < len(low) and high[num] > low[num]:
        num += 1
    # ranges from the inside out: what lies in one lies in all of those with fewer bytes
    of_range = 0.0
    factors = np.empty(len(low))
    inner_low = low[num - 1] if num else 0
    inner_high = inner_low
    for p in range(num - 1, -1, -1):
        of_range += total(mass[low[p] : inner_low]) + total(mass[inner_high : high[p]])
        inner_low = low[p]
        inner_high = high[p]
        factors[p] = all_mass / max(of_range, LEAST_SHARE * all_mass) / num
    factor = 1.0
    for p in range(num):
        factor += factors[p]
        end = low[p + 1] if p + 1 < num else high[p]
        _scale(mass[low[p] : end], f32(factor), out[low[p] : end])
        if p + 1 < num:
            _scale(mass[high[p + 1] : high[p]], f32(factor), out[high[p + 1] : high[p]])
    out[label] = f32(0)


@elementwise
def _scale(x, factor, out):
    """Write x times a factor into `out`."""
    for i in range(len(x)):
        out[i] = x[i] * factor


# --- the most relevant ones -----------------------------------------------------------------------


@as_written
def _most_relevant(scratch, num_tokens, place):
    """Write the places of the K most relevant tokens, in falling order; return K."""
    K = len(place)
    bits = scratch.relevance.view(np.int32)
    best = scratch.best
    _largest_of_combs(bits, best)
    least = _at_most(best, K, scratch.bins)
    places = scratch.places
    combs = scratch.other_places
    # without branches, which would be taken at random
    num_combs = 0
    for comb in range(len(best)):
        combs[num_combs] = comb
        num_combs += best[comb] >= least
    count = 0
    for n in range(num_combs):
        tile, tooth = divmod(np.uint32(combs[n]), np.uint32(COMBS))
        first = tile * np.uint32(TILE) + tooth
        for i in range(first, first + TILE, COMBS):
            places[count] = i
            count += (bits[i] >= least) & (i < num_tokens)
    for n in range(count):
        scratch.keys[n] = ~np.uint32(bits[places[n]])
    _sort(scratch, count)
    for k in range(K):
        place[k] = places[k]
    return K


@elementwise
def _largest_of_combs(bits, out):
    """Write the largest of each comb, in whole vectors."""
    for tile in range(len(bits) // TILE):
        x = bits[tile * TILE : (tile + 1) * TILE]
        top = out[tile * COMBS : (tile + 1) * COMBS]
        top[:] = x[:COMBS]
        for start in range(COMBS, TILE, COMBS):
            row = x[start : start + COMBS]
            for i in range(COMBS):
                top[i] = row[i] if row[i] > top[i] else top[i]


@as_written
def _at_most(bits, k, bins):
    """Return what is at most the k-th largest of some bits, and near it; 0 if there are not k."""
    if len(bits) < k:
        return np.int32(0)
    prefix = np.int32(0)
    for shift in (FIRST_SHIFT, FIRST_SHIFT - BITS):
        bins[:] = 0
        for value in bits:
            if value >> (shift + BITS) == prefix >> (shift + BITS):
                bins[(value >> shift) & (NUM_BINS - 1)] += 1
        digit = NUM_BINS - 1
        while bins[digit] < k:
            k -= bins[digit]
            digit -= 1
        prefix |= np.int32(digit << shift)
    return prefix


@as_written
def _sort(scratch, count):
    """Sort the candidates: keys rise, and the first ones of equal keys stay first."""
    keys = scratch.keys
    places = scratch.places
    other_keys = scratch.other_keys
    other_places = scratch.other_places
    bins = scratch.bins
    for shift in range(0, 32, BITS):
        bins[:] = 0
        for i in range(count):
            bins[1 + ((keys[i] >> np.uint32(shift)) & np.uint32(NUM_BINS - 1))] += 1
        for digit in range(NUM_BINS):
            bins[digit + 1] += bins[digit]
        for i in range(count):
            digit = (keys[i] >> np.uint32(shift)) & np.uint32(NUM_BINS - 1)
            to = bins[digit]
            bins[digit] += 1
            other_keys[to] = keys[i]
            other_places[to] = places[i]
        keys, other_keys = other_keys, keys
        places, other_places = other_places, places


# --- draws ----------------------------------------------------------------------------------------


@as_written
def _num_above(scratch, place, num):
    """Return how many of the most relevant tokens are more relevant than an interval."""
    left = _exact_total(scratch.relevance)
    for k in range(num):
        relevance = np.float64(scratch.relevance[place[k]])
        if relevance > 0 and relevance * (num - k) < LAST_POINT * left:
            return k
        left -= relevance
    return num


@summing
def _exact_total(x):
    """Return the sum of x in float64, of which the largest ones may be taken away."""
    result = 0.0
    for i in range(len(x)):
        result += np.float64(x[i])
    return result


@as_written
def _draw(scratch, uniform, all_mass, place, log_share):
    """Draw a token from each of len(place) intervals, and write the logarithm of its share.

    The masses and relevances of tokens that are not drawn are 0.
    """
    mass = scratch.mass
    relevance = scratch.relevance
    mass_ends = scratch.mass_ends
    relevance_ends = scratch.relevance_ends
    _sums_of_groups(mass.reshape(-1, GROUP), mass_ends)
    _sums_of_groups(relevance.reshape(-1, GROUP), relevance_ends)
    num = len(place)
    share = np.empty(num)
    low = 0.0
    cut_group = 0
    group = 0
    last = LAST_POINT * mass_ends[-1]
    for k in range(num):
        high = mass_ends[-1]
        if k + 1 < num:
            cut = (k + 1) / num * relevance_ends[-1]
            while relevance_ends[cut_group] < cut:
                cut_group += 1
            high = _mass_before(mass, mass_ends, relevance, relevance_ends, cut_group, cut)
        interval = max(high - low, 0.0)
        point = min(low + uniform * interval, last)
        while mass_ends[group] <= point:
            group += 1
        place[k] = _token_at(mass, mass_ends, group, point)
        share[k] = interval / all_mass
        low = high
    _join(place, share)
    for k in range(num):
        log_share[k] = np.log(share[k])


@summing
def _sums_of_groups(x, ends):
    """Write the sum of x, (W / GROUP, GROUP), up to the end of each GROUP."""
    for group in range(len(ends)):
        of_group = 0.0
        for i in range(GROUP):
            of_group += np.float64(x[group, i])
        ends[group] = of_group
    for group in range(1, len(ends)):
        ends[group] += ends[group - 1]


@as_written
def _mass_before(mass, mass_ends, relevance, relevance_ends, group, cut):
    """Return the mass before a point of a GROUP, at which the sum of relevances is `cut`."""
    before = relevance_ends[group - 1] if group else 0.0
    mass_before = mass_ends[group - 1] if group else 0.0
    for i in range(group * GROUP, (group + 1) * GROUP):
        if before + relevance[i] >= cut and relevance[i] > 0:
            return mass_before + max(cut - before, 0.0) / relevance[i] * mass[i]
        before += relevance[i]
        mass_before += mass[i]
    return mass_ends[group]  # rounding


@as_written
def _token_at(mass, ends, group, point):
    """Return the token of a GROUP in which a point of the mass lies."""
    before = ends[group - 1] if group else 0.0
    token = group * GROUP
    for i in range(group * GROUP, (group + 1) * GROUP):
        if mass[i] > 0:
            token = i
            before += mass[i]
            if before > point:
                break
    return token


@as_written
def _join(place, share):
    """Give each of the intervals that draw the same token the share of all of them."""
    first = 0
    for k in range(1, len(place) + 1):
        if k < len(place) and place[k] == place[first]:
            share[first] += share[k]
            continue
        for same in range(first + 1, k):
            share[same] = share[first]
        first = k
