"""Scripts of benchmarks/: each starts, those that take seconds at their smallest size run.

Of a GPU's day without a GPU: its order, its outcomes, its record, and a rehearsal of all of it.
"""

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from benchmarks import gpu, gpu_day, gpu_job, gpu_pack, step
from conftest import ROOT
from isogloss.models.compiler import missing_compiler
from jobs import launch_forked

# what gpu_day.py runs and losses of square.py are no scripts
SCRIPTS = sorted({path.name for path in (ROOT / "benchmarks").glob("*.py")}
                 - {"gpu.py", "gpu_job.py", "gpu_studies.py", "rivals.py", "square_models.py"})


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch):
    """Let the processes of gpu.py be forked from the tests' server, which has all imported."""
    monkeypatch.setattr(gpu, "START_METHOD", "forkserver")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_is_for(script, monkeypatch, capsys):
    path = str(ROOT / "benchmarks" / script)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code in (None, 0)
    printed = capsys.readouterr()
    assert script.removesuffix(".py") in printed.out + printed.err


def test_a_loss_is_measured(capsys):
    from benchmarks.loss import main

    for name, path in product(gpu.TABLE_LOSSES, ("tiled", "plain")):
        main(name, tokens=8, V=200, W=300, H=8, teacher_H=8, path=path, times=1, here=True)
        assert json.loads(capsys.readouterr().out)["loss"] == name


@pytest.fixture
def square(tmp_path, monkeypatch):
    """Return the module with little of everything, whose models are in a folder of their own."""
    from benchmarks import square, square_models, square_table
    from isogloss.objective.loss_table import LOSSES

    losses = dict(LOSSES)
    square_models.corpus.cache_clear()
    whole = square_models.corpus()
    rows = {"choose": 6, "report": 6, "train": 400, "documentation": 40}
    small = {part: whole[part][:num] for part, num in rows.items()}
    regimes = {"little": square_table.Regime(16, 2),
               "new": square_table.Regime(16, 2, is_fresh=False),
               "long": square_table.Regime(16, 12, checks=12),
               "above": square_table.Regime(16, 2)}
    sizes = {"sizes": dict(bytes=400, digits=300, unigram=400), "teacher": (16, 16, 1, 1),
             "student": (16, 16, 1, 1), "teacher_steps": 3, "kept_every": 1, "seeds": 2}
    small_scale = square.SCALES["small"]._replace(
        runs=tmp_path / "small", regimes=regimes, pairs=(("digits", "bytes"),), **sizes)
    large = {"large_500": square_table.Regime(16, 3, checks=3)}
    large_scale = square.SCALES["large"]._replace(
        runs=tmp_path / "large", regimes=large, **sizes)
    scales = {"small": small_scale, "large": large_scale}
    for module, name, value in (
            (square, "SCALES", scales), (square_models, "SCALES", scales),
            (square, "corpus", lambda: small), (square_models, "corpus", lambda: small),
            (square_models, "MATCHED", 9.0), (square, "FIRST_STEPS", 2), (square, "TIMED", 3),
            (square_table, "SEEDS_TO_CHOOSE", (100,)), (square_table, "LIGHTEST", 1 / 4),
            (square_table, "HEAVIEST", 2.0), (square_table, "REGIMES", regimes),
            (square_table, "LARGE", large)):
        monkeypatch.setattr(module, name, value)
    caches = (square.bits_before, *(getattr(square_models, name) for name in (
        "encoder", "teacher", "hidden", "held_out", "corpus_name")))
    for cached in caches:
        cached.cache_clear()
    square.use("small", "little")
    yield square
    LOSSES.clear()  # of the rivals, which other tests would take for the job's own
    LOSSES.update(losses)
    for cached in caches:
        cached.cache_clear()


