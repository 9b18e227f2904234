"""Ask the loaded models before the first step, so that no job learns from wrong logits.

Each check runs tiny inputs through the student and the teachers; all ranks take part.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from isogloss.data.batch_types import StudentBatch
from isogloss.teachers.engines.whole import head_gives_own_logits

NUM_PROBES = 8


def probe_ids(vocab):
    """Return the ids of the first tokens, of which models are asked."""
    return torch.arange(min(NUM_PROBES, vocab))


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


def refuse(verdicts, reason):
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


def all_models(state):
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
        for role, source, vocab in all_models(state):
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
    refuse(staged, "its stages give other logits than the whole model; try --tiled=false, or use "
                    "ZeRO-3 in place of --pipeline_parallel")
    refuse(tiled, "its logits are not those of its output embeddings, so its loss cannot be "
                   "tiled; use --tiled=false")
    refuse(truncated, "its logits are not those of its output embeddings, of which "
                       "--teacher_output topk keeps some; use --teacher_output logits")
