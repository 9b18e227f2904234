"""Compute the loss of a micro-batch: cross-entropy and the distillation loss of every teacher.

Each teacher has a `Part` of it, and the first one's tiles carry the cross-entropy: the text is
learned once.  Every term is a sum over the sub-tiles of a micro-batch, times a weight that makes it
part of the mean over the whole step on all ranks.  Sums and gradients come from
`tiles.tiled_losses`; without tiling from the logits of the whole micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isogloss.data.batch_types import StudentBatch, TeacherBatch
from isogloss.doors import door
from isogloss.job.counts import TermSums
from isogloss.losses import next_token_cross_entropy
from isogloss.tiles import HiddenLogits, LogitsSource, tiled_losses

if TYPE_CHECKING:
    from isogloss.job.sequence_group import SequenceGroup

# What is counted beside the two losses has no weight: the part in rollouts is in the second.
UNWEIGHTED = (0.0,) * (len(TermSums._fields) - 2)


@dataclass
class Part:
    """Hold what one teacher, or the text alone, adds to the loss of a micro-batch; a `tiles.Part`.

    Attributes:
        loss_fn, write_gradient, is_observed: see `loss_table.DistillationLoss`, for the columns of
            the teacher's logits; loss_fn None: there is no teacher.
        teacher_logits: LogitsSource of its positions; of the kept columns where the loss keeps
            some.
        batch: TeacherBatch of the positions; of a text alone its StudentBatch.
        ce_weight: factor of the sum of the cross-entropy; None: another part has the text.
        weight: factor of the sum of the distillation loss; what has weight 0 is not computed.
        confidence: (B,) float, how sure the teacher is of each sample; None: nothing asks for it.
        rollout_nats: (samples,) -log q of its tokens in the chunks of rollouts; None: there is no
            rollout.
        student_hidden: values of the student's positions, see `LossTerms.reduce`.
        position_losses: a list to which each sub-tile adds the (n,) distillation loss of the terms
            that begin at each student position; None: nobody asks.
    """

    loss_fn: Callable | None = None
    write_gradient: Callable | None = None
    is_observed: bool = False
    teacher_logits: LogitsSource | None = None
    batch: TeacherBatch | StudentBatch | None = None
    ce_weight: float | None = None
    weight: float = 0.0
    confidence: torch.Tensor | None = None
    rollout_nats: torch.Tensor | None = None
    student_hidden: torch.Tensor | None = None
    position_losses: list | None = None

    @property
    def tiles(self):
        return self.batch.tiles

    @property
    def weights(self):
        """Return the factor of each of `TermSums`."""
        return [self.ce_weight or 0.0, self.weight, *UNWEIGHTED]

    def tile_loss(self, student, teacher, sub_tile):
        """Return (6,) `TermSums` of a sub-tile; see `tiles.Part`."""
        # half precision would round sums of thousands of terms
        zero = student.new_zeros((), dtype=torch.float32)
        ce = kd = correct = agreed = clipped = zero
        if self.ce_weight is not None and not sub_tile.on_policy:
            labels = sub_tile.student_labels
            # not argmax, which takes a CPU twice as long
            likely = student.detach().max(-1).indices
            correct = (likely == labels).sum(dtype=torch.float32)
            if self.ce_weight:
                # Tiles hold labeled positions only, so no row has to be selected.
                ce, _ = next_token_cross_entropy(student[None], labels[None], select=False)
        if self.loss_fn and self.weight:
            agreement = Agreement()
            loss_fn = self.loss_fn
            if self.position_losses is not None:
                loss_fn = door("loss_dump").keeping_positions(loss_fn, self.position_losses)
            kd = loss_fn(student, teacher, sub_tile, *[agreement] * self.is_observed)
            agreed = agreement.count if self.is_observed else zero
            clipped = getattr(self.loss_fn, "clipped", zero)
        rollout_kd = kd.detach() if sub_tile.on_policy else zero
        if sub_tile.policy is not None:
            kd = kd + door("environment").policy_pull(
                student, sub_tile.student_labels, sub_tile.policy / self.weight)
        return torch.stack(TermSums(ce, kd, rollout_kd, correct, agreed, clipped))

    def tile_gradient(self, student, teacher, sub_tile, factors):
        """Write the gradient over the student's logits; return (6,) `TermSums`, or None.

        None: it is not written out for this loss, or more is asked for; autograd computes it.
        """
        if not (self.write_gradient and self.weight and len(teacher)):
            return None
        if self.position_losses is not None or sub_tile.policy is not None:
            return None
        has_text = self.ce_weight is not None and not sub_tile.on_policy
        ce, kd, correct, agreed = self.write_gradient(student, teacher, sub_tile, factors, has_text)
        zero = torch.zeros_like(kd)
        ce = ce if self.ce_weight else zero
        rollout_kd = kd if sub_tile.on_policy else zero
        agreed = zero if agreed is None else agreed
        return torch.stack(TermSums(ce, kd, rollout_kd, correct, agreed, zero))


@dataclass
class LossTerms:
    """Tell `StudentWithLoss` what to make of its logits: all parts of a micro-batch's loss.

    Attributes:
        parts: a Part for each teacher, of which the first one has the text; or of the text alone.
        sequence_group: ranks that hold the other shards of the sequences, or None.
        parameters: what the loss trains beside the student's model.
        balance: `router.RouterBalance`, or None.
        dump: is given the parts, with their `position_losses`; or None.
    """

    parts: list[Part]
    sequence_group: "SequenceGroup | None" = None
    parameters: list = ()
    balance: object = None
    dump: Callable | None = None

    def reduce(self, student_logits):
        """Compute the weighted loss of a micro-batch.

        Args:
            student_logits: HiddenLogits (then no more than a tile of logits ever exists) or
                StoredLogits, of the flattened (B * S) positions of this rank.
        Returns:
            (loss, sums): () with its gradient; (M, 6) `TermSums` of each part.
        """
        sources = []
        for part in self.parts:
            source = student_logits
            if self.sequence_group and part.loss_fn:  # chunks that a sequence shard's border cuts
                source = self.sequence_group.with_halo(student_logits, part.batch.halo_index)
            part.student_hidden = source.values
            part.position_losses = [] if self.dump else None
            sources.append(source)
        if isinstance(student_logits, HiddenLogits):
            # together: the gradient of the head exists once, however many teachers there are
            loss, sums = tiled_losses(student_logits.head, self.parts, self.parameters)
        else:
            from isogloss.objective.untiled import untiled_loss

            losses, sums = zip(*map(untiled_loss, sources, self.parts))
            loss = torch.stack(losses).sum()
        if self.dump:
            self.dump(self.parts)
        return loss, torch.stack(sums)

    def with_routers(self, reduced, heard, is_text):
        """Return (loss, sums) with the loss of the routers, whose logits were heard."""
        loss, sums = reduced
        return loss + self.balance.loss(heard, is_text), sums


class Agreement:
    """Count the chunks of which two models find the same most likely; a `losses.Observer`.

    Attributes:
        count: (), after a call.
    """

    def __call__(self, student_CK, teacher_CK):
        likely = [side.detach().max(-1).indices for side in (student_CK, teacher_CK)]
        self.count = (likely[0] == likely[1]).sum(dtype=torch.float32)
