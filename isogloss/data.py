"""Text -> pairs of tokenizations, aligned, truncated at the same byte, padded.

One sample is read by the student and by the teacher, each through its own tokenizer.  Tokenizing and aligning
happen inside DataLoader workers.  A position t of a batch row predicts the token at t + 1, so labels and
chunk ids are shifted by one, here and nowhere else (`shift`).

The order of samples depends on the seed alone: sample i of an endless stream of shuffled epochs.  A step
reads the next ``micro * ranks * micro_steps`` of it, so the data position of a run is its step number,
whatever the number of ranks and workers.

Shapes: B samples, S student positions, T teacher positions.
"""

import glob
import itertools
import json
import math
import multiprocessing
import re
import signal
import sys
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from align import (Alignment, Located, TokenTable, align_located, align_regions, character_starts, common_cut,
                   coverage, locate)
from losses import Spelling, find_chunks, piece_terms
from isogloss.sequence import sequence_shard
from tiles import CPU_SUB_TILES, plan_tiles

READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow",
           ".csv": "csv"}
SHUFFLE_BUFFER = 10_000  # samples; streaming only


@dataclass
class TextEncoder:
    """One model's view of text.

    Attributes:
        tokenizer: a fast Hugging Face tokenizer.
        table: its TokenTable.
        max_length: positions per sample, at most.
    """

    tokenizer: object
    table: TokenTable
    max_length: int

    def encode(self, texts):
        """int64 arrays: [bos] text eos; bos only if the tokenizer has one and does not refuse it."""
        bos = [self.table.bos] if self.table.bos >= 0 and self._adds_bos() else []
        batch = self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return [np.array(bos + ids + [self.table.eos] * (self.table.eos >= 0), np.int64) for ids in batch]

    def _adds_bos(self):
        return getattr(self.tokenizer, "init_kwargs", {}).get("add_bos_token") is not False

    def offsets(self, text):
        """(tokens, 2) characters of the text for each token of `encode`, by the tokenizer itself."""
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        bos = [(0, 0)] * (self.table.bos >= 0 and self._adds_bos())
        return np.array([*bos, *coded["offset_mapping"], *[(0, 0)] * (self.table.eos >= 0)]).reshape(-1, 2)

    def place(self, ids, text):
        """Located: where in the text the tokens of `encode` stand; by offsets where bytes do not tell."""
        return locate(ids, self.table, text) or locate(ids, self.table, text, self.offsets(text))


@dataclass
class Sample:
    """One text on both sides; entry t of labels, chunk and bytes speaks of the token that t predicts."""

    student: tuple  # (ids, labels, chunk, bytes), see `shift`
    teacher: tuple
    alignment: Alignment | None  # before the cut
    aligned_bytes: int
    refused: bool = False  # by a chat template


NOTHING = (np.zeros(0, np.int64),) * 4
EMPTY = Sample(NOTHING, NOTHING, None, 0)  # fills the last evaluation batch


class Refused(ValueError):
    """A chat template does not write a chat."""


def make_sample(text, student_ids, teacher_ids, student, teacher, most=sys.maxsize):
    """Align, truncate both sides at the same byte, shift.

    Args:
        student_ids, teacher_ids: with bos and eos; teacher_ids is None when no teacher takes part.
        student, teacher: the TextEncoder of each.
        most: student tokens to keep at most, beside what `student` says.
    """
    places = [student.place(student_ids, text)]
    if teacher_ids is None:
        return finish_sample((student_ids,), [part_bytes(*places)], None, (student,), most=most)
    places.append(teacher.place(teacher_ids, text))
    size = len(text.encode(errors="replace"))
    alignment = align_located(student_ids, teacher_ids, *places, student.table, teacher.table, size)
    return finish_sample((student_ids, teacher_ids), [part_bytes(p) for p in places], alignment,
                         (student, teacher), most=most)


def part_bytes(place):
    """(S,) bytes of the text that each token stands for, -1 for a control token."""
    return np.where(place.begin < 0, -1, place.end - place.begin)


