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
long       fresh students, more text, 3,000 steps, stopped where the chosen passages are best
above      little, from a teacher far above the students: --teacher DIR, a real model
large_N    N passages for students of 8 million weights and vocabularies of 8 and 4 thousand

Students of a seed begin with the same weights and see the same batches.  What is run, and with
which weights, square_table.py says; every run is a line in docs/log/square_*.jsonl, and what stands
there is not repeated: a new machine makes its teachers again and goes on.  Domains are sources of
other packages, and documentation, which students of the regime new have read before.  Long runs are
kept in runs/ as they go, so that --minutes 8 ends and the next command goes on.
"""

import hashlib
import json
import math
import multiprocessing
import statistics
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import rivals
from benchmarks.square_table import (
    FEW,
    FIRST,
    FORMS,
    KINDS,
    LARGE,
    LARGE_RIVAL,
    LOG,
    RATES,
    REGIMES,
    RIVALS,
    TEXT,
    Cost,
    Records,
    Run,
    Study,
)
from isogloss import demo
from isogloss.align import TokenTable
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool
from isogloss.job.columns import to_device
from isogloss.objective.loss_table import build_loss
from recipes.tiny import prepare

PASSAGE = 480  # bytes
SHORTEST = 60  # characters; headings and one-word docstrings teach nothing
# no part of the library, or left out by some distributions
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data",
                   "turtledemo", "idle_test"}
CHOOSING, REPORTING = 96, 192  # held-out passages
ASKED_ROWS = 64  # of the reported ones, on which a student is compared with teachers
DOMAINS = {"sources": ("report", REPORTING), "documentation": ("documentation", CHOOSING)}
MOST_TEXTS = 60_000  # to learn from
MAX_LENGTH = 512
DECAY = 0.97  # of the mean of a teacher's weights over the steps
MATCHED = 0.005  # bits per byte
FIRST_STEPS = 600  # of the students of the regime "new" on the documentation
TIMED = 12  # steps of each loss, in turns, of which the median is its cost
TEACHERS_STEP = 5  # of a teacher's training, over a student's step, about
PATIENCE = 4  # looks without a better student, after which a run ends


class OutOfTime(Exception):
    """Say that the minutes are over; what was done is kept."""


class Scale(NamedTuple):
    """Say how large everything is.

    runs, sizes: folder of models; tokens of each tokenizer.
    teacher, student: their shapes, as (hidden size, size between, layers, heads).
    batch: passages of a step of a student.
    teacher_steps, teacher_batch, teacher_rate: of a teacher's training.
    kept_every: steps of a teacher of which the weights are kept.
    regimes, rates: what is asked, in this order.
    pairs, losses, weight, seeds: where the command line says nothing; weight 0: it is chosen.
    step_seconds: of a student on a core, about, for the plan.
    real_teacher: folder of the model that teaches in the regime above.
    """

    runs: Path
    sizes: dict
    teacher: tuple
    student: tuple
    batch: int
    teacher_steps: int
    teacher_batch: int
    teacher_rate: float
    kept_every: int
    regimes: dict
    rates: tuple
    pairs: tuple
    losses: str
    weight: float
    seeds: int
    step_seconds: float
    real_teacher: str = ""


# coarser, finer and crossing tokens first
OTHER_PAIRS = (("bytes", "digits"), ("digits", "bytes"), ("bytes", "unigram"),
               ("digits", "unigram"), ("unigram", "bytes"), ("unigram", "digits"))
SCALES = {
    "small": Scale(
        ROOT / "runs" / "square", dict(bytes=2048, digits=512, unigram=1024),
        teacher=(192, 512, 4, 6), student=(64, 172, 4, 4), batch=8,
        teacher_steps=600, teacher_batch=16, teacher_rate=3e-3, kept_every=20, regimes=REGIMES,
        rates=RATES, pairs=OTHER_PAIRS + tuple((kind, kind) for kind in KINDS), weight=0.0, seeds=8,
        step_seconds=0.16, losses="text,piece_kl,simct,simct_fkl,bpm,bpm_fkl,csd,projection_kl,"
        "h_kl,alm,uld"),
    "large": Scale(
        ROOT / "runs" / "large_square", dict(bytes=8192, digits=4096, unigram=8192),
        teacher=(320, 864, 8, 5), student=(256, 688, 8, 4), batch=8,
        teacher_steps=1000, teacher_batch=8, teacher_rate=1.5e-3, kept_every=50, regimes=LARGE,
        rates=(1.5e-3,), pairs=(("bytes", "digits"), ("bytes", "bytes")), weight=1.0, seeds=3,
        step_seconds=0.8, losses=f"{TEXT},{FIRST},{LARGE_RIVAL}")}
scale = SCALES["small"]


def use(name, regime, real_teacher=""):
    """Set the sizes of this process, and its teachers to those of a regime."""
    global scale
    sizes = SCALES[name]
    steps = sizes.regimes[regime].teacher_steps or sizes.teacher_steps
    scale = sizes._replace(teacher_steps=steps, real_teacher=real_teacher)
    torch.set_num_threads(1)  # models of this size gain nothing from a second one


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


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


def write(path, save):
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{time.time_ns()}.part")
    save(part)
    part.rename(path)


# --- corpus, tokenizers, models -------------------------------------------------------------------


def sha256(text):
    """Return the SHA-256 digest of a text, which is the same in every run and on every machine."""
    return hashlib.sha256(text.encode()).digest()


def shuffled(texts):
    """Return the passages that are long enough, in the fixed order of their digests."""
    return sorted((text for text in texts if len(text) > SHORTEST), key=sha256)


@cache
def corpus():
    """Return {"choose", "report", "train": passages of sources, "documentation": of topics}.

    No package is in two of the first three.
    """
    from pydoc_data import topics

    kept = scale.runs / "corpus.json"
    if kept.exists():
        return json.loads(kept.read_text())
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {"choose": [], "report": [], "train": [], "documentation": []}
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    names = [name for name in names if not SKIPPED_FOLDERS & set(name.parts)]
    for name in names:
        first_byte = sha256(name.parts[0])[0]
        part = "choose" if first_byte < 12 else "report" if first_byte < 36 else "train"
        try:
            parts[part] += prepare.passages((root / name).read_text(), PASSAGE)
        except UnicodeDecodeError:  # samples of bad source
            continue
    for text in topics.topics.values():
        parts["documentation"] += prepare.passages(text, PASSAGE)
    held_out = {text for part in ("choose", "report") for text in parts[part]}
    parts["train"] = set(parts["train"]) - held_out
    for part, texts in parts.items():
        # a table that is one long line is a passage of its own
        parts[part] = [text for text in shuffled(set(texts)) if len(text) <= 2 * PASSAGE]
    for part, num in (("choose", CHOOSING), ("report", REPORTING), ("train", MOST_TEXTS)):
        parts[part] = parts[part][:num]
    write(kept, lambda part: part.write_text(json.dumps(parts)))
    return parts


TRAINERS = {"bytes": demo.byte_level_bpe,
            "digits": partial(demo.byte_level_bpe, single_digits=True),
            "unigram": demo.unigram}


@cache
def corpus_name():
    """Return what says that two machines have the same texts, which are those of their Python."""
    return sha256(json.dumps([corpus()[part] for part in ("train", "report")])).hex()[:8]


def folder_of(kind):
    """Return the directory of a tokenizer of the square, or of a real model."""
    return scale.runs / f"tokenizer-{kind}" if kind in TRAINERS else Path(scale.real_teacher)


@cache
def encoder(kind):
    """Return the TextEncoder of a tokenizer."""
    if kind in TRAINERS and not folder_of(kind).exists():
        tokenizer = TRAINERS[kind](corpus()["train"][:4000], size=scale.sizes[kind])
        tokenizer.save_pretrained(folder_of(kind))
    tokenizer = AutoTokenizer.from_pretrained(folder_of(kind))
    return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), MAX_LENGTH)


def name_of(teacher):
    """Return what files of a teacher are called."""
    is_made_here = teacher in TRAINERS
    return f"{teacher}-{scale.teacher_steps}" if is_made_here else sha256(teacher).hex()[:8]


def fresh(shape, kind, seed):
    """Return a model with random weights."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    values = dict(zip(names, shape), max_position_embeddings=MAX_LENGTH)
    return demo.llama(encoder(kind).tokenizer, values, seed)


