"""Compute any loss from hidden states, tile by tile, so that no (S, V) or (T, W) tensor exists.

Two models with vocabularies of 128k and 152k tokens need 2 GiB each for the float32 logits of 4096
tokens, and a plain loss keeps several copies.  This file cuts the positions into tiles of whole
chunks (`plan_tiles`) and walks over them once (`tiled_loss`):

1. For each tile, compute the student's logits.
2. For each sub-tile, compute the loss and its gradient, which overwrites the student's logits.
3. From that, add the tile's contribution to the gradients of the hidden states and the head.

The teacher's logits exist for fewer positions at a time; they are computed whenever the next
sub-tile needs more (`TeacherBlocks`).  Between forward and backward only the gradients are kept,
and backward only scales them.

Shapes: B samples; S, T student and teacher positions of a batch, flattened; n, m those of a tile or
sub-tile; V, W vocabularies; H hidden size; R rank of an adapter; K cached entries; J losses.

Needs torch only.  Copy this file into your own repository.  Tests: tests/test_tiles.py.
License: Apache-2.0 (see LICENSE).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

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
# plain torch, keep about eight copies of what they compare.
CPU_SUB_TILES = SubTileBudget(memory_fraction=0.28, live_copies=8)
GPU_SUB_TILES = SubTileBudget(memory_fraction=0.5, live_copies=8)
# Positions whose teacher logits exist at a time, per student position of the tile.  Measured on two
# CPU cores: with half of a tile (300 positions) the teacher's matmul takes 1.2 times as long as in
# one piece, with three quarters (386 positions) 1.02 times.
TEACHER_ROWS_PER_STUDENT_ROW = 0.75
# Vocabulary rows of the head's gradient that are added at a time in half precision.  Not tuned.
GRADIENT_BLOCK = 8192
# Devices whose matmuls may read half precision and add to float32, see `has_mixed_matmul`.
MIXED_MATMULS = ("cuda",)


# --- heads ----------------------------------------------------------------------------------------


class Head(NamedTuple):
    """Map hidden states to logits: softcap(scale * (h weight^T + bias + (h down^T) up^T)).

    weight_VH: (V, H).
    bias_V: (V,) or None.
    down_RH, up_VR: (R, H), (V, R), a low-rank adapter with its factor in `up`; or None.
    scale: factor of the logits.
    softcap: c of c * tanh(logits / c); 0: none.
    vocab: the first `vocab` rows are tokens; 0: all rows are.  The others are padding, which gets
        no logit and gradient 0.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    down_RH: Tensor | None = None
    up_VR: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    vocab: int = 0

    @property
    def tokens(self) -> int:
        """Return V, the number of tokens that get a logit."""
        return self.vocab or len(self.weight_VH)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return weight, bias, down and up, in the order of `with_tensors`."""
        return self.weight_VH, self.bias_V, self.down_RH, self.up_VR

    def with_tensors(
        self, weight_VH: Tensor, bias_V: Tensor | None, down_RH: Tensor | None, up_VR: Tensor | None
    ) -> "Head":
        """Return this head with other tensors; scale, soft-cap and vocabulary stay."""
        return self._replace(weight_VH=weight_VH, bias_V=bias_V, down_RH=down_RH, up_VR=up_VR)

    def linear(self, hidden_NH: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Compute the linear part of the logits, before scale and soft-cap.

        Args:
            hidden_NH: (N, H); its dtype is that of the result.
            buffer: 1-d, at least N * V numbers to write the result into; not with gradients.
        Returns:
            (N, V).
        """
        dtype = hidden_NH.dtype
        vocab = self.tokens
        # Padding rows are cut off before the matmul, so that no softmax ever sees them.
        out = None
        if buffer is not None:
            out = buffer[: len(hidden_NH) * vocab].view(-1, vocab)
        out = torch.mm(hidden_NH, self.weight_VH[:vocab].to(dtype).T, out=out)
        if self.bias_V is not None:
            out += self.bias_V[:vocab].to(dtype)
        if self.down_RH is not None and self.up_VR is not None:
            # (h down^T) first: N * R numbers, while up @ down would be as large as the weight.
            low_rank_NR = hidden_NH @ self.down_RH.to(dtype).T
            out += low_rank_NR @ self.up_VR[:vocab].to(dtype).T
        return out

    def finish(self, linear_NV: Tensor) -> Tensor:
        """Apply scale and soft-cap; return the same tensor if the head has neither."""
        out = linear_NV if self.scale == 1 else linear_NV * self.scale
        if not self.softcap:
            return out
        return self.softcap * torch.tanh(out / self.softcap)

    def columns(self, ids: Tensor) -> "Head":
        """Return the head of these token ids alone."""
        return self._replace(
            weight_VH=self.weight_VH[ids],
            bias_V=None if self.bias_V is None else self.bias_V[ids],
            up_VR=None if self.up_VR is None else self.up_VR[ids],
            vocab=0,
        )


