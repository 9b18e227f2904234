"""Wrong data ends a job with one line that names the file and the row; odd data works."""

import gzip
import json
import lzma
import os
import shutil
import socket

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from isogloss.data.checks import check_column
from isogloss.data.open_data import load_dataset
from isogloss.data.order import ExampleReader, split_dataset
from isogloss.errors import DataError
from jobs import ds_config
from test_open_data import opened
from wrong_input import check_one_line, run_wrong

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
    "latin1.jsonl": (rows("one", "café").encode("latin-1"), "latin1.jsonl: line 2 "),
    "latin1.json": ('[\n{"text": "café"}]'.encode("latin-1"), "latin1.json: line 2 "),
    "latin1.csv": (lines("text", "café").encode("latin-1"), "latin1.csv: line 2 "),
    "utf16.txt": (LINES.encode("utf-16"), "utf16.txt: is no text: it holds NUL bytes"),
    "surrogate.jsonl": ('{"text": "a"}\n{"text": "\\ud800"}\n',
                        "surrogate.jsonl: 'text' of row 1 (line 2) holds half of a surrogate pair"),
    "surrogate_chat.jsonl": (rows(CHAT).replace("a question", "\\ud800"),
                             "'text' of row 0 (line 1) holds half of a surrogate pair"),
    "invalid.parquet": (parquet(invalid_strings()), "row 2 of 'text' is not UTF-8"),
    "invalid.arrow": (arrow(invalid_strings()), "cannot be read (UnicodeDecodeError: 'utf-8'"),
    # files of another kind than their names say
    "cut.parquet": (GOOD_PARQUET[:-20], "cut.parquet: "),
    "short.parquet": (b"PAR1", "short.parquet: "),
    "text.parquet": (LINES, "text.parquet: "),
    "page.parquet": (PAGE, "page.parquet: is a web page"),
    "pointer.parquet": (LFS, "pointer.parquet: is a pointer of git-lfs"),
    "cut.arrow": (GOOD_ARROW[: len(GOOD_ARROW) // 2], "cut.arrow: "),
    "noise.arrow": (b"\xff" * 500, "noise.arrow: "),
    "parquet.arrow": (GOOD_PARQUET, "parquet.arrow: is no file of kind .arrow"),
    # of kinds that nobody trains on: one line, a general one
    "page.jsonl": (PAGE, "page.jsonl: is a web page"),
    "cut.jsonl.gz": (gzip.compress(ROWS.encode() * 99)[:-20], "cut.jsonl.gz: "),
    "not_zipped.jsonl.gz": (ROWS, "not_zipped.jsonl.gz: is no .gz file"),
    "no_suffix": (LINES, "expected"),
    "zeros.txt": (b"\0" * 100, "zeros.txt: is no text: it holds NUL bytes"),
    # JSON
    "broken.jsonl": (rows("a", "b") + '{"text": "c"\n' + rows("d"), "broken.jsonl: line 3 "),
    "one_string.jsonl": (rows("a") + '"b"\n', "one_string.jsonl: line 2 holds a string"),
    "cut.json": (json.dumps(GOOD)[:-5], "cut.json: "),
    "empty_list.json": ("[]", "the data set is empty"),
    "a_number.json": ("7", "a_number.json: line 1 holds a number"),
    "blank.jsonl": ("\n\n\n", "the data set is empty"),
    "twice.jsonl": ('{"text": "a", "text": "b"}\n', "twice.jsonl: line 1 "),
    # values
    "numbers.jsonl": (rows(1, 2), "holds int64, expected text"),
    "words_in_lists.jsonl": (rows(["a", "b"], ["c"]), "holds lists of string, expected text"),
    "nulls.jsonl": (rows(None, None), "holds null, expected text"),
    "one_null.jsonl": (rows("a", "b", None), "row 2 of 'text' is null"),
    "mixed.jsonl": (rows("a", "b", 3), "row 2 of 'text' holds 3, expected text"),
    "late_list.jsonl": (rows(*["a"] * 9, ["b"]), "row 9 of 'text': message 0 "),
    "mixed_lists.jsonl": (rows("a", ["b"]), "mixed"),
    "bytes.parquet": (parquet(table(b"a", b"b")), "holds binary, expected text"),
    "twice.parquet": (parquet(pa.table([["a"], ["b"]], names=["text", "text"])),
                      "the column 'text' is there twice"),
    "no_rows.parquet": (parquet(pa.table({"text": pa.array([], pa.string())})),
                        "no_rows.parquet: holds no row"),
    "empties.txt": ("\n\n\n", "all 3 rows of 'text' are empty"),
    # tables
    "quotes.csv": ('text\n"a\nb\nc\n', "quotes.csv: "),
    "wide.csv": ("text\na\nb,c,d\n", "wide.csv: "),
    "no_header.csv": ("a,b\nc,d\n", "no column 'text'; it has a, b"),
    "twice.csv": ("text,text\na,b\n", "the column 'text' is there twice"),
    "no_cells.csv": ("text,label\n,1\n,2\n", "all 2 rows of 'text' are empty"),
    "header.csv": ("text\n", "the data set is empty"),
    "after_quotes.csv": ('text\n"a" b\n', "after_quotes.csv: line 2 is no CSV"),
    "nested.jsonl": ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
                     "nested.jsonl: line 1 is nested too deep"),
    # chats
    "sharegpt.jsonl": (rows([{"from": "robot", "value": "a"}]),
                       "row 0 of 'text': message 0 is from 'robot', expected one of human"),
    "no_chats.jsonl": (rows([{"speaker": "a", "says": "b"}]), "holds mixed types, expected text"),
    "bare_message.jsonl": (rows(USER, USER), "holds objects of "),
    "empty_chats.jsonl": (rows([], []), "expected text"),
    "all_chats_empty.parquet": (parquet(pa.table({"text": pa.array(
        [[], []], pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})))})),
        "all 2 rows of 'text' are empty"),
    "no_role.jsonl": (rows(CHAT, [USER, {"content": "x"}]),
                      "row 1 of 'text': message 1 has no role"),
    "no_content.jsonl": (rows(CHAT, CHAT, [USER, {"role": "assistant"}]),
                         "row 2 of 'text': message 1 has no content"),
    "late_text.jsonl": (rows(*[json.dumps(CHAT)] * 33, "[]]"),
                        "row 33 of 'text' holds '[]]', and the first rows hold chats"),
    "late_no_role.jsonl": (rows(*[json.dumps(CHAT)] * 33, json.dumps([USER, {"role": "user"}])),
                           "row 33 of 'text': message 1 has no content"),
    "null_message.jsonl": (rows(CHAT, [USER, None]), "row 1 of 'text': message 1 is null"),
    "half_weight.jsonl": (rows(CHAT, [USER, dict(ASSISTANT, weight=0.5)]),
                          "row 1 of 'text': message 1 has a 'weight' that is 0.5, expected 0 or 1"),
    "half_weight.parquet": (parquet(pa.table({"text": [
        CHAT, [dict(USER, weight=0.5), dict(ASSISTANT, weight=None)],
        [dict(USER, weight=1), dict(ASSISTANT, weight=0.5)]]})),
        "row 2 of 'text': message 1 has a 'weight' that is not 0 or 1"),
    "unknown_role.jsonl": (rows(*[[dict(USER, role="robot")]] * 3),
                           "no such role; it refuses the other 2"),
}
# what is met before the first step of a stream too
STREAMS = [
    "latin1.txt", "latin1.csv", "surrogate.jsonl", "surrogate_chat.jsonl", "cut.parquet",
    "cut.arrow", "invalid.arrow", "cut.jsonl.gz", "broken.jsonl", "one_string.jsonl", "cut.json",
    "empty_list.json", "numbers.jsonl", "nulls.jsonl", "words_in_lists.jsonl", "mixed_lists.jsonl",
    "twice.parquet", "no_rows.parquet", "quotes.csv", "header.csv", "sharegpt.jsonl",
    "empty_chats.jsonl", "no_role.jsonl", "null_message.jsonl", "unknown_role.jsonl"]
