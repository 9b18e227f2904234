"""Measure what a loss costs, tiled and plain: seconds against the matmuls alone, and peak memory.

    python benchmarks/loss.py                                # the record of docs/LOG.md
    python benchmarks/loss.py --losses piece_kl --tokens 1024 --path plain
    OMP_NUM_THREADS=1 python benchmarks/loss.py --tokens 64 --H 128 --times 7

The first command prints one line of JSON per loss, each from a process of its own.

The inputs are random hidden states and heads of two real sizes.  Nine of ten chunks have one token
on both sides, the others have two on one side.  The vocabularies have as many tokens in common as
llama3 and qwen2 do.  Memory is the peak of the process above inputs and gradients.  On a GPU
benchmarks/gpu.py measures the same losses.

tiled: `tiles.tiled_loss`.  plain: all logits at once.  compiled: tiled, with what torch.compile
makes of a divergence, or of the roots of a translation.
matmuls: the student's three (forward, and backward for hidden states and weight) and the teacher's,
over all tokens, in one piece, into memory that exists, in the same process.
seconds: those of all its threads, which other processes disturb less.
"""

import json
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fire
import numpy as np
import torch
import torch.nn.functional as F

from isogloss import losses, nodes
from isogloss.config import Config
from isogloss.job.columns import to_device
from isogloss.models.compiler import missing_compiler
from isogloss.objective import loss_table, projected
from isogloss.spelling import translation_tables
from isogloss.tile_plan import CPU_SUB_TILES, GPU_SUB_TILES, SubTile, Tile, plan_tiles
from isogloss.tiles import Head, HiddenLogits, StoredLogits, TeacherBlocks, tiled_loss

DIVERGENCES = "forward_kl", "reverse_kl", "generalized_jsd"  # one vocabulary, the student's
LOSSES = "piece_kl", "projection_kl", "gold", "alm", "uld", "forward_kl"
# Of llama3 (128,256 tokens) against qwen2: tokens whose bytes are one token of the other too.
COMMON_PER_TOKEN = 101_566 / 128_256
# Share of the teacher's tokens that cannot come behind a student token: llama3 and qwen2, mean over
# 502 positions of wikitext2, in about 1,000 ranges each (here in one).
JOINED_FRACTION = 1_127_233 / 502 / 151_646
# Chunks with two tokens on one side.  A guess, not measured on texts.
LONG_CHUNK_FRACTION = 0.1
# Weights of the four entries of a projection row: 0.9 * 0.1^i, as projection_tools builds them.
PROJECTION_WEIGHTS = 0.9, 0.09, 0.009, 0.001
KIB_PER_GIB = 2**20

# (student logits (n, V), teacher logits (m, W), sub-tile) -> ()
Loss = Callable[[torch.Tensor, torch.Tensor, SubTile], torch.Tensor]


class Sizes(NamedTuple):
    """Give the sizes of the inputs; see `main`."""

    tokens: int
    V: int
    W: int
    H: int
    teacher_H: int
    K: int
    memory_mib: float


class Text(NamedTuple):
    """Hold the ids of one text, (1, tokens) int64, as `tile_plan.plan_tiles` takes them."""

    student_labels: torch.Tensor
    student_chunk: torch.Tensor
    teacher_labels: torch.Tensor
    teacher_chunk: torch.Tensor


# --- random inputs --------------------------------------------------------------------------------


def random_text(tokens: int, V: int, W: int) -> Text:
    """Draw the tokens of a text, in chunks of one token on one side and one or two on the other."""
    torch.manual_seed(0)
    student_sizes = torch.ones(tokens, dtype=torch.long)
    teacher_sizes = torch.ones(tokens, dtype=torch.long)
    is_long = torch.rand(tokens) < LONG_CHUNK_FRACTION
    student_sizes[is_long & (torch.rand(tokens) < 0.5)] = 2
    teacher_sizes[is_long] = 3 - student_sizes[is_long]
    # Both sides are cut to the same number of tokens, so chunks at the end may have one side alone.
    chunk_ids = torch.arange(tokens)
    return Text(
        student_labels=torch.randint(V, (1, tokens)),
        student_chunk=torch.repeat_interleave(chunk_ids, student_sizes)[None, :tokens],
        teacher_labels=torch.randint(W, (1, tokens)),
        teacher_chunk=torch.repeat_interleave(chunk_ids, teacher_sizes)[None, :tokens],
    )


