"""How fast is align.py?  Prints a table; figures of record are in docs/LOG.md.

    python benchmarks/align.py --student DIR --teacher DIR [--tokens 4096]

Every figure is the best of several runs in one process: what the code needs when nothing disturbs it.
"""

import sys
import time
from pathlib import Path
from pydoc_data import topics

import fire
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from align import TokenTable, align
from align_dp import align_dp


def best(run, seconds=2.0):
    """Seconds of the fastest call."""
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def main(student, teacher, tokens=4096, long=16384):
    from transformers import AutoTokenizer

    begin = time.perf_counter()
    pair = [AutoTokenizer.from_pretrained(name) for name in (student, teacher)]
    loaded = time.perf_counter()
    tables = [TokenTable.from_tokenizer(tokenizer) for tokenizer in pair]
    print(f"{student} -> {teacher}; tokenizers loaded in {loaded - begin:.2f} s, "
          f"tables of {len(tables[0])} and {len(tables[1])} entries in {time.perf_counter() - loaded:.2f} s")
    prose = " ".join(text for _, text in sorted(topics.topics.items()))[: 8 * long]
    rng = np.random.default_rng(0)
    samples = {f"English, {tokens}": (prose, tokens), f"English, {long}": (prose, long),
               f"one word again and again, {long}": ("the " * long, long),
               f"random digits, {long}": ("".join(map(str, rng.integers(0, 10, 4 * long))), long),
               f"Chinese, {long}": ("".join(map(chr, rng.integers(0x4E00, 0x9FA5, 2 * long))), long)}
    rows = [("text, student tokens", "tokenize ms", "align ms", "M tokens/s", "of tokenizing", "align_dp ms")]
    for name, (text, limit) in samples.items():
        ids = pair[0](text, add_special_tokens=False, verbose=False)["input_ids"][:limit]
        text = tables[0].decode(ids).decode(errors="ignore").removeprefix(" ")
        ids = [t(text, add_special_tokens=False, verbose=False)["input_ids"] for t in pair]
        ids = [np.array(row) for row in ids]
        coding = best(lambda: [t(text, add_special_tokens=False, verbose=False) for t in pair])
        aligning = best(lambda: align(*ids, *tables))
        slow = best(lambda: align_dp(*ids, *tables))
        count = len(ids[0]) + len(ids[1])
        rows.append((name, f"{coding * 1e3:.2f}", f"{aligning * 1e3:.3f}", f"{count / aligning / 1e6:.1f}",
                     f"{aligning / coding:.1%}", f"{slow * 1e3:.1f}"))
    pad = np.full(long, max(tables[0].pad, tables[0].eos))
    padding = best(lambda: align(pad, pad[:0], *tables))
    rows.append((f"all padding, {long}", "", f"{padding * 1e3:.3f}", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("| " + " | ".join(map(str.ljust, row, widths)) + " |")


if __name__ == "__main__":
    fire.Fire(main)
