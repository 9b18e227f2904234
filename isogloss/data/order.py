"""Open and check the data set, and give each rank its micro-batches.

The order of samples depends on the seed alone: sample i of an endless stream of shuffled epochs.  A
step reads the next `micro_batch_size * num_ranks * grad_accum_steps` of it, so the data position of
a run is its step number, whatever the number of ranks and workers.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import datasets
import numpy as np

from isogloss.data.batch import Collator
from isogloss.data.batch_types import Example
from isogloss.data.checks import EMPTY_DATA, has_text
from isogloss.data.open_data import first_rows
from isogloss.data.sample import encode_text
from isogloss.data.texts import chat_of_text, fits, listed, problem_of
from isogloss.data.workers import worker_of
from isogloss.errors import DataError

if TYPE_CHECKING:
    from isogloss.data.rollouts import Prompter
    from isogloss.data.stream import StreamedExamples

FIRST_ROWS = 8  # of which nearly always something is learned
ROWS_TO_LEARN = 1000  # of which something has to be learned
ROWS_TO_TEACH = 64  # of which each teacher has to teach something


# --- check ----------------------------------------------------------------------------------------


def check_learned(dataset, reader, student, train_on):
    """Raise a ValueError where nothing would be learned of any of the first rows."""
    for count in (FIRST_ROWS, ROWS_TO_LEARN):  # nearly always the first row will do
        reasons = Counter()
        rows = first_rows(dataset, count, reader.text_key, reader.source)
        for number, row in enumerate(rows):
            reason = _why_not_learned(reader(row, number), student, train_on)
            if reason is None:
                return
            reasons[reason] += 1
    described = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    raise ValueError(f"--data {reader.source}: nothing would be learned of its first {len(rows)} "
                     f"rows: {described}")


def _why_not_learned(example, student, train_on):
    """Return why nothing of an Example is learned, to follow a number of rows; or None."""
    content = example.content
    if isinstance(content, str):
        if not example.context or not fits(content):  # whatever is left of it is learned
            return None
        [ids] = student.encode([content])
        learned = encode_text(content, ids, student, example.context).learned
        if learned is None:
            learned = np.ones(len(ids), bool)
    else:
        from isogloss.data.chat import learned_tokens

        learned, reason = learned_tokens(example, student, train_on)
        if reason:
            return reason
    if learned[1 : student.max_length + 1].any():
        return None
    return f"are cut at --max_length {student.max_length} before what is learned"


def check_taught(parts, collator, names, prompter=None):
    """Raise a DataError where a teacher would teach nothing of the first rows.

    Args:
        parts: (data set, its ExampleReader) each.
        collator: Collator; names: of its teachers.
        prompter: Prompter, where the student writes everything itself; the end of a prompt then
            stands for what it may write.
    """
    reasons = {name: Counter() for name in names}
    for dataset, reader in parts:
        rows = first_rows(dataset, ROWS_TO_TEACH, reader.text_key, reader.source)
        for number, row in enumerate(rows):
            example = reader(row, number)
            if prompter:
                example = prompter.as_if_written(example)
            [sample] = collator.samples([example])
            taking = collator.teachers_of(example)
            for name, pair, options, takes in zip(names, sample.pairs, collator.pairs, taking):
                if takes and name in reasons and example.content is not None:
                    reason = _why_not_taught(pair, options.encoder, collator.student)
                    reasons[name][reason] += 1
                    if reason is None:
                        del reasons[name]
            if not reasons:
                return
    for name, of_teacher in reasons.items():
        if of_teacher:
            described = "; ".join(f"{n} {reason}" for reason, n in of_teacher.most_common(3))
            raise DataError(f"teacher {name}: would teach nothing of the first "
                            f"{of_teacher.total()} rows: {described}")


def _why_not_taught(pair, encoder, student):
    """Return why a PairSample has no term, to follow a number of rows; None: it has one."""
    if pair.student_chunk.max(initial=-1) >= 0:
        return None
    if pair.alignment is None:
        return "are refused by a chat template"
    if len(pair.alignment.teacher_chunk) > encoder.max_length + 1:
        return (f"are longer than its {encoder.max_length} positions before anything is compared "
                "(its context, or --teacher_max_length)")
    if len(pair.alignment.student_chunk) > student.max_length + 1:
        return f"are cut at --max_length {student.max_length} before anything is compared"
    return "hold nothing that both tokenizers spell and the student learns"


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
        text_key: column of texts, of chats, or of completions.
        route_key: column that chooses the teachers; empty: there is none.
        source: what --data says.
        prompt_key: column of prompts; empty: there is none.
        is_completion: text_key holds what follows the prompt.
        tools_key: column of what the assistant of a chat may call; empty: there is none.
        teacher_prompt_key: column of what teachers alone read in front of a chat; empty: none.
        filled: columns in which null stands for what a value does not have.
        join: characters that joined rows have at least; 0: every row is a sample.
        has_chats: the rows are chats, or JSON of chats.
        drop_images: leave out what of a chat is no text, such as images.
        weight_key: column of the rows' weights; empty: they weigh 1.
        route: of all rows; an Ellipsis: see route_key.
        labels: names of the numbers in the column of routes; empty: a route is what stands there.
        keeps_row: an environment reads it.
    """

    text_key: str
    route_key: str = ""
    source: str = ""
    prompt_key: str = ""
    is_completion: bool = False
    tools_key: str = ""
    filled: frozenset = frozenset()
    join: int = 0
    has_chats: bool = False
    teacher_prompt_key: str = ""
    drop_images: bool = False
    weight_key: str = ""
    route: object = ...
    labels: tuple = ()
    keeps_row: bool = False

    def sample(self, rows, number=None):
        """Return the Example of a row, or of several that are joined.

        Args:
            number: of the first row, for messages alone.
        """
        if not self.join:
            return self(rows[0], number)
        from isogloss.data.stream import joined_texts

        return Example(joined_texts(rows, self, number), self.route)

    def __call__(self, row, number=None):
        """Return the Example of a row, whose number is for messages alone."""
        problem = self.problem_of(row)
        if problem:
            name = "a row" if number is None else f"row {number}"
            raise DataError(f"--data {self.source}: {name} of {self.text_key!r}{problem}; repair "
                            "or remove it")
        # the Ellipsis stands for all teachers, None for an empty cell of the column
        route = row[self.route_key] if self.route_key else self.route
        if self.labels:  # -1 or none: it has no label
            route = dict(enumerate(self.labels)).get(route)
        content = self._content(row, self.text_key)
        prompt = self._content(row, self.prompt_key) if self.prompt_key else None
        context = 0
        if self.is_completion:
            context = len(prompt)
            content = prompt + content
        tools = None
        if self.tools_key and isinstance(content, list):
            from isogloss.data.chat_rows import as_tools

            is_filled = self.tools_key in self.filled
            tools = as_tools(row.get(self.tools_key), is_filled)
        weight = float(row[self.weight_key]) if self.weight_key else 1.0
        return Example(content, route, prompt, tools, context, self._teacher_prompt(row), weight,
                       row if self.keeps_row else None)

    def _teacher_prompt(self, row):
        key = self.teacher_prompt_key
        if not key or not self.value(row, key):
            return ()
        prompt = self._content(row, key)
        if isinstance(prompt, str):
            prompt = [{"role": "system", "content": prompt}]
        return tuple(prompt)

    def _content(self, row, key):
        value = self.value(row, key)
        if isinstance(value, str):
            return value
        from isogloss.data.chat_rows import as_messages

        return as_messages(value, key in self.filled)

    def value(self, row, key):
        value = listed(row.get(key))
        if self.has_chats and isinstance(value, str):
            chat = chat_of_text(value)
            return value if chat is None else chat
        return value

    def problem_of(self, row):
        """Return what is wrong with a row, to follow its name; None: nothing."""
        if self.route_key or self.weight_key or self.prompt_key or self.teacher_prompt_key:
            from isogloss.data.kinds.other_columns import problem_of_columns

            problem = problem_of_columns(self, row)
            if problem:
                return problem
        content = self.value(row, self.text_key)
        if self.tools_key and isinstance(content, list):
            from isogloss.data.chat_rows import problem_of_tools

            problem = problem_of_tools(row.get(self.tools_key))
            if problem:
                return f": {self.tools_key!r}{problem}"
        if self.join and isinstance(content, list):
            return " is a chat, and --join_rows joins texts"
        if self.has_chats and isinstance(content, str):
            return f" holds {content!r:.40}, and the first rows hold chats"
        return self.problem_of_content(content)

    def problem_of_content(self, content):
        problem = problem_of(content)
        if not problem and isinstance(content, list) and not self.drop_images:
            from isogloss.data.chat_rows import part_without_text

            return part_without_text(content)
        return problem


