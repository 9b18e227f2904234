"""Spelling tables: how each tokenizer spells the other's tokens, and the events both can express.

    python -m projection_tools.spell --student A --teacher B [--output spelling.pt]

`event_kl` (losses.py) reads these.  A spelling is made from bytes, in mid-text context: no bos, no
added prefix space.  A token and the first piece of its spelling are linked; connected components
are the events.

Shapes: V student vocabulary, W teacher vocabulary, P pieces, N tokens of either vocabulary.
"""

import copy
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from numba import njit
from tokenizers import Tokenizer, pre_tokenizers

from align import BYTE_OF_CHARACTER, METASPACE
from projection_tools import (
    ROLES,
    Pair,
    all_bytes,
    cached,
    check_output,
    save_atomically,
    tokenizer_metadata,
)
from projection_tools.flags import OLD_NAMES, check_types, tool

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}

# Python decodes a byte that is not UTF-8 to one of these (errors="surrogateescape"), 0xDC00 + byte.
SURROGATE_BASE = 0xDC00
SURROGATES = re.compile("[\udc80-\udcff]")
RUNS = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")  # one of them, or the text between

VERSION = 5  # of the tables; raise it when they change for the same two tokenizers


# --- spellings ------------------------------------------------------------------------------------


def mid_text_backend(tokenizer):
    """Return a backend on the same model that continues a text.

    It has no normalizer, adds no space before the text, and reads control tokens as text.
    """
    original = tokenizer.backend_tokenizer
    backend = Tokenizer(original.model)  # shared; a copy of 128k merges through JSON takes a second
    if original.pre_tokenizer is not None:
        pre_tokenizer = copy.deepcopy(original.pre_tokenizer)  # the tokenizer stays as it is
        _drop_prefix_space(pre_tokenizer)
        backend.pre_tokenizer = pre_tokenizer
    added_tokens = original.get_added_tokens_decoder()
    in_order = map(added_tokens.get, sorted(added_tokens))
    backend.add_tokens(list(in_order))
    backend.encode_special_tokens = True  # as any other text
    return backend


def _drop_prefix_space(pre_tokenizer):
    """Change a pre-tokenizer in place, so that it adds no space before a text."""
    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        for step in pre_tokenizer:
            _drop_prefix_space(step)
    elif isinstance(pre_tokenizer, pre_tokenizers.ByteLevel):
        pre_tokenizer.add_prefix_space = False
    elif isinstance(pre_tokenizer, pre_tokenizers.Metaspace):
        pre_tokenizer.prepend_scheme = "never"


def spell(source, tokenizer, target, max_pieces=16):
    """Spell the tokens of one vocabulary by the tokenizer of the other.

    Args:
        source: TokenTable with the N tokens to spell; its control tokens are left out.
        tokenizer: the fast tokenizer that spells.
        target: TokenTable of that tokenizer.
        max_pieces: pieces kept of a spelling.
    Returns:
        (N, P) int32 ids, -1 behind the last piece; all -1 where the bytes cannot be spelled; cut at
        max_pieces.
    """
    expected = all_bytes(source)
    for i in np.flatnonzero(source.special).tolist():
        expected[i] = b""
    spellings = encode_bytes(expected, mid_text_backend(tokenizer), target)
    sizes = np.array(list(map(len, spellings)), np.int64)
    ids = np.fromiter(chain.from_iterable(spellings), np.int64)
    spelled = same_bytes(ids, sizes, target, expected)

    # The i-th id of the flat list stands in row rows[i] and slot slots[i] of the matrix.
    rows = np.arange(len(sizes)).repeat(sizes)
    first = np.cumsum(sizes) - sizes
    slots = np.arange(len(ids)) - first.repeat(sizes)
    kept = spelled[rows] & (slots < max_pieces)
    longest = int(slots[kept].max(initial=0)) + 1
    pieces = np.full((len(sizes), longest), -1, np.int32)
    pieces[rows[kept], slots[kept]] = ids[kept]
    return pieces