def finish_sample(ids, bytes_, alignment, sides, learned=None, most=sys.maxsize):
    """Truncate and shift what was aligned.

    Args:
        ids, bytes_: of the student and, with a teacher, of the teacher.
        learned: (S,) bool, student tokens to learn from; None: all.
        most: student tokens to keep at most, beside what its TextEncoder says.
    """
    limits = [side.max_length + 1 for side in sides]
    limits[0] = min(limits[0], most)
    labels = ids[0] if learned is None else np.where(learned, ids[0], -100)
    if alignment is None:
        parts = ids[0], labels, np.full(len(ids[0]), -1), bytes_[0]
        return Sample(shift(*parts, limits[0]), NOTHING, None, 0)
    # where one side alone spells a space that the text does not have, the models speak of other words
    used = np.append(np.where(alignment.same_bytes, np.arange(len(alignment.same_bytes)), -1), -1)
    chunks = [used[alignment.student_chunk], used[alignment.teacher_chunk]]
    cuts = common_cut(chunks, limits)
    # a chunk needs a position that predicts its first token; without bos the very first token has none
    lost = {int(chunk[0]) for chunk in chunks if len(chunk)}
    if learned is not None:
        lost |= set(chunks[0][~learned].tolist())
    chunks = [np.where(np.isin(chunk, list(lost)), -1, chunk) for chunk in chunks]
    student, teacher = [shift(i, l, c, b, cut) for i, l, c, b, cut
                        in zip(ids, (labels, ids[1]), chunks, bytes_, cuts)]
    found = np.unique(student[2][student[2] >= 0])
    return Sample(student, teacher, alignment, int(alignment.chunk_bytes[found].sum()))


def shift(ids, labels, chunk, bytes_, cut):
    """(ids, labels, chunk, bytes) of the first `cut` tokens; position t reads ids[t], predicts ids[t + 1]."""
    return ids[: cut - 1], labels[1:cut], chunk[1:cut], bytes_[1:cut]


# --- chats ----------------------------------------------------------------------------------------


@dataclass
class Rendering:
    """A chat as one model's template writes it.

    Attributes:
        ids: (S,) int64.
        place: Located, in the rendering.
        spans: {(message, part): (byte of the rendering, byte of the part, bytes)}, what the template kept of
            each part of each message; part: "content", "reasoning" or (number, "name" or "arguments") of a
            tool call.
        ends: {message: token that ends its turn}.
    """

    ids: np.ndarray
    place: Located
    spans: dict
    ends: dict


def render(messages, side):
    """Write a chat by the template of one side and find its messages again.

    Raises:
        Refused: the template does not write it.
    """
    def template(chat):
        try:
            return side.tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception as error:  # templates raise whatever they like
            name = side.tokenizer.name_or_path
            raise Refused(f"the chat template of {name} refuses a chat: {error}") from None

    text = template(messages)
    coded = side.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(coded["input_ids"], np.int64)
    place = locate(ids, side.table, text, coded["offset_mapping"])
    at, spans, ends = character_starts(text), {}, {}
    for key, (start, skipped, part) in find_parts(messages, text, template).items():
        spans[key] = int(at[start]), len(skipped.encode()), len(part.encode())
    stops = {side.table.eos, side.table.end_of_turn} - {-1}
    for m in {m for m, _ in spans}:
        stop = max(begin + size for (k, _), (begin, _, size) in spans.items() if k == m)
        after = np.flatnonzero(place.begin >= stop)
        if len(after) and int(ids[after[0]]) in stops:
            ends[m] = int(after[0])
    return Rendering(ids, place, spans, ends)


MARK = "\ue000{}\ue001"  # of the private use area: in no chat


