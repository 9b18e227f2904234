"""Spelling tables: how each tokenizer spells the other's tokens, and the events that both can express.

    python -m projection_tools.spell --student-model A --teacher-model B [--output spelling.pt]

`piece_kl` (losses.py) reads these.  A spelling is made from bytes, in mid-text context: no bos, no added
prefix space.  A token and the first piece of its spelling are linked; connected components are the events.
"""

import copy
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from tokenizers import Tokenizer, pre_tokenizers

from align import BYTE_OF_CHARACTER, METASPACE
from projection_tools.flags import check_types, tool
from projection_tools import ROLES, Pair, all_bytes, cached, save_atomically, tokenizer_metadata

CHARACTER_OF_BYTE = {b: c for c, b in BYTE_OF_CHARACTER.items()}
SURROGATES = re.compile("[\udc80-\udcff]")  # how surrogateescape writes a byte that is no UTF-8
RUNS = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")  # one of them, or the text between
VERSION = 4  # of the tables; raise it when two tokenizers give other ones


def mid_text_backend(tokenizer):
    """A backend on the same model that continues a text: no normalizer, prefix space or control tokens."""
    given = tokenizer.backend_tokenizer
    backend = Tokenizer(given.model)  # shared; a copy of 128k merges through JSON takes a second
    if given.pre_tokenizer is not None:
        backend.pre_tokenizer = _without_prefix_space(copy.deepcopy(given.pre_tokenizer))
    backend.add_tokens([token for _, token in sorted(given.get_added_tokens_decoder().items())])
    backend.encode_special_tokens = True  # as any other text
    return backend


def _without_prefix_space(part):
    if isinstance(part, pre_tokenizers.Sequence):
        for step in part:
            _without_prefix_space(step)
    elif isinstance(part, pre_tokenizers.ByteLevel):
        part.add_prefix_space = False
    elif isinstance(part, pre_tokenizers.Metaspace):
        part.prepend_scheme = "never"
    return part


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
    wanted = [b"" if control else b for b, control in zip(all_bytes(source), source.special.tolist())]
    texts = [b.decode(errors="surrogateescape") for b in wanted]
    broken = [i for i, t in enumerate(texts) if not t.isascii() and SURROGATES.search(t)]
    by_bytes = {i: texts[i] for i in broken}
    for i in broken:
        texts[i] = ""
    space = METASPACE if target.family == "sentencepiece" else " "
    batch = backend.encode_batch_fast([t.replace(" ", space) for t in texts], add_special_tokens=False)
    rows = [e.ids for e in batch]
    byte_ids = {token: i for i, token in enumerate(target.tokens)}
    for i, text in by_bytes.items():
        rows[i] = _spell_bytes(text, backend, target, byte_ids)
    sizes = np.array([len(row) for row in rows], np.int64)
    flat = np.array([i for row in rows for i in row], np.int64)
    good = _same_bytes(flat, sizes, target, wanted)
    slot = np.arange(len(flat)) - (np.cumsum(sizes) - sizes).repeat(sizes)
    row = np.arange(len(rows)).repeat(sizes)
    kept = good[row] & (slot < max_pieces)
    pieces = np.full((len(rows), max(1, int(slot[kept].max(initial=0)) + 1)), -1, np.int32)
    pieces[row[kept], slot[kept]] = flat[kept]
    return pieces


def _same_bytes(flat, sizes, table, wanted):
    """(N,) bool: do the next sizes[n] of the flat ids spell wanted[n], by tokens that are text?"""
    row = np.arange(len(sizes)).repeat(sizes)
    spelled = np.bincount(row, table.lengths[flat], len(sizes)).astype(np.int64)
    expected = np.array([len(b) for b in wanted], np.int64)
    good = (spelled == expected) & (np.bincount(row, table.special[flat], len(sizes)) == 0)
    found = np.frombuffer(table.decode(flat[good[row]]), np.uint8)
    text = np.frombuffer(b"".join(b for b, ok in zip(wanted, good.tolist()) if ok), np.uint8)
    wrong = np.searchsorted(np.cumsum(expected[good]), np.flatnonzero(found != text), "right")
    good[np.flatnonzero(good)[wrong]] = False
    return good


def _spell_bytes(text, backend, target, byte_ids):
    """Ids for bytes that are not all UTF-8 (lone surrogates stand for the others); [] if there are none."""
    if target.family == "byte_level":
        raw = text.encode(errors="surrogateescape")
        return [t.id for t in backend.model.tokenize("".join(CHARACTER_OF_BYTE[b] for b in raw))]
    ids = []
    for run in RUNS.findall(text):
        if SURROGATES.match(run):
            ids.append(byte_ids.get(f"<0x{ord(run) - 0xDC00:02X}>"))
        else:
            ids += backend.encode(run.replace(" ", METASPACE), add_special_tokens=False).ids
    return [] if None in ids else ids


def why_unspelled(source, pieces, total):
    """{reason: number} of the tokens that have no spelling, or only the beginning of one.

    Args:
        source: TokenTable of the tokens.
        pieces: (N, P) their spelling.
        total: (N,) bytes that the pieces stand for.
    """
    nothing, missing = np.diff(source.starts) == 0, pieces[:, 0] < 0
    text = ~source.special & ~nothing
    found = {"control tokens without a counterpart": missing & source.special,
             "ids without a token": missing & ~source.special & nothing,
             "bytes that the other side cannot write": missing & text,
             "spelled up to the most pieces only": ~missing & text & (total < source.lengths)}
    return {reason: int(which.sum()) for reason, which in found.items() if which.any()}


