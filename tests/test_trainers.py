"""integrations: what trainers evaluate, shuffle, count and log, beside the loss of a step."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from isogloss.integrations import Distillation, count_terms, distilled
from test_integrations import trainer_of

KD_WEIGHT = 0.7


def trainer_with(models, name, folder, rows, its_rows=None, flags=(), **settings):
    """Return a trainer of rows, whose order it does not change; its_rows are held out."""
    trainer_class, args = trainer_of(name, folder, train_sampling_strategy="sequential", **settings)
    return distilled(trainer_class, models[1], kd_weight=KD_WEIGHT, max_length=60, **dict(flags))(
        AutoModelForCausalLM.from_pretrained(models[0]), args=args, train_dataset=rows,
        eval_dataset=its_rows, processing_class=AutoTokenizer.from_pretrained(models[0]))


def mean_losses(models, rows):
    """Return the means of cross-entropy and distillation loss over all terms of rows."""
    model = AutoModelForCausalLM.from_pretrained(models[0])
    distillation = Distillation(
        AutoTokenizer.from_pretrained(models[0]), models[1], kd_weight=KD_WEIGHT, max_length=60)
    batch = distillation.collate(rows)
    with torch.no_grad():
        _, sums = distillation.loss(model(**distillation.inputs(batch)).logits, batch)
    return [float(total) / max(count, 1) for total, count in zip(sums, count_terms(batch))]


def unequal(texts, number):
    return [{"text": text[: 20 + 12 * place]} for place, text in enumerate(texts[:number])]


# --- held-out rows --------------------------------------------------------------------------------


def evaluate_on_a_rank(name, models, rows, folder):
    """Return [(number of rows, metrics)] on one of two ranks, of rows in memory and of streams."""
    from datasets import Dataset

    torch.distributed.init_process_group("gloo")
    found = []
    trainer = trainer_with(models, name, folder, Dataset.from_list(rows),
                           per_device_eval_batch_size=3)
    data, one = Dataset.from_list(rows), Dataset.from_list(rows[:1])
    for its_rows in (rows, data.to_iterable_dataset(num_shards=3)):
        found.append((len(rows), trainer.evaluate(its_rows)))
    for its_rows in (one, one.to_iterable_dataset()):
        found.append((1, trainer.evaluate(its_rows)))
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(data), "held-out rows")
    assert output.num_samples == len(rows)  # of which speeds are made
    return found


@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer"])
def test_held_out_numbers_do_not_depend_on_the_ranks(chat_models, texts, tmp_path, name):
    """Ten rows by threes, also as a stream and in shards of unequal size; one row is on one rank.
    """
    if name == "SFTTrainer":
        pytest.importorskip("trl")
    rows = unequal(texts, 10)
    expected = {number: mean_losses(chat_models, rows[:number]) for number in (10, 1)}
    for found in ranks.run(2, evaluate_on_a_rank, name, chat_models, rows, tmp_path):
        assert len(found) == 4
        for number, metrics in found:
            ce, kd = expected[number]
            assert [metrics[f"eval_{key}"] for key in ("ce", "kd", "loss")] == pytest.approx(
                [ce, kd, ce + KD_WEIGHT * kd], rel=1e-5), number


# --- the order of rows ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_trls_shuffle_has_its_order(chat_models, texts, tmp_path, is_stream):
    from datasets import Dataset

    pytest.importorskip("trl")
    data = Dataset.from_list([{"text": text[:20]} for text in texts[:8]])
    data = data.to_iterable_dataset() if is_stream else data
    for shuffles in (False, True):
        trainer = trainer_with(chat_models, "SFTTrainer", tmp_path, data, seed=5,
                               shuffle_dataset=shuffles)
        expected = data.shuffle(seed=5) if shuffles else data
        assert list(trainer.train_dataset) == list(expected)
        assert (list(expected) == list(data)) != shuffles


# --- the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_line_of_several_steps_has_the_means_of_each(chat_models, texts, tmp_path, is_stream):
    """Of steps with unequal terms, one without any; also where an earlier training ended between.
    """
    from datasets import Dataset

    rows = [*unequal(texts, 6), *[{"text": ""}] * 3, *unequal(texts[6:], 6)]
    data = Dataset.from_list(rows)
    trainer = trainer_with(
        chat_models, "Trainer", tmp_path, data.to_iterable_dataset() if is_stream else data,
        per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=5, logging_steps=3)
    steps = [mean_losses(chat_models, rows[first : first + 3]) for first in range(0, 15, 3)]
    assert steps[2] == [0, 0]
    for _ in range(2):
        with pytest.warns(UserWarning, match="a step has 0 tokens to learn and 0 terms"):
            trainer.train()
        [line] = [line for line in trainer.state.log_history if "loss" in line]
        ce, kd = [sum(step) / 3 for step in zip(*steps[:3])]
        assert [line["ce"], line["kd"]] == pytest.approx([ce, kd], rel=1e-5)
        assert line["loss"] == pytest.approx(ce + KD_WEIGHT * kd, rel=1e-5)


def log_on_a_rank(models, rows, folder):
    torch.distributed.init_process_group("gloo")
    trainer = trainer_with(models, "Trainer", folder, rows, per_device_train_batch_size=1,
                           gradient_accumulation_steps=2, max_steps=3, logging_steps=3)
    trainer.train()
    return trainer.state.log_history[0]


def test_a_line_of_several_ranks_has_them_too(chat_models, texts, tmp_path):
    rows = unequal(texts, 12)
    steps = [mean_losses(chat_models, rows[first : first + 4]) for first in range(0, 12, 4)]
    ce, kd = [sum(step) / 3 for step in zip(*steps)]
    for line in ranks.run(2, log_on_a_rank, chat_models, rows, tmp_path):
        assert [line["ce"], line["kd"], line["loss"]] == pytest.approx(
            [ce, kd, ce + KD_WEIGHT * kd], rel=1e-5)


@pytest.mark.parametrize("counts", ["all", "non_padding"])
def test_a_trainer_counts_the_students_tokens(chat_models, texts, tmp_path, counts):
    rows = unequal(texts, 8)
    trainer = trainer_with(chat_models, "Trainer", tmp_path, rows,
                           include_num_input_tokens_seen=counts)
    trainer.train()
    collate = trainer.distillation.collate
    num_read = sum(count_terms(collate([row]))[0] for row in rows)  # each predicts a label of it
    num_positions = sum(collate(rows[first : first + 2])["labels"].numel()
                        for first in range(0, 8, 2))
    assert num_positions > num_read
    line = trainer.state.log_history[0]
    assert line["num_input_tokens_seen"] == {"all": num_positions, "non_padding": num_read}[counts]
    parameters = trainer.model.num_parameters(exclude_embeddings=True)
    assert trainer.state.total_flos == 6 * num_positions * parameters


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_teacher_and_tokenizer_are_named_by_texts_or_paths(chat_models, texts, kind):
    student = AutoTokenizer.from_pretrained(chat_models[0])
    name = kind(chat_models[1])
    expected = Distillation(student, chat_models[1])
    rows = unequal(texts, 3)
    for named in ((name,), (name, name), (expected.model, name)):
        distillation = Distillation(student, *named)
        assert distillation.encoder.table.tokens == expected.encoder.table.tokens
        assert count_terms(distillation.collate(rows)) == count_terms(expected.collate(rows))
