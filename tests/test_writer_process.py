"""The student written for by another process: the same rollouts, and no failure without a line."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
from isogloss.config import Config
from isogloss.data.batch_types import Batch
from isogloss.data.rollouts import HELD_OUT
from isogloss.errors import EngineError, EngineStopped
from isogloss.job.launch import start_distributed
from isogloss.job.several.launchers import _parent_and_session
from isogloss.job.several.others import is_running
from isogloss.job.watch import StopSignals
from isogloss.rollout import Prompt
from isogloss.writing import on_policy
from isogloss.writing.node_writer import NodeWriter
from isogloss.writing.writer_process import WriterProcess, check_command, prompt_as_plain
from jobs import losses_of, run_all, run_distill
from launched import run_with_trouble, wait_until
from stand_in_engine import fork_for_all
from test_on_policy import (
    base,  # noqa: F401, a fixture
    check_same_rollouts_curve,
    config_of,
    records_of,
    written_by,
)

STAND_IN = Path(__file__).with_name("stand_in_writer.py")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A function of words -> --writer, whose process is the fork of one that has imported."""
    address = tmp_path_factory.mktemp("stand_ins") / "socket"
    group = ranks.start(1, fork_for_all, str(address))
    wait_until(address.exists)
    yield lambda *words: f"{sys.executable} {STAND_IN} --as={address} {' '.join(words)}"
    ranks.kill(group)


def without_entropy(lines):
    """Return metrics lines without what a process does not tell."""
    return [{key: value for key, value in line.items() if "entropy" not in key} for line in lines]


@pytest.mark.slow
def test_another_process_writes_what_the_student_would(base, command):  # noqa: F811
    """With its weights after every step, of a partitioned student and for two ranks."""
    folder, argv = base
    argv = [*argv, "--steps=3"]
    own = [*argv, config_of(base, 2, 8, 1), f"--output_dir={folder / 'own'}"]
    run_all(1, own)
    output = folder / "process"
    flags = [*argv, config_of(base, 3, 2, 2), f"--output_dir={output}",
             f"--writer={command()}", "--staleness=0"]
    run_all(2, flags)
    check_same_rollouts_curve(without_entropy(losses_of(folder / "own", -1)),
                              without_entropy(losses_of(output, -1)))
    rollouts = written_by(folder / "own")
    for key, value in written_by(output).items():
        assert rollouts[key] == value
    lines = [line for line in losses_of(output, 0) if "loss" in line]
    assert all(line["rollout/logp_gap"] < 1e-5 for line in lines)
    assert lines[0]["rollout/entropy"] is None


def notice_small_gaps(rank):
    """Let this process, a rank, end for weights that a step has hardly changed."""
    Config.max_logp_gap = 0.001


@pytest.mark.slow
@pytest.mark.parametrize("fault, line", [
    ("stale", "has other weights than the student"), ("dies", "ended with exit code 7")])
def test_a_process_that_fails_ends_the_job_with_a_line(base, command, fault, line):  # noqa: F811
    folder, argv = base
    flags = [*argv, config_of(base, 2, 8, 1), "--steps=5", f"--output_dir={folder / fault}",
             f"--writer={command(fault)}", "--rollout_eval=0"]
    [ended] = run_with_trouble(1, flags, folder / f"output of {fault}", notice_small_gaps)
    assert ended.code == 1 and line in ended.stderr, ended


def ended_by_another_threads_signal():
    """Wait for a writer that hangs, while a signal comes to the thread that asks it."""
    start_distributed()
    signals = StopSignals()

    def ask():
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not signals.received:
            if time.monotonic() > deadline:
                return {}, 0.0
            time.sleep(0.01)
        raise EngineStopped

    writer = NodeWriter.__new__(NodeWriter)
    writer.process = True
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # it starts before the main thread takes no signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        writer.asked = thread.submit(ask)
        with pytest.raises(EngineStopped):
            writer.finish()


def test_a_signal_that_comes_to_another_thread_ends_the_wait():
    ranks.run(1, ended_by_another_threads_signal)


