"""open_data.py: data as people have it, mapped and streamed; compressed, in splits, far away."""

import bz2
import gzip
import http.server
import json
import math
import shutil
import threading

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import ranks
from isogloss.data import file_rows, open_data
from isogloss.data.batch import Collator
from isogloss.data.checks import explained
from isogloss.data.file_rows import ROWS_TO_PEEK
from isogloss.data.long_texts import MOST_CHARACTERS
from isogloss.data.open_data import Request, filled_columns, holds_chats, load_dataset
from isogloss.data.order import ExampleReader
from isogloss.data.sample import TextEncoder
from isogloss.data.stream import StreamedExamples
from isogloss.distill import Config
from isogloss.errors import DataError
from isogloss.inputs import load_data
from jobs import ds_config, losses_of, run_distill
from test_chat import with_templates
from test_chat_rows import ANSWER, CALL, TOOL, USER, WITH_TOOLS

LINES = ["one", "two", "three"]
RESULT = {"role": "tool", "name": "look_up", "content": "7", "tool_call_id": "a"}
THOUGHT = dict(ANSWER, reasoning_content="Let me see.")
WITH_CALL = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, ANSWER]
PLAIN = [USER, ANSWER]
PARTS = [dict(USER, content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), ANSWER]


def with_arguments(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


# {what is odd about the chats: the rows of a file}
CHATS = {
    "calls in the first": [WITH_CALL, PLAIN],
    "calls far behind": [PLAIN] * (2 * ROWS_TO_PEEK) + [WITH_CALL],
    "arguments of other types": [with_arguments({"a": 1}), with_arguments({"a": "b", "c": [1]}),
                                 with_arguments({"a": None}), with_arguments({})],
    "a thought": [PLAIN, [USER, THOUGHT], PLAIN],
    "a null content": [[USER, dict(ANSWER, content=None, reasoning_content="a")], PLAIN],
    "a name": [[dict(USER, name="Ann"), ANSWER], PLAIN],
    "parts": [PARTS, PARTS],
    "parts of other keys": [PARTS, [dict(USER, content=[{"type": "text", "text": "a", "x": 1}])]],
    "an empty chat first": [[], WITH_CALL, PLAIN],
    "sharegpt": [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]],
    "sharegpt of other keys": [[{"from": "human", "value": "a"}],
                               [{"from": "gpt", "value": "b", "weight": 0.5}]],
    "both names": [PLAIN, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]],
}


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    return str(path)


def texts(source, split="train", **options):
    """Return the texts of a data set, which are the same mapped and streamed."""
    mapped = load_dataset(str(source), "text", split, **options)
    streamed = load_dataset(str(source), "text", split, True, **options)
    read = [row["text"] for row in mapped]
    assert [row["text"] for row in streamed] == read
    return read


# --- chats ----------------------------------------------------------------------------------------


def write_lines(path, rows):
    return write_rows(path.with_suffix(".jsonl"), rows)


def write_list(path, rows):
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows, indent=1))
    return str(path)


