"""Measure what it takes to write and to read a cache, and what truncation does to the gradient.

    python benchmarks/cache.py ASSETS [--texts 64] [--layers 8] [--hidden 512]

The teacher is tinytalk_neo_3M (14,019 tokens), the data its stories, the student stories260K, or a
random one of its tokenizer and the given shape.  All times are CPU seconds of one thread, the best
of --repeats.  Figures of record are in docs/LOG.md.

writing  seconds of the teacher's forward passes alone (of top-k with its logits), and of all that
         the writer does
reading  seconds of the student's forward and backward pass of 8 texts: with the text alone, with
         the teacher asked live, with a cache; and of reading the cache
bias     of the gradient by the student's logits, trained stories260K, by the tokens kept: its
         distance from that of the whole teacher, relative to the norm of that, where the most
         likely tokens are kept, or what a cache keeps; and where tokens are drawn, as many as are
         kept there, by --sampled or with replacement in proportion to their masses: the distance
         (root of the mean square), its part that a mean over --draws leaves (bias, 0 where it is
         below its standard error) and the standard deviation
"""

import json
import math
import sys
import tempfile
import time
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isogloss import cache, demo_report
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.flags.parse import flag, parse_flags, tool
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.watch import end_together
from isogloss.objective.loss_table import build_loss
from isogloss.objective.objective import LossTerms, TeacherTarget, TeacherTerm, micro_batch_loss
from isogloss.teachers.kept_tokens import byte_order, estimated, keep_tokens
from isogloss.teachers.model import load_replicated, truncate
from isogloss.teachers.protocol import load_teacher
from isogloss.tiles import HiddenLogits, TopKLogits, head_of

BATCH = 8
KEPT = 16, 64, 256
LOSSES = ("piece_kl", "generalized_jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation",
          "projection_kl", "alm")


@dataclass(kw_only=True)
class Args:
    """Measure caches."""

    assets: str = flag(MISSING, "folder with models/ and text/tinystories_1000.json.")
    texts: int = flag(64, "that are cached.")
    layers: int = flag(0, "shape of a random student; 0: stories260K.")
    hidden: int = flag(512, "shape of a random student; 0: stories260K.")
    repeats: int = flag(3, "of each measurement.")
    student: str = flag(
        "stories260K", "directory below models/ of the student's tokenizer, and of the student of "
        "bias.")
    teacher: str = flag("tinytalk_neo_3M", "directory below models/ of the teacher.")
    bias: bool = flag(False, "measure the bias alone.")
    draws: int = flag(16, "of each gradient whose bias is measured.")


def seconds_of(run, repeats):
    """Return (least CPU seconds of a call, what the last one returned)."""
    least = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        least = min(least, time.process_time() - start)
    return least, result


class Bench:
    """Hold the models, and the stories as data.

    Attributes:
        cfg: Config with the live teacher.
        student, teacher: TextEncoder of each.
        source: ModelTeacher.
        stories: texts.
    """

    def __init__(self, args, folder):
        models = Path(args.assets).resolve() / "models"
        stories = json.loads((models.parent / "text" / "tinystories_1000.json").read_text())
        stories = [story if isinstance(story, str) else story["text"] for story in stories]
        self.stories = stories[: args.texts]
        self.folder = folder
        data = folder / "stories.jsonl"
        data.write_text("\n".join(json.dumps({"text": story}) for story in self.stories))
        self.cfg = Config(student=str(models / args.student), teacher=str(models / args.teacher),
                          data=str(data), max_length=256)
        self.student, _ = load_text_encoder("student", self.cfg.student, 256)
        self.teacher, _ = load_text_encoder("teacher", self.cfg.teacher, 0)
        spec = self.cfg.teacher_kind.of(self.cfg, self.teacher, torch.device("cpu"))
        self.source = load_replicated(spec)
        self.args = args

    def cached(self, name, *flags):
        """Return (folder of a cache that is written now, CPU seconds of the writer alone)."""
        output = self.folder / name
        argv = [f"--teacher={self.cfg.teacher}", f"--data={self.cfg.data}", f"--output={output}",
                *flags]
        spent = []
        write = cache.ShardWriter.write

        def timed(writer, number):
            start = time.process_time()
            write(writer, number)
            spent.append(time.process_time() - start)

        cache.ShardWriter.write = timed
        cache.run(parse_flags(cache.Args, argv), torch.device("cpu"))
        cache.ShardWriter.write = write
        return output, sum(spent)

    def forward(self, truncated):
        """Run the teacher over all stories in the batches of the writer."""
        tokens = [ids[:257] for ids in self.teacher.encode(self.stories)]
        with torch.no_grad():
            for batch in cache.batches_of([len(ids) - 1 for ids in tokens], 8192):
                width = max(len(tokens[n]) - 1 for n in batch)
                ids = torch.zeros(len(batch), width, dtype=torch.long)
                for row, n in enumerate(batch):
                    ids[row, : len(tokens[n]) - 1] = torch.from_numpy(tokens[n][:-1])
                if truncated:
                    self.source.logits(ids)
                else:
                    self.source.hidden(ids)

    def model(self):
        """Return the student."""
        if not self.args.layers:
            return AutoModelForCausalLM.from_pretrained(self.cfg.student)
        config = AutoConfig.from_pretrained(self.cfg.student)
        config.hidden_size = self.args.hidden
        config.head_dim = self.args.hidden // config.num_attention_heads
        config.intermediate_size = 3 * self.args.hidden
        config.num_hidden_layers = self.args.layers
        return AutoModelForCausalLM.from_config(config)

    def step(self, model, source, loss, batch):
        """Run the student forward and backward; return the loss."""
        terms = LossTerms(1.0, [], batch.student.tiles)
        if source:
            logits = source.targets(batch.teachers[0])
            target = TeacherTarget(logits, loss.loss_fn, None, 0.0)
            terms = LossTerms(1.0, [TeacherTerm(batch.teachers[0], target, 1.0)])
        hidden = model.base_model(input_ids=batch.student.ids)[0]
        student = HiddenLogits(hidden.flatten(0, 1), head_of(model, len(self.student.table)))
        value, _ = micro_batch_loss(student, terms)
        value.backward()
        return float(value.detach())


