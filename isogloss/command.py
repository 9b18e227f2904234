"""The commands: `isogloss-distill`, which is DeepSpeed's launcher with our module, and the others.

    isogloss-distill [flags of the launcher, such as --num_gpus 4] --student S --teacher T ...
    isogloss doctor    what is installed here, what is optional and missing, GPUs, compiler, disk
    isogloss distill ...    as isogloss-distill; so with cache, export, plan, report, ...

In a checkout it is `python -m isogloss.command doctor`.  The flags of the tools that import torch
stand here, so that --help need not wait for it.
Tests: tests/test_install.py.
"""

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from unittest import mock

from isogloss.config import Config
from isogloss.flags.model_names import is_address
from isogloss.flags.parse import MISSING, check_flags, flag, parse_flags, prepare_rank, refusing
from isogloss.flags.task_options import TaskOptions
from isogloss.flags.terminal import guard_terminal
from isogloss.flags.tool import shared

NEEDED = "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numba", "safetensors"
# {what may be missing: what it is for}
OPTIONAL = {
    "peft": "--lora_r, and adapters as students and teachers",
    "bitsandbytes": "--quantize, and quantized teachers",
    "flash-attn": "--attention flash_attention_2",
    "flash-linear-attention": "fast linear attention on a GPU",
    "causal-conv1d": "fast state-space layers on a GPU",
    "lm_eval": "--eval_tasks lm_eval:NAME",
    "matplotlib": "curves of isogloss-report and of model cards",
    "wandb": "--wandb_project",
    "trl": "isogloss.integrations in TRL's trainers",
    "vllm": "--writer vllm",
}
GIB = 2**30
# Flags of DeepSpeed's launcher (0.19.8) with two hyphens.
OF_LAUNCHER = set("""
    hostfile include exclude num_nodes num_gpus num_accelerators master_port master_addr node_rank
    launcher launcher_args module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid
    enable_each_rank_log autotuning bind_cores_to_rank bind_core_list ssh_port venv_script log_level
    quiet
    """.split())


def split_words(words):
    """Return (words of the launcher, words of distill.py) of a command line.

    Ours begin at the first flag that the launcher does not know.
    """
    for place, word in enumerate(words):
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in OF_LAUNCHER:
            return words[:place], words[place:]
    return words, []


def with_free_port(launcher):
    """Return the launcher's words with a free port, so that two jobs of one node do not meet.

    Words that name a port, or other nodes, stay as they are.
    """
    named = ("--master_port", "--hostfile", "-H", "--num_nodes", "--force_multi", "--no_ssh")
    if any(word.startswith(named) for word in launcher) or Path("/job/hostfile").exists():
        return launcher
    with socket.socket() as found:
        found.bind(("", 0))
        return [*launcher, f"--master_port={found.getsockname()[1]}"]


