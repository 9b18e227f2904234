"""align_dp.py: what two different renderings have in common, in linear time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_align import segmented, table_of

from align import align, coverage
from align_dp import align_dp

WORDS = st.lists(st.sampled_from([b"the", b" cat", b" sat", b" on", b"\n", b" ", b"201", b"0", b"\xc3\xa9"]),
                 max_size=25)
cuts = st.lists(st.integers(0, 10**6), max_size=30)


def brute_force(s, t, most):
    """Most canonical bytes (times 64, plus chunks) that moves 1:1, 1:k, k:1 can match; plain recursion."""
    best = np.zeros((len(s) + 1, len(t) + 1), int)
    for i in range(len(s) + 1):
        for j in range(len(t) + 1):
            options = [best[i - 1, j] if i else 0, best[i, j - 1] if j else 0]
            for k in range(1, most + 1):
                for a, b in ((1, k), (k, 1)):
                    piece = b"".join(s[i - a : i]) if a <= i else None
                    if b <= j and piece and piece == b"".join(t[j - b : j]):
                        options.append(best[i - a, j - b] + 64 * len(piece) + 1)
            best[i, j] = max(options)
    return best[-1, -1]


def canonical(pieces):
    out, last = [], 0
    for piece in pieces:
        kept = bytearray()
        for byte in piece:
            if byte == 32 and last == 32:
                continue
            kept.append(byte)
            last = byte
        out.append(bytes(kept))
    return out


@given(WORDS, WORDS, cuts, cuts)
@settings(max_examples=150, deadline=None)
def test_the_best_path_equals_brute_force(first, second, s_cuts, t_cuts):
    (s, s_table), (t, t_table) = segmented(b"".join(first), s_cuts), segmented(b"".join(second), t_cuts)
    found = align_dp(s, t, s_table, t_table, anchor=10**6)
    sides = [canonical([table.bytes_of(i) for i in ids]) for ids, table in ((s, s_table), (t, t_table))]
    total = 0
    for c in range(len(found.chunk_bytes)):
        members = [np.flatnonzero(chunk == c) for chunk in found[:2]]
        spelled = [b"".join(side[i] for i in rows) for side, rows in zip(sides, members)]
        assert spelled[0] == spelled[1] and all((np.diff(rows) == 1).all() for rows in members)
        assert [len(rows) for rows in members] == [found.student_tokens[c], found.teacher_tokens[c]]
        total += 64 * len(spelled[0]) + 1
    starts = [[np.flatnonzero(chunk == c)[0] for c in range(len(found.chunk_bytes))] for chunk in found[:2]]
    assert all(row == sorted(row) for row in starts)
    assert total >= brute_force(*sides, 4)  # windows of M:N come on top


@given(st.lists(st.sampled_from([b"the", b" cat", b" sat", b"\n", b"201", b"0"]), max_size=40), cuts, cuts)
@settings(max_examples=150, deadline=None)
def test_equal_texts_are_covered_as_by_align(pieces, s_cuts, t_cuts):
    text = b"".join(pieces)
    (s, s_table), (t, t_table) = segmented(text, s_cuts), segmented(text, t_cuts)
    exact = align(s, t, s_table, t_table)
    sizes = list(zip(exact.student_tokens, exact.teacher_tokens))
    if all(min(pair) == 1 and max(pair) <= 4 for pair in sizes):  # n:m chunks are no move of a path
        assert align_dp(s, t, s_table, t_table).chunk_bytes.sum() >= 0.9 * len(text)


def test_words_put_in_and_left_out():
    words = b"a quick brown fox jumps over the lazy dog and runs away".split(b" ")
    table = table_of([b" " + w for w in words] + [b" very", b" big"])
    s = list(range(12))
    t = [0, 12, 1, 2, 3, 4, 13, 13, 5, 6, 8, 9, 10, 11]  # "very" and "big big" come in, "lazy" goes
    found = align_dp(s, t, table, table)
    assert found.student_chunk.tolist() == [0, 1, 2, 3, 4, 5, 6, -1, 7, 8, 9, 10]
    assert found.teacher_chunk.tolist() == [0, -1, 1, 2, 3, 4, -1, -1, 5, 6, 7, 8, 9, 10]
    assert found.exact.all() and found.dropped["normalized"] == len(b" lazy")


def test_roles_spaces_and_windows():
    student = table_of([b"<s>", b"a  b", b"\r\n", b"xy", b"zw", b"</s>"], bos=0, eos=5)
    teacher = table_of([b"<|b|>", b"a ", b"b", b"\n", b"x", b"yz", b"w", b"<|e|>", b"<pad>"],
                       bos=0, eos=7, pad=8)
    found = align_dp([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 8], student, teacher)
    assert found.student_chunk.tolist() == [0, 1, 2, 3, 3, 4]
    assert found.teacher_chunk.tolist() == [0, 1, 1, 2, 3, 3, 3, 4, -1, -1]
    assert found.exact.tolist() == [True, False, False, False, True]
    assert found.same_bytes.tolist() == [True, False, False, True, True]


def test_a_combination_may_be_as_long_as_asked():
    student, teacher = table_of([b"abcdef", b"!"]), table_of([bytes([c]) for c in b"abcdef!"])
    found = align_dp([0, 1], list(range(7)), student, teacher, max_combination=6)
    assert found.teacher_tokens.tolist() == [6, 1]
    assert align_dp([0, 1], list(range(7)), student, teacher).chunk_bytes.sum() == 7  # as a window, 1:6


@pytest.mark.parametrize("text", [b"a" * 6000, b"ab" * 3000, b"\n" * 6000, b"0123456789" * 600])
def test_repetitive_text_stays_within_the_band(text):
    """20,000 tokens would take 10^8 cells and a minute; the band makes it 2 * 10^6."""
    student = table_of([text[:1], text[1:2], text[:4], b"<p>"], pad=3)
    teacher = table_of([text[:2], text[:10]])
    s, t = [2] * (len(text) // 4) * 4 + [3] * 20_000, [1] * (len(text) // 10) * 4
    if text[:4] == text[4:8]:
        assert align_dp(s, t, student, teacher).chunk_bytes.sum() > 0


def test_long_texts_find_their_anchors(tokenizers, tables, texts):
    text = "\n".join(texts[:60])
    both = text, text.replace("the ", "the the ", 50)
    ids = [tokenizer(x, verbose=False)["input_ids"] for tokenizer, x in zip(tokenizers, both)]
    found = align_dp(*ids, *tables)
    assert coverage(found)["bytes"] > 0.97  # next to a word put in, n:m chunks are lost


def test_the_end_of_a_text_is_kept_where_it_is_padding_too():
    table = table_of([b"a", b"<e>"], eos=1, pad=1)
    assert align_dp([0, 1, 1], [0, 1], table, table).student_chunk.tolist() == [0, 1, -1]