def head_of(model: Any, vocab: int) -> Head:
    """Read the head of a Hugging Face causal language model.

    Takes the output embeddings, low-rank adapters of peft included, and final_logit_softcapping,
    logits_scaling and logit_scale of the config.  Compare its logits with the model's own once: an
    architecture may do more to its logits than this function knows.

    Args:
        model: has `get_output_embeddings()` and `config`.
        vocab: the tokenizer's size; rows beyond it are padding.
    """
    layer = model.get_output_embeddings()
    config = model.config
    if hasattr(config, "get_text_config"):  # a model that reads images has one for each part
        config = config.get_text_config()
    down = up = None
    if hasattr(layer, "lora_A") and len(layer.lora_A):
        adapter = next(iter(layer.lora_A))  # peft allows several; training has one
        down = layer.lora_A[adapter].weight
        up = layer.lora_B[adapter].weight * layer.scaling[adapter]
    layer = getattr(layer, "base_layer", layer)  # peft wraps the original layer
    # Granite divides its logits (logits_scaling), Cohere multiplies them (logit_scale).
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Head(
        weight_VH=layer.weight,
        bias_V=layer.bias,
        down_RH=down,
        up_VR=up,
        scale=(getattr(config, "logit_scale", None) or 1.0) / divisor,
        softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        vocab=vocab,
    )


# --- where logits come from -----------------------------------------------------------------------


class LogitsSource(Protocol):
    """Give the logits of any positions of a batch on request."""

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the (n, V) logits of (n,) int64 positions of the flattened batch."""
        ...

    def columns(self, ids: Tensor) -> "LogitsSource":
        """Return a source of the logits of these token ids alone; `ids` is sorted."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the bytes that the source occupies until a loss reads it, the head not counted."""
        ...


class HiddenLogits(NamedTuple):
    """Compute logits from final hidden states and a head.

    hidden_TH: (T, H).
    head: Head.
    buffer: 1-d, where every call writes its logits, over those of the call before; None: each call
        allocates memory of its own.
    """

    hidden_TH: Tensor
    head: Head
    buffer: Tensor | None = None

    def __call__(self, positions: Tensor) -> Tensor:
        hidden_NH = self.hidden_TH.index_select(0, positions)
        return self.head.finish(self.head.linear(hidden_NH, self.buffer))

    def columns(self, ids: Tensor) -> "HiddenLogits":
        return self._replace(head=self.head.columns(ids))

    def with_buffer(self, max_positions: int) -> "HiddenLogits":
        """Return this source with a buffer for calls of at most `max_positions` positions."""
        return self._replace(buffer=self.hidden_TH.new_empty(max_positions * self.head.tokens))

    @property
    def nbytes(self) -> int:
        buffer_bytes = 0 if self.buffer is None else self.buffer.nbytes
        return self.hidden_TH.nbytes + buffer_bytes

    @property
    def values(self) -> Tensor:
        """Return the (T, H) hidden states: what a position contributes, whatever the source."""
        return self.hidden_TH

    def with_values(self, values_TH: Tensor) -> "HiddenLogits":
        """Return this source over other hidden states."""
        return self._replace(hidden_TH=values_TH)


class StoredLogits(NamedTuple):
    """Look logits up where all of them, (T, W), exist."""

    logits_TW: Tensor

    def __call__(self, positions: Tensor) -> Tensor:
        return self.logits_TW.index_select(0, positions)

    def columns(self, ids: Tensor) -> "StoredLogits":
        return StoredLogits(self.logits_TW.index_select(1, ids))

    @property
    def nbytes(self) -> int:
        return self.logits_TW.nbytes

    @property
    def values(self) -> Tensor:
        """Return the (T, W) logits: what a position contributes, whatever the source."""
        return self.logits_TW

    def with_values(self, values_TW: Tensor) -> "StoredLogits":
        """Return a source of other logits."""
        return StoredLogits(values_TW)


