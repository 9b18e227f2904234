"""Run wrong command lines on real ranks: each has to end with one line and exit code 2.

The cases are in the test_wrong_*.py: {flags to change in a good command line, separated by spaces:
part of the line}.  "{folder}" in both stands for the folder of the wrong files.
"""

import os
import sys
import tempfile
from typing import NamedTuple

import pytest

import ranks
from isogloss.command import tool
from isogloss.projection_tools.__main__ import run
from jobs import run_distill, short_run


class Outcome(NamedTuple):
    """How a command line ended on a rank."""

    exit_code: int
    stderr: str


def good_line(models, texts, folder):
    """Return flags of a good run of one step, which writes to folder/run."""
    return short_run(models, texts, folder, "--steps=1", "--max_length=120",
                     f"--output_dir={folder / 'run'}", micro_batch_size=4)


def outcomes(folder, base, changes):
    """Return the Outcome of several command lines, one after the other on this rank."""
    ended = []
    for change in changes:
        with tempfile.TemporaryFile("w+") as file:
            kept = os.dup(2)
            os.dup2(file.fileno(), 2)
            [code] = run_distill([[*base, *change.replace("{folder}", str(folder)).split()]])
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            ended.append(Outcome(code, file.read()))
    return ended


def run_wrong(world, cases, base, folder, has_steps=False):
    """Return {change: (Outcome of every rank, with "{folder}" for it)}.

    Args:
        world: ranks.
        cases: changes of the command line.
        base: flags of a good command line, which writes to folder/run.
        folder: of the wrong files.
        has_steps: whether the runs begin; else nothing may be written.
    """
    on_ranks = ranks.run(world, outcomes, folder, base, list(cases))
    assert has_steps or not (folder / "run").exists()
    ended = {}
    for change, of_ranks in zip(cases, zip(*on_ranks, strict=True), strict=True):
        ended[change] = [outcome._replace(stderr=outcome.stderr.replace(str(folder), "{folder}"))
                         for outcome in of_ranks]
    return ended


def check_one_line(of_ranks, message):
    """Assert that all ranks ended with code 2, and that the first alone said why."""
    first, *others = of_ranks
    assert first.exit_code == 2, first
    assert first.stderr.startswith("distill.py: "), first.stderr
    assert first.stderr.count("\n") == 1, first.stderr
    assert message in first.stderr, first.stderr
    for other in others:  # one rank speaks for all
        assert other.exit_code == 2 and other.stderr == "", other


def error_line(capsys, module, argv, program=None, printed=None):
    """Return the one line with which a tool's command line ends, with code 2.

    Args:
        program: isogloss. and one of `command.TOOLS`, as the line begins; None: the module.
        printed: what it prints before; None: anything.
    """
    with pytest.raises(SystemExit) as ended:
        if program:
            tool(program.removeprefix("isogloss."), argv)
        else:
            run(module.__name__.rpartition(".")[2], argv)
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and printed in (None, out)
    assert error.count("\n") == 1, error
    assert error.startswith(f"{program or module.__name__.removeprefix('isogloss.')}: "), error
    return error
