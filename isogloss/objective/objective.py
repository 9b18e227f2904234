"""Compute the loss of a micro-batch: cross-entropy and the distillation loss of every teacher.

Every term is a sum over the sub-tiles of a micro-batch, times a weight that makes it part of the
mean over the whole step on all ranks.  Sums and gradients come from `tiles.tiled_losses`; without
tiling from the logits of the whole micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isogloss.data.batch_types import TeacherBatch, weigh_positions
from isogloss.job.counts import TermSums
from isogloss.losses import next_token_cross_entropy
from isogloss.tiles import (
    HiddenLogits,
    LogitsSource,
    LossPart,
    tiled_losses,
    weighted,
)

if TYPE_CHECKING:
    from isogloss.job.sequence_group import SequenceGroup

# What is counted beside the two losses has no weight: the part in rollouts is in the second.
UNWEIGHTED = (0.0,) * (len(TermSums._fields) - 2)


@dataclass
class TeacherTarget:
    """Hold what a teacher says about one micro-batch.

    Attributes:
        logits: LogitsSource of its positions; of the kept columns where the loss keeps some.
        loss_fn, is_observed: see `loss_table.DistillationLoss`, for these columns.
        confidence: (B,) float, how sure it is of each sample; None where nothing asks for it.
        bytes_per_token: memory that its logits occupy until the loss reads them.
        rollout_nats: (samples,) -log q of its tokens in the chunks of rollouts; None: there is no
            rollout.
    """

    logits: LogitsSource
    loss_fn: Callable
    confidence: torch.Tensor | None
    bytes_per_token: float
    rollout_nats: torch.Tensor | None = None
    is_observed: bool = False


@dataclass
class TeacherTerm:
    """Hold one teacher's term in the loss of a micro-batch.

    Attributes:
        batch: TeacherBatch.
        target: TeacherTarget.
        weight: factor of the sum of its distillation loss.
    """

    batch: TeacherBatch
    target: TeacherTarget
    weight: float


@dataclass
class LossTerms:
    """Tell `StudentWithLoss` what to make of its logits: all terms in a micro-batch's loss.

    Attributes:
        ce_weight: factor of the sum of the cross-entropy.
        teachers: a TeacherTerm for each teacher.
        tiles: for the cross-entropy where there is no teacher, else None.
        sequence_group: ranks that hold the other shards of the sequences, or None.
        parameters: what the loss trains beside the student's model.
        balance: `router.RouterBalance`, or None.
        dump: is given, for each teacher, the (positions, losses) of `PairLoss.position_losses`; or
            None.
    """

    ce_weight: float
    teachers: list[TeacherTerm]
    tiles: list | None = None
    sequence_group: "SequenceGroup | None" = None
    parameters: list = ()
    balance: object = None
    dump: Callable | None = None

    def reduce(self, student_logits):
        return micro_batch_loss(student_logits, self)

    def with_routers(self, reduced, heard, is_text):
        """Return (loss, sums) with the loss of the routers, whose logits were heard."""
        loss, sums = reduced
        return loss + self.balance.loss(heard, is_text), sums


def micro_batch_loss(student_logits, terms):
    """Compute the weighted loss of a micro-batch.

    Args:
        student_logits: HiddenLogits (then no more than a tile of logits ever exists) or
            StoredLogits, of the flattened (B * S) positions of this rank.
        terms: LossTerms.
    Returns:
        (loss, sums): () with its gradient; (M, 5) `TermSums` of each teacher.  The first teacher's
        tiles carry the cross-entropy: the text is learned once.
    """
    if not terms.teachers:  # the text alone
        loss, sums = text_loss(student_logits, terms.tiles, terms.ce_weight)
        return torch.stack([loss]).sum(), torch.stack([sums])
    sources = []
    parts = []
    for number, term in enumerate(terms.teachers):
        source = student_logits
        if terms.sequence_group:  # hidden states of chunks that a sequence shard's border cuts
            source = terms.sequence_group.with_halo(student_logits, term.batch.halo_index)
        weights = [0.0 if number else terms.ce_weight, term.weight, *UNWEIGHTED]
        tile_loss = PairLoss(term.target.loss_fn, weights[:2], has_text=number == 0,
                             is_observed=term.target.is_observed,
                             position_losses=[] if terms.dump else None)
        sources.append(source)
        parts.append(LossPart(source.values, term.target.logits, tile_loss, term.batch.tiles,
                              weights))
    if isinstance(student_logits, HiddenLogits):
        # together: the gradient of the head exists once, however many teachers there are
        loss, sums = tiled_losses(student_logits.head, parts, terms.parameters)
    else:
        losses, sums = zip(*map(untiled_part, sources, parts))
        loss = torch.stack(losses).sum()
    if terms.dump:
        terms.dump(list(map(position_losses, parts)))
    return loss, torch.stack(sums)


def untiled_part(source, part):
    return untiled_loss(source, part.teacher_logits, part.tile_loss, part.tiles, part.weights)


def text_loss(student_logits, tiles, weight):
    """Compute the cross-entropy over some tiles; returns (loss, sums), see `micro_batch_loss`.

    Args:
        student_logits: HiddenLogits or StoredLogits.
    """
    weights = [weight, 0.0, *UNWEIGHTED]
    tile_loss = PairLoss(None, weights[:2])
    if isinstance(student_logits, HiddenLogits):
        part = LossPart(student_logits.hidden_TH, None, tile_loss, tiles, weights)
        loss, [sums] = tiled_losses(student_logits.head, [part])
        return loss, sums
    return untiled_loss(student_logits, None, tile_loss, tiles, weights)


@dataclass
class PairLoss:
    """Compute the sums of a sub-tile; a `tiles.TileLoss`.

    Attributes:
        kd_loss: see `loss_table.DistillationLoss.loss_fn`; None: there is no teacher.
        weights: of cross-entropy and distillation loss; what has weight 0 is not computed.
        has_text: the text is counted here, as with the first of several teachers.
        is_observed: see `loss_table.DistillationLoss`.
        position_losses: a list to which each sub-tile adds the (n,) distillation loss of the terms
            that begin at each student position; None: nobody asks.
    """

    kd_loss: Callable | None
    weights: list
    has_text: bool = True
    is_observed: bool = False
    position_losses: list | None = None

    def __call__(self, student, teacher, sub_tile):
        """Return (5,) `TermSums`."""
        # half precision would round sums of thousands of terms
        zero = student.new_zeros((), dtype=torch.float32)
        ce = kd = correct = agreed = zero
        if self.has_text and not sub_tile.on_policy:
            labels = sub_tile.student_labels
            # not argmax, which takes a CPU twice as long
            likely = student.detach().max(-1).indices
            correct = (likely == labels).sum(dtype=torch.float32)
            if self.weights[0]:
                # Tiles hold labeled positions only, so no row has to be selected.
                ce, _ = next_token_cross_entropy(student[None], labels[None], select=False)
        if self.kd_loss and self.weights[1]:
            agreement = Agreement()
            kd = self._kd(student, teacher, sub_tile, *[agreement] * self.is_observed)
            agreed = agreement.count if self.is_observed else zero
        rollout_kd = kd.detach() if sub_tile.on_policy else zero
        return torch.stack(TermSums(ce, kd, rollout_kd, correct, agreed))

    def _kd(self, student, teacher, sub_tile, *observe):
        """Return the distillation loss, and keep what it has of each position where asked to."""
        if self.position_losses is None:
            return self.kd_loss(student, teacher, sub_tile, *observe)
        weight = sub_tile.weight
        weight = student.new_ones(len(student)).float() if weight is None else weight.detach()
        weight.requires_grad_()
        with torch.enable_grad():
            kd = self.kd_loss(student, teacher, sub_tile._replace(weight=weight), *observe)
            # a sum of weighted terms is linear in their weights
            [value] = torch.autograd.grad(kd, weight, retain_graph=True)
        self.position_losses.append((value * weight).detach())
        return kd


class Agreement:
    """Count the chunks of which two models find the same most likely; a `losses.Observer`.

    Attributes:
        count: (), after a call.
    """

    def __call__(self, student_CK, teacher_CK):
        likely = [side.detach().max(-1).indices for side in (student_CK, teacher_CK)]
        self.count = (likely[0] == likely[1]).sum(dtype=torch.float32)


def position_losses(part):
    """Return (student positions (N,), their distillation loss (N,)) of what a LossPart has kept."""
    nothing = part.student_hidden.new_zeros(0)
    positions = [tile.student_positions for tile in part.tiles]
    kept = part.tile_loss.position_losses
    return torch.cat([nothing.long(), *positions]), torch.cat([nothing.float(), *kept])


def untiled_loss(student_logits, teacher_logits, tile_loss, tiles, weights):
    """Do what `tiled_loss` does with StoredLogits: autograd keeps whatever a loss makes of them."""
    # one term of the graph, also for a rank without a tile
    sums = [student_logits.logits_TW[:0].float().sum().expand(len(TermSums._fields))]
    for tile in tiles:
        student = student_logits(tile.student_positions)
        for sub_tile in tile.sub_tiles:
            teacher = None
            if teacher_logits is not None:
                # Not TeacherBlocks, which would write over what backward still needs.
                if sub_tile.teacher_positions is not None:
                    block = teacher_logits(sub_tile.teacher_positions)
                teacher = block[sub_tile.teacher_slice]
            sums.append(tile_loss(student[sub_tile.student_slice], teacher, sub_tile))
    total = torch.stack(sums).sum(0)
    return weighted(total, weights), total.detach()


def weigh_samples(batch, weight_B):
    """Return a TeacherBatch whose terms weigh as much as their sample.

    Args:
        batch: TeacherBatch.
        weight_B: (B,) float, a weight for each sample.
    """
    return weigh_positions(batch, weight_B[batch.sample_of_student])
