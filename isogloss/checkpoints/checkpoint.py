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
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from isogloss.errors import CannotSave
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


def save_checkpoint(engine, folder, step, *, identity, layout, keep, state, spared="",
                    save_more=lambda folder: None):
    """Write ``folder/step_NNNNNNN`` and remove the oldest checkpoints; all ranks take part.

    Args:
        identity: JSON-able dict of what must be the same when the run resumes.
        layout: JSON-able dict of what must be the same to load the checkpoint without conversion.
        keep: number of checkpoints to leave, this one included.
        state: JSON-able dict of what else the run needs to resume, the same on every rank.
        spared: path of one to leave besides, if it lies there.
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
            _remove_old_checkpoints(target, keep, Path(spared).resolve())
    dist.barrier()


def _complete(scratch, target, position):
    """Write position.json and give a checkpoint its final name."""
    position[CHECKSUM] = checksum_of(position)
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

    return dict(divided(seal, files_in(folder)))


def divided(function, names):
    """Return [(name, function(name))], where every rank has computed some of them."""
    if dist.is_initialized():
        names = names[dist.get_rank()::dist.get_world_size()]
    results = [(name, function(name)) for name in names]
    return list(itertools.chain.from_iterable(values_of_ranks(results)))


def checksum_of(position):
    content = {key: value for key, value in position.items() if key != CHECKSUM}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _remove_old_checkpoints(latest, keep, spared):
    """Remove all but the last `keep` checkpoints; one that has lost files does not count."""
    folder = latest.parent
    num_whole = 1
    for checkpoint in reversed(complete_checkpoints(folder)):
        if checkpoint == latest or checkpoint.resolve() == spared:
            continue
        if num_whole >= keep:
            os.rename(checkpoint, scratch_of(checkpoint))  # so that nothing half-deleted counts
        elif not missing_or_cut(checkpoint):
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
    if choice in ("auto", "never") and not complete_checkpoints(folder):
        return None
    from isogloss.checkpoints.choose import chosen

    return chosen(choice, folder, identity)


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


def position_of(checkpoint):
    """Return position.json of a checkpoint, the dict that `save_checkpoint` writes.

    Its "run" is the identity; "count" is how many checkpoints had been written there with it.
    """
    return json.loads((checkpoint / POSITION).read_text())


def missing_or_cut(checkpoint):
    """Say which file of a checkpoint is missing or has another size, as far as this rank sees."""
    path = checkpoint / POSITION
    try:
        position = position_of(checkpoint)
        if position.get(CHECKSUM, checksum_of(position)) != checksum_of(position):
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
