"""Two tokenizations of one text -> aligned chunks, by bytes, in linear time.

A chunk is a minimal span of the text that begins and ends on a token boundary of both tokenizers:
``['201'] <-> ['2', '0', '1']``.  Boundaries come from the bytes of each token, never from decoded strings, so
they are exact inside a UTF-8 character and hold for ids that a model sampled.  A tokenizer that alters a
text (composes characters, collapses spaces, lower-cases) is found out by comparing bytes, and is then placed
by its own offsets.  A chunk is used only if the tokens of both sides spell the same bytes; what is left
out is counted.

    table = TokenTable.from_tokenizer(tokenizer)                          # once per tokenizer
    found = align(student_ids, teacher_ids, student_table, teacher_table)  # found.student_chunk, ...

Or, to look at it:  python align.py --student A --teacher B --text "in 2010"

Shapes: S student tokens, T teacher tokens, C chunks, V entries of a vocabulary, N bytes of text.
Needs numpy and numba only; tokenizers are duck-typed (Hugging Face fast ones, `tokenizers.Tokenizer`,
tiktoken).  Copy this file into your own repository.  Tests: tests/test_align.py.
"""

import codecs
import re
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numba import njit

# --- what every id stands for ---------------------------------------------------------------------


def _gpt2_characters():
    """The 256 printable characters with which byte-level BPE writes bytes in its vocabulary file."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]  # numbered from U+0100 on, in order
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _gpt2_characters()
TO_LATIN1 = {i: "\ufffd" for i in range(256)} | {ord(c): chr(b) for c, b in BYTE_OF_CHARACTER.items()}
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")  # SentencePiece byte fallback
METASPACE = "\u2581"
# control tokens that stand in the text of a message, where another tokenizer spells them letter by letter
TEXT_MARKER = re.compile(r"</?(think|reason|tool|function)\w*>\Z")
END_OF_TURN = "<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>"


@dataclass
class TokenTable:
    """What every id of one tokenizer stands for, as bytes.

    Attributes:
        data: (sum of lengths,) uint8, the bytes of all tokens, one after the other.
        starts: (V + 1,) int64; token i is ``data[starts[i]:starts[i + 1]]``; V is the largest id + 1.
        special: (V,) bool, control tokens (bos, eos, pad, unk, chat markers): they stand for no text.
            Markers of thinking and of tool calls are text.
        tokens: V strings as the vocabulary writes them, "" for ids that are not in use.
        family: "byte_level", "sentencepiece", "wordpiece" or "plain".
        bos, eos, pad, unk, end_of_turn: id of the token in that role, -1 for none.
        lengths: (V,) int64, bytes of each token, -1 for control tokens.
    """

    data: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    special: np.ndarray = field(repr=False)
    tokens: list = field(repr=False)
    family: str
    bos: int = -1
    eos: int = -1
    pad: int = -1
    unk: int = -1
    end_of_turn: int = -1
    lengths: np.ndarray = field(init=False, repr=False)

    def __post_init__(self):
        self.lengths = np.where(self.special, -1, np.diff(self.starts))

    def __len__(self):
        return len(self.starts) - 1

    def bytes_of(self, token_id):
        """The bytes of one token; a control token gives its literal name."""
        return self.data[self.starts[token_id] : self.starts[token_id + 1]].tobytes()

    def decode(self, ids):
        """The bytes that a sequence of ids spells; control tokens spell nothing."""
        return _spelled(np.asarray(ids, np.int64), self.data, self.starts, self.lengths).tobytes()

    @classmethod
    def from_tokenizer(cls, tokenizer):
        """Build the table from a fast tokenizer.

        Args:
            tokenizer: a Hugging Face fast tokenizer or `tokenizers.Tokenizer` of any model (BPE, Unigram,
                WordPiece, characters), or a tiktoken Encoding.
        Raises:
            ValueError: it is neither, so the bytes of its tokens are not known.
        """
        if hasattr(tokenizer, "decode_single_token_bytes"):
            return cls._from_tiktoken(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "get_added_tokens_decoder"):
            kind = type(tokenizer).__name__
            raise ValueError(f"{kind} is not a fast tokenizer: a tokenizer.json is needed")
        family, spell = _family(backend)
        vocab = backend.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            tokens[i] = token
        added_tokens, special = backend.get_added_tokens_decoder(), np.zeros(len(tokens), bool)
        pieces = spell(["" if i in added_tokens else token for i, token in enumerate(tokens)])
        for i, added in added_tokens.items():
            # an added token stands in the vocabulary as plain text, whatever the family
            pieces[i] = added.content.encode()
            special[i] = added.special and not TEXT_MARKER.match(added.content)
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk")}
        if roles["unk"] is None:
            roles["unk"] = vocab.get(getattr(backend.model, "unk_token", None))
        return cls._of(pieces, special, tokens, family, roles, vocab)

    @classmethod
    def _from_tiktoken(cls, encoding):
        names = {encoding.encode_single_token(name): name for name in encoding.special_tokens_set}
        pieces, special = [], np.zeros(encoding.n_vocab, bool)
        for i in range(encoding.n_vocab):
            try:
                pieces.append(encoding.decode_single_token_bytes(i))
            except KeyError:  # tiktoken leaves holes
                pieces.append(b"")
            special[i] = i in names and not TEXT_MARKER.match(names[i])
        tokens = [names.get(i) or piece.decode("latin-1") for i, piece in enumerate(pieces)]
        vocab = {name: i for i, name in names.items()}
        return cls._of(pieces, special, tokens, "byte_level", {"eos": encoding.eot_token}, vocab)

    @classmethod
    def _of(cls, pieces, special, tokens, family, roles, vocab):
        roles = {role: -1 if i is None else int(i) for role, i in roles.items()}
        ends = [vocab[name] for name in END_OF_TURN if name in vocab]
        roles["end_of_turn"] = ends[0] if ends else roles.get("eos", -1)
        special[[i for i in roles.values() if i >= 0]] = True
        starts = np.concatenate([[0], np.cumsum([len(p) for p in pieces])]).astype(np.int64)
        return cls(np.frombuffer(b"".join(pieces), np.uint8), starts, special, tokens, family, **roles)


def _family(backend):
    """(name, tokens -> their bytes): how a tokenizer writes bytes in its vocabulary, read off its parts."""
    parts = repr([backend.decoder, backend.pre_tokenizer, backend.normalizer])
    suffix = getattr(backend.model, "end_of_word_suffix", None) or ""
    if "ByteLevel(" in parts:
        return "byte_level", lambda tokens: _byte_level_bytes([t.removesuffix(suffix) for t in tokens])
    if METASPACE in parts or "Metaspace(" in parts:
        return "sentencepiece", lambda tokens: [_sentencepiece_bytes(t) for t in tokens]
    if type(backend.model).__name__ == "WordPiece":
        inside = backend.model.continuing_subword_prefix

        def wordpiece(token):  # a space goes before every word, as its decoder has it
            return token.removeprefix(inside).encode() if token.startswith(inside) else f" {token}".encode()

        return "wordpiece", lambda tokens: list(map(wordpiece, tokens))
    return "plain", lambda tokens: [t.removesuffix(suffix).encode() for t in tokens]


def _byte_level_bytes(tokens):
    """A character of such a token is a byte, so all are translated at once."""
    try:
        raw = "".join(tokens).translate(TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:  # plain text found its way into the vocabulary
        return [_byte_level_bytes([t])[0] for t in tokens] if len(tokens) > 1 else [tokens[0].encode()]
    return [raw[end - len(t) : end] for t, end in zip(tokens, accumulate(map(len, tokens)))]


def _sentencepiece_bytes(token):
    byte = BYTE_TOKEN.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode()


# --- where in the text each token stands ----------------------------------------------------------

EXACT, SPACE, NORMALIZED, UNENCODABLE = 0, 1, 2, 3


class Located(NamedTuple):
    """Where in a text the tokens of one side stand.

    Attributes:
        begin, end: (S,) int64 bytes of the text, in reading order; -1 for a control token that stands for
            no text.  Bytes between two tokens are such that no token stands for.
        kind: (S,) int8: EXACT; SPACE: spells one space before its part of the text that the text does not
            have, as SentencePiece does at the beginning; NORMALIZED: spells something else; UNENCODABLE: its bytes
            are not known (unk).
    """

    begin: np.ndarray
    end: np.ndarray
    kind: np.ndarray


def locate(ids, table, text, offsets=None):
    """Place tokens in the text that they were made from, or that was made from them.

    Tried in this order: the tokens spell the text byte for byte; the text is what they decode to, with
    U+FFFD for bytes that are not UTF-8 (sampled ids); the tokenizer's own offsets, corrected by the bytes.

    Args:
        ids: (S,) int64.
        table: their TokenTable.
        text: str.
        offsets: (S, 2) characters of the text, as tokenizers give them; None: not at hand.
    Returns:
        Located, or None if the tokens do not spell the text and there are no offsets.
    """
    raw = np.frombuffer(text.encode(errors="replace"), np.uint8)
    same, *found = _by_bytes(ids, table.data, table.starts, table.lengths, raw)
    if same:
        return Located(*found)
    if offsets is not None:
        at = character_starts(text)[np.asarray(offsets, np.int64).reshape(-1, 2)]
        return Located(*_by_offsets(ids, at[:, 0].copy(), at[:, 1].copy(), table.special, table.data,
                                    table.starts, raw))
    return _as_decoded(ids, table, text)


def character_starts(text):
    """(characters + 1,) int64: byte of UTF-8 at which each character begins, and the end."""
    code = np.frombuffer(text.encode("utf-32-le", errors="replace"), np.uint32)
    return np.concatenate([[0], np.cumsum(1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000))])


def _as_decoded(ids, table, text):
    """Located, if the text is what the tokens decode to; else None."""
    raw, invalid = table.decode(ids), []

    def note(error):
        invalid.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("align.note", note)
    decoded = raw.decode(errors="align.note")
    lead = len(decoded) - len(text)
    if lead not in (0, 1) or decoded != " " * lead + text:
        return None
    place = np.ones(len(raw) + 1, np.int64)  # place[i]: byte of the text that byte i of `raw` became
    place[0] = -lead
    broken = np.zeros(len(raw) + 1, np.int64)  # is byte i of `raw` part of a U+FFFD?
    for start, end in invalid:
        place[start + 1 : end + 1] = 0
        place[end] = 3  # U+FFFD has three bytes
        broken[start:end] = 1
    place, broken = np.cumsum(place), np.concatenate([[0], np.cumsum(broken)])
    lengths = table.lengths[ids]
    ends = np.cumsum(np.maximum(lengths, 0))
    begins = ends - np.maximum(lengths, 0)
    kind = np.where(broken[ends] > broken[begins], NORMALIZED, EXACT).astype(np.int8)
    if lead:
        kind[np.argmax(ends > 0)] = SPACE
    begin, end = np.maximum(place[begins], 0), np.maximum(place[ends], 0)
    return Located(np.where(lengths < 0, -1, begin), np.where(lengths < 0, -1, end), kind)


@njit(cache=True)
def _spelled(ids, data, starts, lengths):
    """The bytes that ids spell; control tokens spell nothing."""
    total = 0
    for i in ids:
        total += max(lengths[i], 0)
    out = np.empty(total, np.uint8)
    at = 0
    for i in ids:
        for b in range(max(lengths[i], 0)):
            out[at] = data[starts[i] + b]
            at += 1
    return out


@njit(cache=True)
def _places(ids, lengths):
    """(begin, end, kind) in the text that the ids themselves spell."""
    n, at = len(ids), 0
    begin, end, kind = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int8)
    for k in range(n):
        size = lengths[ids[k]]
        if size >= 0:
            begin[k], end[k] = at, at + size
            at += size
    return begin, end, kind


@njit(cache=True)
def _by_bytes(ids, data, starts, lengths, text):
    """(do the ids spell the text, with or without a space in front?, begin, end, kind)."""
    n = len(ids)
    begin, end, kind = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int8)
    total = 0
    for i in ids:
        total += max(lengths[i], 0)
    lead = total - len(text)
    if lead != 0 and lead != 1:
        return False, begin, end, kind
    at = 0
    for k in range(n):
        size = lengths[ids[k]]
        if size < 0:
            continue
        first = starts[ids[k]]
        begin[k] = at
        if lead == 1 and size > 0:
            if data[first] != 32:
                return False, begin, end, kind
            kind[k], lead, first, size = SPACE, 0, first + 1, size - 1
        for b in range(size):
            if data[first + b] != text[at + b]:
                return False, begin, end, kind
        at += size
        end[k] = at
    return True, begin, end, kind


@njit(cache=True)
def _spells(ids, special, i, j, data, starts, text, low, high, skip):
    """Do the tokens i..j-1, without their first `skip` bytes, spell text[low:high]?"""
    at = low - skip
    for k in range(i, j):
        if special[ids[k]]:
            return False
        for b in range(starts[ids[k]], starts[ids[k] + 1]):
            if at < low:
                if data[b] != 32:
                    return False
            elif at >= high or data[b] != text[at]:
                return False
            at += 1
    return at == high


@njit(cache=True)
def _by_offsets(ids, lows, highs, special, data, starts, text):
    """(begin, end, kind) from the tokenizer's offsets; tokens that share a character are one group.

    Where the bytes of a group are those of the text, its inner boundaries are exact too.  Offsets that leave
    out the spaces before a word are widened if that makes the bytes right.
    """
    n = len(ids)
    begin, end, kind = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int8)
    at, i = 0, 0  # bytes of the text that are accounted for; first token of the group
    while i < n:
        low, high, j = max(lows[i], at), max(highs[i], at), i + 1
        if special[ids[i]] and lows[i] >= highs[i]:
            i += 1
            continue
        while j < n and lows[j] < high and highs[j] > lows[j]:
            high, j = max(high, highs[j]), j + 1
        skip, good = 0, True
        if low > at and _spells(ids, special, i, j, data, starts, text, at, high, 0):
            low = at
        elif _spells(ids, special, i, j, data, starts, text, low, high, 0):
            pass
        elif _spells(ids, special, i, j, data, starts, text, low, high, 1):
            skip = 1
        else:
            good = False
        place = low
        for k in range(i, j):
            begin[k] = place
            if good:
                size = starts[ids[k] + 1] - starts[ids[k]]
                if skip == 1 and size > 0:
                    kind[k], skip, size = SPACE, 0, size - 1
                place += size
            else:  # the group is one unit: its last token stands for all of it
                kind[k] = UNENCODABLE if special[ids[k]] else NORMALIZED
                if k == j - 1:
                    place = high
            end[k] = place
        at, i = max(at, high), j
    return begin, end, kind


# --- alignment ------------------------------------------------------------------------------------


class Alignment(NamedTuple):
    """Chunks of one text, numbered from 0 in reading order; only those that are used.

    Attributes:
        student_chunk: (S,) int64, chunk of each student token, -1 where it has none.
        teacher_chunk: (T,) int64, likewise.
        chunk_start: (C,) int64, byte of the text at which each chunk begins.
        chunk_bytes: (C,) int64, its bytes of the text; 0 for a pair of end tokens.
        student_tokens, teacher_tokens: (C,) int64, tokens in each chunk.
        exact: (C,) bool, one token on either side, and they spell the same.
        same_bytes: (C,) bool, False where one side writes a space that the text does not have, so that the
            tokens stand for the same text but a model's probabilities speak of another spelling.
        text_bytes: bytes of the text.
        dropped: {reason: bytes of the text left out}: "normalized", a side spells something else; "unencodable",
            no token of a side stands for them; "unmatched", the sides are no tokenizations of one text.
    """

    student_chunk: np.ndarray
    teacher_chunk: np.ndarray
    chunk_start: np.ndarray
    chunk_bytes: np.ndarray
    student_tokens: np.ndarray
    teacher_tokens: np.ndarray
    exact: np.ndarray
    same_bytes: np.ndarray
    text_bytes: int
    dropped: dict


def align(student_ids, teacher_ids, student_table, teacher_table, text=None, student_offsets=None,
          teacher_offsets=None):
    """Align two tokenizations of one text.

    Control tokens are left out, except that two end-of-text tokens at the very end pair up.

    Args:
        student_ids, teacher_ids: (S,) and (T,) ints, special tokens included, no padding.
        student_table, teacher_table: the `TokenTable` of each side.
        text: str that both were made from, or that one was decoded to; None: what they spell.
        student_offsets, teacher_offsets: (S, 2) and (T, 2) characters of the text, as a tokenizer gives
            them with return_offsets_mapping; needed for a side that alters the text.
    Returns:
        Alignment; without any chunk, and all bytes dropped as "unmatched", where a side does not fit the
        text and has no offsets.
    """
    student_ids = checked_ids(student_ids, student_table)
    teacher_ids = checked_ids(teacher_ids, teacher_table)
    if text is None:
        text, found = _common_spelling(student_ids, teacher_ids, student_table, teacher_table)
    else:
        found = [locate(student_ids, student_table, text, student_offsets),
                 locate(teacher_ids, teacher_table, text, teacher_offsets)]
        text = text.encode(errors="replace")
    if None in found:
        return _different(len(student_ids), len(teacher_ids), len(text))
    return align_located(student_ids, teacher_ids, *found, student_table, teacher_table, len(text))


def checked_ids(ids, table):
    """(S,) int64; a ValueError where an id is none of the tokenizer's."""
    ids = np.asarray(ids, np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < len(table):
        raise ValueError(f"ids from {ids.min()} to {ids.max()}, but the tokenizer has 0 to {len(table) - 1}")
    return ids


def _common_spelling(student_ids, teacher_ids, student_table, teacher_table):
    """(bytes that both sides spell, [Located, Located]), without a space that one side alone has in front."""
    sides = (student_ids, student_table), (teacher_ids, teacher_table)
    spelled = [_spelled(ids, table.data, table.starts, table.lengths) for ids, table in sides]
    if np.array_equal(*spelled):
        return spelled[0], [Located(*_places(ids, table.lengths)) for ids, table in sides]
    text = min(spelled, key=len)
    found = [_by_bytes(ids, table.data, table.starts, table.lengths, text) for ids, table in sides]
    if not all(same for same, *_ in found):
        text = max(spelled, key=len)
    return text, [Located(*place) if same else None for same, *place in found]


def _different(S, T, size):
    nothing = np.zeros(0, np.int64)
    return Alignment(np.full(S, -1), np.full(T, -1), *[nothing] * 4, *[nothing.astype(bool)] * 2, size,
                     {"normalized": 0, "unencodable": 0, "unmatched": size})


def align_located(student_ids, teacher_ids, student, teacher, student_table, teacher_table, size, ends=True):
    """`align` for tokens whose places in a text of `size` bytes are known.

    Args:
        student, teacher: Located.
        ends: pair two end-of-text tokens at the very end.
    """
    *found, altered, unspelled = _merge(
        student_ids, *student, student_table.data, student_table.starts,
        teacher_ids, *teacher, teacher_table.data, teacher_table.starts, size)
    result = Alignment(*found, size, {"normalized": altered, "unencodable": unspelled, "unmatched": 0})
    for ids, table in ((student_ids, student_table), (teacher_ids, teacher_table)):
        ends = ends and len(ids) > 0 and table.eos >= 0 and ids[-1] == table.eos
    return _with_pair(result, len(student_ids) - 1, len(teacher_ids) - 1) if ends else result


def _with_pair(a, s, t):
    """The alignment with one more chunk, of no bytes, at its end: student token s and teacher token t."""
    a.student_chunk[s] = a.teacher_chunk[t] = len(a.chunk_start)
    more = a.text_bytes, 0, 1, 1, True, True
    return a._replace(**{name: np.append(getattr(a, name), value)
                         for name, value in zip(Alignment._fields[2:8], more)})


@njit(cache=True)
def _compare(a_ids, a_begin, a, a_stop, a_data, a_starts, b_ids, b_begin, b, b_stop, b_data, b_starts):
    """Bytes of two runs of tokens: 0 equal, 1 / -1 equal after one space more in a / b, 2 different."""
    a_total, b_total = 0, 0
    for k in range(a, a_stop):
        if a_begin[k] >= 0:
            a_total += a_starts[a_ids[k] + 1] - a_starts[a_ids[k]]
    for k in range(b, b_stop):
        if b_begin[k] >= 0:
            b_total += b_starts[b_ids[k] + 1] - b_starts[b_ids[k]]
    lead = a_total - b_total
    if lead < -1 or lead > 1:
        return 2
    i, i_stop, j, j_stop, skip = 0, 0, 0, 0, lead
    while True:
        while i == i_stop and a < a_stop:  # next token of a
            if a_begin[a] >= 0:
                i, i_stop = a_starts[a_ids[a]], a_starts[a_ids[a] + 1]
            a += 1
        while j == j_stop and b < b_stop:
            if b_begin[b] >= 0:
                j, j_stop = b_starts[b_ids[b]], b_starts[b_ids[b] + 1]
            b += 1
        if skip == 1:
            if a_data[i] != 32:
                return 2
            i, skip = i + 1, 0
        elif skip == -1:
            if b_data[j] != 32:
                return 2
            j, skip = j + 1, 0
        elif i == i_stop or j == j_stop:
            return lead
        else:
            if a_data[i] != b_data[j]:
                return 2
            i, j = i + 1, j + 1


@njit(cache=True)
def _merge(s_ids, s_begin, s_end, s_kind, s_data, s_starts,
           t_ids, t_begin, t_end, t_kind, t_data, t_starts, size):
    """Cut a text at the common boundaries of two sequences of tokens, in one pass; see `Alignment`.

    A token of no bytes belongs to the chunk that follows it; tokens around a control token to none, because
    those of a chunk are neighbors.
    """
    S, T = len(s_ids), len(t_ids)
    s_chunk, t_chunk = np.full(S, -1), np.full(T, -1)
    spans = np.empty((4, min(S, T)), np.int64)  # start, bytes, student tokens, teacher tokens
    exact, same = np.empty(min(S, T), np.bool_), np.empty(min(S, T), np.bool_)
    altered, unspelled, count = 0, 0, 0
    i, j, s_at, t_at = 0, 0, 0, 0  # next token and first byte not accounted for, on either side
    s_first, t_first, start, s_num, t_num = 0, 0, 0, 0, 0  # of the open chunk
    gap, odd = False, False  # is a byte without token in it? a token that may spell something else?
    while True:
        while i < S and s_begin[i] < 0:
            i += 1
        while j < T and t_begin[j] < 0:
            j += 1
        if s_at <= t_at:  # the next piece of the side that is behind: a gap or a token
            place = s_begin[i] if i < S else size
            if place > s_at:
                s_at, gap = place, True
            elif i == S:
                break
            else:
                gap |= s_kind[i] == UNENCODABLE or (s_num > 0 and s_begin[i - 1] < 0)
                odd |= s_kind[i] != EXACT
                s_at, i, s_num = s_end[i], i + 1, s_num + 1
        else:
            place = t_begin[j] if j < T else size
            if place > t_at:
                t_at, gap = place, True
            elif j == T:
                break
            else:
                gap |= t_kind[j] == UNENCODABLE or (t_num > 0 and t_begin[j - 1] < 0)
                odd |= t_kind[j] != EXACT
                t_at, j, t_num = t_end[j], j + 1, t_num + 1
        if s_at != t_at or (s_at == start and (s_num == 0 or t_num == 0)):
            continue
        verdict = 2 if gap else 0
        if odd and not gap:
            while s_first < i and s_begin[s_first] < 0:
                s_first += 1
            while t_first < j and t_begin[t_first] < 0:
                t_first += 1
            verdict = _compare(s_ids, s_begin, s_first, i, s_data, s_starts,
                               t_ids, t_begin, t_first, j, t_data, t_starts)
            if (verdict == 1 and s_kind[s_first] != SPACE) or (verdict == -1 and t_kind[t_first] != SPACE):
                verdict = 2
        if verdict != 2:
            for k in range(s_first, i):
                s_chunk[k] = count if s_begin[k] >= 0 else -1
            for k in range(t_first, j):
                t_chunk[k] = count if t_begin[k] >= 0 else -1
            spans[0, count], spans[1, count] = start, s_at - start
            spans[2, count], spans[3, count] = s_num, t_num
            same[count] = verdict == 0
            exact[count] = verdict == 0 and s_num == 1 and t_num == 1
            count += 1
        elif gap:
            unspelled += s_at - start
        else:
            altered += s_at - start
        s_first, t_first, start, s_num, t_num, gap, odd = i, j, s_at, 0, 0, False, False
    return (s_chunk, t_chunk, spans[0, :count].copy(), spans[1, :count].copy(), spans[2, :count].copy(),
            spans[3, :count].copy(), exact[:count].copy(), same[:count].copy(), altered, unspelled)


# --- documents, regions, batches, truncation ------------------------------------------------------


def join(parts, S, T):
    """One Alignment of rows that hold several texts.

    Args:
        parts: (first student token, first teacher token, Alignment) of each text, in reading order.
        S, T: tokens of the whole rows; those of no part get no chunk.
    """
    student_chunk, teacher_chunk, count, size = np.full(S, -1), np.full(T, -1), 0, 0
    columns, dropped = [], {"normalized": 0, "unencodable": 0, "unmatched": 0}
    for s, t, part in parts:
        for whole, first, chunk in zip((student_chunk, teacher_chunk), (s, t), part):
            place = whole[first : first + len(chunk)]
            place[chunk >= 0] = chunk[chunk >= 0] + count
        columns.append((part.chunk_start + size, *part[3:8]))
        dropped = {reason: n + part.dropped[reason] for reason, n in dropped.items()}
        count, size = count + len(part.chunk_start), size + part.text_bytes
    columns = [np.concatenate(column) for column in zip(*columns)] or _different(0, 0, 0)[2:8]
    return Alignment(student_chunk, teacher_chunk, *columns, size, dropped)


def align_regions(student_ids, teacher_ids, student, teacher, regions, student_table, teacher_table):
    """Align the parts that two different texts have in common, such as the messages of two chat templates.

    A token that reaches over the border of a region spells more than the region and is left out, unless
    the other side does the same.

    Args:
        student, teacher: Located, each in its own text.
        regions: (first byte in the student's text, in the teacher's, bytes, pair) in reading order; pair:
            (student token, teacher token) that end the message on either side, or None.
    Returns:
        Alignment; its text is all regions, one after the other.
    """
    parts = []
    for s_first, t_first, size, pair in regions:
        sides = []
        for ids, place, first in ((student_ids, student, s_first), (teacher_ids, teacher, t_first)):
            inside = np.flatnonzero((place.begin < first + size) & (place.end > first) & (place.begin >= 0))
            low, high = (inside[0], inside[-1] + 1) if len(inside) else (0, 0)
            begin, end, kind = [part[low:high] for part in place]
            outside = (begin >= 0) & ((begin < first) | (end > first + size))
            kind = np.where(outside & (kind != UNENCODABLE), NORMALIZED, kind).astype(np.int8)
            begin = np.where(begin < 0, -1, np.clip(begin - first, 0, size))
            end = np.where(begin < 0, -1, np.clip(end - first, 0, size))
            sides.append((low, ids[low:high], Located(begin, end, kind)))
        (s_low, s_ids, s), (t_low, t_ids, t) = sides
        part = align_located(s_ids, t_ids, s, t, student_table, teacher_table, size, ends=False)
        parts.append((s_low, t_low, part))
        if pair:
            parts.append((*pair, _with_pair(_different(1, 1, 0), 0, 0)))
    return join(parts, len(student_ids), len(teacher_ids))


def align_batch(student_ids, teacher_ids, student_table, teacher_table, student_doc=None, teacher_doc=None):
    """`align` for padded, possibly packed rows; documents never align across their boundary.

    Args:
        student_ids, teacher_ids: (B, S) and (B, T) ints.
        student_doc, teacher_doc: (B, S) and (B, T) ints, number of the document that a token belongs to, not
            decreasing along a row; -1 for padding, which is never looked at.  None: every row is one
            document, padded on the right with the tokenizer's pad token, or with eos after the first eos.
    Returns:
        list of B Alignments.
    """
    out = []
    for b in range(len(student_ids)):
        sides = []
        for ids, doc, table in ((student_ids, student_doc, student_table),
                                (teacher_ids, teacher_doc, teacher_table)):
            row = np.asarray(ids[b], np.int64)
            sides.append((row, _padding(row, table) if doc is None else np.asarray(doc[b], np.int64)))
        (s, s_doc), (t, t_doc) = sides
        parts = []
        for number in np.intersect1d(s_doc[s_doc >= 0], t_doc[t_doc >= 0]):
            (s_low, s_high), (t_low, t_high) = [
                (found[0], found[-1] + 1) for found in (np.flatnonzero(d == number) for d in (s_doc, t_doc))]
            pair = s[s_low:s_high], t[t_low:t_high]
            parts.append((s_low, t_low, align(*pair, student_table, teacher_table)))
        out.append(join(parts, len(s), len(t)))
    return out


def _padding(row, table):
    """Document numbers of one right-padded row: 0, and -1 for padding."""
    if table.pad >= 0 and table.pad != table.eos:
        text = np.flatnonzero(row != table.pad)
    else:
        text = np.flatnonzero(row != table.eos)
    end = text[-1] + 1 if len(text) else 0
    end += end < len(row) and row[end] == table.eos  # the one that ends the text
    return np.where(np.arange(len(row)) < end, 0, -1)


def common_cut(chunks, limits):
    """How many tokens to keep on either side: whole chunks only, so both are cut at the same byte.

    Args:
        chunks: chunk id per token, of student and teacher.
        limits: the most tokens that each may keep.
    """
    if all(len(chunk) <= limit for chunk, limit in zip(chunks, limits)):
        return [len(chunk) for chunk in chunks]
    ends = []  # one more than the last token of every chunk
    for chunk in chunks:
        ends.append(np.flatnonzero((chunk >= 0) & np.append(chunk[1:] != chunk[:-1], True)) + 1)
    fits = np.flatnonzero((ends[0] <= limits[0]) & (ends[1] <= limits[1]))
    if len(fits) == 0:  # nothing aligned fits: the student still learns from the text
        return [min(len(chunk), limit) for chunk, limit in zip(chunks, limits)]
    return [int(end[fits[-1]]) for end in ends]


# --- coverage -------------------------------------------------------------------------------------


def coverage(alignments):
    """How much of the texts is in used chunks.

    Args:
        alignments: an Alignment or several.
    Returns:
        dict: bytes, student_tokens, teacher_tokens: shares from 0 to 1 (control tokens count as tokens);
        chunks; the shares of them that are 1:1, 1:n, n:1, n:m (student : teacher tokens); and altered,
        unspelled, different: share of the bytes that were dropped for this reason.
    """
    alignments = [alignments] if isinstance(alignments, Alignment) else list(alignments)
    total = sum(a.text_bytes for a in alignments)
    shape = np.zeros((2, 2), np.int64)  # more than one student token?, more than one teacher token?
    for a in alignments:
        np.add.at(shape, ((a.student_tokens > 1).astype(int), (a.teacher_tokens > 1).astype(int)), 1)

    def share(side):
        chunks = [getattr(a, f"{side}_chunk") for a in alignments]
        return sum(int((c >= 0).sum()) for c in chunks) / max(1, sum(map(len, chunks)))

    kinds = {"1:1": shape[0, 0], "1:n": shape[0, 1], "n:1": shape[1, 0], "n:m": shape[1, 1]}
    found = {"bytes": sum(int(a.chunk_bytes.sum()) for a in alignments) / max(1, total),
             "student_tokens": share("student"), "teacher_tokens": share("teacher"),
             "chunks": int(shape.sum())}
    found |= {name: int(n) / max(1, found["chunks"]) for name, n in kinds.items()}
    return found | {reason: sum(a.dropped[reason] for a in alignments) / max(1, total)
                    for reason in ("normalized", "unencodable", "unmatched")}


# --- to look at it --------------------------------------------------------------------------------


def view(alignment, student_ids, teacher_ids, student_table, teacher_table, color=True, width=100):
    """Lines that show the chunks side by side: student above, teacher below; dropped tokens red.

    Args:
        width: characters of a line, about.
    """
    cells = []  # (chunk, student tokens, teacher tokens)
    sides = zip((student_ids, teacher_ids), alignment, (student_table, teacher_table))
    shown = [[(int(c), _shown(int(i), table)) for i, c in zip(ids, chunk)] for ids, chunk, table in sides]
    while any(shown):
        lost = [[], []]
        for side, row in zip(lost, shown):
            while row and row[0][0] < 0:
                side.append(row.pop(0)[1])
        if any(lost):
            cells.append((-1, *lost))
        here = min((row[0][0] for row in shown if row), default=-1)
        cell = [[row.pop(0)[1] for _ in [*row] if row and row[0][0] == here] for row in shown]
        if any(cell):
            cells.append((here, *cell))
    lines, top, bottom, used = [], "", "", 0
    for chunk, *tokens in cells:
        parts = ["\u2502".join(side) for side in tokens]
        size = max(map(len, parts)) + 2
        if used + size > width and used:
            lines, top, bottom, used = [*lines, top, bottom, ""], "", "", 0
        paint = "" if not color else "\x1b[31m" if chunk < 0 else "\x1b[36m" if chunk % 2 else "\x1b[33m"
        top, bottom = [line + paint + part.ljust(size) + ("\x1b[0m" if color else "")
                       for line, part in zip((top, bottom), parts)]
        used += size
    return [*lines, top, bottom]


def _shown(i, table):
    """A token as people want to see it: spaces as dots, what is no text escaped."""
    if table.special[i]:
        return table.tokens[i]
    return repr(table.bytes_of(i).decode(errors="replace"))[1:-1].replace(" ", "\u00b7") or "\u2205"


USAGE = """usage: python align.py --student A --teacher B --text TEXT
A, B: hub id, directory or tokenizer.json"""


def main(argv):
    """Show how two tokenizers cut a text."""
    flags = {name.removeprefix("--"): value for name, value in zip(argv[::2], argv[1::2])}
    if len(argv) % 2 or set(flags) != {"student", "teacher", "text"}:
        raise SystemExit(USAGE)
    from pathlib import Path

    from tokenizers import Tokenizer

    pair, text = [], flags["text"]
    for name in (flags["student"], flags["teacher"]):
        path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
        pair.append(Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name))
    tables = [TokenTable.from_tokenizer(tokenizer) for tokenizer in pair]
    coded = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in pair]
    found = align(*[c.ids for c in coded], *tables, text, *[c.offsets for c in coded])
    print(*view(found, *[c.ids for c in coded], *tables, color=sys.stdout.isatty()), sep="\n")
    print(", ".join(f"{name} {value}" if name == "chunks" else f"{name} {value:.1%}"
                    for name, value in coverage(found).items()))


if __name__ == "__main__":
    main(sys.argv[1:])