# Rows of a stream, which are looked at when they are read.
MID_RUN = {
    "--data={folder}/latin1.jsonl": "latin1.jsonl: line 2 is not UTF-8",
    "--data={folder}/invalid.parquet": "(UnicodeDecodeError: 'utf-8'",
    "--data={folder}/one_null.jsonl": "row 2 of 'text' is null",
    "--data={folder}/one_null.jsonl --eval_rows=1": "row 2 of 'text' is null",
    "--data={folder}/one_null.jsonl --num_workers=1": "row 2 of 'text' is null",
    "--data={folder}/late_chat.jsonl": "row 9 of 'text': message 1 has no",
    "--data={folder}/empties.txt": "all rows of 'text' are empty",
    "--data={folder}/one_broken": "b.jsonl: line 2 ",
}

# --- wrong places ---------------------------------------------------------------------------------

TEACHERS = (
    '--kd_weight=1 --data={folder}/routes.jsonl '
    '--teachers=[{"model":"{folder}/teacher","name":"x","routes":["a"]},'
    '{"model":"{folder}/teacher","name":"y"}] --route_key=')
PLACES = {
    # not a file
    "--data={folder}/pipe.jsonl": "pipe.jsonl: is no regular file",
    "--data={folder}/socket.jsonl": "socket.jsonl: is no regular file",
    "--data=/dev/null": "--data /dev/null: is no regular file",
    "--data={folder}/link.jsonl": "is a link to nothing",
    "--data={folder}/pipes": "pipes/b.jsonl: is no regular file",
    # directories and globs
    "--data={folder}/empty": "holds no file that can be read",
    "--data={folder}/kinds": "files of kind .jsonl, .txt;",
    "--data={folder}/kinds/*.csv": "no such file, directory or glob",
    "--data={folder}/kind?": "kinds: is no regular file",
    "--data={folder}/one_empty": "b.parquet: is empty",
    "--data={folder}/a.jsonl.zst": "is no .zst file, or damaged",
    "--data={folder}/b.jsonl.zst": "is compressed and holds nothing",
    # hub
    "--data=org/no_such_data": "org/no_such_data: cannot be",
    "--data=wikipedia": "or a hub id like org/name",
    "--data=http://127.0.0.1:9/a.jsonl": "a.jsonl: cannot be read",
    "--data=gopher://a/a.txt": "a.txt: cannot be read",
    # splits
    "--data={folder}/good.jsonl --split=test": "--split test: files have no splits",
    "--data={folder}/good.jsonl --streaming --split=train[:1]":
        "--split train[:1]: files have no splits",
    "--data={folder}/good.jsonl --split=train[:b]": "cannot be read",
    "--data={folder}/splits --split=train": "splits has no split 'train'; it has dev, test",
    "--data={folder}/saved --split=test": "--split test: files have no splits; leave it out",
    "--data={folder}/by_split --split=dev": "by_split has no split 'dev'; it has train, test",
    "--data={folder}/by_split --streaming --split=test[:1]":
        "a stream has no parts; name whole splits",
    "--data={folder}/good.jsonl --eval_data={folder}/none.jsonl": "none.jsonl: no such file",
    "--data={folder}/good.jsonl --eval_data={folder}/rest_is_empty.jsonl --eval_split=train[2:]":
        "all 2 rows of 'text' are empty",
    '--data=[{"data":"{folder}/good.jsonl","txt_samples":"file"}]':
        "--data: txt_samples file: is for .txt files",
    # prompts and completions
    "--data={folder}/pairs.jsonl --prompt_key=p --completion_key=chat":
        "--prompt_key p: no such column; it has q, a, n, chat",
    "--data={folder}/pairs.jsonl --prompt_key=q --completion_key=b": "no column 'b'",
    "--data={folder}/pairs.jsonl": "no column 'text'; it has q, a, n, chat; name one of them with "
        "--text_key, or two with --prompt_key and --completion_key",
    "--data={folder}/pairs.jsonl --prompt_key=q --completion_key=chat":
        "row 0 of 'chat': 'q' and it are not both texts, or both chats",
    "--data={folder}/pairs.jsonl --prompt_key=n --completion_key=a": "row 0 of 'n' is null",
    '--data=[{"data":"{folder}/pairs.jsonl","tools_key":"q"}] --text_key=chat':
        "row 0 of 'chat': 'q' holds 'why', expected a list of tools",
    # save_to_disk
    "--data={folder}/broken_state": "cannot be read (JSONDecodeError",
    "--data={folder}/cut_arrow": "cannot be read (ArrowInvalid",
    # columns
    "--data={folder}/rest_is_empty.jsonl --eval_rows=2": "--eval_rows 2: all rows behind",
    "--data={folder}/held_out_is_empty.jsonl --eval_rows=2": "--eval_rows 2: all of the",
    "--data={folder}/held_out_is_empty.jsonl --eval_rows=2 --streaming":
        "--eval_rows 2: all of the",
    "--data={folder}/all_chats_empty.parquet --streaming": "refuses a chat",
    "--data={folder}/good.jsonl --eval_rows=5": "the data has 5 rows",
    TEACHERS + "domain": "--route_key domain: no such column; it has text",
    TEACHERS + "lists": "--route_key lists: the column holds lists of",
    TEACHERS + "mixed": "the column holds mixed types",
    TEACHERS + "number": "holds int64, but --teachers name the route",
}