@pytest.mark.slow
def test_a_signal_while_a_writer_hangs_saves_the_steps_so_far(base, command):  # noqa: F811
    """The first request is a check; the fourth is that of step 3.  Then the same job goes on.

    Its curve is that of a student that writes by itself.
    """
    folder, argv = base
    argv = [*argv, config_of(base, 2, 8, 1), "--steps=4", "--rollout_eval=0", "--staleness=0"]
    stopped = [*argv, f"--output_dir={folder / 'stopped'}"]
    straight = [*argv, f"--output_dir={folder / 'straight'}"]
    [codes] = ranks.run(1, run_distill, [
        [*stopped, f"--writer={command('stops')}"],
        [*stopped, f"--writer={command()}"], straight])
    assert codes == [128 + signal.SIGTERM, 0, 0]
    assert (folder / "stopped" / "checkpoints" / "step_0000002").is_dir()
    check_same_rollouts_curve(without_entropy(losses_of(folder / "straight", -1)),
                              without_entropy(losses_of(folder / "stopped", -1)))


@pytest.mark.slow
def test_a_process_writes_while_the_student_trains(base, command):  # noqa: F811
    """With the weights of one step before, which it had when it was asked.

    A job that is asked to end keeps what is being written, and goes on as if it had not been.
    """
    folder, argv = base
    argv = [*argv, config_of(base, 2, 8, 1), "--rollout_eval=0", "--num_workers=1"]
    ahead = [*argv, "--steps=4", f"--writer={command()}",
             f"--output_dir={folder / 'ahead'}"]
    ended = [*argv, "--steps=4", f"--output_dir={folder / 'ended'}"]
    config = json.loads((folder / "zero2-8-1.json").read_text())
    config["optimizer"]["params"]["lr"] = 0.0
    (folder / "still.json").write_text(json.dumps(config))
    still = [*argv, "--steps=2", f"--output_dir={folder / 'still'}",
             f"--ds_config={folder / 'still.json'}"]
    [codes] = ranks.run(1, run_distill, [
        ahead, [*ended, f"--writer={command('asks')}"],
        [*ended, f"--writer={command()}"], still])
    assert codes == [0, 128 + signal.SIGTERM, 0, 0]
    lines = losses_of(folder / "ahead", -1)
    steps = [line for line in lines if "loss" in line]
    assert [line["rollout/staleness"] for line in steps] == [0, 1, 0, 1]
    assert all(line["rollout/ratio"] != 1 for line in steps[1::2])
    assert all(0 < line["rollout/effective_share"] < 1 for line in steps[1::2])
    assert all(line["rollout/logp_gap"] < 1e-5 for line in steps[::2])
    check_same_rollouts_curve(lines, losses_of(folder / "ended", -1))
    assert written_by(folder / "ended") == written_by(folder / "ahead")
    # in step 2 it writes what a student says that has learned nothing
    of_ahead, of_still = (written_by(folder / name) for name in ("ahead", "still"))
    assert [key for key in of_still if key[0] == 2]
    for key, written in of_still.items():
        assert of_ahead[key] == written


@pytest.mark.slow
def test_what_an_evaluation_waits_for_in_vain_a_resumed_run_does(base, command):  # noqa: F811
    """Of five requests the first is a check, the second of step 0, the fifth evaluates step 2."""
    folder, argv = base
    argv = [*argv, config_of(base, 2, 8, 1), "--steps=4", "--staleness=0", "--eval_every=2",
            "--rollout_eval=4", f"--writer={command()}"]
    faults = {"stops5": 128 + signal.SIGTERM, "dies5": 1}
    runs = [[*argv, f"--output_dir={folder / 'no fault'}"]]
    for fault in faults:
        ended = [*argv, f"--output_dir={folder / fault}"]
        runs += [*ended, f"--writer={command(fault)}"], ended
    [codes] = ranks.run(1, run_distill, runs)
    assert codes == [0, faults["stops5"], 0, faults["dies5"], 0]
    lines = losses_of(folder / "no fault", -1)
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4]
    for fault in faults:
        assert losses_of(folder / fault, -1) == lines
        assert records_of(folder / fault) == records_of(folder / "no fault")


