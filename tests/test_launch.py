"""Ranks start and end together: failures, deaths, signals, lost launchers; nothing is unpickled."""

import ast
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import ranks
from conftest import ROOT
from isogloss.job import watch
from jobs import ds_config, losses_of, run_all, short_run, write_corpus
from launched import PATIENCE, Job, die_after, our_command, run_with_trouble, wait_until


@pytest.fixture(scope="module")
def small_run(models, texts, tmp_path_factory):
    """Return a function: (folder, further flags) -> command line of a run on short texts."""
    flags = short_run(models, texts, tmp_path_factory.mktemp("launch"))
    return lambda output, *more: [*flags, f"--output_dir={output}", *more]


# --- one rank fails -------------------------------------------------------------------------------


def fail(error, *_, **__):
    """Raise the error; None: end as the kernel ends a process when memory runs out."""
    if error is None:
        os.kill(os.getpid(), signal.SIGKILL)
    raise error


def failing_at(place, failing, error, rank):
    """Let one rank fail where it calls a function "module.name"; see `fail`."""
    from isogloss.job.several import peers

    peers.REFUSAL_GRACE = 1.0
    module, _, name = place.rpartition(".")
    if rank == failing:
        setattr(import_module(module), name, partial(fail, error))


NO_MEMORY = MemoryError("2 TB of it")


@pytest.mark.slow
@pytest.mark.parametrize("place, failing, error, flag, code, line", [
    # the others wait for it in a collective
    ("isogloss.build.load_student", 1, NO_MEMORY, "--seed=0", 1,
     "rank 1 failed (MemoryError: 2 TB of it), so the job"),
    # the others wait for it in the store, which it serves
    ("isogloss.distill.check_inputs", 0, KeyError("nothing"), "--seed=0", 1, None),
    ("isogloss.teachers.remote.load_teacher", 1, NO_MEMORY, "--teacher_ranks=1", 1,
     "teacher rank 0 failed (MemoryError: "),
    # the others wait in a collective of the same block, where they cannot hear of it
    ("isogloss.build.load_student", 1, ValueError("this model is wrong"), "--seed=0", 2,
     "this model is wrong\n"),
])
def test_what_fails_on_one_rank_ends_all(
        small_run, tmp_path, place, failing, error, flag, code, line):
    """With a traceback where it failed, but for wrong input, and one line elsewhere."""
    argv = small_run(tmp_path / "run", "--steps=2", flag)
    ended = run_with_trouble(2, argv, tmp_path, partial(failing_at, place, failing, error))
    assert [rank.code for rank in ended] == [code] * 2, ended
    is_wrong_input = code == 2
    assert ("Traceback" in ended[failing].stderr) != is_wrong_input, ended
    other = ended[1 - failing].stderr
    if line:
        assert other.startswith(f"distill.py: {line}") and other.count("\n") == 1, other
    else:  # torch notes that the store's process is gone
        assert "distill.py" not in other and "Traceback" not in other, other


@pytest.mark.slow
@pytest.mark.parametrize("place, victim", [
    # the others wait in the store, which rank 0 serves
    ("isogloss.distill.check_inputs", 0), ("isogloss.distill.check_inputs", 1),
    # the others wait for its connection
    ("isogloss.job.launch._join_process_group", 1),
])
def test_a_rank_killed_before_the_first_step_is_noticed(small_run, tmp_path, place, victim):
    """Without a launcher that would end the others."""
    argv = small_run(tmp_path / "run", "--steps=2")
    ended = run_with_trouble(2, argv, tmp_path, partial(failing_at, place, victim, None))
    assert ended[victim].code == -signal.SIGKILL and ended[1 - victim].code == 1, ended
    message = ended[1 - victim].stderr
    lines = [line for line in message.splitlines() if "distill.py" in line]
    assert len(lines) == 1, message  # torch may add what it has seen of the store
    assert lines[0].startswith(f"distill.py: rank {victim} (process "), message
    assert lines[0].endswith(") ended before the first step, so the job ends"), message


def hangs_in_step_2(rank):
    """Rank 1 waits for nothing in mid-step; it would answer no collective for hours."""
    from isogloss import distill
    from isogloss.job import rendezvous

    rendezvous.TRAINING_TIMEOUT = rendezvous.timedelta(seconds=5)
    train_step = distill.train_step
    steps = itertools.count(1)

    def step(*args):
        if next(steps) == 2 and rank == 1:
            signal.pause()
        return train_step(*args)

    distill.train_step = step


