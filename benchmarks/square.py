"""Compare losses in a square: K tokenizers, a teacher and students of each, all K x K pairs.

    python benchmarks/square.py [--regimes new,little] [--losses text,piece_kl,simct] [--plan]
    python benchmarks/square.py --scale large          # students that outweigh their loss, one pair
    python benchmarks/square_table.py                  # the tables

Nothing is downloaded: the corpus is the sources of the standard library, held out by package, and
tokenizers and teachers are made of it, once.  The tokenizers:

bytes      byte-level BPE of 2,048 tokens that keeps numbers whole
digits     byte-level BPE of 512 tokens that splits numbers into digits
unigram    SentencePiece Unigram of 1,024 tokens with byte fallback and single digits

All teachers have the same shape, text and held-out bits per byte, to 0.005: the weights of the
better ones are taken from before the end of their training.  So in the gains over text alone

    G_ij = mean + teacher_i + student_j + different [i is not j]

the last term is what another tokenizer costs, and the mean off the diagonal over that on it the
share of an equal tokenizer's gain that is left.  On the diagonal every loss is the forward KL.

The regimes:

new        students that know the library's documentation meet its sources
little     fresh students, little text
repeated   new, with an eighth of the text read up to 16 times, stopped as in long
repeated_N likewise in as many steps, of N passages
long       fresh students, more text, 3,000 steps, stopped where the chosen passages are best
above      little, from a teacher far above the students: --teacher DIR, a real model
large_N    N passages for students of 8 million weights and vocabularies of 8 and 4 thousand

Students of a seed begin with the same weights and see the same batches.  What is run, and with
which weights, square_table.py says; every run is a line in docs/log/square_*.jsonl, and what stands
there is not repeated: a new machine makes its teachers again and goes on.  Domains are sources of
other packages, and documentation, which students of the regime new have read before.  Long runs are
kept in runs/ as they go, so that --minutes 8 ends and the next command goes on.
"""

import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F

from benchmarks import rivals, square_models as made
from benchmarks.square_models import (
    DOMAINS,
    SCALES,
    OutOfTime,
    bits_per_byte,
    corpus,
    corpus_name,
    device,
    encoder,
    folder_of,
    fresh,
    hidden,
    learn,
    match_teachers,
    name_of,
    now,
    sha256,
    teacher,
    train_teacher,
    use,
    write,
)
from benchmarks.square_table import (
    FEW,
    FIRST,
    FORMS,
    KINDS,
    LARGE,
    LOG,
    RIVALS,
    TEXT,
    Cost,
    Records,
    Run,
    Study,
)
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool
from isogloss.job.columns import to_device
from isogloss.objective.loss_table import build_loss

ASKED_ROWS = 64  # of the reported ones, on which a student is compared with teachers
FIRST_STEPS = 600  # of the students of the regime "new" on the documentation
TIMED = 12  # steps of each loss, in turns, of which the median is its cost
TEACHERS_STEP = 5  # of a teacher's training, over a student's step, about
PATIENCE = 4  # looks without a better student, after which a run ends


@dataclass(kw_only=True)
class Args:
    """Train students of pairs of tokenizers by several losses, and keep a line of every run."""

    scale: str = flag("small", "how large models and vocabularies are.", choices=tuple(SCALES))
    regimes: str = flag("", "what the students learn, with commas; empty: all but above.")
    losses: str = flag("", "text, names of --loss or of rivals.py, with commas; empty: all.")
    seeds: int = flag(0, "reported students per loss and pair; 0: those of the scale.", low=0)
    pairs: str = flag("", "as bytes-unigram, student first, with commas; empty: all.")
    teacher: str = flag("", "directory of the model that teaches in the regime above.")
    weight: float = flag(0.0, "kd_weight of all losses; 0: choose it, or that of the scale.", low=0)
    ce_weight: float = flag(1.0, "weight of the text; 0: the teacher alone.", low=0)
    rates: str = flag("", "highest learning rates, with commas; empty: those of the scale.")
    records: str = flag(str(LOG), "folder of square_*.jsonl.")
    minutes: float = flag(0.0, "end then, in the middle of a run if need be; 0: when all is done.",
                          low=0)
    processes: int = flag(1, "runs at a time, a core each.", low=1)
    plan: bool = flag(False, "say how long it takes, and end.")