def main():
    """Start the ranks, or print our help."""
    words = sys.argv[1:]
    if "-h" in words or "--help" in words:
        Config.read(["--help"])
    launcher, ours = split_words(words)
    if not any(word.startswith("--plugin") for word in ours):  # whose code is for the ranks
        Config.read(ours)
    from deepspeed.launcher import runner

    quiet = "--log_level=critical"  # of the launcher itself; a later one counts
    started = []
    interrupts = []

    class Started(subprocess.Popen):
        def __init__(self, words, **options):
            ours = {"deepspeed.launcher.launch": "isogloss.job.launcher"}
            super().__init__([ours.get(word, word) for word in words], **options)
            started.append(self)

    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))  # the ranks get it as well
    with mock.patch.object(subprocess, "Popen", Started):
        try:
            runner.main([quiet, *with_free_port(launcher), "--module", "isogloss.distill", *ours])
        except SystemExit as end:
            if not interrupts or end.code == 128 + signal.SIGINT:
                raise
            # a rank that SIGINT ends at once
            print("isogloss-distill: ended at once" if len(interrupts) > 1 else
                  "isogloss-distill: ended before the first step, nothing to save yet",
                  file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
    # of a process that a signal has ended it makes no exit code
    if started and started[-1].returncode:
        number = -started[-1].returncode
        name = signal.Signals(number).name
        print(f"isogloss-distill: the launcher of the ranks was ended by {name}; they save and end "
              "too", file=sys.stderr)
        raise SystemExit(128 + number)


# --- the tools and their flags --------------------------------------------------------------------


@dataclass(kw_only=True)
class CacheArgs:
    """Let a teacher read all texts of a data set once, and keep what it says."""

    teacher: str = shared(Config, "teacher", MISSING)
    data: str = flag(
        MISSING, "the texts, named as by --data of distill.py. A run may use any of them, in any "
        "order.")
    output: str = flag(MISSING, "directory of the cache. A command that was ended goes on there.")
    teacher_tokenizer: str = shared(Config, "teacher_tokenizer")
    teacher_timeout: float = shared(Config, "teacher_timeout")
    eval_data: str = flag("", "further texts, such as held-out ones, named likewise. Empty: none.")
    split: str = flag("train", "split of data.")
    eval_split: str = shared(Config, "eval_split")
    streaming: bool = flag(
        False, "read the data as a stream, once before the teacher is loaded, then for each rank.")
    text_key: str = shared(Config, "text_key")
    completion_key: str = shared(Config, "completion_key")
    prompt_key: str = shared(Config, "prompt_key")
    teacher_prompt_key: str = shared(Config, "teacher_prompt_key")
    template_kwargs: str = shared(Config, "template_kwargs")
    chat_date: str = shared(Config, "chat_date")
    hidden: bool = flag(
        False, "keep final hidden states, from which every loss is exact. Else some tokens, and "
        "all others as one event.")
    top_k: int = flag(
        256, "tokens of each position, beside the text's own: the most likely ones, and those "
        "that begin as the text's own does.", low=1, high=2**20)
    sampled: bool = flag(
        False, "draw some of these tokens from all others, for which they stand without bias.")
    seed: int = flag(
        0, "of the draws, which depend on it and the text alone.", low=0, high=2**32 - 2**16)
    logp_bits: int = flag(
        16, "bits of each of their log-probabilities: 16 (steps of a thousandth nat) or 32; 8: "
        "about so many for a token in all, its id included (docs/teachers.md).")
    temperature: float = flag(
        1.0, "of the losses that will read the cache: the mass of all other tokens is kept at "
        "this temperature and at 1.")
    teacher_max_length: int = shared(Config, "teacher_max_length")
    teacher_dtype: str = shared(Config, "teacher_dtype")
    teacher_engine: str = shared(Config, "teacher_engine")
    teacher_tp: int = shared(Config, "teacher_tp")
    teacher_offload: bool = shared(Config, "teacher_offload")
    teacher_compile: str = shared(Config, "teacher_compile")
    batch_tokens: int = flag(8192, "positions that a rank reads at a time.", low=1, high=2**24)
    push_to_hub: str = flag(
        "", "data set of the hub to upload it to, as in me/cache, from where --teacher_cache "
        "hf://datasets/me/cache reads it. Empty: none.")
    private: bool = flag(False, "make that data set a private one.")
    trust_remote_code: bool = flag(False, "run the Python code that comes with the teacher.")
    local_rank: int = shared(Config, "local_rank")

    def __post_init__(self):
        check_flags(self)
        if self.logp_bits not in (8, 16, 32):
            raise ValueError(f"--logp_bits {self.logp_bits}: expected 8, 16 or 32")
        if self.logp_bits == 8 and (self.sampled or self.temperature != 1):
            what = "--sampled" if self.sampled else f"--temperature {self.temperature}"
            raise ValueError(f"--logp_bits 8 with {what}: rounds the teacher's own probabilities, "
                             "none that are drawn or softened; use 16")
        if self.push_to_hub.count("/") != bool(self.push_to_hub):
            raise ValueError(f"--push_to_hub {self.push_to_hub}: expected OWNER/NAME")
        self.run_config()  # checks the flags that both have
        for name in ("hidden", "sampled"):
            if is_address(self.teacher) and getattr(self, name):
                raise ValueError(f"--{name} with --teacher {self.teacher}: a server gives its most "
                                 "likely tokens alone; leave it out")
        for name in ("top_k", "sampled", "logp_bits", "temperature"):
            value = getattr(self, name)
            if self.hidden and value != getattr(type(self), name):
                raise ValueError(f"--hidden with --{name} {value}: hidden states say all of every "
                                 "token, at any temperature; leave out one of them")
        if self.seed and not self.sampled:
            raise ValueError(f"--seed {self.seed}: is of --sampled, which is not set; leave it out")

    @property
    def teacher_path(self):
        return self.teacher_tokenizer or self.teacher

    def run_config(self):
        """Return the Config of a run with this teacher, which checks the flags that both have."""
        names = {entry.name for entry in fields(self)} & {entry.name for entry in fields(Config)}
        # what is held out is opened by itself; the seed is of draws, not of samples
        names -= {"eval_data", "eval_split", "seed", "local_rank"}
        shared = {name: getattr(self, name) for name in names}
        return Config(student=self.teacher_path, teacher_output="hidden" if self.hidden else "topk",
                      teacher_output_topk=self.top_k, **shared)


@dataclass(kw_only=True)
class ExportArgs:
    """Export the student of a checkpoint: python -m isogloss.export runs/a --step 400."""

    run: str = flag("", "--output_dir of the run.")
    step: int = flag(0, "of the checkpoint; 0: the newest one.", low=0, high=10**12)
    output: str = flag(
        "", "directory for the student, an earlier export or none; empty: export_STEP in the run.")
    push_to_hub: str = flag(
        "", "repository of the hub to upload it to, as in me/student; it is made if there is "
        "none. An adapter of a base model without a hub id is refused. You are logged in by `hf "
        "auth login`, or HF_TOKEN. Empty: none.")
    private: bool = flag(False, "make that repository a private one.")
    trust_remote_code: bool = flag(
        False, "run the Python code that comes with the student, which can do anything.")

    def __post_init__(self):
        check_flags(self)
        if self.push_to_hub.count("/") != bool(self.push_to_hub):
            raise ValueError(f"--push_to_hub {self.push_to_hub}: expected OWNER/NAME")
        if self.private and not self.push_to_hub:
            raise ValueError("--private: of a repository of the hub; name it with --push_to_hub")


@dataclass(kw_only=True)
class PlanArgs:
    """Say what a run needs: memory of a rank, a layout that fits, hours."""

    recipe: str = flag(MISSING, "YAML file of flags of distill.py.")
    gpus: int = flag(
        0, 'of the job. 0: as many as the recipe is for, by its comment "# GPUs: 16 of 80 '
        'GiB, 8 on a node"; 8 without one.', low=0, high=2**20)
    per_node: int = flag(
        0, "of one node. 0: as the recipe says, or as many, at most 8.", low=0, high=2**20)
    gpu_gib: float = flag(
        0.0, "memory of one, GiB. 0: as the recipe says, or 80.", low=0, high=2**20)
    tflops: float = flag(
        989.0, "peak of one in bfloat16, 10^12 operations a second.", low=1, high=1e6)
    mfu: float = flag(0.17, "share of the peak that a step reaches.", low=0.001, high=1)

    def __post_init__(self):
        check_flags(self)


@dataclass(kw_only=True)
class TaskArgs(TaskOptions):
    """Evaluate a model on tasks, and print a table."""

    model: str = flag(MISSING, "hub id or directory of a causal language model.")
    tasks: str = flag(
        MISSING, "some of mmlu, mmlu_continuation, lambada, gsm8k, hellaswag, winogrande, "
        "arc_challenge, arc_easy, humaneval_plus, mbpp_plus and lm_eval:NAME of "
        "lm-evaluation-harness, with commas.")
    output: str = flag("", "file for one JSON line per item: task, id, prediction, verdict, nats.")
    dtype: str = flag(
        "auto", "auto (that of the files), float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"))

    def __post_init__(self):
        super().__post_init__()
        if self.output:
            check_output(Path(self.output))


