"""Build what a run needs: the models on these ranks, the engine, the teachers, who writes.

Tests: tests/test_launch.py, tests/test_distributed.py.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from isogloss import doors
from isogloss.config import Config
from isogloss.data.order import Places
from isogloss.inputs import load_batches, samples_per_step
from isogloss.job.launch import fail_together
from isogloss.job.rendezvous import LOADING_TIMEOUT, set_timeout
from isogloss.job.step_report import StepReport
from isogloss.job.transfers import Uploads
from isogloss.log import Taught, Waiting
from isogloss.student import checks
from isogloss.student.engine import (
    EngineRunner,
    StudentRunner,
    StudentWithLoss,
    attach_projection,
    load_student,
    start_engine,
)
from isogloss.student.finite import BadSteps
from isogloss.teachers.protocol import load_teacher

if TYPE_CHECKING:
    from isogloss.evaluation.eval_samples import EvalSamples
    from isogloss.evaluation.task_suite import TaskSuite
    from isogloss.job.sequence_group import SequenceGroup
    from isogloss.objective.loss_dump import LossDump
    from isogloss.student.whole_student import WholeStudent
    from isogloss.teachers.remote import TeacherClient
    from isogloss.writing.on_policy import Writer


class StepHook(Protocol):
    """Add to every step what a flag asks for; the door behind it puts one into a TrainState."""

    def before_step(self, micro_batches: list) -> None:
        """Change the Batches of a step, which are on the device; no teacher has been asked."""

    def after_step(self, report: StepReport, micro_batches: list, parts: list) -> None:
        """Add to what is logged.

        Args:
            parts: for each Batch the `objective.Part` of every teacher.
        """


@dataclass
class TrainState:
    """Hold what a step needs.

    Attributes:
        cfg: Config.
        student: StudentRunner, which runs the student on micro-batches.
        teachers: TeacherSetup of every teacher; empty: cross-entropy alone.
        vocab: tokens of the student.
        device: of this rank.
        client: TeacherClient of teachers on ranks of their own, or None.
        sequence_group: SequenceGroup that shares this rank's sequences, or None.
        scales: {teacher: factor of its next step}, of --dynamic_scale.
        bad_steps: BadSteps, the latest ones that were not finite.
        last_checkpoint: Path of the newest checkpoint that this run wrote or began with, or None.
        tasks: TaskSuite by which the student is judged, or None.
        samples: EvalSamples that it writes at an evaluation, or None.
        whole_student: WholeStudent, for texts that each rank writes or reads alone, or None.
        writer: Writer of what the student learns from itself, or None.
        places: Places from which a stream of data can go on.
        steps_taken: steps of the whole run so far.
        due: `once_in_a_while.judgments` of these steps that have not been logged yet.
        drafts: of the next step, for which something else writes meanwhile, or None.
        data_seconds: for which this rank has waited for data since its last step.
        waiting: Waiting, which says so where that is long.
        taught: Taught, which says so where no teacher has taught anything so far.
        hooks: StepHooks, in the order in which they are called.
        uploads: Uploads of the micro-batches.
        loss_dump: LossDump, or None.
    """

    cfg: Config
    student: StudentRunner
    teachers: list
    vocab: int
    device: torch.device
    client: "TeacherClient | None" = None
    sequence_group: "SequenceGroup | None" = None
    scales: dict = field(default_factory=dict)
    bad_steps: BadSteps = field(default_factory=BadSteps)
    last_checkpoint: Path | None = None
    tasks: "TaskSuite | None" = None
    samples: "EvalSamples | None" = None
    whole_student: "WholeStudent | None" = None
    writer: "Writer | None" = None
    places: Places = field(default_factory=Places)
    steps_taken: int = 0
    due: list = field(default_factory=list)
    drafts: list | None = None
    data_seconds: float = 0.0
    waiting: Waiting = field(default_factory=Waiting)
    taught: Taught = field(default_factory=Taught)
    loss_dump: "LossDump | None" = None
    hooks: list[StepHook] = field(default_factory=list)
    uploads: Uploads = field(init=False)

    def __post_init__(self):
        self.uploads = Uploads(self.device)

    @property
    def engine(self):
        return self.student.engine

    def dump_of(self, batch):
        """Return what writes the losses of a Batch once they are known; None: nobody asks."""
        return self.loss_dump and partial(self.loss_dump.write, self.steps_taken + 1, batch)

    def files_of_teachers(self, folder):
        """List (path in a checkpoint, TeacherSetup) of what steps have made of the teachers."""
        return [(folder / f"teacher_{number}.safetensors", setup)
                for number, setup in enumerate(self.teachers)]

    @property
    def samples_per_step(self):
        return samples_per_step(self.cfg, self.engine)

    @property
    def asks_ahead(self):
        """Whether a teacher works elsewhere, beside the student, and so can be asked before."""
        return any(setup.spec.asks_ahead for setup in self.teachers)


def build_state(cfg, inputs, device, roles=None):
    """Load the models that these ranks hold and start the engine; all of them take part.

    Raises:
        ValueError: a model that cannot be loaded.
    """
    sequence_group = None
    attention = cfg.attention
    if cfg.sequence_parallel > 1:
        from isogloss.student import ulysses

        sequence_group, attention = ulysses.join(cfg)
    model = load_student(cfg, inputs.ds_config, attention)
    vocab = len(inputs.student.table)
    if cfg.pipeline_parallel > 1:
        from isogloss.student.pipeline import start_pipeline

        student = start_pipeline(
            cfg, model, vocab, inputs.ds_config, inputs.teachers, are_local=not roles)
    else:
        module = StudentWithLoss(model, vocab, cfg.tiled, cfg.activation_offload)
        attach_projection(module, inputs.teachers, model.device)
        dist.barrier()  # waits for slow loads: DeepSpeed's own groups do not wait for long
        engine = start_engine(
            module, inputs.ds_config, cfg.ds_config, cfg.projection_learning_rate,
            cfg.freeze_until)
        student = EngineRunner(engine, vocab)
        if inputs.router_weight:
            from isogloss.student.router import RouterBalance

            student.balance = RouterBalance(model, inputs.router_weight)
    set_timeout(LOADING_TIMEOUT)  # of DeepSpeed's own groups too
    if not roles:
        for setup in inputs.teachers:
            setup.source = load_source(setup.spec, student)
    state = TrainState(cfg, student, inputs.teachers, vocab, device, sequence_group=sequence_group,
                       tasks=inputs.tasks)
    if cfg.dump_losses:
        from isogloss.objective.loss_dump import LossDump

        state.loss_dump = LossDump(cfg.dump_losses, [setup.name for setup in state.teachers])
    return state


def serve_teachers(cfg, roles, device):
    """Run a rank that is for teachers alone, until the student's ranks shut down."""
    from isogloss.teachers import remote

    remote.serve_teachers(cfg, roles, device)


