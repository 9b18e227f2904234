"""What benchmarks/square.py asks, and its tables, from the runs that docs/log keeps.

    python benchmarks/square_table.py                 # all tables, and the first claim of README.md
    python benchmarks/square_table.py --merge FOLDER  # add the runs that another machine made

docs/log/square_REGIME.jsonl has a line for every run: pair, loss, form, weight, rate, seed, steps,
CPU seconds, and bits per byte before and after on each held-out domain.  Nothing is lost between
a run and a table, and no model is loaded here.

A weight is chosen by two seeds of its own, on passages of its own, from a grid of factor 2 that
has a worse weight on both sides of the best; without a teacher is one of them, so that "none" is
an answer.  At equal seconds a loss takes as many steps as fit into those of piece_kl, by costs that
are measured in turns (square_costs.jsonl).  csd and bpm are Python loops here and would lose by
that: they get the steps of SimCT, the cheapest loss.  Differences are paired by seed; intervals are
of 95 %, by Student's t.  A row has at least two seeds; n says how many.
"""

import itertools
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from isogloss.flags.parse import flag
from isogloss.flags.tool import tool

LOG = ROOT / "docs" / "log"
TEXT = "text"  # no teacher
EQUAL = "forward_kl"  # what every loss is where both tokenizers are the same
FIRST = "piece_kl"
EVEN = "piece_kl_even"  # what that was until 29 November 2026: choices weigh as their roots do
KINDS = "bytes", "digits", "unigram"
PAIRS = {("digits", "bytes"): "finer", ("bytes", "digits"): "coarser"}  # others cross
SEEDS_TO_CHOOSE = 100, 101
FEW = 3  # seeds of every pair before more of any
LIGHTEST, HEAVIEST = 1 / 64, 64.0  # weights that are tried at most
# where the grid begins: near what earlier tables found, so that few runs bracket the best
FIRST_WEIGHTS = defaultdict(lambda: 1 / 8, piece_kl=1.0, piece_kl_even=1.0, forward_kl=1.0,
                            simct=1 / 4, simct_fkl=1.0, projection_kl=1 / 4, bpm=1 / 4)
# Of students with random weights, who learn noisily: at 1/8 a rival may only seem bracketed, so
# that is tried where no weight around 1 helps.
FIRST_WEIGHTS_FRESH = defaultdict(lambda: (1.0, 1 / 8), simct=(1 / 4,))
RATES = 3e-3, 1.5e-3
# the name of a method, and its forms: that of its paper first
RIVALS = {"SimCT": ("simct", "simct_fkl"), "BPM": ("bpm", "bpm_fkl"), "CSD": ("csd",),
          "P-KL": ("projection_kl",), "H-KL": ("h_kl",), "ALM": ("alm",), "ULD": ("uld",)}
FORMS = {"simct": "published: reverse KL", "simct_fkl": "forward KL",
         "bpm": "published: JSD 0.5, white space masked", "bpm_fkl": "forward KL, no mask",
         TEXT: "no teacher", FIRST: "default", EVEN: "choices weigh 1"}
LOOPS = "bpm", "bpm_fkl", "csd"  # in Python, see above
CHEAPEST = "simct"
SECONDS = ", equal seconds"
DOMAINS = "sources", "documentation"
# 97.5 % of Student's t with n - 1 degrees of freedom, for n = 2, 3, ...
STUDENTS_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)


class Regime(NamedTuple):
    """Say what the students of a comparison learn.

    rows: passages to train on.
    steps: optimizer steps.
    checks: how often the chosen passages are looked at, for the best student.
    is_fresh: they have random weights.
    teacher_steps: of their teachers' training, if not those of the scale.
    text_steps: steps that the text alone is given as well; the best of its lengths counts.
    """

    rows: int
    steps: int
    checks: int = 1
    is_fresh: bool = True
    teacher_steps: int = 0
    text_steps: tuple = ()


