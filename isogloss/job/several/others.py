"""Tell whether another process runs, and on which machine this one does."""

import os
import platform
from pathlib import Path


def is_running(process: int) -> bool:
    """Return whether a process exists and has not ended; a zombie has ended."""
    try:
        with open(f"/proc/{process}/stat", errors="replace") as file:
            # "id (name) state ...", where the name may hold anything, parts of characters too
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def node_name():
    """Identify what process ids refer to: the running machine and the container on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
