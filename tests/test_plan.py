"""The calculator: its sizes are those of the models, its bytes and hours follow from them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT
from isogloss import plan as planning
from isogloss.command import PlanArgs, tool
from isogloss.config import Config
from isogloss.flags.parse import parse_flags
from isogloss.plan import (
    GIB,
    Need,
    advice,
    gain_of,
    gpus_of,
    lines_of,
    plan,
    shape_of,
    time_line,
    time_of,
)


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


def test_a_token_passes_the_experts_that_are_chosen_for_it_alone(tmp_path):
    from transformers import AutoConfig

    sizes = dict(num_hidden_layers=3, hidden_size=16, moe_intermediate_size=8, num_experts=6,
                 num_experts_per_tok=2, head_dim=8, num_attention_heads=2, num_key_value_heads=1)
    AutoConfig.for_model("qwen3_moe", vocab_size=50, **sizes).save_pretrained(tmp_path)
    shape = shape_of("teacher", str(tmp_path))
    idle = 3 * (6 - 2) * 3 * 16 * 8  # layers, experts, matrices
    assert shape.active * shape.weights == pytest.approx(shape.weights - idle)


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
    assert stays[0][f"weights of {cfg.teacher}"] == 2 * teacher.weights


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
    ends = shape.head * (1 if shape.tied else 2)
    both = need(lora_r=2, lora_targets="q_proj", lora_embeddings=True)
    assert both.stays["optimizer"] - adapted.stays["optimizer"] == 12 * ends // 4
    assert both.backward["loss"] == plain.backward["loss"]
    alone = need(train_only="embeddings")
    assert alone.stays["optimizer"] == 12 * ends // 4 < plain.stays["optimizer"]
    later = need(train_only="embeddings", freeze_until=3)
    assert later.stays["optimizer"] == plain.stays["optimizer"]
    outputs = f"outputs of {cfg.teacher}"
    positions = 2 * 80
    assert plain.backward[outputs] == 2 * 32 * positions
    assert need(teacher_output="logits").backward[outputs] == 2 * student.vocab * positions
    assert need(teacher_output="topk", teacher_output_topk=9).backward[outputs] == 72 * positions
    assert need(teacher_offload=True).state < plain.state
    assert sum(need(kd_weight=0.0).backward.values()) < sum(plain.backward.values())


# what distill.py refuses -> (flags, ranks, ranks of a node)
REFUSED = {
    "--teacher_tp 8: does not divide the 4 ranks": ({"teacher_tp": 8}, 4, 4),
    "4 ranks on nodes of 3": ({}, 4, 3),
    "--teacher_ranks 2: a node of this job has 2 ranks": ({"teacher_ranks": 2}, 4, 2),
    "--teacher_tp 2 with --teacher_engine replicated: a whole copy":
        ({"teacher_tp": 2, "teacher_engine": "replicated"}, 4, 4),
    "--sequence_parallel 4: does not divide the 6 ranks": ({"sequence_parallel": 4}, 6, 6),
    "--sequence_parallel 8": ({"sequence_parallel": 8}, 8, 8),
    "--pipeline_parallel 2: --ds_config": ({"pipeline_parallel": 2}, 4, 4),
    "--teacher_compile: not with":
        ({"teacher_tp": 2, "teacher_compile": True, "teacher_engine": "zero3"}, 4, 4),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_distill_refuses_is_not_approved(cfg, message):
    flags, num_ranks, per_node = REFUSED[message]
    if num_ranks == 6:  # a batch that 6 ranks divide but for this
        config = json.loads(Path(cfg.ds_config).read_text()) | {"train_batch_size": 12}
        Path(cfg.ds_config).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(replace(cfg, **flags), num_ranks, per_node=per_node)


def test_a_recipe_says_for_which_gpus_it_is(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# GPUs: 16 of 40 GiB, 4 on a node\nsteps: 1\n")
    assert gpus_of(PlanArgs(recipe=str(path))) == (16, 4, 40)
    assert gpus_of(PlanArgs(recipe=str(path), gpus=2, gpu_gib=80.0)) == (2, 2, 80)
    path.write_text("steps: 1\n")
    assert gpus_of(PlanArgs(recipe=str(path))) == (8, 8, 80)


def test_the_peak_is_what_stays_and_the_largest_of_three():
    need = Need({"a": 10, "b": 1}, {"c": 3, "d": 4}, 6, 5)
    assert (need.state, need.peak) == (11, 18)
    assert replace(need, teacher_pass=9).peak == 20
    assert replace(need, step=99).peak == 110


def test_the_choice_is_the_first_that_fits():
    def need(peak):
        return Need({"all": peak * GIB}, {}, 0, 0)

    needs = [("large", need(90)), ("good", need(70)), ("small", need(10))]
    assert [advice(needs, gib)[0] for gib in (100, 80, 12)] == ["large", "good", "small"]
    assert advice(needs, 5) is None
    assert "DOES NOT FIT" in "\n".join(lines_of(need(90), 80))


def test_the_command_says_what_to_choose(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    tool("plan", ["recipes/qwen3_8b_to_smollm2_1.7b.yaml", "--gpus=8", "--gpu_gib=24"])
    printed = capsys.readouterr().out
    assert "DOES NOT FIT 95% of 24 GiB" in printed
    # 16.4 GB of teacher leave no room, over two ranks they do
    *_, choice, stated = printed.splitlines()
    assert "choose: ZeRO" in choice and "--teacher_tp" in choice
    assert stated.startswith("the recipe has ZeRO 1, --activation_checkpointing (")
    for argv, message in ((["recipes/none.yaml"], "cannot be read"),
                          (["recipes/on_policy_maths.yaml", "--gpus=-1"], "--gpus -1: expected 0"),
                          (["recipes/on_policy_maths.yaml", "--gpu_gib=-1"], "--gpu_gib -1"),
                          (["recipes/llama_3.1_70b_to_8b.yaml", "--gpus=4"], "--teacher_tp 8: d")):
        with pytest.raises(SystemExit):
            tool("plan", argv)
        assert message in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_named(cfg):
    with pytest.raises(ValueError, match=r"--student org/none: .*; architectures.yaml has the"):
        plan(replace(cfg, student="org/none"), 2)


def test_time_follows_from_operations(monkeypatch):
    """By hand: a student of P weights and a teacher of Q, 96 samples of 2,048 on 16 ranks."""
    monkeypatch.chdir(ROOT)
    recipe = "recipes/qwen3_4b_to_llama_3.2_1b.yaml"
    cfg = parse_flags(Config, [f"--config={recipe}"], file_flag="config")
    need = plan(cfg, 16, per_node=8)
    positions = 96 * 2048 / 16
    P, Q = [shape_of("student", name).weights for name in (cfg.student, cfg.teacher)]
    assert need.operations == pytest.approx((8 * P + 2 * Q) * positions)  # with checkpointing
    assert need.tokens == 96 * 2048 and need.beside == 0
    args = PlanArgs(recipe=recipe, tflops=500.0, mfu=0.2)
    seconds = need.operations / 1e14
    hours = 100 * seconds / 3600
    expected = seconds, 96 * 2048 / seconds, hours
    assert time_of(need, cfg, args) == pytest.approx(expected)
    assert f": {hours:.3g} hours" in time_line(need, cfg, args)
    written = replace(cfg, on_policy=0.5, join_rows=0)
    assert time_line(need, written, args).startswith("no hours are said: how fast the student")
    served = parse_flags(Config, [f"--config={ROOT / 'recipes/llama_3.1_70b_served.yaml'}"],
                         file_flag="config")
    assert time_line(need, served, args).startswith("no hours are said: what a server's GPUs")
    plain = plan(replace(cfg, activation_checkpointing=False), 16, per_node=8)
    saved = 2 * P / (8 * P + 2 * Q)
    assert gain_of(plain, need) == f"; the choice trains by {saved:.0%} fewer operations"
    assert not gain_of(need, need) and not gain_of(need, plain)
    apart = plan(replace(cfg, teacher_ranks=2), 16, per_node=8)  # 12 students, 4 teachers
    assert apart.beside == pytest.approx(2 * Q * 96 * 2048 / 4)
    assert apart.operations == pytest.approx(8 * P * 96 * 2048 / 12)


def test_four_bits_are_nine_sixteenths_of_a_byte(monkeypatch):
    monkeypatch.chdir(ROOT)
    path = "recipes/qwen3_8b_to_llama_3.1_8b_lora.yaml"
    cfg = parse_flags(Config, [f"--config={path}"], file_flag="config")
    shape = shape_of("student", cfg.student)
    whole, packed = [plan(replace(cfg, quantize=how), 2).stays["weights"] for how in ("", "nf4")]
    saved = (shape.weights - 2 * shape.head) * (2 - 9 / 16)  # its head is not its embedding
    assert whole - packed == pytest.approx(saved)
