"""What is copied stands alone; a room imports only rooms above it; nothing goes in circles."""

import ast
import functools
import graphlib

import pytest

from conftest import ROOT
from isogloss.doors import DOORS as DOORS_OF_RUNS

STANDALONE = {  # file: which of our files it takes where it finds them beside it
    "align.py": set(),
    "align_dp.py": {"align"},
    "align_view.py": {"align", "tokenizer_files"},
    "tokenizer_files.py": set(),
    "loss_bounds.py": set(),
    "losses.py": set(),
    "policy_losses.py": {"losses"},
    "nodes.py": {"losses"},
    "translation.py": {"losses", "nodes"},
    "spelling.py": {"align"},
    "cross_tokenizer.py": {"align", "loss_bounds", "losses", "nodes", "translation", "spelling"},
    "tile_plan.py": set(),
    "tiles.py": {"tile_plan"},
    "rollout.py": set(),
}
# A room imports from those before it.  A name with a dot is a file of isogloss/ itself.
ROOMS = ["STANDALONE", ".errors", ".doors", "flags", "projection_tools", ".curves", "job", "data",
         "models", "teachers", "objective", ".loss_table", ".several_teachers",
         ".config", ".targets", "student",
         "checkpoints", "evaluation", "environments", "writing", ".command", ".log", ".plan",
         ".tasks", ".export", ".transfer", ".vllm_writer", ".vllm_teacher", ".inputs",
         "integrations", "report", ".cache", ".write", ".build", ".once_in_a_while", "PROGRAMS"]
PROGRAMS = "distill", "demo"
MOST_MODULES = 16  # of a folder: more are a list, no map
DOORS = {"loss_table"}  # names of before, for one release


def modules():
    """Return {module: path} of everything that runs, tests and benchmarks apart."""
    patterns = "*.py", "isogloss/**/*.py", "projection_tools/*.py"
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    found = {}
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name if name.startswith("isogloss") else f"isogloss.{name}"] = path
    return found


def room_of(module):
    """Return the entry of ROOMS that a module belongs to, None for the package itself."""
    parts = module.split(".")[1:]
    if not parts:
        return None
    if len(parts) == 1 and f"{parts[0]}.py" in STANDALONE:
        return "STANDALONE"
    if parts[0] in PROGRAMS:
        return "PROGRAMS"
    return parts[0] if parts[0] in ROOMS else f".{parts[0]}"


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def import_nodes(path):
    """List the nodes of a file that import, wherever in it."""
    kinds = ast.Import | ast.ImportFrom
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]


def imports_of(module, path, known):
    """Return the modules of ours that a file imports, wherever in it."""
    return _imported(module, path, import_nodes(path), known)


def at_the_top(module, known):
    """Return the modules of ours that a file imports when it is imported itself."""
    nodes = []
    blocks = [tree_of(known[module]).body]
    while blocks:
        for node in blocks.pop():
            nodes.append(node)
            if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                blocks.append(node.body)
            if isinstance(node, ast.Try):
                blocks.append(node.body)
    return _imported(module, known[module], nodes, known)


def _imported(module, path, nodes, known):
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:  # standalone files alone
                assert room_of(module) == "STANDALONE", f"{path}: a relative import"
                start = f"isogloss.{start}".rstrip(".")
            names |= {f"{start}.{alias.name}" for alias in node.names} | {start}
    return (names & known.keys()) - {"isogloss"}


@pytest.mark.parametrize("file", STANDALONE)
def test_what_is_copied_imports_nothing_of_ours(file):
    path = ROOT / file
    allowed = {f"isogloss.{name}" for name in STANDALONE[file]}
    assert imports_of(f"isogloss.{path.stem}", path, modules()) <= allowed


def test_a_room_imports_only_rooms_before_it():
    known = modules()
    wrong = []
    for name, path in known.items():
        room = room_of(name)
        if room in (None, "STANDALONE"):
            continue
        for other in imports_of(name, path, known):
            if ROOMS.index(room_of(other)) > ROOMS.index(room):
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_there_is_no_circle():
    """Among what is imported when a module is; a door may know the file that opens it later."""
    known = modules()
    doors = set()
    for door in DOORS_OF_RUNS.values():
        doors |= {f"isogloss.{module}" for module in door.modules}
    graph = {}
    for name, path in known.items():
        late = imports_of(name, path, known) - at_the_top(name, known)
        graph[name] = imports_of(name, path, known) - {name} - (late & doors)
    while graph:
        leaves = {name for name, imported in graph.items() if not imported & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


def test_there_is_no_circle_of_benchmarks():
    known = {f"benchmarks.{path.stem}": path for path in (ROOT / "benchmarks").glob("*.py")}
    graph = {name: imports_of(name, path, known) for name, path in known.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError


def test_the_training_script_reads_like_the_algorithm():
    text = (ROOT / "distill.py").read_text()
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("isogloss"):
            names += node.names
    assert len(text.splitlines()) <= 500
    assert len(names) <= 30


def test_no_folder_is_a_list():
    for folder in [ROOT, *(ROOT / "isogloss").rglob("*"), ROOT / "projection_tools"]:
        if folder.is_dir():
            files = [path for path in folder.glob("*.py") if path.stem not in {"__init__", *DOORS}]
            assert len(files) <= MOST_MODULES, f"{folder}: {len(files)} modules"
