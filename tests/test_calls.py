"""Calls that an assistant wrote are read as its template writes them, and nothing else is."""

import copy

import pytest

from isogloss.align import TokenTable
from isogloss.data.chat import pair_chats, render
from isogloss.data.options.calls import call_of, spoken, text_with_names
from isogloss.data.sample import TextEncoder
from isogloss.data.turns import SkippedChat
from template_shapes import ENDS, MARKS, SHAPES

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "all": {"type": "boolean"}}}}}
    for name in ("weather", "clock")]
QUESTION = {"role": "user", "content": "How is it?"}
WITHOUT_CALLS = {"Gemma 3", "Phi-4", "SmolLM3"}
CALLS = [
    [("weather", {"city": "Paris", "days": 3})],
    [("clock", {"city": "New \"York\" {1}"})],
    [("weather", {"city": "a\nb", "all": True}), ("clock", {"city": "12"})],
]


@pytest.fixture(scope="module")
def encoder_of(tokenizers):
    """Return a chat template -> TextEncoder."""
    def build(template):
        tokenizer = copy.deepcopy(tokenizers[1])
        marks = sorted({*MARKS.findall(template), *ENDS})
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        tokenizer.chat_template = template
        ends = tokenizer.convert_tokens_to_ids([end for end in ENDS if end in template])
        return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 10_000,
                           generation={"eos_token_id": ends})
    return build


def written(encoder, calls):
    """Return what a template writes of an answer that calls; None: it refuses it."""
    message = {"role": "assistant", "content": "",
               "tool_calls": [call_of(*call) for call in calls]}
    rendering = render([QUESTION, message], encoder, TOOLS)
    turn, = rendering.turns
    inside = (rendering.located.begin >= turn.begin) & (rendering.located.end <= turn.end)
    return text_with_names(rendering.ids[inside], encoder)


@pytest.mark.parametrize("name", SHAPES)
def test_calls_are_read_as_they_are_written(name, encoder_of):
    encoder = encoder_of(SHAPES[name])
    if name in WITHOUT_CALLS:
        assert spoken('{"name": "clock", "arguments": {}}', encoder, TOOLS).calls == []
        return
    num_read = 0
    for calls in CALLS:
        try:
            text = written(encoder, calls)
        except SkippedChat:
            assert len(calls) > 1  # Llama 3 and gpt-oss write one
            continue
        said = spoken(text, encoder, TOOLS)
        assert (called(said), said.problem) == (calls, "")
        assert called(spoken(f"Let me see.\n{text}", encoder, TOOLS)) in (calls, [])
        for end in range(1, len(text.rstrip())):  # it was cut
            cut = called(spoken(text[:end], encoder, TOOLS))
            assert cut == calls[: len(cut)] and len(cut) < len(calls)
        num_read += 1
    assert num_read >= 2


def called(said):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in said.calls]


CALL = '<tool_call>\n{"name": "clock", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("text, problem", [
    ("It is noon.", ""),
    ("It has {curly} [brackets].", ""),
    (CALL.replace("clock", "watch"), "is of 'watch', and there are weather, clock"),
    (CALL.replace("}}", "}"), "is no JSON"),
    (CALL.replace("}}", "},}"), "is no JSON"),
    (CALL + " And so on.", "</tool_call> And so"),
    (CALL.replace('{"city": "Rome"}', "[1]"), "has no arguments that are an object"),
    (CALL.replace("arguments", "parameters"), "has no 'arguments'"),
    (CALL.replace('"clock"', "3"), "has no name"),
    (CALL.replace("</tool_call>", ""), "in place of '</tool_call>"),
    ("<tool_call>" + "[" * 100_000, "is no JSON"),
    (CALL.replace('"Rome"', "[" * 2000 + "]" * 2000), "is no JSON"),
    (CALL.replace("Rome", "\\ud800"), "holds half of a surrogate pair"),
])
def test_what_is_no_call_is_told_and_not_guessed(text, problem, encoder_of):
    said = spoken(text, encoder_of(SHAPES["thinking ChatML"]), TOOLS)
    assert said.calls == [] and said.content == text
    assert problem in said.problem and bool(problem) == bool(said.problem)


def test_without_tools_nothing_is_a_call(encoder_of):
    encoder = encoder_of(SHAPES["ChatML"])
    assert spoken(CALL, encoder, None) == (CALL, [], "", "")


def test_a_response_template_comes_first(encoder_of):
    encoder = encoder_of(SHAPES["ChatML"])
    encoder.tokenizer.response_template = {
        "start_anchor": "assistant\n", "defaults": {"role": "assistant"}, "fields": {
            "content": {}, "tool_calls": {"open": "CALL", "close": "END", "content": "json",
                                          "repeats": True}}}
    text = 'CALL{"name": "clock", "arguments": {"city": "Rome"}}END'
    assert called(spoken(text, encoder, TOOLS, "assistant\n")) == [("clock", {"city": "Rome"})]
    wrong = spoken("CALL{END", encoder, TOOLS, "assistant\n")
    assert wrong.calls == [] and "cannot be read" in wrong.problem


def test_how_a_turn_begins_is_compared_where_calls_are_written_alike_alone(encoder_of):
    """Else what a teacher says of whether to call is said in its own words for a call."""
    chat = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call_of(*CALLS[0][0])]},
            {"role": "tool", "name": "weather", "content": "fine"},
            {"role": "assistant", "content": "It is fine."}]
    of_chatml, of_llama = (encoder_of(SHAPES[name]) for name in ("ChatML", "Llama 3"))

    def first_chunks(encoders, tools):
        """Return the chunk of the first token of each turn, on both sides."""
        both = [render(chat, encoder, tools) for encoder in encoders]
        alignment = pair_chats(both, encoders)
        chunks = []
        for side, chunk in zip(both, (alignment.student_chunk, alignment.teacher_chunk)):
            for turn in side.turns:
                inside = (side.located.begin >= turn.begin) & (side.located.begin < turn.end)
                chunks.append(chunk[inside][0])
        return chunks

    assert min(first_chunks((of_chatml, of_chatml), TOOLS)) >= 0
    assert set(first_chunks((of_chatml, of_llama), TOOLS)) == {-1}
    assert max(first_chunks((of_chatml, of_llama), None)) >= 0
