"""Run the small tools: their flags, their errors, the file that they write.

Tests: tests/test_flags.py, tests/test_projection_tools.py.
"""

import dataclasses
import os
import sys
from pathlib import Path

from isogloss.flags.parse import parse_flags, refusing

MOST_SLOTS = 1024  # of a row of a table: 250,000 rows of so many take 4 GB


def shared(kind, name, default=...):
    """Return a field that is a flag of another dataclass too; `...`: with its default."""
    entry = kind.__dataclass_fields__[name]
    return dataclasses.field(default=entry.default if default is ... else default,
                             metadata=entry.metadata)


def check_output(path):
    """Check that a path can be the name of a file to write; a device or a pipe would be replaced.

    Raises:
        ValueError: something else than a file has that name.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}: is no file that could be written anew; name another one")


def tool(kind, main, positional=(), aliases=None, argv=None):
    """Run ``main(args)`` of a small tool; wrong input ends it with one line and exit code 2.

    Args:
        kind: the dataclass of its flags.
        main: function of an instance of that dataclass.
        positional, aliases: as for `parse_flags`.
        argv: the words of the command line; None: those of this process.
    """
    # The source file, because the module is called __main__ when it runs as a program.
    source = Path(main.__code__.co_filename)
    with refusing(f"{source.parent.name}.{source.stem}", loud=True):
        main(parse_flags(kind, sys.argv[1:] if argv is None else argv, positional, aliases))
