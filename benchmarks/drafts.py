"""Compare losses by what they are worth to a draft: the share of its tokens that a target accepts.

    python benchmarks/drafts.py ASSETS TARGET [--steps 30] [--seeds 0] [--arms ...]
    python benchmarks/drafts.py ASSETS TARGET --speed STUDENT
    python benchmarks/drafts.py ASSETS ASSETS/models/tinytalk_neo_3M --draft stories260K \
        --steps 100 --seeds 0,1,2,3,4,5,6,7 --arms OWN      # half of the text or all is its own

ASSETS has models/tinytalk_neo_3M, which becomes a draft of TARGET, the directory of a model with
another tokenizer, and text/tinystories_1000.json.  An arm is LOSS:CE_WEIGHT:DATA; `text` is the
text alone.  DATA is `stories`, or `written`, what TARGET writes behind the first tokens of these.
With :SHARE behind it the draft writes that share of the samples, behind the same first tokens; such
an arm is compared with the one without, seed by seed.  Every student is judged by --eval_draft on
held-out rows of both:

acceptance  eval/draft_acceptance, expected share of drafted tokens that TARGET accepts
bits        bits per byte of the student

The second command lets TARGET write with the draft STUDENT in transformers and without, and counts
what is accepted.  Runs are kept in runs/drafts; complete ones are not repeated, and each is a line
of docs/log/drafts.jsonl.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import candidate_generator, utils as generation

from benchmarks.gpu_job import evaluate
from benchmarks.square_table import interval
from isogloss.distill import cli
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool

DRAFT = "tinytalk_neo_3M"
RUNS = ROOT / "runs" / "drafts"
RECORDS = ROOT / "docs" / "log" / "drafts.jsonl"
HELD_OUT = 64
PROMPT, LENGTH, SPOKEN = 12, 64, 100  # tokens of a row, and at most of one to judge
PROMPTS, FEW, WRITTEN, DRAFTED = 24, 6, 64, 5  # of what is written with a draft
BATCH = 16
ARMS = ("text:1:stories,total_variation:0:stories,piece_kl:0:stories,reverse_kl:0:stories,"
        "generalized_jsd:0:stories,text:1:written,total_variation:0:written")
OWN = ",".join(f"{loss}:0:stories{share}" for loss in ("total_variation", "piece_kl", "reverse_kl")
               for share in ("", ":0.5", ":1"))
COLUMNS = {
    "acceptance, stories": "stories/draft_acceptance",
    "acceptance, written": "written/draft_acceptance", "length, written": "written/draft_length",
    "bits, stories": "stories/student_bits_per_byte",
    "bits, written": "written/student_bits_per_byte"}
DS_CONFIG = {
    "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR",
                  "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 0}}


@dataclass(kw_only=True)
class Args:
    """Compare losses by the share of a draft's tokens that a target accepts."""

    assets: str = flag("", "folder with models/ and text/.")
    target: str = flag("", "directory of the target.")
    draft: str = flag(DRAFT, "folder below models/ of what becomes a draft.")
    arms: str = flag(ARMS, "LOSS:CE_WEIGHT:DATA[:SHARE], with commas; OWN: nine with own text.")
    steps: int = flag(30, "optimizer steps.", low=1)
    seeds: str = flag("0", "of the order of the rows, with commas.")
    learning_rate: float = flag(5e-4, "of AdamW, falling to 0.", low=1e-9)
    speed: str = flag("", "directory of a draft: tokens a second with it and without.")


def stories(args):
    return json.loads((Path(args.assets) / "text" / "tinystories_1000.json").read_text())


