"""Align two token sequences whose texts differ, by dynamic programming over canonical token strings.

`align.align` needs two tokenizations of one text.  Where the two sides were rendered differently (other
templates, other spaces, words inserted or left out), `align_dp` finds what they have in common.  It returns
the same `Alignment`.  Needs numpy, numba and align.py; copy both.  Tests: tests/test_align_dp.py.

Shapes: S student tokens, T teacher tokens, C chunks.
"""

import numpy as np
from numba import njit

from align import Alignment, _padding, checked_ids


def align_dp(student_ids, teacher_ids, student_table, teacher_table, max_combination=4, band=48, anchor=24):
    """Align two token sequences whose texts differ in places, by dynamic programming.

    Tokens are compared in canonical form: control tokens by role (bos, eos, pad, unk, end of turn) or by
    name; CR LF is LF; a run of spaces and tabs, over tokens too, is one space.  Moves: one token with one
    token; one with 2 to max_combination of the other side; a gap on either side.  A match of n canonical
    bytes scores 64 n + 1, a gap 0, so most text is matched first and more chunks are preferred second; ties
    go to 1:1, then 1:k and k:1 with the smallest k, then a gap of the student.  Afterwards M:N windows of
    equal bytes are cut out of what is left in the gaps.

    The search runs between anchors (canonical n-grams that start at tokens and are unique on both sides, in
    their longest common order) and within a band around the straight line between two anchors, so the time is
    linear in the tokens, whatever the text.  Padding at the end is never looked at.

    Args:
        student_ids, teacher_ids: (S,) and (T,) ints.
        max_combination: most tokens of one side that may match one of the other, 1 or more.
        band: half the width of the band, tokens.
        anchor: bytes of an anchor.
    Returns:
        Alignment, with spans in the student's own bytes and control tokens that are matched as chunks; what
        of these bytes is not matched is dropped as "normalized".
    """
    rows, forms = [], []
    for ids, table in ((student_ids, student_table), (teacher_ids, teacher_table)):
        ids = checked_ids(ids, table)
        rows.append(ids[_padding(ids, table) == 0])
        forms.append(_canonical_row(rows[-1], table))
    (s_data, s_starts), (t_data, t_starts) = forms
    pairs = _anchors(s_data, s_starts, t_data, t_starts, anchor)
    s_chunk, t_chunk = np.full(len(student_ids), -1), np.full(len(teacher_ids), -1)
    count, at = 0, (0, 0)
    for stop in [*pairs, (len(rows[0]), len(rows[1]))]:
        count = _dp(s_data, s_starts, t_data, t_starts, *at, *stop, max_combination, band, count,
                    s_chunk, t_chunk)
        at = stop
    return _describe(rows, (student_table, teacher_table), s_chunk, t_chunk, count)


def _canonical_row(ids, table):
    """(data, starts): the canonical form of every token of a row."""
    names = {getattr(table, role): role for role in ("end_of_turn", "unk", "pad", "eos", "bos")}
    control = [i for i in np.unique(ids).tolist() if table.special[i]]
    names = {i: f"<{names.get(i, table.tokens[i])}>".encode() for i in control}
    used = np.array(sorted(names), np.int64)
    data = np.frombuffer(b"".join(names[i] for i in used), np.uint8)
    starts = np.cumsum([0, *(len(names[i]) for i in used)])
    return _canonical(ids, table.data, table.starts, table.special, used, data, starts)


@njit(cache=True)
def _canonical(ids, data, starts, special, used, names, name_starts):
    total = 0
    for i in ids:
        k = np.searchsorted(used, i)
        total += name_starts[k + 1] - name_starts[k] + 1 if special[i] else starts[i + 1] - starts[i]
    out, out_starts, at, last = np.empty(total, np.uint8), np.zeros(len(ids) + 1, np.int64), 0, 0
    for n, i in enumerate(ids):
        if special[i]:
            k = np.searchsorted(used, i)
            out[at], at, last = 255, at + 1, 255  # a byte that no text holds
            for b in range(name_starts[k], name_starts[k + 1]):
                out[at], at = names[b], at + 1
        else:
            for b in range(starts[i], starts[i + 1]):
                byte = 32 if data[b] == 9 else data[b]
                if byte == 32 and last == 32:
                    continue
                if byte == 10 and last == 13:
                    at -= 1  # the CR goes; where it was a token of its own, that token is left empty
                    out_starts[n] = min(out_starts[n], at)
                out[at], at, last = byte, at + 1, byte
        out_starts[n + 1] = at
    return out[:at], out_starts


