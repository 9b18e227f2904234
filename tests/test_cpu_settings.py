"""A program on a CPU gives itself the settings of its memory and its threads, once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isogloss.cpu_settings import ACCELERATORS, MARK, SETTINGS

PROGRAM = """
import json, os, signal, sys
from isogloss.cpu_settings import current_settings, restart_with_settings
{before}
os.write(2, b"start ")
restart_with_settings()
print(json.dumps([os.getpid(), sys.argv[1:], sys.flags.bytes_warning, current_settings(),
                  signal.getsignal(signal.SIGHUP) == signal.SIG_IGN]))
"""


def run_program(folder, settings, before="", options=(), preexec_fn=None):
    """Run PROGRAM with these settings alone; return (starts, its process id, what it printed)."""
    path = folder / "program.py"
    path.write_text(PROGRAM.format(before=before))
    unset = {*SETTINGS, MARK}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, *options, path, "--text=a b", "c"]
    process = subprocess.Popen(command, env=environment | settings, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=preexec_fn)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return errors.split().count("start"), process.pid, json.loads(output)


def values(settings):
    return {name: setting["value"] for name, setting in settings.items()}


def makers(settings):
    return {setting["set_by"] for setting in settings.values()}


def test_what_is_unset_is_set_in_the_same_process(tmp_path):
    def ignore_hangup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    starts, process, printed = run_program(tmp_path, {}, options=["-b"], preexec_fn=ignore_hangup)
    assert starts == 2
    assert printed[:3] == [process, ["--text=a b", "c"], 1]
    assert values(printed[3]) == SETTINGS and makers(printed[3]) == {"program"}
    assert printed[4]  # what nohup ignores stays ignored


@pytest.mark.parametrize("value", ["active", ""])
def test_what_the_user_has_set_stays(tmp_path, value):
    starts, _, printed = run_program(tmp_path, {"OMP_WAIT_POLICY": value})
    assert starts == 2
    assert values(printed[3]) == SETTINGS | {"OMP_WAIT_POLICY": value}
    assert printed[3]["OMP_WAIT_POLICY"]["set_by"] == "user"


def test_with_all_set_nothing_starts_again(tmp_path):
    chosen = dict.fromkeys(SETTINGS, "")
    starts, _, printed = run_program(tmp_path, chosen)
    assert starts == 1 and values(printed[3]) == chosen and makers(printed[3]) == {"user"}


def test_a_setting_that_is_lost_on_the_way_does_not_start_it_for_ever(tmp_path):
    starts, _, printed = run_program(tmp_path, {MARK: "OMP_WAIT_POLICY GLIBC_TUNABLES"})
    assert starts == 1 and makers(printed[3]) == {None}


@pytest.mark.parametrize("case", ["accelerator", "torch", "debugger"])
def test_it_starts_once_where_it_would_gain_or_own_nothing(tmp_path, case):
    """Another accelerator; a process into which torch was imported already; a debugger's."""
    settings = {"DS_ACCELERATOR": "cuda"} if case == "accelerator" else {}
    before = {"torch": "sys.modules['torch'] = None", "debugger": "sys.settrace(lambda *_: None)"}
    starts, _, printed = run_program(tmp_path, settings, before.get(case, ""))
    assert starts == 1 and makers(printed[3]) == {None}


def test_without_a_choice_the_device_files_decide(monkeypatch):
    from isogloss import cpu_settings

    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu128")
    assert all(Path(device).is_absolute() for device in ACCELERATORS)
    monkeypatch.setattr(cpu_settings, "ACCELERATORS", ("/dev/none", "/dev/null"))
    assert not cpu_settings.computes_on_cpu()
    monkeypatch.setattr(cpu_settings, "ACCELERATORS", ("/dev/none",))
    assert cpu_settings.computes_on_cpu()