def writing(bench):
    rows = [["cache", "forward", "writer", "forward / writer", "bytes a token"]]
    for name, flags in (("hidden", ["--hidden"]), ("top-256", ["--top_k=256"]),
                        ("sampled-256", ["--top_k=256", "--sampled"])):
        forward, _ = seconds_of(partial(bench.forward, name != "hidden"), bench.args.repeats)
        written = []
        for repeat in range(bench.args.repeats):
            folder, spent = bench.cached(f"{name}-{repeat}", *flags)
            written.append(spent)
        manifest = json.loads((folder / "manifest.json").read_text())
        least = min(written)
        rows.append([name, f"{forward:.2f}", f"{least:.2f}", f"{forward / least:.2f}",
                     str(manifest["bytes_per_position"])])
    print(demo_report.markdown_table(rows), flush=True)
    return {name: bench.folder / f"{name}-0" for name in ("hidden", "top-256", "sampled-256")}


def reading(bench, folders):
    model = bench.model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"student of {num_parameters / 1e6:.1f} M parameters")
    rows = [["teacher", "step", "/ text alone", "reading", "/ step"]]
    alone = Collator(bench.student, [], tile_mib=512)(bench.stories[:BATCH])
    text, _ = seconds_of(lambda: bench.step(model, None, None, alone), bench.args.repeats)
    rows.append(["none", f"{text:.2f}", "1.00", "", ""])
    for name, folder in {"live": None, "live top-256": None, **folders}.items():
        cfg = bench.cfg
        if folder:
            cfg = Config(student=cfg.student, data=cfg.data, teacher_cache=str(folder))
        elif "top" in name:
            cfg = Config(student=cfg.student, data=cfg.data, teacher=cfg.teacher,
                         teacher_output="topk")
        spec = cfg.teacher_kind.of(cfg, bench.teacher, torch.device("cpu"))
        source = load_teacher(spec)
        loss = build_loss(cfg, bench.student, bench.teacher, "cpu", spec.is_truncated)
        pairs = [PairOptions(bench.teacher, loss.spelling, is_cached=True)]
        batch = Collator(bench.student, pairs, tile_mib=512)(bench.stories[:BATCH])
        step, value = seconds_of(partial(bench.step, model, source, loss, batch),
                                 bench.args.repeats)
        read, _ = seconds_of(partial(source.targets, batch.teachers[0]), bench.args.repeats)
        rows.append([f"{name}, loss {value:.6f}", f"{step:.2f}", f"{step / text:.2f}",
                     f"{read:.3f}", f"{read / step:.3f}"])
    print(demo_report.markdown_table(rows), flush=True)


def bias(bench):
    rows = [["loss", "k", "likely", "cache", "sampled", "its bias", "its deviation", "replaced",
             "its bias", "its deviation"]]
    order = byte_order(bench.teacher.table)
    for name in LOSSES:
        gradients = Gradients(bench, name, order)
        for k in KEPT:
            row = [name, str(k)]
            for kept in (gradients.likely(k), gradients.kept(k, None)):
                row.append(f"{gradients.distance(kept):.4f}")
            for drawn in (gradients.kept, gradients.replaced):
                generator = torch.Generator().manual_seed(0)
                samples = [drawn(k, generator) for _ in range(bench.args.draws)]
                row += [f"{value:.4f}" for value in gradients.moments(torch.stack(samples))]
            rows.append(row)
    print(demo_report.markdown_table(rows), flush=True)


class Gradients:
    """Compute gradients of a loss by the student's logits from rows of which K tokens are kept."""

    def __init__(self, bench, name, order):
        cfg = Config(student=bench.cfg.student, teacher=bench.cfg.teacher, data="-", loss=name,
                     projection_topk=2**20)
        whole = build_loss(cfg, bench.student, bench.teacher, "cpu")
        self.truncated = build_loss(cfg, bench.student, bench.teacher, "cpu", True)
        collator = Collator(bench.student, [PairOptions(bench.teacher, whole.spelling)])
        batch = collator(bench.stories[:BATCH])
        self.batch = batch.teachers[0]
        self.order = order
        model = AutoModelForCausalLM.from_pretrained(bench.cfg.student).eval()
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
    with tempfile.TemporaryDirectory() as folder, end_together():
        bench = Bench(args, Path(folder))
        if not args.bias:
            reading(bench, writing(bench))
        bias(bench)


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
