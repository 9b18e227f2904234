"""Look at a projection: examples, statistics, a check against two tokenizers, a picture.

    python -m projection_tools.show --student-model A --teacher-model B --projection F.pt \\
        [--tokens '201,hello'] [--num-examples 20] [--png F.png]

A row's tokens are written with their bytes; `*` marks an entry that the bytes do not explain.
"""

from dataclasses import dataclass

import numpy as np

from projection_tools.flags import check_types, tool
from projection_tools import Pair, all_bytes, describe, load_arrays
from projection_tools.build import empty_row_reasons
from projection_tools.spell import link_special_tokens


def byte_explained(projection, pair):
    """(V, K) bool: does an entry's token stand for a part of the student token's bytes, or for its role?"""
    indices, _ = projection
    student, teacher = [all_bytes(table) for table in pair.tables]
    roles = set(link_special_tokens(*pair.tables, threshold=0.8))
    control = pair.tables[1].special
    out = np.zeros(indices.shape, bool)
    for v, row in enumerate(indices.tolist()):
        for k, w in enumerate(row):
            if w >= 0:
                out[v, k] = (v, w) in roles or (not control[w] and teacher[w] in student[v])
    return out


def common_set(projection, relaxed=False):
    """(v, w) ids of the tokens that both vocabularies share, as the losses gold and h_kl count them.

    Args:
        relaxed: False: rows of one slot with weight 1, of one teacher token the lowest v.  True: rows whose
            top weight is 0.6 or more; of one teacher token the heaviest row, then the lowest v.
    """
    indices, likelihoods = projection
    top = likelihoods[:, 0]
    if relaxed:
        v = np.flatnonzero((indices[:, 0] >= 0) & (top >= 0.6))
    else:
        alone = (indices[:, 1:] < 0).all(1)
        v = np.flatnonzero((indices[:, 0] >= 0) & alone & (top > 1 - 1e-6))
    order = np.lexsort((v, -top[v], indices[v, 0]))
    _, first = np.unique(indices[v[order], 0], return_index=True)
    v = np.sort(v[order][first])
    return v, indices[v, 0]


def row_statistics(projection, pair):
    """Facts about a projection, as {name: number or text}."""
    indices, likelihoods = projection
    used = (indices >= 0).sum(1)
    sums = likelihoods.sum(1)
    same = [a == b for a, b in zip(all_bytes(pair.tables[0]), _bytes_of(indices[:, 0], pair.tables[1]))]
    facts = {"rows": len(indices), "of one teacher token": int((used == 1).sum()),
             "of these with equal bytes": int((np.array(same) & (used == 1)).sum()),
             "of several": int((used > 1).sum()), "empty": int((used == 0).sum())}
    facts |= {f"empty, {reason}": number for reason, number in empty_row_reasons(pair, indices).items()}
    facts["largest distance of a row's sum from 1"] = f"{np.abs(sums[used > 0] - 1).max(initial=0):.1e}"
    many = likelihoods[used > 1]
    for k in range(indices.shape[1] if len(many) else 0):
        facts[f"mean weight at rank {k + 1}, rows of several"] = f"{many[:, k].mean():.4f}"
    facts["common set, strict"] = len(common_set(projection)[0])
    facts["common set, relaxed"] = len(common_set(projection, relaxed=True)[0])
    facts["teacher tokens that some row holds"] = len(np.unique(indices[indices >= 0]))
    facts["entries that bytes do not explain"] = int((~byte_explained(projection, pair) & (indices >= 0)).sum())
    return facts


def _bytes_of(ids, table):
    known = all_bytes(table)
    return [known[i] if i >= 0 else None for i in ids.tolist()]


def find_tokens(words, table):
    """Ids of student tokens given by id (#12), by their bytes as text, or as the vocabulary writes them.

    Raises:
        ValueError: no such token.
    """
    by_bytes = {b: i for i, b in reversed(list(enumerate(all_bytes(table))))}
    by_name = {token: i for i, token in reversed(list(enumerate(table.tokens)))}
    out = []
    for word in words:
        i = by_bytes.get(word.encode(), by_name.get(word, -1))
        if word.startswith("#") and word[1:].isdigit():
            i = int(word[1:])
        if not 0 <= i < len(table):
            raise ValueError(f"--tokens {word}: the student has no such token; give its text, its name "
                             f"in the vocabulary, or #id below {len(table)}")
        out.append(i)
    return out


