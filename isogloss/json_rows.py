"""Chats from JSON files: every message keeps its own keys.

Readers of tables give all messages of a column one type, and fail where a later one does not fit
it.  Here a row is what its line says; columns that nobody asked for are not looked at.

Tests: tests/test_open_data.py.
"""

import io
import itertools
import json

import datasets
import fsspec

ROWS_TO_PEEK = 1000  # rows that tell the type of a column
PLAIN_TYPES = {str: "string", bool: "bool", int: "int64", float: "float64"}


class BadLine(ValueError):
    """Say which line of which file is no row."""


def file_keys(files):
    """Return (file, what changes when the file does) of each; files may be addresses."""
    keys = []
    for file in files:
        filesystem, path = fsspec.core.url_to_fs(file)
        keys.append((file, filesystem.ukey(path)))
    return keys


def json_rows(files, columns):
    """Yield {column: value} of every row of some JSON files.

    Args:
        files: see `file_keys`.
        columns: names; a row that lacks one has None.
    """
    for file, _ in files:
        for row in rows_of_file(file):
            yield {name: row.get(name) for name in columns}


def rows_of_file(file):
    """Yield the objects of a file: one on every line, or a list of them, or a single one."""
    with fsspec.open(file, "rb", compression="infer") as stream:
        # not every reader of compressed files knows lines
        lines = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig")
        is_first = True
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _parsed(line)
            if isinstance(row, dict):
                yield row
            elif is_first:  # a list, or a value over many lines
                yield from _rows_of_value(file, line + lines.read(), number)
                return
            else:
                raise BadLine(f"{file}: line {number} is not a JSON object like "
                              '{"messages": [...]}')
            is_first = False


def _parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def _rows_of_value(file, text, number):
    """Yield the objects of a file that is one JSON value."""
    rows = _parsed(text)
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise BadLine(f"{file}: line {number} is not JSON; expected an object on every line")
    for row in rows:
        if not isinstance(row, dict):
            raise BadLine(f"{file}: holds {row!r:.40} among its rows, expected objects")
        yield row


# --- data sets ------------------------------------------------------------------------------------


def holds_nested(files, column):
    """Tell whether a column holds lists of objects, as chats are, in the first rows of files."""
    try:
        for row in _first_rows(files):
            value = row.get(column)
            if isinstance(value, list) and any(isinstance(item, dict) for item in value):
                return True
            if isinstance(value, str):
                return False
    except (ValueError, OSError):  # whoever reads the whole of it says what is wrong
        return False
    return False


def _first_rows(files):
    """Return an iterator over the first rows of some files, with all their columns."""
    rows = itertools.chain.from_iterable(rows_of_file(file) for file, _ in files)
    return itertools.islice(rows, ROWS_TO_PEEK)


def features_of(files, json_keys, plain_keys, optional_keys):
    """Return the columns of JSON files that are read, with their types.

    Args:
        json_keys: names of columns of any values.
        plain_keys: of those that hold texts or numbers.
        optional_keys: of any values; they may first come in a late row.
    """
    values = {}  # of the first rows, one that is not null where there is one
    for row in _first_rows(files):
        for name, value in row.items():
            if values.get(name) is None:
                values[name] = value
    features = datasets.Features()
    for name in (*json_keys, *optional_keys):
        if name in values or name in optional_keys:
            features[name] = datasets.Json()
    for name in plain_keys:
        if name in values:
            dtype = PLAIN_TYPES.get(type(values[name]))
            features[name] = datasets.Value(dtype) if dtype else datasets.Json()
    return features


def open_chats(files, features, streaming):
    """Return a data set of the rows of JSON files, as an IterableDataset where it is a stream.

    Args:
        files: see `file_keys`.
        features: see `features_of`.
    """
    # a list among the arguments would be divided among processes; only the files shall be
    arguments = {"files": files, "columns": tuple(features)}
    if streaming:  # with types, every value would be written and read again as JSON
        return datasets.IterableDataset.from_generator(json_rows, gen_kwargs=arguments)
    return datasets.Dataset.from_generator(json_rows, features=features, gen_kwargs=arguments)