def test_a_square_goes_on_from_its_records_on_another_machine(square, tmp_path, capsys, models):
    def run(**flags):
        square.main(square.Args(**{"losses": "text,piece_kl,bpm,simct", "regimes": "new",
                                   "rates": "0.003", "records": str(tmp_path / "log")} | flags))
        return capsys.readouterr()

    assert "more where a weight" in run(plan=True).out
    plan = run(plan=True, scale="large", regimes="", losses="", rates="").out
    assert "hours of a core in all, 2 teachers" in plan  # gpu_day.py runs these, see its rehearsal
    run()
    path = tmp_path / "log" / "square_new.jsonl"
    lines = path.read_text().splitlines()
    record = next(one for one in map(json.loads, lines) if one["loss"] == "bpm")
    assert record["form"].startswith("published") and record["teacher_row"] > 0
    assert record["before"].keys() == record["after"].keys() == {"sources", "documentation"}
    assert record["before"] != record["after"] and "/" not in record["teacher"]
    assert 0 < record["agreement"]["bytes"]["total_variation_common"] < 1
    of_text = next(one for one in map(json.loads, lines) if one["loss"] == "text")
    assert set(of_text["agreement"]) == {"bytes", "digits", "unigram"}
    shutil.rmtree(tmp_path / "small")  # another machine has the lines alone
    cut = [line for line in lines if json.loads(line)["seed"] != 1]
    path.write_text("\n".join(cut) + "\n")
    run()
    again = path.read_text().splitlines()
    assert again[: len(cut)] == cut
    with_steps = [(line["loss"], line["weight"], line["seed"]) for line in map(json.loads, lines)]
    later = [(line["loss"], line["weight"], line["seed"]) for line in map(json.loads, again)]
    assert sorted(later) == sorted(with_steps)
    run(regimes="above", teacher=str(models[1]), losses="text,simct", weight=1.0)
    assert '"teacher": "teacher"' in (tmp_path / "log" / "square_above.jsonl").read_text()
    with pytest.raises(ValueError, match="go together"):
        run(teacher="x")
    with pytest.raises(ValueError, match="--scale small has"):
        run(regimes="large_500")


def test_a_long_run_goes_on_where_the_minutes_ended(square, tmp_path, monkeypatch):
    """What is left in the middle ends with the same figures as what was never left."""
    from benchmarks.square_table import Run

    square.use("small", "long")
    run = Run("long", "digits", "", "text", 0.0, 3e-2, 0, 12)
    whole = square.do(run)
    ends = iter(range(100))
    monkeypatch.setattr(square.time, "monotonic", lambda: next(ends))
    tries = 0
    while True:
        tries += 1
        try:
            parts = square.do(run, until=next(ends) + 4)
            break
        except square.OutOfTime:
            assert tries < 9
    assert tries > 2
    for record in (whole, parts):
        del record["seconds"]
        for look in record["curve"]:
            del look["seconds"]
    assert parts == whole and len(whole["curve"]) > 4


# (bits by weight: what noise makes of them; text alone has 3; the weight that is chosen)
BITS_TO_CHOOSE = [
    ({1 / 16: 2.99, 1 / 8: 2.9, 1 / 4: 2.95, 1 / 2: 2.93, 1: 2.8, 2: 2.7, 4: 2.75}, 2),
    ({1 / 16: 2.95, 1 / 8: 2.9, 1 / 4: 2.95, 1 / 2: 3.2, 1: 3.1, 2: 3.3}, 1 / 8),
    ({1 / 16: 3.1, 1 / 8: 3.05, 1 / 4: 3.2, 1 / 2: 3.2, 1: 3.1, 2: 3.3}, 0)]


@pytest.mark.parametrize("bits, chosen", BITS_TO_CHOOSE)
def test_noise_of_fresh_students_costs_no_rival_its_weight(monkeypatch, bits, chosen):
    """A bracket around 1/8 is no best weight where one around 1 helps."""
    from benchmarks.square_table import Study

    monkeypatch.setattr(Study, "mean_to_choose",
                        lambda study, pair, loss, weight: bits[weight] if weight else 3.0)
    pair = "bytes", "digits"
    assert Study(None, "little", 3e-3, ["csd"], [pair]).weight_of(pair, "csd") == chosen


# --- a GPU's day ----------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return the path of a record that is not there yet."""
    monkeypatch.setattr(gpu_day, "RECORD", tmp_path / "gpu_day.json")
    return tmp_path / "gpu_day.json"


