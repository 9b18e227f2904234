"""Measure what packing a cache takes, and what it does to gradients by the student's logits.

    python benchmarks/packed.py ASSETS TEACHER FOLDER

FOLDER holds, for each kind of text, NAME.jsonl and two caches of it by TEACHER: NAME8, written with
`--logp_bits 8`, and NAME16.  A student of the teacher's tokenizer gets 0.7 times its logits and
noise, one of `ASSETS/tokenizers/llama3` noise beside the frequencies of its tokens.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import start_distributed
from isogloss.objective.loss_table import build_loss
from isogloss.teachers.cache_files import CacheReader, scored_logits
from isogloss.teachers.cached import CachedTeacher

ASSETS, TEACHER, FOLDER = map(Path, sys.argv[1:4])
STUDENTS = [("forward_kl", TEACHER), ("piece_kl", ASSETS / "models/stories260K"),
            ("piece_kl", ASSETS / "models/tinytalk_neo_3M"),
            ("projection_kl", ASSETS / "models/tinytalk_neo_3M"),
            ("piece_kl", ASSETS / "tokenizers/llama3")]  # with a config.json beside it


def gradient(leaf, source, loss, batch):
    total = 0
    for tile in batch.tiles:
        for part in tile.sub_tiles:
            student = leaf[tile.student_positions][part.student_slice]
            total += loss.loss_fn(student, source(part.teacher_positions)[part.teacher_slice], part)
    return torch.autograd.grad(total, leaf)[0], total.item()


def logits_of(path, batch, num_tokens):
    generator = torch.Generator().manual_seed(0)
    ids = batch.student.ids
    noise = torch.randn(ids.numel(), num_tokens, generator=generator)
    if "tokenizers" in path.parts:
        return noise + (torch.bincount(ids.flatten(), minlength=num_tokens) + 0.003).log()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(ids).logits.flatten(0, 1).float()
    return 0.7 * logits + noise if path == TEACHER else logits[:, :num_tokens]


def compare(name, path, kinds, device):
    student, _ = load_text_encoder("student", str(path), 250 if "260K" in str(path) else 120)
    teacher, _ = load_text_encoder("teacher", str(TEACHER), 512)
    cfg = Config(student=str(path), teacher=str(TEACHER), data="-", loss=name)
    loss = build_loss(cfg, student, teacher, "cpu", True)
    sums = torch.zeros(4)
    for kind in kinds:
        with open(FOLDER / f"{kind}.jsonl") as lines:
            texts = [json.loads(next(lines))["text"]]
        batch = Collator(student, [PairOptions(teacher, loss.spelling, is_cached=True)])(texts)
        leaf = logits_of(path, batch, len(student.table)).requires_grad_()
        found = []
        for bits in (8, 16):
            of_cache = Config(student=str(path), data="-", loss=name,
                              teacher_cache=str(FOLDER / f"{kind}{bits}"))
            source = CachedTeacher(of_cache.teacher_kind.of(of_cache, teacher, device))
            found.append(gradient(leaf, source.targets(batch.teachers[0]), loss, batch.teachers[0]))
        (packed, value), (exact, expected) = found
        sums += torch.tensor([(packed - exact).square().sum(), exact.square().sum(),
                              value - expected, expected])
    print(f"{name} {path.name}: gradient {(sums[0] / sums[1]).sqrt():.5f}, "
          f"loss {sums[2] / sums[3]:.5f}")


def main():
    kinds = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
    for kind in kinds:
        for bits in (8, 16):
            reader = CacheReader(FOLDER / f"{kind}{bits}")
            num = int(reader.size.sum())
            start = time.process_time()
            for place in range(len(reader.keys)):
                size = int(reader.size[place])
                scored_logits(reader.columns(place, size), torch.zeros(size).long(), 2**20)
            seconds = time.process_time() - start
            tensors = sum(path.stat().st_size for path in reader.folder.glob("shard*"))
            orders = 4 * reader.manifest.vocab * reader.manifest.num_shards * (bits == 8)
            print(f"{kind}: {(tensors - orders) / num:.1f} bytes of a position and "
                  f"{orders} of orders, {num / seconds:.0f} positions a second")
    device = start_distributed()
    for name, path in STUDENTS:
        compare(name, path, kinds, device)


if __name__ == "__main__":
    main()
