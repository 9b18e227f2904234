"""integrations.py: the loss of distill.py inside of other trainers, on the same rows."""

import json
import math
import pickle
import re
import shutil
import types
import warnings
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)

import ranks
from conftest import ROOT
from isogloss.data.ends import taught_ends
from isogloss.integrations import Distillation, config_of, count_terms, distilled
from jobs import ds_config, losses_of, run_distill
from test_families import balance_of, write_family

# {what rows hold: (row of a text, flags of distill.py)}
KINDS = {
    "text": (lambda text: {"text": text}, []),
    "messages": (lambda text: {"messages": [{"role": "user", "content": text[:20]},
                                            {"role": "assistant", "content": text[20:]}]},
                 ["--text_key=messages"]),
    "completion": (lambda text: {"prompt": text[:20], "completion": text[20:]},
                   ["--prompt_key=prompt", "--completion_key=completion"]),
}
ROWS = 8


@pytest.fixture(scope="module")
def chat_models(chat_models, tmp_path_factory):
    """Those of all tests, and a student with a context as large as the trainers' default lengths.
    """
    student = tmp_path_factory.mktemp("long") / "student"
    shutil.copytree(chat_models[0], student)
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return [str(student), chat_models[1]]


@pytest.fixture(scope="module")
def expected(chat_models, texts, tmp_path_factory):
    """Return {kind: (rows, metrics of a step of distill.py on all, and of them as held-out ones)}.
    """
    folder = tmp_path_factory.mktemp("jobs")
    rows = {kind: [make(text[:90]) for text in texts[:ROWS]] for kind, (make, _) in KINDS.items()}
    lines = []
    for kind, (_, flags) in KINDS.items():
        (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows[kind])))
        lines.append([f"--student={chat_models[0]}", f"--teacher={chat_models[1]}", "--steps=1",
                      f"--data={folder / f'{kind}.jsonl'}", "--max_length=60",
                      f"--eval_data={folder / f'{kind}.jsonl'}", "--kd_weight=0.7",
                      "--teacher_dtype=float32", f"--output_dir={folder / kind}", *flags,
                      f"--ds_config={ds_config(folder / 'ds.json', 0, ROWS, 1)}"])
    assert ranks.run(1, run_distill, lines) == [[0] * len(KINDS)]
    metrics = {kind: losses_of(folder / kind, -1) for kind in KINDS}
    return {kind: (rows[kind], metrics[kind][0] | metrics[kind][1]) for kind in KINDS}


