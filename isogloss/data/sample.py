"""Read one text with the student's and a teacher's tokenizer, align, cut both at the same byte.

A text is encoded once by each model (`EncodedText`) and aligned once with each teacher (`Pairing`).
Only then is it cut, because the shortest cut that any teacher's context asks for is the cut of all.

A position t of a model predicts the token at t + 1, so labels, chunk ids and byte counts are
shifted by one, here and nowhere else (`TokenRow`).

Shapes: S student tokens, T teacher tokens.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from isogloss.align import (
    Alignment,
    Located,
    TokenTable,
    adds_bos,
    align_located,
    cut_chunks,
    fingerprint,
    locate,
    without_chunks,
)
from isogloss.data.texts import check_size


class TokenBeyondHead(ValueError):
    """Say that a text holds a control token that a model cannot read."""


def check_ids(ids, vocab, tokenizer):
    """Raise a TokenBeyondHead for ids of a text beyond the tokens of a model.

    Args:
        ids: list of them; vocab: tokens of the model; tokenizer: of the ids.
    """
    highest = max(ids, default=-1)
    if highest >= vocab:
        raise TokenBeyondHead(f"a text holds {tokenizer.convert_ids_to_tokens(highest)!r}, for "
                              f"which the lm_head of {tokenizer.name_or_path} has no row (id "
                              f"{highest}, its tokens go to {vocab - 1}); take it out of the data")


@dataclass
class TextEncoder:
    """Read text as one model does.

    Attributes:
        tokenizer: a fast Hugging Face tokenizer.
        max_length: positions per sample, at most.
        template_kwargs: what its chat template is told beside a chat.
        generation: what its generation_config.json says; see `ends`.
        frames: {roles: `chat.Frame` of the chat template}, as they are found.
        trial: of the chat template, "now" or "passed"; see `turns.tried`.
    """

    tokenizer: object
    table: TokenTable
    max_length: int
    template_kwargs: dict = field(default_factory=dict)
    generation: dict = field(default_factory=dict)
    frames: dict = field(default_factory=dict, init=False)
    trial: str = field(default="", init=False)

    def coded(self, texts, **options):
        """Return what the tokenizer makes of a text or of several, without special tokens."""
        check_size(texts)
        # Never truncated here: where to cut depends on the other side, see `cut_sample`.
        return self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False,
                              **options)

    @cached_property
    def header(self):
        """Return the `turns.Header` of the chat template."""
        from isogloss.data.turns import Template, header_of

        return header_of(Template(self).try_write)

    @cached_property
    def template_end(self):
        """Return the token with which the chat template ends a turn of the assistant; -1: none.

        Without a template, or where it wants other chats, that of the vocabulary's name for it.
        """
        if not self.tokenizer.chat_template:
            return self.table.end_of_turn
        from isogloss.data.turns import end_of_answer

        return end_of_answer(self)

    def encode(self, texts):
        """Return an int64 array `[bos] text eos` for each text.

        bos is added where `align.adds_bos` says so; eos whenever the tokenizer has one; neither to
        a text that has its own.
        """
        encoded = []
        for ids in self._ids_of(texts):
            self.check_ids(ids)
            prefix, suffix = self._added_to(ids)
            encoded.append(np.array(prefix + ids + suffix, np.int64))
        return encoded

    def _added_to(self, ids):
        """Return what `encode` puts in front of the ids of a text, and behind them."""
        prefix = [self.table.bos] if self._adds_bos and ids[:1] != [self.table.bos] else []
        suffix = [self.table.eos] if self.table.eos >= 0 and ids[-1:] != [self.table.eos] else []
        return prefix, suffix

    def _ids_of(self, texts):
        """Return the ids of each text, without special tokens."""
        if type(self.tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus:
            return self.coded(texts)["input_ids"]  # does more than its backend
        check_size(texts)
        self.coded("")  # sets the backend's options
        # does not place the tokens in the text, and makes no masks: a third of the time
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(
            texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def has_tokenizer_of(self, other):
        return fingerprint(self.tokenizer) == fingerprint(other.tokenizer)

    def check_ids(self, ids):
        check_ids(ids, len(self.table), self.tokenizer)

    def locate(self, ids, text):
        """Return where in the text the tokens of `encode` stand, as a Located."""
        located = locate(ids, self.table, text)
        if located is None:  # bytes do not tell, so the tokenizer's own offsets have to
            located = locate(ids, self.table, text, self._offsets(text))
        return located

    @cached_property
    def _adds_bos(self):
        return adds_bos(self.tokenizer, self.table.bos)

    def _offsets(self, text):
        """Return (tokens, 2) characters of the text for each token of `encode`."""
        coded = self.coded(text, return_offsets_mapping=True)
        nowhere = [(0, 0)]  # bos and eos stand for no characters
        prefix, suffix = self._added_to(coded["input_ids"])
        offsets = [*nowhere * len(prefix), *coded["offset_mapping"], *nowhere * len(suffix)]
        return np.array(offsets).reshape(-1, 2)


@dataclass
class EncodedText:
    """Hold one text as one model reads it, before any cut.

    Attributes:
        ids: (S,) int64, with bos and eos.
        located: where in the text (of a chat: in its rendering) the tokens stand.
        num_bytes: (S,) int64, bytes that each token stands for; -1 for those that do not count.
        learned: (S,) bool, tokens to learn from; None: all of them.
        logp: (S,) float32, of a rollout, log-probability of each token when the student wrote it,
            NaN for those of its prompt; None: no rollout.
        num_overlaps: of a chat, turns that are left out because they overlap with others.
    """

    ids: np.ndarray
    located: Located
    num_bytes: np.ndarray
    learned: np.ndarray | None = None
    logp: np.ndarray | None = None
    num_overlaps: int = 0

    def without_last(self):
        """Return the text without its last token; not for what is learned."""
        located = Located(*[field[:-1] for field in self.located])
        return EncodedText(self.ids[:-1], located, self.num_bytes[:-1])


@dataclass
class Pairing:
    """Hold what one teacher makes of a text.

    Attributes:
        teacher: the text as the teacher reads it; None: this teacher takes no part.
        alignment: of the whole text; None without a teacher.
        skipped: the teacher, or the student itself, could not render this chat.
    """

    teacher: EncodedText | None = None
    alignment: Alignment | None = None
    skipped: bool = False


class TokenRow(NamedTuple):
    """One model's side of a sample; entry t of labels and num_bytes speaks of the token after t.

    ids, labels, num_bytes: (S,) int64; labels are -100 and bytes -1 where nothing is learned.
    logp: (S,) float32 of a rollout, log-probability of the label when the student wrote it, NaN
        where it did not; None: no rollout.
    """

    ids: np.ndarray
    labels: np.ndarray
    num_bytes: np.ndarray
    logp: np.ndarray | None = None


NO_TOKENS = TokenRow(*[np.zeros(0, np.int64)] * 3)
NO_CHUNKS = np.zeros(0, np.int64)


@dataclass
class PairSample:
    """Hold a cut text for one teacher.

    Attributes:
        teacher: its tokens; none if it takes no part.
        student_chunk, teacher_chunk: (S,), (T,) int64, chunk of each predicted token, -1 for none.
        read_student_chunk, read_teacher_chunk: likewise, also of chunks that are read and not
            learned: what a term knows of the chunk before it does not depend on who wrote that.
        alignment: of the whole text, before the cut; None without a teacher.
        aligned_bytes: bytes in the chunks that are left after the cut.
        skipped: see `Pairing`.
        is_rendered: student and teacher read renderings of it, not one text.
        weight: of its terms, see `Example`.
    """

    teacher: TokenRow = NO_TOKENS
    student_chunk: np.ndarray = field(default_factory=lambda: NO_CHUNKS)
    teacher_chunk: np.ndarray = field(default_factory=lambda: NO_CHUNKS)
    read_student_chunk: np.ndarray = field(default_factory=lambda: NO_CHUNKS)
    read_teacher_chunk: np.ndarray = field(default_factory=lambda: NO_CHUNKS)
    alignment: Alignment | None = None
    aligned_bytes: int = 0
    skipped: bool = False
    is_rendered: bool = False
    weight: float = 1.0

    @property
    def num_chunk_ids(self):
        """Return one more than the highest chunk id on either side."""
        # these hold the chunks that are learned too
        chunks = self.read_student_chunk, self.read_teacher_chunk
        return 1 + max(int(chunk.max(initial=-1)) for chunk in chunks)


@dataclass
class Sample:
    """Hold a cut text.

    Attributes:
        student: the student's tokens.
        pairs: PairSample of each teacher, what it makes of them.
        has_labels: something would be learned of the whole text.
        num_overlaps: see `EncodedText`, of student and teachers.
    """

    student: TokenRow
    pairs: list
    has_labels: bool = False
    num_overlaps: int = 0


def encode_text(text, ids, encoder, context=0):
    """Return the EncodedText of a plain text whose ids are known.

    Args:
        context: characters at the beginning of the text from which nothing is learned, and of which
            no byte counts.
    """
    located = encoder.locate(ids, text)
    num_bytes = bytes_of_tokens(located)
    if not context:
        return EncodedText(ids, located, num_bytes)
    # from the first token that reaches behind the context, so that no byte behind it is left out
    learned = np.cumsum(located.end > len(text[:context].encode(errors="replace"))) > 0
    if len(ids) and ids[-1] == encoder.table.eos:
        learned[-1] = True
    return EncodedText(ids, located, np.where(learned, num_bytes, -1), learned)


def bytes_of_tokens(located):
    """Return (S,) bytes of the text that each token stands for, -1 for a control token."""
    # -1, not 0: a token of the text may stand for no byte, as the space before SentencePiece texts
    return np.where(located.begin < 0, -1, located.end - located.begin)


def pair_texts(text, student, teacher, student_table, teacher_table, aligner="bytes",
               *, pair_eos=True):
    """Align two readings, EncodedText each, of one plain text.

    Args:
        aligner: "bytes": chunks by byte positions; "dp": by dynamic programming (align_dp.py).
        pair_eos: of "bytes", see `align.align_located`.
    Returns:
        Pairing.
    """
    tables = student_table, teacher_table
    if aligner == "dp":
        from isogloss.align_dp import align_dp

        # compares what tokens spell, so it needs no places in the text
        return Pairing(teacher, align_dp(student.ids, teacher.ids, *tables))
    size = len(text.encode(errors="replace"))  # lone surrogates have no UTF-8
    return Pairing(teacher, align_located(
        student.ids, teacher.ids, student.located, teacher.located, *tables, size, pair_eos))


def cut_sample(student, pairings, student_max_length, teacher_max_lengths):
    """Cut a text for the student and all its teachers at the same student token.

    Args:
        student: EncodedText; None: the student cannot read this text, so that nothing is left.
        pairings: a Pairing for each teacher.
        student_max_length, teacher_max_lengths: positions, at most.
    Returns:
        Sample.
    """
    if student is None:
        pairs = [PairSample(skipped=pairing.skipped) for pairing in pairings]
        return Sample(NO_TOKENS, pairs)
    learned = np.ones(len(student.ids)) if student.learned is None else student.learned
    has_labels = bool(learned[1:].any())  # nothing predicts the first token
    readings = [student, *[pairing.teacher for pairing in pairings if pairing.teacher]]
    num_overlaps = sum(reading.num_overlaps for reading in readings)
    limit = student_max_length + 1  # n positions predict the tokens 1 .. n
    while True:
        pairs = []
        lengths = []
        for pairing, teacher_max_length in zip(pairings, teacher_max_lengths):
            cut, pair = cut_pair(student, pairing, limit, teacher_max_length + 1)
            pairs.append(pair)
            lengths.append(len(student.ids[: cut - 1]))
        if not pairs:
            return Sample(_student_row(student, limit), [], has_labels, num_overlaps)
        # A teacher with a short context asks all others for its cut, whose chunks may need
        # another one again: this ends because the limit falls each time.
        shortest = min(lengths) + 1
        if max(lengths) + 1 == shortest:
            return Sample(_student_row(student, cut), pairs, has_labels, num_overlaps)
        limit = shortest


def _student_row(student, cut):
    """Return the TokenRow of the first `cut` tokens, labels only where they are learned."""
    labels = student.ids
    if student.learned is not None:
        labels = np.where(student.learned, student.ids, -100)
    logp = None if student.logp is None else student.logp[1:cut]
    # A text below the limit keeps its last token as a position that predicts nothing.
    return TokenRow(student.ids[: cut - 1], labels[1:cut], student.num_bytes[1:cut], logp)


def cut_pair(student, pairing, student_limit, teacher_limit):
    """Cut a teacher's Pairing, and find out where that cuts the student's EncodedText.

    Args:
        student_limit, teacher_limit: tokens to keep, at most.
    Returns:
        (student tokens kept, PairSample).
    """
    alignment = pairing.alignment
    if alignment is None:
        no_chunk = np.full(len(student.ids), -1)[1:student_limit]
        return student_limit, PairSample(student_chunk=no_chunk, read_student_chunk=no_chunk,
                                         skipped=pairing.skipped)
    (student_cut, teacher_cut), read_chunks = cut_chunks(alignment, [student_limit, teacher_limit])
    chunks = read_chunks
    if student.learned is not None:  # a chunk is learned as a whole or not at all
        chunks = without_chunks(read_chunks, read_chunks[0][~student.learned])
    teacher = pairing.teacher
    num_bytes = teacher.num_bytes
    is_cut = student_cut < len(student.ids) or teacher_cut < len(teacher.ids)
    if is_cut and (read_chunks[1][:teacher_cut] < 0).all():  # at another byte on each side
        num_bytes = np.full_like(num_bytes, -1)
    pair = PairSample(
        teacher=TokenRow(teacher.ids[: teacher_cut - 1], teacher.ids[1:teacher_cut],
                         num_bytes[1:teacher_cut]),
        student_chunk=chunks[0][1:student_cut], teacher_chunk=chunks[1][1:teacher_cut],
        read_student_chunk=read_chunks[0][1:student_cut],
        read_teacher_chunk=read_chunks[1][1:teacher_cut], alignment=alignment,
        skipped=pairing.skipped)
    kept = pair.student_chunk[pair.student_chunk >= 0]
    kept = kept[np.diff(kept, prepend=-1) != 0]  # once each: the tokens of a chunk are neighbors
    pair.aligned_bytes = int(alignment.chunk_bytes[kept].sum())
    return student_cut, pair
