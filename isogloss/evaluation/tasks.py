"""The tasks that we judge ourselves: HumanEval+ and MBPP+.

Item i belongs to rank i mod R, and what ranks exchange is sums, so metrics do not depend on ranks
or batches.  What becomes of a program is said in code_tasks.py; other tasks are those of
lm-evaluation-harness, see harness.py.

Tests: tests/test_tasks.py, tests/test_code_tasks.py.
"""

import math
import sys
import time
import zlib
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from isogloss.evaluation import code_tasks, sandbox
from isogloss.evaluation.code_tasks import CodeItem, CodeJudge, ks_of, pass_at
from isogloss.evaluation.task_model import GaveUp, evaluation_mode, write_answers
from isogloss.flags.terminal import unguarded

# --- code -----------------------------------------------------------------------------------------


@dataclass
class CodeTask:
    """Hold the items of a task whose answers are programs.

    Attributes:
        name: as in the metrics' names.
        items: all CodeItems, of all ranks.
        judge: CodeJudge.
        ks: of pass@k.
        shard: this rank's items, as (number, item).
    """

    name: str
    items: list[CodeItem]
    judge: CodeJudge
    ks: list[int]
    shard: list[tuple[int, CodeItem]] = field(default_factory=list)

    @property
    def numbers(self):
        return [f"{test}@{k}" for k in self.ks for test in ("pass", "base_pass")] + ["timeouts"]

    def judged(self, item, answers):
        """Return (numbers, records): values in the order of `numbers`, a dict for each answer."""
        verdicts = [self.judge.verdict(item, answer) for answer in answers]
        right = sum(verdict.passes for verdict in verdicts)
        right_base = sum(verdict.passes_base for verdict in verdicts)
        numbers = []
        for k in self.ks:
            numbers += [pass_at(k, len(answers), right), pass_at(k, len(answers), right_base)]
        numbers.append(sum(verdict.reason == "timeout" for verdict in verdicts))
        records = []
        for sample, (answer, verdict) in enumerate(zip(answers, verdicts)):
            records.append({
                "task": self.name, "id": item.id, "prediction": None,
                "verdict": "right" if verdict.passes else "wrong", "sample": sample,
                "reason": verdict.reason, "is_right_base": verdict.passes_base, "answer": answer})
        return numbers, records


def load_code_task(name, options, rank=0, size=1):
    """Read a task, and run the reference solutions of this rank's items.

    Raises:
        ValueError: no sandbox, missing or damaged data.
    """
    judge = CodeJudge(options.allow_unsafe_code)
    reason = None if judge.unsafe else sandbox.why_unavailable()
    if reason:
        raise ValueError(f"{name} runs what the model writes: {reason}; or allow it to do all that "
                         "you can, with --allow_unsafe_code")
    items = code_tasks.read_items(name, options.data, options.limit,
                                  options.max_new_tokens or code_tasks.CODE_NEW_TOKENS)
    task = CodeTask(name, items, judge, ks_of(options.samples))
    task.shard = list(enumerate(items))[rank::size]
    judge.prepare([item for _, item in task.shard])
    return task


def run_code_task(task, model, encoder, options, *, agree=bool, sums=torch.as_tensor, bar=False,
                  stop=lambda: False):
    """Run a task on a model.  All ranks call it.

    The model's mode, its gradients and all random states stay as they are.

    Args:
        task: CodeTask.
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
    """
    begin = time.perf_counter()
    judged = None
    try:
        with evaluation_mode(model):
            judged = _judged_shard(task, model, encoder, options, agree=agree, bar=bar, stop=stop)
    except GaveUp:
        pass
    [num_gone] = sums(torch.tensor([judged is None], dtype=torch.float64)).tolist()
    if num_gone:  # on all ranks
        return {}, []
    own = torch.zeros(len(task.numbers), 2, dtype=torch.float64)
    records = []
    for numbers, of_item in judged:
        values = torch.tensor(numbers, dtype=torch.float64)
        own += torch.stack([values, values**2], 1)
        records += of_item
    seconds = torch.tensor([time.perf_counter() - begin, 1.0], dtype=torch.float64)
    *totals, seconds, num_ranks = sums(torch.cat([own.flatten(), seconds])).tolist()
    prefix = f"eval/{task.name}_"
    metrics = {f"{prefix}seconds": seconds / num_ranks}
    for name, total, squares in zip(task.numbers, totals[::2], totals[1::2]):
        if name == "timeouts":
            metrics[prefix + name] = total
            continue
        count = len(task.items)
        metrics[prefix + name] = total / count
        if count > 1:
            variance = max(squares - total**2 / count, 0.0) / (count - 1)
            metrics[f"{prefix}{name}_stderr"] = math.sqrt(variance / count)
    return metrics, records


def _judged_shard(task, model, encoder, options, *, agree, bar, stop):
    items = [item for _, item in task.shard]
    answers = _written(task, model, encoder, options, agree, bar)

    def judge(item, of_item):
        if stop():
            raise GaveUp
        return task.judged(item, of_item)

    return task.judge.map(judge, items, answers)


def _written(task, model, encoder, options, agree, bar):
    """Return [text of each sample] for each item of this rank."""
    items = []
    keys = []
    name = zlib.crc32(task.name.encode())
    for number, item in task.shard:
        for sample in range(options.samples):
            items.append(item)
            keys.append((options.seed, name, number, sample))
    # None: only on a terminal
    with tqdm(total=len(items), desc=task.name, disable=None if bar else True,
              leave=False, file=unguarded(sys.stderr)) as progress:
        texts = write_answers(model, encoder, items, keys, options, agree=agree,
                              on_written=progress.update)
    firsts = range(0, len(texts), options.samples)
    return [texts[first : first + options.samples] for first in firsts]
