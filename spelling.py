"""Spell each vocabulary's tokens by the other tokenizer, from bytes, and the tables made of that.

A spelling is what a tokenizer cuts the bytes of a token into, in mid-text context: no bos, no
added prefix space, no normalization.  `translation_tables` turns the spellings of both directions
into the fields of `nodes.Tables`.

    tables = (TokenTable.from_tokenizer(student), TokenTable.from_tokenizer(teacher))
    fields = build_translation_tables((student, teacher), tables)  # dict of numpy arrays

Shapes: V student vocabulary, W teacher vocabulary, P pieces, N tokens of either vocabulary,
C cells, F longer tokens, J joins.

Needs numpy, the tokenizers library and align.py.  Copy them into your own repository.
License: Apache-2.0 (see LICENSE). Tests: tests/test_spell.py, tests/test_translation.py.
"""

import copy
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from itertools import chain, pairwise

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

try:
    from .align import BYTE_OF_CHARACTER, METASPACE, ROLES, all_bytes, fingerprint
except ImportError:  # copied beside it, not into a package
    from align import BYTE_OF_CHARACTER, METASPACE, ROLES, all_bytes, fingerprint

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
MOST_BITS = 31  # of a number in a file, beside its sign; behind longer paths choices are asked
MOST_TRIED = 8  # tokens behind a path, of those that begin with the rest of a student token
WHITE_SPACE = b" \t\n\r\x0b\x0c"

# Python decodes a byte that is not UTF-8 to one of these (errors="surrogateescape"), 0xDC00 + byte.
SURROGATE_BASE = 0xDC00
SURROGATES = re.compile("[\udc80-\udcff]")
RUNS = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")  # one of them, or the text between


# --- spellings ------------------------------------------------------------------------------------


def mid_text_backend(tokenizer):
    """Return a backend on the same model that continues a text.

    It normalizes nothing, adds no space before the text, and reads control tokens as text.
    """
    original = tokenizer.backend_tokenizer
    backend = Tokenizer(original.model)  # shared; a copy of 128k merges through JSON takes a second
    if original.pre_tokenizer is not None:
        pre_tokenizer = copy.deepcopy(original.pre_tokenizer)  # the tokenizer stays as it is
        _drop_prefix_space(pre_tokenizer)
        backend.pre_tokenizer = pre_tokenizer
    if "ByteLevel(" in repr(original.normalizer):  # which writes bytes, and changes none
        backend.normalizer = normalizers.ByteLevel()
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
        text = raw.decode(errors="surrogateescape").replace(" ", space)
        if not text.isascii() and SURROGATES.search(text):
            not_utf8[i] = text
            text = ""
        texts.append(text)
    # One call for all texts, which the backend spreads over its threads.
    batch = backend.encode_batch_fast(texts, add_special_tokens=False)
    spellings = []
    for encoding in batch:
        # a control token that the table leaves out, see `TokenTable.below`
        is_beyond = max(encoding.ids, default=0) >= len(target)
        spellings.append([] if is_beyond else encoding.ids)
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


def spell_each_other(tokenizers, tables, max_pieces):
    """Return (A, B): how the student spells the teacher's tokens, and the teacher the student's.

    Args:
        tokenizers: the student's and the teacher's fast tokenizer.
        tables: their TokenTables.
    Returns:
        (W, P) and (V, P) int32, -1 behind the last piece.
    """
    student, teacher = tables
    student_tokenizer, teacher_tokenizer = tokenizers
    if fingerprint(student_tokenizer) == fingerprint(teacher_tokenizer):
        # One tokenizer: every token is its own spelling, even one that no text is cut into.
        ids = np.arange(len(student), dtype=np.int32)
        return ids[:, None], ids[:, None]
    student_pieces_WP = spell(teacher, student_tokenizer, student, max_pieces)
    teacher_pieces_VP = spell(student, teacher_tokenizer, teacher, max_pieces)
    for v, w in link_special_tokens(student, teacher):
        student_pieces_WP[w, 0] = v
        teacher_pieces_VP[v, 0] = w
    return student_pieces_WP, teacher_pieces_VP


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


# --- tables of a translation ----------------------------------------------------------------------


