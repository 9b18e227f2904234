"""Ask servers what they say of the texts of a run, and check before whether one fits it.

A server names the most likely tokens of each position, and the text's own.  All other tokens are
one event, as in a cache of them (docs/teachers.md).  A step is asked about as soon as its texts
are known, while the student trains on the step before.

Shapes: N positions of a text, M tokens that an answer names at one, K kept, T positions of a batch.
"""

import codecs
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from isogloss.data.workers import PATIENCE
from isogloss.errors import EngineStopped
from isogloss.job.sequence_group import join_sequence_group
from isogloss.job.several.together import together
from isogloss.job.watch import PERIOD
from isogloss.models.pretrained import load_config
from isogloss.teachers.mixing import FLOOR
from isogloss.teachers.protocol import TeacherSource, TeacherSpec, refuse
from isogloss.teachers.text_scores import (
    ScoredLogits,
    TextScores,
    batch_texts,
    check_truncated,
)
from isogloss.teachers.text_server import SPARE, Address, Requests, Spelled, TextServer, api_key
from isogloss.tiles import TopKLogits

# Entries that the answer to one request holds, at most: about 20 MB of JSON.  A text is never cut.
# Not tuned: larger answers save requests, smaller ones spread over more threads.
MOST_ENTRIES = 2**18
CONNECTIONS = 8  # requests of a rank that a server has at a time.  Not tuned.
START_TIMEOUT = 60.0  # seconds, before the first step: who misspells an address waits no longer
SLACK = 0.01  # by which probabilities may exceed 1 together, or miss it where all are named
LEAST_REST = 1e-7  # what is left of 1 after a float32 sum; less of it is noise
# Letters, digits, code, marks and scripts that tokenizers cut in their own ways.
PROBE = ("The quick brown fox, 1234567890 times!\n\tdef main(x):\n        return x**2  # naïve "
         "Ünïcode привет 東京 안녕 🙂")


# --- before the first step ------------------------------------------------------------------------


def check_server(spec, encoder, model_vocab, max_length):
    """Return the positions that a text may have on a server, None: as many as the model reads.

    All ranks reach the server; rank 0 lets it score a text.

    Args:
        spec: ServedSpec.
        encoder: TextEncoder of the tokenizer that --teacher_tokenizer names.
        model_vocab: tokens of the model, which may be more than the tokenizer's.
        max_length: what --teacher_max_length says; 0: as many as both allow.
    Raises:
        ValueError: what the server said, what was expected.
    """
    server = TextServer(spec.path, min(spec.timeout, START_TIMEOUT), api_key())
    model = server.describe()
    limit = None if model.context is None else model.context - SPARE
    if limit is not None and max(max_length, 2) > limit:
        raise ValueError(
            f"--teacher_max_length {max_length}: {spec.path} takes {model.context} tokens, so "
            f"{limit} positions of a text; use no more, or start the server with a larger "
            "--max-model-len")
    if dist.get_rank() == 0:
        ids = encoder.encode([PROBE])[0][: None if limit is None else limit + 1]
        check_answer(server, model, spec.output_topk, encoder, model_vocab, ids)
    return limit


def check_answer(server, model, top_k, encoder, model_vocab, ids):
    """Raise a ValueError where what a server says of a text does not fit this tokenizer."""
    [likely] = server.score(model, [ids.tolist()], min(top_k, model_vocab), speller(encoder))
    checked_scores(server, scored_text, likely, ids[1:], top_k, len(encoder.table), model_vocab)
    # a server that is asked with ids reads any vocabulary of this size; one that reads text has to
    # cut it as this tokenizer does, but for what it normalizes
    others, compared = other_spellings(encoder.tokenizer, ids[1:].tolist(), likely.spelled)
    if others > compared / (10 if server.takes_ids is False else 2):
        raise server.error(f"spells {others} of {compared} tokens of a text otherwise; name the "
                           "tokenizer of the served model with --teacher_tokenizer")


def other_spellings(tokenizer, ids, spelled):
    """Return (tokens that a server spells otherwise, tokens whose spelling can be compared)."""
    others = 0
    compared = 0
    for token, text in zip(ids, spelled):
        expected = tokenizer.decode([token]).strip()
        # a part of a character has no spelling, and some tokenizers hide spaces and marks
        if text and text.strip() and expected and "\ufffd" not in text + expected:
            compared += 1
            others += text.strip() != expected
    return others, compared


