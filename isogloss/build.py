"""Build what a run needs: the models on these ranks, the engine, the teachers, who writes.

Tests: tests/test_launch.py, tests/test_distributed.py.
"""

import itertools
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from isogloss.checkpoints.checkpoint import load_checkpoint
from isogloss.config import Config
from isogloss.data.rollouts import build_prompter
from isogloss.data.stream import Places
from isogloss.evaluation.eval_samples import EvalSamples, load_samples
from isogloss.evaluation.task_suite import TaskSuite
from isogloss.inputs import build_collator, load_batches, samples_per_step
from isogloss.job.launch import fail_together
from isogloss.job.rendezvous import LOADING_TIMEOUT, set_timeout
from isogloss.job.sequence_group import SequenceGroup, join_sequence_group
from isogloss.job.transfers import Uploads
from isogloss.job.watch import current_watch, ignore_stop_signals
from isogloss.log import Taught, Waiting
from isogloss.models.pretrained import load_config
from isogloss.objective.loss_dump import LossDump
from isogloss.student import checks
from isogloss.student.engine import (
    EngineRunner,
    StudentRunner,
    StudentWithLoss,
    attach_projection,
    follow_schedule,
    load_student,
    start_engine,
)
from isogloss.student.finite import BadSteps
from isogloss.student.freezing import LateWeights
from isogloss.student.pipeline import start_pipeline
from isogloss.student.router import RouterBalance, router_weight
from isogloss.student.stages import probe_ids
from isogloss.student.ulysses import ATTENTION, register_attention
from isogloss.student.whole_student import WholeStudent
from isogloss.teachers import remote
from isogloss.teachers.ensemble import SilentTeacher, load_silent
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import load_teacher
from isogloss.writing.node_writer import NodeWriter
from isogloss.writing.on_policy import Writer, check_writing


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
        uploads: Uploads of the micro-batches.
        loss_dump: LossDump, or None.
    """

    cfg: Config
    student: StudentRunner
    teachers: list
    vocab: int
    device: torch.device
    client: remote.TeacherClient | None = None
    sequence_group: SequenceGroup | None = None
    scales: dict = field(default_factory=dict)
    bad_steps: BadSteps = field(default_factory=BadSteps)
    last_checkpoint: Path | None = None
    tasks: TaskSuite | None = None
    samples: EvalSamples | None = None
    whole_student: WholeStudent | None = None
    writer: Writer | None = None
    places: Places = field(default_factory=Places)
    steps_taken: int = 0
    due: list = field(default_factory=list)
    drafts: list | None = None
    data_seconds: float = 0.0
    waiting: Waiting = field(default_factory=Waiting)
    taught: Taught = field(default_factory=Taught)
    loss_dump: LossDump | None = None
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
    def asks_ahead(self):
        """Whether a teacher works elsewhere, beside the student, and so can be asked before."""
        return any(setup.spec.asks_ahead for setup in self.teachers)


def build_state(cfg, inputs, device, roles=None):
    """Load the models that these ranks hold and start the engine; all of them take part.

    Raises:
        ValueError: a model that cannot be loaded.
    """
    sequence_group = None
    if cfg.sequence_parallel > 1:
        sequence_group = join_sequence_group(cfg.sequence_parallel)
        config = load_config("student", cfg.student, cfg.trust_remote_code)
        register_attention(config.get_text_config(), sequence_group)
    model = load_student(cfg, inputs.ds_config, ATTENTION if sequence_group else cfg.attention)
    vocab = len(inputs.student.table)
    if cfg.pipeline_parallel > 1:
        student = start_pipeline(
            cfg, model, vocab, inputs.ds_config, inputs.teachers, are_local=not roles)
    else:
        module = StudentWithLoss(model, vocab, cfg.tiled, cfg.activation_offload)
        attach_projection(module, inputs.teachers, model.device)
        dist.barrier()  # waits for slow loads: DeepSpeed's own groups do not wait for long
        engine = start_engine(
            module, inputs.ds_config, cfg.ds_config, cfg.projection_learning_rate,
            cfg.freeze_until)
        balance = None
        if inputs.balances_experts:
            config = load_config("student", cfg.student, cfg.trust_remote_code).get_text_config()
            balance = RouterBalance(model, router_weight(cfg, config))
        late = LateWeights(engine, cfg.freeze_until) if cfg.freeze_until else None
        student = EngineRunner(engine, vocab, balance, late)
    set_timeout(LOADING_TIMEOUT)  # of DeepSpeed's own groups too
    if not roles:
        load = load_teacher if student.computes_loss else load_silent
        for setup in inputs.teachers:
            setup.source = load(setup.spec)
    names = [setup.name for setup in inputs.teachers]
    return TrainState(cfg, student, inputs.teachers, vocab, device, sequence_group=sequence_group,
                      tasks=inputs.tasks,
                      loss_dump=LossDump(cfg.dump_losses, names) if cfg.dump_losses else None)


def prepare(state, inputs, roles, stack):
    """Reach the teachers, check what the loaded models say, and make ready who writes.

    Args:
        roles: Roles, where teachers have ranks of their own; else None.
        stack: ExitStack; what has to be ended is pushed on it.
    """
    cfg = state.cfg
    if roles:
        connect(state, roles)
        stack.push(partial(shut_down, state.client))
    stack.callback(close_teachers, state)
    with fail_together():
        checks.check_logits(state, probe_ids(state.vocab).tolist())
        if cfg.sequence_parallel > 1:
            checks.check_sequence_shards(state)
        if cfg.pack:
            checks.check_packing(state)
        writes = cfg.on_policy and not cfg.writer_command
        if inputs.tasks or cfg.eval_samples or writes:
            state.whole_student = WholeStudent(
                state.engine, state.sequence_group, state.device, cfg.rollout_replica)
        if writes or cfg.eval_samples or (inputs.tasks and inputs.tasks.writes):
            checks.check_side_by_side(state)
        if cfg.eval_samples:
            state.samples = load_samples(cfg, inputs, state.whole_student)
        if cfg.on_policy:
            state.writer = build_writer(state, inputs)
            stack.callback(state.writer.close)
            check_writing(state.writer)


def resume(state, inputs):
    """Restore the state of a checkpoint, if there is one; return how many steps it has taken."""
    if not inputs.checkpoint:
        for setup in state.teachers:
            setup.source.restore(None, state.engine.module)
        state.taught.terms = {setup.name: 0.0 for setup in state.teachers}
        return 0
    with fail_together(what="checkpoint"):
        start, extra = load_checkpoint(state.engine, inputs.checkpoint, inputs.convert)
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

    if state.writer:
        state.writer.end_when(asked_to_end)
    cfg = state.cfg
    place = state.places.before(start * samples_per_step(cfg, state.engine))
    return load_batches(cfg, inputs, state.engine, state.device, start, place=place,
                        asked_to_end=asked_to_end)


def build_writer(state, inputs):
    cfg = state.cfg
    prompter = build_prompter(cfg, inputs.student, samples_per_step(cfg, state.engine))
    readers = state.sequence_group
    if cfg.pipeline_parallel > 1:
        readers = join_sequence_group(cfg.pipeline_parallel)
    elsewhere = None
    if cfg.writer_command:
        elsewhere = NodeWriter(cfg, state.engine, inputs.student, state.device)
    return Writer(
        cfg, state.student, inputs.student, build_collator(cfg, inputs, state.device), prompter,
        inputs.data.held_out(cfg.rollout_eval), state.device, readers,
        None if elsewhere else state.whole_student, elsewhere)


# --- teachers on ranks of their own ---------------------------------------------------------------


def specs_with_weights(setups):
    """List the TeacherSpecs that the teachers' ranks load: others are read by the student's."""
    return [spec for setup in setups for spec in setup.spec.single() if spec.has_weights]


def announce_teachers(inputs, roles):
    """Tell the ranks that are for teachers alone what to load."""
    if roles and roles.local_rank == 0:
        specs = [spec.to_plain() for spec in specs_with_weights(inputs.teachers)]
        roles.publish("teacher specs", specs)


def connect(state, roles):
    """Reach the teachers of this node, where this rank computes a loss."""
    if not state.student.computes_loss:
        for setup in state.teachers:
            setup.source = SilentTeacher([])
        return
    roles = remote.client_roles(roles, state.cfg.pipeline_parallel)
    specs = specs_with_weights(state.teachers)
    # this step and the next one
    num_requests = 2 * state.engine.gradient_accumulation_steps() * len(specs)
    tensors = max(remote.TENSORS_PER_RESPONSE[spec.output] for spec in specs)
    size = remote.client_size(roles, state.cfg.sequence_parallel)
    state.client = remote.TeacherClient(roles, num_requests, state.device, size, tensors)
    numbers = itertools.count()
    for setup in state.teachers:
        setup.spec = setup.spec.with_models(
            lambda spec: remote.RanksSpec.of_model(spec, next(numbers), state.client))
        setup.source = load_teacher(setup.spec)


def shut_down(client, error_type, *_):
    """Tell the teachers at a clean end; after an error no one waits for them to listen."""
    if client and (error_type is None or issubclass(error_type, SystemExit)):
        client.shut_down()


def close_teachers(state):
    """End the teachers, at a clean end or after an error."""
    for setup in state.teachers:
        setup.source.close()


def serve_teachers(cfg, roles, device):
    """Run a rank that is for teachers alone, until the student's ranks shut down."""
    with fail_together(roles, "inputs"):
        pass  # the student's ranks read them
    with fail_together(roles, "models"):
        teachers = []
        for plain in roles.read("teacher specs"):
            # all members of a replica read the same request
            plain |= {"same_ids": True, "sequence_parallel_size": 1}
            teachers.append(load_teacher(ModelSpec(**plain, device=device)))
    current_watch().training = True
    ignore_stop_signals()  # the student takes a checkpoint first
    roles = remote.client_roles(roles, cfg.pipeline_parallel)
    size = remote.client_size(roles, cfg.sequence_parallel)
    remote.serve_requests(roles, teachers, size, from_hidden=cfg.tiled)
