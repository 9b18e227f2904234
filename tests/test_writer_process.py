"""The student written for by another process: the same rollouts, and no failure without a line."""

import sys
from pathlib import Path

import pytest

import ranks
from isogloss.writer_process import WriterProcess, check_command, prompt_as_plain
from jobs import losses_of, run_distill
from rollout import Prompt
from test_on_policy import (
    base,  # noqa: F401, a fixture
    check_same_curve,
    config_of,
    written_by,
)

STAND_IN = Path(__file__).with_name("stand_in_writer.py")


def command(*words):
    return f"{sys.executable} {STAND_IN} {' '.join(words)}"


def without_entropy(lines):
    """Return metrics lines without what a process does not tell."""
    return [{key: value for key, value in line.items() if "entropy" not in key} for line in lines]


@pytest.mark.slow
def test_another_process_writes_what_the_student_would(base):  # noqa: F811
    """With its weights after every step, also of a partitioned student and for two ranks."""
    folder, argv = base
    argv = [*argv, "--steps=3"]
    own = [*argv, config_of(base, 2, 8, 1), f"--output_dir={folder / 'own'}"]
    assert ranks.run(1, run_distill, [own]) == [[0]]
    for stage, micro_batch_size in ((2, 4), (3, 2)):
        output = folder / f"process{stage}"
        flags = [*argv, config_of(base, stage, micro_batch_size, 2), f"--output_dir={output}",
                 f"--rollout_command={command()}"]
        assert ranks.run(2, run_distill, [flags]) == [[0]] * 2
        check_same_curve(without_entropy(losses_of(folder / "own", -1)),
                         without_entropy(losses_of(output, -1)))
        for key, value in written_by(output).items():
            assert written_by(folder / "own")[key] == value
        lines = [line for line in losses_of(output, 0) if "loss" in line]
        assert all(line["rollout/logp_gap"] < 1e-5 for line in lines)
        assert lines[0]["rollout/entropy"] is None


@pytest.mark.slow
@pytest.mark.parametrize("fault, code", [("stale", 1), ("dies", 1), ("talks", 1)])
def test_a_process_that_fails_ends_the_job_with_a_line(base, capfd, fault, code):  # noqa: F811
    folder, argv = base
    flags = [*argv, config_of(base, 2, 8, 1), "--steps=5", f"--output_dir={folder / fault}",
             f"--rollout_command={command(fault)}", "--max_logp_gap=0.001", "--rollout_eval=0"]
    code_of_job, message = ranks.run(1, run_with_message, flags)[0]
    said = {"stale": "has other weights than the student", "dies": "ended with exit code 7",
            "talks": "wrote 'loading' in place of JSON"}[fault]
    assert code_of_job == code
    lines = [line for line in message.splitlines() if said in line]
    assert lines, message


def run_with_message(flags):
    """Return (exit code, stderr) of a job."""
    import os
    import tempfile

    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            [code] = run_distill([flags])
        except Exception as error:  # what the launcher would print
            code = 1
            print(error, file=sys.stderr)
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        file.seek(0)
        return code, file.read()


def test_a_command_that_does_not_exist():
    with pytest.raises(ValueError, match="no such program"):
        WriterProcess("/no/such/python rollout_vllm.py")


def test_a_command_may_lie_in_a_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    check_command("~/python -m writer")
    with pytest.raises(ValueError, match="no such program"):
        check_command("~/no_python -m writer")


def test_too_many_tokens_are_refused(tmp_path):
    """An engine that overruns the limit, or forgets the probabilities."""
    script = tmp_path / "engine.py"
    script.write_text("import sys\nfor line in sys.stdin:\n    print('{\"completions\": "
                      "[{\"ids\": [1, 2, 3], \"logp\": [0, 0, 0], \"ended\": false}]}', "
                      "flush=True)\n")
    process = WriterProcess(f"{sys.executable} {script}")
    with pytest.raises(RuntimeError, match="3 tokens with 3 log-probabilities, expected at most 2"):
        process.write([prompt_as_plain(Prompt([1], (0,), 2))], [], 5, 1.0, 1.0)
    process.close()
    assert process.process.poll() is not None
