"""Compare the speed of a step with the peak of the GPUs that it runs on.

Tests: tests/test_cli.py.
"""

import torch
import torch.distributed as dist

# Dense bfloat16 operations per second, from the makers' data sheets.  The first name that the
# device's name contains counts, so that of a variant comes before that of its family.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def of_step(num_parameters, tokens, seconds):
    """Return the `utilization` of a step on the GPUs of all ranks."""
    ranks = dist.get_world_size()
    return utilization(torch.cuda.get_device_name(), num_parameters, tokens, seconds, ranks)


def utilization(device_name, num_parameters, tokens, seconds, num_ranks):
    """Compute the model FLOPs utilization (MFU) of the student's forward and backward.

    Six operations per parameter and token (arXiv:2204.02311); attention, teachers and recomputation
    are not counted.

    Args:
        num_parameters: of the student.
        tokens: of the student, over all ranks, in `seconds`.
    Returns:
        {"mfu": fraction of the devices' peak}; {} where the peak is not known.
    """
    for name, peak in PEAK_FLOPS.items():
        if name in device_name:
            return {"mfu": 6 * num_parameters * tokens / (seconds * num_ranks * peak)}
    return {}
