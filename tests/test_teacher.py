"""A sharded teacher is the whole teacher: hidden states, logits, and what every rank holds of it."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist

import distill
from isogloss import teachers as teacher
from isogloss.layout import teacher_groups

VOCAB = 90  # of the tokenizer; the heads have 100 rows
SHAPE = dict(vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
             bos_token_id=1, eos_token_id=2)
GPT = dict(vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SHARDED = {
    "llama": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 8}, "gemma2": {"head_dim": 32, "final_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8},
    "granite": {"logits_scaling": 3.0}, "smollm3": {}, "gpt_neox": {}}
EVEN = SHAPE | {"num_key_value_heads": 4}
OTHERS = {
    "phi3": EVEN, "olmo2": EVEN, "gpt2": GPT | {"n_embd": 128, "n_head": 4, "n_layer": 2},
    "gpt_neo": GPT | {"hidden_size": 128, "num_heads": 4, "num_layers": 2,
                      "attention_types": [[["global", "local"], 1]]},
    "qwen3_moe": EVEN | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
                          "moe_intermediate_size": 64}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A directory for each architecture, with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("teachers")
    for name, how in (SHARDED | OTHERS).items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **(SHAPE | how if name in SHARDED else how))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))
        model.save_pretrained(folder / name, max_shard_size="200KB")  # several files
    return folder


def compare(folder, name, engine, degree):
    """(name, engine, worst relative error, share of the parameters) of one teacher on this rank."""
    from transformers import AutoModelForCausalLM

    rank = dist.get_rank()
    whole = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    before = torch.get_rng_state()
    found = teacher.load_teacher(str(folder / name), VOCAB, "float32", "cpu", engine, degree)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(rank)
    ids = torch.randint(VOCAB, (1 + rank % 2, 9 + rank))  # of another shape on every rank
    with torch.no_grad():
        hidden, logits = whole.base_model(input_ids=ids)[0], whole(input_ids=ids).logits[..., :VOCAB]
    rows = torch.arange(ids.numel())
    pairs = [(found.hidden(ids), hidden), (found.logits(ids)[..., :VOCAB], logits)]
    pairs += [(found.rows(ids, signal, VOCAB)(rows), logits.flatten(0, 1)) for signal in ("hidden", "logits")]
    spread = found.rows(ids, "topk", VOCAB)(rows)
    pairs.append((spread.softmax(-1), logits.flatten(0, 1).softmax(-1)))
    worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    weight = found.head.weight_VH
    if found.engine != "replicated" and not whole.config.tie_word_embeddings:  # a node holds its head once
        dist.barrier()
        if rank == 1:
            weight[0, 0] = 7.5
        dist.barrier()
        assert weight[0, 0] == 7.5
    return name, found.engine, worst, found.parameters / sum(p.numel() for p in whole.parameters())


def offloaded(folder):
    """Teachers that sleep in the host's memory say what the others say."""
    distill.start_distributed()
    distill.silence_libraries()
    ids = torch.arange(12).view(2, 6)
    for name, *how in (("qwen2", "replicated", 1), ("llama", "tensor_parallel", 2), ("phi3", "zero3", 1)):
        plain, asleep = [teacher.load_teacher(str(folder / name), VOCAB, "float32", "cpu", *how, offload)
                         for offload in (False, True)]
        rows = torch.arange(12)
        for signal in teacher.SIGNALS:
            with asleep.awake():
                found = asleep.rows(ids, signal)
            assert torch.equal(found(rows), plain.rows(ids, signal)(rows)), (name, signal)


def test_offloaded_teachers(checkpoints):
    ranks.run(2, offloaded, checkpoints)


def test_weights_are_at_home_but_while_awake():
    layer = torch.nn.Linear(3, 3)
    offload = teacher.Offload(layer, "cpu")
    home = [x.data_ptr() for _, x in offload.home]
    assert [p.data_ptr() for p in layer.parameters()] == home
    with offload.awake():
        with offload.awake():
            pass
        assert all(p.data_ptr() != at for p, at in zip(layer.parameters(), home))
    assert [p.data_ptr() for p in layer.parameters()] == home


def compare_all(folder, cases):
    distill.start_distributed()
    distill.silence_libraries()
    return [compare(folder, *case) for case in cases]


def test_a_sharded_teacher_is_the_whole_teacher(checkpoints):
    """Tensor parallelism 2 and 4 on four ranks; parameters per rank must shrink, for whatever is not sharded
    gives right logits too."""
    cases = [(name, "auto", degree) for degree in (2, 4) for name in SHARDED]
    cases += [(name, "auto", 2) for name in OTHERS] + [("llama", "auto", 1), ("gpt_neo", "replicated", 1)]
    planned = "phi3", "olmo2", "qwen3_moe"
    cases += [(name, "auto", 4) for name in planned]
    for found in ranks.run(4, compare_all, checkpoints, cases):
        for (name, _, degree), (_, engine, worst, share) in zip(cases, found):
            assert worst < 1e-4, (name, engine, degree, worst)
            expected = "tensor_parallel" if name in SHARDED else "zero3" if degree < 4 else "transformers"
            assert engine == (expected if degree > 1 else "replicated")
            most = 1 if degree == 1 else 0.26 if engine == "zero3" else {2: 0.56, 4: 0.45}[degree]
            assert share <= most, (name, engine, degree, share)


def groups_of_a_forward(folder):
    """Ranks of every group that loading and asking a teacher has used, on nodes of two ranks."""
    os.environ["LOCAL_SIZE"] = "2"
    distill.start_distributed()
    distill.silence_libraries()
    used = set()
    for name in ("all_reduce", "broadcast", "all_gather", "broadcast_object_list", "all_gather_into_tensor"):
        def spy(*args, function=getattr(dist, name), **how):
            group = how.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
            used.add(tuple(dist.get_process_group_ranks(group or dist.group.WORLD)))
            return function(*args, **how)

        setattr(dist, name, spy)
    found = teacher.load_teacher(str(folder / "llama"), VOCAB, "float32", "cpu", "auto", 2)
    used.clear()  # what it was loaded with: DeepSpeed makes all random states equal
    for signal in teacher.SIGNALS:
        found.rows(torch.arange(12).view(2, 6), signal)
    return used


def test_no_teacher_tensor_leaves_a_node(checkpoints):
    found = ranks.run(4, groups_of_a_forward, checkpoints)
    assert found == [{(0, 1)}, {(0, 1)}, {(2, 3)}, {(2, 3)}]


def test_groups_are_neighbors_on_a_node():
    assert teacher_groups(8, 4, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert teacher_groups(4, 2, 1) == [[0], [1], [2], [3]]
    for world, node, degree, words in ((4, 4, 3, "use one of 1, 2, 4"), (4, 2, 4, "use one of 1, 2"),
                                       (6, 4, 2, "nodes of 4")):
        with pytest.raises(ValueError, match=words):
            teacher_groups(world, node, degree)


def test_engines_that_cannot_hold_a_model_are_refused():
    from transformers import AutoConfig

    gpt2, llama = AutoConfig.for_model("gpt2"), AutoConfig.for_model("llama")
    for words, *how in (("does not shard gpt2 models", "tensor_parallel", 2, gpt2, 2),
                        ("a whole copy per rank is degree 1", "replicated", 2, llama, 2),
                        ("has no plan to shard gpt2 models", "transformers", 2, gpt2, 2),
                        ("has no plan to shard llama models of 32 key", "transformers", 3, llama, 3),
                        ("takes all of the 4 ranks that hold teachers", "transformers", 2, llama, 4)):
        with pytest.raises(ValueError, match=words):
            teacher.choose_engine(*how)
