"""Choose the checkpoint from which a run goes on: whole, and of the same run.

Tests: tests/test_checkpoint.py, tests/test_resume.py.
"""

import sys
from dataclasses import fields
from pathlib import Path

import torch.distributed as dist

from isogloss.checkpoints.checkpoint import (
    POSITION,
    complete_checkpoints,
    divided,
    missing_or_cut,
    position_of,
)
from isogloss.checkpoints.run_identity import checkpoint_folder, run_layout
from isogloss.config import Config
from isogloss.flags.model_names import without_secrets
from isogloss.flags.other_names import DEFAULTS_OF_BEFORE
from isogloss.flags.parse import line_about
from isogloss.job.files import scratch_of, size_and_checksum
from isogloss.job.rendezvous import values_of_ranks


def chosen(choice, folder, identity):
    """Return the checkpoint to start from where there is one; see `checkpoint.find_checkpoint`."""
    if choice in ("auto", "never"):
        checkpoints = complete_checkpoints(folder)
        if choice == "never":
            raise ValueError(
                f"--resume=never: {folder} already holds {checkpoints[-1].name}; choose another "
                "--output_dir or remove it")
        checkpoint = _newest_whole(checkpoints)
    else:
        checkpoint = Path(choice)
        if not (checkpoint / POSITION).is_file():
            raise ValueError(
                f"--resume={choice}: {checkpoint} is not a complete checkpoint; expected a folder "
                "step_*")
        damage = damage_of(checkpoint)
        if damage:
            raise ValueError(f"--resume={choice}: {damage}; name another checkpoint")
    check_identity(choice, checkpoint, identity)
    return checkpoint


def _newest_whole(checkpoints):
    """Return the last checkpoint that is whole; a line on stderr names those that are not."""
    for checkpoint in reversed(checkpoints):
        damage = damage_of(checkpoint)
        if not damage:
            return checkpoint
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(line_about(f"{damage}; it is left out"), file=sys.stderr, flush=True)
    raise ValueError(
        f"--resume=auto: {damage}, and no other checkpoint there is whole; restore the file, or "
        "move the checkpoints away to start anew")


def damage_of(checkpoint):
    """Say which file of a checkpoint is damaged, the same on all ranks, which take part; "": none.
    """
    damage = missing_or_cut(checkpoint)
    damage = next(filter(None, values_of_ranks(damage)), "")
    if damage:
        return damage
    files = position_of(checkpoint).get("files", {})

    def is_damaged(name):
        return size_and_checksum(checkpoint / name) != files[name]

    for name, damaged in divided(is_damaged, sorted(files)):
        if damaged:
            return f"{checkpoint / name} is damaged: its content is not what was written"
    return ""


def check_identity(choice, checkpoint, identity):
    """Check that a checkpoint belongs to the run with this identity."""
    # flags that an older checkpoint lacks were as they are by default
    saved = {flag.name: flag.default for flag in fields(Config)}
    saved |= without_secrets(position_of(checkpoint)["run"])
    identity = identity | {
        name: default for name, default in DEFAULTS_OF_BEFORE.items() if name in saved}
    differing = [key for key, value in identity.items() if saved.get(key) != value]
    if not differing:
        return
    values = [f"{key} was {saved.get(key)!r}, is {identity[key]!r}" for key in differing]
    if differing == ["schedule"]:
        raise ValueError(
            f"--resume={choice}: {checkpoint} has another learning-rate schedule ({values[0]}); "
            "add --extend_schedule to go on with the new one, by which the learning rate jumps, or "
            'keep the old one: write its numbers in place of "auto" into the ds_config, or use '
            "the same --steps")
    raise ValueError(
        f"--resume={choice}: {checkpoint} belongs to another run ({'; '.join(values)}); use the "
        "same settings or another --output_dir")


def check_samples(checkpoint, sources):
    """Raise a ValueError where the data have grown or shrunk since a checkpoint was written.

    Their order would be another.

    Args:
        sources: of `inputs.RunData.record`.
    """
    # an older checkpoint says nothing; of a stream nobody knows
    saved = position_of(checkpoint).get("state", {}).get("samples", ())
    for before, source in zip(saved, sources):
        if before != source["samples"]:
            named = f" of {source['name']}" if source["name"] else ""
            raise ValueError(
                f"--data: {checkpoint} was written with {before} samples{named}, and there are "
                f"{source['samples']}, whose order is another; use the same data or another "
                "--output_dir")


def prepare_conversion(checkpoint, cfg, ds_config):
    """Return the Path of the universal checkpoint by way of which one of another layout is loaded.

    It lies where this run writes, and the ds_config then says so; None: it is of this layout.

    Raises:
        ValueError: it cannot be converted, see `convert.check_convertible`.
    """
    position = position_of(checkpoint)
    layout = run_layout(cfg)
    if position["layout"] == layout:
        return None
    from isogloss.checkpoints.convert import check_convertible

    check_convertible(checkpoint, position, layout)
    if layout["zero_stage"]:  # the engine of stage 0 loads no such checkpoint
        ds_config["checkpoint"] = ds_config.get("checkpoint", {}) | {"load_universal": True}
    return scratch_of(checkpoint_folder(cfg) / checkpoint.name)