@cache
def teacher(kind):
    """Return a matched teacher, or a real model."""
    if kind not in TRAINERS:
        folder = folder_of(kind)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval()
    model = fresh(scale.teacher, kind, 0)
    model.load_state_dict(torch.load(scale.runs / f"teacher-{name_of(kind)}.pt"))
    return model.to(device()).eval()


@cache
def hidden(kind, part, num_rows):
    """Return (hidden states of a teacher, for each row of a part; its seconds a row)."""
    path = scale.runs / f"hidden-{name_of(kind)}-{part}-{num_rows}.pt"
    if not path.exists():
        start = now()
        rows = []
        with torch.no_grad():
            for ids in encoder(kind).encode(corpus()[part][:num_rows]):
                ids = torch.from_numpy(ids)[None, :MAX_LENGTH].to(device())
                rows.append(teacher(kind).base_model(input_ids=ids)[0][0].half().cpu())
        seconds = (now() - start) / num_rows
        write(path, lambda part: torch.save((rows, seconds), part))
    return torch.load(path)


@cache
def held_out(kind, part):
    """Return the batches of held-out rows."""
    most = dict(DOMAINS.values())
    return batches_of(encoder(kind), corpus()[part][: most.get(part, CHOOSING)])


def batches_of(of_student, texts):
    collator = Collator(of_student, [])
    return [to_device(collator(texts[i : i + 16]).student, device())
            for i in range(0, len(texts), 16)]


