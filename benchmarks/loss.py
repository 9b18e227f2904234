"""What does a loss cost, tiled and plain?  Seconds against the matmuls alone, and peak memory.

    python benchmarks/loss.py                                  # the record of docs/LOG.md, one process a line
    python benchmarks/loss.py --losses piece_kl --tokens 1024 --path plain
    python benchmarks/loss.py --losses gold --beside plain,reference    # tiles, and these in turn with them

Random hidden states and heads of two real sizes; chunks of one token a side for nine of ten, of two on either
side for the others; common tokens as many as llama3 and qwen2 have.  Memory is the peak of the process (CPU)
or of the allocator (CUDA) above inputs and gradients.

plain: all logits at once.  reference: that, by torch alone, without compiled rows.
matmuls: the student's three (forward, and backward for hidden states and weight) and the teacher's, over all
tokens, in one piece, in the same process.
stolen: cores that other virtual machines took, on average over the runs.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import fire
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import losses
from tiles import CPU_SUB_TILES, GPU_SUB_TILES, Head, HiddenLogits, StoredLogits, TeacherBlocks, plan_tiles, tiled_loss

DIVERGENCES = "forward_kl", "reverse_kl", "generalized_jsd"  # of one vocabulary, the student's
LOSSES = "piece_kl", "projection_kl", "gold", "alm", "uld", "forward_kl", "cross_entropy"
EVENTS, OWN = 109_566 / 128_256, 101_566 / 128_256  # of the student's tokens; with a partner of their own


def peak():
    """GiB, the most that was ever in use."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def texts(tokens, V, W):
    """(labels, student chunk, teacher next, teacher chunk) of one text."""
    torch.manual_seed(0)
    sizes = torch.ones(2, tokens, dtype=torch.long)
    several = torch.rand(tokens) < 0.1
    sizes[0, several & (torch.rand(tokens) < 0.5)] = 2
    sizes[1, several] = 3 - sizes[0, several]
    chunks = [torch.repeat_interleave(torch.arange(tokens), size)[None, :tokens] for size in sizes]
    next_ = [torch.randint(n, (1, tokens)) for n in (V, W)]
    return next_[0], chunks[0], next_[1], chunks[1]


def random_spelling(V, W):
    """Most tokens have a partner of their own; two tokens a side spell each other for the rest."""
    events, own = int(EVENTS * V), int(OWN * V)
    event_V, event_W = [torch.randint(events, (n,)) for n in (V, W)]
    event_V[:own] = event_W[:own] = torch.arange(own)
    tables = []
    for size, other in ((W, V), (V, W)):
        pieces = torch.randint(other, (size, 2))
        pieces[:own, 1] = -1
        order = pieces[:, 0].argsort()
        first = pieces[order, 0].contiguous()
        key = pieces[:, 0].contiguous()
        low, high = [torch.searchsorted(first, key, right=right) for right in (False, True)]
        low, high = [torch.stack([torch.full_like(x, end), x], 1) for x, end in ((low, 0), (high, size))]
        tables += [pieces, order, low, high]
    return losses.Spelling(event_V.int(), event_W.int(), events, *tables)


def part_loss(name, V, W, kept, device):
    """(x, y, part) -> sum; for projection_kl y holds the kept columns alone."""
    def ids(part):
        return [x[None] for x in part[2:6]]

    if name == "cross_entropy":
        return None, lambda x, y, part: F.cross_entropy(x.float(), part.labels, reduction="sum")
    if name == "piece_kl":
        spelling = random_spelling(V, W)
        here = losses.Spelling(*[x.to(device) if torch.is_tensor(x) else x for x in spelling])
        return spelling, lambda x, y, part: losses.piece_kl(
            x[None], y[None], *ids(part)[:2], part.terms, here)[0]
    if name in DIVERGENCES:
        return None, lambda x, y, part: getattr(losses, name)(
            x[part.terms.first_S][None], y[part.terms.first_T][None], None)[0]
    common = torch.arange(int(OWN * V), device=device)
    if name == "gold":  # h_kl is the same with other common tokens
        rest = losses.other_tokens(common, V), losses.other_tokens(common, W)
        return None, lambda x, y, part: losses.gold(
            x[None], y[None], *ids(part)[2:], common, common, chunks=part.terms, rest=rest)[0]
    if name == "projection_kl":
        indices = torch.randint(W, (V, 4), device=device)
        indices[: int(EVENTS * V), 1:] = -1
        weights = torch.tensor([0.9, 0.09, 0.009, 0.001], device=device).expand(V, 4)
        entries = losses.projection_entries(indices, weights, W, kept)
        return None, lambda x, y, part: losses.projection_kl(
            x[None], y[None], *ids(part)[2:], indices, weights, entries=entries, chunks=part.terms)[0]
    return None, lambda x, y, part: getattr(losses, name)(x[None], y[None], *ids(part), chunks=part.terms)[0]