def trainer_of(name, folder, **more):
    """Return (trainer class, its arguments) of a step of four micro-batches that moves nothing."""
    settings = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1,
                    learning_rate=0.0, logging_steps=1, report_to="none", use_cpu=True,
                    save_strategy="no", disable_tqdm=True) | more
    if name == "Trainer":
        return Trainer, TrainingArguments(str(folder), **settings)
    trl = pytest.importorskip("trl")
    return trl.SFTTrainer, trl.SFTConfig(str(folder), bf16=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_has_the_loss_of_the_job(chat_models, expected, tmp_path, name, kind):
    from datasets import Dataset

    student, teacher = chat_models
    rows, metrics = expected[kind]
    trainer_class, settings = trainer_of(name, tmp_path, eval_strategy="steps", eval_steps=1,
                                         per_device_eval_batch_size=3)
    data = Dataset.from_list(rows)
    trainer = distilled(trainer_class, teacher, kd_weight=0.7, max_length=60)(
        AutoModelForCausalLM.from_pretrained(student), args=settings, train_dataset=data,
        eval_dataset=data, processing_class=AutoTokenizer.from_pretrained(student),
        data_collator=len)  # as axolotl gives one, which is not asked
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    [trained] = [line for line in trainer.state.log_history if "ce" in line]
    for key in ("ce", "kd"):
        assert trained[key] == pytest.approx(metrics[key], rel=1e-5), key
    assert trained["loss"] == pytest.approx(metrics["loss"], abs=1e-4)  # which it rounds
    assert trained["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    [evaluated] = [line for line in trainer.state.log_history if "eval_loss" in line]
    # nothing moves, so the same rows have the same losses
    for key in ("loss", "ce", "kd"):
        assert evaluated[f"eval_{key}"] == pytest.approx(metrics[key], rel=1e-5), key
    for ours, its in (("bits_per_byte", "student_bits_per_byte"),
                      ("teacher_bits_per_byte", "teacher_bits_per_byte")):
        assert evaluated[f"eval_{ours}"] == pytest.approx(metrics[f"eval/{its}"], rel=1e-5)
    is_worse = evaluated["eval_teacher_bits_per_byte"] > evaluated["eval_bits_per_byte"]
    lines = [str(warning.message) for warning in warned if "is worse" in str(warning.message)]
    assert len(lines) == is_worse


def train_on_a_rank(student, teacher, rows, folder):
    """Return what is logged on one of two ranks: of rows in memory, of a stream, in shards."""
    import deepspeed
    from datasets import Dataset

    deepspeed.init_distributed("gloo")  # as accelerate does on GPUs
    data = Dataset.from_list(rows)
    stream = data.to_iterable_dataset()
    logged = []
    fsdp = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    zero3 = {"deepspeed": folder / "zero3.json"}
    for its_rows, more in ((data, {}), (stream, {}), (data, fsdp), (data, zero3)):
        trainer_class, settings = trainer_of(
            "Trainer", folder, gradient_accumulation_steps=2, **more)
        student_tokenizer, teacher_tokenizer = map(AutoTokenizer.from_pretrained,
                                                   (student, teacher))
        trainer = distilled(trainer_class, teacher, kd_weight=0.7, max_length=60)(
            AutoModelForCausalLM.from_pretrained(student), args=settings, train_dataset=its_rows,
            processing_class=student_tokenizer)
        if more is zero3:
            with pytest.raises(ValueError, match="ZeRO-3 has left each rank a part of"):
                Distillation(student_tokenizer, AutoModelForCausalLM.from_pretrained(teacher),
                             teacher_tokenizer)
        trainer.train()
        logged.append(trainer.state.log_history[0])
    return logged


def test_two_ranks_average_over_the_terms_of_both(chat_models, texts, tmp_path):
    """Like one batch of all rows in one process."""
    (tmp_path / "zero3.json").write_text(json.dumps({
        "zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu",
                         "gradient_accumulation_steps"), "auto")}))
    rows = [{"text": text[: 20 + 12 * number]} for number, text in enumerate(texts[:ROWS])]
    model = AutoModelForCausalLM.from_pretrained(chat_models[0])
    distillation = Distillation(
        AutoTokenizer.from_pretrained(chat_models[0]), chat_models[1], kd_weight=0.7, max_length=60)
    batch = distillation.collate(rows)
    loss, sums = distillation.loss(model(**distillation.inputs(batch)).logits, batch)
    loss.backward()
    ce, kd = [float(total) / count for total, count in zip(sums, count_terms(batch))]
    norm = float(torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm())
    for logged in ranks.run(2, train_on_a_rank, *chat_models, rows, tmp_path):
        assert len(logged) == 4
        for line in logged:
            assert [line[key] for key in ("loss", "ce", "kd", "grad_norm")] == pytest.approx(
                [loss.item(), ce, kd, norm], rel=1e-4)


def test_one_model_is_as_good_a_teacher_as_a_student(chat_models, texts):
    """Of rows of each kind both are judged by the same text."""
    model = AutoModelForCausalLM.from_pretrained(chat_models[0]).eval()
    distillation = Distillation(AutoTokenizer.from_pretrained(chat_models[0]), chat_models[0])
    for make, _ in KINDS.values():
        batch = distillation.collate([make(text[:90]) for text in texts[:3]])
        with torch.no_grad():
            logits = model(**distillation.inputs(batch)).logits
        metrics = distillation.measured(distillation.measure(logits, batch))
        assert metrics["teacher_bits_per_byte"] == pytest.approx(metrics["bits_per_byte"], rel=1e-6)