def bits_per_byte(model, kind, part):
    """Return the bits per byte of held-out rows."""
    return bits_of(model, held_out(kind, part))


@torch.no_grad()
def bits_of(model, batches):
    """Return the bits per byte of batches."""
    nats = num_bytes = 0.0
    for batch in batches:
        counts = (batch.num_bytes >= 0) & (batch.labels != -100)
        values = F.cross_entropy(model(input_ids=batch.ids).logits.flatten(0, 1),
                                 batch.labels.flatten(), ignore_index=-100, reduction="none")
        nats += float((values.view_as(batch.labels) * counts).sum())
        num_bytes += float((batch.num_bytes * counts).sum())
    return nats / num_bytes / math.log(2)


def train_teacher(kind, until=math.inf):
    """Train a teacher, and keep the means of its weights over the last steps every so often."""
    folder = scale.runs / f"training-{name_of(kind)}"
    if (folder / "bits.json").exists():
        return
    mean = fresh(scale.teacher, kind, 0).to(device()).eval()
    progress = {"mean": mean.state_dict(), "bits": []}

    def keep(model, step):
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()),
                                 1 - min(DECAY, step / (step + 10)))
        if (step + 1) % scale.kept_every == 0:
            bits = progress["bits"]
            write(folder / f"{len(bits)}.pt", partial(torch.save, mean.state_dict()))
            bits.append(bits_per_byte(mean, kind, "choose"))
            print(kind, step + 1, round(bits[-1], 4), file=sys.stderr, flush=True)

    saved = folder / "going.pt"
    if saved.exists():
        mean.load_state_dict(torch.load(saved)["progress"]["mean"])
    learn(fresh(scale.teacher, kind, 0).to(device()), kind, corpus()["train"], scale.teacher_steps,
          size=scale.teacher_batch, rate=scale.teacher_rate, after=keep, saved=saved,
          progress=progress, until=until)
    write(folder / "bits.json", lambda part: part.write_text(json.dumps(progress["bits"])))
    saved.unlink(missing_ok=True)


