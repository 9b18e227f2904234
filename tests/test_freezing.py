"""--train_only embeddings, for a run or for its first steps: as plain torch trains, at every stage.
"""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from isogloss import command
from isogloss.config import Config
from isogloss.models.adapters import student_adapter
from isogloss.models.pretrained import check_weights
from jobs import ds_config, losses_of, run_and_listen, run_distill, write_corpus

peft = pytest.importorskip("peft", reason="the optional peft is absent")

RATE = 0.02
STEPS = 5
TARGETS = "q_proj,v_proj,down_proj"
ADAPTER = ["--lora_r=3", "--lora_alpha=12", f"--lora_targets={TARGETS}", "--lora_embeddings"]
ADAM = {"optimizer": {"type": "AdamW", "params": {
    "lr": RATE, "weight_decay": 0.5, "torch_adam": True}}}
# (ZeRO stage, student): steps before all weights are trained
QUICK = {(0, "tied"): 2, (2, "untied"): 2, (3, "tied"): 2, (1, "tied"): STEPS, (2, "adapter"): 2}
SLOW = {(1, "untied"): 2, (2, "tied"): 2, (3, "untied"): STEPS, (0, "untied"): STEPS,
        (3, "adapter"): 2, (0, "adapter"): 0}
CASES = QUICK | SLOW
EACH = pytest.mark.parametrize("stage, kind", [
    *QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]])


def tensors_of(folder):
    [path] = Path(folder).glob("*.safetensors")
    return load_file(path)


def is_end(name):
    return "embed_tokens" in name or "lm_head" in name


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def with_adapter(model):
    """Return a model of peft that trains an adapter, and copies of both ends."""
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(
        r=3, lora_alpha=12, target_modules=TARGETS.split(","),
        modules_to_save=["embed_tokens", "lm_head"]))


