"""Find out what is wrong with data, and say it in one line that names the file and the row.

Three looks at a data set: the first bytes of its files, before anything reads them; its columns,
by Arrow, which is fast (streams have none); and every row when its turn comes.  The readers of
file_rows.py name the line that they cannot read; of .txt files, which `datasets` reads, `explain`
does.

Tests: tests/test_wrong_data.py.
"""

import bz2
import codecs
import errno
import glob
import gzip
import io
import json
import lzma
import os
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet  # noqa: F401
import zstandard
from datasets import config
from huggingface_hub.constants import HF_HUB_CACHE

from isogloss.data.texts import problem_of
from isogloss.errors import DataError
from isogloss.flags.yaml_file import without_twins

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
NO_SPACE = "Not enough disk space"  # as `datasets` says, which looks before it writes
FULL = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG  # of writing, not of reading
CHECK_SECONDS = 10  # for which JSON values, of which Arrow knows nothing, are checked at first
ROWS_TO_CHECK = 1000  # of them at a time; at least so many are

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
    # Sorted: file systems list files in any order, and the order of samples shall not depend on it.
    if os.path.isdir(path):
        named = [str(file) for file in Path(path).rglob("*") if kind_of(str(file))]
        files = [file for file in named if not os.path.isdir(file)]
        # a compressed file beside what it was made from is a copy
        return sorted(file for file in files if os.path.splitext(file)[0] not in files)
    if os.path.lexists(path):
        return [path]
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
        raise DataError(f"{_place(source, file)}: {problem}")


def check_first_bytes(source, file):
    """Raise a DataError for a file of which the first bytes tell that it is of another kind."""
    is_table = kind_of(file) in ("parquet", "arrow")
    if not os.path.getsize(file):  # one among others does no harm, but to the readers of tables
        problem = "is empty; remove it" if is_table else None
    else:
        problem = _problem_of_file(file)
    if problem:
        raise DataError(f"{_place(source, file)}: {problem}")


def _place(source, file):
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
        return _cut_off(file) if kind == "parquet" else None
    if b"\0" in first:
        return "is no text: it holds NUL bytes; expected UTF-8 (UTF-16 has to be converted)"
    return None


def _cut_off(file):
    """Return what to say of a parquet file that does not end as it begins; None: it does."""
    with open(file, "rb") as stream:
        stream.seek(-4, os.SEEK_END)
        is_whole = os.path.getsize(file) >= 12 and stream.read() == b"PAR1"
    return None if is_whole else "is cut off; download or write it again"


def _first_line(error):
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
        raise DataError(explain(source, error)) from None


def explain(source, error):
    """Return why data cannot be read: the bad line or row of a file, or what the reader said."""
    cause = error.__cause__ or error
    if isinstance(cause, BadLine):
        is_named = str(cause).startswith(f"{source}: ")
        return f"--data {cause}" if is_named else f"--data {source}: {cause}"
    variable, cache = _cache_of(cause, source)
    if cache:
        return (f"{variable} {cache}: cannot be written ({cause.strerror or cause}), and --data "
                f"{source} is kept there; name another directory by this variable, or make room")
    for file in local_files(source):
        problem = _problem_of_text(file) if kind_of(file) == "text" else None
        if problem:
            return f"{_place(source, file)}: {problem}"
    if "corresponds to no data" in str(error):
        return f"--data {source}: {EMPTY_DATA}"
    return f"--data {source}: cannot be read ({type(cause).__name__}: {_first_line(cause)})"


def _cache_of(error, source):
    """Return (variable, directory) of the libraries' cache that an error is about, or two None."""
    caches = {"HF_HUB_CACHE": HF_HUB_CACHE, "HF_DATASETS_CACHE": str(config.HF_DATASETS_CACHE)}
    named = error.filename if isinstance(error, OSError) else None
    if isinstance(named, str) and named not in (os.path.expanduser(source), *local_files(source)):
        for variable, cache in caches.items():
            both = [os.path.abspath(cache), os.path.abspath(named)]
            common = os.path.commonpath(both)
            # above or at the cache, which cannot be made; in it, where a file is not just missing
            if common == both[1] or (common == both[0] and error.errno != errno.ENOENT):
                return variable, cache
    if isinstance(error, OSError) and (error.errno in FULL or NO_SPACE in str(error)):
        return "HF_DATASETS_CACHE", caches["HF_DATASETS_CACHE"]
    return None, None


