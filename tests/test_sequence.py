"""ulysses.py: attention over shards is attention.  activations.py: what layers keep."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
from isogloss.job import sequence_group
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.sequence_group import join_sequence_group, sequence_shard
from isogloss.models import activations
from isogloss.student import ulysses
from isogloss.student.ulysses import check_sequence_layout

SHAPE = dict(vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=128,
             pad_token_id=0, head_dim=8)
MODELS = {  # what differs from SHAPE; None: left out
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 9},
    "phi3": {"head_dim": None},
    "olmo2": {},
    "smollm3": {},
    "granite": {},
}
DOCUMENTS = 11, 1, 7, 5  # positions of each, 24 in all


def tiny_llama():
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))


def positions_of(sizes):
    """Positions of one row that packs documents of these sizes."""
    return torch.cat([torch.arange(size) for size in sizes])


# --- attention ------------------------------------------------------------------------------------


def two_samples(kind):
    """Make (ids, positions, documents as (sample, first, end)) of two samples of 24 positions."""
    torch.manual_seed(1)
    ids = torch.randint(1, 60, (2, 24))
    if kind == "whole":
        return ids, torch.arange(24).expand(2, 24), [(0, 0, 24), (1, 0, 24)]
    if kind == "packed":
        positions = []
        documents = []
        for sample, sizes in enumerate((DOCUMENTS, DOCUMENTS[::-1])):
            positions.append(positions_of(sizes))
            ends = torch.tensor(sizes).cumsum(0).tolist()
            for size, end in zip(sizes, ends):
                documents.append((sample, end - size, end))
        return ids, torch.stack(positions), documents
    positions = torch.zeros(2, 24, dtype=torch.long)
    positions[0] = torch.arange(24)
    positions[1, 9:] = torch.arange(15)  # the second sample has nine pads on its left
    return ids, positions, [(0, 0, 24), (1, 9, 24)]


def worst_errors_of_shards(kinds):
    """{(model, kind): worst difference, in logits and gradient, from documents one at a time}."""
    start_distributed()
    silence_libraries()
    group = join_sequence_group(dist.get_world_size())
    worst = {}
    for name, changes in MODELS.items():
        shape = {key: value for key, value in (SHAPE | changes).items() if value is not None}
        config = AutoConfig.for_model(name, **shape)
        ulysses.register_attention(config, group)
        torch.manual_seed(0)
        whole = AutoModelForCausalLM.from_config(copy.deepcopy(config),
                                                 attn_implementation="eager")
        sharded = AutoModelForCausalLM.from_config(config, attn_implementation=ulysses.ATTENTION)
        sharded.load_state_dict(whole.state_dict())
        for kind in kinds:
            if kind == "given":
                worst[name, kind] = error_with_documents(sharded, group)
            else:
                worst[name, kind] = worst_error(whole, sharded, group, kind)
    return worst


def shard_of(group):
    """Return the positions of this rank, of the 24 of two_samples."""
    length = 24 // group.size
    return slice(group.rank * length, (group.rank + 1) * length)


def worst_error(whole, sharded, group, kind):
    """Compare this rank's shard of the logits, and the gradients summed over ranks."""
    ids, positions, documents = two_samples(kind)
    shard = shard_of(group)
    logits = sharded(input_ids=ids[:, shard], position_ids=positions[:, shard],
                     use_cache=False).logits
    expected = torch.zeros(*ids.shape, logits.shape[-1])
    is_text = torch.zeros(ids.shape, dtype=torch.bool)  # padding may hold anything
    for sample, first, end in documents:
        document = ids[sample : sample + 1, first:end]
        expected[sample, first:end] = whole(input_ids=document, use_cache=False).logits[0]
        is_text[sample, first:end] = True
    worst = float((logits - expected[:, shard])[is_text[:, shard]].abs().max())

    # Each rank's loss is about its own shard; the sum over ranks is the loss of the whole.
    whole.zero_grad()
    sharded.zero_grad()
    (expected[is_text] ** 2).sum().backward()
    (logits[is_text[:, shard]] ** 2).sum().backward()
    for p, q in zip(sharded.parameters(), whole.parameters()):
        # The bound keeps rounding in gradients that are nearly 0 from counting.
        dist.all_reduce(p.grad)
        error = float((p.grad - q.grad).norm() / q.grad.norm().clamp(min=1e-3))
        worst = max(worst, error)
    return worst


