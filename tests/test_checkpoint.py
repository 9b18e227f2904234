"""Checkpoints that are damaged, that hold commands, and that not all nodes share."""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ranks
from conftest import ROOT
from isogloss import distill
from isogloss.checkpoints import checkpoint
from isogloss.checkpoints.resume import load_checkpoint
from isogloss.data import order
from isogloss.errors import DataError
from isogloss.job import files
from isogloss.job.launch import start_distributed
from jobs import ds_config, job_for, losses_of, run_distill, short_run
from pickled import Command
from wrong_input import check_one_line, outcomes

# --- damage ---------------------------------------------------------------------------------------


class Files:
    """Stands for an engine: writes one file per rank."""

    module = torch.nn.Linear(1, 1)

    def save_checkpoint(self, folder, tag, save_latest, exclude_frozen_parameters):
        (Path(folder) / tag).mkdir(parents=True, exist_ok=True)
        (Path(folder) / tag / f"weights_{dist.get_rank()}.pt").write_bytes(tag.encode() * 1000)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [(damage, name) for damage in (cut, flip, os.remove)
           for name in ("weights_0.pt", "weights_1.pt", "random_1.pt", "position.json")]


def found(choice, folder):
    """Return (name of the checkpoint or the error, what this rank wrote to stderr)."""
    with redirect_stderr(StringIO()) as stderr:
        try:
            name = checkpoint.find_checkpoint(choice, folder, {}).name
        except ValueError as error:
            name = str(error)
    return name, stderr.getvalue()


def save(folder, step, keep=2, engine=None, spared=""):
    checkpoint.save_checkpoint(engine or Files(), folder, step, identity={}, layout={}, keep=keep,
                               state={}, spared=spared)


def found_after_damage(folder):
    """Save three checkpoints; return what is found after each of DAMAGES, at two moments."""
    start_distributed()
    folder = Path(folder)
    for step in (1, 2, 3):
        save(folder, step)
    answers = [found("auto", folder)]
    kept = folder.with_name("kept")
    if dist.get_rank() == 0:
        shutil.copytree(folder, kept)
    for damage, name in DAMAGES:
        for steps in ([3], [3, 2]):
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
                shutil.copytree(kept, folder)
                for step in steps:
                    damage(folder / f"step_000000{step}" / name)
            dist.barrier()
            answers.append(found("auto", folder))
            dist.barrier()
        answers.append(found(str(folder / "step_0000003"), folder))
        dist.barrier()
    return answers


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    on_ranks = ranks.run(2, found_after_damage, str(tmp_path / "checkpoints"))
    first = on_ranks[0]
    assert [name for name, _ in first] == [name for name, _ in on_ranks[1]]
    assert all(stderr == "" for _, stderr in on_ranks[1])  # one rank speaks for all
    assert first[0] == ("step_0000003", "")
    answers = iter(first[1:])
    for damage, name in DAMAGES:
        path = str(tmp_path / "checkpoints" / "step_0000003" / name)
        fallback, line = next(answers)
        assert fallback == "step_0000002", (damage, name)
        assert line.startswith("distill.py: ") and line.count("\n") == 1 and path in line, line
        error, lines = next(answers)
        assert "no other checkpoint there is whole" in error and lines.count("\n") == 2
        error, lines = next(answers)  # named by --resume
        assert lines == "" and path.removesuffix("/position.json") in error, error
        assert "damaged" in error or "missing" in error or "not a complete" in error, error


class FilesAlone(Files):
    """Writes where nothing half-written takes room."""

    def save_checkpoint(self, folder, tag, save_latest, exclude_frozen_parameters):
        assert not list(Path(folder).glob(".step_*"))
        super().save_checkpoint(folder, tag, save_latest, exclude_frozen_parameters)


def kept_in_trouble(folder):
    """Return {trouble: what is kept by saves beside it}."""
    start_distributed()
    folder = Path(folder)
    for step in range(1, 6):
        save(folder / "damage", step)
        if step == 4:
            cut(folder / "damage" / "step_0000004" / "weights_0.pt")
        save(folder / "named", step, spared=f"{os.path.relpath(folder)}/named/step_0000002/")
    half = folder / "killed" / ".step_0000003.incomplete"
    half.mkdir(parents=True)
    (half / "weights_0.pt").write_bytes(b"half")
    save(folder / "killed", 2, engine=FilesAlone())
    kept = {name: sorted(os.listdir(folder / name)) for name in ("damage", "killed", "named")}
    clock = itertools.count(time.time(), -86_400)
    checkpoint.time.time = lambda: next(clock)
    for keep in (1, 2):
        kept[keep] = []
        for step in (1, 2, 3, 4, 2, 3):  # a run that went back
            save(folder / str(keep), step, keep)
            found = checkpoint.find_checkpoint("auto", folder / str(keep), {})
            assert found.name == f"step_000000{step}"
            steps = [int(path.name[-1]) for path in (folder / str(keep)).iterdir()]
            kept[keep].append(sorted(steps))
    return kept