def encode_bytes(expected, backend, target):
    """Return a list of ids for each of the byte strings; not yet checked against the bytes."""
    # Without a normalizer, SentencePiece has to be given the character that it writes for a space.
    space = METASPACE if target.family == "sentencepiece" else " "
    texts = []
    not_utf8 = {}
    for i, raw in enumerate(expected):
        text = raw.decode(errors="surrogateescape")
        if not text.isascii() and SURROGATES.search(text):
            not_utf8[i] = text
            text = ""
        texts.append(text.replace(" ", space))
    # One call for all texts, which the backend spreads over its threads.
    batch = backend.encode_batch_fast(texts, add_special_tokens=False)
    spellings = [encoding.ids for encoding in batch]
    if not not_utf8:
        return spellings

    id_of_token = {}
    for i, token in enumerate(target.tokens):
        id_of_token[token] = i
    for i, text in not_utf8.items():
        spellings[i] = _encode_surrogates(text, backend, target, id_of_token)
    return spellings


def _encode_surrogates(text, backend, target, id_of_token):
    """Return ids for bytes that are not all UTF-8; [] if the vocabulary cannot write them.

    Args:
        text: the bytes, those that are not UTF-8 as surrogates.
    """
    if target.family == "byte_level":
        # The model takes any bytes, written as its characters.  The pre-tokenizer is skipped.
        raw = text.encode(errors="surrogateescape")
        characters = "".join(map(CHARACTER_OF_BYTE.__getitem__, raw))
        return [token.id for token in backend.model.tokenize(characters)]
    ids = []
    for run in RUNS.findall(text):
        if SURROGATES.match(run):
            byte_token = f"<0x{ord(run) - SURROGATE_BASE:02X}>"
            ids.append(id_of_token.get(byte_token))
        else:
            run = run.replace(" ", METASPACE)
            ids += backend.encode(run, add_special_tokens=False).ids
    if None in ids:  # a byte without a byte token
        return []
    return ids


def same_bytes(ids, sizes, table, expected):
    """Return (N,) bool: the next sizes[n] of the flat ids spell expected[n], by tokens of text."""
    rows = np.arange(len(sizes)).repeat(sizes)
    N = len(sizes)
    lengths = np.bincount(rows, table.lengths[ids], N).astype(np.int64)
    num_control = np.bincount(rows, table.special[ids], N)
    expected_lengths = np.array(list(map(len, expected)), np.int64)
    same = (lengths == expected_lengths) & (num_control == 0)

    # What has the right length is compared as one long array.  The position of a byte that differs
    # gives the token, by the position where each one ends.
    candidates = np.flatnonzero(same)
    actual = table.decode(ids[same[rows]])
    actual_bytes = np.frombuffer(actual, np.uint8)
    joined = b"".join(map(expected.__getitem__, candidates.tolist()))
    expected_bytes = np.frombuffer(joined, np.uint8)
    differing = np.flatnonzero(actual_bytes != expected_bytes)
    ends = np.cumsum(expected_lengths[candidates])
    wrong = np.searchsorted(ends, differing, "right")
    same[candidates[wrong]] = False
    return same


def unencodable_reasons(source, pieces, total):
    """Return {reason: number} of the tokens without a spelling, or with the beginning of one.

    Args:
        source: TokenTable of the tokens.
        pieces: (N, P) their spelling.
        total: (N,) bytes that the pieces stand for.
    """
    unused = np.diff(source.starts) == 0
    missing = pieces[:, 0] < 0
    text = ~source.special & ~unused
    masks = {
        "control tokens without a counterpart": missing & source.special,
        "ids without a token": missing & ~source.special & unused,
        "bytes that the other side cannot write": missing & text,
        "longer than the most pieces kept": ~missing & text & (total < source.lengths),
    }
    reasons = {}
    for reason, mask in masks.items():
        if mask.any():
            reasons[reason] = int(mask.sum())
    return reasons


# --- control tokens -------------------------------------------------------------------------------


