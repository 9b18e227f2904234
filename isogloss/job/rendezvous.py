"""Let the ranks of a job meet: its key-value store, values of all ranks, how long they wait.

What ranks tell one another through the store is in values.py.

Tests: tests/test_launch.py.
"""

import errno
import json
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

# Its default arguments keep the group that there is when it is imported, whose threads then outlive
# Python at the end of the process and may abort it; so it is imported before there is one.
from torch.distributed.nn import functional as functional

from isogloss.doors import door

# How long ranks wait for one another.  None of these is tuned.  A rank that ends is noticed within
# seconds (isogloss/job/watch.py); these are for one that hangs, and for nodes that disappear.
JOINING_TIMEOUT = timedelta(minutes=30)  # all nodes have to start within it
LOADING_TIMEOUT = timedelta(hours=2)  # a large model may come over a network
TRAINING_TIMEOUT = timedelta(minutes=30)  # rank 0 may write a large export to a slow disk meanwhile

TOKEN_VARIABLE = "ISOGLOSS_TOKEN"

_store = None  # of the whole job; made once in a process


def job_store():
    """Return the key-value store of the whole job, which its first rank serves.

    RANK, MASTER_ADDR and MASTER_PORT of the environment have to be those of the whole job at the
    first call.

    Raises:
        ValueError: the port is taken, or there is no secret that ranks could have in common.
        SystemExit: this rank cannot read the secret of the job.
    """
    global _store
    if _store is None:
        store = _agents_store() or _own_store()
        if os.environ.get(TOKEN_VARIABLE) or int(os.environ["WORLD_SIZE"]) > 1:
            door("secret").agree(store)
        _store = store
    return _store


def _agents_store():
    """Return the store that torchrun serves; None if another launcher started this rank."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return next(dist.rendezvous("env://", timeout=JOINING_TIMEOUT))[0]


def _own_store():
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    serves = int(os.environ["RANK"]) == 0
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the variable MASTER_ADDR is {host!r}, no host that is known here "
                         f"({getattr(error, 'strerror', None) or error}); expected the address of "
                         "rank 0, where the ranks meet") from None
    listener = _listen(host, port, addresses[0]) if serves else None
    descriptor = listener.detach() if listener else None  # the store closes it
    try:
        return dist.TCPStore(host, port, is_master=serves, timeout=JOINING_TIMEOUT,
                             wait_for_workers=False, master_listen_fd=descriptor)
    except dist.DistError:
        raise ValueError(f"rank {os.environ['RANK']} has not met rank 0 at port {port} of {host} "
                         f"within {JOINING_TIMEOUT}; see whether that one runs, and can be reached "
                         "from here") from None


def _listen(host, port, resolved):
    """Return a socket that listens on the master's address alone.

    Args:
        resolved: of this address, as `socket.getaddrinfo` says it.
    """
    family, _, _, _, address = resolved
    several_nodes = os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_SIZE")
    # Some systems give their own name a loopback address, at which other nodes cannot reach them.
    is_loopback = address[0] == "::1" or address[0].startswith("127.")
    if several_nodes and is_loopback:
        address = ("", port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))  # a name that other nodes know, but not this one
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise ValueError(f"port {port} of {host}, where the ranks meet: {error.strerror}; end the "
                         "job that uses it, or choose another port with --master_port before "
                         "distill.py") from None
    return listener


# --- values of ranks ------------------------------------------------------------------------------


def values_of_ranks(value, group=None):
    """Return the values of all ranks, in order, the same list on each; all of them take part.

    Args:
        value: what JSON can express.
        group: process group; None: all ranks.
    """
    if not dist.is_initialized():
        return [value]
    device = "cpu" if "gloo" in dist.get_backend(group) else get_accelerator().current_device_name()
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    longest = int(max(sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=group)
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes)]


# --- numbers of the host --------------------------------------------------------------------------

_host_group = None  # made once in a process


def host_group():
    """Return the process group in which all ranks reduce tensors in the host's memory.

    None stands for the group of all ranks, which does so on CPUs.  On devices a group of Gloo is
    made at the first call, in which all ranks take part: NCCL would put the numbers behind all that
    the device has still to do, and the host would wait for it.
    """
    global _host_group
    if "gloo" in dist.get_backend():
        return None
    if _host_group is None:
        _host_group = dist.new_group(backend="gloo", timeout=LOADING_TIMEOUT)
    return _host_group


# --- timeouts -------------------------------------------------------------------------------------


def set_timeout(timeout):
    """Let all process groups that exist, and the job's store, wait for so long from now on.

    Raises nothing by itself: a collective that waits longer fails, with NCCL by ending the process.
    """
    job_store().set_timeout(timeout)
    for group in dist.distributed_c10d._world.pg_map:
        group.set_timeout(timeout)
