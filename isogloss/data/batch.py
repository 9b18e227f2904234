"""Make one batch of tensors from texts: the student's side once, each teacher's beside it.

`Collator` runs inside DataLoader workers.  It encodes, aligns and cuts (sample.py, chat.py), pads
or packs, plans the tiles of every student-teacher pair, and counts the terms of every loss.  The
terms are known from the data, so a step has their number over all ranks before its first forward
pass.

Shapes: B rows (samples, or packed rows), S student positions, T teacher positions.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from isogloss.data import batch_types
from isogloss.data.sample import (
    Pairing,
    PairSample,
    TextEncoder,
    cut_sample,
    encode_text,
    pair_texts,
)
from isogloss.data.texts import fits, leave_out_tails
from isogloss.job.columns import Columns
from isogloss.job.counts import Counts, PairCounts
from isogloss.losses import find_chunks
from isogloss.nodes import Nodes, Tables, nodes_of_chunks, rows_that_go_on, tokens_that_ended
from isogloss.tile_plan import CPU_SUB_TILES, plan_tiles

SUB_TILES_AT_ONCE = 64  # whose nodes are listed in one call; more would take more memory

# --- collate --------------------------------------------------------------------------------------


@dataclass
class PairOptions:
    """Describe a teacher, as far as batches are concerned.

    Attributes:
        spelling: `nodes.Tables` for a divergence between two tokenizers, None for losses that work
            on whole chunks.
        routes: values of `Example.route` that the teacher is for; None: those that no other is for.
        same_tokenizer: its tokenizer is the student's.
        is_cached: what it says is looked up by the texts' keys.
        live_copies: of the loss, see `loss_table.LossSpec`; None: those of `Collator.sub_tiles`.
        half_life: of weights that fall behind the learned tokens of a sample; 0: they do not.
        weighs_rows: each sample counts by its weight.
    """

    encoder: TextEncoder
    spelling: Tables | None = None
    routes: list | None = None
    same_tokenizer: bool = False
    is_cached: bool = False
    live_copies: float | None = None
    half_life: float = 0.0
    weighs_rows: bool = False


@dataclass
class Collator:
    """Make a Batch of examples.

    Attributes:
        pairs: PairOptions of every teacher; empty: cross-entropy alone.
        train_on: what to learn of a chat: "assistant" or "all".
        pack: put several texts into a row where they fit, see packed.py.
        tile_mib, sub_tiles: see `tile_plan.plan_tiles`; inf: one tile of one sub-tile holds all.
        sequence_rank, sequence_size: which shard of every sequence this rank holds.
        computes_loss: this rank does; another one of its pipeline needs no tiles and no counts.
        width_step: rows are as wide as a multiple of it, see `Rows`.
        marks_text: batches say which positions hold no padding.
    """

    student: TextEncoder
    pairs: list
    train_on: str = "assistant"
    aligner: str = "bytes"
    pack: bool = False
    tile_mib: float = math.inf
    sub_tiles: tuple = CPU_SUB_TILES
    sequence_rank: int = 0
    sequence_size: int = 1
    computes_loss: bool = True
    width_step: int = 1
    marks_text: bool = False

    def __call__(self, examples, sample_ids=None):
        """Return the Batch of some examples.

        Args:
            examples: Example, text, chat (list of messages) or None (no sample) each.
            sample_ids: positions of the examples in the data stream; None: not known.
        """
        examples = list(map(as_example, examples))
        samples = self.samples(examples)
        rows = [[number] for number in range(len(samples))]
        if self.pack:
            from isogloss.data.options.packed import packed_rows

            rows = packed_rows(self, samples)
        student_sides = [sample.student for sample in samples]
        # a width that the shards of a sequence group divide evenly
        student_rows = Rows(rows, student_sides, self.sequence_size, self.width_step,
                            self.student.max_length)
        # whole sequences at first: which rank owns a chunk depends on all of its positions
        student = self._student_batch(student_sides, student_rows)
        counts = Counts(text_bytes=int(student.num_bytes.clamp(min=0).sum()))
        teachers = []
        for number, pair in enumerate(self.pairs):
            pair_samples = [sample.pairs[number] for sample in samples]
            teacher, pair_counts, labels = self._teacher_batch(
                pair, pair_samples, student, student_rows)
            if pair.is_cached:
                from isogloss.data.options.text_keys import keys_of

                teacher.keys = keys_of(examples)
            teachers.append(teacher)
            counts.pairs.append(pair_counts)
            if self.computes_loss:
                count_reading(pair_counts, samples, number, labels,
                              student_rows.sample_of_position(), self.sequence_rank == 0)
            # Sequence shards of different pairs own different positions near a border, but over
            # all ranks each pair owns every position once: any of them counts the tokens.
            if number == 0:
                count_tokens(counts, labels, student.logp)
        if not self.computes_loss:
            counts = Counts(pairs=[PairCounts() for _ in self.pairs])
        elif not self.pairs:
            count_tokens(counts, self._plan_cross_entropy(student), student.logp)
        if self.sequence_rank:  # the first rank of the sequence group counts whole texts
            counts.text_bytes = 0
        elif self.computes_loss:
            count_samples(counts, samples)
        if self.sequence_size > 1:
            from isogloss.job.sequence_group import keep_shard

            keep_shard(student, self.sequence_rank, self.sequence_size)
        for side in (student, *teachers):
            side.tiles = side.tiles and Columns.of(side.tiles)
        sample_ids = [-1] * len(samples) if sample_ids is None else list(sample_ids)
        rollouts = []
        if student.logp is not None:
            contents = [example.content for example in examples]
            rollouts = [None if isinstance(content, (str, list)) else content
                        for content in contents]
        return batch_types.Batch(student, teachers, counts, sample_ids, rollouts)

    # --- texts -> samples

    def samples(self, examples):
        """Return a cut `Sample` for each Example."""
        parts, student_ids = self._without_tails(examples)
        samples = self._read(parts, student_ids)
        for number, part in enumerate(parts):
            has_chunks = all(pair.alignment is None or pair.student_chunk.max(initial=-1) >= 0
                             for pair in samples[number].pairs)
            is_part = part is not examples[number] and fits(examples[number].content)
            if is_part and not has_chunks:  # see `leave_out_tails`
                samples[number], = self._read([examples[number]], [None])
        return samples

    def _without_tails(self, examples):
        """Return (Examples without what nobody reads of their texts, the student's ids or None)."""
        parts, student_ids = list(examples), [None] * len(examples)
        if self.aligner == "dp":  # whose chunks depend on the whole text
            return parts, student_ids
        texts = []
        for example in examples:
            texts.append(example.content if isinstance(example.content, str) else "")
        teachers = [pair.encoder for pair in self.pairs]
        for number, (part, ids) in enumerate(leave_out_tails(texts, self.student, teachers)):
            # else nothing to learn would be left of a completion
            if ids is not None and len(part) > examples[number].context:
                parts[number] = examples[number]._replace(content=part)
                student_ids[number] = ids
        return parts, student_ids

    def _read(self, examples, student_ids):
        """Return a cut `Sample` for each Example, of which nothing is left out before.

        Args:
            student_ids: of each what the student's encoder makes of it; None: not known.
        """
        takes_part = list(map(self.teachers_of, examples))
        # The student's tokenizer runs once, however many teachers there are.
        student_ids = self._encode_plain(self.student, examples, student_ids)
        teacher_ids = []
        max_lengths = []
        for number, pair in enumerate(self.pairs):
            wanted = []
            for example, taking in zip(examples, takes_part):
                wanted.append(example if taking[number] else batch_types.Example(None))
            teacher_ids.append(self._encode_plain(pair.encoder, wanted))
            max_lengths.append(pair.encoder.max_length)
        samples = []
        for number, example in enumerate(examples):
            content = example.content
            if content is None or (isinstance(content, str) and not content.strip()):
                student = None  # an empty row says nothing, not even how to end
                pairings = [Pairing()] * len(self.pairs)
            elif isinstance(example.content, str):
                ids = [of_teacher[number] for of_teacher in teacher_ids]
                student, pairings = self._read_text(example, student_ids[number], ids)
            elif isinstance(example.content, list):
                from isogloss.data.chat import read_chat

                student, pairings = read_chat(self, example, takes_part[number])
            else:
                from isogloss.data.rollouts import read_rollout

                student, pairings = read_rollout(self, example.content, takes_part[number])
            sample = cut_sample(student, pairings, self.student.max_length, max_lengths)
            for pair in sample.pairs:
                pair.is_rendered = not isinstance(example.content, str)
                pair.weight = example.weight
            samples.append(sample)
        return samples

    def teachers_of(self, example):
        """Return for each teacher whether it takes part in an example."""
        if example.route is ...:
            return [True] * len(self.pairs)
        claimed = set()
        for pair in self.pairs:
            claimed.update(pair.routes or ())
        takes_part = []
        for pair in self.pairs:
            if pair.routes is None:  # a teacher without routes takes what is left
                takes_part.append(example.route not in claimed)
            else:
                takes_part.append(example.route in pair.routes)
        return takes_part

    @staticmethod
    def _encode_plain(encoder, examples, known=()):
        """Tokenize all plain texts in one call; None in the place of everything else.

        Args:
            known: the ids of each, None where they are to be made; empty: of all.
        """
        encoded = list(known) or [None] * len(examples)
        numbers = []
        texts = []
        for number, example in enumerate(examples):
            if isinstance(example.content, str) and encoded[number] is None:
                numbers.append(number)
                texts.append(example.content)
        if texts:
            for number, ids in zip(numbers, encoder.encode(texts)):
                encoded[number] = ids
        return encoded

    def _read_text(self, example, student_ids, teacher_ids):
        """Return (EncodedText, [Pairing]) of a plain text.

        Args:
            teacher_ids: of every teacher; None: it takes no part.
        """
        text = example.content
        student = encode_text(text, student_ids, self.student, example.context)
        pairings = []
        for pair, ids in zip(self.pairs, teacher_ids):
            if ids is None:
                pairings.append(Pairing())
                continue
            teacher = encode_text(text, ids, pair.encoder, example.context)
            tables = self.student.table, pair.encoder.table
            pairings.append(pair_texts(text, student, teacher, *tables, self.aligner))
        return student, pairings

    # --- samples -> tensors

    def _student_batch(self, sides, rows):
        """Return the StudentBatch of whole sequences."""
        return batch_types.StudentBatch(
            ids=rows.fill(sides, "ids", pad_id(self.student.table)),
            labels=rows.fill(sides, "labels", -100),
            num_bytes=rows.fill(sides, "num_bytes", -1),
            positions=self._positions(rows),
            logp=None if rows.is_rollout is None else rows.fill(
                sides, "logp", np.nan, np.float32),
            is_text=rows.fill(sides, "ids", -1) >= 0 if self.marks_text else None,
        )

    def _teacher_batch(self, pair, samples, student, student_rows):
        """Return (TeacherBatch, PairCounts, labels whose loss this rank computes)."""
        sides = [sample.teacher for sample in samples]
        # the student's rows, so that a chunk is in the same row on both sides
        rows = Rows(student_rows.rows, sides, 1, self.width_step, pair.encoder.max_length)
        renumber_chunks(samples, student_rows)
        labels = rows.fill(sides, "labels", -100)
        sample = rows.sample_of_position()
        labeled = positions_by_sample(labels.flatten() != -100, sample)
        batch = batch_types.TeacherBatch(
            ids=rows.fill(sides, "ids", pad_id(pair.encoder.table)),
            labels=labels,
            num_bytes=rows.fill(sides, "num_bytes", -1),
            positions=self._positions(rows),
            sample=sample,
            labeled=labeled,
            num_labeled=torch.bincount(sample[labeled], minlength=len(samples)).tolist(),
            student_chunk=student_rows.fill(samples, "student_chunk", -1),
            teacher_chunk=rows.fill(samples, "teacher_chunk", -1),
            tiles=[],
            sample_of_student=student_rows.sample_of_position(),
        )
        labels = student.labels
        if not self.computes_loss:
            return batch, PairCounts(), labels
        texts = None
        if pair.spelling is not None:
            read_chunks = (student_rows.fill(samples, "read_student_chunk", -1),
                           rows.fill(samples, "read_teacher_chunk", -1))
            is_rendered = torch.tensor([sample.is_rendered for sample in samples])
            texts = TextsOf(student, batch, read_chunks, pair.spelling, is_rendered)
        shard = self._shard(batch.student_chunk, batch.teacher_chunk)
        if shard:
            # Each rank computes the chunks and labels that it owns, so that over the group every
            # term is computed once.
            labels = torch.where(shard.owned_mask, labels, -100)
            batch.student_chunk = torch.where(shard.owned_mask, batch.student_chunk, -1)
            batch.teacher_chunk = torch.where(shard.teacher_mask, batch.teacher_chunk, -1)
        is_rollout = student_rows.is_rollout
        if is_rollout is not None:
            in_rollout = (batch.teacher_chunk.flatten() >= 0) & is_rollout[sample]
            batch.rollout_positions = positions_by_sample(in_rollout, sample)
        batch.tiles = self._plan_tiles(pair, labels, batch, texts, is_rollout)
        if pair.half_life or pair.weighs_rows:
            from isogloss.data.options.term_weights import weigh_terms

            batch = weigh_terms(batch, pair, samples, student.labels)
        counts = self._count_pair(pair, samples, batch, student.logp, is_rollout)
        if shard:  # last, as all of the above names positions of whole sequences
            shard.localize(batch)
        return batch, counts, labels

    def _positions(self, rows):
        """Return the positions of packed Rows; None: they count from 0, as models do anyway."""
        if not self.pack:
            return None
        from isogloss.data.options.packed import positions_of

        return positions_of(rows)

    def _plan_tiles(self, pair, labels, batch, texts, is_rollout):
        """Return a pair's tiles with the terms of its loss; rollouts have tiles of their own."""
        if is_rollout is None:
            return self._plan_tiles_of(pair, labels, batch, texts, False)
        tiles = []
        for on_policy in (False, True):
            is_wanted = is_rollout == on_policy
            student_mask = is_wanted[batch.sample_of_student].view_as(labels)
            teacher_mask = is_wanted[batch.sample].view_as(batch.teacher_chunk)
            masked = replace(
                batch, student_chunk=torch.where(student_mask, batch.student_chunk, -1),
                teacher_chunk=torch.where(teacher_mask, batch.teacher_chunk, -1))
            masked_labels = torch.where(student_mask, labels, -100)
            tiles += self._plan_tiles_of(pair, masked_labels, masked, texts, on_policy)
        return tiles

    def _plan_tiles_of(self, pair, labels, batch, texts, on_policy):
        vocab_sizes = len(self.student.table), len(pair.encoder.table)
        budget = self.sub_tiles
        if pair.live_copies is not None:
            budget = budget._replace(live_copies=pair.live_copies)
        tiles = plan_tiles(labels, batch.student_chunk, batch.labels, batch.teacher_chunk,
                           vocab_sizes, self.tile_mib, sub_tiles=budget,
                           teacher_context=bool(texts))
        tables = pair.spelling
        if on_policy and tables:  # the student's own text teaches it nothing: all is asked
            tables = tables._replace(closed_V=torch.full_like(tables.closed_V, -1))
        # listed here, where data workers do it while the model trains
        terms = iter(texts.nodes(tiles, tables) if texts else [])
        planned = []
        for tile in tiles:
            sub_tiles = []
            for sub_tile in tile.sub_tiles:
                of_sub_tile = next(terms) if texts else find_chunks(
                    sub_tile.student_chunk[None], sub_tile.teacher_chunk[None])
                sub_tiles.append(sub_tile._replace(terms=of_sub_tile, on_policy=on_policy))
            planned.append(tile._replace(sub_tiles=tuple(sub_tiles)))
        return planned

    def _count_pair(self, pair, samples: list[PairSample], batch, logp, is_rollout):
        """Return the PairCounts of this rank."""
        is_aligned = batch.student_chunk >= 0
        counts = PairCounts(aligned_tokens=int(is_aligned.sum()))
        for tile in batch.tiles:
            for sub_tile in tile.sub_tiles:
                terms = sub_tile.terms
                if isinstance(terms, Nodes):
                    positions = terms.row_A
                    counts.roots += len(terms.roots.row_S)
                    # tokens that the student begins otherwise in this text than in the tables
                    cell_N = pair.spelling.cell_V[terms.roots.next_S]
                    is_other_N = cell_N != pair.spelling.cell_W[terms.roots.next_T]
                    counts.misplaced_roots += int(is_other_N.sum())
                else:
                    positions = terms.first_S
                num_terms = len(positions)
                counts.kd_terms += num_terms
                counts.rollout_terms += num_terms * sub_tile.on_policy
                weights = sub_tile.weight
                counts.weighing_terms += (
                    num_terms if weights is None else int((weights[positions] > 0).sum()))
        if logp is not None:
            counts.rollout_nats = -float(logp[is_aligned & ~logp.isnan()].double().sum())
        if self.sequence_rank:  # the first rank of the sequence group counts whole texts
            return counts
        alignments = []
        for number, sample in enumerate(samples):
            counts.aligned_bytes += sample.aligned_bytes
            if is_rollout is not None and is_rollout[number]:
                counts.rollout_bytes += sample.aligned_bytes
            counts.skipped_chats += sample.skipped
            if sample.alignment:
                alignments.append(sample.alignment)
        counts.add_alignments(alignments)
        return counts

    def _plan_cross_entropy(self, student):
        """Plan the tiles of a run without a teacher; return the labels that they predict."""
        # the tiles of a pair whose teacher side has no position
        no_chunk = torch.full_like(student.ids, -1)
        nothing = torch.zeros(len(student.ids), 0, dtype=torch.long)
        labels = student.labels
        shard = self._shard(no_chunk, nothing)
        if shard:
            labels = torch.where(shard.owned_mask, labels, -100)
        student.tiles = plan_tiles(labels, no_chunk, nothing, nothing, (len(self.student.table), 0),
                                   self.tile_mib, sub_tiles=self.sub_tiles)
        if shard:
            student.tiles = shard.localized(student.tiles)
        return labels

    # --- sequence parallelism

    def _shard(self, student_chunk, teacher_chunk):
        """Return what this rank holds of the batch, or None without sequence parallelism."""
        if self.sequence_size == 1:
            return None
        from isogloss.job.sequence_group import sequence_shard

        return sequence_shard(student_chunk, teacher_chunk, self.sequence_rank, self.sequence_size)


def as_example(value):
    return value if isinstance(value, batch_types.Example) else batch_types.Example(value)


def count_tokens(counts, labels, logp):
    """Count in Counts the labels that a rank's loss predicts."""
    is_label = labels >= 0
    counts.tokens = int(is_label.sum())
    if logp is not None:
        is_label = is_label & logp.isnan()
    counts.ce_tokens = int(is_label.sum())


def count_samples(counts, samples):
    """Count in Counts the samples of which something is learned, or would be if none was cut."""
    counts.rows += len(samples)
    for sample in samples:
        counts.samples += sample.has_labels
        counts.cut_samples += sample.has_labels and not (sample.student.labels >= 0).any()
        counts.overlapping_turns += sample.num_overlaps


def count_reading(counts, samples, number, labels, sample_of_position, counts_bytes):
    """Count in PairCounts what the student predicts of the samples that a teacher reads.

    A chat that the teacher's template rejects counts as well: it is lost, not another teacher's.

    Args:
        number: of the teacher.
        labels: (B, S) whose loss this rank computes, -100 for others.
        sample_of_position: (B * S,) int64.
        counts_bytes: this rank counts whole texts, the first of its sequence group.
    """
    reads = []
    for sample in samples:
        pair = sample.pairs[number]
        reads.append(pair.alignment is not None or pair.skipped)
        if counts_bytes and reads[-1]:
            counts.read_bytes += int(sample.student.num_bytes.clip(min=0).sum())
    is_read = torch.tensor(reads)[sample_of_position]
    counts.read_tokens = int((is_read & (labels.flatten() >= 0)).sum())


def pad_id(table):
    """Return the id that fills rows: with causal attention no real position looks at padding."""
    return table.pad if table.pad >= 0 else max(table.eos, 0)


def positions_by_sample(mask, sample):
    """Return the positions where a mask is True, sample by sample, each in its order."""
    positions = mask.nonzero().squeeze(1)
    return positions[sample[positions].argsort(stable=True)]


def renumber_chunks(samples: list[PairSample], rows):
    """Number the chunks of a row's samples one after the other; -1 stays."""
    # Two samples of a packed row would else have chunks of the same number, which are one chunk.
    numbers = [sample.num_chunk_ids for sample in samples]
    for sample, first in zip(samples, rows.numbers_before(numbers)):
        for name in ("student_chunk", "teacher_chunk", "read_student_chunk", "read_teacher_chunk"):
            chunk = getattr(sample, name)
            setattr(sample, name, np.where(chunk >= 0, chunk + first, -1))


class TextsOf:
    """Hold what the nodes of a translation ask about the texts of a batch.

    Attributes:
        student_ids: (B * S,) token that each student position reads.
        teacher_text: (B * T,) text of each teacher position that predicts a token; -1: it predicts
            none.  What stands behind the end of a text may be padding, whose number depends on the
            other texts, or what a cache does not hold: nothing asks there.
        ended: (B * T,) see `nodes.tokens_that_ended`.
        goes_on: (B * T,) bool, see `nodes.rows_that_go_on`.
    """

    def __init__(self, student, batch, read_chunks, tables, is_rendered):
        """Look at whole texts, before sequence shards part their chunks.

        Args:
            read_chunks: (B, S) and (B, T) int64, chunks also where nothing is learned.
            is_rendered: (samples,) bool, see PairSample.
        """
        self.student_ids = student.ids.flatten()
        self.teacher_text = torch.where(batch.labels.flatten() >= 0, batch.sample, -1)
        # Not the labels, which a prompt does not have.  In front of another chunk every token is
        # read; what the last column names is not asked for.
        next_ids = student.ids.roll(-1, 1)
        texts = dict(student_text_BS=batch.sample_of_student, teacher_text_BT=batch.sample)
        self.ended = tokens_that_ended(
            next_ids, batch.labels, *read_chunks, tables, **texts).flatten()
        self.goes_on = ~is_rendered[batch.sample]
        if is_rendered.any():
            self.goes_on |= rows_that_go_on(*read_chunks, **texts).flatten()

    def nodes(self, tiles, tables):
        """Return the Nodes of every sub-tile of some tiles."""
        parts = []
        positions = None  # those whose logits exist
        for tile in tiles:
            for sub_tile in tile.sub_tiles:
                if sub_tile.teacher_positions is not None:
                    positions = sub_tile.teacher_positions
                parts.append((sub_tile, tile.student_positions[sub_tile.student_slice],
                              positions[sub_tile.teacher_slice]))
        nodes = []
        for first in range(0, len(parts), SUB_TILES_AT_ONCE):
            nodes += self._nodes_of(*zip(*parts[first : first + SUB_TILES_AT_ONCE]), tables)
        return nodes

    def _nodes_of(self, sub_tiles, student_positions, teacher_positions, tables):
        """Return the Nodes of sub-tiles at these positions of both sides, a tensor for each."""
        first_S = starts_of(student_positions)
        first_T = starts_of(teacher_positions)
        columns = {}
        for name in ("student_labels", "teacher_labels", "student_chunk", "teacher_chunk"):
            columns[name] = torch.cat([getattr(sub_tile, name) for sub_tile in sub_tiles])
        for name, first in (("student_chunk", first_S), ("teacher_chunk", first_T)):
            # chunks are numbered within each sub-tile, which has fewer than student positions
            shift = torch.repeat_interleave(first_S[:-1], first.diff())
            columns[name] = torch.where(columns[name] >= 0, columns[name] + shift, -1)
        positions = torch.cat(teacher_positions)
        text = self.teacher_text[positions]
        follows = torch.zeros(len(text), dtype=torch.bool)
        follows[1:] = (positions[1:] - positions[:-1] == 1) & (
            text[1:] == text[:-1]) & self.goes_on[positions[1:]]
        follows[first_T[first_T < len(text)]] = False
        return nodes_of_chunks(
            find_chunks(columns["student_chunk"][None], columns["teacher_chunk"][None]),
            self.student_ids[torch.cat(student_positions)],
            columns["student_labels"].clamp(min=0), columns["teacher_labels"].clamp(min=0), tables,
            teacher_ended=self.ended[positions], teacher_follows=follows, first_S=first_S,
            first_T=first_T)


def starts_of(parts):
    """Return (parts + 1,) where each of some tensors begins among all, and the end of the last."""
    return torch.tensor([0, *itertools.accumulate(map(len, parts))])


# --- rows -----------------------------------------------------------------------------------------


class Rows:
    """Lay out the samples of a batch in right-padded rows.

    Attributes:
        rows: the samples of every row, one after the other.
        offsets: (samples,) column at which each sample begins.
        shape: of the tensors.
        is_rollout: (samples,) bool, which of them the student wrote; None: there is no rollout.
    """

    def __init__(self, rows, sides, multiple=1, step=1, most=0):
        """Lay out samples.

        Args:
            rows: the samples of every row.
            sides: TokenRow of every sample.
            multiple: of the width.
            step: the width is a multiple of it, too, where that is not beyond `most`: fewer widths,
                and a GPU prepares its attention for each anew.
        """
        self.rows = rows
        lengths = [len(side.ids) for side in sides]
        self.offsets = self.numbers_before(lengths)
        longest = 1  # a model takes no batch of width 0
        for row in rows:
            last = row[-1]
            longest = max(longest, self.offsets[last] + lengths[last])
        stepped = min(-(-longest // step) * step, max(longest, most))
        self.shape = len(rows), -(-stepped // multiple) * multiple
        of_sides = [side.logp is not None for side in sides]
        self.is_rollout = torch.tensor(of_sides) if any(of_sides) else None

    def numbers_before(self, sizes):
        """Return for each sample the sum of the sizes of the samples before it in its row."""
        before = [0] * len(sizes)
        for row in self.rows:
            total = 0
            for number in row:
                before[number] = total
                total += sizes[number]
        return before

    def places(self):
        """Yield (sample, its row, the column at which it begins), row by row."""
        for line, row in enumerate(self.rows):
            for number in row:
                yield number, line, self.offsets[number]

    def fill(self, samples, name, padding, dtype=np.int64):
        """Return a (rows, width) tensor of the array `name` of every sample that has one."""
        out = np.full(self.shape, padding, dtype)
        for number, line, start in self.places():
            values = getattr(samples[number], name)
            if values is not None:
                out[line, start : start + len(values)] = values
        return torch.from_numpy(out)

    def sample_of_position(self):
        """Return (rows * width,) the sample of every position; padding counts to the last one."""
        out = np.zeros(self.shape, np.int64)
        for number, line, start in self.places():
            out[line, start:] = number
        return torch.from_numpy(out).flatten()
