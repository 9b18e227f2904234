"""What does a rank need for a long sequence, held by 1, 2 or 4 ranks?

    python benchmarks/sequence.py [--tokens 8192] [--layers 8] [--hidden 512] [--ranks 1,2,4]

A random Llama with 32,000 tokens and its tiled cross-entropy, forward and backward, one text.  MiB of the
largest rank above what it held with the model and its gradients; seconds of the slowest.  CPU ranks.
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
VOCAB = 32_000


def measure(tokens, layers, hidden, checkpointing, mlp_tiles):
    """On every rank; rank 0 prints a line of JSON."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    import distill
    from isogloss.sequence import ATTENTION, join_sequence_group, register_attention, tile_mlps
    from tiles import head_of, plan_tiles, tiled_loss

    distill.start_distributed()
    distill.silence_libraries()
    torch.set_num_threads(max(1, os.cpu_count() // dist.get_world_size()))
    size, rank = dist.get_world_size(), dist.get_rank()
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=tokens, use_cache=False)
    how = {}
    if size > 1:
        register_attention(config, join_sequence_group(size))
        how = {"attn_implementation": ATTENTION}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **how).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mlp_tiles > 1:
        tile_mlps(model, mlp_tiles)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    part = tokens // size
    own = slice(rank * part, (rank + 1) * part)
    ids = torch.randint(VOCAB, (1, tokens))[:, own]
    positions = torch.arange(tokens)[None, own]
    none = torch.full((1, 0), -1)
    tiles = plan_tiles(ids, torch.full_like(ids, -1), none, none, (VOCAB, 0), 64)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    states = model.base_model(input_ids=ids, position_ids=positions)[0]
    loss, _ = tiled_loss(states.flatten(0, 1), head_of(model, VOCAB), None,
                         lambda x, y, part: F.cross_entropy(x, part.labels, reduction="sum")[None], tiles,
                         [1 / tokens])
    loss.backward()
    seconds = time.perf_counter() - begin
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found = torch.tensor([used, seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(json.dumps({"ranks": size, "checkpointing": checkpointing, "mlp_tiles": mlp_tiles,
                          "MiB": round(float(found[0])), "seconds": round(float(found[1]), 1),
                          "loss": round(float(loss), 5)}), flush=True)


def main(tokens=8192, layers=8, hidden=512, ranks=(1, 2, 4), here=False, checkpointing=False, mlp_tiles=1):
    if here:
        return measure(tokens, layers, hidden, checkpointing, mlp_tiles)
    torchrun = Path(sys.executable).with_name("torchrun")
    for checkpointing, mlp_tiles in ((False, 1), (True, 1), (True, 8)):
        for size in ranks if isinstance(ranks, (tuple, list)) else [ranks]:
            flags = [f"--tokens={tokens}", f"--layers={layers}", f"--hidden={hidden}", "--here",
                     f"--checkpointing={checkpointing}", f"--mlp_tiles={mlp_tiles}"]
            # else the peak is that of glibc, which keeps what was freed
            env = os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}"}
            subprocess.run([torchrun, f"--nproc_per_node={size}", "--master_port=29517", __file__, *flags],
                           check=True, stderr=subprocess.DEVNULL, env=env)


if __name__ == "__main__":
    fire.Fire(main)
