"""sample.py: both models read the same bytes, and every position speaks of the token after it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import normalizers, processors

from isogloss.align import TokenTable
from isogloss.data.sample import (
    NO_TOKENS,
    Pairing,
    TextEncoder,
    bytes_of_tokens,
    cut_sample,
    encode_text,
    pair_texts,
)


def read(text, encoder):
    """Return the EncodedText of a text."""
    return encode_text(text, encoder.encode([text])[0], encoder)


def sample_of(text, student, teachers):
    """Return the Sample of a text; a teacher that is None takes no part."""
    encoded = read(text, student)
    pairings = []
    for teacher in teachers:
        pairings.append(Pairing() if teacher is None else pair_texts(
            text, encoded, read(text, teacher), student.table, teacher.table))
    limits = [400 if teacher is None else teacher.max_length for teacher in teachers]
    return cut_sample(encoded, pairings, student.max_length, limits)


def spelled(table, labels, chunk, number):
    """Return the bytes that the labels of a chunk spell, without control tokens."""
    pieces = [table.bytes_of(i) for i in labels[chunk == number].tolist() if not table.special[i]]
    return b"".join(pieces)


def changed(encoder, tokenizer=None, **roles):
    """Return a copy of an encoder with another tokenizer or other roles of its table."""
    table = copy.copy(encoder.table)
    for name, value in roles.items():
        setattr(table, name, value)
    return TextEncoder(tokenizer or encoder.tokenizer, table, encoder.max_length)


def at_most(encoder, max_length):
    """Return the encoder with another maximum length."""
    return replace(encoder, max_length=max_length)


def lower_casing(tokenizer):
    """Return a copy of a tokenizer that lower-cases all text."""
    tokenizer = copy.deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    return tokenizer


def test_bos_and_eos_are_added_where_the_tokenizer_has_them(encoders, texts):
    for encoder in encoders:
        table = encoder.table
        plain = encoder.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        assert encoder.encode(texts[:1])[0].tolist() == [table.bos, *plain, table.eos]
        assert changed(encoder, bos=-1).encode(texts[:1])[0].tolist() == [*plain, table.eos]
        assert changed(encoder, eos=-1).encode(texts[:1])[0].tolist() == [table.bos, *plain]
        refusing = copy.deepcopy(encoder.tokenizer)
        refusing.init_kwargs["add_bos_token"] = False
        ids = changed(encoder, refusing).encode(texts[:1])[0]
        assert ids.tolist() == [*plain, table.eos]


def test_a_text_that_has_its_own_bos_and_eos_gets_no_other_ones(encoders, texts):
    """Rendered texts of other tools hold them; twice, the student would learn to write two."""
    encoder = encoders[0]
    bos, eos = encoder.tokenizer.bos_token, encoder.tokenizer.eos_token
    whole = encoder.encode(texts[:1])[0].tolist()
    for text in (bos + texts[0], texts[0] + eos, bos + texts[0] + eos):
        assert encoder.encode([text])[0].tolist() == whole
        located = encoder.locate(np.array(whole), text)
        assert len(located.begin) == len(whole) == len(encoder._offsets(text))
    assert encoder.encode(["", bos])[1].tolist() == encoder.encode([""])[0].tolist()


# {chat template: bos begins a plain text}, bos being <|im_start|>, which the tokenizer adds not
BOS_OF_TEMPLATES = {
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] }}{% endfor %}": False,
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}": False,
    "{{ '<|im_start|>assistant\n' }}": False,
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role }}{% endfor %}": False,
    "{{ '<|im_start|>' }}{% for m in messages %}{{ '[' + m['role'] + ']' }}{% endfor %}": True,
    "<|im_start|>{% if messages[0]['role'] == 'system' %}{{ messages[0] }}{% endif %}": True,
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}": True,
}


@pytest.mark.parametrize("template", BOS_OF_TEMPLATES)
def test_the_header_of_a_turn_does_not_begin_a_plain_text(encoders, template):
    tokenizer = copy.deepcopy(encoders[0].tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    tokenizer.chat_template = template
    bos = tokenizer.bos_token_id
    plain = tokenizer("a b", add_special_tokens=False)["input_ids"]
    assert tokenizer("a b")["input_ids"][:1] != [bos]
    table = TokenTable.from_tokenizer(tokenizer)
    assert table.bos == bos
    prefix = [bos] if BOS_OF_TEMPLATES[template] else []
    encoder = TextEncoder(tokenizer, table, 9)
    assert encoder.encode(["a b"])[0].tolist() == [*prefix, *plain, table.eos]
    assert len(encoder.locate(encoder.encode(["a b"])[0], "a b").begin) == len(prefix + plain) + 1
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    encoder = TextEncoder(tokenizer, table, 9)
    assert encoder.encode(["a b"])[0].tolist() == [bos, *plain, table.eos]  # it adds one itself


@pytest.mark.parametrize("bos", [True, False])
def test_offsets_locate_what_the_bytes_do_not(encoders, bos):
    """A tokenizer that lower-cases: its tokens stand for the text as it was written."""
    text = "The Upper value"
    encoder = changed(encoders[0], lower_casing(encoders[0].tokenizer))
    if not bos:
        encoder = changed(encoder, bos=-1)
    ids = encoder.encode([text])[0]
    located = encoder.locate(ids, text)
    assert len(located.begin) == len(ids)
    covered = b""
    for i, begin, end in zip(ids.tolist(), located.begin, located.end):
        if encoder.table.special[i]:
            assert begin == -1
            continue
        stands_for = text.encode()[begin:end]
        piece = encoder.table.bytes_of(i)
        assert stands_for.lower() in (piece, piece[1:])  # without the space before the text
        covered += stands_for
    assert covered.replace(b" ", b"") == text.encode().replace(b" ", b"")


def test_bytes_count_the_text_once(encoders):
    """The space that SentencePiece puts before a text is none of its bytes; eos has none."""
    for text in ("the value of the index", " leading", "", "é"):
        sample = sample_of(text, encoders[0], [encoders[1]])
        for row in (sample.student, sample.pairs[0].teacher):
            assert row.num_bytes.clip(min=0).sum() == len(text.encode()), text
            assert row.num_bytes[-1] == -1


def test_labels_bytes_and_chunks_are_those_of_the_predicted_token(encoders, texts):
    student, teacher = encoders
    for text in texts[:6]:
        sample = sample_of(text, student, [teacher])
        pair = sample.pairs[0]
        for row, encoder in ((sample.student, student), (pair.teacher, teacher)):
            ids = encoder.encode([text])[0]
            assert np.array_equal(row.ids, ids[:-1])
            assert np.array_equal(row.labels, ids[1:])
            located = encoder.locate(ids, text)
            assert np.array_equal(row.num_bytes, bytes_of_tokens(located)[1:])
        numbers = set(pair.student_chunk.tolist()) - {-1}
        assert numbers == set(pair.teacher_chunk.tolist()) - {-1}
        aligned = 0
        for number in numbers:
            pieces = spelled(student.table, sample.student.labels, pair.student_chunk, number)
            assert pieces == spelled(
                teacher.table, pair.teacher.labels, pair.teacher_chunk, number)
            aligned += sample.student.num_bytes[pair.student_chunk == number].clip(min=0).sum()
        assert pair.aligned_bytes == aligned
        assert pair.num_chunk_ids == max(numbers) + 1


def test_without_bos_the_first_chunk_has_no_predictor(encoders, texts):
    whole = encoders[1]
    for teacher, first in ((whole, 0), (changed(whole, bos=-1), 1)):
        sample = sample_of(texts[0], whole, [teacher])
        pair = sample.pairs[0]
        for chunk in (pair.student_chunk, pair.teacher_chunk):
            assert chunk[chunk >= 0].min() == first
    teacher_bytes = pair.teacher.num_bytes.clip(min=0).sum()
    assert teacher_bytes < sample.student.num_bytes.clip(min=0).sum()


def test_both_models_are_cut_at_the_same_byte(encoders, texts):
    text = " ".join(texts[:5])
    student, teacher = [at_most(encoder, 4000) for encoder in encoders]
    whole = sample_of(text, student, [teacher]).pairs[0]
    for lengths in ((40, 400), (400, 25), (33, 30)):
        student, teacher = map(at_most, encoders, lengths)
        sample = sample_of(text, student, [teacher])
        pair = sample.pairs[0]
        kept = []
        for row, chunk, encoder in ((sample.student, pair.student_chunk, student),
                                    (pair.teacher, pair.teacher_chunk, teacher)):
            assert len(row.ids) == len(row.labels) <= encoder.max_length
            assert encoder.table.eos not in row.labels
            kept.append(encoder.table.decode(row.labels.tolist()).lstrip())
            assert chunk[-1] >= 0  # no unaligned tail
            assert row.num_bytes.clip(min=0).sum() == len(kept[0])
        assert kept[0] == kept[1] and text.encode().startswith(kept[0])
        # the next chunk would not have fit
        following = whole.student_chunk[len(sample.student.ids) :]
        next_chunk = following[following >= 0][0]
        ends = [np.flatnonzero(chunk == next_chunk)[-1] + 1
                for chunk in (whole.student_chunk, whole.teacher_chunk)]
        assert ends[0] > student.max_length or ends[1] > teacher.max_length


def test_all_teachers_see_the_shortest_cut(encoders, texts):
    """As short as the shortest asks for, not shorter; who takes no part asks for nothing."""
    student, teacher = encoders
    text = " ".join(texts[:3])
    expected = sample_of(text, student, [at_most(teacher, 60)])
    for lengths in ((300, 60, 90), (60, None), (None, 60)):
        teachers = [length and at_most(teacher, length) for length in lengths]
        sample = sample_of(text, student, teachers)
        assert np.array_equal(sample.student.labels, expected.student.labels)
        for length, pair in zip(lengths, sample.pairs):
            if length is None:
                assert pair.teacher == NO_TOKENS and (pair.student_chunk == -1).all()
                assert len(pair.student_chunk) == len(sample.student.labels)
                continue
            assert np.array_equal(pair.student_chunk, expected.pairs[0].student_chunk)
            assert np.array_equal(pair.teacher.labels, expected.pairs[0].teacher.labels)
            assert pair.aligned_bytes == expected.pairs[0].aligned_bytes


def test_a_text_without_a_teacher_is_cut_at_the_maximum_length(encoders, texts):
    text = " ".join(texts[:3])
    ids = encoders[0].encode([text])[0]
    for teachers in ([], [None]):
        sample = sample_of(text, at_most(encoders[0], 50), teachers)
        assert np.array_equal(sample.student.ids, ids[:50])
        assert np.array_equal(sample.student.labels, ids[1:51])
        whole = sample_of(text, at_most(encoders[0], 4000), teachers)
        assert np.array_equal(whole.student.labels, ids[1:])
