"""HumanEval+ and MBPP+: reference solutions pass, wrong and forged answers do not."""

import gzip
import json
import math
from itertools import combinations

import pytest
import torch

from conftest import asset
from isogloss.evaluation import code_tasks, sandbox
from isogloss.evaluation.code_runner import Digest, Unknown, decode, digest, encode, encode_output
from isogloss.evaluation.task_options import TaskOptions
from isogloss.evaluation.task_suite import load_suite
from isogloss.evaluation.tasks import load_code_task
from test_sandbox import needs_sandbox
from test_tasks import loaded

# A program takes 50 ms; the tasks as a whole, 542 programs and 20 heavy ones among them, minutes.
EVERY = 8


def item_of(code="", entry_point="f", inputs=((1,), (2,)), num_base=1, tolerance=0.0,
            task="humaneval_plus"):
    """Return a CodeItem whose prompt is empty."""
    arguments = tuple(list(of_call) for of_call in inputs)
    return code_tasks.CodeItem(
        task, "T/1", "", (), 64, code, entry_point, arguments, num_base, tolerance)


# --- data -----------------------------------------------------------------------------------------


def test_every_reference_solution_is_read():
    humaneval = code_tasks.read_items("humaneval_plus", asset("eval"))
    mbpp = code_tasks.read_items("mbpp_plus", asset("eval"))
    assert (len(humaneval), len(mbpp)) == (164, 378)
    for item in humaneval + mbpp:
        assert f"def {item.entry_point}" in item.reference
        assert item.num_base <= len(item.inputs)
        assert item.prompt.endswith(('"""\n', "'''\n"))


@pytest.mark.parametrize("character", [b"\0", b"\n"])
def test_a_file_of_tasks_without_an_end_is_read_to_its_bound(tmp_path, monkeypatch, character):
    monkeypatch.setattr(code_tasks, "MOST_FILE", 2**22)
    path = tmp_path / "HumanEvalPlus.jsonl.gz"
    path.write_bytes(gzip.compress(character * 2**27, 9))  # a thousandth of it
    with pytest.raises(ValueError, match=r"row 1 cannot be read \(it has more characters than"):
        code_tasks.read_items("humaneval_plus", tmp_path)


# Where EvalPlus calls a function with lists although its assertions have tuples.
LISTS_FOR_TUPLES = {"Mbpp/104", "Mbpp/140", "Mbpp/145", "Mbpp/252", "Mbpp/301"}


