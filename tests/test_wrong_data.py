"""Wrong data ends a job with one line that names the file and the row; odd data works."""

import gzip
import json
import os
import pickle
import shutil
import socket
import zipfile

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from isogloss.data import load_dataset
from jobs import ds_config
from wrong_input import Wrong, check_one_line, run_wrong

GOOD = ["Ein café in Graz.", "naïve façade", "plain words", "more of them", "the last line"]
USER = {"role": "user", "content": "a question"}
ASSISTANT = {"role": "assistant", "content": "an answer"}
CHAT = [USER, ASSISTANT]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}] {{ m.content }}"
    "{{ eos_token }}{% endfor %}")
# --- how files are written ------------------------------------------------------------------------


def rows(*values, key="text"):
    """Return the lines of a .jsonl file with such values."""
    return "\n".join(json.dumps({key: value}, ensure_ascii=False) for value in values) + "\n"


def lines(*texts):
    return "\n".join(texts) + "\n"


def table(*values, **columns):
    return pa.table({"text": list(values)} | columns)


def invalid_strings():
    """Return a table whose third row is not UTF-8, as programs write that do not look."""
    data = pa.array([b"good", b"good", b"caf\xe9", b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(data), data.buffers())
    return pa.table({"text": text})


def parquet(content):
    sink = pa.BufferOutputStream()
    pq.write_table(content, sink)
    return sink.getvalue().to_pybytes()


def arrow(content):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content)
    return sink.getvalue().to_pybytes()


def chats(*some):
    return rows(*some)


