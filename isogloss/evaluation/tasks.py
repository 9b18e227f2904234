"""Tasks by which a language model is judged: MMLU, LAMBADA, GSM8K, HumanEval+, MBPP+.

A task is a list of items, a function that judges what the model says of one item, and a function
that makes metrics of the sums over all items.  Item i belongs to rank i mod R, and what ranks
exchange is sums, so metrics do not depend on ranks or batches.  They are those of
lm-evaluation-harness, of code those of EvalPlus; docs/tasks.md says which.

Tests: tests/test_tasks.py.
"""

import difflib
import math
import re
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from isogloss.evaluation.code_tasks import (
    CODE_NEW_TOKENS,
    CodeJudge,
    ks_of,
    pass_at,
    read_humaneval_plus,
    read_mbpp_plus,
)
from isogloss.evaluation.task_items import (
    GSM8K_NEW_TOKENS,
    ScoredItem,
    WrittenItem,
    read_gsm8k,
    read_lambada,
    read_mmlu,
    read_mmlu_continuation,
)
from isogloss.evaluation.task_model import (
    GaveUp,
    Request,
    evaluation_mode,
    score,
    write_answers,
)
from isogloss.flags.parse import check_types

# {option: its smallest and largest value}: beyond them float32 or random generators fail, or no
# machine suffices
BOUNDS = {
    "shots": (0, 1000), "limit": (0, 10**9), "batch_size": (1, 2**16),
    "max_new_tokens": (0, 2**20), "samples": (1, 2**16), "temperature": (0, 1000),
    "seed": (0, 2**32 - 2**16)}
LOWEST_TEMPERATURE = 1e-3  # but for 0: below it logits / temperature leave float32


@dataclass(kw_only=True)
class TaskOptions:
    """State how tasks are run.

    Attributes:
        data: folder of files as `task_items` describes them; "": the hub.
        shots: solved examples in the prompt.
        limit: items of each task, of MMLU of each subject, the first ones; 0: all.
        batch_size: rows of a forward pass.
        max_new_tokens: of a written answer; 0: as many as its task is made for.
        samples: answers to each item that is written; their mean counts.
        temperature: of written answers; 0: the most likely tokens.
        seed: of the draws at a temperature above 0.
        allow_unsafe_code: run what the model writes without a sandbox.
    """

    data: str = ""
    shots: int = 0
    limit: int = 0
    batch_size: int = 16
    max_new_tokens: int = 0
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0
    allow_unsafe_code: bool = False

    def __post_init__(self):
        check_types(self)
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {value}; expected {least} or more")
            if value > most:
                raise ValueError(f"{name} is {value}; expected {most} or less")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}; expected 0, or "
                             f"{LOWEST_TEMPERATURE} or more")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples is {self.samples} at temperature 0, where all samples are "
                             "equal; expected a temperature above 0")
        if self.data and not Path(self.data).is_dir():
            raise ValueError(f"the data folder {self.data} does not exist; expected a folder with "
                             "files of the tasks, or none for the hub")


# --- sums -----------------------------------------------------------------------------------------


@dataclass
class Judgment:
    """Hold what an item adds to the metrics of its task.

    Attributes:
        numbers: {name: value}, of the names that the task sums up.
        records: dicts for the file of records, one for each answer.
    """

    numbers: dict[str, float]
    records: list[dict]


class Sums:
    """Sum up judgments of a task, by group: counts, values and their squares."""

    def __init__(self, groups, names):
        self.groups = sorted(groups)
        self.names = list(names)
        size = len(self.groups), 1 + 2 * len(self.names)
        self.table = torch.zeros(size, dtype=torch.float64)

    def add(self, group, numbers):
        """Add the numbers of an item of a group."""
        row = self.table[self.groups.index(group)]
        row[0] += 1
        for column, name in enumerate(self.names):
            row[1 + 2 * column] += numbers[name]
            row[2 + 2 * column] += numbers[name] ** 2

    @property
    def num_items(self):
        return int(self.table[:, 0].sum())

    def total(self, name):
        """Return the sum of a number over all items."""
        return float(self.table[:, 1 + 2 * self.names.index(name)].sum())

    def mean(self, name):
        """Return the mean of a number over all items, each with the same weight."""
        return self.total(name) / max(self.num_items, 1)

    def stderr(self, name):
        """Return the standard error of a mean, from the variance within groups; None of one item.

        With one group it is the sample's standard deviation / sqrt(items).  Groups are pooled as
        the harness pools the subjects of MMLU.
        """
        column = 1 + 2 * self.names.index(name)
        counts = self.table[:, 0]
        is_there = counts > 0
        degrees = float((counts - 1)[is_there].sum())
        if degrees <= 0:
            return None
        around_mean = self.table[:, column + 1] - self.table[:, column] ** 2 / counts.clamp(min=1)
        variance = max(float(around_mean[is_there].sum()), 0.0) / degrees
        return math.sqrt(variance / self.num_items)

    def with_stderr(self, metric, name):
        """Return {metric: mean, metric_stderr: its standard error}."""
        metrics = {metric: self.mean(name)}
        stderr = self.stderr(name)
        if stderr is not None:
            metrics[f"{metric}_stderr"] = stderr
        return metrics


