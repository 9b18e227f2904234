"""How the ranks of a job begin and end together: process group, bad input, dead peers."""

import os
import platform
import resource
import socket
import sys
import warnings
from contextlib import contextmanager

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from ipc import is_running
from isogloss.layout import LOADING, gather


FILES = 1 << 16  # that a rank may hold open


def start_distributed():
    """Join the job's process group (a group of one without a launcher); returns the device of this rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for key, value in alone.items():
        os.environ.setdefault(key, str(value))
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed's shared-memory all-reduce takes every group for the world, and is compiled on first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "OMP_NUM_THREADS" not in os.environ:  # else every rank would start a thread per core
            torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_SIZE", 1))))
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES:  # the usual 1,024 are few: shared memory takes two a buffer
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if hard < 0 else min(hard, FILES), hard))
    deepspeed.init_distributed(timeout=LOADING)
    return torch.device(get_accelerator().current_device_name())


@contextmanager
def fail_together(roles=None, what=""):
    """A ValueError on any rank ends all ranks with its one line, before anything was trained or written.

    Args:
        roles: where teachers have ranks of their own, which then take part too.
        what: names this block among all such.
    """
    message = None
    try:
        yield
    except ValueError as error:
        message = str(error)
    for found in gather(message, roles, what):
        if found:
            fail(found, loud=dist.get_rank() == 0 and (roles is None or roles.role == "student"))


@contextmanager
def report_dead_ranks(roles=None):
    """Where a step fails because ranks of this node have ended, one line says which, and this one ends."""
    node, process = platform.node(), os.getpid()
    name = f"{'teacher ' if roles and roles.role == 'teacher' else ''}rank {dist.get_rank()}"
    peers = gather((node, process, name), roles, "processes")
    try:
        yield
    except (RuntimeError, FileNotFoundError):
        here = [peer for peer in peers if peer[0] == node]
        gone = [peer for peer in here if not is_running(peer[1])]
        if not gone:
            raise
        if process == next(peer[1] for peer in here if peer not in gone):
            named = ", ".join(f"{name} (process {process})" for _, process, name in gone)
            print(f"distill.py: {named} ended in mid-step, so the job ends; the same command goes on from "
                  "its last checkpoint", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def fail(message, loud=None):
    """End with a line, which rank 0 writes unless `loud` says who does."""
    if int(os.environ.get("RANK", 0)) == 0 if loud is None else loud:
        print("distill.py: " + " ".join(message.split()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def silence_libraries():
    """Warnings and errors of the libraries, not their progress reports."""
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it raises is reported once, by us
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked
