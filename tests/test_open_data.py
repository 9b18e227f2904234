"""open_data.py: data as people have it, mapped and streamed; compressed, in splits, far away."""

import bz2
import csv
import errno
import gzip
import http.server
import json
import threading

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from isogloss.data.batch import Collator
from isogloss.data.checks import explained
from isogloss.data.file_rows import ROWS_TO_PEEK
from isogloss.data.kinds import elsewhere
from isogloss.data.open_data import DataRequest, filled_columns, holds_chats, load_dataset
from isogloss.data.order import ExampleReader
from isogloss.data.sample import TextEncoder
from isogloss.data.texts import MOST_CHARACTERS
from isogloss.distill import Config
from isogloss.errors import DataError
from isogloss.inputs import load_data
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
    "a null content": [[USER, dict(ANSWER, content=None, reasoning_content="a")], PLAIN],
    "parts": [PARTS, PARTS],
    "parts of other keys": [PARTS, [dict(USER, content=[{"type": "text", "text": "a", "x": 1}])]],
    "an empty chat first": [[], WITH_CALL, PLAIN],
    "sharegpt": [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]],
    "sharegpt of other keys": [[{"from": "human", "value": "a"}],
                               [{"from": "gpt", "value": "b", "weight": 0}]],
    "both names": [PLAIN, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]],
}


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    return str(path)


def opened(source, key="text", **options):
    """Return a data set as it is mapped, and as it is streamed."""
    return [load_dataset(str(source), key, streaming=streaming, **options)
            for streaming in (False, True)]


def texts(source, split="train", **options):
    """Return the texts of a data set, which are the same mapped and streamed."""
    mapped, streamed = opened(source, split=split, **options)
    read = [row["text"] for row in mapped]
    assert [row["text"] for row in streamed] == read
    return read


def check_refused(message, source, key="text", **options):
    """See that a data set is refused with a message, at the latest where it is read."""
    for streaming in (False, True):
        with pytest.raises(DataError, match=message):
            list(load_dataset(str(source), key, streaming=streaming, **options))


# --- chats ----------------------------------------------------------------------------------------


BLANK = "\n\n"
# {ending: what writes rows of JSON to a file}
WRITERS = {
    ".jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    ".json": lambda rows: json.dumps(rows, indent=1).encode(),
    ".blank.jsonl": lambda rows: f"\ufeff\n{BLANK.join(map(json.dumps, rows))}\n\n".encode(),
    ".jsonl.zst": lambda rows: zstandard.compress("\n".join(map(json.dumps, rows)).encode()),
}


@pytest.mark.parametrize("case", CHATS)
def test_messages_keep_their_own_keys(tmp_path, case):
    chats = CHATS[case]
    # columns that nobody asks for may hold what they like
    rows = [{"chat": chat, "id": "a" if number else number} for number, chat in enumerate(chats)]
    for ending, written in WRITERS.items():
        source = tmp_path / f"chats{ending}"
        source.write_bytes(written(rows))
        for dataset in opened(source, "chat"):
            assert [row["chat"] for row in dataset] == chats, ending
            assert holds_chats(dataset, "chat")
            reader = ExampleReader("chat", source=str(source), filled=filled_columns(dataset))
            for row in dataset:
                for message in reader(row).content:
                    assert isinstance(message["role"], str) and isinstance(message["content"], str)


def test_other_columns_come_along_where_they_are_named(tmp_path):
    rows = [{"chat": PLAIN, "to": "a"}] * (2 * ROWS_TO_PEEK)
    rows.append({"chat": WITH_CALL, "to": None, "tools": [TOOL], "then": [ANSWER]})
    source = write_rows(tmp_path / "a.jsonl", rows)
    for dataset in opened(source, "chat", plain_keys=("to",), optional_keys=("tools",)):
        *_, last = dataset
        # a column that the first rows lack is there if it may be missing
        assert last == {"chat": WITH_CALL, "to": None, "tools": [TOOL]}
    check_refused("_key then: no such column; it has chat", source, "chat", json_keys=("then",))
    dataset = load_dataset(source, "chat", plain_keys=("to",), optional_keys=("tools",))
    assert dataset.features["to"].dtype == "string"
    assert sorted(dataset.column_names) == ["chat", "to", "tools"]


