"""Find out what is wrong with data, and say it in one line that names the file and the row.

Three looks at a data set: the first bytes of its files, before anything reads them; its columns,
by Arrow, which is fast (streams have none); and every row when its turn comes.  The readers of
file_rows.py name the line that they cannot read; of .txt files, which `datasets` reads,
kinds/faults.py does.

Tests: tests/test_wrong_data.py.
"""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import os
import zlib
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet  # noqa: F401
import zstandard

from isogloss.data.texts import problem_of
from isogloss.errors import DataError

EMPTY_DATA = "the data set is empty; at least one row of text is needed"
READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet",
           ".arrow": "arrow", ".csv": "csv"}


class BadLine(ValueError):
    """Say which line of which file is no row, and why."""


def _open_zstd(file, mode):
    return io.BufferedReader(zstandard.open(file, mode))  # which knows lines


# Suffix behind that of the kind -> how such files are opened.
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)  # what they raise
KINDS = f"{', '.join(READERS)}, the texts also with {', '.join(OPENERS)}"

POINTER = "is a pointer of git-lfs, not the file itself; fetch it with git lfs pull"
PAGE = "is a web page, not the file itself; download it again"
FIRST_BYTES = {"parquet": b"PAR1", "arrow": (b"ARROW1", b"\xff\xff\xff\xff")}
NAMES_OF_JSON = {str: "a string", int: "a number", float: "a number", bool: "a truth value",
                 list: "a list", dict: "an object", type(None): "null"}


def split_suffix(file):
    """Return (suffix that names the kind, suffix of a compression or "") of a file."""
    name, last = os.path.splitext(file)
    if last in OPENERS:
        return os.path.splitext(name)[1].lower(), last
    return last.lower(), ""


def kind_of(file):
    """Return the reader of a file; None: no file of ours."""
    suffix, compression = split_suffix(file)
    kind = READERS.get(suffix)
    return None if compression and kind in ("parquet", "arrow") else kind


def open_bytes(file):
    """Open a file, which may be compressed, to read bytes."""
    return OPENERS.get(split_suffix(file)[1], open)(file, "rb")