def run_and_see_ends(argv_list):
    """Return the exit codes of jobs, and of their writers: not 0 where one had to be killed."""
    ends = []
    close = WriterProcess.close

    def close_and_see(process, **options):
        close(process, **options)
        ends.append(process.process.returncode)

    WriterProcess.close = close_and_see
    return run_distill(argv_list), ends


@pytest.mark.slow
def test_more_steps_than_the_run_had_go_on_as_if_it_had_had_them(base, command):  # noqa: F811
    """Though the texts of the first one of them are written while the last one before trains."""
    folder, argv = base
    argv = [*argv, config_of(base, 2, 8, 1), "--eval_rows=0", f"--writer={command()}",
            "--num_workers=1"]
    argv.remove("--eval_rows=6")
    longer = [*argv, f"--output_dir={folder / 'longer'}"]
    [(codes, ends)] = ranks.run(1, run_and_see_ends, [
        [*longer, "--steps=3"], [*longer, "--steps=5"],
        [*argv, f"--output_dir={folder / 'straight on'}", "--steps=5"]])
    assert codes == ends == [0, 0, 0]
    lines = losses_of(folder / "straight on", -1)
    assert [line["rollout/staleness"] for line in lines] == [0, 1, 0, 1, 1]
    assert losses_of(folder / "longer", -1) == lines


def test_a_command_may_lie_in_a_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    check_command("~/python -m writer")
    with pytest.raises(ValueError, match="no such program"):
        check_command("~/no_python -m writer")


def test_what_rollouts_took_is_that_of_their_own():
    """Others, of an evaluation, may be written between them and their step."""
    node = NodeWriter.__new__(NodeWriter)

    def answer(*_, **__):
        node.seconds = node.next_seconds

    node._share_weights, node._submit, node.finish = (lambda: None), (lambda *_, **__: None), answer
    episodes = SimpleNamespace(begin=lambda prompts, starts: starts, compare=lambda *_: None)

    def run(first, more):
        more([])  # another turn
        episodes.failed = node.next_failed
        return []

    episodes.run = run
    cfg = SimpleNamespace(rollout_every=2, seed=0)
    collator = lambda *_: Batch(None, [], None, [])  # noqa: E731
    writer = on_policy.Writer(cfg, None, None, collator, None, None, torch.device("cpu"),
                              elsewhere=node, episodes=episodes)
    draft = SimpleNamespace(examples=[], sample_ids=[], skipped_prompts=0)
    node.next_seconds, node.next_failed = 3.0, 2
    writer.begin([draft])
    writer.finish()
    node.next_seconds, node.next_failed = 5.0, 9
    writer.rollouts([], HELD_OUT)
    efforts = [writer.complete([draft], step)[0].effort for step in (3, 4, 5)]
    assert [effort.writer_seconds for effort in efforts] == [6.0, 6.0, 10.0]  # of two turns each
    assert [effort.failed for effort in efforts] == [2, 0, 9]
    assert all(effort.seconds > 0 for effort in efforts)


# --- one engine by itself -------------------------------------------------------------------------

PLAYER = """\
import sys
for line, answer in zip(sys.stdin, open(sys.argv[1])):
    sys.stdout.write(answer.replace("<newline>", "\\n"))
    sys.stdout.flush()
"""
GOOD = {"ids": [1, 4], "logp": [-0.5, 0], "ended": True}
PROMPT = prompt_as_plain(Prompt([1], (0,), 3))


def engine(folder, script, *words, timeout=60):
    path = folder / "engine.py"
    path.write_text(script)
    return WriterProcess(" ".join([sys.executable, "-S", str(path), *map(str, words)]), timeout)


def asked(process):
    return process.write([PROMPT], [4], 5, 1.0, 1.0)


def with_one(**fields):
    return json.dumps({"completions": [GOOD | fields]})


def without(name):
    return json.dumps({"completions": [{key: GOOD[key] for key in GOOD if key != name}]})


