"""Groups of real ranks for tests: gloo processes that run functions of the test file.

They are forked from one warm server, which has torch, deepspeed and transformers imported, so that
a group costs a second, not a minute.
"""

import functools
import multiprocessing as mp
import os
import pickle
import random
import socket
import traceback
from multiprocessing.connection import wait

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["warm"])
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
               "reduce_scatter_tensor", "all_to_all_single", "send", "recv", "isend", "irecv")


def free_port():
    """Return a port that stays free: any connection may be given one of those from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # tests seed the others
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def start(world, function, *args):
    """Start `function(*args)` on `world` ranks; returns [(process, pipe)]."""
    port, group = free_port(), []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(rank, world, port, theirs, function, args))
        process.start()
        theirs.close()
        group.append((process, ours))
    return group


def results(group, timeout=900):
    """What every rank returned; raises what a rank raised."""
    found = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(group)}
    try:
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                raise TimeoutError(f"a rank did not respond for {timeout} s")
            for pipe in ready:  # the first that fails, for which others may wait in vain
                kind, value = pickle.loads(pipe.recv_bytes())
                if kind == "error":
                    raise AssertionError(value)
                found[waiting.pop(pipe)] = value
        for process, _ in group:
            process.join(timeout)
    finally:
        for process, _ in group:
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(len(group))]


def run(world, function, *args):
    return results(start(world, function, *args))


def kill(group):
    """SIGKILL, as the machine going away."""
    for process, _ in group:
        process.kill()
    for process, _ in group:
        process.join()


def as_in_a_fresh_process(rank):
    """Take back what differs from a process that a launcher starts, as far as it is known.

    Without it a forked rank would pass where a user's run ends with a traceback.
    """
    import numpy as np
    import torch

    # torch's compiler, which the server's imports start, switches these checks off
    torch.distributions.Distribution.set_default_validate_args(True)
    mp.set_start_method(None, force=True)  # the forkserver's; the default is another one
    for name in COLLECTIVES:
        setattr(torch.distributed, name, as_nccl_takes_it(getattr(torch.distributed, name)))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank + 1)  # states that no seed has set are not equal on the ranks


def as_nccl_takes_it(collective):
    """Refuse what NCCL refuses and gloo takes: tensors with gaps, integers of 16 bits."""
    import torch

    @functools.wraps(collective)
    def call(*arguments, **options):
        waiting = [*arguments, *options.values()]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list | tuple):
                waiting.extend(value)
            elif torch.is_tensor(value):
                assert value.is_contiguous() and value.dtype != torch.int16, (
                    collective.__name__, value.shape, value.stride(), value.dtype)
        return collective(*arguments, **options)

    return call


def _rank(rank, world, port, pipe, function, args):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    torch.set_num_threads(1)
    as_in_a_fresh_process(rank)
    try:
        answer = "result", function(*args)
    except BaseException:
        answer = "error", f"rank {rank}: {traceback.format_exc()}"
    # a plain pickle copies tensors; the pipe's own would share them
    pipe.send_bytes(pickle.dumps(answer))
