"""Models whose directories hold no tokenizer.json: the ids are those of their own libraries, the
alignment is exact to the byte, and whole jobs run with them."""

import json
import shutil
import subprocess
import sys
import unicodedata
import warnings

import numpy as np
import pytest
from transformers import AutoTokenizer

import other_tokenizers as kinds
import ranks
from conftest import SHAPE, asset
from isogloss import cache, demo
from isogloss.align import EXACT, SPACE, TokenTable, align, coverage, locate
from isogloss.align_view import main as view
from isogloss.command import CacheArgs
from isogloss.cross_tokenizer import CrossTokenizerKD
from isogloss.flags.parse import parse_flags
from isogloss.integrations import Distillation
from isogloss.job.launch import start_distributed
from isogloss.projection_tools.tokenizers import load_tokenizer
from isogloss.tokenizer_files import load
from jobs import run_distill, short_run
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


# --- what is refused, and what is said ------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["kimi_k2", "qwen2"])  # unknown, known
def test_code_of_others_runs_with_its_flag_alone(model_type, tmp_path):
    kinds.kimi(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=r"^--teacher .*Python code.* add --trust_remote_code to"):
        load_tokenizer("teacher", str(tmp_path))
    assert not (tmp_path / "ran").exists()
    load_tokenizer("teacher", str(tmp_path), trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_code_that_is_no_tiktoken_has_a_way_out(tmp_path):
    kinds.kimi(tmp_path)
    code = tmp_path / "tokenization_kimi.py"
    code.write_text(code.read_text().replace("_mergeable_ranks", "ranks_of_mine")
                    .replace("Encoding.of_file", "Other.of_file")
                    + "\n\nclass Other(Encoding):\n    def __init__(self, *a):\n"
                      "        super().__init__(*a)\n"
                      "        self.ranks_of_mine = self.__dict__.pop('_mergeable_ranks')\n")
    with pytest.raises(ValueError, match=r"TikTokenTokenizer is no fast.*save_pretrained"):
        load_tokenizer("teacher", str(tmp_path), trust_remote_code=True)


def test_early_files_of_tekken_have_the_control_tokens_of_their_library(tmp_path):
    encode = kinds.tekken(tmp_path, is_early=True)
    tokenizer, table = load_tokenizer("student", str(tmp_path))
    assert (table.unk, table.bos, table.eos, table.pad) == (0, 1, 2, 11)
    tail = tokenizer.convert_ids_to_tokens([3, 10, 16, 19, 20, 999])
    assert tail == ["[INST]", "[IMG]", "[SUFFIX]", "[TOOL_CONTENT]", "<SPECIAL_20>",
                    "<SPECIAL_999>"]
    assert tokenizer(kinds.SCRIPTS[0])["input_ids"][-9:] == encode(kinds.SCRIPTS[0])[-9:]


WRONG = {
    "nothing": ({}, "holds no tokenizer.json.*load it with its own library"),
    "noise": ({"tokenizer.model": b"\x00\xffnoise\n"}, "no SentencePiece model, and its line 1 no"),
    "half a line": ({"tiktoken.model": b"IQ== 0\nIg== 1\nIw"}, "its line 3 no token in base64"),
    "no tekken": ({"tekken.json": b"{}"}, "'config'"),
    "half a tekken": ({"tekken.json": b'{"config": '}, "Expecting value"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_damaged_files_end_with_one_line(wrong, tmp_path):
    files, expected = WRONG[wrong]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=expected) as refusal:
        load_tokenizer("student", str(tmp_path))
    line = str(refusal.value)
    assert line.startswith(f"--student {tmp_path}: its tokenizer cannot be loaded (")
    assert "\n" not in line
    with pytest.raises(SystemExit, match=expected):
        view(["--student", str(tmp_path), "--teacher", str(tmp_path), "--show", "a"])


def test_what_a_file_does_not_say_is_told(made, tmp_path):
    with pytest.warns(UserWarning, match="does not say how text is cut.*as Llama 3 does"):
        load(made("Llama 3, tiktoken")[0])
    kinds.configure(tmp_path, **kinds.LLAMA2)  # a class that composes no characters
    kinds.trained(tmp_path, "tokenizer.model", model_type="bpe", vocab_size=700, byte_fallback=True)
    with pytest.warns(UserWarning, match="LlamaTokenizer .*in another way than SentencePiece"):
        load(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("Llama 2", "Mistral, tokenizer.model", "Gemma, tokenizer.model"):
            load(made(kind)[0])


# --- what uses them -------------------------------------------------------------------------------


def test_the_command_line_imports_no_transformers_where_the_file_is_there(made, tmp_path):
    made("SmolLM2")[2].save_pretrained(tmp_path)
    program = ("import sys; from isogloss.align_view import main; main(sys.argv[1:]); "
               "assert 'transformers' not in sys.modules")
    flags = ["--student", tmp_path, "--teacher", tmp_path, "--show", "in 2010"]
    subprocess.run([sys.executable, "-c", program, *flags], check=True)


def test_the_command_line_and_the_loss_take_them(made, models, capsys):
    folders = [made(kind)[0] for kind in ("Gemma, tokenizer.model", "Mistral, tekken.json")]
    view(["--student", str(folders[0]), "--teacher", str(folders[1]), "--show", "two  spaces"])
    assert "bytes 100.0%" in capsys.readouterr().out
    kd = CrossTokenizerKD(*map(load, folders), max_length=64)
    batch = kd.collate([text[:60] for text in kinds.SCRIPTS])
    assert batch.aligned_bytes == batch.text_bytes
    trainer = Distillation(load(models[0]), str(models[1]))
    assert trainer.encoder.tokenizer.get_vocab() == load(models[1]).get_vocab()


KINDS_OF_MODELS = "Llama 2, tokenizer.model alone", "Mistral, tekken.json"


@pytest.fixture(scope="module")
def models(made, tmp_path_factory):
    """Directories of models with random weights, whose tokenizers are in other files."""
    folders = []
    for kind in KINDS_OF_MODELS:
        source, _, tokenizer, _ = made(kind)
        folder = tmp_path_factory.mktemp("model")
        demo.llama(tokenizer, SHAPE, seed=1).save_pretrained(folder)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        folders.append(folder)
    return folders


def jobs_of(first, writer, second):
    """Run a job, write a cache, run a job that reads it; return the exit codes of the jobs."""
    codes = run_distill([first])
    cache.run(parse_flags(CacheArgs, writer), start_distributed())
    return codes + run_distill([second])


def test_jobs_learn_from_them_cache_them_and_export_them(models, texts, made, tmp_path):
    first = short_run(models, texts, tmp_path, "--steps=2", f"--output_dir={tmp_path / 'a'}",
                      f"--export={tmp_path / 'first'}")
    second = short_run(models[::-1], texts, tmp_path, "--steps=2", f"--output_dir={tmp_path / 'b'}",
                       f"--export={tmp_path / 'second'}")
    [data] = [flag for flag in first if flag.startswith("--data=")]
    writer = [f"--teacher={models[0]}", data, f"--output={tmp_path / 'cache'}", "--top_k=20"]
    second[second.index(f"--teacher={models[0]}")] = f"--teacher_cache={tmp_path / 'cache'}"
    assert ranks.run(1, jobs_of, first, writer, second) == [[0, 0]]
    for export, kind in zip(("first", "second"), KINDS_OF_MODELS):
        exported = AutoTokenizer.from_pretrained(tmp_path / export)
        for text in kinds.SCRIPTS:
            ids = made(kind)[2](text)["input_ids"]
            assert exported(text)["input_ids"] == ids
