"""router.py: mixtures of experts as students, and the loss of their routers, in every layout."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers

import ranks
import steps
from isogloss import distill
from isogloss.config import Config
from isogloss.inputs import build_collator
from isogloss.job.launch import start_distributed
from isogloss.student.router import router_weight, routers_of
from jobs import ds_config, losses_of, run_distill, write_corpus
from steps import Layout

SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
             num_experts_per_tok=2, router_aux_loss_coef=0.05, output_router_logits=True)
LIMIT = 90  # positions
FAMILIES = {
    "qwen3_moe": dict(num_experts=6, moe_intermediate_size=16, head_dim=8),
    "gpt_oss": dict(num_local_experts=6, head_dim=8),
    "granitemoe": dict(num_local_experts=6, tie_word_embeddings=True),
    "olmoe": dict(num_experts=6),
}


@pytest.fixture(scope="module")
def students(tokenizers, tmp_path_factory):
    """Return {family: directory} of small students with random weights."""
    folders = {}
    tokenizer = tokenizers[0]
    for family, shape in FAMILIES.items():
        folders[family] = folder = tmp_path_factory.mktemp("students") / family
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id}
        config = transformers.AutoConfig.for_model(
            family, vocab_size=len(tokenizer) + 10, **SHAPE | ends | shape)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


# --- the definition -------------------------------------------------------------------------------


def balance_of(router_logits, chosen):
    """Return the loss of (tokens, E) logits of all layers, by its definition, in float64."""
    probabilities = torch.cat([logits.double().softmax(-1) for logits in router_logits])
    num_experts = probabilities.shape[1]
    total = 0
    for e in range(num_experts):
        share = sum(e in row.topk(chosen).indices for row in probabilities) / len(probabilities)
        total = total + share * probabilities[:, e].mean()
    return num_experts * total


def plain_loss(model, texts_ids, weight):
    """Return (loss, router's) of a step by transformers alone, each text by itself, no padding."""
    nats = 0
    count = 0
    logits_of_routers = []
    for ids in texts_ids:
        out = model(input_ids=torch.tensor([ids[:LIMIT]]), output_router_logits=True)
        logp = out.logits[0, : len(ids) - 1, : model.config.vocab_size - 10].log_softmax(-1)
        nats = nats - logp.gather(1, torch.tensor(ids[1:])[:, None]).sum()
        count += len(ids) - 1
        logits_of_routers += out.router_logits
    router = balance_of(logits_of_routers, model.config.num_experts_per_tok)
    return nats / count + weight * router, router


def reference(path, texts_ids):
    """Return (loss, router's loss, {name: gradient}) of a student."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    loss, router = plain_loss(model, texts_ids, model.config.router_aux_loss_coef)
    loss.backward()
    return (loss.item(), router.item(),
            {name: parameter.grad for name, parameter in model.named_parameters()})


def plain_run(path, texts_ids, num_steps):
    """Return the losses of some steps on the same texts, by torch alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=1e-3)
    losses = []
    for _ in range(num_steps):
        loss, _ = plain_loss(model, texts_ids, model.config.router_aux_loss_coef)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- the job --------------------------------------------------------------------------------------


ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.01}}


def step_results(flags, samples, layouts, num_steps=1):
    """Return, for each layout, (metrics of the steps, {name: whole gradient}); on every rank."""
    results = []
    for layout in layouts:
        state, inputs = steps.start_layout(flags, layout, optimizer=ADAM, gradient_clipping=0.0)
        gradients = steps.keep_gradients(state.engine)
        collator = build_collator(state.cfg, inputs, state.device)
        metrics = []
        for _ in range(num_steps):
            micro_batches = list(map(collator, steps.texts_of_rank(samples, layout)))
            metrics.append(distill.train_step(state, micro_batches).metrics())
        results.append((metrics, dict(gradients)))
        state.engine.destroy()
    return results


def reference_on_a_rank(path, texts_ids, num_steps=0):
    start_distributed()
    return plain_run(path, texts_ids, num_steps) if num_steps else reference(path, texts_ids)


LAYOUTS = {  # ranks: layouts
    1: [Layout(0, 8, 1), Layout(1, 2, 4), Layout(3, 4, 2), Layout(2, 8, 1, {"pack": True}),
        Layout(2, 4, 2, {"activation_checkpointing": True, "tiled": False})],
    2: [Layout(0, 2, 2), Layout(2, 4, 1), Layout(3, 2, 2),
        Layout(1, 4, 2, {"sequence_parallel": 2})],
}


