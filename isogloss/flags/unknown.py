"""Say of an unknown flag what may have been meant.

Tests: tests/test_flags.py.
"""

import difflib

from isogloss.flags.other_names import FOREIGN
from isogloss.flags.parse import fields_by_name

NEAR = 0.8  # of a name like ours; below it a name is more often another thing


def _nearest(name, names, aliases):
    """Return the known name most like `name`, for a letter one that begins with it, or None."""
    if len(name) == 1:
        return next((known for known in names if known.startswith(name)), None)
    near = difflib.get_close_matches(name, [*names, *aliases], 1, NEAR)
    if not near:
        return None
    return aliases.get(near[0], near[0])


def refuse_unknown(kind, flag, name, aliases):
    """Raise a ValueError for a flag that a dataclass does not have.

    Args:
        flag: as it was written; name: of the field that it would be.
        aliases: {other name of a flag: field name}.
    """
    answer = FOREIGN.get(name) if getattr(kind, "has_foreign", False) else None
    if answer:
        raise ValueError(f"unknown flag {flag}; it is {answer}")
    near = _nearest(name, fields_by_name(kind), aliases)
    hint = f"did you mean --{near}?" if near else "--help lists them all"
    if flag.startswith("--"):
        raise ValueError(f"unknown flag --{name}; {hint}")
    raise ValueError(f"unknown flag {flag}; flags begin with two hyphens; {hint}")
