"""The loss of a run: what --loss names, and the student's cross-entropy, as sums over some positions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import losses
from losses import (Spelling, at_least_float32, common_tokens, piece_kl, piece_coverage, projection_entries,
                    projection_kl)
from projection_tools import Pair, as_tables, load_projection
from projection_tools.build import cached_projection
from projection_tools.spell import cached_spelling
from isogloss.sequence import complete
from teacher_mixing import teacher_scores
from tiles import HiddenLogits, tiled_loss

ANY_TOKENIZERS = "piece_kl", "projection_kl", "gold", "h_kl", "uld", "alm"
ONE_TOKENIZER = {  # and the flags that each of them takes
    "forward_kl": (), "reverse_kl": (), "generalized_jsd": ("beta",), "skew_forward_kl": ("skew",),
    "skew_reverse_kl": ("skew",), "adaptive_kl": ("alpha",), "total_variation": ()}
BLOCK = 256  # positions whose logits are computed at a time
ALM_MODES = "binary_kl", "binary_kl_reverse", "binary_ce", "temperature_limit", "squared", "absolute"


class Distillation(NamedTuple):
    """A distillation loss, ready for the parts of the tiles of `data.Collate`.

    loss: (x (n, V), y (m, W), part) -> (), sum over the part's terms.
    spelling: tables from which the data workers list the terms of piece_kl, else None.
    keep: kept_K -> the same loss for teacher logits (m, K) of these columns alone; None: it needs them all.
    shares: (y, part) -> {name: (sum, count)}, what the loss covers; None: not defined.
    projection: `LearnedProjection` whose parameter the loss trains too; None: it has none.
    """

    loss: Callable
    spelling: Spelling | None = None
    keep: Callable | None = None
    shares: Callable | None = None
    projection: "LearnedProjection | None" = None


class LearnedProjection:
    """A projection whose weights are trained with the student: softmax of scores over the slots of a row.

    It starts as the projection that it is given; rows of one slot stay as they are.  The scores (V, K) are a
    parameter of the student's model, `projection_scores`, so that the engine steps, saves and resumes them.
    """

    def __init__(self, indices, likelihoods, pair):
        self.indices, self.pair, self.model = indices, pair, None
        self.start = likelihoods.clamp(min=1e-6).log()

    def attach(self, model):
        model.register_parameter("projection_scores", torch.nn.Parameter(self.start.to(model.device)))
        self.model = model

    def likelihoods(self):
        """(V, K) float32, as it is now; rows sum to 1 or 0."""
        used = self.indices >= 0
        scores = torch.where(used, self.model.projection_scores.float(), -1e9)
        return torch.where(used, scores.softmax(1), 0.0)

    def tables(self):
        """What a projection file holds, rows sorted by weight again."""
        weights, order = self.likelihoods().detach().sort(dim=1, descending=True, stable=True)
        arrays = self.indices.gather(1, order).cpu().numpy(), weights.cpu().numpy()
        return as_tables(arrays, self.pair, "distill.py --learn_projection")


def build_loss(cfg, student, teacher, device):
    """The distillation loss of a run.

    Args:
        cfg: with loss, its parameters, and projection.
        student, teacher: `data.TextEncoder`.
    Returns:
        Distillation.
    Raises:
        ValueError: tokenizers that differ where the loss needs one, or have nothing in common.
    """
    pair = Pair.of(student.tokenizer, teacher.tokenizer, (cfg.student, cfg.teacher),
                   (student.table, teacher.table))
    if cfg.loss == "piece_kl":
        return _pieces(cfg, pair, device)
    if cfg.loss in ("uld", "alm"):
        return _bytes_alone(cfg)
    if cfg.loss in ONE_TOKENIZER:
        if pair.prints[0] != pair.prints[1]:
            raise ValueError(f"--loss {cfg.loss}: needs one tokenizer, but those of {cfg.student} and "
                             f"{cfg.teacher} differ; use one of {', '.join(ANY_TOKENIZERS)}")
        return _positions(cfg)
    return _projected(cfg, pair, device)


def _weight(part):
    """The weight of the part's rows, as of a batch of one sample."""
    return None if part.weight is None else part.weight[None]


def _ids(part):
    """Tokens and chunks of a part, as of a batch of one sample: next_S, next_T, chunk_S, chunk_T."""
    return [x[None] for x in (part.labels, part.teacher_next, part.student_chunk, part.teacher_chunk)]


def _pieces(cfg, pair, device):
    tables = cached_spelling(pair)
    tables = {name: tables[name] for name in Spelling._fields}
    spelling = Spelling(**{k: t.long() if isinstance(t, torch.Tensor) and "event" not in k else t
                           for k, t in tables.items()})
    on_device = Spelling(*[t.to(device) if isinstance(t, torch.Tensor) else t for t in spelling])

    def loss(x, y, part):
        return piece_kl(x[None], y[None], *_ids(part)[:2], part.terms, on_device, cfg.temperature,
                        _weight(part))[0]

    def shares(y, part):
        return piece_coverage(y[None], part.terms, on_device, cfg.temperature)

    return Distillation(loss, spelling, shares=shares)


