"""What is asked of the loaded models before the first step, lest a job learns from wrong logits."""

import torch
import torch.distributed as dist

from isogloss.teachers import hidden_head_is_right


def _all_good(verdicts, why):
    for role, good in verdicts.items():
        if not good:
            raise ValueError(f"{role}: {why}")


def check_heads(job, student_ids):
    """A ValueError where `head_of` does not give a model's own logits; all ranks take part."""
    cfg, ids = job.cfg, torch.tensor([student_ids], device=job.device)
    batch = {"student_ids": ids}
    if job.sequence:
        here = torch.arange(ids.shape[1], device=job.device) + job.sequence.rank * ids.shape[1]
        batch["student_positions"] = here.expand(ids.shape)
    job.engine.eval()
    with torch.no_grad():
        logits = job.student(batch, None).logits[..., : job.vocab]
        right = {f"--student {cfg.student}": job.student(
            batch, lambda rows: hidden_head_is_right(rows, logits))}
        for lesson in job.lessons:
            W = len(lesson.side.table)
            own = ids.clamp(max=W - 1)
            for teacher, member in zip(lesson.teachers, lesson.members):
                found = hidden_head_is_right(teacher.rows(own), teacher.logits(own)[..., :W])
                right[f"--teacher {member.teacher}"] = found
                if job.link:
                    job.link.give_back()
    job.engine.train()
    _all_good(right, "its logits are not those of its output embeddings, so its loss cannot be tiled; use "
                     "--tiled=false")


@torch.no_grad()
def check_packing(job):
    """A ValueError where a model sees across the border of packed samples; all ranks take part."""
    parts, rank = (job.sequence.size, job.sequence.rank) if job.sequence else (1, 0)
    least = min([job.vocab, *[len(lesson.side.table) for lesson in job.lessons]])
    second = torch.arange(8 * parts, device=job.device) % least
    rows = [torch.cat([first, second])[None] for first in (second, second.flip(0))]
    positions = torch.arange(8 * parts, device=job.device).repeat(2)[None]
    own, half = slice(16 * rank, 16 * (rank + 1)), 8 * parts

    def of_student(ids):
        part = {"student_ids": ids[:, own], "student_positions": positions[:, own]}
        return job.student(part, None).logits[:, max(0, half - own.start) :]

    logits = {f"--student {job.cfg.student}": of_student}
    for lesson in job.lessons:
        for teacher, member in zip(lesson.teachers, lesson.members):
            logits[f"--teacher {member.teacher}"] = lambda ids, teacher=teacher: teacher.logits(
                torch.stack([ids, positions]))[:, half:].clone()
    job.engine.eval()
    apart = {}
    for role, run in logits.items():  # all of them on all ranks: they take collectives
        one, other = [run(ids).float() for ids in rows]
        if job.link:
            job.link.give_back()
        apart[role] = (one - other).norm() <= 1e-3 * one.norm()
    job.engine.train()
    _all_good(apart, "what it says of a text depends on the text before it in the same row; use --pack=false")


@torch.no_grad()
def check_parts(job):
    """A ValueError where the student does not say of a text in two parts what it says of it in one.

    As models do that look at neighbors in another way than by attention.  All ranks take part.
    """
    group, rank, size = job.sequence
    text = torch.arange(8, device=job.device) % job.vocab
    ids = torch.zeros(2, 16 * size, dtype=torch.long, device=job.device)
    positions = torch.arange(16 * size, device=job.device).repeat(2, 1)
    ids[0, :8], ids[1, 12:20] = text, text  # the second one goes on where the part of the next rank begins
    positions[1, 12:] -= 12
    own = slice(16 * rank, 16 * (rank + 1))
    job.engine.eval()
    logits = job.student({"student_ids": ids[:, own], "student_positions": positions[:, own]}, None).logits
    job.engine.train()
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits.contiguous(), group=group)
    one, two = parts[0][0, :8].float(), torch.cat(parts[:2], 1)[1, 12:20].float()
    worst = 1e-3 if logits.dtype == torch.float32 else 0.05  # the two are computed in other blocks
    if not (one - two).norm() <= worst * one.norm():
        raise ValueError(f"--student {job.cfg.student}: what it says of a text depends on where its parts "
                         "are cut, so its layers do more than attend; use --sequence_parallel 1")
