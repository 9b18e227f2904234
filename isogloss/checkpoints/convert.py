"""Carry a checkpoint to another layout: number of ranks, ZeRO stage, sequence shards, pipeline.

Every conversion goes by way of one folder, the universal checkpoint of DeepSpeed: weights and
optimizer state of each parameter, whole and under its name.  DeepSpeed writes it from a checkpoint
of ZeRO stages 1 to 3, and an engine of these stages loads it.  What it lacks is here: to write it
from stage 0, to load it into stage 0, and what one stage writes and another one misses.

Tests: tests/test_resume.py.
"""

import contextlib
import io
import shutil
from argparse import Namespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

from isogloss.checkpoints.checkpoint import write_errors_named
from isogloss.errors import CannotSave
from isogloss.job.rendezvous import values_of_ranks
from isogloss.student.engine import optimizer_groups

# Of one parameter: its weight in float32 and the state of Adam.
TENSORS = "fp32", "exp_avg", "exp_avg_sq"
MODEL_STATES = "mp_rank_00_model_states.pt"  # of stages 0 to 2
MODEL_STATES_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
MOST_ROOM = 3  # bytes that a conversion writes for each one of a checkpoint, where it is stage 0


def load_converted(engine, checkpoint, universal, stages):
    """Load a checkpoint of another layout; all ranks take part.

    Args:
        engine: started with load_universal if it has ZeRO stage 1 to 3.
        universal: Path of a folder that is written and removed.
        stages: (ZeRO stage of the checkpoint, that of the engine).
    Raises:
        ValueError: the folder cannot be written.
    """
    saved_stage, stage = stages
    strict = all(parameter.requires_grad for parameter in engine.module.parameters())
    if saved_stage == stage == 0:  # every rank loads one and the same file
        engine.load_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name, load_module_strict=strict)
        return
    error = ""
    try:
        if dist.get_rank() == 0:
            error = _write_from_stage(saved_stage, engine, checkpoint, universal)
        error = values_of_ranks(error)[0]
        if error:
            raise ValueError(error)
        if stage == 0:
            load_into_stage_0(engine, universal)
        else:
            engine.load_checkpoint(
                str(universal.parent), tag=universal.name, load_module_strict=strict)
            repair_optimizer_state(engine.optimizer, _load(universal / "zero/optimizer_state.pt"))
        dist.barrier()  # every rank has read it
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(universal, ignore_errors=True)
            (universal.parent / "latest_universal").unlink(missing_ok=True)


def _write_from_stage(stage, engine, checkpoint, universal):
    """Write a universal checkpoint from one of any ZeRO stage; return why it cannot, or ""."""
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    try:
        with write_errors_named(universal):
            shutil.rmtree(universal, ignore_errors=True)
            if stage == 0:
                write_universal_of_stage_0(engine, checkpoint, universal)
            else:
                write_universal(checkpoint, universal)
                normalize_universal_checkpoint(universal)
    except CannotSave as error:
        return (f"--resume: {checkpoint} was written in another layout, and to convert it takes up "
                f"to {MOST_ROOM * size / 2**20:.0f} MiB: {error}")
    return ""


def _load(path, mmap=False):
    """Read a file that holds more than tensors.

    Under `unpickle.known_classes_only`, which lets pass what it may hold whatever is said here.
    """
    return torch.load(path, map_location="cpu", weights_only=False, mmap=mmap)