class ShardedLogits(NamedTuple):
    """Look logits up in shards of the vocabulary, [(T, W_i)], that several ranks computed."""

    shards: tuple[Tensor, ...]

    def __call__(self, positions: Tensor) -> Tensor:
        return torch.cat([shard.index_select(0, positions) for shard in self.shards], 1)

    def columns(self, ids: Tensor) -> StoredLogits:
        # Sorted ids lie in the shards in order, so concatenation keeps their order.
        columns = []
        first = 0
        for shard in self.shards:
            end = first + shard.shape[1]
            ids_in_shard = ids[(ids >= first) & (ids < end)] - first
            columns.append(shard.index_select(1, ids_in_shard))
            first = end
        return StoredLogits(torch.cat(columns, 1))

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class TopKLogits(NamedTuple):
    """Rebuild rows of logits from K tokens per position and one event for all others.

    A row has W + 1 columns: -inf for tokens that are not kept, and in the last column, which is no
    token, all of these together.  Nothing is known of them one by one, so nothing is guessed.

    ids_TK: (T, K) integer token ids; repeated ones have equal values.
    logp_TK: (T, K) log-probabilities, in nats.
    vocab: W.
    rest_T: (T,) log-probability of all other tokens together; -inf: there is none.
    total_T: (T,) logsumexp of the original logits; the result is logits then.  None: the result is
        log-probabilities.
    """

    ids_TK: Tensor
    logp_TK: Tensor
    vocab: int
    rest_T: Tensor
    total_T: Tensor | None = None

    def __call__(self, positions: Tensor) -> Tensor:
        ids = self.ids_TK.index_select(0, positions).long()
        logp = self.logp_TK.index_select(0, positions).float()
        logits = logp.new_full((len(positions), self.vocab + 1), -torch.inf)
        logits.scatter_(1, ids, logp)
        logits[:, self.vocab] = self.rest_T.index_select(0, positions)
        if self.total_T is None:
            return logits
        return logits.add_(self.total_T.index_select(0, positions)[:, None])

    def columns(self, ids: Tensor) -> "SelectedColumns":
        """Return a source of the logits of these token ids, and of the event in the last column."""
        return SelectedColumns(self, torch.cat([ids, ids.new_tensor([self.vocab])]))

    @property
    def nbytes(self) -> int:
        total_bytes = 0 if self.total_T is None else self.total_T.nbytes
        return self.ids_TK.nbytes + self.logp_TK.nbytes + self.rest_T.nbytes + total_bytes


class SelectedColumns(NamedTuple):
    """Compute all logits of a source at every call and keep some columns of them.

    source: a source whose tensors cannot be restricted to some columns beforehand.
    ids: (n,) int64 token ids, sorted.
    """

    source: LogitsSource
    ids: Tensor

    def __call__(self, positions: Tensor) -> Tensor:
        return self.source(positions).index_select(1, self.ids)

    def columns(self, ids: Tensor) -> "SelectedColumns":
        return SelectedColumns(self.source, self.ids[ids])

    @property
    def nbytes(self) -> int:
        return self.source.nbytes


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


class Tile(NamedTuple):
    """Describe positions whose student logits exist at the same time.

    student_positions: (n,) int64 positions of the flattened (B * S).
    sub_tiles: the sub-tiles that make up the tile, in order.
    largest_fetch: most `SubTile.teacher_positions` in it, which may cost time to look up; None: not
        known.
    """

    student_positions: Tensor
    sub_tiles: Sequence[SubTile]
    largest_fetch: int | None = None

    @property
    def fetches(self) -> list[Tensor]:
        """Return all `SubTile.teacher_positions` of the tile, in order."""
        fetches = []
        for sub_tile in self.sub_tiles:
            if sub_tile.teacher_positions is not None:
                fetches.append(sub_tile.teacher_positions)
        return fetches


