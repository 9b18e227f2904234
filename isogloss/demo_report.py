"""What the demo shows of its runs: a table, two curves of each, and what students wrote.

Bits per byte compare students whatever their loss and whoever their teacher; nats of different
losses do not, so none are shown.  A step without a teacher takes less time, so the curves are drawn
over steps and over seconds.  Tests: tests/test_demo.py.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from isogloss.flags.terminal import one_line

NO_TEACHER = "no teacher"  # cross-entropy alone: the baseline of every loss
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
        step_seconds: wall time of each training step; start and evaluations are no part of it.
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
        """Median wall time of a step: the first ones, which load compiled code, do not count."""
        return statistics.median(self.step_seconds)

    @property
    def seconds(self):
        """Wall time of all steps, each taken as the median one."""
        return self.steps * self.seconds_per_step

    @property
    def bits(self):
        """The student's held-out bits per byte after the last step."""
        return self.evaluations[-1][BITS]


def read_json_lines(path):
    return list(map(json.loads, Path(path).read_text().splitlines()))


def read_run(arm, seed, path):
    """Return the Run that a metrics.jsonl describes; null, for what is not finite, becomes NaN."""
    step_seconds = []
    evaluations = []
    for line in read_json_lines(path):
        line = {key: math.nan if value is None else value for key, value in line.items()}
        if BITS in line:
            evaluations.append(line)
        elif "seconds" in line:
            step_seconds.append(line["seconds"])
    return Run(arm, seed, step_seconds, evaluations)


def of_arm(runs, arm):
    return [run for run in runs if run.arm == arm]


# --- numbers --------------------------------------------------------------------------------------


def spread(values, form):
    """Return a mean as text, with the standard deviation if there are several values."""
    text = format(statistics.fmean(values), form)
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):{form.lstrip('+')}}"
    return text


def gains(runs, arm, baseline):
    """Return by how many bits per byte an arm is below another one, for each of its seeds."""
    bits = {run.seed: run.bits for run in of_arm(runs, baseline)}
    return [bits[run.seed] - run.bits for run in of_arm(runs, arm)]


def better_for(values):
    """Return "n of m": how many gains are above 0."""
    num_better = sum(value > 0 for value in values)
    return f"{num_better} of {len(values)}"


def markdown_table(rows):
    """Return rows of strings as an aligned Markdown table; the first row is the head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def teachers(runs):
    """Return {name: held-out bits per byte} of the teachers that the runs have met."""
    bits = {}
    for run in runs:
        last = run.evaluations[-1]
        if TEACHER_BITS in last:
            name = "its teacher" if run.arm == EQUAL_TOKENIZERS else "teacher"
            bits[name] = last[TEACHER_BITS]
    return bits


def table(runs):
    """Return the results as a Markdown table: a line per teacher, then one per arm.

    The gain is over NO_TEACHER after as many steps, in bits per byte; "better" counts seeds.
    """
    rows = [["model", "steps", "seconds", "bits per byte", "gain", "better"]]
    for name, bits in teachers(runs).items():
        rows.append([name, "", "", f"{bits:.3f}", "", ""])
    for arm in dict.fromkeys(run.arm for run in runs):
        chosen = of_arm(runs, arm)
        seconds = statistics.fmean([run.seconds for run in chosen])
        gain = ["", ""]
        if arm != NO_TEACHER:
            values = gains(runs, arm, NO_TEACHER)
            gain = [spread(values, "+.3f"), better_for(values)]
        bits = spread([run.bits for run in chosen], ".3f")
        rows.append([arm, str(chosen[0].steps), f"{seconds:.0f}", bits, *gain])
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
COLORS = {NO_TEACHER: "black", EQUAL_TOKENIZERS: "tab:blue"}
DEFAULT_LOSS, DEFAULT_COLOR = "piece_kl", "tab:red"
LABEL_HEIGHT = 0.045  # of a label at a line's end, as a part of the axis


def plot(runs, path):
    """Draw held-out bits per byte over steps and over seconds of training, from step 0 on.

    A line is the mean over seeds, its band reaches from the lowest to the highest.  The default
    loss and what it is measured by are in color, the other losses gray.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True, constrained_layout=True)
    by_step, by_seconds = axes
    for arm in dict.fromkeys(run.arm for run in runs):
        chosen = of_arm(runs, arm)
        per_step = statistics.fmean([run.seconds_per_step for run in chosen])
        draw(by_step, chosen, 1)
        draw(by_seconds, chosen, per_step)
    for axis in axes:
        place = 0.02  # of a name above its line, as a part of the axis
        for (name, bits), dashes in zip(teachers(runs).items(), ("--", ":")):
            axis.axhline(bits, color="gray", linestyle=dashes, linewidth=1)
            axis.text(place, bits, f"{name} {bits:.3f}", fontsize="small", color="gray",
                      va="bottom", transform=axis.get_yaxis_transform())
            place += 0.4
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.FixedLocator(BITS_TICKS))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        label_ends(axis)
    by_step.set(xlabel="step", ylabel="held-out bits per byte")
    by_seconds.set(xlabel="seconds of training")
    figure.savefig(path, dpi=120)


def draw(axis, runs, unit):
    """Draw one arm: the mean over its seeds as a line, the extremes as a band.

    Args:
        unit: what a step counts on the horizontal axis.
    """
    arm = runs[0].arm
    color = DEFAULT_COLOR if arm == DEFAULT_LOSS else COLORS.get(arm, "darkgray")
    positions = [unit * line["step"] for line in runs[0].evaluations]
    bits = [[line[BITS] for line in run.evaluations] for run in runs]
    by_time = list(zip(*bits))
    means = list(map(statistics.fmean, by_time))
    axis.plot(positions, means, color=color, label=arm, marker=".")
    if len(runs) > 1:
        lowest = list(map(min, by_time))
        highest = list(map(max, by_time))
        axis.fill_between(positions, lowest, highest, color=color, alpha=0.2, linewidth=0)


def label_ends(axis):
    """Name each line to the right of the axis, in the order of their ends, none over another."""
    to_part = axis.transData.transform, axis.transAxes.inverted().transform
    ends = []
    for line in axis.get_lines():
        x, y = line.get_xydata()[-1]
        if line.get_label().startswith("_") or not math.isfinite(y):  # a teacher's, or diverged
            continue
        ends.append((to_part[1](to_part[0]((x, y)))[1], line))
    lowest = -math.inf
    for height, line in sorted(ends, key=lambda end: end[0]):
        lowest = max(height, lowest + LABEL_HEIGHT)
        axis.annotate(line.get_label(), (1.01, lowest), xycoords="axes fraction", va="center",
                      fontsize="small", color=line.get_color(), annotation_clip=False)
