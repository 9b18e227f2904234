"""A student stops at the ends that it came with and at those that it is taught."""

import copy
import json
import shutil

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from conftest import asset
from isogloss.align import TokenTable
from isogloss.data.ends import load_generation, stop_ids, write_generation
from isogloss.data.sample import TextEncoder
from isogloss.inputs import load_text_encoder

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# As gpt-oss: <|end|> goes on to the next message, and what ends the turn is eos.
HARMONY = ("{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
           "{{ eos_token if loop.last else '<|end|>' }}{% endfor %}")


def encoder_of(tokenizer, **generation):
    return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 100, generation=generation)


@pytest.fixture
def tokenizer(tokenizers):
    """The tests' byte-level tokenizer with the markers of a chat."""
    tokenizer = copy.deepcopy(tokenizers[1])
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|end|>"]})
    return tokenizer


def test_a_base_model_stops_at_the_end_of_the_turns_that_it_is_taught():
    """Llama 3: the base ends at 128001; the template ends turns by <|eot_id|>, 128009."""
    tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", "llama3"))
    assert stop_ids(encoder_of(tokenizer, eos_token_id=128001)) == [128001, 128009]
    # Llama 3.1 Instruct: 128008 ends a call of a tool
    instruct = encoder_of(tokenizer, eos_token_id=[128001, 128008, 128009])
    assert stop_ids(instruct) == [128001, 128008, 128009]


def test_the_template_says_what_ends_a_turn(tokenizer):
    """Not the name of a token alone: gpt-oss has <|end|> between the messages of one turn."""
    eos = tokenizer.eos_token_id
    im_end, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    tokenizer.chat_template = CHATML
    assert stop_ids(encoder_of(tokenizer)) == sorted([eos, im_end])
    # Command R closes an answer before it ends the turn, Phi 3 ends the whole chat too
    for ending in ("<|message|><|im_end|>\n", "<|im_end|>\n<|end|>"):
        tokenizer.chat_template = CHATML.replace("<|im_end|>\n", ending)
        assert stop_ids(encoder_of(tokenizer)) == sorted([eos, im_end])
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "")
    assert stop_ids(encoder_of(tokenizer)) == [eos]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert stop_ids(encoder_of(tokenizer)) == sorted([eos, im_end])
    # Command-A writes the prompt of the next turn, too
    ending = "<|message|><|im_end|><|start|>{% if loop.last %}<|end|>{% endif %}"
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", ending).replace(
        "{{ m.content }}<|message|>", "{{ m.content }}{{ '<|message|>' if m.role != 'user' }}")
    assert stop_ids(encoder_of(tokenizer)) == sorted([eos, im_end])
    tokenizer.chat_template = HARMONY
    table = TokenTable.from_tokenizer(tokenizer)
    table.end_of_turn = end
    assert stop_ids(TextEncoder(tokenizer, table, 100)) == [eos]


SETTINGS = {"eos_token_id": [5, 3], "pad_token_id": 2, "temperature": 0.3, "do_sample": False,
            "max_new_tokens": 9, "of_another_program": {"a": ["\u00e9"]}}


@pytest.fixture
def model(models, tmp_path):
    return shutil.copytree(models[0], tmp_path / "model")


def loaded(model):
    config = AutoConfig.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return encoder_of(tokenizer, **load_generation("student", str(model), config, tokenizer))


def test_the_file_is_written_as_it_was_with_the_ends_that_were_taught(model, tmp_path):
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    (model / "generation_config.json").write_text(json.dumps(SETTINGS))
    write_generation(loaded(model), tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert written == SETTINGS | {"eos_token_id": [5, 3, eos]}
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [5, 3, eos]
    encoder, _ = load_text_encoder("teacher", str(model), 0)
    assert encoder.generation == SETTINGS  # a teacher's turns end by it, too
    # once more, as the student of another run
    shutil.copy(tmp_path / "generation_config.json", model)
    write_generation(loaded(model), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8")) == written


def test_without_a_file_the_config_says_what_transformers_reads_from_it(model, tmp_path):
    (model / "generation_config.json").unlink()
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    config = json.loads((model / "config.json").read_text())
    config |= {"eos_token_id": [eos, 9, 10**6], "bos_token_id": 4, "pad_token_id": 6}
    (model / "config.json").write_text(json.dumps(config))
    encoder = loaded(model)
    assert stop_ids(encoder) == sorted([eos, 9])
    write_generation(encoder, tmp_path)
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.bos_token_id, generation.pad_token_id) == (4, 6)
    assert generation.eos_token_id == [eos, 9]


WRONG = {
    "a list": ("[]", "its generation_config.json cannot be loaded (a list; expected a JSON object"),
    "no JSON": ("{", "its generation_config.json cannot be loaded ("),
    "no UTF-8": (b"\xff\xfe", "its generation_config.json cannot be loaded ("),
    "nothing to write": ('{"max_new_tokens": 0}', "must be greater than 0"),
    "an end as text": ('{"eos_token_id": "</s>"}', "says eos_token_id '</s>'; expected ids below"),
    "an end below 0": ('{"eos_token_id": [2, -1]}', "says eos_token_id -1; expected ids below"),
    "another model's": ('{"eos_token_id": 151645}', "says eos_token_id 151645; expected ids below"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_line(model, name):
    content, message = WRONG[name]
    data = content if isinstance(content, bytes) else content.encode()
    (model / "generation_config.json").write_bytes(data)
    with pytest.raises(ValueError, match="--student") as error:
        loaded(model)
    assert message in str(error.value) and "\n" not in str(error.value)
