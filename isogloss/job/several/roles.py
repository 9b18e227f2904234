"""Split the ranks of a job into two worlds, the student's and its teachers', see layout.py.

Tests: tests/test_layouts.py.
"""

import os
from typing import NamedTuple

import torch.distributed as dist

from isogloss.job.rendezvous import job_store
from isogloss.job.several.values import read_value, write_value


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
        write_value(self.store, f"node {self.node}: {key}", value)

    def read(self, key):
        """Wait until a rank of this node has published a value, and return it."""
        return read_value(self.store, f"node {self.node}: {key}")


def check_teacher_ranks(teacher_ranks, ranks_per_node):
    """Raise a ValueError where a node has no rank left for the student."""
    if teacher_ranks >= ranks_per_node:
        raise ValueError(f"--teacher_ranks {teacher_ranks}: a node of this job has "
                         f"{ranks_per_node} ranks, and at least one is for the student; start more "
                         "ranks or leave the flag out")


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
    check_teacher_ranks(teacher_ranks, ranks_per_node)
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
