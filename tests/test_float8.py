"""Layers in 8 bits compute what the type's definition says; a teacher with them is compared."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import jobs
import ranks
from isogloss import cache
from isogloss.command import CacheArgs
from isogloss.config import Config
from isogloss.data.batch_types import Example
from isogloss.data.chat import first_ids
from isogloss.data.texts import MOST_CHARACTERS
from isogloss.flags.parse import parse_flags
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.watch import end_together
from isogloss.models import float8
from isogloss.models.float8 import FLOAT8, Float8Linear, rounded, use_float8
from isogloss.teachers import cache_files
from isogloss.teachers.engines import layers
from isogloss.teachers.engines.whole import load_replicated
from isogloss.teachers.model import ModelSpec, checked_engine
from isogloss.teachers.protocol import load_teacher
from test_teacher import SHAPE, VOCAB, save_checkpoint


def mean_kl(logits_NV, other_NV):
    p, q = logits_NV.double().softmax(-1), other_NV.double().softmax(-1)
    return float((p * (p / q).log()).sum()) / len(p)


PROBE = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(5)).tolist()


def numbers_of_e4m3():
    """All finite numbers with 4 bits of exponent and 3 of mantissa: S.1111.111 is NaN."""
    numbers = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 0:
                numbers.append(mantissa / 8 * 2.0**-6)
            elif (exponent, mantissa) != (15, 7):
                numbers.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(sorted({sign * number for number in numbers for sign in (-1, 1)}),
                        dtype=torch.float64)


NUMBERS = numbers_of_e4m3()


def nearest(x_NI):
    """Return x in float64 as each row's scale x the nearest number of the type, of two the even."""
    scale_N1 = x_NI.abs().amax(-1, keepdim=True).float() / 448
    distance = (x_NI.float() / scale_N1).double()[..., None].sub(NUMBERS).abs()
    is_odd = torch.arange(len(NUMBERS)).sub(NUMBERS.eq(0).nonzero().item()) % 2
    return NUMBERS[(distance * (1 + 1e-9 * is_odd.double())).argmin(-1)] * scale_N1


def random_rows(num_rows, num_inputs):
    """Rows of sizes that differ by orders of magnitude, an outlier in one of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    x = x * 10.0 ** torch.arange(num_rows).sub(num_rows // 2)[:, None]
    x[1, 3] *= 100
    return x.bfloat16()


def test_the_numbers_are_those_of_the_type():
    assert NUMBERS.max() == 448 and len(NUMBERS) == 253
    assert torch.equal(NUMBERS, NUMBERS.to(FLOAT8).double())


def test_a_row_is_its_scale_times_the_nearest_numbers():
    x = random_rows(7, 64)
    numbers, scale = rounded(x)
    assert numbers.dtype == FLOAT8 and scale.dtype == torch.float32
    assert torch.allclose(numbers.double() * scale, nearest(x), rtol=1e-6, atol=0)
    zeros, scale = rounded(torch.zeros(2, 16))
    assert not zeros.float().any() and scale.isfinite().all()
    assert rounded(torch.full((1, 16), float("nan")))[0].float().isnan().all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_rounded_rows_by_rounded_rows(bias):
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=bias).bfloat16()
    x = random_rows(6, 64)
    expected = nearest(x) @ nearest(linear.weight.detach()).T
    if bias:
        expected += linear.bias.double()
    layer = Float8Linear(linear)
    output = layer(x.view(2, 3, 64))
    assert output.shape == (2, 3, 32) and output.dtype == torch.bfloat16
    error = (output.flatten(0, 1).double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 2**-8  # a rounding to bfloat16
    assert sum(tensor.nbytes for tensor in layer.state_dict().values()) <= 64 * 32 + 32 * (4 + 2)


def test_some_layers_stay_as_they_are():
    model = nn.ModuleDict({
        "inner": nn.Sequential(nn.Linear(32, 16), nn.ReLU()), "router": nn.Linear(32, 16),
        "odd": nn.Linear(32, 1), "empty": nn.Linear(16, 16), "embedding": nn.Embedding(16, 32)})
    model["empty"].weight.data = torch.zeros(16, 0)
    use_float8(model, [model["router"]])
    changed = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    assert changed == ["inner.0"]


# --- teachers -------------------------------------------------------------------------------------


def spec_of(path, **options):
    return ModelSpec(path=str(path), vocab=VOCAB, device="cpu", **{"dtype": "fp8"} | options)


@pytest.fixture
def checkpoint(tmp_path):
    save_checkpoint(tmp_path, "llama", SHAPE | {"num_hidden_layers": 3})
    return tmp_path / "llama"


def by_hand(path):
    """Return the model in bfloat16 whose linear layers read and hold the nearest numbers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            weight = nearest(module.weight.data)
            module.forward = lambda x, weight=weight: (nearest(x) @ weight.T).bfloat16()
    return model


