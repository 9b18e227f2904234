"""SmolLM2 (49,152 tokens, byte-level) and Gemma 3 (262,144, SentencePiece) as a real pair."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

import ranks
from conftest import asset
from isogloss import cache
from isogloss.align import TokenTable, align
from isogloss.command import CacheArgs
from isogloss.flags.parse import parse_flags
from isogloss.job.launch import start_distributed
from isogloss.job.watch import end_together
from isogloss.projection_tools.files import load_tables
from jobs import ds_config, losses_of, run_distill

pytestmark = pytest.mark.slow

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' "
    "else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
CHATS = [[{"role": "user", "content": f"What is {n} times 12?"},
          {"role": "assistant", "content": f"{n} times 12 is {12 * n}. 🙂\n\n    café"}]
         for n in (3, 17, 200, 4096)]
GIB = 2**30


@pytest.fixture(scope="module")
def pair(smollm2, gemma3, tmp_path_factory):
    """Directories of both models, each with a chat template."""
    folder = tmp_path_factory.mktemp("pair") / "gemma3"
    shutil.copytree(gemma3, folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").write_text(GEMMA_TEMPLATE)
    return smollm2, folder


@pytest.fixture(scope="module")
def tokenizers(pair):
    from transformers import AutoTokenizer

    return [AutoTokenizer.from_pretrained(folder) for folder in pair]


def text_of(name):
    text = asset("text", name).read_text(errors="replace")[:20_000]
    return text.replace("<unk>", "")  # a control token of Gemma


def bytes_of_chunks(table, ids, chunks):
    """Return {chunk: what its tokens spell}."""
    spelled = defaultdict(bytes)
    for token, chunk in zip(ids.tolist(), chunks.tolist(), strict=True):
        if chunk >= 0:
            spelled[chunk] += table.bytes_of(token)
    return spelled


def test_chunks_hold_the_same_bytes_and_cover_the_text(tokenizers, texts):
    """Prose, documentation, Chinese and Japanese: what a chunk holds is said by both sides."""
    tables = [TokenTable.from_tokenizer(tokenizer) for tokenizer in tokenizers]
    for text in ("\n".join(texts)[:20_000], text_of("wikitext2_valid_tokens.txt"),
                 text_of("zh_yuanqu_head.txt"), text_of("ja_wagahai_neko_head.txt")):
        ids = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
               for tokenizer in tokenizers]
        alignment = align(*ids, *tables)
        sides = (alignment.student_chunk, alignment.teacher_chunk)
        spelled = [bytes_of_chunks(*side) for side in zip(tables, ids, sides)]
        assert spelled[0] == spelled[1]
        covered = sum(map(len, spelled[0].values()))
        assert 0.99 * len(text.encode()) < covered <= len(text.encode()) + 1  # a space in front


@pytest.mark.parametrize("teacher", [0, 1])
def test_tables_are_made_in_little_memory(teacher, pair, tokenizers, tmp_path):
    """Tokens of the same bytes share a cell: what the teacher says of one is said of the other."""
    output = tmp_path / "tables.safetensors"
    command = [sys.executable, "-m", "projection_tools.cells", f"--student={pair[1 - teacher]}",
               f"--teacher={pair[teacher]}", f"--output={output}"]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0 and usage.ru_maxrss * 1024 < 2.5 * GIB
    tables = load_tables(output)
    student, teacher = (TokenTable.from_tokenizer(tokenizers[i]) for i in (1 - teacher, teacher))
    ids = {teacher.bytes_of(w): w for w in range(len(teacher)) if not teacher.special[w]}
    same = [(v, ids[student.bytes_of(v)]) for v in range(len(student))
            if not student.special[v] and student.bytes_of(v) in ids]
    v, w = np.array(same).T
    is_shared = np.asarray(tables["cell_V"])[v] == np.asarray(tables["cell_W"])[w]
    assert len(same) > 30_000 and is_shared.mean() > 0.99


def learn(cache_flags, run_flags):
    """Write a cache, then run jobs on this rank; return (exit codes, bytes of memory at most)."""
    device = start_distributed()
    with end_together():
        cache.run(parse_flags(CacheArgs, cache_flags), device)
    codes = run_distill(run_flags)
    return codes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("teacher", [0, 1])
def test_one_step_of_chats_from_a_live_teacher_and_a_cache(teacher, pair, tmp_path):
    """A cache of hidden states says what the live teacher says."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": chat}) + "\n" for chat in CHATS))
    config = ds_config(tmp_path / "ds.json", 0, 2, 2)
    flags = [f"--student={pair[1 - teacher]}", f"--data={data}", "--max_length=64", "--steps=1",
             f"--ds_config={config}", "--num_workers=0"]
    kept = tmp_path / "cache"
    flags.append(f"--teacher={pair[teacher]}")
    jobs = [[*flags, f"--output_dir={tmp_path / 'live'}", "--teacher_dtype=float32"],
            [*flags, f"--output_dir={tmp_path / 'cached'}", f"--teacher_cache={kept}"]]
    [(codes, memory)] = ranks.run(1, learn, [
        f"--teacher={pair[teacher]}", f"--data={data}", f"--output={kept}", "--hidden",
        "--teacher_dtype=float32"], jobs)
    assert codes == [0, 0] and memory < 9 * GIB
    [live], [cached] = (losses_of(tmp_path / name) for name in ("live", "cached"))
    assert 0 < live["kd"] < 20 and abs(live["kd"] - cached["kd"]) < 1e-3 * live["kd"]
    assert live["aligned_tokens"] > 0.95
