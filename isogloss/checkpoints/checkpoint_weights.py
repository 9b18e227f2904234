"""Read a student's weights from a checkpoint of any layout, in one process and without an engine.

ZeRO 0 to 2 keep the whole model in one file, and a pipeline has a file for each stage.  ZeRO-3
keeps shards of float32 weights, which DeepSpeed's own tool joins.

Tests: tests/test_export.py.
"""

import contextlib
import io
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from isogloss.checkpoints.checkpoint import checkpoint_name, complete_checkpoints, position_of
from isogloss.checkpoints.choose import damage_of
from isogloss.checkpoints.convert import MODEL_STATES
from isogloss.checkpoints.unpickle import known_classes_only

PREFIX = "model."  # of the student's weights in a StudentWithLoss


def checkpoint_of_step(folder, step):
    """Return the path of a run's checkpoint.

    Args:
        folder: of its checkpoints.
        step: 0: the newest one.
    Raises:
        ValueError: there is none, or it is damaged.
    """
    checkpoints = complete_checkpoints(folder)
    steps = [path.name.removeprefix("step_").lstrip("0") or "0" for path in checkpoints]
    if not checkpoints:
        raise ValueError(f"{folder}: holds no checkpoint; --save_every and --keep_checkpoints of "
                         "the run say which ones stay")
    checkpoint = Path(folder) / checkpoint_name(step) if step else checkpoints[-1]
    if checkpoint not in checkpoints:
        raise ValueError(f"--step {step}: no checkpoint of that step; there are those of "
                         f"{', '.join(steps)}")
    damage = damage_of(checkpoint)
    if damage:
        raise ValueError(f"{damage}; name another --step")
    return checkpoint


def weights_of_checkpoint(checkpoint):
    """Return {name: tensor} of the student in a checkpoint, in the dtype that it computes in.

    Raises:
        ValueError: a file holds more than a checkpoint does.
    """
    position = position_of(checkpoint)
    with known_classes_only(checkpoint):
        stages = sorted(checkpoint.glob("stage_*_model_states.pt"))
        if stages:
            module = {}
            for path in stages:
                module |= torch.load(path, map_location="cpu", weights_only=True)
        elif position["layout"]["zero_stage"] == 3:
            module = _joined_shards(checkpoint, position["run"].get("ds_config", {}))
        else:
            states = torch.load(checkpoint / MODEL_STATES, map_location="cpu", weights_only=True)
            module = states["module"]
    weights = {}
    for name, tensor in module.items():
        if name.startswith(PREFIX):  # beside a learned projection
            weights[name.removeprefix(PREFIX)] = tensor
    return weights


def _joined_shards(checkpoint, ds_config):
    """Return the weights of a checkpoint of ZeRO-3, rounded as the engine rounds them."""
    with contextlib.redirect_stdout(io.StringIO()):  # the tool prints its progress
        module = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name)
    dtype = torch.float32
    for key, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(key, {}).get("enabled"):
            dtype = kind
    return {name: tensor.to(dtype) for name, tensor in module.items()}
