"""The calculator: its sizes are those of the models, its bytes those that real jobs allocate."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import ranks
from benchmarks.memory import flags_of, measure, prepare
from conftest import ROOT, asset
from isogloss import plan as planning
from isogloss.config import Config
from isogloss.plan import GIB, Need, advice, lines_of, plan, shape_of

MEASURED = "zero 1, bf16", "zero 3"  # layouts of benchmarks/memory.py


def measured(flags):
    return {name: measure(flags[name]) for name in flags}


def test_what_is_expected_is_what_jobs_allocate(tmp_path):
    base = prepare(asset(), tmp_path, hidden=256, layers=2)
    flags = {name: flags_of(name, base, tmp_path, length=96) for name in MEASURED}
    for name, result in ranks.run(2, measured, flags)[0].items():
        expected = plan(Config(**flags[name]), num_ranks=2, on_gpu=False)
        assert expected.state == pytest.approx(result["state"], rel=0.1), name
        # an upper limit of the loss's memory is a larger part of jobs that are as small as these
        assert expected.peak == pytest.approx(result["peak"], rel=0.2), name


@pytest.fixture
def cfg(models, tmp_path):
    """Config of a run of 8 samples of 64 positions a step, two in a micro-batch."""
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
              "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return Config(student=str(models[0]), teacher=str(models[1]), data="d", max_length=64,
                  teacher_max_length=80, ds_config=str(path))


def test_a_shape_is_that_of_the_model(models, untied):
    from transformers import AutoModelForCausalLM

    for folder in (models[0], untied):
        model = AutoModelForCausalLM.from_pretrained(folder)
        shape = shape_of("student", str(folder))
        assert shape.weights == sum(weight.numel() for weight in model.parameters())
        assert shape.layer == sum(w.numel() for w in model.model.layers[0].parameters())
        assert (shape.head, shape.tied) == (model.lm_head.weight.numel(), folder == models[0])
        assert (shape.hidden, shape.inner, shape.heads, shape.kv_heads) == (32, 64, 32, 16)


def test_an_adapter_has_as_many_weights_as_peft_gives_it(models):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    for targets in ("", "q_proj,down_proj"):
        model = AutoModelForCausalLM.from_pretrained(models[0])
        config = peft.LoraConfig(r=5, target_modules=targets.split(",") if targets else
                                 "all-linear", task_type="CAUSAL_LM")
        trained, _ = peft.get_peft_model(model, config).get_nb_trainable_parameters()
        cfg = SimpleNamespace(lora_r=5, lora_targets=targets)
        assert planning.adapter_weights(shape_of("student", str(models[0])), cfg) == trained


def test_stages_divide_what_they_say(cfg):
    weights = shape_of("student", cfg.student).weights
    stays = {}
    for stage in range(4):
        stays[stage] = plan(cfg, 4, on_gpu=False, stage=stage).stays
    assert [stays[stage]["weights"] for stage in range(4)] == [2 * weights] * 3 + [weights // 2]
    assert [stays[stage]["optimizer"] for stage in range(4)] == [12 * weights] + [3 * weights] * 3
    assert stays[3]["gradients"] == weights // 2
    teacher = shape_of("teacher", cfg.teacher)
    assert stays[0][f"teacher {cfg.teacher}"] == 2 * teacher.weights


def test_what_a_rank_sends_follows_from_the_stage(cfg):
    weights = shape_of("student", cfg.student).weights
    # 4 ranks, one micro-batch in a step: three quarters of the weights or gradients, 2 bytes each
    sent = [plan(cfg, 4, stage=stage).sent for stage in range(4)]
    part = 0.75 * 2 * weights
    assert sent == pytest.approx([2 * part, 2 * part, 2 * part, 3 * part])
    # 2 ranks, two micro-batches
    sent = [plan(cfg, 2, stage=stage).sent for stage in range(4)]
    part = 0.5 * 2 * weights
    assert sent == pytest.approx([2 * part, 2 * part, 3 * part, 6 * part])
    assert plan(cfg, 1, stage=0).sent == 0


def test_flags_change_what_they_are_for(cfg):
    shape = shape_of("student", cfg.student)
    student = shape_of("teacher", cfg.teacher)

    def need(**flags):
        return plan(replace(cfg, **flags), 4, on_gpu=False)

    plain = need()
    assert need(activation_checkpointing=True).backward["activations"] < \
        plain.backward["activations"]
    adapted = need(lora_r=2, lora_targets="q_proj")
    assert adapted.stays["optimizer"] == 12 * 2 * 2 * (32 + 32) // 4
    assert adapted.backward["loss"] == plain.backward["loss"] - 4 * shape.head
    outputs = f"outputs of {cfg.teacher}"
    positions = 2 * 80
    assert plain.backward[outputs] == 2 * 32 * positions
    assert need(teacher_output="logits").backward[outputs] == 2 * student.vocab * positions
    assert need(teacher_output="topk", teacher_output_topk=9).backward[outputs] == 72 * positions
    assert need(teacher_offload=True).state < plain.state
    assert need(teacher_tp=2).sends[f"teacher {cfg.teacher}"] == 4 * positions * 32 * 2 / 2 * 2
    assert sum(need(kd_weight=0.0).backward.values()) < sum(plain.backward.values())


def test_the_peak_is_what_stays_and_the_largest_of_three():
    need = Need({"a": 10, "b": 1}, {"c": 3, "d": 4}, 6, 5, {})
    assert (need.state, need.peak) == (11, 18)
    assert replace(need, teacher_pass=9).peak == 20
    assert replace(need, step=99).peak == 110


def test_the_choice_fits_and_sends_least():
    def need(peak, sent):
        return Need({"all": peak * GIB}, {}, 0, 0, {"all": sent * GIB})

    needs = [("large", need(90, 1)), ("good", need(70, 3)), ("equal", need(60, 3)),
             ("small", need(10, 9))]
    assert advice(needs, 80)[0] == "good"
    assert advice(needs, 100)[0] == "large"
    assert advice(needs, 12)[0] == "small"
    assert advice(needs, 5) is None
    assert "DOES NOT FIT" in "\n".join(lines_of(need(90, 1), 80))


def test_the_command_says_what_to_choose(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    planning.tool(planning.Args, planning.main, positional=("recipe",), argv=[
        "recipes/qwen3_8b_to_smollm2_1.7b.yaml", "--gpus=8", "--gpu_gib=24"])
    printed = capsys.readouterr().out
    assert "DOES NOT FIT 95% of 24 GiB" in printed
    # 16.4 GB of teacher leave no room, over two ranks they do
    assert "choose: ZeRO" in printed and "--teacher_tp" in printed.splitlines()[-1]
    for argv, message in ((["recipes/none.yaml"], "cannot be read"),
                          (["recipes/on_policy_maths.yaml", "--gpus=0"], "--gpus 0: expected 1")):
        with pytest.raises(SystemExit):
            planning.tool(planning.Args, planning.main, positional=("recipe",), argv=argv)
        assert message in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_named(cfg):
    with pytest.raises(ValueError, match=r"--student org/none: .*; architectures.yaml has the"):
        plan(replace(cfg, student="org/none"), 2)