REGIMES = {"new": Regime(1200, 150, is_fresh=False), "little": Regime(1200, 150),
           "repeated": Regime(150, 300, checks=10, is_fresh=False, text_steps=(75, 150)),
           "repeated_300": Regime(300, 300, checks=10, is_fresh=False, text_steps=(150, 600)),
           "repeated_600": Regime(600, 300, checks=10, is_fresh=False, text_steps=(150, 600)),
           "repeated_1200": Regime(1200, 300, checks=10, is_fresh=False, text_steps=(600, 1200)),
           "long": Regime(8000, 3000, checks=12, teacher_steps=1800), "above": Regime(1200, 150)}
# after how much text does a teacher stop paying?
LARGE = {"large_500": Regime(500, 300, checks=15), "large_2000": Regime(2000, 800, checks=16),
         "large_8000": Regime(8000, 2000, checks=20)}
LARGE_RIVAL = "simct_fkl"  # SimCT's own form teaches fresh students nothing at any weight
LONGEST = 4  # times the steps of a large regime, that a run to its own best takes at most


@dataclass(frozen=True)
class Run:
    """Name a run; what has the same name has the same result."""

    regime: str
    student: str
    teacher: str
    loss: str
    weight: float
    rate: float
    seed: int
    steps: int
    ce_weight: float = 1.0


@dataclass(frozen=True)
class Cost:
    """Ask for the CPU seconds of a step of some losses, measured in turns."""

    scale: str
    student: str
    teacher: str
    losses: tuple


RUN_FIELDS = [field.name for field in fields(Run)]


def name_of(record):
    """Return what a record is of: a Run or a Cost."""
    if "costs" in record:
        return Cost(record["scale"], record["student"], record["teacher"], tuple(record["costs"]))
    return Run(**{key: record[key] for key in RUN_FIELDS})


class Records:
    """Keep records in the files of a folder, one line each; the first of a run counts.

    Texts are those of a machine's Python, so runs of other ones are left out.

    Args:
        corpus: the name of the texts; empty: those that most runs have.
    """

    def __init__(self, folder, corpus=""):
        self.folder = Path(folder)
        self.of = {}
        records = []
        for path in sorted(self.folder.glob("square_*.jsonl")):
            records += map(json.loads, path.read_text().splitlines())
        names = Counter(record["corpus"] for record in records if "corpus" in record)
        corpus = corpus or max(names, key=names.get, default="")
        for record in records:
            if record.get("corpus", corpus) == corpus:
                self.of.setdefault(name_of(record), record)

    def add(self, record):
        """Append a record to the file of its table, unless it is there."""
        name = name_of(record)
        if name in self.of:
            return
        self.of[name] = record
        table = "costs" if isinstance(name, Cost) else name.regime.partition("_")[0]
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"square_{table}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def costs(self, scale, pair, losses):
        """Return (seconds of a step by loss, the teacher's for a passage); None if not measured."""
        for name, record in self.of.items():
            if not isinstance(name, Cost) or not set(losses) <= set(name.losses):
                continue
            if (name.scale, name.student, name.teacher) == (scale, *pair):
                return record["costs"], record["teacher_row"]
        return None


class Gains(NamedTuple):
    """Hold what a loss gains over the text alone, in bits per byte.

    bits: {domain: {seed: gain}}.
    weight: 0 where no weight helps.
    seconds: medians of a run with a teacher that is asked each time, and that reads a passage once.
    """

    bits: dict
    weight: float
    seconds: tuple
    steps: int