# (student logits (n, V), teacher logits (m, W) or None, sub-tile) -> (J,) sums
TileLoss = Callable[[Tensor, Tensor | None, SubTile], Tensor]


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
    all_spans = []
    for tile_span in tile_spans:
        spans = _split(student_mib + teacher_mib, tile_span, limits.sub_tile)
        spans_of_tile.append(spans)
        all_spans.extend(spans)
    block_of = _group_into_blocks(teacher_mib, all_spans, limits.teacher_block)
    tiles = []
    for tile_span, spans in zip(tile_spans, spans_of_tile):
        planned = []
        for span in spans:
            sub_tile = _make_sub_tile(student, teacher, span, tile_span, block_of[span.first])
            if teacher_context:
                sub_tile = _with_context(
                    sub_tile, teacher, span, block_of[span.first], teacher_labels_BT
                )
            planned.append(sub_tile)
        positions = student.position_N[student.entries(tile_span)]
        tile = Tile(positions, tuple(planned))
        tiles.append(tile._replace(largest_fetch=max(map(len, tile.fetches), default=0)))
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
    starts: the first entry of every unit and, last, N.
    """

    position_N: Tensor
    label_N: Tensor
    unit_N: Tensor
    in_chunk_N: Tensor
    starts: list[int]

    @property
    def num_units(self) -> int:
        return len(self.starts) - 1

    def entries(self, span: _Span, origin: int = 0) -> slice:
        """Return where the entries of these units lie, counted from `origin`."""
        return slice(self.starts[span.first] - origin, self.starts[span.end] - origin)

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
    """Return the largest chunk id of a batch, -1 for none."""
    return int(chunk_BX.max()) if chunk_BX.numel() else -1


def _batch_keys(chunk_BX: Tensor, keys_per_sample: int) -> Tensor:
    """Return (B * X,) chunk ids that are unique in the batch, -1 for none."""
    first_key = keys_per_sample * torch.arange(len(chunk_BX))[:, None]
    return torch.where(chunk_BX >= 0, chunk_BX + first_key, -1).reshape(-1)


def _starts(unit_N: Tensor, num_units: int) -> list[int]:
    """Return the first entry of every unit and, last, N."""
    starts: list[int] = torch.searchsorted(unit_N, torch.arange(num_units + 1)).tolist()
    return starts


def _cumulative_mib(positions: _UnitPositions, row_bytes: int) -> Tensor:
    """Return (units + 1,) float64: MiB of the logits of all units before each one."""
    starts = torch.tensor(positions.starts)
    return starts.double() * row_bytes / MIB


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
        student_slice=student.entries(span, origin=student.starts[tile.first]),
        teacher_slice=teacher.entries(span, origin=teacher.starts[block.first]),
        student_labels=student.label_N[student.entries(span)],
        teacher_labels=teacher.label_N[teacher.entries(span)],
        student_chunk=student.local_chunk(span),
        teacher_chunk=teacher.local_chunk(span),
        teacher_positions=teacher.position_N[teacher.entries(block)] if begins_block else None,
    )


def _with_context(
    sub_tile: SubTile, teacher: _UnitPositions, span: _Span, block: _Span, labels_BT: Tensor
) -> SubTile:
    """Add to a sub-tile the teacher positions around its chunks.

    Chunks are in the same order on both sides, so its positions are neighbors among the block's.
    """
    own = teacher.position_N[teacher.entries(span)]
    in_block = _neighbors(teacher.position_N[teacher.entries(block)], labels_BT.shape[1])
    needed = _neighbors(own, labels_BT.shape[1])
    first, end = 0, 0
    if len(needed):
        first = int(torch.searchsorted(in_block, needed[0]))
        end = int(torch.searchsorted(in_block, needed[-1])) + 1
    positions = in_block[first:end]
    chunk = torch.full_like(positions, -1)
    chunk[torch.searchsorted(positions, own)] = sub_tile.teacher_chunk
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


class TeacherBlocks:
    """Give the teacher's logits of one sub-tile after the other.

    The logits of several sub-tiles are computed together and overwrite those before.

    Args:
        logits: the teacher's logits of any positions.
        tiles: the tiles, in the order in which they will be asked for.
    Attributes:
        block: the (m, W) logits that exist, None before the first call.
    """

    def __init__(self, logits: LogitsSource, tiles: Sequence[Tile]) -> None:
        # One buffer for all blocks; the other sources allocate at every fetch.
        if isinstance(logits, HiddenLogits):
            largest = 0
            for tile in tiles:
                of_tile = tile.largest_fetch
                if of_tile is None:
                    of_tile = max(map(len, tile.fetches), default=0)
                largest = max(largest, of_tile)
            logits = logits.with_buffer(largest)
        self.logits = logits
        self.tiles = tiles
        self.block: Tensor | None = None

    @property
    def fetches(self) -> list[Tensor]:
        """Return all `SubTile.teacher_positions` of the tiles, in order."""
        fetches = []
        for tile in self.tiles:
            fetches.extend(tile.fetches)
        return fetches

    def __call__(self, sub_tile: SubTile) -> Tensor:
        """Return the (m, W) logits of a sub-tile; valid until the next call."""
        if sub_tile.teacher_positions is not None:
            self.fetch(sub_tile.teacher_positions)
        assert self.block is not None, "the first sub-tile has to name its teacher positions"
        return self.block[sub_tile.teacher_slice]

    def fetch(self, positions: Tensor) -> Tensor:
        """Compute the (m, W) logits of these positions, in place of those that exist."""
        self.block = None  # free the old block first: two never exist
        self.block = self.logits(positions)
        return self.block


# --- the loss -------------------------------------------------------------------------------------


class LossPart(NamedTuple):
    """Describe what one teacher, or the text alone, adds to the loss of a micro-batch.

    student_hidden: (..., H) final hidden states, the input of the head.
    teacher_logits: source of the teacher's logits; None: there is no teacher.
    tile_loss: (student logits (n, V), teacher logits (m, W) or None, sub-tile) -> (J,) sums,
        differentiable in the student logits.
    tiles: from `plan_tiles`, on the device of the hidden states.
    weights: J factors; the part of the loss is sum_j weights[j] * sums[j].
    """

    student_hidden: Tensor
    teacher_logits: LogitsSource | None
    tile_loss: TileLoss
    tiles: Sequence[Tile]
    weights: Sequence[float]


def tiled_loss(
    student_hidden: Tensor,
    student_head: Head,
    teacher_logits: LogitsSource | None,
    tile_loss: TileLoss,
    tiles: Sequence[Tile],
    weights: Sequence[float],
    *,
    params: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Compute the weighted sum of some losses over all tiles.

    Args:
        student_head: Head; frozen tensors in it get no gradient.
        params: further tensors that get a gradient, such as a learned projection.
        Others: see `LossPart`.
    Returns:
        (loss, sums): () and (J,) float32; `sums` has no gradient.
    Raises:
        RuntimeError: in a second backward pass, because the first one gives the gradients away.
    """
    part = LossPart(student_hidden, teacher_logits, tile_loss, tiles, weights)
    loss, [sums_J] = tiled_losses(student_head, [part], params)
    return loss, sums_J