def cases():
    """Return {change: part of the line}: every place and file, and some of them as a stream."""
    wrong = dict(PLACES)
    for file, (_, message) in FILES.items():
        change = f"--data={{folder}}/{file}"
        wrong[change] = message
        if file in STREAMS:
            wrong[f"{change} --streaming"] = message
    return wrong


def write(path, content):
    """Write a file of text or bytes, and the directory that it is in."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_places(folder):
    """Write what PLACES name."""
    os.mkfifo(folder / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)  # the name of a socket is short
        listener.bind("socket.jsonl")
        os.fchdir(here)
        os.close(here)
    for name in ("empty", "pipes"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipes" / "b.jsonl")
    (folder / "link.jsonl").symlink_to("nowhere")
    files = {
        "good.jsonl": ROWS, "pipes/a.jsonl": ROWS,
        "rest_is_empty.jsonl": rows("a", "b", "", ""),
        "held_out_is_empty.jsonl": rows("", "", "a", "b"),
        "kinds/a.txt": LINES, "kinds/b.jsonl": ROWS, "a.jsonl.zst": ROWS,
        "b.jsonl.zst": b"\x28\xb5\x2f\xfd",
        "one_broken/a.jsonl": ROWS, "one_broken/b.jsonl": rows("a") + "{\n",
        "one_empty/a.parquet": GOOD_PARQUET, "one_empty/b.parquet": "",
        "by_split/train-0.jsonl": ROWS, "by_split/test-0.jsonl": ROWS,
        "pairs.jsonl": json.dumps({"q": "why", "a": "so", "n": None, "chat": CHAT}) + "\n",
        "late_chat.jsonl": rows(*[CHAT] * 9, [USER, {"role": "assistant"}]),
    }
    for name, content in files.items():
        write(folder / name, content)
    routes = {"text": "a", "lists": ["a"], "number": 1}
    write(folder / "routes.jsonl", json.dumps(routes | {"mixed": "a"}) + "\n"
          + json.dumps(routes | {"mixed": 1}) + "\n")
    write_saved(folder)


def write_saved(folder):
    """Write directories of save_to_disk, good ones and damaged ones."""
    good = datasets.Dataset.from_dict({"text": GOOD})
    splits = datasets.DatasetDict(dev=good, test=good)
    splits.save_to_disk(folder / "splits")
    for name in ("saved", "broken_state", "cut_arrow"):
        good.save_to_disk(folder / name)
    write(folder / "broken_state" / "state.json", "{")
    [file] = (folder / "cut_arrow").glob("*.arrow")
    write(file, GOOD_ARROW[: len(GOOD_ARROW) // 2])


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """Directory of all wrong data, a student that reads chats, and a teacher."""
    folder = tmp_path_factory.mktemp("wrong_data")
    for file, (content, _) in FILES.items():
        write(folder / file, content)
    write_places(folder)
    shutil.copytree(models[0], folder / "student")
    write(folder / "student" / "chat_template.jinja", TEMPLATE)
    (folder / "teacher").symlink_to(models[1])
    return folder


CASES = cases()


@pytest.fixture(scope="module")
def base(folder):
    """The flags of a good command line."""
    return [f"--student={folder}/student", "--kd_weight=0", "--steps=9", "--max_length=60",
            f"--ds_config={ds_config(folder / 'ds.json', 0, 4, 1)}", "--num_workers=0",
            f"--output_dir={folder / 'run'}"]


@pytest.fixture(scope="module")
def outcomes(folder, base):
    """{change: Outcome of the one rank} of every wrong command line."""
    return run_wrong(1, CASES, base, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wrong_data_ends_with_one_line(outcomes, case):
    check_one_line(outcomes[case], CASES[case])


@pytest.fixture(scope="module")
def ended_in_mid_run(folder, base):
    """{change: Outcome of the one rank} of what a stream meets on its way."""
    # each of them saves where it has ended
    cases = {f"{case} --output_dir={{folder}}/run_{number}": case
             for number, case in enumerate(MID_RUN)}
    ended = run_wrong(1, cases, [*base, "--streaming"], folder, has_steps=True)
    return {case: ended[change] for change, case in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", MID_RUN)
def test_a_bad_row_of_a_stream_ends_the_run_with_one_line(ended_in_mid_run, case):
    [outcome] = ended_in_mid_run[case]
    assert outcome.exit_code == 2 and "Traceback" not in outcome.stderr, outcome.stderr
    [line] = [line for line in outcome.stderr.splitlines() if "distill.py: " in line]
    assert MID_RUN[case] in line, outcome.stderr


# --- odd data that works --------------------------------------------------------------------------

BOM = "\ufeff"
# {file: (its content, the texts that a run reads)}
ODD = {
    "bom.txt": (BOM + LINES, GOOD),
    "bom.json": (BOM + json.dumps([{"text": "a"}]), ["a"]),
    "bom.csv": (BOM + "text,label\na,1\n", ["a"]),
    "crlf.txt": (LINES.replace("\n", "\r\n"), GOOD),
    "crlf.jsonl": (ROWS.replace("\n", "\r\n"), GOOD),
    "some_empty.jsonl": (rows("", "a", ""), ["", "a", ""]),
    "some_empty.txt": ("\na\n\n", ["", "a", ""]),
    "ünïcode 日本.jsonl": (ROWS, GOOD),
    "brackets[1].jsonl": (ROWS, GOOD),
    "star*.jsonl": (ROWS, GOOD),
    "strings.json": (json.dumps(GOOD), GOOD),
    "one_row.txt": ("a", ["a"]),
    "one_object.json": ('{"text": "a"}', ["a"]),
    "two_in_a_line.jsonl": ('{"text": "a"} {"text": "b"}\n', ["a", "b"]),
    "long.txt": ("word " * 200_000, ["word " * 200_000]),
    "long.jsonl": (rows("word " * 200_000), ["word " * 200_000]),
    "large.parquet": (parquet(pa.table({"text": pa.array(GOOD, pa.large_string())})), GOOD),
    "categories.parquet": (parquet(pa.table({"text": pa.array(["a", "b"]).dictionary_encode()})),
                           ["a", "b"]),
    "stream.arrow": (GOOD_ARROW, GOOD),
    "a.jsonl.xz": (lzma.compress(ROWS.encode()), GOOD),
    "escapes.jsonl": ('{"text": "\\ud83d\\ude00 \\u0000"}\n', ["😀 \0"]),
    "page.txt": (PAGE, [PAGE.strip()]),  # a corpus may be of such pages
    "some_empty_chats.jsonl": (rows(CHAT, []), [CHAT, []]),
}


@pytest.mark.parametrize("file", ODD)
def test_odd_files_are_read(tmp_path, file):
    content, expected = ODD[file]
    write(tmp_path / file, content)
    for dataset in opened(tmp_path / file):
        train, _ = split_dataset(dataset, 0, "text", file)
        assert [row["text"] for row in train] == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(ValueError, match="may not be read; change its permissions"):
        load_dataset(str(tmp_path / "a.jsonl"), "text")


def test_what_is_wrong_far_behind_is_found(tmp_path):
    """In one of many chunks of a column, with the row of the whole data."""
    chunks = [table(*GOOD)] * 3 + [invalid_strings()]
    write(tmp_path / "a.arrow", arrow(pa.concat_tables(chunks)))
    saved = datasets.Dataset(pa.concat_tables([table(*GOOD)] * 3 + [table("a", None)]))
    with pytest.raises(ValueError, match="row 16 of 'text' is null"):
        check_column("", saved, "text")
    damaged = datasets.Dataset(pa.concat_tables(chunks))
    with pytest.raises(ValueError, match="row 17 of 'text' is not UTF-8"):
        check_column("", damaged, "text")
    chats = datasets.Dataset.from_list([{"text": CHAT}] * 4)
    bad = datasets.Dataset.from_list([{"text": CHAT}, {"text": [USER, dict(USER, role=None)]}])
    both = datasets.concatenate_datasets([chats, bad])
    with pytest.raises(ValueError, match="row 5 of 'text': message 1 has no role"):
        check_column("", both, "text")


def test_a_row_is_looked_at_before_it_is_used():
    """Values of streams, of which Arrow does not know; messages: test_chat_rows.py."""
    reader = ExampleReader("text", "to", "rows")
    assert reader({"text": "a", "to": None}).route is None
    bad = {
        "'to' holds ['b'], expected a text or a number": {"text": "a", "to": ["b"]},
        "half of a surrogate pair": {"text": "\ud800", "to": 1},
        "is null, expected text": {"to": 1},
        "holds b'a', expected text": {"text": b"a", "to": 1},
    }
    for message, row in bad.items():
        with pytest.raises(DataError) as error:
            reader(row, 7)
        assert "--data rows: row 7 of 'text'" in str(error.value) and message in str(error.value)