# --- wrong files ----------------------------------------------------------------------------------

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
PAGE = "<!DOCTYPE html><html><body>404: Not Found</body></html>\n"
GOOD_PARQUET = parquet(table(*GOOD))
GOOD_ARROW = arrow(table(*GOOD))
LINES = lines(*GOOD)
ROWS = rows(*GOOD)
# {file: (its content, part of the line)}
FILES = {
    # encodings
    "latin1.txt": (LINES.encode("latin-1"), "latin1.txt: line 1 "),
    "latin1_late.txt": (lines("one", "two", "café").encode("latin-1"), "latin1_late.txt: line 3 "),
    "latin1.jsonl": (rows("one", "café").encode("latin-1"), "latin1.jsonl: line 2 "),
    "latin1.json": ('[\n{"text": "café"}]'.encode("latin-1"), "latin1.json: line 2 "),
    "latin1.csv": (lines("text", "café").encode("latin-1"), "latin1.csv: line 2 "),
    "utf16.txt": (LINES.encode("utf-16"), "utf16.txt: is UTF-16"),
    "utf16.jsonl": (ROWS.encode("utf-16"), "utf16.jsonl: is UTF-16"),
    "utf16.json": (json.dumps(GOOD).encode("utf-16"), "utf16.json: is UTF-16"),
    "utf16.csv": (lines("text", *GOOD).encode("utf-16"), "utf16.csv: is UTF-16"),
    "utf16_bare.txt": (LINES.encode("utf-16-le"), "utf16_bare.txt: "),
    "utf32.txt": (LINES.encode("utf-32"), "utf32.txt: is UTF-32"),
    "surrogate.jsonl": ('{"text": "a"}\n{"text": "\\ud800"}\n', "surrogate.jsonl"),
    "invalid.parquet": (parquet(invalid_strings()), "row 2 of 'text' is not UTF-8"),
    "invalid.arrow": (arrow(invalid_strings()), "row 2 of 'text' is not UTF-8"),
    # files of another kind than their names say
    "cut.parquet": (GOOD_PARQUET[:-20], "cut.parquet: "),
    "short.parquet": (b"PAR1", "short.parquet: "),
    "text.parquet": (LINES, "text.parquet: "),
    "page.parquet": (PAGE, "page.parquet: is a web page"),
    "pointer.parquet": (LFS, "pointer.parquet: is a pointer of git-lfs"),
    "arrow.parquet": (GOOD_ARROW, "arrow.parquet: "),
    "cut.arrow": (GOOD_ARROW[: len(GOOD_ARROW) // 2], "cut.arrow: "),
    "noise.arrow": (b"\xff" * 500, "noise.arrow: "),
    "parquet.arrow": (GOOD_PARQUET, "parquet.arrow: is a parquet file"),
    "parquet.jsonl": (GOOD_PARQUET, "parquet.jsonl: is a parquet file"),
    "parquet.txt": (GOOD_PARQUET, "parquet.txt: is a parquet file"),
    "parquet.csv": (GOOD_PARQUET, "parquet.csv: is a parquet file"),
    "pdf.txt": (b"%PDF-1.7\n%\xe2\xe3\n", "pdf.txt: is a PDF file"),
    "database.csv": (b"SQLite format 3\0" + b"\0" * 80, "database.csv: is a SQLite"),
    "pickle.jsonl": (pickle.dumps({"text": GOOD}), "pickle.jsonl: "),
    "page.jsonl": (PAGE, "page.jsonl: is a web page"),
    "page.csv": (PAGE, "page.csv: is a web page"),
    "pointer.jsonl": (LFS, "pointer.jsonl: is a pointer of git-lfs"),
    "pointer.txt": (LFS, "pointer.txt: is a pointer of git-lfs"),
    "cut.jsonl.gz": (gzip.compress(ROWS.encode() * 99)[:-20], "cut.jsonl.gz: "),
    "not_zipped.jsonl.gz": (ROWS, "not_zipped.jsonl.gz: is no gzip file"),
    "notes.docx": (b"PK\3\4", "files of kind .docx; expected"),
    "no_suffix": (LINES, "expected"),
    "zeros.txt": (b"\0" * 100, "zeros.txt: line 1 holds the character NUL"),
    # JSON
    "broken.jsonl": (rows("a", "b") + '{"text": "c"\n' + rows("d"), "broken.jsonl: line 3 "),
    "cut.jsonl": (ROWS[:-10], "cut.jsonl: line 5 "),
    "comma.jsonl": ('{"text": "a"},\n{"text": "b"},\n', "comma.jsonl: line 1 "),
    "two.jsonl": ('{"text": "a"} {"text": "b"}\n', "two.jsonl: line 1 "),
    "repr.jsonl": ("{'text': 'a'}\n", "repr.jsonl: line 1 "),
    "strings.jsonl": ('"a"\n"b"\n', "strings.jsonl: line 1 holds a string"),
    "bare.jsonl": ("1\n2\n", "bare.jsonl: line 1 holds a number"),
    "lists.jsonl": ('["a"]\n["b"]\n', "lists.jsonl: line 1 holds a list"),
    "nothing.jsonl": ("null\nnull\n", "nothing.jsonl: line 1 holds null"),
    "one_string.jsonl": (rows("a") + '"b"\n', "one_string.jsonl: line 2 holds a string"),
    "words.jsonl": ("plain words\n", "words.jsonl: line 1 "),
    "cut.json": (json.dumps(GOOD)[:-5], "cut.json: "),
    "empty_list.json": ("[]", "the data set is empty"),
    "a_number.json": ("7", "a_number.json: line 1 holds a number"),
    "list_of_numbers.json": ("[1, 2]", "holds int64, expected text"),
    "blank.jsonl": ("\n\n\n", "the data set is empty"),
    "twice.jsonl": ('{"text": "a", "text": "b"}\n', "twice.jsonl: line 1 "),
    # values
    "numbers.jsonl": (rows(1, 2), "holds int64, expected text"),
    "truths.jsonl": (rows(True, False), "holds bool, expected text"),
    "objects.jsonl": (rows({"a": 1}), "holds objects of a, expected text"),
    "words_in_lists.jsonl": (rows(["a", "b"], ["c"]), "holds lists of string, expected text"),
    "ids.jsonl": (rows([1, 2], [3]), "holds lists of int64, expected text"),
    "nulls.jsonl": (rows(None, None), "holds null, expected text"),
    "one_null.jsonl": (rows("a", "b", None), "row 2 of 'text' is null"),
    "missing.jsonl": (rows("a") + '{"other": "b"}\n', "row 1 of 'text' is null"),
    "mixed.jsonl": (rows("a", "b", 3), "mixed"),
    "mixed_lists.jsonl": (rows("a", ["b"]), "mixed"),
    "mixed_objects.jsonl": (rows("a", {"b": 1}), "mixed"),
    "null.parquet": (parquet(table("a", None)), "row 1 of 'text' is null"),
    "bytes.parquet": (parquet(table(b"a", b"b")), "holds binary, expected text"),
    "twice.parquet": (parquet(pa.table([["a"], ["b"]], names=["text", "text"])),
                      "the column 'text' is there twice"),
    "no_rows.parquet": (parquet(pa.table({"text": pa.array([], pa.string())})),
                        "the data set is empty"),
    "empties.jsonl": (rows("", "", ""), "all 3 rows of 'text' are empty"),
    "empties.txt": ("\n\n\n", "all 3 rows of 'text' are empty"),
    "empties.parquet": (parquet(table("", "")), "all 2 rows of 'text' are empty"),
    "rest_is_empty.jsonl": (rows("a", "b", "", ""), "--eval_rows 2: "),
    "held_out_is_empty.jsonl": (rows("", "", "a", "b"), "--eval_rows 2: "),
    # tables
    "quotes.csv": ('text\n"a\nb\nc\n', "quotes.csv: "),
    "wide.csv": ("text\na\nb,c,d\n", "wide.csv: "),
    "no_header.csv": ("a,b\nc,d\n", "no column 'text'; it has a, b"),
    "semicolons.csv": ("text;label\na;b\n", "no column 'text'; it has text;label"),
    "twice.csv": ("text,text\na,b\n", "the column 'text' is there twice"),
    "empty_cell.csv": ("text,label\na,1\n,2\n", "row 1 of 'text' is null"),
    "header.csv": ("text\n", "the data set is empty"),
    "numbers.csv": ("text\n1\n2\n", "holds int64, expected text"),
    # chats
    "sharegpt.jsonl": (chats([{"from": "human", "value": "a"}]),
                       "holds lists of objects of from, value; expected text"),
    "bare_message.jsonl": (chats(USER, USER), "holds objects of "),
    "empty_chats.jsonl": (chats([], []), "expected text"),
    "all_chats_empty.parquet": (parquet(pa.table({"text": pa.array(
        [[], []], pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})))})),
        "all 2 rows of 'text' are empty"),
    "no_role.jsonl": (chats(CHAT, [USER, {"content": "x"}]),
                      "row 1 of 'text': message 1 has no role"),
    "no_content.jsonl": (chats(CHAT, CHAT, [USER, {"role": "assistant"}]),
                         "row 2 of 'text': message 1 has no content"),
    "null_content.jsonl": (chats(CHAT, [dict(USER, content=None)]),
                           "row 1 of 'text': message 0 has no content"),
    "null_message.jsonl": (chats(CHAT, [USER, None]), "row 1 of 'text': message 1 is null"),
    "null_chat.jsonl": (chats(CHAT, None), "row 1 of 'text' is null"),
    "parts.jsonl": (chats([dict(USER, content=[{"type": "text", "text": "a"}])]), "content"),
    "number_content.jsonl": (chats([dict(USER, content=1)]), "content"),
    "number_role.jsonl": (chats([dict(USER, role=1)]), "role"),
    "strings_for_messages.jsonl": (chats(["user: a", "assistant: b"]), "holds lists of string"),
    "mixed_content.jsonl": (chats(CHAT, [dict(USER, content=1)]), "content"),
    "unknown_role.jsonl": (chats(*[[dict(USER, role="robot")]] * 3),
                           "no such role; it refuses the other 2"),
}
