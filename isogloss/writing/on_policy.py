"""Let the student write: the rollouts of a step, of a few steps, and of an evaluation.

The prompts come from the data workers (rollouts.py), the loop over tokens is rollout.py.  Here is
what lies between: with which weights it runs, when rollouts are used again, what they weigh then,
and what is logged of them.

Tests: tests/test_on_policy.py.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from isogloss.align import Located
from isogloss.config import Config
from isogloss.data.batch import Collator
from isogloss.data.batch_types import Example
from isogloss.data.ends import stop_ids
from isogloss.data.rollouts import (
    HELD_OUT,
    TRAINING,
    OldRollout,
    Prompter,
    Rollout,
    RolloutPrompt,
    SkippedPrompt,
    build_prompter,
    completed,
)
from isogloss.data.sample import TextEncoder
from isogloss.data.workers import in_pinned_memory
from isogloss.doors import door
from isogloss.errors import EngineError, EngineStopped
from isogloss.job.counts import global_sums, mean_of
from isogloss.job.rendezvous import values_of_ranks
from isogloss.job.sequence_group import SequenceGroup, join_sequence_group
from isogloss.rollout import Prompt, write
from isogloss.student.engine import StudentRunner
from isogloss.student.whole_student import WholeStudent, lend
from isogloss.writing.node_writer import NodeWriter
from isogloss.writing.rollout_metrics import Effort, RolloutSums, compared, record_of
from isogloss.writing.rollout_ratio import current_logp, weigh_by_ratio

# Steps of which the first is asked how far the student is from its teachers, which takes the
# teachers' logits once more: 6 % of a step of small models.
MEASURED_STEP = 5
# Of so many batches of rollouts two are written by today's weights where others are not, so that
# they can be compared with the student itself: a writer may have kept a weight.
COMPARED_EVERY = 50
COMPARED = 0, 2
PATIENCE = 20.0  # seconds that a job which is asked to end waits for what is written ahead


@dataclass
class WrittenExample:
    """Keep a Rollout with the value that chooses its teachers."""

    rollout: Rollout
    route: object

    def to_plain(self, age):
        """Return a JSON-able dict.

        Args:
            age: see `Writer`; None: it was written ahead.
        """
        route = None if self.route is ... else [self.route]
        return {"route": route, "rollout": self.rollout.to_plain(), "age": age}


class Begun(NamedTuple):
    """Hold the examples that are being written for, and the prompts of this rank."""

    examples: list
    shard: list


def new_examples(drafts):
    """Return the examples of Drafts that are to be written."""
    return [example for draft in drafts for example in draft.examples
            if isinstance(example.content, RolloutPrompt)]


def written_examples(examples, rollouts):
    """Return {(source, copy): WrittenExample} of the Rollouts that are not None."""
    return {rollout.prompt.key: WrittenExample(rollout, example.route)
            for example, rollout in zip(examples, rollouts) if rollout is not None}


@dataclass
class Writer:
    """Write rollouts with the student's current weights.

    Attributes:
        runner: `engine.StudentRunner` of the student in training.
        collator: makes Batches of Drafts.
        prompter: Prompter, for held-out rows.
        held_out: Examples of the rows of an evaluation.
        device: of this rank.
        readers: SequenceGroup of the ranks that read the same samples, or None.
        student: WholeStudent that writes, unless a process does.
        elsewhere: NodeWriter whose process writes, or None.
        episodes: Episodes, of several turns; None: a rollout is one.
        written: {(source, copy): WrittenExample} of the current batch of rollouts.
        age: steps before the batch's first one in which it was written, 0 or 1.
        ahead: {(source, copy): WrittenExample} of the next batch, None before it is written.
        is_restored: `ahead` comes from a checkpoint.
        begun: what is being written for the next batch, or None.
        effort, effort_ahead: what `written` and `ahead` took, without the seconds of a step.
        records: the first rollouts of the latest step or evaluation, dicts of `record_of`.
    """

    cfg: Config
    runner: StudentRunner
    encoder: TextEncoder
    collator: Collator
    prompter: Prompter
    held_out: list
    device: torch.device
    readers: SequenceGroup | None = None
    student: WholeStudent | None = None
    elsewhere: NodeWriter | None = None
    episodes: object = None
    written: dict = field(default_factory=dict)
    age: int = 0
    ahead: dict | None = None
    is_restored: bool = False
    begun: "Begun | None" = None
    effort: Effort = field(default_factory=Effort)
    effort_ahead: Effort = field(default_factory=Effort)
    records: list = field(default_factory=list)

    @property
    def reward_weight(self):
        return self.episodes.options["reward_weight"] if self.episodes else 0.0

    # what the terminal shows

    def summary(self, metrics):
        """Return what the line of an evaluation says of its rollouts; "" where it wrote none."""
        repeated = metrics.get("eval/rollout/repeated_4grams")
        if repeated is None:
            return ""
        keys = [key for key in metrics if key.startswith("eval/rollout/reverse_kl_per_byte")
                and "_turn_" not in key]
        nats = [f"{metrics[key]:#.3g} nats a byte, " for key in keys if metrics[key] is not None]
        return (f", own text {''.join(nats)}{repeated:.0%} repeated, "
                f"{metrics['eval/rollout/truncated']:.0%} cut")

    # the rollouts of a step

    def complete(self, drafts, step):
        """Return the Batches of the Drafts of a step; all ranks take part."""
        begin = time.perf_counter()
        if self.starts_batch(step):
            self._take_batch(drafts)
        batches = []
        for draft in drafts:
            examples = [self._finished(example) for example in draft.examples]
            batch = self.collator(examples, draft.sample_ids)
            batch.rollout_age = (step - 1) % self.cfg.rollout_every + self.age
            num_old = sum(isinstance(example.content, OldRollout) for example in draft.examples)
            num_missing = num_old and sum(example.content is None for example in examples)
            batch.skipped_prompts = draft.skipped_prompts + num_missing
            batch.is_measured = (step - 1) % MEASURED_STEP == 0
            if not batch.is_measured:
                for teacher in batch.teachers:
                    teacher.rollout_positions = None  # its tiles know it already
            batches.append(self._to_be_moved(batch))
        effort = self.effort._replace(seconds=time.perf_counter() - begin)
        if not self.starts_batch(step):
            effort = effort._replace(failed=0, is_reused=True)
        for batch in batches:  # by the time that it is logged, others may have been written
            batch.effort = effort
        return batches

    def starts_batch(self, step):
        """Tell whether a step is the first one of those that use the same rollouts."""
        return (step - 1) % self.cfg.rollout_every == 0

    def writes_ahead(self, step):
        """Tell whether the rollouts of a step are written while the step before it trains.

        Now and then they are not, so that what writes is compared with the student itself.
        """
        if not (self.elsewhere and self.cfg.staleness and self.starts_batch(step)):
            return False
        batch = (step - 1) // self.cfg.rollout_every
        return batch % COMPARED_EVERY not in COMPARED

    def begin(self, drafts):
        """Let the process write what the Drafts of the next step need; all ranks take part."""
        examples = new_examples(drafts)
        shard, starts = self._starts([example.content for example in examples], TRAINING)
        self.elsewhere.begin(starts, PATIENCE)
        self.begun = Begun(examples, shard)

    def finish(self):
        """Wait for what `begin` asked for, if it did; all ranks take part."""
        if self.begun is None:
            return
        (examples, shard), self.begun = self.begun, None
        first = self.elsewhere.finish()
        rollouts = self._completed(shard, len(examples), first, self.elsewhere.more)
        self.ahead = written_examples(examples, rollouts)
        self.effort_ahead = self._latest_effort()

    def _latest_effort(self):
        return Effort(writer_seconds=self.elsewhere.seconds if self.elsewhere else None,
                      failed=self.episodes.failed if self.episodes else 0)

    def _to_be_moved(self, batch):
        return in_pinned_memory(batch) if self.device.type == "cuda" else batch

    def _take_batch(self, drafts):
        self.finish()
        examples = new_examples(drafts)
        if self.is_restored and self._lacks_any(examples):
            self.ahead = None  # a checkpoint before bad steps, behind which it was written
        self.is_restored = False
        self.age = int(self.ahead is not None)
        if self.ahead is None:
            rollouts = self.rollouts([example.content for example in examples], TRAINING)
            self.ahead = written_examples(examples, rollouts)
            self.effort_ahead = self._latest_effort()
        self.written, self.ahead = self.ahead, None
        self.effort, self.effort_ahead = self.effort_ahead, Effort()
        if self.episodes:
            rollouts = [example.rollout for example in self.written.values()]
            self.episodes.compare(rollouts, self._counts_samples())

    def _lacks_any(self, examples):
        """Tell whether some rank misses a rollout in what was written ahead."""
        keys = {example.content.key for example in examples}
        return bool(global_sums([self.ahead is None or not keys <= self.ahead.keys()])[0])

    def _finished(self, example):
        content = example.content
        if not isinstance(content, (RolloutPrompt, OldRollout)):
            return example
        # None: its prompt was skipped when the others were written
        written = self.written.get(content.key)
        return Example(written.rollout, written.route) if written else Example(None)

    def rollouts(self, prompts, purpose):
        """Return the Rollout of each RolloutPrompt; all ranks take part.

        Args:
            purpose: first counter of the noise, TRAINING or HELD_OUT.
        """
        if self.elsewhere:
            self.finish()  # it answers in the order in which it is asked
        shard, starts = self._starts(prompts, purpose)
        if self.elsewhere:
            self.elsewhere.begin(starts)
            return self._completed(shard, len(prompts), self.elsewhere.finish(),
                                   self.elsewhere.more)
        with self.student.model() as (model, agree):
            def write_them(starts):
                return write(
                    model, starts, stop_ids(self.encoder), len(self.encoder.table),
                    temperature=self.cfg.rollout_temperature, top_p=self.cfg.rollout_top_p,
                    batch_size=self.cfg.rollout_batch, pad_id=max(self.encoder.table.pad, 0),
                    agree=agree, equal_lengths=self.student.equal_lengths)

            return self._completed(shard, len(prompts), write_them(starts), write_them)

    def _starts(self, prompts, purpose):
        """Return (RolloutPrompts, Prompts) of this rank's share of its readers' work.

        With an environment all ranks take part, and there may be fewer Prompts.
        """
        group = self.readers
        shard = prompts[group.rank :: group.size] if group else prompts
        starts = []
        for prompt in shard:
            key = self.cfg.seed, purpose, *prompt.key
            starts.append(Prompt(prompt.ids, key, prompt.max_new_tokens))
        return shard, self.episodes.begin(shard, starts) if self.episodes else starts

    def _completed(self, shard, num_prompts, completions, write_more):
        """Return the Rollouts of all ranks that read the same samples; all ranks take part.

        Args:
            completions: of the Prompts of `_starts`.
            write_more: what writes further turns, Prompts -> Completions; all ranks take part.
        """
        if self.episodes:
            written = self.episodes.run(completions, write_more)
        else:
            written = [completed(*both, self.encoder) for both in zip(shard, completions)]
        group = self.readers
        if not group:
            return written
        plain = [rollout and rollout.to_plain() for rollout in written]
        rollouts = [None] * num_prompts
        for rank, of_rank in enumerate(values_of_ranks(plain, group.group)):
            rollouts[rank :: group.size] = [
                entry and Rollout.from_plain(entry) for entry in of_rank]
        return rollouts

    def end_when(self, asked_to_end):
        """Wait for a process that writes only until asked_to_end() is true."""
        for process in filter(None, (self.elsewhere, self.episodes)):
            process.end_when(asked_to_end)

    def close(self):
        """End the processes that write and that answer, if there are some."""
        for process in filter(None, (self.elsewhere, self.episodes)):
            process.close()

    def has_other_weights(self):
        """Tell whether what writes is not the student itself."""
        has_replica = self.student is not None and self.student.replica is not None
        return has_replica or self.elsewhere is not None

    # the state of a run

    def state(self):
        """Return what a checkpoint keeps, the same on every rank; all ranks take part.

        What is being written is waited for; where that fails, the next step asks again.
        """
        with suppress(EngineError, EngineStopped):
            self.finish()
        entries = []
        if self.cfg.rollout_every > 1:
            entries += [example.to_plain(self.age) for example in self.written.values()]
        if self.ahead is not None:
            entries += [example.to_plain(None) for example in self.ahead.values()]
        by_key = {}
        for of_rank in values_of_ranks(entries):
            for entry in of_rank:
                by_key[entry["age"] is None, *entry["rollout"]["key"]] = entry
        return [by_key[key] for key in sorted(by_key)]

    def load_state(self, plain):
        """Restore what `state` returned.

        Raises:
            ValueError: of a rollout its log-probabilities are not those of this run's draws.
        """
        self.is_restored = True
        for entry in plain:
            rollout = Rollout.from_plain(entry["rollout"])
            if rollout.temperature != self.cfg.rollout_temperature:
                raise ValueError(
                    f"--rollout_temperature {self.cfg.rollout_temperature}: the checkpoint's "
                    "rollouts say log-probabilities at temperature "
                    f"{rollout.temperature}, as older versions did, so what they weigh is not "
                    "known; begin anew with --resume never")
            route = ... if entry["route"] is None else entry["route"][0]
            example = WrittenExample(rollout, route)
            age = entry.get("age", 0)
            if age is None:
                self.ahead = (self.ahead or {}) | {rollout.prompt.key: example}
            else:
                self.written[rollout.prompt.key] = example
                self.age = age

    # what is logged

    def describe(self, batches, counts, parts, names):
        """Keep the records of a step; return its metrics, equal on every rank.

        All ranks take part.
        """
        nats_of_batches = []
        for of_batch in parts:
            nats_of_batches.append([part.rollout_nats for part in of_batch])
        if not self.runner.computes_loss:
            nats_of_batches = [[None] * len(names) for _ in batches]
        self.records = self.first_records(batches, nats_of_batches, names)
        effort = batches[0].effort
        sums = RolloutSums(seconds=effort.seconds, failed_episodes=effort.failed,
                           teacher_nats=[0.0] * len(names))
        for of_batch in parts:
            for number, part in enumerate(of_batch):
                if part.rollout_nats is not None:
                    sums.teacher_nats[number] += float(part.rollout_nats.sum())
        for batch in batches if self._counts_samples() else []:
            sums.samples += len(batch.sample_ids)
            sums.skipped_prompts += batch.skipped_prompts
            for rollout in batch.rollouts:
                if rollout is not None:
                    sums.add(rollout)
        sums = sums.all_reduce()
        metrics = sums.metrics()
        metrics["seconds"] = sums.seconds / dist.get_world_size()
        metrics["staleness"] = batches[0].rollout_age
        seconds = None if effort.is_reused else metrics["seconds"]
        if self.elsewhere:
            seconds = metrics["writer_seconds"] = effort.writer_seconds
        if sums.rollouts and seconds is not None:
            metrics["tokens_per_second"] = sums.tokens / max(seconds, 1e-9)
        if batches[0].is_measured:
            metrics |= compared(sums, counts.pairs, names)
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def _counts_samples(self):
        """Tell whether this rank counts its samples: of those that read them the first one does."""
        return self.readers is None or self.readers.rank == 0

    def first_records(self, batches, nats_of_batches, names, held_out=False):
        """Return the first rollouts of this rank as dicts, at most --rollout_log.

        Args:
            nats_of_batches: of each batch, (samples,) -log q of every teacher, or None.
            held_out: the rollouts are those of an evaluation.
        """
        records = []
        for batch, of_batch in zip(batches, nats_of_batches):
            nats = of_batch
            if held_out or batch.is_measured:
                nats = [self._whole_nats(nats_B, len(batch.sample_ids)) for nats_B in of_batch]
            for number, rollout in enumerate(batch.rollouts):
                if rollout is not None and len(records) < self.cfg.rollout_log:
                    of_teachers = {}
                    for name, nats_B in zip(names, nats):
                        if nats_B is not None:
                            of_teachers[name] = float(nats_B[number])
                    sample = rollout.prompt.key[0] if held_out else batch.sample_ids[number]
                    record = {"sample": sample, "held_out": held_out}
                    records.append(record | record_of(rollout, of_teachers))
        return records

    def _whole_nats(self, nats_B, num_samples):
        """Return (samples,) nats over whole sequences, of which this rank has a shard's or none."""
        if self.readers is None:
            return nats_B
        whole_B = torch.zeros(num_samples, dtype=torch.float64, device=self.device)
        if nats_B is not None:
            whole_B += nats_B
        dist.all_reduce(whole_B, group=self.readers.group)
        return whole_B

    def gap(self, batches):
        """Return how far the student's log-probabilities are from those when it wrote.

        All ranks take part.

        Args:
            batches: Batches of a step on the device; the first one is asked.
        Returns:
            metrics, equal on every rank.
        """
        student = batches[0].student
        logp_BS = current_logp(self.cfg, self.runner, student)
        difference = torch.zeros(0, device=self.device)
        if student.logp is not None and logp_BS is not None:
            # what rounding leaves out of today's --rollout_top_p is not compared
            is_written = ~student.logp.isnan() & (logp_BS != -torch.inf)
            difference = (logp_BS - student.logp)[is_written].abs()
        totals = global_sums([float(difference.sum()), difference.numel()]).tolist()
        largest = difference.max() if difference.numel() else torch.zeros((), device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {"rollout/logp_gap": mean_of(totals[0], totals[1]),
                "rollout/logp_gap_max": float(largest) if totals[1] else None}

    # evaluations

    def held_out_batches(self, micro_batch_size):
        """Write the rollouts of the first held-out rows; return (Batches, RolloutSums of them).

        All ranks take part, with equally many batches.
        """
        # ranks of a sequence group read the same samples
        reader_rank = dist.get_rank() // self.cfg.ranks_per_reader
        num_readers = dist.get_world_size() // self.cfg.ranks_per_reader
        num_rows = len(self.held_out)
        examples = []
        for row in range(reader_rank, num_rows, num_readers):
            example = self.held_out[row]
            try:
                prompt = self.prompter.prompt(example, (row, 0))
            except SkippedPrompt:
                continue
            examples.append(example._replace(content=prompt))
        sums = RolloutSums()
        finished = []
        prompts = [example.content for example in examples]
        for example, rollout in zip(examples, self.rollouts(prompts, HELD_OUT)):
            finished.append(Example(rollout, example.route))
            if self._counts_samples() and rollout:
                sums.samples += 1
                sums.add(rollout)
        sums.failed_episodes = self.episodes.failed if self.episodes else 0
        # rounded up: every rank takes part in what its teachers compute
        per_rank = -(-num_rows // num_readers)
        finished += [Example(None)] * (-(-per_rank // micro_batch_size) * micro_batch_size
                                       - len(finished))
        batches = []
        for first in range(0, len(finished), micro_batch_size):
            batch = self.collator(finished[first : first + micro_batch_size])
            batches.append(self._to_be_moved(batch))
        return batches, sums


@dataclass
class RolloutHook:
    """Weigh the rollouts of a step, and say what is to be logged of them; a `build.StepHook`.

    Attributes:
        state: `build.TrainState`.
        metrics: of the current step, those that are known before it.
    """

    state: object
    metrics: dict = field(default_factory=dict)

    def before_step(self, micro_batches):
        """Check rollouts that were just written, weigh older ones.

        Raises:
            EngineError: what writes has other weights than the student.
        """
        state = self.state
        logps = None
        if micro_batches[0].rollout_age:
            logps = [current_logp(state.cfg, state.student, batch.student)
                     for batch in micro_batches]
            self.metrics = weigh_by_ratio(
                state.cfg, state.student, micro_batches, state.sequence_group, logps)
        else:
            self._check_weights(micro_batches)
        weight = state.writer.reward_weight
        if weight:
            door("environment").weigh_policy(state, micro_batches, logps, weight)

    def _check_weights(self, micro_batches):
        state = self.state
        self.metrics = {}
        if state.writer.has_other_weights():
            self.metrics = state.writer.gap(micro_batches)
            gap = self.metrics["rollout/logp_gap"]
            if gap is not None and not gap <= state.cfg.max_logp_gap:  # NaN too
                raise EngineError(
                    "what writes has other weights than the student: the log-probabilities of its "
                    f"tokens differ by {gap:.3g} nats on average (at most "
                    f"{state.cfg.max_logp_gap} is rounding)")

    def after_step(self, report, micro_batches, parts):
        names = [setup.name for setup in self.state.teachers]
        report.others |= self.metrics
        report.others |= self.state.writer.describe(micro_batches, report.counts, parts, names)


def prepare(state, inputs, stack):
    if not state.cfg.writer_command:
        lend(state, writes=True)
    state.writer = load_writer(state, inputs)
    stack.callback(state.writer.close)
    check_writing(state.writer)
    state.hooks.append(RolloutHook(state))


def load_writer(state, inputs):
    """Return the Writer of a run."""
    cfg = state.cfg
    prompter = build_prompter(cfg, inputs.student, state.samples_per_step)
    readers = state.sequence_group
    if cfg.pipeline_parallel > 1:
        readers = join_sequence_group(cfg.pipeline_parallel)
    elsewhere = None
    if cfg.writer_command:
        elsewhere = NodeWriter(cfg, state.engine, inputs.student, state.device)
    episodes = None
    if cfg.environment:
        episodes = door("environment").load_episodes(cfg, inputs.student)
    return Writer(
        cfg, state.student, inputs.student, inputs.collator(cfg, state.device), prompter,
        inputs.data.held_out(cfg.rollout_eval), state.device, readers,
        None if elsewhere else state.whole_student, elsewhere, episodes)


def check_writing(writer):
    """Raise a ValueError or EngineError where nobody can write; all ranks take part."""
    table = writer.encoder.table
    ids = np.array([table.bos if table.bos >= 0 else max(table.eos, 0)])
    nowhere = np.full(1, -1)
    located = Located(nowhere, nowhere, np.zeros(1, np.int8))
    prompt = RolloutPrompt((0, 0), ids, "", located, None, 2)
    episodes, writer.episodes = writer.episodes, None  # it is no chat
    writer.rollouts([prompt], HELD_OUT)
    writer.episodes = episodes
