"""Render a chat by each model's own template and align what the two renderings have in common.

Two templates write different headers around the same messages, so renderings are aligned turn by
turn: what the assistant says in both, and the end of its turn by its role.
"""

import inspect
import itertools
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import datasets
import numpy as np
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from isogloss.align import (
    Located,
    Region,
    align_regions,
    character_starts,
    locate,
    without_chunks,
)
from isogloss.align_dp import align_dp, common_spans
from isogloss.data.chat_rows import (
    EXCLUDING,
    as_messages,
    as_tools,
    check_rows,
    is_learned,
    problem_of_chat,
    problem_of_tools,
    thought_of,
)
from isogloss.data.ends import turn_ends
from isogloss.data.open_data import STRINGS, first_rows
from isogloss.data.options.text_keys import read_by_teachers
from isogloss.data.sample import EncodedText, Pairing, bytes_of_tokens
from isogloss.data.texts import MOST_CHARACTERS, fits
from isogloss.data.turns import (
    SkippedChat,
    Stretch,
    Template,
    doubts,
    stretches,
    tried,
    write_short_chats,
)
from isogloss.flags.parse import DATE
from isogloss.flags.terminal import one_line

BLANK = "\ue000\ue002"  # for a content, of Unicode's private use area, so it is in no chat
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a mark of the assistant's words
JINJA = Environment(extensions=["jinja2.ext.loopcontrols"])
CHATS_TO_TRY = 8  # rows that a chat template has to refuse before the job is refused


class Turn(NamedTuple):
    """Hold what the assistant says in a rendering.

    message: number of the message.
    begin, end: its bytes, behind the header of the turn and in front of the token that ends it.
    stop: that token; None: the template writes none.
    """

    message: int
    begin: int
    end: int
    stop: int | None


@dataclass
class Rendering:
    """Hold a chat as one model's template writes it.

    Attributes:
        ids: (S,) int64.
        located: where in the rendering the tokens stand.
        data: bytes of the rendering.
        turns: list of the assistant's Turns, in its order; a message may have several.
        num_overlaps: turns that are left out because they overlap with one before.
        has_tools: the assistant may call some.
    """

    ids: np.ndarray
    located: Located
    data: bytes
    turns: list
    num_overlaps: int = 0
    has_tools: bool = False


def chat_text(messages, template):
    """Return what a `turns.Template` makes of a chat, if that can be tokenized.

    Raises: see `turns.Template.write`.
    """
    text = template.write(messages)
    if not fits(text):
        raise SkippedChat(f"the chat template of {template.name} writes {len(text)} characters of "
                          f"a chat; a tokenizer takes up to {MOST_CHARACTERS}")
    return text


def read_rendering(text, encoder):
    """Return the tokens of what a chat template wrote, and where in it they stand, as a Located."""
    # A rendering holds its own bos and eos, if the template writes them.
    coded = encoder.coded(text, return_offsets_mapping=True)
    encoder.check_ids(coded["input_ids"])
    ids = np.array(coded["input_ids"], np.int64)
    return ids, locate(ids, encoder.table, text, coded["offset_mapping"])


def teacher_ids(example, encoder):
    """Return the int64 ids that a teacher reads of an Example's text or chat.

    Of a chat that its template refuses, and of an empty row, there are none.
    """
    if example.content is None or isinstance(example.content, str):
        return encoder.encode([example.content or ""])[0]
    try:
        text = chat_text(read_by_teachers(example)[0], Template(encoder, example.tools))
    except SkippedChat:
        return np.zeros(0, np.int64)
    return read_rendering(text, encoder)[0]