@pytest.mark.slow
def test_a_rank_that_hangs_in_training_does_not_hold_the_others_for_hours(small_run, tmp_path):
    ended = run_with_trouble(2, small_run(tmp_path / "run", "--steps=9"), tmp_path,
                             hangs_in_step_2)
    assert [rank.code for rank in ended] == [1, 1], ended
    assert "Timed out waiting 5000ms" in ended[0].stderr, ended
    assert losses_of(tmp_path / "run")[-1]["step"] == 1


MID_STEP = (" ended in mid-step, so the job ends; with --resume auto, the default, the same "
            "command goes on from its last checkpoint")


def killed_in_step_2(rank):
    from isogloss import distill

    steps = itertools.count(1)
    if rank == 1:
        die_after(distill, "train_step", lambda *_: next(steps) == 2)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_training_is_named(small_run, tmp_path):
    """One that does not serve the store; the other dies below."""
    ended = run_with_trouble(2, small_run(tmp_path / "run", "--steps=9"), tmp_path,
                             killed_in_step_2)
    assert [rank.code for rank in ended] == [1, -signal.SIGKILL], ended
    line = [line for line in ended[0].stderr.splitlines() if " steps [" not in line][-1]
    assert line.startswith("distill.py: rank 1 (process ") and line.endswith(f"){MID_STEP}"), ended


def port_is_taken(_):
    """Another job listens where the ranks of this one are to meet."""
    listener = socket.create_server(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
    listener.detach()


def test_a_port_that_is_taken_ends_with_one_line(small_run, tmp_path):
    argv = small_run(tmp_path / "run", "--steps=1")
    [ended] = run_with_trouble(1, argv, tmp_path, port_is_taken)
    assert ended.code == 2 and ended.stderr.count("\n") == 1, ended
    assert "where the ranks meet: Address already in use" in ended.stderr


# {variables: what the line says}
WRONG_LAUNCHERS = {
    "RANK=x": "RANK is 'x'; expected a number, 0 or more", "RANK=-1": "RANK is '-1'; expected",
    "RANK=\u0663": "RANK is '\u0663'; expected", "WORLD_SIZE=0": "WORLD_SIZE is '0'; expected",
    "LOCAL_RANK=1.5": "LOCAL_RANK is '1.5'", "LOCAL_SIZE=two": "LOCAL_SIZE is 'two'",
    "MASTER_PORT=99999": "MASTER_PORT is '99999'; expected a number, 1 to 65535",
    "RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=5": "RANK is 2 where WORLD_SIZE is 2",
    "WORLD_SIZE=2 RANK=0": "WORLD_SIZE is 2, and there is no MASTER_ADDR and no MASTER_PORT;",
}


def test_what_is_said_wrongly_of_a_rank_is_one_line_before_torch_is_imported(small_run, tmp_path):
    """By the program and by a tool of several ranks, in processes of their own."""
    inherited = {name: value for name, value in os.environ.items() if name in KEPT}
    flags = small_run(tmp_path / "run")
    cache = ["--teacher=a", "--data=b", "--output=c"]
    distill = ["distill.py", *flags]
    programs = {"distill.py": distill, "isogloss.cache": ["-m", "isogloss.cache", *cache]}
    for number, (variables, expected) in enumerate(WRONG_LAUNCHERS.items()):
        environment = inherited | dict(word.split("=") for word in variables.split())
        for name, words in programs.items() if number == 0 else [("distill.py", distill)]:
            done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment,
                                  capture_output=True, text=True)
            assert done.returncode == 2 and done.stderr.count("\n") == 1, (variables, done.stderr)
            assert done.stderr.startswith(f"{name}: the variable {expected}"), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_not_known_is_named(monkeypatch, rank):
    from isogloss.job import rendezvous

    for name, value in (("RANK", str(rank)), ("MASTER_PORT", "20000"), ("WORLD_SIZE", "2"),
                        ("MASTER_ADDR", "no.such.host.invalid")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'no.such.host.invalid', no host that"):
        rendezvous._own_store()
    # a rank that nobody serves says so after a time
    monkeypatch.setattr(rendezvous, "JOINING_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
    with pytest.raises(ValueError, match="rank 1 has not met rank 0 at port"):
        rendezvous._own_store()


# --- strangers at the store -----------------------------------------------------------------------


FORGED = b'{"line": "\\u001b[2Jall is lost", "code": 0, "said": false}'


def beside_a_stranger():
    """Return what a rank hears of while someone writes to the store who has no secret."""
    import torch.distributed as dist

    from isogloss.job import watch
    from isogloss.job.launch import join_store
    from isogloss.job.several import peers
    from isogloss.job.several.values import gather_values, part, read_value, value_there

    rank = int(os.environ["RANK"])
    peers.REFUSAL_GRACE = PATIENCE  # of ranks that hear why the job ends
    join_store()
    with watch.end_together() as this:
        endings = []
        if rank == 0:
            stranger = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]),
                                     is_master=False, wait_for_workers=False)
            names = [key for key in stranger.list_keys() if key.startswith("run ")]
            [prefix] = {name[: name.index("processes")] for name in names if "processes" in name}
            signed = stranger.get(f"{prefix}processes")
            for value in (FORGED, b"\x80\x04 no JSON", b"", signed, b"[" * 10**5,
                          b"f" * 64 + FORGED):
                stranger.set(f"{prefix}failure", value)
                endings.append(this.find_ending())
            stranger.set(f"{prefix}1 ended", b"")
            endings.append(value_there(this.store, "1 ended"))
            stranger.set(f"{prefix}handles", FORGED)
            with pytest.raises(ValueError, match="'handles' in the store of the job was not"):
                read_value(this.store, "handles")
            this.store.set("go on", "")
            this.store.wait(["a true one"])  # is not kept back by the forged one
        else:
            this.store.wait(["go on"])
            this.post_failure("this is\nso", 2)
            this.store.set("a true one", "")
        assert this.thread.is_alive()
        ending = this.find_ending()
        gather_values(this.store, "met", None, rank, 2)
        part(this.store, "met", rank, 2)
        return endings, tuple(ending)[:3]