def find_parts(messages, text, template):
    """Where a rendering holds the parts of each message.

    A second rendering with marks instead of contents tells what the template writes around them, so a
    content like "user" is not mistaken for a header.  What the template rewrote is not found.

    Returns:
        {(message, part): (character of the rendering, what is cut off before, what the template kept)}.
    """
    wanted = {m for m, message in enumerate(messages) if message.get("content")}
    marked = [dict(message, content=MARK.format(m)) if m in wanted else message
              for m, message in enumerate(messages)]
    skeleton = re.split(MARK.format(r"(\d+)"), template(marked))
    found, at = {}, 0
    for before, m, after in zip(skeleton[::2], map(int, skeleton[1::2]), skeleton[2::2]):
        start = text.find(before, at)
        if start < 0:
            continue
        at = start + len(before)
        content = messages[m]["content"]
        thought, _, answer = content.rpartition("</think>")
        for form in (content, content.strip(), content.rstrip(), content.lstrip(),
                     *([answer, answer.strip()] if thought else [])):  # some leave out what was thought
            if form and text.startswith(form + after, at):
                found[m, "content"] = at, content[: content.rindex(form)], form
                at += len(form)
                break
    contents = [(m, start, start + len(kept)) for (m, _), (start, _, kept) in found.items()]
    for m, message in enumerate(messages):  # the rest stands between the contents of its neighbors
        low = max([end for k, _, end in contents if k < m], default=0)
        high = min([start for k, start, _ in contents if k > m], default=len(text))
        for key, part in _other_parts(message):
            start = text.find(part, low, high)
            if part and start >= 0:
                found[m, key], low = (start, "", part), start + len(part)
    return found


def _other_parts(message):
    """(key, text) of what a message holds beside its content."""
    yield "reasoning", (message.get("reasoning_content") or "").strip()
    for n, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        yield (n, "name"), function.get("name", "")
        yield (n, "arguments"), arguments if isinstance(arguments, str) else json.dumps(
            arguments, ensure_ascii=False)


def make_chat_sample(messages, student, teacher, train_on, most=sys.maxsize):
    """A chat, rendered by either side's own template, aligned part by part of every message.

    Args:
        messages: list of {"role": ..., "content": ...}.
        train_on: "assistant": learn what the assistant says, and to end; "all": the whole rendering.
        most: student tokens to keep at most.
    """
    sides = (student, teacher) if teacher else (student,)
    views = [render(messages, side) for side in sides]
    roles = [message["role"] for message in messages]
    learned = np.zeros(len(views[0].ids), bool)
    for m, role in enumerate(roles):
        if role == "assistant" and m in views[0].ends:
            learned[views[0].ends[m]] = True
    for (m, _), (begin, _, size) in views[0].spans.items():
        if roles[m] == "assistant":
            learned |= (views[0].place.begin < begin + size) & (views[0].place.end > begin)
    learned = np.ones_like(learned) if train_on == "all" else learned
    bytes_ = [part_bytes(view.place) for view in views]
    for b, side, view in zip(bytes_, sides, views):
        b[side.table.special[view.ids]] = -1
    bytes_[0] = np.where(learned, bytes_[0], -1)
    ids = tuple(view.ids for view in views)
    if teacher is None:
        return finish_sample(ids, bytes_, None, sides, learned, most)
    regions = common_regions(*views)
    pair = student.table, teacher.table
    alignment = align_regions(*ids, views[0].place, views[1].place, regions, *pair)
    told = [text for m in messages for text in (m.get("content") or "", *dict(_other_parts(m)).values())]
    told = sum(len(text.encode()) for text in told)
    alignment.dropped["unmatched"] += told - alignment.text_bytes  # what a template left out or rewrote
    return finish_sample(ids, bytes_, alignment._replace(text_bytes=told), sides, learned, most)


def common_regions(student, teacher):
    """Regions for `align_regions`: what both renderings kept of each part, in the order of both."""
    regions, at = [], 0
    keys = sorted(student.spans.keys() & teacher.spans.keys(), key=lambda key: student.spans[key])
    last = {m: key for key in keys for m in [key[0]]}
    for key in keys:
        (s, s_skip, s_size), (t, t_skip, t_size) = student.spans[key], teacher.spans[key]
        low, high = max(s_skip, t_skip), min(s_skip + s_size, t_skip + t_size)
        if low >= high or t < at:
            continue
        at, m = t + t_size, key[0]
        ends = m in student.ends and m in teacher.ends and last[m] == key
        pair = (student.ends[m], teacher.ends[m]) if ends else None
        regions.append((s + low - s_skip, t + low - t_skip, high - low, pair))
    return regions


# --- batches --------------------------------------------------------------------------------------


