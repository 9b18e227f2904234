"""Align two tokenizations of one text: cut it into chunks, by bytes, in linear time.

A chunk is a minimal span of the text that begins and ends on a token boundary of both tokenizers:
``['201'] <-> ['2', '0', '1']``.  Boundaries come from the bytes of each token, never from decoded
strings, so they are exact inside a UTF-8 character and hold for ids that a model sampled.
Comparing bytes shows when a tokenizer normalized the text (composed characters, collapsed spaces,
lower case); its own offsets then place its tokens.  A chunk is used only if the tokens of both
sides spell the same bytes.  The bytes that are left out are counted.

    table = TokenTable.from_tokenizer(tokenizer)  # once per tokenizer
    alignment = align(student_ids, teacher_ids, student_table, teacher_table)

Or, to look at it, with align_view.py beside it:

    python align.py --student A --teacher B --show "in 2010" [--html PAGE]

Shapes: S student tokens, T teacher tokens, C chunks, V entries of a vocabulary, N bytes of text.
Inside the numba functions ``s_`` stands for the student's side and ``t_`` for the teacher's.

Needs numpy and numba only; tokenizers are duck-typed (Hugging Face fast ones,
`tokenizers.Tokenizer`, tiktoken).  Copy this file into your own repository.  License: Apache-2.0
(see LICENSE). Tests: tests/test_align.py.
"""

import codecs
import hashlib
import importlib.util
import itertools
import re
import runpy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numba import njit

# --- the bytes of every token ---------------------------------------------------------------------


