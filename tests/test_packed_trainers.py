"""integrations/packed.py: called as verl and slime call a loss, it is that of `CrossTokenizerKD`.

Neither is installed here: what their sources say of a loss stands below, with the commit.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from isogloss.cross_tokenizer import CrossTokenizerKD
from isogloss.integrations import Distillation
from isogloss.integrations.packed import distilled_in_verl, slime_loss, unpacked

# github.com/THUDM/slime 624b824a, slime/backends/megatron_utils/loss.py and data.py: called with
# these by position; logits are (1, T, V) of all samples one after the other, and padding.
SLIME_PARAMETERS = ["args", "batch", "logits", "sum_of_sample_mean"]
# github.com/verl-project/verl 1dda039b, verl/workers/engine/fsdp/transformer_impl.py: called with
# these by name; `data` holds jagged tensors, lists, and numbers of the whole batch.
VERL_CALLS = [["student_logits", "data"], ["model_output", "data", "dp_group"]]


@pytest.fixture(scope="module")
def tools(models):
    """Tokenizers of both sides, and the teacher."""
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in models]
    return SimpleNamespace(tokenizers=tokenizers,
                           teacher=AutoModelForCausalLM.from_pretrained(models[1]).eval())


def distillation_of(tools, **flags):
    return Distillation(tools.tokenizers[0], tools.teacher, tools.tokenizers[1], **flags)


@pytest.fixture(scope="module")
def expected(tools, texts):
    return expected_of(tools, [text[:size] for text, size in zip(texts, (90, 40, 60))])


def expected_of(tools, rows, loss="piece_kl"):
    """Return packed logits of texts, and what `CrossTokenizerKD` says of these."""
    parameters = {"text_weight": 1.0} if loss == "piece_kl" else {}
    kd = CrossTokenizerKD(*tools.tokenizers, loss, max_length=200, **parameters)
    batch = kd.collate(rows)
    is_text = batch.student["attention_mask"].bool()
    torch.manual_seed(0)
    packed = torch.randn(int(is_text.sum()), len(tools.tokenizers[0]) + 10, requires_grad=True)
    logits = torch.zeros(*is_text.shape, packed.shape[1]).masked_scatter(
        is_text[..., None], packed)
    total, terms = kd.sum_and_count(logits, tools.teacher(**batch.teacher).logits, batch)
    assert terms > 20
    gradient, = torch.autograd.grad(total, packed)
    ids = [ids[mask] for ids, mask in zip(batch.student["input_ids"], is_text)]
    return SimpleNamespace(rows=rows, ids=ids, packed=packed.detach(), total=total.detach(),
                           gradient=gradient)


def check(loss, logits, expected, factor=1.0):
    gradient, = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == pytest.approx(factor * float(expected.total), rel=1e-5)
    size = len(expected.packed)
    torch.testing.assert_close(gradient[0, :size], factor * expected.gradient, rtol=1e-5, atol=1e-5)
    assert not gradient[0, size:].any()


# --- slime ----------------------------------------------------------------------------------------


def slime_batch(ids, num_prompt, logp=None):
    """Return a micro-batch as slime's get_batch makes it; `num_prompt` are tokens of prompts."""
    lengths = [len(sample) - size for sample, size in zip(ids, num_prompt)]
    return {"unconcat_tokens": ids, "total_lengths": list(map(len, ids)),
            "response_lengths": lengths, "loss_masks": [torch.ones(length) for length in lengths],
            "rollout_log_probs": logp}


def padded(packed, size=16):
    """Return (1, T, V) logits with padding behind the samples, of which no loss knows anything."""
    behind = torch.full((size, packed.shape[1]), torch.nan)
    return torch.cat([packed, behind])[None].requires_grad_()


PER_TOKEN = SimpleNamespace(calculate_per_token_loss=True)


