"""Let another process write: an engine with an interpreter and packages of its own.

vLLM and SGLang need other versions of torch and transformers than this job, so such an engine is
a command that the first rank of every node starts (`--rollout_command`).  They talk in lines of
JSON through its standard input and output, in token ids, never in text:

    {"do": "load", "model": directory, "dtype": "bfloat16", "max_length": 2048,
     "weights": {name: handle}, "tied": [name, ...]}                 -> {"done": number of weights}
    {"do": "refresh"}                                                -> {"done": number of weights}
    {"do": "write", "prompts": [{"ids": [...], "key": [...], "max_new_tokens": 128}, ...],
     "stop_ids": [...], "vocab": 32000, "temperature": 1.0, "top_p": 1.0}
                  -> {"completions": [{"ids": [...], "logp": [...], "ended": true}, ...]}

Anything it cannot do it answers by {"error": line}.  The weights lie in memory that both processes
see (ipc.py: CUDA IPC, shared memory on a CPU).  Before every refresh the job has written the new
ones there; the engine copies them into its model and forgets cached prefixes.

Tests: tests/test_writer_process.py.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys

import torch

import ipc
from rollout import Completion


def words_of(command):
    """Return the words of a command, as a shell reads them, with home directories for `~`."""
    return [os.path.expanduser(word) for word in shlex.split(command)]


def check_command(command):
    """Raise a ValueError where a command names no program."""
    words = words_of(command)
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"--rollout_command {command}: no such program; give an interpreter and "
                         "what it runs, as \"/env/bin/python -m isogloss.vllm_writer\"")


class WriterProcess:
    """Start a command and talk to it; used by the first rank of a node."""

    def __init__(self, command):
        """Start the command.

        Args:
            command: as a shell would read it, without a shell.
        Raises:
            ValueError: there is no such program.
        """
        check_command(command)
        self.command = command
        self.is_loaded = False
        self.process = subprocess.Popen(
            words_of(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True)
        self.handles = {}
        self.tied = []  # names of the same weight

    def ask(self, **message):
        """Send a message and return the response.

        Raises:
            RuntimeError: the process has ended, or says that it cannot do it.
        """
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"--rollout_command {self.command}: ended with exit code {code}; "
                               "its output tells why")
        try:
            response = json.loads(line)
        except json.JSONDecodeError:
            raise RuntimeError(f"--rollout_command {self.command}: wrote {line.strip()[:80]!r} in "
                               "place of JSON; only responses may go to its standard output"
                               ) from None
        if "error" in response:
            raise RuntimeError(f"--rollout_command {self.command}: {response['error']}")
        return response

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

    def load(self, model, dtype, max_length):
        """Let the engine load a model with the shared weights.

        Args:
            model: directory or hub id, of which it reads the config.
        """
        plain = {name: handle.to_plain() for name, handle in self.handles.items()}
        done = self.ask(do="load", model=str(model), dtype=str(dtype).removeprefix("torch."),
                        max_length=max_length, weights=plain, tied=self.tied)["done"]
        self._check_number(done)
        self.is_loaded = True

    def refresh(self):
        """Let the engine take over the shared weights.

        Raises:
            RuntimeError: it took over another number of them.
        """
        self._check_number(self.ask(do="refresh")["done"])

    def _check_number(self, done):
        if done != len(self.handles):
            raise RuntimeError(f"--rollout_command {self.command}: took over {done} of "
                               f"{len(self.handles)} weights")

    def write(self, prompts, stop_ids, vocab, temperature, top_p):
        """Return a completion for every prompt, see `prompt_as_plain`, `completion_of_plain`."""
        response = self.ask(do="write", prompts=prompts, stop_ids=stop_ids, vocab=vocab,
                            temperature=temperature, top_p=top_p)
        completions = response["completions"]
        for prompt, completion in zip(prompts, completions, strict=True):
            size = len(completion["ids"])
            limit = prompt["max_new_tokens"]
            if size > limit or size != len(completion["logp"]):
                raise RuntimeError(f"--rollout_command {self.command}: {size} tokens with "
                                   f"{len(completion['logp'])} log-probabilities, expected at most "
                                   f"{limit} of both")
        return completions

    def close(self):
        """End the process."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and a message was not read
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for handle in self.handles.values():
            ipc.release(handle)
        self.handles = {}


def prompt_as_plain(prompt):
    """Return a `rollout.Prompt` as it is sent."""
    return {"ids": list(map(int, prompt.ids)), "key": list(prompt.key),
            "max_new_tokens": prompt.max_new_tokens}


def completion_of_plain(plain):
    """Return the `rollout.Completion` that was sent; its entropy is not known (NaN)."""
    logp = torch.tensor(plain["logp"], dtype=torch.float32)
    return Completion(torch.tensor(plain["ids"], dtype=torch.long), logp,
                      torch.full_like(logp, torch.nan), bool(plain["ended"]))


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
