"""Measure what it costs to let the student write, in CPU seconds of one process.

    python benchmarks/rollout.py ASSETS [--repeats 5] [--writing=false]

write           rollout.py against `generate` of transformers, 32 prompts, 100 tokens each
zero3           the same student partitioned by ZeRO-3: a whole copy that is refreshed, against its
                layers gathered for every token, and against `generate` with synced_gpus
refresh         of the copy, for a model of 8 million weights, against its rollouts
step            a step of rollouts alone, against writing plus a step on data of as many tokens

Each figure is the least of the repeats, taken in turn.  Figures of record are in docs/LOG.md.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from isogloss import build, distill
from isogloss.data.batch_types import Example
from isogloss.data.order import Draft
from isogloss.flags.parse import flag, tool
from isogloss.inputs import build_collator, check_inputs
from isogloss.job import launch
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.watch import end_together
from isogloss.rollout import Prompt, write
from isogloss.student.whole_student import WholeStudent, refresh

PROMPTS = ["Once upon a time", "Lily and Tom", "The dog was very happy because he", "One day"] * 8
NEW_TOKENS = 100


@dataclass(kw_only=True)
class Args:
    """Measure rollouts."""

    assets: str = flag(MISSING, "folder with models/ and text/tinystories_1000.json.")
    repeats: int = flag(5, "of every measurement.")
    writing: bool = flag(True, "false leaves out the first table.")


def least_seconds(functions, repeats):
    """Return for each function the least CPU seconds of its calls; the first one is not counted."""
    least = [float("inf")] * len(functions)
    for repeat in range(repeats + 1):
        for number, function in enumerate(functions):
            begin = time.process_time()
            function()
            if repeat:
                least[number] = min(least[number], time.process_time() - begin)
    return least


def prompts_of(tokenizer):
    ids = tokenizer(PROMPTS, add_special_tokens=False)["input_ids"]
    return [Prompt(row, (0, number, 0), NEW_TOKENS) for number, row in enumerate(ids)]


def generate(model, tokenizer, **options):
    """Let transformers write the same number of tokens, padded in front, without an end."""
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, add_special_tokens=False,
                      return_token_type_ids=False)
    with torch.no_grad():
        model.generate(**batch, do_sample=True, top_k=0, min_new_tokens=NEW_TOKENS,
                       max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **options)


def measure_writing(args):
    for name in ("stories260K", "bitstories_1M", "tinytalk_neo_3M"):
        path = Path(args.assets) / "models" / name
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        starts = prompts_of(tokenizer)
        vocab = len(tokenizer)
        ours, theirs = least_seconds(
            [partial(write, model, starts, [], vocab), partial(generate, model, tokenizer)],
            args.repeats)
        print(f"write, {name}: {ours:.3f} s, generate {theirs:.3f} s, ratio {ours / theirs:.2f}",
              flush=True)


def state_of(args, folder, student, stage, **flags):
    """Return (TrainState, RunInputs) of a job on one rank."""
    config = Path(folder) / "ds.json"
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 32, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage}}))
    cfg = distill.Config(
        student=str(student), teacher=str(Path(args.assets) / "models" / "tinytalk_neo_3M"),
        data=str(Path(args.assets) / "text" / "tinystories_1000.json"), ds_config=str(config),
        max_length=160, on_policy=1.0, rollout_tokens=NEW_TOKENS, prompt_tokens=16, num_workers=0,
        ce_weight=0.0, loss="reverse_kl", rollout_log=0, output_dir=str(Path(folder) / "run"),
        **flags)
    device = start_distributed()
    inputs = check_inputs(cfg, device)
    state = build.build_state(cfg, inputs, device)
    state.whole_student = WholeStudent(state.engine, None, device, cfg.rollout_replica)
    state.writer = build.build_writer(state, inputs)
    return state, inputs


def write_with(state, starts):
    with state.whole_student.model() as (model, agree):
        write(model, starts, [], state.vocab, agree=agree)


def measure_zero3(args, folder):
    student = Path(args.assets) / "models" / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(student)
    starts = prompts_of(tokenizer)
    state, _ = state_of(args, folder, student, 3)
    replica = state.whole_student.replica
    model = state.engine.module.model

    def by_hooks():
        state.whole_student.replica = None
        write_with(state, starts)
        state.whole_student.replica = replica

    seconds = least_seconds(
        [lambda: write_with(state, starts), by_hooks,
         lambda: generate(model.eval(), tokenizer, synced_gpus=True)], max(2, args.repeats // 2))
    copy, gathered, theirs = seconds
    print(f"zero3, stories260K: copy {copy:.3f} s, gathered for every token {gathered:.3f} s, "
          f"generate {theirs:.3f} s, ratio {copy / theirs:.2f}", flush=True)
    state.engine.destroy()


def measure_refresh(args, folder):
    tokenizer = AutoTokenizer.from_pretrained(Path(args.assets) / "models" / "stories260K")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=288, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=6, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
    student = Path(folder) / "eight"
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(student)
    tokenizer.save_pretrained(student)
    state, _ = state_of(args, folder, student, 3)
    starts = prompts_of(tokenizer)
    copies = dict(state.whole_student.replica.named_parameters())
    both, alone = least_seconds(
        [lambda: write_with(state, starts),
         lambda: refresh(copies, state.engine.module.model)], args.repeats)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"refresh, {size:.1f} million weights: {alone:.3f} s of {both:.3f} s, "
          f"{alone / both:.1%}", flush=True)
    state.engine.destroy()


def measure_step(args, folder):
    """Compare a step of rollouts with its parts; the tokens of both steps are as many."""
    state, inputs = state_of(args, folder, Path(args.assets) / "models" / "stories260K", 0)
    collator = build_collator(state.cfg, inputs, state.device)
    rows = [state.writer.reader(row) for row in inputs.data.train_data.select(range(32))]
    prompts = [state.writer.prompter.prompt(row, (number, 0)) for number, row in enumerate(rows)]
    drafts = [Draft([row._replace(content=prompt) for row, prompt in zip(rows, prompts)],
                    list(range(32)))]
    # data of as many tokens as were written, and as many as prompts and rollouts have together
    batches_of_texts = []
    for size in (NEW_TOKENS, NEW_TOKENS + state.cfg.prompt_tokens):
        longer = replace(state.writer.prompter, prompt_tokens=size)
        batches_of_texts.append([longer.prompt(row, (0, 0)).text for row in rows])
    writer = state.writer

    def on_policy():
        distill.train_step(state, writer.complete(drafts, 2))

    def measured():
        distill.train_step(state, writer.complete(drafts, 1))

    def writing():
        writer.rollouts(prompts, 2)

    def off_policy(texts):
        state.writer = None
        distill.train_step(state, [collator([Example(text) for text in texts])])
        state.writer = writer

    trainings = [partial(off_policy, texts) for texts in batches_of_texts]
    seconds = least_seconds([on_policy, measured, writing, *trainings], args.repeats)
    of_four, of_fifth, written, *trained = seconds
    mean = (4 * of_four + of_fifth) / 5  # one step in five also asks for the reverse KL
    print(f"step: rollouts {of_four:.3f} s, with the reverse KL {of_fifth:.3f} s, mean {mean:.3f} "
          f"s; writing {written:.3f} s")
    for texts, seconds_of_data in zip(batches_of_texts, trained):
        parts = written + seconds_of_data
        tokens = int(collator(texts).counts.tokens)
        print(f"step: data of {tokens} tokens {seconds_of_data:.3f} s, ratio {mean / parts:.3f}, "
              f"with the reverse KL in every step {of_fifth / parts:.3f}")
    state.engine.destroy()


def main(args):
    torch.set_num_threads(1)
    silence_libraries()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.writing:
        measure_writing(args)
    launch.join_store()
    with tempfile.TemporaryDirectory() as folder:
        start_distributed()
        with end_together():
            measure_step(args, folder)
            measure_zero3(args, folder)
            measure_refresh(args, folder)


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
