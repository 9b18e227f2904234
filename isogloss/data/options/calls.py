"""Read tool calls from what an assistant wrote, by its template's own format.

A tokenizer that has a response template is asked by it.  Of any other, two calls whose names and
arguments are marks are rendered by the template: what stands around the marks is the format.  What
does not have that format whole is no call, and it is said why; nothing is guessed.

Tests: tests/test_calls.py.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from isogloss.data.ends import stop_ids
from isogloss.data.texts import HALF_PAIR, is_text
from isogloss.doors import door

MARK = "7208913564120957386412"  # digits, which no template escapes or changes; in no chat
QUESTION = {"role": "user", "content": "a"}

# in no chat, as MARK, and names that templates take for names
NAMES = "f" + MARK, "g" + MARK
KEYS = "k" + MARK, "m" + MARK
VALUES = "v" + MARK, "w" + MARK
DECODER = json.JSONDecoder()
TOOLS = [{"type": "function", "function": {"name": name, "description": "a", "parameters": {
    "type": "object", "properties": {key: {"type": "string"} for key in KEYS}}}} for name in NAMES]


class NoCall(ValueError):
    """Say why a text that begins a call is none, to follow "the call"."""


class Spoken(NamedTuple):
    """Hold what an assistant said.

    content: beside its calls.
    calls: list of {"name", "arguments": object}.
    problem: why what looks like a call is none; "": nothing does.
    before: what stands in front of that.
    """

    content: str
    calls: list
    problem: str = ""
    before: str = ""


@dataclass
class CallFormat:
    """Hold how a template writes calls.

    Attributes:
        before: what stands in front of the first call; between: two calls, None: it writes one
            alone; behind: the last one.  Spaces at their ends do not count.
        read: (text, place, what may follow a call, {(tool, parameter): its type}) ->
            ([(name, arguments)], the place behind it).
    """

    before: str
    between: str | None
    behind: str
    read: Callable

    def calls(self, text, types):
        """Return [(name, arguments)] of a text that is calls and nothing else.

        Args:
            types: {(tool, parameter): its type}.

        Raises:
            NoCall: it has another format.
        """
        ends = [words.strip() for words in (self.behind, self.between or "")]
        place = over(self.before, text, 0)
        calls = []
        while True:
            more, place = self.read(text, place, ends, types)
            calls += more
            with suppress(NoCall):
                if over(self.behind, text, place) == len(text):
                    return calls
            if self.between is None:
                raise NoCall(f"is not followed by {ends[0]!r} and the end")
            place = over(self.between, text, place)


def over(words, text, place):
    """Return the place behind words, whose spaces do not count, and the spaces behind them.

    Raises:
        NoCall: others are there.
    """
    for word in ["", *words.split()]:
        if not text.startswith(word, place):
            raise NoCall(f"has {text[place : place + 20]!r} in place of {word!r}")
        place += len(word)
        while text[place : place + 1].isspace():
            place += 1
    return place


def call_of(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _common_begin(a, b):
    size = 0
    while size < min(len(a), len(b)) and a[size] == b[size]:
        size += 1
    return size


def format_of(encoder):
    """Return the CallFormat of an encoder's template; None: it writes no calls."""
    if "calls" not in encoder.frames:
        encoder.frames["calls"] = _format_of(encoder)
    return encoder.frames["calls"]


def _format_of(encoder):
    first, second = [call_of(name, dict(zip(KEYS, VALUES))) for name in NAMES]
    one, two, plain = (_answer(encoder, content, calls) for content, calls in (
        ("", [first]), ("", [first, second]), (MARK, [])))
    if NAMES[0] not in one:
        return None
    # such as a thought of nothing
    one, two = (text[_common_begin(plain, one) :] for text in (one, two))
    for reading in (_json_with_name, _json_behind_name, _marked_up):
        found = reading(one, NAMES[0])
        if found is None:
            continue
        begin, end, read = found
        other = reading(two[end:], NAMES[1])
        between = two[end : end + other[0]] if other else None
        return CallFormat(one[:begin], between, one[end:], read)
    return None


def _answer(encoder, content, calls):
    """Return what a template writes of an answer, as it would be written; "": nothing."""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    chats = door("chats")
    try:
        rendering = chats.render([QUESTION, message], encoder, TOOLS)
    except chats.SkippedChat:
        return ""
    for turn in rendering.turns[-1:]:
        located = rendering.located
        inside = (located.begin >= turn.begin) & (located.end <= turn.end)
        return text_with_names(rendering.ids[inside], encoder)
    return ""


