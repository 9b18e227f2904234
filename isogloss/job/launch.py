"""Start the ranks of a job together: process group, limits, wrong input.

Tests: tests/test_cli.py, tests/test_launch.py.
"""

import logging
import os
import random
import resource
import socket
import warnings
from contextlib import contextmanager

import datasets
import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from isogloss.errors import EngineError
from isogloss.flags.parse import is_first_of_node, is_first_rank, refusing
from isogloss.job import rendezvous
from isogloss.job.layout import place_in_job
from isogloss.job.watch import current_watch, print_line

# Open files a rank may need: shared memory takes two per buffer, and the usual limit is 1,024.
MAX_OPEN_FILES = 1 << 16


def join_store():
    """Join the store where the ranks of the job meet.

    Raises:
        ValueError: the port where it is served is taken, or see `job_store`.
    """
    _set_default_environment()
    rendezvous.job_store()


def join_job(teacher_ranks):
    """Return the Roles of this job's ranks, once it has joined their store; None: all are alike.

    What keeps it from that ends this rank with a line and exit code 2.

    Args:
        teacher_ranks: of every node, see `roles.split_ranks`; 0: none is for teachers alone.
    """
    with refusing(loud=is_first_of_node()):
        roles = None
        if teacher_ranks:
            from isogloss.job.several.roles import split_ranks

            roles = split_ranks(teacher_ranks)
        join_store()
    return roles


def start_distributed(roles=None):
    """Join the process group of this rank's world, a group of one without a launcher.

    Args:
        roles: `roles.Roles` where teachers have ranks, and so a world, of their own.

    Returns:
        torch.device of this rank.
    Raises:
        ValueError: see `join_store`.
    """
    join_store()
    if get_accelerator().device_name() == "cpu":
        _prepare_cpu_rank()
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    _raise_open_file_limit()
    if not dist.is_initialized():
        _join_process_group(roles)
    deepspeed.init_distributed()  # which takes the process group that there is
    if dist.get_world_size() > 1:
        rendezvous.host_group()  # where ranks cannot reach one another, that is seen here
    rendezvous.set_timeout(rendezvous.LOADING_TIMEOUT)
    return torch.device(get_accelerator().current_device_name())


def seed_draws(seed):
    """Seed all generators; transformers.set_seed would import peft, bitsandbytes and a compiler."""
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)


def _join_process_group(roles):
    """Join a process group of all ranks of this world, as DeepSpeed would for the whole job."""
    device = None
    if get_accelerator().device_name() == "cuda":  # else every barrier warns that it guesses
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        get_accelerator().communication_backend_name(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        # Two worlds use one store; their prefixes keep their keys apart.
        store=dist.PrefixStore(roles.role if roles else "ranks", rendezvous.job_store()),
        timeout=rendezvous.JOINING_TIMEOUT,
        device_id=device,
    )


def _set_default_environment():
    """Set what a launcher would have set, for a job of one rank; values that are set stay."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # port 0: the system chooses a free one
        port = probe.getsockname()[1]
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port)}
    for key, value in defaults.items():
        os.environ[key] = os.environ.get(key) or value
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    if accelerator.device_name() == "cuda" and local_rank >= accelerator.device_count():
        raise ValueError(f"the variable LOCAL_RANK is {local_rank}, and this node has "
                         f"{accelerator.device_count()} GPUs; start no more ranks on it")


def _prepare_cpu_rank():
    # DeepSpeed's shared-memory all-reduce mistakes every group for the world, and would be compiled
    # on first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "OMP_NUM_THREADS" not in os.environ:  # else every rank would start a thread per core
        ranks_per_node = int(os.environ.get("LOCAL_SIZE") or 1)
        torch.set_num_threads(max(1, os.cpu_count() // ranks_per_node))


def _raise_open_file_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative limit means no limit.
    if 0 <= soft < MAX_OPEN_FILES:
        limit = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def fail_together(roles=None, what="checks"):
    """End all ranks, with one line, when the block raises a ValueError or EngineError on any.

    For blocks before the first step, when nothing has been trained or written, inside of
    `watch.end_together`, which ends all ranks when one raises anything else.  All ranks take part.

    Args:
        roles: `roles.Roles` where teachers have ranks of their own, which then take part too.
        what: name of this block; no other block may have it.
    """
    watch = current_watch()
    message = None
    try:
        yield
    except (ValueError, EngineError) as error:
        message = str(error) or type(error).__name__
        # for ranks that wait inside the block for this one
        watch.post_failure(message, 2)
    for message_of_rank in watch.gather(what, message, roles):
        if message_of_rank:
            watch.leave(what, roles)
            number, _ = place_in_job(roles)
            fail(message_of_rank, loud=number == 0)


@contextmanager
def fail_alone(kind, code=2):
    """End all ranks, with one line, when the block raises such an error on one of them.

    For blocks in which the others wait for this rank; they end soon after it.

    Args:
        kind: type of error.
        code: exit code; 2 stands for wrong input.
    """
    try:
        yield
    except kind as error:
        is_first = current_watch().announce(str(error), code, said=True)
        fail(str(error), loud=is_first, code=code)


def fail(message, loud=None, code=2):
    """End this process with one line on stderr that begins with the name of the program.

    Args:
        loud: whether this rank prints the line; None: rank 0 does.
        code: exit code; 2 stands for wrong input.
    """
    if loud is None:
        loud = is_first_rank()
    if loud:
        print_line(message)
    raise SystemExit(code)


def silence_libraries():
    """Silence the libraries' progress reports and routine warnings; their errors remain."""
    deepspeed.utils.logger.setLevel("ERROR")
    # which says on a CPU that kernels for one could be installed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # What it raises is reported once, by `fail_together`.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # DeepSpeed calls functions that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # what its compiler decides within a kernel
    warnings.filterwarnings("ignore", module="torch._inductor")
    warn_on_one_rank()
    # The tokenizers library warns when a process that used its threads forks, as for data workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def warn_on_one_rank():
    """Let the first rank alone warn of the first rows, which all ranks look at."""
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", module=r"isogloss\.(inputs|data\.open_data)$")
