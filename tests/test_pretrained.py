"""Models of others: random weights from scratch, code that comes with a model, surplus tensors."""

import io
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import ranks
from conftest import asset
from isogloss import distill, inputs
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.models.pretrained import check_weights, load_config, load_model
from isogloss.projection_tools import generate
from isogloss.projection_tools.__main__ import run
from isogloss.projection_tools.tokenizers import load_tokenizer
from isogloss.student.engine import gathered, load_student
from isogloss.student.options import flash_attention
from isogloss.student.options.flash_attention import check_flash_attention
from isogloss.student.options.from_scratch import check_random
from isogloss.teachers.engines.whole import load_replicated
from isogloss.teachers.model import ModelSpec
from wrong_input import check_one_line, error_line, good_line, outcomes

# --- from scratch ---------------------------------------------------------------------------------


def random_students(student, seeds_and_stages):
    """Return the student's weights for several (seed, ZeRO stage), whole on every rank.

    Asserts that dropout goes on with the numbers that it would have had.
    """
    start_distributed()
    silence_libraries()
    weights = []
    for seed, stage in seeds_and_stages:
        cfg = distill.Config(student=student, data="x", kd_weight=0, from_scratch=True, seed=seed)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        torch.manual_seed(dist.get_rank())
        expected = torch.rand(3)
        torch.manual_seed(dist.get_rank())
        model = load_student(cfg, config)
        assert torch.equal(torch.rand(3), expected)
        tensors = {}
        for name, parameter in model.named_parameters():
            with gathered(parameter):
                tensors[name] = parameter.detach().clone()
        weights.append(tensors)
    return weights


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_random_weights_depend_on_the_seed_alone(models, tmp_path):
    student = str(tmp_path / "no_weights")
    shutil.copytree(models[0], student, ignore=shutil.ignore_patterns("*.safetensors"))
    check_random(student)
    on_ranks = ranks.run(2, random_students, student, [(1, 2), (1, 3), (2, 3)])
    whole, partitioned, other_seed = on_ranks[0]
    for one, other in zip(*on_ranks):
        assert equal(one, other)  # on both ranks
    assert equal(whole, partitioned) and not equal(partitioned, other_seed)
    # as the config says: normal, of the standard deviation initializer_range
    embedding = partitioned["model.embed_tokens.weight"]
    deviation = json.loads((models[0] / "config.json").read_text())["initializer_range"]
    assert abs(embedding.std() / deviation - 1) < 0.05
    assert (partitioned["model.norm.weight"] == 1).all()


# --- code that comes with a model -----------------------------------------------------------------

CUSTOM = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class CustomConfig(LlamaConfig):
    model_type = "custom_llama"

class CustomModel(LlamaForCausalLM):
    config_class = CustomConfig

class CustomTokenizer(PreTrainedTokenizerFast):
    pass
"""


def custom(model, folder, marker):
    """Return a copy of a model that comes with code; the code writes a file `marker`."""
    target = folder / "custom"
    shutil.copytree(model, target)
    (target / "code_of_model.py").write_text(CUSTOM.format(marker=str(marker)))
    classes = {"AutoConfig": "code_of_model.CustomConfig",
               "AutoModel": "code_of_model.CustomModel",
               "AutoModelForCausalLM": "code_of_model.CustomModel"}
    edit_json(target / "config.json", model_type="custom_llama", auto_map=classes)
    edit_json(target / "tokenizer_config.json", tokenizer_class="CustomTokenizer",
              auto_map={"AutoTokenizer": [None, "code_of_model.CustomTokenizer"]})
    return target


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def answer_yes(modules):
    """Let every question that is asked on this rank be answered with y."""
    transformers.dynamic_module_utils.HF_MODULES_CACHE = modules
    sys.stdin = io.StringIO("y\n" * 99)


def run_and_answer_yes(modules, *arguments):
    answer_yes(modules)
    return outcomes(*arguments)


@pytest.mark.slow
def test_custom_code_runs_with_its_flag_alone(models, texts, tmp_path):
    """Not even where someone types y, which transformers would take for a yes."""
    changes = []
    for role, model in zip(("student", "teacher"), models):
        for folder, flags in (("refused", ""), ("allowed", " --trust_remote_code")):
            target = tmp_path / folder / role
            flags += f" --output_dir={target / 'run'} --export={target / 'export'}"
            changes.append(f"--{role}={custom(model, target, target / 'marker')}{flags}")
    on_ranks = ranks.run(
        2, run_and_answer_yes, str(tmp_path / "modules"), tmp_path,
        good_line(models, texts, tmp_path), changes)
    for change, *ended in zip(changes, *on_ranks):
        if "--trust_remote_code" in change:
            assert [outcome.exit_code for outcome in ended] == [0, 0], ended
            continue
        check_one_line(ended, "needs Python code that comes with")
        assert change.split()[0].replace("=", " ") in ended[0].stderr
        assert "add --trust_remote_code" in ended[0].stderr
    for role in ("student", "teacher"):
        assert not (tmp_path / "refused" / role / "marker").exists()
        assert (tmp_path / "allowed" / role / "marker").exists()
    # the exported student is still of its own class
    config = json.loads((tmp_path / "allowed/student/export/config.json").read_text())
    assert config["architectures"] == ["CustomModel"]


def edit_tensors(source, target, edit):
    """Write a copy of a model whose tensors are those that edit(tensors) returns."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})
    return str(target)


