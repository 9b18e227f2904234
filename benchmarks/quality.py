"""Compare losses by what a small student learns from a teacher with another tokenizer.

    python benchmarks/quality.py ASSETS [--pairs finer,coarser,crossing] [--seeds 8]
                                 [--losses piece_kl,event_kl,equal] [--weights 2] [--alone]

A fresh student learns from 900 stories, 8 a step; 100 stories are held out.  Some of them hold
characters that were decoded wrongly ("odd" rows), which a table shows apart.  The pairs:

finer      student tok512, teacher tinytalk_neo_3M (14,019 tokens)
coarser    student tinytalk's tokenizer, teacher stories260K (tok512)
crossing   student a Unigram tokenizer of 1,024 tokens, trained on the 900 stories; teacher tinytalk

Beside the losses of `distill.py` there is a limit:

equal      forward KL from a teacher with the student's tokenizer: bitstories_1M (finer), tinytalk
           (coarser).  It is another teacher, and not as good a one everywhere.

A loss with a number, as piece_kl@256, learns from a teacher of which so many tokens are kept, the
most likely ones; piece_kl@256-cache from what a cache keeps, piece_kl@256-sampled from one that was
written with --sampled.

All runs of a pair have one learning rate, the same batches and, per seed, the same first student.
They use the job's own alignment, tables and losses, in one process and without DeepSpeed.  Results
are kept in runs/quality, complete runs are not repeated, and several processes may share them.
Figures of record are in docs/LOG.md.
"""

import json
import math
import statistics
import sys
import time
from dataclasses import MISSING, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from isogloss import demo, demo_report
from isogloss.align import TokenTable
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import text_key
from isogloss.data.sample import TextEncoder
from isogloss.flags.parse import flag, tool
from isogloss.objective.loss_table import build_loss
from isogloss.teachers.kept_tokens import byte_order, estimated, keep_tokens, uniform_numbers
from isogloss.teachers.model import truncate

RUNS = ROOT / "runs" / "quality"
BATCH = 8  # stories a step
HELD_OUT = 100
LEARNING_RATE = 3e-3  # without a teacher better than 1e-2 (finer: 2.49 instead of 2.90)
MAX_LENGTH = 256  # attention over longer texts would be most of the time
SHAPE = "stories260K"  # of every student
MOJIBAKE = "â"  # how a curly quotation mark begins that was decoded wrongly
EMPTY = ""  # no loss: the text alone
TEXT = "text"


@dataclass(kw_only=True)
class Args:
    """Compare losses by the held-out bits per byte of their students."""

    assets: str = flag(MISSING, "folder with models/ and text/tinystories_1000.json.")
    pairs: str = flag("finer,coarser,crossing", "of the module's docstring, with commas.")
    seeds: int = flag(8, "students per loss, with seeds 0, 1, ...")
    steps: int = flag(150, "optimizer steps of each student.")
    losses: str = flag("piece_kl,event_kl,equal", "losses and the limit, with commas.")
    weights: str = flag("2", "kd_weight of the losses, with commas: one, or one for each.")
    alone: bool = flag(False, "train without the text: ce_weight 0.")


# --- a pair of models -----------------------------------------------------------------------------


@dataclass
class Teacher:
    """Hold a teacher, its loss, and the hidden states of the stories that it has read.

    top_k: tokens of it that are kept; 0: all.
    kept: "" the most likely ones; "cache", "sampled": as caches keep them.
    order: ByteOrder of its tokens, once it is needed.
    """

    model: object
    encoder: TextEncoder
    loss: object
    hidden: dict
    top_k: int = 0
    kept: str = ""
    order: object = None

    def logits(self, batch, stories, collator):
        """Return (B * T, W) logits of a batch; every story is read once."""
        width = batch.ids.shape[1]
        rows = []
        for number, story in stories:
            if number not in self.hidden:
                ids = collator([story]).teachers[0].ids
                self.hidden[number] = self.model.base_model(input_ids=ids)[0][0]
            hidden = self.hidden[number]
            rows.append(F.pad(hidden, (0, 0, 0, width - len(hidden))))
        weight = self.model.get_output_embeddings().weight[: len(self.encoder.table)]
        logits = torch.stack(rows).flatten(0, 1) @ weight.T
        if not self.top_k:
            return logits
        labels = batch.labels.flatten()
        if self.kept:
            scored = self.kept_tokens(logits, labels, stories, width)
        else:
            scored = truncate(logits, self.top_k, labels)
        return scored(torch.arange(len(logits)))

    def kept_tokens(self, logits, labels, stories, width):
        """Return the ScoredLogits that a cache would give."""
        if self.order is None:
            self.order = byte_order(self.encoder.table)
        labels = labels.clamp(min=0)  # positions without a label are in no term
        logits = logits[:, self.order.ids_W]
        if self.kept == "cache":
            return keep_tokens(logits, self.top_k, labels, self.order).scored
        numbers = [uniform_numbers(0, text_key(story), width) for _, story in stories]
        kept = keep_tokens(logits, self.top_k, labels, self.order, 1.0, torch.cat(numbers))
        return estimated(kept.scored, kept.num_drawn_N)


