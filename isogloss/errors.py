"""The errors that more than one room raises."""


class DataError(ValueError):
    """Report data that cannot be used, or a worker that is gone, in the middle of a run."""


class CannotSave(Exception):
    """Report a checkpoint, or another file of a run, that cannot be written; those before stay."""


class EngineError(RuntimeError):
    """Report that an engine has ended, does not answer, or gives another answer than expected."""

    code = 1  # with which the job ends


class EngineStopped(Exception):
    """Report that a signal asks the job to end while it waits for an engine or a data worker."""
