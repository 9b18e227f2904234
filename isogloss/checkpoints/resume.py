"""Load what `checkpoint.save_checkpoint` has written, in the layout that wrote it or in another.

Tests: tests/test_checkpoint.py, tests/test_resume.py.
"""

import itertools
import json
import operator
import os
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from isogloss.checkpoints.checkpoint import complete_checkpoints, position_of
from isogloss.checkpoints.convert import (
    MODEL_STATES,
    MODEL_STATES_3,
    load_converted,
    place_step_counters,
)
from isogloss.checkpoints.run_identity import checkpoint_folder
from isogloss.checkpoints.unpickle import known_classes_only
from isogloss.flags.parse import line_about
from isogloss.projection_tools.tokenizers import reason_of


def load_checkpoint(engine, checkpoint, universal=None):
    """Load everything that `save_checkpoint` wrote; all ranks take part.

    Args:
        universal: where the checkpoint is of another layout, Path of the universal checkpoint by
            way of which it is loaded, and which is removed again.
    Returns:
        (step, state), as they were saved.
    Raises:
        ValueError: a file holds more than a checkpoint does; it is of another student; or it
            cannot be converted.
    """
    position = position_of(checkpoint)
    with known_classes_only(checkpoint):
        _check_names(engine, checkpoint)
        if universal:
            stages = position["layout"]["zero_stage"], engine.zero_optimization_stage()
            load_converted(engine, checkpoint, universal, stages)
        else:
            engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name,
                                   load_module_strict=not has_frozen_weights(engine))
            # Only here: in another layout, ranks and random states do not correspond.
            random_path = checkpoint / f"random_{dist.get_rank()}.pt"
            set_random_state(torch.load(random_path, weights_only=True))
    place_step_counters(engine.optimizer)
    return position["step"], position.get("state", {})


def _check_names(engine, checkpoint):
    """Raise a ValueError where a checkpoint has no weight that is trained here.

    Earlier versions dropped, under ZeRO-3, the head of a student whose config said it was tied.
    """
    if any(checkpoint.glob("stage_*")):  # each file is of one stage of a pipeline
        return
    paths = [checkpoint / name for name in (MODEL_STATES, MODEL_STATES_3)]
    for path in filter(Path.exists, paths):
        states = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        groups = states.get("param_shapes") or [states["module"]]  # of an optimizer; of stage 0
        saved = set().union(*groups)
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and name not in saved:
                raise ValueError(
                    f"--resume: {checkpoint} has no weight {name}, which this student trains; its "
                    "files have changed, or an earlier version dropped it (ZeRO-3 with "
                    "tie_word_embeddings); begin anew with another --output_dir, or export that "
                    "checkpoint with python -m isogloss.export")


def has_frozen_weights(engine):
    """Return whether some weights are never trained; a checkpoint may lack them."""
    return not all(parameter.requires_grad for parameter in engine.module.parameters())


def set_random_state(state):
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    get_accelerator().set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])


def follow_schedule(engine):
    """Let the next step have the learning rate of the engine's schedule, after a load.

    What a checkpoint restores is that of the schedule which wrote it.
    """
    schedule = engine.lr_scheduler
    steps = getattr(schedule, "last_batch_iteration", -1)  # those of torch restore their length too
    if steps >= 0:
        schedule.step(steps)


def set_aside_later(cfg, start_step, names):
    """Move the checkpoints of later steps out of the way of a run that goes back.

    It cuts its logs, and may end before it saves.  Copies of them go along, so the folder where all
    this lies then is an --output_dir that resumes from the last of these checkpoints.

    Args:
        names: of the logs.
    """
    folder = checkpoint_folder(cfg)
    later = [path for path in complete_checkpoints(folder) if _is_later(path, start_step)]
    if not later:
        return
    numbered = (folder.with_name(f"aside_{number}") for number in itertools.count(1))
    aside = next(path for path in numbered if not path.exists())
    (aside / folder.name).mkdir(parents=True)
    logs = [folder.with_name(name) for name in names]
    for path in [*filter(Path.exists, logs), *folder.parent.glob("run*.json")]:
        shutil.copy(path, aside)
    for checkpoint in reversed(later):  # whenever this ends, the earliest are still there
        os.rename(checkpoint, aside / folder.name / checkpoint.name)
    moved = ", ".join(checkpoint.name for checkpoint in later)
    print(line_about(f"goes back to step {start_step}; {moved} and the logs so far are in {aside} "
                     f"now, and --output_dir {aside} goes on there"), file=sys.stderr, flush=True)


def _is_later(checkpoint, step):
    with suppress(OSError, ValueError, KeyError, TypeError):  # damaged
        return position_of(checkpoint)["step"] > step
    return False


def lines_until(path, start_step):
    """Return the lines of a log up to a step.

    Raises:
        ValueError: it holds a line that no run has written, which would be lost.
    """
    if not path.exists():
        return []
    try:
        *lines, half = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({reason_of(error)}); repair it, or move it "
                         "away") from None
    kept = []
    for number, line in enumerate([*lines, half], 1):
        try:
            is_kept = operator.index(json.loads(line)["step"]) <= start_step
        except (ValueError, TypeError, KeyError, RecursionError):
            if number > len(lines):  # what a killed process may leave
                break
            raise ValueError(f"{path}: line {number} is no line of a run; repair it, or move the "
                             "file away") from None
        if is_kept:
            kept.append(line + "\n")
    return kept