def test_arguments_of_mbpp_have_the_types_of_its_own_assertions():
    """Each task shows calls with literal arguments; base inputs are these calls."""
    checked = 0
    others = set()
    with gzip.open(asset("eval") / "MbppPlus.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        calls = []
        names = {row["entry_point"]: lambda *arguments, calls=calls: calls.append(arguments)}
        names |= {name: (lambda *values, **_: True) for name in ("set", "sorted", "len")}
        for line in row["assertion"].strip().splitlines():
            try:
                exec(line.removeprefix("assert "), dict(names, math=math))
            except Exception:
                break  # calls of other kinds than f(...) == value
        if len(calls) != len(row["base_input"]):
            continue
        for arguments, of_call in zip(row["base_input"], calls):
            if json.loads(json.dumps(of_call, default=str)) != arguments:
                continue  # EvalPlus has mended some inputs
            typed = code_tasks.typed_arguments(row["task_id"], arguments)
            checked += 1
            if repr(list(typed)) != repr(list(of_call)):
                others.add(row["task_id"])
    assert checked > 800
    assert others == LISTS_FOR_TUPLES


def test_files_are_read_compressed_or_not_and_damage_is_one_line(tmp_path):
    source = asset("eval") / "HumanEvalPlus-Mini.jsonl.gz"
    plain = gzip.decompress(source.read_bytes())
    (tmp_path / "HumanEvalPlus-Mini.jsonl").write_bytes(plain)
    items = code_tasks.read_items("humaneval_plus", str(tmp_path))
    assert items == code_tasks.read_items("humaneval_plus", asset("eval"))
    assert len(code_tasks.read_items("humaneval_plus", str(tmp_path), limit=3)) == 3
    row = json.loads(plain.splitlines()[0])
    without = {key: value for key, value in row.items() if key != "entry_point"}
    is_no_task = "row 1 is no task of EvalPlus .*"
    for content, message in (
            (source.read_bytes()[:5000], r"HumanEvalPlus.jsonl.gz, row \d+ cannot be read"),
            (without, is_no_task + "entry_point"),
            (row | {"prompt": None}, is_no_task + "prompt is None"),
            (row | {"entry_point": 3}, is_no_task + "is 3"),
            (row | {"base_input": []}, is_no_task + "base_input holds no call"),
            (row | {"base_input": [3]}, is_no_task + "base_input holds 3, expected lists")):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "HumanEvalPlus.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match=message):
            code_tasks.read_items("humaneval_plus", str(tmp_path))
    with pytest.raises(ValueError, match=r"MbppPlus.jsonl.gz does not exist; expected it"):
        code_tasks.read_items("mbpp_plus", str(tmp_path))


# --- values ---------------------------------------------------------------------------------------

VALUES = [
    None, True, 0, -1, 2**60, -(2**3000), 1.0, 0.1, -0.0, math.inf, -math.inf, 1 + 2j, "",
    "ü\ud800", b"\x00\xff", [], [1, [2, (3,)]], (), (1, (2, [3])), set(), {1, "a"},
    frozenset({(1, 2)}), {}, {"a": 1, (1, 2): [None]}, {1: {2: {3}}},
]


def test_values_travel_with_their_types():
    for value in VALUES:
        arrived = decode(json.loads(json.dumps(encode(value))))
        assert arrived == value
        assert type(arrived) is type(value)
        assert repr(arrived) == repr(value) or isinstance(value, (set, frozenset))
    huge = 3**20_000  # more digits than Python reads or writes in decimal
    assert decode(json.loads(json.dumps(encode(huge)))) == huge


def test_what_does_not_travel_equals_nothing():
    class Everything:
        def __eq__(self, other):
            return True

    arrived = decode(json.loads(json.dumps(encode([Everything(), range(3), print]))))
    assert all(isinstance(entry, Unknown) for entry in arrived)
    assert arrived != [1, range(3), print]
    assert math.isnan(decode(encode(math.nan)))


def test_large_values_are_compared_by_digest(monkeypatch):
    monkeypatch.setattr(code_tasks.code_runner, "LARGE", 1000)  # entries
    large = [tuple(range(n, n + 3)) for n in range(400)]
    assert "digest" in encode_output(large)
    same = [(float(a), b, c) for a, b, c in large]  # 1.0 == 1
    assert decode(encode_output(large)) == decode(encode_output(same))
    for other in (large[:-1] + [(0, 0, 0)], tuple(large), [list(entry) for entry in large]):
        assert decode(encode_output(other)) != decode(encode_output(large))
    assert decode(encode_output(large)) != large
    assert isinstance(decode(encode_output(large)), Digest)
    assert digest({"a": [1], "b": {2}}) == digest({"b": {2}, "a": [1]})
    assert digest(([1], 2)) == digest(([1], 2)) != digest(([2], 2))


# --- running --------------------------------------------------------------------------------------


@needs_sandbox
@pytest.mark.parametrize("task", ["humaneval_plus", "mbpp_plus"])
def test_reference_solutions_pass(task):
    items = code_tasks.read_items(task, asset("eval"))[::EVERY]
    judge = code_tasks.CodeJudge()
    judge.prepare(items)
    # behind the prompt, as a model would write it
    verdicts = judge.map(lambda item: judge.verdict(item, "\n" + item.reference), items)
    for item, verdict in zip(items, verdicts):
        assert verdict.passes and verdict.passes_base and verdict.reason == "right", item.id
        reference = judge.expected[item.id]
        assert len(reference.outputs) == len(item.inputs)


def returning(expression, before=""):
    """Return a program whose f(x) returns an expression."""
    return f"{before}\ndef f(x):\n    return {expression}\n"


# Writes to whatever is open, in place of the runner.
PRINTER = """
import os
def f(x):
    for descriptor in range(20):
        try:
            os.write(descriptor, {})
        except OSError:
            pass
    os._exit(0)
"""
RIGHT = returning("x * 2")

EQUAL = """
class Equal({}):
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
"""
# {name: (reason, whether the base tests pass, program)}; the right value for 1 is 2
WRONG = {
    "another value": ("wrong", True, returning("x + 1")),
    "no function": ("KeyError", False, "g = 1"),
    "an exception": ("ValueError: no", False, "def f(x):\n    raise ValueError('no')\n"),
    "an exit": ("SystemExit", False, "raise SystemExit(0)"),
    "a hard exit": ("ok", False, returning("os._exit(0)", "import os")),
    "no Python": ("SyntaxError", False, "]"),
    "never ends": ("timeout", False, "def f(x):\n    while True:\n        pass\n"),
    "ends once": ("timeout", True, "def f(x):\n    while x > 1:\n        pass\n    return 2\n"),
    "another type": ("wrong", False, returning("str(x * 2)")),
    "a float beside the integer": ("wrong", False, returning("x * 2 + 1e-9")),
    "a value that equals everything": ("wrong", False, returning("Equal()", EQUAL.format(""))),
    "an integer that equals everything": (
        "wrong", False, returning("Equal(7)", EQUAL.format("int"))),
    "prints verdicts": ("wrong", False, PRINTER.format(
        r"""b'{"output": true}\n{"passes": true}\n{"seconds": 0}\n'""")),
    "prints deep JSON": ("what it printed cannot", False, PRINTER.format("b'[' * 100000")),
    "prints values of no type": ("what it printed cannot", False, PRINTER.format(
        r"""b'{"output": {"set": [[1]]}}\n'""")),
    # the expected values are 2, 4, 20, and the reference has a comment that it could be known by
    "looks for what is expected": ("wrong", False, """
import gc, sys
def f(x):
    frame = sys._getframe()
    things = gc.get_objects()
    while frame:
        things += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for thing in things:
        if isinstance(thing, dict) and any(key in thing for key in ("expected", "reference")):
            return x * 2
        if isinstance(thing, list) and thing[:3] == [2, 4, 20]:
            return x * 2
        if isinstance(thing, str) and "the reference" + " solution" in thing:
            return x * 2
    return 0
"""),
}


@pytest.fixture(scope="module")
def doubling():
    """An item that asks for twice its argument, and its judge."""
    item = item_of(RIGHT + "# the reference solution", inputs=((1,), (2,), (10,)))
    judge = code_tasks.CodeJudge()
    judge.prepare([item])
    return item, judge


@needs_sandbox
@pytest.mark.parametrize("name", WRONG)
def test_wrong_and_forged_answers_fail(name, doubling, monkeypatch):
    monkeypatch.setattr(code_tasks, "LEAST_SECONDS", 1)
    item, judge = doubling
    reason, passes_base, program = WRONG[name]
    verdict = judge.verdict(item, program)
    assert not verdict.passes
    assert verdict.passes_base == passes_base
    assert verdict.reason.startswith(reason)


@needs_sandbox
def test_answers_that_end_in_the_middle_of_a_line_pass(doubling):
    item, judge = doubling
    assert judge.verdict(item, RIGHT).passes
    assert judge.verdict(item, RIGHT + "\n\ndef g(x):\n    return (x +").passes
    assert judge.verdict(item, "print('hello')\n" + RIGHT + "print(f(3))\n").passes
    assert judge.verdict(item, RIGHT.replace("x * 2", "float(x) * 2")).passes


@needs_sandbox
def test_calls_do_not_share_their_arguments():
    item = item_of("def f(x):\n    return len(x)\n", inputs=(([1, 2],), ([1, 2],)))
    judge = code_tasks.CodeJudge()
    judge.prepare([item])
    assert judge.expected[item.id].outputs == [2, 2]
    shared = item_of("def f(x):\n    x.append(0)\n    return len(x)\n", inputs=item.inputs)
    assert code_tasks.call(shared, shared.reference, 5).outputs == [3, 3]


@needs_sandbox
def test_a_reference_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(code_tasks, "REFERENCE_SECONDS", 1)
    for program, reason in (("g = 1", "KeyError"), (WRONG["never ends"][-1], "timeout"),
                            (RIGHT + "\n\ndef g(x):\n    return (x +", "SyntaxError")):
        message = rf"T/1: its reference solution fails \({reason}"
        with pytest.raises(ValueError, match=message):
            code_tasks.CodeJudge().prepare([item_of(program)])


def test_comparison():
    plain = item_of()
    for expected, output, right in [
        (1, 1, True), (1, True, True), (1, 1.0, True), (1.0, 1.0 + 1e-7, True),
        (1.0, 1.0 + 1e-5, False), (1.0, 1, True), ([1.0, 2.0], [1.0, 2.0 + 1e-7], True),
        ([1.0, 2.0], (1.0, 2.0 + 1e-7), False), ([1.0], [1.0, 1.0], False), ((1, 2), [1, 2], False),
        ([], [], True), (None, None, True), (None, 0, False), (1.0, "1.0", False),
        (1.0, Unknown(), False), (math.nan, math.nan, False), (1.0, 10**400, False),
    ]:
        assert code_tasks.is_right(plain, [], expected, output) == right, (expected, output)
    assert not code_tasks.is_right(item_of(tolerance=1e-3), [], 1, 1.0005)
    assert code_tasks.is_right(item_of(tolerance=1e-3), [], 1.0, 1.0005)
    for value, right in (([1.0, 2.0], True), ([], False), ([1.0, 2], False)):
        assert code_tasks.are_floats(value) == right


def test_functions_with_more_than_one_right_answer():
    cubic = [[-6, 11, -6, 1]]  # (x - 1)(x - 2)(x - 3)
    for entry_point, arguments, expected, output, right in (
            ("find_zero", cubic, 1.0, 3.0, True), ("find_zero", cubic, 1.0, 2.5, False),
            ("check_str", [], True, Unknown(), True), ("check_str", [], False, None, True),
            ("check_str", [], True, None, False), ("check_str", [], False, True, False),
            # the height of a pyramid: along its face, or upright, as in 3-4-5 triangles
            ("surface_Area", [6, 4], -1, 36 + 2 * 6 * 5, True),
            ("surface_Area", [6, 4], -1, 36, False),
            ("digit_distance_nums", [123, 56], -1, 1 + 3 + 3, True),
            ("digit_distance_nums", [123, 56], -1, 3, False)):
        task = "humaneval_plus" if entry_point == "find_zero" else "mbpp_plus"
        item = item_of(entry_point=entry_point, task=task, tolerance=1e-4)
        found = code_tasks.is_right(item, arguments, expected, output)
        assert found == right, (entry_point, output)


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    for num_answers in (1, 2, 5, 7):
        for num_right in range(num_answers + 1):
            marks = [True] * num_right + [False] * (num_answers - num_right)
            for k in range(1, num_answers + 1):
                draws = [any(draw) for draw in combinations(marks, k)]
                share = sum(draws) / len(draws)
                found = code_tasks.pass_at(k, num_answers, num_right)
                assert math.isclose(found, share, abs_tol=1e-12)
    assert [code_tasks.ks_of(samples) for samples in (1, 5, 10, 20, 200)] == [
        [1], [1, 5], [1, 10], [1, 10, 20], [1, 10, 100, 200]]


# --- as a task ------------------------------------------------------------------------------------


@needs_sandbox
def test_a_model_is_judged_by_what_it_writes(monkeypatch):
    """A model that writes the reference for even samples, and for others a wrong program."""
    model, encoder = loaded(asset("models", "stories260K"))
    options = TaskOptions(data=str(asset("eval")), limit=4, samples=2, temperature=1.0)
    suite = load_suite(["humaneval_plus", "mbpp_plus"], options, encoder)

    def write(model, encoder, items, keys, *_, **_options):
        assert all(item.max_new_tokens == 768 for item in items)
        texts = []
        for item, key in zip(items, keys):
            texts.append("\n" + item.reference if key[-1] == 0 else "    pass\n")
        return texts

    monkeypatch.setattr("isogloss.evaluation.tasks.write_answers", write)
    metrics, records = suite.run(model, torch.as_tensor)
    for task in ("humaneval_plus", "mbpp_plus"):
        assert metrics[f"eval/{task}_pass@1"] == 0.5
        assert metrics[f"eval/{task}_base_pass@1"] == 0.5
        assert metrics[f"eval/{task}_pass@2"] == 1
        assert metrics[f"eval/{task}_pass@1_stderr"] == 0
        assert metrics[f"eval/{task}_timeouts"] == 0
    assert len(records) == 16
    assert {(record["sample"], record["verdict"]) for record in records} == {
        (0, "right"), (1, "wrong")}
    assert suite.run(model, torch.as_tensor, stop=lambda: True) == ({}, [])


def test_without_a_sandbox_code_tasks_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "why_unavailable", lambda: "no sandbox: apt install bubblewrap")
    options = TaskOptions(data=str(asset("eval")), limit=1)
    with pytest.raises(ValueError, match=r"humaneval_plus runs what the model writes: no sandbox: "
                       r"apt install bubblewrap; .* --allow_unsafe_code"):
        load_code_task("humaneval_plus", options)
    unsafe = TaskOptions(data=str(asset("eval")), limit=1, allow_unsafe_code=True)
    task = load_code_task("humaneval_plus", unsafe)
    numbers, _ = task.judged(task.items[0], ["\n" + task.items[0].reference])
    assert numbers == [1, 1, 0]
