"""Checkpoints that are complete or absent, and the export to Hugging Face format.

A checkpoint holds the engine (weights, optimizer, schedule), the random state of every rank and the position
of the run, which is its step number: data.py derives the samples from it.  It is written under a scratch name
and renamed when every rank is done, so whatever bears a final name is complete.  In the layout that wrote it
a run goes on bit by bit; in another one (ranks, ZeRO stage, parts of sequences) DeepSpeed's universal format
carries it over, and only what dropout draws differs.
"""

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import time
from argparse import Namespace
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal
from transformers import AutoModelForCausalLM

from projection_tools import save_atomically


def scratch_of(path):
    return path.with_name(f".{path.name}.incomplete")


def write_atomically(path, text):
    scratch_of(path).write_text(text)
    os.replace(scratch_of(path), path)


def save_checkpoint(engine, folder, step, identity, layout, keep, state):
    """Write ``folder/step_NNNNNNN``; all ranks take part.

    Args:
        identity: JSON-able dict of what must be the same when the run goes on.
        layout: JSON-able dict of what has to be the same for the checkpoint to load as it is.
        keep: how many checkpoints to leave, this one included.
        state: JSON-able dict of what else the run goes on with, the same on every rank.
    """
    target, rank = Path(folder) / f"step_{step:07d}", dist.get_rank()
    scratch = scratch_of(target)
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=scratch.name, save_latest=False)
    torch.save(random_state(), scratch / f"random_{rank}.pt")
    if rank == 0:
        (scratch / "position.json").write_text(json.dumps(
            {"step": step, "run": identity, "layout": layout, "state": state, "written": time.time()},
            indent=1))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(target, ignore_errors=True)  # the same step, saved before and loaded since
        os.rename(scratch, target)
        for old in complete_checkpoints(folder)[:-keep]:
            os.rename(old, scratch_of(old))  # nothing half-deleted keeps its name
        for left in Path(folder).glob(".step_*.incomplete"):  # of this moment, or of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()


def complete_checkpoints(folder):
    """The one that was written last comes last; after going back to an early step that is not the highest."""
    def written(path):
        return position_of(path).get("written", 0) if (path / "position.json").is_file() else 0

    return sorted(sorted(Path(folder).glob("step_*")), key=written)


def find_checkpoint(wish, folder, identity):
    """The checkpoint to start from, or None.

    Args:
        wish: auto, never, or the path of a checkpoint.
    Raises:
        ValueError: never would mix two runs in one directory; the path is no checkpoint, or that of a run
            with another identity.
    """
    found = complete_checkpoints(folder)
    if wish == "never":
        if found:
            raise ValueError(f"--resume=never: {folder} already holds {found[-1].name}; choose another "
                             "--output_dir or remove it")
        return None
    if wish == "auto" and not found:
        return None
    checkpoint = found[-1] if wish == "auto" else Path(wish)
    if not (checkpoint / "position.json").is_file():
        raise ValueError(f"--resume={wish}: {checkpoint} is no complete checkpoint; expected a folder step_*")
    then = position_of(checkpoint)["run"]
    differ = [f"{k} was {then.get(k)!r}, is {v!r}" for k, v in identity.items() if then.get(k) != v]
    if differ:
        raise ValueError(f"--resume={wish}: {checkpoint} belongs to another run ({'; '.join(differ)}); use "
                         "the same settings or another --output_dir")
    return checkpoint


def position_of(checkpoint):
    """{"step", "run", "layout", "state", "written" (seconds of the clock)} of a checkpoint."""
    return json.loads((checkpoint / "position.json").read_text())


def step_and_state(checkpoint):
    position = position_of(checkpoint)
    return position["step"], position.get("state", {})


