"""Whole jobs on gloo ranks: one curve in every layout, whole checkpoints, exact resume."""

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import jobs
import ranks
from isogloss import build
from isogloss.projection_tools.build import build_projection
from isogloss.projection_tools.projection_files import load_projection
from isogloss.projection_tools.tokenizers import Pair
from isogloss.student import engine as student
from isogloss.student.engine import StudentWithLoss
from launched import as_in_a_terminal, die_after


class BaseRun(NamedTuple):
    """A folder with ds_configs, and the flags that runs with them have in common."""

    folder: Path
    argv: list

    def without(self, *prefixes):
        """Return the same but for flags that begin with one of the prefixes."""
        return self._replace(argv=[flag for flag in self.argv if not flag.startswith(prefixes)])

    def line(self, config, output, *flags):
        """Return the command line of a run with a ds_config, which writes to folder/output."""
        return [*self.argv, f"--ds_config={self.folder / config}.json",
                f"--output_dir={self.folder / output}", *flags]


@pytest.fixture(scope="module")
def base_run(models, texts, tmp_path_factory):
    """A run that crosses epochs in mid-step, with dropout, schedule, accumulation and clipping."""
    folder = tmp_path_factory.mktemp("runs")
    student = folder / "student"
    shutil.copytree(models[0], student)
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    steps = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    schedule = {"type": "WarmupCosineLR", "params": steps}
    for stage in range(4):
        jobs.ds_config(folder / f"zero{stage}.json", stage, 1, 2, scheduler=schedule)
    jobs.ds_config(folder / "bf16.json", 2, 1, 2, scheduler=schedule, bf16={"enabled": True})
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    jobs.ds_config(folder / "offload.json", 2, 1, 2, scheduler=schedule, zero_optimization=offload,
                   zero_force_ds_cpu_optimizer=False)
    argv = [f"--student={student}", f"--teacher={models[1]}",
            f"--data={jobs.write_corpus(folder, texts, 11)}", "--eval_rows=2", "--max_length=120"]
    return BaseRun(folder, argv)


# --- students that a layout does not suit ---------------------------------------------------------


def ignore_positions(argv):
    """Run jobs whose student does not learn where its samples begin; return what they say.

    Not in any batch, or, as flash attention, not in batches of several rows.
    """
    forward = StudentWithLoss.forward
    answers = []
    for least_rows in (1, 2):
        def forward_without_positions(self, batch, terms=None, least_rows=least_rows):
            if len(batch.ids) >= least_rows:
                batch = dataclasses.replace(batch, positions=None)
            return forward(self, batch, terms)

        StudentWithLoss.forward = forward_without_positions
        answers.append(jobs.run_and_listen(argv))
    return answers


def mix_neighbors(argv):
    """Run a job whose student looks back by other means than attention."""
    load_student = build.load_student

    def load_mixing_student(*args):
        model = load_student(*args)
        mlp = model.model.layers[0].mlp
        forward = mlp.forward
        mlp.forward = lambda hidden: forward(hidden + hidden.roll(1, 1))
        return model

    build.load_student = load_mixing_student
    return jobs.run_and_listen(argv)


@pytest.mark.slow
def test_students_that_a_layout_does_not_suit_are_rejected(base_run, tmp_path):
    """Those that look beyond their shard, or across packed samples; others run."""
    argv = base_run.line("zero2", tmp_path, "--steps=1")
    mixed = ranks.run(2, mix_neighbors, [*argv, "--sequence_parallel=2"])
    assert [codes for codes, _ in mixed] == [[2]] * 2
    assert "depends on where its shards are cut" in mixed[0][1]
    [answers] = ranks.run(1, ignore_positions, [*argv, "--pack"])
    for codes, said in answers:
        assert codes == [2]
        assert "depends on the text before it in the same row; use --pack=false" in said
    # in bf16 the shards are other blocks, which round in another way
    jobs.run_all(2, base_run.line("bf16", tmp_path, "--steps=1", "--sequence_parallel=2"),
                 [*argv, "--pack", "--sequence_parallel=2", f"--output_dir={tmp_path / 'shards'}"])
    jobs.run_all(3, [*argv, "--pack", "--teacher_ranks=1", "--tiled=false", "--attention=eager",
                     f"--output_dir={tmp_path / 'remote'}"])


