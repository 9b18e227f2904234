"""The commands that pages show, and those in the heads of modules, as text."""

import ast
import re
from typing import NamedTuple

from conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "recipes/README.md",
         ROOT / "ds_configs/README.md", ROOT / "CONTRIBUTING.md"]
MODULES = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("isogloss/**/*.py")),
           *sorted(ROOT.glob("projection_tools/*.py")), *sorted(ROOT.glob("recipes/*/*.py"))]
PROGRAM = (r"(?:\w+=\"[^\"]*\" )?"
           r"(?:deepspeed|python|torchrun|isogloss[-\w]*|make|pip|cp|vllm|transformers|sbatch|hf|"
           r"apt) ")


class Command(NamedTuple):
    """A line for a shell, with the path of its page or module in the repository."""

    page: str
    line: str


def block_lines(text):
    """Return the lines of indented blocks and of fenced ones of a shell, continued lines joined."""
    blocks = re.findall(r"(?:^    .*\n)+", text, re.M)
    blocks += re.findall(r"^```(?:bash|console|sh|shell)\n(.*?)^```", text, re.M | re.S)
    joined = "".join(blocks).replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines()]


def inline_lines(text):
    """Return what stands between backticks in the prose, but for the mere name of a program."""
    prose = re.sub(r"^```.*?^```|^    [^\n]*$", "", text, flags=re.M | re.S)
    lines = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    name = r"(?:python -m|deepspeed --module)(?: \S+)?|deepspeed distill\.py"
    return [line for line in lines if not re.fullmatch(name, line)]


def in_checkout(line):
    """Return a command of an installation as it is in a checkout; other lines stay."""
    line = re.sub(r"^isogloss-distill((?: --(?:num_gpus|hostfile|master_addr) \S+)*) ",
                  r"deepspeed\1 distill.py ", line)
    line = re.sub(r"^isogloss (?=\w+)", "python -m isogloss.command ", line)
    return re.sub(r"^isogloss-(\w+) ", r"python -m isogloss.\1 ", line)


def documented():
    """Return the Commands of all pages and of the heads of modules, as they are in a checkout."""
    commands = []
    for path in PAGES + MODULES:
        text = path.read_text()
        if path in PAGES:
            lines = block_lines(text) + inline_lines(text)
        else:
            head = ast.get_docstring(ast.parse(text), clean=False) or ""
            head = re.sub(r"(\s)\[([^]]*)\]", r"\1\2", head)  # around what may be left out
            lines = block_lines(head + "\n")
        for line in lines:
            line = re.sub(r"\s+#.*", "", line)
            if path in PAGES:
                line = in_checkout(line)
            if re.match(PROGRAM, line):
                commands.append(Command(str(path.relative_to(ROOT)), line))
    return commands


COMMANDS = documented()
