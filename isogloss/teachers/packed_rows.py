"""Write kept tokens in about one byte each: ids by gaps, probabilities in steps, both by zlib.

A token's probability is rounded to steps of 2 ** -shift / STEPS, where 2 ** shift is about by how
much the token is more relevant than its probability says (kept_tokens.py): so rare tokens that
begin as the text's own does are as exact as frequent ones are.  What rounds to nothing joins the
rest.  Tokens stand in the order of how often a shard keeps them, so that the gaps between the
places of those that a position keeps are small numbers; zlib gives the frequent ones few bits.

Shapes: N positions, K entries, W vocabulary.  Tests: tests/test_cache_files.py.
"""

import zlib

import numpy as np
import torch

STEPS = 2**14  # of probability 1; docs/teachers.md says what they change
EXTRA = 2  # weight of what a token is relevant beyond its probability; docs/teachers.md, too
SHIFTED = 24  # bits of the number of steps, below the shift
MOST_NUMBERS = 2**26  # of a text, 256 each of 262,144 positions: a few bytes may stand for far more


def steps_of(logp_NK, factor_NK):
    """Return (N, K) int64 numbers of steps and shifts; 0: the token is left to the rest.

    Args:
        factor_NK: relevance of each over its probability, 1 or more.
    """
    shift_NK = (1 + EXTRA * (factor_NK - 1)).log2().floor().long()
    steps_NK = (logp_NK.double().exp() * STEPS * 2.0**shift_NK).round().long()
    return torch.where(steps_NK > 0, steps_NK + (shift_NK << SHIFTED), 0)


def logp_of(steps):
    """Return the log-probabilities of an int64 array of what `steps_of` made.

    Small ones are more frequent, in proportion to 1 / p: so of all that round to n steps the mean
    is below n, 0.91 of one step.
    """
    twice = 2 * (steps & 2**SHIFTED - 1).astype(np.float32)
    shift = (steps >> SHIFTED).astype(np.float32)
    return -np.log(np.log1p(2 / (twice - 1)) * STEPS) - shift * np.float32(np.log(2))


def order_of_use(ids_NK, steps_NK, vocab):
    """Return (W,) int32 ids, those that positions keep most often first."""
    counts_W = np.bincount(ids_NK[steps_NK > 0].numpy(), minlength=vocab)
    return torch.from_numpy(np.argsort(-counts_W, kind="stable").astype(np.int32))


def pack(ids_NK, steps_NK, order_W):
    """Return the kept tokens of a text as uint8 bytes."""
    place_W = np.empty(len(order_W), np.int64)
    place_W[order_W.numpy()] = np.arange(len(order_W))
    row, entry = np.nonzero(steps_NK.numpy())
    places = row * len(order_W) + place_W[ids_NK.numpy()[row, entry]]
    by_place = np.argsort(places)
    steps = steps_NK.numpy()[row, entry][by_place]
    packed = _squeezed(np.diff(places[by_place], prepend=0)) + _squeezed(steps)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack(packed, order_W, num_positions, num_entries, num_wanted=None):
    """Return (N, K) int32 ids and float32 log-probabilities of what `pack` made.

    Entries that are free have the id -1.

    Args:
        num_wanted: N, the first ones of all positions of the text; None: all.
    Raises:
        ValueError, zlib.error: it made something else.
    """
    most = min(num_positions * num_entries, MOST_NUMBERS)
    gaps, left = _unsqueezed(packed.numpy().tobytes(), most)
    steps, _ = _unsqueezed(left, most)
    row, place = np.divmod(gaps.cumsum(), len(order_W))
    if len(steps) != len(gaps) or (len(row) and row[-1] >= num_positions):
        raise ValueError("packed tokens of other positions")
    counts_N = np.bincount(row, minlength=num_positions)
    entry = np.arange(len(row)) - np.repeat(counts_N.cumsum() - counts_N, counts_N)
    if (entry >= num_entries).any():
        raise ValueError(f"more than {num_entries} packed tokens of a position")
    shape = num_positions if num_wanted is None else num_wanted, num_entries
    ids_NK = np.full(shape, -1, np.int32)
    logp_NK = np.full(shape, -np.inf, np.float32)
    is_wanted = row < shape[0]
    cells = row[is_wanted], entry[is_wanted]
    ids_NK[cells] = order_W.numpy()[place[is_wanted]]
    logp_NK[cells] = logp_of(steps[is_wanted])
    return torch.from_numpy(ids_NK), torch.from_numpy(logp_NK)


def _squeezed(numbers):
    """Return numbers below 2 ** 32 as bytes: the lowest ones of all, then the second ones, ..."""
    planes = numbers.astype("<u4").view(np.uint8).reshape(-1, 4).T
    # by runs, of zeros in the highest bytes; longer matches would be by chance
    stream = zlib.compressobj(9, strategy=zlib.Z_RLE)
    return stream.compress(planes.tobytes()) + stream.flush()


def _unsqueezed(squeezed, most):
    """Return at most so many int64 numbers, and the bytes behind them."""
    stream = zlib.decompressobj()
    planes = np.frombuffer(stream.decompress(squeezed, 4 * most + 1), np.uint8)
    if not stream.eof:
        raise ValueError(f"more than {most} packed numbers, or they are cut off")
    planes = planes.reshape(4, -1)
    return np.ascontiguousarray(planes.T).view("<u4")[:, 0].astype(np.int64), stream.unused_data