def shown(i, table):
    """A token for people: its bytes as text in quotes, or its name."""
    return table.tokens[i] if table.special[i] else repr(table.bytes_of(i).decode(errors="backslashreplace"))


def row_text(v, projection, pair, good):
    """One line: a student token and its teacher tokens."""
    indices, likelihoods = projection
    parts = [f"{shown(w, pair.tables[1])} {weight:.4f}{'' if ok else '*'}"
             for w, weight, ok in zip(indices[v].tolist(), likelihoods[v], good[v]) if w >= 0]
    return f"#{v} {shown(v, pair.tables[0])} -> {', '.join(parts) or 'nothing'}"


def picture(projection, pair, rows, path):
    """A block of rows as colored weights, and the histogram of row sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    indices, likelihoods = projection
    K, table = indices.shape[1], pair.tables[1]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(4 + 1.4 * K, 1.5 + 0.28 * len(rows)), width_ratios=(2, 1), constrained_layout=True)
    left.imshow(likelihoods[rows], aspect="auto", cmap="Blues", vmin=0, vmax=1)
    left.set_yticks(range(len(rows)), [_plain(shown(v, pair.tables[0])) for v in rows], fontsize=8)
    left.set_xticks(range(K), [f"rank {k + 1}" for k in range(K)], fontsize=8)
    for y, v in enumerate(rows):
        for x in np.flatnonzero(indices[v] >= 0):
            weight = likelihoods[v, x]
            left.text(x, y, f"{_plain(shown(indices[v, x], table))}  {weight:.3f}", ha="center", va="center",
                      fontsize=7, color="white" if weight > 0.6 else "black", clip_on=True)
    left.set_title("weights", fontsize=9)
    sizes = np.bincount((indices >= 0).sum(1), minlength=K + 1)
    right.bar(range(K + 1), sizes, color="C0")
    right.set_yscale("symlog")
    right.set(xlabel="teacher tokens in a row", ylabel="rows")
    right.set_xticks(range(K + 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plain(text):
    """Text that any font can draw: no mathematics, no letters beyond Latin."""
    return text.replace("$", r"\$").encode("latin-1", "backslashreplace").decode("latin-1")[:24]


@dataclass(kw_only=True)
class Args:
    """Look at a projection.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        projection: file to show, .pt or .safetensors.
        tokens: student tokens to show, with commas between: text, spelling in the vocabulary, or #id.
        num_examples: rows to show when no tokens are named, evenly spaced among those of several tokens.
        png: picture to draw of the shown rows; empty: none.
    """

    student_model: str
    teacher_model: str
    projection: str
    tokens: str = ""
    num_examples: int = 20
    png: str = ""

    def __post_init__(self):
        check_types(self)
        if self.num_examples < 0:
            raise ValueError(f"--num-examples {self.num_examples}: expected 0 or more")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    projection = load_arrays(args.projection, pair)
    if args.tokens:
        rows = find_tokens(args.tokens.split(","), pair.tables[0])
    else:
        several = np.flatnonzero((projection[0] >= 0).sum(1) > 1)
        several = several if len(several) else np.flatnonzero(projection[0][:, 0] >= 0)
        count = min(args.num_examples, len(several))
        rows = several[np.linspace(0, len(several) - 1, count).astype(int)].tolist()
    good = byte_explained(projection, pair)
    for v in rows:
        print(row_text(v, projection, pair, good))
    print(f"{args.projection}: {describe(projection[0])}")
    for name, value in row_statistics(projection, pair).items():
        print(f"  {name}: {value}")
    if args.png:
        picture(projection, pair, rows, args.png)
        print(args.png)


if __name__ == "__main__":
    tool(Args, main)
