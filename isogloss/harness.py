"""Run tasks of lm-evaluation-harness on the student, as `--eval_tasks lm_eval:NAME`.

The harness makes the requests and judges the answers.  The answers come from task_model.py, as for
tasks of our own: each rank answers its share, and every rank's harness sees all of them.

lm_eval is optional and imported when it is asked for.  Tests: tests/test_harness.py.
"""

import logging
from dataclasses import dataclass

PREFIX = "lm_eval:"
INSTALL = "pip install lm_eval==0.4.13"


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
                             "writes inside of this job; expected humaneval_plus or mbpp_plus, "
                             "which run it in a sandbox")
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
    return HarnessTask(name, loaded, limit)


def run_harness_task(task, answer):
    """Return (metrics, records) of a HarnessTask, equal on every rank.

    Args:
        task: HarnessTask.
        answer: object with the methods `loglikelihoods`, `rolling` and `texts` of
            `task_model.Answers`.
    """
    from lm_eval.evaluator import evaluate

    results = evaluate(_language_model(answer), task.loaded, limit=task.limit or None,
                       bootstrap_iters=0)
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


def _language_model(answer):
    """Return what the harness takes for a model."""
    from lm_eval.api.model import LM

    class Model(LM):
        """Pass the harness' requests on."""

        def loglikelihood(self, requests):
            return answer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests):
            return answer.rolling([request.args[0] for request in requests])

        def generate_until(self, requests):
            prompts = []
            for request in requests:
                prompt, options = request.args
                stops = options.get("until", [])
                stops = [stops] if isinstance(stops, str) else list(stops)
                prompts.append((prompt, stops, options.get("max_gen_toks", 256)))
            return answer.texts(prompts)

    return Model()
