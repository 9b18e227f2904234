"""Compare what isogloss.plan expects of a rank's memory with what a job allocates.

    python benchmarks/memory.py ASSETS [--hidden 512] [--layers 8] [--length 256]

The student is a random Llama with stories260K's tokenizer, the teacher one with that of
tinytalk_neo_3M; two CPU ranks take two steps of two micro-batches in every layout of `LAYOUTS`.
"state" is the bytes of all tensors that live before a step, "peak" the most that torch's allocator
holds within the second step, which is what torch.cuda.max_memory_allocated() says on a GPU.  What
numpy and numba hold is not counted.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import fire

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SIZE = 4  # samples of a micro-batch

# name: (ZeRO stage, bf16, further flags)
LAYOUTS = {
    **{f"zero {stage}": (stage, False, {}) for stage in range(4)},
    **{f"zero {stage}, bf16": (stage, True, {}) for stage in range(4)},
    "zero 2, bf16, checkpointing": (2, True, {"activation_checkpointing": True}),
    "zero 3, bf16, sequence 2": (3, True, {"sequence_parallel": 2}),
    "zero 2, bf16, adapter": (2, True, {"lora_r": 16}),
    "zero 3, bf16, adapter": (3, True, {"lora_r": 16}),
    "zero 2, bf16, teacher over 2": (2, True, {"teacher_tp": 2}),
}


def live_bytes():
    """Return the bytes of the storages of all tensors that live."""
    import torch

    storages = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(flags):
    """Run a job of two steps on this rank.

    Args:
        flags: of Config.
    Returns:
        {"state": bytes, "peak": bytes}.
    """
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu_job import start_run
    from isogloss import distill
    from isogloss.inputs import load_batches

    gc.collect()
    foreign = live_bytes()  # of jobs before
    cfg, device, inputs, state = start_run(flags)
    batches, _ = load_batches(cfg, inputs, state.engine, device, 0)
    num = state.engine.gradient_accumulation_steps()
    steps = [[next(batches) for _ in range(num)] for _ in range(2)]
    distill.train_step(state, steps.pop(0))
    gc.collect()
    before = live_bytes() - foreign
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        distill.train_step(state, steps.pop(0))
    now = 0
    peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return {"state": before, "peak": before + peak}


def prepare(assets, folder, hidden, layers):
    """Write student, teacher and corpus; return their flags."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    for name, source, vocab in (("student", "stories260K", 4096),
                                ("teacher", "tinytalk_neo_3M", 14080)):
        tokenizer = AutoTokenizer.from_pretrained(assets / "models" / source)
        config = AutoConfig.for_model(
            "llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
            max_position_embeddings=4096, tie_word_embeddings=True, dtype="bfloat16")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    stories = json.loads((assets / "text/tinystories_1000.json").read_text())
    texts = [story if isinstance(story, str) else story["text"] for story in stories]
    with open(folder / "corpus.jsonl", "w") as file:
        for first in range(0, 996, 3):  # longer than any sample
            file.write(json.dumps({"text": "\n".join(texts[first : first + 3])}) + "\n")
    return {"student": str(folder / "student"), "teacher": str(folder / "teacher"),
            "data": str(folder / "corpus.jsonl")}


def flags_of(name, base, folder, length):
    """Return the flags of a layout, whose ds_config is written."""
    stage, bf16, more = LAYOUTS[name]
    micro_batch_size = SIZE * more.get("sequence_parallel", 1)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": micro_batch_size, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 20,
                              "allgather_bucket_size": 1 << 20,
                              "stage3_prefetch_bucket_size": 1 << 20,
                              "stage3_param_persistence_threshold": 10 * 1024},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}))
    return base | more | {
        "ds_config": str(path), "max_length": length, "teacher_max_length": length,
        "num_workers": 0, "output_dir": str(folder / "run"), "loss_memory_mib": 16}


def main(assets, hidden=512, layers=8, length=256, only=""):
    """Print a table."""
    # of the ranks, which read them when they start
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    from benchmarks.gpu_job import on_ranks
    from isogloss.config import Config
    from isogloss.plan import plan
    from isogloss.tasks import markdown_table

    rows = [["layout", "state, MiB", "expected", "error", "peak, MiB", "expected", "error"]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = prepare(Path(assets), folder, hidden, layers)
        for name in (name for name in LAYOUTS if only in name):
            flags = flags_of(name, base, folder, length)
            measured = on_ranks(2, measure, flags)[0]
            expected = plan(Config(**flags), num_ranks=2, on_gpu=False)
            rows.append([name])
            for kind in ("state", "peak"):
                value = getattr(expected, kind)
                rows[-1] += [f"{measured[kind] / 2**20:.0f}", f"{value / 2**20:.0f}",
                             f"{value / measured[kind] - 1:+.1%}"]
    print(markdown_table(rows))


if __name__ == "__main__":
    fire.Fire(main)