def test_a_teacher_in_8_bits_is_the_model_with_rounded_layers(checkpoint, monkeypatch, capfd):
    exact_linears = []  # that are left when a layer begins to read
    forward = LlamaDecoderLayer.forward

    def counting(layer, *args, **options):
        exact_linears.append(sum(type(other) is nn.Linear for other in layer.modules()))
        return forward(layer, *args, **options)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counting)
    teacher = load_replicated(spec_of(checkpoint, probe=PROBE))
    assert exact_linears == [7, 7, 7, 0, 0, 0]  # all layers read exactly, then rounded
    exact = load_replicated(spec_of(checkpoint, dtype="bfloat16"))
    nats = mean_kl(*[model.logits(torch.tensor([PROBE]))[0, :, :VOCAB]
                     for model in (exact, teacher)])
    said = re.search(r"differ from those in bfloat16 by (\S+) nats", capfd.readouterr().err)[1]
    assert float(said) == pytest.approx(nats, rel=0.05)
    sizes = [sum(weight.nbytes for weight in model.weights().values())
             for model in (exact, teacher)]
    assert sizes[0] - sizes[1] == 3 * 128 * (128 + 2 * 64 + 128 + 3 * 256)  # a byte a weight
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        hidden = by_hand(checkpoint).model(ids)[0]

    def error(other):
        return float((other.hidden(ids) - hidden).norm() / hidden.norm())

    assert error(teacher) < 0.05 * error(exact)


def test_a_teacher_that_loses_too_much_ends_the_run(checkpoint, monkeypatch):
    monkeypatch.setattr(layers, "MOST_NATS", 1e-9)
    with pytest.raises(ValueError, match=r"by \S+ nats a token \(21 layers, 60 tokens\), and up "
                                         r"to 1e-09 may be; use --teacher_dtype bfloat16"):
        load_replicated(spec_of(checkpoint, probe=PROBE))
    monkeypatch.setattr(layers, "MOST_NATS", 1.0)
    monkeypatch.setattr(layers, "forward_kl", lambda *_: (float("nan"), 1))
    with pytest.raises(ValueError, match="by nan nats"):
        load_replicated(spec_of(checkpoint, probe=PROBE))


def test_what_cannot_be_in_8_bits_is_refused(tmp_path, monkeypatch):
    config = AutoConfig.for_model("llama")
    flags = dict(student="s", teacher="t", data="d", teacher_dtype="fp8")
    for engine in ("zero3", "transformers"):
        cfg = Config(**flags, teacher_engine=engine, teacher_tp=2)
        with pytest.raises(ValueError, match=f"fp8: not with --teacher_engine {engine}"):
            checked_engine(cfg, config, 2, 2)
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"quantized already \(gptq\)"):
        checked_engine(Config(**flags), config, 1, 1)
    with pytest.raises(ValueError, match="rounded once"):
        Config(**flags | {"teacher": "self"}, teacher_ema=0.5)
    save_checkpoint(tmp_path, "gpt2", dict(vocab_size=100, n_embd=32, n_head=2, n_layer=1))
    with pytest.raises(ValueError, match="has no linear layers that can be rounded"):
        load_replicated(spec_of(tmp_path / "gpt2", probe=PROBE))


def test_a_device_without_such_kernels_is_refused(checkpoint, monkeypatch):
    def multiply(*_):
        raise RuntimeError("needs 8.9 or more\nat file.cpp")

    monkeypatch.setattr(float8, "multiply", multiply)
    monkeypatch.setattr(ModelSpec, "_resolved", lambda spec: "replicated")
    with pytest.raises(ValueError, match=re.escape("cpu does not multiply such numbers (needs 8.9 "
                                                   "or more); use bfloat16")):
        spec_of(checkpoint, probe=PROBE).load()


