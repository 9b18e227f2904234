"""Two tokenisations of one text -> aligned chunks, by bytes, in linear time.

A chunk is a minimal span of bytes that begins and ends on a token boundary of both tokenizers:
``['201'] <-> ['2', '0', '1']``.  Token boundaries come from the bytes of each token, never from decoded
strings, so the alignment is exact inside a UTF-8 character, works on ids that a model sampled, and does not
care how a tokenizer spells a space.  A text is aligned only if both sides really spell the same bytes.

    table = TokenTable.from_tokenizer(tokenizer)          # once per tokenizer
    alignment = align(student_ids, teacher_ids, student_table, teacher_table)

Shapes: S student tokens, T teacher tokens, C chunks, V entries of a vocabulary.
Needs numpy and numba only; tokenizers are duck-typed (any fast Hugging Face tokenizer does).
Copy this file into your own repository.  Tests: tests/test_align.py.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numba import njit


def _gpt2_characters():
    """The 256 printable characters with which byte-level BPE writes bytes in its vocabulary file."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]  # numbered from U+0100 on, in order
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _gpt2_characters()
TO_LATIN1 = {i: "\ufffd" for i in range(256)} | {ord(c): chr(b) for c, b in BYTE_OF_CHARACTER.items()}
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")  # SentencePiece byte fallback
METASPACE = "\u2581"


@dataclass
class TokenTable:
    """What every id of one tokenizer stands for, as bytes.

    Attributes:
        data: (sum of lengths,) uint8, the bytes of all tokens, one after the other.
        starts: (V + 1,) int64; token i is ``data[starts[i]:starts[i + 1]]``; V is the largest id + 1.
        special: (V,) bool, control tokens (bos, eos, pad, chat markers): they stand for no text.
        tokens: V strings as the vocabulary writes them, "" for ids that are not in use.
        family: "byte_level" or "sentencepiece".
        bos, eos, pad, unk: id of the token in that role, -1 for none.
        lengths: (V,) int64, bytes of each token, -1 for control tokens.
    """

    data: np.ndarray
    starts: np.ndarray
    special: np.ndarray
    tokens: list = field(repr=False)
    family: str
    bos: int = -1
    eos: int = -1
    pad: int = -1
    unk: int = -1
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
        return b"".join(self.bytes_of(i) for i in ids if not self.special[i])

    @classmethod
    def from_tokenizer(cls, tokenizer):
        """Build the table from a fast tokenizer (byte-level BPE, or SentencePiece BPE / Unigram).

        Raises:
            ValueError: the tokenizer is neither, so the bytes of its tokens are not known.
        """
        family = _family(tokenizer)
        vocab = tokenizer.get_vocab()
        tokens = [""] * (max(vocab.values()) + 1)
        for token, i in vocab.items():
            tokens[i] = token
        added = tokenizer.added_tokens_decoder
        spell = _byte_level_bytes if family == "byte_level" else _sentencepiece_bytes
        # an added token stands in the vocabulary as plain text, whatever the family
        pieces = [added[i].content.encode() if i in added else spell(token) for i, token in enumerate(tokens)]
        special = np.array([i in added and added[i].special for i in range(len(tokens))])
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk")}
        roles = {role: -1 if i is None else int(i) for role, i in roles.items()}
        special[[i for i in roles.values() if i >= 0]] = True
        starts = np.concatenate([[0], np.cumsum([len(p) for p in pieces])]).astype(np.int64)
        return cls(np.frombuffer(b"".join(pieces), np.uint8), starts, special, tokens, family, **roles)


