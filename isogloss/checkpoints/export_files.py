"""Write the trained student in Hugging Face format, with a model card, and a learned projection.

An export lists its files in a manifest of its own.  So only what an export wrote is ever replaced.

Tests: tests/test_export.py, tests/test_distributed.py.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig

from isogloss.checkpoints.model_card import write_card
from isogloss.checkpoints.run_identity import checkpoint_folder
from isogloss.config import configs_by_teacher
from isogloss.data.ends import write_generation
from isogloss.job.files import (
    check_shared,
    check_writable,
    files_in,
    replace_folder,
    scratch_of,
    size_and_checksum,
    sync_tree,
    write_atomically,
)
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models.parts import adapter_of
from isogloss.models.tied import untie_as_weights_do

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
        _check_on_rank_0(check_replaceable, cfg.export)  # which reads all of an earlier export
    projection = projection_path(cfg)
    if cfg.learn_projection and projection.is_dir():
        raise ValueError(f"--output_dir {cfg.output_dir}: {projection.name} is a directory "
                         "there, and learn_projection writes a file; name another directory")
    check_shared(f"--output_dir {cfg.output_dir}", checkpoint_folder(cfg))
    if cfg.export:
        _check_on_rank_0(check_writable, f"--export {cfg.export}", real_path(cfg.export).parent)
    if cfg.dump_losses:
        _check_on_rank_0(check_writable, f"--dump_losses {cfg.dump_losses}", cfg.dump_losses)


def _check_on_rank_0(check, *args):
    """Run a check on rank 0, which writes all results; all ranks raise what it raises."""
    error = None
    if dist.get_rank() == 0:
        try:
            check(*args)
        except ValueError as failure:
            error = str(failure)
    error = values_of_ranks(error)[0]
    if error:
        raise ValueError(error)


def projection_path(cfg):
    return Path(cfg.output_dir) / "projection.pt"


def real_path(path):
    return Path(os.path.realpath(os.path.expanduser(path)))


def _check_overlap(cfg):
    """Refuse to replace a model that the run reads, which may be an earlier export."""
    target = real_path(cfg.export)
    # inside of output_dir is usual
    if real_path(cfg.output_dir).is_relative_to(target):
        _refuse_overlap("--export", cfg.export, "--output_dir", cfg.output_dir)
    if target.is_relative_to(real_path(checkpoint_folder(cfg))):
        _refuse_overlap("--export", cfg.export, "the checkpoints", checkpoint_folder(cfg))
    models = [("--student", cfg.student)]
    for teacher_cfg in configs_by_teacher(cfg).values() if cfg.kd_weight else ():
        models.append(("teacher", teacher_cfg.teacher_path))
    _check_apart("--export", cfg.export, models)


def _check_apart(flag, export, models):
    """Refuse to replace one of the models that are read: pairs of a name and a path or hub id."""
    target = real_path(export)
    for name, path in models:
        if os.path.exists(os.path.expanduser(path)):  # else it is a hub id
            real = real_path(path)
            if real.is_relative_to(target) or target.is_relative_to(real):
                _refuse_overlap(flag, export, name, path)


def _refuse_overlap(flag, export, name, path):
    raise ValueError(f"{flag} {export}: would replace {name} {path} or a part of it; name "
                     "another directory")


def check_output(flag, export, models):
    """Check that a directory can be written, and replaces no model that is read for it.

    Args:
        models: (name, path or hub id) of each.
    """
    _check_apart(flag, export, models)
    check_replaceable(export, flag)
    check_writable(f"{flag} {export}", real_path(export).parent)


def check_replaceable(export, flag="--export"):
    """Check that a directory is absent, empty, or what an export wrote and nothing else."""
    target = real_path(export)
    if not os.path.lexists(target):
        return
    from isogloss.checkpoints.earlier_export import check_earlier

    check_earlier(flag, export, target)


# --- write ----------------------------------------------------------------------------------------


def export_model(engine, encoder, cfg):
    """Write the student as a Hugging Face directory, from any layout; all ranks take part.

    A student that was trained by an adapter leaves the adapter alone, as peft writes it.

    Args:
        engine: whose module holds the Hugging Face model as `.model`.
        encoder: TextEncoder of the student.
        cfg: of the run: export (a directory, replaced if it is an earlier export), merge (write
            the whole model with its adapter's products), trust_remote_code, output_dir, steps.
    Returns:
        Why it could not be written, the same on all ranks; None: it was.
    """
    error = None
    student = engine.module.model
    if adapter_of(student) and not cfg.merge:
        from isogloss.models import adapters

        names = set(adapters.names_in_file(student).values())
        weights = engine.module.collect_weights(names.__contains__)
        save = partial(adapters.write_adapter, student, weights)
    else:
        weights = engine.module.collect_weights()
        save = partial(save_whole, student, weights, cfg.trust_remote_code)
    if dist.get_rank() == 0:
        card = partial(write_card, folder=cfg.output_dir, step=cfg.steps)
        try:
            write_model(save, encoder, cfg.export, card)
        except Exception as failure:  # safetensors has errors of its own for a full disk
            reason = f"{type(failure).__name__}: {failure}"
            error = f"--export {cfg.export}: cannot be written ({reason})"
    return values_of_ranks(error)[0]


def save_whole(student, weights, trust_remote_code, folder):
    if adapter_of(student):
        from isogloss.models import adapters

        weights = adapters.merged_weights(student, weights)
    student.config.use_cache = True  # training switched it off
    model = model_of_weights(student.config, weights, trust_remote_code)
    # the student's comes as a file; what a config says may be nothing that may be saved
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)


def model_of_weights(config, weights, trust_remote_code=False):
    """Return a model of these weights, in their dtype.

    Raises:
        ValueError: some of the model's weights are not among them.
    """
    config.dtype = next(iter(weights.values())).dtype
    if hasattr(config, "quantization_config"):  # these are numbers again
        del config.quantization_config
    untie_as_weights_do(config, weights, trust_remote_code)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    # Not strict: a tied head is named once, and the file keeps it so.
    model.load_state_dict(weights, strict=False)
    loaded = {id(parameter) for name, parameter in
              model.named_parameters(remove_duplicate=False) if name in weights}
    for name, parameter in model.named_parameters():
        if id(parameter) not in loaded:
            raise ValueError(f"the checkpoint has no weight {name}, which the student has; it "
                             "belongs to another model")
    return model


def write_model(save, encoder, export, write_card, flag="--export"):
    """Write an export, which appears when it is complete."""
    def save_all(folder):
        save(folder)
        encoder.tokenizer.save_pretrained(folder)
        write_generation(encoder, folder)
        write_card(folder)

    write_folder(save_all, export, flag)


def write_folder(save, export, flag):
    """Write a model's directory, which appears when it is complete, with a manifest of its files.

    Args:
        save: function of a directory to write into, which is not there yet.
        export, flag: the directory, and the flag that names it; see `check_replaceable`.
    """
    target = real_path(export)
    scratch = scratch_of(target)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        save(scratch)
        write_manifest(scratch)
        sync_tree(scratch)
        check_replaceable(export, flag)  # again: something may have been put there meanwhile
        replace_folder(scratch, target, target.with_name(f".{target.name}.before"))
    except BaseException:  # half a model would fill a disk that is full already
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_manifest(folder):
    """List all files of an export in it, and let those read them who may read the list."""
    files = {name: size_and_checksum(folder / name) for name in files_in(folder)}
    write_atomically(folder / MANIFEST, json.dumps({"files": files}, indent=1))
    mode = (folder / MANIFEST).stat().st_mode
    for name in files:
        (folder / name).chmod(mode)  # safetensors lets the owner alone read its files
