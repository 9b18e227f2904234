"""A head and an embedding are one weight where the files say so, whatever the config says.

Students are compared by logits: what the trained one answers, and what plain transformers reads of
its export.  No config can hide a weight that was lost.
"""

import functools
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    dynamic_module_utils,
)

import ranks
import test_families
import test_teacher
from isogloss import distill, export
from isogloss.command import tool
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.models import tied
from isogloss.models.pretrained import (
    check_weights,
    config_of_weights,
    config_of_weights_here,
    load_config,
    load_model,
)
from isogloss.plan import shape_of
from isogloss.student.checks import student_batch
from isogloss.student.engine import StudentWithLoss, load_student, start_engine
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import load_teacher
from jobs import ds_config, losses_of, run_and_listen, run_distill, write_corpus
from test_writer_process import STAND_IN

SHAPE = test_families.SHAPE
GPT = dict(n_embd=32, n_head=4, n_layer=2)
DENSE = {
    "llama": {}, "qwen2": {}, "qwen3": dict(head_dim=8), "mistral": {}, "gpt_neox": {},
    "gpt2": GPT, "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global"], 2]]),
    "gemma2": dict(head_dim=8), "gemma3_text": dict(head_dim=8),
    "opt": dict(word_embed_proj_dim=32, ffn_dim=64), "phi": {}, "cohere": {}, "granite": {},
}
FAMILIES = DENSE | test_families.FAMILIES
QWEN = {
    "text_config": dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    "vision_config": dict(hidden_size=32, intermediate_size=48, depth=2, num_heads=4, patch_size=14,
                          out_hidden_size=32)}
KINDS = "tied", "untied", "wrongly_tied", "resized"  # the last one wrongly tied, too
STAGES = range(4)


def new_model(family, vocab, **more):
    config = AutoConfig.for_model(family, vocab_size=vocab, **SHAPE | FAMILIES[family] | more)
    return AutoModelForCausalLM.from_config(config)


def write_student(folder, family, kind, tokenizer):
    """Write a model of a kind in several files, and its tokenizer."""
    torch.manual_seed(5)
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
            for name in ("bos", "eos", "pad")}
    model = new_model(family, len(tokenizer) + 10, tie_word_embeddings=kind == "tied", **ends)
    if kind == "resized":
        model.resize_token_embeddings(len(tokenizer) + 23)
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    if kind in ("wrongly_tied", "resized"):
        say_tied(folder)
    return folder


