"""Say in one line what is wrong, behind the name of the program.

Tests: tests/test_flags.py.
"""

import os
import sys
from contextlib import contextmanager

from isogloss.flags.model_names import without_secrets


def program_name():
    """Return what messages call this program: distill.py, or the module that runs by itself."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = getattr(spec, "name", "")
    return name if name.startswith("isogloss.") else "distill.py"


def one_line(text):
    """Return a text as one line that says nothing to a terminal but its characters."""
    line = " ".join(str(text).split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def line_about(error, program=None):
    """Return the line that says an error, without secrets."""
    return f"{program or program_name()}: {one_line(without_secrets(str(error)))}"


def refuse(error, program=None, loud=None):
    """End this process with one line on stderr and exit code 2.

    For wrong flags, before the ranks know of one another; see `launch.fail` for what comes later.

    Args:
        loud: whether this rank prints the line; None: rank 0 does.
    """
    if loud or (loud is None and int(os.environ.get("RANK", 0)) == 0):
        print(line_about(error, program), file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextmanager
def refusing(program):
    """End a tool by one line where the block raises a ValueError."""
    try:
        yield
    except ValueError as error:
        refuse(error, program, loud=True)
