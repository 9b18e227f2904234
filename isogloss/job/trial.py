"""Try what files of others do, such as a chat template, in a process with bounds.

Tests: tests/test_data.py, tests/test_hostile_files.py.
"""

import gc
import json
import multiprocessing
import os
import resource
import signal
import traceback
from pathlib import Path

from isogloss.job.processes import end_with

TRIAL_SECONDS = 30  # for what takes milliseconds
TRIAL_BYTES = 2**30  # of memory, beside what the process has


def in_bounds(functions):
    """Return what functions return, as JSON, in a fork that has TRIAL_SECONDS and TRIAL_BYTES.

    Args:
        functions: [(name, function)].
    Raises:
        ValueError: names the first that takes more, or ends the fork.
    """
    connection, other_end = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    gc.freeze()  # see Worker of data/workers.py
    try:
        process = os.fork()
        if not process:
            _try(functions, parent, other_end)
    finally:
        gc.unfreeze()
    other_end.close()
    values = []
    try:
        for name, _ in functions:
            if not connection.poll(TRIAL_SECONDS):
                raise ValueError(f"{name} does not end within {TRIAL_SECONDS} seconds")
            problem, value = json.loads(connection.recv_bytes())
            if problem:
                raise ValueError(f"{name} {problem}")
            values.append(value)
    except EOFError:
        raise ValueError(f"{name} ends the process that tries it") from None
    finally:
        connection.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return values


def _try(functions, parent, connection):
    """Send [what is wrong or None, what it returns] of each function; run by its process."""
    try:
        end_with(parent)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + TRIAL_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        for _, function in functions:
            try:
                answer = None, function()
            except MemoryError:
                answer = f"takes more than {TRIAL_BYTES >> 30} GiB of memory", None
            connection.send_bytes(json.dumps(answer).encode())
    except Exception:  # a bug of ours
        traceback.print_exc()
    finally:
        os._exit(1)  # what was inherited is not this process's to clean up
