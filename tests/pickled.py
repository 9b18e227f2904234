"""What must never run: a command in a pickle."""

import os


class Command:
    """When it is unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