def match_teachers(kinds):
    """Write, of each teacher, the weights with the bits per byte of the worst one."""
    bits = {kind: json.loads((scale.runs / f"training-{name_of(kind)}" / "bits.json").read_text())
            for kind in kinds}
    goal = max(min(values) for values in bits.values())
    for kind, values in bits.items():
        path = scale.runs / f"teacher-{name_of(kind)}.pt"
        if path.exists():
            continue
        number = max(next(i for i, value in enumerate(values) if value <= goal), 1)
        ends = [torch.load(scale.runs / f"training-{name_of(kind)}" / f"{i}.pt")
                for i in (number - 1, number)]
        model = fresh(scale.teacher, kind, 0).to(device()).eval()
        low, high, place = 0.0, 1.0, 1.0
        for _ in range(12):  # the bits per byte fall from one end to the other
            model.load_state_dict({name: torch.lerp(ends[0][name], ends[1][name], place)
                                   for name in ends[0]})
            found = bits_per_byte(model, kind, "choose")
            if abs(found - goal) < MATCHED / 10:
                break
            low, high = (place, high) if found > goal else (low, place)
            place = (low + high) / 2
        if abs(found - goal) > MATCHED:
            raise ValueError(f"the teacher of {kind} has {found:.4f} bits per byte, not {goal:.4f}")
        print(f"teacher {kind}: {found:.4f} bits per byte, "
              f"{bits_per_byte(model, kind, 'report'):.4f} on the reported rows", flush=True)
        write(path, partial(torch.save, model.state_dict()))


# --- runs -----------------------------------------------------------------------------------------


