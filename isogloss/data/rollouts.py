"""Choose the samples that the student writes itself, make their prompts, read what it wrote.

Which samples are rollouts, and every draw inside of one, is a function of counters: (seed, position
in the data stream, copy, place).  So rollouts do not depend on ranks, micro-batches or resumes.

This runs in data workers and in the training process;
isogloss/writing/on_policy.py lets the student write.
Tests: tests/test_rollouts.py.
"""

import json
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from isogloss.align import Alignment, Located, locate
from isogloss.data.batch_types import Example
from isogloss.data.open_data import first_rows
from isogloss.data.options.text_keys import read_by_teachers
from isogloss.data.sample import (
    EncodedText,
    Pairing,
    TextEncoder,
    TokenBeyondHead,
    bytes_of_tokens,
    encode_text,
    pair_texts,
)
from isogloss.doors import door
from isogloss.rollout import Completion, uniform

PROMPTS_TO_TRY = 64  # rows of which one has to give a prompt

# first counters of what is drawn, so that no two draws share all of theirs
CHOICE = 1  # of the samples that are rollouts
TRAINING = 2
HELD_OUT = 3
ANSWERS = 4  # of isogloss-write

CHARACTERS_PER_TOKEN = 32  # of a text, more than prompts take; only so much of it is tokenized


class SkippedPrompt(ValueError):
    """Say that a row gives no prompt."""


class Slot(NamedTuple):
    """Name the rollout that a position of the data stream may be.

    source: position whose row gives the prompt.
    copy: number of the rollout among those of this prompt.
    is_new: it is written for this step; else an earlier step of its batch has written it.
    """

    source: int
    copy: int
    is_new: bool


@dataclass
class RolloutPrompt:
    """Hold what a rollout begins with, as the student reads it.

    Attributes:
        key: (source, copy) of its Slot.
        ids: (S,) int64.
        text: what they stand for; of a chat its rendering, up to where the assistant speaks.
        located: where in this text the tokens stand.
        messages: of a chat, those before the rollout; None: a text.
        max_new_tokens: for which there is room.
        tools: of a chat, what the assistant may call; None: nothing.
        taught: of a chat, the messages before the rollout as teachers read them, who may read more.
        row: of the data, as an environment reads it; None: nothing asks for it.
        reads_taught: what writes is a teacher, and `ids` and `text` are those of `taught`.
    """

    key: tuple
    ids: np.ndarray
    text: str
    located: Located
    messages: list | None
    max_new_tokens: int
    tools: list | None = None
    taught: list | None = None
    row: dict | None = None
    reads_taught: bool = False


class WrittenTurn(NamedTuple):
    """Name what of a rollout the student wrote in one turn.

    first, last: of its tokens, of the bytes of its text; the last ones are not of it.
    message: number among those behind the prompt.
    ended: its last token ends it.
    judged: up to which byte teachers read it in a form of their own.
    """

    first: int
    last: int
    first_byte: int
    last_byte: int
    message: int
    ended: bool
    judged: int


@dataclass
class OldRollout:
    """Stand for a rollout that an earlier step has written."""

    key: tuple


