"""Sequence parallelism: neighboring ranks hold a part of every sequence each (Ulysses).

Attention sees whole sequences and a part of the heads: DeepSpeed's `UlyssesSPAttentionHF` turns the one into
the other, around a core attention of our own that keeps what its stock ones drop: documents that were packed
into one sequence, left padding, sliding windows, soft-caps.  The engine knows nothing of it: every rank
back-propagates its own share of the loss, and the mean over all ranks that the engine takes, in whatever ZeRO
stage, is scaled as without sequence parallelism.

A chunk belongs to the rank that holds its first position; hidden states of its positions on later ranks
travel to it (`complete`).  Their number depends on how many chunks are cut, not on the length.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

ATTENTION = "isogloss_sequence"  # the key under which transformers finds it; teachers keep their own


class SequenceGroup(NamedTuple):
    """The ranks that hold the parts of the same sequences, in order.

    rank: place of this rank among them.
    """

    group: object
    rank: int
    size: int


def join_sequence_group(size):
    """The group of `size` neighboring ranks that this one is in; all ranks take part."""
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            found = SequenceGroup(group, ranks.index(dist.get_rank()), size)
    return found


def check_layout(size, ranks, config):
    """A ValueError where `size` parts of a sequence do not go with the job or the student.

    Args:
        ranks: of the student.
        config: of the student, for text.
    """
    if ranks % size:
        raise ValueError(f"--sequence_parallel {size}: does not divide the {ranks} ranks of the student")
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if getattr(config, "attention_chunk_size", None):
        kinds.add("chunked_attention")
    if kinds:
        raise ValueError(f"--sequence_parallel {size}: layers of {config.model_type} "
                         f"({', '.join(sorted(kinds))}) would see one part alone; use 1")
    if not hasattr(config, "rope_parameters") and not hasattr(config, "rope_theta"):
        raise ValueError(f"--sequence_parallel {size}: {config.model_type} models do not tell their "
                         "attention the positions, as those with rotary embeddings do; use 1")
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or (kv % size and size % kv):
        raise ValueError(f"--sequence_parallel {size}: the student has {heads} attention heads and {kv} "
                         "key-value heads; it has to divide the first, and the second or be a multiple of it")


def register_attention(config, sequence):
    """Make `ATTENTION` the attention of sequences in parts.

    Args:
        config: of the student, for text.
        sequence: SequenceGroup.
    """
    # not above: data workers need what is below, and neither of these
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads = config.num_attention_heads
    ulysses = UlyssesSPAttentionHF(
        core_attention, batch_size=1, attn_head_count=heads,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
        num_hidden_layers=config.num_hidden_layers, process_group=sequence.group, seq_length_is_variable=True)
    ulysses.core_attn_implementation = ATTENTION

    def attention(module, query, key, value, attention_mask, *args, **how):
        ulysses.batch_size = len(query)  # packed micro-batches differ in rows
        for name in ("query", "key_value", "context"):
            shape = getattr(ulysses, f"required_{name}_shape")
            setattr(ulysses, f"required_{name}_shape", torch.Size([shape[0], len(query), *shape[2:]]))
        try:  # the mask comes from the positions
            return ulysses(module, query, key, value, None, *args, **how)
        except AssertionError as error:
            raise ValueError(f"--sequence_parallel {sequence.size}: the attention of {config.model_type} has "
                             f"other shapes than its config says ({error}); use 1") from None

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def core_attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None,
                   sliding_window=None, softcap=None, position_ids=None, s_aux=None, **_):
    """Causal attention inside documents, with the interface of transformers' attention functions.

    No mask of all positions exists: every document is a call of its own (by the device's fused kernel, on a
    GPU flash attention), and where a window or a soft-cap needs a mask, every block of queries is one.

    Args:
        query, key, value: (B, heads, S, D), of whole sequences; fewer heads of key and value are shared.
        sliding_window: a position sees so many, itself included; None: all before it.
        softcap: c of c * tanh(scores / c).
        position_ids: (B, S); a document begins wherever one is not its predecessor plus 1, so that every
            token of left padding is a document.
        s_aux: sinks, which are refused.
    Returns:
        ((B, S, heads, D), None)
    Raises:
        ValueError: of sinks.
    """
    if s_aux is not None:
        raise ValueError("--sequence_parallel: the student's attention has sinks; use 1")
    how = dropout, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap
    spans_B = documents(position_ids)
    if all(len(spans) == 1 and not spans[0][2] for spans in spans_B):
        return _attend(query, key, value, sliding_window, *how).transpose(1, 2).contiguous(), None
    rows = []
    for b, spans in enumerate(spans_B):
        of_row = [x[b : b + 1] for x in (query, key, value)]
        rows += [torch.cat([
            _attend(*[x[:, :, first:end] for x in of_row], 1 if alone else sliding_window, *how)
            for first, end, alone in spans], 2)]
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def documents(position_ids):
    """[[(first, end, alone)]] of every row: its documents, those of a single position together (alone)."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    found = []
    for row in begins.cpu():
        edges = [*row.nonzero().squeeze(1).tolist(), len(row)]
        spans = []
        for first, end in zip(edges, edges[1:]):
            alone = end - first == 1
            if alone and spans and spans[-1][2]:
                first = spans.pop()[0]
            spans.append((first, end, alone))
        found.append(spans)
    return found


