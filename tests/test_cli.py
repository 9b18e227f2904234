"""The command line: wrong input ends with one line, and real jobs run through real launchers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from conftest import ROOT, asset
from isogloss.job.ipc import is_running
from isogloss.projection_tools.build import build_projection
from isogloss.projection_tools.files import as_tables, save_atomically
from isogloss.projection_tools.tokenizers import Pair
from jobs import ds_config, losses_of, run_distill, write_corpus
from wrong_input import Wrong, check_one_line, run_wrong

# --- wrong input ----------------------------------------------------------------------------------


def teachers(entries):
    """Return flags of several teachers, as JSON without spaces."""
    return f"--teacher= --teachers={entries}"


TWO_TOKENIZERS = '[{"model":"{folder}/one"},{"model":"{folder}/two"}]'

WRONG = {
    # flags
    "unknown flag": Wrong("--max_lenght=9",
                          "unknown flag --max_lenght; did you mean --max_length?"),
    "unknown flag like no other": Wrong("--qqq=1", "unknown flag --qqq; --help lists them all"),
    "a word without a flag": Wrong("student", "unexpected argument 'student'"),
    "text for a number": Wrong("--steps=many", "--steps=many: expected int, got str"),
    "half a step": Wrong("--steps=1.5", "--steps=1.5: expected int, got float"),
    "no step": Wrong("--steps=0", "--steps 0: expected 1 or more"),
    "resume=false": Wrong("--resume=false",
                          "--resume=false: expected auto, never or the directory"),
    "resume from nothing": Wrong("--resume={folder}",
                                 "is not a complete checkpoint; expected a folder step_*"),
    "not a number": Wrong("--kd_weight=nan", "--kd_weight=nan: expected float, got str"),
    "cold": Wrong("--temperature=0", "--temperature 0.0: expected 0.001 or more"),
    "export over something else": Wrong("--export={folder}",
                                        "would replace --output_dir"),
    # losses
    "no such loss": Wrong("--loss=kl", "--loss kl: expected one of piece_kl, event_kl"),
    "a mixture beyond 1": Wrong("--jsd_beta=1.5", "--jsd_beta 1.5: expected 0 to 1"),
    "a skew of nothing": Wrong("--skew_lambda=1",
                               "--skew_lambda 1.0: compares the teacher with itself"),
    "a ratio to nothing": Wrong("--dynamic_scale --ce_weight=0",
                                "needs both losses, because it scales"),
    "a projection of no use": Wrong("--learn_projection --loss=gold",
                                    "only --loss projection_kl trains one"),
    "nothing to learn": Wrong("--kd_weight=0 --ce_weight=0", "nothing would be learned"),
    "other tokenizers": Wrong("--loss=projection_kl --projection={folder}/swapped.pt",
                              "made for another student"),
    "no projection": Wrong("--loss=projection_kl --projection={folder}/text.json", "text.json"),
    # models
    "no teacher": Wrong("--teacher=", "--teacher is missing: give a hub id or a local path"),
    "missing model directory": Wrong("--student=./nowhere",
                                     "--student ./nowhere: no such directory"),
    "directory without a model": Wrong("--teacher={folder}", "cannot be loaded"),
    "no eos": Wrong("--student={folder}/no_eos", "its tokenizer has no eos token"),
    "a student without weights": Wrong("--student={folder}/no_weights",
                                       "its weights cannot be loaded"),
    "a teacher without weights": Wrong("--teacher={folder}/no_weights",
                                       "its weights cannot be loaded"),
    "short student": Wrong("--max_length=257", "has a context of 256 positions; use no more"),
    "short teacher": Wrong("--teacher_max_length=257", "--teacher_max_length 257"),
    "small head": Wrong("--student={folder}/small_head",
                        "its lm_head has 340 rows, but its tokenizer 350 ids"),
    # data
    "missing file": Wrong("--data={folder}/nowhere.jsonl",
                          "no such file, directory or glob match"),
    "file of another kind": Wrong("--data={folder}/notes.pdf",
                                  "files of kind .pdf; expected one of .txt"),
    "missing column": Wrong("--text_key=body",
                            "no column 'body'; it has text; name one of them with --text_key"),
    "empty data": Wrong("--data={folder}/empty.jsonl", "the data set is empty"),
    "a row that is null": Wrong("--data={folder}/null.jsonl",
                                "row 1 of 'text' is null, expected text"),
    "rows of numbers": Wrong("--data={folder}/numbers.jsonl",
                             "holds int64, expected text or chats"),
    "broken lines": Wrong("--data={folder}/broken.jsonl", "line 2 is not JSON"),
    "all held out": Wrong("--eval_rows=20", "the data has 20 rows, none is left to train on"),
    "chats without a template": Wrong("--data={folder}/chats.jsonl",
                                      "its tokenizer has no chat template, and"),
    # layouts
    "a teacher across nodes": Wrong("--teacher_tp=4",
                                    "--teacher_tp 4: does not divide the 2 ranks of a node"),
    "no rank for the student": Wrong("--teacher_ranks=2",
                                     "a node of this job has 2 ranks, and at least one"),
    "shards that do not divide": Wrong("--sequence_parallel=3",
                                       "3: does not divide the 2 ranks of the student"),
    "nothing to move": Wrong("--activation_offload",
                             "moves what --activation_checkpointing keeps; add --activation"),
    "whole and in shards": Wrong("--teacher_tp=2 --teacher_engine=replicated",
                                 "a whole copy per rank is degree 1"),
    # several teachers
    "two kinds of teachers": Wrong("--teachers=[{}]", "cannot be combined with --teacher"),
    "teachers that are no JSON": Wrong(teachers("[{,"), "--teachers: not valid JSON (line 1, col"),
    "a teacher with a typo": Wrong(teachers('[{"model":"a","los":"gold"}]'),
                                   "unknown teacher key 'los'"),
    "a teacher without a weight": Wrong(teachers('[{"model":"a","weight":0}]'),
                                        "expected a number above 0"),
    "a mean of two tokenizers": Wrong(teachers(TWO_TOKENIZERS) + " --teacher_weights=mean_p",
                                      "differ, so their predictions have no mean"),
    "routes of one teacher": Wrong("--route_key=domain",
                                   "chooses among teachers; list them with"),
    "routes without a key": Wrong(teachers('[{"model":"a","routes":["x"]}]'),
                                  "column that --route_key names"),
    "twins": Wrong(teachers('[{"model":"a"},{"model":"a"}]'),
                   "two teachers are named a; give each"),
    # ds_config
    "no ds_config": Wrong("--ds_config={folder}/nowhere.json",
                          "no such file; ready-made ones are ds_configs/pipeline.json, "),
    "ds_config is no JSON": Wrong("--ds_config={folder}/text.json", "text.json: not valid JSON"),
    "ds_config with a typo": Wrong("--ds_config={folder}/typo.json",
                                   "did you mean 'gradient_clipping'?"),
    "contradicting batch keys": Wrong("--ds_config={folder}/contradict.json",
                                      "is not 2 ranks x micro batch 4"),
    "ranks that do not divide": Wrong("--ds_config={folder}/odd.json",
                                      "train_batch_size 15 is not 2 ranks"),
    "unknown auto": Wrong("--ds_config={folder}/auto.json",
                          'gradient_clipping is "auto", which is filled only'),
    "two learning rates": Wrong("--learning_rate=1e-3", "says lr 0.001; drop one"),
    "no learning rate": Wrong("--ds_config={folder}/no_lr.json", "--learning_rate is missing"),
}


@pytest.fixture(scope="module")
def wrong(models, tokenizers, texts, tmp_path_factory):
    """{case: (Outcome on rank 0, on rank 1)} of every wrong command line."""
    folder = tmp_path_factory.mktemp("wrong")
    write_wrong_data(folder)
    write_wrong_ds_configs(folder)
    write_wrong_models(folder, models)
    swapped = Pair.of(*reversed(tokenizers))
    tables = as_tables(build_projection(swapped), swapped, "test")
    save_atomically(tables, folder / "swapped.pt")
    base = [f"--student={models[0]}", f"--teacher={models[1]}",
            f"--data={write_corpus(folder, texts, 20)}",
            f"--ds_config={ds_config(folder / 'good.json', 2, 4, 1)}", "--steps=1",
            "--max_length=120", f"--output_dir={folder / 'run'}"]
    ended = run_wrong(2, WRONG, base, folder)
    assert not (folder / "run").exists()  # nothing was written before the first step
    return ended


def write_wrong_data(folder):
    chat = [{"role": "user", "content": "a"}]
    files = {
        "empty.jsonl": "",
        "null.jsonl": '{"text": "a"}\n{"text": null}',
        "numbers.jsonl": '{"text": 1}\n{"text": 2}',
        "broken.jsonl": '{"text": "a"}\n{"text":',
        "chats.jsonl": json.dumps({"text": chat}),
        "notes.pdf": "%PDF",
        "text.json": "stage: 2",
    }
    for name, content in files.items():
        (folder / name).write_text(content)


def write_wrong_ds_configs(folder):
    ds_config(folder / "typo.json", 2, 4, 1, gradient_cliping=1.0)
    ds_config(folder / "contradict.json", 2, 4, 1, train_batch_size=16)
    ds_config(folder / "odd.json", 2, "auto", "auto", train_batch_size=15)
    ds_config(folder / "auto.json", 2, 4, 1, gradient_clipping="auto")
    no_rate = {"type": "AdamW", "params": {"lr": "auto"}}
    ds_config(folder / "no_lr.json", 2, 4, 1, optimizer=no_rate)


def write_wrong_models(folder, models):
    for name in ("no_eos", "small_head", "no_weights"):
        (folder / name).mkdir()
        for file in models[0].iterdir():
            (folder / name / file.name).symlink_to(file)
    (folder / "no_weights" / "model.safetensors").unlink()
    edit_json(folder / "no_eos" / "tokenizer_config.json", eos_token=None)
    edit_json(folder / "small_head" / "config.json", vocab_size=340)
    for name, model in zip(("one", "two"), models):
        (folder / name).symlink_to(model)


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_ends_with_one_line_and_code_2(wrong, case):
    check_one_line(wrong[case], WRONG[case].message)


# --- real launches --------------------------------------------------------------------------------


def launcher(num_ranks, *flags):
    """Return the command line of DeepSpeed's launcher."""
    program = Path(sys.executable).with_name("deepspeed")
    port = ranks.free_port()
    return [program, f"--num_gpus={num_ranks}", f"--master_port={port}", "distill.py", *flags]


