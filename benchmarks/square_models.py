"""Make what benchmarks/square.py compares: texts, tokenizers, matched teachers, and train.

What is made is kept in the runs of its Scale; `use` sets it for this process.

Tests: tests/test_benchmarks.py.
"""

import hashlib
import json
import math
import sys
import sysconfig
import time
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.square_table import FIRST, KINDS, LARGE, LARGE_RIVAL, RATES, REGIMES, TEXT
from isogloss import demo
from isogloss.align import TokenTable
from isogloss.data.batch import Collator
from isogloss.data.sample import TextEncoder
from isogloss.job.columns import to_device
from recipes.tiny import prepare

PASSAGE = 480  # bytes
SHORTEST = 60  # characters; headings and one-word docstrings teach nothing
# no part of the library, or left out by some distributions
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data",
                   "turtledemo", "idle_test"}
CHOOSING, REPORTING = 96, 192  # held-out passages
DOMAINS = {"sources": ("report", REPORTING), "documentation": ("documentation", CHOOSING)}
MOST_TEXTS = 60_000  # to learn from
MAX_LENGTH = 512
DECAY = 0.97  # of the mean of a teacher's weights over the steps
MATCHED = 0.005  # bits per byte


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


# --- training -------------------------------------------------------------------------------------


def now():
    """Return the seconds that count: of this process's core, or of a clock where a GPU computes."""
    if device() == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


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
