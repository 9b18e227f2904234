"""Write with transformers in vLLM's place: a process with the protocol of isogloss/vllm_writer.py.

    python tests/stand_in_writer.py [--as=SOCKET] [stale | dies | dies4 | stops | stops5 | asks]

stale: it says that it took over the weights, and does not.  dies: at the second request to write.
stops: at the fourth request to write it asks the job to end by SIGTERM, and never answers.
asks: it asks at the third one, and answers.  A digit names another request.
teacher [other | dies2 | hangs2]: it runs a teacher, as isogloss/vllm_teacher.py does; other: one
with other weights.

A fork of the process behind SOCKET answers, which has imported (stand_in_engine.py); without one
this process does, as a user's would.
"""

import json
import os
import socket
import sys


def as_a_fork(address, words):
    """Let a fork read and write in this process' place; return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        about = json.dumps([*words, os.getppid()]).encode()
        socket.send_fds(server, [about], [0, 1, 2])
        return int(server.recv(9) or 0)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0].startswith("--as="):
        sys.exit(as_a_fork(words[0].removeprefix("--as="), words[1:]))
    from stand_in_engine import engine_of

    engine_of(words, os.getppid()).answer()
