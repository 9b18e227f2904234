"""How good a draft of its teacher a student is: from the definition, and as transformers counts."""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import candidate_generator, utils as generation

import ranks
from conftest import ROOT, SHAPE
from isogloss import demo, once_in_a_while
from isogloss.align import TokenTable
from isogloss.evaluation.speculation import DRAFTED, Speculation
from isogloss.inputs import build_collator
from jobs import check_refusals, ds_config, job_for
from steps import flags_for

TEXTS = ["The quick brown fox said hello to the 201 dogs.", "An index of the value, and its name."]
MODULE = "isogloss.evaluation.speculation"


def evaluated(flags, rows):
    """Return (metrics of a job without --eval_draft, with it, was the door shut before?)."""
    sys.modules.pop(MODULE)  # this file imports it
    metrics = []
    is_shut = []
    for draft in (False, True):
        state, inputs = job_for(flags | {"eval_draft": draft})
        batches = [build_collator(state.cfg, inputs, state.device)(rows)]
        metrics.append(once_in_a_while.run_evaluation(state, {"": batches}))
        is_shut.append(MODULE not in sys.modules)
    return *metrics, is_shut


def boundaries(ids, table, lead=0):
    """Return {byte of the text: token that begins there}, the end of the text included."""
    byte = -lead
    starts = {}
    for number, token in enumerate(ids):
        starts[max(byte, 0)] = number
        if not table.special[token]:
            byte += len(table.bytes_of(token))
    return starts


def accepted_share(p, q, tables):
    """Return what a target with probabilities p accepts of a draft with q, token by token.

    A draft writes x with q(x) / Q, Q being all of q on tokens that both have, and the target takes
    it with probability min(1, p(x) / that).
    """
    named = []
    for table, probabilities in zip(tables, (q, p)):
        names = [(bool(table.special[i]), table.bytes_of(i)) for i in range(len(table))]
        named.append(dict(zip(names, probabilities.tolist(), strict=True)))
    of_draft, of_target = named
    common = of_draft.keys() & of_target.keys()
    whole = sum(of_draft[x] for x in common)
    return sum(of_draft[x] / whole * min(1, of_target[x] / (of_draft[x] / whole)) for x in common)


def test_a_job_measures_what_the_definition_says(models, tokenizers, tables, texts, tmp_path):
    """At the boundaries of both tokenizers; nothing else changes, nor is it imported before."""
    flags = flags_for(models, texts, tmp_path, max_length=200, eval_rows=2,
                      ds_config=ds_config(tmp_path / "ds.json", 0, 3, 1))
    [(without, metrics, is_shut)] = ranks.run(1, evaluated, flags, [*TEXTS, None])
    assert is_shut == [True, False]
    rate = metrics.pop("eval/draft_acceptance")
    length = metrics.pop("eval/draft_length")
    assert metrics == without
    loaded = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in models]
    shares = []
    for text in TEXTS:
        rows = []
        starts = []
        for model, tokenizer, table, lead in zip(loaded, tokenizers, tables, (1, 0)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [table.eos]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[table.bos, *ids]])).logits[0]
            rows.append(logits[:-1, : len(table)].double().softmax(-1))
            starts.append(boundaries(ids, table, lead))  # SentencePiece's prefix space
        common = starts[0].keys() & starts[1].keys()
        for byte in common - {0}:  # which one side alone spells
            q, p = (side[start[byte]] for side, start in zip(rows, starts))
            shares.append(accepted_share(p, q, tables))
    assert 0.05 < rate < 0.95
    assert rate == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    # 1, and 5 tokens of which each needs all before it
    assert DRAFTED == 5
    assert length == pytest.approx(1 + rate + rate**2 + rate**3 + rate**4 + rate**5)


def test_a_draft_that_cannot_be_measured_is_refused(models, texts, tmp_path):
    flags = flags_for(models, texts, tmp_path, max_length=60, eval_rows=2, eval_draft=True,
                      ds_config=ds_config(tmp_path / "ds.json", 0, 2, 1))
    check_refusals(flags, [
        ({"teacher_output": "topk"}, "and it is about all of its tokens; keep hidden states"),
        ({}, "nothing is wrong"),
    ])


def spoken(vocab):
    """Return a table of tokens by name; those in brackets are control tokens."""
    pieces = [name.encode() for name in vocab]
    special = [name.startswith("[") for name in vocab]
    return TokenTable._from_pieces(pieces, torch.tensor(special).numpy(), vocab, "plain", {})


