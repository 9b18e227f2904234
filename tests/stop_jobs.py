"""Stop a real job at random moments, resume it, and check that nothing is lost or left behind.

    python tests/stop_jobs.py --kills 30 --terms 30 [--seed 0] [--folder DIR]

A small job of two ranks with data workers gets SIGKILL or SIGTERM at a moment drawn uniformly over
its run: while it loads, trains, saves, evaluates or exports.  Some jobs run under DeepSpeed's
launcher, where the signal goes to a rank, the launcher of the node, the command `deepspeed` or all
of them; the others are forked from a warm server, which is faster.  Each time all processes have to
end, no shared memory may stay behind, and the same command resumes on the same port.  SIGTERM may
lose no step, SIGKILL none before the last checkpoint.  Every job that gets to its end has to have
the curve and the exported weights of an undisturbed one, bit by bit.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import ranks
from launched import PATIENCE, ROOT, Job, processes_of, rank_with_trouble

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
               "DS_ACCELERATOR": "cpu", "WANDB_MODE": "offline"}
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # for the ranks

STEPS = 60
SAVE_EVERY = 5  # divides STEPS: the last step is always saved
LAUNCHED = 1 / 3  # share of jobs under the real launcher


# --- a job ----------------------------------------------------------------------------------------


def prepare(folder):
    """Write models and a corpus; return the command line without --output_dir and --export."""
    import jobs
    import same_numbers

    same_numbers.prepare(folder)
    rows = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    with open(folder / "long.jsonl", "w") as file:
        for first in range(len(rows)):
            text = " ".join(rows[first:] + rows[:first])[:1000]
            file.write(json.dumps({"text": text}) + "\n")
    config = jobs.ds_config(folder / "ds.json", 2, 16, 1)
    # With tiles of 2 MiB, a data worker sends 150 KiB per batch: a pipe holds 64 KiB, so a worker
    # whose rank is gone blocks in it.
    return [f"--student={folder / 'student'}", f"--teacher={folder / 'teacher'}",
            f"--data={folder / 'long.jsonl'}", f"--ds_config={config}",
            "--max_length=250", "--loss_memory_mib=2", f"--steps={STEPS}",
            f"--save_every={SAVE_EVERY}", "--eval_rows=8", "--eval_every=12", "--num_workers=2"]


def begin_a_session(port, _):
    """Let a rank meet the others at a port, in a session of its own."""
    from isogloss.job import rendezvous

    os.setsid()
    os.environ["MASTER_PORT"] = str(port)
    # A launcher would end the others when a rank is gone before any other has heard of it.
    rendezvous.JOINING_TIMEOUT = timedelta(seconds=60)


class ForkedJob:
    """A job of two ranks without a launcher, each in a session of its own."""

    def __init__(self, flags, port, folder):
        self.folder = folder
        trouble = partial(begin_a_session, port)
        self.group = ranks.start(2, rank_with_trouble, flags, folder, trouble)
        self.sessions = [process.pid for process, _ in self.group]

    def targets(self):
        pids = self.sessions
        return {"rank 0": pids[:1], "rank 1": pids[1:], "all": pids}

    def poll(self):
        """Return the exit code of the job, the first that is not 0; None while it runs."""
        codes = [process.exitcode for process, _ in self.group]
        if None in codes:
            return None
        return next((code for code in codes if code), 0)

    def message(self):
        return "".join(path.read_text() for path in self.folder.glob("stderr?"))


class LaunchedJob:
    def __init__(self, flags, port, folder):
        self.file = folder / "stderr.txt"
        self.job = Job(flags, port, stderr=open(self.file, "w"))
        self.sessions = [self.job.runner.pid]

    def targets(self):
        """Return {name: process ids} of what runs by now."""
        everything = list(processes_of(self.job.runner.pid))
        found = {"deepspeed": [self.job.runner.pid], "all": everything}
        for process in self.job.launchers():
            found["launcher"] = [process]
        for number, process in enumerate(sorted(self.job.ranks())[:2]):
            found[f"rank {number}"] = [process]
        return found

    def poll(self):
        return self.job.runner.poll()

    def message(self):
        return self.file.read_text()


# --- what a job has left --------------------------------------------------------------------------


def curve_of(output):
    """Return {(step, kind): metrics} of what a run has logged."""
    import jobs

    curve = {}
    if (output / "metrics.jsonl").exists():
        for line in jobs.losses_of(output, start=-1):
            kind = "eval" if any(key.startswith("eval/") for key in line) else "train"
            curve[line["step"], kind] = line
    return curve


def last_logged(output):
    return max((step for step, _ in curve_of(output)), default=0)


def last_saved(output):
    names = [path.name for path in (output / "checkpoints").glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def written_at(output):
    """Return when a run last wrote metrics, in nanoseconds; 0: never."""
    path = output / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def wait_for_end(job):
    """Wait until no process of a job is left; return (seconds, ids of all that were seen)."""
    begin = time.monotonic()
    seen = set()
    while True:
        alive = {}
        for session in job.sessions:
            alive |= processes_of(session)
        seen |= alive.keys()
        if job.poll() is not None and not alive:
            return time.monotonic() - begin, seen
        assert time.monotonic() - begin < PATIENCE, f"left behind: {alive}\n{job.message()}"
        time.sleep(0.05)


def shared_memory_of(processes):
    """List the files in /dev/shm whose names hold the id of one of these processes."""
    left = []
    for path in Path("/dev/shm").iterdir():
        if any(str(process) in path.name.split("_") for process in processes):
            left.append(path.name)
    return left


# --- stop and resume ------------------------------------------------------------------------------


class Stress:
    """Disturb jobs, one after the other, until enough of them were disturbed.

    Attributes:
        reference: (curve, hash of the weights) of an undisturbed job.
        seconds: {class of a job: how long an undisturbed one takes}.
    """

    def __init__(self, folder, seed):
        self.folder = folder
        self.random = random.Random(seed)
        self.base = prepare(folder)
        self.port = ranks.free_port()
        self.jobs_done = 0
        self.longest = 0.0
        self.seconds = {}
        ranks.run(1, os.getpid)  # starts the warm server
        for kind in (ForkedJob, LaunchedJob):
            self.seconds[kind] = self.run_to_the_end(kind, kind.__name__)
        self.reference = self.result("ForkedJob")
        assert self.result("LaunchedJob") == self.reference
        print(f"an undisturbed job takes {self.seconds[ForkedJob]:.0f} s forked, "
              f"{self.seconds[LaunchedJob]:.0f} s launched", flush=True)

    def start(self, kind, name):
        output = self.folder / name
        output.mkdir(exist_ok=True)
        flags = [*self.base, f"--output_dir={output / 'run'}", f"--export={output / 'student'}"]
        return kind(flags, self.port, output)

    def result(self, name):
        weights = (self.folder / name / "student" / "model.safetensors").read_bytes()
        return curve_of(self.folder / name / "run"), hashlib.sha256(weights).hexdigest()

    def run_to_the_end(self, kind, name):
        begin = time.monotonic()
        job = self.start(kind, name)
        wait_for_end(job)
        assert job.poll() == 0, job.message()
        return time.monotonic() - begin

    def disturb(self, signals):
        """Send each of the signals to a job, and let the last job run to its end."""
        signals = list(signals)
        self.random.shuffle(signals)
        name = f"job{self.jobs_done}"
        while signals:
            kind = LaunchedJob if self.random.random() < LAUNCHED else ForkedJob
            job = self.start(kind, name)
            if self.stop(job, kind, name, signals[-1]):
                signals.pop()
            if job.poll() == 0 and last_logged(self.folder / name / "run") == STEPS:
                self.check_end(name)
                name = f"job{self.jobs_done}"
        if (self.folder / name).exists():
            self.run_to_the_end(ForkedJob, name)
            self.check_end(name)

    def stop(self, job, kind, name, number):
        """Send a signal at a random moment; return False if the job has ended before."""
        run = self.folder / name / "run"
        # a job that resumes loads as long as a new one, and trains for less
        remaining = 1 - last_saved(run) / STEPS
        before = written_at(run)
        moment = self.random.uniform(0, self.seconds[kind] * (0.4 + 0.6 * remaining))
        begin = time.monotonic()
        while job.poll() is None and time.monotonic() - begin < moment:
            time.sleep(0.01)
        disturbed = job.poll() is None
        target = "nothing"
        if disturbed:
            target = self.send(job, number)
        seconds, processes = wait_for_end(job)
        self.longest = max(self.longest, seconds)
        logged = last_logged(run)
        saved = last_saved(run)
        print(f"{kind.__name__}, {signal.Signals(number).name} to {target} after {moment:.1f} s: "
              f"code {job.poll()}, logged {logged}, saved {saved}, gone in {seconds:.1f} s",
              flush=True)
        message = job.message()
        assert disturbed or job.poll() == 0, message
        assert "Address already in use" not in message and "taken" not in message, message
        assert not shared_memory_of(processes), (shared_memory_of(processes), message)
        if number == signal.SIGTERM:
            # what was never resumed still ends as an earlier SIGKILL left it
            assert logged == saved or written_at(run) == before, message
        else:
            assert logged - saved <= SAVE_EVERY, message
        return disturbed

    def send(self, job, number):
        """Send a signal to one target; return its name."""
        targets = job.targets()
        if number == signal.SIGTERM and "all" in targets:
            del targets["all"]
        target = self.random.choice(sorted(targets))
        for process in targets[target]:
            try:
                os.kill(process, number)
            except ProcessLookupError:  # it has ended meanwhile
                continue
        return target

    def check_end(self, name):
        assert self.result(name) == self.reference, f"{name} differs from an undisturbed job"
        scratch = list((self.folder / name).rglob(".*.incomplete"))
        assert not scratch, scratch
        self.jobs_done += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--terms", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="to work in; else a temporary one, removed at the end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["ISOGLOSS_CACHE"] = str(folder / "cache")
        stress = Stress(folder, args.seed)
        stress.disturb([signal.SIGKILL] * args.kills + [signal.SIGTERM] * args.terms)
        print(f"{args.kills} SIGKILL, {args.terms} SIGTERM, {stress.jobs_done} jobs to their end: "
              f"all equal to an undisturbed one; at most {stress.longest:.1f} s to end; nothing "
              "left behind")


if __name__ == "__main__":
    main()
