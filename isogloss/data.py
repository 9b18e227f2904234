"""Open and check the data set, and give each rank its micro-batches.

The order of samples depends on the seed alone: sample i of an endless stream of shuffled epochs.  A
step reads the next `micro_batch_size * num_ranks * grad_accum_steps` of it, so the data position of
a run is its step number, whatever the number of ranks and workers.
"""

import codecs
import glob
import itertools
import os
import time
import warnings
from dataclasses import dataclass
from functools import lru_cache

import datasets
import numpy as np

from isogloss.batch import Collator, Example
from isogloss.chat import SkippedChat, render
from isogloss.data_checks import (
    EMPTY_DATA,
    KINDS,
    SEARCH_SECONDS,
    check_column,
    check_content,
    check_first_bytes,
    check_is_file,
    explained,
    has_text,
    is_saved,
    kind_of,
    local_files,
    name_of_type,
    problem_of,
    split_suffix,
)
from isogloss.rollouts import OldRollout, Prompter, SkippedPrompt
from isogloss.workers import DataError, Loader, worker_of

SHUFFLE_BUFFER = 10_000  # samples, of a stream only: some 50 MB of web text; not tuned
STRINGS = ("string", "large_string")
CHATS_TO_TRY = 8  # rows that a chat template has to refuse before the job is refused


# --- open -----------------------------------------------------------------------------------------


def load_dataset(source, text_key, split="train", streaming=False):
    """Open a data set and check that it holds text.

    Args:
        source: hub id ("org/name" or "org/name:config"), or a local file, directory or glob of
            files ending in .txt (one sample a line), .jsonl, .json, .parquet, .arrow or .csv, the
            texts also compressed (.jsonl.gz); or a directory of save_to_disk.
        text_key: column to read.
        split: of a hub data set, or of a directory of save_to_disk that holds several.
    Returns:
        datasets.Dataset or IterableDataset.
    Raises:
        DataError: with what arrived, what was expected and what to do.
    """
    with explained(source):
        dataset = _open(source, split, streaming, text_key)
        columns = column_names(dataset)
    if not columns or (not streaming and len(dataset) == 0):
        raise DataError(f"--data {source}: {EMPTY_DATA}")
    if text_key not in columns:
        raise DataError(f"--data {source}: no column {text_key!r}; it has {', '.join(columns)}; "
                        "name one of them with --text_key")
    _check_type(source, dataset, text_key)
    if not streaming:
        with explained(source):
            check_column(source, dataset, text_key)
    return dataset


def column_names(dataset):
    """List the columns; of a stream whose columns are not declared, those of its first row."""
    return dataset.column_names or list(next(iter(dataset.take(1)), {}))


def _open(source, split, streaming, text_key):
    path = os.path.expanduser(source)
    if is_saved(path):
        return _open_saved(source, path, split, streaming)
    files = local_files(source)
    if files:  # local files come first: a folder may have the name of a hub id
        return _open_files(source, files, split, streaming, text_key)
    if os.path.isdir(path):
        raise DataError(f"--data {source}: holds no file that can be read; expected files of kind "
                        f"{KINDS}")
    is_path = kind_of(source) or source.startswith((".", "/", "~"))
    if is_path or source.count("/") != 1 or glob.has_magic(source):
        raise DataError(f"--data {source}: no such file, directory or glob match; expected files "
                        f"of kind {KINDS} or a hub id like org/name")
    name, _, config = source.partition(":")
    return datasets.load_dataset(name, config or None, split=split, streaming=streaming)


def _open_files(source, files, split, streaming, text_key):
    for file in files:
        check_is_file(source, file)
    kind = _kind_of(source, files)
    for file in files:
        check_first_bytes(source, file, text_key)
    if not any(os.path.getsize(file) for file in files):
        raise DataError(f"--data {source}: {EMPTY_DATA}")
    # a part of them, as in "train[:10%]", but not of a stream
    if not split.startswith("train") or (streaming and split != "train"):
        raise DataError(f"--split {split}: files have no splits; leave it out, and name the files "
                        "of one split by --data")
    options = {"encoding": "utf-8-sig"} if _mark_is_text(files) else {}
    # brackets and stars in the names of files that are there are meant as such
    escaped = [glob.escape(file) for file in files]
    return datasets.load_dataset(kind, data_files=escaped, split=split, streaming=streaming,
                                 **options)


