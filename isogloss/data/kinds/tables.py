"""Read tables: the rows of CSV and Arrow files, and the columns that tables have.

Tests: tests/test_open_data.py, tests/test_column_types.py.
"""

import csv
import os
import re
from dataclasses import dataclass

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from isogloss.data.checks import BadLine, damaged
from isogloss.data.file_rows import Piece, lines_of

LONE_RETURN = re.compile(r"(?<=\r)(?!\n)")


def _text_lines(file):
    """Yield the lines of a CSV file for its reader, which takes no carriage return within one."""
    for line in lines_of(Piece(file)):
        yield from LONE_RETURN.split(line) if "\r" in line else [line]


def csv_rows(piece, names):
    """Yield (line, {name: text}); a cell is what stands there, and an empty one the empty text.

    It is read whole: a line end may stand in a cell, and none tells which.
    """
    file = piece.file
    of_process = csv.field_size_limit(2**31 - 1)
    reader = csv.reader(_text_lines(file), strict=True)
    header = None
    try:
        for cells in reader:
            if header is None:
                header = cells
                _check_header(file, header, names)
            elif len(cells) > len(header):
                raise BadLine(f"{file}: line {reader.line_num} has {len(cells)} cells, and the "
                              f"header {len(header)}; put cells that hold a comma in quotes")
            elif cells:  # an empty line is no row
                yield reader.line_num, dict(zip(header, cells))
    except csv.Error as error:
        raise BadLine(f"{file}: line {reader.line_num} is no CSV ({error}); repair it") from None
    finally:
        csv.field_size_limit(of_process)


def _check_header(file, header, names):
    for name in names:
        if header.count(name) > 1:
            raise BadLine(f"{file}: the column {name!r} is there twice; rename or remove one")


def arrow_rows(piece, names):
    """Yield (row, {name: value}) of an Arrow file, or of a stream in a file."""
    file = piece.file
    number = 0
    try:
        for batch in arrow_batches(file):
            known = [name for name in names if name in batch.schema.names]
            for row in batch.select(known).to_pylist():
                yield number, row
                number += 1
    except pa.ArrowException as error:
        raise BadLine(f"{file}: {damaged(error)}") from None


READERS = {"csv": csv_rows, "arrow": arrow_rows}


@dataclass
class UnknownType:
    """Stand for a type of Arrow that `datasets` does not know, as of a column that nobody reads."""

    dtype: str

    def __call__(self):
        """Refuse to be a type of `datasets`, which calls those it knows."""
        raise ValueError(f"no type of `datasets` is {self.dtype}; write that column as JSON")


def columns_of(kind, file):
    """Return {column: type} of a file; {} of an empty one."""
    if kind == "csv":
        header = next(csv.reader(_text_lines(file)), [])
        return {name: datasets.Value("string") for name in header}
    schema = _schema_of(kind, file)
    columns = {}
    for field in schema:
        try:
            alone = pa.schema([field], schema.metadata)
            columns |= datasets.Features.from_arrow_schema(alone)
        except ValueError:
            columns[field.name] = UnknownType(str(field.type))
    return columns


def _schema_of(kind, file):
    """Return the Arrow schema of a parquet or an Arrow file."""
    if kind == "arrow":
        return next(arrow_batches(file)).schema
    with fsspec.open(file, "rb") as stream:
        table = pq.ParquetFile(stream)
        schema = table.schema_arrow
        if not table.metadata.num_rows:
            raise BadLine(f"{file}: holds no row; remove it")
    _check_header(file, schema.names, schema.names)
    return schema


def arrow_batches(file):
    """Yield the record batches of an Arrow file, or of an Arrow stream in a file."""
    with pa.memory_map(file) as stream:
        if stream.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
            return
        stream.seek(0)
        yield from pa.ipc.open_stream(stream)


def problem_of_end(file):
    """Return what to say of a parquet file that does not end as it begins; None: it does."""
    with open(file, "rb") as stream:
        stream.seek(-4, os.SEEK_END)
        is_whole = os.path.getsize(file) >= 12 and stream.read() == b"PAR1"
    return None if is_whole else "is cut off; download or write it again"
