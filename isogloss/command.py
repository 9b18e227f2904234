"""The commands `isogloss-distill`, the DeepSpeed launcher with our module, and `isogloss doctor`.

    isogloss-distill [flags of the launcher, such as --num_gpus 4] --student S --teacher T ...
    isogloss doctor    what is installed here, what is optional and missing, GPUs, compiler, disk

In a checkout it is `python -m isogloss.command doctor`.
Tests: tests/test_install.py.
"""

import os
import platform
import shutil
import socket
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

NEEDED = "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numba", "safetensors"
# {what may be missing: what it is for}
OPTIONAL = {
    "peft": "--lora_r, and adapters as students and teachers",
    "bitsandbytes": "--quantize, and quantized teachers",
    "flash-attn": "--attention flash_attention_2",
    "flash-linear-attention": "fast linear attention on a GPU",
    "causal-conv1d": "fast state-space layers on a GPU",
    "lm_eval": "--eval_tasks lm_eval:NAME",
    "wandb": "--wandb_project",
    "trl": "isogloss.integrations in TRL's trainers",
    "vllm": "--writer vllm",
}
GIB = 2**30


def split_words(words, names):
    """Return (words of the launcher, words of distill.py): ours begin at the first flag of ours.

    Args:
        words: of the command line, without the program.
        names: of our flags.
    """
    known = {*names, *(f"no{name}" for name in names)}
    for place, word in enumerate(words):
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in known:
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
    from isogloss.config import Config

    words = sys.argv[1:]
    if "-h" in words or "--help" in words or not words:
        Config.read(["--help"])
    launcher, ours = split_words(words, [entry.name for entry in fields(Config)])
    from deepspeed.launcher import runner

    runner.main([*with_free_port(launcher), "--module", "isogloss.distill", *ours])


# --- isogloss doctor ------------------------------------------------------------------------------


def isogloss():
    """Run `isogloss doctor`; other words print what there is."""
    if sys.argv[1:] == ["doctor"]:
        print("\n".join(doctor()))
        return
    print("usage: isogloss doctor; other commands are isogloss-distill, isogloss-cache, "
          "isogloss-export, isogloss-plan, isogloss-plot, isogloss-report, isogloss-tasks",
          file=sys.stderr)
    raise SystemExit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)


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
