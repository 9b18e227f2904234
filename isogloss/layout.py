"""Which ranks hold which part of a teacher, and whose samples they read.

A teacher of degree N is sharded over N neighboring ranks of one node.  Every group of N ranks holds a whole
teacher (a replica) and runs the samples of its own ranks, one rank's after the other, so the student's layout
is free and no teacher tensor leaves a node.  With `--teacher_ranks` the last ranks of every node hold
teachers and nothing else; then student and teachers are two worlds (`split_ranks`), each with a process group
of its own, and whatever counts ranks sees its own world alone.
"""

import math
import os
import pickle
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

LOADING = timedelta(hours=2)  # that the ranks of one world wait until the other one has loaded its models


def node_size():
    """Ranks on this node, as the launcher says (DeepSpeed's or torchrun's); without a launcher, all."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


class Roles(NamedTuple):
    """What this rank is for, in a job whose nodes have ranks for teachers alone.

    role: "student" or "teacher".
    node: of this rank, from 0.
    local: place among the node's ranks of the same role, from 0.
    students, teachers: ranks of either role on every node.
    store: key-value store of the whole job.
    """

    role: str
    node: int
    local: int
    students: int
    teachers: int
    store: dist.Store

    def publish(self, key, value):
        """For the other ranks of this node."""
        self.store.set(f"node {self.node}: {key}", pickle.dumps(value))

    def read(self, key):
        """What a rank of this node has published, as soon as it has."""
        return pickle.loads(self.store.get(f"node {self.node}: {key}"))


def split_ranks(teachers):
    """Make this rank part of one of two worlds: the last `teachers` ranks of every node, and the others.

    Called before anything else joins a process group.  RANK, WORLD_SIZE and LOCAL_SIZE of the environment
    become those of its world.

    Returns:
        Roles.
    Raises:
        ValueError: a node has no rank left for the student.
    """
    environ = os.environ
    rank, world = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    size = int(environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE") or world)
    if teachers >= size:
        raise ValueError(f"--teacher_ranks {teachers}: a node of this job has {size} ranks, and at least one "
                         "is for the student; start more or leave the flag out")
    store = next(dist.rendezvous("env://", timeout=LOADING))[0]
    (node, local), students = divmod(rank, size), size - teachers
    role = "student" if local < students else "teacher"
    local, own = (local, students) if role == "student" else (local - students, teachers)
    environ |= {"RANK": str(node * own + local), "WORLD_SIZE": str(world // size * own),
                "LOCAL_SIZE": str(own)}
    dist.init_process_group(get_accelerator().communication_backend_name(), rank=node * own + local,
                            world_size=world // size * own, store=dist.PrefixStore(role, store),
                            timeout=LOADING)
    return Roles(role, node, local, students, teachers, dist.PrefixStore("job", store))


def gather(value, roles=None, key=""):
    """[value of every rank], the same on all ranks of the job, those of the other world included.

    Args:
        roles: Roles, or None where there is one world.
        key: names this call among all of them in a job of two worlds.
    """
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if roles is None:
        return values
    both = [values, None]
    if dist.get_rank() == 0:
        other = {"student": "teacher", "teacher": "student"}[roles.role]
        roles.store.set(f"{key} of {roles.role}", pickle.dumps(values))
        both[1] = pickle.loads(roles.store.get(f"{key} of {other}"))
        roles.store.set(f"{key} read by {roles.role}", "")
        roles.store.wait([f"{key} read by {other}"])  # the store may end with the process that holds it
    dist.broadcast_object_list(both)
    return sum(both if roles.role == "student" else both[::-1], [])


def teacher_groups(world, node, degree):
    """Ranks of every replica of a teacher.

    Args:
        world: ranks in all.
        node: ranks per node.
        degree: ranks that hold one teacher together, 1 or more.
    Returns:
        list of lists of `degree` neighboring ranks; every rank is in one.
    Raises:
        ValueError: `degree` does not divide the ranks of a node, or nodes differ.

    >>> teacher_groups(4, 4, 2)
    [[0, 1], [2, 3]]
    """
    if world % node:
        raise ValueError(f"{world} ranks on nodes of {node}: expected as many ranks on every node")
    if node % degree:
        possible = ", ".join(str(n) for n in range(1, node + 1) if node % n == 0)
        raise ValueError(f"--teacher_tp {degree}: does not divide the {node} ranks of a node that hold "
                         f"teachers, and none is on several nodes; use one of {possible}")
    return [list(range(first, first + degree)) for first in range(0, world, degree)]


class Replica:
    """The ranks that hold one teacher together, this one among them; to DeepSpeed an `mpu`."""

    def __init__(self, degree):
        """All ranks take part.

        Raises:
            ValueError: of `teacher_groups`.
        """
        for ranks in teacher_groups(dist.get_world_size(), node_size(), degree):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.ranks, self.group = ranks, group

    def of_each(self, run, ids_BT, alike=1):
        """run(ids_BT) for this rank's ids, where a run takes all ranks of the replica.

        Args:
            ids_BT: (B, T) or (2, B, T) int64; every rank has its own, of its own shape.
            alike: neighboring ranks that have the same, counted from rank 0 of the job.
        """
        alike = math.gcd(alike, len(self.ranks))  # groups of either kind are blocks of neighbors
        shape = torch.tensor(ids_BT.shape, device=ids_BT.device)
        shapes = [torch.empty_like(shape) for _ in self.ranks]
        dist.all_gather(shapes, shape, group=self.group)
        mine = None
        for owner, shape in list(zip(self.ranks, shapes))[::alike]:
            rank = dist.get_rank()
            ids = ids_BT.contiguous() if owner == rank else ids_BT.new_empty(shape.tolist())
            dist.broadcast(ids, owner, group=self.group)
            found = run(ids)
            mine = found if owner <= rank < owner + alike else mine
        return mine

    def get_model_parallel_group(self):
        return self.group

    def get_model_parallel_world_size(self):
        return len(self.ranks)

    def get_model_parallel_rank(self):
        return self.ranks.index(dist.get_rank())

    def get_data_parallel_group(self):
        return None
