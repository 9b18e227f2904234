"""Steps that are not finite: they change nothing, are counted, and end a job that takes several."""

import itertools
import json
import math
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ranks
from isogloss import distill, doors
from isogloss.inputs import build_collator
from isogloss.student.finite import has_finite_state
from isogloss.student.options.skipped_steps import loss_scale_can_fall
from jobs import ds_config, job_for, losses_of, run_distill, write_corpus, write_to_file
from steps import flags_for, flags_of

# --- one step, in every ZeRO stage and precision --------------------------------------------------

BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
           "zero_force_ds_cpu_optimizer": False}
KINDS = {  # name: (ZeRO stage, more of the ds_config)
    "zero0": (0, {}), "zero1": (1, {}), "zero2": (2, {}), "zero3": (3, {}),
    "bf16_zero0": (0, BF16), "bf16_zero2": (2, BF16), "bf16_zero3": (3, BF16),
    "bf16_accumulated": (1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "offload": (2, OFFLOAD), "unclipped": (0, {"gradient_clipping": 0.0})}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}}


def state_of(engine):
    """Return copies of all numbers that a step may change on this rank."""
    tensors = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:
        tensors += group["params"]
    for state in inner.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in tensors] + [torch.tensor(engine.get_lr())]


def are_equal(first, second):
    return all(map(torch.equal, first, second)) and len(first) == len(second)


def spoil_teacher(state, tokens=slice(None)):
    """Let the teacher say NaN for all tokens, or for one, which no sample has."""
    weight = state.teachers[0].source.head.weight_VH.detach()[tokens]
    before = weight.clone()
    weight.fill_(math.nan)
    return lambda: weight.copy_(before)


def spoil_loss(state):
    """Let the loss of this rank be infinite, and its gradient finite."""
    forward = state.engine.module.forward

    def infinite(*args):
        loss, sums = forward(*args)
        return loss + math.inf, sums + math.inf

    state.engine.module.forward = infinite
    return lambda: setattr(state.engine.module, "forward", forward)


def spoil_gradient(state):
    """Let every loss be finite, and the gradient of this rank infinite."""
    def overflow(module, inputs, output):
        output.register_hook(lambda gradient: gradient * math.inf)

    embeddings = state.engine.module.model.get_input_embeddings()
    return embeddings.register_forward_hook(overflow).remove


ON_EVERY_RANK = "one token"
SPOILERS = {"teacher": spoil_teacher, "loss": spoil_loss, "gradient": spoil_gradient,
            ON_EVERY_RANK: partial(spoil_teacher, tokens=40)}
CAUSES = {"teacher": "the distillation loss of teacher", "loss": "the cross-entropy and the dist",
          "gradient": "the gradient (every", ON_EVERY_RANK: "the distillation loss of teacher"}


def skip_a_step(flags, texts, configs):
    """Return for each kind and spoiler what a step did that is not finite on rank 1 alone.

    But for the last spoiler; its kind has a loss that keeps some columns of the teacher's.
    """
    reports = {}
    for number, (kind, path) in enumerate(configs.items()):
        of_loss = flags_of("piece_kl" if number else "projection_kl")
        changes = flags | of_loss | {"ds_config": path}
        # a run in which the optimizer did nothing in step 2
        other, batches = job_and_batches(changes, texts)
        distill.train_step(other, batches[:2])
        distill.train_step(other, batches[4:])
        name = list(SPOILERS)[number % 3]
        for spoiler in SPOILERS if kind == "zero0" else [name]:
            reports[kind, spoiler] = skip_a_step_of(changes, texts, spoiler, other)
    return reports


def job_and_batches(flags, texts):
    state, inputs = job_for(flags)
    doors.prepare(state, inputs, None)
    collator = build_collator(state.cfg, inputs, state.device, math.inf)
    firsts = range(dist.get_rank(), 12, 2)
    return state, [collator(texts[first : first + 2]) for first in firsts]


