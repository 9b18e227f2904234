"""turns.py: what the assistant says in a rendering, whatever a template makes of a message.

The templates are of the kinds that public models have.  What their {% generation %} blocks hold is
what the assistant writes; the same templates without the blocks have to give the same tokens.
"""

import copy
import itertools
import json
import re
from dataclasses import fields
from datetime import date

import jinja2
import numpy as np
import pytest
from transformers import AutoTokenizer

from conftest import asset
from isogloss.align import TokenTable
from isogloss.config import Config, template_kwargs
from isogloss.data.chat import encode_chat, render
from isogloss.data.sample import TextEncoder
from isogloss.data.turns import Template, doubts
from isogloss.inputs import first_date
from isogloss.teachers.cache_files import FORMAT, Manifest

BEGIN, END = "{% generation %}", "{% endgeneration %}"
NL = "{{ '\\n' }}"  # a line end behind a block is not written
CONTROL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>",
           "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
JSON_CALL = ("<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
             "{{ c.function.arguments | tojson }}}\n</tool_call>")
CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def words_of(rendering, number):
    """Return what the assistant says in a turn of a Rendering."""
    [turn] = [turn for turn in rendering.turns if turn.message == number]
    return rendering.data[turn.begin : turn.end].decode(errors="replace")


def each(assistant, others, prompt, first=""):
    """Return a template that writes messages one after the other."""
    return (first + "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant
            + "{% else %}" + others + "{% endif %}{% endfor %}" + prompt)


CALLS = "{% for c in m.tool_calls or [] %}"
# the thoughts of a message are in a field of it, or in its content
SPLIT = ("{% set said = m.content %}{% set thought = m.reasoning_content or '' %}"
         "{% if '</think>' in m.content %}"
         "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}"
         "{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}")
LAST_QUESTION = ("{% set ns = namespace(last=0) %}{% for m in messages %}"
                 "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}")
