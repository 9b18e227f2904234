"""Compute any loss from hidden states, tile by tile, so that no (S, V) or (T, W) tensor exists.

Two models with vocabularies of 128k and 152k tokens need 2 GiB each for the float32 logits of 4096
tokens, and a plain loss keeps several copies.  tile_plan.py cuts the positions into tiles of whole
chunks, and this file walks over them once (`tiled_loss`):

1. For each tile, compute the student's logits.
2. For each sub-tile, compute the loss and its gradient, which overwrites the student's logits.
3. From that, add the tile's contribution to the gradients of the hidden states and the head.

The teacher's logits exist for fewer positions at a time; they are computed whenever the next
sub-tile needs more (`TeacherBlocks`).  Between forward and backward only the gradients are kept,
and backward only scales them.

Shapes: B samples; S, T student and teacher positions of a batch, flattened; n, m those of a tile or
sub-tile; V, W vocabularies; H hidden size; R rank of an adapter; K cached entries; J losses.

Needs torch and tile_plan.py.  Copy both into your own repository.  Tests: tests/test_tiles.py.
License: Apache-2.0 (see LICENSE).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

try:
    from .tile_plan import SubTile, Tile
except ImportError:  # copied beside it, not into a package
    from tile_plan import SubTile, Tile

# Vocabulary rows of the head's gradient that are added at a time in half precision.  Not tuned.
GRADIENT_BLOCK = 8192
# Devices whose matmuls may read half precision and add to float32, see `has_mixed_matmul`.
MIXED_MATMULS = ("cuda",)
NUM_OTHERS = 3  # arguments of `_TiledLoss` in front of its tensors
# Devices whose matmuls and vector loads are slow on rows that begin anywhere, as those of 151,646
# logits do, and the numbers of which a row there takes a multiple.
ROW_MULTIPLES = {"cuda": 64}


def row_multiple(device: torch.device) -> int:
    return ROW_MULTIPLES.get(device.type, 1)


def new_rows(x: Tensor, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return (num_rows, width) uninitialized numbers where x is, as matmuls read them fast."""
    multiple = row_multiple(x.device)
    return x.new_empty(num_rows, -(-width // multiple) * multiple, dtype=dtype)[:, :width]


def widened(rows_NV: Tensor, width: int) -> Tensor:
    """Return (N, width): rows of `new_rows` with some of the columns that lie behind them."""
    return rows_NV.as_strided((len(rows_NV), width), rows_NV.stride())


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
    def matmul_rows(self) -> int:
        """Return the rows of the weight in a matmul: the tokens', and padding that makes it fast.

        For 151,646 rows of Qwen's cuBLAS takes a kernel that reads two numbers at a time; its head
        has 151,936, of which 151,680 are taken.
        """
        multiple = row_multiple(self.weight_VH.device)
        return min(len(self.weight_VH), -(-self.tokens // multiple) * multiple)

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
            buffer: (N or more, V) of `new_rows` to write the result into; not with gradients.
        Returns:
            (N, V).
        """
        dtype = hidden_NH.dtype
        vocab = self.tokens
        rows = self.matmul_rows
        out = None if buffer is None else widened(buffer[: len(hidden_NH)], rows)
        out = torch.mm(hidden_NH, self.weight_VH[:rows].to(dtype).T, out=out)
        out = out[:, :vocab]  # no softmax ever sees the padding
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

    def slope(self, linear_NV: Tensor) -> Tensor | float:
        """Return the derivative of `finish`, elementwise."""
        if not self.softcap:
            return self.scale
        capped = torch.tanh(linear_NV * (self.scale / self.softcap))
        return self.scale * (1 - capped * capped)

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

    def columns(self, ids: Tensor) -> "LogitsSource":
        """Return a source of the logits of these token ids alone; `ids` is sorted."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that the source occupies until a loss reads it, the head not counted."""


class HiddenLogits(NamedTuple):
    """Compute logits from final hidden states and a head.

    hidden_TH: (T, H).
    head: Head.
    buffer: (n, V), where every call writes its logits, over those of the call before; None: each
        call allocates memory of its own.
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
        buffer = new_rows(self.hidden_TH, max_positions, self.head.tokens)
        return self._replace(buffer=buffer)

    @property
    def nbytes(self) -> int:
        buffer_bytes = 0 if self.buffer is None else self.buffer.nbytes
        return self.hidden_TH.nbytes + buffer_bytes

    @property
    def values(self) -> Tensor:
        """Return the (T, H) hidden states: what a position contributes, whatever the source."""
        return self.hidden_TH

    def with_values(self, values_TH: Tensor) -> "HiddenLogits":
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
        return self.logits_TW

    def with_values(self, values_TW: Tensor) -> "StoredLogits":
        return StoredLogits(values_TW)


class ShardedLogits(NamedTuple):
    """Look logits up in shards of the vocabulary, [(T, W_i)], that several ranks computed."""

    shards: tuple[Tensor, ...]

    def __call__(self, positions: Tensor) -> Tensor:
        return torch.cat([shard.index_select(0, positions) for shard in self.shards], 1)

    def columns(self, ids: Tensor) -> "SelectedColumns":
        return SelectedColumns(self, ids)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class TopKLogits(NamedTuple):
    """Rebuild rows of logits from K tokens per position and one event for all others.

    A row has W + 1 columns: -inf for tokens that are not kept, and in the last column, which is no
    token, all of these together.  Nothing is known of them one by one, so nothing is guessed.  Rows
    are whole: some columns alone would lack what their loss adds to the rest.

    ids_TK: (T, K) integer token ids; repeated ones have equal values.
    logp_TK: (T, K) log-probabilities, in nats.
    vocab: W.
    rest_T: (T,) log-probability of all other tokens together; -inf: there is none.  For a loss at
        temperature tau: tau * logsumexp(log p of the others / tau), so that they weigh as much.
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
            largest = [tile.largest_fetch for tile in tiles]
            logits = logits.with_buffer(max(largest, default=0))
        self.logits = logits
        self.tiles = tiles
        self.block: Tensor | None = None

    @property
    def fetches(self) -> list[Tensor]:
        """Return all `SubTile.teacher_positions` of the tiles, in order."""
        return list(chain(*[tile.fetches for tile in self.tiles]))

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


# (student logits (n, V), teacher logits (m, W) or None, sub-tile) -> (J,) sums
TileLoss = Callable[[Tensor, Tensor | None, SubTile], Tensor]


class Part(Protocol):
    """Say what one teacher, or the text alone, adds to the loss of a micro-batch.

    It may have `tile_gradient`: (student logits, teacher logits, sub-tile, (J,) factors) -> (J,)
    sums, which writes the gradient of their product with the factors over the student's logits; or
    None, where autograd is to compute it.
    """

    @property
    def student_hidden(self) -> Tensor:
        """Return (..., H) final hidden states, the input of the head."""

    @property
    def teacher_logits(self) -> LogitsSource | None:
        """Return the source of the teacher's logits; None: there is no teacher."""

    @property
    def tile_loss(self) -> TileLoss:
        """Return what computes the sums of a sub-tile, differentiable in the student's logits."""

    @property
    def tiles(self) -> Sequence[Tile]:
        """Return what `plan_tiles` made, on the device of the hidden states."""

    @property
    def weights(self) -> Sequence[float]:
        """Return J factors; the part of the loss is sum_j weights[j] * sums[j]."""


class OnePart(NamedTuple):
    """Hold a Part; see there."""

    student_hidden: Tensor
    teacher_logits: LogitsSource | None
    tile_loss: TileLoss
    tiles: Sequence[Tile]
    weights: Sequence[float]


def tiled_loss(
    student_hidden: Tensor, student_head: Head, teacher_logits: LogitsSource | None,
    tile_loss: TileLoss, tiles: Sequence[Tile], weights: Sequence[float], *,
    params: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Compute the weighted sum of some losses over all tiles.

    Args:
        student_head: Head; frozen tensors in it get no gradient.
        params: further tensors that get a gradient, such as a learned projection.
        Others: see `Part`.
    Returns:
        (loss, sums): () and (J,) float32; `sums` has no gradient.
    Raises:
        RuntimeError: in a second backward pass, because the first one gives the gradients away.
    """
    part = OnePart(student_hidden, teacher_logits, tile_loss, tiles, weights)
    loss, [sums_J] = tiled_losses(student_head, [part], params)
    return loss, sums_J


def tiled_losses(
    student_head: Head, parts: Sequence[Part], params: Sequence[Tensor] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the sum of several parts of a loss, with one gradient of the head for all of them.

    The gradient of a large head is what a loss reads and writes most: it exists once, however many
    teachers there are.

    Args:
        parts: at least one.
        Others, Raises: see `tiled_loss`.
    Returns:
        (loss, sums): (), and the (J,) float32 sums of every part, which have no gradient.
    """
    hidden = [part.student_hidden for part in parts]
    # autograd looks at tensors alone, and lets all else pass
    loss, *sums = _TiledLoss.apply(  # type: ignore[no-untyped-call]
        student_head, parts, torch.is_grad_enabled(), *student_head.tensors, *params, *hidden
    )
    return loss, tuple(sums)


class _HeadGradients:
    """Accumulate the gradients of the head and of `params`; None where an input needs none.

    Args:
        needs: of the head's tensors and then of `params`.
        dtype: of the matmuls.
    Attributes:
        weight: _WeightGradient.
        bias_V, down_RH, up_VR, params: tensors, in at least float32.
    """

    def __init__(
        self, head: Head, params: Sequence[Tensor], needs: Sequence[bool], dtype: torch.dtype,
    ) -> None:
        self.weight: _WeightGradient | None = None
        if needs[0]:
            self.weight = _WeightGradient(head.weight_VH, head.matmul_rows, dtype)
        self.bias_V = _zero_gradient(head.bias_V, needs[1])
        self.down_RH = _zero_gradient(head.down_RH, needs[2])
        self.up_VR = _zero_gradient(head.up_VR, needs[3])
        self.params = [_zero_gradient(x, need) for x, need in zip(params, needs[4:])]

    def in_input_order(self) -> list[Any]:
        if self.weight is not None:
            self.weight.finish()
        return [self.weight, self.bias_V, self.down_RH, self.up_VR, *self.params]


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
        num_rows: rows with a product, see `Head.matmul_rows`; the others get 0.
        computed: dtype of the matmuls; see `has_mixed_matmul`.
    Attributes:
        pieces: the sum, cut into blocks of rows; two where `scaled` has to change its precision.
    """

    def __init__(self, weight_VH: Tensor, num_rows: int, computed: torch.dtype) -> None:
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        self.mixed_matmul = has_mixed_matmul(weight_VH.device, computed)
        # on a CPU one matmul is faster than two
        in_pieces = weight_VH.device.type in MIXED_MATMULS and dtype != weight_VH.dtype
        most_rows = len(weight_VH)
        if in_pieces:
            multiple = row_multiple(weight_VH.device)
            most_rows = -(-most_rows // (2 * multiple)) * multiple
        self.pieces = []
        for rows_VH in torch.split(weight_VH, most_rows):
            self.pieces.append(torch.empty_like(rows_VH, dtype=dtype))
        self.num_rows = num_rows
        self.is_empty = True

    def finish(self) -> None:
        """Fill in 0 where no product was written."""
        first = 0
        for piece in self.pieces:
            written = 0 if self.is_empty else min(len(piece), max(0, self.num_rows - first))
            piece[written:].zero_()
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
        ctx: Any, head: Head, parts: Sequence[Part], is_training: bool, *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # Inside of here gradients are off, and what is passed in as a tensor needs one.
        needs = [is_training and need for need in ctx.needs_input_grad[NUM_OTHERS:]]
        # Weights of about 1 inside: the gradient of the logits may be float16, which holds nothing
        # below 6e-8.  Backward multiplies by the scale again.
        scales = [max(map(abs, part.weights), default=0.0) or 1.0 for part in parts]
        scale = max(scales)
        walks, gradients = _begin(head, parts, scales, tensors, needs)
        for walk in walks:
            for tile in walk.part.tiles:
                # 1. the student's logits  2. losses, and gradients in their place
                # 3. what hidden states and head get of these
                hidden_NH, linear_NV = walk.logits(tile)
                for sub_tile in tile.sub_tiles:
                    walk.add_sub_tile(linear_NV[sub_tile.student_slice], sub_tile)
                walk.add_gradients(tile, hidden_NH, linear_NV)
        losses = [weighted(walk.sums_J, walk.part.weights) for walk in walks]
        ctx.mark_non_differentiable(*[walk.sums_J for walk in walks])
        ctx.shapes = [None if x is None else x.shape for x in tensors]
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        num_shared = len(tensors) - len(parts)
        ctx.scales = [scale] * num_shared + scales
        # Not save_for_backward: backward hands the gradients over instead of copying them.
        ctx.gradients = [*gradients.in_input_order(), *[walk.d_hidden_SH for walk in walks]]
        return sum(losses[1:], losses[0]), *[walk.sums_J for walk in walks]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "tiled_loss: this is a second backward pass, but the first one gave the gradients "
                "away; call tiled_loss again"
            )
        out: list[Tensor | None] = [None] * NUM_OTHERS
        gradients = ctx.gradients
        ctx.gradients = None
        while gradients:  # one after the other, so that no two copies of one exist for long
            number = len(out) - NUM_OTHERS
            gradient = gradients.pop(0)
            if gradient is not None:
                # In float32 first: a loss scale undoes a small weight without rounding to 0.
                factor = outer[0].float() * ctx.scales[number]
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


def weighted(sums_J: Tensor, weights: Sequence[float]) -> Tensor:
    """Return sum_j weights[j] * sums[j]."""
    return (sums_J * filled(sums_J, weights)).sum()


def filled(x: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return a tensor of these numbers where x is."""
    # not torch.tensor: to copy it to a GPU would wait for that
    return torch.stack([x.new_full((), number) for number in numbers])


def _zero_gradient(x: Tensor | None, needed: bool) -> Tensor | None:
    """Return zeros to add a gradient to, in at least float32; None if it is not needed."""
    if x is None or not needed:
        return None
    # Many tiles add to one gradient; half precision would round off small contributions.
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return None if x is None else x.to(dtype)


def _begin(
    head: Head, parts: Sequence[Part], scales: Sequence[float], tensors: Sequence[Any],
    needs: Sequence[bool],
) -> tuple[list["_Walk"], _HeadGradients]:
    """Make ready to walk over parts; return the walks, and where the shared gradients are added.

    Args:
        scales: by which the weights of each part are divided.
        tensors: as autograd passes them: the head's, the loss's, and the hidden states of each
            part; needs: which of them get a gradient.
    """
    num_head = len(head.tensors)
    num_shared = len(tensors) - len(parts)
    of_head, params, hidden = (
        tensors[:num_head], tensors[num_head:num_shared], tensors[num_shared:])
    # Like torch's own matmuls, compute in the dtype of autocast where it is on.
    device_type = head.weight_VH.device.type
    dtype = parts[0].student_hidden.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    gradients = _HeadGradients(head.with_tensors(*of_head), params, needs, dtype)
    head = head.with_tensors(*[_cast(x, dtype) for x in of_head])
    walks = []
    for part, of_part, scale, need in zip(parts, hidden, scales, needs[num_shared:]):
        hidden_SH = of_part.reshape(-1, of_part.shape[-1])
        walks.append(_Walk(
            part, head=head, params=params, hidden_SH=hidden_SH, scale=scale,
            common_scale=max(scales), gradients=gradients,
            d_hidden_SH=_zero_gradient(hidden_SH, need), is_training=any(needs)))
    return walks, gradients


class _Walk:
    """Walk over the tiles of a part; add up the losses and the gradients.

    Args:
        part: the Part.
        head: the student's head, in the dtype to compute in.
        params: see `tiled_losses`.
        hidden_SH: (S, H) the student's hidden states.
        scale: by which the weights are divided, and the gradient of the hidden states with them.
        common_scale: by which the gradients that all parts share are divided.
        gradients: where those are added to.
        d_hidden_SH: where the gradient of the hidden states is written; None: nowhere.
        is_training: whether any gradient is needed.
    Attributes:
        sums_J: (J,) float32 sums of the losses.
    """

    def __init__(
        self, part: Part, *, head: Head, params: Sequence[Tensor], hidden_SH: Tensor, scale: float,
        common_scale: float, gradients: _HeadGradients, d_hidden_SH: Tensor | None,
        is_training: bool,
    ) -> None:
        self.part = part
        self.head = head
        self.params = params
        self.hidden_SH = hidden_SH
        self.common_factor = scale / common_scale
        self.gradients = gradients
        self.d_hidden_SH = d_hidden_SH
        self.is_training = is_training
        self.dtype = head.weight_VH.dtype
        self.sums_J = torch.zeros(len(part.weights), device=hidden_SH.device)
        self.factors_J = filled(self.sums_J, [weight / scale for weight in part.weights])
        self.teacher: TeacherBlocks | None = None
        if part.teacher_logits is not None:
            self.teacher = TeacherBlocks(part.teacher_logits, part.tiles)
        # All tiles write into one buffer: on a CPU the first touch of fresh memory costs several
        # times what using it does.
        largest = max([len(tile.student_positions) for tile in part.tiles], default=0)
        self.buffer = new_rows(hidden_SH, largest, head.tokens, self.dtype)

    def without_autocast(self) -> torch.autocast:
        """Keep the matmuls in the dtype chosen above; only the loss itself sees autocast."""
        return torch.autocast(self.hidden_SH.device.type, enabled=False)

    def logits(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the hidden states (N, H) of a tile, and their linear logits (N, V)."""
        hidden_NH = self.hidden_SH.index_select(0, tile.student_positions).to(self.dtype)
        with self.without_autocast():
            return hidden_NH, self.head.linear(hidden_NH, self.buffer)

    def add_sub_tile(self, linear_NV: Tensor, sub_tile: SubTile) -> None:
        """Add the losses of one sub-tile and replace its linear logits by their gradient."""
        teacher_logits = None
        if self.teacher is not None:
            with self.without_autocast():
                teacher_logits = self.teacher(sub_tile)
        if self.is_written(linear_NV, teacher_logits, sub_tile):
            return
        # A graph from the linear logits to the losses, built and freed here.
        d_linear_NV = None
        d_params: Sequence[Tensor | None] = ()
        with torch.set_grad_enabled(self.is_training):
            leaf_NV = linear_NV.detach().requires_grad_(self.is_training)
            student_logits = self.head.finish(leaf_NV)
            sums_J = self.part.tile_loss(student_logits, teacher_logits, sub_tile)
            if sums_J.requires_grad:
                inputs = [leaf_NV, *self.params]
                d_linear_NV, *d_params = torch.autograd.grad(
                    sums_J, inputs, self.factors_J.to(sums_J.dtype), allow_unused=True)
        if d_linear_NV is not None:
            linear_NV.copy_(d_linear_NV)
        elif self.is_training:  # no term begins here
            linear_NV.zero_()
        self.sums_J += sums_J.detach()
        for gradient, d_param in zip(self.gradients.params, d_params):
            if gradient is not None and d_param is not None:
                gradient.add_(d_param, alpha=self.common_factor)

    def is_written(
        self, linear_NV: Tensor, teacher_logits: Tensor | None, sub_tile: SubTile
    ) -> bool:
        """Let the part write the gradient over the logits, where it can; tell whether it did."""
        tile_gradient = getattr(self.part, "tile_gradient", None)
        if not (self.is_training and tile_gradient) or self.params or teacher_logits is None:
            return False
        is_plain = self.head.scale == 1 and not self.head.softcap
        logits = linear_NV if is_plain else self.head.finish(linear_NV)
        sums_J = tile_gradient(logits, teacher_logits, sub_tile, self.factors_J)
        if sums_J is None:
            return False
        if not is_plain:
            linear_NV.copy_(logits * self.head.slope(linear_NV))
        self.sums_J += sums_J
        return True

    def add_gradients(self, tile: Tile, hidden_NH: Tensor, d_linear_NV: Tensor) -> None:
        """Add what hidden states and head get of the gradient of a tile's linear logits."""
        if not self.is_training:
            return
        # as wide as the matmuls take it; padding has the gradient 0
        rows = self.head.matmul_rows
        d_wide_NV = widened(d_linear_NV, rows)
        if rows > self.head.tokens:
            d_wide_NV[:, self.head.tokens :].zero_()
        with self.without_autocast():
            self.add_hidden_gradient(tile.student_positions, d_wide_NV)
            self.add_head_gradients(hidden_NH, d_wide_NV)

    def add_hidden_gradient(self, positions: Tensor, d_wide_NV: Tensor) -> None:
        """Write the gradient of the tile's hidden states; every position is in one tile.

        Args:
            d_wide_NV: (N, `Head.matmul_rows`) gradient of the linear logits.
        """
        if self.d_hidden_SH is None:
            return  # a frozen body
        head = self.head
        rows = head.matmul_rows
        d_hidden_NH = d_wide_NV @ head.weight_VH[:rows]
        if head.down_RH is not None and head.up_VR is not None:
            d_hidden_NH += d_wide_NV @ head.up_VR[:rows] @ head.down_RH
        # Positions that no tile contains keep the gradient 0.
        d_hidden_NH = d_hidden_NH.to(self.d_hidden_SH.dtype)
        self.d_hidden_SH.index_copy_(0, positions, d_hidden_NH)

    def add_head_gradients(self, hidden_NH: Tensor, d_wide_NV: Tensor) -> None:
        """Add the tile's contribution to the gradients of weight, bias, down and up."""
        head = self.head
        rows = head.matmul_rows
        factor = self.common_factor
        gradients = self.gradients
        d_bias, d_down, d_up = gradients.bias_V, gradients.down_RH, gradients.up_VR
        if gradients.weight is not None:
            gradients.weight.add_product(d_wide_NV, hidden_NH, factor)
        if d_bias is not None:
            d_bias[:rows].add_(d_wide_NV.sum(0, dtype=d_bias.dtype), alpha=factor)
        if d_up is not None and head.down_RH is not None:
            d_up[:rows].add_(d_wide_NV.T @ (hidden_NH @ head.down_RH.T), alpha=factor)
        if d_down is not None and head.up_VR is not None:
            d_down.add_((d_wide_NV @ head.up_VR[:rows]).T @ hidden_NH, alpha=factor)