def test_types_of_tables_do_not_add_keys(tmp_path):
    """In parquet all messages have all keys, and all calls all arguments."""
    chats = [with_arguments({"a": 1}), with_arguments({"b": "c"})]
    tools = [[TOOL], [{"type": "function", "function": {"name": "f", "strict": True}}]]
    frame = datasets.Dataset.from_dict({"chat": chats, "tools": tools})
    frame.to_parquet(tmp_path / "a.parquet")
    for dataset in opened(tmp_path / "a.parquet", "chat", optional_keys=("tools",)):
        reader = ExampleReader("chat", tools_key="tools", filled=filled_columns(dataset))
        examples = [reader(row) for row in dataset]
        for example, expected in zip(examples, chats, strict=True):
            assert example.content == [USER, expected[1] | {"content": ""}]
        assert [example.tools for example in examples] == tools


def test_files_of_one_folder_may_differ_in_their_keys(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"chat": PLAIN, "id": 1}])
    write_rows(tmp_path / "b.jsonl", [{"chat": WITH_CALL, "id": "x", "tools": [TOOL]}])
    write_rows(tmp_path / "c.jsonl", [{"chat": []}])
    (tmp_path / "d.jsonl").write_text("")
    for dataset in opened(tmp_path, "chat", optional_keys=("tools",)):
        assert [row["tools"] for row in dataset] == [None, [TOOL], None]


@pytest.mark.parametrize("place", ["file", "file/sub", "/proc/none"])
def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_data(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / place)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for source in (write_rows(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / "a.parquet"):
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
        check_refused(f"^HF_DATASETS_CACHE {cache}: cannot be written [^;]*{source}", source)


def test_a_full_disk_is_not_blamed_on_the_data(tmp_path):
    """As `datasets` says it that looks before it writes, and Arrow, whose error it wraps."""
    source = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    wrapped = datasets.exceptions.DatasetGenerationError("An error occurred")
    wrapped.__cause__ = OSError(errno.ENOSPC, "Error writing bytes to file")
    for error in (wrapped, OSError("Not enough disk space. Needed: 9 GiB")):
        with pytest.raises(DataError, match=r"^HF_DATASETS_CACHE "), explained(source):
            raise error
    cached = f"{datasets.config.HF_DATASETS_CACHE}/a/b"
    with pytest.raises(DataError, match=r"^HF_DATASETS_CACHE "), explained(source):
        raise OSError(errno.EACCES, "Permission denied", cached)
    for number, file in ((errno.EIO, source), (errno.ENOENT, cached), (errno.EIO, None)):
        with pytest.raises(DataError, match=r"^--data "), explained(source):
            raise OSError(number, "no", file)


def test_a_changed_file_is_read_again(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"chat": PLAIN}])
    assert len(load_dataset(source, "chat")) == 1
    write_rows(tmp_path / "a.jsonl", [{"chat": PLAIN}] * 3)
    assert len(load_dataset(source, "chat")) == 3


# --- what stands in a file ------------------------------------------------------------------------

DATES = ["2024-01-31", "2024-01-31 10:00", "2024-01-31 10:00:00", "2024-01-31T10:00:00Z",
         "1999-12-31T23:59:59.123Z"]
CELLS = ["6", "3.50", "007", "1e5", "NA", "null", "", "nan", "None", "True", "-0", " 7 ", "1_000",
         "0x10", "2024-01-31", "1,000", 'say "a"', "a\nb", "+1", "9" * 30]


