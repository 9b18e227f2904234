"""Compare losses in a square: K tokenizers, a teacher and students of each, all K x K pairs.

    python benchmarks/square.py [--regime little] [--losses piece_kl,alm] [--seeds 8]
                                [--pairs bytes-unigram] [--weight 2] [--plan]

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

little     fresh students, little text
long       fresh students, more text, 3,000 steps, stopped where the chosen rows are best
new        students that know the library's documentation meet its sources
above      little, from a teacher far above the students: --teacher DIR, a real model

Students of a seed begin with the same weights and see the same batches.  The weight of a loss is
chosen for each pair, on other rows and seeds than those that are reported, and bracketed.  A run's
seconds are its processor time and what its teacher takes for the rows that it reads; with
--equal_seconds faster losses than the first one take more steps, and slower ones fewer.
Differences are paired by seed; intervals are of 95 %, by Student's t.

Results are kept in runs/square, and what is done is not repeated.  A table is written there as
JSON, too; with --table FILE weights and seconds are those of an earlier one.  rivals.py has losses
of other systems.  Figures of record are in docs/LOG.md.
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
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import rivals
from isogloss import demo
from isogloss.align import TokenTable
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool
from isogloss.objective.loss_table import build_loss
from isogloss.tasks import markdown_table
from recipes.tiny import prepare

TEXT = "text"  # no teacher
EQUAL = "forward_kl"  # what every loss is on the diagonal
PASSAGE = 480  # bytes
SHORTEST = 60  # characters; headings and one-word docstrings teach nothing
# no part of the library, or left out by some distributions
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data",
                   "turtledemo", "idle_test"}
CHOOSING, REPORTING = 96, 192  # held-out passages
MOST_TEXTS = 60_000  # to learn from
SEEDS_TO_CHOOSE = 100, 101
MAX_LENGTH = 512
DECAY = 0.97  # of the mean of a teacher's weights over the steps
MATCHED = 0.005  # bits per byte
FIRST_STEPS = 600  # of the students of the regime "new" on the documentation
WEIGHTS = 1.0, 4.0  # of which a loss is tried first; more, by factors of 2, where it asks for them
LIGHTEST, HEAVIEST = 1 / 64, 64.0  # weights that are tried at most
# 97.5 % of Student's t with n - 1 degrees of freedom, for n = 2, 3, ...
STUDENTS_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)


class Regime(NamedTuple):
    """Say what the students of a comparison learn.

    rows: passages to train on.
    steps: optimizer steps.
    checks: how often the chosen rows are looked at, for the best student.
    is_fresh: they have random weights.
    teacher_steps: of their teachers' training, if not those of the scale.
    """

    rows: int
    steps: int
    checks: int = 1
    is_fresh: bool = True
    teacher_steps: int = 0


class Scale(NamedTuple):
    """Say how large everything is.

    runs, sizes: folder of the results; tokens of each tokenizer.
    teacher, student: their shapes, as (hidden size, size between, layers, heads).
    batch, rate: passages a step of a student, its highest learning rate.
    teacher_steps, teacher_batch, teacher_rate: of a teacher's training.
    kept_every: steps of a teacher of which the weights are kept.
    """

    runs: Path
    sizes: dict
    teacher: tuple
    student: tuple
    batch: int
    rate: float
    teacher_steps: int
    teacher_batch: int
    teacher_rate: float
    kept_every: int
    regimes: dict


SCALE = Scale(
    ROOT / "runs" / "square", dict(bytes=2048, digits=512, unigram=1024),
    teacher=(192, 512, 4, 6), student=(64, 172, 4, 4), batch=8, rate=3e-3,
    teacher_steps=600, teacher_batch=16, teacher_rate=3e-3, kept_every=20,
    regimes={"little": Regime(1200, 150),
             "long": Regime(8000, 3000, checks=12, teacher_steps=1800),
             "new": Regime(1200, 150, is_fresh=False), "above": Regime(1200, 150)})
scale = SCALE


def use(regime):
    """Set the teachers of this process to those of a regime."""
    global scale
    scale = SCALE._replace(teacher_steps=SCALE.regimes[regime].teacher_steps or SCALE.teacher_steps)
    torch.set_num_threads(1)  # models of this size gain nothing from a second one


@dataclass(kw_only=True)
class Args:
    """Compare losses by the held-out bits per byte of their students, on pairs of tokenizers."""

    regime: str = flag("little", "what the students learn.", choices=tuple(SCALE.regimes))
    losses: str = flag("piece_kl,alm", "names of --loss or of rivals.py, with commas.")
    seeds: int = flag(8, "reported students per loss and pair.", low=1)
    pairs: str = flag("", "as bytes-unigram, student first, with commas; empty: all.")
    teacher: str = flag("", "directory of the model that teaches in the regime above.")
    weight: float = flag(0.0, "kd_weight of all losses; 0: choose it.", low=0)
    ce_weight: float = flag(1.0, "weight of the text; 0: the teacher alone.", low=0)
    table: str = flag("", "a table of this tool, as JSON, that has the weights.")
    rate: float = flag(0.0, "highest learning rate; 0: that of the scale.", low=0)
    equal_seconds: bool = flag(False, "train each loss as long as the first one takes.")
    processes: int = flag(2, "runs at a time, a core each.", low=1)
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


KINDS = {"bytes": demo.byte_level_bpe,
         "digits": partial(demo.byte_level_bpe, single_digits=True),
         "unigram": demo.unigram}


def folder_of(kind):
    """Return the directory of a tokenizer of the square, or of a real model."""
    return scale.runs / f"tokenizer-{kind}" if kind in KINDS else Path(kind)


@cache
def encoder(kind):
    """Return the TextEncoder of a tokenizer."""
    if kind in KINDS and not folder_of(kind).exists():
        tokenizer = KINDS[kind](corpus()["train"][:4000], size=scale.sizes[kind])
        tokenizer.save_pretrained(folder_of(kind))
    tokenizer = AutoTokenizer.from_pretrained(folder_of(kind))
    return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), MAX_LENGTH)


def name_of(teacher):
    """Return what files of a teacher are called."""
    is_made_here = teacher in KINDS
    return f"{teacher}-{scale.teacher_steps}" if is_made_here else sha256(teacher).hex()[:8]


def fresh(shape, kind, seed):
    """Return a model with random weights."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    values = dict(zip(names, shape), max_position_embeddings=MAX_LENGTH)
    return demo.llama(encoder(kind).tokenizer, values, seed)


