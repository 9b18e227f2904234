"""Plan tiles: cut the positions of a batch into pieces of which the logits fit into memory.

A tile holds whole chunks, and positions that only predict text.  The student's logits of a tile
exist at a time, the loss works on one sub-tile of it after the other, and the teacher's logits
exist for blocks of sub-tiles.  tiles.py computes a loss so.

Shapes: B samples; S, T student and teacher positions of a batch; n, m those of a tile or sub-tile;
N those of all tiles.

Needs torch only.  Copy it beside tiles.py.  Tests: tests/test_tiles.py.
License: Apache-2.0 (see LICENSE).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIB = 2**20  # bytes
LOGIT_BYTES = 4  # the planner counts float32, whatever the model computes in: losses make that


class SubTileBudget(NamedTuple):
    """Divide the memory between one sub-tile and the logits of the whole tile.

    memory_fraction: fraction of the memory for everything that a loss allocates for one sub-tile.
    live_copies: how often the logits of the sub-tile are in memory at the peak of the loss, beside
        those of the tile.
    """

    memory_fraction: float
    live_copies: float


# A CPU gains from large tiles, which multiply faster; a GPU from few, large calls.  The losses, in
# plain torch, keep two to eight copies of what they compare.
CPU_SUB_TILES = SubTileBudget(memory_fraction=0.28, live_copies=8)
GPU_SUB_TILES = SubTileBudget(memory_fraction=0.7, live_copies=8)
# Positions whose teacher logits exist at a time, per student position of the tile.  Measured on two
# CPU cores: with half of a tile (300 positions) the teacher's matmul takes 1.2 times as long as in
# one piece, with three quarters (386 positions) 1.02 times.
TEACHER_ROWS_PER_STUDENT_ROW = 0.75

# --- tiles ----------------------------------------------------------------------------------------


class SubTile(NamedTuple):
    """Describe what a loss sees at a time: whole chunks, and positions that only predict text.

    student_slice: positions of the sub-tile within the student logits of its tile.
    teacher_slice: positions of the sub-tile within the teacher logits that exist (see below).
    student_labels: (n,) int64, the token that each student position predicts, -100 for none.
    teacher_labels: (m,) int64, the token that each teacher position predicts.
    student_chunk, teacher_chunk: (n,), (m,) int64, chunks numbered within the sub-tile, -1: none.
    terms: whatever else the loss knows from the ids.
    weight: (n,) float, weight of the terms that begin at each student position; None: 1.
    teacher_positions: int64 positions of the flattened (B * T); compute their teacher logits before
        this sub-tile, for it and those that follow.  None: the teacher logits that exist suffice.
    on_policy: the student wrote its text, which is compared with the teacher, but not imitated.
    policy: (n,) float, weight of each label's log-probability in a reward; None: there is none.
    """

    student_slice: slice
    teacher_slice: slice
    student_labels: Tensor
    teacher_labels: Tensor
    student_chunk: Tensor
    teacher_chunk: Tensor
    terms: Any = None
    weight: Tensor | None = None
    teacher_positions: Tensor | None = None
    on_policy: bool = False
    policy: Tensor | None = None


class Tile(NamedTuple):
    """Describe positions whose student logits exist at the same time.

    student_positions: (n,) int64 positions of the flattened (B * S).
    sub_tiles: the sub-tiles that make up the tile, in order.
    largest_fetch: most `SubTile.teacher_positions` in it, which costs time to look up.
    """

    student_positions: Tensor
    sub_tiles: Sequence[SubTile]
    largest_fetch: int

    @property
    def fetches(self) -> list[Tensor]:
        """Return all `SubTile.teacher_positions` of the tile, in order."""
        fetches = []
        for sub_tile in self.sub_tiles:
            if sub_tile.teacher_positions is not None:
                fetches.append(sub_tile.teacher_positions)
        return fetches


def plan_tiles(
    student_labels_BS: Tensor,
    student_chunk_BS: Tensor,
    teacher_labels_BT: Tensor,
    teacher_chunk_BT: Tensor,
    vocab_sizes: tuple[int, int],
    memory_mib: float = 512.0,
    *,
    sub_tiles: SubTileBudget = GPU_SUB_TILES,
    teacher_context: bool = False,
) -> list[Tile]:
    """Cut a batch into tiles; meant for the CPU, where the ids come from.

    Leaves out student positions that predict nothing and teacher positions outside of chunks.

    Args:
        student_labels_BS: (B, S) int64, -100 for none.
        student_chunk_BS, teacher_chunk_BT: (B, S), (B, T) int64, shifted chunk ids, -1 for none;
            the tokens of a chunk are neighbors.
        teacher_labels_BT: (B, T) int64.
        vocab_sizes: V and W.
        memory_mib: MiB for the logits of a tile and what a loss allocates for them; a tile has at
            least one chunk, however large.  inf: one tile of one sub-tile.
        sub_tiles: CPU_SUB_TILES or GPU_SUB_TILES.  Small sub-tiles leave room for
            large tiles; large ones need fewer calls.
        teacher_context: a sub-tile also has the teacher position before and that after each of its
            chunks, in the same row; those in none of its chunks have chunk -1.
    """
    student, teacher = _number_units(
        student_labels_BS, student_chunk_BS, teacher_labels_BT, teacher_chunk_BT
    )
    # Three cuts of the same units: tiles by the student's logits, sub-tiles within a tile by the
    # logits of both, and blocks of whole sub-tiles, across tiles, by the teacher's logits.
    student_mib = _cumulative_mib(student, vocab_sizes[0] * LOGIT_BYTES)
    teacher_mib = _cumulative_mib(teacher, vocab_sizes[1] * LOGIT_BYTES)
    limits = _memory_limits(student, teacher, vocab_sizes, memory_mib, sub_tiles)
    tile_spans = _split(student_mib, _Span(0, student.num_units), limits.student_tile)
    spans_of_tile = []
    for tile_span in tile_spans:
        spans_of_tile.append(_split(student_mib + teacher_mib, tile_span, limits.sub_tile))
    all_spans = [span for spans in spans_of_tile for span in spans]
    block_of = _group_into_blocks(teacher_mib, all_spans, limits.teacher_block)
    in_block = torch.zeros(0, dtype=torch.long)
    tiles = []
    for tile_span, spans in zip(tile_spans, spans_of_tile):
        planned = []
        for span in spans:
            sub_tile = _make_sub_tile(student, teacher, span, tile_span, block_of[span.first])
            if teacher_context:
                if sub_tile.teacher_positions is not None:
                    in_block = _neighbors(sub_tile.teacher_positions, teacher_labels_BT.shape[1])
                positions = teacher.position_N[teacher.entries(span)]
                sub_tile = _with_context(sub_tile, positions, in_block, teacher_labels_BT)
            planned.append(sub_tile)
        positions = student.position_N[student.entries(tile_span)]
        fetches = [sub_tile.teacher_positions for sub_tile in planned]
        largest_fetch = max([len(fetch) for fetch in fetches if fetch is not None], default=0)
        tiles.append(Tile(positions, tuple(planned), largest_fetch))
    return tiles


class _Span(NamedTuple):
    """Denote the units first..end-1; a unit is a chunk, or a student position outside of chunks."""

    first: int
    end: int


class _UnitPositions(NamedTuple):
    """List the positions of one model that tiles contain, unit by unit.

    position_N: (N,) int64 positions of the flattened batch.
    label_N: (N,) int64, the token that each position predicts.
    unit_N: (N,) int64, sorted; -1, which comes first: a teacher chunk without a student position.
    in_chunk_N: (N,) bool.
    starts: (units + 1,) int64, the first entry of every unit and, last, N.
    """

    position_N: Tensor
    label_N: Tensor
    unit_N: Tensor
    in_chunk_N: Tensor
    starts: Tensor

    @property
    def num_units(self) -> int:
        return len(self.starts) - 1

    def entries(self, span: _Span, origin: int = 0) -> slice:
        """Return where the entries of these units lie, counted from `origin`."""
        return slice(int(self.starts[span.first]) - origin, int(self.starts[span.end]) - origin)

    def local_chunk(self, span: _Span) -> Tensor:
        """Number the chunks of these units from 0; -1 outside of chunks."""
        entries = self.entries(span)
        return torch.where(self.in_chunk_N[entries], self.unit_N[entries] - span.first, -1)


def _number_units(
    student_labels_BS: Tensor,
    student_chunk_BS: Tensor,
    teacher_labels_BT: Tensor,
    teacher_chunk_BT: Tensor,
) -> tuple[_UnitPositions, _UnitPositions]:
    """Number the units in the student's order and list the positions of student and teacher."""
    # Chunk ids begin anew in every sample; keys are unique in the batch.
    keys_per_sample = 1 + max(_largest(student_chunk_BS), _largest(teacher_chunk_BT))
    student_key = _batch_keys(student_chunk_BS, keys_per_sample)
    teacher_key = _batch_keys(teacher_chunk_BT, keys_per_sample)
    predicts = (student_labels_BS.reshape(-1) != -100) | (student_key >= 0)
    student_position = predicts.nonzero().squeeze(1)
    teacher_position = (teacher_key >= 0).nonzero().squeeze(1)
    student_key = student_key[student_position]
    teacher_key = teacher_key[teacher_position]

    # The tokens of a chunk are neighbors: a unit begins wherever the key changes or there is none.
    begins = torch.ones_like(student_key, dtype=torch.bool)
    begins[1:] = (student_key[1:] != student_key[:-1]) | (student_key[1:] < 0)
    student_unit = begins.cumsum(0) - 1
    num_units = int(student_unit[-1]) + 1 if len(student_unit) else 0

    # Key -1 writes to the last entry, which no chunk uses; it is cleared afterwards.
    num_samples = student_labels_BS.shape[0]
    unit_of_key = torch.full((num_samples * keys_per_sample + 1,), -1)
    unit_of_key[student_key] = student_unit
    unit_of_key[-1] = -1
    # Stable: within a unit the teacher's positions keep their order.
    teacher_unit, order = unit_of_key[teacher_key].sort(stable=True)
    teacher_position = teacher_position[order]

    student = _UnitPositions(
        position_N=student_position,
        label_N=student_labels_BS.reshape(-1)[student_position],
        unit_N=student_unit,
        in_chunk_N=student_key >= 0,
        starts=_starts(student_unit, num_units),
    )
    teacher = _UnitPositions(
        position_N=teacher_position,
        label_N=teacher_labels_BT.reshape(-1)[teacher_position],
        unit_N=teacher_unit,
        in_chunk_N=torch.ones_like(teacher_unit, dtype=torch.bool),
        starts=_starts(teacher_unit, num_units),
    )
    return student, teacher


