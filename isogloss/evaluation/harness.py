"""Run tasks of lm-evaluation-harness: those of NAMES, and lm_eval:NAME.

The harness makes the requests and judges the answers.  The answers come from task_model.py: each
rank answers its share, and every rank's harness sees all of them.

lm_eval is optional and imported when it is asked for.  Tests: tests/test_harness.py.
"""

import hashlib
import logging
import math
import os
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import numpy as np

from isogloss.evaluation.code_tasks import (
    CODE_NAMES,
    CodeJudge,
    check_sandbox,
    judged_by,
    prepare_task,
)
from isogloss.evaluation.task_model import GaveUp, TaskEncoder, TaskRequest, score, write_answers
from isogloss.job.rendezvous import values_of_ranks

PREFIX = "lm_eval:"
INSTALL = 'pip install ".[eval]"'
# names of ours: the harness' name, its folder there, and the data set of the hub that it reads
NAMES = {
    "mmlu": ("mmlu", "mmlu/default", "cais/mmlu"),
    "mmlu_continuation": ("mmlu_continuation", "mmlu/continuation", "cais/mmlu"),
    "lambada": ("lambada_openai", "lambada", "EleutherAI/lambada_openai"),
    "gsm8k": ("gsm8k", "gsm8k", "openai/gsm8k"),
    "hellaswag": ("hellaswag", "hellaswag", "Rowan/hellaswag"),
    "winogrande": ("winogrande", "winogrande", "allenai/winogrande"),
    "arc_challenge": ("arc_challenge", "arc", "allenai/ai2_arc"),
    "arc_easy": ("arc_easy", "arc", "allenai/ai2_arc"),
    **CODE_NAMES,
}
SHOT_SEED = 1234  # of the harness
NUM_RESAMPLED = 100  # for standard errors of what is no mean
MAX_NEW_TOKENS = 256  # of the harness, where a task says nothing


@dataclass
class HarnessTask:
    """Hold a task, or a group of them, of the harness.

    Attributes:
        name: as in --eval_tasks.
        loaded: what its TaskManager loads.
        judge: CodeJudge of a task whose answers are programs, or None.
    """

    name: str
    loaded: dict
    judge: CodeJudge | None = None

    @property
    def writes(self):
        return any(task.OUTPUT_TYPE == "generate_until" for task in self.loaded["tasks"].values())

    def shown(self, name):
        """Return the name under which a task or group of the harness is logged."""
        if self.name.startswith(PREFIX):
            return PREFIX + name
        return self.name if name == NAMES[self.name][0] else name


def load_harness_task(name, options):
    """Return a HarnessTask; its data is loaded.

    Args:
        name: one of NAMES, or `lm_eval:` and the name of a task, a group or a tag.
        options: TaskOptions.  In its folder lie copies of the data sets of NAMES as the hub has
            them, and YAML files of further tasks, which come first.
    Raises:
        ValueError: no lm_eval, no such task, a task that runs code, or no sandbox for one of
            CODE_NAMES, data that cannot be loaded, or not so many worked examples.
    """
    judge = None
    if name in CODE_NAMES:
        check_sandbox(name, options.allow_unsafe_code)
        judge = CodeJudge(options.allow_unsafe_code)
    try:
        from lm_eval import tasks
    except ImportError:
        raise ValueError(f"{name}: needs lm-evaluation-harness: {INSTALL}") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    if name in NAMES:  # to look through all of its folders takes many seconds
        of_harness, folder, _ = NAMES[name]
        manager = tasks.TaskManager(include_path=Path(tasks.__file__).parent / folder,
                                    include_defaults=False)
    else:
        of_harness = name.removeprefix(PREFIX)
        manager = tasks.TaskManager(include_path=options.data or None)
    if of_harness not in manager.all_tasks:
        raise ValueError(f"{name}: lm_eval has no such task; `lm_eval ls tasks` lists them")
    other_data = {}
    if name in NAMES and options.data:
        path = _local_copy(name, options.data)
        other_data = {"dataset_path": path, "dataset_kwargs": {"cache_dir": _cache_of(path)}}
    try:
        with code_of_others(options.trust_remote_code), (
                judged_by(judge) if judge else nullcontext()):
            # what `load` does by itself for a name; for a dict it knows no members of a group
            built = manager._factory.build(
                manager.task_index[of_harness], overrides=other_data, registry=manager.task_index)
            loaded = manager.load(built if isinstance(built, list) else [built])
    except UntrustedCode as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:  # a data set's own code may raise anything
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{name}: its data cannot be loaded: {type(error).__name__}: {reason}"
                         ) from None
    for task_name, task in loaded["tasks"].items():
        if judge:
            prepare_task(name, task, options)
        elif getattr(task, "UNSAFE_CODE", False):
            raise ValueError(f"{name}: {task_name} runs what the student writes inside of this "
                             "job, where it could do anything; expected a task without code, or "
                             "humaneval_plus or mbpp_plus, which have a sandbox")
        if options.shots >= 0 and not judge:
            task.set_config(key="num_fewshot", value=options.shots)
        _try_to_ask(name, task_name, task)
    return HarnessTask(name, loaded, judge)


