"""Checkpoints that are complete or absent.

A checkpoint holds the engine (weights, optimizer, schedule), the random state of every rank, and
the position of the run.  The position is its step number, from which data.py derives the samples.
It is written under a scratch name and renamed when every rank is done, so a checkpoint with a final
name is complete.

In the layout that wrote it, a run resumes bit by bit.  In another layout (number of ranks, ZeRO
stage, sequence parallelism) convert.py carries it over, and only what dropout draws differs.

Tests: tests/test_distributed.py.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from isogloss.convert import check_convertible, load_converted
from isogloss.files import replace_folder, scratch_of

# --- save -----------------------------------------------------------------------------------------


def checkpoint_name(step):
    return f"step_{step:07d}"


def save_checkpoint(engine, folder, step, identity, layout, keep, state):
    """Write ``folder/step_NNNNNNN`` and remove the oldest checkpoints; all ranks take part.

    Args:
        identity: JSON-able dict of what must be the same when the run resumes.
        layout: JSON-able dict of what must be the same to load the checkpoint without conversion.
        keep: number of checkpoints to leave, this one included.
        state: JSON-able dict of what else the run needs to resume, the same on every rank.
    """
    target = Path(folder) / checkpoint_name(step)
    scratch = scratch_of(target)
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=scratch.name, save_latest=False)
    torch.save(random_state(), scratch / f"random_{rank}.pt")
    if rank == 0:
        position = {
            "step": step,
            "run": identity,
            "layout": layout,
            "state": state,
            "written": time.time(),
        }
        (scratch / "position.json").write_text(json.dumps(position, indent=1))
    dist.barrier()  # every rank has written its files: the checkpoint is complete
    if rank == 0:
        # The target exists if the run saved this step before and went back to an earlier one.
        # The old one stays a checkpoint until the new one is in its place.
        replace_folder(scratch, target, target.with_name(target.name + "_before"))
        _remove_old_checkpoints(folder, keep)
    dist.barrier()


def _remove_old_checkpoints(folder, keep):
    """Remove all but the last `keep` checkpoints, and what a killed run has left half-written."""
    for old in complete_checkpoints(folder)[:-keep]:
        os.rename(old, scratch_of(old))  # first, so that nothing half-deleted keeps a final name
    for incomplete in Path(folder).glob(".step_*.incomplete"):
        shutil.rmtree(incomplete, ignore_errors=True)


# --- find -----------------------------------------------------------------------------------------


def complete_checkpoints(folder):
    """Return the paths of all checkpoints, in the order in which they were written.

    That differs from the order of their steps when a run went back to an earlier checkpoint.
    """
    by_step = sorted(Path(folder).glob("step_*"))
    return sorted(by_step, key=_time_written)


def _time_written(checkpoint):
    if not (checkpoint / "position.json").is_file():
        return 0
    return position_of(checkpoint).get("written", 0)


def find_checkpoint(choice, folder, identity):
    """Return the path of the checkpoint to start from, or None.

    Args:
        choice: "auto" (the one that was written last, if any), "never", or the path of one.
        folder: of the run's checkpoints.
        identity: of the run, see `save_checkpoint`.
    Raises:
        ValueError: "never" would mix two runs in one directory; the path is not a checkpoint; the
            checkpoint belongs to a run with another identity.
    """
    checkpoints = complete_checkpoints(folder)
    if choice == "never":
        if checkpoints:
            raise ValueError(
                f"--resume=never: {folder} already holds {checkpoints[-1].name}; choose another "
                "--output_dir or remove it"
            )
        return None
    if choice == "auto":
        if not checkpoints:
            return None
        checkpoint = checkpoints[-1]
    else:
        checkpoint = Path(choice)
    if not (checkpoint / "position.json").is_file():
        raise ValueError(
            f"--resume={choice}: {checkpoint} is not a complete checkpoint; expected a folder "
            "step_*"
        )
    check_identity(choice, checkpoint, identity)
    return checkpoint


def check_identity(choice, checkpoint, identity):
    """Check that a checkpoint belongs to the run with this identity.

    Raises:
        ValueError: it does not; the line says what to do.
    """
    saved = position_of(checkpoint)["run"]
    differing = [key for key, value in identity.items() if saved.get(key) != value]
    if not differing:
        return
    values = [f"{key} was {saved.get(key)!r}, is {identity[key]!r}" for key in differing]
    if differing == ["schedule"]:
        raise ValueError(
            f"--resume={choice}: {checkpoint} has another learning-rate schedule ({values[0]}); "
            "add --extend_schedule to go on with the new one, by which the learning rate jumps, or "
            'keep the old one: write its numbers in place of "auto" into the ds_config, or use '
            "the same --steps"
        )
    raise ValueError(
        f"--resume={choice}: {checkpoint} belongs to another run ({'; '.join(values)}); use the "
        "same settings or another --output_dir"
    )


def position_of(checkpoint):
    """Return position.json of a checkpoint, the dict that `save_checkpoint` writes.

    Its "run" is the identity; "written" is in seconds of the clock.
    """
    return json.loads((checkpoint / "position.json").read_text())


def needs_conversion(checkpoint, layout):
    """Return whether a checkpoint was written in another layout; the engine must know at its start.

    Raises:
        ValueError: it cannot be converted, see `convert.check_convertible`.
    """
    position = position_of(checkpoint)
    if position["layout"] == layout:
        return False
    check_convertible(checkpoint, position, layout)
    return True


# --- load -----------------------------------------------------------------------------------------


def load_checkpoint(engine, checkpoint, convert=False):
    """Load everything that `save_checkpoint` wrote; all ranks take part.

    Args:
        convert: the checkpoint is of another layout; load it by way of a universal checkpoint,
            which is removed again.
    Returns:
        (step, state), as they were saved.
    """
    position = position_of(checkpoint)
    if convert:
        stages = position["layout"]["zero_stage"], engine.zero_optimization_stage()
        load_converted(engine, checkpoint, scratch_of(checkpoint), stages)
    else:
        engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        # Only here: in another layout, ranks and random states do not correspond.
        random_path = checkpoint / f"random_{dist.get_rank()}.pt"
        set_random_state(torch.load(random_path, weights_only=True))
    return position["step"], position.get("state", {})


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


def set_random_state(state):
    """Restore what `random_state` returned."""
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    get_accelerator().set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
