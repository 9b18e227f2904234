"""Write a learned projection as a file.

Tests: tests/test_export.py.
"""

import torch.distributed as dist

from isogloss.job.rendezvous import values_of_ranks
from isogloss.student.engine import gathered


def export_projection(engine, learned_projection, target):
    """Write a learned projection as a projection file; all ranks take part.

    Args:
        engine: whose module holds the scores as `.projection_scores`.
        learned_projection: whose tables(scores) are what the file holds.
    Returns:
        Why it could not be written, the same on all ranks; None: it was.
    """
    from isogloss.projection_tools.save import save_atomically

    error = None
    scores = engine.module.projection_scores
    with gathered(scores):
        if dist.get_rank() == 0:
            try:
                save_atomically(learned_projection.tables(scores), target)
            except ValueError as failure:
                error = str(failure)
    return values_of_ranks(error)[0]
