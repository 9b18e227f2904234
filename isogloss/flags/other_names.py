"""Say where flags of our earlier versions are now; unknown.py answers those of other trainers.

Tests: tests/test_flags.py.
"""

import json

# Flags of earlier versions that left, and the value that is always meant now.
LEFT = {"alm_mode": "binary_kl", "head_gradient": "micro_batch", "normalize_by_vocab": False,
        "projection_columns": "all", "ratio": "clamp", "teacher_alpha": 1.0, "token_entropy": 0.5,
        "teacher_connections": 8, "max_logp_gap": 0.1, "rollout_timeout": 800.0}


def _option(flag, option, default):
    """Return (default, where it is now) of a flag that has become an option."""
    return default, f"--{flag} '{json.dumps({option: default})}'"


def _of_source(name, default):
    """Return the same of one that only an entry of --data says."""
    return default, f"--data '{json.dumps([{'data': 'NAME', name: default}])}'"


# Those that are elsewhere now: {name: (its default, where)}.
MOVED = {
    "jsd_beta": _option("loss_options", "beta", 0.5),
    "skew_lambda": _option("loss_options", "skew", 0.1),
    "akl_alpha": _option("loss_options", "alpha", 0.5),
    "loss_topk_of": _option("loss_options", "topk_of", "teacher"),
    "reverse_kl": _option("loss_options", "reverse", False),
    "chunk_average": _option("loss_options", "chunk_average", "p"),
    "uncommon_topk": _option("loss_options", "uncommon_topk", 8192),
    "matched_weight": _option("loss_options", "matched_weight", -1.0),
    "projection_topk": _option("loss_options", "projection_topk", 8192),
    "learn_projection": _option("loss_options", "learn_projection", False),
    "projection_learning_rate": _option("loss_options", "projection_learning_rate", 0.0),
    "eval_task_data": _option("eval_task_options", "data", ""),
    "eval_task_shots": _option("eval_task_options", "shots", -1),
    "eval_task_limit": _option("eval_task_options", "limit", 0),
    "eval_task_batch": _option("eval_task_options", "batch_size", 16),
    "eval_task_samples": _option("eval_task_options", "samples", 1),
    "eval_task_temperature": _option("eval_task_options", "temperature", 0.0),
    "allow_unsafe_code": _option("eval_task_options", "allow_unsafe_code", False),
    "tools_key": _of_source("tools_key", "tools"),
    "weight_key": _of_source("weight_key", ""),
    "drop_images": _of_source("drop_images", False),
    "txt_samples": _of_source("txt_samples", "line"),
    "token_half_life": (256.0, "--token_weights early:256"),
    "rollout_command": ("", "--writer COMMAND"),
    "log_comms": (False, '"comms_logger": {"enabled": true} of the ds_config'),
}
DEFAULTS_OF_BEFORE = LEFT | {name: default for name, (default, _) in MOVED.items()}


def settled_token_weights(cfg, usual):
    """Return --token_weights, in the one form of what it means; a run has one identity.

    Args:
        usual: half-life that the word early alone means, in learned tokens.
    Raises:
        ValueError: it means nothing, or a column that no entry of data names.
    """
    if cfg.token_weights == "column":
        if not cfg.has_weights:
            raise ValueError("--token_weights column: of which column? name it as weight_key of an "
                             f"entry of data: {MOVED['weight_key'][1]}")
        return cfg.token_weights
    kind, _, number = cfg.token_weights.partition(":")
    try:
        half_life = float(number)
    except ValueError:
        half_life = 0.0
    if kind != "early" or not 0.1 <= half_life <= 1e9:
        raise ValueError(f"--token_weights {cfg.token_weights}: expected early, early:N (the "
                         "learned tokens after which a weight is half as large, 0.1 to 1e9) or "
                         "column")
    return "early" if half_life == usual else f"early:{half_life:.15g}"
