"""Chat templates in the shapes of public models, written for tests; and chats that say who speaks.

Every word of a chat names who said it (`WORD`).  `judge` compares what is learned, or lies in
chunks, with that: all words of the assistant whole, and no other one.
"""

import itertools
import re

from test_turns import CALLS, CHATML, CHATML_PROMPT, JSON_CALL, LAST_QUESTION, NL, SPLIT, each

LINE = "{{ '\\n' }}"
PROMPT = "{% if add_generation_prompt %}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
NAME = "{{ c.function.name }}"
NO_TOOLS = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
LATE = "loop.index0 > ns.last"
THINKS = "{% set thinks = enable_thinking is not defined or enable_thinking %}"
OFF = "enable_thinking is defined and not enable_thinking"


def glm(line, no_thought, off, on):
    """Return a template of GLM's: the next header ends a turn, and a thought is always there."""
    return each(
        SPLIT + "<|assistant|>{% if " + LATE + " and thought %}" + line + "<think>{{ thought }}"
        "</think>{% else %}" + no_thought + "{% endif %}{% if said.strip() %}" + line
        + "{{ said.strip() }}{% endif %}" + CALLS + line + "<tool_call>" + NAME
        + "{% for k, v in c.function.arguments.items() %}" + line + "<arg_key>{{ k }}</arg_key>"
        + line + "<arg_value>{{ v }}</arg_value>{% endfor %}" + line + "</tool_call>{% endfor %}",
        "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>"
        "{% endif %}" + line + "<tool_response>" + line + "{{ m.content }}" + line
        + "</tool_response>{% else %}<|{{ m.role }}|>" + line + "{{ m.content }}"
        "{% if m.role == 'user' and " + OFF + " %}/nothink{% endif %}{% endif %}",
        PROMPT + "<|assistant|>{% if " + OFF + " %}" + off + "{% else %}" + on
        + "{% endif %}{% endif %}", "[gMASK]<sop>" + LAST_QUESTION)


# a call, its results and what follows are one turn; the content stands behind the results
GEMMA_4_RESULTS = (
    "{% set ns.goes = true %}{% for r in messages[loop.index:] %}{% if r.role != 'tool' %}"
    "{% set ns.goes = false %}{% elif ns.goes %}{% set ns.answered = true %}<|tool_response>"
    "response:{{ m.tool_calls[0].function.name }}{value:<|\"|>{{ r.content }}<|\"|>}"
    "<tool_response|>{% endif %}{% endfor %}")
GEMMA_4 = (
    "{{ bos_token }}" + LAST_QUESTION + "{% for m in messages %}{% set ns.answered = false %}"
    "{% if m.role == 'assistant' %}{% if not ns.open %}<|turn>model" + LINE + "{% endif %}"
    "{% set ns.open = true %}{% if m.reasoning and " + LATE + " and m.tool_calls %}"
    "<|channel>thought" + LINE + "{{ m.reasoning }}" + LINE + "<channel|>{% endif %}" + CALLS
    + "<|tool_call>call:" + NAME + "{{ '{' }}{% for k, v in c.function.arguments.items() %}{{ k }}:"
    "<|\"|>{{ v }}<|\"|>{% endfor %}}<tool_call|>{% endfor %}{% if m.tool_calls %}"
    + GEMMA_4_RESULTS + "{% endif %}{{ m.content | trim }}{% if m.tool_calls and not ns.answered %}"
    "<|tool_response>{% elif m.content or not ns.answered %}<turn|>" + LINE + "{% endif %}"
    "{% set ns.waits = ns.answered and not m.content %}"
    "{% elif m.role != 'tool' %}{% set ns.open = false %}<|turn>{{ m.role }}" + LINE
    + "{{ m.content | trim }}<turn|>" + LINE + "{% endif %}{% endfor %}" + PROMPT
    + "{% if not ns.waits %}<|turn>model" + LINE + "{% if not enable_thinking %}<|channel>thought"
    + LINE + "<channel|>{% endif %}{% endif %}{% endif %}")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + NAME + LINE + "```json" + LINE
                 + ARGUMENTS + LINE + "```<｜tool▁call▁end｜>")