@cache
def teacher(kind):
    """Return a matched teacher, or a real model."""
    if kind not in KINDS:
        return AutoModelForCausalLM.from_pretrained(kind, dtype=torch.float32).eval()
    model = fresh(scale.teacher, kind, 0)
    model.load_state_dict(torch.load(scale.runs / f"teacher-{name_of(kind)}.pt"))
    return model.eval()


@cache
def hidden(kind, num_rows):
    """Return (hidden states of a teacher, for each row to train on; its seconds a row)."""
    path = scale.runs / f"hidden-{name_of(kind)}-{num_rows}.pt"
    if not path.exists():
        start = time.process_time()
        rows = []
        with torch.no_grad():
            for ids in encoder(kind).encode(corpus()["train"][:num_rows]):
                ids = torch.from_numpy(ids)[None, :MAX_LENGTH]
                rows.append(teacher(kind).base_model(input_ids=ids)[0][0].half())
        seconds = (time.process_time() - start) / num_rows
        write(path, lambda part: torch.save((rows, seconds), part))
    return torch.load(path)


@cache
def held_out(kind, part):
    """Return the batches of held-out rows."""
    collator = Collator(encoder(kind), [])
    texts = corpus()[part]
    return [collator(texts[i : i + 16]).student for i in range(0, len(texts), 16)]


@torch.no_grad()
def bits_per_byte(model, kind, part):
    """Return the bits per byte of held-out rows."""
    nats = num_bytes = 0.0
    for batch in held_out(kind, part):
        counts = (batch.num_bytes >= 0) & (batch.labels != -100)
        values = F.cross_entropy(model(input_ids=batch.ids).logits.flatten(0, 1),
                                 batch.labels.flatten(), ignore_index=-100, reduction="none")
        nats += float((values.view_as(batch.labels) * counts).sum())
        num_bytes += float((batch.num_bytes * counts).sum())
    return nats / num_bytes / math.log(2)


