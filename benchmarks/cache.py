"""Measure what truncation of a teacher does to the gradient by the student's logits.

    OMP_NUM_THREADS=1 python benchmarks/cache.py ASSETS          # the table of docs/caches.md

The teacher is tinytalk_neo_3M (14,019 tokens), the student stories260K, the data its stories.  For
every loss and number of tokens that are kept: the distance of the gradient from that of the whole
teacher, relative to the norm of that, where the most likely tokens are kept, or what a cache keeps;
and where tokens are drawn, as many as are kept there, by --sampled or with replacement in
proportion to their masses: the distance (root of the mean square), its part that a mean over
--draws leaves (bias, 0 where it is below its standard error) and the standard deviation.

What it takes to write and to read a cache: `git show fa267fb:benchmarks/cache.py`.
"""

import json
import math
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM

from isogloss import demo_report
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.flags.parse import flag, tool
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.watch import end_together
from isogloss.objective.loss_table import build_loss
from isogloss.teachers.kept_tokens import byte_order, estimated, keep_tokens
from isogloss.teachers.model import load_replicated, truncate
from isogloss.tiles import HiddenLogits, TopKLogits, head_of

BATCH = 8
KEPT = 16, 64, 256
LOSSES = ("piece_kl", "generalized_jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation",
          "projection_kl", "alm")


@dataclass(kw_only=True)
class Args:
    """Measure what truncation of a teacher does to the gradient."""

    assets: str = flag(MISSING, "folder with models/ and text/tinystories_1000.json.")
    student: str = flag("stories260K", "directory below models/ of the student.")
    teacher: str = flag("tinytalk_neo_3M", "directory below models/ of the teacher.")
    draws: int = flag(16, "of each gradient whose bias is measured.")


class Bench:
    """Hold the models, and the stories as data.

    Attributes:
        student, teacher: TextEncoder of each.
        source: ModelTeacher.
        stories: texts.
    """

    def __init__(self, args):
        models = Path(args.assets).resolve() / "models"
        stories = json.loads((models.parent / "text" / "tinystories_1000.json").read_text())
        self.stories = []
        for story in stories[:BATCH]:
            self.stories.append(story if isinstance(story, str) else story["text"])
        self.names = {"student": str(models / args.student), "teacher": str(models / args.teacher)}
        self.student, _ = load_text_encoder("student", self.names["student"], 256)
        self.teacher, _ = load_text_encoder("teacher", self.names["teacher"], 0)
        cfg = self.config()
        self.source = load_replicated(cfg.teacher_kind.of(cfg, self.teacher, torch.device("cpu")))

    def config(self, **flags):
        return Config(**self.names, data="-", max_length=256, **flags)


class Gradients:
    """Compute gradients of a loss by the student's logits from rows of which K tokens are kept."""

    def __init__(self, bench, name, order):
        cfg = bench.config(loss=name, projection_topk=2**20)
        whole = build_loss(cfg, bench.student, bench.teacher, "cpu")
        self.truncated = build_loss(cfg, bench.student, bench.teacher, "cpu", True)
        collator = Collator(bench.student, [PairOptions(bench.teacher, whole.spelling)])
        batch = collator(bench.stories)
        self.batch = batch.teachers[0]
        self.order = order
        model = AutoModelForCausalLM.from_pretrained(bench.names["student"]).eval()
        head = head_of(model, len(bench.student.table))
        live = bench.source.targets(self.batch)
        with torch.no_grad():
            hidden = model.base_model(input_ids=batch.student.ids)[0].flatten(0, 1)
            self.student = HiddenLogits(hidden, head)(torch.arange(len(hidden)))
            self.logits = live(torch.arange(self.batch.labels.numel())).float()
        self.in_byte_order = self.logits[:, order.ids_W]
        self.whole = by_logits(self.student, live, whole, self.batch)
        # positions without a label are in no term
        self.labels = self.batch.labels.flatten().clamp(min=0)

    def row(self, k, draws):
        """Return the cells of a line of the table."""
        cells = []
        for kept in (self.likely(k), self.kept(k, None)):
            cells.append(f"{self.distance(kept):.4f}")
        for drawn in (self.kept, self.replaced):
            generator = torch.Generator().manual_seed(0)
            samples = [drawn(k, generator) for _ in range(draws)]
            cells += [f"{value:.4f}" for value in self.moments(torch.stack(samples))]
        return cells

    def of(self, source):
        return by_logits(self.student, source, self.truncated, self.batch)

    def likely(self, k):
        """Keep the most likely tokens."""
        return self.of(truncate(self.logits, k, self.labels))

    def kept(self, k, generator):
        """Keep what a cache keeps; with a generator one of --sampled."""
        if generator is None:
            return self.of(keep_tokens(self.in_byte_order, k, self.labels, self.order).scored)
        uniform = torch.rand(len(self.labels), dtype=torch.float64, generator=generator)
        kept = keep_tokens(self.in_byte_order, k, self.labels, self.order, 1.0, uniform)
        return self.of(estimated(kept.scored, kept.num_drawn_N))

    def replaced(self, k, generator):
        """Draw with replacement in proportion to masses; a token counts as often as it is drawn."""
        drawn = self.logits.softmax(-1).multinomial(k, replacement=True, generator=generator)
        counts = torch.zeros_like(self.logits).scatter_add_(1, drawn, torch.ones(drawn.shape))
        logp = (counts.gather(1, drawn) / k).log()
        nothing = torch.full((len(drawn),), -torch.inf)
        return self.of(TopKLogits(drawn, logp, self.logits.shape[1], nothing))

    def distance(self, gradient):
        """Return the distance from the whole teacher's gradient, relative to its norm."""
        return (gradient - self.whole).norm() / self.whole.norm()

    def moments(self, gradients):
        """Return the root mean square distance, bias and standard deviation, likewise."""
        num = len(gradients)
        mean = gradients.mean(0)
        variance = (gradients - mean).square().sum() / (num - 1)
        square = (mean - self.whole).square().sum() - variance / num
        # of the estimate of what is no bias, about
        if square < 3 * variance / num / math.sqrt(len(self.labels)):
            square = torch.zeros(())
        return [value.sqrt() / self.whole.norm()
                for value in (square + variance, square, variance)]


def by_logits(x, source, loss, batch):
    """Return the gradient by the student's logits of a loss of one tile."""
    leaf = x.detach().requires_grad_()
    [tile] = batch.tiles
    [sub_tile] = tile.sub_tiles
    student = leaf[tile.student_positions][sub_tile.student_slice]
    teacher = source(sub_tile.teacher_positions)[sub_tile.teacher_slice]
    value = loss.loss_fn(student, teacher, sub_tile)
    gradient, = torch.autograd.grad(value, leaf)
    return gradient


def main(args):
    torch.set_num_threads(1)
    start_distributed()
    silence_libraries()
    rows = [["loss", "k", "likely", "cache", "sampled", "its bias", "its deviation", "replaced",
             "its bias", "its deviation"]]
    with end_together():
        bench = Bench(args)
        order = byte_order(bench.teacher.table)
        for name in LOSSES:
            gradients = Gradients(bench, name, order)
            for k in KEPT:
                rows.append([name, str(k), *gradients.row(k, args.draws)])
    print(demo_report.markdown_table(rows))


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