class ShuffledExamples:
    """Example i of an endless stream: epoch after epoch, each in an order of its own."""

    place = None  # any row can be read at once, so nothing has to be kept, see `stream.Block`

    def __init__(self, dataset, reader, seed, first_row=0):
        self.dataset = dataset
        self.first_row = first_row  # of the whole data, in messages
        self.reader = reader
        self.seed = seed
        # sample i consists of the rows from bounds[i] up to bounds[i + 1]
        self.bounds = sample_bounds(dataset, reader)
        # two: a micro-batch may cross from one epoch into the next
        self.order_of_epoch = lru_cache(2)(self._order_of_epoch)

    def _order_of_epoch(self, epoch):
        # Computed from (seed, epoch) alone, so every rank and worker finds the same order and a
        # resumed run goes on in it.
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.bounds) - 1)

    def example(self, position):
        """Return the Example at a position of the stream."""
        epoch, offset = divmod(position, len(self.bounds) - 1)
        number = int(self.order_of_epoch(epoch)[offset])
        numbers = range(self.bounds[number], self.bounds[number + 1])
        rows = [self.dataset[row] for row in numbers]
        return self.reader.sample(rows, self.first_row + numbers[0])


def sample_bounds(dataset, reader):
    """Return the number of the first row of every sample, and then the number of rows."""
    if not reader.join:
        return range(len(dataset) + 1)
    from isogloss.data.stream import joined_bounds

    return joined_bounds(dataset, reader)


class Places:
    """Keep the places from which a stream can go on, as batches bring them."""

    def __init__(self):
        self.places = []

    def note(self, place):
        """Keep the place of a batch's block; None: its data are no stream."""
        if place and place not in self.places[-1:]:
            self.places.append(place)

    def before(self, position):
        """Return the last place at or before a sample's position, or None; forget earlier ones."""
        while len(self.places) > 1 and self.places[1]["position"] <= position:
            del self.places[0]
        if self.places and self.places[0]["position"] <= position:
            return self.places[0]
        return None


# --- micro-batches --------------------------------------------------------------------------------


@dataclass
class MicroBatches:
    """This rank's micro-batches, from step `start` on, without an end.

    With a Prompter they are Drafts, else Batches.
    """

    stream: "ShuffledExamples | StreamedExamples"
    collator: Collator
    micro_batch_size: int
    grad_accum_steps: int
    rank: int
    num_ranks: int
    start: int = 0
    prompter: "Prompter | None" = None

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
                batch = self.prompter.draft(self.stream, sample_ids)
            else:
                examples = [self.stream.example(position) for position in sample_ids]
                batch = self.collator(examples, sample_ids)
            batch.place = self.stream.place
            yield batch

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
