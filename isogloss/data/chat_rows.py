"""Rows of data as people write them -> the messages that chat templates read.

Messages may differ in their keys; a content may be null or a list of parts; a chat may name its
roles as ShareGPT does ("from", "value"); a list of objects may be an object of lists, as a Sequence
of `datasets` is.  `problem_of_chat` tells what cannot be read, in words that follow the name of the
row; `as_messages` and `as_tools` read what it lets pass, and `in_shape` has what single templates
want.

Tests: tests/test_chat_rows.py.
"""

import itertools
import json
import time
import warnings

import pyarrow as pa
import pyarrow.compute as pc

from isogloss.data.texts import (
    HALF_PAIR,
    MOST_CHARACTERS,
    is_text,
    listed,
)
from isogloss.errors import DataError

# Keys of what a message thought: names that templates read, and all that data has.
REASONING = "reasoning_content", "reasoning", "thinking", "tool_plan"
THOUGHTS = (*REASONING, "thought", "reasoning_details")
THOUGHT_PARTS = "thinking", "reasoning"  # types of parts of a content
# Keys that say whether a message is learned -> the value that says no; the other one of 0 and 1.
EXCLUDING = {"weight": 0, "loss": 0, "train": 0, "trainable": 0, "training": 0, "loss_mask": 0,
             "loss_weight": 0, "masked": 1}
CHECK_SECONDS = 10  # for which JSON is checked before the first step
ROWS_TO_CHECK = 1000  # of it at a time; at least so many are
STAND_IN = 918_273_645_000_000  # and more: numbers that are in no chat
EXCLUDING_WORDS = "mask", "loss", "train"  # in a key that may say so, too
# Names that no template knows for the assistant and the user -> theirs, in any case.
OTHER_NAMES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "bot": "assistant", "ai": "assistant",
    "function": "tool",
}
# What ShareGPT's "from" says -> the role of chat templates.
ROLES = OTHER_NAMES | {
    "user": "user", "assistant": "assistant",
    "function_call": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}
TEXT_PARTS = "text", "input_text", "output_text"  # of chats, of the responses of an API

OTHER_PARTS = "image", "image_url", "input_image", "video", "audio", "input_audio"


# --- what is wrong --------------------------------------------------------------------------------


def problem_of_chat(content):
    """Return what is wrong with the chat of a row, to follow its name; None: nothing."""
    size = 0
    for number, message in enumerate(content):
        problem = _problem_of_message(message)
        if problem:
            return f": message {number} {problem}"
        read = _as_message(message, is_filled=False)
        if not is_text(read):
            return f": message {number} {HALF_PAIR}"
        size += len(read["content"])
    if size > MOST_CHARACTERS:
        return f" holds a chat of {size} characters, and up to {MOST_CHARACTERS} can be read"
    return None


def part_without_text(chat):
    """Return the words for the first image or sound of a chat, to follow its name; None: none."""
    for number, message in enumerate(chat):
        content = _content_of(message)
        for part in content if isinstance(content, list) else ():
            if not _has_text(part):
                return (f": message {number} has a part of type {part['type']!r}, and models read "
                        "text alone; drop_images of an entry of --data learns the text beside it")
    return None


def _has_text(part):
    return isinstance(part, str) or part.get("type") not in OTHER_PARTS


def _is_thought(part):
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _problem_of_message(message):
    if not isinstance(message, dict):
        value = "null" if message is None else f"{message!r:.40}"
        return f"is {value}, expected role and content"
    role = message.get("from") if message.get("role") is None else message["role"]
    if role is not None and not isinstance(role, str):
        return f"has a role that is {role!r:.40}, expected text"
    content = _content_of(message)
    problem = _problem_of_content(content)
    if problem:
        return problem
    if role is None:
        return "has no role"
    role = role.strip()
    if message.get("role") is None and role.lower() not in ROLES:
        return f"is from {role!r:.40}, expected one of {', '.join(ROLES)}"
    problem = _problem_of_calls(message) or _problem_of_thoughts(message)
    if problem:
        return problem
    if ROLES.get(role.lower()) == "assistant":
        for key in EXCLUDING.keys() & message.keys():
            if message[key] not in (None, 0, 1):
                return (f"has a {key!r} that is {message[key]!r:.40}, expected 0 or 1, or a truth "
                        "value: a message is learned or not (weight_key has weights of rows)")
    if content is None and not _calls_of(message) and not _thought_in(message):
        return "has no content"
    return None


