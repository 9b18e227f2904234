"""What a toy cannot show, on SmolLM2-135M-Instruct: exports of chats answer, and stop."""

import json

import pytest
import torch

import ranks
from conftest import GOLDEN, asset
from hub_copies import copy_lambada, needs_lm_eval
from isogloss.data.sample import TextEncoder
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.task_suite import load_suite
from isogloss.evaluation.tasks import TaskOptions
from isogloss.projection_tools.tokenizers import load_tokenizer
from jobs import ds_config, losses_of, run_distill

pytestmark = pytest.mark.slow

IM_END = 2
QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is two plus two?": "Two plus two is four.",
}


def flags(folder, student, teacher, data, lr=5e-4, **more):
    config = ds_config(folder / "ds.json", 1, 2, 1, bf16={"enabled": True},
                       optimizer={"type": "AdamW", "params": {"lr": lr, "torch_adam": True}})
    base = [f"--student={student}", f"--teacher={teacher}", f"--data={data}",
            f"--ds_config={config}", "--num_workers=0", "--teacher_dtype=bfloat16",
            f"--output_dir={folder / 'run'}"]
    return base + [f"--{key}={value}" for key, value in more.items()]


def write_rows(path, column, rows):
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return path


def loaded(folder, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def test_an_adapter_learns_chats_and_its_merged_export_answers_and_stops(smollm2, tmp_path):
    """With itself as the teacher there is nothing to learn at the first step."""
    chats = []
    for question, answer in QUESTIONS.items():
        chats.append([{"role": "user", "content": question},
                      {"role": "assistant", "content": answer}])
    data = write_rows(tmp_path / "chats.jsonl", "text", chats)  # both of them at every step
    export = tmp_path / "student"
    command = flags(tmp_path, smollm2, smollm2, data, max_length=64, steps=2, lora_r=4,
                    merge=True, export=export)
    assert ranks.run(1, run_distill, [command]) == [[0]]
    first, last = losses_of(tmp_path / "run")
    assert abs(first["kd"]) < 1e-3 and last["kd"] < 0.05
    assert 0 < last["ce"] < first["ce"] < 3  # of answers that such a model gives by itself
    generation = json.loads((export / "generation_config.json").read_text())
    assert generation == json.loads((smollm2 / "generation_config.json").read_text())

    model, tokenizer = loaded(export)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
    written = ids[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(written)
    assert written[-1] == IM_END and len(written) < 40


def test_what_it_writes_has_the_probabilities_that_are_logged(smollm2, tmp_path):
    """On-policy with a teacher of another tokenizer: the rollouts of the untrained student."""
    data = write_rows(tmp_path / "texts.jsonl", "text",
                      ["The sun rises in the east and sets in the west.",
                       "Water boils at one hundred degrees, and it freezes at zero."])
    command = flags(tmp_path, smollm2, asset("models", "stories260K"), data, max_length=48,
                    steps=1, lora_r=4, on_policy=1, rollout_log=2, prompt_tokens=6,
                    rollout_tokens=8)
    assert ranks.run(1, run_distill, [command]) == [[0]]
    [line] = losses_of(tmp_path / "run")
    assert line["kd"] > 0 and 0 < line["rollout/length"] <= 8
    model, _ = loaded(smollm2)
    encoder = TextEncoder(*load_tokenizer("student", str(smollm2)), 48)
    records = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert len(records) == 2
    for record in map(json.loads, records):
        before = encoder.encode([record["prompt"]])[0][:-1]  # without eos
        ids = torch.tensor([*before, *record["ids"]])
        with torch.no_grad():
            logp = model(ids[None, :-1]).logits[0].float().log_softmax(-1)
        nats = -logp[len(before) - 1 :].gather(1, ids[len(before) :, None]).sum()
        per_byte = float(nats) / len(record["text"].encode())
        assert record["student_nats_per_byte"] == pytest.approx(per_byte, rel=0.05, abs=0.05)


@needs_lm_eval
def test_lambada_is_what_the_harness_says(smollm2, tmp_path):
    """lm-evaluation-harness 0.4.13 said it of the same weights: tests/golden/README.md."""
    golden = json.loads((GOLDEN / "smollm2_lambada.json").read_text())
    model, tokenizer = loaded(smollm2, torch.float32)
    encoder = TaskEncoder(tokenizer, model.config)
    copy_lambada(tmp_path, golden["limit"])
    options = TaskOptions(data=str(tmp_path), batch_size=4)
    metrics, records = load_suite(["lambada"], options, encoder).run(model, torch.as_tensor)
    num_right = 0
    for item, record in zip(golden["items"], records, strict=True):
        assert record["nats"][0] == pytest.approx(-item["logp"][0], rel=1e-3)
        num_right += item["is_greedy"][0]
    assert metrics["eval/lambada_acc"] == num_right / golden["limit"]