class Job(NamedTuple):
    """A batch and its two models' hidden states; `tiles` for the tiled path, `whole` for the plain one."""

    name: str
    loss: Any
    hidden: torch.Tensor
    weight: torch.Tensor
    teacher: HiddenLogits | None
    kept: torch.Tensor
    tiles: list
    whole: list | None

    def rows(self, tiles):
        """The teacher that the loss sees; of projection_kl, after the pass for the importance of columns."""
        if self.name != "projection_kl":
            return self.teacher
        importance = torch.full_like(self.teacher.head.weight_VH[:, 0], -torch.inf, dtype=torch.float32)
        blocks = TeacherBlocks(self.teacher, tiles)
        for fetched in blocks.fetches:
            found = losses.teacher_importance(blocks.fetch(fetched)[None])
            importance = torch.maximum(importance, found)
        importance.topk(len(self.kept))
        return self.teacher.columns(self.kept)

    def tiled(self):
        self.hidden.grad = self.weight.grad = None
        found = tiled_loss(self.hidden, Head(self.weight), self.rows(self.tiles),
                           lambda *how: self.loss(*how)[None], self.tiles, [1.0])
        found[0].backward()

    def plain(self):
        self.hidden.grad = self.weight.grad = None
        [tile] = self.whole
        [part] = tile.parts
        rows = self.rows(self.whole)
        x = self.hidden @ self.weight.T
        y = rows and StoredLogits(rows(torch.arange(len(x), device=x.device)))
        self.loss(x[tile.student_rows], y and y(part.fetch), part).backward()

    def reference(self):
        """The plain path without compiled rows, as losses.py is alone."""
        before, losses.HAS_KERNELS = losses.HAS_KERNELS, False
        self.plain()
        losses.HAS_KERNELS = before

    @torch.no_grad()
    def matmuls(self):
        x = self.hidden @ self.weight.T
        x @ self.weight
        x.T @ self.hidden
        del x
        if self.teacher:
            self.teacher.hidden_TH @ self.teacher.head.weight_VH.T
        if self.name == "projection_kl":
            self.teacher.hidden_TH @ self.teacher.head.weight_VH[self.kept].T


def job(name, tokens, V, W, H, teacher_H, K, memory_mib, dtype, whole):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    W = V if name in DIVERGENCES else W
    labels, *more = texts(tokens, V, W)
    kept = torch.randperm(W)[:K].sort().values.to(device)
    spelling, loss = part_loss(name, V, W, kept, device)
    if spelling:
        spell_chunks(labels, *more, V, spelling)

    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    hidden, weight = tensor(tokens, H).requires_grad_(), tensor(V, H).requires_grad_()
    teacher = None
    if name != "cross_entropy":
        teacher = HiddenLogits(tensor(tokens, teacher_H), Head(tensor(W, teacher_H)))

    def planned(memory_mib):
        tiles = plan_tiles(labels, *more, (V, W if teacher else 0), memory_mib,
                           CPU_SUB_TILES if device == "cpu" else GPU_SUB_TILES)
        if teacher:
            tiles = [tile._replace(parts=tuple(with_terms(part, spelling) for part in tile.parts))
                     for tile in tiles]
        return [to(tile, device) for tile in tiles]

    return Job(name, loss, hidden, weight, teacher, kept, planned(memory_mib),
               planned(math.inf) if whole else None)