def render(messages, encoder, tools=None):
    """Write a chat by a model's template and find what the assistant says in it.

    Args, Raises: see `turns.Template`.
    """
    template = Template(encoder, tools)
    text = chat_text(messages, template)
    ids, located = read_rendering(text, encoder)
    data = text.encode(errors="replace")
    is_stop = np.isin(ids, turn_ends(encoder)) & (located.begin >= 0)
    stops = np.flatnonzero(is_stop)
    stop_begin = located.begin[stops]

    marked = None if tools else _framed_turns(messages, encoder, data, stop_begin)
    if marked is None:
        marked = _marked_turns(messages, encoder, template, ids, located, data)
    if marked is None:
        byte_of = character_starts(text)  # characters are found; tokens are located as bytes
        ends = [np.searchsorted(byte_of, places[stops]).tolist()
                for places in (located.begin, located.end)]
        marked = [Stretch(stretch.message, *[int(byte_of[place]) for place in stretch[1:]])
                  for stretch in stretches(messages, text, template.try_write, encoder.header,
                                           list(zip(*ends)))]
    rendering = Rendering(ids, located, data, [], has_tools=bool(tools))
    is_control = encoder.table.special[ids] & (located.begin >= 0)
    control_begin = located.begin[is_control]
    behind = 0  # the turns so far
    for stretch in marked:
        turn = _turn(stretch, data, stops, stop_begin, control_begin)
        if _is_left_out(turn, messages, rendering, template):
            continue  # else it would teach to say nothing
        if turn.begin < behind:
            rendering.num_overlaps += 1
            continue
        rendering.turns.append(turn)
        behind = _behind(turn, rendering)
    return rendering


def _is_left_out(turn, messages, rendering, template):
    """Tell whether a template writes nothing of what a message without a content holds."""
    message = messages[turn.message]
    names = [call["function"]["name"] for call in message.get("tool_calls") or []]
    words = [word.encode(errors="replace") for word in (*names, thought_of(message)) if word]
    said = rendering.data[turn.begin : turn.end]
    if message["content"] or not words or any(word in said for word in words):
        return False
    chat = list(messages)
    chat[turn.message] = {"role": message["role"], "content": ""}
    text = template.try_write(chat, False)
    return text is not None and text.encode(errors="replace") == rendering.data


def _turn(stretch, data, stops, stop_begin, control_begin):
    """Return the Turn of a `turns.Stretch`, in bytes.

    Args:
        stops: tokens that end turns; stop_begin: their bytes; control_begin: of control tokens.
    """
    message, begin, low, high = stretch
    place = np.searchsorted(stop_begin, low)
    if place < len(stops) and stop_begin[place] <= high:
        return Turn(message, begin, int(stop_begin[place]), int(stops[place]))
    # the next control token is of another turn, and a line end in front of it none of its words
    high = min([high, *control_begin[control_begin >= low][:1].tolist()])
    return Turn(message, begin, begin + len(data[begin:high].rstrip()), None)


class Frame(NamedTuple):
    """Hold what a template writes around contents of messages that hold nothing else.

    parts: bytes in front of, between and behind the contents.
    turns: {number of a message: (bytes from the header to the content, from the content to the
        end, whether a token ends the turn)}.
    num_stops: how many of its tokens end turns.
    """

    parts: list
    turns: dict
    num_stops: int


def _framed_turns(messages, encoder, data, stop_begin):
    """List the Stretches, in bytes, by the Frame of a chat's roles; see `_marked_turns`.

    To render the parts of every chat, as `stretches` does, takes longer than to tokenize it.
    None: the template writes something else around these contents.
    """
    roles = tuple(message["role"] for message in messages)
    if not all(map(_holds_content_alone, messages)):
        return None
    if roles not in encoder.frames:
        encoder.frames[roles] = None  # of itself
        encoder.frames[roles] = _frame(roles, encoder)
    frame = encoder.frames[roles]
    if frame is None or frame.num_stops != len(stop_begin):
        return None
    place = 0
    turns = []
    for number, (part, message) in enumerate(zip(frame.parts, messages)):
        begin = place + len(part)
        content = message["content"]
        for words in (content, content.strip()):
            words = words.encode(errors="replace")
            if data[place : begin + len(words)] == part + words:
                break
        else:
            return None
        place = begin + len(words)
        if number in frame.turns:
            before, behind, has_stop = frame.turns[number]
            low = place + behind
            if has_stop and low not in stop_begin:
                return None
            turns.append(Stretch(number, begin - before, low, low + has_stop))
    return turns if data[place:] == frame.parts[-1] else None