def _largest(chunk_BX: Tensor) -> int:
    return int(chunk_BX.max()) if chunk_BX.numel() else -1


def _batch_keys(chunk_BX: Tensor, keys_per_sample: int) -> Tensor:
    """Return (B * X,) chunk ids that are unique in the batch, -1 for none."""
    first_key = keys_per_sample * torch.arange(len(chunk_BX))[:, None]
    return torch.where(chunk_BX >= 0, chunk_BX + first_key, -1).reshape(-1)


def _starts(unit_N: Tensor, num_units: int) -> Tensor:
    """Return (units + 1,) the first entry of every unit and, last, N."""
    return torch.searchsorted(unit_N, torch.arange(num_units + 1))


def _cumulative_mib(positions: _UnitPositions, row_bytes: int) -> Tensor:
    """Return (units + 1,) float64: MiB of the logits of all units before each one."""
    return positions.starts.double() * row_bytes / MIB


class _Limits(NamedTuple):
    """Bound what exists at a time, in MiB of logits."""

    student_tile: float
    teacher_block: float
    sub_tile: float


def _memory_limits(
    student: _UnitPositions,
    teacher: _UnitPositions,
    vocab_sizes: tuple[int, int],
    memory_mib: float,
    sub_tiles: SubTileBudget,
) -> _Limits:
    """Divide the memory between the logits of a tile, the teacher's block and one sub-tile."""
    if memory_mib == float("inf"):
        return _Limits(memory_mib, memory_mib, memory_mib)
    student_vocab, teacher_vocab = vocab_sizes
    teacher_rows = len(teacher.position_N) / max(1, len(student.position_N))
    teacher_rows = min(TEACHER_ROWS_PER_STUDENT_ROW, teacher_rows)
    # Both kinds of logits fill their limits equally fast; what one does not need goes to the other.
    student_fraction = student_vocab / (student_vocab + teacher_vocab * teacher_rows)
    logits_fraction = 1 - sub_tiles.memory_fraction
    return _Limits(
        student_tile=logits_fraction * student_fraction * memory_mib,
        teacher_block=logits_fraction * (1 - student_fraction) * memory_mib,
        sub_tile=sub_tiles.memory_fraction / sub_tiles.live_copies * memory_mib,
    )