@pytest.mark.slow
def test_a_teacher_that_is_worse_is_named_once(chat_models, tmp_path):
    """The student as it is teaches itself with random weights."""
    rows = [{"text": "One day a boat came home."}] * 4
    student = AutoModelForCausalLM.from_pretrained(chat_models[0])
    teacher = AutoModelForCausalLM.from_pretrained(chat_models[1])
    for weight in teacher.parameters():
        weight.data.normal_(std=3.0)
    trainer_class, settings = trainer_of("Trainer", tmp_path)
    tokenizers = list(map(AutoTokenizer.from_pretrained, chat_models))
    trainer = distilled(trainer_class, teacher, tokenizers[1])(
        student, args=settings, eval_dataset=rows, processing_class=tokenizers[0])
    with pytest.warns(UserWarning) as warned:
        metrics = trainer.evaluate()
        trainer.evaluate()
    [line] = [str(warning.message) for warning in warned if "is worse" in str(warning.message)]
    bits = metrics["eval_teacher_bits_per_byte"], metrics["eval_bits_per_byte"]
    assert bits[0] > bits[1] and "({:#.4g} and {:#.4g} bits per byte)".format(*bits) in line
    assert line.startswith(f"teacher {chat_models[1]} is worse on the held-out rows")


def test_a_student_stops_where_it_learns_to(chat_models, tmp_path):
    """At eos, at the end of a turn of its template, and where it did before, also when saved."""
    student = AutoModelForCausalLM.from_pretrained(chat_models[0])
    tokenizer = AutoTokenizer.from_pretrained(chat_models[0])
    student.generation_config.eos_token_id = [7]
    trainer_class, settings = trainer_of("Trainer", tmp_path)
    trainer = distilled(trainer_class, chat_models[1])(
        student, args=settings, train_dataset=[{"text": "One day"}] * ROWS,
        processing_class=tokenizer)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    ends = GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id
    taught = taught_ends(trainer.distillation.student)
    assert tokenizer.eos_token_id in taught and set(ends) == {7, *taught}


def test_a_student_made_anew_stops_there_too_and_one_without_ends_has_none(chat_models, tmp_path):
    """Trainer calls `model_init` before each training; no id ends a text without an eos."""
    tokenizer = AutoTokenizer.from_pretrained(chat_models[0])
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})

    def made_anew():
        model = AutoModelForCausalLM.from_pretrained(chat_models[0])
        model.resize_token_embeddings(len(tokenizer))
        return model

    trainer_class, settings = trainer_of("Trainer", tmp_path)
    trainer = distilled(trainer_class, chat_models[1])(
        args=settings, train_dataset=[{"text": "One day"}] * ROWS, processing_class=tokenizer,
        model_init=made_anew)
    trainer.train()
    student = trainer.distillation.student
    ends = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert set(trainer.model.generation_config.eos_token_id) == set(ends)
    student.table.eos = student.table.end_of_turn = -1
    trainer.model.generation_config.eos_token_id = None
    trainer.distillation.teach_ends(trainer.model)
    assert trainer.model.generation_config.eos_token_id is None


def test_trl_reads_no_row_itself(chat_models, tmp_path):
    """Nor with arguments of transformers, of which it makes its own; max_length is TRL's."""
    from datasets import Dataset

    trl = pytest.importorskip("trl")
    rows = [{"text": "One day a boat came home. " * 200}] * ROWS
    for name, own, length in [("Trainer", {}, 1024), ("SFTTrainer", {"max_length": None}, 2**31)]:
        trainer = distilled(trl.SFTTrainer, chat_models[1], teacher_max_length=10000)(
            AutoModelForCausalLM.from_pretrained(chat_models[0]),
            args=trainer_of(name, tmp_path, **own)[1], train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(chat_models[0]))
        assert trainer.train_dataset[0] == rows[0]
        num_tokens = len(trainer.distillation.student.encode([rows[0]["text"]])[0])
        assert num_tokens > 1024
        labels = trainer.distillation.collate(rows[:1])["labels"]
        assert int((labels >= 0).sum()) == min(num_tokens - 1, length)


