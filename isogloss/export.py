"""Export the student of any checkpoint in Hugging Face format, with a model card.

    python -m isogloss.export runs/a [--step 400] [--output student] [--push_to_hub me/student]

A job exports its last step itself (`--export`, checkpoints/export_files.py); this command exports
any checkpoint, of any layout, in one process.

Tests: tests/test_export.py, tests/test_distributed.py.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from isogloss.command import tool

if __name__ == "__main__":  # flags come before torch is imported
    raise SystemExit(tool("export"))

from safetensors import SafetensorError

from isogloss.checkpoints.checkpoint import position_of
from isogloss.checkpoints.checkpoint_weights import checkpoint_of_step, weights_of_checkpoint
from isogloss.checkpoints.export_files import MANIFEST, check_output, save_whole, write_model
from isogloss.checkpoints.model_card import read_record, write_card
from isogloss.config import template_kwargs
from isogloss.data.ends import load_generation
from isogloss.data.sample import TextEncoder
from isogloss.flags.model_names import ADAPTER_CONFIG
from isogloss.models import adapters
from isogloss.models.parts import adapter_of
from isogloss.models.pretrained import config_of_weights_here, load_config
from isogloss.models.tied import empty_model
from isogloss.projection_tools.tokenizers import load_tokenizer, reason_of


def export_checkpoint(args):
    """Write the student of a checkpoint; return the Path of its directory."""
    if not args.run:
        raise ValueError("expected a run, as in python -m isogloss.export runs/a")
    folder = Path(args.run)
    _, cfg = read_record(folder)
    checkpoint = checkpoint_of_step(folder / "checkpoints", args.step)
    step = position_of(checkpoint)["step"]
    output = args.output or str(folder / f"export_{step:07d}")
    check_output("--output", output, [])
    student = empty_student(cfg, args.trust_remote_code)
    tokenizer, table = load_tokenizer("student", cfg.student, args.trust_remote_code)
    generation = load_generation("student", cfg.student, student.config, tokenizer)
    encoder = TextEncoder(tokenizer, table, sys.maxsize, template_kwargs(cfg), generation)
    weights = weights_of_checkpoint(checkpoint)
    adapter = adapter_of(student)
    if adapter:  # checkpoints hold no frozen weights, so there is nothing here to merge it into
        save = partial(adapters.write_adapter, student, weights)
    else:
        save = partial(save_whole, student, weights, args.trust_remote_code)
    card = partial(write_card, folder=folder, step=step)
    try:
        write_model(save, encoder, output, card, "--output")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--output {output}: cannot be written ({reason_of(error)})") from None
    return Path(output)


def empty_student(cfg, trust_remote_code):
    """Return the student of a run without its weights, with its adapter if it has one."""
    adapter = adapters.student_adapter(cfg)
    # what a whole model ties is for its weights to say
    read_config = config_of_weights_here if adapter else load_config
    config = read_config("student", cfg.student, trust_remote_code)
    student = empty_model(config, trust_remote_code)
    if adapter:
        adapters.add_adapter(f"lora_r {cfg.lora_r}", student, adapter)
    return student


def check_base_is_public(folder, repository):
    """Check that an adapter names its base model by a hub id: no one else has a path of ours."""
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return
    base = json.loads(path.read_text())["base_model_name_or_path"]
    if os.path.isabs(base):
        raise ValueError(f"--push_to_hub {repository}: {path} names the base model by a path of "
                         f"this machine, {base}; write its hub id there, then run hf upload "
                         f"{repository} {folder}")


def push(folder, repository, private):
    from huggingface_hub import HfApi

    check_base_is_public(folder, repository)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), ignore_patterns=[MANIFEST],
                          commit_message="Export by Isogloss")
    except Exception as error:  # the hub has a dozen types of them
        raise ValueError(f"--push_to_hub {repository}: {reason_of(error)}; {folder} holds the "
                         "export, and the same command tries again") from None


def main(args):
    folder = export_checkpoint(args)
    print(folder)
    if args.push_to_hub:
        push(folder, args.push_to_hub, args.private)
        print(f"pushed to {args.push_to_hub}")
