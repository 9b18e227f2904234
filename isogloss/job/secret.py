"""Hand the secret of a job from rank 0 to the other ranks, by a file that this user alone can read.

Tests: tests/test_launch.py.
"""

import os
import re
import secrets
import socket
import stat
import time

from isogloss.job.rendezvous import MAGIC, READING_TIMEOUT, SECRET_BYTES, TOKEN_VARIABLE


def lay_out(store, secret, ranks):
    """Write a secret to the working directory, until all ranks have read it."""
    name = f".isogloss_{secrets.token_hex(16)}"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ValueError(
            f"the ranks of several nodes need a secret, and {os.getcwd()}, where they could share "
            f"one, cannot be written to ({error.strerror}); start the job in a folder that all "
            f"nodes see, or set {TOKEN_VARIABLE} on every node") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + secret)
            file.flush()
            os.fsync(descriptor)
        store.set("secret", name)
        store.wait([f"secret read by {rank}" for rank in range(1, ranks)])
    finally:
        os.unlink(name)


def take(store, rank, on_one_node):
    """Return the secret that rank 0 has drawn, on another rank."""
    place = store.get("secret").decode(errors="replace")
    pattern = r"/proc/\d+/fd/\d+" if on_one_node else r"\.isogloss_[0-9a-f]{32}"
    if not re.fullmatch(pattern, place):
        raise _not_the_secret()
    secret = read_secret(place)
    store.set(f"secret read by {rank}", "")
    return secret


def read_secret(path):
    """Return the secret that a file holds; only a file of this user's, closed to others, does."""
    begin = time.monotonic()
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            break
        except OSError:
            # a network file system takes a moment to show what another node has written
            if path.startswith("/") or time.monotonic() - begin > READING_TIMEOUT.total_seconds():
                raise _not_the_secret() from None
            time.sleep(0.05)
    try:
        state = os.fstat(descriptor)
        # a file system that takes root for nobody does so with the folder's files, too
        users = {os.geteuid()} if path.startswith("/") else {os.geteuid(), os.stat(".").st_uid}
        content = os.read(descriptor, len(MAGIC) + SECRET_BYTES + 1)
    except OSError:
        raise _not_the_secret() from None
    finally:
        os.close(descriptor)
    is_private = stat.S_ISREG(state.st_mode) and not state.st_mode & 0o077
    is_secret = content.startswith(MAGIC) and len(content) == len(MAGIC) + SECRET_BYTES
    if not (is_private and is_secret and state.st_uid in users):
        raise _not_the_secret()
    return content[len(MAGIC) :]


def _not_the_secret():
    """Return what ends this rank alone: rank 0 has the secret and would say nothing."""
    return SystemExit(
        f"rank {os.environ['RANK']} on {socket.gethostname()} cannot read the secret of the job, "
        f"which rank 0 keeps; start all ranks as one user, in a folder that all nodes see, or set "
        f"{TOKEN_VARIABLE} on every node")
