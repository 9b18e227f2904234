"""Agree on the secret of a job: a token of its environment, or what rank 0 draws.

Rank 0 hands it to the others by a file that this user alone can read.

Tests: tests/test_launch.py.
"""

import hashlib
import os
import re
import secrets
import socket
import stat
import time

from isogloss.job.rendezvous import TOKEN_VARIABLE
from isogloss.job.several import values
from isogloss.job.several.values import READING_TIMEOUT, SECRET_BYTES, part

LEAST_TOKEN = 16  # characters
MAGIC = b"secret of a job of isogloss\n"  # no other file is taken for one that holds a secret


def agree(store):
    """Sign from now on with the secret of the job; all of its ranks take part."""
    values.secret = _secret_of_job(store, os.environ.get(TOKEN_VARIABLE, ""))


def _secret_of_job(store, token):
    """Return the secret that the environment gives all ranks, or that rank 0 draws.

    Args:
        token: of the environment of this rank; "": there is none.

    Raises:
        ValueError: the environments of the ranks give different ones; on all ranks.
    """
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    # which tells nothing of a token that cannot be guessed
    proof = hashlib.sha256(f"isogloss {token}".encode(errors="surrogateescape")).digest()
    store.set(f"token of {rank}", proof)
    keys = [f"token of {other}" for other in range(ranks)]
    store.wait(keys)
    proofs = store.multi_get(keys)
    others = [other for other in range(ranks) if proofs[other] != proofs[0]]
    if others:
        part(store, "tokens", rank, ranks)
        raise ValueError(f"the variable {TOKEN_VARIABLE} is another one for rank {others[0]} than "
                         "for rank 0; set the same on every node, or none")
    if token and len(token) < LEAST_TOKEN:
        raise ValueError(f"the variable {TOKEN_VARIABLE} has {len(token)} characters; expected "
                         f"{LEAST_TOKEN} or more that nobody can guess, the same on every node")
    if token:
        return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
    return _drawn_secret(store, rank, ranks)


def _drawn_secret(store, rank, ranks):
    """Return the secret that rank 0 draws, and lays where the ranks of this user can read it."""
    per_node = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or ranks
    on_one_node = int(per_node) == ranks
    if rank == 0:
        secret = secrets.token_bytes(SECRET_BYTES)
        if on_one_node:
            store.set("secret", _in_memory(secret))
        else:
            lay_out(store, secret, ranks)
        return secret
    return take(store, rank, on_one_node)


def _in_memory(secret):
    """Keep a secret in memory that processes of this user can open; return its path.

    As in ipc.py it has no name, and is gone with this process.
    """
    descriptor = os.memfd_create("isogloss_secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, MAGIC + secret)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


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
