"""Mix several data sets: sample i of an endless stream, in an order that the seed alone decides.

A block of the stream has nearly BLOCK samples.  Up to the end of block n a source with share s has
given floor(n * BLOCK * s) of them, whatever the others do; who gives which sample of a block is
shuffled.  So which sample of which source stands at a place follows from the place: any rank and
worker finds it, a run that resumes goes on there, and no share drifts.

Tests: tests/test_mixture.py.
"""

import bisect
import copy
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np

from isogloss.data.mixture import Source, SourceOptions
from isogloss.flags.lists import check_entry, read_entries
from isogloss.flags.model_names import without_secrets
from isogloss.flags.parse import check_flags, is_table
from isogloss.flags.together import check_together, is_set, shown

# Flags that a source of a mixture may have for itself.
SOURCE_FLAGS = ("data", "split", "text_key", "prompt_key", "completion_key", "route_key",
                "teacher_prompt_key", "join_rows", "eval_rows", "eval_data", "eval_split")
EXAMPLE = '[{"data": "a.jsonl", "weight": 2}, {"data": "b.jsonl", "weight": 1}]'
BLOCK = 1000  # samples, more or less; not tuned


def listed_sources(cfg):
    """Return the Sources of a list; see `mixture.sources_of`."""
    own = [field.name for field in fields(SourceOptions)]
    keys = ("name", "weight", "route", *SOURCE_FLAGS, *own)
    sources = []
    entries = read_entries("data", cfg.data, EXAMPLE)
    is_alone = len(entries) == 1 and not entries[0].keys() & {"name", "weight", "route"}
    for entry in entries:
        path = entry.get("data")
        if not isinstance(path, str) or is_table(path) or not path:
            raise ValueError(f"--data: an entry names no data; expected {EXAMPLE}")
        name = entry.get("name", Path(without_secrets(path)).name)
        check_entry("data", entry, name, keys, [source.name for source in sources])
        route = entry.get("route", ...)
        if route is not ... and (entry.get("route_key") or cfg.route_key):
            raise ValueError(f"--data: route {route!r} of {name} with a route_key: both choose "
                             "among teachers; drop one")
        flags = {key: entry[key] for key in SOURCE_FLAGS if key in entry}
        options = SourceOptions(**{key: entry[key] for key in own if key in entry})
        source_cfg = config_of_source(cfg, flags, options)
        sources.append(Source(name, source_cfg, entry.get("weight"), route))
    if any(source.chooses for source in sources):
        for source in sources:  # rows without a route: for teachers without routes
            source.route = source.route if source.chooses else None
    if is_alone:  # as data that a path names
        sources[0].name, sources[0].weight = "", 1
    weighted = [source.weight is not None for source in sources]
    if any(weighted) != all(weighted) or (cfg.streaming and not all(weighted)):
        name = sources[weighted.index(False)].name
        reason = "a stream does not tell its rows" if cfg.streaming else "others have one"
        raise ValueError(f"--data: {name} has no weight, and {reason}; give each one, or leave out "
                         "all (as many samples as it has rows)")
    return sources


def config_of_source(cfg, flags, options):
    """Return the Config of a run on one source of a mixture.

    Args:
        flags: {flag: value}; options: SourceOptions.
    """
    source = copy.copy(cfg)
    vars(source).update(flags)
    source.source_options = options
    source.of_teachers = None
    check_flags(source)
    check_together(source)
    source.check_held_out()
    for name in ("join_rows", "on_policy"):
        if options.weight_key and is_set(source, name):
            raise ValueError(f"--data: weight_key {options.weight_key} with "
                             f"{shown(source, name)}: weighs one row of the data; leave out "
                             "one of them")
    return source


class Mixture:
    """Example i of an endless stream of several, as `order.ShuffledExamples` is of one.

    Attributes:
        streams: ShuffledExamples or StreamedExamples of each source.
        shares: Fractions of the samples that each gives.
    """

    def __init__(self, streams, weights, seed):
        weights = [Fraction(weight) for weight in weights]
        self.streams = streams
        self.shares = [weight / sum(weights) for weight in weights]
        self.seed = seed
        # two: a micro-batch may cross from one block into the next
        self.order_of_block = lru_cache(2)(self._order_of_block)

    def example(self, position):
        """Return the Example at a position of the stream."""
        number, index = self.sample_at(position)
        return self.streams[number].example(index)

    def sample_at(self, position):
        """Return (source, which of its samples it is)."""
        block = position // BLOCK  # or the next: blocks have BLOCK samples or fewer on average
        block += sum(self._before(block + 1)) <= position
        sources, indices = self.order_of_block(block)
        offset = position - sum(self._before(block))
        return int(sources[offset]), int(indices[offset])

    def _before(self, block):
        """Return how many samples each source gives before a block."""
        return [block * BLOCK * share.numerator // share.denominator for share in self.shares]

    def _order_of_block(self, block):
        """Return (source, which of its samples) of each sample of a block, two int arrays."""
        before = self._before(block)
        sizes = np.subtract(self._before(block + 1), before)
        sources = np.repeat(np.arange(len(sizes)), sizes)
        sources = np.random.default_rng([self.seed, block]).permutation(sources)
        indices = np.empty_like(sources)
        for number, first in enumerate(before):
            indices[sources == number] = np.arange(first, first + sizes[number])
        return sources, indices

    def position_of(self, number, index):
        """Return where a sample of a source stands."""
        block = bisect.bisect_right(range(1 << 62), index,
                                    key=lambda block: self._before(block)[number]) - 1
        sources, indices = self._order_of_block(block)
        [[offset]] = np.nonzero((sources == number) & (indices == index))
        return sum(self._before(block)) + int(offset)

    @property
    def place(self):
        """Return from where streams go on, see `stream.Block`; None: any row can be read at once.

        Its position is the first one by which all sources have come to their blocks.
        """
        places = [stream.place for stream in self.streams]
        if not any(places):
            return None
        positions = [self.position_of(number, place["position"])
                     for number, place in enumerate(places) if place]
        return {"position": max(positions), "sources": places}