def _projected(cfg, pair, device):
    tables = load_projection(cfg.projection, pair) if cfg.projection else cached_projection(pair)
    indices, likelihoods = tables["indices"].to(device), tables["likelihoods"].to(device)
    learned = LearnedProjection(indices, likelihoods, pair) if cfg.learn_projection else None
    if cfg.loss == "projection_kl":
        # entries of a learned projection hold their places in it
        source = torch.arange(indices.numel(), device=device).view_as(indices) if learned else likelihoods

        def over(kept_K):
            listed = projection_entries(indices, source, len(pair.tables[1]), kept_K)

            def loss(x, y, part):
                entries = listed
                if learned:
                    entries = listed._replace(weight_E=learned.likelihoods().flatten()[listed.weight_E])
                how = dict(temperature=cfg.temperature, reverse=cfg.reverse, entries=entries,
                           chunks=part.terms, weight_BS=_weight(part))
                return projection_kl(x[None], y[None], *_ids(part)[2:], indices, likelihoods, **how)[0]
            return loss

        return Distillation(over(None), keep=over, projection=learned)
    common = common_tokens(indices, likelihoods, relaxed=cfg.loss == "h_kl")
    rest = tuple(losses.other_tokens(ids, len(table)) for ids, table in zip(common, pair.tables))

    def loss(x, y, part):
        how = cfg.temperature, cfg.uncommon_topk, "p", cfg.reverse, _weight(part)
        return losses.gold(x[None], y[None], *_ids(part)[2:], *common, *how, chunks=part.terms, rest=rest)[0]

    return Distillation(loss)


def _bytes_alone(cfg):
    function, own = (losses.alm, {"mode": cfg.alm_mode}) if cfg.loss == "alm" else (losses.uld, {})

    def loss(x, y, part):
        how = dict(temperature=cfg.temperature, chunks=part.terms, weight_BS=_weight(part), **own)
        return function(x[None], y[None], *_ids(part), **how)[0]

    return Distillation(loss)


def _positions(cfg):
    """Of one tokenizer every chunk is one token: a row on either side."""
    function = getattr(losses, cfg.loss)
    own = {name: getattr(cfg, name) for name in ONE_TOKENIZER[cfg.loss]}

    def loss(x, y, part):
        rows = [side.index_select(0, first)[None] for side, first in zip((x, y), part.terms[:2])]
        weight = None if part.weight is None else part.weight.index_select(0, part.terms.first_S)[None]
        how = dict(temperature=cfg.temperature, top_k=cfg.top_k, weight_BS=weight, **own)
        return function(*rows, None, **how)[0]

    return Distillation(loss)


@torch.no_grad()
def sample_scores(rows, batch, kind):
    """(B,) how sure a teacher is of each sample (`teacher_mixing.teacher_scores`), some positions at a time.

    Cross-entropy is taken per byte, not per token, so that teachers with different tokenizers compare.

    Args:
        rows: positions -> logits of this teacher.
        batch: with teacher_labels, teacher_bytes, teacher_sample, and samples, their number.
    """
    labels, sample, scores = batch["teacher_labels"].flatten(), batch["teacher_sample"], []
    for number in range(batch["samples"]):
        own = sample == number
        places, total = (own & (labels != -100)).nonzero().squeeze(1), 0.0
        for block in places.split(BLOCK):
            every = torch.ones(1, len(block), dtype=torch.bool, device=labels.device)
            found = teacher_scores(rows(block)[None], labels[block][None], every, kind)
            total = total + len(block) * found[0]
        size = int(batch["teacher_bytes"].flatten()[own].clamp(min=0).sum()) if kind == "ce" else len(places)
        scores.append(total / max(size, 1))
    return torch.stack([torch.as_tensor(x, dtype=torch.float32, device=labels.device) for x in scores])


def weigh_samples(tiles, sample_of_row, weight_B):
    """The tiles of a batch with a weight for each of its samples."""
    def of(tile, part):
        return weight_B[sample_of_row[tile.student_rows[part.student]]]

    return [tile._replace(parts=tuple(part._replace(weight=of(tile, part)) for part in tile.parts))
            for tile in tiles]


def lesson_sums(student_rows, lessons):
    """(loss, sums) of a micro-batch: `weighted_sums` for every teacher; sums: (M, 2).

    Args:
        lessons: dicts of the other arguments of `weighted_sums`.
    """
    losses, sums = zip(*(weighted_sums(student_rows, **lesson) for lesson in lessons))
    return torch.stack(losses).sum(), torch.stack(sums)


def weighted_sums(student_rows, teacher_rows, kd_loss, tiles, weights, params=(), travels=None,
                  sequence=None):
    """Cross-entropy and distillation loss of a micro-batch.

    Args:
        student_rows: `HiddenLogits`, then no more than a tile of logits ever exists; or `StoredLogits`.
        teacher_rows: rows -> teacher logits; None with kd_loss None.
        kd_loss: of a Distillation; None: none.
        weights: of the two; what has weight 0 is not computed.
        params: what the loss trains beside the student.
        travels, sequence: see `sequence.complete`.
    Returns:
        (loss, sums): (), the weighted sum with its gradient, and (2,) both sums, in nats.
    """
    student_rows = complete(student_rows, travels, sequence)

    def of_part(x, y, part):
        found = x.new_zeros(2, dtype=torch.float32).unbind()
        if weights[0]:
            found = F.cross_entropy(at_least_float32(x), part.labels, reduction="sum"), found[1]
        if kd_loss and weights[1]:
            found = found[0], kd_loss(x, y, part)
        return torch.stack(found)

    if isinstance(student_rows, HiddenLogits):
        return tiled_loss(*student_rows[:2], teacher_rows, of_part, tiles, weights, params)
    sums = [student_rows.logits_TW[:0].float().sum().expand(2)]  # of the graph, also without a tile
    for tile in tiles:
        x = student_rows(tile.student_rows)
        for part in tile.parts:
            if part.fetch is not None and teacher_rows:
                y = teacher_rows(part.fetch)
            sums.append(of_part(x[part.student], y[part.teacher] if teacher_rows else None, part))
    sums = torch.stack(sums).sum(0)
    return (sums * sums.new_tensor(weights)).sum(), sums.detach()