# Roles that tokenizers without such a token give to another one, most often eos.
STAND_INS = {"pad", "unk"}


def link_special_tokens(student, teacher, threshold=1.0):
    """Pair control tokens of both vocabularies: by role, by equal name, by similar name.

    Tokens whose roles differ are no pair, whatever their names; nor is one that only doubles as
    "unk" or "pad" a pair of one that is nothing else, as <|endoftext|> of GPT-NeoX and [UNK].
    Names are compared without case, brackets and bars, by the Dice coefficient of their pairs of
    letters; their digits must be the same, and a name with a slash never goes with one without.

    Args:
        student, teacher: TokenTables.
        threshold: similarity, 0 to 1, from which on two names count as one; 1: they may differ in
            case and brackets.
    Returns:
        list of (student id, teacher id), each id used once.
    """
    student_names = _control_names(student)
    teacher_names = _control_names(teacher)
    candidates = []
    for role in ROLES:
        candidates.append((getattr(student, role), getattr(teacher, role)))
    candidates += _equal_names(student_names, teacher_names)
    candidates += _similar_names(student_names, teacher_names, threshold)

    # The first candidate whose two ids are still free wins; -1 stands for no token.
    pairs = {}
    used = set()
    for v, w in candidates:
        exists = v >= 0 and w >= 0
        if exists and v not in pairs and w not in used and _roles_agree(student, v, teacher, w):
            pairs[v] = w
            used.add(w)
    return list(pairs.items())


def _roles_agree(student, v, teacher, w):
    """Tell whether two control tokens may stand for each other, as far as their roles say."""
    student_roles = {role for role in ROLES if getattr(student, role) == v}
    teacher_roles = {role for role in ROLES if getattr(teacher, role) == w}
    if not student_roles or not teacher_roles:
        return True  # their names decide
    if (student_roles & teacher_roles) - STAND_INS:
        return True
    all_roles = student_roles | teacher_roles
    return bool(student_roles & teacher_roles) and all_roles <= STAND_INS


def _control_names(table):
    """Return {id: name} of a vocabulary's control tokens."""
    ids = np.flatnonzero(table.special).tolist()
    return {i: table.tokens[i] for i in ids}


def _equal_names(student_names, teacher_names):
    """Return (v, w) of the control tokens that are called the same; w is -1 for no such token."""
    id_of_name = {name: w for w, name in teacher_names.items()}
    pairs = []
    for v, name in student_names.items():
        w = id_of_name.get(name, -1)
        pairs.append((v, w))
    return pairs


def _similar_names(student_names, teacher_names, threshold):
    """Return (v, w) of control tokens with names of similarity `threshold` or more, best first."""
    candidates = defaultdict(list)  # only names of one kind are compared
    for w, name in teacher_names.items():
        kind, letters = _signature(name)
        candidates[kind].append((w, letters))
    similar = []  # sorted by falling similarity, then by ids
    for v, name in student_names.items():
        kind, letters = _signature(name)
        for w, other_letters in candidates[kind]:
            common = (letters & other_letters).total()
            both = letters.total() + other_letters.total()
            dice = 2 * common / max(1, both)
            if dice >= threshold:
                similar.append((-dice, v, w))
    similar.sort()
    return [(v, w) for _, v, w in similar]


def _signature(name):
    """Return (kind, letters) of a name.

    kind: what must be equal, a slash and the digits.  letters: Counter of its pairs of letters,
    which may differ a little.
    """
    digits = filter(str.isdigit, name)
    kind = ("/" in name, *digits)
    letters = "".join(c for c in name.casefold() if c.isalpha() or c == "_")
    return kind, Counter(pairwise(letters))


# --- events ---------------------------------------------------------------------------------------