def random_pieces(size: int, other_size: int, common: int) -> np.ndarray:
    """Spell the `size` tokens of a vocabulary: the common ones by themselves, the others by two."""
    pieces = torch.randint(other_size, (size, 2))
    pieces[:common, 0] = torch.arange(common)
    pieces[:common, 1] = -1
    return pieces.numpy()


def random_tables(V: int, W: int) -> nodes.Tables:
    """Return the tables of two vocabularies in which most tokens have an equal in the other one."""
    common = int(COMMON_PER_TOKEN * V)
    pieces_W = random_pieces(W, V, common)
    pieces_V = random_pieces(V, W, common)
    # no token has bytes here, so that no join follows from these
    no_bytes = [[b""] * size for size in (V, W)]
    fields = translation_tables(pieces_W, pieces_V, *no_bytes, np.zeros(V, bool), lambda texts: [])
    tensors = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
               for name, value in fields.items()}
    num_joined = int(JOINED_FRACTION * W)
    low = torch.randint(W - num_joined, (V,))
    high = low + num_joined
    joins = {"join_start_V": torch.arange(V + 1), "join_low_J": low, "join_high_J": high,
             "joined_V": torch.full((V,), num_joined)}
    return nodes.Tables(**tensors | joins)


def spell_long_chunks(text: Text, V: int, tables: nodes.Tables) -> None:
    """Let the tokens of a chunk spell each other where one side has a single one; in place."""
    chunks = losses.find_chunks(text.student_chunk, text.teacher_chunk)
    # Common tokens have one piece; only the others can stand for a chunk of two.
    first_uncommon = int(COMMON_PER_TOKEN * V)
    for is_long, first_long, first_one, long_labels, one_labels, pieces in (
        (chunks.count_S == 2, chunks.first_S, chunks.first_T, text.student_labels,
         text.teacher_labels, tables.pieces_W),
        (chunks.count_T == 2, chunks.first_T, chunks.first_S, text.teacher_labels,
         text.student_labels, tables.pieces_V),
    ):
        tokens = first_uncommon + torch.arange(int(is_long.sum()))
        one_labels[0, first_one[is_long]] = tokens
        for k in (0, 1):
            long_labels[0, first_long[is_long] + k] = pieces[tokens, k]


