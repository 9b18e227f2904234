"""Measure how fast align.py is and print a table; figures of record are in docs/LOG.md.

    python benchmarks/align.py --student DIR --teacher DIR [--tokens 4096]

Every figure is the best of several runs in one process, so it is the time of the undisturbed code.
"""

import sys
import time
from pathlib import Path
from pydoc_data import topics

import fire
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from isogloss.align import TokenTable, align
from isogloss.align_dp import align_dp
from isogloss.tasks import markdown_table

HEADER = ("text, student tokens", "tokenize ms", "align ms", "M tokens/s", "of tokenizing",
          "align_dp ms")


def best(run, seconds=2.0):
    """Return the seconds of the fastest call; the first call, which may compile, does not count."""
    run()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def sample_texts(tokens, long):
    """Return {name: (text, student tokens to keep)}; long enough for any tokenizer."""
    prose = " ".join(text for _, text in sorted(topics.topics.items()))[: 8 * long]
    rng = np.random.default_rng(0)
    digits = "".join(map(str, rng.integers(0, 10, 4 * long)))
    # any of the CJK unified ideographs: many tokens are single bytes of a character
    ideographs = "".join(map(chr, rng.integers(0x4E00, 0x9FA5, 2 * long)))
    return {
        f"English, {tokens}": (prose, tokens),
        f"English, {long}": (prose, long),
        f"one word again and again, {long}": ("the " * long, long),
        f"random digits, {long}": (digits, long),
        f"Chinese, {long}": (ideographs, long),
    }


def measure(name, text, limit, pair, tables):
    """Return one line of the table as strings."""
    ids = encode(pair[0], text)[:limit]
    # cut after whole characters; a space that the tokenizer put in front is no text
    text = tables[0].decode(ids).decode(errors="ignore").removeprefix(" ")
    ids = [np.array(encode(tokenizer, text)) for tokenizer in pair]
    coding = best(lambda: [encode(tokenizer, text) for tokenizer in pair])
    aligning = best(lambda: align(*ids, *tables))
    dynamic = best(lambda: align_dp(*ids, *tables))
    speed = (len(ids[0]) + len(ids[1])) / aligning / 1e6
    return (name, f"{coding * 1e3:.2f}", f"{aligning * 1e3:.3f}", f"{speed:.1f}",
            f"{aligning / coding:.1%}", f"{dynamic * 1e3:.1f}")


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def main(student, teacher, tokens=4096, long=16384):
    from transformers import AutoTokenizer  # slow to import, so that --help does not wait for it

    begin = time.perf_counter()
    pair = [AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            for name in (student, teacher)]
    loaded = time.perf_counter()
    tables = [TokenTable.from_tokenizer(tokenizer) for tokenizer in pair]
    built = time.perf_counter()
    print(f"{student} -> {teacher}; tokenizers loaded in {loaded - begin:.2f} s, "
          f"tables of {len(tables[0])} and {len(tables[1])} entries in {built - loaded:.2f} s")

    lines = [HEADER]
    for name, (text, limit) in sample_texts(tokens, long).items():
        lines.append(measure(name, text, limit, pair, tables))
    # padding has to cost next to nothing
    pad = np.full(long, max(tables[0].pad, tables[0].eos))
    padding = best(lambda: align(pad, pad[:0], *tables))
    lines.append((f"all padding, {long}", "", f"{padding * 1e3:.3f}", "", "", ""))
    print(markdown_table(lines))


if __name__ == "__main__":
    fire.Fire(main)