@dataclass
class Collate:
    """Texts -> one batch of tensors.

    Attributes:
        student, teacher: TextEncoder; teacher None: the text alone.
        spelling: tables for the terms of piece_kl, or None for losses that work on whole chunks.
        train_on: what to learn of a chat: "assistant" or "all".
        tile_mib, parts: see `tiles.plan_tiles`; inf: one tile of one part holds all.
        sequence_rank, sequence_size: which part of every sequence this rank holds, see sequence.py.
    """

    student: TextEncoder
    teacher: TextEncoder | None
    spelling: Spelling | None
    train_on: str = "assistant"
    tile_mib: float = math.inf
    parts: tuple = CPU_SUB_TILES
    sequence_rank: int = 0
    sequence_size: int = 1

    def __call__(self, texts):
        """Texts, or chats (lists of messages); None: no sample.

        Returns:
            student_ids, student_labels (-100 on padding), student_chunk (-1): (B, S) int64; teacher_* too;
            student_bytes, teacher_bytes: (B, S), (B, T) bytes of the predicted token, -1 for eos and padding;
            tiles: list of `tiles.Tile`, its parts with `PieceTerms` for piece_kl, else `Chunks`;
            sample_of_row, teacher_sample: (B * S,), (B * T,) sample of every row that tiles may name;
            student_positions, teacher_positions: (B, S), (B, T), where samples are packed into rows;
            counts: dict of ints about the batch.
            With sequence_size above 1 all of the student, tiles and counts are of this rank's part, S is
            shorter, and there are student_positions and what `sequence.SequenceShard` calls travels.
        """
        return self.batch(self.samples(texts, [sys.maxsize] * len(texts)))

    def samples(self, texts, most, taught=None):
        """A Sample for each text, of at most that many student tokens.

        Args:
            taught: for each text, whether the teacher takes part; None: in all.
        """
        taught = [True] * len(texts) if taught is None else taught
        present = [each for each in zip(texts, most, taught) if each[0] is not None]
        samples = iter(self._samples(*map(list, zip(*present)))) if present else iter(())
        return [EMPTY if text is None else next(samples) for text in texts]

    def batch(self, samples, rows=None):
        """What a call returns, of samples; rows: of `pack_rows`, None: a row each."""
        batch = _lay_out("student", samples, rows, self.student.table, self.sequence_size)
        if self.teacher is not None:
            batch |= _lay_out("teacher", samples, rows, self.teacher.table)
        share = self._share(batch)
        counts = {"ce": int((batch["student_labels"] >= 0).sum()), "kd": 0,
                  "text_bytes": int(batch["student_bytes"].clamp(min=0).sum()),
                  "aligned_bytes": sum(s.aligned_bytes for s in samples),
                  "aligned_tokens": int((batch["student_chunk"] >= 0).sum())}
        counts |= _chunk_counts([s.alignment for s in samples if s.alignment])
        counts["skipped_chats"] = sum(s.refused for s in samples)
        if self.sequence_rank:
            counts |= dict.fromkeys(counts.keys() - OF_OWN_ROWS, 0)  # the first rank has counted them
        if self.teacher is not None:
            counts["kd"] = len(find_chunks(batch["student_chunk"], batch["teacher_chunk"]).first_S)
        batch["tiles"] = self._tiles(batch)
        if self.spelling is not None:
            counts["kd"] = sum(int(part.terms.count_all) for tile in batch["tiles"] for part in tile.parts)
        return (self._part(batch, share) if share else batch) | {"counts": counts, "samples": len(samples)}

    def _share(self, batch):
        """Leave labels and chunks to the ranks that own them."""
        if self.sequence_size == 1:
            return None
        chunks = batch["student_chunk"], batch.get("teacher_chunk", batch["student_chunk"][:, :0])
        share = sequence_shard(*chunks, self.sequence_rank, self.sequence_size)
        batch["whole_labels"] = batch["student_labels"]
        batch["student_labels"] = torch.where(share.owned, batch["student_labels"], -100)
        batch["student_chunk"] = torch.where(share.owned, batch["student_chunk"], -1)
        if self.teacher is not None:
            batch["teacher_chunk"] = torch.where(share.taught, batch["teacher_chunk"], -1)
        return share

    def _part(self, batch, share):
        """This rank's part of the sequences."""
        B, S = batch["student_ids"].shape
        part = S // self.sequence_size
        own = slice(self.sequence_rank * part, (self.sequence_rank + 1) * part)
        batch["student_labels"] = batch.pop("whole_labels")
        batch.setdefault("student_positions", torch.arange(S).expand(B, S))
        for field in ("ids", "labels", "chunk", "bytes", "positions"):
            batch[f"student_{field}"] = batch[f"student_{field}"][:, own].contiguous()
        batch["tiles"] = [tile._replace(student_rows=share.row[tile.student_rows]) for tile in batch["tiles"]]
        samples = torch.zeros(B * part + len(share.travels), dtype=torch.long)
        here = share.row >= 0
        samples[share.row[here]] = batch["sample_of_row"][here]
        return batch | {"sample_of_row": samples, "travels": share.travels}

    def _tiles(self, batch):
        student = batch["student_labels"], batch["student_chunk"]
        if self.teacher is None:
            nothing, sizes = torch.zeros(len(student[0]), 0, dtype=torch.long), (len(self.student.table), 0)
            return plan_tiles(*student, nothing, nothing, sizes, self.tile_mib, self.parts)
        teacher = batch["teacher_labels"], batch["teacher_chunk"]
        sizes = len(self.student.table), len(self.teacher.table)
        tiles = plan_tiles(*student, *teacher, sizes, self.tile_mib, self.parts)
        return [tile._replace(parts=tuple(self._with_terms(part) for part in tile.parts)) for tile in tiles]

    def _with_terms(self, part):
        ids = [x[None] for x in (part.labels.clamp(min=0), part.teacher_next, part.student_chunk,
                                 part.teacher_chunk)]
        terms = piece_terms(*ids, self.spelling) if self.spelling else find_chunks(*ids[2:])
        return part._replace(terms=terms)

    def _samples(self, texts, most, taught):
        teachers = [self.teacher if takes_part else None for takes_part in taught]
        plain = [isinstance(text, str) for text in texts]
        student_ids = iter(self.student.encode(list(itertools.compress(texts, plain))) if any(plain) else [])
        read = [text for text, is_plain, teacher in zip(texts, plain, teachers) if is_plain and teacher]
        teacher_ids = iter(self.teacher.encode(read) if read else [])
        for text, limit, is_plain, teacher in zip(texts, most, plain, teachers):
            if is_plain:
                ids = next(student_ids), next(teacher_ids) if teacher else None
                yield make_sample(text, *ids, self.student, teacher, limit)
            else:
                yield self._chat_sample(text, teacher, limit)

    def _chat_sample(self, messages, teacher, limit):
        """What the teacher's template refuses the student learns alone, what its own refuses not at all."""
        for side in (teacher, None) if teacher else (None,):
            try:
                sample = make_chat_sample(messages, self.student, side, self.train_on, limit)
                return replace(sample, refused=side is not teacher)
            except Refused as error:
                warnings.warn(f"{error}; such chats are left out", stacklevel=2)
        return replace(EMPTY, refused=True)