class UntrustedCode(Exception):
    """Name Python code that a task would run."""


@contextmanager
def code_of_others(is_trusted):
    """Refuse the functions that YAML files outside of lm_eval name, unless they are trusted."""
    from lm_eval.tasks import _yaml_loader

    package = Path(_yaml_loader.__file__).resolve().parent
    import_function = _yaml_loader._import_func_in_yml

    def checked(function, folder):
        if not (is_trusted or folder.resolve().is_relative_to(package)):
            raise UntrustedCode(f"a YAML file in {folder} names !function {function}, Python code "
                                "that would run in this job; read that code, and add "
                                "--trust_remote_code to run it")
        return import_function(function, folder)

    with mock.patch.object(_yaml_loader, "_import_func_in_yml", checked):
        yield


def _try_to_ask(name, task_name, task):
    """Raise a ValueError where the harness cannot make the first request of a task."""
    shots = task.config.num_fewshot or 0
    try:
        with output_silenced():
            task.build_all_requests(limit=1)
    except Exception as error:  # an assertion, where there are fewer examples
        reason = str(error).strip().split("\n")[0]
        sampler = getattr(task, "sampler", None)
        raise ValueError(
            f"{name}: {task_name} cannot be asked with {shots} worked examples, of which it has "
            f"{len(sampler.df) if sampler else 0} ({type(error).__name__}: {reason}); ask for fewer"
        ) from None