def now():
    """Return the seconds that count: of this process's core, or of a clock where a GPU computes."""
    if device() == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


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
    student = fresh(scale.student, kind, seed)
    if not scale.regimes[regime].is_fresh:
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
    regime = scale.regimes[run.regime]
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
    saved = scale.runs / "going" / f"{key}.pt" if regime.checks > 1 else None
    learn(student, run.student, texts, run.steps, kd=kd, seed=run.seed, rate=run.rate,
          weights=(run.ce_weight, run.weight), after=look, saved=saved, progress=progress,
          until=until)
    best = min(progress["curve"], key=lambda one: one["choose"])
    student.load_state_dict(progress["best"])
    record = asdict(run) | {
        "form": FORMS.get(run.loss, "published"), "rows": regime.rows,
        "passages": best["step"] * scale.batch, "before": before, **best,
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
            for first in range(0, ASKED_ROWS, 16):
                numbers = range(first, first + 16)
                texts = [corpus()["report"][number] for number in numbers]
                batch = to_device(collator(texts), device())
                logits = student(input_ids=batch.student.ids).logits.flatten(0, 1)
                values.append((float(compare(logits, batch, numbers)),
                               batch.counts.pairs[0].kd_terms))
            measures[measure] = round(sum(value * num for value, num in values)
                                      / sum(num for _, num in values), 5)
    return found


def teachers_there():
    """Return the names of the teachers of the square that have been made."""
    return [kind for kind in KINDS if (scale.runs / f"teacher-{name_of(kind)}.pt").exists()]


def timed(cost):
    """Return the record of what a step of some losses costs, measured in turns."""
    regime = next(iter(scale.regimes))
    losses = {}
    steps = {loss: [] for loss in cost.losses}
    rows = scale.regimes[regime].rows
    texts = corpus()["train"][:rows]
    for _ in range(TIMED // 3):
        for loss in cost.losses:
            run = Run(regime, cost.student, cost.teacher, loss, 1.0, scale.rates[0], 0, 4)
            if loss != TEXT and loss not in losses:
                losses[loss] = TeacherLoss(run, "train", rows)
            marks = []
            learn(fresh(scale.student, cost.student, 0).to(device()), cost.student, texts, 4,
                  kd=losses.get(loss), rate=run.rate, weights=(1.0, 1.0),
                  after=lambda model, step, marks=marks: marks.append(now()))
            steps[loss] += [later - earlier for earlier, later in pairwise(marks)]
    of_row = next(iter(losses.values())).seconds
    medians = {loss: round(statistics.median(each), 5) for loss, each in steps.items()}
    return {"scale": cost.scale, "student": cost.student, "teacher": cost.teacher,
            "costs": medians, "teacher_row": round(of_row, 6), "batch": scale.batch}


def first_path(kind, seed):
    return scale.runs / f"first-{kind}-{seed}.pt"


def first_weights(kind, seed):
    """Return the weights of a student that has read the documentation."""
    path = first_path(kind, seed)
    if not path.exists():
        student = learn(fresh(scale.student, kind, seed).to(device()), kind,
                        corpus()["documentation"], FIRST_STEPS, seed=seed)
        write(path, partial(torch.save, student.cpu().state_dict()))
    return torch.load(path)


def learn(model, kind, texts, steps, *, kd=None, seed=0, rate=0.0, weights=(1.0, 0.0), size=0,
          after=lambda model, step: False, saved=None, progress=None, until=math.inf):
    """Train a model and return it.

    Args:
        kd: TeacherLoss, or None.
        rate, size: highest learning rate, passages a step; 0: those of the scale's students.
        weights: of the text and of the teacher.
        after: called with the model and the number of each step; true ends the training.
        saved: file of a training that was left; None: it is done in one go.
        progress: dict of what `after` keeps, which is saved with it.
        until: of time.monotonic().
    Raises:
        OutOfTime: it is later, and all is in `saved`.
    """
    collator = Collator(encoder(kind), [kd.options] if kd else [])
    # the usual values for small models
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    start = restore(saved, model, optimizer, progress) if saved and saved.exists() else 0
    rows = islice(enumerate(batches(len(texts), size or scale.batch, seed, steps)), start, None)
    for step, numbers in rows:
        if saved and time.monotonic() > until:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "progress": progress, "step": step}
            write(saved, partial(torch.save, state))
            raise OutOfTime
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, rate or scale.rates[0])
        batch = to_device(collator([texts[number] for number in numbers]), device())
        logits = model(input_ids=batch.student.ids).logits.flatten(0, 1)
        loss = weights[0] * F.cross_entropy(logits, batch.student.labels.flatten(),
                                            ignore_index=-100)
        if kd:
            loss = loss + weights[1] * kd(logits, batch, numbers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if after(model, step):
            break
    return model.eval()


def restore(saved, model, optimizer, progress):
    """Load what a training was left with; return the step to go on with."""
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    progress.update(state["progress"])
    return state["step"]


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


def batches(num_rows, size, seed, steps):
    """Yield the numbers of the rows of every step."""
    generator = torch.Generator().manual_seed(seed)
    order = []
    for _ in range(steps):
        if len(order) < size:
            order += torch.randperm(num_rows, generator=generator).tolist()
        yield order[:size]
        del order[:size]


def learning_rate(step, steps, highest):
    """Return a linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warm_up = steps // 10
    if step < warm_up:
        return highest * (step + 1) / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


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
            total += job.steps * (statistics.mean(known) if known else scale.step_seconds)
    if not scale.regimes[study.regime].is_fresh:
        students = {(job.student, job.seed) for job in jobs if isinstance(job, Run)}
        first = [student for student in students if not first_path(*student).exists()]
        total += len(first) * FIRST_STEPS * scale.step_seconds / 2
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
                if not (scale.runs / f"teacher-{name_of(kind)}.pt").exists()]
    total += len(teachers) * scale.teacher_steps * scale.step_seconds * TEACHERS_STEP / 3600
    print(f"{total:.1f} hours of a core in all, {len(teachers)} teachers to train among them; more "
          "where a weight is not bracketed by three")


def kinds_of(studies):
    """Return the tokenizers whose teachers have to be equally good."""
    if scale.real_teacher:
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
