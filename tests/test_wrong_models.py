"""Models and tokenizers that are damaged, mixed up or of another kind end a job with one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs import ds_config
from pickled import Command
from wrong_input import check_one_line, good_line, run_wrong

# --- how a good model becomes a wrong one ---------------------------------------------------------


def edited(file, **changes):
    """Return an edit of a JSON file of a model; a value None removes its key."""

    def edit(model):
        content = json.loads((model / file).read_text()) | changes
        for key, value in changes.items():
            if value is None:
                del content[key]
        (model / file).write_text(json.dumps(content))

    return edit


def config(**changes):
    return edited("config.json", **changes)


def written(file, content):
    """Return an edit that gives a file another content."""
    return lambda model: (model / file).write_text(content)


def removed(file):
    return lambda model: (model / file).unlink()


def cut_off(model):
    """Keep the first half of the weights."""
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def weights(change):
    """Return an edit of the tensors of a model, {name: tensor}, in place."""

    def edit(model):
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return edit


def lose_one(tensors):
    del tensors["model.layers.1.self_attn.q_proj.weight"]


def with_tensor(name, tensor):
    return weights(lambda tensors: tensors.update({name: tensor}))


def hide_a_command(model):
    """Replace the weights by a pickle that would run a command."""
    (model / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Command("exploded")}, model / "pytorch_model.bin")


def lose_shard(model):
    """Replace the weights by an index of two shards and the first of them."""
    index = {"metadata": {}, "weight_map": {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def quantized(method, **more):
    return config(quantization_config={"quant_method": method} | more)


def put_nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan


WEIGHTS = "its weights cannot be loaded"
NAMES = "its weights are not those of its config.json (missing: "
SHAPE = "its weights are not those of its config.json (of another shape: "
LEFT_OVER = "its weights are not those of its config.json (left over: "
CONFIG = "its config cannot be loaded"
TOKENIZER = "its tokenizer cannot be loaded"
# What is done to a good model, and what the line says of it.
MODELS = {
    # weights
    "a file cut in the middle": (cut_off, WEIGHTS),
    "a tensor missing": (weights(lose_one), NAMES),
    "a bias too many": (
        with_tensor("model.layers.0.mlp.up_proj.bias", torch.zeros(64)), LEFT_OVER),
    "a norm too many": (
        with_tensor("model.layers.0.self_attn.q_norm.weight", torch.ones(8)), LEFT_OVER),
    "another shape": (with_tensor("model.norm.weight", torch.ones(16)),
                      SHAPE + "model.norm.weight [16] in place of [32]"),
    "a head that is not tied": (config(tie_word_embeddings=False), NAMES + "lm_head.weight"),
    "no file of weights": (removed("model.safetensors"), WEIGHTS),
    "a missing shard": (lose_shard, WEIGHTS),
    "a pickle with code": (hide_a_command, WEIGHTS),
    "bitsandbytes": (quantized("bitsandbytes", load_in_4bit=True), "quantized"),
    "fp8": (quantized("fp8"), "quantized"),
    "an unknown quantization": (quantized("magic"), "quantized"),
    # config
    "a config that is no JSON": (written("config.json", "stage: 2"), CONFIG),
    "no config": (removed("config.json"), CONFIG),
    "heads that do not divide": (config(num_attention_heads=5), CONFIG),
    "key-value heads that do not divide": (
        config(num_key_value_heads=3), "expected a divisor of num_attention_heads, 4"),
    "no key-value head": (config(num_key_value_heads=0), "says num_key_value_heads 0; expected a"),
    "architectures that are a number": (config(architectures=3), "expected a list of names"),
    "negative layers": (config(num_hidden_layers=-1), "says num_hidden_layers -1; expected a"),
    "a hidden size of 0": (config(hidden_size=0), "says hidden_size 0; expected a whole number"),
    "an activation that is none": (config(hidden_act="swoosh"), WEIGHTS),
    "no such dtype": (config(dtype="float99"), CONFIG),
    "a context below 0": (
        config(max_position_embeddings=-5), "says max_position_embeddings -5; expected a whole"),
    "an encoder and a decoder": (
        written("config.json", json.dumps({"model_type": "t5", "vocab_size": 360})),
        "is an encoder with a decoder (t5)"),
    "an encoder": (
        written("config.json", json.dumps({"model_type": "bert", "vocab_size": 360,
                                           "architectures": ["BertForMaskedLM"]})),
        "is a BertForMaskedLM, which reads a text from both sides"),
    "a model of images": (
        written("config.json", json.dumps({"model_type": "vit"})), "says vocab_size None"),
    # tokenizer
    "a tokenizer that is no JSON": (written("tokenizer.json", "no"), TOKENIZER),
    "no eos": (edited("tokenizer_config.json", eos_token=None), "its tokenizer has no eos token"),
    "a chat template that is a list": (
        edited("tokenizer_config.json", chat_template=[1, 2]), TOKENIZER),
    "generation settings that are a list": (
        written("generation_config.json", "[]"), "cannot be loaded ("),
    "generation settings of another model": (
        edited("generation_config.json", eos_token_id=[2, 151645]), "says eos_token_id 151645"),
    "a tokenizer with more ids than the head": (config(vocab_size=300), "its lm_head has 300"),
}

# --- all of them, as a student and as a teacher ---------------------------------------------------

# Wrong configs of students that start from random weights.
FROM_SCRATCH = ["no config", "heads that do not divide", "key-value heads that do not divide",
                "an activation that is none", "no such dtype", "an encoder", "a model of images"]
# transformers turns the first into bfloat16 on a CPU; a teacher does not write
ONLY_STUDENTS = {"fp8", "generation settings of another model", "no eos"}
NOT_FINITE = "its logits are not finite (nan); its weights may be damaged"
EXPLODES = "{{ 'a' * 10 ** 11 }}"  # of others, a template may do all that a template can
# {command line that names no folder of MODELS: part of the line}
OTHERS = {
    "--student={folder}/corpus20.jsonl": "no such directory",
    "--teacher={folder}/nowhere": "no such directory",
    "--student=llama/lama-7b": "its config cannot be loaded",
    "--student={folder}/no_weights": "--from_scratch starts from random",
    "--student={folder}/template --data={folder}/chats.jsonl": "template",
    "--student={folder}/explodes": "of {folder}/explodes takes more than 1 GiB of memory; repair",
    "--student={folder}/speaks --teacher={folder}/explodes_too --data={folder}/chats.jsonl":
        "the chat template of {folder}/explodes_too takes more than 1 GiB of memory; repair",
    "--student={folder}/images": "gemma3 models read more than text",
    "--teacher={folder}/mistral3":
        "mistral3: transformers has no causal language model of type mistral3",
    "--student={folder}/qwen2_5_vl --sequence_parallel=2":
        "qwen2_5_vl: transformers has no causal language model of type qwen2_5_vl",
}
# The same of what shows in the first step.
IN_A_STEP = {
    "--teacher={folder}/nan_teacher": f"--teacher {{folder}}/nan_teacher: {NOT_FINITE}",
    "--teacher={folder}/nan_teacher --teacher_tp=2": f"nan_teacher: {NOT_FINITE}",
    "--teacher={folder}/nan_teacher --tiled=false": f"nan_teacher: {NOT_FINITE}",
    "--student={folder}/nan_student": f"--student {{folder}}/nan_student: {NOT_FINITE}",
    "--student={folder}/nan_student --tiled=false --kd_weight=0":
        "precision too narrow; check its files, or use bf16 or float32 in --ds_config",
    "--teacher={folder}/other_head --tiled=false --teacher_output=topk":
        "of which --teacher_output topk keeps some; use --teacher_output logits",
}


def of_model(role, name, flags=""):
    """Return the change of a command line that names a wrong model."""
    return f"--{role}={{folder}}/{role}{list(MODELS).index(name)} {flags}"


# Ways to load a model in which all ranks take part: one that fails must not leave others waiting.
LAYOUTS = [
    ("student", "--ds_config={folder}/zero3.json"), ("teacher", "--teacher_engine=zero3"),
    ("teacher", "--teacher_tp=2")]
IN_LAYOUTS = ["a file cut in the middle", "a tensor missing", "another shape", "a missing shard"]


def cases():
    """Return {change: (role, part of the line)} of the wrong models."""
    wrong = {}
    for name, (_, message) in MODELS.items():
        wrong[of_model("student", name)] = "student", message
        if name not in ONLY_STUDENTS:
            wrong[of_model("teacher", name)] = "teacher", message
    for role, flags in LAYOUTS:
        for name in IN_LAYOUTS:  # in every layout the same words
            wrong[of_model(role, name, flags)] = role, MODELS[name][1]
    for name in FROM_SCRATCH:
        wrong[of_model("student", name, "--from_scratch")] = "student", ""
    return wrong


WRONG = cases()


def write_kinds(tokenizer, folder):
    """Write models of kinds that are not read as others are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(vocab_size=510, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
                 max_position_embeddings=256)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, image_size=16,
                  num_attention_heads=2, patch_size=8)
    configs = {
        "images": AutoConfig.for_model(
            "gemma3", text_config=shape, vision_config=vision, mm_tokens_per_image=4,
            image_token_index=509),
        # bends its logits by a number that its config calls by a name of its own
        "other_head": AutoConfig.for_model(
            "recurrent_gemma", vocab_size=510, hidden_size=32, intermediate_size=64, head_dim=8,
            num_hidden_layers=3, num_attention_heads=4, lru_width=32, logits_soft_cap=0.01,
            max_position_embeddings=256),
    }
    for name, of_kind in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(of_kind).save_pretrained(folder / name)
    for name in ("mistral3", "qwen2_5_vl"):  # nobody asks for their weights
        configs[name] = AutoConfig.for_model(name)
        configs[name].save_pretrained(folder / name)
    for name in configs:
        tokenizer.save_pretrained(folder / name)