@pytest.mark.parametrize("loss", ["piece_kl", "alm"])
def test_slime_has_the_loss_of_texts(tools, texts, loss):
    """The gradient behind a prompt is that of `CrossTokenizerKD`; it has none in the prompt."""
    rows = [{"prompt": text[:20] + ":", "completion": text[20:70]} for text in texts[:3]]
    expected = expected_of(tools, ["".join(row.values()) for row in rows], loss)
    distillation = distillation_of(tools, loss=loss, ce_weight=0.0)
    num_prompt = []
    for row, gradient in zip(rows, expected.gradient.split(list(map(len, expected.ids)))):
        ids, = distillation.student.encode([row["prompt"]])
        num_prompt.append(len(ids) - 1)  # without eos
        gradient[: len(ids) - 2] = 0  # the last token of the prompt predicts the first one behind
    function = slime_loss(distillation, rows)
    assert list(inspect.signature(function).parameters) == SLIME_PARAMETERS
    logits = padded(expected.packed)
    batch = slime_batch(expected.ids, num_prompt)
    total, metrics = function(PER_TOKEN, batch, logits, None)
    made = distillation.collate(rows)
    in_rows = unpacked(logits[0], expected.ids, made, len(distillation.student.table))
    expected.total = distillation.loss(in_rows, made, (1, 1))[0].detach()
    check(total, logits, expected)
    assert float(metrics["kd"]) == pytest.approx(float(total.detach()))
    # a sample of which slime learns nothing takes no part
    batch["loss_masks"][1][:] = 0
    without, _ = function(PER_TOKEN, batch, logits, None)
    parts = expected.packed.split(list(map(len, expected.ids)))
    others = slime_batch(expected.ids[::2], num_prompt[::2])
    alone, _ = function(PER_TOKEN, others, torch.cat([parts[0], parts[2]])[None], None)
    assert float(without.detach()) == pytest.approx(float(alone.detach()), rel=1e-6)
    assert float(without.detach()) < float(total.detach())


@pytest.mark.parametrize("on_policy", [False, True])
def test_slime_has_the_loss_of_chats(chat_models, texts, on_policy):
    """As of rows with the same prompts and completions, each side by its own template."""
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in chat_models]
    for tokenizer, mark in zip(tokenizers, ("\n", " ")):
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message.role + ':" + mark + "' + message.content + "
            "'\n' }}{% endfor %}{% if add_generation_prompt %}assistant:" + mark + "{% endif %}")
    tokenizer = tokenizers[0]
    teacher = AutoModelForCausalLM.from_pretrained(chat_models[1])
    distillation = Distillation(tokenizer, teacher, tokenizers[1])
    rows = []
    for text in texts[:3]:
        rows.append({"prompt": [{"role": "user", "content": text[:20]}],
                     "completion": [{"role": "assistant", "content": text[20:70]}]})
    made = distillation.collate(rows)["batch"].student
    ids = []
    num_prompt = []
    for row, labels in zip(made.ids, made.labels):
        learned = (labels >= 0).nonzero()[:, 0]
        num_prompt.append(int(learned[0]) + 1)
        ids.append(torch.cat([row[: int(learned[-1]) + 1], labels[learned[-1:]]]))
    logits = torch.randn(1, sum(map(len, ids)), len(tokenizer))
    logp = [torch.full((len(row),), -1.0) for row in ids] if on_policy else None
    _, metrics = slime_loss(distillation, rows)(
        PER_TOKEN, slime_batch(ids, num_prompt, logp), logits, None)
    width = made.ids.shape[1]
    wide = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - len(part)))
                        for part in logits[0].split(list(map(len, ids)))])
    _, (ce, kd) = distillation.loss(wide, distillation.collate(rows))
    assert float(kd) > 0
    assert float(metrics["kd"]) == pytest.approx(float(kd), rel=1e-5)
    assert float(metrics["ce"]) == pytest.approx(0.0 if on_policy else float(ce), rel=1e-5)