@dataclass
class Study:
    """Ask about losses and pairs in a regime at a rate; say which runs are missing.

    Attributes:
        batch: passages of a step.
        weight: of all losses; 0: it is chosen.
        planning: what follows from a choice is listed before it is made.
    """

    records: Records
    regime: str
    rate: float
    losses: list
    pairs: list
    seeds: int = 8
    batch: int = 8
    weight: float = 0.0
    ce_weight: float = 1.0
    planning: bool = False

    def __post_init__(self):
        self.steps = (REGIMES | LARGE)[self.regime].steps
        self.lengths = (REGIMES | LARGE)[self.regime].text_steps
        self.is_fresh = (REGIMES | LARGE)[self.regime].is_fresh
        self.scale = "large" if self.regime in LARGE else "small"
        self.wanted = []

    def run(self, pair, loss, weight, seed, steps=0):
        """Return the record of a run; None, and noted, where there is none."""
        is_text = loss == TEXT
        name = Run(self.regime, pair[0], "" if is_text else pair[1], loss,
                   0.0 if is_text else weight, self.rate, seed, steps or self.steps,
                   1.0 if is_text else self.ce_weight)
        record = self.records.of.get(name)
        if record is None and name not in self.wanted:
            self.wanted.append(name)
        return record

    def weight_of(self, pair, loss):
        """Return the best weight on the choosing passages, 0 for none; None: runs are missing."""
        if self.weight:
            return self.weight
        text = self.mean_to_choose(pair, TEXT, 0.0)
        for first in self.first_weights(loss):
            weight, bits = self.bracketed(pair, loss, first)
            if text is None or weight is None:
                return None
            if bits < text:
                return weight
        return 0.0

    def first_weights(self, loss):
        """Return where grids begin; the next one is for a loss of which no weight helps."""
        return FIRST_WEIGHTS_FRESH[loss] if self.is_fresh else (FIRST_WEIGHTS[loss],)

    def bracketed(self, pair, loss, first=0.0):
        """Return (the best weight of any but 0, its bits); None and None: runs are missing."""
        first = first or self.first_weights(loss)[0]
        bits = {}
        weights = [first, first / 2, first * 2]
        while True:
            for weight in weights:
                if weight not in bits:
                    bits[weight] = self.mean_to_choose(pair, loss, weight)
            if None in bits.values():
                return None, None
            best = min(weights, key=bits.get)
            if best == min(weights) > LIGHTEST:
                weights.append(best / 2)
            elif best == max(weights) < HEAVIEST:
                weights.append(best * 2)
            else:
                return best, bits[best]

    def mean_to_choose(self, pair, loss, weight, steps=0):
        """Return the mean bits per byte of the choosing seeds; None: a run is missing."""
        if loss == TEXT and not steps:
            steps = self.text_steps(pair)
            if not steps:
                return None
        records = [self.run(pair, loss, weight, seed, steps) for seed in SEEDS_TO_CHOOSE]
        return None if None in records else statistics.mean(one["choose"] for one in records)

    def text_steps(self, pair):
        """Return with how many of its steps the text alone is best; 0 while runs are missing."""
        if not self.lengths:
            return self.steps
        bits = {steps: self.mean_to_choose(pair, TEXT, 0.0, steps)
                for steps in (*self.lengths, self.steps)}
        return 0 if None in bits.values() else min(bits, key=bits.get)

    def steps_of(self, pair, loss):
        """Return the steps that take the seconds of the first loss; None: costs are missing."""
        losses = {TEXT, FIRST, CHEAPEST} | {one for one in self.losses if one not in LOOPS}
        known = self.records.costs(self.scale, pair, {TEXT, FIRST, CHEAPEST, loss} - set(LOOPS))
        if known is None:
            cost = Cost(self.scale, *pair, tuple(sorted(losses)))
            if cost not in self.wanted:
                self.wanted.append(cost)
            return None
        costs, of_row = known
        cost = costs[CHEAPEST if loss in LOOPS else loss]
        teacher = self.batch * of_row
        of_loss = cost if loss == TEXT else cost + teacher
        return max(round(self.steps * (costs[FIRST] + teacher) / of_loss), 1)

    def best_steps(self, pair, loss):
        """Return the steps, doubled while that helps, with which a loss is best; None: runs miss.

        By the chosen passages.  A longer run has a longer schedule, and ends where it is best.
        """
        best = None
        steps = self.steps
        weight = 0.0 if loss == TEXT else self.weight_of(pair, loss)
        while steps <= LONGEST * self.steps:
            records = [self.run(pair, loss, weight, seed, steps) for seed in range(self.seeds)]
            if None in records:
                return None
            bits = statistics.mean(one["choose"] for one in records)
            if best and bits >= best[0]:
                break
            best = bits, steps
            steps *= 2
        return best[1]

    def as_long_as_text(self, pair):
        """Ask for the runs of `amounts`: of the first loss, though its text alone may be better."""
        weight = self.weight or self.bracketed(pair, FIRST)[0]
        text_steps = self.text_steps(pair)
        if weight and text_steps:
            for steps, seed in itertools.product({self.steps, max(self.steps, text_steps)},
                                                 range(self.seeds)):
                self.run(pair, FIRST, weight, seed, steps)

    def gains(self, pair, loss, equal_seconds=False):
        """Return the Gains of a loss by the seeds that are there; None: too few are."""
        steps = self.steps
        is_first = loss in (EQUAL, FIRST)
        weight = 0.0 if loss == TEXT else self.weight_of(pair, loss)
        if equal_seconds and not is_first:
            steps = self.steps_of(pair, loss)
        if self.planning:
            weight, steps = weight or self.first_weights(loss)[0], steps or self.steps
        if weight is None or steps is None:
            return None
        is_none = loss != TEXT and not weight  # no weight helps: the text it is
        text_steps = self.text_steps(pair) or self.steps * self.planning
        if not text_steps:
            return None
        if is_none:
            steps = self.steps_of(pair, TEXT) if equal_seconds else text_steps
        seeds = range(self.seeds)
        texts = {seed: self.run(pair, TEXT, 0.0, seed, text_steps) for seed in seeds}
        ours = {seed: self.run(pair, TEXT if is_none else loss, weight, seed, steps)
                for seed in seeds}
        known = [seed for seed in seeds if texts[seed] and ours[seed]]
        if len(known) < 2:
            return None
        bits = {}
        for domain in DOMAINS:
            both = [seed for seed in known
                    if domain in texts[seed]["after"] and domain in ours[seed]["after"]]
            bits[domain] = {seed: texts[seed]["after"][domain] - ours[seed]["after"][domain]
                            for seed in both}
        medians = [statistics.median(seconds(ours[seed], is_cached) for seed in known)
                   for is_cached in (False, True)]
        return Gains(bits, weight, tuple(medians), steps)

    def losses_of(self, pair):
        return [EQUAL] if pair[0] == pair[1] else self.losses

    def missing(self, planning=False):
        """Return the runs that are missing, the most informative first.

        A few seeds of every pair come before many of one, equal steps before equal seconds.
        """
        wanted = []
        most = self.seeds
        # losses are run to their own best there, not to a time
        is_large = self.regime in LARGE
        self.planning = planning
        for seeds in sorted({min(FEW, most), most}):
            self.seeds = seeds
            for is_more, pair in itertools.product((False, True), self.pairs):
                for loss in self.losses_of(pair) if pair[0] != pair[1] or not is_more else ():
                    self.wanted = []
                    if not is_more or not (is_large or self.lengths):
                        self.gains(pair, loss, equal_seconds=is_more)
                    elif is_large and loss in (TEXT, FIRST):
                        self.best_steps(pair, loss)
                    elif self.lengths and loss == FIRST:
                        self.as_long_as_text(pair)
                    wanted += [name for name in self.wanted if name not in wanted]
        self.seeds, self.planning = most, False
        return wanted