def measure(path, beside, times, **sizes):
    """One line of JSON: seconds of loss and gradients, and of the matmuls; GiB above inputs and gradients."""
    job_ = job(whole=path != "tiled" or beside, **sizes)
    warm_up(job_)
    hold = torch.zeros_like(job_.hidden), torch.zeros_like(job_.weight, dtype=torch.float32)
    before = peak()
    del hold
    getattr(job_, path)()
    used, gone = peak() - before, stolen()
    taken = [[timed(getattr(job_, each)) for each in (path, "matmuls", *beside)]
             for _ in range(times)]  # in turn: machines drift
    gone = (stolen() - gone) / sum(map(sum, taken))
    seconds, alone, *others = [round(sum(x) / times, 3) for x in zip(*taken)]
    ratios = [[round(one[0] / one[i], 2) for one in taken] for i in range(1, len(taken[0]))]
    found = {"loss": job_.name, "path": path, "tokens": len(job_.hidden),
             "tiles": len(job_.tiles if path == "tiled" else job_.whole), "seconds": seconds,
             "matmul_seconds": alone, "ratio": round(seconds / alone, 2),
             "ratios": ratios[0], "median": statistics.median(ratios[0]),
             "GiB": round(used, 2), "stolen": round(gone, 2)}
    for other, its, of in zip(beside, others, ratios[1:]):
        found |= {f"{other}_seconds": its, f"of_{other}": of, f"median_of_{other}": statistics.median(of)}
    print(json.dumps(found), flush=True)


def warm_up(job_):
    """Once, for what loading the code of a loss takes."""
    part, device = job_.tiles[0].parts[0], job_.hidden.device
    W = 0
    if job_.teacher:
        W = len(job_.kept) if job_.name == "projection_kl" else len(job_.teacher.head.weight_VH)
    x, y = [torch.randn(side.stop, size, device=device, requires_grad=True)
            for side, size in ((part.student, len(job_.weight)), (part.teacher, W))]
    job_.loss(x, y, part).backward()


def spell_chunks(labels, student_chunk, teacher_next, teacher_chunk, V, spelling):
    """Let the tokens of a chunk spell each other where one side has a single one; in place."""
    chunks = losses.find_chunks(student_chunk, teacher_chunk)
    for coarse, fine, row, first, pieces, count in (
            (teacher_next, labels, chunks.first_T, chunks.first_S, spelling.pieces_W, chunks.count_S),
            (labels, teacher_next, chunks.first_S, chunks.first_T, spelling.pieces_V, chunks.count_T)):
        several = count == 2
        token = int(OWN * V) + torch.arange(int(several.sum()))
        coarse[0, row[several]] = token
        for k in (0, 1):
            fine[0, first[several] + k] = pieces[token, k]


def with_terms(part, spelling):
    ids = [x[None] for x in part[2:6]]
    terms = losses.piece_terms(*ids, spelling) if spelling else losses.find_chunks(*ids[2:])
    return part._replace(terms=terms)


def to(value, device):
    if torch.is_tensor(value):
        return value.to(device)
    if isinstance(value, tuple):
        moved = [to(x, device) for x in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


def timed(run):
    """Seconds."""
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def stolen():
    """Seconds that a virtual machine's cores, together, wanted to run and could not; 0 where unknown."""
    stat = Path("/proc/stat")
    return int(stat.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if stat.exists() else 0.0


def main(losses=LOSSES, tokens=4096, V=128_256, W=151_936, H=2048, teacher_H=2560, K=8192, memory_mib=512,
         dtype="float32", path="tiled", beside="", times=2, here=False):
    """path: tiled, plain or reference.  beside: of these, with commas: what runs in turn with it."""
    losses, beside = [x if isinstance(x, tuple | list) else [y for y in x.split(",") if y]
                      for x in (losses, beside)]
    sizes = dict(tokens=tokens, V=V, W=W, H=H, teacher_H=teacher_H, K=K, memory_mib=memory_mib)
    for name in losses:
        if here:
            measure(path, beside, times, name=name, dtype=getattr(torch, dtype), **sizes)
        else:  # a fresh process each: its peak is its own
            how = sizes | dict(path=path, beside=",".join(beside), times=times, dtype=dtype)
            flags = [f"--{key}={value}" for key, value in how.items()]
            subprocess.run([sys.executable, __file__, f"--losses={name}", "--here", *flags], check=True)


if __name__ == "__main__":
    fire.Fire(main)