def write_with_blank_lines(path, rows):
    path = path.with_suffix(".jsonl")
    path.write_text("\ufeff\n" + "\n\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


def write_compressed(path, rows):
    path = path.with_suffix(".jsonl.zst")
    path.write_bytes(zstandard.compress("\n".join(map(json.dumps, rows)).encode()))
    return str(path)


WRITERS = [write_lines, write_list, write_with_blank_lines, write_compressed]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("case", CHATS)
def test_messages_keep_their_own_keys(tmp_path, case, write):
    chats = CHATS[case]
    # columns that nobody asks for may hold what they like
    rows = [{"chat": chat, "id": "a" if number else number} for number, chat in enumerate(chats)]
    source = write(tmp_path / "chats", rows)
    for streaming in (False, True):
        dataset = load_dataset(source, "chat", streaming=streaming)
        assert [row["chat"] for row in dataset] == chats, streaming
        assert holds_chats(dataset, "chat")
        reader = ExampleReader("chat", source=source, filled=filled_columns(dataset))
        for row in dataset:
            for message in reader(row).content:
                assert isinstance(message["role"], str) and isinstance(message["content"], str)


def test_other_columns_come_along_where_they_are_named(tmp_path):
    rows = [{"chat": PLAIN, "to": "a"}] * (2 * ROWS_TO_PEEK)
    rows.append({"chat": WITH_CALL, "to": None, "tools": [TOOL], "then": [ANSWER]})
    source = write_rows(tmp_path / "a.jsonl", rows)
    for streaming in (False, True):
        dataset = load_dataset(source, "chat", streaming=streaming, plain_keys=("to",),
                               optional_keys=("tools",))
        *_, last = dataset
        # a column that the first rows lack is there if it may be missing
        assert last == {"chat": WITH_CALL, "to": None, "tools": [TOOL]}
        with pytest.raises(DataError, match="_key then: no such column; it has chat"):
            load_dataset(source, "chat", streaming=streaming, json_keys=("then",))
    dataset = load_dataset(source, "chat", plain_keys=("to",), optional_keys=("tools",))
    assert dataset.features["to"].dtype == "string"
    assert sorted(dataset.column_names) == ["chat", "to", "tools"]


def test_types_of_tables_do_not_add_keys(tmp_path):
    """In parquet all messages have all keys, and all calls all arguments."""
    chats = [with_arguments({"a": 1}), with_arguments({"b": "c"}), WITH_CALL]
    tools = [TOOL], [{"type": "function", "function": {"name": "f", "strict": True}}]
    frame = datasets.Dataset.from_dict({"chat": chats[:2], "tools": list(tools)})
    frame.to_parquet(tmp_path / "a.parquet")
    for streaming in (False, True):
        dataset = load_dataset(str(tmp_path / "a.parquet"), "chat", streaming=streaming,
                               optional_keys=("tools",))
        reader = ExampleReader("chat", tools_key="tools", filled=filled_columns(dataset))
        first, second = [reader(row) for row in dataset]
        for example, expected in ((first, chats[0]), (second, chats[1])):
            assert example.content == [USER, expected[1] | {"content": ""}]
        assert (first.tools, second.tools) == tools


def test_files_of_one_folder_may_differ_in_their_keys(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"chat": PLAIN, "id": 1}])
    write_rows(tmp_path / "b.jsonl", [{"chat": WITH_CALL, "id": "x", "tools": [TOOL]}])
    write_rows(tmp_path / "c.jsonl", [{"chat": []}])
    (tmp_path / "d.jsonl").write_text("")
    for streaming in (False, True):
        dataset = load_dataset(str(tmp_path), "chat", streaming=streaming,
                               optional_keys=("tools",))
        assert [row["tools"] for row in dataset] == [None, [TOOL], None]


