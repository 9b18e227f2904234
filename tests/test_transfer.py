"""isogloss transfer: a model with another tokenizer keeps what it knows of the tokens both have."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ranks
from conftest import asset, write_model
from isogloss import command
from isogloss.align import TokenTable
from isogloss.projection_tools.retokenize import common_direction
from jobs import ds_config, losses_of, run_and_listen, write_corpus
from test_pretrained import custom

TEXTS = ["In 2010 the crème brûlée cost 12.50.", "def f(x):\n    return x ** 2\n", "日本語 ok"]


def transfer(model, tokenizer, output, *more):
    """Run the command; return the directory."""
    command.tool("transfer", [f"--model={model}", f"--tokenizer={tokenizer}",
                              f"--output={output}", "--head_offset=false", *more])
    return Path(output)


def rows_of(folder):
    """Return (rows of the embedding, of the head) as transformers loads them, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return [end.weight.detach() for end in
            (model.get_input_embeddings(), model.get_output_embeddings())]


def weights_of(folder):
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def test_its_own_tokenizer_gives_the_same_model(models, tmp_path):
    """All rows that a text can ask for stay bit for bit; the padding of the head is gone."""
    student = transfer(models[0], models[0], tmp_path / "out")
    before, after = weights_of(models[0]), weights_of(student)
    assert before.keys() == after.keys()
    size = len(AutoTokenizer.from_pretrained(models[0]))
    for name, weight in before.items():
        expected = weight[:size] if "embed_tokens" in name else weight
        assert torch.equal(after[name], expected), name
    assert AutoConfig.from_pretrained(student).vocab_size == size


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_rows_are_means_of_what_the_old_tokenizer_writes(kind, models, untied, tmp_path):
    """By the definition: bytes of a token, cut by the old tokenizer without a space in front."""
    model = {"tied": models[0], "untied": untied}[kind]
    student = transfer(model, models[1], tmp_path / "out")
    old_tokenizer, new_tokenizer = (AutoTokenizer.from_pretrained(path)
                                    for path in (models[0], models[1]))
    old, new = map(TokenTable.from_tokenizer, (old_tokenizer, new_tokenizer))
    backend = old_tokenizer.backend_tokenizer
    same_bytes = 0
    for old_rows, new_rows in zip(rows_of(model), rows_of(student)):
        assert len(new_rows) == len(new)
        for i in range(0, len(new), 7):
            text = new.bytes_of(i)
            if new.special[i] or not text.isascii() or not text.isalnum():
                continue
            pieces = [token.id for token in backend.model.tokenize(text.decode())]
            assert b"".join(map(old.bytes_of, pieces)) == text
            same_bytes += len(pieces) == 1
            expected = old_rows[pieces].mean(0)
            torch.testing.assert_close(new_rows[i], expected, rtol=0, atol=1e-6)
        eos = (old_tokenizer.eos_token_id, new_tokenizer.eos_token_id)
        assert torch.equal(new_rows[eos[1]], old_rows[eos[0]])
    assert same_bytes > 5
    assert torch.equal(*rows_of(student)) == (kind == "tied")


def test_a_model_of_many_files_is_copied_file_by_file(untied, models, tmp_path, monkeypatch):
    """Files without a vocabulary are the same bytes, the index is right, nothing loads a model."""
    model = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(untied).save_pretrained(model, max_shard_size="20KB")
    AutoTokenizer.from_pretrained(untied).save_pretrained(model)
    monkeypatch.setattr("isogloss.transfer.load_model", None)
    student = transfer(model, models[1], tmp_path / "out")
    whole = transfer(untied, models[1], tmp_path / "whole")
    assert len(list(model.glob("*.safetensors"))) > 3
    index, before = (json.loads((folder / "model.safetensors.index.json").read_text())
                     for folder in (student, model))
    assert index["weight_map"] == before["weight_map"]
    weights = weights_of(student)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in weights.values())
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(whole).items())
    same = [path.name for path in model.glob("*.safetensors")
            if path.read_bytes() == (student / path.name).read_bytes()]
    changed = {before["weight_map"][name] for name in before["weight_map"]
               if "embed_tokens" in name or "lm_head" in name}
    assert {*same} == {path.name for path in model.glob("*.safetensors")} - changed


