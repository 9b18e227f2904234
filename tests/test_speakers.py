"""turns.py: who says what in a chat, whatever shape a template has.

All words of the assistant are learned, and no word of another: by a student, and by what lies in
chunks with a teacher of another tokenizer.
"""

import copy

import pytest

from isogloss.align import TokenTable
from isogloss.data import chat as chat_module
from isogloss.data.batch import Collator
from isogloss.data.chat import encode_chat, pair_chats, render
from isogloss.data.sample import TextEncoder
from isogloss.data.turns import SkippedChat, stretches
from template_shapes import ENDS, MARKS, OPTIONS, SHAPES, judge, kinds_of_chats
from test_turns import CALLS, CHATML, CHATML_PROMPT, JSON_CALL, NL, each

CHATS = kinds_of_chats()


@pytest.fixture(scope="module")
def encoder(tokenizers):
    """Return (name of a shape, number of a tokenizer, ...) -> TextEncoder.

    knows_ends: its generation_config.json has the ends; has_thoughts: <think> is a token.
    """
    def build(name, number=1, knows_ends=True, has_thoughts=True):
        tokenizer = copy.deepcopy(tokenizers[number])
        template = SHAPES[name]
        marks = {*MARKS.findall(template), *ENDS}
        marks -= set() if has_thoughts else {"<think>", "</think>"}
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
        tokenizer.chat_template = template
        ends = tokenizer.convert_tokens_to_ids([end for end in ENDS if end in template])
        if name.startswith("GLM"):
            ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
        return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 10_000,
                           generation={"eos_token_id": ends if knows_ends else []})
    return build


def renderings(reader):
    """Yield (kind, options, chat, Rendering) of every chat that the template does not refuse."""
    for options in OPTIONS:
        reader.template_kwargs = options
        reader.frames = {}
        reader.__dict__.pop("header", None)
        for kind, chat in CHATS.items():
            try:
                yield kind, options, chat, render(chat, reader)
            except SkippedChat:
                continue


def shown(rendering, is_marked):
    """Return a rendering with what is marked in brackets."""
    text = b""
    was_marked = False
    located = rendering.located
    for begin, end, marked in zip(located.begin, located.end, is_marked.tolist()):
        if marked != was_marked:
            text += b"\xc2\xab" if marked else b"\xc2\xbb"
            was_marked = marked
        text += rendering.data[begin:end]
    return text.decode(errors="replace") + "\u00bb" * was_marked


@pytest.mark.parametrize("knows_ends", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_all_of_the_assistants_words_are_learned_and_no_others(encoder, name, knows_ends):
    reader = encoder(name, knows_ends=knows_ends)
    count = 0
    for kind, options, chat, rendering in renderings(reader):
        learned = encode_chat(chat, rendering, reader, "assistant").learned
        assert judge(rendering, learned) == ([], []), (kind, options, shown(rendering, learned))
        assert rendering.num_overlaps == 0
        count += 1
    assert count >= 3 * 8, count


# all that it holds, in the order in which most templates write it
STUDENT = each(
    "<|im_start|>assistant\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}" + CALLS + JSON_CALL + "{% endfor %}<|im_end|>" + NL, CHATML,
    CHATML_PROMPT)


@pytest.mark.parametrize("name", SHAPES)
def test_of_a_teacher_the_same_words_lie_in_chunks(encoder, name):
    student = encoder("ChatML", 0)
    student.tokenizer.chat_template = STUDENT
    teacher = encoder(name)
    for kind, options, chat, rendering in renderings(teacher):
        alignment = pair_chats((render(chat, student), rendering), (student, teacher))
        in_chunks = alignment.teacher_chunk >= 0
        missing, wrong = judge(rendering, in_chunks)
        if name == "Gemma 4" and "words" in kind:  # the content stands behind the call and result
            missing = [word for word in missing if word[0] != "a"]
        assert (missing, wrong) == ([], []), (kind, options, shown(rendering, in_chunks))


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "here"}}}
CALLING = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
ASKED = [{"role": "user", "content": "Well?"}, CALLING, {"role": "tool", "content": "found"},
         {"role": "assistant", "content": "So."}]
