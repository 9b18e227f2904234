"""Ask a causal language model: log-likelihoods of continuations in batches, and written answers.

Tokens are those of lm-evaluation-harness (its `HFLM`): context and continuation are encoded as one
text and split behind the tokens of the context alone; white space at the end of a context belongs
to the continuation; the tokenizer adds bos as it does by itself; what exceeds the model's window is
cut from the left.

What makes it cheaper than one forward pass for each continuation is in task_passes.py.

Shapes: N positions that are judged, n tokens that they predict, V entries of the head.

Tests: tests/test_task_model.py.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from isogloss.data.sample import check_ids
from isogloss.evaluation.task_passes import plan_passes, plan_rows, shares_contexts
from isogloss.rollout import Prompt, write

DEFAULT_WINDOW = 2048  # the harness's, for models that name none
WINDOW_NAMES = "n_positions", "max_position_embeddings", "n_ctx"
# A tokenizer without a limit of its own names a number of this size.
UNLIMITED = 10**9
# Tokens beside those of a stop that its search looks at: a character may begin in an earlier one.
STOP_MARGIN = 4
BYTES_OF_CHARACTER = 4  # of UTF-8, at most
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that are no character

# --- tokens ---------------------------------------------------------------------------------------


class GaveUp(Exception):
    """End an evaluation before its end, raised by an `agree` that asks whether the job does."""


@dataclass(frozen=True)
class TaskRequest:
    """Ask for the log-likelihood of a continuation.

    Attributes:
        ids: (tokens,) int32 of context and continuation, no more than the window and one.
        num_scored: how many at the end are the continuation.
    """

    ids: np.ndarray
    num_scored: int


class TaskEncoder:
    """Turn texts into the tokens that a model reads.

    Attributes:
        tokenizer: of Hugging Face.
        window: tokens that the model reads at once.
        prefix: tokens that the tokenizer puts in front of a text.
        stop_ids: tokens that end a written answer.
        vocab: tokens of the tokenizer; the model's head may have more rows.
        equal_lengths: prompts of unequal lengths disturb each other in this model.
    """

    def __init__(self, tokenizer, config, stop_ids=()):
        """Read what a tokenizer and the config of its model say.

        Args:
            stop_ids: of `ends.stop_ids`; none: eos alone.
        Raises:
            ValueError: the tokenizer has neither bos nor eos.
        """
        self.tokenizer = tokenizer
        self.window = window_of(config, tokenizer)
        # control tokens beyond the head never come
        self.vocab = min(len(tokenizer), config.get_text_config().vocab_size)
        self.equal_lengths = False
        self.prefix = self._added_in_front()
        bos = tokenizer.bos_token_id
        self.first_token = tokenizer.eos_token_id if bos is None else bos
        if self.first_token is None:
            raise ValueError("the tokenizer has neither a bos nor an eos token, so a text without "
                             "a context has no beginning; name one in its tokenizer_config.json")
        self.first_text = tokenizer.decode([self.first_token])
        eos = tokenizer.eos_token_id
        self.stop_ids = list(stop_ids) or ([] if eos is None else [eos])

    def _added_in_front(self):
        plain = self._plain(["a"])[0]
        whole = self.tokenizer.encode("a")
        for first in range(len(whole)):
            if whole[first : first + len(plain)] == plain:
                # what may follow, as T5's eos, would end the text before its continuation
                return whole[:first]
        return []

    def _plain(self, texts):
        coded = self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False,
                               return_attention_mask=False)
        for ids in coded["input_ids"]:
            check_ids(ids, self.vocab, self.tokenizer)
        return coded["input_ids"]

    def encode(self, texts):
        """Return the tokens of each text, with bos where the tokenizer adds it."""
        encoded = []
        for text, ids in zip(texts, self._plain(texts)):
            has_first = bool(self.first_text) and text.startswith(self.first_text)
            encoded.append(ids if has_first else self.prefix + ids)
        return encoded

    def requests(self, context, continuations):
        """Return the TaskRequest of each continuation of a context.

        Raises:
            ValueError: a continuation is longer than the window.
        """
        if not context:
            pairs = [self._without_context(ids) for ids in self._plain(list(continuations))]
        else:
            stripped = context.rstrip()
            white_space = context[len(stripped) :]
            texts = [stripped]
            for continuation in continuations:
                texts.append(stripped + white_space + continuation)
            # a context of white space alone has no tokens but bos
            context_ids, *wholes = self.encode(texts)
            pairs = [self._split(whole, context_ids) for whole in wholes]
        requests = []
        for context_ids, continuation_ids in pairs:
            if not 0 < len(continuation_ids) <= self.window:
                raise ValueError(f"a continuation has {len(continuation_ids)} tokens; expected 1 "
                                 f"to {self.window}, the model's window")
            ids = [*context_ids, *continuation_ids]
            # the last token is predicted, but not read
            kept = np.array(ids[-(self.window + 1) :], np.int32)
            requests.append(TaskRequest(kept, len(continuation_ids)))
        return requests

    def _without_context(self, ids):
        if ids[:1] == [self.first_token]:
            return ids[:1], ids[1:]
        return [self.first_token], ids

    def _split(self, whole, context):
        end = len(context)
        if len(whole) <= end:
            # the last token of the context took in the continuation, where the harness gives up
            end = 0
            while end < len(whole) - 1 and whole[end] == context[end]:
                end += 1
        if end == 0:
            return [self.first_token], whole
        return whole[:end], whole[end:]

    def prompt(self, text, max_new_tokens):
        """Return (tokens of a prompt, how many may follow) so that both fit into the window.

        A prompt that is too long loses its beginning.  Where `max_new_tokens` alone would fill the
        window, half of it is for the prompt.
        """
        if max_new_tokens >= self.window:
            max_new_tokens = self.window // 2
        [ids] = self.encode([text])
        ids = ids[-(self.window - max_new_tokens) :]
        return ids or [self.first_token], max_new_tokens

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def window_of(config, tokenizer):
    """Return how many tokens a model reads at once, as the harness finds it."""
    text_config = config.get_text_config()
    for name in WINDOW_NAMES:
        value = getattr(text_config, name, None)
        if value is not None:
            return int(value)
    limit = tokenizer.model_max_length
    return int(limit) if limit and limit < UNLIMITED else DEFAULT_WINDOW


class TextStop:
    """Tell whether tokens end an answer, because their text holds one of some stops."""

    def __init__(self, encoder, stops):
        self.encoder = encoder
        self.stops = tuple(stops)
        # A token spells a byte at least, so a stop that was completed by the last token is found
        # in so many; stops that were completed earlier have ended the answer.
        longest = max([len(stop.encode()) for stop in self.stops], default=0)
        self.num_tokens = longest + STOP_MARGIN

    def __call__(self, ids):
        for more in range(BYTES_OF_CHARACTER):
            tail = self.encoder.decode(ids[-self.num_tokens - more :])
            if any(stop in tail for stop in self.stops):
                return True
            if REPLACEMENT not in tail:
                return False
            # A tail that begins inside a character may spoil all bytes that follow, if tokens are
            # bytes there; one of its neighbors begins with the character.
        return False

    def cut(self, text):
        """Return a text up to the first stop."""
        for stop in self.stops:
            text = text.split(stop)[0]
        return text


@contextmanager
def evaluation_mode(model):
    """Switch dropout off, and give every module its mode back in the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- log-likelihoods ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Hold what a model says of a continuation.

    Attributes:
        logp: log p(continuation | context), natural logarithm.
        is_greedy: each of its tokens is the most likely one.
    """

    logp: float
    is_greedy: bool


def score(model, requests, batch_size=16, agree=bool):
    """Compute the log-likelihoods of continuations.

    Args:
        model: causal language model of transformers, in evaluation mode.
        requests: list of TaskRequest.
        batch_size: rows of a forward pass, at most.
        agree: (this process has work) -> some process has work; one that has none runs an idle
            pass.  For models whose every pass needs all ranks, as under ZeRO-3.
    Returns:
        a Score for each request, in their order.
    """
    scores = Scores(len(requests))
    waiting = plan_passes(plan_rows(requests, shares_contexts(model)), model, batch_size)
    with torch.no_grad():
        while agree(bool(waiting)):
            if not waiting:
                idle_ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
                model(input_ids=idle_ids, use_cache=False)
                continue
            batch = waiting.pop()
            past = batch.run(model, scores)
            waiting += batch.next_passes(past, model, batch_size)
    return scores.scores()


class Scores:
    """Add up what passes say of the tokens of continuations."""

    def __init__(self, num_requests):
        self.logp = [0.0] * num_requests
        self.is_greedy = [True] * num_requests

    def add(self, judged, logits_NV, places):
        """Add the tokens of one pass.

        Args:
            judged: list of Judged.
            logits_NV: (N, V).
            places: for each of `judged`, (n,) which of the N rows predict its tokens.
        """
        device = logits_NV.device
        sizes = [len(entry.tokens) for entry in judged]
        place_n = torch.from_numpy(np.concatenate(places)).to(device)
        tokens = np.concatenate([entry.tokens for entry in judged]).astype(np.int64)
        token_n = torch.from_numpy(tokens).to(device)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        best_n = logits_NV.argmax(-1)[place_n] == token_n
        logp_n = logits_NV[place_n, token_n] - logits_NV.logsumexp(-1)[place_n]
        parts = zip(judged, logp_n.double().cpu().split(sizes), best_n.cpu().split(sizes))
        for entry, logp, best in parts:
            self.logp[entry.number] += float(logp.sum())
            self.is_greedy[entry.number] &= bool(best.all())

    def scores(self):
        return [Score(logp, is_greedy) for logp, is_greedy in zip(self.logp, self.is_greedy)]


# --- written answers ------------------------------------------------------------------------------


def write_answers(model, encoder, items, keys, options, *, agree=bool, on_written=int):
    """Let a model write answers.

    Args:
        model: causal language model of transformers.
        encoder: TaskEncoder.
        items: list of objects with `prompt`, `stops` and `max_new_tokens`.
        keys: integers for each item that the noise of draws depends on.
        options: object with `batch_size` and `temperature`; 0: greedy.
        agree, on_written: see `rollout.write`.
    Returns:
        the text of each answer, up to the first stop.
    """
    prompts = []
    stops = []
    for item, key in zip(items, keys, strict=True):
        ids, max_new_tokens = encoder.prompt(item.prompt, item.max_new_tokens)
        stop = TextStop(encoder, item.stops)
        stops.append(stop)
        prompts.append(Prompt(ids, key, max_new_tokens, stop if item.stops else None))
    completions = write(
        model, prompts, encoder.stop_ids, encoder.vocab, temperature=options.temperature,
        batch_size=options.batch_size, agree=agree, on_written=on_written,
        equal_lengths=encoder.equal_lengths)
    answers = []
    for stop, completion in zip(stops, completions):
        answers.append(stop.cut(encoder.decode(completion.ids.tolist())))
    return answers
