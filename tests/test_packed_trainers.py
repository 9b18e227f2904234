"""integrations/packed.py: called as verl calls a loss, it is that of `CrossTokenizerKD`.

It is not installed here: what its source says of a loss stands below, with the commit.
"""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from isogloss.cross_tokenizer import CrossTokenizerKD
from isogloss.integrations import Distillation
from isogloss.integrations.packed import distilled_in_verl

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


# --- verl -----------------------------------------------------------------------------------------


def padded(packed, size=16):
    """Return (1, T, V) logits with padding behind the samples, of which no loss knows anything."""
    behind = torch.full((size, packed.shape[1]), torch.nan)
    return torch.cat([packed, behind])[None].requires_grad_()


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
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **_: teacher)
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
