"""A sharded teacher gives what the whole one gives, and every rank holds no more than its shard."""

import functools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import ranks
from isogloss.config import Config
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.layout import teacher_groups
from isogloss.models import compiled_layers
from isogloss.models.pretrained import check_weights
from isogloss.teachers.engines import layers
from isogloss.teachers.engines.layers import check_compile
from isogloss.teachers.engines.offload import Offload
from isogloss.teachers.engines.replicas import join_ids, join_members
from isogloss.teachers.engines.whole import head_gives_own_logits, load_replicated
from isogloss.teachers.model import ModelSpec, resolve_engine
from isogloss.teachers.protocol import load_teacher

VOCAB = 90  # of the tokenizer; the heads have 100 rows
SPECIAL_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SHAPE = SPECIAL_TOKENS | dict(
    vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
EVEN = SHAPE | {"num_key_value_heads": 4}
GPT = SPECIAL_TOKENS | dict(vocab_size=100)
# What has a plan in transformers; test_plans.py has them all.
SHARDED = {
    "llama": SHAPE,
    "qwen2": SHAPE | {"tie_word_embeddings": True},
    "qwen3": SHAPE | {"head_dim": 32},
    "mistral": SHAPE | {"sliding_window": 8},
    "gemma2": SHAPE | {"head_dim": 32, "final_logit_softcapping": 2.0},
    "gemma3_text": SHAPE | {"head_dim": 32, "sliding_window": 8},
    "granite": SHAPE | {"logits_scaling": 3.0},
    "smollm3": SHAPE,
}
OTHERS = {
    "gpt2": GPT | {"n_embd": 128, "n_head": 4, "n_layer": 2},
    "gemma": EVEN | {"head_dim": 32},
    "phi": EVEN,
    "gpt_neox": EVEN,
    "phi3": EVEN,
    "cohere": EVEN | {"logit_scale": 0.3},
    "opt": EVEN | {"word_embed_proj_dim": 128, "ffn_dim": 64},
    "gpt_neo": GPT | {"hidden_size": 128, "num_heads": 4, "num_layers": 2,
                      "attention_types": [[["global", "local"], 1]]},
}
# Models that read images, too; of Llama 4 the text part alone is loaded.
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=16, patch_size=8)
MULTIMODAL = {
    "gemma3": {"text_config": EVEN | {"head_dim": 32, "sliding_window": 8},
               "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 99},
    "llama4": {"text_config": EVEN | {"head_dim": 32, "intermediate_size_mlp": 256,
                                      "num_local_experts": 2, "interleave_moe_layer_step": 2},
               "vision_config": VISION | {"vision_output_dim": 16, "projector_input_dim": 16,
                                          "projector_output_dim": 16}},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A directory for each architecture, with random weights, norms and biases included."""
    folder = tmp_path_factory.mktemp("teachers")
    for name, shape in (SHARDED | OTHERS | MULTIMODAL).items():
        save_checkpoint(folder, name, shape)
        if name in MULTIMODAL:
            check_weights("teacher", str(folder / name))
    return folder


def save_checkpoint(folder, name, shape):
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if "text_config" in shape else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(name.partition("@")[0], **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / name, max_shard_size="200KB")  # several files


def load(folder, name, engine, degree, **options):
    spec = ModelSpec(path=str(folder / name), vocab=VOCAB, engine=engine, device="cpu",
                     degree=degree, **{"dtype": "float32"} | options)
    return load_teacher(spec)


# --- sharded --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A teacher to load."""

    name: str
    engine: str
    degree: int


class Comparison(NamedTuple):
    """What a rank found: worst relative error, and the fraction of all parameters that it holds."""

    engine: str
    error: float
    parameter_fraction: float


def compare_all(folder, cases):
    start_distributed()
    silence_libraries()
    check_joined_members(folder)
    return [compare(folder, case) for case in cases]


@functools.cache
def whole_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def check_joined_members(folder):
    """See that one run serves all members, but for one much longer than the others."""
    rank = dist.get_rank()
    teacher = load(folder, "llama", "tensor_parallel", 4)
    runs = []
    run = teacher.runner.whole.forward
    teacher.runner.whole.forward = lambda ids, hidden: runs.append(ids.shape) or run(ids, hidden)
    hidden = teacher.hidden(torch.zeros(2, 1, 16 + rank, dtype=torch.long))  # ids and positions
    assert runs == [(2, 4, 19)]
    assert hidden.untyped_storage().nbytes() == hidden.nbytes  # those of the others are gone
    runs.clear()
    size = 20 if rank == 3 else 4  # would be half padding beside the others
    teacher.hidden(torch.zeros(2, size, dtype=torch.long))
    assert runs == [(6, 4), (2, 20)]


def compare(folder, case):
    """Return this rank's Comparison of a teacher with the whole model."""
    rank = dist.get_rank()
    whole = whole_model(folder / case.name)
    random_state = torch.get_rng_state()
    teacher = load(folder, *case)
    assert torch.equal(random_state, torch.get_rng_state())
    torch.manual_seed(rank)
    ids = torch.randint(VOCAB, (1 + rank % 2, 9 + rank))  # of another shape on every rank
    with torch.no_grad():
        outputs = whole(input_ids=ids, output_hidden_states=True)
    hidden = outputs.hidden_states[-1]
    logits = outputs.logits[..., :VOCAB]
    flat_logits = logits.flatten(0, 1)
    positions = torch.arange(ids.numel())
    errors = [
        relative_error(teacher.hidden(ids), hidden),
        relative_error(teacher.logits(ids)[..., :VOCAB], logits),
        relative_error(teacher.read(ids, "hidden", VOCAB)(positions), flat_logits),
        relative_error(teacher.read(ids, "logits", VOCAB)(positions), flat_logits),
    ]
    top_k = teacher.read(ids, "topk", VOCAB)(positions)
    errors.append(relative_error(top_k.softmax(-1)[:, :VOCAB], flat_logits.softmax(-1)))
    if teacher.engine == "replicated":
        assert head_gives_own_logits(teacher.read(ids), logits)
        assert not head_gives_own_logits(teacher.read(ids), logits * 1.01)
    elif not whole.config.tie_word_embeddings:
        check_one_head_per_node(teacher)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    return Comparison(teacher.engine, max(errors), teacher.num_parameters / num_parameters)


def relative_error(tensor, expected):
    return float((tensor - expected).norm() / expected.norm())


def check_one_head_per_node(teacher):
    """See that what one rank writes into the head, all ranks of the node read."""
    weight = teacher.head.weight_VH
    dist.barrier()
    if dist.get_rank() == 1:
        weight[0, 0] = 7.5
    dist.barrier()
    assert weight[0, 0] == 7.5


# The largest fraction of the parameters that a rank may hold: ZeRO-3 splits all of them over the
# four ranks.  Of what is cut by a plan see test_plans.py.
LARGEST_FRACTION = {"replicated": 1, "zero3": 0.26, "tensor_parallel": 0.56}
# with two groups of two ranks
IN_TWO_GROUPS = {"tensor_parallel": ("llama", "gemma3", "llama4"),
                 "zero3": ("gpt2", "gpt_neo", "opt")}


@pytest.mark.slow
def test_a_sharded_teacher_is_the_whole_teacher(checkpoints):
    """Parameters per rank must shrink, because what is not sharded gives the right logits too."""
    expected_engine = {Case("llama", "auto", 1): "replicated"}
    for name in OTHERS | MULTIMODAL:
        expected_engine[Case(name, "auto", 1)] = "replicated"
    for name in ("gpt_neox", "gemma3"):
        expected_engine[Case(name, "zero3", 2)] = "zero3"
    for engine, names in IN_TWO_GROUPS.items():
        for name in names:
            expected_engine[Case(name, "auto", 2)] = engine
    for name in SHARDED | OTHERS | MULTIMODAL:
        config = AutoConfig.from_pretrained(checkpoints / name)
        by_zero = name in ("cohere", *IN_TWO_GROUPS["zero3"])
        engine = "zero3" if by_zero else "tensor_parallel"
        assert resolve_engine("auto", 2, config) == engine, name
        assert by_zero or resolve_engine("transformers", 4, config) == engine, name
        assert resolve_engine("tensor_parallel", 1, config) == "replicated", name
    cases = list(expected_engine)
    for comparisons in ranks.run(4, compare_all, checkpoints, cases):
        for case, comparison in zip(cases, comparisons, strict=True):
            assert comparison.engine == expected_engine[case], case
            assert comparison.error < 1e-4, (case, comparison)
            largest = LARGEST_FRACTION[comparison.engine]
            assert comparison.parameter_fraction <= largest, (case, comparison)


# --- offloaded ------------------------------------------------------------------------------------

OFFLOADED = [
    Case("qwen2", "replicated", 1),
    Case("llama", "tensor_parallel", 2),
    Case("phi3", "zero3", 1),
]


def compare_offloaded(folder):
    """Compare teachers whose weights are in the host's memory with those that stay."""
    start_distributed()
    silence_libraries()
    ids = torch.arange(12).view(2, 6)
    positions = torch.arange(12)
    for case in OFFLOADED:
        stays = load(folder, *case)
        offloaded = load(folder, *case, offload=True)
        for output in ("hidden", "logits", "topk"):
            with offloaded.on_device():
                logits = offloaded.read(ids, output)
            expected = stays.read(ids, output)
            assert torch.equal(logits(positions), expected(positions)), (case, output)
        if case.engine == "tensor_parallel":
            parameters = offloaded.runner.whole.parameters()
            for parameter, (_, copy) in zip(parameters, offloaded.offload.host_copies, strict=True):
                shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                assert shard.data_ptr() == copy.data_ptr()


@pytest.mark.slow
def test_offloaded_teachers_give_the_same_logits(checkpoints):
    ranks.run(2, compare_offloaded, checkpoints)


def test_offloaded_weights_leave_the_host_only_while_in_use():
    layer = torch.nn.Linear(3, 3)
    offload = Offload(list(layer.parameters()), "cpu")
    host = [copy.data_ptr() for _, copy in offload.host_copies]

    def addresses():
        return [parameter.data_ptr() for parameter in layer.parameters()]

    assert addresses() == host
    with offload.on_device():
        with offload.on_device():
            pass
        assert all(address != other for address, other in zip(addresses(), host, strict=True))
    assert addresses() == host


# --- on which ranks -------------------------------------------------------------------------------


def test_padding_begins_no_document():
    """Where ids of members are joined, positions go on to the end of every row."""
    ids = torch.arange(1, 11)
    short = torch.stack([ids[:6].view(2, 3), torch.tensor([[0, 1, 2], [0, 0, 1]])])
    long = torch.stack([ids[6:][None], torch.arange(4)[None]])
    joined = join_ids([short, long])
    assert joined[0].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 10]]
    assert joined[1].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert join_ids([short]) is short