class Routed(NamedTuple):
    """A text, and the value by which its teachers are chosen."""

    text: object
    route: object


@dataclass
class Reader:
    """Row of a data set -> its text; with a route_key -> Routed."""

    text_key: str
    route_key: str = ""

    def __call__(self, row):
        return Routed(row[self.text_key], row[self.route_key]) if self.route_key else row[self.text_key]


class CollateAll:
    """Texts -> one batch for every teacher of a student.

    All of them hold the same student tokens: where one teacher's context or alignment asks for a shorter
    text, it is shorter for all.

    Args:
        collates: a Collate for each teacher.
        pack: put several texts into a row where they fit, see `pack_rows`.
        routes: the values of `Routed` texts that each teacher is for; None: those that no other is for.
    """

    def __init__(self, collates, routes=None, pack=False):
        self.collates, self.pack = collates, pack
        self.routes = routes or [None] * len(collates)
        self.named = {route for named in self.routes for route in named or ()}

    def teaches(self, routes, text):
        """Is a teacher with these routes for this text?"""
        if not isinstance(text, Routed):
            return True
        return text.route in routes if routes is not None else text.route not in self.named

    def __call__(self, texts):
        """List of what each Collate returns."""
        most = [sys.maxsize] * len(texts)
        taught = [[self.teaches(routes, text) for text in texts] for routes in self.routes]
        texts = [text.text if isinstance(text, Routed) else text for text in texts]
        while True:
            found = [collate.samples(texts, most, *rest) for collate, *rest in zip(self.collates, taught)]
            shortest = [min(len(sample.student[0]) for sample in of_text) + 1 for of_text in zip(*found)]
            if all(len(sample.student[0]) + 1 == least
                   for samples in found for sample, least in zip(samples, shortest)):
                rows = self._rows(found) if self.pack else None
                return [collate.batch(samples, rows) for collate, samples in zip(self.collates, found)]
            most = shortest

    def _rows(self, found):
        """`pack_rows` of the samples of every Collate; student and teachers have the same rows."""
        sides = [([sample.student for sample in found[0]], self.collates[0].student)]
        sides += [([sample.teacher for sample in samples], collate.teacher)
                  for samples, collate in zip(found, self.collates) if collate.teacher]
        sizes = zip(*[[len(parts[0]) for parts in of_side] for of_side, _ in sides])
        return pack_rows(list(sizes), [side.max_length for _, side in sides])