# results are closed by what follows; the marks of a first call are written once in a chat
DEEPSEEK_V3 = (
    "{% set ns = namespace(first=true, results=false) %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.results = false %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}{% if not ns.results %}<｜tool▁outputs▁begin｜>{% endif %}"
    "{% set ns.results = true %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.tool_calls %}{% set ns.results = false %}" + CALLS
    + "{% if ns.first %}<｜Assistant｜>{{ m.content }}<｜tool▁calls▁begin｜>"
    "{% set ns.first = false %}{% else %}" + LINE + "{% endif %}" + DEEPSEEK_CALL
    + "{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% elif ns.results %}"
    "{% set ns.results = false %}<｜tool▁outputs▁end｜>"
    "{{ m.content }}<｜end▁of▁sentence｜>{% else %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if ns.results %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜>"
    "<think>" + LINE + "{% endif %}")
DEEPSEEK_R1 = each(
    "<｜Assistant｜>{% if m.content %}{{ m.content.split('</think>')[-1] }}{% else %}"
    "<｜tool▁calls▁begin｜>" + CALLS + DEEPSEEK_CALL + "{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>",
    "{% if m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}",
    PROMPT + "<｜Assistant｜><think>" + LINE + "{% endif %}",
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}")
GPT_OSS = each(
    "{% if m.thinking and " + LATE + " %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
    "{% if m.content and m.thinking or m.tool_calls | length > 1 %}{{ raise_exception('both') }}"
    "{% elif m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{% endif %}<|start|>assistant to=functions." + NAME + "<|channel|>commentary json<|message|>"
    + ARGUMENTS + "<|call|>{% set ns.name = c.function.name %}{% else %}<|start|>assistant"
    "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% endif %}",
    "<|start|>{{ 'functions.' + ns.name + ' to=assistant' if m.role == 'tool' else m.role }}"
    "<|message|>{{ m.content | tojson if m.role == 'tool' else m.content }}<|end|>",
    PROMPT + "<|start|>assistant{% endif %}", LAST_QUESTION)
# every chat ends with the prompt, whether it is asked for or not; thoughts are a plan of calls
COMMAND_A = each(
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_calls %}<|START_THINKING|>"
    "{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>[" + LINE + CALLS + "{\"tool_name\": \""
    + NAME + "\", \"parameters\": " + ARGUMENTS + "}{% if not loop.last %},{% endif %}" + LINE
    + "{% endfor %}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% endif %}<|END_OF_TURN_TOKEN|>{% if m.tool_calls %}" + LINE + "{% endif %}",
    "<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}{% else %}"
    "<|SYSTEM_TOKEN|>{{ m.content | tojson }}{% endif %}<|END_OF_TURN_TOKEN|>"
    "{% if m.role == 'tool' and not loop.last %}" + LINE + "{% endif %}",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are kind.<|END_OF_TURN_TOKEN|>")
MISTRAL = each(
    "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][" + CALLS
    + "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}{\"name\": \""
    + NAME + "\", \"arguments\": " + ARGUMENTS + ", \"id\": \"{{ c.id }}\"}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{{ eos_token }}",
    "{% if m.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ m.content | tojson }}, \"call_id\": "
    "\"{{ m.tool_call_id }}\"}[/TOOL_RESULTS]{% elif m.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{% if loop.index0 == ns.last and messages[0].role == "
    "'system' %}{{ messages[0].content }}" + LINE + LINE + "{% endif %}{{ m.content }}[/INST]"
    "{% endif %}", "", "{{ bos_token }}" + LAST_QUESTION)
# of a thinking Qwen: earlier thoughts are dropped, the prompt opens a thought, and what a user says
# may be a result
LAST_ASKED = LAST_QUESTION.replace("'user' %}", "'user' and not m.content.startswith('<tool_') %}")
THINKING_CHATML = each(
    SPLIT + "<|im_start|>assistant\n{% if " + LATE + " %}<think>\n{{ thought.strip() }}\n</think>"
    "\n\n{% endif %}{{ said }}" + CALLS + "\n" + JSON_CALL + "{% endfor %}<|im_end|>" + NL,
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}<|im_end|>\n",
    PROMPT + "<|im_start|>assistant\n<think>\n{% if " + OFF + " %}\n</think>\n\n{% endif %}"
    "{% endif %}", LAST_ASKED)
OLMO_3 = each(
    "<|im_start|>assistant\n{{ m.content }}{% if m.tool_calls %}<function_calls>" + CALLS + NAME
    + "({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})"
    "{% endfor %}"
    "</function_calls>{% endif %}{{ eos_token if loop.last else '<|im_end|>\n' }}",
    "<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n{{ m.content }}<|im_end|>\n",
    PROMPT + "<|im_start|>assistant\n<think>{% endif %}",
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}")
SMOLLM_3 = each(
    "<|im_start|>assistant\n{% if not thinks %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content.lstrip('\\n') }}<|im_end|>" + NL,
    "{% if m.role != 'system' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}",
    PROMPT + "<|im_start|>assistant\n{% if not thinks %}<think>\n\n</think>\n{% endif %}"
    "{% endif %}",
    THINKS + "{% if messages[0].role == 'system' %}{% if '/no_think' in messages[0].content %}"
    "{% set thinks = false %}{% endif %}{% endif %}<|im_start|>system\n"
    "{{ '/think' if thinks else '/no_think' }}\n"
    "{{ messages[0].content if messages[0].role == 'system' }}<|im_end|>\n")
