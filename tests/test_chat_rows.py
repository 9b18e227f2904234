"""chat_rows.py: chats as people write them, as templates read them."""

import copy
import json
import re
import warnings

import datasets
import pytest

from isogloss.data.batch_types import Example
from isogloss.data.chat_rows import as_messages, as_tools, problem_of_tools
from isogloss.data.open_data import holds_chats, load_dataset
from isogloss.data.order import ExampleReader
from isogloss.data.rollouts import Prompter
from isogloss.data.texts import problem_of
from isogloss.data.turns import Template
from isogloss.errors import DataError
from test_chat import CHATML, collator, with_templates

USER = {"role": "user", "content": "What is the index of the value?"}
ANSWER = {"role": "assistant", "content": "It is the first of the list."}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"at": "the index"}}}
TOOL = {"type": "function", "function": {
    "name": "look_up", "description": "Find a value.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}


def text_part(text):
    return {"type": "text", "text": text}


def with_call(**call):
    return dict(ANSWER, tool_calls=[call])


THINKING = dict(ANSWER, reasoning_content="hm")
CALL_OF_ONE = {"name": "look_up", "arguments": {"at": 1}}
CALLING = dict(ANSWER, content="", tool_calls=[CALL])


# {what is odd about it: (a message as it is written, as templates read it)}
MESSAGES = {
    "parts": (dict(USER, content=[text_part("a "), "b", {"text": " c"}]),
              dict(USER, content="a b c")),
    "no parts": (dict(ANSWER, content=[], tool_calls=[CALL]), CALLING),
    "parts of an API": (dict(ANSWER, content=[{"type": "output_text", "text": "a"}]),
                        dict(ANSWER, content="a")),
    "a null content": (dict(ANSWER, content=None, tool_calls=[CALL]), CALLING),
    "no content": ({"role": "assistant", "tool_calls": [CALL]}, CALLING),
    "keys that are null": (dict(USER, tool_calls=None, name=None), USER),
    "no calls": (dict(USER, tool_calls=[], function_call=""), USER),  # as servers answer
    "a key of its own": (dict(USER, name="Ann"), dict(USER, name="Ann")),
    "arguments as text": (with_call(function={"name": "look_up", "arguments": '{"at": 1e3}'}),) * 2,
    "a bare call": (with_call(name="look_up", arguments='{"at": 1}'), with_call(
        type="function", function=CALL_OF_ONE | {"arguments": '{"at": 1}'})),
    "no arguments": (with_call(function={"name": "look_up", "arguments": ""}),
                     with_call(function={"name": "look_up", "arguments": {}})),
    "a call as OpenAI had it": (
        {"role": "assistant", "content": None, "function_call": CALL_OF_ONE},
        with_call(type="function", function=CALL_OF_ONE) | {"content": ""}),
    "a result as OpenAI had it": ({"role": "function", "name": "look_up", "content": "a"},
                                  {"role": "tool", "name": "look_up", "content": "a"}),
    "arguments that are no JSON": (with_call(function={"name": "look_up", "arguments": "x"}),) * 2,
    "another name of a role": ({"role": "model", "content": "a"},
                               {"role": "assistant", "content": "a"}),
    "from a human": ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
    "from gpt": ({"from": "gpt", "value": "a", "weight": 1},
                 {"role": "assistant", "content": "a", "weight": 1}),
    "from a tool": ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
    "a call by ShareGPT": (
        {"from": "function_call", "value": '{"name": "look_up", "arguments": {"at": 1}}'},
        with_call(type="function", function=CALL_OF_ONE) | {"content": ""}),
    "calls by ShareGPT": (
        {"from": "function_call", "value": '[{"name": "look_up", "arguments": {"at": 1}}]'},
        with_call(type="function", function=CALL_OF_ONE) | {"content": ""}),
    "numbers of a call by ShareGPT": (
        {"from": "function_call", "value": '{"name": "look_up", "arguments": {"at": [1e3, 2]}}'},
        with_call(type="function", function=CALL_OF_ONE | {"arguments": '{"at": [1e3, 2]}'})
        | {"content": ""}),
    "spaces around a role": ({"role": " User\n", "content": " a"},
                             {"role": "user", "content": " a"}),
    "spaces around a name": ({"from": "gpt ", "value": "a"}, {"role": "assistant", "content": "a"}),
    "a thought by another name": (dict(ANSWER, thought="hm"), THINKING),
    "a thought in parts": (dict(ANSWER, reasoning="", reasoning_details=[
        {"type": "reasoning.summary", "summary": "h"}, {"type": "reasoning.encrypted", "data": "x"},
        {"type": "reasoning.text", "text": "m"}]), THINKING),
    "a thought in the content": (dict(ANSWER, content=[
        {"type": "thinking", "thinking": "hm", "signature": "x"}, text_part(ANSWER["content"])]),
        THINKING),
    "parts of a thought": (dict(ANSWER, content=[
        {"type": "thinking", "thinking": [text_part("h"), text_part("m")]},
        text_part(ANSWER["content"])]), THINKING),
    "a thought as an API has it": (dict(ANSWER, content=[
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "output_text", "text": ANSWER["content"]}]), THINKING),
    "a thought alone": ({"role": "assistant", "content": None, "thought": "hm"},
                        dict(THINKING, content="")),
    "both names": ({"role": "user", "content": "a", "from": None, "value": None},
                   {"role": "user", "content": "a"}),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_are_read_as_templates_expect_them(case):
    written, expected = MESSAGES[case]
    before = copy.deepcopy(written)
    assert problem_of([written]) is None
    assert as_messages([written]) == [expected]
    assert written == before  # rows stay as they are
    assert as_messages([expected]) == [expected]


def test_nulls_inside_count_unless_a_type_has_filled_them_in():
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    filled = {"function": {"name": "f", "arguments": {"a": 1}}}
    tools = [{"name": "f", "parameters": {"a": None, "b": [{"c": None, "d": 1}]}}]
    for is_filled, expected in ((False, call), (True, filled)):
        [message] = as_messages([with_call(**call)], is_filled=is_filled)
        assert message["tool_calls"] == [expected]
    assert as_tools(tools) == [{"type": "function", "function": tools[0]}]
    [tool] = as_tools(tools, is_filled=True)
    assert tool["function"] == {"name": "f", "parameters": {"b": [{"d": 1}]}}


def test_tools_may_be_a_list_or_json_of_one():
    for nothing in (None, [], "", " ", "null", "[]"):
        assert problem_of_tools(nothing) is None and not as_tools(nothing)
    bare = [TOOL["function"]]  # as xLAM and Hermes write them
    for tools in ([TOOL], bare):
        assert as_tools(tools) == as_tools(json.dumps(tools)) == [TOOL]
    for wrong in ("look", [1], {"a": 1}, "[1]", 3):
        assert "expected a list of tools" in problem_of_tools(wrong)


WRONG = {
    "is 'a', expected role and content": "a",
    "has a part of type 'button', expected parts of text alone": dict(
        USER, content=[text_part("a"), {"type": "button"}]),
    "has a part without text": dict(USER, content=[{"type": "text", "text": None}]),
    "has a content that is 3": dict(USER, content=3),
    "has a content that is [1]": dict(USER, content=[1]),
    "has tool_calls that are 'look'": dict(ANSWER, content=None, tool_calls="look"),
    "has a tool call that is {'name': None}": with_call(name=None),
    "has a reasoning_content that is 1": dict(USER, reasoning_content=1),
    "has a thought that is 1": dict(ANSWER, thought=1),
    "has a 'weight' that is 0.5, expected 0 or 1": dict(ANSWER, weight=0.5),
    "has a 'trainable' that is 'no', expected 0 or 1": dict(ANSWER, trainable="no"),
    "is from 'robot', expected one of human": {"from": "robot", "value": "a"},
    "has a role that is 1, expected text": {"from": 1, "value": "a"},
    "has no role": {"value": "a"},
    "has no content": {"from": "human", "value": None},
}


@pytest.mark.parametrize("problem", WRONG)
def test_what_cannot_be_read_is_said_in_a_line(problem):
    assert problem_of([USER, WRONG[problem]]).startswith(f": message 1 {problem}")
    with pytest.raises(DataError, match="--data d: row 3 of 'chat': message 0 "):
        ExampleReader("chat", source="d")({"chat": [WRONG[problem]]}, 3)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_belongs_to_the_chats_and_is_not_read_is_named(tmp_path, kind):
    file = str(tmp_path / f"rows.{kind}")
    rows = datasets.Dataset.from_list([{"system": "Be good.", "chat": [USER, ANSWER]}])
    rows.to_json(file) if kind == "jsonl" else rows.to_parquet(file)
    with pytest.warns(UserWarning, match="no model reads its column 'system'"):
        load_dataset(file, "chat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_dataset(file, "chat", optional_keys=("system",))


@pytest.mark.parametrize("key", ["mask", "assistant_masks", "lossWeights", "train_detail"])
def test_what_may_say_that_a_message_is_not_learned_and_is_not_read_is_named(key):
    with pytest.warns(UserWarning, match=f"messages have a key '{key}', which is not read"):
        as_messages([USER, dict(ANSWER, **{key: [1]})])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_messages([USER, dict(ANSWER, weight=1.0, trainable=True, masked=False, loss_mask=1)])


# what templates make of arguments: as they are, an object, always JSON of what they get
ARGUMENTS = {
    "text or an object": "{{ a if a is string else a | tojson }}",
    "text": "{{ 'x' + a }}",
    "an object": "{{ a | tojson }}",
    "a named object": "{% if c.id | length != 9 %}{{ raise_exception('no') }}{% endif %}"
                      "{{ a | tojson }}",
    "items": "{% for key, value in a.items() %}{{ key }}={{ value }};{% endfor %}",
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_that_are_text_are_not_rewritten(tokenizers, kind):
    template = ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
                "{% set a = c.function.arguments %}" + ARGUMENTS[kind] + "{% endfor %}{% endfor %}")
    encoder, _ = with_templates(tokenizers, template)
    written = '{"a":1e3, "b": [-0, 1.50], "c": 7}'
    chat = as_messages([USER, with_call(function={"name": "f", "arguments": written})])
    as_object = '{"a": 1e3, "b": [-0, 1.50], "c": 7}'
    expected = {"an object": as_object, "a named object": as_object,
                "items": "a=1e3;b=[-0, 1.50];c=7;"}.get(kind, written)
    assert Template(encoder).write(chat).endswith(expected)
    # an object has no letters of its own
    chat = as_messages([USER, with_call(function={"name": "f", "arguments": {"a": 1000.0}})])
    assert Template(encoder).write(chat).endswith("a=1000.0;" if kind == "items" else "1000.0}")


def test_images_are_refused_or_dropped():
    image = {"type": "image_url", "image_url": {"url": "b"}}
    row = {"chat": [dict(USER, content=[text_part("a"), image, text_part("b")]), ANSWER],
           "prompt": [dict(USER, content=[image])]}
    said = ("'image_url', and models read text alone; drop_images of an entry of --data learns the "
            "text beside it; repair or remove it")
    for keys in ({}, {"prompt_key": "prompt"}, {"teacher_prompt_key": "prompt"}):
        with pytest.raises(DataError, match=re.escape(said)):
            ExampleReader("chat", **keys)(row)
        example = ExampleReader("chat", drop_images=True, **keys)(row)
        assert [message["content"] for message in example.content] == ["ab", ANSWER["content"]]


def collate(encoders, rows, **keys):
    """Return the Batch of rows as a run reads them."""
    reader = ExampleReader("chat", **keys)
    return collator(encoders)([reader(row) for row in rows])


# lists the tools, if any, as templates of models do that can call them
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{{ eos_token }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if thinks is defined and not thinks %}(at once)"
    "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}")


def decoded(encoder, ids):
    return encoder.table.decode(ids[ids >= 0].tolist()).decode(errors="replace")


def test_both_models_are_shown_tools_and_told_what_the_flag_says(tokenizers):
    encoders = with_templates(tokenizers, WITH_TOOLS, WITH_TOOLS)
    chat = [USER, ANSWER]
    plain = collate(encoders, [{"chat": chat}]).student.ids
    without = collate(encoders, [{"chat": chat, "tools": None}], tools_key="tools")
    assert without.student.ids.tolist() == plain.tolist()
    for encoder in encoders:
        encoder.template_kwargs = {"thinks": False}
    for tools in ([TOOL], json.dumps([TOOL])):
        batch = collate(encoders, [{"chat": chat, "tools": tools}], tools_key="tools")
        for encoder, side in zip(encoders, (batch.student, batch.teachers[0])):
            read = decoded(encoder, side.ids[0])
            assert "Find a value." in read and read.count("(at once)") == 2
        learned = decoded(encoders[0], batch.student.labels[0])
        assert "Find" not in learned and ANSWER["content"] in learned
    # and prompts of rollouts
    prompter = Prompter(encoders[0], 0, 1.0, 1, 10, 10)
    prompt = prompter.prompt(Example(chat, tools=[TOOL]), (0, 0))
    assert "look_up" in prompt.text and "(at once)" in prompt.text
    assert ANSWER["content"] not in prompt.text and prompt.tools == [TOOL]


@pytest.mark.parametrize("prompt, completion", [
    ("What is it? ", "The index of the list."), ("é 日本:", "the value"), ("a", ""), ("", "first")])
def test_of_prompt_and_completion_the_second_is_learned(encoders, prompt, completion):
    reader = ExampleReader("answer", prompt_key="question", is_completion=True)
    example = reader({"question": prompt, "answer": completion})
    assert (example.content, example.context) == (prompt + completion, len(prompt))
    batch, plain = [collator(encoders)([content]) for content in (example, prompt + completion)]
    assert batch.student.ids.tolist() == plain.student.ids.tolist()
    labels = batch.student.labels[0]
    table = encoders[0].table
    learned = table.decode([i for i in labels[labels >= 0].tolist() if not table.special[i]])
    # a token may reach from the prompt into the completion, and is learned then
    text = (prompt + completion).encode()
    size = len(completion.encode())
    assert text.endswith(learned.removeprefix(b" ")) and size <= len(learned) < size + 8
    assert labels[-1] == table.eos  # where to end is learned too
    assert batch.counts.text_bytes <= len(learned)
    chunks = batch.teachers[0].student_chunk[0]
    assert (chunks[labels < 0] == -1).all()
    # neither model is judged by the prompt
    for side in (batch.student, batch.teachers[0]):
        num_bytes = int(side.num_bytes.clamp(min=0).sum())
        assert num_bytes == 0 if not completion else size - 8 < num_bytes < size + 8
    assert ((labels == plain.student.labels[0]) | (labels == -100)).all()


def test_of_chats_the_completions_messages_are_learned(tokenizers):
    encoders = with_templates(tokenizers, CHATML)
    first = [USER, ANSWER, USER]
    second = [dict(ANSWER, content="the value")]
    reader = ExampleReader("then", prompt_key="chat", is_completion=True)
    example = reader({"chat": first, "then": second})
    assert example.content == first + second and example.context == 3
    table = encoders[0].table
    for train_on in ("assistant", "all"):
        batch = collator(encoders, train_on=train_on)([example])
        labels = batch.student.labels[0]
        learned = table.decode([i for i in labels[labels >= 0].tolist() if not table.special[i]])
        # "all" learns what the template writes behind the message too
        assert learned.strip() == b"the value"
        assert batch.counts.pairs[0].kd_terms > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_that_are_written_as_json_are_read(tmp_path, streaming):
    file = tmp_path / "rows.jsonl"
    rows = [{"chat": json.dumps([USER, ANSWER])}] * 3
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load_dataset(str(file), "chat", streaming=streaming)
    assert holds_chats(dataset, "chat")
    reader = ExampleReader("chat", source="d", has_chats=True)
    assert [reader(row).content for row in dataset] == [[USER, ANSWER]] * 3
    with pytest.raises(DataError, match=r"row 3 of 'chat' holds '\[1\]', and the first rows hold"):
        reader({"chat": "[1]"}, 3)
    file.write_text(json.dumps({"chat": "[INST] a"}) + "\n" + json.dumps(rows[0]) + "\n")
    assert not holds_chats(load_dataset(str(file), "chat", streaming=streaming), "chat")
    chats = ["", "[]", "\n " + json.dumps([USER, ANSWER])]
    file.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    dataset = load_dataset(str(file), "chat", streaming=streaming)
    assert holds_chats(dataset, "chat")
    assert [reader(row).content for row in dataset] == [[], [], [USER, ANSWER]]
    file.write_text(json.dumps({"chat": str([USER, ANSWER])}) + "\n")
    with pytest.raises(DataError, match="holds chats as Python prints them"):
        holds_chats(load_dataset(str(file), "chat", streaming=streaming), "chat")