def skip_a_step_of(flags, texts, spoiler, other):
    state, batches = job_and_batches(flags, texts)
    distill.train_step(state, batches[:2])
    before = state_of(state.engine)
    is_spoiled = dist.get_rank() == 1 or spoiler == ON_EVERY_RANK
    repair = SPOILERS[spoiler](state) if is_spoiled else lambda: None
    metrics = distill.train_step(state, batches[2:4]).metrics()
    repair()
    report = {"skipped": are_equal(before, state_of(state.engine)),
              "bad_steps": state.bad_steps.count, "causes": state.bad_steps.causes,
              "norm": metrics["grad_norm"], "count": metrics["skipped_steps"]}
    distill.train_step(state, batches[4:])
    return report | {"moved": not are_equal(before, state_of(state.engine)),
                     "same": are_equal(state_of(other.engine), state_of(state.engine)),
                     "after": state.bad_steps.count, "scales": dict(state.scales)}


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(models, texts, tmp_path):
    configs = {}
    for kind, (stage, more) in KINDS.items():
        configs[kind] = ds_config(tmp_path / f"{kind}.json", stage, 2, 2, scheduler=SCHEDULE,
                                  **more)
    flags = flags_for(models, texts, tmp_path, max_length=60, dynamic_scale=True)
    for reports in ranks.run(2, skip_a_step, flags, texts, configs):
        assert len(reports) == len(KINDS) + 3
        for (kind, spoiler), report in reports.items():
            case = kind, spoiler, report
            assert report["skipped"] and report["moved"] and report["same"], case
            assert report["bad_steps"] == report["count"] == 1, case
            assert report["causes"].startswith(CAUSES[spoiler]), case
            assert not math.isfinite(report["norm"]), case
            assert report["after"] == 0, case
            assert all(map(math.isfinite, report["scales"].values())), case


def test_an_overflow_is_routine_until_the_loss_scale_is_at_its_minimum():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    scaler = DynamicLossScaler(init_scale=4, scale_window=9, min_scale=1, delayed_shift=1,
                               consecutive_hysteresis=False, raise_error_at_min_scale=False)
    engine = SimpleNamespace(torch_autocast_z0_gradscaler=None,
                             optimizer=SimpleNamespace(loss_scaler=scaler))
    routine = []
    for scaler.cur_scale in (4, 2, 1):
        routine.append(loss_scale_can_fall(engine))
    assert routine == [True, True, False]
    engine.optimizer.loss_scaler = LossScaler(scale=1.0)  # of float32 and bf16
    assert not loss_scale_can_fall(engine)


def test_weights_and_optimizer_state_are_looked_through():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    engine = SimpleNamespace(module=model, optimizer=optimizer)
    assert has_finite_state(engine)
    for state in optimizer.state.values():
        for tensor in (state["exp_avg"], state["exp_avg_sq"]):
            before = tensor.clone()
            tensor.view(-1)[-1] = math.inf
            assert not has_finite_state(engine)
            tensor.copy_(before)
    assert has_finite_state(engine)
    model.bias.data[1] = math.nan
    assert not has_finite_state(engine)


