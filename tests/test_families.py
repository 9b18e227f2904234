"""Mixtures of experts and hybrids as students and teachers: gradients, runs that stop, exports.

Each is compared with itself alone: one text at a time, without padding, by transformers.
"""

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
from jobs import ds_config, losses_of, run_all, run_and_listen, write_corpus
from steps import Layout

LIMIT = 90  # positions
SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2)
EXPERTS = dict(num_experts_per_tok=2, router_aux_loss_coef=0.05, output_router_logits=True)
MIXTURES = {
    "qwen3_moe": dict(num_experts=6, moe_intermediate_size=16, head_dim=8),
    "gpt_oss": dict(num_local_experts=6, head_dim=8),
    "granitemoe": dict(num_local_experts=6, tie_word_embeddings=True),
    "olmoe": dict(num_experts=6),
}
DELTA = dict(head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
             linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
HYBRIDS = {
    "qwen3_next": DELTA | EXPERTS | dict(num_experts=4, moe_intermediate_size=16,
                                         shared_expert_intermediate_size=16),
    "qwen3_5_text": DELTA,
    "mamba2": dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, expand=2),
    "jamba": EXPERTS | dict(num_experts=4, mamba_d_state=8, attn_layer_period=2,
                            attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_multiple_of=16),
    "falcon_h1": dict(mamba_d_ssm=32, head_dim=8, **MAMBA | {"mamba_n_heads": 4}),
    "nemotron_h": dict(hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=8,
                       ssm_state_size=8, n_groups=2, head_dim=8),
}
FAMILIES = {family: EXPERTS | shape for family, shape in MIXTURES.items()} | HYBRIDS
WITH_ROUTER = [family for family in FAMILIES if "num_experts_per_tok" in FAMILIES[family]]


def write_family(family, tokenizer, seed, folder):
    """Write a small model with random weights, norms and biases included, and its tokenizer."""
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
            for name in ("bos", "eos", "pad")}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer) + 10, **SHAPE | ends | FAMILIES[family])
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tokenizers, tmp_path_factory):
    """Return ({family: directory} of students, of teachers)."""
    both = []
    for tokenizer, role in zip(tokenizers, ("student", "teacher")):
        its = {}
        for seed, family in enumerate(FAMILIES):
            its[family] = tmp_path_factory.mktemp(role) / family
            write_family(family, tokenizer, seed, its[family])
        both.append(its)
    return both


# --- steps, by the definition ---------------------------------------------------------------------


def balance_of(router_logits, chosen):
    """Return the loss of (tokens, E) logits of all layers, by its definition, in float64."""
    probabilities = torch.cat([logits.double().softmax(-1) for logits in router_logits])
    num_experts = probabilities.shape[1]
    total = 0
    for e in range(num_experts):
        share = sum(e in row.topk(chosen).indices for row in probabilities) / len(probabilities)
        total = total + share * probabilities[:, e].mean()
    return num_experts * total


def plain_loss(model, texts_ids):
    """Return (loss, router's or None) of a step by transformers, each text by itself."""
    nats = 0
    count = 0
    logits_of_routers = []
    weight = getattr(model.config, "router_aux_loss_coef", 0)
    for ids in texts_ids:
        asked = {"output_router_logits": True} if weight else {}
        out = model(input_ids=torch.tensor([ids[:LIMIT]]), use_cache=False, **asked)
        logp = out.logits[0, : len(ids) - 1, : model.config.vocab_size - 10].log_softmax(-1)
        nats = nats - logp.gather(1, torch.tensor(ids[1:])[:, None]).sum()
        count += len(ids) - 1
        logits_of_routers += out.router_logits if weight else ()
    if not weight:
        return nats / count, None
    router = balance_of(logits_of_routers, model.config.num_experts_per_tok)
    return nats / count + weight * router, router.item()


def plain_steps(students, texts_ids):
    """Return, for each family, (losses of three steps, router's, {name: gradient} of the first)."""
    start_distributed()
    results = {}
    for family, path in students.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss, balance = plain_loss(model, texts_ids)
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                router = balance
                gradients = {name: parameter.grad.clone()
                             for name, parameter in model.named_parameters()}
            optimizer.step()
        results[family] = losses, router, gradients
    return results


ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.01}}


