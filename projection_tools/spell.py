"""Spelling tables: how each tokenizer spells the other's tokens, and the events that both can express.

    python -m projection_tools.spell --student-model A --teacher-model B [--output spelling.pt]

`piece_kl` (losses.py) reads these.  A spelling is made from bytes, in mid-text context: no bos, no added
prefix space.  A token and the first piece of its spelling are linked; connected components are the events.
"""

import json
import re
import sys
from dataclasses import dataclass

import fire
import numpy as np
import torch
from numba import njit
from tokenizers import Tokenizer

from align import BYTE_OF_CHARACTER, METASPACE, TokenTable
from projection_tools import cached, fingerprint, save_atomically

CHARACTER_OF_BYTE = {b: c for c, b in BYTE_OF_CHARACTER.items()}
SURROGATES = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")  # bytes that are no UTF-8, and the text between
ROLES = "eos", "end_of_turn", "bos", "pad", "unk"  # the first one counts where one token plays several


def mid_text_backend(tokenizer):
    """A copy of the backend that continues a text: no normaliser, no prefix space, no control tokens."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())

    def never_prepend(part):
        for step in part.get("pretokenizers", [part]):
            if step["type"] == "ByteLevel":
                step["add_prefix_space"] = False
            elif step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"

    if spec["pre_tokenizer"]:
        never_prepend(spec["pre_tokenizer"])
    spec.update(normalizer=None, truncation=None, padding=None, post_processor=None)
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["special"]]
    return Tokenizer.from_str(json.dumps(spec))


def spell(source, tokenizer, target, max_pieces=16):
    """How a tokenizer writes the bytes of another vocabulary's tokens.

    Args:
        source: TokenTable with the N tokens to spell; its control tokens are left out.
        tokenizer: the fast tokenizer that spells.
        target: TokenTable of that tokenizer.
    Returns:
        (N, P) int32 ids, -1 behind the last piece; all -1 where the bytes cannot be spelled; cut at
        max_pieces.
    """
    backend = mid_text_backend(tokenizer)
    wanted = [source.bytes_of(i) if not source.special[i] else b"" for i in range(len(source))]
    texts = [b.decode(errors="surrogateescape") for b in wanted]
    clean = [not re.search("[\udc80-\udcff]", t) for t in texts]
    space = METASPACE if target.family == "sentencepiece" else " "
    batch = backend.encode_batch([t.replace(" ", space) if ok else "" for t, ok in zip(texts, clean)],
                                 add_special_tokens=False)
    byte_ids = {token: i for i, token in enumerate(target.tokens)}
    rows = [e.ids if ok else _spell_bytes(t, backend, target, byte_ids)
            for e, t, ok in zip(batch, texts, clean)]
    pieces = np.full((len(rows), max_pieces), -1, np.int32)
    for i, (row, bytes_) in enumerate(zip(rows, wanted)):
        if row and b"".join([target.bytes_of(j) for j in row]) == bytes_ and not target.special[row].any():
            pieces[i, : len(row)] = row[:max_pieces]
    used = max(1, int((pieces >= 0).sum(1).max(initial=0)))
    return pieces[:, :used]


def _spell_bytes(text, backend, target, byte_ids):
    """Ids for bytes that are not all UTF-8 (lone surrogates stand for the others); [] if there are none."""
    if target.family == "byte_level":
        raw = text.encode(errors="surrogateescape")
        return [t.id for t in backend.model.tokenize("".join(CHARACTER_OF_BYTE[b] for b in raw))]
    ids = []
    for run in SURROGATES.findall(text):
        if "\udc80" <= run <= "\udcff":
            ids.append(byte_ids.get(f"<0x{ord(run) - 0xDC00:02X}>"))
        else:
            ids += backend.encode(run.replace(" ", METASPACE), add_special_tokens=False).ids
    return [] if None in ids else ids


def link_special_tokens(student, teacher):
    """Pairs (student id, teacher id) of control tokens: by role, then by equal name; each used once."""
    pairs, used = {}, set()
    by_role = [(getattr(student, role), getattr(teacher, role)) for role in ROLES]
    names = {teacher.tokens[w]: int(w) for w in np.flatnonzero(teacher.special)}
    by_name = [(int(v), names.get(student.tokens[v], -1)) for v in np.flatnonzero(student.special)]
    for v, w in by_role + by_name:
        if v >= 0 and w >= 0 and v not in pairs and w not in used:
            pairs[v] = w
            used.add(w)
    return list(pairs.items())


@njit(cache=True)
def _components(links, count):
    """Union-find over `links` (L, 2); every node gets the smallest node of its component."""
    root = np.arange(count)
    for k in range(len(links)):
        a, b = links[k]
        while root[a] != a:
            root[a] = root[root[a]]
            a = root[a]
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        root[max(a, b)] = min(a, b)
    for i in range(count):  # parents are smaller, so one pass in order is enough
        root[i] = root[root[i]]
    return root


def events(student_pieces_WP, teacher_pieces_VP):
    """Connected components of w -- A[w][0] and v -- B[v][0].

    Returns:
        (event_V, event_W, count): int64; -1 for a token that is linked to nothing of the other side.
    """
    W, V = len(student_pieces_WP), len(teacher_pieces_VP)
    w, v = np.flatnonzero(student_pieces_WP[:, 0] >= 0), np.flatnonzero(teacher_pieces_VP[:, 0] >= 0)
    links = np.concatenate([np.stack([student_pieces_WP[w, 0], V + w], 1),
                            np.stack([v, V + teacher_pieces_VP[v, 0]], 1)])
    linked = np.zeros(V + W, bool)
    linked[links.reshape(-1)] = True
    roots = _components(links.astype(np.int64), V + W)
    _, event = np.unique(roots[linked], return_inverse=True)
    numbers = np.full(V + W, -1)
    numbers[linked] = event
    return numbers[:V], numbers[V:], int(event.max(initial=-1)) + 1


def prefix_ranges(pieces_NP):
    """Sort spellings so that all rows that share a prefix are neighbours.

    Returns:
        (order_N, low_NP, high_NP): int32; the rows that begin with the same k pieces as row n are
        ``order[low[n, k]:high[n, k]]``, for k < P.
    """
    N, P = pieces_NP.shape
    order = np.lexsort(pieces_NP.T[::-1])
    ordered = pieces_NP[order]
    low, high = np.zeros((N, P), np.int32), np.full((N, P), N, np.int32)
    new = np.zeros(N, bool)  # does a prefix begin at this row?
    for k in range(1, P):
        new[1:] |= ordered[1:, k - 1] != ordered[:-1, k - 1]
        group = np.cumsum(new)
        starts = np.flatnonzero(np.append(True, new[1:]))
        low[order, k] = starts[group]
        high[order, k] = np.append(starts[1:], N)[group]
    return order.astype(np.int32), low, high


def build_spelling(student_tokenizer, teacher_tokenizer, student=None, teacher=None, max_pieces=16):
    """All tables of `losses.Spelling`, as a dict of tensors, with the fingerprints of both tokenizers."""
    student = student or TokenTable.from_tokenizer(student_tokenizer)
    teacher = teacher or TokenTable.from_tokenizer(teacher_tokenizer)
    prints = fingerprint(student_tokenizer), fingerprint(teacher_tokenizer)
    if prints[0] == prints[1]:  # one tokenizer: every token, reachable or not, is its own spelling
        A = B = np.arange(len(student), dtype=np.int32)[:, None]
    else:
        A = spell(teacher, student_tokenizer, student, max_pieces)
        B = spell(student, teacher_tokenizer, teacher, max_pieces)
        for v, w in link_special_tokens(student, teacher):
            A[w, 0], B[v, 0] = v, w
    event_V, event_W, count = events(A, B)
    tables = {"event_V": event_V, "event_W": event_W}
    for side, pieces in (("W", A), ("V", B)):
        order, low, high = prefix_ranges(pieces)
        tables |= {f"pieces_{side}": pieces, f"order_{side}": order, f"low_{side}": low, f"high_{side}": high}
    tables = {k: torch.from_numpy(np.ascontiguousarray(v).astype(np.int64)) for k, v in tables.items()}
    return tables | {"num_events": count, "student_fingerprint": prints[0], "teacher_fingerprint": prints[1]}


def cached_spelling(student_tokenizer, teacher_tokenizer, student, teacher, directory=None):
    """`build_spelling`, kept on disk under the fingerprints of the two tokenizers."""
    name = f"spelling-2-{fingerprint(student_tokenizer)[:16]}-{fingerprint(teacher_tokenizer)[:16]}.pt"
    pair = student_tokenizer, teacher_tokenizer, student, teacher
    return cached(name, lambda: build_spelling(*pair), directory)


def describe(tables):
    """One line of facts about spelling tables."""
    count, sides = tables["num_events"], [tables["event_V"], tables["event_W"]]
    sizes = [torch.bincount(event[event >= 0], minlength=count) for event in sides]
    single = (sizes[0] == 1) & (sizes[1] == 1)
    lengths = [(tables[f"pieces_{side}"] >= 0).sum(1) for side in "WV"]
    largest = int((sizes[0] + sizes[1]).max()) if count else 0
    return (f"{count} events, {int(single.sum())} of one token a side, largest {largest} tokens; "
            f"unspelled: {int((lengths[0] == 0).sum())} teacher, "
            f"{int((lengths[1] == 0).sum())} student tokens; "
            f"{lengths[0].float().mean():.2f} student pieces a teacher token, "
            f"{lengths[1].float().mean():.2f} the other way")


@dataclass(kw_only=True)
class Args:
    """Spelling tables of a student and a teacher tokenizer.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        output: file to write; empty: only print the statistics.
        max_pieces: longest spelling kept, in pieces.
    """

    student_model: str
    teacher_model: str
    output: str = ""
    max_pieces: int = 16


def main(args):
    from transformers import AutoTokenizer  # seconds to import, so only for the command line

    pair = [AutoTokenizer.from_pretrained(name) for name in (args.student_model, args.teacher_model)]
    tables = build_spelling(*pair, max_pieces=args.max_pieces)
    if args.output:
        save_atomically(tables, args.output)
    print(f"{args.output or 'spelling'}: {describe(tables)}")


if __name__ == "__main__":
    args = fire.Fire(Args, serialize=lambda _: None)
    sys.exit(main(args) if isinstance(args, Args) else 2)
