"""Look at an alignment: in a terminal, student above teacher, or as a page.

    python align.py --student A --teacher B --show "in 2010" [--html PAGE]

Needs numpy, numba and align.py; copy both files, and tokenizer_files.py for models that hold no
tokenizer.json.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_align.py.
"""

import html
import sys
from typing import NamedTuple

try:
    from .align import TokenTable, align, coverage
except ImportError:  # copied beside it, not into a package
    from align import TokenTable, align, coverage

RED = "\x1b[31m"
YELLOW = "\x1b[33m"
CYAN = "\x1b[36m"
RESET = "\x1b[0m"


class Cell(NamedTuple):
    """Tokens shown side by side: those of one chunk, or dropped ones (chunk -1)."""

    chunk: int
    student: list
    teacher: list


def view(alignment, student_ids, teacher_ids, student_table, teacher_table, color=True, width=100):
    """Return lines that show the chunks, student above teacher; dropped tokens are red.

    Args:
        alignment: Alignment of the ids.
        student_ids, teacher_ids: (S,) and (T,) ints.
        color: paint with ANSI escapes; chunks alternate between two colors.
        width: characters of a line, about.
    """
    lines = []
    top = ""
    bottom = ""
    used = 0  # characters of the line, without the escapes
    student = _shown_tokens(student_ids, alignment.student_chunk, student_table)
    teacher = _shown_tokens(teacher_ids, alignment.teacher_chunk, teacher_table)
    for cell in _cells(student, teacher):
        student_text = "\u2502".join(cell.student)
        teacher_text = "\u2502".join(cell.teacher)
        size = max(len(student_text), len(teacher_text)) + 2
        if used + size > width and used:
            lines += [top, bottom, ""]
            top = ""
            bottom = ""
            used = 0
        top += _painted(student_text.ljust(size), cell.chunk, color)
        bottom += _painted(teacher_text.ljust(size), cell.chunk, color)
        used += size  # may exceed the width by one cell, if that alone is wider
    return [*lines, top, bottom]


def _cells(student, teacher):
    """Group the (chunk, token) pairs of both sides into cells, in reading order."""
    cells = []
    while student or teacher:
        # tokens without chunk first: they stand before the next chunk of their side
        dropped = Cell(-1, _take(student, -1), _take(teacher, -1))
        if dropped.student or dropped.teacher:
            cells.append(dropped)
        if student or teacher:
            chunk = min(side[0][0] for side in (student, teacher) if side)
            cells.append(Cell(chunk, _take(student, chunk), _take(teacher, chunk)))
    return cells


def _take(side, chunk):
    """Remove the tokens of a chunk from the front of (chunk, token) pairs and return them."""
    tokens = []
    while side and side[0][0] == chunk:
        tokens.append(side.pop(0)[1])
    return tokens


def _shown_tokens(ids, chunks, table):
    """Return (chunk, token as people want to see it) of every token."""
    shown = []
    for i, chunk in zip(ids, chunks):
        # spaces as dots, what is no text escaped, a token without bytes as an empty set
        if table.special[i]:
            text = repr(table.tokens[i])[1:-1]
        else:
            text = repr(table.bytes_of(i).decode(errors="replace"))[1:-1]
            text = text.replace(" ", "\u00b7") or "\u2205"
        shown.append((int(chunk), text))
    return shown


def _painted(text, chunk, color):
    if not color:
        return text
    if chunk < 0:
        return RED + text + RESET
    return (CYAN if chunk % 2 else YELLOW) + text + RESET


