"""Find what the assistant says in a chat that a template has written.

A template may strip, drop, move, escape or rewrite what a message holds, and add to it.  So
contents are not searched for.  The assistant speaks from the end of the prompt that the template
writes for it up to the token that ends its turn: where a part of the chat is a beginning of the
whole, it tells both.  Else a mark in the place of what a message holds tells where that stands
(`FoundPiece`), and both are looked for in what the template writes between two messages.

Tests: tests/test_turns.py, tests/test_speakers.py.
"""

import itertools
import json
import re
from collections.abc import Callable
from datetime import date
from functools import lru_cache, partial
from typing import NamedTuple

from isogloss.data.chat_rows import (
    REASONING,
    SHAPES,
    has_its_arguments,
    in_shape,
    restored,
    thought_of,
    with_all_names,
)
from isogloss.flags.parse import DATE
from isogloss.job.trial import in_bounds

THOUGHT_BEGIN = "<think>"  # of a thought in a content
THOUGHT_END = "</think>"
ESCAPED = "&#34;"  # a quotation mark
MARK = "7208913564120957386412"  # digits, which no template escapes or changes; in no chat
QUESTION = [{"role": "user", "content": "a"}]
ANSWER = {"role": "assistant", "content": MARK}
CALL = {"type": "function", "function": {"name": "a", "arguments": {}}}
UNIT = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+|\s|[^\w\s]")  # marks and words, as a whole


class SkippedChat(ValueError):
    """Say that a chat template does not render a chat."""


def template_options(encoder, tools=None):
    """Return what `apply_chat_template` is told of an encoder: --template_kwargs, and the date.

    Templates ask for it by `strftime_now`, which transformers answers with today.
    """
    options = dict(encoder.template_kwargs)
    day = options.pop(DATE, "")
    if day and DATE in str(encoder.tokenizer.chat_template):
        options["chat_template"] = dated(encoder.tokenizer.get_chat_template(tools=tools), day)
    return options


@lru_cache
def dated(template, day):
    """Return a template for which it is always the same day, as 2026-05-01."""
    answers = "format"
    for code in "aAbBcdfHIjmMpSUwWxXyYzZ":
        answers += f" | replace('%{code}', {date.fromisoformat(day).strftime(f'%{code}')!r})"
    return f"{{%- macro {DATE}(format) -%}}{{{{ {answers} }}}}{{%- endmacro -%}}{template}"


def tried(encoders, function):
    """Return function(encoder) of each TextEncoder, as JSON, whose chat templates write meanwhile.

    They come with models, and may be endless or explode, so they do it in another process.

    Raises:
        ValueError: one does.
    """
    functions = []
    for encoder in encoders:
        encoder.trial = "now"  # as the other process sees it
        functions.append((f"the chat template of {encoder.tokenizer.name_or_path}",
                          partial(function, encoder)))
    result = ""
    try:
        answers = in_bounds(functions)
        result = "passed"
        return answers
    except ValueError as error:
        raise ValueError(f"{error}; repair chat_template in tokenizer_config.json, or "
                         "chat_template.jinja") from None
    finally:
        for encoder in encoders:
            encoder.trial = result


def write_short_chats(encoder):
    """Let a chat template write what is asked of every one."""
    write = Template(encoder).try_write
    header_of(write)
    behind_answer(write)


