"""Rows of files of lines, JSON or text: the columns asked for, as they stand in the file.

Readers of tables guess a type for every column: a text that looks like a date becomes a time, an
answer of 007 a number, all messages of a column get the same keys, and a column that nobody asked
for ends the job where a later file has another type of it.  Here a row is what its line says.

A stream reads a large file of lines in pieces, each of which is a shard to `datasets`: so a run
that goes on reads no more again than the piece in which it stopped.  kinds/ reads other files.

Tests: tests/test_open_data.py, tests/test_stream.py.
"""

import io
import itertools
import json
import re
import sys
from typing import NamedTuple
from urllib.parse import urlsplit

import datasets
import fsspec
import pyarrow as pa

from isogloss.data import checks
from isogloss.data.checks import BadLine
from isogloss.data.texts import HALF_PAIR, is_text, listed
from isogloss.flags.json_text import without_twins

ROWS_TO_PEEK = 1000  # rows that tell the type of a column
HEADER = "isogloss_write"  # in the first line of what isogloss-write has written
PIECE_BYTES = 64 * 2**20  # of a file of lines; read in below a second; not tuned
# Type of a value -> of a column that holds no other; of two kinds of numbers the second.
PLAIN_TYPES = {str: "string", bool: "bool", int: "int64", float: "float64"}


class Piece(NamedTuple):
    """Name what of a file is read at a time: the lines that begin in a range of its bytes.

    Attributes:
        key: it changes when the file does.
    """

    file: str
    key: str = ""
    begin: int = 0
    end: int = sys.maxsize


def pieces_of(kind, files, streaming):
    """List the Pieces of files, which may be addresses; only a large file of lines has several."""
    pieces = []
    for file in files:
        filesystem, path = fsspec.core.url_to_fs(file)
        key = filesystem.ukey(path)
        begins = [0]
        if streaming and kind in ("json", "text") and not _suffixes(file)[1]:
            info = filesystem.info(path)
            # servers may not tell the size, or refuse to begin within a file
            size = info["size"] if info.get("partial", True) else None
            begins = range(0, size or 1, PIECE_BYTES)
        for begin, end in zip(begins, [*begins[1:], sys.maxsize]):
            pieces.append(Piece(file, key, begin, end))
    return pieces


def named_rows(kind, pieces, columns):
    """Yield {column: value} of every row of some Pieces.

    Args:
        kind: "json", "csv", "arrow" or "text".
        columns: (name, type) each; a row that lacks one has None.  Where the type is one of
            PLAIN_TYPES, another value is refused; "json": it is one of `datasets.Json`.
    """
    names = [name for name, _ in columns]
    for piece in pieces:
        for index, (number, row) in enumerate(reader_of(kind)(piece, names)):
            for name, dtype in columns:
                value = row.get(name)
                if dtype and value is not None and not _is_of_type(value, dtype):
                    its = checks.NAMES_OF_JSON[type(value)]
                    raise BadLine(f"{_place(piece, name, index, number)} holds {its}, but rows "
                                  f"before have the type {dtype}; write all rows alike")
                if kind == "json" and not is_text(value):
                    raise BadLine(f"{_place(piece, name, index, number)} {HALF_PAIR}; repair or "
                                  "remove the row")
            yield {name: _stored(row.get(name), dtype) for name, dtype in columns}


def _stored(value, dtype):
    """Return a value as its column takes it: one of `datasets.Json` would read a text as JSON."""
    return json.dumps(value) if dtype == "json" and isinstance(value, str) else value


def _place(piece, name, index, number):
    """Say where a value stands in a file; a piece within it does not know how many rows precede."""
    line = f"line {line_in_file(piece, number)}"
    return f"{piece.file}: {name!r} of {line if piece.begin else f'row {index} ({line})'}"


def _is_of_type(value, dtype):
    if dtype == "int64":
        return type(value) is int and -(2**63) <= value < 2**63
    return dtype in ("json", PLAIN_TYPES.get(type(value)), {int: "float64"}.get(type(value)))


# --- pieces -> (line, row) ------------------------------------------------------------------------


def _suffixes(file):
    return checks.split_suffix(urlsplit(file).path if "://" in file else file)


def _open(file):
    return fsspec.open(file, "rb") if "://" in file else open(file, "rb")


def lines_of(piece):
    """Yield the lines of a piece, with what ends them; it may be far away, a file compressed."""
    file = piece.file
    suffix = _suffixes(file)[1]
    with _open(file) as raw:
        stream = checks.OPENERS[suffix](raw, "rb") if suffix else raw
        stream = io.BufferedReader(stream)  # not every reader of compressed files knows lines
        at = 0
        if piece.begin:
            at = stream.seek(piece.begin - 1)
            at += len(stream.readline(piece.end - at))  # of the line before, which may be long
        for number in itertools.count(1):
            try:
                line = stream.readline() if at < piece.end else b""
            except checks.DAMAGE as error:
                if "://" in file:
                    raise
                raise BadLine(f"{file}: {checks.damaged(error)}") from None
            if not line:
                return
            if problem := checks.problem_of_bytes(line):
                raise BadLine(f"{file}: line {line_in_file(piece, number)} {problem}")
            yield line.decode("utf-8" if at else "utf-8-sig")
            at += len(line)