def _problem_of_text(file):
    """Return which line of a .txt file is not UTF-8, or that it is damaged; None: neither."""
    try:
        with open_bytes(file) as stream:
            for number, line in enumerate(stream, 1):
                if problem := problem_of_bytes(line):
                    return f"line {number} {problem}"
    except DAMAGE as error:
        return damaged(error)
    return None


def damaged(error):
    """Return what to say of a file in which a reader has met damage."""
    return f"is cut off or damaged ({_first_line(error)}); write it again"


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


def problem_of_json(line):
    """Return why a line is no JSON object; None: it is one."""
    try:
        value = json.loads(line, object_pairs_hook=without_twins)
    except RecursionError:
        return "is nested too deep; repair or remove it"
    except json.JSONDecodeError as error:
        return f"is not JSON ({error.msg} at character {error.pos}); repair or remove it"
    except ValueError as error:
        return str(error)
    if type(value) is not dict:
        return f'holds {NAMES_OF_JSON[type(value)]}, expected an object like {{"text": "..."}}'
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
        _check_messages(source, column, text_key)
    elif not _is_string(column.type):  # JSON values
        _check_values(source, dataset, text_key)


def _check_values(source, dataset, text_key):
    """Raise a DataError for the first bad row of JSON values, as far as there is time."""
    deadline = time.monotonic() + CHECK_SECONDS
    number = 0
    for batch in dataset.select_columns([text_key]).iter(ROWS_TO_CHECK):
        for content in batch[text_key]:
            check_content(source, number, text_key, content)
            number += 1
        if time.monotonic() > deadline:  # the others are looked at when their turn comes
            return


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


def _check_messages(source, column, text_key):
    begin = 0
    for chunk in column.chunks:
        messages = chunk.flatten()
        for problem, is_bad in _bad_messages(messages):
            found = pc.index(is_bad, True).as_py()
            if found >= 0:
                rows = pc.list_parent_indices(chunk)
                row = rows[found].as_py()
                message = found - pc.index(rows, row).as_py()
                raise DataError(f"--data {source}: row {begin + row} of {text_key!r}: message "
                                f"{message} {problem}; repair or remove it")
        begin += len(chunk)


def _bad_messages(messages):
    """Yield (problem, mask of the messages that have it)."""
    from isogloss.data.chat_rows import EXCLUDING, ROLES, THOUGHTS

    yield "is null, expected role and content", messages.is_null()
    fields = [field.name for field in messages.type]
    role, content = ("role", "content") if "role" in fields else ("from", "value")
    yield "has no role", pc.struct_field(messages, role).is_null()
    missing = pc.struct_field(messages, content).is_null()
    # A message may be a tool call or a thought alone; that those are not empty is seen later.
    for name in ("tool_calls", "function_call", *THOUGHTS):
        if name in fields:
            missing = pc.and_(missing, pc.struct_field(messages, name).is_null())
    yield "has no content", missing
    for key in EXCLUDING.keys() & fields:
        weights = pc.struct_field(messages, key)
        if pa.types.is_floating(weights.type) or pa.types.is_integer(weights.type):
            is_known = pc.is_in(weights, pa.array([0, 1, None], weights.type))
            names = pc.utf8_lower(pc.utf8_trim_whitespace(pc.struct_field(messages, role)))
            of_assistant = pa.array([name for name in ROLES if ROLES[name] == "assistant"])
            yield (f"has a {key!r} that is not 0 or 1",
                   pc.and_not(pc.is_in(names, of_assistant), is_known))


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