def check_output(path):
    """Raise a ValueError where a file cannot be written, before there is something to write."""
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink(missing_ok=True)  # another rank may have been faster
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror}); name a file "
                         "that can") from None


@dataclass(kw_only=True)
class TransferArgs:
    """Give a model the tokenizer of another one: a student that learns from what it was."""

    model: str = flag(MISSING, "hub id or directory of a causal language model.")
    tokenizer: str = flag(
        MISSING, "hub id or directory with the new tokenizer; bytes: the 256 bytes and the "
        "model's control tokens.")
    output: str = flag(MISSING, "directory for the student, an earlier one or none.")
    chat_template: str = flag(
        "auto", "tokenizer: of the new tokenizer; model: that of the model, with the control "
        "tokens that it writes; auto: of the tokenizer if it has one.",
        choices=("auto", "tokenizer", "model"))
    head_offset: bool = flag(
        True, "let tokens of several pieces lose some of their logit, as much as is best on texts, "
        "and say bits per byte before and after. It loads the model.")
    texts: str = flag(
        "", "text file for that: every other stretch chooses, the others are reported. Empty: the "
        "interpreter's own documentation.")
    trust_remote_code: bool = flag(False, "run the Python code that comes with the model.")

    def __post_init__(self):
        check_flags(self)
        if self.texts and not self.head_offset:
            raise ValueError("--texts: nothing is chosen on it with --head_offset=false; leave one "
                             "of them out")


