"""Measure what a rank needs for a long sequence that 1, 2 or 4 ranks hold in shards.

    python benchmarks/sequence.py [--tokens 8192] [--layers 8] [--hidden 512] [--ranks 1,2,4]

The model is a random Llama with 32,000 tokens and its tiled cross-entropy, forward and backward, on
one text.  Reported are MiB of the largest rank, above what it held with the model and its
gradients, and seconds of the slowest.  CPU ranks.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import fire

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
VOCAB = 32_000  # as of Llama 2, so that the head's logits weigh as they do in practice
# Checkpointing and MLP pieces of the three kinds of runs, each on every number of ranks.
VARIANTS = (False, 1), (True, 1), (True, 8)


def build_model(tokens, layers, hidden, checkpointing, mlp_tiles, num_ranks):
    """Build the student; its gradients exist already, so that they do not count as activations."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from isogloss.activations import tile_mlps
    from isogloss.sequence import ATTENTION, join_sequence_group, register_attention

    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,  # divisible by all of 1, 2 and 4 ranks
        max_position_embeddings=tokens,
        use_cache=False,
    )
    options = {}  # on one rank the model's usual attention
    if num_ranks > 1:
        register_attention(config, join_sequence_group(num_ranks))
        options["attn_implementation"] = ATTENTION
    # The same weights on every rank; the text is drawn from the same generator afterwards.
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mlp_tiles > 1:
        tile_mlps(model, mlp_tiles)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def measure(tokens, layers, hidden, checkpointing, mlp_tiles):
    """Run one forward and backward on every rank; rank 0 prints a line of JSON."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from isogloss.launch import silence_libraries, start_distributed
    from tiles import head_of, plan_tiles, tiled_loss

    start_distributed()
    silence_libraries()
    num_ranks = dist.get_world_size()
    rank = dist.get_rank()
    torch.set_num_threads(max(1, os.cpu_count() // num_ranks))
    model = build_model(tokens, layers, hidden, checkpointing, mlp_tiles, num_ranks)

    # Every rank draws the whole text and keeps its own shard of it.
    shard_length = tokens // num_ranks
    shard = slice(rank * shard_length, (rank + 1) * shard_length)
    ids = torch.randint(VOCAB, (1, tokens))[:, shard]
    positions = torch.arange(tokens)[None, shard]
    # Cross-entropy alone: no chunks, and a teacher without positions.
    no_chunks = torch.full_like(ids, -1)
    no_teacher = torch.full((1, 0), -1)
    # 64 MiB of logits at a time.
    tiles = plan_tiles(ids, no_chunks, no_teacher, no_teacher, (VOCAB, 0), 64)

    def cross_entropy(student_logits, teacher_logits, tile):
        return F.cross_entropy(student_logits, tile.labels, reduction="sum")[None]

    gc.collect()
    # ru_maxrss is the peak since the process began, in KiB.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    states = model.base_model(input_ids=ids, position_ids=positions)[0]
    loss, _ = tiled_loss(
        states.flatten(0, 1), head_of(model, VOCAB), None, cross_entropy, tiles, [1 / tokens]
    )
    loss.backward()
    seconds = time.perf_counter() - begin
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    # The largest rank and the slowest one, which may differ.
    worst = torch.tensor([mib, seconds])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(loss.detach())
    if rank == 0:
        result = {
            "ranks": num_ranks,
            "checkpointing": checkpointing,
            "mlp_tiles": mlp_tiles,
            "MiB": round(float(worst[0])),
            "seconds": round(float(worst[1]), 1),
            "loss": round(float(loss), 5),
        }
        print(json.dumps(result), flush=True)


def main(
    tokens=8192,
    layers=8,
    hidden=512,
    ranks=(1, 2, 4),
    here=False,
    checkpointing=False,
    mlp_tiles=1,
):
    """Launch all runs, one after the other; with --here be a rank of one of them."""
    if here:
        return measure(tokens, layers, hidden, checkpointing, mlp_tiles)
    torchrun = Path(sys.executable).with_name("torchrun")
    # Else the peak is that of glibc, which keeps what was freed.
    environment = os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}"}
    for checkpointing, mlp_tiles in VARIANTS:
        for num_ranks in ranks if isinstance(ranks, (tuple, list)) else [ranks]:
            command = [
                torchrun,
                f"--nproc_per_node={num_ranks}",
                "--master_port=29517",
                __file__,
                f"--tokens={tokens}",
                f"--layers={layers}",
                f"--hidden={hidden}",
                "--here",
                f"--checkpointing={checkpointing}",
                f"--mlp_tiles={mlp_tiles}",
            ]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=environment)


if __name__ == "__main__":
    fire.Fire(main)
