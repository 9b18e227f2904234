"""Questions whose answer is a number, with a calculator.

A row has `messages`, which end in the question, and `answer`: a number, or a text that ends in one.
The assistant calls the tool, or writes <<12 * 7>> at the end of what it says where its template
writes no calls; what it says without is its answer.

Tests: tests/test_environments.py.
"""

import ast
import math
import operator
import re

TOOLS = [{"type": "function", "function": {
    "name": "calculator", "description": "Compute an expression of numbers.",
    "parameters": {"type": "object", "required": ["expression"], "properties": {
        "expression": {"type": "string", "description": "such as (12 + 3) * 7 / 2"}}}}}]
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Pow: operator.pow,
}
LARGEST = 1e15  # of which all integers are told apart
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?")
WRITTEN = re.compile(r"<<([^<>]*)>>\s*$")


class calculator:
    """Answer the assistant until it answers the question."""

    def __init__(self, row):
        self.answer = last_number(str(row["answer"]))
        if self.answer is None:
            raise ValueError(f"the row's answer {row['answer']!r:.40} holds no number")

    def begin(self, tools):
        """Offer the calculator where the row offers nothing."""
        return {"tools": tools or TOOLS}

    def __call__(self, messages):
        said = messages[-1]
        results = []
        for call in said.get("tool_calls", []):
            result = computed(call["function"]["arguments"].get("expression", ""))
            results.append({"role": "tool", "name": "calculator", "content": result})
        if results:
            return results
        if said.get("invalid_call"):
            return {"role": "tool", "name": "calculator", "content": said["invalid_call"]}
        written = WRITTEN.search(said["content"])
        if written:
            return {"role": "user", "content": computed(written[1])}
        number = last_number(said["content"])
        return 1.0 if number is not None and math.isclose(number, self.answer) else 0.0


def last_number(text):
    """Return the last number of a text; None: it has none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def computed(expression):
    """Return the value of an expression of numbers, or why it has none, as text."""
    try:
        value = _value(ast.parse(str(expression)[:200].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, TypeError, MemoryError):
        return f"{str(expression)[:80]!r} is no expression of numbers"
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("too large")
        value = OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("no arithmetic")
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("too large")
    return value