def _json_with_name(text, called):
    """Return (begin, end, reader) of a call that is JSON and names itself; None: it does not."""
    for found in re.finditer(r"[\[{]", text):
        value, end = _decoded(text, found.start())
        item = value[0] if isinstance(value, list) and value else value
        paths = [_path_of(item, is_it) for is_it in (
            lambda part: part == called, lambda part: _object(part) == dict(zip(KEYS, VALUES)))]
        if None in paths or not isinstance(item, dict):
            continue
        return found.start(), end, partial(_read_json, type(value), paths)
    return None


def _read_json(kind, paths, text, place, ends, types):
    """Read calls that are JSON; see `CallFormat.read`.

    Args:
        kind: list or dict; paths: keys that lead to a call's name and to its arguments.
    """
    value, end = _decoded(text, place)
    if not isinstance(value, kind):
        raise NoCall("is no JSON" if value is None else
                     f"is no {'list' if kind is list else 'object'}")
    calls = []
    for item in value if kind is list else [value]:
        name, arguments = (_at(item, path) for path in paths)
        calls.append(_checked(name, _object(arguments)))
    return calls, end


def _json_behind_name(text, called):
    """Return (begin, end, reader) of a name and JSON of its arguments; None: it is none."""
    begin = text.find(called)
    behind = begin + len(called)
    start = text.find("{", behind)
    value, end = _decoded(text, start) if begin >= 0 and start >= 0 else (None, 0)
    if not isinstance(value, dict) or KEYS[0] not in value:
        return None
    middle = text[behind:start].strip()
    # some number their calls
    pattern = re.compile(r"\s*(.*?)\s*" + re.sub(r"\d+", r"\\d+", re.escape(middle)) + r"\s*(?={)")

    def read(text, place, ends, types):
        found = pattern.match(text, place)
        if not found:
            raise NoCall(f"has no {middle + '{'!r} behind a name")
        value, end = _decoded(text, found.end())
        return [_checked(found[1], value)], end

    return begin, end, read


def _marked_up(text, called):
    """Return (begin, end, reader) of names and values between marks; None: it is none."""
    words = called, KEYS[0], VALUES[0], KEYS[1], VALUES[1]
    begins = [text.find(word) for word in words]
    if -1 in begins or begins != sorted(begins):
        return None
    ends = [begin + len(word) for begin, word in zip(begins, words)]
    opening, middle, between = (text[ends[i] : begins[i + 1]] for i in range(3))
    shared = _common_begin(between, text[ends[4] :])
    closing, comma = between[:shared].strip(), between[shared:].strip()
    middle = middle.strip()
    is_json = middle.endswith('"') and closing.startswith('"')
    if is_json:  # of a text; others have no quotation marks
        middle, closing = middle[:-1], closing[1:]
    if not middle:
        return None

    def read(text, place, ends, types):
        found = re.compile(r"\s*([\w.\-]+)").match(text, place)
        if not found:
            raise NoCall("has no name")
        name, place = found[1], over(opening, text, found.end())
        arguments = {}
        while not any(end and text.startswith(end, over("", text, place)) for end in ends):
            if arguments:
                place = over(comma, text, place)
            middle_at = text.find(middle, place)
            if middle_at < 0:
                raise NoCall(f"has no {middle!r}")
            key = text[place:middle_at].strip()
            place = middle_at + len(middle)
            if is_json:
                value, place = _decoded(text, place)
                place = over(closing, text, place)
            else:
                end = text.find(closing, place)
                value = _typed(text[place:end].strip("\n"), types.get((name, key)))
                place = end + len(closing)
                if end < 0:
                    raise NoCall("has an argument without an end")
            arguments[key] = value
        return [_checked(name, arguments)], place

    return begins[0], ends[4] + shared, read


def _types_of(tools):
    """Return {(tool, parameter): its type}."""
    types = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        for key, schema in properties.items():
            types[function.get("name"), key] = schema.get("type") if isinstance(
                schema, dict) else None
    return types


def _typed(text, kind):
    """Return a value that is written as it is; a tool says of which type it is."""
    if kind == "string":
        return text
    words = {"True": True, "False": False, "None": None}
    value, end = _decoded(text, 0)
    return words.get(text, value if end == len(text) else text)


def _decoded(text, place):
    """Return (JSON value that begins at a place or behind spaces there, its end); (None, place)."""
    place = over("", text, place)
    try:
        return DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _object(value):
    """Return what arguments say that are an object, or JSON of one."""
    return _decoded(value, 0)[0] if isinstance(value, str) else value