class ModelPair:
    """Hold what all runs of one pair share."""

    def __init__(self, name, assets):
        self.name = name
        self.models = assets / "models"
        stories = json.loads((assets / "text" / "tinystories_1000.json").read_text())
        stories = [story if isinstance(story, str) else story["text"] for story in stories]
        self.held_out = stories[:HELD_OUT]
        self.train = stories[HELD_OUT:]
        if name == "crossing":
            folder = RUNS / "unigram"
            if not (folder / "tokenizer.json").exists():
                demo.unigram(self.train, 1024).save_pretrained(folder)
        else:
            folder = self.models / {"finer": "stories260K", "coarser": "tinytalk_neo_3M"}[name]
        self.student_folder = folder
        self.student = encoder_of(folder, MAX_LENGTH)
        self.teacher_name = "stories260K" if name == "coarser" else "tinytalk_neo_3M"
        # the only models with the students' tokenizers
        self.equal_name = {"finer": "bitstories_1M", "coarser": "tinytalk_neo_3M"}.get(name)
        self.loaded = {}
        self.hidden = {}

    def load(self, name):
        """Return (model, TextEncoder) of a teacher."""
        if name not in self.loaded:
            model = AutoModelForCausalLM.from_pretrained(self.models / name).eval()
            longest = model.config.max_position_embeddings
            self.loaded[name] = model, encoder_of(self.models / name, longest)
            self.hidden[name] = {}
        return self.loaded[name]

    def teacher(self, loss):
        """Return the Teacher of a loss or a limit; None without one."""
        if loss == EMPTY:
            return None
        name = self.equal_name if loss == "equal" else self.teacher_name
        model, encoder = self.load(name)
        # the limit compares by forward KL
        kind, _, top_k = loss.partition("@")
        top_k, _, kept = top_k.partition("-")
        if kind == "equal":
            kind = "forward_kl"
        cfg = Config(student=str(self.student_folder), teacher=str(self.models / name), data="-",
                     loss=kind)
        kd = build_loss(cfg, self.student, encoder, "cpu", bool(top_k))
        return Teacher(model, encoder, kd, self.hidden[name], int(top_k or 0), kept)

    def fresh_student(self, seed):
        """Return a student with random weights."""
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(self.models / SHAPE)
        config.vocab_size = len(self.student.table)
        return AutoModelForCausalLM.from_config(config)


def encoder_of(folder, longest):
    """Return the TextEncoder of a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), longest)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Name a run; what has the same name has the same result."""

    pair: str
    loss: str
    weight: float
    ce_weight: float
    seed: int
    steps: int

    @property
    def path(self):
        """Return the file of its result."""
        loss = self.loss or TEXT
        return RUNS / f"{self.pair}_{loss}_{self.weight:g}_{self.ce_weight:g}_{self.seed}_" \
                      f"{self.steps}.json"


def result_of(run, pair):
    """Return {"all", "clean", "odd": bits per byte, "seconds"}; train where that is not done."""
    if not run.path.exists():
        start = time.process_time()
        student = train(run, pair)
        seconds = time.process_time() - start
        result = held_out_bits(student, pair) | {"seconds": seconds}
        part = run.path.with_suffix(f".{time.time_ns()}.part")
        part.write_text(json.dumps(result))
        part.rename(run.path)
        print(run, {key: round(value, 4) for key, value in result.items()}, file=sys.stderr)
    return json.loads(run.path.read_text())


