"""Keep what a model says of the text beside logits that are truncated, and how sure that makes it.

`--teacher_output topk` keeps K tokens per position.  What does not follow from these, such as the
probability of the text's own token, is computed where all logits exist and kept beside them.

Shapes: T positions of the flattened batch, W vocabulary, N positions asked for.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from isogloss.data.options.term_weights import weigh_positions
from isogloss.losses import row_sums
from isogloss.teachers.mixing import FLOOR, teacher_weights, token_scores
from isogloss.teachers.protocol import BLOCK
from isogloss.tiles import LogitsSource, TopKLogits

# --- whether truncated logits are enough ----------------------------------------------------------


def reading_of_rest(cfg, student, encoder):
    """Return how the loss reads truncated rows: (temperature of the rest, does it read draws?).

    What sums up tokens before it softens the sums reads them at temperature 1, and is not
    linear in them at another one.

    Args:
        cfg: Config; student, encoder: TextEncoder of the student and of the teacher.
    """
    spec = cfg.losses()[cfg.loss]
    if not cfg.softens_truncated:
        return 1.0, spec.reads_draws(cfg)
    sums_first = spec.needs == "spellings"
    if sums_first and not student.has_tokenizer_of(encoder):
        return 1.0, False
    return cfg.temperature, spec.reads_draws(cfg)


def check_truncated(cfg, what, ways=("softened", "text")):
    """Raise a ValueError where the loss needs more of a teacher than the tokens that are kept.

    Args:
        what: truncates, for the message.
        ways: `LossSpec.truncated` of the losses for which they are enough.
    """
    fitting = [name for name, spec in cfg.losses().items() if spec.truncated in ways]
    # with --teachers each entry is checked
    if cfg.kd_weight and not cfg.teachers and cfg.loss not in fitting:
        raise ValueError(f"{what} with --loss {cfg.loss}: this loss reads others, too; keep "
                         f"hidden states, or use one of {', '.join(fitting)}")


# --- what is kept ---------------------------------------------------------------------------------


class TextScores(NamedTuple):
    """Hold what whole distributions say of the text, (T,) float32 each.

    logp_T: log-probability of the label, in nats; where there is no label it says nothing.
    entropy_T: in nats.
    max_logp_T: log-probability of the most likely token, in nats.
    correct_T: 1 where that token is the label, else 0.
    """

    logp_T: torch.Tensor
    entropy_T: torch.Tensor
    max_logp_T: torch.Tensor
    correct_T: torch.Tensor

    def at(self, positions):
        """Return the scores of (N,) int64 positions."""
        return TextScores(*(score.index_select(0, positions) for score in self))

    def packed(self):
        """Return all scores as one (T, 4) tensor, as it is sent."""
        return torch.stack(self, 1)

    @classmethod
    def unpacked(cls, packed_T4):
        return cls(*packed_T4.unbind(1))


class WholeRows(NamedTuple):
    """Hold what is computed of whole rows before tokens are left out.

    scores: TextScores.
    best_N: (N,) the largest logit; total_N: (N,) logsumexp of the logits.
    mass_NW: (N, W) exp(logits - best).
    """

    scores: TextScores
    best_N: torch.Tensor
    total_N: torch.Tensor
    mass_NW: torch.Tensor

    def rest(self, logits_NW, ids_NK, temperature):
        """Return (N,) log-probabilities, softened, of all tokens but (N, K) some; masses end."""
        mass_NW = self.mass_NW
        if temperature != 1:
            mass_NW = ((logits_NW - self.best_N[:, None]) / temperature).exp_()
        rest_N = mass_NW.scatter_(1, ids_NK, 0).sum(-1).log() * temperature
        return rest_N + self.best_N - self.total_N


def scores_of_rows(logits_NW, best_N, labels_N, correct_N):
    """Return the WholeRows of some rows of float32 logits.

    Args:
        best_N: (N,) the largest of them.
        labels_N: (N,) int64 token of each; correct_N: (N,) bool, it is the most likely one.
    """
    # tokens that never come have logits of -inf and add nothing; sums by row, not by a matmul,
    # which adds up in an order that depends on the other rows
    distance_NW = (logits_NW - best_N[:, None]).clamp_(min=FLOOR)
    mass_NW = distance_NW.exp()  # the one pass with exponentials
    Z_N = mass_NW.sum(-1)
    total_N = best_N + Z_N.log()
    label_logp_N = logits_NW.gather(1, labels_N[:, None])[:, 0] - total_N
    scores = TextScores(
        logp_T=label_logp_N.clamp(min=FLOOR),
        # by distances, which are small where masses are large
        entropy_T=Z_N.log() - distance_NW.mul_(mass_NW).sum(-1) / Z_N,
        max_logp_T=-Z_N.log(),
        correct_T=correct_N.float())
    return WholeRows(scores, best_N, total_N, mass_NW)


class BatchText(NamedTuple):
    """Name the positions of a batch that read one text.

    sample: its number in the micro-batch.
    positions: (n,) int64, of the flattened batch.
    tokens: (n + 1,) int64, what they read and what the last one predicts.
    """

    sample: int
    positions: torch.Tensor
    tokens: torch.Tensor


def batch_texts(batch):
    """List the BatchText, on the CPU, of each sample of a TeacherBatch that has a position."""
    labels = batch.labels.flatten().cpu()
    ids = batch.ids.flatten().cpu()
    texts = []
    for number, positions in enumerate(batch.labeled.cpu().split(batch.num_labeled)):
        if len(positions):
            tokens = torch.cat([ids[positions], labels[positions[-1:]]])
            texts.append(BatchText(number, positions, tokens))
    return texts


@dataclass
class ScoredLogits:
    """Give truncated logits, and what the whole distributions say of the text.

    Attributes:
        logits: LogitsSource.
        scores: TextScores of all its positions.
    """

    logits: LogitsSource
    scores: TextScores

    def __call__(self, positions):
        return self.logits(positions)

    @classmethod
    def empty(cls, width, vocab):
        """Return the ScoredLogits of no position, of which each would have `width` tokens."""
        none = torch.zeros(0)
        ids = torch.zeros(0, width, dtype=torch.int)
        logits = TopKLogits(ids, torch.zeros(0, width), vocab, none, none)
        return cls(logits, TextScores(none, none, none, none))

    @classmethod
    def joined(cls, blocks):
        """Return the ScoredLogits of all positions of blocks, whose logits are TopKLogits."""
        columns = zip(*[block.tensors() for block in blocks])
        return blocks[0].with_tensors(map(torch.cat, columns))

    def to(self, device):
        """Return the same on a device; the logits, here and below, are TopKLogits with totals."""
        return self.with_tensors([value.to(device) for value in self.tensors()])

    def spread(self, positions, num_positions):
        """Return the ScoredLogits of a batch that has these at (N,) int64 positions, else zeros."""
        spread = []
        for value in self.tensors():
            whole = value.new_zeros(num_positions, *value.shape[1:])
            spread.append(whole.index_copy(0, positions, value))
        return self.with_tensors(spread)

    def tensors(self):
        """List all tensors, of which `with_tensors` makes ScoredLogits again."""
        logits = self.logits
        return logits.ids_TK, logits.logp_TK, logits.rest_T, logits.total_T, *self.scores

    def with_tensors(self, tensors):
        """Return the ScoredLogits of the same vocabulary that these tensors make."""
        ids_TK, logp_TK, rest_T, total_T, *scores = tensors
        logits = TopKLogits(ids_TK, logp_TK, self.logits.vocab, rest_T, total_T)
        return ScoredLogits(logits, TextScores(*scores))

    @property
    def nbytes(self):
        return self.logits.nbytes + sum(score.nbytes for score in self.scores)


def most_likely(logits, top_k, labels_T, temperature=1.0):
    """Return the ScoredLogits of TopKLogits of all positions, a block at a time.

    Beside the most likely tokens they keep the label of each position.

    Args:
        logits: HiddenLogits.
        labels_T: (T,) int64, -100 for none.
        temperature: by which the loss will divide: the rest is summed at it.
    """
    positions = torch.arange(len(logits.hidden_TH), device=logits.hidden_TH.device)
    blocks = []
    for block in positions.split(BLOCK):
        blocks.append(truncate(logits(block).float(), top_k, labels_T[block], temperature))
    return ScoredLogits.joined(blocks)


def truncate(logits_NW, top_k, labels_N, temperature=1.0):
    """Return the ScoredLogits of some rows of float32 logits; see `most_likely`."""
    top_NK, top_ids_NK = logits_NW.topk(min(top_k, logits_NW.shape[1]))
    # a position without a label repeats its most likely token
    last_N = torch.where(labels_N >= 0, labels_N, top_ids_NK[:, 0])
    whole = scores_of_rows(logits_NW, top_NK[:, 0], last_N, top_ids_NK[:, 0] == labels_N)
    ids_NK = torch.cat([top_ids_NK, last_N[:, None]], 1)
    logp_NK = torch.cat([top_NK, logits_NW.gather(1, last_N[:, None])], 1)
    rest_N = whole.rest(logits_NW, ids_NK, temperature)
    total_N = whole.total_N
    rows = TopKLogits(ids_NK.int(), logp_NK - total_N[:, None], logits_NW.shape[1], rest_N, total_N)
    return ScoredLogits(rows, whole.scores)


# --- how sure a teacher is ------------------------------------------------------------------------


@torch.no_grad()
def sample_scores(logits, batch):
    """Return (B,) how sure a teacher is of each sample: log-probability, in nats, for each byte.

    It is that of what is learned: FLOOR where this has no byte, -inf where the teacher does not
    read the sample.  Tokens of different tokenizers are not the same unit, bytes are.

    Args:
        logits: LogitsSource of the teacher; of truncated logits ScoredLogits.
    """
    labels = batch.labels.flatten()
    num_bytes = batch.num_bytes.flatten()
    scores = []
    for positions in batch.labeled.split(batch.num_labeled):
        unknown = FLOOR if len(positions) else -torch.inf
        total = 0.0
        for block in positions.split(BLOCK):
            # not selected by a mask: the host would wait for a GPU
            total += label_logp(logits, labels, block).where(num_bytes[block] >= 0, 0.0).sum()
        size = num_bytes[positions].clamp(min=0).sum()
        scores.append(torch.where(size > 0, total / size, unknown).float())
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