def pack_rows(sizes, limits):
    """[[sample, ...] of every row]: each sample goes into the first row that has room for it on every side.

    Args:
        sizes: positions of each sample on each side; limits: of a row.

    >>> pack_rows([(6, 5), (5, 9), (4, 4)], (10, 10))
    [[0, 2], [1]]
    """
    rows, used = [], []
    for number, own in enumerate(sizes):
        for row, full in zip(rows, used):
            if all(a + b <= limit for a, b, limit in zip(full, own, limits)):
                row.append(number)
                full[:] = [a + b for a, b in zip(full, own)]
                break
        else:
            rows.append([number])
            used.append(list(own))
    return rows


DROPPED = "normalized_bytes", "unencodable_bytes", "unmatched_bytes"
CHUNKS = "chunks", "chunks_1_1", "chunks_1_n", "chunks_n_1", "chunks_n_m"
OF_OWN_ROWS = {"ce", "kd", "aligned_tokens"}  # counts of a rank's part of the sequences; others are of all


def _chunk_counts(alignments):
    """Counts of `align.coverage` that can be summed over batches; of whole texts, before any cut."""
    found = {"source_bytes": sum(a.text_bytes for a in alignments)}
    found |= {key: sum(a.dropped[key.removesuffix("_bytes")] for a in alignments) for key in DROPPED}
    shares = coverage(alignments)
    found["chunks"] = shares["chunks"]
    for name, key in zip(CHUNKS[1:], ("1:1", "1:n", "n:1", "n:m")):
        found[name] = round(shares[key] * shares["chunks"])
    return found


