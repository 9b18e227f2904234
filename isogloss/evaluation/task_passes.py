"""Plan and run the forward passes that judge continuations, with as little to read as possible.

Continuations that differ in their last token alone share one text.  Others of one context share
what the model has kept of it: its keys and values are copied to each of them, which then are read
as tails.  A model that keeps nothing of that kind reads whole texts instead.

Texts of like lengths share a batch, and the head sees no positions but those that are judged.

Shapes: B rows of a batch, L tokens of the longest, P tokens of what was read before, N positions
in all rows that are judged, V entries of the head.

Tests: tests/test_task_passes.py.
"""

import copy
import inspect
import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import DynamicCache

from isogloss.rollout import can_select_rows

# Of a forward pass on a CPU: what it computes stays in the cache of the processor.
CPU_TOKENS = 1024

# --- what the model reads -------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """State tokens of a continuation that the last positions of a Row predict.

    Attributes:
        number: of the request.
        tokens: (n,) int32; the last n positions predict them.
    """

    number: int
    tokens: np.ndarray


@dataclass
class Row:
    """Hold one text that the model reads, and what it predicts there.

    Attributes:
        ids: (tokens,) int32.
        judged: list of Judged.
        tails: Rows that go on behind this one.
        before: of a tail: number of the Row before it in the batch of that one.
    """

    ids: np.ndarray
    judged: list[Judged]
    tails: list["Row"] = field(default_factory=list)
    before: int = 0

    def num_kept(self):
        """Return of how many positions at the end logits are needed."""
        return max(len(judged.tokens) for judged in self.judged)


def plan_rows(requests, shares_contexts=True):
    """Return the Rows of requests.

    Continuations of one context share a Row of the context, which has tails, or the one Row that
    they differ from in their last token alone.
    """
    by_context = {}
    for number, request in enumerate(requests):
        context = request.ids[: -request.num_scored]
        by_context.setdefault(context.tobytes(), []).append(number)
    rows = []
    for numbers in by_context.values():
        whole = _rows_of_texts(requests, numbers)
        first = requests[numbers[0]]
        context = first.ids[: -first.num_scored]
        longest = max(requests[number].num_scored for number in numbers)
        # the second pass costs more than what is saved where little is shared
        if shares_contexts and len(whole) > 1 and longest <= len(context):
            rows.append(_row_of_context(context, requests, numbers))
        else:
            rows += whole
    return rows


def _rows_of_texts(requests, numbers):
    """Return a Row for each text of context and continuation without its last token."""
    rows = {}
    for number in numbers:
        request = requests[number]
        ids = request.ids[:-1]
        row = rows.setdefault(ids.tobytes(), Row(ids, []))
        row.judged.append(Judged(number, request.ids[-request.num_scored :]))
    return list(rows.values())


def _row_of_context(context, requests, numbers):
    """Return the Row of a context, which predicts first tokens; its tails predict the others."""
    row = Row(context, [])
    tails = {}
    for number in numbers:
        request = requests[number]
        continuation = request.ids[-request.num_scored :]
        row.judged.append(Judged(number, continuation[:1]))
        ids = continuation[:-1]
        if len(ids):
            tail = tails.setdefault(ids.tobytes(), Row(ids, []))
            tail.judged.append(Judged(number, continuation[1:]))
    row.tails = list(tails.values())
    return row


def shares_contexts(model):
    """Tell whether a model can go on behind a text that stands anywhere in a batch."""
    accepted = inspect.signature(model.forward).parameters
    return {"attention_mask", "position_ids", "past_key_values"} <= accepted.keys()


# --- forward passes -------------------------------------------------------------------------------


def plan_passes(rows, model, batch_size):
    """Return the Passes of Rows; the last ones, which run first, need most memory."""
    plain = [row for row in rows if not row.tails]
    contexts = [row for row in rows if row.tails]
    limit = max((len(row.ids) + _longest_tail(row) for row in rows), default=0)
    passes = [Pass(batch) for batch in _batches(plain, model, batch_size, limit)]
    passes += [Pass(batch) for batch in _batches(contexts, model, batch_size, limit)]
    return passes


def _longest_tail(row):
    return max((len(tail.ids) for tail in row.tails), default=0)


def _batches(rows, model, batch_size, limit):
    """Yield lists of Rows of like lengths, the longest last.

    Args:
        limit: the longest Row and the longest tail of a batch take no more tokens, so that padding
            does not lead out of the model's window.
    """
    batch = []
    longest_tail = 0
    budget = CPU_TOKENS if model.device.type == "cpu" else math.inf
    for row in sorted(rows, key=lambda row: len(row.ids)):
        longest_tail = max(longest_tail, _longest_tail(row))
        is_full = len(batch) == batch_size or len(row.ids) * (len(batch) + 1) > budget
        if batch and (is_full or len(row.ids) + longest_tail > limit):
            yield batch
            batch = []
            longest_tail = _longest_tail(row)
        batch.append(row)
    if batch:
        yield batch


@dataclass
class Past:
    """Hold what the model has read of some Rows.

    Attributes:
        cache: DynamicCache of transformers.
        mask_BP: (B, P) int64; 1: a token; 0: padding, which is in front.
    """

    cache: DynamicCache
    mask_BP: torch.Tensor

    def select(self, rows):
        """Return the Past of some rows, each as often as it is named."""
        rows = torch.tensor(rows, device=self.mask_BP.device)
        cache = copy.copy(self.cache)
        # the layers of the copy are given tensors of their own below
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        cache.batch_select_indices(rows)
        return Past(cache, self.mask_BP[rows])


@dataclass
class Pass:
    """Hold what one forward pass reads.

    Attributes:
        rows: list of Row, all with tails or none.
        past: of the pass before, from which these rows, as tails, go on; or None.
    """

    rows: list[Row]
    past: Past | None = None

    def run(self, model, scores):
        """Run the model, and add to the Scores; returns the Past of rows with tails, or None."""
        length = max(len(row.ids) for row in self.rows)
        has_tails = bool(self.rows[0].tails)
        ids_BL = np.zeros((len(self.rows), length), np.int64)
        mask_BL = np.zeros((len(self.rows), length), np.int64)
        judged = []
        kept = []  # positions of the flattened batch
        places = []  # of each of `judged`: which of the kept positions predict it
        num_kept = 0
        for number, row in enumerate(self.rows):
            # What goes on is padded in front; else behind the text, where nothing looks at it.
            begin = length - len(row.ids) if has_tails else 0
            end = begin + len(row.ids)
            ids_BL[number, begin:end] = row.ids
            mask_BL[number, begin:end] = 1
            kept.append(np.arange(end - row.num_kept(), end) + number * length)
            num_kept += row.num_kept()
            for entry in row.judged:
                judged.append(entry)
                places.append(np.arange(num_kept - len(entry.tokens), num_kept))
        device = model.device
        mask_BL = torch.from_numpy(mask_BL).to(device)
        kept_N = torch.from_numpy(np.concatenate(kept)).to(device)
        ids_BL = torch.from_numpy(ids_BL).to(device)
        options = self._options(mask_BL, has_tails)
        logits_NV, cache = _logits_at(model, ids_BL, kept_N, **options)
        scores.add(judged, logits_NV, places)
        return Past(cache, mask_BL) if has_tails and can_select_rows(cache) else None

    def _options(self, mask_BL, has_tails):
        if self.past is None and not has_tails:
            # Without a mask attention is faster.  It is causal, so padding behind changes nothing.
            return {"use_cache": False}
        mask = mask_BL
        cache = None
        if self.past is not None:
            past = self.past.select([row.before for row in self.rows])
            # what is padded behind a tail may be seen, because padding alone sees it
            mask = torch.cat([past.mask_BP, torch.ones_like(mask_BL)], 1)
            cache = past.cache
        positions_BL = (mask.cumsum(1) - 1).clamp(min=0)[:, -mask_BL.shape[1] :]
        return {"attention_mask": None if mask.all() else mask, "position_ids": positions_BL,
                "past_key_values": cache, "use_cache": True}

    def next_passes(self, past, model, batch_size):
        """Return the Passes of the tails of this one.

        Args:
            past: what `run` has returned; without one, whole texts are read.
        """
        tails = []
        for number, row in enumerate(self.rows):
            for tail in row.tails:
                ids = tail.ids if past else np.concatenate([row.ids, tail.ids])
                tails.append(replace(tail, ids=ids, before=number))
        return [Pass(batch, past) for batch in _batches(tails, model, batch_size, math.inf)]


def _logits_at(model, ids_BL, kept_N, **options):
    """Return (N, V) logits of some positions of the flattened (B * L), and the model's cache.

    Only these pass through the head.  Its input is cut rather than the model's output, because
    models scale and cap their logits behind the head in ways of their own.
    """
    was_cut = False

    def cut(_, arguments):
        nonlocal was_cut
        was_cut = True
        hidden = arguments[0]
        return (hidden.flatten(0, -2)[kept_N][None], *arguments[1:])

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(cut) if head is not None else None
    try:
        out = model(input_ids=ids_BL, **options)
    finally:
        if hook:
            hook.remove()
    logits = out.logits.flatten(0, 1)
    return logits if was_cut else logits[kept_N], getattr(out, "past_key_values", None)
