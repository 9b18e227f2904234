"""Ask the loaded models before the first step, so that no job learns from wrong logits.

Each check runs tiny inputs through the student and the teachers; all ranks take part.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from isogloss.data.batch_types import StudentBatch
from isogloss.rollout import needs_equal_lengths
from isogloss.teachers.model import head_gives_own_logits

# Relative difference between two computations of the same logits: what one layer too many or too
# few changes is far above it.  Half precision rounds at 0.4 %.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


@dataclass
class HeadTest:
    """Tell `StudentWithLoss` to compare its tiled logits with the model's own."""

    model_logits: torch.Tensor

    def reduce(self, student_logits):
        return head_gives_own_logits(student_logits, self.model_logits)


def student_batch(ids, positions=None):
    """Return a StudentBatch of bare ids."""
    nothing = torch.full_like(ids, -100)
    return StudentBatch(ids, nothing, nothing, positions)


@contextmanager
def evaluation_mode(state):
    """Switch dropout off, compute without gradients."""
    state.engine.eval()
    with torch.no_grad():
        yield
    state.engine.train()


def _refuse(verdicts, reason):
    """Raise a ValueError for the first role whose verdict is bad."""
    for role, good in verdicts.items():
        if not good:
            raise ValueError(f"{role}: {reason}")


def _not_finite(role, logits, advice):
    """List what to say of a model with a logit that is NaN or infinitely large, or nothing.

    -inf passes: some models say by it that a token never comes.
    """
    largest = float(logits.max())  # NaN if one is
    if largest < float("inf"):
        return []
    return [f"{role}: its logits are not finite ({largest}); its weights may be damaged, or their "
            f"precision too narrow; check its files, or {advice}"]


def _all_models(state):
    """Yield (role, source, tokens of its tokenizer) of every teacher whose logits can be asked."""
    for setup in state.teachers:
        for source in setup.source.models():
            yield f"--teacher {source.spec.path}", source, len(setup.encoder.table)


def check_logits(state, student_ids):
    """Raise a ValueError where logits are not finite, or not what a loss would make of a head.

    A tiled loss computes logits from hidden states (`head_of`), as does --teacher_output topk.

    Args:
        state: `build.TrainState`.
        student_ids: list of ids that every model has.
    """
    ids = torch.tensor([student_ids], device=state.device)
    positions = None
    if state.sequence_group:  # each rank holds the ids as its shard, at positions of its own
        first = state.sequence_group.rank * ids.shape[1]
        positions = torch.arange(first, first + ids.shape[1], device=state.device)[None]
    batch = student_batch(ids, positions)
    staged = {}
    tiled = {}
    truncated = {}
    not_finite = []
    with evaluation_mode(state):
        role = f"--student {state.cfg.student}"
        logits = state.student.own_logits(batch)
        if logits is not None:
            not_finite += _not_finite(role, logits, "use bf16 or float32 in --ds_config")
        if state.cfg.tiled or state.cfg.pipeline_parallel > 1:
            [verdict] = state.student.reduce([batch], [HeadTest(logits)])
            if verdict is not None:  # another rank of the pipeline has it
                (staged if state.cfg.pipeline_parallel > 1 else tiled)[role] = verdict
        for role, source, vocab in _all_models(state):
            known = ids.clamp(max=vocab - 1)  # its vocabulary may be smaller
            model_logits = source.logits(known)[..., :vocab]
            not_finite += _not_finite(role, model_logits, "use --teacher_dtype float32")
            if state.cfg.tiled or source.spec.output == "topk":
                verdicts = tiled if state.cfg.tiled else truncated
                verdicts[role] = head_gives_own_logits(source.read(known), model_logits)
            source.release()
    # only now, because all ranks have to ask all models
    if not_finite:
        raise ValueError(not_finite[0])
    _refuse(staged, "its stages give other logits than the whole model; try --tiled=false, or use "
                    "ZeRO-3 in place of --pipeline_parallel")
    _refuse(tiled, "its logits are not those of its output embeddings, so its loss cannot be "
                   "tiled; use --tiled=false")
    _refuse(truncated, "its logits are not those of its output embeddings, of which "
                       "--teacher_output topk keeps some; use --teacher_output logits")


def check_side_by_side(state):
    """Let the student write only such texts side by side as do not disturb each other.

    Raises:
        ValueError: what it writes is wrong whatever stands beside it.
    """
    with state.whole_student.model() as (model, agree):
        try:
            equal_lengths = needs_equal_lengths(model, state.vocab, agree)
        except ValueError as error:
            raise ValueError(f"--student {state.cfg.student}: {error}, as rollouts, samples and "
                             "tasks with written answers need it; leave these out, or let "
                             "--writer vllm write") from None
    state.whole_student.equal_lengths = equal_lengths
    if state.tasks:
        state.tasks.encoder.equal_lengths = equal_lengths


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
        for role, source, _ in _all_models(state):
            logits = []
            for ids in (*rows, both):
                answer = source.logits(torch.stack([ids, positions.expand_as(ids)]))[:, half:]
                logits.append(answer.clone())  # the next answer may be written over this one
                source.release()
            independent[role] = _same_rows(*logits)
    advice = "use --pack=false"
    if state.cfg.attention == "flash_attention_2":
        advice += ", or --attention sdpa"
    _refuse(independent, "what it says of a text depends on the text before it in the same row; "
                         f"{advice}")


def _same_rows(alone, other, both):
    """Tell whether logits of two batches of one row are equal, and those of a batch of two rows.

    Not one against two rows: half precision rounds batches of other shapes otherwise.
    """
    return _same(alone[0], other[0]) and _same(*both)


def _same(logits, other):
    difference = logits.float() - other.float()
    return bool(difference.norm() <= TOLERANCE[torch.float32] * logits.float().norm())


def check_sequence_shards(state):
    """Raise a ValueError where cutting a text in two changes what the student says of it.

    That is so for models that look at neighbors in another way than by attention.
    """
    group = state.sequence_group
    text = torch.arange(8, device=state.device) % state.vocab
    ids = torch.zeros(2, 16 * group.size, dtype=torch.long, device=state.device)
    positions = torch.arange(16 * group.size, device=state.device).repeat(2, 1)
    ids[0, :8] = text  # on the first rank
    ids[1, 12:20] = text  # goes on where the shard of the next rank begins
    positions[1, 12:] -= 12  # a sample of its own
    columns = slice(16 * group.rank, 16 * (group.rank + 1))
    with evaluation_mode(state):
        logits = state.engine(student_batch(ids[:, columns], positions[:, columns]))
    # every rank needs the verdict, or the others would go on
    shards = [torch.empty_like(logits) for _ in range(group.size)]
    dist.all_gather(shards, logits.contiguous(), group=group.group)
    whole = shards[0][0, :8].float()
    cut = torch.cat(shards[:2], 1)[1, 12:20].float()
    tolerance = TOLERANCE[logits.dtype]  # the two are computed in other blocks
    if not (whole - cut).norm() <= tolerance * whole.norm():
        raise ValueError(
            f"--student {state.cfg.student}: what it says of a text depends on where its shards "
            "are cut, so its layers do more than attend; use --sequence_parallel 1")
