"""Check that an export replaces nothing but what an earlier export wrote.

Tests: tests/test_export.py.
"""

import json
import os

from isogloss.checkpoints.export_files import MANIFEST
from isogloss.job.files import files_in, size_and_checksum


def check_earlier(flag, export, target):
    """Raise a ValueError where a place holds something else; see `export_files.check_replaceable`.

    Args:
        export: as the flag has it; target: its real path.
    """
    if not target.is_dir():
        raise ValueError(f"{flag} {export}: is a file; name a directory")
    if os.path.ismount(target):  # which cannot be renamed
        raise ValueError(f"{flag} {export}: is where a disk is mounted; name a directory in it")
    written = _written_files(target)
    # without a manifest one name says that it is no export, however much lies below
    try:
        others = os.listdir(target) if written is None else files_in(target)
    except OSError as error:
        raise ValueError(f"{flag} {export}: cannot be read ({error.strerror}); name another "
                         "directory") from None
    if written is not None:
        others = [name for name in others if name != MANIFEST]
    for name in others:
        if name not in (written or {}):
            raise ValueError(f"{flag} {export}: holds {name}, which no export of ours wrote and "
                             "which would be lost; name another directory or remove it")
        if size_and_checksum(target / name) != written[name]:
            raise ValueError(f"{flag} {export}: its {name} was changed after it was exported, and "
                             "the change would be lost; name another directory, or remove that "
                             "file")


def _written_files(target):
    """Return {name: [bytes, CRC-32]} of what an export wrote; None: no manifest is there."""
    try:
        return dict(json.loads((target / MANIFEST).read_text())["files"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return {}
