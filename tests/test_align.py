"""align.py: every chunk holds the same bytes on both sides, and none could be smaller."""

import copy
import html
import io
import os
import random
import re
from functools import lru_cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import oracle
from conftest import ROOT, asset
from isogloss.align import (
    EXACT,
    Located,
    TokenTable,
    align,
    align_regions,
    character_starts,
    common_cut,
    coverage,
    cut_chunks,
    locate,
)
from isogloss.align_view import html_page, main, view
from tokens import real, segmented, table_of

NAMES = "llama3", "llama2", "qwen2", "gpt2", "t5", "deepseek_coder", "mistral_v7", "tok512"
LOSSY = {"t5", "tok512"}  # and qwen2, where characters compose
HARD = [
    "naïve café  201 x=1\n\tif a:\r\n  🙂👩‍🚀 Ｗ ｱ 日本語 e\u0301 ﬁ <0x41> \x00 end ",
    "", " ", "   ", "\n\n\n", "\t\t", "\r\n \r\n",
    "  leading", "trailing  ", "in  the   middle", "0123456789 3.14159 1,000,000",
    "é" * 9, "e\u0301" * 5, "a\u0328\u0301 q\u0323\u0307", "👩‍🚀👨‍👩‍👧 🇫🇷🏽",
    "\x01\x02\x7f\x85", "õ÷Áý À ÿ ", "<s> </s> <|endoftext|> <unk> <pad>",
    "＜ｆｕｌｌ＞ ㍿ Ⅻ ½", "ไทย हिन्दी العربية עברית", "\u200b\ufeff\u00a0\u3000x", "a_b__c▁d▁▁e",
]


# --- the merge against brute force ----------------------------------------------------------------


cut_list = st.lists(st.integers(0, 10**6), max_size=40)


@given(st.binary(max_size=60), cut_list, cut_list)
@settings(max_examples=300, deadline=None)
def test_any_two_segmentations_of_any_bytes_equal_brute_force(text, s_cuts, t_cuts):
    (s, s_table), (t, t_table) = segmented(text, s_cuts), segmented(text, t_cuts)
    alignment = align(s, t, s_table, t_table)
    expected = oracle.merge(pieces_of(s, s_table), pieces_of(t, t_table))
    assert [alignment.student_chunk.tolist(), alignment.teacher_chunk.tolist()] == expected
    assert alignment.chunk_bytes.sum() == len(text) == alignment.text_bytes
    assert not any(alignment.dropped.values())
    check_turned(alignment, align(t, s, t_table, s_table))


def pieces_of(ids, table):
    return [table.bytes_of(i) for i in ids]


def check_turned(alignment, turned):
    """Student and teacher have changed places: so do their chunks, and nothing else changes."""
    assert np.array_equal(turned.student_chunk, alignment.teacher_chunk)
    assert np.array_equal(turned.teacher_chunk, alignment.student_chunk)
    assert np.array_equal(turned.exact, alignment.exact)
    assert turned.dropped == alignment.dropped