@pytest.mark.parametrize("date", DATES)
def test_text_that_looks_like_a_date_stays_text(tmp_path, date):
    line = json.dumps({"text": date, "q": date})
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n")
    (tmp_path / "b.json").write_text(f"[{line}, {line}]")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    for name in ("a.jsonl", "b.json", "c.jsonl.gz"):
        assert texts(tmp_path / name) == [date, date]
    for dataset in opened(tmp_path / "a.jsonl", json_keys=("q",)):
        assert [row["q"] for row in dataset] == [date, date]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_a_csv_are_what_stands_there(tmp_path, end):
    path = tmp_path / "a.csv"
    # the last column is of several types, and nobody asks for it
    cells = [(cell, cell, number if number % 2 else "x") for number, cell in enumerate(CELLS)]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator=end).writerows([("text", "q", "other"), *cells])
    for dataset in opened(path, plain_keys=("q",)):
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


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet", ".arrow"])
def test_files_may_differ_in_columns_that_nobody_named(tmp_path, kind):
    second = {"id": "x", "text": "b", "more": "c"}
    assert texts(write_pair(tmp_path / "a", kind, {"text": "a", "id": 1}, second)) == ["a", "b"]
    folder = write_pair(tmp_path / "b", kind, {"text": "a", "to": "x"}, {"text": "a", "id": 1})
    check_refused(rf"b\{kind}: no column 'to'; it has text, id", folder, plain_keys=("to",))
    if kind != ".csv":
        folder = write_pair(tmp_path / "c", kind, {"text": "a"}, {"text": 3})
        check_refused(rf"b\{kind}: column 'text' holds int64, but string in .*a\{kind}; write them",
                      folder)


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_a_column_of_a_type_without_a_name_may_stand_beside(tmp_path, kind):
    """`datasets` has no maps."""
    facts = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"facts": facts, "text": ["a"], "n": [1]})
    path = tmp_path / f"a{kind}"
    if kind == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    assert texts(path) == ["a"]
    check_refused("no column 'b'; it has facts, text, n", path, "b")
    check_refused(r"map<string, int64", path, "facts")


def test_chats_whose_keys_differ_from_file_to_file_are_named(tmp_path):
    """Tables have one type for all messages; a later file may have fewer keys, but no more."""
    named = [dict(message, name="x") for message in PLAIN]
    for kind in (".parquet", ".arrow"):
        folder = write_pair(tmp_path / kind, kind, {"text": named}, {"text": PLAIN})
        assert [len(chat) for chat in texts(folder)] == [2, 2]
        folder = write_pair(tmp_path / f"more{kind}", kind, {"text": PLAIN}, {"text": named})
        check_refused(rf"b\{kind}: column 'text' holds lists of obj", folder)


def test_a_late_row_of_another_type_is_named(tmp_path):
    rows = [{"text": "a", "to": "x"}] * (2 * ROWS_TO_PEEK) + [{"text": "a", "to": 3}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    message = (rf"a\.jsonl: 'to' of row {len(rows) - 1} \(line {len(rows)}\) holds a number, but "
               "rows before have the type s")
    for streaming in (False, True):
        with explained(source), pytest.raises(ValueError, match=message):
            list(load_dataset(source, "text", streaming=streaming, plain_keys=("to",)))


def test_a_folder_without_splits_is_read_whole_or_as_its_card_says(tmp_path):
    names = ["a.jsonl", "b/c.jsonl", "b/d/e.JSONL"]
    write_shards(tmp_path, names)
    assert texts(tmp_path) == names
    # as in a clone of a data set of the hub
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: a.jsonl\n  - split: dev\n    path: b/c.jsonl\n---\n")
    assert texts(tmp_path) == ["a.jsonl"]
    assert texts(tmp_path, "dev") == ["b/c.jsonl"]


def test_what_editors_and_datasets_leave_in_a_folder_is_no_data(tmp_path):
    folder = tmp_path / ".cache" / "data"  # hidden itself
    write_shards(folder, ["data/train-0.jsonl"])
    write_shards(folder, [".ipynb_checkpoints/a-checkpoint.jsonl", "data/.train-0.jsonl"])
    for name in ("dataset_info.json", "data/dataset_infos.json", "state.json.jsonl"):
        write_rows(folder / name, [{"default": {"features": {}}, "text": name}])
    assert texts(folder) == ["data/train-0.jsonl", "state.json.jsonl"]


# --- files ----------------------------------------------------------------------------------------

COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files_are_read(tmp_path, suffix):
    """All parts of them, and a copy beside its file only once."""
    rows = [{"text": line} for line in LINES]
    contents = {".jsonl": "\n".join(map(json.dumps, rows)), ".json": json.dumps(rows),
                ".txt": "\n".join(LINES), ".csv": "text\n" + "\n".join(LINES)}
    for kind, content in contents.items():
        path = tmp_path / f"a{kind}{suffix}"
        path.write_bytes(COMPRESSIONS[suffix](content.encode()))
        assert texts(path) == LINES, path
    folder = tmp_path / "folder"
    write_rows(folder / "a.jsonl", rows)
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    for name in ("a", "b"):
        (folder / f"{name}.jsonl{suffix}").write_bytes(b"".join(map(COMPRESSIONS[suffix], lines)))
    assert texts(folder) == LINES * 2


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
}


