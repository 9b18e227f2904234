"""Studies of gpu_day.py: what each measures, at the size of a card or, to rehearse, of a test.

A part of a study is a function of this file and its arguments; it returns {name: figure}.  Models
have the shapes of isogloss/architectures.yaml and random weights, tokenizers are those of
gpu_pack.py, texts the interpreter's own documentation.  Another tokenizer and a draft are for a
real model, SmolLM2-135M-Instruct, whose file gpu_pack.py packs in parts.
"""

import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tarfile
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import gpu, gpu_job, square, square_table, transfer
from benchmarks.drafts import held_out as entry_of
from benchmarks.loss import Sizes
from isogloss import demo, distill
from isogloss.command import TransferArgs
from isogloss.config import Config
from isogloss.plan import ARCHITECTURES, plan
from isogloss.student.options.peaks import PEAK_FLOPS
from isogloss.transfer import main as give_tokenizer

CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
PROFILED, REHEARSED = 7, 3  # the step that is profiled, and the one to rehearse
TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8)
TINY_LENGTH = 64
CHARACTERS = 8  # a token, at most: texts of so many are cut at the limit
# directories of tokenizers in a pack, by the beginning of a model's name
TOKENIZERS = {"meta-llama/Llama-2": "llama2", "meta-llama/Llama-3": "llama3",
              "Qwen/Qwen3": "qwen2", "HuggingFaceTB": "smollm2"}


@dataclass
class Place:
    """Say where a study works, and how large.

    Attributes:
        folder: for models, texts and runs; what is there is not made again.
        pack: what gpu_pack.py made.
        model: the folder of the parts of a real model's file.
        tiny: to rehearse on a CPU.
    """

    folder: Path
    pack: Path
    model: Path
    tiny: bool

    @cached_property
    def text(self):
        return "\n\n".join(text for _, text in sorted(topics.topics.items()))


# --- models and texts -----------------------------------------------------------------------------


def tokenizer_of(place, name):
    """Return the tokenizer of a model's family, a small one to rehearse.

    Raises:
        gpu.Skipped: the pack lacks it.
    """
    if place.tiny:
        texts = [place.text[first : first + 400] for first in range(0, 80_000, 400)]
        if name.startswith("Qwen"):
            return demo.byte_level_bpe(texts, 400)
        return demo.unigram(texts, 400)
    archive = place.pack / "tokenizers.tar.xz"
    if not archive.exists():
        raise gpu.Skipped(f"no {archive}: make gpu-pack makes it")

    def unpack(folder):
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")

    folder = demo.make_once(place.folder / "tokenizers", unpack)
    [directory] = [folder / key for start, key in TOKENIZERS.items() if name.startswith(start)]
    if not directory.exists():
        raise gpu.Skipped(f"{archive} has no {directory.name}")
    return AutoTokenizer.from_pretrained(directory)


def model_of(place, name, layers):
    """Return the directory of a model of a published shape with random weights.

    Args:
        layers: how many of its layers; 0: all.
    """
    def make(folder):
        fields = yaml.safe_load(ARCHITECTURES.read_text())[name]
        fields = {key: value for key, value in fields.items() if key not in ("source", "published")}
        tokenizer = tokenizer_of(place, name)
        if layers:
            fields["num_hidden_layers"] = layers
        if place.tiny:
            fields |= TINY | {"vocab_size": len(tokenizer) + 10}
        config = AutoConfig.for_model(**fields, max_position_embeddings=1 << 17,
                                      dtype="bfloat16")
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        gpu.peak_gib(reset=True)  # the memory is the job's now

    key = f"{name.replace('/', '--')}-{layers}"
    return demo.make_once(place.folder / key, make)


def corpus_of(place, length):
    """Return a file of texts of which each is cut at `length` tokens."""
    def make(path):
        size = CHARACTERS * length
        text = place.text * math.ceil(8 * size / len(place.text))
        with open(path, "w") as file:
            for first in range(0, len(text) - size + 1, size):
                file.write(json.dumps({"text": text[first : first + size]}) + "\n")

    return demo.make_once(place.folder / f"texts-{length}.jsonl", make)


