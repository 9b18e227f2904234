"""Measure a pipeline beside one process: gradient, seconds of a step, memory of activations.

    python benchmarks/pipeline.py ASSETS [--stages 2] [--micro_batches 8] [--hidden 256]
        [--layers 8] [--steps 5] [--kd_weight 1]

The student is a random Llama with stories260K's tokenizer, the teacher tinytalk_neo_3M; a
micro-batch has 4 stories of 128 tokens, one thread computes on each rank.  Every step is of the
same samples with learning rate 0.  Seconds are the best of `steps`, of rank 0's wall clock and of
the processor time of the busiest rank; a stage's share of the work is in its own processor time.
Bytes of activations are those that autograd keeps at most, weights not counted, on the rank with
most.  CPU ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import fire

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
MICRO_BATCH = 4
MAX_LENGTH = 128


class Kept:
    """An object that autograd keeps in place of a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class KeptBytes:
    """Count the bytes of the storages that autograd keeps at a time, but for some tensors'."""

    def __init__(self, ignored):
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self.users = {}
        self.now = 0
        self.peak = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        kept = Kept(tensor)
        pointer = storage.data_ptr()
        if pointer not in self.ignored:
            if not self.users.get(pointer):
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
            self.users[pointer] = self.users.get(pointer, 0) + 1
            weakref.finalize(kept, self._free, pointer, storage.nbytes())
        return kept

    def _free(self, pointer, num_bytes):
        self.users[pointer] -= 1
        if not self.users[pointer]:
            self.now -= num_bytes

    def unpack(self, kept):
        return kept.tensor


def prepare(assets, folder, layers, hidden):
    """Write the student, the corpus and the ds_config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "models/stories260K")
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    stories = json.loads((assets / "text/tinystories_1000.json").read_text())
    texts = [story if isinstance(story, str) else story["text"] for story in stories]
    with open(folder / "corpus.jsonl", "w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")


def measure(assets, folder, stages, micro_batches, steps, kd_weight):
    """Take steps on every rank; rank 0 writes what came out, each rank its gradients."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    import distill
    from isogloss.inputs import build_collator, check_inputs
    from isogloss.launch import silence_libraries, start_distributed

    device = start_distributed()
    silence_libraries()
    torch.set_num_threads(1)
    optimizer = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}
    ds_config = folder / f"ds{dist.get_rank()}.json"
    ds_config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": MICRO_BATCH, "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0,
        "optimizer": optimizer}))
    cfg = distill.Config(
        student=str(folder / "student"), teacher=str(assets / "models/tinytalk_neo_3M"),
        data=str(folder / "corpus.jsonl"), ds_config=str(ds_config), max_length=MAX_LENGTH,
        teacher_max_length=MAX_LENGTH, pipeline_parallel=stages, kd_weight=float(kd_weight),
        output_dir=str(folder / "run"))
    inputs = check_inputs(cfg, device)
    state = distill.build_state(cfg, inputs, device)
    collator = build_collator(cfg, inputs, device)
    texts = inputs.data.train_data["text"]
    batches = []
    for number in range(micro_batches):
        batches.append(collator(texts[MICRO_BATCH * number : MICRO_BATCH * (number + 1)]))

    model = state.engine.module.model
    gradients = {}
    take = state.engine.optimizer.step

    def step(*args, **options):
        for name, parameter in model.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).clone()
        return take(*args, **options)

    state.engine.optimizer.step = step
    kept = KeptBytes(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        distill.train_step(state, batches)
    state.engine.optimizer.step = take
    torch.save(gradients, folder / f"gradients_{stages}_{dist.get_rank()}.pt")
    seconds = []
    cpu_seconds = []
    metrics = []
    for _ in range(steps):
        begin = time.perf_counter()
        cpu_begin = time.process_time()
        metrics.append(distill.train_step(state, batches).metrics())
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
    worst = torch.tensor([kept.peak, min(cpu_seconds)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        best = seconds.index(min(seconds))
        result = {"seconds": min(seconds), "cpu_seconds": float(worst[1]),
                  "activation_bytes": int(worst[0]), "loss": metrics[best]["loss"]}
        for name in ("bubble", "slowest_stage", "fastest_stage"):
            result[name] = metrics[best].get(name)
        (folder / f"result_{stages}.json").write_text(json.dumps(result))


def compare(folder, stages, micro_batches):
    """Print the result of both runs and what they say of each other."""
    import torch

    results = []
    for count in (1, stages):
        results.append(json.loads((folder / f"result_{count}.json").read_text()))
        print(count, json.dumps(results[-1]), flush=True)
    whole = torch.load(folder / "gradients_1_0.pt", weights_only=True)
    staged = {}
    for rank in range(stages):
        staged |= torch.load(folder / f"gradients_{stages}_{rank}.pt", weights_only=True)
    assert staged.keys() == whole.keys()
    norm = torch.stack([gradient.norm() for gradient in whole.values()]).norm()
    error = torch.stack([(staged[name] - whole[name]).norm() for name in whole]).norm()
    one, pipeline = results
    print(json.dumps({
        "gradient": float(error / norm),
        "step": pipeline["seconds"] / (one["seconds"] / stages),
        "cpu_step": pipeline["cpu_seconds"] / (one["cpu_seconds"] / stages),
        "activations": pipeline["activation_bytes"] / one["activation_bytes"],
        "activations_of_bar": pipeline["activation_bytes"] / (
            one["activation_bytes"] * min(stages, micro_batches) / stages),
        "bubble": pipeline["bubble"],
        "bubble_of_schedule": (stages - 1) / (micro_batches + stages - 1)}), flush=True)


def main(assets, stages=2, micro_batches=8, layers=8, hidden=256, steps=5, kd_weight=1.0,
         folder=""):
    """Launch one process and a pipeline, one after the other; with --folder be a rank of one."""
    assets = Path(assets).resolve()
    if folder:
        return measure(assets, Path(folder), stages, micro_batches, steps, kd_weight)
    torchrun = Path(sys.executable).with_name("torchrun")
    with tempfile.TemporaryDirectory() as temporary:
        prepare(assets, Path(temporary), layers, hidden)
        for count in (1, stages):
            command = [
                torchrun, f"--nproc_per_node={count}", "--master_port=29523", __file__, assets,
                f"--stages={count}", f"--micro_batches={micro_batches}", f"--steps={steps}",
                f"--kd_weight={kd_weight}", f"--folder={temporary}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                           env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
        compare(Path(temporary), stages, micro_batches)


if __name__ == "__main__":
    fire.Fire(main)
