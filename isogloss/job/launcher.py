"""DeepSpeed's launcher of a node as isogloss-distill starts it: ranks that save are not killed.

A terminal sends Ctrl-C to the ranks as well, so the launcher leaves it to them.  DeepSpeed's own
answers it with SIGTERM to each rank and its data workers, and kills what has not ended 30 s later.

Tests: tests/test_launch.py.
"""

import signal
from unittest import mock

if __name__ == "__main__":
    # before there are threads, of which any would take it for this process; so also of ranks until
    # `parse.prepare_rank`; here it stays pending
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

import psutil
from deepspeed.launcher import launch

ENDING_SECONDS = 30  # for a rank where another one has failed
SAVING_SECONDS = 1800  # where all save, because a signal asks them to end


def main():
    asked = []
    end_tree = launch.terminate_process_tree
    set_handler = signal.signal

    def set_ours(number, handler):
        def note(received, frame):
            asked.append(received)
            handler(received, frame)

        return set_handler(number, note)

    def end(process):
        if asked or signal.sigpending():  # not to its data workers, of which it needs the places
            rank = psutil.Process(process)
            rank.terminate()
            psutil.wait_procs([rank], SAVING_SECONDS)
        end_tree(process)

    with (mock.patch.object(signal, "signal", set_ours),
          mock.patch.object(launch, "terminate_process_tree", end)):
        launch.main()


if __name__ == "__main__":
    main()
