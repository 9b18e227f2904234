"""Cross-tokenizer knowledge distillation: train a student from frozen teachers on DeepSpeed.

    deepspeed distill.py --student S --teacher T --data corpus.jsonl --learning_rate 1e-4
    deepspeed distill.py --student S --teacher T --data org/name --streaming --learning_rate 1e-4 \\
        --ds_config ds_configs/zero3.json --eval_rows 200 --eval_every 500 --save_every 500 \\
        --output_dir runs/a --export runs/a/student
    deepspeed --num_gpus 2 distill.py --student S --data a.txt --learning_rate 1e-4 --kd_weight 0

Batch sizes, precision, optimizer, schedule and ZeRO live in the ds_config, everything else in the
flags of isogloss/config.py.  The step is `train_step`.  CPU ranks work as GPUs do.
"""

import operator
import os
import sys
import time
from contextlib import ExitStack, closing
from functools import partial, reduce
from typing import NamedTuple

from isogloss.config import Config
from isogloss.flags.parse import prepare_rank

if __name__ == "__main__":  # --help and wrong flags end here, before torch is imported
    prepare_rank()
    Config.read(sys.argv[1:])

import torch.distributed as dist

from isogloss import build, once_in_a_while as once
from isogloss.data.workers import end_workers
from isogloss.doors import door
from isogloss.errors import CannotSave, DataError, EngineError, EngineStopped
from isogloss.inputs import check_inputs
from isogloss.job import launch, rendezvous, watch
from isogloss.job.counts import device_sums
from isogloss.job.files import locked
from isogloss.job.monitors import guarded_monitors
from isogloss.job.step_report import StepReport
from isogloss.job.transfers import Moment, Readback
from isogloss.log import Log
from isogloss.objective.objective import LossTerms, Part
from isogloss.targets import step_parts, teacher_parts

# --- main -----------------------------------------------------------------------------------------


def main(cfg):
    """Train, export, and end; wrong input ends every rank with one line before the first step."""
    launch.silence_libraries()
    with (watch.signal_handlers_restored(), watch.end_with_launchers(),
          guarded_monitors(cfg)):
        roles = launch.join_job(cfg.teacher_ranks if cfg.kd_weight else 0)
        run = build.serve_teachers if roles and roles.role == "teacher" else train_student
        with watch.end_together(roles):
            run(cfg, roles, launch.start_distributed(roles))


def train_student(cfg, roles, device):
    """Run a rank of the student from its inputs to its export."""
    with launch.fail_together(roles, "inputs"):
        inputs = check_inputs(cfg, device, roles)
    build.announce_teachers(inputs, roles)
    launch.seed_draws(cfg.seed + dist.get_rank())  # of dropout; the order of the data has its own
    with launch.fail_together(roles, "models"):
        state = build.build_state(cfg, inputs, device, roles)
    with ExitStack() as to_the_end:
        with ExitStack() as stack:
            build.prepare(state, inputs, roles, stack)
            stack.callback(end_workers)  # before all others: they hold the pipes of a writer, too
            with launch.fail_together(what="lock"):
                if dist.get_rank() == 0:  # now that all that is wrong with the input is known
                    os.makedirs(cfg.output_dir, exist_ok=True)
                    to_the_end.enter_context(locked("--output_dir", cfg.output_dir))
            start = build.resume(state, inputs)
            once.announce(state, inputs, start)
            signals = watch.StopSignals()  # before data workers start, which inherit its handlers
            batches, held_out = build.read_batches(state, inputs, start, signals)
            with launch.fail_alone(DataError), launch.fail_alone(CannotSave, code=1):
                log = train(state, batches, held_out, start, inputs, signals)
        with closing(log):
            once.write_results(state, inputs)
    once.end_unless_taught(state)


def cli(argv=None):
    """Run the command line; wrong input ends it with one line and exit code 2."""
    main(Config.read(sys.argv[1:] if argv is None else argv))


# --- train ----------------------------------------------------------------------------------------


def train(state, batches, held_out, start, inputs, signals):
    """Train from step `start` to the last one; a signal on any rank ends all, with a checkpoint.

    Args:
        batches: iterator over this rank's micro-batches, from `start` on.
        held_out: {source: iterable over its held-out batches}.
        inputs: RunInputs.
        signals: StopSignals.
    Returns:
        Log, which is to be closed.
    """
    cfg = state.cfg
    watch.current_watch().training = True
    rendezvous.set_timeout(rendezvous.TRAINING_TIMEOUT)
    log = Log(cfg, start, inputs.ds_config, state.student.description, state.engine.monitor,
              inputs.data.record())
    times_collectives = once.times_collectives(inputs.ds_config)
    once.end_if_stopped(state, signals.agree(log.failure), log)
    state.steps_taken = start
    try:
        if start == 0:
            state.due = once.judgments(state)
        once.judge(state, held_out, start, log, signals)
        # there is nothing to save yet
        once.end_if_stopped(state, signals.agree(log.failure), log)
        with log:  # which reads the numbers of a step while the device works on the next one
            take_steps(state, batches, held_out, start, log=log, signals=signals,
                       times_collectives=times_collectives)
    # on all ranks, and what was to be written belongs to no step yet
    except EngineStopped:
        once.save_if_new(state, start, log)
        once.end_if_stopped(state, signals.agree(log.failure), log)
        raise
    except DataError as error:
        if dist.get_world_size() == 1:  # else others wait for this rank, and could not save
            once.save_if_new(state, start, log)
        raise DataError(f"{error}; {once.describe_last_checkpoint(state)}") from None
    except EngineError as error:
        once.save_if_new(state, start, log)
        log.close()
        launch.fail(f"{error}; {once.describe_last_checkpoint(state)}", code=error.code)
    log.end_bar()
    return log


