"""Compute what a loss or a step should take on a card, from bytes, operations and kernels.

    python -m benchmarks.step_model    # the step of the log: when it was measured, and now

Nothing here runs on a GPU or needs torch.  benchmarks/dry_gpu.py counts bytes and launches of
losses, benchmarks/dry_layer.py those of layers.  The step is that of docs/log/2026-11.md, "a GPU
that waits for launches": Llama-3.2-1B learns from twelve of Qwen3-4B's layers, 12,288 tokens in
three micro-batches, on one H200.  It took 0.751 s, of which the GPU was busy for 0.575 s.

A step takes as long as the slower of two: what the device does (products, traffic, and a little for
each kernel) and what the host does (some time for each kernel).
Tests: tests/test_step_model.py.
"""

import json
from dataclasses import dataclass, replace

import fire

# A bare launch by the host, in seconds: what CUDA itself takes.  Python and autograd take more.
LAUNCH = 5e-6
# Share of the peak that large bfloat16 products reach, of a dense Hopper card.  Vendors' libraries
# reach 0.6 to 0.8 of the peak of a data sheet, as the clock falls under load.
MATMULS = 0.70
# Share of the bandwidth that a mixture of pointwise kernels, sums over rows and selections reaches.
# Copies alone reach 0.9.  Not measured: chosen so that six ratios of an independent model follow.
TRAFFIC = 0.72
# Seconds of the host for a kernel of a step, Python, autograd and DeepSpeed included.  Fitted to
# one step of the log (0.751 s, 23,564 kernels); its four others are 1 to 5 % off.
HOST_KERNEL = 31.9e-6
# Seconds of the device for a kernel, beside its bytes: to begin and to run out.  Fitted to 0.575 s.
DEVICE_KERNEL = 4e-6


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
    least as long as the host needs for bare launches.  What each kernel adds on the device is left
    out, as in the independent model that this follows.

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


# --- a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Give the sizes of a model, as its config.json: `queries` and `keys` are heads x head size."""

    layers: int
    hidden: int
    mlp: int
    queries: int
    keys: int
    vocab: int

    @property
    def layer_weights(self):
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.mlp)

    @property
    def weights(self):
        return self.layers * self.layer_weights + self.vocab * self.hidden

    def attention(self, length):
        """Return operations a token of causal attention, forward: two products with half a text."""
        return 2 * length * self.queries * self.layers


STUDENT = Shape(16, 2048, 8192, 2048, 512, 128_256)  # meta-llama/Llama-3.2-1B, tied
TEACHER = Shape(12, 2560, 9728, 4096, 1024, 151_936)  # twelve of Qwen/Qwen3-4B's 36 layers
TOKENS, LENGTH, MICRO_BATCHES = 12_288, 2048, 3  # of the step of the log
# A layer's products and kernels of flash attention, forward and in both passes: by counting.
PRODUCTS, PRODUCTS_BOTH = 8, 25
# Bytes a weight of AdamW in float32 that no kernel fuses, of clipping and of accumulated gradients:
# 80, 20 and 30, by reading the operators of torch and DeepSpeed.  Estimated.
UPDATE_BYTES = 130
FUSED_UPDATE_BYTES = 78  # 28 of AdamW, which is one kernel on a GPU since f48d11d
UPDATE_KERNELS = 1300  # three for each of 146 weights in each micro-batch.  Estimated.
BACKWARD_ATTENTION = 2.5  # of flash attention, over its forward pass; it computes scores again


@dataclass(frozen=True)
class Work:
    """Say what was counted of a step.

    Attributes:
        loss_megabytes: MB a position beside its matmuls, cross-entropy included.
        loss_kernels, sub_tiles: in the whole step.
        student: (kernels, MB a token) of a layer beside products, both passes.
        teacher: the same of its forward pass.
        update_bytes: a weight.
    """

    loss_megabytes: float
    loss_kernels: int
    sub_tiles: int
    student: tuple
    teacher: tuple
    update_bytes: int = UPDATE_BYTES


# dry_layer.py, torch 2.11: both passes of Llama-3.2-1B, the forward pass of Qwen3-4B
EAGER, COMPILED = (95, 1.08), (11, 0.25)
EAGER_TEACHER, COMPILED_TEACHER = (53, 0.72), (6, 0.13)
# Bytes as counted at bb30f36; sub-tiles, and two thirds of 23,564 kernels, as the log says.
THEN = Work(34.7, 15_700, 30, EAGER, EAGER_TEACHER)
# dry_gpu.py --traffic: 307 launches in three sub-tiles of 4,096 positions at 8,192 MiB; seven at
# 4,096 MiB, and two at 16,384
WRITTEN_OUT = replace(THEN, loss_megabytes=7.0, loss_kernels=3 * 7 * 103, sub_tiles=3 * 7)
FUSED_ADAM = replace(WRITTEN_OUT, update_bytes=FUSED_UPDATE_BYTES)
LARGE_TILES = replace(FUSED_ADAM, loss_kernels=3 * 2 * 103, sub_tiles=3 * 2)
COMPILED_STUDENT = replace(LARGE_TILES, student=COMPILED)
COMPILED_BOTH = replace(COMPILED_STUDENT, teacher=COMPILED_TEACHER)
STEPS = {"when it was measured": THEN, "loss written out": WRITTEN_OUT,
         "and AdamW in a kernel": FUSED_ADAM, "and --loss_memory_mib 16384": LARGE_TILES,
         "and --compile": COMPILED_STUDENT, "and --teacher_compile": COMPILED_BOTH}


def operations(student=STUDENT, teacher=TEACHER, tokens=TOKENS, length=LENGTH):
    """Return the operations of a step's products and attention."""
    learned = 6 * student.weights + (1 + BACKWARD_ATTENTION) * student.attention(length)
    return tokens * (learned + 2 * teacher.weights + teacher.attention(length))


def traffic(work):
    """Return {what: bytes} that a step moves beside its products."""
    head = STUDENT.vocab * STUDENT.hidden
    return {"loss": work.loss_megabytes * 1e6 * TOKENS,
            # float32, read and written by a product that is too small to hide it
            "head's gradient": 8 * head * work.sub_tiles,
            "student's layers": work.student[1] * 1e6 * STUDENT.layers * TOKENS,
            "teacher's layers": work.teacher[1] * 1e6 * TEACHER.layers * TOKENS,
            "update": work.update_bytes * STUDENT.weights}


def kernels(work):
    """Return how many kernels a step launches."""
    layers = (work.student[0] + PRODUCTS_BOTH) * STUDENT.layers
    layers += (work.teacher[0] + PRODUCTS) * TEACHER.layers
    return work.loss_kernels + layers * MICRO_BATCHES + UPDATE_KERNELS


def expected(work, card="H200"):
    """Return the figures of a step: seconds of device and host, tokens a second, share of peak."""
    rates = CARDS[card]
    count = kernels(work)
    device = operations() / (MATMULS * rates.flops) + DEVICE_KERNEL * count
    device += sum(traffic(work).values()) / (TRAFFIC * rates.bandwidth)
    host = HOST_KERNEL * count
    seconds = max(device, host)
    return {"seconds": round(seconds, 3), "device": round(device, 3), "host": round(host, 3),
            "kernels": count, "tokens_per_second": round(TOKENS / seconds, -2),
            "share_of_peak": round(operations() / seconds / rates.flops, 3)}


def main():
    """Print a line of JSON for the step of the log, and for each piece that came since."""
    for name, work in STEPS.items():
        print(json.dumps({"step": name} | expected(work)))


if __name__ == "__main__":
    fire.Fire(main)
