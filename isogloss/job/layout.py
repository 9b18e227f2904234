"""Decide which ranks hold which shard of a teacher, and whose samples they read.

A teacher of degree N is sharded over N neighboring ranks of one node.  Every group of N ranks holds
a whole teacher (a replica) and runs the samples of its own ranks, those of several ranks at once.
So the student's layout is free, and no teacher tensor leaves a node.

`--teacher_ranks` dedicates the last ranks of every node to the teachers.  Then student and teachers
are two worlds (roles.py), each with a process group of its own, and code that counts ranks sees
only its own world.

Tests: tests/test_layouts.py, tests/test_distributed.py.
"""

import os

import torch.distributed as dist


def node_size():
    """Return the number of ranks on this node; without a launcher, of the whole job."""
    # DeepSpeed's launcher sets the first, torchrun the second.
    stated = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(stated or dist.get_world_size())


def is_last_stage(pipeline_parallel):
    """Tell whether this rank is the last one of its pipeline, which computes the loss."""
    return dist.get_rank() % pipeline_parallel == pipeline_parallel - 1


# --- ranks for teachers alone ---------------------------------------------------------------------


def place_in_job(roles=None):
    """Return (number of this rank in the job, ranks of the job): the student's ranks come first.

    Args:
        roles: `roles.Roles`; None: there is one world, or only this one counts.
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
        raise ValueError(f"{world} ranks on nodes of {node}: expected the same number of ranks on "
                         "every node; start as many on each")
    if node % degree:
        possible = ", ".join(str(n) for n in range(1, node + 1) if node % n == 0)
        raise ValueError(f"--teacher_tp {degree}: does not divide the {node} ranks of a node that "
                         f"hold teachers, and a teacher cannot span nodes; use one of {possible}")
    return [list(range(first, first + degree)) for first in range(0, world, degree)]
