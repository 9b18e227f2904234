"""data.py: data sets of every kind; the order of samples depends on the seed alone."""

import itertools
import json
import os
import signal
import warnings

import datasets
import pytest
import torch

from isogloss.data import chat, order
from isogloss.data.open_data import load_dataset
from isogloss.data.stream import StreamedExamples, joined_rows
from isogloss.data.turns import SkippedChat, Template
from isogloss.data.workers import Loader
from isogloss.errors import DataError
from isogloss.job import trial
from isogloss.log import Waiting
from test_chat import CHAT, refuse_chats_of, with_templates

READER = order.ExampleReader("text")


class Samples(list):
    """Stands for a Batch."""


class Texts:
    """Collates to the texts themselves, with the positions of the samples."""

    def __call__(self, examples, sample_ids):
        texts = [example.content if example else None for example in examples]
        return Samples([list(sample) for sample in zip(texts, sample_ids)])


@pytest.fixture
def dataset():
    return datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(7)]})


def test_the_first_rows_are_held_out(tmp_path):
    lines = ["one", "two", "three"]
    for name in ("x.jsonl", "y.jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in lines))
    for source, streaming in ((str(tmp_path), True), (f"{tmp_path}/*.jsonl", False)):
        dataset = load_dataset(source, "text", streaming=streaming)
        train, held_out = order.split_dataset(dataset, 2, "text")
        assert [row["text"] for row in held_out] == lines[:2] and len(list(train)) == 4
        message = "--eval_rows 6: the data has 6 rows, none is left to train on"
        with pytest.raises(ValueError, match=message):
            order.split_dataset(dataset, 6, "text")


@pytest.mark.parametrize("side", [0, 1])
def test_a_template_that_refuses_all_chats_ends_the_job(tokenizers, side):
    encoders = with_templates(tokenizers)
    refuse_chats_of(encoders[side], len(CHAT[1:]))
    dataset = datasets.Dataset.from_dict({"text": [CHAT[1:], CHAT]})
    chat.check_templates(dataset, READER, encoders)
    message = "refuses a chat: no; it refuses the other 0 of the first chats too"
    with pytest.raises(ValueError, match=message):
        chat.check_templates(dataset.select([0]), READER, encoders)
    # one good chat further on does not help: the first ones are tried
    late = datasets.Dataset.from_dict({"text": [CHAT[1:]] * chat.CHATS_TO_TRY + [CHAT]})
    num_others = chat.CHATS_TO_TRY - 1
    with pytest.raises(ValueError, match=f"the other {num_others} of the first chats too"):
        chat.check_templates(late, READER, encoders)


def test_a_late_row_of_json_that_holds_no_chat_ends_the_job(tokenizers):
    reader = order.ExampleReader("text", has_chats=True)
    good = [json.dumps(CHAT)] * 33
    for bad in ("[]]", json.dumps([{"content": "a"}]), json.dumps(CHAT[:1] + [{}])):
        dataset = datasets.Dataset.from_dict({"text": [*good, bad, *good]})
        with pytest.raises(DataError, match="row 33 of 'text'"):
            chat.check_templates(dataset, reader, with_templates(tokenizers))


ALPACA = ("{% for m in messages %}### {{ 'Response' if m.role == 'assistant' else 'Instruction' }}"
          ":\n{{ m.content }}\n\n{% endfor %}")


@pytest.mark.parametrize("template, is_said", [
    (ALPACA, True),
    (ALPACA.replace("{% endfor %}", "{{ eos_token }}{% endfor %}"), False),
    (ALPACA.replace("{% endfor %}", "<|stop|>{% endfor %}"), True),  # no token of this tokenizer
])
def test_a_template_that_ends_no_answer_is_named(tokenizers, template, is_said):
    encoders = with_templates(tokenizers, student_template=template)
    dataset = datasets.Dataset.from_dict({"text": [CHAT, CHAT[:1], CHAT[:2]]})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chat.check_templates(dataset, READER, encoders)
    ends = [str(line.message) for line in said if "ends no answer" in str(line.message)]
    assert len(ends) == is_said
    assert all("(2 of the first 3 chats)" in line for line in ends)


@pytest.mark.parametrize("side", [0, 1])
def test_a_key_that_no_template_reads_is_refused(tokenizers, side):
    asks = "{%- if thinks is defined and thinks %}{% generation %}a{% endgeneration %}{% endif %}"
    dataset = datasets.Dataset.from_dict({"text": [CHAT]})
    for template in (asks, {"default": "", "tool_use": asks}, "chat_template", "{{ broken"):
        encoders = with_templates(tokenizers)
        told = {"thinks": True}
        if template == "chat_template":  # of --template_kwargs, in place of the tokenizer's
            told[template] = asks
        else:
            encoders[side].tokenizer.chat_template = template
        for encoder in encoders:
            encoder.template_kwargs = told
        chat.check_told(encoders)
        for encoder in encoders:
            encoder.template_kwargs = {"thinsk": True, "strftime_now": "2026-05-01"}
        if template != "{{ broken":
            with pytest.raises(ValueError, match="no chat template reads thinsk; correct"):
                chat.check_templates(dataset, READER, encoders)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# {chat template that does harm: what is said of it}
HARMFUL = {
    LOOPS: "does not end within 1 seconds",
    "{% if add_generation_prompt %}" + LOOPS + "{% endif %}{{ messages[0].content }}":
        "does not end within 1 seconds",
    # not with a short chat
    "{% if messages | length > 3 %}" + LOOPS + "{% endif %}{{ messages }}":
        "does not end within 1 seconds",
    "{{ 'a' * 10 ** 11 }}": "takes more than 1 GiB of memory",
    "{% set x = namespace(y='a') %}{% for a in range(99) %}{% set x.y = x.y + x.y %}{% endfor %}":
        "takes more than 1 GiB of memory",
    "{{ 'a' * 2 ** 25 }}": f"writes {2**25} characters of a chat; a tokenizer takes up to {2**24}",
}


@pytest.mark.parametrize("template", HARMFUL)
@pytest.mark.parametrize("side", [0, 1])
def test_a_template_that_does_harm_is_refused(tokenizers, monkeypatch, template, side):
    if "1 seconds" in HARMFUL[template]:
        monkeypatch.setattr(trial, "TRIAL_SECONDS", 1)
    encoders = with_templates(tokenizers)
    encoders[side].tokenizer.chat_template = template
    dataset = datasets.Dataset.from_dict({"text": [CHAT]})
    with pytest.raises(ValueError, match=HARMFUL[template]) as error:
        chat.check_templates(dataset, READER, encoders)
    assert "\n" not in str(error.value)


def test_a_chat_too_large_for_memory_is_skipped_later(tokenizers):
    """Where the first chats are harmless, one of them all costs no job."""
    [encoder, _] = with_templates(tokenizers)
    encoder.tokenizer.chat_template = (
        "{% if 'large' in messages[0].content %}{{ 'a' * 10 ** 15 }}{% endif %}{{ messages }}")
    template = Template(encoder)
    assert template.write([{"role": "user", "content": "small"}])
    with pytest.raises(SkippedChat):
        template.write([{"role": "user", "content": "large"}])


def test_a_trial_that_is_killed_ends_alone():
    harmless = "b", lambda: ["a", 2]
    assert trial.in_bounds([harmless, harmless]) == [["a", 2], ["a", 2]]
    with pytest.raises(ValueError, match="a ends the process that tries it"):
        trial.in_bounds([harmless, ("a", lambda: os.kill(os.getpid(), signal.SIGKILL))])


def steps_of(dataset, num_ranks, micro_batch_size, grad_accum_steps, workers=0, start=0, steps=6,
             seed=3, reader=READER):
    """Return the [text, sample id] of each step, sorted by id: what the optimizer sees."""
    stream = order.ShuffledExamples(dataset, reader, seed)
    iterators = []
    for rank in range(num_ranks):
        batches = order.MicroBatches(stream, Texts(), micro_batch_size, grad_accum_steps, rank,
                                     num_ranks, start)
        iterators.append(iter(Loader(batches, workers)))
    seen = []
    for _ in range(steps - start):
        step = []
        for iterator in iterators:
            for batch in itertools.islice(iterator, grad_accum_steps):
                step += batch
        seen.append(sorted(step, key=lambda sample: sample[1]))
    return seen


LAYOUTS = [((2, 2, 1), 0, 0), ((4, 1, 1), 2, 0), ((2, 1, 2), 2, 2), ((2, 2, 1), 1, 3),
           ((1, 1, 4), 1, 3)]


@pytest.mark.parametrize("join", [0, 20])
def test_order_and_ids_depend_on_the_seed_alone(join):
    """For any number of ranks and workers, and after a resume; ids are positions in the stream."""
    texts = [f"row {i} " + "x" * (i % 7) for i in range(40 if join else 7)]
    dataset = datasets.Dataset.from_dict({"text": texts})
    reader = order.ExampleReader("text", join=join)
    one = steps_of(dataset, 1, 4, 1, reader=reader)
    for layout, workers, start in LAYOUTS:
        steps = steps_of(dataset, *layout, workers=workers, start=start, reader=reader)
        assert steps == one[start:], (layout, workers, start)
    assert one != steps_of(dataset, 1, 4, 1, seed=4, reader=reader)
    stream = order.ShuffledExamples(dataset, reader, 3)
    samples = list(itertools.chain(*one))
    assert samples == [[stream.example(number).content, number] for number in range(24)]
    read = [text for text, _ in samples]
    if join:
        assert "\n" in read[0]
    else:  # epochs
        assert sorted(read[:7]) == sorted(read[7:14]) == sorted(texts) and read[:7] != read[7:14]


def test_a_stream_gives_the_same_again_from_any_number_of_workers(dataset):
    """With the places from which it goes on, over the borders of epochs."""
    def read(workers, start=0):
        stream = StreamedExamples(dataset.to_iterable_dataset(), READER, 3)
        batches = order.MicroBatches(stream, Texts(), 2, 1, 0, 1, start)
        read = itertools.islice(iter(Loader(batches, workers)), 8 - start)
        return [(list(batch), batch.place) for batch in read]

    whole = read(1)
    assert whole == read(0) == read(3)
    assert whole[3:] == read(1, 3) == read(2, 3)
    samples = list(itertools.chain(*[batch for batch, _ in whole]))
    assert sorted(text for text, _ in samples[:7]) == sorted(dataset["text"])
    assert [sample_id for _, sample_id in samples] == list(range(16))
    assert {place["epoch"] for _, place in whole} >= {0, 1, 2}


# lengths in characters: 3, 2 (6 bytes), 0, 4, 9, 1, 1, 1
UNEQUAL = ["one", "\u65e5\u672c", "", "four", "long line", "a", "b", "c"]
# rows of UNEQUAL in a sample of at least so many characters
JOINED = {
    1: [[0], [1], [2, 3], [4], [5], [6], [7]],
    5: [[0, 1], [2, 3, 4], [5, 6, 7]],
    9: [[0, 1, 2, 3], [4], [5, 6, 7]],
    99: [[0, 1, 2, 3, 4, 5, 6, 7]],
}


@pytest.mark.parametrize("characters", JOINED)
def test_neighboring_rows_are_joined_whole_up_to_so_many_characters(characters):
    reader = order.ExampleReader("text", join=characters)
    texts = ["\n".join(UNEQUAL[row] for row in rows if UNEQUAL[row])
             for rows in JOINED[characters]]
    size = len(texts)
    dataset = datasets.Dataset.from_dict({"text": ["held out", *UNEQUAL, "x"]})
    dataset = dataset.select(range(1, 9))
    mapped = order.ShuffledExamples(dataset, reader, 3)
    epochs = [[mapped.example(position).content for position in range(first, first + size)]
              for first in range(0, 4 * size, size)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(texts)
    assert size == 1 or len(set(map(tuple, epochs))) > 1  # an order of its own
    stream = StreamedExamples(dataset.to_iterable_dataset(), reader, 3)
    assert sorted(stream.example(position).content for position in range(size)) == sorted(texts)
    for rows in (dataset, list(dataset)):
        assert [row["text"] for row in joined_rows(rows, reader)] == texts


def test_what_is_joined_is_text():
    reader = order.ExampleReader("text", source="d", join=9)
    chat = {"text": [{"role": "user", "content": "a"}]}
    with pytest.raises(DataError, match="row 6 of 'text' is a chat, and --join_rows joins texts"):
        reader.sample([{"text": "a"}, chat], 5)
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}, {"text": 3}]))
    with pytest.raises(DataError, match="row 1 of 'text' holds 3, expected text"):
        StreamedExamples(rows, order.ExampleReader("text", join=9), 0).example(0)


