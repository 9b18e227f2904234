"""Cross-tokenizer knowledge distillation: train a student from frozen teachers on DeepSpeed.

    deepspeed distill.py --student S --teacher T --data corpus.jsonl --learning_rate 1e-4
    deepspeed distill.py --student S --teacher T --data org/name --streaming --learning_rate 1e-4 \\
        --ds_config ds_configs/zero3.json --eval_rows 200 --eval_every 500 --save_every 500 \\
        --output_dir runs/a --export runs/a/student
    deepspeed --num_gpus 2 distill.py --student S --data a.txt --learning_rate 1e-4 --kd_weight 0

Batch sizes, precision, optimizer, schedule and ZeRO live in the ds_config, everything else in the
flags of isogloss/config.py.  The step is `train_step`.  CPU ranks work as GPUs do.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import transformers

from isogloss.checkpoints.checkpoint import (
    CannotSave,
    checkpoint_name,
    load_checkpoint,
    save_checkpoint,
)
from isogloss.checkpoints.run_identity import checkpoint_folder, run_identity, run_layout
from isogloss.checks import check_logits, check_packing, check_sequence_shards, check_side_by_side
from isogloss.config import GROUPS, Config
from isogloss.data.rollouts import build_prompter
from isogloss.data.stream import Places
from isogloss.data.workers import end_workers
from isogloss.errors import DataError
from isogloss.evaluation.eval_samples import EvalSamples, load_samples
from isogloss.evaluation.evaluate import evaluate
from isogloss.evaluation.task_suite import TaskSuite
from isogloss.export import export_model, export_projection, projection_path
from isogloss.flags.parse import parse_flags
from isogloss.inputs import build_collator, check_inputs, load_batches, samples_per_step
from isogloss.job.counts import device_sums, global_sums
from isogloss.job.flat import to_device
from isogloss.job.launch import (
    fail,
    fail_alone,
    fail_together,
    join_store,
    silence_libraries,
    start_distributed,
)
from isogloss.job.layout import split_ranks
from isogloss.job.rendezvous import LOADING_TIMEOUT, TRAINING_TIMEOUT, set_timeout, values_of_ranks
from isogloss.job.sequence_group import SequenceGroup, join_sequence_group
from isogloss.job.step_report import StepReport, gradient_norm_of, named
from isogloss.job.transfers import Moment, Readback, Uploads
from isogloss.job.watch import (
    FAILED,
    StopSignals,
    current_watch,
    end_together,
    end_with_launchers,
    ignore_stop_signals,
    signal_handlers_restored,
)
from isogloss.log import TIMED_STEPS, Log, speed_metrics, time_collectives
from isogloss.models.pretrained import load_config
from isogloss.objective.objective import LossTerms, TeacherTerm, in_windows
from isogloss.student.engine import (
    EngineRunner,
    StudentRunner,
    StudentWithLoss,
    attach_projection,
    follow_schedule,
    load_student,
    start_engine,
    window_ends,
)
from isogloss.student.finite import BadSteps, has_finite_state
from isogloss.student.pipeline import start_pipeline
from isogloss.student.stages import probe_ids
from isogloss.student.ulysses import ATTENTION, register_attention
from isogloss.student.whole_student import WholeStudent
from isogloss.targets import step_targets, teacher_targets, weigh_by_confidence
from isogloss.teachers.mixing import dynamic_scale
from isogloss.teachers.remote import (
    TENSORS_PER_RESPONSE,
    TeacherClient,
    client_roles,
    client_size,
    serve_requests,
)
from isogloss.teachers.sources import SilentTeacher, load_silent, load_teacher
from isogloss.teachers.specs import TeacherSpec
from isogloss.writing.on_policy import Writer, check_writing, evaluate_rollouts
from isogloss.writing.rollout_ratio import weigh_by_ratio
from isogloss.writing.writer_process import WriterError, WriterStopped

# --- main -----------------------------------------------------------------------------------------


def main(cfg):
    """Train, export, and end; wrong input ends every rank with one line before the first step."""
    silence_libraries()
    with signal_handlers_restored(), end_with_launchers():
        try:
            roles = split_ranks(cfg.teacher_ranks) if cfg.teacher_ranks and cfg.kd_weight else None
            join_store()
        except ValueError as error:
            fail(str(error))
        run = serve_teachers if roles and roles.role == "teacher" else train_student
        with end_together(roles):
            run(cfg, roles, start_distributed(roles))


def train_student(cfg, roles, device):
    """Run a rank of the student from its inputs to its export."""
    with fail_together(roles, "inputs"):
        inputs = check_inputs(cfg, device, roles)
    if roles and roles.local_rank == 0:
        specs = [spec.to_plain() for spec in remote_specs(inputs.teachers)]
        roles.publish("teacher specs", specs)
    # of dropout, different on every rank; the order of the data has a seed of its own
    transformers.set_seed(cfg.seed + dist.get_rank())
    with fail_together(roles, "models"):
        state = build_state(cfg, inputs, device, roles)
    with ExitStack() as stack:
        stack.callback(end_workers)
        if roles:
            connect(state, roles)
            stack.push(partial(shut_down, state.client))
        stack.callback(close_teachers, state)
        with fail_together():
            check_logits(state, probe_ids(state.vocab).tolist())
            if cfg.sequence_parallel > 1:
                check_sequence_shards(state)
            if cfg.pack:
                check_packing(state)
            writes = cfg.on_policy and not cfg.rollout_command
            if inputs.tasks or cfg.eval_samples or writes:
                state.whole_student = WholeStudent(
                    state.engine, state.sequence_group, device, cfg.rollout_replica)
            if writes or cfg.eval_samples or (inputs.tasks and inputs.tasks.writes):
                check_side_by_side(state)
            if cfg.eval_samples:
                state.samples = load_samples(cfg, inputs, state.whole_student)
            if cfg.on_policy:
                state.writer = build_writer(state, inputs)
                stack.callback(state.writer.close)
                check_writing(state.writer)
        start = 0  # steps taken so far
        if inputs.checkpoint:
            with fail_together(what="checkpoint"):
                start, extra = load_checkpoint(state.engine, inputs.checkpoint, inputs.convert)
            state.scales = extra.get("scales", {})
            state.places.note(extra.get("place"))
            if state.writer:
                state.writer.load_state(extra.get("rollouts", []))
            state.last_checkpoint = inputs.checkpoint
            if cfg.extend_schedule:
                follow_schedule(state.engine)
        signals = StopSignals()  # before data workers start, which inherit its handlers
        if state.writer:
            state.writer.end_when(lambda: bool(signals.received))
        batches, held_out = load_batches(
            cfg, inputs, state.engine, device, start,
            state.places.before(start * samples_per_step(cfg, state.engine)),
            lambda: bool(signals.received))
        with fail_alone(DataError), fail_alone(CannotSave, code=1):
            train(state, batches, held_out, start, inputs.ds_config, signals)
    if cfg.learn_projection or cfg.export:
        end_unless_finite(state, cfg.steps)
        write_results(state, inputs)


def write_results(state, inputs):
    """Write what a run leaves behind beside its checkpoints; all ranks take part.

    Where that fails, all ranks end with exit code 1 and one line: the last step is saved, so the
    same command tries again.
    """
    cfg = state.cfg
    if cfg.learn_projection:
        learned = inputs.teachers[0].loss.learned_projection
        end_if_failed(export_projection(state.engine, learned, projection_path(cfg)))
    if cfg.export:
        end_if_failed(export_model(state.engine, inputs.student, cfg))


def end_if_failed(error):
    if error:
        fail(f"{error}; the last checkpoint holds the result, and once this is repaired the same "
             "command writes it", code=1)


def cli(argv=None):
    """Run the command line; wrong input ends it with one line and exit code 2."""
    try:
        cfg = parse_flags(Config, sys.argv[1:] if argv is None else argv, groups=GROUPS,
                          file_flag="config")
    except ValueError as error:
        fail(str(error))
    main(cfg)


# --- train ----------------------------------------------------------------------------------------


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
        uploads: Uploads of the micro-batches.
    """

    cfg: Config
    student: StudentRunner
    teachers: list
    vocab: int
    device: torch.device
    client: TeacherClient | None = None
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
    uploads: Uploads = field(init=False)

    def __post_init__(self):
        self.uploads = Uploads(self.device)

    @property
    def engine(self):
        """DeepSpeed's engine around the student, or around this rank's stage of it."""
        return self.student.engine

    @property
    def asks_ahead(self):
        """Whether a teacher works elsewhere, beside the student, and so can be asked before."""
        is_served = any(spec.engine == "served" for spec in single_specs(self.teachers))
        return bool(self.client) or is_served


