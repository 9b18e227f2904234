"""--loss hybrid_uld: the hybrid of TRL's GOLD trainer as a loss of a run.

tests/test_losses.py compares the function with its definition, test_golden.py with TRL's own.
"""

import pytest
import torch

from cases import close, gradient
from isogloss import losses
from isogloss.config import Config
from isogloss.objective.loss_table import build_loss
from isogloss.projection_tools.build import cached_projection
from isogloss.tile_plan import SubTile
from tokens import pair_of

GOOD = dict(student="s", teacher="t", data="d", loss="hybrid_uld", temperature=1.5)
# chunks of one token and of two on either side, a position outside of chunks
STUDENT_CHUNK = torch.tensor([0, 1, 1, 2, -1])
TEACHER_CHUNK = torch.tensor([-1, 0, 1, 2, 2])


def sub_tile_of(vocab_sizes):
    torch.manual_seed(1)
    labels = [torch.randint(size, (5,)) for size in vocab_sizes]
    return SubTile(slice(0, 5), slice(0, 5), *labels, STUDENT_CHUNK, TEACHER_CHUNK,
                   losses.find_chunks(STUDENT_CHUNK[None], TEACHER_CHUNK[None]),
                   weight=torch.tensor([1.0, 0.5, 9.0, 2.0, 9.0]))


@pytest.mark.parametrize("matched_weight", [None, 0.0, 0.8])
def test_it_is_what_it_is_defined_to_be(encoders, matched_weight):
    sizes = [len(side.table) for side in encoders]
    sub_tile = sub_tile_of(sizes)
    more = {} if matched_weight is None else {"matched_weight": matched_weight}
    loss = build_loss(Config(**GOOD, **more), *encoders, "cpu")
    x, y = [2 * torch.randn(5, size, dtype=torch.float64) for size in sizes]
    x.requires_grad_()
    value = loss.loss_fn(x, y, sub_tile)
    projection = cached_projection(pair_of(encoders))
    common = losses.common_tokens(projection["indices"], projection["likelihoods"])
    ids = [side[None] for side in sub_tile[2:6]]
    expected, _ = losses.uld(
        x[None], y[None], *ids, common=common, matched_weight=matched_weight, temperature=1.5,
        weight_BS=sub_tile.weight[None])
    assert abs(value - expected) < 1e-9 * expected
    assert close(gradient(value, x), gradient(expected, x), 1e-9)


@pytest.mark.parametrize("weight", [-0.5, 1.5])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match=f"--matched_weight {weight}: expected 0 to 1, or -1"):
        Config(**GOOD, matched_weight=weight)
