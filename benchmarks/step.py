"""Compare a whole training step on a CPU with its parts.

    OMP_NUM_THREADS=1 python benchmarks/step.py ASSETS [--tokens 256] [--layers 8] [--hidden 512]
        [--micro_batches 1] [--warm_up 3] [--repeats 4] [--profile]

ASSETS: a folder with tokenizers/llama3 and text/wikitext2_valid_tokens.txt.  The student is a
random, untied Llama with 128,256 tokens; a step has the cross-entropy by tiles, ZeRO 2 on one rank
in float32 as ds_configs/zero2.json has it, and a gradient that is clipped.  Its parts are forward
and backward passes of the same model without an engine, and PyTorch's fused AdamW, which are run in
turn with it.  Seconds are processor time, medians; `over_parts` is the median of step over parts of
a turn.  Until memory is as large as it will be, which takes two or three turns, the kernel adds
seconds.
With several micro-batches `step_micro_batch` is a step in which each hands over a gradient of the
head (`--head_gradient micro_batch`), and `over_micro_batch` compares `step` with it.
`--profile` prints what the step spends its time on.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import json
import statistics
import tempfile
import time
from dataclasses import MISSING, dataclass

from isogloss.flags.parse import flag, tool


@dataclass(kw_only=True)
class Args:
    """Compare a training step with its parts."""

    assets: str = flag(MISSING, "folder with tokenizers/ and text/.")
    tokens: int = flag(256, "of a step.")
    layers: int = flag(8, "of the student.")
    hidden: int = flag(512, "of the student.")
    micro_batches: int = flag(1, "of a step, all with the same text.")
    warm_up: int = flag(3, "turns that do not count.")
    repeats: int = flag(4, "turns that count.")
    profile: bool = flag(False, "print a profile of one step.")


def write_inputs(folder, args):
    """Write student, data and ds_config; return the flags of a run."""
    from transformers import AutoConfig, AutoTokenizer

    assets = Path(args.assets)
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / "llama3")
    tokenizer.save_pretrained(folder / "student")
    AutoConfig.for_model(
        "llama", vocab_size=128_256, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=8192, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"]).save_pretrained(folder / "student")
    text = (assets / "text" / "wikitext2_valid_tokens.txt").read_text()
    (folder / "data.jsonl").write_text(json.dumps({"text": text[: 8 * args.tokens]}) + "\n")
    (folder / "ds.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}}))
    return dict(student=str(folder / "student"), from_scratch=True, kd_weight=0.0,
                data=str(folder / "data.jsonl"), ds_config=str(folder / "ds.json"),
                max_length=args.tokens, output_dir=str(folder / "run"))


class Parts:
    """Run what a step consists of without an engine: a second model, and PyTorch's AdamW."""

    def __init__(self, cfg, state):
        import torch

        from isogloss.student.engine import StudentWithLoss, load_student, optimizer_groups

        self.module = StudentWithLoss(load_student(cfg, {}), state.vocab)
        self.optimizer = torch.optim.AdamW(optimizer_groups(self.module), lr=1e-5, fused=True)

    def run(self, batch, all_terms):
        for terms in all_terms:
            loss, _ = self.module(batch.student, terms)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds_of(run):
    """Return the processor seconds of run()."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main(args):
    import torch

    from isogloss import build, distill
    from isogloss.inputs import build_collator, check_inputs
    from isogloss.job.launch import silence_libraries, start_distributed

    device = start_distributed()
    silence_libraries()
    with tempfile.TemporaryDirectory() as name:
        cfg = distill.Config(**write_inputs(Path(name), args))
        inputs = check_inputs(cfg, device)
        state = build.build_state(cfg, inputs, device)
        parts = Parts(cfg, state)
    batch = build_collator(cfg, inputs, device)([inputs.data.train_data[0]["text"]])
    weights = distill.TermWeights(1 / batch.counts.ce_tokens, [])
    batches = [batch] * args.micro_batches
    kinds = ["window", "micro_batch"] if args.micro_batches > 1 else ["window"]
    turns = []
    for turn in range(args.warm_up + args.repeats):
        of_step = []
        for state.cfg.head_gradient in kinds:
            of_step.append(seconds_of(lambda: distill.train_step(state, batches)))
        of_parts = seconds_of(lambda: parts.run(batch, [
            distill.loss_terms(state, batch, [], weights) for _ in batches]))
        if turn >= args.warm_up:
            turns.append((*of_step, of_parts))
    figures = {"tokens": int(batch.counts.tokens)}
    figures["parameters"] = sum(weight.numel() for weight in parts.module.parameters())
    figures["step"] = round(statistics.median(turn[0] for turn in turns), 3)
    figures["parts"] = round(statistics.median(turn[-1] for turn in turns), 3)
    figures["over_parts"] = round(statistics.median(turn[0] / turn[-1] for turn in turns), 3)
    if args.micro_batches > 1:
        figures["step_micro_batch"] = round(statistics.median(turn[1] for turn in turns), 3)
        over = statistics.median(turn[0] / turn[1] for turn in turns)
        figures["over_micro_batch"] = round(over, 3)
    print(json.dumps(figures), flush=True)
    if args.profile:
        with torch.profiler.profile() as profiler:
            distill.train_step(state, batches)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=16,
                                            max_name_column_width=60))


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
