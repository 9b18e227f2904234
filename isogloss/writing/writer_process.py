"""Let another process write: an engine with an interpreter and packages of its own.

vLLM and SGLang need other versions of torch and transformers than this job, so such an engine is
a command that the first rank of every node starts (`--writer`).  They talk in lines of
JSON through its standard input and output, in token ids, never in text:

    {"do": "load", "model": directory of its config.json, "dtype": "bfloat16", "max_length": 2048,
     "weights": {name: handle}, "tied": [name, ...]}                 -> {"done": number of weights}
    {"do": "refresh"}                                                -> {"done": number of weights}
    {"do": "write", "prompts": [{"ids": [...], "key": [...], "max_new_tokens": 128}, ...],
     "stop_ids": [...], "vocab": 32000, "temperature": 1.0, "top_p": 1.0}
                  -> {"completions": [{"ids": [...], "logp": [...], "ended": true,
                                       "temperature": 1.0, "top_p": 1.0}, ...]}

Of a completion's log-probabilities it names temperature and top_p (each 1 where it names none),
which have to be those of the draws.  Anything it cannot do it answers by {"error": line}.  The
weights lie in memory that both processes see (ipc.py: CUDA IPC, shared memory on a CPU).  Before
every refresh the job has written the new ones there; the engine copies them into its model and
forgets cached prefixes.  Of an embedding and a head it sees the rows of tokens alone, not those
that pad them.

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

import torch

from isogloss.errors import WriterError, WriterStopped
from isogloss.job import ipc
from isogloss.rollout import Completion

# variables that would tell an engine that it is one of the job's ranks
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEEPER = Path(__file__).with_name("kept_process.py")
LOADING_SECONDS = 3600.0  # before the first step, when the other ranks wait for two hours
ANSWER_SECONDS = 800.0  # collectives of the other ranks wait for half an hour
PERIOD = 0.2  # seconds between looks at the signals
MOST_BYTES = 2**16  # of an answer, and what a completion may add
BYTES_PER_TOKEN = 64  # an id and a log-probability take 30


def words_of(command):
    return [os.path.expanduser(word) for word in shlex.split(command)]


def check_command(command):
    """Raise a ValueError where a command names no program."""
    words = words_of(command)
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"--writer {command}: no such program; expected student, vllm, or an "
                         "interpreter and what it runs, as \"/env/bin/python -m "
                         "isogloss.vllm_writer\"")


class WriterProcess:
    """Start a command and talk to it; used by the first rank of a node.

    The command ends with this process, and all that it has started does; see kept_process.py.

    Attributes:
        timeout: seconds for an answer, while the model loads LOADING_SECONDS.
        asked_to_end: () -> bool, whether a signal asks the job to end.
        patience: seconds that an answer has even so.
    """

    def __init__(self, command, timeout=ANSWER_SECONDS):
        """Start the command; the thread that does it has to last as long as the job.

        Args:
            command: as a shell would read it, without a shell; see `check_command`.
        """
        self.command = command
        self.timeout = timeout
        self.asked_to_end = bool
        self.patience = 0.0
        self.is_loaded = False
        self.folder = tempfile.mkdtemp(prefix="isogloss")  # of the model's config
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), self.folder]
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        for name in OF_RANKS:
            environment.pop(name, None)
        self.process = subprocess.Popen(
            keeper + words_of(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, start_new_session=True, env=environment)
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self.handles = {}
        self.tied = []  # names of the same weight

    def error(self, what):
        return WriterError(f"--writer {self.command}: {what}")

    def ask(self, seconds, most_bytes=MOST_BYTES, **message):
        """Send a message and return the response, a dict.

        Raises:
            WriterError: the process has ended, does not answer, or says that it cannot do it.
            WriterStopped: a signal asks the job to end.
        """
        line = self._exchange(json.dumps(message).encode() + b"\n", seconds, most_bytes)
        try:
            response = json.loads(line)
        except (ValueError, RecursionError):
            raise self.error(f"wrote {_shortened(line)} in place of JSON; only responses may go to "
                             "its standard output") from None
        if not isinstance(response, dict):
            raise self.error(f"answered {_shortened(line)}; expected an object")
        if "error" in response:
            raise self.error(str(response["error"])[:500] if isinstance(response["error"], str)
                             else f"answered {_shortened(line)}")
        return response

    def _exchange(self, message, seconds, most_bytes):
        begin = time.monotonic()
        stdin = self.process.stdin.fileno()
        stdout = self.process.stdout.fileno()
        line = bytearray()
        while not line.endswith(b"\n"):
            waited = time.monotonic() - begin
            if self.asked_to_end() and waited >= self.patience:
                raise WriterStopped
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
                    raise self.error(f"wrote {_shortened(piece)} before it was asked; only "
                                     "responses may go to its standard output")
                line += piece
                first, _, more = line.partition(b"\n")
                if more:
                    raise self.error(f"wrote {_shortened(first)} in place of JSON of one line; "
                                     "only responses may go to its standard output")
                if len(line) > most_bytes:
                    raise self.error(f"wrote {_shortened(first)} ..., {len(line)} bytes and more; "
                                     f"expected one line of at most {most_bytes}")
            elif stdin in ready:
                try:
                    message = message[os.write(stdin, message) :]
                except BrokenPipeError:
                    raise self._ended() from None
        return bytes(line)

    def _ended(self):
        """Return the WriterError of a process that has closed its end of a pipe."""
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return self.error("has closed its standard input or output and still runs")
        return self.error(f"ended with exit code {code}; its output tells why")

    def share(self, weights):
        """Make shared memory for weights.

        Args:
            weights: {name: tensor}; names of one tensor are those of a tied weight.
        Returns:
            {name: tensor in that memory}, one name of each weight; to be written before `load` and
            `refresh`.
        """
        names_of = {}
        for name, tensor in weights.items():
            names = names_of.setdefault(id(tensor), [])
            names.append(name)
            if len(names) == 1:
                self.handles[name] = ipc.publish(tensor)
        self.tied = [names for names in names_of.values() if len(names) > 1]
        return {name: ipc.attach(handle) for name, handle in self.handles.items()}

    def load(self, config, dtype, max_length, num_rows):
        """Let the engine load a model with the shared weights.

        Args:
            config: of transformers.
            num_rows: {name of a weight: of so many rows the engine knows}.
        """
        plain = {name: handle.to_plain() for name, handle in self.handles.items()}
        for name in num_rows.keys() & plain.keys():
            plain[name]["shape"][0] = num_rows[name]
        config.save_pretrained(self.folder)
        self._check_number(self.ask(
            LOADING_SECONDS, do="load", model=self.folder,
            dtype=str(dtype).removeprefix("torch."), max_length=max_length, weights=plain,
            tied=self.tied))
        self.is_loaded = True

    def refresh(self):
        self._check_number(self.ask(self.timeout, do="refresh"))

    def _check_number(self, response):
        done = response.get("done")
        if type(done) is not int or done != len(self.handles):
            raise self.error(f"took over {_shortened(done)} of {len(self.handles)} weights")

    def write(self, prompts, stop_ids, vocab, temperature, top_p):
        """Return a completion for every prompt, see `prompt_as_plain`, `completion_of_plain`.

        Raises:
            WriterError: see `ask`; or a completion is not one of this prompt and vocabulary.
        """
        most_tokens = sum(prompt["max_new_tokens"] for prompt in prompts)
        most_bytes = MOST_BYTES * (1 + len(prompts)) + BYTES_PER_TOKEN * most_tokens
        response = self.ask(self.timeout, most_bytes, do="write", prompts=prompts,
                            stop_ids=stop_ids, vocab=vocab, temperature=temperature, top_p=top_p)
        completions = response.get("completions")
        if not isinstance(completions, list) or len(completions) != len(prompts):
            raise self.error(f"answered {_shortened(completions)} as completions; expected a list "
                             f"of {len(prompts)}")
        for number, (prompt, completion) in enumerate(zip(prompts, completions)):
            try:
                check_completion(completion, prompt["max_new_tokens"], stop_ids, vocab)
                check_draws(completion, temperature, top_p)
            except ValueError as error:
                raise self.error(f"completion {number}: {error}") from None
        return completions

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


def _shortened(value):
    if isinstance(value, (bytes, bytearray)):
        value = value[:400].decode(errors="replace").strip()
    elif not isinstance(value, str):
        value = json.dumps(value)
    return repr(value[:80])


def check_completion(completion, limit, stop_ids, vocab):
    """Raise a ValueError unless this is a completion as it is sent, of at most `limit` tokens."""
    fields = completion if isinstance(completion, dict) else {}
    ids, logp, ended = (fields.get(name) for name in ("ids", "logp", "ended"))
    if not isinstance(ids, list) or not isinstance(logp, list) or type(ended) is not bool:
        raise ValueError(f"answered {_shortened(completion)}; expected lists ids and logp, and "
                         "ended, true or false")
    if not 0 < len(ids) <= limit or len(logp) != len(ids):
        raise ValueError(f"{len(ids)} tokens with {len(logp)} log-probabilities, expected 1 to "
                         f"{limit} of both")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"token {_shortened(token)}; expected integers from 0 to {vocab - 1}")
    for value in logp:
        if type(value) not in (int, float) or not -sys.float_info.max <= value <= 0:
            raise ValueError(f"log-probability {_shortened(value)}; expected numbers of at most 0")
    stops = [place for place, token in enumerate(ids) if token in stop_ids]
    if stops != ([len(ids) - 1] if ended else []):
        raise ValueError(f"{len(ids)} tokens with stop tokens at {stops[:5]} and ended {ended}; "
                         "expected one at the end where it has ended, else none")


def check_draws(completion, temperature, top_p):
    """Raise a ValueError unless the log-probabilities of a completion are those of its draws."""
    for name, asked in (("temperature", temperature), ("top_p", top_p)):
        if completion.get(name, 1.0) != asked:
            raise ValueError(f"log-probabilities at {name} {_shortened(completion.get(name, 1.0))};"
                             f" expected those of the draws, whose {name} is {asked}, and that it "
                             f"says so by {name!r}")


def prompt_as_plain(prompt):
    """Return a `rollout.Prompt` as it is sent."""
    return {"ids": list(map(int, prompt.ids)), "key": list(prompt.key),
            "max_new_tokens": prompt.max_new_tokens}


def completion_of_plain(plain):
    """Return the `rollout.Completion` that was sent; its entropy is not known (NaN)."""
    logp = torch.tensor(plain["logp"], dtype=torch.float32)
    return Completion(torch.tensor(plain["ids"], dtype=torch.long), logp,
                      torch.full_like(logp, torch.nan), bool(plain["ended"]),
                      plain.get("temperature", 1.0), plain.get("top_p", 1.0))


# --- the other side -------------------------------------------------------------------------------


def serve(load, refresh, write, lines=sys.stdin, out=sys.stdout):
    """Answer the messages of a job until it ends; for the script of an engine.

    Args:
        load, refresh, write: functions of the keys of these messages, see above; load and refresh
            return the number of weights, write a list of completions.
        lines: messages; out: responses.
    """
    for line in lines:
        message = json.loads(line)
        kind = message.pop("do")
        try:
            if kind == "load":
                response = {"done": load(**message)}
            elif kind == "refresh":
                response = {"done": refresh()}
            else:
                response = {"completions": write(**message)}
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"[:500]}
        out.write(json.dumps(response) + "\n")
        out.flush()
