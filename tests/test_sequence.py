"""sequence.py: attention over sequences in parts is attention; every chunk belongs to one rank."""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import distill
from isogloss import sequence
from isogloss.sequence import sequence_shard

SHAPE = dict(vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, head_dim=8)
MODELS = {
    "llama": {}, "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": {"num_key_value_heads": 1}, "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 9},
    "phi3": {"head_dim": None}, "olmo2": {}, "smollm3": {}, "granite": {}}
DOCUMENTS = 11, 1, 7, 5  # positions of each, 24 in all


def packed(kind):
    """(ids, positions, documents as (sample, first, end)) of two samples of 24 positions."""
    torch.manual_seed(1)
    ids = torch.randint(1, 60, (2, 24))
    if kind == "whole":
        return ids, torch.arange(24).expand(2, 24), [(0, 0, 24), (1, 0, 24)]
    if kind == "packed":
        orders, positions, found = (DOCUMENTS, DOCUMENTS[::-1]), [], []
        for b, sizes in enumerate(orders):
            ends = torch.tensor(sizes).cumsum(0).tolist()
            positions.append(torch.cat([torch.arange(size) for size in sizes]))
            found += [(b, end - size, end) for size, end in zip(sizes, ends)]
        return ids, torch.stack(positions), found
    left = torch.zeros(2, 24, dtype=torch.long)  # the second sample has nine pads on its left
    left[0], left[1, 9:] = torch.arange(24), torch.arange(15)
    return ids, left, [(0, 0, 24), (1, 9, 24)]


def logits_in_parts(kinds):
    """Worst difference, in logits and gradient, of every model and kind of batch from documents alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    distill.start_distributed()
    distill.silence_libraries()
    group, worst = sequence.join_sequence_group(dist.get_world_size()), {}
    for name, how in MODELS.items():
        config = AutoConfig.for_model(name, **{k: v for k, v in (SHAPE | how).items() if v is not None})
        sequence.register_attention(config, group)
        torch.manual_seed(0)
        alone = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
        parts = AutoModelForCausalLM.from_config(config, attn_implementation=sequence.ATTENTION)
        parts.load_state_dict(alone.state_dict())
        for kind in kinds:
            ids, positions, documents = packed(kind)
            size = ids.shape[1] // group.size
            own = slice(group.rank * size, (group.rank + 1) * size)
            found = parts(input_ids=ids[:, own], position_ids=positions[:, own], use_cache=False).logits
            expected = torch.zeros(*ids.shape, found.shape[-1])
            for b, first, end in documents:
                expected[b, first:end] = alone(input_ids=ids[b : b + 1, first:end], use_cache=False).logits[0]
            used = torch.zeros(ids.shape, dtype=torch.bool)
            for b, first, end in documents:
                used[b, first:end] = True
            worst[name, kind] = float((found - expected[:, own])[used[:, own]].abs().max())
            alone.zero_grad(), parts.zero_grad()
            (expected[used] ** 2).sum().backward()
            (found[used[:, own]] ** 2).sum().backward()
            for p, q in zip(parts.parameters(), alone.parameters()):
                dist.all_reduce(p.grad)
                error = float((p.grad - q.grad).norm() / q.grad.norm().clamp(min=1e-3))
                worst[name, kind] = max(worst[name, kind], error)
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_attention_in_parts_is_attention(world):
    """Packed documents, left padding, sliding windows, soft-caps, fewer key-value heads than ranks."""
    kinds = "whole", "packed", "left"
    for worst in ranks.run(world, logits_in_parts, kinds if world == 2 else kinds[1:2]):
        for case, error in worst.items():
            assert error < 2e-5, case


def test_documents_of_a_row():
    """They begin where a position does not follow the one before; those of one position come together."""
    whole, left = torch.arange(6), torch.tensor([0, 0, 0, 0, 1, 2])
    assert sequence.documents(torch.stack([whole, whole + 5])) == [[(0, 6, False)]] * 2
    assert sequence.documents(left[None]) == [[(0, 3, True), (3, 6, False)]]
    mixed = torch.tensor([[0, 1, 7, 0, 0, 1]])
    assert sequence.documents(mixed) == [[(0, 2, False), (2, 4, True), (4, 6, False)]]
    assert sequence.documents(torch.zeros(1, 1)) == [[(0, 1, True)]]


class NoSquares(TorchDispatchMode):
    """Fails where a tensor has two dimensions of the whole sequence."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            assert not isinstance(x, torch.Tensor) or list(x.shape).count(self.size) < 2, function
        return out


