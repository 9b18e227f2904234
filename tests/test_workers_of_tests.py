"""`make test` runs a file in one worker: what its tests share is set up once."""

import shlex
import subprocess
import sys

from conftest import ROOT

TESTS = """
import os
import pathlib

import pytest


@pytest.mark.parametrize("number", range(20))
def test(number):
    with pathlib.Path(__file__).with_suffix(".workers").open("a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def flags_of_make_test():
    """Return the words with which `make test` starts pytest, without its --durations and path."""
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/installed-dev", "test"]
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    words = shlex.split(printed.splitlines()[-1])
    assert words[1:3] == ["-m", "pytest"] and words[-2:] == ["--durations=20", "tests"]
    return words[3:-2]


def test_a_file_runs_in_one_worker(tmp_path):
    """A version of pytest once ignored the groups that a version of xdist had made, silently."""
    names = "test_one", "test_two", "test_three"
    for name in names:
        (tmp_path / f"{name}.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", *flags_of_make_test(), "-p", "no:cacheprovider"]
    done = subprocess.run([*command, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    workers = [(tmp_path / f"{name}.workers").read_text().split() for name in names]
    for used in workers:
        assert len(used) == 20 and len(set(used)) == 1, workers
    assert {used[0] for used in workers} == {"gw0", "gw1"}
