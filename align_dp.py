"""Align two token sequences whose texts differ, by dynamic programming over canonical tokens.

`align.align` needs two tokenizations of one text.  Where the two sides were rendered differently
(other templates, other spaces, words inserted or left out), `align_dp` finds what they have in
common.  It returns the same `Alignment`.

Shapes: S student tokens, T teacher tokens, C chunks.  Inside the numba functions ``s_`` stands for
the student's side and ``t_`` for the teacher's.

Needs numpy, numba and align.py; copy both files.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_align_dp.py.
"""

import bisect
import re
from typing import NamedTuple

import numpy as np
from numba import njit

try:
    from .align import Alignment, TokenTable, checked_ids, unpadded_length
except ImportError:  # copied beside it, not into a package
    from align import Alignment, TokenTable, checked_ids, unpadded_length


class CanonicalRow(NamedTuple):
    """Tokens of one side without padding, and their canonical bytes.

    Attributes:
        ids: (S,) int64.
        table: their TokenTable.
        data: uint8, the canonical bytes of all tokens, one after the other.
        starts: (S + 1,) int64; token i of the row is ``data[starts[i]:starts[i + 1]]``.
    """

    ids: np.ndarray
    table: TokenTable
    data: np.ndarray
    starts: np.ndarray


def align_dp(student_ids, teacher_ids, student_table, teacher_table, max_combination=4, band=48,
             anchor=24):
    """Align two token sequences whose texts differ in places, by dynamic programming.

    Prefer it where the two sides are no tokenizations of one text, so that `align` would drop all
    bytes as "unmatched": two templates, two ways to write spaces or line ends, words put in or left
    out. For two tokenizations of one text prefer `align` and `align_located`: they are many times
    faster, find every chunk, also next to a difference, and count why bytes were dropped.

    Tokens are compared in canonical form: control tokens by role (bos, eos, pad, unk, end of turn)
    or by name; CR LF is LF; a run of spaces and tabs, over tokens too, is one space.  Moves: one
    token with one token; one with 2 to max_combination of the other side; a gap on either side.  A
    match of n canonical bytes scores 64 n + 1, a gap 0, so most text is matched first and more
    chunks are preferred second; n is 0 for the LF behind a CR and for further spaces.  Ties go to
    1:1, then 1:k and k:1 with the smallest k, then a gap of the student.  Afterwards M:N windows of
    equal bytes are cut out of what is left in the gaps.

    The search runs between anchors (canonical n-grams that start at tokens and are unique on both
    sides, in their longest common order) and within a band around the straight line between two
    anchors, so the time is linear in the tokens, whatever the text.  Padding at the end is never
    looked at.

    Args:
        student_ids, teacher_ids: (S,) and (T,) ints, padded on the right or not.
        student_table, teacher_table: the `TokenTable` of each side.
        max_combination: most tokens of one side that may match one of the other, 1 to 99.
        band: half the width of the band, tokens.
        anchor: bytes of an anchor.
    Returns:
        Alignment, with all fields of `align_located`'s.  Four of them mean something else, because
        there is no common text.  text_bytes and chunk_start refer to the bytes that the student's
        ids spell. Control tokens that match are chunks of no bytes, bos included.  same_bytes is
        False for a chunk that matches in canonical form only, such as two spaces against one: the
        two models' probabilities are those of two spellings, so a loss on probabilities should
        leave the chunk out, as it does with `align`.  dropped counts all bytes of the student
        without chunk as "normalized".
    Raises:
        ValueError: an id is outside its vocabulary, or max_combination is not in 1 to 99.
    """
    if not 1 <= max_combination < STUDENT_GAP:
        raise ValueError(f"max_combination is {max_combination}; expected 1 to {STUDENT_GAP - 1}")
    student = _canonical_row(student_ids, student_table)
    teacher = _canonical_row(teacher_ids, teacher_table)
    s_chunk = np.full(len(student_ids), -1)
    t_chunk = np.full(len(teacher_ids), -1)
    num_chunks = _align_rows(student, teacher, s_chunk, t_chunk, max_combination, band, anchor)
    return _describe(student, teacher, s_chunk, t_chunk, num_chunks)