@pytest.mark.parametrize("window", [None, 1, 2, 130, 700, 2999, 4000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_long_attention_in_blocks(window, softcap):
    """Documents longer than a block, with windows and soft-caps, as with one dense mask; none exists."""
    torch.manual_seed(0)
    S, sizes = 3000, (1700, 1, 1, 1298)
    query, key, value = torch.randn(1, 4, S, 8), torch.randn(1, 2, S, 8), torch.randn(1, 2, S, 8)
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    with NoSquares(S):
        out, _ = sequence.core_attention(None, query, key, value, sliding_window=window, softcap=softcap,
                                         position_ids=positions)
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    behind = torch.arange(S)[:, None] - torch.arange(S)
    seen = (document[:, None] == document) & (behind >= 0) & (behind < (window or S))
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_and_chunk_has_one_owner(size):
    """Chunks cut by a boundary, one that spans all ranks; positions without a chunk stay where they are."""
    chunk_S = torch.tensor([[-1, 0, 0, 1, 1, 1, 2, -1, 3, 3, 3, 3], [0] * 12, [-1] * 12])
    chunk_T = torch.tensor([[0, 1, 1, -1, 2, 3, 3], [0, 0, 0, -1, -1, -1, -1], [-1] * 7])
    part, shares = 12 // size, [sequence_shard(chunk_S, chunk_T, rank, size) for rank in range(size)]
    assert torch.equal(sum(s.owned.int() for s in shares), torch.ones_like(chunk_S, dtype=torch.int))
    assert torch.equal(sum(s.taught.int() for s in shares), (chunk_T >= 0).int())
    values = torch.arange(36.0)  # of every position
    own = [values.view(3, 12)[:, rank * part : (rank + 1) * part].flatten() for rank in range(size)]
    traveling = torch.stack([torch.where(s.travels >= 0, x[s.travels.clamp(min=0)], 0)
                              for s, x in zip(shares, own)]).sum(0) if len(shares[0].travels) else values[:0]
    for rank, share in enumerate(shares):
        rows = torch.cat([own[rank], traveling])
        owned = share.owned.flatten()
        assert torch.equal(rows[share.row[owned]], values[owned])
        for b, chunks in enumerate(chunk_S):
            for chunk in chunks[chunks >= 0].unique():
                assert share.owned[b][chunks == chunk].unique().numel() == 1
                assert share.taught[b][chunk_T[b] == chunk].all() == share.owned[b][chunks == chunk].all()
    assert (len(shares[0].travels) > 0) == (size > 1)
    assert sum(int((s.travels >= 0).sum()) for s in shares) == len(shares[0].travels)


def test_layouts_that_do_not_divide_are_refused():
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", hidden_size=96, num_attention_heads=12, num_key_value_heads=4)
    for size, ranks_, words in ((2, 3, "does not divide the 3 ranks"), (8, 8, "12 attention heads"),
                                (3, 6, "4 key-value heads")):
        with pytest.raises(ValueError, match=words):
            sequence.check_layout(size, ranks_, config)
    sequence.check_layout(4, 8, config)
    for how in ({"layer_types": ["linear_attention", "full_attention"]}, {"attention_chunk_size": 8}):
        mixed = AutoConfig.for_model("llama", num_attention_heads=4, num_hidden_layers=2, **how)
        with pytest.raises(ValueError, match="would see one part alone; use 1"):
            sequence.check_layout(2, 4, mixed)
    with pytest.raises(ValueError, match="has sinks; use 1"):
        sequence.core_attention(None, *torch.zeros(3, 1, 2, 4, 8), s_aux=torch.zeros(2))
    with pytest.raises(ValueError, match="gpt2 models do not tell"):
        sequence.check_layout(2, 4, AutoConfig.for_model("gpt2"))


def test_models_without_mlps_are_refused():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("opt", hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=1,
                                  word_embed_proj_dim=8)
    with pytest.raises(ValueError, match="--mlp_tiles 4: OPTForCausalLM has no modules called mlp; use 1"):
        sequence.tile_mlps(AutoModelForCausalLM.from_config(config), 4)
    model = torch.nn.ModuleDict({"mlp": torch.nn.Identity()})
    model.mlp.forward = lambda x: (x, x)
    sequence.tile_mlps(model, 4)
    with pytest.raises(ValueError, match="gives more than hidden states; use 1"):
        model.mlp(torch.zeros(1, 8, 2))


class Saved(saved_tensors_hooks):
    """Shapes of what is saved for backward."""

    def __init__(self):
        self.shapes = []
        super().__init__(lambda x: (self.shapes.append(tuple(x.shape)), x)[1], lambda x: x)


def test_pieces_of_an_mlp_keep_no_more_than_its_input():
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 10, 64, requires_grad=True)
    before, after = Saved(), Saved()
    with before:
        expected = mlp(x)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in mlp.parameters()] + [x.grad.clone()]
    mlp.zero_grad()
    x.grad = None
    sequence.tile_mlps(model, 4)
    for again in (mlp(x), mlp(x[:, :3])):  # also where a piece is empty
        assert torch.isfinite(again).all()
    with after:
        found = mlp(x)
    found.square().sum().backward()
    assert any(96 in shape for shape in before.shapes) and not any(96 in shape for shape in after.shapes)
    torch.testing.assert_close(found, expected)
    for p, g in zip([*mlp.parameters(), x], gradients):
        torch.testing.assert_close(p.grad, g)


def test_checkpoints_wait_on_the_host():
    """One tensor a layer and those of the last norm; nothing of another shape is moved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    moved, shape, ids = [], (2, 10, 64), torch.arange(20).view(2, 10)

    class Hooks(saved_tensors_hooks):
        def __init__(self, pack, unpack):
            super().__init__(lambda x: (moved.append(tuple(x.shape)), pack(x))[1], unpack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "saved_tensors_hooks", Hooks)
        with sequence.keep_on_host(shape):
            found = model.base_model(ids)[0]
    assert 2 <= moved.count(shape) <= 6 and all(len(x) < 3 or x[-1] != 96 for x in moved)
    found.sum().backward()
    gradients = [p.grad.clone() for p in model.base_model.parameters()]
    model.zero_grad()
    model.base_model(ids)[0].sum().backward()
    for p, g in zip(model.base_model.parameters(), gradients):
        torch.testing.assert_close(p.grad, g)
