"""Environments: whatever one does is an answer, or why its episode is left out; nothing stays."""

import json
import os
import re
from pathlib import Path

import pytest

from isogloss.environments import __main__ as server
from isogloss.environments.calculator import calculator, computed, last_number
from isogloss.environments.process import EnvironmentProcess
from isogloss.environments.python import python
from isogloss.errors import EngineError
from isogloss.evaluation import sandbox
from wrong_environments import FAULTS

FILE = Path(__file__).with_name("wrong_environments.py")
SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
GOOD = {
    "forks": {"ended": True, "reward": 0.25, "messages": []},
    "floods": {"ended": True, "reward": 0.5, "messages": []},
    "waits": {"ended": False, "messages": [{"role": "user", "content": "And then?"}]},
    "good": {"ended": False, "messages": [{"role": "user", "content": "And then?"}]},
    "ends": {"ended": True, "messages": []},
    "rewards": {"ended": True, "reward": 1.0, "messages": []},
    # so that an earlier one stays
    "nothing of a reward": {"ended": False, "messages": [{"role": "user", "content": "And then?"}]},
}
REASONS = {
    "hangs": "has not answered for 2 seconds", "never": "has not answered",
    "raises": "KeyError: 'answer'", "recurses": "RecursionError", "greedy": "MemoryError",
    "exits": "SystemExit", "leaves": "its process has ended",
    "kills itself": "its process has ended", "text": "returned 'a'; expected None, a number",
    "other role": "speaks for 'assistant'; expected one of tool, user, system",
    "empty list": "answers no message", "goes on with nothing": "answers no message",
    "huge": "said more than 1048576 bytes",
    "not a number": "expected a finite number",
}


def process_of(function, seconds=2.0):
    return EnvironmentProcess({"function": f"{FILE}:{function}", "seconds": seconds, "mib": 512})


def question(key, row=None, do="turn", seed=1):
    return {"key": key, "do": do, "row": row or {}, "seed": seed, "messages": SAID, "tools": None}


def test_whatever_an_environment_does_is_an_answer_or_a_reason():
    process = process_of("fault")
    names = list(FAULTS)
    answers = process.answers([question(name, {"fault": name}) for name in names])
    keeper = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children")
    engine = keeper.read_text().split()
    for name, answer in zip(names, answers, strict=True):
        if name == "writes everywhere":  # into the pipe of its own answers
            continue
        if name in GOOD:
            assert {key: value for key, value in answer.items() if key != "tools"} == GOOD[name]
        else:
            assert set(answer) == {"error"} and "\n" not in answer["error"], name
            assert REASONS.get(name, "") in answer["error"], (name, answer)
    # the next episodes are not disturbed, and those before have ended
    again, = process.answers([question("again", {"fault": "good"})])
    assert again["messages"] == GOOD["good"]["messages"]
    process.end_episodes()
    assert len(engine) == 1 and not descendants(int(engine[0]))
    process.close()
    assert not Path(f"/proc/{engine[0]}").exists()


def descendants(process):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process:
            found.append(path.parent.name)
    return found


def test_an_episode_is_an_object_of_its_own_with_its_seed():
    def turns(seed):
        process = process_of("Counter")
        assert process.begins
        first = process.answers([question(7, {"number": 4}, "begin", seed),
                                 question(8, {"number": 5}, "begin", seed + 1)])
        assert [answer["messages"][0]["content"] for answer in first] == ["row 4", "row 5"]
        assert first[0]["tools"] == [{"type": "function", "function": {"name": "look"}}]
        said = []
        for keys in ([7], [7, 8], [7]):
            for answer in process.answers([question(key) for key in keys]):
                said.append(answer["messages"][0]["content"])
        process.close()
        return said

    first = turns(3)
    assert [words.split()[0] for words in first] == ["1", "2", "1", "3"]
    assert len({words.split()[1] for words in first}) == 4
    assert turns(3) == first != turns(9)


@pytest.mark.parametrize("name, line", [
    ("unknown", "unknown: expected one of calculator, python, package.module:function"),
    ("no.such.module:f", "No module named 'no'"),
    (f"{FILE}:missing", "has no attribute 'missing'"),
    (f"{FILE}:NOT_CALLABLE", "is int, expected a function or a class"),
    ("/no/such/file.py:f", "FileNotFoundError"),
])
def test_an_environment_that_does_not_load_is_told_in_a_line(name, line):
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        server.load(name)
    assert "\n" not in str(caught.value)