def check_convertible(checkpoint, position, layout):
    """Check that a checkpoint can be carried to another layout.

    Args:
        checkpoint: its path, for errors.
        position: dict of its position.json.
        layout: the layout of this run.
    Raises:
        ValueError: another optimizer than Adam and AdamW, whose state would be lost; weights that
            began later than others, whose counts of steps would be lost; or DeepSpeed's fused one
            with 16-bit weights at ZeRO stage 0, which keeps all parameters in one.
    """
    stages = {position["layout"]["zero_stage"], layout["zero_stage"]}
    if stages == {0}:
        return
    ds_config = position["run"].get("ds_config", {})
    optimizer = ds_config.get("optimizer", {"params": {"torch_adam": True}})
    name = optimizer.get("type", "AdamW")
    params = optimizer.get("params", {})
    reason = ""
    if name.lower() not in ("adam", "adamw") or params.get("amsgrad"):
        reason = f"only the state of plain Adam and AdamW survives, this is {name}"
    is_16_bit = any(ds_config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
    if position["run"].get("freeze_until"):
        reason = "with --freeze_until weights have counts of steps of their own"
    if 0 in stages and is_16_bit and not params.get("torch_adam"):
        reason = 'at ZeRO stage 0 in 16 bits that takes "torch_adam": true from the start'
    if reason:
        raise ValueError(f"--resume: {checkpoint} was written in another layout, "
                         f"{position['layout']}, and cannot be carried to {layout}: {reason}; use "
                         "the same layout")


# --- DeepSpeed's own conversion, from stages 1 to 3 -----------------------------------------------


def write_universal(checkpoint, universal):
    """Let DeepSpeed write a universal checkpoint from one of stages 1 to 3."""
    arguments = Namespace(
        input_folder=str(checkpoint),
        output_folder=str(universal),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True)
    # The tool prints its progress.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal(arguments)


def normalize_universal_checkpoint(universal):
    """Make what DeepSpeed wrote from one stage readable for all.

    Stages 1 and 2 look for other files and keys than stage 3, and for tensors in their shapes;
    DeepSpeed writes only those of the stage that saved, and flat tensors from stage 3.
    """
    _count_as_one(universal)
    if not (universal / MODEL_STATES).exists():
        shutil.copy(universal / MODEL_STATES_3, universal / MODEL_STATES)
    if not (universal / MODEL_STATES_3).exists():
        shutil.copy(universal / MODEL_STATES, universal / MODEL_STATES_3)

    path = universal / "zero" / "optimizer_state.pt"
    saved = _load(path)
    if "optimizer_state_dict" in saved:  # written by stage 3, which has one step for all parameters
        step = saved["optimizer_state_dict"]["state"][0]["step"]
        for file in path.parent.rglob("exp_avg.pt"):
            torch.save(step, file.with_name("step.pt"))
        saved.setdefault("ds_version", deepspeed.__version__)
        _restore_shapes(universal)
    else:  # written by stage 1 or 2, which have a step for each; they are equal
        step = _load(next(path.parent.rglob("step.pt")))
        saved["optimizer_state_dict"] = {
            "state": {0: {"step": step}},
            "param_groups": saved["param_groups"],
        }
    torch.save(saved, path)


def _count_as_one(universal):
    """Keep one file of model states where each stage of a pipeline has written one.

    They differ in nothing that is read: the weights are elsewhere.
    """
    first, *others = sorted(universal.glob("*mp_rank_*_model_states.pt"))
    if others:
        for path in others:
            path.unlink()
        torch.save(_load(first) | {"mp_world_size": 1}, first)


def _restore_shapes(universal):
    for shapes in _load(universal / MODEL_STATES, mmap=True)["param_shapes"]:
        for name, shape in shapes.items():
            for kind in TENSORS:
                path = universal / "zero" / name / f"{kind}.pt"
                flat = torch.load(path, weights_only=True)
                _save_parameter(path, flat.view(shape))


def _save_parameter(path, tensor):
    torch.save({"param": tensor.contiguous(), "cat_dim": 0}, path)


def repair_optimizer_state(optimizer, saved):
    """Undo two faults of ZeRO stage 3 in loading a universal checkpoint.

    It gives all parameter groups the settings of the first, weight decay included.  And it gives
    all parameters one and the same tensor as step counter, which every one of them then advances.

    Args:
        saved: dict of optimizer_state.pt, whose param_groups are in the same order.
    """
    # ZeRO wraps the optimizer whose state this is.
    inner = getattr(optimizer, "optimizer", optimizer)
    restore_settings(inner, saved["param_groups"])
    for state in inner.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def restore_settings(optimizer, saved_groups):
    """Give all parameter groups their settings of the checkpoint, learning rates included."""
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = value


def place_step_counters(optimizer):
    """Put the step counters of a fused Adam beside its weights, where its kernel looks for them."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not any(group.get("fused") for group in inner.param_groups):
        return
    for weight, state in inner.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(weight.device)


# --- ZeRO stage 0, which DeepSpeed does not convert -----------------------------------------------


def names_by_group(module):
    """Return the names of a StudentWithLoss's parameters, group by group of its optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer_groups(module):
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def write_universal_of_stage_0(engine, checkpoint, universal):
    """Write a universal checkpoint from one of stage 0."""
    model_states = _load(checkpoint / MODEL_STATES, mmap=True)
    # In 16 bits the optimizer wraps another one, and holds the weights in float32 itself.
    outer = model_states["optimizer"]
    inner = outer.get("optimizer_state_dict", outer)
    groups = names_by_group(engine.module)
    number = 0  # a state dict numbers the parameters through all groups
    for position, names in enumerate(groups):
        weights = _float32_weights(model_states, position, names)
        for name, weight in zip(names, weights, strict=True):
            folder = universal / "zero" / name
            folder.mkdir(parents=True)
            state = _adam_state(inner["state"], number, weight)
            _save_parameter(folder / "fp32.pt", weight)
            for kind in ("exp_avg", "exp_avg_sq"):
                _save_parameter(folder / f"{kind}.pt", state[kind].view(weight.shape))
            torch.save(state["step"], folder / "step.pt")
            number += 1
    saved = {
        "param_groups": inner["param_groups"],
        "optimizer_state_dict": {
            "state": {0: {"step": state["step"]}},
            "param_groups": inner["param_groups"],
        },
        "ds_version": deepspeed.__version__,
    }
    torch.save(saved, universal / "zero" / "optimizer_state.pt")
    for name in (MODEL_STATES, MODEL_STATES_3):
        shutil.copy(checkpoint / MODEL_STATES, universal / name)


def _float32_weights(model_states, position, names):
    masters = model_states["optimizer"].get("fp32_groups")  # of 16-bit weights
    if masters:
        return [master.detach() for master in masters[position]]
    return [model_states["module"][name] for name in names]


def _adam_state(states, number, weight):
    """Return the state of a parameter; zeros if it never had a gradient, as ZeRO has it."""
    if number in states:
        return states[number]
    zeros = torch.zeros_like(weight)
    step = next(iter(states.values()))["step"]
    return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros}