def _problem_of_content(content):
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"has a content that is {content!r:.40}, expected text"
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            return f"has a content that is {content!r:.40}, expected text"
        kind = part.get("type") or "text"
        if kind in (*OTHER_PARTS, *THOUGHT_PARTS):
            continue
        if kind not in TEXT_PARTS:
            return f"has a part of type {kind!r:.40}, expected parts of text alone"
        if not isinstance(part.get("text"), str):
            return f"has a part without text ({part!r:.40})"
    return None


def _problem_of_calls(message):
    calls = _calls_of(message)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return f"has tool_calls that are {calls!r:.40}, expected a list of objects"
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"has a tool call that is {call!r:.40}, expected a function with a name"
    return None


def _problem_of_thoughts(message):
    for key in THOUGHTS:
        value = message.get(key) or ""
        if not isinstance(value, str | list | dict):
            return f"has a {key} that is {value!r:.40}, expected text"
    return None


def _calls_of(message):
    """Return the calls of a message, or the one by which OpenAI's chats had it before."""
    call = message.get("function_call")
    return listed(message.get("tool_calls")) or ([call] if call else [])


def problem_of_tools(tools):
    """Return what is wrong with the tools of a row, to follow its column's name; None: nothing."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            return f" holds {tools!r:.40}, expected a list of tools, or JSON of one"
    tools = listed(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return f" holds {tools!r:.40}, expected a list of tools"
    return None if is_text(tools) else f" {HALF_PAIR}"


# --- what is read ---------------------------------------------------------------------------------


def as_messages(chat, is_filled=False):
    """Return the messages of a chat: role, content and whatever else a template may read.

    Args:
        is_filled: the column has one type for all messages, so that null stands for what a message
            does not have, deep inside too.
    """
    return [_as_message(message, is_filled) for message in chat]


def _as_message(message, is_filled):
    """Return a message with a role and a content of text, without keys that are null."""
    kept = {"role": _role_of(message), "content": _joined(_content_of(message))}
    if message.get("role") is None:
        _read_sharegpt(kept)
    else:
        kept["role"] = _known_name(kept["role"])
    for key, value in message.items():
        if value is not None and key not in ("role", "content", "from", "value", *THOUGHTS):
            value = listed(value) if key == "tool_calls" else value
            kept[key] = without_nulls(value) if is_filled else value
    if _thought_in(message):
        kept[REASONING[0]] = _thought_in(message)
    if kept["role"] == "assistant":
        for key in kept.keys() - EXCLUDING.keys():
            if any(word in key.lower() for word in EXCLUDING_WORDS):
                warnings.warn(f"messages have a key {key!r}, which is not read: if it says what is "
                              'not learned, name it "weight" and let it be 0 there', stacklevel=2)
    calls = _calls_of(kept)
    for key in ("function_call", "tool_calls"):  # some templates ask whether there is a list
        kept.pop(key, None)
    if calls:
        kept["tool_calls"] = list(map(_as_call, calls))
    return kept


def _role_of(message):
    role = message.get("role")
    return (message["from"] if role is None else role).strip()


def _content_of(message):
    content = message.get("content")
    return listed(message.get("value") if content is None else content)


def _joined(content):
    """Return a content as one text; templates write a null as the word None, so "" for that."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part["text"]
                   for part in content if _has_text(part) and not _is_thought(part))


def _thought_in(message):
    """Return what a message thought, by a key or by parts of its content; "": nothing is known."""
    for key in THOUGHTS:
        thought = _text_of_thought(message.get(key))
        if thought:
            return thought
    content = _content_of(message)
    return _text_of_thought(list(filter(_is_thought, content if isinstance(content, list) else [])))


