"""Jobs of real models, on two nodes, for epochs; one whose rank is killed or fails ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
import ranks
from conftest import ROOT, asset
from isogloss.job.several.others import is_running
from launched import no_trouble, rank_with_trouble, wait_until


@pytest.mark.slow
def test_real_models(tmp_path):
    """GPT-Neo with 14k byte-level tokens teaches Llama with 512 SentencePiece pieces."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # gently, because both have seen such stories
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}
    config = jobs.ds_config(tmp_path / "ds.json", 2, 4, 1, optimizer=optimizer, csv_monitor=monitor)
    flags = [
        "--eval_samples=3", "--prompt_tokens=6", "--rollout_tokens=12",
        f"--student={asset('models', 'stories260K')}",
        f"--teacher={asset('models', 'tinytalk_neo_3M')}",
        f"--data={asset('text', 'tinystories_1000.json')}",
        f"--ds_config={config}", "--steps=8", "--eval_rows=8", "--max_length=128",
        f"--output_dir={tmp_path}", f"--export={tmp_path / 'student'}"]
    assert ranks.run(2, jobs.run_with_output, flags, str(tmp_path / "output")) == [[0]] * 2
    message = (tmp_path / "output0").read_text()
    assert "(piece_kl, weight 1)" in message and "8/8 steps" in message
    assert "kd=" in message and "tok/s=" in message
    first, *steps, last = jobs.losses_of(tmp_path, start=-1)
    assert [line["step"] for line in (first, *steps, last)] == [0, *range(1, 9), 8]
    assert last["eval/kd"] < first["eval/kd"]
    assert first["eval/teacher_bits_per_byte"] < last["eval/student_bits_per_byte"] < 3
    assert first["eval/aligned_bytes"] > 0.9 and steps[0]["tokens"] > 8 * 60
    # a monitor of DeepSpeed has what metrics.jsonl has
    for key in ("loss", "kd", "eval/student_bits_per_byte", "aligned_bytes"):
        name = key.replace("/", "_") if key.startswith("eval/") else f"train_{key}"
        rows = (tmp_path / "monitor" / f"{name}.csv").read_text().splitlines()[1:]
        logged = [line for line in (first, *steps, last) if key in line]
        assert [row.split(",")[0] for row in rows] == [str(line["step"]) for line in logged]
        assert [float(row.split(",")[1]) for row in rows] == [line[key] for line in logged]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["row"]) for line in samples] == [
        (step, row) for step in (0, 8) for row in range(3)]
    stories = json.loads(asset("text", "tinystories_1000.json").read_text())
    for line in samples:
        story = stories[line["row"]]
        story = story if isinstance(story, str) else story["text"]
        assert story.startswith(line["prompt"] + line["reference"]) and len(line["text"]) > 5
    assert f"step 8: {' '.join(samples[3]['prompt'].split())} >> " in message
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["ranks"] == 2 and record["config"]["steps"] == 8
    assert record["versions"]["deepspeed"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert model.config.vocab_size == len(tokenizer) == 512


@pytest.mark.slow
@pytest.mark.parametrize("flag, name, at_once", [
    ("--teacher_tp=2", "rank 1", False),
    # as a launcher's SIGTERM may end the other rank before it has noticed
    ("--teacher_ranks=1", "teacher rank 0", True),
])
def test_a_killed_rank_ends_the_job_with_a_line_that_names_it(
        models, texts, tmp_path, flag, name, at_once):
    """A shard of the teacher dies in mid-step; nothing but the other rank watches it."""
    output = tmp_path / "run"
    flags = jobs.short_run(
        models, texts, tmp_path, flag, "--save_every=1", f"--output_dir={output}")
    group = ranks.start(2, rank_with_trouble, [*flags, "--steps=100000"], tmp_path, no_trouble)
    (other, _), (victim, _) = group
    wait_until(lambda: (output / "checkpoints" / "step_0000003").exists() or other.exitcode)
    assert other.is_alive(), (tmp_path / "stderr0").read_text()
    os.kill(victim.pid, signal.SIGKILL)
    if at_once:
        while is_running(victim.pid):
            pass
        os.kill(other.pid, signal.SIGTERM)
    other.join(60)
    assert other.exitcode not in (0, None)
    message = (tmp_path / "stderr0").read_text()
    assert f"distill.py: {name} (process {victim.pid}) ended in mid-step" in message, message
    reached = jobs.losses_of(output)[-1]["step"]
    jobs.run_all(2, [*flags, f"--steps={reached + 2}"])
    assert jobs.losses_of(output)[-1]["step"] == reached + 2


@pytest.mark.slow
def test_epochs_say_how_many_steps_there_are(models, texts, tmp_path):
    """18 rows to train on, once and a half, 4 a step; a resumed run takes those that are left."""
    common = jobs.short_run(
        models, texts, tmp_path, "--epochs=1.5", "--eval_rows=2", "--num_workers=0")
    flags = [*common, "--save_every=3", "--keep_checkpoints=9", f"--output_dir={tmp_path / 'run'}"]
    # within the first epoch, and within the second
    middles = {3: tmp_path / "from 3", 6: tmp_path / "from 6"}
    resumed = []
    for step, output in middles.items():
        saved = tmp_path / "run" / "checkpoints" / f"step_{step:07d}"
        resumed.append([*common, f"--resume={saved}", f"--output_dir={output}"])
    runs = [flags, flags, [*flags, "--steps=9"], [*flags, "--steps=1000"], [*flags, "--streaming"]]
    assert ranks.run(2, jobs.run_distill, [*runs, *resumed]) == [[0, 0, 2, 2, 2, 0, 0]] * 2
    lines = [line for line in jobs.losses_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 8))
    for step, output in middles.items():
        assert [line for line in jobs.losses_of(output) if "loss" in line] == lines[step:]