def test_a_changed_file_is_read_again(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"chat": PLAIN}])
    assert len(load_dataset(source, "chat")) == 1
    write_rows(tmp_path / "a.jsonl", [{"chat": PLAIN}] * 3)
    assert len(load_dataset(source, "chat")) == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_line_of_chats_is_named(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    for line in ('{"chat"', '"a"', "[1]"):
        path.write_text(json.dumps({"chat": PLAIN}) + f"\n\n{line}\n")
        with pytest.raises(DataError, match=r"a\.jsonl: line 3 "):
            dataset = load_dataset(str(path), "chat", streaming=streaming)
            reader = ExampleReader("chat", source=str(path))
            StreamedExamples(dataset, reader, 3).example(0)


# --- what stands in a file ------------------------------------------------------------------------

DATES = ["2024-01-31", "2024-01-31 10:00", "2024-01-31 10:00:00", "2024-01-31T10:00:00Z",
         "1999-12-31T23:59:59.123Z"]
CELLS = ["6", "3.50", "007", "1e5", "NA", "null", "", "nan", "None", "True", "-0", " 7 ", "1_000",
         "0x10", "2024-01-31", "1,000", 'say "a"', "a\nb", "+1", "9" * 30]
AS_CELLS = ["6", "3.50", "007", "1e5", "NA", "null", "", "nan", "None", "True", "-0", " 7 ",
            "1_000", "0x10", "2024-01-31", '"1,000"', '"say ""a"""', '"a\nb"', "+1", "9" * 30]


@pytest.mark.parametrize("date", DATES)
def test_text_that_looks_like_a_date_stays_text(tmp_path, date):
    line = json.dumps({"text": date, "q": date})
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n")
    (tmp_path / "b.json").write_text(f"[{line}, {line}]")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    for name in ("a.jsonl", "b.json", "c.jsonl.gz"):
        assert texts(tmp_path / name) == [date, date]
    for streaming in (False, True):
        dataset = load_dataset(str(tmp_path / "a.jsonl"), "text", streaming=streaming,
                               json_keys=("q",))
        assert [row["q"] for row in dataset] == [date, date]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_a_csv_are_what_stands_there(tmp_path, end):
    path = tmp_path / "a.csv"
    # the last column is of several types, and nobody asks for it
    lines = [f"{cell},{cell},{number if number % 2 else 'x'}"
             for number, cell in enumerate(AS_CELLS)]
    path.write_bytes("".join(line + end for line in ["text,q,other", *lines, ""]).encode())
    for streaming in (False, True):
        dataset = load_dataset(str(path), "text", streaming=streaming, plain_keys=("q",))
        assert [row["text"] for row in dataset] == CELLS
        assert [row["q"] for row in dataset] == CELLS
    compressed = tmp_path / "b.csv.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert texts(compressed) == CELLS


def write_pair(folder, kind, first, second):
    """Write a file for each of two {column: value}, by what people have beside `datasets`."""
    folder.mkdir()
    for name, row in zip("ab", (first, second)):
        path = folder / f"{name}{kind}"
        frame = pa.table({column: [value] for column, value in row.items()})
        if kind == ".parquet":
            pq.write_table(frame, path)
        elif kind == ".arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, frame.schema) as writer:
                writer.write_table(frame)
        elif kind == ".csv":
            path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
        else:
            path.write_text(json.dumps(row) + "\n")
    return folder


KINDS = [".jsonl", ".csv", ".parquet", ".arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_may_differ_in_columns_that_nobody_named(tmp_path, kind):
    second = {"id": "x", "text": "b", "more": "c"}
    assert texts(write_pair(tmp_path / "a", kind, {"text": "a", "id": 1}, second)) == ["a", "b"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_lacks_a_needed_column_is_named(tmp_path, kind, streaming):
    folder = write_pair(tmp_path / "a", kind, {"text": "a", "to": "x"}, {"text": "a", "id": 1})
    with pytest.raises(DataError, match=rf"b\{kind}: no column 'to'; it has text, id"):
        load_dataset(str(folder), "text", streaming=streaming, plain_keys=("to",))
    if kind != ".csv":
        folder = write_pair(tmp_path / "b", kind, {"text": "a"}, {"text": 3})
        message = rf"b\{kind}: column 'text' holds int64, but string in .*a\{kind}; write them"
        with pytest.raises(DataError, match=message):
            load_dataset(str(folder), "text", streaming=streaming)


def test_chats_whose_keys_differ_from_file_to_file_are_named(tmp_path):
    """Tables have one type for all messages; a later file may have fewer keys, but no more."""
    named = [[dict(message, name="x") for message in PLAIN]]
    for kind in (".parquet", ".arrow"):
        folder = write_pair(tmp_path / kind, kind, {"text": named[0]}, {"text": PLAIN})
        assert [len(chat) for chat in texts(folder)] == [2, 2]
        folder = write_pair(tmp_path / f"more{kind}", kind, {"text": PLAIN}, {"text": named[0]})
        for streaming in (False, True):
            with pytest.raises(DataError, match=rf"b\{kind}: column 'text' holds lists of obj"):
                load_dataset(str(folder), "text", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_late_row_of_another_type_is_named(tmp_path, streaming):
    rows = [{"text": "a", "to": "x"}] * (2 * ROWS_TO_PEEK) + [{"text": "a", "to": 3}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    message = rf"a\.jsonl: 'to' of line {len(rows)} holds a number, but rows before have the type s"
    with explained(source), pytest.raises(ValueError, match=message):
        for _ in load_dataset(source, "text", streaming=streaming, plain_keys=("to",)):
            pass


# --- files ----------------------------------------------------------------------------------------

COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files_are_read(tmp_path, suffix):
    contents = {
        ".jsonl": "\n".join(json.dumps({"text": line}) for line in LINES),
        ".json": json.dumps([{"text": line} for line in LINES]),
        ".txt": "\n".join(LINES),
        ".csv": "text\n" + "\n".join(LINES),
    }
    for kind, content in contents.items():
        path = tmp_path / f"a{kind}{suffix}"
        path.write_bytes(COMPRESSIONS[suffix](content.encode()))
        assert texts(path) == LINES, path


def test_all_parts_of_a_zst_file_are_read(tmp_path):
    halves = [json.dumps({"text": line}).encode() + b"\n" for line in LINES]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, halves)))
    assert texts(tmp_path / "a.jsonl.zst") == LINES


def test_only_copies_of_files_are_left_out(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}'))
    assert texts(tmp_path) == ["a", "b"]


STORY = "One line.\nThe second.\n\nAnother paragraph.\n\n\nThe last.\n"
SAMPLES = {
    "line": ["One line.", "The second.", "", "Another paragraph.", "", "", "The last."],
    "paragraph": ["One line.\nThe second.", "Another paragraph.", "The last."],
    "file": [STORY],
}


@pytest.mark.parametrize("what", SAMPLES)
def test_samples_of_txt_files_are_what_the_flag_says(tmp_path, what):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(STORY)
    read = [text.strip("\n") for text in texts(tmp_path, txt_samples=what)]
    assert read == [text.strip("\n") for text in SAMPLES[what]] * 2


# --- splits ---------------------------------------------------------------------------------------

SHARDS = {
    "names": ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl",
              "test-00000-of-00001.jsonl"],
    "folders": ["train/a.jsonl", "train/deep/b.jsonl", "test/c.jsonl"],
    "a folder of data": ["data/train-a.jsonl", "data/train-b.jsonl", "data/test.jsonl"],
    "compressed": ["train/a.jsonl.gz", "train/b.jsonl.gz", "test/c.jsonl.gz"],
}


def write_shards(folder, shards):
    """Write files that hold their own names; the last one is of the test split."""
    for name in shards:
        path = folder / name
        write_rows(path, [{"text": name}])
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize("case", SHARDS)
def test_a_folder_of_several_splits_is_read_by_split(tmp_path, case):
    shards = SHARDS[case]
    write_shards(tmp_path, shards)
    assert texts(tmp_path) == shards[:2]
    assert texts(tmp_path, "test") == shards[2:]
    assert texts(tmp_path, "train+test") == shards
    part = load_dataset(str(tmp_path), "text", "train[1:]")
    assert list(part["text"]) == shards[1:2]


def test_chats_of_a_folder_are_read_by_split(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"chat": PLAIN}] * 4)
    write_rows(tmp_path / "test.jsonl", [{"chat": WITH_CALL}])
    for split, expected in {"train": [PLAIN] * 4, "test": [WITH_CALL], "train[:50%]": [PLAIN] * 2,
                            "train[3:]+test": [PLAIN, WITH_CALL]}.items():
        dataset = load_dataset(str(tmp_path), "chat", split)
        assert [row["chat"] for row in dataset] == expected
    streamed = load_dataset(str(tmp_path), "chat", "test+train", True)
    assert [row["chat"] for row in streamed] == [WITH_CALL] + [PLAIN] * 4


