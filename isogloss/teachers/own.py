"""Let a teacher follow the student: its weights as they are, or their mean over the steps.

A model of its own beside the student, so it goes with every ZeRO stage, with shards of sequences
and with other teachers.  One that is the student as it is shares the memory of its weights, if
these are whole (not ZeRO-3) and of one dtype.

The student learns something of such a teacher where that reads more than it does, as with
--teacher_prompt_key (self-distillation with privileged context: arXiv:2601.18734, 2601.19897).

Tests: tests/test_own_teacher.py.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from isogloss.teachers.engines.whole import ModelTeacher
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import refuse


@dataclass
class OwnSpec(ModelSpec):
    """Describe a teacher that begins as the student and follows it.

    Attributes:
        ema: weight of what it was in what it becomes with a step, 0 or more, below 1.
    """

    ema: float = 0.0

    @classmethod
    def check(cls, cfg):
        super().check(cfg)
        where = f"--teacher_ema {cfg.teacher_ema}"
        if cfg.teacher != cfg.student:
            raise ValueError(f"{where}: follows the student, and --teacher is {cfg.teacher}; use "
                             "--teacher self")
        refuse(cfg, where, {
            "lora_r": "whose weights are no copy of the model's",
            "pipeline_parallel": "of which no rank holds the whole student",
            "teacher_tp": "which cuts what is copied",
            "teacher_engine": "and a whole copy on every rank is auto",
            "teacher_ranks": "which hold no student",
            "teacher_offload": "whose copy in the host's memory would stay as it is"})

    @classmethod
    def of(cls, cfg, encoder, device, student=None):
        spec = super().of(cfg, encoder, device, student)
        spec.ema = cfg.teacher_ema
        return spec

    def load(self):
        return OwnTeacher(**vars(super().load()), ema=self.ema)


@dataclass
class OwnTeacher(ModelTeacher):
    """Give the logits of a copy of the student.

    Attributes:
        means: {name: float32 mean}, which the weights are rounded from; empty with ema 0.
    """

    ema: float = 0.0
    means: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.ema:
            for name, weight in self.weights().items():
                self.means[name] = weight if weight.dtype == torch.float32 else weight.float()

    @torch.no_grad()
    def follow(self, student):
        weights = self.weights()
        for name, weight in student.whole_weights():
            own = weights[name]
            if self.ema:
                mean = self.means[name]
                mean.lerp_(weight.to(mean.dtype), 1 - self.ema)
                own.copy_(mean)
            elif own.dtype == weight.dtype and not hasattr(weight, "ds_id"):
                own.data = weight.data  # which the engine writes over in every step
            else:
                own.copy_(weight)

    def save(self, path):
        if self.ema and dist.get_rank() == 0:
            means = {name: mean.cpu().contiguous() for name, mean in self.means.items()}
            path.write_bytes(save(means))  # save_file has an error and file mode of its own

    @torch.no_grad()
    def restore(self, path, student):
        if not self.ema:
            self.follow(student)
        if path is None or not self.ema:
            return
        means = load_file(path)
        for name, weight in self.weights().items():
            self.means[name].copy_(means[name])
            weight.copy_(self.means[name])
