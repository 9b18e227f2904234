"""Sequence parallelism: neighboring ranks hold one shard of every sequence each (Ulysses).

Every layer but attention works on the rank's own shard.  Attention needs whole sequences, so
DeepSpeed's `UlyssesSPAttentionHF` exchanges shards of all heads for whole sequences of some heads,
and back.  Inside it runs `core_attention`, which keeps what DeepSpeed's stock ones drop: documents
packed into one sequence, left padding, sliding windows, soft-caps.

The engine does not know of any of this.  Every rank back-propagates the loss terms that it owns,
and the engine's mean over all ranks, in any ZeRO stage, is scaled as without sequence parallelism.

A chunk is owned by the rank that holds its first position.  The chunk's positions on later ranks
form the halo: `gather_halo` brings their hidden states to the owner.  The halo grows with the
number of chunks that a shard boundary cuts, not with the length of the sequence.

Ulysses: arXiv:2309.14509.  Tests: tests/test_sequence.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from isogloss.job.sequence_group import document_spans, join_sequence_group
from isogloss.models.compiler import TOLERANCE
from isogloss.models.pretrained import load_config
from isogloss.student.checks import evaluation_mode, student_batch

# The name under which the student's attention is registered with transformers.  A name of its own,
# because teachers live in the same process and keep their usual attention.
ATTENTION = "isogloss_sequence"


def check(cfg, layout):
    check_sequence_layout(cfg.sequence_parallel, layout.num_ranks, layout.config)


def check_sequence_layout(size, num_ranks, config):
    """Check that sequences of this student can be cut into `size` shards on these ranks.

    Args:
        num_ranks: ranks of the student.
        config: of the student, for text.
    Raises:
        ValueError: the ranks, heads, kinds of layers or position encoding do not allow it.
    """
    flag = f"--sequence_parallel {size}"
    if num_ranks % size:
        raise ValueError(f"{flag}: does not divide the {num_ranks} ranks of the student")
    # Only attention is exchanged.  A layer that mixes positions by other means (state-space, linear
    # or chunked attention) would start afresh at every shard boundary.
    layer_types = set(getattr(config, "layer_types", None) or ())
    unsupported = layer_types - {"full_attention", "sliding_attention"}
    if getattr(config, "attention_chunk_size", None):
        unsupported.add("chunked_attention")
    if unsupported:
        raise ValueError(f"{flag}: layers of {config.model_type} "
                         f"({', '.join(sorted(unsupported))}) would see only the shard of their "
                         "own rank; use 1")
    # Models with rotary embeddings pass position_ids on to their attention function; document
    # boundaries and the causal mask are derived from these.
    if not hasattr(config, "rope_parameters") and not hasattr(config, "rope_theta"):
        raise ValueError(f"{flag}: {config.model_type} models do not pass positions to their "
                         "attention, which only those with rotary embeddings do; use 1")
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    # DeepSpeed repeats key-value heads where there are fewer of them than ranks.
    kv_heads_fit = num_kv_heads % size == 0 or size % num_kv_heads == 0
    if num_heads % size or not kv_heads_fit:
        raise ValueError(f"{flag}: the student has {num_heads} attention heads and {num_kv_heads} "
                         "key-value heads; use a number that divides the first, and that divides "
                         "the second or is a multiple of it")


def prepare(state, inputs, stack):
    check_sequence_shards(state)


def check_sequence_shards(state):
    """Raise a ValueError where cutting a text in two changes what the student says of it.

    That is so for models that look at neighbors in another way than by attention.
    """
    group = state.sequence_group
    text = torch.arange(8, device=state.device) % state.vocab
    ids = torch.zeros(2, 16 * group.size, dtype=torch.long, device=state.device)
    positions = torch.arange(16 * group.size, device=state.device).repeat(2, 1)
    ids[0, :8] = text  # on the first rank
    ids[1, 12:20] = text  # goes on where the shard of the next rank begins
    positions[1, 12:] -= 12  # a sample of its own
    columns = slice(16 * group.rank, 16 * (group.rank + 1))
    with evaluation_mode(state):
        logits = state.engine(student_batch(ids[:, columns], positions[:, columns]))
    # every rank needs the verdict, or the others would go on
    shards = [torch.empty_like(logits) for _ in range(group.size)]
    dist.all_gather(shards, logits.contiguous(), group=group.group)
    whole = shards[0][0, :8].float()
    cut = torch.cat(shards[:2], 1)[1, 12:20].float()
    tolerance = TOLERANCE[logits.dtype]  # the two are computed in other blocks
    if not (whole - cut).norm() <= tolerance * whole.norm():
        raise ValueError(
            f"--student {state.cfg.student}: what it says of a text depends on where its shards "
            "are cut, so its layers do more than attend; use --sequence_parallel 1")


# --- attention over sharded sequences -------------------------------------------------------------


def join(cfg):
    """Join this rank's SequenceGroup; return (it, the name of the attention over its sequences)."""
    sequence_group = join_sequence_group(cfg.sequence_parallel)
    config = load_config("student", cfg.student, cfg.trust_remote_code)
    register_attention(config.get_text_config(), sequence_group)
    return sequence_group, ATTENTION