@pytest.mark.slow
def test_reports_of_deepspeed(base_run, tmp_path):
    """The summary of collectives has times of single calls; flops, memory and time are printed."""
    profiler = {"enabled": True, "profile_step": 1, "module_depth": 1, "top_modules": 1,
                "detailed": False}
    config = jobs.ds_config(tmp_path / "ds.json", 3, 2, 1, flops_profiler=profiler,
                            wall_clock_breakdown=True, memory_breakdown=True,
                            comms_logger={"enabled": True})
    argv = [*base_run.argv, f"--ds_config={config}", "--steps=3", f"--output_dir={tmp_path}",
            "--sequence_parallel=2"]
    begin = time.monotonic()
    assert ranks.run(2, jobs.run_with_output, argv, str(tmp_path / "output")) == [[0]] * 2
    seconds = time.monotonic() - begin
    output = (tmp_path / "output0").read_text()
    for words in ("DeepSpeed Flops Profiler", "fwd flops per GPU", "bwd_inner_micro",
                  "Engine after forward"):
        assert words in output
    summary = output[output.index("Comm. Op") :]
    assert {"all_to_all_single", "all_gather_into_tensor"} <= set(summary.split())
    milliseconds = []
    for line in summary.splitlines()[1:]:
        words = line.split()  # a size and its unit, the count, milliseconds; a bar has seven too
        if len(words) == 7 and words[1] in ("B", "KB", "MB", "GB"):
            milliseconds.append(float(words[3]))
    assert len(milliseconds) > 3
    assert sum(milliseconds) < 1000 * seconds


# --- teachers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_teachers_by_the_domain_of_a_row(base_run, models, untied, texts):
    """One teacher has a sixth of the rows, so that some steps have none of it."""
    folder = base_run.folder
    data = folder / "domains.jsonl"
    lines = []
    for text, domain in zip(texts[:12], itertools.cycle("xyyyyy")):
        lines.append(json.dumps({"text": text, "domain": domain}))
    data.write_text("\n".join(lines))
    teachers = [{"model": str(models[1]), "name": "a", "routes": ["x"], "tp": 2},
                {"model": str(untied), "loss": "projection_kl", "name": "b"}]
    argv = base_run.without("--teacher", "--data").line(
        "zero3", "routed", f"--data={data}", "--steps=5", f"--teachers={json.dumps(teachers)}")
    runs = [[*argv, "--route_key=domain"], [*argv, "--route_key=topic"]]
    assert ranks.run(2, jobs.run_distill, runs) == [[0, 2]] * 2
    steps = jobs.losses_of(folder / "routed")[:-1]
    has_first = [line["kd/a"] is not None for line in steps]
    assert has_first == [line["aligned_tokens/a"] is not None for line in steps]
    assert 0 < sum(has_first) < len(steps)
    for line in steps:
        of_teachers = [line[key] for key in ("aligned_tokens/a", "aligned_tokens/b")]
        assert all(0.9 < fraction <= 1 for fraction in of_teachers if fraction is not None)
    assert all(math.isfinite(line["loss"]) for line in steps)


TWO_TEACHERS = ('--teachers=[{"model":"TEACHER","tp":2,"name":"a"},'
                '{"model":"OTHER","loss":"alm","name":"b"}]')
# what is learned, how many ranks hold the teachers alone, and how
REMOTE = [
    ("--loss=piece_kl", 2, ["--teacher_tp=2"]),
    ('--loss=projection_kl --teacher_output=logits --loss_options={"projection_topk":100}',
     2, ["--teacher_tp=2"]),
    ("--loss=projection_kl --teacher_output=topk --teacher_output_topk=600",
     3, ["--teacher_engine=zero3"]),
    ("--loss=gold --tiled=false", 1, []),
    (TWO_TEACHERS, 2, []),
    ("--loss=piece_kl --sequence_parallel=2", 2, []),
]


@pytest.mark.slow
def test_teachers_on_ranks_of_their_own(base_run, models, untied):
    """Losses, gradient norms and evaluations do not depend on where the teacher is."""
    folder = base_run.folder

    def line_of(name, words, *more):
        flags = [flag.replace("TEACHER", str(models[1])).replace("OTHER", str(untied))
                 for flag in words.split()]
        base = base_run.without("--teacher") if words == TWO_TEACHERS else base_run
        return base.line("zero2", name, "--steps=3", "--eval_every=2", *flags, *more)

    # runs whose teachers are on the student's ranks
    beside = {words: f"beside {number}" for number, (words, *_) in enumerate(REMOTE)}
    jobs.run_all(2, *[line_of(name, words) for words, name in beside.items()])
    for number, (words, teacher_ranks, teacher_flags) in enumerate(REMOTE):
        name = f"remote {number}"
        jobs.run_all(2 + teacher_ranks,  # processes join one world
                     line_of(name, words, f"--teacher_ranks={teacher_ranks}", *teacher_flags))
        expected = jobs.losses_of(folder / beside[words])
        assert [metrics["step"] for metrics in expected] == [1, 2, 2, 3, 3]
        jobs.check_same_curve(expected, jobs.losses_of(folder / name), 1e-5, 1e-7, REMOTE[number])


