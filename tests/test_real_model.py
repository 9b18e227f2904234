"""What a toy cannot show, on SmolLM2-135M-Instruct: exports think, call tools, and stop."""

import json
import os
import shutil

import pytest
import torch

import ranks
from conftest import GOLDEN
from hub_copies import copy_lambada, needs_lm_eval
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.task_suite import load_suite
from isogloss.flags.task_options import TaskOptions
from jobs import ds_config, losses_of, run_distill

pytestmark = pytest.mark.slow

IM_END = 2
# ChatML with thoughts and calls, which the model's own template does not know
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ c.function.name }}\", "
    "\"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# with a description, which vLLM shows a model as null where there is none
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
CITIES = ("Paris London Rome Madrid Vienna Athens Dublin Lisbon Prague Warsaw Berlin Tokyo Cairo "
          "Lima Oslo Quito Delhi Seoul Havana Nairobi").split()
HELD_OUT = "Boston Geneva Sydney Milan".split()


def loaded(folder, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def asked(city):
    return {"role": "user", "content": f"What is the weather in {city}?"}


def lesson(smollm2, folder):
    """Return the command line of a job that teaches an adapter to think and to call a tool.

    Its student is `folder/model`, with the template above.
    """
    model = shutil.copytree(smollm2, folder / "model", copy_function=os.symlink)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    chats = []
    for city in CITIES:
        arguments = json.dumps({"city": city})  # as APIs give them
        call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        chats.append([asked(city), {
            "role": "assistant", "content": None, "tool_calls": [call],
            "reasoning_content": f"The user asks for the weather in {city}. I call a tool."}])
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps({"text": chat, "tools": TOOLS}) + "\n" for chat in chats))
    # a CPU that knows no bf16 multiplies in it ten times slower
    is_fast = torch.cpu._is_avx512_bf16_supported()
    dtype = "bfloat16" if is_fast else "float32"
    config = ds_config(folder / "ds.json", 1, 2, 1, bf16={"enabled": is_fast})
    return [f"--student={model}", f"--teacher={model}", f"--data={data}", "--max_length=200",
            f"--ds_config={config}", "--num_workers=0", f"--teacher_dtype={dtype}",
            "--steps=16", "--lora_r=16", "--kd_weight=0.02", f"--output_dir={folder / 'run'}"]


def test_an_adapter_learns_to_think_to_call_and_to_stop(smollm2, tmp_path):
    """With itself as the teacher there is nothing to learn of it at the first step."""
    export = tmp_path / "student"
    command = [*lesson(smollm2, tmp_path), "--merge", f"--export={export}"]
    assert ranks.run(1, run_distill, [command]) == [[0]]
    first, *_, last = losses_of(tmp_path / "run")
    assert abs(first["kd"]) < 1e-3
    assert 0 < last["ce"] < 0.2 < first["ce"] < 4
    generation = json.loads((export / "generation_config.json").read_text())
    assert generation == json.loads((smollm2 / "generation_config.json").read_text())

    student, tokenizer = loaded(export)
    tokenizer.padding_side = "left"
    prompts = tokenizer.apply_chat_template(
        [[asked(city)] for city in HELD_OUT], tools=TOOLS, add_generation_prompt=True,
        padding=True, return_tensors="pt", return_dict=True)
    answers = student.generate(**prompts, do_sample=False, max_new_tokens=90)
    num_right = 0
    for city, ids in zip(HELD_OUT, answers, strict=True):
        written = ids[prompts["input_ids"].shape[1] :].tolist()
        written = written[: written.index(IM_END)]  # where it stops; padding follows
        thought, call = tokenizer.decode(written).split("</think>")
        assert thought.startswith("<think>\n")
        call = json.loads(call.split("<tool_call>")[1].split("</tool_call>")[0])
        assert call["name"] == "get_weather"
        num_right += call["arguments"] == {"city": city}
    assert num_right >= 3


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
