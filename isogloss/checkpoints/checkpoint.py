"""Checkpoints that are complete or absent.

A checkpoint holds the engine (weights, optimizer, schedule), the random state of every rank, and
the position of the run.  The position is its step number, from which order.py derives the samples.
It is written under a scratch name and renamed when every rank is done and all is on disk, so a
checkpoint with a final name is complete.  Its position.json lists size and checksum of every file,
so what is damaged later is seen, and the checkpoint before it taken.

In the layout that wrote it, a run resumes bit by bit.  In another layout (number of ranks, ZeRO
stage, sequence or pipeline parallelism) convert.py carries it over, and only what dropout draws
differs.

Tests: tests/test_checkpoint.py, tests/test_distributed.py.
"""

import itertools
import json
import os
import random
import shutil
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from isogloss.config import Config
from isogloss.errors import CannotSave
from isogloss.flags.model_names import without_secrets
from isogloss.flags.other_names import DEFAULTS_OF_BEFORE
from isogloss.flags.parse import line_about
from isogloss.job.files import (
    files_in,
    replace_folder,
    scratch_of,
    size_and_checksum,
    sync,
    write_atomically,
)
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models.parts import is_adapter
from isogloss.projection_tools.tokenizers import reason_of

POSITION = "position.json"
CHECKSUM = "checksum"  # key of position.json
# in the RuntimeErrors of torch's writer of files
TORCH_WRITER = "inline_container", "iostream", "Parent directory"

# --- save -----------------------------------------------------------------------------------------


def checkpoint_name(step):
    return f"step_{step:07d}"


@contextmanager
def write_errors_named(target):
    """Raise a CannotSave where a file of a checkpoint cannot be written, as on a full disk.

    Other errors pass: a RuntimeError or a missing file may say that another rank is gone.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_of_torch = any(word in str(error) for word in TORCH_WRITER)
        is_of_peers = isinstance(error, (RuntimeError, FileNotFoundError, ConnectionError))
        is_there = str(getattr(error, "filename", "")).startswith(str(target.parent))
        if is_of_peers and not is_of_torch and not is_there:
            raise
        existing = next(folder for folder in target.parents if folder.is_dir())
        free = shutil.disk_usage(existing).free
        raise CannotSave(f"{target} cannot be written ({reason_of(error)}; {free / 2**20:.0f} MiB "
                         "are free there)") from None


def save_checkpoint(engine, folder, step, *, identity, layout, keep, state,
                    save_more=lambda folder: None):
    """Write ``folder/step_NNNNNNN`` and remove the oldest checkpoints; all ranks take part.

    Args:
        identity: JSON-able dict of what must be the same when the run resumes.
        layout: JSON-able dict of what must be the same to load the checkpoint without conversion.
        keep: number of checkpoints to leave, this one included.
        state: JSON-able dict of what else the run needs to resume, the same on every rank.
        save_more: (folder) -> (), writes further files there.
    """
    target = Path(folder) / checkpoint_name(step)
    scratch = scratch_of(target)
    rank = dist.get_rank()
    if rank == 0:
        _remove_half_written(folder)  # a full disk may have ended the save before
    dist.barrier()
    with write_errors_named(target):
        engine.save_checkpoint(str(folder), tag=scratch.name, save_latest=False,
                               exclude_frozen_parameters=has_adapter(engine))
        torch.save(random_state(), scratch / f"random_{rank}.pt")
        save_more(scratch)
        dist.barrier()  # every rank has written its files
        files = _seal(scratch)
        if rank == 0:
            position = {
                "step": step,
                "run": identity,
                "layout": layout,
                "state": state,
                "count": 1 + max(_orders(Path(folder).glob("step_*")).values(), default=0),
                "written": time.time(),  # for people: a clock can go back
                "files": files,
            }
            _complete(scratch, target, position)
            _remove_old_checkpoints(target, keep)
    dist.barrier()


def _complete(scratch, target, position):
    """Write position.json and give a checkpoint its final name."""
    position[CHECKSUM] = _checksum_of(position)
    write_atomically(scratch / POSITION, json.dumps(position, indent=1))
    sync(scratch)
    # The target exists if the run saved this step before and went back to an earlier one.  The old
    # one stays a checkpoint until the new one is in its place.
    replace_folder(scratch, target, target.with_name(target.name + "_before"))


def _seal(folder):
    """Wait until all files of a checkpoint are on disk; all ranks take part."""
    def seal(name):
        sync(folder / name)
        return size_and_checksum(folder / name)

    return dict(_divided(seal, files_in(folder)))


def _divided(function, names):
    """Return [(name, function(name))], where every rank has computed some of them."""
    rank = 0
    num_ranks = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        num_ranks = dist.get_world_size()
    results = [(name, function(name)) for name in names[rank::num_ranks]]
    if num_ranks == 1:
        return results
    return list(itertools.chain.from_iterable(values_of_ranks(results)))


def _checksum_of(position):
    content = {key: value for key, value in position.items() if key != CHECKSUM}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _remove_old_checkpoints(latest, keep):
    """Remove all but the last `keep` checkpoints; one that has lost files does not count."""
    folder = latest.parent
    num_whole = 1
    for checkpoint in reversed(complete_checkpoints(folder)):
        if checkpoint == latest:
            continue
        if num_whole >= keep:
            os.rename(checkpoint, scratch_of(checkpoint))  # so that nothing half-deleted counts
        elif not _missing_or_cut(checkpoint):
            num_whole += 1
    _remove_half_written(folder)


def _remove_half_written(folder):
    """Remove what a killed run has left half-written or half-deleted."""
    for incomplete in Path(folder).glob(".step_*.incomplete"):
        shutil.rmtree(incomplete, ignore_errors=True)


def has_adapter(engine):
    """Return whether an adapter is trained; the frozen weights are those of the student's files."""
    return any(is_adapter(name) for name, _ in engine.module.named_parameters())