def test_without_a_gpu_it_ends_in_one_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--out", str(tmp_path / "out")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                         env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.startswith("no GPU: ") and run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_study_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--studies", "loss,ipc"])
    with pytest.raises(SystemExit, match="--studies ipc: expected some of transfer, draft, "):
        gpu_day.main()


def test_what_was_never_tried_comes_first_and_what_is_done_not_at_all(monkeypatch):
    monkeypatch.setattr(gpu_day, "STUDIES", {
        "a": gpu_day.Study("", "", dict.fromkeys("xyz")), "b": gpu_day.Study("", "", {"x": None})})
    lines = [{"study": study, "part": part, "result": result}
             for study, part, result in (("a", "x", "failed"), ("a", "y", "done"),
                                         ("b", "gone", "done"))]
    assert gpu_day.todo(["a", "b"], lines) == [("a", "z"), ("b", "x"), ("a", "x")]
    assert gpu_day.todo(["a", "b"], lines, again=["a"])[2:] == [("a", "x"), ("a", "y")]


def test_a_part_begins_if_it_ends_in_time_and_is_ended_if_not(record, tmp_path, monkeypatch):
    """Of 100 s the second part of 70 s does not fit, the third does; the clock is made up."""
    clock = [0.0]
    begun = []

    def run_part(name, part, out, seconds, variables):
        begun.append((part, seconds))
        clock[0] += gpu_day.STUDIES[name].parts[part][0]
        gpu_day.append(out, {"study": name, "part": part, "result": "done"})
        return gpu_day.read_lines(out / gpu_day.LINES)[-1]

    parts = {"first": (70, {}), "long": (70, {}), "short": (20, {})}
    monkeypatch.setattr(gpu_day, "STUDIES", {"a": gpu_day.Study("", "", parts)})
    monkeypatch.setattr(gpu_day, "run_part", run_part)
    monkeypatch.setattr(gpu_day.time, "monotonic", lambda: clock[0])
    card = subprocess.CompletedProcess([], 0, stdout='{"card": "some"}', stderr="")
    monkeypatch.setattr(gpu_day.subprocess, "run", lambda *arguments, **options: card)
    gpu_day.run_all(["a"], tmp_path / "out", (100 + gpu_day.LAST_SECONDS) / 60, [])
    assert begun == [("first", 100), ("short", 30)]
    assert gpu_day.todo(["a"], gpu_day.read_lines(tmp_path / "out" / gpu_day.LINES)) == [
        ("a", "long")]


@pytest.mark.parametrize("seconds,variables,reason", [
    (0.2, {}, "no result within 0 s"), (60, {"PYTHONHOME": "/nowhere"}, "ended with status 1")])
def test_a_part_that_hangs_or_dies_leaves_a_line(seconds, variables, reason, tmp_path):
    line = gpu_day.run_part("resume", "bf16", tmp_path, seconds, dict(os.environ) | variables)
    assert (line["result"], line["reason"]) == ("failed", reason)
    assert (tmp_path / gpu_day.LOG).exists()


def test_a_study_of_a_real_model_is_skipped_until_all_parts_of_its_file_are_there(
        tmp_path, monkeypatch):
    """Nothing is started; what the parts hold, one behind the other, is the file."""
    monkeypatch.setattr(gpu_day, "MODEL", tmp_path / ".gpu_model")
    monkeypatch.setattr(gpu_pack, "PART_BYTES", 10)
    monkeypatch.setattr(gpu_day.subprocess, "Popen", None)

    def reason():
        line = gpu_day.run_part("draft", "text alone", tmp_path, 60, {})
        assert line["result"] == "skipped" and not (tmp_path / gpu_day.LINES).exists()
        return line["reason"]

    assert reason() == "no .gpu_model: make gpu-pack MODEL=1 makes it"
    content = bytes(range(25))
    (tmp_path / "file").write_bytes(content)
    assert gpu_pack.split(tmp_path / "file", gpu_day.MODEL) == [9, 9, 7]
    parts = sorted(gpu_day.MODEL.iterdir())
    assert b"".join(path.read_bytes() for path in parts) == content
    assert gpu_day.missing_of_model() == ""
    parts[0].unlink()
    assert reason() == ".gpu_model has no 1of3"
    parts[2].unlink()
    assert reason() == ".gpu_model has no 1of3, 3of3"
    with pytest.raises(TypeError):  # the others begin
        gpu_day.run_part("resume", "bf16", tmp_path, 60, {})


