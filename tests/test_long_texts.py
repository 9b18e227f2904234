"""long_texts.py: without its tail, a long text gives the same tokens, chunks and labels."""

import copy
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from isogloss.data import texts as long_texts
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.order import Example
from isogloss.data.sample import TextEncoder
from isogloss.data.texts import BOUNDARY, MARGIN, leave_out_tails
from tokens import real

TOKENIZERS = ("deepseek_coder", "gpt2", "llama2", "llama3", "mistral_v7", "qwen2", "t5", "tok512")
ODD_PIECES = (
    "  two   spaces ", "\ttabs\t\t and\r\nlines\n\n  \n", "don't WE'LL x's ",
    "e\u0301te\u0301 \u0301 a", "12345 1.5e-3 ",
    "a \u2581b\u2581 c ", "<|endoftext|> </s> <s> <unk>", "\u65e5\u672c \u8a9e",
    "\U0001f469\u200d\U0001f467 ok ", "\ufb01ne \u2460 \u00bd x", "ODYSSEUS \u039f\u0394\u03a3 x",
    "n\u00a0b\u2003s\u200bz ", "print(  x )  # \u00fcber ", "\u0130 \u01c5 z ",
)
PLAIN = "The caf\u00e9 is in \u65e5\u672c, \u00fcber 20 \U0001f30b volcanoes long. "


def leave_out_tail(text, student, teachers):
    [read] = leave_out_tails([text], student, teachers)
    return read


def odd_text(seed, num_pieces=400):
    """Return a text of words and of all that tokenizers treat specially."""
    draw = random.Random(seed)
    words = Path(random.__file__).read_text().split()
    pieces = []
    for _ in range(num_pieces):
        odd = draw.random() < 0.3
        pieces.append(draw.choice(ODD_PIECES) if odd else draw.choice(words) + " ")
    return "".join(pieces)


def check_before_margin(tokenizer):
    """See that no token in front of MARGIN depends on what follows a boundary."""
    def encode(text):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    draw = random.Random(0)
    texts = [odd_text(seed) for seed in range(3)]
    texts.append(Path(random.__file__).read_text()[:9_000])
    for text in texts:
        whole = encode(text)
        boundaries = [match.end() for match in BOUNDARY.finditer(text)]
        for boundary in draw.sample(boundaries, 60):
            part = encode(text[:boundary])[:-MARGIN]
            assert whole[: len(part)] == part, text[boundary - 30 : boundary + 30]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_before_a_boundary_do_not_depend_on_the_rest(name):
    check_before_margin(real(name)[0])


