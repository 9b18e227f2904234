"""align_dp.py: what two different renderings have in common, in linear time."""

import re
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from isogloss.align import align, coverage
from isogloss.align_dp import align_dp, common_spans
from tokens import segmented, table_of

PIECES = (b"the", b" cat", b" sat", b" on", b"\n", b" ", b"201", b"0", b"\xc3\xa9", b"\r", b"\r\n",
          b"\t")
WORDS = st.lists(st.sampled_from(PIECES), max_size=25)
cuts = st.lists(st.integers(0, 10**6), max_size=30)


def brute_force(s, t, most):
    """Return the best score (64 per canonical byte, 1 per chunk) of moves 1:1, 1:k and k:1.

    A chunk may have no canonical byte.
    """
    best = np.zeros((len(s) + 1, len(t) + 1), int)
    for i in range(len(s) + 1):
        for j in range(len(t) + 1):
            options = [best[i - 1, j] if i else 0, best[i, j - 1] if j else 0]
            for k in range(1, most + 1):
                for a, b in ((1, k), (k, 1)):
                    piece = b"".join(s[max(0, i - a) : i])
                    if a <= i and b <= j and piece == b"".join(t[j - b : j]):
                        options.append(best[i - a, j - b] + 64 * len(piece) + 1)
            best[i, j] = max(options)
    return best[-1, -1]


def canonical(pieces):
    """CR LF is LF, a run of spaces and tabs one space; each stands with what begins it."""
    kept = {}  # place: byte
    for found in re.finditer(rb"(\r\n)|([ \t]+)|.", b"".join(pieces), re.DOTALL):
        kept[found.start()] = b"\n" if found[1] else b" " if found[2] else found[0]
    ends = np.cumsum([0, *map(len, pieces)]).tolist()
    return [b"".join(kept.get(place, b"") for place in range(*edges)) for edges in pairwise(ends)]


@given(WORDS, WORDS, cuts, cuts)
@settings(max_examples=150, deadline=None)
def test_the_best_path_equals_brute_force(first, second, s_cuts, t_cuts):
    (s, s_table), (t, t_table) = (
        segmented(b"".join(first), s_cuts), segmented(b"".join(second), t_cuts))
    alignment = align_dp(s, t, s_table, t_table, anchor=10**6)
    s_pieces = canonical([s_table.bytes_of(i) for i in s])
    t_pieces = canonical([t_table.bytes_of(i) for i in t])
    total = 0
    last_begins = -1, -1
    for c in range(len(alignment.chunk_bytes)):
        s_members = np.flatnonzero(alignment.student_chunk == c)
        t_members = np.flatnonzero(alignment.teacher_chunk == c)
        assert (np.diff(s_members) == 1).all() and (np.diff(t_members) == 1).all()
        assert len(s_members) == alignment.student_tokens[c]
        assert len(t_members) == alignment.teacher_tokens[c]
        spelled = b"".join(s_pieces[i] for i in s_members)
        assert spelled == b"".join(t_pieces[i] for i in t_members)
        total += 64 * len(spelled) + 1
        # chunks are in reading order on both sides
        assert s_members[0] > last_begins[0] and t_members[0] > last_begins[1]
        last_begins = s_members[0], t_members[0]
    assert total >= brute_force(s_pieces, t_pieces, 4)  # windows of M:N come on top


@given(WORDS, cuts)
@settings(max_examples=100, deadline=None)
def test_a_sequence_matches_itself_token_by_token(words, places):
    ids, table = segmented(b"".join(words), places)
    alignment = align_dp(ids, ids, table, table)
    assert alignment.student_chunk.tolist() == alignment.teacher_chunk.tolist() == ids
    assert alignment.exact.all() and not any(alignment.dropped.values())


def test_a_run_that_one_side_cuts_matches_it_whole():
    """Of bytes that canonical form leaves out none is left to the token before or behind."""
    for run in (b"\r\n", b"  ", b" \t", b"\t\t"):
        student = table_of([b".", run[:1], run[1:], b"b"])
        teacher = table_of([b".", run, b"b"])
        alignment = align_dp([0, 1, 2, 3], [0, 1, 2], student, teacher)
        assert alignment.student_chunk.tolist() == [0, 1, 1, 2]
        assert alignment.same_bytes.all()


def test_words_put_in_and_left_out():
    words = b"a quick brown fox jumps over the lazy dog and runs away".split(b" ")
    table = table_of([b" " + w for w in words] + [b" very", b" big"])
    s = list(range(12))
    t = [0, 12, 1, 2, 3, 4, 13, 13, 5, 6, 8, 9, 10, 11]  # "very" and "big big" come in, "lazy" goes
    alignment = align_dp(s, t, table, table)
    assert alignment.student_chunk.tolist() == [0, 1, 2, 3, 4, 5, 6, -1, 7, 8, 9, 10]
    assert alignment.teacher_chunk.tolist() == [0, -1, 1, 2, 3, 4, -1, -1, 5, 6, 7, 8, 9, 10]
    assert alignment.exact.all() and alignment.dropped["normalized"] == len(b" lazy")


