"""Let a failure of one rank be one of all, so that all of them can save.

Tests: tests/test_checkpoint.py, tests/test_environments.py, tests/test_served_teachers.py.
"""

from functools import partial

from isogloss.errors import DataError, EngineError, EngineStopped
from isogloss.job.counts import global_sums
from isogloss.job.rendezvous import values_of_ranks


class DataErrorOfRank(EngineError):
    """Report a DataError of one rank, on all of them."""

    code = 2


def together(function, kind=EngineError):
    """Return what a function of this rank returns; all ranks take part.

    Raises:
        kind: on every rank, where a DataError or EngineError ends the function on one.
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
    num_problems, num_stopped = global_sums([bool(problem), is_stopped]).tolist()
    if num_stopped:
        raise EngineStopped
    if num_problems:
        raise kind(next(filter(None, values_of_ranks(problem))))
    return result


class Together:
    """Iterate over batches, of which every rank has equally many."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        """Yield batches.

        Raises:
            DataErrorOfRank, EngineStopped: on every rank.
        """
        batches = iter(self.batches)
        while (batch := together(partial(next, batches, None), DataErrorOfRank)) is not None:
            yield batch
