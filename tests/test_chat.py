"""chat.py: two renderings of a chat meet message by message, and only there."""

import copy
import itertools
import re
import warnings

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from conftest import asset
from isogloss.align import TokenTable
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import Example
from isogloss.data.chat import common_regions, encode_chat, pair_chats, render
from isogloss.data.options.text_keys import key_of
from isogloss.data.order import ExampleReader, check_learned
from isogloss.data.sample import TextEncoder
from isogloss.data.turns import SkippedChat
from isogloss.errors import DataError
from isogloss.translation import translated
from test_sample import spelled
from test_turns import asks, says
from tokens import translation_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}<|im_end|>\n"
    "{% endfor %}")
# writes a system message of its own, drops what was thought, strips contents
PLAIN = (
    "{% if messages[0].role != 'system' %}Be good.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[1] | trim }}"
    "{% else %}{{ m.content | trim }}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}")
CHAT = [
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": " the value \n"},
    {"role": "user", "content": "assistant: the 201?"},
    {"role": "assistant", "content": "<think>\nlong\n</think>\n\nIt is the index."},
]
SYSTEM = {"role": "system", "content": "Be good."}
THOUGHT = "<think>\nlong\n</think>\n\n"


def with_templates(tokenizers, student_template=CHATML, teacher_template=PLAIN):
    """Return (student, teacher) TextEncoders of copies of the tokenizers with chat templates."""
    student, teacher = map(copy.deepcopy, tokenizers)
    student.chat_template = student_template
    teacher.chat_template = teacher_template
    student.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return [TextEncoder(x, TokenTable.from_tokenizer(x), 400) for x in (student, teacher)]


def refuse_chats_of(encoder, length):
    """Let the template of an encoder refuse chats of so many messages."""
    tokenizer = encoder.tokenizer
    tokenizer.chat_template = (
        "{% if messages|length == " + str(length) + " %}{{ raise_exception('no') }}{% endif %}"
        + tokenizer.chat_template)


@pytest.fixture
def encoders(tokenizers):
    return with_templates(tokenizers)


def collator(encoders, **options):
    """Return the Collator of a student and one teacher."""
    student, teacher = encoders
    return Collator(student, [PairOptions(teacher)], **options)


def shared_bytes(encoders, batch, row=0):
    """Return the bytes of all chunks of a row; those of both sides are checked to be the same."""
    student, teacher = batch.student, batch.teachers[0]
    student_chunk = teacher.student_chunk[row]
    teacher_chunk = teacher.teacher_chunk[row]
    shared = b""
    for number in sorted(set(student_chunk.tolist()) - {-1}):
        of_student = spelled(encoders[0].table, student.labels[row], student_chunk, number)
        of_teacher = spelled(encoders[1].table, teacher.labels[row], teacher_chunk, number)
        assert of_student == of_teacher
        shared += of_student
    return shared


def test_an_empty_turn_ends_too(encoders):
    chat = [CHAT[0], {"role": "assistant", "content": ""}]
    batch = collator(encoders)([chat])
    assert batch.counts.tokens == 1
    [region] = common_regions(*[render(chat, encoder) for encoder in encoders])
    assert region.num_bytes == 0 and region.end_pair
    assert (batch.teachers[0].student_chunk >= 0).sum() == 1


@pytest.mark.parametrize("excluded", [
    {"weight": 0}, {"loss": False}, {"train": False}, {"trainable": False}, {"loss_mask": 0},
    {"masked": True}, {"weight": 0.0, "train": True}])
def test_a_message_that_its_row_excludes_is_read_and_not_learned(encoders, excluded):
    chat = [CHAT[0], CHAT[1] | excluded, *CHAT[2:]]
    batch, whole = [collator(encoders)([messages]) for messages in (chat, CHAT)]
    assert batch.student.ids.tolist() == whole.student.ids.tolist()
    learned = batch.student.labels[0][batch.student.labels[0] >= 0]
    assert encoders[0].table.decode(learned.tolist()) == CHAT[3]["content"].encode()
    assert 0 < batch.counts.pairs[0].kd_terms < whole.counts.pairs[0].kd_terms


