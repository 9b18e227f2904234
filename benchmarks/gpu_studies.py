"""Studies of gpu_day.py: what each measures, at the size of a card or, to rehearse, of a test.

A part of a study is a function of this file and its arguments; it returns {name: figure}.  Models
have the shapes of recipes/architectures.yaml and random weights, tokenizers are those of
gpu_pack.py, texts the interpreter's own documentation.
"""

import json
import math
import os
import signal
import statistics
import sys
import tarfile
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from pydoc_data import topics
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import gpu, gpu_job
from benchmarks.loss import Sizes
from isogloss import demo, distill
from isogloss.config import Config
from isogloss.log import PEAK_FLOPS
from isogloss.plan import ARCHITECTURES, plan

CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
PROFILED = 7  # the step that is profiled; the figures before it are of steps 3 to 5
TIMED = range(3, 6)
TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8)
TINY_LENGTH = 64
CHARACTERS = 8  # a token, at most: texts of so many are cut at the limit
# directories of tokenizers in a pack, by the beginning of a model's name
TOKENIZERS = {"meta-llama/Llama-3": "llama3", "Qwen/Qwen3": "qwen2", "HuggingFaceTB": "smollm2"}


@dataclass
class Place:
    """Say where a study works, and how large.

    Attributes:
        folder: for models, texts and runs; what is there is not made again.
        pack: what gpu_pack.py made.
        tiny: to rehearse on a CPU.
    """

    folder: Path
    pack: Path
    tiny: bool

    @cached_property
    def text(self):
        return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def made_once(path, make):
    """Call make(path) unless the path is there; return it."""
    if not path.exists():
        scratch = path.with_name(f"{path.name}.part")
        make(scratch)
        scratch.rename(path)
    return path


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

    folder = made_once(place.folder / "tokenizers", unpack)
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
    return made_once(place.folder / key, make)


def corpus_of(place, length):
    """Return a file of texts of which each is cut at `length` tokens."""
    def make(path):
        size = CHARACTERS * length
        text = place.text * math.ceil(8 * size / len(place.text))
        with open(path, "w") as file:
            for first in range(0, len(text) - size + 1, size):
                file.write(json.dumps({"text": text[first : first + size]}) + "\n")

    return made_once(place.folder / f"texts-{length}.jsonl", make)


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


def step(place, **flags):
    """Time steps of a run, and profile one.

    Returns:
        tokens_per_second: median of steps 3 to 5, and `each`; share_of_peak: operations of the
        student (six for each weight and position) and of the teacher (two) over the bfloat16 peak.
        The others are of step 7; see benchmarks/step.py.
    """
    flags, tokens = flags_of(place, **flags)
    process, pipe = gpu.spawn(gpu_job.profile_job, as_argv(flags), PROFILED, daemon=False)
    figures = gpu.received(pipe, timeout=1200)
    process.join(60)
    seconds = [line["seconds"] for line in metrics_of(flags) if line["step"] in TIMED]
    median = statistics.median(seconds)
    figures |= {"tokens_per_second": round(tokens / median), "seconds": gpu.rounded(median),
                "each": [gpu.rounded(value) for value in seconds]}
    if peak := peak_flops():
        operations = plan(Config(**{key: str(value) if isinstance(value, Path) else value
                                    for key, value in flags.items()}), 1).operations
        figures["share_of_peak"] = round(operations / median / peak, 3)
    return figures


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
    models = made_once(place.folder / "small", prepare_small)
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


def liger(place):
    """Time Liger's fused Jensen-Shannon divergence over the same matmuls as ours."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError as error:
        raise gpu.Skipped(str(error)) from None

    sizes = sizes_of(place)
    run = gpu.TableRun("generalized_jsd", sizes, "tiled").run
    function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)
    teacher = run.teacher
    labels = torch.zeros(sizes.tokens, dtype=torch.long, device=run.hidden.device)

    def step():
        run.clear_gradients()
        function(run.hidden, run.weight, teacher.hidden_TH, teacher.head.weight_VH,
                 labels).backward()

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