def seconds(record, is_cached=False):
    """Return the CPU seconds of a run; cached: its teacher reads each passage once."""
    passages = record.get("passages", 0)
    if is_cached:
        passages = min(passages, record["rows"])
    return record["seconds"] + record.get("teacher_row", 0.0) * passages


# --- tables ---------------------------------------------------------------------------------------


def half_interval(values):
    """Return half of the interval of 95 % of at least two values."""
    quantile = STUDENTS_T[min(len(values), len(STUDENTS_T) + 1) - 2]
    return quantile * statistics.stdev(values) / len(values) ** 0.5


def interval(values):
    """Return "mean ± half of the interval of 95 %" of values."""
    return f"{statistics.mean(values):.4f} ± {half_interval(values):.4f}"


def markdown(rows):
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(rows[0])) + " |", *lines[1:]])


def ahead_of(first, other, domain="sources"):
    """Return by how much one Gains is ahead of another one, seed by seed."""
    ours, others = first.bits[domain], other.bits[domain]
    return [ours[seed] - others[seed] for seed in ours if seed in others]


def row_of(study, pair, loss, equal_seconds):
    """Return the cells of a loss; None where runs are missing."""
    gains = study.gains(pair, loss, equal_seconds)
    first = study.gains(pair, FIRST) if pair[0] != pair[1] else None
    if gains is None or (loss == TEXT and not equal_seconds):
        return None
    ahead = "" if loss in (FIRST, EQUAL) or not first else ahead_of(first, gains)
    if ahead and len(ahead) < 2:
        return None
    weight = f"{gains.weight:g}" if gains.weight else "none helps"
    by_domain = [interval(list(bits.values())) if len(bits) > 1 else ""
                 for bits in gains.bits.values()]
    return [f"{loss} ({FORMS[loss]})" if loss in FORMS else loss, "" if loss == TEXT else weight,
            *by_domain, ahead and interval(ahead), str(gains.steps),
            "; ".join(f"{one:.0f}" for one in gains.seconds),
            str(len(gains.bits["sources"]))]