def test_a_batch_may_hold_rows_of_several_kinds(chat_models):
    """As a data set of texts and chats has them; terms of all ranks come as a tensor."""
    distillation = Distillation(AutoTokenizer.from_pretrained(chat_models[0]), chat_models[1])
    empty = dict.fromkeys(["text", "messages", "prompt", "completion"])
    rows = [empty | make("One day " * 9) for make, _ in KINDS.values()]
    batch = distillation.collate(rows)
    apart = [count_terms(distillation.collate([row])) for row in rows]
    assert count_terms(batch) == tuple(map(sum, zip(*apart))) and min(map(min, apart)) > 0
    as_json = {"messages": json.dumps(rows[list(KINDS).index("messages")]["messages"])}
    assert count_terms(distillation.collate([as_json])) in apart
    by_worker = pickle.loads(pickle.dumps(distillation.collate))(rows)  # a spawned one
    assert count_terms(by_worker) == count_terms(batch)
    shape = *batch["labels"].shape, len(distillation.student.table)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    loss, _ = distillation.loss(logits, batch)
    assert torch.equal(distillation.loss(logits, batch, torch.tensor(count_terms(batch)))[0], loss)


def test_a_loss_without_weight_is_not_logged(chat_models, tmp_path):
    for without in ("ce", "kd"):
        trainer_class, settings = trainer_of("Trainer", tmp_path, gradient_accumulation_steps=1)
        trainer = distilled(trainer_class, chat_models[1], **{f"{without}_weight": 0.0})(
            AutoModelForCausalLM.from_pretrained(chat_models[0]), args=settings,
            train_dataset=[{"text": "One day"}] * ROWS,
            processing_class=AutoTokenizer.from_pretrained(chat_models[0]))
        trainer.train()
        assert without not in trainer.state.log_history[0].keys() > {"loss"}


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
def test_a_mixture_balances_its_experts_where_its_config_asks(models, tokenizers, tmp_path, asks):
    """Padding chooses no expert: the texts, unequal, each by itself, say what the loss is."""
    write_family("qwen3_moe", tokenizers[0], 0, tmp_path / "student")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    student.config.output_router_logits = asks
    rows = [{"text": "One day"}, {"text": "a boat came home, and all were glad of it"}]
    trainer_class, settings = trainer_of("Trainer", tmp_path, gradient_accumulation_steps=1)
    trainer = distilled(trainer_class, str(models[1]), max_length=60)(
        student, args=settings, train_dataset=rows, processing_class=tokenizers[0])
    router_logits = []
    for row in rows:
        batch = trainer.distillation.collate([row])
        arguments = trainer.distillation.inputs(batch)
        with torch.no_grad():
            router_logits += student(**arguments, output_router_logits=True).router_logits
    balance = balance_of(router_logits, student.config.num_experts_per_tok)
    trainer.train()
    trained = trainer.state.log_history[0]
    router = trained["loss"] - trained["ce"] - trained["kd"]
    assert router == pytest.approx(asks * 0.05 * float(balance), abs=2e-4)
    assert balance > 1


def test_autocast_and_an_adapter_of_the_teacher_change_nothing(chat_models, tmp_path):
    """In Lightning and Accelerate the loss stands inside of autocast; a new adapter adds 0."""
    peft = pytest.importorskip("peft")
    tokenizers = list(map(AutoTokenizer.from_pretrained, chat_models))
    teacher = AutoModelForCausalLM.from_pretrained(chat_models[1])
    values = []
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(chat_models[1]),
                                  peft.LoraConfig())
    adapted.save_pretrained(tmp_path)  # without a tokenizer: it is that of its base model
    for its in ((teacher, tokenizers[1]), (adapted, tokenizers[1]), (str(tmp_path),)):
        distillation = Distillation(tokenizers[0], *its, loss="uld")
        batch = distillation.collate([{"text": "In 2010 the boat"}, {"text": ""}])
        shape = *batch["batch"].student.ids.shape, len(tokenizers[0])
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                values.append(float(distillation.loss(logits, batch)[0]))
    assert values == [values[0]] * 6