def _split(cumulative_mib: Tensor, span: _Span, limit: float) -> list[_Span]:
    """Cut a span so that no piece of several units has more than `limit` MiB."""
    pieces = []
    first = span.first
    while first < span.end:
        end = int(torch.searchsorted(cumulative_mib, cumulative_mib[first] + limit, right=True)) - 1
        end = min(span.end, max(first + 1, end))  # at least one unit, however large
        pieces.append(_Span(first, end))
        first = end
    return pieces


def _group_into_blocks(teacher_mib: Tensor, spans: list[_Span], limit: float) -> dict[int, _Span]:
    """Group neighboring sub-tiles whose teacher logits are computed together.

    Returns:
        {first unit of a sub-tile: all units of its block}.
    """
    ends = torch.tensor([0] + [span.end for span in spans])
    block_of = {}
    for group in _split(teacher_mib[ends], _Span(0, len(spans)), limit):
        members = spans[group.first : group.end]
        block = _Span(members[0].first, members[-1].end)
        for span in members:
            block_of[span.first] = block
    return block_of


def _make_sub_tile(
    student: _UnitPositions, teacher: _UnitPositions, span: _Span, tile: _Span, block: _Span
) -> SubTile:
    """Describe the sub-tile of some units.

    Args:
        span, tile, block: units of the sub-tile, of its tile, and of its block of teacher logits.
    """
    # The first sub-tile of a block lets the teacher's logits of the whole block be computed.
    begins_block = span.first == block.first
    return SubTile(
        student_slice=student.entries(span, origin=int(student.starts[tile.first])),
        teacher_slice=teacher.entries(span, origin=int(teacher.starts[block.first])),
        student_labels=student.label_N[student.entries(span)],
        teacher_labels=teacher.label_N[teacher.entries(span)],
        student_chunk=student.local_chunk(span),
        teacher_chunk=teacher.local_chunk(span),
        teacher_positions=teacher.position_N[teacher.entries(block)] if begins_block else None,
    )


