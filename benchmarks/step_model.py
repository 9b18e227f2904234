"""Compute what a loss or a step should take on a card, from bytes, operations and launches.

Nothing here runs on a GPU or needs torch.  benchmarks/dry_gpu.py counts the bytes and launches.
Tests: tests/test_step_model.py.
"""

from dataclasses import dataclass

# A bare launch by the host, in seconds: what CUDA itself takes.  Python and autograd take more.
LAUNCH = 5e-6
# Share of the peak that large bfloat16 products reach, of a dense Hopper card.  Vendors' libraries
# reach 0.6 to 0.8 of the peak of a data sheet, as the clock falls under load.
MATMULS = 0.70
# Share of the bandwidth that a mixture of pointwise kernels, sums over rows and selections reaches.
# Copies alone reach 0.9.  Not measured: chosen so that six ratios of an independent model follow.
TRAFFIC = 0.72


@dataclass(frozen=True)
class Card:
    """Give the rates of a data sheet: bfloat16 FLOP/s without sparsity, bytes/s of the memory."""

    flops: float
    bandwidth: float


# NVIDIA's data sheets of the SXM cards
CARDS = {"H100": Card(989e12, 3.35e12), "H200": Card(989e12, 4.8e12)}


def loss_over_matmuls(megabytes, launches, hidden, student_vocab, teacher_vocab, positions=4096,
                      card="H100"):
    """Return the expected seconds of a loss over those of its matmuls.

    The matmuls are the student's three with its head (logits, and the gradients of hidden states
    and head) and the teacher's one.  The loss is these and, behind them, its traffic.  It takes at
    least as long as the host needs for bare launches.

    Args:
        megabytes: what the loss reads and writes beside the matmuls, MB (1e6 bytes) a position.
        launches: of all kernels, in `positions`.
        hidden: the size of the hidden states, of both models.
        student_vocab, teacher_vocab: columns of the heads.
        positions: that the loss is computed at.
        card: a key of CARDS.
    """
    rates = CARDS[card]
    operations = 2 * positions * hidden * (3 * student_vocab + teacher_vocab)
    matmuls = operations / (MATMULS * rates.flops)
    traffic = megabytes * 1e6 * positions / (TRAFFIC * rates.bandwidth)
    return max(matmuls + traffic, LAUNCH * launches) / matmuls
