"""Say, from ids alone, how much of a text a teacher can teach to a student with another tokenizer.

    python -m projection_tools.pairs --tokenizers A,B,C --texts english=F.txt,code=G.py [--pages 50]

Prints a Markdown table of all ordered pairs.  Of each kind of text, in percent:

full       student tokens whose next token the translated teacher says in full: those of chunks with
           one token on either side, and the first one of others
rest       the others of chunks with several tokens on both sides, of which one number is compared
none       those without a chunk
misplaced  chunks whose first student token lies outside the cell that the teacher's token gives its
           mass to; what is left of the first three is rounding

and tokens a cell: of the student's vocabulary, in a cell of the root.
"""

from itertools import permutations
from pathlib import Path

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("pairs"))

import numpy as np

from isogloss.align import align
from isogloss.projection_tools.cells import statistics
from isogloss.projection_tools.files import cached_translation
from isogloss.projection_tools.tokenizers import Pair

PAGE = 2000  # characters that are read at a time


def shares(texts, pair, tables):
    """Return {"full", "rest", "none", "misplaced": fraction} of some texts.

    Args:
        texts: list of strings.
        pair: Pair.
        tables: of `cells.build_translation`.
    """
    cell_V, cell_W = tables["cell_V"].numpy(), tables["cell_W"].numpy()
    num_tokens = rest = none = 0
    num_chunks = misplaced = 0
    for text in texts:
        coded = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
                 for tokenizer in pair.tokenizers]
        ids = [np.array(one["input_ids"], np.int64) for one in coded]
        offsets = [one["offset_mapping"] for one in coded]
        alignment = align(*ids, *pair.tables, text, *offsets)
        is_many = (alignment.student_tokens > 1) & (alignment.teacher_tokens > 1)
        num_tokens += len(ids[0])
        rest += int((alignment.student_tokens[is_many] - 1).sum())
        none += int((alignment.student_chunk < 0).sum())
        num_chunks += len(is_many)
        first_S = first_tokens(ids[0], alignment.student_chunk)
        first_T = first_tokens(ids[1], alignment.teacher_chunk)
        misplaced += int((cell_V[first_S] != cell_W[first_T]).sum())
    counts = {"full": num_tokens - rest - none, "rest": rest, "none": none}
    found = {name: count / max(num_tokens, 1) for name, count in counts.items()}
    return found | {"misplaced": misplaced / max(num_chunks, 1)}


def first_tokens(ids, chunk):
    """Return the (C,) ids of the first token of every chunk; -1 in `chunk`: in none."""
    in_chunk = chunk >= 0
    _, places = np.unique(chunk[in_chunk], return_index=True)
    return ids[in_chunk][places]


def read_texts(flag_value, pages):
    """Return {name: pieces of a text} of --texts."""
    texts = {}
    for entry in flag_value.split(","):
        name, equals, path = entry.partition("=")
        if not equals:
            raise ValueError(f"--texts {entry}: expected NAME=FILE")
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--texts {entry}: cannot be read ({error})") from None
        texts[name] = [text[i : i + PAGE] for i in range(0, min(len(text), pages * PAGE), PAGE)]
        if not texts[name]:
            raise ValueError(f"--texts {entry}: holds no text")
    return texts


def main(args):
    names = args.tokenizers.split(",")
    if len(names) < 2:
        raise ValueError(f"--tokenizers {args.tokenizers}: expected two or more, with commas")
    texts = read_texts(args.texts, args.pages)
    print("| student | teacher | tokens a cell | " + " | ".join(texts) + " |")
    print("| --- " * (3 + len(texts)) + "|", flush=True)
    for student, teacher in permutations(names, 2):
        pair = Pair.load(student, teacher, args.trust_remote_code)
        tables = cached_translation(pair)
        facts = statistics(tables)
        a_cell = facts["student tokens with a cell"] / max(facts["cells"], 1)
        cells = []
        for pieces in texts.values():
            found = shares(pieces, pair, tables)
            cells.append(" / ".join(f"{100 * value:.1f}" for value in found.values()))
        short = [Path(name).name for name in (student, teacher)]
        print(f"| {' | '.join(short)} | {a_cell:.2f} | {' | '.join(cells)} |", flush=True)