def blocks():
    """Return the Python of each section of the page, by its title."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    return dict(re.findall(r"^## ([^\n]*)\n.*?^```python\n(.*?)^```", page, re.M | re.S))


@pytest.mark.slow
@pytest.mark.parametrize("title", ["TRL", "The Trainer of transformers", "Lightning",
                                   "A loop of your own"])
def test_the_page_runs_as_it_stands(chat_models, expected, tmp_path, monkeypatch, title):
    """With small models in the places of the hub's, and few steps."""
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, expected["messages"][0])))
    code = blocks()[title]
    teacher = "Qwen/Qwen3-0.6B" if title == "TRL" else "Qwen/Qwen3-8B"
    few = "max_steps=2, report_to='none'"
    if title == "TRL":  # as it stands, on a machine without a GPU, too
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        Path("chats.jsonl").unlink()
    else:
        few += ", use_cpu=True"
    code = code.replace("max_steps=100", few)
    for name, path in zip(("HuggingFaceTB/SmolLM2-135M-Instruct", teacher), chat_models):
        assert name in code
        code = code.replace(name, path)
    exec(compile(code, title, "exec"), {})


def test_wrong_arguments_are_refused(chat_models):
    tokenizer = AutoTokenizer.from_pretrained(chat_models[0])
    for flags, words in [({"on_policy": 0.5}, "on_policy=0.5: no such flag here"),
                         ({"los": "alm"}, "los='alm': no such flag here"),
                         ({"loss": "x"}, "--loss x: expected one of"),
                         ({"loss": "projection_kl", "loss_options": {"projection_topk": 5}},
                          "projection_topk has no part here"),
                         ({"template_kwargs": '{"thinsk": 1}'}, "template reads thinsk; correct"),
                         ({"max_length": 1}, "--max_length 1: expected 2 or more")]:
        with pytest.raises(ValueError, match=words):
            Distillation(tokenizer, chat_models[1], **flags)
    cfg = config_of({"loss": "gold", "loss_options": {"reverse": True}, "drop_images": True})
    assert cfg.options_of_loss["reverse"] and cfg.source_options.drop_images
    with pytest.raises(ValueError, match="teacher_tokenizer: is missing"):
        Distillation(tokenizer, AutoModelForCausalLM.from_pretrained(chat_models[1]))
    distillation = Distillation(tokenizer, chat_models[1])
    with pytest.raises(ValueError, match="a row has the columns a, b; expected text, messages"):
        distillation.collate([{"a": 1, "b": 2}])
    with pytest.raises(ValueError, match="a row is a str; expected a dict"):
        distillation.collate(["a text"])
    bare = AutoTokenizer.from_pretrained(chat_models[0])
    bare.chat_template = None
    with pytest.raises(ValueError, match="its tokenizer has no chat template, and a row holds"):
        Distillation(bare, chat_models[0]).collate(  # two of one name
            [{"text": "no chat"}, {"messages": [{"role": "user", "content": "one"}]}])
    with pytest.warns(UserWarning, match="a row: no model reads its column 'chat_template_kwargs'"):
        distillation.collate([{"text": "a", "chat_template_kwargs": {"enable_thinking": False}}])
    batch = distillation.collate([{"text": "In 2010 the boat"}])
    ids = distillation.inputs(batch)["input_ids"]
    for shape in [(1, ids.shape[1] - 1, 400), (1, ids.shape[1], 300)]:
        with pytest.raises(ValueError, match=re.escape(f"logits of {shape}: expected (1, ")):
            distillation.loss(torch.zeros(shape), batch)
    narrow = AutoModelForCausalLM.from_pretrained(chat_models[1])
    narrow.resize_token_embeddings(300)
    with pytest.raises(ValueError, match=r"its token .* has the id 300, beyond 300"):
        Distillation(tokenizer, narrow, AutoTokenizer.from_pretrained(chat_models[1]))
    made = distilled(SFT, chat_models[1])
    for name, value in [("packing", True), ("eval_packing", True), ("label_smoothing_factor", 0.1),
                        ("loss_type", "dft"), ("completion_only_loss", False),
                        ("truncation_mode", "keep_end"), ("dataset_text_field", "story")]:
        with pytest.raises(ValueError, match=f"{name}={value}|{name}='{value}'"):
            made("m", args=types.SimpleNamespace(**{name: value}))
    for name in ("compute_metrics", "compute_loss_func", "formatting_func"):
        with pytest.raises(ValueError, match=f"{name}=<built-in function len>: "):
            made("m", args=types.SimpleNamespace(), **{name: len})