def prepare(args):
    """Write the rows of all four files, unless they are there."""
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "ds.json").write_text(json.dumps(DS_CONFIG))
    save_rows(RUNS / "all.jsonl", [{"text": text} for text in stories(args)])
    folder = folder_of(args)
    folder.mkdir(exist_ok=True)
    if not (folder / "target.jsonl").exists():
        subprocess.run(
            [sys.executable, "-m", "isogloss.write", f"--teacher={args.target}",
             f"--data={RUNS / 'all.jsonl'}", f"--output={folder / 'answers.jsonl'}",
             f"--prompt_tokens={PROMPT}", f"--rollout_tokens={LENGTH - PROMPT}"],
            cwd=ROOT, check=True)
        _, *rows = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
        save_rows(folder / "target.jsonl",
                  [{"text": row["prompt"] + row["completion"]} for row in rows])
    for name, file in (("stories", RUNS / "all.jsonl"), ("written", folder / "target.jsonl")):
        lines = file.read_text().splitlines(keepends=True)
        (folder / f"held_{name}.jsonl").write_text("".join(lines[:HELD_OUT]))
        (folder / f"{name}.jsonl").write_text("".join(lines[HELD_OUT:]))


def save_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def distill(output, *flags):
    """Run a job in this process; return the seconds of a processor that it took."""
    begin = time.process_time()
    cli([f"--output_dir={output}", f"--ds_config={RUNS / 'ds.json'}", f"--max_length={LENGTH}",
         "--num_workers=0", "--resume=never", "--teacher_dtype=bfloat16", *flags])
    return time.process_time() - begin


def trained(args, arm, seed):
    """Return the directory of an arm's student."""
    loss, ce_weight, data, *share = arm.split(":")
    output = folder_of(args) / f"{arm.replace(':', '_')}_{args.steps}_{args.learning_rate:g}_{seed}"
    if not (output / "student" / "config.json").exists():
        teach = [f"--teacher={args.target}", f"--loss={loss}"]
        if loss == "text":
            teach = ["--kd_weight=0"]
        if share:
            teach += [f"--on_policy={share[0]}", f"--prompt_tokens={PROMPT}",
                      f"--rollout_tokens={LENGTH - PROMPT}"]
        seconds = distill(
            output, f"--student={draft_of(args)}", *teach,
            f"--ce_weight={ce_weight}", f"--data={folder_of(args) / f'{data}.jsonl'}",
            f"--seed={seed}", f"--steps={args.steps}", f"--learning_rate={args.learning_rate}",
            f"--export={output / 'student'}")
        (output / "seconds.json").write_text(json.dumps(seconds))
    return output / "student"


def draft_of(args):
    return Path(args.assets) / "models" / args.draft


def folder_of(args):
    """Return the folder of what belongs to one draft and one target."""
    return RUNS / f"{args.draft}_{Path(args.target).name}"


def held_out(name, file, **keys):
    """Return the entry of --data of which all rows of a file are held out."""
    return keys | {"name": name, "data": str(file), "eval_data": str(file)}


def judged(args, student, name, sources, max_length=LENGTH):
    """Return the metrics of a student on held-out rows, by the job's own evaluation."""
    file = folder_of(args) / f"judged_{name}.json"
    if not file.exists():
        metrics = evaluate(dict(
            student=str(student), teacher=args.target, data=json.dumps(sources), eval_draft=True,
            loss="alm", teacher_dtype="bfloat16", num_workers=0, max_length=max_length,
            ds_config=str(RUNS / "ds.json"), learning_rate=1e-9, resume="never",
            output_dir=str(RUNS / "judge")))
        file.write_text(json.dumps(metrics))
    return json.loads(file.read_text())


