"""Ranks that hold the shards of the same sequences: what each holds, and what they exchange.

A chunk is owned by the rank that holds its first position.  Its positions on later ranks form the
halo: `gather_halo` brings their values to the owner.  The halo grows with the number of chunks
that a shard boundary cuts, not with the length of the sequence.

Tests: tests/test_sequence.py.
"""

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

from isogloss.job.rendezvous import LOADING_TIMEOUT


class SequenceGroup(NamedTuple):
    """Name the ranks that hold the shards of the same sequences, in order.

    group: process group of torch.distributed.
    rank: index of this rank in the group, which is also the index of its shard.
    size: ranks in the group, and so shards of a sequence.
    """

    group: object
    rank: int
    size: int

    def with_halo(self, logits, halo_index_M):
        """Return logits with the halo of a shard, see `sequence_group.gather_halo`."""
        return gather_halo(logits, halo_index_M, self)

    def with_halo_values(self, values_NX, halo_index_M):
        """Return values with the halo of a shard, see `sequence_group.halo_values`."""
        return halo_values(values_NX, halo_index_M, self)


def join_sequence_group(size):
    """Join the group of `size` neighboring ranks that this rank is in; all ranks take part.

    Returns:
        SequenceGroup.
    """
    # new_group is collective: every rank has to create every group, in the same order.
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=LOADING_TIMEOUT)
        if dist.get_rank() in ranks:
            sequence_group = SequenceGroup(group, ranks.index(dist.get_rank()), size)
    return sequence_group


# --- the one exchange -----------------------------------------------------------------------------


def gather_halo(logits, halo_index_M, sequence_group):
    """Append the halo of the group to the positions that this rank holds.

    Differentiable: gradients of halo positions flow back to the ranks that hold them.  One
    collective forward and one backward, in which all ranks of the group take part.

    Args:
        logits: `tiles.HiddenLogits` or `tiles.StoredLogits` of the rank's own shard, N positions.
        halo_index_M: (M,) of its SequenceShard; None or empty: there is no halo.
        sequence_group: SequenceGroup.
    Returns:
        The same kind of logits, of N + M positions, as `SequenceShard.local_position` counts them.
    """
    if halo_index_M is None or not len(halo_index_M):
        return logits
    return logits.with_values(halo_values(logits.values, halo_index_M, sequence_group))


def halo_values(values_NX, halo_index_M, sequence_group):
    """Return (N + M, X) values of positions, as `gather_halo` does for logits."""
    if halo_index_M is None or not len(halo_index_M):
        return values_NX
    halo_MX = _HaloExchange.apply(values_NX, halo_index_M, sequence_group.group)
    return torch.cat([values_NX, halo_MX])


class _HaloExchange(torch.autograd.Function):
    """Give every rank of a group all halo values; backward sums their gradients at the holders."""

    @staticmethod
    def forward(ctx, values_NX, halo_index_M, group):
        held = (halo_index_M >= 0).nonzero().squeeze(1)
        held_index = halo_index_M[held]
        ctx.save_for_backward(held, held_index)
        ctx.group = group
        ctx.shape = values_NX.shape
        # Each position has one holder and is 0 on all others, so the sum over ranks is exact.
        halo_MX = values_NX.new_zeros(len(halo_index_M), values_NX.shape[1])
        halo_MX[held] = values_NX[held_index]
        dist.all_reduce(halo_MX, group=group)
        return halo_MX

    @staticmethod
    def backward(ctx, grad_MX):
        held, held_index = ctx.saved_tensors
        grad_MX = grad_MX.contiguous()
        dist.all_reduce(grad_MX, group=ctx.group)
        grad_values_NX = grad_MX.new_zeros(ctx.shape)
        grad_values_NX[held_index] = grad_MX[held]
        return grad_values_NX, None, None


# --- what a rank holds ----------------------------------------------------------------------------


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
    columns: of a row, those that the rank holds.
    """

    owned_mask: torch.Tensor
    teacher_mask: torch.Tensor
    local_position: torch.Tensor
    halo_index: torch.Tensor
    columns: slice

    def localized(self, tiles):
        """Return tiles with the student positions of this rank: its shard, then the halo."""
        return [tile._replace(student_positions=self.local_position[tile.student_positions])
                for tile in tiles]

    def localize(self, batch):
        """Let a TeacherBatch name the student's positions as this rank holds them."""
        batch.tiles = self.localized(batch.tiles)
        num_local = batch.student_chunk[:, self.columns].numel()
        batch.student_chunk = batch.student_chunk[:, self.columns].contiguous()
        # the positions of the shard, then those of the halo
        sample = torch.zeros(num_local + len(self.halo_index), dtype=torch.long)
        reachable = self.local_position >= 0
        sample[self.local_position[reachable]] = batch.sample_of_student[reachable]
        batch.sample_of_student = sample
        batch.halo_index = self.halo_index


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
    return SequenceShard(owner_BS == rank, teacher_mask, local_position, halo_index,
                         shard_columns(S, rank, size))


def shard_columns(width, rank, size):
    """Return the slice of a row of `width` positions that a rank of a group holds."""
    size = width // size
    return slice(rank * size, (rank + 1) * size)


def keep_shard(student, rank, size):
    """Cut the tensors of a StudentBatch to a rank's shard of every row."""
    num_rows, width = student.ids.shape
    if student.positions is None:  # a shard does not begin at position 0
        student.positions = torch.arange(width).expand(num_rows, width)
    # here, because every layer would have to wait for the device to tell
    student.documents = document_spans(student.positions)
    columns = shard_columns(width, rank, size)
    for name in ("ids", "labels", "num_bytes", "positions", "logp", "is_text"):
        whole = getattr(student, name)
        if whole is not None:
            # a view would send the rows' whole storage from the data worker
            setattr(student, name, whole[:, columns].contiguous())


def _largest_id(chunk):
    return int(chunk.max()) if chunk.numel() else -1


def _batch_chunk(chunk, sample_B1, num_chunks, no_chunk):
    """Return chunk ids that are unique over the batch, `no_chunk` for positions without a chunk."""
    return torch.where(chunk >= 0, chunk + sample_B1 * num_chunks, no_chunk)
