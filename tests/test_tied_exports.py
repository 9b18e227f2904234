"""An export answers as the student did, however its head is tied.

Both are compared by logits: what the trained student answers, and what plain transformers reads of
its export.  No config can hide a weight that was lost.
"""

import itertools
import shutil
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
import test_families
from isogloss import distill
from isogloss.checkpoints import export_files
from isogloss.command import tool
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.models import tied
from isogloss.student.checks import student_batch
from isogloss.student.engine import StudentWithLoss, load_student, start_engine
from jobs import ds_config, losses_of, run_and_listen, run_distill, write_corpus
from test_writer_process import STAND_IN
from tied_models import (
    FAMILIES,
    IDS,
    KINDS,
    assert_close,
    plain_logits,
    students,  # noqa: F401, a fixture
)

STAGES = range(4)  # of ZeRO


def trained_and_exported(cases, folder):
    """Return {name: logits before and after a step} of students that are exported; on every rank.

    Args:
        cases: {name: (path of the student, ZeRO stage, flags)}; exports are in folder/name.
    """
    start_distributed()
    silence_libraries()
    export_files.write_card = lambda *_, **__: None
    answers = {}
    for name, (path, stage, flags) in cases.items():
        adam = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
                  "optimizer": adam}
        cfg = distill.Config(student=str(path), data="x", kd_weight=0, output_dir=str(folder),
                             export=str(folder / name), **flags)
        module = StudentWithLoss(load_student(cfg, config), vocab=50)
        engine = start_engine(module, config, "ds.json")
        answers[name] = [answer(engine)]
        logits = engine(student_batch(IDS)).float()
        engine.backward(torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
        engine.step()
        answers[name].append(answer(engine))
        encoder, _ = load_text_encoder("student", str(path), 60)
        assert export_files.export_model(engine, encoder, cfg) is None
        engine.destroy()
    return answers


def answer(engine):
    engine.eval()
    with torch.no_grad():
        logits = engine(student_batch(IDS)).clone()
    engine.train()
    return logits


def check_exports(cases, folder):
    """Compare the exports of two ranks with the students; see `trained_and_exported`."""
    answers = ranks.run(2, trained_and_exported, cases, folder)[0]
    for name, (path, _, flags) in cases.items():
        before, after = answers[name]
        assert_close(before, plain_logits(path, IDS), name)
        assert (after - before).norm() > 0.01 * before.norm(), name
        is_adapter = flags.get("lora_r") and not flags.get("merge")
        files = [path, IDS, folder / name] if is_adapter else [folder / name, IDS]
        assert_close(plain_logits(*files), after, name)
        if not is_adapter:
            assert_config_is_true(folder / name, path)


def assert_config_is_true(exported, source):
    """See what a reader of the config alone would make of an export, too."""
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], exported
    of_config = tied.empty_model(AutoConfig.from_pretrained(exported))
    # which leaves apart what differs
    expected = tied.is_tied(AutoModelForCausalLM.from_pretrained(source))
    assert tied.is_tied(of_config) == tied.is_tied(model) == expected, exported


def test_a_wrongly_tied_student_and_its_export_are_one(students, tmp_path):  # noqa: F811
    check_exports({
        f"{kind} {stage}": (students("llama", kind), stage, {})
        for kind, stage in [("wrongly_tied", 0), ("wrongly_tied", 3), ("tied", 3)]}, tmp_path)


@pytest.mark.slow
def test_an_export_answers_as_the_student_in_every_family(students, tmp_path):  # noqa: F811
    """Wrongly tied and of another kind, in turn with a stage of ZeRO; Llama of all, at all."""
    cases = {}
    others = [kind for kind in KINDS if kind != "wrongly_tied"]
    for number, family in enumerate(FAMILIES):
        chosen = [("wrongly_tied", number % 4), (others[number % 3], (number + 2) % 4)]
        if family == "llama":
            chosen = itertools.product(KINDS, STAGES)
        for kind, stage in chosen:
            cases[f"{family} {kind} {stage}"] = students(family, kind), stage, {}
    check_exports(cases, tmp_path)


