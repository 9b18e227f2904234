"""--token_weights: terms weigh by their place and their row, in every layout."""

import json

import pytest
import torch

from isogloss.data.options.term_weights import early_weights
from jobs import check_refusals, check_same_curve, losses_of, run_all, short_run


def test_early_weights_count_what_is_learned_of_each_sample():
    labels = torch.tensor([[-100, 5, 6, -100, 7, -100, -100], [3, 3, -100, 3, -100, 3, 3]])
    sample = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [2, 2, 2, 3, 3, 3, 3]]).flatten()
    expected = []
    for number in range(5):
        count = 0
        for label, of_sample in zip(labels.flatten().tolist(), sample.tolist()):
            if of_sample == number:
                expected.append(0.5 ** (count / 3))
                count += label != -100
    weights = early_weights(labels, sample, 5, 3.0)
    assert torch.allclose(weights, torch.tensor(expected)) and weights.dtype == torch.float32


def weighed_by(data, column):
    return json.dumps([{"data": str(data), "weight_key": column}])


LAYOUTS = {"one": (1, {}), "shards": (2, {"sequence_parallel": 2}), "packed": (2, {"pack": True}),
           "untiled": (1, {"tiled": False})}


@pytest.fixture
def command(models, texts, tmp_path):
    """Return a function: the name of a run, its flags -> its command line; four rows a step."""

    def command_of(name, **flags):
        defaults = {"steps": 3, "output_dir": tmp_path / name}
        words = [f"--{key}={value}" for key, value in (defaults | flags).items()]
        return short_run(models, texts, tmp_path, *words,
                         micro_batch_size=2 if "pack" in flags else 4)

    return command_of


def test_early_weights_are_the_same_in_every_layout(command, tmp_path):
    curves = {}
    for kind, (num_ranks, flags) in LAYOUTS.items():
        run_all(num_ranks, command(kind, token_weights="early:5", **flags))
        curves[kind] = [{key: line[key] for key in ("kd", "ce", "grad_norm")}
                        for line in losses_of(tmp_path / kind)]
    for kind, lines in curves.items():
        check_same_curve(curves["one"], lines, 1e-4, name=kind)
    # all the same, and as without weights
    run_all(1, command("plain"), command("flat", token_weights="early:1e9"))
    expected = losses_of(tmp_path / "plain")
    check_same_curve(expected, losses_of(tmp_path / "flat"), 1e-5)
    assert all(line["kd"] < 0.8 * of_plain["kd"]
               for line, of_plain in zip(curves["one"], expected))


def test_rows_weigh_what_their_column_says(command, texts, tmp_path):
    """The loss of a batch is linear in the weights of its rows, in every layout."""
    def first_kd(weights, num_ranks=1, **flags):
        runs = {}
        for number, of_rows in enumerate(weights):
            data = tmp_path / f"{number}.jsonl"
            data.write_text("".join(json.dumps({"text": text, "w": weight}) + "\n"
                                    for text, weight in zip(texts, of_rows)))
            name = f"run{num_ranks}{number}{flags}"
            runs[name] = command(name, token_weights="column", steps=1, data=weighed_by(data, "w"),
                                 **flags)
        run_all(num_ranks, *runs.values())
        return [losses_of(tmp_path / name)[0]["kd"] for name in runs]

    weights = [2, 0, 0.5, 3]
    *single, all_equal, weighed = first_kd([*torch.eye(4).tolist(), [1] * 4, weights])
    assert min(single) > 0 and sum(single) == pytest.approx(all_equal, rel=1e-5)
    expected = sum(weight * kd for weight, kd in zip(weights, single))
    assert weighed == pytest.approx(expected, rel=1e-5)
    for kind in ("shards", "packed"):
        num_ranks, flags = LAYOUTS[kind]
        assert first_kd([weights], num_ranks, **flags) == pytest.approx([expected], rel=1e-5)


def test_wrong_columns_of_weights_are_refused(models, texts, tmp_path):
    words = short_run(models, texts, tmp_path, "--token_weights=column")
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    flags["max_length"] = 60
    check_refusals(flags, [
        ({"token_weights": "early"}, "nothing is wrong"),
        ({}, "--token_weights column: of which column? name it as weight_key of an entry"),
        ({"data": weighed_by(flags["data"], "text")}, "'text' holds '"),
        ({"data": weighed_by(flags["data"], "w")}, "--data: weight_key w: no such column"),
    ])
