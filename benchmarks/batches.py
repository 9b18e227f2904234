"""Measure what a batch costs the training process, and the worker that prepares it.

    python benchmarks/batches.py ASSETS [--samples 1] [--tokens 8192] [--batches 8] [--window 1]
        [--sub_tiles gpu]

ASSETS: a folder with tokenizers/llama3, tokenizers/qwen2 and text/wikitext2_valid_tokens.txt.
Seconds are processor time.  The training process receives a batch from one worker, moves it to the
device "meta", where everything of a copy happens but the copy itself, and reads all sub-tiles, as a
loss does.  Medians; in brackets the largest.  As many batches as `window` are kept at a time, with
1,024 file descriptors.
"""

import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import fire

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
CHARACTERS_PER_TOKEN = 6  # more than a token of this text has, so that samples are cut to length
DESCRIPTORS = 1024  # what a user has by default


class TextBatches:
    """Yield `num` batches of `samples` texts each; number i is the same for every `worker_of`."""

    def __init__(self, collator, text, samples, length, num):
        self.collator = collator
        self.text = text
        self.samples = samples
        self.length = length
        self.num = num

    def batch(self, number):
        texts = []
        for sample in range(number * self.samples, (number + 1) * self.samples):
            begin = sample * self.length % (len(self.text) - self.length)
            texts.append(self.text[begin : begin + self.length])
        return self.collator(texts)

    def __iter__(self):
        for number in range(self.num):
            yield self.batch(number)


def build_collator(assets, tokens, sub_tiles):
    """Return the Collator of a student with Llama 3's tokenizer and a teacher with Qwen 2's."""
    from transformers import AutoTokenizer

    from align import TokenTable
    from isogloss.batch import Collator, PairOptions
    from isogloss.loss_table import as_index, translation_fields
    from isogloss.sample import TextEncoder
    from projection_tools import Pair
    from tiles import CPU_SUB_TILES, GPU_SUB_TILES
    from translation import Tables

    tokenizers = []
    encoders = []
    for name in ("llama3", "qwen2"):
        tokenizers.append(AutoTokenizer.from_pretrained(assets / "tokenizers" / name))
        table = TokenTable.from_tokenizer(tokenizers[-1])
        encoders.append(TextEncoder(tokenizers[-1], table, tokens))
    fields = translation_fields(Pair.of(*tokenizers, tables=[side.table for side in encoders]))
    tables = Tables(**{name: as_index(value) for name, value in fields.items()})
    budgets = {"cpu": CPU_SUB_TILES, "gpu": GPU_SUB_TILES}
    return Collator(encoders[0], [PairOptions(encoders[1], tables)], tile_mib=512.0,
                    sub_tiles=budgets[sub_tiles])


def count_tensors(value):
    """Return (number, bytes) of the tensors in dataclasses, named tuples, lists and tuples."""
    import torch

    if isinstance(value, torch.Tensor):
        return 1, value.nbytes
    if hasattr(value, "__dataclass_fields__"):
        value = list(vars(value).values())
    if isinstance(value, (str, dict)) or not hasattr(value, "__len__"):
        return 0, 0
    counts = [count_tensors(item) for item in value]
    return sum(count[0] for count in counts), sum(count[1] for count in counts)


def milliseconds(run):
    """Return (what run() returns, milliseconds of this process)."""
    begin = time.process_time()
    result = run()
    return result, 1e3 * (time.process_time() - begin)


def read_sub_tiles(batch):
    """Read what a loss reads; return the number of sub-tiles."""
    number = 0
    for tile in batch.teachers[0].tiles:
        for sub_tile in tile.sub_tiles:
            number += sub_tile.terms is not None
    return number


def main(assets, samples=1, tokens=8192, batches=8, window=1, sub_tiles="gpu"):
    import torch

    from isogloss.flat import to_device
    from isogloss.workers import Loader

    torch.set_num_threads(1)
    assets = Path(assets)
    text = (assets / "text" / "wikitext2_valid_tokens.txt").read_text()
    collator = build_collator(assets, tokens, sub_tiles)
    source = TextBatches(collator, text, samples, tokens * CHARACTERS_PER_TOKEN, batches)
    number, nbytes = count_tensors(source.batch(0))  # and everything is compiled now
    print(f"{samples} x {tokens} tokens: {number} tensors, {nbytes / 2**20:.1f} MiB, "
          f"{read_sub_tiles(source.batch(0))} sub-tiles")
    collating = [milliseconds(lambda number=number: source.batch(number))[1]
                 for number in range(min(batches, 8))]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, limits[1]))
    times = {"receive": [], "move": [], "read sub-tiles": []}
    kept = deque(maxlen=window)
    iterator = iter(Loader(source, 1))
    next(iterator)  # starts the worker
    for _ in range(batches - 1):
        batch, receiving = milliseconds(lambda: next(iterator))
        moved, moving = milliseconds(lambda batch=batch: to_device(batch, "meta"))
        _, reading = milliseconds(lambda moved=moved: read_sub_tiles(moved))
        kept.append((batch, moved))
        for name, value in zip(times, (receiving, moving, reading)):
            times[name].append(value)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert next(iterator, None) is None  # the worker ends by itself, and is counted
    for process in multiprocessing.active_children():
        process.join()
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"collate alone, ms: {statistics.median(collating):.0f} ({max(collating):.0f})")
    print(f"worker, ms a batch: {1e3 * (worker.ru_utime + worker.ru_stime) / batches:.0f}")
    for name, values in times.items():
        print(f"{name}, ms: {statistics.median(values):.2f} ({max(values):.2f})")
    print(f"{len(kept)} batches kept, {descriptors} descriptors open")


if __name__ == "__main__":
    fire.Fire(main)
