"""Rollouts of several turns: what the student said is learned, an environment's words are read."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import ranks
from isogloss import distill
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import Example
from isogloss.inputs import load_text_encoder, plan_teachers
from isogloss.job.launch import start_distributed
from steps import Case, Layout, Reference, check_steps
from talkers import CHAT, LONG, SHORT, TOOLS, Canned, write_talkers

SAMPLES = [Canned(CHAT), Canned(LONG), None, Canned(SHORT, 3), Canned(CHAT, 1, cut=True),
           Canned(LONG, 3)]
LOSSES = "alm", "piece_kl", "reverse_kl"


@pytest.fixture(scope="module")
def talkers(texts, tmp_path_factory):
    return write_talkers(texts, tmp_path_factory.mktemp("talkers"))


def flags_of(talkers, folder):
    rows = folder / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, '
                    '{"role": "assistant", "content": "b"}]}\n' * 9)
    return dict(student=str(talkers[0]), teacher=str(talkers[1]), data=str(rows),
                text_key="messages", max_length=400, kd_weight=0.7, ce_weight=0.3,
                output_dir=str(folder), on_policy=0.5)


def example_of(sample, encoder):
    return Example(None) if sample is None else sample.example(encoder, TOOLS)


def as_data(sample):
    """Return the Example of the same chat, of which only what the student said is learned."""
    chat = copy.deepcopy(sample.chat)
    for message in chat[: sample.prompt_messages]:
        message["weight"] = 0
    return Example(chat, tools=TOOLS)


def reference(flags):
    """Return the Reference by torch alone, of the chats as data."""
    start_distributed()
    cfg = distill.Config(**flags)
    student, _ = load_text_encoder("student", cfg.student, cfg.max_length)
    teacher, _ = load_text_encoder("teacher", cfg.teacher, 0)
    [setup] = plan_teachers(cfg, student, {cfg.teacher: teacher}, torch.device("cpu"))
    collator = Collator(student, [PairOptions(teacher, setup.loss.spelling)])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (cfg.student, cfg.teacher)]
    kd = torch.zeros(())
    num_terms = 0
    for sample in filter(None, SAMPLES):
        batch = collator([as_data(sample)])
        logits = models[0](input_ids=batch.student.ids).logits[..., : len(student.table)]
        with torch.no_grad():
            teacher_logits = models[1](input_ids=batch.teachers[0].ids).logits
        teacher_logits = teacher_logits[..., : len(teacher.table)]
        num_terms += batch.counts.pairs[0].kd_terms
        for tile in batch.teachers[0].tiles:
            sub_tile, = tile.sub_tiles
            weight = torch.ones(len(tile.student_positions))
            if sample.cut:
                is_end = tile.student_positions == int((batch.student.labels[0] >= 0).nonzero()[-1])
                weight = weight * ~is_end
                num_terms -= 1
            kd = kd + setup.loss.loss_fn(
                logits.flatten(0, 1)[tile.student_positions],
                teacher_logits.flatten(0, 1)[sub_tile.teacher_positions],
                sub_tile._replace(weight=weight))
    loss = cfg.kd_weight * kd / num_terms
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in models[0].named_parameters()}
    return Reference(loss.item(), gradients)


def references(flags):
    return {loss: reference(flags | {"loss": loss}) for loss in LOSSES}


LAYOUTS = {
    1: [Layout(0, 6, 1), Layout(3, 2, 3), Layout(2, 3, 2, {"pack": True}),
        Layout(1, 6, 1, {"tiled": False})],
    2: [Layout(2, 1, 3), Layout(1, 6, 1, {"sequence_parallel": 2}),
        Layout(3, 3, 1, {"pack": True})],
}


def test_several_turns_teach_like_the_same_chat(talkers, tmp_path):
    """To 1e-6, wherever its samples are."""
    flags = flags_of(talkers, tmp_path)
    [expected] = ranks.run(1, references, flags)
    encoder, _ = load_text_encoder("student", flags["student"], flags["max_length"])
    examples = [example_of(sample, encoder) for sample in SAMPLES]
    for num_ranks, layouts in LAYOUTS.items():
        check_steps(expected, num_ranks, flags, examples, layouts, list(map(Case, LOSSES)),
                    tolerance=1e-6)
