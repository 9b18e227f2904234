"""What does a loss cost, tiled and plain?  Seconds against the matmuls alone, and peak memory.

    python benchmarks/loss.py                                  # the record of docs/LOG.md, one process a line
    python benchmarks/loss.py --losses piece_kl --tokens 1024 --plain
    python benchmarks/loss.py --losses gold --beside           # tiles, and the plain path in turn with them

Random hidden states and heads of two real sizes; chunks of one token a side for nine of ten, of two on either
side for the others; common tokens as many as llama3 and qwen2 have.  Memory is the peak of the process (CPU)
or of the allocator (CUDA) above inputs and gradients.  `matmuls`: the student's three (forward, and backward
for hidden states and weight) and the teacher's, over all tokens, in one piece, in the same process.
`stolen`: cores that other virtual machines took, on average over the runs.
"""

import json
import math
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import fire
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import losses
from tiles import CPU_PARTS, GPU_PARTS, Head, HiddenRows, LogitRows, TeacherBlocks, plan_tiles, tiled_loss

LOSSES = "piece_kl", "projection_kl", "gold", "alm", "uld", "cross_entropy"
EVENTS, OWN = 109_566 / 128_256, 101_566 / 128_256  # of the student's tokens; with a partner of their own


def peak(device):
    """GiB, the most that was ever in use."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def texts(tokens, V, W, device):
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


def measure(name, tokens, V, W, H, teacher_H, K, memory_mib, dtype, plain, beside, times):
    """One line of JSON: seconds of loss and gradients, and of the matmuls; GiB above inputs and gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, dtype)
    labels, *more = texts(tokens, V, W, device)
    kept = torch.randperm(W)[:K].sort().values.to(device)
    spelling, loss = part_loss(name, V, W, kept, device)
    if spelling:  # let the tokens of a chunk spell each other where one side has a single one
        chunks = losses.find_chunks(more[0], more[2])
        for coarse, fine, row, first, pieces, count in (
                (more[1], labels, chunks.first_T, chunks.first_S, spelling.pieces_W, chunks.count_S),
                (labels, more[1], chunks.first_S, chunks.first_T, spelling.pieces_V, chunks.count_T)):
            several = count == 2
            token = int(OWN * V) + torch.arange(int(several.sum()))
            coarse[0, row[several]] = token
            for k in (0, 1):
                fine[0, first[several] + k] = pieces[token, k]

    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    hidden, weight = tensor(tokens, H).requires_grad_(), tensor(V, H).requires_grad_()
    teacher = None
    if name != "cross_entropy":
        teacher = HiddenRows(tensor(tokens, teacher_H), Head(tensor(W, teacher_H)))

    def planned(memory_mib):
        tiles = plan_tiles(labels, *more, (V, W if teacher else 0), memory_mib,
                           CPU_PARTS if device == "cpu" else GPU_PARTS)
        if teacher:
            tiles = [tile._replace(parts=tuple(with_terms(part, spelling) for part in tile.parts))
                     for tile in tiles]
        return [to(tile, device) for tile in tiles]

    in_tiles, whole = planned(memory_mib), planned(math.inf) if plain or beside else None
    first = in_tiles[0].parts[0]  # once, for what loading its code takes
    x, y = [torch.randn(side.stop, size, device=device, requires_grad=True)
            for side, size in ((first.student, V), (first.teacher, K if name == "projection_kl" else W))]
    loss(x, y, first).backward()
    del x, y
    hold = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    before = peak(device)
    del hold

    def run(plain):
        tiles = whole if plain else in_tiles
        hidden.grad = weight.grad = None
        rows = teacher
        if name == "projection_kl":
            importance = torch.full((W,), -torch.inf, device=device)
            blocks = TeacherBlocks(teacher, tiles)
            for fetched in blocks.fetches:
                importance = torch.maximum(importance, losses.teacher_importance(blocks.fetch(fetched)[None]))
            del blocks
            importance.topk(K)
            rows = teacher.columns(kept)
        if plain:
            x = hidden @ weight.T
            y = rows and LogitRows(rows(torch.arange(tokens, device=device)))
            [tile] = tiles
            [part] = tile.parts
            loss(x[tile.student_rows], y and y(part.fetch), part).backward()
        else:
            tiled_loss(hidden, Head(weight), rows, lambda *how: loss(*how)[None], tiles, [1.0])[0].backward()

    def matmuls():
        with torch.no_grad():
            x = hidden @ weight.T
            x @ weight
            x.T @ hidden
            del x
            if teacher:
                teacher.hidden_TH @ teacher.head.weight_VH.T
            if name == "projection_kl":
                teacher.hidden_TH @ teacher.head.weight_VH[kept].T

    run(plain)
    used = peak(device) - before
    runs = [partial(run, plain), matmuls, *([partial(run, True)] if beside else [])]
    gone = stolen()
    taken = [[timed(each, device) for each in runs] for _ in range(times)]  # in turn: machines drift
    gone = (stolen() - gone) / sum(map(sum, taken))
    seconds, alone, *other = [round(sum(x) / times, 3) for x in zip(*taken)]
    found = {"loss": name, "path": "plain" if plain else "tiled", "tokens": tokens,
             "tiles": len(whole if plain else in_tiles), "seconds": seconds, "matmul_seconds": alone,
             "ratio": round(seconds / alone, 2), "ratios": [round(x / y, 2) for x, y, *_ in taken],
             "GiB": round(used, 2), "stolen": round(gone, 2)}
    if beside:
        found |= {"plain_seconds": other[0], "of_plain": [round(x / z, 2) for x, _, z in taken]}
    print(json.dumps(found), flush=True)


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


def timed(run, device):
    """Seconds."""
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def stolen():
    """Seconds that a virtual machine's cores, together, wanted to run and could not; 0 where unknown."""
    stat = Path("/proc/stat")
    return int(stat.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if stat.exists() else 0.0


def main(losses=LOSSES, tokens=4096, V=128_256, W=151_936, H=2048, teacher_H=2560, K=8192, memory_mib=512,
         dtype="float32", plain=False, beside=False, times=2, here=False):
    losses = losses.split(",") if isinstance(losses, str) else losses
    how = dict(tokens=tokens, V=V, W=W, H=H, teacher_H=teacher_H, K=K, memory_mib=memory_mib, dtype=dtype,
               plain=plain, beside=beside, times=times)
    for name in losses:
        if here:
            measure(name, **how)
        else:  # a fresh process each: its peak is its own
            flags = [f"--{key}={value}" for key, value in how.items()]
            subprocess.run([sys.executable, __file__, f"--losses={name}", "--here", *flags], check=True)


if __name__ == "__main__":
    fire.Fire(main)