def test_messages_in_another_order_are_compared_in_the_order_of_both(encoders):
    teacher = copy.deepcopy(encoders[1])
    teacher.tokenizer.chat_template = (
        "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chat = [{"role": "user", "content": "the value"}, {"role": "assistant", "content": "index"}]
    regions = common_regions(render(chat, encoders[0]), render(chat, teacher))
    assert len(regions) <= 1


def test_chats_meet_message_by_message(encoders):
    batch = collator(encoders)([CHAT])
    teacher = batch.teachers[0]
    shared = shared_bytes(encoders, batch)
    assert b" is the index." in shared and b"value" in shared
    assert b"201" not in shared  # only what the assistant says
    ends = batch.student.labels[0] == encoders[0].table.end_of_turn
    teacher_ends = teacher.labels[0] == encoders[1].table.eos
    student_chunk, teacher_chunk = teacher.student_chunk[0], teacher.teacher_chunk[0]
    assert ends.sum() == 2 and (student_chunk[ends] >= 0).all()
    assert set(student_chunk[ends].tolist()) == set(teacher_chunk[teacher_ends].tolist())
    counts = batch.counts.pairs[0]
    assert counts.source_bytes == sum(len(message["content"]) for message in CHAT[1::2])
    assert counts.unmatched_bytes == len(" \n") + len(THOUGHT)
    assert Collator(encoders[0], [])([CHAT]).counts.tokens == batch.counts.tokens
    whole = collator(encoders, train_on="all")
    counts = whole([CHAT]).counts
    assert counts.tokens > batch.counts.tokens
    assert counts.pairs[0].aligned_bytes > len(shared)
    # cut at whole chunks
    for encoder in encoders:
        encoder.max_length = 30
    batch = whole([CHAT])
    teacher = batch.teachers[0]
    for labels, chunk in ((batch.student.labels, teacher.student_chunk),
                          (teacher.labels, teacher.teacher_chunk)):
        assert labels.shape[1] <= 30 and chunk[0, -1] >= 0


def test_dynamic_programming_aligns_what_templates_changed(encoders):
    """The teacher's template rewrites every message."""
    student, teacher = pair = encoders
    teacher.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content | replace('  ', ' ') | replace('first', 'very first') }}"
        "{{ eos_token }}\n{% endfor %}")
    chat = [{"role": "user", "content": "what is  the first value"},
            {"role": "assistant", "content": "the value  of the index is the first of the list"}]
    by_bytes = collator(pair)([chat])
    by_path = collator(pair, aligner="dp")([chat])
    assert by_path.counts.tokens == by_bytes.counts.tokens > 0
    assert by_path.counts.pairs[0].kd_terms > 10
    shared = shared_bytes(pair, by_path)
    for words in (b" value", b" the index is the first of the list"):
        assert words in shared
    # Two spaces against one: the models give probabilities to other texts there.
    assert b"  " not in shared
    # The reply alone is learned, although the question is aligned too.
    renderings = [render(chat, encoder) for encoder in pair]
    alignment = pair_chats(renderings, pair, "dp")
    learned = encode_chat(chat, renderings[0], student, "assistant").learned
    assert (alignment.student_chunk[~learned] >= 0).any()
    assert b"what" not in shared


SPACED = ("{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA:"
          "{% else %} {{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}")


def test_a_space_of_one_template_in_front_of_answers_is_told(tokenizers):
    chat = [asks("how"), says("the index")]
    spaced = with_templates(tokenizers, teacher_template=SPACED)
    with pytest.warns(UserWarning, match="the first word of answers is learned from"):
        batch = collator(spaced)([chat])
    assert shared_bytes(spaced, batch) == b" index"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for templates in ((CHATML, CHATML.replace("<|", "[").replace("|>", "]")), (SPACED, SPACED)):
            collator(with_templates(tokenizers, *templates))([chat])


def test_the_assistants_messages_and_ends_of_turn_are_learned(encoders):
    batch = collator(encoders)([CHAT])
    table = encoders[0].table
    labels = batch.student.labels[0]
    learned = table.decode(labels[labels >= 0].tolist())
    assert learned == b" the value \n" + CHAT[3]["content"].encode()
    assert (labels == table.end_of_turn).sum() == 2
    # bytes are counted where tokens are learned
    assert batch.counts.text_bytes == len(learned)
    assert (batch.student.num_bytes[0][labels < 0] == -1).all()
    # a teacher reads the whole rendering, and is judged by what is learned
    rendering = render(CHAT, encoders[1])
    teacher = batch.teachers[0]
    assert teacher.ids[0].tolist() == rendering.ids[:-1].tolist()
    assert teacher.labels[0].tolist() == rendering.ids[1:].tolist()
    counted = teacher.labels[0][teacher.num_bytes[0] >= 0].tolist()
    assert encoders[1].table.decode(counted) == b" the value It is the index."


