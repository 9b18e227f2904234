"""Rollouts used again: the job's writer and scorer, by enumeration of all that a toy can write."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ranks
from isogloss.data.batch_types import Example
from isogloss.data.rollouts import TRAINING
from isogloss.student.whole_student import WholeStudent
from isogloss.writing.on_policy import load_writer
from isogloss.writing.rollout_ratio import weigh_by_ratio
from jobs import ds_config, job_for

STAND_IN = Path(__file__).with_name("stand_in_writer.py")
LETTERS = "ab"
END = 2  # the third token
PLACES = 4
PROMPT = "ab"
TEMPERATURES = 0.5, 0.7, 1.0, 1.5
LIMIT = 1e-7
COPIES = 1500  # of which some write the rarest text


def write_toy(folder):
    """Write a model with a head of five rows, and its tokenizer of three tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "$": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.06, eos_token_id=END)).save_pretrained(folder)


def next_probabilities(model, written, temperature):
    """Return (len(written) + 1, 3) float64: what may come at each place, by one forward pass."""
    prompt = [LETTERS.index(letter) for letter in PROMPT]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + list(written)])).logits[0]
    return (logits[len(prompt) - 1 :, : END + 1].double() / temperature).softmax(-1)


def probabilities(model, written, temperature):
    """Return (len(written) + 1,): how likely a text begins so far, at each of its places."""
    of_places = next_probabilities(model, written, temperature)
    chosen = [of_place[token] for of_place, token in zip(of_places, written)]
    return torch.tensor([1.0, *chosen], dtype=torch.float64).cumprod(0)


def errors_at_temperatures(temperatures, flags):
    """Return {temperature: `errors_at` there}."""
    state, inputs = job_for(flags)
    state.whole_student = WholeStudent(state.engine, None, state.device)
    before = copy.deepcopy(state.engine.module.model.state_dict())
    results = {}
    writer = load_writer(state, inputs)
    for temperature in temperatures:
        writer.cfg = replace(state.cfg, rollout_temperature=temperature)
        if writer.elsewhere:
            writer.elsewhere.cfg = writer.cfg
        results[temperature] = errors_at(state, writer)
        state.engine.module.model.load_state_dict(before)
    writer.close()
    return results


def errors_at(state, writer):
    """Write all texts by some weights, and weigh them by others.

    Returns:
        (number of texts, largest error of the log-probability of a text by its writer, and of the
        expectation, at a place, of whether it is reached, and of whether an "a" is before it).
    """
    model = state.engine.module.model
    temperature = writer.cfg.rollout_temperature
    prompts = [writer.prompter.prompt(Example(PROMPT * 2), (number, 0)) for number in range(COPIES)]
    by_text = {}
    for rollout in writer.rollouts(prompts, TRAINING):
        by_text[tuple(rollout.ids.tolist())] = rollout
    before = {text: probabilities(model, text, temperature) for text in by_text}
    of_writer = [abs(rollout.logp.sum(dtype=float) - float(before[text][-1].log()))
                 for text, rollout in by_text.items()]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch = writer.collator([Example(rollout) for rollout in by_text.values()])
    weigh_by_ratio(writer.cfg, state.student, [batch], None)
    weighed, now = torch.zeros(2, PLACES, 2, dtype=torch.float64)
    for text, weights in zip(by_text, weights_of(batch)):
        written = before[text][-1]
        today = probabilities(model, text, temperature)
        for place in range(len(text)):
            f = torch.tensor([1.0, place and text[place - 1] == 0])
            weighed[place] += f * written * weights[place]
            now[place] += f * today[-1]
    return len(by_text), max(of_writer), float((weighed - now).abs().max())


def weights_of(batch):
    """Return (samples, places) by which the terms at the written tokens weigh."""
    weights = torch.zeros(batch.student.ids.numel(), dtype=torch.float64)
    for tile in batch.teachers[0].tiles:
        for sub_tile in tile.sub_tiles:
            positions = tile.student_positions[sub_tile.student_slice]
            weights[positions] = sub_tile.weight.double()
    return weights.view_as(batch.student.ids)[:, len(PROMPT) - 1 :]


@pytest.mark.parametrize("more", [{}, pytest.param(
    {"writer": f"{sys.executable} {STAND_IN}"}, marks=pytest.mark.slow)])
def test_old_texts_weigh_as_often_as_the_student_is_there_now(tmp_path, more):
    """Its own loop, or a process that writes; the scorer is that of the job."""
    write_toy(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": PROMPT * 2}))
    flags = dict(
        student=str(tmp_path / "model"), teacher=str(tmp_path / "model"), max_length=16,
        data=str(tmp_path / "data.jsonl"), on_policy=1.0, rollout_tokens=PLACES, prompt_tokens=2,
        loss="reverse_kl", max_ratio=1e6, rollout_every=2, rollout_batch=1000,
        ds_config=ds_config(tmp_path / "ds.json", 0, 1, 1))
    [results] = ranks.run(1, errors_at_temperatures, TEMPERATURES, flags | more)
    for temperature, (num_texts, of_writer, of_scorer) in results.items():
        assert num_texts == 2 ** (PLACES + 1) - 1, temperature
        assert of_writer < 1e-6 and of_scorer < LIMIT, (temperature, of_writer, of_scorer)
