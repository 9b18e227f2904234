"""The DeepSpeed configuration: read it, check it, fill its "auto" values.

DeepSpeed accepts unknown keys in silence and drops "auto" inside zero_optimization; here both are errors
or are resolved, before anything starts.  What may be "auto" is listed in ds_configs/README.md.
"""

import difflib
import json
from pathlib import Path

BATCH_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# what may be another when a run goes on: where things are held, and what is reported
FREE_KEYS = """zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
    wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger csv_monitor tensorboard wandb
    comet log_level timers aio activation_checkpointing""".split()
DS_KEYS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer
    scheduler fp16 bf16 torch_autocast data_types gradient_clipping zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown
    memory_breakdown dump_state communication_data_type seq_parallel_communication_data_type
    sequence_parallel_size prescale_gradients gradient_predivide_factor gradient_allreduce_op
    disable_allgather disable_python_gc checkpoint activation_checkpointing flops_profiler comms_logger
    csv_monitor tensorboard wandb comet aio compile tensor_parallel log_level graph_harvesting
    use_data_before_expert_parallelism hybrid_engine pipeline sparse_gradients timers""".split()


def read_ds_config(path):
    """The ds_config as a dict.

    Raises:
        ValueError: missing, not JSON, or with a key that DeepSpeed would silently ignore.
    """
    if not Path(path).is_file():
        raise ValueError(f"--ds_config {path}: no such file; ready-made ones are in ds_configs/")
    try:
        config = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--ds_config {path}: not JSON ({error})") from None
    for key in config if isinstance(config, dict) else ["(not an object)"]:
        if key not in DS_KEYS:
            near = difflib.get_close_matches(key, DS_KEYS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"--ds_config {path}: unknown key {key!r}{hint}")
    return config


def resolve_ds_config(config, cfg, ranks, hidden_size, bf16):
    """Fill every "auto" and check the batch sizes; the values that DeepSpeed will see.

    Args:
        config: of `read_ds_config`; hidden_size: the student's; bf16: whether the device computes in it.
    """
    config = json.loads(json.dumps(config))
    total, micro, steps = batch_sizes(config, ranks // cfg.sequence_parallel, cfg.ds_config)
    # to the engine every rank is a rank of its own, also where several hold the parts of a sequence
    config |= dict(zip(BATCH_KEYS, (total * cfg.sequence_parallel, micro, steps)))
    if cfg.log_comms:
        config["comms_logger"] = config.get("comms_logger", {}) | {"enabled": True}
    optimizer = config.setdefault("optimizer", {"type": "AdamW", "params": {"torch_adam": True}})
    optimizer.setdefault("params", {}).setdefault("lr", "auto")
    stated = optimizer["params"]["lr"]
    if stated != "auto" and cfg.learning_rate:
        raise ValueError(f"--learning_rate {cfg.learning_rate}: {cfg.ds_config} says lr {stated}; drop one")
    if stated == "auto" and not cfg.learning_rate:
        raise ValueError(f'--learning_rate is missing: {cfg.ds_config} leaves "lr" to it')
    lr = cfg.learning_rate if stated == "auto" else stated
    values = {
        "optimizer.params.lr": lr, "scheduler.params.warmup_max_lr": lr,
        "scheduler.params.total_num_steps": cfg.steps,
        "scheduler.params.warmup_num_steps": max(1, cfg.steps // 20),
        "bf16.enabled": bf16,
        # as in the Hugging Face Trainer, but never so small that a bucket holds less than a small layer
        "zero_optimization.reduce_bucket_size": max(hidden_size**2, 1 << 20),
        "zero_optimization.stage3_prefetch_bucket_size": max(int(0.9 * hidden_size**2), 1 << 20),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }
    _fill_auto(config, values, cfg.ds_config)
    return config


def _fill_auto(config, values, path, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            _fill_auto(value, values, path, f"{prefix}{key}.")
        elif value == "auto":
            if prefix + key not in values:
                raise ValueError(f'--ds_config {path}: {prefix}{key} is "auto", which is filled only in '
                                 f"{', '.join(values)} and the batch sizes; write a value")
            config[key] = values[prefix + key]


def batch_sizes(config, ranks, path):
    """(samples a step, a micro-batch, micro-steps): any two give the third, one alone is enough."""
    total, micro, steps = (None if config.get(key) == "auto" else config.get(key) for key in BATCH_KEYS)
    for key, value in zip(BATCH_KEYS, (total, micro, steps)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"--ds_config {path}: {key} is {value!r}, expected a whole number of 1 or more")
    if total is None and micro is None:
        raise ValueError(f"--ds_config {path}: give train_batch_size or train_micro_batch_size_per_gpu")
    if total is None:
        return micro * (steps or 1) * ranks, micro, steps or 1
    known = ranks * (micro or 1) * (steps or 1)
    if total % known or (micro and steps and total != known):
        raise ValueError(
            f"--ds_config {path}: train_batch_size {total} is not {ranks} ranks x micro batch "
            f"{micro or 'any'} x {steps or 'any'} accumulation steps; change one of these")
    if micro is None:
        return total, total // known, steps or 1
    return total, micro, steps or total // known