def test_a_split_that_a_folder_lacks_is_named(tmp_path):
    write_shards(tmp_path, ["test.jsonl", "validation.jsonl"])
    for split in ("train", "dev"):
        with pytest.raises(DataError, match=rf"--split {split}: .* it has validation, test"):
            load_dataset(str(tmp_path), "text", split)


def test_nested_folders_without_splits_are_read_whole(tmp_path):
    names = ["a.jsonl", "b/c.jsonl", "b/d/e.JSONL"]
    for name in names:
        write_rows(tmp_path / name, [{"text": name}])
    assert texts(tmp_path) == names


def test_a_card_says_which_files_are_a_split(tmp_path):
    """As in a clone of a data set of the hub."""
    write_shards(tmp_path, ["first.jsonl", "second.jsonl"])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: first.jsonl\n  - split: dev\n    path: second.jsonl\n---\n")
    assert texts(tmp_path) == ["first.jsonl"]
    assert texts(tmp_path, "dev") == ["second.jsonl"]


def test_saved_splits_are_read(tmp_path):
    parts = {}
    for name in ("train", "test"):
        parts[name] = datasets.Dataset.from_dict({"text": [name] * 3})
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved", num_shards=dict.fromkeys(parts, 2))
    for name in parts:
        assert texts(tmp_path / "saved", name) == [name] * 3