def test_what_is_kept_beside_damage_and_by_a_clock_that_goes_back(tmp_path):
    """A damaged checkpoint displaces no whole one, and neither does the one that --resume names;
    what a killed save left makes room.
    """
    [kept] = ranks.run(1, kept_in_trouble, str(tmp_path))
    assert kept == {
        "damage": ["step_0000003", "step_0000004", "step_0000005"], "killed": ["step_0000002"],
        "named": ["step_0000002", "step_0000004", "step_0000005"],
        1: [[1], [2], [3], [4], [2], [3]], 2: [[1], [1, 2], [2, 3], [3, 4], [2, 4], [2, 3]]}


# --- going back -----------------------------------------------------------------------------------


def ending_in(step, end):
    """Let jobs of this rank call `end` in a step; what it raises is as a kill, which saves nothing.
    """
    take = distill.train_step

    def train_step(state, micro_batches):
        if state.steps_taken + 1 == step:
            distill.train_step = take
            end()
        return take(state, micro_batches)

    distill.train_step = train_step


def killed():
    raise SystemExit(9)


def asked_to_end():
    os.kill(os.getpid(), signal.SIGTERM)


def going_back(folder, flags):
    """Return the Outcomes of runs that go back, of which some are ended in mid-step 4."""
    named = f"--resume={folder}/run/checkpoints/step_0000002"
    alone = f"{named} --keep_checkpoints=1"
    cases = [("--keep_checkpoints=3", None), (named, killed), ("", asked_to_end),
             (alone, asked_to_end), (alone, asked_to_end),
             (f"--output_dir={folder}/fork {named}", None), ("", None),
             (f"--output_dir={folder}/run/aside_1", None),
             (f"--output_dir={folder}/never --resume=never", asked_to_end)]
    ended = []
    for change, end in cases:
        if end:
            ending_in(4, end)
        steps = 5 + (end is None and bool(ended))
        ended += outcomes(folder, flags, [f"{change} --steps={steps}"])
    return ended


def test_a_run_that_goes_back_loses_nothing_and_says_what_goes_on(flags, tmp_path):
    """Metrics and checkpoints belong together, whenever it ends; the one named stays."""
    run = tmp_path / "run"
    flags = [*flags, f"--output_dir={run}", "--save_every=2", "--eval_rows=3", "--eval_every=1"]
    whole = f"--output_dir={tmp_path / 'whole'}"
    [[outcome]] = ranks.run(1, outcomes, str(tmp_path), [*flags, whole], ["--steps=6"])
    assert outcome.exit_code == 0
    [ended] = ranks.run(1, going_back, str(tmp_path), flags)
    assert [outcome.exit_code for outcome in ended] == [0, 9, 143, 143, 143, 0, 0, 0, 143], ended
    back, auto, again, once_more, fork, done, aside, never = [
        outcome.stderr for outcome in ended[1:]]
    checkpoints = run / "checkpoints"
    saved = f"saved {checkpoints}/step_0000004; the same command"
    from_named = f"goes on from {checkpoints}/step_0000002 (step 2)"
    assert "goes back to step 2; step_0000004, step_0000005 and the logs" in back
    for said in (back, auto, again, once_more):
        assert from_named in said
    assert f"{saved} goes on\n" in auto and "goes back" not in auto
    for said in (again, once_more):
        assert f"{saved} without --resume goes on\n" in said
        assert "goes back to step 2; step_0000004 and the logs" in said
    assert f"goes on from {checkpoints}/step_0000004 (step 4)" in done
    assert f"saved {tmp_path}/never/checkpoints/step_0000004; the same command without" in never
    assert "goes on from" in aside and f"{run}/aside_1/checkpoints/step_0000005 (step 5)" in aside
    assert from_named in fork and "goes back" not in fork
    for folder in (run, run / "aside_1"):
        assert losses_of(folder) == losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "fork") == losses_of(tmp_path / "whole", 2)
    for number in (2, 3):
        assert losses_of(run / f"aside_{number}")[-1]["step"] == 4
        names = os.listdir(run / f"aside_{number}" / "checkpoints")
        assert names == ["step_0000004"]


