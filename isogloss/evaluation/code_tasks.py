"""HumanEval+ and MBPP+: a model writes a function, and what it returns is compared.

Data, prompts, stops and what counts as equal are those of EvalPlus 0.3.1 for base models
(https://github.com/evalplus/evalplus, Liu et al. 2023, arXiv 2305.01210).  Programs run in the
sandbox, the reference solution as well, and values are compared out here: what the model wrote
never sees what is expected of it.

A folder of data holds the files of EvalPlus' releases, compressed or not:

    HumanEvalPlus.jsonl.gz, or HumanEvalPlus-Mini.jsonl.gz
    MbppPlus.jsonl.gz

Tests: tests/test_code_tasks.py.
"""

import gzip
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import datasets
import numpy as np

from isogloss.data.texts import is_text
from isogloss.evaluation import code_runner, sandbox
from isogloss.evaluation.code_runner import decode, encode
from isogloss.projection_tools.tokenizers import reason_of

RELEASES = "https://github.com/evalplus/{name}_release/releases/download"
URLS = {
    "humaneval_plus": RELEASES.format(name="humanevalplus") + "/v0.1.10/HumanEvalPlus.jsonl.gz",
    "mbpp_plus": RELEASES.format(name="mbppplus") + "/v0.2.0/MbppPlus.jsonl.gz",
}
FILES = {
    "humaneval_plus": ("HumanEvalPlus.jsonl.gz", "HumanEvalPlus.jsonl",
                       "HumanEvalPlus-Mini.jsonl.gz", "HumanEvalPlus-Mini.jsonl"),
    "mbpp_plus": ("MbppPlus.jsonl.gz", "MbppPlus.jsonl"),
}
FIELDS = "task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input"
COMMON_STOPS = "<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint("
STOPS = {
    "humaneval_plus": (*COMMON_STOPS, "\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert "),
    "mbpp_plus": (*COMMON_STOPS, '\n"""', "\nassert"),
}
CODE_NEW_TOKENS = 768  # EvalPlus'
# CPU seconds: of a reference solution, and at least of an answer, for all calls together
REFERENCE_SECONDS = 120
LEAST_SECONDS = 10
TIMES_REFERENCE = 4
MEMORY_MIB = 4096  # as EvalPlus
OUTPUT_MIB = 64
MOST_WORKERS = 8
MOST_ROW, MOST_FILE = 2**26, 2**30  # characters; in a packed file a few bytes stand for many

# --- items ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeItem:
    """Ask a model to write a function.

    Attributes:
        task: name.
        id: within the task.
        prompt: text.
        stops: texts that end an answer and are no part of it.
        max_new_tokens: after so many tokens an answer is cut.
        reference: text of a program with a right solution.
        entry_point: name of the function.
        inputs: of each call its arguments.
        num_base: the first inputs, those of the tests without the plus.
        tolerance: absolute, of floats; 0: EvalPlus' own, where floats are expected.
    """

    task: str
    id: str
    prompt: str
    stops: tuple[str, ...]
    max_new_tokens: int
    reference: str
    entry_point: str
    inputs: tuple[list, ...]
    num_base: int
    tolerance: float


def read_items(task, data, limit=0, max_new_tokens=CODE_NEW_TOKENS):
    """Read HumanEval+ (complete a function from its signature and docstring) or MBPP+ (write one
    from a sentence and a test).

    Args:
        task: key of FILES.
        data: folder, or "" for EvalPlus' release.
        limit: the first items only; 0: all.
        max_new_tokens: of an answer.
    Returns:
        list of CodeItem.
    """
    path = _path_of(task, data)
    items = []
    for number, row in enumerate(_rows(task, path, limit), 1):
        try:
            items.append(_item(task, row, max_new_tokens))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{task}: {path}, row {number} is no task of EvalPlus "
                             f"({reason_of(error)}); expected {', '.join(FIELDS)}") from None
    if not items:
        raise ValueError(f"{task}: {path} holds no row")
    return items


def _path_of(task, data):
    """Return the path of the file, which is downloaded if no folder is named."""
    if not data:
        try:
            return Path(datasets.DownloadManager().download(URLS[task]))
        except Exception as error:  # the library raises errors of any type
            raise ValueError(f"{task}: {URLS[task]} cannot be loaded ({reason_of(error)}); name a "
                             "data folder with its file") from None
    for name in FILES[task]:
        path = Path(data) / name
        if path.is_file():
            return path
    raise ValueError(f"{task}: {Path(data) / FILES[task][0]} does not exist; expected it "
                     f"(or {', or '.join(FILES[task][1:])} there), or no data folder for EvalPlus' "
                     "release")