def _open_saved(source, path, split, streaming):
    """Open a directory of save_to_disk, of one data set or of several splits."""
    dataset = datasets.load_from_disk(path)
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise DataError(f"--split {split}: {source} has no such split; it has "
                            f"{', '.join(dataset)}")
        dataset = dataset[split]
    elif split not in ("train", str(dataset.split)):
        raise DataError(f"--split {split}: {source} is one data set without splits; leave it out")
    return dataset.to_iterable_dataset() if streaming else dataset


def _kind_of(source, files):
    """Return the one reader of all files; a DataError where there are several or none."""
    kinds = set()
    suffixes = set()
    for file in files:
        kinds.add(kind_of(file))
        suffixes.add("".join(split_suffix(file)) or os.path.basename(file))
    if len(kinds) > 1 or None in kinds:
        raise DataError(f"--data {source}: files of kind {', '.join(sorted(suffixes))}; expected "
                        f"one of {KINDS}")
    return kinds.pop()


def _mark_is_text(files):
    """Tell whether the reader of lines would take a byte order mark for text."""
    for file in files:
        if file.lower().endswith(".txt"):
            with open(file, "rb") as stream:
                if stream.read(3) == codecs.BOM_UTF8:
                    return True
    return False


# --- check ----------------------------------------------------------------------------------------


def holds_chats(dataset, text_key):
    """Tell whether the column holds lists of messages."""
    feature = (dataset.features or {}).get(text_key)
    # of a list, the type of its items; of text there is none
    message = getattr(feature, "feature", None)
    if isinstance(message, dict):
        return {"role", "content"} <= set(message)
    if feature is None or isinstance(message, datasets.Json):
        # The first rows have to tell: of a stream without declared columns, or where messages
        # differ in their keys or types.
        for row in dataset.take(CHATS_TO_TRY):
            chat = row[text_key]
            if isinstance(chat, list) and chat and isinstance(chat[0], dict):
                return True
    return False


def check_templates(dataset, text_key, encoders, source=""):
    """Raise a ValueError where a chat template refuses every one of the first chats."""
    chats = [row[text_key] for row in first_rows(dataset, CHATS_TO_TRY, text_key, source)]
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


def first_rows(dataset, count, text_key, source=""):
    """Return the first rows, at most `count`, each of which has been checked."""
    with explained(source):
        rows = list(dataset.take(count))
    for number, row in enumerate(rows):
        check_content(source, number, text_key, row.get(text_key))
    return rows


def _check_type(source, dataset, text_key):
    """Raise a DataError where a column, or the first row of a stream, is no text and no chat."""
    feature = (dataset.features or {}).get(text_key)
    if feature is None:
        first_rows(dataset, 1, text_key, source)
    elif not holds_chats(dataset, text_key):
        dtype = getattr(feature, "dtype", None)
        if dtype not in STRINGS:
            if dtype == "null" and not list(dataset.take(1)):  # a .csv of a header alone
                raise DataError(f"--data {source}: {EMPTY_DATA}")
            raise DataError(
                f"--data {source}: column {text_key!r} holds {name_of_type(feature)}, expected "
                "text or chats as lists of role and content; repair it or name another column "
                "with --text_key")


