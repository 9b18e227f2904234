"""Open and check the data set, and give each rank its micro-batches.

The order of samples depends on the seed alone: sample i of an endless stream of shuffled epochs.  A
step reads the next `micro_batch_size * num_ranks * grad_accum_steps` of it, so the data position of
a run is its step number, whatever the number of ranks and workers.
"""

import glob
import itertools
import multiprocessing
import signal
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from isogloss.batch import Collator, Example
from isogloss.chat import SkippedChat, render

READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet",
           ".arrow": "arrow", ".csv": "csv"}
SHUFFLE_BUFFER = 10_000  # samples, of a stream only: some 50 MB of web text; not tuned
CHATS_TO_TRY = 8  # rows that a chat template has to refuse before the job is refused

EMPTY_DATA = "the data set is empty; at least one row of text is needed"


# --- open -----------------------------------------------------------------------------------------


def load_dataset(source, text_key, split="train", streaming=False):
    """Open a data set and check that it holds text.

    Args:
        source: hub id ("org/name" or "org/name:config"), or a local file, directory or glob of
            files ending in .txt (one sample a line), .jsonl, .json, .parquet, .arrow or .csv; or a
            directory of save_to_disk.
        text_key: column to read.
    Returns:
        datasets.Dataset or IterableDataset.
    Raises:
        ValueError: with what arrived, what was expected and what to do.
    """
    try:
        dataset = _open(source, split, streaming)
    except ValueError:
        raise
    except Exception as error:  # datasets raises whatever its readers and the network raise
        lines = str(error.__cause__ or error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else type(error).__name__}"
        raise ValueError(f"--data {source}: cannot be read ({reason})") from None
    columns = column_names(dataset)
    if not columns:
        raise ValueError(f"--data {source}: {EMPTY_DATA}")
    if text_key not in columns:
        raise ValueError(f"--data {source}: no column {text_key!r}; it has {', '.join(columns)}; "
                         "name one of them with --text_key")
    if not streaming:
        _check_column(source, dataset, text_key)
    return dataset


def column_names(dataset):
    """List the columns; of a stream whose columns are not declared, those of its first row."""
    return dataset.column_names or list(next(iter(dataset.take(1)), {}))


def _open(source, split, streaming):
    path = Path(source).expanduser()
    if (path / "state.json").is_file():
        dataset = datasets.load_from_disk(str(path))
        return dataset.to_iterable_dataset() if streaming else dataset
    files = _local_files(path)
    if files:  # local files come first: a folder may have the name of a hub id
        kind = _kind_of(source, files)
        return datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)
    is_path = path.is_dir() or path.suffix in READERS or source.startswith((".", "/", "~"))
    if is_path or source.count("/") != 1:
        raise ValueError(f"--data {source}: no such file, directory or glob match; expected files "
                         f"of kind {', '.join(READERS)} or a hub id like org/name")
    name, _, config = source.partition(":")
    return datasets.load_dataset(name, config or None, split=split, streaming=streaming)


def _local_files(path):
    """List the files that a path, a directory or a glob names."""
    # Sorted: file systems list files in any order, and the order of samples shall not depend on it.
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.suffix in READERS)
    if path.is_file():
        return [str(path)]
    return sorted(glob.glob(str(path), recursive=True))


def _kind_of(source, files):
    """Return the one reader of all files; a ValueError where there are several or none."""
    kinds = set()
    suffixes = set()
    for file in map(Path, files):
        kinds.add(READERS.get(file.suffix))
        suffixes.add(file.suffix or file.name)
    if len(kinds) > 1 or None in kinds:
        raise ValueError(f"--data {source}: files of kind {', '.join(sorted(suffixes))}; expected "
                         f"one of {', '.join(READERS)}")
    if not any(Path(file).stat().st_size for file in files):
        raise ValueError(f"--data {source}: {EMPTY_DATA}")
    return kinds.pop()


# --- check ----------------------------------------------------------------------------------------


