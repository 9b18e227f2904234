"""What does a rank hold of a teacher, and what does it take to load it?

    python benchmarks/teacher.py [--ranks 4] [--layers 12] [--hidden 1024]

A random Llama is written to disk in files of 100 MB; then, for every degree that divides the ranks, fresh
ranks load it as distill.py would (degree 1: whole; else the tensor-parallel engine; last, ZeRO-3) and run 512
tokens.  Each line, of the slowest or largest rank: MiB of its parameters; seconds to load; MiB of memory of
its own that it keeps, and of pages of files, which ranks share and the system can take back; its peak, both
together.  Weights are float32.  Figures of record are in docs/LOG.md.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import fire
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import ranks


def resident():
    """MiB of this process: its own, of files, and the peak of both."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = {line[0]: int(line[1]) / 2**10 for line in lines if line[0].startswith(("Rss", "VmHWM"))}
    return found["RssAnon:"] + found["RssShmem:"], found["RssFile:"], found["VmHWM:"]


def load(folder, degree, engine):
    """What one rank needs for one teacher."""
    import distill
    from isogloss.teachers import load_teacher

    distill.start_distributed()
    distill.silence_libraries()
    (own, files, _), begin = resident(), time.perf_counter()
    teacher = load_teacher(folder, 32000, "float32", "cpu", engine, degree)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    teacher.rows(torch.arange(512)[None])
    forward, (own_now, files_now, peak) = time.perf_counter() - begin, resident()
    return {"parameters_MiB": teacher.parameters * 4 / 2**20, "load_seconds": seconds,
            "own_MiB": own_now - own, "files_MiB": files_now - files, "peak_MiB": peak - own - files,
            "forward_seconds": forward}


def main(ranks_=4, layers=12, hidden=1024):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32000, hidden_size=hidden, intermediate_size=4 * hidden,
                         num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8)
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(config)
        size = sum(p.numel() for p in model.parameters()) * 4 / 2**20
        model.save_pretrained(folder, max_shard_size="100MB")
        del model
        degrees = [d for d in range(1, ranks_ + 1) if ranks_ % d == 0]
        for degree, engine in [(d, "auto") for d in degrees] + [(1, "zero3")]:
            found = ranks.run(ranks_, load, folder, degree, engine)
            worst = {key: round(max(rank[key] for rank in found), 1) for key in found[0]}
            line = {"model_MiB": round(size), "degree": degree, "engine": engine} | worst
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
