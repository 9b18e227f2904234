"""What ranks tell one another through the store of their job: plain values, which are signed.

Whoever reaches the store's port can write to it.  So what ranks say to one another is JSON, which
runs nothing when it is read, signed with a secret that the ranks of one job have in common: what
anyone else has written is no value.  The port is open on the master's address alone where that is
known.  What torch, Gloo and NCCL write there when they connect ranks has no signature.

The secret is the variable ISOGLOSS_TOKEN of the launcher's environment.  Without it, rank 0 draws
one and lays it where the ranks of this user alone can read it; the store says where that is.

Tests: tests/test_launch.py.
"""

import contextlib
import hmac
import itertools
import json
import secrets
from datetime import timedelta

import torch.distributed as dist

READING_TIMEOUT = timedelta(seconds=10)  # for a value that is there already
SECRET_BYTES = 32

secret = secrets.token_bytes(SECRET_BYTES)  # until this process joins a job
_runs = itertools.count()  # a process that runs several command lines joins once


def run_store(store):
    """Return a part of the job's store for a new run of main, the same on all ranks.

    All of them have to call this equally often.
    """
    return dist.PrefixStore(f"run {next(_runs)}", store)


def _signature(key, text):
    return hmac.digest(secret, f"{len(key)} {key} {text}".encode(), "sha256").hex()


def _signed(key, value):
    text = json.dumps(value)
    return f"{_signature(key, text)} {text}"


def _opened(key, raw):
    """Return the value that `_signed` was called with.

    Raises:
        ValueError: no rank of this job has written it.
    """
    signature, _, text = raw.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(key, text).encode()):
        raise ValueError(f"{key!r} in the store of the job was not written by a rank of it; see "
                         "who else reaches its port, or choose another with --master_port")
    return json.loads(text)


def write_value(store, key, value):
    store.set(key, _signed(key, value))


def read_value(store, key):
    """Wait until a value is there, and return it.

    Raises:
        ValueError: no rank of this job has written it.
    """
    return _opened(key, store.get(key))


def value_there(store, key):
    """Return the value that a rank of this job has written, without waiting; None: none has."""
    if not store.check([key]):
        return None
    try:
        return read_value(store, key)
    except ValueError:
        return None


def gather_values(store, key, value, number, count):
    """Return the values of `count` members, the same list on all of them.

    Args:
        value: what JSON can express.
        number: of this member, from 0.
    """
    write_value(store, f"{key} of {number}", value)
    if number == 0:
        keys = [f"{key} of {member}" for member in range(count)]
        store.wait(keys)
        values = list(map(_opened, keys, store.multi_get(keys)))
        write_value(store, key, values)
    return read_value(store, key)


def part(store, key, number, count):
    """Leave together: the member that may serve the store, number 0, leaves last.

    It does not wait long, because some of the others may be gone.
    """
    store.set(f"{key} left by {number}", "")
    if number == 0:
        keys = [f"{key} left by {member}" for member in range(count)]
        with contextlib.suppress(dist.DistError):
            store.wait(keys, READING_TIMEOUT)
