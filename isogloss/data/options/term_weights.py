"""What the terms of a loss weigh by the position where they begin.

Tests: tests/test_token_weights.py.
"""

from dataclasses import replace

import torch


def weigh_terms(batch, pair, samples, labels_BS):
    """Return a TeacherBatch with the weights of --token_weights.

    Args:
        pair: `batch.PairOptions`; samples: PairSample of each sample.
        labels_BS: of the student, whole sequences.
    """
    sample_N = batch.sample_of_student
    if pair.half_life:
        batch = weigh_positions(
            batch, early_weights(labels_BS, sample_N, len(samples), pair.half_life))
    if pair.weighs_rows:
        weights = torch.tensor([sample.weight for sample in samples])
        batch = weigh_positions(batch, weights[sample_N])
    return batch


def weigh_positions(batch, weight_N):
    """Return a TeacherBatch whose terms weigh as much as the position where they begin.

    Args:
        batch: TeacherBatch; weights that it has are multiplied.
        weight_N: (B * S + M,) float, of every student position that its tiles name.
    """
    tiles = []
    for tile in batch.tiles:
        # one weight for every position, though a loss reads only those where its terms begin
        weight_n = weight_N[tile.student_positions]
        sub_tiles = []
        for sub_tile in tile.sub_tiles:
            weight = weight_n[sub_tile.student_slice]
            if sub_tile.weight is not None:
                weight = weight * sub_tile.weight
            sub_tiles.append(sub_tile._replace(weight=weight))
        tiles.append(tile._replace(sub_tiles=tuple(sub_tiles)))
    return replace(batch, tiles=tiles)


def early_weights(labels_BS, sample_N, num_samples, half_life):
    """Return (B * S,) float32 weights by the learned tokens before, of whole sequences.

    Args:
        labels_BS: (B, S) int64, -100 where nothing is learned.
        sample_N: (B * S,) number of each position's sample.
        half_life: learned tokens after which a weight is half as large.
    """
    learned = (labels_BS.flatten() != -100).long()
    before = learned.cumsum(0) - learned
    begin = before.new_full((num_samples,), len(before))
    begin.scatter_reduce_(0, sample_N, before, "amin")
    return torch.exp2((begin[sample_N] - before) / half_life)