def flags_of(place, *, pair, length, samples, micro_batch, **flags):
    """Return (the flags of a run, its number of tokens in a step).

    Args:
        pair: (student, layers, teacher, layers); see `model_of`.
        length, samples, micro_batch: tokens of a sample, samples of a step and of a micro-batch.
        flags: further ones.
    """
    student, student_layers, teacher, teacher_layers = pair
    if place.tiny:
        length = min(length, TINY_LENGTH)
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    ds_config = place.folder / f"ds-{samples}-{micro_batch}.json"
    ds_config.write_text(json.dumps({
        "train_batch_size": samples, "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1}, "optimizer": optimizer}))
    all_flags = {"student": model_of(place, student, student_layers),
                 "teacher": model_of(place, teacher, teacher_layers),
                 "data": corpus_of(place, length), "ds_config": ds_config, "learning_rate": 1e-5,
                 "max_length": length, "teacher_max_length": length, "steps": PROFILED + 1,
                 "output_dir": place.folder / f"run-{os.getpid()}-{next(RUNS)}"}
    return all_flags | flags, samples * length


RUNS = count()  # so that no run goes on from another one


def as_argv(flags):
    return [f"--{key}={value}" for key, value in flags.items()]


def metrics_of(flags):
    """Return the lines of a run's steps."""
    lines = (Path(flags["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


# --- a step ---------------------------------------------------------------------------------------


def peak_flops():
    """Return the bfloat16 peak of the card in FLOP/s; 0 where it is not known."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), 0)


def step(place, environment=None, **flags):
    """Time steps of a run, and profile one.

    Args:
        environment: {variable: text} of its process.
    Returns:
        tokens_per_second: median of steps 3 to 5, and `each`; share_of_peak: operations of the
        student (six for each weight and position) and of the teacher (two) over the bfloat16 peak.
        The others are of step 7; see benchmarks/step.py.
    """
    flags, tokens = flags_of(place, **flags)
    last = REHEARSED if place.tiny else PROFILED
    timed = range(last - 4, last - 1)
    with mock.patch.dict(os.environ, environment or {}):
        process, pipe = gpu.spawn(gpu_job.profile_job, as_argv(flags), last, daemon=False)
    figures = gpu.received(pipe, timeout=1200)
    process.join(60)
    seconds = [line["seconds"] for line in metrics_of(flags) if line["step"] in timed]
    median = statistics.median(seconds)
    figures |= {"tokens_per_second": round(tokens / median), "seconds": gpu.rounded(median),
                "each": [gpu.rounded(value) for value in seconds]}
    if peak := peak_flops():
        operations = plan(Config(**{key: str(value) if isinstance(value, Path) else value
                                    for key, value in flags.items()}), 1).operations
        figures["share_of_peak"] = round(operations / median / peak, 3)
    return figures


def by_engine(place, vllm=False, **flags):
    """Time steps whose teacher is on the rank, or run by a vLLM of another Python."""
    if vllm:
        python = os.environ.get("ISOGLOSS_VLLM")
        if not python:
            raise gpu.Skipped("ISOGLOSS_VLLM names no Python that has vLLM")
        flags["teacher_engine"] = f"{python} -m isogloss.vllm_teacher"
    return step(place, **flags)


def writing(place, **flags):
    """Let a student write all samples, by the loop of the job; say how fast, in which share."""
    flags, _ = flags_of(place, **flags)
    flags |= {"steps": 4, "on_policy": 1.0, "prompt_tokens": 16,
              "rollout_tokens": 16 if place.tiny else flags["max_length"] - 32}
    gpu_job.on_ranks(1, gpu_job.run_job, as_argv(flags))
    lines = metrics_of(flags)[1:]
    return {"written_tokens_per_second":
            round(statistics.median(line["rollout/tokens_per_second"] for line in lines)),
            "share_of_step": gpu.rounded(statistics.median(
                line["rollout/seconds"] / line["seconds"] for line in lines)),
            "tokens": lines[-1]["rollout/tokens"]}


def generating(place, cache, samples=32, prompt=32):
    """Let SmolLM2-135M's shape write by transformers' generate; say how fast.

    Args:
        cache: a cache_implementation; samples, prompt: so many, with so many tokens to begin with.
    """
    path = model_of(place, "HuggingFaceTB/SmolLM2-135M", 0)
    count = 4 if place.tiny else 480
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    ids = torch.randint(model.config.vocab_size, (samples, prompt), device=device)
    seconds = gpu.timed(partial(model.generate, ids, max_new_tokens=count, min_new_tokens=count,
                                cache_implementation=cache, do_sample=True), times=1)
    return {"written_tokens_per_second": round(samples * count / seconds)}


# --- another tokenizer for a model, and a draft of it ---------------------------------------------

LOOKS = 20, 60, 200  # steps after which a student is judged; it learns as many as the last
DRAFT_STEPS = 400
DRAFT_LAYERS = 6
LEARNED_SAMPLES, LEARNED_LENGTH = 64, 256  # of a step; tokens of a sample
LEARNED_CHARACTERS = 900  # of a sample: 282 tokens of Llama 2 in the mean, which are cut
DOCUMENTED = "torch", "numpy", "pandas"  # 0.5 MB of Python's pages would be read 28 times
RATES = {"transfer": 2e-4, "draft": 5e-4}  # not tuned


def documentation(place):
    """Return Python's pages and, but to rehearse, docstrings of packages: 12 MB."""
    if place.tiny:
        return place.text[:40_000]
    texts = [place.text]
    for spec in filter(None, map(importlib.util.find_spec, DOCUMENTED)):
        for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
            strings = re.findall(r'(?s)"""(.*?)"""', path.read_text(errors="replace"))
            texts += [inspect.cleandoc(text) for text in strings if len(text) > 200]
    return "\n".join(texts)


def write_model(place, folder):
    """Write SmolLM2-135M-Instruct as files of transformers; to rehearse, a tiny model."""
    if place.tiny:
        shutil.copytree(model_of(place, "HuggingFaceTB/SmolLM2-135M", 0), folder)
        return
    file = folder.with_suffix(".gguf")
    file.write_bytes(b"".join(path.read_bytes() for path in sorted(place.model.iterdir())))
    transfer.write_smollm2(folder, file)
    file.unlink()


def prepare_transfer(place, folder):
    """Write the model, the student with new tokens and texts; say what both make of texts."""
    folder.mkdir()
    tokenizer = tokenizer_of(place, "Qwen/Qwen3" if place.tiny else "meta-llama/Llama-2")
    tokenizer.save_pretrained(folder / "tokenizer")
    write_model(place, folder / "model")
    give_tokenizer(TransferArgs(model=str(folder / "model"), output=str(folder / "student"),
                                tokenizer=str(folder / "tokenizer")))
    text = folder / "documentation.txt"
    text.write_text(documentation(place))
    count = 4 if place.tiny else transfer.HELD_OUT
    with mock.patch.object(transfer, "HELD_OUT", count):
        learned, held_out = transfer.domains(SimpleNamespace(text=str(text), others=""),
                                             str(folder / "model"))
    save_rows(folder / "learned.jsonl", re.findall(f"(?s).{{1,{LEARNED_CHARACTERS}}}",
                                                   "\n".join(learned)))
    for domain, texts in held_out.items():
        save_rows(folder / f"{domain}.jsonl", texts)
    save(folder, "held_out", held_out)
    was = transfer.judge_model(on_device(folder / "model"), held_out)
    save(folder, "as_it_was", was)
    save(folder, "before", transfer.judge_model(on_device(folder / "student"), held_out, was))


def save_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def save(folder, name, value):
    (folder / f"{name}.json").write_text(json.dumps(value))


def on_device(path):
    """Return what `transfer.loaded` does, the model where it computes fast."""
    model, *others = transfer.loaded(path)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), *others


def prepared(place):
    """Return the folder of what `prepare_transfer` writes."""
    return demo.make_once(place.folder / "transfer", partial(prepare_transfer, place))


def flags_to_learn(place, study, steps, **flags):
    """Return the flags of a run of a student whose teacher is the model as it was."""
    folder = prepared(place)
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    samples = 4 if place.tiny else LEARNED_SAMPLES
    ds_config = place.folder / "ds-learn.json"
    ds_config.write_text(json.dumps(config | {"train_batch_size": samples,
                                              "bf16": {"enabled": True}}))
    return {"student": folder / "student", "teacher": folder / "model",
            "data": folder / "learned.jsonl", "ds_config": ds_config, "steps": steps,
            "learning_rate": 0.1 if place.tiny else RATES[study], "teacher_dtype": "bfloat16",
            "max_length": TINY_LENGTH if place.tiny else LEARNED_LENGTH,
            "output_dir": place.folder / f"run-{os.getpid()}-{next(RUNS)}"} | flags


def learn_and_look(argv, folder, looks):
    """Run distill.py on this rank; return {step: what its student makes of texts then}.

    Args:
        looks: the steps.
    """
    folder = Path(folder)
    held_out, was = transfer.read(folder, "held_out", "as_it_was")
    judged = on_device(folder / "student")
    results = {}
    numbers = count(1)
    take = distill.train_step

    def train_step(state, micro_batches):
        report = take(state, micro_batches)
        step = next(numbers)
        if step in looks:
            judged[0].load_state_dict(state.engine.module.model.state_dict())
            results[step] = transfer.judge_model(judged, held_out, was)
        return report

    distill.train_step = train_step
    distill.cli(argv)
    return results


def another_tokenizer(place, **flags):
    """Let a model learn from itself as it was, with other tokens; see benchmarks/transfer.py.

    Returns:
        as_it_was: bits per byte; bits, won_back, agreement: after so many steps; over_text: by how
        much bits per byte are below those of the text alone at the end, 95 % by bootstrap, where
        that was trained before on this machine. All are by domain.  seconds: of all steps.
    """
    looks = (1, 2) if place.tiny else LOOKS
    flags = flags_to_learn(place, "transfer", looks[-1], **flags)
    folder = prepared(place)
    [results] = gpu_job.on_ranks(1, learn_and_look, as_argv(flags), str(folder), looks)
    figures = won_back(folder, results)
    text = folder / "text.json"
    last = results[str(looks[-1])]
    if not flags.get("kd_weight", 1):
        save(folder, "text", last)
    elif text.exists():
        figures["over_text"] = {}
        for domain in last:
            low, high = transfer.interval(transfer.read(folder, "text"), [last], domain)
            figures["over_text"][domain] = [round(low, 4), round(high, 4)]
    return figures | seconds_of(flags)


def seconds_of(flags):
    """Return the seconds of a run's steps, those that look at the student like the others."""
    median = statistics.median(line["seconds"] for line in metrics_of(flags))
    shutil.rmtree(flags["output_dir"])  # with checkpoints, which are large
    return {"seconds": gpu.rounded(flags["steps"] * median)}


def won_back(folder, results):
    """Return bits per byte, shares won back and agreement by domain and step."""
    was, before = transfer.read(folder, "as_it_was", "before")
    figures = {"as_it_was": {}, "bits": {}, "won_back": {}, "agreement": {}}
    for domain in was:
        best, worst = (transfer.per_byte([result], domain) for result in (was, before))
        figures["as_it_was"][domain] = round(best, 3)
        for kind in ("bits", "won_back", "agreement"):
            figures[kind][domain] = {}
        for step, result in ({"0": before} | results).items():
            bits = transfer.per_byte([result], domain)
            figures["bits"][domain][step] = round(bits, 3)
            figures["won_back"][domain][step] = round((worst - bits) / (worst - best), 3)
            figures["agreement"][domain][step] = round(transfer.agreement([result], domain), 3)
    return figures


def cut(place, folder):
    """Write the first layers of the student with new tokens."""
    student = prepared(place) / "student"
    config = AutoConfig.from_pretrained(student)
    config.num_hidden_layers = 1 if place.tiny else DRAFT_LAYERS
    AutoModelForCausalLM.from_pretrained(student, config=config, dtype=torch.bfloat16) \
        .save_pretrained(folder)
    AutoTokenizer.from_pretrained(student).save_pretrained(folder)


def accepted(place, student):
    """Return {domain: share of drafted tokens that the model accepts}, expected, of a student."""
    folder = prepared(place)
    domains = transfer.read(folder, "held_out")[0]
    sources = [entry_of(domain.replace(" ", "_"), folder / f"{domain}.jsonl")
               for domain in domains]
    flags = flags_to_learn(place, "draft", 1, student=student, data=json.dumps(sources),
                           eval_draft=True, loss="alm")
    flags = {key: str(value) if isinstance(value, Path) else value for key, value in flags.items()}
    [metrics] = gpu_job.on_ranks(1, gpu_job.evaluate, flags)
    return {domain: round(metrics[f"eval/{domain.replace(' ', '_')}/draft_acceptance"], 3)
            for domain in domains}


def draft(place, **flags):
    """Let the first layers of a model, with other tokens, become a draft of the whole one.

    Returns:
        before, after: share of drafted tokens that are accepted, by domain; see docs/evaluate.md.
    """
    student = demo.make_once(place.folder / "draft", partial(cut, place))
    before = transfer.once(place.folder / "draft.json", lambda: accepted(place, student))
    flags = flags_to_learn(place, "draft", 2 if place.tiny else DRAFT_STEPS, student=student,
                           **flags)
    flags["export"] = flags["output_dir"] / "student"
    gpu_job.on_ranks(1, gpu_job.run_job, as_argv(flags))
    return {"before": before, "after": accepted(place, flags["export"])} | seconds_of(flags)


# --- turns with a tool ----------------------------------------------------------------------------

SAY_HOW = ("You may use a calculator: end what you say with an expression in << and >>, such as "
           "<<12 * 7>>, and you are told its value. Then say the answer.")
QUESTIONS, TURN_STEPS = 96, 60


def write_questions(place, folder):
    """Write a model with a chat template, and rows of questions with their solutions."""
    folder.mkdir()
    write_model(place, folder / "model")
    if place.tiny:
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")
        tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = []
    for _ in range(16 if place.tiny else 2048):
        first, second = rng.randint(12, 99), rng.randint(3, 99)
        question = (f"A shelf holds {first} books. How many books do {second} such shelves hold?")
        chat = [{"role": "system", "content": SAY_HOW}, {"role": "user", "content": question}]
        rows.append({"prompt": chat, "answer": first * second,
                     "messages": [*chat, {"role": "assistant", "content": f"{first * second}"}],
                     "solution": f"Say <<{first} * {second}>>, then {first * second}."})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def turns(place, reward_weight=0.0):
    """Let a model learn a tool from itself, which has read the solution.

    Returns:
        right, turns, nats_per_byte: share of right answers to held-out questions, turns of an
        episode, and reverse KL of what it says, before and after.
    """
    folder = demo.make_once(place.folder / "turns", partial(write_questions, place))
    samples = 4 if place.tiny else 32
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    (place.folder / "ds-turns.json").write_text(json.dumps(
        config | {"train_batch_size": samples, "bf16": {"enabled": True}}))
    asked = {"function": "calculator", "max_turns": 3, "reward_weight": reward_weight}
    flags = {"student": folder / "model", "teacher": "self", "teacher_prompt_key": "solution",
             "data": folder / "rows.jsonl", "text_key": "messages", "prompt_key": "prompt",
             "ds_config": place.folder / "ds-turns.json", "loss": "reverse_kl", "on_policy": 1,
             "rollouts_per_prompt": 4, "rollout_tokens": 8 if place.tiny else 96,
             "environment": json.dumps(asked), "learning_rate": 1e-5, "max_length": 512,
             "steps": 2 if place.tiny else TURN_STEPS, "eval_rows": 4 if place.tiny else QUESTIONS,
             "rollout_eval": 4 if place.tiny else QUESTIONS,
             "output_dir": place.folder / f"run-{os.getpid()}-{next(RUNS)}"}
    gpu_job.on_ranks(1, gpu_job.run_job, as_argv(flags))
    lines = (flags["output_dir"] / "metrics.jsonl").read_text().splitlines()
    judged = [line for line in map(json.loads, lines) if "eval/rollout/turns" in line]
    figures = {}
    for name, key in (("right", "reward"), ("turns", "turns"),
                      ("nats_per_byte", "reverse_kl_per_byte")):
        figures[name] = [line.get(f"eval/rollout/{key}") for line in (judged[0], judged[-1])]
    return figures | seconds_of(flags)


# --- students that outweigh their loss ------------------------------------------------------------


def large_square(place, minutes):
    """Go on with the large square of square.py for some minutes.

    Returns:
        runs: how many are done now; records: lines of those that docs/log did not have, which
        `square_table.py --merge FOLDER` adds to it.
    """
    sizes = square.SCALES["large"]._replace(runs=place.folder / "large_square")
    if place.tiny:
        tiny = 16, 16, 1, 1
        sizes = sizes._replace(sizes=dict(bytes=400, digits=300), teacher=tiny, student=tiny,
                               teacher_steps=3, kept_every=1, seeds=2,
                               pairs=(("bytes", "digits"),),
                               regimes={"large_500": square_table.Regime(16, 4, checks=2)})
    records = square_table.Records(place.folder / "log")
    before = set(square_table.Records(square_table.LOG).of)
    if not place.tiny:
        square_table.merge(records, square_table.LOG)
    with mock.patch.dict(square.SCALES, large=sizes), \
            mock.patch.dict(square_table.LARGE, sizes.regimes):
        square.main(square.Args(scale="large", minutes=minutes, records=str(records.folder)))
    new = [record for name, record in square_table.Records(records.folder).of.items()
           if name not in before]
    return {"runs": len(new), "records": new}


# --- the same numbers -----------------------------------------------------------------------------


def worst_difference(ours, others):
    """Return (relative difference, metric, step) where two runs' lines differ most.

    Seconds and what follows from them are left out.
    """
    worst = 0.0, "", 0
    for line, other in zip(ours, others, strict=True):
        for key in line.keys() & other.keys():
            if "second" in key or key == "mfu" or not isinstance(line[key], int | float):
                continue
            scale = max(abs(line[key]), abs(other[key] or 0), 1e-9)
            difference = abs(line[key] - (other[key] or 0)) / scale
            if difference > worst[0]:
                worst = difference, key, line["step"]
    return worst


def small_run(place, world, stage, precision, flags):
    """Return the flags of a run of small models, of four steps on `world` ranks."""
    models = demo.make_once(place.folder / "small", prepare_small)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    ds_config = place.folder / f"small-{world}-{stage}-{precision}.json"
    ds_config.write_text(json.dumps({
        "train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage}, "optimizer": optimizer,
        "bf16": {"enabled": precision == "bfloat16"}}))
    return {"student": models / "student", "teacher": models / "teacher",
            "data": models / "corpus.jsonl", "ds_config": ds_config, "steps": 4, "max_length": 96,
            "num_workers": 0,
            "output_dir": place.folder / f"run-{os.getpid()}-{next(RUNS)}"} | flags


def prepare_small(folder):
    folder.mkdir()
    gpu_job.prepare(folder)


def on_card_and_cpu(place, *, world, stage, precision="float32", **flags):
    """Take the same four steps on the card and on CPUs; return where their numbers differ most."""
    ours = small_run(place, world, stage, precision, flags)
    gpu_job.on_ranks(world, gpu_job.run_job, as_argv(ours))
    others = small_run(place, world, stage, precision, flags)
    with mock.patch.dict(os.environ, CPU):
        gpu_job.on_ranks(world, gpu_job.run_job, as_argv(others))
    difference, key, number = worst_difference(metrics_of(ours), metrics_of(others))
    return {"worst_difference": difference, "of": f"{key} in step {number}" if key else "none"}


def killed_at(argv, step):
    """Run distill.py on this rank, and end it hard when it comes to a step."""
    numbers = count(1)
    take = distill.train_step

    def train_step(*arguments):
        if next(numbers) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*arguments)

    distill.train_step = train_step
    distill.cli(argv)


def resume(place):
    """Compare a run with itself, and with one that was killed and went on."""
    flags = {"save_every": 2, "steps": 6}
    runs = [small_run(place, 1, 2, "bfloat16", flags) for _ in range(3)]
    first, second, killed = map(as_argv, runs)
    gpu_job.on_ranks(1, gpu_job.run_job, first)
    gpu_job.on_ranks(1, gpu_job.run_job, second)
    try:
        gpu_job.on_ranks(1, killed_at, killed, 4)
    except EOFError:
        gpu_job.on_ranks(1, gpu_job.run_job, killed)
    lines = [metrics_of(flags) for flags in runs]
    return {"twice": worst_difference(lines[0], lines[1])[0],
            "killed": worst_difference(lines[0], lines[2])[0]}


# --- losses ---------------------------------------------------------------------------------------


def sizes_of(place):
    if place.tiny:
        return Sizes(16, 200, 300, 8, 8, 50, 64)
    return Sizes(8192, 128_256, 151_646, 2048, 2560, gpu.KEPT_COLUMNS, 4096)


def loss(place, name):
    """Time a loss with its cross-entropy over its matmuls, plain and compiled."""
    return gpu.table_line(name, sizes_of(place))


def liger_loss(run, labels):
    """Return a function that computes Liger's fused divergence and its gradients."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)
    teacher = run.teacher
    return lambda: function(run.hidden, run.weight, teacher.hidden_TH, teacher.head.weight_VH,
                            labels).backward()


def trl_loss(run, labels):
    """Return a function that does so with TRL's divergence, of all logits at once."""
    from trl.experimental.gkd import GKDTrainer

    teacher = run.teacher

    def step():
        with torch.no_grad():
            of_teacher = teacher.hidden_TH @ teacher.head.weight_VH.T
        logits = run.hidden @ run.weight.T
        GKDTrainer.generalized_jsd_loss(logits[None], of_teacher[None], labels[None]).backward()

    return step


OTHERS = {"liger": liger_loss, "trl": trl_loss}


def others_loss(place, name):
    """Time another package's Jensen-Shannon divergence over the same matmuls as ours."""
    sizes = sizes_of(place)
    run = gpu.TableRun("generalized_jsd", sizes, "tiled").run
    labels = torch.zeros(sizes.tokens, dtype=torch.long, device=run.hidden.device)
    try:
        compute = OTHERS[name](run, labels)
    except ImportError as error:
        raise gpu.Skipped(str(error)) from None

    def step():
        run.clear_gradients()
        compute()

    seconds = gpu.timed(step)
    matmuls = gpu.timed(run.matmuls)
    return {"seconds": gpu.rounded(seconds), "of_matmuls": round(seconds / matmuls, 2)}


# --- checks of gpu.py and gpu_job.py --------------------------------------------------------------


def check(place, name):
    """Run a check; what it finds wrong is a failure."""
    module = gpu if hasattr(gpu, name) else gpu_job
    if place.tiny:
        raise gpu.Skipped("needs a GPU; tests/test_benchmarks.py runs what a CPU can of it")
    passed, figures = getattr(module, name)()
    if not passed:
        raise AssertionError(json.dumps(figures)[:2000])
    return figures
