"""Installed from a wheel, without a checkout: modules, commands, configurations."""

import argparse
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

import flows
from conftest import ROOT
from isogloss import __version__
from isogloss.command import OF_LAUNCHER, split_words, with_free_port
from jobs import write_corpus


@pytest.mark.parametrize("words, launcher", [
    (["--num_gpus", "2", "--student", "S"], 2),
    (["--student=S", "--num_gpus", "2"], 0),
    (["--master_port=1", "--nopack"], 1),
    (["--num_nodes", "2", "--ds-config", "x.json"], 2),
    (["--num_gpus=1"], 1),
    (["--num_gpus=1", "--lr", "1e-4"], 1),
])
def test_words_before_the_first_flag_of_ours_are_the_launchers(words, launcher):
    assert split_words(words) == (words[:launcher], words[launcher:])


def test_flags_of_the_launcher_are_those_of_deepspeed(monkeypatch):
    from deepspeed.launcher import runner

    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args",
                        lambda parser, args=None: parsers.append(parser))
    runner.parse_args([])
    options = [option for action in parsers[0]._actions for option in action.option_strings]
    assert {option[2:] for option in options if option.startswith("--")} - {"help"} == OF_LAUNCHER


COMMAND = """
import sys
from isogloss.command import main
try:
    main()
finally:
    assert not sys.modules.keys() & {"torch", "deepspeed"}
"""


@pytest.mark.parametrize("words, line", [
    (["--lr", "1e-4", "--student", "S"], "unknown flag --lr; it is --learning_rate"),
    (["--num_gpus", "2", "--studnt", "S"], "unknown flag --studnt; did you mean --student?"),
    ([], "nothing to do; begin with: "), (["--num_gpus", "2"], "nothing to do; begin with: "),
])
def test_a_wrong_command_line_ends_before_the_launcher_is_imported(words, line):
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert line in done.stderr


def test_a_job_of_one_node_has_a_port_of_its_own():
    [*words, port] = with_free_port(["--num_gpus", "2"])
    assert words == ["--num_gpus", "2"]
    assert 1024 < int(port.removeprefix("--master_port=")) < 65536
    for words in (["--master_port", "1"], ["--hostfile=h"], ["-H", "h"]):
        assert with_free_port(words) == words


def test_one_version_everywhere():
    expected = {"README.md": ["Version {}.", "version = {{{}}}"], "CHANGELOG.md": ["\n## {}"],
                "CITATION.cff": ["\nversion: {}\n", "\n  version: {}\n"]}
    for name, lines in expected.items():
        text = (ROOT / name).read_text()
        for line in lines:
            assert line.format(__version__) in text, (name, line)


HELP = {
    "distill": "--student TEXT", "cache": "--output TEXT", "report": "--png TEXT",
    "projection": "usage: python -m projection_tools COMMAND", "plan": "RECIPE", "export": "RUN",
    "tasks": "--tasks TEXT", "transfer": "--tokenizer TEXT", "write": "--keep TEXT",
    "--help": "isogloss doctor|distill|"}
HELPED = """
import contextlib, sys
from isogloss.command import isogloss
for name in sys.argv[1:]:
    sys.argv = ["isogloss", name, "--help"]
    with contextlib.suppress(SystemExit):
        isogloss()
    print(f"end of {name}")
    assert not sys.modules.keys() & {"torch", "transformers"}, name
"""


def test_one_command_has_all_others_whose_help_waits_for_no_torch():
    done = subprocess.run([sys.executable, "-c", HELPED, *HELP], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    rest = done.stdout
    for name, line in HELP.items():
        said, _, rest = rest.partition(f"end of {name}\n")
        assert line in said, (name, said)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(folder of an environment's programs, its variables): the packages of this one, and a wheel.
    """
    pytest.importorskip("hatchling")
    programs = flows.install(tmp_path_factory.mktemp("installed"))
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return programs, variables | {"PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize("flow", [flow for flow in flows.FLOWS if flow.is_cheap],
                         ids=lambda flow: flow.name)
def test_what_a_newcomer_types_goes_at_the_first_try(installed, flow, tmp_path):
    """Those that start no rank; `make flows` types all."""
    trouble, _ = flows.type_flow(flow, tmp_path, installed[1], tmp_path / "log")
    assert not trouble, (tmp_path / "log").read_text()


def run(installed, folder, *words):
    """Run a program of the environment in a folder; return what it printed."""
    programs, variables = installed
    done = subprocess.run([programs / words[0], *words[1:]], cwd=folder, env=variables,
                          capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


RECIPE = "recipes/qwen3_4b_to_llama_3.2_1b.yaml"
# what a new process of each would do; they import the same
TOOLS = f"""
import contextlib, runpy, sys
from importlib import metadata, util
import isogloss
assert "torch" not in sys.modules
assert util.find_spec("isogloss.demo") is None and util.find_spec("isogloss.demo_report") is None
from isogloss import CrossTokenizerKD, losses, align
print(isogloss.__version__, losses.__file__)
for words in (["isogloss-plan", {RECIPE!r}], ["isogloss", "doctor"], ["build", "--help"],
              ["isogloss-projection", "cut", "--help"]):
    print("===")
    sys.argv = words
    with contextlib.suppress(SystemExit):
        if words[0] == "build":
            runpy.run_module("isogloss.projection_tools.build", run_name="__main__")
        else:
            [program] = metadata.entry_points(group="console_scripts", name=words[0])
            program.load()()
"""


@pytest.mark.slow
def test_modules_and_tools_of_an_installation(installed, tmp_path):
    printed = run(installed, tmp_path, "python", "-c", TOOLS)
    modules, planned, found, built, cut = printed.split("===\n")
    version, path = modules.split()
    assert version == __version__
    assert path.startswith(str(installed[0].parent))
    assert RECIPE in planned and "--top_k" in built and "--threshold" in cut
    assert f"torch {metadata.version('torch')}" in found and "GiB free" in found
    assert "MISSING" not in found and "GPU" in found
    assert "--teacher_output_topk" in run(installed, tmp_path, "isogloss-distill", "--help")


@pytest.mark.slow
def test_the_main_job_runs_from_another_folder(installed, models, texts, tmp_path):
    """As a user types it, with a ready-made configuration and an export."""
    flags = dict(student=models[0], teacher=models[1], data=write_corpus(tmp_path, texts, 40),
                 ds_config="ds_configs/zero2.json", learning_rate=1e-3, steps=2, max_length=64,
                 num_workers=0, output_dir="run", export="run/student")
    run(installed, tmp_path, "isogloss-distill", "--num_gpus=1",
        *(f"--{name}={value}" for name, value in flags.items()))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and last["kd"] > 0
    assert (tmp_path / "run" / "student" / "model.safetensors").exists()