def register_attention(config, sequence_group):
    """Register `ATTENTION` with transformers: attention over the sequences of a SequenceGroup."""
    # Imported here, because data workers import this module and need neither of these.
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    num_heads = config.num_attention_heads
    ulysses = UlyssesSPAttentionHF(
        core_attention, batch_size=1, attn_head_count=num_heads,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        kv_head_count=getattr(config, "num_key_value_heads", None) or num_heads,
        num_hidden_layers=config.num_hidden_layers, process_group=sequence_group.group,
        seq_length_is_variable=True)
    ulysses.core_attn_implementation = ATTENTION

    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        _set_batch_size(ulysses, len(query))
        if kwargs.get("position_ids") is not None:  # they are gathered, by NCCL without gaps alone
            kwargs["position_ids"] = kwargs["position_ids"].contiguous()
        try:
            # The mask covers the local shard only; core_attention derives its own from documents.
            return ulysses(module, query, key, value, None, *args, **kwargs)
        except AssertionError as error:
            raise ValueError(f"--sequence_parallel {sequence_group.size}: the attention of "
                             f"{config.model_type} has other shapes than its config says "
                             f"({error}); use 1") from None

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def _set_batch_size(ulysses, batch_size):
    """Tell Ulysses how many rows come next; it fixes them once, but packed micro-batches differ."""
    ulysses.batch_size = batch_size
    for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
        length, _, *rest = getattr(ulysses, name)
        setattr(ulysses, name, torch.Size([length, batch_size, *rest]))


def core_attention(
    module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, sliding_window=None,
    softcap=None, position_ids=None, s_aux=None, documents=None, **unused,
):
    """Compute causal attention inside documents, with the interface of transformers.

    No mask of all positions exists.  Every document is a call of its own (by the device's fused
    kernel, on a GPU flash attention).  Where a window or a soft-cap needs a mask, queries are taken
    block by block, and a mask covers one block.

    Args:
        query, key, value: (B, heads, S, D), of whole sequences; key and value may have fewer heads,
            each for several heads of the query.
        dropout: probability, 0 in evaluation.
        scaling: factor of the scores; None: 1 / sqrt(D).
        sliding_window: positions that one sees, itself included; None: all before it.
        softcap: c of c * tanh(scores / c); None: scores as they are.
        position_ids: (B, S); a document begins wherever one is not its predecessor plus 1, so every
            token of left padding is a document.
        s_aux: attention sinks, which are rejected.
        documents: `document_spans` of the positions, as a batch brings them; None: some models do
            not pass on what they do not know, so they are read from the device.
        module, attention_mask, unused: what transformers passes beside these, ignored.
    Returns:
        ((B, S, heads, D), None)
    Raises:
        ValueError: the model has attention sinks.
    """
    if s_aux is not None:
        raise ValueError("--sequence_parallel: the student's attention has sinks; use 1")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    spans_B = document_spans(position_ids) if documents is None else documents
    # The common case, whole rows of one document, takes one call for the whole batch.
    if all(len(spans) == 1 and not spans[0].isolated for spans in spans_B):
        out = _attend(query, key, value, window=sliding_window, dropout=dropout, scale=scaling,
                      softcap=softcap)
        return out.transpose(1, 2).contiguous(), None
    rows = []
    for b, spans in enumerate(spans_B):
        pieces = []
        for span in spans:
            sample = slice(b, b + 1)
            positions = slice(span.start, span.end)
            piece = _attend(
                query[sample, :, positions], key[sample, :, positions], value[sample, :, positions],
                window=1 if span.isolated else sliding_window, dropout=dropout, scale=scaling,
                softcap=softcap)
            pieces.append(piece)
        rows.append(torch.cat(pieces, 2))
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def _attend(query, key, value, *, window, dropout, scale, softcap):
    """Compute causal attention where every row is one document: (B, heads, S, D)."""
    S = query.shape[2]
    num_heads = query.shape[1]
    shares_heads = num_heads != key.shape[1]
    if softcap is None and (window is None or window >= S):
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scale, enable_gqa=shares_heads)
    if shares_heads:  # given a mask, GPUs have no fused kernel for shared heads
        key = key.repeat_interleave(num_heads // key.shape[1], 1)
        value = value.repeat_interleave(num_heads // value.shape[1], 1)
    window = min(window or S, S)
    # A block of queries sees at most block + window keys.  Blocks as long as the window waste half
    # of the scores at most; 128 and 1,024 bound the number of calls and the mask (not tuned).
    block_size = min(max(window, 128), 1024)
    blocks = []
    for start in range(0, S, block_size):
        end = min(start + block_size, S)
        key_start = max(0, start - window + 1)
        key_positions = torch.arange(key_start, end, device=query.device)
        query_positions = key_positions[start - key_start :]
        distance = query_positions[:, None] - key_positions
        visible_mask = (distance >= 0) & (distance < window)
        block_query = query[:, :, start:end]
        block_key = key[:, :, key_start:end]
        block_value = value[:, :, key_start:end]
        if softcap:
            block = _soft_capped_attention(
                block_query, block_key, block_value, visible_mask, dropout=dropout, scale=scale,
                softcap=softcap)
        else:
            block = F.scaled_dot_product_attention(
                block_query, block_key, block_value, visible_mask, dropout, scale=scale)
        blocks.append(block)
    return torch.cat(blocks, 2)


def _soft_capped_attention(query, key, value, visible_mask, *, dropout, scale, softcap):
    """Compute attention whose scores are softcap * tanh(scores / softcap), as in Gemma 2."""
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    scores = scores.masked_fill(~visible_mask, -torch.inf)
    probabilities = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return F.dropout(probabilities, dropout) @ value