def test_control_tokens_and_tokens_without_bytes():
    table = table_of([b"ab", b"", b"c", b"<eos>", b"<bos>", b"a", b"b"], eos=3, bos=4)
    alignment = align([4, 1, 0, 2, 3], [5, 6, 4, 1, 2, 3], table, table)
    assert alignment.student_chunk.tolist() == [-1, 0, 0, 1, 2]
    assert alignment.teacher_chunk.tolist() == [0, 0, -1, 1, 1, 2]
    assert alignment.chunk_bytes.tolist() == [2, 1, 0]
    assert alignment.chunk_start.tolist() == [0, 2, 3]
    assert alignment.student_tokens.tolist() == [2, 1, 1]
    assert alignment.teacher_tokens.tolist() == [2, 2, 1]
    assert alignment.exact.tolist() == [False, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_equal_tokenizers_pair_token_by_token(name):
    """Also where they write a character in a composed form, and place several tokens at it."""
    tokenizer, table = real(name)
    for text in [*HARD, "\u0958\u0959 \ufa10", "cafe\u0301 \u0344\u212b"]:
        coded = tokenizer(text, return_offsets_mapping=True)
        ids, offsets = coded["input_ids"], coded["offset_mapping"]
        alignment = align(ids, ids, table, table, text, offsets, offsets)
        chunk = alignment.student_chunk
        assert np.array_equal(chunk, alignment.teacher_chunk)
        assert alignment.student_tokens.tolist() == [1] * len(alignment.chunk_start)
        assert alignment.exact.all()
        assert alignment.chunk_bytes.sum() + sum(alignment.dropped.values()) == len(text.encode())


def test_ids_outside_the_vocabulary_are_refused():
    table = table_of([b"a"])
    with pytest.raises(ValueError, match=r"ids from 0 to 1, but the tokenizer has 0 to 0"):
        align([0, 1], [0], table, table)
    for wrong in ([[0, 0]], [0.0], [True], 0, ["0"]):
        with pytest.raises(ValueError, match=r"expected \(S,\) integers of one text"):
            align(wrong, [0], table, table)
    assert len(align([], np.zeros(0), table, table).chunk_start) == 0


# --- real and trained tokenizers ------------------------------------------------------------------


def check(text, pair, tables):
    """Check every promise of Alignment on one text, and on the two sides turned; return it."""
    coded = [encode(tokenizer, text) for tokenizer in pair]
    ids = [side["input_ids"] for side in coded]
    offsets = [side["offset_mapping"] for side in coded]
    places = [locate(np.array(side["input_ids"], np.int64), table, text, side["offset_mapping"])
              for side, table in zip(coded, tables)]
    alignment = align(*ids, *tables, text, *offsets)
    raw = text.encode()
    times_used = np.zeros(len(raw), int)
    assert (np.diff(alignment.chunk_start) >= 0).all()
    for c, start in enumerate(alignment.chunk_start):
        times_used[start : start + alignment.chunk_bytes[c]] += 1
        check_chunk(alignment, c, raw, ids, places, tables)
    unused = (times_used == 0).sum()
    assert (times_used <= 1).all() and unused == sum(alignment.dropped.values())
    assert alignment.text_bytes == len(raw)
    check_turned(alignment, align(*ids[::-1], *tables[::-1], text, *offsets[::-1]))
    return alignment


def check_chunk(alignment, c, raw, ids, places, tables):
    """Check every promise about chunk c; ids, places (Located) and tables are of both sides."""
    start = alignment.chunk_start[c]
    chunk_text = raw[start : start + alignment.chunk_bytes[c]]
    members = []
    spelled = []
    inner_ends = []
    all_exact = True
    for side in (0, 1):
        positions = np.flatnonzero(alignment[side] == c)
        assert len(positions) and (np.diff(positions) == 1).all()
        members.append(positions)
        spelled.append(b"".join(tables[side].bytes_of(ids[side][k]) for k in positions))
        inner_ends.append(set(places[side].end[positions[:-1]].tolist()))
        all_exact &= bool((places[side].kind[positions] == EXACT).all())
    sizes = [len(positions) for positions in members]
    assert sizes == [alignment.student_tokens[c], alignment.teacher_tokens[c]]
    if alignment.same_bytes[c]:
        assert spelled[0] == spelled[1]
    else:
        assert abs(len(spelled[0]) - len(spelled[1])) == 1
        assert chunk_text in spelled
    if all_exact:
        assert spelled[0] == chunk_text
    assert alignment.exact[c] == (alignment.same_bytes[c] and sizes == [1, 1])
    assert not (inner_ends[0] & inner_ends[1]) - {start}  # minimal: no common boundary inside


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


@lru_cache
def real_texts():
    import json

    english = json.loads(asset("text", "tinystories_1000.json").read_text())[0][:600]
    names = "zh_yuanqu_head.txt", "ja_wagahai_neko_head.txt"
    far = [asset("text", name).read_text()[:400] for name in names]
    return [*HARD, english, *far, (ROOT / "tests" / "oracle.py").read_text()[:800]]


def survives(text, name):
    """Does this tokenizer keep the text?  By its decoder's idea of it, not by ours."""
    tokenizer, table = real(name)
    decoded = table.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    return decoded in (text.encode(), b" " + text.encode())


@pytest.mark.slow
@pytest.mark.parametrize("student", NAMES[:-1])
def test_all_ordered_pairs_of_real_tokenizers(student):
    for teacher in NAMES[NAMES.index(student) + 1 :]:
        pair, tables = zip(real(student), real(teacher))
        for text in real_texts():
            alignment = check(text, pair, tables)
            if survives(text, student) and survives(text, teacher):
                assert coverage(alignment)["bytes"] == 1 or not text
                ids = [encode(tokenizer, text)["input_ids"] for tokenizer in pair]
                plain = align(*ids, *tables, text)  # offsets were not needed
                assert all(np.array_equal(a, b) for a, b in zip(plain[:8], alignment[:8]))
        english = real_texts()[len(HARD)]
        assert coverage(check(english, pair, tables))["bytes"] > 0.95


def test_real_tokenizers_lose_what_they_are_known_to_lose():
    text = real_texts()[len(HARD)]
    lossless = [name for name in NAMES if name not in LOSSY]
    assert all(survives(text, name) for name in lossless) and not survives("in  the", "tok512")
    assert not survives("e\u0301", "qwen2") and survives("e\u0301", "llama3")
    alignment = check("so e\u0301 it is", *zip(real("qwen2"), real("gpt2")))
    assert alignment.dropped["normalized"] + alignment.dropped["unencodable"] == 4
    assert coverage(alignment)["bytes"] == 8 / 12
    # both write one space: the same bytes
    both = check("so  it is", *zip(real("t5"), real("tok512")))
    assert both.same_bytes.all() and both.chunk_bytes.sum() == 8


def trained(kind, texts):
    """A tokenizer of one kind, trained on the spot."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from isogloss import demo

    if kind == "bpe":
        return demo.byte_level_bpe(texts, 400)
    if kind == "unigram":
        return demo.unigram(texts, 400)
    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.train_from_iterator(texts, trainers.WordPieceTrainer(
            vocab_size=500, special_tokens=["[UNK]"], show_progress=False))
    else:
        letters = {c: i for i, c in enumerate(["[UNK]", *sorted(set("".join(texts)))])}
        backend = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.fixture(scope="module")
def zoo(texts):
    kinds = "bpe", "unigram", "wordpiece", "characters"
    tokenizers = {kind: trained(kind, texts[:200]) for kind in kinds}
    return {kind: (t, TokenTable.from_tokenizer(t)) for kind, t in tokenizers.items()}


def test_any_text_by_any_two_trained_tokenizers(zoo):
    letters = st.one_of(
        st.sampled_from("abet THE019 \n\t.,_-()'"), st.characters(exclude_categories=["Cs"]))

    @given(st.lists(letters, max_size=40).map("".join), st.sampled_from(list(permutations(zoo, 2))))
    @settings(max_examples=300, deadline=None)
    def holds(text, kinds):
        alignment = check(text, *zip(*[zoo[kind] for kind in kinds]))
        if set(kinds) == {"bpe", "unigram"} and "\u2581" not in text:
            assert coverage(alignment)["bytes"] == 1 or not text

    holds()


def test_the_sign_that_sentencepiece_writes_for_a_space(zoo):
    """U+2581 in a text comes back as a space: it counts as normalized, and nothing else does."""
    for text in ("\u2581", "the \u2581 value", "a\u2581b", "\u2581\u2581 the"):
        alignment = check(text, *zip(zoo["bpe"], zoo["unigram"]))
        lost = 3 * text.count("\u2581")
        assert alignment.dropped == {"normalized": lost, "unencodable": 0, "unmatched": 0}, text
        assert alignment.chunk_bytes.sum() == len(text.encode()) - lost


def test_wordpiece_words_carry_the_space_before_them(zoo):
    pair, tables = zip(zoo["wordpiece"], zoo["bpe"])
    alignment = check("the value of the index", pair, tables)
    assert coverage(alignment)["bytes"] == 1
    assert not alignment.same_bytes[0] and alignment.same_bytes[1:].all()
    assert check("The  value", pair, tables).dropped["normalized"] > 0  # lower case, two spaces


def test_the_end_of_text_pairs_up_and_an_added_space_is_marked(tokenizers, tables):
    text = "The value 201 is"
    ids = [[table.bos, *tokenizer(text)["input_ids"], table.eos]
           for tokenizer, table in zip(tokenizers, tables)]
    for alignment in (align(*ids, *tables), align(*ids, *tables, text)):
        last = len(alignment.chunk_bytes) - 1
        assert alignment.student_chunk[-1] == alignment.teacher_chunk[-1] == last
        assert alignment.student_chunk[0] == alignment.teacher_chunk[0] == -1
        assert alignment.chunk_bytes[-1] == 0 and alignment.chunk_bytes.sum() == len(text)
        assert alignment.text_bytes == len(text) and not any(alignment.dropped.values())
        # one side wrote " The"
        assert not alignment.same_bytes[0] and alignment.same_bytes[1:].all()
    both = align(ids[0], ids[0], tables[0], tables[0])  # both add it
    assert both.exact.all() and both.same_bytes.all()
    assert (both.student_chunk >= 0).sum() == len(ids[0]) - 1


def test_other_text_is_never_aligned(tokenizers, tables):
    texts = "good morning", "good evening"
    ids = [tokenizer(text)["input_ids"] for tokenizer, text in zip(tokenizers, texts)]
    for alignment in (align(*ids, *tables), align(*ids, *tables, texts[0])):
        assert (alignment.student_chunk == -1).all() and len(alignment.chunk_bytes) == 0
        assert alignment.dropped["unmatched"] == alignment.text_bytes >= 12
    nothing = align([], [], *tables)
    assert nothing.text_bytes == sum(nothing.dropped.values()) == 0
    assert align(ids[0], [], *tables).dropped["unmatched"] > 0


# --- sampled ids ----------------------------------------------------------------------------------

SAMPLED_TEXTS = "naïve café — 你好，世界 👩‍👩‍👧 e\u0301 x", "a😀b日本 ok", "𝒳𝒴𝒵"


def spellings(name):
    """Return {bytes: ids} of a real tokenizer's text tokens."""
    table = real(name)[1]
    ids_of = {}
    for i in range(len(table)):
        if not table.special[i] and table.lengths[i] > 0:
            ids_of.setdefault(table.bytes_of(i), []).append(i)
    return ids_of


def random_spelling(raw, ids_of, rng):
    """Return ids that spell these bytes, as a model might sample them; mostly not canonical."""
    ids = []
    begin = 0
    while begin < len(raw):
        sizes = [size for size in range(1, 9) if raw[begin : begin + size] in ids_of]
        size = rng.choice(sizes)
        ids.append(rng.choice(ids_of[raw[begin : begin + size]]))
        begin += size
    return ids


def complete_bytes(raw):
    """Return for every byte whether it belongs to a complete UTF-8 character."""
    complete = []
    for character in raw.decode(errors="surrogateescape"):  # other bytes become U+DC80 to U+DCFF
        size = len(character.encode(errors="surrogateescape"))
        complete += [not "\udc80" <= character <= "\udcff"] * size
    return complete


def check_sampled(ids, name):
    """Place ids in what their own tokenizer decodes them to; check every token by its bytes."""
    tokenizer, table = real(name)
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    located = locate(np.array(ids), table, text)
    assert located is not None, (name, tokenizer.convert_ids_to_tokens(ids), text)
    raw_text = text.encode()
    raw = b"".join(map(table.bytes_of, ids))
    complete = complete_bytes(raw)
    # one byte that is no character costs all of its neighbors that are byte tokens, too
    is_byte = [table.tokens[i].startswith("<0x") for i in ids]
    place = 0
    for k, i in enumerate(ids):
        spelled = table.bytes_of(i)
        is_complete = all(complete[place : place + len(spelled)])
        place += len(spelled)
        begin = int(located.begin[k])
        assert begin == (int(located.end[k - 1]) if k else 0)  # no gap, no overlap
        if located.kind[k] == EXACT:
            assert raw_text[begin : located.end[k]] == spelled
        else:
            assert not is_complete or is_byte[k] or (k == 0 and spelled[:1] == b" ")
    assert int(located.end[-1]) == len(raw_text)


FAMILIES = "llama2", "mistral_v7", "tok512", "gpt2", "llama3", "qwen2", "deepseek_coder"


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_ends_inside_a_character_keeps_its_place(name):
    """Random spellings, cut at every third token, with and without text behind the cut."""
    rng = random.Random(0)
    ids_of = spellings(name)
    end = random_spelling(b" and on", ids_of, rng)
    for text in SAMPLED_TEXTS:
        ids = random_spelling(text.encode(), ids_of, rng)
        for cut in range(1 + rng.randrange(3), len(ids) + 1, 3):
            check_sampled(ids[:cut], name)
            check_sampled(ids[:cut] + end, name)


# --- regions, coverage, view ----------------------------------------------------------------------


def located(begins, ends):
    return Located(np.array(begins), np.array(ends), np.zeros(len(begins), np.int8))


def test_regions_of_two_renderings():
    """A token that reaches over the border is left out; what ends the turn pairs up."""
    s = table_of([b"[U]", b"ab", b"c", b"d", b"<e>"], eos=4)
    t = table_of([b"> ", b"a", b"bc", b"d|", b"<x>"], eos=4)
    student = located((0, 3, 5, 6, 7), (3, 5, 6, 7, 10))
    teacher = located((0, 2, 3, 5, 7), (2, 3, 5, 7, 10))
    alignment = align_regions(
        np.arange(5), np.arange(5), student, teacher, [(3, 2, 4, (4, 4))], s, t)
    assert alignment.student_chunk.tolist() == alignment.teacher_chunk.tolist() == [-1, 0, 0, -1, 1]
    assert alignment.chunk_bytes.tolist() == [3, 0] and alignment.chunk_start.tolist() == [0, 4]
    assert alignment.dropped["normalized"] == 1 and alignment.text_bytes == 4


def test_coverage_counts():
    table = table_of([b"ab", b"c", b"a", b"b", b"d"])
    alignment = align([0, 1, 4], [2, 3, 1, 4], table, table)
    expected = {"bytes": 1, "student_tokens": 1, "teacher_tokens": 1, "chunks": 3, "1:1": 2 / 3,
                "1:n": 1 / 3, "n:1": 0, "n:m": 0, "normalized": 0, "unencodable": 0, "unmatched": 0}
    assert coverage(alignment) == expected
    half = coverage([alignment, align([0], [1], table, table)])
    assert half["unmatched"] == 2 / 6 and half["student_tokens"] == 3 / 4
    assert coverage([])["bytes"] == 0


def test_the_view_shows_every_token_once():
    table = table_of([b"ab", b"c", b"a", b"b", b" d", b"<x>"], eos=5)
    ids = [0, 1, 4, 5], [2, 3, 1, 4]
    alignment = align(*ids, table, table)
    top, bottom = view(alignment, *ids, table, table, color=False)
    assert top.split() == ["ab", "c", "·d", "b'<x>'"] and bottom.split() == ["a│b", "c", "·d"]
    assert "\x1b[31m" in view(alignment, *ids, table, table)[0]


TOKEN_OF_PAGE = re.compile(r'class="cell (\w+)"|class="token" title="([^"]*)">([^<]*)<')


def test_the_page_shows_every_token_once_and_runs_no_text():
    table = table_of([b"<b>", b"c", b"<", b"b>", b" d", b"&amp;"], eos=5)
    ids = [0, 1, 4, 5], [2, 3, 1, 4]
    page = html_page(align(*ids, table, table), *ids, table, table, title="</title><script>")
    assert "<script>" not in page and "<b>" not in page
    shown = []
    for color, title, text in TOKEN_OF_PAGE.findall(page):
        shown.append(color or f"{html.unescape(text)}: {title}")
    assert shown == [
        "even", "<b>: id 0, chunk 0", "<: id 2, chunk 0", "b>: id 3, chunk 0",
        "odd", "c: id 1, chunk 1", "c: id 1, chunk 1",
        "even", "·d: id 4, chunk 2", "·d: id 4, chunk 2",
        "dropped", "b'&amp;': id 5, in no chunk"]


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", None])
def test_tiktoken_encodings(end):
    import tiktoken

    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 256, b" a": 257}
    encoding = tiktoken.Encoding(
        "x", pat_str=r"\s?\S+|\s", mergeable_ranks=ranks,
        special_tokens={"<|end|>": 259} | ({end: 260} if end else {}))
    table = TokenTable.from_tokenizer(encoding)
    text = "ab ab é 日"
    assert table.decode(encoding.encode(text)) == text.encode() and table.bytes_of(258) == b""
    assert table.special[259] and table.end_of_turn == 259
    assert table.eos == (260 if end else -1)