def _gpt2_characters():
    """Map the 256 characters that byte-level BPE vocabulary files write to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    mapping = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            # GPT-2 numbers the other bytes from U+0100 on, in order
            mapping[chr(256 + len(mapping) - len(printable))] = byte
    return mapping


BYTE_OF_CHARACTER = _gpt2_characters()
# for str.translate: each such character becomes the Latin-1 character of its byte; any other
# Latin-1 character becomes U+FFFD, which Latin-1 cannot encode, so that plain text is noticed
TO_LATIN1 = dict.fromkeys(range(256), "\ufffd")
TO_LATIN1 |= {ord(character): chr(byte) for character, byte in BYTE_OF_CHARACTER.items()}
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")  # SentencePiece byte fallback
METASPACE = "\u2581"  # how SentencePiece writes a space
# Roles of control tokens, which a tokenizer.json does not name.  Where one token plays several of
# them, the first one counts.
ROLES = ("eos", "end_of_turn", "bos", "pad", "unk")
# control tokens that stand in the text of a message, where another tokenizer spells them letter by
# letter
TEXT_MARKER = re.compile(r"</?(think|reason|tool|function)\w*>\Z")
# names of the token that ends a turn of a chat; the first that a vocabulary has counts
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")


@dataclass
class TokenTable:
    """Bytes of every id of one tokenizer.

    Attributes:
        data: (sum of lengths,) uint8, the bytes of all tokens, one after the other.
        starts: (V + 1,) int64; token i is ``data[starts[i]:starts[i + 1]]``; V is the largest id +
            1.
        special: (V,) bool, control tokens (bos, eos, pad, unk, chat markers), which stand for no
            text. Markers of thinking and of tool calls are text.
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
        """Return the bytes of one token; for a control token these are its literal name."""
        return self.data[self.starts[token_id] : self.starts[token_id + 1]].tobytes()

    def decode(self, ids):
        """Return the bytes that a sequence of ids spells; control tokens spell nothing."""
        ids = np.asarray(ids, np.int64)
        return _spelled(ids, self.data, self.starts, self.lengths).tobytes()

    def below(self, size):
        """Return the table of the ids below `size`, such as those that a model has rows for.

        Raises:
            ValueError: an id beyond may stand in a text: one that is no control token, or in the
                role of bos, eos or unk.
        """
        roles = {"bos": self.bos, "eos": self.eos, "unk": self.unk}
        for role, i in roles.items():
            if i >= size:
                raise ValueError(f"its {role} {self.tokens[i]!r} has the id {i}, beyond {size}")
        for i in range(size, len(self)):
            if self.tokens[i] and not self.special[i]:
                raise ValueError(f"its token {self.tokens[i]!r} has the id {i}, beyond {size}")
        for role, i in (("pad", self.pad), ("end_of_turn", self.end_of_turn)):
            roles[role] = i if i < size else -1
        return TokenTable(
            self.data[: self.starts[size]], self.starts[: size + 1], self.special[:size],
            self.tokens[:size], self.family, **roles)

    @classmethod
    def from_tokenizer(cls, tokenizer):
        """Build the table from a fast tokenizer.

        Args:
            tokenizer: a Hugging Face fast tokenizer or `tokenizers.Tokenizer` of any model (BPE,
                Unigram, WordPiece, characters), or a tiktoken Encoding.
        Raises:
            ValueError: it is neither, so the bytes of its tokens are not known.
        """
        if hasattr(tokenizer, "decode_single_token_bytes"):
            return cls._from_tiktoken(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "get_added_tokens_decoder"):
            kind = type(tokenizer).__name__
            raise ValueError(f"{kind} is not a fast tokenizer: a tokenizer.json is needed")

        vocab = backend.get_vocab(with_added_tokens=True)
        # ids may have holes, so the table is as long as the largest id asks for
        tokens = [""] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            tokens[i] = token
        # an added token stands in the vocabulary as plain text, but for the spaces of Gemma
        added_tokens = backend.get_added_tokens_decoder()
        learned = list(tokens)
        for i in added_tokens:
            learned[i] = ""
        family = _family(backend)
        pieces = _token_bytes(learned, family, backend.model)
        special = np.zeros(len(tokens), bool)
        for i, added in added_tokens.items():
            special[i] = added.special and not TEXT_MARKER.match(added.content)
            is_spaces = family == "sentencepiece" and not added.content.strip(METASPACE)
            pieces[i] = (" " * len(added.content) if is_spaces else added.content).encode()
        unk = getattr(tokenizer, "unk_token_id", None)
        if unk is None:  # a bare `tokenizers.Tokenizer` knows this role alone
            unk = vocab.get(getattr(backend.model, "unk_token", None))
        bos = getattr(tokenizer, "bos_token_id", None)
        eos = getattr(tokenizer, "eos_token_id", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        return cls._from_pieces(pieces, special, tokens, family, vocab, bos, eos, pad, unk)

    @classmethod
    def _from_tiktoken(cls, encoding):
        """Build the table from a tiktoken Encoding."""
        vocab = {}  # control tokens only: the others have no names
        for name in encoding.special_tokens_set:
            vocab[name] = encoding.encode_single_token(name)
        name_of_id = {i: name for name, i in vocab.items()}
        pieces = []
        tokens = []
        special = np.zeros(encoding.n_vocab, bool)
        for i in range(encoding.n_vocab):
            try:
                piece = encoding.decode_single_token_bytes(i)
            except KeyError:  # tiktoken leaves holes
                piece = b""
            pieces.append(piece)
            tokens.append(name_of_id.get(i) or piece.decode("latin-1"))
            special[i] = i in name_of_id and not TEXT_MARKER.match(name_of_id[i])
        eos = vocab.get("<|endoftext|>", vocab.get("<|end_of_text|>"))  # the latter: Llama 3
        return cls._from_pieces(pieces, special, tokens, "byte_level", vocab, eos=eos)

    @classmethod
    def _from_pieces(cls, pieces, special, tokens, family, vocab, bos=None, eos=None, pad=None,
                     unk=None):
        """Build the table from the bytes of each token and the ids of the roles, None for none."""
        end_of_turn = eos
        for name in END_OF_TURN:
            if name in vocab:
                end_of_turn = vocab[name]
                break
        roles = {"bos": bos, "eos": eos, "pad": pad, "unk": unk, "end_of_turn": end_of_turn}
        for role, i in roles.items():
            # a token in a role is a control token, even if the tokenizer does not mark it as one
            roles[role] = -1 if i is None else int(i)
            if roles[role] >= 0:
                special[roles[role]] = True
        ends = np.cumsum([len(piece) for piece in pieces])
        starts = np.concatenate([[0], ends]).astype(np.int64)
        data = np.frombuffer(b"".join(pieces), np.uint8)
        return cls(data, starts, special, tokens, family, **roles)


def _family(backend):
    """Return how a tokenizer writes bytes in its vocabulary, read off its components."""
    # the parts of a tokenizer may be nested; their repr names them all
    components = repr([backend.decoder, backend.pre_tokenizer, backend.normalizer])
    if "ByteLevel(" in components:
        return "byte_level"
    if METASPACE in components or "Metaspace(" in components:
        return "sentencepiece"
    if type(backend.model).__name__ == "WordPiece":
        return "wordpiece"
    return "plain"


def _token_bytes(tokens, family, model):
    """Return the bytes of tokens that a vocabulary of this family writes as strings."""
    if family == "sentencepiece":
        return [_sentencepiece_bytes(token) for token in tokens]
    if family == "wordpiece":
        prefix = model.continuing_subword_prefix
        return [_wordpiece_bytes(token, prefix) for token in tokens]
    # some BPE models mark the end of a word (</w>), which stands for no byte
    suffix = getattr(model, "end_of_word_suffix", None) or ""
    tokens = [token.removesuffix(suffix) for token in tokens]
    if family == "byte_level":
        return _byte_level_bytes(tokens)
    if "byte_fallback=True" in repr(model):  # Unigram tells it by no attribute
        return [_sentencepiece_bytes(token, space=METASPACE) for token in tokens]
    return [token.encode() for token in tokens]


def _byte_level_bytes(tokens):
    """Translate all tokens at once: every character of such a token is a byte."""
    try:
        raw = "".join(tokens).translate(TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        # plain text found its way into the vocabulary: look for it token by token
        if len(tokens) == 1:
            return [tokens[0].encode()]
        pieces = []
        for token in tokens:
            pieces += _byte_level_bytes([token])
        return pieces
    places = itertools.accumulate(map(len, tokens), initial=0)  # in `raw`: a byte per character
    return [raw[begin:end] for begin, end in itertools.pairwise(places)]


def _sentencepiece_bytes(token, space=" "):
    byte = BYTE_TOKEN.match(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(METASPACE, space).encode()


def _wordpiece_bytes(token, prefix):
    if token.startswith(prefix):
        return token.removeprefix(prefix).encode()
    return f" {token}".encode()  # its decoder writes a space before every word


def all_bytes(table):
    """Return the bytes of every token of a TokenTable, as a list."""
    data = table.data.tobytes()
    starts = table.starts.tolist()
    return [data[start:end] for start, end in itertools.pairwise(starts)]


def fingerprint(tokenizer):
    """Return a hex digest of all that decides how a fast tokenizer cuts text.

    That is the vocabulary, the merges, the normalizer and so on.
    """
    spec = getattr(tokenizer, "backend_tokenizer", tokenizer).to_str()
    # Before the added tokens stand truncation and padding, which are settings of a caller.
    spec = spec[spec.index('"added_tokens"') :]
    return hashlib.sha256(spec.encode()).hexdigest()[:32]


# --- the place of each token in the text ----------------------------------------------------------

# kinds of Located; numbers and no enum, because numba compiles constants
EXACT = 0
SPACE = 1
NORMALIZED = 2
UNENCODABLE = 3

SPACE_BYTE = 32  # b" "


# What follows a token that begins the turns of a chat template, in the same piece of it: a role.
ROLE = r"(?:(?!\{%|<).){0,30}?\b(?:role|system|user|assistant)\b"


def adds_bos(tokenizer, bos):
    """Return whether a plain text begins with bos: where a model has learned it so.

    A tokenizer that adds none by itself may have it for use all the same, but not where the token
    is the header of a chat's turns, as ``<|im_start|>`` of SmolLM2.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        bos: its id; -1: it has none.
    """
    # Llama-like tokenizers say so by this key
    if bos < 0 or getattr(tokenizer, "init_kwargs", {}).get("add_bos_token") is False:
        return False
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = "\n".join(template.values())
    name = re.escape(tokenizer.convert_ids_to_tokens(bos))
    if not re.search(name + ROLE, template):
        return True
    return tokenizer("a")["input_ids"][:1] == [bos]


class Located(NamedTuple):
    """Places of the tokens of one side in a text.

    Attributes:
        begin, end: (S,) int64 bytes of the text, in reading order; -1 for a control token that
            stands for no text.  No token stands for the bytes between the end of one and the begin
            of the next.
        kind: (S,) int8.  EXACT: spells its bytes of the text.  SPACE: spells one space more in
            front, which the text does not have, as SentencePiece does at the beginning.
            NORMALIZED: spells something else.  UNENCODABLE: its bytes are not known (unk).
    """

    begin: np.ndarray
    end: np.ndarray
    kind: np.ndarray


def locate(ids, table, text, offsets=None):
    """Place tokens in the text that they were made from, or that was made from them.

    Tried in this order: the tokens spell the text byte for byte; the tokenizer's own offsets,
    corrected by the bytes; without offsets, the text is what the tokens decode to, with U+FFFD for
    bytes that are not UTF-8 (sampled ids).

    Args:
        ids: (S,) int64.
        table: their TokenTable.
        text: str.
        offsets: (S, 2) characters of the text, as tokenizers give them; None: not available.
    Returns:
        Located, or None if the tokens do not spell the text and there are no offsets.
    """
    raw = np.frombuffer(text.encode(errors="replace"), np.uint8)
    located = _located_by_bytes(ids, table, raw)
    if located is not None:
        return located
    if offsets is None:
        return _as_decoded(ids, table, text)
    spans = character_starts(text)[np.asarray(offsets, np.int64).reshape(-1, 2)]
    lows = spans[:, 0].copy()  # contiguous: numba compiles one version
    highs = spans[:, 1].copy()
    return Located(*_by_offsets(ids, lows, highs, table.special, table.data, table.starts, raw))


def character_starts(text):
    """Return (characters + 1,) int64: the byte at which each character begins, and the end."""
    code = np.frombuffer(text.encode("utf-32-le", errors="replace"), np.uint32)
    # UTF-8 takes one byte more from each of these code points on
    sizes = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])


def _as_decoded(ids, table, text):
    """Place tokens in the text that they decode to; return None if the text is another one."""
    raw = table.decode(ids)
    for decoded, invalid_spans in _decodings(raw, ids, table):
        lead = len(decoded) - len(text)  # 1: the tokens spell a space in front
        if lead in (0, 1) and decoded == " " * lead + text:
            return _place_decoded(raw, ids, table, lead, invalid_spans)
    return None


def _decodings(raw, ids, table):
    """Yield (text, list of (begin, end) of `raw`, of which each became one U+FFFD)."""
    # as byte-level tokenizers do, and Python: one U+FFFD per incomplete character
    yield _decode(raw, by_byte=False)
    yield _decode_by_run(raw, ids, table)
    # as the sentencepiece library does: one per byte of it
    yield _decode(raw, by_byte=True)


def _decode(raw, by_byte):
    invalid_spans = []

    def note_invalid(error):
        spans = [(error.start, error.end)]
        if by_byte:
            spans = [(place, place + 1) for place in range(error.start, error.end)]
        invalid_spans.extend(spans)
        return "\ufffd" * len(spans), error.end

    # registered anew in every call, since the handler writes to this call's list
    codecs.register_error("align.note_invalid", note_invalid)
    return raw.decode(errors="align.note_invalid"), invalid_spans


def _decode_by_run(raw, ids, table):
    """Decode as the byte fallback of the tokenizers library does.

    A run of byte tokens in which anything is no UTF-8 becomes one U+FFFD for each of its bytes, its
    complete characters included.
    """
    def is_byte(i):
        return BYTE_TOKEN.match(table.tokens[i]) is not None

    text = []
    invalid_spans = []
    begin = 0  # of the run
    written = ids[table.lengths[ids] >= 0]  # control tokens are left out first
    for _, run in itertools.groupby(written.tolist(), is_byte):
        end = begin + int(table.lengths[list(run)].sum())
        try:
            text.append(raw[begin:end].decode())
        except UnicodeDecodeError:
            text.append("\ufffd" * (end - begin))
            invalid_spans += [(place, place + 1) for place in range(begin, end)]
        begin = end
    return "".join(text), invalid_spans


def _place_decoded(raw, ids, table, lead, invalid_spans):
    """Return the Located of tokens in the text that their bytes decode to.

    Args:
        raw: bytes that the tokens spell.
        lead: 1: they spell a space in front, which the text does not have.
        invalid_spans: (begin, end) of `raw`, in order, of which each became one U+FFFD.
    """
    # position[i]: byte of the text that byte i of `raw` became; summed up from steps, which are 1
    # except where a run of invalid bytes became the three bytes of U+FFFD
    steps = np.ones(len(raw) + 1, np.int64)
    steps[0] = -lead
    is_invalid = np.zeros(len(raw) + 1, np.int64)
    for start, end in invalid_spans:
        steps[start + 1 : end + 1] = 0
        steps[end] = 3
        is_invalid[start:end] = 1
    position = np.cumsum(steps)
    invalid_before = np.concatenate([[0], np.cumsum(is_invalid)])

    lengths = table.lengths[ids]
    raw_end = np.cumsum(np.maximum(lengths, 0))
    raw_begin = raw_end - np.maximum(lengths, 0)
    has_invalid = invalid_before[raw_end] > invalid_before[raw_begin]
    kind = np.where(has_invalid, NORMALIZED, EXACT).astype(np.int8)
    if lead:
        kind[np.argmax(raw_end > 0)] = SPACE
    # the space in front stands at byte -1, that is, before the text
    begin = np.maximum(position[raw_begin], 0)
    end = np.maximum(position[raw_end], 0)
    return Located(np.where(lengths < 0, -1, begin), np.where(lengths < 0, -1, end), kind)


@njit(cache=True)
def _num_bytes(ids, lengths):
    """Return how many bytes ids spell."""
    total = 0
    for i in ids:
        total += max(lengths[i], 0)
    return total


@njit(cache=True)
def _spelled(ids, data, starts, lengths):
    """Return the bytes that ids spell; control tokens spell nothing."""
    out = np.empty(_num_bytes(ids, lengths), np.uint8)
    filled = 0
    for i in ids:
        for b in range(max(lengths[i], 0)):
            out[filled] = data[starts[i] + b]
            filled += 1
    return out


@njit(cache=True)
def _by_bytes(ids, data, starts, lengths, text):
    """Return (the ids spell the text, with or without a space in front; begin; end; kind)."""
    n = len(ids)
    begin = np.full(n, -1)
    end = np.full(n, -1)
    kind = np.zeros(n, np.int8)
    lead = _num_bytes(ids, lengths) - len(text)
    if lead != 0 and lead != 1:
        return False, begin, end, kind
    position = 0
    for k in range(n):
        size = lengths[ids[k]]
        if size < 0:
            continue
        first = starts[ids[k]]
        begin[k] = position
        # the first token that has bytes spells the space in front
        if lead == 1 and size > 0:
            if data[first] != SPACE_BYTE:
                return False, begin, end, kind
            kind[k] = SPACE
            lead = 0
            first += 1
            size -= 1
        for b in range(size):
            if data[first + b] != text[position + b]:
                return False, begin, end, kind
        position += size
        end[k] = position
    return True, begin, end, kind


@njit(cache=True)
def _spells(ids, special, first, stop, data, starts, text, low, high, skip):
    """Return whether tokens first..stop-1 spell text[low:high], after `skip` spaces in front."""
    position = low - skip
    for k in range(first, stop):
        if special[ids[k]]:
            return False
        for b in range(starts[ids[k]], starts[ids[k] + 1]):
            if position < low:
                if data[b] != SPACE_BYTE:
                    return False
            elif position >= high or data[b] != text[position]:
                return False
            position += 1
    return position == high


@njit(cache=True)
def _by_offsets(ids, lows, highs, special, data, starts, text):
    """Return (begin, end, kind) from the tokenizer's offsets lows..highs, in bytes of the text.

    Tokens that have a character in common are one group.  Where the bytes of a group are those of
    the text, its inner boundaries are exact too.
    """
    n = len(ids)
    begin = np.full(n, -1)
    end = np.full(n, -1)
    kind = np.zeros(n, np.int8)
    placed = 0  # bytes of the text that are accounted for
    first = 0  # first token of the group
    while first < n:
        # a control token without characters stands for no text; unk has characters
        if special[ids[first]] and lows[first] >= highs[first]:
            first += 1
            continue
        low = max(lows[first], placed)
        high = max(highs[first], placed)
        stop = first + 1
        while stop < n and lows[stop] < high and highs[stop] > lows[stop]:
            high = max(high, highs[stop])
            stop += 1
        fits = True
        position = low
        skip = 0  # spaces that the tokens spell in front
        if low > placed and _spells(ids, special, first, stop, data, starts, text, placed, high, 0):
            position = placed  # offsets that leave out the spaces before a word are widened
        elif _spells(ids, special, first, stop, data, starts, text, low, high, 0):
            pass
        elif _spells(ids, special, first, stop, data, starts, text, low, high, 1):
            skip = 1
        else:
            fits = False
        for k in range(first, stop):
            begin[k] = position
            if fits:
                size = starts[ids[k] + 1] - starts[ids[k]]
                if skip == 1 and size > 0:
                    kind[k] = SPACE
                    skip = 0
                    size -= 1
                position += size
            else:
                # the group is one unit: its last token stands for all of it
                kind[k] = UNENCODABLE if special[ids[k]] else NORMALIZED
                if k == stop - 1:
                    position = high
            end[k] = position
        placed = max(placed, high)
        first = stop
    return begin, end, kind


# --- alignment ------------------------------------------------------------------------------------


class Alignment(NamedTuple):
    """Chunks of one text, numbered from 0 in reading order; only those that are used.

    Attributes:
        student_chunk: (S,) int64, chunk of each student token, -1 where it has none.
        teacher_chunk: (T,) int64, likewise.
        chunk_start: (C,) int64, byte of the text at which each chunk begins.
        chunk_bytes: (C,) int64, its bytes of the text; 0 for a pair of end tokens, and for tokens
            of a character that both sides normalize before its last ones.
        student_tokens, teacher_tokens: (C,) int64, tokens in each chunk.
        exact: (C,) bool, one token on either side, and both spell the same bytes.
        same_bytes: (C,) bool, False where the tokens stand for the same text but one side spells a
            space that the text does not have, so the two models' probabilities are those of two
            spellings.
        text_bytes: bytes of the text.
        dropped: {reason: bytes of the text left out}.  "normalized": a side spells something else.
            "unencodable": a side has no token for them, or an unk.  "unmatched": the two sides are
            no tokenizations of one text.
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


# fields of Alignment that have one entry per chunk
CHUNK_FIELDS = ("chunk_start", "chunk_bytes", "student_tokens", "teacher_tokens", "exact",
                "same_bytes")


def align(student_ids, teacher_ids, student_table, teacher_table, text=None, student_offsets=None,
          teacher_offsets=None):
    """Align two tokenizations of one text.

    Control tokens are left out, except that two end-of-text tokens at the very end pair up.

    Args:
        student_ids, teacher_ids: (S,) and (T,) ints, special tokens included, no padding.
        student_table, teacher_table: the `TokenTable` of each side.
        text: str that both were made from, or that one was decoded to; None: what they spell.
        student_offsets, teacher_offsets: (S, 2) and (T, 2) characters of the text, as a tokenizer
            gives them with return_offsets_mapping; needed for a side that normalizes the text.
    Returns:
        Alignment; without any chunk, and all bytes dropped as "unmatched", where a side does not
        fit the text and has no offsets.
    Raises:
        ValueError: see `checked_ids`.
    """
    student_ids = checked_ids(student_ids, student_table)
    teacher_ids = checked_ids(teacher_ids, teacher_table)
    if text is None:
        text_bytes, student, teacher = _locate_in_common_spelling(student_ids, teacher_ids,
                                                                  student_table, teacher_table)
    else:
        student = locate(student_ids, student_table, text, student_offsets)
        teacher = locate(teacher_ids, teacher_table, text, teacher_offsets)
        text_bytes = len(text.encode(errors="replace"))
    if student is None or teacher is None:
        return _no_chunks(len(student_ids), len(teacher_ids), text_bytes)
    return align_located(student_ids, teacher_ids, student, teacher, student_table, teacher_table,
                         text_bytes)


def checked_ids(ids, table):
    """Return ids as (S,) int64; raise a ValueError for others, or one outside the vocabulary."""
    given = np.asarray(ids)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise ValueError(f"ids are {given.shape} {given.dtype}; expected (S,) integers of one text")
    ids = given.astype(np.int64, copy=False)
    if len(ids) and not 0 <= ids.min() <= ids.max() < len(table):
        raise ValueError(
            f"ids from {ids.min()} to {ids.max()}, but the tokenizer has 0 to {len(table) - 1}: "
            "pass the table of the tokenizer that made the ids")
    return ids


def _locate_in_common_spelling(student_ids, teacher_ids, student_table, teacher_table):
    """Return (bytes of what both sides spell, Located of the student, of the teacher or None).

    A space that one side alone has in front is no part of it.
    """
    spelled = student_table.decode(student_ids), teacher_table.decode(teacher_ids)
    # the shorter spelling is the text: the other may have one space more in front
    text = np.frombuffer(min(spelled, key=len), np.uint8)
    student = _located_by_bytes(student_ids, student_table, text)
    teacher = _located_by_bytes(teacher_ids, teacher_table, text)
    if student is None or teacher is None:  # two texts: all bytes of the longer one are dropped
        return max(map(len, spelled)), student, teacher
    return len(text), student, teacher


def _located_by_bytes(ids, table, text):
    """Return Located if the ids spell the bytes of a text, else None."""
    spells_text, begin, end, kind = _by_bytes(ids, table.data, table.starts, table.lengths, text)
    return Located(begin, end, kind) if spells_text else None


def _no_chunks(S, T, text_bytes):
    """Return an alignment without chunks; all bytes are dropped as "unmatched"."""
    no_counts = np.zeros(0, np.int64)
    no_flags = np.zeros(0, bool)
    dropped = {"normalized": 0, "unencodable": 0, "unmatched": text_bytes}
    return Alignment(
        np.full(S, -1), np.full(T, -1), chunk_start=no_counts, chunk_bytes=no_counts,
        student_tokens=no_counts, teacher_tokens=no_counts, exact=no_flags, same_bytes=no_flags,
        text_bytes=text_bytes, dropped=dropped)


def align_located(student_ids, teacher_ids, student, teacher, student_table, teacher_table,
                  text_bytes, pair_eos=True):
    """Align tokens whose places in a text are known, as `align` does.

    Args:
        student_ids, teacher_ids: (S,) and (T,) int64.
        text_bytes: bytes of the text.
        pair_eos: make a chunk of two end-of-text tokens at the very end.
    """
    *fields, normalized, unencodable = _merge(
        student_ids, student.begin, student.end, student.kind,
        student_table.data, student_table.starts,
        teacher_ids, teacher.begin, teacher.end, teacher.kind,
        teacher_table.data, teacher_table.starts, text_bytes)
    dropped = {"normalized": normalized, "unencodable": unencodable, "unmatched": 0}
    alignment = Alignment(*fields, text_bytes, dropped)
    both_end = (_ends_with_eos(student_ids, student_table)
                and _ends_with_eos(teacher_ids, teacher_table))
    if pair_eos and both_end:
        return _with_pair(alignment, len(student_ids) - 1, len(teacher_ids) - 1)
    return alignment


def _ends_with_eos(ids, table):
    return len(ids) > 0 and table.eos >= 0 and ids[-1] == table.eos


def _with_pair(alignment, student_token, teacher_token):
    """Append a chunk of no bytes: one student token and one teacher token."""
    number = len(alignment.chunk_start)
    alignment.student_chunk[student_token] = number
    alignment.teacher_chunk[teacher_token] = number
    return alignment._replace(
        chunk_start=np.append(alignment.chunk_start, alignment.text_bytes),
        chunk_bytes=np.append(alignment.chunk_bytes, 0),
        student_tokens=np.append(alignment.student_tokens, 1),
        teacher_tokens=np.append(alignment.teacher_tokens, 1),
        exact=np.append(alignment.exact, True),
        same_bytes=np.append(alignment.same_bytes, True))


# results of comparing the bytes of a chunk's two sides; 1, -1: the student, the teacher has a space
# more in front
SAME = 0
DIFFERENT = 2


@njit(cache=True)
def _next_byte(ids, starts, token, stop, byte, byte_stop):
    """Return (next token to read, next byte, end of its token's bytes); byte == end: none left."""
    while byte == byte_stop and token < stop:
        byte = starts[ids[token]]
        byte_stop = starts[ids[token] + 1]
        token += 1
    return token, byte, byte_stop


@njit(cache=True)
def _compare(s_ids, s_kind, s, s_stop, s_data, s_starts,
             t_ids, t_kind, t, t_stop, t_data, t_starts):
    """Compare the bytes of student tokens s..s_stop-1 with those of teacher tokens t..t_stop-1."""
    lead = 0  # bytes that the student has more
    for k in range(s, s_stop):
        lead += s_starts[s_ids[k] + 1] - s_starts[s_ids[k]]
    for k in range(t, t_stop):
        lead -= t_starts[t_ids[k] + 1] - t_starts[t_ids[k]]
    if lead < -1 or lead > 1:
        return DIFFERENT
    # one byte more: it has to be a space in front, and of a token that may have one
    if (lead == 1 and s_kind[s] != SPACE) or (lead == -1 and t_kind[t] != SPACE):
        return DIFFERENT
    s, s_byte, s_byte_stop = _next_byte(s_ids, s_starts, s, s_stop, 0, 0)
    t, t_byte, t_byte_stop = _next_byte(t_ids, t_starts, t, t_stop, 0, 0)
    if lead == 1:
        if s_data[s_byte] != SPACE_BYTE:
            return DIFFERENT
        s_byte += 1
    elif lead == -1:
        if t_data[t_byte] != SPACE_BYTE:
            return DIFFERENT
        t_byte += 1
    while True:
        s, s_byte, s_byte_stop = _next_byte(s_ids, s_starts, s, s_stop, s_byte, s_byte_stop)
        t, t_byte, t_byte_stop = _next_byte(t_ids, t_starts, t, t_stop, t_byte, t_byte_stop)
        if s_byte == s_byte_stop or t_byte == t_byte_stop:
            return lead  # both are used up, since the rest was equally long
        if s_data[s_byte] != t_data[t_byte]:
            return DIFFERENT
        s_byte += 1
        t_byte += 1


@njit(cache=True)
def _merge(s_ids, s_begin, s_end, s_kind, s_data, s_starts,
           t_ids, t_begin, t_end, t_kind, t_data, t_starts, text_bytes):
    """Cut a text at the common boundaries of two sequences of tokens, in one pass; see `Alignment`.

    A token of no bytes belongs to the chunk that follows it.  Tokens around a control token belong
    to no chunk, because those of a chunk are neighbors.

    Returns:
        (the fields of Alignment up to same_bytes, normalized bytes, unencodable bytes)
    """
    s_chunk = np.full(len(s_ids), -1)
    t_chunk = np.full(len(t_ids), -1)
    most_chunks = min(len(s_ids), len(t_ids))
    counts = np.empty((4, most_chunks), np.int64)  # start, bytes, student tokens, teacher tokens
    same_bytes = np.empty(most_chunks, np.bool_)
    num_chunks, normalized, unencodable = _fill_chunks(
        s_ids, s_begin, s_end, s_kind, s_data, s_starts,
        t_ids, t_begin, t_end, t_kind, t_data, t_starts, text_bytes,
        s_chunk, t_chunk, counts, same_bytes)
    exact = np.empty(num_chunks, np.bool_)
    for c in range(num_chunks):
        exact[c] = same_bytes[c] and counts[2, c] == 1 and counts[3, c] == 1
    return (s_chunk, t_chunk, counts[0, :num_chunks].copy(), counts[1, :num_chunks].copy(),
            counts[2, :num_chunks].copy(), counts[3, :num_chunks].copy(),
            exact, same_bytes[:num_chunks].copy(), normalized, unencodable)


@njit(cache=True)
def _write_counts(counts_4, start, stop, s_num, t_num):
    """Write the counts of one chunk, see `_merge`."""
    counts_4[0] = start
    counts_4[1] = stop - start
    counts_4[2] = s_num
    counts_4[3] = t_num


# the two sides are written out, and nothing is called per token: counting the references of
# array arguments would take numba longer than the token
@njit(cache=True)
def _fill_chunks(s_ids, s_begin, s_end, s_kind, s_data, s_starts, t_ids, t_begin, t_end, t_kind,
                 t_data, t_starts, text_bytes, s_chunk, t_chunk, counts, same_bytes):
    """Do the pass of `_merge`; return (number of chunks, normalized bytes, unencodable bytes)."""
    num_chunks = normalized = unencodable = 0
    s = t = s_reached = t_reached = 0  # next token; bytes of the text accounted for
    start = s_num = t_num = 0  # the open chunk: its begin, and its tokens, the last ones taken
    has_gap = in_doubt = False  # no token spells a byte of it; a token may spell something else
    while True:
        if (s_reached, s_num) <= (t_reached, t_num):  # the side behind: its next gap or token
            while s < len(s_ids) and s_begin[s] < 0:  # control tokens
                s += 1
            place = s_begin[s] if s < len(s_ids) else text_bytes
            if place > s_reached:
                s_reached = place
                has_gap = True
            elif s == len(s_ids):
                break
            else:
                has_gap |= s_kind[s] == UNENCODABLE or (s_num > 0 and s_begin[s - 1] < 0)
                in_doubt |= s_kind[s] != EXACT
                s_reached = s_end[s]
                s += 1
                s_num += 1
        else:
            while t < len(t_ids) and t_begin[t] < 0:
                t += 1
            place = t_begin[t] if t < len(t_ids) else text_bytes
            if place > t_reached:
                t_reached = place
                has_gap = True
            elif t == len(t_ids):
                break
            else:
                has_gap |= t_kind[t] == UNENCODABLE or (t_num > 0 and t_begin[t - 1] < 0)
                in_doubt |= t_kind[t] != EXACT
                t_reached = t_end[t]
                t += 1
                t_num += 1
        # go on unless both are at a boundary and more than tokens of no bytes on one side is taken
        if s_reached != t_reached or (s_reached == start and (s_num == 0 or t_num == 0)):
            continue
        # bytes are compared only where a token may spell something else than its place in the text
        verdict = DIFFERENT if has_gap else SAME
        if in_doubt and not has_gap:
            verdict = _compare(s_ids, s_kind, s - s_num, s, s_data, s_starts,
                               t_ids, t_kind, t - t_num, t, t_data, t_starts)
        if verdict != DIFFERENT:
            s_chunk[s - s_num : s] = num_chunks
            t_chunk[t - t_num : t] = num_chunks
            _write_counts(counts[:, num_chunks], start, s_reached, s_num, t_num)
            same_bytes[num_chunks] = verdict == SAME
            num_chunks += 1
        elif s_reached == start:  # inside of what a side normalizes
            continue
        elif has_gap:
            unencodable += s_reached - start
        else:
            normalized += s_reached - start
        start, s_num, t_num, has_gap, in_doubt = s_reached, 0, 0, False, False
    return num_chunks, normalized, unencodable


# --- documents, regions, batches, truncation ------------------------------------------------------


class PlacedAlignment(NamedTuple):
    """Alignment of one text among several, and its first token on either side."""

    student_token: int
    teacher_token: int
    alignment: Alignment


def join(placed, S, T):
    """Join the alignments of several texts into one.

    Args:
        placed: PlacedAlignments in reading order.
        S, T: tokens of the whole sequences; those of no text get no chunk.
    Returns:
        Alignment; its text is all texts, one after the other.
    """
    joined = _no_chunks(S, T, text_bytes=0)
    pieces = [joined]  # has no chunks, but fixes the dtypes when nothing else is to be joined
    num_chunks = 0
    text_bytes = 0
    for student_token, teacher_token, piece in placed:
        _write_chunks(joined.student_chunk, student_token, piece.student_chunk, num_chunks)
        _write_chunks(joined.teacher_chunk, teacher_token, piece.teacher_chunk, num_chunks)
        pieces.append(piece._replace(chunk_start=piece.chunk_start + text_bytes))
        for reason in joined.dropped:
            joined.dropped[reason] += piece.dropped[reason]
        num_chunks += len(piece.chunk_start)
        text_bytes += piece.text_bytes
    columns = {}
    for name in CHUNK_FIELDS:
        columns[name] = np.concatenate([getattr(piece, name) for piece in pieces])
    return joined._replace(text_bytes=text_bytes, **columns)


def _write_chunks(whole, first, chunk, num_before):
    """Write a text's chunk ids at its tokens, counted on from the chunks before it, in place."""
    window = whole[first : first + len(chunk)]
    window[chunk >= 0] = chunk[chunk >= 0] + num_before


class Region(NamedTuple):
    """Bytes that two different texts have in common: the first byte in either text, and how many.

    end_pair: (student token, teacher token) that end the message on either side, or None.
    """

    student_byte: int
    teacher_byte: int
    num_bytes: int
    end_pair: tuple | None = None


def align_regions(student_ids, teacher_ids, student, teacher, regions, student_table,
                  teacher_table):
    """Align what two different texts have in common, such as the messages of two chat templates.

    A token that reaches over the border of a region spells more than the region and is left out,
    unless the other side does the same.

    Args:
        student_ids, teacher_ids: (S,) and (T,) int64.
        student, teacher: Located, each in its side's text.
        regions: Regions, or tuples of their four fields, in reading order.
    Returns:
        Alignment; its text is all regions, one after the other.
    """
    placed = []
    for student_byte, teacher_byte, num_bytes, end_pair in regions:
        if num_bytes:  # else the message is empty
            s_low, s_high, s_located = _clip(student, student_byte, num_bytes)
            t_low, t_high, t_located = _clip(teacher, teacher_byte, num_bytes)
            alignment = align_located(
                student_ids[s_low:s_high], teacher_ids[t_low:t_high], s_located, t_located,
                student_table, teacher_table, num_bytes, pair_eos=False)
            placed.append(PlacedAlignment(s_low, t_low, alignment))
        if end_pair:
            # what ends a message on either side is a chunk of its own, without bytes
            pair = _with_pair(_no_chunks(1, 1, text_bytes=0), 0, 0)
            placed.append(PlacedAlignment(*end_pair, pair))
    return join(placed, len(student_ids), len(teacher_ids))


def _clip(located, first, num_bytes):
    """Return (first token, last token + 1, Located of the tokens between) of a region."""
    last = first + num_bytes
    touches = (located.begin < last) & (located.end > first) & (located.begin >= 0)
    inside = np.flatnonzero(touches)
    low = inside[0] if len(inside) else 0
    high = inside[-1] + 1 if len(inside) else 0
    begin = located.begin[low:high]
    end = located.end[low:high]
    kind = located.kind[low:high]
    # a token that reaches over the border spells something else than its bytes of the region
    reaches_out = (begin >= 0) & ((begin < first) | (end > last)) & (kind != UNENCODABLE)
    kind = np.where(reaches_out, NORMALIZED, kind).astype(np.int8)
    clipped_begin = np.where(begin < 0, -1, np.clip(begin - first, 0, num_bytes))
    clipped_end = np.where(begin < 0, -1, np.clip(end - first, 0, num_bytes))
    return low, high, Located(clipped_begin, clipped_end, kind)


def unpadded_length(ids, table):
    """Return how many tokens of a right-padded row are not padding.

    Rows are padded with the pad token, or with eos where a tokenizer has no pad token or the same
    one; then the first eos of those at the end is text.
    """
    has_pad = table.pad >= 0 and table.pad != table.eos
    padding = table.pad if has_pad else table.eos
    text = np.flatnonzero(ids != padding)
    length = text[-1] + 1 if len(text) else 0
    if length < len(ids) and ids[length] == table.eos:
        length += 1
    return length


def common_cut(chunks, limits):
    """Return how many tokens to keep on either side to cut both at the same byte, between chunks.

    Args:
        chunks: chunk id per token, of student and teacher: (S,) and (T,) ints.
        limits: the most tokens to keep of student and teacher.
    """
    student_chunk, teacher_chunk = chunks
    student_limit, teacher_limit = limits
    if len(student_chunk) <= student_limit and len(teacher_chunk) <= teacher_limit:
        return [len(student_chunk), len(teacher_chunk)]
    # both sides have the same chunks in the same order, so that ends pair up
    student_ends = _chunk_ends(student_chunk)
    teacher_ends = _chunk_ends(teacher_chunk)
    fits = np.flatnonzero((student_ends <= student_limit) & (teacher_ends <= teacher_limit))
    if len(fits) == 0:  # nothing aligned fits: the student still learns from the text
        return [min(len(student_chunk), student_limit), min(len(teacher_chunk), teacher_limit)]
    return [int(student_ends[fits[-1]]), int(teacher_ends[fits[-1]])]


def cut_chunks(alignment, limits):
    """Cut both sides of a text at the same byte; keep chunks that both models predict as a whole.

    Args:
        alignment: Alignment of the whole text.
        limits: the most tokens to keep of student and teacher.
    Returns:
        (tokens kept of student and teacher, chunk ids of all of their tokens, -1: none is kept).
    """
    # Where one side alone spells a space that the text does not have, the models speak of other
    # words: such chunks are not compared.
    numbers = np.arange(len(alignment.same_bytes))
    # one entry more, so that chunk -1 (the last entry) stays -1
    usable = np.append(np.where(alignment.same_bytes, numbers, -1), -1)
    chunks = [usable[alignment.student_chunk], usable[alignment.teacher_chunk]]
    cuts = common_cut(chunks, limits)
    # A chunk needs a position that predicts its first token; without bos the first token has none.
    lost = [chunk[:1] for chunk in chunks]
    # One that does not fit has no part either.
    lost += [chunk[size : size + 1] for chunk, size in zip(chunks, cuts)]
    # where no chunk fits on both sides, one of them keeps tokens of some
    is_kept = []
    for chunk, size in zip(chunks, cuts):
        is_kept.append(np.bincount(chunk[:size] + 1, minlength=len(usable)) > 0)
    lost.append(np.flatnonzero(is_kept[0] != is_kept[1]) - 1)
    return cuts, without_chunks(chunks, np.concatenate(lost))


def without_chunks(chunks, lost):
    """Return the chunk ids of both sides with -1 in the place of the lost chunks."""
    return [np.where(np.isin(chunk, lost), -1, chunk) for chunk in chunks]


def _chunk_ends(chunk):
    """Return one more than the last token of every chunk, in reading order."""
    is_last = np.append(chunk[1:] != chunk[:-1], True)
    return np.flatnonzero((chunk >= 0) & is_last) + 1


# --- coverage -------------------------------------------------------------------------------------


def coverage(alignments):
    """Measure how much of the texts is in used chunks.

    Args:
        alignments: an Alignment or several.
    Returns:
        dict with these keys.  bytes, student_tokens, teacher_tokens: fraction in chunks, 0 to 1
        (control tokens count as tokens).  chunks: how many.  1:1, 1:n, n:1, n:m: fraction of the
        chunks with so many student : teacher tokens.  normalized, unencodable, unmatched: fraction
        of the bytes that were dropped for this reason.
    """
    if isinstance(alignments, Alignment):
        alignments = [alignments]
    alignments = list(alignments)  # it is gone through more than once
    shapes = np.zeros((2, 2), np.int64)  # [several student tokens, several teacher tokens]
    text_bytes = 0
    chunk_bytes = 0
    dropped = {"normalized": 0, "unencodable": 0, "unmatched": 0}
    for alignment in alignments:
        several_student = (alignment.student_tokens > 1).astype(int)
        several_teacher = (alignment.teacher_tokens > 1).astype(int)
        np.add.at(shapes, (several_student, several_teacher), 1)
        text_bytes += alignment.text_bytes
        chunk_bytes += int(alignment.chunk_bytes.sum())
        for reason in dropped:
            dropped[reason] += alignment.dropped[reason]

    chunks = int(shapes.sum())
    result = {
        "bytes": chunk_bytes / max(1, text_bytes),
        "student_tokens": _in_chunks([alignment.student_chunk for alignment in alignments]),
        "teacher_tokens": _in_chunks([alignment.teacher_chunk for alignment in alignments]),
        "chunks": chunks,
        "1:1": int(shapes[0, 0]) / max(1, chunks),
        "1:n": int(shapes[0, 1]) / max(1, chunks),
        "n:1": int(shapes[1, 0]) / max(1, chunks),
        "n:m": int(shapes[1, 1]) / max(1, chunks),
    }
    for reason, num_bytes in dropped.items():
        result[reason] = num_bytes / max(1, text_bytes)
    return result


def _in_chunks(chunks):
    """Return the fraction of tokens that have a chunk, over several texts."""
    aligned = sum(int((chunk >= 0).sum()) for chunk in chunks)
    return aligned / max(1, sum(map(len, chunks)))


if __name__ == "__main__":  # to look at it
    name = f"{__package__}.align_view" if __package__ else "align_view"
    if importlib.util.find_spec(name) is None:
        raise SystemExit("align.py: align_view.py, which shows alignments, is missing; copy it too")
    runpy.run_module(name, run_name="__main__")