JSON_OF_CALL = '{"name": "look", "arguments": {"at": "here"}}'
V3_CALL = ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\"at\": \"here\"}\n```"
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>")
# of each shape what is learned of this chat, marks and ends included
LEARNED = {
    "ChatML": [f"<tool_call>\n{JSON_OF_CALL}\n</tool_call><|im_end|>", "So.<|im_end|>"],
    "thinking ChatML": [f"hm\n</think>\n\n<tool_call>\n{JSON_OF_CALL}\n</tool_call><|im_end|>",
                        "\n</think>\n\nSo.<|im_end|>"],
    "Llama 3": ['{"name": "look", "parameters": {"at": "here"}}<|eot_id|>', "So.<|eot_id|>"],
    "Gemma 4": ['hm\n<channel|><|tool_call>call:look{at:<|"|>here<|"|>}<tool_call|>'
                "<|tool_response>", "So.<turn|>"],
    "GLM 4.6": ["\n<think>hm</think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>here"
                "</arg_value>\n</tool_call><|observation|>", "\n<think></think>\nSo."],
    "GLM 4.7": ["hm</think><tool_call>look<arg_key>at</arg_key><arg_value>here</arg_value>"
                "</tool_call><|observation|>", "</think>So."],
    "DeepSeek R1": [f"<｜tool▁calls▁begin｜>{V3_CALL}", "So.<｜end▁of▁sentence｜>"],
    "DeepSeek V3": [f"<｜tool▁calls▁begin｜>{V3_CALL}", "So.<｜end▁of▁sentence｜>"],
    "gpt-oss": ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look"
                '<|channel|>commentary json<|message|>{"at": "here"}<|call|>',
                "<|channel|>final<|message|>So.<|return|>"],
    "Command-A": ["<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
                  '{"tool_name": "look", "parameters": {"at": "here"}}\n]<|END_ACTION|>'
                  "<|END_OF_TURN_TOKEN|>",
                  "<|START_RESPONSE|>So.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
    "Mistral": [f'[TOOL_CALLS][{JSON_OF_CALL[:-1]}, "id": "call00000"}}]<|endoftext|>',
                "So.<|endoftext|>"],
    "Phi-4": ["So.<|im_end|>"],
    "SmolLM3": ["So.<|im_end|>"],
    "LFM2.5": ["<think>hm</think><|tool_call_start|>[look(at='here')]<|tool_call_end|><|im_end|>",
               "So.<|im_end|>"],
    "Olmo 3": ['<function_calls>look(at="here")</function_calls><|im_end|>', "So.<|endoftext|>"],
    "Kimi": ["<think>hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
             '<|tool_call_argument_begin|>{"at": "here"}<|tool_call_end|>'
             "<|tool_calls_section_end|><|im_end|>", "<think></think>So.<|im_end|>"],
    "letters": ['\nCall:\nlook{"at": "here"}', "So."],
}


def marked_texts(rendering, is_marked):
    return [text.split("\u00bb")[0] for text in shown(rendering, is_marked).split("\u00ab")[1:]]


def learned_of(chat, reader):
    """Return the texts that are learned of a chat."""
    rendering = render(chat, reader)
    return marked_texts(rendering, encode_chat(chat, rendering, reader, "assistant").learned)


@pytest.mark.parametrize("name", LEARNED)
def test_of_a_call_and_an_end_all_marks_are_learned_and_no_header(encoder, name):
    assert learned_of(ASKED, encoder(name)) == LEARNED[name]


def test_a_mark_is_whole_though_it_is_no_token(encoder):
    assert learned_of(ASKED, encoder("GLM 4.7", has_thoughts=False)) == LEARNED["GLM 4.7"]


@pytest.mark.parametrize("knows_ends", [True, False])
def test_results_in_the_middle_of_a_message_part_what_is_learned_of_it(encoder, knows_ends):
    """Gemma 4 writes the content behind the results of its calls."""
    said = "<think>hm</think>I have looked, and it is there: so they say."
    chat = [ASKED[0], CALLING | {"content": said}, *ASKED[2:]]
    call = '<|tool_call>call:look{at:<|"|>here<|"|>}<tool_call|>'
    teacher = encoder("Gemma 4", knows_ends=knows_ends)
    assert learned_of(chat[:1] + [chat[1] | {"reasoning_content": ""}] + chat[2:], teacher) == [
        call + "<|tool_response>" * knows_ends, f"{said}<turn|>", "So.<turn|>"]
    # where the other one writes it before the call, the longer of both is compared
    student = encoder("ChatML", 0)
    renderings = [render(chat, reader) for reader in (student, teacher)]
    in_chunks = pair_chats(renderings, (student, teacher)).teacher_chunk >= 0
    assert any(said in text for text in marked_texts(renderings[1], in_chunks))


def test_where_no_prompt_fits_a_turn_begins_behind_what_stood_there(encoder):
    """DeepSeek V3 writes neither a header nor the first marks of a second call."""
    chat = [*ASKED[:3], *ASKED[1:]]
    assert learned_of(chat, encoder("DeepSeek V3")) == [
        f"<｜tool▁calls▁begin｜>{V3_CALL}", f"\n{V3_CALL}", "So.<｜end▁of▁sentence｜>"]


def test_a_prompt_without_a_thought_goes_with_a_turn_that_has_one(encoder):
    reader = encoder("GLM 4.6")
    reader.template_kwargs = {"enable_thinking": False}
    call, _ = LEARNED["GLM 4.6"]
    assert learned_of(ASKED, reader) == [call.removeprefix("\n<think>"), "\nSo."]


def test_turns_that_overlap_are_left_out_and_counted(encoder, monkeypatch):
    reader = encoder("ChatML")

    def overlapping(messages, text, *others):
        found = stretches(messages, text, *others)
        return [found[0]._replace(high=len(text), low=len(text)), *found[1:]]

    chat = [*ASKED[::3], *ASKED[::3]]
    monkeypatch.setattr(chat_module, "stretches", overlapping)
    monkeypatch.setattr(chat_module, "_framed_turns", lambda *_: None)
    rendering = render(chat, reader)
    assert [turn.message for turn in rendering.turns] == [1] and rendering.num_overlaps == 1
    counts = Collator(reader, [])([chat]).counts
    assert counts.overlapping_turns == 1 and counts.tokens > 0