def translation_tables(student_pieces_WP, teacher_pieces_VP, student_bytes, teacher_bytes,
                       canonical_V, spell_bytes, *, unwritten_V=None, teacher_spells=None):
    """Return the arrays of `nodes.Tables`.

    Args:
        student_pieces_WP, teacher_pieces_VP: A and B, -1 behind the last piece.
        student_bytes, teacher_bytes: of every token, b"" for control tokens.
        canonical_V: (V,) bool, the student's tokenizer writes these bytes as this token.
        spell_bytes: list of byte strings -> list of the student's ids, [] where it has none.
        unwritten_V: (V,) bool, see `unwritten_tokens`; None: there are none.  They have a cell of
            their own, to which no teacher token gives its mass.
        teacher_spells: as `spell_bytes`, of the teacher; None: any tokens may follow one another.
    """
    W = len(student_pieces_WP)
    V = len(teacher_pieces_VP)
    if unwritten_V is not None:
        teacher_pieces_VP = np.where(unwritten_V[:, None], -1, teacher_pieces_VP)
        # no text has them, so nothing is joined to them
        student_bytes = [b"" if unwritten else raw
                         for raw, unwritten in zip(student_bytes, unwritten_V)]
    head_V = teacher_pieces_VP[:, 0]
    first_W = student_pieces_WP[:, 0]
    heads = np.unique(head_V[head_V >= 0])
    cell_of_head, num_cells = _cells_of_heads(heads, head_V, first_W)
    cell_V = cell_of_head[head_V]  # head -1 reads the last entry
    cell_of_first = np.where(first_W >= 0, cell_V[first_W], num_cells)
    is_head = cell_of_head[:W] < num_cells
    cell_W = np.where(is_head, cell_of_head[:W], cell_of_first)
    if unwritten_V is not None and unwritten_V.any():
        for cells in (cell_V, cell_W):  # no cell has the next number
            cells[cells == num_cells] = num_cells + 1
        cell_V[unwritten_V] = num_cells
        num_cells += 1

    closed_V = _closed_tokens(teacher_pieces_VP, student_bytes, teacher_bytes, spell_bytes,
                              teacher_spells)
    arrays = {"cell_V": cell_V, "cell_W": cell_W, "closed_V": closed_V}
    for axis, pieces in (("W", student_pieces_WP), ("V", teacher_pieces_VP)):
        order, low, high = prefix_ranges(pieces)
        arrays[f"pieces_{axis}"] = pieces
        arrays[f"order_{axis}"] = order
        arrays[f"low_{axis}"] = low
        arrays[f"high_{axis}"] = high
    rank_V = np.empty(V, np.int64)
    rank_V[arrays["order_V"]] = np.arange(V)
    arrays["rank_V"] = rank_V

    longer = np.flatnonzero(~is_head & (first_W >= 0) & (cell_W < num_cells))
    rank = rank_V[first_W[longer]]
    order = np.argsort(rank, kind="stable")
    arrays["longer_F"] = longer[order]
    arrays["longer_rank_F"] = rank[order]
    arrays |= _joins(student_bytes, canonical_V, spell_bytes, student_pieces_WP,
                     arrays["low_W"], arrays["high_W"])
    tables = {key: np.ascontiguousarray(array).astype(np.int64) for key, array in arrays.items()}
    return tables | {"num_cells": num_cells}


def _cells_of_heads(heads, head_V, first_W):
    """Return ((W + 1,) the cell of each head, C elsewhere; C, the number of cells).

    The student tokens whose B begins with one teacher token are in one cell.  Where the student
    begins that token, standing alone, with a token of another cell, the two are one: what follows
    decides which of them it writes.
    """
    W = len(first_W)
    parent = {}

    def root_of(w):
        while w in parent:
            w = parent[w]
        return w

    begins = heads[first_W[heads] >= 0]
    others = head_V[first_W[begins]]
    differs = (others >= 0) & (others != begins)
    for w, other in zip(begins[differs].tolist(), others[differs].tolist()):
        w, other = root_of(w), root_of(other)
        if w != other:
            parent[max(w, other)] = min(w, other)
    root = np.arange(W)
    for w in parent:
        root[w] = root_of(w)
    roots, cell = np.unique(root[heads], return_inverse=True)
    cell_of_head = np.full(W + 1, len(roots))
    cell_of_head[heads] = cell
    return cell_of_head, len(roots)