def _with_context(
    sub_tile: SubTile, position_m: Tensor, in_block: Tensor, labels_BT: Tensor
) -> SubTile:
    """Add to a sub-tile the teacher positions around its chunks.

    Chunks are in the same order on both sides, so its positions are neighbors among the block's.

    Args:
        position_m: teacher positions of the sub-tile; in_block: those of its block, with context.
    """
    first, end = 0, 0
    if len(position_m):
        width = labels_BT.shape[1]
        lowest, highest = map(int, position_m.aminmax())
        needed = torch.tensor([lowest - (lowest % width > 0),
                               highest + (highest % width < width - 1)])
        first, last = torch.searchsorted(in_block, needed).tolist()
        end = last + 1
    positions = in_block[first:end]
    chunk = torch.full_like(positions, -1)
    chunk[torch.searchsorted(positions, position_m)] = sub_tile.teacher_chunk
    return sub_tile._replace(
        teacher_slice=slice(first, end),
        teacher_labels=labels_BT.reshape(-1)[positions],
        teacher_chunk=chunk,
        teacher_positions=None if sub_tile.teacher_positions is None else in_block,
    )


def _neighbors(position_N: Tensor, width: int) -> Tensor:
    """Return, sorted, these positions and those before and after them in the same row."""
    row_N = position_N // width
    around = [position_N]
    for shift in (-1, 1):
        neighbor = position_N + shift
        around.append(neighbor[(neighbor >= 0) & (neighbor // width == row_N)])
    distinct: Tensor = torch.unique_consecutive(torch.cat(around).sort().values)
    return distinct
