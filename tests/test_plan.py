"""The calculator: its sizes are those of the models, its bytes and seconds follow from them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
from conftest import ROOT
from isogloss import plan as planning
from isogloss.command import PlanArgs, tool
from isogloss.config import Config
from isogloss.flags.parse import parse_flags
from isogloss.job.launch import start_distributed
from isogloss.job.layout import Replica
from isogloss.plan import (
    GIB,
    Need,
    advice,
    gpus_of,
    lines_of,
    plan,
    shape_of,
    time_and_price,
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


def positions_run(num_rows, width):
    """Return how many positions this rank runs when each of two ranks asks for its own.

    Returns:
        (with other ids on every rank, with the same of a sequence group).
    """
    start_distributed()
    replica = Replica(2)
    counted = []

    def run(ids):
        counted[-1] += ids.numel()
        return ids[..., None].float()

    for sequence_parallel in (1, 2):
        counted.append(0)
        ids = torch.ones(num_rows, width, dtype=torch.long)
        replica.run_for_each_member(run, ids, sequence_parallel)
    return counted


def bytes_of_a_ring(ranks_in_order, per_node, size):
    """Return {rank: [bytes to its node, to others]} of an all-reduce, step by step.

    Every rank of a node is once the one that sends to the next node: as many rings, each with its
    part, and in each 2 (N - 1) steps of an N-th of that.
    """
    num_ranks = len(ranks_in_order)
    sent = {rank: [0.0, 0.0] for rank in ranks_in_order}
    for turn in range(per_node):
        ring = []
        for first in range(0, num_ranks, per_node):
            node = ranks_in_order[first : first + per_node]
            ring += node[turn:] + node[:turn]
        for _ in range(2 * (num_ranks - 1)):
            for place, rank in enumerate(ring):
                other = ring[(place + 1) % num_ranks]
                leaves = other // per_node != rank // per_node
                sent[rank][leaves] += size / per_node / num_ranks
    return sent


def test_what_is_sent_is_what_is_counted(cfg):
    """For a sharded teacher and for gradients, on one node and on two."""
    shape = shape_of("teacher", cfg.teacher)
    student = shape_of("student", cfg.student)
    counted = ranks.run(2, positions_run, 2, 80)
    assert counted == [[2 * 160, 160]] * 2  # all that both ask for, on either
    for sequence_parallel, positions in zip((1, 2), counted[0]):
        sharded = plan(replace(cfg, teacher_tp=2, sequence_parallel=sequence_parallel), 2, stage=1)
        # after attention and after the MLP partial sums are added, 32 halves for each position
        ring = bytes_of_a_ring([0, 1], 2, positions * 32 * 2)
        micro_batches = 2 * sequence_parallel  # of 2 samples, of the 8 of a step
        expected = micro_batches * shape.layers * 2 * ring[0][0]
        assert sharded.sends[f"teacher {cfg.teacher}"] == pytest.approx(expected)
        assert sharded.network[f"teacher {cfg.teacher}"] == 0
    for per_node in (1, 2, 4):
        need = plan(cfg, 4, stage=1, per_node=per_node)
        ring = bytes_of_a_ring([0, 1, 2, 3], per_node, 2 * student.weights)
        for inside, outside in ring.values():
            assert need.sends["gradients"] == pytest.approx(inside + outside)
            assert need.network["gradients"] == pytest.approx(outside)


def test_teachers_of_zero3_gather_their_weights_and_ranks_of_teachers_hold_no_student(cfg):
    shape = shape_of("teacher", cfg.teacher)
    need = plan(replace(cfg, teacher_engine="zero3"), 4, per_node=2)
    assert need.sends[f"teacher {cfg.teacher}"] == 2 * shape.weights * 3 / 4
    assert need.network[f"teacher {cfg.teacher}"] == 2 * shape.weights * 3 / 4 / 2
    weights = shape_of("student", cfg.student).weights
    need = plan(replace(cfg, teacher_ranks=2), 6, stage=1, per_node=6)
    assert need.sends["gradients"] == 2 * 2 * weights * 3 / 4  # 4 ranks


# what distill.py refuses -> (flags, ranks, ranks of a node)
REFUSED = {
    "--teacher_tp 8: does not divide the 4 ranks": ({"teacher_tp": 8}, 4, 4),
    "4 ranks on nodes of 3": ({}, 4, 3),
    "--teacher_ranks 2: a node of this job has 2 ranks": ({"teacher_ranks": 2}, 4, 2),
    "--teacher_engine transformers: it takes all of the 4 ranks":
        ({"teacher_tp": 2, "teacher_engine": "transformers"}, 4, 4),
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
    # a network is slower than NVLink
    far = replace(need(60, 2), network={"all": 2 * GIB})
    assert advice([("far", far), ("near", need(70, 10))], 80)[0] == "near"
    assert "DOES NOT FIT" in "\n".join(lines_of(need(90, 1), 80))


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


def test_two_recipes_stand_side_by_side(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipes = ["recipes/qwen3_8b_to_smollm2_1.7b.yaml", "recipes/llama_3.1_70b_to_8b.yaml"]
    tool("plan", [*recipes, "--gpus=32", "--gpu_gib=40"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[:2]] == recipes
    rows = {}
    for line in lines[2:-1]:
        name, *values = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = values
    assert rows["fits"] == ["yes", "NO"]
    for number, recipe in enumerate(recipes):
        cfg = parse_flags(Config, [f"--config={recipe}"], file_flag="config")
        need = plan(cfg, 32, per_node=8)
        seconds, _, _, dollars = time_and_price(need, cfg, 32, PlanArgs(recipe=recipe))
        column = {name: values[number] for name, values in rows.items()}
        teacher = need.stays[f"weights of {cfg.teacher}"]
        assert column["- weights of teachers"] == f"{teacher / GIB:.2f}"
        assert column["GiB at most"] == f"{need.peak / GIB:.2f}"
        assert column["a step's GiB to others"] == f"{need.sent_to_nodes / GIB:.2f}"
        assert column["seconds a step"] == f"{seconds:.3g}"
        assert column["dollars"] == f"{dollars:,.3g}"


def test_a_model_that_is_nowhere_is_named(cfg):
    with pytest.raises(ValueError, match=r"--student org/none: .*; architectures.yaml has the"):
        plan(replace(cfg, student="org/none"), 2)


def test_time_and_price_follow_from_operations(monkeypatch):
    """By hand: a student of P weights and a teacher of Q, 96 samples of 2,048 on 16 ranks."""
    monkeypatch.chdir(ROOT)
    recipe = "recipes/qwen3_4b_to_llama_3.2_1b.yaml"
    cfg = parse_flags(Config, [f"--config={recipe}"], file_flag="config")
    need = plan(cfg, 16, per_node=8)
    positions = 96 * 2048 / 16
    P, Q = [shape_of("student", name).weights for name in (cfg.student, cfg.teacher)]
    assert need.operations == pytest.approx((8 * P + 2 * Q) * positions)  # with checkpointing
    assert need.tokens == 96 * 2048 and need.beside == 0
    args = PlanArgs(recipe=recipe, tflops=500.0, mfu=0.2, dollars=3.0)
    seconds = need.operations / 1e14
    hours = 100 * seconds / 3600
    expected = seconds, 96 * 2048 / seconds, hours, hours * 48
    assert time_and_price(need, cfg, 16, args) == pytest.approx(expected)
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