def say_tied(folder, level=None):
    config = json.loads((folder / "config.json").read_text())
    (config[level] if level else config)["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))


def plain_logits(folder, ids, adapter=None):
    """Return what transformers, and peft, read of some files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def assert_close(logits, expected, name):
    error = (logits - expected).norm() / expected.norm()
    assert error < 1e-5, (name, float(error))


# --- students -------------------------------------------------------------------------------------

IDS = torch.arange(3, 43).view(2, 20)


def trained_and_exported(cases, folder):
    """Return {name: logits before and after a step} of students that are exported; on every rank.

    Args:
        cases: {name: (path of the student, ZeRO stage, flags)}; exports are in folder/name.
    """
    start_distributed()
    silence_libraries()
    export.write_card = lambda *_, **__: None
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
        assert export.export_model(engine, encoder, cfg) is None
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


@pytest.fixture(scope="module")
def students(tokenizers, tmp_path_factory):
    """Return a function of a family and a kind: the directory of that student."""
    folder = tmp_path_factory.mktemp("students")

    @functools.cache
    def written(family, kind):
        return write_student(folder / family / kind, family, kind, tokenizers[0])

    return written


def test_a_wrongly_tied_student_and_its_export_are_one(students, tmp_path):
    check_exports({
        f"{kind} {stage}": (students("llama", kind), stage, {})
        for kind, stage in [("wrongly_tied", 0), ("wrongly_tied", 3), ("tied", 3)]}, tmp_path)


@pytest.mark.slow
def test_an_export_answers_as_the_student_in_every_family(students, tmp_path):
    """Each kind of a family at another stage of ZeRO, of some at all of them."""
    cases = {}
    for number, family in enumerate(FAMILIES):
        for shift, kind in enumerate(KINDS):
            for stage in STAGES if family in ("llama", "gpt2") else [(number + shift) % 4]:
                cases[f"{family} {kind} {stage}"] = students(family, kind), stage, {}
    check_exports(cases, tmp_path)


@pytest.mark.slow
def test_an_adapter_answers_as_the_student_alone_and_merged(students, tmp_path):
    pytest.importorskip("peft")
    cases = {}
    for number, family in enumerate(["llama", "gpt2", "gpt_neox", "qwen3", "jamba"]):
        for shift, kind in enumerate(KINDS):
            for merge in (False, True):
                stage = (number + shift + 2 * merge) % 4
                flags = {"lora_r": 2, "merge": merge}
                cases[f"{family} {kind} {merge}"] = students(family, kind), stage, flags
    check_exports(cases, tmp_path)


# --- whole runs -----------------------------------------------------------------------------------

WRITES = ["--on_policy=0.5", "--rollout_tokens=9"]
RUNS = {  # name: (ZeRO stage, flags)
    "stage 0": (0, ["--save_every=2", "--keep_checkpoints=9", "--eval_samples=1"]),
    "stage 3": (3, []),
    "resumed": (3, ["--resume={folder}/stage 0/checkpoints/step_0000002"]),
    "writes": (3, WRITES),
    "another process writes": (
        2, [*WRITES, f"--rollout_command={sys.executable} {STAND_IN}", "--staleness=0"]),
    # the last one: DeepSpeed keeps its layout for all later engines of a process
    "pipeline": (1, ["--pipeline_parallel=2", "--save_every=4"]),
}


@pytest.mark.slow
def test_runs_of_a_wrongly_tied_student_are_one_in_every_layout(students, models, texts, tmp_path):
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
        students, models, texts, tmp_path):
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


# --- what the files say ---------------------------------------------------------------------------


def as_bin(model, folder):
    """Write a model as torch does, which names a shared weight twice."""
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def with_tensors(edit):
    """Return a function that writes a tied model whose tensors edit(tensors) has changed."""
    def write(model, folder):
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return write


def one_number_more(tensors):
    tensors["lm_head.weight"][-1, -1] += 1e-3


def head_alone(tensors):
    del tensors["model.embed_tokens.weight"]


def rounded(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()


def torn(tensors):
    one_number_more(tensors)
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


# {name: (writes a model, head and embedding are one)}
FILES = {
    "of one name": (lambda model, folder: model.save_pretrained(folder), True),
    "pickled": (as_bin, True),
    "twice": (with_tensors(lambda _: None), True),
    "of the head's name": (with_tensors(head_alone), True),
    "another number": (with_tensors(one_number_more), False),
    "rounded": (with_tensors(rounded), False),
    "without the prefix": (with_tensors(torn), False),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_is_that_of_the_files(tmp_path, name):
    write, expected = FILES[name]
    torch.manual_seed(2)
    write(new_model("llama", 40, tie_word_embeddings=True), tmp_path)
    config = config_of_weights("student", str(tmp_path))
    assert config.tie_word_embeddings == expected
    model = load_model("student", str(tmp_path))
    assert tied.is_tied(model) == expected
    assert_close(model.eval()(IDS % 40).logits, plain_logits(tmp_path, IDS % 40), name)
    check_weights("student", str(tmp_path))
    # as many weights as are trained
    shape = shape_of("student", str(tmp_path))
    assert (shape.tied, shape.weights) == (expected, sum(map(torch.numel, model.parameters())))


def test_a_pickled_head_of_its_own_is_seen(students, tmp_path):
    as_bin(AutoModelForCausalLM.from_pretrained(students("llama", "untied")), tmp_path)
    say_tied(tmp_path)
    assert not config_of_weights("teacher", str(tmp_path)).tie_word_embeddings


def test_both_levels_of_a_composed_config_are_untied(tmp_path):
    """Of Gemma 3 the whole is loaded, of Qwen 3.5 the text part alone."""
    kinds = {"gemma3": test_teacher.MULTIMODAL["gemma3"], "qwen3_5": QWEN}
    for name, shape in kinds.items():
        torch.manual_seed(1)
        config = AutoConfig.for_model(name, **shape, tie_word_embeddings=False)
        config.get_text_config().tie_word_embeddings = False
        AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / name)
        for each in (None, "text_config"):
            say_tied(tmp_path / name, each)
        config = config_of_weights("teacher", str(tmp_path / name))
        assert not config.tie_word_embeddings
        assert not config.get_text_config().tie_word_embeddings
        model = load_model("teacher", str(tmp_path / name))
        assert not tied.is_tied(model)
        with torch.no_grad():
            logits = model.eval()(input_ids=IDS, use_cache=False).logits
        assert_close(logits, plain_logits(tmp_path / name, IDS), name)


def test_a_user_is_told_once_and_weights_that_are_absent_are_no_error(students, tmp_path, capsys):
    source = students("llama", "wrongly_tied")
    shutil.copytree(source, tmp_path / "told")
    for _ in range(2):
        config_of_weights("student", str(tmp_path / "told"))
    error = capsys.readouterr().err
    assert f"--student {tmp_path / 'told'}: its config.json says tie_word_embeddings, but" in error
    assert "lm_head.weight has other values than the embedding" in error
    assert error.count("\n") == 1
    for file in (tmp_path / "told").glob("*.safetensors"):
        file.unlink()
    assert config_of_weights_here("student", str(tmp_path / "told")).tie_word_embeddings
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        config_of_weights("student", str(tmp_path / "told"))


def test_heads_and_embeddings_of_other_sizes_are_refused(tmp_path):
    """A head that is padded beyond its embedding is no layer of the config."""
    new_model("llama", 40, tie_word_embeddings=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.ones(64, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say_tied(tmp_path)
    with pytest.raises(ValueError, match=r"another shape: lm_head.weight \[64, 32\] in place of"):
        check_weights("student", str(tmp_path))


TIES_ITSELF = """
from transformers import LlamaConfig, LlamaForCausalLM

class CustomConfig(LlamaConfig):
    model_type = "custom_llama"

class CustomModel(LlamaForCausalLM):
    config_class = CustomConfig

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = self.model.embed_tokens.weight
"""


def test_code_that_ties_in_spite_of_a_head_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = new_model("llama", 40, tie_word_embeddings=False)
    path = tmp_path / "ties"
    model.save_pretrained(path)
    (path / "code_of_model.py").write_text(TIES_ITSELF)
    config = json.loads((path / "config.json").read_text())
    code = {"AutoConfig": "code_of_model.CustomConfig",
            "AutoModelForCausalLM": "code_of_model.CustomModel"}
    (path / "config.json").write_text(json.dumps(
        config | {"model_type": "custom_llama", "auto_map": code}))
    with pytest.raises(ValueError, match=f"--student {path}: its code ties its head to the embed"):
        check_weights("student", str(path), trust_remote_code=True)
    # nor is one of its exports destroyed, as of a run of before
    weights = dict(model.state_dict())
    with pytest.raises(ValueError, match=r"ties model.embed_tokens.weight and lm_head.weight"):
        export.model_of_weights(load_config("student", str(path), True), weights, True)


# --- teachers -------------------------------------------------------------------------------------


def answers_of_teachers(cases):
    start_distributed()
    silence_libraries()
    answers = []
    for path, engine, degree in cases:
        spec = ModelSpec(path=path, vocab=90, engine=engine, device="cpu", degree=degree,
                         dtype="float32")
        teacher = load_teacher(spec)
        read = teacher.read(IDS, "hidden", 90)
        answers.append(read(torch.arange(IDS.numel())).view(*IDS.shape, -1).clone())
    return answers


@pytest.mark.slow
def test_a_wrongly_tied_teacher_answers_by_its_head_in_every_engine(tmp_path):
    shapes = {"llama": test_teacher.SHAPE | {"tie_word_embeddings": False},
              "gpt_neox": test_teacher.EVEN | {"tie_word_embeddings": False}}
    for name, shape in shapes.items():
        test_teacher.save_checkpoint(tmp_path, name, shape)
        say_tied(tmp_path / name)
    cases = []
    for name, engines in (("llama", ["replicated", "tensor_parallel", "transformers", "zero3"]),
                          ("gpt_neox", ["replicated", "transformers", "zero3"])):
        for engine in engines:
            cases.append((str(tmp_path / name), engine, 1 if engine == "replicated" else 2))
    for answers in ranks.run(2, answers_of_teachers, cases):
        for case, answer_of_teacher in zip(cases, answers, strict=True):
            expected = plain_logits(case[0], IDS)[..., :90]
            assert_close(answer_of_teacher, expected, case)
