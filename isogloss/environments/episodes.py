"""Let the student speak several turns, and an environment answer; many episodes side by side.

Every turn of the loop is one call of what writes, for all episodes that go on.  So an episode does
not depend on what stands beside it: its draws come from counters, its environment has its seed.

Tests: tests/test_episodes.py.
"""

import json
import warnings
from dataclasses import dataclass, field, replace

from isogloss.environments.by_turn import compared_by_turn, nats_by_turn
from isogloss.environments.episode import Episode, heard_by
from isogloss.environments.process import EnvironmentProcess
from isogloss.environments.reward import give_advantages, policy_pull, weigh_policy
from isogloss.errors import EngineError
from isogloss.flags.parse import read_options
from isogloss.flags.terminal import one_line
from isogloss.job.rendezvous import values_of_ranks
from isogloss.job.several.together import together
from isogloss.rollout import hash_counters

__all__ = ["Episodes", "check", "compared_by_turn", "heard_by", "load_episodes", "nats_by_turn",
           "policy_pull", "weigh_policy"]

SEED_BITS = 31
MOST_FAILED = 32  # episodes one after the other


@dataclass
class Episodes:
    """Write rollouts of several turns.

    Attributes:
        options: of --environment.
        process: EnvironmentProcess of this rank.
        open: (Episode, the Prompt that it begins with) of those that are written.
        batches: that were begun; what failed in the middle is begun anew, not gone on with.
        failed: episodes of the latest batch on this rank that are left out.
        failed_in_a_row: of all ranks, with none in between that was not left out.
    """

    cfg: object
    encoder: object
    options: dict
    process: EnvironmentProcess
    open: list = field(default_factory=list)
    batches: int = 0
    failed: int = 0
    failed_in_a_row: int = 0

    def begin(self, prompts, starts):
        """Begin an episode for each prompt; return the `rollout.Prompt`s of their first turns.

        Args:
            prompts: RolloutPrompts of this rank; starts: `rollout.Prompt` of each.
        """
        self.batches += 1
        self.open = [(Episode(replace(prompt)), start) for prompt, start in zip(prompts, starts)]
        if self.process.begins:
            for (episode, _), answer in zip(self.open, self._ask("begin", self.open)):
                episode.begin(answer, self.encoder, self.cfg.rollout_tokens)
        return self._prompts(0)

    def run(self, written, write):
        """Let the episodes go on to their ends; all ranks take part.

        Args:
            written: Completions of what `begin` returned.
            write: list of `rollout.Prompt` -> list of Completions, of this rank; collective.
        Returns:
            the Rollout of each prompt, None where its environment failed.
        """
        encoder = self.encoder
        for turn in range(self.options["max_turns"]):
            if turn:
                written = write(self._prompts(turn))
            going = self._going()
            shown = [episode.add(completion, encoder)
                     for (episode, _), completion in zip(going, written)]
            answers = self._ask("turn", going, shown)
            is_last = turn + 1 == self.options["max_turns"]
            for (episode, _), answer in zip(going, answers):
                episode.hear(answer, encoder, self.cfg.rollout_tokens, is_last)
            if not any(values_of_ranks(bool(self._going()))):
                break
        together(self.process.end_episodes)
        self._count_failed()
        cfg = self.cfg
        rollouts = [episode.rollout(cfg.rollout_temperature, cfg.rollout_top_p)
                    for episode, _ in self.open]
        self.open = []
        return rollouts

    def _count_failed(self):
        """Warn of episodes that are left out; all ranks take part.

        Raises:
            EngineError: too many are, one after the other.
        """
        name = f"--environment {self.options['function']}"
        problems = [episode.outcome["error"] for episode, _ in self.open]
        self.failed = sum(map(bool, problems))
        for problem in filter(None, problems):
            warnings.warn(one_line(f"{name}: {problem}; such episodes are left out"), stacklevel=2)
        of_ranks = values_of_ranks((len(problems), self.failed, next(filter(None, problems), "")))
        total, failed = (sum(of_rank[i] for of_rank in of_ranks) for i in range(2))
        self.failed_in_a_row = self.failed_in_a_row + failed if failed == total else 0
        if self.failed_in_a_row >= MOST_FAILED:
            problem = next(of_rank[2] for of_rank in of_ranks if of_rank[2])
            raise EngineError(one_line(f"{name}: {self.failed_in_a_row} episodes in a row have "
                                       f"failed: {problem}"))

    def _going(self):
        return [(episode, start) for episode, start in self.open if not episode.is_over]

    def _prompts(self, turn):
        """Return what the student goes on from, of each episode that goes on."""
        prompts = []
        for episode, start in self._going():
            # of the first turn the key is that of a rollout without an environment
            key = (*start.key, turn) if turn else start.key
            prompts.append(replace(start, ids=episode.ids, key=key,
                                   max_new_tokens=episode.prompt.max_new_tokens))
        return prompts

    def _ask(self, what, episodes, shown=()):
        """Return what the environment says of (Episode, its Prompt) each; all ranks take part.

        Args:
            what: "begin" or "turn"; shown: what the student said last, as it reads it.
        """
        questions = []
        for number, (episode, start) in enumerate(episodes):
            messages = episode.chat
            if shown:
                messages = [*messages[:-1], shown[number]]
            questions.append({
                "key": json.dumps([self.batches, *start.key]), "do": what,
                "row": episode.prompt.row,
                "seed": hash_counters(*start.key) >> (64 - SEED_BITS), "messages": messages,
                "tools": episode.prompt.tools})
        return together(lambda: self.process.answers(questions))

    def compare(self, rollouts, counts_samples):
        """Compare each Rollout with the others of its prompt; see `give_advantages`."""
        if self.options["reward_weight"] or self.options["hint"]:
            give_advantages(rollouts, counts_samples, self.options["hint"])

    def end_when(self, asked_to_end):
        """Wait for the environment only until asked_to_end() is true."""
        self.process.asked_to_end = asked_to_end

    def close(self):
        """End the environment."""
        self.process.close()


def check(cfg, layout):
    """Raise a ValueError where the environment does not load."""
    start(cfg).close()


def start(cfg):
    """Return the EnvironmentProcess of a run."""
    try:
        return EnvironmentProcess(read_options(cfg, "environment"))
    except EngineError as error:
        raise ValueError(str(error)) from None


def load_episodes(cfg, encoder):
    """Return the Episodes of this rank."""
    return Episodes(cfg, encoder, read_options(cfg, "environment"), start(cfg))
