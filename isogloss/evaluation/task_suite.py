"""Judge a model by tasks of lm-evaluation-harness: what --eval_tasks names.

Tests: tests/test_task_suite.py.
"""

import difflib
import random
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from isogloss.data.ends import stop_ids
from isogloss.evaluation import harness
from isogloss.evaluation.task_model import GaveUp, TaskEncoder, evaluation_mode
from isogloss.flags.parse import read_options
from isogloss.flags.task_options import TaskOptions
from isogloss.student.whole_student import lend


@dataclass
class TaskSuite:
    """Hold tasks that are ready to run.

    Attributes:
        tasks: HarnessTasks.
        encoder: TaskEncoder of the model.
        options: TaskOptions.
        rank, size: this rank and how many there are.
    """

    tasks: list
    encoder: TaskEncoder
    options: TaskOptions
    rank: int = 0
    size: int = 1

    @property
    def writes(self):
        return any(task.writes for task in self.tasks)

    def run(self, model, agree=bool, stop=lambda: False):
        """Return (metrics, records of this rank's items); all ranks take part.

        The model's mode, its gradients and all random states stay as they are.

        Args:
            model: causal language model of transformers.
            agree: (this rank has work) -> it has to run the model; see `rollout.write`.
            stop: () -> this rank is to give up.  If any rank does, metrics and records are empty.
        """

        def goes_on(has_work):
            if agree(stop()):  # where passes need all ranks, all of them leave at the same one
                raise GaveUp
            return agree(has_work)

        metrics = {}
        records = []
        answers = harness.TaskAnswers(
            model, self.encoder, self.options, self.rank, self.size, goes_on, stop)
        for task in self.tasks:
            of_task, of_items = self._run_harness_task(task, answers)
            if not of_task:
                return {}, []
            metrics |= of_task
            records += of_items
        return metrics, records

    def _run_harness_task(self, task, answers):
        with suppress(GaveUp), evaluation_mode(answers.model), random_states_restored():
            begin = time.perf_counter()
            try:
                of_task, records = harness.run_harness_task(task, answers)
            except ValueError as error:
                raise ValueError(f"{task.name}: {error}") from None
            metrics = {f"eval/{name}": value for name, value in of_task.items()}
            metrics[f"eval/{task.name}_seconds"] = time.perf_counter() - begin
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
        ValueError: an unknown name, or one twice; see `load_harness_task`.
    """
    if options.data and not Path(options.data).is_dir():
        raise ValueError(f"the data folder {options.data} does not exist; expected a folder with "
                         "files of the tasks, or none for the hub")
    known = list(harness.NAMES)
    for number, name in enumerate(names):
        if name not in known and not name.startswith(harness.PREFIX):
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else (
                f"expected {', '.join(known)}, or {harness.PREFIX}NAME")
            raise ValueError(f"unknown task {name!r}; {hint}")
        if name in names[:number]:
            raise ValueError(f"task {name} is named twice; name it once")
    tasks = []
    for name in names:
        with random_states_restored():
            tasks.append(harness.load_harness_task(name, options))
    return TaskSuite(tasks, encoder, options, rank, size)


def load_student_tasks(cfg, student, config):
    """Return the TaskSuite of --eval_tasks.

    Args:
        student: TextEncoder; config: of the student.
    """
    try:
        options = TaskOptions(
            **read_options(cfg, "eval_task_options"), seed=cfg.seed,
            trust_remote_code=cfg.trust_remote_code)
        encoder = TaskEncoder(student.tokenizer, config, stop_ids(student))
        return load_suite(cfg.eval_tasks.split(","), options, encoder, rank=dist.get_rank(),
                          size=dist.get_world_size())
    except ValueError as error:
        raise ValueError(f"--eval_tasks {cfg.eval_tasks}: {error}") from None


def prepare(state, inputs, stack):
    lend(state, state.tasks.writes)
