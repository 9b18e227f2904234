"""Tell before the first step of a teacher that would teach nothing, and why.

Tests: tests/test_taught.py.
"""

from collections import Counter

import datasets
import numpy as np
import torch

from isogloss.data.batch_types import Example
from isogloss.data.open_data import first_rows
from isogloss.data.rollouts import SkippedPrompt, completed
from isogloss.errors import DataError
from isogloss.rollout import Completion

ROWS_TO_TEACH = 64  # of which each teacher has to teach something


def check_teacher_prompts(parts):
    """Raise a DataError where no row has what teachers alone are to read.

    A column of JSON may come in a late row, so that a wrong name looks like an empty column.

    Args:
        parts: [(data set, its ExampleReader)].
    """
    keys = {reader.teacher_prompt_key for _, reader in parts} - {""}
    if keys and not any(_has_teacher_prompt(*part) for part in parts):
        raise DataError(f"--teacher_prompt_key {', '.join(keys)}: no row has anything there; name "
                        "a column that rows have")


def _has_teacher_prompt(dataset, reader):
    """Tell whether a row has one; of a stream, whether one of its first rows has."""
    key = reader.teacher_prompt_key
    if not key:
        return False
    if isinstance(dataset, datasets.IterableDataset):
        dataset = dataset.take(ROWS_TO_TEACH)
    else:
        column = dataset.data.column(key)
        if column.null_count == len(column):
            return False
    return any(row[key] for row in dataset)


def check_routes_taken(parts, collator, names):
    """Raise a DataError where no row of mapped data is for one of several teachers.

    Args:
        parts: [(data set, its ExampleReader)]; collator: Collator; names: of its teachers.
    """
    taken = np.zeros(len(names), bool)
    routes = {}
    for dataset, reader in parts:
        of_data = [reader.route]
        if reader.route_key:
            if isinstance(dataset, datasets.IterableDataset):
                return
            of_data = dataset.unique(reader.route_key)
        for route in of_data:
            taken |= collator.teachers_of(Example(None, route))
            routes[route] = None
    for name in np.array(names)[~taken]:
        shown = ", ".join(repr(route) for route in list(routes)[:5])
        raise DataError(f"--teachers: no row is for {name}, by its routes; the data have {shown}; "
                        "repair its routes, or leave it out")


def check_weights(parts):
    """Raise a DataError where every row of mapped data weighs 0."""
    for dataset, reader in parts:
        is_stream = isinstance(dataset, datasets.IterableDataset)
        if is_stream or not reader.weight_key or any(dataset[reader.weight_key]):
            return
    raise DataError(f"--weight_key {reader.weight_key}: every row weighs 0, so that no teacher "
                    "teaches anything; name another column")


def check_taught(parts, collator, names, prompter=None):
    """Raise a DataError where a teacher would teach nothing of the first rows.

    Args:
        parts: [(data set, its ExampleReader)]; collator: Collator; names: of its teachers.
        prompter: Prompter, where the student writes everything itself; the end of a prompt then
            stands for what it may write.
    """
    reasons = {name: Counter() for name in names}
    for dataset, reader in parts:
        rows = first_rows(dataset, ROWS_TO_TEACH, reader.text_key, reader.source)
        for number, row in enumerate(rows):
            example = reader(row, number)
            if prompter:
                example = _as_if_written(example, prompter)
            [sample] = collator.samples([example])
            taking = collator.teachers_of(example)
            for name, pair, options, takes in zip(names, sample.pairs, collator.pairs, taking):
                if takes and name in reasons and example.content is not None:
                    reason = _why_not_taught(pair, options.encoder, collator.student)
                    reasons[name][reason] += 1
                    if reason is None:
                        del reasons[name]
            if not reasons:
                return
    for name, of_teacher in reasons.items():
        if of_teacher:
            described = "; ".join(f"{n} {reason}" for reason, n in of_teacher.most_common(3))
            raise DataError(f"teacher {name}: would teach nothing of the first "
                            f"{of_teacher.total()} rows: {described}")


def _as_if_written(example, prompter):
    """Return an Example of which the student wrote the end of its prompt once more."""
    try:
        prompt = prompter.prompt(example, (0, 0))
    except SkippedPrompt:
        return Example(None)
    table = prompter.encoder.table
    ids = torch.from_numpy(prompt.ids[~table.special[prompt.ids]][-prompt.max_new_tokens :])
    nothing = torch.zeros(len(ids))
    rollout = completed(prompt, Completion(ids, nothing, nothing, ended=False), prompter.encoder)
    return Example(rollout if len(ids) else None, example.route)


def _why_not_taught(pair, encoder, student):
    """Return why a PairSample has no term, to follow a number of rows; None: it has one."""
    if pair.student_chunk.max(initial=-1) >= 0:
        return None
    if pair.alignment is None:
        return "are refused by a chat template"
    if len(pair.alignment.teacher_chunk) > encoder.max_length + 1:
        return (f"are longer than its {encoder.max_length} positions before anything is compared "
                "(its context, or --teacher_max_length)")
    if len(pair.alignment.student_chunk) > student.max_length + 1:
        return f"are cut at --max_length {student.max_length} before anything is compared"
    return "hold nothing that both tokenizers spell and the student learns"