def link_special_tokens(student, teacher, threshold=1.0):
    """Pairs (student id, teacher id) of control tokens, each used once: by role, equal name, similar name.

    Names are compared without case, brackets and bars, by the Dice coefficient of their pairs of letters;
    their digits must be the same, and a name with a slash never goes with one without.

    Args:
        threshold: similarity, 0 to 1, from which on two names are taken for one; 1: they may differ in case
            and brackets.
    """
    by_role = [(getattr(student, role), getattr(teacher, role)) for role in ROLES]
    names = [{int(i): table.tokens[i] for i in np.flatnonzero(table.special)} for table in (student, teacher)]
    ids = {name: w for w, name in names[1].items()}
    by_name = [(v, ids.get(name, -1)) for v, name in names[0].items()]
    groups, similar = defaultdict(list), []
    for w, name in names[1].items():
        kind, letters = _signature(name)
        groups[kind].append((w, letters))
    for v, name in names[0].items():
        kind, letters = _signature(name)
        for w, others in groups[kind]:
            dice = 2 * (letters & others).total() / max(1, letters.total() + others.total())
            if dice >= threshold:
                similar.append((-dice, v, w))
    pairs, used = {}, set()
    for v, w in by_role + by_name + [(v, w) for _, v, w in sorted(similar)]:
        if v >= 0 and w >= 0 and v not in pairs and w not in used:
            pairs[v] = w
            used.add(w)
    return list(pairs.items())


def _signature(name):
    """(what must be equal: digits, slash; what may differ a little: pairs of letters) of a name."""
    letters = "".join(c for c in name.casefold() if c.isalpha() or c == "_")
    return ("/" in name, *(c for c in name if c.isdigit())), Counter(zip(letters, letters[1:]))


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
    """Sort spellings so that all rows that share a prefix are neighbors.

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


def build_spelling(pair, max_pieces=16):
    """All tables of `losses.Spelling` (int32 tensors), with the fingerprints of both tokenizers.

    Args:
        pair: Pair.
        max_pieces: longest spelling kept, in pieces; of longer ones the beginning.
    """
    student, teacher = pair.tables
    if pair.prints[0] == pair.prints[1]:  # one tokenizer: every token, reachable or not, is its own spelling
        A = B = np.arange(len(student), dtype=np.int32)[:, None]
    else:
        A = spell(teacher, pair.tokenizers[0], student, max_pieces)
        B = spell(student, pair.tokenizers[1], teacher, max_pieces)
        for v, w in link_special_tokens(student, teacher):
            A[w, 0], B[v, 0] = v, w
    event_V, event_W, count = events(A, B)
    tables = {"event_V": event_V, "event_W": event_W}
    for side, pieces in (("W", A), ("V", B)):
        order, low, high = prefix_ranges(pieces)
        tables |= {f"pieces_{side}": pieces, f"order_{side}": order, f"low_{side}": low, f"high_{side}": high}
    tables = {k: torch.from_numpy(np.ascontiguousarray(v).astype(np.int32)) for k, v in tables.items()}
    return tables | {"num_events": count} | tokenizer_metadata(pair)


def cached_spelling(pair, directory=None):
    """`build_spelling`, kept on disk under the digest of the pair."""
    return cached(f"spelling-{VERSION}-{pair.digest}.pt", lambda: build_spelling(pair), directory)


def statistics(tables, pair):
    """Facts about spelling tables, as {name: number or text}."""
    count, sides = tables["num_events"], [tables["event_V"].long(), tables["event_W"].long()]
    sizes = [torch.bincount(event[event >= 0], minlength=count) for event in sides]
    single = (sizes[0] == 1) & (sizes[1] == 1)
    facts = {"events": count, "of one token a side": int(single.sum()),
             "tokens of the largest": int((sizes[0] + sizes[1]).max()) if count else 0}
    for role, event in zip(("student", "teacher"), sides):
        share = float(single[event[event >= 0]].sum()) / max(1, len(event))
        facts[f"{role} tokens in events of one token a side"] = f"{share:.1%}"
    for i, (role, side) in enumerate((("student", "V"), ("teacher", "W"))):
        source, target, pieces = pair.tables[i], pair.tables[1 - i], tables[f"pieces_{side}"].numpy()
        used = pieces >= 0
        total = np.where(used, target.lengths[np.where(used, pieces, 0)], 0).sum(1)
        facts[f"pieces per {role} token"] = f"{used.sum() / max(1, used[:, 0].sum()):.2f}"
        for reason, number in why_unspelled(source, pieces, total).items():
            facts[f"{role}: {reason}"] = number
    return facts


@dataclass(kw_only=True)
class Args:
    """Spelling tables of a student and a teacher tokenizer.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        output: file to write, .pt or .safetensors; empty: only print the statistics.
        max_pieces: longest spelling kept, in pieces, 1 or more.
    """

    student_model: str
    teacher_model: str
    output: str = ""
    max_pieces: int = 16

    def __post_init__(self):
        check_types(self)
        if self.max_pieces < 1:
            raise ValueError(f"--max-pieces {self.max_pieces}: expected 1 or more")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    tables = build_spelling(pair, args.max_pieces)
    if args.output:
        save_atomically(tables, args.output)
        print(f"{args.output}:")
    for name, value in statistics(tables, pair).items():
        print(f"  {name}: {value}")


if __name__ == "__main__":
    tool(Args, main)