def test_members_are_joined_within_bounds():
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(1, 200, (300, 2), generator=generator)
    shapes[:, 0] %= 4
    shapes = (shapes + torch.tensor([1, 0])).tolist()
    groups = join_members(shapes, 1500)
    assert sorted(member for group in groups for member in group) == list(range(300))
    assert max(map(len, groups)) > 5
    for group in groups:
        positions = sum(shapes[member][0] * shapes[member][1] for member in group)
        run = sum(shapes[member][0] for member in group) * max(
            shapes[member][1] for member in group)
        assert len(group) == 1 or run <= min(1500, 1.25 * positions)
    assert join_members(shapes[:3], 0) == [[member] for member in sorted(
        range(3), key=lambda member: shapes[member][1])]


@pytest.mark.parametrize("world, node, degree, message", [
    (4, 4, 3, "use one of 1, 2, 4"),
    (4, 2, 4, "use one of 1, 2"),
    (6, 4, 2, "nodes of 4"),
])
def test_no_teacher_leaves_a_node_and_groups_that_do_not_fit_are_rejected(
        world, node, degree, message):
    assert teacher_groups(8, 4, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match=message):
        teacher_groups(world, node, degree)


LLAMA = AutoConfig.for_model("llama")
GPT2 = AutoConfig.for_model("gpt2")
COHERE = AutoConfig.for_model("cohere")
MAMBAS = AutoConfig.for_model("nemotron_h", layers_block_type=["mamba"] * 30, vocab_size=1000)
QUANTIZED = AutoConfig.for_model(
    "llama", quantization_config={"quant_method": "fp8", "fmt": "e4m3"})


