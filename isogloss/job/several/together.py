"""Let a failure of one rank be one of all, so that all of them can save.

Tests: tests/test_environments.py, tests/test_served_teachers.py.
"""

from isogloss.errors import DataError, EngineError, EngineStopped
from isogloss.job.rendezvous import values_of_ranks


def together(function):
    """Return what a function of this rank returns; all ranks take part.

    Raises:
        EngineError: on every rank, where a DataError or EngineError ends the function on one.
        EngineStopped: likewise, where a signal does.
    """
    result = None
    problem, is_stopped = "", False
    try:
        result = function()
    except (DataError, EngineError) as error:
        problem = str(error)
    except EngineStopped:
        is_stopped = True
    of_ranks = values_of_ranks((problem, is_stopped))
    if any(stopped for _, stopped in of_ranks):
        raise EngineStopped
    if problem := next((of_rank for of_rank, _ in of_ranks if of_rank), ""):
        raise EngineError(problem)
    return result