# --- commands in pickles --------------------------------------------------------------------------


def poison(checkpoint, name, marker):
    """Put a command into a file of a checkpoint, and take out the checksums, which a thief can."""
    content = torch.load(checkpoint / name, weights_only=False, map_location="cpu")
    torch.save(content | {"command": Command(str(marker))}, checkpoint / name)
    position = json.loads((checkpoint / "position.json").read_text())
    position.pop("files")
    position.pop("checksum")
    (checkpoint / "position.json").write_text(json.dumps(position))


# (ZeRO stage that saved, ZeRO stage that loads)
STAGES = [(0, 0), (2, 2), (3, 3), (0, 2), (2, 0), (1, 3), (3, 1)]


def load_poisoned(folder, flags):
    """Load what each ZeRO stage saved, with a command in a file; return [(stages, file, error)]."""
    folder = Path(folder)
    configs = [ds_config(folder / f"zero{stage}.json", stage, 2, 1) for stage in range(4)]
    codes = run_distill([[*flags, f"--ds_config={config}", f"--output_dir={folder / str(stage)}"]
                         for stage, config in enumerate(configs)])
    assert codes == [0] * 4
    values = dict(flag.removeprefix("--").split("=") for flag in flags)
    values |= {"steps": 2, "max_length": 40, "num_workers": 0}
    answers = []
    for saved, stage in STAGES:
        clean = folder / str(saved) / "checkpoints" / "step_0000001"
        state, inputs = job_for(values | {
            "ds_config": configs[stage], "resume": str(clean),
            "output_dir": str(folder / "other")})
        load_checkpoint(state.engine, clean, inputs.universal)
        for path in sorted(clean.glob("*.pt")):
            if inputs.universal and path.name.startswith("random"):
                continue  # not read in another layout
            copy = folder / "copy" / clean.name
            shutil.rmtree(copy.parent, ignore_errors=True)
            shutil.copytree(clean, copy)
            poison(copy, path.name, folder / "marker")
            try:
                load_checkpoint(state.engine, copy, inputs.universal)
                answers.append(((saved, stage), path.name, ""))
            except ValueError as error:
                answers.append(((saved, stage), path.name, str(error)))
    return answers


@pytest.fixture
def flags(models, texts, tmp_path):
    return short_run(models, texts, tmp_path, "--max_length=40", "--num_workers=0", "--steps=1")


@pytest.mark.slow
def test_no_checkpoint_runs_a_command(flags, tmp_path):
    [answers] = ranks.run(1, load_poisoned, str(tmp_path), flags)
    assert {stages for stages, *_ in answers} == set(STAGES)
    assert len(answers) > 2 * len(STAGES)
    for stages, name, error in answers:
        assert "holds more than a checkpoint does" in error, (stages, name)
    assert not (tmp_path / "marker").exists()


def test_a_loss_scale_can_be_read(tmp_path):
    """What a run in fp16 keeps, which only a GPU can do."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from isogloss.checkpoints.unpickle import known_classes_only

    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2, False)
    torch.save({"loss_scaler": scaler}, tmp_path / "file.pt")
    with known_classes_only(tmp_path):
        read = torch.load(tmp_path / "file.pt", weights_only=False)["loss_scaler"]
    assert vars(read) == vars(scaler)


class WrittenByGetattr:
    """An attribute as Python 3.11 before 3.11.4 writes the members of an Enum."""

    def __init__(self, *words):
        self.words = words

    def __reduce__(self):
        return getattr, self.words


def test_a_zero_stage_can_be_read_as_every_python_writes_it(tmp_path):
    """And no attribute of anything else."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from isogloss.checkpoints.unpickle import known_classes_only

    path = tmp_path / "file.pt"
    for stage in (ZeroStageEnum.gradients, WrittenByGetattr(ZeroStageEnum, "gradients")):
        torch.save({"stage": stage}, path)
        with known_classes_only(tmp_path):
            read = torch.load(path, weights_only=False)["stage"]
        assert read is ZeroStageEnum.gradients
    torch.save({"stage": WrittenByGetattr(torch.nn.Parameter, "mro")}, path)
    with pytest.raises(ValueError, match="holds more than"), known_classes_only(tmp_path):
        torch.load(path, weights_only=False)


# --- whole jobs -----------------------------------------------------------------------------------


def on_two_nodes(folder, flags):
    """Run with a folder for each rank, as where a path is not shared."""
    files.SEEN_WITHIN = 0
    rank = os.environ["RANK"]
    return outcomes(folder, flags, [f"--output_dir={folder}/of_node{rank}"])


