"""vLLM itself writes for a student and runs a teacher, on a CPU: the same numbers as on the rank.

vLLM and `transformers serve` serve what a job has exported.

vLLM has an environment of its own, which `make test-vllm` makes (4 GB); elsewhere:

    ISOGLOSS_VLLM=/env/bin/python pytest tests/test_vllm.py
"""

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from isogloss.teachers.text_server import TextServer
from jobs import ds_config, losses_of, run_all, write_corpus
from ranks import free_port
from talkers import write_talkers
from test_on_policy import records_of, written_by
from test_real_model import HELD_OUT, TOOLS, asked, lesson
from test_teacher_engine import check_same
from test_transfer import CHAT, chat_model, taught as lesson_of, transfer

PYTHON = os.environ.get("ISOGLOSS_VLLM")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not PYTHON, reason="needs vLLM: make test-vllm")]
SHAPE = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=120)  # heads of 32: vLLM has no smaller
CASES = {  # ranks, ZeRO stage, the head is the embedding, flags, how old its texts are
    "tied": (1, 0, True, ["--rollout_every=2", "--rollout_temperature=0.7"],
             [0, 1, 1, 2, 0, 1]),
    "untied, for two ranks, partitioned": (2, 3, False, [], [0, 1, 0, 1, 1, 1]),
    "an adapter": (1, 2, True, ["--lora_r=4", "--rollout_top_p=0.9", "--staleness=0"],
                   [0] * 6),
}


QUESTIONS = ["What is the capital of France?", "Name a color.", "Count to three.",
             "Say hello to Anna."]


