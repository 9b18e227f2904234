"""Text -> pairs of tokenisations, aligned, truncated at the same byte, padded.

One sample is read by the student and by the teacher, each through its own tokenizer.  Tokenising and aligning
happen inside DataLoader workers.  A position t of a batch row predicts the token at t + 1, so labels and
chunk ids are shifted by one, here and nowhere else (`shift`).

The order of samples depends on the seed alone: sample i of an endless stream of shuffled epochs.  A step
reads the next ``micro * ranks * micro_steps`` of it, so the data position of a run is its step number,
whatever the number of ranks and workers.

Shapes: B samples, S student positions, T teacher positions.
"""

import glob
import itertools
import signal
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from align import TokenTable, align
from losses import Spelling, find_chunks, piece_terms

READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow",
           ".csv": "csv"}
SHUFFLE_BUFFER = 10_000  # samples; streaming only


@dataclass
class Side:
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

    def text_bytes(self, ids, text):
        """Bytes of `text` that each id stands for, -1 for control tokens; an added leading space counts 0.

        Args:
            ids: of the whole text, not cut yet.
        """
        lengths = self.table.lengths[ids]
        first = np.flatnonzero(lengths >= 0)[:1]
        surplus = lengths[lengths >= 0].sum() - len(text.encode(errors="replace"))
        if surplus == 1 and self.table.bytes_of(ids[first[0]])[:1] == b" ":
            lengths[first] -= 1
        return lengths


@dataclass
class Sample:
    """One text on both sides; entry t of labels, chunk and bytes speaks of the token that t predicts."""

    student: tuple  # (ids, labels, chunk, bytes), see `shift`
    teacher: tuple
    aligned_bytes: int
    same_text: bool


NOTHING = (np.zeros(0, np.int64),) * 4
EMPTY = Sample(NOTHING, NOTHING, 0, True)  # fills the last evaluation batch


def make_sample(text, student_ids, teacher_ids, student, teacher):
    """Align, truncate both sides at the same byte, shift.

    Args:
        student_ids, teacher_ids: with bos and eos; teacher_ids is None when no teacher takes part.
        student, teacher: the Side of each.
    """
    if teacher_ids is None:
        parts = student_ids, np.full(len(student_ids), -1), student.text_bytes(student_ids, text)
        return Sample(shift(*parts, student.max_length + 1), NOTHING, 0, True)
    alignment = align(student_ids, teacher_ids, student.table, teacher.table)
    chunks = [alignment.student_chunk, alignment.teacher_chunk]
    cuts = common_cut(chunks, [student.max_length + 1, teacher.max_length + 1])
    # a chunk needs a position that predicts its first token; without bos the very first token has none
    lost = list({chunk[0] for chunk in chunks if len(chunk)} - {-1})
    sides = [
        shift(ids, np.where(np.isin(chunk, lost), -1, chunk), side.text_bytes(ids, text), cut)
        for ids, chunk, side, cut in zip((student_ids, teacher_ids), chunks, (student, teacher), cuts)
    ]
    used = np.unique(sides[0][2][sides[0][2] >= 0])
    return Sample(*sides, int(alignment.chunk_bytes[used].sum()), alignment.same_text)


def common_cut(chunks, limits):
    """Tokens to keep on either side: whole chunks only, so that no unaligned tail remains.

    Args:
        chunks: chunk id per token, of student and teacher.
        limits: the most tokens that each may keep.
    """
    if all(len(chunk) <= limit for chunk, limit in zip(chunks, limits)):
        return [len(chunk) for chunk in chunks]
    ends = [_chunk_ends(chunk) for chunk in chunks]  # one more than the last token of every chunk
    fits = np.flatnonzero((ends[0] <= limits[0]) & (ends[1] <= limits[1]))
    if len(fits) == 0:  # nothing aligned fits: the student still learns from the text
        return [min(len(chunk), limit) for chunk, limit in zip(chunks, limits)]
    return [int(end[fits[-1]]) for end in ends]


def _chunk_ends(chunk):
    last = np.flatnonzero((chunk >= 0) & np.append(chunk[1:] != chunk[:-1], True))
    return last + 1


def shift(ids, chunk, bytes_, cut):
    """(ids, labels, chunk, bytes) of the first `cut` tokens; position t reads ids[t], predicts ids[t + 1]."""
    return ids[: cut - 1], ids[1:cut], chunk[1:cut], bytes_[1:cut]