@pytest.mark.slow
def test_an_adapter_answers_as_the_student_alone_and_merged(students, tmp_path):  # noqa: F811
    pytest.importorskip("peft")
    cases = {}
    for number, family in enumerate(["llama", "gpt2", "gpt_neox", "qwen3", "jamba"]):
        for shift, kind in enumerate(KINDS):
            for merge in (False, True) if family == "llama" else [bool((number + shift) % 2)]:
                stage = (number + shift + 2 * merge) % 4
                flags = {"lora_r": 2, "merge": merge}
                cases[f"{family} {kind} {merge}"] = students(family, kind), stage, flags
    check_exports(cases, tmp_path)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_an_adapter_with_both_ends_answers_as_the_student(students, tmp_path, kind):  # noqa: F811
    """To plain peft, which gives each end a weight of its own, and merged to transformers."""
    pytest.importorskip("peft")
    flags = {"lora_r": 2, "lora_embeddings": True}
    cases = {}
    for stage, merge in ((3, False), (2, False), (3, True)):
        cases[f"{stage} {merge}"] = students("llama", kind), stage, flags | {"merge": merge}
    check_exports(cases, tmp_path)


# --- whole runs -----------------------------------------------------------------------------------

WRITES = ["--on_policy=0.5", "--rollout_tokens=9"]
RUNS = {  # name: (ZeRO stage, flags)
    "stage 0": (0, ["--save_every=2", "--keep_checkpoints=9", "--eval_samples=1"]),
    "stage 3": (3, []),
    "resumed": (3, ["--resume={folder}/stage 0/checkpoints/step_0000002"]),
    "writes": (3, WRITES),
    "another process writes": (
        2, [*WRITES, f"--writer={sys.executable} {STAND_IN}", "--staleness=0"]),
    # the last one: DeepSpeed keeps its layout for all later engines of a process
    "pipeline": (1, ["--pipeline_parallel=2", "--save_every=4"]),
}


@pytest.mark.slow
def test_runs_of_a_wrongly_tied_student_are_one_in_every_layout(students, models, texts, tmp_path):  # noqa: F811
    student = students("llama", "wrongly_tied")
    corpus = write_corpus(tmp_path, [text[:200] for text in texts[:20]], 20)
    lines = []
    for name, (stage, flags) in RUNS.items():
        size = 4 if "pipeline" in name else 2  # half as many readers
        config = ds_config(tmp_path / f"{stage}-{size}.json", stage, size, 2)
        lines.append([
            f"--student={student}", f"--teacher={models[1]}", f"--data={corpus}", "--steps=4",
            "--max_length=250", "--eval_rows=4", "--eval_every=9", "--num_workers=0",
            f"--ds_config={config}", f"--output_dir={tmp_path / name}",
            f"--export={tmp_path / name / 'student'}",
            *[flag.format(folder=tmp_path) for flag in flags]])
    assert ranks.run(2, run_distill, lines) == [[0] * len(lines)] * 2
    expected = losses_of(tmp_path / "stage 0")
    held_out = [text[:200] for text in texts[:4]]
    for name in RUNS:
        metrics = losses_of(tmp_path / name)
        measured = test_families.bits_per_byte(tmp_path / name / "student", held_out)
        assert metrics[-1]["eval/student_bits_per_byte"] == pytest.approx(measured, rel=1e-5), name
        if "writes" in name:
            assert all(line["rollout/logp_gap"] < 1e-5 for line in metrics if "loss" in line)
            continue
        its = [line["loss"] for line in metrics if "loss" in line]
        of_step = [line["loss"] for line in expected if "loss" in line]
        assert its == pytest.approx(of_step[-len(its) :], rel=1e-5), name
    for name in ("stage 0", "pipeline"):
        tool("export", [str(tmp_path / name)])
        assert_same_files(tmp_path / name / "student", tmp_path / name / "export_0000004")


@pytest.mark.slow
def test_a_checkpoint_that_lacks_the_head_is_refused_and_exported_as_it_is(
        students, models, texts, tmp_path):  # noqa: F811
    """As earlier versions wrote them under ZeRO-3."""
    student = tmp_path / "student"
    shutil.copytree(students("llama", "tied"), student)
    argv = [f"--student={student}", f"--data={write_corpus(tmp_path, texts, 20)}", "--kd_weight=0",
            "--max_length=60", "--num_workers=0", f"--output_dir={tmp_path / 'run'}",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 3, 2, 1)}"]
    assert ranks.run(2, run_distill, [[*argv, "--steps=2", "--save_every=2"]]) == [[0], [0]]
    shutil.rmtree(student)
    shutil.copytree(students("llama", "wrongly_tied"), student)
    codes, said = ranks.run(2, run_and_listen, [*argv, "--steps=3"])[0]
    assert codes == [2]
    assert "has no weight model.lm_head.weight, which this student trains" in said
    tool("export", [str(tmp_path / "run")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export_0000002")
    assert tied.is_tied(exported)


def assert_same_files(one, other):
    for file in ("config.json", "model.safetensors"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
