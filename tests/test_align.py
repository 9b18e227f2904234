"""align.py: every chunk holds the same bytes on both sides, and none could be smaller."""

import random
import shutil
import subprocess
import sys

import numpy as np
import oracle
import pytest
from conftest import ROOT, asset

from align import TokenTable, align, merge_boundaries

HARD = "naïve café  201 x=1\n\tif a:\r\n  🙂👩‍🚀 Ｗ ｱ 日本語 e\u0301 <0x41> \x00 end "


def lengths(rng, total):
    """Random positive lengths that sum to `total`."""
    out = []
    while sum(out) < total:
        out.append(min(rng.randint(1, 5), total - sum(out)))
    return out


def test_merge_equals_brute_force():
    rng = random.Random(0)
    for _ in range(300):
        total = rng.randint(1, 40)
        sides = [lengths(rng, total) for _ in range(2)]
        s, t, ends = merge_boundaries(*[np.array(side, np.int64) for side in sides])
        expected = oracle.merge(*[[b"x" * n for n in side] for side in sides])
        assert [s.tolist(), t.tolist()] == expected and ends[-1] == total
        t2, s2, _ = merge_boundaries(*[np.array(side, np.int64) for side in sides[::-1]])
        assert s2.tolist() == s.tolist() and t2.tolist() == t.tolist()  # symmetric


def test_tokens_left_out_and_tokens_without_bytes():
    s, t, ends = merge_boundaries(np.array([-1, 0, 2, 1, -1]), np.array([1, 1, -1, 0, 1]))
    assert s.tolist() == [-1, 0, 0, 1, -1] and t.tolist() == [0, 0, -1, 1, 1] and ends.tolist() == [2, 3]


def check(text, student, teacher, student_table, teacher_table):
    """Every promise of Alignment on one text; returns the share of its bytes in chunks."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (student, teacher)]
    found = align(*ids, student_table, teacher_table)
    if not found.same_text:
        return None
    for c, size in enumerate(found.chunk_bytes):
        sides = []
        for side_ids, chunk, table in zip(ids, found[:2], (student_table, teacher_table)):
            members = np.flatnonzero(chunk == c)
            assert len(members) and (np.diff(members) == 1).all()
            sides.append([table.bytes_of(side_ids[i]) for i in members])
        assert b"".join(sides[0]) == b"".join(sides[1])
        assert size == len(b"".join(sides[0])) or c == 0  # an added leading space is no text
        assert found.exact[c] == (len(sides[0]) == len(sides[1]) == 1)
        inner = [set(np.cumsum([len(b) for b in side])[:-1].tolist()) for side in sides]
        assert not (inner[0] & inner[1]) - {0}  # minimal: no common boundary inside
    return found.chunk_bytes.sum() / max(1, len(text.encode()))


def test_bpe_against_unigram(texts, tokenizers, tables):
    shares = [check(text, *tokenizers, *tables) for text in [*texts, HARD, "é" * 9, "    ", "\n\n"]]
    assert None not in shares and np.mean(shares) > 0.97


def test_the_end_of_text_pairs_up_and_a_leading_space_is_left_out(tokenizers, tables):
    text = "The value 201 is"
    ids = [[table.bos, *tokenizer(text)["input_ids"], table.eos]
           for tokenizer, table in zip(tokenizers, tables)]
    found = align(*ids, *tables)
    assert found.student_chunk[-1] == found.teacher_chunk[-1] == len(found.chunk_bytes) - 1
    assert found.chunk_bytes[-1] == 0 and found.student_chunk[0] == found.teacher_chunk[0] == -1
    first = found.teacher_chunk.tolist().index(0)
    assert b"".join(tables[1].bytes_of(i) for i in ids[1][1:first]) == b"The"  # one side wrote " The"
    both = align(ids[0], ids[0], tables[0], tables[0])  # both add it: nothing is lost
    assert both.exact.all() and (both.student_chunk >= 0).sum() == len(ids[0]) - 1


def test_other_text_is_never_aligned(tokenizers, tables):
    texts = "good morning", "good evening"
    ids = [tokenizer(text)["input_ids"] for tokenizer, text in zip(tokenizers, texts)]
    found = align(*ids, *tables)
    assert not found.same_text and (found.student_chunk == -1).all() and len(found.chunk_bytes) == 0
    assert align([], [], *tables).same_text
    assert not align(ids[0], [], *tables).same_text


def test_ids_that_no_encoder_would_produce(tables):
    """A model may sample any spelling, bytes of half a character included."""
    student, teacher = tables
    byte = {student.bytes_of(i): i for i, token in enumerate(student.tokens) if token.startswith("<0x")}
    letters = {teacher.bytes_of(i): i for i in range(len(teacher)) if not teacher.special[i]}
    text = "aé".encode() + b"\xe6\x97"
    found = align([byte[bytes([b])] for b in text], [letters[bytes([b])] for b in text], student, teacher)
    assert found.same_text and found.exact.all() and found.student_chunk.tolist() == list(range(5))


@pytest.mark.parametrize("name", ["llama3", "llama2", "gpt2", "mistral_v7", "qwen2"])
def test_real_tokenizers(name, texts):
    from transformers import AutoTokenizer

    names = name, "gpt2" if name == "llama2" else "llama2"
    pair = [AutoTokenizer.from_pretrained(asset("tokenizers", n)) for n in names]
    both = [TokenTable.from_tokenizer(tokenizer) for tokenizer in pair]
    for text in [*texts[:20], HARD.replace("e\u0301", "")]:  # qwen2 composes: that text is not the same
        assert check(text, *pair, *both) is not None
        ids = pair[0](text, add_special_tokens=False)["input_ids"]
        assert both[0].decode(ids).strip() == text.encode().strip()


def test_real_stories():
    from transformers import AutoTokenizer

    import json

    stories = json.loads(asset("text", "tinystories_1000.json").read_text())[:100]
    pair = [AutoTokenizer.from_pretrained(asset("models", m)) for m in ("stories260K", "tinytalk_neo_3M")]
    both = [TokenTable.from_tokenizer(tokenizer) for tokenizer in pair]
    shares = [check(story, *pair, *both) for story in stories]
    different = [story for story, share in zip(stories, shares) if share is None]
    assert all("  " in story for story in different)  # tok512 collapses runs of spaces: these are left out
    assert np.mean([s for s in shares if s is not None]) > 0.99


def test_a_tokenizer_of_another_family_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1})))
    with pytest.raises(ValueError, match="neither byte-level nor SentencePiece"):
        TokenTable.from_tokenizer(words)


def test_the_file_works_alone(tmp_path):
    shutil.copy(ROOT / "align.py", tmp_path)
    code = ("import sys; sys.path.insert(0, '.'); import numpy, align; "
            "print(align.merge_boundaries(*[numpy.ones(2, int)] * 2))")
    found = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "array([0, 1])" in found.stdout, found.stderr