def _closed_tokens(teacher_pieces_VP, student_bytes, teacher_bytes, spell_bytes, teacher_spells):
    """Return (V,) int64, of which bit k - 1 says: behind k tokens of B[v] no teacher token crosses.

    One that does goes on beyond the end of a student token that it has begun in, so that what the
    teacher gives it says nothing of the student's next token.  Tried are some tokens that begin
    with what is left of a student token.
    """
    paths = [tuple(w for w in path if w >= 0) for path in teacher_pieces_VP.tolist()]
    scopes = defaultdict(list)  # {path: student tokens that begin so}
    for v, path in enumerate(paths):
        for k in range(1, len(path) + 1):
            scopes[path[:k]].append(v)
    in_order = sorted((raw, w) for w, raw in enumerate(teacher_bytes) if raw)
    tried = []  # (path, its bytes, those of a token that may follow, the token)
    for path, tokens in scopes.items():
        if len(tokens) == 1:
            continue  # nothing is asked of one token
        begun = b"".join(map(teacher_bytes.__getitem__, path))
        nexts = {paths[v][len(path)] for v in tokens if len(paths[v]) > len(path)}
        left = {student_bytes[v][len(begun):] for v in tokens} - {b""}
        for rest in sorted(left):
            tried += [(path, begun, begun + raw, w) for raw, w in _longer_ones(rest, in_order)
                      if w not in nexts]
    if teacher_spells is not None:
        written = teacher_spells([raw for _, _, raw, _ in tried])
        tried = [one for one, ids in zip(tried, written) if tuple(ids) == (*one[0], one[3])]
    crossed = set()
    spelled = spell_bytes([raw for _, _, raw, _ in tried])
    for (path, begun, *_), ids in zip(tried, spelled):
        if ids and len(student_bytes[ids[0]]) > len(begun):
            crossed.add(path)
    closed_V = np.full(len(paths), -1)
    for v, path in enumerate(paths):
        for k in range(1, min(len(path), MOST_BITS) + 1):
            if path[:k] in crossed:
                closed_V[v] -= 1 << k - 1
    return closed_V


def _longer_ones(prefix, in_order):
    """Return some of the sorted (bytes, token) that begin with `prefix` and are longer."""
    low = bisect_right(in_order, (prefix, len(in_order)))
    if low == len(in_order) or not in_order[low][0].startswith(prefix):
        return []
    high = bisect_left(in_order, (prefix + b"\xff" * 256,))
    return in_order[low : high : math.ceil((high - low) / MOST_TRIED)]


def unwritten_tokens(table, tokenizer, student_pieces_WP, canonical_V):
    """Return (V,) bool: tokens of text that the tokenizer writes in another way everywhere.

    As <0x2E> beside "." in vocabularies with byte fallback, or numbers of four digits where the
    tokenizer cuts after three.  A teacher's belief about these bytes is one about the other tokens.
    Bytes that are no UTF-8 are left out, as what surrounds them decides how they are cut; so are
    tokenizers that mark the tokens inside of words, and every token in A.

    Args:
        table: the student's TokenTable; tokenizer: its fast tokenizer.
        student_pieces_WP: A.
        canonical_V: see `translation_tables`.
    """
    model = tokenizer.backend_tokenizer.model
    if getattr(model, "continuing_subword_prefix", None) or getattr(
            model, "end_of_word_suffix", None):
        return np.zeros(len(table), bool)
    unwritten_V = ~canonical_V & ~table.special
    unwritten_V[student_pieces_WP[student_pieces_WP >= 0]] = False
    raw_bytes = all_bytes(table)
    for v in np.flatnonzero(unwritten_V).tolist():
        unwritten_V[v] = bool(raw_bytes[v]) and is_utf8(raw_bytes[v])
    return unwritten_V


def unwritten_twins(table, tokenizer):
    """Return (V,) bool: tokens of text whose bytes the tokenizer writes as another token.

    Such as '<0x41>', which SentencePiece falls back to, beside 'A'.
    """
    raw = _bytes_of_text(table)
    counts = Counter(raw)
    twins = [v for v, spelled in enumerate(raw) if spelled and counts[spelled] > 1]
    unwritten_V = np.zeros(len(table), bool)
    for v, ids in zip(twins, _speller(tokenizer, table)([raw[v] for v in twins])):
        unwritten_V[v] = len(ids) == 1 and ids[0] != v
    return unwritten_V