@dataclass
class Rollout:
    """Hold what the student wrote.

    Attributes:
        prompt: RolloutPrompt.
        ids: (N,) int64, the sampled tokens, which are what is trained on; of several turns also
            those of what an environment says in between.
        logp: (N,) float32, their log-probability when they were drawn, nats, NaN where the student
            did not write; None: another than the student wrote them, so that they are text to
            learn.
        entropy: mean entropy of the student there, nats.
        ended: the last token is an end of text or of a turn; else the rollout was cut.
        text: what the sampled tokens spell without control tokens, U+FFFD for what is no UTF-8.
        repeated: fraction of its 4-grams of tokens that it holds before.
        is_canonical: the tokenizer makes these tokens of the text.
        temperature, top_p: with which they were drawn, and that `logp` is of.
        turns: WrittenTurns; None: all of it is one.
        messages: of a chat, those behind the prompt, as teachers read them; None: its text is one.
        episode: what an environment said of it, see `episodes.Episode.outcome`; None: none was
            asked.
    """

    prompt: RolloutPrompt
    ids: np.ndarray
    logp: np.ndarray
    entropy: float
    ended: bool
    text: str
    repeated: float
    is_canonical: bool
    temperature: float = 1.0
    top_p: float = 1.0
    turns: list | None = None
    messages: list | None = None
    episode: dict | None = None

    def spans(self):
        """Return its WrittenTurns."""
        size = len(self.text.encode())
        return self.turns or [WrittenTurn(0, len(self.ids), 0, size, 0, self.ended, size)]

    @property
    def is_written(self):
        """Return (N,) bool: the student wrote it."""
        if self.logp is None:
            return np.ones(len(self.ids), bool)
        return ~np.isnan(self.logp)

    def to_plain(self):
        prompt = self.prompt
        return {
            "key": list(prompt.key), "prompt_ids": prompt.ids.tolist(), "prompt": prompt.text,
            "located": [field.tolist() for field in prompt.located],
            "messages": prompt.messages, "max_new_tokens": prompt.max_new_tokens,
            "tools": prompt.tools, "taught": prompt.taught,
            "ids": self.ids.tolist(), "logp": self.logp.tolist(), "entropy": self.entropy,
            "ended": self.ended, "text": self.text, "repeated": self.repeated,
            "is_canonical": self.is_canonical, "temperature": self.temperature,
            "top_p": self.top_p, "turns": self.turns, "messages_behind": self.messages,
            "episode": self.episode,
        }

    @classmethod
    def from_plain(cls, plain):
        """Make a Rollout of what `to_plain` returned."""
        begin, end, kind = plain["located"]
        located = Located(np.array(begin, np.int64), np.array(end, np.int64),
                          np.array(kind, np.int8))
        prompt = RolloutPrompt(
            tuple(plain["key"]), np.array(plain["prompt_ids"], np.int64), plain["prompt"], located,
            plain["messages"], plain["max_new_tokens"], plain.get("tools"),
            plain.get("taught", plain["messages"]))
        turns = [WrittenTurn(*turn) for turn in plain.get("turns") or []]
        return cls(prompt, np.array(plain["ids"], np.int64), np.array(plain["logp"], np.float32),
                   plain["entropy"], plain["ended"], plain["text"], plain["repeated"],
                   plain["is_canonical"], plain.get("temperature", 1.0), plain.get("top_p", 1.0),
                   turns or None, plain.get("messages_behind"), plain.get("episode"))


# --- which samples, which prompts -----------------------------------------------------------------


@dataclass
class Draft:
    """Hold a micro-batch whose rollouts are still to be written.

    Attributes:
        examples: Example each; of rollouts the content is a `rollouts.RolloutPrompt`, or an
            `rollouts.OldRollout`.
        sample_ids: see `batch_types.Batch`.
        skipped_prompts: samples that are left out because they give no prompt.
        place: see `batch_types.Batch`.
    """

    examples: list
    sample_ids: list
    skipped_prompts: int = 0
    place: dict | None = None


