"""Look at a projection: examples, statistics, a check against two tokenizers.

    python -m projection_tools.show --student A --teacher B --projection F.pt \\
        [--tokens '201,hello'] [--num_examples 20]

A row's tokens are written with their bytes; `*` marks an entry that the bytes do not explain.
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("show"))

import numpy as np
import torch

from isogloss.align import all_bytes
from isogloss.flags.terminal import one_line
from isogloss.losses import common_tokens
from isogloss.projection_tools.arrays import describe
from isogloss.projection_tools.build import empty_row_reasons
from isogloss.projection_tools.projection_files import load_arrays
from isogloss.spelling import link_special_tokens

# --- facts ----------------------------------------------------------------------------------------


def byte_explained(projection, pair):
    """Return (V, K) bool: the bytes of the student's token explain the entry, or its role does.

    Bytes explain a teacher token that stands for a part of them.
    """
    indices, _ = projection
    student_bytes = all_bytes(pair.tables[0])
    teacher_bytes = all_bytes(pair.tables[1])
    is_control = pair.tables[1].special.tolist()
    linked = set(link_special_tokens(*pair.tables, threshold=0.8))  # the default of `build`
    result = np.zeros(indices.shape, bool)
    rows, slots = np.nonzero(indices >= 0)
    columns = indices[rows, slots].tolist()
    explained = []
    for v, w in zip(rows.tolist(), columns):
        within = not is_control[w] and teacher_bytes[w] in student_bytes[v]
        explained.append(within or (v, w) in linked)
    result[rows, slots] = explained
    return result


def num_common(projection, relaxed=False):
    """Return how many tokens both vocabularies share, as the losses gold and h_kl count them."""
    try:
        return len(common_tokens(*map(torch.from_numpy, projection), relaxed=relaxed)[0])
    except ValueError:  # none
        return 0


def row_statistics(projection, pair):
    """Return facts about a projection beside those of `describe`, as {name: number or text}."""
    indices, likelihoods = projection
    used = indices >= 0
    sizes = used.sum(1)
    facts = {}
    for reason, number in empty_row_reasons(pair, indices).items():
        facts[f"empty, {reason}"] = number
    sums = likelihoods[sizes > 0].sum(1)
    facts["largest distance of a row's sum from 1"] = f"{np.abs(sums - 1).max(initial=0):.1e}"
    several = likelihoods[sizes > 1]
    if len(several):
        for k in range(indices.shape[1]):
            mean = several[:, k].mean()
            facts[f"mean weight at rank {k + 1}, rows with several"] = f"{mean:.4f}"
    facts["common set, strict"] = num_common(projection)
    facts["common set, relaxed"] = num_common(projection, relaxed=True)
    facts["teacher tokens in use"] = len(np.unique(indices[used]))
    unexplained = used & ~byte_explained(projection, pair)
    facts["entries that bytes do not explain"] = int(unexplained.sum())
    return facts


# --- tokens as text -------------------------------------------------------------------------------


def find_tokens(words, table):
    """Return the ids of tokens that are given by id (#12), by their text, or by their name.

    Args:
        words: list of strings.
        table: TokenTable; a name is how the vocabulary writes the token, such as '▁the'.
    Raises:
        ValueError: there is no such token.
    """
    by_bytes = {}
    by_name = {}
    token_bytes = all_bytes(table)
    for i in reversed(range(len(table))):  # from the last id, so that the lowest one stays
        by_bytes[token_bytes[i]] = i
        by_name[table.tokens[i]] = i
    ids = []
    for word in words:
        # bytes of a command line that are no UTF-8 come as surrogates
        raw = word.encode(errors="surrogateescape")
        i = by_bytes.get(raw, by_name.get(word, -1))
        if word.startswith("#") and word[1:].isdecimal():
            i = int(word[1:])
        if not 0 <= i < len(table):
            raise ValueError(
                f"--tokens {word}: the student has no such token; give its text, its name in the "
                f"vocabulary, or #id below {len(table)}")
        ids.append(i)
    return ids


def shown(i, table):
    """Return a token for people: its bytes as text in quotes, or the name of a control token."""
    if table.special[i]:
        return one_line(table.tokens[i])
    return repr(table.bytes_of(i).decode(errors="backslashreplace"))


def row_text(v, projection, pair, explained):
    """Return one line: a student token and its teacher tokens."""
    indices, likelihoods = projection
    student, teacher = pair.tables
    tokens = []
    for k in np.flatnonzero(indices[v] >= 0):
        mark = "" if explained[v, k] else "*"
        token = shown(int(indices[v, k]), teacher)
        tokens.append(f"{token} {likelihoods[v, k]:.4f}{mark}")
    return f"#{v} {shown(v, student)} -> {', '.join(tokens) or 'nothing'}"


def example_rows(indices, num_examples):
    """Return the ids of rows with several teacher tokens, evenly spaced.

    Where no row has several, rows with one are returned.
    """
    sizes = (indices >= 0).sum(1)
    rows = np.flatnonzero(sizes > 1)
    if not len(rows):
        rows = np.flatnonzero(sizes > 0)
    count = min(num_examples, len(rows))
    positions = np.linspace(0, len(rows) - 1, count).astype(int)
    return rows[positions].tolist()


def main(args):
    pair = args.load_pair()
    projection = load_arrays(args.projection, pair)
    if args.tokens:
        rows = find_tokens(args.tokens.split(","), pair.tables[0])
    else:
        rows = example_rows(projection[0], args.num_examples)
    explained = byte_explained(projection, pair)
    for v in rows:
        print(row_text(v, projection, pair, explained))
    print(f"{one_line(args.projection)}: {describe(projection[0])}")
    for name, value in row_statistics(projection, pair).items():
        print(f"  {name}: {value}")
