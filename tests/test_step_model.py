"""Expected seconds of a loss and of a step: those that were measured, or computed independently."""

import pytest

from benchmarks import step_model
from benchmarks.step_model import LAUNCH, expected, loss_over_matmuls

SIZES = 128_256, 151_646


@pytest.mark.parametrize("megabytes, launches, vocabularies, ratios", [
    (34.7, 3000, SIZES, (5.4, 3.4)), (15.8, 500, SIZES[:1] * 2, (3.2, 2.2)),
    (35.3, 560, SIZES[:1] * 2, (5.7, 3.5)), (15.8, 984, SIZES, (3.0, None)),
    (59.6, 1260, SIZES, (8.5, None)), (39.5, 1164, SIZES, (6.0, None)),
    (17.7, 1260, SIZES, (3.3, None))])
def test_a_loss_over_its_matmuls_is_what_an_independent_model_says(
        megabytes, launches, vocabularies, ratios):
    for hidden, ratio in zip((2048, 4096), ratios):
        if ratio:
            ours = loss_over_matmuls(megabytes, launches, hidden, *vocabularies)
            assert ours == pytest.approx(ratio, rel=0.06)


def test_a_loss_is_its_matmuls_where_it_reads_nothing_and_launches_where_these_are_many():
    assert loss_over_matmuls(0, 0, 2048, *SIZES) == 1
    few = loss_over_matmuls(1, 0, 64, *SIZES)
    assert loss_over_matmuls(1, 10, 64, *SIZES) == few
    many = [loss_over_matmuls(1, number, 64, *SIZES) for number in (10_000, 20_000)]
    assert many[1] == pytest.approx(2 * many[0]) and many[0] > few
    seconds = 2 * 4096 * 64 * (3 * SIZES[0] + SIZES[1]) / (0.7 * 989e12)
    assert many[0] * seconds == pytest.approx(10_000 * LAUNCH)


def test_the_step_of_the_log_takes_what_was_measured():
    """0.751 s, busy for 0.575 of them, 23,564 kernels: docs/log/2026-11.md."""
    step = expected(step_model.THEN)
    assert step["seconds"] == pytest.approx(0.751, rel=0.1)
    assert step["device"] == pytest.approx(0.575, rel=0.1)
    assert step["kernels"] == pytest.approx(23_564, rel=0.1)
    # 1.236 G weights of Llama-3.2-1B as published; 184 TFLOP/s by other people's count
    assert step_model.STUDENT.weights == pytest.approx(1.236e9, rel=1e-3)
    assert step_model.operations() / 0.751 == pytest.approx(184e12, rel=0.01)


def test_each_piece_makes_the_step_shorter():
    steps = [expected(work) for work in step_model.STEPS.values()]
    seconds = [step["seconds"] for step in steps]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(seconds)
    assert all(step["share_of_peak"] < step_model.MATMULS for step in steps)
    assert steps[-1]["tokens_per_second"] > 40_000 and steps[-1]["share_of_peak"] > 0.45