@dataclass(kw_only=True)
class AnswerArgs:
    """Let a teacher answer prompts, as rows that --data of distill.py reads."""

    teacher: str = shared(Config, "teacher", MISSING)
    data: str = flag(
        MISSING, "the prompts, named as by --data of distill.py: texts, which it continues, or "
        "chats, whose last message of the assistant it writes anew.")
    output: str = flag(
        MISSING, "file for the rows, as written.jsonl. A command that was ended goes on there.")
    samples: int = flag(1, "answers to each prompt.", low=1, high=2**20)
    keep: str = flag(
        "", "which answers stay, with commas. length: those that were not cut. reward: those that "
        "the environment rewards, above 0. module:function: "
        "those for which function(messages, row) is true; where it is a number, the first one of a "
        "prompt with the highest. Empty: all.")
    teacher_cache: str = flag(
        "", "directory for what the teacher says of its answers, which --teacher_cache of "
        "distill.py reads. Empty: none.")
    hidden: bool = shared(CacheArgs, "hidden")
    top_k: int = shared(CacheArgs, "top_k")
    writer: str = flag(
        "teacher", "what writes, unless teacher is an address. teacher: the model, whole on every "
        "rank. vllm: vLLM of this environment, with its weights, a process on every node. Or the "
        "command of such a process, see --writer of distill.py.")
    environment: str = shared(Config, "environment")
    teacher_tokenizer: str = shared(Config, "teacher_tokenizer")
    teacher_timeout: float = shared(Config, "teacher_timeout")
    split: str = flag("train", "split of data.")
    text_key: str = flag("text", "column of the texts or chats.")
    prompt_key: str = flag(
        "", "column of whole prompts, texts or chats, in place of text_key. Empty: the first "
        "prompt_tokens of a text, or a chat before the assistant's last message.")
    teacher_prompt_key: str = shared(Config, "teacher_prompt_key")
    prompt_tokens: int = flag(
        32, "tokens of a text that are the prompt (of a short one its half).", low=1, high=2**20)
    rollout_tokens: int = flag(512, "tokens of an answer, at most.", low=1, high=2**20)
    rollout_temperature: float = flag(
        1.0, "of the draws, up to 1000; 0: the most likely token, each time.", low=0, high=1000)
    rollout_top_p: float = flag(
        1.0, "draw from the most likely tokens with this probability together, above 0 to 1.")
    seed: int = flag(
        0, "of the draws, which depend on it, row, answer and place alone.", low=0,
        high=2**32 - 2**16)
    rollout_batch: int = flag(
        64, "answers that a rank writes, or a server is asked for, side by side.",
        low=1, high=2**16)
    template_kwargs: str = shared(Config, "template_kwargs")
    chat_date: str = flag(
        "", "date that chat templates are told, as 2026-05-01. Empty: the day on which the command "
        "began.")
    teacher_max_length: int = shared(Config, "teacher_max_length")
    teacher_dtype: str = shared(Config, "teacher_dtype")
    trust_remote_code: bool = flag(False, "run the Python code that comes with the teacher.")
    local_rank: int = shared(Config, "local_rank")

    def __post_init__(self):
        check_flags(self)
        if is_address(self.teacher) and self.writer != "teacher":
            raise ValueError(f"--writer {self.writer} with --teacher {self.teacher}: the server "
                             "writes; leave it out")
        if is_address(self.teacher) and self.environment:
            raise ValueError(f"--environment with --teacher {self.teacher}: a server writes "
                             "single answers; name a model")
        for name in ("hidden", "top_k"):
            value = getattr(self, name)
            if value != getattr(type(self), name) and not self.teacher_cache:
                raise ValueError(f"--{name} {value}: is of --teacher_cache, which is not set; "
                                 "leave it out")
        for name in filter(None, self.keep.split(",")):
            if name == "reward" and not self.environment:
                raise ValueError("--keep reward: is what an environment says; add --environment")
            if name not in ("length", "reward") and not all(
                    map(str.strip, name.partition(":"))):
                raise ValueError(f"--keep {self.keep}: {name} is neither length, reward nor "
                                 "module:function, as checks:is_right")
        self.run_config()  # checks the flags that both have
        if self.teacher_cache:
            self.cache_args(is_chat=False)

    @property
    def teacher_path(self):
        return self.teacher_tokenizer or self.teacher

    def run_config(self):
        """Return the Config of a run whose student is the teacher and writes all samples."""
        names = {entry.name for entry in fields(self)} & {entry.name for entry in fields(Config)}
        names -= {"teacher_cache", "local_rank", "writer", "text_key", "rollout_temperature"}
        shared = {name: getattr(self, name) for name in names}
        cfg = Config(student=self.teacher_path, on_policy=1.0, staleness=0,
                     max_length=self.rollout_tokens + 1, teacher_compile="false",
                     writer=self.writer if self.writer != "teacher" else "student",
                     text_key=self.prompt_key or self.text_key, **shared)
        cfg.rollout_temperature = self.rollout_temperature  # of which a run takes no 0
        return cfg

    def cache_args(self, is_chat):
        """Return the CacheArgs of what is written; is_chat: the rows are chats."""
        names = {entry.name for entry in fields(self)} & {entry.name for entry in fields(CacheArgs)}
        names -= {"data", "output", "split", "text_key", "prompt_key", "seed"}
        shared = {name: getattr(self, name) for name in names}
        keys = {"prompt_key": "prompt", "completion_key": "completion"}
        return CacheArgs(data=self.output, output=self.teacher_cache,
                         **({"text_key": "messages"} if is_chat else keys), **shared)