@pytest.fixture(scope="module")
def folder(models, tokenizers, tmp_path_factory):
    """Directory of all wrong models."""
    folder = tmp_path_factory.mktemp("wrong")

    def write(name, model, edit):
        edit(shutil.copytree(model, folder / name))

    for role, model in zip(("student", "teacher"), models):
        write(f"nan_{role}", model, weights(put_nan))
        for number, (edit, _) in enumerate(MODELS.values()):
            write(f"{role}{number}", model, edit)
    write("no_weights", models[0], removed("model.safetensors"))
    write("template", models[0], edited("tokenizer_config.json", chat_template="{% for x in %}"))
    templates = {"explodes": EXPLODES, "speaks": "{% for m in messages %}{{ m }}{% endfor %}",
                 "explodes_too": EXPLODES}
    for (name, template), model in zip(templates.items(), (models[0], *models)):
        write(name, model, edited("tokenizer_config.json", chat_template=template))
    write_kinds(tokenizers[1], folder)
    ds_config(folder / "zero3.json", 3, 4, 1)
    (folder / "nowhere").symlink_to(folder / "absent")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "chats.jsonl").write_text(json.dumps({"text": chat}) + "\n")
    return folder


@pytest.fixture(scope="module")
def ended(models, texts, folder):
    """{change: Outcome of both ranks} of every wrong command line."""
    base = good_line(models, texts, folder)
    outcomes = run_wrong(2, WRONG | OTHERS, base, folder)
    assert not Path("exploded").exists()  # no pickle ran
    outcomes |= run_wrong(2, IN_A_STEP, base, folder, has_steps=True)
    assert not (folder / "run" / "metrics.jsonl").exists()
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG | OTHERS | IN_A_STEP)
def test_a_wrong_model_ends_with_one_line_and_code_2(ended, case):
    if case not in WRONG:
        return check_one_line(ended[case], (OTHERS | IN_A_STEP)[case])
    role, message = WRONG[case]
    check_one_line(ended[case], f"--{role} ")
    assert message in ended[case][0].stderr, ended[case][0].stderr


@pytest.mark.slow
def test_a_wrong_teacher_on_ranks_of_its_own_ends_with_one_line(models, texts, folder, tmp_path):
    """One that cannot be loaded, and one whose logits show it."""
    base = good_line(models, texts, tmp_path)
    change = of_model("teacher", "a tensor missing", "--teacher_ranks=1")
    [of_ranks] = run_wrong(2, [change], base, folder, has_steps=True).values()
    check_one_line(of_ranks, NAMES + "model.layers.1.self_attn.q_proj.weight")
    assert not (tmp_path / "run").exists()
    change = "--teacher={folder}/nan_teacher --teacher_ranks=1"
    [(first, second, teacher)] = run_wrong(3, [change], base, folder, has_steps=True).values()
    check_one_line((first, second), f"nan_teacher: {NOT_FINITE}")
    assert teacher.exit_code in (0, None) and teacher.stderr == "", teacher
