"""The bytes that the calculator expects are those that ranks of a real job hold, part by part."""

import pytest
import torch

import ranks
from benchmarks.memory import flags_of, measure, prepare
from conftest import asset
from isogloss import distill
from isogloss.config import Config
from isogloss.plan import plan

# Layouts of benchmarks/memory.py, each with one of the stages.
MEASURED = "zero 0", "zero 1, bf16", "zero 2, bf16", "zero 3"


def parts_of(state):
    """Return {part: bytes} of this rank; a storage counts for the first part that has it."""
    seen = set()

    def new_bytes(tensors):
        total = 0
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    weights = list(state.engine.module.parameters())
    shards = [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    for name in ("averaged_gradients", "grad_partitions_flat_buffer"):  # of stages 1 and 2, of 3
        gradients += tensors_in(getattr(state.engine.optimizer, name, None))
    states = state.engine.basic_optimizer.state  # {float32 weight: its moments}
    [teacher] = state.teachers
    return {"weights": new_bytes(weights + shards), "gradients": new_bytes(gradients),
            "optimizer": new_bytes([*states, *tensors_in(list(states.values()))]),
            "teacher": new_bytes(teacher.source.runner.parameters())}


def tensors_in(value):
    """List the tensors of nested lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (dict, list)):
        return []
    values = value.values() if isinstance(value, dict) else value
    return [tensor for inner in values for tensor in tensors_in(inner)]


def measured(flags):
    """Return {layout: what `measure` returns, and the most of every part after a backward pass}."""
    answers = {}
    train_step = distill.train_step

    def watched_step(state, micro_batches):
        take = type(state.engine).step

        def step():  # once for each micro-batch
            for part, size in parts_of(state).items():
                most[part] = max(size, most.get(part, 0))
            take(state.engine)

        state.engine.step = step
        return train_step(state, micro_batches)

    distill.train_step = watched_step
    for name in flags:
        most = {}
        answers[name] = measure(flags[name]) | most
    return answers


@pytest.mark.slow
def test_what_is_expected_is_what_jobs_allocate(tmp_path):
    """Part by part, of a student of 16 M weights with a teacher of 20 M."""
    base = prepare(asset(), tmp_path, hidden=384, layers=8)
    flags = {name: flags_of(name, base, tmp_path, length=96) for name in MEASURED}
    for name, result in ranks.run(2, measured, flags)[0].items():
        expected = plan(Config(**flags[name]), num_ranks=2, on_gpu=False)
        for part in ("weights", "gradients", "optimizer"):
            value = expected.stays.get(part, 0) + expected.backward.get(part, 0)
            assert value == pytest.approx(result[part], rel=0.05), (name, part)
        teacher = expected.stays[f"weights of {base['teacher']}"]
        assert teacher == pytest.approx(result["teacher"], rel=0.01), name
        assert expected.state == pytest.approx(result["state"], rel=0.03), name
        assert expected.peak == pytest.approx(result["peak"], rel=0.1), name
