"""Build the losses that have a projection of one vocabulary onto the other, and learn one."""

import torch
import torch.distributed as dist

from isogloss import losses
from isogloss.doors import door
from isogloss.objective.loss_table import (
    AUTO_WEIGHT,
    DistillationLoss,
    batch_of_one,
    compiler_of,
    plain,
)
from isogloss.projection_tools.build import cached_projection
from isogloss.projection_tools.projection_files import as_tables, load_projection
from isogloss.spelling import unwritten_twins
from isogloss.tiles import TeacherBlocks


class LearnedProjection:
    """Train the weights of a projection with the student: a softmax of scores in each row.

    It starts as the projection that it is given; rows of one slot stay as they are.  The scores
    (V, K) are the parameter `projection_scores` of StudentWithLoss, so the engine steps, saves and
    resumes them.
    """

    def __init__(self, indices_VK, likelihoods_VK, pair):
        self.indices_VK = indices_VK
        self.pair = pair
        self.module = None
        # log of the weights, so that a softmax gives them back; 1e-6 stands for an unused slot
        self.start_VK = likelihoods_VK.clamp(min=1e-6).log()

    def attach(self, module, device):
        """Make the scores a parameter of a StudentWithLoss."""
        scores = torch.nn.Parameter(self.start_VK.to(device))
        module.register_parameter("projection_scores", scores)
        self.module = module

    def likelihoods(self, scores=None):
        """Return (V, K) float32 weights as they are now; rows sum to 1, or to 0 without a slot."""
        scores = self.module.projection_scores if scores is None else scores
        used = self.indices_VK >= 0
        # finite, because a row without a slot has nothing else to normalize
        masked = torch.where(used, scores.float(), -1e9)
        return torch.where(used, masked.softmax(1), 0.0)

    def tables(self, scores=None):
        """Return what a projection file holds, rows sorted by weight again."""
        weights, order = self.likelihoods(scores).detach().sort(dim=1, descending=True, stable=True)
        arrays = self.indices_VK.gather(1, order).cpu().numpy(), weights.cpu().numpy()
        return as_tables(arrays, self.pair, "distill.py, learn_projection")


def build_projection_kl(cfg, pair, device, has_rest=False):
    indices, likelihoods = _projection(cfg, pair, device)
    options = cfg.options_of_loss
    learned = LearnedProjection(indices, likelihoods, pair) if cfg.learn_projection else None
    # Entries of a learned projection hold their place in it, where the weight is looked up anew
    # in every step.
    places = torch.arange(indices.numel(), device=device).view_as(indices)
    source = places if learned else likelihoods

    if has_rest and options["chunk_average"] == "logp":
        raise ValueError("--loss_options: chunk_average logp: a mean of logarithms needs all "
                         "of the teacher's tokens, and of this teacher some are kept; keep hidden "
                         "states")
    num_tokens = len(pair.tables[1])
    # slots of a learned projection may get any weight
    weights = torch.ones_like(likelihoods) if learned else likelihoods
    reachable_W = losses.reachable_tokens(indices, weights, num_tokens)
    if not reachable_W.any():
        raise ValueError("--projection: no student token maps to a token of the teacher; build it "
                         "for these two models")

    def compare(listed, kept_K):
        """Return the loss of `losses.Entries`; kept_K: see `losses.projection_kl`."""

        def loss_fn(student_logits, teacher_logits, sub_tile, observe=None, bound=None):
            entries = listed
            if learned:
                weights = learned.likelihoods().flatten()
                entries = listed._replace(weight_E=weights[listed.weight_E])
            ids = batch_of_one(sub_tile)
            return losses.projection_kl(
                student_logits[None], teacher_logits[None], ids.student_chunk, ids.teacher_chunk,
                indices, likelihoods, temperature=cfg.temperature, weight_BS=ids.weight,
                kept_K=kept_K, entries=entries, chunks=sub_tile.terms, has_rest=has_rest,
                observe=observe, bound=bound, chunk_average=options["chunk_average"],
                reverse=options["reverse"])[0]

        return loss_fn

    def for_columns(kept_K):
        """Return the loss of these columns, or of all, and what writes its gradient, or None."""
        # once per step, not once per sub-tile: it goes through all V * K entries
        listed = losses.projection_entries(indices, source, num_tokens, kept_K, has_rest)
        is_written = not (learned or has_rest)
        gradient = write_projected(cfg, listed, len(indices), device) if is_written else None
        # truncated rows are whole, since what is outside of the columns is in their rest
        return compare(listed, kept_K if has_rest else None), gradient

    def coverage(teacher_logits, sub_tile):
        mass_T = losses.at_least_float32(teacher_logits[sub_tile.teacher_chunk >= 0]).softmax(-1)
        of_tokens = mass_T[:, : len(reachable_W)]  # what a rest holds is not known
        return {"unreachable_mass": (of_tokens[:, ~reachable_W].sum(), len(mass_T))}

    return DistillationLoss(
        *for_columns(None), for_columns=for_columns, coverage=coverage,
        coverage_names=("unreachable_mass",), indices_VK=indices, learned_projection=learned,
        is_observed=True)