class Template:
    """Write a chat, and parts of it, by a model's chat template.

    The first one of an encoder is tried on short chats.

    Args:
        tools: list of objects that describe what the assistant may call; None: there are none.
    Raises:
        ValueError: see `tried`.
    """

    def __init__(self, encoder, tools=None):
        self.name = encoder.tokenizer.name_or_path
        self._options = template_options(encoder, tools)
        self._write = partial(encoder.tokenizer.apply_chat_template, tools=tools)
        self._shapes = SHAPES  # what it wanted of this chat first
        self._encoder = encoder
        if not encoder.trial:
            tried([encoder], write_short_chats)

    def write(self, messages, is_prompt=False, **options):
        """Return what it makes of messages.

        Args:
            is_prompt: up to where the assistant speaks.
            options: of `apply_chat_template`, else it returns text.
        Raises:
            SkippedChat: it does not render them.
        """
        options = (options or {"tokenize": False}) | self._options
        messages = list(map(with_all_names, messages))
        has_calls = any(message.get("tool_calls") for message in messages)
        problem = None
        for shape in self._shapes if has_calls else SHAPES[:1]:
            numbers = {}
            try:
                written = self._write(in_shape(messages, shape, numbers),
                                      add_generation_prompt=is_prompt, **options)
            except Exception as error:  # templates raise whatever they like
                if self._encoder.trial == "now" and isinstance(error, MemoryError):
                    raise
                problem = problem or error
                continue
            if isinstance(written, str):
                written = restored(written, numbers)
                if shape[1] is SHAPES[0][1] and not has_its_arguments(written, messages):
                    continue
            if not _is_escaped(written, messages):
                if has_calls:
                    self._shapes = sorted(SHAPES, key=lambda other: other != shape)
                return written
            problem = problem or "it escapes quotation marks as on a web page"
        what = "prompt" if is_prompt else "chat"
        raise SkippedChat(f"the chat template of {self.name} refuses a {what}: {problem}")

    def try_write(self, messages, is_prompt):
        """Return what it makes of messages; None: it refuses them."""
        try:
            return self.write(messages, is_prompt)
        except SkippedChat:
            return None


def _is_escaped(written, messages):
    """Tell whether jinja has escaped a text, as where a template adds to what it calls safe."""
    return ESCAPED in written and ESCAPED not in json.dumps(messages, default=str)


class Header(NamedTuple):
    """Hold what stands in front of what the assistant says.

    text: of the template's generation prompt, or else of a turn.
    is_prompt: the template writes a generation prompt, asked or not.
    least: characters of it with which every turn begins.
    """

    text: str
    is_prompt: bool
    least: int = 0


def header_of(write):
    """Return the Header of a template whose `Template.try_write` this is."""
    question = write(QUESTION, False) or ""
    prompted = write(QUESTION, True) or ""
    first = _whole(prompted, _common_begin(question, prompted))
    if first < len(prompted):
        least = len(prompted)
        answers = [ANSWER], [ANSWER | {REASONING[0]: "b"}], [ANSWER | {"tool_calls": [CALL]}]
        for behind in (*answers, [ANSWER, *QUESTION]):
            begin = _common_begin(prompted, write([*QUESTION, *behind], False) or "")
            begin = _whole(prompted, begin)
            if begin > first:
                least = min(least, begin)
        return Header(prompted[first:], True, least - first)
    # an earlier turn: the last one may have more, such as an empty thought
    chat = write([*QUESTION, ANSWER, *QUESTION], False) or write([*QUESTION, ANSWER], False) or ""
    turn, mark, behind = chat.removeprefix(question).partition(MARK)
    if not mark or not chat.startswith(question):
        return Header("", False)
    # some write a prompt behind every chat
    last = (write([*QUESTION, ANSWER], False) or "").rpartition(MARK)[2]
    prompt = last[_whole(last, _common_begin(last, behind)) :]
    if prompt and question.endswith(prompt):
        return Header(prompt, True, len(prompt))
    return Header(turn.rstrip(" "), False)


def end_of_answer(encoder):
    """Return the token with which a chat template ends a turn; see `TextEncoder.template_end`."""
    behind = behind_answer(Template(encoder).try_write)
    if behind is None:
        return encoder.table.end_of_turn
    # the last of its control tokens: some close what is said before they end the turn
    behind = (behind.split() or [""])[0]
    for i in reversed(encoder.tokenizer(behind, add_special_tokens=False)["input_ids"]):
        if i < len(encoder.table) and encoder.table.special[i]:
            return i
    return -1


def behind_answer(write):
    """Return what a template writes behind a last message of the assistant; None: it refuses."""
    whole = write([*QUESTION, ANSWER], False)
    if whole is None:
        return None
    behind = whole.rpartition(MARK)[2]
    longer = write([*QUESTION, ANSWER, *QUESTION], False) or whole
    if not longer.startswith(whole):  # what ends the chat follows, or the prompt of the next turn
        question = write([QUESTION[0] | {"content": MARK}], False) or ""
        other = question.rpartition(MARK)[2]
        if other.strip() and behind.endswith(other):  # messages of all roles end alike
            return UNIT.match(other.lstrip())[0]
    return behind