def train(state, batches, held_out, start, ds_config, signals):
    """Train from step `start` to the last one; a signal on any rank ends all, with a checkpoint.

    Args:
        batches: iterator over this rank's micro-batches, from `start` on.
        held_out: iterable over its held-out batches.
        signals: StopSignals.
    """
    cfg = state.cfg
    current_watch().training = True
    set_timeout(TRAINING_TIMEOUT)
    log = Log(cfg, start, ds_config, state.student.description, state.engine.monitor)
    times_collectives = ds_config.get("comms_logger", {}).get("enabled")
    if times_collectives:
        time_collectives()
    end_if_stopped(state, signals.agree(log.failure), log)
    state.steps_taken = start
    try:
        if start == 0:
            if cfg.holds_out:
                log_evaluation(state, held_out, 0, log)
            if state.tasks:
                log_tasks(state, 0, log, lambda: bool(signals.received))
            # there is nothing to save yet
            end_if_stopped(state, signals.agree(log.failure), log)
        with log:  # which reads the numbers of a step while the device works on the next one
            take_steps(state, batches, held_out, start, log, signals, times_collectives)
    except WriterStopped:  # on all ranks, and what was to be written belongs to no step yet
        saved = state.last_checkpoint and state.last_checkpoint.name
        if state.steps_taken > start and saved != checkpoint_name(state.steps_taken):
            save(state, state.steps_taken, log)
        end_if_stopped(state, signals.agree(log.failure), log)
        raise
    except WriterError as error:
        log.close()
        fail(f"{error}; {describe_last_checkpoint(state)}", code=1)
    log.close()


