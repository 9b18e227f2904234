"""Find what the assistant says in a chat that a template has written.

A template may strip, drop, move, escape or rewrite what a message holds, and add to it.  So
contents are not searched for.  The assistant speaks from the end of the prompt that the template
writes for it up to the token that ends its turn.  Both are found by writing a part of the chat, or
the chat with a mark in the place of something that the message holds.

Tests: tests/test_turns.py.
"""

import json
import re
from datetime import date
from difflib import SequenceMatcher
from functools import lru_cache, partial
from itertools import accumulate, count
from typing import NamedTuple

from isogloss.data.workers import in_bounds

REASONING = "reasoning_content", "reasoning", "thinking"  # keys of what a message thought
DATE = "strftime_now"  # what templates ask for the date
THOUGHT_END = "</think>"  # of a thought in a content
ESCAPED = "&#34;"  # a quotation mark
MARK = "\ue000\ue001"  # of Unicode's private use area, so it is in no chat
QUESTION = [{"role": "user", "content": "a"}]
ANSWER = {"role": "assistant", "content": MARK}
WORD = re.compile(r"\s+|\w+|[^\w\s]")


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
        messages = list(map(_with_all_names, messages))
        has_calls = any(message.get("tool_calls") for message in messages)
        problem = None
        for shape in self._shapes if has_calls else SHAPES[:1]:
            try:
                written = self._write(shape(messages), add_generation_prompt=is_prompt, **options)
                if not _is_escaped(written, messages):
                    if has_calls:
                        self._shapes = sorted(SHAPES, key=lambda other: other is not shape)
                    return written
                problem = problem or "it escapes quotation marks as on a web page"
            except Exception as error:  # templates raise whatever they like
                if self._encoder.trial == "now" and isinstance(error, MemoryError):
                    raise
                problem = problem or error
        what = "prompt" if is_prompt else "chat"
        raise SkippedChat(f"the chat template of {self.name} refuses a {what}: {problem}")

    def try_write(self, messages, is_prompt):
        """Return what it makes of messages; None: it refuses them."""
        try:
            return self.write(messages, is_prompt)
        except SkippedChat:
            return None


def thought_of(message):
    """Return what a message thought, by whichever of its names; "": nothing."""
    return next((message[key] for key in REASONING if message.get(key)), "")


def _with_all_names(message):
    """Give the thoughts of a message every name that templates read."""
    thought = thought_of(message)
    return message | dict.fromkeys(REASONING, thought) if thought else message


def _is_escaped(written, messages):
    """Tell whether jinja has escaped a text, as where a template adds to what it calls safe."""
    return ESCAPED in written and ESCAPED not in json.dumps(messages, default=str)


def _with_text_arguments(messages):
    """Write the arguments of calls as JSON, for templates that add them to a text."""
    def as_text(call):
        arguments = call["function"].get("arguments", "")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [_with_calls(message, map(as_text, message.get("tool_calls") or []))
            for message in messages]


def _with_ids(messages):
    """Name calls and their results by nine letters, as Mistral's templates want it."""
    changed = []
    numbers = count()
    names = {}
    waiting = []  # calls without a result so far
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            name = names[call.get("id")] = f"call{next(numbers):05d}"
            calls.append(call | {"id": name})
        waiting += [call["id"] for call in calls]
        if message["role"] == "tool" and waiting:
            name = names.get(message.get("tool_call_id") or MARK)
            name = waiting.pop(waiting.index(name) if name in waiting else 0)
            message = message | {"tool_call_id": name}
        changed.append(_with_calls(message, calls))
    return changed


def _with_calls(message, calls):
    calls = list(calls)
    return message | {"tool_calls": calls} if calls else message


# messages as templates may want them, as most do first
SHAPES = (list, _with_text_arguments, _with_ids,
          lambda messages: _with_text_arguments(_with_ids(messages)))