def _lay_out(side, samples, rows, table, multiple=1):
    """Right-padded tensors of one side; with causal attention no real position ever looks at padding.

    Args:
        rows: samples of every row, one after the other; None: a row each.
        multiple: of the width.
    """
    packed, rows = rows is not None, rows or [[number] for number in range(len(samples))]
    pad_id = table.pad if table.pad >= 0 else max(table.eos, 0)
    size = max(1, max(sum(len(getattr(samples[i], side)[0]) for i in row) for row in rows))
    shape = len(rows), -(-size // multiple) * multiple
    fills = {"ids": pad_id, "labels": -100, "chunk": -1, "bytes": -1}
    out = {field: np.full(shape, fill, np.int64) for field, fill in fills.items()}
    positions, sample = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for line, row in enumerate(rows):
        at = chunks = 0
        for number in row:
            ids, labels, chunk, bytes_ = getattr(samples[number], side)
            own = ids, labels, np.where(chunk >= 0, chunk + chunks, -1), bytes_
            for field, values in zip(out, own):
                out[field][line, at : at + len(values)] = values
            positions[line, at:] = np.arange(shape[1] - at)  # padding goes on where the last sample ends
            sample[line, at:] = number
            at, chunks = at + len(ids), chunks + _chunk_numbers(samples[number])
    found = {f"{side}_{field}": torch.from_numpy(values) for field, values in out.items()}
    if packed:
        found[f"{side}_positions"] = torch.from_numpy(positions)
    name = "sample_of_row" if side == "student" else "teacher_sample"
    return found | {name: torch.from_numpy(sample).flatten()}


def _chunk_numbers(sample):
    """One more than the highest chunk id of a sample, on either side."""
    return 1 + max(-1, *(int(x[2].max()) for x in (sample.student, sample.teacher) if len(x[2])), -1)


# --- rows -----------------------------------------------------------------------------------------


def load_rows(source, text_key, split="train", streaming=False):
    """Open a data set and check that it holds text.

    Args:
        source: hub id ("org/name" or "org/name:config"), or a local file, directory or glob of files
            ending in .txt (one sample a line), .jsonl, .json, .parquet, .arrow or .csv; or a directory of
            save_to_disk.
        text_key: column to read.
    Returns:
        datasets.Dataset or IterableDataset.
    Raises:
        ValueError: with what arrived, what was expected and what to do.
    """
    try:
        rows = _open(source, split, streaming)
    except ValueError:
        raise
    except Exception as error:  # datasets raises whatever its readers and the network raise
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"--data {source}: cannot be read ({type(error).__name__}: {reason[0]})") from None
    columns = rows.column_names or list(next(iter(rows.take(1)), {}))
    if not columns:
        raise ValueError(f"--data {source}: the data set is empty; at least one row of text is needed")
    if text_key not in columns:
        raise ValueError(f"--data {source}: no column {text_key!r}; it has {', '.join(columns)}; name "
                         "one of them by --text_key")
    if not streaming:
        _check_text(source, rows, text_key)
    return rows


def _open(source, split, streaming):
    path = Path(source).expanduser()
    if (path / "state.json").is_file():
        rows = datasets.load_from_disk(str(path))
        return rows.to_iterable_dataset() if streaming else rows
    if path.is_dir():
        files = sorted(str(f) for f in path.rglob("*") if f.suffix in READERS)
    else:
        files = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    if files:
        kinds = {READERS.get(Path(f).suffix) for f in files}
        if len(kinds) > 1 or None in kinds:
            found = ", ".join(sorted({Path(f).suffix or Path(f).name for f in files}))
            raise ValueError(f"--data {source}: files of kind {found}; expected one of {', '.join(READERS)}")
        if all(Path(f).stat().st_size == 0 for f in files):
            raise ValueError(f"--data {source}: the data set is empty; at least one row of text is needed")
        return datasets.load_dataset(kinds.pop(), data_files=files, split="train", streaming=streaming)
    is_path = path.is_dir() or path.suffix in READERS or source.startswith((".", "/", "~"))
    if is_path or source.count("/") != 1:
        raise ValueError(f"--data {source}: no such file, directory or glob match; expected files of kind "
                         f"{', '.join(READERS)} or a hub id like org/name")
    name, _, config = source.partition(":")
    return datasets.load_dataset(name, config or None, split=split, streaming=streaming)


def holds_chats(rows, text_key):
    """Does the column hold lists of messages?"""
    features = rows.features
    if features is None:  # a stream whose columns are known by its rows only
        first = next(iter(rows.take(1)))[text_key]
        return isinstance(first, list) and {"role", "content"} <= set(first[0])
    return {"role", "content"} <= set(getattr(features[text_key], "feature", None) or {})


def check_templates(rows, text_key, sides):
    """A ValueError where a side's chat template refuses every one of the first chats."""
    chats = [row[text_key] for row in rows.take(8)]
    for side in sides:
        refused = []
        for chat in chats:
            try:
                render(chat, side)
                break
            except Refused as error:
                refused.append(error)
        if chats and len(refused) == len(chats):
            raise ValueError(f"{refused[0]}; so it does the other {len(chats) - 1} of the first chats; mend "
                             "the chats or the template")