# --- runs -----------------------------------------------------------------------------------------


def do(job, until=math.inf):
    """Do a Run or a Cost, and return its record.

    Args:
        until: of time.monotonic(), when a long run is left to the next command.
    Raises:
        OutOfTime: it is later.
    """
    if time.monotonic() > until:
        raise OutOfTime
    facts = {"corpus": corpus_name(), "torch": torch.__version__,
             "date": time.strftime("%Y-%m-%d", time.gmtime())}
    return (timed(job) if isinstance(job, Cost) else trained(job, until)) | facts


def student_of(regime, kind, seed):
    """Return a student before it learns."""
    student = fresh(made.scale.student, kind, seed)
    if not made.scale.regimes[regime].is_fresh:
        student.load_state_dict(first_weights(kind, seed))
    return student.to(device())


@cache
def bits_before(regime, kind, seed):
    """Return the bits per byte of a student before it learns, by domain."""
    return bits_by_domain(student_of(regime, kind, seed).eval(), kind)


def bits_by_domain(model, kind):
    return {domain: round(bits_per_byte(model, kind, part), 5)
            for domain, (part, _) in DOMAINS.items()}


def trained(run, until):
    """Train the student of a run and return its record, with the best student's figures."""
    regime = made.scale.regimes[run.regime]
    texts = corpus()["train"][: regime.rows]
    before = bits_before(run.regime, run.student, run.seed)
    student = student_of(run.regime, run.student, run.seed)
    kd = None if run.loss == TEXT else TeacherLoss(run, "train", regime.rows)
    every = math.ceil(run.steps / regime.checks)
    progress = {"seconds": 0.0, "curve": []}  # a look each
    clock = [now()]

    def look(model, step):
        if (step + 1) % every and step + 1 != run.steps:
            return False
        progress["seconds"] += now() - clock.pop()
        model.eval()
        choose = round(bits_per_byte(model, run.student, "choose"), 5)
        model.train()
        progress["curve"].append({"step": step + 1, "seconds": round(progress["seconds"], 1),
                                  "choose": choose})
        best = min(progress["curve"], key=lambda one: one["choose"])
        if best["step"] == step + 1:
            progress["best"] = {name: one.clone() for name, one in model.state_dict().items()}
        clock.append(now())
        return step + 1 - best["step"] >= PATIENCE * every

    key = sha256(json.dumps(asdict(run))).hex()[:16]
    saved = made.scale.runs / "going" / f"{key}.pt" if regime.checks > 1 else None
    learn(student, run.student, texts, run.steps, kd=kd, seed=run.seed, rate=run.rate,
          weights=(run.ce_weight, run.weight), after=look, saved=saved, progress=progress,
          until=until)
    best = min(progress["curve"], key=lambda one: one["choose"])
    student.load_state_dict(progress["best"])
    record = asdict(run) | {
        "form": FORMS.get(run.loss, "published"), "rows": regime.rows,
        "passages": best["step"] * made.scale.batch, "before": before, **best,
        "after": bits_by_domain(student, run.student),
        "agreement": agreement(student, run),
        "teacher_row": round(kd.seconds, 6) if kd else 0.0}
    if regime.checks > 1:
        record["curve"] = progress["curve"]
        saved.unlink(missing_ok=True)
    return record


@torch.no_grad()
def agreement(student, run):
    """Return {teacher: {measure: mean}} of a student on reported rows; of text, by all teachers.

    Measures are those of rivals.Agreement, where a chunk of both tokenizers begins.
    """
    found = {}
    for teacher_name in [run.teacher] if run.teacher else teachers_there():
        measures = found[teacher_name] = {}
        for measure in rivals.AGREEMENT:
            asked = replace(run, teacher=teacher_name, loss=measure)
            compare = TeacherLoss(asked, "report", ASKED_ROWS)
            collator = Collator(encoder(run.student), [compare.options])
            values = []
            texts = corpus()["report"][:ASKED_ROWS]
            for first in range(0, len(texts), 16):
                numbers = range(first, min(first + 16, len(texts)))
                batch = to_device(collator([texts[number] for number in numbers]), device())
                logits = student(input_ids=batch.student.ids).logits.flatten(0, 1)
                values.append((float(compare(logits, batch, numbers)),
                               batch.counts.pairs[0].kd_terms))
            measures[measure] = round(sum(value * num for value, num in values)
                                      / sum(num for _, num in values), 5)
    return found