def write_projected(cfg, listed, num_tokens, device):
    """Return what writes the gradient of `losses.projection_kl`, or None: autograd computes it.

    Args:
        listed: `losses.Entries`; num_tokens: V.
    """
    options = cfg.options_of_loss
    compiler = compiler_of(cfg, device)
    if compiler is plain or options["chunk_average"] == "logp":
        return None
    written = door("written")
    projection = written.Projection.of(listed, num_tokens)
    return written.ProjectionGradient(projection, cfg.temperature, options["reverse"], compiler)


def _common_and_rest(cfg, pair, device, relaxed=False):
    """Return (indices (V, K), ids of the common tokens on either side, those of all others).

    They are known here once, so that nothing waits for the device in a step.
    """
    indices, likelihoods = _projection(cfg, pair, device)
    unwritten_V = torch.from_numpy(unwritten_twins(pair.tables[0], pair.tokenizers[0])).to(device)
    written = indices.masked_fill(unwritten_V[:, None], -1)
    common = losses.common_tokens(written, likelihoods, relaxed=relaxed)
    rest = [losses.other_tokens(ids, len(table)) for ids, table in zip(common, pair.tables)]
    return indices, common, rest


def build_gold(cfg, pair, device, has_rest=False, *, relaxed=False):
    indices, common, rest = _common_and_rest(cfg, pair, device, relaxed)
    options = cfg.options_of_loss
    options.pop("max_divergence")  # see build_loss

    def loss_fn(student_logits, teacher_logits, sub_tile, observe=None, bound=None):
        ids = batch_of_one(sub_tile)
        return losses.gold(
            student_logits[None], teacher_logits[None], ids.student_chunk, ids.teacher_chunk,
            *common, temperature=cfg.temperature, weight_BS=ids.weight, chunks=sub_tile.terms,
            rest=rest, observe=observe, bound=bound, **options)[0]

    gradient = None
    compiler = compiler_of(cfg, device)
    if compiler is not plain and options["chunk_average"] == "p" and len(rest[0]) and len(rest[1]):
        written = door("written")
        gradient = written.GoldGradient(
            written.Vocabularies.of(common, rest), cfg.temperature, options["uncommon_topk"],
            options["reverse"], compiler)
    return DistillationLoss(loss_fn, gradient, indices_VK=indices, is_observed=True)


def build_hybrid_uld(cfg, pair, device, has_rest=False):
    indices, common, rest = _common_and_rest(cfg, pair, device)
    matched_weight = cfg.options_of_loss["matched_weight"]
    matched_weight = None if matched_weight == AUTO_WEIGHT else matched_weight

    def loss_fn(student_logits, teacher_logits, sub_tile, bound=None):
        ids = batch_of_one(sub_tile)
        return losses.uld(
            student_logits[None], teacher_logits[None], ids.student_labels, ids.teacher_labels,
            ids.student_chunk, ids.teacher_chunk, temperature=cfg.temperature, common=common,
            matched_weight=matched_weight, weight_BS=ids.weight, chunks=sub_tile.terms,
            rest=rest, bound=bound)[0]

    return DistillationLoss(loss_fn, indices_VK=indices)


def _projection(cfg, pair, device):
    """Return (indices (V, K), likelihoods (V, K)) of the run's projection."""
    if cfg.projection:
        tables = load_projection(cfg.projection, pair)
    else:
        tables = cached_projection(pair)
    return tables["indices"].to(device), tables["likelihoods"].to(device)


def kept_columns(setup, parts, group=None):
    """Return the sorted teacher columns (K,) that a loss compares in this step, on every rank.

    Args:
        setup: `targets.TeacherSetup`; parts: `objective.Part` of each micro-batch.
        group: ranks that compute losses; None: all.

    They are those with the largest logit at any position in a chunk (`teacher_importance`).
    """
    device = parts[0].batch.ids.device
    importance = torch.full((len(setup.encoder.table),), -torch.inf, device=device)
    for part in parts:
        # no more logits exist at a time than in the loss itself
        blocks = TeacherBlocks(part.teacher_logits, part.tiles)
        for positions in blocks.fetches:
            # the rest of truncated rows, in a column behind the tokens, has no place to compete for
            rows = blocks.fetch(positions)[:, : len(importance)]
            block = losses.teacher_importance(rows[None])
            importance = torch.maximum(importance, block)
    dist.all_reduce(importance, op=dist.ReduceOp.MAX, group=group)
    return importance.topk(setup.num_columns).indices.sort().values
