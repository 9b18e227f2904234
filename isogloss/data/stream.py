"""Read a stream of rows in an order that depends on the seed alone, and go on where a run stopped.

A stream can only be read forward.  It is cut into blocks of BLOCK_ROWS rows, and each block is
shuffled as a whole.  So what a run needs to go on is the place where its block begins, in the words
of `datasets`; the rows before are not read again, but for those of the same file, or of the same
piece of it (file_rows.py).  Files and pieces come in another order in every epoch, unless the first
rows of the stream are held out.

Tests: tests/test_stream.py.
"""

import copy
import itertools
import time
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from isogloss.data.checks import explained, without_views
from isogloss.errors import DataError

BLOCK_ROWS = 10_000  # some 50 MB of web text; not tuned
SEARCH_SECONDS = 60  # for which the first bad row is searched; not tuned


@dataclass
class Block:
    """Hold some rows of a stream.

    Attributes:
        place: JSON-able dict, from which the stream goes on with this block: the position of its
            first sample, its epoch, its number within that, of how many pieces its rows are, and
            the state of the data set.
        samples: lists of the rows of each, shuffled.
    """

    place: dict
    samples: list


def take_sample(unread, reader):
    """Return the next rows of an iterator that make up a sample; at its end, those that are left.

    Args:
        reader: `order.ExampleReader`, which says up to how many characters rows are joined.
    """
    rows = []
    num_characters = 0
    for row in unread:
        rows.append(row)
        content = row.get(reader.text_key)
        # the reader refuses what is no text
        num_characters += len(content) if isinstance(content, str) else 0
        if num_characters >= reader.join:
            break
    return rows


class StreamedExamples:
    """Example i of an endless stream, epoch after epoch, for rising i.

    Attributes:
        place: of the block that was read last, see `Block`; None: none was.
    """

    def __init__(self, dataset, reader, seed, first_row=0, place=None):
        self.dataset = dataset
        self.reader = reader
        self.seed = seed
        self.first_row = first_row  # of the whole data, in messages
        self.place = place
        self.blocks = None
        self.block = None

    def example(self, position):
        """Return the Example at a position, which is not in a block before the latest one."""
        if self.blocks is None:
            self.blocks = self._all_blocks(self.place)
            self._next_block()
        # Rows of other ranks and workers are read and dropped: to tokenize and align a row takes
        # some hundred times as long as to read it.
        while position >= self.block.place["position"] + len(self.block.samples):
            self._next_block()
        rows = self.block.samples[position - self.block.place["position"]]
        try:
            return self.reader.sample(rows)
        except DataError:
            self._name_bad_row()
            raise

    def _next_block(self):
        self.block = next(self.blocks)
        self.place = self.block.place

    def _all_blocks(self, place):
        """Yield the Blocks of all epochs, from a place on; None: from the first row on."""
        # `datasets` keeps the epoch in memory that all worker processes share, and each reads on in
        # an epoch of its own
        self.dataset = copy.deepcopy(self.dataset)
        num_pieces = self.dataset.num_shards
        if place and place.get("pieces") != num_pieces:
            raise DataError(
                f"--data {self.reader.source}: is read in {num_pieces} pieces, and the checkpoint "
                f"knows a place in {place.get('pieces', 'whole files')}; give it the files as they "
                "were, or begin anew in another --output_dir")
        place = place or {"position": 0, "epoch": 0, "number": 0, "rows": None}
        position = place["position"]
        while True:
            for block in self._blocks_of_epoch(place, position):
                position += len(block.samples)
                yield block
            place = {"epoch": place["epoch"] + 1, "number": 0, "rows": None}

    def _blocks_of_epoch(self, place, position):
        """Yield the Blocks of an epoch, from a place in it on, whose first row has a position."""
        epoch = place["epoch"]
        state = place["rows"]
        # by which `datasets` orders the files; 0 would leave their order
        self.dataset.set_epoch(int(np.random.default_rng([self.seed, epoch]).integers(1, 2**31)))
        if state:
            self.dataset.load_state_dict(state)
        has_text = place["number"] > 0
        with explained(self.reader.source):
            unread = iter(self.dataset)
            for number in itertools.count(place["number"]):
                samples = self._next_samples(unread)
                if not samples:
                    break
                for row in itertools.chain(*samples):
                    has_text = has_text or bool(row.get(self.reader.text_key))
                start = {"position": position, "epoch": epoch, "number": number,
                         "pieces": self.dataset.num_shards, "rows": state}
                state = self.dataset.state_dict()
                position += len(samples)
                order = np.random.default_rng([self.seed, epoch, number]).permutation(len(samples))
                yield Block(start, [samples[index] for index in order])
        if not has_text:
            raise DataError(f"--data {self.reader.source}: all rows of {self.reader.text_key!r} "
                            "are empty; expected text; name another column with --text_key")

    def _next_samples(self, unread):
        """Return the samples of the next BLOCK_ROWS rows; the last one is whole."""
        samples = []
        num_rows = 0
        while num_rows < BLOCK_ROWS and (rows := take_sample(unread, self.reader)):
            samples.append(rows)
            num_rows += len(rows)
        return samples

    def _name_bad_row(self):
        """Raise the DataError of the first bad row: this stream is shuffled, the files are not."""
        deadline = time.monotonic() + SEARCH_SECONDS
        in_order = self.dataset.skip(0)  # whose files keep their order
        for number, row in enumerate(in_order, self.first_row):
            self.reader(row, number)
            if time.monotonic() > deadline:
                return


def joined_rows(dataset, reader):
    """Return a row for every sample that held-out rows give."""
    joined = []
    number = 0
    unread = iter(dataset)
    while rows := take_sample(unread, reader):
        joined.append({reader.text_key: reader.sample(rows, number).content})
        number += len(rows)
    return joined


def joined_texts(rows, reader, number=None):
    """Return the texts of rows as one; number: of the first row, for messages alone."""
    texts = []
    for offset, row in enumerate(rows):
        texts.append(reader(row, None if number is None else number + offset).content)
    return "\n".join(filter(None, texts))


def joined_bounds(dataset, reader):
    """Return the number of the first row of every sample, and then the number of rows."""
    lengths = []
    for table in dataset.select_columns(reader.text_key).with_format("arrow").iter(10_000):
        texts = without_views(table[reader.text_key])
        lengths.append(pc.utf8_length(texts).to_numpy())
    ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    bounds = [0]
    while bounds[-1] < len(ends):
        before = ends[bounds[-1] - 1] if bounds[-1] else 0
        last = int(np.searchsorted(ends, before + reader.join))
        bounds.append(min(last + 1, len(ends)))
    return bounds