class GradientWindow:
    """Add up the gradient of a head's weight over the micro-batches of an optimizer step.

    The sum is float32 and goes to autograd once, in the backward pass of the micro-batch for which
    `hands_over` was set before; in the others the weight takes no part in the graph.  Meanwhile it
    is in memory, 4 bytes a weight.  What else uses the weight (a tied embedding) has a gradient of
    its own as ever.

        window = GradientWindow()
        for number, micro_batch in enumerate(micro_batches):
            window.hands_over = number == len(micro_batches) - 1
            loss, _ = tiled_losses(head, parts, window=window)
            (loss / len(micro_batches)).backward()

    All backward passes have to multiply by the same factor (here 1 / len(micro_batches)); if one
    does not, or if it is not finite, the gradient is NaN.  Use a new window after an error.
    """

    def __init__(self) -> None:
        self.hands_over = False
        self.gradient: _WeightGradient | None = None
        self.scale = 1.0  # the gradient is in units of this
        self.num_calls = 0
        self.factors: list[Tensor] = []

    def note_factor(self, factor: Tensor) -> None:
        """Note the factor of a backward pass, a () tensor."""
        self.factors.append(factor)

    def common_factor(self) -> Tensor:
        """Return the factor of all backward passes, NaN if they differ; begin anew.

        Raises:
            RuntimeError: a call had no backward pass, so its part should not be in the sum.
        """
        if len(self.factors) != self.num_calls:
            raise RuntimeError(
                f"GradientWindow: {self.num_calls} calls of tiled_losses, but {len(self.factors)} "
                "backward passes; run one after each call, and use a new window after an error"
            )
        factor = self.factors[-1]
        for other in self.factors[:-1]:
            factor = torch.where(other == factor, factor, torch.nan)
        self.num_calls = 0
        self.factors = []
        return factor