def _align_rows(student, teacher, s_chunk, t_chunk, most, band, anchor):
    """Write the chunks of two rows, each with data and starts; return their number."""
    num_chunks = 0
    s_first = t_first = 0
    end = len(student.starts) - 1, len(teacher.starts) - 1
    for s_stop, t_stop in [*_anchors(student, teacher, anchor), end]:
        wide = max(band, MOST_CELLS // max(1, s_stop - s_first))
        num_chunks = _align_segment(
            student.data, student.starts, s_first, s_stop, s_chunk,
            teacher.data, teacher.starts, t_first, t_stop, t_chunk, most, wide, num_chunks)
        s_first = s_stop
        t_first = t_stop
    return num_chunks


# --- two texts ------------------------------------------------------------------------------------

# words, runs of spaces, signs, and the letters of scripts that put no spaces between words
WORD = re.compile(r"\s+|[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
                  r"\uf900-\ufaff\U00020000-\U0003ffff]+|.", re.DOTALL)


class WordRow(NamedTuple):
    """Words of a text.

    Attributes:
        data: uint8, the bytes of all words, one after the other.
        starts: (W + 1,) int64; word w is ``data[starts[w]:starts[w + 1]]``.
        characters: (W + 1,) int64, the first character of each word and, last, the end.
        is_word: (W,) bool, it is no space and no sign.
    """

    data: np.ndarray
    starts: np.ndarray
    characters: np.ndarray
    is_word: np.ndarray


def common_spans(first, second, band=48, anchor=24):
    """List what two texts have in common, in order, by the search of `align_dp` over their words.

    Args:
        first, second: str.
        band: half the width of the band, words; anchor: bytes of an anchor.
    Returns:
        list of (first character in one text, in the other, how many).  Each holds a word, or is the
        beginning or end of both: spaces and signs alone stand everywhere.
    """
    if first == second:
        return [(0, 0, len(first))] if first else []
    rows = _words(first), _words(second)
    sizes = [len(row.is_word) for row in rows]
    chunks = [np.full(size, -1) for size in sizes]
    _align_rows(*rows, *chunks, 1, band, anchor)
    words_2W = np.stack([np.flatnonzero(chunk >= 0) for chunk in chunks])
    spans = []
    # neighbors on both sides
    for i, j in np.split(words_2W, np.flatnonzero((np.diff(words_2W) != 1).any(0)) + 1, axis=1):
        ends = [(0, 0), (sizes[0] - 1, sizes[1] - 1)]
        if len(i) and (rows[0].is_word[i].any() or (i[0], j[0]) in ends or (i[-1], j[-1]) in ends):
            begin = int(rows[0].characters[i[0]])
            size = int(rows[0].characters[i[-1] + 1]) - begin
            spans.append((begin, int(rows[1].characters[j[0]]), size))
    return spans


def _words(text):
    words = WORD.findall(text)
    pieces = [word.encode(errors="replace") for word in words]
    data = np.frombuffer(b"".join(pieces), np.uint8)
    starts = np.cumsum([0, *map(len, pieces)])
    characters = np.cumsum([0, *map(len, words)])
    return WordRow(data, starts, characters, np.array([word[0].isalnum() for word in words], bool))


# --- canonical form -------------------------------------------------------------------------------

SPACE = 32
TAB = 9
CR = 13
LF = 10
CONTROL = 255  # begins the canonical form of a control token; a byte that no text holds

# a token in several roles is compared by the last of them
ROLES = ("end_of_turn", "unk", "pad", "eos", "bos")


def _canonical_row(ids, table):
    """Check ids, cut off padding and write every token in canonical form."""
    ids = checked_ids(ids, table)
    ids = ids[: unpadded_length(ids, table)]
    role_of_id = {getattr(table, role): role for role in ROLES}
    names = {}
    for i in np.unique(ids).tolist():
        if table.special[i]:
            names[i] = f"<{role_of_id.get(i, table.tokens[i])}>".encode()
    control_ids = np.array(list(names), np.int64)  # rising, as np.unique gave them
    name_data = np.frombuffer(b"".join(names.values()), np.uint8)
    name_starts = np.cumsum([0, *map(len, names.values())])
    data, starts = _canonical(
        ids, table.data, table.starts, table.special, control_ids, name_data, name_starts)
    return CanonicalRow(ids, table, data, starts)


@njit(cache=True)
def _canonical(ids, data, starts, special, control_ids, name_data, name_starts):
    """Return (data, starts) of `CanonicalRow`.

    Args:
        control_ids: the control tokens of the row, rising; control token k is compared as
            ``name_data[name_starts[k]:name_starts[k + 1]]``.
    """
    most_bytes = 0
    for i in ids:
        if special[i]:
            k = np.searchsorted(control_ids, i)
            most_bytes += name_starts[k + 1] - name_starts[k] + 1
        else:
            most_bytes += starts[i + 1] - starts[i]
    out = np.empty(most_bytes, np.uint8)
    out_starts = np.zeros(len(ids) + 1, np.int64)
    filled = 0
    last = 0  # byte written before, also by another token
    for n, i in enumerate(ids):
        if special[i]:
            out[filled] = CONTROL
            filled += 1
            last = CONTROL
            k = np.searchsorted(control_ids, i)
            for b in range(name_starts[k], name_starts[k + 1]):
                out[filled] = name_data[b]
                filled += 1
        else:
            for b in range(starts[i], starts[i + 1]):
                byte = SPACE if data[b] == TAB else data[b]
                if byte == SPACE and last == SPACE:
                    continue
                if byte == LF and last == CR:  # a token of the LF alone is left empty
                    filled -= 1
                out[filled] = byte
                filled += 1
                last = byte
        out_starts[n + 1] = filled
    return out[:filled], out_starts


# --- anchors --------------------------------------------------------------------------------------


DEPTH = 3  # how often anchors are looked for between anchors


def _anchors(student, teacher, size, depth=DEPTH):
    """Return [(student token, teacher token)], rising: both begin the same n-gram of `size` bytes.

    Such an n-gram occurs once on either side, or once between two others that are far apart.
    """
    s_hashes, s_tokens = _unique_ngrams(student, size)
    t_hashes, t_tokens = _unique_ngrams(teacher, size)
    _, in_student, in_teacher = np.intersect1d(
        s_hashes, t_hashes, assume_unique=True, return_indices=True)
    s_tokens = s_tokens[in_student]
    t_tokens = t_tokens[in_teacher]
    order = np.argsort(s_tokens)
    s_tokens = s_tokens[order]
    t_tokens = t_tokens[order]
    kept = _longest_rise(t_tokens)
    anchors = []
    s_first = t_first = 0
    end = len(student.starts) - 1, len(teacher.starts) - 1
    for s_stop, t_stop in [*zip(s_tokens[kept].tolist(), t_tokens[kept].tolist()), end]:
        if depth and (s_stop - s_first) * (t_stop - t_first) > MOST_CELLS:
            inner = _anchors(_between(student, s_first, s_stop), _between(teacher, t_first, t_stop),
                             size, depth - 1)
            anchors += [(s_first + i, t_first + j) for i, j in inner]
        anchors.append((s_stop, t_stop))
        s_first = s_stop
        t_first = t_stop
    return anchors[:-1]


def _between(row, first, stop):
    """Return the tokens first .. stop - 1 of a row, as far as an n-gram needs them."""
    starts = row.starts[first : stop + 1]
    return row._replace(data=row.data[starts[0] : starts[-1]], starts=starts - starts[0])


def _unique_ngrams(row, size):
    """Return (hash, token) of the n-grams that begin at a token and have a hash of their own."""
    fits = row.starts[:-1] + size <= len(row.data)
    has_bytes = row.starts[1:] > row.starts[:-1]
    tokens = np.flatnonzero(fits & has_bytes)
    hashes = _hash(row.data, row.starts[tokens], size)
    values, first, times = np.unique(hashes, return_index=True, return_counts=True)
    return values[times == 1], tokens[first[times == 1]]


@njit(cache=True)
def _hash(data, places, size):
    """Return the FNV-1a hash of `size` bytes at each place."""
    out = np.empty(len(places), np.int64)
    for n, place in enumerate(places):
        value = np.int64(1469598103934665603)  # a start that fits int64; FNV's own does not
        for b in data[place : place + size]:
            value = (value ^ b) * np.int64(1099511628211)  # FNV's prime
        out[n] = value
    return out


def _longest_rise(values):
    """Return the indices of a longest strictly rising subsequence, by patience sorting."""
    ends = []  # ends[l]: the smallest end of a rise of l + 1 values
    tails = []  # its index
    before = []  # index of the value before in the longest rise that ends here
    for k, value in enumerate(values.tolist()):
        size = bisect.bisect_left(ends, value)
        before.append(tails[size - 1] if size else -1)
        ends[size : size + 1] = [value]
        tails[size : size + 1] = [k]
    rise = []
    k = tails[-1] if tails else -1
    while k >= 0:
        rise.append(k)
        k = before[k]
    return rise[::-1]


# --- dynamic programming between two anchors ------------------------------------------------------

# moves of a path: k > 0: k student tokens with one teacher token; k < -1: one with -k; and the
# gaps. A combination therefore has fewer than 100 tokens (int8 holds up to 127).
STUDENT_GAP = 100
TEACHER_GAP = 101

# 64 per canonical byte and 1 per chunk: a chunk more never outweighs a byte, up to 64 chunks
SCORE_OF_BYTE = 64

MOST_CELLS = 1 << 19  # of a search without a band; not tuned

REACH = 16  # most tokens of an M:N window and of the way to its begin; not tuned


@njit(cache=True)
def _equal(s_data, s, s_stop, t_data, t, t_stop):
    """Return whether s_data[s:s_stop] == t_data[t:t_stop]."""
    if s_stop - s != t_stop - t:
        return False
    for k in range(s_stop - s):
        if s_data[s + k] != t_data[t + k]:
            return False
    return True


@njit(cache=True)
def _align_segment(s_data, s_starts, s_first, s_stop, s_chunk,
                   t_data, t_starts, t_first, t_stop, t_chunk, most, band, num_chunks):
    """Write the chunks of s_first..s_stop-1 and t_first..t_stop-1; return their new number."""
    n = s_stop - s_first
    m = t_stop - t_first
    if n == 0 or m == 0:
        return num_chunks
    # from here on, tokens are counted from the beginning of the segment
    s_starts = s_starts[s_first : s_stop + 1]
    t_starts = t_starts[t_first : t_stop + 1]
    s_chunk = s_chunk[s_first:s_stop]
    t_chunk = t_chunk[t_first:t_stop]
    reached, moves, first = _best_moves(s_data, s_starts, t_data, t_starts, most, band)
    if not reached:
        # the teacher has so many more tokens that the band leaps from line to line and its lines
        # have no column in common: widen it until they have
        _, moves, first = _best_moves(s_data, s_starts, t_data, t_starts, most, m // n + 1)
    path = _trace(moves, first, n, m)

    gap_i = gap_j = 0  # where the open run of gaps begins
    for step in range(len(path) - 1, -1, -1):
        i, j, move = path[step]
        if move >= STUDENT_GAP:
            continue
        num_chunks = _windows(s_data, s_starts, gap_i, i, s_chunk,
                              t_data, t_starts, gap_j, j, t_chunk, num_chunks)
        if step > 0:  # path[0] is no move
            gap_i = i + (1 if move < 0 else move)
            gap_j = j + (-move if move < 0 else 1)
            s_chunk[i:gap_i] = num_chunks
            t_chunk[j:gap_j] = num_chunks
            num_chunks += 1
    return num_chunks


@njit(cache=True)
def _best_moves(s_data, s_starts, t_data, t_starts, most, band):
    """Find the move with which the best path reaches each cell of the band.

    Returns:
        reached: whether a path inside the band leads to the end of both sides.
        moves: (n + 1, width) int8; column c of line i is the cell after i student tokens and
            first[i] + c teacher tokens.
        first: (n + 1,) int64.
    """
    n = len(s_starts) - 1
    m = len(t_starts) - 1
    width = min(2 * band, m) + 1
    scores = np.full((n + 1, width), -1)  # -1: no path leads there inside the band
    moves = np.zeros((n + 1, width), np.int8)
    first = np.empty(n + 1, np.int64)
    for i in range(n + 1):
        first[i] = max(0, min(m + 1 - width, i * m // n - band))
    for i in range(n + 1):
        for c in range(width):
            j = first[i] + c
            best = 0 if i == 0 and j == 0 else -1
            best_move = 0
            for k in range(1, most + 1):
                for turn in range(2 if k > 1 else 1):
                    # a student tokens with b teacher tokens: first 1 with k, then k with 1
                    a = 1 if turn == 0 else k
                    b = k if turn == 0 else 1
                    if a > i or b > j:
                        continue
                    before = j - b - first[i - a]
                    if before < 0 or before >= width or scores[i - a, before] < 0:
                        continue
                    s = s_starts[i - a]
                    s_stop = s_starts[i]
                    gain = scores[i - a, before] + SCORE_OF_BYTE * (s_stop - s) + 1
                    if gain > best and _equal(s_data, s, s_stop,
                                              t_data, t_starts[j - b], t_starts[j]):
                        best = gain
                        best_move = -k if turn == 0 and k > 1 else k
            if i > 0:
                above = j - first[i - 1]
                if 0 <= above < width and scores[i - 1, above] > best:
                    best = scores[i - 1, above]
                    best_move = STUDENT_GAP
            if c > 0 and scores[i, c - 1] > best:
                best = scores[i, c - 1]
                best_move = TEACHER_GAP
            scores[i, c] = best
            moves[i, c] = best_move
    return scores[n, m - first[n]] >= 0, moves, first


@njit(cache=True)
def _trace(moves, first, n, m):
    """Follow the moves back from the end of both sides.

    Returns:
        (steps, 3) int64: student token and teacher token at which a move begins, and the move; the
        last move first, after (n, m, 0), which closes the last gap.
    """
    path = np.empty((n + m + 1, 3), np.int64)
    path[0, 0] = n
    path[0, 1] = m
    path[0, 2] = 0
    steps = 1
    i = n
    j = m
    while i > 0 or j > 0:
        move = np.int64(moves[i, j - first[i]])
        if move == STUDENT_GAP:
            i -= 1
        elif move == TEACHER_GAP:
            j -= 1
        elif move < 0:
            i -= 1
            j += move
        else:
            i -= move
            j -= 1
        path[steps, 0] = i
        path[steps, 1] = j
        path[steps, 2] = move
        steps += 1
    return path[:steps]


# --- windows of several tokens on both sides ------------------------------------------------------


@njit(cache=True)
def _windows(s_data, s_starts, i, i_stop, s_chunk,
             t_data, t_starts, j, j_stop, t_chunk, num_chunks):
    """Cut M:N chunks of equal bytes out of a gap, from left to right; return the number of chunks.

    The gap holds student tokens i..i_stop-1 and teacher tokens j..j_stop-1.
    """
    while i < i_stop and j < j_stop:
        a, a_stop, b, b_stop = _next_window(s_data, s_starts, i, i_stop,
                                            t_data, t_starts, j, j_stop)
        if a == a_stop:
            break
        s_chunk[a:a_stop] = num_chunks
        t_chunk[b:b_stop] = num_chunks
        num_chunks += 1
        i = a_stop
        j = b_stop
    return num_chunks


@njit(cache=True)
def _next_window(s_data, s_starts, i, i_stop, t_data, t_starts, j, j_stop):
    """Find the window whose begin is closest to tokens i and j.

    Returns:
        (a, a_stop, b, b_stop): student tokens a..a_stop-1 and teacher tokens b..b_stop-1 have the
        same bytes; (i, i, j, j) where no window is in reach.
    """
    for skip in range(REACH):  # tokens left out before the window, of both sides together
        for s_skip in range(min(skip, i_stop - i - 1) + 1):
            a = i + s_skip
            b = j + skip - s_skip
            if b >= j_stop or s_starts[a] == s_starts[a + 1] or t_starts[b] == t_starts[b + 1]:
                continue  # what is left empty belongs to the token before it
            a_last = a
            b_last = b
            # lengthen the shorter side until both have equally many bytes
            while (a_last < i_stop and b_last < j_stop
                   and a_last - a < REACH and b_last - b < REACH):
                s_size = s_starts[a_last + 1] - s_starts[a]
                t_size = t_starts[b_last + 1] - t_starts[b]
                if s_size < t_size:
                    a_last += 1
                elif s_size > t_size:
                    b_last += 1
                else:
                    if _equal(s_data, s_starts[a], s_starts[a_last + 1],
                              t_data, t_starts[b], t_starts[b_last + 1]):
                        return a, a_last + 1, b, b_last + 1
                    break
    return i, i, j, j


# --- result ---------------------------------------------------------------------------------------


def _describe(student, teacher, s_chunk, t_chunk, num_chunks):
    """Return the Alignment of given chunks, with spans in the student's bytes."""
    lengths = np.maximum(student.table.lengths[student.ids], 0)
    begin = np.cumsum(lengths) - lengths
    text_bytes = int(lengths.sum())
    chunk = s_chunk[: len(student.ids)]  # without padding
    tokens = np.flatnonzero(chunk >= 0)
    chunk_bytes = np.bincount(chunk[tokens], lengths[tokens], num_chunks).astype(np.int64)
    chunk_start = np.zeros(num_chunks, np.int64)
    # backwards, so that the first token of a chunk is written last and stays
    chunk_start[chunk[tokens][::-1]] = begin[tokens][::-1]
    student_tokens = np.bincount(s_chunk[s_chunk >= 0], minlength=num_chunks)
    teacher_tokens = np.bincount(t_chunk[t_chunk >= 0], minlength=num_chunks)

    s_spelled = _chunk_spellings(student, s_chunk, num_chunks)
    t_spelled = _chunk_spellings(teacher, t_chunk, num_chunks)
    same_bytes = np.array([s == t for s, t in zip(s_spelled, t_spelled)], bool)
    dropped = {"normalized": text_bytes - int(chunk_bytes.sum()), "unencodable": 0, "unmatched": 0}
    return Alignment(
        s_chunk,
        t_chunk,
        chunk_start,
        chunk_bytes,
        student_tokens,
        teacher_tokens,
        exact=same_bytes & (student_tokens == 1) & (teacher_tokens == 1),
        same_bytes=same_bytes,
        text_bytes=text_bytes,
        dropped=dropped,
    )


def _chunk_spellings(row, chunk, num_chunks):
    """Return the bytes, as the tokens spell them, of each chunk of one side."""
    spellings = [b""] * num_chunks
    for i, number in zip(row.ids.tolist(), chunk.tolist()):
        if number >= 0 and not row.table.special[i]:
            spellings[number] += row.table.bytes_of(i)
    return spellings