def check_routes(dataset, route_key, routes):
    """Raise a ValueError where a column cannot hold what "routes" name.

    Args:
        routes: list of the values that teachers are for.
    """
    columns = column_names(dataset)
    if route_key not in columns:
        raise ValueError(f"--route_key {route_key}: no such column; it has {', '.join(columns)}")
    feature = (dataset.features or {}).get(route_key)
    if feature is None:  # a stream, of which every row is looked at
        return
    dtype = getattr(feature, "dtype", None)
    is_value = isinstance(feature, (datasets.Value, datasets.ClassLabel))
    if not is_value or dtype in ("null", "binary"):
        raise ValueError(f"--route_key {route_key}: the column holds {name_of_type(feature)}, "
                         "expected a text or a number in every row; name another column")
    for route in routes:
        if route is not None and isinstance(route, str) != (dtype in STRINGS):
            raise ValueError(f"--route_key {route_key}: the column holds {dtype}, but --teachers "
                             f"name the route {route!r}; name values of the column")


def split_dataset(dataset, eval_rows, text_key, source=""):
    """Return (train, held out): the first `eval_rows` rows are held out, whatever the seed."""
    streaming = isinstance(dataset, datasets.IterableDataset)
    # The length of a stream is not known; one row more shows that some are left to train on.
    first = first_rows(dataset, eval_rows + 1, text_key, source) if streaming else None
    num_rows = len(first if streaming else dataset)
    if not num_rows:
        raise DataError(f"--data {source}: {EMPTY_DATA}")
    if num_rows <= eval_rows:
        raise ValueError(f"--eval_rows {eval_rows}: the data has {num_rows} rows, none is left to "
                         "train on")
    if streaming:
        held_out = first[:eval_rows]
        train = dataset.skip(eval_rows)
        held_out_has_text = any(row[text_key] for row in held_out)
    else:
        train = dataset.select(range(eval_rows, len(dataset)))
        held_out = dataset.select(range(eval_rows))
        held_out_has_text = not eval_rows or has_text(dataset, 0, eval_rows, text_key)
        if not has_text(dataset, eval_rows, len(dataset), text_key):
            raise ValueError(f"--eval_rows {eval_rows}: all rows behind the first {eval_rows} are "
                             "empty, none is left to train on; hold out fewer, or repair the data")
    if eval_rows and not held_out_has_text:
        raise ValueError(f"--eval_rows {eval_rows}: all of the first {eval_rows} rows are empty; "
                         "hold out more, or remove them")
    return train, held_out


# --- order ----------------------------------------------------------------------------------------


@dataclass
class ExampleReader:
    """Row of a data set -> Example.

    Attributes:
        source: what --data says.
        prompt_key: column of prompts; empty: there is none.
    """

    text_key: str
    route_key: str = ""
    source: str = ""
    prompt_key: str = ""

    def __call__(self, row, number=None):
        """Return the Example of a row, whose number is for messages alone."""
        problem = self.problem_of(row)
        if problem:
            name = "a row" if number is None else f"row {number}"
            raise DataError(f"--data {self.source}: {name} of {self.text_key!r}{problem}; repair "
                            "or remove it")
        # the Ellipsis stands for all teachers, None for an empty cell of the column
        route = row[self.route_key] if self.route_key else ...
        prompt = row[self.prompt_key] if self.prompt_key else None
        return Example(row[self.text_key], route, prompt)

    def problem_of(self, row):
        """Return what is wrong with a row, to follow its name; None: nothing."""
        if self.route_key:
            route = row.get(self.route_key)
            if isinstance(route, (list, dict)):
                return f": {self.route_key!r} holds {route!r:.40}, expected a text or a number"
        if self.prompt_key:
            problem = problem_of(row.get(self.prompt_key))
            if problem:
                return f": {self.prompt_key!r}{problem}"
        return problem_of(row.get(self.text_key))


class ShuffledExamples:
    """Example i of an endless stream: epoch after epoch, each in an order of its own."""

    def __init__(self, dataset, reader, seed, first_row=0):
        self.dataset = dataset
        self.first_row = first_row  # of the whole data, in messages
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
        row = int(self.order_of_epoch(epoch)[offset])
        return self.reader(self.dataset[row], self.first_row + row)