def _text_of_thought(value):
    """Return the text of a thought, which may be a list of parts; encrypted ones have none."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        keys = ("text", "summary", "content", *THOUGHT_PARTS)
        return next(filter(None, (_text_of_thought(value.get(key)) for key in keys)), "")
    return "".join(map(_text_of_thought, value)) if isinstance(value, list) else ""


def is_learned(message):
    """Tell whether a message is one of the assistant's that its row does not exclude."""
    excludes = [key for key, value in EXCLUDING.items()
                if message.get(key) is not None and message[key] == value]
    return message["role"] == "assistant" and not excludes


def _known_name(role):
    """Return the name by which templates know a role, with a warning where it is another one."""
    name = role.strip().lower()
    known = OTHER_NAMES.get(name, name if name in ("assistant", "user", "system") else role)
    if known != role:
        warnings.warn(f"messages of the role {role!r} are read as of {known!r}", stacklevel=2)
    return known


def _read_sharegpt(message):
    """Replace the name of a role by that of templates; calls that are written as text are read."""
    name = message["role"].lower()
    message["role"] = ROLES[name]
    if name == "function_call":
        numbers = {}
        calls = _json_of(message["content"], numbers)
        calls = calls if isinstance(calls, list) else [calls]
        if calls and all(isinstance(call, dict) and isinstance(call.get("name"), str)
                         for call in calls):
            message["content"] = ""
            message["tool_calls"] = [_with_numbers(call, numbers) for call in calls]


def _in_wrapper(function):
    """Return a tool or a call as templates expect it: {"type": "function", "function": it}."""
    is_bare = "name" in function and "function" not in function
    return {"type": "function", "function": function} if is_bare else function


def _as_call(call):
    """Return a tool call as templates expect it: in its wrapper, and with arguments.

    Those that are text stay as they are: a model has written these letters, see `in_shape`.
    """
    call = _in_wrapper(call)
    arguments = call["function"].get("arguments") or {}
    return call | {"function": call["function"] | {"arguments": arguments}}


def _json_of(text, numbers):
    """Return what a text holds as JSON; None: it is none.

    Args:
        numbers: {a number as Python writes it: as the text has it}, to which those are added that
            Python would write otherwise, such as 1e3; others stand for them, see `restored`.
    """
    def number(read, written):
        value = read(written)
        if json.dumps(value) == written:
            return value
        value = STAND_IN + len(numbers) + 0.5
        numbers[str(value)] = written
        return value

    try:
        return json.loads(text, parse_int=lambda written: number(int, written),
                          parse_float=lambda written: number(float, written))
    except (ValueError, RecursionError):
        return None


def restored(text, numbers):
    """Return a text with the numbers that others stand for; see `_json_of`."""
    for stand_in, written in numbers.items():
        text = text.replace(stand_in, written)
    return text


def _with_numbers(call, numbers):
    """Return a call whose arguments are text if they hold numbers that others stand for."""
    text = json.dumps(call.get("arguments"), ensure_ascii=False)
    if restored(text, numbers) == text:
        return call
    return call | {"arguments": restored(text, numbers)}


def as_tools(tools, is_filled=False):
    """Return the tools of a row as a list of objects; None: there are none."""
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    tools = listed(tools)
    if not tools:
        return None
    return list(map(_in_wrapper, without_nulls(tools) if is_filled else tools))