def tables_of(study):
    """Return the tables of a study: (heading, rows) of each pair at equal steps and seconds."""
    tables = []
    for pair in study.pairs:
        for equal_seconds in (False, True):
            if equal_seconds and (pair[0] == pair[1] or study.lengths):
                continue
            rows = [row_of(study, pair, loss, equal_seconds) for loss in study.losses_of(pair)]
            rows = [row for row in rows if row]
            if not rows:
                continue
            head = ["loss", "weight", *(f"gain, {domain}" for domain in DOMAINS),
                    f"{FIRST} ahead by", "steps", "CPU seconds: teacher live; cached", "n"]
            equal = "seconds" if equal_seconds else "steps"
            tables.append((f"{study.regime}, rate {study.rate:g}, {pair[0]} <- {pair[1]}, equal "
                           f"{equal}", [head, *rows]))
    return tables


def better_form(study, pair, forms):
    """Return the better form of a rival on the chosen passages; None: runs are missing."""
    if len(forms) == 1:
        return forms[0]
    bits = {}
    for form in forms:
        weight = study.weight_of(pair, form)
        if weight is not None:
            bits[form] = study.mean_to_choose(pair, form if weight else TEXT, weight)
    is_known = len(bits) == len(forms) and None not in bits.values()
    return min(bits, key=bits.get) if is_known else None


def beside_rivals(study):
    """Return rows of pairs: gains of the first loss, and how far it is ahead of each rival.

    A rival is its better form on the chosen passages, named where it is not the published one.  At
    equal seconds rivals, and the text alone, take the steps that fit into those of the first loss.
    """
    names = [*RIVALS, *(name + SECONDS for name in (*RIVALS, "text alone"))]
    rows = []
    for pair in study.pairs:
        is_chosen = pair[0] != pair[1] and not study.weight
        first = study.gains(pair, FIRST) if is_chosen else None
        cells = [ahead_cell(study, pair, first, RIVALS.get(name.removesuffix(SECONDS), (TEXT,)),
                            name.endswith(SECONDS)) if first else "" for name in names]
        if first:
            sources, documentation = [list(first.bits[domain].values()) for domain in DOMAINS]
            rows.append([f"{pair[0]} <- {pair[1]}, {PAIRS.get(pair, 'crossing')}",
                         f"{interval(sources)}, {first.weight:g}", interval(documentation),
                         *cells, str(len(sources))])
    rows.insert(0, ["student <- teacher", f"`{FIRST}`, weight", "documentation, likewise", *names,
                    "n"])
    return with_columns(rows, [name for name, *column in zip(*rows) if any(column)])


def with_columns(rows, names):
    """Return the columns of rows with a head that have these names."""
    places = [place for place, name in enumerate(rows[0]) if name in names]
    return [[row[place] for place in places] for row in rows]