class StreamedExamples:
    """Do the same for a stream, which can only be read forward; shuffle it through a buffer."""

    def __init__(self, dataset, reader, seed, first_row=0):
        self.first_row = first_row
        self.in_order = dataset
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
        try:
            return self.reader(row)
        except DataError:
            self._name_bad_row()
            raise

    def _name_bad_row(self):
        """Raise the DataError of the first bad row: this stream is shuffled, the files are not."""
        deadline = time.monotonic() + SEARCH_SECONDS
        for number, row in enumerate(self.in_order, self.first_row):
            self.reader(row, number)
            if time.monotonic() > deadline:
                return

    def _all_epochs(self):
        for epoch in itertools.count():
            self.dataset.set_epoch(epoch)  # part of the shuffle's seed
            has_text = False
            with explained(self.reader.source):
                for row in self.dataset:
                    has_text = has_text or bool(row.get(self.reader.text_key))
                    yield row
            if not has_text:
                raise DataError(f"--data {self.reader.source}: all rows of "
                                f"{self.reader.text_key!r} are empty; expected text; name another "
                                "column with --text_key")


# --- micro-batches --------------------------------------------------------------------------------


@dataclass
class Draft:
    """Hold a micro-batch whose rollouts are still to be written.

    Attributes:
        examples: Example each; of rollouts the content is a `rollouts.RolloutPrompt`, or an
            `rollouts.OldRollout`.
        sample_ids: see `batch.Batch`.
        skipped_prompts: samples that are left out because they give no prompt.
    """

    examples: list
    sample_ids: list
    skipped_prompts: int = 0


@dataclass
class MicroBatches:
    """This rank's micro-batches, from step `start` on, without an end.

    With a Prompter they are Drafts, else Batches.
    """

    stream: ShuffledExamples | StreamedExamples
    collator: Collator
    micro_batch_size: int
    grad_accum_steps: int
    rank: int
    num_ranks: int
    start: int = 0
    prompter: Prompter | None = None

    def __iter__(self):
        worker, num_workers = worker_of()
        # A loader takes batches from its workers in turn, so each prepares every num_workers-th.
        first = self.start * self.grad_accum_steps + worker
        for number in itertools.count(first, num_workers):
            # Ranks are neighbors in the stream: a step reads one range of it, however that is cut
            # into ranks and micro-batches.
            begin = (number * self.num_ranks + self.rank) * self.micro_batch_size
            sample_ids = range(begin, begin + self.micro_batch_size)
            if self.prompter:
                yield self._draft(sample_ids)
                continue
            examples = [self.stream.example(position) for position in sample_ids]
            yield self.collator(examples, sample_ids)

    def _draft(self, sample_ids):
        """Return the Draft of some positions of the stream."""
        draft = Draft([], list(sample_ids))
        rows = {}  # a stream gives each row once, and a prompt may have several rollouts
        for position in sample_ids:
            slot = self.prompter.slot(position)
            if slot and not slot.is_new:
                draft.examples.append(Example(OldRollout((slot.source, slot.copy))))
                continue
            source = slot.source if slot else position
            if source not in rows:
                rows[source] = self.stream.example(source)
            example = rows[source]
            if slot:
                try:
                    prompt = self.prompter.prompt(example, (slot.source, slot.copy))
                    example = example._replace(content=prompt)
                except SkippedPrompt as error:
                    warnings.warn(f"{error}; such samples are left out", stacklevel=2)
                    example = Example(None)
                    draft.skipped_prompts += 1
            draft.examples.append(example)
        return draft


@dataclass
class HeldOutBatches:
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
                examples.append(self.reader(self.dataset[row], row) if exists else None)
                sample_ids.append(row if exists else -1)
            yield self.collator(examples, sample_ids)


def loader(batches, num_workers, asked_to_end=lambda: False):
    """Return the Loader of batches.

    Args:
        asked_to_end: see `workers.Loader`.
    """
    if isinstance(getattr(batches, "stream", None), StreamedExamples):
        num_workers = min(num_workers, 1)  # each would read all of the stream
    return Loader(batches, num_workers, asked_to_end)