# --- find -----------------------------------------------------------------------------------------


def complete_checkpoints(folder):
    """Return the paths of all checkpoints, in the order in which they were written.

    That differs from the order of their steps when a run went back to an earlier checkpoint.
    """
    orders = _orders(sorted(Path(folder).glob("step_*")))
    return sorted(orders, key=orders.get)


def _orders(checkpoints):
    """Return {path: count}; a greater one was written later, of equal ones the second.

    The count is of what this folder has been given.  A damaged one stays with the step before it.
    """
    orders = {}
    order = 0
    for checkpoint in checkpoints:
        with suppress(OSError, ValueError, AttributeError, TypeError):  # damaged
            order = int(position_of(checkpoint).get("count", 0))
        orders[checkpoint] = order
    return orders


def find_checkpoint(choice, folder, identity):
    """Return the path of the checkpoint to start from, or None; all ranks take part.

    Args:
        choice: "auto" (of those that are whole the one written last, if any), "never", or the path
            of one.
        folder: of the run's checkpoints.
        identity: of the run, see `save_checkpoint`.
    Raises:
        ValueError: "never" would mix two runs in one directory; the path is not a checkpoint, or a
            damaged one; no checkpoint is whole; the checkpoint belongs to a run with another
            identity.
    """
    if choice in ("auto", "never"):
        checkpoints = complete_checkpoints(folder)
        if not checkpoints:
            return None
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
    damage = _missing_or_cut(checkpoint)
    damage = next(filter(None, values_of_ranks(damage)), "")
    if damage:
        return damage
    files = position_of(checkpoint).get("files", {})

    def is_damaged(name):
        return size_and_checksum(checkpoint / name) != files[name]

    for name, damaged in _divided(is_damaged, sorted(files)):
        if damaged:
            return f"{checkpoint / name} is damaged: its content is not what was written"
    return ""


def _missing_or_cut(checkpoint):
    """Say which file of a checkpoint is missing or has another size, as far as this rank sees."""
    path = checkpoint / POSITION
    try:
        position = position_of(checkpoint)
        if position.get(CHECKSUM, _checksum_of(position)) != _checksum_of(position):
            return f"{path} is damaged: its content is not what was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError, AttributeError):
        return f"{path} is damaged: it cannot be read"
    for name, (size, _) in position.get("files", {}).items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} is damaged: it has {path.stat().st_size} bytes, not {size}"
    return ""


def agree_on_start(checkpoint):
    """Check that all ranks start from one checkpoint; all of them take part.

    Raises:
        ValueError: they do not.
    """
    start = None
    if checkpoint:
        position = position_of(checkpoint)
        start = [checkpoint.name, position.get("step"), position.get("written")]
    starts = values_of_ranks(start)
    for rank, other in enumerate(starts):
        if other != starts[0]:
            raise ValueError(
                f"--resume: rank 0 would start from {starts[0]}, rank {rank} from {other} (name, "
                "step and time of the checkpoint); name a directory that all nodes share")


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


def position_of(checkpoint):
    """Return position.json of a checkpoint, the dict that `save_checkpoint` writes.

    Its "run" is the identity; "count" is how many checkpoints had been written there with it.
    """
    return json.loads((checkpoint / POSITION).read_text())


def needs_conversion(checkpoint, layout):
    """Return whether a checkpoint was written in another layout; the engine must know at its start.

    Raises:
        ValueError: it cannot be converted, see `convert.check_convertible`.
    """
    position = position_of(checkpoint)
    if position["layout"] == layout:
        return False
    from isogloss.checkpoints.convert import check_convertible

    check_convertible(checkpoint, position, layout)
    return True


# --- random state ---------------------------------------------------------------------------------


def random_state():
    """Return the state of this rank's random generators; torch.load takes it with weights_only."""
    algorithm, keys, *rest = np.random.get_state()
    # A tensor, because weights_only rejects arrays; int64, because torch hardly supports uint32.
    keys = torch.from_numpy(keys.astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state(),
        "python": random.getstate(),
        "numpy": (algorithm, keys, *rest),
    }