def ahead_cell(study, pair, first, forms, equal_seconds):
    """Return "mean ± interval (form)" of how far the first loss is ahead; "": runs are missing."""
    form = better_form(study, pair, forms)
    other = study.gains(pair, form, equal_seconds) if form else None
    ahead = ahead_of(first, other) if other else []
    name = f" (`{form}`)" if form != forms[0] else ""
    return interval(ahead) + name if len(ahead) > 1 else ""


def studies(records):
    """Yield a Study of every regime and rate of which the records know something."""
    known = [name for name in records.of if isinstance(name, Run)]
    for regime, rate in sorted({(name.regime, -name.rate) for name in known}):
        if regime in REGIMES and regime != "long":
            losses = [TEXT, FIRST, *itertools.chain(*RIVALS.values())]
            pairs = [(a, b) for a in KINDS for b in KINDS]
            yield Study(records, regime, -rate, losses, pairs)
        elif regime in LARGE:
            yield Study(records, regime, -rate, [TEXT, FIRST, LARGE_RIVAL], [("bytes", "digits")],
                        weight=1.0)


def as_run(records, regime):
    """Return rows of all runs of a regime whose weights were given, not chosen.

    Text at its best is that after the steps with which it is best on the chosen passages.
    """
    groups = defaultdict(dict)
    for name, record in records.of.items():
        if isinstance(name, Run) and name.regime == regime and name.seed < min(SEEDS_TO_CHOOSE):
            key = name.student, name.teacher, name.loss, name.weight, name.rate, name.steps
            groups[key][name.seed] = record
    rows = [["`--loss`", "student <- teacher", "weight", "steps", "bits per byte",
             "over text after as many steps", "over text at its best", "documentation, likewise",
             "same likeliest token", "CPU seconds: teacher live; cached", "n"]]
    for key, by_seed in sorted(groups.items()):
        student, teacher, loss, weight, rate, steps = key
        texts = {one[-1]: runs for one, runs in groups.items()
                 if one[0] == student and one[2] == TEXT and one[4] == rate and len(runs) > 1}
        if len(by_seed) < 2 or not texts:
            continue
        best = min(texts, key=lambda one: statistics.mean(
            record["choose"] for record in texts[one].values()))
        gains = [difference(texts.get(steps, {}), by_seed, "sources"),
                 *(difference(texts[best], by_seed, domain) for domain in DOMAINS)]
        medians = [statistics.median(seconds(one, is_cached) for one in by_seed.values())
                   for is_cached in (False, True)]
        rows.append([loss, f"{student} <- {teacher or 'none'}", f"{weight:g}", str(steps),
                     interval([one["after"]["sources"] for one in by_seed.values()]),
                     *(interval(one) if len(one) > 1 and any(one) else "" for one in gains),
                     likeliest(by_seed.values()), "; ".join(f"{one:.0f}" for one in medians),
                     str(len(by_seed))])
    return rows


def difference(texts, runs, domain):
    """Return by how many bits per byte runs are better than those of the text, seed by seed."""
    return [texts[seed]["after"][domain] - runs[seed]["after"][domain]
            for seed in sorted(set(texts) & set(runs))
            if domain in texts[seed]["after"] and domain in runs[seed]["after"]]


def likeliest(runs):
    """Return how often student and teacher find the same token likeliest; of text, each teacher."""
    by_teacher = defaultdict(list)
    for record in runs:
        for teacher, measures in record.get("agreement", {}).items():
            by_teacher[teacher].append(measures["same_token"])
    return "; ".join(f"{statistics.mean(values):.3f}" + f" ({teacher})" * (len(by_teacher) > 1)
                     for teacher, values in sorted(by_teacher.items()))