def write_shards(folder, shards):
    """Write files that hold their own names; the last one is of the test split."""
    for name in shards:
        write_rows(folder / name, [{"text": name}])


@pytest.mark.parametrize("case", SHARDS)
def test_a_folder_of_several_splits_is_read_by_split(tmp_path, case):
    shards = SHARDS[case]
    write_shards(tmp_path, shards)
    assert texts(tmp_path) == shards[:2]
    assert texts(tmp_path, "test") == shards[2:]
    assert texts(tmp_path, "train+test") == shards
    part = load_dataset(str(tmp_path), "text", "train[1:]")
    assert list(part["text"]) == shards[1:2] and not holds_chats(part, "text")


def test_chats_of_a_folder_are_read_by_split(tmp_path, monkeypatch):
    folder = tmp_path / "org" / "name"
    write_rows(folder / "train.jsonl", [{"chat": PLAIN}] * 4)
    write_rows(folder / "test.jsonl", [{"chat": WITH_CALL}])
    for split, streaming, expected in (
            ("train", False, [PLAIN] * 4), ("test", False, [WITH_CALL]),
            ("train[:50%]", False, [PLAIN] * 2), ("train[3:]+test", False, [PLAIN, WITH_CALL]),
            ("test+train", True, [WITH_CALL] + [PLAIN] * 4)):
        dataset = load_dataset(str(folder), "chat", split, streaming)
        assert [row["chat"] for row in dataset] == expected
    # a folder stands for the hub: `datasets` names its files in the same way
    monkeypatch.chdir(tmp_path)
    for streaming in (False, True):
        for split, expected in (("train", [PLAIN] * 4), ("test", [WITH_CALL])):
            request = DataRequest("org/name", "chat", split, streaming, (), (), (), "line")
            assert [row["chat"] for row in elsewhere.open_hub(request)] == expected


