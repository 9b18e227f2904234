"""Let every process that the tests start print its stacks on SIGUSR1; Python imports this file."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, all_threads=True)
