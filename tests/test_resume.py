"""What may change when a run resumes and what may not; checkpoints in other layouts."""

import json
import resource
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch.distributed as dist

import ranks
from conftest import ROOT
from isogloss import distill
from isogloss.checkpoints import choose
from isogloss.checkpoints.checkpoint import find_checkpoint
from isogloss.checkpoints.convert import check_convertible
from isogloss.checkpoints.model_card import read_record
from isogloss.checkpoints.resume import lines_until
from isogloss.checkpoints.run_identity import expected_identity, run_identity
from isogloss.config import Config
from isogloss.inputs import check_start
from isogloss.log import LOGS, Log, check_logs
from jobs import (
    check_same_curve,
    ds_config,
    losses_of,
    run_all,
    run_and_listen,
    run_distill,
    short_run,
    write_corpus,
)
from wrong_input import check_one_line, outcomes

# --- what may change ------------------------------------------------------------------------------

AUTO = {"type": "WarmupCosineLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
TEACHERS = [{"model": "A", "name": "a"}, {"model": "B", "loss": "alm", "weight": 2.0}]


JSD = {"loss": "generalized_jsd"}


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """A function (first flags, flags on resume) -> the line that refuses them, or ""."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    checkpoint = tmp_path / "step_0000003"
    checkpoint.mkdir()

    def config_of(flags):
        needed = {"student": "s", "data": "d", "teacher": "" if "teachers" in flags else "t"}
        return distill.Config(**needed | flags)

    def find(first, then):
        # by way of the file
        position = {"run": run_identity(config_of(first)), "written": 0}
        (checkpoint / "position.json").write_text(json.dumps(position))
        try:
            found = find_checkpoint("auto", tmp_path, expected_identity(config_of(then)))
        except ValueError as error:
            return str(error)
        assert found == checkpoint
        return ""

    return find


def changed(number, **values):
    """Return --teachers with some values of one entry changed."""
    entries = [dict(entry) for entry in TEACHERS]
    entries[number] |= values
    return {"teachers": json.dumps(entries, indent=1)}


def test_what_cannot_change_the_result_may_change_when_a_run_resumes(refusal, tmp_path):
    teachers = {"teachers": json.dumps(TEACHERS)}
    files = ROOT / "ds_configs"
    plain = {"ds_config": str(files / "zero2.json")}
    content = json.loads((files / "zero2.json").read_text())
    reports = {"flops_profiler": {"enabled": True}, "wall_clock_breakdown": True}
    (tmp_path / "reports.json").write_text(json.dumps(content | reports))
    (tmp_path / "clipped.json").write_text(json.dumps(content | {"gradient_clipping": 7.0}))
    harmless = [{"ds_config": str(path)} for path in (
        files / "zero2_offload.json", files / "zero3_offload.json", tmp_path / "reports.json")]
    for first, then in [
        ({}, {"loss_memory_mib": 7}), ({}, {"tiled": False}), ({}, {"pack": True}),
        ({}, {"max_bad_steps": 9}), ({}, {"teacher_tp": 2}), ({}, {"output_dir": "x"}),
        (teachers, changed(0, tp=2, engine="zero3", offload=True)), (changed(1, tp=4), teachers),
        ({"loss_options": {"beta": 0.5}, **JSD}, JSD),
        ({"loss_options": ' {"beta":0.30}', **JSD}, {"loss_options": {"beta": 0.3}, **JSD}),
        ({"token_weights": "early:256"}, {"token_weights": "early"}),
        ({}, {"eval_tasks": "mmlu", "eval_task_options": {"limit": 3}}),
        (teachers, changed(0)), ({"data": '[{"data": "a"}]'}, {"data": ' [{ "data":"a" }]'}),
        *[(plain, other) for other in harmless],
    ]:
        assert refusal(first, then) == "", then
    for first, then in [
        ({}, {"temperature": 2.0}), ({}, {"seed": 1}), ({}, {"max_length": 9}),
        ({"loss_options": {"beta": 0.3}, **JSD}, JSD), ({}, {"token_weights": "early:9"}),
        ({}, {"join_rows": 9}), ({"from_scratch": True}, {}),
        ({}, {"teacher_dtype": "float32"}), (teachers, changed(0, dtype="float32")),
        (teachers, changed(1, weight=1.5)), (teachers, changed(1, loss="uld")),
        (teachers, {"teachers": json.dumps(TEACHERS[::-1])}), (teachers, changed(0, model="C")),
        (plain, {"ds_config": str(tmp_path / "clipped.json")}),
    ]:
        assert "belongs to another run" in refusal(first, then), then


def test_another_schedule_is_refused_but_on_request(refusal, tmp_path):
    path = ds_config(tmp_path / "auto.json", 2, 1, 1, scheduler=AUTO)
    first = {"ds_config": path, "steps": 100}
    assert refusal(first, first) == ""
    line = refusal(first, first | {"steps": 200})
    for words in ("'total_num_steps': 100, 'warmup_num_steps': 5", "'total_num_steps': 200",
                  "--extend_schedule", "--steps"):
        assert words in line
    assert "\n" not in line
    assert refusal(first, first | {"steps": 200, "extend_schedule": True}) == ""
    other = first | {"steps": 200, "extend_schedule": True, "seed": 3}
    assert "belongs to another run" in refusal(first, other)
    # the old schedule, written down, with more steps
    params = {"total_num_steps": 100, "warmup_num_steps": 5}
    written = ds_config(tmp_path / "written.json", 2, 1, 1, scheduler=AUTO | {"params": params})
    assert refusal(first, {"ds_config": written, "steps": 200}) == ""
    # "auto" nowhere, so --steps may change; another type of schedule may not
    assert refusal({"ds_config": written}, {"ds_config": written, "steps": 7}) == ""
    other = ds_config(tmp_path / "other.json", 2, 1, 1,
                      scheduler={"type": "WarmupDecayLR", "params": params})
    line = refusal({"ds_config": written}, {"ds_config": other, "extend_schedule": True})
    assert "belongs to another run" in line


# --- what is there already ------------------------------------------------------------------------

@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("line", [
    "nothing", '{"epoch": 1}', '{"step": "2"}', "[2]", "\0\0\0", ""])
def test_a_line_of_a_log_that_no_run_wrote_is_refused_and_kept(tmp_path, name, line):
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    (tmp_path / name).write_text(text)
    check_logs(tmp_path, 0)  # a new run starts it anew
    with pytest.raises(ValueError, match="line 2 is no line of a run") as error:
        check_logs(tmp_path, 2)
    assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)
    assert (tmp_path / name).read_text() == text


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path):
    for half in ('{"step": 3, "lo', "\0\0", '{"step": 2}', ""):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + half)
        check_logs(tmp_path, 2)
        expected = ['{"step": 1}\n', '{"step": 2}\n'] + ['{"step": 2}\n'] * (half[-2:] == "2}")
        assert lines_until(tmp_path / "metrics.jsonl", 2) == expected


def test_a_log_that_is_no_text_file_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read"):
        check_logs(tmp_path, 1)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "samples.jsonl").mkdir()
    for start in (0, 1):
        with pytest.raises(ValueError, match=r"samples\.jsonl is no file there"):
            check_logs(tmp_path, start)


def test_fewer_steps_than_were_taken_are_refused(tmp_path):
    (tmp_path / "position.json").write_text('{"step": 4}')
    for steps in (4, 5):  # after the last step there may be an export to write
        check_start(distill.Config(student="s", data="d", teacher="t", steps=steps), tmp_path)
    with pytest.raises(ValueError, match=f"--steps 3: {tmp_path} has taken 4 already; give more"):
        check_start(distill.Config(student="s", data="d", teacher="t", steps=3), tmp_path)


def test_data_that_have_grown_are_refused(models, texts, tmp_path):
    """Their order is another, so that texts would be read twice or never."""
    flags = short_run(models, texts, tmp_path, f"--output_dir={tmp_path / 'run'}", "--kd_weight=0")
    [(codes, _)] = ranks.run(1, run_and_listen, [*flags, "--steps=1"])
    assert codes == [0]
    data = tmp_path / "corpus20.jsonl"
    rows = data.read_text()
    data.write_text(f"{rows}\n{rows}")
    [(codes, said)] = ranks.run(1, run_and_listen, [*flags, "--steps=2"])
    assert codes == [2] and said.count("\n") == 1
    assert "step_0000001 was written with 20 samples, and there are 40, whose order" in said
    data.write_text(rows)
    [(codes, _)] = ranks.run(1, run_and_listen, [*flags, "--steps=2"])
    assert codes == [0]


def test_an_older_checkpoint_does_not_know_how_many_samples_there_were(tmp_path):
    sources = [{"name": "a", "samples": None}, {"name": "b", "samples": 7}]
    for state in ({}, {"state": {}}, {"state": {"samples": [None, 7]}}):
        (tmp_path / "position.json").write_text(json.dumps(state))
        choose.check_samples(tmp_path, sources)
    sources[1]["samples"] = 8
    with pytest.raises(ValueError, match="was written with 7 samples of b, and there are 8,"):
        choose.check_samples(tmp_path, sources)


# --- layouts --------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a run is spread over ranks; all have eight samples a step."""

    num_ranks: int
    zero_stage: int
    grad_accum_steps: int = 1
    sequence_parallel: int = 1
    bf16: bool = False

    def __str__(self):
        return "-".join(str(int(value)) for value in self)

    def flags(self, folder):
        more = {"bf16": {"enabled": True}} if self.bf16 else {}
        params = {"total_num_steps": 9, "warmup_num_steps": 2}
        optimizer = {"lr": 3e-3, "weight_decay": 5.0, "torch_adam": True}  # decay spares norms
        size = 8 * self.sequence_parallel // self.num_ranks // self.grad_accum_steps
        config = ds_config(
            folder / f"{self}.json", self.zero_stage, size, self.grad_accum_steps,
            scheduler=AUTO | {"params": params},
            optimizer={"type": "AdamW", "params": optimizer}, **more)
        return [f"--ds_config={config}", f"--sequence_parallel={self.sequence_parallel}"]


# the layout of a checkpoint -> those in which the run resumes
MOVES = {
    Layout(2, 0): [Layout(2, 3), Layout(1, 0), Layout(1, 1)],
    Layout(2, 1): [Layout(2, 0), Layout(1, 3)],
    Layout(2, 2, 2): [Layout(1, 0), Layout(4, 2), Layout(4, 1, 1, 2)],
    Layout(2, 3): [Layout(1, 1), Layout(2, 0), Layout(4, 3, 4, 4)],
    Layout(2, 3, 2, 2): [Layout(4, 3, 2, 2), Layout(2, 3)],
    Layout(2, 0, bf16=True): [Layout(2, 2, bf16=True)],
    Layout(2, 3, bf16=True): [Layout(2, 0, bf16=True)],
}


def test_what_an_older_checkpoint_lacks_was_as_it_is_by_default(monkeypatch):
    monkeypatch.setattr(choose, "position_of", lambda _: {"run": {"loss": "uld"}})
    choose.check_identity("auto", "folder", {"loss": "uld", "staleness": Config.staleness})
    for other in ({"loss": "alm"}, {"loss": "uld", "staleness": 0}):
        with pytest.raises(ValueError, match="belongs to another run"):
            choose.check_identity("auto", "folder", other)


def test_a_flag_that_left_had_to_be_as_it_always_is_now(monkeypatch):
    run = {"loss": "alm", "alm_mode": "binary_kl", "teacher_alpha": 1.0}
    monkeypatch.setattr(choose, "position_of", lambda _: {"run": run})
    choose.check_identity("auto", "folder", {"loss": "alm"})
    run |= {"jsd_beta": 0.5, "token_half_life": 256.0, "tools_key": "tools"}  # elsewhere now
    choose.check_identity("auto", "folder", {"loss": "alm"})
    run["alm_mode"] = "squared"
    with pytest.raises(ValueError, match="alm_mode was 'squared', is 'binary_kl'"):
        choose.check_identity("auto", "folder", {"loss": "alm"})


@pytest.mark.slow
def test_a_run_goes_on_in_every_other_layout(models, texts, tmp_path):
    """Weights, Adam's state, step counters, weight decay and the schedule go along."""
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", "--max_length=60", "--steps=6",
            f"--data={write_corpus(tmp_path, texts, 30)}", "--num_workers=0", "--eval_rows=3"]
    runs = {1: [], 2: [], 4: []}
    for first, layouts in MOVES.items():
        saved = tmp_path / str(first) / "checkpoints" / "step_0000004"
        for then in layouts:
            runs[then.num_ranks].append([*argv, *then.flags(tmp_path), f"--resume={saved}",
                                         f"--output_dir={tmp_path / f'{first} {then}'}"])
    run_all(2, *[[*argv, *first.flags(tmp_path), f"--output_dir={tmp_path / str(first)}",
                  "--save_every=2"] for first in MOVES], *runs[2])
    run_all(1, *runs[1])
    run_all(4, *runs[4])
    whole = losses_of(tmp_path / str(next(iter(MOVES))))
    assert whole[-2]["loss"] < 0.9 * whole[0]["loss"]
    for first, layouts in MOVES.items():
        folder = tmp_path / str(first)
        # the held-out accuracy leaps in bf16
        last = -1 if first.bf16 else None
        check_same_curve(whole[:last], losses_of(folder)[:last], 3e-2 if first.bf16 else 1e-4,
                         1e-6, first)
        for then in layouts:
            resumed = losses_of(tmp_path / f"{first} {then}")[:last]
            tolerance = 2e-2 if first.bf16 else 1e-5
            check_same_curve(losses_of(folder, 4)[:last], resumed, tolerance, 1e-7, (first, then))
        names = {path.name for path in (folder / "checkpoints").glob("step_*")}
        assert names == {"step_0000004", "step_0000006"}, first
    config = ds_config(tmp_path / "16 samples a step.json", 3, 4, 2)
    other = [*argv, f"--ds_config={config}", f"--resume={saved}"]
    assert ranks.run(2, run_distill, [other]) == [[2]] * 2


