"""Let a causal language model write: a batched loop over its key/value cache, reproducible by row.

The token at place t of a completion is

    argmax over v of  log p(v | prompt, tokens before t) / temperature + gumbel(key, t, v)

which is a draw from softmax(log p / temperature).  The noise is a hash of the prompt's key, the
place and the token, not the state of a random generator.  So a completion does not depend on what
else is in its batch, on the order of the prompts, on the number of processes, or on an earlier
draw, and writing leaves the random state of training untouched (up to rounding of the logits).

At temperature 0 it is the most likely token, without noise.

    prompts = [Prompt(ids, key=(seed, number, 0), max_new_tokens=128), ...]
    completions = write(model, prompts, stop_ids=[tokenizer.eos_token_id])

The tokens are what a loss has to be computed on: what the tokenizer makes of their text may be
other tokens.

Shapes: B rows of a batch, V entries of the vocabulary, N tokens of a completion.

Needs torch and a causal language model of transformers, whose forward pass takes and returns
`past_key_values`.  Copy this file into your own repository.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_rollout.py.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# --- noise that is a function of counters ---------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15  # of splitmix64 (Steele, Lea, Flood 2014), like the two factors below
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = 30, 27, 31
BITS_64 = (1 << 64) - 1


def hash_counters(*counters: int) -> int:
    """Return 64 random bits that depend on all the given integers, in their order."""
    state = 0
    for counter in counters:
        state = _mixed((state ^ (counter & BITS_64)) + GOLDEN)
    return state


def uniform(*counters: int) -> float:
    """Return a number of [0, 1), uniform over counters."""
    return (hash_counters(*counters) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    x &= BITS_64
    for factor, shift in zip(FACTORS, SHIFTS):
        x = (x ^ (x >> shift)) * factor & BITS_64
    return x ^ (x >> SHIFTS[2])


def _signed(x: int) -> int:
    """Return the int64 with the bits of an unsigned one."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix_in_place(x: Tensor) -> Tensor:
    """Do `_mixed` for int64, whose products wrap around."""
    for factor, shift in zip(FACTORS, SHIFTS):
        x ^= _shift_right(x, shift)
        x *= _signed(factor)
    x ^= _shift_right(x, SHIFTS[2])
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as unsigned numbers do: torch's own shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def gumbel_noise(keys_B: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise, each number a function of its row's key and its column alone.

    Args:
        keys_B: (B,) int64.
        vocab: columns V.
    Returns:
        (B, V) float32 in -3.7 to 36.8: resolved to 2^-53 where a number is large, and a draw of a
        token that is so improbable needs a large one.
    """
    column_V = torch.arange(vocab, device=keys_B.device) * _signed(GOLDEN)
    bits_BV = _mix_in_place(keys_B[:, None] + column_V)
    # A float32 is fine near 0 and coarse near 1, so small values stand for large noise.
    u_BV = _shift_right(bits_BV, 11).float() * 2.0**-53
    exponential_BV = -torch.log1p(-u_BV.clamp_(2.0**-54, 1 - 2.0**-24))
    return -exponential_BV.log_()


# --- prompts and completions ----------------------------------------------------------------------


@dataclass
class Prompt:
    """State what a completion has to begin with.

    Attributes:
        ids: tokens, one or more.
        key: integers that the noise depends on, such as (seed, number of the prompt, copy).
        max_new_tokens: after so many tokens the completion is cut; 0 or more.
        is_complete: (tokens of the completion so far) -> it ends here, for a stop that is no token
            but a text, say; asked after every token.  None: stop tokens alone end it.
    """

    ids: Sequence[int]
    key: tuple[int, ...]
    max_new_tokens: int
    is_complete: Callable[[list[int]], bool] | None = None


@dataclass
class Completion:
    """Hold what a model wrote.

    Attributes:
        ids: (N,) int64 on the CPU; the last one is the stop token if one ended the completion.
        logp: (N,) float32, log-probability of each token as it was drawn, see `drawn_logp`, nats.
        entropy: (N,) float32, of the model's own distribution at each place, nats.
        ended: the model wrote a stop token, or `is_complete` said so; else it was cut.
        temperature, top_p: those of `logp`.
    """

    ids: Tensor
    logp: Tensor
    entropy: Tensor
    ended: bool
    temperature: float = 1.0
    top_p: float = 1.0


def write(
    model: Any,
    prompts: Sequence[Prompt],
    stop_ids: Sequence[int],
    vocab: int | None = None,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int = 64,
    pad_id: int = 0,
    agree: Callable[[bool], bool] = bool,
    on_written: Callable[[int], Any] = int,
    equal_lengths: bool = False,
) -> list[Completion]:
    """Let a model complete prompts.

    Every turn of the loop is one forward pass.  Where all processes have to take part in each (as
    for a model that ZeRO-3 has partitioned), `agree` tells whether any of them still has work; one
    that has none runs an idle pass.

    Args:
        model: causal language model of transformers; its mode (training, evaluation) is restored.
        prompts: Prompts of any lengths; neighbors in length share a batch.
        stop_ids: tokens that end a completion.
        vocab: tokens of the tokenizer, where the model's head has more rows; None: all rows.
        temperature: of the draws; 0: no draws, but the most likely token (greedy decoding).
        top_p: above 0 to 1; draw from the most likely tokens that have this much mass together.
        batch_size: rows of a forward pass.
        pad_id: any token.
        agree: (this process has work) -> some process has work.
        on_written: called with the number of completions of each batch when it is written.
        equal_lengths: prompts share a batch with others of their length alone, for models with
            layers that read padding.
    Returns:
        a Completion for each prompt, in their order.
    Raises:
        ValueError: an empty prompt, a number beyond its bounds, or a model without a cache.
    """
    fewest = min([prompt.max_new_tokens for prompt in prompts], default=0)
    if not (temperature >= 0 and 0 < top_p <= 1 and fewest >= 0):
        raise ValueError(f"temperature={temperature}, top_p={top_p}, max_new_tokens={fewest}; "
                         "expected 0 or more, above 0 to 1, and 0 or more")
    waiting = _batches_of([len(prompt.ids) for prompt in prompts], batch_size, equal_lengths)
    sampler = _Sampler(model, list(stop_ids), vocab, temperature, top_p, pad_id)
    completions: dict[int, Completion] = {}
    batch = None
    with _evaluating(model):
        while agree(bool(waiting or batch)):
            if batch is None and waiting:
                # the longest first, so that too little memory shows at once
                numbers = waiting.pop()
                batch = _Batch(sampler, [prompts[number] for number in numbers])
            if batch is None:
                sampler.idle()
                continue
            batch.advance()
            if batch.is_done:
                completions.update(zip(numbers, batch.completions()))
                on_written(len(numbers))
                batch = None
    return [completions[number] for number in range(len(prompts))]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation, without gradients; then restore its mode, after errors too."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _batches_of(lengths: list[int], batch_size: int, equal_lengths: bool) -> list[list[int]]:
    """Return the numbers of the prompts of each batch, the shortest first."""
    if 0 in lengths:
        raise ValueError("a prompt has no token; give at least bos")
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = []
    for _, group in itertools.groupby(
            order, lambda number: lengths[number] if equal_lengths else 0):
        numbers = list(group)
        batches += [numbers[i : i + batch_size] for i in range(0, len(numbers), batch_size)]
    return batches


def drawn_logp(logp_BV: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """Return the log-probabilities that tokens are drawn by, from those of the model itself.

    They are those of softmax(log p / temperature), of the most likely tokens with mass top_p alone.

    Args:
        logp_BV: (B, V) float, nats.
        temperature, top_p: see `write`; at temperature 0, where nothing is drawn, the model's own.
    Returns:
        (B, V) nats, -inf for a token that is not drawn.
    """
    if temperature not in (0, 1):
        logp_BV = (logp_BV / temperature).log_softmax(-1)
    if temperature and top_p < 1:
        logp_BV = _nucleus(logp_BV, top_p).log_softmax(-1)
    return logp_BV


def can_select_rows(cache: Any) -> bool:
    """Tell whether keys and values are all that a cache holds of its rows.

    Caches of layers that are no attention have states beside, which `batch_select_indices` fails
    on or leaves as they are.
    """
    layers = getattr(cache, "layers", [])
    names = {type(layer).__name__ for layer in layers}
    return type(cache).__name__ == "DynamicCache" and all(
        name.startswith("Dynamic") for name in names)


# --- which prompts a model can complete side by side ----------------------------------------------

# Nats by which the log-probability of a token may differ by how it was computed.
LIMIT_NATS = {torch.bfloat16: 0.5, torch.float16: 0.5}
LIMIT_NATS_FLOAT32 = 0.01
PROBE_LENGTHS = (12, 12, 3)
PROBE_NEW_TOKENS = (2, 6, 6)  # one ends before the others


def needs_equal_lengths(
    model: Any, vocab: int | None = None, agree: Callable[[bool], bool] = bool
) -> bool:
    """Ask a model whether prompts of unequal lengths disturb each other in one batch.

    What it says of tokens that it wrote must be what a forward pass over their text alone says,
    without padding and without a cache.  Some layers that are no attention read the padding.

    Args:
        model, vocab, agree: see `write`; all processes take part.
    Returns:
        whether `write` needs equal_lengths.
    Raises:
        ValueError: with equal lengths it is wrong too.
    """
    vocab = vocab or model.config.get_text_config().vocab_size
    prompts = []
    for number, length in enumerate(PROBE_LENGTHS):
        ids = [(vocab // 2 + 7 * place + 3 * number) % vocab for place in range(length)]
        prompts.append(Prompt(ids, (number,), PROBE_NEW_TOKENS[number]))
    limit = LIMIT_NATS.get(model.dtype, LIMIT_NATS_FLOAT32)
    reason = ""
    for equal_lengths in (False, True):
        try:
            completions = write(model, prompts, [], vocab, temperature=0, agree=agree,
                                equal_lengths=equal_lengths)
        except Exception as failure:  # of the model's own code, which may raise anything
            reason = f"{type(failure).__name__}: {failure}".partition("\n")[0]
            continue
        error = _largest_error(model, prompts, completions, vocab)
        if error <= limit:
            return equal_lengths
        reason = f"the log-probabilities of what it writes are off by up to {error:.3g} nats"
    raise ValueError(f"cannot write token by token with its cache ({reason})")


def _largest_error(
    model: Any, prompts: Sequence[Prompt], completions: Sequence[Completion], vocab: int
) -> float:
    """Return how far, in nats, `logp` of completions is from that of a forward pass for each."""
    largest = 0.0
    for prompt, completion in zip(prompts, completions):
        ids = torch.cat([torch.tensor(prompt.ids), completion.ids]).to(model.device)
        with _evaluating(model):
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, :, :vocab]
        logp = logits.float().log_softmax(-1)[len(prompt.ids) - 1 :]
        expected = logp.gather(1, ids[len(prompt.ids) :, None]).squeeze(1).cpu()
        error = float((completion.logp - expected).abs().max())
        largest = max(largest, error if error == error else torch.inf)  # NaN: not equal
    return largest


# --- one batch ------------------------------------------------------------------------------------

MOST_SORTED = 1024  # tokens that are sorted for top_p; all are where these have too little mass
# Places after which the host looks again which rows go on, where it waits for the device to look;
# rows that have ended go on so long.  Not tuned.
PLACES_BETWEEN_LOOKS = {"cuda": 8}


class _Sampler:
    """Hold what all batches share: the model and how to draw from it."""

    def __init__(
        self, model: Any, stop_ids: list[int], vocab: int | None, temperature: float,
        top_p: float, pad_id: int,
    ):
        self.model = model
        self.device = model.device
        self.vocab = vocab
        self.temperature = temperature
        self.top_p = top_p
        self.pad_id = pad_id
        self.stop_ids = torch.tensor(stop_ids, device=self.device)
        self.places_between_looks = PLACES_BETWEEN_LOOKS.get(self.device.type, 1)
        # the logits of a prompt's earlier positions would only cost memory
        accepted = inspect.signature(model.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def idle(self) -> None:
        """Run the model on one token, for other processes."""
        ids = torch.full((1, 1), self.pad_id, device=self.device)
        self.model(input_ids=ids, use_cache=False)

    def draw(self, logits_BV: Tensor, keys_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (B,) of one place, their log-probability and the entropy there."""
        logp_BV = logits_BV[:, : self.vocab].float().log_softmax(-1)
        drawn_BV = drawn_logp(logp_BV, self.temperature, self.top_p)
        if self.temperature == 0:
            # of the logits: log_softmax may round two of them to one number
            ids_B = logits_BV[:, : self.vocab].argmax(-1)
        else:
            ids_B = (drawn_BV + gumbel_noise(keys_B, logp_BV.shape[1])).argmax(-1)
        logp_B = drawn_BV.gather(1, ids_B[:, None]).squeeze(1)
        # a model may say -inf of a token, which adds nothing
        entropy_B = -(logp_BV.exp() * logp_BV.clamp(min=-1e4)).sum(-1)
        return ids_B, logp_B, entropy_B