# --- runs that stop and resume --------------------------------------------------------------------


@pytest.mark.slow
def test_resume_is_exact(base_run):
    """For every ZeRO stage, bf16 and offload: 4 steps at once give the bits of 2 + 2 steps."""
    folder = base_run.folder
    kinds = ["zero0", "zero1", "zero2", "zero3", "bf16", "offload"]
    whole_runs = []
    resumed_runs = []
    for kind in kinds:
        flags = ["--steps=4", "--eval_every=3"]
        if kind == "zero1":
            flags.append("--activation_checkpointing")
        saved = folder / "whole" / kind / "checkpoints" / "step_0000002"
        whole_runs.append(base_run.line(kind, f"whole/{kind}", *flags, "--save_every=2",
                                        "--keep_checkpoints=9"))
        resumed_runs.append(base_run.line(kind, f"resumed/{kind}", *flags, f"--resume={saved}"))
    jobs.run_all(2, *whole_runs)
    jobs.run_all(2, *resumed_runs)
    for kind in kinds:
        whole = jobs.losses_of(folder / "whole" / kind, 2)
        resumed = jobs.losses_of(folder / "resumed" / kind)
        assert whole == resumed and len(resumed) == 4, kind  # two steps, both evaluated
        assert resumed[-1]["eval/kd"] > 0 and resumed[0]["loss"] != resumed[-2]["loss"]
        record = json.loads((folder / "whole" / kind / "run.json").read_text())
        schedule = record["ds_config"]["scheduler"]["params"]
        assert record["ranks"] == 2 and schedule["total_num_steps"] == 4


def run_until(argv, moment):
    """Run a job whose rank 0 gets SIGKILL in mid-step 4, or once it has written a file."""
    if os.environ["RANK"] == "0":
        calls = itertools.count(1)
        if moment == "mid-step":  # after the first of two micro-batches
            die_after(student, "gradient_norm", lambda engine: next(calls) == 7)
        else:
            die_after(torch, "save", lambda content, path, **_: moment in str(path))
    jobs.run_distill([argv])


@pytest.mark.slow
def test_a_killed_run_resumes_from_the_last_whole_checkpoint(base_run):
    """SIGKILL in mid-step and in mid-save; no incomplete checkpoint is ever picked up."""
    folder = base_run.folder
    flags = "--steps=7", "--save_every=1", "--num_workers=0"
    jobs.run_all(2, base_run.line("zero2", "unkilled", *flags))
    killed = folder / "killed"
    argv = base_run.line("zero2", "killed", *flags)
    for moment in ("mid-step", ".step_0000005.incomplete",
                   ".step_0000006.incomplete/random_0.pt"):
        group = ranks.start(2, run_until, argv, moment)
        process, _ = group[0]
        process.join()
        ranks.kill(group)
        assert process.exitcode == -signal.SIGKILL
    jobs.run_all(2, argv)
    assert jobs.losses_of(killed) == jobs.losses_of(folder / "unkilled")
    # nothing half-written or half-deleted stays behind
    names = {path.name for path in (killed / "checkpoints").iterdir() if path.is_dir()}
    assert names == {"step_0000006", "step_0000007"}


def run_in_a_terminal(argv):
    as_in_a_terminal()
    return jobs.run_distill([argv])


@pytest.mark.parametrize("teacher_ranks, number", [(0, signal.SIGHUP), (1, signal.SIGTERM)])
def test_a_signal_on_one_rank_saves_and_ends_all(base_run, teacher_ranks, number):
    """Ranks for teachers alone go on until the student's ranks have saved, then end cleanly."""
    output = base_run.folder / f"signal{number}"
    argv = base_run.line("zero1", output, "--steps=400", f"--teacher_ranks={teacher_ranks}")
    group = ranks.start(2 + teacher_ranks, run_in_a_terminal, argv)
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert all(process.is_alive() for process, _ in group)
        time.sleep(0.01)
    for process, _ in group[::2]:
        os.kill(process.pid, number)
    assert ranks.results(group) == [[128 + number]] * 2 + [[0]] * teacher_ranks
    last = jobs.losses_of(output)[-1]["step"]
    names = [path.name for path in (output / "checkpoints").glob("step_*")]
    assert names == [f"step_{last:07d}"]