WRONG = [  # what an engine answers to one prompt of at most 3 tokens below 5, of which 4 stops
    ("null", "expected an object"), ("[]", "expected an object"), ("loading", "in place of JSON"),
    ("", "in place of JSON"), ("[" * 50_000, "in place of JSON"), ("1" * 5000, "in place of JSON"),
    ("{}", "expected a list of 1"), ('{"completions": {"0": 1}}', "expected a list of 1"),
    (json.dumps({"completions": [GOOD, GOOD]}), "expected a list of 1"),
    ('{"completions": [null]}', "expected lists ids and logp"),
    *[(without(name), "expected lists ids and logp") for name in GOOD],
    (with_one(ids="14"), "expected lists"), (with_one(logp={"0": 0, "1": 0}), "expected lists"),
    (with_one(ended=1), "expected lists"),
    (with_one(ids=[], logp=[], ended=False), "0 tokens with 0 log-probabilities, expected 1 to 3"),
    (with_one(ids=[1, 2, 3, 4], logp=[0] * 4), "4 tokens with 4 log-probabilities"),
    (with_one(logp=[0]), "2 tokens with 1 log-probabilities"),
    (with_one(ids=[5, 4]), "token '5'; expected integers from 0 to 4"),
    (with_one(ids=[-1, 4]), "token '-1'"), (with_one(ids=[True, 4]), "token 'true'"),
    (with_one(ids=["1", 4]), "token '1'"),
    (with_one(logp=[0.1, 0]), "log-probability '0.1'; expected numbers of at most 0"),
    (with_one(logp=[float("nan"), 0]), "log-probability 'NaN'"),
    (with_one(logp=[float("-inf"), 0]), "log-probability '-Infinity'"),
    (with_one(logp=[None, 0]), "log-probability 'null'"),
    (with_one(logp=[-(10**400), 0]), "log-probability '-1000"),
    (with_one(logp=[False, 0]), "log-probability 'false'"),
    (with_one(ended=False), "2 tokens with stop tokens at [1] and ended False"),
    (with_one(ids=[4, 1]), "2 tokens with stop tokens at [0] and ended True"),
    (with_one(temperature=0.7), "at temperature '0.7'; expected those of the draws, whose "
     "temperature is 1.0"), (with_one(top_p=0.9), "at top_p '0.9'; expected"),
    (with_one(temperature=None), "at temperature 'null'; expected"),
    ('{"error": {"code": 7}}', """answered '{"error": {"code": 7}}'"""),
    ('{"error": "no memory"}', "no memory"),
    (" " * 300_000 + "{}", "expected one line of at most"),
    (with_one() + "<newline>" + with_one(), "in place of JSON of one line"),
]


def test_what_fits_no_prompt_is_refused_at_the_door(tmp_path):
    """Each in one line; what fits is taken as it is, and after what does not, too."""
    answers = tmp_path / "answers"
    answers.write_text("".join(f"{with_one()}\n{answer}\n" for answer, _ in WRONG))
    process = engine(tmp_path, PLAYER, answers)
    for answer, expected in WRONG:
        assert asked(process) == [GOOD]
        with pytest.raises(EngineError) as caught:
            asked(process)
        message = str(caught.value)
        assert message.startswith(f"--writer {process.command}: "), (answer[:80], message)
        assert expected in message and "\n" not in message, (answer[:80], message)
        assert len(message) < 700
        if answer.startswith(" "):  # what is left of it has to be read
            process.close(is_busy=True)
            answers.write_text("".join(f"{with_one()}\n{each}\n" for each, _ in WRONG[-1:]))
            process = engine(tmp_path, PLAYER, answers)
    process.close()
    answers.write_text('{"done": 1}\n{"done": false}\n{"done": null}\n{}\n{"done": 0}\n')
    process = engine(tmp_path, PLAYER, answers)
    for _ in range(4):
        with pytest.raises(EngineError, match=r"took over .* of 0 weights"):
            process.refresh()
    process.refresh()
    with pytest.raises(EngineError, match="ended with exit code 0"):
        process.refresh()
    process.close()
    assert process.process.poll() == 0