def samples_of(texts, tokenizer):
    """Return (eight samples, one without text and one that the limit cuts; their ids)."""
    samples = [texts[0] * 4, None, texts[1][:9], texts[2], "", texts[3][:60], texts[4], "no"]
    ids = []
    for text in samples:
        if text is not None:
            body = tokenizer(text, add_special_tokens=False)["input_ids"]
            # one more than is read
            ids.append([tokenizer.bos_token_id, *body, tokenizer.eos_token_id][: LIMIT + 1])
    return samples, ids


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_loss_and_gradient_in_every_layout(students, tokenizers, texts, tmp_path, family):
    samples, ids = samples_of(texts, tokenizers[0])
    path = students[family]
    [(loss, router, gradients)] = ranks.run(1, reference_on_a_rank, path, ids)
    assert router > 1.0  # of equal shares it is the number of choices... of any others more
    flags = steps.flags_for((path, ""), texts, tmp_path, teacher="", kd_weight=0.0, ce_weight=1.0,
                            max_length=LIMIT)
    for num_ranks, layouts in LAYOUTS.items():
        if family == "gpt_oss":  # refused: packed samples see each other, attention has sinks
            layouts = [layout for layout in layouts
                       if not {"pack", "sequence_parallel"} & layout.flags.keys()]
        results = ranks.run(num_ranks, step_results, flags, samples, layouts)[0]
        for layout, ([metrics], found) in zip(layouts, results, strict=True):
            name = f"{num_ranks} ranks, {layout}"
            assert metrics["router_loss"] == pytest.approx(router, rel=1e-5), name
            assert metrics["loss"] == pytest.approx(loss, rel=1e-5), name
            steps.check_gradients(name, found, SimpleNamespace(gradients=gradients))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_are_those_of_transformers(students, tokenizers, texts, tmp_path, family):
    samples, ids = samples_of(texts, tokenizers[0])
    [expected] = ranks.run(1, reference_on_a_rank, students[family], ids, 3)
    flags = steps.flags_for((students[family], ""), texts, tmp_path, teacher="", kd_weight=0.0,
                            ce_weight=1.0, max_length=LIMIT)
    [(metrics, _)] = ranks.run(2, step_results, flags, samples, [Layout(1, 2, 2)], 3)[0]
    losses = [of_step["loss"] for of_step in metrics]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[0] > losses[2] + 0.01


# --- whole runs -----------------------------------------------------------------------------------

RUNS = {
    "qwen3_moe": ["--eval_samples=1", "--on_policy=0.5", "--rollout_tokens=9"],
    "gpt_oss": [],
    "granitemoe": ["--lora_r=4", "--merge"],
    "olmoe": ["--freeze_router"],
}


def bits_per_byte(path, texts):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    nats = 0.0
    for text in texts:
        body = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *body]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1, : len(tokenizer)].log_softmax(-1)
        nats -= float(logp.gather(1, ids[0, 1:, None]).sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def routers_in(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return [dict(router.named_parameters()) for router in routers_of(model)[0]]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_and_its_export_is_the_student(students, models, texts, tmp_path, family):
    texts = [text[:200] for text in texts[:20]]
    corpus = write_corpus(tmp_path, texts, 20)
    base = [f"--student={students[family]}", f"--teacher={models[1]}", f"--data={corpus}",
            "--max_length=250", "--eval_rows=4", "--eval_every=9", "--steps=4",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 3, 1, 2)}", *RUNS[family]]
    whole = tmp_path / "whole"
    saved = whole / "checkpoints" / "step_0000002"
    assert ranks.run(2, run_distill, [
        [*base, f"--output_dir={whole}", "--save_every=2", "--keep_checkpoints=9",
         f"--export={tmp_path / 'student'}"],
        [*base, f"--output_dir={tmp_path / 'resumed'}", f"--resume={saved}",
         f"--export={tmp_path / 'again'}"]]) == [[0, 0]] * 2
    lines = losses_of(whole)
    assert losses_of(tmp_path / "resumed") == losses_of(whole, 2)
    balanced = ["router_loss" in line for line in lines if "loss" in line]
    assert balanced == [family != "olmoe"] * 4
    for line in lines:
        if "router_loss" in line:
            assert 0 <= line["least_chosen_expert"] < 1 < line["most_chosen_expert"] <= 3
    measured = bits_per_byte(tmp_path / "student", texts[:4])
    assert lines[-1]["eval/student_bits_per_byte"] == pytest.approx(measured, rel=1e-5)
    before, after = routers_in(students[family]), routers_in(tmp_path / "student")
    assert len(before) == len(after) == 2
    for old, new in zip(before, after):
        moved = [not torch.equal(old[name], new[name]) for name in old]
        assert any(moved) == (family in ("qwen3_moe", "gpt_oss"))


# --- flags ----------------------------------------------------------------------------------------


def test_what_the_config_asks_for_unless_the_flag_says_otherwise():
    mixture = transformers.Qwen3MoeConfig(router_aux_loss_coef=0.02)
    dense = transformers.LlamaConfig()

    def weight(config, **flags):
        return router_weight(Config(student="s", teacher="t", data="d", **flags), config)

    assert weight(mixture) == weight(dense) == weight(dense, router_weight=0.0) == 0
    assert weight(mixture, router_weight=0.5) == 0.5
    mixture.output_router_logits = True
    assert weight(mixture) == 0.02
    assert weight(mixture, router_weight=0.0) == weight(mixture, freeze_router=True) == 0
    for flags in ({"router_weight": 0.1}, {"freeze_router": True}):
        with pytest.raises(ValueError, match="is a llama model, whose router, if there is one"):
            weight(dense, **flags)
        with pytest.raises(ValueError, match="whose stages know their own layers alone"):
            weight(mixture, pipeline_parallel=2, **flags)
    with pytest.raises(ValueError, match="--freeze_router with --router_weight"):
        weight(mixture, router_weight=0.1, freeze_router=True)
