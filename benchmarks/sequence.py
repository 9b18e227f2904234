"""What does a rank need for a long sequence, held by 1, 2 or 4 ranks?

    python benchmarks/sequence.py [--tokens 8192] [--layers 8] [--hidden 512] [--ranks 1,2,4]

A random Llama with 32,000 tokens and its tiled cross-entropy, forward and backward, one text.
Prints MiB of the largest rank above what it held with the model and its gradients, and seconds of
the slowest.  CPU ranks.
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
    """Run on every rank; rank 0 prints a line of JSON."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    from isogloss.activations import tile_mlps
    from isogloss.launch import silence_libraries, start_distributed
    from isogloss.sequence import ATTENTION, join_sequence_group, register_attention
    from tiles import head_of, plan_tiles, tiled_loss

    start_distributed()
    silence_libraries()
    size = dist.get_world_size()
    rank = dist.get_rank()
    torch.set_num_threads(max(1, os.cpu_count() // size))
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=tokens, use_cache=False)
    options = {}
    if size > 1:
        register_attention(config, join_sequence_group(size))
        options = {"attn_implementation": ATTENTION}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mlp_tiles > 1:
        tile_mlps(model, mlp_tiles)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    shard_length = tokens // size
    shard = slice(rank * shard_length, (rank + 1) * shard_length)
    ids = torch.randint(VOCAB, (1, tokens))[:, shard]
    positions = torch.arange(tokens)[None, shard]
    nothing = torch.full((1, 0), -1)
    no_chunk = torch.full_like(ids, -1)
    tiles = plan_tiles(ids, no_chunk, nothing, nothing, (VOCAB, 0), 64)

    def cross_entropy(student_logits, teacher_logits, sub_tile):
        return F.cross_entropy(student_logits, sub_tile.student_labels, reduction="sum")[None]

    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    states = model.base_model(input_ids=ids, position_ids=positions)[0]
    head = head_of(model, VOCAB)
    loss, _ = tiled_loss(states.flatten(0, 1), head, None, cross_entropy, tiles, [1 / tokens])
    loss.backward()
    seconds = time.perf_counter() - begin
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    worst = torch.tensor([used, seconds])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(loss.detach())
    if rank == 0:
        line = {"ranks": size, "checkpointing": checkpointing, "mlp_tiles": mlp_tiles,
                "MiB": round(float(worst[0])), "seconds": round(float(worst[1]), 1),
                "loss": round(float(loss), 5)}
        print(json.dumps(line), flush=True)


def main(tokens=8192, layers=8, hidden=512, ranks=(1, 2, 4), on_this_rank=False,
         checkpointing=False, mlp_tiles=1):
    if on_this_rank:
        return measure(tokens, layers, hidden, checkpointing, mlp_tiles)
    torchrun = Path(sys.executable).with_name("torchrun")
    # else the peak is that of glibc, which keeps what was freed
    env = os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}"}
    for checkpointing, mlp_tiles in ((False, 1), (True, 1), (True, 8)):
        for size in ranks if isinstance(ranks, (tuple, list)) else [ranks]:
            flags = [f"--tokens={tokens}", f"--layers={layers}", f"--hidden={hidden}",
                     "--on_this_rank", f"--checkpointing={checkpointing}",
                     f"--mlp_tiles={mlp_tiles}"]
            command = [torchrun, f"--nproc_per_node={size}", "--master_port=29517", __file__]
            subprocess.run([*command, *flags], check=True, stderr=subprocess.DEVNULL, env=env)


if __name__ == "__main__":
    fire.Fire(main)