def train_teacher(kind):
    """Train a teacher, and keep the means of its weights over the last steps every so often."""
    folder = scale.runs / f"training-{name_of(kind)}"
    if (folder / "bits.json").exists():
        return
    mean = fresh(scale.teacher, kind, 0).eval()
    bits = []

    def keep(model, step):
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()),
                                 1 - min(DECAY, step / (step + 10)))
        if (step + 1) % scale.kept_every == 0:
            write(folder / f"{len(bits)}.pt", partial(torch.save, mean.state_dict()))
            bits.append(bits_per_byte(mean, kind, "choose"))
            print(kind, step + 1, round(bits[-1], 4), file=sys.stderr, flush=True)

    learn(fresh(scale.teacher, kind, 0), kind, corpus()["train"], scale.teacher_steps,
          size=scale.teacher_batch, rate=scale.teacher_rate, after=keep)
    write(folder / "bits.json", lambda part: part.write_text(json.dumps(bits)))


def match_teachers():
    """Write, of each teacher, the weights with the bits per byte of the worst one."""
    bits = {kind: json.loads((scale.runs / f"training-{name_of(kind)}" / "bits.json").read_text())
            for kind in KINDS}
    goal = max(min(values) for values in bits.values())
    for kind, values in bits.items():
        path = scale.runs / f"teacher-{name_of(kind)}.pt"
        if path.exists():
            continue
        number = max(next(i for i, value in enumerate(values) if value <= goal), 1)
        ends = [torch.load(scale.runs / f"training-{name_of(kind)}" / f"{i}.pt")
                for i in (number - 1, number)]
        model = fresh(scale.teacher, kind, 0).eval()
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


@dataclass(frozen=True)
class Run:
    """Name a run; what has the same name has the same result."""

    regime: str
    student: str
    teacher: str
    loss: str
    weight: float
    ce_weight: float
    rate: float
    seed: int
    steps: int

    @property
    def path(self):
        values = asdict(self) | {"teacher": Path(self.teacher).name}
        return scale.runs / "results" / ("_".join(map(str, values.values())) + ".json")

    def result(self):
        return json.loads(self.path.read_text())


def do(run):
    """Train the student of a run and write {"choose", "report": bits per byte, "seconds"}."""
    if run.path.exists():
        return
    regime = scale.regimes[run.regime]
    texts = corpus()["train"][: regime.rows]
    student = fresh(scale.student, run.student, run.seed)
    if not regime.is_fresh:
        student.load_state_dict(first_weights(run.student, run.seed))
    kd = None if run.loss == TEXT else TeacherLoss(run, regime.rows)
    best = {"choose": math.inf}
    seconds = 0.0 if kd is None else kd.seconds * min(regime.rows, run.steps * scale.batch)
    every = math.ceil(run.steps / regime.checks)
    clock = [time.process_time()]

    def check(model, step):
        nonlocal best, seconds
        if (step + 1) % every and step + 1 != run.steps:
            return
        seconds += time.process_time() - clock.pop()
        model.eval()
        bits = {part: bits_per_byte(model, run.student, part) for part in ("choose", "report")}
        model.train()
        if bits["choose"] < best["choose"]:
            best = bits | {"steps": step + 1}
        clock.append(time.process_time())

    learn(student, run.student, texts, run.steps, kd=kd, seed=run.seed, rate=run.rate,
          weights=(run.ce_weight, run.weight), after=check)
    result = json.dumps(best | {"seconds": seconds})
    write(run.path, lambda part: part.write_text(result))


def first_weights(kind, seed):
    """Return the weights of a student that has read the documentation."""
    path = scale.runs / f"first-{kind}-{seed}.pt"
    if not path.exists():
        student = learn(fresh(scale.student, kind, seed), kind, corpus()["documentation"],
                        FIRST_STEPS, seed=seed)
        write(path, partial(torch.save, student.state_dict()))
    return torch.load(path)


