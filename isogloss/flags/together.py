"""Say which flags go together: one needs another, or does not go with it.

Tests: tests/test_config.py.
"""

from isogloss.flags.parse import groups_of

# (flag, those of which it needs one, why and what to do)
NEEDS = [
    ("completion_key", ["prompt_key"],
     "what follows a prompt; name the column of prompts with --prompt_key"),
    ("prompt_key", ["on_policy", "completion_key"],
     "names prompts of what the student writes, or of completions; add --on_policy or "
     "--completion_key"),
    ("activation_offload", ["activation_checkpointing"],
     "moves what --activation_checkpointing keeps; add --activation_checkpointing"),
    ("merge", ["export"], "says what --export writes; add --export"),
    *[(name, ["lora_r"], "is for the adapter of --lora_r, which is 0; add it, or leave this out")
      for name in ("lora_alpha", "lora_targets", "lora_embeddings", "merge", "quantize")],
    ("freeze_until", ["train_only"],
     "says how long --train_only holds; add --train_only embeddings"),
]
# (flag, one that does not go with it, why and what to do)
EXCLUDES = [
    ("completion_key", "text_key", ": both name what is learned; drop one"),
    ("epochs", "streaming", ": the end of a stream is not known; give --steps"),
    ("join_rows", "on_policy",
     ", which writes from the beginning of one row; leave out one of them"),
    ("join_rows", "prompt_key", ", whose rows are one prompt each; leave out one of them"),
    ("join_rows", "route_key", ", which chooses teachers for one row; leave out one of them"),
    ("join_rows", "teacher_cache", ", which holds what is said of one row; leave out one of them"),
    ("lora_r", "from_scratch", ", whose frozen weights would be random; leave out one of them"),
    ("lora_r", "pipeline_parallel",
     ", which cuts a model without adapters; use ZeRO-3, or leave out one of them"),
    ("train_only", "from_scratch", ", whose frozen weights would be random; leave out one of them"),
    ("train_only", "pipeline_parallel",
     ", whose stages are trained alike; use ZeRO-3, or leave out one of them"),
    ("quantize", "writer", ", which reads whole weights; leave out one of them"),
    ("freeze_router", "router_weight", ", which trains it; leave out one of them"),
    *[(name, "pipeline_parallel", ", whose stages know their own layers alone; leave out one of "
       "them") for name in ("freeze_router", "router_weight")],
    ("dump_losses", "sequence_parallel", ", whose ranks hold parts of rows; leave out one of them"),
    ("pipeline_parallel", "sequence_parallel", ": these do not go together; leave out one of them"),
    ("writer", "pipeline_parallel", ", whose stages share no weights; use ZeRO-3, or let the "
     "student itself write"),
]

# Flags of the group on-policy that others read, too, and what those are.
SHARED = {
    "prompt_tokens": ["on_policy", "eval_samples"],
    "rollout_tokens": ["on_policy", "eval_samples"],
    "rollout_batch": ["on_policy", "eval_samples"],
    "rollout_replica": ["on_policy", "eval_samples", "eval_tasks"],
}


def check_together(cfg):
    """Raise a ValueError for flags that `NEEDS` or `EXCLUDES` does not let stand as they are."""
    _check_needs(cfg, NEEDS)
    for name, other, reason in EXCLUDES:
        if is_set(cfg, name) and is_set(cfg, other):
            raise ValueError(f"{shown(cfg, name)} with {shown(cfg, other)}{reason}")


def check_idle(cfg):
    """Raise a ValueError for a flag of a command line without which the run would be the same.

    What depends on the losses and the teachers is in `Config.check_run`.
    """
    groups = groups_of(type(cfg))
    idle = [
        ("teacher_weights", ["teachers"], "is for several teachers; list them with --teachers"),
        ("max_ratio", ["rollout_every", "writer"],
         "weighs rollouts of earlier steps, and each step has its own; add --rollout_every"),
    ]
    for name in groups["on-policy"]:
        if name not in ("on_policy", "prompt_key"):
            idle.append((name, SHARED.get(name, ["on_policy"]),
                         "is for what the student writes; add --on_policy"))
    for name in ("rollout_batch", "rollout_replica"):
        readers = [other for other in SHARED[name] if other != "on_policy" and is_set(cfg, other)]
        if cfg.writer_command and is_set(cfg, name) and not readers:
            raise ValueError(f"{shown(cfg, name)}: is for a student that writes itself, and "
                             f"{cfg.writer_command} writes; leave it out")
    for name in groups["evaluation tasks"]:
        idle.append((name, ["eval_tasks"], "is for --eval_tasks, which names none; add it"))
    _check_needs(cfg, idle)
    for name in ("eval_samples", "eval_every", "eval_draft"):
        if is_set(cfg, name) and not (cfg.holds_out or "eval_rows" in cfg.given):
            raise ValueError(f"{shown(cfg, name)}: is for held-out rows, and there are none; add "
                             "--eval_rows")


def _check_needs(cfg, needs):
    for name, others, reason in needs:
        # one that is written with its default switches off what the others are for
        has_any = any(is_set(cfg, other) or other in cfg.given for other in others)
        if is_set(cfg, name) and not has_any:
            raise ValueError(f"{shown(cfg, name)}: {reason}")


def is_set(cfg, name):
    """Tell whether a flag has another value than most."""
    return getattr(cfg, name) != getattr(type(cfg), name)


def shown(cfg, name):
    """Return a flag as on a command line."""
    value = getattr(cfg, name)
    if value is True:
        return f"--{name}"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