def holds_chats(dataset, text_key):
    """Tell whether the column holds lists of messages."""
    if dataset.features is None:  # a stream whose columns are known by its rows only
        first = next(iter(dataset.take(1)))[text_key]
        return isinstance(first, list) and {"role", "content"} <= set(first[0])
    # of a list, the type of its items; of text there is none
    message = getattr(dataset.features[text_key], "feature", None) or {}
    return {"role", "content"} <= set(message)


def check_templates(dataset, text_key, encoders):
    """Raise a ValueError where a chat template refuses every one of the first chats."""
    chats = [row[text_key] for row in dataset.take(CHATS_TO_TRY)]
    for encoder in encoders:
        errors = []
        for chat in chats:
            try:
                render(chat, encoder)
                break  # chats that are refused later are skipped and counted
            except SkippedChat as error:
                errors.append(error)
        if chats and len(errors) == len(chats):
            raise ValueError(f"{errors[0]}; it refuses the other {len(chats) - 1} of the first "
                             "chats too; repair the chats or the template")


def _check_column(source, dataset, text_key):
    """Raise a ValueError where a column of a data set in files does not hold text in every row."""
    if len(dataset) == 0:
        raise ValueError(f"--data {source}: {EMPTY_DATA}")
    feature = dataset.features[text_key]
    dtype = getattr(feature, "dtype", str(feature))
    if not holds_chats(dataset, text_key) and dtype not in ("string", "large_string"):
        raise ValueError(f"--data {source}: column {text_key!r} holds {dtype}, expected text in "
                         "every row; repair it or name another column with --text_key")
    # Arrow knows the number of nulls without reading the column.
    if dataset.data.column(text_key).null_count:
        for number, text in enumerate(dataset[text_key]):
            if text is None:
                raise ValueError(f"--data {source}: row {number} of {text_key!r} is null, expected "
                                 "text; remove it")


def _check_row(number, text):
    """Raise a ValueError where a row of a stream, which nobody has read before, holds no text."""
    if not isinstance(text, (str, list)):
        raise ValueError(f"sample {number} of the stream holds {text!r:.40}, expected text; repair "
                         "it or name another column with --text_key")


def split_dataset(dataset, eval_rows, text_key):
    """Return (train, held out): the first `eval_rows` rows are held out, whatever the seed."""
    streaming = isinstance(dataset, datasets.IterableDataset)
    # The length of a stream is not known; one row more shows that some are left to train on.
    first = list(dataset.take(eval_rows + 1)) if streaming else None
    num_rows = len(first if streaming else dataset)
    if num_rows <= eval_rows:
        raise ValueError(f"--eval_rows {eval_rows}: the data has {num_rows} rows, none is left to "
                         "train on")
    if streaming:
        for number, row in enumerate(first):
            _check_row(number, row[text_key])
        return dataset.skip(eval_rows), first[:eval_rows]
    return dataset.select(range(eval_rows, len(dataset))), dataset.select(range(eval_rows))


# --- order ----------------------------------------------------------------------------------------


@dataclass
class ExampleReader:
    """Row of a data set -> Example."""

    text_key: str
    route_key: str = ""

    def __call__(self, row):
        # the Ellipsis stands for all teachers, None for an empty cell of the column
        route = row[self.route_key] if self.route_key else ...
        return Example(row[self.text_key], route)


class ShuffledExamples:
    """Example i of an endless stream: epoch after epoch, each in an order of its own."""

    def __init__(self, dataset, reader, seed):
        self.dataset = dataset
        self.reader = reader
        self.seed = seed
        # two: a micro-batch may cross from one epoch into the next
        self.order_of_epoch = lru_cache(2)(self._order_of_epoch)

    def _order_of_epoch(self, epoch):
        # Computed from (seed, epoch) alone, so every rank and worker finds the same order and a
        # resumed run goes on in it.
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))

    def example(self, position):
        """Return the Example at a position of the stream."""
        epoch, offset = divmod(position, len(self.dataset))
        return self.reader(self.dataset[int(self.order_of_epoch(epoch)[offset])])