def shards(path):
    """Compare a teacher over two ranks in 8 bits with the exact one, and with a compiled one."""
    start_distributed()
    silence_libraries()
    ids = torch.tensor([PROBE, PROBE[::-1]])
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(layers, "COMPILER", "eager")
        options = dict(engine="tensor_parallel", degree=2, probe=PROBE)
        exact, teacher, compiled, offloaded = [
            load_teacher(spec_of(path, **options | more)) for more in (
                {"dtype": "bfloat16"}, {}, {"compile": True}, {"compile": True, "offload": True})]
    assert torch.equal(offloaded.hidden(ids), teacher.hidden(ids))
    assert torch.equal(compiled.hidden(ids), teacher.hidden(ids))
    logits = [model.logits(ids).flatten(0, 1)[:, :VOCAB] for model in (exact, teacher)]
    sizes = [sum(weight.nbytes for weight in model.runner.whole.model.model.layers.parameters())
             for model in (exact, teacher)]
    return mean_kl(*logits), sizes[1] / sizes[0]


def test_a_sharded_teacher_in_8_bits_has_half_the_size(checkpoint):
    whole = [load_replicated(spec_of(checkpoint, probe=PROBE, dtype=dtype))
             for dtype in ("bfloat16", "fp8")]
    ids = torch.tensor([PROBE, PROBE[::-1]])
    expected = mean_kl(*[model.logits(ids).flatten(0, 1)[:, :VOCAB] for model in whole])
    for nats, size in ranks.run(2, shards, checkpoint):
        assert 0.3 * expected < nats < 3 * expected  # shards have scales of their own
        assert 0.5 < size < 0.51  # norms are whole


def test_the_probe_is_the_first_text_that_a_teacher_reads(encoders):
    _, encoder = encoders
    texts = ["The first row.", "A second row, which is longer."]
    ids = [encoder.encode([text])[0].tolist() for text in texts]
    examples = [Example(None), *map(Example, texts)]
    assert first_ids(examples, encoder)[-len(ids[0] + ids[1]):] == ids[0] + ids[1]
    assert first_ids(examples[1:], encoder, count=len(ids[0])) == ids[0]
    long = Example("a" * (MOST_CHARACTERS + 1))  # no tokenizer takes it
    assert first_ids([long, *examples[1:]], replace(encoder, max_length=5)) == ids[0][:5]


def write_cache(argv):
    device = start_distributed()
    with end_together():
        cache.run(parse_flags(CacheArgs, argv), device)


@pytest.mark.slow
def test_a_run_says_before_its_first_step_what_8_bits_change(models, texts, tmp_path):
    """Packed or not, on ranks for teachers or not, alone or one of several, and in a cache."""
    mean = [{"model": str(models[1]), "dtype": dtype, "name": dtype}
            for dtype in ("fp8", "bfloat16")]
    argv = jobs.short_run(models, texts, tmp_path, "--steps=2", "--num_workers=0")
    lines = [[*argv, f"--output_dir={tmp_path / name}", *flags] for name, flags in {
        "pack": ["--teacher_dtype=fp8", "--pack"],
        "mean": [f"--teachers={json.dumps(mean)}", "--teacher_weights=mean_p"],
        "ranks": ["--teacher_dtype=fp8", "--teacher_ranks=1"]}.items()]
    del lines[1][1]  # --teacher
    (codes, said), (_, said_by_other) = ranks.run(2, jobs.run_and_listen, *lines[:2])
    assert codes == [0, 0], said
    (codes, said_apart), (_, said_by_teacher) = ranks.run(2, jobs.run_and_listen, lines[2])
    assert codes == [0], said_apart
    comparison = r"in fp8 its predictions differ from those in bfloat16 by \S+ nats a token"
    for text, count in ((said, 2), (said_by_other, 0), (said_apart, 0), (said_by_teacher, 1)):
        assert len(re.findall(comparison, text)) == count
    ranks.run(1, write_cache, [f"--teacher={models[1]}", argv[3], f"--output={tmp_path / 'cache'}",
                               "--hidden", "--teacher_dtype=fp8"])
    manifest = json.loads((tmp_path / "cache" / cache_files.MANIFEST).read_text())
    assert manifest["dtype"] == "fp8"
