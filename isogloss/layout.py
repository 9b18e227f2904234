"""Decide which ranks hold which shard of a teacher, and whose samples they read.

A teacher of degree N is sharded over N neighboring ranks of one node.  Every group of N ranks holds
a whole teacher (a replica) and runs the samples of its own ranks, one rank's after the other.  So
the student's layout is free, and no teacher tensor leaves a node.

`--teacher_ranks` dedicates the last ranks of every node to the teachers.  Then student and teachers
are two worlds (`split_ranks`), each with a process group of its own, and code that counts ranks
sees only its own world.

Tests: tests/test_layouts.py, tests/test_distributed.py.
"""

import math
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from isogloss.rendezvous import LOADING_TIMEOUT, job_store, read_value, write_value


def node_size():
    """Return the number of ranks on this node; without a launcher, of the whole job."""
    # DeepSpeed's launcher sets the first, torchrun the second.
    stated = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(stated or dist.get_world_size())


def is_last_stage(pipeline_parallel):
    """Tell whether this rank is the last one of its pipeline, which computes the loss."""
    return dist.get_rank() % pipeline_parallel == pipeline_parallel - 1


# --- ranks for teachers alone ---------------------------------------------------------------------


class Roles(NamedTuple):
    """This rank's role in a job whose nodes have ranks for teachers alone.

    role: "student" or "teacher".
    node: index of this rank's node, from 0.
    local_rank: index among the node's ranks of the same role, from 0.
    student_ranks, teacher_ranks: ranks of either role on every node.
    store: key-value store of the whole job, both worlds.
    """

    role: str
    node: int
    local_rank: int
    student_ranks: int
    teacher_ranks: int
    store: dist.Store

    def publish(self, key, value):
        """Publish what JSON can express for the other ranks of this node, of either role."""
        write_value(self.store, f"node {self.node}: {key}", value)

    def read(self, key):
        """Wait until a rank of this node has published a value, and return it."""
        return read_value(self.store, f"node {self.node}: {key}")


def split_ranks(teacher_ranks):
    """Split the job into two worlds: the last `teacher_ranks` ranks of every node, and the others.

    Call it before anything joins a process group.  It sets RANK, WORLD_SIZE and LOCAL_SIZE of the
    environment to those of this rank's world, whose process group `start_distributed` joins then.

    Returns:
        Roles.
    Raises:
        ValueError: a node has no rank left for the student; or see `job_store`.
    """
    environ = os.environ
    job_rank = int(environ.get("RANK", 0))
    job_size = int(environ.get("WORLD_SIZE", 1))
    # node_size() cannot be used here: there is no process group to ask yet.
    ranks_per_node = int(environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE") or job_size)
    if teacher_ranks >= ranks_per_node:
        raise ValueError(
            f"--teacher_ranks {teacher_ranks}: a node of this job has {ranks_per_node} ranks, and "
            "at least one is for the student; start more ranks or leave the flag out"
        )
    store = job_store()
    node, local_rank = divmod(job_rank, ranks_per_node)
    student_ranks = ranks_per_node - teacher_ranks
    role = "student"
    ranks_of_role = student_ranks
    if local_rank >= student_ranks:
        role = "teacher"
        ranks_of_role = teacher_ranks
        local_rank -= student_ranks

    rank = node * ranks_of_role + local_rank
    world_size = job_size // ranks_per_node * ranks_of_role
    environ["RANK"] = str(rank)
    environ["WORLD_SIZE"] = str(world_size)
    environ["LOCAL_SIZE"] = str(ranks_of_role)
    both_worlds = dist.PrefixStore("job", store)
    return Roles(role, node, local_rank, student_ranks, teacher_ranks, both_worlds)


def place_in_job(roles=None):
    """Return (number of this rank in the job, ranks of the job): the student's ranks come first.

    Args:
        roles: Roles; None: there is one world, or only this one counts.
    """
    # There may be no process group yet.
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if roles is None:
        return rank, world_size
    ranks_of_role = roles.student_ranks if roles.role == "student" else roles.teacher_ranks
    nodes = world_size // ranks_of_role
    if roles.role == "teacher":
        rank += nodes * roles.student_ranks
    return rank, nodes * (roles.student_ranks + roles.teacher_ranks)


# --- replicas of a teacher ------------------------------------------------------------------------


def teacher_groups(world, node, degree):
    """Return the ranks of every replica of a teacher.

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
        raise ValueError(
            f"{world} ranks on nodes of {node}: expected the same number of ranks on every node; "
            "start as many on each"
        )
    if node % degree:
        possible = ", ".join(str(n) for n in range(1, node + 1) if node % n == 0)
        raise ValueError(
            f"--teacher_tp {degree}: does not divide the {node} ranks of a node that hold "
            f"teachers, and a teacher cannot span nodes; use one of {possible}"
        )
    return [list(range(first, first + degree)) for first in range(0, world, degree)]


class Replica:
    """Join the ranks that hold one teacher together; DeepSpeed takes a replica as `mpu`.

    Attributes:
        ranks: list of neighboring ranks.
        group: their process group.
    """

    def __init__(self, degree):
        """Create the groups of all replicas; all ranks take part.

        Raises:
            ValueError: see `teacher_groups`.
        """
        # new_group is collective: every rank has to create every group, in the same order.
        for ranks in teacher_groups(dist.get_world_size(), node_size(), degree):
            group = dist.new_group(ranks, timeout=LOADING_TIMEOUT)
            if dist.get_rank() in ranks:
                self.ranks = ranks
                self.group = group

    def run_for_each_member(self, run, ids_BT, sequence_parallel_size=1):
        """Return run(ids_BT) for this rank's ids, where a run takes all ranks of the replica.

        The replica runs the ids of one member after the other.  Members of one sequence group have
        the same ids, which are run once.

        Args:
            run: ids -> output; collective over the replica.
            ids_BT: (B, T) or (2, B, T) int64; values and shape differ from rank to rank.
            sequence_parallel_size: neighboring ranks with the same ids, counted from rank 0 of the
                job.
        """
        # Replicas and sequence groups are both aligned blocks of neighbors, so their intersections
        # are, too, and have this size.
        num_sharing = math.gcd(sequence_parallel_size, len(self.ranks))
        # A broadcast needs buffers of the sender's shape, so shapes go ahead.
        shape = torch.tensor(ids_BT.shape, device=ids_BT.device)
        shapes = [torch.empty_like(shape) for _ in self.ranks]
        dist.all_gather(shapes, shape, group=self.group)
        this_rank = dist.get_rank()
        local_output = None
        for member in range(0, len(self.ranks), num_sharing):
            sender = self.ranks[member]
            if sender == this_rank:
                ids = ids_BT.contiguous()
            else:
                ids = ids_BT.new_empty(shapes[member].tolist())
            dist.broadcast(ids, sender, group=self.group)
            output = run(ids)
            if sender <= this_rank < sender + num_sharing:
                local_output = output
        return local_output

    # DeepSpeed's inference engine calls these.

    def get_model_parallel_group(self):
        return self.group

    def get_model_parallel_world_size(self):
        return len(self.ranks)

    def get_model_parallel_rank(self):
        return self.ranks.index(dist.get_rank())

    def get_data_parallel_group(self):
        return None
