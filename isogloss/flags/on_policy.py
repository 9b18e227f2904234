"""Check the flags of what the student writes (--on_policy).

Tests: tests/test_config.py, tests/test_wrong_flags.py.
"""


def check_on_policy(cfg):
    """Raise a ValueError for flags of --on_policy that do not go together."""
    if not cfg.writer.strip():
        raise ValueError("--writer: is empty; expected student, vllm or a command")
    if not 0 < cfg.rollout_top_p <= 1:
        raise ValueError(f"--rollout_top_p {cfg.rollout_top_p}: expected more than 0, at most 1")
    if not cfg.on_policy:
        return
    if not cfg.kd_weight:
        raise ValueError(f"--on_policy {cfg.on_policy} with --kd_weight 0: what the student "
                         "writes is learned from teachers alone; raise --kd_weight")
    writes_ahead = cfg.writer_command and cfg.staleness
    if cfg.rollout_top_p < 1 and (cfg.rollout_every > 1 or writes_ahead):
        reason = (f"--rollout_every {cfg.rollout_every}" if cfg.rollout_every > 1
                  else f"--staleness {cfg.staleness}")
        raise ValueError(f"--rollout_top_p {cfg.rollout_top_p} with {reason}: no ratio makes "
                         "up for texts that older weights would never have written; leave it "
                         "out, or use rollouts at once (--rollout_every 1, and beside another "
                         "process --staleness 0)")
    if cfg.on_policy == 1 and cfg.dynamic_scale:
        raise ValueError("--dynamic_scale with --on_policy 1: there is no cross-entropy to "
                         "scale by; leave it out")
    if cfg.rollout_tokens >= cfg.max_length:
        raise ValueError(f"--rollout_tokens {cfg.rollout_tokens}: leaves no room for a prompt "
                         f"within --max_length {cfg.max_length}")


def intention(cfg):
    """Say how much of the samples the student writes, and by what."""
    by = {"student": "", "vllm": ", by vLLM"}.get(cfg.writer, ", by a process")
    return (f"the student writes {cfg.on_policy:.0%} of the samples, up to {cfg.rollout_tokens} "
            f"tokens each{by}")
