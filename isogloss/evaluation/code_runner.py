"""Call a function of a program that a model wrote, with given arguments; runs inside the sandbox.

`code_tasks` sends the text of this file into the box as the program, and a JSON object as its
stdin: {"code", "is_whole", "entry_point", "inputs", "as_set"}.  It answers with one line of JSON
for each input, {"output": value}, up to the first call that fails, and then {"seconds": CPU time}
or {"error": text}.  What the model's program prints goes nowhere.

Values travel as JSON, in the form of `encode`, so the job that reads them runs nothing of theirs.
Needs the standard library alone.  Tests: tests/test_code_tasks.py.
"""

import json
import math
import os
import sys
import time
from dataclasses import dataclass

EXACT_INTEGERS = 1 << 53  # beyond it JSON readers may round
LARGE = 1 << 20  # entries; of a larger value only a digest travels


class Unknown:
    """Stand for a value of another type than those that travel; it equals nothing."""


@dataclass(frozen=True)
class Digest:
    """Stand for a value that is too large to travel; that of an equal value is equal."""

    content: int


def encode_output(value):
    """Return what a call gave as JSON can hold it, a digest if it is very large."""
    if has_entries(value, LARGE):
        return {"digest": digest(value)}
    return encode(value)


def has_entries(value, least):
    """Tell whether a value has so many entries, on all levels together."""
    pending = [value]
    count = 0
    while pending and count < least:
        entries = pending.pop()
        if isinstance(entries, dict):
            entries = [*entries.keys(), *entries.values()]
        if isinstance(entries, (list, tuple, set, frozenset)):
            count += len(entries)
            if count < least:
                pending.extend(entries)
    return count >= least


def digest(value):
    """Return 64 bits that are equal for equal values, in processes of one hash seed.

    Python's own hash where it has one, which is equal for 1, 1.0 and True as they are.
    """
    if isinstance(value, list):
        return hash(("list", *map(digest, value)))
    if isinstance(value, (set, frozenset)):
        return hash(("set", frozenset(value)))
    if isinstance(value, dict):
        return hash(("dict", frozenset((key, digest(entry)) for key, entry in value.items())))
    try:
        return hash(value)
    except TypeError:  # a tuple with lists in it
        return hash(("tuple", *map(digest, value)))


def encode(value):
    """Return a value as JSON can hold it; types and cycles are preserved or refused.

    None, bool, str, finite float, int and list are themselves; others are an object of one entry,
    {type: content}.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < EXACT_INTEGERS else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(entry) for entry in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: [encode(entry) for entry in value]}
    return {"unknown": type(value).__name__}


def decode(value):
    """Return what `encode` was given, an `Unknown` for what it does not know.

    Raises:
        ValueError, TypeError, KeyError: it is no value that `encode` returns.
    """
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float(content)
    if name == "complex":
        real, imaginary = content
        return complex(decode(real), decode(imaginary))
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode(key): decode(entry) for key, entry in content}
    if name == "digest":
        return Digest(content)
    if name == "unknown":
        return Unknown()
    kind = {"tuple": tuple, "set": set, "frozenset": frozenset}[name]
    return kind(decode(entry) for entry in content)


def compile_longest(code, *arguments):
    """Return the compiled program, without its last lines if only that makes it valid.

    A model's answer may end in the middle of a line.
    """
    lines = code.split("\n")
    for last in range(len(lines), 0, -1):
        try:
            return compile("\n".join(lines[:last]), *arguments)
        except (SyntaxError, ValueError):
            continue
    raise SyntaxError("no line of it is valid")


def main():
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)

    def answer(line):
        answers.write(json.dumps(line) + "\n")
        answers.flush()  # what was there in time counts

    try:
        names = {"__name__": "answer"}
        compiled = compile if request["is_whole"] else compile_longest
        exec(compiled(request["code"], "answer.py", "exec"), names)
        function = names[request["entry_point"]]
        for arguments in request["inputs"]:
            output = function(*decode(arguments))
            if request["as_set"]:
                output = set(output)
            answer({"output": encode_output(output)})
    except BaseException as error:  # SystemExit and KeyboardInterrupt as well
        answer({"error": f"{type(error).__name__}: {error}"[:500]})
        return
    answer({"seconds": time.process_time()})


if __name__ == "__main__":
    main()
