"""What a run does once in a while: evaluate, save, give up, export; all ranks take part.

Tests: tests/test_evaluate.py, tests/test_checkpoint.py, tests/test_finite.py.
"""

import operator
import sys
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from isogloss.checkpoints.checkpoint import checkpoint_name, save_checkpoint
from isogloss.checkpoints.model_card import license_rules, worse_teachers
from isogloss.checkpoints.run_identity import checkpoint_folder, run_identity, run_layout
from isogloss.doors import door
from isogloss.errors import CannotSave
from isogloss.evaluation.evaluate import evaluate, metrics_of
from isogloss.flags.model_names import without_secrets
from isogloss.flags.terminal import one_line, unguarded
from isogloss.inputs import num_readers
from isogloss.job.columns import to_device
from isogloss.job.counts import global_sums
from isogloss.job.launch import fail
from isogloss.job.step_report import named
from isogloss.job.watch import FAILED, current_watch, print_line
from isogloss.log import NOTHING_TAUGHT, WHERE_TO_LOOK
from isogloss.student.finite import has_finite_state

FAR = 0.2  # bits per byte, between a student at its end and a teacher
LARGER = "a larger --kd_weight, such as 4, may teach more"
AS_NEW = 4  # readings of a text that teach nearly as much as new texts (arXiv:2305.16264)


def announce(state, inputs, start):
    """Say what the run is about to do."""
    cfg = state.cfg
    engine = state.engine
    dtype = next(engine.module.parameters()).dtype
    if state.device.type == "cpu" and dtype != torch.float32:
        door("half_on_cpu").tell("student", cfg.student, dtype, "no bf16, no fp16 in --ds_config")
    model = (f"student {cfg.student} ({in_millions(state.student.num_weights)} weights, "
             f"{str(dtype).removeprefix('torch.')})")
    for setup in state.teachers:
        model += f", teacher {setup.name} ({setup.cfg.loss}, weight {setup.cfg.kd_weight:g})"
    tell(model if state.teachers else f"{model}, no teacher (CE only)")
    batch = state.samples_per_step
    micro_batch = engine.train_micro_batch_size_per_gpu()
    shape = f"{num_readers(cfg)} x {micro_batch} x {engine.gradient_accumulation_steps()}"
    length = f"{counted(cfg.steps, 'step')} of {counted(batch, 'sample')} ({shape})"
    read = [] if cfg.streaming else epochs_of(inputs.data, cfg.steps * batch)
    if read:
        length += " = " + ", ".join(
            f"{epochs:.3g} epochs of {number:,}" + (f" of {name}" if name else "")
            for epochs, number, name in read)
    else:
        length += " of a stream"
    ranks = counted(dist.get_world_size(), "rank")
    tell(f"{length}, ZeRO {engine.zero_optimization_stage()} on {ranks}; metrics in "
         f"{cfg.output_dir}")
    for line in texts_read_again(state, read):
        tell(line)
    if state.writer:
        from isogloss.flags.on_policy import intention

        tell(intention(cfg))
    if start:
        tell(f"goes on from {state.last_checkpoint} (step {start:,})")


def epochs_of(data, num_samples):
    """Return (epochs, samples, name) of each source of the RunData, of so many samples in all."""
    weights = data.weights()
    return [(num_samples * weight / sum(weights) / its.num_samples, its.num_samples,
             its.source.name) for its, weight in zip(data.sources, weights)]


def texts_read_again(state, read):
    """Return a line on the weight of teachers if a run reads texts often; [] otherwise.

    Where students of 0.3 million weights read texts up to 16 times, weight 4 taught most.

    Args:
        read: of epochs_of.
    """
    most = max((epochs for epochs, *_ in read), default=0.0)
    if most <= AS_NEW or state.cfg.on_policy or not light_teachers(state):
        return []
    return [f"texts are read {most:.3g} times: {LARGER}"]


def light_teachers(state):
    """Return the teachers that count no more than the text, where the weights say so."""
    cfg = state.cfg
    return [setup for setup in state.teachers
            if cfg.ce_weight and not cfg.dynamic_scale and setup.cfg.kd_weight <= 1]


def tell(text):
    """Print a line on rank 0's terminal: of what goes well, so the program is not named."""
    if dist.get_rank() == 0:
        # above the bar, if there is one
        tqdm.write(one_line(without_secrets(text)), file=unguarded(sys.stderr))


def counted(number, thing):
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def in_millions(number):
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def write_results(state, inputs):
    """Write what a run leaves behind beside its checkpoints; all ranks take part.

    Where that fails, all ranks end with exit code 1 and one line: the last step is saved, so the
    same command tries again.
    """
    cfg = state.cfg
    if cfg.learn_projection or cfg.export:
        end_unless_finite(state, cfg.steps)
    if cfg.learn_projection:
        from isogloss.checkpoints.export_files import projection_path
        from isogloss.checkpoints.export_projection import export_projection

        learned = inputs.teachers[0].loss.learned_projection
        end_if_failed(state, export_projection(state.engine, learned, projection_path(cfg)))
    if cfg.export:
        from isogloss.checkpoints.export_files import export_model

        end_if_failed(state, export_model(state.engine, inputs.student, cfg))
        tell(f"exported to {cfg.export}")
        for rule in license_rules(cfg) if dist.get_rank() == 0 else ():
            tell(f"license of {rule}")


def end_unless_taught(state):
    """Say which teachers have not taught anything; if none has, end with exit code 1."""
    idle = [name for name, num_terms in state.taught.terms.items() if not num_terms]
    if not idle:
        return
    if len(idle) == len(state.taught.terms):
        fail(f"{NOTHING_TAUGHT}, so nothing was learned from a teacher; {WHERE_TO_LOOK}", code=1)
    if dist.get_rank() == 0:
        print_line(f"{NOTHING_TAUGHT} of {', '.join(idle)}; {WHERE_TO_LOOK}")


def end_if_failed(state, error):
    if error:
        fail(f"{error}; the last checkpoint holds the result, and once this is repaired "
             f"{same_command(state)} writes it", code=1)


def timed_metrics(report, begin, end):
    """Return the metrics of a step with its speed: tokens of the student, on all ranks.

    Args:
        report: StepReport; begin, end: Moments.
    """
    state = report.state
    metrics = report.metrics()
    seconds = begin.seconds_until(end)
    state.waiting.note(metrics, seconds)
    tokens = metrics["tokens"]
    speed = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    if state.device.type == "cpu":
        return metrics | speed | {"processor_seconds": end.processor_time - begin.processor_time}
    peaks = door("peaks").of_step(state.student.num_parameters, tokens, seconds)
    return metrics | speed | peaks


def is_every(num_steps, step):
    return num_steps > 0 and step % num_steps == 0


def end_if_stopped(state, stop, log):
    """End this rank, as all others, for what they have agreed on; see `StopSignals.agree`."""
    if not stop:
        return
    log.close()
    code = 1 if stop == FAILED else 128 + stop
    if log.failure:
        fail(f"{log.failure}, so the job ends; {describe_last_checkpoint(state)}; once this is "
             f"repaired {same_command(state)} goes on", code=code)
    if stop != FAILED:
        current_watch().say_who_died()
        if dist.get_rank() == 0:
            print(f"saved {state.last_checkpoint}; {same_command(state)} goes on"
                  if state.last_checkpoint else "nothing to save yet", file=sys.stderr)
    raise SystemExit(code)


def judgments(state, step=0):
    """List what judges the student after a step, or before the first one."""
    cfg = state.cfg
    is_end = step in (0, cfg.steps)
    due = []
    if cfg.holds_out and (is_end or is_every(cfg.eval_every, step)):
        due.append("evaluation")
    if state.tasks and (is_end or is_every(cfg.eval_task_every, step)):
        due.append("tasks")
    return due


def judge(state, held_out, step, log, signals):
    """Let what is due judge the student; a signal may leave some of it to the run that resumes."""
    # of a checkpoint, what is due may be none of this command line
    if "evaluation" in state.due and state.cfg.holds_out:
        log_evaluation(state, held_out, step, log)
        state.due.remove("evaluation")
    if "tasks" in state.due and state.tasks:
        from isogloss.tasks import log_tasks

        if log_tasks(state, step, log, lambda: bool(signals.received)):
            state.due.remove("tasks")


def log_evaluation(state, held_out, step, log):
    """Evaluate and log what comes out."""
    log.flush()
    metrics = run_evaluation(state, held_out)
    log.write(step, metrics)
    first_bits = log.first_bits if step else None
    names = [setup.name for setup in state.teachers]
    line = summary(metrics, first_bits, names, held_out)
    log.say(step, line + (state.writer.summary(metrics) if state.writer else ""))
    for worse in () if step else worse_teachers(metrics, *names[:1]):
        tell(f"warning: {worse}")
    for far in far_teachers(state, metrics) if step == state.cfg.steps else ():
        tell(far)
    if state.samples:
        log.write_records("samples", step, state.samples.write())
    if state.writer and state.cfg.rollout_eval:
        log.write_records("rollouts", step, state.writer.records)


