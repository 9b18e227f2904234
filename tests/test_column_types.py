"""Columns as people have them: objects of lists, any type of text, labels; half pairs are named."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isogloss.config import Config
from isogloss.data.chat_rows import SHAPES, in_shape
from isogloss.data.checks import explained
from isogloss.data.open_data import filled_columns, holds_chats, load_dataset
from isogloss.data.order import ExampleReader, ShuffledExamples
from isogloss.data.sample import TextEncoder
from isogloss.errors import DataError
from isogloss.inputs import load_data
from test_chat_rows import ANSWER, TOOL, USER
from test_open_data import (
    LINES,
    PLAIN,
    WRITERS,
    opened,
    read_all,
    run_data,
    with_arguments,
    write_rows,
)


@pytest.fixture
def encoder(tokenizers, tables):
    return TextEncoder(tokenizers[0], tables[0], 50)


# what a Sequence of `datasets` makes of messages: an object of lists
CALLS = datasets.Sequence({"type": datasets.Value("string"), "function": {
    "name": datasets.Value("string"), "arguments": datasets.Value("string")}})
PARTS_IN_LISTS = datasets.Sequence(dict.fromkeys(["type", "text"], datasets.Value("string")))


@pytest.mark.parametrize("first, second", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("written", ["save_to_disk", "to_parquet", "to_json"])
def test_chats_that_are_objects_of_lists_are_read(tmp_path, written, first, second):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    def listed(calls):
        return {key: [its[key] for its in calls] for key in call}

    chats = {first: [["user", "assistant", "user"], [], ["user"]],
             second: [["a", None, "c"], [], ["d"]],
             "tool_calls": [[listed([]), listed([call]), listed([])], [], [listed([])]]}
    text = datasets.Value("string")
    of_chat = datasets.Sequence({first: text, second: text, "tool_calls": CALLS})
    rows = [dict(zip(chats, lists)) for lists in zip(*chats.values())]
    tools = [{"name": ["f", "g"], "description": ["x", "y"]}] * 3
    of_tools = datasets.Sequence({"name": text, "description": text})
    parts = [{"role": ["user"], "content": [{"type": ["text"] * 2, "text": ["e", "f"]}]}] * 3
    of_parts = datasets.Sequence({"role": text, "content": PARTS_IN_LISTS})
    frame = datasets.Dataset.from_dict(
        {"chat": rows, "tools": tools, "parts": parts},
        datasets.Features({"chat": of_chat, "tools": of_tools, "parts": of_parts}))
    ending = {"save_to_disk": "", "to_parquet": ".parquet", "to_json": ".jsonl"}[written]
    source = tmp_path / f"a{ending}"
    getattr(frame, written)(source)
    expected = [[("user", "a", None), ("assistant", "", [call]), ("user", "c", None)], [],
                [("user", "d", None)]]
    for dataset in opened(source, "chat", json_keys=("parts",), optional_keys=("tools",)):
        assert holds_chats(dataset, "chat")
        reader = ExampleReader("chat", source=str(source), tools_key="tools", prompt_key="parts",
                               filled=filled_columns(dataset), has_chats=True)
        examples = list(map(reader, dataset))
        read = [[(message["role"], message["content"], message.get("tool_calls"))
                 for message in example.content] for example in examples]
        assert read == expected
        for example in examples:
            assert [tool["function"] for tool in example.tools] == [
                {"name": "f", "description": "x"}, {"name": "g", "description": "y"}]
            assert example.prompt == [{"role": "user", "content": "ef"}]
    with pytest.raises(DataError, match=r"row 7 of 'chat' holds {'role': "):
        ExampleReader("chat")({"chat": {"role": ["user"], "content": ["a", "b"]}}, 7)


def test_half_a_surrogate_pair_anywhere_in_a_row_is_named(tmp_path):
    """A chat that would be learned from, its calls and its tools; of a list each row has a name."""
    odd = "x\ud83d"
    in_calls = with_arguments(json.dumps({"a": odd}))
    reader = ExampleReader("chat", tools_key="tools", has_chats=True)
    for chat in ([USER, dict(ANSWER, content=odd)], [USER, dict(ANSWER, reasoning_content=odd)],
                 with_arguments({"a": odd}), [USER, dict(ANSWER, **{odd: "a"})],
                 json.dumps([USER, dict(ANSWER, content=odd)]),
                 [dict(USER, content=[{"type": "text", "text": odd}]), ANSWER]):
        with pytest.raises(DataError, match=r"row 7 of 'chat': message [01] holds half of a surr"):
            reader({"chat": chat}, 7)
        rows = [{"chat": PLAIN}] * 3 + [{"chat": chat}]
        if isinstance(chat, str):  # in the file it is no half pair yet
            continue
        for ending, place in ((".jsonl", r"row 3 \(line 4\)"), (".json", r"row 3 \(line 1\)")):
            source = tmp_path / f"a{ending}"
            source.write_bytes(WRITERS[ending](rows))
            for streaming in (False, True):
                message = rf"a{ending}: 'chat' of {place} holds half of a surrogate pair"
                with pytest.raises(DataError, match=message), explained(str(source)):
                    list(load_dataset(str(source), "chat", streaming=streaming))
    read = reader({"chat": in_calls}, 7).content  # letters that a model has written
    for shape in SHAPES:
        json.dumps(in_shape(read, shape, {}), ensure_ascii=False).encode()
    with pytest.raises(DataError, match="row 7 of 'chat': 'tools' holds half of a surrogate"):
        reader({"chat": PLAIN, "tools": json.dumps([TOOL | {"a": odd}])}, 7)
    whole = json.dumps([{"role": "user", "content": "\U0001f600"}])  # as both halves, escaped
    assert reader({"chat": whole}).content == [{"role": "user", "content": "\U0001f600"}]


TEXTS = {"large": pa.large_string(), "view": pa.string_view(),
         "dictionary": pa.dictionary(pa.int32(), pa.string())}


@pytest.mark.parametrize("kind", TEXTS)
def test_any_type_of_text_that_arrow_has_is_read(tmp_path, encoder, kind):
    """Of more rows than a batch has, held out and joined; the last ones hold more than a view."""
    lines = [f"line {number} " + "x" * (number // 100) for number in range(2500)]
    frame = pa.table({"text": pa.array(lines).cast(TEXTS[kind])})
    pq.write_table(frame, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), frame.schema) as writer:
        writer.write_table(frame)
    sources = [tmp_path / "a.parquet", tmp_path / "a.arrow"]
    if kind != "dictionary":  # which `datasets` does not have
        datasets.Dataset(frame).save_to_disk(tmp_path / "saved")
        sources.append(tmp_path / "saved")
    for source in sources:
        for streaming in (False, True):
            data = run_data(encoder, source, eval_rows=2, streaming=streaming)
            assert read_all(data.held_out_data, data.held_out_reader) == lines[:2]
            assert read_all(data.train_data, data.reader) == lines[2:]
        joined = run_data(encoder, source, join_rows=100)
        stream = ShuffledExamples(joined.train_data, joined.reader, seed=0)
        samples = [stream.example(position).content for position in range(joined.num_samples)]
        assert sorted("\n".join(samples).split("\n")) == sorted(lines)
        assert all(len(sample) >= 100 for sample in samples[:-1])


def test_routes_may_be_labels(tmp_path, encoder):
    """The name of a label, of which a row holds the number; -1 and null stand for none."""
    kinds = [0, 1, -1, None]
    frame = datasets.Dataset.from_dict(
        {"text": LINES + ["four"], "kind": kinds},
        datasets.Features(text=datasets.Value("string"),
                          kind=datasets.ClassLabel(names=["maths", "talk"])))
    frame.save_to_disk(tmp_path / "saved")
    frame.to_parquet(tmp_path / "a.parquet")

    def routes(source, streaming, named):
        teachers = [{"model": "t", "name": "a", "routes": [named]}, {"model": "t", "name": "b"}]
        cfg = Config(student="s", data=str(source), teachers=json.dumps(teachers),
                     route_key="kind", streaming=streaming)
        [data] = load_data(cfg, encoder, {}).sources
        return [data.reader(row).route for row in data.train_data]

    for source in (tmp_path / "saved", tmp_path / "a.parquet"):
        for streaming in (False, True):
            assert routes(source, streaming, "talk") == ["maths", "talk", None, None]
            assert routes(source, streaming, 1) == kinds
    with pytest.raises(ValueError, match="the column holds int64, but --teachers name"):
        write_rows(tmp_path / "a.jsonl", [{"text": "a", "kind": 1}])
        routes(tmp_path / "a.jsonl", False, "talk")