def steps_of(flags, students, samples, layouts):
    """Return {(family, layout's number): (metrics of its steps, first gradients)}; on every rank.

    Of the first layout three steps are taken.
    """
    results = {}
    for family, path in students.items():
        for number, layout in enumerate(layouts):
            if family not in layout_families(layout):
                continue
            state, inputs = steps.start_layout(
                flags | {"student": str(path)}, layout, optimizer=ADAM, gradient_clipping=0.0)
            gradients = steps.keep_gradients(state.engine)
            collator = build_collator(state.cfg, inputs, state.device)
            metrics = []
            for step in range(1 if number else 3):
                micro_batches = list(map(collator, steps.texts_of_rank(samples, layout)))
                metrics.append(distill.train_step(state, micro_batches).metrics())
                if step == 0:
                    first = dict(gradients)
            results[family, number] = metrics, first
            state.engine.destroy()
    return results


SAVING = Layout(1, 4, 2, {"activation_checkpointing": True, "tiled": False})
LAYOUTS = {  # ranks: layouts
    1: [SAVING, Layout(0, 8, 1), Layout(2, 8, 1, {"pack": True})],
    2: [Layout(3, 2, 2), Layout(1, 2, 2), Layout(2, 4, 1),
        Layout(1, 4, 2, {"sequence_parallel": 2})],
}
# each of them takes every other family, mixtures and hybrids
EVEN, ODD = [Layout(0, 8, 1), Layout(1, 2, 2)], [Layout(2, 4, 1)]


def layout_families(layout):
    """Return the families that a layout takes; what it refuses is tested below."""
    if layout.flags.keys() & {"pack", "sequence_parallel"}:
        return [family for family in MIXTURES if family != "gpt_oss"]
    if layout in EVEN:
        return list(FAMILIES)[::2]
    return list(FAMILIES)[1::2] if layout in ODD else FAMILIES


