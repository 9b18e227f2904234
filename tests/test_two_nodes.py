"""A job on two nodes, by ssh and a hostfile and by the Slurm script: the curve of one node."""

import json
import os
import shlex
import subprocess

import pytest

import ranks
from conftest import ROOT
from jobs import ds_config, losses_of, run_all, write_corpus
from two_nodes import command_on_two_nodes, why_not

LACKING = why_not()
two_nodes = pytest.mark.skipif(LACKING is not None, reason=f"two nodes: {LACKING}")

# What the Slurm script calls, for the nodes of tests/two_nodes.py.
SRUN = """\
#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 64
shift
names='^(MASTER|SLURM|OMP|ISOGLOSS)_'
variables=$(env | grep -E "$names" | sed 's/^/export /; s/$/;/' | tr '\\n' ' ')
exec pdsh -S -R ssh -w node-a,node-b "$variables cd $PWD; exec $(printf '%q ' "$@")"
"""
SCONTROL = """\
#!/bin/bash
[ "$1 $2 $3" = "show hostnames node-[a-b]" ] || exit 64
printf 'node-a\\nnode-b\\n'
"""


def run_on_two_nodes(nodes, commands, logs):
    """Run {name: words} in turn on node-a, beside a node-b; return {name: exit code}.

    See tests/two_nodes.py for the nodes' folder; what is printed goes to logs/name.log.
    """
    (nodes / "environment").write_text("OMP_NUM_THREADS=1\n")  # DeepSpeed's .deepspeed_env
    script = [f"export DS_ENV_FILE={nodes / 'environment'} OMP_NUM_THREADS=1"]
    for name, words in commands.items():
        log = shlex.quote(f"{logs}/{name}.log")
        line = shlex.join(map(str, words))
        script.append(f"{line} > {log} 2>&1; echo {name}: $?")
    command = command_on_two_nodes(nodes, ["bash", "-c", "\n".join(script)])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    codes = {}
    for line in done.stdout.splitlines():
        name, code = line.split(": ")
        codes[name] = int(code)
    assert codes.keys() == commands.keys(), done.stderr
    return codes


def slurm_environment(folder):
    """Return what sbatch would set on the first of two nodes of two GPUs, and where srun is."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": ROOT,
            "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": 7, "SLURM_NNODES": 2,
            "SLURM_GPUS_ON_NODE": 2}


@pytest.mark.slow
@two_nodes
def test_two_nodes_have_the_curve_of_one(models, texts, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    flags = {
        "student": models[0], "teacher": models[1], "teacher_tp": 2, "max_length": 60,
        "data": write_corpus(tmp_path, texts, 40), "steps": 2, "num_workers": 0,
        "ds_config": ds_config(tmp_path / "ds.json", 2, 1, 2),
    }

    def argv(**more):
        return [f"--{name}={value}" for name, value in (flags | more).items()]

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(flags, default=str))  # JSON is YAML
    hostfile = [".venv/bin/deepspeed", "--hostfile", nodes / "hostfile", "--master_addr", "node-a",
                f"--master_port={ranks.free_port()}", "distill.py"]
    slurm = [f"{name}={value}" for name, value in slurm_environment(tmp_path).items()]
    commands = {
        "hostfile": [*hostfile, *argv(output_dir=tmp_path / "hostfile")],
        "not shared": [*hostfile, *argv(output_dir=nodes / "not_shared" / "run")],
        "resumed by slurm": ["env", *slurm, "bash", "recipes/slurm.sh", recipe, "--steps=3",
                             f"--output_dir={tmp_path / 'hostfile'}"],
    }
    codes = run_on_two_nodes(nodes, commands, tmp_path)
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert {name for name, code in codes.items() if code} == {"not shared"}, logs

    one_node = tmp_path / "one_node"
    run_all(4, argv(output_dir=one_node), argv(output_dir=one_node, steps=3))
    losses = [[line["loss"] for line in losses_of(output) if "loss" in line]
              for output in (tmp_path / "hostfile", one_node)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 3
    refused = (tmp_path / "not shared.log").read_text()
    assert "rank 2 on node-b does not see what rank 0 on node-a writes there" in refused