def test_the_command_line_shows_chunks(tmp_path, tokenizers, capsys):
    for name, tokenizer in zip("ab", tokenizers):
        tokenizer.save_pretrained(tmp_path / name)
    page = tmp_path / "page.html"
    flags = ["--student", str(tmp_path / "a"), "--teacher", str(tmp_path / "b")]
    main([*flags, "--show", "the value", "--html", str(page)])
    for shown in (capsys.readouterr().out, page.read_text()):
        assert "bytes 100.0%" in shown and "·value" in shown
    with pytest.raises(SystemExit, match="usage"):
        main(flags)


def test_a_whole_text_is_shown_or_a_line_says_why_not(tmp_path, tokenizers, capsys, monkeypatch):
    backend = copy.deepcopy(tokenizers[0].backend_tokenizer)
    backend.save(str(tmp_path / "a.json"))
    backend.enable_truncation(1)
    backend.enable_padding(length=20)
    backend.save(str(tmp_path / "b.json"))  # with the settings of whoever saved it
    flags = ["--student", str(tmp_path / "a.json"), "--teacher", str(tmp_path / "b.json"), "--show"]
    main([*flags, "the value of it"])
    student, teacher, counts = capsys.readouterr().out.splitlines()
    assert student == teacher and "student_tokens 100.0%, teacher_tokens 100.0%" in counts
    with pytest.raises(SystemExit, match=r"--show: is not UTF-8 \(at character 3\)"):
        main([*flags, os.fsdecode("café".encode("latin-1"))])
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match="--show: the output is ascii, which lacks"):
        main([*flags, "café"])


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match="int is not a fast tokenizer: a tokenizer"):
        TokenTable.from_tokenizer(3)


