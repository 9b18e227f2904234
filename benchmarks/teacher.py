"""Measure what a rank holds of a teacher, and what it takes to load it.

    python benchmarks/teacher.py [--ranks 4] [--layers 12] [--hidden 1024] [--compile]

The script writes a random Llama to disk in files of 100 MB.  For every degree that divides the
ranks, fresh ranks load it as distill.py would and run 512 tokens: degree 1 holds the whole model,
higher degrees the tensor-parallel engine's shards.  The last line is ZeRO-3 over all ranks.
Weights are float32.  Figures of record are in docs/LOG.md.

`--compile` measures --teacher_compile instead, on one rank with one thread: processor seconds of a
forward pass as it is and compiled, medians of 5 in turn, and of the first, which compiles.

Each line has the slowest or largest rank's:
    parameters_MiB: the parameters that it holds.
    load_seconds, forward_seconds: wall time.
    anonymous_MiB: memory that it keeps beyond what it had before, file pages apart.
    files_MiB: pages of files, which ranks share and the system can take back.
    peak_MiB: the largest sum of the two.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import ranks
from projection_tools.flags import tool

VOCAB = 32_000  # Llama 2's
TOKENS = 512  # of the forward pass
MIB = 2**20


@dataclass(kw_only=True)
class Args:
    """Measure memory and time of a teacher in every way to hold it.

    Args:
        ranks: processes on this machine.
        layers: layers of the model.
        hidden: hidden size, a multiple of 16.
        compile: measure compiled forward passes, and nothing else.
    """

    ranks: int = 4
    layers: int = 12
    hidden: int = 1024
    compile: bool = False


class Memory(NamedTuple):
    """Resident memory of this process, in MiB."""

    anonymous: float
    files: float
    peak: float  # of their sum, since the process started


def resident():
    """Return this process's Memory, as Linux counts it."""
    mib = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, *values = line.split()
        if name.startswith(("Rss", "VmHWM")):
            mib[name] = int(values[0]) / 2**10  # the kernel writes KiB
    return Memory(mib["RssAnon:"] + mib["RssShmem:"], mib["RssFile:"], mib["VmHWM:"])


def load(folder, degree, engine):
    """Load the teacher on this rank, run it once, and return the figures of one line."""
    from isogloss.launch import silence_libraries, start_distributed
    from isogloss.specs import TeacherSpec
    from isogloss.teachers import load_teacher

    start_distributed()
    silence_libraries()
    spec = TeacherSpec(folder, VOCAB, engine, dtype="float32", device="cpu", degree=degree)
    before = resident()
    begin = time.perf_counter()
    teacher = load_teacher(spec)
    load_seconds = time.perf_counter() - begin

    begin = time.perf_counter()
    with torch.no_grad():
        teacher.hidden(torch.arange(TOKENS)[None])
    forward_seconds = time.perf_counter() - begin
    after = resident()
    return {
        "parameters_MiB": teacher.num_parameters * 4 / MIB,  # 4 bytes a float32
        "load_seconds": load_seconds,
        "anonymous_MiB": after.anonymous - before.anonymous,
        "files_MiB": after.files - before.files,
        "peak_MiB": after.peak - before.anonymous - before.files,
        "forward_seconds": forward_seconds,
    }


def compare_compiled(folder):
    """Return processor seconds of a forward pass as it is and compiled, and how far they differ."""
    from isogloss.launch import silence_libraries, start_distributed
    from isogloss.specs import TeacherSpec
    from isogloss.teachers import load_teacher

    start_distributed()
    silence_libraries()
    ids = torch.arange(TOKENS)[None]
    teachers = {}
    for name in ("plain", "compiled"):
        spec = TeacherSpec(folder, VOCAB, dtype="float32", device="cpu", compile=name == "compiled")
        teachers[name] = load_teacher(spec)
    seconds = {name: [] for name in teachers}
    states = {}
    for _ in range(6):
        for name, teacher in teachers.items():
            begin = time.process_time()
            with torch.no_grad():
                states[name] = teacher.hidden(ids)
            seconds[name].append(time.process_time() - begin)
    figures = {"first_compiled_seconds": round(seconds["compiled"][0], 1)}
    for name, times in seconds.items():
        figures[f"{name}_seconds"] = round(statistics.median(times[1:]), 3)
    difference = (states["compiled"] - states["plain"]).norm() / states["plain"].norm()
    return figures | {"relative_difference": float(difference)}


def write_model(folder, args):
    """Write a random Llama and return its size in MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,  # fewer than heads, as in most models today
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(weight.numel() for weight in model.parameters()) * 4 / MIB


def worst_of(figures):
    """Return the largest value of every figure over the ranks, rounded to a tenth."""
    worst = {}
    for name in figures[0]:
        worst[name] = round(max(rank[name] for rank in figures), 1)
    return worst


def main(args):
    layouts = []
    for degree in range(1, args.ranks + 1):
        if args.ranks % degree == 0:
            layouts.append((degree, "auto"))
    layouts.append((1, "zero3"))

    with tempfile.TemporaryDirectory() as folder:
        size = round(write_model(folder, args))
        if args.compile:
            [figures] = ranks.run(1, compare_compiled, folder)
            print(json.dumps({"model_MiB": size} | figures))
            return
        for degree, engine in layouts:
            # fresh ranks for every layout: the peak of a process never falls
            figures = ranks.run(args.ranks, load, folder, degree, engine)
            line = {"model_MiB": size, "degree": degree, "engine": engine}
            print(json.dumps(line | worst_of(figures)), flush=True)


if __name__ == "__main__":
    tool(Args, main)
