"""Read flags from a YAML file, as text that means what it would mean on a command line.

    steps: 2000
    learning_rate: 1e-4
    pack: true
    teachers:
      - {model: Qwen/Qwen3-8B, tp: 4}
      - {model: google/gemma-3-4b-it, loss: alm}

Numbers and truth values stay the text that they are, so that parse.py types and checks them like
words of a command line; PyYAML alone would make a text of 1e-4, and a truth value of `no`.

Tests: tests/test_flag_file.py.
"""

import json
import re
from pathlib import Path

import yaml

from isogloss.flags.parse import field_of

# `export: null` asks for no export, and would name a directory "null".
NULLS = ("", "null", "Null", "NULL", "~")


class JsonLike(yaml.SafeLoader):
    """Read plain words as JSON does: 1e-4 is a number; yes, on and dates are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

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
        return yaml.compose(Path(path).expanduser().read_text(encoding="utf-8"), JsonLike)
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


def assignments_of_file(kind, path, file_flag, aliases):
    """Return {field name: text of its value} of a YAML file of flags."""
    keys = {}

    def name_of(key):
        field, negated = field_of(kind, f"--{key}", aliases)
        if negated:
            raise ValueError(f"{key} is no name of a flag; write {field.name}: false")
        if field.name == file_flag:
            raise ValueError(f"{key} cannot name another file; write its lines here")
        if keys.setdefault(field.name, key) != key:
            raise ValueError(f"{field.name} is there twice; keep one of them")
        return field.name

    given = {}
    try:
        for key, value in read_flag_file(path, name_of).items():
            given[name_of(key)] = value
    except ValueError as error:
        raise ValueError(f"--{file_flag} {path}: {error}") from None
    return given