def learn(model, kind, texts, steps, *, kd=None, seed=0, rate=0.0, weights=(1.0, 0.0), size=0,
          after=lambda model, step: None):
    """Train a model and return it.

    Args:
        kd: TeacherLoss, or None.
        rate, size: highest learning rate, passages a step; 0: those of the scale's students.
        weights: of the text and of the teacher.
        after: called with the model and the number of each step.
    """
    collator = Collator(encoder(kind), [kd.options] if kd else [])
    # the usual values for small models
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, numbers in enumerate(batches(len(texts), size or scale.batch, seed, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, rate or scale.rate)
        batch = collator([texts[number] for number in numbers])
        logits = model(input_ids=batch.student.ids).logits.flatten(0, 1)
        loss = weights[0] * F.cross_entropy(logits, batch.student.labels.flatten(),
                                            ignore_index=-100)
        if kd:
            loss = loss + weights[1] * kd(logits, batch, numbers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(model, step)
    return model.eval()


class TeacherLoss:
    """Compare a student with what a teacher says of the same rows.

    seconds: that the teacher takes for a row.
    """

    def __init__(self, run, num_rows):
        kinds = run.student, run.teacher
        rivals.add()
        student, teacher_name = [str(folder_of(kind)) for kind in kinds]
        cfg = Config(student=student, teacher=teacher_name, data="-", loss=run.loss,
                     ce_weight=run.ce_weight)
        encoders = [encoder(kind) for kind in kinds]
        self.loss = build_loss(cfg, *encoders, "cpu")
        self.options = PairOptions(encoders[1], self.loss.spelling)
        self.rows, self.seconds = hidden(run.teacher, num_rows)
        weight = teacher(run.teacher).get_output_embeddings().weight.detach()
        self.head = weight[: len(encoders[1].table)]

    @torch.no_grad()
    def states(self, ids, numbers):
        """Return what the teacher's head reads of rows."""
        rows = [self.rows[number][: ids.shape[1]].float() for number in numbers]
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


class Gains(NamedTuple):
    """Hold what a loss gains over the text alone, for every seed; seconds: median of a run."""

    bits: list
    weight: float
    seconds: float
    steps: int


class Study:
    """Decide, from the results so far, which runs are needed."""

    def __init__(self, args):
        self.args = args
        self.losses = args.losses.split(",")
        self.steps = scale.regimes[args.regime].steps
        self.known = {}  # (loss, student, teacher): a row of an earlier table
        if args.table:
            for row in json.loads(Path(args.table).read_text())["table"]:
                self.known[row["loss"], row["student"], row["teacher"]] = row
        self.missing = []
        self.pairs = [(student, other) for student in KINDS for other in KINDS]
        if args.regime == "above":
            self.pairs = [(student, args.teacher) for student in KINDS]
        if args.pairs:
            self.pairs = [tuple(pair.split("-", 1)) for pair in args.pairs.split(",")]

    def results(self, pair, loss, weight, seeds, steps=0):
        """Return the results of the runs of some seeds; None, and noted, where one is missing."""
        is_text = loss == TEXT
        runs = [Run(self.args.regime, pair[0], "" if is_text else pair[1], loss,
                    0.0 if is_text else weight, 1.0 if is_text else self.args.ce_weight,
                    self.args.rate or scale.rate, seed, steps or self.steps)
                for seed in seeds]
        missing = [run for run in runs if not run.path.exists()]
        self.missing += [run for run in missing if run not in self.missing]
        return None if missing else [run.result() for run in runs]

    def weight_of(self, pair, loss):
        """Return the best weight on the choosing rows; None: more runs are needed to tell."""
        if self.args.weight or (loss, *pair) in self.known:
            return self.args.weight or self.known[loss, *pair]["weight"]
        weights = list(WEIGHTS)
        while True:
            found = {weight: self.results(pair, loss, weight, SEEDS_TO_CHOOSE)
                     for weight in weights}
            if None in found.values():
                return None
            bits = {weight: statistics.mean(result["choose"] for result in results)
                    for weight, results in found.items()}
            best = min(bits, key=bits.get)
            if best == min(weights) > LIGHTEST:
                weights.append(best / 2)
            elif best == max(weights) < HEAVIEST:
                weights.append(best * 2)
            else:
                return best

    def gains(self, pair, loss):
        """Return the Gains of a loss; None: more runs are needed to tell."""
        loss = EQUAL if pair[0] == pair[1] else loss
        weight = self.weight_of(pair, loss)
        seeds = range(self.args.seeds)
        texts = self.results(pair, TEXT, 0.0, seeds)
        if weight is None:
            return None
        steps = self.steps
        if self.args.equal_seconds and loss not in (EQUAL, self.losses[0]):
            both = [self.seconds(pair, name) for name in (self.losses[0], loss)]
            if None in both:
                return None
            steps = max(round(steps * both[0] / both[1]), 1)
        found = self.results(pair, loss, weight, seeds, steps)
        if found is None or texts is None:
            return None
        bits = [text["report"] - result["report"] for text, result in zip(texts, found)]
        seconds = statistics.median(result["seconds"] for result in found)
        return Gains(bits, weight, seconds, steps)

    def seconds(self, pair, loss):
        """Return what as many steps as of the first loss take; None: more runs are needed."""
        if (loss, *pair) in self.known:
            return self.known[loss, *pair]["seconds"]
        weight = self.weight_of(pair, loss)
        found = weight and self.results(pair, loss, weight, range(self.args.seeds))
        return found and statistics.median(result["seconds"] for result in found)

    def table(self):
        """Return {(loss, pair): Gains}; None while runs are missing."""
        self.missing = []
        found = {(loss, pair): self.gains(pair, loss) for loss in self.losses
                 for pair in self.pairs}
        return None if self.missing else found

    def save(self, found):
        """Write the table and return its path."""
        name = f"{self.args.regime}{'_equal_seconds' * self.args.equal_seconds}.json"
        rows = [dict(loss=loss, student=pair[0], teacher=Path(pair[1]).name) | gains._asdict()
                for (loss, pair), gains in found.items()]
        record = json.dumps(asdict(self.args) | {"torch": torch.__version__, "table": rows})
        write(scale.runs / name, lambda part: part.write_text(record.replace("}, ", "},\n")))
        return scale.runs / name


def interval(values):
    """Return "mean ± half of the interval of 95 %" of values."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.4f}"
    quantile = STUDENTS_T[min(len(values), len(STUDENTS_T) + 1) - 2]
    return f"{mean:.4f} ± {quantile * statistics.stdev(values) / len(values) ** 0.5:.4f}"


def show(found, losses, pairs):
    """Print the gains of every pair, the differences to the first loss, and the shares."""
    first = losses[0]
    for pair in pairs:
        is_equal = pair[0] == pair[1]
        rows = [["loss", "weight", "gain over text", f"{first} ahead by", "steps", "seconds"]]
        for loss in losses[:1] if is_equal else losses:
            gains = found[loss, pair]
            ahead = [a - b for a, b in zip(found[first, pair].bits, gains.bits)]
            rows.append([EQUAL if is_equal else loss, f"{gains.weight:g}", interval(gains.bits),
                         "" if loss == first else interval(ahead), str(gains.steps),
                         f"{gains.seconds:.0f}"])
        print(f"\nstudent {pair[0]}, teacher {Path(pair[1]).name}\n"
              f"{markdown_table(rows)}")
    if {(a, b) for a in KINDS for b in KINDS} <= set(pairs):
        rows = [["loss", "share of an equal tokenizer's gain", f"{first} ahead by"]]
        of_first = shares(found, first)
        for loss in losses:
            ahead = [a - b for a, b in zip(of_first, shares(found, loss))]
            rows.append([loss, interval(shares(found, loss)),
                         "" if loss == first else interval(ahead)])
        print(f"\n{markdown_table(rows)}", flush=True)


def shares(found, loss):
    """Return the share of every seed; teachers' and students' own terms cancel in a square."""
    of_seed = []
    for seed in range(len(found[loss, ("bytes", "bytes")].bits)):
        bits = {(a, b): found[loss, (a, b)].bits[seed] for a in KINDS for b in KINDS}
        equal = statistics.mean(bits[kind, kind] for kind in KINDS)
        other = statistics.mean(bits[a, b] for a in KINDS for b in KINDS if a != b)
        of_seed.append(other / equal)
    return of_seed


def main(args):
    if (args.regime == "above") != bool(args.teacher):
        raise ValueError("--teacher DIR and --regime above go together")
    use(args.regime)
    study = Study(args)
    is_alone = args.processes == 1
    with nullcontext() if is_alone else ProcessPoolExecutor(
            args.processes, multiprocessing.get_context("spawn"), use, (args.regime,)) as pool:
        for_each = map if is_alone else pool.map
        if not args.plan:
            for kind in KINDS:
                encoder(kind)
            if args.regime != "above":
                list(for_each(train_teacher, KINDS))
                match_teachers()
        while (found := study.table()) is None:
            known = [json.loads(path.read_text())["seconds"]
                     for path in (scale.runs / "results").glob(f"{args.regime}_*.json")]
            seconds = statistics.mean(known) if known else 0.3 * study.steps
            minutes = len(study.missing) * seconds / args.processes / 60
            print(f"{len(study.missing)} runs, about {minutes:.0f} minutes; more where a weight is "
                  "to be chosen", file=sys.stderr, flush=True)
            if args.plan:
                return
            if not scale.regimes[args.regime].is_fresh:
                list(for_each(first_weights, *zip(*{(r.student, r.seed) for r in study.missing})))
            list(for_each(do, study.missing))
    show(found, study.losses, study.pairs)
    print(study.save(found))


if __name__ == "__main__":
    tool(Args, main)
