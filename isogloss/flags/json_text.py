"""Read what a user has written as JSON: no key twice, and errors in a line.

Tests: tests/test_flag_file.py, tests/test_flags.py.
"""

import json
from collections import Counter


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