def take_steps(state, batches, held_out, start, log, signals, times_collectives):
    """Take the steps after `start`, and what comes once in a while.

    Args: see `train`.
        times_collectives: DeepSpeed's comms logger is on.
    """
    cfg = state.cfg
    upcoming = None
    for step in range(start + 1, cfg.steps + 1):
        begin = Moment(state.device)
        evaluates = cfg.holds_out and (is_every(cfg.eval_every, step) or step == cfg.steps)
        micro_batches = upcoming or next_micro_batches(state, batches, step)
        # Teachers on ranks of their own or on servers run on the next step meanwhile; not across an
        # evaluation, because they respond in the order in which they are asked, and not on what the
        # student will write with the weights that this step makes.
        is_known = not state.writer or state.writer.staleness(step + 1) > 0
        looks_ahead = state.asks_ahead and step < cfg.steps and not evaluates and is_known
        upcoming = next_micro_batches(state, batches, step + 1) if looks_ahead else None
        report = train_step(state, micro_batches)
        state.steps_taken = step
        log.write_later(step, partial(timed_metrics, report, begin, Moment(state.device)))
        if state.writer:
            log.write_rollouts(step, state.writer.records)
        if state.bad_steps.count == cfg.max_bad_steps:
            give_up(state, step, log)
        if times_collectives and step == min(start + TIMED_STEPS, cfg.steps):
            deepspeed.comm.log_summary()
            deepspeed.comm.comm.comms_logger.enabled = False
        if evaluates:
            log_evaluation(state, held_out, step, log)
        if state.tasks and (is_every(cfg.eval_task_every, step) or step == cfg.steps):
            log_tasks(state, step, log, lambda: bool(signals.received))
        saves = is_every(cfg.save_every, step) or step == cfg.steps
        if saves:
            log.flush()  # so that all ranks hear of a full disk, also in the last step
        stop = signals.agree(log.failure)
        if stop or saves:
            save(state, step, log)
        end_if_stopped(state, stop, log)