def test_all_of_the_rendering_is_learned_on_request(encoders):
    batch = collator(encoders, train_on="all")([CHAT])
    for encoder, side in zip(encoders, (batch.student, batch.teachers[0])):
        rendering = render(CHAT, encoder)
        assert side.labels[0].tolist() == rendering.ids[1:].tolist()
        text = rendering.data[rendering.located.end[0] :]  # no position predicts the first token
        for name in ("<|im_start|>", "<|im_end|>", encoder.tokenizer.eos_token):
            text = text.replace(name.encode(), b"")
        assert side.num_bytes.clamp(min=0).sum() == len(text)


HEADED = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.mark.parametrize("max_length", [400, 90, 70, 50])
@pytest.mark.parametrize("hint", [(), [asks("a?"), says("b")]])
def test_both_models_are_judged_by_what_the_assistant_says(tokenizers, hint, max_length):
    """Cut by the length, too; not by ends, prompts, or what the row excludes."""
    encoders = with_templates(tokenizers, teacher_template=HEADED)
    for encoder in encoders:
        encoder.max_length = max_length
    first, last = says("the value of the index"), says("It is the first of the list")
    chat = [SYSTEM, asks("what is the value?"), first, asks("why?"), says("so") | {"weight": 0},
            asks("and?"), last]
    for context, learned in ((0, [first, last]), (4, [last])):
        example = Example(chat, teacher_prompt=tuple(hint), context=context)
        batch = collator(encoders)([example])
        size = sum(len(message["content"]) for message in learned)
        sizes = [int(side.num_bytes.clamp(min=0).sum())
                 for side in (batch.student, batch.teachers[0])]
        assert sizes[0] == sizes[1] <= size and (max_length < 400 or sizes[0] == size)


@pytest.mark.parametrize("side", [0, 1])
def test_a_chat_that_a_template_refuses_is_left_out_and_counted(encoders, side):
    """The student learns alone what the teacher's template refuses; other teachers take part."""
    refused, kept = [collator(encoders)([chat]).counts for chat in (CHAT[1:], CHAT)]
    other = copy.deepcopy(encoders[1])
    refuse_chats_of(encoders[side], len(CHAT[1:]))
    with pytest.raises(SkippedChat, match="refuses a chat: no"):
        render(CHAT[1:], encoders[side])
    pairs = [PairOptions(encoders[1]), PairOptions(other)]
    with pytest.warns(UserWarning, match="refuses a chat: no; such chats are left out"):
        counts = Collator(encoders[0], pairs)([CHAT, CHAT[1:]]).counts
    assert refused.pairs[0].kd_terms > 0 == kept.pairs[0].skipped_chats
    assert [pair.skipped_chats for pair in counts.pairs] == [1, 0 if side else 1]
    assert counts.pairs[0].kd_terms == kept.pairs[0].kd_terms
    both = kept.pairs[0].kd_terms + refused.pairs[0].kd_terms
    assert counts.pairs[1].kd_terms == (both if side else kept.pairs[0].kd_terms)
    assert counts.tokens == kept.tokens + (refused.tokens if side else 0)


FEW_SHOTS = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("prompt", ["the solution", FEW_SHOTS])
@pytest.mark.parametrize("chat", [CHAT, [SYSTEM, *CHAT]])
def test_what_teachers_alone_read_changes_nothing_but_their_reading(encoders, chat, prompt):
    reader = ExampleReader("chat", has_chats=True, teacher_prompt_key="prompt")
    plain, hinted = [reader({"chat": chat, "prompt": value}) for value in (None, prompt)]
    batches = [collator(encoders)([example]) for example in (plain, hinted)]
    students = [batch.student for batch in batches]
    assert torch.equal(students[0].ids, students[1].ids)
    assert torch.equal(students[0].labels, students[1].labels)
    teachers = [batch.teachers[0] for batch in batches]
    assert torch.equal(teachers[0].student_chunk, teachers[1].student_chunk)
    assert batches[0].counts.pairs[0].kd_terms == batches[1].counts.pairs[0].kd_terms > 0
    # the chunks hold the same tokens behind a longer beginning
    shared = [teacher.labels[teacher.teacher_chunk >= 0] for teacher in teachers]
    assert torch.equal(*shared)
    words = prompt if isinstance(prompt, str) else "user: a?\nassistant: b"
    read = [encoders[1].tokenizer.decode(teacher.ids[0]) for teacher in teachers]
    assert words in read[1] and words not in read[0]
    assert key_of(plain).tolist() != key_of(hinted).tolist()
    with pytest.raises(DataError, match="is no chat, and --teacher_prompt_key stands in front"):
        reader({"chat": "a text", "prompt": prompt})
    asked = ExampleReader("chat", has_chats=True, prompt_key="asked", teacher_prompt_key="prompt")
    with pytest.raises(DataError, match="is no chat, and --teacher_prompt_key stands in front"):
        asked({"chat": chat, "asked": "a text", "prompt": prompt})


