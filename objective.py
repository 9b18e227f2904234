"""The distillation loss that --loss names, as a function of two models' logits and a batch of data.py."""

import torch

import losses
from losses import Spelling, common_tokens, find_chunks, piece_kl, projection_kl
from projection_tools import Pair, load_projection
from projection_tools.build import cached_projection
from projection_tools.spell import cached_spelling

ANY_TOKENIZERS = "piece_kl", "projection_kl", "gold", "h_kl", "uld", "alm"
ONE_TOKENIZER = {  # and the flags that each of them takes
    "forward_kl": (), "reverse_kl": (), "generalised_jsd": ("beta",), "skew_forward_kl": ("skew",),
    "skew_reverse_kl": ("skew",), "adaptive_kl": ("alpha",), "total_variation": ()}
ALM_MODES = "binary_kl", "binary_kl_reverse", "binary_ce", "temperature_limit", "squared", "absolute"


def build_loss(cfg, student, teacher, device):
    """The distillation loss of a run.

    Args:
        cfg: with loss, its parameters, and projection.
        student, teacher: `data.Side`.
    Returns:
        (kd_loss, spelling): kd_loss(student_logits, teacher_logits, batch, kept_K=None) -> (sum, count);
        spelling holds the tables from which the data workers list the terms of piece_kl, else None.
    Raises:
        ValueError: tokenizers that differ where the loss needs one, or have nothing in common.
    """
    pair = Pair.of(student.tokenizer, teacher.tokenizer, (cfg.student, cfg.teacher),
                   (student.table, teacher.table))
    if cfg.loss == "piece_kl":
        return _pieces(cfg, pair, device)
    if cfg.loss in ("uld", "alm"):
        return _bytes_alone(cfg), None
    if cfg.loss in ONE_TOKENIZER:
        if pair.prints[0] != pair.prints[1]:
            raise ValueError(f"--loss {cfg.loss}: needs one tokenizer, but those of {cfg.student} and "
                             f"{cfg.teacher} differ; use one of {', '.join(ANY_TOKENIZERS)}")
        return _positions(cfg), None
    return _projected(cfg, pair, device), None


def _pieces(cfg, pair, device):
    tables = cached_spelling(pair)
    tables = {name: tables[name] for name in Spelling._fields}
    spelling = Spelling(**{k: t.long() if isinstance(t, torch.Tensor) else t for k, t in tables.items()})
    on_device = Spelling(*[t.to(device) if isinstance(t, torch.Tensor) else t for t in spelling])

    def kd_loss(x, y, batch, kept_K=None):
        labels = batch["student_labels"], batch["teacher_labels"]
        return piece_kl(x, y, *labels, batch["terms"], on_device, cfg.temperature)

    return kd_loss, spelling


def _projected(cfg, pair, device):
    tables = load_projection(cfg.projection, pair) if cfg.projection else cached_projection(pair)
    projection = tables["indices"].to(device), tables["likelihoods"].to(device)
    if cfg.loss == "projection_kl":
        def kd_loss(x, y, batch, kept_K=None):
            chunks = batch["student_chunk"], batch["teacher_chunk"]
            return projection_kl(x, y, *chunks, *projection, kept_K, cfg.temperature, reverse=cfg.reverse)
    else:
        common = common_tokens(*projection, relaxed=cfg.loss == "h_kl")

        def kd_loss(x, y, batch, kept_K=None):
            chunks = batch["student_chunk"], batch["teacher_chunk"]
            how = cfg.temperature, cfg.uncommon_topk, "p", cfg.reverse
            return losses.gold(x, y, *chunks, *common, *how)
    return kd_loss


def _bytes_alone(cfg):
    loss, own = (losses.alm, {"mode": cfg.alm_mode}) if cfg.loss == "alm" else (losses.uld, {})

    def kd_loss(x, y, batch, kept_K=None):
        sides = [batch[f"{side}_{kind}"] for kind in ("labels", "chunk") for side in ("student", "teacher")]
        return loss(x, y, *sides, temperature=cfg.temperature, **own)

    return kd_loss


def _positions(cfg):
    """Of one tokenizer every chunk is one token: a row on either side."""
    loss, own = getattr(losses, cfg.loss), {name: getattr(cfg, name) for name in ONE_TOKENIZER[cfg.loss]}

    def kd_loss(x, y, batch, kept_K=None):
        chunks = find_chunks(batch["student_chunk"], batch["teacher_chunk"])
        rows = x.flatten(0, 1)[chunks.first_S][None], y.flatten(0, 1)[chunks.first_T][None]
        every = torch.ones(rows[0].shape[:2], dtype=torch.bool, device=x.device)
        return loss(*rows, every, temperature=cfg.temperature, top_k=cfg.top_k, **own)

    return kd_loss
