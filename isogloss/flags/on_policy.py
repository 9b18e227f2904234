"""Check the flags of what the student writes (--on_policy), and what --environment says.

Tests: tests/test_config.py, tests/test_wrong_flags.py.
"""

from dataclasses import dataclass

from isogloss.flags.parse import check_flags, flag, read_options


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
    if cfg.environment:
        options = read_options(cfg, "environment")
        needs = "hint" if options["hint"] else "reward_weight"
        if options[needs] and cfg.rollouts_per_prompt < 2:
            raise ValueError(f"--environment: {needs}: a reward counts against those of other "
                             "rollouts of its prompt; add --rollouts_per_prompt 4, say")
        if options["reward_weight"] and (cfg.rollout_temperature, cfg.rollout_top_p) != (1, 1):
            raise ValueError("--environment: reward_weight with --rollout_temperature "
                             f"{cfg.rollout_temperature:g} and --rollout_top_p "
                             f"{cfg.rollout_top_p:g}: a reward is for the student's own "
                             "distribution; leave both at 1")


@dataclass(kw_only=True)
class EnvironmentOptions:
    """State what answers the student, and how."""

    function: str = flag("", "calculator, python, package.module:function or file.py:function.")
    max_turns: int = flag(8, "turns of the student in an episode, at most.", low=1, high=1000)
    reward_weight: float = flag(
        0.0, "of the reward beside the loss. 0: it is logged alone.", low=0, high=1e6)
    hint: str = flag(
        "", "what teachers read in front of a rollout. own_success: the best other rollout of its "
        "prompt. Empty: teacher_prompt_key alone.", choices=("", "own_success"))
    seconds: float = flag(30.0, "for an answer.", low=0.01, high=800)
    mib: int = flag(1024, "of memory for an episode.", low=16, high=2**20)

    def __post_init__(self):
        check_flags(self)
        if not self.function.strip():
            raise ValueError("function: is empty; expected calculator, python, "
                             "package.module:function or file.py:function")


def intention(cfg):
    """Say how much of the samples the student writes, and by what."""
    by = {"student": "", "vllm": ", by vLLM"}.get(cfg.writer, ", by a process")
    turns = " each"
    if cfg.environment:
        its = read_options(cfg, "environment")
        turns = f" in each of up to {its['max_turns']} turns with {its['function']}"
    return (f"the student writes {cfg.on_policy:.0%} of the samples, up to {cfg.rollout_tokens} "
            f"tokens{turns}{by}")