def _anchors(s_data, s_starts, t_data, t_starts, size):
    """[(student token, teacher token)], rising: both begin the same n-gram, found once on either side."""
    hashes = []
    for data, starts in ((s_data, s_starts), (t_data, t_starts)):
        where = np.flatnonzero((starts[:-1] + size <= len(data)) & (starts[1:] > starts[:-1]))
        hashes.append((_hash(data, starts[where], size), where))
    once = []
    for values, where in hashes:
        found, first, times = np.unique(values, return_index=True, return_counts=True)
        once.append((found[times == 1], where[first[times == 1]]))
    _, a, b = np.intersect1d(once[0][0], once[1][0], assume_unique=True, return_indices=True)
    i, j = once[0][1][a], once[1][1][b]
    order = np.argsort(i)
    i, j = i[order], j[order]
    return [(int(i[k]), int(j[k])) for k in _longest_rise(j)]


@njit(cache=True)
def _hash(data, places, size):
    out = np.empty(len(places), np.int64)
    for n, place in enumerate(places):
        value = np.int64(1469598103934665603)
        for b in data[place : place + size]:
            value = (value ^ b) * np.int64(1099511628211)  # FNV-1a
        out[n] = value
    return out


@njit(cache=True)
def _longest_rise(values):
    """Indices of a longest strictly rising subsequence."""
    n = len(values)
    tails, before, size = np.empty(n, np.int64), np.full(n, -1), 0
    for k in range(n):
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            if values[tails[middle]] < values[k]:
                low = middle + 1
            else:
                high = middle
        before[k] = tails[low - 1] if low else -1
        tails[low] = k
        size = max(size, low + 1)
    out, k = np.empty(size, np.int64), tails[size - 1] if size else -1
    for place in range(size - 1, -1, -1):
        out[place], k = k, before[k]
    return out


@njit(cache=True)
def _equal(s_data, s, s_stop, t_data, t, t_stop):
    if s_stop - s != t_stop - t or s == s_stop:
        return False
    for k in range(s_stop - s):
        if s_data[s + k] != t_data[t + k]:
            return False
    return True


