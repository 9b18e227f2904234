"""Keep the weights of a teacher in the memory of the host but for its forward passes.

Tests: tests/test_teacher.py.
"""

import contextlib

import torch


class Offload:
    """Keep a model's weights in the host's memory, on the device only while they are used."""

    def __init__(self, tensors, device):
        self.device = device
        self.users = 0
        pinned = torch.cuda.is_available()  # only from pinned memory a copy overlaps with computing
        self.host_copies = []
        for tensor in tensors:
            copy = tensor.detach().to("cpu", copy=True)
            self.host_copies.append((tensor, copy.pin_memory() if pinned else copy))
        self._leave_device()

    def _leave_device(self):
        for tensor, host_copy in self.host_copies:
            tensor.data = host_copy

    @contextlib.contextmanager
    def on_device(self):
        """Bring the weights to the device; nested uses cost one transfer."""
        if self.users == 0:
            for tensor, host_copy in self.host_copies:
                tensor.data = host_copy.to(self.device, non_blocking=True, copy=True)
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            if self.users == 0:
                self._leave_device()


def offload(teacher, tensors):
    """Return a ModelTeacher whose tensors, its weights, are in the host's memory."""
    # the head stays on the device: losses read it outside of the teacher's forward pass
    bias = teacher.head.bias_V
    teacher.head = teacher.head._replace(
        weight_VH=teacher.head.weight_VH.detach(),
        bias_V=None if bias is None else bias.detach())
    teacher.offload = Offload(tensors, teacher.spec.device)
    return teacher
