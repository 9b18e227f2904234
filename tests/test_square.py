"""benchmarks/square_table.py: what is asked next, and tables, from records that are made up."""

import json
import re

import pytest

from benchmarks import square_table
from benchmarks.square_table import EQUAL, TEXT, Cost, Records, Run, Study, name_of

PAIR = "digits", "bytes"


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path)


def add(records, job, bits=0.0):
    """Add a record of a run whose student has some bits per byte."""
    after = {"sources": bits, "documentation": bits}
    records.add(vars(job) | {"choose": bits, "after": after, "before": after, "seconds": 8.0,
                             "step": job.steps, "rows": 1200, "passages": 1200,
                             "teacher_row": 0.01})


def study_of(records, **flags):
    flags = {"losses": [TEXT, "piece_kl", "simct"], "pairs": [PAIR], "seeds": 2} | flags
    return Study(records, "little", 3e-3, **flags)


@pytest.mark.parametrize("best, tried", [(9.0, [1, 0.5, 2, 4, 8, 16]),
                                         (0.2, [1, 0.5, 2, 0.25, 0.125])])
def test_a_weight_has_worse_ones_on_both_sides(records, best, tried):
    study = study_of(records)
    order = []
    while (weight := study.weight_of(PAIR, "piece_kl")) is None:
        for run in study.wanted:
            if run.loss != TEXT and run.weight not in order:
                order.append(run.weight)
            add(records, run, 500.0 if run.loss == TEXT else (run.weight - best) ** 2)
        study.wanted = []
    assert weight == min(order, key=lambda one: (one - best) ** 2) and order == tried


def test_where_no_weight_helps_the_gain_is_that_of_the_text(records, monkeypatch):
    """However light it is; and no run is asked for that would show what is known."""
    study = study_of(records)
    while jobs := study.missing():
        for job in jobs:
            if isinstance(job, Cost):
                costs = dict.fromkeys(job.losses, 1.0)
                records.add({"scale": "small", "student": "digits", "teacher": "bytes",
                             "costs": costs, "teacher_row": 0.0})
            else:
                add(records, job, 2.0 + job.weight + job.seed)
    gains = study.gains(PAIR, "simct")
    assert gains.weight == 0 and gains.bits["sources"] == {0: 0.0, 1: 0.0}
    weights = {name.weight for name in records.of if isinstance(name, Run) and name.loss == "simct"}
    assert min(weights) == square_table.LIGHTEST
    assert {name.seed for name in records.of if isinstance(name, Run) and name.weight} == {100, 101}
    tables = square_table.tables_of(study)
    assert "none helps" in square_table.markdown(tables[0][1])
    rivals = {"SimCT": ("simct",), "BPM": ("bpm", "bpm_fkl")}
    monkeypatch.setattr(square_table, "RIVALS", rivals)
    head, cells = square_table.beside_rivals(study)  # of bpm nothing is known
    assert "BPM" not in head and cells[0] == "digits <- bytes, finer"
    assert cells[3] == "0.0000 ± 0.0000"


def test_equal_seconds_follow_from_costs_measured_in_turns(records):
    """A step of piece_kl takes 0.3 s and 8 passages of 0.05 s of its teacher: 0.7 s."""
    study = study_of(records, losses=[TEXT, "piece_kl", "simct", "csd"])
    assert study.steps_of(PAIR, "simct") is None
    [cost] = study.wanted
    assert "csd" not in cost.losses  # a loop in Python
    costs = {TEXT: 0.1, "piece_kl": 0.3, "simct": 0.2}
    of_large = dict.fromkeys(costs, 7.0)
    for scale, each in (("large", of_large), ("small", costs)):
        records.add({"scale": scale, "student": "digits", "teacher": "bytes", "teacher_row": 0.05,
                     "costs": each})
    assert study.steps_of(PAIR, TEXT) == round(150 * 0.7 / 0.1)
    assert study.steps_of(PAIR, "simct") == study.steps_of(PAIR, "csd") == round(150 * 0.7 / 0.6)


def test_few_seeds_of_every_pair_come_before_many_of_one(records):
    pairs = [PAIR, ("bytes", "digits"), ("bytes", "bytes")]
    jobs = study_of(records, pairs=pairs, seeds=8, weight=1.0).missing()
    seeds = [job.seed for job in jobs if isinstance(job, Run)]
    assert sorted(set(seeds)) == list(range(8))
    first = [job for job in jobs[: seeds.index(3)] if isinstance(job, Run)]
    assert {(job.student, job.teacher) for job in first} >= set(pairs)
    assert {job.loss for job in jobs if job.teacher == job.student} == {EQUAL}
    assert len(set(jobs)) == len(jobs)