# {module: its flags, and what `parse_flags` is told of them}
TOOLS = {
    "cache": (CacheArgs, {"aliases": {"dtype": "teacher_dtype"}}),
    "export": (ExportArgs, {"positional": ("run",)}),
    "plan": (PlanArgs, {"positional": ("recipe",)}),
    "tasks": (TaskArgs, {}),
    "transfer": (TransferArgs, {}),
    "write": (AnswerArgs, {"aliases": {
        "max_new_tokens": "rollout_tokens", "temperature": "rollout_temperature",
        "top_p": "rollout_top_p", "batch_size": "rollout_batch", "dtype": "teacher_dtype"}}),
}


def tool(name=None, argv=None):
    """Run `main` of a tool, whose module is imported once its flags are read.

    Args:
        name: None: of this program, as isogloss-cache.
        argv: the words of the command line; None: those of this process.
    """
    name = name or Path(sys.argv[0]).name.removeprefix("isogloss-")
    kind, options = TOOLS[name]
    if name in ("cache", "tasks", "write"):  # which several ranks run
        prepare_rank(f"isogloss.{name}")
    with refusing(f"isogloss.{name}"):
        args = parse_flags(kind, sys.argv[1:] if argv is None else argv, **options)
    with refusing(f"isogloss.{name}", loud=True):
        import_module(f"isogloss.{name}").main(args)


