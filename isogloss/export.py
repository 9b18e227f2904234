"""The trained student in Hugging Face format, and a learned projection.

An export lists its files in a manifest of its own.  So only what an export wrote is ever replaced.

Tests: tests/test_export.py, tests/test_distributed.py.
"""

import glob
import json
import os
import shutil
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import AutoModelForCausalLM

from isogloss.adapters import adapter_of, is_adapter, merged_weights, write_adapter
from isogloss.config import configs_by_teacher
from isogloss.files import (
    check_shared,
    check_writable,
    files_in,
    replace_folder,
    scratch_of,
    sync_tree,
    write_atomically,
)
from isogloss.rendezvous import values_of_ranks
from isogloss.run_identity import checkpoint_folder
from isogloss.student import gathered
from projection_tools import save_atomically

MANIFEST = "isogloss_export.json"

# --- what an export may replace -------------------------------------------------------------------


def check_results(cfg):
    """Check that all that a run writes can be written, and destroys nothing; all ranks take part.

    Raises:
        ValueError: the export would replace what no export wrote, or what the run reads or writes;
            or a place cannot be written to.
    """
    if cfg.export:
        _check_overlap(cfg)
        _check_replaceable(cfg.export)
    projection = projection_path(cfg)
    if cfg.learn_projection and projection.is_dir():
        raise ValueError(f"--output_dir {cfg.output_dir}: {projection.name} is a directory "
                         "there, and --learn_projection writes a file; name another directory")
    check_shared(f"--output_dir {cfg.output_dir}", checkpoint_folder(cfg))
    if cfg.export:
        _check_on_rank_0(check_writable, f"--export {cfg.export}", _real_path(cfg.export).parent)


def _check_on_rank_0(check, *args):
    """Run a check on rank 0, which writes all results; all ranks raise what it raises."""
    error = None
    if dist.get_rank() == 0:
        try:
            check(*args)
        except ValueError as failure:
            error = str(failure)
    error = _of_rank_0(error)
    if error:
        raise ValueError(error)


def projection_path(cfg):
    return Path(cfg.output_dir) / "projection.pt"


def _real_path(path):
    return Path(os.path.realpath(os.path.expanduser(path)))


def _check_overlap(cfg):
    """Check that the export is apart from all that the run reads and writes."""
    target = _real_path(cfg.export)
    output_dir = _real_path(cfg.output_dir)
    # inside of output_dir is usual
    if output_dir.is_relative_to(target):
        _refuse_overlap(cfg, "--output_dir", cfg.output_dir)
    checkpoints = _real_path(checkpoint_folder(cfg))
    if target.is_relative_to(checkpoints):
        _refuse_overlap(cfg, "the checkpoints", checkpoints)
    for flag, path in _inputs(cfg):
        if os.path.exists(os.path.expanduser(path)):  # else it is a hub id
            real = _real_path(path)
            if real.is_relative_to(target) or target.is_relative_to(real):
                _refuse_overlap(cfg, flag, path)


def _refuse_overlap(cfg, flag, path):
    raise ValueError(f"--export {cfg.export}: would replace {flag} {path} or a part of it; name "
                     "another directory")


def _inputs(cfg):
    """List (flag, path) of all that a run may read from this machine; a path may be a hub id."""
    found = [("--student", cfg.student), ("--ds_config", cfg.ds_config)]
    for path in glob.glob(os.path.expanduser(cfg.data), recursive=True):
        found.append(("--data", path))
    if cfg.resume not in ("auto", "never"):
        found.append(("--resume", cfg.resume))
    if cfg.projection:
        found.append(("--projection", cfg.projection))
    if cfg.kd_weight:
        for teacher_cfg in configs_by_teacher(cfg).values():
            found.append(("teacher", teacher_cfg.teacher_path))
            if teacher_cfg.teacher_cache:
                found.append(("teacher_cache", teacher_cfg.teacher_cache))
            if teacher_cfg.projection:
                found.append(("projection", teacher_cfg.projection))
    return found


def _check_replaceable(export):
    """Check that a directory is absent, empty, or what an export wrote and nothing else."""
    target = _real_path(export)
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ValueError(f"--export {export}: is a file; name a directory")
    others = files_in(target)
    if MANIFEST in others:
        try:
            written = json.loads((target / MANIFEST).read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError):
            written = []
        others = [name for name in others if name != MANIFEST and name not in written]
    if others:
        raise ValueError(f"--export {export}: holds {others[0]}, which no export of ours wrote and "
                         "which would be lost; name another directory or remove it")


# --- write ----------------------------------------------------------------------------------------


def export_model(engine, tokenizer, target, trust_remote_code=False, merge=False):
    """Write the student as a Hugging Face directory, from any layout; all ranks take part.

    A student that was trained by an adapter leaves the adapter alone, as peft writes it.

    Args:
        engine: whose module holds the Hugging Face model as `.model`.
        target: directory, replaced if it is an earlier export.
        trust_remote_code: the model may run Python code of its own.
        merge: add the products of its adapter to the weights, and write the whole model.
    Returns:
        Why it could not be written, the same on all ranks; None: it was.
    """
    error = None
    student = engine.module.model
    adapter = adapter_of(student)
    if adapter and not merge:
        weights = engine.module.collect_weights(is_adapter)
        save = partial(write_adapter, adapter, weights)
    else:
        weights = engine.module.collect_weights()
        save = partial(_save_whole, student, weights, trust_remote_code)
    if dist.get_rank() == 0:
        try:
            _write_model(save, tokenizer, target)
        except Exception as failure:  # safetensors has errors of its own for a full disk
            error = f"--export {target}: cannot be written ({type(failure).__name__}: {failure})"
    return _of_rank_0(error)


def _save_whole(student, weights, trust_remote_code, folder):
    """Write a whole model in Hugging Face format.

    Args:
        student: model of the weights, whose own tensors may be shards.
        weights: {name: whole tensor} of it.
    """
    if adapter_of(student):
        weights = merged_weights(student, weights)
    config = student.config
    config.use_cache = True  # training switched it off
    config.dtype = next(iter(weights.values())).dtype
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    # Not strict: a tied head is named once, and the file keeps it so.
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)


def _of_rank_0(value):
    """Return the value of rank 0 on all ranks, once it has come so far."""
    return values_of_ranks(value)[0]


def _write_model(save, tokenizer, export):
    """Write an export, which appears when it is complete.

    Args:
        save: function that writes the weights to a folder.
    """
    target = _real_path(export)
    scratch = scratch_of(target)
    shutil.rmtree(scratch, ignore_errors=True)
    save(scratch)
    tokenizer.save_pretrained(scratch)
    write_atomically(scratch / MANIFEST, json.dumps({"files": files_in(scratch)}, indent=1))
    sync_tree(scratch)
    _check_replaceable(export)  # again: something may have been put there meanwhile
    replace_folder(scratch, target, target.with_name(f".{target.name}.before"))


def export_projection(engine, learned_projection, target):
    """Write a learned projection as a projection file; all ranks take part.

    Args:
        engine: whose module holds the scores as `.projection_scores`.
        learned_projection: whose tables(scores) are what the file holds.
    Returns:
        Why it could not be written, the same on all ranks; None: it was.
    """
    error = None
    scores = engine.module.projection_scores
    with gathered(scores):
        if dist.get_rank() == 0:
            try:
                save_atomically(learned_projection.tables(scores), target)
            except ValueError as failure:
                error = str(failure)
    return _of_rank_0(error)
