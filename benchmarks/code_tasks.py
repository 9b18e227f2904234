"""Measure the sandbox, and run every reference solution of HumanEval+ and MBPP+ in it.

    python benchmarks/code_tasks.py ASSETS [--busy 4]

Prints what a program takes more in the sandbox than alone, and how many of the reference solutions
pass, as answers behind their prompts, beside `busy` processes that do nothing but compute.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import sandbox
from isogloss.code_tasks import CodeJudge, read_humaneval_plus, read_mbpp_plus

PROGRAM = "print(1)"


def overheads(times):
    """Return milliseconds that a program takes more in the sandbox than alone."""
    alone = [sandbox._interpreter(), "-s", "-S", "-B", "-c", PROGRAM]
    differences = []
    for _ in range(times):
        begin = time.perf_counter()
        sandbox.run(PROGRAM)
        middle = time.perf_counter()
        subprocess.run(alone, capture_output=True, check=True)
        end = time.perf_counter()
        differences.append(1e3 * ((middle - begin) - (end - middle)))
    return differences


def verdicts_of(items):
    """Return ({reason: answers}, seconds) of reference solutions, judged as answers."""
    begin = time.perf_counter()
    judge = CodeJudge()
    judge.prepare(items)
    verdicts = judge.map(lambda item: judge.verdict(item, "\n" + item.reference), items)
    seconds = time.perf_counter() - begin
    return Counter(verdict.reason for verdict in verdicts), seconds


def main():
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("assets", type=Path)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--busy", type=int, default=0)
    args = parser.parse_args()
    with ExitStack() as stack:
        for _ in range(args.busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        differences = overheads(args.times)
        print(f"sandbox: {statistics.median(differences):.1f} ms more, at most "
              f"{max(differences):.1f}, of {args.times} programs")
        for read in (read_humaneval_plus, read_mbpp_plus):
            items = read(args.assets / "eval")
            reasons, seconds = verdicts_of(items)
            print(f"{items[0].task}: {dict(reasons)} of {len(items)}, {seconds:.0f} s for "
                  "references and answers")


if __name__ == "__main__":
    main()