def states_from_spoiled_memory(flags_of_jobs, texts):
    """Return (parameters with padding, the state is finite) after a step of each job.

    Memory that nobody has written to holds NaN.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    reports = []
    for flags in flags_of_jobs:
        state, inputs = job_for(flags)
        batch = build_collator(state.cfg, inputs, state.device, math.inf)(texts)
        distill.train_step(state, [batch])
        padded = sum(bool(p.padding_size()) for p in state.engine.module.parameters())
        reports.append((padded, has_finite_state(state.engine)))
    return reports


@pytest.mark.slow
def test_what_fills_up_a_shard_is_finite(models, texts, tmp_path):
    """Three ranks do not divide a power of 2; Adafactor takes a norm of all that a shard holds."""
    flags = flags_for(models, texts, tmp_path, max_length=60)
    adafactor = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3, "weight_decay": 0.1}}}
    jobs = [flags | {"ds_config": ds_config(tmp_path / "adamw.json", 3, 2, 1), "lora_r": 2},
            flags | {"ds_config": ds_config(tmp_path / "adafactor.json", 3, 2, 1,
                                            zero_allow_untested_optimizer=True,
                                            **BF16, **adafactor)}]
    for reports in ranks.run(3, states_from_spoiled_memory, jobs, texts[:2]):
        for padded, is_finite in reports:
            assert padded and is_finite, reports


# --- whole jobs -----------------------------------------------------------------------------------


def run_spoiled(runs, path):
    """Run [(argv, {step: what happens before it on rank 1})]; return the exit codes."""
    write_to_file(path)
    codes = []
    train_step = distill.train_step
    for argv, moments in runs:
        distill.train_step = spoiled_steps(train_step, moments)
        codes += run_distill([argv])
    return codes


def spoiled_steps(train_step, moments):
    numbers = itertools.count(1)

    def step_once(state, micro_batches):
        moment = moments.get(next(numbers)) if dist.get_rank() == 1 else None
        if moment == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        repair = spoil_teacher(state) if moment in ("teacher", "signal") else lambda: None
        report = train_step(state, micro_batches)
        repair()
        if moment == "weights":
            inner = getattr(state.engine.optimizer, "optimizer", state.engine.optimizer)
            next(iter(inner.state.values()))["exp_avg"][0] = math.nan
        return report

    return step_once


@pytest.mark.slow
def test_a_job_ends_after_some_bad_steps_in_a_row(models, texts, tmp_path):
    """One line says why; the last good checkpoint stays, and the run goes on from it."""
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", "--steps=7", "--save_every=1",
            f"--data={write_corpus(tmp_path, texts, 30)}", "--max_length=60",
            "--keep_checkpoints=1", "--num_workers=0"]
    good, ends, rare, late, stopped, spoiled, unsaved = (
        tmp_path / name
        for name in ("good", "ends", "rare", "late", "stopped", "spoiled", "unsaved"))
    zero0 = [*argv, f"--ds_config={ds_config(tmp_path / '0.json', 0, 2, 1)}"]
    zero2 = [*argv, f"--ds_config={ds_config(tmp_path / '2.json', 2, 2, 1)}"]
    bad = dict.fromkeys(range(4, 8), "teacher")
    export = tmp_path / "export"
    runs = [
        ([*zero0, f"--output_dir={good}"], {}),
        ([*zero0, f"--output_dir={ends}", f"--export={export}"], bad),
        ([*zero0, f"--output_dir={ends}"], {}),  # goes on
        ([*zero2, f"--output_dir={rare}"], {2: "teacher", 4: "teacher", 5: "teacher"}),
        ([*zero2, f"--output_dir={late}", "--save_every=0", "--max_bad_steps=1"], bad),
        ([*zero2, f"--output_dir={stopped}"], {5: "teacher", 6: "signal"}),
        ([*zero2, f"--output_dir={spoiled}"], {3: "weights"}),
        ([*zero2, f"--output_dir={unsaved}", "--save_every=0", f"--export={export}"],
         {7: "weights"}),
    ]
    codes = ranks.run(2, run_spoiled, runs, str(tmp_path / "output"))
    assert codes == [[0, 1, 0, 0, 1, 143, 1, 1]] * 2
    lines = (tmp_path / "output0").read_text().splitlines()
    lines = [line for line in lines if line.startswith("distill.py: ")]
    assert len(lines) == 4 and "distill.py" not in (tmp_path / "output1").read_text()
    for words in ("steps 4 to 6", f"not finite: the distillation loss of teacher {models[1]};",
                  f"checkpoint is {ends / 'checkpoints' / 'step_0000003'};"):
        assert words in lines[0]
    assert "step 4 skipped" in lines[1] and f"{late / 'checkpoints' / 'step_0000003'};" in lines[1]
    assert "step 3: the weights or" in lines[2]
    assert f"{spoiled / 'checkpoints' / 'step_0000002'};" in lines[2]
    assert "step 7: the weights or" in lines[3] and "there is no checkpoint" in lines[3]
    assert not export.exists()

    def checkpoints_of(output):
        return sorted(path.name for path in (output / "checkpoints").glob("step_*"))

    assert losses_of(ends) == losses_of(good)
    # by a reader that takes JSON alone
    steps = [json.loads(text, parse_constant=pytest.fail)
             for text in (rare / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_steps"] for line in steps] == [0, 1, 1, 2, 3, 3, 3]
    for line in steps:
        is_bad = line["step"] in (2, 4, 5)
        assert (line["kd"] is None) == (line["loss"] is None) == is_bad
        assert (line["grad_norm"] is None) == is_bad
        assert math.isfinite(line["ce"])
    assert checkpoints_of(late) == ["step_0000003"]
    assert checkpoints_of(stopped) == ["step_0000004"]
    assert checkpoints_of(spoiled) == ["step_0000002"]
    assert checkpoints_of(rare) == ["step_0000007"]
