"""Say that a CPU has no instructions for a model's 16 bits.

Tests: tests/test_evaluate.py.
"""

import torch

from isogloss.flags.parse import is_first_rank
from isogloss.job.watch import print_line

# a 512 x 576 by 576 x 1536 product takes 4 to 10 times the seconds of float32 without them
INSTRUCTIONS = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}


def tell(role, name, dtype, remedy):
    """Print a line, on the first rank, if float32 would be several times as fast as a dtype.

    Args:
        role, name: of a model that computes in it.
        remedy: what sets float32.
    """
    its = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch that is allowed
    needed = INSTRUCTIONS.get(dtype, "")
    if its.get("architecture") == "x86_64" and not its.get(needed, True) and is_first_rank():
        print_line(f"{role} {name} computes in {str(dtype).removeprefix('torch.')}, for which this "
                   f"CPU has no instructions; float32 is up to ten times as fast: {remedy}")
