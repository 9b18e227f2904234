"""Any loss from hidden states, tile by tile, so that no [S, V] or [T, W] tensor exists, forward or backward.

Two models with vocabularies of 128k and 152k tokens need 2 GiB a side for the float32 logits of 4096 tokens,
and a plain loss keeps several copies.  Here the positions are cut into tiles of whole chunks (`plan_tiles`).
For each tile `tiled_loss` computes the student's logits; part by part, the loss and the gradient, which takes
the place of the student's logits; and from that at once the gradient of the hidden states and the head.  The
teacher's logits are computed for fewer positions at a time, whenever the next part needs more.  Backward only
scales.  What lives between the two is the gradients.

Shapes: S, T student and teacher positions of a batch, flattened; n, m those of a tile; V, W vocabularies; H
hidden size; R rank of an adapter.

Needs torch only.  Copy this file into your own repository.  Tests: tests/test_tiles.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# share of the memory for what a loss makes of one part; float32 numbers alive at its peak, per logit of it
CPU_SUB_TILES = 0.07, 2  # large tiles, which multiply faster; compiled losses hold little
GPU_SUB_TILES = 0.5, 8  # few calls
TEACHER_ROWS = 0.75  # logits of the teacher that exist at a time, in rows, per row of the student
BLOCK = 8192  # rows of a head's gradient that are summed at a time, where they are not float32 already


# --- heads ----------------------------------------------------------------------------------------


class Head(NamedTuple):
    """The map from hidden states to logits: softcap(scale * (h weight^T + bias + (h down^T) up^T)).

    weight_VH: (V, H).
    bias_V: (V,) or None.
    down_RH, up_VR: (R, H), (V, R): a low-rank adapter with its factor in `up`, or None.
    scale: factor of the logits.
    softcap: c of c * tanh(logits / c); 0: none.
    vocab: rows that are tokens, the first ones; 0: all.  The others get no logit and gradient 0.
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
        """V."""
        return self.vocab or len(self.weight_VH)

    def linear(self, hidden_NH: Tensor, memory: Tensor | None = None) -> Tensor:
        """(N, V) before scale and soft-cap, in the precision of the hidden states.

        memory: 1-d, where to write it; not with gradients.
        """
        dtype, vocab = hidden_NH.dtype, self.tokens
        out = None if memory is None else memory[: len(hidden_NH) * vocab].view(-1, vocab)
        out = torch.mm(hidden_NH, self.weight_VH[:vocab].to(dtype).T, out=out)
        if self.bias_V is not None:
            out += self.bias_V[:vocab].to(dtype)
        if self.down_RH is not None and self.up_VR is not None:
            out += hidden_NH @ self.down_RH.to(dtype).T @ self.up_VR[:vocab].to(dtype).T
        return out

    def finish(self, linear_NV: Tensor) -> Tensor:
        """(N, V) logits; the same tensor where there is nothing to do."""
        out = linear_NV if self.scale == 1 else linear_NV * self.scale
        return self.softcap * torch.tanh(out / self.softcap) if self.softcap else out

    def columns(self, ids: Tensor) -> "Head":
        """The head of these tokens alone."""
        bias, up = [None if x is None else x[ids] for x in (self.bias_V, self.up_VR)]
        return self._replace(weight_VH=self.weight_VH[ids], bias_V=bias, up_VR=up, vocab=0)


def head_of(model: Any, vocab: int) -> Head:
    """The head of a Hugging Face causal language model, cut to the first `vocab` tokens.

    Reads the output embeddings, low-rank adapters of peft included, and from the config
    final_logit_softcapping, logits_scaling and logit_scale.  Compare its logits with the model's own once.
    """
    layer, config = model.get_output_embeddings(), model.config
    down = up = None
    if hasattr(layer, "lora_A") and len(layer.lora_A):
        name = next(iter(layer.lora_A))
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]
    layer = getattr(layer, "base_layer", layer)
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = (getattr(config, "logit_scale", None) or 1.0) / divisor
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    return Head(layer.weight, layer.bias, down, up, scale, softcap, vocab)


