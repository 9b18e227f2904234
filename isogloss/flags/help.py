"""Write the help of a program from the dataclass of its flags."""

import inspect
import shutil
import sys
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path

from isogloss.flags.parse import fields_by_name, groups_of

# Columns of the help: below 60 a description becomes a ribbon, above 120 the eye loses its line.
NARROWEST = 60
WIDEST = 120


def help_text(kind, width=None, positional=(), aliases=None):
    """Return the help of a dataclass: usage, the docstring's first paragraph, all of its flags.

    Args:
        width: columns; None: the terminal's, between 60 and 120.
        positional, aliases: as for `parse_flags`.
    """
    if width is None:
        columns = shutil.get_terminal_size().columns  # 80 where there is no terminal
        width = min(max(columns, NARROWEST), WIDEST)
    by_name = fields_by_name(kind)
    summary = inspect.getdoc(kind).split("\n\n")[0]
    blocks = [_usage(kind, positional, width), _wrapped(summary, width)]
    for title, names in (groups_of(kind) or {"flags": by_name}).items():
        entries = [_flag_help(by_name[name], width) for name in names]
        blocks.append("\n".join([f"{title}:", *entries]))

    if any(field.type is bool for field in by_name.values()):
        note = "A BOOL flag may stand alone: --flag means --flag=true, --noflag means --flag=false."
        blocks.append(_wrapped(note, width))
    if aliases:
        pairs = [f"--{old} for --{new}" for old, new in aliases.items()]
        blocks.append(_wrapped(f"Other names that work: {', '.join(pairs)}.", width))
    return "\n\n".join(blocks)


def _wrapped(text, width, indent=""):
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,  # paths and flags stay whole, so that they can be copied
        break_on_hyphens=False,
    )


def _usage(kind, positional, width):
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        program = Path(sys.argv[0]).name
    else:  # it was started by python -m, which names a package "package.__main__"
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    command = kind.__name__.removesuffix("Args").lower()
    if sys.argv[1:2] == [command]:  # one of several, as isogloss transfer
        program = f"{program} {command}"
    words = [f"usage: {program}", *map(str.upper, positional)]
    for field in fields(kind):
        if field.default is MISSING and field.name not in positional:
            words.append(f"--{field.name} {_type_name(field)}")
    words.append("[--flag value ...]")
    return _wrapped(" ".join(words), width)


def _type_name(field):
    return "TEXT" if field.type is str else field.type.__name__.upper()


def _flag_help(field, width):
    """Return a flag's name, type and default on one line, and its description below."""
    default = field.default
    if default is MISSING:
        note = "required"
    elif field.type is bool:
        note = f"default: {str(default).lower()}"  # as it is written on the command line
    elif default == "":
        note = 'default: ""'
    else:
        note = f"default: {default}"
    about = _wrapped(field.metadata.get("about", ""), width, indent=" " * 6)
    return f"  --{field.name} {_type_name(field)} ({note})\n{about}"
