"""Tell whether another process runs."""


def is_running(process: int) -> bool:
    """Return whether a process exists and has not ended; a zombie has ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            # "id (name) state ...", where the name may hold spaces and parentheses
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
