"""Tell whether another process runs, and end with the parent of this one."""
import ctypes
import os
import signal


def is_running(process: int) -> bool:
    """Return whether a process exists and has not ended; a zombie has ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            # "id (name) state ...", where the name may hold spaces and parentheses
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


PR_SET_PDEATHSIG = 1  # of Linux, see prctl(2)


def end_with(parent):
    """End this process as soon as its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)
