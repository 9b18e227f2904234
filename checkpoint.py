"""Checkpoints that are complete or absent, and the export to Hugging Face format.

A checkpoint holds the engine (weights, optimiser, schedule), the random state of every rank and the position
of the run, which is its step number: data.py derives the samples from it.  It is written under a scratch name
and renamed when every rank is done, so whatever bears a final name is complete.
"""

import itertools
import json
import os
import random
import shutil
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

from projection_tools import save_atomically


def scratch_of(path):
    return path.with_name(f".{path.name}.incomplete")


def write_atomically(path, text):
    scratch_of(path).write_text(text)
    os.replace(scratch_of(path), path)


def save_checkpoint(engine, folder, step, identity, keep):
    """Write ``folder/step_NNNNNNN``; all ranks take part.

    Args:
        identity: JSON-able dict of what must be the same when the run goes on.
        keep: how many checkpoints to leave, this one included.
    """
    target, rank = Path(folder) / f"step_{step:07d}", dist.get_rank()
    scratch = scratch_of(target)
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=scratch.name, save_latest=False)
    torch.save(random_state(), scratch / f"random_{rank}.pt")
    if rank == 0:
        (scratch / "position.json").write_text(json.dumps({"step": step, "run": identity}, indent=1))
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
    """Oldest first."""
    return sorted(Path(folder).glob("step_*"))


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
    then = json.loads((checkpoint / "position.json").read_text())["run"]
    differ = [f"{k} was {then.get(k)!r}, is {v!r}" for k, v in identity.items() if then.get(k) != v]
    if differ:
        raise ValueError(f"--resume={wish}: {checkpoint} belongs to another run ({'; '.join(differ)}); use "
                         "the same settings or another --output_dir")
    return checkpoint


def load_checkpoint(engine, checkpoint):
    """Everything that `save_checkpoint` wrote; returns the step. All ranks take part."""
    engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    set_random_state(torch.load(checkpoint / f"random_{dist.get_rank()}.pt", weights_only=True))
    return json.loads((checkpoint / "position.json").read_text())["step"]


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