def test_saved_chats_are_read(tmp_path):
    """With the types of tables, and as JSON values."""
    for features in (None, datasets.Features(chat=datasets.Json())):
        rows = [{"chat": PLAIN}, {"chat": WITH_CALL}]
        folder = tmp_path / f"saved_{features is None}"
        saved = datasets.Dataset.from_list(rows, features=features)
        datasets.DatasetDict(train=saved).save_to_disk(folder)
        for streaming in (False, True):
            dataset = load_dataset(str(folder), "chat", streaming=streaming)
            assert holds_chats(dataset, "chat")
            reader = ExampleReader("chat", filled=filled_columns(dataset))
            assert [reader(row).content for row in dataset] == [
                PLAIN, [USER, WITH_CALL[1] | {"content": ""}, RESULT, ANSWER]]


# --- addresses ------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The address of a server of the folder; what is cached stays in it."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(tmp_path), **kwargs)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_files_at_an_address_are_read(tmp_path, address):
    write_rows(tmp_path / "a.jsonl", [{"text": line} for line in LINES])
    for suffix, compress in COMPRESSIONS.items():
        (tmp_path / f"a.jsonl{suffix}").write_bytes(compress((tmp_path / "a.jsonl").read_bytes()))
    datasets.Dataset.from_dict({"text": LINES}).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl?download=true", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"):
        assert texts(f"{address}/{name}") == LINES, name
    write_rows(tmp_path / "chats.jsonl", [{"chat": PLAIN}, {"chat": WITH_CALL}])
    for streaming in (False, True):
        dataset = load_dataset(f"{address}/chats.jsonl", "chat", streaming=streaming)
        assert [row["chat"] for row in dataset] == [PLAIN, WITH_CALL]
        with pytest.raises(DataError, match=r"--data http.*none\.jsonl: cannot be read"):
            load_dataset(f"{address}/none.jsonl", "text", streaming=streaming)


def test_any_file_system_that_fsspec_knows_will_do(tmp_path):
    """As hf:// and s3:// do."""
    memory = fsspec.filesystem("memory")
    for number in range(2):
        rows = [{"chat": PLAIN}, {"chat": WITH_CALL}]
        memory.pipe(f"/shards/{number}.jsonl", "\n".join(map(json.dumps, rows)).encode())
    for streaming in (False, True):
        dataset = load_dataset("memory://shards/*.jsonl", "chat", streaming=streaming)
        assert len(list(dataset)) == 4
    with pytest.raises(DataError, match=r"memory://none.*: no file matches"):
        load_dataset("memory://none/*.jsonl", "chat")


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_of_the_hub_keep_their_keys(tmp_path, monkeypatch, streaming):
    """A folder stands for the hub: `datasets` names its files in the same way."""
    write_rows(tmp_path / "org" / "name" / "train.jsonl", [{"chat": PLAIN}] * 2)
    write_rows(tmp_path / "org" / "name" / "test.jsonl", [{"chat": WITH_CALL}])
    monkeypatch.chdir(tmp_path)

    def read(text_key, split):
        request = Request("org/name", text_key, split, streaming, (), (), (), "line")
        return [row[text_key] for row in open_data._open_hub(request)]

    assert read("chat", "train") == [PLAIN, PLAIN]
    assert read("chat", "test") == [WITH_CALL]


# --- sizes ----------------------------------------------------------------------------------------


