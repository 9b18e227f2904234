"""Judge a model by tasks of our own and of lm-evaluation-harness: what --eval_tasks names.

Tests: tests/test_task_suite.py.
"""

import random
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch

from isogloss.evaluation.harness import (
    PREFIX,
    Answers,
    HarnessTask,
    load_harness_task,
    run_harness_task,
)
from isogloss.evaluation.task_model import GaveUp, TaskEncoder, evaluation_mode
from isogloss.evaluation.tasks import TaskOptions, load_tasks, run_tasks


@dataclass
class TaskSuite:
    """Hold tasks that are ready to run.

    Attributes:
        tasks: of `tasks.load_tasks`, with this rank's items.
        harness_tasks: HarnessTasks.
        encoder: TaskEncoder of the model.
        options: TaskOptions.
        rank, size: this rank and how many there are.
    """

    tasks: list
    harness_tasks: list
    encoder: TaskEncoder
    options: TaskOptions
    rank: int = 0
    size: int = 1

    @property
    def writes(self):
        """Whether the model has to write answers."""
        return any(not task.is_scored for task in self.tasks) or any(
            task.writes for task in self.harness_tasks)

    def run(self, model, sums, agree=bool, stop=lambda: False):
        """Return (metrics, records of this rank's items); all ranks take part.

        The model's mode, its gradients and all random states stay as they are.

        Args:
            model: causal language model of transformers.
            sums: (n,) numbers -> their sums over all ranks.
            agree: (this rank has work) -> it has to run the model; see `rollout.write`.
            stop: () -> this rank is to give up.  If any rank does, metrics and records are empty.
        """

        def goes_on(has_work):
            if agree(stop()):  # where passes need all ranks, all of them leave at the same one
                raise GaveUp
            return agree(has_work)

        metrics = {}
        records = []
        answers = Answers(model, self.encoder, self.options, self.rank, self.size, goes_on)
        for task in [*self.tasks, *self.harness_tasks]:
            if isinstance(task, HarnessTask):
                of_task, of_items = self._run_harness_task(task, answers)
            else:
                of_task, of_items = run_tasks([task], model, self.encoder, self.options, goes_on,
                                              sums, self.rank == 0, stop)
            if not of_task:
                return {}, []
            metrics |= of_task
            records += of_items
        return metrics, records

    def _run_harness_task(self, task, answers):
        with suppress(GaveUp), evaluation_mode(answers.model), random_states_restored():
            begin = time.perf_counter()
            of_task, records = run_harness_task(task, answers)
            metrics = {f"eval/{name}": value for name, value in of_task.items()}
            metrics[f"eval/{PREFIX}{task.name}_seconds"] = time.perf_counter() - begin
            return metrics, records if self.rank == 0 else []  # every rank has the same ones
        return {}, []


@contextmanager
def random_states_restored():
    """Give torch, numpy and Python their random states back in the end."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def load_suite(names, options, encoder, rank=0, size=1):
    """Return the TaskSuite of some names.

    Args:
        names: of tasks; those of lm-evaluation-harness begin with "lm_eval:".
        options: TaskOptions.
        encoder: TaskEncoder of the model.
        rank, size: item i belongs to rank i mod size.
    Raises:
        ValueError: see `tasks.load_tasks` and `harness.load_harness_task`.
    """
    of_harness = [name for name in names if name.startswith(PREFIX)]
    own = [name for name in names if not name.startswith(PREFIX)]
    tasks = load_tasks(own, options, encoder, rank, size) if own else []
    harness_tasks = []
    for name in of_harness:
        with random_states_restored():
            harness_tasks.append(load_harness_task(
                name.removeprefix(PREFIX), options.data, options.shots or None, options.limit))
    return TaskSuite(tasks, harness_tasks, encoder, options, rank, size)