def error_with_documents(sharded, group):
    """Compare with a pass that is given the documents; no layer may look for them itself."""
    ids, positions, _ = two_samples("packed")
    shard = shard_of(group)
    arguments = dict(input_ids=ids[:, shard], position_ids=positions[:, shard], use_cache=False)
    expected = sharded.base_model(**arguments)[0]
    documents = ulysses.document_spans(positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ulysses, "document_spans", None)
        hidden = sharded.base_model(**arguments, documents=documents)[0]
    return float((hidden - expected).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("world, kinds", [
    (2, ("whole", "packed", "left", "given")), (4, ("packed",))])  # the hardest
def test_attention_over_shards_is_attention(world, kinds):
    """Packed documents, left padding, windows, soft-caps, fewer key-value heads than ranks."""
    for worst in ranks.run(world, worst_errors_of_shards, kinds):
        for case, error in worst.items():
            assert error < 2e-5, case


def test_document_spans_of_a_row():
    """A document begins where a position does not follow the one before; single ones merge."""
    whole = torch.arange(6)
    left_padded = torch.tensor([0, 0, 0, 0, 1, 2])
    spans = ulysses.document_spans(torch.stack([whole, whole + 5]))
    assert spans == [[(0, 6, False)]] * 2
    assert ulysses.document_spans(left_padded[None]) == [[(0, 3, True), (3, 6, False)]]
    mixed = torch.tensor([[0, 1, 7, 0, 0, 1]])
    assert ulysses.document_spans(mixed) == [[(0, 2, False), (2, 4, True), (4, 6, False)]]
    assert ulysses.document_spans(torch.zeros(1, 1)) == [[(0, 1, True)]]


class NoSquares(TorchDispatchMode):
    """Fail where a tensor has two dimensions of the whole sequence."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                assert list(x.shape).count(self.size) < 2, function
        return out


@pytest.mark.parametrize("window", [None, 1, 130, 700, 2999])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_long_attention_in_blocks(window, softcap):
    """Documents longer than a block equal attention with one dense mask, which never exists."""
    torch.manual_seed(0)
    # Longer than the largest block, 1,024; no multiple of it.
    S = 3000
    sizes = (1700, 1, 1, 1298)
    query = torch.randn(1, 4, S, 8)
    key = torch.randn(1, 2, S, 8)
    value = torch.randn(1, 2, S, 8)
    positions = positions_of(sizes)[None]
    with NoSquares(S):
        out, _ = ulysses.core_attention(None, query, key, value, sliding_window=window,
                                        softcap=softcap, position_ids=positions)
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    distance = torch.arange(S)[:, None] - torch.arange(S)
    visible = (document[:, None] == document) & (distance >= 0) & (distance < (window or S))
    # The dense reference.  Two query heads to each key-value head.
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = probabilities @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_has_one_owner_and_one_reader(size):
    """Of chunks cut by a boundary, or spanning all ranks; nobody reads outside chunks."""
    chunk_S = torch.tensor([[-1, 0, 0, 1, 1, 1, 2, -1, 3, 3, 3, 3], [0] * 12, [-1] * 12])
    chunk_T = torch.tensor([[0, 1, 1, -1, 2, 3, 3], [0, 0, 0, -1, -1, -1, -1], [-1] * 7])
    shards = [sequence_shard(chunk_S, chunk_T, rank, size) for rank in range(size)]
    assert torch.equal(sum(shard.owned_mask.long() for shard in shards), torch.ones_like(chunk_S))
    assert torch.equal(sum(shard.teacher_mask.long() for shard in shards), (chunk_T >= 0).long())


def test_without_a_halo_nothing_is_sent():
    # No group is given, so that a collective would fail.
    logits = object()
    assert sequence_group.gather_halo(logits, None, None) is logits
    assert sequence_group.gather_halo(logits, torch.zeros(0, dtype=torch.long), None) is logits


# --- what is rejected -----------------------------------------------------------------------------


def test_layouts_that_do_not_divide_are_rejected():
    config = AutoConfig.for_model("llama", hidden_size=96, num_attention_heads=12,
                                  num_key_value_heads=4)
    for size, num_ranks, words in ((2, 3, "does not divide the 3 ranks"),
                                   (8, 8, "12 attention heads"), (3, 6, "4 key-value heads")):
        with pytest.raises(ValueError, match=words):
            check_sequence_layout(size, num_ranks, config)
    check_sequence_layout(4, 8, config)


def test_models_that_mix_positions_otherwise_are_rejected():
    """Layers other than attention, no rotary embedding, attention sinks."""
    for changes in ({"layer_types": ["linear_attention", "full_attention"]},
                    {"attention_chunk_size": 8}):
        mixed = AutoConfig.for_model("llama", num_attention_heads=4, num_hidden_layers=2,
                                     **changes)
        with pytest.raises(ValueError, match="would see only the shard of their own rank; use 1"):
            check_sequence_layout(2, 4, mixed)
    with pytest.raises(ValueError, match="has sinks; use 1"):
        ulysses.core_attention(None, *torch.zeros(3, 1, 2, 4, 8), s_aux=torch.zeros(2))
    with pytest.raises(ValueError, match="gpt2 models do not pass positions to their attention"):
        check_sequence_layout(2, 4, AutoConfig.for_model("gpt2"))


def test_models_without_mlps_are_rejected():
    config = AutoConfig.for_model("opt", hidden_size=8, ffn_dim=8, num_hidden_layers=1,
                                  num_attention_heads=1, word_embed_proj_dim=8)
    with pytest.raises(ValueError, match="4: OPTForCausalLM has no modules called mlp; use 1"):
        activations.tile_mlps(AutoModelForCausalLM.from_config(config), 4)
    model = torch.nn.ModuleDict({"mlp": torch.nn.Identity()})
    model.mlp.forward = lambda x: (x, x)
    activations.tile_mlps(model, 4)
    with pytest.raises(ValueError, match="returns more than hidden states; use 1"):
        model.mlp(torch.zeros(1, 8, 2))


# --- what layers keep until backward --------------------------------------------------------------


class SavedShapes(saved_tensors_hooks):
    """Record the shapes of what is saved for backward."""

    def __init__(self):
        self.shapes = []
        super().__init__(self.record, lambda x: x)

    def record(self, x):
        self.shapes.append(tuple(x.shape))
        return x


def test_a_tiled_mlp_keeps_no_more_than_its_input():
    model = tiny_llama()
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 10, 64, requires_grad=True)
    saved_whole = SavedShapes()
    saved_tiled = SavedShapes()
    with saved_whole:
        expected = mlp(x)

    activations.tile_mlps(model, 4)
    for again in (mlp(x), mlp(x[:, :3])):  # also where a piece is empty
        assert torch.isfinite(again).all()
    # Only now, because every forward is recorded.
    with saved_tiled:
        output = mlp(x)
    width = SHAPE["intermediate_size"]
    assert any(width in shape for shape in saved_whole.shapes)
    assert not any(width in shape for shape in saved_tiled.shapes)
    torch.testing.assert_close(output, expected)


def test_passes_that_wait_on_the_host_do_not_mix():
    backwards = []
    expected = []
    for values in (torch.rand(2, 5), torch.rand(3, 7), torch.rand(2, 5)):
        x = torch.linspace(-1, 1, values.numel()).view(values.shape).requires_grad_()
        for offload, outputs in ((False, expected), (True, backwards)):
            waits = activations.offload_activations(values.shape) if offload else nullcontext()
            with waits:
                y = torch.tanh(torch.tanh(x * values) * values).sum()
            outputs.append((y, x))
    for (y, x), (plain, _) in zip(backwards, expected):
        gradient, = torch.autograd.grad(plain, x)
        for retain in (True, False):  # what is asked for twice comes twice
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=retain)[0], gradient)


def test_what_waits_on_the_host_is_a_copy():
    copies = activations.HostCopies((4,), None)
    tensor = torch.ones(4)
    packed = copies.pack(tensor)
    tensor.fill_(-1)
    assert torch.equal(copies.unpack(packed), torch.ones(4))


def test_checkpointed_activations_wait_on_the_host(monkeypatch):
    """One tensor per layer and those of the last norm move, and nothing of another shape."""
    model = tiny_llama().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    moved = []
    shape = (2, 10, 64)
    ids = torch.arange(20).view(2, 10)

    pack = activations.HostCopies.pack

    def record_and_pack(copies, x):
        moved.append(tuple(x.shape))
        return pack(copies, x)

    monkeypatch.setattr(activations.HostCopies, "pack", record_and_pack)
    with activations.offload_activations(shape):
        model.base_model(ids)
    # Not exactly 3: the norm at the end saves one tensor or several, depending on its code.
    assert 2 <= moved.count(shape) <= 6
    assert all(len(x) < 3 or x[-1] != 96 for x in moved)