@pytest.mark.slow
def test_a_learned_projection_is_trained_saved_and_resumed(base_run, models):
    """It is the same in every ZeRO stage, tiled or not; the file is a projection that loads."""
    folder = base_run.folder
    learned = folder / "learned"
    options = {"learn_projection": True, "projection_learning_rate": 0.3, "projection_topk": 100}
    flags = ["--loss=projection_kl", f"--loss_options={json.dumps(options)}", "--steps=4",
             "--save_every=2"]
    saved = learned / "zero3" / "checkpoints" / "step_0000002"
    jobs.run_all(2, base_run.line("zero2", learned / "zero2", *flags),
                 base_run.line("zero3", learned / "zero3", *flags),
                 base_run.line("zero1", learned / "zero1", *flags, "--tiled=false"))
    jobs.run_all(2, base_run.line("zero3", learned / "again", *flags, f"--resume={saved}"))
    expected = jobs.losses_of(learned / "zero2")
    for kind in ("zero3", "zero1"):
        for line, other in zip(expected, jobs.losses_of(learned / kind), strict=True):
            assert line.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5), kind
    assert jobs.losses_of(learned / "again") == jobs.losses_of(learned / "zero3", 2)

    pair = Pair.load(*map(str, models))
    built_indices, built_weights = map(torch.from_numpy, build_projection(pair)[:2])
    tables = load_projection(learned / "zero3" / "projection.pt", pair)
    has_slot = tables["indices"][:, 0] >= 0
    assert torch.allclose(tables["likelihoods"].sum(1), has_slot.float(), atol=1e-6)
    has_several = built_indices[:, 1] >= 0
    moved = (tables["likelihoods"][:, 0] - built_weights[:, 0]).abs()
    assert moved[~has_several].max() < 1e-6
    assert moved[has_several].max() > 0.01


@pytest.mark.slow
def test_the_dynamic_scale_is_that_of_the_step_before(base_run, models, untied):
    """It is exact after a resume, one for each teacher, and the same on any number of ranks."""
    folder = base_run.folder
    teachers = [{"model": str(models[1]), "name": "a"},
                {"model": str(untied), "loss": "alm", "name": "b", "weight": 0.5}]
    base = base_run.without("--teacher", "--student")
    curves = []
    for num_ranks, grad_accum_steps in ((2, 2), (1, 4)):
        name = f"dynamic{num_ranks}"
        output = folder / name
        jobs.ds_config(folder / f"{name}.json", 2, 1, grad_accum_steps)
        run = base.line(name, name, f"--student={models[0]}",  # without dropout
                        f"--teachers={json.dumps(teachers)}", "--kd_weight=0.6", "--ce_weight=0.3",
                        "--steps=5", "--dynamic_scale", "--save_every=3")
        jobs.run_all(num_ranks, run)
        curves.append([line for line in jobs.losses_of(output) if "loss" in line])
    whole = jobs.losses_of(output)
    jobs.run_all(1, [*run, f"--resume={output / 'checkpoints' / 'step_0000003'}"])
    assert jobs.losses_of(output) == whole
    assert {"eval/kd/a", "eval/teacher_bits_per_byte/b", "eval/student_bits_per_byte"} <= (
        whole[-1].keys())
    check_dynamic_scales(curves[1])
    jobs.check_same_curve(*curves, 1e-4)


def check_dynamic_scales(steps):
    """Compare the weights of every step with the losses of the step before."""
    before = None
    for line in steps:
        kd = 0
        for name, weight in (("a", 0.6), ("b", 0.3)):
            factor = before["ce"] / before[f"kd/{name}"] if before else 1
            assert math.isclose(line[f"kd_weight/{name}"], weight * factor, rel_tol=1e-6)
            kd += line[f"kd_weight/{name}"] * line[f"kd/{name}"]
        assert math.isclose(line["loss"], 0.3 * line["ce"] + kd, rel_tol=1e-9)
        before = line
