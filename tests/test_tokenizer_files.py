"""Models whose directories hold no tokenizer.json: the ids are those of their own libraries, the
alignment is exact to the byte, and whole jobs run with them."""

import json
import unicodedata
import warnings

import numpy as np
import pytest
from transformers import AutoTokenizer

import other_tokenizers as kinds
from conftest import asset, write_model
from isogloss.align import EXACT, SPACE, TokenTable, align, align_located, coverage, locate
from isogloss.align_view import main as view
from isogloss.cross_tokenizer import CrossTokenizerKD
from isogloss.projection_tools.tokenizers import load_tokenizer
from isogloss.tokenizer_files import load
from jobs import run_all, run_and_listen, short_run
from tokens import real

# name: (what writes the directory, whether its tokens spell every text)
TABLE = {
    "SmolLM2": (kinds.smollm2, True),
    "Llama 2, tokenizer.model alone": (kinds.bare, True),
    "Llama 2": (kinds.llama2, True),
    "Mistral, tokenizer.model": (kinds.mistral, True),
    "Gemma, tokenizer.model": (kinds.gemma, True),
    "Mistral, tekken.json": (kinds.tekken, True),
    "Qwen": (kinds.qwen, True),
    "Llama 3, tiktoken": (kinds.llama3, True),
    "Kimi, tiktoken": (kinds.kimi, True),
    "T5, Unigram": (kinds.t5, False),
    "Unigram with bytes": (kinds.unigram, False),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return (directory, what encodes, tokenizer, TokenTable) of a kind, made once."""
    known = {}

    def of(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp("kind")
            encode = TABLE[kind][0](folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a file of tiktoken does not say all
                known[kind] = folder, encode, *load_tokenizer("student", str(folder), True)
        return known[kind]

    return of


@pytest.mark.parametrize("kind", TABLE)
def test_no_kind_is_refused_and_its_ids_are_those_of_its_library(kind, made):
    _, encode, tokenizer, table = made(kind)
    assert tokenizer.is_fast and table.eos >= 0
    for text in kinds.SCRIPTS:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == encode(text), text


@pytest.mark.parametrize("kind", TABLE)
def test_alignments_are_exact_to_the_byte(kind, made):
    """Against GPT-2's tokenizer; by the tokenizer's own offsets, and what it decodes to."""
    _, _, tokenizer, table = made(kind)
    other, other_table = real("gpt2")
    for text in kinds.SCRIPTS:
        mine, theirs = (each(text, add_special_tokens=False, return_offsets_mapping=True)
                        for each in (tokenizer, other))
        ids, offsets = mine["input_ids"], mine["offset_mapping"]
        places = locate(np.array(ids), table, text, offsets)
        raw = text.encode()
        for token, begin, end, kind_of in zip(ids, *places):
            if kind_of in (EXACT, SPACE):
                assert table.bytes_of(token).endswith(raw[begin:end])
        alignment = align(ids, theirs["input_ids"], table, other_table, text, offsets,
                          theirs["offset_mapping"])
        for chunk in range(len(alignment.chunk_bytes)):
            sides = [b"".join(map(table_of.bytes_of, np.array(ids_of)[chunks == chunk]))
                     for table_of, ids_of, chunks in (
                         (table, ids, alignment.student_chunk),
                         (other_table, theirs["input_ids"], alignment.teacher_chunk))]
            assert sides[0] == sides[1] or sides[0] == b" " + sides[1]
        # Qwen composes characters
        if TABLE[kind][1] and (kind != "Qwen" or unicodedata.is_normalized("NFC", text)):
            starts = np.cumsum([0, *[len(letter.encode()) for letter in text]])
            spans = starts[np.array(offsets)]
            assert (places.begin >= spans[:, 0]).all() and (places.end <= spans[:, 1]).all()
            assert table.decode(ids).removeprefix(b" ") == raw.removeprefix(b" ")
            assert tokenizer.decode(ids) == text
            assert coverage(alignment)["bytes"] == 1


@pytest.mark.parametrize("kind", TABLE)
def test_what_is_saved_gives_the_same_ids_and_names_no_path(kind, made, tmp_path):
    folder, _, tokenizer, table = made(kind)
    tokenizer.save_pretrained(tmp_path)
    assert str(folder) not in (tmp_path / "tokenizer_config.json").read_text()
    again, table_again = load_tokenizer("student", str(tmp_path))
    for saved in (again, AutoTokenizer.from_pretrained(tmp_path)):
        assert [saved(text)["input_ids"] for text in kinds.SCRIPTS] == [
            tokenizer(text)["input_ids"] for text in kinds.SCRIPTS]
    for role in ("bos", "eos", "pad", "unk", "end_of_turn"):
        assert getattr(table_again, role) == getattr(table, role)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kinds.true_llama2, kinds.true_llama3])
def test_whole_vocabularies_are_those_of_the_assets(kind, tmp_path):
    kind(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = load(tmp_path)
    expected, table = real(kind.__name__.removeprefix("true_"))
    assert TokenTable.from_tokenizer(tokenizer).tokens == table.tokens
    texts = [*kinds.SCRIPTS, asset("text", "zh_yuanqu_head.txt").read_text()[:20000],
             asset("text", "ja_wagahai_neko_head.txt").read_text()[:20000]]
    for text in texts:
        ids = [each(text, add_special_tokens=False)["input_ids"] for each in (tokenizer, expected)]
        assert ids[0] == ids[1]
