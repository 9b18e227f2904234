"""State what has to be the same when a run resumes, and what a checkpoint depends on besides."""

import json
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from isogloss.config import Config, configs_by_teacher
from isogloss.flags.model_names import without_secrets
from isogloss.flags.parse import flags_that, is_table
from isogloss.student.ds_config import (
    BATCH_KEYS,
    RESUMABLE_KEYS,
    batch_sizes,
    read_ds_config,
    schedule_lengths,
)


def checkpoint_folder(cfg):
    return Path(cfg.output_dir) / "checkpoints"


def _batch_sizes(cfg, ds_config):
    # ranks of a sequence group or of a pipeline read the same samples
    num_readers = dist.get_world_size() // cfg.ranks_per_reader
    return batch_sizes(ds_config, num_readers, cfg.ds_config)


def run_identity(cfg):
    """Return what has to be the same when a run resumes, or its next loss would be another.

    "schedule" is the length of the schedule in steps, where "auto" is replaced by its value: with
    other --steps the learning rate of the next step would be another.
    """
    identity = {}
    free = flags_that(Config, "free")
    for name, value in asdict(cfg).items():
        if name not in free:
            identity[name] = value
    if is_table(cfg.data):  # however it is written
        identity["data"] = json.loads(cfg.data)
    identity["teacher"] = cfg.teacher_kind.lasting_name or cfg.teacher
    if cfg.teachers:
        from isogloss.several_teachers import lasting_entries

        identity["teachers"] = lasting_entries(cfg, configs_by_teacher(cfg).values(), free)
    ds_config = read_ds_config(cfg.ds_config)
    # how a step is cut into micro-batches may change, how many samples it has may not
    identity["samples_per_step"] = _batch_sizes(cfg, ds_config).train_batch_size
    identity["schedule"] = {}
    params = ds_config.get("scheduler", {}).get("params", {})
    for key, value in schedule_lengths(cfg).items():
        if key in params:
            stated = params.pop(key)
            identity["schedule"][key] = value if stated == "auto" else stated
    identity["ds_config"] = {}
    for key, value in ds_config.items():
        if key not in (*BATCH_KEYS, *RESUMABLE_KEYS):
            identity["ds_config"][key] = value
    return without_secrets(identity)  # a checkpoint holds it, and a signature may change


def expected_identity(cfg):
    """Return the part of the identity that a checkpoint must have for this run to resume from it.

    With --extend_schedule that is all but the length of the schedule.
    """
    identity = run_identity(cfg)
    if cfg.extend_schedule:
        del identity["schedule"]
    return identity


def run_layout(cfg):
    """Return what a checkpoint depends on beside the run's identity."""
    ds_config = read_ds_config(cfg.ds_config)
    layout = {
        "ranks": dist.get_world_size(),
        "sequence_parallel": cfg.sequence_parallel,
        "zero_stage": ds_config.get("zero_optimization", {}).get("stage", 0),
        "micro_batch": _batch_sizes(cfg, ds_config).micro_batch_size,
    }
    if cfg.pipeline_parallel > 1:  # checkpoints of earlier versions lack the key
        layout["pipeline_parallel"] = cfg.pipeline_parallel
    return layout
