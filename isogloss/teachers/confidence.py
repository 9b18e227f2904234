"""What teachers say of the tokens of a text: how sure they are of samples and of rollouts.

Tests: tests/test_batch.py, tests/test_on_policy.py.
"""

import torch

from isogloss.data.options.term_weights import weigh_positions
from isogloss.losses import row_sums
from isogloss.teachers.mixing import teacher_weights, token_scores
from isogloss.teachers.protocol import BLOCK


@torch.no_grad()
def sample_scores(logits, batch):
    """Return (B,) how sure a teacher is of each sample: log-probability, in nats, for each byte.

    It is -inf for a sample that the teacher does not read, whose template refuses it, say.
    Tokens of different tokenizers are not the same unit, bytes are.

    Args:
        logits: LogitsSource of the teacher; of truncated logits ScoredLogits.
    """
    labels = batch.labels.flatten()
    num_bytes = batch.num_bytes.flatten().clamp(min=0)
    scores = []
    for number, positions in enumerate(batch.labeled.split(batch.num_labeled)):
        if not len(positions):
            scores.append(torch.full((), -torch.inf, device=labels.device))
            continue
        size = (num_bytes * (batch.sample == number)).sum().clamp(min=1)
        total = sum(label_logp(logits, labels, block).sum() for block in positions.split(BLOCK))
        scores.append((total / size).float())
    return torch.stack(scores)


def label_logp(logits, labels, positions):
    """Return (n,) log-probabilities of the labels at some positions; see `sample_scores`."""
    if hasattr(logits, "scores"):
        return logits.scores.at(positions).logp_T
    return token_scores(logits(positions), labels[positions])


@torch.no_grad()
def rollout_nats(logits, batch):
    """Return (samples,) -log q of the tokens of each rollout that are in chunks, else 0.

    Args:
        logits: LogitsSource of the teacher; of truncated logits ScoredLogits.
    """
    labels = batch.labels.flatten()
    nats = torch.zeros(batch.num_samples, dtype=torch.float64, device=labels.device)
    for block in batch.rollout_positions.split(BLOCK):
        logp = label_logp(logits, labels, block).double()
        nats -= row_sums(logp, batch.sample[block], batch.num_samples)
    return nats


def weigh_by_confidence(parts, select):
    """Let each sample of a micro-batch weigh as much as each teacher is sure of it.

    Args:
        parts: `objective.Part` of every teacher.
        select: the one that is surest of a sample alone teaches it.
    """
    scores_MB = torch.stack([part.confidence for part in parts])
    for part, weight_B in zip(parts, teacher_weights(scores_MB, select)):
        batch = part.batch
        part.batch = weigh_positions(batch, weight_B[batch.sample_of_student])