@dataclass
class Prompter:
    """Choose rollouts and make their prompts.

    Attributes:
        seed: of the run.
        share: of the samples that are rollouts, 0 to 1.
        samples_per_step: over all ranks and micro-batches.
        prompt_tokens: of a text that are its prompt.
        rollout_tokens: to write, at most.
        per_prompt: rollouts of one prompt, neighbors in the stream.
        every: steps that share one batch of rollouts.
    """

    encoder: TextEncoder
    seed: int
    share: float
    samples_per_step: int
    prompt_tokens: int
    rollout_tokens: int
    per_prompt: int = 1
    every: int = 1

    def slot(self, position):
        """Return the Slot of a position of the stream if it is a rollout, else None."""
        step, place = divmod(position, self.samples_per_step)
        first_step = step - step % self.every
        copy = place % self.per_prompt
        source = first_step * self.samples_per_step + place - copy
        if uniform(self.seed, CHOICE, source) >= self.share:
            return None
        return Slot(source, copy, step == first_step)

    def prompt(self, example, key):
        """Return the RolloutPrompt of an Example.

        Raises:
            SkippedPrompt: it is empty or too long, or the chat template refuses it.
        """
        whole = example.prompt is not None
        content = example.prompt if whole else example.content
        if isinstance(content, str):
            if example.row is not None:
                raise SkippedPrompt("a row is a text, and --environment answers in chats")
            ids, text, located = self._text_prompt(content, whole)
            messages = taught = None
        else:
            messages = messages_before_rollout(content, whole)
            taught, _ = read_by_teachers(example._replace(content=messages))
            ids, text, located = chat_prompt(messages, self.encoder, example.tools)
        # n positions predict n tokens, of which the first is not predicted
        room = self.encoder.max_length + 1 - len(ids)
        if room < 1:
            raise SkippedPrompt(f"a prompt has {len(ids)} tokens, and --max_length "
                                f"{self.encoder.max_length} leaves no room behind it")
        return RolloutPrompt(key, ids, text, located, messages, min(self.rollout_tokens, room),
                             example.tools, taught, _plain_row(example.row))

    def _text_prompt(self, text, whole):
        """Return (ids, text, Located) of a text, or of its beginning."""
        if not whole:
            text = text[: CHARACTERS_PER_TOKEN * self.prompt_tokens]
        ids, = self.encoder.encode([text])
        located = self.encoder.locate(ids, text)
        if self.encoder.table.eos >= 0:
            ids = ids[:-1]
        size = len(ids)
        if not whole:
            has_bos = int(size > 0 and self.encoder.table.special[ids[0]])
            num_tokens = size - has_bos
            # of a short text the first half, so that there is something to write
            size = has_bos + min(self.prompt_tokens, -(-num_tokens // 2))
        raw = text.encode(errors="replace")
        while size < len(ids) and _is_inside_character(raw, _end_of(located, size)):
            size += 1
        if not size:
            raise SkippedPrompt("a prompt is empty, and the student's tokenizer has no bos")
        prompt_text = raw[: _end_of(located, size)].decode(errors="replace")
        return ids[:size], prompt_text, Located(*[field[:size] for field in located])

    def draft(self, stream, sample_ids):
        """Return the Draft of a micro-batch of a stream of samples."""
        draft = Draft([], list(sample_ids))
        rows = {}  # a stream gives each row once, and a prompt may have several rollouts
        for position in sample_ids:
            slot = self.slot(position)
            if slot and not slot.is_new:
                draft.examples.append(Example(OldRollout((slot.source, slot.copy))))
                continue
            source = slot.source if slot else position
            if source not in rows:
                rows[source] = stream.example(source)
            example = rows[source]
            if slot:
                try:
                    prompt = self.prompt(example, (slot.source, slot.copy))
                    example = example._replace(content=prompt)
                except SkippedPrompt as error:
                    warnings.warn(f"{error}; such samples are left out", stacklevel=2)
                    example = Example(None)
                    draft.skipped_prompts += 1
            draft.examples.append(example)
        return draft

    def as_if_written(self, example):
        """Return an Example of which the student wrote the end of its prompt once more."""
        try:
            prompt = self.prompt(example, (0, 0))
        except SkippedPrompt:
            return Example(None)
        table = self.encoder.table
        ids = torch.from_numpy(prompt.ids[~table.special[prompt.ids]][-prompt.max_new_tokens :])
        nothing = torch.zeros(len(ids))
        rollout = completed(prompt, Completion(ids, nothing, nothing, ended=False), self.encoder)
        return Example(rollout if len(ids) else None, example.route)


def _plain_row(row):
    return None if row is None else json.loads(json.dumps(row, default=str))


def _end_of(located, size):
    return int(located.end[:size].max(initial=0))


def _is_inside_character(raw, place):
    return place < len(raw) and raw[place] & 0xC0 == 0x80  # UTF-8 goes on


def messages_before_rollout(messages, whole):
    """Return the messages before the last one if that is the assistant's, else all of them.

    Of a column of prompts all of them are asked.
    """
    is_answered = messages and messages[-1]["role"] == "assistant" and not whole
    return list(messages[:-1] if is_answered else messages)


def chat_prompt(messages, encoder, tools=None):
    """Return (ids, text, Located) of a chat up to where the assistant speaks."""
    if not messages:
        raise SkippedPrompt("a chat begins with the assistant, so there is no prompt")
    chats = door("chats")
    try:
        text = chats.Template(encoder, tools).write(messages, is_prompt=True)
    except chats.SkippedChat as error:
        raise SkippedPrompt(str(error)) from None
    ids, located = chats.read_rendering(text, encoder)
    return ids, text, located


# --- what was written, as the student and the teachers read it ------------------------------------


def completed(prompt, completion, encoder):
    """Return the Rollout of a prompt and its `rollout.Completion`."""
    ids = completion.ids.numpy()
    text = encoder.table.decode(ids).decode(errors="replace")
    entropy = float(completion.entropy.mean()) if len(ids) else 0.0
    return Rollout(prompt, ids, completion.logp.numpy(), entropy, completion.ended, text,
                   repeated_4grams(ids), is_canonical(prompt, ids, text, encoder),
                   completion.temperature, completion.top_p)


def repeated_4grams(ids):
    """Return the fraction of 4-grams that stand earlier in the same ids."""
    grams = list(zip(ids.tolist(), ids[1:].tolist(), ids[2:].tolist(), ids[3:].tolist()))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_canonical(prompt, ids, text, encoder):
    """Tell whether the tokenizer makes of prompt and text the tokens that they have."""
    canonical = np.array(encoder.coded(prompt.text + text)["input_ids"], np.int64)
    whole = np.concatenate([prompt.ids, ids])
    special = encoder.table.special
    if canonical.max(initial=0) >= len(special):  # the name of a control token, letter by letter
        return False
    return np.array_equal(canonical[~special[canonical]], whole[~special[whole]])


def student_reading(rollout, encoder):
    """Return the EncodedText of a rollout: its prompt, then what was written, learned alone."""
    prompt = rollout.prompt
    data = rollout.text.encode(errors="replace")
    first_byte = len(prompt.text.encode(errors="replace"))
    # control tokens stand for no text wherever they are, nor do words of an environment
    begin, end = np.full((2, len(rollout.ids)), -1)
    kind = np.zeros(len(rollout.ids), prompt.located.kind.dtype)
    learned = np.zeros(len(rollout.ids), bool)
    for turn in rollout.spans():
        inside = slice(turn.first, turn.last)
        text = data[turn.first_byte : turn.last_byte].decode(errors="replace")
        written = locate(rollout.ids[inside], encoder.table, text)
        shift = first_byte + turn.first_byte
        begin[inside] = np.where(written.begin < 0, -1, written.begin + shift)
        end[inside] = np.where(written.end < 0, -1, written.end + shift)
        kind[inside] = written.kind
        learned[inside] = True
    located = Located(*[np.concatenate(both) for both in zip(prompt.located, (begin, end, kind))])
    learned = np.concatenate([np.zeros(len(prompt.ids), bool), learned])
    num_bytes = np.where(learned, bytes_of_tokens(located), -1)
    logp = None
    if rollout.logp is not None:
        unknown = np.full(len(prompt.ids), np.nan, np.float32)
        logp = np.concatenate([unknown, rollout.logp])
    ids = np.concatenate([prompt.ids, rollout.ids])
    return EncodedText(ids, located, num_bytes, learned, logp)


def read_rollout(collator, rollout, takes_part):
    """Return (EncodedText, [Pairing]) of what the student wrote."""
    student = student_reading(rollout, collator.student)
    pairings = []
    for pair, wanted in zip(collator.pairs, takes_part):
        pairing = Pairing()
        if wanted:
            encoders = collator.student, pair.encoder
            pairing = pair_rollout(rollout, student, encoders, collator.aligner,
                                   pair.same_tokenizer)
        pairings.append(pairing)
    return student, pairings


def pair_rollout(rollout, student, encoders, aligner="bytes", same_tokenizer=False):
    """Align a rollout's `student_reading` with a teacher's reading of it.

    Args:
        encoders: (student's, teacher's).
        same_tokenizer: both have one tokenizer, so the teacher reads the sampled tokens themselves;
            else it reads what its tokenizer makes of their text.
    Returns:
        Pairing.
    """
    if same_tokenizer:
        return _pair_ids(rollout, student, encoders[1])
    if rollout.prompt.messages is None:
        return _pair_text(rollout, student, encoders, aligner)
    return _pair_chat(rollout, student, encoders, aligner)


def _pair_ids(rollout, student, encoder):
    """Pair each sampled token with itself, behind the teacher's own form of the prompt."""
    prompt = rollout.prompt
    if prompt.messages is not None:
        try:
            ids, text, located = chat_prompt(prompt.taught, encoder, prompt.tools)
            prompt = replace(prompt, ids=ids, text=text, located=located)
            if rollout.turns:
                rollout = door("environment").heard_by(rollout, encoder)
        except SkippedPrompt:
            return Pairing(skipped=True)
    read = student_reading(replace(rollout, prompt=prompt), encoder)
    num_bytes = np.maximum(student.num_bytes[student.learned], 0)
    size = len(num_bytes)
    every = np.ones(size, bool)
    ones = np.ones(size, np.int64)
    text_bytes = int(num_bytes.sum())
    dropped = {"normalized": 0, "unencodable": 0, "unmatched": 0}
    return Pairing(read, Alignment(
        _numbered(student.learned), _numbered(read.learned),
        chunk_start=num_bytes.cumsum() - num_bytes, chunk_bytes=num_bytes, student_tokens=ones,
        teacher_tokens=ones, exact=every, same_bytes=every, text_bytes=text_bytes,
        dropped=dropped))


def _numbered(is_chunk):
    """Return chunks: one for each token that is one, -1 for others."""
    return np.where(is_chunk, is_chunk.cumsum() - 1, -1)


def _pair_text(rollout, student, encoders, aligner):
    text = rollout.prompt.text + rollout.text
    tables = encoders[0].table, encoders[1].table
    try:
        ids, = encoders[1].encode([text])
    except TokenBeyondHead:  # what the student writes ends no run
        return Pairing(skipped=True)
    teacher = encode_text(text, ids, encoders[1], len(rollout.prompt.text))
    if not rollout.ended and len(ids) and ids[-1] == tables[1].eos:
        teacher = teacher.without_last()  # a rollout that was cut has no end on either side
    return pair_texts(text, student, teacher, *tables, aligner, pair_eos=rollout.ended)


def _pair_chat(rollout, student, encoders, aligner):
    """Align what the assistant wrote; the teacher reads the chat by its own template."""
    chats = door("chats")
    prompt = rollout.prompt
    before = len(prompt.taught)
    behind = rollout.messages or [{"role": "assistant", "content": rollout.text}]
    messages = [*prompt.taught, *behind]
    try:
        of_teacher = chats.render(messages, encoders[1], prompt.tools)
    except (chats.SkippedChat, TokenBeyondHead):
        return Pairing(skipped=True)
    encoded = chats.encode_chat(messages, of_teacher, encoders[1], "assistant", before)
    data = (prompt.text + rollout.text).encode(errors="replace")
    first_byte = len(prompt.text.encode(errors="replace"))
    turns = []
    for turn in rollout.spans():
        is_whole = turn.judged == turn.last_byte
        stop = len(prompt.ids) + turn.last - 1 if turn.ended and is_whole else None
        turns.append(chats.Turn(before + turn.message, first_byte + turn.first_byte,
                                first_byte + turn.judged, stop))
    of_student = chats.Rendering(student.ids, student.located, data, turns,
                                 has_tools=bool(prompt.tools))
    written = {turn.message for turn in turns}
    of_teacher.turns = [turn for turn in of_teacher.turns if turn.message in written]
    both = of_student, of_teacher
    return Pairing(encoded, chats.pair_chats(both, encoders, aligner))


def build_prompter(cfg, student, samples_per_step):
    """Return the Prompter of a run.

    Args:
        samples_per_step: over all ranks.
    """
    return Prompter(student, cfg.seed, cfg.on_policy, samples_per_step, cfg.prompt_tokens,
                    cfg.rollout_tokens, cfg.rollouts_per_prompt, cfg.rollout_every)


def check_prompts(cfg, dataset, reader, student, micro_batch_size):
    """Raise a ValueError where the first rows give no prompts.

    Args:
        student: its TextEncoder.
        micro_batch_size: of a rank.
    """
    if cfg.streaming and micro_batch_size % cfg.rollouts_per_prompt:
        raise ValueError(f"--rollouts_per_prompt {cfg.rollouts_per_prompt}: a stream gives each "
                         "prompt once, so it has to divide the micro-batch of "
                         f"{micro_batch_size}; choose another number, or leave out --streaming")
    prompter = build_prompter(cfg, student, 1)
    errors = []
    rows = first_rows(dataset, PROMPTS_TO_TRY, reader.text_key, cfg.data)
    for number, row in enumerate(rows):
        try:
            prompter.prompt(reader(row, number), (number, 0))
            return  # prompts that are skipped later are counted
        except SkippedPrompt as error:
            errors.append(error)
    if errors:
        raise ValueError(f"--on_policy: {errors[0]}; so it is with the first {len(errors)} rows; "
                         "repair them, or name other prompts with --prompt_key")
