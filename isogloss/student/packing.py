"""See that rows which hold several texts (--pack) let none of them see another one."""

import torch

from isogloss.models.compiler import TOLERANCE
from isogloss.student.checks import all_models, evaluation_mode, refuse, student_batch


def prepare(state, inputs, stack):
    check_packing(state)


def check_packing(state):
    """Raise a ValueError where a model sees across the border of packed samples.

    The same text stands behind two different ones; what a model says of it must not differ, in rows
    of a batch each or of the same: flash attention looks for borders in batches of one row alone.
    """
    group = state.sequence_group
    num_shards = group.size if group else 1
    rank = group.rank if group else 0
    vocab = state.vocab
    for setup in state.teachers:
        vocab = min(vocab, len(setup.encoder.table))
    # Two samples of `half` tokens in a row; a shard has 16 positions, whatever their number.
    half = 8 * num_shards
    text = torch.arange(half, device=state.device) % vocab  # ids that all models have
    rows = [torch.cat([text, text])[None], torch.cat([text.flip(0), text])[None]]
    both = torch.cat(rows)
    positions = torch.arange(half, device=state.device).repeat(2)[None]
    columns = slice(16 * rank, 16 * (rank + 1))
    independent = {}
    with evaluation_mode(state):
        logits = []
        for ids in (*rows, both):
            shard = ids[:, columns]
            batch = student_batch(shard, positions[:, columns].expand_as(shard))
            # of the second sample, as far as it is on this rank
            logits.append(state.student.logits(batch))
        if logits[0] is not None:
            first = max(0, half - columns.start)
            same = _same_rows(*[answer[:, first:] for answer in logits])
            independent[f"--student {state.cfg.student}"] = same
        for role, source, _ in all_models(state):
            logits = []
            for ids in (*rows, both):
                answer = source.logits(torch.stack([ids, positions.expand_as(ids)]))[:, half:]
                logits.append(answer.clone())  # the next answer may be written over this one
                source.release()
            independent[role] = _same_rows(*logits)
    advice = "use --pack=false"
    if state.cfg.attention == "flash_attention_2":
        advice += ", or --attention sdpa"
    refuse(independent, "what it says of a text depends on the text before it in the same row; "
                         f"{advice}")


def _same_rows(alone, other, both):
    """Tell whether logits of two batches of one row are equal, and those of a batch of two rows.

    Not one against two rows: half precision rounds batches of other shapes otherwise.
    """
    return _same(alone[0], other[0]) and _same(*both)


def _same(logits, other):
    difference = logits.float() - other.float()
    return bool(difference.norm() <= TOLERANCE[torch.float32] * logits.float().norm())