def without_nulls(value):
    """Return a value without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# --- what single templates want -------------------------------------------------------------------


def thought_of(message):
    """Return what a message thought, by whichever of the names that templates read; "": nothing."""
    return next((message[key] for key in REASONING if message.get(key)), "")


def with_all_names(message):
    """Give the thoughts of a message every name that templates read."""
    thought = thought_of(message)
    return message | dict.fromkeys(REASONING, thought) if thought else message


def _as_it_is(arguments, numbers):
    return arguments


def _as_object(arguments, numbers):
    value = _json_of(arguments, numbers) if isinstance(arguments, str) else arguments
    return value if isinstance(value, dict) and is_text(value) else arguments


def _as_text(arguments, numbers):
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


# (whether calls are named by nine letters, what becomes of arguments), as most want them first
SHAPES = list(itertools.product((False, True), (_as_it_is, _as_object, _as_text)))


def in_shape(messages, shape, numbers):
    """Return messages with their calls in one of the SHAPES; numbers: see `_json_of`."""
    has_names, form = shape
    changed = []
    for message in _with_ids(messages) if has_names else messages:
        calls = []
        for call in message.get("tool_calls") or []:
            arguments = form(call["function"].get("arguments", {}), numbers)
            calls.append(call | {"function": call["function"] | {"arguments": arguments}})
        changed.append(message | {"tool_calls": calls} if calls else message)
    return changed


def has_its_arguments(text, messages):
    """Tell whether a rendering has all arguments that are text, neither escaped nor left out."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str) and arguments not in text:
                return False
    return True


def _with_ids(messages):
    """Name calls and their results by nine letters, as Mistral's templates want it."""
    changed = []
    numbers = itertools.count()
    names = {}
    waiting = []  # calls without a result so far
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            name = f"call{next(numbers):05d}"
            names[call.get("id")] = name
            calls.append(call | {"id": name})
            waiting.append(name)
        if message["role"] == "tool" and waiting:
            name = names.get(message.get("tool_call_id") or object())
            name = waiting.pop(waiting.index(name) if name in waiting else 0)
            message = message | {"tool_call_id": name}
        changed.append(message | {"tool_calls": calls} if calls else message)
    return changed


def check_rows(dataset, check):
    """Call check(row, number) for the rows of a data set, as far as there is time.

    Of these values Arrow knows nothing.  The others are looked at when their turn comes.
    """
    deadline = time.monotonic() + CHECK_SECONDS
    numbers = itertools.count()
    for batch in dataset.iter(ROWS_TO_CHECK):
        for row in listed(batch):
            check(row, next(numbers))
        if time.monotonic() > deadline:
            return


def check_messages(source, column, text_key):
    """Raise a DataError for the first bad message of a column of chats, by Arrow."""
    begin = 0
    for chunk in column.chunks:
        messages = chunk.flatten()
        for problem, is_bad in _bad_messages(messages):
            found = pc.index(is_bad, True).as_py()
            if found >= 0:
                rows = pc.list_parent_indices(chunk)
                row = rows[found].as_py()
                message = found - pc.index(rows, row).as_py()
                raise DataError(f"--data {source}: row {begin + row} of {text_key!r}: message "
                                f"{message} {problem}; repair or remove it")
        begin += len(chunk)


def _bad_messages(messages):
    """Yield (problem, mask of the messages that have it)."""
    yield "is null, expected role and content", messages.is_null()
    fields = [field.name for field in messages.type]
    role, content = ("role", "content") if "role" in fields else ("from", "value")
    yield "has no role", pc.struct_field(messages, role).is_null()
    missing = pc.struct_field(messages, content).is_null()
    # A message may be a tool call or a thought alone; that those are not empty is seen later.
    for name in ("tool_calls", "function_call", *THOUGHTS):
        if name in fields:
            missing = pc.and_(missing, pc.struct_field(messages, name).is_null())
    yield "has no content", missing
    for key in EXCLUDING.keys() & fields:
        weights = pc.struct_field(messages, key)
        if pa.types.is_floating(weights.type) or pa.types.is_integer(weights.type):
            is_known = pc.is_in(weights, pa.array([0, 1, None], weights.type))
            names = pc.utf8_lower(pc.utf8_trim_whitespace(pc.struct_field(messages, role)))
            of_assistant = pa.array([name for name in ROLES if ROLES[name] == "assistant"])
            yield (f"has a {key!r} that is not 0 or 1",
                   pc.and_not(pc.is_in(names, of_assistant), is_known))
