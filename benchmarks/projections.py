"""How fast are projection_tools, and in how much memory?  Figures of record are in docs/LOG.md.

    python benchmarks/projections.py STUDENT TEACHER         # directories or hub ids
    python benchmarks/projections.py DIR_OF_TOKENIZERS       # all ordered pairs in it

Every figure comes from a fresh process; seconds without imports and without loading the tokenizers.
"""

import json
import resource
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def measure(what, student, teacher):
    """One line of JSON: seconds, peak resident MiB of the process, and facts about the result."""
    from transformers import AutoTokenizer

    from projection_tools import Pair, build, describe, spell

    tokenizers = [AutoTokenizer.from_pretrained(name) for name in (student, teacher)]
    begin = time.perf_counter()
    pair = Pair.of(*tokenizers, (student, teacher))
    if what == "build":
        found = build.build_projection(pair)
        seconds, facts = time.perf_counter() - begin, describe(found[0])
    else:
        found = spell.build_spelling(pair)
        seconds = time.perf_counter() - begin
        facts = spell.statistics(found, pair)
        facts = (f"{facts['events']} events, {facts['of one token a side']} of one token a side, largest "
                 f"{facts['tokens of the largest']}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([seconds, peak, facts]))


def main(*names):
    if len(names) == 1:
        folders = sorted(str(path) for path in Path(names[0]).iterdir() if path.is_dir())
        pairs = list(permutations(folders, 2))
    else:
        pairs = [names]
    print("| student | teacher | tool | seconds | peak MiB | result |\n| --- | --- | --- | --- | --- | --- |")
    for student, teacher in pairs:
        for what in ("build", "spell"):
            command = [sys.executable, __file__, "--measure", what, student, teacher]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            seconds, peak, facts = json.loads(done.stdout.splitlines()[-1])
            row = Path(student).name, Path(teacher).name, what, f"{seconds:.1f}", f"{peak:.0f}", facts
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