def train(run, pair):
    """Train a student and return it."""
    student = pair.fresh_student(run.seed)
    teacher = pair.teacher(run.loss)
    options = [PairOptions(teacher.encoder, teacher.loss.spelling)] if teacher else []
    collator = Collator(pair.student, options)
    # the usual values for small models
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, numbers in enumerate(batches(len(pair.train), run)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run.steps)
        batch = collator([pair.train[number] for number in numbers])
        ids = batch.student.ids
        logits = student(input_ids=ids).logits.flatten(0, 1)
        labels = batch.student.labels.flatten()
        loss = run.ce_weight * F.cross_entropy(logits, labels, ignore_index=-100)
        if teacher:
            loss = loss + run.weight * teacher_loss(logits, batch, numbers, pair, teacher, collator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return student.eval()


def batches(num_stories, run):
    """Yield the numbers of the stories of every step."""
    generator = torch.Generator().manual_seed(run.seed)
    order = []
    for _ in range(run.steps):
        if len(order) < BATCH:
            order += torch.randperm(num_stories, generator=generator).tolist()
        yield order[:BATCH]
        del order[:BATCH]


def learning_rate(step, steps):
    """Return a linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warm_up = steps // 10
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def teacher_loss(logits, batch, numbers, pair, teacher, collator):
    """Return the mean distillation loss of a batch."""
    stories = [(number, pair.train[number]) for number in numbers]
    of_teacher = batch.teachers[0]
    with torch.no_grad():
        teacher_logits = teacher.logits(of_teacher, stories, collator)
    total = logits.new_zeros(())
    for tile in of_teacher.tiles:
        block = logits[tile.student_positions]
        for sub_tile in tile.sub_tiles:
            if sub_tile.teacher_positions is not None:
                answers = teacher_logits[sub_tile.teacher_positions]
            total = total + teacher.loss.loss_fn(
                block[sub_tile.student_slice], answers[sub_tile.teacher_slice], sub_tile)
    return total / batch.counts.pairs[0].kd_terms


@torch.no_grad()
def held_out_bits(student, pair):
    """Return the bits per byte of the held-out stories: all, clean ones, odd ones."""
    collator = Collator(pair.student, [])
    nats = []
    num_bytes = []
    for first in range(0, HELD_OUT, 10):
        batch = collator(pair.held_out[first : first + 10]).student
        logits = student(input_ids=batch.ids).logits
        counts = (batch.num_bytes >= 0) & (batch.labels != -100)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100,
                               reduction="none").view_as(batch.labels)
        nats += (loss * counts).sum(1).tolist()
        num_bytes += (batch.num_bytes * counts).sum(1).tolist()
    is_odd = [MOJIBAKE in story for story in pair.held_out]
    chosen = {"all": [True] * HELD_OUT, "clean": [not odd for odd in is_odd], "odd": is_odd}
    bits = {}
    for name, rows in chosen.items():
        total = sum(value for value, row in zip(nats, rows) if row)
        bits[name] = total / sum(size for size, row in zip(num_bytes, rows) if row) / math.log(2)
    return bits


# --- tables ---------------------------------------------------------------------------------------


def table(results):
    """Return a Markdown table of one pair.

    Args:
        results: {(loss, weight): result of every seed}, that of the text alone first.
    """
    baseline = next(iter(results.values()))
    rows = [["loss", "weight", "bits per byte", "clean", "odd", "gain", "better", "seconds"]]
    for (loss, weight), of_seed in results.items():
        means = [f"{statistics.mean(one[key] for one in of_seed):.3f}"
                 for key in ("all", "clean", "odd")]
        row = [loss or TEXT, f"{weight:g}" if loss else "", *means]
        gains = [before["all"] - one["all"] for before, one in zip(baseline, of_seed)]
        deviation = statistics.stdev(gains) if len(gains) > 1 else 0.0
        better = sum(gain > 0 for gain in gains)
        gain = f"{statistics.mean(gains):.3f} ± {deviation:.3f}" if loss else ""
        seconds = statistics.median(one["seconds"] for one in of_seed)
        rows.append([*row, gain, f"{better} of {len(gains)}" if loss else "", f"{seconds:.0f}"])
    return demo_report.markdown_table(rows)


def main(args):
    torch.set_num_threads(1)  # models of this size gain nothing from a second thread
    RUNS.mkdir(parents=True, exist_ok=True)
    assets = Path(args.assets).resolve()
    losses = args.losses.split(",") if args.losses else []
    weights = [float(weight) for weight in args.weights.split(",")]
    if len(weights) == 1:
        weights *= len(losses)
    for name in args.pairs.split(","):
        pair = ModelPair(name, assets)
        arms = [(EMPTY, 0.0)]
        for loss, weight in zip(losses, weights, strict=True):
            if loss != "equal" or pair.equal_name:
                arms.append((loss, weight))
        results = {arm: [] for arm in arms}
        # seeds outside, losses inside: after every seed the table compares all losses
        for seed in range(args.seeds):
            for loss, weight in arms:
                ce_weight = 0.0 if args.alone and loss else 1.0
                run = Run(name, loss, weight, ce_weight, seed, args.steps)
                results[loss, weight].append(result_of(run, pair))
        print(f"{name}, {args.steps} steps, {args.seeds} seeds")
        print(table(results), flush=True)


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