# --- tasks ----------------------------------------------------------------------------------------


@dataclass
class Task:
    """Hold the items of a task, and what is made of the model's answers.

    Attributes:
        name: as in the metrics' names.
        items: all ScoredItems or WrittenItems, of all ranks.
        judge: (item, answers) -> Judgment.  The answers are a Score for each continuation, or the
            text of each sample.
        numbers: names of what judgments hold.
        summarize: Sums over all items -> {metric without the task's name: value}.
        prepare: (this rank's items) -> None, before the first evaluation.
        workers: threads that judge side by side.
        shard: this rank's items, as (number, item); see `load_tasks`.
        requests: of each of them, where items are scored.
    """

    name: str
    items: list
    judge: Callable
    numbers: tuple[str, ...]
    summarize: Callable
    prepare: Callable | None = None
    workers: int = 1
    shard: list[tuple[int, ScoredItem | WrittenItem]] = field(default_factory=list)
    requests: list[list[Request]] = field(default_factory=list)

    @property
    def is_scored(self):
        return isinstance(self.items[0], ScoredItem)

    def take_shard(self, encoder, rank, size):
        """Keep every `size`-th item for this rank, prepare it, and encode what is scored.

        Raises:
            ValueError: a continuation does not fit into the model's window, or a reference
                solution fails.
        """
        self.shard = list(enumerate(self.items))[rank::size]
        if self.prepare:
            self.prepare([item for _, item in self.shard])
        if not self.is_scored:
            return
        for _, item in self.shard:
            try:
                self.requests.append(encoder.requests(item.context, item.continuations))
            except ValueError as error:
                raise ValueError(f"{self.name}, item {item.id}: {error}") from None


def judge_choices(item, scores):
    """Judge a question with choices: the most likely one, as it is and per byte."""
    logp = [of_choice.logp for of_choice in scores]
    per_byte = []
    for logp_of_choice, continuation in zip(logp, item.continuations):
        # the leading space is no part of the choice
        num_bytes = len(continuation.removeprefix(" ").encode())
        per_byte.append(logp_of_choice / max(num_bytes, 1))
    chosen = logp.index(max(logp))
    is_right = chosen == item.answer
    numbers = {
        "acc": float(is_right),
        "acc_norm": float(per_byte.index(max(per_byte)) == item.answer),
    }
    prediction = item.continuations[chosen].strip()
    return Judgment(numbers, [_record(item, prediction, is_right, nats=[-x for x in logp])])


def judge_last_word(item, scores):
    """Judge a passage without its last word: whether greedy decoding would write it."""
    [score] = scores
    numbers = {
        "acc": float(score.is_greedy),
        "nats": -score.logp,
        "num_bytes": len(item.continuations[0].encode()),
    }
    prediction = item.continuations[0].strip() if score.is_greedy else None
    return Judgment(numbers, [_record(item, prediction, score.is_greedy, nats=[-score.logp])])


def judge_number(item, answers):
    """Judge solutions of GSM8K by their last number, and strictly by the one behind "####"."""
    right = 0
    strictly_right = 0
    records = []
    reference = comparable_number(item.reference)
    for sample, answer in enumerate(answers):
        prediction = last_number(answer)
        is_right = comparable_number(prediction) == reference
        is_strictly_right = comparable_number(marked_number(answer)) == reference
        right += is_right
        strictly_right += is_strictly_right
        records.append(_record(item, prediction, is_right, sample=sample,
                               is_strictly_right=is_strictly_right, answer=answer))
    numbers = {"acc": right / len(answers), "acc_strict": strictly_right / len(answers)}
    return Judgment(numbers, records)


def judge_code(judge, ks, item, answers):
    """Judge programs by the tests of their item.

    Args:
        judge: CodeJudge.
        ks: of pass@k.
        item: CodeItem.
        answers: texts behind its prompt.
    """
    verdicts = [judge.verdict(item, answer) for answer in answers]
    right = sum(verdict.passes for verdict in verdicts)
    right_base = sum(verdict.passes_base for verdict in verdicts)
    numbers = {"timeouts": sum(verdict.reason == "timeout" for verdict in verdicts)}
    for k in ks:
        numbers[f"pass@{k}"] = pass_at(k, len(answers), right)
        numbers[f"base_pass@{k}"] = pass_at(k, len(answers), right_base)
    records = []
    for sample, (answer, verdict) in enumerate(zip(answers, verdicts)):
        records.append(_record(item, None, verdict.passes, sample=sample, reason=verdict.reason,
                               is_right_base=verdict.passes_base, answer=answer))
    return Judgment(numbers, records)


