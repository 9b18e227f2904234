"""Talk to an engine that is a command, with an interpreter and packages of its own.

vLLM and SGLang need other versions of torch and transformers than this job.  So one that writes for
the student (writer_process.py) or runs a teacher (teachers/engines/vllm.py) is a command that a
rank starts.  They talk in lines of JSON through its standard input and output: a message
{"do": what, ...}, then its answer, {"error": line} for what it cannot do.  Tensors lie in memory
that both see (ipc.py).

Tests: tests/test_writer_process.py.
"""

import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isogloss.errors import EngineError, EngineStopped
from isogloss.job import ipc

# variables that would tell an engine that it is one of the job's ranks
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEEPER = Path(__file__).with_name("kept_process.py")
LOADING_SECONDS = 3600.0  # before the first step, when the other ranks wait for two hours
ANSWER_SECONDS = 800.0  # collectives of the other ranks wait for half an hour
PERIOD = 0.2  # seconds between looks at the signals
MOST_BYTES = 2**16  # of an answer


def words_of(command):
    return [os.path.expanduser(word) for word in shlex.split(command)]


def is_program(command):
    """Tell whether a command names a program that is there."""
    words = words_of(command)
    return bool(words) and shutil.which(words[0]) is not None


class EngineProcess:
    """Start a command and talk to it.

    The command ends with this process, and all that it has started does; see kept_process.py.

    Attributes:
        flag: that names the command, with "--".
        folder: for files that it reads; it goes when the command ends.
        timeout: seconds for an answer, while the model loads LOADING_SECONDS.
        asked_to_end: () -> bool, whether a signal asks the job to end.
        patience: seconds that an answer has even so.
        handles: {name: `ipc.Handle`} of memory that it reads or writes, released at the end.
    """

    def __init__(self, flag, command, timeout=ANSWER_SECONDS, **variables):
        """Start the command; the thread that does it has to last as long as the job.

        Args:
            command: as a shell would read it, without a shell; see `is_program`.
            variables: of its environment.
        """
        self.flag = flag
        self.command = command
        self.timeout = timeout
        self.asked_to_end = bool
        self.patience = 0.0
        self.handles = {}
        self.folder = tempfile.mkdtemp(prefix="isogloss")
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), self.folder]
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **variables}
        for name in OF_RANKS:
            environment.pop(name, None)
        self.process = subprocess.Popen(
            keeper + words_of(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, start_new_session=True, env=environment)
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)

    def error(self, what):
        return EngineError(f"{self.flag} {self.command}: {what}")

    def ask(self, seconds, most_bytes=MOST_BYTES, **message):
        """Send a message and return the response, a dict.

        Raises:
            EngineError: the process has ended, does not answer, or says that it cannot do it.
            EngineStopped: a signal asks the job to end.
        """
        line = self._exchange(json.dumps(message).encode() + b"\n", seconds, most_bytes)
        try:
            response = json.loads(line)
        except (ValueError, RecursionError):
            raise self.error(f"wrote {shortened(line)} in place of JSON; only responses may go to "
                             "its standard output") from None
        if not isinstance(response, dict):
            raise self.error(f"answered {shortened(line)}; expected an object")
        if "error" in response:
            raise self.error(str(response["error"])[:500] if isinstance(response["error"], str)
                             else f"answered {shortened(line)}")
        return response

    def _exchange(self, message, seconds, most_bytes):
        begin = time.monotonic()
        stdin = self.process.stdin.fileno()
        stdout = self.process.stdout.fileno()
        line = bytearray()
        while not line.endswith(b"\n"):
            waited = time.monotonic() - begin
            if self.asked_to_end() and waited >= self.patience:
                raise EngineStopped
            if waited > seconds:
                raise self.error(f"has not answered for {seconds:g} seconds; its "
                                 "output may tell why")
            looks = select.poll()
            looks.register(stdout, select.POLLIN)
            if message:
                looks.register(stdin, select.POLLOUT)
            ready = dict(looks.poll(1000 * min(PERIOD, seconds)))
            if stdout in ready:
                piece = os.read(stdout, 2**20)
                if not piece:
                    raise self._ended()
                if message:
                    raise self.error(f"wrote {shortened(piece)} before it was asked; only "
                                     "responses may go to its standard output")
                line += piece
                first, _, more = line.partition(b"\n")
                if more:
                    raise self.error(f"wrote {shortened(first)} in place of JSON of one line; "
                                     "only responses may go to its standard output")
                if len(line) > most_bytes:
                    raise self.error(f"wrote {shortened(first)} ..., {len(line)} bytes and more; "
                                     f"expected one line of at most {most_bytes}")
            elif stdin in ready:
                try:
                    message = message[os.write(stdin, message) :]
                except BrokenPipeError:
                    raise self._ended() from None
        return bytes(line)

    def _ended(self):
        """Return the EngineError of a process that has closed its end of a pipe."""
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return self.error("has closed its standard input or output and still runs")
        return self.error(f"ended with exit code {code}; its output tells why")

    def close(self, is_busy=False):
        """End the process, and all that it has started.

        Args:
            is_busy: nobody waits for its answer any longer.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended, and a message was not read
            self.process.stdin.close()
        try:
            self.process.wait(timeout=0 if is_busy or self.asked_to_end() else 10)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        self.process.stdout.close()
        for handle in self.handles.values():
            ipc.release(handle)
        self.handles = {}


def shortened(value):
    if isinstance(value, (bytes, bytearray)):
        value = value[:400].decode(errors="replace").strip()
    elif not isinstance(value, str):
        value = json.dumps(value)
    return repr(value[:80])


# --- the other side -------------------------------------------------------------------------------


def answer(functions, lines=sys.stdin, out=sys.stdout):
    """Answer the messages of a job until it ends; for the script of an engine.

    Args:
        functions: {what a message asks to do: function of its other keys -> answer, a dict}.
        lines: messages; out: answers.
    """
    for line in lines:
        message = json.loads(line)
        try:
            response = functions[message.pop("do")](**message)
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"[:500]}
        out.write(json.dumps(response) + "\n")
        out.flush()