def _attend(query, key, value, window, dropout, scale, softcap):
    """Causal attention of one document (or of rows of equal documents): (B, heads, S, D)."""
    S, shared = query.shape[2], query.shape[1] != key.shape[1]
    if softcap is None and (window is None or window >= S):
        return F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True, scale=scale,
                                              enable_gqa=shared)
    if shared:  # with a mask, GPUs have no fused kernel for shared heads
        key, value = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
    window, out = min(window or S, S), []
    step = min(max(window, 128), 1024)
    for first in range(0, S, step):
        end, begin = min(first + step, S), max(0, first - window + 1)
        places = torch.arange(begin, end, device=query.device)
        behind = places[first - begin :, None] - places
        seen = (behind >= 0) & (behind < window)
        block = query[:, :, first:end], key[:, :, begin:end], value[:, :, begin:end]
        out.append(_capped(*block, seen, dropout, scale, softcap) if softcap else
                   F.scaled_dot_product_attention(*block, seen, dropout, scale=scale))
    return torch.cat(out, 2)


def _capped(query, key, value, seen, dropout, scale, softcap):
    """Attention whose scores are softcap * tanh(scores / softcap)."""
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(shares, dropout) @ value


# --- what layers keep until backward ---------------------------------------------------------------


def tile_mlps(model, pieces):
    """Let every MLP take its positions in `pieces` parts, each computed again when backward comes to it.

    As many parts on every rank, however long its texts are, because ZeRO-3 gathers the weights for each.

    Raises:
        ValueError: the model has no modules called mlp.
    """
    found = [module for name, module in model.named_modules() if name.split(".")[-1] == "mlp"]
    if not found:
        raise ValueError(f"--mlp_tiles {pieces}: {type(model).__name__} has no modules called mlp; use 1")
    for mlp in found:
        def forward(x, own=mlp.forward):
            parts = x.tensor_split(pieces, dim=-2)
            found = [checkpoint(own, part, use_reentrant=False) for part in parts]
            if not isinstance(found[0], torch.Tensor):
                raise ValueError(f"--mlp_tiles {pieces}: an MLP of {type(model).__name__} gives more than "
                                 "hidden states; use 1")
            return torch.cat(found, -2)

        mlp.forward = forward