@njit(cache=True)
def _dp(s_data, s_starts, t_data, t_starts, i0, j0, i1, j1, most, band, count, s_chunk, t_chunk):
    """Fill in the chunks of student tokens i0..i1-1 and teacher tokens j0..j1-1; the new count of chunks."""
    n, m = i1 - i0, j1 - j0
    width = min(2 * band, m) + 1
    score = np.full((n + 1, width), -1)
    move = np.zeros((n + 1, width), np.int8)  # k > 0: k:1; k < -1: 1:-k; 100, 101: gap of student, teacher
    first = np.empty(n + 1, np.int64)  # teacher token of column 0
    for i in range(n + 1):
        first[i] = max(0, min(m + 1 - width, i * m // max(n, 1) - band))
    if n == 0 or m == 0:
        return count
    for i in range(n + 1):
        for c in range(width):
            j = first[i] + c
            best, how = (0, 0) if i == 0 and j == 0 else (-1, 0)
            for k in range(1, most + 1):  # 1:1, then 1:k and k:1
                for turn in range(2 if k > 1 else 1):
                    a, b = (1, k) if turn == 0 else (k, 1)
                    if a > i or b > j:
                        continue
                    d = j - b - first[i - a]
                    if d < 0 or d >= width or score[i - a, d] < 0:
                        continue
                    s, s_stop = s_starts[i0 + i - a], s_starts[i0 + i]
                    gain = score[i - a, d] + 64 * (s_stop - s) + 1
                    t, t_stop = t_starts[j0 + j - b], t_starts[j0 + j]
                    if gain > best and _equal(s_data, s, s_stop, t_data, t, t_stop):
                        best, how = gain, -k if turn == 0 and k > 1 else k
            if i > 0:
                d = j - first[i - 1]
                if 0 <= d < width and score[i - 1, d] > best:
                    best, how = score[i - 1, d], 100
            if c > 0 and score[i, c - 1] > best:
                best, how = score[i, c - 1], 101
            score[i, c], move[i, c] = best, how
    i, j, steps = n, m, 1
    path = np.empty((n + m + 2, 3), np.int64)
    path[0, 0], path[0, 1], path[0, 2] = n, m, 0  # closes the last gap
    while i > 0 or j > 0:
        how = np.int64(move[i, j - first[i]])
        a, b = (1, 0) if how == 100 else (0, 1) if how == 101 else (1, -how) if how < 0 else (how, 1)
        path[steps, 0], path[steps, 1], path[steps, 2] = i - a, j - b, how
        i, j, steps = i - a, j - b, steps + 1
    gap_i, gap_j = 0, 0  # where the open run of gaps begins
    for step in range(steps - 1, -1, -1):
        i, j, how = path[step]
        if how >= 100:
            continue
        count = _windows(s_data, s_starts, t_data, t_starts, i0 + gap_i, i0 + i, j0 + gap_j, j0 + j, count,
                         s_chunk, t_chunk)
        if step > 0:
            a, b = (1, -how) if how < 0 else (how, 1)
            s_chunk[i0 + i : i0 + i + a] = count
            t_chunk[j0 + j : j0 + j + b] = count
            count, gap_i, gap_j = count + 1, i + a, j + b
    return count


@njit(cache=True)
def _windows(s_data, s_starts, t_data, t_starts, i, i1, j, j1, count, s_chunk, t_chunk, reach=16):
    """Cut M:N chunks of equal bytes out of a gap, from left to right."""
    while i < i1 and j < j1:
        done = False
        for skip in range(reach):  # the closest pair of beginnings first
            for a in range(min(skip, i1 - i - 1) + 1):
                b = skip - a
                if j + b >= j1:
                    continue
                p, q = i + a, j + b
                while p < i1 and q < j1 and p - i - a < reach and q - j - b < reach:
                    s_size, t_size = s_starts[p + 1] - s_starts[i + a], t_starts[q + 1] - t_starts[j + b]
                    if s_size == t_size:
                        done = _equal(s_data, s_starts[i + a], s_starts[p + 1], t_data, t_starts[j + b],
                                      t_starts[q + 1])
                        break
                    if s_size < t_size:
                        p += 1
                    else:
                        q += 1
                if done:
                    s_chunk[i + a : p + 1] = count
                    t_chunk[j + b : q + 1] = count
                    count, i, j = count + 1, p + 1, q + 1
                    break
            if done:
                break
        if not done:
            break
    return count


def _describe(rows, tables, s_chunk, t_chunk, count):
    """Alignment of given chunks, with spans in the student's bytes."""
    lengths = [np.maximum(table.lengths[ids], 0) for ids, table in zip(rows, tables)]
    inside = s_chunk[: len(rows[0])]
    size = np.bincount(inside[inside >= 0], lengths[0][inside >= 0], count).astype(np.int64)
    begin = np.cumsum(lengths[0]) - lengths[0]
    start = np.zeros(count, np.int64)
    start[inside[::-1][inside[::-1] >= 0]] = begin[::-1][inside[::-1] >= 0]
    num = [np.bincount(chunk[chunk >= 0], minlength=count) for chunk in (s_chunk, t_chunk)]
    same = np.zeros(count, bool)
    spelled = [[b""] * count for _ in rows]
    for side, ids, table, chunk in zip(spelled, rows, tables, (s_chunk, t_chunk)):
        for i, c in zip(ids.tolist(), chunk.tolist()):
            if c >= 0 and not table.special[i]:
                side[c] += table.bytes_of(i)
    same = np.array([a == b for a, b in zip(*spelled)], bool)
    total = int(lengths[0].sum())
    dropped = {"normalized": total - int(size.sum()), "unencodable": 0, "unmatched": 0}
    exact = same & (num[0] == 1) & (num[1] == 1)
    return Alignment(s_chunk, t_chunk, start, size, *num, exact, same, total, dropped)
