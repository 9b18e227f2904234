"""chat.py: two renderings of a chat meet message by message, and only there."""

import copy

import pytest

from isogloss.align import TokenTable
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.chat import (
    SkippedChat,
    bytes_of_messages,
    common_regions,
    encode_chat,
    find_parts,
    pair_chats,
    render,
)
from isogloss.data.sample import TextEncoder
from test_sample import spelled

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
WITH_CALLS = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endfor %}")
CHAT = [
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": " the value \n"},
    {"role": "user", "content": "assistant: the 201?"},
    {"role": "assistant", "content": "<think>\nlong\n</think>\n\nIt is the index."},
]
THOUGHT = "<think>\nlong\n</think>\n\n"
CHAT_WITH_CALLS = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"function": {"name": "look", "arguments": {"at": "the index"}}}]},
    {"role": "assistant", "content": "the index", "reasoning_content": "the value"},
]


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


def text_of(messages, encoder):
    return encoder.tokenizer.apply_chat_template(messages, tokenize=False)


def test_spans_hold_what_the_template_kept_of_each_message(encoders):
    """Contents like "user" and "assistant: the 201?" are not taken for headers."""
    # the line end of the third content is not the one that the teacher's template writes there
    chat = [*CHAT[:2], {"role": "user", "content": "é 日本 user\n"}, *CHAT[2:]]
    kept_by_student = [message["content"] for message in chat]
    kept_by_teacher = ["user", "the value", "é 日本 user", "assistant: the 201?",
                       "It is the index."]
    for encoder, kept in zip(encoders, (kept_by_student, kept_by_teacher)):
        data = text_of(chat, encoder).encode()
        rendering = render(chat, encoder)
        assert sorted(rendering.spans) == [(number, "content") for number in range(len(chat))]
        header_end = 0
        for number, content in enumerate(kept):
            span = rendering.spans[number, "content"]
            assert data[span.begin : span.begin + span.size] == content.encode()
            whole = chat[number]["content"].encode()
            assert whole[span.skipped :].startswith(content.encode())
            # the role stands between the message before and this one
            assert chat[number]["role"].encode() in data[header_end : span.begin]
            header_end = span.begin + span.size


def test_a_turn_ends_with_the_stop_token_right_behind_its_message(encoders):
    """The teacher's template ends the assistant's turns only."""
    stops = encoders[0].table.end_of_turn, encoders[1].table.eos
    for encoder, stop, messages in zip(encoders, stops, ([0, 1, 2, 3], [1, 3])):
        rendering = render(CHAT, encoder)
        assert sorted(rendering.ends) == messages
        for message, end in rendering.ends.items():
            assert rendering.ids[end] == stop
            span = rendering.spans[message, "content"]
            # the token before the stop is the last of the content
            assert rendering.located.end[end - 1] == span.begin + span.size


def test_reasoning_and_tool_calls_keep_their_place(tokenizers):
    encoders = with_templates(tokenizers, WITH_CALLS, WITH_CALLS)
    renderings = [render(CHAT_WITH_CALLS, encoder) for encoder in encoders]
    spans = renderings[0].spans
    order = sorted(spans, key=lambda key: spans[key])
    assert order == [(0, "content"), (1, (0, "name")), (1, (0, "arguments")), (2, "reasoning"),
                     (2, "content")]
    # a turn ends once, behind its last part
    assert [bool(ends) for *_, ends in common_regions(*renderings)] == [
        True, False, True, False, True]
    counts = collator(encoders, train_on="all")([CHAT_WITH_CALLS]).counts.pairs[0]
    size = len("look" "look" '{"at": "the index"}' "the index" "the value")
    assert counts.source_bytes == size == bytes_of_messages(CHAT_WITH_CALLS)
    assert counts.unmatched_bytes == 0


def test_parts_that_a_template_rewrote_are_not_found():
    def template(chat):
        return "".join(f"[{m['role']}]{m['content'].upper()}." for m in chat)

    chat = [{"role": "user", "content": "ABC"}, {"role": "user", "content": "abc"},
            {"role": "user", "content": "DEF"}]
    parts = find_parts(chat, template(chat), template)
    assert sorted(parts) == [(0, "content"), (2, "content")]
    assert parts[2, "content"].start == template(chat).index("DEF")


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
    assert counts.source_bytes == sum(len(message["content"]) for message in CHAT)
    assert counts.unmatched_bytes == len(" ") + len(" \n") + len(THOUGHT)
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
    """The teacher's template rewrites every message, so that none is found again byte by byte."""
    student, teacher = pair = encoders
    teacher.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content | replace('  ', ' ') | replace('first', 'very first') }}"
        "{{ eos_token }}\n{% endfor %}")
    chat = [{"role": "user", "content": "what is  the first value"},
            {"role": "assistant", "content": "the value  of the index is the first of the list"}]
    by_bytes = collator(pair)([chat])
    by_path = collator(pair, aligner="dp")([chat])
    assert by_bytes.counts.pairs[0].kd_terms == 0
    assert by_path.counts.tokens == by_bytes.counts.tokens > 0
    assert by_path.counts.pairs[0].kd_terms > 10
    shared = shared_bytes(pair, by_path)
    for words in (b" value", b" the index is the first of the list"):
        assert words in shared
    # Two spaces against one: the models give probabilities to other texts there.
    assert b"  " not in shared
    # The reply alone is learned, although the question is aligned too.
    renderings = [render(chat, encoder) for encoder in pair]
    alignment = pair_chats(chat, renderings, pair, "dp").alignment
    learned = encode_chat(chat, renderings[0], student, "assistant").learned
    assert (alignment.student_chunk[~learned] >= 0).any()
    assert b"what" not in shared


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
    # a teacher reads the whole rendering
    rendering = render(CHAT, encoders[1])
    teacher = batch.teachers[0]
    assert teacher.ids[0].tolist() == rendering.ids[:-1].tolist()
    assert teacher.labels[0].tolist() == rendering.ids[1:].tolist()
    num_bytes = encode_chat(CHAT, rendering, encoders[1]).num_bytes
    assert teacher.num_bytes[0].tolist() == num_bytes[1:].tolist()


def test_all_of_the_rendering_is_learned_on_request(encoders):
    rendering = render(CHAT, encoders[0])
    labels = collator(encoders, train_on="all")([CHAT]).student.labels[0]
    assert labels.tolist() == rendering.ids[1:].tolist()
    encoded = encode_chat(CHAT, rendering, encoders[0], "all")
    assert encoded.learned.all()
    special = encoders[0].table.special[rendering.ids]
    assert (encoded.num_bytes[special] == -1).all() and (encoded.num_bytes[~special] >= 0).all()
    size = len(text_of(CHAT, encoders[0]).encode())
    names = len(CHAT) * (len("<|im_start|>") + len("<|im_end|>"))
    assert encoded.num_bytes.clip(min=0).sum() == size - names


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