@pytest.fixture(scope="module")
def taken(folders, tokenizers, texts, tmp_path_factory):
    """Return (what `plain_steps` says, {ranks: what `steps_of` says})."""
    # one without text, one that the limit cuts; an empty one teaches nothing either
    samples = [texts[0] * 4, None, texts[1][:9], texts[2], "", texts[3][:60], texts[4], "no"]
    tokenizer = tokenizers[0]
    ids = []
    for text in samples:
        if text:
            body = tokenizer(text, add_special_tokens=False)["input_ids"]
            # one more than is read
            ids.append([tokenizer.bos_token_id, *body, tokenizer.eos_token_id][: LIMIT + 1])
    flags = steps.flags_for(("", ""), texts, tmp_path_factory.mktemp("steps"), kd_weight=0.0,
                            ce_weight=1.0, max_length=LIMIT)
    return ranks.run(1, plain_steps, folders[0], ids)[0], {
        num_ranks: ranks.run(num_ranks, steps_of, flags, folders[0], samples, layouts)[0]
        for num_ranks, layouts in LAYOUTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_transformers_in_every_layout(taken, family):
    expected, found = taken
    losses, router, gradients = expected[family]
    for num_ranks, layouts in LAYOUTS.items():
        for number, layout in enumerate(layouts):
            if family not in layout_families(layout):
                continue
            name = f"{num_ranks} ranks, {layout}"
            metrics, of_layout = found[num_ranks][family, number]
            if family in WITH_ROUTER:
                assert metrics[0]["router_loss"] == pytest.approx(router, rel=1e-5), name
            steps.check_gradients(name, of_layout, SimpleNamespace(gradients=gradients))
            its = [of_step["loss"] for of_step in metrics]
            assert its == pytest.approx(losses[: len(its)], rel=1e-6), name
    assert losses[0] > losses[2] + 0.01


# --- whole runs -----------------------------------------------------------------------------------

RUNS = {
    "qwen3_moe": ["--eval_samples=1", "--on_policy=0.5", "--rollout_tokens=9"],
    "qwen3_next": ["--eval_samples=1", "--on_policy=0.5", "--rollout_tokens=9"],
    "granitemoe": ["--lora_r=4", "--merge"],
    "olmoe": ["--freeze_router"],
    "jamba": ["--eval_samples=1", "--activation_checkpointing"],
}


@pytest.fixture(scope="module")
def runs(folders, texts, tmp_path_factory):
    """Run each family as a student, which stops and goes on, and as its own family's teacher."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder, [text[:200] for text in texts[:20]], 20)
    lines = {1: [], 2: []}
    for family, student in folders[0].items():
        # the others are shared by ranks above, and in test_tied_exports.py
        num_ranks = 2 if family in RUNS or family in MIXTURES else 1
        base = [f"--student={student}", f"--teacher={folders[1][family]}", f"--data={corpus}",
                "--max_length=250", "--eval_rows=4", "--eval_every=9", "--steps=2",
                "--num_workers=0", "--teacher_dtype=float32",
                f"--ds_config={ds_config(folder / 'ds.json', 3, 1, 2)}", *RUNS.get(family, [])]
        whole = folder / family / "whole"
        saved = whole / "checkpoints" / "step_0000001"
        lines[num_ranks] += [
            [*base, f"--output_dir={whole}", "--save_every=1", "--keep_checkpoints=9",
             f"--export={folder / family / 'student'}"],
            [*base, f"--output_dir={folder / family / 'resumed'}", f"--resume={saved}",
             f"--export={folder / family / 'again'}"]]
    for num_ranks, argv_list in lines.items():
        run_all(num_ranks, *argv_list)
    return folder


def bits_per_byte(path, texts):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    nats = 0.0
    for text in texts:
        ids = begin + tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        logp = logits[0, :-1, : len(tokenizer)].log_softmax(-1)
        nats -= float(logp.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def routers_in(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return [dict(router.named_parameters()) for router in routers_of(model)[0]]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_and_its_export_is_the_student(runs, folders, texts, family):
    lines = losses_of(runs / family / "whole")
    assert losses_of(runs / family / "resumed") == losses_of(runs / family / "whole", 1)
    held_out = [text[:200] for text in texts[:4]]
    for role, path in (("student", runs / family / "student"), ("teacher", folders[1][family])):
        measured = bits_per_byte(path, held_out)
        assert lines[-1][f"eval/{role}_bits_per_byte"] == pytest.approx(measured, rel=1e-5), role
    balanced = ["router_loss" in line for line in lines if "loss" in line]
    assert balanced == [family in WITH_ROUTER and family != "olmoe"] * 2
    for line in lines:
        if "router_loss" in line:
            assert 0 <= line["least_chosen_expert"] < 1 < line["most_chosen_expert"] <= 3
    before, after = routers_in(folders[0][family]), routers_in(runs / family / "student")
    assert bool(before) == (family in WITH_ROUTER)
    for old, new in zip(before, after, strict=True):
        moved = [not torch.equal(old[name], new[name]) for name in old]
        assert any(moved) == (family not in ("olmoe", "granitemoe"))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_family_cannot_do_is_refused_with_a_line(folders, models, texts, tmp_path):
    students, teachers = folders
    base = [f"--data={write_corpus(tmp_path, texts, 20)}", "--max_length=60", "--steps=1",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 2, 2, 1)}"]
    alone = []
    in_shards = []
    for family in ("gpt_oss", *HYBRIDS):
        its = [f"--student={students[family]}", f"--teacher={models[1]}"]
        taught = [f"--student={models[0]}", f"--teacher={teachers[family]}"]
        alone.append(([*its, "--pack"], "use --pack=false"))
        alone.append(([*taught, "--pack"], "use --pack=false"))
        shards = "attention has sinks; use 1" if family == "gpt_oss" else "shard of their own rank"
        in_shards.append(([*its, "--sequence_parallel=2"], shards))
        if family == "mamba2":
            alone.append(([*its, "--eval_samples=1", "--eval_rows=2"], "cannot write token by tok"))
    for num_ranks, cases in ((1, alone), (2, in_shards)):
        lines = [[*base, *flags, f"--output_dir={tmp_path / str(number)}"]
                 for number, (flags, _) in enumerate(cases)]
        codes, said = ranks.run(num_ranks, run_and_listen, *lines)[0]
        assert codes == [2] * len(cases)
        complaints = [line for line in said.splitlines() if line.startswith("distill.py: --")]
        for (flags, words), line in zip(cases, complaints, strict=True):
            assert words in line, flags


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