@pytest.mark.parametrize("part", [
    normalizers.Replace(Regex("a (?=b)"), "c"),
    pre_tokenizers.UnicodeScripts(),  # joins a space to the letters before it
    pre_tokenizers.Split(Regex(r"\S+ (?=z)"), "isolated"),
    pre_tokenizers.Sequence([
        pre_tokenizers.Split(" ", "merged_with_previous"),  # pieces end behind a space
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "New York",
])
def test_parts_that_look_beyond_a_space_do_not_look_beyond_the_margin(tokenizers, part):
    """Normalizers, pre-tokenizers, and added tokens with a space in them."""
    student = copy.deepcopy(tokenizers[1])  # that of other tests stays as it is
    if isinstance(part, str):
        student.add_tokens([part])
    else:
        kind = "normalizer" if hasattr(part, "normalize") else "pre_tokenizer"
        setattr(student.backend_tokenizer, kind, part)
    check_before_margin(student)


def check_same(text, encoders, monkeypatch):
    """See that the Sample of a text is the same with its tail, but for what speaks of all of it.

    Returns:
        the sample.
    """
    collator = Collator(encoders[0], [PairOptions(encoder) for encoder in encoders[1:]])
    with monkeypatch.context() as patch:
        patch.setattr(long_texts, "CHARACTERS_PER_TOKEN", 10**9)
        whole, = collator.samples([Example(text)])
    cut, = collator.samples([Example(text)])
    rows = []
    for sample in (whole, cut):
        rows.append([*sample.student])
        for pair in sample.pairs:
            rows[-1] += [*pair.teacher, pair.student_chunk, pair.teacher_chunk, pair.aligned_bytes]
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one, other)
    return whole


def encoders_of(*names):
    return [TextEncoder(*real(name), 4096) for name in names]


@pytest.fixture
def from_few_characters(monkeypatch):
    """Cut texts of the size of a test."""
    monkeypatch.setattr(long_texts, "CHARACTERS_PER_TOKEN", 1)


@pytest.mark.parametrize(("student", "teachers"), [
    ("tok512", ["llama3"]), ("qwen2", ["llama2"]), ("llama3", ["qwen2", "mistral_v7"]),
    ("t5", ["gpt2"]), ("deepseek_coder", ["t5"]),
])
def test_samples_are_the_same_without_the_tail(student, teachers, from_few_characters, monkeypatch):
    encoders = encoders_of(student, *teachers)
    for encoder in encoders[::2]:  # usually a teacher has a longer context
        encoder.max_length = 60
    num_cut = 0
    for seed in range(24):
        text = odd_text(seed, 200)
        if seed % 2:  # bytes tell where the tokens of the beginning stand, not those of the tail
            text = PLAIN * 8 + text
        if seed % 3:
            text = unicodedata.normalize("NFC", text)
        num_cut += leave_out_tail(text, encoders[0], encoders[1:])[1] is not None
        check_same(text, encoders, monkeypatch)
    assert num_cut > 18


def test_a_beginning_without_a_chunk_is_read_with_its_tail(from_few_characters, monkeypatch):
    encoders = encoders_of("deepseek_coder", "llama3")
    encoders[0].max_length = 2
    # the teacher's first token is three of the student's
    text = "201" + " of some words" * 500
    assert len(leave_out_tail(text, encoders[0], encoders[1:])[0]) < 1000
    [pair] = check_same(text, encoders, monkeypatch).pairs
    assert pair.student_chunk.tolist() == [-1, -1]  # no part of a chunk
    assert len(pair.teacher.ids) > 500


def test_what_is_cut_and_what_is_not(tokenizers, tables):
    encoder = TextEncoder(tokenizers[0], tables[0], 60)

    def part_of(text, *teachers):
        part, ids = leave_out_tail(text, encoder, teachers)
        if ids is None:
            assert part is text
        else:
            np.testing.assert_array_equal(ids, encoder.encode([part])[0])
        return part

    text = "word " * 100_000
    enough = 60 + 2 + MARGIN  # one token more than positions, eos, and those that no sample reads
    assert len(part_of(text)) in range(4 * enough, 5 * enough + 1)
    spaces = "word" + " " * 9_000 + " word" * 9_000  # the first characters tell nothing
    assert len(part_of(spaces)) < 20_000
    no_boundary = "\u65e5\u672c" * 50_000
    assert part_of(no_boundary) is no_boundary
    encoder.max_length = 200_000  # more than the text has tokens
    assert part_of(text) is text
    encoder.max_length = 60
    teacher = copy.deepcopy(tokenizers[1])
    teacher.backend_tokenizer.model.dropout = 0.1  # it draws how it splits
    assert part_of(text, TextEncoder(teacher, tables[1], 60)) is text


def test_a_tail_that_nobody_reads_is_not_tokenized(tokenizers, tables, monkeypatch):
    """Neither side sees it, and the student's tokenizer reads the beginning once."""
    encoders = [TextEncoder(*side, 60) for side in zip(tokenizers, tables)]
    collator = Collator(encoders[0], [PairOptions(encoders[1])])
    num_read = {}
    for number, encoder in enumerate(encoders):
        def counted(texts, number=number, encode=encoder.encode):
            num_read[number] = num_read.get(number, 0) + sum(map(len, texts))
            return encode(texts)
        monkeypatch.setattr(encoder, "encode", counted)
    text = "A cat sat on the mat and saw a dog. " * 400
    collator.samples([Example(text)])
    part, _ = leave_out_tail(text, TextEncoder(tokenizers[0], tables[0], 60), [])
    assert num_read == {0: len(part), 1: len(part)}
    num_read.clear()
    answer = len(text) - 10  # of a completion nothing would be left to learn
    [sample] = collator.samples([Example(text, context=answer)])
    assert sample.has_labels
    assert num_read[1] == len(text)