# --- where messages stand -------------------------------------------------------------------------


class Part(NamedTuple):
    """Hold a part of a message: its content, its thoughts or its calls.

    message: number of the message.
    words: the text; "": that of calls.
    put: returns the keys of the message with other words in this place.
    """

    message: int
    name: str
    words: str
    put: Callable


def _parts(number, message):
    """List the Parts of a message; one that holds nothing has an empty content."""
    parts = []
    if thought_of(message):
        names = [key for key in REASONING if message.get(key)]
        parts.append(Part(number, "thoughts", thought_of(message), partial(dict.fromkeys, names)))
    content = message["content"]
    begin = 0
    end = content.find(THOUGHT_END) if message["role"] == "assistant" else -1
    if end >= 0:
        begin = len(THOUGHT_BEGIN) if content.startswith(THOUGHT_BEGIN) else 0
        put = partial(_with_content, content[:begin], content[end:])
        parts.append(Part(number, "thoughts", content[begin:end], put))
        begin = end + len(THOUGHT_END)
    if message.get("tool_calls"):
        parts.append(Part(number, "calls", "", partial(_with_arguments, message["tool_calls"])))
    if content[begin:].strip() or not parts:
        put = partial(_with_content, content[:begin], "")
        parts.append(Part(number, "content", content[begin:], put))
    return parts


def _with_content(before, behind, words):
    return {"content": before + words + behind}


def _with_arguments(calls, words):
    """Return the calls of a message with other arguments, not other names: results have those."""
    changed = []
    for call in calls:
        is_text = isinstance(call["function"].get("arguments"), str)
        arguments = json.dumps({"a": words}) if is_text else {"a": words}
        changed.append(call | {"function": call["function"] | {"arguments": arguments}})
    return {"tool_calls": changed}


class FoundPiece(NamedTuple):
    """Hold characters of a rendering that a message says.

    message: its number.
    is_call: of a call, these are the arguments.
    is_sure: whatever it says, the rendering is the same around it.
    """

    begin: int
    end: int
    message: int
    is_call: bool
    is_sure: bool


def _pieces(parts, known, messages, text, write):
    """List the FoundPieces of a rendering of messages, in its order.

    Args:
        parts: of all messages; known: what `_known_pieces` returns.
    """
    pieces = []
    for index, part in enumerate(parts):
        if index in known:
            pieces += known[index]
            continue
        number = part.message
        message = messages[number] | part.put(MARK)
        other = write([*messages[:number], message, *messages[number + 1 :]], False) or ""
        first, *behind = other.split(MARK)
        if behind:
            begin = _common_begin(text, first)
            end = len(text) - _common_end(text[begin:], behind[-1])
            is_sure = begin == len(first) and len(text) - end == len(behind[-1])
            is_sure = is_sure and len(behind) == 1
            pieces.append(FoundPiece(begin, end, number, part.name == "calls", is_sure))
    sure = [piece for piece in pieces if piece.is_sure]
    # with other words the template may have changed more than these, or it writes them twice
    doubtful = [piece for piece in pieces if not piece.is_sure and not any(
        piece.begin < other.end and other.begin < piece.end and piece.message != other.message
        for other in sure)]
    return sorted(sure + doubtful)


def _known_pieces(parts, messages, text, write):
    """Return {index of a Part: its FoundPieces} by one rendering with a mark for each.

    Calls are not in it, and nothing is where a template writes words otherwise than they are.
    """
    chat = list(messages)
    of_key = {}  # of two Parts of a content the second one
    for index, part in enumerate(parts):
        if part.name != "calls":
            keys = part.put(f"{MARK}{index:06d}")
            chat[part.message] = chat[part.message] | keys
            of_key[part.message, min(keys)] = index
    pieces = {index: [] for index in of_key.values()}
    first, *rest = re.split(MARK + r"(\d{6})", write(chat, False) or MARK)
    if not text.startswith(first):
        return {}
    begin = len(first)
    for index, behind in zip(map(int, rest[::2]), rest[1::2]):
        held = parts[index].words
        for words in (held, held.strip(), held.lstrip(), held.rstrip()):
            if text.startswith(words + behind, begin):
                break
        else:
            return {}
        end = begin + len(words)
        pieces[index].append(FoundPiece(begin, end, parts[index].message, False, True))
        begin += len(words) + len(behind)
    return pieces if begin == len(text) else {}


