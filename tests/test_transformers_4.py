"""What transformers 4 makes of an export: the same ids, texts and logits.

It is not installed beside version 5.  Give it a folder of its own, and name it:

    pip install --target OLD --no-deps "transformers<5" "huggingface_hub<1" "tokenizers<0.23"
    ISOGLOSS_TRANSFORMERS_4=OLD pytest tests/test_transformers_4.py
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import asset
from isogloss.export import make_readable_for_transformers_4

FOLDER = os.environ.get("ISOGLOSS_TRANSFORMERS_4")
TEXTS = ["Once,  there\n\nwas a naïve 12345 <|im_start|>user </s> [INST] 日本",
         "def f(x):\n\treturn x ** 2  # 🙂"]
TOKENIZERS = ["deepseek_coder", "gpt2", "llama2", "llama3", "mistral_v7", "qwen2", "t5", "tok512"]
SHAPE = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
BASE_OF_A_MILLION = {"rope_type": "default", "rope_theta": 1e6}
MODELS = {  # what is added to SHAPE
    "llama": dict(rope_parameters=LLAMA_3),
    "qwen2": dict(rope_parameters=BASE_OF_A_MILLION, tie_word_embeddings=True),
    "qwen3": dict(rope_parameters=BASE_OF_A_MILLION, head_dim=16),
}
# Prints what is in each folder, in whichever version runs it.
READER = """
import json, os, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
texts = json.loads(sys.argv[1])
found = {"version": transformers.__version__}
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    found[folder] = [ids, [tokenizer.decode(row) for row in ids], sorted(tokenizer.all_special_ids)]
    if os.path.exists(folder + "/model.safetensors"):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits = model(torch.arange(3, 100)[None]).logits
        found[folder].append(logits[0, :, ::50].tolist())
print(json.dumps(found))
"""


def read(folders, **environment):
    """Return what READER finds in the folders."""
    words = [sys.executable, "-c", READER, json.dumps(TEXTS), *map(str, folders)]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(FOLDER is None,
                    reason="ISOGLOSS_TRANSFORMERS_4 names no folder with transformers 4")
def test_transformers_4_reads_an_export_as_version_5_does(tmp_path):
    tok512 = AutoTokenizer.from_pretrained(asset("tokenizers", "tok512"))
    parts = {}
    for name in TOKENIZERS:
        tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", name))
        parts[name] = AutoConfig.for_model("llama"), tokenizer
    for name, more in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE, **more))
        # a model of type qwen2 has Qwen's tokenizer in version 5, see projection_tools
        parts[name + "_model"] = model, parts["qwen2"][1] if name == "qwen2" else tok512
    for name in ("stories260K", "tinytalk_neo_3M", "bitstories_1M"):
        path = asset("models", name)
        parts[name] = (AutoModelForCausalLM.from_pretrained(path),
                       AutoTokenizer.from_pretrained(path))
    for name, pair in parts.items():
        for part in pair:
            part.save_pretrained(tmp_path / name)
        make_readable_for_transformers_4(tmp_path / name)
    folders = [tmp_path / name for name in parts]

    expected = read(folders)
    found = read(folders, PYTHONPATH=FOLDER)
    assert found.pop("version").startswith("4.") and expected.pop("version").startswith("5.")
    for folder, (ids, texts, special, *logits) in expected.items():
        assert found[folder][:3] == [ids, texts, special], folder
        if logits:
            torch.testing.assert_close(torch.tensor(found[folder][3]), torch.tensor(logits[0]))
