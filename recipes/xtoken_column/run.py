"""Teach Llama-3.2-1B as NeMo RL publishes it, and judge it beside the published figures.

    python -m recipes.xtoken_column.run --plan        # GPUs and hours; nothing is started
    python -m recipes.xtoken_column.run --rehearse    # all of it with tiny models, on a CPU
    python -m recipes.xtoken_column.run               # on the GPUs of this machine
    python -m recipes.xtoken_column.run --launcher "--hostfile hosts"    # of several

The student as it is, from the text alone, by P-KL and by piece_kl from Qwen3-4B, and from two
teachers: a job of 100 steps each, by a recipe.  lm-evaluation-harness judges all five, on this
machine.  The same command goes on where it was ended; what is trained and judged stays, until the
folder of its run is removed.  `--table` prints what there is.  It starts in the checkout.
NOT YET RUN ON GPUs.

Tests: tests/test_xtoken_column.py.
"""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from isogloss.command import PlanArgs, TaskArgs
from isogloss.config import Config
from isogloss.flags.parse import check_flags, flag, parse_flags
from isogloss.flags.tool import shared, tool
from recipes.xtoken_column.table import read_table, result_table

STUDENT = "meta-llama/Llama-3.2-1B"


class Arm(NamedTuple):
    """Name a run of the column: its row, its recipe, and the flags behind that.

    No recipe: the student as it is.
    """

    row: str
    recipe: str = ""
    flags: tuple = ()

    @property
    def words(self):
        return [f"--config=recipes/{self.recipe}.yaml", *self.flags]


QWEN = "qwen3_4b_to_llama_3.2_1b"
ARMS = {
    "before": Arm("student before"),
    # --dynamic_scale balances two losses, and here is one
    "text": Arm("text alone", QWEN, ("--kd_weight=0", "--dynamic_scale=false")),
    "p_kl": Arm("P-KL from Qwen3-4B", QWEN),
    "piece_kl": Arm("`piece_kl` from Qwen3-4B", f"{QWEN}_piece_kl"),
    "two": Arm("H-KL from Phi-4-mini, KL from Llama-3.2-3B", "phi4_mini_llama_3b_to_llama_3.2_1b"),
}
# Tasks, and examples in front of a question: of MMLU 3, as the recipes; -1: as the harness has it,
# of GSM8K 5, of the rest none.  What is published does not say how many; whether they are these
# shows in the row of the student before.
JUDGMENTS = (("mmlu", 3), ("gsm8k,hellaswag,winogrande,arc_challenge,arc_easy", -1))


@dataclass(kw_only=True)
class Args:
    """Teach Llama-3.2-1B as NeMo RL publishes it, and judge it beside the published figures."""

    arms: str = flag(",".join(ARMS), "runs to train and judge, with commas.")
    folder: str = flag("runs/xtoken_column", "where runs, results and the table lie.")
    launcher: str = flag("", "words for DeepSpeed's launcher, such as --hostfile hosts.")
    data: str = shared(TaskArgs, "data")
    plan: bool = flag(False, "say which memory and how many hours they take, and end.")
    rehearse: bool = flag(False, "do it with tiny models and texts on a CPU, in folder_rehearsal.")
    table: bool = flag(False, "print the table of what there is, and end.")
    tflops: float = shared(PlanArgs, "tflops")
    mfu: float = shared(PlanArgs, "mfu")

    def __post_init__(self):
        check_flags(self)
        for name in self.arms.split(","):
            if name not in ARMS:
                raise ValueError(f"--arms {self.arms}: expected some of {', '.join(ARMS)}")


class Place(NamedTuple):
    """Say where the column lies, and what its commands are told.

    student: that is judged before; training: {recipe: flags behind it}; judging: flags.
    """

    folder: Path
    student: str
    training: dict
    judging: list
    launcher: list

    def export(self, name):
        return self.folder / name / "student"

    def results(self, name):
        return self.folder / name / "tasks.json"


def place_of(args):
    """Return the Place of the column, or of its rehearsal, which is made unless it is there."""
    if not args.rehearse:
        judging = [f"--data={args.data}"] if args.data else []
        return Place(Path(args.folder), STUDENT, {}, judging, args.launcher.split())
    from recipes.xtoken_column import rehearsal

    folder = Path(f"{args.folder}_rehearsal")
    made = rehearsal.made_in(folder)
    training = {arm.recipe: rehearsal.training_flags(made, arm.recipe)
                for arm in ARMS.values() if arm.recipe}
    return Place(folder, f"{made}/student", training, rehearsal.judging_flags(made),
                 ["--num_gpus=1"])


