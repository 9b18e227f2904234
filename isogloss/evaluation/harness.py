"""Run tasks of lm-evaluation-harness on the student, as `--eval_tasks lm_eval:NAME`.

The harness makes the requests and judges the answers.  The answers come from task_model.py, as for
tasks of our own: each rank answers its share, and every rank's harness sees all of them.

lm_eval is optional and imported when it is asked for.  Tests: tests/test_harness.py.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from isogloss.evaluation.task_model import GaveUp, Request, TaskEncoder, score, write_answers
from isogloss.job.rendezvous import values_of_ranks

PREFIX = "lm_eval:"
INSTALL = "pip install lm_eval==0.4.13"
NUM_RESAMPLED = 100  # for standard errors of what is no mean
MAX_NEW_TOKENS = 256  # of the harness, where a task says nothing


@dataclass
class HarnessTask:
    """Hold a task, or a group of them, of the harness.

    Attributes:
        name: as in --eval_tasks, without `lm_eval:`.
        loaded: what its TaskManager loads.
        limit: items of each task; 0: all.
    """

    name: str
    loaded: dict
    limit: int = 0

    @property
    def writes(self):
        """Whether the model has to write answers."""
        return any(task.OUTPUT_TYPE == "generate_until" for task in self.loaded["tasks"].values())


def load_harness_task(name, folder="", shots=None, limit=0):
    """Return a HarnessTask; its data is loaded.

    Args:
        name: of a task, a group or a tag.
        folder: where YAML files of further tasks lie, which come first; "": nowhere.
        shots: worked examples; None: as the task says.
        limit: items of each task; 0: all.
    Raises:
        ValueError: no lm_eval, no such task, a task that runs code, data that cannot be loaded.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError(f"--eval_tasks {PREFIX}{name}: needs lm-evaluation-harness: {INSTALL}"
                         ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=folder or None)
    if name not in manager.all_tasks:
        raise ValueError(f"--eval_tasks {PREFIX}{name}: lm_eval has no such task; "
                         f"`lm_eval ls tasks` lists them")
    try:
        loaded = manager.load([name])
    except Exception as error:  # a data set's own code may raise anything
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--eval_tasks {PREFIX}{name}: its data cannot be loaded: "
                         f"{type(error).__name__}: {reason}") from None
    for task_name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise ValueError(f"--eval_tasks {PREFIX}{name}: {task_name} runs what the student "
                             "writes inside of this job, where it could do anything; expected a "
                             "task without code, or humaneval_plus or mbpp_plus, which have a "
                             "sandbox")
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
    return HarnessTask(name, loaded, limit)