def _record(item, prediction, is_right, **more):
    verdict = "right" if is_right else "wrong"
    return {"task": item.task, "id": item.id, "prediction": prediction, "verdict": verdict, **more}


# The harness's own expressions, so that both find the same number in the same text.
LAST_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
MARKED_NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")
NO_NUMBER = "[invalid]"
NOT_COMPARED = ",", r"\$", r"(?s).*#### ", r"\.$"


def last_number(text):
    """Return the last number in a text, as it is written there, or "[invalid]"."""
    found = LAST_NUMBER.findall(text)
    if not found:
        return NO_NUMBER
    with_marks, plain = found[-1]
    return (with_marks or plain).strip()


def marked_number(text):
    """Return the first number behind "####" in a text, or "[invalid]"."""
    found = MARKED_NUMBER.findall(text)
    return found[0].strip() if found else NO_NUMBER


def comparable_number(text):
    """Return a number without commas, dollar signs, a final period and what precedes "####"."""
    for expression in NOT_COMPARED:
        text = re.sub(expression, "", text)
    return text.lower()


def summarize_choices(sums):
    """Return the metrics of a task with choices."""
    return sums.with_stderr("acc", "acc") | sums.with_stderr("acc_norm", "acc_norm")


def summarize_last_word(sums):
    """Return the metrics of LAMBADA."""
    bits_per_byte = sums.total("nats") / max(sums.total("num_bytes"), 1) / math.log(2)
    return sums.with_stderr("acc", "acc") | {"bits_per_byte": bits_per_byte}


def summarize_number(sums):
    """Return the metrics of GSM8K."""
    return sums.with_stderr("acc", "acc") | sums.with_stderr("acc_strict", "acc_strict")


def summarize_code(ks, sums):
    """Return the metrics of a task whose answers are programs."""
    metrics = {}
    for k in ks:
        metrics |= sums.with_stderr(f"pass@{k}", f"pass@{k}")
        metrics |= sums.with_stderr(f"base_pass@{k}", f"base_pass@{k}")
    return metrics | {"timeouts": sums.total("timeouts")}


def _load_mmlu(options):
    items = read_mmlu(options.data, options.shots, options.limit)
    return Task("mmlu", items, judge_choices, ("acc", "acc_norm"), summarize_choices)


def _load_mmlu_continuation(options):
    items = read_mmlu_continuation(options.data, options.shots, options.limit)
    return Task("mmlu_continuation", items, judge_choices, ("acc", "acc_norm"), summarize_choices)


def _load_lambada(options):
    items = read_lambada(options.data, options.shots, options.limit)
    return Task("lambada", items, judge_last_word, ("acc", "nats", "num_bytes"),
                summarize_last_word)


def _load_gsm8k(options):
    max_new_tokens = options.max_new_tokens or GSM8K_NEW_TOKENS
    items = read_gsm8k(options.data, options.shots, options.limit, max_new_tokens)
    return Task("gsm8k", items, judge_number, ("acc", "acc_strict"), summarize_number)


def _load_code(name, read, options):
    judge = CodeJudge(options.allow_unsafe_code)
    try:
        judge.check_sandbox()
    except ValueError as error:
        raise ValueError(f"{name} runs what the model writes: {error}; or allow it to do all that "
                         "you can, with --allow_unsafe_code") from None
    items = read(options.data, options.limit, options.max_new_tokens or CODE_NEW_TOKENS)
    ks = ks_of(options.samples)
    numbers = ["timeouts"]
    for k in ks:
        numbers += [f"pass@{k}", f"base_pass@{k}"]
    return Task(name, items, partial(judge_code, judge, ks), tuple(numbers),
                partial(summarize_code, ks), judge.prepare, judge.workers)


TASKS = {
    "mmlu": _load_mmlu,
    "mmlu_continuation": _load_mmlu_continuation,
    "lambada": _load_lambada,
    "gsm8k": _load_gsm8k,
    "humaneval_plus": partial(_load_code, "humaneval_plus", read_humaneval_plus),
    "mbpp_plus": partial(_load_code, "mbpp_plus", read_mbpp_plus),
}


def load_tasks(names, options, encoder, rank=0, size=1):
    """Read tasks, and encode this rank's items.

    Args:
        names: of tasks, in the order in which they run.
        options: TaskOptions.
        encoder: TaskEncoder of the model.
        rank, size: item i belongs to rank i mod size.
    Returns:
        list of Task.
    Raises:
        ValueError: an unknown task, missing or damaged data, too few examples for the shots.
    """
    if not names:
        raise ValueError(f"no task is named; expected some of {', '.join(TASKS)}")
    for number, name in enumerate(names):
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(TASKS)}"
            raise ValueError(f"unknown task {name!r}; {hint}")
        if name in names[:number]:
            raise ValueError(f"task {name} is named twice; name it once")
    tasks = []
    for name in names:
        task = TASKS[name](options)
        task.take_shard(encoder, rank, size)
        tasks.append(task)
    return tasks