def needs_conversion(checkpoint, layout):
    """Is this checkpoint of another layout?  Then the engine has to be told before it starts.

    Raises:
        ValueError: one of them has ZeRO stage 0, which DeepSpeed does not convert.
    """
    then = position_of(checkpoint)["layout"]
    if then == layout:
        return False
    stages = [x["zero_stage"] for x in (then, layout)]
    if 0 in stages:
        what = "; ".join(f"{k} was {then[k]!r}, is {v!r}" for k, v in layout.items() if then[k] != v)
        raise ValueError(f"--resume: {checkpoint} is of another layout ({what}), and what ZeRO stage 0 wrote "
                         "or reads cannot be converted; use the same layout, or stages 1 to 3 on both sides")
    return True


def load_checkpoint(engine, checkpoint, convert=False):
    """Everything that `save_checkpoint` wrote; returns (step, state). All ranks take part.

    Args:
        convert: from another layout, by way of a universal checkpoint, which is removed again.
    """
    if not convert:
        engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        set_random_state(torch.load(checkpoint / f"random_{dist.get_rank()}.pt", weights_only=True))
        return step_and_state(checkpoint)
    universal = scratch_of(checkpoint)
    if dist.get_rank() == 0:
        shutil.rmtree(universal, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal(Namespace(
                input_folder=str(checkpoint), output_folder=str(universal), num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
        normalize_universal_checkpoint(universal)
    dist.barrier()
    engine.load_checkpoint(str(universal.parent), tag=universal.name)
    written = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    repair_optimizer_state(engine.optimizer, written)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(universal)
        (checkpoint.parent / "latest_universal").unlink(missing_ok=True)
    return step_and_state(checkpoint)


def repair_optimizer_state(optimizer, written):
    """Stage 3 gives all groups the first one's settings, and all parameters one and the same step counter."""
    for group, then in zip(optimizer.param_groups, written["param_groups"], strict=True):
        group |= {key: value for key, value in then.items() if key != "params"}
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def normalize_universal_checkpoint(universal):
    """Give a universal checkpoint both what stages 1 and 2 and what stage 3 look for beside the weights."""
    names = [universal / f"{prefix}mp_rank_00_model_states.pt" for prefix in ("", "zero_pp_rank_0_")]
    for name, other in (names, names[::-1]):
        if not name.exists():
            shutil.copy(other, name)
    path, inner = universal / "zero" / "optimizer_state.pt", "optimizer_state_dict"
    state = torch.load(path, weights_only=False)
    if inner in state:  # of stage 3
        for file in path.parent.rglob("exp_avg.pt"):
            torch.save(state[inner]["state"][0]["step"], file.with_name("step.pt"))
        state.setdefault("ds_version", deepspeed.__version__)
    else:
        step = torch.load(next(path.parent.rglob("step.pt")), weights_only=False)
        state[inner] = {"state": {0: {"step": step}}, "param_groups": state["param_groups"]}
    torch.save(state, path)


def random_state():
    name, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "device": get_accelerator().get_rng_state(),
            "python": random.getstate(), "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}


def set_random_state(state):
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    get_accelerator().set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])


def export_model(engine, tokenizer, target):
    """Write the model as a Hugging Face directory, from any ZeRO stage; all ranks take part."""
    weights, target = {}, Path(target)
    for name, p in itertools.chain(engine.module.named_parameters(), engine.module.named_buffers()):
        with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
            if dist.get_rank() == 0:
                weights[name] = p.detach().cpu().clone()
    if dist.get_rank() == 0:
        config = engine.module.config
        config.use_cache, config.dtype = True, next(iter(weights.values())).dtype
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(weights, strict=False)  # tied heads are named once; the file keeps it so
        shutil.rmtree(scratch_of(target), ignore_errors=True)
        model.save_pretrained(scratch_of(target))
        tokenizer.save_pretrained(scratch_of(target))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(scratch_of(target), target)
    dist.barrier()


def export_projection(engine, learned, target):
    """Write an `objective.LearnedProjection` as a projection file; all ranks take part."""
    scores = engine.module.projection_scores
    with deepspeed.zero.GatheredParameters([scores] if hasattr(scores, "ds_id") else []):
        if dist.get_rank() == 0:
            save_atomically(learned.tables(), target)
    dist.barrier()