def _holds_content_alone(message):
    held = {key for key, value in message.items() if value not in (None, "", [])}
    return (held - EXCLUDING.keys() == {"role", "content"}
            and isinstance(message["content"], str))


def _frame(roles, encoder):
    """Return the Frame of chats of these roles; None: it cannot be told."""
    try:
        rendering = render([{"role": role, "content": BLANK} for role in roles], encoder)
    except SkippedChat:
        return None
    blank = BLANK.encode()
    parts = rendering.data.split(blank)
    if len(parts) != len(roles) + 1:
        return None
    of_message = {turn.message: turn for turn in rendering.turns}
    if len(of_message) != len(rendering.turns):
        return None
    turns = {}
    place = 0
    for number, (part, role) in enumerate(zip(parts, roles)):
        place += len(part)
        if role == "assistant":
            turn = of_message.get(number)
            if turn is None:
                return None
            before, behind = place - turn.begin, turn.end - place - len(blank)
            if min(before, behind) < 0:
                return None
            turns[number] = before, behind, turn.stop is not None
        place += len(blank)
    num_stops = np.isin(rendering.ids, turn_ends(encoder)) & (rendering.located.begin >= 0)
    return Frame(parts, turns, int(num_stops.sum()))


def _marked_turns(messages, encoder, template, ids, located, data):
    """List the Stretches, in bytes, as a template marks what its assistant says.

    Some mark the header and what follows the end, too, which the assistant does not write.
    None: it does not ({% generation %}), or not for every turn.
    """
    source = encoder.tokenizer.chat_template
    if not isinstance(source, str) or not GENERATION.search(source):
        return None
    coded = template.write(messages, tokenize=True, return_dict=True,
                           return_assistant_tokens_mask=True)
    mask = np.array(coded["assistant_masks"])
    numbers = [number for number, message in enumerate(messages)
               if message["role"] == "assistant"]
    borders = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
    if len(mask) != len(ids) or len(borders) != len(numbers):
        return None
    is_end = np.isin(ids, turn_ends(encoder))
    header = encoder.header.text.encode() if encoder.header.is_prompt else b""
    turns = []
    for number, (first, last) in zip(numbers, borders):
        begin, low = int(located.begin[first]), int(located.end[last - 1])
        while low < len(data) and data[low] & 0xC0 == 0x80:
            low += 1  # the mask has the first token of a character of several
        ends = np.flatnonzero(is_end[first:last])
        if len(ends) and not data[located.end[first + ends[-1]] : low].strip():
            low = int(located.begin[first + ends[-1]])
        if header and data.startswith(header, begin):
            begin += len(header)
        turns.append(Stretch(number, begin, low, low))
    return turns


# --- what is learned ------------------------------------------------------------------------------


def encode_chat(messages, rendering, encoder, train_on, context=0):
    """Return the EncodedText of a chat, as the student or a teacher renders it.

    Args:
        train_on: "assistant": learned is what the assistant says, and the end of its turn; "all":
            the whole rendering.  No other byte counts, so that models are judged by one text.
        context: messages at the beginning from which nothing is learned.
    """
    if train_on == "all":
        learned = _tokens_behind(context, rendering)
    else:
        learned = _assistant_tokens(messages, rendering, context)
    num_bytes = bytes_of_tokens(rendering.located)
    # Control tokens stand for their names in a rendering, which are no bytes of the chat.
    num_bytes[encoder.table.special[rendering.ids] | ~learned] = -1
    return EncodedText(rendering.ids, rendering.located, num_bytes, learned,
                       num_overlaps=rendering.num_overlaps)


def _assistant_tokens(messages, rendering, context):
    """Return (S,) bool: tokens of what the assistant says and of the ends of its turns."""
    learned = np.zeros(len(rendering.ids), bool)
    located = rendering.located
    for turn in rendering.turns:
        if turn.message < context or not is_learned(messages[turn.message]):
            continue
        # every token that touches it, so that none of its bytes is left out
        learned |= (located.begin < turn.end) & (located.end > turn.begin) & (located.begin >= 0)
        if turn.stop is not None:  # else the student would never stop
            learned[turn.stop] = True
    return learned


