"""A teacher by an engine beside the job: the numbers of the rank, and a line for each fault.

vLLM itself is asked in test_vllm.py; here transformers answers in its place.
"""

import json
import shutil
import sys

import pytest
import torch

import ranks
from isogloss.errors import EngineError
from isogloss.teachers.engines import vllm
from isogloss.teachers.engines.vllm import TeacherProcess, texts_of
from jobs import losses_of, run_all, run_and_listen, short_run, write_corpus
from launched import run_with_trouble
from test_cached_teachers import write as write_cache
from test_writer_process import PLAYER, command  # noqa: F401, a fixture

LOADED = '{"width": 2, "dtype": "float32"}'
READ = [[3, 4], [5]], [0, 2], 4
WRONG_LOADS = [
    ("null", "expected an object"), ("{}", "expected the width 2"),
    ('{"width": 2}', "expected the width 2"),
    ('{"width": "2", "dtype": "float32"}', "expected the width 2"),
    ('{"width": 0, "dtype": "float32"}', "expected the width 2"),
    ('{"width": -1, "dtype": "float32"}', "expected the width 2"),
    ('{"width": 2, "dtype": "int8"}', "expected the width 2"),
    ('{"width": 2, "dtype": ["float32"]}', "expected the width 2"),
    ('{"width": 3, "dtype": "float32"}', "expected the width 2"),
    ("loading", "in place of JSON"), ("", "in place of JSON"), ("[" * 50_000, "in place of JSON"),
    ('{"error": "no memory"}', "no memory"), ('{"error": {"code": 7}}', "code"),
    (" " * 300_000 + "{}", "expected one line of at most"),
    (f"{LOADED}<newline>{LOADED}", "in place of JSON of one line"),
]
WRONG_READS = [
    ("[]", "expected an object"), ("{}", "expected 3 rows done"),
    ('{"done": 2}', "expected 3 rows done"), ('{"done": 4}', "expected 3 rows done"),
    ('{"done": "3"}', "expected 3 rows done"), ('{"done": null}', "expected 3 rows done"),
    ('{"done": [3]}', "expected 3 rows done"), ('{"done": NaN}', "expected 3 rows done"),
    ('{"done": 3}', "left rows as they were"), ("Traceback", "in place of JSON"),
    ('{"error": "CUDA out of memory"}', "CUDA out of memory"),
    (" " * 300_000 + "{}", "expected one line of at most"),
]


class Spec:
    path = "T"
    max_length = 8
    same_ids = False
    trust_remote_code = False


@pytest.fixture
def player(tmp_path, monkeypatch):
    """A function of answers -> TeacherProcess whose engine gives them, one after the other."""
    monkeypatch.setattr(vllm, "dtype_name", lambda spec: "float32")
    processes = []

    def start(*answers):
        (tmp_path / "engine.py").write_text(PLAYER)
        path = tmp_path / f"answers{len(processes)}"
        path.write_text("".join(f"{line}\n" for line in answers))
        words = [sys.executable, "-S", str(tmp_path / "engine.py"), str(path)]
        processes.append(TeacherProcess("--teacher_engine", " ".join(words), timeout=60))
        return processes[-1]

    yield start
    for process in processes:
        process.close(is_busy=True)


def check_line(caught, process, expected):
    message = str(caught.value)
    assert message.startswith(f"--teacher_engine {process.command}: ")
    assert expected in message and "\n" not in message and len(message) < 700, message


@pytest.mark.parametrize("answer, expected", WRONG_LOADS, ids=range(len(WRONG_LOADS)))
def test_what_is_no_model_is_refused(player, answer, expected):
    process = player(answer)
    with pytest.raises(EngineError) as caught:
        process.load(Spec, 1, 2)
    check_line(caught, process, expected)


@pytest.mark.parametrize("answer, expected", WRONG_READS, ids=range(len(WRONG_READS)))
def test_what_are_no_hidden_states_are_refused(player, answer, expected):
    process = player(LOADED, answer)
    process.load(Spec, 1, 2)
    with pytest.raises(EngineError) as caught:
        process.read(*READ)
    check_line(caught, process, expected)


def test_an_engine_that_ends_between_two_answers_has_ended(player):
    process = player(LOADED)
    process.load(Spec, 1, 2)
    with pytest.raises(EngineError, match="ended with exit code 0"):
        process.read(*READ)


def test_texts_are_the_documents_of_the_rows():
    ids = torch.tensor([[5, 6, 7, 8, 9, 1]])
    assert texts_of([ids], 100) == ([[5, 6, 7, 8, 9, 1]], [0])
    # two documents, and padding whose positions go on behind the longest text
    packed = torch.stack([ids, torch.tensor([[0, 1, 0, 1, 2, 3]])])
    assert texts_of([packed], 3) == ([[5, 6], [7, 8, 9]], [0, 2])
    # the rows of a second member stand behind all of the first one's
    assert texts_of([packed, ids[:, :2]], 100) == ([[5, 6], [7, 8, 9, 1], [5, 6]], [0, 2, 6])


def by_engine(command, folder, *words):  # noqa: F811
    return [f"--teacher_engine={command('teacher', *words)}", f"--output_dir={folder}"]