def timed_metrics(report, begin, end):
    """Return the metrics of a step with its speed.

    Args:
        report: StepReport; begin, end: Moments.
    """
    state = report.state
    metrics = report.metrics()
    seconds = begin.seconds_until(end)
    speed = speed_metrics(state.student.num_parameters, state.device, metrics["tokens"], seconds)
    return metrics | speed


def is_every(num_steps, step):
    """Tell whether a step is one of every so many; 0: of none."""
    return num_steps > 0 and step % num_steps == 0


def end_if_stopped(state, stop, log):
    """End this rank, as all others, for what they have agreed on; see `StopSignals.agree`."""
    if not stop:
        return
    log.close()
    code = 1 if stop == FAILED else 128 + stop
    if log.failure:
        fail(f"{log.failure}, so the job ends; {describe_last_checkpoint(state)}; once this is "
             "repaired the same command goes on", code=code)
    if stop != FAILED:
        current_watch().say_who_died()
    raise SystemExit(code)


def next_micro_batches(state, batches, step):
    """Return the micro-batches of a step; teachers that work elsewhere start on them at once."""
    num = state.engine.gradient_accumulation_steps()
    micro_batches = [next(batches) for _ in range(num)]
    for batch in micro_batches:
        state.places.note(batch.place)
    if state.writer:  # drafts so far, for which the student writes now
        micro_batches = state.writer.complete(micro_batches, step)
    if state.asks_ahead:  # sources in this process compute when they are read
        for number, setup in enumerate(state.teachers):
            for batch in micro_batches:
                setup.source.request(batch.teachers[number])
    return micro_batches


def train_step(state, micro_batches):
    """Take one optimizer step.

    Args:
        micro_batches: this rank's Batches, one per accumulation step.
    Returns:
        StepReport, whose numbers the device may still have to compute.
    """
    engine = state.engine
    lr = engine.get_lr()[-1]  # of this step; engine.step() moves the schedule on
    # 1. how many terms each loss has over the whole step, on all ranks
    counts = sum_counts(micro_batches).all_reduce()
    weights = term_weights(state, counts, len(micro_batches))
    # 2. what the teachers say about all micro-batches
    micro_batches = state.uploads.to_device(micro_batches)
    rollout_metrics = {}
    if state.writer:
        micro_batches, rollout_metrics = weigh_rollouts(state, micro_batches)
    targets = all_targets(state, micro_batches)
    # 3. per micro-batch: the student's forward pass with the losses of all teachers, backward;
    # then the optimizer
    terms = (loss_terms(state, batch, batch_targets, weights)
             for batch, batch_targets in zip(micro_batches, targets))
    terms = in_windows(terms, window_ends(state.cfg.head_gradient, engine, state.device))
    sums, local_norm = state.student.train(micro_batches, terms)
    release_teachers(state)
    # 4. what comes of global means, once the device has computed them
    sums = Readback(device_sums(sums.flatten()).view(-1, 3))
    state.bad_steps.note(engine, sums, teacher_names(state))
    report = StepReport(state, counts, sums, kd_weights(state))
    report.others |= state.student.metrics() | {"lr": lr}
    report.others["grad_norm"] = gradient_norm_of(engine, local_norm)
    report.others["skipped_steps"] = engine.skipped_steps
    if state.writer:
        report.others |= rollout_metrics
        report.others |= state.writer.describe(micro_batches, counts, targets, teacher_names(state))
    if state.cfg.dynamic_scale:
        follow_scales(state, report)
    return report


def sum_counts(micro_batches):
    """Return the Counts of this rank's part of a step."""
    counts = micro_batches[0].counts
    for batch in micro_batches[1:]:
        counts = counts + batch.counts
    return counts