def test_every_outcome_has_its_line(tmp_path, monkeypatch):
    from benchmarks import gpu_studies

    def outcome(place, what):
        if what == "skipped":
            raise gpu.Skipped("needs 2 GPUs, and there are 0")
        if what == "failed":
            raise RuntimeError("CUDA error 700")
        return {"n": 1}

    kinds = {kind: (1, {"what": kind}) for kind in ("failed", "skipped", "done")}
    monkeypatch.setattr(gpu_studies, "outcome", outcome, raising=False)
    monkeypatch.setattr(gpu_day, "STUDIES", {"a": gpu_day.Study("", "outcome", kinds)})
    gpu_day.run_here([("a", kind) for kind in kinds], tmp_path, tiny=True)
    failed, skipped, done = gpu_day.read_lines(tmp_path / gpu_day.LINES)
    assert failed["result"] == "failed" and "outcome" in failed["traceback"]
    assert failed["reason"] == "RuntimeError: CUDA error 700"
    assert skipped["reason"] == "needs 2 GPUs, and there are 0" and "traceback" not in skipped
    assert done["n"] == 1 and done["card"] == "none" and done["torch"] == torch.__version__


def test_what_came_back_is_put_into_the_record(record, tmp_path, capsys):
    """The newest line of a part stays, on each card; a failure replaces no measurement."""
    line = {"study": "step", "part": "default", "card": "A", "torch": "2", "date": "d",
            "commit": "c"}
    lines = [line | {"result": "done", "seconds": 3}, line | {"result": "done", "seconds": 2},
             line | {"result": "failed"}, line | {"card": "B", "result": "done", "seconds": 9},
             line | {"part": "other", "result": "failed"}]
    for each in lines:
        gpu_day.append(tmp_path, each)
    with open(tmp_path / gpu_day.LINES, "a") as file:
        file.write('{"cut')
    for _ in range(2):  # the second time changes nothing
        gpu_day.merge(tmp_path)
        assert [(each["card"], each["result"], each.get("seconds"))
                for each in json.loads(record.read_text())] == [
            ("A", "done", 2), ("B", "done", 9), ("A", "failed", None)]
    assert "| step | default | seconds 2 | A | 2 | d, c |" in capsys.readouterr().out


def test_pages_have_the_figures_of_the_record_alone():
    page = (ROOT / "docs/results.md").read_text()
    assert gpu_day.table(gpu_day.read_record()) in page
    speeds = {round(line["tokens_per_second"] / 1000) for line in gpu_day.read_record()
              if "tokens_per_second" in line}
    said = re.findall(r"(\d+) k\s+tokens\s+a\s+second", (ROOT / "README.md").read_text())
    assert said and speeds >= set(map(int, said))