def test_the_module_of_the_page_is_one_of_slime(chat_models, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": [{"role": "user", "content": text[:20]}]} for text in texts[:2]]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    page = (ROOT / "docs" / "trainers.md").read_text()
    code = re.search(r"^## slime\n.*?^```python\n(.*?)^```", page, re.M | re.S)[1]
    for name, path in zip(("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-8B"), chat_models):
        code = code.replace(name, path)
    module = {}
    exec(compile(code, "distilling.py", "exec"), module)
    student = module["student"]
    written = student.encode("The answer.", add_special_tokens=False)
    ids = []
    for row in prompts:
        text = student.apply_chat_template(row["prompt"], tokenize=False,
                                           add_generation_prompt=True)
        ids.append(torch.tensor(student.encode(text, add_special_tokens=False) + written))
    batch = slime_batch(ids, [len(row) - len(written) for row in ids])
    logits = torch.randn(1, sum(map(len, ids)), len(student), requires_grad=True)
    total, metrics = module["loss"](PER_TOKEN, batch, logits, None)
    total.backward()
    assert logits.grad.abs().sum() > 0
    assert metrics["ce"] > 0 and metrics["kd"] > 0


def test_slime_is_told_what_it_lacks(tools, expected):
    loss = slime_loss(distillation_of(tools), [{"prompt": ""}])  # bos alone
    logits = padded(expected.packed)
    for change, words in [
        (dict(args=SimpleNamespace(calculate_per_token_loss=False)), "--calculate-per-token-loss"),
        (dict(logits=logits[..., :9]), "expected .* or more; shards"),
        (dict(logits=logits[:, :9]), "expected .* or more; shards"),
        (dict(batch=slime_batch(expected.ids, [2, 1, 1])), "no such prompt"),
    ]:
        call = dict(args=PER_TOKEN, batch=slime_batch(expected.ids, [1, 1, 1]), logits=logits)
        with pytest.raises(ValueError, match=words):
            loss(**call | change, sum_of_sample_mean=None)
    batch = slime_batch(expected.ids, [1, 1, 1])
    batch["loss_masks"][0][3] = 0
    with pytest.raises(ValueError, match="several turns"):
        loss(PER_TOKEN, batch, logits, None)


# --- verl -----------------------------------------------------------------------------------------


class Stack(list):
    """Stand for the NonTensorStack of tensordict."""

    def tolist(self):
        return list(self)


class Data(dict):
    """Stand for a TensorDict."""

    def set_non_tensor(self, name, value):
        self[name] = value


class Worker:
    """Do what verl's TrainingWorker and its engine do around the loss of a micro-batch."""

    def __init__(self, logits):
        self.logits = logits

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def train_batch(self, data):
        outputs = {}
        if data.get("distillation_use_topk"):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = self._call(0, self.logits, data)
        jagged = {}
        for name, value in outputs.items():
            assert value.shape == self.logits.shape[:2]
            offsets = data["input_ids"].offsets()
            jagged[name] = torch.nested.nested_tensor_from_jagged(
                value[0, : int(offsets[-1])], offsets)
        return self._call(1, jagged, data, None)

    infer_batch = train_batch

    def _call(self, number, *values):
        return self.loss_fn(**dict(zip(VERL_CALLS[number], values)))


def verl_data(expected, rows=None):
    return Data(rows=Stack(rows or [{"text": text} for text in expected.rows]), dp_size=2,
                batch_num_tokens=50,
                input_ids=torch.nested.as_nested_tensor(expected.ids, layout=torch.jagged))


class Chats(list):
    """Stand for verl's MultiTurnSFTDataset of some messages."""

    messages = property(list)
    tools = None

    def __getitem__(self, item):
        return {"input_ids": item}


class SFTTrainer:
    """Do what verl's does in this order; a test sets the logits and the messages of its config."""

    def __init__(self, config):
        self.config = config
        self.model_config = SimpleNamespace(tokenizer=config.tokenizer)
        self._build_dataset()
        self._build_engine()

    def _build_dataset(self):
        self.train_dataset, self.val_dataset = self.config.chats, None

    def _build_engine(self):
        self.training_client = Worker(self.config.logits)
        self.training_client.set_loss_fn(None)


def verl_config(tokenizer, logits, chats=(), max_length=201, **data):
    return SimpleNamespace(tokenizer=tokenizer, logits=logits, chats=Chats(chats),
                           data=DataConfig(max_length=max_length, **data))


class DataConfig(dict):
    """Stand for a DictConfig of omegaconf."""

    __getattr__ = dict.__getitem__


def verl_worker(tools, logits, **flags):
    """Return the client of a trainer with a teacher."""
    trainer_class = distilled_in_verl(SFTTrainer, tools.teacher, tools.tokenizers[1], **flags)
    return trainer_class(verl_config(tools.tokenizers[0], logits)).training_client


@pytest.mark.parametrize("name", ["train_batch", "infer_batch"])
def test_verl_has_the_loss_of_texts(tools, expected, name):
    logits = padded(expected.packed)
    worker = verl_worker(tools, logits, ce_weight=0.0)
    loss, metrics = getattr(worker, name)(data=verl_data(expected))
    assert metrics == {}
    check(loss, logits, expected, factor=2 / 50)


def test_the_lines_of_the_page_distill_in_verl(chat_models, texts, monkeypatch):
    """They are ten at most; the loss is that of the chats with their tools, as verl renders them.
    """
    page = (ROOT / "docs" / "trainers.md").read_text()
    code = re.search(r"^## verl\n.*?^```python\n(.*?)^```", page, re.M | re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    student, teacher = [AutoTokenizer.from_pretrained(folder) for folder in chat_models]
    mark = "{{ mark if mark is defined else '' }}"
    student.chat_template = teacher.chat_template = (
        "{{ tools[0].function.name if tools }}{% for message in messages %}" + mark +
        "{{ message.role + ':' + message.content + '\n' }}{% endfor %}")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: teacher)
    chats = []
    for text in texts[:3]:
        chats.append([{"role": "user", "content": text[:20]},
                      {"role": "assistant", "content": text[20:70]}])
    module = SimpleNamespace(SFTTrainer=SFTTrainer, made=[])
    for name in ("verl", "verl.trainer", "verl.trainer.sft_trainer"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(sft_trainer=module))
    config = verl_config(student, None, chats, 40, apply_chat_template_kwargs={"mark": "-"})
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    tools = config.chats.tools = [None, [tool], None]
    module.main = lambda: module.made.append(module.SFTTrainer(config))
    exec(compile(code.replace("Qwen/Qwen3-8B", chat_models[1]), "page", "exec"),
         {"__name__": "__main__"})
    [trainer] = module.made
    assert trainer.val_dataset is None and len(trainer.train_dataset) == 3
    rows = [trainer.train_dataset[number]["rows"] for number in range(3)]
    ids = []
    for chat, given, row in zip(chats, tools, rows):
        assert row == {"messages": chat, "tools": given}
        text = student.apply_chat_template(chat, given, tokenize=False, mark="-")
        assert text.startswith("add-" if given else "-")
        ids.append(torch.tensor(student.encode(text, add_special_tokens=False)[:40]))
    assert max(map(len, ids)) == 40  # a text is cut
    logits = torch.randn(1, sum(map(len, ids)), len(student), requires_grad=True)
    trainer.training_client.logits = logits
    data = verl_data(SimpleNamespace(ids=ids), rows)
    loss, _ = trainer.training_client.train_batch(data=data)
    model = AutoModelForCausalLM.from_pretrained(chat_models[1])
    distillation = Distillation(student, model, teacher, max_length=39,
                                template_kwargs='{"mark": "-"}')
    made = distillation.collate(rows)
    width = made["labels"].shape[1]
    wide = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - len(part)))[:width]
                        for part in logits[0].split(list(map(len, ids)))])
    wanted, _ = distillation.loss(wide, made, (50, 50), 2)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert wanted.item() > 0


def test_verl_is_told_what_it_lacks(tools, expected):
    worker = verl_worker(tools, padded(expected.packed))
    data = verl_data(expected, [{"text": text.upper()} for text in expected.rows])
    with pytest.raises(ValueError, match="row 0 of a batch: the trainer's token ids are not"):
        worker.train_batch(data)
    with pytest.raises(ValueError, match="handed no logits out"):
        worker.loss_fn(model_output={"log_probs": None}, data=data, dp_group=None)
    with pytest.raises(ValueError, match="only verl's engine fsdp"):
        worker.loss_fn(student_logits=worker.logits, data=data, data_format="thd")
    config = verl_config(tools.tokenizers[0], None)
    config.chats = [{"input_ids": 0}]
    with pytest.raises(ValueError, match="custom_cls: its data set has no `messages`"):
        distilled_in_verl(SFTTrainer, tools.teacher, tools.tokenizers[1])(config)