def test_what_an_environment_has_started_first_lasts_as_long_as_it_does(tmp_path):
    path = tmp_path / "helped.py"
    path.write_text(
        "import os, subprocess\n"
        "HELPER = subprocess.Popen(['sleep', '1000'])\n"
        "def ask(messages, row):\n"
        "    if row: raise ValueError\n"
        "    os.kill(HELPER.pid, 0)\n"
        "    return float(HELPER.pid)\n")
    process = EnvironmentProcess({"function": f"{path}:ask", "seconds": 20.0, "mib": 512})
    first, failed = process.answers([question("a"), question("b", {"fault": "x"})])
    process.end_episodes()
    again, = process.answers([question("c")])
    assert first["reward"] == again["reward"] and "error" in failed
    process.close()
    assert not Path(f"/proc/{again['reward']:.0f}").exists()


def test_a_process_that_is_killed_is_an_error_in_a_line():
    process = process_of("fault")
    keeper = process.process.pid
    os.kill(int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text()), 9)
    with pytest.raises(EngineError, match="ended with exit code"):
        process.answers([question("a", {"fault": "good"})])
    process.close()


# --- those that come with us ----------------------------------------------------------------------


def said(content="", **more):
    return [{"role": "user", "content": "What is 12 * 7?"},
            {"role": "assistant", "content": content} | more]


def call(**arguments):
    return [{"type": "function", "function": {"name": "a", "arguments": arguments}}]


def test_the_calculator_answers_calls_and_judges_what_is_none():
    its = calculator({"answer": "... so it is\n#### 1,084.50"})
    assert its.answer == 1084.5
    its = calculator({"answer": 84})
    assert its.begin(None)["tools"][0]["function"]["name"] == "calculator"
    assert its.begin([{"name": "mine"}]) == {"tools": [{"name": "mine"}]}
    assert its(said(tool_calls=call(expression="12 * 7")))[0]["content"] == "84"
    assert its(said("Let me see: <<12*7>>"))["content"] == "84"
    assert its(said("{", invalid_call="the call is no JSON"))["content"] == "the call is no JSON"
    assert [its(said(words)) for words in ("84", "It is 84.", "8 or 84", "84 or 8", "none")] == [
        1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("text, number", [
    ("It is 1,084.50.", 1084.5), ("10, 20", 20), ("of x.5", 5), ("-.5", -0.5), ("2e3 of 1E+2", 100),
    (computed("1 / 3e6"), 1 / 3e6), (str(1e-05), 1e-05), (str(1e20), 1e20), ("none", None)])
def test_the_last_number_is_read_as_it_is_written(text, number):
    assert last_number(text) == (number and pytest.approx(number, rel=1e-9))


@pytest.mark.parametrize("expression, value", [
    ("2 + 3 * 4", "14"), ("(1 + 2) / 4", "0.75"), ("-7 // 2", "-4"), ("2 ** 10", "1024"),
    ("10 % 4 - +1", "1"), ("1 / 3", "0.3333333333"),
    *[(wrong, f"{wrong[:80]!r} is no expression of numbers") for wrong in (
        "1 / 0", "9 ** 9 ** 9", "10 ** 400", "__import__('os')", "a", "", "1 +", "'a' * 9",
        "(" * 150, "True", "1 if 2 else 3", "(-8) ** 0.5", "1e999")],
])
def test_only_arithmetic_is_computed(expression, value):
    assert computed(expression) == value


def test_programs_run_until_their_tests_pass():
    if sandbox.why_unavailable():
        pytest.skip("there is no sandbox here")
    its = python({"tests": "assert f(2) == 4"})
    assert its.begin(None)["tools"][0]["function"]["name"] == "python"
    wrong = its(said("```python\ndef f(x):\n    print('seen')\n    return x\n```"))
    assert wrong["reward"] == 0 and wrong["messages"][0]["role"] == "user"
    assert "seen" in wrong["messages"][0]["content"]
    assert "AssertionError" in wrong["messages"][0]["content"]
    by_call = its(said(tool_calls=call(code="1 +")))
    assert by_call["messages"][0]["role"] == "tool"
    assert "SyntaxError" in by_call["messages"][0]["content"]
    assert its(said("```python\ndef f(x):\n    return x * x\n```")) == 1.0
    assert its(said("```python\nimport sys; sys.exit(0)\n```"))["reward"] == 0
    assert its(said("I do not know.")) == 0.0


def test_a_row_that_is_none_of_theirs_is_told():
    process = EnvironmentProcess({"function": "calculator", "seconds": 9.0, "mib": 512})
    answer, = process.answers([question(1, {"answer": "no number"}, "begin")])
    assert answer == {"error": "ValueError: the row's answer 'no number' holds no number"}
    assert json.dumps(answer)
    process.close()
