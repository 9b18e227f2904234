"""Every script of benchmarks/ starts; those that take seconds at their smallest size run."""

import json
import runpy
import sys

import pytest

from conftest import ROOT

# gpu_job.py holds checks of gpu.py and is no script
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
SCRIPTS.remove("gpu_job.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_is_for(script, monkeypatch, capsys):
    path = str(ROOT / "benchmarks" / script)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code in (None, 0)
    printed = capsys.readouterr()
    assert script.removesuffix(".py") in printed.out + printed.err


def test_a_loss_is_measured(capsys):
    from benchmarks.loss import main

    for path in ("tiled", "plain"):
        main("piece_kl", tokens=8, V=200, W=300, H=8, teacher_H=8, path=path, times=1, here=True)
        assert json.loads(capsys.readouterr().out)["loss"] == "piece_kl"
