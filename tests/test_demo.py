"""demo.py: a fixed split of its corpus, tokenizers of different kinds, a run up to its last line.

demo_report.py: the arithmetic of its table, equal time, what is drawn.
"""

import io
import json
import math
import re
import threading

import pytest
import sentencepiece

from conftest import ROOT
from examples import demo_report
from examples.demo_report import AS_LONG, EQUAL_TOKENIZERS, NO_TEACHER, Run
from isogloss import curves, demo
from jobs import launch_forked


def test_the_split_is_fixed_and_no_story_is_in_both_halves(tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    demo.make_corpus(first)
    demo.make_corpus(second)
    assert first.read_bytes() == second.read_bytes()

    held_out, train = demo.read_corpus(first)
    assert len(held_out) == demo.RECIPE["held_out_rows"]
    assert len(train) > 4000
    assert not set(held_out) & set(train)
    # about 2 MB, in stories that --max_length does not truncate
    size = len("".join(held_out + train).encode())
    assert 1.5e6 < size < 4e6
    assert max(map(len, train)) < 600
    # no slot is left open, and what is taken away and what is left make the whole
    assert not any(set("{}") & set(text) for text in train)
    sums = re.findall(r"has (\d+) \w+ and gives (\d+) of them to \w+. Now \w+ has (\d+)",
                      " ".join(train))
    assert len(sums) > 1000 and all(int(n) == int(m) + int(k) for n, m, k in sums)


def test_students_read_few_of_the_stories(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.write_text("".join(f'{{"text": "story {i}"}}\n' for i in range(300)))
    demo.make_student_corpus(corpus, tmp_path / "students")
    held_out, train = demo.read_corpus(tmp_path / "students")
    assert held_out == demo.read_corpus(corpus)[0]
    assert train == demo.read_corpus(corpus)[1][: demo.RECIPE["student_rows"]]


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


# --- what is shown of the runs --------------------------------------------------------------------


ALONE = NO_TEACHER, AS_LONG


def run_of(arm, seed, bits, step_seconds=(0.5,), teacher=2.0):
    """Return a Run with these held-out bits per byte at evenly spread steps."""
    evaluations = []
    for number, value in enumerate(bits):
        step = number * len(step_seconds) // max(1, len(bits) - 1)
        line = {"step": step, "eval/student_bits_per_byte": value}
        if arm not in ALONE:
            line["eval/teacher_bits_per_byte"] = teacher
        evaluations.append(line)
    return Run(arm, seed, list(step_seconds), evaluations)


def cells_of(table):
    """Return {model: cells} of a Markdown table."""
    rows = {}
    for line in table.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = cells
    return rows


def test_the_time_of_a_run_is_that_of_its_median_step():
    slow_start = [30.0] + [0.25] * 9  # it loads compiled code
    assert run_of(NO_TEACHER, 0, [4, 3], slow_start).seconds == 2.5
    assert run_of("piece_kl", 0, [4, 3], [60.0] + [0.75] * 11).seconds == 9.0


def test_steps_of_equal_time_take_as_long():
    """By the median steps: 0.2 s without a teacher, 0.3 s with one, 40 of them."""
    runs = [run_of(NO_TEACHER, 0, [4, 3], [9.0] + [0.2] * 39),
            run_of("piece_kl", 0, [4, 3], [0.3] * 40)]
    assert demo_report.steps_of_equal_time(runs) == 60  # of 0.2 s are the 12 s of 40 of 0.3 s


def test_a_run_is_read_without_its_evaluations_in_its_time(tmp_path):
    """A step has seconds of its own, those of processors if it has them; null: not finite."""
    lines = [{"step": 0, "eval/student_bits_per_byte": 4.0},
             {"step": 1, "seconds": 2.0, "loss": 1.0}, {"step": 2, "seconds": 3.0, "loss": None},
             {"step": 2, "eval/student_bits_per_byte": None, "eval/rollout/seconds": 50.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    run = demo_report.read_run("gold", 3, path)
    assert (run.arm, run.seed, run.steps, run.seconds) == ("gold", 3, 2, 5.0)
    assert [line["step"] for line in run.evaluations] == [0, 2] and math.isnan(run.bits)
    path.write_text(json.dumps({"step": 1, "seconds": 9.0, "processor_seconds": 2.0}))
    assert demo_report.read_run("gold", 3, path).seconds == 2


def test_the_table_compares_each_seed_with_its_own_baseline():
    runs = [run_of(NO_TEACHER, 0, [4, 2.7]), run_of(NO_TEACHER, 1, [4, 2.5]),
            run_of("gold", 0, [4, 2.6], [2.0]), run_of("gold", 1, [4, 2.4], [4.0]),
            run_of(AS_LONG, 0, [4, 2.65]), run_of(AS_LONG, 1, [4, 2.55]),
            run_of(EQUAL_TOKENIZERS, 0, [4, 2.3], teacher=1.9),
            run_of(EQUAL_TOKENIZERS, 1, [4, 2.3], teacher=1.9)]
    rows = cells_of(demo_report.table(runs))
    assert rows["student of"][3:] == ["its teacher", "gain", "better"]
    # the sample deviation of 2.7 and 2.5 is 0.2 / sqrt(2)
    assert rows[NO_TEACHER] == ["1", "0", "2.600 ± 0.141", "", "", ""]
    assert rows["gold"] == ["1", "3", "2.500 ± 0.141", "2.000", "+0.100 ± 0.000", "2 of 2"]
    assert rows[EQUAL_TOKENIZERS][3] == "1.900"
    assert rows[AS_LONG][3:] == ["", "+0.000 ± 0.071", "1 of 2"]
    alone = cells_of(demo_report.table([run for run in runs if run.seed == 0]))
    # one seed is better or worse by chance
    assert "better" not in alone["student of"]
    assert alone["gold"] == ["1", "2", "2.600", "2.000", "+0.100"]


def test_a_student_that_diverged_is_printed_and_drawn(tmp_path):
    runs = [run_of(arm, 0, [3.0, 2.5, math.nan]) for arm in demo.ARMS]
    assert cells_of(demo_report.table(runs))["piece_kl"][2:] == ["nan", "2.000", "+nan"]
    demo_report.plot(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


# --- the demo itself ------------------------------------------------------------------------------


def shorten(monkeypatch, folder):
    """Give the demo sizes too small to learn, and ranks of this process."""
    lock = threading.Lock()  # the real launcher starts processes, which run side by side

    def launch(*arguments):
        with lock:
            return launch_forked(*arguments)

    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, max_position_embeddings=512)
    recipe = dict(stories=200, held_out_rows=8, student_rows=40, teacher_steps=2, teacher=shape,
                  student=shape, teacher_vocab=600, student_vocab=400)
    monkeypatch.chdir(ROOT)
    small = {"launch": launch, "CACHE": folder / "cache", "RUNS": folder / "runs",
             "DISTILL": demo.DISTILL | {"steps": 4}, "NUM_EVALUATIONS": 2,
             "RECIPE": demo.RECIPE | recipe}
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)


def test_the_demo_runs_up_to_its_last_line(tmp_path, monkeypatch, capsys):
    """Run the real recipe with sizes too small to learn; test_cli covers the launcher."""
    shorten(monkeypatch, tmp_path)
    monkeypatch.setenv("SEEDS", "0")
    demo.main()

    printed = capsys.readouterr().out
    assert len(printed.splitlines()) + len(demo.ARMS) < 60
    for line in printed.splitlines()[3:5]:  # the tokens of either side spell the sentence
        assert re.sub("[│ ]", "", line).replace("·", " ").strip().startswith("Rosa has 25")
    assert "\nbytes 100.0%, " in printed
    folder = demo.RUNS / demo.recipe_folder().name
    rows = cells_of(printed)
    assert [rows[arm][0] for arm in demo.ARMS if arm != AS_LONG] == ["4"] * 3
    assert rows[NO_TEACHER][3:] == ["", ""] and rows[AS_LONG][3] == "" and int(rows[AS_LONG][0]) > 0
    for name in demo.ARMS:
        assert re.fullmatch(r"\d\.\d{3}", rows[name][2]), name
        assert name in ALONE or re.fullmatch(r"\d\.\d{3}", rows[name][3]), name
    assert re.fullmatch(r"[+-]\d\.\d{3}", rows[EQUAL_TOKENIZERS][4])
    # the equal tokenizer is equal: a chunk has as many tokens on both sides, and nothing is lost
    metrics = curves.read_run(folder / "equal_tokenizers_0")
    steps = [line for line in metrics if "chunks_1_1" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["chunks_1_n"] == line["chunks_n_1"] == 0 and line["aligned_bytes"] == 1
    assert json.loads((folder / "piece_kl_0.ds_config.json").read_text())["train_batch_size"] == 8

    for name in demo.WRITERS:
        for prompt in demo.PROMPTS:
            assert f"\n{name:{len(NO_TEACHER)}}  {prompt}" in printed
    assert (folder / "curves.png").stat().st_size > 10_000
    # the printed code runs, and what it writes was printed
    code = re.search(r"^from transformers.*?^text = .*?$", printed, re.M | re.S)[0]
    assert f'from_pretrained("{demo.exported(folder, "piece_kl", 0)}")' in code
    assert demo_report.one_line(demo_report.written_by(code)) in printed


def test_a_job_that_fails_ends_the_demo_with_the_end_of_its_log(tmp_path, monkeypatch):
    def launch(world, flags, log, threads):
        log.write_text("\n".join(f"line {number}" for number in range(30)))
        return 2

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(demo, "launch", launch)
    monkeypatch.setattr(demo, "RUNS", tmp_path / "runs")
    with pytest.raises(SystemExit, match=r"(?s)line 15.*line 29.*--kd_weight=0") as end:
        demo.train_arms(tmp_path / "cache", [0], demo.DemoLayout(1, 2))
    assert "line 14" not in str(end.value)