# --- the teacher's side ----------------------------------------------------------------------------


class HiddenLogits(NamedTuple):
    """Teacher logits of any positions, from its final hidden states (T, H) and its head.

    memory: 1-d, where the next call writes its logits, over those of the last; None: each call has its own.
    """

    hidden_TH: Tensor
    head: Head
    memory: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return self.head.finish(self.head.linear(self.hidden_TH.index_select(0, rows), self.memory))

    def columns(self, ids: Tensor) -> "HiddenLogits":
        return self._replace(head=self.head.columns(ids))

    def with_memory(self, most: int) -> "HiddenLogits":
        """For calls with at most so many positions."""
        return self._replace(memory=self.hidden_TH.new_empty(most * self.head.tokens))


class StoredLogits(NamedTuple):
    """Teacher logits of any positions, from all of them (T, W)."""

    logits_TW: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return self.logits_TW.index_select(0, rows)

    def columns(self, ids: Tensor) -> "StoredLogits":
        return StoredLogits(self.logits_TW.index_select(1, ids))


class ShardedLogits(NamedTuple):
    """Teacher logits of any positions, from parts of the vocabulary [(T, W_i)] that several ranks made."""

    shards: tuple[Tensor, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.cat([shard.index_select(0, rows) for shard in self.shards], 1)

    def columns(self, ids: Tensor) -> StoredLogits:
        """Of sorted ids."""
        sizes = [shard.shape[1] for shard in self.shards]
        bounds = torch.tensor([0, *sizes], device=ids.device).cumsum(0)
        own = [ids[(ids >= low) & (ids < high)] - low for low, high in zip(bounds[:-1], bounds[1:])]
        return StoredLogits(torch.cat([shard.index_select(1, part) for shard, part in zip(self.shards, own)], 1))


class TopKLogits(NamedTuple):
    """Teacher logits of any positions from cached (T, K) ids and log-probabilities.

    What the K tokens leave is spread evenly over the others.

    total_T: (T,) logsumexp of the logits, for logits instead of log-probabilities; None: 0.
    """

    ids_TK: Tensor
    logp_TK: Tensor
    vocab: int
    total_T: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        ids, logp = self.ids_TK.index_select(0, rows).long(), self.logp_TK.index_select(0, rows).float()
        rest = torch.log1p(-logp.exp().sum(1, keepdim=True).clamp(max=1 - 1e-7))
        rest = rest - torch.tensor(float(max(1, self.vocab - ids.shape[1]))).log()
        found = rest.expand(-1, self.vocab).scatter(1, ids, logp)
        return found if self.total_T is None else found.add_(self.total_T.index_select(0, rows)[:, None])

    def columns(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda rows: self(rows).index_select(1, ids)


# --- tiles ----------------------------------------------------------------------------------------


class SubTile(NamedTuple):
    """Some whole chunks, and positions that only predict text: what a loss sees at a time.

    student, teacher: its rows, of those of the tile, and of the teacher's logits that exist.
    labels, teacher_next: (n,), (m,) int64, the token that each row predicts; labels are -100 for none.
    student_chunk, teacher_chunk: (n,), (m,) int64, chunks numbered within the part, -1 for none.
    terms: whatever else the loss knows from the ids.
    weight: (n,) float, weight of the terms that begin at each student row; None: 1.
    fetch: int64, rows of the flattened (B * T), of which the teacher's logits are to be computed before this
        part, for it and those that follow; None: those that exist serve.
    """

    student: slice
    teacher: slice
    labels: Tensor
    teacher_next: Tensor
    student_chunk: Tensor
    teacher_chunk: Tensor
    terms: Any = None
    weight: Tensor | None = None
    fetch: Tensor | None = None


class Tile(NamedTuple):
    """Positions whose student logits exist at the same time.

    student_rows: (n,) int64, rows of the flattened (B * S).
    parts: the tile, cut once more.
    """

    student_rows: Tensor
    parts: tuple[SubTile, ...]


def plan_tiles(
    labels_BS: Tensor, student_chunk_BS: Tensor, teacher_next_BT: Tensor, teacher_chunk_BT: Tensor,
    vocabs: tuple[int, int], memory_mib: float = 512.0, parts: tuple[float, float] = GPU_SUB_TILES,
) -> list[Tile]:
    """Cut a batch into tiles; meant for the CPU, where the ids come from.

    Positions that predict nothing are in no tile, nor are teacher positions outside of chunks.

    Args:
        labels_BS: (B, S) int64, -100 for none.
        student_chunk_BS, teacher_chunk_BT: (B, S), (B, T) int64, shifted chunk ids, -1 for none; the tokens
            of a chunk are neighbors.
        teacher_next_BT: (B, T) int64.
        vocabs: V and W.
        memory_mib: MiB for the logits of a tile and what a loss makes of them; at least one chunk is taken.
            inf: one tile of one part.
        parts: CPU_SUB_TILES or GPU_SUB_TILES.  Small parts leave room for large tiles; large ones need fewer calls.
    """
    B = labels_BS.shape[0]
    most = 1 + max([int(x.max()) for x in (student_chunk_BS, teacher_chunk_BT) if x.numel()], default=-1)
    keys = [torch.where(x >= 0, x + most * torch.arange(B)[:, None], -1).reshape(-1)
            for x in (student_chunk_BS, teacher_chunk_BT)]
    s_row = ((labels_BS.reshape(-1) != -100) | (keys[0] >= 0)).nonzero().squeeze(1)
    t_row = (keys[1] >= 0).nonzero().squeeze(1)
    s_key, t_key = keys[0][s_row], keys[1][t_row]
    new = torch.ones_like(s_key, dtype=torch.bool)
    new[1:] = (s_key[1:] != s_key[:-1]) | (s_key[1:] < 0)
    s_unit = new.cumsum(0) - 1  # a chunk, or a position outside of chunks
    unit_of = torch.full((B * most + 1,), -1)
    unit_of[s_key] = s_unit
    unit_of[-1] = -1
    t_unit, order = unit_of[t_key].sort(stable=True)
    t_row = t_row[order]
    units = int(s_unit[-1]) + 1 if len(s_unit) else 0
    # the first row of every unit, of both sides, and the end
    ends = [torch.searchsorted(unit, torch.arange(units + 1)) for unit in (s_unit, t_unit)]
    mib = [end.double() * vocab * 4 / 2**20 for end, vocab in zip(ends, vocabs)]
    # one side's logits may take what the other does not need
    teacher = vocabs[1] * min(TEACHER_ROWS, len(t_row) / max(1, len(s_row)))
    share = vocabs[0] / (vocabs[0] + teacher)
    shares = (1 - parts[0]) * share, (1 - parts[0]) * (1 - share), parts[0] / parts[1]
    limits = [memory_mib if memory_mib == float("inf") else part * memory_mib for part in shares]
    tiles = _cuts(mib[0], 0, units, limits[0])
    cuts = [_cuts(mib[0] + mib[1], *tile, limits[2]) for tile in tiles]
    blocks = _blocks(mib[1], [cut for tile in cuts for cut in tile], limits[1])
    bounds = [end.tolist() for end in ends]
    planned = []
    for (low, high), own in zip(tiles, cuts):
        s, pieces = bounds[0][low], []
        for first, last in own:
            own_s, own_t = [slice(bound[first], bound[last]) for bound in bounds]
            begin, end = blocks[first]
            t, t_end = bounds[1][begin], bounds[1][end]
            chunk = torch.where(s_key[own_s] >= 0, s_unit[own_s] - first, -1)
            pieces.append(SubTile(
                slice(own_s.start - s, own_s.stop - s), slice(own_t.start - t, own_t.stop - t),
                labels_BS.reshape(-1)[s_row[own_s]], teacher_next_BT.reshape(-1)[t_row[own_t]],
                chunk, t_unit[own_t] - first, fetch=t_row[t:t_end] if first == begin else None))
        planned.append(Tile(s_row[s : bounds[0][high]], tuple(pieces)))
    return planned


class TeacherBlocks:
    """Teacher logits of one part after the other; those of several are computed together, over the last.

    fetches: all `SubTile.fetch` of the tiles.
    """

    def __init__(self, rows: Callable[[Tensor], Tensor], tiles: Sequence[Tile]) -> None:
        self.fetches = [part.fetch for tile in tiles for part in tile.parts if part.fetch is not None]
        most = max(map(len, self.fetches), default=0)
        self.rows = rows.with_memory(most) if isinstance(rows, HiddenLogits) else rows
        self.block: Tensor | None = None

    def __call__(self, part: SubTile) -> Tensor:
        """(m, W) logits of the part."""
        if part.fetch is not None:
            self.fetch(part.fetch)
        assert self.block is not None
        return self.block[part.teacher]

    def fetch(self, rows: Tensor) -> Tensor:
        """(m, W)"""
        self.block = None  # two blocks never exist
        self.block = self.rows(rows)
        return self.block


def _cuts(mib: Tensor, low: int, high: int, limit: float) -> list[tuple[int, int]]:
    """Cut the units low..high-1 so that no piece of several units is larger than `limit`."""
    cuts = []
    while low < high:
        end = int(torch.searchsorted(mib, mib[low] + limit, right=True)) - 1
        end = min(high, max(low + 1, end))
        cuts.append((low, end))
        low = end
    return cuts


def _blocks(mib: Tensor, parts: list[tuple[int, int]], limit: float) -> dict[int, tuple[int, int]]:
    """Parts whose teacher's logits are computed together: {first unit of a part: all their units}."""
    ends = torch.tensor([0] + [last for _, last in parts])
    return {first: (parts[low][0], parts[high - 1][1])
            for low, high in _cuts(mib[ends], 0, len(parts), limit) for first, _ in parts[low:high]}


# --- the loss -------------------------------------------------------------------------------------


def tiled_loss(
    student_hidden: Tensor, student_head: Head, teacher_rows: Callable[[Tensor], Tensor] | None,
    tile_loss: Callable[[Tensor, Tensor | None, SubTile], Tensor], tiles: Sequence[Tile],
    weights: Sequence[float], params: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Weighted sum of losses over all tiles.

    Args:
        student_hidden: (..., H) final hidden states, what the head reads.
        student_head: Head; frozen tensors in it get no gradient.
        teacher_rows: rows -> (m, W) logits of these teacher positions; None: there is no teacher.
        tile_loss: (x (n, V), y (m, W) or None, part) -> (J,) sums, differentiable in x.
        weights: J factors; the gradient is that of sum_j weights[j] * sums[j].
        params: what else the loss is differentiated by, such as a learned projection.
    Returns:
        (loss, sums): () and (J,) float; sums without gradient.
    Raises:
        RuntimeError: a second backward pass, since the first one gives the gradients away.
    """
    train = torch.is_grad_enabled()
    run = _Run(student_head, teacher_rows, tile_loss, tiles, weights, params, train)
    inputs = student_hidden, *student_head[:4], *params
    loss, sums = _Tiled.apply(run, *inputs)  # type: ignore[no-untyped-call]
    return loss, sums


class _Run(NamedTuple):
    head: Head
    teacher_rows: Callable[[Tensor], Tensor] | None
    tile_loss: Callable[[Tensor, Tensor | None, SubTile], Tensor]
    tiles: Sequence[Tile]
    weights: Sequence[float]
    params: Sequence[Tensor]
    train: bool


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, hidden: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        wanted = [run.train and need for need in ctx.needs_input_grad[1:]]
        rows_SH = hidden.reshape(-1, hidden.shape[-1])
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        cast = [None if x is None else x.to(dtype) for x in inputs[:4]]
        head = Head(*cast, *run.head[4:])  # type: ignore[arg-type, call-arg]
        grads = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                 if x is not None and want else None for x, want in zip((rows_SH, *inputs), wanted)]
        weights = torch.tensor(run.weights, device=hidden.device)
        # of about 1 while they stand in float16, which holds nothing below 6e-8
        ctx.scale = max(map(abs, run.weights), default=0.0) or 1.0
        scaled = weights / ctx.scale
        sums = torch.zeros(len(run.weights), device=hidden.device)
        # tiles share memory: what is new to the process costs a CPU several times what using it does
        most = max([len(tile.student_rows) for tile in run.tiles], default=0)
        memory = rows_SH.new_empty(most * head.tokens, dtype=dtype)
        teacher = None if run.teacher_rows is None else TeacherBlocks(run.teacher_rows, run.tiles)
        for tile in run.tiles:
            h = rows_SH.index_select(0, tile.student_rows).to(dtype)
            with torch.autocast(kind, enabled=False):
                linear = head.linear(h, memory)
            for part in tile.parts:
                with torch.autocast(kind, enabled=False):
                    y = teacher(part) if teacher else None
                found, d_params = _part(run, head, linear[part.student], y, part, any(wanted), scaled)
                sums += found
                for grad, d in zip(grads[5:], d_params):
                    if grad is not None and d is not None:
                        grad += d
            if any(wanted):
                with torch.autocast(kind, enabled=False):
                    _add_gradients(grads, head, h, linear, tile.student_rows)
        ctx.mark_non_differentiable(sums)
        ctx.shapes = [None if x is None else (x.shape, x.dtype) for x in (hidden, *inputs)]
        ctx.grads = grads  # not save_for_backward: they are handed over, not copied
        return (sums * weights).sum(), sums

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("tiled_loss: a second backward pass; the first one gave the gradients away")
        out: list[Tensor | None] = [None]
        for grad, like in zip(ctx.grads, ctx.shapes):
            factor = outer[0].float() * ctx.scale  # an outer scale that undoes a small weight is no rounding
            out.append(None if grad is None else grad.mul_(factor.to(grad)).view(like[0]).to(like[1]))
        ctx.grads = None
        return tuple(out)


def _part(
    run: _Run, head: Head, linear: Tensor, y: Tensor | None, part: SubTile, train: bool, weights: Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """(sums, gradients of the parameters); the part's logits are replaced by their gradient."""
    with torch.set_grad_enabled(train):
        leaf = linear.detach().requires_grad_(train)
        found = run.tile_loss(head.finish(leaf), y, part)
        d: Sequence[Tensor | None] = [None] * (1 + len(run.params))
        if found.requires_grad:
            d = torch.autograd.grad((found * weights.to(found)).sum(), [leaf, *run.params], allow_unused=True)
    if train and d[0] is not None:
        linear.copy_(d[0])
    elif train:
        linear.zero_()
    return found.detach(), d[1:]


def _add_gradients(
    grads: list[Tensor | None], head: Head, h: Tensor, d_linear: Tensor, rows: Tensor
) -> None:
    """Add what one tile contributes to the gradients of hidden states, weight, bias, down, up."""
    d_hidden, d_weight, d_bias, d_down, d_up = grads[:5]
    vocab = d_linear.shape[1]
    if d_hidden is not None:
        d_h = d_linear @ head.weight_VH[:vocab]
        if head.down_RH is not None and head.up_VR is not None:
            d_h += d_linear @ head.up_VR[:vocab] @ head.down_RH
        d_hidden.index_copy_(0, rows, d_h.to(d_hidden.dtype))
    if d_weight is not None and d_weight.dtype == d_linear.dtype:
        d_weight[:vocab].addmm_(d_linear.T, h)
    elif d_weight is not None:
        for low in range(0, vocab, BLOCK):
            part = d_linear[:, low : low + BLOCK]
            d_weight[low : low + part.shape[1]] += part.T @ h
    if d_bias is not None:
        d_bias[:vocab] += d_linear.sum(0, dtype=d_bias.dtype)
    if d_up is not None and head.down_RH is not None:
        d_up[:vocab] += d_linear.T @ (h @ head.down_RH.T)
    if d_down is not None and head.up_VR is not None:
        d_down += (d_linear @ head.up_VR[:vocab]).T @ h