def _path_of(value, is_it, path=()):
    """Return the keys that lead to a part of an object; None: it has no such part."""
    if is_it(value):
        return path
    for key, part in value.items() if isinstance(value, dict) else ():
        found = _path_of(part, is_it, (*path, key))
        if found is not None:
            return found
    return None


def _at(value, path):
    for key in path:
        if not isinstance(value, dict) or key not in value:
            raise NoCall(f"has no {key!r}")
        value = value[key]
    return value


def _checked(name, arguments):
    if not isinstance(name, str) or not name:
        raise NoCall("has no name")
    if not isinstance(arguments, dict):
        raise NoCall("has no arguments that are an object")
    try:
        if not is_text([name, arguments]):  # JSON can say it, and no template can write it
            raise NoCall(HALF_PAIR)
    except RecursionError:
        raise NoCall("is no JSON: it is too deep") from None
    return name, arguments


# --- what was said --------------------------------------------------------------------------------


def text_with_names(ids, encoder):
    """Return what ids spell, control tokens by their names, without one that ends a turn."""
    table = encoder.table
    ids = list(map(int, ids))
    if ids and ids[-1] in stop_ids(encoder):
        ids = ids[:-1]
    pieces = []
    run = []
    for token in [*ids, None]:
        if token is not None and not table.special[token]:
            run.append(token)
            continue
        pieces.append(table.decode(run).decode(errors="replace"))
        run = []
        if token is not None:
            pieces.append(encoder.tokenizer.convert_ids_to_tokens(token))
    return "".join(pieces)


def without_names(text, encoder):
    """Return a text of `text_with_names` without the names of control tokens."""
    for token in np.flatnonzero(encoder.table.special):
        name = encoder.tokenizer.convert_ids_to_tokens(int(token))
        text = text.replace(name, "") if name else text
    return text


def spoken(text, encoder, tools, prompt=""):
    """Read an answer.

    Args:
        text: see `text_with_names`.
        tools: that it may call; None or empty: nothing is read as a call.
        prompt: what the template wrote in front of it.
    Returns:
        Spoken.
    """
    if not tools:
        return Spoken(text, [])
    if getattr(encoder.tokenizer, "response_template", None):
        return _by_response_template(text, encoder, tools, prompt)
    its = format_of(encoder)
    if its is None:
        return Spoken(text, [])
    opening = its.before.split()[0] if its.before.strip() else ""
    begin = text.find(opening) if opening else len(text) - len(text.lstrip())
    if begin < 0 or not (opening or text[begin : begin + 1] in ("{", "[")):
        return Spoken(text, [])
    try:
        calls = its.calls(text[begin:], _types_of(tools))
        _check_names(calls, tools)
    except NoCall as error:
        return Spoken(text, [], f"the call {error}", text[:begin])
    return Spoken(text[:begin].rstrip(), [call_of(*call) for call in calls])


def message_of(ids, text, encoder, tools, prompt):
    """Return (message of the assistant, why what looks like a call is none, what is before that).

    Of a text in which nothing looks like one both are "".

    Args:
        ids: that it wrote; text: what they spell without control tokens.
        tools, prompt: see `spoken`.
    """
    said = spoken(text_with_names(ids, encoder), encoder, tools, prompt)
    message = {"role": "assistant", "content": text}
    if said.calls:
        content = without_names(said.content, encoder)
        message |= {"content": content, "tool_calls": said.calls}
    return message, said.problem, without_names(said.before, encoder)


def _by_response_template(text, encoder, tools, prompt):
    """Read an answer as transformers does by a tokenizer's response template."""
    try:
        message = encoder.tokenizer.parse_response(text, prefix=prompt, tools=tools)
        calls = []
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            calls.append(_checked(function.get("name"), _object(function.get("arguments"))))
        _check_names(calls, tools)
        content = str(message.get("content") or "")
    except Exception as error:  # by a template of others, which may raise anything
        return Spoken(text, [], f"the call cannot be read ({error})"[:200], "")
    return Spoken(content if calls else text, [call_of(*call) for call in calls])


def _check_names(calls, tools):
    names = [tool.get("function", tool).get("name") for tool in tools]
    for name, _ in calls:
        if name not in names:
            raise NoCall(f"is of {name!r:.60}, and there are {', '.join(map(str, names))}")


def write_calls_alike(encoders):
    """Tell whether the templates of two encoders begin a call with the same words."""
    first, second = map(format_of, encoders)
    return (first and first.before.split()) == (second and second.before.split())
