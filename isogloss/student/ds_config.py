"""Read and check the DeepSpeed configuration, and fill its "auto" values.

DeepSpeed accepts unknown keys in silence, and drops "auto" inside zero_optimization in silence.
Here the first is an error before anything starts, and the second is filled.  ds_configs/README.md
lists what may be "auto".  Needs no torch.  Tests: tests/test_ds_config.py.
"""

import copy
import difflib
import os
from pathlib import Path
from typing import NamedTuple

from isogloss.doors import door
from isogloss.flags.json_text import parse_json
from isogloss.flags.parse import shipped
from isogloss.student.ds_values import (
    BATCH_KEYS,
    COMMENTS,
    DEFAULTS,
    check_values,
    problems_of,
)

# Keys that may change when a run resumes, because no gradient depends on them: where tensors are
# held and how they are reduced, and what is reported.
RESUMABLE_KEYS = """zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger
    csv_monitor tensorboard wandb comet log_level timers aio activation_checkpointing""".split()
# All top-level keys that DeepSpeed's configuration reader looks up.
DS_KEYS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer
    scheduler fp16 bf16 torch_autocast data_types gradient_clipping zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown
    memory_breakdown dump_state communication_data_type seq_parallel_communication_data_type
    sequence_parallel_size prescale_gradients gradient_predivide_factor gradient_allreduce_op
    disable_allgather disable_python_gc checkpoint activation_checkpointing flops_profiler
    comms_logger csv_monitor tensorboard wandb comet aio compile tensor_parallel log_level
    graph_harvesting use_data_before_expert_parallelism hybrid_engine pipeline sparse_gradients
    timers""".split()
MICRO_BATCH = 8  # that "auto" means where nothing says it, as in transformers
# Elements of a communication bucket; fewer would hold less than one small layer (not tuned).
MIN_BUCKET_ELEMENTS = 1 << 20


class BatchSizes(NamedTuple):
    """Sizes of which the first is the product of the others and the number of data-parallel ranks.

    train_batch_size: samples in an optimizer step, over all ranks.
    micro_batch_size: samples in one forward pass of one rank.
    grad_accum_steps: micro-batches of a rank in an optimizer step.
    """

    train_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int


def ready_made():
    """Say which configurations come with us."""
    names = sorted(file.name for file in Path(shipped("ds_configs")).glob("*.json"))
    return f"ready-made ones in ds_configs/: {', '.join(names)}"


def read_ds_config(path):
    """Read a ds_config and check its top-level keys.

    Returns:
        dict, as in the file, its comments left out.
    Raises:
        ValueError: no such file, not a JSON object, or keys that DeepSpeed would silently ignore,
            or that are not for distill.py; all of them are named.
    """
    if not Path(path).is_file():
        raise ValueError(f"--ds_config {path}: no such file; {ready_made()}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--ds_config {path}: not JSON ({error})") from None
    except OSError as error:
        raise ValueError(f"--ds_config {path}: cannot be read ({error.strerror})") from None
    config = parse_json(f"--ds_config {path}", text)
    if not isinstance(config, dict):
        raise ValueError(f"--ds_config {path}: expected a JSON object ({{...}}), got "
                         f"{type(config).__name__}; {ready_made()}")
    config = {key: value for key, value in config.items() if not key.startswith(COMMENTS)}
    problems = _unknown_keys(config) + problems_of(config)
    if problems:
        raise ValueError(f"--ds_config {path}: {'; '.join(problems)}")
    check_values(config, path)
    return config


def _unknown_keys(config):
    """Return [what to say of the top-level keys that DeepSpeed does not know], or []."""
    names = []
    for key in config:
        if key not in DS_KEYS:
            nearest = difflib.get_close_matches(key, DS_KEYS, 1)
            names.append(f"{key!r}" + (f" (did you mean {nearest[0]!r}?)" if nearest else ""))
    plural = "s" if len(names) > 1 else ""
    return [f"unknown key{plural} {', '.join(names)}"] if names else []


def resolve_ds_config(config, cfg, num_ranks, hidden_size, bf16, *, on_gpu=False):
    """Return the configuration that DeepSpeed will see: batch sizes checked, every "auto" filled.

    Args:
        config: dict of `read_ds_config`, left as it is.
        cfg: the flags ds_config, sequence_parallel, pipeline_parallel,
            wandb_project, learning_rate and steps.
        num_ranks: ranks of the student.
        hidden_size: of the student.
        bf16: whether the device computes in bfloat16.
        on_gpu: whether it is a GPU.
    Raises:
        ValueError: batch sizes or learning rates that contradict each other.
    """
    config = copy.deepcopy(config)
    num_data_parallel = num_ranks // cfg.ranks_per_reader
    sizes = batch_sizes(config, num_data_parallel, cfg.ds_config)
    # The engine does not know of sequence parallelism.  It counts each rank of a sequence group as
    # a data-parallel one, so its batch is larger by that factor.
    config["train_batch_size"] = sizes.train_batch_size * cfg.sequence_parallel
    config["train_micro_batch_size_per_gpu"] = sizes.micro_batch_size
    config["gradient_accumulation_steps"] = sizes.grad_accum_steps
    if cfg.wandb_project:
        config["wandb"] = config.get("wandb", {}) | {
            "enabled": True, "project": cfg.wandb_project}
    learning_rate = _resolve_learning_rate(config, cfg)
    if on_gpu or not config["optimizer"]["params"].get("torch_adam"):
        door("adam").choose_adam(config, on_gpu)
    has_fp16 = config.get("fp16", {}).get("enabled") is True
    auto_values = DEFAULTS | {
        "optimizer.params.lr": learning_rate,
        "scheduler.params.warmup_max_lr": learning_rate,
        **{f"scheduler.params.{key}": value for key, value in schedule_lengths(cfg).items()},
        "bf16.enabled": bf16 and not has_fp16,
        # The next three follow the Hugging Face Trainer, apart from the lower bound.
        "zero_optimization.reduce_bucket_size": max(hidden_size**2, MIN_BUCKET_ELEMENTS),
        "zero_optimization.stage3_prefetch_bucket_size": max(
            int(0.9 * hidden_size**2), MIN_BUCKET_ELEMENTS),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }
    _fill_auto(config, auto_values)
    return config


def schedule_lengths(cfg):
    """Return what fills "auto" in the schedule's params from --steps."""
    # 5 % of warm-up, customary (not tuned)
    return {"total_num_steps": cfg.steps, "warmup_num_steps": max(1, cfg.steps // 20)}


def _resolve_learning_rate(config, cfg):
    """Return the learning rate, which one place states; add an optimizer section if missing."""
    # PyTorch's AdamW, because DeepSpeed's own would compile a kernel on first use.
    default = {"type": "AdamW", "params": {"torch_adam": True}}
    optimizer = config.setdefault("optimizer", default)
    stated = optimizer.setdefault("params", {}).setdefault("lr", "auto")
    if stated != "auto" and cfg.learning_rate:
        raise ValueError(f"--learning_rate {cfg.learning_rate}: {cfg.ds_config} says lr {stated}; "
                         "drop one")
    if stated == "auto" and not cfg.learning_rate:
        raise ValueError(f'--learning_rate is missing: {cfg.ds_config} leaves "lr" to it')
    return cfg.learning_rate if stated == "auto" else stated


def _fill_auto(section, auto_values, prefix=""):
    """Replace every "auto" and `~` of a section, and of the sections inside it, in place."""
    for key, value in section.items():
        name = prefix + key
        if isinstance(value, dict):
            _fill_auto(value, auto_values, f"{name}.")
        elif value == "auto":
            section[key] = auto_values[name]
        elif isinstance(value, str) and value.startswith("~/"):  # DeepSpeed would make a folder `~`
            section[key] = os.path.expanduser(value)


def batch_sizes(config, num_ranks, path):
    """Fill in the batch sizes: any two keys give the third, and either of the first two is enough.

    Where one of these is "auto" and none a number, the second one is MICRO_BATCH.

    Args:
        config: dict of `read_ds_config`; a batch key may be "auto" or left out.
        num_ranks: data-parallel ranks of the student.
        path: of the ds_config, for errors.
    Returns:
        BatchSizes.
    Raises:
        ValueError: not a positive whole number, too few keys, or keys that contradict each other.
    """
    stated = []
    for key in BATCH_KEYS:
        value = config.get(key)
        if value == "auto":
            value = None
        # type() rather than isinstance: in Python True is an int.
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"--ds_config {path}: {key} is {value!r}, expected a whole number of "
                             "1 or more")
        stated.append(value)
    total, micro, steps = stated
    if total is None and micro is None:
        if "auto" in (config.get(key) for key in BATCH_KEYS[:2]):
            micro = MICRO_BATCH
        else:
            raise ValueError(f"--ds_config {path}: has neither train_batch_size nor "
                             "train_micro_batch_size_per_gpu; give one of them")
    if total is None:
        return BatchSizes(micro * (steps or 1) * num_ranks, micro, steps or 1)

    # What the total has to be a multiple of; where all three are given, it has to be equal.
    known = num_ranks * (micro or 1) * (steps or 1)
    if total % known or (micro and steps and total != known):
        raise ValueError(f"--ds_config {path}: train_batch_size {total} is not {num_ranks} ranks x "
                         f"micro batch {micro or 'any'} x {steps or 'any'} accumulation steps; "
                         "change one of these")
    if micro is None:
        return BatchSizes(total, total // known, steps or 1)
    return BatchSizes(total, micro, steps or total // known)