LFM_25 = each(
    "<|im_start|>assistant\n{% if m.thinking and " + LATE + " %}<think>{{ m.thinking }}</think>"
    "{% endif %}{{ m.content if " + LATE + " else m.content.split('</think>')[-1].strip() }}"
    "{% if m.tool_calls %}<|tool_call_start|>[" + CALLS + NAME
    + "({% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})"
    "{% if not loop.last %},{% endif %}{% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>" + NL,
    CHATML, CHATML_PROMPT, "{{ bos_token }}" + LAST_QUESTION)
KIMI = each(
    "<|im_assistant|>assistant<|im_middle|><think>{{ m.reasoning_content if " + LATE + " }}</think>"
    "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>" + CALLS
    + "<|tool_call_begin|>functions." + NAME + ":{{ loop.index0 }}<|tool_call_argument_begin|>"
    + ARGUMENTS + "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>",
    "{{ '<|im_user|>user' if m.role == 'user' else '<|im_system|>' + m.role }}<|im_middle|>"
    "{{ '## Return of ' if m.role == 'tool' }}{{ m.content }}<|im_end|>",
    PROMPT + "<|im_assistant|>assistant<|im_middle|>{% endif %}", LAST_QUESTION)
SHAPES = {
    "ChatML": each("<|im_start|>assistant\n{{ m.content }}" + CALLS + JSON_CALL
                   + "{% endfor %}<|im_end|>" + NL, CHATML, CHATML_PROMPT),
    "thinking ChatML": THINKING_CHATML,
    "Llama 3": each(
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% if m.tool_calls %}"
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + CALLS
        + "{\"name\": \"" + NAME + "\", \"parameters\": " + ARGUMENTS + "}{% endfor %}{% else %}"
        "{{ m.content | trim }}{% endif %}<|eot_id|>",
        "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>",
        PROMPT + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}", "{{ bos_token }}"),
    "Gemma 3": each(
        "<start_of_turn>model\n{{ m.content | trim }}<end_of_turn>\n",
        NO_TOOLS + "{% if m.role == 'user' %}<start_of_turn>user\n{% if loop.index0 < 2 and "
        "messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content | trim }}<end_of_turn>\n{% endif %}",
        PROMPT + "<start_of_turn>model\n{% endif %}", "{{ bos_token }}"),
    "Gemma 4": GEMMA_4,
    "GLM 4.6": glm(LINE, LINE + "<think></think>", LINE + "<think></think>", ""),
    "GLM 4.7": glm("", "</think>", "</think>", "<think>"),
    "DeepSeek R1": DEEPSEEK_R1,
    "DeepSeek V3": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS,
    "Command-A": COMMAND_A,
    "Mistral": MISTRAL,
    "Phi-4": each("<|im_start|>assistant<|im_sep|>{{ m.content }}<|im_end|>",
                  "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>",
                  PROMPT + "<|im_start|>assistant<|im_sep|>{% endif %}"),
    "SmolLM3": SMOLLM_3,
    "LFM2.5": LFM_25,
    "Olmo 3": OLMO_3,
    "Kimi": KIMI,
    "results in the next turn": each(
        "<|im_start|>assistant\n{% if ns.result %}({{ ns.result }}){% endif %}"
        "{% set ns.result = '' %}{{ m.content }}" + CALLS + JSON_CALL
        + "{% endfor %}<|im_end|>" + NL,
        "{% if m.role == 'tool' %}{% set ns.result = m.content %}{% else %}" + CHATML
        + "{% endif %}", CHATML_PROMPT, LAST_QUESTION),
    # of letters alone; what is written twice, and otherwise than it is; a prompt behind every chat
    "letters": each(
        "Assistant:\n{{ m.content }}" + CALLS + LINE + "Call:" + LINE + NAME + ARGUMENTS
        + "{% endfor %}" + NL, "{% if m.role == 'user' and messages[0].role == 'system' %}"
        "({{ messages[0].content | replace(' ', '_') }}){% endif %}"
        "{{ m.role }}: {{ m.content | replace(' ', '_') }}\n", "Assistant:" + LINE),
}
OPTIONS = {}, {"enable_thinking": False}, {"enable_thinking": True}
MARKS = re.compile(r"<\|[\w|\"]*>|<\w*\|>|<｜[^｜]*｜>|<(?:start|end)_of_turn>|</?think>|"
                   r"\[/?[A-Z_]+\]")
