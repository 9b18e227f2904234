"""ds_config.py: batch sizes follow from their definition; every "auto" is filled or named."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import ranks
from conftest import ROOT
from isogloss import distill
from isogloss.checkpoints.convert import place_step_counters
from isogloss.student import ds_config
from isogloss.student.ds_values import REFUSED, SECTIONS, SWITCHES
from jobs import (
    check_same_curve,
    ds_config as written,
    losses_of,
    run_all,
    run_distill,
    write_corpus,
)

# None: the key is absent.  3 and 8 do not divide each other; 12 has several factorizations.
CHOICES = None, "auto", 1, 2, 3, 4, 8, 12


def flags(**changes):
    values = dict(ds_config="ds.json", learning_rate=1e-3, log_comms=False, sequence_parallel=1,
                  steps=100)
    values |= changes
    return SimpleNamespace(**values, ranks_per_reader=values["sequence_parallel"])


def resolve(config, num_ranks=4, hidden_size=64, bf16=False, device=(), **changes):
    return ds_config.resolve_ds_config(config, flags(**changes), num_ranks, hidden_size, bf16,
                                       **dict(device))


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


# --- Adam on a GPU --------------------------------------------------------------------------------

TORCH_ADAM = {"torch_adam": True}
BIASED = {"bias_correction": False}  # PyTorch's has none
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize("name, params, device, more, added", [
    ("AdamW", TORCH_ADAM, {}, {}, {}),
    ("AdamW", TORCH_ADAM, {"on_gpu": True}, {}, {"fused": True}),
    ("Adam", TORCH_ADAM, {"on_gpu": True}, OFFLOADED, {"fused": True}),
    ("AdamW", TORCH_ADAM | {"fused": False}, {"on_gpu": True}, {}, {}),
    ("AdamW", TORCH_ADAM | {"foreach": True}, {"on_gpu": True}, {}, {}),
    ("SGD", {}, {"on_gpu": True, "compiles_adam": False}, {}, {}),
    ("AdamW", {}, {"on_gpu": True}, {}, {}),
    ("AdamW", {}, {"compiles_adam": False}, {}, {}),
    ("AdamW", {}, {"on_gpu": True, "compiles_adam": False}, {}, TORCH_ADAM | {"fused": True}),
    ("AdamW", BIASED, {"on_gpu": True, "compiles_adam": False}, {}, {}),
    ("AdamW", {}, {"on_gpu": True, "compiles_adam": False}, OFFLOADED, {}),
    ("AdamW", {"torch_adam": False}, {"on_gpu": True, "compiles_adam": False}, {}, {}),
])
def test_on_a_gpu_adam_is_fused_unless_the_file_says_how_it_is(name, params, device, more, added):
    config = {"train_batch_size": 8, "optimizer": {"type": name, "params": params}} | more
    resolved = resolve(config, device=device)
    assert resolved["optimizer"]["params"] == params | {"lr": 1e-3} | added


def run_as_on_a_gpu(argv_list):
    """Run command lines whose inputs are read for a GPU, on a CPU; count fused steps of each."""
    read, step = distill.check_inputs, torch._fused_adamw_
    steps = []

    def counted(*args, **kwargs):
        steps[-1] += 1
        return step(*args, **kwargs)

    distill.check_inputs = lambda cfg, _, roles: read(cfg, torch.device("cuda"), roles)
    torch._fused_adamw_ = counted
    codes = []
    for argv in argv_list:
        steps.append(0)
        codes += run_distill([argv])
    return codes, steps


def test_a_run_with_the_fused_adam_learns_the_same_and_resumes(models, texts, tmp_path):
    """The optimizer that a GPU gets, at every kind of stage, beside the one that a CPU has."""
    flags = [f"--student={models[0]}", f"--data={write_corpus(tmp_path, texts, 20)}",
             "--kd_weight=0", "--max_length=60", "--steps=4", "--num_workers=0", "--save_every=2",
             "--loss_memory_mib=64"]
    adam = {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.03, "weight_decay": 0.5}}
    fused, plain = [], []
    for stage in (0, 2, 3):
        path = written(tmp_path / f"{stage}.json", stage, 2, 1, optimizer=adam)
        argv = [*flags, f"--ds_config={path}"]
        plain.append([*argv, f"--output_dir={tmp_path / f'plain {stage}'}"])
        fused.append([*argv, f"--output_dir={tmp_path / f'fused {stage}'}"])
    moved = [f"--resume={tmp_path / 'fused 2' / 'checkpoints' / 'step_0000002'}"]
    resumed = [[*argv, *moved, f"--output_dir={tmp_path / f'resumed {stage}'}"]
               for argv, stage in zip(fused, (0, 2, 3))]
    run_all(1, *plain)
    [(codes, steps)] = ranks.run(1, run_as_on_a_gpu, fused + resumed)
    assert codes == [0] * 6
    assert min(steps) > 0
    for stage in (0, 2, 3):
        whole = losses_of(tmp_path / f"fused {stage}")
        assert whole[-1]["loss"] < 0.95 * whole[0]["loss"]
        check_same_curve(losses_of(tmp_path / f"plain {stage}"), whole, 1e-6, 1e-6, stage)
        exact = 0 if stage == 2 else 1e-6
        check_same_curve(losses_of(tmp_path / "fused 2", 2),
                         losses_of(tmp_path / f"resumed {stage}"), exact, exact, stage)


def test_step_counters_lie_beside_the_weights_where_adam_is_fused():
    """Another layout's checkpoint brings them in the host's memory."""
    weight = torch.zeros(2)
    for is_fused in (False, True):
        adam = torch.optim.AdamW([weight], fused=is_fused)
        on_device = torch.zeros(2, device="meta")  # in the place of a GPU
        adam.state[on_device] = {"step": torch.tensor(3.0)}
        place_step_counters(SimpleNamespace(optimizer=adam))
        assert adam.state[on_device]["step"].device.type == ("meta" if is_fused else "cpu")


# --- the lists of keys ----------------------------------------------------------------------------


def test_the_module_and_what_is_copied_to_align_import_no_torch():
    # Tools and data workers can read a ds_config without paying for that import.
    script = ("import sys, isogloss.align, isogloss.student.ds_config; "
              "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))")
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