def _tokens_behind(context, rendering):
    """Return (S,) bool: tokens from the first turn on that is no context."""
    if not context:
        return np.ones(len(rendering.ids), bool)
    begins = [turn.begin for turn in rendering.turns if turn.message >= context]
    return np.cumsum(rendering.located.end > min(begins, default=np.inf)) > 0


def read_answer(messages, tools):
    """Return (messages, tools) of what another program says in a chat, as those of a row are read.

    Raises:
        ValueError: what is wrong with them, to follow their name.
    """
    messages = messages or []
    problem = None if isinstance(messages, list) else f": messages are {messages!r:.40}"
    problem = problem or problem_of_chat(messages) or problem_of_tools(tools)
    if problem:
        raise ValueError(problem)
    return as_messages(messages), as_tools(tools)


# --- two renderings -------------------------------------------------------------------------------


def pair_chats(renderings, encoders, aligner="bytes", train_on="assistant"):
    """Align a chat as the student and as a teacher render it.

    Args:
        renderings: (student's, teacher's).
        encoders: likewise, TextEncoder.
        aligner: "bytes": what both renderings of a turn spell alike; "dp": the whole renderings.
    Returns:
        Alignment; its text is what the student's assistant says, or the whole rendering.
    """
    student, teacher = renderings
    tables = encoders[0].table, encoders[1].table
    if aligner == "dp":  # finds by itself what the renderings have in common
        return align_dp(student.ids, teacher.ids, *tables)
    regions = common_regions(student, teacher, train_on)
    if regions:
        _warn_of_a_space(renderings, encoders, regions[0])
    alignment = align_regions(student.ids, teacher.ids, student.located, teacher.located, regions,
                              *tables)
    if student.has_tools and train_on == "assistant":
        alignment = _without_openings(alignment, renderings, encoders)
    size = sum(turn.end - turn.begin for turn in student.turns)
    if train_on == "all":
        size = len(student.data)
    # What only one side writes counts too, so that fractions are of all that is learned.
    alignment.dropped["unmatched"] += size - alignment.text_bytes
    return alignment._replace(text_bytes=size)


def _warn_of_a_space(renderings, encoders, region):
    """Warn where one side alone spells a space in front of the first Region in its first token.

    To that model this is another word than to the other one.
    """
    reaches = []
    for side, first in zip(renderings, region):
        is_first = (side.located.begin >= 0) & (side.located.begin < first)
        begins = side.located.begin[is_first & (side.located.end > first)]
        reaches.append(any(side.data[begin:first].isspace() for begin in begins))
    if reaches[0] != reaches[1]:
        spaced, other = [encoders[i].tokenizer.name_or_path for i in (reaches[1], reaches[0])]
        warnings.warn(f"the chat template of {spaced} writes a space that belongs to the first "
                      f"token of an answer, that of {other} does not: the first word of answers is "
                      "learned from the text alone", stacklevel=2)


def _without_openings(alignment, renderings, encoders):
    """Return an Alignment without the chunks that hold the first token of a turn, on either side.

    Where both templates write calls in other words, what one model says of whether to call is said
    in words that the other one's template does not know there.
    """
    from isogloss.data.options.calls import write_calls_alike

    if write_calls_alike(encoders):
        return alignment
    lost = []
    chunks = alignment.student_chunk, alignment.teacher_chunk
    for rendering, chunk in zip(renderings, chunks):
        for turn in rendering.turns:
            inside = (rendering.located.begin >= turn.begin) & (
                rendering.located.begin < turn.end)
            lost += chunk[np.flatnonzero(inside)[:1]].tolist()
    chunks = without_chunks(chunks, [number for number in lost if number >= 0])
    return alignment._replace(student_chunk=chunks[0], teacher_chunk=chunks[1])


def message_of(ids, text, encoder, tools, prompt):
    """Read an answer; see `calls.message_of`."""
    from isogloss.data.options import calls

    return calls.message_of(ids, text, encoder, tools, prompt)


