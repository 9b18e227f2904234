"""Render a chat by each model's own template and align what the two renderings have in common.

Two templates write different headers around the same messages, so spans are aligned message by
message, inside the content only, and the end of a turn by its role.
"""

import json
import re
from dataclasses import dataclass

import numpy as np

from isogloss.align import Located, Region, align_regions, character_starts, locate
from isogloss.align_dp import align_dp
from isogloss.data.long_texts import MOST_CHARACTERS, check_size, fits
from isogloss.data.sample import EncodedText, Pairing, bytes_of_tokens


class SkippedChat(ValueError):
    """Say that a chat template does not render a chat."""


@dataclass
class Rendering:
    """Hold a chat as one model's template writes it.

    Attributes:
        ids: (S,) int64.
        located: where in the rendering the tokens stand.
        spans: {(message, part): Span}, what the template kept of each part of each message; part:
            "content", "reasoning" or (number, "name" or "arguments") of a tool call.
        ends: {message: token that ends its turn}.
    """

    ids: np.ndarray
    located: Located
    spans: dict
    ends: dict


@dataclass(frozen=True, order=True)
class Span:
    """Tell where a rendering holds a part of a message.

    Attributes:
        begin: byte of the rendering.
        skipped: bytes of the part that the template left out before it.
        size: bytes that the template kept.
    """

    begin: int
    skipped: int
    size: int


def render(messages, encoder, tools=None):
    """Write a chat by a model's template and find its messages again.

    Args:
        tools: list of objects that describe what the assistant may call; None: there are none.
    Raises:
        SkippedChat: the template does not render it.
    """
    def template(chat):
        try:
            return encoder.tokenizer.apply_chat_template(
                chat, tools=tools, tokenize=False, **encoder.template_kwargs)
        except Exception as error:  # templates raise whatever they like
            name = encoder.tokenizer.name_or_path
            raise SkippedChat(f"the chat template of {name} refuses a chat: {error}") from None

    text = template(messages)
    if not fits(text):
        raise SkippedChat(f"the chat template of {encoder.tokenizer.name_or_path} writes "
                          f"{len(text)} characters of a chat; a tokenizer takes up to "
                          f"{MOST_CHARACTERS}")
    ids, located = read_rendering(text, encoder)
    # Parts are found as characters; tokens are located as bytes.
    byte_of_character = character_starts(text)
    spans = {}
    for key, kept in find_parts(messages, text, template).items():
        begin = int(byte_of_character[kept.start])
        spans[key] = Span(begin, len(kept.before.encode()), len(kept.text.encode()))
    return Rendering(ids, located, spans, _turn_ends(ids, located, spans, encoder.table))


def read_rendering(text, encoder):
    """Return the tokens of what a chat template wrote, and where in it they stand, as a Located."""
    check_size(text)
    # A rendering holds its own bos and eos, if the template writes them.
    coded = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True,
                              verbose=False)
    encoder.check_ids(coded["input_ids"])
    ids = np.array(coded["input_ids"], np.int64)
    return ids, locate(ids, encoder.table, text, coded["offset_mapping"])


def _turn_ends(ids, located, spans, table):
    """Return {message: token that ends its turn}: the first token behind it, if that is a stop."""
    stop_ids = {table.eos, table.end_of_turn} - {-1}
    # A message may have several parts, and its turn ends behind the last of them.
    end_of_message = {}
    for (message, _), span in spans.items():
        end = span.begin + span.size
        end_of_message[message] = max(end, end_of_message.get(message, 0))
    ends = {}
    for message, end in end_of_message.items():
        after = np.flatnonzero(located.begin >= end)
        # Line ends or another header behind a message are no end of turn.
        if len(after) and int(ids[after[0]]) in stop_ids:
            ends[message] = int(after[0])
    return ends


@dataclass
class KeptText:
    """Hold a part of a message in a rendering.

    Attributes:
        start: character of the rendering.
        before: what the template cut off in front.
        text: what it kept.
    """

    start: int
    before: str
    text: str


MARK = "\ue000{}\ue001"  # of Unicode's private use area, so it is in no chat


def find_parts(messages, text, template):
    """Find the parts of each message in a rendering.

    A second rendering with marks instead of contents tells what the template writes around them,
    so a content like "user" is not mistaken for a header.  What the template rewrote is not found.

    Returns:
        {(message, part): KeptText}.
    """
    marked = []
    for number, message in enumerate(messages):
        if message.get("content"):  # a message of tool calls alone has none
            message = dict(message, content=MARK.format(number))
        marked.append(message)
    # [text, number, text, number, ..., text]; a template may leave out messages, or move them
    skeleton = re.split(MARK.format(r"(\d+)"), template(marked))
    parts = {}
    position = 0
    for before, number, after in zip(skeleton[::2], skeleton[1::2], skeleton[2::2]):
        start = text.find(before, position)
        if start < 0:  # the marks changed what stands around them; look for the next message
            continue
        position = start + len(before)
        content = messages[int(number)]["content"]
        for form in _forms_of(content):
            # with what follows it, so that the form is all that the template wrote
            if form and text.startswith(form + after, position):
                skipped = content[: content.rindex(form)]
                parts[int(number), "content"] = KeptText(position, skipped, form)
                position += len(form)
                break
    _find_other_parts(messages, text, parts)
    return parts


def _forms_of(content):
    """List the forms in which templates write a content: stripped, and without what was thought."""
    forms = [content, content.strip(), content.rstrip(), content.lstrip()]
    # Templates of reasoning models drop the thoughts of earlier turns, up to this tag.
    thought, _, answer = content.rpartition("</think>")
    if thought:
        forms += [answer, answer.strip()]
    return forms


