"""A head and an embedding are one weight where the files say so, whatever the config says.

Students are compared by logits: what the trained one answers, and what plain transformers reads of
its export.  No config can hide a weight that was lost.
"""

import functools
import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import ranks
import test_families
from isogloss import distill, export
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.models import tied
from isogloss.models.pretrained import check_weights, config_of_weights, load_config
from isogloss.plan import shape_of
from isogloss.student.checks import student_batch
from isogloss.student.engine import StudentWithLoss, load_student, start_engine
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import load_teacher
from jobs import ds_config, losses_of, run_distill, write_corpus

SHAPE = test_families.SHAPE
GPT = dict(n_embd=32, n_head=4, n_layer=2)
DENSE = {
    "llama": {}, "qwen2": {}, "qwen3": dict(head_dim=8), "mistral": {}, "gpt_neox": {},
    "gpt2": GPT, "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global"], 2]]),
    "gemma2": dict(head_dim=8), "gemma3_text": dict(head_dim=8),
    "opt": dict(word_embed_proj_dim=32, ffn_dim=64), "phi": {}, "cohere": {}, "granite": {},
}
FAMILIES = DENSE | test_families.FAMILIES
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