def load_into_stage_0(engine, universal):
    """Load a universal checkpoint into an engine of stage 0."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = getattr(optimizer, "fp32_groups", None)  # of 16-bit weights
    parameters = dict(engine.module.named_parameters())
    for position, names in enumerate(names_by_group(engine.module)):
        for number, name in enumerate(names):
            parameter = parameters[name]
            master = masters[position][number] if masters else parameter
            _load_parameter(inner, master, universal / "zero" / name)
            if masters:
                parameter.data.copy_(master.data)
    restore_settings(inner, _load(universal / "zero/optimizer_state.pt")["param_groups"])
    # what engine.load_checkpoint would take from this file
    model_states = _load(universal / MODEL_STATES, mmap=True)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(model_states["lr_scheduler"])
    engine.global_steps = model_states["global_steps"]
    engine.global_samples = model_states["global_samples"]
    engine.skipped_steps = model_states["skipped_steps"]


def _load_parameter(optimizer, master, folder):
    tensors = {}
    for kind in TENSORS:
        saved = torch.load(folder / f"{kind}.pt", weights_only=True)["param"]
        tensors[kind] = saved.view(master.shape).to(master)
    master.data.copy_(tensors.pop("fp32"))
    optimizer.state[master] = {"step": _load(folder / "step.pt")} | tensors