@pytest.mark.parametrize("role", ["student", "teacher", "embedding_model"])
def test_tools_run_custom_code_with_the_flag_alone(models, tmp_path, monkeypatch, capsys, role):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", "")
    answer_yes(str(tmp_path / "modules"))
    marker = tmp_path / "marker"
    flags = {"student": models[0], "teacher": models[1], "embedding_model": models[1]}
    flags[role] = custom(flags[role], tmp_path, marker)
    argv = [f"--{name}={path}" for name, path in flags.items()]
    argv.append(f"--output={tmp_path / 'p.pt'}")
    error = error_line(capsys, generate, argv)
    assert f"--{role} {flags[role]}: needs Python code" in error
    assert not marker.exists()
    run("generate", [*argv, "--trust_remote_code"])
    assert marker.exists()
    assert (tmp_path / "p.pt").exists()


# --- tensors that a language model has no use for -------------------------------------------------


SURPLUS = [
    "vision_tower.encoder.layers.0.mlp.fc1.weight",  # of a model that also sees
    "v_head.summary.weight",  # of a model that was trained by reinforcement learning
    "model.layers.0.self_attn.rotary_emb.inv_freq",  # of an old version of transformers
    "model.layers.0.attn.masked_bias",
]


def test_surplus_parts_and_missing_prefixes_are_no_error(models, tmp_path):
    """Some checkpoints were saved from the model below the head."""
    for number, name in enumerate(SURPLUS):
        check_weights("student", edit_tensors(
            models[0], tmp_path / str(number), lambda tensors: tensors | {name: torch.ones(2)}))
    check_weights("student", edit_tensors(
        models[0], tmp_path / "bare",
        lambda tensors: {name.removeprefix("model."): x for name, x in tensors.items()}))


# --- files as others write them -------------------------------------------------------------------