class FoundRun(NamedTuple):
    """Hold neighboring FoundPieces of one message, and how far it is to what others say.

    low: where what stands in front of them ends; high: where what stands behind them begins.
    before: the FoundPiece in front of them; None: nothing is.
    first, last: of them.
    """

    message: int
    low: int
    begin: int
    end: int
    high: int
    before: FoundPiece | None
    first: FoundPiece
    last: FoundPiece


def _runs(pieces, size):
    """Return the Runs of a rendering; size: its characters."""
    runs = []
    low = 0
    before = None
    for message, group in itertools.groupby(pieces, lambda piece: piece.message):
        group = list(group)
        if runs:
            runs[-1] = runs[-1]._replace(high=max(runs[-1].end, group[0].begin))
        begin = max(low, group[0].begin)
        end = max([begin, *[piece.end for piece in group]])
        high = max(end, size)
        runs.append(FoundRun(message, low, begin, end, high, before, group[0], group[-1]))
        low = end
        before = group[-1]
    return runs


# --- where turns begin and end --------------------------------------------------------------------


class Stretch(NamedTuple):
    """Hold characters of a rendering: what the assistant says, and where its turn may end.

    message: number of the message.
    begin: the first character behind the header of the turn.
    low, high: the turn ends with the first token in low .. high - 1 that ends turns.
    """

    message: int
    begin: int
    low: int
    high: int


def stretches(messages, text, write, header, ends):
    """List the Stretches of what the assistant says in a rendering, in its order.

    A message has several where others speak in between, as where a call and its result are written
    in front of the content.

    Args:
        text: the rendering of all messages.
        ends: (first, last + 1) characters of the tokens that may end a turn.
    """
    parts = []
    for number, message in enumerate(messages):
        parts += _parts(number, message)
    known = _known_pieces(parts, messages, text, write)
    found = []
    runs = None
    size = len(text)
    if header.is_prompt:  # which some write behind every chat
        size = len(text.removesuffix(header.text))
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _before(messages[:number], write, header)
        if before and text.startswith(before):
            behind = text[:size]
            if number < len(messages) - 1:
                behind = write(messages[: number + 1], False)
            stretch = _between(number, text, before, behind, ends)
            if stretch and not _reaches_over(stretch, known):
                found.append(stretch)
                continue
        if runs is None:
            runs = _runs(_pieces(parts, known, messages, text, write), size)
        for run in runs:
            if run.message != number:
                continue
            if run.before and run.before.message > number:  # who speaks in front of its content
                chat = [*messages[:number], message | {"content": ""}]
                chat += messages[number + 1 : run.before.message + 1]
                before = _before(chat, write, header)
            begin = _begin(run, text, before, header, ends)
            if begin is not None:
                found.append(_until_end(begin, run, messages, text, write, ends))
    return sorted(found, key=lambda stretch: stretch.begin)


def _reaches_over(stretch, known):
    """Tell whether a Stretch holds what another message says; known: see `_known_pieces`."""
    for piece in itertools.chain(*known.values()):
        if max(piece.begin, stretch.begin) < min(piece.end, stretch.low):
            if piece.message != stretch.message:
                return True
    return False


def _before(messages, write, header):
    """Return what a template writes up to where the assistant speaks; None: it refuses them."""
    before = write(messages, header.is_prompt) if messages else ""
    if before is None or (messages and header.is_prompt):
        return before
    return before + header.text


def _between(number, text, before, behind, ends):
    """Return the Stretch of a message between what stood there before it and behind it.

    None: what stood behind it is no beginning of text, or does not end as turns do.
    """
    if not behind or not text.startswith(behind) or len(before) > len(behind):
        return None
    inside = [end for end in ends if len(before) <= end[0] < len(behind)]
    if not inside:
        return Stretch(number, len(before), len(behind), len(behind))
    end = _last_end(behind, inside)
    return None if end is None else Stretch(number, len(before), end, end + 1)


def _last_end(text, ends):
    """Return where the tokens begin with which a text ends, but for spaces; None: another does."""
    found = None
    high = len(text)
    for first, last in reversed(ends):
        if text[last:high].strip():
            break
        found = high = first
    return found


