"""Names in docstrings and comments exist, and a class of ours has a name of its own."""

import ast
import io
import re
import tokenize
from collections import defaultdict

from conftest import ROOT
from test_imports import modules, tree_of

# {name: why several classes have it}
SHARED_NAMES = {
    "Args": "the flags of a command, each its own",
    "Batch": "cross_tokenizer.py is copied alone; the job's batch is another one",
    "Columns": "losses.py is copied alone: columns of logits; the job's are of records",
    "Part": "the job's is one of tiles.py",
    "EncodedText": "cross_tokenizer.py is copied alone",
}


# names of an argument or of another library, not of the module of ours that is called so
NOT_OURS = {("engine", "skipped_steps"), ("student", "encode"), ("args", "output")}


def trees():
    """Return {path: syntax tree} of what is imported or copied, and of benchmarks."""
    paths = {*modules().values(), *(ROOT / "benchmarks").glob("*.py")}
    return {path: tree_of(path) for path in sorted(paths)}


def names_in(tree):
    """Return all names that a file defines, takes as an argument or sets."""
    names = set()
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            value = getattr(node, field, None)
            names |= {value} if isinstance(value, str) else set()
    return names


def prose_of(path, tree):
    """Yield the docstrings and comments of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_what_prose_names_exists():
    all_trees = trees()
    names = defaultdict(set)
    for path, tree in all_trees.items():
        names[path.stem if path.stem != "__init__" else path.parent.name] |= names_in(tree)
    files = {path.name for path in ROOT.glob("*.py")}
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            files |= {path.name for path in folder.rglob("*.py")}
    stale = []
    for path, tree in all_trees.items():
        for text in prose_of(path, tree):
            for module, name in re.findall(r"`(\w+)\.(\w+)`", text):
                if (module, name) in NOT_OURS or module == "isogloss":
                    continue
                if module in names and name != "py" and name not in names[module]:
                    stale.append(f"{path.relative_to(ROOT)}: `{module}.{name}`")
            for name in re.findall(r"\b([a-z_]+\.py)\b", text):
                if name not in files:
                    stale.append(f"{path.relative_to(ROOT)}: {name}")
    assert not stale, "\n".join(stale)


def test_a_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for path, tree in trees().items():
        if path.parent.name == "benchmarks":
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    doubles = {name: files for name, files in places.items() if len(files) > 1}
    assert doubles.keys() <= SHARED_NAMES.keys(), {
        name: files for name, files in doubles.items() if name not in SHARED_NAMES}