def _nucleus(scores_BV: Tensor, top_p: float) -> Tensor:
    """Return scores that are -inf outside of the most likely tokens with mass `top_p` together."""
    logp_BV = scores_BV.log_softmax(-1)
    num = min(MOST_SORTED, logp_BV.shape[1])
    top_BK = logp_BV.topk(num).values
    if num < logp_BV.shape[1] and not _have_mass(top_BK, top_p):
        top_BK = logp_BV.sort(dim=-1, descending=True).values
    p_BK = top_BK.exp()
    stays_BK = p_BK.cumsum(-1) - p_BK < top_p  # the first token always stays
    # equal ones stay together: which of them comes first, no sort promises
    least_B1 = top_BK.masked_fill(~stays_BK, torch.inf).amin(-1, keepdim=True)
    return scores_BV.masked_fill(logp_BV < least_B1, -torch.inf)


def _have_mass(logp_BK: Tensor, top_p: float) -> bool:
    """Tell whether the tokens of each row have mass `top_p` together, for which the host waits."""
    return bool((logp_BK.exp().cumsum(-1)[:, -1] >= top_p).all())


class _Batch:
    """Write the completions of some prompts side by side.

    Shapes: R rows that the cache still holds, a part of the B rows of the batch.
    """

    def __init__(self, sampler: _Sampler, prompts: list[Prompt]):
        self.sampler = sampler
        device = sampler.device
        lengths = [len(prompt.ids) for prompt in prompts]
        width = max(lengths)
        ids = torch.full((len(prompts), width), sampler.pad_id)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            first = width - lengths[row]  # padded in front, so that all rows go on at one place
            ids[row, first:] = torch.as_tensor(prompt.ids)
            mask[row, first:] = 1
        self.next_ids = ids.to(device)
        # Without padding none is given: attention is faster where it knows that it is just causal.
        self.mask = mask.to(device) if min(lengths) < width else None
        self.positions = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        keys = [_signed(hash_counters(*prompt.key)) for prompt in prompts]
        limits = [prompt.max_new_tokens for prompt in prompts]
        self.keys = torch.tensor(keys, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.rows = torch.arange(len(prompts), device=device)
        self.cache: Any = None
        self.place = 0
        self.is_complete = [prompt.is_complete for prompt in prompts]
        self.is_done = max(limits) == 0
        # of every row: how many tokens are its own, and whether the last one stopped it
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=device)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.active = self.limits > 0  # of the R rows
        size = len(prompts), max(limits)
        self.ids = torch.zeros(size, dtype=torch.long, device=device)
        self.logp = torch.zeros(size, device=device)
        self.entropy = torch.zeros(size, device=device)

    def advance(self) -> None:
        """Run one forward pass and draw one token for each row."""
        if self.is_done:
            self.sampler.idle()
            return
        out = self.sampler.model(
            input_ids=self.next_ids, attention_mask=self.mask, position_ids=self.positions,
            past_key_values=self.cache, use_cache=True, **self.sampler.options)
        self.cache = getattr(out, "past_key_values", None)
        if self.cache is None:
            raise ValueError(f"{type(self.sampler.model).__name__} returns no key/value cache, "
                             "without which writing is too slow")
        place_keys = _mix_in_place(
            self.keys[self.rows] + _signed((self.place + 1) * GOLDEN & BITS_64))
        ids_R, logp_R, entropy_R = self.sampler.draw(out.logits[:, -1], place_keys)
        self.ids[self.rows, self.place] = ids_R
        self.logp[self.rows, self.place] = logp_R
        self.entropy[self.rows, self.place] = entropy_R
        self.place += 1
        stopped_R = torch.isin(ids_R, self.sampler.stop_ids) & self.active
        if any(self.is_complete):
            stopped_R |= self._completed_by_text()
        self.ended[self.rows] |= stopped_R
        finished_R = (stopped_R | (self.place >= self.limits[self.rows])) & self.active
        lengths_R = self.lengths[self.rows]
        self.lengths[self.rows] = torch.where(finished_R, self.place, lengths_R)
        self.active = self.active & ~finished_R
        self._prepare_next(ids_R)

    def _completed_by_text(self) -> Tensor:
        """Return (R,) bool: active rows whose prompt's `is_complete` ends them at this place."""
        written_RN = self.ids[self.rows, : self.place].tolist()
        completed = []
        for row, active, ids in zip(self.rows.tolist(), self.active.tolist(), written_RN):
            ask = self.is_complete[row]
            completed.append(active and ask is not None and ask(ids))
        return torch.tensor(completed, device=self.ids.device)

    def count_active(self) -> int:
        """Return how many rows go on, for which the host waits."""
        return int(self.active.sum())

    def _prepare_next(self, ids_R: Tensor) -> None:
        num_active = len(self.rows)
        if self.place % self.sampler.places_between_looks == 0:
            num_active = self.count_active()
        self.is_done = num_active == 0 or self.place == self.ids.shape[1]
        if self.is_done:
            self.cache = None  # its memory, before the next batch needs some
            return
        self.next_ids = ids_R[:, None]
        self.positions = self.positions[:, -1:] + 1
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        # Rows that have ended cost as much as others; leaving them out copies the cache.
        if num_active <= len(self.rows) // 2 and can_select_rows(self.cache):
            kept = self.active.nonzero_static(size=num_active).squeeze(1)
            self.cache.batch_select_indices(kept)
            self.next_ids = self.next_ids[kept]
            self.positions = self.positions[kept]
            self.rows = self.rows[kept]
            self.active = self.active[kept]
            if self.mask is not None:
                self.mask = self.mask[kept]

    def completions(self) -> list[Completion]:
        """Return the Completion of every row."""
        ids = self.ids.cpu()
        logp = self.logp.cpu()
        entropy = self.entropy.cpu()
        ended = self.ended.tolist()
        completions = []
        for row, length in enumerate(self.lengths.tolist()):
            completions.append(Completion(
                ids[row, :length].clone(), logp[row, :length].clone(),
                entropy[row, :length].clone(), ended[row], self.sampler.temperature,
                self.sampler.top_p))
        return completions
