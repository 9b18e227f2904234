"""Evaluate a language model on tasks: MMLU, LAMBADA, GSM8K, HumanEval+, MBPP+.

    python -m isogloss.tasks --model DIR --tasks mmlu,lambada [--data DIR] [--shots 5]
    torchrun --nproc_per_node 4 -m isogloss.tasks --model DIR --tasks gsm8k

docs/evaluate.md says what the tasks are.

Tests: tests/test_tasks.py.
"""

import json
import os
from pathlib import Path

from isogloss.command import tool

if __name__ == "__main__":  # flags come before torch is imported
    raise SystemExit(tool("tasks"))

import torch
import torch.distributed as dist

from isogloss.data.ends import load_generation, stop_ids
from isogloss.data.sample import TextEncoder
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.task_suite import load_suite
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models.pretrained import load_config, load_model
from isogloss.projection_tools.tokenizers import load_tokenizer
from isogloss.rollout import needs_equal_lengths


def check_finite(path, model):
    """Raise a ValueError where a weight of a model is not finite."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.element_size() > 1:  # not those of 8 bits
            if not torch.isfinite(weight).all():
                raise ValueError(f"--model {path}: {name} holds values that are not finite; "
                                 "expected a model that was trained")


def write_records(path, records):
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror}); the table "
                         "above is whole") from None


def number(value):
    """Return four decimals, of what is large no more digits than float32 has; of None nothing."""
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.6g}"


def markdown_table(rows):
    """Return rows of strings as an aligned Markdown table; the first row is the head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_markdown(names, metrics):
    """Return a table of the metrics of tasks: task, metric, value, standard error, seconds."""
    rows = [["task", "metric", "value", "stderr", "seconds"]]
    for key, value in metrics.items():
        name = max((name for name in names if key.startswith(f"eval/{name}_")), key=len)
        metric = key.removeprefix(f"eval/{name}_")
        if "_stderr" in metric or metric == "seconds":
            continue
        seconds = f"{metrics[f'eval/{name}_seconds']:.1f}"
        rows.append([name, metric, number(value), number(metrics.get(f"{key}_stderr")), seconds])
    return markdown_table(rows)


def log_tasks(state, step, log, stop):
    """Judge the student by --eval_tasks, and log what comes out; tell whether anything did.

    Args:
        stop: () -> this rank has been asked to end; then nothing is logged.
    """
    log.flush()
    with state.whole_student.model() as (model, agree):
        metrics, records = state.tasks.run(model, agree, stop)
    if metrics:
        log.write(step, metrics)
        table = as_markdown([task.name for task in state.tasks.tasks], metrics)
        log.say(step, "tasks", table.splitlines())
        of_ranks = values_of_ranks(records)
        records = [record for of_rank in of_ranks for record in of_rank]
        log.write_records("eval_tasks", step, records)
    return bool(metrics)


def _start_ranks():
    """Join the ranks that torchrun has started; returns (rank, ranks, device)."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0)) if size > 1 else 0
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, size, device


def writes_equal_lengths(name, model, encoder):
    """Return whether a model's answers need prompts of equal lengths in a batch."""
    try:
        return needs_equal_lengths(model, encoder.vocab)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}; choose tasks without written answers") from None


def main(args):
    """Evaluate a model on tasks, print a table and write the records."""
    rank, size, device = _start_ranks()
    tokenizer, table = load_tokenizer("model", args.model, args.trust_remote_code)
    config = load_config("model", args.model, args.trust_remote_code)
    generation = load_generation("model", args.model, config, tokenizer)
    writer = TextEncoder(tokenizer, table, max_length=0, generation=generation)
    encoder = TaskEncoder(tokenizer, config, stop_ids(writer))
    names = args.tasks.split(",")
    suite = load_suite(names, args, encoder, rank, size)
    model = load_model("model", args.model, args.trust_remote_code, dtype=args.dtype).to(device)
    check_finite(args.model, model)
    if suite.writes:
        encoder.equal_lengths = writes_equal_lengths(args.model, model, encoder)
    metrics, records = suite.run(model)
    records = [record for of_rank in values_of_ranks(records) for record in of_rank]
    if rank == 0:
        print(as_markdown(names, metrics))
        if args.output:
            write_records(args.output, records)
    if size > 1:
        dist.destroy_process_group()