# chunks of two colors, dropped tokens red; the two rows of a cell stand one above the other
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 monospace; margin: 2em; }}
.cell {{ display: inline-block; margin: 0 2px 1em 0; vertical-align: top; }}
.cell > div {{ padding: 0 3px; min-height: 1.5em; }}
.even {{ background: #fff3c4; }} .odd {{ background: #cdeefd; }} .dropped {{ background: #ffc9c9; }}
.token + .token {{ border-left: 1px solid #555; }}
.token {{ padding: 0 2px; white-space: pre; }}
</style>
<p>{description}</p>
<div>
{cells}
</div>
"""


def html_page(alignment, student_ids, teacher_ids, student_table, teacher_table, title=""):
    """Return a page that shows what `view` does, with what each token is as its tooltip."""
    student = _html_tokens(student_ids, alignment.student_chunk, student_table)
    teacher = _html_tokens(teacher_ids, alignment.teacher_chunk, teacher_table)
    cells = []
    for cell in _cells(student, teacher):
        color = "dropped" if cell.chunk < 0 else ("even", "odd")[cell.chunk % 2]
        sides = "".join(f"<div>{''.join(tokens)}</div>" for tokens in (cell.student, cell.teacher))
        cells.append(f'<div class="cell {color}">{sides}</div>')
    description = html.escape(described(alignment))
    return PAGE.format(title=html.escape(title), description=description, cells="\n".join(cells))


def _html_tokens(ids, chunks, table):
    """Return (chunk, markup) of every token."""
    tokens = []
    for i, (chunk, text) in zip(ids, _shown_tokens(ids, chunks, table)):
        about = f"id {i}, chunk {chunk}" if chunk >= 0 else f"id {i}, in no chunk"
        markup = f'<span class="token" title="{about}">{html.escape(text)}</span>'
        tokens.append((chunk, markup))
    return tokens


def described(alignment):
    """Return the coverage of an alignment as one line."""
    figures = []
    for name, value in coverage(alignment).items():
        figures.append(f"{name} {value}" if name == "chunks" else f"{name} {value:.1%}")
    return ", ".join(figures)


USAGE = """usage: python align.py --student A --teacher B --show TEXT [--html PAGE]
A, B: hub id, directory or tokenizer.json; PAGE: file to write, beside what is printed"""


def main(argv=None):
    """Show how two tokenizers cut a text."""
    argv = sys.argv[1:] if argv is None else argv
    if argv in (["--help"], ["-h"]):
        print(USAGE)
        return
    flags = _read_flags(argv)
    text = flags["show"]
    try:
        text.encode()
    except UnicodeEncodeError as error:  # what is no UTF-8 comes as lone surrogates
        raise SystemExit(f"--show: is not UTF-8 (at character {error.start}); convert it") from None
    student = _load_tokenizer("student", flags["student"])
    teacher = _load_tokenizer("teacher", flags["teacher"])
    tables = TokenTable.from_tokenizer(student), TokenTable.from_tokenizer(teacher)
    for tokenizer in (student, teacher):
        tokenizer.no_truncation()  # settings of whoever saved it
        tokenizer.no_padding()
    student = student.encode(text, add_special_tokens=False)
    teacher = teacher.encode(text, add_special_tokens=False)
    alignment = align(student.ids, teacher.ids, *tables, text, student.offsets, teacher.offsets)
    color = sys.stdout.isatty()
    try:
        print(*view(alignment, student.ids, teacher.ids, *tables, color=color), sep="\n")
    except UnicodeEncodeError as error:
        raise SystemExit(f"--show: the output is {error.encoding}, which lacks characters of it; "
                         "set PYTHONIOENCODING=utf-8") from None
    print(described(alignment))
    if "html" in flags:
        page = html_page(alignment, student.ids, teacher.ids, *tables, title=text[:80])
        try:
            with open(flags["html"], "w", encoding="utf-8") as file:
                file.write(page)
        except OSError as error:
            raise SystemExit(_plain(f"--html {flags['html']}: cannot be written "
                                    f"({error.strerror}); name another file")) from None


def _plain(text):
    """Return a text as one line that says nothing to a terminal but its characters."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def _read_flags(argv):
    """Return {name: value} of a command line; end with a line where it says something else."""
    flags = {}
    for name, value in zip(argv[::2], argv[1::2]):
        name = name.removeprefix("--")
        if name == "text":  # the first name of --show
            name = "show"
        if name not in ("student", "teacher", "show", "html"):
            raise SystemExit(f"{_plain(f'--{name}')}: no such flag\n{USAGE}")
        flags[name] = value
    if len(argv) % 2 or not {"student", "teacher", "show"} <= set(flags):
        raise SystemExit(USAGE)
    return flags


def _load_tokenizer(flag, name):
    """Load a tokenizer; end with a line where there is none."""
    # imported here, because only the command line needs them
    from pathlib import Path

    from tokenizers import Tokenizer

    path = Path(name).expanduser()
    try:
        if path.is_dir() and not (path / "tokenizer.json").is_file():
            return _of_other_files(path)
        if path.exists():
            return Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        try:
            return Tokenizer.from_pretrained(name)
        except Exception:  # of many types; a repository may hold other files
            return _of_other_files(name)
    except Exception as error:  # tokenizers and the hub have many types of them
        reason = str(error).strip().partition("\n")[0].removesuffix(".")
        raise SystemExit(_plain(f"--{flag} {name}: cannot be loaded ({reason}); expected a hub id, "
                                "a directory or a tokenizer.json")) from None


def _of_other_files(place):
    """Return the tokenizer of a directory or hub id that holds no tokenizer.json."""
    from transformers import logging  # seconds to import

    try:
        from .tokenizer_files import load
    except ImportError:
        from tokenizer_files import load
    logging.set_verbosity_error()  # what it raises is reported in one line, which stands alone
    return load(place).backend_tokenizer


if __name__ == "__main__":
    main(sys.argv[1:])