def teachers_there():
    """Return the names of the teachers of the square that have been made."""
    return [kind for kind in KINDS if (made.scale.runs / f"teacher-{name_of(kind)}.pt").exists()]


def timed(cost):
    """Return the record of what a step of some losses costs, measured in turns."""
    regime = next(iter(made.scale.regimes))
    losses = {}
    steps = {loss: [] for loss in cost.losses}
    rows = made.scale.regimes[regime].rows
    texts = corpus()["train"][:rows]
    for _ in range(TIMED // 3):
        for loss in cost.losses:
            run = Run(regime, cost.student, cost.teacher, loss, 1.0, made.scale.rates[0], 0, 4)
            if loss != TEXT and loss not in losses:
                losses[loss] = TeacherLoss(run, "train", rows)
            marks = []
            learn(fresh(made.scale.student, cost.student, 0).to(device()), cost.student, texts, 4,
                  kd=losses.get(loss), rate=run.rate, weights=(1.0, 1.0),
                  after=lambda model, step, marks=marks: marks.append(now()))
            steps[loss] += [later - earlier for earlier, later in pairwise(marks)]
    of_row = next(iter(losses.values())).seconds
    medians = {loss: round(statistics.median(each), 5) for loss, each in steps.items()}
    return {"scale": cost.scale, "student": cost.student, "teacher": cost.teacher,
            "costs": medians, "teacher_row": round(of_row, 6), "batch": made.scale.batch}


def first_path(kind, seed):
    return made.scale.runs / f"first-{kind}-{seed}.pt"


def first_weights(kind, seed):
    """Return the weights of a student that has read the documentation."""
    path = first_path(kind, seed)
    if not path.exists():
        student = learn(fresh(made.scale.student, kind, seed).to(device()), kind,
                        corpus()["documentation"], FIRST_STEPS, seed=seed)
        write(path, partial(torch.save, student.cpu().state_dict()))
    return torch.load(path)


class TeacherLoss:
    """Compare a student with what a teacher says of the same rows.

    seconds: that the teacher takes for a row.
    """

    def __init__(self, run, part, num_rows):
        kinds = run.student, run.teacher
        rivals.add()
        student, teacher_name = [str(folder_of(kind)) for kind in kinds]
        cfg = Config(student=student, teacher=teacher_name, data="-", loss=run.loss,
                     ce_weight=run.ce_weight)
        encoders = [encoder(kind) for kind in kinds]
        self.loss = build_loss(cfg, *encoders, device())
        self.options = PairOptions(encoders[1], self.loss.spelling)
        self.rows, self.seconds = hidden(run.teacher, part, num_rows)
        weight = teacher(run.teacher).get_output_embeddings().weight.detach()
        self.head = weight[: len(encoders[1].table)]

    @torch.no_grad()
    def states(self, ids, numbers):
        """Return what the teacher's head reads of rows."""
        rows = [self.rows[number][: ids.shape[1]].to(device()).float() for number in numbers]
        return torch.stack([F.pad(row, (0, 0, 0, ids.shape[1] - len(row))) for row in rows])

    def __call__(self, logits, batch, numbers):
        of_teacher = batch.teachers[0]
        teacher_logits = self.states(of_teacher.ids, numbers).flatten(0, 1) @ self.head.T
        total = logits.new_zeros(())
        for tile in of_teacher.tiles:
            block = logits[tile.student_positions]
            for sub_tile in tile.sub_tiles:
                if sub_tile.teacher_positions is not None:
                    answers = teacher_logits[sub_tile.teacher_positions]
                total = total + self.loss.loss_fn(
                    block[sub_tile.student_slice], answers[sub_tile.teacher_slice], sub_tile)
        return total / batch.counts.pairs[0].kd_terms


# --- what is run ----------------------------------------------------------------------------------


def asked(args, records):
    """Return the Study of every regime and rate, in the order in which they are run."""
    sizes = SCALES[args.scale]
    regimes = args.regimes.split(",") if args.regimes else [
        name for name in sizes.regimes if name != "above"]
    if unknown := set(regimes) - set(sizes.regimes):
        raise ValueError(f"--regimes {', '.join(sorted(unknown))}: --scale {args.scale} has "
                         f"{', '.join(sizes.regimes)}")
    if (regimes == ["above"]) != bool(args.teacher):
        raise ValueError("--teacher DIR and --regimes above go together")
    pairs = [tuple(pair.split("-")) for pair in args.pairs.split(",")] if args.pairs \
        else list(sizes.pairs)
    if args.teacher:
        pairs = [(student, Path(args.teacher).name) for student in KINDS]
    rates = list(map(float, args.rates.split(","))) if args.rates else sizes.rates
    studies = []
    for rate in rates:
        for regime in regimes:
            study = Study(records, regime, rate, (args.losses or sizes.losses).split(","), pairs,
                          seeds=args.seeds or sizes.seeds, batch=sizes.batch,
                          weight=args.weight or sizes.weight, ce_weight=args.ce_weight)
            if regime == "long":  # its runs take as long as twenty others
                losses = [loss for loss in study.losses if loss in (TEXT, FIRST, *RIVALS["SimCT"])]
                study = replace(study, pairs=pairs[:1], seeds=args.seeds or FEW, losses=losses)
            if regime != "long" or rate == rates[0]:
                studies.append(study)
    return studies


def hours(study):
    """Return (how many runs are missing, about how many hours they take on a core)."""
    per_step = {}
    for name, record in study.records.of.items():
        if isinstance(name, Run) and name.regime == study.regime:
            per_step.setdefault(name.loss == TEXT, []).append(record["seconds"] / record["step"])
    total = 0.0
    jobs = study.missing(planning=True)
    for job in jobs:
        if isinstance(job, Run):
            known = per_step.get(job.loss == TEXT)
            total += job.steps * (statistics.mean(known) if known else made.scale.step_seconds)
    if not made.scale.regimes[study.regime].is_fresh:
        students = {(job.student, job.seed) for job in jobs if isinstance(job, Run)}
        first = [student for student in students if not first_path(*student).exists()]
        total += len(first) * FIRST_STEPS * made.scale.step_seconds / 2
    return len(jobs), total / 3600


def plan(studies):
    """Print what is missing and how long it takes."""
    total = 0.0
    for study in studies:
        use(study.scale, study.regime)
        number, of_study = hours(study)
        total += of_study
        print(f"{study.regime}, rate {study.rate:g}: {number} runs, {of_study:.1f} hours of a core")
    teachers = [kind for kind in kinds_of(studies)
                if not (made.scale.runs / f"teacher-{name_of(kind)}.pt").exists()]
    of_teacher = made.scale.teacher_steps * made.scale.step_seconds * TEACHERS_STEP
    total += len(teachers) * of_teacher / 3600
    print(f"{total:.1f} hours of a core in all, {len(teachers)} teachers to train among them; more "
          "where a weight is not bracketed by three")


def kinds_of(studies):
    """Return the tokenizers whose teachers have to be equally good."""
    if made.scale.real_teacher:
        return ()
    if studies[0].regime in LARGE:
        return sorted({teacher for one in studies for _, teacher in one.pairs})
    return KINDS  # all of the square, whichever pairs are asked about now


def prepare_teachers(studies, for_each, until):
    """Make tokenizers and teachers that are not there."""
    kinds = kinds_of(studies)
    for kind in kinds:
        encoder(kind)
    list(for_each(partial(train_teacher, until=until), kinds))
    if kinds:
        match_teachers(kinds)


def main(args):
    records = Records(args.records, corpus_name())
    studies = asked(args, records)
    if args.plan:
        plan(studies)
        return
    until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    try:
        for study in studies:
            work(study, args, until)
    except OutOfTime:
        print("the minutes are over; the same command goes on", file=sys.stderr)


def work(study, args, until):
    """Do all runs of a study that are missing.

    Raises:
        OutOfTime: it is later than `until`.
    """
    settings = args.scale, study.regime, args.teacher
    use(*settings)
    is_alone = args.processes == 1
    with nullcontext() if is_alone else ProcessPoolExecutor(
            args.processes, multiprocessing.get_context("spawn"), use, settings) as pool:
        for_each = map if is_alone else pool.map
        prepare_teachers([study], for_each, until)
        while wanted := study.missing():
            for record in for_each(partial(do, until=until), wanted[: 4 * args.processes - 3]):
                study.records.add(record)
                print(json.dumps(record), file=sys.stderr, flush=True)


if __name__ == "__main__":
    tool(Args, main)