def _rows(task, path, limit):
    rows = []
    try:
        with open(path, "rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        opener = gzip.open if is_compressed else open
        with opener(path, "rt", encoding="utf-8") as file:
            num_read = 0
            while line := file.readline(MOST_ROW):
                num_read += len(line)
                if len(line) == MOST_ROW or num_read > MOST_FILE:
                    raise ValueError("it has more characters than any task of EvalPlus")
                if line.strip():
                    rows.append(json.loads(line))
                if limit and len(rows) == limit:
                    break
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise ValueError(f"{task}: {path}, row {len(rows) + 1} cannot be read "
                         f"({reason_of(error)})") from None
    return rows


def _item(task, row, max_new_tokens):
    for name in ("task_id", "prompt", "entry_point", "canonical_solution"):
        if not isinstance(row[name], str) or not is_text(row[name]):
            raise ValueError(f"{name} is {row[name]!r:.40}, expected a text")
    if not isinstance(row["base_input"], list) or not row["base_input"]:
        raise ValueError("base_input holds no call")
    prompt = row["prompt"].strip() + "\n"
    inputs = []
    for name in ("base_input", "plus_input"):
        # one row of MBPP+ has {} for no further inputs
        for arguments in row[name] or []:
            if not isinstance(arguments, list):
                raise ValueError(f"{name} holds {arguments!r:.40}, expected lists of arguments")
            inputs.append(typed_arguments(row["task_id"], arguments))
    return CodeItem(
        task, row["task_id"], prompt, STOPS[task], max_new_tokens,
        row["prompt"] + row["canonical_solution"], row["entry_point"], tuple(inputs),
        len(row["base_input"]), float(row.get("atol", 0)))


# JSON has no tuples.  For each task of MBPP+ that expects some: {argument: depths at which lists
# are tuples}, ALL for every argument; 0 is the argument itself, 1 its entries.
ALL = -1
EVERY_DEPTH = range(64)
TUPLES = {
    (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726,
     740, 744, 809): {ALL: (0,)},
    (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780): {ALL: (1,)},
    (75, 413, 444, 753): {0: (1,)},
    (106, 750): {1: (0,)},
    (250, 307, 405, 446, 617, 720, 763, 808): {0: (0,)},
    (259, 401, 445): {ALL: (0, 1)},
    (278,): {0: (0, 1)},
    (722,): {0: (1,)},
    (580, 615, 791): {ALL: EVERY_DEPTH},
}
# Arguments that JSON holds as text or as other numbers.
NUMBERS = {124: (float, complex), 252: (complex,)}


def typed_arguments(task_id, arguments):
    """Return the arguments of a call with the types that JSON does not have."""
    name, _, number = task_id.partition("/")
    if name != "Mbpp":
        return arguments
    number = int(number)
    if number in NUMBERS:
        return [kind(argument) for kind, argument in zip(NUMBERS[number], arguments)]
    for numbers, depths in TUPLES.items():
        if number in numbers:
            typed = []
            for place, argument in enumerate(arguments):
                of_argument = depths.get(ALL, depths.get(place, ()))
                typed.append(_with_tuples(argument, of_argument))
            return typed
    return arguments


def _with_tuples(value, depths, depth=0):
    if isinstance(value, dict):
        return {key: _with_tuples(entry, depths, depth + 1) for key, entry in value.items()}
    if not isinstance(value, list):
        return value
    entries = [_with_tuples(entry, depths, depth + 1) for entry in value]
    return tuple(entries) if depth in depths else entries


# --- running --------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Hold what calls of a function gave.

    Attributes:
        outputs: of the calls up to the first that failed.
        seconds: of CPU time; None where it did not get to the end.
        status: of the sandbox.
        error: what failed, or "".
    """

    outputs: list
    seconds: float | None
    status: str
    error: str


def call(item, program, seconds, unsafe=False, *, is_whole=False):
    """Run a program in the sandbox and call its function with the inputs of an item.

    Args:
        item: CodeItem.
        program: text.
        seconds: of CPU time.
        unsafe: without a sandbox.
        is_whole: its last lines are not left out where they are not valid.
    Returns:
        Answer.
    """
    request = {
        "code": program,
        "is_whole": is_whole,
        "entry_point": item.entry_point,
        "inputs": encode(list(item.inputs)),
        "as_set": item.entry_point in COMPARED_AS_SETS,
    }
    result = sandbox.run(
        Path(code_runner.__file__).read_text(encoding="utf-8"), json.dumps(request), seconds,
        MEMORY_MIB, output_mib=OUTPUT_MIB, unsafe=unsafe)
    answer = Answer([], None, result.status, "")
    for line in result.stdout.splitlines():
        try:
            message = json.loads(line)
            if "output" in message:
                answer.outputs.append(decode(message["output"]))
            elif "seconds" in message:
                answer.seconds = float(message["seconds"])
            else:
                answer.error = str(message["error"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            answer.error = "what it printed cannot be read"
            break
    return answer


# --- comparing ------------------------------------------------------------------------------------

# Functions of MBPP+ whose result has no order, and those that may return a match for True.
COMPARED_AS_SETS = {
    "similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum",
    "intersection_array", "find_dissimilar", "Diff",
}
COMPARED_AS_FOUND = {"check_str", "text_match_three", "text_starta_endb"}
FLOAT_TOLERANCE = 1e-6  # absolute, where floats are expected
RELATIVE_TOLERANCE = 1e-7


def is_right(item, arguments, expected, output):
    """Tell whether a call gave what it should."""
    try:
        return bool(_is_right(item, arguments, expected, output))
    except Exception:  # values of a model's program may have any type and size
        return False


def _is_right(item, arguments, expected, output):
    if item.task == "humaneval_plus" and item.entry_point == "find_zero":
        value = sum(factor * math.pow(output, i) for i, factor in enumerate(arguments[0]))
        return abs(value) <= item.tolerance
    is_equal = output == expected
    if item.task == "mbpp_plus":
        if item.entry_point in COMPARED_AS_FOUND and not isinstance(output, bool):
            # a reference says whether it found something, or returns what it found
            is_found = expected if isinstance(expected, bool) else expected is not None
            is_equal = (output is not None) == is_found
        elif item.entry_point == "surface_Area":
            is_equal = is_equal or abs(output - pyramid_area(*arguments)) <= item.tolerance
        elif item.entry_point == "digit_distance_nums":
            is_equal = is_equal or output == padded_digit_distance(*arguments)
    if is_equal:
        return True
    tolerance = item.tolerance or (FLOAT_TOLERANCE if are_floats(expected) else 0)
    if not tolerance or type(output) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)) and len(output) != len(expected):
        return False
    return np.allclose(output, expected, rtol=RELATIVE_TOLERANCE, atol=tolerance)


def are_floats(value):
    """Tell whether a value is a float, or a list or tuple of nothing else."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(entry, float) for entry in value)
    return isinstance(value, float)


def pyramid_area(base_edge, height):
    """Return the rounded surface of a square pyramid of this height, which some solutions read."""
    slant_height = math.hypot(base_edge / 2, height)
    return round(base_edge**2 + 2 * base_edge * slant_height)


def padded_digit_distance(first, second):
    """Return the sum of differences of digits, the shorter number filled up with zeros."""
    digits = max(len(str(first)), len(str(second)))
    pairs = zip(str(first).zfill(digits), str(second).zfill(digits))
    return sum(abs(int(a) - int(b)) for a, b in pairs)


# --- judging --------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """Hold what became of an answer.

    Attributes:
        passes: all tests; passes_base: those without the plus.
        reason: "right", "wrong", "timeout", or what failed.
    """

    passes: bool
    passes_base: bool
    reason: str


class CodeJudge:
    """Judge answers to CodeItems; what is expected of them comes from the reference solutions.

    Attributes:
        unsafe: run programs without a sandbox.
        expected: {item.id: Answer of its reference solution}.
    """

    def __init__(self, unsafe=False):
        self.unsafe = unsafe
        self.expected = {}

    @cached_property
    def workers(self):
        """How many programs run side by side."""
        # torchrun's name, then DeepSpeed's
        ranks_of_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1
        return min(max((os.cpu_count() or 1) // int(ranks_of_node), 1), MOST_WORKERS)

    def map(self, function, *items):
        """Return [function(item)], several at a time; what a program takes is not this process."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(function, *items))

    def prepare(self, items):
        """Run the reference solutions of some items.

        Raises:
            ValueError: one of them fails, so the data are damaged.
        """
        answers = self.map(lambda item: call(
            item, item.reference, REFERENCE_SECONDS, self.unsafe, is_whole=True), items)
        for item, answer in zip(items, answers):
            if len(answer.outputs) != len(item.inputs) or answer.seconds is None:
                raise ValueError(f"{item.task}, {item.id}: its reference solution fails "
                                 f"({answer.error or answer.status})")
            self.expected[item.id] = answer

    def verdict(self, item, text):
        """Return the Verdict of what a model wrote behind an item's prompt."""
        reference = self.expected[item.id]
        seconds = max(LEAST_SECONDS, math.ceil(TIMES_REFERENCE * reference.seconds))
        answer = call(item, item.prompt + text, seconds, self.unsafe)
        num_right = 0
        for arguments, expected, output in zip(item.inputs, reference.outputs, answer.outputs):
            if not is_right(item, arguments, expected, output):
                break
            num_right += 1
        passes = num_right == len(item.inputs)
        reason = "right" if passes else "wrong"
        if answer.status == "timeout":
            reason = "timeout"
        elif num_right == len(answer.outputs) and not passes:
            reason = answer.error or answer.status
        return Verdict(passes, num_right >= item.num_base, reason)


def pass_at(k, num_answers, num_right):
    """Return the chance that some of k answers drawn from those that were written is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k of Chen et al. 2021
    (arXiv 2107.03374).
    """
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def ks_of(samples):
    """Return the k of pass@k that are told of so many answers to an item: 1, 10, 100 and all."""
    return sorted({1, samples} | {k for k in (10, 100) if k <= samples})