@njit(cache=True)
def _components(links, count):
    """Return for each of `count` nodes the smallest node of its component (union-find).

    Args:
        links: (L, 2) int64 nodes.
    """
    root = np.arange(count)
    for k in range(len(links)):
        a = links[k, 0]
        b = links[k, 1]
        while root[a] != a:
            root[a] = root[root[a]]  # path halving
            a = root[a]
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        root[max(a, b)] = min(a, b)
    for i in range(count):  # parents are smaller, so one pass in order is enough
        root[i] = root[root[i]]
    return root


def events(student_pieces_WP, teacher_pieces_VP):
    """Number the connected components of w -- A[w][0] and v -- B[v][0].

    Args:
        student_pieces_WP: A, how the student spells the teacher's tokens, -1 behind the last piece.
        teacher_pieces_VP: B, how the teacher spells the student's tokens.
    Returns:
        (event_V, event_W, count): int64; -1 for a token that is linked to nothing on the other
        side.
    """
    W = len(student_pieces_WP)
    V = len(teacher_pieces_VP)
    w = np.flatnonzero(student_pieces_WP[:, 0] >= 0)
    v = np.flatnonzero(teacher_pieces_VP[:, 0] >= 0)
    # Nodes: the student's tokens 0 .. V - 1, then the teacher's V .. V + W - 1.
    first_of_teacher = student_pieces_WP[w, 0]
    first_of_student = teacher_pieces_VP[v, 0]
    teacher_links = np.stack([first_of_teacher, V + w], 1)
    student_links = np.stack([v, V + first_of_student], 1)
    links = np.concatenate([teacher_links, student_links])
    roots = _components(links.astype(np.int64), V + W)

    linked = np.zeros(V + W, bool)
    linked[links.reshape(-1)] = True
    _, event = np.unique(roots[linked], return_inverse=True)
    numbers = np.full(V + W, -1)
    numbers[linked] = event
    count = int(event.max(initial=-1)) + 1
    return numbers[:V], numbers[V:], count


def prefix_ranges(pieces_NP):
    """Sort spellings so that all rows that share a prefix are neighbors.

    Returns:
        (order_N, low_NP, high_NP): int32; the rows that begin with the same k pieces as row n are
        ``order[low[n, k]:high[n, k]]``, for k < P.
    """
    N, P = pieces_NP.shape
    order = np.lexsort(pieces_NP.T[::-1])
    ordered = pieces_NP[order]
    low = np.zeros((N, P), np.int32)
    high = np.full((N, P), N, np.int32)
    begins = np.zeros(N, bool)  # a row whose first k pieces differ from those of the row before
    for k in range(1, P):
        column = ordered[:, k - 1]
        begins[1:] |= column[1:] != column[:-1]
        group = np.cumsum(begins)
        starts = np.flatnonzero(np.append(True, begins[1:]))
        ends = np.append(starts[1:], N)
        low[order, k] = starts[group]
        high[order, k] = ends[group]
    return order.astype(np.int32), low, high


# --- tables ---------------------------------------------------------------------------------------


def build_spelling(pair, max_pieces=16):
    """Return all tables of `losses.Spelling` (int32 tensors), with the tokenizers' fingerprints.

    Args:
        pair: Pair.
        max_pieces: longest spelling kept, in pieces; of longer ones the beginning.
    """
    student_pieces_WP, teacher_pieces_VP = spellings(pair, max_pieces)
    event_V, event_W, count = events(student_pieces_WP, teacher_pieces_VP)
    arrays = {"event_V": event_V, "event_W": event_W}
    for axis, pieces in (("W", student_pieces_WP), ("V", teacher_pieces_VP)):
        order, low, high = prefix_ranges(pieces)
        arrays[f"pieces_{axis}"] = pieces
        arrays[f"order_{axis}"] = order
        arrays[f"low_{axis}"] = low
        arrays[f"high_{axis}"] = high
    tables = {}
    for key, array in arrays.items():
        array = np.ascontiguousarray(array).astype(np.int32)
        tables[key] = torch.from_numpy(array)
    return tables | {"num_events": count} | tokenizer_metadata(pair)


