"""Measure the seconds and the memory of projection_tools.  Figures of record are in docs/LOG.md.

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs without installation


def measure(tool, student, teacher):
    """Print one line of JSON: seconds, peak resident MiB of the process, facts about the result.

    Args:
        tool: build or spell.
        student, teacher: directories or hub ids.
    """
    from transformers import AutoTokenizer

    from projection_tools import Pair, build, describe, spell

    student_tokenizer = AutoTokenizer.from_pretrained(student, trust_remote_code=False)
    teacher_tokenizer = AutoTokenizer.from_pretrained(teacher, trust_remote_code=False)
    # The byte tables are part of the work, the tokenizers are not.
    begin = time.perf_counter()
    pair = Pair.of(student_tokenizer, teacher_tokenizer, (student, teacher))
    if tool == "build":
        indices, _ = build.build_projection(pair)
        seconds = time.perf_counter() - begin
        facts = describe(indices)
    else:
        tables = spell.build_spelling(pair)
        seconds = time.perf_counter() - begin
        facts = describe_events(spell.statistics(tables, pair))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    print(json.dumps({"seconds": seconds, "peak_mib": peak_mib, "facts": facts}))


def describe_events(facts):
    """Return one line of the facts about a spelling."""
    return (
        f"{facts['events']} events, {facts['with one token on each side']} with one token on each "
        f"side, {facts['tokens in the largest']} tokens in the largest"
    )


def tokenizer_pairs(names):
    """Return the pair that is named, or all ordered pairs of a directory's folders."""
    if len(names) == 2:
        return [tuple(names)]
    folders = sorted(str(path) for path in Path(names[0]).iterdir() if path.is_dir())
    return list(permutations(folders, 2))


def main(*names):
    print("| student | teacher | tool | seconds | peak MiB | result |")
    print("| --- | --- | --- | --- | --- | --- |")
    for student, teacher in tokenizer_pairs(names):
        for tool in ("build", "spell"):
            # A fresh process, because peak memory never goes down again within one.
            command = [sys.executable, __file__, "--measure", tool, student, teacher]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            # The last line; libraries may print others before it.
            result = json.loads(done.stdout.splitlines()[-1])
            cells = [
                Path(student).name,
                Path(teacher).name,
                tool,
                f"{result['seconds']:.1f}",
                f"{result['peak_mib']:.0f}",
                result["facts"],
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        print(__doc__)
        sys.exit()
    if sys.argv[1] == "--measure":
        measure(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
