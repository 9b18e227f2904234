"""ds_config.py: batch sizes follow from their definition; every "auto" is filled or named."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT
from isogloss.student import ds_config
from isogloss.student.ds_values import REFUSED, SECTIONS, SWITCHES

# None: the key is absent.  3 and 8 do not divide each other; 12 has several factorizations.
CHOICES = None, "auto", 1, 2, 3, 4, 8, 12


def flags(**changes):
    values = dict(ds_config="ds.json", learning_rate=1e-3, log_comms=False, sequence_parallel=1,
                  steps=100)
    values |= changes
    return SimpleNamespace(**values, ranks_per_reader=values["sequence_parallel"])


def resolve(config, num_ranks=4, hidden_size=64, bf16=False, **changes):
    return ds_config.resolve_ds_config(config, flags(**changes), num_ranks, hidden_size, bf16)


def write(folder, text):
    path = folder / "ds.json"
    path.write_text(text)
    return path


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(ds_config.DS_KEYS))
def test_a_known_key_is_read_or_refused_with_advice(tmp_path, key):
    value = {} if key in SECTIONS else 1
    if key not in REFUSED:
        value = {"gradient_allreduce_op": "mean"}.get(key, False if key in SWITCHES else value)
    config = {"train_batch_size": 8, key: value}
    path = write(tmp_path, json.dumps(config))
    if key not in REFUSED:
        assert ds_config.read_ds_config(path) == config
        return
    with pytest.raises(ValueError, match=f"{key} is not for distill.py: .*{REFUSED[key][-9:]}"):
        ds_config.read_ds_config(path)


@pytest.mark.parametrize("text, message", [
    ('{"gradient_cliping": 1}', "did you mean 'gradient_clipping'"),
    ('{"optimiser": 1}', r"unknown key 'optimiser'; did you mean 'optimizer'\?$"),
    ('{"qqq": 1}', r"unknown key 'qqq'$"),  # without a guess
    ("[1]", "expected a JSON object .* got list"),
    ('"auto"', "expected a JSON object .* got str"),
    ("{stage: 2}", r"not valid JSON \(line 1, column 2\)"),
])
def test_a_file_that_is_no_ds_config_or_missing_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        ds_config.read_ds_config(write(tmp_path, text))
    with pytest.raises(ValueError, match="no such file; ready-made ones in ds_configs/: pipeline"):
        ds_config.read_ds_config(tmp_path / "nowhere.json")


# --- batch sizes ----------------------------------------------------------------------------------


def expected_sizes(total, micro, steps, num_ranks):
    """List the sizes that agree with what is given, by search over total = ranks * micro * steps.

    Where several do and the accumulation steps are not given, these are 1.
    """
    solutions = []
    # CHOICES end at 12, so no factor of a total exceeds it.
    for some_micro in range(1, 13):
        for some_steps in range(1, 13):
            whole = num_ranks * some_micro * some_steps
            sizes = ds_config.BatchSizes(whole, some_micro, some_steps)
            given = zip((total, micro, steps), sizes)
            if all(value is None or value == size for value, size in given):
                solutions.append(sizes)
    if steps is None and len(solutions) > 1:
        solutions = [sizes for sizes in solutions if sizes.grad_accum_steps == 1]
    return solutions


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("total", CHOICES)
@pytest.mark.parametrize("micro", CHOICES)
def test_batch_sizes_follow_from_their_definition(total, micro, num_ranks):
    """Every combination of given, "auto" and absent keys; what does not divide is an error."""
    for steps in CHOICES:
        given = dict(zip(ds_config.BATCH_KEYS, (total, micro, steps)))
        config = {key: value for key, value in given.items() if value is not None}
        # The oracle knows no "auto": it means the same as an absent key.
        values = [None if value == "auto" else value for value in given.values()]
        solutions = expected_sizes(*values, num_ranks)
        message = f"is not {num_ranks} ranks x micro batch"
        if values[0] is None and values[1] is None:
            solutions = []
            message = "neither train_batch_size nor"
        if solutions:
            assert [ds_config.batch_sizes(config, num_ranks, "ds.json")] == solutions, config
            continue
        with pytest.raises(ValueError, match=message):
            ds_config.batch_sizes(config, num_ranks, "ds.json")


@pytest.mark.parametrize("key", ds_config.BATCH_KEYS)
@pytest.mark.parametrize("value", [0, -4, 2.0, True, "8", [8]])
def test_batch_sizes_that_are_not_positive_whole_numbers_are_rejected(key, value):
    config = {"train_batch_size": 8} | {key: value}
    with pytest.raises(ValueError, match=f"{key} is .*expected a whole number of 1 or more"):
        ds_config.batch_sizes(config, 2, "ds.json")


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_sequence_parallelism_multiplies_the_batch_of_the_engine_alone(shards):
    """Samples in a step do not depend on the number of shards."""
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}
    resolved = resolve(config, num_ranks=4, sequence_parallel=shards)
    total, micro, steps = [resolved[key] for key in ds_config.BATCH_KEYS]
    assert total == 4 * micro * steps  # DeepSpeed's own check, over all ranks
    assert total // shards == 12
    assert micro == 3


# --- "auto" ---------------------------------------------------------------------------------------


def test_every_auto_of_the_ready_made_files_is_filled():
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        resolved = resolve(ds_config.read_ds_config(path), ds_config=str(path))
        assert '"auto"' not in json.dumps(resolved), path.name
        # of 16 on 4 ranks; in one step, but for a pipeline, which needs several
        size = 1 if path.name == "pipeline.json" else 4
        assert resolved["train_micro_batch_size_per_gpu"] == size
        assert resolved["gradient_accumulation_steps"] == 4 // size
        assert resolved["optimizer"]["params"]["lr"] == 1e-3


def test_a_home_directory_is_expanded_and_the_optimizer_is_the_adamw_of_pytorch(monkeypatch):
    monkeypatch.setenv("HOME", "/a")
    board = {"enabled": True, "output_path": "~/b", "job_name": "~c"}
    resolved = resolve({"train_batch_size": 8, "tensorboard": board})
    assert resolved["tensorboard"] == board | {"output_path": "/a/b"}
    params = {"torch_adam": True, "lr": 1e-3}
    assert resolved["optimizer"] == {"type": "AdamW", "params": params}


def test_auto_values_are_those_of_the_readme():
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size",
             "stage3_param_persistence_threshold")
    rates = "warmup_max_lr", "total_num_steps", "warmup_num_steps"
    schedule = {"cos_min_ratio": 0.1} | dict.fromkeys(rates, "auto")
    config = {"train_batch_size": 8, "bf16": {"enabled": "auto"},
              "zero_optimization": {"stage": 3} | dict.fromkeys(sizes, "auto"),
              "scheduler": {"type": "WarmupCosineLR", "params": schedule}}
    resolved = resolve(config, hidden_size=2048, bf16=True, steps=1000)
    assert resolved["zero_optimization"] == {
        "stage": 3, "reduce_bucket_size": 2048**2,
        "stage3_prefetch_bucket_size": int(0.9 * 2048**2),
        "stage3_param_persistence_threshold": 20480}
    assert resolved["scheduler"]["params"] == {
        "warmup_max_lr": 1e-3, "total_num_steps": 1000, "warmup_num_steps": 50,
        "cos_min_ratio": 0.1}
    assert resolved["bf16"] == {"enabled": True}

    # A narrow model meets the lower bounds, a short run warms up for one step.
    narrow = resolve(config, hidden_size=64, bf16=False, steps=3)
    assert narrow["zero_optimization"]["reduce_bucket_size"] == 2**20
    assert narrow["zero_optimization"]["stage3_prefetch_bucket_size"] == 2**20
    assert narrow["scheduler"]["params"]["warmup_num_steps"] == 1
    assert narrow["bf16"] == {"enabled": False}


@pytest.mark.parametrize("section, name", [
    ({"gradient_clipping": "auto"}, "gradient_clipping"),
    ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
    ({"optimizer": {"params": {"betas": "auto"}}}, "optimizer.params.betas"),
])
def test_any_other_auto_is_rejected_by_its_dotted_name(section, name):
    with pytest.raises(ValueError, match=f'{name} is "auto", which is filled only in '):
        resolve({"train_batch_size": 8} | section)


# --- flags ----------------------------------------------------------------------------------------


def test_the_learning_rate_is_stated_once():
    """By the flag or by the file; neither overrides the other in silence."""
    stated = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    with pytest.raises(ValueError, match=r"_rate 0\.001: ds\.json says lr 0\.0003; drop one"):
        resolve(stated)
    # 0 is the flag's default and stands for "not given".
    with pytest.raises(ValueError, match=r"--learning_rate is missing: ds\.json leaves"):
        resolve({"train_batch_size": 8}, learning_rate=0.0)

    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    resolved = resolve(stated | {"scheduler": schedule}, learning_rate=0.0)
    assert resolved["optimizer"]["params"]["lr"] == 3e-4
    assert resolved["scheduler"]["params"]["warmup_max_lr"] == 3e-4


def test_the_flag_turns_the_collectives_log_on_and_keeps_its_settings():
    """The file that was read is left as it is: the identity of a run is computed from it."""
    config = {"train_batch_size": 8, "comms_logger": {"enabled": False, "verbose": True}}
    before = json.dumps(config)
    assert resolve(config)["comms_logger"]["enabled"] is False
    assert resolve(config, log_comms=True)["comms_logger"] == {"enabled": True, "verbose": True}
    assert json.dumps(config) == before


# --- the lists of keys ----------------------------------------------------------------------------


def test_the_module_and_what_is_copied_to_align_import_no_torch():
    # Tools and data workers can read a ds_config without paying for that import.
    script = ("import sys, isogloss.align, isogloss.student.ds_config; "
              "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))")
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