# --- isogloss doctor ------------------------------------------------------------------------------


# {command: (module, function) that reads the words of its process}
PROGRAMS = {"distill": ("isogloss.command", "main"), "align": ("isogloss.align_view", "main"),
            "report": ("isogloss.report.__main__", "cli"),
            "projection": ("isogloss.projection_tools.__main__", "cli")}


def isogloss():
    """Run the command that the first word names."""
    guard_terminal()
    name, *words = sys.argv[1:] or [""]
    if name == "doctor":
        print("\n".join(doctor()))
    elif name in TOOLS:
        tool(name, words)
    elif name in PROGRAMS:
        sys.argv = [f"isogloss-{name}", *words]
        module, function = PROGRAMS[name]
        getattr(import_module(module), function)()
    else:
        is_asked = name in ("-h", "--help")
        print(f"usage: isogloss {'|'.join(['doctor', *PROGRAMS, *TOOLS])} [--help] ...",
              file=sys.stdout if is_asked else sys.stderr)
        raise SystemExit(0 if is_asked else 2)


def doctor():
    """Return lines that say what a job finds here; what is wrong begins with MISSING."""
    from isogloss.projection_tools.files import CACHE

    lines = [f"isogloss {version('isogloss') or 'in a checkout'}, Python "
             f"{platform.python_version()}, {platform.platform()}"]
    for name in NEEDED:
        found = version(name)
        lines.append(f"{name} {found}" if found else f"MISSING {name}: pip install {name}")
    lines += devices()
    for name, purpose in OPTIONAL.items():
        found = version(name)
        lines.append(f"{name} {found}" if found else f"no {name}: for {purpose}")
    sandbox = "" if shutil.which("bwrap") else "no "
    lines.append(f"{sandbox}bwrap: for tasks that run code")
    for name, folder in (("tables of vocabularies", CACHE), ("this folder", Path.cwd())):
        free = shutil.disk_usage(nearest(folder)).free
        lines.append(f"{name}: {folder}, {free / GIB:.0f} GiB free")
    settings = {name: os.environ[name] for name in sorted(os.environ)
                if name.startswith(("NCCL_", "HF_HUB_", "CUDA_VISIBLE", "DS_ACCELERATOR"))}
    return [*lines, *[f"{name}={value}" for name, value in settings.items()]]


def version(name):
    """Return the version of a package that is installed, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def nearest(folder):
    """Return the first folder above that exists, or itself."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def devices():
    """Return lines about GPUs, NCCL and the compiler."""
    import torch

    from isogloss.models.compiler import missing_compiler

    lines = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        lines.append(f"GPU {number}: {found.name}, {found.total_memory / GIB:.0f} GiB, compute "
                     f"capability {found.major}.{found.minor}")
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        lines.append(f"CUDA {torch.version.cuda} of torch, NCCL {nccl}")
    else:
        lines.append("no GPU: ranks are processes of the CPU, of which this machine has "
                     f"{os.cpu_count()} cores")
    missing = missing_compiler()
    lines.append(f"no compiled losses: {missing}" if missing else "a compiler for torch.compile")
    return lines


if __name__ == "__main__":
    isogloss()