class TermWeights(NamedTuple):
    """Hold the factors that turn local sums into parts of global means.

    Attributes:
        ce: of the cross-entropy.
        kd: of the distillation loss of each teacher.
    """

    ce: float
    kd: list


def term_weights(state, counts, num_micro_batches):
    """Return the TermWeights of a step.

    The engine divides gradients by the micro-batches and averages them over ranks (in a pipeline
    over those of a stage); ranks * micro-batches / count undoes both, so the mean is over all terms
    of the step, wherever they are.
    """
    scale = state.student.averaged_ranks * num_micro_batches
    ce_weight = state.cfg.ce_weight * scale / max(counts.ce_tokens, 1)
    of_teachers = []
    for weight, pair in zip(kd_weights(state), counts.pairs):
        of_teachers.append(weight * scale / max(pair.kd_terms, 1))
    return TermWeights(ce_weight, of_teachers)


def kd_weights(state):
    """Return the weight of each teacher's mean distillation loss in this step."""
    weights = []
    for setup in state.teachers:
        weights.append(setup.cfg.kd_weight * state.scales.get(setup.name, 1.0))
    return weights


def all_targets(state, micro_batches):
    """Return an iterable: for each micro-batch the TeacherTarget of every teacher.

    On a rank that computes no loss there are none; it helps to run the teachers that it shares.
    """
    if state.student.computes_loss:
        return step_targets(state.teachers, micro_batches, state.student.loss_group)
    for number, setup in enumerate(state.teachers):
        teacher_targets(setup, [batch.teachers[number] for batch in micro_batches])
    return []


def loss_terms(state, batch, targets, weights):
    """Return the LossTerms of a micro-batch from the TeacherTarget of every teacher."""
    teachers = batch.teachers
    if len(teachers) > 1 and state.cfg.teacher_weights != "fixed":
        teachers = weigh_by_confidence(state.cfg, teachers, targets)
    terms = []
    for teacher_batch, target, weight in zip(teachers, targets, weights.kd):
        terms.append(TeacherTerm(teacher_batch, target, weight))
    return LossTerms(weights.ce, terms, batch.student.tiles, state.sequence_group,
                     state.engine.module.loss_parameters())


def release_teachers(state):
    """Allow the memory of the teachers' outputs to be written over."""
    for setup in state.teachers:
        setup.source.release()


def close_teachers(state):
    """End the teachers, at a clean end or after an error."""
    for setup in state.teachers:
        setup.source.close()


def follow_scales(state, report):
    """Set the factors of the next step by this one's losses, for which the host has to wait.

    A step without a term of one of the two has no ratio, nor has one that was skipped.
    """
    for number, setup in enumerate(state.teachers):
        kd = report.kd(number) or 0  # None: no term
        if kd > 0 and (report.ce or 0) > 0 and state.engine.was_step_applied():
            scale = dynamic_scale(torch.tensor(report.ce), torch.tensor(kd))
            state.scales[setup.name] = float(scale)


def teacher_names(state):
    return [setup.name for setup in state.teachers]


# --- on-policy: the student writes ----------------------------------------------------------------


def build_writer(state, inputs):
    """Return the Writer of a run."""
    cfg = state.cfg
    prompter = build_prompter(cfg, inputs.student, samples_per_step(cfg, state.engine))
    return Writer(
        cfg, state.engine, inputs.student, build_collator(cfg, inputs, state.device), prompter,
        inputs.data.held_out_reader, inputs.data.held_out_data, state.device, state.sequence_group,
        None if cfg.rollout_command else state.whole_student)