def test_records_of_two_machines_are_merged_once(records, tmp_path):
    run = Run("new", "bytes", "digits", "piece_kl", 1.0, 3e-3, 0, 150)
    add(records, run, 2.0)
    other = Records(tmp_path / "other")
    add(other, run, 2.0)
    add(other, Run("new", "bytes", "", TEXT, 0.0, 3e-3, 0, 150), 2.1)
    square_table.merge(records, tmp_path / "other")
    assert len((tmp_path / "square_new.jsonl").read_text().splitlines()) == 2
    assert set(Records(tmp_path).of) == set(other.of)
    assert all(name_of(record) == name for name, record in records.of.items())


def test_runs_of_other_texts_are_left_out(records, tmp_path):
    """Two of three runs are of one Python's library, so these make the table."""
    run = Run("new", "bytes", "", TEXT, 0.0, 3e-3, 0, 150)
    for seed, corpus in enumerate("aab"):
        record = vars(run) | {"seed": seed, "corpus": corpus}
        with open(tmp_path / "square_new.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
    assert {name.seed for name in Records(tmp_path).of} == {0, 1}
    assert {name.seed for name in Records(tmp_path, "b").of} == {2}


def test_teachers_and_students_of_their_own_cancel_in_a_share(records):
    """What a teacher gives and a student takes whatever the tokenizers are is in both means."""
    of_teacher = {"bytes": 0.3, "digits": -0.1, "unigram": 0.0}
    of_student = {"bytes": 0.0, "digits": 1.0, "unigram": 0.5}
    pairs = [(a, b) for a in of_student for b in of_teacher]
    study = study_of(records, losses=[TEXT, "piece_kl"], pairs=pairs, weight=1.0)
    for job in study.missing():
        if isinstance(job, Cost):
            continue
        gain = 0.0
        if job.loss != TEXT:
            different = -0.2 if job.loss != EQUAL else 0.0
            gain = (2.0 + of_student[job.student] + of_teacher[job.teacher] + different)
        add(records, job, 9.0 - gain * (1 + job.seed))
    diagonal = 2.0 + 0.5 + 0.2 / 3
    assert square_table.shares(study, "piece_kl") == pytest.approx([1 - 0.2 / diagonal] * 2)


def test_large_gains_are_over_the_text_at_its_best(records):
    """Of 0.4 that an equal tokenizer gives, 0.3 are left; the better text counts, whatever seed."""
    for seed in (0, 1):
        of_seed = seed / 10
        for teacher, loss, weight, steps, bits in (
                ("", TEXT, 0.0, 300, 2.5), ("", TEXT, 0.0, 600, 2.4),
                ("digits", "piece_kl", 4.0, 300, 2.1), ("bytes", EQUAL, 4.0, 300, 2.0),
                ("digits", "simct_fkl", 4.0, 300, 2.3), ("digits", "piece_kl", 1.0, 300, 2.2)):
            add(records, Run("large_500", "bytes", teacher, loss, weight, 1.5e-3, seed, steps),
                bits + of_seed)
    [(name, gains)] = square_table.large_gains(records, "large_500").items()
    assert name == ("piece_kl", 4.0, "bytes")
    assert gains == [pytest.approx({0: each, 1: each}) for each in (0.3, 0.4)]


def test_a_pair_is_beside_the_better_form_of_each_rival(records):
    """At its own best weight, and at equal seconds after more steps, where it is ahead."""
    study = Study(records, "new", 3e-3, [TEXT, "piece_kl", "simct", "simct_fkl"], [PAIR], seeds=2)
    best = {"piece_kl": (1.0, 0.3), "simct": (0.25, 0.1), "simct_fkl": (2.0, 0.2)}
    while jobs := study.missing():
        for job in jobs:
            if isinstance(job, Cost):
                costs = {"piece_kl": 2.0, TEXT: 1.0, "simct": 1.0, "simct_fkl": 1.0}
                records.add({"scale": "small", "student": PAIR[0], "teacher": PAIR[1],
                             "costs": costs, "teacher_row": 0.0})
                continue
            weight, gain = best.get(job.loss, (0.0, 0.0))
            gain -= 0.01 * (job.weight != weight)
            add(records, job, 3.0 + job.seed - gain - 0.4 * (job.steps > 150))
    rows = square_table.beside_rivals(study)
    assert dict(zip(*rows, strict=True)) == {
        "student <- teacher": "digits <- bytes, finer", "`piece_kl`, weight": "0.3000 ± 0.0000, 1",
        "documentation, likewise": "0.3000 ± 0.0000", "SimCT": "0.1000 ± 0.0000 (`simct_fkl`)",
        "SimCT, equal seconds": "-0.3000 ± 0.0000 (`simct_fkl`)",
        "text alone, equal seconds": "-0.1000 ± 0.0000", "n": "2"}
    assert square_table.with_columns(rows, {"n", "SimCT"}) == [row[3:7:3] for row in rows]


def test_a_gain_is_over_the_text_alone_at_the_best_of_its_lengths(records):
    """None while a length is missing: 300 steps would flatter the teacher."""
    study = Study(records, "repeated", 3e-3, [TEXT, "piece_kl"], [PAIR], seeds=2, weight=4.0)
    assert set(study.lengths) == {75, 150}
    while jobs := study.missing():
        for job in sorted(jobs, key=lambda job: job.steps, reverse=True):
            if job.steps == 75:
                assert study.gains(PAIR, "piece_kl") is None
            of_text = {75: 2.3, 150: 2.4, 300: 2.5}[job.steps]
            add(records, job, of_text if job.loss == TEXT else 2.0)
    assert study.gains(PAIR, "piece_kl").bits["sources"] == pytest.approx({0: 0.3, 1: 0.3})


def test_amounts_of_text_tell_when_a_teacher_is_ahead_of_the_text(records):
    """Seconds at 60 steps of 8 passages: 6, and a teacher's for 480 of them, or the 150 there are.

    Of 1,200 passages the text is better than the student ever is.
    """
    for regime in ("repeated", "repeated_1200"):
        study = Study(records, regime, 3e-3, [TEXT, "piece_kl"], [PAIR], seeds=square_table.FEW)
        rows = square_table.REGIMES[regime].rows
        while jobs := study.missing():
            for job in jobs:
                bits = {75: 2.4, 150: 2.3, 300: 2.35, 600: 1.9, 1200: 2.0}[job.steps] \
                    if job.loss == TEXT else 2.0 + 0.01 * (job.weight != 2)
                after = {"sources": bits, "documentation": bits}
                looks = [{"step": step, "seconds": step / 10, "choose": choose} for step, choose in
                         ((30, 2.5), (60, 2.2), (job.steps, bits))]
                records.add(vars(job) | looks[-1] | {
                    "after": after, "before": after, "rows": rows, "curve": looks,
                    "passages": 8 * job.steps, "teacher_row": 0.01 * (job.loss != TEXT)})
    head, little, much, longer = square_table.amounts(records, PAIR)
    names = dict(zip(head, little))
    assert (names["passages"], names["over text at its best"]) == ("150", "0.3000 ± 0.0000")
    assert little[1:4] == ["2.3000 ± 0.0000", "8", "15"] and little[5] == "16"
    assert names["over text after as many steps"] == "0.3500 ± 0.0000"
    assert names["CPU seconds: teacher live; cached"] == "54; 32"
    assert names["ahead of that after"] == "11; 8"
    assert much[0] == "1200" and much[2] == "4" and much[7] == "-0.1000 ± 0.0000"
    assert much[9:] == ["never", "3"]
    assert (much[5], longer[5]) == ("2", "4")  # as often as is best for the text


# --- pages ----------------------------------------------------------------------------------------


def tables(**flags):
    return square_table.page_tables(Records(square_table.LOG), **flags)


def test_results_have_the_tables_that_follow_from_the_kept_runs():
    """If this fails: python benchmarks/square_table.py --page docs/results.md."""
    page = (square_table.ROOT / "docs/results.md").read_text()
    assert square_table.with_tables(page, tables()) == page
    changed = page.replace(", crossing | 0.0", ", crossing | 0.1")
    assert changed != page and square_table.with_tables(changed, tables()) == page


def test_the_first_claim_of_the_readme_follows_from_the_kept_runs():
    """Each figure of its rows is that of a cell, rounded; words say who is ahead."""
    rows = re.findall(r"^\| helps .*$", (square_table.ROOT / "README.md").read_text(), re.M)
    row = " ".join(rows)
    assert len(rows) == 2
    cells = re.findall(r"\d\.\d{4}", "".join(tables(left_out=set())))
    rounded = {f"{float(cell) + shift:.3f}" for cell in cells for shift in (-1e-9, 1e-9)}
    figures = re.findall(r"\d\.\d{3,}", row)
    assert figures and set(figures) <= rounded | set(cells), set(figures) - rounded


def test_a_large_student_learns_as_long_as_that_helps(records):
    """Text alone is best at twice the steps, piece_kl at once; four times is tried at most."""
    study = Study(records, "large_500", 1.5e-3, [TEXT, "piece_kl"], [("bytes", "digits")], seeds=2,
                  weight=1.0)
    order = []
    while jobs := study.missing():
        for job in jobs:
            order.append((job.loss, job.steps))
            best = {TEXT: 600, "piece_kl": 300}[job.loss]
            add(records, job, 2.0 + abs(job.steps - best) / 1000 - 0.1 * (job.loss != TEXT))
    assert {steps for loss, steps in order if loss == TEXT} == {300, 600, 1200}
    assert {steps for loss, steps in order if loss != TEXT} == {300, 600}
    rows = {(row[0], row[3]): row for row in square_table.as_run(records, "large_500")}
    assert rows["piece_kl", "300"][5:7] == ["0.4000 ± 0.0000", "0.1000 ± 0.0000"]
    assert square_table.beside_rivals(study) == [[]]  # no weight was chosen
    assert rows[TEXT, "600"][5:7] == ["", ""] and rows[TEXT, "300"][6] == "-0.3000 ± 0.0000"