def check_same(lines, others, rel):
    steps = [line for line in lines if "kd" in line]
    assert len(steps) >= 2
    for line, other in zip(steps, [line for line in others if "kd" in line], strict=True):
        for key in ("kd", "loss", "grad_norm"):
            assert other[key] == pytest.approx(line[key], rel=rel), key


LAYOUTS = {  # ranks, those of the student, flags of both, flags by an engine
    "one rank": (1, 1, ["--eval_rows=4"], []),
    "two readers of one copy, packed": (2, 2, ["--pack"], ["--teacher_tp=2"]),
    "a rank of its own": (2, 1, [], ["--teacher_ranks=1"]),
    "sequence shards": (2, 2, ["--sequence_parallel=2"], ["--teacher_tp=2"]),
    "its own logits": (1, 1, ["--tiled=false"], []),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_engine_gives_the_numbers_of_the_rank(models, texts, tmp_path, command, name):  # noqa: F811
    num_ranks, num_plain, flags, by_others = LAYOUTS[name]
    flags = short_run(models, texts, tmp_path, "--steps=2", *flags)
    run_all(num_plain, [*flags, f"--output_dir={tmp_path / 'plain'}"])
    run_all(num_ranks, [*flags, *by_others, *by_engine(command, tmp_path / "engine")])
    check_same(losses_of(tmp_path / "plain", -1), losses_of(tmp_path / "engine", -1), 1e-4)


def test_quantized_weights_are_the_engines_matter(models, texts, tmp_path, command):  # noqa: F811
    """Here they are no longer: the same numbers follow, and a line says what was not compared."""
    quantized = tmp_path / "quantized"
    shutil.copytree(models[1], quantized)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps(config))
    flags = short_run(models, texts, tmp_path, "--steps=2")
    run_all(1, [*flags, f"--output_dir={tmp_path / 'plain'}"],
            [*flags, f"--teacher={quantized}", *by_engine(command, tmp_path / "engine")])
    check_same(losses_of(tmp_path / "plain", -1), losses_of(tmp_path / "engine", -1), 1e-6)


def test_a_cache_by_an_engine_holds_what_the_model_says(models, texts, tmp_path, command):  # noqa: F811
    argv = [f"--teacher={models[1]}", f"--data={write_corpus(tmp_path, texts, 6)}",
            "--teacher_max_length=60"]
    folders = tmp_path / "plain", tmp_path / "engine"
    options = [[], by_engine(command, "")[:1]]
    ranks.run(1, write_cache, [[*argv, f"--output={folder}", *more]
                               for folder, more in zip(folders, options)])
    for name in ("shard-00000.safetensors", "index.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_a_run_by_an_engine_that_dies_goes_on_bit_for_bit(models, texts, tmp_path, command):  # noqa: F811
    """Of its requests three are checks: the sixth is that of step 3."""
    flags = short_run(models, texts, tmp_path, "--steps=4")
    died = tmp_path / "died"
    [ended] = run_with_trouble(1, [*flags, *by_engine(command, died, "dies6")],
                               tmp_path / "output")
    assert ended.code == 1 and "ended with exit code 7" in ended.stderr, ended
    assert (died / "checkpoints" / "step_0000002").is_dir()
    run_all(1, [*flags, *by_engine(command, died)],
            [*flags, *by_engine(command, tmp_path / "straight")])
    straight = losses_of(tmp_path / "straight", -1)
    assert losses_of(died, -1) == straight


def test_an_engine_that_dies_beside_its_rank_ends_the_job(models, texts, tmp_path, command):  # noqa: F811
    """With a line, at the same step, where its ranks are its own."""
    flags = short_run(models, texts, tmp_path, "--steps=4", "--teacher_ranks=1",
                      *by_engine(command, tmp_path / "run", "dies6"))
    ended = run_with_trouble(2, flags, tmp_path / "output")
    assert all(rank.code for rank in ended), ended
    assert any("ended with exit code 7" in rank.stderr for rank in ended), ended
    assert not any("Traceback" in rank.stderr for rank in ended), ended


@pytest.mark.parametrize("fault, line, code", [
    ("other", "its logits differ from transformers' by", 2),
    ("dies1", "ended with exit code 7", 2), ("dies2", "ended with exit code 7", 2),
])
def test_an_engine_that_fails_before_the_first_step(models, texts, tmp_path, command, fault, line,  # noqa: F811
                                                    code):
    flags = short_run(models, texts, tmp_path, "--steps=2")
    [ended] = run_with_trouble(1, [*flags, *by_engine(command, tmp_path / "run", fault)],
                               tmp_path / "output")
    assert ended.code == code and line in ended.stderr, ended


@pytest.mark.parametrize("flags, line", [
    (["--teacher_engine=tensorparallel"], "no engine and no program of this name"),
    (["--teacher_engine=vllm"], "there is no vllm here"),
    ([f"--teacher_engine={sys.executable}", "--teacher_offload"], "whose memory is its own"),
    ([f"--teacher_engine={sys.executable}", "--teacher_compile=true"], "compiles its layers"),
])
def test_flags_that_do_not_go_with_an_engine(models, texts, tmp_path, flags, line):
    argv = short_run(models, texts, tmp_path, "--steps=2", *flags)
    [(codes, said)] = ranks.run(1, run_and_listen, argv)
    assert codes == [2] and line in said
