"""Print texts of others as texts: none tells a terminal to clear its screen or to set its title.

Data, names of models and files, templates, servers and errors of libraries may hold control
characters.  A program calls `guard_terminal` once; what this process prints goes through it, by
whomever.  Where a line is to stay one line, `one_line` joins it before.

Tests: tests/test_terminal.py.
"""

import re
import sys
import unicodedata
import warnings
from pathlib import Path

UNKNOWN = "\ufffd"
FORMAT_WARNING = warnings.formatwarning
PACKAGE = str(Path(__file__).resolve().parents[1])  # of whose warnings no place is printed
# What moves a cursor or sets a color, as libraries write it for terminals: it is no text.
SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class _Printed(dict):
    """Map the number of a character to what is printed for it, for `str.translate`."""

    def __missing__(self, number):
        letter = chr(number)
        is_text = letter.isprintable() or letter == "\n" or unicodedata.category(letter) == "Zs"
        self[number] = letter if is_text else UNKNOWN
        return self[number]


PRINTED = _Printed({ord("\t"): " ", ord("\r"): "\n"})


def harmless(text):
    """Return a text of any lines that says nothing to a terminal but its characters."""
    return SEQUENCE.sub("", text.replace("\r\n", "\n")).translate(PRINTED)


def one_line(text):
    """Return a text as one line that says nothing to a terminal but its characters."""
    line = " ".join(str(text).split())
    return "".join(letter if letter.isprintable() else UNKNOWN for letter in line)


class _Guarded:
    """Stand for a text stream, and write what is harmless."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self.stream.write(harmless(text))
        return len(text)

    def writelines(self, lines):
        self.write("".join(lines))


def guard_terminal():
    """Let this process print what is harmless alone, and a warning as a line, from now on."""
    warnings.formatwarning = _format_warning
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream))


def _format_warning(message, category, filename, lineno, line=None):
    bars = sys.modules["tqdm"].tqdm._instances if "tqdm" in sys.modules else ()
    for bar in list(bars):
        bar.clear()  # the warning stands in its place; the next update draws it again
    if filename.startswith(PACKAGE):
        return f"warning: {one_line(message)}\n"
    return FORMAT_WARNING(one_line(message), category, filename, lineno, line)


def unguarded(stream):
    """Return the stream behind a guarded one, for what moves the cursor and has its own colors."""
    return stream.stream if isinstance(stream, _Guarded) else stream
