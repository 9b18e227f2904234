"""Measure how long a stream takes that goes on near the end of one large file.

    python benchmarks/resume.py FOLDER --kind jsonl --gib 2

It writes the file into FOLDER, reads it to its last row, goes on from the place of that row as a
resumed run does, and removes the file.
"""

import json
import sys
import time
from pathlib import Path

import datasets
import fire
import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from isogloss.data.open_data import load_dataset
from isogloss.data.order import ExampleReader
from isogloss.data.stream import StreamedExamples

CHARACTERS = 2000  # of a row
GIB = 2**30


def batches_of_rows(num_rows):
    """Yield lists of texts of words that a seed chooses."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    for begin in range(0, num_rows, 1000):
        size = min(1000, num_rows - begin)
        drawn = letters[rng.integers(0, len(letters), (size, CHARACTERS), np.uint8)]
        yield [row.tobytes().decode() for row in drawn]


def write(path, kind, num_rows):
    if kind in ("parquet", "arrow"):
        schema = pa.schema({"text": pa.string()})
        opened = {"parquet": pa.parquet.ParquetWriter, "arrow": pa.ipc.new_file}[kind]
        with opened(str(path), schema) as file:
            for texts in batches_of_rows(num_rows):
                file.write(pa.table({"text": texts}))
        return
    with open(path, "w") as file:
        file.write("text\n" if kind == "csv" else "")
        for texts in batches_of_rows(num_rows):
            lines = texts if kind != "jsonl" else [json.dumps({"text": text}) for text in texts]
            file.write("\n".join(lines) + "\n")


def seconds_to(path, position, place=None):
    """Return (seconds until an example is there, the place from which a run goes on with it)."""
    begin = time.perf_counter()
    dataset = load_dataset(str(path), "text", streaming=True)
    examples = StreamedExamples(dataset, ExampleReader("text"), 0, place=place)
    examples.example(position)
    return time.perf_counter() - begin, examples.place


def main(folder, kind="jsonl", gib=2.0):
    """Print the size, the seconds to the last row from the first one on, and from its place on.

    Args:
        folder: where the file is written and removed.
        kind: "jsonl", "txt", "csv", "parquet" or "arrow".
        gib: of text.
    """
    datasets.disable_progress_bars()
    num_rows = int(gib * GIB / CHARACTERS)
    path = Path(folder) / f"rows.{kind}"
    try:
        write(path, kind, num_rows)
        whole, place = seconds_to(path, num_rows - 1)
        again, _ = seconds_to(path, num_rows - 1, place)
        print(json.dumps({"kind": kind, "gib": round(path.stat().st_size / GIB, 3),
                          "rows": num_rows, "whole": round(whole, 2), "again": round(again, 2)}))
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    fire.Fire(main)