@dataclass
class Answers:
    """Answer the requests of the harness, each rank its share; all ranks take part in every method.

    Attributes:
        model: causal language model of transformers, in evaluation mode.
        encoder: TaskEncoder.
        options: object with `batch_size`, `temperature` and `seed`.
        rank, size: this rank and how many there are.
        agree: as of `task_model.score`.
    """

    model: object
    encoder: TaskEncoder
    options: object
    rank: int = 0
    size: int = 1
    agree: object = bool

    def loglikelihoods(self, pairs):
        """Return (log p, is greedy) of each (context, continuation)."""
        return self._answered(self._loglikelihoods, pairs)

    def rolling(self, texts):
        """Return log p of each whole text, in windows that the model reads at once."""
        return self._answered(self._rolling, texts)

    def texts(self, prompts):
        """Return what the model writes behind each `Written`."""
        # each loop is for one temperature, on every rank for the same ones
        answers = [""] * len(prompts)
        for temperature in sorted({prompt.temperature for prompt in prompts}):
            numbers = [number for number, prompt in enumerate(prompts)
                       if prompt.temperature == temperature]
            of_temperature = [(number, prompts[number]) for number in numbers]
            write = partial(self._written, temperature)
            for number, text in zip(numbers, self._answered(write, of_temperature)):
                answers[number] = text
        return answers

    def _answered(self, answer, requests):
        """Return the answers of all ranks in the order of the requests.

        Raises:
            GaveUp: on all ranks, if one of them gives up.
        """
        own = None
        with suppress(GaveUp):
            own = answer(requests[self.rank :: self.size])
        of_ranks = [own] if self.size == 1 else values_of_ranks(own)
        if None in of_ranks:
            raise GaveUp
        merged = [None] * len(requests)
        for rank, of_rank in enumerate(of_ranks):
            merged[rank :: self.size] = of_rank
        return merged

    def _loglikelihoods(self, pairs):
        requests = []
        for context, continuation in pairs:
            requests += self.encoder.requests(context, [continuation])
        return [[score.logp, score.is_greedy] for score in self._scores(requests)]

    def _rolling(self, texts):
        from lm_eval.utils import get_rolling_token_windows

        requests = []
        owners = []
        for number, ids in enumerate(self.encoder.encode(texts)):
            for read, scored in get_rolling_token_windows(
                    ids, self.encoder.first_token, self.encoder.window, context_len=1):
                requests.append(Request(np.array([*read, scored[-1]], np.int32), len(scored)))
                owners.append(number)
        logp = [0.0] * len(texts)
        for owner, of_window in zip(owners, self._scores(requests)):
            logp[owner] += of_window.logp
        return logp

    def _written(self, temperature, numbered):
        keys = [(self.options.seed, number) for number, _ in numbered]
        prompts = [prompt for _, prompt in numbered]
        options = replace(self.options, temperature=temperature)
        return write_answers(self.model, self.encoder, prompts, keys, options, self.agree)

    def _scores(self, requests):
        return score(self.model, requests, self.options.batch_size, self.agree)


@dataclass
class Written:
    """Ask for a text: `prompt`, `stops`, `max_new_tokens` as of WrittenItem."""

    prompt: str
    stops: list
    max_new_tokens: int
    temperature: float


def run_harness_task(task, answers):
    """Return (metrics, records) of a HarnessTask, equal on every rank; all of them take part.

    Args:
        task: HarnessTask.
        answers: Answers.
    """
    from lm_eval.evaluator import evaluate

    results = evaluate(_language_model(answers), task.loaded, limit=task.limit or None,
                       bootstrap_iters=NUM_RESAMPLED)
    metrics = {}
    for name, of_task in results["results"].items():
        for key, value in of_task.items():
            metric, _, rule = key.partition(",")
            if isinstance(value, (int, float)) and metric not in ("sample_len",):
                suffix = "" if rule in ("none", "") else f"_{rule}"
                metrics[f"{PREFIX}{name}_{metric}{suffix}"] = float(value)
    return metrics, _records(results.get("samples") or {})


def _records(samples):
    records = []
    for name, of_task in samples.items():
        for sample in of_task:
            values = {key: sample[key] for key in sample["metrics"]}
            plain = {key: value for key, value in values.items()
                     if isinstance(value, (bool, int, float, str))}
            records.append({"task": PREFIX + name, "id": str(sample["doc_id"]),
                            "rule": sample["filter"],
                            "prediction": str(sample["filtered_resps"][0]), **plain})
    return records


def _language_model(answers):
    """Return what the harness takes for a model."""
    from lm_eval.api.model import LM

    class Model(LM):
        """Pass the harness' requests on."""

        def loglikelihood(self, requests):
            pairs = [request.args for request in requests]
            return [tuple(pair) for pair in answers.loglikelihoods(pairs)]

        def loglikelihood_rolling(self, requests):
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests):
            return answers.texts([_written(*request.args) for request in requests])

    return Model()


def _written(prompt, options):
    """Return the Written of a prompt and the options that a task has for it."""
    stops = options.get("until") or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    draws = options.get("do_sample", True)  # without a temperature it is greedy all the same
    temperature = options.get("temperature", 0.0) if draws else 0.0
    return Written(prompt, stops, options.get("max_gen_toks", MAX_NEW_TOKENS), float(temperature))
