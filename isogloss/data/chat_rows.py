"""Rows of data as people write them -> the messages that chat templates read.

Messages may differ in their keys; a content may be null or a list of parts; a chat may name its
roles as ShareGPT does ("from", "value"); a list of objects may be an object of lists, as a Sequence
of `datasets` is.  `problem_of` tells what cannot be read, in words that follow the name of the row;
`as_messages` and `as_tools` read what it lets pass.

Tests: tests/test_chat_rows.py.
"""

import json
import warnings

from isogloss.data.long_texts import MOST_CHARACTERS
from isogloss.data.turns import REASONING, thought_of

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
HALF_PAIR = "holds half of a surrogate pair, which is no text"


# --- what is wrong --------------------------------------------------------------------------------


def problem_of(content):
    """Return what is wrong with the text or chat of a row, to follow its name; None: nothing."""
    if isinstance(content, str):
        return None if is_text(content) else f" {HALF_PAIR}"
    if content is None:
        return " is null, expected text"
    content = listed(content)
    if not isinstance(content, list):
        return f" holds {content!r:.40}, expected text"
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
                        "text alone; --drop_images learns the text beside it")
    return None


def _has_text(part):
    return isinstance(part, str) or part.get("type") not in OTHER_PARTS


def is_text(value):
    """Tell whether all strings of a value can be written as UTF-8, which lone surrogates cannot."""
    if isinstance(value, dict):
        return all(map(is_text, value)) and all(map(is_text, value.values()))
    if isinstance(value, list):
        return all(map(is_text, value))
    if not isinstance(value, str) or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def listed(value):
    """Return an object of lists of one length as a list of objects; another value as it is."""
    if not isinstance(value, dict):
        return value
    columns = {key: items for key, items in value.items() if items is not None}
    if not columns or not all(isinstance(items, list) for items in columns.values()):
        return value
    if len(set(map(len, columns.values()))) > 1:
        return value
    return [dict(zip(columns, cells)) for cells in zip(*columns.values())]


def is_message(value):
    return isinstance(value, dict) and ("role" in value or "from" in value)


def chat_of_text(text):
    """Return the messages that a text holds as JSON; None: it is another text."""
    if not text.startswith("["):
        return None
    try:
        chat = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return chat if chat and all(map(is_message, chat)) else None


def _problem_of_message(message):
    if not isinstance(message, dict):
        value = "null" if message is None else f"{message!r:.40}"
        return f"is {value}, expected role and content"
    role = _role_of(message)
    if role is not None and not isinstance(role, str):
        return f"has a role that is {role!r:.40}, expected text"
    content = _content_of(message)
    problem = _problem_of_content(content)
    if problem:
        return problem
    if role is None:
        return "has no role"
    if message.get("role") is None and role.lower() not in ROLES:
        return f"is from {role!r:.40}, expected one of {', '.join(ROLES)}"
    problem = _problem_of_calls(message)
    if problem:
        return problem
    if content is None and not _calls_of(message) and not thought_of(message):
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
        if kind in OTHER_PARTS:
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
    for key in REASONING:
        if not isinstance(message.get(key) or "", str):
            return f"has a {key} that is {message[key]!r:.40}, expected text"
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
        if value is not None and key not in ("role", "content", "from", "value"):
            value = listed(value) if key == "tool_calls" else value
            kept[key] = without_nulls(value) if is_filled else value
    calls = _calls_of(kept)
    if calls:
        kept.pop("function_call", None)
        kept["tool_calls"] = list(map(_as_call, calls))
    return kept


def _role_of(message):
    role = message.get("role")
    return message.get("from") if role is None else role


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
                   for part in content if _has_text(part))


def _known_name(role):
    """Return the name by which templates know a role, with a warning where it is another one."""
    name = role.lower()
    known = OTHER_NAMES.get(name, name if name in ("assistant", "user", "system") else role)
    if known != role:
        warnings.warn(f"messages of the role {role!r} are read as of {known!r}", stacklevel=2)
    return known


def _read_sharegpt(message):
    """Replace the name of a role by that of templates; calls that are written as text are read."""
    name = message["role"].lower()
    message["role"] = ROLES[name]
    if name == "function_call":
        calls = _json_of(message["content"])
        calls = calls if isinstance(calls, list) else [calls]
        if calls and all(isinstance(call, dict) and isinstance(call.get("name"), str)
                         for call in calls):
            message["content"] = ""
            message["tool_calls"] = calls


def _in_wrapper(function):
    """Return a tool or a call as templates expect it: {"type": "function", "function": it}."""
    is_bare = "name" in function and "function" not in function
    return {"type": "function", "function": function} if is_bare else function


def _as_call(call):
    """Return a tool call as templates expect it: in its wrapper, its arguments an object.

    Arguments that are text would be written as JSON once more, and none would be written as such.
    """
    call = _in_wrapper(call)
    arguments = call["function"].get("arguments")
    value = _json_of(arguments) if arguments else {}
    if not isinstance(value, dict):
        return call
    return call | {"function": call["function"] | {"arguments": value}}


def _json_of(value):
    """Return what a text holds as JSON, or None; another value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


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
