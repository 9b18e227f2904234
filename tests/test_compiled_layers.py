"""Layers that torch.compile makes: as near to float64 as plain ones, one graph, in every layout."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
from isogloss.config import Config
from isogloss.models import compiled_layers
from isogloss.models.compiled_layers import compile_layers
from isogloss.models.compiler import missing_compiler
from isogloss.student.options import compiled
from jobs import check_same_curve, ds_config, losses_of, run_and_listen, short_run

VOCAB = 90
ENDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
SHAPE = ENDS | dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
FAMILIES = {  # of each kind of layer one that is compiled
    "llama": SHAPE,
    "qwen2": SHAPE,
    "qwen3": SHAPE | dict(head_dim=8),
    "gemma2": SHAPE | dict(head_dim=8),
    "gemma3_text": SHAPE | dict(head_dim=8, sliding_window=8),
    "phi3": SHAPE,
    "olmo2": SHAPE,
    "granite": SHAPE,
    "gpt_neox": SHAPE,
    "qwen3_moe": SHAPE | dict(head_dim=8, num_experts=4, num_experts_per_tok=2,
                              moe_intermediate_size=16),
}


@pytest.fixture(autouse=True)
def graphs_of_each_test():
    yield
    torch._dynamo.reset()


def write(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def gradients(model, ids):
    """Return [hidden states, gradients of all weights] of a sum over squared logits."""
    model.zero_grad()
    out = model(input_ids=ids, use_cache=False).logits
    out.square().mean().backward()
    return [out.detach(), *(weight.grad.clone() for weight in model.parameters()
                            if weight.grad is not None)]


def error_of(ours, exact):
    squares = [sum((x.double() - y).square().sum() for x, y in zip(ours, exact, strict=True)),
               sum(y.square().sum() for y in exact)]
    return float((squares[0] / squares[1]) ** 0.5)


# torch's own gradients and partition of a graph, but no code that takes seconds to make
WITHOUT_CODE = "aot_eager_decomp_partition"


@pytest.mark.parametrize("family, compiler", [
    ("llama", WITHOUT_CODE),
    *[pytest.param(name, "inductor", marks=pytest.mark.slow) for name in FAMILIES]])
def test_compiled_layers_are_as_near_to_float64_as_plain_ones(family, compiler, monkeypatch):
    """Output and all gradients, whatever the length."""
    if missing := missing_compiler():
        pytest.skip(missing)
    monkeypatch.setattr(compiled_layers, "COMPILER", compiler)
    model = write(family)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    if "num_experts" in FAMILIES[family]:  # products of groups have no float64
        exact.set_experts_implementation("eager")
    forwards = compile_layers(model, "--compile true", learns=True)
    for rows, length in ((2, 9), (3, 30)):
        ids = torch.randint(VOCAB, (rows, length))
        results = [gradients(each, ids) for each in (model, plain, exact)]
        for part in (slice(0, 1), slice(1, None)):
            ours, others, right = (result[part] for result in results)
            assert error_of(ours, right) <= 2 * error_of(others, right) + 1e-7
    assert not forwards[0].reasons


def test_a_teachers_layer_that_comes_out_otherwise_runs_as_it_is(monkeypatch, capsys):
    """Its first pass already gives what the layer itself does."""
    def wrong(graph, inputs):
        return lambda *args: [1.5 * out for out in graph(*args)]

    monkeypatch.setattr(compiled_layers, "COMPILER", wrong)
    model = write("llama").eval()
    ids = torch.randint(VOCAB, (2, 9))
    with torch.no_grad():
        right = model(input_ids=ids, use_cache=False).logits
        [forward, *_] = compile_layers(model)
        ours = [model(input_ids=ids, use_cache=False).logits for _ in range(2)]
    assert all(torch.equal(logits, right) for logits in ours)
    [reason] = forward.reasons.values()
    assert reason.startswith("compiled, it differs by 0.5")
    assert "is not compiled, and runs as it is" in capsys.readouterr().err


def counting(graph, inputs):
    GRAPHS.append(len(graph.graph.nodes))
    return graph.forward


GRAPHS = []


@pytest.fixture
def counted(monkeypatch):
    GRAPHS.clear()
    monkeypatch.setattr(compiled_layers, "COMPILER", counting)
    return GRAPHS


def test_one_graph_serves_all_layers_and_lengths(counted):
    model = write("llama")
    plain = copy.deepcopy(model)
    compile_layers(model, "--compile true", learns=True)
    for rows, length in ((2, 9), (3, 30), (4, 14), (2, 63)):
        ids = torch.randint(VOCAB, (rows, length))
        for ours, others in zip(gradients(model, ids), gradients(plain, ids), strict=True):
            assert torch.equal(ours, others)
    assert len(counted) == 1
    gradients(model, torch.randint(VOCAB, (1, 9)))
    gradients(model, torch.randint(VOCAB, (1, 31)))
    assert len(counted) == 2  # one row is a case of its own
    with torch.no_grad():  # what is not learned, or written token by token, runs as it is
        model.generate(torch.randint(3, VOCAB, (2, 5)), max_new_tokens=3)
    assert len(counted) == 2


def test_a_layer_is_compiled_inside_of_its_checkpoint(counted):
    """Backward computes it again, by the same graph, and nothing of its inside is kept."""
    model = write("llama")
    plain = copy.deepcopy(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    compile_layers(model, "--compile true", learns=True)
    ids = torch.randint(VOCAB, (2, 30))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x,
                                                  lambda x: x):
        ours = gradients(model, ids)
    for each, others in zip(ours, gradients(plain, ids), strict=True):
        assert torch.equal(each, others)
    assert len(counted) == 1
    assert (2, 30, 48) not in kept  # of the MLP's inside


def test_a_graph_keeps_no_weight_that_its_owner_takes_away(monkeypatch):
    """As ZeRO-3 does behind the forward pass of a layer."""
    monkeypatch.setattr(compiled_layers, "COMPILER", WITHOUT_CODE)
    model = write("llama")
    forward, _ = compile_layers(model, "--compile true", learns=True)
    forward.heard = []
    out = model(input_ids=torch.randint(VOCAB, (2, 24)), use_cache=False).logits
    del out
    [(args, kwargs)] = forward.heard
    owned = []
    for weight in forward.layer.parameters():
        weight.data = weight.data.clone()
        owned.append(StorageWeakRef(weight.untyped_storage()))
    out = forward.layer(*[arg.detach().requires_grad_() for arg in args], **kwargs)
    for weight in forward.layer.parameters():
        weight.data = torch.empty(0)
    assert out.requires_grad and all(storage.expired() for storage in owned)


def test_what_breaks_the_graph_or_is_too_large_runs_as_it_is(counted, monkeypatch, capsys):
    for reason in ("too many", "breaks"):
        model = write("llama")
        plain = copy.deepcopy(model)
        with monkeypatch.context() as patch:
            if reason == "too many":
                patch.setattr(compiled_layers, "MOST_OPERATIONS", 9)
            else:
                for layer in model.model.layers:
                    layer.self_attn.forward = torch.compiler.disable(layer.self_attn.forward)
            forwards = compile_layers(model, "--compile true", learns=True)
            ids = torch.randint(VOCAB, (2, 9))
            for ours, others in zip(gradients(model, ids), gradients(plain, ids), strict=True):
                assert torch.equal(ours, others)
        [(kind, why)] = forwards[0].reasons.items()
        assert kind.startswith("LlamaDecoderLayer")
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if "--compile" in line] == [
            f"distill.py: --compile true: {kind} is not compiled, and runs as it is ({why})"]
        torch._dynamo.reset()
    assert not counted


# --- whole jobs -----------------------------------------------------------------------------------

SAVING = ["--activation_checkpointing", "--activation_offload", "--mlp_tiles=2"]
JOBS = {  # name: (ranks, ZeRO stage, accumulation steps, flags)
    "plain": (1, 0, 2, ["--eval_rows=4"]),
    "checkpoints": (1, 2, 1, SAVING),
    "adapter": (1, 1, 1, ["--lora_r=4", "--activation_checkpointing"]),
    "writes": (1, 2, 1, ["--on_policy=0.5", "--rollout_tokens=8"]),
    "Ulysses, packed": (2, 2, 1, ["--sequence_parallel=2", "--pack"]),
    "ZeRO-3, checkpoints": (2, 3, 1, SAVING),
    "pipeline": (2, 1, 2, ["--pipeline_parallel=2"]),
}
TIMES = {"bubble", "slowest_stage", "fastest_stage"}  # of a pipeline


def run_both(jobs_of_ranks, folder):
    """Run each job with plain and with compiled layers; return {name: what the second one says}.

    Args:
        jobs_of_ranks: {name: command line}.
    """
    compiled_layers.COMPILER = WITHOUT_CODE
    texts = {}
    for name, argv in jobs_of_ranks.items():
        for value in ("false", "true"):
            codes, said = run_and_listen(
                [*argv, f"--compile={value}", f"--output_dir={folder / name / value}"])
            assert codes == [0], said
        texts[name] = said
        torch._dynamo.reset()
    return texts


def lines_of(jobs, models, texts, folder):
    lines = {}
    for name, (_, stage, steps, flags) in jobs.items():
        (folder / name).mkdir()
        lines[name] = [*short_run(models, texts, folder, *flags), "--steps=2", "--num_workers=0",
                       f"--ds_config={ds_config(folder / f'{name}.json', stage, 2, steps)}"]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_job_logs_what_it_logs_with_plain_layers(num_ranks, models, texts, tmp_path):
    jobs_of_ranks = {name: job for name, job in JOBS.items() if job[0] == num_ranks}
    lines = lines_of(jobs_of_ranks, models, texts, tmp_path)
    [said, *_] = ranks.run(num_ranks, run_both, lines, tmp_path)
    for name in jobs_of_ranks:
        assert "layers are compiled, which takes" in said[name], name
        assert "runs as it is" not in said[name], (name, said[name])
        plain, compiled = (losses_of(tmp_path / name / value) for value in ("false", "true"))
        for line in (*plain, *compiled):
            for key in TIMES & line.keys():
                del line[key]
        check_same_curve(plain, compiled, rel_tol=1e-6, abs_tol=1e-9, name=name)


def run_and_spoil(argv):
    """Run a job whose compiled layers give other gradients; return (exit codes, what it says)."""
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1.01 * gradient

    compiled_layers.COMPILER = lambda graph, inputs: lambda *args: tuple(
        map(Spoiled.apply, graph.forward(*args)))
    return run_and_listen(argv)


def test_layers_with_other_gradients_run_as_they_are(models, texts, tmp_path):
    flags = [*short_run(models, texts, tmp_path), "--steps=1", "--num_workers=0", "--compile=true"]
    [(codes, said)] = ranks.run(1, run_and_spoil, [*flags, f"--output_dir={tmp_path / 'run'}"])
    assert codes == [0]
    [line] = [line for line in said.splitlines() if "runs as it is" in line]
    assert "its output or gradient differs by 0.01, more than 0.001" in line


class OfLayout(NamedTuple):
    config: object


def test_what_cannot_be_compiled_is_refused_or_named(monkeypatch, capsys):
    monkeypatch.setattr(compiled, "missing_compiler", lambda: "there is no compiler")
    monkeypatch.setattr(compiled.dist, "get_rank", lambda: 0)
    plain = AutoConfig.for_model("llama")
    packed = AutoConfig.for_model("llama", quantization_config={"quant_method": "gptq"})
    no_list = write("llama")
    no_list.model.layers = no_list.model.layers[:1]
    cases = [(lambda cfg: compiled.check(cfg, OfLayout(packed)), "weights are quantized"),
             (lambda cfg: compiled.check(cfg, OfLayout(plain)), "there is no compiler, which"),
             (lambda cfg: compiled.change(no_list, cfg), "has no list of its 2 layers")]
    for function, reason in cases:
        cfg = Config(student="s", teacher="t", data="d", compile="true")
        with pytest.raises(ValueError, match=f"--compile true: .*{reason}"):
            function(cfg)
        cfg.compile = "auto"
        function(cfg)
        assert cfg.compile == "false"
        [line] = capsys.readouterr().err.splitlines()
        assert "--compile auto: " in line and reason in line and line.endswith("as they are")