def test_saved_splits_are_read(tmp_path):
    """By split; chats with the types of tables, and as JSON values."""
    parts = {name: datasets.Dataset.from_dict({"text": [name] * 3}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved", num_shards=dict.fromkeys(parts, 2))
    for name in parts:
        assert texts(tmp_path / "saved", name) == [name] * 3
    both = load_dataset(str(tmp_path / "saved"), "text", "train[:34%]+test[1:]")
    assert [row["text"] for row in both] == ["train", "test", "test"]
    assert texts(tmp_path / "saved", "test+train") == ["test"] * 3 + ["train"] * 3
    parts["test"].save_to_disk(tmp_path / "alone")
    assert texts(tmp_path / "alone") == ["test"] * 3
    assert len(load_dataset(str(tmp_path / "alone"), "text", "train[1:]")) == 2
    for features in (None, datasets.Features(chat=datasets.Json())):
        rows = [{"chat": PLAIN}, {"chat": WITH_CALL}]
        folder = tmp_path / f"saved_{features is None}"
        saved = datasets.Dataset.from_list(rows, features=features)
        datasets.DatasetDict(train=saved).save_to_disk(folder)
        for dataset in opened(folder, "chat"):
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
    for dataset in opened(f"{address}/chats.jsonl", "chat"):
        assert [row["chat"] for row in dataset] == [PLAIN, WITH_CALL]
    check_refused(r"--data http.*none\.jsonl: cannot be read", f"{address}/none.jsonl")


def test_any_file_system_that_fsspec_knows_will_do():
    """As hf:// and s3:// do."""
    memory = fsspec.filesystem("memory")
    for number in range(2):
        memory.pipe(f"/shards/{number}.jsonl", WRITERS[".jsonl"]([{"chat": PLAIN}] * 2))
    for dataset in opened("memory://shards/*.jsonl", "chat"):
        assert len(list(dataset)) == 4
    check_refused(r"memory://none.*: no file matches", "memory://none/*.jsonl", "chat")


# --- sizes ----------------------------------------------------------------------------------------


def test_a_text_that_no_tokenizer_takes_is_refused(tmp_path, encoder):
    """It would be tokenized whole: 200 MB abort the process.  A place to cut it is enough."""
    huge = "a" * (MOST_CHARACTERS + 1)
    (tmp_path / "a.txt").write_text(f"b\n{huge}\n")
    write_rows(tmp_path / "a.jsonl", [{"text": "b"}, {"text": huge}])
    for name in ("a.txt", "a.jsonl"):
        message = rf"{name}: row 1 of 'text' has {len(huge)} characters, and a tokenizer takes up"
        with pytest.raises(DataError, match=message):
            run_data(encoder, tmp_path / name)
    data = run_data(encoder, tmp_path / "a.jsonl", streaming=True)
    with pytest.raises(ValueError, match=rf"a text of {len(huge)} characters \('aaaa"):
        Collator(encoder, [])([data.reader(row) for row in data.train_data])
    data = run_data(encoder, write_rows(
        tmp_path / "b.jsonl", [{"text": "word " * (MOST_CHARACTERS // 4)}]))
    assert Collator(encoder, [])([data.reader(row) for row in data.train_data]).counts.tokens > 40


def test_a_chat_that_no_tokenizer_takes_is_refused():
    chat = [USER, dict(ANSWER, content="a" * MOST_CHARACTERS)]
    with pytest.raises(DataError, match=r"row 3 of 'chat' holds a chat of \d+ characters, and up"):
        ExampleReader("chat", source="x")({"chat": chat}, 3)


# --- flags ----------------------------------------------------------------------------------------


def run_data(student, source, **flags):
    """Return the SourceData of a run of a student alone."""
    cfg = Config(student="s", kd_weight=0.0, data=str(source), **flags)
    [data] = load_data(cfg, student, {}).sources
    return data


@pytest.fixture
def encoder(tokenizers, tables):
    return TextEncoder(tokenizers[0], tables[0], 50)


def read_all(dataset, reader):
    return [reader(row).content for row in dataset]


def test_held_out_rows_may_come_from_data_of_their_own(tmp_path, encoder):
    source = write_rows(tmp_path / "a.jsonl", [{"text": line} for line in LINES])
    (tmp_path / "b.txt").write_text("x\ny\nz")
    for eval_rows, streaming, expected in (
            (0, False, ["x", "y", "z"]), (2, False, ["x", "y"]), (9, False, ["x", "y", "z"]),
            (2, True, ["x", "y"])):
        data = run_data(encoder, source, eval_rows=eval_rows, streaming=streaming,
                        eval_data=str(tmp_path / "b.txt"))
        assert read_all(data.held_out_data, data.held_out_reader) == expected
        assert read_all(data.train_data, data.reader) == LINES


def test_held_out_rows_may_be_another_split(tmp_path, encoder):
    write_shards(tmp_path, SHARDS["names"])
    data = run_data(encoder, tmp_path, eval_split="test")
    assert read_all(data.held_out_data, data.held_out_reader) == SHARDS["names"][2:]
    assert read_all(data.train_data, data.reader) == SHARDS["names"][:2]
    with pytest.raises(DataError, match=r"--eval_split dev: .*it has train, test"):
        run_data(encoder, tmp_path, eval_split="dev")


def test_tools_and_prompts_reach_the_examples(tmp_path, tokenizers):
    student, _ = with_templates(tokenizers, WITH_TOOLS)
    rows = [{"chat": [USER], "then": [ANSWER], "tools": [TOOL], "text": "a"}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    for streaming in (False, True):
        data = run_data(student, source, prompt_key="chat", completion_key="then",
                        streaming=streaming, eval_data=source, eval_rows=1)
        for side, reader in ((data.train_data, data.reader),
                             (data.held_out_data, data.held_out_reader)):
            [example] = map(reader, side)
            assert example.content == [USER, ANSWER] and example.context == 1
            assert example.tools == [TOOL]