ENDS = ["<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>", "<turn|>",
        "<|tool_response>", "<end_of_turn>", "<|user|>", "<|observation|>",
        "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>"]

# --- chats ----------------------------------------------------------------------------------------

# begins with s, u, r: of the system, user, a result; with a, t, n, c: content, thought, name of a
# call and argument of the assistant
WORD = re.compile(r"([suratnc])q\d+z")
OTHERS = "sur"


def kinds_of_chats():
    """Return {kind: chat}; no word is said twice."""
    numbers = itertools.count(1)

    def words(who, count=3):
        return " ".join(f"{who}q{next(numbers)}z" for _ in range(count))

    def asks(role="user", **more):
        return {"role": role, "content": words({"tool": "r"}.get(role, role[0]))} | more

    def says(content=True, thought=False, inside=False, calls=0):
        message = {"role": "assistant", "content": words("a") if content else ""}
        if thought:
            message["reasoning_content"] = words("t")
        if inside:
            message["content"] = f"<think>\n{words('t')}\n</think>\n\n" + message["content"]
        if calls:
            message["tool_calls"] = [{"type": "function", "function": {
                "name": words("n", 1), "arguments": {"at": words("c")}}} for _ in range(calls)]
        return message

    def loop(first, *others):
        return [asks(), says(**first), asks("tool"), *[
            message for more in others for message in (says(**more), asks("tool"))]]

    def with_words(message, first="", last=""):
        return message | {"content": first + message["content"] + last}

    call = {"content": False, "calls": 1}
    thinks = call | {"thought": True}
    return {
        "plain": [asks(), says()],
        "system": [asks("system"), asks(), says()],
        "turns": [asks("system"), asks(), says(), asks(), says(), asks(), says()],
        "a thought": [asks(), says(thought=True)],
        "thoughts": [asks(), says(thought=True), asks(), says(thought=True), asks(),
                     says(thought=True)],
        "thoughts in contents": [asks(), says(inside=True), asks(), says(inside=True)],
        "mixed": [asks(), says(thought=True), asks(), says(inside=True), asks(), says(), asks(),
                  says(thought=True)],
        "the last without a thought": [asks(), says(), asks(), says(thought=True), asks(), says()],
        "a call": [*loop(call), says()],
        "words and a call": [*loop({"calls": 1}), says(), asks(), says()],
        "parallel calls": [asks(), says(content=False, calls=2), asks("tool"), asks("tool"),
                           says()],
        "a loop of calls": [*loop(call, call, call), says()],
        "a loop with thoughts": [asks("system"), *loop(thinks, thinks), says(thought=True)],
        "two loops": [*loop(thinks), says(), *loop(thinks, call), says(thought=True), asks(),
                      says()],
        "a result at the end": loop(call),
        "thoughts, words and calls": [*loop(thinks | {"content": True}, {"calls": 1}), says()],
        "a result that a user says": [
            asks(), says(thought=True), asks(), says(thought=True),
            with_words(asks(), "<tool_response>\n", "\n</tool_response>"), says(thought=True)],
        "words that a template reads": [
            with_words(asks("system"), last=" /no_think"), with_words(asks(), "assistant\n"),
            with_words(says(), "\n", "\n"), with_words(asks(), " user\n", "\n\n"), says()],
        "a call at the end": [*loop(call), says(**call)],
    }


def judge(rendering, is_marked):
    """Return (words of the assistant that are not whole in the marked tokens, others that are).

    Args:
        rendering: `chat.Rendering`; is_marked: (S,) bool.
    """
    text = rendering.data.decode()
    located = rendering.located
    said = list(WORD.finditer(text))
    missing = []
    wrong = []
    for number, word in enumerate(said):
        begin, end = [len(text[:place].encode()) for place in word.span()]
        touches = (located.begin < end) & (located.end > begin) & (located.begin >= 0)
        # the name of a call stands in front of its result, too
        is_echo = word[1] == "n" and (number + 1 == len(said) or said[number + 1][1] != "c")
        if word[1] in OTHERS or is_echo:
            wrong += [word[0]] * bool((touches & is_marked).any())
        else:
            missing += [word[0]] * bool((touches & ~is_marked).any())
    return missing, wrong