def test_common_tokens_are_equal_in_bytes_and_kind():
    """Of two equal ones the last is written; a control token is no text of the same letters."""
    left = spoken(["a", "b", "[end]", "c", "a", "[pad]", "x"])
    right = spoken(["[end]", "a", "z", "c", "x"])
    speculation = Speculation.of(left, right, "cpu")
    pairs = set(zip(speculation.student_ids.tolist(), speculation.teacher_ids.tolist()))
    assert pairs == {(4, 1), (2, 0), (3, 3), (6, 4)}
    logits = torch.randn(3, 7, dtype=torch.float64)
    assert Speculation.of(left, left, "cpu").accepted(logits, logits)[0] < 1  # of two "a" one
    with pytest.raises(ValueError, match="no token in common"):
        Speculation.of(spoken(["a"]), spoken(["b"]), "cpu")
    same = Speculation.of(right, right, "cpu")
    logits = torch.randn(3, 5, dtype=torch.float64)
    assert torch.allclose(same.accepted(logits, logits), torch.ones(3, dtype=torch.float64))


# --- beside transformers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level(texts, tmp_path_factory):
    """Directories of a draft and a target of 400 and 500 byte-level tokens, without a bos.

    Drafts of transformers read none.
    """
    folder = tmp_path_factory.mktemp("byte_level")
    for name, size, seed in (("draft", 400, 4), ("target", 500, 5)):
        tokenizer = demo.byte_level_bpe(texts[seed::3], size)
        demo.llama(tokenizer, SHAPE, seed).save_pretrained(folder / name)
        tokenizer.bos_token = None
        tokenizer.save_pretrained(folder / name)
    return folder / "draft", folder / "target"


def test_transformers_restricts_a_draft_likewise(byte_level):
    """Its own translator gives the draft's probabilities in the target's vocabulary."""
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in byte_level]
    tables = list(map(TokenTable.from_tokenizer, tokenizers))
    draft, target = (torch.randn(9, len(table)) * 3 for table in tables)
    translator = candidate_generator.AssistantToTargetTranslator(
        tokenizers[1], tokenizers[0], len(tables[1]))
    q = translator.get_target_logits(draft).softmax(-1)
    expected = torch.minimum(q, target.softmax(-1)).sum(-1)
    accepted = Speculation.of(*tables, "cpu").accepted(draft, target)
    torch.testing.assert_close(accepted, expected, rtol=1e-5, atol=1e-6)


def counted(folders, rows, monkeypatch):
    """Return (tokens that transformers accepts, drafted ones) behind every common boundary."""
    matches = []
    sample = generation._speculative_sampling

    def counting(*args, **more):
        written, num_matches = sample(*args, **more)
        matches.append(int(num_matches))
        return written, num_matches

    monkeypatch.setattr(generation, "_speculative_sampling", counting)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    tables = list(map(TokenTable.from_tokenizer, tokenizers))
    draft, target = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    # transformers would cut the draft's head, and then takes the probabilities of other tokens
    candidate_generator.AssistantVocabTranslatorCache.get_translator(
        tokenizers[1], tokenizers[0], len(tables[1]), assistant_prune_lm_head=False)
    draft.generation_config.update(num_assistant_tokens=1, assistant_confidence_threshold=0.0,
                                   num_assistant_tokens_schedule="constant")
    tried = 0
    for text in rows:
        sides = [tokenizer(text)["input_ids"] + [table.eos]
                 for tokenizer, table in zip(tokenizers, tables)]
        starts = [boundaries(ids, table) for ids, table in zip(sides, tables)]
        for byte in sorted((starts[0].keys() & starts[1].keys()) - {0}):
            ids = torch.tensor([sides[1][: starts[1][byte]]])
            target.generate(ids, do_sample=True, top_k=0, max_new_tokens=2, assistant_model=draft,
                            tokenizer=tokenizers[1], assistant_tokenizer=tokenizers[0])
            tried += 1
    assert len(matches) == tried
    return sum(matches), tried


def test_the_page_writes_with_a_draft(byte_level, tmp_path, monkeypatch, capsys):
    """The code of recipes/README.md as it stands."""
    monkeypatch.chdir(tmp_path)
    for place, folder in zip(("runs/draft/student", "T"), byte_level):
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).symlink_to(folder)
    page = (ROOT / "recipes" / "README.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.slow
def test_transformers_accepts_as_many(byte_level, texts, tmp_path, monkeypatch):
    """Its assisted generation, sampled, at every place of the held-out rows that both can read."""
    rows = texts[:40]
    flags = flags_for(byte_level, texts, tmp_path, max_length=200, eval_rows=2,
                      ds_config=ds_config(tmp_path / "ds.json", 0, len(rows), 1))
    [(_, metrics, _)] = ranks.run(1, evaluated, flags, rows)
    torch.manual_seed(0)
    accepted, tried = counted(byte_level, rows, monkeypatch)
    assert tried > 1500
    rate = metrics["eval/draft_acceptance"]
    assert 0.1 < rate < 0.9
    assert accepted / tried == pytest.approx(rate, abs=0.02)