def is_utf8(raw):
    """Tell whether bytes are UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _joins(student_bytes, canonical_V, spell_bytes, pieces_WP, low_WP, high_WP):
    """List for each student token v0 the teacher tokens that its tokenizer would join to it.

    Those are the tokens of which the student's spelling begins with that of y, where v0 + y is a
    student token that its tokenizer writes.  Tokens of white space alone are left out: how they are
    cut depends on what follows.
    """
    id_of_bytes = {raw: v for v, raw in enumerate(student_bytes) if raw}
    candidates = []  # (v0, y)
    for v in np.flatnonzero(canonical_V).tolist():
        raw = student_bytes[v]
        if not raw.strip(WHITE_SPACE):
            continue
        for cut in range(1, len(raw)):
            v0 = id_of_bytes.get(raw[:cut])
            if v0 is not None:
                candidates.append((v0, raw[cut:]))
    suffixes = sorted({y for _, y in candidates})
    spelling = dict(zip(suffixes, spell_bytes(suffixes)))
    range_of = _ranges_of_prefixes(pieces_WP, low_WP, high_WP)
    joins = set()
    for v0, y in candidates:
        bounds = range_of.get(tuple(spelling[y]))
        if bounds:
            joins.add((v0, *bounds))
    joins = np.array(_outermost(joins), np.int64).reshape(-1, 3)
    start = np.searchsorted(joins[:, 0], np.arange(len(student_bytes) + 1))
    sizes = joins[:, 2] - joins[:, 1]
    joined = np.bincount(joins[:, 0], weights=sizes, minlength=len(student_bytes))
    return {"join_start_V": start, "join_low_J": joins[:, 1], "join_high_J": joins[:, 2],
            "joined_V": joined}


def _outermost(ranges):
    """Return sorted (owner, low, high) without those that lie in another one of their owner.

    Ranges of prefixes are disjoint or lie in one another, so that no place is in two of the rest.
    """
    kept = []
    for owner, low, high in sorted(ranges, key=lambda item: (item[0], item[1], -item[2])):
        if kept and kept[-1][0] == owner and high <= kept[-1][2]:
            continue
        kept.append((owner, low, high))
    return kept


def _ranges_of_prefixes(pieces_WP, low_WP, high_WP):
    """Return {pieces that spellings begin with: (low, high) in their sorted order}."""
    W, P = pieces_WP.shape
    sizes = (pieces_WP >= 0).sum(1)
    rank = np.empty(W, np.int64)
    rank[np.lexsort(pieces_WP.T[::-1])] = np.arange(W)
    ranges = {}
    rows = pieces_WP.tolist()
    for w in range(W):
        for k in range(1, sizes[w] + 1):
            key = tuple(rows[w][:k])
            if key in ranges:
                continue
            if k < P:
                ranges[key] = (int(low_WP[w, k]), int(high_WP[w, k]))
            else:
                ranges[key] = (int(rank[w]), int(rank[w]) + 1)
    return ranges


def _bytes_of_text(table):
    """Return the bytes of every token, b"" for control tokens."""
    return [b"" if special else raw for raw, special in zip(all_bytes(table), table.special)]


def _speller(tokenizer, table):
    """Return a function: list of byte strings -> list of ids in mid-text, [] where it has none."""
    backend = mid_text_backend(tokenizer)

    def spell_bytes(texts):
        ids = encode_bytes(texts, backend, table)
        sizes = np.array(list(map(len, ids)), np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.int64)
        same = same_bytes(flat, sizes, table, texts)
        return [spelled if good else [] for spelled, good in zip(ids, same)]

    return spell_bytes


def build_translation_tables(tokenizers, tables, max_pieces=16):
    """Return the fields of `nodes.Tables` for two tokenizers, as `translation_tables` does.

    Args:
        tokenizers: the student's and the teacher's fast tokenizer.
        tables: their TokenTables.
        max_pieces: longest spelling kept, in pieces; of longer ones the beginning.
    """
    student_pieces_WP, teacher_pieces_VP = spell_each_other(tokenizers, tables, max_pieces)
    student = tables[0]
    student_bytes, teacher_bytes = map(_bytes_of_text, tables)
    spell_bytes, teacher_spells = map(_speller, tokenizers, tables)
    canonical_V = np.zeros(len(student), bool)
    for v, spelled in enumerate(spell_bytes(student_bytes)):
        canonical_V[v] = spelled == [v]
    unwritten_V = unwritten_tokens(student, tokenizers[0], student_pieces_WP, canonical_V)
    return translation_tables(student_pieces_WP, teacher_pieces_VP, student_bytes, teacher_bytes,
                              canonical_V, spell_bytes, unwritten_V=unwritten_V,
                              teacher_spells=teacher_spells)
