"""Measure what it takes to write and to read a cache, and what truncation does to the gradient.

    python benchmarks/cache.py ASSETS [--texts 64] [--layers 8] [--hidden 512]

The teacher is tinytalk_neo_3M (14,019 tokens), the data its stories, the student stories260K, or a
random one of its tokenizer and the given shape.  All times are CPU seconds of one thread, the best
of --repeats.  Figures of record are in docs/LOG.md.

writing  seconds of the teacher's forward passes alone (of top-k with its logits), and of all that
         the writer does
reading  seconds of the student's forward and backward pass of 8 texts: with the text alone, with
         the teacher asked live, with a cache; and of reading the cache
bias     of the gradient by the student's logits, trained stories260K: its distance from that of the
         whole teacher, relative to the norm of that, and its cosine, by the tokens kept
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import demo_report
from isogloss import cache
from isogloss.batch import Collator, PairOptions
from isogloss.config import Config
from isogloss.inputs import load_text_encoder, teacher_spec
from isogloss.launch import silence_libraries, start_distributed
from isogloss.loss_table import build_loss
from isogloss.model_teachers import load_replicated, most_likely
from isogloss.objective import LossTerms, TeacherTarget, TeacherTerm, micro_batch_loss
from isogloss.teachers import load_teacher
from isogloss.watch import end_together
from projection_tools.flags import parse_flags, tool
from tiles import HiddenLogits, head_of

BATCH = 8
KEPT = 16, 64, 256, 1024
LOSSES = ("piece_kl", "generalized_jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation",
          "projection_kl", "alm")


@dataclass(kw_only=True)
class Args:
    """Measure caches.

    Args:
        assets: folder with models/ and text/tinystories_1000.json.
        texts: that are cached.
        layers, hidden: shape of a random student; 0: stories260K.
        repeats: of each measurement.
        student: directory below models/ of the student's tokenizer, and of the student of bias.
        teacher: directory below models/ of the teacher.
        bias: measure the bias alone.
    """

    assets: str
    texts: int = 64
    layers: int = 0
    hidden: int = 512
    repeats: int = 3
    student: str = "stories260K"
    teacher: str = "tinytalk_neo_3M"
    bias: bool = False


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
        self.source = load_replicated(teacher_spec(self.cfg, self.teacher, torch.device("cpu")))
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
    for name, flags in (("hidden", ["--hidden"]), ("top-256", ["--top_k=256"])):
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
    return {"hidden": bench.folder / "hidden-0", "top-256": bench.folder / "top-256-0"}


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
        spec = teacher_spec(cfg, bench.teacher, torch.device("cpu"))
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
    model = AutoModelForCausalLM.from_pretrained(bench.cfg.student).eval()
    head = head_of(model, len(bench.student.table))
    rows = [["loss", "k", "kept mass", "loss / whole loss", "gradient off by", "cosine"]]
    for name in LOSSES:
        cfg = Config(student=bench.cfg.student, teacher=bench.cfg.teacher, data="-", loss=name,
                     projection_topk=2**20)
        whole = build_loss(cfg, bench.student, bench.teacher, "cpu")
        truncated = build_loss(cfg, bench.student, bench.teacher, "cpu", True)
        collator = Collator(bench.student, [PairOptions(bench.teacher, whole.spelling)])
        batch = collator(bench.stories[:BATCH])
        of_teacher = batch.teachers[0]
        live = bench.source.targets(of_teacher)
        with torch.no_grad():
            hidden = model.base_model(input_ids=batch.student.ids)[0].flatten(0, 1)
            x = HiddenLogits(hidden, head)(torch.arange(len(hidden)))
        value, gradient = by_logits(x, live, whole, of_teacher)
        for k in KEPT:
            if k > len(bench.teacher.table):
                continue
            rows_of_k = most_likely(live, k, of_teacher.labels.flatten())
            kept = 1 - rows_of_k.logits.rest_T[of_teacher.labels.flatten() >= 0].exp().mean()
            value_k, gradient_k = by_logits(x, rows_of_k, truncated, of_teacher)
            off = (gradient_k - gradient).norm() / gradient.norm()
            cosine = (gradient_k * gradient).sum() / gradient_k.norm() / gradient.norm()
            rows.append([name, str(k), f"{kept:.4f}", f"{value_k / value:.4f}", f"{off:.4f}",
                         f"{cosine:.4f}"])
    print(demo_report.markdown_table(rows), flush=True)


def by_logits(x, source, loss, batch):
    """Return (value, gradient by the student's logits) of a loss of one tile."""
    leaf = x.detach().requires_grad_()
    [tile] = batch.tiles
    [sub_tile] = tile.sub_tiles
    student = leaf[tile.student_positions][sub_tile.student_slice]
    teacher = source(sub_tile.teacher_positions)[sub_tile.teacher_slice]
    value = loss.loss_fn(student, teacher, sub_tile)
    gradient, = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient


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
