"""demo.py: a fixed split of its corpus, tokenizers of different kinds, a run up to the table."""

import io
import re

import pytest
import sentencepiece

import demo
import ranks
from conftest import ROOT
from jobs import run_distill


@pytest.fixture(scope="module")
def documents():
    return list(demo.documents())


def test_the_split_is_fixed_and_no_passage_is_in_both_halves(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "documents", lambda: documents)
    first = tmp_path / "first"
    second = tmp_path / "second"
    demo.make_corpus(first)
    demo.make_corpus(second)
    assert first.read_bytes() == second.read_bytes()

    held_out, train = demo.read_corpus(first)
    assert len(held_out) == demo.RECIPE["held_out_rows"]
    assert len(train) > 4000
    assert not set(held_out) & set(train)
    # about 2 MB, in passages that --max_length rarely truncates
    size = len("".join(held_out + train).encode())
    assert 1.5e6 < size < 4e6
    assert max(map(len, train)) < 2000


def test_the_tokenizers_differ_in_kind_and_in_digits(tokenizers, texts):
    student, teacher = tokenizers
    assert len(student) != len(teacher)
    assert student.tokenize("x 2010")[-4:] == list("2010")
    # the teacher's kind keeps a frequent number whole; the student's kind never does
    teacher = demo.byte_level_bpe(["in 2010 and 2010 and 2010"] * 50, 300)
    assert teacher.tokenize("in 2010")[-1] == "Ġ2010"
    # also text unlike the training texts: the student must reproduce every character
    for text in [*texts[:50], "Größe  é\n\tx", "日本 12"]:
        ids = student(text)["input_ids"]
        assert student.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_unigram_tokenizer_is_the_one_that_sentencepiece_trained(texts, tokenizers):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=350, **demo.SENTENCEPIECE)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    student, _ = tokenizers
    for text in texts[:100]:
        # pieces of equal score may come in another order: "_ ___" or "___ _"
        assert sorted(student(text)["input_ids"]) == sorted(reference.encode(text)), text


def test_numbers_that_are_not_finite_are_printed_and_drawn(tmp_path):
    """A student that diverged has null in its metrics."""
    metrics = tmp_path / "metrics.jsonl"
    lines = []
    for step, bits in ((0, "3.0"), (5, "2.5"), (9, "null")):
        lines.append(f'{{"step": {step}, "eval/student_bits_per_byte": {bits}, "eval/kd": {bits}, '
                     '"eval/teacher_bits_per_byte": 1.5, "eval/aligned_bytes": 0.9}\n')
    metrics.write_text("".join(lines))
    evaluations = demo.read_metrics(metrics)
    runs = [demo.Run(arm, 0, 1.0, evaluations) for arm in demo.ARMS]
    assert demo.final_bits(runs[0]) != demo.final_bits(runs[0])  # NaN
    assert "nan" in demo.table(runs) and "1.500" in demo.table(runs)
    assert "better than no teacher for 0 of 1 seeds" in "\n".join(demo.verdicts(runs))
    demo.plot(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_demo_runs_up_to_its_table(documents, tmp_path, monkeypatch, capsys):
    """Run the real recipe with sizes too small to learn; test_cli covers the launcher."""

    def launch(world, flags):
        return max(codes[0] for codes in ranks.run(world, run_distill, [flags]))

    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, max_position_embeddings=512)
    recipe = dict(held_out_rows=8, teacher_steps=2, teacher=shape, student=shape,
                  teacher_vocab=600, student_vocab=400)
    # one arm with a teacher and one without: these are the two kinds of lines in the table
    arms = {arm: demo.ARMS[arm] for arm in (demo.NO_TEACHER, "piece_kl")}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(demo, "launch", launch)
    monkeypatch.setattr(demo, "documents", lambda: documents[:60])
    monkeypatch.setattr(demo, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(demo, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(demo, "ARMS", arms)
    monkeypatch.setattr(demo, "DISTILL", demo.DISTILL | {"steps": 2, "eval_rows": 8})
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE | recipe)
    short = {"steps": 2, "rollout_tokens": 8, "rollout_eval": 8}
    monkeypatch.setattr(demo, "ON_POLICY", demo.ON_POLICY | short)
    demo.main()

    printed = capsys.readouterr().out
    # a run without a teacher has bits per byte and seconds, but no divergence
    number = r"\d\.\d{3} +\| "
    assert re.search(rf"\| +\| teacher +\| {number}", printed)
    assert re.search(rf"\| 0 +\| no teacher +\| {number} +\| +\| +\| \d+ +\|", printed)
    assert re.search(rf"\| 0 +\| piece_kl +\| {number * 3}9\d\.\d% +\| \d+ +\|", printed)
    verdict = r"piece_kl: better than no teacher for [01] of 1 seeds, by [+-]\d\.\d{3} bits"
    assert re.search(verdict, printed)
    assert re.search(rf"\| after +\| {number * 2}", printed)
    assert printed.count("\nprompt  ") == demo.ON_POLICY["rollout_log"]
    assert (demo.RUNS / demo.recipe_folder().name / "curves.png").stat().st_size > 10_000
