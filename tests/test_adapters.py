"""Low-rank adapters: trained as plain peft trains them, at every ZeRO stage; read, merged, written.
"""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import ranks
from isogloss.config import Config
from isogloss.flags.model_names import ModelName, read_model_name
from isogloss.flags.parse import parse_flags
from isogloss.inputs import load_text_encoder
from isogloss.log import model_versions
from isogloss.models import adapters
from isogloss.models.pretrained import check_weights, load_model
from isogloss.student.engine import EngineRunner
from isogloss.teachers.engines import sharded
from jobs import check_refusals, ds_config, losses_of, run_distill, write_corpus

peft = pytest.importorskip("peft", reason="the optional peft is absent")
pytest.importorskip("bitsandbytes", reason="the optional bitsandbytes is absent")

TARGETS = "q_proj,v_proj,down_proj"
ADAPTER = ["--lora_r=3", "--lora_alpha=12", f"--lora_targets={TARGETS}"]
LEARNING_RATE = 0.02
STEPS = 3
ALONE = 0, 2, 3  # ZeRO stages without a teacher; a job goes on in stage 1


def tensors_of(folder):
    [path] = Path(folder).glob("*.safetensors")
    return load_file(path)


def new_adapter(base, folder):
    """Write an adapter of random matrices by peft itself; return its directory."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS.split(","))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def merged_by_peft(base, folder):
    """Return {name: weight} of an adapter in its base model, by peft alone."""
    model = AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()


def assert_close(weights, expected, tolerance):
    """Assert that {name: tensor} agree, by norms of differences; a tied head may be absent."""
    assert weights.keys() <= expected.keys()
    assert expected.keys() - weights.keys() <= {"lm_head.weight"}
    for name, weight in weights.items():
        error = (weight - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)
        assert error <= tolerance, (name, float(error))


# --- training -------------------------------------------------------------------------------------


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(scope="module")
def trained_by_peft(models, tokenizers, texts):
    """{options of from_pretrained: tensors of an adapter that a loop in plain torch trained}."""
    return {kind: trained(models[0], tokenizers[0], texts, **options) for kind, options in
            (("", {}), ("nf4", {"quantization_config": NF4, "dtype": torch.float32}))}


def trained(base, tokenizer, texts, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=TARGETS.split(","))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, **options), config)
    model.train()
    matrices = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(matrices, lr=LEARNING_RATE, weight_decay=0.1)
    for _ in range(STEPS):
        losses = []
        for text in texts[:8]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            ids = torch.tensor(bos + ids + [tokenizer.eos_token_id])
            logits = model(input_ids=ids[None]).logits[0, :-1, : len(tokenizer)]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(matrices, 0.5)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in
            peft.get_peft_model_state_dict(model).items()}


def command_lines(folder, models, texts):
    adam = {"optimizer": {"type": "AdamW", "params": {
        "lr": LEARNING_RATE, "weight_decay": 0.1, "torch_adam": True}}}
    corpus = write_corpus(folder, texts, 8)
    lines = {}

    def add(name, *words, stage=2, micro_batch_size=2, source=models[0]):
        config = ds_config(folder / f"{stage}-{micro_batch_size}.json", stage, micro_batch_size, 2,
                           **adam)
        lines[name] = [f"--student={source}", f"--data={corpus}", "--num_workers=0",
                       f"--steps={STEPS}", f"--ds_config={config}", "--max_length=250",
                       f"--output_dir={folder / name}", *words]

    teacher = [f"--teacher={models[1]}", *ADAPTER, "--steps=4"]
    for stage in ALONE:
        add(f"stage{stage}", "--kd_weight=0", *ADAPTER, f"--export={folder}/stage{stage}/export",
            stage=stage)
    four_bits = [*ADAPTER, "--quantize=nf4"]
    add("nf4", "--kd_weight=0", *four_bits, f"--export={folder}/nf4/export")
    whole = [*teacher, *four_bits, "--eval_rows=4", "--eval_every=1", "--eval_samples=1", "--merge"]
    add("nf4_whole", *whole, "--save_every=2", f"--export={folder}/nf4_whole/export", stage=1)
    add("nf4_again", *whole, f"--export={folder}/nf4_again/export",
        f"--resume={folder / 'nf4_whole' / 'checkpoints' / 'step_0000002'}", stage=1)
    add("whole", *teacher, "--save_every=2", stage=3)
    resume = f"--resume={folder / 'whole' / 'checkpoints' / 'step_0000002'}"
    add("to3", *teacher, resume, "--merge", f"--export={folder}/to3/export", stage=3)
    add("to1", *teacher, resume, stage=1)
    add("sharded", *teacher, "--sequence_parallel=2", "--mlp_tiles=2",
        "--activation_checkpointing", "--steps=2", stage=3, micro_batch_size=4)
    add("writing", *teacher, "--on_policy=0.5", "--rollout_tokens=8", "--steps=2",
        "--eval_rows=2", stage=3)
    add("onward", "--kd_weight=0", "--lora_r=3", "--steps=1", "--eval_rows=2",
        f"--export={folder}/onward/export", source=folder / "stage2" / "export")
    add("unfrozen", f"--teacher={folder}/stage2/export", "--teacher_tp=2", "--steps=1",
        f"--export={folder}/unfrozen/export", stage=3, source=folder / "stage2" / "export")
    return lines


@pytest.fixture(scope="module")
def jobs(models, texts, tmp_path_factory):
    """Folder of all jobs of `command_lines`, run on two ranks one after the other."""
    folder = tmp_path_factory.mktemp("adapters")
    lines = command_lines(folder, models, texts)
    codes = ranks.run(2, run_distill, list(lines.values()))
    assert codes == [[0] * len(lines)] * 2, dict(zip(lines, codes[0]))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*[f"stage{stage}" for stage in ALONE], "nf4"])
def test_an_adapter_is_trained_as_by_plain_peft(jobs, models, trained_by_peft, name):
    export = jobs / name / "export"
    kind = "nf4" if name == "nf4" else ""
    assert_close(tensors_of(export), trained_by_peft[kind], 2e-3)
    # peft reads it by the name of its base model alone
    config = json.loads((export / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (
        3, 12, sorted(TARGETS.split(",")))
    assert config["base_model_name_or_path"] == str(models[0])


@pytest.mark.slow
def test_a_job_goes_on_bit_by_bit_in_other_stages_and_in_shards(jobs):
    expected = losses_of(jobs / "whole")
    assert [line["step"] for line in expected] == [1, 2, 3, 4]
    assert losses_of(jobs / "to3", 2) == expected[2:]
    for name, steps in (("to1", expected[2:]), ("sharded", expected[:2])):
        for line, other in zip(losses_of(jobs / name), steps, strict=True):
            for key in ("loss", "ce", "kd", "grad_norm"):
                assert line[key] == pytest.approx(other[key], rel=2e-5), (name, key)


@pytest.mark.slow
def test_four_bits_go_on_and_are_exported_as_they_were_trained(jobs, models, texts):
    """Bit by bit, with evaluations in between, which pack them anew if nobody forbids it."""
    whole = losses_of(jobs / "nf4_whole")
    assert losses_of(jobs / "nf4_again", 2) == [line for line in whole if line["step"] > 2]
    model = AutoModelForCausalLM.from_pretrained(jobs / "nf4_whole" / "export")
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(jobs / "nf4_whole" / "export")
    nats = 0.0
    for text in texts[:4]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *ids]])[:, :251]
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1, : len(tokenizer)].log_softmax(-1)
        nats -= float(logp.gather(1, ids[0, 1:, None]).sum())
    num_bytes = sum(len(text.encode()) for text in texts[:4])
    bits = nats / math.log(2) / num_bytes
    assert whole[-1]["eval/student_bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    rounded = (tensors_of(jobs / "nf4_whole" / "export"), tensors_of(models[0]))
    assert any(not torch.equal(rounded[0][name], rounded[1][name])  # also without an adapter
               for name in rounded[1] if "k_proj" in name)


@pytest.mark.slow
def test_a_checkpoint_holds_no_frozen_weight(jobs):
    files = list((jobs / "whole" / "checkpoints" / "step_0000004").rglob("*model_states.pt"))
    assert files
    names = set()
    for path in files:
        names |= torch.load(path, weights_only=False)["module"].keys()
    names.discard("model.lm_head.weight")  # tied: DeepSpeed knows it by its other name
    assert names and all(adapters.is_adapter(name) for name in names)


@pytest.mark.slow
def test_a_merged_export_is_the_base_with_the_products(jobs, models):
    merged = tensors_of(jobs / "to3" / "export")
    base = tensors_of(models[0])
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in base if name.split(".")[-2] in TARGETS.split(",")}
    # and it says what the adapter says in its base model
    assert not (jobs / "to3" / "export" / "adapter_config.json").exists()


@pytest.mark.slow
def test_an_adapter_goes_on_or_becomes_part_of_the_weights(jobs, models):
    before = tensors_of(jobs / "stage2" / "export")
    after = tensors_of(jobs / "onward" / "export")
    assert before.keys() == after.keys()
    # one step of Adam moves a weight by about the learning rate
    moves = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0.5 * LEARNING_RATE < max(moves) < 2 * LEARNING_RATE
    config = json.loads((jobs / "onward" / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models[0])
    # without a teacher, nothing is said of one
    line, judged = losses_of(jobs / "onward")
    assert line["loss"] == line["ce"] and "eval/student_bits_per_byte" in judged
    assert not {"kd", "eval/teacher_bits_per_byte"} & {*line, *judged}
    # student and teacher are one model then, but for the tokenizers' difference: none
    [line] = losses_of(jobs / "unfrozen")
    assert line["kd"] == pytest.approx(0, abs=1e-6)
    expected = merged_by_peft(models[0], jobs / "stage2" / "export")
    moved = tensors_of(jobs / "unfrozen" / "export")
    for name, weight in moved.items():
        assert float((weight - expected[name]).abs().max()) < 2 * LEARNING_RATE


@pytest.mark.slow
def test_a_student_with_an_adapter_writes(jobs):
    lines = [line for line in losses_of(jobs / "writing") if "loss" in line]
    assert len(lines) == 2 and all(line["rollout/logp_gap"] < 1e-4 for line in lines)


# --- reading --------------------------------------------------------------------------------------


def test_an_adapter_is_read_as_peft_merges_it(models, tmp_path):
    folder = new_adapter(models[1], tmp_path / "adapter")
    expected = merged_by_peft(models[1], folder)
    model = load_model("teacher", str(folder), dtype=torch.float32)
    assert_close(model.state_dict(), expected, 1e-6)
    assert all(parameter.requires_grad for parameter in model.parameters())
    check_weights("teacher", str(folder))


def edit_config(**changes):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_weights(change):
    def edit(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


SURPLUS = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
WRONG = {
    "dora": (edit_config(use_dora=True), "its adapter has use_dora True, so it is more than pairs"),
    "biases": (edit_config(bias="all"), "its adapter has bias 'all'"),
    "one end": (edit_config(modules_to_save=["lm_head"]), "has modules_to_save ['lm_head']"),
    "other modules": (edit_config(modules_to_save=["q_proj"]), "has modules_to_save ['q_proj']"),
    "no ends": (edit_config(modules_to_save=["embed_tokens", "lm_head"]),
                "the weights of its adapter lack model.embed_tokens.weight"),
    "another kind": (edit_config(peft_type="IA3"), "is an adapter of type IA3; expected LORA"),
    "no base": (edit_config(base_model_name_or_path=None), "says base_model_name_or_path None"),
    "a base that is gone": (edit_config(base_model_name_or_path="./gone"), "cannot be loaded"),
    "an adapter as base": (
        lambda folder: edit_config(base_model_name_or_path=str(folder))(folder),
        "is an adapter of an adapter"),
    "other layers": (edit_config(target_modules=["qkv"]), "have no linear layer qkv; theirs are"),
    "a model beside it": (lambda folder: (folder / "config.json").write_text("{}"),
                          "holds adapter_config.json beside a config.json"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"),
                "its adapter_config.json cannot be read"),
    "a matrix too few": (edit_weights(lambda tensors: tensors.pop(min(tensors))),
                         "the weights of its adapter lack model.layers.0"),
    "a matrix too many": (edit_weights(lambda tensors: tensors.update({SURPLUS: torch.zeros(2)})),
                          "the weights of its adapter have in excess"),
    "another shape": (
        edit_weights(lambda tensors: tensors.update({min(tensors): torch.zeros(2, 99)})),
        "the weights of its adapter cannot be loaded"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(),
                   "the weights of its adapter cannot be loaded"),
}


@pytest.fixture(scope="module")
def adapter(models, tmp_path_factory):
    return new_adapter(models[0], tmp_path_factory.mktemp("peft") / "adapter")


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_adapter_is_refused_with_one_line(adapter, tmp_path, case):
    edit, message = WRONG[case]
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    edit(folder)
    with pytest.raises(ValueError) as error:
        check_weights("student", str(folder))
    text = str(error.value)
    assert text.startswith(f"--student {folder}") and message in text and "\n" not in text


def test_what_a_name_means(adapter, models, tmp_path):
    assert read_model_name("student", "a/b") == ModelName("a/b")
    assert read_model_name("student", "a/b@v1.0") == ModelName("a/b", "v1.0")
    assert read_model_name("student", str(models[0])) == ModelName(str(models[0]))
    assert read_model_name("student", str(adapter)) == ModelName(
        str(models[0]), None, str(adapter))
    (tmp_path / "x@y").mkdir()
    assert read_model_name("student", f"{tmp_path}/x@y") == ModelName(f"{tmp_path}/x@y")
    for name, message in ((f"{models[0]}@main", "is a directory, which has no revisions"),
                          ("a/b@", "names no revision")):
        with pytest.raises(ValueError, match=message):
            read_model_name("student", name)


def write_hub_cache(folder, models):
    """Write what the hub client keeps of a repository: main is one model, v1 another."""
    for commit, branch, model in (("a" * 40, "main", models[0]), ("b" * 40, "v1", models[1])):
        snapshot = folder / "models--org--name" / "snapshots" / commit
        shutil.copytree(model, snapshot)
        refs = folder / "models--org--name" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / branch).write_text(commit)


def test_a_revision_is_what_is_read_and_recorded(models, tmp_path, monkeypatch):
    """By the cache of the hub client, as without a network."""
    write_hub_cache(tmp_path, models)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, model, commit in (("org/name", models[0], "a" * 40),
                                ("org/name@v1", models[1], "b" * 40),
                                (f"org/name@{'b' * 40}", models[1], "b" * 40)):
        encoder, _ = load_text_encoder("teacher", name, 0)
        assert len(encoder.table) == len(load_text_encoder("teacher", str(model), 0)[0].table)
        check_weights("teacher", name)
        weights = load_model("teacher", name).state_dict()
        for key, tensor in tensors_of(model).items():
            assert torch.equal(weights[key], tensor)
        folder = sharded.local_folder(name)
        assert folder.name == commit
    cfg = Config(student=str(models[0]), teacher="org/name@v1", data="d")
    assert model_versions(cfg) == {
        str(models[0]): {"base": str(models[0]), "revision": None, "adapter": None,
                         "commit": None},
        "org/name@v1": {"base": "org/name", "revision": "v1", "adapter": None,
                        "commit": "b" * 40}}
    (tmp_path / "cache" / "teacher").mkdir(parents=True)
    shutil.copy(models[1] / "config.json", tmp_path / "cache" / "teacher")
    cfg = Config(student=str(models[0]), teacher_cache=str(tmp_path / "cache"), data="d")
    assert list(model_versions(cfg)) == [str(models[0]), str(tmp_path / "cache" / "teacher")]
    with pytest.raises(ValueError, match=r"--teacher org/name@v2: its config cannot be loaded"):
        load_text_encoder("teacher", "org/name@v2", 0)


# --- flags ----------------------------------------------------------------------------------------

FLAGS = {
    "lora_alpha=4": "--lora_alpha 4: is for the adapter of --lora_r, which is 0",
    "lora_targets=q_proj": "--lora_targets q_proj: is for the adapter",
    "merge export=x": "--merge: is for the adapter",
    "lora_r=2 merge": "--merge: says what --export writes",
    "lora_r=2 from_scratch": "--lora_r 2 with --from_scratch, whose frozen weights would",
    "lora_r=2 pipeline_parallel=2": "--lora_r 2 with --pipeline_parallel 2, which cuts a model",
    "lora_embeddings": "--lora_embeddings: is for the adapter of --lora_r, which is 0",
    "quantize=nf4": "--quantize nf4: is for the adapter of --lora_r",
    "quantize=int4 lora_r=2": "--quantize int4: expected one of",
    "quantize=nf4 lora_r=2 writer=vllm": "--quantize nf4 with --writer vllm, which reads whole",
    "lora_r=-1": "--lora_r -1: expected 0 or more",
    "freeze_until=3": "--freeze_until 3: says how long --train_only holds; add --train_only",
    "train_only=layers": "--train_only layers: expected one of",
    "train_only=embeddings lora_r=2": "with --lora_r 2: nothing would train the adapter; add",
    "train_only=embeddings freeze_until=2 lora_r=2": "nothing would train the adapter",
    "train_only=embeddings from_scratch": "with --from_scratch, whose frozen weights",
    "train_only=embeddings pipeline_parallel=2": "with --pipeline_parallel 2, whose stages",
}


@pytest.mark.parametrize("words", FLAGS)
def test_flags_that_do_not_go_with_what_is_trained_are_refused(words):
    argv = [f"--{word}" for word in f"student=s teacher=t data=d {words}".split()]
    with pytest.raises(ValueError, match=re.escape(FLAGS[words])):
        parse_flags(Config, argv)


def test_flags_against_the_adapter_of_a_student_are_refused(adapter, models):
    def config_of(**flags):
        return adapters.student_adapter(
            Config(student=str(adapter), teacher="t", data="d", **flags))

    assert config_of(lora_r=2).lora_alpha == config_of(lora_r=2, lora_alpha=8.0).lora_alpha == 8
    assert config_of() is None
    for flags in (dict(lora_r=3), dict(lora_r=2, lora_alpha=4.0),
                  dict(lora_r=2, lora_targets="q_proj")):
        with pytest.raises(ValueError, match="is an adapter with r 2 and alpha 8"):
            config_of(**flags)
    flags = dict(student=str(models[0]), teacher="t", data="d", lora_r=5)
    assert adapters.student_adapter(Config(**flags)).lora_alpha == 10
    for targets, message in (("q_proj,nothing", "have no linear layer nothing; theirs are down"),
                             ("lm_head", "shares its weight with the embedding")):
        cfg = Config(**flags, lora_targets=targets)
        with pytest.raises(ValueError, match=message):
            check_weights("student", cfg.student, False, adapters.student_adapter(cfg))


def test_four_bits_need_their_library_and_no_shards(models, tmp_path, monkeypatch):
    flags = dict(student=str(models[0]), teacher="t", data="d", lora_r=2, quantize="nf4")
    config = ds_config(tmp_path / "ds.json", 3, 1, 1)
    check_refusals(flags | {"teacher": str(models[1]), "max_length": 99},
                   [({"ds_config": config}, "has ZeRO-3, which cuts weights")])
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs bitsandbytes, which is not installed; pip install"):
        Config(**flags)


def test_frozen_weights_are_weights_and_take_part_in_two_products(models, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model = AutoModelForCausalLM.from_pretrained(models[0])
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = model.get_input_embeddings().weight.requires_grad_(False).numel()
    module = SimpleNamespace(model=model, parameters=model.parameters)
    runner = EngineRunner(SimpleNamespace(module=module), 9)
    assert runner.num_weights == total
    assert runner.num_parameters == pytest.approx(total - frozen / 3)


def test_without_peft_one_line_says_what_to_install(adapter, models, monkeypatch):
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None)
    for student, flags in ((adapter, {}), (models[0], {"lora_r": 2})):
        cfg = Config(student=str(student), teacher="t", data="d", **flags)
        with pytest.raises(ValueError, match="needs peft, which is not installed; pip install"):
            check_weights("student", cfg.student, False, adapters.student_adapter(cfg))
