"""Let another process write: an engine with an interpreter and packages of its own.

It is a command that the first rank of every node starts (`--writer`), see engine_process.py.
They talk in token ids, never in text:

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

import sys

import torch

from isogloss.job import ipc
from isogloss.job.commands.engine_process import (
    ANSWER_SECONDS,
    LOADING_SECONDS,
    MOST_BYTES,
    EngineProcess,
    answer,
    is_program,
    shortened,
)
from isogloss.rollout import Completion

BYTES_PER_TOKEN = 64  # of a completion: an id and a log-probability take 30


def check_command(command):
    """Raise a ValueError where a command names no program."""
    if not is_program(command):
        raise ValueError(f"--writer {command}: no such program; expected student, vllm, or an "
                         "interpreter and what it runs, as \"/env/bin/python -m "
                         "isogloss.vllm_writer\"")


class WriterProcess(EngineProcess):
    """Let a command write; used by the first rank of a node.

    Attributes:
        is_loaded: it has the student's config and first weights.
    """

    def __init__(self, command, timeout=ANSWER_SECONDS):
        super().__init__("--writer", command, timeout)
        self.is_loaded = False
        self.tied = []  # names of the same weight

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
            raise self.error(f"took over {shortened(done)} of {len(self.handles)} weights")

    def write(self, prompts, stop_ids, vocab, temperature, top_p):
        """Return a completion for every prompt, see `prompt_as_plain`, `completion_of_plain`.

        Raises:
            EngineError: see `ask`; or a completion is not one of this prompt and vocabulary.
        """
        most_tokens = sum(prompt["max_new_tokens"] for prompt in prompts)
        most_bytes = MOST_BYTES * (1 + len(prompts)) + BYTES_PER_TOKEN * most_tokens
        response = self.ask(self.timeout, most_bytes, do="write", prompts=prompts,
                            stop_ids=stop_ids, vocab=vocab, temperature=temperature, top_p=top_p)
        completions = response.get("completions")
        if not isinstance(completions, list) or len(completions) != len(prompts):
            raise self.error(f"answered {shortened(completions)} as completions; expected a list "
                             f"of {len(prompts)}")
        for number, (prompt, completion) in enumerate(zip(prompts, completions)):
            try:
                check_completion(completion, prompt["max_new_tokens"], stop_ids, vocab)
                check_draws(completion, temperature, top_p)
            except ValueError as error:
                raise self.error(f"completion {number}: {error}") from None
        return completions


def check_completion(completion, limit, stop_ids, vocab):
    """Raise a ValueError unless this is a completion as it is sent, of at most `limit` tokens."""
    fields = completion if isinstance(completion, dict) else {}
    ids, logp, ended = (fields.get(name) for name in ("ids", "logp", "ended"))
    if not isinstance(ids, list) or not isinstance(logp, list) or type(ended) is not bool:
        raise ValueError(f"answered {shortened(completion)}; expected lists ids and logp, and "
                         "ended, true or false")
    if not 0 < len(ids) <= limit or len(logp) != len(ids):
        raise ValueError(f"{len(ids)} tokens with {len(logp)} log-probabilities, expected 1 to "
                         f"{limit} of both")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"token {shortened(token)}; expected integers from 0 to {vocab - 1}")
    for value in logp:
        if type(value) not in (int, float) or not -sys.float_info.max <= value <= 0:
            raise ValueError(f"log-probability {shortened(value)}; expected numbers of at most 0")
    stops = [place for place, token in enumerate(ids) if token in stop_ids]
    if stops != ([len(ids) - 1] if ended else []):
        raise ValueError(f"{len(ids)} tokens with stop tokens at {stops[:5]} and ended {ended}; "
                         "expected one at the end where it has ended, else none")


def check_draws(completion, temperature, top_p):
    """Raise a ValueError unless the log-probabilities of a completion are those of its draws."""
    for name, asked in (("temperature", temperature), ("top_p", top_p)):
        if completion.get(name, 1.0) != asked:
            raise ValueError(f"log-probabilities at {name} {shortened(completion.get(name, 1.0))};"
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
    answer({"load": lambda **keys: {"done": load(**keys)},
            "refresh": lambda: {"done": refresh()},
            "write": lambda **keys: {"completions": write(**keys)}}, lines, out)