@pytest.mark.slow
def test_a_day_is_rehearsed_whole(tmp_path):
    """Every study to its end with tiny models, as far as a CPU carries it."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--rehearse", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    results = {}
    for name in gpu_day.STUDIES:
        for line in gpu_day.read_lines(tmp_path / name / gpu_day.LINES):
            results[name, line["part"]] = line
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(results) == sum(len(study.parts) for study in gpu_day.STUDIES.values())
    skipped = {name for (name, _), line in results.items() if line["result"] == "skipped"}
    assert skipped <= {"check", "engine", "liger"}
    assert all(line["worst_difference"] == 0 for (name, _), line in results.items()
               if name == "same")  # both on CPUs here
    assert results["step", "default"]["tokens_per_second"] > 0
    for (name, part), line in results.items():
        if name == "transfer":
            assert all(set(of) == {"0", "1", "2"} and of["0"] != of["2"]
                       for of in line["bits"].values())
            assert ("over_text" in line) == (part != "text alone")
        if name == "draft":
            assert line["before"].keys() == line["after"].keys() and len(line["after"]) == 4
            assert all(0 < each < 1 for each in line["after"].values())


def test_shares_are_of_what_new_tokens_cost_and_a_wide_figure_is_split(tmp_path):
    from benchmarks import gpu_studies

    texts = {"bytes": [10, 20], "agree": [1, 2], "asked": [4, 2]}
    for name, bits in (("as_it_was", [10, 20]), ("before", [20, 40])):
        gpu_studies.save(tmp_path, name, {"stories": texts | {"bits": bits}})
    later = {"stories": texts | {"bits": [15, 20], "agree": [4, 2]}}
    figures = gpu_studies.won_back(tmp_path, {"20": later})
    assert figures == {
        "as_it_was": {"stories": 1.0}, "bits": {"stories": {"0": 2.0, "20": 1.167}},
        "won_back": {"stories": {"0": 0.0, "20": 0.833}},
        "agreement": {"stories": {"0": 0.5, "20": 1.0}}}
    wide = {"study": "transfer", "bits": {domain: {"0": 1.5} for domain in ("pages", "its words")}}
    shown = gpu_day.figures_of(wide | {"other": {"a" * 30: 1, "b" * 30: 2}})
    assert shown == {"bits": '{"pages": {"0": 1.5}, "its words": {"0": 1.5}}',
                     f"other {'a' * 30}": "1", f"other {'b' * 30}": "2"}


def test_shared_memory_is_checked_in_both_directions():
    right, figures = gpu.share_between("cpu", "cpu")
    assert right
    assert figures["bytes"][0] == 4
    assert figures["read"] == figures["written"] == 8 * [True]


@pytest.mark.slow
def test_compiled_divergences_are_compared_with_float64(monkeypatch):
    if missing := missing_compiler():
        pytest.skip(missing)
    monkeypatch.setattr(gpu, "DIVERGENCES", ["generalized_jsd"])
    arguments = dict(rows=2, V=11, device="cpu", dtypes=[torch.float32])
    passed, figures = gpu.compiled(**arguments)
    assert passed
    assert [line["two_runs_equal"] for line in figures.values()] == [True]
    # the comparison sees a wrong gradient
    monkeypatch.setattr(gpu, "loss_compiler", lambda *_: lambda function: lambda *arguments: (
        1.001 * function(*arguments)[0], 0))
    assert not gpu.compiled(**arguments)[0]


@pytest.mark.slow
def test_whole_jobs_are_checked_and_profiled(tmp_path):
    """Of what a GPU shows there is nothing on a CPU, but the jobs run, and their errors arrive."""
    gpu_job.prepare(tmp_path)
    for function, key in ((gpu_job.waits_between_steps, "loss"),
                          (gpu_job.timed_steps, "step_seconds")):
        [figures] = gpu_job.on_ranks(1, function, str(tmp_path))
        assert figures[key] > 0
    with pytest.raises(RuntimeError, match="no_such_folder"):
        gpu_job.on_ranks(1, gpu_job.step_gradients, "no_such_folder")
    flags = [f"--student={tmp_path / 'student'}", f"--teacher={tmp_path / 'teacher'}",
             f"--data={tmp_path / 'corpus.jsonl'}", "--learning_rate=1e-4", "--steps=3",
             "--max_length=64", "--num_workers=0", f"--output_dir={tmp_path / 'run'}"]
    command = [sys.executable, ROOT / "benchmarks" / "step.py", "--step=2", "--", *flags]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in printed.splitlines() if line.startswith("{")]
    figures = json.loads(line)
    assert figures["step"] == 2 and figures["tokens_per_second"] > 0
    assert "aten::mm" in printed and "waits" not in figures


def test_gaps_lie_between_kernels_that_overlap():
    busy, gaps = step.busy_and_gaps([(0, 2), (1, 3), (5, 9), (6, 7), (9, 10)])
    assert (busy, gaps) == (8, [2])


@pytest.mark.slow
def test_what_a_transferred_model_wins_back_is_a_table(models, tokenizers, tmp_path, monkeypatch,
                                                       capsys):
    from benchmarks import transfer

    tokenizers[1].save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(transfer, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(transfer, "HELD_OUT", 4)
    args = transfer.Args(model=models[0], tokenizer=str(tmp_path / "tokenizer"), name="toy",
                         arms="1,2,3", steps=2, jobs=1, shows=False)
    monkeypatch.setattr(transfer, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(transfer, "WRITTEN", 20)
    launches = iter([transfer.demo.launch])  # of the first arm; the others are forked
    monkeypatch.setattr(transfer.demo, "launch",
                        lambda *words: next(launches, launch_forked)(*words))
    for _ in range(2):  # the second time nothing is left to do
        transfer.main(args)
        printed = capsys.readouterr().out
    assert "seed 0" not in printed
    lines = [line.split(" | ") for line in printed.splitlines() if line.startswith("|")]
    assert [line[0].strip("| ") for line in lines[2:]] == [
        "the model as it was", "new tokens, before training", *list(transfer.ARMS)[:3]]
    assert all("%" in cell for line in lines[4:] for cell in line[3:7])


def test_a_trainer_is_compared_and_goes_on(models, tmp_path, monkeypatch, capsys):
    """Chats that end with the user are cut there; what speaks otherwise is no chat."""
    from benchmarks import trainer

    for name, folder in zip((trainer.STUDENT, trainer.TEACHER), models):
        (tmp_path / "models" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "models" / name).symlink_to(folder)
    (tmp_path / "text").mkdir()
    chat = "User: who has the key?\nBot: Tom has it.<|endoftext|>\n"
    path = tmp_path / "text" / "tinytalk_chat_val.txt"
    path.write_text("\n".join([*[chat] * 12, f"{chat}User: and now?\n", "Story: Once\n"]))
    rows = trainer.chats(path)
    assert len(rows) == 13 and {len(row["messages"]) for row in rows} == {2}
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "Tom has it."}
    monkeypatch.setattr(trainer, "RECORDS", tmp_path / "trainer.jsonl")
    monkeypatch.setattr(trainer, "STEPS", 2)
    monkeypatch.setattr(trainer, "HELD_OUT", 4)
    for arms in ("piece_kl:0:1e-3,piece_kl:1:1e-3", "piece_kl:1:1e-3", "uld:1:1e-3"):
        trainer.main(trainer.Args(assets=str(tmp_path), arms=arms, seeds="0,1"))
    lines = trainer.RECORDS.read_text().splitlines()
    assert len(lines) == 6
    table = trainer.table(trainer.kept())
    of_loss = {row[0]: row for row in table[1:]}
    bits = {loss: [one["bits_per_byte"] for one in map(json.loads, lines)
                   if (one["loss"], one["weight"]) == key]
            for loss, key in {"text": ("piece_kl", 0), "uld": ("uld", 1)}.items()}
    ahead = sum(bits["text"]) / 2 - sum(bits["uld"]) / 2
    assert of_loss["uld"][4].startswith(f"{ahead:.4f} ± ") and not of_loss["text"][4]


class FakeTable(list):
    bytes_of = list.__getitem__


def test_shares_agreement_and_intervals_are_by_their_definitions():
    from benchmarks import transfer

    rows = {"x": {"bits": [10.0, 30.0], "bytes": [10, 20], "agree": [1, 2], "asked": [4, 2]}}
    more = {"x": {"bits": [20.0, 40.0], "bytes": [10, 20], "agree": [0, 2], "asked": [4, 2]}}
    assert transfer.per_byte([rows], "x") == pytest.approx(40 / 30)
    assert transfer.per_byte([rows, more], "x") == pytest.approx(50 / 30)
    assert transfer.agreement([rows, more], "x") == pytest.approx(5 / 12)
    assert transfer.agree("2074", "207468") and transfer.agree("2074", "20")
    assert not transfer.agree("2074", "2075")
    # a space that the tokenizer writes in front moves no place
    words = FakeTable([b"", b" a", b"bc", b"d"])
    logits = 50 * torch.eye(4)[[1, 3, 2, 0]]
    bits, size, places = transfer._judged(words, "abcd", torch.tensor([0, 1, 2, 3]), logits)
    assert (size, places) == (4, {1: b"d".hex(), 3: b"bc".hex()})
    assert bits == pytest.approx(100 / math.log(2))
    # of one row alone the gain is 10 / 10 or 10 / 20 bits per byte, of both 20 / 30
    low, high = transfer.interval([more], [rows], "x")
    assert (low, high) == (pytest.approx(0.5), pytest.approx(1.0))