BROKEN = """
from isogloss import distill
from isogloss.objective import objective
objective.LossTerms.reduce = lambda *_: 1 / 0
distill.cli()
"""


@pytest.mark.slow
def test_an_error_in_a_step_ends_the_process(models, texts, tmp_path):
    """Although its data worker ignores the signal that Python ends workers with."""
    flags = jobs.short_run(models, texts, tmp_path, "--steps=9", "--num_workers=1",
                           "--eval_every=0", f"--output_dir={tmp_path / 'run'}", stage=0)
    environment = dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ranks.free_port()))
    command = [sys.executable, "-c", BROKEN, *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=180)
    assert done.returncode == 1, done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr, done.stderr


def by_torchrun(argv):
    nodes = []
    port = ranks.free_port()
    for number in range(2):
        command = [Path(sys.executable).with_name("torchrun"), "--nnodes=2", "--nproc_per_node=2",
                   "--master_addr=127.0.0.1", f"--master_port={port}", f"--node_rank={number}",
                   "distill.py", *argv]
        nodes.append(subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE))
    for node in nodes:
        message = node.communicate(timeout=600)[1]
        assert node.returncode == 0, message


@pytest.mark.slow
def test_two_nodes(models, texts, tmp_path):
    """Two launches of two ranks are one job; it learns what its student learns on one node."""
    flags = jobs.short_run(
        models, texts, tmp_path, "--steps=3", "--eval_rows=4", micro_batch_size=1)
    by_torchrun([*flags, "--teacher_ranks=1", f"--output_dir={tmp_path / 'nodes'}"])
    jobs.run_all(2, [*flags, f"--output_dir={tmp_path / 'one'}"])
    # fractions such as eval/joined_mass are sums of probabilities, near 0 with their error
    curves = [jobs.losses_of(tmp_path / name, -1) for name in ("one", "nodes")]
    jobs.check_same_curve(*curves, 1e-5, 1e-6)


def test_utilization_where_the_peak_is_known():
    from isogloss.student.options.peaks import utilization

    assert utilization("cpu", 1e9, 1e4, 1.0, 1) == {}
    hopper = utilization("NVIDIA H100 80GB HBM3", 1e9, 1e5, 2.0, 2)
    assert hopper["mfu"] == 6e14 / (4 * 989e12)
    pcie = utilization("NVIDIA H100 PCIe", 1e9, 1e5, 2.0, 2)
    assert pcie["mfu"] == 6e14 / (4 * 756e12)
