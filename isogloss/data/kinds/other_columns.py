"""Check what rows hold beside the text: routes, weights, prompts, and what teachers alone read.

`parts` are pairs of a data set and its ExampleReader.

Tests: tests/test_taught.py, tests/test_wrong_data.py.
"""

import math

import datasets
import numpy as np

from isogloss.data.batch_types import Example
from isogloss.data.checks import name_of_type
from isogloss.data.open_data import STRINGS, column_names
from isogloss.data.order import ROWS_TO_TEACH
from isogloss.errors import DataError


def check_routes(dataset, route_key, routes):
    """Raise a ValueError where a column cannot hold what "routes" name.

    Args:
        routes: list of the values that teachers are for.
    Returns:
        tuple of the names that the numbers of a column of labels stand for; () where routes are
        not named so.
    """
    columns = column_names(dataset)
    if route_key not in columns:
        raise ValueError(f"--route_key {route_key}: no such column; it has {', '.join(columns)}")
    feature = (dataset.features or {}).get(route_key)
    if feature is None:  # a stream, of which every row is looked at
        return ()
    names = ()
    if isinstance(feature, datasets.ClassLabel) and any(isinstance(its, str) for its in routes):
        names = tuple(feature.names)
    dtype = "string" if names else getattr(feature, "dtype", None)
    is_value = isinstance(feature, (datasets.Value, datasets.ClassLabel))
    if not is_value or dtype in ("null", "binary"):
        raise ValueError(f"--route_key {route_key}: the column holds {name_of_type(feature)}, "
                         "expected a text or a number in every row; name another column")
    for route in routes:
        if route is not None and isinstance(route, str) != (dtype in STRINGS):
            raise ValueError(f"--route_key {route_key}: the column holds {dtype}, but --teachers "
                             f"name the route {route!r}; name values of the column")
    return names


def check_route(route, source, routes_by_teacher):
    """Raise a ValueError where no teacher reads the rows of a source with this route.

    Args:
        routes_by_teacher: {teacher: its routes, or None for all that no other names}.
    """
    if isinstance(route, (list, dict)):
        raise ValueError(f"--data: route {route!r:.40} of {source}: expected a text or a number")
    taken = routes_by_teacher.values()
    if not any(routes is None or route in routes for routes in taken):
        its = "no route" if route is None else f"route {route!r}"
        raise ValueError(f"--data: {its} of {source}: no teacher of --teachers reads such rows; "
                         "name one that does")


def check_other_columns(parts, collator, names, weighs):
    """Raise a DataError where a teacher would teach nothing, by what stands beside the text.

    Args:
        collator: Collator; names: of its teachers.
        weighs: all of them count each row by its weight.
    """
    check_routes_taken(parts, collator, names)
    check_teacher_prompts(parts)
    if weighs:
        check_weights(parts)


def check_teacher_prompts(parts):
    """Raise a DataError where no row has what teachers alone are to read.

    A column of JSON may come in a late row, so that a wrong name looks like an empty column.
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
        dataset = dataset.select_columns([key])
    return any(row.get(key) for row in dataset)


def check_routes_taken(parts, collator, names):
    """Raise a DataError where no row of mapped data is for one of a Collator's teachers."""
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
    raise DataError(f"--data: weight_key {reader.weight_key}: every row weighs 0, so that no "
                    "teacher teaches anything; name another column")


def problem_of_columns(reader, row):
    """Return what is wrong with a row beside its text, to follow its name; None: nothing.

    Args:
        reader: ExampleReader.
    """
    if reader.route_key:
        route = row.get(reader.route_key)
        if isinstance(route, (list, dict)):
            return f": {reader.route_key!r} holds {route!r:.40}, expected a text or a number"
    if reader.weight_key:
        weight = row.get(reader.weight_key)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and 0 <= weight < math.inf):
            return f": {reader.weight_key!r} holds {weight!r:.40}, expected a number, 0 or more"
    content = reader.value(row, reader.text_key)
    if reader.prompt_key:
        prompt = reader.value(row, reader.prompt_key)
        problem = reader.problem_of_content(prompt)
        if problem:
            return f": {reader.prompt_key!r}{problem}"
        if reader.is_completion and type(prompt) is not type(content) and content is not None:
            return f": {reader.prompt_key!r} and it are not both texts, or both chats"
    if reader.teacher_prompt_key:
        problem = reader.problem_of_content(reader.value(row, reader.teacher_prompt_key) or "")
        if problem:
            return f": {reader.teacher_prompt_key!r}{problem}"
        if isinstance(content, str) or (reader.prompt_key and isinstance(prompt, str)):
            return " is no chat, and --teacher_prompt_key stands in front of one"
    return None
