"""Say what rollouts are like: metrics of a step and of an evaluation, records of some.

Tests: tests/test_on_policy.py.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from isogloss.doors import door
from isogloss.job.columns import to_device
from isogloss.job.counts import Counts, PairCounts, Sums, mean_of
from isogloss.teachers.text_scores import rollout_nats


@torch.no_grad()
def evaluate_rollouts(writer, setups):
    """Let the student write from held-out rows; return the metrics, equal on every rank.

    All ranks take part.  The noise is the same at every evaluation.
    """
    begin = time.perf_counter()
    batches, sums = writer.held_out_batches(writer.runner.engine.train_micro_batch_size_per_gpu())
    seconds = time.perf_counter() - begin
    counts = [PairCounts() for _ in setups]
    sums.teacher_nats = [0.0] * len(setups)
    by_turn = {}
    nats_of_batches = []
    for batch in batches:
        batch = to_device(batch, writer.device)
        nats_of_batches.append([])
        for number, setup in enumerate(setups):
            teacher_batch = batch.teachers[number]
            logits = setup.source.targets(teacher_batch)
            nats_B = None
            if teacher_batch.rollout_positions is not None:
                nats_B = rollout_nats(logits, teacher_batch)
                sums.teacher_nats[number] += float(nats_B.sum())
                if writer.episodes and writer.readers is None:
                    by_turn[number] = by_turn.get(number, 0) + door("environment").nats_by_turn(
                        logits, teacher_batch, batch.student)
            nats_of_batches[-1].append(nats_B)
            counts[number].rollout_nats += batch.counts.pairs[number].rollout_nats
            counts[number].rollout_bytes += batch.counts.pairs[number].rollout_bytes
            setup.source.release()
    whole = Counts(pairs=counts).all_reduce()
    sums = sums.all_reduce()
    metrics = sums.metrics() | {"seconds": seconds}
    names = [setup.name for setup in setups]
    writer.records = writer.first_records(batches, nats_of_batches, names, held_out=True)
    metrics |= compared(sums, whole.pairs, names)
    if writer.episodes and writer.readers is None:
        metrics |= door("environment").compared_by_turn(by_turn, names)
    return {f"rollout/{name}": value for name, value in metrics.items()}


def compared(sums, pairs, names):
    """Return how far the student is from each teacher on what it wrote."""
    metrics = {}
    for name, pair, nats in zip(names, pairs, sums.teacher_nats):
        if pair.rollout_bytes:
            suffix = f"/{name}" if len(names) > 1 else ""
            difference = nats - pair.rollout_nats
            metrics[f"reverse_kl_per_byte{suffix}"] = difference / pair.rollout_bytes
            metrics[f"aligned_bytes{suffix}"] = mean_of(pair.rollout_bytes, sums.num_bytes)
    return metrics


class Effort(NamedTuple):
    """Hold what the rollouts of a step took.

    seconds: that this rank spent on them in this step.
    writer_seconds: that the process of --writer wrote; None: there is none, or it is not known.
    failed: episodes of this rank that are left out, in the first step that uses the others.
    is_reused: an earlier step used them too, so that `seconds` wrote nothing.
    """

    seconds: float = 0.0
    writer_seconds: float | None = None
    failed: int = 0
    is_reused: bool = False


@dataclass
class RolloutSums(Sums):
    """Sum up what rollouts are like.

    Attributes:
        seconds: that the ranks wrote.
        teacher_nats: of each teacher, -log q of the aligned tokens.
    """

    samples: float = 0
    skipped_prompts: float = 0
    rollouts: float = 0
    tokens: float = 0
    num_bytes: float = 0
    truncated: float = 0
    entropy: float = 0.0
    repeated: float = 0.0
    noncanonical: float = 0
    turns: float = 0
    calls: float = 0
    invalid_calls: float = 0
    finished: float = 0
    rewarded: float = 0
    reward: float = 0.0
    failed_episodes: float = 0
    seconds: float = 0.0
    teacher_nats: list = field(default_factory=list)

    def add(self, rollout):
        """Count a Rollout."""
        size = int(rollout.is_written.sum())
        self.rollouts += 1
        self.tokens += size
        self.num_bytes += len(rollout.text.encode())
        self.truncated += not rollout.ended
        self.entropy += rollout.entropy * size
        self.repeated += rollout.repeated
        self.noncanonical += not rollout.is_canonical
        if rollout.episode:
            self.turns += rollout.episode["turns"]
            self.calls += rollout.episode["calls"]
            self.invalid_calls += rollout.episode["invalid_calls"]
            self.finished += rollout.episode["ended"]
            self.rewarded += rollout.episode["reward"] is not None
            self.reward += rollout.episode["reward"] or 0.0

    def metrics(self):
        """Return the metrics, see docs/evaluate.md."""
        of_episodes = {}
        if self.turns or self.failed_episodes:
            of_episodes = {
                "turns": mean_of(self.turns, self.rollouts),
                "calls": mean_of(self.calls, self.rollouts),
                "invalid_calls": mean_of(self.invalid_calls, self.calls + self.invalid_calls),
                "finished": mean_of(self.finished, self.rollouts),
                "reward": mean_of(self.reward, self.rewarded),
                "failed_episodes": int(self.failed_episodes),
            }
        return of_episodes | {
            "share": mean_of(self.rollouts, self.samples),
            "skipped_prompts": int(self.skipped_prompts),
            "tokens": int(self.tokens),
            "length": mean_of(self.tokens, self.rollouts),
            "truncated": mean_of(self.truncated, self.rollouts),
            "entropy": mean_of(self.entropy, self.tokens),
            "repeated_4grams": mean_of(self.repeated, self.rollouts),
            "noncanonical": mean_of(self.noncanonical, self.rollouts),
        }


def record_of(rollout, teacher_nats):
    """Return what rollouts.jsonl says of a Rollout.

    Args:
        teacher_nats: {name: -log q of the aligned tokens}.
    """
    num_bytes = max(len(rollout.text.encode()), 1)
    turns = {}
    if rollout.turns:
        turns = {"messages": rollout.messages, "episode": rollout.episode,
                 "turns": [turn[:2] for turn in rollout.turns]}
    per_byte = {name: nats / num_bytes for name, nats in teacher_nats.items()}
    return {
        "copy": rollout.prompt.key[1], "prompt": rollout.prompt.text,
        "text": rollout.text, "ids": rollout.ids.tolist(), "ended": rollout.ended,
        "temperature": rollout.temperature, "top_p": rollout.top_p,
        "student_nats_per_byte": -float(np.nansum(rollout.logp)) / num_bytes,
        "teacher_nats_per_byte": per_byte,
    } | turns