def keep_on_host(shape, on=True):
    """A context in which what backward needs of this shape waits in the host's memory.

    Around a model with activation checkpointing, and of the shape of its hidden states, these are the inputs
    of its layers; everything else of a layer is computed again.

    Args:
        shape: of the tensors that move.
        on: False: a context that does nothing.
    """
    def pack(x):
        if x.shape != shape:
            return None, x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
        return x.device, host.copy_(x, non_blocking=True)

    def unpack(kept):
        device, x = kept
        return x if device is None else x.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack) if on else nullcontext()


# --- chunks across parts --------------------------------------------------------------------------


class SequenceShard(NamedTuple):
    """What one rank holds of a batch (B, S), and what its loss is about.

    owned: (B, S) bool, positions whose loss this rank computes.
    taught: (B, T) bool, teacher positions that it reads.
    row: (B * S,) int64, where the rank finds a position: in its own part (B, S / size), flattened, or behind
        that among the positions that travel; -1: nowhere.
    travels: (M,) int64, all positions that travel in the group, as rows of this rank's part; -1: of another.
    """

    owned: torch.Tensor
    taught: torch.Tensor
    row: torch.Tensor
    travels: torch.Tensor


def sequence_shard(student_chunk_BS, teacher_chunk_BT, rank, size):
    """The share of one rank of a sequence group.

    Args:
        student_chunk_BS, teacher_chunk_BT: shifted chunk ids, -1 for none; `size` divides S.
    Returns:
        SequenceShard.
    """
    B, S = student_chunk_BS.shape
    part, samples = S // size, torch.arange(B)[:, None]
    holder = (torch.arange(S) // part).expand(B, S)
    most = 1 + int(max([-1, *[int(x.max()) for x in (student_chunk_BS, teacher_chunk_BT) if x.numel()]]))
    key_S, key_T = [torch.where(x >= 0, x + samples * most, B * most)
                    for x in (student_chunk_BS, teacher_chunk_BT)]
    owner_of = torch.full((B * most + 1,), size).scatter_reduce(0, key_S.flatten(), holder.flatten(), "amin")
    owner = torch.where(student_chunk_BS >= 0, owner_of[key_S], holder)
    taught = (teacher_chunk_BT >= 0) & (owner_of[key_T] == rank)
    here, place = holder == rank, samples * part + torch.arange(S) % part
    moved = (owner != holder).flatten().nonzero().squeeze(1)
    row = torch.where(here, place, -1).flatten()
    travels = row[moved]
    row[moved] = torch.where(here.flatten()[moved], row[moved], B * part + torch.arange(len(moved)))
    return SequenceShard(owner == rank, taught, row, travels)


def complete(rows, travels_M, sequence):
    """A rank's own rows, and behind them those that travel; differentiable, one collective.

    Args:
        rows: `tiles.HiddenLogits` or `tiles.StoredLogits` of the rank's part.
        travels_M: of its SequenceShard; None or empty: nothing travels.
        sequence: SequenceGroup.
    """
    if travels_M is None or not len(travels_M):
        return rows
    whole = torch.cat([rows[0], _Travel.apply(rows[0], travels_M, sequence.group)])
    return rows._replace(**{rows._fields[0]: whole})


class _Travel(torch.autograd.Function):
    """Every rank gives the rows that it holds; all get all, and the gradients come back the same way."""

    @staticmethod
    def forward(ctx, rows_NX, travels_M, group):
        here = (travels_M >= 0).nonzero().squeeze(1)
        ctx.save_for_backward(here, travels_M[here])
        ctx.group, ctx.shape = group, rows_NX.shape
        out = rows_NX.new_zeros(len(travels_M), rows_NX.shape[1])
        out[here] = rows_NX[travels_M[here]]
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad_MX):
        here, own = ctx.saved_tensors
        grad_MX = grad_MX.contiguous()
        dist.all_reduce(grad_MX, group=ctx.group)
        d_rows = grad_MX.new_zeros(ctx.shape)
        d_rows[own] = grad_MX[here]
        return d_rows, None, None
