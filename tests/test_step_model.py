"""Expected seconds of a loss and of a step: those that were measured, or computed independently."""

import pytest

from benchmarks.step_model import LAUNCH, loss_over_matmuls

SIZES = 128_256, 151_646


@pytest.mark.parametrize("megabytes, launches, vocabularies, ratios", [
    (34.7, 3000, SIZES, (5.4, 3.4)), (15.8, 500, SIZES[:1] * 2, (3.2, 2.2)),
    (35.3, 560, SIZES[:1] * 2, (5.7, 3.5)), (15.8, 984, SIZES, (3.0, None)),
    (59.6, 1260, SIZES, (8.5, None)), (39.5, 1164, SIZES, (6.0, None)),
    (17.7, 1260, SIZES, (3.3, None))])
def test_a_loss_over_its_matmuls_is_what_an_independent_model_says(
        megabytes, launches, vocabularies, ratios):
    for hidden, expected in zip((2048, 4096), ratios):
        if expected:
            ours = loss_over_matmuls(megabytes, launches, hidden, *vocabularies)
            assert ours == pytest.approx(expected, rel=0.06)


def test_a_loss_is_its_matmuls_where_it_reads_nothing_and_launches_where_these_are_many():
    assert loss_over_matmuls(0, 0, 2048, *SIZES) == 1
    few = loss_over_matmuls(1, 0, 64, *SIZES)
    assert loss_over_matmuls(1, 10, 64, *SIZES) == few
    many = [loss_over_matmuls(1, number, 64, *SIZES) for number in (10_000, 20_000)]
    assert many[1] == pytest.approx(2 * many[0]) and many[0] > few
    seconds = 2 * 4096 * 64 * (3 * SIZES[0] + SIZES[1]) / (0.7 * 989e12)
    assert many[0] * seconds == pytest.approx(10_000 * LAUNCH)
