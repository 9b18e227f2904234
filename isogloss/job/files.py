"""Files and folders that are complete or absent, and what is known of them before the first step.

Tests: tests/test_export.py, tests/test_checkpoint.py.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from isogloss.job.rendezvous import values_of_ranks

SEEN_WITHIN = 5.0  # seconds; network file systems take a moment

# --- complete or absent ---------------------------------------------------------------------------


def scratch_of(path):
    """Return the scratch name of a path, in the same folder, so that renaming it is atomic."""
    return path.with_name(f".{path.name}.incomplete")


def sync(path):
    """Wait until a file, or the list of a folder's entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder):
    """Wait until all that a folder holds is on disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


def size_and_checksum(path):
    """Return [bytes, CRC-32] of a file."""
    size = 0
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, checksum]


def files_in(folder):
    """List the files in a folder and below, and its empty folders, relative to it, in order."""
    found = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        entries = [*names, *links]
        if not entries and not folders and parent != str(folder):
            entries = [""]  # the empty folder itself
        for name in entries:
            found.append(os.path.relpath(os.path.join(parent, name), folder))
    return sorted(found)


def write_atomically(path, text):
    """Write a text file that, at any moment, has its old content or the new one."""
    scratch = scratch_of(path)
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power failure could leave the name without the content
        os.replace(scratch, path)
    except OSError:  # as of a full disk, on which half of it would take room
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    sync(path.parent)


def replace_folder(scratch, target, aside):
    """Give a complete scratch folder its final name, in place of the folder of that name.

    At any moment the old folder or the new one is there: as `target`, `aside` or `scratch`.

    Args:
        scratch, target, aside: paths in one folder; aside is where the old folder waits.
    """
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(scratch, target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def locked(flag, folder):
    """Return an open file that keeps other processes out of a folder until it is closed.

    Raises:
        ValueError: another one writes there, and for longer than a killed job's workers live.
    """
    file = open(Path(folder) / ".lock", "w")
    for _ in range(int(10 * SEEN_WITHIN)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # of a file system without locks
            return file
    raise ValueError(f"{flag} {folder}: another process is writing there; wait for it, or name "
                     "another directory")


# --- before the first step ------------------------------------------------------------------------


@contextmanager
def probe(flag, folder):
    """Check that files can be written into a folder by writing one; in the end all is as before.

    Args:
        flag: names the folder in errors.
        folder: path, which need not exist.
    Yields:
        Path of the file that was written.
    Raises:
        ValueError: the folder is a file, cannot be created or cannot be written to.
    """
    folder = Path(folder)
    path = folder / f".probe_{secrets.token_hex(8)}"
    created = []
    try:
        try:
            for parent in reversed([folder, *folder.parents]):
                if not parent.is_dir():
                    parent.mkdir()
                    created.append(parent)
            path.write_bytes(b"probe")
        except OSError as error:
            raise ValueError(f"{flag}: nothing can be written to {folder} ({error.strerror}); name "
                             "another directory") from None
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        for parent in reversed(created):
            parent.rmdir()


def check_writable(flag, folder):
    """Check that files can be written into a folder, and leave nothing behind.  See `probe`."""
    with probe(flag, folder):
        pass


def check_shared(flag, folder):
    """Check that rank 0 can write into a folder, and that all ranks see what it writes there.

    All ranks take part, and all raise the same.

    Raises:
        ValueError: see `probe`; or nodes have folders of their own under this name.
    """
    with ExitStack() as stack:
        written = [None, None]  # path, error
        if dist.get_rank() == 0:
            try:
                written[0] = str(stack.enter_context(probe(flag, folder)).name)
            except ValueError as error:
                written[1] = str(error)
        name, error = values_of_ranks(written)[0]
        if error:
            raise ValueError(error)
        seen = values_of_ranks([_appears(Path(folder) / name), socket.gethostname()])
    for rank, (is_seen, host) in enumerate(seen):
        if not is_seen:
            raise ValueError(f"{flag}: rank {rank} on {host} does not see what rank 0 on "
                             f"{seen[0][1]} writes there; name a directory that all nodes share")


def _appears(path):
    """Return whether a file that another node has written is seen soon."""
    begin = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin > SEEN_WITHIN:
            return False
        time.sleep(0.05)
    return True