def plain_run(path, tokenizer, texts, freeze_until, kind):
    """Train by plain torch, one text by itself; return ([(loss, norm)], {name: weight})."""
    model = AutoModelForCausalLM.from_pretrained(path)
    if kind == "adapter":
        model = with_adapter(model)
    named = dict(model.named_parameters())
    groups = [{"params": [weight for weight in named.values() if (weight.dim() > 1) == decays],
               "weight_decay": 0.5 * decays} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE)  # which leaves out what has no gradient
    lines = []
    for step in range(STEPS):
        losses = []
        for text in texts[:8]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            ids = torch.tensor(bos + ids + [tokenizer.eos_token_id])
            logits = model(input_ids=ids[None]).logits[0, :-1, : len(tokenizer)]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
        loss = torch.cat(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        for name, weight in named.items():
            if step < freeze_until and not is_end(name):
                weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        lines.append((float(loss.detach()), float(norm)))
    if kind == "adapter":
        named = peft.get_peft_model_state_dict(model)
    return lines, {name: weight.detach() for name, weight in named.items()}


def command_lines(folder, students, texts, cases):
    corpus = write_corpus(folder, texts, 8)
    lines = {}
    for (stage, kind), freeze_until in cases.items():
        config = ds_config(folder / f"{stage}.json", stage, 2, 2, **ADAM)
        freezing = ["--train_only=embeddings"] if freeze_until else []
        if 0 < freeze_until < STEPS:
            freezing.append(f"--freeze_until={freeze_until}")
        words = [f"--student={students[kind]}", f"--data={corpus}", "--num_workers=0",
                 f"--steps={STEPS}", f"--ds_config={config}", "--max_length=250", "--kd_weight=0",
                 *freezing, *(ADAPTER if kind == "adapter" else [])]
        output = folder / f"{stage}{kind}"
        lines[stage, kind] = [*words, f"--output_dir={output}", f"--export={output}/export",
                              "--save_every=1", "--keep_checkpoints=9"]
        for step in (1, 3):
            again = folder / f"{stage}{kind}{step}"
            lines[stage, kind, step] = [
                *words, f"--output_dir={again}", f"--export={again}/export",
                f"--resume={output}/checkpoints/step_000000{step}"]
    return lines


@pytest.fixture(scope="module")
def students(models, untied):
    return {"tied": models[0], "untied": untied, "adapter": untied}


@pytest.fixture(scope="module")
def folder_of(students, texts, tmp_path_factory):
    """Function of a case: folder of all jobs like it, run on two ranks one after the other."""
    @functools.cache
    def run(is_quick):
        folder = tmp_path_factory.mktemp("freezing")
        lines = command_lines(folder, students, texts, QUICK if is_quick else SLOW)
        codes = ranks.run(2, run_distill, list(lines.values()))
        assert codes == [[0] * len(lines)] * 2, dict(zip(lines, codes[0]))
        return folder

    return lambda case: run(case in QUICK)


@EACH
def test_embeddings_learn_alone_as_in_plain_torch(folder_of, students, tokenizers, texts, stage,
                                                      kind):
    """Losses, norms and weights: no moment, step count, decay or part of the norm of the others."""
    jobs = folder_of((stage, kind))
    lines, weights = plain_run(students[kind], tokenizers[0], texts, CASES[stage, kind], kind)
    for line, (loss, norm) in zip(losses_of(jobs / f"{stage}{kind}"), lines, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
    before = tensors_of(students[kind])
    for name, weight in tensors_of(jobs / f"{stage}{kind}" / "export").items():
        is_frozen = CASES[stage, kind] == STEPS and not is_end(name)
        assert name not in before or torch.equal(weight, before[name]) == is_frozen, name
        error = (weight - weights[name]).norm() / weights[name].norm()
        assert error < 2e-3, (name, float(error))


@EACH
def test_both_phases_go_on_bit_by_bit(folder_of, stage, kind):
    jobs = folder_of((stage, kind))
    whole = jobs / f"{stage}{kind}"
    for step in (1, 3):
        again = jobs / f"{stage}{kind}{step}"
        assert losses_of(again, step) == losses_of(whole, step)
        assert_equal(tensors_of(again / "export"), tensors_of(whole / "export"))


BF16 = {"bf16": {"enabled": True}}
OTHERS = {  # ZeRO stage, what the ds_config has besides, flags
    "offloaded 2": (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {
        "device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}, []),
    "offloaded 3": (3, {"zero_optimization": {"stage": 3, "offload_optimizer": {
        "device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}, []),
    "bf16 0": (0, BF16, []),
    "bf16 1": (1, BF16, ["--activation_checkpointing"]),
    "bf16 3": (3, BF16, ["--activation_checkpointing"]),
    "sums in float32": (1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, []),
}


@pytest.mark.slow
def test_other_engines_hold_the_layers_too(students, texts, tmp_path):
    """No layer moves in the first two steps, all do in the third, and a job goes on bit by bit."""
    corpus = write_corpus(tmp_path, texts, 8)
    lines = {}
    for name, (stage, more, words) in OTHERS.items():
        config = ds_config(tmp_path / f"{name}.json", stage, 2, 2, **ADAM | more)
        for folder in (name, f"{name} again"):
            lines[folder] = [
                f"--student={students['untied']}", f"--data={corpus}", "--num_workers=0",
                f"--ds_config={config}", "--max_length=60", "--kd_weight=0", "--save_every=1",
                "--train_only=embeddings", "--freeze_until=2", "--steps=3", "--keep_checkpoints=3",
                f"--output_dir={tmp_path / folder}", *words]
        lines[f"{name} again"].append(f"--resume={tmp_path / name}/checkpoints/step_0000001")
    codes, said = ranks.run(1, run_and_listen, *lines.values())[0]
    assert codes == [0] * len(lines), said
    before = tensors_of(students["untied"])
    for name in OTHERS:
        assert losses_of(tmp_path / name, 1) == losses_of(tmp_path / f"{name} again", 1)
        for step in (2, 3):
            output = tmp_path / f"{name} {step}"
            command.tool("export", [str(tmp_path / name), f"--step={step}", f"--output={output}"])
            for key, weight in tensors_of(output).items():
                stays = step == 2 and not is_end(key)
                assert torch.equal(weight, before[key].to(weight.dtype)) == stays, (name, key)


# --- what is written ------------------------------------------------------------------------------


def bits_of(output):
    return [line["eval/student_bits_per_byte"] for line in losses_of(output, -1)
            if "eval/student_bits_per_byte" in line]


def test_what_is_exported_is_read_again_and_checkpoints_are_whole(students, texts, tmp_path):
    corpus = write_corpus(tmp_path, texts, 8)

    def job(name, student, stage, *words):
        of_teacher = () if "--on_policy=0.5" in words else ("--kd_weight=0",)
        config = ds_config(tmp_path / f"{stage}.json", stage, 2, 1, **ADAM)
        return [f"--student={student}", f"--data={corpus}", "--num_workers=0", *of_teacher,
                "--max_length=60", f"--ds_config={config}", "--eval_rows=2", "--save_every=1",
                f"--output_dir={tmp_path / name}", f"--export={tmp_path / name}/export", *words]

    both = ["--lora_r=2", "--lora_embeddings"]
    ends = "--train_only=embeddings"
    adapter = tmp_path / "adapter" / "export"
    lines = [
        job("adapter", students["tied"], 3, *both, "--steps=1"),
        job("goes on", adapter, 2, *both, "--steps=1", "--on_policy=0.5", "--rollout_tokens=4",
            f"--teacher={students['untied']}"),
        job("merged", adapter, 3, "--steps=1"),
        job("ends", students["untied"], 2, ends, "--steps=2"),
        job("ends on", students["untied"], 3, ends, "--steps=2",
            f"--resume={tmp_path}/ends/checkpoints/step_0000001"),
        job("late", students["tied"], 2, ends, "--steps=1", "--freeze_until=1"),
        job("elsewhere", students["tied"], 3, ends, "--steps=2", "--freeze_until=1",
            f"--resume={tmp_path}/late/checkpoints/step_0000001"),
    ]
    codes, said = ranks.run(1, run_and_listen, *lines)[0]
    assert codes == [0] * 6 + [2], said
    assert "with --freeze_until weights have counts of steps of their own" in said
    assert "trains" in said and "embedding and head alone learn in the first 1 steps" in said
    for name in ("goes on", "merged"):
        assert bits_of(tmp_path / name)[0] == pytest.approx(bits_of(tmp_path / "adapter")[-1])
    assert losses_of(tmp_path / "ends on", 1)[0]["loss"] == pytest.approx(
        losses_of(tmp_path / "ends", 1)[0]["loss"], rel=1e-4)
    for name in ("adapter", "ends", "ends on"):
        written = tool_export(tmp_path / name, tmp_path / name / "again")
        assert_equal(tensors_of(written), tensors_of(tmp_path / name / "export"))


def test_a_head_is_not_trained_twice(untied):
    cfg = Config(student=str(untied), data="d", kd_weight=0, lora_r=2, lora_embeddings=True,
                 lora_targets="q_proj,lm_head")
    with pytest.raises(ValueError, match="lm_head would be trained twice, by an adapter and whole"):
        check_weights("student", cfg.student, False, student_adapter(cfg))


def tool_export(run, output):
    command.tool("export", [str(run), f"--output={output}"])
    return output