class Stretch(NamedTuple):
    """Hold characters of a rendering: what the assistant says, and where its turn may end.

    begin: the first character behind the header of the turn.
    low, high: the turn ends with the first token in low .. high - 1 that ends turns.
    """

    begin: int
    low: int
    high: int


class Header(NamedTuple):
    """Hold what stands in front of what the assistant says.

    text: of the template's generation prompt, or else of a turn.
    is_prompt: the template writes a generation prompt.
    least: characters of it with which every turn begins.
    """

    text: str
    is_prompt: bool
    least: int = 0


def header_of(write):
    """Return the Header of a template whose `Template.try_write` this is."""
    question = write(QUESTION, False) or ""
    prompt = _behind(question, write(QUESTION, True))
    # an earlier turn: the last one may have more, such as an empty thought
    chat = write([*QUESTION, ANSWER, *QUESTION], False) or write([*QUESTION, ANSWER], False)
    turn, mark, _ = _behind(question, chat).partition(MARK)
    if prompt:
        return Header(prompt, True, _common_begin(prompt, turn) if mark else 0)
    return Header(turn.rstrip(" ") if mark else "", False)


def _behind(text, whole):
    return whole[len(text) :] if whole and whole.startswith(text) else ""


def behind_answer(write):
    """Return what a template writes behind a last message of the assistant; None: it refuses."""
    whole = write([*QUESTION, ANSWER], False)
    return None if whole is None else whole.rpartition(MARK)[2]


def stretches(messages, text, write, header, ends):
    """Return {number of a message: Stretch} of what the assistant says in a rendering.

    Args:
        text: the rendering of all messages.
        ends: (first, last + 1) characters of the tokens that may end a turn.
    """
    found = {}
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            stretch = _stretch(messages, number, text, write, header, ends)
            if stretch:
                found[number] = stretch
    return found


def _stretch(messages, number, text, write, header, ends):
    before = write(messages[:number], header.is_prompt) if number else ""
    is_refused = before is None
    before = before or ""
    if not (before and header.is_prompt):
        before += header.text
    is_known = before and not is_refused and text.startswith(before)
    begin = len(before) if is_known else None
    if begin is not None:
        is_last = number == len(messages) - 1
        upto = text if is_last else write(messages[: number + 1], False)
        if upto and text.startswith(upto) and begin <= len(upto):
            inside = [end for end in ends if begin <= end[0] < len(upto)]
            end = _last_end(text[: len(upto)], inside)
            if end is not None:
                return Stretch(begin, end, end + 1)
            if not inside:
                return Stretch(begin, len(upto), len(upto))
    marked = list(_with_marks(messages, number, write))
    if not marked:
        return None  # the template writes nothing of the message
    if begin is None:
        begins = [_begin(text, other, header, before) for other in marked]
        if -1 in begins:
            return None  # it is written as another role's, and tools may stand in front of it
        begin = min(begins)
    # All but the message is the same in both renderings.  So what stands behind the last mark
    # stands behind the last part of the message, too.
    tail = min((other.rpartition(MARK)[2] for other in marked), key=len)
    low = max(begin, len(text) - _common_end(text, tail))
    # the turn ends in front of what the next message says
    for message in messages[number + 1 :]:
        content = (message.get("content") or "").strip()
        high = text.find(content, low) if content else -1
        if high >= 0:
            return Stretch(begin, low, high)
    return Stretch(begin, low, len(text))


def _last_end(text, ends):
    """Return where the tokens begin with which a text ends, but for spaces; None: another does."""
    found = None
    high = len(text)
    for first, last in reversed(ends):
        if text[last:high].strip():
            break
        found = high = first
    return found


def _with_marks(messages, number, write):
    """Yield renderings with a mark for the content, the thoughts, or a part of the calls.

    One with marks for all that the message holds, where the template writes it; else one for each.
    """
    message = messages[number]
    variants = [{"content": MARK}, *_marked(message).values()]
    whole = dict(item for variant in variants for item in variant.items())
    for variant in (whole, *variants):
        other = write([*messages[:number], message | variant, *messages[number + 1 :]], False)
        if other and MARK in other:
            yield other
            if variant is whole:
                return


