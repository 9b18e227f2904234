"""Read flags from a YAML file, as text that means what it would mean on a command line.

    steps: 2000
    learning_rate: 1e-4
    pack: true
    teachers:
      - {model: Qwen/Qwen3-8B, tp: 4}
      - {model: google/gemma-3-4b-it, loss: alm}

Numbers and truth values stay the text that they are, so that flags.py types and checks them like
words of a command line; PyYAML alone would make a text of 1e-4, and a truth value of `no`.

Tests: tests/test_flag_file.py.
"""

import json
import os
import re
import stat
from collections import Counter

import yaml

# `export: null` asks for no export, and would name a directory "null".
NULLS = ("", "null", "Null", "NULL", "~")
MOST_BYTES = 2**18  # of a file that people write; PyYAML takes seconds for it
MOST_RECORD = 2**26  # of one that a program writes


class JsonLike(yaml.SafeLoader):
    """Read plain words as JSON does: 1e-4 is a number; yes, on and dates are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def compose_node(self, parent, index):
        """Refuse aliases: a few lines of them stand for more than any memory holds."""
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                problem=f"the alias *{event.anchor}; write out what it stands for",
                problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        """Refuse a key that is there twice, of which PyYAML would take the last."""
        seen = set()
        for key in (str(key.value) for key, _ in node.value):
            if key in seen:
                raise yaml.constructor.ConstructorError(problem=f"{key} is there twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~", "n~"),
    ("int", r"-?(0|[1-9][0-9]*)", "-0123456789"),
    ("float", r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", "-0123456789"),
):
    JsonLike.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_whole(path, most_bytes=MOST_BYTES):
    """Return the text of a file that a flag names: a regular one of bounded size.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        ValueError: it is a pipe, a device or too large; the message does not name the file.
    """
    # a pipe that nobody writes to would let a plain open wait
    descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is a pipe, a device or a directory; expected a regular file")
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise ValueError(f"has more than {most_bytes} characters; expected a small file of "
                         "settings")
    return text


def bounded_lines(file, most=MOST_RECORD):
    """Iterate over the lines of an open file of text.

    Raises:
        ValueError: one is longer than any that is meant to be read.
    """
    while line := file.readline(most):
        if len(line) == most:
            raise ValueError(f"a line of {most} characters or more")
        yield line


def read_flag_file(path, check_key=lambda key: None):
    """Return {key: text of its value} of a file of flags, in its order.

    A list of plain values becomes one text with commas, any other list or object JSON.

    Args:
        path: of a YAML file that holds one object.
        check_key: raises a ValueError for a key that is no flag; asked of all before any value is
            read.
    Raises:
        ValueError: it cannot be read, is no such file, or says a thing twice; the message names
            the line, not the file.
    """
    node = _document(path)
    if node is None or node.id != "mapping":
        kind = "nothing" if node is None else f"a {node.id}"
        raise ValueError(f"holds {kind}; expected lines like steps: 2000")
    given = {}
    for key, _ in node.value:
        if key.id == "scalar":
            check_key(key.value)
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise ValueError(f"{line}: expected the name of a flag in front of the colon")
        if key.value in given:
            raise ValueError(f"{line}: {key.value} is there twice; keep one of them")
        is_plain = value.id == "scalar" and value.style is None
        if is_plain and value.value in NULLS:
            raise ValueError(f"{line}: {key.value} has no value; leave the line out")
        try:
            given[key.value] = _text_of(value)
        except (yaml.YAMLError, TypeError, RecursionError) as error:
            problem = getattr(error, "problem", None) or error
            raise ValueError(f"{line}: {key.value} is no plain value ({problem})") from None
    return given


def _document(path):
    """Return the node of a YAML file, None of an empty one."""
    try:
        return yaml.compose(read_whole(path), JsonLike)
    except RecursionError:
        raise ValueError("is nested too deep; expected lines like steps: 2000") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); expected a YAML file of "
                         "flags") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8; expected a YAML file of flags") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ValueError(f"{line}not YAML ({problem})") from None


def _text_of(node):
    """Return the value of a YAML node as a flag has it on a command line."""
    if node.id == "scalar":
        return node.value
    if node.id == "sequence" and all(item.id == "scalar" for item in node.value):
        return ",".join(item.value for item in node.value)
    return json.dumps(JsonLike("").construct_document(node))


def without_twins(pairs):
    """Return a dict of (key, value) pairs; JSON would take the last of two in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has the key {name!r} twice; remove one")
    return values


def parse_json(flag, text, example=""):
    """Return what a text in JSON says that a user has written.

    Args:
        flag: that names it, for errors; example: what to write, for errors.
    Raises:
        ValueError: it is no JSON, is nested too deep, holds an endless number, or a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=without_twins)
    except RecursionError:
        reason = "nested too deep"
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}"
    except ValueError as error:  # a number of thousands of digits, or a twin
        reason = error
    raise ValueError(f"{flag}: not valid JSON ({reason}){example}")