def take_steps(state, batches, held_out, start, *, log, signals, times_collectives):
    """Take the steps after `start`, and what comes once in a while.

    Args: see `train`.
        times_collectives: DeepSpeed's comms logger is on.
    """
    cfg = state.cfg
    upcoming = None
    for step in range(start + 1, cfg.steps + 1):
        begin = Moment(state.device)
        signals.step = step
        due = once.judgments(state, step)
        micro_batches = upcoming or next_micro_batches(state, batches, step)
        # Teachers on ranks of their own or on servers run on the next step meanwhile; not across an
        # evaluation, because they respond in the order in which they are asked, and not on what the
        # student will write with the weights that this step makes.
        is_known = not state.writer or not state.writer.starts_batch(step + 1)
        evaluates = "evaluation" in due
        looks_ahead = state.asks_ahead and step < cfg.steps and not evaluates and is_known
        upcoming = next_micro_batches(state, batches, step + 1) if looks_ahead else None
        # also after the last step: a run that goes on with more has what it would have had
        if state.writer and state.writer.writes_ahead(step + 1):
            state.drafts = drawn(state, batches)
            state.writer.begin(state.drafts)
        report = train_step(state, micro_batches)
        state.steps_taken = step
        state.due = due
        state.taught.note(report.counts)
        log.write_later(step, partial(once.timed_metrics, report, begin, Moment(state.device)))
        if state.writer:
            log.write_records("rollouts", step, state.writer.records)
        if state.bad_steps.count == cfg.max_bad_steps:
            once.give_up(state, step, log)
        if times_collectives:
            door("collectives").show_collectives(step, start, cfg.steps)
        once.judge(state, held_out, step, log, signals)
        saves = once.is_every(cfg.save_every, step) or step == cfg.steps
        if saves:
            log.flush()  # so that all ranks hear of a full disk, also in the last step
        stop = signals.agree(log.failure)
        if stop or saves:
            once.save(state, step, log)
        once.end_if_stopped(state, stop, log)


def next_micro_batches(state, batches, step):
    """Return the micro-batches of a step; teachers that work elsewhere start on them at once."""
    micro_batches = state.drafts or drawn(state, batches)
    state.drafts = None
    for batch in micro_batches:
        state.places.note(batch.place)
    if state.writer:  # drafts so far, for which the student writes now
        micro_batches = state.writer.complete(micro_batches, step)
    if state.asks_ahead:  # sources in this process compute when they are read
        for number, setup in enumerate(state.teachers):
            for batch in micro_batches:
                setup.source.request(batch.teachers[number])
    return micro_batches


def drawn(state, batches):
    """Return the next Batches of the data, or Drafts of them where the student writes."""
    begin = time.perf_counter()
    drafts = [next(batches) for _ in range(state.engine.gradient_accumulation_steps())]
    state.data_seconds += time.perf_counter() - begin
    return drafts


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
    counts = reduce(operator.add, [batch.counts for batch in micro_batches]).all_reduce()
    weights = term_weights(state, counts, len(micro_batches))
    # 2. what the teachers say about all micro-batches
    for number, setup in enumerate(state.teachers):
        setup.source.wait([batch.teachers[number] for batch in micro_batches])
    micro_batches = state.uploads.to_device(micro_batches)
    for hook in state.hooks:
        hook.before_step(micro_batches)
    parts = all_parts(state, micro_batches)
    # 3. per micro-batch: the student's forward pass with the losses of all teachers, backward;
    # then the optimizer
    terms = (loss_terms(state, batch, of_batch, weights)
             for batch, of_batch in zip(micro_batches, parts))
    sums, local_norm = state.student.train(micro_batches, terms)
    for setup in state.teachers:
        setup.source.release()  # the memory of its outputs may be written over
        if engine.was_step_applied():
            setup.source.follow(engine.module)
    # 4. what comes of global means, once the device has computed them
    sums = Readback(device_sums(sums.flatten()).view_as(sums))
    state.bad_steps.note(engine, sums, [setup.name for setup in state.teachers])
    report = StepReport(state, counts, sums, kd_weights(state))
    report.add_engine(lr, local_norm)
    for hook in state.hooks:
        hook.after_step(report, micro_batches, parts)
    return report


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


def all_parts(state, micro_batches):
    """Return an iterable: for each micro-batch the Part of every teacher, without its weights.

    On a rank that computes no loss there are none; it helps to run the teachers that it shares.
    """
    if state.student.computes_loss:
        return step_parts(state.teachers, micro_batches, state.student)
    for number, setup in enumerate(state.teachers):
        teacher_parts(setup, [batch.teachers[number] for batch in micro_batches])
    return []


def loss_terms(state, batch, parts, weights):
    """Return the LossTerms of a micro-batch from the Part of every teacher."""
    for part, weight in zip(parts, weights.kd):
        part.weight = weight
    if len(parts) > 1 and state.cfg.teacher_weights != "fixed":
        from isogloss.teachers.text_scores import weigh_by_confidence

        weigh_by_confidence(parts, select=state.cfg.teacher_weights == "select")
    parts = parts or [Part(batch=batch.student)]  # the text alone
    parts[0].ce_weight = weights.ce
    return LossTerms(parts, state.sequence_group, state.engine.module.loss_parameters(),
                     dump=state.dump_of(batch))


if __name__ == "__main__":
    cli()
    dist.destroy_process_group()