class StreamedExamples:
    """Do the same for a stream, which can only be read forward; shuffle it through a buffer."""

    def __init__(self, dataset, reader, seed):
        self.dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        self.reader = reader
        self.position = 0
        self.iterator = None

    def example(self, position):
        """Return the Example at a position of the stream, which is after the one before."""
        self.iterator = self.iterator or self._all_epochs()
        # Rows of other ranks, and those of the steps before a resume, are read and dropped.
        row = next(itertools.islice(self.iterator, position - self.position, None))
        self.position = position + 1
        _check_row(position, row[self.reader.text_key])
        return self.reader(row)

    def _all_epochs(self):
        for epoch in itertools.count():
            self.dataset.set_epoch(epoch)  # part of the shuffle's seed
            yield from self.dataset


# --- micro-batches --------------------------------------------------------------------------------


@dataclass
class MicroBatches(IterableDataset):
    """This rank's micro-batches, from step `start` on, without an end."""

    stream: ShuffledExamples | StreamedExamples
    collator: Collator
    micro_batch_size: int
    grad_accum_steps: int
    rank: int
    num_ranks: int
    start: int = 0

    def __iter__(self):
        worker, num_workers = worker_of()
        # A loader takes batches from its workers in turn, so each prepares every num_workers-th.
        first = self.start * self.grad_accum_steps + worker
        for number in itertools.count(first, num_workers):
            # Ranks are neighbors in the stream: a step reads one range of it, however that is cut
            # into ranks and micro-batches.
            begin = (number * self.num_ranks + self.rank) * self.micro_batch_size
            sample_ids = range(begin, begin + self.micro_batch_size)
            examples = [self.stream.example(position) for position in sample_ids]
            yield self.collator(examples, sample_ids)


@dataclass
class HeldOutBatches(IterableDataset):
    """Yield the held-out rows that this rank reads; every rank yields as many batches."""

    dataset: datasets.Dataset | list
    reader: ExampleReader
    collator: Collator
    micro_batch_size: int
    rank: int
    num_ranks: int

    def __iter__(self):
        worker, num_workers = worker_of()
        # rounded up: ranks take part in every collective of an evaluation, with or without rows
        num_batches = -(-len(self.dataset) // (self.micro_batch_size * self.num_ranks))
        for number in range(worker, num_batches, num_workers):
            begin = (number * self.num_ranks + self.rank) * self.micro_batch_size
            examples = []
            sample_ids = []
            for row in range(begin, begin + self.micro_batch_size):
                exists = row < len(self.dataset)
                examples.append(self.reader(self.dataset[row]) if exists else None)
                sample_ids.append(row if exists else -1)
            yield self.collator(examples, sample_ids)


def worker_of():
    """Return (number of this data worker, workers); (0, 1) in the training process."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def loader(batches, num_workers):
    """Return a DataLoader over ready-made batches that leaves the global random state alone."""
    if isinstance(getattr(batches, "stream", None), StreamedExamples):
        num_workers = min(num_workers, 1)  # more would split the stream between them
    # forked workers inherit tokenizers and rows; they use no device
    context = "fork" if num_workers else None
    # Without a generator, the loader would draw the seed of its workers from the global one.
    return DataLoader(batches, batch_size=None, num_workers=num_workers,
                      worker_init_fn=_start_worker, multiprocessing_context=context,
                      generator=torch.Generator().manual_seed(0))


def _start_worker(_):
    """Ignore the stop signals: a job takes a checkpoint before it ends, which needs its workers."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # workers run side by side


def end_workers():
    """Kill the data workers, which ignore the signal by which Python ends them at its exit.

    Else a rank that failed would wait for them without an end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch reports that they were killed
    for worker in multiprocessing.active_children():
        worker.kill()
