"""vLLM itself writes for a student, on a CPU: its weights arrive, and both say the same of a text.

vLLM has an environment of its own, which `make test-vllm` makes (4 GB); elsewhere:

    ISOGLOSS_VLLM=/env/bin/python pytest tests/test_vllm.py
"""

import os

import pytest

from jobs import ds_config, losses_of, run_all, write_corpus
from test_on_policy import written_by

PYTHON = os.environ.get("ISOGLOSS_VLLM")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not PYTHON, reason="needs vLLM: make test-vllm")]
SHAPE = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=120)  # heads of 32: vLLM has no smaller
CASES = {  # ranks, ZeRO stage, the head is the embedding, flags
    "tied": (1, 0, True, ["--rollout_every=2"]),
    "untied, for two ranks, partitioned": (2, 3, False, []),
    "an adapter": (1, 2, True, ["--lora_r=4"]),
}


def write_student(folder, tokenizer, is_tied):
    """Write a student with rows behind its vocabulary, which nothing may write."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=len(tokenizer) + 7, tie_word_embeddings=is_tied, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", CASES)
def test_vllm_writes_with_the_students_weights(name, tokenizers, models, texts, tmp_path):
    """Those of today in steps 1, 3 and 5, those of one step before in the others."""
    num_ranks, stage, is_tied, flags = CASES[name]
    write_student(tmp_path / "student", tokenizers[0], is_tied)
    config = ds_config(tmp_path / "ds.json", stage, 4 // num_ranks, 2)
    output = tmp_path / "run"
    run_all(num_ranks, [
        f"--ds_config={config}", f"--student={tmp_path / 'student'}", f"--teacher={models[1]}",
        f"--data={write_corpus(tmp_path, texts, 30)}", "--max_length=120", "--eval_rows=6",
        "--on_policy=0.5", "--rollout_tokens=24", "--prompt_tokens=8", "--rollout_log=8",
        "--rollout_eval=4", "--loss=reverse_kl", "--steps=6", f"--output_dir={output}",
        f"--rollout_command={PYTHON} -m isogloss.vllm_writer", *flags])
    lines = [line for line in losses_of(output, 0) if "loss" in line]
    ages = [line["rollout/staleness"] for line in lines]
    assert ages == ([0, 1, 1, 2, 0, 1] if "--rollout_every=2" in flags else [0, 1, 0, 1, 1, 1])
    for line in lines:
        if line["rollout/staleness"]:
            assert abs(line["rollout/ratio"] - 1) > 1e-4  # the weights move
        else:
            assert line["rollout/logp_gap"] < 1e-5
    rollouts = written_by(output)
    assert len({tuple(ids) for ids, _ in rollouts.values()}) > 8
    assert max(max(ids) for ids, _ in rollouts.values()) < len(tokenizers[0])