def line_in_file(piece, number):
    """Return which line of its file the number-th one of a piece is, counted from 1."""
    if not piece.begin:
        return number
    left = piece.begin - 1  # the byte before a piece may end the line before
    with _open(piece.file) as stream:
        while read := stream.read(min(left, 2**20)):
            number += read.count(b"\n")
            left -= len(read)
    return number + 1


def json_rows(piece, _):
    """Yield (line, object): one on every line, or a list of them, or a single one."""
    before = _first_line(piece._replace(begin=0, end=piece.begin)) if piece.begin else ""
    if before and _objects(before) is None and _begins_value(piece.file, before):
        return  # the piece in which it begins has it whole
    for number, line in enumerate(lines_of(piece), 1):
        if not line.strip():
            continue
        rows = _objects(line)
        if rows is None and not before and _begins_value(piece.file, line):
            from isogloss.data.kinds.documents import rows_of_value

            yield from rows_of_value(piece, number)
            return
        if rows is None:
            from isogloss.data.kinds.documents import problem_of_json
            number = line_in_file(piece, number)
            raise BadLine(f"{piece.file}: line {number} {problem_of_json(line)}")
        yield from ((number, row) for row in rows if HEADER not in row)
        before = line


def _first_line(piece):
    """Return the first line of a piece that holds something; "": none does."""
    return next(filter(str.strip, lines_of(piece)), "")


def _begins_value(file, line):
    """Tell whether a first line begins a list, or an object over many lines."""
    start = line.strip()
    return start[0] == "[" or start == "{" or _suffixes(file)[0] == ".json"


DECODER = json.JSONDecoder(object_pairs_hook=without_twins)
SPACE = re.compile(r"\s*")


def _objects(line):
    """Return the objects of a line, which is one almost always; None: it holds something else."""
    rows = []
    end = SPACE.match(line).end()
    while end < len(line):
        try:
            row, end = DECODER.raw_decode(line, end)
        except (ValueError, RecursionError):
            return None
        if not isinstance(row, dict):
            return None
        rows.append(row)
        end = SPACE.match(line, end).end()
    return rows


def text_rows(piece, _):
    """Yield (line, {"text": line}), ended as `open` knows it: a lone carriage return does, too."""
    for number, line in enumerate(lines_of(piece), 1):
        for text in io.StringIO(line, newline=None):
            yield number, {"text": text.removesuffix("\n")}


READERS = {"json": json_rows, "text": text_rows}


def reader_of(kind):
    """Return what yields (line, row) of a Piece, given the columns that are wanted."""
    if kind in READERS:
        return READERS[kind]
    from isogloss.data.kinds import tables

    return tables.READERS[kind]


# --- data sets ------------------------------------------------------------------------------------


def first_values(files, wanted=()):
    """Return {column: values} of the first rows of JSON files.

    Args:
        wanted: columns of which seeing one value each is enough; (): of all as many as we look at.
    """
    values = {}
    rows = itertools.chain.from_iterable(json_rows(Piece(file), ()) for file in files)
    for _, row in itertools.islice(rows, ROWS_TO_PEEK):
        for name, value in row.items():
            values.setdefault(name, []).append(value)
        if wanted and all(name in values for name in wanted):
            break
    return values


def feature_of(values):
    """Return the type of a column of JSON values; `datasets.Json` where they have several."""
    values = [value for value in values if value is not None]
    kinds = set(map(type, values))
    if kinds == {int, float}:
        kinds = {float}
    if len(kinds) == 1 and kinds <= set(PLAIN_TYPES):
        return datasets.Value(PLAIN_TYPES[kinds.pop()])
    for value in map(listed, values):  # messages have keys of their own
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return datasets.Json()
    try:
        return datasets.Features.from_arrow_schema(pa.table({"": values}).schema)[""]
    except (pa.ArrowException, ValueError, OverflowError):
        return datasets.Json()


def open_rows_of_files(kind, files, features, streaming):
    """Return a data set of the rows of files, as an IterableDataset where it is a stream.

    Args:
        features: of the columns that are read.
    """
    columns = []
    for name, feature in features.items():
        is_json = isinstance(feature, datasets.Json) and not streaming
        dtype = "json" if is_json else getattr(feature, "dtype", None)
        is_checked = kind == "json" and dtype in ("json", *PLAIN_TYPES.values())
        columns.append((name, dtype if is_checked else None))
    # a list among the arguments would be divided among processes; only the pieces shall be
    arguments = {"kind": kind, "pieces": pieces_of(kind, files, streaming),
                 "columns": tuple(columns)}
    if streaming and kind != "arrow":
        features = None  # with types, every value would be written and read again as JSON
    opened = datasets.IterableDataset if streaming else datasets.Dataset
    return opened.from_generator(named_rows, features=features, gen_kwargs=arguments)