def test_log_probabilities_of_no_temperature_are_those_of_1(tmp_path):
    """As older engines answer, whose numbers are not those of draws at another temperature."""
    answers = tmp_path / "answers"
    answers.write_text("".join(with_one(**fields) + "\n" for fields in (
        {}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7})))
    process = engine(tmp_path, PLAYER, answers)
    with pytest.raises(EngineError, match=r"at temperature '1.0'; .* temperature is 0.7, and"):
        process.write([PROMPT], [4], 5, 0.7, 0.9)
    process.write([PROMPT], [4], 5, 0.7, 0.9)
    with pytest.raises(EngineError, match=r"at top_p '1.0'; expected .* top_p is 0.9, and"):
        process.write([PROMPT], [4], 5, 0.7, 0.9)
    process.close()


MUTE = """\
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(sys.argv[1] + "+", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + "+", sys.argv[1])
time.sleep(1000)
"""


def processes_in(path):
    """Wait until an engine has written its process id and its child's, and return them."""
    wait_until(path.exists)
    return list(map(int, path.read_text().split()))


def wait_for_end(processes):
    wait_until(lambda: not any(map(is_running, processes)))


def test_an_engine_that_does_not_answer_holds_nobody(tmp_path):
    """Not one that reads nothing of a long message, either; closed, it is gone with its child."""
    process = engine(tmp_path, MUTE, tmp_path / "processes", timeout=0.3)
    with pytest.raises(EngineError, match=r"not answered for 0\.3 seconds; its output"):
        process.refresh()
    with pytest.raises(EngineError, match=r"not answered for 0.3 seconds"):
        process.write([prompt_as_plain(Prompt([1] * 200_000, (0,), 2))], [], 5, 1.0, 1.0)
    process.timeout = 1000
    signals = []
    before = signal.signal(signal.SIGALRM, lambda *_: signals.append(1))
    process.asked_to_end = lambda: bool(signals)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(EngineStopped):
        process.refresh()
    signal.signal(signal.SIGALRM, before)
    processes = processes_in(tmp_path / "processes")
    process.close()
    wait_for_end(processes)


def test_an_engine_ends_with_a_rank_that_is_killed(tmp_path):
    """While it loads, with a child that has made a session of its own."""
    rank = os.fork()
    if not rank:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        engine(tmp_path, MUTE, tmp_path / "processes")
        signal.pause()
    processes = processes_in(tmp_path / "processes")
    assert all(map(is_running, processes))
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    wait_for_end(processes)


def test_signals_of_each_thread_of_a_killed_rank_leave_nothing(tmp_path):
    """The kernel sends one for each: one that comes while the first is handled ends nothing."""
    for number in range(9):
        process = engine(tmp_path, MUTE, tmp_path / f"processes{number}")
        processes = processes_in(tmp_path / f"processes{number}")
        for _ in range(2000):
            process.process.send_signal(signal.SIGTERM)
        assert process.process.wait() == 128 + signal.SIGTERM
        wait_for_end(processes)
        assert not Path(process.folder).exists()
        process.close()


def test_an_engine_that_ends_leaves_no_child(tmp_path):
    """And closing it leaves no file."""
    process = engine(tmp_path, MUTE.replace("time.sleep(1000)", "sys.exit(7)"),
                     tmp_path / "processes")
    with pytest.raises(EngineError, match="ended with exit code 7"):
        process.refresh()
    wait_for_end(processes_in(tmp_path / "processes"))
    process.close()
    assert not Path(process.folder).exists()


def test_a_process_whose_name_is_no_text_disturbs_nobody(tmp_path):
    """The kernel cuts a name after 15 bytes, within a character too."""
    name = os.fsencode(tmp_path / "caf") + b"\xc3"
    os.symlink("/bin/sleep", name)
    stranger = subprocess.Popen([name, "1000"])
    try:
        wait_until(lambda: b"caf" in Path(f"/proc/{stranger.pid}/stat").read_bytes())
        assert is_running(stranger.pid)
        assert _parent_and_session(stranger.pid)[0] == os.getpid()
        test_an_engine_that_ends_leaves_no_child(tmp_path)
    finally:
        stranger.kill()
        stranger.wait()