def weigh_rollouts(state, micro_batches):
    """Check rollouts that were just written, weigh older ones; return (micro-batches, metrics)."""
    if micro_batches[0].rollout_age:
        return weigh_by_ratio(state.cfg, state.engine, micro_batches, state.sequence_group)
    metrics = {}
    if state.writer.has_other_weights():
        metrics = state.writer.gap(micro_batches)
        gap = metrics["rollout/logp_gap"]
        if gap is not None and not gap <= state.cfg.max_logp_gap:  # NaN too
            fail(f"what writes has other weights than the student: the log-probabilities of its "
                 f"tokens differ by {gap:.3g} nats on average (--max_logp_gap "
                 f"{state.cfg.max_logp_gap}); {describe_last_checkpoint(state)}", code=1)
    return micro_batches, metrics


# --- once in a while: evaluate, save, give up; all ranks take part --------------------------------


def log_evaluation(state, held_out, step, log):
    """Evaluate and log what comes out."""
    log.flush()
    log.write(step, run_evaluation(state, held_out))
    if state.samples:
        log.write_samples(step, state.samples.write())
    if state.writer and state.cfg.rollout_eval:
        log.write_rollouts(step, state.writer.records)


def run_evaluation(state, held_out):
    """Return held-out metrics."""
    state.engine.eval()
    # one batch at a time is on the device
    batches = (to_device(batch, state.device) for batch in held_out)
    student, of_teachers = evaluate(batches, state.student, state.teachers, state.sequence_group)
    state.engine.train()
    metrics = dict(student)
    for setup, of_teacher in zip(state.teachers, of_teachers):
        metrics |= named(state, setup, of_teacher)
    if state.writer and state.cfg.rollout_eval:
        metrics |= evaluate_rollouts(state.writer, state.teachers)
    return {f"eval/{key}": value for key, value in metrics.items()}


def log_tasks(state, step, log, stop):
    """Judge the student by --eval_tasks, and log what comes out.

    Args:
        stop: () -> this rank has been asked to end; then nothing is logged.
    """
    log.flush()
    with state.whole_student.model() as (model, agree):
        metrics, records = state.tasks.run(
            model, global_sums, agree, stop)
    if metrics:
        log.write(step, metrics)
        of_ranks = values_of_ranks(records)
        log.write_task_items(step, [record for of_rank in of_ranks for record in of_rank])


def save(state, step, log):
    """Write a checkpoint of the last good step, which `step` is or bad steps lie in between.

    Bad steps change nothing, so the state is still that of the good one.  A resumed run meets them
    again.
    """
    log.flush()  # of a step that is in a checkpoint, the metrics are on disk
    cfg = state.cfg
    folder = checkpoint_folder(cfg)
    good_step = step - state.bad_steps.count
    keep = cfg.keep_checkpoints
    if state.bad_steps.count:
        exists = state.last_checkpoint and state.last_checkpoint.name == checkpoint_name(good_step)
        if exists or good_step == 0:
            return
        keep += 1  # weights can be finite and useless: the one before stays
    end_unless_finite(state, step, log)
    extra = {"scales": state.scales}
    extra["place"] = state.places.before(good_step * samples_per_step(cfg, state.engine))
    if state.writer:
        extra["rollouts"] = state.writer.state()
    try:
        save_checkpoint(state.engine, folder, good_step, run_identity(cfg), run_layout(cfg), keep,
                        extra)
    except CannotSave as error:
        raise CannotSave(f"{error}; {describe_last_checkpoint(state)}; once this is repaired the "
                         "same command goes on") from None
    state.last_checkpoint = folder / checkpoint_name(good_step)


def give_up(state, step, log):
    """Save the state before the bad steps, which is that after them, and end with exit code 1."""
    save(state, step, log)
    log.close()
    bad = state.bad_steps
    steps = f"step {step}" if bad.count == 1 else f"steps {step - bad.count + 1} to {step}"
    fail(f"{steps} skipped, not finite: {bad.causes}; the job ends after {bad.count} such steps in "
         f"a row (--max_bad_steps), which have changed no weight; "
         f"{describe_last_checkpoint(state)}; check the data and the teacher of these steps and "
         "the learning rate before them, or walk over them with a larger --max_bad_steps", code=1)


