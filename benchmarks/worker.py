"""Measure how many tokens a data worker prepares, and what its batches take.

    OMP_NUM_THREADS=1 python benchmarks/worker.py --student DIR --teacher DIR --text FILE

The text is cut into pieces of 8,000 characters, each a sample of at most 1,024 tokens, so that both
tokenizers read nearly twice what is kept; with --characters 4000 all is kept.  A batch has 8 of
them, with the lists of piece_kl.  The best of several runs in one process, so the tokenizers have
seen all words, by the processor's time, which other jobs disturb less.
"""

import sys
import time
from pathlib import Path

import fire
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder
from isogloss.job.columns import pack
from isogloss.nodes import Tables
from isogloss.objective.loss_table import LOSSES, as_index, translation_fields
from isogloss.projection_tools.tokenizers import Pair
from isogloss.tile_plan import GPU_SUB_TILES

BATCH = 8
LINE = "{:>10} {:>9} {:>10} {:>12} {:>10} {:>9} {:>8}"


def timed(run, times):
    """Return (least seconds of a call, the last result)."""
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        result = run()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def main(student, teacher, text, max_length=1024, times=3, memory_mib=(4096, 512),
         characters=8000):
    """Print a table with a line for each size of --loss_memory_mib."""
    torch.set_num_threads(1)
    tokenizers = [AutoTokenizer.from_pretrained(name) for name in (student, teacher)]
    pair = Pair.of(*tokenizers)
    fields = translation_fields(pair)
    tables = Tables(*[as_index(fields[name]) for name in Tables._fields])
    raw = Path(text).read_text()
    firsts = range(0, BATCH * characters, characters)
    samples = [raw[first : first + characters] for first in firsts]
    encoders = []
    for tokenizer, table in zip(tokenizers, pair.tables):
        encoders.append(TextEncoder(tokenizer, table, max_length))
    print(LINE.format("MiB", "tokens", "sub-tiles", "tokens/s", "encode ms", "pack ms", "KiB"))
    coding, _ = timed(lambda: [encoder.encode(samples) for encoder in encoders], times)
    for mib in memory_mib:
        pair = PairOptions(encoders[1], tables, live_copies=LOSSES["piece_kl"].live_copies)
        collate = Collator(encoders[0], [pair], tile_mib=mib, sub_tiles=GPU_SUB_TILES)
        seconds, batch = timed(lambda collate=collate: collate(samples), times + 1)
        packing, (_, buffer) = timed(lambda batch=batch: pack(batch), times)
        num_sub_tiles = sum(len(tile.sub_tiles) for tile in batch.teachers[0].tiles)
        tokens = int(batch.counts.tokens)
        print(LINE.format(mib, tokens, num_sub_tiles, f"{tokens / seconds:,.0f}",
                          f"{1e3 * coding:.0f}", f"{1e3 * packing:.1f}", buffer.nbytes >> 10))


if __name__ == "__main__":
    fire.Fire(main)