def start_apart(folder):
    """Let both ranks start from checkpoints of one name and other content."""
    start_distributed()
    step = Path(folder) / f"node{dist.get_rank()}" / "step_0000001"
    step.mkdir(parents=True)
    (step / "position.json").write_text(json.dumps({"written": dist.get_rank()}))
    checkpoint.agree_on_start(None)
    try:
        checkpoint.agree_on_start(step)
    except ValueError as error:
        return str(error)


def test_nodes_that_do_not_share_a_folder(flags, tmp_path):
    on_ranks = ranks.run(2, on_two_nodes, tmp_path, flags)
    check_one_line([first for [first] in on_ranks], "does not see what rank 0 on")
    assert not list(tmp_path.glob("of_node*"))
    for error in ranks.run(2, start_apart, str(tmp_path)):
        assert "rank 0 would start from ['step_0000001', None, 0], rank 1 from" in error


# A process that writes to a folder, until it is killed.
OTHER_JOB = "import sys, time; from isogloss.job.files import locked; " \
            "file = locked('', sys.argv[1]); print(flush=True); time.sleep(999)"


def test_two_jobs_do_not_write_to_one_folder(flags, tmp_path):
    """The second one waits for a moment, as for a job that is killed, and ends with one line."""
    output = tmp_path / "run"
    output.mkdir()
    with subprocess.Popen([sys.executable, "-c", OTHER_JOB, output], cwd=ROOT,
                          stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        flags = [*flags, f"--output_dir={output}"]
        on_ranks = ranks.run(2, outcomes, tmp_path, flags, ["--steps=1"])
        check_one_line([first for [first] in on_ranks], "another process is writing there; wait")
        assert [path.name for path in output.iterdir()] == [".lock"]
        threading.Timer(2, other.kill).start()
        [[begun], _] = ranks.run(2, outcomes, tmp_path, flags, ["--steps=1"])
        assert begun.exit_code == 0
        assert [line["step"] for line in losses_of(output)] == [1]


def with_bad_row(folder, flags, row, rank):
    """Return the Outcomes of a run of which a rank meets a bad row, of the next and a whole one."""
    read = order.ExampleReader.__call__

    def read_good_rows(reader, content, number=None):
        if number == row and os.environ["RANK"] == str(rank):
            raise DataError(f"row {row} is none")
        return read(reader, content, number)

    order.ExampleReader.__call__ = read_good_rows
    ended = outcomes(folder, flags, [""])
    order.ExampleReader.__call__ = read
    return ended + outcomes(folder, flags, ["", f"--output_dir={folder}/whole"])


# (ranks, that read rows of their own, the one that meets it, flags)
WITH_BAD_ROW = {"one": (1, 1, 0, []), "two": (2, 2, 1, []),
                "stages": (2, 1, 0, ["--pipeline_parallel=2"])}


@pytest.mark.parametrize("case", WITH_BAD_ROW.values(), ids=WITH_BAD_ROW)
def test_a_bad_row_in_the_middle_costs_no_step(flags, tmp_path, case):
    """One rank meets it; of two stages, that read the same rows, the first one."""
    num_ranks, num_readers, rank, more = case
    if more:
        ds_config(tmp_path / "ds.json", 1, 1, 2)  # as a pipeline needs it
    order_of_rows = np.random.default_rng([0, 0]).permutation(20)
    row = int(order_of_rows[3 * 2 * num_readers - 1])  # of three steps with two rows a rank
    flags = [*flags, *more, f"--output_dir={tmp_path / 'run'}", "--steps=4"]
    on_ranks = ranks.run(num_ranks, with_bad_row, str(tmp_path), flags, row, rank)
    last = tmp_path / "run" / "checkpoints" / "step_0000002"
    for bad, again, whole in on_ranks:
        assert bad.exit_code == 2 and again.exit_code == whole.exit_code == 0, on_ranks
    said = "".join(bad.stderr for bad, *_ in on_ranks)
    assert said.count(f"distill.py: row {row} is none; the last good checkpoint is {last}\n") == 1
    curves = losses_of(tmp_path / "run"), losses_of(tmp_path / "whole")
    for line in itertools.chain(*curves):
        for name in ("bubble", "slowest_stage", "fastest_stage"):  # times
            line.pop(name, None)
    assert curves[0] == curves[1] and curves[0][-1]["step"] == 4


def with_small_disk(folder, flags, changes):
    """`outcomes`; in the second run rank 1 can write no file as large as a checkpoint's."""
    ended = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, change in enumerate(changes):
        if number and os.environ["RANK"] == "1":
            shards = Path(folder).glob("run/checkpoints/step_*/zero_pp_rank_1_*")
            size = min(path.stat().st_size for path in shards)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
        ended += outcomes(folder, flags, [change])
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ended


def test_a_full_disk_ends_a_job_with_one_line_and_loses_nothing(flags, tmp_path):
    """torch's own error says nothing of a disk: "unexpected pos 64 vs 0"."""
    output = tmp_path / "run"
    flags = [*flags, f"--output_dir={output}", "--save_every=1"]
    on_ranks = ranks.run(2, with_small_disk, tmp_path, flags, ["--steps=1", "--steps=2"])
    begun, full = zip(*on_ranks, strict=True)
    assert [outcome.exit_code for outcome in begun] == [0, 0]
    assert [outcome.exit_code for outcome in full] == [1, 1]
    printed = "".join(outcome.stderr for outcome in full)
    [line] = [line for line in printed.splitlines() if line.startswith("distill.py: ")]
    assert "step_0000002 cannot be written (" in line and "MiB are free there" in line
    assert f"the last good checkpoint is {output}/checkpoints/step_0000001" in line
    assert "Traceback" not in printed
    [[again], _] = ranks.run(2, outcomes, tmp_path, flags, ["--steps=2"])
    assert again.exit_code == 0
    assert [line["step"] for line in losses_of(output)] == [1, 2]


def full(path):
    """Let nothing more be written to a file, as on a full disk."""
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")


def is_a_file(output):
    shutil.rmtree(output)
    output.write_text("")


# what happens to the output directory in its second step, or 0: before the job; of what the line
# speaks; the steps of which there are checkpoints afterwards
LOST_DISKS = {
    "metrics": (lambda output: full(output / "metrics.jsonl"), 2, "No space left on device", [2]),
    "record": (lambda output: full(output / ".run.json.incomplete"), 0, "No space left", []),
    "gone": (shutil.rmtree, 2, "No such file or directory: '{output}/metrics.jsonl'", [2]),
    "all": (is_a_file, 2, "step_0000002 cannot be written (", None),
}


def with_lost_disk(folder, flags):
    """Return the Outcome of a run for each of LOST_DISKS, after the last of which ranks are apart.
    """
    ended = []
    train_step = distill.train_step
    is_first = os.environ["RANK"] == "0"
    for name, (lose, at_step, *_) in LOST_DISKS.items():
        output = Path(folder) / name
        if is_first and not at_step:
            output.mkdir()
            lose(output)
        steps = itertools.count(1)

        def step(*args):
            report = train_step(*args)
            if next(steps) == at_step:
                dist.barrier()
                if is_first:
                    lose(output)
                dist.barrier()
            return report

        distill.train_step = step
        ended += outcomes(folder, flags, [f"--output_dir={output}"])
    return ended


def test_a_log_that_cannot_be_written_ends_a_job_which_saves_first(flags, tmp_path):
    """With one line, on a full disk, without its directory; --save_every is 0."""
    flags = [*flags, "--steps=3", "--eval_rows=2", "--eval_every=2"]
    on_ranks = ranks.run(2, with_lost_disk, tmp_path, flags)
    for name, outcome, other in zip(LOST_DISKS, *on_ranks, strict=True):
        _, _, message, steps = LOST_DISKS[name]
        assert [outcome.exit_code, other.exit_code] == [1, 1], (name, outcome, other)
        printed = outcome.stderr + other.stderr
        assert "Traceback" not in printed, printed
        assert printed.count("distill.py: ") == 1, printed
        line = printed.partition("distill.py: ")[2].splitlines()[0]
        assert message.format(output=tmp_path / name) in line, (name, line)
        if steps is None:
            assert "there is no checkpoint" in line
            continue
        saved = tmp_path / name / "checkpoints"
        assert [path.name for path in saved.glob("step_*")] == [f"step_000000{n}" for n in steps]
        said = f"is {saved}/step_000000{steps[0]}" if steps else "there is no checkpoint"
        assert said in line and "the same command goes on" in line
    (tmp_path / "metrics" / "metrics.jsonl").unlink()  # there is room again
    for ended in ranks.run(2, outcomes, tmp_path, flags, [f"--output_dir={tmp_path / 'metrics'}"]):
        assert [outcome.exit_code for outcome in ended] == [0], ended
    assert losses_of(tmp_path / "metrics")[-1]["step"] == 3