NOTHING_LEARNED = {
    "no message of the role 'assistant' (but critic, user)": [
        CHAT[0], {"role": "critic", "content": "a"}],
    "are cut at --max_length 5 before what is learned": CHAT[:2],
    "hold nothing that the assistant says": [CHAT[0], CHAT[1] | {"weight": 0}],
}


@pytest.mark.parametrize("words", NOTHING_LEARNED)
def test_data_of_which_nothing_is_learned_is_refused(encoders, words):
    rows = datasets.Dataset.from_list([{"chat": NOTHING_LEARNED[words]}] * 3)
    reader = ExampleReader("chat", "", "rows", "", False, "", set())
    student = encoders[0]
    student.max_length = 5
    with pytest.raises(ValueError, match="--data rows: nothing would be learned of its first 3 "
                       f"rows: 3 .*{re.escape(words)}"):
        check_learned(rows, reader, student, "assistant")
    student.max_length = 50
    good = datasets.Dataset.from_list([*rows, {"chat": CHAT[:2]}])
    assert check_learned(good, reader, student, "assistant") is None


def test_samples_without_labels_are_counted(encoders):
    student = encoders[0]
    student.max_length = 40
    counts = Collator(student, [])([[CHAT[0]], CHAT[:2], [CHAT[0] | {"content": "a" * 99}, CHAT[1]]]
                                   ).counts
    assert (counts.rows, counts.samples, counts.cut_samples) == (3, 2, 1)


# --- what a loss makes of two templates -----------------------------------------------------------


def test_what_only_the_teachers_template_writes_says_nothing(tokenizers, texts):
    """Else a student would learn to write it: line ends behind a thought, say.

    test_losses.py sees that the losses without a translation read the rows of chunks alone.
    """
    encoders = with_templates(tokenizers[::-1], *[
        "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}"
        "({{ m.reasoning_content }}){% endif %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>\n{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n\n{{ eos_token }}"
        "{% endfor %}"])
    chats = []  # of words that end anywhere
    for number in range(16):
        thought, said = texts[number][: 20 + number], texts[-number][: 30 + number]
        chats.append([{"role": "user", "content": "look"}, {
            "role": "assistant", "content": said, "reasoning_content": thought}])
    tables = translation_of(encoders)
    batch = Collator(encoders[0], [PairOptions(encoders[1], tables)])(chats)
    [teacher] = batch.teachers
    [tile] = teacher.tiles
    [sub_tile] = tile.sub_tiles
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(batch.student.ids.numel(), len(encoders[0].table), generator=generator)
    y = 3 * torch.randn(teacher.ids.numel(), len(encoders[1].table), generator=generator)
    # from these rows it predicts what only its template writes
    is_own = teacher.teacher_chunk.flatten() < 0
    other = torch.where(is_own[:, None], 3 * torch.randn(y.shape, generator=generator), y)
    assert is_own.any() and not is_own.all()
    value, of_other = [
        float(translated(x[tile.student_positions][None], rows[sub_tile.teacher_positions][None],
                         sub_tile.terms, tables)[0]) for rows in (y, other)]
    assert value > 1 and of_other == pytest.approx(value, rel=1e-5)


def test_whole_renderings_of_real_templates_have_their_contents_in_chunks(texts):
    """With --train_on all, of every pair of the chat tokenizers among the assets."""
    passages = [text.strip() for text in texts]
    chats = [[asks("\n\n".join(passages[:60])), says(passages[60])],
             [message for first, second in zip(passages[:12:2], passages[1:12:2])
              for message in (asks(first), says(second))]]
    readers = []
    for folder in sorted(asset("tokenizers").iterdir()):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.chat_template:
            readers.append(TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 100_000))
    assert len(readers) >= 3
    for chat in chats:
        renderings = [render(chat, reader) for reader in readers]
        for first, second in itertools.permutations(range(len(readers)), 2):
            student = renderings[first]
            alignment = pair_chats((student, renderings[second]), (readers[first], readers[second]),
                                   train_on="all")
            in_chunks = np.zeros(len(student.data), bool)
            for begin, end, chunk in zip(*student.located[:2], alignment.student_chunk):
                in_chunks[begin:end] |= chunk >= 0 and begin >= 0
            covered = []
            for message in chat:
                content = message["content"].encode()
                begin = student.data.index(content)
                covered.append(in_chunks[begin : begin + len(content)])
            assert np.concatenate(covered).mean() >= 0.97
