"""What public code computes and ours does not, in torch: only for comparison with its numbers."""

import torch

from isogloss.losses import find_chunks


def gold_of_mean_logp(x_BSV, y_BTW, student_chunk, teacher_chunk, common, tau, most, reverse):
    """Return (sum, count) of NeMo-RL's gold, an un-normalized mean of log-probabilities a chunk.

    KL over the common tokens, without a bucket for the others, plus the distance of the others.
    """
    chunks = find_chunks(student_chunk, teacher_chunk)
    means = []
    for logits, rows, of_N, count in ((x_BSV, chunks.row_S, chunks.of_S, chunks.count_S),
                                      (y_BTW, chunks.row_T, chunks.of_T, chunks.count_T)):
        logp = (logits.flatten(0, 1)[rows] / tau).log_softmax(-1)
        mean = logp.new_zeros(len(count), logp.shape[1]).index_add(0, of_N, logp)
        means.append(mean / count[:, None])
    sides = []
    for mean, ids in zip(means, common):
        others = torch.ones(mean.shape[1], dtype=torch.bool)
        others[ids] = False
        ranked = mean[:, others].exp().sort(-1, descending=True).values
        sides.append((mean[:, ids], ranked))
    (logp, p_others), (logq, q_others) = sides
    if reverse:
        logp, logq = logq, logp
    kl_C = (logq.exp() * (logq - logp)).sum(-1)
    k = min(most, p_others.shape[1], q_others.shape[1])
    distance_C = (p_others[:, :k] - q_others[:, :k]).abs().sum(-1)
    return tau**2 * (kl_C + distance_C).sum(), len(kl_C)