def test_who_is_no_rank_of_the_job_cannot_end_it():
    (strange, ending), (_, other) = ranks.run(2, beside_a_stranger)
    assert strange == [None] * 7
    assert ending == ("this is\nso", True, 2) and other == ("this is\nso", False, 2)


def test_all_ranks_look_at_the_first_rows_and_one_warns(monkeypatch):
    from isogloss.job.launch import warn_on_one_rank

    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn_on_one_rank()
            for module in ("isogloss.inputs", "isogloss.data.open_data"):
                warnings.warn_explicit("a", UserWarning, "x.py", 1, module=module)
        assert len(found) == (2 if rank == "0" else 0)


def test_a_line_holds_nothing_that_a_terminal_obeys(capsys):
    from isogloss.job.launch import fail

    with pytest.raises(SystemExit):
        fail("caf\u00e9\x1b]0;x\x07 \u202e\udcff\nend", loud=True)
    line = capsys.readouterr().err
    assert line == "distill.py: caf\u00e9\ufffd]0;x\ufffd \ufffd\ufffd end\n"


def secret_of(environment, folder):
    from isogloss.job import rendezvous
    from isogloss.job.several import values

    os.environ |= environment
    os.chdir(folder)
    values.READING_TIMEOUT = timedelta(seconds=1)
    try:
        store = rendezvous.job_store()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        values.gather_values(store, "met", None, rank, size)
        values.part(store, "met", rank, size)
        return values.secret.hex()
    except (ValueError, SystemExit) as error:
        return str(error)


@pytest.mark.parametrize("environment", [
    {}, {"LOCAL_SIZE": "1"}, {"LOCAL_SIZE": "1", "ISOGLOSS_TOKEN": "0123456789abcdef"},
])
def test_ranks_have_a_secret_in_common_that_lies_nowhere(tmp_path, environment):
    """On one node, on two, with a token of the launcher's environment."""
    ours, others = ranks.run(2, secret_of, environment, tmp_path)
    assert ours == others and len(ours) == 64 and not list(tmp_path.iterdir())
    again = ranks.run(2, secret_of, environment, tmp_path)
    assert (ours in again) == ("ISOGLOSS_TOKEN" in environment)


def secret_of_each(environments, folder):
    return secret_of(environments[int(os.environ["RANK"])], folder)


@pytest.mark.parametrize("tokens", [("a" * 20, "b" * 20), ("a" * 20, ""), ("", "b" * 20),
                                    ("a" * 20, "b")])
