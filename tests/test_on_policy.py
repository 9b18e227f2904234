"""Jobs whose student writes: the gradient of what was written, the same in every layout."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import distill
import ranks
from conftest import ROOT
from isogloss.batch import Collator, Example, PairOptions
from isogloss.inputs import load_text_encoder, plan_teachers
from isogloss.launch import start_distributed
from isogloss.rollouts import Prompter, completed
from jobs import ds_config, job_for, losses_of, run_distill, write_corpus
from losses import next_token_cross_entropy
from rollout import Completion
from test_layouts import Layout, check_gradients, collator_of, keep_gradients, texts_of_rank
from test_layouts import AS_FLAGS_SAY, SMALL_TILE_MIB

pytestmark = pytest.mark.slow


# --- the gradient of rollouts ---------------------------------------------------------------------


class Written(NamedTuple):
    """A text as if the student had written all but its first tokens, with its tokenizer's ids."""

    text: str
    prompt_tokens: int
    ended: bool


def mixed_samples(texts):
    """Eight samples: texts, an empty place, and what was written, some of it cut."""
    return [texts[0], Written(texts[1], 5, True), None, Written(texts[2], 30, False), texts[3][:60],
            Written(texts[4], 2, False), Written(texts[5], 12, True), "a"]


def flags_for(models, texts, folder, **changes):
    flags = dict(
        student=str(models[0]), teacher=str(models[1]), data=write_corpus(folder, texts, 20),
        max_length=250, kd_weight=0.7, ce_weight=0.3, projection_topk=100, output_dir=str(folder),
        on_policy=0.5)
    return flags | changes


def as_example(sample, encoder):
    """Return the Example of a sample."""
    if not isinstance(sample, Written):
        return Example(sample)
    prompter = Prompter(encoder, 0, 1.0, 1, sample.prompt_tokens, 10**6)
    prompt = prompter.prompt(Example(sample.text), (0, 0))
    ids, = encoder.encode([sample.text])
    ids = torch.from_numpy(ids[len(prompt.ids) : None if sample.ended else -1])
    nothing = torch.zeros(len(ids))
    return Example(completed(prompt, Completion(ids, nothing, nothing, sample.ended), encoder))


def reference(flags, samples):
    """Return (loss, gradients) by torch alone, of whole texts whose terms weigh 0 or 1.

    A term counts if it begins behind the prompt, and not at the end of a text that was cut.
    """
    start_distributed()
    cfg = distill.Config(**flags)
    student, _ = load_text_encoder("student", cfg.student, cfg.max_length)
    teacher, _ = load_text_encoder("teacher", cfg.teacher, 0)
    [setup] = plan_teachers(cfg, student, {cfg.teacher: teacher}, torch.device("cpu"))
    collator = Collator(student, [PairOptions(teacher, setup.loss.spelling)])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (cfg.student, cfg.teacher)]
    ce = torch.zeros(())
    kd = torch.zeros(())
    ce_count = 0
    for sample in samples:
        written = isinstance(sample, Written)
        text = sample.text if written else sample
        if text is None:
            continue
        batch = collator([text])
        logits_BSV = models[0](input_ids=batch.student.ids).logits[..., : len(student.table)]
        with torch.no_grad():
            teacher_logits = models[1](input_ids=batch.teachers[0].ids).logits
        teacher_logits = teacher_logits[..., : len(teacher.table)]
        if not written:
            value, count = next_token_cross_entropy(logits_BSV, batch.student.labels)
            ce = ce + value
            ce_count += count
        for tile in batch.teachers[0].tiles:
            sub_tile, = tile.sub_tiles
            weight = torch.ones(len(tile.student_positions))
            if written:
                rollout = as_example(sample, student).content
                weight = (tile.student_positions >= len(rollout.prompt.ids) - 1).float()
                chunk = sub_tile.student_chunk
                for number in chunk[chunk >= 0].unique():  # wholly behind the prompt, or not at all
                    weight[chunk == number] = weight[chunk == number].min()
                if not sample.ended:
                    is_end = batch.student.labels.flatten()[tile.student_positions]
                    weight = weight * (is_end != student.table.eos)
            kd = kd + setup.loss.loss_fn(
                logits_BSV.flatten(0, 1)[tile.student_positions],
                teacher_logits.flatten(0, 1)[sub_tile.teacher_positions],
                sub_tile._replace(weight=weight))
    count = collator([as_example(sample, student) for sample in samples]).counts
    loss = cfg.ce_weight * ce / ce_count + cfg.kd_weight * kd / count.pairs[0].kd_terms
    assert count.ce_tokens == ce_count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in models[0].named_parameters()}


def one_step(flags, samples, layouts):
    """Return [(layout, metrics, gradients of rank 0)] of one step; runs on every rank."""
    results = []
    for layout in layouts:
        path = Path(flags["output_dir"]) / f"ds-{os.environ['RANK']}.json"
        config = ds_config(path, layout.zero_stage, layout.micro_batch_size,
                           layout.grad_accum_steps,
                           optimizer={"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}})
        state, inputs = job_for(flags | {"ds_config": config} | layout.flags)
        gradients = keep_gradients(state.engine)
        examples = [as_example(sample, inputs.student) for sample in samples]
        collator = collator_of(state, inputs, AS_FLAGS_SAY, examples, SMALL_TILE_MIB)
        parts = texts_of_rank(examples, layout, state.cfg.sequence_parallel)
        metrics = distill.train_step(state, [collator(part) for part in parts])
        results.append((layout, metrics, dict(gradients)))
        state.engine.destroy()
    return results


LAYOUTS = {
    1: [Layout(0, 8, 1), Layout(3, 2, 4), Layout(2, 4, 2, {"pack": True}),
        Layout(1, 8, 1, {"tiled": False})],
    2: [Layout(2, 2, 2), Layout(3, 4, 1, {"pack": True}),
        Layout(1, 4, 2, {"sequence_parallel": 2}),
        Layout(3, 8, 1, {"sequence_parallel": 2, "pack": True})],
}


class Reference(NamedTuple):
    """What a step should give."""

    loss: float
    gradients: dict


@pytest.mark.parametrize("loss", ["event_kl", "alm", "piece_kl", "reverse_kl"])
def test_what_was_written_teaches_like_the_same_text(models, texts, tmp_path, loss):
    """Wherever its samples are: no cross-entropy, no term that touches the prompt.

    Divergences of a translated belief look at the chunk before, which is not there at the first
    token behind a prompt; they are compared with one process.
    """
    flags = flags_for(models, texts, tmp_path, loss=loss)
    samples = mixed_samples(texts)
    if loss in ("event_kl", "alm"):
        expected = Reference(*ranks.run(1, reference, flags, samples)[0])
    else:
        plain = [Layout(0, 8, 1, {"tiled": False})]
        _, metrics, gradients = ranks.run(1, one_step, flags, samples, plain)[0][0]
        expected = Reference(metrics["loss"], gradients)
    for num_ranks, layouts in LAYOUTS.items():
        for layout, metrics, found in ranks.run(num_ranks, one_step, flags, samples, layouts)[0]:
            name = f"{loss}, {num_ranks} ranks, {layout}"
            assert abs(metrics["loss"] - expected.loss) <= 1e-5 * abs(expected.loss), name
            check_gradients(name, found, expected)
