"""What is copied stands alone; nothing imports upwards or in circles."""

import ast
import subprocess
import sys

import pytest

from conftest import ROOT

STANDALONE = {  # file: which of our files it takes where it finds them beside it
    "align.py": set(),
    "align_dp.py": {"align"},
    "losses.py": {"cpu_kernels", "gpu_kernels", "gpu_chunks", "vocab_parallel"},
    "cpu_kernels.py": set(),
    "gpu_kernels.py": set(),
    "gpu_chunks.py": {"gpu_kernels"},
    "vocab_parallel.py": set(),
    "teacher_mixing.py": set(),
    "translation.py": {"losses", "vocab_parallel"},
    "spelling.py": {"align"},
    "cross_tokenizer.py": {"align", "losses", "translation", "spelling"},
    "tiles.py": set(),
    "rollout.py": set(),
    "sandbox.py": set(),
    "ipc.py": set(),
}


def modules():
    """Return {module: path} of everything that runs, tests and benchmarks apart."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("isogloss/*.py"), *ROOT.glob("projection_tools/*.py")]
    found = {}
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path
    return found


def imports_of(path, known):
    """Return the modules of ours that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names & known.keys()


@pytest.mark.parametrize("file", STANDALONE)
def test_what_is_copied_imports_nothing_of_ours(file):
    assert imports_of(ROOT / file, modules()) <= STANDALONE[file]


def test_nothing_is_imported_upwards():
    known = modules()
    for name, path in known.items():
        imported = imports_of(path, known)
        assert name == "distill" or "distill" not in imported, name
        if not name.startswith("isogloss") and name not in ("distill",):
            assert not any(other.startswith("isogloss") for other in imported), name


def test_there_is_no_circle():
    known = modules()
    graph = {name: imports_of(path, known) - {name} for name, path in known.items()}
    while graph:
        leaves = {name for name, imported in graph.items() if not imported & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


@pytest.mark.slow
def test_help_needs_no_ranks():
    done = subprocess.run([sys.executable, "distill.py", "--help"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0 and "--teacher_output_topk" in done.stdout
