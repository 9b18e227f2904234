"""Read a file that is one JSON value over many lines, and say why a line is no JSON.

Tests: tests/test_open_data.py, tests/test_wrong_data.py.
"""

import itertools
import json

from isogloss.data.checks import NAMES_OF_JSON, BadLine
from isogloss.data.file_rows import DECODER, Piece, line_in_file, lines_of
from isogloss.flags.json_text import without_twins


def rows_of_value(piece, number):
    """Yield (line, object) of a file that is one JSON value; of a list of texts as a column."""
    file = piece.file
    number = line_in_file(piece, number)
    text = "".join(itertools.islice(lines_of(Piece(file)), number - 1, None))
    try:
        value = DECODER.decode(text)
    except RecursionError:
        raise BadLine(f"{file}: is nested too deep; repair it") from None
    except ValueError as error:
        first = text.splitlines()[0]
        is_row = not first.startswith(("[", "{")) or first.endswith("]")
        problem = problem_of_json(first) if is_row else f"is not JSON ({error}); repair it"
        raise BadLine(f"{file}: line {number} {problem}") from None
    if isinstance(value, dict):
        value = [value]
    elif not isinstance(value, list):
        raise BadLine(f"{file}: line {number} {problem_of_json(text)}")
    for row in value:
        yield number, row if isinstance(row, dict) else {"text": row}


def problem_of_json(line):
    """Return why a line is no JSON object; None: it is one."""
    try:
        value = json.loads(line, object_pairs_hook=without_twins)
    except RecursionError:
        return "is nested too deep; repair or remove it"
    except json.JSONDecodeError as error:
        return f"is not JSON ({error.msg} at character {error.pos}); repair or remove it"
    except ValueError as error:
        return str(error)
    if type(value) is not dict:
        return f'holds {NAMES_OF_JSON[type(value)]}, expected an object like {{"text": "..."}}'
    return None
