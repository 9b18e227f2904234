"""Read flags whose value is a list of entries, as --teachers and --data may have.

Tests: tests/test_config.py, tests/test_mixture.py.
"""

import math

from isogloss.flags.json_text import parse_json
from isogloss.flags.parse import LONGEST_NAME


def read_entries(name, text, example):
    """Return the entries of a table.

    Args:
        name: the flag's name; example: what to write, for errors.
    Raises:
        ValueError: it is no list of JSON objects.
    """
    # a string, because fire would read a list its own way
    entries = parse_json(f"--{name}", text, f"; expected a list such as {example}")
    is_list = isinstance(entries, list) and entries
    if not is_list or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"--{name}: expected a list of objects such as {example}")
    return entries


def check_entry(flag, entry, name, keys, others):
    """Raise a ValueError for an entry of a table with a wrong key, name or weight.

    Args:
        flag: name of the table's; name: of the entry.
        keys: that it may have; others: names of those before it.
    """
    for key in entry:
        if key not in keys:
            raise ValueError(f"--{flag}: unknown key {key!r}; its keys are {', '.join(keys)}")
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
        raise ValueError(f"--{flag}: name {name!r:.40}: expected a text of at most {LONGEST_NAME} "
                         "characters")
    if name in others:
        raise ValueError(f"--{flag}: two are named {name}; give each a name of its own")
    weight = entry.get("weight", 1.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not (is_number and 0 < weight < math.inf):
        raise ValueError(f"--{flag}: weight {weight!r} of {name}: expected a number above 0")
