"""The command line: wrong input ends with one line, and a real job runs through the real launcher."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ranks
from conftest import ROOT, asset
from jobs import ds_config, losses_of, run_distill, write_corpus

from projection_tools import Pair, as_tables, save_atomically
from projection_tools.build import build_projection

WRONG = {  # what is changed in a good command line -> what the one line has to say
    "unknown flag": ("--max_lenght=9", "unknown flag --max_lenght; did you mean --max_length?"),
    "unknown flag like no other": ("--qqq=1", "unknown flag --qqq; --help lists them all"),
    "a word without a flag": ("student", "unexpected argument 'student'"),
    "text for a number": ("--steps=many", "--steps=many: expected int, got str"),
    "half a step": ("--steps=1.5", "--steps=1.5: expected int, got float"),
    "no step": ("--steps=0", "--steps 0: expected 1 or more"),
    "resume=false": ("--resume=false", "--resume=false: expected auto, never or the directory"),
    "resume from nothing": ("--resume={folder}", "is no complete checkpoint; expected a folder step_*"),
    "no such loss": ("--loss=kl", "--loss kl: expected one of piece_kl, projection_kl"),
    "a loss for one tokenizer": ("--loss=forward_kl", "differ; use one of piece_kl, projection_kl"),
    "a share beyond 1": ("--beta=1.5", "--beta 1.5: expected 0 to 1"),
    "a skew of nothing": ("--skew=1", "--skew 1.0: compares the teacher with itself"),
    "not a number": ("--kd_weight=nan", "--kd_weight=nan"),
    "a ratio to nothing": ("--dynamic_scale --ce_weight=0", "there is but one of them, so leave it out"),
    "cold": ("--temperature=0", "--temperature 0.0: expected more than 0"),
    "a projection of no use": ("--learn_projection --loss=gold", "only --loss projection_kl trains one"),
    "nothing to learn": ("--kd_weight=0 --ce_weight=0", "nothing would be learned"),
    "no teacher": ("--teacher=", "--teacher is missing: give a hub id or a local path"),
    "missing model directory": ("--student=./nowhere", "--student ./nowhere: no such directory"),
    "directory without a model": ("--teacher={folder}", "cannot be loaded"),
    "missing file": ("--data={folder}/nowhere.jsonl", "no such file, directory or glob match"),
    "file of another kind": ("--data={folder}/notes.pdf", "files of kind .pdf; expected one of .txt"),
    "missing column": ("--text_key=body", "no column 'body'; it has text; name one of them by --text_key"),
    "empty data": ("--data={folder}/empty.jsonl", "the data set is empty"),
    "a row that is null": ("--data={folder}/null.jsonl", "row 1 of 'text' is null, expected text"),
    "rows of numbers": ("--data={folder}/numbers.jsonl", "holds int64, expected text in every row"),
    "broken lines": ("--data={folder}/broken.jsonl", "cannot be read"),
    "all held out": ("--eval_rows=20", "the data has 20 rows, none is left to train on"),
    "chats without a template": ("--data={folder}/chats.jsonl", "its tokenizer has no chat template, and"),
    "no eos": ("--student={folder}/no_eos", "its tokenizer has no eos token"),
    "a student without weights": ("--student={folder}/no_weights", "its weights cannot be loaded"),
    "a teacher without weights": ("--teacher={folder}/no_weights", "its weights cannot be loaded"),
    "short student": ("--max_length=257", "has a context of 256 positions; use no more"),
    "short teacher": ("--teacher_max_length=257", "--teacher_max_length 257"),
    "small head": ("--student={folder}/small_head", "its lm_head has 340 rows, but its tokenizer 350 ids"),
    "a teacher across nodes": ("--teacher_tp=4", "--teacher_tp 4: does not divide the 2 ranks of a node"),
    "no rank for the student": ("--teacher_ranks=2", "a node of this job has 2 ranks, and at least one"),
    "parts that do not divide": ("--sequence_parallel=3", "3: does not divide the 2 ranks of the student"),
    "nothing to move": ("--activation_offload", "moves what --activation_checkpointing keeps; add that"),
    "whole and in parts": ("--teacher_tp=2 --teacher_engine=replicated", "a whole copy per rank is degree 1"),
    "two kinds of teachers": ("--teachers=[{}]", "goes neither with --teacher nor"),
    "teachers that are no JSON": ("--teacher= --teachers=[{,", "--teachers: no JSON"),
    "a teacher with a typo": ('--teacher= --teachers=[{"model":"a","los":"gold"}]',
                              "'los' is no key of a teacher"),
    "a teacher without a weight": ('--teacher= --teachers=[{"model":"a","weight":0}]',
                                   "expected a number above 0"),
    "a mean of two tokenizers": (
        '--teacher= --teachers=[{"model":"{folder}/one"},{"model":"{folder}/two"}] --teacher_weights=mean_p',
        "differ, so there is no mean of their predictions"),
    "routes of one teacher": ("--route_key=domain", "chooses among several teachers; name them by"),
    "routes without a key": ('--teacher= --teachers=[{"model":"a","routes":["x"]}]',
                             "column that --route_key names"),
    "twins": ('--teacher= --teachers=[{"model":"a"},{"model":"a"}]', "two are called a; give them names"),
    "no ds_config": ("--ds_config={folder}/nowhere.json", "no such file; ready-made ones are in ds_configs/"),
    "ds_config is no JSON": ("--ds_config={folder}/text.json", "text.json: not JSON"),
    "ds_config with a typo": ("--ds_config={folder}/typo.json", "did you mean 'gradient_clipping'?"),
    "contradicting batch keys": ("--ds_config={folder}/contradict.json", "is not 2 ranks x micro batch 4"),
    "ranks that do not divide": ("--ds_config={folder}/odd.json", "train_batch_size 15 is not 2 ranks"),
    "unknown auto": ("--ds_config={folder}/auto.json", 'gradient_clipping is "auto", which is filled only'),
    "two learning rates": ("--learning_rate=1e-3", "says lr 0.001; drop one"),
    "no learning rate": ("--ds_config={folder}/no_lr.json", "--learning_rate is missing"),
    "other tokenizers": ("--loss=projection_kl --projection={folder}/swapped.pt", "made for another student"),
    "no projection": ("--loss=projection_kl --projection={folder}/text.json", "text.json"),
    "export over something else": ("--export={folder}", "holds something else than a model"),
}


def outcomes(folder, base, cases):
    """{name: (exit code, stderr)} of command lines, one after the other on every rank."""
    found = {}
    for name, (change, _) in cases.items():
        with tempfile.TemporaryFile("w+") as file:
            kept = os.dup(2)
            os.dup2(file.fileno(), 2)
            code = run_distill([[*base, *change.replace("{folder}", str(folder)).split()]])[0]
            sys.stderr.flush()
            os.dup2(kept, 2)
            file.seek(0)
            found[name] = code, file.read()
    return found


@pytest.fixture(scope="module")
def wrong(models, tokenizers, texts, tmp_path_factory):
    """[outcome on rank 0, on rank 1] of every wrong command line."""
    folder = tmp_path_factory.mktemp("wrong")
    files = {"empty": "", "null": '{"text": "a"}\n{"text": null}', "numbers": '{"text": 1}\n{"text": 2}',
             "broken": '{"text": "a"}\n{"text":',
             "chats": '{"text": [{"role": "user", "content": "a"}]}'}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text(content)
    (folder / "notes.pdf").write_text("%PDF")
    (folder / "text.json").write_text("stage: 2")
    good = ds_config(folder / "good.json", 2, 4, 1)
    ds_config(folder / "typo.json", 2, 4, 1, gradient_cliping=1.0)
    ds_config(folder / "contradict.json", 2, 4, 1, train_batch_size=16)
    ds_config(folder / "odd.json", 2, "auto", "auto", train_batch_size=15)
    ds_config(folder / "auto.json", 2, 4, 1, gradient_clipping="auto")
    ds_config(folder / "no_lr.json", 2, 4, 1, optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    swapped = Pair.of(*reversed(tokenizers))
    save_atomically(as_tables(build_projection(swapped), swapped, "test"), folder / "swapped.pt")
    for name in ("no_eos", "small_head", "no_weights"):
        (folder / name).mkdir()
        for file in models[0].iterdir():
            (folder / name / file.name).symlink_to(file)
    (folder / "no_weights" / "model.safetensors").unlink()
    for name, model in zip(("one", "two"), models):
        (folder / name).symlink_to(model)
    edit_json(folder / "no_eos" / "tokenizer_config.json", eos_token=None)
    edit_json(folder / "small_head" / "config.json", vocab_size=340)
    base = [f"--student={models[0]}", f"--teacher={models[1]}", f"--data={write_corpus(folder, texts, 20)}",
            f"--ds_config={good}", "--steps=1", "--max_length=120", f"--output_dir={folder / 'run'}"]
    results = ranks.run(2, outcomes, folder, base, WRONG)
    assert not (folder / "run").exists()  # nothing was written before the first step
    return results


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_ends_with_one_line_and_code_2(wrong, case):
    (code, message), (other_code, other_message) = [result[case] for result in wrong]
    assert code == other_code == 2
    assert message.startswith("distill.py: ") and message.count("\n") == 1, message
    assert WRONG[case][1] in message, message
    assert other_message == ""  # one rank speaks for all


def launch(ranks_, *flags):
    """The real launcher, to its end."""
    return subprocess.run(launcher(ranks_, *flags), cwd=ROOT, capture_output=True, text=True)


def launched(ranks_, *flags):
    """The real launcher, under way."""
    return subprocess.Popen(launcher(ranks_, *flags), cwd=ROOT, stderr=subprocess.PIPE, text=True)


def launcher(ranks_, *flags):
    program = Path(sys.executable).with_name("deepspeed")
    return [program, f"--num_gpus={ranks_}", f"--master_port={ranks.free_port()}", "distill.py", *flags]


def test_real_models_through_the_launcher(tmp_path):
    """GPT-Neo with 14k byte-level tokens teaches Llama with 512 SentencePiece pieces, on real stories."""
    models = f"--student={asset('models', 'stories260K')}", f"--teacher={asset('models', 'tinytalk_neo_3M')}"
    gently = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}  # both have seen such stories
    config = ds_config(tmp_path / "ds.json", 2, 4, 1, optimizer=gently)
    data = f"--data={asset('text', 'tinystories_1000.json')}"
    flags = [*models, data, f"--ds_config={config}", "--steps=12", "--eval_rows=16", "--max_length=128",
             f"--output_dir={tmp_path}", f"--export={tmp_path / 'student'}"]
    done = launch(2, *flags)
    assert done.returncode == 0, done.stderr
    assert "piece_kl: 100%" in done.stderr and "kd=" in done.stderr and "tok/s=" in done.stderr
    first, *steps, last = losses_of(tmp_path, start=-1)
    assert [line["step"] for line in (first, *steps, last)] == [0, *range(1, 13), 12]
    assert last["eval/kd"] < first["eval/kd"]
    assert first["eval/teacher_bits_per_byte"] < last["eval/student_bits_per_byte"] < 3
    assert first["eval/aligned_bytes"] > 0.9 and steps[0]["tokens"] > 8 * 60
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["ranks"] == 2 and record["config"]["steps"] == 12 and record["versions"]["deepspeed"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "student")) == 512


@pytest.mark.parametrize("how, name", [("--teacher_tp=2", "rank 1"), ("--teacher_ranks=1", "teacher rank 0")])
def test_a_killed_rank_ends_the_job_with_a_line_that_names_it(models, texts, tmp_path, how, name):
    """A part of the teacher goes away in mid-step; the job ends within a minute, and goes on where it was."""
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", f"--data={write_corpus(tmp_path, texts, 20)}",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 2, 2, 1)}", "--max_length=60", how,
            "--save_every=1", f"--output_dir={tmp_path / 'run'}"]
    with launched(2, *argv, "--steps=100000") as job:
        while not (tmp_path / "run" / "checkpoints" / "step_0000003").exists():
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.05)
        victim = processes_with("--local_rank=1", str(tmp_path / "run"))[0]
        os.kill(victim, signal.SIGKILL)
        message = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    assert f"distill.py: {name} (process {victim}) ended in mid-step" in message, message[-3000:]
    reached = losses_of(tmp_path / "run")[-1]["step"]
    assert ranks.run(2, run_distill, [[*argv, f"--steps={reached + 2}"]]) == [[0]] * 2
    assert losses_of(tmp_path / "run")[-1]["step"] == reached + 2


def test_an_error_in_a_step_ends_the_process(models, texts, tmp_path):
    """Although its data worker ignores the signal that Python ends workers with."""
    broken = "import distill; distill.lesson_sums = lambda *rows, **lessons: 1 / 0; distill.cli()"
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", f"--data={write_corpus(tmp_path, texts, 20)}",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 0, 2, 1)}", "--max_length=60", "--steps=9",
            "--num_workers=1", "--eval_every=0", f"--output_dir={tmp_path / 'run'}"]
    where = dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                 MASTER_PORT=str(ranks.free_port()))
    done = subprocess.run([sys.executable, "-c", broken, *argv], cwd=ROOT, env=where, capture_output=True,
                          text=True, timeout=180)
    assert done.returncode == 1 and "ZeroDivisionError: division by zero" in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["--teacher_tp=2", "--teacher_ranks=1"])
def test_two_nodes(models, texts, tmp_path, how):
    """Two launches of two ranks each are one job; it learns what the student's ranks learn on one node."""
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", f"--data={write_corpus(tmp_path, texts, 20)}",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 2, 1, 1)}", "--max_length=60", "--steps=3",
            "--eval_rows=4"]
    command = [Path(sys.executable).with_name("torchrun"), "--nnodes=2", "--nproc_per_node=2",
               "--master_addr=127.0.0.1", f"--master_port={ranks.free_port()}"]
    script = ["distill.py", *argv, how, f"--output_dir={tmp_path / 'nodes'}"]
    nodes = [subprocess.Popen([*command, f"--node_rank={n}", *script], cwd=ROOT, text=True,
                              stderr=subprocess.PIPE) for n in range(2)]
    for node in nodes:
        message = node.communicate(timeout=600)[1]
        assert node.returncode == 0, message
    alone = 2 if "ranks" in how else 4
    assert ranks.run(alone, run_distill, [[*argv, f"--output_dir={tmp_path / 'one'}"]]) == [[0]] * alone
    for two, one in zip(losses_of(tmp_path / "nodes", -1), losses_of(tmp_path / "one", -1), strict=True):
        assert two.keys() == one.keys()
        assert all(abs(two[key] - one[key]) <= 1e-5 * abs(one[key]) for key in one), (two, one)


def processes_with(*words):
    """Ids of the processes whose command lines hold all these words, oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text()
            if all(word in line for word in words):
                found.append((float((folder / "stat").read_text().split()[21]), int(folder.name)))
        except OSError:
            pass
    return [number for _, number in sorted(found)]


def test_utilization_where_the_peak_is_known():
    from isogloss.log import utilization

    assert utilization("cpu", 1e9, 1e4, 1.0, 1) == {}
    assert utilization("NVIDIA H100 80GB HBM3", 1e9, 1e5, 2.0, 2)["mfu"] == 6e14 / (4 * 989e12)
    assert utilization("NVIDIA H100 PCIe", 1e9, 1e5, 2.0, 2)["mfu"] == 6e14 / (4 * 756e12)


def test_the_launcher_passes_on_the_exit_code():
    done = launch(1, "--stepz=3")
    assert done.returncode == 2
    assert "distill.py: unknown flag --stepz; did you mean --steps?" in done.stderr