def test_routes_are_read_beside_the_text():
    row = {"text": "a", "teacher": None, "other": "b"}
    assert order.ExampleReader("text")(row).route is ...  # every teacher
    assert order.ExampleReader("text", "teacher")(row).route is None
    assert order.ExampleReader("text", "other")(row) == ("a", "b", None, None, 0, (), 1.0, None)


def test_held_out_rows_are_read_once_by_equally_many_batches(dataset):
    for num_ranks, micro_batch_size, workers in ((1, 2, 2), (2, 2, 0), (4, 3, 2)):
        by_rank = []
        for rank in range(num_ranks):
            batches = order.HeldOutBatches(
                dataset, READER, Texts(), micro_batch_size, rank, num_ranks)
            by_rank.append(list(Loader(batches, workers)))
        assert len({len(batches) for batches in by_rank}) == 1
        batches = list(itertools.chain(*by_rank))
        assert {len(batch) for batch in batches} == {micro_batch_size}
        samples = list(itertools.chain(*batches))
        real = [sample for sample in samples if sample[0] is not None]
        assert sorted(real) == [[text, i] for i, text in enumerate(dataset["text"])]
        # what fills up the last batches is no sample
        assert {i for text, i in samples if text is None} <= {-1}


def test_loading_leaves_the_random_state_alone(dataset):
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    stream = order.ShuffledExamples(dataset, READER, 0)
    next(iter(Loader(order.MicroBatches(stream, Texts(), 1, 1, 0, 1), 0)))
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("data_seconds, line", [(0.3, "steps wait for data 30% of their time"),
                                                (0.1, "")])
def test_a_run_says_once_that_it_waits_for_data_or_has_nothing_to_learn(
        data_seconds, line, capsys):
    waiting = Waiting()
    learned = {"data_seconds": data_seconds, "tokens": 9, "cut_before_labels": None}
    waiting.note(learned | {"data_seconds": 50.0}, 60.0)  # the first step starts the workers
    for step in range(50):
        waiting.note(learned if line or step % 9 else learned | {"tokens": 0}, 1.0)
    said = capsys.readouterr().err
    assert line in said and said.count("--num_workers") == bool(line)
    assert said.count("a step has no token to learn") == (not line)


@pytest.mark.parametrize("cut, line", [
    (0.75, "a step loses 75% of its samples, which --max_length cuts"), (0.25, "")])
def test_a_run_says_once_that_many_samples_are_cut_before_what_is_learned(cut, line, capsys):
    waiting = Waiting()
    for _ in range(3):
        waiting.note({"data_seconds": 0.0, "tokens": 9, "cut_before_labels": cut}, 1.0)
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == bool(line)
