"""own.py: a teacher that follows the student, in every layout, to the bit after a resume."""

import json
import resource

import pytest

import jobs
import ranks
import wrong_input
from isogloss.config import Config, configs_by_teacher
from isogloss.teachers.own import OwnTeacher


def own_flags(models, texts, folder, stage=1, **more):
    """Return the flags of a run in which a student is its own teacher."""
    flags = {"student": str(models[0]), "teacher": "self",
             "data": jobs.write_corpus(folder, texts, 20),
             "ds_config": jobs.ds_config(folder / f"ds{stage}.json", stage, 2, 1), "max_length": 60,
             "steps": 4, "output_dir": str(folder / "run")}
    return flags | more


def argv_of(flags):
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.mark.parametrize("num_ranks, stage, more", [
    (1, 0, {}), (2, 1, {}), (2, 2, {"sequence_parallel": 2}), (2, 3, {}), (2, 3, {"pack": True}),
], ids=str)
def test_a_live_teacher_says_what_the_student_says(models, texts, tmp_path, num_ranks, stage, more):
    """Whatever the layout: its loss is 0 in each step, and it changes nothing."""
    flags = own_flags(models, texts, tmp_path, stage, teacher_ema=0.0, **more)
    alone = flags | {"teacher": "", "kd_weight": 0.0, "output_dir": str(tmp_path / "alone")}
    del alone["teacher_ema"]
    jobs.run_all(num_ranks, argv_of(flags), argv_of(alone))
    lines = jobs.losses_of(tmp_path / "run")
    assert all(abs(line["kd"]) < 1e-6 for line in lines)
    for line, expected in zip(lines, jobs.losses_of(tmp_path / "alone"), strict=True):
        assert line["ce"] == pytest.approx(expected["ce"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def mean_weights(flags):
    """Take steps; return the largest error of the teacher's weights against means by hand."""
    from isogloss import distill
    from isogloss.inputs import build_collator

    state, inputs = jobs.job_for(flags)
    collate = build_collator(state.cfg, inputs, state.device)
    means = {name: weight.detach().double() for name, weight in
             state.engine.module.whole_weights()}
    [setup] = state.teachers
    worst = moved = 0.0
    for first in range(0, 8, 2):
        batch = collate([inputs.data.sources[0].train_data[first + i]["text"] for i in range(2)])
        distill.train_step(state, [batch])
        weights = setup.source.weights()
        for name, weight in state.engine.module.whole_weights():
            before = means[name].clone()
            weight = weight.detach()
            means[name] += (1 - state.cfg.teacher_ema) * (weight.double() - means[name])
            moved = max(moved, float((means[name] - before).abs().max()))
            worst = max(worst, float((weights[name].double() - means[name]).abs().max()))
    shares = {weights[name].data_ptr() == weight.data_ptr()
              for name, weight in state.engine.module.whole_weights()}
    return worst, moved, shares


@pytest.mark.parametrize("ema", [0.9, 0.0])
def test_a_teacher_is_the_mean_of_the_student_over_the_steps(models, texts, tmp_path, ema):
    [(worst, moved, shares)] = ranks.run(1, mean_weights, own_flags(models, texts, tmp_path,
                                                           teacher_ema=ema))
    assert moved > 1e-5 and worst < 1e-6 and shares == {ema == 0}


def shared_weights(flags):
    """Take steps; return the names of the teacher's weights that the student holds, or not."""
    from isogloss import distill
    from isogloss.build import resume
    from isogloss.inputs import build_collator

    state, inputs = jobs.job_for(flags)
    resume(state, inputs)
    [setup] = state.teachers
    places = {weight.data_ptr() for weight in state.engine.module.parameters()}
    before = {name: weight.clone() for name, weight in setup.source.weights().items()}
    collate = build_collator(state.cfg, inputs, state.device)
    rows = inputs.data.sources[0].train_data
    distill.train_step(state, [collate([rows[i]["text"] for i in range(2)])])
    weights = setup.source.weights()
    assert weights and all(weights[name].equal(before[name]) for name in weights)
    names = {True: set(), False: set()}
    for name, weight in weights.items():
        names[weight.data_ptr() in places].add(name)
    return names


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_teacher_is_no_second_copy_of_what_an_adapter_leaves(models, texts, tmp_path, stage):
    flags = own_flags(models, texts, tmp_path, stage, lora_r=2)
    [names] = ranks.run(1, shared_weights, flags)
    assert not names[stage == 3] and names[stage < 3]  # of ZeRO-3 no rank holds them whole


def test_means_go_on_bit_for_bit(models, texts, tmp_path):
    """Also as members of a mean; in another layout the curve is the same."""
    members = [{"model": "self", "ema": 0.9}, {"model": "self", "ema": 0.0, "name": "live"}]
    of_mean = {"teacher": "", "teachers": json.dumps(members), "teacher_weights": "mean_p"}
    for name, more in (("single", {"teacher_ema": 0.9}), ("mean", of_mean)):
        flags = own_flags(models, texts, tmp_path, 2, save_every=2, **more)
        whole, halves, other = [flags | {"output_dir": str(tmp_path / f"{name}_{kind}")}
                                for kind in ("whole", "halves", "other")]
        first = {"steps": 2, "extend_schedule": True}
        jobs.run_all(2, argv_of(whole), argv_of(halves | first), argv_of(other | first))
        jobs.run_all(2, argv_of(halves | {"extend_schedule": True}))
        changed = {"ds_config": jobs.ds_config(tmp_path / "ds.json", 1, 4, 1),
                   "extend_schedule": True}
        jobs.run_all(1, argv_of(other | changed))
        lines = jobs.losses_of(tmp_path / f"{name}_whole")
        assert jobs.losses_of(tmp_path / f"{name}_halves") == lines and lines[-1]["kd"] > 1e-6
        jobs.check_same_curve(lines, jobs.losses_of(tmp_path / f"{name}_other"), 1e-4, 1e-7)
    # one that stays as it was is farther away
    frozen = own_flags(models, texts, tmp_path, 2)
    jobs.run_all(2, argv_of(frozen))
    assert jobs.losses_of(tmp_path / "run")[-1]["kd"] > 1.1 * lines[-1]["kd"]


def saving_beside_a_limit(folder, flags, changes):
    """`outcomes`, of which in the first no disk takes the file of a teacher."""
    save = OwnTeacher.save

    def save_beside_a_limit(self, path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            save(self, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    OwnTeacher.save = save_beside_a_limit
    ended = wrong_input.outcomes(folder, flags, changes[:1])
    OwnTeacher.save = save
    return ended + wrong_input.outcomes(folder, flags, changes[1:])


def test_a_full_disk_is_one_line_and_who_reads_a_checkpoint_reads_the_teacher(
        models, texts, tmp_path):
    flags = argv_of(own_flags(models, texts, tmp_path, teacher_ema=0.9, max_length=40))
    [(full, whole)] = ranks.run(1, saving_beside_a_limit, tmp_path, flags, ["--steps=1"] * 2)
    assert full.exit_code == 1 and "Traceback" not in full.stderr
    assert full.stderr.count("step_0000001 cannot be written (") == 1
    assert whole.exit_code == 0
    saved = tmp_path / "run" / "checkpoints" / "step_0000001"
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1
    assert (saved / "teacher_0.safetensors").exists()


def test_the_flag_is_of_those_teachers_of_a_list_that_are_the_student(models):
    def means_of(entries, **flags):
        cfg = Config(student=str(models[0]), data="x", teachers=json.dumps(entries), **flags)
        cfg.check_run()
        return {name: each.teacher_ema for name, each in configs_by_teacher(cfg).items()}

    other = {"model": str(models[1]), "name": "other"}
    live = {"model": "self", "name": "live", "ema": 0.0}
    entries = [{"model": "self"}, {"model": str(models[0]), "name": "path"}, live, other]
    expected = {"self": 0.9, "path": 0.9, "live": 0.0, "other": 1.0}
    assert means_of(entries, teacher_ema=0.9) == expected
    assert means_of([other, live]) == {"other": 1.0, "live": 0.0}
    for wrong in ([other], [other, {"model": "self", "ema": 1.0}]):
        with pytest.raises(ValueError, match="follows the student, and no teacher of --teachers"):
            means_of(wrong, teacher_ema=0.9)
    with pytest.raises(ValueError, match=f"ema 0.5: follows the student, and .* is {models[1]}"):
        means_of([other | {"ema": 0.5}], teacher_ema=0.9)


def test_what_a_teacher_cannot_follow_is_refused(models, texts, tmp_path):
    flags = own_flags(models, texts, tmp_path, teacher_ema=0.9)
    jobs.check_refusals(flags, [
        ({}, "nothing is wrong"),
        ({"teacher": str(models[1])}, f"--teacher_ema 0.9: follows the student, and --teacher is "
                                      f"{models[1]}; use --teacher self"),
        ({"from_scratch": True}, "--teacher self with --from_scratch: random weights have nothing"),
        ({"lora_r": 4}, "--teacher_ema 0.9 with --lora_r 4, whose weights are no copy"),
        ({"teacher_tp": 2}, "--teacher_ema 0.9 with --teacher_tp 2, which cuts what is copied"),
        ({"teacher_engine": "zero3"}, "--teacher_ema 0.9 with --teacher_engine zero3, and a whole"),
        ({"teacher_offload": True}, "--teacher_ema 0.9 with --teacher_offload True, whose copy"),
    ])
