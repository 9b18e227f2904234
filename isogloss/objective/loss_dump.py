"""Write what the distillation loss of each micro-batch is made of, to compare two systems.

`--dump_losses DIR` writes one .safetensors a micro-batch and rank: the ids that both models read,
their chunks, and the loss of each chunk; docs/evaluate.md.  It waits for the device.

Tests: tests/test_loss_dump.py.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save

from isogloss.errors import CannotSave
from isogloss.job.files import scratch_of
from isogloss.losses import find_chunks
from isogloss.projection_tools.tokenizers import reason_of


class LossDump:
    """Write the files of a rank.

    Args:
        folder: where to.
        names: of the teachers.
    """

    def __init__(self, folder, names):
        self.folder = Path(folder)
        self.suffixes = [f"/{name}" if len(names) > 1 else "" for name in names]
        self.step = 0
        self.num_batches = 0

    def write(self, step, batch, parts):
        """Write a micro-batch.

        Args:
            step: that it belongs to.
            batch: Batch.
            parts: `objective.Part` of each teacher, with its `position_losses`.
        Raises:
            CannotSave: the disk refuses it.
        """
        if step != self.step:
            self.step, self.num_batches = step, 0
        name = f"step_{step:07d}_rank_{dist.get_rank():03d}_batch_{self.num_batches:02d}"
        self.num_batches += 1
        tensors = {"student_ids": batch.student.ids}
        for suffix, teacher, part in zip(self.suffixes, batch.teachers, parts):
            for key, value in of_teacher(teacher, *kept_positions(part)).items():
                tensors[key + suffix] = value
        path = self.folder / f"{name}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch_of(path).write_bytes(save(  # save_file would let the owner alone read it
                {key: value.to("cpu", copy=True).contiguous() for key, value in tensors.items()}))
            os.replace(scratch_of(path), path)
        except OSError as error:
            raise CannotSave(f"--dump_losses: {path} cannot be written ({reason_of(error)})"
                             ) from None


def keeping_positions(loss_fn, position_losses):
    """Return a loss function that adds to a list what each sub-tile has of each position.

    Args:
        loss_fn, position_losses: see `objective.Part`.
    """
    def loss_by_position(student, teacher, sub_tile, *observers):
        weight = sub_tile.weight
        weight = student.new_ones(len(student)).float() if weight is None else weight.detach()
        weight.requires_grad_()
        with torch.enable_grad():
            kd = loss_fn(student, teacher, sub_tile._replace(weight=weight), *observers)
            # a sum of weighted terms is linear in their weights
            [value] = torch.autograd.grad(kd, weight, retain_graph=True)
        position_losses.append((value * weight).detach())
        return kd

    return loss_by_position


def kept_positions(part):
    """Return (student positions (N,), their distillation loss (N,)) of `position_losses`."""
    nothing = part.student_hidden.new_zeros(0)
    positions = [tile.student_positions for tile in part.tiles]
    return (torch.cat([nothing.long(), *positions]),
            torch.cat([nothing.float(), *part.position_losses]))


def of_teacher(batch, position_N, loss_N):
    """Return the tensors of a TeacherBatch, without its name; see docs/evaluate.md."""
    student_chunk = batch.student_chunk
    loss_R = loss_N.new_zeros(student_chunk.numel()).index_put((position_N,), loss_N)
    chunks = find_chunks(student_chunk, batch.teacher_chunk)
    loss_C = loss_N.new_zeros(len(chunks.first_S)).index_add(
        0, chunks.of_S, loss_R[chunks.row_S])
    row_C = chunks.first_S // student_chunk.shape[1]
    return {"teacher_ids": batch.ids, "student_chunk": student_chunk,
            "teacher_chunk": batch.teacher_chunk, "loss": loss_C,
            "chunk": torch.stack([row_C, student_chunk.flatten()[chunks.first_S]], 1)}