def test_a_bias_of_the_head_goes_along(models, tmp_path):
    config = AutoConfig.for_model("phi", vocab_size=360, hidden_size=32, intermediate_size=48,
                                  num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path / "phi")
    AutoTokenizer.from_pretrained(models[0]).save_pretrained(tmp_path / "phi")
    student = transfer(tmp_path / "phi", models[1], tmp_path / "out")
    weights = weights_of(student)
    eos = [AutoTokenizer.from_pretrained(path).eos_token_id for path in models]
    assert weights["lm_head.bias"].shape == (len(AutoTokenizer.from_pretrained(models[1])),)
    assert weights["lm_head.bias"][eos[1]] == model.lm_head.bias[eos[0]]


def test_ends_and_other_ids_are_those_of_the_new_tokens(models, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(models[0], model)
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    (model / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [eos, 40], "pad_token_id": eos, "temperature": 0.7, "do_sample": True,
         "suppress_tokens": [3]}))
    student = transfer(model, models[1], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(student)
    generation = json.loads((student / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert generation["temperature"] == 0.7 and generation["do_sample"] is True
    assert "suppress_tokens" not in generation
    config = json.loads((student / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id
    written = AutoModelForCausalLM.from_pretrained(student).generate(
        **tokenizer("In 20", return_tensors="pt"), max_new_tokens=5)
    assert written.max() < len(tokenizer)


def chat_tokenizer(tokenizer, begin, end):
    """Return a copy of a tokenizer with a chat template of these two control tokens."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [begin, end]})
    tokenizer.chat_template = ("{% for m in messages %}" + begin + "{{ m.role }}\n{{ m.content }}"
                               + end + "{% endfor %}")
    return tokenizer


def test_roles_of_chats_and_texts_begin_as_the_old_ones(tokenizers, tmp_path):
    """A turn begins and ends as before, whatever the tokens are called; so does a text.

    Several may begin as one: <s> and </s> as <|endoftext|>, which was both.
    """
    old = chat_tokenizer(tokenizers[1], "<start_of_turn>", "<end_of_turn>")
    new = chat_tokenizer(tokenizers[0], "<|im_start|>", "<|im_end|>")
    write_model(old, 1, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": old.convert_tokens_to_ids(["<|endoftext|>", "<end_of_turn>"])}))
    new.save_pretrained(tmp_path / "new")
    student = transfer(tmp_path / "model", tmp_path / "new", tmp_path / "out")
    new_tokens = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    old_tokens = ["<|endoftext|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>"]
    for old_rows, new_rows in zip(rows_of(tmp_path / "model"), rows_of(student)):
        assert torch.equal(new_rows[new.convert_tokens_to_ids(new_tokens)],
                           old_rows[old.convert_tokens_to_ids(old_tokens)])
    ends = json.loads((student / "generation_config.json").read_text())["eos_token_id"]
    assert {*new.convert_tokens_to_ids(["</s>", "<|im_end|>"])} <= {*ends}


def test_a_base_model_stops_at_the_end_of_turn_of_a_chat_tokenizer(models, tokenizers, tmp_path):
    new = chat_tokenizer(tokenizers[0], "<|im_start|>", "<|im_end|>")
    new.save_pretrained(tmp_path / "new")
    student = transfer(models[1], tmp_path / "new", tmp_path / "out")
    ends = json.loads((student / "generation_config.json").read_text())["eos_token_id"]
    assert {*new.convert_tokens_to_ids(["</s>", "<|im_end|>"])} <= {*ends}


def test_there_and_back_again(models, tmp_path):
    """Tokens that both tokenizers have come back bit for bit."""
    there = transfer(models[1], models[0], tmp_path / "there")
    back = transfer(there, models[1], tmp_path / "back")
    tables = [TokenTable.from_tokenizer(AutoTokenizer.from_pretrained(model)) for model in models]
    known = {tables[0].bytes_of(i) for i in range(len(tables[0])) if not tables[0].special[i]}
    same = [i for i in range(len(tables[1])) if tables[1].bytes_of(i) in known]
    assert len(same) > 200
    for before, after in zip(rows_of(models[1]), rows_of(back)):
        assert torch.equal(before[same], after[same])


SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)


def write_kind(kind, tokenizer, folder, **shape):
    """Write a model of a kind with random weights and a tokenizer; return it."""
    shape = {**SHAPE, "bos_token_id": tokenizer.bos_token_id,
             "eos_token_id": tokenizer.eos_token_id, **shape}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_weights_are_found_by_what_they_are(kind, tokenizers, tmp_path):
    """Whatever a file calls them, and whatever else has as many rows."""
    model = write_kind(kind, tokenizers[1], tmp_path / "model", tie_word_embeddings=False,
                       intermediate_size=len(tokenizers[1]))
    tokenizers[0].save_pretrained(tmp_path / "new")
    student = transfer(tmp_path / "model", tmp_path / "new", tmp_path / "out")
    new = AutoModelForCausalLM.from_pretrained(student)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        before, after = (getattr(each, name)().weight for each in (model, new))
        assert torch.equal(after[tokenizers[0].eos_token_id], before[tokenizers[1].eos_token_id])
        assert len(after) == len(tokenizers[0])
    changed = {"embed_in", "embed_tokens", "lm_head"}
    for name, weight in new.state_dict().items():
        if not changed & {*name.split(".")}:
            assert torch.equal(weight, model.state_dict()[name]), name


def test_texts_longer_than_the_context_come_in_parts(tokenizers, tmp_path, capsys):
    write_kind("gpt2", tokenizers[1], tmp_path / "model", n_embd=32, n_head=4, n_layer=1,
               n_positions=50)
    command.tool("transfer", [f"--model={tmp_path / 'model'}", "--tokenizer=bytes",
                              f"--output={tmp_path / 'out'}"])
    assert "with 0 nats less" in capsys.readouterr().out  # every byte is one old token


def test_a_head_that_lies_in_the_files_twice_stays_one(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr("isogloss.transfer.OFFSETS", (2.0,))
    bits = itertools.count(9.0, -1.0)  # so that the offset stays
    monkeypatch.setattr("isogloss.transfer.bits_per_byte", lambda *_: next(bits))
    model = write_kind("llama", tokenizers[1], tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file(weights | {"lm_head.weight": model.lm_head.weight.detach().clone()},
              tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    tokenizers[0].save_pretrained(tmp_path / "new")
    command.tool("transfer", [f"--model={tmp_path / 'model'}", f"--output={tmp_path / 'out'}",
                              f"--tokenizer={tmp_path / 'new'}"])
    weights = weights_of(tmp_path / "out")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_an_offset_that_the_whole_model_is_worse_by_is_left_out(
        models, tokenizers, tmp_path, monkeypatch, capsys):
    """As where the head is the embedding, which it changes too; here by far too large a one."""
    monkeypatch.setattr("isogloss.transfer.OFFSETS", (40.0,))
    tokenizers[0].save_pretrained(tmp_path / "new")
    more = [f"--model={models[1]}", f"--tokenizer={tmp_path / 'new'}"]
    command.tool("transfer", [*more, f"--output={tmp_path / 'out'}"])
    assert "with 0 nats less" in capsys.readouterr().out
    command.tool("transfer", [*more, f"--output={tmp_path / 'plain'}", "--head_offset=false"])
    plain = weights_of(tmp_path / "plain")
    assert all(torch.equal(weight, plain[name])
               for name, weight in weights_of(tmp_path / "out").items())


def test_the_code_of_a_model_comes_along(models, tmp_path):
    model = custom(models[0], tmp_path, tmp_path / "marker")
    student = transfer(model, models[1], tmp_path / "out", "--trust_remote_code")
    loaded = AutoModelForCausalLM.from_pretrained(student, trust_remote_code=True)
    assert type(loaded).__name__ == "CustomModel"
    size = len(AutoTokenizer.from_pretrained(models[1]))
    assert len(loaded.get_input_embeddings().weight) == size


def test_transformers_that_cuts_otherwise_is_a_warning(tokenizers, tmp_path):
    """transformers takes Qwen2's tokenizer class for its models, whatever the files name."""
    write_kind("qwen2", tokenizers[1], tmp_path / "model", num_key_value_heads=2)
    tokenizers[0].save_pretrained(tmp_path / "new")
    with pytest.warns(UserWarning, match="--output .* read it with PreTrainedTokenizerFast"):
        transfer(tmp_path / "model", tmp_path / "new", tmp_path / "out")


def test_ids_that_a_class_has_by_default_are_not_those_of_the_new_tokens(tokenizers, tmp_path):
    write_kind("llama", tokenizers[1], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.endswith("_token_id")}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tokenizer = copy.deepcopy(tokenizers[0])
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "new")
    student = transfer(tmp_path / "model", tmp_path / "new", tmp_path / "out")
    config = AutoConfig.from_pretrained(student)
    assert config.bos_token_id is config.eos_token_id is config.pad_token_id is None
    generation = json.loads((student / "generation_config.json").read_text())
    assert generation["eos_token_id"] is None


@pytest.mark.parametrize("choice", ["auto", "tokenizer", "model"])
def test_the_chat_template_is_the_one_that_is_chosen(choice, models, tokenizers, tmp_path):
    """The model's own brings the control tokens that it writes, with their rows."""
    model = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>" \
                              "{% endfor %}"
    write_model(tokenizer, 1, model)
    student = transfer(model, models[1], tmp_path / "out", f"--chat_template={choice}")
    new = AutoTokenizer.from_pretrained(student)
    if choice == "tokenizer":
        assert new.chat_template is None
        assert len(new) == len(AutoTokenizer.from_pretrained(models[1]))
        return
    chat = [{"role": "user", "content": "In 2010"}]
    ids = new.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert new.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|im_start|>", "<|im_end|>"]
    marks = ["<|im_start|>", "<|im_end|>"]
    for old_rows, new_rows in zip(rows_of(model), rows_of(student)):
        assert torch.equal(new_rows[new.convert_tokens_to_ids(marks)],
                           old_rows[tokenizer.convert_tokens_to_ids(marks)])


def test_a_model_of_bytes_reads_every_text(models, tmp_path, capsys):
    student = transfer(models[1], "bytes", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(student)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id is not None and "256 say what an old one says" in \
        capsys.readouterr().out


def test_what_cannot_be_done_is_one_line(models, untied, tmp_path, capsys):
    weights = tmp_path / "bin"
    shutil.copytree(models[0], weights)
    torch.save(load_file(weights / "model.safetensors"), weights / "pytorch_model.bin")
    (weights / "model.safetensors").unlink()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(models[0])}))
    foreign = tmp_path / "foreign"
    shutil.copytree(models[0], foreign)
    tensors = load_file(foreign / "model.safetensors")
    [name] = [name for name in tensors if "embed_tokens" in name]
    tensors["model.words.weight"] = tensors.pop(name)
    save_file(tensors, foreign / "model.safetensors", metadata={"format": "pt"})
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").write_text("x")
    packed, few = tmp_path / "packed", tmp_path / "few"
    shutil.copytree(untied, packed)
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight")
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(untied, few)
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-3].clone()
    save_file(tensors, few / "model.safetensors", metadata={"format": "pt"})
    bits = tmp_path / "bits"
    shutil.copytree(models[0], bits)
    config = json.loads((bits / "config.json").read_text())
    (bits / "config.json").write_text(json.dumps(
        config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    earlier = transfer(models[0], models[1], tmp_path / "earlier")
    (tmp_path / "short.txt").write_text("x")
    for model, output, reason, *more in (
            (weights, "out", "has no model.safetensors"), (adapter, "out", "is an adapter"),
            (foreign, "out", "is the embedding"), (models[0], "taken", "holds thesis.tex"),
            (packed, "out", "no weight that is the head"), (few, "out", "(360, 32)"),
            (bits, "out", "quantized (gptq)"),
            (earlier, "earlier", "would replace --model"),
            (models[0], "short.txt", "is a file"), (models[0], "short.txt/out", "be written"),
            (models[0], "out", "has none", "--chat_template=model"),
            (models[0], "out", "cannot be loaded", "--texts=/nowhere", "--head_offset"),
            (models[0], "out", "1 char", f"--texts={tmp_path}/short.txt", "--head_offset"),
            (models[0], "out", "nothing is chosen on it", f"--texts={tmp_path}/short.txt")):
        with pytest.raises(SystemExit) as end:
            transfer(model, models[1], tmp_path / output, *more)
        printed = capsys.readouterr().err
        assert end.value.code == 2 and reason in printed and "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_hidden_states_have_a_direction_in_common():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 12, generator=generator) + 3
    along = hidden @ common_direction(hidden)
    assert abs(along.mean() - 1) < 0.02 and along.std() < 0.2


def test_a_head_with_an_offset_is_better_on_other_texts(tmp_path, capsys):
    """A real small model: means of pieces cost bits, and the offset wins some of them back."""
    model = asset("models", "stories260K")
    command.tool("transfer", [
        f"--model={model}", f"--tokenizer={asset('tokenizers', 'llama2')}",
        f"--texts={asset('text', 'tinytalk_chat_val.txt')}", f"--output={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("bits per byte")]
    before, means, offset = [float(part.split()[0]) for part in line.split(": ")[1].split(", ")]
    assert before < offset < means - 0.1
    plain = transfer(model, asset("tokenizers", "llama2"), tmp_path / "plain")
    rows, plain_rows = (rows_of(folder)[1] for folder in (tmp_path / "out", plain))
    moved = (rows - plain_rows).norm(dim=1) > 0
    table = TokenTable.from_tokenizer(AutoTokenizer.from_pretrained(plain))
    old = TokenTable.from_tokenizer(AutoTokenizer.from_pretrained(model))
    known = {old.bytes_of(i) for i in range(len(old)) if not old.special[i]}
    is_known = np.array([table.special[i] or table.bytes_of(i) in known
                         for i in range(len(table))])
    assert not moved[torch.from_numpy(is_known)].any() and moved.float().mean() > 0.9


# --- trained --------------------------------------------------------------------------------------

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHAT = [{"role": "user", "content": "Which keyword?"}, {"role": "assistant", "content": "return"}]


def chat_model(models, folder, write=write_model):
    """Write a model that ends its turns with a control token of its chats, as its files say.

    Args:
        write: function of its tokenizer, a seed and the folder.
    """
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    write(tokenizer, 1, folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


def taught(model, student, folder):
    """Return the command line of a job in which a student learns CHAT: first its ends, then all."""
    data = folder / "chats.jsonl"
    data.write_text((json.dumps({"text": CHAT}) + "\n") * 4)
    adam = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
    config = ds_config(folder / "ds.json", 2, 2, 1, optimizer=adam)
    return [f"--student={student}", f"--teacher={model}", f"--data={data}", "--max_length=100",
            f"--ds_config={config}", "--num_workers=0", "--steps=24", "--kd_weight=0.02",
            "--train_only=embeddings", "--freeze_until=8", f"--output_dir={folder / 'run'}",
            f"--export={folder / 'trained'}"]


def test_a_trained_transfer_writes_and_stops(models, tmp_path):
    """With plain transformers, by nothing but its files, at the end of its turn."""
    model = chat_model(models, tmp_path / "model")
    student = transfer(model, models[1], tmp_path / "student")
    codes, said = ranks.run(1, run_and_listen, taught(model, student, tmp_path))[0]
    assert codes == [0], said
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trained")
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    written = trained.generate(**prompt, do_sample=False, max_new_tokens=40)
    written = written[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == "return<|im_end|>"


def test_the_model_as_it_was_is_a_teacher_without_surprises(models, tmp_path):
    """--ce_weight 0: what is learned is the teacher's alone, and no line warns of anything."""
    student = transfer(models[1], models[0], tmp_path / "student")
    corpus = write_corpus(tmp_path, TEXTS * 4, 12)
    config = ds_config(tmp_path / "ds.json", 2, 2, 1)
    words = [f"--student={student}", f"--teacher={models[1]}", f"--data={corpus}",
             "--max_length=60", f"--ds_config={config}", "--steps=3", "--ce_weight=0",
             f"--output_dir={tmp_path / 'run'}"]
    codes, said = ranks.run(1, run_and_listen, words)[0]
    assert codes == [0] and "arning" not in said, said
    for line in losses_of(tmp_path / "run"):
        assert line["loss"] == pytest.approx(line["kd"]) and line["kd"] > 0