def end_unless_finite(state, step, log=None):
    """End the job with exit code 1 if weights or optimizer state on any rank are not finite."""
    num_bad_ranks = global_sums([not has_finite_state(state.engine)]).sum()
    if num_bad_ranks:
        if log:
            log.close()
        fail(f"step {step}: the weights or the optimizer's state are not finite, so nothing is "
             f"saved; {describe_last_checkpoint(state)}; lower the learning rate", code=1)


def describe_last_checkpoint(state):
    if state.last_checkpoint is None:
        return "there is no checkpoint"
    return f"the last good checkpoint is {state.last_checkpoint}"


# --- build ----------------------------------------------------------------------------------------


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
        student = start_whole(cfg, model, vocab, inputs)
    set_timeout(LOADING_TIMEOUT)  # of DeepSpeed's own groups too
    if not roles:
        load = load_teacher if student.computes_loss else load_silent
        for setup in inputs.teachers:
            setup.source = load(setup.spec)
    return TrainState(cfg, student, inputs.teachers, vocab, device, sequence_group=sequence_group,
                      tasks=inputs.tasks)


def start_whole(cfg, model, vocab, inputs):
    """Start the engine of a student that is whole on each rank or sharded by ZeRO-3.

    Returns:
        EngineRunner.
    """
    module = StudentWithLoss(model, vocab, cfg.tiled, cfg.activation_offload)
    attach_projection(module, inputs.teachers, model.device)
    dist.barrier()  # waits for slow loads: DeepSpeed's own groups do not wait for long
    engine = start_engine(module, inputs.ds_config, cfg.ds_config, cfg.projection_learning_rate)
    return EngineRunner(engine, vocab)


def single_specs(setups):
    """List the TeacherSpecs to load, members of ensembles one by one."""
    specs = []
    for setup in setups:
        specs += setup.spec.single()
    return specs


# --- teachers on ranks of their own ---------------------------------------------------------------


def remote_specs(setups):
    """List the TeacherSpecs that the teachers' ranks load: caches are read by the student's."""
    return [spec for spec in single_specs(setups) if not spec.cache]


def connect(state, roles):
    """Reach the teachers of this node, where this rank computes a loss."""
    if not state.student.computes_loss:
        for setup in state.teachers:
            setup.source = SilentTeacher([])
        return
    roles = client_roles(roles, state.cfg.pipeline_parallel)
    specs = remote_specs(state.teachers)
    # this step and the next one
    num_requests = 2 * state.engine.gradient_accumulation_steps() * len(specs)
    tensors = max(TENSORS_PER_RESPONSE[spec.output] for spec in specs)
    size = client_size(roles, state.cfg.sequence_parallel)
    state.client = TeacherClient(roles, num_requests, state.device, size, tensors)
    # from here on the same specs describe how this rank reaches the loaded teachers
    for number, spec in enumerate(specs):
        spec.engine = "remote"
        spec.number = number
        spec.client = state.client
    for setup in state.teachers:
        setup.source = load_teacher(setup.spec)


def shut_down(client, error_type, *_):
    """Tell the teachers at a clean end; after an error no one waits for them to listen."""
    if client and (error_type is None or issubclass(error_type, SystemExit)):
        client.shut_down()


def serve_teachers(cfg, roles, device):
    """Run a rank that is for teachers alone, until the student's ranks shut down."""
    with fail_together(roles, "inputs"):
        pass  # the student's ranks read them
    with fail_together(roles, "models"):
        teachers = []
        for plain in roles.read("teacher specs"):
            spec = TeacherSpec.from_plain(plain)
            spec.device = device
            spec.same_ids = True  # all members of a replica read the same request
            spec.sequence_parallel_size = 1
            teachers.append(load_teacher(spec))
    current_watch().training = True
    ignore_stop_signals()  # the student takes a checkpoint first
    roles = client_roles(roles, cfg.pipeline_parallel)
    size = client_size(roles, cfg.sequence_parallel)
    serve_requests(roles, teachers, size, from_hidden=cfg.tiled)


if __name__ == "__main__":
    cli()
    dist.destroy_process_group()