def compare(args):
    """Print a line for each arm and seed, and by how much arms are ahead of their twins."""
    prepare(args)
    print("| arm | seed | " + " | ".join(COLUMNS) + " | processor s |\n" + "| --- " * 8 + "|")
    sources = [held_out(name, folder_of(args) / f"held_{name}.jsonl")
               for name in ("stories", "written")]
    records = known_records()
    found = {}
    arms = (OWN if args.arms == "OWN" else args.arms).split(",")
    for seed in map(int, args.seeds.split(",")):
        for arm in ("before", *arms):
            folder = draft_of(args) if arm == "before" else trained(args, arm, seed)
            metrics = judged(args, folder, arm if arm == "before" else folder.parent.name, sources)
            values = {column: round(metrics[f"eval/{key}"], 5) for column, key in COLUMNS.items()}
            file = folder.parent / "seconds.json"
            seconds = round(json.loads(file.read_text()), 1) if file.exists() else 0.0
            record = {"draft": args.draft, "target": Path(args.target).name, "arm": arm,
                      "seed": seed, "steps": args.steps, "rate": args.learning_rate}
            if arm != "before" and record not in records:
                with open(RECORDS, "a") as kept:
                    kept.write(json.dumps(record | values | {"seconds": seconds}) + "\n")
            found.setdefault(arm, []).append(values)
            cells = [f"{value:.3f}" for value in values.values()]
            print(f"| {arm} | {seed} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)
    for arm in arms:
        twin = ":".join(arm.split(":")[:3])
        if twin != arm and twin in found and len(found[arm]) > 1:
            for column in list(COLUMNS)[:2]:
                ahead = [one[column] - other[column]
                         for one, other in zip(found[arm], found[twin])]
                print(f"{arm} ahead of {twin}, {column}: {interval(ahead)}")


def known_records():
    """Return what names the runs of which a line is kept."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    names = "draft", "target", "arm", "seed", "steps", "rate"
    return [{name: json.loads(line)[name] for name in names} for line in lines]


# --- in transformers ------------------------------------------------------------------------------


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def write_with(target, prompts, draft=None, cuts_head=False):
    """Let the target write; print tokens a second, and what it accepts; return rows of it."""
    model, tokenizer = target
    counts = []
    sample = generation._speculative_sampling

    def counting(candidates, logits, length, *more, **named):
        written, matches = sample(candidates, logits, length, *more, **named)
        counts.append((int(matches), int(length)))
        return written, matches

    flags = dict(do_sample=True, top_k=0, max_new_tokens=WRITTEN)
    if draft:
        flags |= dict(assistant_model=draft[0], tokenizer=tokenizer, assistant_tokenizer=draft[1])
        draft[0].generation_config.update(
            num_assistant_tokens=DRAFTED, assistant_confidence_threshold=0.0,
            num_assistant_tokens_schedule="constant")
        if not cuts_head:  # see recipes/README.md
            candidate_generator.AssistantVocabTranslatorCache.get_translator(
                tokenizer, draft[1], model.config.vocab_size, assistant_prune_lm_head=False)
    generation._speculative_sampling = counting
    torch.manual_seed(0)
    begin = time.process_time()
    rows = []
    num_tokens = 0
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), **flags)
        num_tokens += out.shape[1] - len(ids)
        prompt = tokenizer.decode(ids, skip_special_tokens=True)
        text = tokenizer.decode(out[0], skip_special_tokens=True)
        rows.append({"prompt": prompt, "completion": text[len(prompt) :]})
    seconds = time.process_time() - begin
    generation._speculative_sampling = sample
    print(f"{num_tokens} tokens, {num_tokens / seconds:.1f} a second", end="")
    if draft:
        accepted = sum(matches for matches, _ in counts)
        tried = sum(min(matches + 1, length) for matches, length in counts)
        print(f"; accepted {accepted} of {tried} that were tried, {accepted / tried:.3f}; "
              f"{num_tokens / len(counts):.2f} a pass, head cut: {cuts_head}", end="")
    print(flush=True)
    return rows


def speed(args):
    """Print what a target writes with a draft and without, and the job's metric of these texts."""
    prepare(args)
    target = loaded(args.target)
    bos = target[1].bos_token_id
    prompts = [[bos, *target[1](text)["input_ids"][:PROMPT]] for text in stories(args)[:PROMPTS]]
    rows = write_with(target, prompts, loaded(args.speed))
    write_with(target, prompts[:FEW])
    write_with(target, prompts[:FEW], loaded(args.speed), cuts_head=True)
    save_rows(RUNS / "spoken.jsonl", rows)
    spoken = held_out("spoken", RUNS / "spoken.jsonl", prompt_key="prompt",
                      completion_key="completion")
    metrics = judged(args, args.speed, f"{time.time():.0f}", [spoken], SPOKEN)
    print(f"expected of these texts: {metrics['eval/draft_acceptance']:.3f}, "
          f"{metrics['eval/draft_length']:.2f} a pass")


def main(args):
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    dist.destroy_process_group = lambda: None  # the next job goes on with it
    (speed if args.speed else compare)(args)


if __name__ == "__main__":
    tool(Args, main, positional=("assets", "target"))