def launch(num_ranks, *flags, environment=None):
    """Run the real launcher to its end."""
    command = launcher(num_ranks, *flags)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def start_launcher(num_ranks, *flags):
    """Start the real launcher."""
    command = launcher(num_ranks, *flags)
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_real_models_through_the_launcher(tmp_path):
    """GPT-Neo with 14k byte-level tokens teaches Llama with 512 SentencePiece pieces."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # gently, because both have seen such stories
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}
    config = ds_config(tmp_path / "ds.json", 2, 4, 1, optimizer=optimizer, csv_monitor=monitor)
    flags = [
        "--eval_samples=3", "--prompt_tokens=6", "--rollout_tokens=12",
        f"--student={asset('models', 'stories260K')}",
        f"--teacher={asset('models', 'tinytalk_neo_3M')}",
        f"--data={asset('text', 'tinystories_1000.json')}",
        f"--ds_config={config}", "--steps=12", "--eval_rows=16", "--max_length=128",
        f"--output_dir={tmp_path}", f"--export={tmp_path / 'student'}"]
    done = launch(2, *flags)
    assert done.returncode == 0, done.stderr
    assert "piece_kl: 100%" in done.stderr and "kd=" in done.stderr and "tok/s=" in done.stderr
    first, *steps, last = losses_of(tmp_path, start=-1)
    assert [line["step"] for line in (first, *steps, last)] == [0, *range(1, 13), 12]
    assert last["eval/kd"] < first["eval/kd"]
    assert first["eval/teacher_bits_per_byte"] < last["eval/student_bits_per_byte"] < 3
    assert first["eval/aligned_bytes"] > 0.9 and steps[0]["tokens"] > 8 * 60
    # a monitor of DeepSpeed has what metrics.jsonl has
    for key in ("loss", "kd", "eval/student_bits_per_byte", "aligned_bytes"):
        rows = (tmp_path / "monitor" / f"{key.replace('/', '_')}.csv").read_text().splitlines()[1:]
        logged = [line for line in (first, *steps, last) if key in line]
        assert [row.split(",")[0] for row in rows] == [str(line["step"]) for line in logged]
        assert [float(row.split(",")[1]) for row in rows] == [line[key] for line in logged]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["row"]) for line in samples] == [
        (step, row) for step in (0, 12) for row in range(3)]
    stories = json.loads(asset("text", "tinystories_1000.json").read_text())
    for line in samples:
        story = stories[line["row"]]
        story = story if isinstance(story, str) else story["text"]
        assert story.startswith(line["prompt"] + line["reference"]) and len(line["text"]) > 5
    assert f"step 12: {' '.join(samples[3]['prompt'].split())} >> " in done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["ranks"] == 2 and record["config"]["steps"] == 12
    assert record["versions"]["deepspeed"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert model.config.vocab_size == len(tokenizer) == 512


def small_run(models, texts, folder, *flags, stage=2, micro_batch_size=2):
    """Return the command line of a run on short texts."""
    config = ds_config(folder / "ds.json", stage, micro_batch_size, 1)
    return [f"--student={models[0]}", f"--teacher={models[1]}",
            f"--data={write_corpus(folder, texts, 20)}", f"--ds_config={config}",
            "--max_length=60", *flags]


def descendants(process):
    """List the ids of the processes that a process has started, parents before their children."""
    ids = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(word) for word in file.read_text().split()]
        except OSError:  # a thread that has ended meanwhile
            continue
        for child in children:
            ids += [child, *descendants(child)]
    return ids


def process_of_rank(launcher_process, local_rank):
    """Return the id of the process that a launcher has started for a rank."""
    for process in descendants(launcher_process):
        try:
            words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if f"--local_rank={local_rank}" in words:
            return process  # before its data workers, which have the same command line
    raise AssertionError(f"no process of rank {local_rank}")


@pytest.mark.slow
@pytest.mark.parametrize("flag, name, at_once", [
    ("--teacher_tp=2", "rank 1", False),
    ("--teacher_ranks=1", "teacher rank 0", False),
    # the launcher's SIGTERM ends the other rank before it has noticed
    ("--teacher_ranks=1", "teacher rank 0", True),
])
def test_a_killed_rank_ends_the_job_with_a_line_that_names_it(
        models, texts, tmp_path, flag, name, at_once):
    """A shard of the teacher dies in mid-step; the job ends within a minute, and can resume."""
    output = tmp_path / "run"
    flags = small_run(models, texts, tmp_path, flag, "--save_every=1", f"--output_dir={output}")
    with start_launcher(2, *flags, "--steps=100000") as job:
        while not (output / "checkpoints" / "step_0000003").exists():
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.05)
        victim, other = process_of_rank(job.pid, 1), process_of_rank(job.pid, 0)
        os.kill(victim, signal.SIGKILL)
        if at_once:
            while is_running(victim):  # the launcher has seen it end
                pass
            os.kill(other, signal.SIGTERM)
        message = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    line = f"distill.py: {name} (process {victim}) ended in mid-step"
    assert line in message, message[-3000:]
    reached = losses_of(output)[-1]["step"]
    assert ranks.run(2, run_distill, [[*flags, f"--steps={reached + 2}"]]) == [[0]] * 2
    assert losses_of(output)[-1]["step"] == reached + 2


@pytest.mark.slow
def test_epochs_say_how_many_steps_there_are(models, texts, tmp_path):
    """18 rows to train on, once and a half, 4 a step; a resumed run takes no more."""
    flags = small_run(models, texts, tmp_path, "--epochs=1.5", "--eval_rows=2", "--num_workers=0",
                      f"--output_dir={tmp_path / 'run'}")
    twice = [flags, flags, [*flags, "--steps=9"], [*flags, "--streaming"]]
    assert ranks.run(2, run_distill, twice) == [[0, 0, 2, 2]] * 2
    assert [line["step"] for line in losses_of(tmp_path / "run") if "loss" in line] == (
        list(range(1, 8)))


BROKEN = """
from isogloss import distill
from isogloss.objective import objective
objective.micro_batch_loss = lambda *_: 1 / 0
distill.cli()
"""


@pytest.mark.slow
def test_an_error_in_a_step_ends_the_process(models, texts, tmp_path):
    """Although its data worker ignores the signal that Python ends workers with."""
    flags = small_run(models, texts, tmp_path, "--steps=9", "--num_workers=1", "--eval_every=0",
                      f"--output_dir={tmp_path / 'run'}", stage=0)
    environment = dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ranks.free_port()))
    command = [sys.executable, "-c", BROKEN, *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=180)
    assert done.returncode == 1, done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flag, num_ranks", [("--teacher_tp=2", 4), ("--teacher_ranks=1", 2)])
def test_two_nodes(models, texts, tmp_path, flag, num_ranks):
    """Two launches of two ranks are one job; it learns what its student learns on one node.

    num_ranks counts those of the student on both nodes.
    """
    flags = small_run(models, texts, tmp_path, "--steps=3", "--eval_rows=4", micro_batch_size=1)
    nodes = []
    port = ranks.free_port()
    for number in range(2):
        command = [Path(sys.executable).with_name("torchrun"), "--nnodes=2", "--nproc_per_node=2",
                   "--master_addr=127.0.0.1", f"--master_port={port}", f"--node_rank={number}",
                   "distill.py", *flags, flag, f"--output_dir={tmp_path / 'nodes'}"]
        nodes.append(subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE))
    for node in nodes:
        message = node.communicate(timeout=600)[1]
        assert node.returncode == 0, message
    one_node = [[*flags, f"--output_dir={tmp_path / 'one'}"]]
    assert ranks.run(num_ranks, run_distill, one_node) == [[0]] * num_ranks
    curves = losses_of(tmp_path / "nodes", -1), losses_of(tmp_path / "one", -1)
    for two, one in zip(*curves, strict=True):
        assert two.keys() == one.keys()
        for key, value in one.items():
            # fractions such as eval/joined_mass are sums of probabilities, near 0 with their error
            assert abs(two[key] - value) <= 1e-5 * max(abs(value), 0.1), (key, two, one)


def test_utilization_where_the_peak_is_known():
    from isogloss.log import utilization

    assert utilization("cpu", 1e9, 1e4, 1.0, 1) == {}
    hopper = utilization("NVIDIA H100 80GB HBM3", 1e9, 1e5, 2.0, 2)
    assert hopper["mfu"] == 6e14 / (4 * 989e12)
    pcie = utilization("NVIDIA H100 PCIe", 1e9, 1e5, 2.0, 2)
    assert pcie["mfu"] == 6e14 / (4 * 756e12)


@pytest.mark.slow
def test_the_launcher_passes_on_the_exit_code():
    done = launch(1, "--stepz=3")
    assert done.returncode == 2
    assert "distill.py: unknown flag --stepz; did you mean --steps?" in done.stderr