@pytest.mark.parametrize("engine, degree, config, message", [
    ("tensor_parallel", 2, GPT2, "transformers has no plan to shard gpt2 models; use auto or"),
    ("transformers", 2, COHERE, "no test has compared cohere models, cut by the plan of transf"),
    ("tensor_parallel", 2, MAMBAS, "transformers has for nemotron_h models leaves 100%"),
    ("replicated", 2, LLAMA, "a whole copy per rank is degree 1"),
    ("auto", 2, QUANTIZED,
     r"--teacher_tp 2 with --teacher_engine auto: its weights are quantized \(fp8\)"),
    ("zero3", 1, QUANTIZED, "and only a whole copy on every rank is"),
    ("tensor_parallel", 2, QUANTIZED, "use --teacher_tp 1 and auto"),
])
def test_engines_that_cannot_shard_a_model_are_rejected(engine, degree, config, message):
    with pytest.raises(ValueError, match=message):
        resolve_engine(engine, degree, config)


def test_models_without_heads_or_of_their_own_code_are_left_to_zero3():
    own_code = AutoConfig.for_model("llama")
    own_code.auto_map = {"AutoModelForCausalLM": "modeling.Own"}
    assert resolve_engine("auto", 2, own_code) == "tensor_parallel"
    assert resolve_engine("auto", 2, own_code, trust_remote_code=True) == "zero3"
    for name in ("mamba2", "rwkv", "falcon_h1"):
        assert resolve_engine("auto", 2, AutoConfig.for_model(name)) == "zero3", name