def test_roles_spaces_and_windows():
    student = table_of([b"<s>", b"a  b", b"\r\n", b"xy", b"zw", b"</s>"], bos=0, eos=5)
    teacher = table_of(
        [b"<|b|>", b"a ", b"b", b"\n", b"x", b"yz", b"w", b"<|e|>", b"<pad>"], bos=0, eos=7, pad=8)
    alignment = align_dp([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 8], student, teacher)
    assert alignment.student_chunk.tolist() == [0, 1, 2, 3, 3, 4]
    assert alignment.teacher_chunk.tolist() == [0, 1, 1, 2, 3, 3, 3, 4, -1, -1]
    assert alignment.exact.tolist() == [True, False, False, False, True]
    assert alignment.same_bytes.tolist() == [True, False, False, True, True]
    # the end of a text is kept where it is padding too
    table = table_of([b"a", b"<e>"], eos=1, pad=1)
    assert align_dp([0, 1, 1], [0, 1], table, table).student_chunk.tolist() == [0, 1, -1]


def test_a_combination_may_be_as_long_as_asked():
    student, teacher = table_of([b"abcdef", b"!"]), table_of([bytes([c]) for c in b"abcdef!"])
    alignment = align_dp([0, 1], list(range(7)), student, teacher, max_combination=6)
    assert alignment.teacher_tokens.tolist() == [6, 1]
    # as a window, 1:6
    assert align_dp([0, 1], list(range(7)), student, teacher).chunk_bytes.sum() == 7
    # no move can name it
    with pytest.raises(ValueError, match="max_combination is 100; expected 1 to 99"):
        align_dp([0], [0], student, teacher, max_combination=100)


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
    alignment = align_dp(*ids, *tables)
    assert coverage(alignment)["bytes"] > 0.97  # next to a word put in, n:m chunks are lost


@pytest.mark.parametrize("size", [100, 200, 300, 5000])
def test_one_token_is_found_among_many_more_of_the_other_side(size):
    """The band has columns in common from line to line, however many tokens the teacher has."""
    table = table_of([b"abc", b"x", b"y"])
    many = [1] * (size - 5) + [0] + [2] * 4
    alignment = align_dp([0], many, table, table)
    assert alignment.student_chunk.tolist() == [0]
    assert np.flatnonzero(alignment.teacher_chunk >= 0).tolist() == [size - 5]
    turned = align_dp(many, [0], table, table)
    assert np.flatnonzero(turned.student_chunk >= 0).tolist() == [size - 5]


def test_the_result_can_replace_that_of_align():
    """Where both apply they agree, field by field and dtype by dtype."""
    student, teacher = table_of([b"the", b" cat", b"!"]), table_of([b"the", b" c", b"at", b"!"])
    exact = align([0, 1, 2], [0, 1, 2, 3], student, teacher)
    alignment = align_dp([0, 1, 2], [0, 1, 2, 3], student, teacher)
    for name, value, expected in zip(exact._fields, alignment, exact):
        if isinstance(expected, np.ndarray):
            assert value.dtype == expected.dtype, name
        assert np.array_equal(value, expected), name


# --- two texts ------------------------------------------------------------------------------------


def with_changes(pieces, between, every, rng):
    """Return (text, text with changes, {character of the one: that of the other} of the rest).

    Args:
        pieces: words or characters, with `between` between them; every: one of so many changes.
    """
    text = changed = ""
    places = {}
    for piece in pieces:
        kept = rng.integers(every) > 0
        if kept:
            first = len(text + between), len(changed + between)
            places |= {first[0] + i: first[1] + i for i in range(len(piece))}
        others = "", "zebra", between.join(["put"] + ["in"] * 40)
        text += between + piece
        changed += between + (piece if kept else others[rng.integers(3)])
    return text, changed, places


@pytest.mark.parametrize("every", [20, 2000])
@pytest.mark.parametrize("script", ["English", "Chinese"])
@pytest.mark.parametrize("size", [500, 8000, 64_000])
def test_what_two_texts_have_in_common_is_found_at_its_place(texts, size, script, every):
    rng = np.random.default_rng(size)
    if script == "English":  # at the end a part of the text comes again
        parts = with_changes("\n\n".join([*texts, *texts])[:size].split(" "), " ", every, rng)
    else:
        parts = with_changes([chr(0x4E00 + i) for i in rng.zipf(1.3, size) % 3000], "", every, rng)
    text, changed, places = parts
    common_spans(changed[:100], text[:90])  # compiles
    begin = time.process_time()
    spans = common_spans(text, changed)
    seconds = time.process_time() - begin
    found = {}
    for first, second, num in spans:
        assert text[first : first + num] == changed[second : second + num]
        found |= {first + i: second + i for i in range(num)}
    right = sum(found.get(first) == second for first, second in places.items())
    wrong = sum(found.get(first, second) != second for first, second in places.items())
    assert right >= 0.97 * len(places) and wrong <= 0.002 * len(places)
    assert seconds < 1  # 0.2 s for 64,000 characters


def test_what_two_texts_have_in_common_holds_words():
    assert common_spans("", "a") == common_spans("", "") == []
    assert common_spans("a b", "a b") == [(0, 0, 3)]
    a, b = 'x{"name": "go", "at": 1}', "<go at=1>"
    assert [a[i : i + n] for i, _, n in common_spans(a, b)] == ["go", "at", "1"]
    assert [b[j : j + n] for _, j, n in common_spans(a, b)] == ["go", "at", "1"]
    # signs alone count at the beginning or end of both
    assert common_spans("?! a", "?! b") == [(0, 0, 3)]
    assert common_spans("a ?", "b ?") == [(1, 1, 2)]
    assert common_spans("a ? b", "c ? d") == []
