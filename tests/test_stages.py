"""The stages of a pipeline, one after the other, are the model that they were cut from."""

import copy
import itertools
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isogloss.config import Config
from isogloss.job.several.roles import Roles
from isogloss.student.stages import (
    check_pipeline_layout,
    cut_layers,
    cut_model,
    layer_work,
    num_weights,
    plan_of,
    stage_arguments,
)

SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             initializer_range=0.2, use_cache=False)
KINDS = ["sliding_attention", "full_attention"] * 3
WINDOWS = dict(head_dim=8, sliding_window=5, layer_types=KINDS)
# {name: (model type, config)}: windows, two rotary tables, learned positions, scaled embeddings
MODELS = {
    "llama": ("llama", SMALL),
    "llama_tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 5,
                                       "layer_types": KINDS}),
    "gemma3": ("gemma3_text", SMALL | WINDOWS),
    "gemma": ("gemma", SMALL | {"head_dim": 8}),
    "granite": ("granite", SMALL | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "gpt_neox": ("gpt_neox", SMALL),
    "gpt_neo": ("gpt_neo", dict(
        vocab_size=61, hidden_size=32, num_layers=6, num_heads=4, max_position_embeddings=64,
        window_size=5, attention_types=[[["global", "local"], 3]], initializer_range=0.2)),
}


def new_model(name):
    model_type, config = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    return model.eval()


def stages_of(model, num_stages):
    plan = plan_of("a", model.config)
    spans = cut_layers(layer_work(model, plan, 61), num_stages)
    return [cut_model("a", copy.deepcopy(model), plan, spans, number)
            for number in range(num_stages)]


def run_stages(stages, ids, positions):
    hidden = ids
    for stage in stages[:-1]:
        hidden = stage.model.base_model(**stage_arguments(stage, pair(hidden, positions)))[0]
    last = stages[-1]
    return last.model(**stage_arguments(last, pair(hidden, positions))).logits


def pair(inputs, positions):
    return inputs if positions is None else (inputs, positions)


PACKED = torch.cat([torch.arange(12), torch.arange(7), torch.arange(5)]).expand(2, 24)
LEFT_PADDED = torch.cat([torch.zeros(6, dtype=torch.long), torch.arange(18)]).expand(2, 24)


@pytest.mark.parametrize("positions", [None, PACKED, LEFT_PADDED], ids=["plain", "packed", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_say_what_the_model_says(name, positions):
    """Bit for bit, forward; the gradient as well, by every weight's name."""
    model = new_model(name)
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    options = {} if positions is None else {"position_ids": positions}
    whole = model(input_ids=ids, use_cache=False, **options).logits
    whole.square().mean().backward()
    for num_stages in (2, 3):
        stages = stages_of(model, num_stages)
        logits = run_stages(stages, ids, positions)
        assert torch.equal(logits, whole)
        logits.square().mean().backward()
        gradients = {}
        for stage in stages:
            for key, parameter in stage.model.named_parameters():
                gradients[key] = gradients.get(key, 0) + parameter.grad
        expected = dict(model.named_parameters())
        assert gradients.keys() == expected.keys()
        for key, parameter in expected.items():
            error = (gradients[key] - parameter.grad).norm()
            assert error <= 1e-6 * parameter.grad.norm(), key


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt_neo"])
def test_a_stage_holds_its_own_weights_alone(name):
    """Together they have all of them once, a tied head's weight twice."""
    model = new_model(name)
    stages = stages_of(model, 3)
    total = sum(num_weights(stage.model) for stage in stages)
    head = model.get_output_embeddings().weight
    tied = model.get_input_embeddings().weight is head
    assert total == num_weights(model) + tied * head.numel()
    assert max(num_weights(stage.model) for stage in stages) < 0.6 * num_weights(model)
    assert [stage.tied for stage in stages] == [tied] * 3
    # a state dict has the names of the whole model, so that a file of one is one of the other
    names = set().union(*(stage.model.state_dict() for stage in stages))
    assert names == set(model.state_dict())


def test_cuts_balance_the_work():
    """A stage has at least one layer, or the head; no single layer moved would be better."""
    assert cut_layers([1] * 8 + [0], 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert cut_layers([1] * 8 + [2], 2) == [(0, 5), (5, 8)]
    assert cut_layers([1] * 4 + [9], 2) == [(0, 4), (4, 4)]  # nothing but the head
    for work in ([3, 1, 4, 1, 5, 9, 2, 6], [1] * 11 + [5], [7, 7, 7, 7, 7, 1]):
        for num_stages in range(2, 5):
            spans = cut_layers(work, num_stages)
            assert spans[0][0] == 0
            assert spans[-1][1] == len(work) - 1
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
            assert all(stop > first for first, stop in spans[:-1])


REFUSED = [
    ({"num_stages": 3}, "--pipeline_parallel 3: does not divide the 8 ranks"),
    ({"num_stages": 8, "num_micro_batches": 8}, "has 6 layers, and a stage needs one"),
    ({"zero_stage": 0}, "has ZeRO stage 0, and a pipeline needs stage 1"),
    ({"zero_stage": 2}, "has ZeRO stage 2, and a pipeline needs stage 1"),
    ({"zero_stage": 3}, "use ds_configs/pipeline.json"),
    ({"num_micro_batches": 2}, "2 gradient_accumulation_steps leave 60% of the stages' time"),
    ({"student_ranks": 6}, "a node has 6 ranks of the student"),
]


def check_layout(num_stages=4, zero_stage=1, num_micro_batches=4, student_ranks=8):
    """Check a layout on eight ranks, `student_ranks` of them on a node."""
    cfg = Config(student="s", teacher="t", data="d", pipeline_parallel=num_stages)
    roles = Roles("student", 0, 0, student_ranks, 2, None)
    ds_config = {"train_micro_batch_size_per_gpu": 1,
                 "gradient_accumulation_steps": num_micro_batches,
                 "zero_optimization": {"stage": zero_stage}}
    check_pipeline_layout(cfg, AutoConfig.for_model("llama", **SMALL), ds_config, 8, roles)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1])
def test_layouts_that_do_not_fit_are_refused(case):
    layout, message = case
    check_layout()
    with pytest.raises(ValueError, match=re.escape(message)):
        check_layout(**layout)


@pytest.mark.parametrize("flags, message", [
    ({"sequence_parallel": 2}, "--pipeline_parallel 2 with --sequence_parallel 2: these do"),
    ({"on_policy": 0.5, "writer": "vllm"}, "--writer vllm with --pipeline_parallel 2, whose"),
    ({"on_policy": 0.5, "writer": "a b"}, "--writer a b with --pipeline"),
])
def test_flags_that_do_not_go_with_a_pipeline_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        Config(student="s", teacher="t", data="d", pipeline_parallel=2, **flags)


def test_models_without_a_plan_are_refused():
    config = AutoConfig.for_model("gpt2", n_embd=8, n_head=2, n_layer=2, vocab_size=10)
    with pytest.raises(ValueError, match=r"gpt2 models has no base_model_pp_plan.*use ZeRO-3"):
        plan_of("some/gpt2", config)
    model = new_model("llama")
    model.model.extra = torch.nn.Linear(2, 2)
    plan = plan_of("some/llama", model.config)
    with pytest.raises(ValueError, match="no place for extra"):
        cut_model("some/llama", model, plan, [(0, 3), (3, 6)], 0)