def random_projection(V: int, W: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and likelihoods, with one entry in the rows of the common tokens."""
    common = int(COMMON_PER_TOKEN * V)
    indices = torch.randint(W, (V, len(PROJECTION_WEIGHTS)), device=device)
    indices[:common] = -1
    indices[:common, 0] = torch.arange(common)
    likelihoods = torch.tensor(PROJECTION_WEIGHTS, device=device).repeat(V, 1)
    likelihoods[:common, 0] = 1
    likelihoods[:common, 1:] = 0
    return indices, likelihoods


def build_loss(name, V, W, kept_K, tables, device, backend) -> loss_table.DistillationLoss:
    """Build the loss of a name as a run does; that of projection_kl takes the kept columns.

    Args:
        tables: of a translation; None for a loss without one.
        backend: as --loss_backend.
    """
    cfg = Config(student="S", teacher="T", data="D", loss=name, loss_backend=backend)
    # all that is asked of the tokenizers: their sizes, and whether they are equal
    pair = SimpleNamespace(tables=(range(V), range(W)), fingerprints=(True, name in DIVERGENCES),
                           tokenizers=(None, None))
    no_twins = np.zeros(V, bool)
    projection = random_projection(V, W, device)
    with (mock.patch.object(loss_table, "cached_translation", lambda pair: tables._asdict()),
          mock.patch.object(projected, "_projection", lambda *_: projection),
          mock.patch.object(projected, "unwritten_twins", lambda *_: no_twins)):
        loss = loss_table.LOSSES[name].build(cfg, pair, device)
    if name == "projection_kl":
        loss.loss_fn, loss.write_gradient = loss.for_columns(kept_K)
    return loss


# --- the paths that are compared ------------------------------------------------------------------


@dataclass
class LossRun:
    """Hold a loss and its inputs, and run it on either path.

    hidden, weight: (tokens, H), (V, H), the student's hidden states and head.
    kept_K: teacher tokens that projection_kl compares.
    tiles: for the tiled path.
    whole: one tile of one sub-tile, for the plain path.
    """

    name: str
    built: loss_table.DistillationLoss
    compiled_built: loss_table.DistillationLoss
    hidden: torch.Tensor
    weight: torch.Tensor
    teacher: HiddenLogits
    kept_K: torch.Tensor
    tiles: list[Tile]
    whole: list[Tile]

    @property
    def loss(self) -> Loss:
        return self.built.loss_fn

    def teacher_logits(self, tiles: list[Tile]) -> HiddenLogits:
        """Return the teacher that the loss sees.

        For projection_kl, that is a choice of columns, made in a pass over all logits.  The pass is
        timed; the columns are fixed, because the loss is built for them.
        """
        if self.name != "projection_kl":
            return self.teacher
        importance_W = self.hidden.new_full([self.teacher.head.tokens], -torch.inf)
        blocks = TeacherBlocks(self.teacher, tiles)
        for positions in blocks.fetches:
            of_block = losses.teacher_importance(blocks.fetch(positions)[None])
            importance_W = torch.maximum(importance_W, of_block)
        importance_W.topk(len(self.kept_K))
        return self.teacher.columns(self.kept_K)

    def clear_gradients(self) -> None:
        self.hidden.grad = None
        self.weight.grad = None

    def compiled(self) -> None:
        self.tiled(self.compiled_built.loss_fn)

    def tiled(self, loss: Loss | None = None) -> None:
        self.clear_gradients()
        loss = loss or self.loss

        def tile_loss(x, y, sub_tile):
            return loss(x, y, sub_tile)[None]

        teacher = self.teacher_logits(self.tiles)
        head = Head(self.weight)
        value, _ = tiled_loss(self.hidden, head, teacher, tile_loss, self.tiles, [1.0])
        value.backward()

    def plain(self) -> None:
        self.clear_gradients()
        [tile] = self.whole
        [sub_tile] = tile.sub_tiles
        teacher = self.teacher_logits(self.whole)
        x = self.hidden @ self.weight.T
        all_positions = torch.arange(len(x), device=x.device)
        y = StoredLogits(teacher(all_positions))(sub_tile.teacher_positions)
        self.loss(x[tile.student_positions], y, sub_tile).backward()

    @torch.no_grad()
    def matmuls(self) -> None:
        """Run the shapes and dtypes of training; the numbers do not matter."""
        logits, hidden_like, weight_like = self.memory
        x = torch.mm(self.hidden, self.weight.T, out=shaped(logits, self.hidden, self.weight))
        torch.mm(x, self.weight, out=hidden_like)
        torch.mm(x.T, self.hidden, out=weight_like)
        # the teacher's logits take the place of the student's
        rows = self.teacher.hidden_TH
        head = self.teacher.head.weight_VH
        torch.mm(rows, head.T, out=shaped(logits, rows, head))
        if self.name == "projection_kl":
            head = head[self.kept_K]
            torch.mm(rows, head.T, out=shaped(logits, rows, head))

    @cached_property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return memory for logits, flat, and for two gradients."""
        width = max(len(self.weight), self.teacher.head.tokens)
        logits = self.hidden.new_empty(len(self.hidden) * width)
        return logits, torch.empty_like(self.hidden), torch.empty_like(self.weight)

    def warm_up(self) -> None:
        """Run the loss once on few positions, to load and compile its code."""
        sub_tile = self.tiles[0].sub_tiles[0]
        W = len(self.kept_K) if self.name == "projection_kl" else self.teacher.head.tokens
        device = self.hidden.device
        x = torch.randn(sub_tile.student_slice.stop, len(self.weight), device=device)
        y = torch.randn(sub_tile.teacher_slice.stop, W, device=device)
        self.loss(x.requires_grad_(), y.requires_grad_(), sub_tile).backward()


def prepare(name: str, sizes: Sizes, dtype: torch.dtype, is_for_gpu: bool = False) -> LossRun:
    """Draw the inputs of a loss and plan its tiles; is_for_gpu: as for one, also without one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    V = sizes.V
    W = V if name in DIVERGENCES else sizes.W
    text = random_text(sizes.tokens, V, W)
    kept_K = torch.randperm(W)[: sizes.K].sort().values.to(device)
    tables = random_tables(V, W) if name == "piece_kl" else None
    if tables:
        spell_long_chunks(text, V, tables)
    both = [
        build_loss(name, V, W, kept_K, tables, device, backend)
        for backend in ("plain", "plain" if missing_compiler() else "compiled")]

    def tensor(*shape):
        # Variance 1 / H keeps the logits small, as if the models knew nothing yet.
        return torch.randn(*shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    hidden = tensor(sizes.tokens, sizes.H).requires_grad_()
    weight = tensor(V, sizes.H).requires_grad_()
    teacher = HiddenLogits(tensor(sizes.tokens, sizes.teacher_H), Head(tensor(W, sizes.teacher_H)))

    def planned(memory_mib):
        budget = CPU_SUB_TILES
        if is_for_gpu or device != "cpu":
            gradient = both[1].write_gradient
            copies = gradient.live_copies if gradient else loss_table.LOSSES[name].live_copies
            budget = GPU_SUB_TILES._replace(live_copies=copies)
        tiles = plan_tiles(*text, (V, W), memory_mib, sub_tiles=budget)
        return [to_device(with_terms(tile, tables), device) for tile in tiles]

    return LossRun(name, *both, hidden, weight, teacher, kept_K,
                   tiles=planned(sizes.memory_mib), whole=planned(math.inf))


def shaped(flat: torch.Tensor, rows: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return the beginning of flat memory as the logits of these rows."""
    return flat[: len(rows) * len(head)].view(len(rows), len(head))


def with_terms(tile: Tile, tables: nodes.Tables | None) -> Tile:
    """List the terms of every sub-tile: those of a translation, else the chunks."""
    sub_tiles = []
    for sub_tile in tile.sub_tiles:
        ids = loss_table.batch_of_one(sub_tile)
        if tables:
            read = F.pad(ids.student_labels[:, :-1], (1, 0), value=-1)
            terms = nodes.list_nodes(read, ids.student_labels, ids.teacher_labels,
                                     ids.student_chunk, ids.teacher_chunk, tables)
        else:
            terms = losses.find_chunks(ids.student_chunk, ids.teacher_chunk)
        sub_tiles.append(sub_tile._replace(terms=terms))
    return tile._replace(sub_tiles=tuple(sub_tiles))


# --- measurement ----------------------------------------------------------------------------------


def peak_gib() -> float:
    """Return the most memory that was ever in use, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_GIB


def timed(run: Callable[[], None]) -> float:
    """Return the seconds that a run takes of all threads of this process."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def memory_of(run: LossRun, path: str) -> float:
    """Run a path once; return its peak memory in GiB, above inputs and gradients."""
    # Peaks never sink, so the gradients count from the start: allocate as much, and free it.
    hidden_like = torch.zeros_like(run.hidden)
    weight_like = torch.zeros_like(run.weight, dtype=torch.float32)
    before = peak_gib()
    del hidden_like, weight_like
    getattr(run, path)()
    return peak_gib() - before


def measure(name: str, sizes: Sizes, dtype: torch.dtype, path: str, times: int) -> dict:
    """Measure seconds of loss and gradients, and of the matmuls, and GiB."""
    run = prepare(name, sizes, dtype)
    run.warm_up()
    # The first run after the warm-up; the timed ones reuse what it allocated.
    gib = memory_of(run, path)
    seconds = []
    matmul_seconds = []
    for _ in range(times):  # in turn: machines drift
        seconds.append(timed(getattr(run, path)))
        matmul_seconds.append(timed(run.matmuls))
    ratios = [round(one / other, 2) for one, other in zip(seconds, matmul_seconds)]
    return {
        "loss": name,
        "path": path,
        "tokens": len(run.hidden),
        "H": sizes.H,
        "dtype": str(dtype)[6:],
        "threads": torch.get_num_threads(),
        "tiles": len(run.whole if path == "plain" else run.tiles),
        "seconds": round(statistics.fmean(seconds), 3),
        "matmul_seconds": round(statistics.fmean(matmul_seconds), 3),
        "ratios": ratios,
        "median": round(statistics.median(ratios), 2),
        "GiB": round(gib, 2),
    }


def as_list(value) -> list[str]:
    """Return what fire makes of a list of names: a tuple, or one string."""
    if isinstance(value, tuple | list):
        return list(value)
    return [name for name in value.split(",") if name]


def main(
    losses=LOSSES, tokens=4096, V=128_256, W=151_646, H=2048, teacher_H=2560, K=8192,
    memory_mib=512, dtype="float32", path="tiled", times=2, here=False,
):
    """Print one line of JSON per loss.

    Args:
        losses: names, separated by commas.
        tokens: tokens of the text, on either side.
        V, W: vocabulary sizes of student and teacher.
        H, teacher_H: their hidden sizes.
        K: kept columns of projection_kl.
        memory_mib: MiB, of `tile_plan.plan_tiles`.
        dtype: of hidden states and heads.
        path: tiled, plain or compiled.
        times: number of rounds.
        here: measure in this process.
    """
    sizes = Sizes(tokens, V, W, H, teacher_H, K, memory_mib)
    measured = partial(measure, sizes=sizes, dtype=getattr(torch, dtype), path=path, times=times)
    for name in as_list(losses):
        if here:
            record = measured(name)
        else:  # in a process of its own: the peak of a process never sinks
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                record = pool.apply(measured, [name])
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
