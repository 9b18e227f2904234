"""Let what an environment rewards become likelier, beside the distillation loss.

Tests: tests/test_reward.py.
"""

import json
from dataclasses import replace

import torch
import torch.distributed as dist

from isogloss.data.batch_types import Example
from isogloss.data.options.text_keys import read_by_teachers
from isogloss.job.rendezvous import values_of_ranks
from isogloss.policy_losses import advantages, policy_pull

__all__ = ["give_advantages", "policy_pull", "weigh_policy"]


def give_advantages(rollouts, counts_samples, hint=""):
    """Write the advantage of each Rollout into its `episode`; all ranks take part.

    Args:
        counts_samples: of the ranks that have the same rollouts, this one is the first.
        hint: "own_success": teachers read in front of a rollout the best other one of its prompt,
            where that is better than the mean of the prompt (SDPO, arXiv:2601.20802).
    """
    entries = []
    for rollout in rollouts if counts_samples else ():
        said = as_text(rollout.messages) if hint else ""
        entries.append((rollout.prompt.key, rollout.episode["reward"] or 0.0, said))
    of_all = {tuple(key): (reward, said) for of_rank in values_of_ranks(entries)
              for key, reward, said in of_rank}
    keys = sorted(of_all)
    rewards = torch.tensor([of_all[key][0] for key in keys], dtype=torch.float64)
    found = advantages(rewards, torch.tensor([source for source, _ in keys]))
    by_key = dict(zip(keys, found.tolist()))
    for rollout in rollouts:
        rollout.episode["advantage"] = by_key[rollout.prompt.key]
        if hint:
            others = [key for key in keys if key[0] == rollout.prompt.key[0]
                      and key != rollout.prompt.key and by_key[key] > 0]
            best = max(others, key=lambda key: of_all[key][0], default=None)
            if best is not None:
                rollout.prompt = with_hint(rollout.prompt, of_all[best][1])


def as_text(messages):
    """Return what was said in an episode, as a person would write it down."""
    lines = []
    for message in messages:
        for call in message.get("tool_calls", []):
            its = call["function"]
            lines.append(f"{message['role']} calls {its['name']}({json.dumps(its['arguments'])})")
        if message["content"].strip() or not message.get("tool_calls"):
            lines.append(f"{message['role']}: {message['content'].strip()}")
    return "\n".join(lines)


def with_hint(prompt, said):
    """Return a RolloutPrompt in front of which teachers read a hint."""
    hint = {"role": "system", "content": f"An earlier attempt that succeeded:\n\n{said}"}
    taught, _ = read_by_teachers(Example(prompt.taught, teacher_prompt=(hint,)))
    return replace(prompt, taught=taught)


def weigh_policy(state, batches, logps, weight):
    """Let the tiles of a step's Batches hold the weights of the reward; all ranks take part.

    Args:
        logps: for each Batch the (B, S) log-probabilities of its labels today; None: those are the
            ones that it was written with.
        weight: of the expected reward, over --rollout_tokens.
    """
    group = state.sequence_group
    num_rollouts = 0
    for batch in batches:
        num_rollouts += sum(rollout is not None for rollout in batch.rollouts)
    # each sample is with all ranks of a sequence group or pipeline
    total = sum(values_of_ranks(num_rollouts)) / state.cfg.ranks_per_reader
    scale = weight * state.student.averaged_ranks * len(batches)
    scale /= max(total, 1) * state.cfg.rollout_tokens
    for number, batch in enumerate(batches):
        student = batch.student
        if student.logp is None or not batch.teachers:
            continue
        advantage = [rollout.episode["advantage"] if rollout else 0.0 for rollout in batch.rollouts]
        advantage = torch.tensor(advantage, device=student.ids.device)
        teacher = batch.teachers[0]
        written_N = ~student.logp.flatten().isnan()
        sample_N = teacher.sample_of_student[: len(written_N)]
        if logps is not None and logps[number] is not None:
            advantage *= _ratios(logps[number], student.logp, sample_N, len(advantage),
                                 state.cfg.max_ratio, group)
        weight_N = torch.where(written_N, scale * advantage[sample_N], 0.0)
        if group:
            weight_N = group.with_halo_values(weight_N[:, None], teacher.halo_index).squeeze(1)
        batch.teachers = [_with_policy(teacher, weight_N), *batch.teachers[1:]]


def _ratios(logp_BS, old_BS, sample_N, num_samples, max_ratio, group):
    """Return (samples,) how much likelier each text is today, at most max_ratio."""
    difference_N = (logp_BS - old_BS).flatten().nan_to_num().double()
    log_ratio = difference_N.new_zeros(num_samples).index_add(0, sample_N, difference_N)
    if group:
        dist.all_reduce(log_ratio, group=group.group)
    return log_ratio.exp().clamp(max=max_ratio).float()


def _with_policy(teacher, weight_N):
    """Return a TeacherBatch whose tiles of rollouts hold the weight of each of their positions."""
    tiles = []
    for tile in teacher.tiles:
        weight_n = weight_N[tile.student_positions]
        sub_tiles = []
        for sub_tile in tile.sub_tiles:
            policy = weight_n[sub_tile.student_slice] if sub_tile.on_policy else None
            sub_tiles.append(sub_tile._replace(policy=policy))
        tiles.append(tile._replace(sub_tiles=tuple(sub_tiles)))
    return replace(teacher, tiles=tiles)
