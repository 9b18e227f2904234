"""Check the values of a ds_config: their kinds, and keys that would change the gradient.

DeepSpeed takes any text for true, and obeys or ignores some keys to the run's harm.  Needs no
torch.  Tests: tests/test_ds_config.py, tests/test_wrong_flags.py.
"""

import math

# In the order of the fields of `ds_config.BatchSizes`.
BATCH_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
SECTIONS = set("""optimizer scheduler fp16 bf16 torch_autocast data_types zero_optimization
    activation_checkpointing flops_profiler comms_logger csv_monitor tensorboard wandb comet aio
    compile checkpoint timers""".split())
SWITCHES = set("""zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown
    memory_breakdown dump_state prescale_gradients disable_allgather disable_python_gc
    use_data_before_expert_parallelism""".split())
# Keys of the sections of which DeepSpeed ignores those that it does not know.
KEYS_OF_SECTION = {
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
    "torch_autocast": {"enabled", "dtype", "lower_precision_safe_modules"},
    "data_types": {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"},
    "activation_checkpointing": {
        "partition_activations", "number_checkpoints", "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary", "profile", "cpu_checkpointing"},
    "aio": {"block_size", "queue_depth", "intra_op_parallelism", "single_submit",
            "overlap_events", "use_gds"},
}

# Keys that break the promise that the gradient depends on the data alone, or that this script
# cannot keep, and what to do instead.  ds_configs/README.md lists them.
REFUSED = {
    "checkpoint": "distill.py writes its checkpoints itself; leave it out",
    "hybrid_engine": "the student generates by other means; leave it out",
    "pipeline": "the student is not cut into stages; leave it out",
    "sequence_parallel_size": "use --sequence_parallel",
    "tensor_parallel": "the student is not cut by tensor; use ZeRO 3",
    "sparse_gradients": "DeepSpeed no longer has it; leave it out",
    "graph_harvesting": "DeepSpeed no longer has it; leave it out",
    "zero_optimization.zero_quantized_gradients": "it rounds gradients to a few bits; leave it out",
    "zero_optimization.zero_quantized_weights": "it rounds weights to a few bits; leave it out",
    "zero_optimization.zero_quantized_nontrainable_weights":
        "it rounds weights to a few bits; leave it out",
    "zero_optimization.zenflow": "it applies parts of the gradient steps later; leave it out",
    "zero_optimization.legacy_stage1": "DeepSpeed no longer has it; leave it out",
    "compile.deepcompile": "distill.py does not compile the engine; leave it out",
}
# The largest value of a number: beyond it training fails, or no memory suffices.
HIGHEST = {
    **dict.fromkeys(("optimizer.params.lr", "optimizer.params.weight_decay"), 1e3),
    **{f"scheduler.params.{name}": 1e3 for name in (
        "warmup_max_lr", "warmup_min_lr", "cycle_max_lr", "cycle_min_lr", "lr_range_test_min_lr")},
    **{f"zero_optimization.{name}": 2**34 for name in (
        "reduce_bucket_size", "allgather_bucket_size")},
}
# Keys of which one value alone gives the gradient of the whole batch, clipped as it says.
ONLY_VALUE = {
    "gradient_allreduce_op": ("mean", "gradients would grow with the number of ranks"),
    "zero_optimization.compute_grad_norm": (True, "gradients could not be clipped, nor checked"),
    "bf16.check_grad_overflow": (True, "a gradient that is not finite would be applied"),
}
# What transformers' TrainingArguments and accelerate (5.23, 1.15) fill in place of "auto".
DEFAULTS = {
    "gradient_clipping": 1.0,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "fp16.enabled": False,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
# The other keys that may be "auto", beside the batch sizes.
FILLED = ("optimizer.params.lr", "scheduler.params.warmup_max_lr",
          "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps", "bf16.enabled",
          "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
          "zero_optimization.stage3_param_persistence_threshold")
COMMENTS = "_", "//"  # how keys of a file begin that say something to people alone


def problems_of(config):
    """List what to say of the keys of a ds_config that are not for distill.py."""
    problems = []
    for name, advice in REFUSED.items():
        value = _value_of(config, name)
        if value is not None and value is not False:
            problems.append(f"{name} is not for distill.py: {advice}")
    unfilled = [name for name in _autos(config) if name not in (*DEFAULTS, *FILLED)]
    if unfilled:
        problems.append(f'{", ".join(unfilled)} {"is" if len(unfilled) == 1 else "are"} "auto", '
                        f"which is filled only in {', '.join((*FILLED, *DEFAULTS))} and the batch "
                        "sizes; write a value")
    return problems


def _autos(section, prefix=""):
    """List the dotted names of what is "auto" in a section, batch sizes apart."""
    names = []
    for key, value in section.items():
        if isinstance(value, dict):
            names += _autos(value, f"{prefix}{key}.")
        elif value == "auto" and prefix + key not in BATCH_KEYS:
            names.append(prefix + key)
    return names


def check_values(config, path):
    """Check the kind of every value of a ds_config, "auto" aside.

    Raises:
        ValueError: a value of the wrong kind, or one with which gradients would be others.
    """
    _check_numbers(config, path, "")
    for key, value in config.items():
        if key in SECTIONS and not isinstance(value, dict):
            raise ValueError(f"--ds_config {path}: {key} is {value!r}, expected an object "
                             "({...}); see ds_configs/zero2.json")
        if key in SWITCHES and not isinstance(value, bool):
            raise ValueError(f"--ds_config {path}: {key} is {value!r}, expected true or false")
    for section in ("optimizer", "scheduler"):
        params = config.get(section, {}).get("params", {})
        if not isinstance(params, dict):
            raise ValueError(f"--ds_config {path}: {section}.params is {params!r}, expected an "
                             "object ({...})")
    for section, known in KEYS_OF_SECTION.items():
        for key in config.get(section, {}):
            if key not in known:
                raise ValueError(f"--ds_config {path}: unknown key {section}.{key}; expected "
                                 f"{', '.join(sorted(known))}")
    for section in SECTIONS:  # DeepSpeed would take any value for true
        enabled = config.get(section, {}).get("enabled", True)
        if not isinstance(enabled, bool) and enabled != "auto":
            raise ValueError(f"--ds_config {path}: {section}.enabled is {enabled!r}, expected "
                             "true or false")
    _check_number(config, "gradient_clipping", path, low=0)
    _check_number(config, "gradient_predivide_factor", path, low=1e-6)
    _check_number(config, "steps_per_print", path, low=1)
    for name, high in HIGHEST.items():
        value = _value_of(config, name)
        if isinstance(value, (int, float)) and value > high:
            raise ValueError(f"--ds_config {path}: {name} is {value}, expected {high} or less")
    for name, (expected, reason) in ONLY_VALUE.items():
        value = _value_of(config, name)
        if value is not None and value != expected:
            raise ValueError(f"--ds_config {path}: {name} is {value!r}, expected {expected!r}: "
                             f"else {reason}")


def _check_numbers(value, path, name):
    """Refuse, at any depth, numbers and truth values that are written as text, and infinities."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, path, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, path, name)
    elif isinstance(value, str) and _is_number_or_truth(value):
        raise ValueError(f"--ds_config {path}: {name} is the text {value!r}; write it without "
                         "quotes")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"--ds_config {path}: {name} is {value}, expected a finite number")


def _is_number_or_truth(text):
    if text.strip().lower() in ("true", "false"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_number(config, key, path, low):
    value = config.get(key, low)
    if value == "auto":
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value < low:
        raise ValueError(f"--ds_config {path}: {key} is {value!r}, expected a number of {low} or "
                         "more")


def _value_of(config, name):
    """Return the value of a dotted name; None where it is absent."""
    value = config
    for key in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
