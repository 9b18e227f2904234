"""What a row of the data and a micro-batch hold, as plain records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from isogloss.job.counts import Counts


@dataclass
class StudentBatch:
    """Hold the student's side of a micro-batch; with sequence parallelism, this rank's shard.

    Attributes:
        ids: (B, S) int64.
        labels: (B, S) int64, the token that each position predicts, -100 for none.
        num_bytes: (B, S) int64, bytes of the predicted token, -1 where none count.
        positions: (B, S) int64 for packed rows and for shards; None: 0, 1, 2, ...
        tiles: Columns of `tile_plan.Tile` for the cross-entropy without a teacher, else None.
        logp: (B, S) float32, log-probability of the label when the student wrote it, NaN for what
            it did not write; None: there is no rollout.
        documents: of shards, the `sequence_group.document_spans` of their whole rows, else None.
        is_text: (B, S) bool, positions that hold no padding; None: nothing asks for it.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    num_bytes: torch.Tensor
    positions: torch.Tensor | None = None
    tiles: Sequence | None = None
    logp: torch.Tensor | None = None
    documents: list | None = None
    is_text: torch.Tensor | None = None


@dataclass
class TeacherBatch:
    """Hold one teacher's side of a micro-batch, and how it is compared with the student's.

    Attributes:
        ids, labels, num_bytes, positions: (B, T), as of StudentBatch; the whole sequences also with
            sequence parallelism.
        sample: (B * T,) int64, sample of every teacher position.
        labeled: (n,) int64, positions of the flattened (B * T) that have a label, sample by sample.
        num_labeled: how many each sample has; packed, there are more samples than rows.
        student_chunk, teacher_chunk: (B, S), (B, T) int64, chunk of each predicted token, -1: none.
        tiles: Columns of `tile_plan.Tile`, their sub-tiles with `Nodes` for divergences between two
            tokenizers, else `Chunks`.
        sample_of_student: (B * S + M,) int64, sample of every student position that tiles name.
        halo_index: (M,) int64, student positions that ranks of a sequence group exchange, see
            `sequence_group.SequenceShard`; None without sequence parallelism.
        rollout_positions: (n,) int64, those that are in chunks of what the student wrote; None:
            there is no rollout.
        keys: (samples, 2) int64, by which a cache finds what it holds of them; None: none is asked.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    num_bytes: torch.Tensor
    positions: torch.Tensor | None
    sample: torch.Tensor
    labeled: torch.Tensor
    num_labeled: list
    student_chunk: torch.Tensor
    teacher_chunk: torch.Tensor
    tiles: Sequence
    sample_of_student: torch.Tensor
    halo_index: torch.Tensor | None = None
    rollout_positions: torch.Tensor | None = None
    keys: torch.Tensor | None = None

    @property
    def num_samples(self):
        return len(self.num_labeled)


@dataclass
class Batch:
    """Hold a micro-batch.

    Attributes:
        student: StudentBatch.
        teachers: a TeacherBatch for each teacher.
        counts: Counts of this rank's samples.
        sample_ids: position of each sample in the data stream; -1: fills up the last batch.
        rollouts: of each sample its `rollouts.Rollout`, or None; empty: there is none.
        rollout_age: steps since the rollouts were written.
        is_measured: teachers are asked what they say of the rollouts beside the loss.
        skipped_prompts: samples that are left out because they give no prompt.
        effort: what its rollouts took, a `rollout_metrics.Effort`.
        place: of a stream, from which it goes on with what this batch read last, see
            `stream.Block`.
    """

    student: StudentBatch
    teachers: list
    counts: Counts
    sample_ids: list
    rollouts: list = field(default_factory=list)
    rollout_age: int = 0
    is_measured: bool = False
    skipped_prompts: int = 0
    effort: object = None
    place: dict | None = None


class Example(NamedTuple):
    """Hold a row of the data: its text or chat, and the value that chooses its teachers.

    content: text, chat, `rollouts.Rollout` or None (no sample); before rollouts are written also
        `rollouts.RolloutPrompt` and `rollouts.OldRollout`.
    route: value of the column --route_key; an Ellipsis: every teacher takes part.
    prompt: value of the column --prompt_key; None: there is none.
    tools: of a chat, what the assistant may call, as a list of objects; None: there are none.
    context: characters of a text, or messages of a chat, at its beginning that are read and from
        which nothing is learned.
    teacher_prompt: of a chat, messages that teachers alone read in front of it.
    weight: value of the column weight_key.
    row: all of the row, for an environment; None: there is none.
    """

    content: object
    route: object = ...  # not None, which is what an empty cell of the column holds
    prompt: object = None
    tools: list | None = None
    context: int = 0
    teacher_prompt: tuple = ()
    weight: float = 1.0
    row: dict | None = None