@contextmanager
def output_silenced():
    """Let what the harness prints, and its progress bars, not stand amid the job's output."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _local_copy(name, folder):
    dataset = NAMES[name][2]
    path = Path(folder) / dataset
    if not path.is_dir():
        raise ValueError(
            f"{name}: {path} does not exist; expected a copy of the hub's data set, as "
            f"`hf download --repo-type dataset {dataset} --local-dir {path}` makes it, or no data "
            "folder for the hub")
    return str(path.resolve())


def _cache_of(folder):
    """Return where datasets keeps what it reads of a folder.

    It knows the folder by its name alone, and would go on with rows that are no longer there.
    """
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    files = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
    key = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    return str(Path(datasets.config.HF_DATASETS_CACHE) / f"isogloss-{key}")


@dataclass
class TaskAnswers:
    """Answer the requests of the harness, each rank its share; all ranks take part in every method.

    Attributes:
        model: causal language model of transformers, in evaluation mode.
        encoder: TaskEncoder.
        options: TaskOptions.
        rank, size: this rank and how many there are.
        agree: as of `task_model.score`.
        stop: () -> this rank is to give up; asked while programs are run.
    """

    model: object
    encoder: TaskEncoder
    options: object
    rank: int = 0
    size: int = 1
    agree: object = bool
    stop: object = bool

    def loglikelihoods(self, pairs):
        """Return (log p, is greedy) of each (context, continuation)."""
        scores = self._answered(self._loglikelihoods, pairs)
        _check_finite([logp for logp, _ in scores])
        return scores

    def rolling(self, texts):
        """Return log p of each whole text, in windows that the model reads at once."""
        scores = self._answered(self._rolling, texts)
        _check_finite(scores)
        return scores

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

    def outcomes(self, judge):
        """Return {program: whether it passes} of what a CodeJudge was asked."""
        programs = list(dict.fromkeys(judge.asked))
        return dict(zip(programs, self._answered(partial(judge.run, self.stop), programs)))

    def _answered(self, answer, requests):
        """Return the answers of all ranks in the order of the requests."""
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
                requests.append(TaskRequest(np.array([*read, scored[-1]], np.int32), len(scored)))
                owners.append(number)
        logp = [0.0] * len(texts)
        for owner, of_window in zip(owners, self._scores(requests)):
            logp[owner] += of_window.logp
        return logp

    def _written(self, temperature, numbered):
        keys = [(self.options.seed, number) for number, _ in numbered]
        prompts = [prompt for _, prompt in numbered]
        options = replace(self.options, temperature=temperature)
        return write_answers(self.model, self.encoder, prompts, keys, options, agree=self.agree)

    def _scores(self, requests):
        return score(self.model, requests, self.options.batch_size, self.agree)


def _check_finite(logp):
    if not all(map(math.isfinite, logp)):
        raise ValueError("the model's log-probabilities are not finite; expected a model whose "
                         "weights and activations are, in its dtype")


@dataclass
class Written:
    """Ask for a text that ends before one of `stops`, or after so many tokens."""

    prompt: str
    stops: list
    max_new_tokens: int
    temperature: float


def run_harness_task(task, answers):
    """Return (metrics, records) of a HarnessTask, equal on every rank; all of them take part."""
    from lm_eval.evaluator import evaluate

    for of_harness in task.loaded["tasks"].values():
        of_harness.set_fewshot_seed(SHOT_SEED)  # the same examples on all ranks, and every time
    os.environ["DISABLE_MULTIPROC"] = "1"  # a job of many threads must not be forked
    run = partial(evaluate, _language_model(answers), task.loaded, bootstrap_iters=NUM_RESAMPLED,
                  limit=answers.options.limit or None, confirm_run_unsafe_code=True)
    if task.judge:
        task.judge.asked.clear()
    with output_silenced():
        results = run()
        if task.judge and task.judge.asked:  # the second time its programs have been run
            task.judge.passed = answers.outcomes(task.judge)
            results = run()
    metrics = {}
    for name, of_task in results["results"].items():
        if task.name in NAMES and name != NAMES[task.name][0]:
            continue  # a subject of mmlu
        for key, value in of_task.items():
            metric, _, rule = key.partition(",")
            if not isinstance(value, (int, float)) or metric == "sample_len":
                continue
            if rule not in ("none", "", "create_test"):
                is_error = metric.endswith("_stderr")
                metric = f"{metric.removesuffix('_stderr')}_{rule}" + "_stderr" * is_error
            metrics[f"{task.shown(name)}_{metric}"] = float(value)
    records = []
    for name, of_task in (results.get("samples") or {}).items():
        records += [_record(task.shown(name), sample) for sample in of_task]
    return metrics, records


def _record(task, sample):
    answers = sample["filtered_resps"]
    record = {"task": task, "id": str(sample["doc_id"]), "rule": sample["filter"]}
    metrics = {key: sample[key] for key in sample["metrics"]}
    metrics = {key: value for key, value in metrics.items()
               if isinstance(value, (bool, int, float, str))}
    rules = [key for key in ("acc", "exact_match", "pass@1", "pass_at_1") if key in metrics]
    if rules:
        is_right = metrics[rules[0]]  # of programs: some of them are
        record["verdict"] = "right" if is_right else "wrong"
    if rules and rules[0].startswith("pass"):
        texts = sample["resps"][0]
        record |= {"prediction": None, "answer": texts if len(texts) > 1 else texts[0]}
    elif isinstance(answers[0], (tuple, list)):
        nats = [-float(logp) for logp, _ in answers]
        chosen = nats.index(min(nats))
        text = sample["arguments"][chosen][1].strip()
        is_chosen = len(answers) > 1 or answers[0][1]  # one alone: whether greedy decoding does
        record |= {"prediction": text if is_chosen else None, "nats": nats}
    else:
        record["prediction"] = str(answers[0])
        if isinstance(sample["resps"][0][0], str):
            record["answer"] = sample["resps"][0][0]
    return record | metrics


def _language_model(answers):
    from lm_eval.api.model import LM

    class Model(LM):
        """Pass the harness' requests on; of code it asks twice."""

        texts = ()

        def loglikelihood(self, requests):
            pairs = [request.args for request in requests]
            return [tuple(pair) for pair in answers.loglikelihoods(pairs)]

        def loglikelihood_rolling(self, requests):
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests):
            self.texts = self.texts or answers.texts([
                _written(*request.args, answers.options.max_new_tokens) for request in requests])
            return self.texts

    return Model()


def _written(prompt, options, max_new_tokens):
    """Return the Written of a prompt and the options that a task has for it."""
    stops = options.get("until") or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    draws = options.get("do_sample", True)  # without a temperature it is greedy all the same
    temperature = options.get("temperature", 0.0) if draws else 0.0
    max_new_tokens = max_new_tokens or options.get("max_gen_toks", MAX_NEW_TOKENS)
    return Written(prompt, stops, max_new_tokens, float(temperature))