def spellings(pair, max_pieces):
    """Return (A, B): how the student spells the teacher's tokens, and the teacher the student's."""
    student, teacher = pair.tables
    student_tokenizer, teacher_tokenizer = pair.tokenizers
    if pair.fingerprints[0] == pair.fingerprints[1]:
        # One tokenizer: every token is its own spelling, even one that no text is cut into.
        ids = np.arange(len(student), dtype=np.int32)
        return ids[:, None], ids[:, None]
    student_pieces_WP = spell(teacher, student_tokenizer, student, max_pieces)
    teacher_pieces_VP = spell(student, teacher_tokenizer, teacher, max_pieces)
    for v, w in link_special_tokens(student, teacher):
        student_pieces_WP[w, 0] = v
        teacher_pieces_VP[v, 0] = w
    return student_pieces_WP, teacher_pieces_VP


def cached_spelling(pair, directory=None):
    """Return the tables of `build_spelling`, kept on disk under the digest of the pair."""
    name = f"spelling-{VERSION}-{pair.digest}.pt"
    return cached(name, lambda: build_spelling(pair), directory)


def statistics(tables, pair):
    """Return facts about spelling tables, as {name: number or text}."""
    count = tables["num_events"]
    event_V = tables["event_V"].long()
    event_W = tables["event_W"].long()
    student_tokens = torch.bincount(event_V[event_V >= 0], minlength=count)  # of each event
    teacher_tokens = torch.bincount(event_W[event_W >= 0], minlength=count)
    single = (student_tokens == 1) & (teacher_tokens == 1)
    facts = {
        "events": count,
        "with one token on each side": int(single.sum()),
        "tokens in the largest": int((student_tokens + teacher_tokens).max()) if count else 0,
    }
    for role, event in (("student", event_V), ("teacher", event_W)):
        linked = event[event >= 0]
        num_single = float(single[linked].sum())
        fraction = num_single / max(1, len(event))
        # These tokens are compared one to one; all others only as a sum.
        facts[f"{role} tokens in events with one token on each side"] = f"{fraction:.1%}"

    student, teacher = pair.tables
    facts |= _piece_statistics("student", student, teacher, tables["pieces_V"].numpy())
    facts |= _piece_statistics("teacher", teacher, student, tables["pieces_W"].numpy())
    return facts


def _piece_statistics(role, source, target, pieces):
    """Return facts about the spelling of one vocabulary by the other tokenizer."""
    used = pieces >= 0
    lengths = target.lengths[np.where(used, pieces, 0)]
    total = np.where(used, lengths, 0).sum(1)
    spelled = used[:, 0].sum()
    mean = used.sum() / max(1, spelled)
    facts = {f"pieces per {role} token": f"{mean:.2f}"}
    for reason, number in unencodable_reasons(source, pieces, total).items():
        facts[f"{role}: {reason}"] = number
    return facts


# --- the command line -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Args:
    """Build the spelling tables of a student's and a teacher's tokenizer.

    Args:
        student: hub id or directory with the student's tokenizer.
        teacher: hub id or directory with the teacher's tokenizer.
        output: file to write, .pt or .safetensors; empty: none, only print statistics.
        max_pieces: pieces kept of a spelling, 1 or more.
        trust_remote_code: run the Python code that comes with a model, which can do anything.
    """

    student: str
    teacher: str
    output: str = ""
    max_pieces: int = 16
    trust_remote_code: bool = False

    def __post_init__(self):
        check_types(self)
        if self.max_pieces < 1:
            raise ValueError(f"--max_pieces {self.max_pieces}: expected 1 or more")


def main(args):
    check_output(args.output)
    pair = Pair.load(args.student, args.teacher, args.trust_remote_code)
    tables = build_spelling(pair, args.max_pieces)
    if args.output:
        save_atomically(tables, args.output)
        print(f"{args.output}:")
    for name, value in statistics(tables, pair).items():
        print(f"  {name}: {value}")


def cli(argv=None):
    tool(Args, main, aliases=OLD_NAMES, argv=argv)


if __name__ == "__main__":
    cli()