TEMPLATES = {
    "chatml": each("<|im_start|>assistant\n" + BEGIN + "{{ m.content }}<|im_end|>" + END + NL,
                   CHATML, CHATML_PROMPT),
    "calls as JSON": each(
        "<|im_start|>assistant\n" + BEGIN + "{{ m.content }}" + CALLS
        + "{% if m.content or not loop.first %}" + NL + "{% endif %}" + JSON_CALL
        + "{% endfor %}<|im_end|>" + END + NL, CHATML, CHATML_PROMPT,
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"),
    "earlier thoughts dropped, an empty pair added": each(
        SPLIT + "<|im_start|>assistant\n" + BEGIN
        + "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}"
        + "{{ said }}" + CALLS + "\n" + JSON_CALL + "{% endfor %}<|im_end|>" + END + NL,
        CHATML, CHATML_PROMPT, LAST_QUESTION),
    "a prompt that opens a thought": each(
        SPLIT + "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n" + BEGIN
        + "{{ thought }}\n</think>\n\n{{ said }}<|im_end|>" + END + "{% else %}" + BEGIN
        + "{{ said }}<|im_end|>" + END + "{% endif %}" + NL, CHATML,
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        LAST_QUESTION),
    "calls as XML, the next header ends a turn": each(
        SPLIT + "<|assistant|>\n" + BEGIN + "<think>{{ thought }}</think>\n{{ said.strip() }}"
        + CALLS + "\n<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
        "{% endfor %}" + END, "{{ '<|observation|>' if m.role == 'tool' else '<|user|>' }}\n"
        "{{ m.content }}", "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
    "no prompt, a space": each(BEGIN + " {{ m.content.strip() }} {{ eos_token }}" + END,
                               "[INST] {{ m.content.strip() }} [/INST]", ""),
    "an end behind a line end": each(
        "### Response:\n" + BEGIN + "{{ m.content }}\n{{ eos_token }}" + END + NL + NL,
        "### Instruction:\n{{ m.content }}\n\n",
        "{% if add_generation_prompt %}### Response:\n{% endif %}"),
    "tools in front of the last question": each(
        BEGIN + "{{ m.content }}" + CALLS + "[TOOL_CALLS]{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}" + END,
        "{% if loop.index0 == ns.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST]{{ m.content }}[/INST]", "", LAST_QUESTION),
    "channels": each(
        "<|start|>assistant" + BEGIN
        + "{% if m.thinking and loop.index0 > ns.last %}<|channel|>analysis<|message|>"
        "{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
        "{% if m.tool_calls %}<|channel|>commentary to={{ m.tool_calls[0].function.name }}"
        "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% set ns.name = m.tool_calls[0].function.name %}"
        "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% else %}<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}" + END,
        "<|start|>{{ 'to ' + ns.name if m.role == 'tool' else m.role }}"
        "<|message|>{{ m.content }}<|end|>",
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}", LAST_QUESTION),
    "another name of the role, contents stripped": each(
        "<|im_start|>model\n" + BEGIN + "{{ m.content | trim }}<|im_end|>" + END + NL,
        "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n",
        "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
        "Today is {{ date or '1 May' }}.\n"),
    "calls as Python": each(
        "Assistant: " + BEGIN + "{{ m.content }}{% if m.tool_calls %}[" + CALLS
        + "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
        "{% endfor %}){% endfor %}]{% endif %}{{ eos_token }}" + END + NL,
        "{{ m.role | capitalize }}: {{ m.content }}\n",
        "{% if add_generation_prompt %}Assistant: {% endif %}"),
    "tools in front of whatever comes first": each(
        "{% if loop.first and tools %}<|start|>user<|message|>{{ tools | tojson }}{{ m.content }}"
        "<|end|>{% else %}<|start|>assistant<|message|>" + BEGIN + "{{ m.content }}" + CALLS
        + JSON_CALL + "{% endfor %}<|end|>" + END + "{% endif %}",
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
        "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"),
    "an end of text behind the chat": each(
        "<|assistant|>\n" + BEGIN + "{{ m.content }}<|end|>" + END + NL,
        "<|system|>\n{{ m.content }}<|end|>\n",
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"),
    "no header behind a result": each(
        "{% if not ns.is_result %}<|assistant|>{% endif %}{% set ns.is_result = false %}" + BEGIN
        + "{% if m.thinking and loop.index0 > ns.last %}({{ m.thinking }}){% endif %}"
        "{{ m.content }}" + CALLS + JSON_CALL + "{% endfor %}{{ eos_token }}" + END,
        "{% set ns.is_result = m.role == 'tool' %}<|start|>{{ m.content }}<|message|>",
        "{% if add_generation_prompt and not ns.is_result %}<|assistant|>{% endif %}",
        LAST_QUESTION),
    "escaped": each("<|im_start|>assistant\n" + BEGIN + "{{ m.content | tojson }}<|im_end|>" + END
                    + NL, CHATML, CHATML_PROMPT),
}


def asks(content="two and two?"):
    return {"role": "user", "content": content}


def says(content="", **more):
    return {"role": "assistant", "content": content} | more


def calls(*cities):
    return [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
            for city in cities]


RESULT = {"role": "tool", "content": "sunny"}
CHATS = {
    "plain": [asks(), says("It is 4.")],
    "system": [{"role": "system", "content": "Be good."}, asks(), says("It is 4.")],
    "the assistant first": [says("Hello."), asks(), says("It is 4.")],
    "turns": [asks(), says("It is 4."), asks("sure?"), says("Yes."), asks("sure?"), says("Yes.")],
    "words of headers": [asks("assistant"), says("user"), asks("model\n"), says("assistant")],
    "an empty turn": [asks(), says(), asks("well?"), says("4")],
    "white space": [asks("a\tb"), says("\t  the value \n"), asks(" "), says("\n\na\n b\t")],
    "scripts": [asks("שלום"), says("ארבע 日本 🎉"), asks("é"), says("👍🏽")],
    "a call": [asks("weather?"), says(tool_calls=calls("Paris")), RESULT, says("Sunny.")],
    "words and calls": [asks("weather?"), says("I look.", tool_calls=calls("Paris", "Oslo")),
                        RESULT, RESULT, says("Sunny."), asks(), says("4")],
    "calls again": [asks("weather?"), says(tool_calls=calls("Paris")), RESULT,
                    says(tool_calls=calls("Paris")), RESULT, says("Sunny.")],
    "a thought": [asks(), says("It is 4.", reasoning_content="two and two make four")],
    "thoughts": [asks(), says("4", reasoning_content="easy"), asks("sure?"),
                 says("Yes.", reasoning_content="4 it is")],
    "thoughts and calls": [
        asks("weather?"), says(reasoning_content="look", tool_calls=calls("Paris")), RESULT,
        says("Sunny.", reasoning_content="it shines"), asks("sure?"), says("Yes.")],
    "a thought in the content": [asks(), says("<think>\nlong\n</think>\n\n4"), asks("sure?"),
                                 says("<think>\nlonger\n</think>\n\nYes.")],
    "an open thought": [asks(), says("<think>\nand so on")],
    "the name of an end": [asks("a<|im_end|>b"), says("c<|im_end|>d"), asks("e"), says("f")],
}


@pytest.fixture(scope="module")
def encoder(tokenizers):
    """Return (template) -> TextEncoder of the byte-level tokenizer."""
    def build(template, **generation):
        tokenizer = copy.deepcopy(tokenizers[1])
        tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
        tokenizer.chat_template = template
        ends = [tokenizer.convert_tokens_to_ids(name) for name in (
            "<|im_end|>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>", "<|end|>")]
        return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 4000,
                           generation={"eos_token_id": ends})
    return build


def what_generates(chat, tokenizer, tools):
    """Return (S,) bool: tokens in the blocks, and a header behind them that ends the turn.

    Where nothing is written of a call or a thought alone, nothing is learned.
    """
    coded = tokenizer.apply_chat_template(chat, tools=tools, return_dict=True,
                                          return_assistant_tokens_mask=True)
    mask = np.array(coded["assistant_masks"], bool)
    text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    for i in range(1, len(mask)):  # transformers leaves out the other tokens of a last character
        mask[i] |= mask[i - 1] and offsets[i] == offsets[i - 1]
    turns = [message for message in chat if message["role"] == "assistant"]
    blocks = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    for message, (begin, end) in zip(turns, blocks):
        if not message["content"] and message != says():
            emptied = [says() if other is message else other for other in chat]
            try:
                without = tokenizer.apply_chat_template(emptied, tools=tools, tokenize=False)
            except jinja2.UndefinedError:  # its result names the call
                continue
            mask[begin:end] &= without != text
    headers = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    follows = np.isin(coded["input_ids"], headers) & np.append(False, mask[:-1])
    return mask | follows


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_the_template_lets_the_assistant_write(encoder, name):
    template = TEMPLATES[name]
    marked = encoder(template)
    unmarked = encoder(template.replace(BEGIN, "").replace(END, ""))
    no_ends = TextEncoder(unmarked.tokenizer, unmarked.table, unmarked.max_length)
    for (kind, chat), tools in itertools.product(CHATS.items(), ([{"name": "weather"}], None)):
        expected = what_generates(chat, marked.tokenizer, tools)
        assert expected.any(), kind
        for reader in (unmarked, marked):
            rendering = render(chat, reader, tools)
            learned = encode_chat(chat, rendering, reader, "assistant").learned
            tokens = reader.tokenizer.convert_ids_to_tokens(rendering.ids)
            shown = [(token, bool(is_learned), bool(wanted))
                     for token, is_learned, wanted in zip(tokens, learned, expected)]
            assert (learned == expected).all(), (kind, reader is marked, shown)
        # nor is more learned where nothing says which tokens end turns
        rendering = render(chat, no_ends, tools)
        learned = encode_chat(chat, rendering, no_ends, "assistant").learned
        assert not (learned & ~expected).any(), (kind, no_ends.tokenizer.decode(
            rendering.ids[learned]))
    assert any(unmarked.frames.values())  # else no chat was read by what is around contents


def test_of_a_marked_header_and_line_end_neither_is_learned(encoder):
    """As SmolLM3 marks them, whose headers the assistant does not write."""
    header = "<|im_start|>assistant\n"
    template = TEMPLATES["chatml"].replace(header + BEGIN, BEGIN + header).replace(
        END + NL, NL + END)
    assert template.count(BEGIN + header) == template.count(NL + END) == 1
    for chat in CHATS.values():
        of_words, of_both = [render(chat, encoder(marked)).turns
                             for marked in (TEMPLATES["chatml"], template)]
        assert of_words == of_both and of_words


ASKS_FOR_THOUGHTS = CHATML_PROMPT.replace("assistant\n", "assistant\n<think>\n")
WITHOUT = "asks for an answer with '<|im_start|>assistant\\n<think>\\n', and does not write so"


@pytest.mark.parametrize("template, kind, doubts_of_it", [
    ("calls as JSON", "words and calls", []),
    ("chatml", "words and calls", ["leaves out the tools", "leaves out calls"]),
    ("chatml", "thoughts and calls", ["leaves out the tools", "leaves out calls"]),
    ("chatml", "thoughts", ["leaves out the tools", "leaves out thoughts"]),
    ("earlier thoughts dropped, an empty pair added", "thoughts", ["leaves out the tools"]),
    ("calls as JSON", [asks(), says("<think>a</think>b")], []),
    (each(SPLIT + "{{ said }}", CHATML, ""), [asks(), says("<think>a</think>b")],
     ["leaves out the tools", "leaves out thoughts"]),
    ("chatml", [], []),
    (each("", CHATML, ""), "plain", ["leaves out the tools", "leaves out what assistant says"]),
    ("a prompt that opens a thought", "plain", ["leaves out the tools"]),
    (each(CHATML, CHATML, ASKS_FOR_THOUGHTS), "plain", ["leaves out the tools", WITHOUT]),
])
def test_what_a_template_leaves_out_of_a_chat_is_found(encoder, template, kind, doubts_of_it):
    reader = encoder(TEMPLATES.get(template, template))
    chat = CHATS[kind] if isinstance(kind, str) else kind
    found = doubts(chat, reader, [{"name": "weather"}])
    assert len(found) == len(doubts_of_it)
    assert all(map(str.startswith, found, doubts_of_it)), found


NAMES = {  # of calls and of their results: the calls that these are paired with
    (None, None, None): ((None, None, None), (0, 1, 2)),
    ("a", "b", "c"): (("b", "c", "a"), (1, 2, 0)),
    # a name that no call has, or has no more, goes to the first one that waits
    ("a", "b", None): (("b", "b", "x"), (1, 0, 2)),
}


@pytest.mark.parametrize("names", NAMES)
def test_calls_and_results_get_names_where_a_template_wants_them(names):
    tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", "mistral_v7"))
    encoder = TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 4000)
    of_results, expected = NAMES[names]
    of_calls = [call | ({"id": name} if name else {})
                for call, name in zip(calls("Paris", "Oslo", "Rome"), names)]
    results = [RESULT | ({"tool_call_id": name} if name else {}) for name in of_results]
    text = Template(encoder).write([asks(), says(tool_calls=of_calls), *results])
    said = re.findall(r'"arguments": {"city": "(\w+)"}, "id": "call0000(.)"', text)
    assert said == [("Paris", "0"), ("Oslo", "1"), ("Rome", "2")]
    answers = re.findall(r"\[TOOL_RESULTS\] call0000(.)\[", text)
    assert answers == list(map(str, expected))


@pytest.mark.parametrize("marked", [True, False])
def test_templates_read_arguments_as_text_and_thoughts_by_any_name(encoder, marked):
    template = each(
        "<|im_start|>assistant\n" + BEGIN + "{{ m.reasoning + '' }}" + CALLS
        + "{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>" + END + NL,
        CHATML, CHATML_PROMPT)
    reader = encoder(template if marked else template.replace(BEGIN, "").replace(END, ""))
    for name in ("reasoning_content", "reasoning", "thinking"):
        chat = [asks(), says(tool_calls=calls("\u00c5s"), **{name: "look: "})]
        assert words_of(render(chat, reader), 1) == 'look: weather{"city": "\u00c5s"}'


# --- the date -------------------------------------------------------------------------------------


def test_a_template_that_asks_for_the_date_is_told_that_of_the_run(encoder):
    dated = encoder("{{ strftime_now('%d %b %Y') }}|" + TEMPLATES["chatml"])
    cfg = Config(student="s", teacher="t", data="d", chat_date="2026-05-01")
    dated.template_kwargs = template_kwargs(cfg)
    text = render(CHATS["plain"], dated).data.decode()
    assert text.startswith("01 May 2026|")
    with pytest.raises(ValueError, match="--chat_date 1 May: expected a date like 2026-05-01"):
        Config(student="s", teacher="t", data="d", chat_date="1 May")


def test_the_date_is_that_of_the_run_or_of_its_cache_or_today(tmp_path):
    run, other, cache = [tmp_path / name for name in ("run", "other", "cache")]
    for folder in (run, other, cache):
        folder.mkdir()
    flags = {"student": "s", "data": "d", "output_dir": str(run)}
    today = date.today().isoformat()
    assert first_date(Config(teacher="t", **flags)) in (today, date.today().isoformat())
    manifest = {field.name: field.type() for field in fields(Manifest)}
    manifest |= {"format": FORMAT, "date": "2026-03-01", "temperature": 1, "texts_per_shard": 1}
    (cache / "manifest.json").write_text(json.dumps(manifest))
    cached = flags | {"teacher_cache": str(cache)}
    assert first_date(Config(**cached)) == "2026-03-01"
    for folder, day in ((run, "2026-02-01"), (other, "2026-01-01")):
        record = {"config": flags | {"teacher": "t", "chat_date": day}}
        (folder / "run.json").write_text(json.dumps(record))
    assert first_date(Config(**cached)) == "2026-02-01"
    assert first_date(Config(**cached, resume="never")) == "2026-03-01"
    checkpoint = other / "checkpoints" / "step_0000001"
    checkpoint.mkdir(parents=True)
    assert first_date(Config(**cached, resume=str(checkpoint))) == "2026-01-01"
