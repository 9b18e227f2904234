"""Read --teachers: the Config of each teacher, and which rows it reads.

Tests: tests/test_config.py, tests/test_wrong_flags.py.
"""

from dataclasses import replace
from pathlib import Path

from isogloss.flags.lists import check_entry, read_entries
from isogloss.flags.model_names import without_secrets
from isogloss.flags.other_names import MOVED
from isogloss.flags.parse import flags_that
from isogloss.objective.loss_table import LOSSES


def loss_flags():
    """List the flags that losses read, in the order of the table, each once."""
    return list(dict.fromkeys(sum((spec.flags for spec in LOSSES.values()), ())))


def teacher_keys(kind):
    """Return {key of an entry of --teachers: the flag of Config, `kind`, that it stands for}."""
    keys = {key: name for name, key in flags_that(kind, "key").items()}
    return keys | {name: name for name in loss_flags()}  # those of a plugin's loss, too


def teacher_entries(cfg):
    """Return the entries of --teachers."""
    return read_entries("teachers", cfg.teachers, '[{"model": "A"}, {"model": "B"}]')


def teacher_name(entry):
    """Return what metrics call the teacher of an entry of --teachers."""
    path = without_secrets(str(entry.get("model") or entry.get("cache", "")))
    return entry.get("name", Path(path).name)


def routes_of_entries(cfg):
    """Return {name: its routes, or None}; see `config.routes_by_teacher`."""
    return {teacher_name(entry): entry.get("routes") for entry in teacher_entries(cfg)}


def configs_of_entries(cfg):
    """Return {name: Config of a run with this teacher alone}; see `config.configs_by_teacher`."""
    entries = teacher_entries(cfg)
    if cfg.teacher or cfg.teacher_cache or cfg.teacher_tokenizer:
        raise ValueError("--teachers: cannot be combined with --teacher, --teacher_cache or "
                         "--teacher_tokenizer; drop one")
    if cfg.has_routes and cfg.teacher_weights != "fixed":
        raise ValueError(f"--route_key with --teacher_weights {cfg.teacher_weights}: both choose "
                         "among teachers; drop one")
    keys = teacher_keys(type(cfg))
    configs = {}
    for entry in entries:
        name = teacher_name(entry)
        for key in MOVED.keys() & entry:
            raise ValueError(f"--teachers: unknown key {key!r}; it is {MOVED[key][1]}")
        check_entry("teachers", entry, name, ("name", "weight", "routes", *keys), configs)
        _check_teacher(cfg, entry, name)
        flags = {keys[key]: value for key, value in entry.items() if key in keys}
        if entry.get("model") not in ("self", cfg.student):  # the flag is of those that are
            flags.setdefault("teacher_ema", 1.0)
        if flags.get("loss", cfg.loss) != cfg.loss:  # the options are of the run's loss
            flags.setdefault("loss_options", "")
        # replace() runs the checks of Config again, with this teacher's values
        weight = cfg.kd_weight * entry.get("weight", 1.0)
        configs[name] = replace(cfg, teachers="", route_key="", kd_weight=weight, **flags)
        if configs[name].learn_projection:
            raise ValueError(f"--teachers: learn_projection of {name}: is for the only teacher of "
                             "a run; leave it out")
    if cfg.teacher_ema < 1 and all(each.teacher_ema == 1 for each in configs.values()):
        raise ValueError(f"--teacher_ema {cfg.teacher_ema}: follows the student, and no teacher of "
                         '--teachers does; add {"model": "self"}, or leave it out')
    return configs


def _check_teacher(cfg, entry, name):
    """Raise a ValueError for an entry of --teachers without a model, or with wrong routes."""
    if not ("model" in entry or "cache" in entry):
        raise ValueError("--teachers: an entry names no model; expected "
                         '{"model": "hub id or directory"}, or {"cache": "directory"}')
    routes = entry.get("routes")
    if routes is not None and not (isinstance(routes, list) and cfg.has_routes):
        raise ValueError(f"--teachers: routes {routes!r} of {name}: expected a list of values of a "
                         "column that --route_key names, or of the routes of a mixture")


def lasting_entries(cfg, configs, free):
    """Return the entries of --teachers without what may change when a run resumes.

    Args:
        configs: Config of each teacher; free: names of the flags that may change.
    """
    flags = teacher_keys(type(cfg))
    entries = []
    for entry, teacher_cfg in zip(teacher_entries(cfg), configs):
        kept = {key: value for key, value in entry.items() if flags.get(key) not in free}
        if "model" in kept:
            kept["model"] = teacher_cfg.teacher_kind.lasting_name or kept["model"]
        entries.append(kept)
    return entries