def test_a_trainer_says_what_is_missing_or_teaches_nothing(chat_models, tmp_path):
    student = AutoModelForCausalLM.from_pretrained(chat_models[0])
    rows = [{"messages": [{"role": "user", "content": "nobody answers"}]}] * ROWS
    made = distilled(Trainer, chat_models[1])
    settings = trainer_of("Trainer", tmp_path)[1]
    with pytest.raises(ValueError, match="processing_class: is missing; give the student's"):
        made(student, args=settings, train_dataset=rows)
    trainer = made(student, args=settings, train_dataset=rows,
                   processing_class=AutoTokenizer.from_pretrained(chat_models[0]))
    with pytest.warns(UserWarning, match="a step has 0 tokens to learn and 0 terms"):
        trainer.train()


def test_a_loss_of_no_held_out_label_is_not_known(chat_models, tmp_path):
    """A 0 would be the best of all losses."""
    question = {"role": "user", "content": "nobody answers"}
    answered = {"messages": [question, {"role": "assistant", "content": "somebody does"}]}
    trainer = distilled(Trainer, chat_models[1], max_length=60)(
        AutoModelForCausalLM.from_pretrained(chat_models[0]),
        args=trainer_of("Trainer", tmp_path)[1], train_dataset=[answered] * ROWS,
        processing_class=AutoTokenizer.from_pretrained(chat_models[0]))
    with pytest.warns(UserWarning, match="have nothing to learn, .* so their loss is not known"):
        metrics = trainer.evaluate([{"messages": [question]}] * 3)
    assert math.isnan(metrics["eval_loss"]) and "eval_ce" not in metrics
    mixed = trainer.evaluate([{"messages": [question]}] * 3 + [answered])
    assert mixed["eval_loss"] == pytest.approx(trainer.evaluate([answered])["eval_loss"], rel=1e-6)


def test_an_evaluation_of_no_row_ends_with_a_line(chat_models, tmp_path):
    """Also of a stream that has ended, and of one data set among several."""
    from datasets import Dataset, IterableDataset

    rows = [{"text": "One day"}] * 2
    trainer = distilled(Trainer, chat_models[1])(
        AutoModelForCausalLM.from_pretrained(chat_models[0]),
        args=trainer_of("Trainer", tmp_path)[1], train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(chat_models[0]))
    ended = iter(rows)
    data = IterableDataset.from_generator(lambda: ended)
    assert "eval_bits_per_byte" in trainer.evaluate(data)
    for empty, name in ((data, "eval"), (Dataset.from_list([]), "eval"),
                        ({"a": rows, "b": Dataset.from_list([])}, "eval_b")):
        with pytest.raises(ValueError, match=f"{name}: its data set has no rows; give it some"):
            trainer.evaluate(empty)


@pytest.mark.parametrize("flags", [{}, {"max_length": 257}])
def test_a_length_beyond_the_students_context_is_refused(chat_models, tmp_path, flags):
    student = AutoModelForCausalLM.from_pretrained(chat_models[0])
    student.config.max_position_embeddings = 256
    needed = {"args": trainer_of("Trainer", tmp_path)[1], "train_dataset": [{"text": "a"}],
              "processing_class": AutoTokenizer.from_pretrained(chat_models[0])}
    length = flags.get("max_length", 512)
    with pytest.raises(ValueError, match=f"max_length={length}: the student has a context of 256"):
        distilled(Trainer, chat_models[1], **flags)(student, **needed)
    made = distilled(Trainer, chat_models[1], max_length=256)(student, **needed)
    assert made.distillation.student.max_length == 256


class SFT:
    """Stand in for a trainer that is never made."""
