"""Files and folders that are complete or absent, and what is known of them before the first step.

Tests: tests/test_export.py, tests/test_checkpoint.py.
"""

import os
import shutil
import tempfile
from pathlib import Path

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


def write_atomically(path, text):
    """Write a text file that, at any moment, has its old content or the new one."""
    scratch = scratch_of(path)
    with open(scratch, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a power failure could leave the name without the content
    os.replace(scratch, path)
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


# --- before the first step ------------------------------------------------------------------------


def check_writable(flag, folder):
    """Check that files can be written into a folder, by writing one; nothing is left behind.

    Args:
        flag: names the folder in errors.
        folder: path, which need not exist.
    Raises:
        ValueError: it is a file, cannot be created or cannot be written to.
    """
    folder = Path(folder)
    created = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.is_dir():
                path.mkdir()
                created.append(path)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"probe")
            file.flush()
    except OSError as error:
        raise ValueError(f"{flag}: nothing can be written to {folder} ({error.strerror}); name "
                         "another directory") from None
    finally:
        for path in reversed(created):
            path.rmdir()
