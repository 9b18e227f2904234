"""ds_config.py: batch sizes follow from their definition; every "auto" is filled or named."""

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import ranks
from conftest import ROOT
from isogloss import distill
from isogloss.checkpoints.convert import place_step_counters
from isogloss.student import ds_config
from isogloss.student.ds_engine import check_with_deepspeed
from isogloss.student.ds_values import REFUSED, SECTIONS, SWITCHES
from isogloss.student.options import own_adam
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
    values = dict(ds_config="ds.json", learning_rate=1e-3, wandb_project="",
                  sequence_parallel=1, steps=100)
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
    ('{"optimiser": 1}', r"unknown key 'optimiser' \(did you mean 'optimizer'\?\)$"),
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
            if "auto" in (total, micro):  # 8 of a rank, as per_device_train_batch_size
                solutions = [(8 * (values[2] or 1) * num_ranks, 8, values[2] or 1)]
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


UNFILLED = {"zero_optimization": {"stage": "auto"}, "flops_profiler": {"top_modules": "auto"}}


def test_keys_that_cannot_be_taken_are_named_together(tmp_path):
    """A user mends a file once, not key by key."""
    wrong = {"train_batch_size": 8, "monitor_config": {}, "gradient_cliping": 1, **UNFILLED,
             "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}
    with pytest.raises(ValueError) as caught:
        ds_config.read_ds_config(write(tmp_path, json.dumps(wrong)))
    line = str(caught.value)
    for words in ("unknown keys 'monitor_config', 'gradient_cliping' (did you mean 'gradient_clip",
                  "tensor_parallel is not for distill.py: the student is not cut by tensor",
                  "pipeline is not for distill.py", "write a value",
                  'zero_optimization.stage, flops_profiler.top_modules are "auto", which is filled '
                  "only in optimizer.params.lr, "):
        assert words in line
    for section, name in zip(UNFILLED, ("zero_optimization.stage", "flops_profiler.top_modules")):
        one = {"train_batch_size": 8, section: UNFILLED[section]}
        with pytest.raises(ValueError, match=f'{name} is "auto", which is filled only in '):
            ds_config.read_ds_config(write(tmp_path, json.dumps(one)))


# --- what other trainers publish ------------------------------------------------------------------

BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
     "gradient_clipping"), "auto")
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
         "min_loss_scale": 1}
HALF = {"fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": "auto"}}
SIZES = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size",
                       "stage3_param_persistence_threshold"), "auto")
ON_CPU = {"device": "cpu", "pin_memory": True}
STAYS = {"device": "none", "pin_memory": True}
ZERO_2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8,
          "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 2e8,
          "contiguous_gradients": True}
ZERO_3 = {"stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
          **SIZES, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
          "stage3_gather_16bit_weights_on_model_save": True}
AXOLOTL_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
             **SIZES, "max_live_parameters": 0, "max_reuse_distance": 0,
             "gather_16bit_weights_on_model_save": True}
AUTO_ADAM = {"type": "AdamW", "params": {
    "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True,
    "adam_w_mode": True}}