# --- a run and what it is worth -------------------------------------------------------------------


def run(words, output=None):
    """Run a module of ours; return what it printed, where output is a pipe.

    Signals that come meanwhile are for the job, which saves and ends.
    """
    child = subprocess.Popen([sys.executable, "-m", *words], stdout=output, text=True)
    before = [signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
              signal.signal(signal.SIGINT, lambda *_: None)]  # which a terminal sends to all
    printed, _ = child.communicate()
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])
    if child.returncode:
        raise SystemExit(f"{words[0]} ended with code {child.returncode}; the same command goes on "
                         "from here")
    return printed


def train(place, name):
    """Train an arm to its export, from its newest checkpoint on."""
    export = place.export(name)
    if name == "before" or export.exists():  # which appears when it is complete
        return
    print(f"{name}: is trained", flush=True)
    run(["isogloss.command", "distill", *place.launcher, *ARMS[name].words, "--eval_tasks=",
         "--eval_task_options=", "--save_every=25", f"--output_dir={place.folder / name}",
         f"--export={export}", *place.training.get(ARMS[name].recipe, ())])
    if not export.exists():
        raise SystemExit(f"{name}: was ended; the same command goes on from here")


def judge(place, name):
    """Judge an arm by the tasks that it is not judged by yet, and keep the verdict on each item."""
    from isogloss.job.files import write_atomically

    path = place.results(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    judged = read_results(path)
    for tasks, shots in JUDGMENTS:
        if set(tasks.split(",")) <= judged.keys():
            continue
        print(f"{name}: is judged by {tasks}", flush=True)
        model = place.student if name == "before" else place.export(name)
        items = path.with_name(f"items_{tasks.partition(',')[0]}.jsonl")
        judged |= read_table(run(
            [*ranks_that_judge(), f"--model={model}", f"--tasks={tasks}", f"--shots={shots}",
             f"--output={items}", *place.judging], subprocess.PIPE))
        write_atomically(path, json.dumps(judged, indent=1))


def ranks_that_judge():
    """Return the words that start isogloss-tasks, on all GPUs of this machine."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = ["torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "-m"]
    return [*(ranks if gpus > 1 else []), "isogloss.tasks"]


def read_results(path):
    """Return {task: {metric: [value, standard error or None]}}."""
    return json.loads(path.read_text()) if path.exists() else {}


# --- hours and the table --------------------------------------------------------------------------


def plan_table(args):
    """Return what each arm takes on 8 and on 16 GPUs, by the formulas of isogloss-plan."""
    from isogloss.plan import GIB, plan, time_of
    from isogloss.tasks import markdown_table

    sizes = 8, 16
    rows = [["run", *(f"{gpus} GPUs: {what}" for gpus in sizes
                      for what in ("GiB of one", "s a step", "hours"))]]
    total = dict.fromkeys(sizes, 0.0)
    for name in args.arms.split(","):
        if name == "before":
            continue
        cfg = parse_flags(Config, ARMS[name].words, file_flag="config")
        cells = []
        for gpus in sizes:
            need = plan(cfg, gpus, per_node=8)
            seconds, _, hours = time_of(need, cfg, args)
            total[gpus] += hours
            cells += [f"{need.peak / GIB:.0f}", f"{seconds:.2f}", f"{hours:.3f}"]
        rows.append([ARMS[name].row, *cells])
    rows.append(["all", *(cell for hours in total.values() for cell in ("", "", f"{hours:.3f}"))])
    return (f"{markdown_table(rows)}\n\nwithout starts, evaluations and tasks, if GPUs reach "
            f"{args.mfu:.0%} of {args.tflops:g} TFLOP/s and sending hides behind that; NeMo RL "
            "took 4.07 s a step with one teacher and 6.65 s with two, on 16 GPUs")


def main(args):
    if args.plan:
        print(plan_table(args))
        return
    place = place_of(args)
    for name in () if args.table else args.arms.split(","):
        train(place, name)
        judge(place, name)
    table = result_table({name: arm.row for name, arm in ARMS.items()},
                         {name: read_results(place.results(name)) for name in ARMS})
    print(table)
    if not args.table:
        (place.folder / "table.md").write_text(table + "\n")


if __name__ == "__main__":
    tool(Args, main)