def test_quantized_weights_stay_whole_and_an_adapter_is_sharded_by_zero3_alone():
    assert resolve_engine("auto", 1, QUANTIZED) == "replicated"
    assert resolve_engine("auto", 1, LLAMA, is_adapter=True) == "replicated"
    assert resolve_engine("auto", 2, LLAMA, is_adapter=True) == "zero3"
    with pytest.raises(ValueError, match="reads shards of files, and an adapter is none"):
        resolve_engine("tensor_parallel", 2, LLAMA, is_adapter=True)


# --- compiled -------------------------------------------------------------------------------------


def counting_compiler(monkeypatch):
    """Let the graphs of compiled layers run as they are; return the list that they are put in."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    monkeypatch.setattr(compiled_layers, "COMPILER", compiler)
    return graphs


def test_a_compiled_teacher_gives_the_same_logits(tmp_path, monkeypatch):
    """Whatever the length, packed or not, in windows or not; no length is compiled anew."""
    graphs = counting_compiler(monkeypatch)
    save_checkpoint(tmp_path, "gemma3_text", SHARDED["gemma3_text"])
    torch.manual_seed(1)
    plain, compiled = (
        load_replicated(ModelSpec(path=str(tmp_path / "gemma3_text"), vocab=VOCAB,
                                  dtype="float32", compile=compile))
        for compile in ("false", "true"))
    packed_positions = torch.cat([torch.arange(9), torch.arange(6)])[None]
    ids = torch.randint(VOCAB, (1, 15))
    for given in (ids, torch.stack([ids, packed_positions]), torch.randint(VOCAB, (2, 61))):
        positions = torch.arange(given.shape[-2:].numel())
        for output in ("hidden", "logits"):
            logits = compiled.read(given, output)(positions)
            expected = plain.read(given, output)(positions)
            assert logits.shape == expected.shape
            assert torch.allclose(logits, expected, atol=2e-6), (given.shape, output)
    count = len(graphs)
    for length in range(20, 60, 7):
        compiled.read(torch.randint(VOCAB, (2, length)))
    assert len(graphs) == count > 0
    torch._dynamo.reset()


def compare_compiled(folder, cases):
    """Return the graphs of each case, whose logits are those of the whole model."""
    start_distributed()
    silence_libraries()
    graphs_of_cases = []
    for case in cases:
        with pytest.MonkeyPatch.context() as monkeypatch:
            graphs = counting_compiler(monkeypatch)
            teacher = load(folder, *case, compile="true")
        whole = whole_model(folder / case.name)
        for rows, length in ((2, 9), (4, 30), (3, 14), (2, 63)):
            ids = torch.randint(VOCAB, (rows, length))
            with torch.no_grad():
                assert relative_error(teacher.logits(ids), whole(ids).logits) < 1e-4, case
        graphs_of_cases.append(graphs)
        torch._dynamo.reset()
    return graphs_of_cases


@pytest.mark.parametrize("names", [["llama"], pytest.param(["gemma3_text", "phi3"],
                                                           marks=pytest.mark.slow)])
def test_a_layer_of_a_compiled_shard_is_one_graph_with_two_sums_over_ranks(tmp_path, names):
    cases = [Case(name, "tensor_parallel", 2) for name in names]
    biased = {"attention_bias": True, "mlp_bias": True}  # of Llama, which others do not know
    for name in names:
        save_checkpoint(tmp_path, name, (SHARDED | OTHERS)[name] | biased)
    for graphs_of_cases in ranks.run(2, compare_compiled, tmp_path, cases):
        for case, graphs in zip(cases, graphs_of_cases, strict=True):
            [graph] = graphs  # all layers and all lengths share it
            assert sum("all_reduce" in target for target in graph) == 2, case


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    config = AutoConfig.for_model("llama")
    check_compile("tensor_parallel", config)
    with pytest.raises(ValueError, match="not with --teacher_engine zero3"):
        check_compile("zero3", config)
    monkeypatch.setattr(layers, "missing_compiler", lambda: "there is no compiler")
    with pytest.raises(ValueError, match=r"there is no compiler, which torch\.compile needs"):
        check_compile("replicated", config)
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"quantized \(gptq\)"):
        check_compile("replicated", config)
    flags = dict(student="s", teacher="t", data="d", teacher_compile=True)
    with pytest.raises(ValueError, match="has no forward pass"):
        Config(**flags | {"teacher": "", "teacher_cache": "c"})