def _marked(message):
    """Return {what of a message: its keys with a mark in that place} of the thoughts and calls."""
    marked = {}
    if thought_of(message):
        marked["thoughts"] = {key: MARK for key in REASONING if message.get(key)}
    if message.get("tool_calls"):  # not the name, which may stand in front of the result, too
        marked["calls"] = {"tool_calls": [
            call | {"function": call["function"] | {"arguments": {"a": MARK}}}
            for call in message["tool_calls"]]}
    return marked


def _begin(text, other, header, before):
    """Return where the assistant begins to speak in a rendering; -1: its Header is nowhere.

    Args:
        other: the rendering with a mark in the message.
        before: a text that ends with the text of the Header.
    """
    place = other.index(MARK)
    shared = _common_begin(text, other[:place])
    # without a header the message begins with its own words, and the space in front of them
    has_header = header.is_prompt and before.endswith(header.text)
    best = 0, -1 if has_header else len(text[:shared].rstrip(" "))
    header, _, least = header
    # not every turn has all of a prompt, such as the beginning of a thought
    cuts = [cut.end() for cut in re.finditer(r"\n|>", header) if cut.end() >= least]
    for cut in {*cuts, len(header)} - {0}:
        upto = before[: len(before) - len(header) + cut]
        here = other.rfind(header[:cut], 0, place)
        while here >= 0:
            # the more of the chat before it is the same, the surer it is that turn's
            same = _common_end(other[: here + cut], upto)
            if same >= cut:  # else this turn has another header
                best = max(best, (same, here + cut))
            here = other.rfind(header[:cut], 0, here)
    return min(best[1], shared)


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
    parts = {}  # of each kind the last one, in {what it is: (number, keys with a mark)}
    for number, message in enumerate(messages):
        marked = _marked(message)
        content = message["content"]
        if content.strip():
            beside = " beside tool calls" if "calls" in marked else ""
            marked[f"what {message['role']} says{beside}"] = {"content": MARK}
        if THOUGHT_END in content and message["role"] == "assistant":
            end = content.index(THOUGHT_END)
            marked["thoughts"] = {"content": MARK + content[end:]}
        if message["role"] == "user":  # templates leave out the thoughts before a question
            parts.pop("thoughts", None)
        parts |= {what: (number, keys) for what, keys in marked.items()}
    for what, (number, keys) in parts.items():
        other = write([*messages[:number], messages[number] | keys, *messages[number + 1 :]], False)
        if other and MARK not in other:
            found.append(f"leaves out {what}")
    prompt = write(messages[:-1], True) if messages[-1]["role"] == "assistant" else None
    if prompt and not text.startswith(prompt):
        found.append(f"asks for an answer with {encoder.header.text!r}, and does not write so the "
                     "last answer; --template_kwargs may tell it whether answers have thoughts")
    return found


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


def common_spans(a, b):
    """List (first character of a, of b, how many) of what two texts have in common, in order.

    Words and longer, beside the longest beginning and end.
    """
    if a == b:
        return [(0, 0, len(a))] if a else []
    begin = _common_begin(a, b)
    end = _common_end(a[begin:], b[begin:])
    spans = [(0, 0, begin)]
    words_a, words_b = [WORD.findall(x[begin : len(x) - end]) for x in (a, b)]
    # the first character of every word and, last, the end
    starts_a = list(accumulate(map(len, words_a), initial=begin))
    starts_b = list(accumulate(map(len, words_b), initial=begin))
    # no match begins at a space or a sign, which stand everywhere; words take them along
    matcher = SequenceMatcher(lambda word: not word[0].isalnum(), words_a, words_b)
    for i, j, num in matcher.get_matching_blocks():
        spans.append((starts_a[i], starts_b[j], starts_a[i + num] - starts_a[i]))
    spans.append((len(a) - end, len(b) - end, end))
    return [span for span in spans if span[2]]