@contextlib.contextmanager
def listening(program, log, *words):
    """Let a server of vLLM's environment run; yield its address."""
    port = free_port()
    command = [PYTHON.removesuffix("python") + program, "serve", *words, f"--port={port}"]
    environment = dict(os.environ, VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING")
    with open(log, "w") as lines, subprocess.Popen(
            command, stdout=lines, stderr=lines, env=environment) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                    break
                assert process.poll() is None, Path(log).read_text()[-3000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def served(model, log, *words):
    """Let vLLM serve a model; see `listening`."""
    return listening("vllm", log, model, "--dtype=float32", "--enforce-eager",
                     "--max-model-len=512", "--max-logprobs=64", *words)


def answer(address, model, question):
    """Return (message, finish_reason) of a chat with a tool, by OpenAI's API."""
    body = {"model": str(model), "messages": [question], "tools": TOOLS, "max_tokens": 90,
            "temperature": 0}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        [choice] = json.load(reply)["choices"]
    return choice["message"], choice["finish_reason"]


@pytest.fixture(scope="module")
def taught(smollm2, tmp_path_factory):
    """Directory of a chat model that has learned to call a tool: its adapter, and the whole."""
    folder = tmp_path_factory.mktemp("taught")
    command = lesson(smollm2, folder)
    run_all(1, [*command, f"--export={folder / 'adapter'}"],
            [*command, "--merge", f"--export={folder / 'whole'}"])
    return folder


def write_student(folder, tokenizer, is_tied):
    """Write a student with rows behind its vocabulary, which nothing may write."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=len(tokenizer) + 7, tie_word_embeddings=is_tied, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_transferred_student_writes_and_stops(models, tmp_path):
    """As plain transformers does by the same files; so small a student learns half of its line."""
    def write(tokenizer, seed, folder):
        torch.manual_seed(seed)
        write_student(folder, tokenizer, True)

    model = chat_model(models, tmp_path / "model", write)
    student = transfer(model, models[1], tmp_path / "student")
    run_all(1, lesson_of(model, student, tmp_path))
    trained = tmp_path / "trained"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    written = AutoModelForCausalLM.from_pretrained(trained).generate(
        **prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    *text, end = written.tolist()
    assert tokenizer.decode(end) == "<|im_end|>" and text
    body = {"model": str(trained), "messages": CHAT[:1], "max_tokens": 40, "temperature": 0}
    with served(trained, tmp_path / "server.log", "--max-model-len=120") as address:
        request = urllib.request.Request(f"{address}/v1/chat/completions",
                                         json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            [choice] = json.load(reply)["choices"]
    expected = tokenizer.decode(text), "stop"
    assert (choice["message"]["content"], choice["finish_reason"]) == expected


def test_vllm_says_the_same_of_the_text_by_echo(tokenizers, tmp_path):
    write_student(tmp_path / "model", tokenizers[0], False)
    ids = torch.tensor([5, 80, 7, 301, 44, 44, 210, 9])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
    expected = logp.gather(1, ids[1:, None]).squeeze(1)
    with served(tmp_path / "model", tmp_path / "server.log", "--max-model-len=120") as address:
        server = TextServer(address, 600)
        described = server.describe()
        for owner in ("vllm", "somebody"):
            [likely] = server.score(described._replace(owner=owner), [ids.tolist()], 0)
            ours = torch.from_numpy(likely.logp_E).float()
            torch.testing.assert_close(ours, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_vllm_writes_with_the_students_weights(name, tokenizers, models, texts, tmp_path):
    """Those of today, or of a step before; its log-probabilities are those of its draws."""
    num_ranks, stage, is_tied, flags, expected_ages = CASES[name]
    write_student(tmp_path / "student", tokenizers[0], is_tied)
    config = ds_config(tmp_path / "ds.json", stage, 4 // num_ranks, 2)
    output = tmp_path / "run"
    words = "--sleep" if "--lora_r=4" in flags else ""  # which a CPU hears and does not do
    run_all(num_ranks, [
        f"--ds_config={config}", f"--student={tmp_path / 'student'}", f"--teacher={models[1]}",
        f"--data={write_corpus(tmp_path, texts, 30)}", "--max_length=120", "--eval_rows=6",
        "--on_policy=0.5", "--rollout_tokens=24", "--prompt_tokens=8", "--rollout_log=8",
        "--rollout_eval=4", "--loss=reverse_kl", "--steps=6", f"--output_dir={output}",
        f"--writer={PYTHON} -m isogloss.vllm_writer {words}", *flags])
    lines = [line for line in losses_of(output, 0) if "loss" in line]
    assert [line["rollout/staleness"] for line in lines] == expected_ages
    for line in lines:
        if line["rollout/staleness"]:
            assert abs(line["rollout/ratio"] - 1) > 1e-4  # the weights move
        else:
            assert line["rollout/logp_gap"] < 1e-5
    rollouts = written_by(output)
    assert len({tuple(ids) for ids, _ in rollouts.values()}) > 8
    assert max(max(ids) for ids, _ in rollouts.values()) < len(tokenizers[0])


@pytest.mark.parametrize("num_ranks, stage, flags", [
    (1, 0, ["--staleness=0"]), (2, 3, [])])
def test_vllm_writes_turns(num_ranks, stage, flags, texts, tmp_path):
    """What it said of the tokens of every turn is what the student says of the whole chat."""
    student, teacher = write_talkers(
        texts, tmp_path, size=SHAPE | {"max_position_embeddings": 240, "initializer_range": 0.1})
    rows = [json.dumps({"messages": [{"role": "user", "content": f"What is {number} + 1?"},
                                     {"role": "assistant", "content": f"{number + 1}"}],
                        "answer": number + 1}) for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = ds_config(tmp_path / "ds.json", stage, 4 // num_ranks, 2)
    output = tmp_path / "run"
    asked = {"function": f"{Path(__file__).with_name('talk_environment.py')}:talk",
             "max_turns": 3, "reward_weight": 0.1}
    run_all(num_ranks, [
        f"--ds_config={config}", f"--student={student}", f"--teacher={teacher}", "--steps=3",
        f"--data={tmp_path / 'rows.jsonl'}", "--text_key=messages", "--max_length=240",
        "--eval_rows=6", "--on_policy=1", "--rollout_tokens=16", "--rollouts_per_prompt=2",
        "--rollout_log=8", "--rollout_eval=4", "--loss=reverse_kl", f"--output_dir={output}",
        f"--environment={json.dumps(asked)}", f"--writer={PYTHON} -m isogloss.vllm_writer",
        *flags])
    lines = [line for line in losses_of(output, 0) if "loss" in line]
    assert lines[0]["rollout/turns"] > 1
    assert all(line["rollout/logp_gap"] < 1e-5 for line in lines if not line["rollout/staleness"])
    turns = {len(record["turns"]) for record in records_of(output).values()}
    assert len(turns) >= 2


MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
TEACHERS = {  # config class, what it has beside SHAPE, dtype, flags
    "mixture": ("Qwen3MoeConfig", MIXTURE | dict(head_dim=32), "float32", ["--pack"]),
    "sliding": ("Gemma3TextConfig", dict(
        head_dim=32, sliding_window=16, query_pre_attn_scalar=32, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"]), "float32", []),
    # whose recurrence vLLM has on a CPU in bfloat16 alone
    "hybrid": ("Qwen3NextConfig", MIXTURE | dict(
        head_dim=64, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64,
        linear_value_head_dim=64, shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"]), "bfloat16", []),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_vllm_runs_a_teacher_of_todays_kinds(name, tokenizers, models, texts, tmp_path):
    """What is learned from it is what the model on the rank teaches."""
    kind, more, dtype, flags = TEACHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SHAPE | more, vocab_size=len(tokenizers[1]))
    model = AutoModelForCausalLM.from_config(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    model.save_pretrained(tmp_path / "teacher")
    tokenizers[1].save_pretrained(tmp_path / "teacher")
    check_same_by_vllm(models[0], tmp_path / "teacher", texts, tmp_path, dtype, flags)


def test_vllm_runs_a_real_teacher(smollm2, models, texts, tmp_path):
    check_same_by_vllm(models[0], smollm2, texts, tmp_path, "float32", [])


def check_same_by_vllm(student, teacher, texts, folder, dtype, flags):
    flags = [f"--ds_config={ds_config(folder / 'ds.json', 2, 2, 2)}", f"--student={student}",
             f"--teacher={teacher}", f"--data={write_corpus(folder, texts, 20)}",
             "--max_length=60", "--steps=2", f"--teacher_dtype={dtype}", *flags]
    run_all(1, [*flags, f"--output_dir={folder / 'plain'}"],
            [*flags, f"--output_dir={folder / 'vllm'}",
             f"--teacher_engine={PYTHON} -m isogloss.vllm_teacher"])
    check_same(losses_of(folder / "plain", -1), losses_of(folder / "vllm", -1),
               1e-4 if dtype == "float32" else 2e-2)


def test_a_real_student_and_its_judge_are_served(smollm2, tmp_path):
    """A chat model writes by vLLM, and a server of vLLM, which has the same weights, judges it.

    So there is nothing to learn at first, in either direction, and the student ends its turns.
    Texts of a low temperature are likelier as they were drawn than they are to the judge.
    """
    rows = [{"messages": [{"role": "user", "content": question},
                          {"role": "assistant", "content": "?"}]} for question in QUESTIONS]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "run"
    config = ds_config(tmp_path / "ds.json", 2, 4, 1)
    with served(smollm2, tmp_path / "server.log") as address:
        run_all(1, [
            f"--ds_config={config}", f"--student={smollm2}", f"--teacher={address}",
            f"--teacher_tokenizer={smollm2}", "--teacher_output_topk=64", f"--data={data}",
            "--text_key=messages", "--on_policy=1", "--rollout_tokens=40", "--rollout_log=4",
            "--rollout_temperature=0.2", "--loss=reverse_kl", "--steps=3", f"--output_dir={output}",
            "--max_length=128", "--lora_r=4",
            f"--writer={PYTHON} -m isogloss.vllm_writer"])
    first, *later = losses_of(output, 0)
    assert first["rollout/logp_gap"] < 1e-5
    assert abs(first["kd"]) < 1e-4 < first["rollout/reverse_kl_per_byte"]
    assert [line["rollout/staleness"] for line in later] == [1, 0]
    records = records_of(output).values()
    assert any("Paris" in record["text"] for record in records)
    assert any(record["ended"] for record in records)


@pytest.mark.parametrize("name", ["whole", "adapter", "transformers"])
def test_an_export_thinks_calls_a_tool_and_stops_on_a_server(name, taught, tmp_path):
    """vLLM reads the call out of the text; transformers returns it as it was written."""
    folder = taught / ("adapter" if name == "adapter" else "whole")
    log = tmp_path / "server.log"
    calls = "--enable-auto-tool-choice", "--tool-call-parser=hermes"
    if name == "transformers":
        server = listening("transformers", log, folder, "--device=cpu")
    elif name == "adapter":
        server = served(taught / "model", log, *calls, "--enable-lora", "--max-lora-rank=16",
                        f"--lora-modules={folder}={folder}")
    else:
        server = served(folder, log, *calls)
    num_right = 0
    with server as address:
        for city in HELD_OUT:
            message, reason = answer(address, folder, asked(city))
            if name == "transformers":
                assert reason == "stop"
                thought, call = message["content"].split("<tool_call>")
                call = json.loads(call.removesuffix("</tool_call>"))
            else:
                assert reason == "tool_calls"
                thought, [call] = message["content"], message["tool_calls"]
                call = dict(call["function"], arguments=json.loads(call["function"]["arguments"]))
            assert thought.startswith("<think>\n") and call["name"] == "get_weather"
            num_right += call["arguments"] == {"city": city}
    assert num_right >= 3