def amounts(records, pair=("bytes", "digits")):
    """Return rows on how much text there is: from where on does a teacher not pay any more?

    What the first loss gains over the text alone, after as many steps and at the best of several
    lengths, and after how many seconds of a run it is ahead of that best on the chosen passages.
    """
    rows = [["passages", "text alone at its best", "its readings", "its CPU seconds",
             f"`{FIRST}`, weight", "its readings", "over text after as many steps",
             "over text at its best", "CPU seconds: teacher live; cached", "ahead of that after",
             "n"]]
    for regime, its in sorted(REGIMES.items(), key=lambda item: item[1].rows):
        study = Study(records, regime, RATES[0], [TEXT, FIRST], [pair], seeds=FEW)
        weight, _ = study.bracketed(pair, FIRST)
        best = study.text_steps(pair)
        if not its.text_steps or not weight or not best:
            continue
        texts = runs_of(study, pair, TEXT, 0.0, best)
        for steps in (its.steps, *its.text_steps):
            ours = runs_of(study, pair, FIRST, weight, steps)
            gains = [difference(runs_of(study, pair, TEXT, 0.0, steps), ours, DOMAINS[0]),
                     difference(texts, ours, DOMAINS[0])]
            if len(gains[1]) < 2:
                continue
            medians = [statistics.median(seconds(one, is_cached) for one in ours.values())
                       for is_cached in (False, True)]
            rows.append([
                str(its.rows), interval([one["after"][DOMAINS[0]] for one in texts.values()]),
                f"{best * study.batch / its.rows:g}",
                f"{statistics.median(one['seconds'] for one in texts.values()):.0f}",
                f"{interval([one['after'][DOMAINS[0]] for one in ours.values()])}, {weight:g}",
                f"{steps * study.batch / its.rows:g}",
                *(interval(one) if len(one) > 1 else "" for one in gains),
                "; ".join(f"{one:.0f}" for one in medians), passed(texts, ours),
                str(len(gains[1]))])
    return rows


def runs_of(study, pair, loss, weight, steps):
    """Return {seed: record} of the runs that are there."""
    runs = {seed: study.run(pair, loss, weight, seed, steps) for seed in range(study.seeds)}
    return {seed: record for seed, record in runs.items() if record}


def passed(texts, runs):
    """Return after how many seconds runs are ahead of a text's best, teacher live; cached.

    By the chosen passages, the median of all seeds; "never" where one of them is at no time.
    """
    found = []
    for seed in set(texts) & set(runs):
        run = runs[seed]
        for look in run["curve"]:
            if look["choose"] < texts[seed]["choose"]:
                at = run | look | {"passages": look["step"] * run["passages"] / run["step"]}
                found.append((seconds(at), seconds(at, is_cached=True)))
                break
        else:
            return "never"
    return "; ".join(f"{statistics.median(each):.0f}" for each in zip(*found))


def shares(study, loss):
    """Return the share of an equal tokenizer's gain of every seed; [] while runs are missing.

    Teachers' and students' own terms cancel in a square.
    """
    gains = {(a, b): study.gains((a, b), EQUAL if a == b else loss) for a in KINDS for b in KINDS}
    if None in gains.values():
        return []
    of_seed = []
    for seed in set.intersection(*(set(one.bits["sources"]) for one in gains.values())):
        bits = {pair: one.bits["sources"][seed] for pair, one in gains.items()}
        equal = statistics.mean(bits[kind, kind] for kind in KINDS)
        other = statistics.mean(bits[a, b] for a in KINDS for b in KINDS if a != b)
        of_seed.append(other / equal)
    return of_seed


# --- docs/results.md ------------------------------------------------------------------------------

PAGE_LARGE, PAGE_SMALL = "large_500", ("repeated", "new")
LEFT_OUT = {"over text after as many steps", "H-KL", "ALM", "ULD",
            *(name + SECONDS for name in (*RIVALS, "text alone"))}


def large_gains(records, regime):
    """Return {(loss, weight, student): gains with another tokenizer and with an equal one}.

    Each is {seed: gain over the text alone at its best}, after as many steps at the same weight.
    """
    groups = defaultdict(dict)
    for name, record in records.of.items():
        if isinstance(name, Run) and name.regime == regime:
            kind = EQUAL if name.student == name.teacher else name.loss
            groups[kind, name.weight, name.student, name.steps][name.seed] = record
    gains = {}
    for (loss, weight, student, steps), ours in groups.items():
        texts = [runs for key, runs in groups.items() if (key[0], key[2]) == (TEXT, student)]
        equal = groups.get((EQUAL, weight, student, steps), {})
        if loss not in (FIRST, EVEN) or not texts or not equal:
            continue
        text = min(texts, key=lambda runs: statistics.mean(one["choose"] for one in runs.values()))
        gains[loss, weight, student] = [
            {seed: text[seed]["after"]["sources"] - one["after"]["sources"]
             for seed, one in runs.items() if seed in text} for runs in (ours, equal)]
    return gains