# --- run ------------------------------------------------------------------------------------------


def run_tasks(tasks, model, encoder, options, agree=bool, sums=torch.as_tensor, bar=False,
              stop=lambda: False):
    """Run tasks on a model.  All ranks call it.

    The model's mode, its gradients and all random states stay as they are.

    Args:
        tasks: of `load_tasks`.
        model: causal language model of transformers, plain or partitioned by ZeRO-3.
        encoder: its TaskEncoder.
        options: TaskOptions.
        agree: see `rollout.write`; needed where each forward pass needs all ranks.  Where it raises
            GaveUp on any rank, metrics and records are empty on all.
        sums: (n,) float64 -> sums over all ranks, as `counts.global_sums` gives them.
        bar: show progress on stderr, if that is a terminal.
        stop: () -> this rank is to give up; asked while answers are judged.
    Returns:
        (metrics, records): {"eval/TASK_...": value}, equal on every rank; dicts of this rank's
        items, one for each answer.
    Raises:
        ValueError: on all ranks, where log-probabilities are not finite on any.
    """
    metrics = {}
    records = []
    with evaluation_mode(model):
        for task in tasks:
            begin = time.perf_counter()
            judged = None
            is_finite = True
            try:
                judged = _judge_shard(task, model, encoder, options, agree, bar, stop)
            except NotFinite:
                is_finite = False
            except GaveUp:
                pass
            num_gone, num_bad = sums(
                torch.tensor([judged is None, not is_finite], dtype=torch.float64)).tolist()
            # on all ranks
            if num_bad:
                raise ValueError(f"{task.name}: the model's log-probabilities are not finite; "
                                 "expected a model whose weights and activations are, in its dtype")
            if num_gone:
                return {}, []
            totals = Sums({_group_of(item) for item in task.items}, task.numbers)
            for (_, item), judgment in zip(task.shard, judged, strict=True):
                totals.add(_group_of(item), judgment.numbers)
                records += judgment.records
            seconds = time.perf_counter() - begin
            own = torch.cat([totals.table.flatten(), torch.tensor([seconds, 1.0]).double()])
            *of_items, seconds_of_ranks, num_ranks = sums(own).tolist()
            totals.table = torch.tensor(of_items, dtype=torch.float64).view_as(totals.table)
            for name, value in task.summarize(totals).items():
                metrics[f"eval/{task.name}_{name}"] = value
            metrics[f"eval/{task.name}_seconds"] = seconds_of_ranks / num_ranks
    return metrics, records


class NotFinite(Exception):
    """End an evaluation of which nothing would mean anything."""


def _group_of(item):
    return getattr(item, "group", "")


def _judge_shard(task, model, encoder, options, agree, bar, stop):
    """Return the Judgment of each item of this rank."""
    if task.is_scored:
        answers = _scores(task, model, options, agree, bar)
    else:
        answers = _written(task, model, encoder, options, agree, bar)

    def judge(item, of_item):
        if stop():
            raise GaveUp
        return task.judge(item, of_item)

    items = [item for _, item in task.shard]
    if task.workers == 1:
        return list(map(judge, items, answers))
    with ThreadPoolExecutor(task.workers) as pool:
        return list(pool.map(judge, items, answers))


def _progress(task, total, bar):
    # None: only on a terminal
    return tqdm(total=total, desc=task.name, disable=None if bar else True, leave=False)


def _scores(task, model, options, agree, bar):
    """Return [Score of each continuation] for each item of this rank."""
    requests = [request for of_item in task.requests for request in of_item]
    with _progress(task, len(requests), bar) as progress:
        scores = score(model, requests, options.batch_size, agree, progress.update)
    if not all(math.isfinite(of_request.logp) for of_request in scores):
        raise NotFinite
    scores = iter(scores)
    return [[next(scores) for _ in of_item] for of_item in task.requests]


def _written(task, model, encoder, options, agree, bar):
    """Return [text of each sample] for each item of this rank."""
    items = []
    keys = []
    name = zlib.crc32(task.name.encode())
    for number, item in task.shard:
        for sample in range(options.samples):
            items.append(item)
            keys.append((options.seed, name, number, sample))
    with _progress(task, len(items), bar) as progress:
        texts = write_answers(model, encoder, items, keys, options, agree, progress.update)
    firsts = range(0, len(texts), options.samples)
    return [texts[first : first + options.samples] for first in firsts]
