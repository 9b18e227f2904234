"""Sequence parallelism: neighbouring ranks hold a part of every sequence each (Ulysses).

Attention sees whole sequences and a part of the heads: DeepSpeed's `UlyssesSPAttentionHF` turns the one into
the other, around a core attention of our own that keeps what its stock ones drop: documents that were packed
into one sequence, left padding, sliding windows, soft-caps.  The engine knows nothing of it: every rank
back-propagates its own share of the loss, and the mean over all ranks that the engine takes, in whatever ZeRO
stage, is scaled as without sequence parallelism.

A chunk belongs to the rank that holds its first position; hidden states of its positions on later ranks
travel to it (`complete`).  Their number depends on how many chunks are cut, not on the length.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

ATTENTION = "isogloss_sequence"  # the key under which transformers finds it; teachers keep their own


class SequenceGroup(NamedTuple):
    """The ranks that hold the parts of the same sequences, in order.

    rank: place of this rank among them.
    """

    group: object
    rank: int
    size: int


def join_sequence_group(size):
    """The group of `size` neighbouring ranks that this one is in; all ranks take part."""
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
        return ulysses(module, query, key, value, None, *args, **how)  # the mask comes from the positions

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def core_attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None,
                   sliding_window=None, softcap=None, position_ids=None, **_):
    """Causal attention inside documents, with the interface of transformers' attention functions.

    Args:
        query, key, value: (B, heads, S, D), of whole sequences; fewer heads of key and value are shared.
        sliding_window: a position sees so many, itself included; None: all before it.
        softcap: c of c * tanh(scores / c).
        position_ids: (B, S); a document begins wherever one is not its predecessor plus 1, so that every
            token of left padding is a document.
    Returns:
        ((B, S, heads, D), None)
    """
    mask = document_mask(position_ids, sliding_window)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1])
    else:
        key, value = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
        out = F.dropout(shares, dropout) @ value
    return out.transpose(1, 2).contiguous(), None


def document_mask(position_ids, window=None):
    """(B, 1, S, S) bool, may the row see the column?  None: plain causal attention."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    S = position_ids.shape[1]
    narrow = window is not None and window < S
    if not narrow and not bool(begins[:, 1:].any()):
        return None
    document = begins.cumsum(1)
    place = torch.arange(S, device=position_ids.device)
    behind = place[:, None] - place[None]
    seen = behind >= 0
    if narrow:
        seen &= behind < window
    return (seen & (document[:, :, None] == document[:, None, :]))[:, None]


# --- chunks across parts --------------------------------------------------------------------------


class Share(NamedTuple):
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


def share_of(student_chunk_BS, teacher_chunk_BT, rank, size):
    """The share of one rank of a sequence group.

    Args:
        student_chunk_BS, teacher_chunk_BT: shifted chunk ids, -1 for none; `size` divides S.
    Returns:
        Share.
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
    return Share(owner == rank, taught, row, travels)


def complete(rows, travels_M, sequence):
    """A rank's own rows, and behind them those that travel; differentiable, one collective.

    Args:
        rows: `tiles.HiddenRows` or `tiles.LogitRows` of the rank's part.
        travels_M: of its Share; None or empty: nothing travels.
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