@dataclass(kw_only=True)
class Args:
    """Print the tables of the square, from the runs that are kept."""

    records: str = flag(str(LOG), "folder of square_*.jsonl.")
    merge: str = flag("", "folder with such files, or with a gpu_day.jsonl, to add to it.")
    page: str = flag("", "page whose tables of losses are written anew: docs/results.md.")


def merge(records, folder):
    """Add what another machine made."""
    for record in Records(folder).of.values():
        records.add(record)
    for path in Path(folder).glob("gpu_day.jsonl"):
        for line in path.read_text().splitlines():
            for record in json.loads(line).get("records", []):
                records.add(record)


def page_tables(records, left_out=LEFT_OUT):
    """Return the tables of docs/results.md.

    Large students; small ones of all pairs that were run, beside rivals.

    Args:
        left_out: names of columns that stand in the log alone.
    """
    head, *rows = as_run(records, PAGE_LARGE)
    place = head.index("bits per byte")
    best = {}  # of a loss and a pair: with the weight and the steps of its best mean
    for row in sorted(rows, key=lambda row: float(row[place].split()[0])):
        best.setdefault(tuple(row[:2]), row)
    rows = [head, *(row for row in rows if row in best.values() and row[0] != EVEN)]
    losses = [TEXT, FIRST, *itertools.chain(*RIVALS.values())]
    pairs = [(a, b) for a in KINDS for b in KINDS if a != b]
    tables = [rows, *(beside_rivals(Study(records, regime, RATES[0], losses, pairs))
                      for regime in PAGE_SMALL)]
    return [markdown(with_columns(rows, set(rows[0]) - left_out))
            for rows in tables if len(rows) > 1]


def with_tables(text, tables):
    """Return the text of a page with these tables in the place of those of losses."""
    waiting = iter(tables)
    return re.sub(r"^\| (?:`--loss`|student <- teacher) \|.*\n(?:\|.*\n)+",
                  lambda _: f"{next(waiting)}\n", text, flags=re.M)


def main(args):
    records = Records(args.records)
    if args.merge:
        merge(records, args.merge)
    for study in studies(records):
        for heading, rows in tables_of(study):
            print(f"\n{heading}\n\n{markdown(rows)}")
        if len(rows := beside_rivals(study)) > 1:
            print(f"\n{FIRST} ahead of each rival's better form, {study.regime}, rate "
                  f"{study.rate:g}\n\n{markdown(rows)}")
        for loss in study.losses:
            if len(values := shares(study, loss)) > 1:
                print(f"{loss}: share of an equal tokenizer's gain {interval(values)}")
    for regime in ("long", "repeated", *LARGE):
        if len(rows := as_run(records, regime)) > 1:
            print(f"\n{regime}, weights as named\n\n{markdown(rows)}")
        for name, (ours, equal) in large_gains(records, regime).items():
            mean, most = [statistics.mean(one.values()) for one in (ours, equal)]
            behind = [equal[seed] - ours[seed] for seed in ours if seed in equal]
            print("\n{}, weight {:g}, student {}: ".format(*name)
                  + f"{mean:.4f} of the {most:.4f} that an equal tokenizer's teacher gives, "
                  f"{mean / most:.0%}" + (f"; behind by {interval(behind)}" if len(behind) > 1
                                          else ""))
    if len(rows := amounts(records)) > 1:
        print(f"\nHow much text there is, bytes <- digits\n\n{markdown(rows)}")
    tables = page_tables(records)
    print("\nREADME.md's first claim and docs/results.md\n")
    print("\n\n".join(tables))
    if args.page:
        page = Path(args.page)
        page.write_text(with_tables(page.read_text(), tables))


if __name__ == "__main__":
    tool(Args, main)