@pytest.mark.parametrize("wrong, message", [
    ("--shows=a", "--shows: no such flag"),
    ("--student=nowhere/at/all", "--student nowhere/at/all: cannot be loaded ("),
    ("--student=folder", "--student folder: cannot be loaded (it holds no tokenizer.json"),
    ("--student=notes.txt", "--student notes.txt: cannot be loaded (expected value"),
])
def test_a_wrong_command_line_is_named(wrong, message, tmp_path, tokenizers, monkeypatch):
    tokenizers[0].save_pretrained(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("A text.")
    monkeypatch.chdir(tmp_path)
    flags = {"--student": "a", "--teacher": "a", "--show": "x"}
    flags |= dict([wrong.split("=")])
    with pytest.raises(SystemExit) as end:
        main([word for pair in flags.items() for word in pair])
    assert str(end.value).startswith(message) and "\n" not in str(end.value).split("usage")[0][:-1]


def test_tokens_of_a_chunk_are_neighbors():
    """A control token inside what would be a chunk leaves these bytes out."""
    s, t = table_of([b"a", b"b", b"<pad>", b"c"], pad=2), table_of([b"ab", b"c"])
    alignment = align([0, 2, 1, 3], [0, 1], s, t)
    chunks = alignment.student_chunk.tolist(), alignment.teacher_chunk.tolist()
    assert chunks == ([-1, -1, -1, 0], [-1, 0])
    assert alignment.dropped["unencodable"] == 2
    assert common_cut((alignment.student_chunk, alignment.teacher_chunk), (9, 9)) == [4, 2]
    check_turned(alignment, align([0, 1], [0, 2, 1, 3], t, s))


@pytest.mark.parametrize("limits, cuts, kept", [
    ((9, 9), [6, 4], [1, 2, 3]),  # of the first chunk no position predicts the first token
    ((5, 9), [5, 3], [1, 2]),
    ((9, 2), [4, 2], [1]),
    ((1, 9), [1, 4], []),  # no chunk fits on both sides
])
def test_a_text_is_cut_behind_a_chunk_and_keeps_whole_ones(limits, cuts, kept):
    s = table_of([b"a", b"b", b"c", b"d", b"e", b"f"])
    t = table_of([b"abc", b"d", b"e", b"f"])
    alignment = align(list(range(6)), list(range(4)), s, t)
    assert alignment.student_chunk.tolist() == [0, 0, 0, 1, 2, 3]
    found, chunks = cut_chunks(alignment, limits)
    assert found == cuts
    for chunk, size in zip(chunks, cuts):
        assert sorted(set(chunk[:size].tolist()) - {-1}) == kept


def test_a_character_begins_where_its_bytes_do():
    text = "a\x7f\x80é\u07ff\u0800€\uffff\U00010000😀z"
    expected = [len(text[:place].encode()) for place in range(len(text) + 1)]
    assert character_starts(text).tolist() == expected