def _until_end(begin, run, messages, text, write, ends):
    """Return the Stretch of a FoundRun, whose begin is known."""
    for first, _ in ends:
        if run.end <= first < run.high:
            return Stretch(run.message, begin, first, first + 1)
    behind = write(messages[: run.message + 1], False)
    end = _agreed(run.last, run.end, run.high, text, behind)
    if end is None:
        return Stretch(run.message, begin, run.end, run.high)
    return Stretch(run.message, begin, end, end)


def _begin(run, text, before, header, ends):
    """Return where the assistant begins to speak, in low .. begin of a FoundRun; None: not known.

    Args:
        before: what the template writes up to there; None: it refuses that.
    """
    if before and text.startswith(before) and run.low <= len(before) <= run.begin:
        return len(before)
    words = header.text.lstrip()
    least = header.least - len(header.text) + len(words)
    units = list(UNIT.finditer(words))
    if not before or before.endswith(header.text):
        # not every turn has all of a prompt, such as the beginning of a thought
        for unit in reversed(units):
            place = text.rfind(words[: unit.end()], run.low, run.begin)
            if place >= 0 and unit.end() >= least:
                return place + unit.end()
    if not run.before:
        # with another role's header, it is that one's, and tools may stand in front of it
        if units and units[0][0] in text[: run.begin]:
            return None
        # without one it begins with its own words, and the space in front of them
        return len(text[: run.begin].rstrip(" "))
    begin = _agreed(run.before, run.low, run.begin, text, before)
    if begin is None:
        behind_ends = [last for first, last in ends if run.low <= first and last <= run.begin]
        # the marks of a call are a part of it, and stand in front of its arguments
        begin = min([run.low if run.first.is_call else run.begin, *behind_ends[:1]])
    return begin


def _agreed(piece, low, high, text, other):
    """Return how far, of low .. high, another rendering goes on like a text; None: not known.

    Args:
        piece: the last FoundPiece in front of low, which both have.
        other: a rendering of fewer messages; None: it is refused.
    """
    if other is None:
        return None
    shared = _common_begin(text, other)
    if shared < low:
        words = text[piece.begin : piece.end].strip()
        sizes = [_common_begin(text[low:high], other[place.end() :])
                 for place in re.finditer(re.escape(words), other)] if words else []
        if not sizes:
            return None
        shared = low + max(sizes)
    return low + _whole(text[low:high], min(shared, high) - low)


def doubts(messages, encoder, tools=None):
    """List what a template makes of a chat that can hardly be meant, to follow the template's name.

    Args: see `Template`.
    """
    write = Template(encoder, tools).try_write
    text = write(messages, False)
    if not text:
        return []
    found = []
    if tools and text == Template(encoder).try_write(messages, False):
        found.append("leaves out the tools")
    last_parts = {}  # of each kind the last one, in {what it is: (number, keys with a mark)}
    for number, message in enumerate(messages):
        if message["role"] == "user":  # templates leave out the thoughts before a question
            last_parts.pop("thoughts", None)
        for part in _parts(number, message):
            name = part.name
            if name == "content":
                beside = " beside tool calls" if message.get("tool_calls") else ""
                name = f"what {message['role']} says{beside}"
            if part.words.strip() or name == "calls":
                last_parts[name] = number, part.put(MARK)
    for name, (number, keys) in last_parts.items():
        other = write([*messages[:number], messages[number] | keys, *messages[number + 1 :]], False)
        if other and MARK not in other:
            found.append(f"leaves out {name}")
    prompt = write(messages[:-1], True) if messages[-1]["role"] == "assistant" else None
    if prompt and not text.startswith(prompt):
        found.append(f"asks for an answer with {encoder.header.text!r}, and does not write so the "
                     "last answer; --template_kwargs may tell it whether answers have thoughts")
    return found


def _whole(text, place):
    """Return a place in a text, cut back to where the mark or word begins that it is inside of."""
    for unit in UNIT.finditer(text):
        if unit.end() >= place:
            return place if unit.end() == place else min(place, unit.start())
    return place


def _common_begin(a, b):
    """Count the characters with which both begin."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(a, b):
    """Count the characters with which both end."""
    return _common_begin(a[::-1], b[::-1])