def _check_text(source, rows, text_key):
    if len(rows) == 0:
        raise ValueError(f"--data {source}: the data set is empty; at least one row of text is needed")
    feature = rows.features[text_key]
    dtype = getattr(feature, "dtype", str(feature))
    if not holds_chats(rows, text_key) and dtype not in ("string", "large_string"):
        raise ValueError(f"--data {source}: column {text_key!r} holds {dtype}, expected text in every row; "
                         "mend it or name another column by --text_key")
    if rows.data.column(text_key).null_count:
        row = next(i for i, text in enumerate(rows[text_key]) if text is None)
        raise ValueError(f"--data {source}: row {row} of {text_key!r} is null, expected text; remove it")


def _check_row(i, text):
    if not isinstance(text, (str, list)):
        raise ValueError(f"sample {i} of the stream holds {text!r:.40}, expected text; mend it or name "
                         "another column by --text_key")


def split_rows(rows, eval_rows, text_key):
    """(train, held out): the first `eval_rows` rows are held out, whatever the seed."""
    if isinstance(rows, datasets.IterableDataset):
        first = list(rows.take(eval_rows + 1))
        if len(first) <= eval_rows:
            raise ValueError(f"--eval_rows {eval_rows}: the data has {len(first)} rows, none is left to "
                             "train on")
        for i, row in enumerate(first):
            _check_row(i, row[text_key])
        return rows.skip(eval_rows), first[:eval_rows]
    if eval_rows >= len(rows):
        raise ValueError(f"--eval_rows {eval_rows}: the data has {len(rows)} rows, none is left to train on")
    return rows.select(range(eval_rows, len(rows))), rows.select(range(eval_rows))


class ShuffledRows:
    """Sample i of an endless stream: epoch after epoch, each in an order of its own."""

    def __init__(self, rows, read, seed):
        self.rows, self.read = rows, read
        self.order = lru_cache(2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(rows)))

    def text(self, i):
        epoch, place = divmod(i, len(self.rows))
        return self.read(self.rows[int(self.order(epoch)[place])])


class StreamedRows:
    """The same for a stream, which can only be read forward; shuffled through a buffer."""

    def __init__(self, rows, read, seed):
        self.rows, self.read = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER), read
        self.position, self.iterator = 0, None

    def text(self, i):
        self.iterator = self.iterator or self._forever()
        row = next(itertools.islice(self.iterator, i - self.position, None))
        self.position = i + 1
        _check_row(i, row[self.read.text_key])
        return self.read(row)

    def _forever(self):
        for epoch in itertools.count():
            self.rows.set_epoch(epoch)
            yield from self.rows


@dataclass
class MicroBatches(IterableDataset):
    """This rank's micro-batches, from step `start` on, for ever."""

    stream: object
    collate: Collate
    micro: int
    micro_steps: int
    rank: int
    ranks: int
    start: int = 0

    def __iter__(self):
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in itertools.count(self.start * self.micro_steps + first, stride):
            begin = (index * self.ranks + self.rank) * self.micro
            yield self.collate([self.stream.text(i) for i in range(begin, begin + self.micro)])


@dataclass
class HeldOutBatches(IterableDataset):
    """This rank's share of the held-out rows; every rank yields the same number of batches."""

    rows: object
    read: Reader
    collate: Collate
    micro: int
    rank: int
    ranks: int

    def __iter__(self):
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, -(-len(self.rows) // (self.micro * self.ranks)), stride):
            begin = (index * self.ranks + self.rank) * self.micro
            rows = range(begin, begin + self.micro)
            yield self.collate([self.read(self.rows[i]) if i < len(self.rows) else None for i in rows])


def loader(batches, num_workers):
    """A DataLoader over ready-made batches that leaves the global random state alone."""
    if isinstance(getattr(batches, "stream", None), StreamedRows):
        num_workers = min(num_workers, 1)  # more would split the stream between them
    context = "fork" if num_workers else None  # workers inherit tokenizers and rows; they use no device
    return DataLoader(batches, batch_size=None, num_workers=num_workers, worker_init_fn=_ignore_sigterm,
                      multiprocessing_context=context, generator=torch.Generator().manual_seed(0))


def _ignore_sigterm(worker_id):
    """A job that is told to end takes a checkpoint first, and needs its workers for that long."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


def end_workers():
    """Workers ignore the signal by which Python ends them at its exit: a failed rank would wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch reports that they were killed
    for worker in multiprocessing.active_children():
        worker.kill()