def common_regions(student, teacher, train_on="assistant"):
    """List for `align_regions` what both Renderings spell alike, in the order of both."""
    regions = []
    places = 0, 0  # bytes behind the turns so far
    for turns in _turn_pairs(student, teacher):
        if turns[0].begin < places[0] or turns[1].begin < places[1]:
            continue  # a template has moved it
        begins = [turn.begin for turn in turns]
        if train_on == "all":
            regions += _regions(student, teacher, places, begins)
        spoken = _regions(student, teacher, begins, [turn.end for turn in turns])
        if None not in (turns[0].stop, turns[1].stop):
            last = spoken.pop() if spoken else Region(turns[0].end, turns[1].end, 0)
            spoken.append(last._replace(end_pair=(turns[0].stop, turns[1].stop)))
        regions += spoken
        places = [_behind(turn, side) for turn, side in zip(turns, (student, teacher))]
    if train_on == "all":
        regions += _regions(student, teacher, places, (len(student.data), len(teacher.data)))
    return regions


def _turn_pairs(student, teacher):
    """Yield the (student's, teacher's) Turns of each message of which both Renderings have some."""
    for number in sorted({turn.message for turn in student.turns}):
        first, second = [[turn for turn in side.turns if turn.message == number]
                         for side in (student, teacher)]
        if len(first) == len(second):
            yield from zip(first, second)
        elif second:  # one template writes a result in the middle of it: the longest they share
            yield max(itertools.product(first, second), key=lambda turns: sum(
                region.num_bytes for region in _regions(
                    student, teacher, [turn.begin for turn in turns],
                    [turn.end for turn in turns])))


def _behind(turn, rendering):
    return turn.end if turn.stop is None else int(rendering.located.end[turn.stop])


def _regions(student, teacher, begins, ends):
    """Return the Regions of what two pieces of the renderings have in common."""
    texts = [side.data[begin:end].decode(errors="replace")
             for side, begin, end in zip((student, teacher), begins, ends)]
    byte_of = [character_starts(text) for text in texts]
    regions = []
    for first, second, num in common_spans(*texts):
        size = int(byte_of[0][first + num] - byte_of[0][first])
        regions.append(Region(begins[0] + int(byte_of[0][first]),
                              begins[1] + int(byte_of[1][second]), size))
    return regions


# --- before the first step ------------------------------------------------------------------------


def check_have_templates(encoders, where):
    """Raise a ValueError where one of {name: TextEncoder} has no template to write chats by."""
    for name, encoder in encoders.items():
        if not encoder.tokenizer.chat_template:
            raise ValueError(f"{name}: its tokenizer has no chat template, and {where} holds "
                             "chats; set chat_template in tokenizer_config.json")


def check_templates(dataset, reader, encoders):
    """Raise a ValueError where a chat template refuses every one of the first chats.

    Likewise for a row of JSON that holds no chat.  Warnings say what it leaves out of them.
    """
    if getattr((dataset.features or {}).get(reader.text_key), "dtype", None) in STRINGS \
            and isinstance(dataset, datasets.Dataset):
        check_rows(dataset, reader)  # which is JSON
    examples = []
    rows = first_rows(dataset, CHATS_TO_TRY, reader.text_key, reader.source)
    for number, row in enumerate(rows):
        examples.append(reader(row, number))
    encoders = list(encoders)
    check_told(encoders)
    answers = tried(encoders, partial(_try_chats, examples))
    for encoder, (errors, found) in zip(encoders, answers, strict=True):
        if examples and len(errors) == len(examples):
            raise ValueError(f"{errors[0]}; it refuses the other {len(examples) - 1} of the first "
                             "chats too; repair the chats or the template")
        for doubt, count in found.items():
            warnings.warn(f"the chat template of {encoder.tokenizer.name_or_path} {doubt} "
                          f"({count} of the first {len(examples)} chats)", stacklevel=2)


def _try_chats(examples, encoder):
    """Return (why the template refuses chats before the first that it takes, {doubt: chats})."""
    write_short_chats(encoder)
    errors = []
    for example in examples:
        try:
            chat_text(example.content, Template(encoder, example.tools))
            break  # chats that are refused later are skipped and counted
        except SkippedChat as error:
            errors.append(str(error))
    found = Counter()
    for example in examples:
        Template(encoder, example.tools).try_write(example.content, is_prompt=True)
        found.update(doubts(example.content, encoder, example.tools))
        found.update(_ends_no_answer(example, encoder))
    return errors, found