def _family(tokenizer):
    """How a tokenizer writes bytes in its vocabulary, read off its decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer: a tokenizer.json is needed")
    parts = repr([backend.decoder, backend.pre_tokenizer, backend.normalizer])
    if "ByteLevel(" in parts:
        return "byte_level"
    if METASPACE in parts:
        return "sentencepiece"
    raise ValueError(
        f"a {type(backend.model).__name__} tokenizer that is neither byte-level nor SentencePiece: the bytes "
        "of its tokens are unknown; use a tokenizer of one of these two families"
    )


def _byte_level_bytes(token):
    try:
        return token.translate(TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # plain text that found its way into the vocabulary


def _sentencepiece_bytes(token):
    byte = BYTE_TOKEN.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode()


class Alignment(NamedTuple):
    """Chunks of one text, numbered from 0 in reading order.

    Attributes:
        student_chunk: (S,) int64, chunk of each student token, -1 where it has none.
        teacher_chunk: (T,) int64, likewise.
        chunk_bytes: (C,) int64, bytes of the text in each chunk; 0 for the pair of end-of-text tokens.
        exact: (C,) bool, one token on either side.
        same_text: False if the two sides spell different bytes; then there is no chunk at all.
    """

    student_chunk: np.ndarray
    teacher_chunk: np.ndarray
    chunk_bytes: np.ndarray
    exact: np.ndarray
    same_text: bool


def align(student_ids, teacher_ids, student_table, teacher_table):
    """Align two tokenisations of the same text.

    Control tokens are left out, except that two end-of-text tokens at the very end pair up.  SentencePiece
    likes to put a space before the first word that the text does not have: where one side alone does so, the
    first chunk holds other bytes on either side and is left out (its tokens get -1).

    Args:
        student_ids, teacher_ids: (S,) and (T,) ints, special tokens included, no padding.
        student_table, teacher_table: the `TokenTable` of each side.
    Returns:
        Alignment.
    """
    student_ids, teacher_ids = np.asarray(student_ids, np.int64), np.asarray(teacher_ids, np.int64)
    s_lengths, t_lengths = student_table.lengths[student_ids], teacher_table.lengths[teacher_ids]
    lead = _leading_space(
        student_ids, teacher_ids, s_lengths, t_lengths,
        student_table.data, student_table.starts, teacher_table.data, teacher_table.starts,
    )
    if lead == DIFFERENT:
        none = np.full(len(student_ids), -1), np.full(len(teacher_ids), -1)
        return Alignment(*none, np.zeros(0, np.int64), np.zeros(0, bool), False)
    s_chunk, t_chunk, ends = merge_boundaries(s_lengths, t_lengths, lead)
    chunk_bytes = np.diff(ends, prepend=0)
    if _ends_in_role(student_ids, student_table) and _ends_in_role(teacher_ids, teacher_table):
        s_chunk[-1] = t_chunk[-1] = len(chunk_bytes)
        chunk_bytes = np.append(chunk_bytes, 0)
    count = len(chunk_bytes)
    exact = (np.bincount(s_chunk[s_chunk >= 0], minlength=count) == 1) & (
        np.bincount(t_chunk[t_chunk >= 0], minlength=count) == 1)
    if lead != 0 and count:
        s_chunk, t_chunk = np.where(s_chunk > 0, s_chunk - 1, -1), np.where(t_chunk > 0, t_chunk - 1, -1)
        chunk_bytes, exact = chunk_bytes[1:], exact[1:]
    return Alignment(s_chunk, t_chunk, chunk_bytes, exact, True)


def _ends_in_role(ids, table):
    return len(ids) > 0 and ids[-1] == table.eos


DIFFERENT = 2


@njit(cache=True)
def _leading_space(s_ids, t_ids, s_lengths, t_lengths, s_data, s_starts, t_data, t_starts):
    """Compare the bytes: 0 equal, 1 / -1 one space more before the student / teacher, 2 different."""
    s_total, t_total = 0, 0
    for n in s_lengths:
        s_total += max(n, 0)
    for n in t_lengths:
        t_total += max(n, 0)
    lead = s_total - t_total
    if lead < -1 or lead > 1:
        return DIFFERENT
    i, j, a, b = 0, 0, 0, 0  # token and byte within it, student and teacher
    skip = lead  # the extra byte has to be a space, and the first
    while True:
        while i < len(s_ids) and a >= s_lengths[i]:
            i, a = i + 1, 0
        while j < len(t_ids) and b >= t_lengths[j]:
            j, b = j + 1, 0
        s_byte = s_data[s_starts[s_ids[i]] + a] if i < len(s_ids) else -1
        t_byte = t_data[t_starts[t_ids[j]] + b] if j < len(t_ids) else -1
        if skip == 1 and s_byte == 32:
            a, skip = a + 1, 0
        elif skip == -1 and t_byte == 32:
            b, skip = b + 1, 0
        elif skip != 0 or s_byte != t_byte:
            return DIFFERENT
        elif s_byte == -1:
            return lead
        else:
            a, b = a + 1, b + 1


@njit(cache=True)
def merge_boundaries(s_lengths, t_lengths, lead=0):
    """Cut two sequences of lengths at their common boundaries, in one linear pass.

    A token of length 0 belongs to the chunk that follows it.

    Args:
        s_lengths, t_lengths: (S,) and (T,) int64, bytes of each token, -1 for tokens to leave out.
        lead: bytes that the student has before the first byte of the teacher (negative: the reverse).
    Returns:
        (student_chunk, teacher_chunk, ends): int64 (S,), (T,) with -1 for none, and (C,) byte at which each
        chunk ends, counted in the text, that is without the leading extra byte.
    """
    s_chunk, t_chunk = np.full(len(s_lengths), -1), np.full(len(t_lengths), -1)
    ends = np.empty(min(len(s_lengths), len(t_lengths)), np.int64)
    i, j, count, s_first, t_first = 0, 0, 0, 0, 0
    s_end, t_end = -max(lead, 0), min(lead, 0)
    while True:
        while i < len(s_lengths) and s_lengths[i] < 0:
            i += 1
        while j < len(t_lengths) and t_lengths[j] < 0:
            j += 1
        if s_end <= t_end:
            if i == len(s_lengths):
                break
            s_chunk[i] = count
            s_end += s_lengths[i]
            i, s_first = i + 1, s_first + 1
        else:
            if j == len(t_lengths):
                break
            t_chunk[j] = count
            t_end += t_lengths[j]
            j, t_first = j + 1, t_first + 1
        if s_end == t_end and s_first > 0 and t_first > 0:
            ends[count] = s_end
            count, s_first, t_first = count + 1, 0, 0
    s_chunk[s_chunk == count] = -1  # a last chunk that never closed
    t_chunk[t_chunk == count] = -1
    return s_chunk, t_chunk, ends[:count]