AUTO_WARMUP = {"type": "WarmupDecayLR", "params": dict.fromkeys(
    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")}
# Keys and values of the files that come with LLaMA-Factory ff6d4d1 (examples/deepspeed), axolotl
# 067b021 (deepspeed_configs), ms-swift 3602360 (swift/config), transformers 5.23 (tests/deepspeed)
# and accelerate 16cb6eb (examples/deepspeed_config_templates).
PUBLISHED = {
    "LLaMA-Factory z0": BATCH | HALF | {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": ZERO_2 | {"stage": 0, "round_robin_gradients": True}},
    "LLaMA-Factory z2 offload": BATCH | HALF | {
        "_comment": "see elsewhere", "zero_allow_untested_optimizer": True,
        "zero_optimization": ZERO_2 | {"offload_optimizer": ON_CPU, "round_robin_gradients": True}},
    "LLaMA-Factory z3": BATCH | HALF | {
        "zero_allow_untested_optimizer": True, "zero_optimization": ZERO_3},
    "axolotl zero1": BATCH | {
        "zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "auto_cast": False, **SCALE, "initial_scale_power": 32},
        "wall_clock_breakdown": False},
    "axolotl zero3 bf16": BATCH | {
        "zero_optimization": AXOLOTL_3, "bf16": {"enabled": True}, "wall_clock_breakdown": False},
    "axolotl zero3 bf16 offload": BATCH | {
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        "zero_optimization": AXOLOTL_3 | {"offload_optimizer": ON_CPU, "offload_param": ON_CPU},
        "bf16": {"enabled": True}},
    "ms-swift zero2": BATCH | HALF | {
        "zero_optimization": ZERO_2 | {"offload_optimizer": STAYS}, "steps_per_print": 2000},
    "ms-swift zero3": BATCH | HALF | {
        "zero_optimization": ZERO_3 | {
            "offload_optimizer": STAYS, "offload_param": STAYS, "zero_quantized_weights": False,
            "zero_quantized_gradients": False}, "steps_per_print": 2000},
    "transformers zero3": BATCH | HALF | {
        "optimizer": AUTO_ADAM, "scheduler": AUTO_WARMUP, "zero_optimization": ZERO_3},
    "accelerate zero3": BATCH | {
        "fp16": {"enabled": True, **SCALE}, "optimizer": AUTO_ADAM, "scheduler": AUTO_WARMUP,
        "zero_optimization": ZERO_3 | {"stage3_gather_16bit_weights_on_model_save": "auto"},
        "gradient_accumulation_steps": 1},
    "accelerate with sequence parallelism": {
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "gradient_accumulation_steps": 1, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "seq_parallel_communication_data_type": "bf16"},
}


def runs_here(config):
    """Tell whether this machine has the precision of a file: of fp16 not every CPU has it."""
    enabled = config.get("fp16", {}).get("enabled")
    return enabled is not True or get_accelerator().is_fp16_supported()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_autos_of_a_published_file_are_what_transformers_makes_of_them(tmp_path, name, on_gpu):
    """Except for the precision of bf16, the warm-up and a file of another optimizer, see README."""
    config = ds_config.read_ds_config(write(tmp_path, json.dumps(PUBLISHED[name])))
    resolved = resolve(config, num_ranks=1, hidden_size=2048, bf16=on_gpu)
    assert '"auto"' not in json.dumps(resolved)
    if runs_here(resolved):
        check_with_deepspeed(resolved, "ds.json", 1)
    expected = HfTrainerDeepSpeedConfig(PUBLISHED[name])
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=1e-3, use_cpu=True)
    expected.trainer_config_process(arguments)
    expected.mismatches.clear()  # what a file says by itself may differ
    shape = SimpleNamespace(config=SimpleNamespace(hidden_size=2048))
    expected.trainer_config_finalize(arguments, shape, 100)
    for section in (None, "fp16", "zero_optimization", "optimizer", "scheduler"):
        theirs = expected.config.get(section, {}) if section else expected.config
        ours = resolved[section] if section and theirs else resolved
        if section in ("optimizer", "scheduler") and theirs:
            theirs, ours = theirs["params"], ours["params"]
        for key, value in theirs.items():
            if not isinstance(value, dict) and key not in (
                    "_comment", "warmup_num_steps", "stage3_gather_16bit_weights_on_model_save"):
                assert ours[key] == value, (section, key)
    has_half = resolved.get("fp16", {}).get("enabled"), resolved.get("bf16", {}).get("enabled")
    if PUBLISHED[name].get("bf16") == {"enabled": "auto"}:
        assert has_half == (False, on_gpu)


def test_bf16_is_off_where_a_file_says_fp16():
    config = {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}
    assert resolve(config, bf16=True)["bf16"] == {"enabled": False}


@pytest.mark.slow
def test_published_files_train(models, texts, tmp_path):
    argv = []
    for number, config in enumerate(filter(runs_here, PUBLISHED.values())):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(config))
        argv.append([
            f"--student={models[0]}", f"--teacher={models[1]}", "--max_length=60", "--steps=2",
            f"--data={write_corpus(tmp_path, texts, 40)}", "--num_workers=0", f"--ds_config={path}",
            "--learning_rate=1e-3", "--loss_memory_mib=64", f"--output_dir={tmp_path / str(number)}"
        ])
    run_all(2, *argv)


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


def test_the_flag_turns_wandb_on_and_keeps_its_settings():
    """The file that was read is left as it is: the identity of a run is computed from it."""
    config = {"train_batch_size": 8, "wandb": {"enabled": False, "team": "t"}}
    before = json.dumps(config)
    assert resolve(config)["wandb"]["enabled"] is False
    of_team = resolve(config, wandb_project="p")
    assert of_team["wandb"] == {"enabled": True, "project": "p", "team": "t"}
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
    ("SGD", {}, {}, {}, {}),
    ("SGD", {}, {"on_gpu": True}, {}, {}),
    ("AdamW", {}, {"on_gpu": True, "has_own": True}, {}, {}),
    ("AdamW", {}, {}, {}, TORCH_ADAM),
    ("AdamW", {}, {"has_own": True}, {}, TORCH_ADAM),  # it is CUDA's
    ("AdamW", {}, {}, OFFLOADED, {}),
    ("AdamW", {"torch_adam": False}, {}, {}, {}),
    ("AdamW", {}, {"on_gpu": True}, {}, TORCH_ADAM | {"fused": True}),
    ("AdamW", BIASED, {"on_gpu": True}, {}, {}),
    ("AdamW", {}, {"on_gpu": True}, OFFLOADED, {}),
    ("AdamW", {"torch_adam": False}, {"on_gpu": True}, {}, {}),
])
def test_adam_is_pytorchs_and_fused_unless_the_file_says_how_it_is(
        name, params, device, more, added, monkeypatch):
    has_own = device.get("has_own", False)
    monkeypatch.setattr(own_adam, "has_own_adam", lambda: has_own)
    device = {"on_gpu": device.get("on_gpu", False)}
    config = {"train_batch_size": 8, "optimizer": {"type": name, "params": params}} | more
    resolved = resolve(config, device=device)
    assert resolved["optimizer"]["params"] == params | {"lr": 1e-3} | added


def test_a_lock_that_a_killed_compiler_left_is_named(tmp_path, monkeypatch):
    """DeepSpeed waits for it without an end."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {}}} | OFFLOADED
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(config)
        lock.touch()
        resolve(config | {"optimizer": {"type": "AdamW", "params": TORCH_ADAM}})
        with pytest.raises(UserWarning, match=f"{lock}: another process compiles"):
            resolve(config)


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
        # the order of sums is that of a CPU's vectors
        check_same_curve(losses_of(tmp_path / f"plain {stage}"), whole, 1e-5, 1e-6, stage)
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