def _ends_no_answer(example, encoder):
    """Return [the doubt] where no token ends what the assistant says in a chat; else []."""
    try:
        turns = render(example.content, encoder, example.tools).turns
    except SkippedChat:
        return []
    if not turns or any(turn.stop is not None for turn in turns):
        return []
    return ["ends no answer with a token, from which a student would learn to stop; write "
            "{{ eos_token }} behind answers"]


def check_told(encoders):
    """Raise a ValueError for a key of --template_kwargs that no chat template reads."""
    # `apply_chat_template` reads some itself, as chat_template, which is another template
    write = PreTrainedTokenizerBase.apply_chat_template
    read = {DATE, *inspect.signature(write).parameters}
    for encoder in encoders:
        templates = encoder.tokenizer.chat_template or ""
        named = templates.values() if isinstance(templates, dict) else [templates]
        for template in [*named, str(encoder.template_kwargs.get("chat_template", ""))]:
            try:
                read |= find_undeclared_variables(JINJA.parse(GENERATION.sub("", template)))
            except TemplateError:  # as is said when it writes
                return
        if type(encoder.tokenizer).apply_chat_template is not write:  # code of its own
            return
    for name in encoders[0].template_kwargs.keys() - read if encoders else ():
        raise ValueError(f"--template_kwargs: no chat template reads {name}; correct the name, or "
                         "leave it out")


def learned_tokens(example, encoder, train_on):
    """Return ((S,) bool: the tokens of an Example's chat that are learned, why there are none).

    The reason follows a number of rows; None: there are some.
    """
    roles = {message["role"] for message in example.content}
    if train_on == "assistant" and "assistant" not in roles:
        return None, f"have no message of the role 'assistant' (but {', '.join(sorted(roles))})"
    try:
        rendering = render(example.content, encoder, example.tools)
    except SkippedChat:
        return None, "are refused by the student's chat template"
    learned = encode_chat(example.content, rendering, encoder, train_on, example.context).learned
    if not learned.any():
        return None, ("hold nothing that the assistant says behind the prompt, or that is not "
                      "excluded by its message")
    return learned, None


# --- in a batch -----------------------------------------------------------------------------------


def read_chat(collator, example, takes_part):
    """Return (EncodedText, [Pairing]) of a chat.

    The student learns alone what a teacher's template does not render; what its own template
    does not render it does not learn at all.
    """
    messages = example.content
    rendering = _render(example, collator.student)
    if rendering is None:
        return None, [Pairing(skipped=True)] * len(collator.pairs)
    student = encode_chat(messages, rendering, collator.student, collator.train_on, example.context)
    pairings = []
    chat, num_more = read_by_teachers(example)
    taught = example._replace(content=chat)
    for pair, wanted in zip(collator.pairs, takes_part):
        of_teacher = _render(taught, pair.encoder) if wanted else None
        if of_teacher is None:
            # a chat that was not meant for this teacher does not count as skipped
            pairings.append(Pairing(skipped=wanted))
            continue
        encoders = collator.student, pair.encoder
        # numbered as in the student's chat; what stands in front is no turn of it
        of_teacher.turns = [turn._replace(message=turn.message - num_more)
                            for turn in of_teacher.turns if turn.message >= num_more]
        context = example.context
        if collator.train_on == "all":  # what it alone reads ends before the first answer
            context = max(context, bool(example.teacher_prompt))
        teacher = encode_chat(messages, of_teacher, pair.encoder, collator.train_on, context)
        alignment = pair_chats((rendering, of_teacher), encoders, collator.aligner,
                               collator.train_on)
        pairings.append(Pairing(teacher, alignment))
    return student, pairings


def _render(example, encoder):
    """Return the Rendering of a chat, or None, with a warning, where the template refuses."""
    try:
        return render(example.content, encoder, example.tools)
    except SkippedChat as error:
        # The log counts every such chat; a warning of the same text is shown once.
        warnings.warn(one_line(f"{error}; such chats are left out"), stacklevel=2)
        return None