def announce_teachers(inputs, roles):
    """Tell the ranks that are for teachers alone, if there are any, what to load."""
    if roles:
        from isogloss.teachers import remote

        remote.announce_teachers(inputs, roles)


def load_source(spec, student):
    """Return the TeacherSource of a teacher; on a rank that computes no loss what others need."""
    if student.computes_loss:
        return load_teacher(spec)
    from isogloss.teachers.group import load_silent

    return load_silent(spec)


def prepare(state, inputs, roles, stack):
    """Reach the teachers, check what the loaded models say, and make ready who writes.

    Args:
        roles: Roles, where teachers have ranks of their own; else None.
        stack: ExitStack; what has to be ended is pushed on it.
    """
    if roles:
        from isogloss.teachers import remote

        remote.connect(state, roles)
        stack.push(partial(remote.shut_down, state.client))
    stack.callback(close_teachers, state)
    with fail_together():
        checks.check_logits(state, checks.probe_ids(state.vocab).tolist())
        doors.prepare(state, inputs, stack)


def resume(state, inputs):
    """Restore the state of a checkpoint, if there is one; return how many steps it has taken."""
    if not inputs.checkpoint:
        for setup in state.teachers:
            setup.source.restore(None, state.engine.module)
        state.taught.terms = {setup.name: 0.0 for setup in state.teachers}
        return 0
    from isogloss.checkpoints.resume import follow_schedule, load_checkpoint

    with fail_together(what="checkpoint"):
        start, extra = load_checkpoint(state.engine, inputs.checkpoint, inputs.universal)
        for path, setup in state.files_of_teachers(inputs.checkpoint):
            setup.source.restore(path, state.engine.module)
        if state.writer:
            state.writer.load_state(extra.get("rollouts", []))
    state.scales = extra.get("scales", {})
    state.taught.terms = extra.get("taught", {})
    state.due = extra.get("due", [])
    state.places.note(extra.get("place"))
    state.last_checkpoint = inputs.checkpoint
    if state.cfg.extend_schedule:
        follow_schedule(state.engine)
    return start


def read_batches(state, inputs, start, signals):
    """Return (iterator over micro-batches from step `start` on, {source: its held-out batches}).

    Args:
        signals: StopSignals, which data workers inherit.
    """
    def asked_to_end():
        return bool(signals.received)

    for asked in [*(setup.source for setup in state.teachers), *filter(None, [state.writer])]:
        asked.end_when(asked_to_end)
    cfg = state.cfg
    place = state.places.before(start * state.samples_per_step)
    return load_batches(cfg, inputs, state.engine, state.device, start, place=place,
                        asked_to_end=asked_to_end)


def close_teachers(state):
    """End the teachers, at a clean end or after an error."""
    for setup in state.teachers:
        setup.source.close()