def beside_a_limit(folder, flags, changes):
    """`outcomes`, of which all but the first two on ranks that can write no weights to a disk."""
    ended = outcomes(folder, flags, changes[:2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    ended += outcomes(folder, flags, changes[2:])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ended


def test_a_conversion_writes_where_the_run_writes_and_a_full_disk_is_one_line(
        models, texts, tmp_path):
    """Nothing is written beside the checkpoint of another run, which may be on a read-only disk."""
    flags = short_run(models, texts, tmp_path, "--max_length=40", "--kd_weight=0")
    layouts = [f"--ds_config={ds_config(tmp_path / f'{stage}.json', stage, 2, 1)}"
               for stage in (0, 2)]
    runs = [tmp_path / "of_0", tmp_path / "of_2"]
    first = [f"{layout} --output_dir={run} --steps=1" for layout, run in zip(layouts, runs)]
    saved = [run / "checkpoints" / "step_0000001" for run in runs]
    then = [f"{layout} --resume={path} --output_dir={tmp_path / 'then'} --steps=2"
            for layout, path in zip(layouts[::-1], saved)]
    on_ranks = ranks.run(2, beside_a_limit, tmp_path, flags, [*first, *then])
    for path, *of_ranks in zip(saved, *(ended[2:] for ended in on_ranks), strict=True):
        size = sum(file.stat().st_size for file in path.iterdir())
        check_one_line(of_ranks, f"--resume: {path} was written in another layout, and to convert "
                                 f"it takes up to {3 * size / 2**20:.0f} MiB: {tmp_path}/then/"
                                 "checkpoints/.step_0000001.incomplete cannot be written (")
        assert "MiB are free there" in of_ranks[0].stderr
        assert not list((tmp_path / "then" / "checkpoints").iterdir())
    changed = [path.parent.stat().st_mtime_ns for path in saved]
    [ended, _] = ranks.run(2, outcomes, tmp_path, flags, then[:1])
    assert [outcome.exit_code for outcome in ended] == [0], ended
    assert [path.parent.stat().st_mtime_ns for path in saved] == changed
    written = {path.name for path in (tmp_path / "then" / "checkpoints").iterdir()}
    assert {name for name in written if not name.endswith(".py")} == {"step_0000002"}


@pytest.mark.slow
def test_an_extended_schedule_is_that_of_the_new_steps(models, texts, tmp_path):
    config = ds_config(tmp_path / "ds.json", 1, 2, 1, scheduler=AUTO)
    argv = [f"--student={models[0]}", f"--data={write_corpus(tmp_path, texts, 30)}",
            "--kd_weight=0", "--max_length=60", f"--ds_config={config}", "--num_workers=0"]
    run = [*argv, f"--output_dir={tmp_path / 'run'}"]
    codes = ranks.run(1, run_distill, [
        [*run, "--steps=4", "--save_every=4"], [*run, "--steps=8"],
        [*run, "--steps=8", "--extend_schedule"],
        [*argv, "--steps=8", f"--output_dir={tmp_path / 'at_once'}"]])
    assert codes == [[0, 2, 0, 0]]
    extended, at_once = ([line["lr"] for line in losses_of(tmp_path / name) if "lr" in line]
                         for name in ("run", "at_once"))
    assert extended[4:] == at_once[4:] and len(extended) == 8
    assert extended[1:4] != at_once[1:4]


def test_states_that_would_be_lost_are_refused():
    """Only Adam's state is carried over; fused 16-bit weights of stage 0 are not."""
    bf16 = {"enabled": True}
    fused = {"type": "AdamW", "params": {}}
    unfused = {"type": "AdamW", "params": {"torch_adam": True}}

    def refusal(first, then, **ds_config):
        position = {"layout": {"zero_stage": first}, "run": {"ds_config": ds_config}}
        try:
            check_convertible("step_0000001", position, {"zero_stage": then})
        except ValueError as error:
            return str(error)
        return ""

    for stages in ((0, 2), (2, 0), (1, 3), (3, 1)):
        assert refusal(*stages, optimizer=unfused, bf16=bf16) == refusal(*stages) == ""
        assert "this is SGD" in refusal(*stages, optimizer={"type": "SGD"})
        amsgrad = {"type": "Adam", "params": {"amsgrad": True}}
        assert "only the state of plain Adam" in refusal(*stages, optimizer=amsgrad)
    assert "torch_adam" in refusal(0, 2, optimizer=fused, bf16=bf16)
    assert refusal(1, 2, optimizer=fused, bf16=bf16) == refusal(0, 2, bf16=bf16) == ""
    # every rank of stage 0 loads the same file, whatever is in it
    assert refusal(0, 0, optimizer={"type": "SGD"}) == ""
    assert refusal(0, 0, optimizer=fused, bf16=bf16) == ""


def test_the_record_of_a_run_is_of_its_last_start(tmp_path, monkeypatch):
    """Records of what came after the checkpoint of a start are gone, as its metrics are."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    model = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    cfg = Config(student=model, teacher=model, data="d", output_dir=str(tmp_path),
                 ds_config=ds_config(tmp_path / "ds.json", 0, 1, 1))
    kept = [["run.json"], ["run.json", "run_0000003.json"], ["run.json", "run_0000002.json"],
            ["run.json"]]
    for steps, start, names in zip((4, 6, 8, 9), (0, 3, 2, 0), kept):
        Log(replace(cfg, steps=steps), start, {})
        assert sorted(path.name for path in tmp_path.glob("run*.json")) == names
        assert read_record(tmp_path)[1].steps == steps
        # a start that takes no step only exports what was trained before
        assert read_record(tmp_path, start)[1].steps == (steps if start == 0 else 4)
        assert read_record(tmp_path, start + 1)[1].steps == steps