def _find_other_parts(messages, text, parts):
    """Add reasoning and tool calls, which stand between the contents of a message's neighbors."""
    contents = [(number, kept) for (number, _), kept in parts.items()]
    for number, message in enumerate(messages):
        # The same name or argument may occur in other messages too, so the search is bounded.
        low = 0
        high = len(text)
        for other, kept in contents:
            if other < number:
                low = max(low, kept.start + len(kept.text))
            elif other > number:
                high = min(high, kept.start)
        for key, wanted in other_parts(message):
            start = text.find(wanted, low, high)
            if wanted and start >= 0:
                parts[number, key] = KeptText(start, "", wanted)
                # calls of one function repeat its name: the next one stands behind
                low = start + len(wanted)


def other_parts(message):
    """Yield (key, text) of what a message holds beside its content."""
    yield "reasoning", (message.get("reasoning_content") or "").strip()
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function", call)  # some data sets leave the wrapper out
        yield (number, "name"), function.get("name", "")
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):  # written as templates' `tojson` does
            arguments = json.dumps(arguments, ensure_ascii=False)
        yield (number, "arguments"), arguments


def bytes_of_messages(messages):
    """Count the bytes of all parts of all messages."""
    total = 0
    for message in messages:
        total += len((message.get("content") or "").encode())
        # a dict, as `find_parts` keeps one text per key
        for text in dict(other_parts(message)).values():
            total += len(text.encode())
    return total


def encode_chat(messages, rendering, encoder, train_on=None, context=0):
    """Return the EncodedText of a rendered chat.

    Args:
        rendering: Rendering.
        train_on: of the student: "assistant": learn what the assistant says, and to end its turn;
            "all": the whole rendering.  None: the reading of a teacher.
        context: messages at the beginning from which nothing is learned, and of which no byte
            counts.
    """
    num_bytes = bytes_of_tokens(rendering.located)
    # Control tokens stand for their names in a rendering, which are no bytes of the chat.
    num_bytes[encoder.table.special[rendering.ids]] = -1
    if train_on is None:
        num_bytes = np.where(_tokens_behind(context, rendering), num_bytes, -1)
        return EncodedText(rendering.ids, rendering.located, num_bytes)
    if train_on == "assistant":
        learned = _assistant_tokens(messages, rendering, context)
    else:
        learned = _tokens_behind(context, rendering)
    num_bytes = np.where(learned, num_bytes, -1)
    return EncodedText(rendering.ids, rendering.located, num_bytes, learned)


def _assistant_tokens(messages, rendering, context):
    """Return (S,) bool: tokens of the assistant's messages and of the ends of its turns."""
    learned = np.zeros(len(rendering.ids), bool)
    located = rendering.located
    is_learned = []
    for number, message in enumerate(messages):
        is_learned.append(message["role"] == "assistant" and number >= context)
    # Ends of turns are learned, else the student would never stop.
    for number, end in rendering.ends.items():
        learned[end] = is_learned[number]
    for (number, _), span in rendering.spans.items():
        if is_learned[number]:
            # every token that touches the part, so that none of its bytes is left out
            learned |= (located.begin < span.begin + span.size) & (located.end > span.begin)
    return learned


def _tokens_behind(context, rendering):
    """Return (S,) bool: tokens from the first message on that is no context."""
    if not context:
        return np.ones(len(rendering.ids), bool)
    begins = [span.begin for (number, _), span in rendering.spans.items() if number >= context]
    return np.cumsum(rendering.located.end > min(begins, default=np.inf)) > 0


def pair_chats(messages, renderings, encoders, aligner="bytes", context=0):
    """Align a chat as the student and as a teacher render it.

    Args:
        renderings, encoders: (student's, teacher's).
        aligner: "bytes": part by part of every message; "dp": the whole renderings.
        context: see `encode_chat`.
    Returns:
        Pairing.
    """
    student, teacher = renderings
    tables = encoders[0].table, encoders[1].table
    encoded = encode_chat(messages, teacher, encoders[1], context=context)
    if aligner == "dp":  # finds by itself what the renderings have in common
        return Pairing(encoded, align_dp(student.ids, teacher.ids, *tables))
    regions = common_regions(student, teacher)
    alignment = align_regions(student.ids, teacher.ids, student.located, teacher.located, regions,
                              *tables)
    num_bytes = bytes_of_messages(messages)
    # What a template left out or rewrote counts too, so that fractions are of the whole chat.
    alignment.dropped["unmatched"] += num_bytes - alignment.text_bytes
    return Pairing(encoded, alignment._replace(text_bytes=num_bytes))


def common_regions(student, teacher):
    """List for `align_regions` what both renderings kept of each part, in the order of both."""
    common = student.spans.keys() & teacher.spans.keys()
    keys = sorted(common, key=lambda key: student.spans[key])
    # the key of the last part of each message, as later ones overwrite earlier ones
    last_part = {key[0]: key for key in keys}
    regions = []
    teacher_end = 0
    for key in keys:
        message = key[0]
        left = student.spans[key]
        right = teacher.spans[key]
        # the bytes of the part that both kept, counted from its beginning
        low = max(left.skipped, right.skipped)
        high = min(left.skipped + left.size, right.skipped + right.size)
        if low >= high or right.begin < teacher_end:  # nothing in common, or in another order
            continue
        teacher_end = right.begin + right.size
        ends = None  # a turn ends once, behind its last part
        if message in student.ends and message in teacher.ends and last_part[message] == key:
            ends = student.ends[message], teacher.ends[message]
        student_begin = left.begin + low - left.skipped
        teacher_begin = right.begin + low - right.skipped
        regions.append(Region(student_begin, teacher_begin, high - low, ends))
    return regions
