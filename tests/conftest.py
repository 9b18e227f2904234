"""Shared by all tests: small real tokenizers and models, the shared assets.

What takes long to import is imported by the fixtures: the process that hands out the tests needs
none of it.
"""

import os
import sys
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
               "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"), "WANDB_MODE": "offline",
               "TRITON_INTERPRET": "1"}  # kernels for a GPU run on the CPU
ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests"):
    sys.path.insert(0, str(folder))
# for ranks and command lines
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])

import pytest

from isogloss import demo
from recipes.tiny import prepare

ASSETS = ROOT.parent / "shared" / "assets"
GOLDEN = ROOT / "tests" / "golden"
SLOW = ROOT / "tests" / "slow.txt"
SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2)


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items):
    """Run the files with the most marks of slow first, so that at the end no worker waits long.

    Then mark what slow.txt lists: many cases of few seconds.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    num_fast = {}
    for line in SLOW.read_text().splitlines():
        if not line.startswith("#"):
            name, number = line.split()
            num_fast[name] = int(number)
    seen = Counter()
    for item in items:
        name = f"{item.path.name}::{item.originalname}"
        seen[name] += 1
        if seen[name] > num_fast.get(name, len(items)):
            item.add_marker(pytest.mark.slow)


def asset(*parts):
    """A path among the shared assets; the test skips where they are absent."""
    path = ASSETS.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"the shared assets are absent ({path.name})")
    return path


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Projections and spelling tables of this session stay out of the user's cache."""
    from isogloss.projection_tools import files as projection_tools

    projection_tools.CACHE = tmp_path_factory.mktemp("cache")
    os.environ["ISOGLOSS_CACHE"] = str(projection_tools.CACHE)


def passages():
    """Return 300 passages of English and code from the interpreter's own documentation."""
    from pydoc_data import topics

    found = []
    for _, text in sorted(topics.topics.items()):
        found += [passage for passage in prepare.passages(text, 200) if len(passage) > 40]
    return found[:300]


@pytest.fixture(scope="session")
def texts():
    return passages()


def write_model(tokenizer, seed, folder):
    """Write a model with random weights and a padded lm_head, and its tokenizer."""
    model = demo.llama(tokenizer, SHAPE, seed)
    model.resize_token_embeddings(len(tokenizer) + 10)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_untied(student, folder):
    """Write a model of the student's architecture, with other weights and a head of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(student)
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizers(texts):
    """(student, teacher): SentencePiece Unigram of 350 pieces, byte-level BPE of 500."""
    return demo.unigram(texts, 350), demo.byte_level_bpe(texts, 500)


@pytest.fixture(scope="session")
def tables(tokenizers):
    from isogloss.align import TokenTable

    return tuple(TokenTable.from_tokenizer(t) for t in tokenizers)


@pytest.fixture(scope="session")
def pair(tokenizers, tables):
    """The Pair of both tokenizers."""
    from isogloss.projection_tools.tokenizers import Pair

    return Pair.of(*tokenizers, tables=tables)


@pytest.fixture
def encoders(tokenizers, tables):
    """(student, teacher) as TextEncoders with room for every text."""
    from isogloss.data.sample import TextEncoder

    return [TextEncoder(*pair, 400) for pair in zip(tokenizers, tables)]


@pytest.fixture(scope="session")
def models(tokenizers, tmp_path_factory):
    """Directories of a student and a teacher with random weights and padded lm_heads."""
    folder = tmp_path_factory.mktemp("models")
    for name, tokenizer, seed in (("student", tokenizers[0], 1), ("teacher", tokenizers[1], 2)):
        write_model(tokenizer, seed, folder / name)
    return folder / "student", folder / "teacher"


@pytest.fixture(scope="session")
def chat_models(models, tmp_path_factory):
    """Directories of the student and the teacher with chat templates of their own."""
    import shutil

    folders = []
    for model, name, end in zip(models, ("student", "teacher"), ("\\n", " ")):
        folder = tmp_path_factory.mktemp("chat") / name
        shutil.copytree(model, folder)
        (folder / "chat_template.jinja").write_text(
            "{% if thinks or enable_thinking %}!{% endif %}{% for message in messages %}"
            "{{ message.role + ': ' + message.content + '" + end + "' }}{% endfor %}")
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="session")
def untied(models, tmp_path_factory):
    """The student's architecture and tokenizer, other weights, a head of its own."""
    import shutil

    folder = tmp_path_factory.mktemp("untied")
    shutil.copytree(models[0], folder, dirs_exist_ok=True)
    write_untied(folder, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """Directory of a real language model with a chat template, 135 M weights in bfloat16."""
    import real_model

    return real_model.smollm2()


@pytest.fixture(scope="session")
def gemma3():
    """Directory of a real base model with 262,144 tokens, 268 M weights in bfloat16."""
    import real_model

    return real_model.gemma3()
