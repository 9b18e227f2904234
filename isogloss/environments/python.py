"""Programs that have to pass tests, in a sandbox without network and files.

A row has `messages`, which end in the task, and `tests`: Python lines that follow the program and
raise where it is wrong.  The assistant calls the tool, or writes a block ```python ... ```; what
the program and the tests print comes back until they pass.

Tests: tests/test_environments.py.
"""

import re
import secrets

from isogloss.evaluation import sandbox

TOOLS = [{"type": "function", "function": {
    "name": "python", "description": "Run a Python program and the task's tests.",
    "parameters": {"type": "object", "required": ["code"], "properties": {
        "code": {"type": "string"}}}}}]
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
MOST_CHARACTERS = 2000  # of what is shown
SECONDS = 5  # of CPU time
# Reads program and tests from stdin; what they print is shown, and why they end.
RUNNER = """
import sys, traceback
try:
    exec(compile(sys.stdin.read(), "answer.py", "exec"), {"__name__": "__main__"})
    print(%r)
except BaseException:
    print(traceback.format_exc(limit=-1))
"""


class python:
    """Answer the assistant until its program passes."""

    def __init__(self, row):
        self.tests = row.get("tests") or ""
        reason = sandbox.why_unavailable()
        if reason:
            raise ValueError(reason)

    def begin(self, tools):
        """Offer the sandbox where the row offers nothing."""
        return {"tools": tools or TOOLS}

    def __call__(self, messages):
        said = messages[-1]
        programs = [call["function"]["arguments"].get("code", "")
                    for call in said.get("tool_calls", [])]
        role = "tool" if programs else "user"
        programs = programs or BLOCK.findall(said["content"])
        if said.get("invalid_call"):
            return self._said("tool", said["invalid_call"])
        if not programs:
            return 0.0
        end = secrets.token_hex(16)
        result = sandbox.run(RUNNER % end, f"{programs[-1]}\n{self.tests}", SECONDS)
        if result.status == "ok" and end in result.stdout:
            return 1.0
        shown = result.stdout[-MOST_CHARACTERS:].strip()
        return self._said(role, shown if result.status == "ok" else f"{result.status}\n{shown}")

    @staticmethod
    def _said(role, words):
        return {"messages": [{"role": role, "content": words or "nothing was printed"}],
                "reward": 0.0}