@dataclass
class Collate:
    """Texts -> one batch of tensors.

    Attributes:
        student, teacher: Side; teacher None: the text alone.
        spelling: tables for the terms of piece_kl, or None for losses that work on whole chunks.
    """

    student: Side
    teacher: Side | None
    spelling: Spelling | None

    def __call__(self, texts):
        """Texts (None: no sample) to a dict.

        Returns:
            student_ids, student_labels (-100 on padding), student_chunk (-1): (B, S) int64; teacher_* too;
            student_bytes, teacher_bytes: (B, S), (B, T) bytes of the predicted token, -1 for eos and padding;
            terms: `PieceTerms` or None; counts: dict of ints about the batch.
        """
        present = [text for text in texts if text is not None]
        samples = iter(self._samples(present))
        samples = [EMPTY if text is None else next(samples) for text in texts]
        batch = _pad("student", samples, self.student.table)
        batch["terms"] = None
        counts = {"ce": int((batch["student_labels"] >= 0).sum()), "kd": 0,
                  "text_bytes": int(batch["student_bytes"].clamp(min=0).sum()),
                  "aligned_bytes": sum(s.aligned_bytes for s in samples),
                  "unaligned_texts": sum(not s.same_text for s in samples),
                  "aligned_tokens": int((batch["student_chunk"] >= 0).sum())}
        if self.teacher is not None:
            batch |= _pad("teacher", samples, self.teacher.table)
            chunks = batch["student_chunk"], batch["teacher_chunk"]
            if self.spelling is not None:
                labels = batch["student_labels"], batch["teacher_labels"]
                batch["terms"] = piece_terms(*labels, *chunks, self.spelling)
                counts["kd"] = int(batch["terms"].count)
            else:
                counts["kd"] = len(find_chunks(*chunks).first_S)
        return batch | {"counts": counts}

    def _samples(self, texts):
        student_ids = self.student.encode(texts) if texts else []
        teacher_ids = self.teacher.encode(texts) if texts and self.teacher else [None] * len(texts)
        for text, s, t in zip(texts, student_ids, teacher_ids):
            yield make_sample(text, s, t, self.student, self.teacher)


def _pad(side, samples, table):
    """Right-padded tensors of one side; with causal attention no real position ever looks at padding."""
    rows = [getattr(sample, side) for sample in samples]
    width = max(1, max(len(row[0]) for row in rows))
    pad_id = table.pad if table.pad >= 0 else max(table.eos, 0)
    out = {}
    for i, (field, fill) in enumerate((("ids", pad_id), ("labels", -100), ("chunk", -1), ("bytes", -1))):
        padded = np.full((len(rows), width), fill, np.int64)
        for line, row in zip(padded, rows):
            line[: len(row[i])] = row[i]
        out[f"{side}_{field}"] = torch.from_numpy(padded)
    return out


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
        return datasets.load_from_disk(str(path))
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


def _check_text(source, rows, text_key):
    if len(rows) == 0:
        raise ValueError(f"--data {source}: the data set is empty; at least one row of text is needed")
    dtype = getattr(rows.features[text_key], "dtype", str(rows.features[text_key]))
    if dtype not in ("string", "large_string"):
        raise ValueError(f"--data {source}: column {text_key!r} holds {dtype}, expected text in every row; "
                         "mend it or name another column by --text_key")
    if rows.data.column(text_key).null_count:
        row = next(i for i, text in enumerate(rows[text_key]) if text is None)
        raise ValueError(f"--data {source}: row {row} of {text_key!r} is null, expected text; remove it")


def split_rows(rows, eval_rows):
    """(train, held out): the first `eval_rows` rows are held out, whatever the seed."""
    if isinstance(rows, datasets.IterableDataset):
        return rows.skip(eval_rows), list(rows.take(eval_rows))
    if eval_rows >= len(rows):
        raise ValueError(f"--eval_rows {eval_rows}: the data has {len(rows)} rows, none is left to train on")
    return rows.select(range(eval_rows, len(rows))), rows.select(range(eval_rows))


class ShuffledRows:
    """Sample i of an endless stream: epoch after epoch, each in an order of its own."""

    def __init__(self, rows, text_key, seed):
        self.rows, self.text_key = rows, text_key
        self.order = lru_cache(2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(rows)))

    def text(self, i):
        epoch, place = divmod(i, len(self.rows))
        return self.rows[int(self.order(epoch)[place])][self.text_key]


class StreamedRows:
    """The same for a stream, which can only be read forward; shuffled through a buffer."""

    def __init__(self, rows, text_key, seed):
        self.rows, self.text_key = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER), text_key
        self.position, self.iterator = 0, None

    def text(self, i):
        self.iterator = self.iterator or self._forever()
        row = next(itertools.islice(self.iterator, i - self.position, None))
        self.position = i + 1
        if not isinstance(row[self.text_key], str):
            raise ValueError(f"sample {i} of the stream holds {row[self.text_key]!r:.40}, expected text")
        return row[self.text_key]

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
    text_key: str
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
            yield self.collate([self.rows[i][self.text_key] if i < len(self.rows) else None for i in rows])


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
