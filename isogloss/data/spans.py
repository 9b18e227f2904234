"""Documents in packed rows, and what a rank of a sequence group holds, owns and receives."""

import itertools
from typing import NamedTuple

import torch


class DocumentSpan(NamedTuple):
    """Neighboring positions of a row that attention takes in one call.

    start, end: first position, and the one after the last.
    isolated: False: one document; True: documents of one position each, which see only themselves.
    """

    start: int
    end: int
    isolated: bool


def document_spans(position_ids):
    """Return the documents of every row, those of a single position merged with their like.

    Merging matters for left padding, where a call for every pad would cost more than the text.

    Args:
        position_ids: (B, S) int64.
    Returns:
        list of B lists of DocumentSpan, which cover 0 to S in order.
    """
    begins_BS = torch.ones_like(position_ids, dtype=torch.bool)
    begins_BS[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    spans_B = []
    for begins_S in begins_BS.cpu():
        edges = [*begins_S.nonzero().squeeze(1).tolist(), len(begins_S)]
        spans = []
        for start, end in itertools.pairwise(edges):
            isolated = end - start == 1
            if isolated and spans and spans[-1].isolated:
                start = spans.pop().start
            spans.append(DocumentSpan(start, end, isolated))
        spans_B.append(spans)
    return spans_B


class SequenceShard(NamedTuple):
    """One rank's view of a batch (B, S) whose sequences a group of ranks holds in shards.

    owned_mask: (B, S) bool, student positions whose loss this rank computes.
    teacher_mask: (B, T) bool, teacher positions that these losses read.
    local_position: (B * S,) int64, where the rank finds a position: below B * S / size in its own
        shard (B, S / size), flattened; from there on in the appended halo; -1: nowhere.
    halo_index: (M,) int64, the positions of the group's halo as indices into this rank's flattened
        shard; -1: another rank holds it.
    """

    owned_mask: torch.Tensor
    teacher_mask: torch.Tensor
    local_position: torch.Tensor
    halo_index: torch.Tensor


def sequence_shard(student_chunk_BS, teacher_chunk_BT, rank, size):
    """Compute which positions a rank of a sequence group holds, owns and receives.

    All ranks compute this from the same chunks, so they agree on the halo without a message.

    Args:
        student_chunk_BS, teacher_chunk_BT: shifted chunk ids, -1 for none; `size` divides S.
        rank: in the group.
        size: of the group.
    Returns:
        SequenceShard.
    """
    B, S = student_chunk_BS.shape
    shard_length = S // size
    sample_B1 = torch.arange(B)[:, None]
    holder_BS = (torch.arange(S) // shard_length).expand(B, S)

    # Chunk ids count within a sample; make them unique over the batch.  One more id than there are
    # chunks collects the positions without a chunk.
    num_chunks = 1 + max(_largest_id(student_chunk_BS), _largest_id(teacher_chunk_BT))
    no_chunk = B * num_chunks
    student_key_BS = _batch_chunk(student_chunk_BS, sample_B1, num_chunks, no_chunk)
    teacher_key_BT = _batch_chunk(teacher_chunk_BT, sample_B1, num_chunks, no_chunk)

    # The owner of a chunk is the first rank that holds a position of it; `size` means none.
    nobody = torch.full((no_chunk + 1,), size)
    owner_of_chunk = nobody.scatter_reduce(0, student_key_BS.flatten(), holder_BS.flatten(), "amin")
    owner_BS = torch.where(student_chunk_BS >= 0, owner_of_chunk[student_key_BS], holder_BS)
    teacher_mask = (teacher_chunk_BT >= 0) & (owner_of_chunk[teacher_key_BT] == rank)

    # Positions of this rank's own shard first: their index in it, -1 for those of other ranks.
    is_local_BS = holder_BS == rank
    index_in_shard_BS = sample_B1 * shard_length + torch.arange(S) % shard_length
    local_position = torch.where(is_local_BS, index_in_shard_BS, -1).flatten()
    # Then the halo: positions whose owner is not their holder, appended to the shard in one order.
    halo_M = (owner_BS != holder_BS).flatten().nonzero().squeeze(1)
    halo_index = local_position[halo_M]  # a copy, taken before the appended positions are filled in
    appended_M = B * shard_length + torch.arange(len(halo_M))
    local_position[halo_M] = torch.where(is_local_BS.flatten()[halo_M], halo_index, appended_M)
    return SequenceShard(owner_BS == rank, teacher_mask, local_position, halo_index)


def _largest_id(chunk):
    return int(chunk.max()) if chunk.numel() else -1


def _batch_chunk(chunk, sample_B1, num_chunks, no_chunk):
    """Return chunk ids that are unique over the batch, `no_chunk` for positions without a chunk."""
    return torch.where(chunk >= 0, chunk + sample_B1 * num_chunks, no_chunk)