def speller(encoder):
    """Return the function that returns the `text_server.Spelled` of a list of ids."""
    table = encoder.table

    def spell(ids):
        ids = np.asarray(ids)
        pieces = [table.bytes_of(token) for token in ids]
        if ids[0] == table.bos:  # the server reads one, or none
            pieces[0] = b""
        first = int(ids[0] == table.bos)
        letter = encoder.coded("a")["input_ids"]
        if table.decode(letter)[:1] == b" " and pieces[first][:1] == b" ":  # so does the server's
            pieces[first] = pieces[first][1:]
        text, _ = codecs.utf_8_decode(b"".join(pieces), "replace", False)
        sizes = np.array(list(map(len, pieces)))
        begins = sizes.cumsum() - sizes
        begins[:first] = sizes.sum() + 1
        return Spelled(text, begins, sizes, table.special[ids])

    return spell


# --- answers --------------------------------------------------------------------------------------


def checked_scores(server, function, *arguments):
    """Return what a function makes of an answer; a DataError where it makes nothing."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise server.error(str(error)) from None


def scored_text(likely, labels_N, top_k, vocab, model_vocab):
    """Return the ScoredLogits of a text.

    Its entropies are those of the kept tokens and one event for all others, so lower bounds.

    Args:
        likely: text_server.Likely, in which each label occurs.
        labels_N: (N,) int64, the token that each position predicts.
        top_k: most likely tokens that the server was asked for, or that its model has.  0: of all
            but the label's probability the scores say nothing.
        vocab: tokens of the tokenizer: others, by which an lm_head is padded, never come.
        model_vocab: tokens of the model.
    Raises:
        ValueError: the answer names other tokens, fewer, or no probabilities.
    """
    if likely.ids_E.max(initial=0) >= model_vocab or likely.ids_E.min(initial=0) < 0:
        raise ValueError(f"names token {likely.ids_E.max()}, but the vocabulary of "
                         f"--teacher_tokenizer has {model_vocab}; name that of the served model")
    asked = min(top_k, model_vocab)
    if likely.counts_N.min(initial=asked) < asked:
        raise ValueError(f"names {likely.counts_N.min()} tokens of a position, {asked} were asked "
                         "for; ask for fewer with --teacher_output_topk")
    ids_NM, logp_NM = as_rows(likely)
    check_logp(logp_NM)
    padding = np.exp(np.where(ids_NM >= vocab, logp_NM, -np.inf)).sum(1)
    logp_NM = np.where(ids_NM >= vocab, -np.inf, logp_NM) - np.log1p(-padding)[:, None]
    is_label = ids_NM == labels_N[:, None]
    label_logp = np.where(is_label, logp_NM, -np.inf).max(1).clip(FLOOR)
    # of equal ones the server has chosen: a label beyond the number asked for is none of them
    is_beyond = is_label & (likely.counts_N > asked)[:, None]
    chosen_NM = np.where(is_beyond, -np.inf, logp_NM)
    order = (-chosen_NM).argsort(1, kind="stable")[:, : min(top_k, vocab)]
    top_ids = np.take_along_axis(ids_NM, order, 1)
    top_logp = np.take_along_axis(chosen_NM, order, 1)
    # where there are fewer, the text's own token comes again
    is_short = ~np.isfinite(top_logp)
    top_ids = np.where(is_short, labels_N[:, None], top_ids)
    top_logp = np.where(is_short, label_logp[:, None], top_logp)
    beside = ((top_ids == labels_N[:, None]) & ~is_short).any(1)
    events = np.concatenate([np.where(is_short, -np.inf, top_logp),
                             np.where(beside, -np.inf, label_logp)[:, None]], 1)
    rest = rest_of(events, top_logp[:, -1:].min(1, initial=np.inf), model_vocab - asked)
    events = np.concatenate([events, rest[:, None]], 1)
    mass = np.exp(events)
    kept_ids = np.concatenate([top_ids, labels_N[:, None]], 1)
    kept_logp = np.concatenate([top_logp, label_logp[:, None]], 1)
    scores = TextScores(
        logp_T=as_float(label_logp), entropy_T=as_float(-(mass * events.clip(FLOOR)).sum(1)),
        max_logp_T=as_float(kept_logp[:, 0]), correct_T=as_float(kept_ids[:, 0] == labels_N))
    rows = TopKLogits(torch.from_numpy(kept_ids).int(), as_float(kept_logp), vocab, as_float(rest),
                      torch.zeros(len(labels_N)))  # of logits whose scale is not known
    return ScoredLogits(rows, scores)


def as_rows(likely):
    """Return (N, M) ids and log-probabilities of a Likely, -1 and -inf where there are fewer."""
    counts = likely.counts_N
    shape = len(counts), int(counts.max(initial=1))
    ids = np.full(shape, -1, np.int64)
    logp = np.full(shape, -np.inf)
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    ids[row, column] = likely.ids_E
    logp[row, column] = likely.logp_E
    return ids, logp


def check_logp(logp):
    """Raise a ValueError where numbers are no log-probabilities."""
    if not (logp < SLACK).all():  # nor NaN
        raise ValueError("its log-probabilities are above 0, or no numbers; let vLLM answer with "
                         "--logprobs-mode raw_logprobs")


def rest_of(events_NM, least_N, num_others):
    """Return (N,) the log-probability of all tokens but those that events are; -inf: of none.

    It is what they miss to 1.  A float32 sum says no more of it than LEAST_REST, but none of the
    others is more likely than the least of the most likely tokens.

    Args:
        least_N: log-probability of that one; inf: no most likely one is known.
        num_others: tokens that no event is.
    Raises:
        ValueError: the events have no probabilities.
    """
    kept = np.exp(events_NM).sum(1)
    least = 0 if num_others else 1 - SLACK
    if kept.max(initial=0) > 1 + SLACK or kept.min(initial=1) < least:
        raise ValueError(f"its probabilities of a position have the sum {kept.max():.4g}; let vLLM "
                         "answer with --logprobs-mode raw_logprobs")
    if not num_others:
        return np.full(len(kept), -np.inf)
    return np.minimum(np.log(np.maximum(1 - kept, LEAST_REST)), least_N + np.log(num_others))


def as_float(values):
    return torch.from_numpy(np.asarray(values, np.float32))


# --- the kind -------------------------------------------------------------------------------------


@dataclass
class ServedSpec(TeacherSpec):
    """Describe a server, whose address is the path.

    Attributes:
        output_topk: tokens that it names of each position; 0: the text's own alone.
        tokenizer: hub id or directory of the model's tokenizer and config.
        timeout: see `text_server.TextServer`.
        sequence_parallel_size: neighboring ranks that hold shards of the same texts.
        trust_remote_code: run the Python code that comes with the tokenizer.
        spell: see `speller`.
    """

    output_topk: int = 256
    tokenizer: str = ""
    timeout: float = 600.0
    sequence_parallel_size: int = 1
    trust_remote_code: bool = False
    spell: object = field(default=None, repr=False, compare=False)

    lasting_name: ClassVar[str] = "served"  # a server may move
    only_output: ClassVar[str] = "topk"
    asks_ahead = True

    @property
    def unknown_metrics(self):
        names = "teacher_accuracy", "teacher_entropy", "top1_agreement"
        return () if self.output_topk else names

    @classmethod
    def check(cls, cfg):
        Address.of(cfg.teacher)
        where = f"--teacher {cfg.teacher}"
        super().check(cfg)
        refuse(cfg, where, {"teacher_cache": "which takes its place"})
        gives = f"{where} gives the {cfg.teacher_output_topk} most likely tokens alone"
        unknown = ()
        ways = "softened", "text"
        if not cfg.teacher_output_topk:
            gives = f"{where} with --teacher_output_topk 0 gives the text's own tokens alone"
            ways = ("text",)
            unknown = ("mean_p",)
        if cfg.teacher_output == "logits":
            raise ValueError(f"{gives}; leave out --teacher_output logits")
        check_truncated(cfg, gives, ways)
        if cfg.teacher_weights in unknown:
            raise ValueError(f"{gives}, so its {cfg.teacher_weights} is not known; use another "
                             f"--teacher_weights than {cfg.teacher_weights}, such as ce")
        if cfg.softens_truncated:
            raise ValueError(f"{gives}, and of all others their mass at temperature 1; leave out "
                             f"--temperature {cfg.temperature}")

    @classmethod
    def encoder(cls, cfg, load, student, roles):
        """Return the TextEncoder of the teacher, which reads no more than its server takes.

        Raises:
            ValueError: see `check_server`.
        """
        encoder, config = load()
        limit = check_server(cls.of(cfg, encoder, "cpu"), encoder, config.vocab_size,
                             cfg.teacher_max_length)
        return replace(encoder, max_length=min(encoder.max_length, limit or encoder.max_length))

    @classmethod
    def of(cls, cfg, encoder, device, student=None):
        return cls(
            path=cfg.teacher, vocab=len(encoder.table), device=device, output="topk",
            output_topk=cfg.teacher_output_topk, tokenizer=cfg.teacher_tokenizer,
            timeout=cfg.teacher_timeout,
            sequence_parallel_size=cfg.sequence_parallel, trust_remote_code=cfg.trust_remote_code,
            spell=speller(encoder))

    def load(self):
        return ServedTeacher(self)

    def silent(self):
        return SilentListener()


# --- the source -----------------------------------------------------------------------------------


class ServedTeacher(TeacherSource):
    """Ask a server about the texts of batches.

    Ranks that hold shards of the same sequences ask for some of their texts each, and share what
    they are told.
    """

    degree = 1
    takes_all_ranks = False

    def __init__(self, spec):
        self.spec = spec
        self.server = TextServer(spec.path, spec.timeout, api_key())
        self.model = self.server.describe()
        config = load_config("teacher", spec.tokenizer, spec.trust_remote_code)
        self.model_vocab = config.get_text_config().vocab_size
        self.requests = Requests(CONNECTIONS)
        self.pending = deque()  # (texts, futures) of batches that were not read yet
        self.asked_to_end = None  # outside of a job nobody waits for this rank
        self.group = None
        if spec.sequence_parallel_size > 1:
            self.group = join_sequence_group(spec.sequence_parallel_size)

    def request(self, batch):
        """Ask about the texts of a TeacherBatch."""
        texts = self._local(batch_texts(batch))
        self.pending.append((texts, self._ask([text.tokens for text in texts])))

    def wait(self, batches):
        if self.asked_to_end:
            asked = islice(self.pending, len(batches))
            together(partial(self._wait, [future for _, futures in asked for future in futures]))

    def end_when(self, asked_to_end):
        self.asked_to_end = asked_to_end

    def _wait(self, futures):
        """Wait until all Futures are done.

        Raises:
            DataError: see `targets`.
            EngineStopped: the job is asked to end, and they are not done after PATIENCE.
        """
        seconds = 0.0
        while wait(futures, PERIOD).not_done:
            seconds += PERIOD if self.asked_to_end() else 0.0
            if seconds > PATIENCE:
                raise EngineStopped
        for future in futures:
            future.result()

    def targets(self, batch):
        """Return the logits of a TeacherBatch; positions that belong to no text hold zeros.

        Raises:
            DataError: the server does not answer, or not to what it was asked.
            EngineError, EngineStopped: likewise in a job, on all its ranks.
        """
        if not self.pending:
            self.request(batch)
            self.wait([batch])
        texts, futures = self.pending.popleft()
        expected = self._local(batch_texts(batch))
        assert len(texts) == len(expected) and all(
            map(torch.equal, _tokens(texts), _tokens(expected))), "read in another order than asked"
        positions = [torch.zeros(0, dtype=torch.long), *[text.positions for text in texts]]
        scored = self._joined(futures).spread(torch.cat(positions), batch.labels.numel())
        scored = scored.to(self.spec.device)
        return self._shared(scored) if self.group else scored

    def score(self, texts):
        """Return the ScoredLogits of some texts, one behind the other.

        Args:
            texts: (N + 1,) int64 tokens each, of which the last N are scored.
        """
        return self._joined(self._ask(texts))

    def _local(self, texts):
        return texts[self.group.rank :: self.group.size] if self.group else texts

    def _ask(self, texts):
        """Return Futures of lists of ScoredLogits, in the order of the texts."""
        top_k = min(self.spec.output_topk, self.model_vocab)
        futures = []
        for group in groups_of(texts, MOST_ENTRIES // max(top_k, 1)):
            futures.append(self.requests.submit(self._score, group, top_k))
        return futures

    def _score(self, texts, top_k):
        """Return the ScoredLogits of each text; runs in a thread."""
        answers = self.server.score(self.model, [text.tolist() for text in texts], top_k,
                                    self.spec.spell)
        scored = []
        for text, likely in zip(texts, answers):
            labels = np.asarray(text[1:])
            scored.append(checked_scores(self.server, scored_text, likely, labels,
                                         self.spec.output_topk, self.spec.vocab, self.model_vocab))
        return scored

    def _joined(self, futures):
        width = min(self.spec.output_topk, self.spec.vocab) + 1
        scored = list(chain.from_iterable(future.result() for future in futures))
        return ScoredLogits.joined(scored or [ScoredLogits.empty(width, self.spec.vocab)])

    def _shared(self, scored):
        """Return what the ranks of a sequence group were told together."""
        tensors = []
        for value in scored.tensors():
            dist.all_reduce(value, group=self.group.group)  # of others they are zeros
            tensors.append(value)
        return scored.with_tensors(tensors)


class SilentListener(TeacherSource):
    """Hear, on a rank that computes no loss, whether the others were answered."""

    num_known = 0  # TeacherBatches of which it has heard

    def wait(self, batches):
        together(bool)
        self.num_known += len(batches)

    def targets(self, batch):
        if not self.num_known:
            self.wait([batch])
        self.num_known -= 1


def groups_of(texts, most_positions):
    """Return lists of neighboring texts of at most so many positions, or of a single one."""
    groups = []
    room = 0
    for text in texts:
        size = len(text) - 1
        if not groups or size > room:
            groups.append([])
            room = most_positions
        groups[-1].append(text)
        room -= size
    return groups


def _tokens(texts):
    return [text.tokens for text in texts]
