"""Say in one line why data cannot be read: which row of which file, or what its reader said.

Tests: tests/test_wrong_data.py, tests/test_open_data.py.
"""

import errno
import os

from datasets import config
from huggingface_hub.constants import HF_HUB_CACHE

from isogloss.data.checks import (
    DAMAGE,
    EMPTY_DATA,
    BadLine,
    damaged,
    first_line_of,
    kind_of,
    local_files,
    open_bytes,
    place_of,
    problem_of_bytes,
)

NO_SPACE = "Not enough disk space"  # as `datasets` says, which looks before it writes
FULL = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG  # of writing, not of reading


def explain(source, error):
    """Return why data cannot be read: the bad line or row of a file, or what the reader said."""
    cause = error.__cause__ or error
    if isinstance(cause, BadLine):
        is_named = str(cause).startswith(f"{source}: ")
        return f"--data {cause}" if is_named else f"--data {source}: {cause}"
    variable, cache = _cache_of(cause, source)
    if cache:
        return (f"{variable} {cache}: cannot be written ({cause.strerror or cause}), and --data "
                f"{source} is kept there; name another directory by this variable, or make room")
    for file in local_files(source):
        problem = _problem_of_text(file) if kind_of(file) == "text" else None
        if problem:
            return f"{place_of(source, file)}: {problem}"
    if "corresponds to no data" in str(error):
        return f"--data {source}: {EMPTY_DATA}"
    return f"--data {source}: cannot be read ({type(cause).__name__}: {first_line_of(cause)})"


def _cache_of(error, source):
    """Return (variable, directory) of the libraries' cache that an error is about, or two None."""
    caches = {"HF_HUB_CACHE": HF_HUB_CACHE, "HF_DATASETS_CACHE": str(config.HF_DATASETS_CACHE)}
    named = error.filename if isinstance(error, OSError) else None
    if isinstance(named, str) and named not in (os.path.expanduser(source), *local_files(source)):
        for variable, cache in caches.items():
            both = [os.path.abspath(cache), os.path.abspath(named)]
            common = os.path.commonpath(both)
            # above or at the cache, which cannot be made; in it, where a file is not just missing
            if common == both[1] or (common == both[0] and error.errno != errno.ENOENT):
                return variable, cache
    if isinstance(error, OSError) and (error.errno in FULL or NO_SPACE in str(error)):
        return "HF_DATASETS_CACHE", caches["HF_DATASETS_CACHE"]
    return None, None


def _problem_of_text(file):
    """Return which line of a .txt file is not UTF-8, or that it is damaged; None: neither."""
    try:
        with open_bytes(file) as stream:
            for number, line in enumerate(stream, 1):
                if problem := problem_of_bytes(line):
                    return f"line {number} {problem}"
    except DAMAGE as error:
        return damaged(error)
    return None