def test_a_text_that_no_tokenizer_takes_is_refused(tmp_path, tokenizers, tables):
    """It would be tokenized whole: 200 MB abort the process."""
    huge = "a" * (MOST_CHARACTERS + 1)
    (tmp_path / "a.txt").write_text(f"b\n{huge}\n")
    rows = [{"text": "b"}, {"text": huge}]
    write_rows(tmp_path / "a.jsonl", rows)
    for name in ("a.txt", "a.jsonl"):
        message = rf"{name}: row 1 of 'text' has {len(huge)} characters, and a tokenizer takes up"
        with pytest.raises(DataError, match=message):
            run_data(tokenizers, tables, tmp_path / name)
    data = run_data(tokenizers, tables, tmp_path / "a.jsonl", streaming=True)
    collator = Collator(TextEncoder(tokenizers[0], tables[0], 50), [])
    with pytest.raises(ValueError, match=rf"a text of {len(huge)} characters \('aaaa"):
        collator([data.reader(row) for row in data.train_data])


def test_a_long_text_with_a_place_to_cut_is_read(tmp_path, tokenizers, tables):
    encoder = TextEncoder(tokenizers[0], tables[0], 50)
    assert encoder.splits_at_spaces
    source = write_rows(tmp_path / "a.jsonl", [{"text": "word " * (MOST_CHARACTERS // 4)}])
    data = run_data(tokenizers, tables, source)
    assert Collator(encoder, [])([data.reader(row) for row in data.train_data]).counts.tokens > 40


def test_a_chat_that_no_tokenizer_takes_is_refused():
    chat = [USER, dict(ANSWER, content="a" * MOST_CHARACTERS)]
    with pytest.raises(DataError, match=r"row 3 of 'chat' holds a chat of \d+ characters, and up"):
        ExampleReader("chat", source="x")({"chat": chat}, 3)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_lines_are_read_up_to_a_size(tmp_path, monkeypatch, name, streaming):
    monkeypatch.setattr(file_rows, "MOST_CHARACTERS", 1000)
    rows = [{"text": "b"}, {"text": "a" * 1000}]
    text = "\n".join(map(json.dumps, rows)) if "jsonl" in name else json.dumps(rows, indent=1)
    if name == "a.csv":
        text = "text\nb\n" + "a" * 1000
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name}: .* more than \d+ GiB; write an object on"):
        list(load_dataset(str(tmp_path / name), "text", streaming=streaming))


# --- flags ----------------------------------------------------------------------------------------


def run_data(tokenizers, tables, source, **flags):
    """Return the RunData of a run of a student alone."""
    cfg = Config(student="s", kd_weight=0.0, data=str(source), **flags)
    return load_data(cfg, TextEncoder(tokenizers[0], tables[0], 400), {})


def read_all(dataset, reader):
    return [reader(row).content for row in dataset]


def test_held_out_rows_may_come_from_data_of_their_own(tmp_path, tokenizers, tables):
    write_rows(tmp_path / "a.jsonl", [{"text": line} for line in LINES])
    (tmp_path / "b.txt").write_text("x\ny\nz")
    for eval_rows, expected in ((0, ["x", "y", "z"]), (2, ["x", "y"]), (9, ["x", "y", "z"])):
        data = run_data(tokenizers, tables, tmp_path / "a.jsonl", eval_rows=eval_rows,
                        eval_data=str(tmp_path / "b.txt"))
        assert read_all(data.held_out_data, data.held_out_reader) == expected
        assert read_all(data.train_data, data.reader) == LINES
    streamed = run_data(tokenizers, tables, tmp_path / "a.jsonl", eval_rows=2, streaming=True,
                        eval_data=str(tmp_path / "b.txt"))
    assert read_all(streamed.held_out_data, streamed.held_out_reader) == ["x", "y"]
    assert read_all(streamed.train_data, streamed.reader) == LINES


def test_held_out_rows_may_be_another_split(tmp_path, tokenizers, tables):
    write_shards(tmp_path, SHARDS["names"])
    data = run_data(tokenizers, tables, tmp_path, eval_split="test")
    assert read_all(data.held_out_data, data.held_out_reader) == SHARDS["names"][2:]
    assert read_all(data.train_data, data.reader) == SHARDS["names"][:2]
    with pytest.raises(DataError, match=r"--eval_split dev: .*it has train, test"):
        run_data(tokenizers, tables, tmp_path, eval_split="dev")


def test_tools_and_prompts_reach_the_examples(tmp_path, tokenizers):
    student, _ = with_templates(tokenizers, WITH_TOOLS)
    rows = [{"chat": [USER], "then": [ANSWER], "tools": [TOOL], "text": "a"}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    for streaming in (False, True):
        cfg = Config(student="s", kd_weight=0.0, data=source, prompt_key="chat",
                     completion_key="then", streaming=streaming)
        data = load_data(cfg, student, {})
        [example] = [data.reader(row) for row in data.train_data]
        assert example.content == [USER, ANSWER] and example.context == 1
        assert example.tools == [TOOL]


WRONG_FLAGS = {
    "expected a JSON object like": {"template_kwargs": "enable_thinking"},
    "--template_kwargs: tokenize is not for templates": {"template_kwargs": '{"tokenize": true}'},
    "name the column of prompts with --prompt_key": {"completion_key": "a"},
    "both name what is learned": {"completion_key": "a", "prompt_key": "b", "text_key": "c"},
    "say by --eval_rows how many": {"streaming": True, "eval_data": "a"},
    "--txt_samples page: expected one of line, paragraph, file": {"txt_samples": "page"},
}


@pytest.mark.parametrize("message", WRONG_FLAGS)
def test_flags_that_contradict_one_another_are_refused(message):
    with pytest.raises(ValueError, match=message):
        Config(student="s", teacher="t", data="d", **WRONG_FLAGS[message])


# --- whole runs -----------------------------------------------------------------------------------


def with_template(model, folder, template):
    """Return a copy of a model's directory whose tokenizer reads chats."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": template}))
    return folder


@pytest.mark.slow
def test_runs_learn_from_data_as_people_have_it(models, tmp_path):
    """Chats with tools, as a stream too; prompts and completions; held-out rows of their own."""
    student = with_template(models[0], tmp_path / "student", WITH_TOOLS)
    teacher = with_template(models[1], tmp_path / "teacher", WITH_TOOLS)
    chats = [PLAIN, WITH_CALL, PARTS, CHATS["sharegpt"][0]]
    rows = [{"chat": chat, "tools": [TOOL]} for chat in chats] * 2
    write_rows(tmp_path / "chats" / "train.jsonl", rows)
    write_rows(tmp_path / "chats" / "test.jsonl", rows[:3])
    pairs = [{"q": f"What is {n}? ", "a": f"The value {n} of the list."} for n in range(8)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    of_chats = [f"--data={tmp_path / 'chats'}", "--text_key=chat", "--eval_split=test",
                '--template_kwargs={"thinks": false}']
    of_pairs = [f"--data={tmp_path / 'pairs.jsonl'}", "--prompt_key=q", "--completion_key=a",
                f"--eval_data={tmp_path / 'pairs.jsonl'}", "--eval_rows=3"]
    flags = {
        "mapped": of_chats, "streamed": [*of_chats, "--streaming", "--eval_rows=3"],
        "pairs": of_pairs, "written": [*of_pairs, "--on_policy=0.5", "--rollout_tokens=8"],
    }
    base = [f"--student={student}", f"--teacher={teacher}", "--max_length=200", "--steps=2",
            "--num_workers=0", f"--ds_config={ds_config(tmp_path / 'ds.json', 0, 4, 1)}"]
    lines = [[*base, *flags[name], f"--output_dir={tmp_path / name}"] for name in flags]
    assert ranks.run(1, run_distill, lines) == [[0] * len(flags)]
    logs = {name: losses_of(tmp_path / name, -1) for name in flags}
    for name, log in logs.items():
        losses = [line["loss"] for line in log if "loss" in line]
        assert len(losses) == 2 and all(map(math.isfinite, losses)), name
        evaluations = [line for line in log if "eval/student_bits_per_byte" in line]
        assert [line["step"] for line in evaluations] == [0, 2], name
        assert all(line.get("skipped_chats", 0) == 0 for line in log), name
    # the rows that are held out are the same, whatever is trained on
    keys = [key for key in logs["mapped"][0] if key.endswith("bits_per_byte")]
    assert len(keys) == 2
    for key in keys:
        assert logs["mapped"][0][key] == logs["streamed"][0][key]
    assert logs["pairs"][0]["eval/student_bits_per_byte"] == (
        logs["written"][0]["eval/student_bits_per_byte"])
