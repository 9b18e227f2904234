"""A head and an embedding are one weight where the files say so, whatever the config says."""

import contextlib
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
import test_teacher
from isogloss.checkpoints import export_files
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
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import load_teacher
from tied_models import (
    IDS,
    assert_close,
    new_model,
    plain_logits,
    say_tied,
    students,  # noqa: F401, a fixture
)

QWEN = {
    "text_config": dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    "vision_config": dict(hidden_size=32, intermediate_size=48, depth=2, num_heads=4, patch_size=14,
                          out_hidden_size=32)}

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
    peft = pytest.importorskip("peft")
    on_head = peft.LoraConfig(r=2, target_modules=["lm_head"])
    refused = pytest.raises(ValueError, match="lm_head shares its weight with the embedding")
    with refused if expected else contextlib.nullcontext():
        check_weights("student", str(tmp_path), adapter=on_head)
    # as many weights as are trained
    shape = shape_of("student", str(tmp_path))
    assert (shape.tied, shape.weights) == (expected, sum(map(torch.numel, model.parameters())))


def test_files_are_looked_at_again_once_they_change(tmp_path):
    model = new_model("llama", 40, tie_word_embeddings=True)
    for edit, expected in ((lambda _: None, True), (one_number_more, False)):
        with_tensors(edit)(model, tmp_path)
        assert config_of_weights("student", str(tmp_path)).tie_word_embeddings == expected


def test_a_pickled_head_of_its_own_is_seen(students, tmp_path):  # noqa: F811
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


def test_a_user_is_told_once_and_weights_that_are_absent_are_no_error(students, tmp_path, capsys):  # noqa: F811
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
        export_files.model_of_weights(load_config("student", str(path), True), weights, True)


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
    for name, engines in (("llama", ["replicated", "tensor_parallel", "zero3"]),
                          ("gpt_neox", ["replicated", "transformers", "zero3"])):
        for engine in engines:
            cases.append((str(tmp_path / name), engine, 1 if engine == "replicated" else 2))
    for answers in ranks.run(2, answers_of_teachers, cases):
        for case, answer_of_teacher in zip(cases, answers, strict=True):
            expected = plain_logits(case[0], IDS)[..., :90]
            assert_close(answer_of_teacher, expected, case)