def is_saved(folder):
    """Tell whether a directory was written by save_to_disk."""
    names = ("state.json", "dataset_dict.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def local_files(source):
    """List the files that a path, a directory or a glob names; those of a save_to_disk too."""
    # os.path, because pathlib raises for paths that are too long or not to be read
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        from isogloss.data.kinds.several_files import files_below

        return files_below(path)
    if os.path.lexists(path):
        return [path]
    # Sorted: file systems list files in any order, and the order of samples shall not depend on it.
    return sorted(glob.glob(path, recursive=True))


# --- files, before they are read ------------------------------------------------------------------


def check_is_file(source, file):
    """Raise a DataError for what is no file, or may not be read."""
    problem = None
    if not os.path.exists(file):
        problem = "is a link to nothing; repair or remove it"
    elif not os.path.isfile(file):
        problem = f"is no regular file; name files of kind {KINDS}"
    elif not os.access(file, os.R_OK):
        problem = "may not be read; change its permissions"
    if problem:
        raise DataError(f"{place_of(source, file)}: {problem}")


def check_first_bytes(source, file):
    """Raise a DataError for a file of which the first bytes tell that it is of another kind."""
    is_table = kind_of(file) in ("parquet", "arrow")
    if not os.path.getsize(file):  # one among others does no harm, but to the readers of tables
        problem = "is empty; remove it" if is_table else None
    else:
        problem = _problem_of_file(file)
    if problem:
        raise DataError(f"{place_of(source, file)}: {problem}")


def place_of(source, file):
    return f"--data {source}" if file == source else f"--data {source}: {file}"


def _problem_of_file(file):
    """Return what the first bytes of a file tell against it; None: nothing."""
    kind = kind_of(file)
    try:
        with open_bytes(file) as stream:
            first = stream.read(4096)
    except DAMAGE as error:
        return f"is no {split_suffix(file)[1]} file, or damaged ({error}); write it again"
    if not first:
        return "is compressed and holds nothing, or is cut off; write it again, or remove it"
    if first.startswith(b"version https://git-lfs"):
        return POINTER
    start = first.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if kind != "text" and start.startswith((b"<!doctype", b"<html")):
        return PAGE
    if kind in FIRST_BYTES:
        if not first.startswith(FIRST_BYTES[kind]):
            return f"is no file of kind .{kind}; write it again, or name it after its kind"
        from isogloss.data.kinds.tables import problem_of_end

        return problem_of_end(file) if kind == "parquet" else None
    if b"\0" in first:
        return "is no text: it holds NUL bytes; expected UTF-8 (UTF-16 has to be converted)"
    return None


def first_line_of(error):
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- what a reader could not read -----------------------------------------------------------------


@contextmanager
def explained(source):
    """Turn whatever `datasets`, its readers and the network raise into a DataError of one line.

    Args:
        source: what --data says.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        from isogloss.data.kinds.faults import explain

        raise DataError(explain(source, error)) from None


def damaged(error):
    """Return what to say of a file in which a reader has met damage."""
    return f"is cut off or damaged ({first_line_of(error)}); write it again"


def invalid_row(column):
    """Return the first row of an Arrow array whose bytes are not UTF-8, which Arrow does not mind.

    Raises:
        pyarrow.ArrowInvalid: the array is damaged in another way.
    """
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for row in range(len(column)):
            try:
                column[row].as_py()
            except UnicodeDecodeError:
                return row
        raise
    return None


def problem_of_bytes(line):
    """Return what is wrong with the bytes of a line of text; None: nothing."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return (f"is not UTF-8 (byte {line[error.start]:#04x} at {error.start}); convert the file, "
                "as iconv -f LATIN1 -t UTF-8 does for Latin-1")
    return None


# --- columns, by Arrow ----------------------------------------------------------------------------


def name_of_type(feature):
    """Return a name, for people, of what a column holds."""
    if isinstance(feature, dict):
        return f"objects of {', '.join(feature)}"
    items = getattr(feature, "feature", None)
    if items is not None:
        return f"lists of {name_of_type(items)}"
    if type(feature).__name__ == "Json":
        return "mixed types"
    return getattr(feature, "dtype", str(feature))


def check_column(source, dataset, text_key):
    """Raise a DataError where a column of texts or chats of a data set in files has a bad row."""
    column = dataset.data.column(text_key)
    _refuse(source, text_key, _find(column, pc.is_null), "is null, expected text; remove it")
    _check_utf8(source, column, text_key)
    if not has_text(dataset, 0, len(dataset), text_key):
        raise DataError(f"--data {source}: all {len(dataset)} rows of {text_key!r} are empty; "
                        "expected text; name another column with --text_key")
    if pa.types.is_list(column.type) and pa.types.is_struct(column.type.value_type):
        from isogloss.data.chat_rows import check_messages

        check_messages(source, column, text_key)
    elif not _is_string(column.type):  # JSON values
        from isogloss.data.chat_rows import check_rows

        check_rows(dataset.select_columns([text_key]), lambda row, number: check_content(
            source, number, text_key, row[text_key]))


def has_text(dataset, begin, end, text_key):
    """Tell whether any row of a range holds something; where Arrow does not know, yes."""
    lengths = lengths_of(dataset.data.column(text_key).slice(begin, end - begin))
    return lengths is None or bool(pc.max(lengths).as_py())


def lengths_of(column):
    """Return the bytes of texts or the messages of chats, by their offsets; None: not known."""
    if _is_string(column.type):
        return pc.binary_length(without_views(column))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return pc.list_value_length(column)
    return None


def without_views(column):
    """Return a column of texts of which Arrow can compute something, which it cannot of views."""
    return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column


def _is_string(kind):
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) \
        or pa.types.is_string_view(kind)


def _find(column, condition):
    """Return the first row that meets a condition of Arrow, else -1."""
    return pc.index(condition(column), True).as_py() if column.null_count else -1


def _refuse(source, text_key, row, problem):
    if row >= 0:
        raise DataError(f"--data {source}: row {row} of {text_key!r} {problem}")


def _check_utf8(source, column, text_key):
    begin = 0
    for chunk in column.chunks:
        row = invalid_row(chunk)
        if row is not None:
            _refuse(source, text_key, begin + row,
                    "is not UTF-8; convert the text or remove the row")
        begin += len(chunk)


# --- rows, one by one -----------------------------------------------------------------------------


def check_content(source, number, text_key, content):
    """Raise a DataError where a row holds neither text nor a chat.

    Args:
        number: row of the data.
    """
    problem = problem_of(content)
    if problem:
        raise DataError(f"--data {source}: row {number} of {text_key!r}{problem}; repair or "
                        "remove it")