def tiled_losses(
    student_head: Head, parts: Sequence[LossPart], params: Sequence[Tensor] = (),
    window: GradientWindow | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the sum of several parts of a loss, with one gradient of the head for all of them.

    The gradient of a large head is what a loss reads and writes most: it exists once, however many
    teachers there are.

    Args:
        parts: LossParts, at least one.
        window: adds up the gradient of the head's weight over several calls; None: this call alone.
        Others, Raises: see `tiled_loss`, `GradientWindow`.
    Returns:
        (loss, sums): (), and the (J,) float32 sums of every part, which have no gradient.
    """
    run = _Run(
        head=student_head,
        parts=parts,
        params=params,
        train=torch.is_grad_enabled(),  # always False inside of `_TiledLoss.forward`
        window=window if student_head.weight_VH.requires_grad else None,
    )
    hidden = [part.student_hidden for part in parts]
    weight_VH, *others = student_head.tensors
    if window is not None and not window.hands_over:
        if run.train and not any(x.requires_grad for x in hidden):
            raise ValueError("a GradientWindow needs hidden states that need a gradient")
        weight_VH = weight_VH.detach()
    loss, *sums = _TiledLoss.apply(  # type: ignore[no-untyped-call]
        run, weight_VH, *others, *params, *hidden
    )
    return loss, tuple(sums)


class _Run(NamedTuple):
    """Carry the arguments of `tiled_losses` past autograd, which looks at tensors alone."""

    head: Head
    parts: Sequence[LossPart]
    params: Sequence[Tensor]
    train: bool
    window: GradientWindow | None


class _HeadGradients:
    """Accumulate the gradients of the head and of `params`; None where an input needs none.

    Attributes:
        weight: _WeightGradient; weight_scale: by which it is divided.
        hands_over: this call returns it.
        bias_V, down_RH, up_VR, params: tensors, in at least float32.
    """

    def __init__(
        self, head: Head, params: Sequence[Tensor], needs: Sequence[bool], dtype: torch.dtype,
        scale: float, window: GradientWindow | None,
    ) -> None:
        """Set up the gradients.

        Args:
            needs: of the head's tensors and then of `params`.
            dtype: of the matmuls.
            scale: by which all gradients are divided.
            window: see `tiled_losses`; its gradient has a scale of its own.
        """
        self.weight: _WeightGradient | None = None
        self.weight_scale = scale
        if window is not None:
            if window.gradient is None:
                window.gradient = _WeightGradient(head.weight_VH, head.tokens, dtype)
                window.scale = scale
            self.weight = window.gradient
            self.weight_scale = window.scale
            window.num_calls += 1
        elif needs[0]:
            self.weight = _WeightGradient(head.weight_VH, head.tokens, dtype)
        self.hands_over = needs[0]
        if window is not None and self.hands_over:
            window.gradient = None
        self.bias_V = _zero_gradient(head.bias_V, needs[1])
        self.down_RH = _zero_gradient(head.down_RH, needs[2])
        self.up_VR = _zero_gradient(head.up_VR, needs[3])
        self.params = [_zero_gradient(x, need) for x, need in zip(params, needs[4:])]

    def in_input_order(self) -> list[Any]:
        weight = self.weight if self.hands_over else None
        if weight is not None:
            weight.finish()
        return [weight, self.bias_V, self.down_RH, self.up_VR, *self.params]


def has_mixed_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether torch multiplies half precision and adds to float32 there.

    torch >= 2.11 does for CUDA; older ones have no `out_dtype`, or want the sum in half precision.
    Without it a product of its own, in half precision, is added block by block.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and device.type in MIXED_MATMULS and _try_mixed_matmul(device, dtype)


@cache
def _try_mixed_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    factor = torch.zeros(16, 16, device=device, dtype=dtype)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, factor.T, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):  # an argument or a combination of types that is not known
        return False
    return True


class _WeightGradient:
    """Add up the gradient of the head's weight, a product for every tile, in at least float32.

    Half precision would round off what many tiles contribute.  The first product is written, not
    added, so that memory that nothing has filled yet is not read.

    Args:
        weight_VH: the weight.
        vocab: rows that are tokens; those of the padding get 0.
        computed: dtype of the matmuls; see `has_mixed_matmul`.
    Attributes:
        pieces: the sum, cut into blocks of rows; two where `scaled` has to change its precision.
    """

    def __init__(self, weight_VH: Tensor, vocab: int, computed: torch.dtype) -> None:
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        self.mixed_matmul = has_mixed_matmul(weight_VH.device, computed)
        # on a CPU one matmul is faster than two
        in_pieces = weight_VH.device.type in MIXED_MATMULS and dtype != weight_VH.dtype
        num_pieces = 2 if in_pieces else 1
        self.pieces = []
        for rows_VH in weight_VH.chunk(num_pieces):
            self.pieces.append(torch.empty_like(rows_VH, dtype=dtype))
        self.vocab = vocab
        self.is_empty = True

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def finish(self) -> None:
        """Fill in 0 where no product was written."""
        first = 0
        for piece in self.pieces:
            tokens = 0 if self.is_empty else min(len(piece), max(0, self.vocab - first))
            piece[tokens:].zero_()
            first += len(piece)

    def add_product(self, d_linear_NV: Tensor, hidden_NH: Tensor, factor: float) -> None:
        """Add factor * d_linear^T hidden."""
        first = 0
        for piece in self.pieces:
            columns = d_linear_NV[:, first : first + len(piece)]
            if columns.shape[1]:
                self._add_piece(piece[: columns.shape[1]], columns, hidden_NH, factor)
            first += len(piece)
        self.is_empty = False

    def _add_piece(self, out: Tensor, columns_NV: Tensor, hidden_NH: Tensor, factor: float) -> None:
        beta = 0 if self.is_empty else 1
        if out.dtype == columns_NV.dtype:
            out.addmm_(columns_NV.T, hidden_NH, beta=beta, alpha=factor)
            return
        if self.mixed_matmul:
            # the matmul reads and writes the sum itself: 8 bytes a weight, where a product of its
            # own, in half precision, would take 12
            torch.addmm(
                out, columns_NV.T, hidden_NH, out_dtype=out.dtype, beta=beta, alpha=factor, out=out
            )
            return
        # blocks of the vocabulary keep the product small
        for first in range(0, len(out), GRADIENT_BLOCK):
            block = columns_NV[:, first : first + GRADIENT_BLOCK]
            target = out[first : first + block.shape[1]]
            if beta == 0:
                target.copy_(block.T @ hidden_NH).mul_(factor)
            else:
                target.add_(block.T @ hidden_NH, alpha=factor)

    def scaled(self, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum times a factor in another precision; the pieces are given away.

        Two pieces of float32 are in memory, or one and all of the result, never more: this is when
        the activations of the whole model wait for their backward pass.
        """
        pieces = self.pieces
        self.pieces = []
        if len(pieces) == 1:
            return _scaled(pieces[0], factor.to(pieces[0]), dtype)
        num_rows = sum(map(len, pieces))
        first = _scaled(pieces.pop(0), factor, dtype)
        out = first.new_empty(num_rows, first.shape[1])
        out[: len(first)] = first
        torch.mul(pieces[0], factor, out=out[len(first) :])
        return out


class _TiledLoss(torch.autograd.Function):
    """Compute loss and gradients in forward; scale the gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        run: _Run,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        down_RH: Tensor | None,
        up_VR: Tensor | None,
        *others: Tensor,
    ) -> tuple[Tensor, ...]:
        params = others[: len(run.params)]
        all_hidden = others[len(run.params) :]
        # The order of the arguments; the first one, `run`, is no tensor.
        needs = [run.train and need for need in ctx.needs_input_grad[1:]]
        device_type = weight_VH.device.type
        head = run.head.with_tensors(weight_VH, bias_V, down_RH, up_VR)
        # Like torch's own matmuls, compute in the dtype of autocast where it is on.
        dtype = all_hidden[0].dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        # Weights of about 1 inside: the gradient of the logits may be float16, which holds nothing
        # below 6e-8.  Backward multiplies by the scale again.
        scales = [max(map(abs, part.weights), default=0.0) for part in run.parts]
        scale = max(scales) or 1.0
        window = run.window if run.train else None
        gradients = _HeadGradients(head, params, needs, dtype, scale, window)
        head = head.with_tensors(
            weight_VH.to(dtype), _cast(bias_V, dtype), _cast(down_RH, dtype), _cast(up_VR, dtype)
        )
        losses = []
        all_sums = []
        hidden_gradients = []
        hidden_needs = needs[len(needs) - len(run.parts) :]
        for part, hidden, part_scale, need in zip(run.parts, all_hidden, scales, hidden_needs):
            hidden_SH = hidden.reshape(-1, hidden.shape[-1])
            d_hidden_SH = _zero_gradient(hidden_SH, need)
            tile_pass = _TilePass(
                run, part, head=head, hidden_SH=hidden_SH, scale=part_scale or 1.0,
                common_scale=scale, gradients=gradients, d_hidden_SH=d_hidden_SH,
                train=any(needs) or window is not None,
            )
            for tile in part.tiles:
                tile_pass.add_tile(tile)
            losses.append(_weighted(tile_pass.sums_J, part.weights))
            all_sums.append(tile_pass.sums_J)
            hidden_gradients.append(d_hidden_SH)
        ctx.mark_non_differentiable(*all_sums)
        inputs = (weight_VH, bias_V, down_RH, up_VR, *others)
        ctx.shapes = [None if x is None else x.shape for x in inputs]
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        num_shared = len(inputs) - len(run.parts)
        ctx.scales = [scale] * num_shared + [part_scale or 1.0 for part_scale in scales]
        ctx.scales[0] = gradients.weight_scale
        ctx.window = window
        ctx.hands_over = gradients.hands_over
        # Not save_for_backward: backward hands the gradients over instead of copying them.
        ctx.gradients = [*gradients.in_input_order(), *hidden_gradients]
        return torch.stack(losses).sum(), *all_sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "tiled_loss: this is a second backward pass, but the first one gave the gradients "
                "away; call tiled_loss again"
            )
        out: list[Tensor | None] = [None]  # of `run`
        gradients = ctx.gradients
        ctx.gradients = None
        weight_factor = outer[0]
        if ctx.window is not None:
            ctx.window.note_factor(outer[0])
            if ctx.hands_over:
                weight_factor = ctx.window.common_factor()
        while gradients:  # one after the other, so that no two copies of one exist for long
            number = len(out) - 1
            gradient = gradients.pop(0)
            if gradient is not None:
                # In float32 first: a loss scale undoes a small weight without rounding to 0.
                factor = outer[0] if number else weight_factor
                factor = factor.float() * ctx.scales[number]
                dtype = ctx.dtypes[number]
                if isinstance(gradient, _WeightGradient):
                    gradient = gradient.scaled(factor, dtype)
                else:
                    gradient = _scaled(gradient, factor.to(gradient), dtype)
                gradient = gradient.view(ctx.shapes[number])
            out.append(gradient)
        return tuple(out)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor in another dtype; may overwrite the gradient."""
    if gradient.dtype == dtype or gradient.device.type == "cpu":
        return gradient.mul_(factor).to(dtype)
    # on a GPU one pass reads one precision and writes the other
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _weighted(sums_J: Tensor, weights: Sequence[float]) -> Tensor:
    """Return sum_j weights[j] * sums[j]."""
    # not a tensor of the weights: to copy it to a GPU would wait for that
    total = sums_J.new_zeros(())
    for number, weight in enumerate(weights):
        total = total + sums_J[number] * weight
    return total


def _zero_gradient(x: Tensor | None, needed: bool) -> Tensor | None:
    """Return zeros to add a gradient to, in at least float32; None if it is not needed."""
    if x is None or not needed:
        return None
    # Many tiles add to one gradient; half precision would round off small contributions.
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


class _TilePass:
    """Walk over the tiles of a part; add up the losses and the gradients.

    Args:
        run: arguments of `tiled_losses`; part: the LossPart.
        head: the student's head, in the dtype to compute in.
        hidden_SH: (S, H) the student's hidden states.
        scale: by which the weights are divided, and the gradient of the hidden states with them.
        common_scale: by which the gradients that all parts share are divided.
        gradients: where those are added to.
        d_hidden_SH: where the gradient of the hidden states is written; None: nowhere.
        train: whether any gradient is needed.
    Attributes:
        sums_J: (J,) float32 sums of the losses.
    """

    def __init__(
        self,
        run: _Run,
        part: LossPart,
        *,
        head: Head,
        hidden_SH: Tensor,
        scale: float,
        common_scale: float,
        gradients: _HeadGradients,
        d_hidden_SH: Tensor | None,
        train: bool,
    ) -> None:
        self.params = run.params
        self.tile_loss = part.tile_loss
        self.head = head
        self.hidden_SH = hidden_SH
        self.factors = [weight / scale for weight in part.weights]
        self.common_factor = scale / common_scale
        self.weight_factor = scale / gradients.weight_scale
        self.gradients = gradients
        self.d_hidden_SH = d_hidden_SH
        self.train = train
        self.dtype = head.weight_VH.dtype
        self.sums_J = torch.zeros(len(part.weights), device=hidden_SH.device)
        self.teacher: TeacherBlocks | None = None
        if part.teacher_logits is not None:
            self.teacher = TeacherBlocks(part.teacher_logits, part.tiles)
        # All tiles write into one buffer: on a CPU the first touch of fresh memory costs several
        # times what using it does.
        largest = max([len(tile.student_positions) for tile in part.tiles], default=0)
        self.buffer = hidden_SH.new_empty(largest * head.tokens, dtype=self.dtype)

    def without_autocast(self) -> torch.autocast:
        """Keep the matmuls in the dtype chosen above; only the loss itself sees autocast."""
        return torch.autocast(self.hidden_SH.device.type, enabled=False)

    def add_tile(self, tile: Tile) -> None:
        """Add the losses and the gradients of one tile."""
        hidden_NH = self.hidden_SH.index_select(0, tile.student_positions).to(self.dtype)
        with self.without_autocast():
            linear_NV = self.head.linear(hidden_NH, self.buffer)
        for sub_tile in tile.sub_tiles:
            self.add_sub_tile(linear_NV[sub_tile.student_slice], sub_tile)
        if self.train:  # linear_NV holds its gradient now
            with self.without_autocast():
                self.add_hidden_gradient(tile.student_positions, linear_NV)
                self.add_head_gradients(hidden_NH, linear_NV)

    def add_sub_tile(self, linear_NV: Tensor, sub_tile: SubTile) -> None:
        """Add the losses of one sub-tile and replace its linear logits by their gradient."""
        teacher_logits = None
        if self.teacher is not None:
            with self.without_autocast():
                teacher_logits = self.teacher(sub_tile)
        # A graph from the linear logits to the losses, built and freed here.
        d_linear_NV = None
        d_params: Sequence[Tensor | None] = ()
        with torch.set_grad_enabled(self.train):
            leaf_NV = linear_NV.detach().requires_grad_(self.train)
            student_logits = self.head.finish(leaf_NV)
            sums_J = self.tile_loss(student_logits, teacher_logits, sub_tile)
            if sums_J.requires_grad:
                loss = _weighted(sums_J, self.factors)
                inputs = [leaf_NV, *self.params]
                d_linear_NV, *d_params = torch.autograd.grad(loss, inputs, allow_unused=True)
        if d_linear_NV is not None:
            linear_NV.copy_(d_linear_NV)
        elif self.train:  # no term begins here
            linear_NV.zero_()
        self.sums_J += sums_J.detach()
        for gradient, d_param in zip(self.gradients.params, d_params):
            if gradient is not None and d_param is not None:
                gradient.add_(d_param, alpha=self.common_factor)

    def add_hidden_gradient(self, positions: Tensor, d_linear_NV: Tensor) -> None:
        """Write the gradient of the tile's hidden states; every position is in one tile."""
        if self.d_hidden_SH is None:
            return  # a frozen body
        head = self.head
        vocab = head.tokens
        d_hidden_NH = d_linear_NV @ head.weight_VH[:vocab]
        if head.down_RH is not None and head.up_VR is not None:
            d_hidden_NH += d_linear_NV @ head.up_VR[:vocab] @ head.down_RH
        # Positions that no tile contains keep the gradient 0.
        d_hidden_NH = d_hidden_NH.to(self.d_hidden_SH.dtype)
        self.d_hidden_SH.index_copy_(0, positions, d_hidden_NH)

    def add_head_gradients(self, hidden_NH: Tensor, d_linear_NV: Tensor) -> None:
        """Add the tile's contribution to the gradients of weight, bias, down and up."""
        head = self.head
        vocab = head.tokens
        factor = self.common_factor
        d_bias = self.gradients.bias_V
        d_down = self.gradients.down_RH
        d_up = self.gradients.up_VR
        if self.gradients.weight is not None:
            self.gradients.weight.add_product(d_linear_NV, hidden_NH, self.weight_factor)
        if d_bias is not None:
            d_bias[:vocab].add_(d_linear_NV.sum(0, dtype=d_bias.dtype), alpha=factor)
        if d_up is not None and head.down_RH is not None:
            d_up[:vocab].add_(d_linear_NV.T @ (hidden_NH @ head.down_RH.T), alpha=factor)
        if d_down is not None and head.up_VR is not None:
            d_down.add_((d_linear_NV @ head.up_VR[:vocab]).T @ hidden_NH, alpha=factor)
