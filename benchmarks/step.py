"""Profile a step of a run: what takes time, when a GPU is idle, what makes the host wait for it.

    python benchmarks/step.py --step 8 -- --student S --teacher T --data D --learning_rate 1e-5 \\
        --steps 9 --output_dir runs/profiled
    deepspeed benchmarks/step.py --step 8 -- FLAGS OF distill.py

Behind `--` stand the flags of a run, which goes to its end as ever.  Rank 0 prints JSON of the
profiled step: its seconds, tokens a second of this rank and, on a GPU, the seconds in which it was
busy, the kernels, the longest times between them, the most memory of any step so far and where the
host waited for it.  What took time follows as a table.  In the step before, waits are counted; the
profiler makes a step longer.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import gpu
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool

LONGEST = 8  # gaps that are printed
ROWS = 40  # of the table


@dataclass(kw_only=True)
class Args:
    """Profile a step of a run, whose flags stand behind --."""

    step: int = flag(8, "the step, from 1 on; the first ones compile and allocate.", low=2)
    local_rank: int = flag(-1, "set by the launcher.")


class Watch:
    """Stand in for `distill.train_step`: profile one of its calls.

    Args:
        done: function of the figures, called behind the profiled step.
    """

    def __init__(self, train_step, step, done=lambda figures: None):
        self.train_step = train_step
        self.step = step
        self.done = done
        self.numbers = count(1)
        self.waits = {}

    def __call__(self, *arguments):
        number = next(self.numbers)
        if number == self.step - 1:
            with gpu.waits_counted(self.waits):
                return self.train_step(*arguments)
        return self.profiled(arguments) if number == self.step else self.train_step(*arguments)

    def profiled(self, arguments):
        reports = []
        profiler, seconds = profiled(lambda: reports.append(self.train_step(*arguments)))
        tokens = sum(int(batch.counts.tokens) for batch in arguments[1])
        figures = {"step": self.step, "seconds": gpu.rounded(seconds),
                   "tokens_per_second": round(tokens / seconds)}
        of_gpu = busy_figures(profiler, LONGEST)
        if of_gpu["kernels"]:
            figures |= of_gpu | {"peak_gib": round(gpu.peak_gib(), 2), "waits": self.waits}
        if int(os.environ.get("RANK", 0)) == 0:
            kind = "self_cuda_time_total" if of_gpu["kernels"] else "self_cpu_time_total"
            print(json.dumps(figures), flush=True)
            print(profiler.key_averages().table(sort_by=kind, row_limit=ROWS,
                                                max_name_column_width=70), flush=True)
        self.done(figures)
        return reports[0]


def profiled(run):
    """Return (torch's profiler of a run, the seconds that it took)."""
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as profiler:
        begin = time.perf_counter()
        run()
        gpu.synchronize()
        seconds = time.perf_counter() - begin
    return profiler, seconds


def gpu_spans(profiler):
    """Return sorted [(begin, end)] in microseconds of all that a GPU did."""
    spans = []
    for event in profiler.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
    return sorted(spans)


def busy_and_gaps(spans):
    """Return (microseconds in which something ran, gaps between)."""
    busy = 0.0
    gaps = []
    reached = spans[0][0] if spans else 0.0
    for begin, end in spans:
        if begin > reached:
            gaps.append(begin - reached)
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy, gaps


def busy_figures(profiler, num_gaps):
    """Return seconds in which a GPU was busy, its kernels, and its longest gaps."""
    spans = gpu_spans(profiler)
    busy, gaps = busy_and_gaps(spans)
    longest = [gpu.rounded(gap / 1e6) for gap in sorted(gaps)[-num_gaps:]]
    return {"busy_seconds": gpu.rounded(busy / 1e6), "kernels": len(spans),
            "longest_idle_seconds": longest}


def main(args, flags):
    from isogloss import distill

    distill.train_step = Watch(distill.train_step, args.step)
    distill.cli(flags)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    flags = sys.argv[split + 1 :]
    del sys.argv[split:]
    tool(Args, lambda args: main(args, flags))
