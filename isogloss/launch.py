"""Start and end the ranks of a job together: process group, wrong input, dead peers.

Tests: tests/test_cli.py, tests/test_distributed.py.
"""

import os
import platform
import resource
import socket
import sys
import warnings
from contextlib import contextmanager
from typing import NamedTuple

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from ipc import is_running
from isogloss.layout import LOADING_TIMEOUT, gather_objects

# Open files a rank may need: shared memory takes two per buffer, and the usual limit is 1,024.
MAX_OPEN_FILES = 1 << 16


def start_distributed():
    """Join the job's process group, a group of one without a launcher.

    Returns:
        torch.device of this rank.
    """
    _set_default_environment()
    if get_accelerator().device_name() == "cpu":
        _prepare_cpu_rank()
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    _raise_open_file_limit()
    deepspeed.init_distributed(timeout=LOADING_TIMEOUT)
    return torch.device(get_accelerator().current_device_name())


def _set_default_environment():
    """Set what a launcher would have set, for a job of one rank; values that are set stay."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # port 0: the system chooses a free one
        port = probe.getsockname()[1]
    defaults = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def _prepare_cpu_rank():
    # DeepSpeed's shared-memory all-reduce mistakes every group for the world, and would be compiled
    # on first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "OMP_NUM_THREADS" not in os.environ:  # else every rank would start a thread per core
        ranks_per_node = int(os.environ.get("LOCAL_SIZE", 1))
        torch.set_num_threads(max(1, os.cpu_count() // ranks_per_node))


def _raise_open_file_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative limit means no limit.
    if 0 <= soft < MAX_OPEN_FILES:
        limit = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def fail_together(roles=None, what=""):
    """End all ranks, with one line, when the block raises a ValueError on any of them.

    For blocks before the first step, when nothing has been trained or written.  All ranks take
    part.

    Args:
        roles: `layout.Roles` where teachers have ranks of their own, which then take part too.
        what: name of this block; with roles, no other block may have it.
    """
    message = None
    try:
        yield
    except ValueError as error:
        message = str(error)
    speaks = dist.get_rank() == 0 and (roles is None or roles.role == "student")
    for message_of_rank in gather_objects(message, roles, what):
        if message_of_rank:
            fail(message_of_rank, loud=speaks)


class RankProcess(NamedTuple):
    """Identify a rank: host name of its node, process id, the rank's name in messages."""

    node: str
    process: int
    name: str


@contextmanager
def report_dead_ranks(roles=None):
    """Name the dead ranks of this node in one line when a step fails because of them.

    When a rank dies, collectives fail on the others with an error that does not say why.  Without a
    dead rank the error is raised as it is.  All ranks take part at the start.

    Args:
        roles: `layout.Roles` where teachers have ranks of their own.
    """
    prefix = "teacher " if roles and roles.role == "teacher" else ""
    this = RankProcess(platform.node(), os.getpid(), f"{prefix}rank {dist.get_rank()}")
    peers = gather_objects(this, roles, "processes")
    try:
        yield
    except (RuntimeError, FileNotFoundError):
        alive = []
        dead = []
        for peer in peers:
            if peer.node != this.node:
                continue  # process ids mean nothing on another node
            if is_running(peer.process):
                alive.append(peer)
            else:
                dead.append(peer)
        if not dead:
            raise
        if this == alive[0]:  # the first survivor speaks for the node
            names = ", ".join(f"{peer.name} (process {peer.process})" for peer in dead)
            line = (
                f"distill.py: {names} ended in mid-step, so the job ends; the same command goes "
                "on from its last checkpoint"
            )
            print(line, file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def fail(message, loud=None, code=2):
    """End this process with one line on stderr.

    Args:
        loud: whether this rank prints the line; None: rank 0 does.
        code: exit code; 2 stands for wrong input.
    """
    if loud is None:
        loud = int(os.environ.get("RANK", 0)) == 0
    if loud:
        one_line = " ".join(message.split())
        print(f"distill.py: {one_line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def silence_libraries():
    """Silence the libraries' progress reports and routine warnings; their errors remain."""
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # What it raises is reported once, by `fail_together`.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # DeepSpeed calls functions that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # The tokenizers library warns when a process that used its threads forks, as for data workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
