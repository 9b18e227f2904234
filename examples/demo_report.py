"""What the demo shows of its runs: a table, two curves of each, and what students wrote.

Bits per byte compare students whatever their loss and whoever their teacher; nats of different
losses do not, so none are shown.  A step without a teacher takes less time, so the curves are drawn
over steps and over seconds: on a CPU those of its processors, whatever else runs there.
Tests: tests/test_demo.py.
"""

import math
import statistics
from dataclasses import dataclass

from isogloss import curves
from isogloss.flags.terminal import one_line

NO_TEACHER = "no teacher"  # cross-entropy alone: the baseline of every loss
AS_LONG = "no teacher, as long"  # as the distillation by other tokenizers
EQUAL_TOKENIZERS = "equal tokenizers"  # the teacher has the student's tokenizer
BITS = "eval/student_bits_per_byte"
TEACHER_BITS = "eval/teacher_bits_per_byte"

# --- runs -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """One trained student.

    Attributes:
        arm: what it was trained by.
        seed: of the student's weights, the data order and dropout.
        step_seconds: of each training step, on a CPU of its processors; start and evaluations are
            no part of them.
        evaluations: held-out lines of metrics.jsonl by rising step; keys as in docs/evaluate.md.
    """

    arm: str
    seed: int
    step_seconds: list[float]
    evaluations: list[dict]

    @property
    def steps(self):
        return len(self.step_seconds)

    @property
    def seconds_per_step(self):
        """Median time of a step: the first ones, which load compiled code, do not count."""
        return statistics.median(self.step_seconds)

    @property
    def seconds(self):
        """Time of all steps, each taken as the median one."""
        return self.steps * self.seconds_per_step

    @property
    def bits(self):
        """The student's held-out bits per byte after the last step."""
        return self.evaluations[-1][BITS]

    @property
    def teacher_bits(self):
        """Those of its teacher, NaN without one."""
        return self.evaluations[-1].get(TEACHER_BITS, math.nan)


def read_run(arm, seed, folder):
    """Return the Run of a directory; null, for what is not finite, becomes NaN."""
    step_seconds = []
    evaluations = []
    for line in curves.read_run(folder):
        line = {key: math.nan if value is None else value for key, value in line.items()}
        if BITS in line:
            evaluations.append(line)
        elif "seconds" in line:
            step_seconds.append(line.get("processor_seconds", line["seconds"]))
    return Run(arm, seed, step_seconds, evaluations)


def by_arm(runs):
    """Return {arm: its Runs}, in the order of the runs."""
    return {arm: [run for run in runs if run.arm == arm] for arm in dict.fromkeys(
        run.arm for run in runs)}


def steps_of_equal_time(runs):
    """Return the steps without a teacher that take as long as those of piece_kl."""
    arms = by_arm(runs)
    without, distilled = [
        statistics.fmean([run.seconds_per_step for run in arms[arm]])
        for arm in (NO_TEACHER, "piece_kl")]
    return round(arms["piece_kl"][0].steps * distilled / without)


# --- numbers --------------------------------------------------------------------------------------


def spread(values, form):
    """Return a mean as text, with the standard deviation if there are several values."""
    text = format(statistics.fmean(values), form)
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):{form.lstrip('+')}}"
    return text


def table(runs):
    """Return the results as a Markdown table, a line per arm, beside the bits of its teacher.

    The gain is over NO_TEACHER after as many steps, in bits per byte; of several seeds it is
    counted for how many there is one.
    """
    from isogloss.tasks import markdown_table  # seconds of imports

    arms = by_arm(runs)
    baseline = {run.seed: run.bits for run in arms[NO_TEACHER]}
    rows = [["student of", "steps", "seconds", "bits per byte", "its teacher", "gain"]]
    if len(baseline) > 1:
        rows[0].append("better")
    for arm, chosen in arms.items():
        seconds = statistics.fmean([run.seconds for run in chosen])
        bits = spread([run.bits for run in chosen], ".3f")
        row = [arm, str(chosen[0].steps), f"{seconds:.0f}", bits, *[""] * (len(rows[0]) - 4)]
        if arm != NO_TEACHER:
            gains = [baseline[run.seed] - run.bits for run in chosen]
            better = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
            its_teacher = "" if arm == AS_LONG else f"{chosen[0].teacher_bits:.3f}"
            row[4:] = [its_teacher, spread(gains, "+.3f"), better]
        rows.append(row[: len(rows[0])])
    return markdown_table(rows)


# --- texts ----------------------------------------------------------------------------------------


def continuations(students, prompts):
    """Yield lines that show how students go on with the same prompts.

    Args:
        students: {name: directory}.
    """
    texts = {}
    for name, path in students.items():
        for prompt in prompts:
            texts[prompt, name] = written_by(how_to_use(path, prompt))
    width = max(map(len, students))
    for prompt in prompts:
        yield ""
        for name in students:
            yield f"{name:{width}}  {one_line(texts[prompt, name])}"


def how_to_use(path, prompt):
    """Return lines of Python that let an exported student continue a prompt into `text`."""
    return f'''from transformers import AutoModelForCausalLM, AutoTokenizer
student = AutoModelForCausalLM.from_pretrained("{path}")
tokenizer = AutoTokenizer.from_pretrained("{path}")
ids = tokenizer({prompt!r}, return_tensors="pt").input_ids
ids = student.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.7)
text = tokenizer.decode(ids[0], skip_special_tokens=True)'''


def written_by(code):
    """Return the `text` of `how_to_use`, the same every time."""
    import torch
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    names = {}
    exec(code, names)  # what is printed is what runs
    return names["text"]


# --- picture --------------------------------------------------------------------------------------

# Ticks of a logarithmic axis, on which the untrained student does not flatten the others.
BITS_TICKS = [0.3, 0.4, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6]
COLORS = {NO_TEACHER: "black", AS_LONG: "darkgray", EQUAL_TOKENIZERS: "tab:blue",
          "piece_kl": "tab:red"}


def plot(runs, path):
    """Draw held-out bits per byte over steps and over seconds of training, from step 0 on.

    A line is the mean over seeds, its band reaches from the lowest to the highest; a dashed line is
    the teacher of its color.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot, ticker

    # half of the pixels are left on a page, where labels have to be readable
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), sharey=True, constrained_layout=True)
    for arm, chosen in by_arm(runs).items():
        color = COLORS[arm]
        steps = [line["step"] for line in chosen[0].evaluations]
        by_step = list(zip(*[[line[BITS] for line in run.evaluations] for run in chosen]))
        per_step = statistics.fmean([run.seconds_per_step for run in chosen])
        for axis, unit in zip(axes, (1, per_step)):
            places = [unit * step for step in steps]
            axis.plot(places, list(map(statistics.fmean, by_step)), color=color, label=arm,
                      marker=".")
            axis.fill_between(places, list(map(min, by_step)), list(map(max, by_step)),
                              color=color, alpha=0.2, linewidth=0)
            if not math.isnan(chosen[0].teacher_bits):
                axis.axhline(chosen[0].teacher_bits, color=color, linestyle="--", linewidth=1)
    axes[0].set(xlabel="step", ylabel="held-out bits per byte", yscale="log")
    axes[0].yaxis.set_major_locator(ticker.FixedLocator(BITS_TICKS))
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_locator(ticker.NullLocator())
    axes[1].set(xlabel="seconds of training; on a CPU, processor time")
    axes[1].legend(title="dashed: its teacher")
    figure.savefig(path, dpi=200)
    pyplot.close(figure)