def test_precisions_of_a_config_in_the_names_of_other_tools(chat_models, tmp_path):
    source = chat_models[0]
    cases = {("torch_dtype", "auto"): None, ("dtype", "fp16"): torch.float16,
             ("torch_dtype", "bf16"): torch.bfloat16, ("dtype", "torch.float32"): torch.float32,
             ("dtype", "half"): torch.float16}
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("dtype", None)
    shutil.copytree(source, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    for (key, name), expected in cases.items():
        path.write_text(json.dumps(config | {key: name}))
        _, its_config = inputs.load_text_encoder("student", str(tmp_path / "model"), 60)
        assert its_config.dtype == expected, name
        assert load_model("student", str(tmp_path / "model")).dtype == (expected or torch.float32)
    # the text part of a model that reads more has one of its own
    nested = {"model_type": "qwen3_5", "text_config": {"torch_dtype": "fp16"}}
    path.write_text(json.dumps(nested))
    assert load_config("teacher", str(path.parent)).text_config.dtype == torch.float16
    for name in ("int4", "abs", "float7"):
        path.write_text(json.dumps(config | {"dtype": name}))
        line = rf"\(config.json says dtype '{name}', expected float32, bfloat16 or float16\)"
        for read in (load_config, load_tokenizer):
            with pytest.raises(ValueError, match=line):
                read("student", str(path.parent))


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "pytorch_model.pt",
                                  "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_weights_under_other_names_are_no_reason_to_begin_from_scratch(models, tmp_path, name):
    """As shards whose index was not fetched."""
    folder = tmp_path / "model"
    shutil.copytree(models[0], folder)
    (folder / "model.safetensors").rename(folder / name)
    for role in ("student", "teacher"):
        line = f"--{role} {folder}: holds {name}, but no model.safetensors, nor a model.safetensors"
        with pytest.raises(ValueError, match=re.escape(line)) as caught:
            check_weights(role, str(folder))
        assert "scratch" not in str(caught.value)
    (folder / name).unlink()
    with pytest.raises(ValueError, match="; --from_scratch starts from random weights"):
        check_weights("student", str(folder))


# --- attention ------------------------------------------------------------------------------------


def test_an_attention_that_a_model_does_not_have(tmp_path):
    config = transformers.AutoConfig.for_model("gpt_neo", vocab_size=8, hidden_size=8,
                                               num_layers=1, num_heads=2,
                                               attention_types=[[["global"], 1]])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    line = f"--attention sdpa: GPTNeoForCausalLM of --teacher {tmp_path} does not have it; use auto"
    with pytest.raises(ValueError, match=re.escape(line)):
        check_weights("teacher", str(tmp_path), attention="sdpa")
    with pytest.raises(ValueError, match=r"of --student .* does not have it; use auto"):
        check_random(str(tmp_path), attention="sdpa")
    for attention in ("auto", "eager", "flash_attention_2"):
        check_weights("teacher", str(tmp_path), attention=attention)


def test_where_flash_attention_cannot_run(models, monkeypatch):
    """Without its package, and in float32, of the student or of a teacher."""
    paths = dict(student=str(models[0]), teacher=str(models[1]))
    flags = dict(**paths, data="x", attention="flash_attention_2")
    half = {"bf16": {"enabled": True}}
    with pytest.raises(ValueError, match="flash_attention_2: needs a CUDA device and the package"):
        check_flash_attention(distill.Config(**flags), half)
    monkeypatch.setattr(flash_attention, "is_flash_attn_2_available", lambda: True)
    bfloat16 = distill.Config(**flags, teacher_dtype="bfloat16")
    with pytest.raises(ValueError, match="leaves the student in float32; enable bf16"):
        check_flash_attention(bfloat16, {})
    with pytest.raises(ValueError, match=f"--teacher {models[1]} is in float32"):
        check_flash_attention(distill.Config(**flags), half)
    check_flash_attention(bfloat16, half)
    shards = distill.Config(**flags, teacher_dtype="bfloat16", sequence_parallel=2)
    check_flash_attention(shards, {})  # the student has an attention of its own


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa"])
def test_student_and_teacher_attend_as_the_flag_says(models, attention):
    cfg = distill.Config(student=str(models[0]), teacher="t", data="x", attention=attention)
    student = load_student(cfg, {}, cfg.attention)
    spec = ModelSpec(path=str(models[1]), vocab=10, attention=attention)
    teacher = load_replicated(spec).runner.model
    for model in (student, teacher):
        expected = "sdpa" if attention == "auto" else attention
        assert model.config._attn_implementation == expected


def test_the_language_model_of_one_that_also_sees(tmp_path):
    """Its checkpoint names the layers in another way, and holds an image encoder besides."""
    text = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    vision = dict(hidden_size=32, intermediate_size=48, depth=2, num_heads=4, patch_size=14,
                  out_hidden_size=32)
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any("visual" in name for name in names)
    check_weights("student", str(tmp_path))
    model = load_model("student", str(tmp_path))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    [name] = [name for name in names if name.endswith("embed_tokens.weight")]
    assert torch.equal(model.get_input_embeddings().weight, names[name])


# --- tokenizers -----------------------------------------------------------------------------------


def test_text_is_cut_as_the_tokenizers_file_says(tmp_path):
    """transformers 5 gives a model of type qwen2 the class of Qwen's tokenizer, whatever its own
    is: its student would be trained on ids that no one else makes of the text."""
    tok512 = asset("tokenizers", "tok512")
    file = Tokenizer.from_file(str(tok512 / "tokenizer.json"))
    transformers.Qwen2Config(vocab_size=512).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tok512).save_pretrained(tmp_path)
    text = "Once,  there\n\nwas a naïve 12345"
    ids = file.encode(text, add_special_tokens=False).ids
    made = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert made(text, add_special_tokens=False)["input_ids"] != ids
    stored = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(4)
    stored.enable_padding(length=400)
    for changes in (False, True):
        if changes:  # what a library that saved it has set is no part of how text is cut
            stored.save(str(tmp_path / "tokenizer.json"))
        with pytest.warns(UserWarning, match="--student .*makes a Qwen2Tokenizer of it, which"):
            tokenizer, _ = load_tokenizer("student", str(tmp_path))
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_tokenizer("student", str(tok512))