@pytest.mark.parametrize("more", [{}, {"LOCAL_SIZE": "1"}])
def test_ranks_with_unlike_tokens_end_with_a_line(tmp_path, tokens, more):
    environments = [more | {"ISOGLOSS_TOKEN": token} for token in tokens]
    for line in ranks.run(2, secret_of_each, environments, tmp_path):
        assert line.startswith("the variable ISOGLOSS_TOKEN is another one for rank 1 than"), line
    assert not list(tmp_path.iterdir())


def test_a_token_that_can_be_guessed_is_refused(tmp_path):
    [message] = ranks.run(1, secret_of, {"ISOGLOSS_TOKEN": "x" * 15}, tmp_path)
    assert message.startswith("the variable ISOGLOSS_TOKEN has 15 characters; expected 16 or more")


def test_only_a_private_file_of_this_user_holds_a_secret(tmp_path, monkeypatch):
    from isogloss.job.several import secret

    monkeypatch.setenv("RANK", "1")
    good = secret.MAGIC + b"s" * 32
    path = tmp_path / "secret"
    for content, mode in ((good, 0o640), (good, 0o604), (good[:-1], 0o600), (good + b"s", 0o600),
                          (b"x" + good[1:], 0o600)):
        path.write_bytes(content)
        path.chmod(mode)
        with pytest.raises(SystemExit, match=r"rank 1 on .* cannot read the secret of the job"):
            secret.read_secret(str(path))
    path.write_bytes(good)
    path.chmod(0o600)
    assert secret.read_secret(str(path)) == b"s" * 32
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(SystemExit):
            secret.read_secret(str(path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit):
        secret.read_secret(str(tmp_path / "pipe"))


UNPICKLES = {"pickle", "all_gather_object", "broadcast_object_list", "gather_object",
             "scatter_object_list", "recv_object_list"}


# workers.py reads what the processes that it forked itself send it through a pipe, by columns.py;
# unpickle.py names the error of torch.load with weights_only
EXCEPTIONS = "workers.py", "columns.py", "unpickle.py"
MODULES = [path for path in sorted((ROOT / "isogloss").rglob("*.py"))
           if path.name not in EXCEPTIONS]


def test_no_module_unpickles_what_other_processes_send():
    for path in (ROOT / "distill.py", *MODULES):
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names = {node.attr}
            assert not names & UNPICKLES, (path, node.lineno)


def listening_addresses(port):
    """Return the addresses on which this machine listens at a port, as /proc spells them."""
    listening = "0A"
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, hexadecimal = local.partition(":")
            if state == listening and int(hexadecimal, 16) == port:
                addresses.add(address)
    return addresses


@pytest.mark.parametrize("nodes, address", [(1, "0100007F"), (2, "00000000")])
def test_the_store_listens_on_the_masters_address(monkeypatch, nodes, address):
    """A loopback address is of no use to other nodes, so there it listens on all."""
    from isogloss.job import rendezvous

    port = ranks.free_port()
    environment = {"RANK": "0", "WORLD_SIZE": str(2 * nodes), "LOCAL_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    store = rendezvous._own_store()
    store.set("key", "value")
    assert listening_addresses(port) == {address}


def leave_first_or_read_on():
    """Rank 0, which serves the store, has nothing more to do; rank 1 reads there for a while."""
    from isogloss.job.launch import start_distributed
    from isogloss.job.several.values import value_there
    from isogloss.job.watch import end_together

    with end_together() as watch:
        start_distributed()
        if watch.number == 0:
            return 0
        wait_until(lambda: value_there(watch.store, "0 ended"))
        reads = itertools.count()
        wait_until(lambda: value_there(watch.store, "0 ended") and next(reads) == 20)
    return 1


def test_the_rank_that_serves_the_store_leaves_last():
    assert ranks.run(2, leave_first_or_read_on) == [0, 1]


# what torch.compile imports keeps, as a default argument, the group of all ranks that there is then
LEAVING = """
import os
import isogloss.job.rendezvous
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
import torch._dynamo
dist.destroy_process_group()
tasks = "/proc/self/task"
threads = [open(f"{tasks}/{thread}/comm").read() for thread in os.listdir(tasks)]
assert not [name for name in threads if "gloo" in name], threads
"""


@pytest.mark.slow
def test_no_thread_of_a_group_outlives_it():
    """While Python ends, such a thread aborts the process now and then."""
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("another_rank_had_it", [False, True])
def test_a_signal_while_ranks_agree_names_the_step_that_is_the_last(
        another_rank_had_it, monkeypatch, capfd):
    with watch.signal_handlers_restored():
        signals = watch.StopSignals()
        signals.step = 7

        def sums(values):
            if not signals.received:
                signals._note(signal.SIGINT, None)  # this rank has said already that it has none
            return np.array(values) + [another_rank_had_it, 0, 0, 0]

        monkeypatch.setattr(watch, "global_sums", sums)
        stop = signals.agree()
        assert stop == (signal.SIGINT if another_rank_had_it else 0)
        assert capfd.readouterr().err == f"\nending after step {7 if stop else 8}\n"
        signals.step += 1
        assert signals.agree() == signal.SIGINT and not capfd.readouterr().err


# --- signals through the real launcher ------------------------------------------------------------


# name: (what sends the signal to which process, exit code of isogloss-distill; None: `deepspeed`
# starts it, and any code will do).  Ranks get a SIGTERM for that of the command below, and a
# SIGHUP in test_distributed.py.
SIGNALS = {
    "SIGKILL to the launcher": (lambda job: os.kill(*job.launchers(), signal.SIGKILL), 137),
    "Ctrl-C": (lambda job: os.killpg(job.runner.pid, signal.SIGINT), 130),
    "Ctrl-C under deepspeed": (lambda job: os.killpg(job.runner.pid, signal.SIGINT), None),
}


@pytest.mark.slow
def test_a_job_that_is_stopped_saves_first_and_the_curve_goes_on(small_run, tmp_path):
    """One after the other, each resumes what the one before has left; no process stays behind."""
    output = tmp_path / "stopped"
    flags = small_run(output, "--num_workers=1", "--eval_rows=4")
    port = ranks.free_port()
    last = 0
    for name, (send, code) in SIGNALS.items():
        job = Job([*flags, "--steps=100000"], port, our_command(tmp_path) if code else ())
        wait_until(lambda: has_trained(job, output, last))
        send(job)
        found, message = job.wait()
        last = losses_of(output)[-1]["step"]
        assert (output / "checkpoints" / f"step_{last:07d}").is_dir(), (name, last, message)
        assert code is None or found == code, (name, found, message)
        if code == 130:
            said = [line for line in message.splitlines() if line and "/100000 steps" not in line]
            assert said[-2:] == [
                f"ending after step {last}",
                f"saved {output}/checkpoints/step_{last:07d}; the same command goes on"], message
            assert "Traceback" not in message and "Kill" not in message
    steps = f"--steps={last + 1}"
    undisturbed = f"--output_dir={tmp_path / 'undisturbed'}"
    run_all(2, [*flags, steps], [*flags, steps, undisturbed])
    assert losses_of(output) == losses_of(tmp_path / "undisturbed")


def has_trained(job, output, start):
    assert job.runner.poll() is None, job.runner.communicate()[1]
    return (output / "metrics.jsonl").exists() and bool(losses_of(output, start))


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [False, True])
def test_a_job_that_is_interrupted_at_once_says_so(small_run, tmp_path, is_training):
    """By Ctrl-C before the first step, or by a second one; no process stays behind."""
    output = tmp_path / "run"
    job = Job(small_run(output, "--num_workers=1", "--steps=100000"), ranks.free_port(),
              our_command(tmp_path))
    wait_until(lambda: has_trained(job, output, 0) if is_training else len(job.ranks()) == 2)
    [launcher] = job.launchers()
    assert all(map(blocks_interrupts, Path(f"/proc/{launcher}/task").iterdir()))
    os.killpg(job.runner.pid, signal.SIGINT)
    if is_training:
        time.sleep(0.2)  # as of a hand: two at once may be one to a process that waits for a core
        os.killpg(job.runner.pid, signal.SIGINT)
    code, message = job.wait()
    assert code == 130 and "Traceback" not in message, message
    expected = "ended at once" if is_training else "nothing to save yet"
    assert expected in message or f"saved {output}" in message, message


def blocks_interrupts(thread):
    """Tell whether a thread leaves SIGINT to others; one that does not takes it for them all."""
    mask = re.search(r"SigBlk:\s*(\w+)", (thread / "status").read_text())[1]
    return bool(int(mask, 16) & 1 << signal.SIGINT - 1)


@pytest.mark.slow
def test_a_signal_while_the_models_load_ends_the_job_at_once(small_run, tmp_path):
    """The command is gone before its ranks look for it; they notice."""
    job = Job(small_run(tmp_path / "run", "--steps=100000"), ranks.free_port())
    wait_until(lambda: len(job.ranks()) == 2)
    job.runner.terminate()
    job.wait()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_command_of_another_name_starts_a_job_that_ends_with_it(small_run, tmp_path):
    """A script or a notebook that calls our main; its end is noticed as that of our command."""
    program = [sys.executable, our_command(tmp_path)[0].rename(tmp_path / "start.py")]
    job = Job(small_run(tmp_path / "whole", "--steps=2"), ranks.free_port(), program)
    code, message = job.wait()
    assert code == 0, message
    job = Job(small_run(tmp_path / "run", "--steps=100000"), ranks.free_port(), program)
    wait_until(lambda: has_trained(job, tmp_path / "run", 0))
    job.runner.kill()
    _, message = job.wait()
    assert "the launcher is gone, so the job ends" in message
    assert re.search("saved .*/checkpoints/step_0", message), message


# --- processes that nothing was imported in before -----------------------------------------------

# Of the environment of the tests; the rest would hide what a user meets.
KEPT = {"PATH", "HOME", "DS_ACCELERATOR", "HF_HUB_OFFLINE", "ISOGLOSS_CACHE", "WANDB_MODE",
        "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME"}


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_one_line_of_the_others_and_no_file(small_run, tmp_path):
    """It serves the store; a process writes for both."""
    writer = f"{sys.executable} {ROOT / 'tests' / 'stand_in_writer.py'}"
    flags = small_run(tmp_path / "run", "--on_policy=0.5", "--rollout_tokens=4", "--steps=100000",
                      "--prompt_tokens=4", f"--writer={writer}")
    (tmp_path / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if name in KEPT}
    environment |= {"TMPDIR": str(tmp_path / "tmp"), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    job = []
    for rank in map(str, range(2)):
        job.append(subprocess.Popen(
            [sys.executable, ROOT / "distill.py", *flags], cwd=tmp_path, text=True,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE))
    log = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 1,
               lambda: [process.poll() for process in job])
    left = list((tmp_path / "tmp").glob("isogloss*"))
    assert len(left) == 1
    victim, survivor = job
    victim.kill()
    _, message = survivor.communicate(timeout=PATIENCE)
    assert survivor.returncode == 1
    assert message.splitlines() == [
        f"distill.py: rank 0 (process {victim.pid}){MID_STEP}"], message
    wait_until(lambda: not left[0].exists())
    victim.communicate()


# (launcher, ZeRO stage, gradient accumulation steps, flags); in each some rank has nothing to judge
# in some micro-batch
FAMILIES = {
    "data parallel, a sharded teacher": ("deepspeed --num_gpus=2", 0, 1, ["--teacher_tp=2"]),
    "sequence parallel, on-policy": ("torchrun --nproc_per_node=2", 3, 1, [
        "--sequence_parallel=2", "--on_policy=1", "--rollout_tokens=4", "--prompt_tokens=8"]),
    "a pipeline, a teacher on a rank of its own": ("torchrun --nproc_per_node=3", 1, 2, [
        "--pipeline_parallel=2", "--teacher_ranks=1"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_processes_judge_where_some_have_nothing_to_judge(models, texts, tmp_path, name):
    """By real launchers, from another directory, without what tests import and set."""
    launcher, stage, grad_accum_steps, more = FAMILIES[name]
    config = ds_config(tmp_path / "ds.json", stage, 1, grad_accum_steps)
    flags = [f"--student={models[0]}", f"--teacher={models[1]}", f"--ds_config={config}",
             f"--data={write_corpus(tmp_path, ['', *texts], 10)}", "--eval_rows=2",
             "--max_length=60", "--steps=1", f"--output_dir={tmp_path / 'run'}"]
    environment = {name: value for name, value in os.environ.items() if name in KEPT}
    program, num_ranks = launcher.split()
    command = [Path(sys.executable).with_name(program), num_ranks,
               f"--master_port={ranks.free_port()}", ROOT / "distill.py", *flags, *more]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=PATIENCE * 2)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning:" not in done.stderr, done.stderr
    before, step, after = losses_of(tmp_path / "run", -1)
    assert step["loss"] > 0 and after["eval/student_entropy"] > 0
    assert before["eval/student_bits_per_byte"] > 0