def far_teachers(state, metrics):
    """List what to say at the end of teachers that a larger weight would have brought nearer.

    Measured in docs/log/2026-11.md, "students that outweigh their loss".
    """
    lines = []
    student_bits = metrics.get("eval/student_bits_per_byte") or 0.0
    for setup in light_teachers(state):
        suffix = f"/{setup.name}" if len(state.teachers) > 1 else ""
        bits = metrics.get(f"eval/teacher_bits_per_byte{suffix}")
        if bits and student_bits - bits > FAR:
            lines.append(f"teacher {setup.name} is still {student_bits - bits:.2f} bits per byte "
                         f"ahead: {LARGER}")
    return lines


def summary(metrics, first_bits, teachers, sources=()):
    """Return what a line says of an evaluation.

    Args:
        first_bits: the student's bits per byte at step 0, None: not known, or of no interest.
        teachers, sources: their names.
    """
    def of(key):
        value = metrics.get(f"eval/{key}")
        return "not known" if value is None else f"{value:#.4g}"

    beside = []
    for name in sources if len(sources) > 1 else ():
        beside.append(f"{name} {of(f'{name}/student_bits_per_byte')}")
    for name in teachers:
        suffix, called = ("", "teacher") if len(teachers) == 1 else (f"/{name}", name)
        if f"eval/teacher_bits_per_byte{suffix}" in metrics:
            beside.append(f"{called} {of(f'teacher_bits_per_byte{suffix}')}")
    if first_bits is not None:
        beside.append(f"at the start {first_bits:#.4g}")
    line = f"{of('student_bits_per_byte')} bits per byte"
    if beside:
        line += f" ({', '.join(beside)})"
    return f"{line}, kd {of('kd')}" if "eval/kd" in metrics else line


def run_evaluation(state, held_out):
    """Return held-out metrics, of a mixture also those of each source."""
    state.engine.eval()
    sums = {}
    for name, batches in held_out.items():
        # one batch at a time is on the device
        batches = (to_device(batch, state.device) for batch in batches)
        sums[name] = evaluate(batches, state.student, state.teachers, state.sequence_group)
    state.engine.train()
    metrics = evaluation_metrics(state, reduce(operator.add, sums.values()))
    for name in sums if len(sums) > 1 else ():
        for key, value in evaluation_metrics(state, sums[name]).items():
            metrics[f"{name}/{key}"] = value
    if state.writer and state.cfg.rollout_eval:
        from isogloss.writing.rollout_metrics import evaluate_rollouts

        metrics |= evaluate_rollouts(state.writer, state.teachers)
    return {f"eval/{key}": value for key, value in metrics.items()}


def evaluation_metrics(state, sums):
    metrics, of_teachers = metrics_of(sums, state.teachers)
    for setup, of_teacher in zip(state.teachers, of_teachers):
        metrics |= named(state, setup, of_teacher)
    return metrics


def times_collectives(ds_config):
    """Return whether the ds_config asks how long collectives take; starts that, too."""
    enabled = bool(ds_config.get("comms_logger", {}).get("enabled"))
    if enabled:
        door("collectives").time_collectives()
    return enabled


def save_if_new(state, start, log):
    """Write a checkpoint of the steps so far, unless none is after `start` or it is there."""
    saved = state.last_checkpoint and state.last_checkpoint.name
    if state.steps_taken > start and saved != checkpoint_name(state.steps_taken):
        save(state, state.steps_taken, log)


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
    extra = {"scales": state.scales, "taught": state.taught.terms}
    extra["due"] = [] if state.bad_steps.count else state.due
    extra["place"] = state.places.before(good_step * state.samples_per_step)
    extra["samples"] = [source["samples"] for source in log.sources]
    if state.writer:
        extra["rollouts"] = state.writer.state()

    def save_teachers(folder):
        for path, setup in state.files_of_teachers(folder):
            setup.source.save(path)

    try:
        save_checkpoint(state.engine, folder, good_step, identity=run_identity(cfg),
                        layout=run_layout(cfg), keep=keep, state=extra, spared=cfg.resume,
                        save_more=save_teachers)
    except CannotSave as error:
        raise CannotSave(f"{error}; {describe_last_checkpoint(state)}; once this is repaired "
                         f"{same_command(state)} goes on") from None
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


def same_command(state):
    """Name the command that goes on from the last checkpoint; --resume may name another one."""
    goes_on = Path(state.cfg.resume) in (Path("auto"), state.last_checkpoint)
    return "the same command" if goes_on else "the same command without --resume"
