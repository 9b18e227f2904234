"""The simplest run imports the hall alone; a door knows the hall, and no door knows another one."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from isogloss.doors import DOORS, TOOLS
from isogloss.projection_tools.files import cached_translation
from isogloss.projection_tools.tokenizers import Pair
from jobs import short_run
from test_imports import at_the_top, imports_of, modules

MOST_LINES = 18_250  # that the simplest run imports
# What it imports, a line each: the last words of its output.
PROGRAM = """
import sys
from isogloss import distill
distill.cli(sys.argv[1:])
for module in list(sys.modules.values()):
    print("imported", getattr(module, "__file__", None))
"""


def of_door(name):
    return {f"isogloss.{module}" for module in DOORS[name].modules}


BEHIND_DOORS = set().union(*map(of_door, DOORS))
OF_TOOLS = {f"isogloss.{module}" for module in TOOLS}


@pytest.fixture(scope="module")
def simplest(models, texts, tmp_path_factory):
    """Return the paths of our files that a run of one teacher on texts imports.

    It evaluates, saves and exports.
    """
    folder = tmp_path_factory.mktemp("simplest")
    cached_translation(Pair.load(*map(str, models)))  # from here on it is on disk
    flags = short_run(models, texts, folder, "--steps=2", "--eval_rows=4",
                      f"--output_dir={folder / 'run'}", f"--export={folder / 'student'}")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *flags], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "student").is_dir()
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("imported")]
    return {Path(line) for line in lines if line.startswith(str(ROOT))}


def test_the_simplest_run_imports_the_hall_alone(simplest):
    paths = modules()
    behind = {name for name in BEHIND_DOORS | OF_TOOLS if paths[name] in simplest}
    assert not behind
    sizes = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in simplest
             if ".venv" not in path.parts}
    assert sum(sizes.values()) <= MOST_LINES, sorted(sizes.items(), key=lambda item: -item[1])


def test_no_door_imports_another_one():
    paths = modules()
    wrong = []
    for name in DOORS:
        for module in of_door(name):
            others = imports_of(module, paths[module], paths) & BEHIND_DOORS - of_door(name)
            wrong += [f"{module} imports {other}" for other in others]
    for module in OF_TOOLS:
        others = imports_of(module, paths[module], paths) & BEHIND_DOORS
        wrong += [f"{module} imports {other}" for other in others]
    assert not wrong


def test_a_module_is_behind_one_door():
    modules_of_doors = [module for door in DOORS.values() for module in door.modules]
    assert len(set(modules_of_doors)) == len(modules_of_doors)
    assert not BEHIND_DOORS & OF_TOOLS
    assert BEHIND_DOORS | OF_TOOLS <= modules().keys()


def test_the_hall_opens_a_door_inside_a_function():
    """What is imported at the top of a file of the hall is of the hall."""
    paths = modules()
    doors = BEHIND_DOORS | OF_TOOLS
    todo = {"isogloss.distill"}
    seen = set()
    while todo:
        module = todo.pop()
        seen.add(module)
        todo |= at_the_top(module, paths) - seen
    assert not seen & doors
